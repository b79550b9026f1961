// SPDX-License-Identifier: Apache-2.0
/*
 * How the pool is pinned for copies of devices.
 *
 * Regions that exist when a device is first used are pinned one after the other, while blocks are taken and given as
 * before: a block is only used by copies once its region is pinned. A region that is added later is pinned before. It
 * stays pinned until it has no block any more, and so no copy; its memory is unmapped when CUDA has let go of it.
 *
 * Failure modes: when a region cannot be pinned, it serves everything else, and no other region is tried. Memory that
 * CUDA does not let go of stays mapped, because CUDA would take what is mapped there next for pinned.
 */
#include "dataplane/memory/pool_internal.h"

#include <stdlib.h>

#include "base/check.h"
#include "base/reason.h"

/* Called under mutex. */
static struct pool_region *find_unpinned(const struct tl_pool *pool)
{
    for (size_t i = 0; i < pool->region_count; i++)
        if (!pool->regions[i]->is_pinned) return pool->regions[i];
    return NULL;
}

void pool_region_pin(struct tl_pool *pool, struct pool_region *region)
{
    struct tl_device device = pool->pinning.device;
    struct tl_error error;
    if (!pool->pinning.is_wanted || pool->pinning.failure != NULL) return;
    enum tl_status status = tl_device_pin(device, region->address, region->len_bytes, &error);
    const char *failure = status == TL_OK ? NULL : tl_reason(error.message);
    pthread_mutex_lock(&pool->mutex);
    region->is_pinned = status == TL_OK;
    pool->pinning.failure = failure;
    pthread_mutex_unlock(&pool->mutex);
    region->unpin.device = device;
}

bool tl_pool_pin_next(struct tl_pool *pool, struct tl_device device)
{
    pthread_mutex_lock(&pool->growing);
    pthread_mutex_lock(&pool->mutex);
    if (!pool->pinning.is_wanted) pool->pinning = (struct pool_pinning){.is_wanted = true, .device = device};
    struct pool_region *region = find_unpinned(pool);
    pthread_mutex_unlock(&pool->mutex);
    if (region != NULL) pool_region_pin(pool, region);
    pthread_mutex_lock(&pool->mutex);
    bool has_more = pool->pinning.failure == NULL && find_unpinned(pool) != NULL;
    pthread_mutex_unlock(&pool->mutex);
    pthread_mutex_unlock(&pool->growing);
    return has_more;
}

const char *tl_pool_pin_failure(struct tl_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    const char *failure = pool->pinning.failure;
    pthread_mutex_unlock(&pool->mutex);
    return failure;
}

bool tl_pool_is_pinned(struct tl_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    bool is_pinned = find_unpinned(pool) == NULL;
    pthread_mutex_unlock(&pool->mutex);
    return is_pinned;
}

bool tl_pool_is_block_pinned(struct tl_pool *pool, const struct tl_block *block)
{
    const struct pool_region *region = block->owner;
    pthread_mutex_lock(&pool->mutex);
    bool is_pinned = region->pool == pool && region->is_pinned;
    pthread_mutex_unlock(&pool->mutex);
    return is_pinned;
}

static void unmap(struct pool_region *region)
{
    if (region->address) tl_pages_unmap(region->address, region->len_bytes);
    free(region);
}

static void unpinned(struct tl_device_unpin *unpin, const struct tl_error *status)
{
    struct pool_region *region = TL_CONTAINER_OF(unpin, struct pool_region, unpin);
    if (status->code != TL_OK) region->address = NULL;
    unmap(region);
}

void pool_region_unmap(struct pool_region *region)
{
    if (!region->is_pinned) {
        unmap(region);
        return;
    }
    region->unpin.address = region->address;
    region->unpin.done = unpinned;
    tl_device_unpin(&region->unpin);
}
