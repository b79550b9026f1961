// SPDX-License-Identifier: Apache-2.0
/*
 * Receiving: the slots that the peer has written into our ring, and the segments that it has passed.
 *
 * Slots are taken in order of their sequence number. Each field is read once and compared with our own records. A slot
 * waits until all packets were taken that the peer has sent before it. Helper threads execute a slot that asks to
 * read memory. When the last byte was read the peer must still run and not have closed the connection; otherwise the
 * bytes may be anything, and do not count.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "base/arith.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/prefetch.h"
#include "dataplane/local/local_internal.h"
#include "dataplane/memory/pages.h"
#include "dataplane/memory/segment.h"

/* ---------------------------------------------------------------------------------------------- reading memory -- */

bool local_peer_lives(const struct local_pair *pair)
{
    struct pollfd descriptors[] = {
        {.fd = pair->sockets.in, .events = POLLRDHUP},
        {.fd = pair->sockets.process, .events = POLLIN}, /* poll ignores negative descriptors */
    };
    if (poll(descriptors, TL_ARRAY_COUNT(descriptors), 0) <= 0) return true;
    return (descriptors[0].revents & (POLLRDHUP | POLLHUP | POLLERR)) == 0 && descriptors[1].revents == 0;
}

/* Frees the slot for the peer. The shared counter is written only once for a quarter of the ring. */
static void consume(struct local_pair *pair)
{
    uint32_t next = ++pair->rings.in.next;
    if ((next & (pair->rings.in.slot_count / 4 - 1)) != 0 || pair->state != LOCAL_CONNECTED) return;
    atomic_store_explicit(&pair->rings.in.head->consumed, next, memory_order_release);
    local_wake_peer(pair, LOCAL_WAKE_SPACE);
}

/* Completes the read, unless the peer has died or closed the connection meanwhile. */
static void finish_reading(struct local_pair *pair)
{
    struct local_slot_read *reading = &pair->reading;
    bool is_closed =
        (atomic_load_explicit(&pair->rings.out.head->state, memory_order_acquire) & LOCAL_STATE_CLOSED) != 0;
    if (is_closed || !local_peer_lives(pair)) {
        local_pair_break(pair, TL_UNAVAILABLE, "the peer has ended while its memory was read");
        return;
    }
    reading->is_under_way = false;
    consume(pair);
    atomic_store_explicit(&pair->rings.out.head->answered, ++pair->rings.answered, memory_order_release);
    pair->rings.has_posted = true;
    local_wake_peer(pair, LOCAL_WAKE_ANSWER);
    if (reading->has_immediate) pair->events.immediate(pair->owner, reading->immediate, reading->len_bytes);
}

static void read_part(struct local_pair *pair, struct tl_memory_reader *reader, uint8_t *destination,
                      uint64_t offset_bytes, uint64_t len_bytes)
{
    struct tl_error error;
    const struct tl_memory_reading part = {.process = pair->credentials.pid,
                                           .source = pair->reading.source + offset_bytes,
                                           .destination = destination + offset_bytes,
                                           .len_bytes = len_bytes,
                                           .is_buffered = pair->reading.may_wait};
    pair->reading.parts_left++;
    if (tl_memory_reader_read(reader, &part, &error) != TL_OK)
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "%s", error.message);
}

static void start_reading(struct local_pair *pair)
{
    const struct local_slot_read *reading = &pair->reading;
    uint8_t *destination = local_exposures_find(&pair->exposures, reading);
    local_expect_read(pair, reading->len_bytes);
    if (destination == NULL || local_pair_is_reading(pair)) {
        local_pair_violation(pair, "a write to memory that is not exposed");
    } else if (reading->len_bytes == 0) {
        finish_reading(pair);
    } else {
        uint64_t len_bytes = reading->len_bytes;
        uint64_t first_bytes =
            len_bytes < LOCAL_MIN_SPLIT_BYTES ? len_bytes : len_bytes / 2 / TL_PAGE_BYTES * TL_PAGE_BYTES;
        read_part(pair, pair->helpers[0], destination, 0, first_bytes);
        if (first_bytes < len_bytes)
            read_part(pair, pair->helpers[1], destination, first_bytes, len_bytes - first_bytes);
    }
}

void local_part_is_read(struct local_pair *pair, int error)
{
    if (error != 0) pair->reading.error = error;
    if (--pair->reading.parts_left > 0) return;
    if (local_exposures_find(&pair->exposures, &pair->reading) == NULL) {
        local_pair_violation(pair, "a write to memory that is not exposed");
    } else if (pair->reading.error != 0) {
        local_pair_break(pair, TL_UNAVAILABLE, "the peer's memory cannot be read: %s", strerror(pair->reading.error));
    } else {
        pair->provider->stats.bytes_read += pair->reading.len_bytes;
        finish_reading(pair);
    }
}

/* ------------------------------------------------------------------------------------------------------- slots -- */

static void begin_reading(struct local_pair *pair, const struct local_slot *slot)
{
    /* Each field is read once. */
    const volatile struct local_slot *once = slot;
    uint16_t flags = once->flags;
    pair->reading = (struct local_slot_read){.is_under_way = true,
                                             .has_immediate = (flags & LOCAL_FLAG_IMMEDIATE) != 0,
                                             .may_wait = (flags & LOCAL_FLAG_MAY_WAIT) != 0,
                                             .immediate = once->immediate,
                                             .exposure = once->exposure,
                                             .generation = once->generation,
                                             .source = once->source,
                                             .offset_bytes = once->offset_bytes,
                                             .len_bytes = once->len_bytes};
    start_reading(pair);
}

