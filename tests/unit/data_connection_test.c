// SPDX-License-Identifier: Apache-2.0
/* The states of a data connection: every edge of the table, every event that it leaves out, and whole lives of both
 * sides. Sessions and links are fakes. */
#include <check.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "fakes/fake_clock.h"
#include "fakes/full_timers.h"

#undef fail /* check.h has a macro of this name */
#include "server/peers/data_connection.c"
#include "server/peers/data_connection_states.c"
#include "fakes/calls.h"
#include "fakes/log_capture.h"
#include "fakes/run_suite.h"

#define ATTEMPT 7

struct tl_link {
    struct tl_identity identity;
    bool is_ours;
};

struct tl_session {
    struct tl_identity identity;
};

static struct tl_worker worker;
static struct tl_transport transport;
static struct tl_provider provider = {.name = "card"};
static const struct tl_transport_source source = {.name = "verbs"};
static struct tl_transport_slot slot;
static struct tl_data_connection connection;
static struct tl_timers timers;
static struct tl_link link_in_use;
static struct tl_session the_session;
static struct tl_connection_message sent; /* the latest message */
static enum tl_status open_status, connect_status;
static size_t unconfirmed_count;

/* ------------------------------------------------------------------------------------------------------ fakes -- */

struct tl_timers *tl_loop_timers(struct tl_loop *loop)
{
    (void)loop;
    return &timers;
}

const struct tl_identity *tl_link_peer(const struct tl_link *link)
{
    return &link->identity;
}

bool tl_link_is_ours(const struct tl_link *link)
{
    return link->is_ours;
}

void tl_link_send_connection_message(struct tl_link *link, const struct tl_connection_message *message)
{
    static const char *const names[] = {"?", "offer", "answer", "refuse"};
    ck_assert_ptr_eq(link, &link_in_use);
    ck_assert_str_eq(message->transport, "verbs");
    sent = *message;
    note(names[message->kind]);
}

bool tl_endpoint_is_here(const char *address)
{
    (void)address;
    return true;
}

enum tl_status tl_session_open(struct tl_transport *of, const struct tl_identity *peer, const uint8_t *offer_bytes,
                               uint32_t len_bytes, const struct tl_session_events *events, void *owner,
                               struct tl_session **ret_session, struct tl_error *ret_error)
{
    (void)len_bytes, (void)events;
    ck_assert(of == &transport && peer == &link_in_use.identity && owner == &connection);
    ck_assert_int_eq(offer_bytes == NULL, link_in_use.is_ours);
    note("open");
    if (open_status != TL_OK) return tl_error_set(ret_error, open_status, "no session");
    *ret_session = &the_session;
    return TL_OK;
}

enum tl_status tl_session_connect(struct tl_session *session, const uint8_t *bytes, uint32_t len_bytes,
                                  struct tl_error *ret_error)
{
    (void)bytes, (void)len_bytes;
    ck_assert_ptr_eq(session, &the_session);
    note("connect");
    return connect_status == TL_OK ? TL_OK : tl_error_set(ret_error, connect_status, "no address");
}

void tl_session_abandon(struct tl_session *session, const struct tl_error *reason)
{
    (void)reason;
    ck_assert_ptr_eq(session, &the_session);
    note("abandon");
}

size_t tl_session_unconfirmed(const struct tl_session *session, const uint64_t **ret_numbers)
{
    static const uint64_t numbers[] = {3};
    ck_assert_ptr_eq(session, &the_session);
    *ret_numbers = numbers;
    return unconfirmed_count;
}

const struct tl_identity *tl_session_peer(const struct tl_session *session)
{
    return &session->identity;
}

static void changed(void *owner)
{
    ck_assert_ptr_eq(owner, &worker);
    note("changed");
}

static void unconfirmed(void *owner, uint64_t incarnation, const uint64_t *numbers, size_t count)
{
    (void)incarnation;
    ck_assert(owner == &worker && numbers[0] == 3 && count == 1);
    note("unconfirmed");
}

static const struct tl_data_connection_events owner_events = {.changed = changed, .unconfirmed = unconfirmed};

static void setup(void)
{
    tl_timers_init(&timers);
    transport.provider = &provider;
    transport.options.attempt_ns = 2 * TL_NS_PER_SEC;
    slot = (struct tl_transport_slot){.transport = &transport, .source = &source};
    ck_assert_int_eq(tl_data_connection_init(&connection, &worker, &slot, "/job:ps/task:1", &owner_events, &worker),
                     TL_OK);
}

