/* The step and the fold on the CPU.

   One call handles a range of work items; an item is one group of one row, so that what the heads of a group share is
   computed once. Only live entries are read. Letters as in the mathematics page: H heads, G groups, P head_dim,
   K state_dim, T tokens of a row, E committed entries. Arithmetic is float32.

   The step is the closed form: the state is read once, for all probes of all tokens. The fold of the delta rule is the
   recurrence itself, token by token, on a few rows of the state at a time: they stay in the first-level cache, and the
   error is that of the conventional recurrence. Where nothing depends on the state, it is one sum over the tokens. */

#include "cpu_formats.h"
#include "cpu_fused.h"

#include <stdlib.h>

enum { BLOCK = 4 };  /* rows of the state together: independent sums hide the latency of the additions */
enum { FOLDED = 8 }; /* rows of the state that a fold takes through all tokens: four sums at a time, one after the other */
enum { AHEAD = 4096 }; /* bytes of the state to ask for in advance: four rows at once confuse the hardware's guess */

typedef struct {
    int32_t type;
    Pool codes, scale, head_scale; /* those that the type has */
} Stored;

typedef struct {
    int64_t heads, groups, head_dim, state_dim, window;
    int32_t channel, delta; /* decay per channel; delta rule */
    int32_t activation_type, written_type;
    Stored state;
    Pool key, value, weight, decay, key_scale, written, extra; /* decay and the last three may be absent */
    const int64_t *slots, *length;                             /* [rows] */
} Layer;

typedef struct {
    const int64_t *start, *count; /* [rows] a row's tokens */
    const int64_t *parents;       /* [N] row-local, or NULL for chains */
    const float *q, *k;           /* [N, G, K] scaled */
    const float *g;               /* [N, H] or [N, H, K], or NULL */
    const float *beta;            /* [N, H] */
    const float *scale;           /* [N, G] or NULL */
    const char *raw_k, *raw_v;    /* [N, G, K], [N, H, P] activations */
    char *out;                    /* [N, H, P] activations */
} Tokens;

/* Where a fold goes: row r's state to place ``places[r]`` of ``target``, and encoded to ``copy`` if that has data. */
typedef struct {
    Stored target, copy;
    const int64_t *places;
    const int64_t *keys; /* [rows] of the random bits; NULL rounds to the nearest */
} Goal;

/* e^x for x <= 0, in a form that compilers vectorise: 2^n times a polynomial on [-1/2, 1/2]; about one unit in the last
   place. Below the smallest normal number it is 0, which also keeps slow denormals away. NaN stays NaN. */
static inline float decay_exp(float x) {
    float clamped = x < -87.0f ? -87.0f : x;
    float n = rintf(clamped * 1.44269504f);
    float r = fmaf(n, -0.693145752f, clamped);
    r = fmaf(n, -1.42860677e-6f, r);
    float y = 1.98756915e-4f;
    y = fmaf(y, r, 1.39819994e-3f);
    y = fmaf(y, r, 8.33345205e-3f);
    y = fmaf(y, r, 4.16657962e-2f);
    y = fmaf(y, r, 1.66666657e-1f);
    y = fmaf(y, r, 0.5f);
    y = fmaf(y * r, r, r) + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return x < -87.0f ? 0.0f : x == x ? y * power : x;
}

static inline void prefetch(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + AHEAD + i);
}

static inline float dot(const float *restrict a, const float *restrict b, int64_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum = MADD(a[i], b[i], sum);
    return sum;
}

static inline void dot_pair(const float *restrict a, const float *restrict x, const float *restrict y, float *first,
                            float *second, int64_t n) {
    float p = 0, q = 0;
#pragma omp simd reduction(+ : p, q)
    for (int64_t i = 0; i < n; i++) {
        p = MADD(a[i], x[i], p);
        q = MADD(a[i], y[i], q);
    }
    *first = p, *second = q;
}

static inline void add_scaled(float *restrict to, const float *restrict x, float scale, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = MADD(scale, x[i], to[i]);
}

static inline char *entry(const Pool *pool, int64_t slot, int64_t first, int64_t width, int type) {
    return pool->data + slot * pool->stride + size_of(type, first * width);
}

