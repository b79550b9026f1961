// SPDX-License-Identifier: Apache-2.0
/*
 * How the pool grows, and how waits for its memory are served.
 *
 * Waits are served by tl_pool_serve, on one thread that may block: the longest wait first, with a block that came back
 * or with a new region. When the pool may not grow any more, blocks that come back serve it.
 *
 * Failure modes: a region that cannot be mapped or registered leaves the pool as it was, after registrations that are
 * not used were evicted for it. A wait that no region could ever serve ends with the reason.
 */
#include "dataplane/memory/pool_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"

/* How many regions have the size that the settings say. A further region has this fraction of the pool. */
#define REGIONS_OF_ONE_SIZE 64

/* ----------------------------------------------------------------------------------------------------- regions -- */

size_t pool_count_up_to(const struct tl_pool *pool, uintptr_t address)
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

void pool_region_destroy(struct pool_region *region)
{
    if (!region) return;
    tl_region_destroy(region->region);
    if (region->address) ALLOW(region->address, region->len_bytes);
    pool_region_unmap(region);
}

enum tl_status pool_region_create(struct tl_pool *pool, uint64_t len_bytes, bool may_evict,
                                  struct pool_region **ret_region, struct tl_error *ret_error)
{
    struct pool_region *region = calloc(1, sizeof(*region));
    if (!region) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a region of the pool");
    region->pool = pool;
    region->len_bytes = len_bytes;
    enum tl_status status;
    do {
        status = tl_region_map(pool->provider, len_bytes, &region->region, ret_error);
    } while (status == TL_RESOURCE_EXHAUSTED && may_evict && pool->hooks.evict != NULL &&
             pool->hooks.evict(pool->hooks.context));
    if (status != TL_OK) goto fail;
    region->address = region->region->address;
    *ret_region = region;
    return TL_OK;

fail:
    tl_error_prefix(ret_error, "a region of %" PRIu64 " bytes for the pool (%s.pool): ", len_bytes,
                    pool->provider->ops->settings);
    pool_region_destroy(region);
    return status;
}

bool pool_region_add(struct tl_pool *pool, struct pool_region *region)
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
    size_t place = pool_count_up_to(pool, (uintptr_t)region->address);
    struct pool_region **at = &pool->regions[place];
    memmove(at + 1, at, (pool->region_count - place) * sizeof(*at));
    *at = region;
    pool->region_count++;
    pool->bytes += region->len_bytes;
    FORBID(region->address, region->len_bytes);
    return true;
}

void pool_region_remove(struct tl_pool *pool, struct pool_region *region)
{
    size_t place = pool_count_up_to(pool, (uintptr_t)region->address) - 1;
    struct pool_region **at = &pool->regions[place];
    TL_CHECK(*at == region);
    tl_blocks_remove(&pool->blocks, region->first);
    memmove(at, at + 1, (pool->region_count - place - 1) * sizeof(*at));
    pool->region_count--;
    pool->bytes -= region->len_bytes;
}

/* ----------------------------------------------------------------------------------------------------- growing -- */

/* Takes a region out that can be given up. Returns NULL when there is none. */
static struct pool_region *pick_unused(struct tl_pool *pool)
{
    struct pool_region *picked = NULL;
    pthread_mutex_lock(&pool->mutex);
    (void)pool_give_spares(pool);
    for (size_t i = pool->region_count; i-- > 0 && !picked;) {
        struct pool_region *region = pool->regions[i];
        if (!region->is_lasting && tl_block_is_whole_range(region->first)) picked = region;
    }
    if (picked) pool_region_remove(pool, picked);
    pthread_mutex_unlock(&pool->mutex);
    return picked;
}

/* Returns true when there may be no further region: each costs its provider something. */
static bool has_most_regions(const struct tl_pool *pool)
{
    uint32_t most = pool->provider->limits.max_pool_regions;
    return most > 0 && pool->region_count >= most;
}

/* The size of a region for small blocks. In a large pool regions are larger, so that they stay few. */
static uint64_t usual_bytes(const struct tl_pool *pool)
{
    return tl_max_u64(pool->pool_bytes, pool_round(pool->bytes / REGIONS_OF_ONE_SIZE, TL_PAGE_BYTES));
}

/* Gives up regions if the maximum demands it, and computes how large a region for need_bytes will be. Called under
 * growing. */
