// SPDX-License-Identifier: Apache-2.0
/*
 * The life of a queue pair of the local provider.
 *
 * At the end, poll marks the ring as closed and then takes what the peer has posted before. What the peer posts later
 * is refused, so that a write that it reports as done has arrived. As soon as no call writes to memory of ours any
 * more, all memory of the peer is unmapped here. The peer can write to segments of ours until it unmaps them: that
 * memory was made for it alone.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "base/random.h"
#include "dataplane/local/local_drop.h"
#include "dataplane/memory/segment.h"

/* The most packets that one look at the sockets takes from one pair. */
#define PACKETS_PER_LOOK 64

/* ------------------------------------------------------------------------------------------------------ making -- */

static uint32_t power_of_two(uint32_t count)
{
    uint32_t power = LOCAL_MIN_RING_SLOTS;
    while (power < count)
        power *= 2;
    return power;
}

static enum tl_status make_ring(struct local_pair *pair, uint32_t slot_count, struct tl_error *ret_error)
{
    void *address;
    slot_count = power_of_two(slot_count);
    enum tl_status status = tl_segment_make("tensorlane-ring", local_ring_bytes(slot_count), TL_SEGMENT_SMALL_PAGES,
                                            &pair->sockets.ring, &address, ret_error);
    if (status == TL_OK) local_ring_place(&pair->rings.in, address, slot_count);
    return status;
}

/* Makes our control socket, our eventfd, and the accept socket. */
static enum tl_status make_sockets(struct local_pair *pair, struct tl_error *ret_error)
{
    enum tl_status status = local_control_socket_make(&pair->sockets.in, &pair->sockets.peers_end, ret_error);
    if (status == TL_OK)
        status = local_accept_socket_open(pair->provider, &pair->self, &pair->sockets.accept, ret_error);
    if (status != TL_OK) return status;
    pair->sockets.wake_in = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (pair->sockets.wake_in < 0) return tl_error_set_errno(ret_error, errno, "no eventfd for a worker of this host");
    if (local_watch(pair->provider, pair->sockets.in, pair->number, EPOLLET) &&
        local_watch(pair->provider, pair->sockets.wake_in, LOCAL_WAKE_NUMBER, EPOLLET) &&
        local_watch(pair->provider, pair->sockets.accept, pair->number, EPOLLET))
        return TL_OK;
    return tl_error_set_errno(ret_error, errno, "the peer cannot be watched");
}

enum tl_status local_pair_create(struct tl_provider *base, const struct tl_queue_pair_options *options,
                                 const struct tl_queue_pair_events *events, void *owner,
                                 struct tl_queue_pair **ret_pair, struct tl_error *ret_error)
{
    struct local_provider *provider = local_provider_of(base);
    TL_CHECK(options->slot_count > 0 && options->work_count > 0);
    if (options->slot_count > LOCAL_MAX_RING_SLOTS || provider->pair_count >= base->limits.max_queue_pairs) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: %s", base->name,
                            options->slot_count > LOCAL_MAX_RING_SLOTS ? "a ring cannot have this many slots"
                                                                       : "all queue pairs are in use");
    }
    struct local_pair *pair = calloc(1, sizeof(*pair));
    if (pair == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a queue pair");
    pair->base = (struct tl_queue_pair){.ops = base->ops, .provider = base};
    pair->provider = provider;
    pair->events = *events;
    pair->owner = owner;
    pair->sockets = (struct local_sockets){-1, -1, -1, -1, -1, -1, -1, -1};
    pair->number = ++provider->last_number;
    pair->queue.limit = options->work_count;
    pair->queue.mask = power_of_two(options->work_count) - 1;
    pair->proof.own = tl_random_u64();
    pair->attachments.next_number = pair->mappings.next_number = 1;
    tl_list_init(&pair->attachments.unsent);
    tl_list_init(&pair->attachments.sent);
    tl_list_init(&pair->attachments.gone);
    tl_list_init(&pair->memories.untold);
    local_choose_token(pair->self.token);
    memcpy(pair->self.host_id, provider->host_id, TL_HOST_ID_BYTES);
    tl_list_push_back(&provider->pairs, &pair->link);
    provider->pair_count++;
    pair->queue.works = calloc((size_t)pair->queue.mask + 1, sizeof(*pair->queue.works));
    for (unsigned i = 0; i < LOCAL_HELPER_THREADS; i++)
        pair->helpers[i] = tl_memory_reader_create(provider->done_fd);
    enum tl_status status = pair->queue.works != NULL && pair->helpers[0] != NULL && pair->helpers[1] != NULL
                                ? make_ring(pair, options->slot_count, ret_error)
                                : tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a queue pair");
    if (status == TL_OK) status = make_sockets(pair, ret_error);
    if (status != TL_OK) {
        local_pair_destroy(&pair->base);
        return status;
    }
    *ret_pair = &pair->base;
    return TL_OK;
}