static inline Head head_of(const Stored *s, int64_t slot, int64_t head, int64_t P, int64_t K) {
    int64_t scales = row_scaled(s->type) ? 4 * P : P * padded(K) / SCALED_BLOCK;
    return (Head){s->codes.data + slot * s->codes.stride + head * P * size_of(s->type, K),
                  s->scale.data + slot * s->scale.stride + head * scales,
                  (float *)(s->head_scale.data + slot * s->head_scale.stride) + head, s->type};
}

/* The value that token j of a head wrote. */
static void load_written(float *to, const Layer *l, int64_t slot, int64_t place) {
    int64_t P = l->head_dim;
    int type = l->written_type, plain = type == F16_SCALED ? F16 : type == BF16X2 ? BF16 : type;
    load(to, entry(&l->written, slot, place, P, type), plain, P);
    if (type == F16_SCALED) {
        float scale = *(float *)entry(&l->extra, slot, place, 1, F32);
        for (int64_t p = 0; p < P; p++) to[p] *= scale;
    } else if (type == BF16X2) {
        const uint16_t *low = (const uint16_t *)entry(&l->extra, slot, place, P, BF16);
        for (int64_t p = 0; p < P; p++) to[p] += bf16_to_float(low[p]);
    }
}

static void store_written(const Layer *l, int64_t slot, int64_t place, const float *u) {
    int64_t P = l->head_dim;
    char *to = entry(&l->written, slot, place, P, l->written_type);
    if (l->written_type == F16_SCALED) {
        float scale = power_scale(u, P), inverse = 1 / scale;
        *(float *)entry(&l->extra, slot, place, 1, F32) = scale;
        for (int64_t p = 0; p < P; p++) ((uint16_t *)to)[p] = float_to_f16(u[p] * inverse);
    } else if (l->written_type == BF16X2) {
        uint16_t *high = (uint16_t *)to, *low = (uint16_t *)entry(&l->extra, slot, place, P, BF16);
        for (int64_t p = 0; p < P; p++) {
            high[p] = float_to_bf16(u[p]);
            low[p] = float_to_bf16(u[p] - bf16_to_float(high[p]));
        }
    } else {
        store(to, u, l->written_type, P, NULL);
    }
}

/* The committed keys of a group, scaled: [E, K]. */
static void load_keys(float *keys, const Layer *l, int64_t slot, int64_t group, int64_t entries) {
    int64_t K = l->state_dim, W = l->window;
    load(keys, entry(&l->key, slot, group * W, K, l->activation_type), l->activation_type, entries * K);
    if (!l->key_scale.data) return;
    const float *scale = (const float *)entry(&l->key_scale, slot, group * W, 1, F32);
    for (int64_t j = 0; j < entries; j++)
        for (int64_t c = 0; c < K; c++) keys[j * K + c] *= scale[j];
}

/* out[n, p] = <S_p, x_n> for N probes, over one head's state. Row scales are applied to the sums. */
static void read_state(float *out, const Head *h, const float *probes, int64_t count, int64_t P, int64_t K,
                       float *scratch) {
    if (read_fused(out, h, probes, count, P, K, scratch)) return;
    if (h->type == F32 && count <= 2) { /* row after row, one stream: the hardware sees it and fetches ahead */
        const float *rows = (const float *)h->codes;
        for (int64_t p = 0; p < P && count == 1; p++) out[p] = dot(rows + p * K, probes, K);
        for (int64_t p = 0; p < P && count == 2; p++) dot_pair(rows + p * K, probes, probes + K, out + p, out + P + p, K);
        return;
    }
    int64_t bytes = size_of(h->type, K);
    for (int64_t p = 0; p < P; p += BLOCK) {
        int64_t rows = P - p < BLOCK ? P - p : BLOCK;
        const float *block = (const float *)(h->codes + p * bytes);
        prefetch(h->codes + p * bytes, rows * bytes);
        if (h->type != F32) {
            load_codes(scratch, h, p, rows, K);
            block = scratch;
        }
        for (int64_t n = 0; n < count; n++) {
            const float *restrict x = probes + n * K;
            float *to = out + n * P + p;
            if (rows == BLOCK) {
                const float *restrict s0 = block, *restrict s1 = block + K, *restrict s2 = block + 2 * K,
                            *restrict s3 = block + 3 * K;
                float a0 = 0, a1 = 0, a2 = 0, a3 = 0;
#pragma omp simd reduction(+ : a0, a1, a2, a3)
                for (int64_t c = 0; c < K; c++) {
                    a0 = MADD(s0[c], x[c], a0);
                    a1 = MADD(s1[c], x[c], a1);
                    a2 = MADD(s2[c], x[c], a2);
                    a3 = MADD(s3[c], x[c], a3);
                }
                to[0] = a0, to[1] = a1, to[2] = a2, to[3] = a3;
            } else {
                for (int64_t r = 0; r < rows; r++) to[r] = dot(block + r * K, x, K);
            }
            for (int64_t r = 0; row_scaled(h->type) && r < rows; r++) to[r] *= row_scale(h, p + r);
        }
    }
}

