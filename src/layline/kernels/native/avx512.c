/* The vector part for AVX-512 with VNNI: one register holds a dword of each of a tile's 16 rows. */
#include "packed.h"

#include <immintrin.h>
#include <string.h>

INLINE __m512 read_16(const void *row, int is_bfloat16, int64_t index)
{
    if (!is_bfloat16)
        return _mm512_loadu_ps((const float *)row + index);
    __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)row + index));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

void round_row(const void *row, int is_bfloat16, int64_t groups, rounded block, int token,
               int width)
{
    for (int64_t g = 0; g < groups; g++) {
        __m512 low = read_16(row, is_bfloat16, g * GROUP);
        __m512 high = read_16(row, is_bfloat16, g * GROUP + 16);
        const __m512i sign = _mm512_set1_epi32(INT32_MIN);
        int32_t top = _mm512_reduce_max_epi32(
            _mm512_max_epi32(_mm512_andnot_si512(sign, _mm512_castps_si512(low)),
                             _mm512_andnot_si512(sign, _mm512_castps_si512(high))));
        float largest, scale = top < INFINITE ? 0.0f : __builtin_nanf("");
        memcpy(&largest, &top, 4);
        __m512i first = _mm512_setzero_si512(), second = first;
        if (top < INFINITE && largest > SMALLEST) {
            scale = largest * (1.0f / LARGEST);
            const __m512 steps = _mm512_set1_ps(LARGEST / largest);
            first = _mm512_cvtps_epi32(_mm512_mul_ps(low, steps));
            second = _mm512_cvtps_epi32(_mm512_mul_ps(high, steps));
        }
        __m256i *to = (__m256i *)(block.values + (g * width + token) * GROUP);
        _mm256_storeu_si256(to, _mm512_cvtsepi32_epi16(first));
        _mm256_storeu_si256(to + 1, _mm512_cvtsepi32_epi16(second));
        float *pair = block.scales + (g * width + token) * 2;
        pair[0] = scale;
        pair[1] = scale * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
    }
}

/* Vector `pair` (0 to 15) of a group: columns 2 * pair and 2 * pair + 1 of each row. Where `chains`
 * is 2, odd ones of FOUR are 16 times as large: that saves half of the shifts. */
INLINE __m512i values(const uint8_t *group, int format, int pair, int chains)
{
    if (format & WHOLE)
        return _mm512_load_si512(group + 64 * pair);
    if (format & EIGHT)
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(group + 32 * pair)));
    __m512i four = _mm512_loadu_si512(group + 64 * (pair / 4));
    if (chains == 2) {
        if (pair % 4 > 1)
            four = _mm512_srli_epi16(four, 8);
        return _mm512_and_si512(four, _mm512_set1_epi16(pair % 2 ? 15 << 4 : 15));
    }
    if (pair % 4)
        four = _mm512_srli_epi16(four, 4 * (pair % 4));
    return pair % 4 == 3 ? four : _mm512_and_si512(four, _mm512_set1_epi16(15));
}

/* The 16 rows' scales (which = 0) or minima (1) of a group. */
INLINE __m512 factors(const uint8_t *group, int format, int which)
{
    if ((format & EIGHT) && which)
        return _mm512_setzero_ps();
    const uint8_t *at = group + values_bytes(format);
    if (format & HALF)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(at + 32 * which)));
    return _mm512_loadu_ps((const float *)(at + 64 * which));
}

/* `format` and `width` are constants where this is inlined: every array becomes registers. */
INLINE void multiply(const uint8_t *tile, const int format, int64_t groups, rounded block,
                     const int width, float *out)
{
    const int32_t *x = (const int32_t *)block.values;
    const float *pairs = block.scales;
    const int chains = width < BLOCK && (format & (EIGHT | WHOLE) || width < 8) ? 2 : 1;
    __m512 sums[BLOCK];
    for (int t = 0; t < width; t++)
        sums[t] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        /* A product waits for the one before it in its chain, so few tokens have two chains each. */
        __m512i products[2 * BLOCK];
        for (int t = 0; t < chains * width; t++)
            products[t] = _mm512_setzero_si512();
        for (int line = 0; line < group_bytes(format) && !(format & WHOLE); line += 64)
            _mm_prefetch((const char *)tile + PREFETCH + line, _MM_HINT_T0);
#pragma GCC unroll 16
        for (int pair = 0; pair < PAIRS; pair++) {
            __m512i w = values(tile, format, pair, chains);
            __m512i *chain = products + pair % chains * width;
#pragma GCC unroll 12
            for (int t = 0; t < width; t++)
                chain[t] = _mm512_dpwssd_epi32(chain[t], w, _mm512_set1_epi32(x[t * PAIRS + pair]));
        }
#pragma GCC unroll 12
        for (int t = 0; t < width && chains == 2; t++) {
            __m512i odd = products[width + t];
            if (!(format & (EIGHT | WHOLE)))
                odd = _mm512_srai_epi32(odd, 4);
            products[t] = _mm512_add_epi32(products[t], odd);
        }
        const __m512 scale = factors(tile, format, 0), minimum = factors(tile, format, 1);
#pragma GCC unroll 12
        for (int t = 0; t < width; t++) {
            __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(pairs[2 * t]));
            if (!(format & EIGHT))
                sums[t] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(pairs[2 * t + 1]), sums[t]);
            sums[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[t]), factor, sums[t]);
        }
        tile += group_bytes(format);
        x += width * PAIRS;
        pairs += width * 2;
    }
    for (int t = 0; t < width; t++)
        _mm512_storeu_ps(out + t * TILE, sums[t]);
}

#define KERNEL(format, width) \
    case (format) * 16 + (width): \
        multiply(tile, format, groups, block, width, out); \
        break;
#define WIDE(format) KERNEL(format, 4) KERNEL(format, 8) KERNEL(format, BLOCK)
#define KERNELS(format) KERNEL(format, 1) KERNEL(format, 2) WIDE(format)

void multiply_tile(const uint8_t *tile, int format, int64_t groups, rounded block, int width,
                   float *out)
{
    switch (format * 16 + width) {
        KERNELS(FOUR)
        KERNELS(FOUR | HALF)
        KERNELS(EIGHT)
        KERNELS(EIGHT | HALF)
        WIDE(WHOLE)
    }
}

INLINE void expand(const uint8_t *tile, const int format, int64_t groups, uint8_t *whole)
{
    for (int64_t g = 0; g < groups; g++) {
#pragma GCC unroll 16
        for (int pair = 0; pair < PAIRS; pair++)
            _mm512_store_si512(whole + 64 * pair, values(tile, format, pair, 1));
        _mm512_store_ps(whole + values_bytes(WHOLE), factors(tile, format, 0));
        _mm512_store_ps(whole + values_bytes(WHOLE) + 64, factors(tile, format, 1));
        tile += group_bytes(format);
        whole += group_bytes(WHOLE);
    }
}

#define EXPANSION(format) \
    case (format): \
        expand(tile, format, groups, whole); \
        break;

void expand_tile(const uint8_t *tile, int format, int64_t groups, uint8_t *whole)
{
    switch (format) {
        EXPANSION(FOUR)
        EXPANSION(FOUR | HALF)
        EXPANSION(EIGHT)
        EXPANSION(EIGHT | HALF)
    }
}
