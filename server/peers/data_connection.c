// SPDX-License-Identifier: Apache-2.0
#include "server/peers/data_connection.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/random.h"
#include "base/reason.h"
#include "control/endpoint.h"
#include "server/peers/session.h"
#include "server/worker_internal.h"

#define FIRST_PAUSE_NS (100 * TL_NS_PER_MS)
#define MAX_PAUSE_NS (5 * TL_NS_PER_SEC)
/* A connection that breaks before it is that old counts as an attempt that failed: one that is set up again and again
 * costs both sides more than it carries. */
#define SETTLED_NS (5 * TL_NS_PER_SEC)

static const struct tl_session_events session_events;

/* What the peer is told when a path ends without a failure. */
#define IT_SHUTS_DOWN "it is shutting down"
#define IT_CLOSED_IN_ORDER "its half was closed in order"

/* ---------------------------------------------------------------------------------------------------- messages -- */

static const char *transport_of(const struct tl_data_connection *connection)
{
    return connection->slot->source->name;
}

static void tell(struct tl_data_connection *connection, enum tl_connection_message_kind kind, const uint8_t *bytes,
                 uint32_t len_bytes)
{
    struct tl_connection_message message = {.kind = kind, .attempt = connection->attempt, .len_bytes = len_bytes};
    snprintf(message.transport, sizeof(message.transport), "%s", transport_of(connection));
    memcpy(message.bytes, bytes, len_bytes);
    tl_link_send_connection_message(connection->link, &message);
}

static void tell_refusal(struct tl_link *link, const char *transport, uint64_t attempt, bool is_final,
                         const char *reason)
{
    struct tl_connection_message message = {
        .kind = TL_CONNECTION_MESSAGE_REFUSAL, .attempt = attempt, .is_final = is_final};
    snprintf(message.transport, sizeof(message.transport), "%s", transport);
    snprintf(message.reason, sizeof(message.reason), "%s", reason);
    tl_link_send_connection_message(link, &message);
}

/* ------------------------------------------------------------------------------------------------------- state -- */

static void log_change(struct tl_data_connection *connection)
{
    if (connection->name[0] == '\0' ||
        (connection->has_logged && tl_reason_is_same(connection->logged, connection->reason)))
        return;
    const struct tl_transport *transport = connection->slot->transport;
    connection->has_logged = true;
    memcpy(connection->logged, connection->reason, sizeof(connection->logged));
    if (connection->state == TL_DATA_CONNECTION_UP) {
        TL_LOG_AT_INFO("data connection up", TL_STR("peer", connection->name),
                       TL_STR("transport", transport_of(connection)), TL_STR("device", transport->provider->name));
    } else if (transport == NULL || connection->is_elsewhere) {
        TL_LOG_AT_DEBUG("no data connection", TL_STR("peer", connection->name),
                        TL_STR("transport", transport_of(connection)), TL_STR("reason", connection->reason));
    } else if (!connection->worker->is_closing) {
        TL_LOG(connection->is_left ? TL_LOG_INFO : TL_LOG_WARN, "no data connection", TL_STR("peer", connection->name),
               TL_STR("transport", transport_of(connection)), TL_STR("reason", connection->reason));
    }
}

__attribute__((format(printf, 2, 3))) static void set_reason(struct tl_data_connection *connection, const char *format,
                                                             ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(connection->reason, sizeof(connection->reason), format, args);
    va_end(args);
    connection->lasting_reason = tl_reason(connection->reason);
}

static void arm(struct tl_data_connection *connection, int64_t after_ns)
{
    int64_t due_ns = tl_clock_deadline_ns(after_ns);
    if (tl_timers_arm(tl_loop_timers(connection->worker->loop), &connection->timer, due_ns) != TL_OK) {
        TL_LOG_AT_ERROR("no memory to watch a data connection", TL_STR("peer", connection->name));
    }
}

static void disarm(struct tl_data_connection *connection)
{
    tl_timers_disarm(tl_loop_timers(connection->worker->loop), &connection->timer);
}

