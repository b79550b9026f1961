// SPDX-License-Identifier: Apache-2.0
/*
 * The keys that one peer is asked for on one connection, each with its number: what the peer was told of it, and the
 * meta-data that its tensors had last, so that a request can say at once where the next value may be written.
 *
 * Each key gets a free number while there is one. Then the key that was asked for longest ago gives its number to a new
 * one, but only when many others were asked for since, and seldom where there are far more keys than numbers: of more
 * keys than there are numbers, asked for in turn, as many as possible keep theirs. A key without a number is asked for
 * by its text, and nothing is remembered of it.
 *
 * Thread: the owner's.
 */
#ifndef DATAPLANE_ENGINE_ASKED_KEYS_H
#define DATAPLANE_ENGINE_ASKED_KEYS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/hash_table.h"
#include "base/list.h"
#include "dataplane/engine/message.h"

#define TL_NO_KEY_NUMBER UINT32_MAX

/* What the next value of a key is expected to be. */
struct tl_meta_cached {
    struct tl_meta_data meta_data; /* size_bytes 0: nothing is expected */
    uint64_t step;                 /* the version of the value, when is_published */
    bool is_published;             /* the next value may well have the same step */
    bool is_mapped;                /* it was mapped: no memory was needed */
};

static inline void tl_meta_cached_copy(struct tl_meta_cached *to, const struct tl_meta_cached *from)
{
    tl_meta_data_copy(&to->meta_data, &from->meta_data);
    to->step = from->step;
    to->is_published = from->is_published;
    to->is_mapped = from->is_mapped;
}

struct tl_asked_key;

/* Zeroed memory has no keys, and gives none a number. */
struct tl_asked_keys {
    struct tl_hash_table entries;    /* by the texts of the keys */
    struct tl_asked_key **by_number; /* [capacity] */
    struct tl_list used;             /* the least recently used first; valid when there is an entry */
    uint32_t limit;                  /* how many numbers there are */
    uint32_t count;                  /* how many of them are given */
    uint32_t capacity;
    uint32_t missed_count; /* so many keys in a row had no number; modulo 2^32 */
    uint64_t clock;        /* how often a key was asked for */
    bool has_replaced;     /* a number has gone from one key to another */
};

/* Returns the number of the key, which may be new; TL_NO_KEY_NUMBER: it gets none, or there is no memory. */
uint32_t tl_asked_keys_get(struct tl_asked_keys *keys, const char *key);
/* Returns what the next value of the key with this number is expected to be; NULL: nothing is known. The key may have
 * lost its number, and the number may be TL_NO_KEY_NUMBER. */
const struct tl_meta_cached *tl_asked_keys_expected(const struct tl_asked_keys *keys, uint32_t number, const char *key);
/* Remembers what the next value is expected to be, unless the key has lost its number. Without memory nothing is known
 * of a new key. */
void tl_asked_keys_expect(struct tl_asked_keys *keys, uint32_t number, const char *key,
                          const struct tl_meta_cached *expected);
/* The REQUEST, which has a key, a key_number and everything else in full, is to be sent now. Returns what it says of
 * the key, and the step that the peer takes its expected step relative to. */
enum tl_key_form tl_asked_keys_tell(struct tl_asked_keys *keys, const struct tl_message *request, uint64_t *ret_base);
void tl_asked_keys_fini(struct tl_asked_keys *keys);

#endif
