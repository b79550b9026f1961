// SPDX-License-Identifier: Apache-2.0
/* The states of a session: every edge of the table, every event that it leaves out, and how a session ends. The
 * reactor, the engine and the owner are fakes. */
#include <check.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"

#undef fail /* check.h has a macro of this name */
#include "server/peers/session.c"
#include "server/peers/session_requests.c"
#include "fakes/calls.h"
#include "fakes/run_suite.h"

static struct tl_worker worker;
static struct tl_transport transport;
static struct tl_list to_reactor, to_loop; /* closures that were posted and have not run */
static struct tl_session *session;
static struct tl_error error;
static int the_conn; /* stands for a connection */
static void *conn_owner;
static enum tl_status create_status, connect_status;

/* ------------------------------------------------------------------------------------------------------- fakes -- */

enum tl_status tl_conn_check_address(const struct tl_provider *provider, const struct tl_identity *peer,
                                     const uint8_t *bytes, uint32_t len_bytes, struct tl_error *ret_error)
{
    (void)provider, (void)peer, (void)bytes, (void)len_bytes, (void)ret_error;
    return TL_OK;
}

enum tl_status tl_conn_create(struct tl_engine *engine, struct tl_memory *memory, const struct tl_identity *peer,
                              uint64_t self_incarnation, bool is_opener, const struct tl_conn_events *events,
                              void *owner, struct tl_conn **ret_conn, struct tl_error *ret_error)
{
    (void)engine, (void)memory, (void)peer, (void)self_incarnation, (void)is_opener, (void)events;
    if (create_status != TL_OK) return tl_error_set(ret_error, create_status, "no connection");
    conn_owner = owner;
    *ret_conn = (struct tl_conn *)&the_conn;
    return TL_OK;
}

uint32_t tl_conn_get_address(const struct tl_conn *conn, uint8_t *ret_bytes)
{
    (void)conn;
    *ret_bytes = 7;
    return 1;
}

enum tl_status tl_conn_connect(struct tl_conn *conn, const uint8_t *bytes, uint32_t len_bytes,
                               struct tl_error *ret_error)
{
    (void)conn, (void)bytes, (void)len_bytes;
    note("connect");
    return connect_status == TL_OK ? TL_OK : tl_error_set(ret_error, connect_status, "no");
}

void *tl_conn_owner(const struct tl_conn *conn)
{
    (void)conn;
    return conn_owner;
}

const struct tl_conn_measures *tl_conn_measured(const struct tl_conn *conn)
{
    static const struct tl_conn_measures measures = {.latency_ns = 5, .most_unconfirmed = 5000};
    (void)conn;
    return &measures;
}

bool tl_conn_is_up(const struct tl_conn *conn)
{
    (void)conn;
    return true;
}

void tl_conn_fetch(struct tl_conn *conn, struct tl_fetch *fetch)
{
    (void)conn, (void)fetch;
    note("fetch");
}

void tl_conn_cancel(struct tl_conn *conn, struct tl_fetch *fetch)
{
    (void)conn, (void)fetch;
    note("cancel");
}

void tl_conn_drain(struct tl_conn *conn)
{
    (void)conn;
    note("drain");
}

void tl_conn_close(struct tl_conn *conn, const struct tl_error *reason)
{
    (void)conn, (void)reason;
    note("close");
}

void tl_engine_make_memory(struct tl_engine *engine, struct tl_memory_making *making)
{
    (void)engine;
    making->post(making->context, &making->closure);
}

void tl_transport_session_gone(struct tl_transport *gone)
{
    ck_assert_ptr_eq(gone, &transport);
    note("freed");
}

struct tl_peer *tl_peer_by_name(const struct tl_worker *of, const char *name)
{
    (void)of, (void)name;
    return NULL;
}

void tl_peer_answered(struct tl_peer *peer, uint64_t incarnation, uint64_t number)
{
    (void)peer, (void)incarnation, (void)number;
    note("answered");
}

