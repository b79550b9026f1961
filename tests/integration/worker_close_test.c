// SPDX-License-Identifier: Apache-2.0
/* Closing: in every state of every operation, with references that outlive the worker, and again and again. */
#include <check.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/cluster.h"
#include "fakes/descriptors.h"
#include "fakes/pattern.h"
#include "fakes/run_suite.h"
#include "server/worker_internal.h"

#define BIG_BYTES (UINT64_C(48) << 20)

static struct cluster cluster;
static struct tl_cq *cq;

static void setup(void)
{
    cluster_init(&cluster, 2, NULL);
    cluster_open_all(&cluster);
    cq = cluster_cq();
}

static void teardown(void)
{
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
}

/* --------------------------------------------------------------------------------------------- states of sends -- */

START_TEST(unwanted_send_is_cancelled)
{
    unsigned released = 0;
    char bytes[100] = {0};
    struct tl_tensor *tensor = cluster_wrap(bytes, sizeof(bytes), &released);
    cluster_send(cluster.workers[0], "a", 1, tensor, cq);
    tl_tensor_put(tensor);
    cluster_close(&cluster, 0);
    struct tl_completion sent = cluster_expect(cq, TL_CANCELLED);
    ck_assert_ptr_nonnull(strstr(sent.status.message, "closed"));
    ck_assert_uint_eq(released, 1);
}
END_TEST

START_TEST(running_transfer_finishes_when_its_sender_closes)
{
    struct tl_tensor *tensor = cluster_tensor(BIG_BYTES, 1);
    struct tl_cq *receiver_cq = cluster_cq();
    cluster_send(cluster.workers[0], "big", 1, tensor, cq);
    cluster_recv(cluster.workers[1], 0, "big", 1, receiver_cq);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[1]).bytes_received > 0);
    cluster_close(&cluster, 0);
    cluster_expect(cq, TL_OK);
    struct tl_completion received = cluster_next(receiver_cq);
    ck_assert_int_eq(received.status.code, TL_OK);
    ck_assert(cluster_tensor_is(received.tensor, BIG_BYTES, 1));
    tl_tensor_put(received.tensor);
    tl_tensor_put(tensor);
    tl_cq_destroy(receiver_cq);
}
END_TEST

START_TEST(running_transfer_is_cut_when_there_is_no_time)
{
    unsigned released = 0;
    void *bytes = malloc(BIG_BYTES);
    struct tl_tensor *tensor = cluster_wrap(bytes, BIG_BYTES, &released);
    struct tl_cq *receiver_cq = cluster_cq();
    cluster_send(cluster.workers[0], "big", 1, tensor, cq);
    tl_tensor_put(tensor);
    tl_op_id op = cluster_recv(cluster.workers[1], 0, "big", 1, receiver_cq);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[1]).bytes_received > 0);
    tl_worker_close(cluster.workers[0], 0);
    cluster.workers[0] = NULL;
    struct tl_completion sent = cluster_next(cq);
    ck_assert_uint_eq(released, 1);
    free(bytes);
    if (sent.status.code == TL_OK) {
        cluster_expect(receiver_cq, TL_OK); /* The send was faster. */
    } else {
        ck_assert_int_eq(sent.status.code, TL_CANCELLED);
        ck_assert_int_eq(tl_cancel(cluster.workers[1], op), TL_OK);
        cluster_expect(receiver_cq, TL_CANCELLED);
    }
    tl_cq_destroy(receiver_cq);
}
END_TEST

/* ------------------------------------------------------------------------------------------ states of receives -- */

START_TEST(receives_are_cancelled_wherever_they_are)
{
    struct cluster three;
    cluster_init(&three, 3, NULL);
    cluster_open(&three, 0);
    cluster_open(&three, 1);
    struct tl_worker *worker = three.workers[0];
    cluster_recv(worker, 0, "from itself", 1, cq);
    cluster_recv(worker, 1, "waits there", 1, cq);
    cluster_recv(worker, 2, "not sent", 1, cq);
    CLUSTER_UNTIL(cluster_stats(three.workers[1]).waiting_receivers == 1);
    cluster_close(&three, 0);
    for (int i = 0; i < 3; i++)
        cluster_expect(cq, TL_CANCELLED);
    ck_assert(cluster_is_quiet(cq));
    CLUSTER_UNTIL(cluster_stats(three.workers[1]).waiting_receivers == 0);
    cluster_close_all(&three);
}
END_TEST