/* The session is the path's no more. */
static void let_go(struct tl_data_connection *connection)
{
    const uint64_t *numbers;
    size_t count = tl_session_unconfirmed(connection->session, &numbers);
    if (count > 0 && connection->events->unconfirmed != NULL) {
        connection->events->unconfirmed(connection->owner, tl_session_peer(connection->session)->incarnation, numbers,
                                        count);
    }
    connection->session = NULL;
}

static void abandon(struct tl_data_connection *connection, const struct tl_error *reason)
{
    struct tl_session *session = connection->session;
    if (session == NULL) return;
    let_go(connection);
    tl_session_abandon(session, reason);
}

static void pause_before_offer(struct tl_data_connection *connection)
{
    unsigned shift = connection->failure_count < 6 ? connection->failure_count : 6;
    int64_t pause_ns = FIRST_PAUSE_NS << shift;
    if (pause_ns > MAX_PAUSE_NS) pause_ns = MAX_PAUSE_NS;
    connection->state = TL_DATA_CONNECTION_BACK_OFF;
    connection->failure_count++;
    arm(connection, pause_ns / 2 + (int64_t)(tl_random_u64() % (uint64_t)(pause_ns / 2)));
}

static void expect_offer(struct tl_data_connection *connection)
{
    connection->state = TL_DATA_CONNECTION_EXPECTING;
    set_reason(connection, "the data connection is being set up");
    arm(connection, connection->slot->transport->options.attempt_ns);
}

/* The attempt, or the connection, is over; path->reason says why. */
static void failed(struct tl_data_connection *connection, bool is_final)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s", connection->reason);
    abandon(connection, &reason);
    disarm(connection);
    if (connection->is_passing && connection->state != TL_DATA_CONNECTION_EXPECTING && !is_final &&
        !connection->worker->is_closing) {
        /* The peer goes over to the other link first, and ends its half without a word: nothing is wrong then, and
         * who waits for the path still does. Where it has not, it offers again, and the next failure counts. */
        connection->is_passing = false;
        TL_LOG_AT_DEBUG("a data connection has ended, perhaps for that of another link",
                        TL_STR("peer", connection->name), TL_STR("transport", transport_of(connection)),
                        TL_STR("reason", connection->reason));
        expect_offer(connection);
        connection->events->changed(connection->owner);
        return;
    }
    if (connection->state == TL_DATA_CONNECTION_UP && tl_clock_now_ns() - connection->up_since_ns >= SETTLED_NS)
        connection->failure_count = 0;
    connection->is_first = false;
    if (is_final || connection->worker->is_closing) {
        connection->state = TL_DATA_CONNECTION_REFUSED;
    } else if (tl_link_is_ours(connection->link)) {
        pause_before_offer(connection);
    } else {
        connection->state = TL_DATA_CONNECTION_EXPECTING;
    }
    log_change(connection);
    connection->events->changed(connection->owner);
}

static void offer(struct tl_data_connection *connection)
{
    struct tl_error error;
    connection->attempt = tl_random_u64();
    connection->state = TL_DATA_CONNECTION_CREATING;
    connection->is_left = false;
    if (connection->is_first) set_reason(connection, "the data connection is being set up");
    arm(connection, connection->slot->transport->options.attempt_ns);
    if (tl_session_open(connection->slot->transport, tl_link_peer(connection->link), NULL, 0, &session_events,
                        connection, &connection->session, &error) != TL_OK) {
        set_reason(connection, "%s", error.message);
        failed(connection, false);
    }
}

