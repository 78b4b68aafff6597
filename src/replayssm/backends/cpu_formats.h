/* States in every format of formats.py, decoded to and encoded from float32 rows. Encoding gives the same bits as there:
   every operation is rounded once, in the same order, so the file must be compiled without contraction to FMA and
   without reassociation. Loops are written so that compilers vectorise them. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { F32, BF16, F16, FP8, FP8_E5M2, INT8, INT4, NVFP4, BF16X2, F16_SCALED };
enum { SCALED_BLOCK = 16 };

#ifdef __FP_FAST_FMAF
#define MADD(a, b, c) fmaf(a, b, c)
#else
#define MADD(a, b, c) ((a) * (b) + (c))
#endif

typedef struct {
    char *data;
    int64_t stride; /* bytes from slot to slot */
} Pool;

/* One head of one slot's state: codes [P, row bytes], row or block scales, and the head's scale. */
typedef struct {
    char *codes, *scale;
    float *head;
    int type;
} Head;

/* How an encoder rounds: to the nearest, or with the bits of element index + c of a state. */
typedef struct {
    int stochastic;
    uint32_t key, index;
} Rounding;

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline int64_t padded(int64_t K) { return (K + 31) / 32 * 32; }

/* Bytes of n elements of a row. */
static inline int64_t size_of(int type, int64_t n) {
    return type == F32 ? 4 * n : type == BF16 || type == F16 || type == BF16X2 || type == F16_SCALED ? 2 * n
         : type == INT4 || type == NVFP4 ? padded(n) / 2 : n;
}

static inline int row_scaled(int type) { return type == FP8 || type == FP8_E5M2 || type == INT8; }
static inline int block_scaled(int type) { return type == INT4 || type == NVFP4; }

static inline float top_of(int type) {
    return type == FP8 ? 448 : type == FP8_E5M2 ? 57344 : type == INT8 ? 127 : type == INT4 ? 7 : 6;
}

/* Decoding ------------------------------------------------------------------------------------------------------- */

static inline float bf16_to_float(uint16_t x) { return float_of((uint32_t)x << 16); }

/* Codes without an exponent are denormal: there 2 (1 + m) 2^e - 2^(e+1) = m 2^(e+1). NaN codes are never written. */
static inline float e4m3_to_float(uint8_t c) {
    float y = float_of(((uint32_t)(c & 0x7f) << 20) + (120u << 23));
    y = c & 0x78 ? y : 2 * y - 0x1p-6f;
    return float_of(bits_of(y) | (uint32_t)(c & 0x80) << 24);
}

static inline float e5m2_to_float(uint8_t c) {
    float y = float_of(((uint32_t)(c & 0x7f) << 21) + (112u << 23));
    y = c & 0x7c ? y : 2 * y - 0x1p-14f;
    return float_of(bits_of(y) | (uint32_t)(c & 0x80) << 24);
}

static inline float e2m1_to_float(uint32_t c) {
    float y = float_of(((c & 7) << 22) + (126u << 23));
    y = c & 6 ? y : 2 * y - 1;
    return float_of(bits_of(y) | (c & 8) << 28);
}

static inline float block_scale(uint8_t c, float head) { return c == 0x7f ? NAN : e4m3_to_float(c) * head; }

static void load_f16(float *restrict to, const uint16_t *restrict from, int64_t n) {
    for (int64_t i = 0; i < n; i++) { /* as for e4m3, with infinities and NaN */
        uint32_t c = from[i];
        float y = float_of(((c & 0x7fff) << 13) + (112u << 23));
        y = c & 0x7c00 ? y : 2 * y - 0x1p-14f;
        y = (c & 0x7c00) == 0x7c00 ? float_of(0x7f800000 | (c & 0x3ff) << 13) : y;
        to[i] = float_of(bits_of(y) | (c & 0x8000) << 16);
    }
}