START_TEST(operation_just_submitted_is_completed)
{
    struct tl_tensor *tensor = cluster_tensor(1000, 1);
    cluster_send(cluster.workers[0], "a", 1, tensor, cq);
    cluster_recv(cluster.workers[0], 1, "b", 1, cq);
    cluster_close(&cluster, 0);
    tl_tensor_put(tensor);
    cluster_expect(cq, TL_CANCELLED);
    cluster_expect(cq, TL_CANCELLED);
}
END_TEST

START_TEST(receiver_that_closes_leaves_the_value_to_others)
{
    struct tl_tensor *tensor = cluster_tensor(BIG_BYTES, 5);
    struct tl_cq *receiver_cq = cluster_cq();
    cluster_send(cluster.workers[0], "big", 1, tensor, cq);
    cluster_recv(cluster.workers[1], 0, "big", 1, receiver_cq);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[1]).bytes_received > 0);
    cluster_close(&cluster, 1);
    struct tl_completion received = cluster_next(receiver_cq);
    if (received.status.code == TL_OK) {
        tl_tensor_put(received.tensor); /* The receive was faster. */
    } else {
        ck_assert_int_eq(received.status.code, TL_CANCELLED);
        cluster_open(&cluster, 1);
        struct tl_tensor *got = cluster_recv_wait(cluster.workers[1], 0, "big", 1);
        ck_assert(cluster_tensor_is(got, BIG_BYTES, 5));
        tl_tensor_put(got);
    }
    cluster_expect(cq, TL_OK);
    tl_tensor_put(tensor);
    tl_cq_destroy(receiver_cq);
}
END_TEST

/* ---------------------------------------------------------------------------------------- references that stay -- */

START_TEST(tensor_received_from_itself_outlives_the_worker)
{
    unsigned released = 0;
    char bytes[5000];
    pattern_fill(bytes, sizeof(bytes), 2);
    struct tl_tensor *tensor = cluster_wrap(bytes, sizeof(bytes), &released);
    cluster_send(cluster.workers[0], "a", 1, tensor, cq);
    tl_tensor_put(tensor);
    struct tl_tensor *got = cluster_recv_wait(cluster.workers[0], 0, "a", 1);
    cluster_close(&cluster, 0);
    cluster_expect(cq, TL_OK);
    ck_assert_uint_eq(released, 0);
    ck_assert(cluster_tensor_is(got, sizeof(bytes), 2));
    tl_tensor_put(got);
    ck_assert_uint_eq(released, 1);
}
END_TEST

START_TEST(unread_completion_outlives_the_worker)
{
    struct tl_cq *receiver_cq = cluster_cq();
    struct tl_tensor *tensor = cluster_tensor(5000, 2);
    cluster_send(cluster.workers[0], "a", 1, tensor, cq);
    cluster_recv(cluster.workers[0], 0, "a", 1, receiver_cq);
    tl_tensor_put(tensor);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).held_tensors == 0);
    cluster_close(&cluster, 0);
    struct tl_completion received = cluster_next(receiver_cq);
    ck_assert(cluster_tensor_is(received.tensor, 5000, 2));
    tl_tensor_put(received.tensor);
    cluster_expect(cq, TL_OK);
    tl_cq_destroy(receiver_cq);
}
END_TEST

START_TEST(published_tensor_received_from_itself_outlives_the_worker)
{
    struct tl_tensor *tensor = cluster_tensor(5000, 2);
    cluster_publish(cluster.workers[0], "a", 1, tensor);
    tl_tensor_put(tensor);
    tensor = cluster_recv_wait(cluster.workers[0], 0, "a", 1);
    cluster_close(&cluster, 0);
    ck_assert(cluster_tensor_is(tensor, 5000, 2));
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(unread_completions_are_dropped_with_their_queue)
{
    struct tl_cq *receiver_cq = cluster_cq();
    struct tl_tensor *tensor = cluster_tensor(5000, 2);
    cluster_publish(cluster.workers[0], "a", 1, tensor);
    for (int i = 0; i < 10; i++)
        cluster_recv(cluster.workers[1], 0, "a", 1, receiver_cq);
    tl_tensor_put(tensor);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[1]).open_operations == 0);
    tl_cq_destroy(receiver_cq);
}
END_TEST

/* ----------------------------------------------------------------------------------------------- other threads -- */

