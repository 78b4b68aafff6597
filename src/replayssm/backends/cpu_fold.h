/* The fold: the state after the committed entries, in closed form, in chunks of entries (docs: mathematics).

   Within a chunk U = (I + A)^-1 beta (V - read(K)) gives what each entry writes, then the state is decayed and takes all of
   it at once; without the delta rule U = beta V. Once A is known the rows of the state are independent: sixteen of them go
   through all chunks while they are in the first-level cache, so that a vector holds one entry's U of all of them. */

enum { CHUNK_OF_ENTRIES = LANES, ROWS = LANES };

/* Where a fold goes: row r's state to place ``places[r]`` of ``target``, and encoded to ``copy`` if that has data. */
typedef struct {
    Stored target, copy;
    const int64_t *places;
    const int64_t *keys; /* [rows] of the random bits; NULL rounds to the nearest */
} Goal;

/* What a chunk of n entries does to the rows of one head. */
typedef struct {
    float pairs[CHUNK_OF_ENTRIES][CHUNK_OF_ENTRIES]; /* A of entries i, j < i */
    float weight[CHUNK_OF_ENTRIES];                  /* times v_i */
    float read[CHUNK_OF_ENTRIES];                    /* times read(k_i) */
    float after[CHUNK_OF_ENTRIES];                   /* times u_i: what decays it until the chunk's end */
    int64_t n;
    const float *values; /* [n, P] padded */
    const float *probes; /* [n, width] what the state is read with */
    const float *keys;   /* [n, width] what is added to it, times u */
    const float *total;  /* [width] what decays the state */
} Chunk;

/* Decay per head: ``gram`` has <k_i, k_j>, g the log-decays or NULL. Every exponent is a sum over its own segment. */
static void pair_heads(Chunk *chunk, const float *gram, const float *g, const float *weight, float *total,
                       int64_t width) {
    float since[LANES] = {0}, along[LANES] = {0}, decays[LANES], sum = 0;
    for (int64_t i = 0; i < chunk->n; i++) {
        float own = g ? g[i] : 0;
        along[i] = sum += own;
        for (int64_t j = 0; j < i; j++) since[j] += own;
        put(decays, exp_of(get(since)));
        for (int64_t j = 0; j < i; j++) chunk->pairs[i][j] = weight[i] * gram[i * CHUNK_OF_ENTRIES + j] * decays[j];
    }
    put(chunk->after, exp_of(get(since)));
    put(decays, exp_of(get(along)));
    for (int64_t i = 0; i < chunk->n; i++) chunk->weight[i] = weight[i], chunk->read[i] = weight[i] * decays[i];
    for (int64_t c = 0; c < width; c += LANES) put(total + c, exp_of(all(sum)));
}

static float *multiply(float *to, const float *x, const float *y, int64_t width) {
    for (int64_t c = 0; c < width; c += LANES) put(to + c, get(x + c) * get(y + c));
    return to;
}

/* Decay per channel. A product of decays takes the place of each exponential of a sum, as in the token loop. ``keys`` and
   ``decays`` [n, width] are those of the chunk; ``probes``, ``added`` [n, width] and ``total`` are written. */
static void pair_channels(Chunk *chunk, const float *keys, const float *decays, const float *weight, float *probes,
                          float *added, float *total, int64_t width, int delta) {
    for (int64_t i = 0; i < chunk->n; i++) {
        chunk->weight[i] = chunk->read[i] = weight[i], chunk->after[i] = 1;
        if (!delta) continue;
        float *x = multiply(probes + i * width, keys + i * width, decays + i * width, width);
        for (int64_t j = i - 1; j >= 0; j--) {
            Vector sums = all(0);
            for (int64_t c = 0; c < width; c += LANES) {
                Vector own = get(x + c);
                sums = madd(own, get(keys + j * width + c), sums);
                put(x + c, own * get(decays + j * width + c));
            }
            chunk->pairs[i][j] = weight[i] * sum(sums);
        }
    }
    for (int64_t c = 0; c < width; c++) total[c] = 1;
    for (int64_t j = chunk->n - 1; j >= 0; j--) {
        multiply(added + j * width, keys + j * width, total, width);
        multiply(total, total, decays + j * width, width);
    }
}

/* <S_r, x> of sixteen rows. */
static inline Vector read_rows(const float *rows, const float *x, int64_t width) {
    Vector sums[ROWS];
    for (int r = 0; r < ROWS; r++) sums[r] = all(0);
    for (int64_t c = 0; c < width; c += LANES) {
        Vector own = kept(get(x + c));
        for (int r = 0; r < ROWS; r++) sums[r] = madd(get(rows + r * width + c), own, sums[r]);
    }
    return sums_of_rows(sums);
}

