// SPDX-License-Identifier: Apache-2.0
/* The states of a peer's links: every edge of the table, every event that it leaves out, and the choice between two
 * links. Links, data connections and the rest of the worker are fakes. */
#include <check.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "fakes/fake_clock.h"
#include "fakes/full_timers.h"

#undef fail /* check.h has a macro of this name */
#include "server/peers/peer_link.c"
#include "fakes/calls.h"
#include "fakes/run_suite.h"

struct tl_link {
    struct tl_identity identity;
    bool is_ours;
    bool is_up;
};

static struct tl_worker worker;
static struct tl_peer peer;
static struct tl_timers timers;
static struct tl_link links[3];
static unsigned link_count;
static enum tl_status open_status;

/* ------------------------------------------------------------------------------------------------------- fakes -- */

struct tl_timers *tl_loop_timers(struct tl_loop *loop)
{
    (void)loop;
    return &timers;
}

enum tl_status tl_link_open(struct tl_control *control, const struct tl_link_address *address, const uint64_t *again,
                            size_t again_count, const struct tl_link_events *events, void *owner,
                            struct tl_link **ret_link, struct tl_error *ret_error)
{
    (void)control, (void)address, (void)again, (void)again_count, (void)events;
    ck_assert_ptr_eq(owner, &peer);
    note("open");
    if (open_status != TL_OK) return tl_error_set(ret_error, open_status, "no link");
    links[link_count] = (struct tl_link){.is_ours = true};
    *ret_link = &links[link_count++];
    return TL_OK;
}

void tl_link_set_events(struct tl_link *link, const struct tl_link_events *events, void *owner)
{
    (void)link, (void)events;
    ck_assert_ptr_eq(owner, &peer);
}

void *tl_link_owner(const struct tl_link *link)
{
    (void)link;
    return &peer;
}

const struct tl_identity *tl_link_peer(const struct tl_link *link)
{
    return &link->identity;
}

bool tl_link_is_up(const struct tl_link *link)
{
    return link->is_up;
}

bool tl_link_is_ours(const struct tl_link *link)
{
    return link->is_ours;
}

bool tl_link_acknowledge(struct tl_link *link, const uint64_t *numbers, size_t count)
{
    (void)link, (void)numbers, (void)count;
    return true;
}

bool tl_link_cancel_requests(struct tl_link *link, const uint64_t *numbers, size_t count)
{
    (void)link, (void)numbers, (void)count;
    return true;
}

size_t tl_link_unconfirmed(const struct tl_link *link, const uint64_t **ret_numbers)
{
    (void)link, (void)ret_numbers;
    return 0;
}

void tl_link_drain(struct tl_link *link)
{
    note(link == &links[0] ? "drain 0" : "drain 1");
}

void tl_link_close(struct tl_link *link, const struct tl_error *reason)
{
    note(link == &links[0] ? "close 0:" : "close 1:");
    note(reason->message);
}

void tl_data_connections_begin(struct tl_data_connections *connections, struct tl_link *link, bool is_being_replaced)
{
    (void)connections, (void)link;
    note(is_being_replaced ? "begin passing" : "begin");
}

void tl_data_connections_stay(struct tl_data_connections *connections)
{
    (void)connections;
    note("stay");
}

void tl_data_connections_end(struct tl_data_connections *connections)
{
    (void)connections;
    note("end");
}

void tl_data_connections_handle_message(struct tl_data_connections *connections, struct tl_link *link,
                                        const struct tl_connection_message *message)
{
    (void)connections, (void)link, (void)message;
    note("hear");
}

struct tl_peer *tl_peer_by_name(const struct tl_worker *of, const char *name)
{
    (void)of;
    return strcmp(name, peer.name) == 0 ? &peer : NULL;
}

void tl_peer_send_waiting(struct tl_peer *waiting)
{
    (void)waiting;
    note("send");
}

void tl_peer_calls_go_on(struct tl_peer *of)
{
    (void)of;
}

void tl_peer_check_waits(struct tl_worker *of)
{
    ck_assert_ptr_eq(of, &worker);
    note("check");
}

void tl_peer_retain(struct tl_peer *retained)
{
    ck_assert_ptr_eq(retained, &peer);
}

void tl_peer_release(struct tl_peer *released)
{
    ck_assert_ptr_eq(released, &peer);
}

bool tl_added_peer_knows(struct tl_peer *added, const struct tl_identity *who, struct tl_error *ret_error)
{
    (void)added, (void)who, (void)ret_error;
    return true;
}

void tl_client_peers_evict(struct tl_worker *of, const char *name, uint64_t incarnation)
{
    (void)name;
    (void)of, (void)incarnation;
}

void tl_client_peer_add(struct tl_worker *of, struct tl_link *link)
{
    (void)of, (void)link;
    note("client");
}

void tl_process_is_gone(struct tl_worker *of, uint64_t incarnation)
{
    (void)of, (void)incarnation;
    note("release");
}

