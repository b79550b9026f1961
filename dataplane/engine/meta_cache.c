// SPDX-License-Identifier: Apache-2.0
#include "dataplane/engine/meta_cache.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "base/list.h"

#include <xxhash.h>

#define HASH_NONFATAL_OOM 1
#define HASH_FUNCTION(key, len_bytes, ret_hash) ((ret_hash) = (unsigned)XXH3_64bits(key, len_bytes))
#include <uthash.h>

struct entry {
    struct tl_list place; /* in cache->used */
    struct tl_meta_cached cached;
    UT_hash_handle hh;
    char key[];
};

struct tl_meta_cache {
    struct entry *entries;
    struct tl_list used; /* the least recently used first */
    uint32_t capacity;
};

enum tl_status tl_meta_cache_create(uint32_t capacity, struct tl_meta_cache **ret_cache, struct tl_error *ret_error)
{
    struct tl_meta_cache *cache = calloc(1, sizeof(*cache));
    if (cache == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for meta-data");
    cache->capacity = capacity;
    tl_list_init(&cache->used);
    *ret_cache = cache;
    return TL_OK;
}

static void use(struct tl_meta_cache *cache, struct entry *entry)
{
    if (entry->place.next == &cache->used) return; /* the latest already */
    tl_list_remove(&entry->place);
    tl_list_push_back(&cache->used, &entry->place);
}

static void forget(struct tl_meta_cache *cache, struct entry *entry)
{
    HASH_DEL(cache->entries, entry);
    tl_list_remove(&entry->place);
    free(entry);
}

void tl_meta_cache_destroy(struct tl_meta_cache *cache)
{
    if (cache == NULL) return;
    TL_LIST_FOREACH_SAFE(&cache->used, place)
    {
        forget(cache, TL_CONTAINER_OF(place, struct entry, place));
    }
    free(cache);
}

/* Returns NULL when there is no entry. Steps ask for the same keys in the same order, so the next key is usually the
 * least recently used one, which is compared before anything is hashed. */
static struct entry *find_entry(const struct tl_meta_cache *cache, const char *key)
{
    struct entry *entry = TL_CONTAINER_OF(cache->used.next, struct entry, place);
    if (!tl_list_is_empty(&cache->used) && strcmp(entry->key, key) == 0) return entry;
    HASH_FIND_STR(cache->entries, key, entry);
    return entry;
}

bool tl_meta_cache_find(struct tl_meta_cache *cache, const char *key, struct tl_meta_cached *ret_cached)
{
    struct entry *entry = find_entry(cache, key);
    if (entry == NULL) return false;
    use(cache, entry);
    tl_meta_cached_copy(ret_cached, &entry->cached);
    return true;
}

void tl_meta_cache_put(struct tl_meta_cache *cache, const char *key, const struct tl_meta_cached *cached)
{
    struct entry *entry = find_entry(cache, key);
    if (entry != NULL) {
        tl_meta_cached_copy(&entry->cached, cached);
        use(cache, entry);
        return;
    }
    if (cache->capacity == 0) return;
    if (HASH_COUNT(cache->entries) >= cache->capacity) {
        forget(cache, TL_CONTAINER_OF(cache->used.next, struct entry, place));
    }
    size_t key_bytes = strlen(key);
    entry = malloc(sizeof(*entry) + key_bytes + 1);
    if (entry == NULL) return;
    tl_meta_cached_copy(&entry->cached, cached);
    memcpy(entry->key, key, key_bytes + 1);
    tl_list_init(&entry->place);
    HASH_ADD_STR(cache->entries, key, entry);
    if (entry->hh.tbl == NULL) {
        free(entry);
        return;
    }
    tl_list_push_back(&cache->used, &entry->place);
}

uint32_t tl_meta_cache_count(const struct tl_meta_cache *cache)
{
    return HASH_COUNT(cache->entries);
}
