// SPDX-License-Identifier: Apache-2.0
/*
 * Memory that the data plane can reach: a pool of registered memory with an allocator inside, and registrations of
 * memory that belongs to users.
 *
 * The pool consists of regions of pool_bytes each (more for a larger tensor; a pool may begin small), registered once,
 * on the card's NUMA node, in huge pages where there are any. Allocation is best fit, and free blocks coalesce. A
 * tensor whose bytes lie in the pool gives its block back with its last reference.
 *
 * A user's memory is registered as the whole allocation that it lies in, once for all tensors there, for as long as one
 * of them lives or an operation uses it. A registration must not outlive its memory, because the card would then reach
 * pages that belong to something else. Number and bytes of registrations are bounded: of those that only idle tensors
 * hold, the least recently used are evicted first.
 *
 * Registering takes milliseconds and more. It is done by the registration thread, which the memory has for this, and
 * never by a reactor. So is growing the pool: a reactor takes what is free, or waits in a queue, first come first
 * served. Registrations that are not used are evicted when the pool cannot grow because of the limit of locked memory.
 * When a device is first used, that thread also pins the pool for CUDA, so that devices copy from and to it.
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
    uint64_t pool_bytes;       /* the size of one region of the pool */
    uint64_t first_pool_bytes; /* the size of the first one, where that is less; 0: it is not */
    uint64_t max_pool_bytes;   /* the most that all regions have together, without a small first one */
    uint64_t max_cached_bytes; /* how much memory of users is registered at a time, at most */
    uint64_t max_cached_count;
};

struct tl_memory_stats {
    uint64_t pool_regions;
    uint64_t pool_bytes;      /* registered */
    uint64_t pool_used_bytes; /* in blocks that are taken */
    uint64_t pool_waits;      /* requests that had to wait for memory of the pool, since create */
    uint64_t pool_waiting;    /* requests that wait now */
    uint64_t registrations;   /* registrations of users' memory, since create */
    uint64_t cached_count;    /* registrations of users' memory now */
    uint64_t cached_bytes;
    uint64_t evictions;
    uint64_t bounced_bytes; /* copied by the CPU into or out of the pool, since create */
};

/* Creates the memory with the first region of its pool. Errors: TL_RESOURCE_EXHAUSTED: no memory, or the first region
 * cannot be registered (the limit of locked memory, with the remedy). */
enum tl_status tl_memory_create(struct tl_provider *provider, const struct tl_memory_options *options,
                                struct tl_memory **ret_memory, struct tl_error *ret_error) TL_MUST_USE;
/* No pin may be held, no wait may be left, also not in a closure that is to be delivered, and no other call may run.
 * Registrations that the registration thread has not finished fail with TL_CANCELLED; their closures are posted before
 * this returns. Registrations that tensors still hold are dropped, and the tensors live on; tensors in the pool keep
 * what they need of it until they are freed. NULL is accepted. */
void tl_memory_destroy(struct tl_memory *memory);

/* -------------------------------------------------------------------------------------------------------- pool -- */

/* Creates a tensor with this meta-data whose bytes lie in the pool: plain, string (like tl_tensor_create_for) or dead.
 * Errors: those of tl_meta_data_validate; TL_RESOURCE_EXHAUSTED: max_pool_bytes is reached, or the reason of the
 * provider. Thread: any. Blocks: when the pool grows. */
enum tl_status tl_memory_tensor_create(struct tl_memory *memory, const struct tl_meta_data *meta_data,
                                       struct tl_tensor **ret_tensor, struct tl_error *ret_error) TL_MUST_USE;

/* A wait for memory of the pool. Embedded in the object that waits; must stay valid until its closure was delivered or
 * it was withdrawn. */
struct tl_memory_wait {
    struct tl_pool_wait wait;  /* wait.error is set in the closure: TL_OK: there is memory; else the reason why not */
    struct tl_closure closure; /* goes to the poster's mailbox; the caller sets `run`, which is called on its thread */
    void (*post)(void *context, struct tl_closure *closure); /* posts the closure. Thread: any */
    void *context;
};
/* Creates the same for validated meta-data, without blocking: from the memory that was waited for, which it uses up, or
 * from what is free when nothing waits (memory_wait NULL). Errors: also TL_UNAVAILABLE: nothing is free now. Thread:
 * any. */
enum tl_status tl_memory_tensor_take(struct tl_memory *memory, const struct tl_meta_data *meta_data,
                                     struct tl_memory_wait *memory_wait, struct tl_tensor **ret_tensor,
                                     struct tl_error *ret_error) TL_MUST_USE;
/* Creates the same from what is free, for a holder that can do without it, and may keep it for ever: only while a
 * quarter of the pool stays free. Thread: any. Errors: those of tl_memory_tensor_take. */
enum tl_status tl_memory_tensor_take_early(struct tl_memory *memory, const struct tl_meta_data *meta_data,
                                           struct tl_tensor **ret_tensor, struct tl_error *ret_error) TL_MUST_USE;
/* Waits for memory for a tensor of len_bytes (not 0); the closure follows exactly once. Errors, without a closure:
 * TL_RESOURCE_EXHAUSTED: the pool is too small, or too many wait. Thread: any. */
