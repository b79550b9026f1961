// SPDX-License-Identifier: Apache-2.0
/*
 * Arena: blocks in a list; small requests are cut from the newest block, a large one gets a block of its own.
 *
 * Happy path: create, alloc as often as needed, destroy. Failure: no memory is NULL, and the arena stays usable.
 */
#include "config/arena.h"

#include <jansson.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define BLOCK_BYTES ((size_t)8192)
#define ALIGNMENT ((size_t)16)

struct block {
    struct block *next;
    size_t used_bytes; /* bytes of data that are taken */
    size_t size_bytes; /* size of data */
    size_t padding;    /* keeps data aligned */
    char data[];
};

_Static_assert(offsetof(struct block, data) % ALIGNMENT == 0, "data must be aligned");

struct tl_arena {
    struct block *blocks; /* the first one is cut up, the others are full or hold one object */
    json_malloc_t allocate;
    json_free_t release;
};

struct tl_arena *tl_arena_create(void)
{
    json_malloc_t allocate;
    json_free_t release;
    json_get_alloc_funcs(&allocate, &release);
    struct tl_arena *arena = allocate(sizeof(*arena));
    if (!arena) return NULL;
    *arena = (struct tl_arena){.allocate = allocate, .release = release};
    return arena;
}

void tl_arena_destroy(struct tl_arena *arena)
{
    if (!arena) return;
    struct block *block = arena->blocks;
    while (block) {
        struct block *next = block->next;
        arena->release(block);
        block = next;
    }
    arena->release(arena);
}

static struct block *block_add(struct tl_arena *arena, size_t size_bytes)
{
    bool is_large = size_bytes > BLOCK_BYTES / 4;
    size_t data_bytes = is_large ? size_bytes : BLOCK_BYTES;
    struct block *block = arena->allocate(sizeof(*block) + data_bytes);
    if (!block) return NULL;
    *block = (struct block){.size_bytes = data_bytes};
    memset(block->data, 0, data_bytes);
    /* A large object goes behind the block that is being cut up, so that the rest of that one is not lost. */
    if (is_large && arena->blocks) {
        block->next = arena->blocks->next;
        arena->blocks->next = block;
    } else {
        block->next = arena->blocks;
        arena->blocks = block;
    }
    return block;
}

void *tl_arena_alloc(struct tl_arena *arena, size_t size_bytes)
{
    if (size_bytes > SIZE_MAX / 2) return NULL;
    size_t rounded_bytes = (size_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (rounded_bytes == 0) rounded_bytes = ALIGNMENT;
    struct block *block = arena->blocks;
    if (!block || block->size_bytes - block->used_bytes < rounded_bytes) block = block_add(arena, rounded_bytes);
    if (!block) return NULL;
    void *object = block->data + block->used_bytes;
    block->used_bytes += rounded_bytes;
    return object;
}

void *tl_arena_alloc_array(struct tl_arena *arena, size_t count, size_t size_bytes)
{
    size_t product;
    if (__builtin_mul_overflow(count, size_bytes, &product)) return NULL;
    return tl_arena_alloc(arena, product);
}

char *tl_arena_format(struct tl_arena *arena, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0) return NULL;
    char *text = tl_arena_alloc(arena, (size_t)length + 1);
    if (!text) return NULL;
    va_start(arguments, format);
    vsnprintf(text, (size_t)length + 1, format, arguments);
    va_end(arguments);
    return text;
}