/* n elements of a type without scales, or the codes of a row-scaled type. */
static void load(float *restrict to, const char *restrict from, int type, int64_t n) {
    const uint8_t *c = (const uint8_t *)from;
    switch (type) {
    case F32: memcpy(to, from, n * sizeof(float)); break;
    case F16: load_f16(to, (const uint16_t *)from, n); break;
    case BF16:
        for (int64_t i = 0; i < n; i++) to[i] = bf16_to_float(((const uint16_t *)from)[i]);
        break;
    case INT8:
        for (int64_t i = 0; i < n; i++) to[i] = (float)(int8_t)c[i];
        break;
    case FP8:
        for (int64_t i = 0; i < n; i++) to[i] = e4m3_to_float(c[i]);
        break;
    default:
        for (int64_t i = 0; i < n; i++) to[i] = e5m2_to_float(c[i]);
    }
}

static void load_blocks(float *restrict to, const Head *h, int64_t p, int64_t K) {
    int64_t half = padded(K) / 2, blocks = 2 * half / SCALED_BLOCK;
    const uint8_t *restrict codes = (const uint8_t *)h->codes + p * half;
    const uint8_t *restrict scale = (const uint8_t *)h->scale + p * blocks;
    for (int64_t j = 0; j < blocks / 2; j++) {
        float low = block_scale(scale[j], *h->head), high = block_scale(scale[j + blocks / 2], *h->head);
        const uint8_t *restrict c = codes + j * SCALED_BLOCK;
        float *restrict a = to + j * SCALED_BLOCK, *restrict b = a + half;
        if (h->type == NVFP4)
            for (int i = 0; i < SCALED_BLOCK; i++) {
                a[i] = e2m1_to_float(c[i] & 15u) * low;
                b[i] = e2m1_to_float(c[i] >> 4) * high;
            }
        else
            for (int i = 0; i < SCALED_BLOCK; i++) {
                a[i] = (float)((int)((c[i] & 15u) ^ 8) - 8) * low;
                b[i] = (float)((int)((c[i] >> 4) ^ 8) - 8) * high;
            }
    }
}

/* Rows p… of a head without row scales, [rows, K]. Writes up to 31 floats past the end. */
static void load_codes(float *to, const Head *h, int64_t p, int64_t rows, int64_t K) {
    if (block_scaled(h->type))
        for (int64_t r = 0; r < rows; r++) load_blocks(to + r * K, h, p + r, K);
    else
        load(to, h->codes + size_of(h->type, p * K), h->type, rows * K);
}

static inline float row_scale(const Head *h, int64_t p) {
    return row_scaled(h->type) ? ((const float *)h->scale)[p] : 1;
}

/* Rows p… of a head. */
static void load_rows(float *to, const Head *h, int64_t p, int64_t rows, int64_t K) {
    load_codes(to, h, p, rows, K);
    for (int64_t r = 0; row_scaled(h->type) && r < rows; r++) {
        float scale = row_scale(h, p + r);
        for (int64_t c = 0; c < K; c++) to[r * K + c] *= scale;
    }
}

/* Encoding ------------------------------------------------------------------------------------------------------- */

static inline uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

static inline uint16_t float_to_bf16(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded); /* NaN stays NaN */
}

/* The random numbers of elements first… of a row, as rounding.random_bits has them. */
static void random_chunk(float *restrict u, const Rounding *r, int64_t first, int64_t n) {
    uint32_t key = r->key, index = r->index;
    for (int64_t c = 0; c < n; c++) {
        uint32_t column = (uint32_t)(first + c), word = mix(mix(index + (column & ~32u) + key) ^ key);
        u[c] = (float)(int32_t)(((column & 32 ? word >> 16 : word) & 0xffff) << 8 ^ 0xffffff) * 0x1p-24f;
    }
}

/* A y >= 0, in range, among the floats with so many bits of mantissa and this bias: the code below it without sign, and
   how far it is to the next, in [0, 1). */
