// SPDX-License-Identifier: Apache-2.0
/* Requests that wait for a peer: how many of them are sent in one round of the loop. Links, data connections and the
 * loop are fakes. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>

#undef fail /* check.h has a macro of this name */
#include "base/error.h"
#include "server/peers/peer_internal.h"
#include "server/peers/prober.h"
#include "server/peers/session.h"
#include "fakes/run_suite.h"

#define MANY 1300
#define ROUND_REQUESTS 512 /* as in server/peers/peer.c */

struct tl_link {
    bool is_up;
};

static struct tl_worker worker;
static struct tl_peer *peer;
static struct tl_list deferred;
static struct tl_link link;
static const struct tl_data_connection_events *path_events;
static bool is_path_coming; /* a data connection is being set up */
static struct tl_peer_request requests[MANY + 1];
static const struct tl_request_ops request_ops;
static struct tl_fetch *sent[MANY + 1];
static size_t sent_count;

/* ------------------------------------------------------------------------------------------------------- fakes -- */

struct tl_timers *tl_loop_timers(struct tl_loop *loop)
{
    (void)loop;
    static struct tl_timers timers;
    return &timers;
}

void tl_loop_defer(struct tl_loop *loop, struct tl_closure *closure)
{
    (void)loop;
    ck_assert(!tl_list_is_linked(&closure->link));
    tl_list_push_back(&deferred, &closure->link);
}

bool tl_link_is_up(const struct tl_link *of)
{
    return of->is_up;
}

const struct tl_identity *tl_link_peer(const struct tl_link *of)
{
    (void)of;
    static const struct tl_identity identity;
    return &identity;
}

void tl_link_fetch(struct tl_link *on, struct tl_fetch *fetch)
{
    ck_assert_ptr_eq(on, &link);
    sent[sent_count++] = fetch;
}

bool tl_link_cancel(struct tl_link *on, struct tl_fetch *fetch)
{
    (void)on, (void)fetch;
    return true;
}

enum tl_status tl_data_connections_init(struct tl_data_connections *connections, struct tl_worker *of, const char *name,
                                        const struct tl_data_connection_events *events, void *owner)
{
    (void)connections, (void)of, (void)name, (void)owner;
    path_events = events;
    return TL_OK;
}

void tl_data_connections_fini(struct tl_data_connections *connections)
{
    (void)connections;
}

void tl_data_connections_end(struct tl_data_connections *connections)
{
    (void)connections;
}

enum tl_data_connection_use tl_data_connections_use(const struct tl_data_connections *connections,
                                                    const struct tl_data_connection **ret_connection)
{
    (void)connections, (void)ret_connection;
    return is_path_coming ? TL_DATA_CONNECTION_AWAIT : TL_DATA_CONNECTION_AVOID;
}

const struct tl_data_connection *tl_data_connections_best(const struct tl_data_connections *connections)
{
    (void)connections;
    return NULL;
}

bool tl_data_connections_are_judged(const struct tl_data_connections *connections)
{
    (void)connections;
    return false;
}

const char *tl_data_connections_lasting_reason(struct tl_data_connections *connections)
{
    (void)connections;
    return "";
}

void tl_session_fetch(struct tl_session *session, struct tl_peer_request *request)
{
    (void)session, (void)request;
    ck_abort_msg("there is no session");
}

void tl_session_cancel(struct tl_peer_request *request)
{
    (void)request;
    ck_abort_msg("there is no session");
}

void tl_transports_require(const struct tl_worker *of, enum tl_status code, const char *where, const char *reasons,
                           struct tl_error *ret_error)
{
    (void)of, (void)where, (void)reasons;
    tl_error_set(ret_error, code, "required");
}

enum tl_status tl_peer_link_init(struct tl_peer *of)
{
    (void)of;
    return TL_OK;
}

void tl_peer_link_fini(struct tl_peer *of)
{
    (void)of;
}

const struct tl_data_connections *tl_client_peers_find_data(const struct tl_worker *of,
                                                            const struct tl_identity *caller, uint64_t incarnation)
{
    (void)of, (void)caller, (void)incarnation;
    return NULL;
}

const struct tl_data_connections *tl_data_connections_sooner(const struct tl_data_connections *first,
                                                             const struct tl_data_connections *second)
{
    (void)second;
    return first;
}

void tl_put_fetches_go_on(struct tl_worker *of)
{
    (void)of;
}

void tl_peer_calls_go_on(struct tl_peer *of)
{
    (void)of;
}

void tl_peer_calls_init(struct tl_peer *of)
{
    tl_list_init(&of->links.calls.waiting);
    tl_list_init(&of->links.calls.round_closure.link);
}

void tl_peer_want(struct tl_peer *wanted)
{
    ck_assert_ptr_eq(wanted, peer);
}

void tl_peer_acknowledge(struct tl_peer *of)
{
    (void)of;
}

void tl_peer_remember_received(struct tl_peer *of, const uint64_t *numbers, size_t count)
{
    (void)of, (void)numbers, (void)count;
}

void tl_peer_check_waits(struct tl_worker *of)
{
    (void)of;
}

enum tl_status tl_admission_init(struct tl_worker *of, struct tl_error *ret_error)
{
    (void)of, (void)ret_error;
    return TL_OK;
}

void tl_peer_retain(struct tl_peer *peer)
{
    (void)peer;
}

void tl_added_peers_destroy(struct tl_worker *of)
{
    tl_added_peers_fini(&of->members.added);
}

