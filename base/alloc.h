// SPDX-License-Identifier: Apache-2.0
/* Allocating on the way of every transfer. */
#ifndef BASE_ALLOC_H
#define BASE_ALLOC_H

#include <stdlib.h>
#include <string.h>

/* Zeroed memory like calloc's, freed with free; NULL: there is none. glibc's calloc passes by the cache that each
 * thread has for small blocks, and costs ten times as much. */
static inline void *tl_alloc_zeroed(size_t size_bytes)
{
    void *memory = malloc(size_bytes);
    __asm__("" : "+r"(memory)); /* else the compiler makes a calloc of this */
    if (memory != NULL) memset(memory, 0, size_bytes);
    return memory;
}

#endif
