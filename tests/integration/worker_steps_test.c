// SPDX-License-Identifier: Apache-2.0
/* The other ends of operations: aborted and ended steps, deadlines, cancels at every moment, limits. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/cluster.h"
#include "fakes/pattern.h"
#include "fakes/proxy.h"
#include "fakes/run_suite.h"

/* Twice as much as the sockets on the way can hold. */
#define BIG_BYTES (UINT64_C(32) << 20)

static struct cluster cluster;
static struct proxy proxy;
static struct tl_cq *cq;
static struct tl_error error;

/* Worker 1 reaches worker 0 through the proxy; the address of task 2 has no worker. */
static void open_with(const char *settings)
{
    cluster_init(&cluster, 3, settings);
    cluster_use_proxy(&cluster, 0, &proxy);
    cluster_open(&cluster, 0);
    cluster_open(&cluster, 1);
    cq = cluster_cq();
}

static void setup(void)
{
    open_with(NULL);
}

static void setup_small(void)
{
    open_with("\"limits\": {\"waiting\": 4, \"held\": \"100KB\"}");
}

static void teardown(void)
{
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
    proxy_stop(&proxy);
}

static void send_tensor(const char *key, uint64_t step, uint64_t size_bytes, unsigned seed)
{
    struct tl_tensor *tensor = cluster_tensor(size_bytes, seed);
    cluster_send(cluster.workers[0], key, step, tensor, cq);
    tl_tensor_put(tensor);
}

static void wait_for_waiting(uint64_t count)
{
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).waiting_receivers == count);
}

static enum tl_status recv_status(unsigned worker, unsigned from, const char *key, uint64_t step, int64_t timeout_ns)
{
    struct tl_completion completion;
    enum tl_status status = tl_recv_wait(cluster.workers[worker], cluster_peer(cluster.workers[worker], from), key,
                                         step, NULL, timeout_ns, &completion, &error);
    ck_assert_int_eq(completion.status.code, status);
    ck_assert_str_eq(completion.status.message, status == TL_OK ? "" : error.message);
    tl_tensor_put(completion.tensor);
    return status;
}

/* ----------------------------------------------------------------------------------------------- aborted steps -- */

/* The longest message, of characters of three bytes. */
static void long_message(char *text)
{
    memset(text, 0, TL_ERROR_MESSAGE_BYTES);
    for (int i = 0; i + 3 < TL_ERROR_MESSAGE_BYTES; i += 3)
        memcpy(text + i, "\xe2\x82\xac", 3);
}

START_TEST(abort_reaches_everybody_with_its_whole_message)
{
    char message[TL_ERROR_MESSAGE_BYTES];
    long_message(message);
    ck_assert_uint_eq(strlen(message), TL_ERROR_MESSAGE_BYTES - 1);
    send_tensor("sent", 5, 100, 1);
    cluster_recv(cluster.workers[0], 0, "local", 5, cq);
    cluster_recv(cluster.workers[1], 0, "remote", 5, cq);
    cluster_recv(cluster.workers[0], 1, "from the other", 5, cq);
    cluster_recv(cluster.workers[0], 2, "not sent", 5, cq);
    cluster_recv(cluster.workers[1], 0, "another step", 6, cq);
    wait_for_waiting(3);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[1]).waiting_receivers == 1);
    ck_assert_int_eq(tl_worker_abort_step(cluster.workers[0], 5, TL_FAILED_PRECONDITION, message, &error), TL_OK);
    for (int i = 0; i < 5; i++) {
        struct tl_completion completion = cluster_expect(cq, TL_FAILED_PRECONDITION);
        ck_assert_str_eq(completion.status.message, message);
    }
    wait_for_waiting(1);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[1]).waiting_receivers == 0);
    ck_assert(cluster_is_quiet(cq));
    /* Later receives get the status, too. */
    ck_assert_int_eq(recv_status(1, 0, "later", 5, CLUSTER_LONG), TL_FAILED_PRECONDITION);
    ck_assert_str_eq(error.message, message);
    ck_assert_int_eq(recv_status(0, 1, "later", 5, CLUSTER_LONG), TL_FAILED_PRECONDITION);
    ck_assert_int_eq(recv_status(0, 0, "later", 5, CLUSTER_LONG), TL_FAILED_PRECONDITION);
    struct tl_tensor *tensor = cluster_tensor(10, 1);
    ck_assert_int_eq(tl_send_wait(cluster.workers[0], "later", 5, tensor, CLUSTER_LONG, &error),
                     TL_FAILED_PRECONDITION);
    /* The status lasts until the step is ended. */
    uint64_t dropped = 77;
    ck_assert_int_eq(tl_worker_end_step(cluster.workers[0], 5, &dropped, &error), TL_OK);
    ck_assert_uint_eq(dropped, 0);
    cluster_send(cluster.workers[0], "later", 5, tensor, cq);
    ck_assert_int_eq(recv_status(1, 0, "later", 5, CLUSTER_LONG), TL_OK);
    cluster_expect(cq, TL_OK);
    tl_tensor_put(tensor);
}
END_TEST

