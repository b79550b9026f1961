// SPDX-License-Identifier: Apache-2.0
/*
 * Two workers connect to each other at the same time. The second one's link is there first, and a data connection is
 * set up over it. Then both change to the first one's link, the second worker before the first.
 *
 * All that a worker sends over the link that it has opened passes a proxy, which holds it back.
 */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "fakes/transport_case.h"
#include "fakes/proxy.h"
#include "fakes/run_suite.h"

#define LARGE (1 << 20)

static struct proxy proxies[2]; /* One proxy is in front of each task. */

static bool has_path(unsigned task)
{
    return strcmp(cluster_peer_info(cluster.workers[task], 1 - task).transport, "verbs") == 0;
}

static void connect_from(unsigned task)
{
    tl_peer_id peer = cluster_peer(cluster.workers[task], 1 - task);
    ck_assert_int_eq(tl_worker_wait_for_peers(cluster.workers[task], &peer, 1, 1, CLUSTER_LONG, &error), TL_OK);
}

static void open_both_behind_proxies(const char *settings)
{
    prepare(settings);
    for (unsigned task = 0; task < 2; task++)
        cluster_use_proxy(&cluster, task, &proxies[task]);
    open_both(TL_PROGRESS_THREAD);
}

static void close_all(void)
{
    teardown();
    for (unsigned task = 0; task < 2; task++)
        proxy_stop(&proxies[task]);
}

/* Task 0 asks for a tensor that is sent later, and its link gets as far as the other's HTTP/2. */
static void begin_to_ask(void)
{
    proxy_limit(&proxies[1], PROXY_UP, 0);
    cluster_recv(sender, 1, "w", 1, cq);
    CLUSTER_UNTIL(proxy_passed(&proxies[1], PROXY_DOWN) > 0);
}

static void expect_what_was_asked(uint64_t step)
{
    struct tl_tensor *tensor = cluster_tensor(LARGE, 7);
    cluster_send(receiver, "w", step, tensor, sent);
    tl_tensor_put(tensor);
    struct tl_completion got = cluster_next(cq);
    ck_assert_msg(got.status.code == TL_OK, "%s", got.status.message);
    ck_assert_msg(got.path == TL_PATH_ZERO_COPY, "%s: %s", tl_path_name(got.path), got.path_reason);
    ck_assert(cluster_tensor_is(got.tensor, LARGE, 7));
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
}

/* No link is given up while it is held back. */
#define PATIENT "\"timeouts\": {\"connect\": \"60s\", \"keepalive\": \"1h\"}, "

static const char *const policies[] = {PATIENT "\"rdma\": \"require\"", PATIENT "\"rdma\": \"prefer\""};

/* Returns whether task 0 has learnt that the peer has ended its half, which only a request tells it. A request that the
 * peer's half took before it ended says nothing, so that this asks for another step each time. */
static bool asks_in_vain(uint64_t *last_step)
{
    if (!has_path(0)) return true;
    cluster_recv(sender, 1, "w", ++*last_step, cq);
    return false;
}

/* The peer has changed links and has ended its half; the request waits for the path over the other link. */
START_TEST(the_peer_goes_over_first)
{
    open_both_behind_proxies(policies[_i]);
    begin_to_ask();
    connect_from(1);
    CLUSTER_UNTIL(cluster_stats(receiver).waiting_receivers == 1 && has_path(0));
    proxy_limit(&proxies[0], PROXY_UP, 0);
    proxy_limit(&proxies[1], PROXY_DOWN, 0);
    proxy_limit(&proxies[1], PROXY_UP, UINT64_MAX);
    CLUSTER_UNTIL(!has_path(1));
    uint64_t last_step = 1;
    CLUSTER_UNTIL(asks_in_vain(&last_step));
    cluster_recv(sender, 1, "w", ++last_step, cq);
    ck_assert_int_eq(cluster_peer_info(sender, 1).state, TL_PEER_UP);
    proxy_limit(&proxies[1], PROXY_DOWN, UINT64_MAX);
    CLUSTER_UNTIL(has_path(0));
    proxy_limit(&proxies[0], PROXY_UP, UINT64_MAX);
    for (uint64_t step = 1; step <= last_step; step++)
        expect_what_was_asked(step);
    close_all();
}
END_TEST

/* An attempt on the link that will end fails, as it does when the peer changes links in the middle of it. But the other
 * link never comes, and the peer offers again on this one. */
START_TEST(neither_changes_links)
{
    open_both_behind_proxies(policies[_i]);
    const struct fake_rule rule = {.fault = FAKE_CONNECT_FAILURE, .provider = transport.cards[0].provider, .times = 1};
    fake_fabric_add_rule(transport.fabric, &rule);
    begin_to_ask();
    connect_from(1);
    expect_what_was_asked(1);
    ck_assert(has_path(0));
    proxy_limit(&proxies[1], PROXY_UP, UINT64_MAX);
    close_all();
}
END_TEST

/* After repeated failures a worker no longer waits for the path. */
START_TEST(the_path_cannot_be_made)
{
    open_both_behind_proxies(policies[0]);
    const struct fake_rule rule = {
        .fault = FAKE_CONNECT_FAILURE, .provider = transport.cards[0].provider, .times = FAKE_ALWAYS};
    fake_fabric_add_rule(transport.fabric, &rule);
    begin_to_ask();
    connect_from(1);
    cluster_expect(cq, TL_UNAVAILABLE);
    fake_fabric_clear_rules(transport.fabric);
    CLUSTER_UNTIL(has_path(0));
    proxy_limit(&proxies[1], PROXY_UP, UINT64_MAX);
    close_all();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("dataplane_crossing");
    TCase *tcase = tcase_create("dataplane_crossing");
    tcase_set_timeout(tcase, 60);
    tcase_add_loop_test(tcase, the_peer_goes_over_first, 0, 2);
    tcase_add_loop_test(tcase, neither_changes_links, 0, 2);
    tcase_add_test(tcase, the_path_cannot_be_made);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
