// SPDX-License-Identifier: Apache-2.0
/*
 * The pool, as its three files see it: pool.c (blocks, the fast path), pool_grow.c (how regions come and go, and how
 * waits are served) and pool_pin.c (how regions are pinned for copies of devices).
 *
 * There are two locks. `mutex` guards the blocks, the list of regions and the queue, and is held for moments. `growing`
 * is taken before it by the one thread that makes, pins or gives up regions; that takes milliseconds, during which
 * other threads can take blocks.
 */
#ifndef DATAPLANE_MEMORY_POOL_INTERNAL_H
#define DATAPLANE_MEMORY_POOL_INTERNAL_H

#include <pthread.h>

#include "base/arith.h"
#include "base/sanitizer.h"
#include "dataplane/memory/pages.h"
#include "dataplane/memory/pool.h"
#include "tensor/device.h"

/* Under AddressSanitizer free memory of the pool is poisoned like that of malloc, so that a late write is found. */
#ifdef TL_HAS_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#define FORBID(address, len_bytes) ASAN_POISON_MEMORY_REGION((void *)(address), len_bytes)
#define ALLOW(address, len_bytes) ASAN_UNPOISON_MEMORY_REGION((void *)(address), len_bytes)
#else
#define FORBID(address, len_bytes) ((void)0)
#define ALLOW(address, len_bytes) ((void)0)
#endif

/* Blocks up to this size that come back are kept as they are for the next request for this size: small tensors come and
 * go with every request, or thousands of them with every group. No more are kept, because all are given up at once,
 * under the mutex. */
#define SPARE_MAX_BYTES UINT64_C(4096)
#define SPARE_SIZES (SPARE_MAX_BYTES / TL_POOL_ALIGNMENT_BYTES)
#define MAX_SPARES 4096

struct pool_region {
    struct tl_pool *pool;
    void *address;
    uint64_t len_bytes;
    struct tl_region *region; /* NULL: the pool is closed */
    struct tl_block *first;   /* the block at the lowest address */
    bool is_lasting;          /* it is the first region of the pool */
    bool is_pinned;           /* for copies of devices, until the region ends; written under both locks */
    struct tl_device_unpin unpin;
};

/* What is known of pinning; written under both locks. */
struct pool_pinning {
    bool is_wanted;
    struct tl_device device; /* whose threads pin; all devices may use what they have pinned */
    const char *failure;     /* why a region was not pinned; NULL: none has failed. Never freed (base/reason.h) */
};

struct tl_pool {
    struct tl_provider *provider;
    uint64_t first_bytes; /* at most pool_bytes */
    uint64_t pool_bytes;
    uint64_t max_bytes; /* with a small first region */
    struct tl_pool_hooks hooks;
    pthread_mutex_t growing;
    pthread_mutex_t mutex;
    struct tl_blocks blocks;
    struct tl_block *spares[SPARE_SIZES]; /* by size, linked by `right`; struct tl_blocks takes them for taken */
    unsigned spare_count;                 /* all blocks in these lists */
    uint64_t spare_bytes;
    struct tl_list waiting; /* struct tl_pool_wait, the longest wait first */
    uint64_t waiting_count;
    uint64_t waits_count;
    struct pool_region **regions; /* [region_count], by address */
    size_t region_count;
    size_t region_capacity;
    uint64_t bytes; /* the sum of all regions; changes under both locks only */
    struct pool_pinning pinning;
    bool is_more_wanted;     /* a block was not given so that a quarter of the pool stays free */
    bool is_more_refused;    /* the pool has not grown when that was tried; it has not grown since */
    struct tl_error refusal; /* why the pool did not grow when that was tried last for a wait; TL_OK: it did */
    bool is_closed;
};

/* How much memory a block of len_bytes takes, and where it may begin. */
struct pool_need {
    uint64_t len_bytes;
    uint64_t alignment;
};

/* Rounds up to a multiple of unit_bytes, or down when that does not fit. */
static inline uint64_t pool_round(uint64_t len_bytes, uint64_t unit_bytes)
{
    uint64_t sum;
    if (!tl_add_u64(len_bytes, unit_bytes - 1, &sum)) sum = len_bytes;
    return sum - sum % unit_bytes;
}

static inline struct pool_need pool_need_of(uint64_t len_bytes)
{
    return (struct pool_need){.len_bytes = pool_round(len_bytes, TL_POOL_ALIGNMENT_BYTES),
                              .alignment = len_bytes < TL_POOL_PAGED_BYTES ? TL_POOL_ALIGNMENT_BYTES : TL_PAGE_BYTES};
}

/* Takes a block if one fits; otherwise *ret_block stays as it is. Called under mutex. Errors: TL_RESOURCE_EXHAUSTED: no
 * memory for the records. */
enum tl_status pool_take_fitting(struct tl_pool *pool, struct pool_need need, struct tl_block **ret_block,
                                 struct tl_error *ret_error) TL_MUST_USE;

/* Frees the spare blocks. Returns false when there were none. Called under mutex. */
bool pool_give_spares(struct tl_pool *pool);

/* Returns how many regions start at or below the address. Called under mutex. */
size_t pool_count_up_to(const struct tl_pool *pool, uintptr_t address);
/* Create maps and registers memory; where may_evict, registrations that are not used go for it. Add makes it part of
 * the pool (under mutex; false: no memory). Remove takes it out when it is wholly free. */
enum tl_status pool_region_create(struct tl_pool *pool, uint64_t len_bytes, bool may_evict,
                                  struct pool_region **ret_region, struct tl_error *ret_error) TL_MUST_USE;
bool pool_region_add(struct tl_pool *pool, struct pool_region *region);
void pool_region_remove(struct tl_pool *pool, struct pool_region *region);
void pool_region_destroy(struct pool_region *region);
/* Pins a region, unless that is not wanted, or has failed for another one. Called under growing, without mutex. */
void pool_region_pin(struct tl_pool *pool, struct pool_region *region);
/* Unmaps the memory of a region and frees its record, at once or, when it is pinned, after it was unpinned. */
void pool_region_unmap(struct pool_region *region);
/* Adds a region in which the block fits, and takes the block. Called under growing. Errors: those of tl_pool_take. */
enum tl_status pool_grow(struct tl_pool *pool, struct pool_need need, struct tl_block **ret_block,
                         struct tl_error *ret_error) TL_MUST_USE;

#endif