static inline uint32_t code_below(float y, int mantissa, int bias, float *fraction) {
    int drop = 23 - mantissa;
    uint32_t bits = bits_of(y), rest = bits & ((1u << drop) - 1);
    uint32_t normal = (bits >> drop) - ((uint32_t)(127 - bias) << mantissa);
    float place = y * float_of((uint32_t)(126 + bias + mantissa) << 23), floor = floorf(place);
    int tiny = y < float_of((uint32_t)(128 - bias) << 23);
    *fraction = tiny ? place - floor : (float)(int32_t)rest * (1.0f / (float)(1u << drop));
    return tiny ? (uint32_t)(int32_t)floor : normal;
}

/* The same, rounded up where the fraction exceeds u. */
static inline uint32_t code_random(float y, float u, int mantissa, int bias) {
    float fraction;
    uint32_t code = code_below(y, mantissa, bias, &fraction);
    return code + (u < fraction ? 1 : 0);
}

/* The same, to the nearest, ties to even. */
static inline uint32_t nearest_code(float y, int mantissa, int bias) {
    int drop = 23 - mantissa;
    uint32_t bits = bits_of(y), half = (1u << (drop - 1)) - 1;
    uint32_t normal = ((bits + half + (bits >> drop & 1)) >> drop) - ((uint32_t)(127 - bias) << mantissa);
    uint32_t tiny = (uint32_t)(int32_t)rintf(y * float_of((uint32_t)(126 + bias + mantissa) << 23));
    return y < float_of((uint32_t)(128 - bias) << 23) ? tiny : normal;
}

static inline uint16_t float_to_f16(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    float y = float_of(size);
    uint32_t code = nearest_code(y < 65520 ? y : 0, 10, 15);
    code = y < 65520 ? code : 0x7c00;
    return (uint16_t)(sign | (size > 0x7f800000 ? 0x7e00 : code));
}

static inline uint16_t f16_random(float x, float u) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    float y = float_of(size);
    uint32_t code = code_random(y < 65504 ? y : 65504, u, 10, 15);
    code = size == 0x7f800000 ? 0x7c00 : code;
    return (uint16_t)(sign | (size > 0x7f800000 ? 0x7e00 : code));
}

static inline uint16_t bf16_random(float x, float u) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    uint32_t kept = size > 0x7f7f0000 ? 0x7f7f0000 : size;
    uint32_t code = (kept >> 16) + (u < (float)(int32_t)(kept & 0xffff) * 0x1p-16f ? 1 : 0);
    return (uint16_t)(size >= 0x7f800000 ? float_to_bf16(x) : sign | code);
}

enum { CHUNK = 64 };

/* n elements in a type without scales. */
static void store(char *to, const float *from, int type, int64_t n, const Rounding *rounding) {
    uint16_t *restrict x = (uint16_t *)to;
    if (type == F32) {
        memcpy(to, from, n * sizeof(float));
    } else if (rounding && rounding->stochastic) {
        for (int64_t first = 0; first < n; first += CHUNK) {
            int64_t count = n - first < CHUNK ? n - first : CHUNK;
            float u[CHUNK];
            random_chunk(u, rounding, first, count);
            if (type == BF16)
                for (int64_t i = 0; i < count; i++) x[first + i] = bf16_random(from[first + i], u[i]);
            else
                for (int64_t i = 0; i < count; i++) x[first + i] = f16_random(from[first + i], u[i]);
        }
    } else if (type == BF16) {
        for (int64_t i = 0; i < n; i++) x[i] = float_to_bf16(from[i]);
    } else {
        for (int64_t i = 0; i < n; i++) x[i] = float_to_f16(from[i]);
    }
}

/* The largest magnitude as bits, or at least those of infinity where one is not finite. */
static inline uint32_t largest_bits(const float *x, int64_t n) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(x[i]) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

static inline float scale_for(uint32_t largest, float top) {
    if (largest >= 0x7f800000) return NAN;
    float scale = float_of(largest) * (float)((1 - 0x1p-22) / (double)top);
    return largest == 0 ? 0 : scale < 0x1p-100f ? 0x1p-100f : scale;
}

static inline float reciprocal(float scale) { return scale > 0 ? 1 / scale : 0; }

/* |x| in units of the scale, at most top; 0 where x is not finite. */
static inline float units(float x, float inverse, float top) {
    uint32_t bits = bits_of(x) & 0x7fffffff;
    float y = float_of(bits) * inverse;
    return bits >= 0x7f800000 ? 0 : y > top ? top : y;
}

