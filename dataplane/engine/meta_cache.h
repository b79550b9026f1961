// SPDX-License-Identifier: Apache-2.0
/*
 * The meta-data that the tensors of one peer had last, by key, so that a request can say at once where the next value
 * may be written. Entries are copied out. When there are more than `capacity` keys, the least recently used is
 * forgotten.
 *
 * Thread: the owner's.
 */
#ifndef DATAPLANE_ENGINE_META_CACHE_H
#define DATAPLANE_ENGINE_META_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "tensor/meta_data.h"

struct tl_meta_cache;

struct tl_meta_cached {
    struct tl_meta_data meta_data;
    uint64_t step;     /* the version of the value, when is_published */
    bool is_published; /* the next value may well have the same step */
    bool is_mapped;    /* it was mapped: no memory was needed */
};

static inline void tl_meta_cached_copy(struct tl_meta_cached *to, const struct tl_meta_cached *from)
{
    tl_meta_data_copy(&to->meta_data, &from->meta_data);
    to->step = from->step;
    to->is_published = from->is_published;
    to->is_mapped = from->is_mapped;
}

/* Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_meta_cache_create(uint32_t capacity, struct tl_meta_cache **ret_cache,
                                    struct tl_error *ret_error) TL_MUST_USE;
void tl_meta_cache_destroy(struct tl_meta_cache *cache); /* NULL is accepted */

bool tl_meta_cache_find(struct tl_meta_cache *cache, const char *key, struct tl_meta_cached *ret_cached);
/* Without memory the key is not remembered, and the least recently used one may be forgotten. */
void tl_meta_cache_put(struct tl_meta_cache *cache, const char *key, const struct tl_meta_cached *cached);
uint32_t tl_meta_cache_count(const struct tl_meta_cache *cache);

#endif
