// SPDX-License-Identifier: Apache-2.0
/* Values that were sent, while there is no memory to answer or to lend: none is lost. */
#include <check.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "control/link_serves.h"
#include "fakes/cluster.h"
#include "fakes/run_suite.h"
#include "server/transfers/borrow.h"

static atomic_bool is_out_of_memory; /* for what an answer is sent from, once */

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);

void *__wrap_calloc(size_t count, size_t size)
{
    bool must_fail = count * size == sizeof(struct link_sending) && atomic_exchange(&is_out_of_memory, false);
    return must_fail ? NULL : __real_calloc(count, size);
}

static atomic_int failing_borrows;

enum tl_status __real_tl_borrow_create(struct tl_worker *worker, struct tl_tensor *base,
                                       void (*returned)(void *context), void *context, struct tl_borrow **ret_borrow,
                                       struct tl_tensor **ret_tensor, struct tl_error *ret_error);
enum tl_status __wrap_tl_borrow_create(struct tl_worker *worker, struct tl_tensor *base,
                                       void (*returned)(void *context), void *context, struct tl_borrow **ret_borrow,
                                       struct tl_tensor **ret_tensor, struct tl_error *ret_error);

enum tl_status __wrap_tl_borrow_create(struct tl_worker *worker, struct tl_tensor *base,
                                       void (*returned)(void *context), void *context, struct tl_borrow **ret_borrow,
                                       struct tl_tensor **ret_tensor, struct tl_error *ret_error)
{
    int left = atomic_load(&failing_borrows);
    if (left > 0) {
        atomic_store(&failing_borrows, left - 1);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory");
    }
    return __real_tl_borrow_create(worker, base, returned, context, ret_borrow, ret_tensor, ret_error);
}

static atomic_bool is_without_tensors; /* for the memory of one tensor, once */

enum tl_status __real_tl_tensor_create_for(const struct tl_meta_data *meta_data, struct tl_tensor **ret_tensor,
                                           struct tl_error *ret_error);
enum tl_status __wrap_tl_tensor_create_for(const struct tl_meta_data *meta_data, struct tl_tensor **ret_tensor,
                                           struct tl_error *ret_error);

enum tl_status __wrap_tl_tensor_create_for(const struct tl_meta_data *meta_data, struct tl_tensor **ret_tensor,
                                           struct tl_error *ret_error)
{
    if (atomic_exchange(&is_without_tensors, false)) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory");
    return __real_tl_tensor_create_for(meta_data, ret_tensor, ret_error);
}

START_TEST(a_value_that_could_not_be_answered_stays)
{
    struct cluster cluster;
    struct tl_completion completion;
    struct tl_error error;
    cluster_init(&cluster, 2, NULL);
    cluster.protocol = "grpc";
    cluster_open_all(&cluster);
    struct tl_worker *owner = cluster.workers[0], *receiver = cluster.workers[1];
    struct tl_cq *cq = cluster_cq();
    struct tl_tensor *tensor = cluster_tensor(1000, 1);
    cluster_send(owner, "k", 1, tensor, cq);
    tl_tensor_put(tensor);
    CLUSTER_UNTIL(cluster_stats(owner).held_tensors == 1); /* what the send allocates may have the same size */
    atomic_store(&is_out_of_memory, true);
    ck_assert_int_eq(tl_recv_wait(receiver, cluster_peer(receiver, 0), "k", 1, NULL, CLUSTER_LONG, &completion, &error),
                     TL_RESOURCE_EXHAUSTED);
    ck_assert(!atomic_load(&is_out_of_memory));
    ck_assert(cluster_is_quiet(cq));
    struct tl_tensor *received = cluster_recv_wait(receiver, 0, "k", 1);
    ck_assert(cluster_tensor_is(received, 1000, 1));
    tl_tensor_put(received);
    cluster_expect(cq, TL_OK);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
}
END_TEST