static void timer_fired(struct tl_timer *timer)
{
    struct tl_data_connection *connection = TL_CONTAINER_OF(timer, struct tl_data_connection, timer);
    if (connection->state == TL_DATA_CONNECTION_BACK_OFF && connection->worker->is_closing) {
        /* The data plane may have ended already. */
        connection->state = TL_DATA_CONNECTION_REFUSED;
        set_reason(connection, "this worker is shutting down");
    } else if (connection->state == TL_DATA_CONNECTION_BACK_OFF) {
        offer(connection);
    } else if (connection->state == TL_DATA_CONNECTION_EXPECTING) {
        set_reason(connection, "%s has offered no data connection in time", connection->name);
        failed(connection, false);
    } else {
        set_reason(connection, "the data connection to %s was not set up in time", connection->name);
        tell_refusal(connection->link, transport_of(connection), connection->attempt, false, "not set up in time");
        failed(connection, false);
    }
}

/* ----------------------------------------------------------------------------------------------------- session -- */

static void address_ready(void *owner, const uint8_t *bytes, uint32_t len_bytes)
{
    struct tl_data_connection *connection = owner;
    bool is_ours = tl_link_is_ours(connection->link);
    tell(connection, is_ours ? TL_CONNECTION_MESSAGE_OFFER : TL_CONNECTION_MESSAGE_ANSWER, bytes, len_bytes);
    connection->state = is_ours ? TL_DATA_CONNECTION_OFFERED : TL_DATA_CONNECTION_CONNECTING;
}

static void session_up(void *owner)
{
    struct tl_data_connection *connection = owner;
    disarm(connection);
    connection->state = TL_DATA_CONNECTION_UP;
    connection->up_since_ns = tl_clock_now_ns();
    set_reason(connection, "%s", "");
    log_change(connection);
    connection->events->changed(connection->owner);
}

/* Two that do not fit, or whose users may not connect, will not while they run. */
static bool is_lasting(enum tl_status code)
{
    return code == TL_FAILED_PRECONDITION || code == TL_PERMISSION_DENIED;
}

static void session_closed(void *owner, const struct tl_error *reason)
{
    struct tl_data_connection *connection = owner;
    bool was_up = connection->state == TL_DATA_CONNECTION_UP;
    let_go(connection);
    connection->is_left = reason->code == TL_OK;
    if (connection->is_left) {
        set_reason(connection, "%s has closed the data connection", connection->name);
    } else {
        set_reason(connection, "%s%s", was_up ? "the data connection broke: " : "", reason->message);
    }
    /* The peer's half may not notice for long. */
    const char *message_text = !connection->is_left             ? reason->message
                               : connection->worker->is_closing ? IT_SHUTS_DOWN
                                                                : IT_CLOSED_IN_ORDER;
    bool is_final = !was_up && is_lasting(reason->code);
    tell_refusal(connection->link, transport_of(connection), connection->attempt, is_final, message_text);
    failed(connection, is_final);
}

static const struct tl_session_events session_events = {
    .address_ready = address_ready, .up = session_up, .closed = session_closed};

/* ----------------------------------------------------------------------------------------------- what is heard -- */

static void take_offer(struct tl_data_connection *connection, const struct tl_connection_message *message)
{
    struct tl_error error;
    connection->attempt = message->attempt;
    connection->state = TL_DATA_CONNECTION_CREATING;
    connection->is_left = false;
    arm(connection, connection->slot->transport->options.attempt_ns);
    if (tl_session_open(connection->slot->transport, tl_link_peer(connection->link), message->bytes, message->len_bytes,
                        &session_events, connection, &connection->session, &error) == TL_OK) {
        return;
    }
    set_reason(connection, "%s", error.message);
    tell_refusal(connection->link, message->transport, message->attempt, is_lasting(error.code), error.message);
    failed(connection, is_lasting(error.code));
}

static void hear_offer(struct tl_data_connection *connection, const struct tl_connection_message *message)
{
    struct tl_link *link = connection->link;
    const char *transport = message->transport;
    if (connection->slot->transport == NULL || connection->is_elsewhere) {
        tell_refusal(link, transport, message->attempt, true, connection->reason);
    } else if (connection->worker->is_closing) {
        /* The link is about to end, and with it the attempt: a refusal would only fail what can still wait. */
    } else if (tl_link_is_ours(link) || message->attempt == 0) {
        tell_refusal(link, transport, message->attempt, false, "offers come from the side that opened the link");
    } else if (connection->session != NULL) {
        /* The peer has given up the attempt before this one without a word. It may offer again when that is gone. */
        tell_refusal(link, transport, message->attempt, false, "the attempt before this one has not ended yet");
        set_reason(connection, "%s has offered another data connection", tl_link_peer(link)->name);
        failed(connection, false);
    } else {
        take_offer(connection, message);
    }
}

