// SPDX-License-Identifier: Apache-2.0
/*
 * The life of a connection.
 *
 * Happy path: it is created with its queue pair, whose address the peer gets over the control plane. It is connected
 * with the peer's address, and is up when the handshake is over (handshake.c). Requests and responses are posted from
 * queues (conn_posts.c). It ends with a GOODBYE when it was drained, or is closed.
 *
 * Failure modes: a handshake that is wrong or late, a message that breaks the protocol, a peer from which nothing comes
 * while something is expected of it, a queue pair that fails. Each of them disconnects the queue pair with a reason.
 * When the queue pair is drained nothing can touch the memory of a request any more, and all requests end, some in each
 * round; a connection ends in no other way. Data and statuses that had arrived before still count: the peer knows that
 * they have arrived, and would not send them again.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/random.h"
#include "dataplane/engine/conn_internal.h"

/* The peer time-out is noticed late by at most this fraction of it. */
#define CHECKS_PER_PEER_TIMEOUT 16

/* How often a provider is polled that has not drained a queue pair. It gives up a card that does not complete what was
 * posted, and a reactor that sleeps would not poll it. */
#define DRAIN_POLL_NS (250 * TL_NS_PER_MS)

/* How many lists of responses there are at first; a power of two. */
#define FIRST_RESPONSE_PLACES 64

static const struct tl_conn_events no_events;

/* --------------------------------------------------------------------------------------------------------- end -- */

static void drain_poll(struct tl_timer *timer)
{
    struct tl_conn *conn = TL_CONTAINER_OF(timer, struct tl_conn, ending.drain_poll_timer);
    bool has_unplaced = conn->requests.unplaced_count > 0;
    if (!conn->ending.is_pair_drained || has_unplaced) conn_arm(conn, timer, DRAIN_POLL_NS);
    if (has_unplaced) conn_pump_later(conn); /* there may be memory now */
}

static void begin_close(struct tl_conn *conn, const struct tl_error *reason)
{
    if (conn->state == CONN_CLOSING) return;
    bool was_connected = conn->state != CONN_NEW;
    conn_post_batch(conn); /* what waits for its messages hears of their end from the queue pair */
    conn->state = CONN_CLOSING;
    conn->ending.reason = *reason;
    struct tl_timers *timers = tl_reactor_timers(conn->engine->reactor);
    tl_timers_disarm(timers, &conn->handshake.timer);
    tl_timers_disarm(timers, &conn->peer_timeout.timer);
    if (was_connected) {
        conn->pair->ops->disconnect(conn->pair, reason);
        conn_arm(conn, &conn->ending.drain_poll_timer, DRAIN_POLL_NS);
    } else {
        conn->ending.is_pair_drained = true;
    }
    conn_pump_later(conn);
}

static void conn_free(struct tl_conn *conn)
{
    struct tl_engine *engine = conn->engine;
    struct tl_timers *timers = tl_reactor_timers(engine->reactor);
    tl_timers_disarm(timers, &conn->handshake.timer);
    tl_timers_disarm(timers, &conn->peer_timeout.timer);
    tl_timers_disarm(timers, &conn->ending.drain_poll_timer);
    if (conn->posts.is_pump_queued) tl_list_remove(&conn->posts.pump_closure.link);
    if (conn->handshake.is_counted_busy) tl_reactor_busy(engine->reactor, -1);
    if (conn->pair != NULL) conn->pair->ops->destroy(conn->pair);
    handshake_fini(conn);
    conn_memory_fini(conn);
    tl_asked_keys_fini(&conn->requests.keys);
    tl_numbered_keys_fini(&conn->responses.keys);
    tl_list_remove(&conn->engine_link);
    conn_imports_fini(conn);
    conn_lent_copies_fini(conn);
    free(conn->responses.by_handle);
    free(conn->requests.handles);
    free(conn);
}

static bool is_idle(const struct tl_conn *conn)
{
    return requests_are_over(conn) && responses_are_over(conn);
}

static void end(struct tl_closure *closure)
{
    struct tl_conn *conn = TL_CONTAINER_OF(closure, struct tl_conn, ending.closure);
    conn->ending.is_end_queued = false;
    if (!is_idle(conn)) { /* a fetch has come since; it is refused first */
        conn_pump_later(conn);
        return;
    }
    if (conn->events->closed != NULL) conn->events->closed(conn, &conn->ending.reason);
    conn_free(conn);
}