/* to = from * total + sum of u_j k_j, for four rows and ``vectors`` vectors of them. */
static inline __attribute__((always_inline)) void add_tile(float *to, const float *from, const float (*u)[ROWS],
                                                           const Chunk *chunk, int64_t c, int64_t width,
                                                           const int vectors) {
    Vector s[4][4];
    for (int v = 0; v < vectors; v++)
        for (int r = 0; r < 4; r++) {
            const float *own = from + r * width + c + v * LANES;
            __builtin_prefetch(own + ROWS * width, 0, 2); /* of the next sixteen rows */
            s[r][v] = get(own) * get(chunk->total + c + v * LANES);
        }
    for (int64_t j = 0; j < chunk->n; j++)
        for (int v = 0; v < vectors; v++) {
            Vector k = kept(get(chunk->keys + j * width + c + v * LANES));
            for (int r = 0; r < 4; r++) s[r][v] = madd(all(u[j][r]), k, s[r][v]);
        }
    for (int v = 0; v < vectors; v++)
        for (int r = 0; r < 4; r++) put(to + r * width + c + v * LANES, s[r][v]);
}

/* Sixteen rows of the state, the first of them row p, through a chunk. ``to`` may be ``from``. */
static void advance_rows(float *to, const float *from, const Chunk *chunk, int64_t p, int64_t P, int64_t width,
                         int delta) {
    float u[CHUNK_OF_ENTRIES][ROWS];
    for (int64_t i = 0; i < chunk->n; i++) {
        Vector own = get(chunk->values + i * whole_vectors(P) + p) * all(chunk->weight[i]);
        if (delta) own -= read_rows(from, chunk->probes + i * width, width) * all(chunk->read[i]);
        put(u[i], own);
    }
    for (int64_t j = 0; j < chunk->n; j++) {
        Vector own = get(u[j]);
        for (int64_t i = j + 1; delta && i < chunk->n; i++) put(u[i], madd(all(-chunk->pairs[i][j]), own, get(u[i])));
        put(u[j], own * all(chunk->after[j]));
    }
    for (int r = 0; r < ROWS; r += 4) {
        int64_t c = 0, at = r * width;
        for (; c + 4 * LANES <= width; c += 4 * LANES)
            add_tile(to + at, from + at, (const float(*)[ROWS])&u[0][r], chunk, c, width, 4);
        for (; c < width; c += LANES) add_tile(to + at, from + at, (const float(*)[ROWS])&u[0][r], chunk, c, width, 1);
    }
}

