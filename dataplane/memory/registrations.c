// SPDX-License-Identifier: Apache-2.0
/*
 * The cache of registrations.
 *
 *     tensor -- attachment --> allocation -- current --> registered (a region, with pins)
 *
 * Each tensor that was ever asked for has an attachment to its allocation; the allocation is freed with its last
 * tensor. A registration that is no longer current (evicted, replaced, memory freed) cannot be found any more, and is
 * destroyed with its last pin. Current registrations that are not pinned are in the list of idle ones, the least
 * recently used first.
 *
 * The mutex is not held while the provider works: registrations that are to be destroyed are collected under it and
 * destroyed afterwards. Meanwhile they count as dying, so that close knows when the provider may go. The cache itself
 * is freed with its last reference: the owner has one, and so has each attachment.
 *
 * Failure modes: memory that cannot be registered leaves the cache as it was, except for evictions made for it.
 */
#include "dataplane/memory/registrations.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "base/list.h"
#include "tensor/device.h"

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

struct allocation_key {
    uintptr_t address;
    uint64_t len_bytes;
};

struct allocation {
    struct allocation_key key;
    uint64_t tensor_count;
    struct tl_registered *current; /* NULL: the allocation is not registered */
    UT_hash_handle hh;
};

struct tl_registered {
    struct tl_region *region;
    struct allocation
        *allocation; /* the allocation whose current registration it is; NULL: it is destroyed with its last pin */
    uint64_t pin_count;
    struct tl_list link; /* in the list of idle or of doomed ones */
};

struct attachment {
    struct tl_tensor_attachment base;
    struct tl_registrations *registrations;
    struct allocation *allocation;
};

struct tl_registrations {
    struct tl_provider *provider;
    uint64_t max_bytes;
    uint64_t max_count;
    pthread_mutex_t mutex;
    pthread_cond_t all_dead; /* dying_count has become 0 */
    struct allocation *allocations;
    struct tl_list idle;
    struct tl_registrations_stats stats;
    uint64_t dying_count;
    uint64_t reference_count;
};

/* -------------------------------------------------------------------------------------------------- life cycle -- */

enum tl_status tl_registrations_create(struct tl_provider *provider, uint64_t max_bytes, uint64_t max_count,
                                       struct tl_registrations **ret_registrations, struct tl_error *ret_error)
{
    struct tl_registrations *registrations = calloc(1, sizeof(*registrations));
    if (!registrations) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for registrations");
    registrations->provider = provider;
    registrations->max_bytes = max_bytes;
    registrations->max_count = max_count;
    pthread_mutex_init(&registrations->mutex, NULL);
    pthread_cond_init(&registrations->all_dead, NULL);
    tl_list_init(&registrations->idle);
    registrations->reference_count = 1;
    *ret_registrations = registrations;
    return TL_OK;
}

static void put_reference(struct tl_registrations *registrations)
{
    pthread_mutex_lock(&registrations->mutex);
    bool is_last = --registrations->reference_count == 0;
    pthread_mutex_unlock(&registrations->mutex);
    if (!is_last) return;
    pthread_cond_destroy(&registrations->all_dead);
    pthread_mutex_destroy(&registrations->mutex);
    free(registrations);
}

/* Collects a registration for destroy_doomed, if nothing keeps it. Called under the mutex. */
static void doom_unless_kept(struct tl_registrations *registrations, struct tl_registered *registered,
                             struct tl_list *doomed)
{
    if (registered->allocation || registered->pin_count > 0) return;
    tl_list_push_back(doomed, &registered->link);
    registrations->stats.count--;
    registrations->stats.bytes -= registered->region->len_bytes;
    registrations->dying_count++;
}

/* Takes the allocation's registration, if there is one, out of use. Called under the mutex. */
static void retire_current(struct tl_registrations *registrations, struct allocation *allocation,
                           struct tl_list *doomed)
{
    struct tl_registered *registered = allocation->current;
    if (!registered) return;
    allocation->current = NULL;
    registered->allocation = NULL;
    tl_list_remove(&registered->link);
    doom_unless_kept(registrations, registered, doomed);
}

