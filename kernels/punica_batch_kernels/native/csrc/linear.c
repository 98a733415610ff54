/* y = x W^T + b, or y += that, for float32 and few rows of x: decode steps, where a BLAS packs the whole of W to use it
   but once.

   Here x is what is packed: transposed, so that one register holds the same column of LANES rows. W is read in place,
   a few rows at a time, and each of its elements is broadcast against those registers. Every y[m, n] is summed over k
   in one order, whatever else is in the batch and however many threads there are. */

#include "common.h"

#define PANEL 64  /* rows of x in a panel */
#define OUTPUTS 48 /* of a task: a multiple of each tile's */
#define DEPTH 192 /* of W's columns at a time: a panel's part of them stays in the first cache */

#if defined(__AVX512F__) && defined(HAS_SHUFFLES)

typedef struct {
    const float *x, *w, *bias;
    float *y, *panels; /* [panel][in][width of the panel] */
    int64_t rows, in, out, x_stride, y_stride, num_panels, accumulate;
} job;

/* a 16 x 16 block of `from` (row r at r * from_stride) transposed to `to` */
INLINE void transpose16(const float *from, int64_t from_stride, int rows, float *to, int64_t to_stride, int columns) {
    vec a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = i < rows ? load(from + i * from_stride) : (vec){0};
    for (int i = 0; i < 8; i++) {
        b[2 * i] = __builtin_shufflevector(a[i], a[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int i = 0; i < 8; i++) {
        a[2 * i] = __builtin_shufflevector(b[i], b[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        a[2 * i + 1] = __builtin_shufflevector(b[i], b[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int i = 0; i < 8; i++) {
        b[2 * i] = __builtin_shufflevector(a[i], a[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int i = 0; i < 8; i++) {
        a[2 * i] = __builtin_shufflevector(b[i], b[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        a[2 * i + 1] = __builtin_shufflevector(b[i], b[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int i = 0; i < columns; i++) store(to + i * to_stride, a[i]);
}

/* registers of LANES rows that a panel takes */
static int64_t panel_vecs(const job *j, int64_t panel) {
    int64_t rows = j->rows - panel * PANEL;
    return rows >= PANEL ? PANEL / LANES : (rows + LANES - 1) / LANES;
}

static void pack(void *data, int64_t task) {
    const job *j = data;
    int64_t panel = task / (PANEL / LANES), group = task % (PANEL / LANES), vecs = panel_vecs(j, panel);
    int64_t first = task * LANES;
    if (group >= vecs) return;
    int rows = j->rows - first < LANES ? (int)(j->rows - first) : LANES;
    const float *x = j->x + first * j->x_stride;
    float *to = j->panels + panel * PANEL * j->in + group * LANES;
    int64_t k = 0, width = vecs * LANES;
    for (; k + 16 <= j->in; k += 16) transpose16(x + k, j->x_stride, rows, to + k * width, width, 16);
    for (; k < j->in; k++)
        for (int m = 0; m < LANES; m++) to[k * width + m] = m < rows ? x[m * j->x_stride + k] : 0;
}

/* sums[n][m] += W[n, k] x[m, k] over `depth` columns, for `outputs` rows of W and `vecs` registers of rows of x */
INLINE void tile(const float *x, const float *w, int64_t in, int64_t depth, float *sums, const int vecs,
                 const int outputs) {
    vec s[outputs][vecs];
    for (int n = 0; n < outputs; n++)
        for (int m = 0; m < vecs; m++) s[n][m] = load(sums + (n * vecs + m) * LANES);
    int64_t k = 0;
    for (; k + 16 <= depth; k += 16) {
        for (int n = 0; n < outputs; n++) __builtin_prefetch(w + (outputs + n) * in + k, 0, 2);
#pragma GCC unroll 4
        for (int i = 0; i < 16; i++, x += vecs * LANES)
            for (int n = 0; n < outputs; n++) {
                float a = w[n * in + k + i];
                for (int m = 0; m < vecs; m++) s[n][m] += a * load(x + m * LANES);
            }
    }
    for (; k < depth; k++, x += vecs * LANES)
            for (int n = 0; n < outputs; n++) {
                float a = w[n * in + k];
                for (int m = 0; m < vecs; m++) s[n][m] += a * load(x + m * LANES);
            }
    for (int n = 0; n < outputs; n++)
        for (int m = 0; m < vecs; m++) store(sums + (n * vecs + m) * LANES, s[n][m]);
}

INLINE void chunk(const job *j, const float *x, const float *w, float *sums, int outputs, const int vecs,
                  const int at_once) {
    for (int64_t k = 0; k < j->in; k += DEPTH) {
        int64_t depth = j->in - k < DEPTH ? j->in - k : DEPTH;
        int n = 0;
        for (; n + at_once <= outputs; n += at_once)
            tile(x + k * vecs * LANES, w + n * j->in + k, j->in, depth, sums + n * vecs * LANES, vecs, at_once);
        for (; n < outputs; n++)
            tile(x + k * vecs * LANES, w + n * j->in + k, j->in, depth, sums + n * vecs * LANES, vecs, 1);
    }
}

static void run_chunk(void *data, int64_t task) {
    const job *j = data;
    int64_t first = task / j->num_panels * OUTPUTS, panel = task % j->num_panels;
    int outputs = j->out - first < OUTPUTS ? (int)(j->out - first) : OUTPUTS;
    int vecs = (int)panel_vecs(j, panel);
    const float *x = j->panels + panel * PANEL * j->in, *w = j->w + first * j->in;
    float sums[OUTPUTS * PANEL], turned[LANES * LANES];
    for (int n = 0; n < outputs; n++)
        for (int m = 0; m < vecs; m++) store(sums + (n * vecs + m) * LANES, splat(j->bias ? j->bias[first + n] : 0));
    if (vecs == 4)
        chunk(j, x, w, sums, outputs, 4, 6);
    else if (vecs == 3)
        chunk(j, x, w, sums, outputs, 3, 8);
    else if (vecs == 2)
        chunk(j, x, w, sums, outputs, 2, 12);
    else
        chunk(j, x, w, sums, outputs, 1, 16);
    for (int m = 0; m < vecs; m++) {
        int64_t row = panel * PANEL + m * LANES;
        int rows = j->rows - row < LANES ? (int)(j->rows - row) : LANES;
        float *y = j->y + row * j->y_stride + first;
        for (int n = 0; n < outputs; n += LANES) {
            int width = outputs - n < LANES ? outputs - n : LANES;
            const float *from = sums + (n * vecs + m) * LANES;
            if (width == LANES && !j->accumulate) {
                transpose16(from, vecs * LANES, LANES, y + n, j->y_stride, rows);
                continue;
            }
            transpose16(from, vecs * LANES, width, turned, LANES, rows);
            for (int r = 0; r < rows; r++) {
                float *to = y + r * j->y_stride + n;
                if (width == LANES)
                    store(to, load(to) + load(turned + r * LANES));
                else if (j->accumulate)
                    for (int i = 0; i < width; i++) to[i] += turned[r * LANES + i];
                else
                    memcpy(to, turned + r * LANES, (size_t)width * sizeof(float));
            }
        }
    }
}

const int punica_has_linear = 1;

/* y is written, or with `accumulate` added to. `panels`: room for `in` floats a row, the rows rounded up to a multiple
   of PANEL. */
void punica_linear(const float *x, int64_t x_stride, const float *w, const float *bias, float *y, int64_t y_stride,
                   int64_t rows, int64_t in, int64_t out, float *panels, int64_t accumulate, parallel_function parallel,
                   int threads) {
    int64_t num_panels = (rows + PANEL - 1) / PANEL, chunks = (out + OUTPUTS - 1) / OUTPUTS;
    job j = {x, w, bias, y, panels, rows, in, out, x_stride, y_stride, num_panels, accumulate};
    for_each_task(pack, &j, num_panels * (PANEL / LANES), parallel, threads);
    for_each_task(run_chunk, &j, num_panels * chunks, parallel, threads);
}

#else

const int punica_has_linear = 0; /* made for the 32 registers of AVX-512: elsewhere a BLAS does better */

#endif