/* Rows p… of a head to padded ones, zero rows beyond the last. */
static void load_block(float *block, const Head *h, int64_t p, int64_t rows, int64_t K) {
    int64_t width = whole_vectors(K);
    for (int64_t r = 0; r < rows; r++) { /* decoding may write past the end of a row */
        load_rows(block + r * width, h, p + r, 1, K);
        memset(block + r * width + K, 0, (width - K) * sizeof(float));
    }
    memset(block + rows * width, 0, (ROWS - rows) * width * sizeof(float));
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

/* Work space of a range of items, for at most E entries in ``chunks`` chunks. */
typedef struct {
    float *keys, *values;             /* [E, width], [E, P] padded */
    float *decays, *probes, *added;   /* [E, width] where the decay is per channel */
    float *gram;                      /* [chunks, 16, 16] */
    float *total;                     /* [chunks, width] */
    float *block, *whole;             /* [16, width], [P, K], with room for what decoding writes past the end */
    float *chunks;                    /* Chunk [chunks] */
} Folding;

/* The chunks of a head whose keys and Gram matrices are there. Returns how many there are. */
static int64_t make_chunks(const Folding *f, const Layer *l, int64_t slot, int64_t head, int64_t entries) {
    int64_t K = l->state_dim, P = l->head_dim, width = whole_vectors(K), first = head * l->window, count = 0;
    const float *weight = (const float *)entry(&l->weight, slot, first, 1, F32);
    const float *g = l->decay.data ? (const float *)entry(&l->decay, slot, first, l->channel ? K : 1, F32) : NULL;
    load_padded(f->values, entry(&l->value, slot, first, P, l->activation_type), l->activation_type, entries, P);
    if (l->channel) {
        load_padded(f->decays, (const char *)g, F32, entries, K);
        for (int64_t c = 0; c < entries * width; c += LANES) put(f->decays + c, exp_of(get(f->decays + c)));
    }
    for (int64_t j = 0; j < entries; j += CHUNK_OF_ENTRIES, count++) {
        Chunk *chunk = (Chunk *)f->chunks + count;
        float *total = f->total + count * width;
        chunk->n = entries - j < CHUNK_OF_ENTRIES ? entries - j : CHUNK_OF_ENTRIES;
        chunk->values = f->values + j * whole_vectors(P), chunk->total = total;
        chunk->probes = (l->channel ? f->probes : f->keys) + j * width;
        chunk->keys = (l->channel ? f->added : f->keys) + j * width;
        if (l->channel)
            pair_channels(chunk, f->keys + j * width, f->decays + j * width, weight + j, f->probes + j * width,
                          f->added + j * width, total, width, l->delta);
        else
            pair_heads(chunk, f->gram + count * CHUNK_OF_ENTRIES * CHUNK_OF_ENTRIES, g ? g + j : NULL, weight + j, total,
                       width);
    }
    return count;
}

/* <k_i, k_j> within each chunk. */
static void make_gram(const Folding *f, int64_t entries, int64_t width) {
    for (int64_t i = 0; i < entries; i++)
        for (int64_t j = i / CHUNK_OF_ENTRIES * CHUNK_OF_ENTRIES; j < i; j++)
            f->gram[i * CHUNK_OF_ENTRIES + j % CHUNK_OF_ENTRIES] = dot(f->keys + i * width, f->keys + j * width, width);
}

static void fold_head(const Folding *f, const Layer *l, const Goal *goal, int64_t row, int64_t head) {
    int64_t K = l->state_dim, P = l->head_dim, width = whole_vectors(K), slot = l->slots[row];
    int64_t count = make_chunks(f, l, slot, head, l->length[row]), bytes = size_of(l->state.type, K);
    Head state = head_of(&l->state, slot, head, P, K), target = head_of(&goal->target, goal->places[row], head, P, K);
    float *out = target.type == F32 ? (float *)target.codes : f->whole;
    for (int64_t p = 0; p < P; p += ROWS) {
        int64_t rows = P - p < ROWS ? P - p : ROWS;
        int direct = state.type == F32 && K == width && rows == ROWS && count;
        const float *from = direct ? (const float *)state.codes + p * K : f->block;
        float *to = direct ? out + p * K : f->block;
        if (!direct) prefetch(state.codes + (p + ROWS) * bytes, ROWS * bytes);
        if (!direct) load_block(f->block, &state, p, rows, K);
        for (int64_t i = 0; i < count; i++, from = to)
            advance_rows(to, from, (const Chunk *)f->chunks + i, p, P, width, l->delta);
        for (int64_t r = 0; !direct && r < rows; r++)
            memcpy(out + (p + r) * K, f->block + r * width, K * sizeof(float));
    }
    put_head(goal, &target, out, row, head, P, K);
}

/* The state after the committed entries. Items as in replay_step. The goal may be the checkpoint itself. */
int replay_fold(const Layer *l, const Goal *goal, int64_t first, int64_t last) {
    int64_t K = l->state_dim, P = l->head_dim, G = l->groups, width = whole_vectors(K), E = 0;
    for (int64_t row = first / G; row <= (last - 1) / G; row++)
        if (l->length[row] > E) E = l->length[row];
    int64_t chunks = (E + CHUNK_OF_ENTRIES - 1) / CHUNK_OF_ENTRIES, channels = l->channel ? E * width : 0;
    int64_t sizes[] = {E * width, E * whole_vectors(P), channels, channels, channels, E * CHUNK_OF_ENTRIES, chunks * width,
                       ROWS * width + 32, P * K + 32, chunks * (int64_t)(sizeof(Chunk) / sizeof(float))};
    Folding f;
    float **pieces[] = {&f.keys, &f.values, &f.decays, &f.probes, &f.added, &f.gram, &f.total, &f.block, &f.whole,
                        &f.chunks};
    float *memory = carve(pieces, sizes, sizeof sizes / sizeof *sizes);
    if (!memory) return 1;
    for (int64_t item = first; item < last; item++) {
        int64_t row = item / G, group = item % G, repeat = l->heads / G, entries = l->length[row];
        load_keys(f.keys, l, l->slots[row], group, entries);
        if (l->delta && !l->channel) make_gram(&f, entries, width);
        for (int64_t r = 0; r < repeat; r++) fold_head(&f, l, goal, row, group * repeat + r);
    }
    free(memory);
    return 0;
}
