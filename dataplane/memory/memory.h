// SPDX-License-Identifier: Apache-2.0
/*
 * Memory that the data plane can reach: a pool of registered memory with an allocator inside, and registrations of
 * memory that belongs to users.
 *
 * The pool consists of regions of pool_bytes each (more for a larger tensor), registered once, on the card's NUMA node,
 * in huge pages where there are any; blocks are best fit and coalesce when they come back. Tensors whose bytes lie in
 * it give their block back with their last reference.
 *
 * A user's memory is registered as the whole allocation it lies in, once for all tensors of it, and for as long as one
 * of them lives or an operation uses it: registrations that outlive their memory would show the card pages that are
 * somebody else's by then. Their number and bytes are bounded; of those that only idle tensors hold, the least recently
 * used go first.
 *
 * Registering takes milliseconds and more; it is done by a slow worker, a thread of its own, never by a reactor. So
 * is growing the pool: a reactor takes what is free, or waits for its turn, first come first served. Registrations
 * that nobody uses make room when the pool cannot grow for the limit of locked memory.
 */
#ifndef DATAPLANE_MEMORY_MEMORY_H
#define DATAPLANE_MEMORY_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mailbox.h"
#include "dataplane/memory/pool.h"
#include "dataplane/provider.h"
#include "tensor/tensor.h"

struct tl_memory;

struct tl_memory_options {
    uint64_t pool_bytes;       /* of one region of the pool */
    uint64_t max_pool_bytes;   /* of all of them */
    uint64_t max_cached_bytes; /* of users' memory that is registered at a time */
    uint64_t max_cached_count;
};

struct tl_memory_stats {
    uint64_t pool_regions;
    uint64_t pool_bytes;      /* registered */
    uint64_t pool_used_bytes; /* in blocks that are out */
    uint64_t pool_waits;      /* of requests that found no room in it, since create */
    uint64_t pool_waiting;    /* now */
    uint64_t registrations;   /* of users' memory, since create */
    uint64_t cached_count;    /* now */
    uint64_t cached_bytes;
    uint64_t evictions;
    uint64_t bounced_bytes; /* copied by the CPU into or out of the pool, since create */
};

/* Errors: TL_RESOURCE_EXHAUSTED: no memory, or the first pool region cannot be registered (the limit of locked memory,
 * with its remedy). */
enum tl_status tl_memory_create(struct tl_provider *provider, const struct tl_memory_options *options,
                                struct tl_memory **ret_memory, struct tl_error *ret_error) TL_MUST_USE;
/* No pin is out and nobody waits for room, not even in a closure that waits for delivery, and nobody calls anything
 * else. Requests that the slow worker has not finished fail with TL_CANCELLED; their closures are posted before this
 * returns. Registrations that tensors still hold are dropped, and the tensors live on; those of the pool keep what they
 * need of it until they go. NULL is accepted. */
void tl_memory_destroy(struct tl_memory *memory);

/* -------------------------------------------------------------------------------------------------------- pool -- */

/* A tensor of this meta-data whose bytes lie in the pool: plain, string (as tl_tensor_create_for) or dead.
 * Errors: as tl_meta_data_validate; TL_RESOURCE_EXHAUSTED: max_pool_bytes, or what the provider says. Thread: any.
 * Blocks: when the pool grows. */
enum tl_status tl_memory_tensor_create(struct tl_memory *memory, const struct tl_meta_data *meta_data,
                                       struct tl_tensor **ret_tensor, struct tl_error *ret_error) TL_MUST_USE;

/* A wait for room in the pool. Embedded in whoever waits; must stay valid until its closure was delivered or it was
 * withdrawn. */
struct tl_memory_wait {
    struct tl_pool_wait wait;  /* wait.error, in the closure: TL_OK: there is room, or why not */
    struct tl_closure closure; /* to the poster's mailbox: deliver is set by the caller and runs on its thread */
    void (*post)(void *context, struct tl_closure *closure); /* brings the closure there. Thread: any */
    void *context;
};
/* The same of validated meta-data, without blocking: takes the room (and leaves nothing of it), or what is free when
 * nobody waits (room NULL). Errors: moreover TL_UNAVAILABLE: nothing is free now. Thread: any. */