/* Broken connections end with UNAVAILABLE, too; as the status of a step it is no reason to ask again. */
START_TEST(abort_with_any_status_is_final)
{
    for (int status = TL_CANCELLED; status <= TL_UNAUTHENTICATED; status++) {
        uint64_t step = (uint64_t)status;
        cluster_recv(cluster.workers[1], 0, "waits", step, cq);
        wait_for_waiting(1);
        ck_assert_int_eq(tl_worker_abort_step(cluster.workers[0], step, (enum tl_status)status, "why", &error), TL_OK);
        ck_assert_str_eq(cluster_expect(cq, (enum tl_status)status).status.message, "why");
        ck_assert_int_eq(recv_status(1, 0, "later", step, CLUSTER_LONG), status);
    }
    ck_assert_uint_eq(cluster_stats(cluster.workers[1]).requests_retried, 0);
}
END_TEST

START_TEST(abort_refuses_what_is_no_error)
{
    char too_long[TL_ERROR_MESSAGE_BYTES + 1];
    memset(too_long, 'x', TL_ERROR_MESSAGE_BYTES);
    too_long[TL_ERROR_MESSAGE_BYTES] = '\0';
    struct tl_worker *worker = cluster.workers[0];
    ck_assert_int_eq(tl_worker_abort_step(worker, 1, TL_OK, "x", &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_worker_abort_step(worker, 1, (enum tl_status)17, "x", &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_worker_abort_step(worker, 1, (enum tl_status) - 1, "x", &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_worker_abort_step(worker, 1, TL_ABORTED, too_long, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_worker_abort_step(worker, 1, TL_ABORTED, "\xff", &error), TL_INVALID_ARGUMENT);
    send_tensor("still fine", 1, 10, 1);
    ck_assert_int_eq(recv_status(1, 0, "still fine", 1, CLUSTER_LONG), TL_OK);
    cluster_expect(cq, TL_OK);
    /* An empty message is no message. */
    ck_assert_int_eq(tl_worker_abort_step(worker, 1, TL_ABORTED, NULL, &error), TL_OK);
    ck_assert_int_eq(recv_status(1, 0, "x", 1, CLUSTER_LONG), TL_ABORTED);
}
END_TEST

START_TEST(abort_does_not_touch_what_is_published)
{
    struct tl_tensor *tensor = cluster_tensor(10, 1);
    cluster_publish(cluster.workers[0], "p", 5, tensor);
    tl_tensor_put(tensor);
    ck_assert_int_eq(tl_worker_abort_step(cluster.workers[0], 5, TL_ABORTED, "", &error), TL_OK);
    ck_assert_int_eq(recv_status(1, 0, "p", 5, CLUSTER_LONG), TL_OK);
    ck_assert_int_eq(recv_status(1, 0, "p", 6, CLUSTER_SECOND / 20), TL_DEADLINE_EXCEEDED);
}
END_TEST

START_TEST(abort_while_the_tensor_is_on_its_way)
{
    unsigned released = 0;
    void *bytes = malloc(BIG_BYTES);
    pattern_fill(bytes, BIG_BYTES, 1);
    struct tl_tensor *tensor = cluster_wrap(bytes, BIG_BYTES, &released);
    struct tl_cq *recv_cq = cluster_cq();
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 2);
    cluster_send(cluster.workers[0], "big", 5, tensor, cq);
    tl_tensor_put(tensor);
    cluster_recv(cluster.workers[1], 0, "big", 5, recv_cq);
    proxy_wait_limit(&proxy, PROXY_DOWN);
    ck_assert_int_eq(tl_worker_abort_step(cluster.workers[0], 5, TL_ABORTED, "stop", &error), TL_OK);
    ck_assert_uint_eq(__atomic_load_n(&released, __ATOMIC_ACQUIRE), 0);
    ck_assert(cluster_is_quiet(cq));
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    struct tl_completion sent = cluster_expect(cq, TL_ABORTED);
    ck_assert_str_eq(sent.status.message, "stop");
    ck_assert_uint_eq(__atomic_load_n(&released, __ATOMIC_ACQUIRE), 1);
    struct tl_completion received = cluster_next(recv_cq);
    ck_assert_int_eq(received.status.code, TL_OK);
    ck_assert(cluster_tensor_is(received.tensor, BIG_BYTES, 1));
    tl_tensor_put(received.tensor);
    tl_cq_destroy(recv_cq);
    free(bytes);
}
END_TEST

/* ------------------------------------------------------------------------------------------------- ended steps -- */

START_TEST(end_of_a_step_drops_unreceived_values)
{
    for (unsigned i = 0; i < 3; i++) {
        char key[8];
        snprintf(key, sizeof(key), "k%u", i);
        send_tensor(key, 5, 100, i);
        send_tensor(key, 6, 100, i);
    }
    cluster_recv(cluster.workers[1], 0, "none", 5, cq);
    cluster_recv(cluster.workers[0], 1, "none", 5, cq);
    wait_for_waiting(1);
    uint64_t dropped = 0;
    ck_assert_int_eq(tl_worker_end_step(cluster.workers[0], 5, &dropped, &error), TL_OK);
    ck_assert_uint_eq(dropped, 3);
    for (int i = 0; i < 5; i++)
        cluster_expect(cq, TL_CANCELLED);
    struct tl_worker_stats stats = cluster_stats(cluster.workers[0]);
    ck_assert_uint_eq(stats.tensors_dropped, 3);
    ck_assert_uint_eq(stats.held_tensors, 3);
    ck_assert_uint_eq(stats.held_bytes, 300);
    ck_assert_uint_eq(stats.waiting_receivers, 0);
    ck_assert_int_eq(tl_worker_end_step(cluster.workers[0], 6, NULL, NULL), TL_OK);
    for (int i = 0; i < 3; i++)
        cluster_expect(cq, TL_CANCELLED);
    ck_assert_int_eq(tl_worker_end_step(cluster.workers[0], 1000, &dropped, NULL), TL_OK);
    ck_assert_uint_eq(dropped, 0);
}
END_TEST

START_TEST(end_of_a_step_lets_transfers_finish)
{
    struct tl_cq *recv_cq = cluster_cq();
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 2);
    send_tensor("big", 5, BIG_BYTES, 1);
    cluster_recv(cluster.workers[1], 0, "big", 5, recv_cq);
    proxy_wait_limit(&proxy, PROXY_DOWN);
    uint64_t dropped = 77;
    ck_assert_int_eq(tl_worker_end_step(cluster.workers[0], 5, &dropped, &error), TL_OK);
    ck_assert_uint_eq(dropped, 0);
    /* The step's number can be used again at once. */
    send_tensor("big", 5, 10, 2);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    struct tl_completion received = cluster_next(recv_cq);
    ck_assert(cluster_tensor_is(received.tensor, BIG_BYTES, 1));
    tl_tensor_put(received.tensor);
    cluster_expect(cq, TL_OK);
    ck_assert_int_eq(recv_status(1, 0, "big", 5, CLUSTER_LONG), TL_OK);
    cluster_expect(cq, TL_OK);
    tl_cq_destroy(recv_cq);
}
END_TEST

/* --------------------------------------------------------------------------------------------------- deadlines -- */

START_TEST(deadlines_name_what_was_waited_for)
{
    struct tl_tensor *tensor = cluster_tensor(10, 1);
    ck_assert_int_eq(tl_send_wait(cluster.workers[0], "unwanted", 3, tensor, CLUSTER_SECOND / 50, &error),
                     TL_DEADLINE_EXCEEDED);
    ck_assert_ptr_nonnull(strstr(error.message, "unwanted of step 3"));
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).held_tensors, 0);
    ck_assert_int_eq(recv_status(1, 0, "none", 3, CLUSTER_SECOND / 20), TL_DEADLINE_EXCEEDED);
    ck_assert_ptr_nonnull(strstr(error.message, "none of step 3"));
    ck_assert_ptr_nonnull(strstr(error.message, "/job:node/task:0"));
    wait_for_waiting(0);
    ck_assert_int_eq(recv_status(1, 2, "none", 3, 2 * CLUSTER_SECOND), TL_DEADLINE_EXCEEDED);
    ck_assert_ptr_nonnull(strstr(error.message, "/job:node/task:2"));
    ck_assert_ptr_nonnull(strstr(error.message, "refused"));
    ck_assert_int_eq(recv_status(0, 0, "none", 3, CLUSTER_SECOND / 50), TL_DEADLINE_EXCEEDED);
    wait_for_waiting(0);
    /* There is no time at all. */
    ck_assert_int_eq(tl_send_wait(cluster.workers[0], "unwanted", 3, tensor, 0, &error), TL_DEADLINE_EXCEEDED);
    ck_assert_int_eq(recv_status(1, 0, "none", 3, 0), TL_DEADLINE_EXCEEDED);
    ck_assert_int_eq(recv_status(0, 0, "none", 3, 0), TL_DEADLINE_EXCEEDED);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(default_timeout_comes_from_the_configuration)
{
    struct cluster one;
    cluster_init(&one, 1, "\"timeouts\": {\"request\": \"30ms\"}");
    struct tl_worker *worker = cluster_open(&one, 0);
    struct tl_completion completion;
    ck_assert_int_eq(
        tl_recv_wait(worker, cluster_peer(worker, 0), "none", 1, NULL, TL_TIMEOUT_DEFAULT, &completion, NULL),
        TL_DEADLINE_EXCEEDED);
    cluster_close_all(&one);
}
END_TEST

START_TEST(expired_transfer_leaves_the_value_to_others)
{
    struct tl_completion completion;
    send_tensor("big", 1, BIG_BYTES, 3);
    proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 2);
    ck_assert_int_eq(tl_recv_wait(cluster.workers[1], cluster_peer(cluster.workers[1], 0), "big", 1, NULL,
                                  CLUSTER_SECOND / 2, &completion, &error),
                     TL_DEADLINE_EXCEEDED);
    proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
    ck_assert_int_eq(recv_status(0, 0, "big", 1, CLUSTER_LONG), TL_OK);
    cluster_expect(cq, TL_OK);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- cancels -- */

START_TEST(cancel_wherever_a_receive_is)
{
    const unsigned from[] = {2, 0, 1};
    const char *where[] = {"the peer is not there", "waits at the peer", "waits here"};
    for (int i = 0; i < 3; i++) {
        tl_op_id op = cluster_recv(cluster.workers[1], from[i], "none", 1, cq);
        if (from[i] == 0) wait_for_waiting(1);
        ck_assert_msg(tl_cancel(cluster.workers[1], op) == TL_OK, "%s", where[i]);
        struct tl_completion completion = cluster_expect(cq, TL_CANCELLED);
        ck_assert_uint_eq(completion.op, op);
        ck_assert_int_eq(tl_cancel(cluster.workers[1], op), TL_NOT_FOUND);
        wait_for_waiting(0);
        ck_assert_uint_eq(cluster_stats(cluster.workers[1]).waiting_receivers, 0);
    }
    ck_assert_int_eq(tl_cancel(cluster.workers[1], 0), TL_NOT_FOUND);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], UINT64_MAX), TL_NOT_FOUND);
    /* A cancelled receive does not take what comes now. */
    send_tensor("none", 1, 10, 1);
    ck_assert_int_eq(recv_status(1, 0, "none", 1, CLUSTER_LONG), TL_OK);
    cluster_expect(cq, TL_OK);
}
END_TEST

