/* A layer's tensors, as the kernels find them. Rows of K numbers that they work on are padded with zeros to whole vectors:
   ``width`` is their length. */

#include <stdlib.h>

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

/* Rows [n, K] of a type without scales to padded ones. */
static void load_padded(float *to, const char *from, int type, int64_t n, int64_t K) {
    int64_t width = whole_vectors(K);
    if (width == K) {
        load(to, from, type, n * K);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        load(to + i * width, from + i * size_of(type, K), type, K);
        memset(to + i * width + K, 0, (width - K) * sizeof(float));
    }
}

/* The committed keys of a group, scaled: [E, width]. */
static void load_keys(float *keys, const Layer *l, int64_t slot, int64_t group, int64_t entries) {
    int64_t K = l->state_dim, first = group * l->window, width = whole_vectors(K);
    load_padded(keys, entry(&l->key, slot, first, K, l->activation_type), l->activation_type, entries, K);
    if (!l->key_scale.data) return;
    const float *scale = (const float *)entry(&l->key_scale, slot, first, 1, F32);
    for (int64_t j = 0; j < entries; j++)
        for (int64_t c = 0; c < width; c++) keys[j * width + c] *= scale[j];
}

/* Room for pieces of so many floats, each from a cache line on. Returns what to free, or NULL. */
static float *carve(float **const *pieces, const int64_t *sizes, size_t count) {
    size_t floats = LANES;
    for (size_t i = 0; i < count; i++) floats += (size_t)whole_vectors(sizes[i]);
    float *memory = malloc(floats * sizeof(float)), *next = memory;
    if (!memory) return NULL;
    while ((uintptr_t)next % (LANES * sizeof(float))) next++;
    for (size_t i = 0; i < count; i++) {
        *pieces[i] = next;
        next += whole_vectors(sizes[i]);
    }
    return memory;
}