/* Called without the mutex. */
static void destroy_doomed(struct tl_registrations *registrations, struct tl_list *doomed)
{
    struct tl_list *node;
    uint64_t count = 0;
    while ((node = tl_list_pop_front(doomed)) != NULL) {
        struct tl_registered *registered = TL_CONTAINER_OF(node, struct tl_registered, link);
        tl_region_destroy(registered->region);
        free(registered);
        count++;
    }
    if (count == 0) return;
    pthread_mutex_lock(&registrations->mutex);
    registrations->dying_count -= count;
    if (registrations->dying_count == 0) pthread_cond_broadcast(&registrations->all_dead);
    pthread_mutex_unlock(&registrations->mutex);
}

static void await_dying(struct tl_registrations *registrations)
{
    pthread_mutex_lock(&registrations->mutex);
    while (registrations->dying_count > 0)
        pthread_cond_wait(&registrations->all_dead, &registrations->mutex);
    pthread_mutex_unlock(&registrations->mutex);
}

void tl_registrations_close(struct tl_registrations *registrations)
{
    struct tl_list doomed;
    struct allocation *allocation, *next;
    if (!registrations) return;
    tl_list_init(&doomed);
    pthread_mutex_lock(&registrations->mutex);
    HASH_ITER(hh, registrations->allocations, allocation, next)
    {
        retire_current(registrations, allocation, &doomed);
    }
    TL_CHECK(registrations->stats.count == 0);
    pthread_mutex_unlock(&registrations->mutex);
    destroy_doomed(registrations, &doomed);
    await_dying(registrations);
    put_reference(registrations);
}

/* ------------------------------------------------------------------------------------------------- allocations -- */

/* The tensor is freed, and its memory with it. Another thread may be about to end a registration of it. */
static void detach(struct tl_tensor_attachment *base)
{
    struct attachment *attachment = TL_CONTAINER_OF(base, struct attachment, base);
    struct tl_registrations *registrations = attachment->registrations;
    struct allocation *allocation = attachment->allocation;
    struct tl_list doomed;
    tl_list_init(&doomed);
    pthread_mutex_lock(&registrations->mutex);
    bool is_last = --allocation->tensor_count == 0;
    if (is_last) {
        retire_current(registrations, allocation, &doomed);
        HASH_DEL(registrations->allocations, allocation);
        free(allocation);
    }
    pthread_mutex_unlock(&registrations->mutex);
    destroy_doomed(registrations, &doomed);
    if (is_last) await_dying(registrations);
    free(attachment);
    put_reference(registrations);
}

static struct allocation *find_attached(struct tl_registrations *registrations, const struct tl_tensor *tensor)
{
    struct tl_tensor_attachment *base = tl_tensor_find_attachment(tensor, registrations);
    return base ? TL_CONTAINER_OF(base, struct attachment, base)->allocation : NULL;
}

static struct allocation_key key_of(const struct tl_tensor *tensor)
{
    void *data;
    struct allocation_key key;
    tl_tensor_allocation(tensor, &data, &key.len_bytes);
    key.address = (uintptr_t)data;
    return key;
}

static struct allocation *find_known(struct tl_registrations *registrations, const struct allocation_key *key)
{
    struct allocation *allocation;
    HASH_FIND(hh, registrations->allocations, key, sizeof(*key), allocation);
    return allocation;
}

/* Returns a new allocation that has no tensor yet; NULL when there is no memory. */
static struct allocation *add_allocation(struct tl_registrations *registrations, const struct allocation_key *key)
{
    struct allocation *allocation = calloc(1, sizeof(*allocation));
    if (!allocation) return NULL;
    allocation->key = *key;
    HASH_ADD(hh, registrations->allocations, key, sizeof(allocation->key), allocation);
    if (allocation->hh.tbl != NULL) return allocation;
    free(allocation);
    return NULL;
}

/* Returns false when there is no memory. */
static bool attach(struct tl_registrations *registrations, struct tl_tensor *tensor, struct allocation *allocation)
{
    struct attachment *attachment = calloc(1, sizeof(*attachment));
    if (!attachment) return false;
    attachment->base.owner = registrations;
    attachment->base.detach = detach;
    attachment->registrations = registrations;
    attachment->allocation = allocation;
    tl_tensor_attach(tensor, &attachment->base);
    allocation->tensor_count++;
    registrations->reference_count++;
    return true;
}

