/* SGMV for float32 on a CPU: y[rows, slice] += (x[rows] A^T)[slice] B^T.

   At decode an adapter's few rows make matrix products too small for a BLAS call each: what counts is to read A and B
   once, in order, on all cores. A task is eight rows of one segment. */

#include "common.h"

#define ROWS 8     /* rows of a task: x and v stay in the first cache */
#define MAX_RANK 768 /* of all slices of a group together */

typedef struct {
    const float *a;      /* [rank_sum, in] */
    int64_t rank_sum;
    const float *b[3];   /* [rank, width of the slice] */
    int64_t rank[3];
} slot;

typedef struct {
    int32_t segment, first, rows;
} task;

typedef struct {
    const float *x;
    float *y;
    int64_t x_stride, y_stride, in;
    const slot *const *slots; /* one a segment */
    const task *tasks;
    int64_t num_tasks, num_slices;
    const int64_t *offsets;   /* [num_slices + 1] */
} job;

/* Asks for what is needed next: pieces too short for the processor to foresee. */
INLINE void fetch(const float *p, int64_t stride, int rows) {
    for (int i = 0; i < rows; i++) __builtin_prefetch(p + i * stride);
}

/* v[m][r] = x[m] . a[r] for `rows` rows and four ranks (fewer at the end: `ranks`). */
static void dots(const float *const *x, int rows, const float *a, int64_t in, int ranks, float *v, int64_t v_stride) {
    for (int m = 0; m < rows; m += 4) {
        const float *x0 = x[m], *x1 = x[m + 1 < rows ? m + 1 : m], *x2 = x[m + 2 < rows ? m + 2 : m],
                    *x3 = x[m + 3 < rows ? m + 3 : m];
        const float *a0 = a, *a1 = a + (ranks > 1) * in, *a2 = a + (ranks > 2) * 2 * in, *a3 = a + (ranks > 3) * 3 * in;
        vec s[4][4];
        memset(s, 0, sizeof s);
        int64_t k = 0;
        for (; k + LANES <= in; k += LANES) {
            if (!m) fetch(a0 + k + 4 * in, in, 4);
            vec w0 = load(a0 + k), w1 = load(a1 + k), w2 = load(a2 + k), w3 = load(a3 + k), u;
            u = load(x0 + k), s[0][0] += u * w0, s[0][1] += u * w1, s[0][2] += u * w2, s[0][3] += u * w3;
            u = load(x1 + k), s[1][0] += u * w0, s[1][1] += u * w1, s[1][2] += u * w2, s[1][3] += u * w3;
            u = load(x2 + k), s[2][0] += u * w0, s[2][1] += u * w1, s[2][2] += u * w2, s[2][3] += u * w3;
            u = load(x3 + k), s[3][0] += u * w0, s[3][1] += u * w1, s[3][2] += u * w2, s[3][3] += u * w3;
        }
        const float *xs[4] = {x0, x1, x2, x3}, *as[4] = {a0, a1, a2, a3};
        float totals[16];
        sums16(&s[0][0], totals);
        for (int i = 0; i < 4 && m + i < rows; i++)
            for (int j = 0; j < ranks; j++) {
                float total = totals[4 * i + j];
                for (int64_t t = k; t < in; t++) total += xs[i][t] * as[j][t];
                v[(m + i) * v_stride + j] = total;
            }
    }
}

/* y[m] += v[m] B for `rows` rows, B [rank, width] row by row. */
static void add_products(float *const *y, int rows, const float *v, int64_t v_stride, const float *b, int64_t rank,
                         int64_t width) {
    int64_t n = 0;
    for (; n + 4 * LANES <= width; n += 4 * LANES)
        for (int m = 0; m < rows; m += 4) {
            int last = rows - m < 4 ? rows - m : 4;
            vec s[4][4];
            for (int i = 0; i < 4; i++) {
                const float *p = y[m + (i < last ? i : 0)] + n;
                for (int j = 0; j < 4; j++) s[i][j] = load(p + j * LANES);
            }
            const float *v0 = v + m * v_stride, *v1 = v0 + (last > 1) * v_stride, *v2 = v0 + (last > 2) * 2 * v_stride,
                        *v3 = v0 + (last > 3) * 3 * v_stride;
            for (int64_t r = 0; r < rank; r++) {
                const float *p = b + r * width + n;
                if (!m) fetch(p + 4 * LANES, LANES, 4);
                vec w0 = load(p), w1 = load(p + LANES), w2 = load(p + 2 * LANES), w3 = load(p + 3 * LANES);
                s[0][0] += v0[r] * w0, s[0][1] += v0[r] * w1, s[0][2] += v0[r] * w2, s[0][3] += v0[r] * w3;
                s[1][0] += v1[r] * w0, s[1][1] += v1[r] * w1, s[1][2] += v1[r] * w2, s[1][3] += v1[r] * w3;
                s[2][0] += v2[r] * w0, s[2][1] += v2[r] * w1, s[2][2] += v2[r] * w2, s[2][3] += v2[r] * w3;
                s[3][0] += v3[r] * w0, s[3][1] += v3[r] * w1, s[3][2] += v3[r] * w2, s[3][3] += v3[r] * w3;
            }
            for (int i = 0; i < last; i++)
                for (int j = 0; j < 4; j++) *(vec *)(y[m + i] + n + j * LANES) = s[i][j];
        }
    for (; n < width; n++)
        for (int m = 0; m < rows; m++) {
            float total = y[m][n];
            for (int64_t r = 0; r < rank; r++) total += v[m * v_stride + r] * b[r * width + n];
            y[m][n] = total;
        }
}

static void run_task(void *data, int64_t i) {
    const job *j = data;
    const task *t = &j->tasks[i];
    const slot *s = j->slots[t->segment];
    if (!s) return;
    float v[ROWS * MAX_RANK];
    const float *x[ROWS];
    float *y[ROWS];
    for (int m = 0; m < t->rows; m++) x[m] = j->x + (t->first + m) * j->x_stride;
    for (int64_t r = 0; r < s->rank_sum; r += 4)
        dots(x, t->rows, s->a + r * j->in, j->in, s->rank_sum - r < 4 ? (int)(s->rank_sum - r) : 4, v + r, MAX_RANK);
    int64_t first_rank = 0;
    for (int64_t k = 0; k < j->num_slices; k++) {
        for (int m = 0; m < t->rows; m++) y[m] = j->y + (t->first + m) * j->y_stride + j->offsets[k];
        if (s->rank[k])
            add_products(y, t->rows, v + first_rank, MAX_RANK, s->b[k], s->rank[k], j->offsets[k + 1] - j->offsets[k]);
        first_rank += s->rank[k];
    }
}

/* y[rows, slice] += (x[rows] A^T)[slice] B^T for the rows of `tasks`. */
void punica_sgmv(const float *x, int64_t x_stride, float *y, int64_t y_stride, int64_t in, const slot *const *slots,
                 const task *tasks, int64_t num_tasks, int64_t num_slices, const int64_t *offsets,
                 parallel_function parallel, int threads) {
    job j = {x, y, x_stride, y_stride, in, slots, tasks, num_tasks, num_slices, offsets};
    for_each_task(run_task, &j, num_tasks, parallel, threads);
}
