// SPDX-License-Identifier: Apache-2.0
/* Open addressing with linear probing: at least half of the slots are free, and an object is in the first slot from its
 * home on that was free. A removal moves those behind it back, so that no marks are left. */
#include "base/number_map.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/random.h"

/* Slots of a cache line. */
#define LINE_BITS 2
#define LINE_BYTES (sizeof(struct tl_number_slot) << LINE_BITS)
#define FIRST_BITS 5
/* A map that was larger gives its memory back when it is empty. */
#define IDLE_CAPACITY 4096

static size_t first_place(const struct tl_number_map *map, uint64_t number)
{
    size_t line = (size_t)(((number >> LINE_BITS) * map->factor) >> map->shift);
    return line << LINE_BITS | (number & ((1u << LINE_BITS) - 1));
}

/* The slot of a number, or the free one where it belongs. */
static struct tl_number_slot *find_slot(const struct tl_number_map *map, uint64_t number)
{
    size_t at = first_place(map, number);
    while (map->slots[at].item != NULL && map->slots[at].number != number)
        at = (at + 1) & (map->capacity - 1);
    return &map->slots[at];
}

static bool grow(struct tl_number_map *map)
{
    struct tl_number_map larger = *map;
    larger.capacity = map->slots == NULL ? (size_t)1 << FIRST_BITS : 2 * map->capacity;
    larger.shift = map->slots == NULL ? 64 - (FIRST_BITS - LINE_BITS) : map->shift - 1;
    if (larger.factor == 0) larger.factor = tl_random_u64() | 1;
    void *slots;
    if (posix_memalign(&slots, LINE_BYTES, larger.capacity * sizeof(*larger.slots)) != 0) return false;
    larger.slots = memset(slots, 0, larger.capacity * sizeof(*larger.slots));
    for (size_t i = 0; i < map->capacity; i++) {
        if (map->slots[i].item != NULL) *find_slot(&larger, map->slots[i].number) = map->slots[i];
    }
    free(map->slots);
    *map = larger;
    return true;
}

bool tl_number_map_add(struct tl_number_map *map, uint64_t number, void *item)
{
    if (2 * (map->count + 1) > map->capacity && !grow(map)) return false;
    struct tl_number_slot *slot = find_slot(map, number);
    TL_CHECK(slot->item == NULL && item != NULL);
    *slot = (struct tl_number_slot){number, item};
    map->count++;
    return true;
}

void *tl_number_map_find(const struct tl_number_map *map, uint64_t number)
{
    return map->count > 0 ? find_slot(map, number)->item : NULL;
}

void tl_number_map_remove(struct tl_number_map *map, uint64_t number)
{
    TL_CHECK(map->count > 0);
    struct tl_number_slot *slot = find_slot(map, number);
    TL_CHECK(slot->item != NULL);
    size_t mask = map->capacity - 1;
    size_t hole = (size_t)(slot - map->slots);
    for (size_t at = (hole + 1) & mask; map->slots[at].item != NULL; at = (at + 1) & mask) {
        size_t distance = (at - first_place(map, map->slots[at].number)) & mask;
        if (distance < ((at - hole) & mask)) continue; /* its home is behind the hole */
        map->slots[hole] = map->slots[at];
        hole = at;
    }
    map->slots[hole].item = NULL;
    if (--map->count == 0 && map->capacity > IDLE_CAPACITY) tl_number_map_fini(map);
}

void *tl_number_map_next(const struct tl_number_map *map, size_t *position)
{
    for (; *position < map->capacity; ++*position)
        if (map->slots[*position].item != NULL) return map->slots[*position].item;
    return NULL;
}

void tl_number_map_fini(struct tl_number_map *map)
{
    free(map->slots);
    *map = (struct tl_number_map){0};
}
