// SPDX-License-Identifier: Apache-2.0
/* Checked arithmetic on sizes that come from outside. Each returns false, leaving *ret alone, when the result does not
 * fit. */
#ifndef BASE_ARITH_H
#define BASE_ARITH_H

#include <stdbool.h>
#include <stdint.h>

static inline bool tl_add_u64(uint64_t a, uint64_t b, uint64_t *ret)
{
    uint64_t sum;
    if (__builtin_add_overflow(a, b, &sum)) return false;
    *ret = sum;
    return true;
}

static inline bool tl_mul_u64(uint64_t a, uint64_t b, uint64_t *ret)
{
    uint64_t product;
    if (__builtin_mul_overflow(a, b, &product)) return false;
    *ret = product;
    return true;
}

static inline uint64_t tl_min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline uint64_t tl_max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

#endif
