// SPDX-License-Identifier: Apache-2.0
/*
 * The life of a connection.
 *
 * Happy path: created with its queue pair and introduced over the control plane; connected with the peer's
 * address; greeted (handshake.c): up. Requests and responses take turns at posting; credits flow back with every
 * message. Drained with a GOODBYE, or closed.
 *
 * Failure modes: a handshake that is wrong or late, a message that cannot be, a peer that stays silent while something
 * is expected of it, a queue pair that fails: each disconnects the queue pair with a reason. When it is drained,
 * nothing can touch the memory of a request any more, and all of them are given back; that is the one place where a
 * connection ends. Until then data and statuses that had arrived still count: the peer has seen them arrive, and would
 * not send them again.
 *
 * Credits: a message or a write with an immediate uses one slot at the peer. Slots come back in two ways: by the count
 * of consumed slots in every message, and by an answer to a request, which shows that everything up to the request was
 * consumed; so a request and its write need no message more. The last slot is kept for a CREDIT that gives back half of
 * ours: if both sides have used all slots of each other, one of them has told that much meanwhile.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "dataplane/engine/conn_internal.h"

/* Posted at most by one turn: an expose and what it is for. */
#define SPACE_OF_A_POST 2

/* While something is expected of a peer: how late its silence is noticed at most, as a part of the limit. */
#define CHECKS_PER_PEER_TIMEOUT 16

/* How often a provider is polled that has not drained a queue pair: it gives up a card that does not hand back what was
 * posted, but a reactor that sleeps would not let it. */
#define DRAIN_LOOK_NS (250 * TL_NS_PER_MS)

static const struct tl_conn_events no_events;

/* ------------------------------------------------------------------------------------------------------- turns -- */

void conn_pump_later(struct tl_conn *conn)
{
    if (conn->is_pump_deferred) return;
    conn->is_pump_deferred = true;
    tl_reactor_defer(conn->engine->reactor, &conn->pump_closure);
}

void conn_post_when_ready(struct tl_conn *conn, struct pending_post *pending)
{
    if (conn->state == CONN_CLOSING || tl_list_is_linked(&pending->place)) return;
    tl_list_push_back(&conn->pending_posts, &pending->place);
    conn_pump_later(conn);
}

void conn_post_when_space(struct tl_conn *conn, struct pending_post *pending)
{
    if (conn->state == CONN_CLOSING || tl_list_is_linked(&pending->place)) return;
    tl_list_push_back(&conn->revokes, &pending->place);
    conn_pump_later(conn);
}

void conn_space_freed(struct tl_conn *conn)
{
    if (!tl_list_is_empty(&conn->pending_posts) || !tl_list_is_empty(&conn->revokes)) conn_pump_later(conn);
}

static void space_done(struct tl_work *work, enum tl_status status)
{
    struct tl_conn *conn = TL_CONTAINER_OF(work, struct tl_conn, space_work);
    (void)status;
    conn->is_space_work_out = false;
    conn_space_freed(conn);
}

static uint32_t credits(const struct tl_conn *conn)
{
    return conn->peer_slot_count - (conn->slots_used - conn->slots_returned);
}

static uint32_t space(const struct tl_conn *conn)
{
    return conn->pair->ops->space(conn->pair);
}

static void run_pending_posts(struct tl_conn *conn, struct tl_list *pending_posts, bool needs_credit)
{
    while (!tl_list_is_empty(pending_posts) && space(conn) >= SPACE_OF_A_POST && conn->state != CONN_CLOSING) {
        if (needs_credit && credits(conn) < 2) return;
        if (conn->posts_left_bytes == 0) return;
        struct pending_post *pending = TL_CONTAINER_OF(tl_list_pop_front(pending_posts), struct pending_post, place);
        if (pending->post(pending)) tl_list_push_back(pending_posts, &pending->place);
    }
}

