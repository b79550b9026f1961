// SPDX-License-Identifier: Apache-2.0
/* The states of a data connection: what each of them does with each event. */
#include "server/peers/data_connection_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/random.h"
#include "base/reason.h"
#include "server/back_off.h"
#include "server/peers/session.h"
#include "server/worker_internal.h"

static const struct tl_session_events session_events;

/* The reasons in a REFUSAL that ends a data connection without a failure. */
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

void data_connection_send_refusal(struct tl_link *link, const char *transport, uint64_t attempt, bool is_final,
                                  const char *reason)
{
    struct tl_connection_message message = {
        .kind = TL_CONNECTION_MESSAGE_REFUSAL, .attempt = attempt, .is_final = is_final};
    snprintf(message.transport, sizeof(message.transport), "%s", transport);
    snprintf(message.reason, sizeof(message.reason), "%s", reason);
    tl_link_send_connection_message(link, &message);
}

/* ----------------------------------------------------------------------------------------------------- reasons -- */

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
    } else if (!connection->worker->closing.is_closing) {
        TL_LOG(connection->is_left ? TL_LOG_INFO : TL_LOG_WARN, "no data connection", TL_STR("peer", connection->name),
               TL_STR("transport", transport_of(connection)), TL_STR("reason", connection->reason));
    }
}

void data_connection_set_reason(struct tl_data_connection *connection, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(connection->reason, sizeof(connection->reason), format, args);
    va_end(args);
    connection->lasting_reason = tl_reason(connection->reason);
}

static void arm(struct tl_data_connection *connection, int64_t after_ns)
{
    tl_timers_arm_reserved(tl_loop_timers(connection->worker->loop), &connection->timer,
                           tl_clock_deadline_ns(after_ns));
}

static void disarm(struct tl_data_connection *connection)
{
    tl_timers_disarm(tl_loop_timers(connection->worker->loop), &connection->timer);
}

/* Gives the session up. The requests that were answered over it pass to the owner. */
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

/* ---------------------------------------------------------------------------------------------------- failures -- */

/* Returns whether an error lasts as long as both workers run: they do not fit, or their users may not connect. */
static bool is_lasting(enum tl_status code)
{
    return code == TL_FAILED_PRECONDITION || code == TL_PERMISSION_DENIED;
}

/* Notes that the connection has broken while it carried requests. */
static void note_break(struct tl_data_connection *connection)
{
    connection->broken_ns[connection->break_count++ % TL_MANY_BREAKS] = tl_clock_now_ns();
    connection->break_reason = connection->lasting_reason;
}

/* Decides what follows from the end of an attempt or of the connection, for the reason that is set. */
static void failed(struct tl_data_connection *connection, bool is_final)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s", connection->reason);
    if (connection->state == TL_DATA_CONNECTION_UP && !connection->is_left && !connection->is_being_replaced)
        note_break(connection);
    connection->tries = connection->state == TL_DATA_CONNECTION_UP ? 0 : connection->tries + 1;
    abandon(connection, &reason);
    disarm(connection);
    if (is_final || connection->worker->closing.is_closing) {
        data_connection_happen(connection, CONNECTION_EVENT_FINAL);
    } else if (connection->is_being_replaced && connection->state != TL_DATA_CONNECTION_EXPECTING) {
        data_connection_happen(connection, CONNECTION_EVENT_PASSING);
    } else {
        data_connection_happen(connection,
                               tl_link_is_ours(connection->link) ? CONNECTION_EVENT_RETRY : CONNECTION_EVENT_AWAIT);
    }
}

static void nothing(struct tl_data_connection *connection, const struct connection_event *event)
{
    (void)connection;
    (void)event;
}

static void tell_failure(struct tl_data_connection *connection, const struct connection_event *event)
{
    (void)event;
    connection->is_first = false;
    log_change(connection);
    connection->events->changed(connection->owner);
}

static void pause_before_offer(struct tl_data_connection *connection, const struct connection_event *event)
{
    arm(connection, tl_back_off_ns(TL_DATA_CONNECTION_FIRST_BACK_OFF_NS, TL_DATA_CONNECTION_MAX_BACK_OFF_NS,
                                   connection->failure_count++));
    tell_failure(connection, event);
}