void local_pair_get_address(const struct tl_queue_pair *pair, struct tl_pair_address *ret_address)
{
    local_address_write(&local_pair_of(pair)->self, ret_address);
}

enum tl_status local_pair_connect(struct tl_queue_pair *base, const struct tl_pair_address *peer,
                                  struct tl_error *ret_error)
{
    struct local_pair *pair = local_pair_of(base);
    struct local_address theirs;
    const char *name = base->provider->name;
    TL_CHECK(pair->state == LOCAL_NEW);
    enum tl_status status = local_address_check(base->provider, peer, ret_error);
    if (status != TL_OK) return status;
    TL_CHECK(local_address_read(peer, &theirs));
    if (memcmp(pair->self.token, theirs.token, LOCAL_TOKEN_BYTES) == 0) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: our own pair address", name);
    }
    pair->peer = theirs;
    struct tl_error error;
    status = local_shake_hands(pair, &error);
    if (status != TL_OK) return tl_error_set(ret_error, status, "%s: %.960s", name, error.message);
    pair->state = LOCAL_CALLING;
    pair->packets.must_read = pair->provider->must_look = true; /* the peer may have sent its HELLO already */
    return TL_OK;
}

/* ---------------------------------------------------------------------------------------------------- breaking -- */

void local_pair_break(struct local_pair *pair, enum tl_status code, const char *format, ...)
{
    char what[sizeof(pair->reason.message)];
    va_list args;
    if (pair->state == LOCAL_NEW || pair->state >= LOCAL_ENDING) return;
    va_start(args, format);
    vsnprintf(what, sizeof(what), format, args);
    va_end(args);
    (void)tl_error_set(&pair->reason, code, "%s: %.960s", pair->provider->base.name, what);
    pair->state = LOCAL_ENDING;
}

void local_pair_violation(struct local_pair *pair, const char *what)
{
    local_pair_break(pair, TL_UNAVAILABLE, "the peer has broken the protocol: %s", what);
    pair->is_distrusted = true;
}

void local_pair_unmapped(struct local_pair *pair, const struct tl_error *error)
{
    if (error->code == TL_RESOURCE_EXHAUSTED)
        local_pair_break(pair, error->code, "%s", error->message);
    else
        local_pair_violation(pair, error->message);
}

void local_pair_disconnect(struct tl_queue_pair *base, const struct tl_error *reason)
{
    struct local_pair *pair = local_pair_of(base);
    if (pair->state == LOCAL_NEW || pair->state >= LOCAL_ENDING) return;
    pair->reason = *reason;
    pair->state = LOCAL_ENDING;
}

static void attach(struct local_pair *pair, const struct local_segment_packet *packet, int fd)
{
    struct tl_error error;
    if (local_mappings_add(&pair->mappings, packet, fd, &error) != TL_OK) local_pair_unmapped(pair, &error);
}

