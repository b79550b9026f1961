// SPDX-License-Identifier: Apache-2.0
/* Subscriptions between workers, over gRPC and within the host: every value, in order, exactly once, whatever happens
 * to its owner, its receiver, its step and its shape. */
#include <check.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "control/internal.h"
#include "fakes/cluster.h"
#include "fakes/run_suite.h"
#include "server/worker_internal.h"

#define BYTES 64

static struct cluster cluster;
static struct tl_cq *cq;
static struct tl_cq *sent;
static struct tl_error error;

static void setup_with(const char *protocol)
{
    cluster_init(&cluster, 3, "\"timeouts\": {\"reservation\": \"100s\"}, \"limits\": {\"waiting\": 40}");
    cluster.protocol = protocol;
    cluster_open_all(&cluster);
    cq = cluster_cq();
    sent = cluster_cq();
}

static void setup_grpc(void)
{
    setup_with("grpc");
}

static void setup_auto(void)
{
    setup_with("auto");
}

static void teardown(void)
{
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
    tl_cq_destroy(sent);
}

/* ----------------------------------------------------------------------------------------------------- helpers -- */

static tl_op_id subscribe_to(unsigned owner, uint64_t from_step, struct tl_tensor *const *destinations, size_t count)
{
    const struct tl_subscribe_options options = {
        .size_bytes = sizeof(options), .from_step = from_step, .destinations = destinations, .count = count};
    tl_op_id op;
    enum tl_status status = tl_subscribe(cluster.workers[1], cluster_peer(cluster.workers[1], owner), "w", &options, cq,
                                         &cluster, &op, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return op;
}

static tl_op_id subscribe(uint64_t from_step, size_t count)
{
    return subscribe_to(0, from_step, NULL, count);
}

static void send_bytes(uint64_t step, uint64_t size_bytes)
{
    struct tl_tensor *tensor = cluster_tensor(size_bytes, (unsigned)step);
    cluster_send(cluster.workers[0], "w", step, tensor, sent);
    tl_tensor_put(tensor);
}

static void send_step(uint64_t step)
{
    send_bytes(step, BYTES);
}

static void publish(uint64_t step)
{
    struct tl_tensor *tensor = cluster_tensor(BYTES, (unsigned)step);
    cluster_publish(cluster.workers[0], "w", step, tensor);
    tl_tensor_put(tensor);
}

/* Returns the tensor of the next completion, which must be the value of this step. */
static struct tl_tensor *next_value(uint64_t step)
{
    struct tl_completion completion = cluster_next(cq);
    ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
    ck_assert_int_eq(completion.kind, TL_OP_SUBSCRIBE);
    ck_assert_ptr_eq(completion.user_data, &cluster);
    ck_assert_uint_eq(completion.step, step);
    ck_assert(cluster_tensor_is(completion.tensor, BYTES, (unsigned)step));
    return completion.tensor;
}

static void expect_value(uint64_t step)
{
    tl_tensor_put(next_value(step));
}

static void expect_error(enum tl_status status, uint64_t step)
{
    struct tl_completion completion = cluster_next(cq);
    ck_assert_msg(completion.status.code == status, "%s", completion.status.message);
    ck_assert_uint_eq(completion.step, step);
    ck_assert_ptr_null(completion.tensor);
}

static void cancel(tl_op_id op)
{
    ck_assert_int_eq(tl_cancel(cluster.workers[1], op), TL_OK);
    expect_error(TL_CANCELLED, 0);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], op), TL_NOT_FOUND);
    ck_assert_uint_eq(cluster_stats(cluster.workers[1]).open_operations, 0);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).waiting_receivers == 0);
}

static void await_requests(uint64_t count)
{
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).waiting_receivers == count);
}

/* -------------------------------------------------------------------------------------------------------- sent -- */