/* Returns the tensor's allocation, with the tensor attached; NULL when there is no memory. Called under the mutex. */
static struct allocation *get_allocation(struct tl_registrations *registrations, struct tl_tensor *tensor,
                                         const struct allocation_key *key)
{
    struct allocation *allocation = find_attached(registrations, tensor);
    if (allocation) return allocation;
    allocation = find_known(registrations, key);
    if (!allocation) allocation = add_allocation(registrations, key);
    if (!allocation || attach(registrations, tensor, allocation)) return allocation;
    if (allocation->tensor_count == 0) {
        HASH_DEL(registrations->allocations, allocation);
        free(allocation);
    }
    return NULL;
}

/* -------------------------------------------------------------------------------------------------------- pins -- */

static bool serves(const struct tl_registered *registered, enum tl_region_access access)
{
    return registered && (access == TL_REGION_READ || registered->region->access == TL_REGION_WRITE);
}

/* Called under the mutex. */
static void pin(struct tl_registered *registered)
{
    registered->pin_count++;
    tl_list_remove(&registered->link); /* it is not idle */
}

struct tl_registered *tl_registrations_pin(struct tl_registrations *registrations, struct tl_tensor *tensor,
                                           enum tl_region_access access)
{
    struct tl_registered *registered = NULL;
    pthread_mutex_lock(&registrations->mutex);
    struct allocation *allocation = find_attached(registrations, tensor);
    bool is_attached = allocation != NULL;
    if (!is_attached && !tl_tensor_is_on_device(tensor)) {
        struct allocation_key key = key_of(tensor);
        allocation = find_known(registrations, &key);
    }
    if (allocation && serves(allocation->current, access) &&
        (is_attached || attach(registrations, tensor, allocation))) {
        registered = allocation->current;
        pin(registered);
    }
    pthread_mutex_unlock(&registrations->mutex);
    return registered;
}

void tl_registrations_unpin(struct tl_registrations *registrations, struct tl_registered *registered)
{
    struct tl_list doomed;
    tl_list_init(&doomed);
    pthread_mutex_lock(&registrations->mutex);
    TL_CHECK(registered->pin_count > 0);
    registered->pin_count--;
    if (registered->pin_count == 0 && registered->allocation)
        tl_list_push_back(&registrations->idle, &registered->link);
    doom_unless_kept(registrations, registered, &doomed);
    pthread_mutex_unlock(&registrations->mutex);
    destroy_doomed(registrations, &doomed);
}

struct tl_region *tl_registered_region(const struct tl_registered *registered)
{
    return registered->region;
}

/* ------------------------------------------------------------------------------------------------- registering -- */

bool tl_registrations_evict(struct tl_registrations *registrations)
{
    struct tl_list doomed;
    tl_list_init(&doomed);
    pthread_mutex_lock(&registrations->mutex);
    bool has_idle = !tl_list_is_empty(&registrations->idle);
    if (has_idle) {
        struct tl_registered *oldest = TL_CONTAINER_OF(registrations->idle.next, struct tl_registered, link);
        retire_current(registrations, oldest->allocation, &doomed);
        registrations->stats.evictions++;
    }
    pthread_mutex_unlock(&registrations->mutex);
    destroy_doomed(registrations, &doomed);
    return has_idle;
}

/* Evicts registrations until one more of this size is within the limits. No other thread adds any meanwhile. */
static enum tl_status evict_idle(struct tl_registrations *registrations, uint64_t len_bytes, struct tl_error *ret_error)
{
    struct tl_registrations_stats stats;
    do {
        tl_registrations_get_stats(registrations, &stats);
        if (len_bytes > registrations->max_bytes) break;
        if (stats.count < registrations->max_count && stats.bytes <= registrations->max_bytes - len_bytes) return TL_OK;
    } while (tl_registrations_evict(registrations));
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                        "an allocation of %" PRIu64 " bytes cannot be registered: %" PRIu64 " bytes in %" PRIu64
                        " registrations are in use, and there may be %" PRIu64 " bytes in %" PRIu64
                        "; raise the limits (verbs.cached)",
                        len_bytes, stats.bytes, stats.count, registrations->max_bytes, registrations->max_count);
}

