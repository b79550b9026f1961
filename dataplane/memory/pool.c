// SPDX-License-Identifier: Apache-2.0
/*
 * The pool of registered memory: how it begins and ends, and its blocks. How it grows, and waits for memory, are in
 * pool_grow.c, how it is pinned in pool_pin.c.
 *
 * Failure modes: a peer that writes where it should not reaches bytes of tensors, never the allocator, whose records
 * lie elsewhere.
 */
#include "dataplane/memory/pool_internal.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/error.h"

/* For blocks up to this size the pool grows so that a quarter of it is free. */
#define MORE_MAX_BYTES (UINT64_C(256) * 1024)

/* ----------------------------------------------------------------------------------------------------- regions -- */

/* Returns the region that the bytes lie in; NULL when they lie in none. */
static struct pool_region *find_region(const struct tl_pool *pool, const void *address, uint64_t len_bytes)
{
    size_t count = pool_count_up_to(pool, (uintptr_t)address);
    if (count == 0) return NULL;
    struct pool_region *region = pool->regions[count - 1];
    uint64_t offset_bytes = (uintptr_t)address - (uintptr_t)region->address;
    bool is_inside = offset_bytes <= region->len_bytes && len_bytes <= region->len_bytes - offset_bytes;
    return is_inside ? region : NULL;
}

/* ------------------------------------------------------------------------------------------------------ spares -- */

/* Returns a spare block of this size; NULL when there is none. Called under mutex, like the functions that follow. */
static struct tl_block *take_spare(struct tl_pool *pool, uint64_t block_bytes)
{
    if (block_bytes > SPARE_MAX_BYTES) return NULL;
    size_t size = block_bytes / TL_POOL_ALIGNMENT_BYTES - 1;
    struct tl_block *block = pool->spares[size];
    if (!block) return NULL;
    pool->spares[size] = block->right;
    pool->spare_count--;
    pool->spare_bytes -= block_bytes;
    return block;
}

/* Keeps a block as a spare, unless a request waits for memory. */
static bool keep_spare(struct tl_pool *pool, struct tl_block *block)
{
    if (pool->is_closed || block->len_bytes > SPARE_MAX_BYTES || !tl_list_is_empty(&pool->waiting)) return false;
    if (pool->spare_count == MAX_SPARES) return false;
    size_t size = block->len_bytes / TL_POOL_ALIGNMENT_BYTES - 1;
    block->right = pool->spares[size];
    pool->spares[size] = block;
    pool->spare_count++;
    pool->spare_bytes += block->len_bytes;
    return true;
}

bool pool_give_spares(struct tl_pool *pool)
{
    if (pool->spare_bytes == 0) return false;
    for (size_t size = 0; size < SPARE_SIZES; size++) {
        struct tl_block *next;
        for (struct tl_block *block = pool->spares[size]; block; block = next) {
            next = block->right;
            (void)tl_blocks_give(&pool->blocks, block);
        }
        pool->spares[size] = NULL;
    }
    pool->spare_count = 0;
    pool->spare_bytes = 0;
    return true;
}

/* -------------------------------------------------------------------------------------------------- life cycle -- */

static void destroy_pool(struct tl_pool *pool)
{
    pthread_mutex_destroy(&pool->mutex);
    pthread_mutex_destroy(&pool->growing);
    free(pool->regions);
    free(pool);
}

