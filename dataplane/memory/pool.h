// SPDX-License-Identifier: Apache-2.0
/*
 * The pool: regions of registered memory with an allocator inside.
 *
 * A region is anonymous memory on the card's NUMA node, in huge pages where there are any. The first is made with the
 * pool; when nothing fits, another follows (larger for a larger block), up to the maximum. One that is not the first,
 * wholly free is given up when the maximum would be exceeded without that.
 *
 * Nobody who may not wait makes regions: tl_pool_take_now takes what is there, and who finds nothing waits in a queue,
 * first come first served, until a block has come back or another thread has made a region (tl_pool_serve).
 *
 * Blocks may outlive the pool's registrations: tl_pool_close takes the memory from the provider and leaves the blocks
 * to who has them.
 *
 * Thread: any, unless a function says otherwise.
 */
#ifndef DATAPLANE_MEMORY_POOL_H
#define DATAPLANE_MEMORY_POOL_H

#include "base/list.h"
#include "dataplane/memory/blocks.h"
#include "dataplane/provider.h"

/* Of the address of a block, and from PAGED_BYTES on of a page, so that large blocks share none. */
#define TL_POOL_ALIGNMENT_BYTES 64
#define TL_POOL_PAGED_BYTES (UINT64_C(1) << 20)

struct tl_pool;

struct tl_pool_stats {
    uint64_t regions;
    uint64_t bytes; /* registered */
    uint64_t used_bytes;
    uint64_t waits;   /* since create */
    uint64_t waiting; /* now */
};

/* So many may wait at a time. */
#define TL_POOL_MAX_WAITING 16384

struct tl_pool_hooks {
    /* tl_pool_serve may find somebody to serve now. Called under a lock of the pool: may not call the pool. */
    void (*wanted)(void *context);
    /* Gives up memory that is registered elsewhere and that nobody uses; false: there is none. NULL: never any. */
    bool (*evict)(void *context);
    void *context;
};

/* Somebody waits for a block. Embedded in whoever does; stays until tl_pool_serve has returned it or it was withdrawn.
 */
struct tl_pool_wait {
    uint64_t len_bytes;
    struct tl_block *block; /* when it is over: its owner's; NULL: error says why not */
    struct tl_error error;
    struct tl_list link; /* the pool's, like what follows; initialised by the caller */
    bool is_being_served;
    bool is_withdrawn;
};

/* pool_bytes: of one region; both are rounded up to pages, and max_bytes to pool_bytes.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory, or what the provider says of the first region. */
enum tl_status tl_pool_create(struct tl_provider *provider, uint64_t pool_bytes, uint64_t max_bytes,
                              const struct tl_pool_hooks *hooks, struct tl_pool **ret_pool,
                              struct tl_error *ret_error) TL_MUST_USE;
/* Deregisters everything; no operation names its regions, nobody waits, and nobody calls anything but tl_pool_give any
 * more. The memory goes with the last block. NULL is accepted. */
void tl_pool_close(struct tl_pool *pool);

/* Takes a block of at least len_bytes (not 0) if one is free and nobody waits; *ret_block is NULL otherwise.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory for its record. */
enum tl_status tl_pool_take_now(struct tl_pool *pool, uint64_t len_bytes, struct tl_block **ret_block,
                                struct tl_error *ret_error) TL_MUST_USE;
/* Takes a block, before all who wait. Errors: TL_RESOURCE_EXHAUSTED: the maximum is reached (the message names the
 * setting), no memory, or what the provider says. Blocks: when the pool grows. */
enum tl_status tl_pool_take(struct tl_pool *pool, uint64_t len_bytes, struct tl_block **ret_block,
                            struct tl_error *ret_error) TL_MUST_USE;
void tl_pool_give(struct tl_block *block);

/* Waits for wait->len_bytes. Errors: TL_RESOURCE_EXHAUSTED: that much never fits, or too many wait. */
enum tl_status tl_pool_wait(struct tl_pool *pool, struct tl_pool_wait *wait, struct tl_error *ret_error) TL_MUST_USE;
/* True: it waits no more. False: tl_pool_serve has returned it, or is about to. */
bool tl_pool_withdraw(struct tl_pool *pool, struct tl_pool_wait *wait) TL_MUST_USE;
/* The longest wait, if it is over now: it has its block, or the provider refuses a region that could hold it; NULL:
 * nobody waits, or only blocks that come back can end the wait. Blocks: when the pool grows. */
struct tl_pool_wait *tl_pool_serve(struct tl_pool *pool) TL_MUST_USE;

/* The region that these bytes lie in, which stays as long as the block that they lie in is out; NULL: they do not lie
 * in the pool. */
struct tl_region *tl_pool_find(struct tl_pool *pool, const void *address, uint64_t len_bytes);
/* The same of a block that is out; NULL: it is another pool's. */
struct tl_region *tl_pool_region_of(const struct tl_pool *pool, const struct tl_block *block);

void tl_pool_get_stats(struct tl_pool *pool, struct tl_pool_stats *ret_stats);
/* What kept the pool from growing when that was tried last, with the remedy; TL_OK: nothing did. */
void tl_pool_get_refusal(struct tl_pool *pool, struct tl_error *ret_refusal);

#endif