struct blocked {
    pthread_t thread;
    struct tl_worker *worker;
    unsigned number;
    enum tl_status status;
};

static void *block(void *context)
{
    struct blocked *blocked = context;
    struct tl_worker *worker = blocked->worker;
    char bytes[10] = {0};
    struct tl_completion completion;
    unsigned released = 0;
    struct tl_tensor *tensor = cluster_wrap(bytes, sizeof(bytes), &released);
    switch (blocked->number % 4) {
    case 0:
        blocked->status = tl_send_wait(worker, "unwanted", blocked->number, tensor, TL_TIMEOUT_NONE, NULL);
        break;
    case 1:
        blocked->status =
            tl_recv_wait(worker, cluster_peer(worker, 0), "none", 1, NULL, TL_TIMEOUT_NONE, &completion, NULL);
        break;
    case 2:
        blocked->status =
            tl_recv_wait(worker, cluster_peer(worker, 1), "none", 1, NULL, TL_TIMEOUT_NONE, &completion, NULL);
        break;
    default:
        blocked->status = tl_worker_wait_for_peers(worker, NULL, 0, 0, TL_TIMEOUT_NONE, NULL);
        break;
    }
    tl_tensor_put(tensor);
    return NULL;
}

static void close_while_threads_wait(enum tl_progress progress)
{
    struct cluster three; /* The last one of these never comes. */
    struct blocked blocked[16];
    cluster_init(&three, 3, NULL);
    three.progress = progress;
    cluster_open(&three, 0);
    for (unsigned i = 0; i < 16; i++) {
        blocked[i] = (struct blocked){.worker = three.workers[0], .number = i, .status = TL_UNKNOWN};
        ck_assert_int_eq(pthread_create(&blocked[i].thread, NULL, block, &blocked[i]), 0);
    }
    CLUSTER_UNTIL(__atomic_load_n(&three.workers[0]->operations.blocked_calls, __ATOMIC_ACQUIRE) == 16);
    cluster_close(&three, 0);
    for (unsigned i = 0; i < 16; i++) {
        pthread_join(blocked[i].thread, NULL);
        ck_assert_int_eq(blocked[i].status, TL_CANCELLED);
    }
}

START_TEST(blocked_calls_end_with_the_worker)
{
    close_while_threads_wait(TL_PROGRESS_THREAD);
    close_while_threads_wait(TL_PROGRESS_CALLER);
}
END_TEST

struct reader {
    pthread_t thread;
    struct tl_cq *cq;
    unsigned count; /* receives that it waits for, all at once */
    unsigned cancelled;
};

#define MOST_READ 8

static void *read_until_cancelled(void *context)
{
    struct reader *reader = context;
    struct tl_completion completions[MOST_READ];
    size_t count = tl_cq_wait_many(reader->cq, completions, MOST_READ, reader->count, CLUSTER_LONG);
    for (size_t i = 0; i < count; i++)
        reader->cancelled += completions[i].status.code == TL_CANCELLED;
    return NULL;
}

static void close_while_a_queue_is_read(unsigned count, enum tl_progress progress)
{
    struct cluster one;
    struct reader reader = {.cq = cluster_cq(), .count = count};
    cluster_init(&one, 1, NULL);
    one.progress = progress;
    cluster_open(&one, 0);
    for (unsigned i = 0; i < count; i++)
        cluster_recv(one.workers[0], 0, "none", 1, reader.cq);
    ck_assert_int_eq(pthread_create(&reader.thread, NULL, read_until_cancelled, &reader), 0);
    CLUSTER_UNTIL(cluster_stats(one.workers[0]).waiting_receivers == count);
    cluster_close(&one, 0);
    pthread_join(reader.thread, NULL);
    ck_assert_uint_eq(reader.cancelled, count);
    tl_cq_destroy(reader.cq);
}

START_TEST(queue_can_be_waited_for_while_its_worker_closes)
{
    for (int i = 0; i < 100; i++) {
        close_while_a_queue_is_read(i % 2 == 0 ? 1 : MOST_READ, TL_PROGRESS_THREAD);
        close_while_a_queue_is_read(i % 2 == 0 ? 1 : MOST_READ, TL_PROGRESS_CALLER);
    }
}
END_TEST

#define LOAD_OPERATIONS 400