/* A connection that lasted makes the next pause short again. */
static void pause_after_up(struct tl_data_connection *connection, const struct connection_event *event)
{
    if (tl_clock_now_ns() - connection->up_since_ns >= TL_SETTLED_NS) connection->failure_count = 0;
    pause_before_offer(connection, event);
}

static void expect_offer(struct tl_data_connection *connection, const struct connection_event *event)
{
    (void)event;
    data_connection_set_reason(connection, TL_DATA_CONNECTION_BEGINS);
    arm(connection, connection->slot->transport->options.attempt_ns);
}

/* The peer uses the other link first and ends its half without a message. Nothing is wrong then, and what waits for the
 * data connection still does. If the peer has not changed links, it offers again, and the next failure counts. */
static void expect_after_passing(struct tl_data_connection *connection, const struct connection_event *event)
{
    connection->is_being_replaced = false;
    connection->tries = 0;
    TL_LOG_AT_DEBUG("a data connection has ended, perhaps for that of another link", TL_STR("peer", connection->name),
                    TL_STR("transport", transport_of(connection)), TL_STR("reason", connection->reason));
    expect_offer(connection, event);
    connection->events->changed(connection->owner);
}

/* ---------------------------------------------------------------------------------------------------- attempts -- */

/* Begins an attempt: ours with message NULL, or the peer's with its offer. */
static enum tl_status begin_attempt(struct tl_data_connection *connection, uint64_t attempt,
                                    const struct tl_connection_message *message, struct tl_error *ret_error)
{
    connection->attempt = attempt;
    connection->is_left = false;
    if (message == NULL && connection->is_first) data_connection_set_reason(connection, TL_DATA_CONNECTION_BEGINS);
    arm(connection, connection->slot->transport->options.attempt_ns);
    return tl_session_open(connection->slot->transport, tl_link_peer(connection->link),
                           message != NULL ? message->bytes : NULL, message != NULL ? message->len_bytes : 0,
                           &session_events, connection, &connection->session, ret_error);
}

static void offer(struct tl_data_connection *connection, const struct connection_event *event)
{
    (void)event;
    struct tl_error error;
    if (begin_attempt(connection, tl_random_u64(), NULL, &error) == TL_OK) return;
    data_connection_set_reason(connection, "%s", error.message);
    failed(connection, false);
}

static void take_offer(struct tl_data_connection *connection, const struct connection_event *event)
{
    const struct tl_connection_message *message = event->message;
    struct tl_error error;
    if (begin_attempt(connection, message->attempt, message, &error) == TL_OK) return;
    data_connection_set_reason(connection, "%s", error.message);
    data_connection_send_refusal(connection->link, message->transport, message->attempt, is_lasting(error.code),
                                 error.message);
    failed(connection, is_lasting(error.code));
}

/* The peer has given up the present attempt without a message. It may offer again when that attempt has ended. */
static void refuse_second_offer(struct tl_data_connection *connection, const struct connection_event *event)
{
    data_connection_send_refusal(connection->link, event->message->transport, event->message->attempt, false,
                                 "the attempt before this one has not ended yet");
    data_connection_set_reason(connection, "%s has offered another data connection",
                               tl_link_peer(connection->link)->name);
    failed(connection, false);
}

static void connect_session(struct tl_data_connection *connection, const struct connection_event *event)
{
    const struct tl_connection_message *message = event->message;
    struct tl_error error;
    if (tl_session_connect(connection->session, message->bytes, message->len_bytes, &error) == TL_OK) return;
    data_connection_set_reason(connection, "%s", error.message);
    data_connection_send_refusal(connection->link, message->transport, connection->attempt, false, error.message);
    failed(connection, false);
}

static void come_up(struct tl_data_connection *connection, const struct connection_event *event)
{
    (void)event;
    disarm(connection);
    connection->up_since_ns = tl_clock_now_ns();
    data_connection_set_reason(connection, "%s", "");
    log_change(connection);
    connection->events->changed(connection->owner);
}

/* ------------------------------------------------------------------------------------------ what ends attempts -- */