static void teardown(void)
{
    tl_data_connection_end(&connection);
    tl_data_connection_fini(&connection);
    tl_timers_fini(&timers);
}

static bool is_armed(void)
{
    return connection.timer.heap_place != 0;
}

/* ------------------------------------------------------------------------------------------------------ edges -- */

#define OURS true
#define THEIRS false
#define OFF TL_DATA_CONNECTION_OFF
#define HELD TL_DATA_CONNECTION_HELD
#define EXPECTING TL_DATA_CONNECTION_EXPECTING
#define CREATING TL_DATA_CONNECTION_CREATING
#define OFFERED TL_DATA_CONNECTION_OFFERED
#define CONNECTING TL_DATA_CONNECTION_CONNECTING
#define UP TL_DATA_CONNECTION_UP
#define BACK_OFF TL_DATA_CONNECTION_BACK_OFF
#define REFUSED TL_DATA_CONNECTION_REFUSED

static const struct edge {
    enum tl_data_connection_state from;
    enum connection_event_kind kind;
    bool is_ours; /* the link */
    enum tl_data_connection_state to;
    bool is_armed; /* afterwards */
    const char *calls;
} edges[] = {
    {OFF, CONNECTION_EVENT_LINK, OURS, HELD, false, ""},
    {OFF, CONNECTION_EVENT_LINK_UNFIT, OURS, REFUSED, false, "refuse"},
    {OFF, CONNECTION_EVENT_LINK_UNFIT, THEIRS, REFUSED, false, ""},
    {OFF, CONNECTION_EVENT_LINK_LOST, OURS, OFF, false, ""},

    {HELD, CONNECTION_EVENT_LINK_LOST, OURS, OFF, false, ""},
    {HELD, CONNECTION_EVENT_OFFER, OURS, CREATING, true, "open"},
    {HELD, CONNECTION_EVENT_EXPECT, THEIRS, EXPECTING, true, ""},
    {HELD, CONNECTION_EVENT_CLOSING, OURS, REFUSED, false, ""},
    {HELD, CONNECTION_EVENT_OFFER_RECEIVED, THEIRS, CREATING, true, "open"},
    {HELD, CONNECTION_EVENT_ANSWER_RECEIVED, OURS, HELD, false, ""},
    {HELD, CONNECTION_EVENT_REFUSAL_RECEIVED, THEIRS, REFUSED, false, "changed"},
    {HELD, CONNECTION_EVENT_FINAL, OURS, REFUSED, false, "changed"},

    {EXPECTING, CONNECTION_EVENT_LINK_LOST, THEIRS, OFF, false, ""},
    {EXPECTING, CONNECTION_EVENT_OFFER_RECEIVED, THEIRS, CREATING, true, "open"},
    {EXPECTING, CONNECTION_EVENT_ANSWER_RECEIVED, THEIRS, EXPECTING, true, ""},
    {EXPECTING, CONNECTION_EVENT_REFUSAL_RECEIVED, THEIRS, REFUSED, false, "changed"},
    {EXPECTING, CONNECTION_EVENT_TIMEOUT, THEIRS, EXPECTING, false, "changed"},
    {EXPECTING, CONNECTION_EVENT_FINAL, THEIRS, REFUSED, false, "changed"},
    {EXPECTING, CONNECTION_EVENT_AWAIT, THEIRS, EXPECTING, false, "changed"},

    {CREATING, CONNECTION_EVENT_LINK_LOST, OURS, OFF, false, "abandon"},
    {CREATING, CONNECTION_EVENT_OFFER_RECEIVED, THEIRS, EXPECTING, false, "refuse abandon changed"},
    {CREATING, CONNECTION_EVENT_ANSWER_RECEIVED, OURS, CREATING, true, ""},
    {CREATING, CONNECTION_EVENT_REFUSAL_RECEIVED, OURS, BACK_OFF, true, "abandon changed"},
    {CREATING, CONNECTION_EVENT_OFFER_SENT, OURS, OFFERED, true, ""},
    {CREATING, CONNECTION_EVENT_ANSWER_SENT, THEIRS, CONNECTING, true, ""},
    {CREATING, CONNECTION_EVENT_CLOSED, OURS, BACK_OFF, true, "refuse changed"},
    {CREATING, CONNECTION_EVENT_TIMEOUT, THEIRS, EXPECTING, false, "refuse abandon changed"},
    {CREATING, CONNECTION_EVENT_FINAL, OURS, REFUSED, false, "changed"},
    {CREATING, CONNECTION_EVENT_RETRY, OURS, BACK_OFF, true, "changed"},
    {CREATING, CONNECTION_EVENT_AWAIT, THEIRS, EXPECTING, false, "changed"},
    {CREATING, CONNECTION_EVENT_PASSING, THEIRS, EXPECTING, true, "changed"},

    {OFFERED, CONNECTION_EVENT_LINK_LOST, OURS, OFF, false, "abandon"},
    {OFFERED, CONNECTION_EVENT_ANSWER_RECEIVED, OURS, CONNECTING, true, "connect"},
    {OFFERED, CONNECTION_EVENT_REFUSAL_RECEIVED, OURS, BACK_OFF, true, "abandon changed"},
    {OFFERED, CONNECTION_EVENT_CLOSED, OURS, BACK_OFF, true, "refuse changed"},
    {OFFERED, CONNECTION_EVENT_TIMEOUT, OURS, BACK_OFF, true, "refuse abandon changed"},
    {OFFERED, CONNECTION_EVENT_FINAL, OURS, REFUSED, false, "changed"},
    {OFFERED, CONNECTION_EVENT_RETRY, OURS, BACK_OFF, true, "changed"},

    {CONNECTING, CONNECTION_EVENT_LINK_LOST, OURS, OFF, false, "abandon"},
    {CONNECTING, CONNECTION_EVENT_OFFER_RECEIVED, THEIRS, EXPECTING, false, "refuse abandon changed"},
    {CONNECTING, CONNECTION_EVENT_ANSWER_RECEIVED, OURS, CONNECTING, true, ""},
    {CONNECTING, CONNECTION_EVENT_REFUSAL_RECEIVED, THEIRS, EXPECTING, false, "abandon changed"},
    {CONNECTING, CONNECTION_EVENT_UP, OURS, UP, false, "changed"},
    {CONNECTING, CONNECTION_EVENT_CLOSED, THEIRS, EXPECTING, false, "refuse changed"},
    {CONNECTING, CONNECTION_EVENT_TIMEOUT, OURS, BACK_OFF, true, "refuse abandon changed"},
    {CONNECTING, CONNECTION_EVENT_FINAL, OURS, REFUSED, false, "changed"},
    {CONNECTING, CONNECTION_EVENT_RETRY, OURS, BACK_OFF, true, "changed"},
    {CONNECTING, CONNECTION_EVENT_AWAIT, THEIRS, EXPECTING, false, "changed"},
    {CONNECTING, CONNECTION_EVENT_PASSING, THEIRS, EXPECTING, true, "changed"},

    {UP, CONNECTION_EVENT_LINK_LOST, OURS, OFF, false, "abandon"},
    {UP, CONNECTION_EVENT_OFFER_RECEIVED, THEIRS, EXPECTING, false, "refuse abandon changed"},
    {UP, CONNECTION_EVENT_ANSWER_RECEIVED, OURS, UP, false, ""},
    {UP, CONNECTION_EVENT_REFUSAL_RECEIVED, OURS, BACK_OFF, true, "abandon changed"},
    {UP, CONNECTION_EVENT_CLOSED, OURS, BACK_OFF, true, "refuse changed"},
    {UP, CONNECTION_EVENT_FINAL, OURS, REFUSED, false, "changed"},
    {UP, CONNECTION_EVENT_RETRY, OURS, BACK_OFF, true, "changed"},
    {UP, CONNECTION_EVENT_AWAIT, THEIRS, EXPECTING, false, "changed"},
    {UP, CONNECTION_EVENT_PASSING, THEIRS, EXPECTING, true, "changed"},

    {BACK_OFF, CONNECTION_EVENT_LINK_LOST, OURS, OFF, false, ""},
    {BACK_OFF, CONNECTION_EVENT_OFFER, OURS, CREATING, true, "open"},
    {BACK_OFF, CONNECTION_EVENT_CLOSING, OURS, REFUSED, false, ""},
    {BACK_OFF, CONNECTION_EVENT_ANSWER_RECEIVED, OURS, BACK_OFF, true, ""},
    {BACK_OFF, CONNECTION_EVENT_REFUSAL_RECEIVED, OURS, REFUSED, false, "changed"},
    {BACK_OFF, CONNECTION_EVENT_TIMEOUT, OURS, CREATING, true, "open"},
    {BACK_OFF, CONNECTION_EVENT_FINAL, OURS, REFUSED, false, "changed"},

    {REFUSED, CONNECTION_EVENT_LINK_LOST, OURS, OFF, false, ""},
    {REFUSED, CONNECTION_EVENT_OFFER_RECEIVED, THEIRS, CREATING, true, "open"},
    {REFUSED, CONNECTION_EVENT_ANSWER_RECEIVED, OURS, REFUSED, false, ""},
    {REFUSED, CONNECTION_EVENT_REFUSAL_RECEIVED, OURS, REFUSED, false, ""},
};

