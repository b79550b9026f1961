// SPDX-License-Identifier: Apache-2.0
/*
 * Receiving: what the peer has put into our ring, and its segments.
 *
 * Slots are taken in order by their turn, each field read once; what they say is compared with our own records. A slot
 * that asks to read is carried out here, with the peer's process as the source: when the last byte has been read the
 * peer must still live and not have closed, else what was read may be anything.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/reason.h"
#include "dataplane/local_internal.h"
#include "dataplane/pages.h"

#define READ_BYTES_PER_POLL (UINT64_C(2) << 20)

/* ------------------------------------------------------------------------------------------------ reading memory -- */

bool local_peer_lives(const struct local_pair *pair)
{
    struct pollfd descriptors[] = {
        {.fd = pair->socket, .events = POLLRDHUP},
        {.fd = pair->process_fd, .events = POLLIN}, /* a negative one is passed over */
    };
    if (poll(descriptors, TL_ARRAY_COUNT(descriptors), 0) <= 0) return true;
    return (descriptors[0].revents & (POLLRDHUP | POLLHUP | POLLERR)) == 0 && descriptors[1].revents == 0;
}

const char *local_try_reading(const struct local_pair *pair, uint64_t address, uint64_t proof)
{
    uint64_t value = 0;
    struct iovec to = {.iov_base = &value, .iov_len = sizeof(value)};
    struct iovec from = {.iov_base = (void *)(uintptr_t)address, .iov_len = sizeof(value)};
    if (pair->provider->is_reading_forbidden) {
        return "memory outside of the pool is copied, as the settings say (local.process_vm)";
    }
    if (pair->credentials.pid <= 0) return "the peer's process is in another container, its memory cannot be read";
    ssize_t len_bytes = process_vm_readv(pair->credentials.pid, &to, 1, &from, 1, 0);
    if (len_bytes == (ssize_t)sizeof(value) && value == proof) return NULL;
    struct tl_error error;
    (void)tl_error_set(&error, TL_PERMISSION_DENIED,
                       "this process may not read the peer's memory: %s (process_vm_readv; see "
                       "/proc/sys/kernel/yama/ptrace_scope)",
                       len_bytes < 0 ? strerror(errno) : "other bytes were there");
    return tl_reason(error.message);
}

/* Where the read goes; NULL: to nowhere that is exposed. */
static uint8_t *find_exposed(const struct local_pair *pair, const struct local_slot_read *reading)
{
    if (reading->exposure >= pair->exposed_count) return NULL;
    const struct local_exposed *exposed = &pair->exposed[reading->exposure];
    bool is_exposed = exposed->address != NULL && exposed->generation == reading->generation &&
                      reading->offset_bytes <= exposed->len_bytes &&
                      reading->len_bytes <= exposed->len_bytes - reading->offset_bytes;
    return is_exposed ? exposed->address + reading->offset_bytes : NULL;
}

/* The peer may use the slot again; it is told of a quarter of the ring at a time. */
static void consume(struct local_pair *pair)
{
    uint32_t next = ++pair->in.next;
    if ((next & (pair->in.slot_count / 4 - 1)) != 0 || pair->state != LOCAL_CONNECTED) return;
    atomic_store_explicit(&pair->in.head->consumed, next, memory_order_release);
    local_look_at_peer(pair, false);
}

/* All has been read, unless the peer has died or closed meanwhile. */
static void finish_reading(struct local_pair *pair)
{
    struct local_slot_read *reading = &pair->reading;
    bool is_closed = (atomic_load_explicit(&pair->out.head->state, memory_order_acquire) & LOCAL_STATE_CLOSED) != 0;
    if (is_closed || !local_peer_lives(pair)) {
        local_pair_break(pair, TL_UNAVAILABLE, "the peer has gone while its memory was read");
        return;
    }
    reading->is_under_way = false;
    consume(pair);
    atomic_store_explicit(&pair->out.head->answered, ++pair->answered, memory_order_release);
    pair->has_posted = true;
    local_look_at_peer(pair, true);
    if (reading->has_immediate) pair->events.immediate(pair->owner, reading->immediate, reading->len_bytes);
}

/* Reads the next bytes of what is under way. */
static void read_on(struct local_pair *pair)
{
    struct local_slot_read *reading = &pair->reading;
    uint8_t *address = find_exposed(pair, reading);
    if (address == NULL) {
        local_pair_violation(pair, "a write to memory that is not exposed");
        return;
    }
    uint64_t left_bytes = reading->len_bytes - reading->done_bytes;
    size_t len_bytes = (size_t)tl_min_u64(left_bytes, READ_BYTES_PER_POLL);
    struct iovec to = {.iov_base = address + reading->done_bytes, .iov_len = len_bytes};
    struct iovec from = {.iov_base = (void *)(uintptr_t)(reading->source + reading->done_bytes), .iov_len = len_bytes};
    ssize_t read_bytes = len_bytes > 0 ? process_vm_readv(pair->credentials.pid, &to, 1, &from, 1, 0) : 0;
    if (len_bytes > 0 && read_bytes <= 0) {
        local_pair_break(pair, TL_UNAVAILABLE, "the peer's memory cannot be read: %s", strerror(errno));
        return;
    }
    reading->done_bytes += (uint64_t)read_bytes;
    pair->provider->stats.bytes_read += (uint64_t)read_bytes;
    if (reading->done_bytes == reading->len_bytes) finish_reading(pair);
}

