/* Paged attention for float32: rows read keys and values where they lie in the cache, by block table.

   A task is a few rows of one sequence under one key head. Each row by itself runs an online softmax over chunks of
   keys counted from its first visible one, so its result depends on nothing else in the step. Slots beyond a row's own
   keys are never read. */

#include "common.h"

#define KEYS 64 /* of a chunk */
#define HEADS 4 /* query heads of one key head that are computed together */

typedef struct {
    int32_t row, rows, kv_len, sequence; /* kv_len: keys that the first of the rows may see */
} span;

typedef struct {
    const float *q, *k, *v;
    float *out;
    const int32_t *tables;
    const span *spans;
    int64_t q_stride, table_stride, block_size, heads, kv_heads, head_dim, window;
    float scale;
} job;

/* scores[key][slot] of `count` keys for `group` query heads, each key with `slots` places (`group`, rounded up to a power
   of two): as many keys at once as make 16 sums. Places beyond the last key hold -inf. */
INLINE void score(const float *q, const float *keys, const int64_t *where, int count, float scale, int64_t dim,
                  float *scores, const int group, const int slots) {
    const int at_once = 16 / slots;
    const int64_t last_vec = dim / LANES * LANES;
    for (int i = 0; i < count; i += at_once) {
        const float *k[16];
        vec dots[16] = {{0}};
        float totals[16];
        for (int n = 0; n < at_once; n++) k[n] = keys + where[i + n < count ? i + n : i];
        for (int64_t d = 0; d < last_vec; d += LANES)
            for (int g = 0; g < group; g++) {
                vec a = load(q + g * dim + d);
                for (int n = 0; n < at_once; n++) dots[n * slots + g] += a * load(k[n] + d);
            }
        sums16(dots, totals);
        for (int64_t d = last_vec; d < dim; d++)
            for (int g = 0; g < group; g++)
                for (int n = 0; n < at_once; n++) totals[n * slots + g] += q[g * dim + d] * k[n][d];
        for (int n = 0; n < 16; n++) scores[i * slots + n] = totals[n] * scale;
    }
    for (int n = count * slots; n < (count + at_once - 1) / at_once * 16; n++) scores[n] = -__builtin_inff();
}

/* Turns scores into weights e^(score - top), raises top[] to the highest score so far and sets total[] to the weights'
   sum and shrunk[] to e^(old top - top); all three hold a number a lane, slot after slot. */
INLINE void weigh(float *scores, int count, const int slots, float *top, float *total, float *shrunk) {
    float lanes[LANES];
    int padded = (count * slots + LANES - 1) / LANES * LANES;
    vec old = load(top), high = old, sums = {0};
    for (int i = 0; i < padded; i += LANES) high = select_vec(load(scores + i) > high, load(scores + i), high);
    store(lanes, high);
    for (int n = LANES / 2; n >= slots; n /= 2)
        for (int i = 0; i < n; i++) lanes[i] = lanes[i + n] > lanes[i] ? lanes[i + n] : lanes[i];
    for (int i = slots; i < LANES; i++) lanes[i] = lanes[i - slots];
    high = load(lanes);
    for (int i = 0; i < padded; i += LANES) store(scores + i, exp_vec(load(scores + i) - high));
    for (int i = count * slots; i < padded; i++) scores[i] = 0; /* e^-inf, which saturates */
    for (int i = 0; i < padded; i += LANES) sums += load(scores + i);
    store(lanes, sums);
    for (int n = LANES / 2; n >= slots; n /= 2)
        for (int i = 0; i < n; i++) lanes[i] += lanes[i + n];
    memcpy(total, lanes, (size_t)slots * sizeof(float));
    store(top, high), store(shrunk, exp_vec(old - high));
}

/* out[g] += the weighted values, `vecs` registers of each head at a time */
INLINE void add_values(float *out, const float *values, const int64_t *where, int count, const float *weights,
                       int64_t dim, const int group, const int slots, const int vecs) {
    vec acc[HEADS][4];
    for (int g = 0; g < group; g++)
        for (int c = 0; c < vecs; c++) acc[g][c] = load(out + g * dim + c * LANES);
    for (int i = 0; i < count; i++)
        for (int c = 0; c < vecs; c++) {
            vec v = load(values + where[i] + c * LANES);
            for (int g = 0; g < group; g++) acc[g][c] += weights[i * slots + g] * v;
        }
    for (int g = 0; g < group; g++)
        for (int c = 0; c < vecs; c++) store(out + g * dim + c * LANES, acc[g][c]);
}