/* Makes a registration the current one of its allocation, with one pin. */
static void install(struct tl_registrations *registrations, struct allocation *allocation,
                    struct tl_registered *registered)
{
    struct tl_list doomed;
    tl_list_init(&doomed);
    pthread_mutex_lock(&registrations->mutex);
    retire_current(registrations, allocation, &doomed);
    allocation->current = registered;
    registered->allocation = allocation;
    registered->pin_count = 1;
    registrations->stats.added_count++;
    registrations->stats.count++;
    registrations->stats.bytes += registered->region->len_bytes;
    pthread_mutex_unlock(&registrations->mutex);
    destroy_doomed(registrations, &doomed);
}

static enum tl_status create_region(struct tl_registrations *registrations, const struct allocation_key *key,
                                    const struct tl_device_allocation *on_device, enum tl_region_access access,
                                    struct tl_region **ret_region, struct tl_error *ret_error)
{
    if (on_device) return tl_region_create_on(registrations->provider, on_device, access, ret_region, ret_error);
    return tl_region_create(registrations->provider, (void *)key->address, key->len_bytes, access, ret_region,
                            ret_error);
}

/* The allocation cannot go: the caller holds a tensor of it. */
static enum tl_status register_anew(struct tl_registrations *registrations, struct allocation *allocation,
                                    const struct tl_device_allocation *on_device, enum tl_region_access access,
                                    struct tl_registered **ret_registered, struct tl_error *ret_error)
{
    const struct allocation_key *key = &allocation->key;
    struct tl_registered *registered = calloc(1, sizeof(*registered));
    if (!registered) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a registration");
    tl_list_init(&registered->link);
    enum tl_status status = evict_idle(registrations, key->len_bytes, ret_error);
    if (status == TL_OK) {
        do {
            status = create_region(registrations, key, on_device, access, &registered->region, ret_error);
        } while (status == TL_RESOURCE_EXHAUSTED && tl_registrations_evict(registrations));
    }
    if (status != TL_OK) {
        free(registered);
        return status;
    }
    install(registrations, allocation, registered);
    *ret_registered = registered;
    return TL_OK;
}

static enum tl_status add_found(struct tl_registrations *registrations, struct tl_tensor *tensor,
                                const struct tl_device_allocation *on_device, enum tl_region_access access,
                                struct tl_registered **ret_registered, struct tl_error *ret_error)
{
    struct allocation_key key = key_of(tensor);
    struct tl_registered *registered = NULL;
    struct tl_list doomed;
    if (on_device) key = (struct allocation_key){(uintptr_t)on_device->address, on_device->len_bytes};
    tl_list_init(&doomed);
    pthread_mutex_lock(&registrations->mutex);
    struct allocation *allocation = get_allocation(registrations, tensor, &key);
    if (allocation && serves(allocation->current, access)) {
        registered = allocation->current;
        pin(registered);
    } else if (allocation && allocation->current && allocation->current->pin_count == 0) {
        /* The new registration replaces it, so its share of the limits is given back first. */
        retire_current(registrations, allocation, &doomed);
    }
    pthread_mutex_unlock(&registrations->mutex);
    destroy_doomed(registrations, &doomed);
    if (!allocation) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a registration");
    if (!registered) return register_anew(registrations, allocation, on_device, access, ret_registered, ret_error);
    *ret_registered = registered;
    return TL_OK;
}

enum tl_status tl_registrations_add(struct tl_registrations *registrations, struct tl_tensor *tensor,
                                    enum tl_region_access access, struct tl_registered **ret_registered,
                                    struct tl_error *ret_error)
{
    struct tl_device_allocation on_device;
    if (!tl_tensor_is_on_device(tensor))
        return add_found(registrations, tensor, NULL, access, ret_registered, ret_error);
    enum tl_status status = tl_device_find_allocation(tl_tensor_device(tensor), tl_tensor_data(tensor),
                                                      tl_tensor_size_bytes(tensor), &on_device, ret_error);
    if (status != TL_OK) return status;
    status = add_found(registrations, tensor, &on_device, access, ret_registered, ret_error);
    if (on_device.file >= 0) close(on_device.file); /* the registration keeps what it needs of it */
    return status;
}

void tl_registrations_get_stats(struct tl_registrations *registrations, struct tl_registrations_stats *ret_stats)
{
    pthread_mutex_lock(&registrations->mutex);
    *ret_stats = registrations->stats;
    pthread_mutex_unlock(&registrations->mutex);
}
