// SPDX-License-Identifier: Apache-2.0
/*
 * Memory that the peer may have written: segments of ours that are passed to it, and unshared memory, which lies in no
 * segment.
 *
 * A segment serves one peer alone. Its descriptor is passed before the message that names it, and is then closed,
 * because a pool may have a thousand segments and a process often may not have more open files than that. Unshared
 * memory gets an entry in a table, and a generation, so that a descriptor of an earlier use of the entry is noticed.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "dataplane/local/local_internal.h"

/* ---------------------------------------------------------------------------------------------------- segments -- */

/* Tells the peer which segments are gone. Returns whether it knows of all. */
static bool tell_gone(struct local_pair *pair)
{
    struct tl_list *link;
    while ((link = pair->attachments.gone.next) != &pair->attachments.gone) {
        struct local_region *region = TL_CONTAINER_OF(link, struct local_region, in_pair);
        const struct local_segment_packet packet = {.kind = LOCAL_PACKET_DETACH, .number = region->number};
        if (!local_send_counted(pair, &packet, sizeof(packet), -1)) return false;
        tl_list_remove(link);
        free(region);
    }
    return true;
}

void local_attach_segments(struct local_pair *pair)
{
    struct tl_list *link;
    if (!tell_gone(pair)) return; /* else the peer would have more segments than we have */
    while ((link = pair->attachments.unsent.next) != &pair->attachments.unsent) {
        struct local_region *region = TL_CONTAINER_OF(link, struct local_region, in_pair);
        const struct local_segment_packet packet = {
            .kind = LOCAL_PACKET_ATTACH, .number = region->number, .len_bytes = region->base.len_bytes};
        if (!local_send_counted(pair, &packet, sizeof(packet), region->fd)) return;
        close(region->fd);
        region->fd = -1;
        tl_list_remove(link);
        tl_list_push_back(&pair->attachments.sent, link);
    }
}

void local_forget_region(struct local_region *region)
{
    struct local_pair *pair = region->pair;
    bool is_known = pair != NULL && pair->state == LOCAL_CONNECTED && region->fd < 0;
    if (pair != NULL) tl_list_remove(&region->in_pair);
    /* The peer expects consecutive numbers, so that a number cannot be left out. */
    if (pair != NULL && region->fd >= 0)
        local_pair_break(pair, TL_UNAVAILABLE, "a segment was destroyed before it was passed to the peer");
    if (region->fd >= 0) close(region->fd);
    if (is_known) {
        tl_list_push_back(&pair->attachments.gone, &region->in_pair);
        (void)tell_gone(pair);
    } else {
        free(region);
    }
}

void local_leave_regions(struct local_pair *pair)
{
    struct tl_list *link;
    tl_list_splice_back(&pair->attachments.sent, &pair->attachments.unsent);
    while ((link = tl_list_pop_front(&pair->attachments.sent)) != NULL)
        TL_CONTAINER_OF(link, struct local_region, in_pair)->pair = NULL;
    while ((link = tl_list_pop_front(&pair->attachments.gone)) != NULL)
        free(TL_CONTAINER_OF(link, struct local_region, in_pair));
}

static void add_region(struct local_pair *pair, struct local_region *region)
{
    TL_CHECK(region->pair == NULL && region->fd >= 0); /* a segment serves one peer alone */
    region->pair = pair;
    region->number = pair->attachments.next_number++;
    tl_list_push_back(&pair->attachments.unsent, &region->in_pair);
    if (pair->state == LOCAL_CONNECTED) local_attach_segments(pair);
}

/* -------------------------------------------------------------------------------------------- unshared memory -- */

/* Returns the index of a free entry; UINT32_MAX: there is no memory. */
static uint32_t take_place(struct local_exposures *exposures)
{
    if (exposures->first_free == 0) {
        uint32_t count = exposures->count > 0 ? 2 * exposures->count : 8;
        struct local_exposed *entries = realloc(exposures->entries, count * sizeof(*entries));
        if (entries == NULL) return UINT32_MAX;
        for (uint32_t i = exposures->count; i < count; i++)
            entries[i] = (struct local_exposed){.next_free = i + 1 < count ? i + 2 : 0};
        exposures->first_free = exposures->count + 1;
        exposures->entries = entries;
        exposures->count = count;
    }
    uint32_t index = exposures->first_free - 1;
    exposures->first_free = exposures->entries[index].next_free;
    return index;
}