static enum tl_status plan_region(struct tl_pool *pool, uint64_t need_bytes, uint64_t *ret_len_bytes,
                                  struct tl_error *ret_error)
{
    uint64_t len_bytes = tl_max_u64(usual_bytes(pool), need_bytes);
    while (len_bytes <= pool->max_bytes && (len_bytes > pool->max_bytes - pool->bytes || has_most_regions(pool))) {
        struct pool_region *unused = pick_unused(pool);
        if (!unused) break;
        pool_region_destroy(unused);
    }
    len_bytes = tl_min_u64(len_bytes, pool->max_bytes - pool->bytes);
    if (len_bytes >= need_bytes && !has_most_regions(pool)) {
        *ret_len_bytes = len_bytes;
        return TL_OK;
    }
    struct tl_pool_stats stats;
    tl_pool_get_stats(pool, &stats);
    const char *settings = pool->provider->ops->settings;
    if (has_most_regions(pool)) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            "the pool has %" PRIu64 " regions, which is the most; make them larger (%s.pool)",
                            stats.regions, settings);
    }
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                        "%" PRIu64 " bytes do not fit into the pool, which has %" PRIu64 " bytes, %" PRIu64
                        " of them in use, and may have %" PRIu64 "; raise its maximum (%s.max_pool)",
                        need_bytes, stats.bytes, stats.used_bytes, pool->max_bytes, settings);
}

static enum tl_status make_region(struct tl_pool *pool, uint64_t region_bytes, struct pool_need need,
                                  struct tl_block **ret_block, struct tl_error *ret_error)
{
    struct pool_region *region = NULL;
    enum tl_status status = pool_region_create(pool, region_bytes, true, &region, ret_error);
    if (status != TL_OK) return status;
    pool_region_pin(pool, region);
    pthread_mutex_lock(&pool->mutex);
    bool is_added = pool_region_add(pool, region);
    status = is_added ? pool_take_fitting(pool, need, ret_block, ret_error)
                      : tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the records of the pool");
    if (is_added) pool->is_more_wanted = pool->is_more_refused = false;
    pthread_mutex_unlock(&pool->mutex);
    if (!is_added) pool_region_destroy(region);
    return status;
}

/* Adds a region that no block needs yet, unless something else would have to go for it. Called under both locks; mutex
 * is not held while the pool grows. */
static void make_more(struct tl_pool *pool)
{
    struct pool_region *region = NULL;
    struct tl_error error;
    uint64_t len_bytes = usual_bytes(pool);
    bool may_grow = len_bytes <= pool->max_bytes - pool->bytes && !has_most_regions(pool);
    pool->is_more_wanted = false;
    pthread_mutex_unlock(&pool->mutex);
    if (may_grow && pool_region_create(pool, len_bytes, false, &region, &error) == TL_OK) pool_region_pin(pool, region);
    pthread_mutex_lock(&pool->mutex);
    pool->is_more_refused = region == NULL || !pool_region_add(pool, region);
    if (pool->is_more_refused) pool_region_destroy(region);
}

enum tl_status pool_grow(struct tl_pool *pool, struct pool_need need, struct tl_block **ret_block,
                         struct tl_error *ret_error)
{
    uint64_t region_bytes = 0, need_bytes = pool_round(need.len_bytes, TL_PAGE_BYTES);
    uint64_t least_bytes = tl_max_u64(need_bytes, pool->first_bytes);
    enum tl_status status = plan_region(pool, need_bytes, &region_bytes, ret_error);
    if (status != TL_OK) return status;
    status = make_region(pool, region_bytes, need, ret_block, ret_error);
    /* Where locked memory is scarce, it may suffice for the block. */
    bool is_worth_another = status == TL_RESOURCE_EXHAUSTED && least_bytes < region_bytes;
    return is_worth_another ? make_region(pool, least_bytes, need, ret_block, ret_error) : status;
}

/* ----------------------------------------------------------------------------------------------------- waiting -- */

/* Whether some region could hold the block: one that exists, when nothing else is in it, or one that could be made
 * after all but the first were given up. Called under mutex. */
static bool can_ever_fit(const struct tl_pool *pool, struct pool_need need, bool may_grow)
{
    if (may_grow && pool_round(need.len_bytes, TL_PAGE_BYTES) <= pool->max_bytes - pool->first_bytes) return true;
    for (size_t i = 0; i < pool->region_count; i++) {
        if (need.len_bytes <= pool->regions[i]->len_bytes) return true;
    }
    return false;
}