/* --------------------------------------------------------------------------------------------------------- slots -- */

static void begin_reading(struct local_pair *pair, const struct local_slot *slot)
{
    pair->reading = (struct local_slot_read){.is_under_way = true,
                                             .has_immediate = (slot->flags & LOCAL_FLAG_IMMEDIATE) != 0,
                                             .immediate = slot->immediate,
                                             .exposure = slot->exposure,
                                             .generation = slot->generation,
                                             .source = slot->source,
                                             .offset_bytes = slot->offset_bytes,
                                             .len_bytes = slot->len_bytes};
    read_on(pair);
}

static void take(struct local_pair *pair, const struct local_slot *slot)
{
    uint32_t message_bytes = *(const volatile uint32_t *)&slot->message_bytes;
    uint32_t immediate = *(const volatile uint32_t *)&slot->immediate;
    switch (*(const volatile uint16_t *)&slot->kind) {
    case LOCAL_SLOT_MESSAGE:
        if (message_bytes > TL_SLOT_BYTES) {
            local_pair_violation(pair, "a message that is too long");
            return;
        }
        pair->events.message(pair->owner, slot->message, message_bytes);
        consume(pair);
        return;
    case LOCAL_SLOT_IMMEDIATE: {
        uint64_t len_bytes = *(const volatile uint64_t *)&slot->len_bytes;
        pair->events.immediate(pair->owner, immediate, len_bytes);
        consume(pair);
        return;
    }
    case LOCAL_SLOT_READ:
        /* The source is not to be read any more when we end. */
        if (pair->state == LOCAL_CONNECTED) begin_reading(pair, slot);
        return;
    default:
        local_pair_violation(pair, "a slot of an unknown kind");
        return;
    }
}

unsigned local_take_slots(struct local_pair *pair, unsigned most)
{
    enum local_state state = pair->state;
    unsigned count = 0;
    if (pair->reading.is_under_way) {
        if (state != LOCAL_CONNECTED) return 0;
        read_on(pair);
        count++;
    }
    while (count < most && pair->state == state && !pair->reading.is_under_way) {
        const struct local_slot *slot = local_ring_slot(&pair->in, pair->in.next);
        if (atomic_load_explicit(&slot->turn, memory_order_acquire) != pair->in.next + 1) break;
        uint32_t next = pair->in.next;
        take(pair, slot);
        if (pair->in.next == next) return count + 1;
        count++;
    }
    return count;
}

/* ------------------------------------------------------------------------------------------------------ segments -- */

enum tl_status local_attach(struct local_pair *pair, const struct local_segment_packet *packet, int fd,
                            struct tl_error *ret_error)
{
    void *address;
    if (packet->number != pair->next_mapped || pair->mapped_count >= LOCAL_MAX_SEGMENTS) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a segment out of turn, or too many");
    }
    if (packet->len_bytes % TL_PAGE_BYTES != 0) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a segment that does not consist of pages");
    }
    if (pair->mapped_count == pair->mapped_capacity) {
        size_t capacity = pair->mapped_capacity > 0 ? 2 * pair->mapped_capacity : 4;
        struct local_mapped *mapped = realloc(pair->mapped, capacity * sizeof(*mapped));
        if (mapped == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a segment");
        pair->mapped = mapped;
        pair->mapped_capacity = capacity;
    }
    enum tl_status status = local_memory_map(fd, packet->len_bytes, &address, ret_error);
    if (status != TL_OK) return status;
    struct local_mapped *mapped = &pair->mapped[pair->mapped_count];
    *mapped = (struct local_mapped){.number = packet->number, .address = address, .len_bytes = packet->len_bytes};
    if (packet->len_bytes > TL_LOCAL_LAZY_BYTES) {
        mapped->has_pages = calloc(1, (size_t)(packet->len_bytes / LOCAL_CHUNK_BYTES / 8) + 1);
        if (mapped->has_pages == NULL) {
            tl_pages_unmap(address, packet->len_bytes);
            return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a segment");
        }
    }
    pair->mapped_count++;
    pair->next_mapped++;
    return TL_OK;
}

static void unmap(struct local_mapped *mapped)
{
    tl_pages_unmap(mapped->address, mapped->len_bytes);
    free(mapped->has_pages);
}

bool local_detach(struct local_pair *pair, uint32_t number)
{
    for (size_t i = 0; i < pair->mapped_count; i++) {
        if (pair->mapped[i].number != number) continue;
        unmap(&pair->mapped[i]);
        memmove(&pair->mapped[i], &pair->mapped[i + 1], (--pair->mapped_count - i) * sizeof(*pair->mapped));
        return true;
    }
    return false;
}

void local_unmap_all(struct local_pair *pair)
{
    for (size_t i = 0; i < pair->mapped_count; i++)
        unmap(&pair->mapped[i]);
    free(pair->mapped);
    pair->mapped = NULL;
    pair->mapped_count = pair->mapped_capacity = 0;
}
