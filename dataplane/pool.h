// SPDX-License-Identifier: Apache-2.0
/*
 * The pool: regions of registered memory with an allocator inside.
 *
 * A region is anonymous memory on the card's NUMA node, in huge pages where there are any. The first is made with the
 * pool; when nothing fits, another follows (larger for a larger block), up to the maximum. One that is not the first,
 * wholly free and not pinned, is given up when the maximum would be exceeded without that.
 *
 * Blocks may outlive the pool's registrations: tl_pool_close takes the memory from the provider and leaves the blocks
 * to who has them.
 *
 * Thread: any, unless a function says otherwise.
 */
#ifndef DATAPLANE_POOL_H
#define DATAPLANE_POOL_H

#include "dataplane/blocks.h"
#include "dataplane/provider.h"

/* Of the address of a block, and from PAGED_BYTES on of a page, so that large blocks share none. */
#define TL_POOL_ALIGNMENT_BYTES 64
#define TL_POOL_PAGED_BYTES (UINT64_C(1) << 20)

struct tl_pool;

struct tl_pool_stats {
    uint64_t regions;
    uint64_t bytes; /* registered */
    uint64_t used_bytes;
};

/* pool_bytes: of one region; both are rounded up to pages, and max_bytes to pool_bytes.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory, or what the provider says of the first region. */
enum tl_status tl_pool_create(struct tl_provider *provider, uint64_t pool_bytes, uint64_t max_bytes,
                              struct tl_pool **ret_pool, struct tl_error *ret_error) TL_MUST_USE;
/* Deregisters everything; nothing is pinned, and nobody calls anything but tl_pool_give any more. The memory goes with
 * the last block. NULL is accepted. */
void tl_pool_close(struct tl_pool *pool);

/* Takes a block of at least len_bytes (not 0). Errors: TL_RESOURCE_EXHAUSTED: the maximum is reached (the message names
 * the setting), no memory, or what the provider says. Blocks: when the pool grows; those that find room do not wait. */
enum tl_status tl_pool_take(struct tl_pool *pool, uint64_t len_bytes, struct tl_block **ret_block,
                            struct tl_error *ret_error) TL_MUST_USE;
void tl_pool_give(struct tl_block *block);

/* The region that these bytes lie in, which stays until unpinned; NULL: they do not lie in the pool. */
struct tl_region *tl_pool_pin(struct tl_pool *pool, const void *address, uint64_t len_bytes);
void tl_pool_unpin(struct tl_pool *pool, const struct tl_region *region);

void tl_pool_get_stats(struct tl_pool *pool, struct tl_pool_stats *ret_stats);

#endif
