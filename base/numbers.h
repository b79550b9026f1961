// SPDX-License-Identifier: Apache-2.0
/* A queue of 64-bit numbers in one piece of memory: pushed at the back, dropped from the front, read anywhere. */
#ifndef BASE_NUMBERS_H
#define BASE_NUMBERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Zeroed memory is an empty queue. */
struct tl_numbers {
    uint64_t *memory; /* [capacity] */
    size_t capacity;
    size_t begin; /* index of the first number in memory */
    size_t count;
};

/* Returns the first number, NULL when there is none; valid until the next push. */
static inline const uint64_t *tl_numbers_items(const struct tl_numbers *numbers)
{
    return numbers->count > 0 ? numbers->memory + numbers->begin : NULL;
}

/* Push numbers at the back. They return false when there is no memory, and nothing has changed then. */
bool tl_numbers_push(struct tl_numbers *numbers, uint64_t number);
bool tl_numbers_push_all(struct tl_numbers *numbers, const uint64_t *items, size_t count);

/* Drops the first `count` numbers; there must be so many. */
void tl_numbers_drop(struct tl_numbers *numbers, size_t count);

/* Frees the memory. The queue is empty afterwards. */
void tl_numbers_fini(struct tl_numbers *numbers);

#endif
