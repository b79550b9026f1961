// SPDX-License-Identifier: Apache-2.0
/*
 * Posting: what leaves towards the peer.
 *
 * Everything posted is carried out in order: messages and immediates go into the peer's ring, bytes into its segment; a
 * write to memory outside of segments becomes a slot that asks the peer to read. At most so many bytes are copied in
 * one poll, so that messages get through meanwhile. What has been carried out is done when the peer had not closed its
 * ring after that; a read when the peer has answered.
 *
 * What waits: for room in the peer's ring, which the peer tells; for a segment, which the peer has passed before it
 * told of it, so that it is on its way.
 */
#include <errno.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/copy.h"
#include "base/error.h"
#include "dataplane/local/local_helper.h"
#include "tensor/mapped_file.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

/* Of packets that the peer has not read, each of which the kernel takes for some 768. */
#define MAX_UNREAD_BYTES (64 * 1024)
#define COPY_BYTES_PER_POLL (UINT64_C(1) << 20)
/* Writes of at least that size go past the caches: the tensor would push everything else out of them. */
#define UNCACHED_BYTES (UINT64_C(8) << 20)
/* A helper thread takes so long to wake, and reads at least so fast. Larger tensors are read by two helper threads,
 * which need the processors; and what waking costs for them, or for one of several reads, is little or hidden by the
 * others. */
#define WAKING_NS (TL_NS_PER_MS / 10)
#define SLOW_BYTES_PER_NS 4
#define AWAITED_BYTES LOCAL_MIN_SPLIT_BYTES
/* More is not posted at a time: what was posted is copied, whoever gives it up, and what is posted later waits for it.
 */
#define MAX_QUEUED_BYTES (UINT64_C(16) << 20)

/* ------------------------------------------------------------------------------------------------------- slots -- */

/* The next free slot of the peer's ring; NULL: there is none now. */
static struct local_slot *free_slot(struct local_pair *pair)
{
    struct local_ring *ring = &pair->out;
    if (ring->next - pair->out_consumed >= ring->slot_count) {
        uint32_t consumed = atomic_load_explicit(&ring->head->consumed, memory_order_acquire);
        if (ring->next - consumed > ring->slot_count) {
            local_pair_violation(pair, "it has consumed what was not sent");
            return NULL;
        }
        pair->out_consumed = consumed;
    }
    pair->is_stalled = ring->next - pair->out_consumed >= ring->slot_count;
    return pair->is_stalled ? NULL : local_ring_slot(ring, ring->next);
}

static void publish(struct local_pair *pair, struct local_slot *slot)
{
    pair->out.next++;
    atomic_store_explicit(&slot->sequence, pair->out.next, memory_order_release);
    pair->has_posted = true;
}

static void fill_message(struct local_slot *slot, const void *data, uint32_t len_bytes)
{
    slot->kind = LOCAL_SLOT_MESSAGE;
    slot->message_bytes = len_bytes;
    if (len_bytes > 0) memcpy(slot->message, data, len_bytes);
}

void local_look_at_peer(struct local_pair *pair, bool is_posted)
{
    if (is_posted) pair->has_posted = false;
    /* The peer finds what was posted, or we find that it sleeps or has closed. */
    atomic_thread_fence(memory_order_seq_cst);
    uint32_t state = atomic_load_explicit(&pair->out.head->state, memory_order_relaxed);
    if (state & LOCAL_STATE_CLOSED) {
        local_pair_break(pair, TL_UNAVAILABLE, "the peer has closed the connection");
        return;
    }
    if (is_posted) pair->confirmed = pair->carried;
    bool must_wake = (state & LOCAL_STATE_SLEEPING) != 0 && (is_posted || (state & LOCAL_STATE_STALLED) != 0);
    if (!must_wake || state == pair->woken_state) return;
    pair->woken_state = state;
    pair->provider->stats.wakes_sent++;
    const uint32_t kind = LOCAL_PACKET_WAKE;
    /* When it cannot be sent, the peer has others to read. */
    (void)local_send(pair->out_socket, &kind, sizeof(kind), -1);
}