/* x, all finite, in units of a scale, to the nearest codes. */
static void nearest_codes(uint8_t *restrict to, const float *restrict x, int64_t n, float inverse, int type) {
    float top = top_of(type);
    if (type == INT8)
        for (int64_t c = 0; c < n; c++) {
            float y = x[c] * inverse;
            y = y > top ? top : y < -top ? -top : y;
            to[c] = (uint8_t)(int8_t)(int32_t)rintf(y);
        }
    else
        for (int64_t c = 0; c < n; c++) {
            uint32_t bits = bits_of(x[c]), sign = bits >> 24 & 0x80;
            float y = float_of(bits & 0x7fffffff) * inverse;
            y = y > top ? top : y;
            to[c] = (uint8_t)(sign | (type == FP8 ? nearest_code(y, 3, 7) : nearest_code(y, 2, 15)));
        }
}

/* The same with random numbers. */
static void random_codes(uint8_t *restrict to, const float *restrict x, const float *restrict u, int64_t n,
                         float inverse, int type) {
    float top = top_of(type);
    if (type == INT8)
        for (int64_t c = 0; c < n; c++) {
            float y = units(x[c], inverse, top), low = floorf(y);
            int32_t size = (int32_t)low + (u[c] < y - low ? 1 : 0);
            to[c] = (uint8_t)(bits_of(x[c]) >> 31 ? -size : size);
        }
    else
        for (int64_t c = 0; c < n; c++) {
            float y = units(x[c], inverse, top);
            uint32_t code = type == FP8 ? code_random(y, u[c], 3, 7) : code_random(y, u[c], 2, 15);
            to[c] = (uint8_t)((bits_of(x[c]) >> 24 & 0x80) | code);
        }
}

/* To the nearest, for a block of four-bit codes, one a byte. The thresholds of e2m1 are the middles, ties to even codes. */
static void nearest_nibbles(uint8_t *restrict to, const float *restrict x, float inverse, int type) {
    float top = top_of(type);
    if (type == NVFP4)
        for (int c = 0; c < SCALED_BLOCK; c++) {
            uint32_t bits = bits_of(x[c]);
            float y = float_of(bits & 0x7fffffff) * inverse;
            uint32_t code = (y > 0.25f) + (y >= 0.75f) + (y > 1.25f) + (y >= 1.75f) + (y > 2.5f) + (y >= 3.5f) + (y > 5);
            to[c] = (uint8_t)(code | bits >> 31 << 3);
        }
    else
        for (int c = 0; c < SCALED_BLOCK; c++) {
            float y = x[c] * inverse;
            y = y > top ? top : y < -top ? -top : y;
            to[c] = (uint8_t)((int32_t)rintf(y) & 15);
        }
}

static void encode_row(const Head *h, int64_t p, const float *restrict x, int64_t K, const Rounding *rounding) {
    float top = top_of(h->type), scale = scale_for(largest_bits(x, K), top), inverse = reciprocal(scale);
    uint8_t *restrict to = (uint8_t *)h->codes + p * K;
    ((float *)h->scale)[p] = scale;
    if (!(scale > 0)) {
        memset(to, 0, K);
        return;
    }
    if (!rounding->stochastic) {
        nearest_codes(to, x, K, inverse, h->type);
        return;
    }
    for (int64_t first = 0; first < K; first += CHUNK) {
        int64_t n = K - first < CHUNK ? K - first : CHUNK;
        float u[CHUNK];
        random_chunk(u, rounding, first, n);
        random_codes(to + first, x + first, u, n, inverse, h->type);
    }
}

/* The e4m3 code of a ratio >= 0, rounded to the nearest, or up. */
static inline uint8_t block_code(float ratio, int up) {
    ratio = up || ratio < 448 ? ratio : 448;
    uint32_t code = nearest_code(ratio < 448 ? ratio : 448, 3, 7);
    return (uint8_t)(up && code < 0x7e && e4m3_to_float((uint8_t)code) < ratio ? code + 1 : code);
}