/* Puts the connection into a state, with the session and the timer that it has there. */
static void enter(enum tl_data_connection_state state, bool is_ours)
{
    bool has_session = state >= CREATING && state <= UP;
    bool has_timer = state == EXPECTING || (has_session && state != UP) || state == BACK_OFF;
    link_in_use.is_ours = is_ours;
    connection.link = state == OFF ? NULL : &link_in_use;
    connection.state = state;
    connection.is_first = true;
    connection.attempt = ATTEMPT;
    connection.session = has_session ? &the_session : NULL;
    if (has_timer) arm(&connection, TL_NS_PER_SEC);
}

START_TEST(each_edge)
{
    const struct edge *edge = &edges[_i];
    const struct tl_error reason = {.code = TL_UNAVAILABLE, .message = "why"};
    enum tl_data_connection_state next = transitions[edge->from][edge->kind].next;
    const struct tl_connection_message message = {.transport = "verbs",
                                                  .attempt = edge->kind == CONNECTION_EVENT_OFFER_RECEIVED ? ATTEMPT + 1
                                                             : edge->from >= CREATING && edge->from <= UP  ? ATTEMPT
                                                                                                           : 0};
    /* An action that decides where to go raises the next event in the state that it leaves. */
    ck_assert(next == edge->from || next == edge->to);
    enter(edge->from, edge->is_ours);
    if (edge->from == OFF && edge->kind != CONNECTION_EVENT_LINK_LOST) connection.link = &link_in_use;
    /* The timer has fired, or `failed` has disarmed it and let the session go. */
    if (edge->kind == CONNECTION_EVENT_TIMEOUT || edge->kind == CONNECTION_EVENT_CLOSING ||
        edge->kind >= CONNECTION_EVENT_FINAL)
        disarm(&connection);
    if (edge->kind >= CONNECTION_EVENT_FINAL) connection.session = NULL;
    data_connection_handle(&connection,
                           &(struct connection_event){.kind = edge->kind, .message = &message, .reason = &reason});
    ck_assert_int_eq(connection.state, edge->to);
    check_calls(edge->calls);
    ck_assert_int_eq(is_armed(), edge->is_armed);
    ck_assert_int_eq(connection.session != NULL, edge->to >= CREATING && edge->to <= UP);
    ck_assert_int_eq(connection.link == NULL, edge->to == OFF);
    if (edge->to == UP) ck_assert_str_eq(connection.reason, edge->from == UP ? "the peer is not connected" : "");
}
END_TEST

