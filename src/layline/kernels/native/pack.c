/* Lay a quantised matrix out in tiles; packed.h describes them. */
#include "packed.h"

#include <string.h>

/* One row's 32 values of 4 bits, a byte each, as row `lane` of a group. */
static void pack_four(const uint8_t *from, uint8_t *group, int lane)
{
    for (int vector = 0; vector < 4; vector++, from += 8)
        for (int half = 0; half < 2; half++) {
            const uint8_t *value = from + half;
            uint16_t word = value[0] | value[2] << 4 | value[4] << 8 | value[6] << 12;
            memcpy(group + 64 * vector + 4 * lane + 2 * half, &word, 2);
        }
}

static void pack_eight(const uint8_t *from, uint8_t *group, int lane)
{
    for (int pair = 0; pair < PAIRS; pair++)
        memcpy(group + 32 * pair + 2 * lane, from + 2 * pair, 2);
}

/* Fill `tiles`, whose format, rows and groups `into` has, from values [rows, 32 * groups] of a byte
 * each, and scales and minima [rows, groups] in the format's type; EIGHT has no minima. */
void layline_pack(const matrix *into, uint8_t *tiles, const uint8_t *values, const uint8_t *scales,
                  const uint8_t *minima)
{
    const int format = into->format, bytes = format & HALF ? 2 : 4;
    for (int64_t first = 0; first < into->rows; first += TILE)
        for (int64_t g = 0; g < into->groups; g++, tiles += group_bytes(format)) {
            memset(tiles, 0, group_bytes(format));
            for (int lane = 0; lane < TILE && first + lane < into->rows; lane++) {
                const int64_t at = (first + lane) * into->groups + g;
                uint8_t *factors = tiles + values_bytes(format) + lane * bytes;
                (format & EIGHT ? pack_eight : pack_four)(values + at * GROUP, tiles, lane);
                memcpy(factors, scales + at * bytes, bytes);
                if (!(format & EIGHT))
                    memcpy(factors + TILE * bytes, minima + at * bytes, bytes);
            }
        }
}