static void maybe_tell_credits(struct tl_conn *conn)
{
    bool is_half = conn->consumed - conn->consumed_sent >= conn->engine->options.slot_count / 2;
    uint32_t needed = is_half ? 1 : 2;
    if (!is_half && !conn->is_credit_wanted) return;
    if (conn->state == CONN_CLOSING || credits(conn) < needed || space(conn) < 1) return;
    conn->is_credit_wanted = false;
    struct tl_message *message = conn_compose(conn, TL_MESSAGE_CREDIT, 0);
    message->is_ping = conn->is_ping_wanted;
    conn->is_ping_wanted = false;
    conn->engine->stats.credits_sent++;
    conn_post_message(conn, message, NULL);
}

static void maybe_tell(struct tl_conn *conn)
{
    if (!tl_list_is_empty(&conn->finished) || !tl_list_is_empty(&conn->refused)) requests_tell(conn);
}

static void pump(struct tl_closure *closure)
{
    struct tl_conn *conn = TL_CONTAINER_OF(closure, struct tl_conn, pump_closure);
    conn->posts_left_bytes = PUMP_BYTES;
    conn->completions_left_bytes = PUMP_BYTES;
    if (conn->state != CONN_NEW && conn->state != CONN_CLOSING) {
        maybe_tell(conn); /* who is told may ask again, with this doorbell */
        if (!tl_list_is_empty(&conn->waiting)) requests_begin(conn);
        if (!tl_list_is_empty(&conn->revokes)) run_pending_posts(conn, &conn->revokes, false);
        if (!tl_list_is_empty(&conn->pending_posts)) run_pending_posts(conn, &conn->pending_posts, true);
        maybe_tell_credits(conn);
        if (conn->state != CONN_CLOSING) tl_queue_pair_doorbell(conn->pair);
    }
    /* What was wanted so far has had its turn, or waits for something; what is from here on needs another pump. */
    conn->is_pump_deferred = false;
    if (conn->posts_left_bytes == 0) conn_pump_later(conn);
    maybe_tell(conn);
    requests_free_completed(conn);
    conn_something_over(conn);
}

/* ----------------------------------------------------------------------------------------------------- posting -- */

struct tl_message *conn_compose(struct tl_conn *conn, enum tl_message_type type, uint32_t handle)
{
    struct tl_message *message = &conn->engine->outgoing;
    tl_message_clear(message);
    message->type = type;
    message->handle = handle;
    return message;
}

void conn_post_message(struct tl_conn *conn, struct tl_message *message, struct tl_work *work)
{
    struct tl_engine *engine = conn->engine;
    message->consumed = conn->consumed;
    conn->consumed_sent = conn->consumed;
    uint32_t len_bytes = tl_message_encode(message, engine->slot);
    conn->slots_used++;
    engine->stats.messages_sent++;
    /* Somebody must notice when there is room again. */
    if (work == NULL && !conn->is_space_work_out && space(conn) < 2 * SPACE_OF_A_POST) {
        conn->is_space_work_out = true;
        work = &conn->space_work;
    }
    conn->pair->ops->message(conn->pair, engine->slot, len_bytes, work);
}

void conn_post_write(struct tl_conn *conn, const struct tl_region *region, const void *source, uint64_t len_bytes,
                     const struct tl_descriptor *destination, uint64_t offset_bytes, uint32_t immediate,
                     struct tl_work *work)
{
    conn->slots_used++;
    conn->engine->stats.writes_posted++;
    conn->engine->stats.bytes_sent += len_bytes;
    conn->pair->ops->write(conn->pair, region, source, len_bytes, destination, offset_bytes, true, immediate, work);
}

/* --------------------------------------------------------------------------------------------------------- end -- */

static void drain_look(struct tl_timer *timer)
{
    struct tl_conn *conn = TL_CONTAINER_OF(timer, struct tl_conn, drain_timer);
    if (!conn->is_drained) conn_arm(conn, timer, DRAIN_LOOK_NS);
}

static void begin_close(struct tl_conn *conn, const struct tl_error *reason)
{
    if (conn->state == CONN_CLOSING) return;
    bool was_connected = conn->state != CONN_NEW;
    conn->state = CONN_CLOSING;
    conn->close_reason = *reason;
    struct tl_timers *timers = tl_reactor_timers(conn->engine->reactor);
    tl_timers_disarm(timers, &conn->handshake_timer);
    tl_timers_disarm(timers, &conn->peer_timer);
    tl_timers_disarm(timers, &conn->reroute_timer);
    if (was_connected) {
        conn->pair->ops->disconnect(conn->pair, reason);
        conn_arm(conn, &conn->drain_timer, DRAIN_LOOK_NS);
    } else {
        conn->is_drained = true;
    }
    conn_pump_later(conn);
}