/* Work space of one head of one row. Vectors over K only where the decay is per channel; else of length 1 ("D"). */
typedef struct {
    float *keys;    /* [E, K] committed keys of the group */
    float *probes;  /* [2T, K] q, then k */
    float *along;   /* [T, D] path sums of g */
    float *since;   /* [D] running suffix sum */
    float *scores;  /* [2T, E] */
    float *seen;    /* [2T, P] */
    float *u;       /* [T, P] */
    float *decayed; /* [2T, K] */
    float *line;    /* [max(P, BLOCK * K + 32)] */
    float *between; /* [D] */
} Space;

static inline int64_t parent_of(const Tokens *t, int64_t start, int64_t i) {
    return t->parents ? t->parents[start + i] : i - 1;
}

/* along[i] = sum of g over token i's path from the root. */
static void path_sums(const Space *s, const Layer *l, const Tokens *t, int64_t start, int64_t count, int64_t head) {
    int64_t D = l->channel ? l->state_dim : 1;
    for (int64_t i = 0; i < count; i++) {
        int64_t parent = parent_of(t, start, i);
        for (int64_t c = 0; c < D; c++) {
            float before = parent < 0 ? 0 : s->along[parent * D + c];
            s->along[i * D + c] = before + (t->g ? t->g[((start + i) * l->heads + head) * D + c] : 0);
        }
    }
}

/* Both scores of a plain decode, and the entry's own decay onto the sum: one pass, nothing stored in between. */
static inline void score_pair(const float *restrict key, float *restrict since, const float *restrict g,
                              const float *restrict x, const float *restrict y, float *first, float *second,
                              int64_t K) {
    float a = 0, b = 0;
#pragma omp simd reduction(+ : a, b)
    for (int64_t c = 0; c < K; c++) {
        float k = key[c] * decay_exp(since[c]);
        a += k * x[c];
        b += k * y[c];
        since[c] += g[c];
    }
    *first = a, *second = b;
}

/* scores[n, j] = <k_j e^(c_i - c_j), x_n>: the exponent is what came after entry j plus token i's path. Leaves in
   ``since`` the sum of all committed decays. */
static void score_entries(const Space *s, const Layer *l, int64_t slot, int64_t head, int64_t entries, int64_t count,
                          int64_t probes, const float *plain) {
    int64_t K = l->state_dim, D = l->channel ? K : 1;
    const float *g = l->decay.data ? (const float *)entry(&l->decay, slot, head * l->window, D, F32) : NULL;
    memset(s->since, 0, D * sizeof(float));
    if (l->channel)
        for (int64_t n = 0; n < probes; n++)
            for (int64_t c = 0; c < K; c++)
                s->decayed[n * K + c] = s->probes[n * K + c] * decay_exp(s->along[(n % count) * K + c]);
    for (int64_t j = entries - 1; j >= 0; j--) {
        if (l->channel && probes == 2) {
            score_pair(s->keys + j * K, s->since, g + j * K, s->decayed, s->decayed + K, s->scores + j,
                       s->scores + entries + j, K);
            continue;
        }
        if (l->channel) {
            for (int64_t c = 0; c < K; c++) s->line[c] = s->keys[j * K + c] * decay_exp(s->since[c]);
            for (int64_t n = 0; n < probes; n++) s->scores[n * entries + j] = dot(s->line, s->decayed + n * K, K);
        } else {
            for (int64_t n = 0; n < probes; n++)
                s->scores[n * entries + j] = plain[n * entries + j] * decay_exp(s->since[0] + s->along[n % count]);
        }
        if (g)
            for (int64_t c = 0; c < D; c++) s->since[c] += g[j * D + c];
    }
}