START_TEST(no_other_edge)
{
    bool is_listed[TL_ARRAY_COUNT(transitions)][CONNECTION_EVENTS] = {{false}};
    ck_assert_uint_eq(TL_ARRAY_COUNT(transitions), REFUSED + 1);
    for (size_t i = 0; i < TL_ARRAY_COUNT(edges); i++)
        is_listed[edges[i].from][edges[i].kind] = true;
    for (unsigned from = 0; from < TL_ARRAY_COUNT(transitions); from++) {
        for (unsigned kind = 0; kind < CONNECTION_EVENTS; kind++)
            ck_assert_int_eq(transitions[from][kind].action != NULL, is_listed[from][kind]);
    }
}
END_TEST

START_TEST(forbidden_edge)
{
    enter(OFFERED, OURS);
    data_connection_happen(&connection, CONNECTION_EVENT_UP);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ lives -- */

static void hear(enum tl_connection_message_kind kind, uint64_t attempt, bool is_final, const char *reason)
{
    struct tl_connection_message message = {
        .transport = "verbs", .kind = kind, .attempt = attempt, .is_final = is_final};
    snprintf(message.reason, sizeof(message.reason), "%s", reason);
    tl_data_connection_handle_message(&connection, &link_in_use, &message);
}

static void begin(bool is_ours, bool is_being_replaced)
{
    link_in_use.is_ours = is_ours;
    tl_data_connection_begin(&connection, &link_in_use, is_being_replaced);
    ck_assert_int_eq(connection.state, HELD);
    ck_assert_int_eq(tl_data_connection_use(&connection), TL_DATA_CONNECTION_AVOID);
    tl_data_connection_go_on(&connection);
}

static void bring_up_ours(void)
{
    check_calls("open");
    ck_assert_int_eq(tl_data_connection_use(&connection),
                     connection.is_first ? TL_DATA_CONNECTION_AWAIT : TL_DATA_CONNECTION_AVOID);
    address_ready(&connection, (const uint8_t *)"address", 7);
    check_calls("offer");
    ck_assert_uint_eq(sent.len_bytes, 7);
    hear(TL_CONNECTION_MESSAGE_ANSWER, sent.attempt + 1, false, "");
    check_calls("");
    hear(TL_CONNECTION_MESSAGE_ANSWER, sent.attempt, false, "");
    check_calls("connect");
    session_up(&connection);
    check_calls("changed");
    ck_assert_int_eq(tl_data_connection_use(&connection), TL_DATA_CONNECTION_TAKE);
}

/* The timers of a connection need no memory: one that waits for an attempt or for a pause goes on after that. */
START_TEST(timers_need_no_memory)
{
    struct tl_data_connection other;
    timers_fill(&timers);
    fault_arm(1);
    begin(OURS, false);
    ck_assert(is_armed());
    session_closed(&connection, &(struct tl_error){.code = TL_UNAVAILABLE, .message = "why"});
    ck_assert_int_eq(connection.state, BACK_OFF);
    ck_assert(is_armed());
    ck_assert(!fault_was_hit());
    fault_arm(1);
    ck_assert_int_eq(tl_data_connection_init(&other, &worker, &slot, "", &owner_events, &worker),
                     TL_RESOURCE_EXHAUSTED);
}
END_TEST

START_TEST(our_link)
{
    begin(OURS, false);
    bring_up_ours();
    unconfirmed_count = 1;
    fake_clock_advance(TL_SETTLED_NS - 1);
    session_closed(&connection, &(struct tl_error){.code = TL_UNAVAILABLE, .message = "why"});
    check_calls("unconfirmed refuse changed");
    ck_assert_str_eq(sent.reason, "why");
    ck_assert_str_eq(connection.reason, "the data connection broke: why");
    ck_assert_uint_eq(connection.failure_count, 1);
    ck_assert(tl_data_connection_has_failed(&connection));
    ck_assert_int_eq(tl_data_connection_use(&connection), TL_DATA_CONNECTION_AVOID);
    fake_clock_advance(TL_NS_PER_SEC);
    tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0});
    bring_up_ours();
    unconfirmed_count = 0;
    fake_clock_advance(TL_SETTLED_NS);
    session_closed(&connection, &(struct tl_error){.code = TL_OK});
    check_calls("refuse changed");
    ck_assert_str_eq(sent.reason, IT_CLOSED_IN_ORDER);
    ck_assert_uint_eq(connection.failure_count, 1);
    worker.data_plane.is_transport_required = true;
    ck_assert_int_eq(tl_data_connection_use(&connection), TL_DATA_CONNECTION_AWAIT);
    worker.closing.is_closing = true;
    fake_clock_advance(TL_NS_PER_SEC);
    tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0});
    check_calls("");
    ck_assert_int_eq(connection.state, REFUSED);
    tl_data_connection_end(&connection);
    ck_assert_int_eq(connection.state, OFF);
}
END_TEST

