// SPDX-License-Identifier: Apache-2.0
/*
 * How a connection comes up: the address that each side sends over the control plane, and the handshake on the queue
 * pair.
 *
 * Happy path: the opener sends HELLO with the token that the other's address carried, and the other answers with its
 * own HELLO. Each writes the other's challenge into the other's probe, and checks that its own challenge has been
 * written right. Both send PROBED, and the connection is up. Before it writes the challenge each side measures how fast
 * it writes (measure.c); the opener does so first, so that the two do not disturb each other. A side that reads what it
 * receives then writes some bytes and reads them back.
 *
 * Failure modes: an address of another version or incarnation; no handshake in time, with how far it came; a HELLO with
 * a wrong token; a write or read that delivers wrong bytes; a read that fails, which says that writes work. Each of
 * them ends the connection with its reason.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/random.h"
#include "dataplane/engine/conn_internal.h"
#include "dataplane/memory/pages.h"

/* How many bytes are read back at most. */
#define READ_BYTES 4096

/* --------------------------------------------------------------------------------------------------- handshake -- */

static void handshake_timeout(struct tl_timer *timer)
{
    struct tl_conn *conn = TL_CONTAINER_OF(timer, struct tl_conn, handshake.timer);
    struct tl_error reason;
    handshake_explain(conn, NULL, &reason);
    tl_conn_close(conn, &reason);
}

static bool post_hello(struct pending_post *pending)
{
    struct tl_conn *conn = TL_CONTAINER_OF(pending, struct tl_conn, handshake.hello.post);
    struct conn_handshake *handshake = &conn->handshake;
    struct handshake_probe *probe = &handshake->probe;
    struct tl_error error;
    /* A peer that reads what it receives tries that here. */
    bool may_show = conn->pair->ops->expose_source != NULL && conn->engine->options.keys == TL_KEYS_WINDOW;
    enum tl_status status =
        may_show ? tl_queue_pair_expose_source(conn->pair, probe->region, probe->bytes, PROBE_BYTES, true,
                                               &probe->exposure, &error)
                 : tl_queue_pair_expose(conn->pair, probe->region, probe->bytes, PROBE_BYTES, &probe->exposure, &error);
    if (status != TL_OK) {
        tl_conn_close(conn, &error);
        return false;
    }
    struct tl_message *message = conn_compose(conn, TL_MESSAGE_HELLO, 0);
    message->version = TL_DATAPLANE_VERSION;
    message->incarnation = handshake->self_incarnation;
    message->token = handshake->keys.peer_token;
    message->challenge = handshake->keys.own_challenge;
    message->destination = probe->exposure.descriptor;
    conn_post_message(conn, message, &handshake->hello.work);
    return false;
}

static void hello_done(struct tl_work *work, enum tl_status status)
{
    struct tl_conn *conn = TL_CONTAINER_OF(work, struct tl_conn, handshake.hello.work);
    if (status == TL_OK) conn->handshake.hello.is_sent = true;
    conn_space_freed(conn);
}

/* Writes into the peer's probe, and reads it back. */
static bool post_read(struct pending_post *pending)
{
    struct tl_conn *conn = TL_CONTAINER_OF(pending, struct tl_conn, handshake.read.post);
    struct handshake_read *read = &conn->handshake.read;
    struct handshake_probe *probe = &conn->handshake.probe;
    uint8_t *source = probe->bytes + PROBE_BYTES;
    read->len_bytes = tl_min_u64(READ_BYTES, conn->engine->piece_bytes);
    for (uint64_t i = 0; i < read->len_bytes; i++)
        source[i] = (uint8_t)tl_random_u64();
    conn->pair->ops->write(conn->pair, probe->region, source, read->len_bytes, &probe->peer, 0, false, 0, NULL);
    conn->pair->ops->read(conn->pair, probe->region, source + READ_BYTES, read->len_bytes, &probe->peer, 0,
                          &read->work);
    read->is_posted = true;
    return false;
}

static void read_done(struct tl_work *work, enum tl_status status)
{
    struct tl_conn *conn = TL_CONTAINER_OF(work, struct tl_conn, handshake.read.work);
    struct handshake_read *read = &conn->handshake.read;
    const uint8_t *source = conn->handshake.probe.bytes + PROBE_BYTES;
    struct tl_error reason;
    if (status != TL_OK) return; /* the queue pair is broken, for the reason that follows */
    read->is_over = true;
    conn_space_freed(conn);
    if (memcmp(source, source + READ_BYTES, read->len_bytes) == 0) {
        conn_post_when_slot(conn, &conn->handshake.probe_post);
        return;
    }
    tl_error_set(&reason, TL_UNAVAILABLE, "%s: a read of its memory through %s has delivered wrong bytes",
                 conn->peer.name, conn->engine->provider->name);
    tl_conn_close(conn, &reason);
}

