/* Sixteen floats at a time, on any processor: the compiler splits a vector where its registers are shorter. Sums over
   vectors are in another order than sums over numbers, so nothing here is used where formats must give torch's bits. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16 };

#ifdef __AVX512F__
#include <immintrin.h>
typedef __m512 Vector;
#else
typedef float Vector __attribute__((vector_size(64)));
#endif
typedef uint32_t Whole __attribute__((vector_size(64)));

static inline int64_t whole_vectors(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

static inline Vector get(const float *from) {
    Vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline void put(float *to, Vector v) { memcpy(to, &v, sizeof v); }

static inline Vector all(float x) {
#ifdef __AVX512F__
    return _mm512_set1_ps(x);
#else
    return (Vector){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#endif
}

/* v in a register: compilers would read it from memory again at each use, and the processor reads one a cycle. */
static inline Vector kept(Vector v) {
#ifdef __AVX512F__
    __asm__("" : "+v"(v));
#endif
    return v;
}

/* a b + c, rounded once where the processor can. */
static inline Vector madd(Vector a, Vector b, Vector c) {
#ifdef __AVX512F__
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FP_FAST_FMAF)
    Vector v;
    for (int i = 0; i < LANES; i++) v[i] = fmaf(a[i], b[i], c[i]);
    return v;
#else
    return a * b + c;
#endif
}

static inline float sum(Vector v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps(v);
#else
    float x[LANES];
    memcpy(x, &v, sizeof v);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) x[i] += x[i + n];
    return x[0];
#endif
}

/* The sums of sixteen vectors. */
static inline Vector sums_of_rows(const Vector *rows) {
#ifdef __AVX512F__
    Vector pair[8], four[4], two[2];
    for (int i = 0; i < 8; i++)
        pair[i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]) + _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    for (int i = 0; i < 4; i++)
        four[i] = _mm512_shuffle_ps(pair[2 * i], pair[2 * i + 1], 0x44) + _mm512_shuffle_ps(pair[2 * i], pair[2 * i + 1], 0xee);
    for (int i = 0; i < 2; i++)
        two[i] = _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x44) + _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xee);
    return _mm512_shuffle_f32x4(two[0], two[1], 0x88) + _mm512_shuffle_f32x4(two[0], two[1], 0xdd);
#else
    float sums[LANES];
    for (int i = 0; i < LANES; i++) sums[i] = sum(rows[i]);
    return get(sums);
#endif
}

/* v where the mask is set, else 0. */
static inline Vector where(Whole mask, Vector v) { return (Vector)(mask & (Whole)v); }

/* e^x for x <= 0: 2^n times a polynomial on [-1/2, 1/2]; about one unit in the last place. Below the smallest normal
   number it is 0, which also keeps slow denormals away. NaN stays NaN. */
static inline Vector exp_of(Vector x) {
    Vector shifted = madd(x, all(1.44269504f), all(0x1.8p23f + 127)); /* n + 127 in the lowest bits */
    Vector n = shifted - all(0x1.8p23f + 127);
    Vector r = madd(n, all(-0.693145752f), x);
    r = madd(n, all(-1.42860677e-6f), r);
    Vector y = all(1.98756915e-4f);
    y = madd(y, r, all(1.39819994e-3f));
    y = madd(y, r, all(8.33345205e-3f));
    y = madd(y, r, all(4.16657962e-2f));
    y = madd(y, r, all(1.66666657e-1f));
    y = madd(y, r, all(0.5f));
    y = madd(y * r, r, r) + all(1);
    Vector power = (Vector)((Whole)shifted << 23);
    return where((Whole)~(x < all(-87)), y * power);
}

/* -|v| */
static inline Vector negated_size(Vector v) { return (Vector)((Whole)v | (Whole)all(-0.0f)); }

/* Over vectors of whole length. */
static inline float dot(const float *a, const float *b, int64_t width) {
    Vector v = all(0);
    for (int64_t c = 0; c < width; c += LANES) v = madd(get(a + c), get(b + c), v);
    return sum(v);
}

static inline void add_scaled(float *restrict to, const float *restrict x, float scale, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = MADD(scale, x[i], to[i]);
}
