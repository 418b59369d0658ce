/* Work that the threads of the caller's OpenMP pool divide among themselves. */
#ifndef LAYLINE_WORK_H
#define LAYLINE_WORK_H

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

enum { TURNS = 2 }; /* Pieces of work a thread, so that a busy core gets fewer. */

/* GOMP_parallel, which libgomp exports and other OpenMP libraries imitate. */
typedef void parallel_function(void (*work)(void *), void *data, unsigned threads, unsigned flags);

/* Items that threads take, `share` at a time, by counting `next` up; the first field of a job. */
typedef struct {
    int64_t next, items, share;
} work;

INLINE int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

INLINE int64_t ceiling(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

INLINE int take(work *work, int64_t *first, int64_t *last)
{
    *first = __atomic_fetch_add(&work->next, work->share, __ATOMIC_RELAXED);
    *last = least(*first + work->share, work->items);
    return *first < work->items;
}

/* Call `does` with `job`, which begins with its work, on every thread. */
INLINE void run(void *job, void (*does)(void *), int64_t items, int threads,
                parallel_function *pool)
{
    work *work = job;
    work->next = 0;
    work->items = items;
    work->share = threads > 1 ? ceiling(items, (int64_t)threads * TURNS) : items;
    if (threads > 1)
        pool(does, job, threads, 0);
    else
        does(job);
}

#endif
