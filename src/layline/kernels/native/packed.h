/* Quantised matrices in tiles of 16 rows, and activations rounded to 16 bits by group of 32.
 *
 * A tile holds, for each group of 32 columns in turn, the values of its 16 rows and then their
 * scales and minima: weight = value * scale + minimum. Lane r of every vector belongs to row r of
 * the tile, and a lane's two 16-bit halves are two neighbouring columns.
 *
 *   FOUR   4 vectors whose 16-bit lanes hold 4 values each, lowest first; scales; minima
 *   EIGHT  16 half vectors of signed bytes; scales; no minima
 *   WHOLE  16 vectors of 16-bit values; FP32 scales; FP32 minima   (within a call, never stored)
 *
 * Scales and minima of FOUR and EIGHT are FP16 where HALF is set, else FP32.
 */
#ifndef LAYLINE_PACKED_H
#define LAYLINE_PACKED_H

#include "work.h"

#include <stdint.h>

enum { GROUP = 32, TILE = 16, PAIRS = GROUP / 2, BLOCK = 12 };
enum { FOUR = 0, EIGHT = 1, HALF = 2, WHOLE = 4 };
enum { PREFETCH = 4096 }; /* Bytes ahead of the group that is multiplied. */

/* An activation is its group's largest magnitude times an integer in -LARGEST .. LARGEST, over
 * LARGEST. A group whose values all lie below SMALLEST counts as zeros; one that holds an infinity
 * or a NaN gets NaN as its scale, so that every product with it is NaN. */
#define LARGEST 32767.0f
#define SMALLEST 7.9e-31f /* 2^-100 */
#define INFINITE 0x7f800000 /* A float's bits, as do the magnitudes' below, order as the floats. */

/* Tiles follow each other without gaps; the last one may have fewer rows than it has room for. */
typedef struct {
    const uint8_t *tiles;
    int64_t rows, groups;
    int32_t format;
} matrix;

/* Rounded activations of a block of `width` tokens: for each group, `width` times 32 values, and
 * `width` pairs of a scale and the group's sum. */
typedef struct {
    int16_t *values;
    float *scales;
} rounded;

INLINE int values_bytes(int format)
{
    return TILE * GROUP * (format & WHOLE ? 4 : format & EIGHT ? 2 : 1) / 2;
}

INLINE int group_bytes(int format)
{
    int factors = format & EIGHT ? 1 : 2;
    return values_bytes(format) + factors * TILE * (format & HALF ? 2 : 4);
}

/* Round one row of `groups` groups, as token `token` of a block of `width`. */
void round_row(const void *row, int is_bfloat16, int64_t groups, rounded block, int token,
               int width);

/* A tile of any stored format in the format WHOLE. */
void expand_tile(const uint8_t *tile, int format, int64_t groups, uint8_t *whole);

/* Products of one tile with `width` tokens, FP32 [width, 16]: 4, 8 or BLOCK, of stored formats also
 * 1 or 2. */
void multiply_tile(const uint8_t *tile, int format, int64_t groups, rounded block, int width,
                   float *out);

#endif
