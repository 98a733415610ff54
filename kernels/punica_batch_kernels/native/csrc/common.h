/* What the CPU kernels share: vectors of float32, sums in a fixed order, and the threads of torch's OpenMP runtime.

   Each task is computed by one thread in one order, so no result depends on the number of threads. Sums are kept as
   written: nothing here may be compiled with -ffast-math. */

#ifndef PUNICA_COMMON_H
#define PUNICA_COMMON_H

#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(4)));

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec a) { *(vec *)p = a; }
INLINE vec splat(float a) { return a - (vec){0}; }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HAS_SHUFFLES
#endif
#endif

/* The sum of the lanes, always by the same tree: lane l with lane l + LANES / 2, and so on. */
#if defined(HAS_SHUFFLES) && LANES == 16
typedef float half8 __attribute__((vector_size(32)));
typedef float half4 __attribute__((vector_size(16)));
INLINE float sum(vec a) {
    half8 b = __builtin_shufflevector(a, a, 0, 1, 2, 3, 4, 5, 6, 7) +
              __builtin_shufflevector(a, a, 8, 9, 10, 11, 12, 13, 14, 15);
    half4 c = __builtin_shufflevector(b, b, 0, 1, 2, 3) + __builtin_shufflevector(b, b, 4, 5, 6, 7);
    return (c[0] + c[2]) + (c[1] + c[3]);
}

/* out[i] = the sum of s[i]'s lanes, for 16 vectors, in 15 additions: each level halves the lanes of two vectors. */
#define EIGHTS(a, b)                                                                                     \
    (__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +             \
     __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define FOURS(a, b)                                                                                      \
    (__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +           \
     __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
#define TWOS(a, b)                                                                                       \
    (__builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +           \
     __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
#define ONES(a, b)                                                                                       \
    (__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +          \
     __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
INLINE void sums16(const vec *s, float *out) {
    vec a[8], b[4];
    for (int i = 0; i < 8; i++) a[i] = EIGHTS(s[2 * i], s[2 * i + 1]);
    for (int i = 0; i < 4; i++) b[i] = FOURS(a[2 * i], a[2 * i + 1]);
    store(out, ONES(TWOS(b[0], b[1]), TWOS(b[2], b[3])));
}
#else
INLINE float sum(vec a) {
    float s[LANES];
    store(s, a);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) s[i] += s[i + n];
    return s[0];
}
INLINE void sums16(const vec *s, float *out) {
    for (int i = 0; i < 16; i++) out[i] = sum(s[i]);
}
#endif

INLINE vec select_vec(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

/* e^x within 2 units in the last place, from x = n ln 2 + r and a polynomial in r. Saturates below at the smallest
   normal number, is infinite above float32's range, and passes NaN on. */
INLINE vec exp_vec(vec x) {
    const vec low = splat(-87.33f), high = splat(88.72f), magic = splat(12582912.0f); /* 1.5 * 2^23: rounds to integers */
    x = select_vec(x < low, low, x);
    ivec over = x > high;
    x = select_vec(over, high, x);
    vec t = x * 1.44269504088896341f + magic, n = t - magic;
    vec r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    p = (vec)((ivec)p + (((ivec)t - (ivec)magic) << 23));
    return select_vec(over, splat(__builtin_inff()), p);
}

/* -- threads -- */

/* GOMP_parallel of the runtime that torch uses, so that its threads serve here too; NULL: the calling thread alone. */
typedef void (*parallel_function)(void (*)(void *), void *, unsigned, unsigned);

typedef struct {
    void (*run)(void *data, int64_t task);
    void *data;
    int64_t tasks, next;
} task_queue;

static void take_tasks(void *data) {
    task_queue *queue = data;
    int64_t i;
    while ((i = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED)) < queue->tasks) queue->run(queue->data, i);
}

static inline void for_each_task(void (*run)(void *, int64_t), void *data, int64_t tasks, parallel_function parallel,
                                 int threads) {
    task_queue queue = {run, data, tasks, 0};
    if (threads > tasks) threads = (int)tasks;
    if (parallel && threads > 1)
        parallel(take_tasks, &queue, (unsigned)threads, 0);
    else
        take_tasks(&queue);
}

#endif