START_TEST(a_thousand_steps)
{
    const uint64_t count = 1000;
    tl_op_id op = subscribe(1, 4);
    for (uint64_t step = 0; step <= count; step++)
        send_step(step);
    for (uint64_t step = 1; step <= count; step++)
        expect_value(step);
    for (uint64_t step = 1; step <= count; step++)
        cluster_expect(sent, TL_OK);
    await_requests(4);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).held_tensors, 1);
    ck_assert(cluster_is_quiet(cq));
    cancel(op);
    ck_assert_uint_eq(tl_worker_end_step(cluster.workers[0], 0, NULL, &error), TL_OK);
}
END_TEST

/* What is there already comes, the lowest step first. */
START_TEST(sent_before)
{
    for (uint64_t step = 5; step > 0; step--)
        send_step(step);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).held_tensors == 5);
    tl_op_id op = subscribe(2, 1);
    for (uint64_t step = 2; step <= 5; step++)
        expect_value(step);
    await_requests(1);
    cancel(op);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).held_tensors, 1);
}
END_TEST

struct putter {
    pthread_t thread;
    struct tl_tensor *tensor;
};

static void *put(void *context)
{
    tl_tensor_put(((struct putter *)context)->tensor);
    return NULL;
}

/* A receiver that puts nothing gets as many values as it has buffers; other keys go on. */
START_TEST(slow_receiver)
{
    struct tl_tensor *destinations[2];
    struct putter putters[2];
    for (unsigned i = 0; i < 2; i++)
        destinations[i] = cluster_tensor(BYTES, 100);
    tl_op_id op = subscribe_to(0, 0, _i == 0 ? NULL : destinations, 2);
    for (uint64_t step = 1; step <= 4; step++)
        send_step(step);
    for (unsigned i = 0; i < 2; i++) {
        putters[i].tensor = next_value(i + 1);
        if (_i == 1) ck_assert_ptr_eq(tl_tensor_data(putters[i].tensor), tl_tensor_data(destinations[i]));
    }
    struct tl_tensor *other = cluster_tensor(BYTES, 1);
    cluster_publish(cluster.workers[0], "other", 0, other);
    tl_tensor_put(other);
    tl_tensor_put(cluster_recv_wait(cluster.workers[1], 0, "other", 0));
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).held_tensors == 2);
    ck_assert(cluster_is_quiet(cq));
    const void *memory = tl_tensor_data(putters[1].tensor);
    ck_assert_int_eq(pthread_create(&putters[1].thread, NULL, put, &putters[1]), 0);
    ck_assert_int_eq(pthread_join(putters[1].thread, NULL), 0);
    struct tl_tensor *third = next_value(3);
    ck_assert_ptr_eq(tl_tensor_data(third), memory);
    ck_assert(cluster_tensor_is(putters[0].tensor, BYTES, 1));
    tl_tensor_put(putters[0].tensor);
    expect_value(4);
    cancel(op);
    ck_assert(cluster_tensor_is(third, BYTES, 3));
    tl_tensor_put(third);
    for (unsigned i = 0; i < 2; i++)
        tl_tensor_put(destinations[i]);
}
END_TEST

START_TEST(exact_receive_comes_first)
{
    tl_op_id op = subscribe(0, 1);
    await_requests(2 - 1);
    cluster_recv(cluster.workers[2], 0, "w", 1, sent);
    await_requests(2);
    send_step(1);
    send_step(2);
    expect_value(2);
    unsigned received = 0;
    for (int i = 0; i < 3; i++) {
        struct tl_completion completion = cluster_expect(sent, TL_OK);
        if (completion.kind == TL_OP_RECV) received += completion.step == 1;
    }
    ck_assert_uint_eq(received, 1);
    cancel(op);
}
END_TEST

