// SPDX-License-Identifier: Apache-2.0
/*
 * The pool of registered memory.
 *
 * Two locks: `mutex` guards the blocks and the list of regions and is held for moments; `growing` is held, first, by
 * the one thread that makes or gives up regions, which takes milliseconds, so that others find room meanwhile.
 *
 * Failure modes: a region that cannot be mapped or registered leaves the pool as it was; a peer that writes where it
 * should not reaches bytes of tensors, never the allocator, whose records lie elsewhere.
 */
#include "dataplane/pool.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "dataplane/pages.h"

/* Under AddressSanitizer free memory of the pool is as forbidden as that of malloc: a late write is found. */
#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define HAS_ADDRESS_SANITIZER 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#define HAS_ADDRESS_SANITIZER 1
#endif
#ifdef HAS_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#define FORBID(address, len_bytes) ASAN_POISON_MEMORY_REGION((void *)(address), len_bytes)
#define ALLOW(address, len_bytes) ASAN_UNPOISON_MEMORY_REGION((void *)(address), len_bytes)
#else
#define FORBID(address, len_bytes) ((void)0)
#define ALLOW(address, len_bytes) ((void)0)
#endif

struct pool_region {
    struct tl_pool *pool;
    void *address;
    uint64_t len_bytes;
    struct tl_region *region; /* NULL: closed */
    struct tl_block *first;   /* the first of its blocks: the lowest address */
    uint64_t pin_count;
    bool is_lasting; /* the first of the pool */
};

struct tl_pool {
    struct tl_provider *provider;
    uint64_t pool_bytes;
    uint64_t max_bytes;
    pthread_mutex_t growing;
    pthread_mutex_t mutex;
    struct tl_blocks blocks;
    struct pool_region **regions; /* [region_count], by address */
    size_t region_count;
    size_t region_capacity;
    uint64_t bytes; /* of all regions; changes under both locks */
    bool is_closed;
};

/* ------------------------------------------------------------------------------------------------------- regions -- */

/* Rounds up, or down when that does not fit. */
static uint64_t round_to(uint64_t len_bytes, uint64_t unit_bytes)
{
    uint64_t sum;
    if (!tl_add_u64(len_bytes, unit_bytes - 1, &sum)) sum = len_bytes;
    return sum - sum % unit_bytes;
}

