/* The step and the fold (cpu_fold.h) on the CPU.

   One call handles a range of work items; an item is one group of one row, so that what the heads of a group share is
   computed once. Only live entries are read. Letters as in the mathematics page: H heads, G groups, P head_dim,
   K state_dim, T tokens of a row, E committed entries. Arithmetic is float32.

   The step is the closed form: the state is read once, for all probes of all tokens. */

#include "cpu_formats.h"
#include "cpu_vector.h"
#include "cpu_layer.h"
#include "cpu_fused.h"
#include "cpu_fold.h"

typedef struct {
    const int64_t *start, *count; /* [rows] a row's tokens */
    const int64_t *parents;       /* [N] row-local, or NULL for chains */
    const char *q, *k, *v;        /* [N, G, K], [N, G, K], [N, H, P] activations */
    const float *g;               /* [N, H] or [N, H, K] log-decay, or NULL */
    const float *beta;            /* [N, H] */
    const char *gate;             /* [N, H, K] what becomes g by the formula of KdaInputs, or NULL */
    const float *rate, *bias;     /* its [H] exp(A_log) and [H, K] dt_bias */
    char *out;                    /* [N, H, P] activations */
    float bound;                  /* its lower bound; 0 without one */
    int32_t gate_type, unit;      /* unit: q and k are to be normalised, and q scaled by K^-1/2 */
} Tokens;

/* e^x for x <= 0 as exp_of, in a form that compilers vectorise. */
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

/* Work space of one head of one row. Vectors over K only where the decay is per channel; else of length 1 ("D"). */
typedef struct {
    float *keys;    /* [E, width] committed keys of the group */
    float *probes;  /* [2T, width] q, then k */
    float *norms;   /* [T] what the keys were scaled by */
    float *plain;   /* [2T, E] <k_j, x_n> without decay */
    float *gates;   /* [T, D] g */
    float *along;   /* [T, D] path sums of g */
    float *since;   /* [D] what decayed the checkpoint until the last entry */
    float *after;   /* [E] what decayed each entry until the last one, where D is 1 */
    float *scores;  /* [2T, E] */
    float *seen;    /* [2T, P] */
    float *u;       /* [T, P] */
    float *decayed; /* [2T, width] */
    float *values;  /* [E, P] */
    float *between; /* [D] */
    float *line;    /* scratch */
} Space;

static inline int64_t parent_of(const Tokens *t, int64_t start, int64_t i) {
    return t->parents ? t->parents[start + i] : i - 1;
}

static inline int64_t decay_width(const Layer *l) { return l->channel ? whole_vectors(l->state_dim) : 1; }

/* Probes ---------------------------------------------------------------------------------------------------------- */

/* Queries and keys of a row's tokens in one group. */
static void load_probes(const Space *s, const Layer *l, const Tokens *t, int64_t start, int64_t count, int64_t group) {
    int64_t K = l->state_dim, width = whole_vectors(K);
    for (int64_t i = 0; i < count; i++) {
        int64_t at = size_of(l->activation_type, ((start + i) * l->groups + group) * K);
        float *q = s->probes + i * width, *k = s->probes + (count + i) * width, size = 1;
        load_padded(q, t->q + at, l->activation_type, 1, K);
        load_padded(k, t->k + at, l->activation_type, 1, K);
        s->norms[i] = 1;
        if (!t->unit) continue;
        size = 1 / sqrtf(dot(q, q, width) + 1e-6f) / sqrtf((float)K);
        s->norms[i] = 1 / sqrtf(dot(k, k, width) + 1e-6f);
        for (int64_t c = 0; c < width; c++) q[c] *= size, k[c] *= s->norms[i];
    }
}

/* The gate of KdaInputs: g = -rate softplus(x), or bound / (1 + e^(-rate x)), of x = gate + bias. Both come from e^-|y|,
   and log(1 + e) = 2 artanh(e / (2 + e)) as a series. */