START_TEST(subscribers_alternate)
{
    const struct tl_subscribe_options options = {.size_bytes = sizeof(options), .count = 2};
    struct tl_cq *others = cluster_cq();
    tl_op_id op = subscribe(0, 2), other;
    await_requests(2);
    ck_assert_int_eq(tl_subscribe(cluster.workers[2], cluster_peer(cluster.workers[2], 0), "w", &options, others, NULL,
                                  &other, &error),
                     TL_OK);
    await_requests(4);
    for (uint64_t step = 1; step <= 4; step++)
        send_step(step);
    expect_value(1);
    expect_value(3);
    for (uint64_t step = 2; step <= 4; step += 2) {
        struct tl_completion completion = cluster_next(others);
        ck_assert_uint_eq(completion.step, step);
        tl_tensor_put(completion.tensor);
    }
    ck_assert_int_eq(tl_cancel(cluster.workers[2], other), TL_OK);
    cluster_expect(others, TL_CANCELLED);
    cancel(op);
    tl_cq_destroy(others);
}
END_TEST

/* A value of another shape is a completion, then it is there for others, and the next one comes. */
START_TEST(changed_shape)
{
    struct tl_tensor *destination = cluster_tensor(BYTES, 100);
    tl_op_id op = subscribe_to(0, 1, &destination, 1);
    send_step(1);
    send_bytes(2, BYTES + 1);
    send_bytes(3, BYTES - 1);
    send_step(4);
    expect_value(1);
    expect_error(TL_FAILED_PRECONDITION, 2);
    expect_error(TL_FAILED_PRECONDITION, 3);
    expect_value(4);
    struct tl_tensor *tensor = cluster_recv_wait(cluster.workers[2], 0, "w", 2);
    ck_assert(cluster_tensor_is(tensor, BYTES + 1, 2));
    tl_tensor_put(tensor);
    cancel(op);
    tl_tensor_put(destination);
}
END_TEST

/* An owner that sends nothing but values that do not fit cannot fill the queue: each error keeps its buffer until it is
 * read. */
START_TEST(errors_that_are_not_read)
{
    struct tl_tensor *destination = cluster_tensor(BYTES, 100), *other = cluster_tensor(BYTES, 1);
    struct tl_completion completions[8];
    struct pollfd readable = {.fd = tl_cq_fd(cq), .events = POLLIN};
    tl_op_id op = subscribe_to(0, 1, &destination, 1);
    for (uint64_t step = 1; step <= 5; step++)
        send_bytes(step, BYTES + 1);
    ck_assert_int_eq(poll(&readable, 1, -1), 1);
    cluster_publish(cluster.workers[0], "other", 0, other);
    for (int i = 0; i < 3; i++)
        tl_tensor_put(cluster_recv_wait(cluster.workers[1], 0, "other", 0));
    ck_assert_uint_eq(tl_cq_poll(cq, completions, 8), 1);
    ck_assert_uint_eq(completions[0].step, 1);
    for (uint64_t step = 2; step <= 5; step++)
        expect_error(TL_FAILED_PRECONDITION, step);
    cancel(op);
    tl_tensor_put(destination);
    tl_tensor_put(other);
}
END_TEST

/* Memory of the library has whatever shape a value needs. */
START_TEST(any_shape)
{
    tl_op_id op = subscribe(0, 1);
    for (uint64_t step = 1; step <= 4; step++)
        send_bytes(step, step % 2 * BYTES);
    for (uint64_t step = 1; step <= 4; step++) {
        struct tl_completion completion = cluster_next(cq);
        ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
        ck_assert(cluster_tensor_is(completion.tensor, step % 2 * BYTES, (unsigned)step));
        tl_tensor_put(completion.tensor);
    }
    cancel(op);
}
END_TEST

/* Steps that are aborted or end at the owner are left out; the value of a step that is aborted here is a completion. */
START_TEST(steps)
{
    send_step(1);
    send_step(2);
    send_step(3);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).held_tensors == 3);
    ck_assert_int_eq(tl_worker_abort_step(cluster.workers[0], 1, TL_DATA_LOSS, "bad", &error), TL_OK);
    ck_assert_int_eq(tl_worker_end_step(cluster.workers[0], 2, NULL, &error), TL_OK);
    tl_op_id op = subscribe(0, 2);
    expect_value(3);
    ck_assert_int_eq(tl_worker_abort_step(cluster.workers[1], 4, TL_DATA_LOSS, "bad here", &error), TL_OK);
    send_step(4);
    send_step(5);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_uint_eq(completion.step, 4);
    ck_assert_int_eq(completion.status.code, TL_DATA_LOSS);
    ck_assert_str_eq(completion.status.message, "bad here");
    expect_value(5);
    ck_assert_int_eq(tl_worker_end_step(cluster.workers[1], 4, NULL, &error), TL_OK);
    send_step(6);
    expect_value(6);
    cancel(op);
}
END_TEST

