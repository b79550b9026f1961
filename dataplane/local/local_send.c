// SPDX-License-Identifier: Apache-2.0
/*
 * Posting: messages and writes to the peer.
 *
 * Everything that was posted is executed in order: messages and immediates go into the peer's ring, bytes into its
 * segment. A write to unshared memory of the peer becomes a slot that asks the peer to read. One poll copies a bounded
 * number of bytes, so that messages get through meanwhile. A work that was executed is done if the peer's ring was
 * still open afterwards; a read is done when the peer has answered.
 *
 * A work waits for a free slot of the peer's ring, or for the packet with the peer's segment, which was not taken yet.
 */
#include <errno.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/copy.h"
#include "base/error.h"
#include "dataplane/local/local_internal.h"
#include "dataplane/memory/segment.h"
#include "tensor/mapped_file.h"

/* The most bytes that packets may take which the peer has not read; the kernel counts some 768 for each. */
#define MAX_UNREAD_BYTES (64 * 1024)
#define COPY_BYTES_PER_POLL (UINT64_C(256) << 10)
/* Writes of at least this size go past the caches, because the tensor would push everything else out of them. */
#define UNCACHED_BYTES (UINT64_C(8) << 20)
/* A thread that waits for the result of a smaller read polls, and yields its processor to the helper threads. For a
 * larger one it sleeps, because waking is a small part then and the helper threads need the processors. */
#define POLLED_READ_BYTES (UINT64_C(4) << 20)
/* How long a helper thread takes to wake, and how many bytes it reads in a nanosecond at least. */
#define WAKING_NS (TL_NS_PER_MS / 10)
#define SLOW_BYTES_PER_NS 4
/* How many bytes of writes may be posted at a time: what was posted is copied even if its request is given up, and what
 * is posted later waits for it. */
#define MAX_QUEUED_BYTES (UINT64_C(16) << 20)

/* ------------------------------------------------------------------------------------------------------- slots -- */

/* Returns the next free slot of the peer's ring; NULL: there is no free slot now. */
static struct local_slot *free_slot(struct local_pair *pair)
{
    struct local_ring *ring = &pair->rings.out;
    if (ring->next - pair->rings.out_consumed >= ring->slot_count) {
        uint32_t consumed = atomic_load_explicit(&ring->head->consumed, memory_order_acquire);
        if (ring->next - consumed > ring->slot_count) {
            local_pair_violation(pair, "it reports more consumed slots than were filled");
            return NULL;
        }
        pair->rings.out_consumed = consumed;
    }
    pair->rings.is_stalled = ring->next - pair->rings.out_consumed >= ring->slot_count;
    return pair->rings.is_stalled ? NULL : local_ring_slot(ring, ring->next);
}

static void publish(struct local_pair *pair, struct local_slot *slot)
{
    pair->rings.out.next++;
    atomic_store_explicit(&slot->sequence, pair->rings.out.next, memory_order_release);
    pair->rings.has_posted = true;
}

static void fill_message(struct local_slot *slot, const void *data, uint32_t len_bytes)
{
    slot->kind = LOCAL_SLOT_MESSAGE;
    slot->message_bytes = len_bytes;
    if (len_bytes > 0 && data != slot->message) memcpy(slot->message, data, len_bytes);
}

/* Returns whether the peer has taken all slots, so that it knew of them before it went to sleep. */
static bool has_taken_all(const struct local_ring *ring)
{
    return atomic_load_explicit(&ring->head->consumed, memory_order_relaxed) == ring->next;
}

