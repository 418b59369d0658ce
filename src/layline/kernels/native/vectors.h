/* FP32 vectors of the machine's width, and the functions of them that both row files need. */
#ifndef LAYLINE_VECTORS_H
#define LAYLINE_VECTORS_H

#include "work.h"

#include <immintrin.h>

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif

#define VECTOR(type) __attribute__((vector_size(LANES * sizeof(type)), aligned(sizeof(type)), \
                                    may_alias))
typedef float vec VECTOR(float);
typedef int32_t ints VECTOR(int32_t);
typedef uint32_t words VECTOR(uint32_t);
typedef uint16_t halves VECTOR(uint16_t);

INLINE vec load(const float *from)
{
    return *(const vec *)from;
}

INLINE void store(float *to, vec values)
{
    *(vec *)to = values;
}

INLINE vec spread(float value)
{
    return value - (vec){0};
}

/* LANES values from `index` on, of FP32 or of bfloat16. */
INLINE vec load_either(const void *from, const int is_bfloat16, int64_t index)
{
    if (!is_bfloat16)
        return load((const float *)from + index);
    const halves stored = *(const halves *)((const uint16_t *)from + index);
    return (vec)(__builtin_convertvector(stored, words) << 16);
}

INLINE vec choose(ints where, vec yes, vec no)
{
    return (vec)((where & (ints)yes) | (~where & (ints)no));
}

/* a * b + sum, rounded once. */
INLINE vec add_product(vec a, vec b, vec sum)
{
#ifdef __AVX512F__
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#endif
}

/* Every fourth lane's sum. */
INLINE __m128 folded(vec values)
{
#ifdef __AVX512F__
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)values),
                                 _mm512_extractf32x8_ps((__m512)values, 1));
#else
    __m256 eight = (__m256)values;
#endif
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

/* The sums of four vectors. */
INLINE __m128 totals(vec a, vec b, vec c, vec d)
{
    return _mm_hadd_ps(_mm_hadd_ps(folded(a), folded(b)), _mm_hadd_ps(folded(c), folded(d)));
}

INLINE float total(vec values)
{
    return _mm_cvtss_f32(totals(values, values, values, values));
}

/* e to the power of values up to 88; those below -87 count as -87, and a NaN stays one.
 *
 * 2^n times a polynomial on half of ln 2 to either side of zero: the first terms of e^x, whose
 * rest is below 2^-24 there. */
INLINE vec exponential(vec x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded to integers. */
    x = choose(x < -87.0f, spread(-87.0f), x);
    const vec shifted = x * 1.44269504f + shift, power = shifted - shift;
    const vec rest = x - power * 0.693359375f + power * 2.12194440e-4f; /* ln 2 in two parts. */
    vec sum = rest * (1.0f / 5040) + (1.0f / 720);
    sum = sum * rest + (1.0f / 120);
    sum = sum * rest + (1.0f / 24);
    sum = sum * rest + (1.0f / 6);
    sum = sum * rest + 0.5f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * (vec)(((ints)shifted - (ints)spread(shift) + 127) << 23);
}

#endif