enum tl_status tl_pool_create(struct tl_provider *provider, uint64_t first_bytes, uint64_t pool_bytes,
                              uint64_t max_bytes, const struct tl_pool_hooks *hooks, struct tl_pool **ret_pool,
                              struct tl_error *ret_error)
{
    struct pool_region *first = NULL;
    struct tl_pool *pool = calloc(1, sizeof(*pool));
    if (!pool) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a pool");
    pool->provider = provider;
    pool->hooks = *hooks;
    tl_list_init(&pool->waiting);
    pool->pool_bytes = pool_round(tl_max_u64(pool_bytes, 1), TL_PAGE_BYTES);
    pool->first_bytes = tl_min_u64(pool_round(tl_max_u64(first_bytes, 1), TL_PAGE_BYTES), pool->pool_bytes);
    pool->max_bytes = tl_max_u64(pool_round(max_bytes, TL_PAGE_BYTES), pool->pool_bytes);
    if (pool->first_bytes < pool->pool_bytes) pool->max_bytes += pool->first_bytes; /* what has fitted still does */
    pthread_mutex_init(&pool->growing, NULL);
    pthread_mutex_init(&pool->mutex, NULL);
    enum tl_status status = pool_region_create(pool, pool->first_bytes, true, &first, ret_error);
    if (status != TL_OK) goto fail;
    first->is_lasting = true;
    if (!pool_region_add(pool, first)) {
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a pool");
        goto fail;
    }
    *ret_pool = pool;
    return TL_OK;

fail:
    pool_region_destroy(first);
    destroy_pool(pool);
    return status;
}

/* Gives up a region that is wholly free, after tl_pool_close. */
static void drop_if_free(struct tl_pool *pool, struct pool_region *region)
{
    if (!tl_block_is_whole_range(region->first)) return;
    pool_region_remove(pool, region);
    pool_region_destroy(region);
}

void tl_pool_close(struct tl_pool *pool)
{
    if (!pool) return;
    pthread_mutex_lock(&pool->mutex);
    TL_CHECK(tl_list_is_empty(&pool->waiting));
    pool->is_closed = true;
    (void)pool_give_spares(pool);
    for (size_t i = pool->region_count; i-- > 0;) {
        struct pool_region *region = pool->regions[i];
        tl_region_destroy(region->region);
        region->region = NULL;
        drop_if_free(pool, region);
    }
    bool is_last = pool->region_count == 0;
    pthread_mutex_unlock(&pool->mutex);
    if (is_last) destroy_pool(pool);
}

/* ------------------------------------------------------------------------------------------------------ blocks -- */

enum tl_status pool_take_fitting(struct tl_pool *pool, struct pool_need need, struct tl_block **ret_block,
                                 struct tl_error *ret_error)
{
    struct tl_block *block = take_spare(pool, need.len_bytes);
    if (block) {
        *ret_block = block;
        return TL_OK;
    }
    block = tl_blocks_find(&pool->blocks, need.len_bytes, need.alignment);
    if (!block && pool_give_spares(pool)) block = tl_blocks_find(&pool->blocks, need.len_bytes, need.alignment);
    if (!block) return TL_OK;
    block = tl_blocks_take(&pool->blocks, block, need.len_bytes, need.alignment);
    if (!block) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the records of the pool");
    *ret_block = block;
    return TL_OK;
}

enum tl_status tl_pool_take_now(struct tl_pool *pool, uint64_t len_bytes, struct tl_block **ret_block,
                                struct tl_error *ret_error)
{
    struct tl_block *block = NULL;
    enum tl_status status = TL_OK;
    TL_CHECK(len_bytes > 0 && len_bytes <= INT64_MAX);
    pthread_mutex_lock(&pool->mutex);
    if (tl_list_is_empty(&pool->waiting)) {
        status = pool_take_fitting(pool, pool_need_of(len_bytes), &block, ret_error);
    }
    pthread_mutex_unlock(&pool->mutex);
    if (block) ALLOW(block->address, len_bytes);
    if (status == TL_OK) *ret_block = block;
    return status;
}

/* Whether the pool grows so that blocks like this one are given. A larger one takes longer to travel than to be asked
 * for once more. Called under mutex. */