static void post_to_reactor_list(const struct tl_executor *executor, struct tl_closure *closure)
{
    (void)executor;
    tl_list_push_back(&to_reactor, &closure->link);
}

void tl_transport_send(struct tl_transport *to, struct tl_closure *closure)
{
    ck_assert_ptr_eq(to, &transport);
    tl_list_push_back(&to_reactor, &closure->link);
}

void tl_transport_send_back(struct tl_transport *from, struct tl_closure *closure)
{
    ck_assert_ptr_eq(from, &transport);
    tl_list_push_back(&to_loop, &closure->link);
}

static void run_all(struct tl_list *list)
{
    TL_LIST_FOREACH_SAFE(list, place)
    {
        struct tl_closure *closure = TL_CONTAINER_OF(place, struct tl_closure, link);
        tl_list_remove(place);
        closure->run(closure);
    }
}

/* Runs closures on both sides until none is left. */
static void run(void)
{
    while (!tl_list_is_empty(&to_reactor) || !tl_list_is_empty(&to_loop)) {
        run_all(&to_reactor);
        run_all(&to_loop);
    }
}

static void owner_address_ready(void *owner, const uint8_t *bytes, uint32_t len_bytes)
{
    ck_assert_ptr_eq(owner, &worker);
    ck_assert(len_bytes == 1 && bytes[0] == 7);
    note("address");
}

static void owner_up(void *owner)
{
    ck_assert_ptr_eq(owner, &worker);
    note("up");
}

static void owner_closed(void *owner, const struct tl_error *reason)
{
    ck_assert_ptr_eq(owner, &worker);
    note("closed:");
    note(reason->message);
}

static const struct tl_session_events owner_events = {
    .address_ready = owner_address_ready, .up = owner_up, .closed = owner_closed};

static void open_session(bool is_opener)
{
    static const struct tl_identity peer = {.name = "/job:ps/task:0", .incarnation = 3};
    static const uint8_t offer[] = {9};
    ck_assert_int_eq(tl_session_open(&transport, &peer, is_opener ? NULL : offer, is_opener ? 0 : 1, &owner_events,
                                     &worker, &session, &error),
                     TL_OK);
}

static void setup(void)
{
    tl_list_init(&to_reactor);
    tl_list_init(&to_loop);
    tl_list_init(&transport.sessions);
    transport.worker = &worker;
    transport.executor.post = post_to_reactor_list;
}

/* ------------------------------------------------------------------------------------------------------- edges -- */

/* The names of what an edge posts to the reactor. */
static const char *posted(void)
{
    struct tl_closure *closure = TL_CONTAINER_OF(to_reactor.next, struct tl_closure, link);
    return closure->run == connect_now ? "connect" : closure->run == drain ? "drain" : "end";
}

struct edge {
    enum session_state from;
    enum session_event event;
    enum session_state to;
    const char *calls;  /* what the owner and the transport are called for */
    const char *posted; /* NULL: nothing */
};

