// SPDX-License-Identifier: Apache-2.0
/*
 * Connections that fail again and again: the number of attempts is bounded, nothing that is asked for meanwhile is
 * lost, and connections come back when they can.
 */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "fakes/transport_case.h"
#include "fakes/proxy.h"
#include "fakes/run_suite.h"

#define LARGE (1 << 20)
#define LOOK_NS (3 * CLUSTER_SECOND)

/* Returns how many queue pairs the task's worker has made, or tried to make: each attempt makes one at each side. */
static uint64_t attempts(unsigned task)
{
    struct fake_counters counters;
    fake_provider_get_counters(transport.cards[task].provider, &counters);
    return counters.creates;
}

/* Returns how many attempts fit into the time when each pause is as short as possible: half of 100 ms, 200 ms, 400 ms
 * and so on up to 5 s. */
static uint64_t most_attempts(int64_t time_ns)
{
    uint64_t count = 1;
    for (int64_t pause_ns = 50 * TL_NS_PER_MS; time_ns >= pause_ns; count++) {
        time_ns -= pause_ns;
        pause_ns = pause_ns < 1600 * TL_NS_PER_MS ? 2 * pause_ns : 2500 * TL_NS_PER_MS;
    }
    return count;
}

/* Advances a worker that has no thread; returns true. */
static bool driven(struct tl_worker *worker)
{
    (void)!tl_worker_progress(worker, 0);
    return true;
}

static bool is_up(void)
{
    return strcmp(cluster_peer_info(receiver, 0).transport, "verbs") == 0;
}

