/* Attention of one query token a sequence over its cached keys and values, where they lie.
 *
 * A result depends on its own sequence alone: which sequences share a call, and how many threads
 * there are, changes no bit.
 */
#include "vectors.h"

#include <math.h>
#include <stdlib.h>

typedef float fours __attribute__((vector_size(16)));

enum {
    AHEAD = 16, /* Tokens from the one whose row is read to the one whose row is fetched. */
    HEADS = 4, /* Query heads that read a key or a value together. */
    PARTS = 4, /* Vectors of a value that are summed over the tokens together. */
};

/* `cache` is [slots, 2, kv_heads, size]. Sequence b has counts[b] tokens, whose slots are those from b * longest on. */
typedef struct {
    work work;
    const uint8_t *cache;
    const float *q;
    float *out;
    const int64_t *slots, *counts;
    int64_t kv_heads, size, q_stride, group, longest;
    float scale;
    int32_t is_bfloat16, failed;
} job;

/* A piece of it: `heads` query heads of one sequence and one key head. */
typedef struct {
    const uint8_t *keys, *values;
    const float *q;
    const int64_t *slots;
    int64_t count, row, size; /* Tokens; values of a slot; values of a head. */
    float *scores;            /* [heads, room] */
    int64_t room;
    float scale;
} piece;

INLINE int64_t slot_at(const piece *p, int64_t token)
{
    return p->slots[token] * p->row;
}

/* Fetch a later token's row of the head, from `rows` on. */
INLINE void fetch(const piece *p, const uint8_t *rows, const int is_bfloat16, int64_t token)
{
    const int64_t bytes = is_bfloat16 ? 2 : 4;
    const uint8_t *row = rows + slot_at(p, least(token + AHEAD, p->count - 1)) * bytes;
    for (int64_t line = 0; line < p->size * bytes; line += 64)
        _mm_prefetch((const char *)row + line, _MM_HINT_T0);
}

INLINE void score(const piece *p, const int is_bfloat16, const int heads)
{
    for (int64_t t = 0; t < p->count; t++) {
        const int64_t at = slot_at(p, t);
        fetch(p, p->keys, is_bfloat16, t);
        fetch(p, p->values, is_bfloat16, t);
        vec sums[HEADS];
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++)
            sums[h] = (vec){0};
        for (int64_t i = 0; i < p->size; i += LANES) {
            const vec key = load_either(p->keys, is_bfloat16, at + i);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
                sums[h] = add_product(load(p->q + h * p->size + i), key, sums[h]);
        }
        const fours found = (fours)totals(sums[0], sums[1], sums[2], sums[3]);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
            p->scores[h * p->room + t] = found[h] * p->scale;
    }
}

/* Scores to weights, in place: e to what each is above the largest. Returns their sum. */
INLINE float weigh(float *scores, int64_t count, int64_t room)
{
    for (int64_t t = count; t < room; t++)
        scores[t] = scores[0];
    vec largest = load(scores), sum = {0};
    for (int64_t t = LANES; t < room; t += LANES) {
        const vec these = load(scores + t);
        largest = choose(these > largest, these, largest);
    }
    float most = largest[0];
    for (int lane = 1; lane < LANES; lane++)
        most = largest[lane] > most ? largest[lane] : most;
    for (int64_t t = 0; t < room; t += LANES) {
        vec weights = exponential(load(scores + t) - most);
        store(scores + t, weights);
        if (t + LANES <= count)
            sum += weights;
    }
    float rest = total(sum);
    for (int64_t t = count / LANES * LANES; t < count; t++)
        rest += scores[t];
    return rest;
}

INLINE void add_values(const piece *p, const int is_bfloat16, const int heads, const int parts,
                       int64_t from, const float *sums, float *out)
{
    vec found[HEADS][PARTS];
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < parts; i++)
            found[h][i] = (vec){0};
    for (int64_t t = 0; t < p->count; t++) {
        const int64_t at = slot_at(p, t) + from;
#pragma GCC unroll 4
        for (int i = 0; i < parts; i++) {
            const vec value = load_either(p->values, is_bfloat16, at + i * LANES);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
                found[h][i] = add_product(value, spread(p->scores[h * p->room + t]), found[h][i]);
        }
    }
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < parts; i++)
            store(out + h * p->size + from + i * LANES, found[h][i] / sums[h]);
}

INLINE void attend_piece(const piece *p, const int is_bfloat16, const int heads, float *out)
{
    float sums[HEADS];
    score(p, is_bfloat16, heads);
    for (int h = 0; h < heads; h++)
        sums[h] = weigh(p->scores + h * p->room, p->count, p->room);
    int64_t from = 0;
    for (; from + PARTS * LANES <= p->size; from += PARTS * LANES)
        add_values(p, is_bfloat16, heads, PARTS, from, sums, out);
    for (; from < p->size; from += LANES)
        add_values(p, is_bfloat16, heads, 1, from, sums, out);
}

#define PIECE(heads) \
    case heads: \
        if (is_bfloat16) \
            attend_piece(p, 1, heads, out); \
        else \
            attend_piece(p, 0, heads, out); \
        break;

static void attend_heads(const piece *p, int is_bfloat16, int64_t heads, float *out)
{
    switch (heads) {
        PIECE(1)
        PIECE(2)
        PIECE(3)
        PIECE(4)
    }
}

/* Items are the key heads of each sequence in turn. */
static void attend(void *data)
{
    job *job = data;
    const int64_t size = job->size, kv_heads = job->kv_heads, bytes = job->is_bfloat16 ? 2 : 4;
    const int64_t room = ceiling(job->longest, LANES) * LANES;
    float *scores = malloc(room * HEADS * sizeof(float));
    if (!scores) {
        __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    int64_t item, last;
    while (take(&job->work, &item, &last))
        for (; item < last; item++) {
            const int64_t sequence = item / kv_heads, head = item % kv_heads;
            piece piece = {
                .keys = job->cache + head * size * bytes,
                .values = job->cache + (kv_heads + head) * size * bytes,
                .slots = job->slots + sequence * job->longest,
                .count = job->counts[sequence],
                .row = 2 * kv_heads * size,
                .size = size,
                .scores = scores,
                .scale = job->scale,
            };
            piece.room = ceiling(piece.count, LANES) * LANES;
            for (int64_t first = 0; first < job->group; first += HEADS) {
                const int64_t query = head * job->group + first;
                piece.q = job->q + sequence * job->q_stride + query * size;
                float *out = job->out + (sequence * kv_heads * job->group + query) * size;
                attend_heads(&piece, job->is_bfloat16, least(job->group - first, HEADS), out);
            }
        }
    free(scores);
}

/* out [batch, kv_heads * group * size] for queries of as many values at the beginning of each row
 * of `q_stride`, and a cache of FP32 or bfloat16 whose `size` is a multiple of 16. Every sequence
 * has a token. Returns 0, or 1 where memory ran out. */
int layline_attend(const uint8_t *cache, int32_t is_bfloat16, int64_t kv_heads, int64_t size,
                   const float *q, int64_t q_stride, int64_t group, float scale,
                   const int64_t *slots, const int64_t *counts, int64_t batch, int64_t longest,
                   float *out, int32_t threads, parallel_function *pool)
{
    job job = {.cache = cache, .is_bfloat16 = is_bfloat16, .kv_heads = kv_heads, .size = size,
               .q = q, .q_stride = q_stride, .group = group, .scale = scale, .slots = slots,
               .counts = counts, .longest = longest, .out = out};
    run(&job, attend, batch * kv_heads, threads, pool);
    return job.failed;
}
