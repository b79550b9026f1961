// SPDX-License-Identifier: Apache-2.0
/* A queue of numbers. Dropped numbers leave a gap at the front, which is closed when the space at the back ends and the
 * gap is at least as large as the queue: each number is moved a bounded number of times on average. */
#include "base/numbers.h"

#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/check.h"

#define FIRST_CAPACITY 64

/* Makes space for `more` numbers at the back. Returns false when there is no memory. */
static bool reserve(struct tl_numbers *numbers, size_t more)
{
    uint64_t needed;
    uint64_t len_bytes;
    if (!tl_add_u64(numbers->count, more, &needed)) return false;
    if (needed <= numbers->capacity - numbers->begin) return true;
    if (numbers->begin >= numbers->count && needed <= numbers->capacity) {
        if (numbers->count > 0) {
            memcpy(numbers->memory, numbers->memory + numbers->begin, numbers->count * sizeof(*numbers->memory));
        }
        numbers->begin = 0;
        return true;
    }
    if (!tl_add_u64(needed, numbers->begin, &needed)) return false;
    uint64_t capacity = numbers->capacity > 0 ? numbers->capacity : FIRST_CAPACITY;
    while (capacity < needed)
        if (!tl_mul_u64(capacity, 2, &capacity)) return false;
    if (!tl_mul_u64(capacity, sizeof(*numbers->memory), &len_bytes) || len_bytes > SIZE_MAX) return false;
    uint64_t *memory = realloc(numbers->memory, (size_t)len_bytes);
    if (memory == NULL) return false;
    numbers->memory = memory;
    numbers->capacity = (size_t)capacity;
    return true;
}

bool tl_numbers_push_all(struct tl_numbers *numbers, const uint64_t *items, size_t count)
{
    if (count == 0) return true;
    if (!reserve(numbers, count)) return false;
    memcpy(numbers->memory + numbers->begin + numbers->count, items, count * sizeof(*items));
    numbers->count += count;
    return true;
}

bool tl_numbers_push(struct tl_numbers *numbers, uint64_t number)
{
    return tl_numbers_push_all(numbers, &number, 1);
}

void tl_numbers_drop(struct tl_numbers *numbers, size_t count)
{
    TL_CHECK(count <= numbers->count);
    numbers->begin += count;
    numbers->count -= count;
    if (numbers->count == 0) numbers->begin = 0;
}

void tl_numbers_fini(struct tl_numbers *numbers)
{
    free(numbers->memory);
    *numbers = (struct tl_numbers){0};
}
