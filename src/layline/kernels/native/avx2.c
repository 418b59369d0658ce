/* The vector part for AVX2 with FMA, and AVX-VNNI where the compiler was told of it: a tile is
 * multiplied in two halves of 8 rows, and a block in parts of 4 tokens. The arithmetic and its order
 * are those of avx512.c, to the bit. */
#include "packed.h"

#include <immintrin.h>
#include <string.h>

enum { PART = 4 };

INLINE __m256 read_8(const void *row, int is_bfloat16, int64_t index)
{
    if (!is_bfloat16)
        return _mm256_loadu_ps((const float *)row + index);
    __m128i half = _mm_loadu_si128((const __m128i *)((const uint16_t *)row + index));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

INLINE __m128i fold(__m256i v, int adds)
{
    __m128i low = _mm256_castsi256_si128(v), high = _mm256_extracti128_si256(v, 1);
    __m128i four = adds ? _mm_add_epi32(low, high) : _mm_max_epi32(low, high);
    __m128i swapped = _mm_shuffle_epi32(four, 0x4e);
    __m128i two = adds ? _mm_add_epi32(four, swapped) : _mm_max_epi32(four, swapped);
    swapped = _mm_shuffle_epi32(two, 0xb1);
    return adds ? _mm_add_epi32(two, swapped) : _mm_max_epi32(two, swapped);
}

void round_row(const void *row, int is_bfloat16, int64_t groups, rounded block, int token,
               int width)
{
    for (int64_t g = 0; g < groups; g++) {
        __m256 part[4];
        __m256i whole[4], tops = _mm256_setzero_si256(), sum = tops;
        for (int p = 0; p < 4; p++) {
            part[p] = read_8(row, is_bfloat16, g * GROUP + 8 * p);
            __m256i bits = _mm256_castps_si256(part[p]);
            bits = _mm256_andnot_si256(_mm256_set1_epi32(INT32_MIN), bits);
            tops = _mm256_max_epi32(tops, bits);
            whole[p] = _mm256_setzero_si256();
        }
        int32_t top = _mm_cvtsi128_si32(fold(tops, 0));
        float largest, scale = top < INFINITE ? 0.0f : __builtin_nanf("");
        memcpy(&largest, &top, 4);
        if (top < INFINITE && largest > SMALLEST) {
            scale = largest * (1.0f / LARGEST);
            const __m256 steps = _mm256_set1_ps(LARGEST / largest);
            for (int p = 0; p < 4; p++) {
                whole[p] = _mm256_cvtps_epi32(_mm256_mul_ps(part[p], steps));
                sum = _mm256_add_epi32(sum, whole[p]);
            }
        }
        __m256i *to = (__m256i *)(block.values + (g * width + token) * GROUP);
        for (int p = 0; p < 4; p += 2) {
            /* Packing works within 128 bits; the permutation puts the quarters in order. */
            __m256i packed = _mm256_packs_epi32(whole[p], whole[p + 1]);
            _mm256_storeu_si256(to + p / 2, _mm256_permute4x64_epi64(packed, 0xd8));
        }
        float *pair = block.scales + (g * width + token) * 2;
        pair[0] = scale;
        pair[1] = scale * (float)_mm_cvtsi128_si32(fold(sum, 1));
    }
}

/* Rows 8 * half to 8 * half + 7 of vector `pair`: columns 2 * pair and 2 * pair + 1 of each. */
INLINE __m256i values(const uint8_t *group, int format, int half, int pair)
{
    if (format & WHOLE)
        return _mm256_load_si256((const __m256i *)(group + 64 * pair + 32 * half));
    if (format & EIGHT) {
        const uint8_t *at = group + 32 * pair + 16 * half;
        return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at));
    }
    const uint8_t *at = group + 64 * (pair / 4) + 32 * half;
    __m256i four = _mm256_srli_epi16(_mm256_loadu_si256((const __m256i *)at), 4 * (pair % 4));
    return _mm256_and_si256(four, _mm256_set1_epi16(15));
}

