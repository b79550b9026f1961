// SPDX-License-Identifier: Apache-2.0
/* Subscriptions over a data plane whose card is a double: the steady flow, values that do not fit, and connections that
 * break while values are under way. */
#include <check.h>

#include "fakes/run_suite.h"
#include "fakes/transport_case.h"

/* Values of the first size are written, those of the second come inside of messages. */
static const uint64_t sizes[] = {5000, 500};

static uint64_t value_bytes;
static tl_op_id subscription;

static void subscribe(struct tl_tensor *const *destinations, size_t count)
{
    const struct tl_subscribe_options options = {
        .size_bytes = sizeof(options), .from_step = 1, .destinations = destinations, .count = count};
    enum tl_status status =
        tl_subscribe(receiver, cluster_peer(receiver, 0), "w", &options, cq, NULL, &subscription, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
}

static void send_bytes(uint64_t step, uint64_t size_bytes)
{
    struct tl_tensor *tensor = cluster_tensor(size_bytes, (unsigned)step);
    cluster_send(sender, "w", step, tensor, sent);
    tl_tensor_put(tensor);
}

static void expect_value(uint64_t step)
{
    struct tl_completion completion = cluster_next(cq);
    ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
    ck_assert_uint_eq(completion.step, step);
    ck_assert(cluster_tensor_is(completion.tensor, value_bytes, (unsigned)step));
    tl_tensor_put(completion.tensor);
}

static void cancel(void)
{
    ck_assert_int_eq(tl_cancel(receiver, subscription), TL_OK);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_int_eq(completion.status.code, TL_CANCELLED);
    ck_assert_int_eq(completion.kind, TL_OP_SUBSCRIBE);
    CLUSTER_UNTIL(cluster_stats(sender).waiting_receivers == 0);
}

static void setup(void)
{
    prepare("\"rdma\": \"require\"");
    open_both(TL_PROGRESS_THREAD);
}

/* After the first value each takes one message there, and one write back. */
START_TEST(steady_flow)
{
    value_bytes = sizes[_i];
    subscribe(NULL, 2);
    for (uint64_t step = 0; step <= 300; step++)
        send_bytes(step, value_bytes);
    for (uint64_t step = 1; step <= 300; step++)
        expect_value(step);
    ck_assert_str_eq(cluster_peer_info(receiver, 0).transport, "verbs");
    struct tl_tensor *tensor = cluster_tensor(value_bytes, 301);
    cluster_publish(sender, "w", 301, tensor);
    tl_tensor_put(tensor);
    expect_value(301);
    CLUSTER_UNTIL(cluster_stats(sender).waiting_receivers == 2);
    cancel();
}
END_TEST

START_TEST(value_that_does_not_fit)
{
    value_bytes = sizes[_i];
    struct tl_tensor *destinations[] = {cluster_tensor(value_bytes, 0), cluster_tensor(value_bytes, 0)};
    subscribe(destinations, 2);
    for (uint64_t step = 1; step <= 6; step++)
        send_bytes(step, step % 3 == 0 ? value_bytes / 2 : value_bytes);
    for (uint64_t step = 1; step <= 6; step++) {
        if (step % 3 != 0) {
            expect_value(step);
            continue;
        }
        struct tl_completion completion = cluster_next(cq);
        ck_assert_int_eq(completion.status.code, TL_FAILED_PRECONDITION);
        ck_assert_uint_eq(completion.step, step);
    }
    struct tl_tensor *refused = cluster_recv_wait(receiver, 0, "w", 3);
    ck_assert(cluster_tensor_is(refused, value_bytes / 2, 3));
    tl_tensor_put(refused);
    cancel();
    for (unsigned i = 0; i < 2; i++)
        tl_tensor_put(destinations[i]);
}
END_TEST

/* Receives the values of the steps 1 to `count`, each once, in any order. */
static void expect_each_once(uint64_t count)
{
    bool has_come[64] = {false};
    for (uint64_t i = 0; i < count; i++) {
        struct tl_completion completion = cluster_next(cq);
        ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
        ck_assert_uint_ge(completion.step, 1);
        ck_assert_uint_le(completion.step, count);
        ck_assert(!has_come[completion.step]);
        has_come[completion.step] = true;
        ck_assert(cluster_tensor_is(completion.tensor, value_bytes, (unsigned)completion.step));
        tl_tensor_put(completion.tensor);
    }
}

/* Each value comes exactly once, whichever connection its request was on. Requests of the former connection are asked
 * again beside new ones, so that the first values may come in another order. */
START_TEST(owner_restarts)
{
    value_bytes = sizes[_i];
    subscribe(NULL, 4);
    for (unsigned round = 0; round < 3; round++) {
        for (uint64_t step = 1; step <= 20; step++)
            send_bytes(step, value_bytes);
        expect_each_once(20);
        for (uint64_t step = 1; step <= 20; step++)
            cluster_expect(sent, TL_OK);
        cluster_close(&cluster, 0);
        sender = fake_transport_open(&transport, 0, TL_PROGRESS_THREAD);
    }
    CLUSTER_UNTIL(cluster_stats(sender).waiting_receivers == 4);
    cancel();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("dataplane_subscribe");
    TCase *tcase = tcase_create("dataplane_subscribe");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_loop_test(tcase, steady_flow, 0, 2);
    tcase_add_loop_test(tcase, value_that_does_not_fit, 0, 2);
    tcase_add_loop_test(tcase, owner_restarts, 0, 2);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
