// SPDX-License-Identifier: Apache-2.0
/*
 * Two workers with a data plane, one of which becomes silent: because no thread drives it, or because its writes are
 * lost while the other waits for them.
 */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "fakes/transport_case.h"
#include "fakes/run_suite.h"

#define LARGE (1 << 20)

static void send_large(struct tl_worker *worker, const char *key, uint64_t step, unsigned seed)
{
    struct tl_tensor *tensor = cluster_tensor(LARGE, seed);
    cluster_send(worker, key, step, tensor, sent);
    tl_tensor_put(tensor);
}

/* Receives a large tensor in place, from the sender to the receiver. */
static void expect_transfer(uint64_t step)
{
    struct tl_completion got;
    send_large(sender, "probe", step, (unsigned)step);
    enum tl_status status =
        tl_recv_wait(receiver, cluster_peer(receiver, 0), "probe", step, NULL, CLUSTER_LONG, &got, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert_msg(got.path == TL_PATH_ZERO_COPY, "%s: %s", tl_path_name(got.path), got.path_reason);
    ck_assert(cluster_tensor_is(got.tensor, LARGE, (unsigned)step));
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
}

/* Advances a worker that has no thread; returns true. */
static bool driven(struct tl_worker *worker)
{
    (void)!tl_worker_progress(worker, 0);
    return true;
}

/* The value was on its way when the receive ran out of time, and its connection ended with it. */
START_TEST(a_deadline_in_the_middle_leaves_the_value_to_others)
{
    prepare("\"rdma\": \"require\", \"timeouts\": {\"reservation\": \"1h\"}");
    transport.cancel_ns = 100 * TL_NS_PER_MS;
    open_both(_i);
    expect_transfer(1);
    const struct fake_rule rule = {.fault = FAKE_DROP, .kinds = FAKE_WRITE, .provider = transport.cards[0].provider};
    fake_fabric_add_rule(transport.fabric, &rule);
    send_large(sender, "w", 1, 3);
    struct tl_completion got;
    enum tl_status status =
        tl_recv_wait(receiver, cluster_peer(receiver, 0), "w", 1, NULL, 2 * CLUSTER_SECOND, &got, &error);
    ck_assert_int_eq(status, TL_DEADLINE_EXCEEDED);
    struct tl_worker *other = fake_transport_open(&transport, 2, TL_PROGRESS_THREAD);
    cluster_recv(other, 0, "w", 1, cq);
    struct tl_completion received;
    CLUSTER_UNTIL(driven(receiver) && tl_cq_poll(cq, &received, 1) == 1);
    ck_assert_msg(received.status.code == TL_OK, "%s", received.status.message);
    ck_assert(cluster_tensor_is(received.tensor, LARGE, 3));
    tl_tensor_put(received.tensor);
    cluster_expect(sent, TL_OK);
    ck_assert(cluster_is_quiet(sent));
    teardown();
}
END_TEST

/* Waits longer than the peer time-out. */
static void leave_alone(int64_t ns)
{
    int64_t until_ns = cluster_now_ns() + ns;
    while (cluster_now_ns() < until_ns)
        cluster_pause();
}

/* A program that computes keeps its paths and answers requests, although no thread drives its worker until the end. */
START_TEST(a_worker_that_is_not_driven_is_not_dead)
{
    prepare("\"rdma\": \"require\"");
    transport.peer_timeout_ns = 6 * CLUSTER_SECOND;
    open_both(TL_PROGRESS_CALLER);
    expect_transfer(1);
    cluster_recv(sender, 1, "w", 1, cq);
    leave_alone(2 * transport.peer_timeout_ns);
    send_large(receiver, "w", 1, 4);
    struct tl_completion got = cluster_next(cq);
    ck_assert_msg(got.status.code == TL_OK, "%s", got.status.message);
    ck_assert_int_eq(got.path, TL_PATH_ZERO_COPY);
    tl_tensor_put(got.tensor);
    cluster_expect(sent, TL_OK);
    struct fake_counters counters;
    fake_provider_get_counters(transport.cards[0].provider, &counters);
    ck_assert_uint_eq(counters.cancelled, 0); /* The connection is the same as before. */
    teardown();
}
END_TEST

/* A worker that does not move at all is given up with a reason, and its path comes back when it moves again. */
START_TEST(a_worker_that_does_not_move_is_given_up_for_a_while)
{
    prepare(NULL);
    receiver =
        /* The helper thread drives it so rarely that it does not matter. */
        fake_transport_open(&transport, 1, TL_PROGRESS_CALLER);
    transport.peer_timeout_ns = CLUSTER_SECOND;
    sender = fake_transport_open(&transport, 0, TL_PROGRESS_THREAD);
    expect_transfer(1);
    cluster_recv(sender, 1, "w", 1, cq);
    CLUSTER_UNTIL(strcmp(cluster_peer_info(sender, 1).transport, "grpc") == 0);
    send_large(receiver, "w", 1, 4);
    struct tl_completion got;
    CLUSTER_UNTIL(driven(receiver) && tl_cq_poll(cq, &got, 1) == 1);
    ck_assert_msg(got.status.code == TL_OK, "%s", got.status.message);
    ck_assert_int_eq(got.path, TL_PATH_GRPC);
    ck_assert_msg(strstr(got.path_reason, "/job:node/task:1 has been silent for") != NULL, "%s", got.path_reason);
    tl_tensor_put(got.tensor);
    CLUSTER_UNTIL(driven(receiver) && strcmp(cluster_peer_info(receiver, 0).transport, "verbs") == 0);
    expect_transfer(2);
    teardown();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("dataplane_peer_timeout");
    TCase *tcase = tcase_create("dataplane_peer_timeout");
    tcase_set_timeout(tcase, 100);
    tcase_add_loop_test(tcase, a_deadline_in_the_middle_leaves_the_value_to_others, 0, 2);
    tcase_add_test(tcase, a_worker_that_is_not_driven_is_not_dead);
    tcase_add_test(tcase, a_worker_that_does_not_move_is_given_up_for_a_while);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