static const struct edge edges[] = {
    {SESSION_CREATING, SESSION_EVENT_CREATED, SESSION_CREATED, "address", NULL},
    {SESSION_CREATING, SESSION_EVENT_ACCEPTED, SESSION_CONNECTING, "address", NULL},
    {SESSION_CREATING, SESSION_EVENT_FAILED, SESSION_OVER, "closed: why", NULL},
    {SESSION_CREATING, SESSION_EVENT_DRAIN, SESSION_ENDING, "", "end"},
    {SESSION_CREATING, SESSION_EVENT_END, SESSION_ENDING, "", "end"},
    {SESSION_CREATED, SESSION_EVENT_CONNECT, SESSION_CONNECTING, "", "connect"},
    {SESSION_CREATED, SESSION_EVENT_CLOSED, SESSION_OVER, "closed: why", NULL},
    {SESSION_CREATED, SESSION_EVENT_DRAIN, SESSION_ENDING, "", "end"},
    {SESSION_CREATED, SESSION_EVENT_END, SESSION_ENDING, "", "end"},
    {SESSION_CONNECTING, SESSION_EVENT_UP, SESSION_UP, "up", NULL},
    {SESSION_CONNECTING, SESSION_EVENT_CLOSED, SESSION_OVER, "closed: why", NULL},
    {SESSION_CONNECTING, SESSION_EVENT_RETURNED, SESSION_CONNECTING, "", NULL},
    {SESSION_CONNECTING, SESSION_EVENT_DRAIN, SESSION_ENDING, "", "end"},
    {SESSION_CONNECTING, SESSION_EVENT_END, SESSION_ENDING, "", "end"},
    {SESSION_UP, SESSION_EVENT_CLOSED, SESSION_OVER, "closed: why", NULL},
    {SESSION_UP, SESSION_EVENT_RETURNED, SESSION_UP, "", NULL},
    {SESSION_UP, SESSION_EVENT_DRAIN, SESSION_DRAINING, "", "drain"},
    {SESSION_UP, SESSION_EVENT_END, SESSION_ENDING, "", "end"},
    {SESSION_DRAINING, SESSION_EVENT_CLOSED, SESSION_OVER, "closed: why", NULL},
    {SESSION_DRAINING, SESSION_EVENT_RETURNED, SESSION_DRAINING, "", NULL},
    {SESSION_DRAINING, SESSION_EVENT_END, SESSION_ENDING, "", "end"},
    {SESSION_ENDING, SESSION_EVENT_CREATED, SESSION_ENDING, "address", NULL},
    {SESSION_ENDING, SESSION_EVENT_ACCEPTED, SESSION_ENDING, "address", NULL},
    {SESSION_ENDING, SESSION_EVENT_FAILED, SESSION_OVER, "closed: why", NULL},
    {SESSION_ENDING, SESSION_EVENT_UP, SESSION_ENDING, "", NULL},
    {SESSION_ENDING, SESSION_EVENT_CLOSED, SESSION_OVER, "closed: why", NULL},
    {SESSION_ENDING, SESSION_EVENT_RETURNED, SESSION_ENDING, "", NULL},
    {SESSION_ENDING, SESSION_EVENT_CONNECT, SESSION_ENDING, "", NULL},
    {SESSION_ENDING, SESSION_EVENT_DRAIN, SESSION_ENDING, "", NULL},
    {SESSION_ENDING, SESSION_EVENT_END, SESSION_ENDING, "", NULL},
    {SESSION_OVER, SESSION_EVENT_RETURNED, SESSION_OVER, "", NULL},
    {SESSION_OVER, SESSION_EVENT_DRAIN, SESSION_OVER, "", NULL},
    {SESSION_OVER, SESSION_EVENT_END, SESSION_OVER, "", NULL},
};

/* One closure stays out, so that the session is not freed. */
START_TEST(each_edge)
{
    const struct edge *edge = &edges[_i];
    const struct tl_error why = {.code = TL_UNAVAILABLE, .message = "why"};
    open_session(true);
    tl_list_init(&to_reactor);
    session->state = edge->from;
    session->len_bytes = 1;
    session->bytes[0] = 7;
    session_handle(session, edge->event, &why);
    ck_assert_int_eq(session->state, edge->to);
    check_calls(edge->calls);
    ck_assert_int_eq(tl_list_is_empty(&to_reactor), edge->posted == NULL);
    if (edge->posted != NULL) {
        ck_assert_str_eq(posted(), edge->posted);
        ck_assert_uint_eq(session->closures_out, 2);
    }
    free(session);
}
END_TEST