enum tl_status tl_memory_tensor_take(struct tl_memory *memory, const struct tl_meta_data *meta_data,
                                     struct tl_memory_wait *memory_wait, struct tl_tensor **ret_tensor,
                                     struct tl_error *ret_error) TL_MUST_USE;
/* Waits for room for a tensor of len_bytes (not 0); the closure follows exactly once. Errors, without a closure:
 * TL_RESOURCE_EXHAUSTED: that much never fits, or too many wait. Thread: any. */
enum tl_status tl_memory_await(struct tl_memory *memory, struct tl_memory_wait *memory_wait, uint64_t len_bytes,
                               struct tl_error *ret_error) TL_MUST_USE;
/* True: it waits no more, and no closure comes. False: the closure is on its way. Thread: any. */
bool tl_memory_withdraw(struct tl_memory *memory, struct tl_memory_wait *memory_wait) TL_MUST_USE;
/* Gives room back that was not taken; harmless when there is none. Thread: any. */
void tl_memory_wait_drop(struct tl_memory_wait *memory_wait);

/* -------------------------------------------------------------------------------------------------------- pins -- */

/* A range of memory that operations may name, and the region it lies in; keeps a registration. Whoever holds a pin
 * holds the tensor as well: one in the pool keeps its region by being there. */
struct tl_pin {
    struct tl_region *region; /* NULL: not pinned */
    void *address;
    uint64_t len_bytes;
    void *entry; /* the cache's; NULL: in the pool */
};

/* Pins the bytes of a tensor if they are registered already; false when they are not. True, with nothing pinned, for a
 * tensor without bytes. Thread: any. */
bool tl_memory_pin(struct tl_memory *memory, struct tl_tensor *tensor, enum tl_region_access access,
                   struct tl_pin *ret_pin);
/* Gives back what a pin keeps in the cache. Thread: any. */
void tl_memory_unpin_entry(struct tl_memory *memory, void *entry);
/* Thread: any. A pin that is not pinned is accepted. */
static inline void tl_memory_unpin(struct tl_memory *memory, struct tl_pin *pin)
{
    if (pin->entry != NULL) tl_memory_unpin_entry(memory, pin->entry);
    *pin = (struct tl_pin){.region = NULL};
}

/* A registration by the slow worker. Embedded in whoever waits; must stay valid until done was called. */
struct tl_registration {
    struct tl_tensor *tensor; /* borrowed: alive until done */
    enum tl_region_access access;
    struct tl_pin pin;         /* in done, with TL_OK */
    struct tl_error error;     /* in done: TL_OK, or why not */
    struct tl_closure closure; /* to the poster's mailbox: deliver is set by the caller and runs on its thread */
    void (*post)(void *context, struct tl_closure *closure); /* brings the closure there. Thread: any */
    void *context;
    struct tl_closure job; /* the slow worker's, as is memory */
    struct tl_memory *memory;
};
/* Registers the allocation behind the tensor and pins its bytes; the closure follows exactly once. Thread: any. */
void tl_memory_register(struct tl_memory *memory, struct tl_registration *registration);

/* Maps other memory of ours, where registrations that nobody uses make room; the region and its memory are the
 * caller's. As tl_region_map. Thread: any. Blocks. */
enum tl_status tl_memory_region_map(struct tl_memory *memory, uint64_t len_bytes, struct tl_region **ret_region,
                                    struct tl_error *ret_error) TL_MUST_USE;

/* Counts bytes that were copied by the CPU. Thread: any. */
void tl_memory_count_bounce(struct tl_memory *memory, uint64_t len_bytes);
/* Thread: any. */
void tl_memory_get_stats(struct tl_memory *memory, struct tl_memory_stats *ret_stats);
/* What a request says that has waited in vain for so many bytes of the pool: TL_RESOURCE_EXHAUSTED, with the reason why
 * it does not grow, and the remedy. */
void tl_memory_format_wait(struct tl_memory *memory, uint64_t len_bytes, struct tl_error *ret_error);

#endif