void tl_data_connection_refuse_offer(const struct tl_worker *worker, struct tl_link *link,
                                     const struct tl_connection_message *offer)
{
    struct tl_error error;
    tl_error_set(&error, TL_UNIMPLEMENTED, "%s has no transport %s", worker->self.name, offer->transport);
    tell_refusal(link, offer->transport, offer->attempt, true, error.message);
}

static void hear_answer(struct tl_data_connection *connection, const struct tl_connection_message *message)
{
    if (connection->state != TL_DATA_CONNECTION_OFFERED || message->attempt != connection->attempt) return;
    struct tl_error error;
    connection->state = TL_DATA_CONNECTION_CONNECTING;
    if (tl_session_connect(connection->session, message->bytes, message->len_bytes, &error) == TL_OK) return;
    set_reason(connection, "%s", error.message);
    tell_refusal(connection->link, message->transport, connection->attempt, false, error.message);
    failed(connection, false);
}

static void hear_refusal(struct tl_data_connection *connection, const struct tl_connection_message *message)
{
    bool is_of_all = message->attempt == 0;
    bool is_of_this = message->attempt == connection->attempt && connection->session != NULL;
    if (connection->state == TL_DATA_CONNECTION_REFUSED || (!is_of_all && !is_of_this)) return;
    const char *reason = message->reason[0] != '\0' ? message->reason : "it gives no reason";
    bool was_up = connection->state == TL_DATA_CONNECTION_UP;
    connection->is_left = was_up && (strcmp(reason, IT_SHUTS_DOWN) == 0 || strcmp(reason, IT_CLOSED_IN_ORDER) == 0);
    set_reason(connection,
               is_of_all ? "%s has no data plane: %s"
               : was_up  ? "%s has given up the data connection: %s"
                         : "%s refuses the data connection: %s",
               connection->name, reason);
    failed(connection, is_of_all || message->is_final);
}

void tl_data_connection_hear(struct tl_data_connection *connection, struct tl_link *link,
                             const struct tl_connection_message *message)
{
    /* One that is not in use is about to end. */
    if (link != connection->link) return;
    if (message->kind == TL_CONNECTION_MESSAGE_OFFER) {
        hear_offer(connection, message);
    } else if (message->kind == TL_CONNECTION_MESSAGE_ANSWER) {
        hear_answer(connection, message);
    } else {
        hear_refusal(connection, message);
    }
}

/* ------------------------------------------------------------------------------------------------------- links -- */

void tl_data_connection_init(struct tl_data_connection *connection, struct tl_worker *worker,
                             const struct tl_transport_slot *slot, const char *name,
                             const struct tl_data_connection_events *events, void *owner)
{
    *connection =
        (struct tl_data_connection){.worker = worker, .slot = slot, .name = name, .events = events, .owner = owner};
    connection->timer.fire = timer_fired;
    set_reason(connection, "the peer is not connected");
}

void tl_data_connection_end(struct tl_data_connection *connection)
{
    if (connection->link == NULL) return;
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "the link to %s has ended", connection->name);
    abandon(connection, &reason);
    disarm(connection);
    /* That it comes back over the next link is news. */
    if (connection->state == TL_DATA_CONNECTION_UP) connection->has_logged = false;
    connection->link = NULL;
    connection->state = TL_DATA_CONNECTION_OFF;
    set_reason(connection, "the peer is not connected");
}

/* Whether the transport does not reach the peer; then the reason is set. The side that has accepted the link does not
 * take the peer's word for it, except between containers, which share the folder of the sockets and not the network. */