void conn_check_idle(struct tl_conn *conn)
{
    if (conn->state == CONN_DRAINING && is_idle(conn) && !conn->ending.is_goodbye_sent) {
        conn_post_when_slot(conn, &conn->ending.goodbye_post);
    }
    if (conn->state != CONN_CLOSING || !conn->ending.is_pair_drained || conn->ending.is_end_queued) return;
    if (conn->ending.is_breaking || conn->ending.held_count > 0 || !is_idle(conn)) return;
    conn->ending.is_end_queued = true;
    tl_reactor_defer(conn->engine->reactor, &conn->ending.closure);
}

static void pair_broken(void *owner, const struct tl_error *reason)
{
    struct tl_conn *conn = owner;
    if (conn->state == CONN_CLOSING) return;
    if (conn->ending.is_goodbye_sent) {
        struct tl_error done = {.code = TL_OK};
        begin_close(conn, &done);
        return;
    }
    conn->engine->stats.connections_broken++;
    struct tl_error end = *reason;
    /* A peer that may not connect need not try again. */
    bool is_refused = conn->state != CONN_UP && reason->code == TL_PERMISSION_DENIED;
    if (!is_refused) end.code = TL_UNAVAILABLE;
    tl_error_prefix(&end, "%s: ", conn->peer.name);
    if (conn->state == CONN_HANDSHAKE && (reason->code == TL_DEADLINE_EXCEEDED || handshake_is_reading(conn))) {
        handshake_explain(conn, reason, &end);
        end.code = TL_UNAVAILABLE;
    }
    begin_close(conn, &end);
}

static void pair_drained(void *owner)
{
    struct tl_conn *conn = owner;
    TL_CHECK(conn->state == CONN_CLOSING);
    conn->ending.is_pair_drained = conn->ending.is_breaking = true;
    conn_pump_later(conn);
}

void conn_break_open(struct tl_conn *conn)
{
    conn->ending.is_breaking = !requests_break(conn) || !responses_break(conn);
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

/* ------------------------------------------------------------------------------------------------ peer time-out -- */

void conn_arm(struct tl_conn *conn, struct tl_timer *timer, int64_t after_ns)
{
    if (tl_timers_arm(tl_reactor_timers(conn->engine->reactor), timer, tl_clock_deadline_ns(after_ns)) == TL_OK) return;
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "no memory for a timer of the data connection to %s", conn->peer.name);
    begin_close(conn, &reason);
}

void conn_watch(struct tl_conn *conn)
{
    if (conn->peer_timeout.timer.heap_place != 0 || !conn_is_open(conn)) return;
    conn->peer_timeout.is_peer_seen = false;
    conn->peer_timeout.last_seen_ns = tl_clock_now_ns();
    conn_arm(conn, &conn->peer_timeout.timer, conn->engine->options.peer_timeout_ns / CHECKS_PER_PEER_TIMEOUT);
}

static void check_peer_timeout(struct tl_timer *timer)
{
    struct tl_conn *conn = TL_CONTAINER_OF(timer, struct tl_conn, peer_timeout.timer);
    if (!conn_is_open(conn) || is_idle(conn)) return;
    if (conn->requests.unplaced_count > 0) conn_pump_later(conn); /* there may be memory now */
    int64_t peer_timeout_ns = conn->engine->options.peer_timeout_ns;
    int64_t now_ns = tl_clock_now_ns();
    if (conn->peer_timeout.is_peer_seen) conn->peer_timeout.last_seen_ns = now_ns;
    conn->peer_timeout.is_peer_seen = false;
    int64_t silent_ns = now_ns - conn->peer_timeout.last_seen_ns;
    if (silent_ns >= peer_timeout_ns) {
        struct tl_error reason;
        tl_error_set(&reason, TL_UNAVAILABLE,
                     "%s has been silent for %lld ms while its answer was awaited; it is dead, stopped or cut off, or "
                     "its program does not drive it",
                     conn->peer.name, (long long)(silent_ns / TL_NS_PER_MS));
        conn->engine->stats.connections_broken++;
        begin_close(conn, &reason);
        return;
    }
    if (silent_ns >= peer_timeout_ns / 4) {
        conn->credits.is_ping_wanted = true;
        conn->credits.is_wanted = true;
        conn_pump_later(conn);
    }
    int64_t look_ns = peer_timeout_ns / CHECKS_PER_PEER_TIMEOUT;
    conn_arm(conn, &conn->peer_timeout.timer,
             look_ns < peer_timeout_ns - silent_ns ? look_ns : peer_timeout_ns - silent_ns);
}