/* The same 8 rows' scales (which = 0) or minima (1) of a group. */
INLINE __m256 factors(const uint8_t *group, int format, int half, int which)
{
    if ((format & EIGHT) && which)
        return _mm256_setzero_ps();
    const uint8_t *at = group + values_bytes(format);
    if (format & HALF)
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at + 32 * which + 16 * half)));
    return _mm256_loadu_ps((const float *)(at + 64 * which + 32 * half));
}

INLINE __m256i add_products(__m256i sum, __m256i w, __m256i x)
{
#ifdef __AVXVNNI__
    return _mm256_dpwssd_avx_epi32(sum, w, x);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
#endif
}

/* `count` tokens from a block of `width`, whose first one x and pairs point at. */
INLINE void multiply(const uint8_t *tile, const int format, int64_t groups, const int32_t *x,
                     const float *pairs, int width, const int half, const int count, float *out)
{
    __m256 sums[PART];
    for (int t = 0; t < count; t++)
        sums[t] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m256i products[PART];
        for (int t = 0; t < count; t++)
            products[t] = _mm256_setzero_si256();
        for (int line = 0; line < group_bytes(format) && !(format & WHOLE); line += 64)
            _mm_prefetch((const char *)tile + PREFETCH + line, _MM_HINT_T0);
#pragma GCC unroll 16
        for (int pair = 0; pair < PAIRS; pair++) {
            __m256i w = values(tile, format, half, pair);
#pragma GCC unroll 4
            for (int t = 0; t < count; t++)
                products[t] = add_products(products[t], w, _mm256_set1_epi32(x[t * PAIRS + pair]));
        }
        const __m256 scale = factors(tile, format, half, 0);
        const __m256 minimum = factors(tile, format, half, 1);
#pragma GCC unroll 4
        for (int t = 0; t < count; t++) {
            __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(pairs[2 * t]));
            if (!(format & EIGHT))
                sums[t] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(pairs[2 * t + 1]), sums[t]);
            sums[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[t]), factor, sums[t]);
        }
        tile += group_bytes(format);
        x += width * PAIRS;
        pairs += width * 2;
    }
    for (int t = 0; t < count; t++)
        _mm256_storeu_ps(out + t * TILE + 8 * half, sums[t]);
}

INLINE void multiply_parts(const uint8_t *tile, const int format, int64_t groups, rounded block,
                           int width, float *out)
{
    for (int token = 0; token < width; token += PART, out += PART * TILE) {
        const int32_t *x = (const int32_t *)block.values + token * PAIRS;
        const float *pairs = block.scales + token * 2;
        for (int half = 0; half < 2; half++)
            if (width == 1)
                multiply(tile, format, groups, x, pairs, width, half, 1, out);
            else if (width == 2)
                multiply(tile, format, groups, x, pairs, width, half, 2, out);
            else
                multiply(tile, format, groups, x, pairs, width, half, PART, out);
    }
}

#define KERNELS(format) \
    case (format): \
        multiply_parts(tile, format, groups, block, width, out); \
        break;

void multiply_tile(const uint8_t *tile, int format, int64_t groups, rounded block, int width,
                   float *out)
{
    switch (format) {
        KERNELS(FOUR)
        KERNELS(FOUR | HALF)
        KERNELS(EIGHT)
        KERNELS(EIGHT | HALF)
        KERNELS(WHOLE)
    }
}

INLINE void expand(const uint8_t *tile, const int format, int64_t groups, uint8_t *whole)
{
    for (int64_t g = 0; g < groups; g++) {
        for (int half = 0; half < 2; half++) {
            uint8_t *to = whole + 32 * half;
            for (int pair = 0; pair < PAIRS; pair++)
                _mm256_store_si256((__m256i *)(to + 64 * pair), values(tile, format, half, pair));
            to += values_bytes(WHOLE);
            _mm256_store_ps((float *)to, factors(tile, format, half, 0));
            _mm256_store_ps((float *)(to + 64), factors(tile, format, half, 1));
        }
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