void tl_admission_fini(struct tl_worker *of)
{
    (void)of;
}

enum tl_status tl_origin_init(struct tl_origin *origin, const char *address, struct tl_error *ret_error)
{
    (void)origin, (void)address, (void)ret_error;
    return TL_OK;
}

void tl_origin_fini(struct tl_origin *origin)
{
    (void)origin;
}

void tl_prober_stop(struct tl_worker *of)
{
    (void)of;
}

void tl_prober_fini(struct tl_worker *of)
{
    (void)of;
}

/* ------------------------------------------------------------------------------------------------------- tests -- */

static struct tl_config_task task = {.name = "/job:ps/task:1", .address = "127.0.0.1:1"};
static struct tl_config config = {.tasks = &task, .task_count = 1};

static void setup(void)
{
    struct tl_error error;
    tl_list_init(&deferred);
    worker.setup.config = &config;
    snprintf(worker.self.name, sizeof(worker.self.name), "/job:ps/task:0");
    ck_assert_int_eq(tl_peers_create(&worker, &error), TL_OK);
    peer = worker.members.peers[0];
    link.is_up = true;
    for (size_t i = 0; i < TL_ARRAY_COUNT(requests); i++) {
        tl_peer_request_init(&requests[i], &request_ops);
        requests[i].fetch.key = "w";
    }
}

static void teardown(void)
{
    peer->links.link = NULL;
    tl_peers_destroy(&worker);
    ck_assert(tl_list_is_empty(&deferred));
}

static void wait_for_peer(size_t count)
{
    for (size_t i = 0; i < count; i++)
        tl_peer_fetch(peer, &requests[i]);
}

/* Runs what was deferred, as the loop does at the end of a round. */
static void run_round(void)
{
    struct tl_list batch;
    struct tl_list *place;
    tl_list_init(&batch);
    tl_list_splice_back(&batch, &deferred);
    while ((place = tl_list_pop_front(&batch)) != NULL) {
        struct tl_closure *closure = TL_CONTAINER_OF(place, struct tl_closure, link);
        closure->run(closure);
    }
}

static void check_sent(size_t count)
{
    ck_assert_uint_eq(sent_count, count);
    for (size_t i = 0; i < count; i++)
        ck_assert_ptr_eq(sent[i], &requests[i].fetch);
}

/* What waits when the link comes up is sent in rounds, in its order; what is asked meanwhile goes behind it. */
START_TEST(a_link_comes_up)
{
    wait_for_peer(MANY);
    check_sent(0);
    peer->links.link = &link;
    tl_peer_send_waiting(peer);
    check_sent(ROUND_REQUESTS);
    tl_peer_fetch(peer, &requests[MANY]);
    tl_peer_send_waiting(peer);
    check_sent(ROUND_REQUESTS);
    run_round();
    check_sent((size_t)2 * ROUND_REQUESTS);
    run_round();
    check_sent(MANY + 1);
    ck_assert(tl_list_is_empty(&deferred));
}
END_TEST

START_TEST(as_many_as_a_round_takes)
{
    wait_for_peer(ROUND_REQUESTS);
    peer->links.link = &link;
    tl_peer_send_waiting(peer);
    check_sent(ROUND_REQUESTS);
    ck_assert(tl_list_is_empty(&deferred));
}
END_TEST

/* The rest waits for the next link, which sends it without a round of the one before. */
START_TEST(the_link_ends_between_rounds)
{
    wait_for_peer(MANY);
    peer->links.link = &link;
    tl_peer_send_waiting(peer);
    peer->links.link = NULL;
    run_round();
    check_sent(ROUND_REQUESTS);
    ck_assert(tl_list_is_empty(&deferred));
    peer->links.link = &link;
    tl_peer_send_waiting(peer);
    check_sent((size_t)2 * ROUND_REQUESTS);
    run_round();
    check_sent(MANY);
}
END_TEST

START_TEST(a_data_connection_is_awaited)
{
    is_path_coming = true;
    peer->links.link = &link;
    wait_for_peer(MANY);
    check_sent(0);
    is_path_coming = false;
    path_events->changed(peer);
    check_sent(ROUND_REQUESTS);
    run_round();
    run_round();
    check_sent(MANY);
}
END_TEST

/* Requests that are cancelled between two rounds are not sent; the round that is due ends with the peer. */
START_TEST(cancelled_between_rounds)
{
    wait_for_peer(MANY);
    peer->links.link = &link;
    tl_peer_send_waiting(peer);
    for (size_t i = ROUND_REQUESTS; i < MANY; i++)
        ck_assert(tl_peer_cancel(&requests[i]));
    ck_assert(!tl_list_is_empty(&deferred));
    check_sent(ROUND_REQUESTS);
}
END_TEST

/* A case of its own for each test, so that tests/defects can run it alone. */
static void add(Suite *suite, const char *name, const TTest *test)
{
    TCase *tcase = tcase_create(name);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, test);
    suite_add_tcase(suite, tcase);
}

int main(void)
{
    Suite *suite = suite_create("peer");
    add(suite, "a_link_comes_up", a_link_comes_up);
    add(suite, "as_many_as_a_round_takes", as_many_as_a_round_takes);
    add(suite, "the_link_ends_between_rounds", the_link_ends_between_rounds);
    add(suite, "a_data_connection_is_awaited", a_data_connection_is_awaited);
    add(suite, "cancelled_between_rounds", cancelled_between_rounds);
    return run_suite(suite);
}