static void take_refusal(struct tl_data_connection *connection, const struct connection_event *event)
{
    const struct tl_connection_message *message = event->message;
    bool is_of_all = message->attempt == 0;
    const char *reason = message->reason[0] != '\0' ? message->reason : "it gives no reason";
    bool was_up = connection->state == TL_DATA_CONNECTION_UP;
    connection->is_left = was_up && (strcmp(reason, IT_SHUTS_DOWN) == 0 || strcmp(reason, IT_CLOSED_IN_ORDER) == 0);
    data_connection_set_reason(connection,
                               is_of_all ? "%s has no data plane: %s"
                               : was_up  ? "%s has given up the data connection: %s"
                                         : "%s refuses the data connection: %s",
                               connection->name, reason);
    failed(connection, is_of_all || message->is_final);
}

static void session_ended(struct tl_data_connection *connection, const struct connection_event *event)
{
    const struct tl_error *reason = event->reason;
    bool was_up = connection->state == TL_DATA_CONNECTION_UP;
    let_go(connection);
    connection->is_left = reason->code == TL_OK;
    if (connection->is_left) {
        data_connection_set_reason(connection, "%s has closed the data connection", connection->name);
    } else {
        data_connection_set_reason(connection, "%s%s", was_up ? "the data connection broke: " : "", reason->message);
    }
    /* Without a message the peer's half may take long to notice. */
    const char *message_text = !connection->is_left                     ? reason->message
                               : connection->worker->closing.is_closing ? IT_SHUTS_DOWN
                                                                        : IT_CLOSED_IN_ORDER;
    bool is_final = !was_up && is_lasting(reason->code);
    data_connection_send_refusal(connection->link, transport_of(connection), connection->attempt, is_final,
                                 message_text);
    failed(connection, is_final);
}

static void offer_overdue(struct tl_data_connection *connection, const struct connection_event *event)
{
    (void)event;
    data_connection_set_reason(connection, "%s has offered no data connection in time", connection->name);
    failed(connection, false);
}

static void attempt_overdue(struct tl_data_connection *connection, const struct connection_event *event)
{
    (void)event;
    const char *missing = connection->state == TL_DATA_CONNECTION_CREATING ? "the memory for it was not ready"
                          : connection->state == TL_DATA_CONNECTION_OFFERED
                              ? "the peer has not answered the offer; it is overloaded, or nothing drives it"
                              : "the handshake has not ended; this worker is overloaded";
    data_connection_set_reason(connection, "the data connection to %s was not set up in time: %s", connection->name,
                               missing);
    data_connection_send_refusal(connection->link, transport_of(connection), connection->attempt, false,
                                 connection->reason);
    failed(connection, false);
}

static void pause_over(struct tl_data_connection *connection, const struct connection_event *event)
{
    (void)event;
    data_connection_happen(connection,
                           connection->worker->closing.is_closing ? CONNECTION_EVENT_CLOSING : CONNECTION_EVENT_OFFER);
}

/* ---------------------------------------------------------------------------------------------------- the link -- */

static void hold(struct tl_data_connection *connection, const struct connection_event *event)
{
    (void)event;
    data_connection_set_reason(connection, "another data connection is tried first");
}

static void refuse_link(struct tl_data_connection *connection, const struct connection_event *event)
{
    (void)event;
    const struct tl_transport_slot *slot = connection->slot;
    if (!connection->is_elsewhere) {
        data_connection_set_reason(connection, "%s",
                                   slot->transport == NULL ? slot->reason : "this worker is shutting down");
    }
    /* Both sides know on which hosts they are, so that needs no message. */
    if (tl_link_is_ours(connection->link) && !connection->is_elsewhere)
        data_connection_send_refusal(connection->link, transport_of(connection), 0, true, connection->reason);
    log_change(connection);
}

static void leave_link(struct tl_data_connection *connection, const struct connection_event *event)
{
    (void)event;
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "the link to %s has ended", connection->name);
    abandon(connection, &reason);
    disarm(connection);
    connection->link = NULL;
    data_connection_set_reason(connection, "the peer is not connected");
    /* When the log has said last that it is up, it says so again when it comes up over the next link. */
    if (connection->logged[0] == '\0') connection->has_logged = false;
}