/* ---------------------------------------------------------------------------------------------------- carrying -- */

enum carrying {
    CARRYING_DONE,
    CARRYING_LATER, /* in the next poll */
    CARRYING_WAITS, /* for the peer */
};

/* Sees to it that the pages are there: a peer that takes its memory away must not cost us a signal. To read is enough
 * for a page of shared memory to come, and those that are there are mapped 16 at a time, for writing as well, which
 * takes a quarter of asking for them to be written. False: there are none, and the pair is broken. */
static bool have_pages(struct local_pair *pair, struct local_mapped *mapped, uint64_t offset_bytes)
{
    if (mapped->has_pages == NULL) return true;
    uint64_t chunk = offset_bytes / LOCAL_CHUNK_BYTES;
    if (mapped->has_pages[chunk / 8] >> (chunk % 8) & 1) return true;
    uint64_t len_bytes = tl_min_u64(LOCAL_CHUNK_BYTES, mapped->len_bytes - chunk * LOCAL_CHUNK_BYTES);
    if (madvise(mapped->address + chunk * LOCAL_CHUNK_BYTES, len_bytes, MADV_POPULATE_READ) != 0 && errno != EINVAL) {
        local_pair_break(pair, TL_UNAVAILABLE, "no pages for the peer's memory: %s", strerror(errno));
        return false;
    }
    mapped->has_pages[chunk / 8] |= (uint8_t)(1u << (chunk % 8));
    return true;
}

static enum carrying copy(struct local_pair *pair, struct local_work *work, uint64_t *budget_bytes)
{
    const struct local_place *place = &work->place;
    struct local_mapped *mapped = local_find_attached(pair, place->number);
    if (mapped == NULL && place->number - pair->next_mapped < LOCAL_MAX_SEGMENTS) {
        /* It was sent before the message that told of it: one look finds it, if it was. */
        if (pair->awaited_work != pair->carried + 1) pair->must_hear = pair->provider->must_look = true;
        pair->awaited_work = pair->carried + 1;
        return CARRYING_WAITS;
    }
    bool is_there = mapped != NULL && place->offset_bytes <= mapped->len_bytes &&
                    place->len_bytes <= mapped->len_bytes - place->offset_bytes;
    if (!is_there) {
        local_pair_violation(pair, "memory to write to that is not there");
        return CARRYING_WAITS;
    }
    uint64_t start_bytes = place->offset_bytes + work->offset_bytes;
    while (work->done_bytes < work->len_bytes) {
        uint64_t at_bytes = start_bytes + work->done_bytes;
        uint64_t len_bytes = tl_min_u64(work->len_bytes - work->done_bytes, *budget_bytes);
        if (mapped->has_pages != NULL)
            len_bytes = tl_min_u64(len_bytes, LOCAL_CHUNK_BYTES - at_bytes % LOCAL_CHUNK_BYTES);
        if (len_bytes == 0) return CARRYING_LATER;
        if (!have_pages(pair, mapped, at_bytes)) return CARRYING_WAITS;
        if (work->len_bytes >= UNCACHED_BYTES) {
            tl_copy_uncached(mapped->address + at_bytes, work->source + work->done_bytes, (size_t)len_bytes);
        } else {
            memcpy(mapped->address + at_bytes, work->source + work->done_bytes, (size_t)len_bytes);
        }
        work->done_bytes += len_bytes;
        *budget_bytes -= len_bytes;
        pair->provider->stats.bytes_written += len_bytes;
    }
    return CARRYING_DONE;
}

void local_expect_read(struct local_pair *pair, uint64_t len_bytes)
{
    int64_t now_ns = tl_clock_now_ns();
    bool is_one_of_many = pair->reads_posted - pair->reads_answered > 1;
    bool is_awaited = len_bytes < AWAITED_BYTES && !is_one_of_many;
    pair->read_began_ns = now_ns;
    pair->read_until_ns = is_awaited ? now_ns + WAKING_NS + (int64_t)(len_bytes / SLOW_BYTES_PER_NS) : now_ns;
}

