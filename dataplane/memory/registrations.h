// SPDX-License-Identifier: Apache-2.0
/*
 * Registrations of users' memory: one for each allocation, however many tensors lie in it, shared by all pins.
 *
 * A registration is found from the moment it was made until it is evicted, replaced (a registration for reading by one
 * for writing) or the last tensor of its allocation is freed. It is destroyed then, or with its last pin. The last
 * tensor's memory is not released before that, unless a pin is kept longer than the tensor.
 *
 * The allocation is what the user said it is (address and length). Two that overlap are two, each registered for
 * itself, and a pin reaches no byte outside of its own. On a device it is what CUDA says it is: the registration covers
 * all of it, and a tensor in it that is not attached yet is found by tl_registrations_add alone, because CUDA may wait.
 *
 * Tensors keep a small record of the cache until they are freed, even when the cache was closed before.
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
    uint64_t added_count; /* registrations since create */
    uint64_t count;       /* registrations now */
    uint64_t bytes;
    uint64_t evictions;
};

/* Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_registrations_create(struct tl_provider *provider, uint64_t max_bytes, uint64_t max_count,
                                       struct tl_registrations **ret_registrations,
                                       struct tl_error *ret_error) TL_MUST_USE;
/* Destroys all registrations. Nothing may be pinned. Tensors may be freed at the same time. NULL is accepted. */
void tl_registrations_close(struct tl_registrations *registrations);

/* Pins the registration that the tensor (with bytes) lies in. Returns NULL when there is none for this access. */
struct tl_registered *tl_registrations_pin(struct tl_registrations *registrations, struct tl_tensor *tensor,
                                           enum tl_region_access access);
void tl_registrations_unpin(struct tl_registrations *registrations, struct tl_registered *registered);

/* Does the same, and makes the registration when there is none. Registrations that are not pinned are evicted for it,
 * the least recently used first: for the limits, and again when the provider has no space for more. Errors:
 * TL_RESOURCE_EXHAUSTED: no memory, the limits are reached with what is pinned, or the reason of the provider.
 * TL_INVALID_ARGUMENT: that of tl_region_create. Thread: one at a time. Blocks. */
enum tl_status tl_registrations_add(struct tl_registrations *registrations, struct tl_tensor *tensor,
                                    enum tl_region_access access, struct tl_registered **ret_registered,
                                    struct tl_error *ret_error) TL_MUST_USE;

/* Destroys the least recently used registration that is not pinned. Returns false when there is none. Thread: any.
 * Blocks. */
bool tl_registrations_evict(struct tl_registrations *registrations);

/* Returns the region of a pinned registration. */
struct tl_region *tl_registered_region(const struct tl_registered *registered);

void tl_registrations_get_stats(struct tl_registrations *registrations, struct tl_registrations_stats *ret_stats);

#endif