/* The transport may have ended already. */
static void begin_no_attempt(struct tl_data_connection *connection, const struct connection_event *event)
{
    (void)event;
    data_connection_set_reason(connection, "this worker is shutting down");
}

/* --------------------------------------------------------------------------------------------------- the table -- */

/* One table for all that may happen. `next` is where the connection goes before the action runs; an action that has a
 * failure to report raises a further event. A NULL action, what the table leaves out: it cannot happen. */
struct transition {
    enum tl_data_connection_state next;
    void (*action)(struct tl_data_connection *connection, const struct connection_event *event);
};

/* clang-format off */
static const struct transition transitions[][CONNECTION_EVENTS] = {
    [TL_DATA_CONNECTION_OFF] = {
        [CONNECTION_EVENT_LINK] = {TL_DATA_CONNECTION_HELD, hold},
        [CONNECTION_EVENT_LINK_UNFIT] = {TL_DATA_CONNECTION_REFUSED, refuse_link},
        [CONNECTION_EVENT_LINK_LOST] = {TL_DATA_CONNECTION_OFF, nothing},
    },
    [TL_DATA_CONNECTION_HELD] = {
        [CONNECTION_EVENT_LINK_LOST] = {TL_DATA_CONNECTION_OFF, leave_link},
        [CONNECTION_EVENT_OFFER] = {TL_DATA_CONNECTION_CREATING, offer},
        [CONNECTION_EVENT_EXPECT] = {TL_DATA_CONNECTION_EXPECTING, expect_offer},
        [CONNECTION_EVENT_CLOSING] = {TL_DATA_CONNECTION_REFUSED, begin_no_attempt},
        [CONNECTION_EVENT_OFFER_RECEIVED] = {TL_DATA_CONNECTION_CREATING, take_offer},
        [CONNECTION_EVENT_ANSWER_RECEIVED] = {TL_DATA_CONNECTION_HELD, nothing},
        [CONNECTION_EVENT_REFUSAL_RECEIVED] = {TL_DATA_CONNECTION_HELD, take_refusal}, /* for all attempts */
        [CONNECTION_EVENT_FINAL] = {TL_DATA_CONNECTION_REFUSED, tell_failure},
    },
    [TL_DATA_CONNECTION_EXPECTING] = {
        [CONNECTION_EVENT_LINK_LOST] = {TL_DATA_CONNECTION_OFF, leave_link},
        [CONNECTION_EVENT_OFFER_RECEIVED] = {TL_DATA_CONNECTION_CREATING, take_offer},
        [CONNECTION_EVENT_ANSWER_RECEIVED] = {TL_DATA_CONNECTION_EXPECTING, nothing},
        [CONNECTION_EVENT_REFUSAL_RECEIVED] = {TL_DATA_CONNECTION_EXPECTING, take_refusal}, /* for all attempts */
        [CONNECTION_EVENT_TIMEOUT] = {TL_DATA_CONNECTION_EXPECTING, offer_overdue},
        [CONNECTION_EVENT_FINAL] = {TL_DATA_CONNECTION_REFUSED, tell_failure},
        [CONNECTION_EVENT_AWAIT] = {TL_DATA_CONNECTION_EXPECTING, tell_failure},
    },
    [TL_DATA_CONNECTION_CREATING] = {
        [CONNECTION_EVENT_LINK_LOST] = {TL_DATA_CONNECTION_OFF, leave_link},
        [CONNECTION_EVENT_OFFER_RECEIVED] = {TL_DATA_CONNECTION_CREATING, refuse_second_offer},
        [CONNECTION_EVENT_ANSWER_RECEIVED] = {TL_DATA_CONNECTION_CREATING, nothing},
        [CONNECTION_EVENT_REFUSAL_RECEIVED] = {TL_DATA_CONNECTION_CREATING, take_refusal},
        [CONNECTION_EVENT_OFFER_SENT] = {TL_DATA_CONNECTION_OFFERED, nothing},
        [CONNECTION_EVENT_ANSWER_SENT] = {TL_DATA_CONNECTION_CONNECTING, nothing},
        [CONNECTION_EVENT_CLOSED] = {TL_DATA_CONNECTION_CREATING, session_ended},
        [CONNECTION_EVENT_TIMEOUT] = {TL_DATA_CONNECTION_CREATING, attempt_overdue},
        [CONNECTION_EVENT_FINAL] = {TL_DATA_CONNECTION_REFUSED, tell_failure},
        [CONNECTION_EVENT_RETRY] = {TL_DATA_CONNECTION_BACK_OFF, pause_before_offer},
        [CONNECTION_EVENT_AWAIT] = {TL_DATA_CONNECTION_EXPECTING, tell_failure},
        [CONNECTION_EVENT_PASSING] = {TL_DATA_CONNECTION_EXPECTING, expect_after_passing},
    },
    [TL_DATA_CONNECTION_OFFERED] = {
        [CONNECTION_EVENT_LINK_LOST] = {TL_DATA_CONNECTION_OFF, leave_link},
        [CONNECTION_EVENT_ANSWER_RECEIVED] = {TL_DATA_CONNECTION_CONNECTING, connect_session},
        [CONNECTION_EVENT_REFUSAL_RECEIVED] = {TL_DATA_CONNECTION_OFFERED, take_refusal},
        [CONNECTION_EVENT_CLOSED] = {TL_DATA_CONNECTION_OFFERED, session_ended},
        [CONNECTION_EVENT_TIMEOUT] = {TL_DATA_CONNECTION_OFFERED, attempt_overdue},
        [CONNECTION_EVENT_FINAL] = {TL_DATA_CONNECTION_REFUSED, tell_failure},
        [CONNECTION_EVENT_RETRY] = {TL_DATA_CONNECTION_BACK_OFF, pause_before_offer},
    },
    [TL_DATA_CONNECTION_CONNECTING] = {
        [CONNECTION_EVENT_LINK_LOST] = {TL_DATA_CONNECTION_OFF, leave_link},
        [CONNECTION_EVENT_OFFER_RECEIVED] = {TL_DATA_CONNECTION_CONNECTING, refuse_second_offer},
        [CONNECTION_EVENT_ANSWER_RECEIVED] = {TL_DATA_CONNECTION_CONNECTING, nothing},
        [CONNECTION_EVENT_REFUSAL_RECEIVED] = {TL_DATA_CONNECTION_CONNECTING, take_refusal},
        [CONNECTION_EVENT_UP] = {TL_DATA_CONNECTION_UP, come_up},
        [CONNECTION_EVENT_CLOSED] = {TL_DATA_CONNECTION_CONNECTING, session_ended},
        [CONNECTION_EVENT_TIMEOUT] = {TL_DATA_CONNECTION_CONNECTING, attempt_overdue},
        [CONNECTION_EVENT_FINAL] = {TL_DATA_CONNECTION_REFUSED, tell_failure},
        [CONNECTION_EVENT_RETRY] = {TL_DATA_CONNECTION_BACK_OFF, pause_before_offer},
        [CONNECTION_EVENT_AWAIT] = {TL_DATA_CONNECTION_EXPECTING, tell_failure},
        [CONNECTION_EVENT_PASSING] = {TL_DATA_CONNECTION_EXPECTING, expect_after_passing},
    },
    [TL_DATA_CONNECTION_UP] = {
        [CONNECTION_EVENT_LINK_LOST] = {TL_DATA_CONNECTION_OFF, leave_link},
        [CONNECTION_EVENT_OFFER_RECEIVED] = {TL_DATA_CONNECTION_UP, refuse_second_offer},
        [CONNECTION_EVENT_ANSWER_RECEIVED] = {TL_DATA_CONNECTION_UP, nothing},
        [CONNECTION_EVENT_REFUSAL_RECEIVED] = {TL_DATA_CONNECTION_UP, take_refusal},
        [CONNECTION_EVENT_CLOSED] = {TL_DATA_CONNECTION_UP, session_ended},
        [CONNECTION_EVENT_FINAL] = {TL_DATA_CONNECTION_REFUSED, tell_failure},
        [CONNECTION_EVENT_RETRY] = {TL_DATA_CONNECTION_BACK_OFF, pause_after_up},
        [CONNECTION_EVENT_AWAIT] = {TL_DATA_CONNECTION_EXPECTING, tell_failure},
        [CONNECTION_EVENT_PASSING] = {TL_DATA_CONNECTION_EXPECTING, expect_after_passing},
    },
    [TL_DATA_CONNECTION_BACK_OFF] = {
        [CONNECTION_EVENT_LINK_LOST] = {TL_DATA_CONNECTION_OFF, leave_link},
        [CONNECTION_EVENT_OFFER] = {TL_DATA_CONNECTION_CREATING, offer},
        [CONNECTION_EVENT_CLOSING] = {TL_DATA_CONNECTION_REFUSED, begin_no_attempt},
        [CONNECTION_EVENT_ANSWER_RECEIVED] = {TL_DATA_CONNECTION_BACK_OFF, nothing},
        [CONNECTION_EVENT_REFUSAL_RECEIVED] = {TL_DATA_CONNECTION_BACK_OFF, take_refusal}, /* for all attempts */
        [CONNECTION_EVENT_TIMEOUT] = {TL_DATA_CONNECTION_BACK_OFF, pause_over},
        [CONNECTION_EVENT_FINAL] = {TL_DATA_CONNECTION_REFUSED, tell_failure},
    },
    [TL_DATA_CONNECTION_REFUSED] = {
        [CONNECTION_EVENT_LINK_LOST] = {TL_DATA_CONNECTION_OFF, leave_link},
        [CONNECTION_EVENT_OFFER_RECEIVED] = {TL_DATA_CONNECTION_CREATING, take_offer}, /* the peer may try anyway */
        [CONNECTION_EVENT_ANSWER_RECEIVED] = {TL_DATA_CONNECTION_REFUSED, nothing},
        [CONNECTION_EVENT_REFUSAL_RECEIVED] = {TL_DATA_CONNECTION_REFUSED, nothing},
    },
};
/* clang-format on */