static tl_op_id subscribe(struct tl_worker *worker, struct tl_tensor *const *destinations, size_t count,
                          struct tl_cq *cq)
{
    const struct tl_subscribe_options options = {
        .size_bytes = sizeof(options), .destinations = destinations, .count = count};
    tl_op_id op;
    struct tl_error error;
    ck_assert_int_eq(tl_subscribe(worker, cluster_peer(worker, 0), "k", &options, cq, NULL, &op, &error), TL_OK);
    return op;
}

/* Values that cannot be lent wait, and those behind them too. */
static void check_borrows(const char *protocol, bool has_destinations)
{
    struct cluster cluster;
    cluster_init(&cluster, 2, NULL);
    cluster.protocol = protocol;
    cluster_open_all(&cluster);
    struct tl_worker *owner = cluster.workers[0], *receiver = cluster.workers[1];
    struct tl_cq *cq = cluster_cq(), *sent = cluster_cq();
    struct tl_tensor *destinations[] = {cluster_tensor(1000, 0), cluster_tensor(1000, 0)};
    tl_op_id op = subscribe(receiver, has_destinations ? destinations : NULL, 2, cq);
    CLUSTER_UNTIL(cluster_stats(owner).waiting_receivers == 2);
    atomic_store(&failing_borrows, 3);
    for (unsigned step = 1; step <= 5; step++) {
        struct tl_tensor *tensor = cluster_tensor(1000, step);
        cluster_send(owner, "k", step, tensor, sent);
        tl_tensor_put(tensor);
    }
    for (unsigned step = 1; step <= 5; step++) {
        struct tl_completion completion = cluster_next(cq);
        ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
        ck_assert_uint_eq(completion.step, step);
        ck_assert(cluster_tensor_is(completion.tensor, 1000, step));
        tl_tensor_put(completion.tensor);
        cluster_expect(sent, TL_OK);
    }
    ck_assert_int_eq(atomic_load(&failing_borrows), 0);
    ck_assert_int_eq(tl_cancel(receiver, op), TL_OK);
    cluster_expect(cq, TL_CANCELLED);
    tl_tensor_put(destinations[0]);
    tl_tensor_put(destinations[1]);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
    tl_cq_destroy(sent);
}

START_TEST(a_value_that_could_not_be_lent_comes_later)
{
    check_borrows("grpc", false);
    check_borrows("grpc", true);
    check_borrows("auto", false);
    check_borrows("auto", true);
}
END_TEST

/* A subscription that is cancelled while its value waits for memory passes it on as it is. */
START_TEST(a_value_that_cannot_be_lent_comes_at_the_end)
{
    struct cluster cluster;
    cluster_init(&cluster, 2, NULL);
    cluster.protocol = "grpc";
    cluster_open_all(&cluster);
    struct tl_worker *owner = cluster.workers[0], *receiver = cluster.workers[1];
    struct tl_cq *cq = cluster_cq(), *sent = cluster_cq();
    struct tl_tensor *tensor = cluster_tensor(1000, 1);
    tl_op_id op = subscribe(receiver, NULL, 1, cq);
    atomic_store(&failing_borrows, 1000000);
    cluster_send(owner, "k", 1, tensor, sent);
    tl_tensor_put(tensor);
    CLUSTER_UNTIL(atomic_load(&failing_borrows) < 1000000);
    ck_assert(cluster_is_quiet(cq));
    ck_assert_int_eq(tl_cancel(receiver, op), TL_OK);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_int_eq(completion.status.code, TL_OK);
    ck_assert_uint_eq(completion.step, 1);
    ck_assert(cluster_tensor_is(completion.tensor, 1000, 1));
    tl_tensor_put(completion.tensor);
    cluster_expect(cq, TL_CANCELLED);
    cluster_expect(sent, TL_OK);
    atomic_store(&failing_borrows, 0);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
    tl_cq_destroy(sent);
}
END_TEST

struct subscribed {
    struct cluster cluster;
    struct tl_worker *owner, *receiver;
    struct tl_cq *cq, *sent;
    tl_op_id op;
};