static void give_place(struct local_exposures *exposures, uint32_t index)
{
    exposures->entries[index].address = NULL;
    exposures->entries[index].generation++;
    exposures->entries[index].next_free = exposures->first_free;
    exposures->first_free = index + 1;
}

uint8_t *local_exposures_find(const struct local_exposures *exposures, const struct local_slot_read *reading)
{
    if (reading->exposure >= exposures->count) return NULL;
    const struct local_exposed *exposed = &exposures->entries[reading->exposure];
    bool is_exposed = exposed->address != NULL && exposed->generation == reading->generation &&
                      reading->offset_bytes <= exposed->len_bytes &&
                      reading->len_bytes <= exposed->len_bytes - reading->offset_bytes;
    return is_exposed ? exposed->address + reading->offset_bytes : NULL;
}

/* ---------------------------------------------------------------------------------------------------- exposing -- */

static enum tl_status expose_unshared(struct local_pair *pair, void *address, uint64_t len_bytes,
                                      struct local_descriptor *place, struct tl_error *ret_error)
{
    if (pair->base.outside_refusal != NULL) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "%s", pair->base.outside_refusal);
    }
    uint32_t index = take_place(&pair->exposures);
    if (index == UINT32_MAX) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to expose memory");
    struct local_exposed *exposed = &pair->exposures.entries[index];
    exposed->address = address;
    exposed->len_bytes = len_bytes;
    *place = (struct local_descriptor){
        .kind = LOCAL_PLACE_UNSHARED, .number = index, .generation = exposed->generation, .len_bytes = len_bytes};
    return TL_OK;
}

static struct local_descriptor expose_in_segment(struct local_pair *pair, struct local_region *region,
                                                 const void *address, uint64_t len_bytes)
{
    uint64_t offset_bytes = (uintptr_t)address - (uintptr_t)region->base.address;
    TL_CHECK(offset_bytes <= region->base.len_bytes && len_bytes <= region->base.len_bytes - offset_bytes);
    if (region->pair != pair) add_region(pair, region);
    return (struct local_descriptor){
        .kind = LOCAL_PLACE_SEGMENT, .number = region->number, .offset_bytes = offset_bytes, .len_bytes = len_bytes};
}

enum tl_status local_expose(struct tl_queue_pair *base, struct tl_region *region, void *address, uint64_t len_bytes,
                            struct tl_exposure *exposure, struct tl_error *ret_error)
{
    struct local_pair *pair = local_pair_of(base);
    struct local_region *local = (struct local_region *)region;
    struct local_descriptor place = {0};
    TL_CHECK(len_bytes > 0);
    bool is_unshared = region == NULL || !local->is_segment;
    *exposure = (struct tl_exposure){.region = region, .address = address, .len_bytes = len_bytes};
    if (is_unshared) {
        enum tl_status status = expose_unshared(pair, address, len_bytes, &place, ret_error);
        if (status != TL_OK) return status;
        exposure->provider_state = (void *)((uintptr_t)place.number + 1);
    } else {
        place = expose_in_segment(pair, local, address, len_bytes);
    }
    _Static_assert(sizeof(place) <= TL_DESCRIPTOR_MAX_BYTES, "fits");
    exposure->descriptor.len_bytes = sizeof(place);
    memcpy(exposure->descriptor.bytes, &place, sizeof(place));
    return TL_OK;
}

void local_revoke(struct tl_queue_pair *base, struct tl_exposure *exposure, struct tl_work *work)
{
    struct local_pair *pair = local_pair_of(base);
    TL_CHECK(work == NULL);
    if (exposure->provider_state == NULL || pair->exposures.entries == NULL) return;
    uint32_t index = (uint32_t)((uintptr_t)exposure->provider_state - 1);
    TL_CHECK(index < pair->exposures.count && pair->exposures.entries[index].address == exposure->address);
    exposure->provider_state = NULL;
    /* Only a peer that breaks the protocol causes this. */
    if (pair->reading.is_under_way && pair->reading.exposure == index) {
        for (unsigned i = 0; i < LOCAL_HELPER_THREADS; i++)
            tl_memory_reader_take_back(pair->helpers[i]);
    }
    give_place(&pair->exposures, index);
}
