/* A head's state times one or two probes, decoded in registers: for plain decode on processors with AVX-512, where the
   way through a block of float32 rows (read_state) costs more than the memory does. */

enum { PAGE = 4096 }; /* bytes */

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

/* Sixteen elements from 16 bytes of levels (integers). */
static inline Vector of_bytes(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }

/* Elements c… of a row without block scales. An fp8 code read as a half is 2^8 too small. */
static inline __attribute__((always_inline)) Vector take(const char *row, int64_t c, int type) {
    if (type == INT8) return of_bytes(_mm_loadu_si128((const __m128i *)(row + c)));
    if (type == FP8) {
        __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(row + c))), 7);
        return _mm512_cvtph_ps(_mm256_and_si256(half, _mm256_set1_epi16((short)0xbfff)));
    }
    if (type == FP8_E5M2)
        return _mm512_cvtph_ps(
            _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(row + c))), 8));
    __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)row + c));
    if (type == F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Twice the level of each four-bit code. */
static inline __m128i levels_of(int type) {
    return type == NVFP4 ? _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
                         : _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, -16, -14, -12, -10, -8, -6, -4, -2);
}

/* The sums of four vectors. */
static inline __m128 sums_of(Vector a, Vector b, Vector c, Vector d) {
    Vector ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    Vector cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    Vector all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 low = _mm512_castps512_ps256(all);
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
    __m256 half = _mm256_add_ps(low, high);
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* out[n, p] over rows of whole vectors. ``type`` and ``two`` are constants where this is inlined. */
static inline __attribute__((always_inline)) void fused_rows(float *out, const Head *h, const float *x, int64_t P,
                                                             int64_t K, int type, int two, float *scratch) {
    (void)scratch;
    int64_t bytes = size_of(type, K);
    for (int64_t p = 0; p < P; p += 4) {
        const char *row = h->codes + p * bytes;
        Vector a[4], b[4];
        for (int r = 0; r < 4; r++) a[r] = b[r] = _mm512_setzero_ps();
        /* Long rows are left to the hardware's own guess: asking as well made them slower. */
        for (int64_t i = 0; bytes < 256 && i < 4 * bytes; i += 64) __builtin_prefetch(row + PAGE + i);
        for (int64_t c = 0; c < K; c += LANES) {
            Vector x0 = kept(get(x + c)), x1 = two ? kept(get(x + K + c)) : x0;
            for (int r = 0; r < 4; r++) {
                Vector s = take(row + r * bytes, c, type);
                a[r] = _mm512_fmadd_ps(s, x0, a[r]);
                if (two) b[r] = _mm512_fmadd_ps(s, x1, b[r]);
            }
        }
        __m128 scale = row_scaled(type) ? _mm_loadu_ps((const float *)h->scale + p) : _mm_set1_ps(1);
        if (type == FP8) scale = _mm_mul_ps(scale, _mm_set1_ps(256)); /* see ``take`` */
        _mm_storeu_ps(out + p, _mm_mul_ps(sums_of(a[0], a[1], a[2], a[3]), scale));
        if (two) _mm_storeu_ps(out + P + p, _mm_mul_ps(sums_of(b[0], b[1], b[2], b[3]), scale));
    }
}

/* The same for float32, row after row: one stream of addresses, which the hardware sees and fetches ahead of.
   Asking the second-level cache for the line a page further on made it 5 to 9 per cent faster, other distances less. */
static inline __attribute__((always_inline)) void fused_floats(float *out, const float *s, const float *x, int64_t P,
                                                               int64_t K, int two) {
    for (int64_t p = 0; p < P; p += 4, s += 4 * K) {
        Vector a[4], b[4];
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            __asm__ volatile("" ::: "memory");
            a[r] = b[r] = all(0);
            for (int64_t c = 0; c < K; c += LANES) {
                __builtin_prefetch((const char *)(s + r * K + c) + PAGE, 0, 2);
                Vector own = get(s + r * K + c);
                a[r] = madd(own, get(x + c), a[r]);
                if (two) b[r] = madd(own, get(x + K + c), b[r]);
            }
        }
        _mm_storeu_ps(out + p, sums_of(a[0], a[1], a[2], a[3]));
        if (two) _mm_storeu_ps(out + P + p, sums_of(b[0], b[1], b[2], b[3]));
    }
}