START_TEST(no_other_edge)
{
    bool is_listed[SESSION_STATES][SESSION_EVENTS] = {{false}};
    for (size_t i = 0; i < TL_ARRAY_COUNT(edges); i++)
        is_listed[edges[i].from][edges[i].event] = true;
    for (unsigned from = 0; from < SESSION_STATES; from++) {
        for (unsigned event = 0; event < SESSION_EVENTS; event++)
            ck_assert_int_eq(transitions[from][event].next != SESSION_NEVER, is_listed[from][event]);
    }
}
END_TEST

START_TEST(forbidden_edge)
{
    open_session(true);
    session_handle(session, SESSION_EVENT_UP, NULL);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- lives -- */

static void bring_up(bool is_opener)
{
    open_session(is_opener);
    run();
    if (is_opener) {
        check_calls("address");
        ck_assert_int_eq(tl_session_connect(session, (const uint8_t *)"a", 1, &error), TL_OK);
        run();
        check_calls("connect");
    } else {
        check_calls("connect address");
    }
    ck_assert_uint_eq(tl_session_measures(session)->latency_ns, 0);
    conn_up((struct tl_conn *)&the_conn);
    run();
    check_calls("up");
    ck_assert_uint_eq(tl_session_measures(session)->latency_ns, 5);
}

START_TEST(opened_and_closed)
{
    const struct tl_error why = {.code = TL_UNAVAILABLE, .message = "why"};
    bring_up(_i == 0);
    conn_closed((struct tl_conn *)&the_conn, &why);
    run();
    check_calls("closed: why freed");
}
END_TEST

/* The reactor hears of the end before it has the memory to make the connection. */
START_TEST(abandoned_before_it_exists)
{
    const struct tl_error why = {.code = TL_UNAVAILABLE, .message = "why"};
    open_session(true);
    struct tl_list *place = to_reactor.next;
    tl_list_remove(place);
    tl_session_abandon(session, &why);
    run();
    tl_list_push_back(&to_reactor, place);
    run();
    check_calls("close");
    conn_closed((struct tl_conn *)&the_conn, &why);
    run();
    check_calls("freed");
}
END_TEST

START_TEST(could_not_be_made)
{
    create_status = TL_RESOURCE_EXHAUSTED;
    open_session(true);
    run();
    check_calls("closed: no connection freed");
}
END_TEST

/* The side that accepts gets no address when it cannot connect. */
START_TEST(could_not_connect)
{
    const struct tl_error why = {.code = TL_UNAVAILABLE, .message = "why"};
    connect_status = TL_FAILED_PRECONDITION;
    open_session(false);
    run();
    check_calls("connect close");
    conn_closed((struct tl_conn *)&the_conn, &why);
    run();
    check_calls("closed: why freed");
}
END_TEST

START_TEST(drained_and_closed)
{
    const struct tl_error ok = {.code = TL_OK};
    const struct tl_error why = {.code = TL_UNAVAILABLE, .message = "why"};
    bring_up(true);
    tl_sessions_drain(&transport);
    run();
    check_calls("drain");
    tl_sessions_close(&transport, &why);
    tl_sessions_close(&transport, &why);
    run();
    check_calls("close");
    conn_closed((struct tl_conn *)&the_conn, &ok);
    run();
    check_calls("closed:  freed");
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- requests -- */

static void request_done(struct tl_fetch *fetch, const struct tl_error *result)
{
    (void)fetch;
    note("done:");
    note(result->message);
}

static const struct tl_request_ops request_ops = {.on_loop = {.done = request_done},
                                                  .on_reactor = {.done = tl_session_fetch_done}};

/* A session lives until its last request is done. */
START_TEST(requests_keep_it)
{
    const struct tl_error why = {.code = TL_UNAVAILABLE, .message = "why"};
    struct tl_peer_request request = {.fetch = {.ops = &request_ops.on_loop, .number = 4}};
    const uint64_t *numbers;
    bring_up(true);
    tl_session_fetch(session, &request);
    run();
    check_calls("fetch");
    tl_session_cancel(&request);
    conn_closed((struct tl_conn *)&the_conn, &why);
    run_all(&to_loop);
    check_calls("closed: why");
    request.fetch.ops->done(&request.fetch, &why);
    run_all(&to_loop);
    check_calls("");
    run();
    check_calls("done: why freed");
    bring_up(true);
    tl_session_fetch(session, &request);
    run();
    request.fetch.ops->done(&request.fetch, &(struct tl_error){.code = TL_OK});
    run();
    check_calls("fetch done: ");
    ck_assert_uint_eq(tl_session_unconfirmed(session, &numbers), 1);
    ck_assert_uint_eq(numbers[0], 4);
    conn_closed((struct tl_conn *)&the_conn, &why);
    run();
    check_calls("closed: why freed");
}
END_TEST

/* The session remembers as many answers as the owner may not know of, and not all that there were. */
START_TEST(answers_are_remembered)
{
    const struct tl_error ok = {.code = TL_OK};
    struct tl_peer_request request = {.fetch = {.ops = &request_ops.on_loop, .key = "key"}};
    const uint64_t *numbers;
    bring_up(true);
    for (request.fetch.number = 1; request.fetch.number <= 5003; request.fetch.number++) {
        tl_session_fetch(session, &request);
        run();
        request.fetch.ops->done(&request.fetch, &ok);
        run();
        check_calls("fetch done: ");
    }
    ck_assert_uint_eq(tl_session_unconfirmed(session, &numbers), 5000);
    ck_assert_uint_eq(numbers[0], 4);
    ck_assert_uint_eq(numbers[4999], 5003);
    conn_closed((struct tl_conn *)&the_conn, &ok);
    run();
    check_calls("closed:  freed");
}
END_TEST

/* One closure takes a request there, a cancel after it, and comes back: a cancel that comes before, between and after
 * the others. */
START_TEST(requests_are_given_up)
{
    const struct tl_error given_up = {.code = TL_CANCELLED, .message = "given up"}, ok = {.code = TL_OK};
    struct tl_peer_request request = {.fetch = {.ops = &request_ops.on_loop, .key = "key", .number = 4}};
    bring_up(true);
    tl_session_fetch(session, &request);
    tl_session_cancel(&request);
    tl_session_cancel(&request);
    run();
    check_calls("done: key was given up");
    tl_session_fetch(session, &request);
    run();
    tl_session_cancel(&request);
    tl_session_cancel(&request);
    run();
    check_calls("fetch cancel");
    tl_session_cancel(&request);
    ck_assert(tl_list_is_empty(&to_reactor));
    request.fetch.ops->done(&request.fetch, &given_up);
    tl_session_cancel(&request);
    run();
    check_calls("done: given up");
    tl_session_fetch(session, &request);
    run();
    request.fetch.ops->done(&request.fetch, &ok);
    tl_session_cancel(&request);
    ck_assert(tl_list_is_empty(&to_reactor));
    run();
    check_calls("fetch done: ");
    ck_assert_ptr_eq(request.fetch.ops, &request_ops.on_loop);
    conn_closed((struct tl_conn *)&the_conn, &given_up);
    run();
    check_calls("closed: given up freed");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("session");
    TCase *tcase = tcase_create("session");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_loop_test(tcase, each_edge, 0, TL_ARRAY_COUNT(edges));
    tcase_add_test(tcase, no_other_edge);
    tcase_add_test_raise_signal(tcase, forbidden_edge, SIGABRT);
    tcase_add_loop_test(tcase, opened_and_closed, 0, 2);
    tcase_add_test(tcase, abandoned_before_it_exists);
    tcase_add_test(tcase, could_not_be_made);
    tcase_add_test(tcase, could_not_connect);
    tcase_add_test(tcase, drained_and_closed);
    tcase_add_test(tcase, requests_keep_it);
    tcase_add_test(tcase, requests_are_given_up);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("answers_are_remembered");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, answers_are_remembered);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