static void detach(struct local_pair *pair, uint32_t number)
{
    struct local_peer_segment *mapped = local_mappings_find(&pair->mappings, number);
    if (mapped == NULL) {
        local_pair_violation(pair, "DETACH of an unknown segment");
        return;
    }
    local_drop(&(struct local_leftovers){.segment = *mapped});
    local_mappings_remove(&pair->mappings, mapped);
}

/* Carries out a packet of the control socket, which has as many descriptors as its kind needs. */
static void handle_packet(struct local_pair *pair, const union local_packet *packet, const int *fds)
{
    pair->packets.received++;
    if (packet->kind == LOCAL_PACKET_FILE) {
        local_file_came(pair, &packet->file, fds[0]);
        return;
    }
    if (packet->kind == LOCAL_PACKET_MEMORY) {
        local_memory_came(pair, &packet->memory, fds[0]);
        return;
    }
    if (packet->kind == LOCAL_PACKET_DETACH) {
        detach(pair, packet->segment.number);
    } else if (packet->kind == LOCAL_PACKET_FORGET) {
        local_memory_went(pair, &packet->memory);
    } else if (packet->kind == LOCAL_PACKET_HELLO) {
        local_pair_violation(pair, "a second HELLO");
    } else {
        attach(pair, &packet->segment, fds[0]);
    }
    for (unsigned i = 0; i < LOCAL_HELLO_DESCRIPTORS; i++)
        if (fds[i] >= 0) close(fds[i]);
}

bool local_pair_is_reading(const struct local_pair *pair)
{
    return tl_memory_reader_is_busy(pair->helpers[0]) || tl_memory_reader_is_busy(pair->helpers[1]);
}

unsigned local_pair_ask_helpers(struct local_pair *pair)
{
    unsigned count = 0;
    for (unsigned i = 0; i < LOCAL_HELPER_THREADS; i++) {
        int error;
        if (!tl_memory_reader_is_done(pair->helpers[i], &error)) continue;
        count++;
        if (pair->state == LOCAL_CALLING)
            local_proof_was_read(pair, error);
        else if (pair->reading.is_under_way)
            local_part_is_read(pair, error);
    }
    return count;
}

unsigned local_pair_read_packets(struct local_pair *pair)
{
    pair->packets.must_read = false;
    if (pair->state == LOCAL_CALLING) return local_read_accept_socket(pair);
    /* The epoll descriptor reports new packets only once, so that all of them are taken, up to a limit. */
    for (unsigned i = 0; i < PACKETS_PER_LOOK; i++) {
        union local_packet packet;
        int fds[LOCAL_HELLO_DESCRIPTORS];
        if (pair->state != LOCAL_CONNECTED) return i;
        switch (local_receive(pair->sockets.in, &packet, fds)) {
        case TL_UNIX_PACKET:
            handle_packet(pair, &packet, fds);
            break;
        case TL_UNIX_END:
            local_pair_break(pair, TL_UNAVAILABLE, "the peer has closed the connection, or its process has ended");
            return i + 1;
        case TL_UNIX_NOTHING:
            if (!local_peer_lives(pair)) local_pair_break(pair, TL_UNAVAILABLE, "the peer's process has ended");
            return i;
        case TL_UNIX_NO_DESCRIPTOR:
            local_pair_break(pair, TL_RESOURCE_EXHAUSTED, LOCAL_NO_DESCRIPTOR);
            return i + 1;
        default:
            local_pair_violation(pair, "a packet of an unknown kind or of the wrong size");
            return i + 1;
        }
    }
    pair->packets.must_read = true;
    pair->provider->must_look = true;
    return PACKETS_PER_LOOK;
}

/* --------------------------------------------------------------------------------------------------------- end -- */