static void setup(void)
{
    tl_timers_init(&timers);
    tl_list_init(&peer.requests);
    tl_list_init(&peer.links.calls.waiting);
    peer.worker = &worker;
    snprintf(peer.name, sizeof(peer.name), "/job:ps/task:1");
    snprintf(worker.self.name, sizeof(worker.self.name), "/job:ps/task:0");
    ck_assert_int_eq(tl_peer_link_init(&peer), TL_OK);
}

static void teardown(void)
{
    tl_peer_link_fini(&peer);
    tl_timers_fini(&timers);
}

/* ------------------------------------------------------------------------------------------------------- edges -- */

static const struct edge {
    enum tl_peer_state from;
    enum link_event event;
    enum tl_peer_state to;
    const char *reason; /* that is kept */
    bool is_armed;      /* another attempt follows */
    unsigned failure_count;
} edges[] = {
    {TL_PEER_IDLE, LINK_EVENT_OPENING, TL_PEER_CONNECTING, "old", false, 2},
    {TL_PEER_IDLE, LINK_EVENT_OPEN_FAILED, TL_PEER_DOWN, "why", true, 3},
    {TL_PEER_IDLE, LINK_EVENT_OPENING_ENDED, TL_PEER_DOWN, "why", true, 3},
    {TL_PEER_IDLE, LINK_EVENT_UP, TL_PEER_UP, "", false, 0},
    {TL_PEER_CONNECTING, LINK_EVENT_OPENING, TL_PEER_CONNECTING, "old", false, 2},
    {TL_PEER_CONNECTING, LINK_EVENT_OPEN_FAILED, TL_PEER_DOWN, "why", true, 3},
    {TL_PEER_CONNECTING, LINK_EVENT_OPENING_ENDED, TL_PEER_DOWN, "why", true, 3},
    {TL_PEER_CONNECTING, LINK_EVENT_UP, TL_PEER_UP, "", false, 0},
    {TL_PEER_UP, LINK_EVENT_OPENING_ENDED, TL_PEER_UP, "old", false, 2},
    {TL_PEER_UP, LINK_EVENT_RESTARTED, TL_PEER_UP, "", false, 0},
    {TL_PEER_UP, LINK_EVENT_LOST, TL_PEER_IDLE, "why", false, 2},
    {TL_PEER_UP, LINK_EVENT_LOST_WANTED, TL_PEER_CONNECTING, "why", false, 2},
    {TL_PEER_DOWN, LINK_EVENT_OPENING, TL_PEER_CONNECTING, "old", false, 2},
    {TL_PEER_DOWN, LINK_EVENT_OPEN_FAILED, TL_PEER_DOWN, "why", true, 3},
    {TL_PEER_DOWN, LINK_EVENT_UP, TL_PEER_UP, "", false, 0},
};

START_TEST(each_edge)
{
    const struct edge *edge = &edges[_i];
    const struct tl_error why = {.code = TL_UNAVAILABLE, .message = "why"};
    peer.is_eager = true;
    peer.links.state = edge->from;
    peer.links.failure_count = 2;
    snprintf(peer.links.reason.message, sizeof(peer.links.reason.message), "old");
    handle(&peer, edge->event, &why);
    ck_assert_int_eq(peer.links.state, edge->to);
    ck_assert_str_eq(peer.links.reason.message, edge->reason);
    ck_assert_int_eq(peer.links.back_off.heap_place != 0, edge->is_armed);
    ck_assert_uint_eq(peer.links.failure_count, edge->failure_count);
    check_calls("check");
}
END_TEST

START_TEST(no_other_edge)
{
    bool is_listed[TL_ARRAY_COUNT(transitions)][LINK_EVENTS] = {{false}};
    for (size_t i = 0; i < TL_ARRAY_COUNT(edges); i++)
        is_listed[edges[i].from][edges[i].event] = true;
    for (unsigned from = 0; from < TL_ARRAY_COUNT(transitions); from++) {
        for (unsigned event = 0; event < LINK_EVENTS; event++)
            ck_assert_int_eq(transitions[from][event].action != NULL, is_listed[from][event]);
    }
}
END_TEST