START_TEST(cancel_of_a_send)
{
    tl_op_id op;
    unsigned released = 0;
    char bytes[10];
    struct tl_tensor *tensor = cluster_wrap(bytes, sizeof(bytes), &released);
    ck_assert_int_eq(tl_send(cluster.workers[0], "a", 1, tensor, CLUSTER_LONG, cq, NULL, &op, &error), TL_OK);
    tl_tensor_put(tensor);
    ck_assert_int_eq(tl_cancel(cluster.workers[0], op), TL_OK);
    cluster_expect(cq, TL_CANCELLED);
    ck_assert_uint_eq(released, 1);
    ck_assert_int_eq(tl_cancel(cluster.workers[0], op), TL_NOT_FOUND);
    ck_assert_int_eq(recv_status(1, 0, "a", 1, CLUSTER_SECOND / 20), TL_DEADLINE_EXCEEDED);
}
END_TEST

/* A destination belongs to the caller again as soon as the completion has come. */
START_TEST(cancelled_destination_is_never_written)
{
    send_tensor("big", 1, BIG_BYTES, 1);
    void *bytes = calloc(1, BIG_BYTES);
    void *copy = malloc(BIG_BYTES);
    for (unsigned round = 0; round < 6; round++) {
        unsigned released = 0;
        tl_op_id op;
        struct tl_tensor *destination = cluster_wrap(bytes, BIG_BYTES, &released);
        const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination};
        proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 8);
        ck_assert_int_eq(tl_recv(cluster.workers[1], cluster_peer(cluster.workers[1], 0), "big", 1, &options,
                                 CLUSTER_LONG, cq, NULL, &op, &error),
                         TL_OK);
        tl_tensor_put(destination);
        proxy_wait_limit(&proxy, PROXY_DOWN);
        /* Bytes arrive while the receive is cancelled, but never all of them. */
        if (round % 2 == 1) proxy_limit(&proxy, PROXY_DOWN, BIG_BYTES / 2);
        ck_assert_int_eq(tl_cancel(cluster.workers[1], op), TL_OK);
        cluster_expect(cq, TL_CANCELLED);
        ck_assert_uint_eq(released, 1);
        memset(bytes, (int)round, BIG_BYTES);
        memcpy(copy, bytes, BIG_BYTES);
        proxy_limit(&proxy, PROXY_DOWN, UINT64_MAX);
        CLUSTER_UNTIL(cluster_stats(cluster.workers[1]).open_operations == 0);
        ck_assert_int_eq(recv_status(1, 0, "none", round, CLUSTER_SECOND / 20), TL_DEADLINE_EXCEEDED);
        ck_assert_mem_eq(bytes, copy, BIG_BYTES);
    }
    ck_assert_int_eq(recv_status(1, 0, "big", 1, CLUSTER_LONG), TL_OK);
    cluster_expect(cq, TL_OK);
    free(bytes);
    free(copy);
}
END_TEST