static bool wants_more(struct tl_pool *pool, uint64_t len_bytes)
{
    bool may_grow = !pool->is_more_refused && pool->pool_bytes <= pool->max_bytes - pool->bytes;
    bool is_small = pool->bytes < pool->pool_bytes;
    pool->is_more_wanted |= may_grow && (is_small || len_bytes <= MORE_MAX_BYTES);
    return pool->is_more_wanted;
}

enum tl_status tl_pool_take_early(struct tl_pool *pool, uint64_t len_bytes, struct tl_block **ret_block,
                                  bool *ret_is_more_wanted, struct tl_error *ret_error)
{
    struct tl_block *block = NULL;
    enum tl_status status = TL_OK;
    struct pool_need need = pool_need_of(len_bytes);
    TL_CHECK(len_bytes > 0 && len_bytes <= INT64_MAX);
    *ret_is_more_wanted = false;
    pthread_mutex_lock(&pool->mutex);
    uint64_t free_bytes = pool->bytes - (pool->blocks.used_bytes - pool->spare_bytes);
    if (free_bytes < need.len_bytes || free_bytes - need.len_bytes < pool->bytes / 4) {
        *ret_is_more_wanted = wants_more(pool, need.len_bytes);
    } else if (tl_list_is_empty(&pool->waiting)) {
        status = pool_take_fitting(pool, need, &block, ret_error);
    }
    pthread_mutex_unlock(&pool->mutex);
    if (block) ALLOW(block->address, len_bytes);
    if (status == TL_OK) *ret_block = block;
    return status;
}

enum tl_status tl_pool_take(struct tl_pool *pool, uint64_t len_bytes, struct tl_block **ret_block,
                            struct tl_error *ret_error)
{
    struct tl_block *block = NULL;
    enum tl_status status = tl_pool_take_now(pool, len_bytes, &block, ret_error);
    if (status == TL_OK && !block) {
        struct pool_need need = pool_need_of(len_bytes);
        pthread_mutex_lock(&pool->growing);
        /* Another thread may have grown the pool meanwhile. */
        pthread_mutex_lock(&pool->mutex);
        status = pool_take_fitting(pool, need, &block, ret_error);
        pthread_mutex_unlock(&pool->mutex);
        if (status == TL_OK && !block) status = pool_grow(pool, need, &block, ret_error);
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
    if (!keep_spare(pool, block)) (void)tl_blocks_give(&pool->blocks, block);
    if (!tl_list_is_empty(&pool->waiting)) pool->hooks.wanted(pool->hooks.context);
    if (pool->is_closed) drop_if_free(pool, region);
    bool is_last = pool->is_closed && pool->region_count == 0;
    pthread_mutex_unlock(&pool->mutex);
    if (is_last) destroy_pool(pool);
}

struct tl_region *tl_pool_find(struct tl_pool *pool, const void *address, uint64_t len_bytes)
{
    pthread_mutex_lock(&pool->mutex);
    struct pool_region *region = find_region(pool, address, len_bytes);
    pthread_mutex_unlock(&pool->mutex);
    return region ? region->region : NULL;
}

struct tl_region *tl_pool_region_of(const struct tl_pool *pool, const struct tl_block *block)
{
    const struct pool_region *region = block->owner;
    return region->pool == pool ? region->region : NULL;
}

void tl_pool_get_stats(struct tl_pool *pool, struct tl_pool_stats *ret_stats)
{
    pthread_mutex_lock(&pool->mutex);
    *ret_stats = (struct tl_pool_stats){.regions = pool->region_count,
                                        .bytes = pool->bytes,
                                        .used_bytes = pool->blocks.used_bytes - pool->spare_bytes,
                                        .waits = pool->waits_count,
                                        .waiting = pool->waiting_count};
    pthread_mutex_unlock(&pool->mutex);
}

void tl_pool_get_refusal(struct tl_pool *pool, struct tl_error *ret_refusal)
{
    pthread_mutex_lock(&pool->mutex);
    *ret_refusal = pool->refusal;
    pthread_mutex_unlock(&pool->mutex);
}