/* A connection that has passed to another link is logged again when it comes up after that link was lost. */
START_TEST(log_says_that_it_is_up_again)
{
    log_capture_begin();
    const struct tl_log_options options = {.size_bytes = sizeof(options), .level = TL_LOG_INFO};
    ck_assert_int_eq(tl_log_set(&options, NULL), TL_OK);
    for (unsigned i = 1; i <= 3; i++) {
        link_in_use.is_ours = false;
        tl_data_connection_begin(&connection, &link_in_use, i == 2);
        tl_data_connection_go_on(&connection);
        const struct tl_connection_message offer = {
            .transport = "verbs", .kind = TL_CONNECTION_MESSAGE_OFFER, .attempt = i, .len_bytes = 1};
        tl_data_connection_handle_message(&connection, &link_in_use, &offer);
        address_ready(&connection, (const uint8_t *)"address", 7);
        session_up(&connection);
        ck_assert_int_eq(connection.state, UP);
        ck_assert_uint_eq(log_capture_count("data connection up"), i);
        if (i == 2) {
            session_closed(&connection, &(struct tl_error){.code = TL_OK});
            ck_assert_int_eq(connection.state, EXPECTING);
        }
        tl_data_connection_end(&connection);
        ck_assert_int_eq(connection.state, OFF);
    }
    worker.closing.is_closing = true;
}
END_TEST

