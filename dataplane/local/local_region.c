// SPDX-License-Identifier: Apache-2.0
/* Regions, whose memory is a segment or the user's, and rings. */
#include <stdlib.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "base/thread.h"
#include "dataplane/local/local_internal.h"
#include "dataplane/memory/pages.h"
#include "dataplane/memory/segment.h"

/* The most threads of one provider that get pages at a time. */
#define MAX_POPULATERS 2

/* ----------------------------------------------------------------------------------------------------- regions -- */

static enum tl_status make_region(struct tl_provider *provider, void *address, uint64_t len_bytes,
                                  enum tl_region_access access, int fd, struct tl_region **ret_region,
                                  struct tl_error *ret_error)
{
    struct local_region *region = calloc(1, sizeof(*region));
    if (region == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a region");
    region->base =
        (struct tl_region){.provider = provider, .address = address, .len_bytes = len_bytes, .access = access};
    region->is_segment = fd >= 0;
    region->fd = fd;
    tl_list_init(&region->link);
    *ret_region = &region->base;
    return TL_OK;
}

enum tl_status local_region_create(struct tl_provider *provider, void *address, uint64_t len_bytes,
                                   enum tl_region_access access, struct tl_region **ret_region,
                                   struct tl_error *ret_error)
{
    if (address == NULL || len_bytes == 0) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: no memory to register", provider->name);
    }
    return make_region(provider, address, len_bytes, access, -1, ret_region, ret_error);
}

/* Gets the pages of a segment, from its end. The peer gets those that it is about to write, from the start, so that two
 * processors share work that takes longer than the copy. When no pages can be had, the peer notices that before it
 * writes, and its tensors take another path. */
static void *populate(void *argument)
{
    struct local_region *region = argument;
    tl_segment_populate_from_end(region->base.address, region->base.len_bytes, &region->must_stop);
    atomic_fetch_sub_explicit(&local_provider_of(region->base.provider)->populaters, 1, memory_order_relaxed);
    return NULL;
}

/* Gets the pages in a thread, or before it returns if no thread can be started. */
static void start_populating(struct local_region *region)
{
    struct tl_error error;
    struct local_provider *local = local_provider_of(region->base.provider);
    unsigned before = atomic_fetch_add_explicit(&local->populaters, 1, memory_order_relaxed);
    region->has_populater =
        before < MAX_POPULATERS && tl_thread_start("tl-pages", populate, region, &region->populater, &error) == TL_OK;
    if (!region->has_populater) (void)populate(region);
}

enum tl_status local_region_map(struct tl_provider *provider, uint64_t len_bytes, struct tl_region **ret_region,
                                struct tl_error *ret_error)
{
    int fd = -1;
    void *address = NULL;
    enum tl_status status =
        tl_segment_make("tensorlane-segment", len_bytes, TL_SEGMENT_HUGE_PAGES, &fd, &address, ret_error);
    if (status != TL_OK) return status;
    status = make_region(provider, address, len_bytes, TL_REGION_WRITE, fd, ret_region, ret_error);
    if (status != TL_OK) {
        tl_pages_unmap(address, len_bytes);
        close(fd);
        return status;
    }
    if (len_bytes > TL_LOCAL_LAZY_BYTES) start_populating((struct local_region *)*ret_region);
    return TL_OK;
}

void local_region_destroy(struct tl_region *base)
{
    struct local_region *region = (struct local_region *)base;
    struct local_provider *provider = local_provider_of(base->provider);
    atomic_store_explicit(&region->must_stop, true, memory_order_relaxed);
    if (region->has_populater) TL_CHECK(pthread_join(region->populater, NULL) == 0);
    if (!region->is_segment) {
        free(region);
        return;
    }
    /* The peer keeps its mapping until the reactor reports that the region is gone. The reactor also closes the
     * segment. */
    const uint64_t one = 1;
    TL_CHECK(pthread_mutex_lock(&provider->mutex) == 0);
    bool is_first = tl_list_is_empty(&provider->gone);
    tl_list_push_back(&provider->gone, &region->link);
    atomic_store_explicit(&provider->has_gone, true, memory_order_release);
    if (is_first) (void)!write(provider->gone_fd, &one, sizeof(one));
    TL_CHECK(pthread_mutex_unlock(&provider->mutex) == 0);
}

/* ------------------------------------------------------------------------------------------------------- rings -- */

static uint64_t slots_at(void)
{
    _Static_assert(sizeof(struct local_ring_head) <= TL_PAGE_BYTES, "a page in front of the slots");
    return TL_PAGE_BYTES;
}

bool local_ring_is_count(uint32_t slot_count)
{
    return slot_count >= LOCAL_MIN_RING_SLOTS && slot_count <= LOCAL_MAX_RING_SLOTS &&
           (slot_count & (slot_count - 1)) == 0;
}

uint64_t local_ring_bytes(uint32_t slot_count)
{
    uint64_t bytes = slots_at() + slot_count * (uint64_t)sizeof(struct local_slot);
    return (bytes + TL_PAGE_BYTES - 1) / TL_PAGE_BYTES * TL_PAGE_BYTES;
}

void local_ring_place(struct local_ring *ring, void *address, uint32_t slot_count)
{
    *ring = (struct local_ring){.head = address,
                                .slots = (struct local_slot *)(void *)((char *)address + slots_at()),
                                .slot_count = slot_count,
                                .len_bytes = local_ring_bytes(slot_count)};
}

void local_ring_unmap(struct local_ring *ring)
{
    if (ring->head == NULL) return;
    tl_pages_unmap(ring->head, ring->len_bytes);
    ring->head = NULL;
}