bool handshake_is_reading(const struct tl_conn *conn)
{
    return conn->handshake.read.is_posted && !conn->handshake.read.is_over;
}

/* Writes the peer's challenge into its probe. */
static bool post_probe(struct pending_post *pending)
{
    struct tl_conn *conn = TL_CONTAINER_OF(pending, struct tl_conn, handshake.probe_post);
    struct conn_handshake *handshake = &conn->handshake;
    struct handshake_probe *probe = &handshake->probe;
    uint8_t *source = probe->bytes + PROBE_BYTES;
    memcpy(source, &handshake->keys.peer_challenge, sizeof(handshake->keys.peer_challenge));
    conn_post_write(conn, probe->region, source, sizeof(handshake->keys.peer_challenge), &probe->peer, 0,
                    TL_IMMEDIATE_PROBE, &probe->write_work);
    return false;
}

static void free_probe(struct tl_conn *conn)
{
    struct handshake_probe *probe = &conn->handshake.probe;
    if (probe->block != NULL) {
        conn_block_destroy(conn->memory, &probe->block, &probe->pin);
    } else if (probe->region != NULL) {
        tl_region_destroy(probe->region);
        tl_pages_unmap(probe->bytes, 2 * (uint64_t)PROBE_BYTES);
    }
    probe->region = NULL;
    probe->bytes = NULL;
}

static void use_over(struct tl_conn *conn)
{
    if (--conn->handshake.probe.uses == 0) free_probe(conn);
    conn_space_freed(conn);
}

static void probe_done(struct tl_work *work, enum tl_status status)
{
    (void)status;
    use_over(TL_CONTAINER_OF(work, struct tl_conn, handshake.probe.write_work));
}

static void revoke_done(struct tl_work *work, enum tl_status status)
{
    /* A cancelled revoke is followed by the end of the queue pair, with which the window goes. */
    if (status == TL_OK) use_over(TL_CONTAINER_OF(work, struct tl_conn, handshake.probe.revoke_work));
}

static bool post_probed(struct pending_post *pending)
{
    struct tl_conn *conn = TL_CONTAINER_OF(pending, struct tl_conn, handshake.probed_post);
    conn_post_message(conn, conn_compose(conn, TL_MESSAGE_PROBED, 0), NULL);
    bool is_awaited = conn->engine->options.keys != TL_KEYS_REGION;
    conn->pair->ops->revoke(conn->pair, &conn->handshake.probe.exposure,
                            is_awaited ? &conn->handshake.probe.revoke_work : NULL);
    if (!is_awaited) use_over(conn);
    return false;
}

static void maybe_up(struct tl_conn *conn)
{
    struct conn_handshake *handshake = &conn->handshake;
    if (conn->state != CONN_HANDSHAKE || !handshake->is_peer_write_verified || !handshake->is_own_write_verified)
        return;
    tl_timers_disarm(tl_reactor_timers(conn->engine->reactor), &handshake->timer);
    conn->state = CONN_UP;
    handshake->measures.mtu_bytes = conn->pair->mtu_bytes;
    handshake->measures.outside_refusal = conn->pair->outside_refusal;
    uint32_t slot_count = conn->engine->options.slot_count;
    if (conn->credits.peer_slot_count > slot_count) slot_count = conn->credits.peer_slot_count;
    handshake->measures.most_unconfirmed = UNCONFIRMED_ROUNDS * slot_count * TL_SLOT_MESSAGES;
    if (conn->events->up != NULL) conn->events->up(conn);
    conn_pump_later(conn);
}

void handshake_hello(struct tl_conn *conn, const struct tl_message *message)
{
    struct conn_handshake *handshake = &conn->handshake;
    if (handshake->is_hello_verified) {
        conn_protocol_error(conn, "a second HELLO");
        return;
    }
    if (message->version != TL_DATAPLANE_VERSION || message->token != handshake->keys.own_token ||
        message->incarnation != conn->peer.incarnation) {
        struct tl_error reason;
        tl_error_set(&reason, TL_FAILED_PRECONDITION,
                     "%s: the HELLO does not have the token of the pair address that came over the link; has the peer "
                     "restarted?",
                     conn->peer.name);
        tl_conn_close(conn, &reason);
        return;
    }
    if (message->destination.len_bytes == 0) {
        conn_protocol_error(conn, "a HELLO without a descriptor of the probe");
        return;
    }
    handshake->is_hello_verified = true;
    handshake->keys.peer_challenge = message->challenge;
    handshake->probe.peer = message->destination;
    if (handshake->is_opener) {
        measure_start(conn);
    } else {
        conn_post_when_slot(conn, &handshake->hello.post);
    }
}