/* --------------------------------------------------------------------------------------------------- published -- */

START_TEST(newest_and_none_twice)
{
    publish(3);
    tl_op_id op = subscribe(2, 2);
    struct tl_tensor *first = next_value(3);
    await_requests(1);
    publish(4);
    struct tl_tensor *second = next_value(4);
    for (uint64_t step = 5; step <= 9; step++)
        publish(step);
    publish(1); /* older than what is wanted */
    publish(10);
    tl_tensor_put(first);
    expect_value(10);
    tl_tensor_put(second);
    await_requests(2);
    ck_assert(cluster_is_quiet(cq));
    publish(10); /* another value of that version */
    expect_value(10);
    cancel(op);
}
END_TEST

/* --------------------------------------------------------------------------------------------- restart and close -- */

START_TEST(owner_restarts)
{
    tl_op_id op = subscribe(0, 3);
    send_step(1);
    expect_value(1);
    publish(7);
    expect_value(7);
    cluster_expect(sent, TL_OK);
    for (unsigned i = 0; i < 2; i++) {
        cluster_close(&cluster, 0);
        cluster_open(&cluster, 0);
        await_requests(3); /* values that come while some are asked again may come in another order */
        for (uint64_t step = 2; step <= 4; step++)
            send_step(step);
        for (uint64_t step = 2; step <= 4; step++) {
            expect_value(step);
            cluster_expect(sent, TL_OK);
        }
    }
    publish(7);
    expect_value(7);
    cancel(op);
}
END_TEST

/* What was reserved for the former process is there for the next. */
START_TEST(receiver_restarts)
{
    subscribe(0, 2);
    await_requests(2);
    cluster_close(&cluster, 1);
    expect_error(TL_CANCELLED, 0);
    await_requests(0);
    send_step(1);
    publish(2);
    cluster_open(&cluster, 1);
    tl_op_id op = subscribe(0, 2);
    expect_value(1);
    expect_value(2);
    cancel(op);
}
END_TEST

/* Tensors outlive the subscription and the worker; what was not read is dropped. */
START_TEST(closes_with_values)
{
    subscribe(0, 3);
    for (uint64_t step = 1; step <= 3; step++)
        send_step(step);
    struct tl_tensor *first = next_value(1), *second = next_value(2);
    for (int i = 0; i < 3; i++)
        cluster_expect(sent, TL_OK);
    if (_i == 0) tl_tensor_put(second);
    cluster_close(&cluster, 1);
    if (_i == 1) tl_tensor_put(second);
    expect_value(3);
    expect_error(TL_CANCELLED, 0);
    ck_assert(cluster_tensor_is(first, BYTES, 1));
    tl_tensor_put(first);
}
END_TEST

/* The last completion says how long the subscription was open, without the time until the program reads it. */
START_TEST(end_that_is_read_late)
{
    int64_t begin_ns = cluster_now_ns();
    tl_op_id op = subscribe(0, 2);
    int64_t open_ns = cluster_now_ns();
    await_requests(2);
    int64_t least_ns = cluster_now_ns() - open_ns;
    ck_assert_int_eq(tl_cancel(cluster.workers[1], op), TL_OK);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[1]).open_operations == 0);
    int64_t most_ns = cluster_now_ns() - begin_ns;
    cluster_pause();
    struct tl_completion completion = cluster_expect(cq, TL_CANCELLED);
    ck_assert(completion.is_last);
    ck_assert_int_ge(completion.duration_ns, least_ns);
    ck_assert_int_le(completion.duration_ns, most_ns);
}
END_TEST