static enum carrying ask_to_read(struct local_pair *pair, struct local_work *work)
{
    struct local_slot *slot = free_slot(pair);
    if (slot == NULL) return CARRYING_WAITS;
    slot->kind = LOCAL_SLOT_READ;
    slot->flags = (uint16_t)((work->has_immediate ? LOCAL_FLAG_IMMEDIATE : 0) |
                             (tl_mapped_file_has(work->source) ? LOCAL_FLAG_FILE : 0));
    slot->immediate = work->immediate;
    slot->len_bytes = work->len_bytes;
    slot->source = (uintptr_t)work->source;
    slot->offset_bytes = work->offset_bytes;
    slot->exposure = work->place.number;
    slot->generation = work->place.generation;
    work->read_number = ++pair->reads_posted;
    local_expect_read(pair, work->len_bytes);
    publish(pair, slot);
    return CARRYING_DONE;
}

static enum carrying carry_write(struct local_pair *pair, struct local_work *work, uint64_t *budget_bytes)
{
    if (work->done_bytes < work->len_bytes) {
        enum carrying carrying = copy(pair, work, budget_bytes);
        if (carrying != CARRYING_DONE) return carrying;
    }
    if (!work->has_immediate) return CARRYING_DONE;
    struct local_slot *slot = free_slot(pair);
    if (slot == NULL) return CARRYING_WAITS;
    slot->kind = LOCAL_SLOT_IMMEDIATE;
    slot->immediate = work->immediate;
    slot->len_bytes = work->len_bytes;
    publish(pair, slot);
    return CARRYING_DONE;
}

static enum carrying carry_message(struct local_pair *pair, struct local_work *work)
{
    struct local_slot *slot = free_slot(pair);
    if (slot == NULL) return CARRYING_WAITS;
    fill_message(slot, work->message, (uint32_t)work->len_bytes);
    publish(pair, slot);
    free(work->message);
    work->message = NULL;
    return CARRYING_DONE;
}

static enum carrying carry_one(struct local_pair *pair, struct local_work *work, uint64_t *budget_bytes)
{
    switch (work->kind) {
    case LOCAL_WORK_MESSAGE:
        return carry_message(pair, work);
    case LOCAL_WORK_READ:
        return ask_to_read(pair, work);
    default:
        return carry_write(pair, work, budget_bytes);
    }
}

unsigned local_carry(struct local_pair *pair)
{
    uint64_t budget_bytes = COPY_BYTES_PER_POLL;
    unsigned events = 0;
    if (pair->attached_unsent > 0) local_attach_segments(pair);
    while (pair->carried != pair->posted && pair->state == LOCAL_CONNECTED) {
        enum carrying carrying = carry_one(pair, &pair->works[pair->carried & pair->work_mask], &budget_bytes);
        if (carrying == CARRYING_LATER) events++;
        if (carrying != CARRYING_DONE) break;
        pair->carried++;
        events++;
    }
    if (pair->state == LOCAL_CONNECTED && (pair->has_posted || pair->confirmed != pair->carried)) {
        local_look_at_peer(pair, true);
    }
    return events;
}

void local_ring(struct tl_queue_pair *base)
{
    struct local_pair *pair = local_pair_of(base);
    if (pair->state != LOCAL_CONNECTED) return;
    if (pair->carried != pair->posted || pair->has_posted) (void)local_carry(pair);
}

/* -------------------------------------------------------------------------------------------------- completing -- */

/* Takes the next one from what was posted; what waits for it, NULL: nobody. */
static struct tl_work *pop(struct local_pair *pair, struct local_work *record)
{
    if (record->kind != LOCAL_WORK_MESSAGE) pair->queued_bytes -= record->len_bytes;
    pair->completed++;
    return record->work;
}

static bool is_over(struct local_pair *pair, const struct local_work *work)
{
    if (work->kind != LOCAL_WORK_READ || (int32_t)(pair->reads_answered - work->read_number) >= 0) return true;
    uint32_t answered = atomic_load_explicit(&pair->in.head->answered, memory_order_acquire);
    if (answered - pair->reads_answered > pair->reads_posted - pair->reads_answered) {
        local_pair_violation(pair, "it has read what was not told");
        return false;
    }
    pair->reads_answered = answered;
    return (int32_t)(answered - work->read_number) >= 0;
}