/* ----------------------------------------------------------------------------------------------------- goodbye -- */

/* The peer has our GOODBYE: the connection closes. */
static void goodbye_done(struct tl_work *work, enum tl_status status)
{
    struct tl_conn *conn = TL_CONTAINER_OF(work, struct tl_conn, ending.goodbye_work);
    struct tl_error reason = {.code = TL_OK};
    if (status == TL_OK) begin_close(conn, &reason);
}

static bool post_goodbye(struct pending_post *pending)
{
    struct tl_conn *conn = TL_CONTAINER_OF(pending, struct tl_conn, ending.goodbye_post);
    if (conn->ending.is_goodbye_sent) return false;
    conn->ending.is_goodbye_sent = true;
    conn->ending.goodbye_work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = goodbye_done};
    conn_post_message(conn, conn_compose(conn, TL_MESSAGE_GOODBYE, 0), &conn->ending.goodbye_work);
    return false;
}

/* ------------------------------------------------------------------------------------------------------ events -- */

/* The peer has used a slot of ours. The provider posts it again before what we post now leaves. */
static void slot_used(struct tl_conn *conn)
{
    conn_peer_seen(conn);
    conn->credits.own_slots_returned++;
    conn_pump_later(conn);
}

static void credits_received(struct tl_conn *conn, uint32_t consumed)
{
    struct conn_credits *credits = &conn->credits;
    if (credits->peer_slots_used - consumed > credits->peer_slot_count) {
        conn_protocol_error(conn, "it reports %u consumed messages, but %u were sent", consumed,
                            credits->peer_slots_used);
        return;
    }
    credits_returned(credits, consumed);
}