void local_wake_peer(struct local_pair *pair, enum local_wake_cause cause)
{
    bool is_posted = cause != LOCAL_WAKE_SPACE;
    if (is_posted) pair->rings.has_posted = false;
    /* This fence ensures that either the peer sees what was posted, or we see that it sleeps or has closed the ring. */
    atomic_thread_fence(memory_order_seq_cst);
    uint32_t state = atomic_load_explicit(&pair->rings.out.head->state, memory_order_relaxed);
    if (state & LOCAL_STATE_CLOSED) {
        local_pair_break(pair, TL_UNAVAILABLE, "the peer has closed the connection");
        return;
    }
    if (is_posted) pair->queue.confirmed = pair->queue.executed;
    bool must_wake = (state & LOCAL_STATE_SLEEPING) != 0 && (is_posted || (state & LOCAL_STATE_STALLED) != 0);
    if (!must_wake || state == pair->rings.woken_state) return;
    if (cause == LOCAL_WAKE_SLOTS && has_taken_all(&pair->rings.out)) return;
    pair->rings.woken_state = state;
    pair->provider->stats.wakes_sent++;
    /* This fails only when the peer has raised the count of its own eventfd to the maximum. */
    const uint64_t one = 1;
    (void)!write(pair->sockets.wake_out, &one, sizeof(one));
}

/* --------------------------------------------------------------------------------------------------- executing -- */

enum execution {
    EXECUTION_DONE,
    EXECUTION_LATER, /* the next poll continues it */
    EXECUTION_WAITS, /* it waits for the peer */
};

/* Gets the pages that are to be written. Returns false when there are none; then the pair is broken. */
static bool have_pages(struct local_pair *pair, struct local_peer_segment *mapped, uint64_t offset_bytes)
{
    if (mapped->populated_chunks == NULL) return true;
    uint64_t chunk = offset_bytes / TL_SEGMENT_CHUNK_BYTES;
    if (mapped->populated_chunks[chunk / 8] >> (chunk % 8) & 1) return true;
    uint64_t len_bytes = tl_min_u64(TL_SEGMENT_CHUNK_BYTES, mapped->len_bytes - chunk * TL_SEGMENT_CHUNK_BYTES);
    if (!tl_segment_populate(mapped->address + chunk * TL_SEGMENT_CHUNK_BYTES, len_bytes) && errno != EINVAL) {
        local_pair_break(pair, TL_UNAVAILABLE, "no pages for the peer's memory: %s", strerror(errno));
        return false;
    }
    mapped->populated_chunks[chunk / 8] |= (uint8_t)(1u << (chunk % 8));
    return true;
}

/* Whether the work itself writes the bytes, because they have no address. */
static bool is_filled(const struct local_work *work)
{
    return work->source == NULL && work->work != NULL && work->work->fill != NULL;
}

static enum execution copy(struct local_pair *pair, struct local_work *work, uint64_t *budget_bytes)
{
    const struct local_descriptor *place = &work->place;
    struct local_peer_segment *mapped = local_mappings_find(&pair->mappings, place->number);
    if (mapped == NULL && place->number - pair->mappings.next_number < LOCAL_MAX_SEGMENTS) {
        /* The packet with the segment was sent before the message that names the segment. */
        pair->packets.must_read = pair->provider->must_look = true;
        return EXECUTION_WAITS;
    }
    bool is_there = mapped != NULL && place->offset_bytes <= mapped->len_bytes &&
                    place->len_bytes <= mapped->len_bytes - place->offset_bytes;
    if (!is_there) {
        local_pair_violation(pair, "a descriptor of memory outside of its segments");
        return EXECUTION_WAITS;
    }
    uint64_t start_bytes = place->offset_bytes + work->offset_bytes;
    while (work->done_bytes < work->len_bytes) {
        uint64_t at_bytes = start_bytes + work->done_bytes;
        uint64_t len_bytes = tl_min_u64(work->len_bytes - work->done_bytes, *budget_bytes);
        if (mapped->populated_chunks != NULL)
            len_bytes = tl_min_u64(len_bytes, TL_SEGMENT_CHUNK_BYTES - at_bytes % TL_SEGMENT_CHUNK_BYTES);
        if (len_bytes == 0) return EXECUTION_LATER;
        if (!have_pages(pair, mapped, at_bytes)) return EXECUTION_WAITS;
        if (is_filled(work)) {
            work->work->fill(work->work, mapped->address + at_bytes, work->done_bytes, len_bytes);
        } else if (work->len_bytes >= UNCACHED_BYTES) {
            tl_copy_uncached(mapped->address + at_bytes, work->source + work->done_bytes, (size_t)len_bytes);
        } else {
            tl_copy(mapped->address + at_bytes, work->source + work->done_bytes, (size_t)len_bytes);
        }
        work->done_bytes += len_bytes;
        *budget_bytes -= len_bytes;
        pair->provider->stats.bytes_written += len_bytes;
    }
    return EXECUTION_DONE;
}