/* The same over four-bit codes: a byte has an element of the row's first half and one of its second half. */
static inline __attribute__((always_inline)) void fused_blocks(float *out, const Head *h, const float *x, int64_t P,
                                                               int64_t K, int type, int two, float *scales) {
    int64_t half = K / 2, blocks = K / SCALED_BLOCK;
    __m128i levels = levels_of(type), mask = _mm_set1_epi8(15);
    for (int64_t p = 0; p < P; p += 4) {
        const uint8_t *row = (const uint8_t *)h->codes + p * half, *scale = (const uint8_t *)h->scale + p * blocks;
        Vector a[4], b[4];
        for (int r = 0; r < 4; r++) a[r] = b[r] = _mm512_setzero_ps();
        for (int64_t i = 0; i < 4 * half; i += 64) __builtin_prefetch(row + PAGE + i);
        for (int64_t j = 0; j < 4 * blocks; j++) scales[j] = 0.5f * block_scale(scale[j], *h->head);
        for (int64_t c = 0; c < half; c += LANES) {
            Vector x0 = kept(get(x + c)), y0 = kept(get(x + half + c));
            Vector x1 = two ? kept(get(x + K + c)) : x0, y1 = two ? kept(get(x + K + half + c)) : y0;
            for (int r = 0; r < 4; r++) {
                __m128i codes = _mm_loadu_si128((const __m128i *)(row + r * half + c));
                __m128i low = _mm_and_si128(codes, mask), high = _mm_and_si128(_mm_srli_epi16(codes, 4), mask);
                const float *by = scales + r * blocks + c / LANES;
                Vector s = _mm512_mul_ps(of_bytes(_mm_shuffle_epi8(levels, low)), _mm512_set1_ps(by[0]));
                Vector t = _mm512_mul_ps(of_bytes(_mm_shuffle_epi8(levels, high)), _mm512_set1_ps(by[blocks / 2]));
                a[r] = _mm512_fmadd_ps(t, y0, _mm512_fmadd_ps(s, x0, a[r]));
                if (two) b[r] = _mm512_fmadd_ps(t, y1, _mm512_fmadd_ps(s, x1, b[r]));
            }
        }
        _mm_storeu_ps(out + p, sums_of(a[0], a[1], a[2], a[3]));
        if (two) _mm_storeu_ps(out + P + p, sums_of(b[0], b[1], b[2], b[3]));
    }
}

/* 1 where it computed out[n, p], 0 where it leaves that to others: other sizes. ``scratch`` has room for four rows' scales. */
static int read_fused(float *out, const Head *h, const float *x, int64_t count, int64_t P, int64_t K, float *scratch) {
    if (count < 1 || count > 2 || P % 4 || K % (block_scaled(h->type) ? 2 * LANES : LANES)) return 0;
    switch (h->type) {
    case F32:
        if (count == 2 && K == 128)
            fused_floats(out, (const float *)h->codes, x, P, 128, 1);
        else if (K == 128)
            fused_floats(out, (const float *)h->codes, x, P, 128, 0);
        else
            fused_floats(out, (const float *)h->codes, x, P, K, count == 2);
        break;
#define CASE(TYPE, CALL)                                                                                               \
    case TYPE:                                                                                                         \
        if (count == 2)                                                                                                \
            CALL(out, h, x, P, K, TYPE, 1, scratch);                                                                   \
        else                                                                                                           \
            CALL(out, h, x, P, K, TYPE, 0, scratch);                                                                   \
        break;
        CASE(BF16, fused_rows)
        CASE(F16, fused_rows)
        CASE(FP8, fused_rows)
        CASE(FP8_E5M2, fused_rows)
        CASE(INT8, fused_rows)
        CASE(INT4, fused_blocks)
        CASE(NVFP4, fused_blocks)
#undef CASE
    }
    return 1;
}
#else
static int read_fused(float *out, const Head *h, const float *x, int64_t count, int64_t P, int64_t K, float *scratch) {
    (void)out, (void)h, (void)x, (void)count, (void)P, (void)K, (void)scratch;
    return 0;
}
#endif

enum { BLOCK = 4 }; /* rows of the state together */

/* Ask the second-level cache for so many bytes. */
static inline __attribute__((always_inline)) void prefetch(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

/* Floats of scratch that read_state needs. */
static inline int64_t read_line(int64_t width) { return BLOCK * width + 32; }

/* out[n, p] = <S_p, x_n> for N probes of whole vectors, over one head's state. Row scales are applied to the sums. */
static void read_state(float *out, const Head *h, const float *probes, int64_t count, int64_t P, int64_t K,
                       float *scratch) {
    if (read_fused(out, h, probes, count, P, K, scratch)) return;
    int64_t bytes = size_of(h->type, K), width = whole_vectors(K);
    for (int64_t p = 0; p < P; p += BLOCK) {
        int64_t rows = P - p < BLOCK ? P - p : BLOCK;
        const float *block = (const float *)(h->codes + p * bytes);
        prefetch(h->codes + p * bytes + PAGE, rows * bytes);
        if (h->type != F32) {
            load_codes(scratch, h, p, rows, K);
            block = scratch;
        }
        for (int64_t n = 0; n < count; n++)
            for (int64_t r = 0; r < rows; r++) {
                const float *restrict s = block + r * K, *restrict x = probes + n * width;
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t c = 0; c < K; c++) sum = MADD(s[c], x[c], sum);
                out[n * P + p + r] = sum * row_scale(h, p + r);
            }
    }
}