/* seen[n] = read(x_n): the checkpoint's part and the committed entries'. */
static void see(const Space *s, const Layer *l, int64_t slot, int64_t head, int64_t entries, int64_t count,
                int64_t probes) {
    int64_t K = l->state_dim, P = l->head_dim;
    Head state = head_of(&l->state, slot, head, P, K);
    if (l->channel) {
        for (int64_t n = 0; n < probes; n++)
            for (int64_t c = 0; c < K; c++)
                s->decayed[n * K + c] = s->probes[n * K + c] * decay_exp(s->since[c] + s->along[(n % count) * K + c]);
        read_state(s->seen, &state, s->decayed, probes, P, K, s->line);
    } else {
        read_state(s->seen, &state, s->probes, probes, P, K, s->line);
        for (int64_t n = 0; n < probes; n++) {
            float decay = decay_exp(s->since[0] + s->along[n % count]);
            for (int64_t p = 0; p < P; p++) s->seen[n * P + p] *= decay;
        }
    }
    const float *weight = (const float *)entry(&l->weight, slot, head * l->window, 1, F32);
    for (int64_t j = 0; j < entries; j++) {
        int64_t place = head * l->window + j;
        const float *u = s->line;
        if (l->delta && l->written_type == F32) /* as they are: no copy */
            u = (const float *)entry(&l->written, slot, place, P, F32);
        else if (l->delta)
            load_written(s->line, l, slot, place);
        else
            load(s->line, entry(&l->value, slot, place, P, l->activation_type), l->activation_type, P);
        float scale = l->delta ? 1 : weight[j];
        for (int64_t n = 0; n < probes; n++)
            add_scaled(s->seen + n * P, u, scale * s->scores[n * entries + j], P);
    }
}

/* Walk from token i to the root. For each ancestor j: seen[i] += u_j <k_j e^(c_i - c_j), x>, with x the query or, if
   ``strict``, the key (then the token itself is left out). */
static void see_drafts(const Space *s, const Layer *l, const Tokens *t, int64_t start, int64_t i, int64_t head,
                       const float *x, const float *keys, float *to, float sign, int strict) {
    int64_t K = l->state_dim, P = l->head_dim, D = l->channel ? K : 1;
    memset(s->between, 0, D * sizeof(float));
    for (int64_t j = i; j >= 0; j = parent_of(t, start, j)) {
        if (j != i || !strict) {
            float score;
            if (l->channel) {
                for (int64_t c = 0; c < K; c++) s->line[c] = keys[j * K + c] * decay_exp(s->between[c]);
                score = dot(s->line, x, K);
            } else {
                score = dot(keys + j * K, x, K) * decay_exp(s->between[0]);
            }
            add_scaled(to, s->u + j * P, sign * score, P);
        }
        if (t->g)
            for (int64_t c = 0; c < D; c++) s->between[c] += t->g[((start + j) * l->heads + head) * D + c];
    }
}

static void append(const Layer *l, const Tokens *t, int64_t slot, int64_t place, int64_t token, int64_t head,
                   const float *u) {
    int64_t P = l->head_dim, K = l->state_dim, D = l->channel ? K : 1, W = l->window;
    int64_t bytes = size_of(l->activation_type, 1), group = head / (l->heads / l->groups);
    memcpy(entry(&l->value, slot, head * W + place, P, l->activation_type),
           t->raw_v + (token * l->heads + head) * P * bytes, P * bytes);
    *(float *)entry(&l->weight, slot, head * W + place, 1, F32) = t->beta[token * l->heads + head];
    if (l->decay.data)
        memcpy(entry(&l->decay, slot, head * W + place, D, F32), t->g + (token * l->heads + head) * D,
               D * sizeof(float));
    if (l->delta) store_written(l, slot, head * W + place, u);
    if (head % (l->heads / l->groups)) return; /* keys belong to the group: its first head writes them */
    memcpy(entry(&l->key, slot, group * W + place, K, l->activation_type),
           t->raw_k + (token * l->groups + group) * K * bytes, K * bytes);
    if (l->key_scale.data)
        *(float *)entry(&l->key_scale, slot, group * W + place, 1, F32) = t->scale[token * l->groups + group];
}