void data_connection_handle(struct tl_data_connection *connection, const struct connection_event *event)
{
    const struct transition *transition = &transitions[connection->state][event->kind];
    TL_CHECK(transition->action != NULL);
    connection->state = transition->next;
    transition->action(connection, event);
}

/* --------------------------------------------------------------------------------------- where events are from -- */

static void timer_fired(struct tl_timer *timer)
{
    data_connection_happen(TL_CONTAINER_OF(timer, struct tl_data_connection, timer), CONNECTION_EVENT_TIMEOUT);
}

static void address_ready(void *owner, const uint8_t *bytes, uint32_t len_bytes)
{
    struct tl_data_connection *connection = owner;
    bool is_ours = tl_link_is_ours(connection->link);
    tell(connection, is_ours ? TL_CONNECTION_MESSAGE_OFFER : TL_CONNECTION_MESSAGE_ANSWER, bytes, len_bytes);
    data_connection_happen(connection, is_ours ? CONNECTION_EVENT_OFFER_SENT : CONNECTION_EVENT_ANSWER_SENT);
}

static void session_up(void *owner)
{
    data_connection_happen(owner, CONNECTION_EVENT_UP);
}

static void session_closed(void *owner, const struct tl_error *reason)
{
    data_connection_handle(owner, &(struct connection_event){.kind = CONNECTION_EVENT_CLOSED, .reason = reason});
}

static const struct tl_session_events session_events = {
    .address_ready = address_ready, .up = session_up, .closed = session_closed};

enum tl_status tl_data_connection_init(struct tl_data_connection *connection, struct tl_worker *worker,
                                       const struct tl_transport_slot *slot, const char *name,
                                       const struct tl_data_connection_events *events, void *owner)
{
    enum tl_status status = tl_timers_reserve(tl_loop_timers(worker->loop));
    if (status != TL_OK) return status;
    *connection =
        (struct tl_data_connection){.worker = worker, .slot = slot, .name = name, .events = events, .owner = owner};
    connection->timer.fire = timer_fired;
    data_connection_set_reason(connection, "the peer is not connected");
    return TL_OK;
}

void tl_data_connection_fini(struct tl_data_connection *connection)
{
    TL_CHECK(connection->link == NULL);
    tl_timers_release(tl_loop_timers(connection->worker->loop));
}