/* Opens two workers, of which one subscribes with two buffers of the library; its pool has 1 MiB. */
static void open_subscribed(struct subscribed *subscribed, const char *protocol, unsigned receiver)
{
    cluster_init(&subscribed->cluster, 2, "\"local\": {\"pool\": \"1MiB\", \"max_pool\": \"1MiB\"}");
    subscribed->cluster.protocol = protocol;
    cluster_open_all(&subscribed->cluster);
    subscribed->owner = subscribed->cluster.workers[0];
    subscribed->receiver = subscribed->cluster.workers[receiver];
    subscribed->cq = cluster_cq();
    subscribed->sent = cluster_cq();
    subscribed->op = subscribe(subscribed->receiver, NULL, 2, subscribed->cq);
    CLUSTER_UNTIL(cluster_stats(subscribed->owner).waiting_receivers == 2);
}

static void close_subscribed(struct subscribed *subscribed)
{
    ck_assert_int_eq(tl_cancel(subscribed->receiver, subscribed->op), TL_OK);
    cluster_expect(subscribed->cq, TL_CANCELLED);
    cluster_close_all(&subscribed->cluster);
    tl_cq_destroy(subscribed->cq);
    tl_cq_destroy(subscribed->sent);
}

static void send_to_subscribed(const struct subscribed *subscribed, unsigned step, uint64_t size_bytes)
{
    struct tl_tensor *tensor = cluster_tensor(size_bytes, step);
    cluster_send(subscribed->owner, "k", step, tensor, subscribed->sent);
    tl_tensor_put(tensor);
}

/* The next completion is this value. */
static void expect_value(const struct subscribed *subscribed, unsigned step, uint64_t size_bytes)
{
    struct tl_completion completion = cluster_next(subscribed->cq);
    ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
    ck_assert_uint_eq(completion.step, step);
    ck_assert(cluster_tensor_is(completion.tensor, size_bytes, step));
    tl_tensor_put(completion.tensor);
    cluster_expect(subscribed->sent, TL_OK);
}

/* A value for which there is no memory is a completion, and stays at its owner. A value of an earlier step that is sent
 * after it comes. */
static void check_place(const char *protocol, unsigned receiver)
{
    struct subscribed subscribed;
    open_subscribed(&subscribed, protocol, receiver);
    atomic_store(&is_without_tensors, true);
    send_to_subscribed(&subscribed, 5, 1000);
    ck_assert_uint_eq(cluster_expect(subscribed.cq, TL_RESOURCE_EXHAUSTED).step, 5);
    send_to_subscribed(&subscribed, 3, 1000);
    expect_value(&subscribed, 3, 1000);
    struct tl_tensor *tensor = cluster_recv_wait(subscribed.receiver, 0, "k", 5);
    ck_assert(cluster_tensor_is(tensor, 1000, 5));
    tl_tensor_put(tensor);
    cluster_expect(subscribed.sent, TL_OK);
    close_subscribed(&subscribed);
}

START_TEST(a_value_without_memory_for_it)
{
    check_place("grpc", 1);
    check_place("auto", 0); /* it is its own owner */
}
END_TEST

/* A value that the pool cannot hold is given back and comes over gRPC. So does what is sent after it for an earlier
 * step. */
START_TEST(a_value_that_the_pool_cannot_hold)
{
    struct subscribed subscribed;
    open_subscribed(&subscribed, "auto", 1);
    send_to_subscribed(&subscribed, 5, 4 << 20);
    expect_value(&subscribed, 5, 4 << 20);
    send_to_subscribed(&subscribed, 3, 1000);
    expect_value(&subscribed, 3, 1000);
    close_subscribed(&subscribed);
}
END_TEST

