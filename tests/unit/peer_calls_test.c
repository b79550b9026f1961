// SPDX-License-Identifier: Apache-2.0
/* Which link calls at a peer take, and how many run at a time. */
#include <check.h>
#include <string.h>

#include "server/peers/peer_calls.c"
#include "fakes/run_suite.h"

#define MANY 20

struct tl_link {
    struct tl_identity identity;
    bool is_ours;
    bool is_up;
    void *owner;
};

static struct tl_worker worker;
static struct tl_peer peer;
static struct tl_link links[2];
static size_t opened_count;
static enum tl_status open_status;
static size_t wanted_count;
static enum tl_data_connection_use data_use;
static struct tl_closure *deferred;
static struct tl_call_wait waits[MANY];
static struct tl_link *ready_on[MANY];
static struct tl_error failures[MANY];

/* --------------------------------------------------------------------------------------------------------- fakes -- */

void tl_loop_defer(struct tl_loop *loop, struct tl_closure *closure)
{
    (void)loop;
    ck_assert_ptr_null(deferred);
    deferred = closure;
}

bool tl_link_is_ours(const struct tl_link *link)
{
    return link->is_ours;
}

bool tl_link_is_up(const struct tl_link *link)
{
    return link->is_up;
}

void *tl_link_owner(const struct tl_link *link)
{
    return link->owner;
}

const struct tl_identity *tl_link_peer(const struct tl_link *link)
{
    return &link->identity;
}

enum tl_status tl_link_open(struct tl_control *control, const struct tl_link_address *address, const uint64_t *again,
                            size_t again_count, const struct tl_link_events *events, void *owner,
                            struct tl_link **ret_link, struct tl_error *ret_error)
{
    (void)control, (void)again, (void)again_count, (void)events;
    ck_assert_str_eq(address->address, "host:1");
    ck_assert_str_eq(address->expected_name, "/job:a/task:0");
    ck_assert(address->is_one_way);
    opened_count++;
    if (open_status != TL_OK) return tl_error_set(ret_error, open_status, "no link");
    links[1] = (struct tl_link){.is_ours = true, .owner = owner};
    *ret_link = &links[1];
    return TL_OK;
}

enum tl_data_connection_use tl_data_connections_use(const struct tl_data_connections *connections,
                                                    const struct tl_data_connection **ret_connection)
{
    (void)connections, (void)ret_connection;
    return data_use;
}

const char *tl_data_connections_lasting_reason(struct tl_data_connections *connections)
{
    (void)connections;
    return "the reason";
}

void tl_peer_want(struct tl_peer *wanted)
{
    ck_assert_ptr_eq(wanted, &peer);
    wanted_count++;
}

/* --------------------------------------------------------------------------------------------------------- tests -- */

static void ready(struct tl_call_wait *wait, struct tl_link *link)
{
    ready_on[wait - waits] = link;
}

static void failed(struct tl_call_wait *wait, const struct tl_error *reason)
{
    failures[wait - waits] = *reason;
}

static void run_round(void)
{
    struct tl_closure *closure = deferred;
    deferred = NULL;
    if (closure != NULL) closure->run(closure);
}

static void setup(void)
{
    peer.worker = &worker;
    strcpy(peer.name, "/job:a/task:0");
    strcpy(peer.address, "host:1");
    tl_peer_calls_init(&peer);
    for (size_t i = 0; i < MANY; i++) {
        waits[i] = (struct tl_call_wait){.ready = ready, .failed = failed};
        tl_list_init(&waits[i].place);
    }
}

static void have_link(bool is_ours)
{
    links[0] = (struct tl_link){.is_ours = is_ours, .is_up = true};
    peer.links.link = &links[0];
}

static size_t count_ready(void)
{
    size_t count = 0;
    for (size_t i = 0; i < MANY; i++)
        count += ready_on[i] != NULL;
    return count;
}