static void open_gate(float *to, const Tokens *t, int64_t token, int64_t head, const Layer *l, float *bias) {
    int64_t K = l->state_dim, width = whole_vectors(K), heads = l->heads;
    load_padded(to, t->gate + size_of(t->gate_type, (token * heads + head) * K), t->gate_type, 1, K);
    load_padded(bias, (const char *)(t->bias + head * K), F32, 1, K);
    Vector rate = all(t->rate[head]), bound = all(t->bound);
    for (int64_t c = 0; c < width; c += LANES) {
        Vector x = get(to + c) + get(bias + c);
        if (t->bound != 0) {
            Vector y = rate * x, e = exp_of(negated_size(y)), part = all(1) / (all(1) + e);
            put(to + c, bound * (where((Whole)(y < all(0)), e * part) + where((Whole)~(y < all(0)), part)));
        } else {
            Vector e = exp_of(negated_size(x)), z = e / (all(2) + e), square = z * z, y = all(1.0f / 13);
            for (int n = 11; n > 1; n -= 2) y = madd(y, square, all(1.0f / (float)n));
            y = madd(y * square, z + z, z + z);
            put(to + c, -rate * (where((Whole)(x > all(0)), x) + y));
        }
    }
}

/* Decays of the row's tokens, and along[i], their sum over token i's path from the root. */
static void load_gates(const Space *s, const Layer *l, const Tokens *t, int64_t start, int64_t count, int64_t head) {
    int64_t K = l->state_dim, D = decay_width(l);
    for (int64_t i = 0; i < count; i++) {
        int64_t place = (start + i) * l->heads + head, parent = parent_of(t, start, i);
        float *g = s->gates + i * D;
        if (t->gate)
            open_gate(g, t, start + i, head, l, s->line);
        else if (l->channel)
            load_padded(g, (const char *)(t->g + place * K), F32, 1, K);
        else
            *g = t->g ? t->g[place] : 0;
        for (int64_t c = 0; c < D; c++) s->along[i * D + c] = (parent < 0 ? 0 : s->along[parent * D + c]) + g[c];
    }
}

/* decayed[x_i] = x_i e^(since + along_i) for the query and, with the delta rule, the key of each token i. */
static void decay_probes(const Space *s, const Layer *l, int64_t count, const float *since) {
    int64_t width = whole_vectors(l->state_dim);
    for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0; c < width; c += LANES) {
            int64_t q = i * width + c, k = q + count * width; /* along has the same places as q */
            Vector exponent = get(s->along + q), decay;
            if (since) exponent += get(since + c);
            decay = exp_of(exponent);
            put(s->decayed + q, get(s->probes + q) * decay);
            if (l->delta) put(s->decayed + k, get(s->probes + k) * decay);
        }
}

/* Committed entries ----------------------------------------------------------------------------------------------- */

/* One entry's scores with ``count`` probes x, one or two, and its decay onto the sum: one pass. */
static inline __attribute__((always_inline)) void score_entry(const float *key, float *since, const float *g,
                                                              const float *x, int64_t width, float *scores,
                                                              int64_t entries, int64_t count) {
    Vector a = all(0), b = all(0);
    for (int64_t c = 0; c < width; c += LANES) {
        Vector sum = get(since + c), k = get(key + c) * exp_of(sum);
        a = madd(k, get(x + c), a);
        if (count == 2) b = madd(k, get(x + width + c), b);
        put(since + c, sum + get(g + c));
    }
    scores[0] = sum(a);
    if (count == 2) scores[entries] = sum(b);
}

/* scores[n, j] = <k_j e^(c_i - c_j), x_n>: the exponent is what came after entry j plus token i's path. Leaves in
   ``since`` the sum of all committed decays. */