/* Closing in order is no break, nor are breaks that are far apart. */
START_TEST(breaks_again_and_again)
{
    begin(OURS, false);
    for (unsigned round = 0; round < 2; round++) {
        for (unsigned i = 0; i < TL_MANY_BREAKS; i++) {
            ck_assert(!tl_data_connection_keeps_breaking(&connection));
            bring_up_ours();
            fake_clock_advance(round == 0 ? 31 * TL_NS_PER_SEC : i == 0 ? 61 * TL_NS_PER_SEC : 6 * TL_NS_PER_SEC);
            session_closed(&connection, &(struct tl_error){.code = TL_OK});
            check_calls("refuse changed");
            fake_clock_advance(TL_NS_PER_SEC);
            tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0});
            bring_up_ours();
            session_closed(&connection, &(struct tl_error){.code = TL_UNAVAILABLE, .message = "why"});
            check_calls("refuse changed");
            fake_clock_advance(TL_NS_PER_SEC);
            tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0});
        }
    }
    ck_assert(tl_data_connection_keeps_breaking(&connection));
    ck_assert_str_eq(connection.break_reason, "the data connection broke: why");
    fake_clock_advance(60 * TL_NS_PER_SEC);
    ck_assert(!tl_data_connection_keeps_breaking(&connection));
    worker.closing.is_closing = true;
    tl_data_connection_end(&connection);
}
END_TEST

/* One failed attempt may have a reason that passes. Two in a row are judged, and after a break they count anew. */
START_TEST(attempts_are_judged)
{
    begin(OURS, false);
    for (unsigned i = 0; i < 2; i++) {
        ck_assert(!tl_data_connection_is_judged(&connection));
        hear(TL_CONNECTION_MESSAGE_REFUSAL, connection.attempt, false, "no");
        check_calls("open abandon changed");
        ck_assert_int_eq(tl_data_connection_is_judged(&connection), i == 1);
        fake_clock_advance(TL_NS_PER_SEC);
        tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0});
    }
    ck_assert(tl_data_connection_is_judged(&connection)); /* the reason is that of the attempt before */
    bring_up_ours();
    session_closed(&connection, &(struct tl_error){.code = TL_UNAVAILABLE, .message = "why"});
    check_calls("refuse changed");
    ck_assert(!tl_data_connection_is_judged(&connection));
    worker.closing.is_closing = true;
    tl_data_connection_end(&connection);
}
END_TEST

START_TEST(their_link)
{
    begin(THEIRS, false);
    check_calls("");
    ck_assert_int_eq(tl_data_connection_use(&connection), TL_DATA_CONNECTION_AWAIT);
    hear(TL_CONNECTION_MESSAGE_OFFER, 5, false, "");
    check_calls("open");
    address_ready(&connection, (const uint8_t *)"address", 7);
    check_calls("answer");
    ck_assert_uint_eq(sent.attempt, 5);
    session_up(&connection);
    check_calls("changed");
    hear(TL_CONNECTION_MESSAGE_REFUSAL, 6, false, "another");
    check_calls("");
    hear(TL_CONNECTION_MESSAGE_REFUSAL, 5, false, IT_SHUTS_DOWN);
    check_calls("abandon changed");
    ck_assert_int_eq(connection.state, EXPECTING);
    ck_assert(connection.is_left);
}
END_TEST

