// SPDX-License-Identifier: Apache-2.0
/*
 * Objects by a 64-bit number that others choose, in one piece of memory: finding one takes one multiplication and
 * mostly one look. The numbers cannot be chosen so that they collide, because a random factor spreads them, four
 * consecutive ones at a time: these lie in one cache line, because numbers are mostly given and used one after the
 * other.
 */
#ifndef BASE_NUMBER_MAP_H
#define BASE_NUMBER_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tl_number_slot {
    uint64_t number;
    void *item; /* NULL: free */
};

/* Zeroed memory is an empty map. */
struct tl_number_map {
    struct tl_number_slot *slots; /* [capacity]; NULL: nothing is allocated */
    size_t capacity;              /* a power of two */
    size_t count;
    uint64_t factor; /* odd and random */
    unsigned shift;  /* 64 minus the logarithm of the capacity in lines */
};

/* Adds an object under a number that is not in the map. False: there is no memory, and nothing has changed. */
bool tl_number_map_add(struct tl_number_map *map, uint64_t number, void *item);
/* Returns the object; NULL when there is none. */
void *tl_number_map_find(const struct tl_number_map *map, uint64_t number);
/* Takes the object out; it is in the map. */
void tl_number_map_remove(struct tl_number_map *map, uint64_t number);

/* Returns the first object at or behind *position, and sets that to its place; NULL when there is none. Begin with 0.
 * To go on, add 1, or remove the object and leave the position as it is: so all objects are seen. Nothing else may be
 * removed or added meanwhile. */
void *tl_number_map_next(const struct tl_number_map *map, size_t *position);

void tl_number_map_fini(struct tl_number_map *map);

#endif