void local_close_fd(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* Shuts a socket down, so that the peer notices at once that the connection has ended. A thread closes the descriptor,
 * with all descriptors that the peer may have left in it. */
static void hand_over(struct local_pair *pair, int *fd, struct local_leftovers *leftovers)
{
    if (*fd < 0) return;
    local_forget_descriptor(pair->provider, *fd);
    leftovers->fds[leftovers->fd_count++] = *fd;
    *fd = -1;
}

static void release(struct local_pair *pair)
{
    struct local_leftovers leftovers = {.ring = pair->rings.out,
                                        .mapped = pair->mappings.entries,
                                        .mapped_count = pair->mappings.count,
                                        .files = pair->files.peers,
                                        .memories = pair->memories.peers};
    if (pair->sockets.accept >= 0) local_accept_socket_remove_name(&pair->self);
    hand_over(pair, &pair->sockets.accept, &leftovers);
    hand_over(pair, &pair->sockets.in, &leftovers);
    hand_over(pair, &pair->sockets.out, &leftovers);
    hand_over(pair, &pair->sockets.wake_in, &leftovers);
    hand_over(pair, &pair->sockets.wake_out, &leftovers);
    local_drop(&leftovers);
    for (unsigned i = 0; i < LOCAL_HELPER_THREADS; i++) {
        tl_memory_reader_destroy(pair->helpers[i]);
        pair->helpers[i] = NULL;
    }
    local_close_fd(&pair->sockets.peers_end);
    local_close_fd(&pair->sockets.process);
    local_close_fd(&pair->sockets.ring);
    pair->rings.out.head = NULL;
    pair->mappings.entries = NULL;
    pair->mappings.count = pair->mappings.capacity = 0;
    pair->files.peers = NULL;
    pair->memories.peers = NULL;
    local_memories_fini(pair);
    free(pair->files.shared);
    pair->files.shared = NULL;
    free(pair->exposures.entries);
    pair->exposures.entries = NULL;
    pair->exposures.count = 0;
}

/* What the peer had posted before it could see that the ring is closed has arrived, and is taken, as much as a poll
 * takes. Returns whether something may be left. */
static bool has_taken_some(struct local_pair *pair)
{
    uint32_t first = pair->rings.in.next;
    if (!pair->has_connected) return false;
    tl_quota_renew(&pair->provider->base.quota);
    atomic_fetch_or_explicit(&pair->rings.in.head->state, LOCAL_STATE_CLOSED, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);
    if (!pair->is_distrusted) (void)local_take_slots(pair, LOCAL_SLOTS_PER_POLL, LOCAL_MESSAGES_PER_POLL);
    return local_complete(pair) > 0 || pair->rings.in.next != first;
}

void local_pair_end(struct local_pair *pair)
{
    if (has_taken_some(pair)) return; /* others have their turn before the rest */
    pair->state = LOCAL_DRAINING;
    pair->events.broken(pair->owner, &pair->reason);
    /* A peer that sleeps notices the end now, and not only when the last read is over. */
    if (pair->sockets.in >= 0) local_forget_descriptor(pair->provider, pair->sockets.in);
    if (pair->sockets.out >= 0) local_forget_descriptor(pair->provider, pair->sockets.out);
    (void)local_pair_drain(pair);
}

unsigned local_pair_drain(struct local_pair *pair)
{
    tl_quota_renew(&pair->provider->base.quota);
    if (!local_cancel_works(pair)) return 1;
    bool is_first_free = tl_memory_reader_try_to_take_back(pair->helpers[0]);
    if (!tl_memory_reader_try_to_take_back(pair->helpers[1]) || !is_first_free) return 0;
    pair->state = LOCAL_ENDED;
    release(pair);
    pair->events.drained(pair->owner);
    return 1;
}

void local_pair_destroy(struct tl_queue_pair *base)
{
    struct local_pair *pair = local_pair_of(base);
    struct local_provider *provider = pair->provider;
    TL_CHECK(pair->state == LOCAL_NEW || pair->state == LOCAL_ENDED);
    if (provider->cursor == &pair->link) provider->cursor = pair->link.next;
    tl_list_remove(&pair->link);
    provider->pair_count--;
    if (pair->state == LOCAL_NEW) release(pair);
    local_ring_unmap(&pair->rings.in);
    local_leave_regions(pair);
    free(pair->queue.works);
    free(pair);
}