static enum tl_status check_wait(const struct tl_pool *pool, uint64_t len_bytes, struct tl_error *ret_error)
{
    const char *settings = pool->provider->ops->settings;
    if (!can_ever_fit(pool, pool_need_of(len_bytes), true)) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            "%" PRIu64 " bytes never fit into the pool, which has pieces of %" PRIu64
                            " bytes (%s.pool) and may have %" PRIu64 " in all; raise its maximum (%s.max_pool)",
                            len_bytes, pool->pool_bytes, settings, pool->max_bytes, settings);
    }
    if (pool->waiting_count >= TL_POOL_MAX_WAITING) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            "%" PRIu64 " requests wait for memory of the pool already, of which %" PRIu64
                            " bytes are in use; raise its maximum (%s.max_pool), which is %" PRIu64,
                            pool->waiting_count, pool->blocks.used_bytes - pool->spare_bytes, settings,
                            pool->max_bytes);
    }
    return TL_OK;
}

enum tl_status tl_pool_wait(struct tl_pool *pool, struct tl_pool_wait *wait, struct tl_error *ret_error)
{
    TL_CHECK(wait->len_bytes > 0 && wait->len_bytes <= INT64_MAX);
    wait->block = NULL;
    wait->error.code = TL_OK;
    wait->error.message[0] = '\0';
    wait->is_being_served = false;
    wait->is_withdrawn = false;
    pthread_mutex_lock(&pool->mutex);
    enum tl_status status = check_wait(pool, wait->len_bytes, ret_error);
    if (status == TL_OK) {
        tl_list_push_back(&pool->waiting, &wait->link);
        pool->waiting_count++;
        pool->waits_count++;
        pool->hooks.wanted(pool->hooks.context);
    }
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

/* Called under mutex. */
static void leave_queue(struct tl_pool *pool, struct tl_pool_wait *wait)
{
    tl_list_remove(&wait->link);
    pool->waiting_count--;
}

bool tl_pool_withdraw(struct tl_pool *pool, struct tl_pool_wait *wait)
{
    pthread_mutex_lock(&pool->mutex);
    bool is_waiting = tl_list_is_linked(&wait->link);
    bool is_first = is_waiting && pool->waiting.next == &wait->link;
    if (is_waiting && wait->is_being_served) {
        wait->is_withdrawn = true;
        is_waiting = false;
    }
    if (is_waiting) leave_queue(pool, wait);
    /* The next wait may need less. */
    if (is_waiting && is_first && pool->waiting_count > 0) pool->hooks.wanted(pool->hooks.context);
    pthread_mutex_unlock(&pool->mutex);
    return is_waiting;
}

/* Whether the maximum prevents a region for this need, rather than the card or the system. Called under both locks. */
static bool is_full(const struct tl_pool *pool, struct pool_need need)
{
    return has_most_regions(pool) || pool_round(need.len_bytes, TL_PAGE_BYTES) > pool->max_bytes - pool->bytes;
}

/* Serves the longest wait. Returns false when it must go on waiting. Called under both locks; mutex is not held while
 * the pool grows. */
static bool serve_first(struct tl_pool *pool, struct tl_pool_wait *wait)
{
    struct pool_need need = pool_need_of(wait->len_bytes);
    struct tl_error error;
    enum tl_status status = pool_take_fitting(pool, need, &wait->block, &error);
    if (status == TL_OK && wait->block == NULL) {
        wait->is_being_served = true;
        pthread_mutex_unlock(&pool->mutex);
        status = pool_grow(pool, need, &wait->block, &error);
        pthread_mutex_lock(&pool->mutex);
        pool->refusal.code = TL_OK;
        if (status != TL_OK) pool->refusal = error;
        wait->is_being_served = false;
        /* A block may yet come back. */
        if (status != TL_OK && !wait->is_withdrawn && can_ever_fit(pool, need, is_full(pool, need))) return false;
    }
    leave_queue(pool, wait);
    if (status != TL_OK) {
        wait->error = error;
    } else {
        ALLOW(wait->block->address, wait->len_bytes);
    }
    return true;
}

struct tl_pool_wait *tl_pool_serve(struct tl_pool *pool)
{
    struct tl_pool_wait *wait = NULL;
    pthread_mutex_lock(&pool->growing);
    pthread_mutex_lock(&pool->mutex);
    if (!tl_list_is_empty(&pool->waiting)) {
        wait = TL_CONTAINER_OF(pool->waiting.next, struct tl_pool_wait, link);
        if (!serve_first(pool, wait)) wait = NULL;
    } else if (pool->is_more_wanted) {
        make_more(pool);
    }
    pthread_mutex_unlock(&pool->mutex);
    pthread_mutex_unlock(&pool->growing);
    return wait;
}