/* Each value comes either to the subscription, before its end, or stays at its owner. Of the values that are under way
 * when it is cancelled some may still come. */
START_TEST(cancelled_with_values_under_way)
{
    enum { COUNT = 50, BYTES_EACH = 100000 };
    bool has_come[COUNT + 1] = {false};
    tl_op_id op = subscribe(0, 8);
    for (uint64_t step = 1; step <= COUNT; step++)
        send_bytes(step, BYTES_EACH);
    uint64_t got = 0;
    for (;; got++) {
        if (got == 3) ck_assert_int_eq(tl_cancel(cluster.workers[1], op), TL_OK);
        struct tl_completion completion = cluster_next(cq);
        if (completion.status.code == TL_CANCELLED) break;
        ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
        ck_assert_uint_le(completion.step, COUNT);
        if (got < 3) ck_assert_uint_eq(completion.step, got + 1);
        ck_assert(!has_come[completion.step]);
        has_come[completion.step] = true;
        ck_assert(cluster_tensor_is(completion.tensor, BYTES_EACH, (unsigned)completion.step));
        tl_tensor_put(completion.tensor);
    }
    ck_assert(cluster_is_quiet(cq));
    ck_assert_uint_ge(got, 3);
    for (uint64_t step = 1; step <= COUNT; step++)
        if (!has_come[step]) tl_tensor_put(cluster_recv_wait(cluster.workers[2], 0, "w", step));
    for (uint64_t step = 1; step <= COUNT; step++)
        cluster_expect(sent, TL_OK);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- refused -- */

START_TEST(more_than_may_wait)
{
    struct tl_completion completion;
    subscribe(0, 100);
    completion = cluster_next(cq);
    ck_assert_int_eq(completion.status.code, TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(completion.status.message, "limits.waiting"));
    ck_assert_uint_eq(completion.step, 0);
    await_requests(0);
    tl_op_id op = subscribe(0, 5);
    send_step(1);
    expect_value(1);
    cancel(op);
}
END_TEST

/* A peer of an older version would take its requests for others. */
START_TEST(older_peer)
{
    cluster_close(&cluster, 0);
    cluster_open(&cluster, 0);
    cluster.workers[0]->control->options.self.serves_subscriptions = false;
    subscribe(0, 3);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_int_eq(completion.status.code, TL_UNIMPLEMENTED);
    ck_assert_str_eq(completion.status.message,
                     "/job:node/task:0 is of an older version, which knows no subscriptions; "
                     "receive w step by step");
    ck_assert(cluster_is_quiet(cq));
    ck_assert_uint_eq(cluster_stats(cluster.workers[1]).open_operations, 0);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).waiting_receivers, 0);
}
END_TEST

START_TEST(of_itself)
{
    struct tl_tensor *destination = cluster_tensor(BYTES, 100);
    cluster_send(cluster.workers[1], "w", 1, destination, sent);
    tl_op_id op = subscribe_to(1, 0, NULL, 1);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_int_eq(completion.status.code, TL_OK);
    ck_assert_int_eq(completion.path, TL_PATH_SELF);
    ck_assert(cluster_tensor_is(completion.tensor, BYTES, 100));
    cluster_expect(sent, TL_OK);
    cluster_publish(cluster.workers[1], "w", 2, destination);
    ck_assert(cluster_is_quiet(cq));
    tl_tensor_put(completion.tensor);
    completion = cluster_next(cq);
    ck_assert_uint_eq(completion.step, 2);
    tl_tensor_put(completion.tensor);
    cancel(op);
    struct tl_tensor *odd = cluster_tensor(BYTES + 1, 1);
    op = subscribe_to(1, 0, &odd, 1);
    expect_error(TL_FAILED_PRECONDITION, 2);
    cancel(op);
    tl_tensor_put(odd);
    tl_tensor_put(destination);
}
END_TEST

