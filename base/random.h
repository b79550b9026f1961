// SPDX-License-Identifier: Apache-2.0
/* Random numbers that cannot be guessed. */
#ifndef BASE_RANDOM_H
#define BASE_RANDOM_H

#include <stdint.h>

/* Returns a random number from the kernel, never 0. */
uint64_t tl_random_u64(void);

#endif
