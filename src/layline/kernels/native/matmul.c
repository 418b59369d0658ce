/* x @ weight.T for a packed matrix, divided among the threads of the caller's OpenMP pool.
 *
 * Every result is its token row's own: which rows share a call, how they fall into blocks and how
 * many threads there are changes no bit.
 */
#include "packed.h"

#include <stdlib.h>
#include <string.h>

enum {
    STORED_MOST = 36,        /* Tokens that multiply with a tile as it is stored. */
    CHUNK = 20 * BLOCK,      /* Tokens rounded at a time, so that they stay in the nearer caches. */
    SERIAL_VALUES = 1 << 14, /* Fewer activations are rounded by the calling thread alone. */
};

/* What the threads of one call share. */
typedef struct {
    work work;
    const matrix *weight;
    const uint8_t *x;
    float *out;
    int64_t tokens, block; /* All of them, and those of a block. */
    int32_t is_bfloat16, failed;
    rounded blocks;
} job;

/* The width of the narrowest kernel for `count` tokens. */
INLINE int width_for(int64_t count, int stored)
{
    if (count <= 2 && stored)
        return count;
    return count <= 4 ? 4 : count <= 8 ? 8 : BLOCK;
}

/* Tokens of a block. Few tokens make the fewest blocks, as equal as the widths allow: two blocks
 * of 8 rather than 12 and 4. */
INLINE int64_t block_for(int64_t tokens)
{
    if (tokens > STORED_MOST)
        return BLOCK;
    return width_for(ceiling(tokens, ceiling(tokens, BLOCK)), 1);
}

/* How many tokens block `block` has, and the kernel's width for them. */
INLINE int64_t count_of(const job *job, int64_t block)
{
    return least(job->tokens - block * job->block, job->block);
}

INLINE int width_of(const job *job, int64_t block)
{
    return width_for(count_of(job, block), job->tokens <= STORED_MOST);
}

INLINE rounded block_at(const job *job, int64_t block)
{
    int64_t before = block * job->block * job->weight->groups;
    return (rounded){job->blocks.values + before * GROUP, job->blocks.scales + before * 2};
}

/* Items are blocks of tokens. Tokens that only fill a block up are zeros. */
static void round_blocks(void *data)
{
    job *job = data;
    const int64_t groups = job->weight->groups;
    const int64_t row_bytes = groups * GROUP * (job->is_bfloat16 ? 2 : 4);
    int64_t block, last;
    while (take(&job->work, &block, &last))
        for (; block < last; block++) {
            const int64_t count = count_of(job, block);
            const int width = width_of(job, block);
            const rounded at = block_at(job, block);
            for (int t = 0; t < count; t++)
                round_row(job->x + (block * job->block + t) * row_bytes, job->is_bfloat16, groups, at,
                          t, width);
            for (int64_t g = 0; g < groups && count < width; g++) {
                memset(at.values + (g * width + count) * GROUP, 0, (width - count) * GROUP * 2);
                memset(at.scales + (g * width + count) * 2, 0, (width - count) * 8);
            }
        }
}

static void multiply_blocks(const job *job, int64_t tile, const uint8_t *values, int format)
{
    const int64_t rows = job->weight->rows, filled = least(rows - tile * TILE, TILE);
    for (int64_t block = 0; block * job->block < job->tokens; block++) {
        float products[BLOCK * TILE];
        multiply_tile(values, format, job->weight->groups, block_at(job, block),
                      width_of(job, block), products);
        float *out = job->out + block * job->block * rows + tile * TILE;
        for (int64_t t = 0; t < count_of(job, block); t++)
            memcpy(out + t * rows, products + t * TILE, filled * 4);
    }
}

/* Items are tiles. For many tokens a tile is expanded once. */
static void multiply_tiles(void *data)
{
    job *job = data;
    const matrix *weight = job->weight;
    const int64_t tile_bytes = weight->groups * group_bytes(weight->format);
    uint8_t *whole = NULL;
    if (job->tokens > STORED_MOST) {
        whole = aligned_alloc(64, weight->groups * group_bytes(WHOLE));
        if (!whole) {
            __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
            return;
        }
    }
    int64_t tile, last;
    while (take(&job->work, &tile, &last))
        for (; tile < last; tile++) {
            const uint8_t *stored = weight->tiles + tile * tile_bytes;
            if (whole)
                expand_tile(stored, weight->format, weight->groups, whole);
            multiply_blocks(job, tile, whole ? whole : stored, whole ? WHOLE : weight->format);
        }
    free(whole);
}

/* out [tokens, rows] FP32 = x [tokens, 32 * groups] @ weight.T, both contiguous; x is FP32 or
 * bfloat16. `pool` is GOMP_parallel of the OpenMP library that runs the caller's threads. Returns
 * 0, or 1 where memory ran out. */
int layline_matmul(const matrix *weight, const uint8_t *x, float *out, int64_t tokens,
                   int32_t is_bfloat16, int32_t threads, parallel_function *pool)
{
    const int64_t row_bytes = weight->groups * GROUP * (is_bfloat16 ? 2 : 4);
    const int64_t room = ceiling(least(tokens, CHUNK), BLOCK) * BLOCK * weight->groups;
    int16_t *scratch = aligned_alloc(64, ceiling(room * (GROUP * 2 + 8), 64) * 64);
    if (!scratch)
        return 1;
    job job = {.weight = weight, .is_bfloat16 = is_bfloat16};
    job.blocks = (rounded){scratch, (float *)(scratch + room * GROUP)};
    for (int64_t first = 0; first < tokens; first += CHUNK) {
        job.x = x + first * row_bytes;
        job.out = out + first * weight->rows;
        job.tokens = least(tokens - first, CHUNK);
        job.block = block_for(job.tokens);
        const int few = job.tokens * weight->groups * GROUP < SERIAL_VALUES;
        run(&job, round_blocks, ceiling(job.tokens, job.block), few ? 1 : threads, pool);
        run(&job, multiply_tiles, ceiling(weight->rows, TILE), threads, pool);
    }
    free(scratch);
    return job.failed;
}
