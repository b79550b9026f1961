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
#include <stdlib.h>

#include "tensor/meta_data.h"

/* The text of a key, and meta-data, which a number and the requests that wait with it share. */
struct tl_kept_text {
    uint32_t reference_count;
    bool is_short; /* one request alone has it, in memory of TL_SHORT_TEXT_BYTES, which is used again */
    char text[];
};

/* The memory of a text of one request, if that suffices. */
#define TL_SHORT_TEXT_BYTES 72

struct tl_kept_meta_data {
    size_t reference_count;
    struct tl_meta_data meta_data;
};

struct tl_kept_key {
    struct tl_kept_text *text; /* NULL: the number was not given */
    uint64_t expected_step;
    struct tl_kept_meta_data *expected; /* NULL: no request has had meta-data */
};

/* create: returns one reference; NULL: no memory. put: NULL is accepted. of: the object of a text that is in one. */
struct tl_kept_text *tl_kept_text_create(const char *text, size_t text_bytes);
struct tl_kept_meta_data *tl_kept_meta_data_create(const struct tl_meta_data *meta_data);

static inline struct tl_kept_text *tl_kept_text_get(struct tl_kept_text *text)
{
    text->reference_count++;
    return text;
}

static inline void tl_kept_text_put(struct tl_kept_text *text)
{
    if (text != NULL && --text->reference_count == 0) free(text);
}

static inline struct tl_kept_text *tl_kept_text_of(const char *text)
{
    return (struct tl_kept_text *)((uintptr_t)text - offsetof(struct tl_kept_text, text));
}

static inline struct tl_kept_meta_data *tl_kept_meta_data_get(struct tl_kept_meta_data *meta_data)
{
    meta_data->reference_count++;
    return meta_data;
}

static inline void tl_kept_meta_data_put(struct tl_kept_meta_data *meta_data)
{
    if (meta_data != NULL && --meta_data->reference_count == 0) free(meta_data);
}

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
/* Remembers the meta-data of a request; earlier requests keep theirs. Returns false without memory. */
bool tl_kept_key_expect(struct tl_kept_key *key, const struct tl_meta_data *meta_data);
void tl_numbered_keys_fini(struct tl_numbered_keys *keys);

#endif