static bool find_elsewhere(struct tl_data_connection *connection)
{
    const struct tl_identity *peer = tl_link_peer(connection->link);
    if (connection->slot->source->find_host == NULL) return false;
    if (!tl_identity_has_host(peer) || memcmp(peer->host, connection->worker->self.host, TL_HOST_BYTES) != 0) {
        set_reason(connection, "it is on another host");
        return true;
    }
    if (tl_link_is_ours(connection->link) || connection->worker->settings.local.socket_folder != NULL) return false;
    if (tl_endpoint_is_here(peer->address)) return false;
    set_reason(connection,
               "the connection comes from %s, which is no address of this host; set local.socket_folder where "
               "containers of one host have networks of their own",
               peer->address);
    return true;
}

void tl_data_connection_begin(struct tl_data_connection *connection, struct tl_link *link, bool is_passing)
{
    const struct tl_transport_slot *slot = connection->slot;
    if (connection->link == link) return;
    tl_data_connection_end(connection);
    connection->link = link;
    connection->is_first = true;
    connection->is_passing = is_passing;
    connection->is_left = false;
    connection->failure_count = 0;
    connection->is_elsewhere = slot->transport != NULL && find_elsewhere(connection);
    if (slot->transport != NULL && !connection->is_elsewhere && !connection->worker->is_closing) {
        connection->state = TL_DATA_CONNECTION_HELD;
        set_reason(connection, "another data connection is tried first");
        return;
    }
    connection->state = TL_DATA_CONNECTION_REFUSED;
    if (!connection->is_elsewhere) {
        set_reason(connection, "%s", slot->transport == NULL ? slot->reason : "this worker is shutting down");
    }
    /* Both know on which hosts they are. */
    if (tl_link_is_ours(link) && !connection->is_elsewhere)
        tell_refusal(link, transport_of(connection), 0, true, connection->reason);
    log_change(connection);
}

void tl_data_connection_stay(struct tl_data_connection *connection)
{
    connection->is_passing = false;
}

void tl_data_connection_go_on(struct tl_data_connection *connection)
{
    if (connection->state != TL_DATA_CONNECTION_HELD) return;
    if (connection->worker->is_closing) {
        /* The data plane may have ended already. */
        connection->state = TL_DATA_CONNECTION_REFUSED;
        set_reason(connection, "this worker is shutting down");
    } else if (tl_link_is_ours(connection->link)) {
        offer(connection);
    } else {
        expect_offer(connection);
    }
}

bool tl_data_connection_has_failed(const struct tl_data_connection *connection)
{
    return connection->state == TL_DATA_CONNECTION_REFUSED || !connection->is_first;
}

enum tl_data_connection_use tl_data_connection_use(const struct tl_data_connection *connection)
{
    /* A peer that restarts is no reason to fail, where there is no other way. */
    bool can_wait = connection->is_left && connection->worker->is_transport_required;
    switch (connection->state) {
    case TL_DATA_CONNECTION_UP:
        return TL_DATA_CONNECTION_TAKE;
    case TL_DATA_CONNECTION_EXPECTING:
        return connection->is_first || can_wait ? TL_DATA_CONNECTION_AWAIT : TL_DATA_CONNECTION_AVOID;
    case TL_DATA_CONNECTION_BACK_OFF:
        return can_wait ? TL_DATA_CONNECTION_AWAIT : TL_DATA_CONNECTION_AVOID;
    case TL_DATA_CONNECTION_CREATING:
    case TL_DATA_CONNECTION_OFFERED:
    case TL_DATA_CONNECTION_CONNECTING:
        return connection->is_first || connection->worker->is_transport_required ? TL_DATA_CONNECTION_AWAIT
                                                                                 : TL_DATA_CONNECTION_AVOID;
    case TL_DATA_CONNECTION_OFF:
    case TL_DATA_CONNECTION_HELD:
    case TL_DATA_CONNECTION_REFUSED:
        break;
    }
    return TL_DATA_CONNECTION_AVOID;
}