START_TEST(eight_run_at_a_time)
{
    have_link(true);
    for (size_t i = 0; i < MANY; i++) {
        tl_peer_call_wait(&peer, &waits[i]);
        run_round();
    }
    ck_assert_uint_eq(count_ready(), 8);
    for (size_t i = 0; i < MANY; i++) {
        ck_assert_ptr_eq(ready_on[i], &links[0]);
        tl_peer_call_over(&peer, &waits[i]);
        run_round();
        ck_assert_uint_eq(count_ready(), i + 9 < MANY ? i + 9 : MANY);
    }
    ck_assert_uint_eq(peer.links.calls.running_count, 0);
    ck_assert_uint_eq(opened_count, 0);
}
END_TEST

START_TEST(a_peer_without_a_link_is_wanted)
{
    tl_peer_call_wait(&peer, &waits[0]);
    run_round();
    ck_assert_uint_eq(wanted_count, 1);
    ck_assert_ptr_null(ready_on[0]);
    tl_peer_call_over(&peer, &waits[0]); /* it was cancelled */
    ck_assert(tl_list_is_empty(&peer.links.calls.waiting));
    tl_peer_call_wait(&peer, &waits[1]);
    run_round();
    have_link(true);
    tl_peer_calls_go_on(&peer);
    run_round();
    ck_assert_ptr_eq(ready_on[1], &links[0]);
    ck_assert_ptr_null(ready_on[0]);
}
END_TEST

START_TEST(a_link_of_the_peer_carries_no_calls)
{
    have_link(false);
    tl_peer_call_wait(&peer, &waits[0]);
    run_round();
    tl_peer_call_wait(&peer, &waits[1]);
    run_round();
    ck_assert_uint_eq(opened_count, 1);
    ck_assert_uint_eq(count_ready(), 0);
    links[1].is_up = true;
    link_events.up(&links[1]);
    run_round();
    ck_assert_ptr_eq(ready_on[0], &links[1]);
    ck_assert_ptr_eq(ready_on[1], &links[1]);
}
END_TEST

START_TEST(calls_fail_with_the_link_that_cannot_be_opened)
{
    have_link(false);
    open_status = _i == 0 ? TL_OK : TL_RESOURCE_EXHAUSTED;
    tl_peer_call_wait(&peer, &waits[0]);
    run_round();
    const struct tl_error reason = {.code = TL_FAILED_PRECONDITION, .message = "another worker"};
    if (_i == 0) link_events.closed(&links[1], &reason);
    ck_assert_int_eq(failures[0].code, _i == 0 ? TL_UNAVAILABLE : TL_RESOURCE_EXHAUSTED);
    ck_assert_str_eq(failures[0].message, _i == 0 ? "another worker" : "no link");
    ck_assert(tl_list_is_empty(&peer.links.calls.waiting));
    ck_assert_ptr_null(peer.links.calls.link);
    open_status = TL_OK;
    tl_peer_call_wait(&peer, &waits[0]);
    run_round();
    ck_assert_uint_eq(opened_count, 2);
}
END_TEST

/* Calls that wait when a link that was up ends have another one opened. */
START_TEST(a_link_that_was_up_is_opened_again)
{
    have_link(false);
    tl_peer_call_wait(&peer, &waits[0]);
    run_round();
    links[1].is_up = true;
    links[1].identity.incarnation = 7;
    const struct tl_error reason = {.code = TL_OK};
    link_events.closed(&links[1], &reason);
    run_round();
    ck_assert_uint_eq(opened_count, 2);
    ck_assert_int_eq(failures[0].code, TL_OK);
}
END_TEST

/* A put waits for the first data connection to a peer that can fetch it; other calls pass it. */
START_TEST(a_put_awaits_the_data_connection)
{
    const char *reason = NULL;
    have_link(true);
    links[0].identity.fetches_puts = _i == 0;
    data_use = TL_DATA_CONNECTION_AWAIT;
    ck_assert_int_eq(tl_peer_put_use(&peer, &reason), _i == 0 ? TL_DATA_CONNECTION_AWAIT : TL_DATA_CONNECTION_AVOID);
    waits[0].awaits_data = true;
    tl_peer_call_wait(&peer, &waits[0]);
    run_round();
    tl_peer_call_wait(&peer, &waits[1]);
    run_round();
    ck_assert_ptr_eq(ready_on[0], _i == 0 ? NULL : &links[0]);
    ck_assert_ptr_eq(ready_on[1], &links[0]);
    data_use = TL_DATA_CONNECTION_TAKE;
    tl_peer_calls_go_on(&peer);
    run_round();
    ck_assert_ptr_eq(ready_on[0], &links[0]);
}
END_TEST

