// SPDX-License-Identifier: Apache-2.0
/*
 * Registrations of users' memory: one for each allocation, whatever number of tensors lie in it, shared by all who pin
 * them.
 *
 * A registration serves from the moment it was made until it is evicted, replaced (one for reading when one for writing
 * is asked for) or the last tensor of its allocation dies; it is destroyed then, or with its last pin. The last
 * tensor's memory is not released before that, unless somebody has kept a pin longer than the tensor.
 *
 * The allocation is what the user said it is (address and length): two that overlap are two, each registered for
 * itself, and a pin reaches no byte outside of its own.
 *
 * Tensors keep a small record of the cache until they die, even when the cache has gone before.
 *
 * Thread: any, unless a function says otherwise.
 */
#ifndef DATAPLANE_MEMORY_REGISTRATIONS_H
#define DATAPLANE_MEMORY_REGISTRATIONS_H

#include "dataplane/provider.h"
#include "tensor/tensor.h"

struct tl_registrations;
/* One registration. */
struct tl_registered;

struct tl_registrations_stats {
    uint64_t added_count; /* since create */
    uint64_t count;       /* now */
    uint64_t bytes;
    uint64_t evictions;
};

/* Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_registrations_create(struct tl_provider *provider, uint64_t max_bytes, uint64_t max_count,
                                       struct tl_registrations **ret_registrations,
                                       struct tl_error *ret_error) TL_MUST_USE;
/* Destroys all registrations; nothing is pinned. Tensors may die at the same time. NULL is accepted. */
void tl_registrations_close(struct tl_registrations *registrations);

/* Pins the registration that the tensor (with bytes) lies in; NULL: there is none for this access. */
struct tl_registered *tl_registrations_pin(struct tl_registrations *registrations, struct tl_tensor *tensor,
                                           enum tl_region_access access);
void tl_registrations_unpin(struct tl_registrations *registrations, struct tl_registered *registered);

/* The same, and makes the registration when there is none. Those that are not pinned make room for it, the least
 * recently used first: for the limits, and again when the provider has no more.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory, the limits with what is pinned, or what the provider says.
 * TL_INVALID_ARGUMENT: as tl_region_create. Thread: one at a time. Blocks. */
enum tl_status tl_registrations_add(struct tl_registrations *registrations, struct tl_tensor *tensor,
                                    enum tl_region_access access, struct tl_registered **ret_registered,
                                    struct tl_error *ret_error) TL_MUST_USE;

/* Destroys the least recently used registration that is not pinned; false: there is none. Thread: any. Blocks. */
bool tl_registrations_evict(struct tl_registrations *registrations);

/* Of a pinned one. */
struct tl_region *tl_registered_region(const struct tl_registered *registered);

void tl_registrations_get_stats(struct tl_registrations *registrations, struct tl_registrations_stats *ret_stats);

#endif