void handshake_measured(struct tl_conn *conn)
{
    if (requests_are_read(conn)) {
        conn_post_when_space(conn, &conn->handshake.read.post);
    } else {
        conn_post_when_slot(conn, &conn->handshake.probe_post);
    }
}

void handshake_probe(struct tl_conn *conn)
{
    struct conn_handshake *handshake = &conn->handshake;
    if (conn->state != CONN_HANDSHAKE || !handshake->is_hello_verified || handshake->is_peer_write_verified) {
        conn_protocol_error(conn, "an unexpected probe write");
    } else if (memcmp(handshake->probe.bytes, &handshake->keys.own_challenge, sizeof(handshake->keys.own_challenge)) !=
               0) {
        struct tl_error reason;
        tl_error_set(&reason, TL_UNAVAILABLE, "%s: its probe write through %s has delivered wrong bytes",
                     conn->peer.name, conn->engine->provider->name);
        tl_conn_close(conn, &reason);
    } else {
        handshake->is_peer_write_verified = true;
        conn_post_when_slot(conn, &handshake->probed_post);
        if (!handshake->is_opener) measure_start(conn);
        maybe_up(conn);
    }
}

void handshake_probed(struct tl_conn *conn)
{
    conn->handshake.is_own_write_verified = true;
    maybe_up(conn);
}

/* The probe lies in the pool, so that the reactor registers nothing. When the pool is full it gets memory of its own,
 * because a full pool must not keep peers apart. */
static enum tl_status create_probe(struct tl_conn *conn, struct tl_error *ret_error)
{
    struct handshake_probe *probe = &conn->handshake.probe;
    const uint64_t len_bytes = 2 * (uint64_t)PROBE_BYTES;
    if (conn_block_create(conn->memory, NULL, len_bytes, &probe->block, &probe->pin, ret_error) == TL_OK) {
        probe->region = probe->pin.region;
        probe->bytes = probe->pin.address;
        /* Bytes that other tensors left there must not reach the peer. */
        memset(probe->bytes, 0, len_bytes);
        return TL_OK;
    }
    enum tl_status status = tl_memory_region_map(conn->engine->memory, len_bytes, &probe->region, ret_error);
    if (status == TL_OK) probe->bytes = probe->region->address;
    return status;
}

enum tl_status handshake_init(struct tl_conn *conn, struct tl_error *ret_error)
{
    struct conn_handshake *handshake = &conn->handshake;
    struct handshake_probe *probe = &handshake->probe;
    struct tl_list *const places[] = {&handshake->hello.post.place, &handshake->read.post.place,
                                      &handshake->probe_post.place, &handshake->probed_post.place};
    for (size_t i = 0; i < TL_ARRAY_COUNT(places); i++)
        tl_list_init(places[i]);
    handshake->hello.post.post = post_hello;
    handshake->read.post.post = post_read;
    handshake->read.work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = read_done};
    handshake->probe_post.post = post_probe;
    handshake->probed_post.post = post_probed;
    handshake->timer.fire = handshake_timeout;
    handshake->keys.own_token = tl_random_u64();
    handshake->keys.own_challenge = tl_random_u64() | 1; /* never what the probe is cleared to */
    handshake->hello.work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = hello_done};
    probe->write_work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = probe_done};
    probe->revoke_work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = revoke_done};
    probe->uses = 2;
    measure_init(conn);
    return create_probe(conn, ret_error);
}

void handshake_fini(struct tl_conn *conn)
{
    free_probe(conn);
}

void handshake_start(struct tl_conn *conn)
{
    struct conn_handshake *handshake = &conn->handshake;
    conn_arm(conn, &handshake->timer, conn->engine->options.connect_ns);
    /* More messages will follow soon, so the reactor spins for a while before it sleeps. */
    handshake->is_counted_busy = true;
    tl_reactor_busy(conn->engine->reactor, 1);
    if (handshake->is_opener) conn_post_when_slot(conn, &handshake->hello.post);
}

/* ----------------------------------------------------------------------------------------------------- address -- */

#define ADDRESS_HEAD_BYTES 44
#define MAX_SLOT_BYTES 65536

static void put_number(uint8_t **place, uint64_t value, unsigned len_bytes)
{
    for (unsigned i = 0; i < len_bytes; i++)
        *(*place)++ = (uint8_t)(value >> (8 * i));
}

static uint64_t get_number(const uint8_t **place, unsigned len_bytes)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < len_bytes; i++)
        value |= (uint64_t) * (*place)++ << (8 * i);
    return value;
}

