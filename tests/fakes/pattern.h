// SPDX-License-Identifier: Apache-2.0
/*
 * The content of tensors in tests: rows of 251 bytes, each of which rises by 7 from byte to byte and begins elsewhere
 * than the one before. Neither pages nor pieces of a power of two are alike, so that a test sees what has come to a
 * wrong place. Whole rows are copied and compared at once: a loop over bytes takes most of a test's time with
 * sanitizers.
 */
#ifndef TESTS_FAKES_PATTERN_H
#define TESTS_FAKES_PATTERN_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { PATTERN_ROW_BYTES = 251, PATTERN_STARTS = 256 };

/* Where the row begins in a ramp. */
static inline unsigned pattern_start(uint64_t row, uint64_t seed)
{
    return (unsigned)((row * 89 + seed * 101 + (seed >> 8) * 53) % PATTERN_STARTS);
}

static inline void pattern_ramp(unsigned char ramp[PATTERN_STARTS + PATTERN_ROW_BYTES])
{
    for (unsigned i = 0; i < PATTERN_STARTS + PATTERN_ROW_BYTES; i++)
        ramp[i] = (unsigned char)(i * 7);
}

static inline uint64_t pattern_row_bytes(uint64_t size_bytes, uint64_t at)
{
    return size_bytes - at < PATTERN_ROW_BYTES ? size_bytes - at : PATTERN_ROW_BYTES;
}

static inline void pattern_fill(void *data, uint64_t size_bytes, uint64_t seed)
{
    unsigned char ramp[PATTERN_STARTS + PATTERN_ROW_BYTES];
    pattern_ramp(ramp);
    for (uint64_t at = 0; at < size_bytes; at += PATTERN_ROW_BYTES)
        memcpy((unsigned char *)data + at, ramp + pattern_start(at / PATTERN_ROW_BYTES, seed),
               pattern_row_bytes(size_bytes, at));
}

static inline bool pattern_is(const void *data, uint64_t size_bytes, uint64_t seed)
{
    unsigned char ramp[PATTERN_STARTS + PATTERN_ROW_BYTES];
    bool is_same = true;
    pattern_ramp(ramp);
    for (uint64_t at = 0; at < size_bytes && is_same; at += PATTERN_ROW_BYTES)
        is_same = memcmp((const unsigned char *)data + at, ramp + pattern_start(at / PATTERN_ROW_BYTES, seed),
                         pattern_row_bytes(size_bytes, at)) == 0;
    return is_same;
}

#endif
