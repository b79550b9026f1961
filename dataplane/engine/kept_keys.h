// SPDX-License-Identifier: Apache-2.0
/*
 * The keys that the peer of one connection has given numbers, and what its latest requests with each number have said.
 * The peer chooses the numbers. A number that is given anew belongs to another key from then on.
 *
 * Thread: the owner's.
 */
#ifndef DATAPLANE_ENGINE_KEPT_KEYS_H
#define DATAPLANE_ENGINE_KEPT_KEYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tensor/meta_data.h"

struct tl_kept_key {
    char *text; /* NULL: the number was not given */
    size_t text_bytes;
    uint64_t expected_step;
    struct tl_meta_data *expected; /* NULL: no request has had meta-data */
};

/* Zeroed memory keeps no keys. */
struct tl_numbered_keys {
    struct tl_kept_key *entries; /* [capacity] */
    uint32_t limit;              /* so many numbers may be given */
    uint32_t capacity;
};

/* Gives a number, less than the limit, to a key, of which nothing else is known. Returns NULL without memory. */
struct tl_kept_key *tl_numbered_keys_give(struct tl_numbered_keys *keys, uint32_t number, const char *text);
/* Returns NULL when the number was not given. */
static inline struct tl_kept_key *tl_numbered_keys_find(const struct tl_numbered_keys *keys, uint32_t number)
{
    return number < keys->capacity && keys->entries[number].text != NULL ? &keys->entries[number] : NULL;
}
/* Remembers the meta-data of a request. Returns false without memory. */
bool tl_kept_key_expect(struct tl_kept_key *key, const struct tl_meta_data *meta_data);
void tl_numbered_keys_fini(struct tl_numbered_keys *keys);

#endif