unsigned local_complete(struct local_pair *pair)
{
    unsigned count = 0;
    while (pair->completed != pair->confirmed && !pair->is_distrusted) {
        struct local_work *record = &pair->works[pair->completed & pair->work_mask];
        if (!is_over(pair, record)) break;
        struct tl_work *work = pop(pair, record);
        count++;
        if (work != NULL) work->done(work, TL_OK);
    }
    return count;
}

void local_cancel_works(struct local_pair *pair)
{
    while (pair->completed != pair->posted) {
        struct local_work *record = &pair->works[pair->completed & pair->work_mask];
        struct tl_work *work = pop(pair, record);
        free(record->message);
        record->message = NULL;
        if (work != NULL) work->done(work, TL_CANCELLED);
    }
}

/* ----------------------------------------------------------------------------------------------------- posting -- */

static uint32_t free_works(const struct local_pair *pair)
{
    return pair->work_count - (pair->posted - pair->completed);
}

uint32_t local_space(const struct tl_queue_pair *base)
{
    const struct local_pair *pair = local_pair_of(base);
    if (pair->state == LOCAL_NEW || pair->state > LOCAL_ENDING || pair->queued_bytes > MAX_QUEUED_BYTES) return 0;
    return free_works(pair);
}

static struct local_work *post(struct local_pair *pair, enum local_work_kind kind, struct tl_work *work)
{
    TL_CHECK(pair->state != LOCAL_NEW && pair->state <= LOCAL_ENDING && free_works(pair) > 0);
    TL_CHECK(work == NULL || (work->magic == TL_WORK_MAGIC && work->done != NULL));
    struct local_work *record = &pair->works[pair->posted++ & pair->work_mask];
    *record = (struct local_work){.kind = (uint8_t)kind, .work = work};
    return record;
}

void local_message(struct tl_queue_pair *base, const void *data, uint32_t len_bytes, struct tl_work *work)
{
    struct local_pair *pair = local_pair_of(base);
    TL_CHECK(len_bytes <= TL_SLOT_BYTES);
    bool is_first = pair->state == LOCAL_CONNECTED && pair->carried == pair->posted;
    struct local_slot *slot = is_first ? free_slot(pair) : NULL;
    if (slot != NULL) {
        fill_message(slot, data, len_bytes);
        publish(pair, slot);
        if (work == NULL) return;
        (void)post(pair, LOCAL_WORK_MESSAGE, work);
        pair->carried++;
        return;
    }
    struct local_work *record = post(pair, LOCAL_WORK_MESSAGE, work);
    record->message = malloc(len_bytes > 0 ? len_bytes : 1);
    record->len_bytes = len_bytes;
    if (record->message == NULL) {
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "no memory for a message");
    } else if (len_bytes > 0) {
        memcpy(record->message, data, len_bytes);
    }
}

/* False: not a place that a peer of ours can have told. */
static bool parse_place(const struct tl_descriptor *descriptor, uint64_t offset_bytes, uint64_t len_bytes,
                        struct local_place *ret_place)
{
    if (descriptor->len_bytes != sizeof(*ret_place)) return false;
    memcpy(ret_place, descriptor->bytes, sizeof(*ret_place));
    bool is_kind = ret_place->kind == LOCAL_PLACE_SEGMENT || ret_place->kind == LOCAL_PLACE_OUTSIDE;
    return is_kind && offset_bytes <= ret_place->len_bytes && len_bytes <= ret_place->len_bytes - offset_bytes;
}