static void step_head(const Space *s, const Layer *l, const Tokens *t, int64_t row, int64_t head, const float *plain) {
    int64_t P = l->head_dim, K = l->state_dim, slot = l->slots[row], entries = l->length[row];
    int64_t start = t->start[row], count = t->count[row], probes = l->delta ? 2 * count : count;
    const float *keys = s->probes + count * K;
    path_sums(s, l, t, start, count, head);
    score_entries(s, l, slot, head, entries, count, probes, plain);
    see(s, l, slot, head, entries, count, probes);
    for (int64_t i = 0; i < count; i++) {
        int64_t token = (start + i) * l->heads + head;
        float *u = s->u + i * P;
        load(u, t->raw_v + size_of(l->activation_type, token * P), l->activation_type, P);
        if (l->delta) {
            float *before = s->seen + (count + i) * P;
            see_drafts(s, l, t, start, i, head, keys + i * K, keys, before, 1, 1);
            for (int64_t p = 0; p < P; p++) u[p] -= before[p];
        }
        for (int64_t p = 0; p < P; p++) u[p] *= t->beta[token];
        see_drafts(s, l, t, start, i, head, s->probes + i * K, keys, s->seen + i * P, 1, 0);
        store(t->out + size_of(l->activation_type, token * P), s->seen + i * P, l->activation_type, P, NULL);
        append(l, t, slot, entries + i, start + i, head, u);
    }
}

static float *carve(float **memory, int64_t n) {
    float *piece = *memory;
    *memory += (n + 15) / 16 * 16;
    return piece;
}

/* Work items first..last-1: item i is group i % G of row i / G. Returns 0, or 1 where memory ran out. */
int replay_step(const Layer *l, const Tokens *t, int64_t first, int64_t last) {
    int64_t K = l->state_dim, P = l->head_dim, G = l->groups, D = l->channel ? K : 1, E = 0, T = 0;
    for (int64_t row = first / G; row <= (last - 1) / G; row++) {
        if (l->length[row] > E) E = l->length[row];
        if (t->count[row] > T) T = t->count[row];
    }
    int64_t line = P > BLOCK * K + 32 ? P : BLOCK * K + 32;
    int64_t floats = E * K + 4 * T * K + T * D + 2 * D + 4 * T * E + 3 * T * P + line + 12 * 16;
    float *memory = malloc(floats * sizeof(float)), *rest = memory;
    if (!memory) return 1;
    Space s = {carve(&rest, E * K), carve(&rest, 2 * T * K), carve(&rest, T * D),     carve(&rest, D),
               carve(&rest, 2 * T * E), carve(&rest, 2 * T * P), carve(&rest, T * P), carve(&rest, 2 * T * K),
               carve(&rest, line),  carve(&rest, D)};
    float *plain = carve(&rest, 2 * T * E);
    for (int64_t item = first; item < last; item++) {
        int64_t row = item / G, group = item % G, repeat = l->heads / G, entries = l->length[row];
        int64_t start = t->start[row], count = t->count[row], probes = l->delta ? 2 * count : count;
        load_keys(s.keys, l, l->slots[row], group, entries);
        for (int64_t i = 0; i < count; i++) {
            memcpy(s.probes + i * K, t->q + ((start + i) * G + group) * K, K * sizeof(float));
            memcpy(s.probes + (count + i) * K, t->k + ((start + i) * G + group) * K, K * sizeof(float));
        }
        if (!l->channel)
            for (int64_t n = 0; n < probes; n++)
                for (int64_t j = 0; j < entries; j++)
                    plain[n * entries + j] = dot(s.keys + j * K, s.probes + n * K, K);
        for (int64_t r = 0; r < repeat; r++) step_head(&s, l, t, row, group * repeat + r, plain);
    }
    free(memory);
    return 0;
}

/* One token on four rows s of the state, in one pass: what the token before wrote, this one's decay, and sums = S k.
   ``e`` is a vector over K, or one number where ``each`` is 0. */