/* Cancels come at random moments; each operation completes once, and each value arrives once or stays. */
START_TEST(cancel_at_any_moment)
{
    struct tl_cq *recv_cq = cluster_cq();
    for (unsigned i = 0; i < 300; i++) {
        send_tensor("t", i, 30000, i);
        tl_op_id op = cluster_recv(cluster.workers[1], 0, "t", i, recv_cq);
        for (volatile unsigned spin = 0; spin < i * 1000; spin++)
            continue;
        bool is_cancelled = tl_cancel(cluster.workers[1], op) == TL_OK;
        struct tl_completion completion = cluster_next(recv_cq);
        ck_assert_int_eq(completion.status.code, is_cancelled ? TL_CANCELLED : TL_OK);
        tl_tensor_put(completion.tensor);
        if (is_cancelled) ck_assert_int_eq(recv_status(1, 0, "t", i, CLUSTER_LONG), TL_OK);
        cluster_expect(cq, TL_OK);
    }
    ck_assert(cluster_is_quiet(cq));
    ck_assert(cluster_is_quiet(recv_cq));
    tl_cq_destroy(recv_cq);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ limits -- */

START_TEST(receivers_beyond_the_limit_are_refused)
{
    tl_op_id ops[3];
    for (unsigned i = 0; i < 3; i++)
        ops[i] = cluster_recv(cluster.workers[1], 0, "none", i, cq);
    wait_for_waiting(3);
    ck_assert_int_eq(recv_status(1, 0, "none", 4, CLUSTER_LONG), TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.message, "limits.waiting"));
    /* The place of a cancelled receive can be used at once. */
    ck_assert_int_eq(tl_cancel(cluster.workers[1], ops[2]), TL_OK);
    cluster_expect(cq, TL_CANCELLED);
    wait_for_waiting(2);
    cluster_recv(cluster.workers[1], 0, "none", 5, cq);
    wait_for_waiting(3);
    /* A receive of an existing value needs no place. */
    struct tl_tensor *tensor = cluster_tensor(10, 1);
    cluster_publish(cluster.workers[0], "there", 0, tensor);
    tl_tensor_put(tensor);
    ck_assert_int_eq(recv_status(1, 0, "there", 0, CLUSTER_LONG), TL_OK);
    cluster_close(&cluster, 1);
    for (int i = 0; i < 3; i++)
        cluster_expect(cq, TL_CANCELLED);
    wait_for_waiting(0);
}
END_TEST