static void score_channels(const Space *s, const Layer *l, const float *g, int64_t entries, int64_t count,
                           int64_t probes) {
    int64_t K = l->state_dim, width = whole_vectors(K);
    memset(s->since, 0, width * sizeof(float));
    decay_probes(s, l, count, NULL);
    for (int64_t j = entries - 1; j >= 0; j--) {
        const float *key = s->keys + j * width, *own = g + j * K;
        if (width != K) {
            load_padded(s->line, (const char *)own, F32, 1, K);
            own = s->line;
        }
        if (probes == 1) {
            score_entry(key, s->since, own, s->decayed, width, s->scores + j, entries, 1);
        } else if (probes == 2) {
            score_entry(key, s->since, own, s->decayed, width, s->scores + j, entries, 2);
        } else {
            for (int64_t c = 0; c < width; c += LANES) {
                Vector sum = get(s->since + c);
                put(s->between + c, get(key + c) * exp_of(sum));
                put(s->since + c, sum + get(own + c));
            }
            for (int64_t n = 0; n < probes; n++)
                s->scores[n * entries + j] = dot(s->between, s->decayed + n * width, width);
        }
    }
}

/* The same where the decay is per head. */
static void score_heads(const Space *s, const float *g, int64_t entries, int64_t count, int64_t probes) {
    *s->since = 0;
    for (int64_t j = entries - 1; j >= 0; j--) {
        s->after[j] = *s->since;
        *s->since += g ? g[j] : 0;
    }
    for (int64_t n = 0; n < probes; n++) {
        float along = s->along[n % count], *restrict to = s->scores + n * entries;
        const float *restrict plain = s->plain + n * entries, *restrict after = s->after;
        for (int64_t j = 0; j < entries; j++) to[j] = plain[j] * decay_exp(after[j] + along);
    }
}

/* to[n, p] += sum over j of scores[n, j] u[j, p] for one or two n. */
static inline __attribute__((always_inline)) void add_entries(float *to, const float *u, const float *scores,
                                                              int64_t entries, int64_t P, int64_t count) {
    int64_t p = 0;
    for (; p + LANES <= P; p += LANES) {
        Vector a = get(to + p), b = count == 2 ? get(to + P + p) : a;
        for (int64_t j = 0; j < entries; j++) {
            Vector x = get(u + j * P + p);
            a = madd(x, all(scores[j]), a);
            if (count == 2) b = madd(x, all(scores[entries + j]), b);
        }
        put(to + p, a);
        if (count == 2) put(to + P + p, b);
    }
    for (int64_t n = 0; n < count; n++)
        for (int64_t j = 0; j < entries; j++)
            for (int64_t c = p; c < P; c++) to[n * P + c] = MADD(scores[n * entries + j], u[j * P + c], to[n * P + c]);
}

/* What the committed entries of a head wrote: [E, P]. */
static const float *load_values(const Space *s, const Layer *l, int64_t slot, int64_t head, int64_t entries) {
    int64_t P = l->head_dim, first = head * l->window;
    if (l->delta && l->written_type == F32) return (const float *)entry(&l->written, slot, first, P, F32);
    if (!l->delta) load(s->values, entry(&l->value, slot, first, P, l->activation_type), l->activation_type, entries * P);
    for (int64_t j = 0; l->delta && j < entries; j++) load_written(s->values + j * P, l, slot, first + j);
    return s->values;
}

/* seen[n] = read(x_n): the checkpoint's part and the committed entries'. */
static void see(const Space *s, const Layer *l, int64_t slot, int64_t head, int64_t entries, int64_t count,
                int64_t probes) {
    int64_t K = l->state_dim, P = l->head_dim;
    Head state = head_of(&l->state, slot, head, P, K);
    if (l->channel) decay_probes(s, l, count, s->since);
    read_state(s->seen, &state, l->channel ? s->decayed : s->probes, probes, P, K, s->line);
    for (int64_t n = 0; !l->channel && n < probes; n++) {
        float decay = decay_exp(*s->since + s->along[n % count]);
        for (int64_t p = 0; p < P; p++) s->seen[n * P + p] *= decay;
    }
    const float *u = load_values(s, l, slot, head, entries);
    const float *weight = (const float *)entry(&l->weight, slot, head * l->window, 1, F32);
    for (int64_t n = 0; !l->delta && n < probes; n++)
        for (int64_t j = 0; j < entries; j++) s->scores[n * entries + j] *= weight[j];
    for (int64_t n = 0; n < probes; n += 2)
        if (probes - n > 1)
            add_entries(s->seen + n * P, u, s->scores + n * entries, entries, P, 2);
        else
            add_entries(s->seen + n * P, u, s->scores + n * entries, entries, P, 1);
}