/* The peer goes over to another link: the first failure is none, the second is. */
START_TEST(their_link_passes)
{
    begin(THEIRS, true);
    hear(TL_CONNECTION_MESSAGE_OFFER, 5, false, "");
    hear(TL_CONNECTION_MESSAGE_REFUSAL, 5, false, "gone");
    check_calls("open abandon changed");
    ck_assert_int_eq(connection.state, EXPECTING);
    ck_assert(is_armed());
    ck_assert_int_eq(tl_data_connection_use(&connection), TL_DATA_CONNECTION_AWAIT);
    hear(TL_CONNECTION_MESSAGE_OFFER, 6, false, "");
    hear(TL_CONNECTION_MESSAGE_REFUSAL, 6, false, "gone");
    check_calls("open abandon changed");
    ck_assert(!is_armed());
    ck_assert_int_eq(tl_data_connection_use(&connection), TL_DATA_CONNECTION_AVOID);
}
END_TEST

START_TEST(final_failures)
{
    begin(OURS, false);
    hear(TL_CONNECTION_MESSAGE_REFUSAL, connection.attempt, true, "");
    check_calls("open abandon changed");
    ck_assert_int_eq(connection.state, REFUSED);
    ck_assert_str_eq(connection.reason, "/job:ps/task:1 refuses the data connection: it gives no reason");
    tl_data_connection_end(&connection);
    open_status = TL_FAILED_PRECONDITION;
    begin(THEIRS, false);
    hear(TL_CONNECTION_MESSAGE_OFFER, 5, false, "");
    check_calls("open refuse changed");
    ck_assert(sent.is_final);
    ck_assert_int_eq(connection.state, REFUSED);
    tl_data_connection_end(&connection);
    open_status = TL_RESOURCE_EXHAUSTED;
    begin(OURS, false);
    check_calls("open changed");
    ck_assert_int_eq(connection.state, BACK_OFF);
    tl_data_connection_end(&connection);
    open_status = TL_OK;
    connect_status = TL_INVALID_ARGUMENT;
    begin(OURS, false);
    address_ready(&connection, (const uint8_t *)"address", 7);
    hear(TL_CONNECTION_MESSAGE_ANSWER, connection.attempt, false, "");
    check_calls("open offer connect refuse abandon changed");
    ck_assert_int_eq(connection.state, BACK_OFF);
    tl_data_connection_end(&connection);
    begin(OURS, false);
    worker.closing.is_closing = true;
    session_closed(&connection, &(struct tl_error){.code = TL_OK});
    check_calls("open refuse changed");
    ck_assert_str_eq(sent.reason, IT_SHUTS_DOWN);
    ck_assert_int_eq(connection.state, REFUSED);
}
END_TEST

/* Messages that the peer may not send never reach the table. */
START_TEST(offers_that_are_refused)
{
    begin(OURS, false);
    check_calls("open");
    hear(TL_CONNECTION_MESSAGE_OFFER, 5, false, "");
    check_calls("refuse");
    tl_data_connection_end(&connection);
    check_calls("abandon");
    begin(THEIRS, false);
    hear(TL_CONNECTION_MESSAGE_OFFER, 0, false, "");
    check_calls("refuse");
    worker.closing.is_closing = true;
    hear(TL_CONNECTION_MESSAGE_OFFER, 5, false, "");
    check_calls("");
    tl_data_connection_end(&connection);
    worker.closing.is_closing = false;
    slot.transport = NULL;
    slot.reason = "no card";
    tl_data_connection_begin(&connection, &link_in_use, false);
    ck_assert_int_eq(connection.state, REFUSED);
    hear(TL_CONNECTION_MESSAGE_OFFER, 5, false, "");
    check_calls("refuse");
    ck_assert(sent.is_final);
    ck_assert_str_eq(sent.reason, "no card");
    tl_data_connection_handle_message(&connection, NULL, &sent);
    check_calls("");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("data_connection");
    TCase *tcase = tcase_create("data_connection");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_loop_test(tcase, each_edge, 0, TL_ARRAY_COUNT(edges));
    tcase_add_test(tcase, no_other_edge);
    tcase_add_test_raise_signal(tcase, forbidden_edge, SIGABRT);
    tcase_add_test(tcase, our_link);
    tcase_add_test(tcase, timers_need_no_memory);
    tcase_add_test(tcase, log_says_that_it_is_up_again);
    tcase_add_test(tcase, breaks_again_and_again);
    tcase_add_test(tcase, attempts_are_judged);
    tcase_add_test(tcase, their_link);
    tcase_add_test(tcase, their_link_passes);
    tcase_add_test(tcase, final_failures);
    tcase_add_test(tcase, offers_that_are_refused);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