static void conn_free(struct tl_conn *conn)
{
    struct tl_engine *engine = conn->engine;
    struct tl_timers *timers = tl_reactor_timers(engine->reactor);
    tl_timers_disarm(timers, &conn->handshake_timer);
    tl_timers_disarm(timers, &conn->peer_timer);
    tl_timers_disarm(timers, &conn->drain_timer);
    tl_timers_disarm(timers, &conn->reroute_timer);
    if (conn->is_pump_deferred) tl_list_remove(&conn->pump_closure.link);
    if (conn->is_busy) tl_reactor_busy(engine->reactor, -1);
    if (conn->pair != NULL) conn->pair->ops->destroy(conn->pair);
    handshake_fini(conn);
    conn_memory_fini(conn);
    tl_meta_cache_destroy(conn->cache);
    tl_list_remove(&conn->engine_link);
    requests_fini(conn);
    responses_fini(conn);
    free(conn->responses);
    free(conn->requests);
    free(conn->generations);
    free(conn->free_indexes);
    free(conn);
}

static bool is_idle(const struct tl_conn *conn)
{
    return requests_are_over(conn) && responses_are_over(conn);
}

static void end(struct tl_closure *closure)
{
    struct tl_conn *conn = TL_CONTAINER_OF(closure, struct tl_conn, end_closure);
    conn->is_end_deferred = false;
    if (!is_idle(conn)) { /* a fetch has come since, and is refused first */
        conn_pump_later(conn);
        return;
    }
    if (conn->events->closed != NULL) conn->events->closed(conn, &conn->close_reason);
    conn_free(conn);
}

void conn_something_over(struct tl_conn *conn)
{
    if (conn->state == CONN_DRAINING && is_idle(conn) && !conn->is_goodbye_sent) {
        conn_post_when_ready(conn, &conn->goodbye_post);
    }
    if (conn->state != CONN_CLOSING || !conn->is_drained || conn->is_end_deferred) return;
    if (conn->held_count > 0 || !is_idle(conn)) return;
    conn->is_end_deferred = true;
    tl_reactor_defer(conn->engine->reactor, &conn->end_closure);
}

static void pair_broken(void *owner, const struct tl_error *reason)
{
    struct tl_conn *conn = owner;
    if (conn->state == CONN_CLOSING) return;
    if (conn->is_goodbye_sent) {
        struct tl_error done = {.code = TL_OK};
        begin_close(conn, &done);
        return;
    }
    conn->engine->stats.connections_broken++;
    struct tl_error end = *reason;
    /* Whoever may not connect need not try again. */
    bool is_refused = conn->state != CONN_UP && reason->code == TL_PERMISSION_DENIED;
    if (!is_refused) end.code = TL_UNAVAILABLE;
    tl_error_prefix(&end, "%s: ", conn->peer.name);
    begin_close(conn, &end);
}

static void pair_drained(void *owner)
{
    struct tl_conn *conn = owner;
    TL_CHECK(conn->state == CONN_CLOSING);
    conn->is_drained = true;
    requests_break(conn);
    responses_break(conn);
    conn_pump_later(conn);
}

void conn_protocol_error(struct tl_conn *conn, const char *format, ...)
{
    char what[768];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof(what), format, args);
    va_end(args);
    if (conn->state == CONN_CLOSING) return;
    conn->engine->stats.protocol_errors++;
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s broke the protocol of the data plane: %s", conn->peer.name, what);
    TL_LOG_AT_WARN("data connection ended", TL_STR("peer", conn->peer.name), TL_STR("reason", reason.message));
    begin_close(conn, &reason);
}

/* ----------------------------------------------------------------------------------------------------- silence -- */