void local_expect_read(struct local_pair *pair, uint64_t len_bytes)
{
    int64_t now_ns = tl_clock_now_ns();
    struct local_queue *queue = &pair->queue;
    bool is_polled = len_bytes < POLLED_READ_BYTES;
    queue->read_began_ns = now_ns;
    queue->read_until_ns = is_polled ? now_ns + WAKING_NS + (int64_t)(len_bytes / SLOW_BYTES_PER_NS) : now_ns;
}

static enum execution ask_to_read(struct local_pair *pair, struct local_work *work)
{
    struct local_slot *slot = free_slot(pair);
    if (slot == NULL) return EXECUTION_WAITS;
    slot->kind = LOCAL_SLOT_READ;
    slot->flags = (uint16_t)((work->has_immediate ? LOCAL_FLAG_IMMEDIATE : 0) |
                             (tl_mapped_file_may_wait(work->source, work->len_bytes) ? LOCAL_FLAG_MAY_WAIT : 0));
    slot->immediate = work->immediate;
    slot->len_bytes = work->len_bytes;
    slot->source = (uintptr_t)work->source;
    slot->offset_bytes = work->offset_bytes;
    slot->exposure = work->place.number;
    slot->generation = work->place.generation;
    work->read_number = ++pair->queue.reads_posted;
    local_expect_read(pair, work->len_bytes);
    publish(pair, slot);
    return EXECUTION_DONE;
}

static enum execution execute_write(struct local_pair *pair, struct local_work *work, uint64_t *budget_bytes)
{
    if (work->done_bytes < work->len_bytes) {
        enum execution execution = copy(pair, work, budget_bytes);
        if (execution != EXECUTION_DONE) return execution;
    }
    if (!work->has_immediate) return EXECUTION_DONE;
    struct local_slot *slot = free_slot(pair);
    if (slot == NULL) return EXECUTION_WAITS;
    slot->kind = LOCAL_SLOT_IMMEDIATE;
    slot->immediate = work->immediate;
    slot->len_bytes = work->len_bytes;
    publish(pair, slot);
    return EXECUTION_DONE;
}

static enum execution execute_message(struct local_pair *pair, struct local_work *work)
{
    struct local_slot *slot = free_slot(pair);
    if (slot == NULL) return EXECUTION_WAITS;
    fill_message(slot, work->message, (uint32_t)work->len_bytes);
    publish(pair, slot);
    free(work->message);
    work->message = NULL;
    return EXECUTION_DONE;
}

static struct local_work *work_at(const struct local_queue *queue, uint32_t number)
{
    return &queue->works[number & queue->mask];
}

static enum execution execute_one(struct local_pair *pair, struct local_work *work, uint64_t *budget_bytes)
{
    switch (work->kind) {
    case LOCAL_WORK_MESSAGE:
        return execute_message(pair, work);
    case LOCAL_WORK_READ:
        return ask_to_read(pair, work);
    default:
        return execute_write(pair, work, budget_bytes);
    }
}