/* One row, `group` query heads from `head` on. `dim` is head_dim, as a constant where that pays. */
INLINE void attend(const job *j, const span *s, int64_t row, int64_t kv_len, int64_t head, int64_t kv_head,
                   const int group, int64_t dim) {
    const int slots = group > 2 ? 4 : group;
    const int64_t token = j->kv_heads * dim;
    const float *q = j->q + row * j->q_stride + head * dim;
    float *out = j->out + (row * j->heads + head) * dim;
    const int32_t *table = j->tables + s->sequence * j->table_stride;
    float scores[HEADS * KEYS], top[LANES], shrunk[LANES], total[HEADS] = {0}, added[HEADS];
    int64_t where[KEYS], first = j->window && kv_len > j->window ? kv_len - j->window : 0;
    store(top, splat(-__builtin_inff()));
    memset(out, 0, (size_t)(group * dim) * sizeof(float));
    for (int64_t start = first; start < kv_len; start += KEYS) {
        int count = (int)(kv_len - start < KEYS ? kv_len - start : KEYS);
        for (int64_t i = 0, block = start / j->block_size, offset = start % j->block_size; i < count; i++) {
            where[i] = (table[block] * j->block_size + offset) * token + kv_head * dim;
            if (++offset == j->block_size) offset = 0, block++;
        }
        score(q, j->k, where, count, j->scale, dim, scores, group, slots);
        weigh(scores, count, slots, top, added, shrunk);
        for (int g = 0; g < group && start == first; g++) total[g] = added[g];
        for (int g = 0; g < group && start != first; g++) {
            total[g] = total[g] * shrunk[g] + added[g];
            for (int64_t d = 0; d < dim; d++) out[g * dim + d] *= shrunk[g];
        }
        int64_t d = 0;
        for (; d + 4 * LANES <= dim; d += 4 * LANES)
            add_values(out + d, j->v + d, where, count, scores, dim, group, slots, 4);
        for (; d + LANES <= dim; d += LANES)
            add_values(out + d, j->v + d, where, count, scores, dim, group, slots, 1);
        for (; d < dim; d++)
            for (int g = 0; g < group; g++)
                for (int i = 0; i < count; i++) out[g * dim + d] += scores[i * slots + g] * j->v[where[i] + d];
    }
    for (int g = 0; g < group; g++)
        for (int64_t d = 0; d < dim; d++) out[g * dim + d] /= total[g];
}

#define ATTEND(GROUP)                                                                           \
    static void attend_##GROUP(const job *j, const span *s, int64_t row, int64_t kv_len, int64_t head, \
                               int64_t kv_head) {                                               \
        if (j->head_dim == 64)                                                                  \
            attend(j, s, row, kv_len, head, kv_head, GROUP, 64);                                \
        else if (j->head_dim == 128)                                                            \
            attend(j, s, row, kv_len, head, kv_head, GROUP, 128);                               \
        else                                                                                    \
            attend(j, s, row, kv_len, head, kv_head, GROUP, j->head_dim);                       \
    }
ATTEND(1)
ATTEND(2)
ATTEND(3)
ATTEND(4)

static void (*const attend_groups[])(const job *, const span *, int64_t, int64_t, int64_t, int64_t) = {
    attend_1, attend_2, attend_3, attend_4};

static void run_span(void *data, int64_t task) {
    const job *j = data;
    const span *s = j->spans + task / j->kv_heads;
    int64_t kv_head = task % j->kv_heads, group = j->heads / j->kv_heads;
    for (int64_t r = 0; r < s->rows; r++)
        for (int64_t g = 0; g < group; g += HEADS)
            attend_groups[(group - g < HEADS ? group - g : HEADS) - 1](j, s, s->row + r, s->kv_len + r,
                                                                       kv_head * group + g, kv_head);
}

/* out[row] for the rows of `spans`: softmax(q k^T * scale) v over each row's own keys, the last `window` of them
   (0: all). q [rows, heads, head_dim] strided by row; out contiguous; caches [blocks, block_size, kv_heads, head_dim];
   tables int32 [sequences, table_stride]. */
void punica_paged_attention(const float *q, int64_t q_stride, const float *k, const float *v, float *out,
                            const int32_t *tables, int64_t table_stride, const span *spans, int64_t num_spans,
                            int64_t block_size, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window,
                            float scale, parallel_function parallel, int threads) {
    job j = {q, k, v, out, tables, spans, q_stride, table_stride, block_size, heads, kv_heads, head_dim, window, scale};
    for_each_task(run_span, &j, num_spans * kv_heads, parallel, threads);
}