static void dispatch(struct tl_conn *conn, struct tl_message *message)
{
    switch (message->type) {
    case TL_MESSAGE_HELLO:
        handshake_hello(conn, message);
        return;
    case TL_MESSAGE_PROBED:
        handshake_probed(conn);
        return;
    case TL_MESSAGE_CREDIT:
        if (message->is_ping) conn->credits.is_wanted = true;
        return;
    default:
        break;
    }
    if (!conn_is_open(conn)) {
        conn_protocol_error(conn, "%s before the handshake was over", tl_message_name(message->type));
        return;
    }
    switch (message->type) {
    case TL_MESSAGE_META_DATA_UPDATE:
    case TL_MESSAGE_DONE:
    case TL_MESSAGE_ERROR_STATUS:
    case TL_MESSAGE_CANCELLED:
    case TL_MESSAGE_MAPPED:
    case TL_MESSAGE_SOURCE:
        requests_message(conn, message);
        break;
    case TL_MESSAGE_REQUEST:
    case TL_MESSAGE_RE_REQUEST:
    case TL_MESSAGE_CANCEL:
    case TL_MESSAGE_COPIED:
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

/* Handles an outcome that had arrived before we closed: the peer knows that it has, and takes the tensor for received.
 */
static void last_word(struct tl_conn *conn, const struct tl_message *message)
{
    if (message->type == TL_MESSAGE_DONE || message->type == TL_MESSAGE_ERROR_STATUS) requests_message(conn, message);
}

static void pair_message(void *owner, const void *data, uint32_t len_bytes)
{
    struct tl_conn *conn = owner;
    struct tl_engine *engine = conn->engine;
    uint8_t copy[TL_SLOT_BYTES];
    uint32_t copy_bytes = len_bytes < sizeof(copy) ? len_bytes : (uint32_t)sizeof(copy);
    tl_batch_copy(copy, data, copy_bytes);
    slot_used(conn);
    struct tl_batch batch;
    struct tl_error error;
    const uint8_t *bytes;
    uint32_t message_bytes;
    enum tl_status status = tl_batch_decode_head(copy, copy_bytes, &batch, &error);
    if (status == TL_OK && conn->state != CONN_CLOSING) credits_received(conn, batch.consumed);
    engine->stats.slots_received++;
    if (status == TL_OK && tl_batch_has_many(&batch)) {
        conn_prefetch_requests(conn, &batch);
        requests_prefetch(conn, &batch);
    }
    uint32_t count = 0;
    while (status == TL_OK && tl_batch_next(&batch, &bytes, &message_bytes)) {
        if (++count > TL_SLOT_MESSAGES) {
            conn_protocol_error(conn, "more than %d messages in one slot", TL_SLOT_MESSAGES);
            break;
        }
        engine->stats.messages_received++;
        engine->incoming.bytes = (const uint8_t *)data + (bytes - copy);
        engine->incoming.len_bytes = message_bytes;
        status = tl_message_decode(bytes, message_bytes, &engine->incoming.message, &error);
        if (status == TL_OK && engine->incoming.message.is_inline && message_bytes > TL_STAYING_BYTES)
            engine->incoming.message.data = engine->incoming.bytes + (engine->incoming.message.data - bytes);
        if (status == TL_OK && conn->state == CONN_CLOSING) {
            last_word(conn, &engine->incoming.message);
        } else if (status == TL_OK) {
            dispatch(conn, &engine->incoming.message);
        }
    }
    if (status != TL_OK) conn_protocol_error(conn, "%s", error.message);
    tl_quota_use(&engine->provider->quota, count);
}

static void pair_immediate(void *owner, uint32_t immediate, uint64_t len_bytes)
{
    struct tl_conn *conn = owner;
    slot_used(conn);
    tl_quota_use(&conn->engine->provider->quota, 1);
    if (immediate == TL_IMMEDIATE_PROBE) {
        if (conn->state != CONN_CLOSING) handshake_probe(conn);
        return;
    }
    conn->engine->stats.bytes_received += len_bytes;
    if (!conn_is_open(conn) && conn->state != CONN_CLOSING) {
        conn_protocol_error(conn, "data before the handshake was over");
        return;
    }
    if (len_bytes == 0) {
        responses_released(conn, immediate);
        return;
    }
    requests_immediate(conn, immediate, len_bytes);
}

static void pair_memory_gone(void *owner, uint64_t number)
{
    conn_imports_gone(owner, number);
}

static const struct tl_queue_pair_events pair_events = {.message = pair_message,
                                                        .immediate = pair_immediate,
                                                        .broken = pair_broken,
                                                        .memory_gone = pair_memory_gone,
                                                        .drained = pair_drained};

/* ---------------------------------------------------------------------------------------------------- creating -- */

static enum tl_status create_tables(struct tl_conn *conn, struct tl_error *ret_error)
{
    struct conn_responses *responses = &conn->responses;
    responses->place_count = FIRST_RESPONSE_PLACES;
    responses->seed = tl_random_u64();
    responses->by_handle = calloc(responses->place_count, sizeof(struct response *));
    if (responses->by_handle == NULL)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a data connection");
    return TL_OK;
}

static void init_places(struct tl_conn *conn)
{
    struct conn_requests *requests = &conn->requests;
    struct conn_ending *ending = &conn->ending;
    struct tl_list *const lists[] = {&conn->engine_link,
                                     &requests->waiting,
                                     &requests->finished,
                                     &requests->unrequested,
                                     &requests->completed,
                                     &requests->unplaced,
                                     &ending->closure.link,
                                     &ending->goodbye_post.place,
                                     &conn->requests.placing.imports,
                                     &conn->responses.idle_copies,
                                     &conn->responses.awaiting_copies,
                                     &requests->placing.awaiting_laps};
    for (size_t i = 0; i < TL_ARRAY_COUNT(lists); i++)
        tl_list_init(lists[i]);
    conn_posts_init(conn);
    ending->closure.run = end;
    ending->goodbye_post.post = post_goodbye;
    ending->drain_poll_timer.fire = drain_poll;
    conn->peer_timeout.timer.fire = check_peer_timeout;
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
    conn->handshake.self_incarnation = self_incarnation;
    conn->handshake.is_opener = is_opener;
    init_places(conn);
    conn_memory_init(conn, memory);
    tl_list_push_back(&engine->conns, &conn->engine_link);
    enum tl_status status = create_tables(conn, ret_error);
    if (status == TL_OK) status = handshake_init(conn, ret_error);
    if (status != TL_OK) goto fail;
    const struct tl_queue_pair_options options = {.slot_count = engine->options.slot_count,
                                                  .work_count = engine->options.work_count,
                                                  .keys = engine->options.keys};
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
    /* The card may have broken the queue pair since the peer got its address. */
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
    return &conn->handshake.measures;
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