static inline void advance_token(float *restrict s, const float *restrict before, const float *restrict u,
                                 const float *restrict e, int64_t each, const float *restrict k, float *restrict sums,
                                 int64_t K) {
    float *restrict s0 = s, *restrict s1 = s + K, *restrict s2 = s + 2 * K, *restrict s3 = s + 3 * K;
    float u0 = u[0], u1 = u[1], u2 = u[2], u3 = u[3], a0 = 0, a1 = 0, a2 = 0, a3 = 0, one = e[0];
#pragma omp simd reduction(+ : a0, a1, a2, a3)
    for (int64_t c = 0; c < K; c++) {
        float decay = each ? e[c] : one;
        float x0 = MADD(u0, before[c], s0[c]) * decay, x1 = MADD(u1, before[c], s1[c]) * decay;
        float x2 = MADD(u2, before[c], s2[c]) * decay, x3 = MADD(u3, before[c], s3[c]) * decay;
        a0 = MADD(x0, k[c], a0), a1 = MADD(x1, k[c], a1), a2 = MADD(x2, k[c], a2), a3 = MADD(x3, k[c], a3);
        s0[c] = x0, s1[c] = x1, s2[c] = x2, s3[c] = x3;
    }
    sums[0] = a0, sums[1] = a1, sums[2] = a2, sums[3] = a3;
}

/* row += sum of u_j k_j over four entries. */
static inline void add_four(float *restrict row, const float *restrict k, const float *restrict u, int64_t K) {
    const float *restrict k0 = k, *restrict k1 = k + K, *restrict k2 = k + 2 * K, *restrict k3 = k + 3 * K;
    float u0 = u[0], u1 = u[1], u2 = u[2], u3 = u[3];
    for (int64_t c = 0; c < K; c++)
        row[c] = MADD(u3, k3[c], MADD(u2, k2[c], MADD(u1, k1[c], MADD(u0, k0[c], row[c]))));
}

/* Where nothing that is written depends on the state ("add"), all tokens at once: S e^c + sum of beta v (k e^(c - c_j)),
   with the decays in ``keys``, ``weight`` and ``total`` already (add_weights). */
static void add_block(float *s, const Layer *l, const float *keys, const float *total, const float *values,
                      const float *weight, int64_t entries, int64_t p, int64_t rows) {
    int64_t K = l->state_dim, P = l->head_dim;
    for (int64_t r = 0; r < rows; r++) {
        float *restrict row = s + r * K, u[4];
        for (int64_t c = 0; c < K; c++) row[c] *= total[l->channel ? c : 0];
        for (int64_t j = 0; j < entries; j += 4) {
            int64_t n = entries - j < 4 ? entries - j : 4;
            for (int64_t i = 0; i < n; i++) u[i] = weight[j + i] * values[(j + i) * P + p + r];
            if (n == 4)
                add_four(row, keys + j * K, u, K);
            else
                for (int64_t i = 0; i < n; i++) add_scaled(row, keys + (j + i) * K, u[i], K);
        }
    }
}

/* What add_block takes: each entry's decay until the last one goes into its weight, or, per channel, into its key. Every
   exponent is a sum over its own segment, from the end. */
static void add_weights(const Layer *l, const float *g, const float *keys, const float *weight, int64_t entries,
                        float *total, float *decayed, float *scaled) {
    int64_t K = l->state_dim, D = l->channel ? K : 1;
    for (int64_t c = 0; c < D; c++) total[c] = 0;
    for (int64_t j = entries - 1; j >= 0; j--) {
        scaled[j] = l->channel ? weight[j] : weight[j] * decay_exp(total[0]);
        for (int64_t c = 0; l->channel && c < K; c++) decayed[j * K + c] = keys[j * K + c] * decay_exp(total[c]);
        for (int64_t c = 0; g && c < D; c++) total[c] += g[j * D + c];
    }
    for (int64_t c = 0; c < D; c++) total[c] = decay_exp(total[c]);
}