/* What was sent and then published comes in this order, although both came before the loop has passed one on. */
START_TEST(of_itself_in_order)
{
    cluster_init(&cluster, 2, NULL);
    cluster.progress = TL_PROGRESS_CALLER;
    cluster_open_all(&cluster);
    cq = cluster_cq();
    sent = cluster_cq();
    subscribe_to(1, 0, NULL, 3);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[1]).waiting_receivers == 3);
    struct tl_tensor *tensor = cluster_tensor(BYTES, 1);
    cluster_send(cluster.workers[1], "w", 1, tensor, sent);
    cluster_publish(cluster.workers[1], "w", 2, tensor);
    tl_tensor_put(tensor);
    for (uint64_t step = 1; step <= 2; step++) {
        struct tl_completion completion = cluster_next(cq);
        ck_assert_uint_eq(completion.step, step);
        tl_tensor_put(completion.tensor);
    }
    teardown();
}
END_TEST

START_TEST(wrong_calls)
{
    struct tl_worker *worker = cluster.workers[1];
    tl_peer_id peer = cluster_peer(worker, 0);
    struct tl_tensor *tensors[] = {cluster_tensor(BYTES, 1), cluster_tensor(BYTES + 1, 1)};
    struct tl_subscribe_options options = {.size_bytes = sizeof(options), .destinations = tensors, .count = 2};
    ck_assert_int_eq(tl_subscribe(worker, peer, "w", &options, cq, NULL, NULL, &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "destination 1 for w has another dtype or shape than the first");
    options.count = 0;
    ck_assert_int_eq(tl_subscribe(worker, peer, "w", &options, cq, NULL, NULL, &error), TL_INVALID_ARGUMENT);
    options.count = 1;
    ck_assert_int_eq(tl_subscribe(worker, peer, "", &options, cq, NULL, NULL, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_subscribe(worker, peer + 100, "w", &options, cq, NULL, NULL, &error), TL_NOT_FOUND);
    ck_assert_int_eq(tl_subscribe(worker, peer, "w", NULL, cq, NULL, NULL, &error), TL_INVALID_ARGUMENT);
    options.count = SIZE_MAX;
    options.destinations = NULL;
    ck_assert_int_eq(tl_subscribe(worker, peer, "w", &options, cq, NULL, NULL, &error), TL_RESOURCE_EXHAUSTED);
    for (unsigned i = 0; i < 2; i++)
        tl_tensor_put(tensors[i]);
}
END_TEST

static void add(Suite *suite, const char *name, void (*setup)(void))
{
    TCase *tcase = tcase_create(name);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, a_thousand_steps);
    tcase_add_test(tcase, sent_before);
    tcase_add_loop_test(tcase, slow_receiver, 0, 2);
    tcase_add_test(tcase, exact_receive_comes_first);
    tcase_add_test(tcase, subscribers_alternate);
    tcase_add_test(tcase, changed_shape);
    tcase_add_test(tcase, errors_that_are_not_read);
    tcase_add_test(tcase, any_shape);
    tcase_add_test(tcase, steps);
    tcase_add_test(tcase, newest_and_none_twice);
    tcase_add_test(tcase, owner_restarts);
    tcase_add_test(tcase, receiver_restarts);
    tcase_add_loop_test(tcase, closes_with_values, 0, 2);
    tcase_add_test(tcase, end_that_is_read_late);
    tcase_add_test(tcase, cancelled_with_values_under_way);
    tcase_add_test(tcase, more_than_may_wait);
    tcase_add_test(tcase, older_peer);
    tcase_add_test(tcase, of_itself);
    tcase_add_test(tcase, wrong_calls);
    suite_add_tcase(suite, tcase);
}

int main(void)
{
    Suite *suite = suite_create("subscribe");
    add(suite, "grpc", setup_grpc);
    add(suite, "local", setup_auto);
    add_own_case(suite, "own", NULL, NULL, of_itself_in_order);
    return run_suite(suite);
}