unsigned local_execute_posts(struct local_pair *pair)
{
    uint64_t budget_bytes = COPY_BYTES_PER_POLL;
    unsigned events = 0;
    if (!tl_list_is_empty(&pair->attachments.unsent)) local_attach_segments(pair);
    while (pair->queue.executed != pair->queue.posted && pair->state == LOCAL_CONNECTED) {
        enum execution execution = execute_one(pair, work_at(&pair->queue, pair->queue.executed), &budget_bytes);
        if (execution == EXECUTION_LATER) events++;
        if (execution != EXECUTION_DONE) break;
        pair->queue.executed++;
        events++;
    }
    if (pair->state == LOCAL_CONNECTED && (pair->rings.has_posted || pair->queue.confirmed != pair->queue.executed)) {
        local_wake_peer(pair, LOCAL_WAKE_SLOTS);
    }
    return events;
}

void local_ring_doorbell(struct tl_queue_pair *base)
{
    struct local_pair *pair = local_pair_of(base);
    if (pair->state != LOCAL_CONNECTED) return;
    if (pair->queue.executed != pair->queue.posted || pair->rings.has_posted) (void)local_execute_posts(pair);
}

/* -------------------------------------------------------------------------------------------------- completing -- */

/* Removes the first work. Returns the work whose `done` is to be called; NULL: none. */
static struct tl_work *pop(struct local_queue *queue, struct local_work *record)
{
    if (record->kind != LOCAL_WORK_MESSAGE) queue->queued_bytes -= record->len_bytes;
    free(record->message);
    record->message = NULL;
    queue->completed++;
    return record->work;
}

static bool is_over(struct local_pair *pair, const struct local_work *work)
{
    struct local_queue *queue = &pair->queue;
    if (work->kind != LOCAL_WORK_READ || (int32_t)(queue->reads_answered - work->read_number) >= 0) return true;
    uint32_t answered = atomic_load_explicit(&pair->rings.in.head->answered, memory_order_acquire);
    if (answered - queue->reads_answered > queue->reads_posted - queue->reads_answered) {
        local_pair_violation(pair, "it reports more completed reads than were requested");
        return false;
    }
    queue->reads_answered = answered;
    return (int32_t)(answered - work->read_number) >= 0;
}

unsigned local_complete(struct local_pair *pair)
{
    struct local_queue *queue = &pair->queue;
    struct tl_quota *quota = &pair->provider->base.quota;
    unsigned count = 0;
    while (queue->completed != queue->confirmed && !pair->is_distrusted) {
        struct local_work *record = work_at(queue, queue->completed);
        if (tl_quota_left(quota) < TL_SLOT_MESSAGES || !is_over(pair, record)) break;
        struct tl_work *work = pop(queue, record);
        count++;
        tl_quota_use(quota, tl_work_done(work, TL_OK));
    }
    return count;
}

bool local_cancel_works(struct local_pair *pair)
{
    struct local_queue *queue = &pair->queue;
    struct tl_quota *quota = &pair->provider->base.quota;
    while (queue->completed != queue->posted) {
        if (tl_quota_left(quota) < TL_SLOT_MESSAGES) return false;
        struct local_work *record = work_at(queue, queue->completed);
        struct tl_work *work = pop(queue, record);
        tl_quota_use(quota, tl_work_done(work, TL_CANCELLED));
    }
    return true;
}

/* ----------------------------------------------------------------------------------------------------- posting -- */

static uint32_t free_works(const struct local_queue *queue)
{
    return queue->limit - (queue->posted - queue->completed);
}

uint32_t local_space(const struct tl_queue_pair *base)
{
    const struct local_pair *pair = local_pair_of(base);
    if (pair->state == LOCAL_NEW || pair->state > LOCAL_ENDING || pair->queue.queued_bytes > MAX_QUEUED_BYTES) return 0;
    return free_works(&pair->queue);
}