/* A link has three quarters of the limit, and the program has the whole of it, however much its peers wait for. */
START_TEST(own_receivers_have_their_own_limit)
{
    for (unsigned i = 0; i < 3; i++)
        cluster_recv(cluster.workers[1], 0, "none", i, cq);
    wait_for_waiting(3);
    for (unsigned i = 0; i < 4; i++)
        cluster_recv(cluster.workers[0], 0, "none", i, cq);
    wait_for_waiting(7);
    ck_assert_int_eq(recv_status(0, 0, "none", 4, CLUSTER_LONG), TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.message, "limits.waiting"));
}
END_TEST

START_TEST(bytes_beyond_the_limit_are_refused)
{
    send_tensor("a", 1, 60000, 1);
    send_tensor("b", 1, 40000, 2);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).held_bytes == 100000);
    struct tl_tensor *tensor = cluster_tensor(1, 1);
    struct tl_tensor *empty = cluster_tensor(0, 1);
    ck_assert_int_eq(tl_send_wait(cluster.workers[0], "c", 1, tensor, CLUSTER_LONG, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.message, "limits.held"));
    cluster_send(cluster.workers[0], "empty", 1, empty, cq);
    ck_assert_int_eq(recv_status(1, 0, "empty", 1, CLUSTER_LONG), TL_OK);
    cluster_expect(cq, TL_OK);
    ck_assert_int_eq(recv_status(1, 0, "a", 1, CLUSTER_LONG), TL_OK);
    cluster_expect(cq, TL_OK);
    cluster_send(cluster.workers[0], "c", 1, tensor, cq);
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(recv_status(1, 0, i == 0 ? "b" : "c", 1, CLUSTER_LONG), TL_OK);
    cluster_expect(cq, TL_OK);
    cluster_expect(cq, TL_OK);
    tl_tensor_put(tensor);
    tl_tensor_put(empty);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("worker_steps");
    TCase *steps = tcase_create("steps");
    tcase_add_checked_fixture(steps, setup, teardown);
    tcase_add_test(steps, abort_reaches_everybody_with_its_whole_message);
    tcase_add_test(steps, abort_with_any_status_is_final);
    tcase_add_test(steps, abort_refuses_what_is_no_error);
    tcase_add_test(steps, abort_does_not_touch_what_is_published);
    tcase_add_test(steps, abort_while_the_tensor_is_on_its_way);
    tcase_add_test(steps, end_of_a_step_drops_unreceived_values);
    tcase_add_test(steps, end_of_a_step_lets_transfers_finish);
    tcase_add_test(steps, deadlines_name_what_was_waited_for);
    tcase_add_test(steps, default_timeout_comes_from_the_configuration);
    tcase_add_test(steps, expired_transfer_leaves_the_value_to_others);
    tcase_add_test(steps, cancel_wherever_a_receive_is);
    tcase_add_test(steps, cancel_of_a_send);
    tcase_add_test(steps, cancelled_destination_is_never_written);
    tcase_add_test(steps, cancel_at_any_moment);
    suite_add_tcase(suite, steps);
    TCase *limits = tcase_create("limits");
    tcase_add_checked_fixture(limits, setup_small, teardown);
    tcase_add_test(limits, receivers_beyond_the_limit_are_refused);
    tcase_add_test(limits, own_receivers_have_their_own_limit);
    tcase_add_test(limits, bytes_beyond_the_limit_are_refused);
    suite_add_tcase(suite, limits);
    return run_suite_in_process(suite);
}