/* The same with random numbers. */
static void random_nibbles(uint8_t *restrict to, const float *restrict x, const float *restrict u, float inverse,
                           int type) {
    float top = top_of(type);
    for (int c = 0; c < SCALED_BLOCK; c++) {
        float y = units(x[c], inverse, top);
        float place = y < 2 ? 2 * y : y < 4 ? y + 2 : y / 2 + 4; /* the levels of e2m1 are whole numbers here */
        place = type == NVFP4 ? place : y;
        float low = floorf(place);
        int32_t code = (int32_t)low + (u[c] < place - low ? 1 : 0), sign = (int32_t)(bits_of(x[c]) >> 31);
        to[c] = (uint8_t)(type == NVFP4 ? code | sign << 3 : (sign ? -code : code) & 15);
    }
}

static void encode_blocks(const Head *h, int64_t p, const float *x, int64_t K, float factor, const Rounding *rounding) {
    int64_t half = padded(K) / 2, blocks = 2 * half / SCALED_BLOCK;
    uint8_t *codes = (uint8_t *)h->codes + p * half, *scales = (uint8_t *)h->scale + p * blocks;
    memset(codes, 0, half);
    for (int64_t j = 0; j < blocks; j++) {
        int64_t first = j * SCALED_BLOCK, n = K - first < SCALED_BLOCK ? K - first : SCALED_BLOCK;
        float padding[SCALED_BLOCK] = {0};
        const float *block = x + first;
        if (n < SCALED_BLOCK) block = memcpy(padding, block, n > 0 ? n * sizeof(float) : 0);
        uint32_t largest = largest_bits(block, SCALED_BLOCK);
        scales[j] = largest >= 0x7f800000 ? 0x7f : block_code(float_of(largest) * factor, rounding->stochastic);
        float inverse = scales[j] == 0x7f ? 0 : reciprocal(e4m3_to_float(scales[j]) * *h->head);
        if (!(inverse > 0)) continue;
        uint8_t each[SCALED_BLOCK], *to = codes + (first < half ? first : first - half);
        if (!rounding->stochastic) {
            nearest_nibbles(each, block, inverse, h->type);
        } else {
            float u[SCALED_BLOCK];
            random_chunk(u, rounding, first, SCALED_BLOCK);
            random_nibbles(each, block, u, inverse, h->type);
        }
        for (int c = 0; c < SCALED_BLOCK; c++) to[c] |= (uint8_t)(each[c] << (first < half ? 0 : 4));
    }
}

/* A whole head from float32 rows [P, K]. ``rounding.index`` is that of its first element. */
static void encode_head(const Head *h, const float *x, int64_t P, int64_t K, Rounding rounding) {
    float factor = 0;
    if (block_scaled(h->type)) {
        uint32_t largest = 0;
        for (int64_t i = 0; i < P * K; i++) {
            uint32_t bits = bits_of(x[i]) & 0x7fffffff;
            largest = bits > largest && bits < 0x7f800000 ? bits : largest;
        }
        *h->head = scale_for(largest, 448 * top_of(h->type));
        factor = reciprocal(*h->head) * (float)(1 / (double)top_of(h->type));
    }
    for (int64_t p = 0; p < P; p++, x += K, rounding.index += (uint32_t)K) {
        if (block_scaled(h->type))
            encode_blocks(h, p, x, K, factor, &rounding);
        else if (row_scaled(h->type))
            encode_row(h, p, x, K, &rounding);
        else
            store(h->codes + size_of(h->type, p * K), x, h->type, K, &rounding);
    }
}

/* The largest finite magnitude's power of two for float16 with a scale: it comes to 2^14…2^15. */
static float power_scale(const float *x, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(x[i]) & 0x7fffffff;
        largest = bits > largest && bits < 0x7f800000 ? bits : largest;
    }
    int32_t power = (int32_t)(largest >> 23) - 141;
    return largest ? float_of((uint32_t)((power < -100 ? -100 : power) + 127) << 23) : 1;
}