START_TEST(forbidden_edge)
{
    handle(&peer, LINK_EVENT_LOST, &(struct tl_error){.code = TL_OK});
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- lives -- */

/* A link that has come up, from this incarnation. */
static struct tl_link *up_link(struct tl_link *link, bool is_ours, uint64_t incarnation)
{
    *link = (struct tl_link){.is_ours = is_ours, .is_up = true, .identity.incarnation = incarnation};
    snprintf(link->identity.name, sizeof(link->identity.name), "%s", peer.name);
    return link;
}

START_TEST(wanted_and_left)
{
    const struct tl_error why = {.code = TL_UNAVAILABLE, .message = "why"};
    tl_peer_want(&peer);
    check_calls("");
    peer.awaited = 1;
    tl_peer_want(&peer);
    check_calls("open check");
    link_opened(up_link(&links[0], true, 1));
    check_calls("begin check send");
    link_closed(&links[0], &why);
    check_calls("end check open check");
    ck_assert_int_eq(peer.links.state, TL_PEER_CONNECTING);
    link_closed(&links[1], &why);
    check_calls("stay check");
    ck_assert_int_eq(peer.links.state, TL_PEER_DOWN);
    peer.awaited = 0;
    fake_clock_advance(TL_NS_PER_SEC);
    tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0});
    check_calls("");
    peer.awaited = 1;
    open_status = TL_RESOURCE_EXHAUSTED;
    tl_peer_want(&peer);
    check_calls("open check");
    ck_assert_int_eq(peer.links.state, TL_PEER_DOWN);
    ck_assert_str_eq(peer.links.reason.message, "no link");
    peer.awaited = 0;
    tl_peers_link_up(&worker, up_link(&links[2], false, 1));
    check_calls("begin check send");
    link_closed(&links[2], &(struct tl_error){.code = TL_OK});
    check_calls("end check");
    ck_assert_int_eq(peer.links.state, TL_PEER_IDLE);
    ck_assert(peer.links.has_left);
}
END_TEST

/* The back-off needs no memory: a peer that is wanted is tried again after it. */
START_TEST(back_off_needs_no_memory)
{
    struct tl_peer other = {.worker = &worker};
    const struct tl_error why = {.code = TL_UNAVAILABLE, .message = "why"};
    peer.is_eager = true;
    timers_fill(&timers);
    fault_arm(1);
    tl_peer_want(&peer);
    link_closed(&links[0], &why);
    ck_assert_int_eq(peer.links.state, TL_PEER_DOWN);
    ck_assert_uint_ne(peer.links.back_off.heap_place, 0);
    ck_assert(!fault_was_hit());
    fault_arm(1);
    ck_assert_int_eq(tl_peer_link_init(&other), TL_RESOURCE_EXHAUSTED);
}
END_TEST

/* Links that end early are opened again at once three times, then after a pause. */
START_TEST(losses_make_pauses)
{
    const struct tl_error why = {.code = TL_UNAVAILABLE, .message = "why"};
    peer.is_eager = true;
    for (unsigned i = 0; i < 4; i++) {
        tl_peers_link_up(&worker, up_link(&links[0], false, 1));
        calls[0] = '\0';
        peer.links.opening = NULL;
        link_count = 1;
        link_closed(&links[0], &why);
        check_calls(i < 3 ? "end check open check" : "end check");
        ck_assert_int_eq(peer.links.state, TL_PEER_CONNECTING);
    }
    ck_assert_uint_ne(peer.links.back_off.heap_place, 0);
}
END_TEST

/* The worker with the smaller name is this one, so its link stays. */
START_TEST(links_that_cross)
{
    peer.awaited = 1;
    tl_peer_want(&peer);
    tl_peers_link_up(&worker, up_link(&links[1], false, 1));
    check_calls("open check begin passing check send");
    link_opened(up_link(&links[0], true, 1));
    check_calls("drain 1 begin send");
    ck_assert_ptr_eq(peer.links.link, &links[0]);
    ck_assert_int_eq(peer.links.state, TL_PEER_UP);
    link_closed(&links[1], &(struct tl_error){.code = TL_OK});
    check_calls("");
}
END_TEST

START_TEST(a_restart_replaces_the_link)
{
    tl_peers_link_up(&worker, up_link(&links[0], false, 1));
    check_calls("begin check send");
    tl_peers_link_up(&worker, up_link(&links[1], false, 2));
    check_calls("release close 0: /job:ps/task:1 has restarted begin check send");
    ck_assert_uint_eq(peer.restart_count, 1);
    ck_assert_int_eq(peer.links.state, TL_PEER_UP);
}
END_TEST

START_TEST(self_is_up)
{
    peer.is_self = true;
    peer.is_eager = true;
    ck_assert_int_eq(tl_peer_link_init(&peer), TL_OK);
    tl_peer_want(&peer);
    check_calls("");
    ck_assert_int_eq(peer.links.state, TL_PEER_UP);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("peer_link");
    TCase *tcase = tcase_create("peer_link");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_loop_test(tcase, each_edge, 0, TL_ARRAY_COUNT(edges));
    tcase_add_test(tcase, no_other_edge);
    tcase_add_test_raise_signal(tcase, forbidden_edge, SIGABRT);
    tcase_add_test(tcase, wanted_and_left);
    tcase_add_test(tcase, back_off_needs_no_memory);
    tcase_add_test(tcase, losses_make_pauses);
    tcase_add_test(tcase, links_that_cross);
    tcase_add_test(tcase, a_restart_replaces_the_link);
    tcase_add_test(tcase, self_is_up);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