/* New tokens ------------------------------------------------------------------------------------------------------ */

/* Walk from token i to the root. For each ancestor j: to += u_j <k_j e^(c_i - c_j), x>, with x the query or, if
   ``strict``, the key (then the token itself is left out). */
static void see_drafts(const Space *s, const Layer *l, const Tokens *t, int64_t start, int64_t i, const float *x,
                       const float *keys, float *to, int strict) {
    int64_t width = whole_vectors(l->state_dim), P = l->head_dim, D = decay_width(l);
    for (int64_t j = i; j >= 0; j = parent_of(t, start, j)) {
        if (j != i || !strict) {
            const float *key = keys + j * width;
            float decay = 1;
            if (j != i && l->channel) {
                for (int64_t c = 0; c < width; c += LANES) put(s->line + c, get(key + c) * exp_of(get(s->between + c)));
                key = s->line;
            } else if (j != i) {
                decay = decay_exp(*s->between);
            }
            add_scaled(to, s->u + j * P, dot(key, x, width) * decay, P);
        }
        for (int64_t c = 0; c < D; c++) s->between[c] = (j == i ? 0 : s->between[c]) + s->gates[j * D + c];
    }
}

static void append(const Space *s, const Layer *l, const Tokens *t, int64_t slot, int64_t place, int64_t start,
                   int64_t i, int64_t head) {
    int64_t P = l->head_dim, K = l->state_dim, D = l->channel ? K : 1, W = l->window, token = start + i;
    int64_t bytes = size_of(l->activation_type, 1), group = head / (l->heads / l->groups);
    memcpy(entry(&l->value, slot, head * W + place, P, l->activation_type), t->v + (token * l->heads + head) * P * bytes,
           P * bytes);
    *(float *)entry(&l->weight, slot, head * W + place, 1, F32) = t->beta[token * l->heads + head];
    if (l->decay.data)
        memcpy(entry(&l->decay, slot, head * W + place, D, F32), s->gates + i * decay_width(l), D * sizeof(float));
    if (l->delta) store_written(l, slot, head * W + place, s->u + i * P);
    if (head % (l->heads / l->groups)) return; /* keys belong to the group: its first head writes them */
    memcpy(entry(&l->key, slot, group * W + place, K, l->activation_type), t->k + (token * l->groups + group) * K * bytes,
           K * bytes);
    if (l->key_scale.data) *(float *)entry(&l->key_scale, slot, group * W + place, 1, F32) = s->norms[i];
}

/* Ask for what a head's step reads beside the state: short pieces, which the hardware would not foresee. In the second
   level, since the state that is read before would drive them out of the first. (Inline, as compilers drop calls of
   functions that only ask.) */
static inline __attribute__((always_inline)) void expect_head(const Layer *l, int64_t slot, int64_t head,
                                                              int64_t entries) {
    int64_t first = head * l->window, P = l->head_dim, K = l->state_dim, group = head / (l->heads / l->groups);
    int type = l->activation_type;
    if (l->delta)
        prefetch(entry(&l->written, slot, first, P, l->written_type), size_of(l->written_type, entries * P));
    else
        prefetch(entry(&l->value, slot, first, P, type), size_of(type, entries * P));
    prefetch(entry(&l->weight, slot, first, 1, F32), 1);
    if (l->decay.data && !l->channel) prefetch(entry(&l->decay, slot, first, 1, F32), 1);
    if (l->channel) prefetch(entry(&l->decay, slot, first, K, F32), size_of(F32, entries * K));
    if (head % (l->heads / l->groups) == 0)
        prefetch(entry(&l->key, slot, group * l->window, K, type), size_of(type, entries * K));
}

