// SPDX-License-Identifier: Apache-2.0
/*
 * Arena: memory that is given back all at once.
 *
 * Everything that a configuration consists of is taken from one arena, so that an error half-way through has one thing
 * to free. Blocks come from the allocator that jansson uses (json_set_alloc_funcs), so that a program, or a test, that
 * replaces it replaces it for the whole configuration.
 */
#ifndef CONFIG_ARENA_H
#define CONFIG_ARENA_H

#include <stddef.h>

struct tl_arena;

/* NULL when there is no memory. */
struct tl_arena *tl_arena_create(void);

/* Frees everything that was taken from the arena. NULL is accepted. */
void tl_arena_destroy(struct tl_arena *arena);

/* Zeroed memory, aligned for every type; NULL when there is none. */
void *tl_arena_alloc(struct tl_arena *arena, size_t size_bytes);

/* Zeroed memory for `count` objects; NULL when there is none or the product does not fit. */
void *tl_arena_alloc_array(struct tl_arena *arena, size_t count, size_t size_bytes);

/* Formats into memory of the arena; NULL when there is none. */
char *tl_arena_format(struct tl_arena *arena, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