/* Each of many subscriptions of the worker itself refuses the value, which then is there for the next one. */
START_TEST(a_value_that_no_buffer_fits)
{
    enum { COUNT = 10000 };
    struct cluster cluster;
    cluster_init(&cluster, 1, "\"limits\": {\"waiting\": 20000}");
    cluster_open_all(&cluster);
    struct tl_worker *worker = cluster.workers[0];
    struct tl_cq *cq = cluster_cq(), *sent = cluster_cq();
    struct tl_tensor *destination = cluster_tensor(1, 0), *tensor = cluster_tensor(1000, 1);
    for (unsigned i = 0; i < COUNT; i++)
        subscribe(worker, &destination, 1, cq);
    CLUSTER_UNTIL(cluster_stats(worker).waiting_receivers == COUNT);
    cluster_send(worker, "k", 1, tensor, sent);
    for (unsigned i = 0; i < COUNT; i++)
        cluster_expect(cq, TL_FAILED_PRECONDITION);
    struct tl_tensor *received = cluster_recv_wait(worker, 0, "k", 1);
    ck_assert(cluster_tensor_is(received, 1000, 1));
    tl_tensor_put(received);
    cluster_expect(sent, TL_OK);
    tl_tensor_put(tensor);
    tl_tensor_put(destination);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
    tl_cq_destroy(sent);
}
END_TEST

static struct tl_tensor *string(const char *text)
{
    const uint64_t dims[] = {1};
    const struct tl_string value = {.data = (char *)text, .len_bytes = strlen(text)};
    struct tl_tensor *tensor;
    ck_assert_int_eq(tl_tensor_create_strings(1, dims, &value, &tensor, NULL), TL_OK);
    return tensor;
}

/* Each of many receives of the worker itself gives the value back, which then is there for the next one: there is no
 * memory to lend it, or it does not fit the destination. */
START_TEST(a_value_that_many_receives_give_back)
{
    enum { COUNT = 20000 };
    bool is_lent = _i == 0;
    struct cluster cluster;
    struct tl_error error;
    cluster_init(&cluster, 1, "\"limits\": {\"waiting\": 20000}");
    cluster_open_all(&cluster);
    struct tl_worker *worker = cluster.workers[0];
    struct tl_cq *cq = cluster_cq(), *sent = cluster_cq();
    struct tl_tensor *tensor = string("sent"), *destination = string("old");
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = is_lent ? NULL : destination};
    for (unsigned i = 0; i < COUNT; i++)
        ck_assert_int_eq(
            tl_recv(worker, cluster_peer(worker, 0), "k", 1, &options, CLUSTER_LONG, cq, NULL, NULL, &error), TL_OK);
    CLUSTER_UNTIL(cluster_stats(worker).waiting_receivers == COUNT);
    atomic_store(&failing_borrows, is_lent ? COUNT : 0);
    cluster_send(worker, "k", 1, tensor, sent);
    for (unsigned i = 0; i < COUNT; i++)
        cluster_expect(cq, is_lent ? TL_RESOURCE_EXHAUSTED : TL_FAILED_PRECONDITION);
    struct tl_tensor *received = cluster_recv_wait(worker, 0, "k", 1);
    ck_assert_int_eq(tl_tensor_dtype(received), TL_STRING);
    tl_tensor_put(received);
    cluster_expect(sent, TL_OK);
    tl_tensor_put(tensor);
    tl_tensor_put(destination);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
    tl_cq_destroy(sent);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("scarce_memory");
    TCase *link = tcase_create("link"), *subscription = tcase_create("subscription"), *stack = tcase_create("stack");
    tcase_add_test(link, a_value_that_could_not_be_answered_stays);
    tcase_add_test(subscription, a_value_that_could_not_be_lent_comes_later);
    tcase_add_test(subscription, a_value_that_cannot_be_lent_comes_at_the_end);
    tcase_add_test(subscription, a_value_without_memory_for_it);
    tcase_add_test(subscription, a_value_that_the_pool_cannot_hold);
    tcase_add_test(stack, a_value_that_no_buffer_fits);
    tcase_add_loop_test(stack, a_value_that_many_receives_give_back, 0, 2);
    tcase_set_timeout(link, 60);
    tcase_set_timeout(subscription, 60);
    tcase_set_timeout(stack, 60);
    suite_add_tcase(suite, link);
    suite_add_tcase(suite, subscription);
    suite_add_tcase(suite, stack);
    return run_suite(suite);
}