void conn_arm(struct tl_conn *conn, struct tl_timer *timer, int64_t after_ns)
{
    if (tl_timers_arm(tl_reactor_timers(conn->engine->reactor), timer, tl_clock_deadline_ns(after_ns)) == TL_OK) return;
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "no memory to watch over %s", conn->peer.name);
    begin_close(conn, &reason);
}

void conn_watch(struct tl_conn *conn)
{
    if (conn->peer_timer.heap_place != 0 || !conn_is_open(conn)) return;
    conn->has_heard = false;
    conn->heard_ns = tl_clock_now_ns();
    conn_arm(conn, &conn->peer_timer, conn->engine->options.peer_timeout_ns / CHECKS_PER_PEER_TIMEOUT);
}

static void check_peer_timeout(struct tl_timer *timer)
{
    struct tl_conn *conn = TL_CONTAINER_OF(timer, struct tl_conn, peer_timer);
    if (!conn_is_open(conn) || is_idle(conn)) return;
    int64_t peer_timeout_ns = conn->engine->options.peer_timeout_ns;
    int64_t now_ns = tl_clock_now_ns();
    if (conn->has_heard) conn->heard_ns = now_ns;
    conn->has_heard = false;
    int64_t silent_ns = now_ns - conn->heard_ns;
    if (silent_ns >= peer_timeout_ns) {
        struct tl_error reason;
        tl_error_set(&reason, TL_UNAVAILABLE,
                     "%s has been silent for %lld ms while its answer was awaited; it is dead, stopped or cut off, or "
                     "nobody drives it",
                     conn->peer.name, (long long)(silent_ns / TL_NS_PER_MS));
        conn->engine->stats.connections_broken++;
        begin_close(conn, &reason);
        return;
    }
    if (silent_ns >= peer_timeout_ns / 4) {
        conn->is_ping_wanted = true;
        conn->is_credit_wanted = true;
        conn_pump_later(conn);
    }
    int64_t look_ns = peer_timeout_ns / CHECKS_PER_PEER_TIMEOUT;
    conn_arm(conn, &conn->peer_timer, look_ns < peer_timeout_ns - silent_ns ? look_ns : peer_timeout_ns - silent_ns);
}

/* ----------------------------------------------------------------------------------------------------- goodbye -- */

/* The peer has it: nothing else is to be said. */
static void goodbye_done(struct tl_work *work, enum tl_status status)
{
    struct tl_conn *conn = TL_CONTAINER_OF(work, struct tl_conn, goodbye_work);
    struct tl_error reason = {.code = TL_OK};
    if (status == TL_OK) begin_close(conn, &reason);
}

static bool post_goodbye(struct pending_post *pending)
{
    struct tl_conn *conn = TL_CONTAINER_OF(pending, struct tl_conn, goodbye_post);
    if (conn->is_goodbye_sent) return false;
    conn->is_goodbye_sent = true;
    conn->goodbye_work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = goodbye_done};
    conn_post_message(conn, conn_compose(conn, TL_MESSAGE_GOODBYE, 0), &conn->goodbye_work);
    return false;
}

/* ------------------------------------------------------------------------------------------------------ events -- */

/* A slot of ours was used, and is posted again before what we post now leaves. */
static void slot_used(struct tl_conn *conn)
{
    conn_heard(conn);
    conn->consumed++;
    conn_pump_later(conn);
}

/* The higher of what is known and what is told now; both lie behind what was used. */
static void slots_returned(struct tl_conn *conn, uint32_t upto)
{
    if (conn->slots_used - upto < conn->slots_used - conn->slots_returned) conn->slots_returned = upto;
}

void conn_shows(struct tl_conn *conn, uint32_t slot)
{
    slots_returned(conn, slot);
}

static void credits_received(struct tl_conn *conn, uint32_t consumed)
{
    if (conn->slots_used - consumed > conn->peer_slot_count) {
        conn_protocol_error(conn, "it has consumed %u messages of %u", consumed, conn->slots_used);
        return;
    }
    slots_returned(conn, consumed);
}

