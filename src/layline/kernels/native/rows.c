/* What a decoder computes on each token's row by itself, FP32. Rows divide among the threads of the
 * caller's OpenMP pool; no row depends on another, or on how many there are.
 */
#include "vectors.h"

#include <math.h>

enum { SERIAL_VALUES = 1 << 14 }; /* Fewer values are computed by the calling thread alone. */

/* Rows of `size` values, a multiple of LANES; strides count values. */
typedef struct {
    work work;
    const float *x, *y, *weight;
    float *out, *sum;
    int64_t size, x_stride, y_stride, heads;
    float floor;
} job;

INLINE int threads_for(int64_t values, int threads)
{
    return values < SERIAL_VALUES ? 1 : threads;
}

static void gate(void *data)
{
    job *job = data;
    int64_t row, last;
    while (take(&job->work, &row, &last))
        for (; row < last; row++) {
            const float *gate = job->x + row * 2 * job->size, *up = gate + job->size;
            float *out = job->out + row * job->size;
            for (int64_t i = 0; i < job->size; i += LANES) {
                const vec value = load(gate + i);
                const ints vanishes = value < -88.0f; /* The product makes NaN of an infinity. */
                const vec power = exponential(choose(vanishes, spread(0.0f), -value));
                const vec dividend = choose(vanishes, value * 0.0f, value);
                store(out + i, dividend / (power + 1.0f) * load(up + i));
            }
        }
}

/* out [tokens, size] = silu(x[:, :size]) * x[:, size:] for x [tokens, 2 * size]. */
void layline_silu_mul(const float *x, float *out, int64_t tokens, int64_t size, int32_t threads,
                      parallel_function *pool)
{
    job job = {.x = x, .out = out, .size = size};
    run(&job, gate, tokens, threads_for(tokens * size, threads), pool);
}

static void add_and_normalise(void *data)
{
    job *job = data;
    int64_t row, last;
    while (take(&job->work, &row, &last))
        for (; row < last; row++) {
            const float *x = job->x + row * job->size, *y = job->y + row * job->size;
            float *sum = job->sum + row * job->size, *out = job->out + row * job->size;
            vec squares = {0};
            for (int64_t i = 0; i < job->size; i += LANES) {
                const vec value = load(x + i) + load(y + i);
                store(sum + i, value);
                squares += value * value;
            }
            const float length = sqrtf(total(squares));
            const float divisor = sqrtf(length * length + job->floor * job->floor);
            for (int64_t i = 0; i < job->size; i += LANES)
                store(out + i, load(sum + i) * load(job->weight + i) / divisor);
        }
}

/* sum = x + y and out = sum * weight / hypot(|sum|, floor), [tokens, size] each. */
void layline_add_norm(const float *x, const float *y, const float *weight, float floor, float *out,
                      float *sum, int64_t tokens, int64_t size, int32_t threads,
                      parallel_function *pool)
{
    job job = {.x = x, .y = y, .weight = weight, .out = out, .sum = sum, .size = size,
               .floor = floor};
    run(&job, add_and_normalise, tokens, threads_for(tokens * size, threads), pool);
}

static void rotate(void *data)
{
    job *job = data;
    const int64_t half = job->size / 2;
    int64_t row, last;
    while (take(&job->work, &row, &last))
        for (; row < last; row++) {
            const float *cosine = job->x + row * job->y_stride;
            const float *sine = job->y + row * job->y_stride;
            float *heads = job->out + row * job->x_stride;
            for (int64_t head = 0; head < job->heads; head++, heads += job->size)
                for (int64_t i = 0; i < half; i += LANES) {
                    const vec low = load(heads + i), high = load(heads + half + i);
                    store(heads + i, low * load(cosine + i) + high * load(sine + i));
                    store(heads + half + i,
                          high * load(cosine + half + i) + low * load(sine + half + i));
                }
        }
}

/* Rotate `heads` heads of `size` values at the beginning of each row of `stride`, in place. Rows of
 * cosines and sines are `table_stride` apart; the sines of the first half are negative. */
void layline_rotate(float *rows, const float *cosines, const float *sines, int64_t tokens,
                    int64_t heads, int64_t size, int64_t stride, int64_t table_stride,
                    int32_t threads, parallel_function *pool)
{
    job job = {.x = cosines, .y = sines, .out = rows, .size = size, .heads = heads,
               .x_stride = stride, .y_stride = table_stride};
    run(&job, rotate, tokens, threads_for(tokens * heads * size, threads), pool);
}
