/* RMSNorm, SwiGLU's activation, rotary embedding and the KV cache's writes for float32: one pass over memory each. */

#include <math.h>

#include "common.h"

#define TASK_ELEMENTS 16384 /* a task's, at least: fewer are not worth a second thread */

typedef struct {
    const float *x, *weight;
    float *out;
    int64_t rows, inner, outer_stride, inner_stride, out_outer_stride, out_inner_stride, size, per_task;
    float eps;
} norm_job;

static void norm_row(const float *x, const float *weight, float *out, int64_t size, float eps) {
    vec s = {0};
    int64_t i = 0;
    float tail = 0;
    for (; i + LANES <= size; i += LANES) s += load(x + i) * load(x + i);
    for (; i < size; i++) tail += x[i] * x[i];
    float factor = 1.0f / sqrtf((sum(s) + tail) / (float)size + eps);
    for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < size; i++) out[i] = x[i] * factor * weight[i];
}

static void norm_rows(void *data, int64_t task) {
    norm_job *j = data;
    int64_t last = (task + 1) * j->per_task < j->rows ? (task + 1) * j->per_task : j->rows;
    for (int64_t r = task * j->per_task; r < last; r++) {
        int64_t a = r / j->inner, b = r % j->inner;
        norm_row(j->x + a * j->outer_stride + b * j->inner_stride, j->weight,
                 j->out + a * j->out_outer_stride + b * j->out_inner_stride, j->size, j->eps);
    }
}

static int64_t rows_per_task(int64_t size) { return TASK_ELEMENTS / size + 1; }

/* out[r] = x[r] / rms(x[r]) * weight for rows [outer][inner], strided; out may be x. */
void punica_rms_norm(const float *x, int64_t outer, int64_t outer_stride, int64_t inner, int64_t inner_stride,
                     float *out, int64_t out_outer_stride, int64_t out_inner_stride, const float *weight, int64_t size,
                     float eps, parallel_function parallel, int threads) {
    norm_job j = {x, weight, out, outer * inner, inner, outer_stride, inner_stride, out_outer_stride,
                  out_inner_stride, size, rows_per_task(size), eps};
    for_each_task(norm_rows, &j, (j.rows + j.per_task - 1) / j.per_task, parallel, threads);
}

typedef struct {
    const float *x;
    float *out;
    int64_t rows, stride, size, per_task;
} silu_job;

static void silu_rows(void *data, int64_t task) {
    silu_job *j = data;
    int64_t last = (task + 1) * j->per_task < j->rows ? (task + 1) * j->per_task : j->rows;
    for (int64_t r = task * j->per_task; r < last; r++) {
        const float *gate = j->x + r * j->stride, *up = gate + j->size;
        float *out = j->out + r * j->size;
        int64_t i = 0;
        for (; i + LANES <= j->size; i += LANES) {
            vec g = load(gate + i);
            store(out + i, g / (1.0f + exp_vec(-g)) * load(up + i));
        }
        if (i < j->size) { /* the same arithmetic for the last few */
            float g[LANES] = {0}, u[LANES] = {0};
            size_t bytes = (size_t)(j->size - i) * sizeof(float);
            memcpy(g, gate + i, bytes), memcpy(u, up + i, bytes);
            store(g, load(g) / (1.0f + exp_vec(-load(g))) * load(u));
            memcpy(out + i, g, bytes);
        }
    }
}

/* out[r] = silu(x[r, :size]) * x[r, size:]; out contiguous. */
void punica_silu_and_mul(const float *x, int64_t rows, int64_t stride, float *out, int64_t size,
                         parallel_function parallel, int threads) {
    silu_job j = {x, out, rows, stride, size, rows_per_task(2 * size)};
    for_each_task(silu_rows, &j, (rows + j.per_task - 1) / j.per_task, parallel, threads);
}

typedef struct {
    float *x;
    const float *cos, *sin;
    int64_t rows, stride, heads, head_stride, half, per_task;
} rope_job;

static void rope_rows(void *data, int64_t task) {
    rope_job *j = data;
    int64_t last = (task + 1) * j->per_task < j->rows ? (task + 1) * j->per_task : j->rows, half = j->half;
    for (int64_t r = task * j->per_task; r < last; r++) {
        const float *cos = j->cos + r * half, *sin = j->sin + r * half;
        for (int64_t h = 0; h < j->heads; h++) {
            float *first = j->x + r * j->stride + h * j->head_stride, *second = first + half;
            int64_t i = 0;
            for (; i + LANES <= half; i += LANES) {
                vec a = load(first + i), b = load(second + i), c = load(cos + i), s = load(sin + i);
                store(first + i, a * c - b * s), store(second + i, b * c + a * s);
            }
            for (; i < half; i++) {
                float a = first[i], b = second[i];
                first[i] = a * cos[i] - b * sin[i], second[i] = b * cos[i] + a * sin[i];
            }
        }
    }
}

/* Rotates x [rows, heads, 2 half] in place, first half against second; cos, sin [rows, half]. */
void punica_apply_rope(float *x, int64_t rows, int64_t stride, int64_t heads, int64_t head_stride, const float *cos,
                       const float *sin, int64_t half, parallel_function parallel, int threads) {
    rope_job j = {x, cos, sin, rows, stride, heads, head_stride, half, rows_per_task(2 * half * heads)};
    for_each_task(rope_rows, &j, (rows + j.per_task - 1) / j.per_task, parallel, threads);
}

/* Row t of k and v, `size` floats, to slot slots[t] of the caches. */
void punica_write_kv(const float *k, int64_t k_stride, const float *v, int64_t v_stride, float *k_cache,
                     float *v_cache, const int64_t *slots, int64_t rows, int64_t size) {
    for (int64_t r = 0; r < rows; r++) {
        memcpy(k_cache + slots[r] * size, k + r * k_stride, (size_t)size * sizeof(float));
        memcpy(v_cache + slots[r] * size, v + r * v_stride, (size_t)size * sizeof(float));
    }
}