/* How many regions start at or below the address. */
static size_t count_up_to(const struct tl_pool *pool, uintptr_t address)
{
    size_t low = 0, high = pool->region_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if ((uintptr_t)pool->regions[middle]->address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The region that the bytes lie in; NULL: none. */
static struct pool_region *find_region(const struct tl_pool *pool, const void *address, uint64_t len_bytes)
{
    size_t count = count_up_to(pool, (uintptr_t)address);
    if (count == 0) return NULL;
    struct pool_region *region = pool->regions[count - 1];
    uint64_t offset_bytes = (uintptr_t)address - (uintptr_t)region->address;
    bool is_inside = offset_bytes <= region->len_bytes && len_bytes <= region->len_bytes - offset_bytes;
    return is_inside ? region : NULL;
}

/* Gives back memory that is in no list any more. */
static void destroy_region(struct pool_region *region)
{
    if (!region) return;
    tl_region_destroy(region->region);
    if (region->address) {
        ALLOW(region->address, region->len_bytes);
        tl_pages_unmap(region->address, region->len_bytes);
    }
    free(region);
}

static enum tl_status create_region(struct tl_pool *pool, uint64_t len_bytes, struct pool_region **ret_region,
                                    struct tl_error *ret_error)
{
    struct pool_region *region = calloc(1, sizeof(*region));
    if (!region) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a region of the pool");
    region->pool = pool;
    region->len_bytes = len_bytes;
    enum tl_status status = tl_pages_map(len_bytes, pool->provider->limits.numa_node, &region->address, ret_error);
    if (status != TL_OK) goto fail;
    status = tl_region_create(pool->provider, region->address, len_bytes, TL_REGION_WRITE, &region->region, ret_error);
    if (status != TL_OK) goto fail;
    *ret_region = region;
    return TL_OK;

fail:
    tl_error_prefix(ret_error, "a region of %" PRIu64 " bytes for the pool (verbs.pool): ", len_bytes);
    destroy_region(region);
    return status;
}

/* Makes the region part of the pool. False: no memory. Under both locks. */
static bool add_region(struct tl_pool *pool, struct pool_region *region)
{
    if (pool->region_count == pool->region_capacity) {
        size_t capacity = pool->region_capacity > 0 ? 2 * pool->region_capacity : 8;
        struct pool_region **regions = realloc(pool->regions, capacity * sizeof(struct pool_region *));
        if (!regions) return false;
        pool->regions = regions;
        pool->region_capacity = capacity;
    }
    region->first = tl_blocks_add(&pool->blocks, (uintptr_t)region->address, region->len_bytes, region);
    if (!region->first) return false;
    size_t place = count_up_to(pool, (uintptr_t)region->address);
    struct pool_region **at = &pool->regions[place];
    memmove(at + 1, at, (pool->region_count - place) * sizeof(*at));
    *at = region;
    pool->region_count++;
    pool->bytes += region->len_bytes;
    FORBID(region->address, region->len_bytes);
    return true;
}

/* Takes a wholly free region out of the pool. */
static void remove_region(struct tl_pool *pool, struct pool_region *region)
{
    size_t place = count_up_to(pool, (uintptr_t)region->address) - 1;
    struct pool_region **at = &pool->regions[place];
    TL_CHECK(*at == region);
    tl_blocks_remove(&pool->blocks, region->first);
    memmove(at, at + 1, (pool->region_count - place - 1) * sizeof(*at));
    pool->region_count--;
    pool->bytes -= region->len_bytes;
}

/* ---------------------------------------------------------------------------------------------------- life cycle -- */

static void destroy_pool(struct tl_pool *pool)
{
    pthread_mutex_destroy(&pool->mutex);
    pthread_mutex_destroy(&pool->growing);
    free(pool->regions);
    free(pool);
}

enum tl_status tl_pool_create(struct tl_provider *provider, uint64_t pool_bytes, uint64_t max_bytes,
                              struct tl_pool **ret_pool, struct tl_error *ret_error)
{
    struct pool_region *first = NULL;
    struct tl_pool *pool = calloc(1, sizeof(*pool));
    if (!pool) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a pool");
    pool->provider = provider;
    pool->pool_bytes = round_to(tl_max_u64(pool_bytes, 1), TL_PAGE_BYTES);
    pool->max_bytes = tl_max_u64(round_to(max_bytes, TL_PAGE_BYTES), pool->pool_bytes);
    pthread_mutex_init(&pool->growing, NULL);
    pthread_mutex_init(&pool->mutex, NULL);
    enum tl_status status = create_region(pool, pool->pool_bytes, &first, ret_error);
    if (status != TL_OK) goto fail;
    first->is_lasting = true;
    if (!add_region(pool, first)) {
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a pool");
        goto fail;
    }
    *ret_pool = pool;
    return TL_OK;

fail:
    destroy_region(first);
    destroy_pool(pool);
    return status;
}

/* Gives up a region that is wholly free, after close. */
static void drop_if_free(struct tl_pool *pool, struct pool_region *region)
{
    if (!tl_block_is_whole_range(region->first)) return;
    remove_region(pool, region);
    destroy_region(region);
}

void tl_pool_close(struct tl_pool *pool)
{
    if (!pool) return;
    pthread_mutex_lock(&pool->mutex);
    pool->is_closed = true;
    for (size_t i = pool->region_count; i-- > 0;) {
        struct pool_region *region = pool->regions[i];
        TL_CHECK(region->pin_count == 0);
        tl_region_destroy(region->region);
        region->region = NULL;
        drop_if_free(pool, region);
    }
    bool is_last = pool->region_count == 0;
    pthread_mutex_unlock(&pool->mutex);
    if (is_last) destroy_pool(pool);
}

/* -------------------------------------------------------------------------------------------------------- blocks -- */

static enum tl_status no_records(struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the records of the pool");
}

/* Takes a block if one fits: *ret_block stays as it is when none does. Under mutex. */
static enum tl_status take_fitting(struct tl_pool *pool, uint64_t len_bytes, uint64_t alignment,
                                   struct tl_block **ret_block, struct tl_error *ret_error)
{
    struct tl_block *block = tl_blocks_find(&pool->blocks, len_bytes, alignment);
    if (!block) return TL_OK;
    block = tl_blocks_take(&pool->blocks, block, len_bytes, alignment);
    if (!block) return no_records(ret_error);
    *ret_block = block;
    return TL_OK;
}

static enum tl_status try_take(struct tl_pool *pool, uint64_t len_bytes, uint64_t alignment,
                               struct tl_block **ret_block, struct tl_error *ret_error)
{
    pthread_mutex_lock(&pool->mutex);
    enum tl_status status = take_fitting(pool, len_bytes, alignment, ret_block, ret_error);
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

/* Takes one region out that can be given up; NULL: there is none. */
static struct pool_region *pick_unused(struct tl_pool *pool)
{
    struct pool_region *picked = NULL;
    pthread_mutex_lock(&pool->mutex);
    for (size_t i = pool->region_count; i-- > 0 && !picked;) {
        struct pool_region *region = pool->regions[i];
        if (!region->is_lasting && region->pin_count == 0 && tl_block_is_whole_range(region->first)) picked = region;
    }
    if (picked) remove_region(pool, picked);
    pthread_mutex_unlock(&pool->mutex);
    return picked;
}

/* Makes room below the maximum, and says how large a region for need_bytes will be. Under growing. */
static enum tl_status plan_region(struct tl_pool *pool, uint64_t need_bytes, uint64_t *ret_len_bytes,
                                  struct tl_error *ret_error)
{
    uint64_t len_bytes = tl_max_u64(pool->pool_bytes, need_bytes);
    while (len_bytes <= pool->max_bytes && len_bytes > pool->max_bytes - pool->bytes) {
        struct pool_region *unused = pick_unused(pool);
        if (!unused) break;
        destroy_region(unused);
    }
    len_bytes = tl_min_u64(len_bytes, pool->max_bytes - pool->bytes);
    if (len_bytes >= need_bytes) {
        *ret_len_bytes = len_bytes;
        return TL_OK;
    }
    struct tl_pool_stats stats;
    tl_pool_get_stats(pool, &stats);
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                        "%" PRIu64 " bytes do not fit into the pool, which has %" PRIu64 " bytes, %" PRIu64
                        " of them in use, and may have %" PRIu64 "; raise its maximum (verbs.max_pool)",
                        need_bytes, stats.bytes, stats.used_bytes, pool->max_bytes);
}

/* Adds a region in which the block fits, and takes it. Under growing. */
static enum tl_status grow(struct tl_pool *pool, uint64_t len_bytes, uint64_t alignment, struct tl_block **ret_block,
                           struct tl_error *ret_error)
{
    struct pool_region *region = NULL;
    uint64_t region_bytes = 0;
    enum tl_status status = plan_region(pool, round_to(len_bytes, TL_PAGE_BYTES), &region_bytes, ret_error);
    if (status != TL_OK) return status;
    status = create_region(pool, region_bytes, &region, ret_error);
    if (status != TL_OK) return status;
    pthread_mutex_lock(&pool->mutex);
    bool is_added = add_region(pool, region);
    status = is_added ? take_fitting(pool, len_bytes, alignment, ret_block, ret_error) : no_records(ret_error);
    pthread_mutex_unlock(&pool->mutex);
    if (!is_added) destroy_region(region);
    return status;
}

enum tl_status tl_pool_take(struct tl_pool *pool, uint64_t len_bytes, struct tl_block **ret_block,
                            struct tl_error *ret_error)
{
    struct tl_block *block = NULL;
    uint64_t alignment = len_bytes < TL_POOL_PAGED_BYTES ? TL_POOL_ALIGNMENT_BYTES : TL_PAGE_BYTES;
    TL_CHECK(len_bytes > 0 && len_bytes <= INT64_MAX);
    uint64_t block_bytes = round_to(len_bytes, TL_POOL_ALIGNMENT_BYTES);
    enum tl_status status = try_take(pool, block_bytes, alignment, &block, ret_error);
    if (status == TL_OK && !block) {
        pthread_mutex_lock(&pool->growing);
        /* Another thread may have grown the pool meanwhile. */
        status = try_take(pool, block_bytes, alignment, &block, ret_error);
        if (status == TL_OK && !block) status = grow(pool, block_bytes, alignment, &block, ret_error);
        pthread_mutex_unlock(&pool->growing);
    }
    if (status != TL_OK) return status;
    ALLOW(block->address, len_bytes);
    *ret_block = block;
    return TL_OK;
}

void tl_pool_give(struct tl_block *block)
{
    struct pool_region *region = block->owner;
    struct tl_pool *pool = region->pool;
    pthread_mutex_lock(&pool->mutex);
    FORBID(block->address, block->len_bytes);
    tl_blocks_give(&pool->blocks, block);
    if (pool->is_closed) drop_if_free(pool, region);
    bool is_last = pool->is_closed && pool->region_count == 0;
    pthread_mutex_unlock(&pool->mutex);
    if (is_last) destroy_pool(pool);
}

/* ---------------------------------------------------------------------------------------------------------- pins -- */

struct tl_region *tl_pool_pin(struct tl_pool *pool, const void *address, uint64_t len_bytes)
{
    pthread_mutex_lock(&pool->mutex);
    struct pool_region *region = find_region(pool, address, len_bytes);
    if (region) region->pin_count++;
    pthread_mutex_unlock(&pool->mutex);
    return region ? region->region : NULL;
}

void tl_pool_unpin(struct tl_pool *pool, const struct tl_region *region)
{
    pthread_mutex_lock(&pool->mutex);
    struct pool_region *found = find_region(pool, region->address, region->len_bytes);
    TL_CHECK(found && found->region == region && found->pin_count > 0);
    found->pin_count--;
    pthread_mutex_unlock(&pool->mutex);
}

void tl_pool_get_stats(struct tl_pool *pool, struct tl_pool_stats *ret_stats)
{
    pthread_mutex_lock(&pool->mutex);
    *ret_stats = (struct tl_pool_stats){pool->region_count, pool->bytes, pool->blocks.used_bytes};
    pthread_mutex_unlock(&pool->mutex);
}