/* Returns whether the slot had a message. */
static bool take(struct local_pair *pair, const struct local_slot *slot)
{
    uint32_t message_bytes = *(const volatile uint32_t *)&slot->message_bytes;
    uint32_t immediate = *(const volatile uint32_t *)&slot->immediate;
    switch (*(const volatile uint16_t *)&slot->kind) {
    case LOCAL_SLOT_MESSAGE:
        if (message_bytes > TL_SLOT_BYTES) {
            local_pair_violation(pair, "a message that is too long");
            return false;
        }
        pair->events.message(pair->owner, slot->message, message_bytes);
        consume(pair);
        return true;
    case LOCAL_SLOT_IMMEDIATE: {
        uint64_t len_bytes = *(const volatile uint64_t *)&slot->len_bytes;
        /* When the pair ends, the peer may count one without bytes, which releases memory, as not sent. */
        if (len_bytes > 0 || pair->state == LOCAL_CONNECTED) pair->events.immediate(pair->owner, immediate, len_bytes);
        consume(pair);
        return false;
    }
    case LOCAL_SLOT_READ:
        /* When the pair ends, the peer's memory must not be read any more. */
        if (pair->state == LOCAL_CONNECTED) begin_reading(pair, slot);
        return false;
    default:
        local_pair_violation(pair, "a slot of an unknown kind");
        return false;
    }
}

/* Returns whether the next slot waits for a packet that was sent before it. When the pair ends, no packet is taken any
 * more. */
static bool must_wait(struct local_pair *pair)
{
    if (pair->state != LOCAL_CONNECTED) return false;
    if (atomic_load_explicit(&pair->rings.in.head->packets, memory_order_relaxed) == pair->packets.received)
        return false;
    pair->packets.must_read = pair->provider->must_look = true; /* the missing packets are in the socket */
    return true;
}

/* Brings the slot with this number into the caches, if the peer has filled it with a message. */
static void prefetch_slot(const struct local_pair *pair, uint32_t number)
{
    const struct local_slot *slot = local_ring_slot(&pair->rings.in, number);
    if (atomic_load_explicit(&slot->sequence, memory_order_relaxed) != number + 1) return;
    uint32_t len_bytes = *(const volatile uint32_t *)&slot->message_bytes;
    bool is_message = *(const volatile uint16_t *)&slot->kind == LOCAL_SLOT_MESSAGE;
    if (is_message && len_bytes <= TL_SLOT_BYTES) tl_prefetch(slot->message, len_bytes);
}

unsigned local_take_slots(struct local_pair *pair, unsigned most, unsigned most_messages)
{
    enum local_state state = pair->state;
    unsigned count = 0, message_count = 0;
    while (count < most && message_count < most_messages && pair->state == state && !pair->reading.is_under_way) {
        const struct local_slot *slot = local_ring_slot(&pair->rings.in, pair->rings.in.next);
        if (atomic_load_explicit(&slot->sequence, memory_order_acquire) != pair->rings.in.next + 1 || must_wait(pair))
            break;
        uint32_t next = pair->rings.in.next;
        prefetch_slot(pair, next + 1);
        message_count += take(pair, slot);
        if (pair->rings.in.next == next) return count + 1;
        count++;
    }
    return count;
}

/* ---------------------------------------------------------------------------------------------------- segments -- */

static bool have_place(struct local_mappings *mappings)
{
    if (mappings->count < mappings->capacity) return true;
    size_t capacity = mappings->capacity > 0 ? 2 * mappings->capacity : 4;
    struct local_peer_segment *entries = realloc(mappings->entries, capacity * sizeof(*entries));
    if (entries == NULL) return false;
    mappings->entries = entries;
    mappings->capacity = capacity;
    return true;
}

enum tl_status local_mappings_add(struct local_mappings *mappings, const struct local_segment_packet *packet, int fd,
                                  struct tl_error *ret_error)
{
    void *address;
    uint64_t len_bytes = packet->len_bytes;
    if (packet->number != mappings->next_number || mappings->count == LOCAL_MAX_SEGMENTS) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "ATTACH with an unexpected number, or of one segment too many");
    }
    if (len_bytes % TL_PAGE_BYTES != 0) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "ATTACH of a segment whose size is not a multiple of the page size");
    }
    if (!have_place(mappings)) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a segment");
    enum tl_status status = tl_segment_map(fd, len_bytes, &address, ret_error);
    if (status != TL_OK) return status;
    struct local_peer_segment mapped = {.number = packet->number, .address = address, .len_bytes = len_bytes};
    if (len_bytes > TL_LOCAL_LAZY_BYTES) {
        mapped.populated_chunks = calloc(1, (size_t)(len_bytes / TL_SEGMENT_CHUNK_BYTES / 8) + 1);
        if (mapped.populated_chunks == NULL) {
            tl_pages_unmap(address, len_bytes);
            return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a segment");
        }
    }
    mappings->entries[mappings->count++] = mapped;
    mappings->next_number++;
    return TL_OK;
}

struct local_peer_segment *local_mappings_find(struct local_mappings *mappings, uint32_t number)
{
    for (size_t i = mappings->count; i-- > 0;) {
        if (mappings->entries[i].number == number) return &mappings->entries[i];
    }
    return NULL;
}

void local_mappings_remove(struct local_mappings *mappings, struct local_peer_segment *mapped)
{
    size_t left = (size_t)(&mappings->entries[--mappings->count] - mapped);
    memmove(mapped, mapped + 1, left * sizeof(*mapped));
}