/* The link of the peer has ended, and that of the calls stays, which carries no data connection. */
START_TEST(a_put_awaits_the_link_of_its_data)
{
    const char *reason = "";
    links[1] = (struct tl_link){.is_ours = true, .is_up = true};
    peer.links.calls.link = &links[1];
    peer.links.state = TL_PEER_CONNECTING;
    waits[0].awaits_data = true;
    tl_peer_call_wait(&peer, &waits[0]);
    tl_list_push_back(&peer.links.calls.waiting, &waits[1].place);
    run_round();
    ck_assert_uint_eq(wanted_count, 1);
    ck_assert_ptr_null(ready_on[0]);
    ck_assert_ptr_eq(ready_on[1], &links[1]);
    if (_i == 0) {
        have_link(true);
        links[0].identity.fetches_puts = true;
        data_use = TL_DATA_CONNECTION_TAKE;
    } else {
        peer.links.state = TL_PEER_DOWN;
        ck_assert_int_eq(tl_peer_put_use(&peer, &reason), TL_DATA_CONNECTION_AVOID);
        ck_assert_str_eq(reason, "the link that a data connection needs has ended");
    }
    tl_peer_calls_go_on(&peer);
    run_round();
    ck_assert_ptr_eq(ready_on[0], &links[_i]);
}
END_TEST

/* The other one has come up in the meantime. */
START_TEST(calls_go_over_the_other_link)
{
    const struct tl_error reason = {.code = TL_PERMISSION_DENIED, .message = "it may not read"};
    have_link(false);
    tl_peer_call_wait(&peer, &waits[0]);
    run_round();
    have_link(true);
    link_events.closed(&links[1], &reason);
    run_round();
    ck_assert_int_eq(failures[0].code, TL_OK);
    ck_assert_ptr_eq(ready_on[0], &links[0]);
}
END_TEST

/* While the peer refuses links of this worker, calls do not wait for one. */
START_TEST(calls_fail_where_links_are_refused)
{
    peer.links.state = TL_PEER_DOWN;
    peer.links.reason = (struct tl_error){.code = TL_PERMISSION_DENIED, .message = "it may not read"};
    peer.links.back_off.heap_place = 1;
    tl_peer_call_wait(&peer, &waits[0]);
    run_round();
    ck_assert_int_eq(failures[0].code, TL_PERMISSION_DENIED);
    ck_assert_str_eq(failures[0].message, "it may not read");
    ck_assert_uint_eq(wanted_count, 0);
    peer.links.back_off.heap_place = 0;
    tl_peer_call_wait(&peer, &waits[1]);
    run_round();
    ck_assert_int_eq(failures[1].code, TL_OK);
    ck_assert_uint_eq(wanted_count, 1);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("peer_calls");
    TCase *tcase = tcase_create("links");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, a_peer_without_a_link_is_wanted);
    tcase_add_loop_test(tcase, calls_fail_with_the_link_that_cannot_be_opened, 0, 2);
    tcase_add_test(tcase, a_link_that_was_up_is_opened_again);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("a_put_awaits_the_link_of_its_data");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_loop_test(tcase, a_put_awaits_the_link_of_its_data, 0, 2);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("calls_go_over_the_other_link");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, calls_go_over_the_other_link);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("calls_fail_where_links_are_refused");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, calls_fail_where_links_are_refused);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("a_put_awaits_the_data_connection");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_loop_test(tcase, a_put_awaits_the_data_connection, 0, 2);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("eight_run_at_a_time");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, eight_run_at_a_time);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("a_link_of_the_peer_carries_no_calls");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, a_link_of_the_peer_carries_no_calls);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