static void dispatch(struct tl_conn *conn, const struct tl_message *message)
{
    switch (message->type) {
    case TL_MESSAGE_HELLO:
        handshake_hello(conn, message);
        return;
    case TL_MESSAGE_PROBED:
        handshake_probed(conn);
        return;
    case TL_MESSAGE_CREDIT:
        if (message->is_ping) conn->is_credit_wanted = true;
        return;
    default:
        break;
    }
    if (!conn_is_open(conn)) {
        conn_protocol_error(conn, "%s before its hello", tl_message_name(message->type));
        return;
    }
    switch (message->type) {
    case TL_MESSAGE_META_DATA_UPDATE:
    case TL_MESSAGE_DONE:
    case TL_MESSAGE_ERROR_STATUS:
    case TL_MESSAGE_CANCELLED:
    case TL_MESSAGE_MAPPED:
        requests_message(conn, message);
        break;
    case TL_MESSAGE_REQUEST:
    case TL_MESSAGE_RE_REQUEST:
    case TL_MESSAGE_CANCEL:
        responses_message(conn, message);
        break;
    case TL_MESSAGE_GOODBYE: {
        struct tl_error reason = {.code = TL_OK};
        begin_close(conn, &reason);
        break;
    }
    default:
        break;
    }
}

/* What had arrived before we closed: the peer knows that it has, and takes its tensor for received. */
static void last_word(struct tl_conn *conn, const struct tl_message *message)
{
    if (message->type == TL_MESSAGE_DONE || message->type == TL_MESSAGE_ERROR_STATUS) requests_message(conn, message);
}

static void pair_message(void *owner, const void *data, uint32_t len_bytes)
{
    struct tl_conn *conn = owner;
    struct tl_engine *engine = conn->engine;
    /* Shared memory can change while it is looked at. */
    uint8_t copy[TL_SLOT_BYTES];
    uint32_t copy_bytes = len_bytes < sizeof(copy) ? len_bytes : (uint32_t)sizeof(copy);
    memcpy(copy, data, copy_bytes);
    slot_used(conn);
    engine->stats.messages_received++;
    struct tl_error error;
    if (tl_message_decode(copy, copy_bytes, &engine->incoming, &error) != TL_OK) {
        conn_protocol_error(conn, "%s", error.message);
        return;
    }
    if (conn->state == CONN_CLOSING) {
        last_word(conn, &engine->incoming);
        return;
    }
    credits_received(conn, engine->incoming.consumed);
    if (conn->state != CONN_CLOSING) dispatch(conn, &engine->incoming);
}

static void pair_immediate(void *owner, uint32_t immediate, uint64_t len_bytes)
{
    struct tl_conn *conn = owner;
    slot_used(conn);
    if (immediate == TL_IMMEDIATE_PROBE) {
        if (conn->state != CONN_CLOSING) handshake_probe(conn);
        return;
    }
    conn->engine->stats.bytes_received += len_bytes;
    if (!conn_is_open(conn) && conn->state != CONN_CLOSING) {
        conn_protocol_error(conn, "data before its hello");
        return;
    }
    requests_immediate(conn, immediate, len_bytes);
}

static const struct tl_queue_pair_events pair_events = {
    .message = pair_message, .immediate = pair_immediate, .broken = pair_broken, .drained = pair_drained};

/* ---------------------------------------------------------------------------------------------------- creating -- */

static enum tl_status create_tables(struct tl_conn *conn, struct tl_error *ret_error)
{
    uint32_t count = conn->engine->options.request_count;
    conn->requests = calloc(count, sizeof(struct request *));
    conn->generations = calloc(count, sizeof(*conn->generations));
    conn->free_indexes = calloc(count, sizeof(*conn->free_indexes));
    conn->response_places = 1;
    while (conn->response_places < count)
        conn->response_places *= 2;
    conn->responses = calloc(conn->response_places, sizeof(struct response *));
    if (conn->requests == NULL || conn->generations == NULL || conn->free_indexes == NULL || conn->responses == NULL) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a data connection");
    }
    conn->request_count = count;
    for (uint32_t i = 0; i < count; i++)
        conn->free_indexes[i] = (uint16_t)(count - 1 - i);
    conn->free_count = count;
    return tl_meta_cache_create(conn->engine->options.cache_count, &conn->cache, ret_error);
}