static void step_head(const Space *s, const Layer *l, const Tokens *t, int64_t row, int64_t head) {
    int64_t P = l->head_dim, width = whole_vectors(l->state_dim), slot = l->slots[row], entries = l->length[row];
    int64_t start = t->start[row], count = t->count[row], probes = l->delta ? 2 * count : count;
    const float *keys = s->probes + count * width;
    int64_t first = head * l->window, D = l->channel ? l->state_dim : 1;
    const float *g = l->decay.data ? (const float *)entry(&l->decay, slot, first, D, F32) : NULL;
    load_gates(s, l, t, start, count, head);
    if (l->channel)
        score_channels(s, l, g, entries, count, probes);
    else
        score_heads(s, g, entries, count, probes);
    see(s, l, slot, head, entries, count, probes);
    for (int64_t i = 0; i < count; i++) {
        int64_t token = (start + i) * l->heads + head;
        float *u = s->u + i * P;
        load(u, t->v + size_of(l->activation_type, token * P), l->activation_type, P);
        if (l->delta) {
            float *before = s->seen + (count + i) * P;
            see_drafts(s, l, t, start, i, keys + i * width, keys, before, 1);
            for (int64_t p = 0; p < P; p++) u[p] -= before[p];
        }
        for (int64_t p = 0; p < P; p++) u[p] *= t->beta[token];
        see_drafts(s, l, t, start, i, s->probes + i * width, keys, s->seen + i * P, 0);
        store(t->out + size_of(l->activation_type, token * P), s->seen + i * P, l->activation_type, P, NULL);
        append(s, l, t, slot, entries + i, start, i, head);
    }
}

/* Work items first..last-1: item i is group i % G of row i / G. Returns 0, or 1 where memory ran out. */
int replay_step(const Layer *l, const Tokens *t, int64_t first, int64_t last) {
    int64_t K = l->state_dim, P = l->head_dim, G = l->groups, D = decay_width(l), width = whole_vectors(K), E = 0, T = 0;
    for (int64_t row = first / G; row <= (last - 1) / G; row++) {
        if (l->length[row] > E) E = l->length[row];
        if (t->count[row] > T) T = t->count[row];
    }
    int64_t sizes[] = {E * width, 2 * T * width, T, 2 * T * E, T * D, T * D, D, E, 2 * T * E, 2 * T * P,
                       T * P, 2 * T * width, E * P, width, read_line(width)};
    Space s;
    float **pieces[] = {&s.keys, &s.probes, &s.norms, &s.plain, &s.gates, &s.along, &s.since, &s.after, &s.scores, &s.seen,
                        &s.u, &s.decayed, &s.values, &s.between, &s.line};
    float *memory = carve(pieces, sizes, sizeof sizes / sizeof *sizes);
    if (!memory) return 1;
    for (int64_t item = first; item < last; item++) {
        int64_t row = item / G, group = item % G, repeat = l->heads / G, entries = l->length[row];
        int64_t count = t->count[row], probes = l->delta ? 2 * count : count;
        load_keys(s.keys, l, l->slots[row], group, entries);
        load_probes(&s, l, t, t->start[row], count, group);
        for (int64_t n = 0; !l->channel && n < probes; n++)
            for (int64_t j = 0; j < entries; j++)
                s.plain[n * entries + j] = dot(s.keys + j * width, s.probes + n * width, width);
        for (int64_t r = 0; r < repeat; r++) {
            int64_t head = group * repeat + r, after = head + 1 < l->heads ? row : row + 1;
            if (after * G < last) expect_head(l, l->slots[after], (head + 1) % l->heads, l->length[after]);
            step_head(&s, l, t, row, head);
        }
    }
    free(memory);
    return 0;
}