static void expect_transfer(uint64_t step, bool is_path_up)
{
    struct tl_completion got;
    struct tl_tensor *tensor = cluster_tensor(LARGE, (unsigned)step);
    cluster_send(sender, "w", step, tensor, sent);
    tl_tensor_put(tensor);
    enum tl_status status =
        tl_recv_wait(receiver, cluster_peer(receiver, 0), "w", step, NULL, CLUSTER_LONG, &got, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert(cluster_tensor_is(got.tensor, LARGE, (unsigned)step));
    if (is_path_up) ck_assert_msg(got.path == TL_PATH_ZERO_COPY, "%s: %s", tl_path_name(got.path), got.path_reason);
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
}

START_TEST(a_path_that_cannot_be_made)
{
    prepare("\"connect\": \"eager\"");
    open_both(TL_PROGRESS_THREAD);
    CLUSTER_UNTIL(is_up());
    const struct fake_rule rule = {.fault = _i / 2 == 0 ? FAKE_CREATE_FAILURE : FAKE_CONNECT_FAILURE,
                                   .provider = transport.cards[_i % 2].provider,
                                   .times = FAKE_ALWAYS};
    fake_fabric_add_rule(transport.fabric, &rule);
    uint64_t before = attempts((unsigned)_i % 2), step = 1;
    int64_t begin_ns = cluster_now_ns();
    fake_provider_overrun(transport.cards[0].provider);
    for (; cluster_now_ns() - begin_ns < LOOK_NS; cluster_pause())
        if (step < 10) expect_transfer(step++, false);
    uint64_t count = attempts((unsigned)_i % 2) - before;
    ck_assert_uint_ge(count, 1);
    ck_assert_uint_le(count, most_attempts(cluster_now_ns() - begin_ns));
    fake_fabric_clear_rules(transport.fabric);
    CLUSTER_UNTIL(is_up());
    expect_transfer(100, true);
    teardown();
}
END_TEST

START_TEST(a_path_that_does_not_last)
{
    prepare("\"connect\": \"eager\"");
    open_both(TL_PROGRESS_THREAD);
    CLUSTER_UNTIL(is_up());
    uint64_t before = attempts(0), step = 1;
    int64_t begin_ns = cluster_now_ns();
    for (; cluster_now_ns() - begin_ns < LOOK_NS; cluster_pause()) {
        if (!is_up()) continue;
        fake_provider_overrun(transport.cards[0].provider);
        expect_transfer(step++, false);
    }
    uint64_t count = attempts(0) - before;
    ck_assert_uint_ge(count, 1);
    ck_assert_uint_le(count, most_attempts(cluster_now_ns() - begin_ns));
    CLUSTER_UNTIL(is_up());
    expect_transfer(step, true);
    teardown();
}
END_TEST

/* The window of a request cannot be bound: some devices say so that bind it again when they send packets again. */
START_TEST(a_window_that_is_not_bound)
{
    enum { COUNT = 100 };
    prepare(NULL);
    open_both(_i % 2);
    expect_transfer(1000, true);
    for (unsigned i = 0; i < COUNT; i++) {
        struct tl_tensor *tensor = cluster_tensor(100000, i);
        cluster_publish(sender, "many", i, tensor);
        tl_tensor_put(tensor);
        const struct fake_rule rule = {
            .fault = FAKE_BREAK, .kinds = FAKE_BIND, .provider = transport.cards[1].provider, .from = 2};
        if (i % 20 == 0) fake_fabric_add_rule(transport.fabric, &rule);
        cluster_recv(receiver, 0, "many", i, cq);
        cluster_recv(receiver, 0, "many", i, cq);
        for (unsigned n = 0; n < 2; n++) {
            struct tl_completion got = cluster_next(cq);
            ck_assert_msg(got.status.code == TL_OK, "%s", got.status.message);
            ck_assert(cluster_tensor_is(got.tensor, 100000, i));
            tl_tensor_put(got.tensor);
        }
    }
    struct fake_counters counters;
    fake_provider_get_counters(transport.cards[1].provider, &counters);
    ck_assert_uint_gt(counters.cancelled, 0);
    fake_fabric_clear_rules(transport.fabric);
    CLUSTER_UNTIL(driven(receiver) && is_up());
    expect_transfer(1001, true);
    teardown();
}
END_TEST

/* The transfer runs over a path that is about to end with its link; the owner does not learn that the value has
 * arrived. */
START_TEST(arrived_when_the_link_is_lost)
{
    static struct proxy proxy;
    prepare(NULL);
    cluster_use_proxy(&cluster, 0, &proxy);
    open_both(TL_PROGRESS_THREAD);
    expect_transfer(1, true);
    const struct fake_rule rule = {
        .fault = FAKE_LOSE_ACK, .kinds = FAKE_WRITE, .provider = transport.cards[0].provider};
    fake_fabric_add_rule(transport.fabric, &rule);
    size_t before = fake_fabric_write_count(transport.fabric);
    fake_provider_hold(transport.cards[1].provider, true);
    struct tl_tensor *tensor = cluster_tensor(LARGE, 2);
    cluster_send(sender, "w", 2, tensor, sent);
    tl_tensor_put(tensor);
    cluster_recv(receiver, 0, "w", 2, cq);
    CLUSTER_UNTIL(fake_fabric_write_count(transport.fabric) > before);
    /* Otherwise the link could be back before the test has looked. */
    proxy_refuse(&proxy, true);
    proxy_cut(&proxy);
    CLUSTER_UNTIL(cluster_peer_info(receiver, 0).state != TL_PEER_UP);
    fake_provider_hold(transport.cards[1].provider, false);
    proxy_refuse(&proxy, false);
    struct tl_completion got = cluster_next(cq);
    ck_assert_msg(got.status.code == TL_OK, "%s", got.status.message);
    ck_assert_int_eq(got.path, TL_PATH_ZERO_COPY);
    ck_assert(cluster_tensor_is(got.tensor, LARGE, 2));
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
    teardown();
    proxy_stop(&proxy);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("dataplane_again");
    TCase *tcase = tcase_create("dataplane_again");
    tcase_set_timeout(tcase, 100);
    tcase_add_loop_test(tcase, a_path_that_cannot_be_made, 0, 4);
    tcase_add_test(tcase, a_path_that_does_not_last);
    tcase_add_loop_test(tcase, a_window_that_is_not_bound, 0, 2);
    tcase_add_test(tcase, arrived_when_the_link_is_lost);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