static void init_places(struct tl_conn *conn)
{
    struct tl_list *const lists[] = {&conn->engine_link,       &conn->pending_posts,    &conn->revokes,
                                     &conn->waiting,           &conn->finished,         &conn->refused,
                                     &conn->pump_closure.link, &conn->end_closure.link, &conn->goodbye_post.place,
                                     &conn->windows,           &conn->spare_requests,   &conn->completed};
    for (size_t i = 0; i < TL_ARRAY_COUNT(lists); i++)
        tl_list_init(lists[i]);
    conn->pump_closure.run = pump;
    conn->end_closure.run = end;
    conn->goodbye_post.post = post_goodbye;
    conn->space_work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = space_done};
    conn->peer_timer.fire = check_peer_timeout;
    conn->drain_timer.fire = drain_look;
    conn->reroute_timer.fire = requests_reroute;
}

enum tl_status tl_conn_create(struct tl_engine *engine, struct tl_memory *memory, const struct tl_identity *peer,
                              uint64_t self_incarnation, bool is_opener, const struct tl_conn_events *events,
                              void *owner, struct tl_conn **ret_conn, struct tl_error *ret_error)
{
    struct tl_conn *conn = calloc(1, sizeof(*conn));
    if (conn == NULL) {
        if (memory != NULL) tl_peer_memories_give(engine->peer_memories, memory);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a data connection");
    }
    conn->engine = engine;
    conn->events = events != NULL ? events : &no_events;
    conn->owner = owner;
    conn->peer = *peer;
    conn->self_incarnation = self_incarnation;
    conn->is_opener = is_opener;
    init_places(conn);
    conn_memory_init(conn, memory);
    tl_list_push_back(&engine->conns, &conn->engine_link);
    enum tl_status status = create_tables(conn, ret_error);
    if (status == TL_OK) status = handshake_init(conn, ret_error);
    if (status != TL_OK) goto fail;
    const struct tl_queue_pair_options options = {
        .slot_count = engine->options.slot_count,
        .work_count = engine->options.work_count,
        .keys = engine->options.keys,
        .peer = XXH3_64bits_withSeed(peer->name, strlen(peer->name), engine->name_seed)};
    status = tl_queue_pair_create(engine->provider, &options, &pair_events, conn, &conn->pair, ret_error);
    if (status != TL_OK) goto fail;
    *ret_conn = conn;
    return TL_OK;
fail:
    conn_free(conn);
    return status;
}

enum tl_status tl_conn_connect(struct tl_conn *conn, const uint8_t *bytes, uint32_t len_bytes,
                               struct tl_error *ret_error)
{
    /* The card may have broken the queue pair since it was introduced. */
    if (conn->state != CONN_NEW) {
        return tl_error_set(ret_error, TL_UNAVAILABLE,
                            "the connection has ended before the peer has sent its pair address");
    }
    struct tl_pair_address pair;
    enum tl_status status = handshake_address_received(conn, bytes, len_bytes, &pair, ret_error);
    if (status == TL_OK) status = conn->pair->ops->connect(conn->pair, &pair, ret_error);
    if (status != TL_OK) return status;
    conn->state = CONN_HANDSHAKE;
    handshake_start(conn);
    return TL_OK;
}

/* ------------------------------------------------------------------------------------------------------ public -- */

void *tl_conn_owner(const struct tl_conn *conn)
{
    return conn->owner;
}

const struct tl_conn_measures *tl_conn_measured(const struct tl_conn *conn)
{
    return &conn->measures;
}

bool tl_conn_is_up(const struct tl_conn *conn)
{
    return conn->state == CONN_UP;
}

void tl_conn_drain(struct tl_conn *conn)
{
    struct tl_error reason;
    if (conn->state == CONN_UP) {
        conn->state = CONN_DRAINING;
        conn_pump_later(conn);
    } else if (conn->state != CONN_DRAINING) {
        tl_error_set(&reason, TL_CANCELLED, "closed before the data connection was up");
        begin_close(conn, &reason);
    }
}

void tl_conn_close(struct tl_conn *conn, const struct tl_error *reason)
{
    begin_close(conn, reason);
}
