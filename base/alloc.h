// SPDX-License-Identifier: Apache-2.0
/* Allocation on the path of every transfer. */
#ifndef BASE_ALLOC_H
#define BASE_ALLOC_H

#include <stdlib.h>
#include <string.h>

/* Returns zeroed memory like calloc's, freed with free; NULL when there is none. glibc's calloc bypasses the cache that
 * each thread has for small blocks, and costs ten times as much. */
static inline void *tl_alloc_zeroed(size_t size_bytes)
{
    void *memory = malloc(size_bytes);
    __asm__("" : "+r"(memory)); /* Without this the compiler makes a calloc of the two calls. */
    if (memory != NULL) memset(memory, 0, size_bytes);
    return memory;
}

#endif