void local_write(struct tl_queue_pair *base, const struct tl_region *region, const void *source, uint64_t len_bytes,
                 const struct tl_descriptor *destination, uint64_t offset_bytes, bool has_immediate, uint32_t immediate,
                 struct tl_work *work)
{
    struct local_pair *pair = local_pair_of(base);
    struct local_work *record = post(pair, LOCAL_WORK_WRITE, work);
    (void)region;
    TL_CHECK(len_bytes <= base->provider->limits.max_write_bytes);
    record->source = source;
    record->len_bytes = len_bytes;
    record->offset_bytes = offset_bytes;
    record->has_immediate = has_immediate;
    record->immediate = immediate;
    pair->queued_bytes += len_bytes;
    if (len_bytes == 0) return;
    if (!parse_place(destination, offset_bytes, len_bytes, &record->place)) {
        local_pair_violation(pair, "a place to write to that cannot be");
    } else if (record->place.kind == LOCAL_PLACE_OUTSIDE) {
        record->kind = LOCAL_WORK_READ;
    }
}

/* --------------------------------------------------------------------------------------------------- exposures -- */

/* The kernel lets all processes of a user have only so many descriptors under way: a peer that does not read gets no
 * more of them. The number comes first: who sees the packet sees that it is worth reading. Whoever has waited for a
 * packet that was not sent is told to go on. */
bool local_send_counted(struct local_pair *pair, const void *packet, size_t len_bytes, int fd)
{
    int unread_bytes = 0;
    if (fd >= 0 && ioctl(pair->out_socket, SIOCOUTQ, &unread_bytes) == 0 && unread_bytes > MAX_UNREAD_BYTES)
        return false;
    atomic_store_explicit(&pair->out.head->packets, pair->packets_sent + 1, memory_order_seq_cst);
    bool is_sent = local_send(pair->out_socket, packet, len_bytes, fd);
    if (is_sent) {
        pair->packets_sent++;
    } else {
        atomic_store_explicit(&pair->out.head->packets, pair->packets_sent, memory_order_seq_cst);
        pair->has_posted = true;
    }
    return is_sent;
}

/* A pool may have a thousand segments, and a process no more open files than that: what was sent is closed. */
void local_attach_segments(struct local_pair *pair)
{
    for (size_t i = 0; i < pair->attached_count; i++) {
        struct local_attached *attached = &pair->attached[i];
        if (attached->is_sent) continue;
        const struct local_segment_packet packet = {
            .kind = LOCAL_PACKET_ATTACH, .number = attached->number, .len_bytes = attached->region->base.len_bytes};
        if (!local_send_counted(pair, &packet, sizeof(packet), attached->region->fd)) return;
        attached->is_sent = true;
        pair->attached_unsent--;
        close(attached->region->fd);
        attached->region->fd = -1;
    }
}

void local_forget_region(struct local_pair *pair, uint64_t region_number)
{
    for (size_t i = 0; i < pair->attached_count; i++) {
        struct local_attached attached = pair->attached[i];
        if (attached.region->number != region_number) continue;
        if (pair->last_attached_region == region_number) pair->last_attached_region = 0;
        memmove(&pair->attached[i], &pair->attached[i + 1], (--pair->attached_count - i) * sizeof(attached));
        if (!attached.is_sent) {
            /* Numbers follow each other: the next one would not be what the peer awaits. */
            pair->attached_unsent--;
            local_pair_break(pair, TL_UNAVAILABLE, "memory has gone before the peer was told of it");
            return;
        }
        const struct local_segment_packet packet = {.kind = LOCAL_PACKET_DETACH, .number = attached.number};
        if (pair->state == LOCAL_CONNECTED) (void)local_send_counted(pair, &packet, sizeof(packet), -1);
        return;
    }
}

/* The number under which the peer knows the segment; 0: no memory to tell it. */
static uint32_t tell(struct local_pair *pair, struct local_region *region)
{
    if (pair->last_attached_region == region->number) return pair->last_attached_number;
    uint32_t number = 0;
    for (size_t i = 0; i < pair->attached_count && number == 0; i++)
        number = pair->attached[i].region == region ? pair->attached[i].number : 0;
    if (number == 0) {
        TL_CHECK(region->fd >= 0); /* it serves one peer alone */
        if (pair->attached_count == pair->attached_capacity) {
            size_t capacity = pair->attached_capacity > 0 ? 2 * pair->attached_capacity : 4;
            struct local_attached *attached = realloc(pair->attached, capacity * sizeof(*attached));
            if (attached == NULL) return 0;
            pair->attached = attached;
            pair->attached_capacity = capacity;
        }
        number = pair->next_attached++;
        pair->attached[pair->attached_count++] = (struct local_attached){.region = region, .number = number};
        pair->attached_unsent++;
        if (pair->state == LOCAL_CONNECTED) local_attach_segments(pair);
    }
    pair->last_attached_region = region->number;
    pair->last_attached_number = number;
    return number;
}