/* FOLDED rows p… of the state through all committed entries, one after the other. u = beta (v - S k). */
static void advance_block(float *s, const Layer *l, const float *keys, const float *decays, const float *values,
                          const float *weight, int64_t entries, int64_t p, int64_t rows) {
    int64_t K = l->state_dim, P = l->head_dim;
    float u[FOLDED] = {0}, sums[FOLDED];
    const float *before = keys;
    for (int64_t j = 0; j < entries; j++) {
        const float *k = keys + j * K;
        for (int64_t r = 0; r < rows; r += BLOCK) {
            if (l->channel)
                advance_token(s + r * K, before, u + r, decays + j * K, 1, k, sums + r, K);
            else
                advance_token(s + r * K, before, u + r, decays + j, 0, k, sums + r, K);
        }
        for (int64_t r = 0; r < rows; r++)
            u[r] = weight[j] * (values[j * P + p + r] - sums[r]);
        before = k;
    }
    for (int64_t r = 0; entries && r < rows; r++) add_scaled(s + r * K, before, u[r], K);
}

/* A head's new state to where it belongs. ``rows`` [P, K] is overwritten by what the target holds of it. */
static void put_head(const Goal *goal, const Head *target, float *rows, int64_t row, int64_t head, int64_t P,
                     int64_t K) {
    Rounding rounding = {goal->keys != NULL, goal->keys ? (uint32_t)goal->keys[row] : 0, (uint32_t)(head * P * K)};
    if ((char *)rows != target->codes) encode_head(target, rows, P, K, rounding);
    if (!goal->copy.codes.data) return;
    Head copy = head_of(&goal->copy, goal->places[row], head, P, K);
    if (target->type != F32) load_rows(rows, target, 0, P, K);
    encode_head(&copy, rows, P, K, (Rounding){0});
}

/* The state after the committed entries. Items as in replay_step. The goal may be the checkpoint itself. */
int replay_fold(const Layer *l, const Goal *goal, int64_t first, int64_t last) {
    int64_t K = l->state_dim, P = l->head_dim, G = l->groups, D = l->channel ? K : 1, W = l->window, E = 0;
    for (int64_t row = first / G; row <= (last - 1) / G; row++)
        if (l->length[row] > E) E = l->length[row];
    int64_t floats = E * (K + D + P + 1) + D + FOLDED * K + P * K + 2 * 32 + 7 * 16;
    float *memory = malloc(floats * sizeof(float)), *rest = memory;
    if (!memory) return 1;
    float *keys = carve(&rest, E * K), *decays = carve(&rest, E * D), *values = carve(&rest, E * P);
    float *block = carve(&rest, FOLDED * K + 32), *whole = carve(&rest, P * K + 32);
    float *scaled = carve(&rest, E), *total = carve(&rest, D);
    memset(block, 0, FOLDED * K * sizeof(float));
    for (int64_t item = first; item < last; item++) {
        int64_t row = item / G, group = item % G, repeat = l->heads / G, entries = l->length[row], slot = l->slots[row];
        load_keys(keys, l, slot, group, entries);
        for (int64_t head = group * repeat; head < (group + 1) * repeat; head++) {
            const float *weight = (const float *)entry(&l->weight, slot, head * W, 1, F32);
            const float *g = l->decay.data ? (const float *)entry(&l->decay, slot, head * W, D, F32) : NULL;
            load(values, entry(&l->value, slot, head * W, P, l->activation_type), l->activation_type, entries * P);
            if (l->delta)
                for (int64_t i = 0; i < entries * D; i++) decays[i] = g ? decay_exp(g[i]) : 1;
            else
                add_weights(l, g, keys, weight, entries, total, decays, scaled);
            const float *added = l->channel ? decays : keys;
            Head state = head_of(&l->state, slot, head, P, K);
            Head target = head_of(&goal->target, goal->places[row], head, P, K);
            float *rows_out = target.type == F32 ? (float *)target.codes : whole;
            for (int64_t p = 0; p < P; p += FOLDED) {
                int64_t rows = P - p < FOLDED ? P - p : FOLDED, bytes = size_of(state.type, K);
                prefetch(state.codes + p * bytes, rows * bytes);
                load_rows(block, &state, p, rows, K);
                if (l->delta)
                    advance_block(block, l, keys, decays, values, weight, entries, p, rows);
                else
                    add_block(block, l, added, total, values, scaled, entries, p, rows);
                memcpy(rows_out + p * K, block, rows * K * sizeof(float));
            }
            put_head(goal, &target, rows_out, row, head, P, K);
        }
    }
    free(memory);
    return 0;
}