uint32_t tl_conn_get_address(const struct tl_conn *conn, uint8_t *ret_bytes)
{
    struct tl_pair_address pair;
    conn->pair->ops->get_address(conn->pair, &pair);
    uint8_t *place = ret_bytes;
    put_number(&place, TL_DATAPLANE_VERSION, 4);
    put_number(&place, conn->handshake.self_incarnation, 8);
    put_number(&place, conn->handshake.keys.own_token, 8);
    put_number(&place, conn->engine->options.slot_count, 4);
    put_number(&place, TL_SLOT_BYTES, 4);
    put_number(&place, conn->engine->options.inline_bytes, 4);
    put_number(&place, conn->engine->options.request_count, 4);
    put_number(&place, conn_key_limit(conn), 4);
    put_number(&place, pair.len_bytes, 4);
    _Static_assert(ADDRESS_HEAD_BYTES + TL_PAIR_ADDRESS_MAX_BYTES <= TL_CONN_ADDRESS_BYTES, "fits");
    memcpy(place, pair.bytes, pair.len_bytes);
    return ADDRESS_HEAD_BYTES + pair.len_bytes;
}

/* What the address of a peer says. */
struct pair_address {
    uint64_t token;
    uint32_t slot_count;
    uint32_t slot_bytes;
    uint32_t inline_bytes;
    uint32_t request_count;
    uint32_t key_count;
    struct tl_pair_address pair;
};

static enum tl_status read_address(const struct tl_identity *peer, const uint8_t *bytes, uint32_t len_bytes,
                                   struct pair_address *ret_address, struct tl_error *ret_error)
{
    const uint8_t *place = bytes;
    if (len_bytes < ADDRESS_HEAD_BYTES) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: a pair address of %u bytes", peer->name, len_bytes);
    }
    uint64_t version = get_number(&place, 4);
    if (version != TL_DATAPLANE_VERSION) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "%s speaks version %u of the data plane, this worker %d; run the same release on both",
                            peer->name, (unsigned)version, TL_DATAPLANE_VERSION);
    }
    uint64_t incarnation = get_number(&place, 8);
    if (incarnation != peer->incarnation) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "%s has restarted since it sent its pair address",
                            peer->name);
    }
    uint64_t token = get_number(&place, 8);
    uint64_t slot_count = get_number(&place, 4);
    uint64_t slot_bytes = get_number(&place, 4);
    uint64_t inline_bytes = get_number(&place, 4);
    uint64_t request_count = get_number(&place, 4);
    uint64_t key_count = get_number(&place, 4);
    uint64_t pair_bytes = get_number(&place, 4);
    bool is_sane = slot_count >= 16 && slot_count <= 65536 && slot_bytes >= TL_LEAST_SLOT_BYTES &&
                   slot_bytes <= MAX_SLOT_BYTES && inline_bytes <= slot_bytes - TL_INLINE_HEAD_BYTES &&
                   request_count > 0 && request_count <= TL_MAX_REQUESTS && pair_bytes <= TL_PAIR_ADDRESS_MAX_BYTES &&
                   pair_bytes == len_bytes - ADDRESS_HEAD_BYTES;
    if (!is_sane) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: a pair address of %u bytes with an invalid count or length", peer->name, len_bytes);
    }
    *ret_address = (struct pair_address){.token = token,
                                         .slot_count = (uint32_t)slot_count,
                                         .slot_bytes = (uint32_t)slot_bytes,
                                         .inline_bytes = (uint32_t)inline_bytes,
                                         .request_count = (uint32_t)request_count,
                                         .key_count = (uint32_t)key_count,
                                         .pair = {.len_bytes = (uint32_t)pair_bytes}};
    memcpy(ret_address->pair.bytes, place, (size_t)pair_bytes);
    return TL_OK;
}

enum tl_status tl_conn_check_address(const struct tl_provider *provider, const struct tl_identity *peer,
                                     const uint8_t *bytes, uint32_t len_bytes, struct tl_error *ret_error)
{
    struct pair_address theirs;
    enum tl_status status = read_address(peer, bytes, len_bytes, &theirs, ret_error);
    if (status != TL_OK || provider->ops->check == NULL) return status;
    return provider->ops->check(provider, &theirs.pair, ret_error);
}

enum tl_status handshake_address_received(struct tl_conn *conn, const uint8_t *bytes, uint32_t len_bytes,
                                          struct tl_pair_address *ret_pair, struct tl_error *ret_error)
{
    struct pair_address theirs;
    enum tl_status status = read_address(&conn->peer, bytes, len_bytes, &theirs, ret_error);
    if (status != TL_OK) return status;
    conn->handshake.keys.peer_token = theirs.token;
    conn->credits.peer_slot_count = theirs.slot_count;
    conn->credits.peer_slot_bytes = (uint32_t)tl_min_u64(theirs.slot_bytes, TL_SLOT_BYTES);
    conn->requests.capacity = theirs.request_count;
    conn_keys_agree(conn, theirs.key_count);
    conn->responses.inline_bytes = (uint32_t)tl_min_u64(theirs.inline_bytes, TL_INLINE_BYTES);
    *ret_pair = theirs.pair;
    return TL_OK;
}