/* Index of a free place for memory outside of segments; UINT32_MAX: no memory. */
static uint32_t take_exposed(struct local_pair *pair)
{
    if (pair->free_exposed != 0) {
        uint32_t index = pair->free_exposed - 1;
        pair->free_exposed = pair->exposed[index].next_free;
        return index;
    }
    uint32_t count = pair->exposed_count > 0 ? 2 * pair->exposed_count : 8;
    struct local_exposed *exposed = realloc(pair->exposed, count * sizeof(*exposed));
    if (exposed == NULL) return UINT32_MAX;
    for (uint32_t i = pair->exposed_count; i < count; i++)
        exposed[i] = (struct local_exposed){.next_free = i + 1 < count ? i + 2 : 0};
    uint32_t index = pair->exposed_count;
    pair->exposed = exposed;
    pair->exposed_count = count;
    pair->free_exposed = exposed[index].next_free;
    return index;
}

static enum tl_status expose_outside(struct local_pair *pair, void *address, uint64_t len_bytes,
                                     struct local_place *place, struct tl_error *ret_error)
{
    if (pair->base.outside_refusal != NULL) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "%s", pair->base.outside_refusal);
    }
    uint32_t index = take_exposed(pair);
    if (index == UINT32_MAX) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to expose memory");
    pair->exposed[index].address = address;
    pair->exposed[index].len_bytes = len_bytes;
    *place = (struct local_place){.kind = LOCAL_PLACE_OUTSIDE,
                                  .number = index,
                                  .generation = pair->exposed[index].generation,
                                  .len_bytes = len_bytes};
    return TL_OK;
}

enum tl_status local_expose(struct tl_queue_pair *base, struct tl_region *region, void *address, uint64_t len_bytes,
                            struct tl_exposure *exposure, struct tl_error *ret_error)
{
    struct local_pair *pair = local_pair_of(base);
    struct local_region *local = (struct local_region *)region;
    struct local_place place = {0};
    TL_CHECK(len_bytes > 0);
    bool is_outside = region == NULL || !local->is_segment;
    *exposure = (struct tl_exposure){.region = region, .address = address, .len_bytes = len_bytes};
    if (is_outside) {
        enum tl_status status = expose_outside(pair, address, len_bytes, &place, ret_error);
        if (status != TL_OK) return status;
        exposure->provider_state = (void *)((uintptr_t)place.number + 1);
    } else {
        uint64_t offset_bytes = (uintptr_t)address - (uintptr_t)region->address;
        TL_CHECK(offset_bytes <= region->len_bytes && len_bytes <= region->len_bytes - offset_bytes);
        uint32_t number = tell(pair, local);
        if (number == 0) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to expose memory");
        place = (struct local_place){
            .kind = LOCAL_PLACE_SEGMENT, .number = number, .offset_bytes = offset_bytes, .len_bytes = len_bytes};
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
    if (exposure->provider_state == NULL || pair->exposed == NULL) return;
    uint32_t index = (uint32_t)((uintptr_t)exposure->provider_state - 1);
    TL_CHECK(index < pair->exposed_count && pair->exposed[index].address == exposure->address);
    exposure->provider_state = NULL;
    if (pair->reading.is_under_way && pair->reading.exposure == index) { /* only a peer that breaks the protocol */
        local_helper_forget(pair->helper);
        local_helper_forget(pair->second);
    }
    pair->exposed[index].address = NULL;
    pair->exposed[index].generation++;
    pair->exposed[index].next_free = pair->free_exposed;
    pair->free_exposed = index + 1;
}