/* Reads the completions of that many receives, each of which ends once, with success or cancelled. */
static void *read_load(void *context)
{
    struct reader *reader = context;
    struct tl_completion completion;
    for (int i = 0; i < LOAD_OPERATIONS; i++) {
        if (tl_cq_wait(reader->cq, &completion, 1, CLUSTER_LONG) != 1) return NULL;
        if (completion.status.code != TL_OK && completion.status.code != TL_CANCELLED) return NULL;
        reader->cancelled += completion.status.code == TL_CANCELLED;
        tl_tensor_put(completion.tensor);
    }
    return reader;
}

static void close_under_load(unsigned first, enum tl_progress progress)
{
    struct cluster pair;
    struct reader reader = {.cq = cluster_cq()};
    cluster_init(&pair, 2, NULL);
    cluster_open_all(&pair);
    cluster_close(&pair, 0);
    pair.progress = progress;
    cluster_open(&pair, 0);
    struct tl_tensor *tensor = cluster_tensor(30000, 1);
    cluster_publish(pair.workers[1], "published", 0, tensor);
    tl_tensor_put(tensor);
    for (int i = 0; i < LOAD_OPERATIONS; i++)
        cluster_recv(pair.workers[0], 1, "published", 0, reader.cq);
    ck_assert_int_eq(pthread_create(&reader.thread, NULL, read_load, &reader), 0);
    CLUSTER_UNTIL(cluster_stats(pair.workers[1]).tensors_sent > 20);
    cluster_close(&pair, first);
    cluster_close_all(&pair);
    void *result;
    pthread_join(reader.thread, &result);
    ck_assert_ptr_eq(result, &reader);
    ck_assert(cluster_is_quiet(reader.cq));
    tl_cq_destroy(reader.cq);
}

START_TEST(closes_under_load)
{
    for (int i = 0; i < 10; i++) {
        close_under_load(0, TL_PROGRESS_THREAD);
        close_under_load(1, TL_PROGRESS_THREAD);
        close_under_load(0, TL_PROGRESS_CALLER);
    }
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- leaks -- */

static void one_cycle(bool has_traffic)
{
    struct cluster pair;
    cluster_init(&pair, 2, NULL);
    cluster_open_all(&pair);
    if (has_traffic) {
        struct tl_tensor *tensor = cluster_tensor(20000, 1);
        cluster_send(pair.workers[0], "a", 1, tensor, cq);
        tl_tensor_put(tensor);
        tl_tensor_put(cluster_recv_wait(pair.workers[1], 0, "a", 1));
        cluster_expect(cq, TL_OK);
    }
    cluster_close_all(&pair);
}

START_TEST(nothing_leaks_over_many_cycles)
{
    for (int i = 0; i < 20; i++)
        one_cycle(true);
    unsigned fd_count = count_descriptors();
    size_t used = mallinfo2().uordblks;
    for (int i = 0; i < 200; i++)
        one_cycle(i % 2 == 0);
    /* gRPC closes its last descriptors on threads of its own, and keeps one for each of these. */
    CLUSTER_UNTIL(count_descriptors() <= fd_count + 20);
    ck_assert_uint_lt(mallinfo2().uordblks, used + 200 * 1000);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("worker_close");
    TCase *pair = tcase_create("pair");
    tcase_add_checked_fixture(pair, setup, teardown);
    tcase_add_test(pair, unwanted_send_is_cancelled);
    tcase_add_test(pair, running_transfer_finishes_when_its_sender_closes);
    tcase_add_test(pair, running_transfer_is_cut_when_there_is_no_time);
    tcase_add_test(pair, receives_are_cancelled_wherever_they_are);
    tcase_add_test(pair, operation_just_submitted_is_completed);
    tcase_add_test(pair, receiver_that_closes_leaves_the_value_to_others);
    tcase_add_test(pair, tensor_received_from_itself_outlives_the_worker);
    tcase_add_test(pair, unread_completion_outlives_the_worker);
    tcase_add_test(pair, published_tensor_received_from_itself_outlives_the_worker);
    tcase_add_test(pair, unread_completions_are_dropped_with_their_queue);
    tcase_add_test(pair, blocked_calls_end_with_the_worker);
    tcase_add_test(pair, queue_can_be_waited_for_while_its_worker_closes);
    tcase_add_test(pair, closes_under_load);
    tcase_add_test(pair, nothing_leaks_over_many_cycles);
    suite_add_tcase(suite, pair);
    return run_suite_in_process(suite);
}