static struct local_work *post(struct local_pair *pair, enum local_work_kind kind, struct tl_work *work)
{
    TL_CHECK(pair->state != LOCAL_NEW && pair->state <= LOCAL_ENDING && free_works(&pair->queue) > 0);
    TL_CHECK(work == NULL || (work->magic == TL_WORK_MAGIC && work->done != NULL));
    struct local_work *record = work_at(&pair->queue, pair->queue.posted++);
    *record = (struct local_work){.kind = (uint8_t)kind, .work = work};
    return record;
}

/* Returns the slot for a message that nothing has to wait for; NULL: there is none now. */
static struct local_slot *slot_at_once(struct local_pair *pair)
{
    bool is_first = pair->state == LOCAL_CONNECTED && pair->queue.executed == pair->queue.posted;
    return is_first ? free_slot(pair) : NULL;
}

void *local_message_place(struct tl_queue_pair *base)
{
    struct local_slot *slot = slot_at_once(local_pair_of(base));
    return slot != NULL ? slot->message : NULL;
}

void local_message(struct tl_queue_pair *base, const void *data, uint32_t len_bytes, struct tl_work *work)
{
    struct local_pair *pair = local_pair_of(base);
    TL_CHECK(len_bytes <= TL_SLOT_BYTES);
    struct local_slot *slot = slot_at_once(pair);
    if (slot != NULL) {
        fill_message(slot, data, len_bytes);
        publish(pair, slot);
        if (work == NULL) return;
        (void)post(pair, LOCAL_WORK_MESSAGE, work);
        pair->queue.executed++;
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

/* Copies together what the peer will read. */
static void copy_together(struct local_pair *pair, struct local_work *record)
{
    record->message = malloc(record->len_bytes);
    if (record->message == NULL) {
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "no memory for a part that the peer reads");
        return;
    }
    record->work->fill(record->work, record->message, 0, record->len_bytes);
    record->source = record->message;
}

/* Returns false when no valid descriptor of the peer describes such a place. */
static bool parse_place(const struct tl_descriptor *descriptor, uint64_t offset_bytes, uint64_t len_bytes,
                        struct local_descriptor *ret_place)
{
    if (descriptor->len_bytes != sizeof(*ret_place)) return false;
    memcpy(ret_place, descriptor->bytes, sizeof(*ret_place));
    bool is_kind = ret_place->kind == LOCAL_PLACE_SEGMENT || ret_place->kind == LOCAL_PLACE_UNSHARED;
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
    pair->queue.queued_bytes += len_bytes;
    if (len_bytes == 0) return;
    if (!parse_place(destination, offset_bytes, len_bytes, &record->place)) {
        local_pair_violation(pair, "an invalid descriptor");
    } else if (record->place.kind == LOCAL_PLACE_UNSHARED) {
        record->kind = LOCAL_WORK_READ;
        if (is_filled(record)) copy_together(pair, record);
    }
}

/* ----------------------------------------------------------------------------------------------------- packets -- */

/* The kernel limits how many descriptors of a user are under way, so that a peer that does not read gets no more. The
 * number is raised first: with a packet more than the number says, the peer would take no slots, and could fall asleep.
 * When the packet cannot be sent, the number is lowered again and the peer is woken if it sleeps, because it may wait
 * for the packet. */
bool local_send_counted(struct local_pair *pair, const void *packet, size_t len_bytes, int fd)
{
    int unread_bytes = 0;
    if (fd >= 0 && ioctl(pair->sockets.out, SIOCOUTQ, &unread_bytes) == 0 && unread_bytes > MAX_UNREAD_BYTES)
        return false;
    atomic_store_explicit(&pair->rings.out.head->packets, pair->packets.sent + 1, memory_order_seq_cst);
    bool is_sent = local_send(pair->sockets.out, packet, len_bytes, fd);
    if (is_sent) {
        pair->packets.sent++;
    } else {
        atomic_store_explicit(&pair->rings.out.head->packets, pair->packets.sent, memory_order_seq_cst);
        pair->rings.has_posted = true;
    }
    return is_sent;
}