enum tl_status tl_memory_await(struct tl_memory *memory, struct tl_memory_wait *memory_wait, uint64_t len_bytes,
                               struct tl_error *ret_error) TL_MUST_USE;
/* Returns true when the wait is over and no closure comes, false when the closure is on its way. Thread: any. */
bool tl_memory_withdraw(struct tl_memory *memory, struct tl_memory_wait *memory_wait) TL_MUST_USE;
/* Gives back memory that was waited for and not taken. Does nothing when there is none. Thread: any. */
void tl_memory_wait_drop(struct tl_memory_wait *memory_wait);

/* -------------------------------------------------------------------------------------------------------- pins -- */

/* A range of memory that operations may name, and the region it lies in. It keeps a registration. The holder of a pin
 * also holds the tensor; a tensor in the pool keeps its region. */
struct tl_pin {
    struct tl_region *region; /* NULL: nothing is pinned */
    void *address;
    uint64_t len_bytes;
    void *entry; /* the entry of the cache; NULL: the bytes lie in the pool */
};

/* Pins the bytes of a tensor if they are registered. Returns false when they are not. For a tensor without bytes it
 * returns true and pins nothing. Thread: any. */
bool tl_memory_pin(struct tl_memory *memory, struct tl_tensor *tensor, enum tl_region_access access,
                   struct tl_pin *ret_pin);
/* Gives back what a pin keeps in the cache. Thread: any. */
void tl_memory_unpin_entry(struct tl_memory *memory, void *entry);
/* Gives a pin back. A pin that is not pinned is accepted. Thread: any. */
static inline void tl_memory_unpin(struct tl_memory *memory, struct tl_pin *pin)
{
    if (pin->entry != NULL) tl_memory_unpin_entry(memory, pin->entry);
    *pin = (struct tl_pin){.region = NULL};
}

/* A registration by the registration thread. Embedded in the object that waits; must stay valid until its closure was
 * delivered. */
struct tl_registration {
    struct tl_tensor *tensor; /* borrowed: must live until the closure was delivered */
    enum tl_region_access access;
    struct tl_pin pin;         /* set in the closure, when error is TL_OK */
    struct tl_error error;     /* set in the closure: TL_OK, or the reason why not */
    struct tl_closure closure; /* goes to the poster's mailbox; the caller sets `run`, which is called on its thread */
    void (*post)(void *context, struct tl_closure *closure); /* posts the closure. Thread: any */
    void *context;
    struct tl_closure job; /* the registration thread's, as is memory */
    struct tl_memory *memory;
};
/* Registers the allocation of the tensor and pins its bytes; the closure follows exactly once. Thread: any. */
void tl_memory_register(struct tl_memory *memory, struct tl_registration *registration);

/* Says why the provider does not reach the memory of the device, so that its bytes are copied; NULL: it does. The first
 * call begins to find out. Never freed (base/reason.h). Thread: any. */
const char *tl_memory_why_not_direct(struct tl_memory *memory, struct tl_device device, enum tl_keys keys);
/* The same for what the card would write there. */
const char *tl_memory_why_not_written(struct tl_memory *memory, struct tl_device device, enum tl_keys keys);

/* The same without a try, for what the card would read or write: returns false where it was not found out yet. Thread:
 * any. */
bool tl_memory_look_direct(struct tl_memory *memory, struct tl_device device, enum tl_keys keys,
                           enum tl_region_access access, const char **ret_why_not) TL_MUST_USE;

/* Says why copies of the device cannot use all of the pool itself, so that bytes pass through blocks of the device
 * (tensor/device.h); NULL: all regions are pinned. The first call, which needs an open device, begins to pin them, and
 * from then on each new one is pinned before it is used, until one cannot be. Never freed (base/reason.h). Thread: any.
 */
const char *tl_memory_why_not_pinned(struct tl_memory *memory, struct tl_device device);
/* Whether copies of devices may use the bytes of this tensor: it lies in a region of the pool that is pinned. It stays
 * so for as long as the tensor lives. Thread: any. */
bool tl_memory_is_pinned(struct tl_memory *memory, const struct tl_tensor *tensor);

/* Maps a region like tl_region_map, and evicts registrations that are not used if that is needed. The region and its
 * memory are the caller's. Thread: any. Blocks. */
enum tl_status tl_memory_region_map(struct tl_memory *memory, uint64_t len_bytes, struct tl_region **ret_region,
                                    struct tl_error *ret_error) TL_MUST_USE;

/* Counts bytes that the CPU has copied. Thread: any. */
void tl_memory_count_bounce(struct tl_memory *memory, uint64_t len_bytes);
/* Thread: any. */
void tl_memory_get_stats(struct tl_memory *memory, struct tl_memory_stats *ret_stats);
/* Fills *ret_error for a request that has waited in vain for len_bytes of the pool: TL_RESOURCE_EXHAUSTED, with the
 * reason why the pool does not grow, and the remedy. */
void tl_memory_format_wait(struct tl_memory *memory, uint64_t len_bytes, struct tl_error *ret_error);

#endif
