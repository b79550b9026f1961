// SPDX-License-Identifier: Apache-2.0
/*
 * The pool: regions of registered memory with an allocator inside.
 *
 * A region is anonymous memory on the card's NUMA node, in huge pages where there are any. The first region is made
 * with the pool. When nothing fits, another one follows (larger for a larger block), up to the maximum. When the
 * maximum would be exceeded, regions that are wholly free are given up first, except the first one.
 *
 * A thread that may not block does not make regions: tl_pool_take_now takes what is free, and a request that finds
 * nothing waits in a queue, first come first served, until a block has come back or another thread has made a region
 * (tl_pool_serve).
 *
 * Copies of devices can use the pool itself when its regions are pinned: from the first tl_pool_pin_next on, each one
 * that is added is pinned before. A region that is given up is unpinned first, on a thread of the device, and its
 * memory is unmapped there.
 *
 * Blocks may outlive the pool's registrations: tl_pool_close takes the memory from the provider and leaves the blocks
 * to their holders.
 *
 * Thread: any, unless a function says otherwise.
 */
#ifndef DATAPLANE_MEMORY_POOL_H
#define DATAPLANE_MEMORY_POOL_H

#include <tensorlane/tensor.h>

#include "base/list.h"
#include "dataplane/memory/blocks.h"
#include "dataplane/provider.h"

/* The alignment of a block. From PAGED_BYTES on a block is aligned to pages, so that large blocks share none. */
#define TL_POOL_ALIGNMENT_BYTES 64
#define TL_POOL_PAGED_BYTES (UINT64_C(1) << 20)

struct tl_pool;

struct tl_pool_stats {
    uint64_t regions;
    uint64_t bytes; /* registered memory */
    uint64_t used_bytes;
    uint64_t waits;   /* requests that had to wait, since create */
    uint64_t waiting; /* requests that wait now */
};

/* How many requests may wait at a time. */
#define TL_POOL_MAX_WAITING 16384

struct tl_pool_hooks {
    /* tl_pool_serve may be able to serve a wait now. Called under a lock of the pool, so it must not call the pool. */
    void (*wanted)(void *context);
    /* Gives up registered memory elsewhere that is not used. Returns false when there is none. NULL: there never is
     * any. */
    bool (*evict)(void *context);
    void *context;
};

/* A wait for a block. Embedded in the object that waits; stays valid until tl_pool_serve has returned it or it was
 * withdrawn. */
struct tl_pool_wait {
    uint64_t len_bytes;
    struct tl_block *block; /* set when the wait is over, and belongs to its owner then; NULL: error has the reason */
    struct tl_error error;
    struct tl_list link; /* this and what follows belong to the pool; initialised by the caller */
    bool is_being_served;
    bool is_withdrawn;
};

/* pool_bytes is the size of one region; it is rounded up to pages, and max_bytes to pool_bytes. The first region has
 * first_bytes; where that is less than pool_bytes, it comes on top of max_bytes. Errors: TL_RESOURCE_EXHAUSTED: no
 * memory, or the reason of the provider for the first region. */
enum tl_status tl_pool_create(struct tl_provider *provider, uint64_t first_bytes, uint64_t pool_bytes,
                              uint64_t max_bytes, const struct tl_pool_hooks *hooks, struct tl_pool **ret_pool,
                              struct tl_error *ret_error) TL_MUST_USE;
/* Deregisters all regions. No operation may name them, no request may wait, and only tl_pool_give may be called any
 * more. The memory is freed with the last block. NULL is accepted. */
void tl_pool_close(struct tl_pool *pool);

/* Takes a block of at least len_bytes (not 0) if one is free and no request waits; *ret_block is NULL otherwise.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory for its record. */
enum tl_status tl_pool_take_now(struct tl_pool *pool, uint64_t len_bytes, struct tl_block **ret_block,
                                struct tl_error *ret_error) TL_MUST_USE;
/* The same for a holder that can do without the block, and keeps it until something happens that may never happen: only
 * while a quarter of the pool stays free for others. *ret_is_more_wanted: the pool is to grow, which tl_pool_serve
 * does; then the next such block may be there. */
enum tl_status tl_pool_take_early(struct tl_pool *pool, uint64_t len_bytes, struct tl_block **ret_block,
                                  bool *ret_is_more_wanted, struct tl_error *ret_error) TL_MUST_USE;
/* Takes a block, before all that wait. Errors: TL_RESOURCE_EXHAUSTED: the maximum is reached (the message names the
 * setting), no memory, or the reason of the provider. Blocks: when the pool grows. */
enum tl_status tl_pool_take(struct tl_pool *pool, uint64_t len_bytes, struct tl_block **ret_block,
                            struct tl_error *ret_error) TL_MUST_USE;
void tl_pool_give(struct tl_block *block);

/* Waits for wait->len_bytes. Errors: TL_RESOURCE_EXHAUSTED: the pool can never hold so much, or too many wait. */
enum tl_status tl_pool_wait(struct tl_pool *pool, struct tl_pool_wait *wait, struct tl_error *ret_error) TL_MUST_USE;
/* Returns true when the wait is over, false when tl_pool_serve has returned it or is about to. */
bool tl_pool_withdraw(struct tl_pool *pool, struct tl_pool_wait *wait) TL_MUST_USE;
/* Returns the longest wait if it is over now: it has its block, or the provider refuses a region that could hold it.
 * Returns NULL when nothing waits, or when only blocks that come back can end the wait. When nothing waits it makes the
 * pool larger if that is wanted. Blocks: when the pool grows. */
struct tl_pool_wait *tl_pool_serve(struct tl_pool *pool) TL_MUST_USE;

/* Returns the region that these bytes lie in, which stays as long as their block is taken; NULL when they do not lie in
 * the pool. */
struct tl_region *tl_pool_find(struct tl_pool *pool, const void *address, uint64_t len_bytes);
/* Returns the region of a taken block; NULL when it is another pool's. */
struct tl_region *tl_pool_region_of(const struct tl_pool *pool, const struct tl_block *block);

/* Pins a region for copies of all devices, if there is one that is not pinned. Returns true when there are more.
 * Blocks: for as long as CUDA takes for a region, during which the pool does not grow. Thread: any that may open the
 * device. */
bool tl_pool_pin_next(struct tl_pool *pool, struct tl_device device);
/* Says why a region could not be pinned, after which no other is tried; NULL: none has failed. Never freed. */
const char *tl_pool_pin_failure(struct tl_pool *pool);
/* Whether all regions are pinned; whether the region of a taken block is, which stays so. */
bool tl_pool_is_pinned(struct tl_pool *pool);
bool tl_pool_is_block_pinned(struct tl_pool *pool, const struct tl_block *block);

void tl_pool_get_stats(struct tl_pool *pool, struct tl_pool_stats *ret_stats);
/* Why the pool could not grow when that was tried last, with the remedy; TL_OK: it could. */
void tl_pool_get_refusal(struct tl_pool *pool, struct tl_error *ret_refusal);

#endif
