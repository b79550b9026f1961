// SPDX-License-Identifier: Apache-2.0
/* Completion queues and threads: descriptors to poll, workers that their callers drive, many callers at once. */
#include <check.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "fakes/cluster.h"
#include "fakes/run_suite.h"
#include "server/worker_internal.h"

#define THREADS 6

static struct cluster cluster;
static struct tl_cq *cq;
static struct tl_error error;

static void open_with(enum tl_progress progress)
{
    cluster_init(&cluster, 2, NULL);
    cluster_open(&cluster, 0);
    cluster.progress = progress;
    cluster_open(&cluster, 1);
    cq = cluster_cq();
}

static void setup(void)
{
    open_with(TL_PROGRESS_THREAD);
}

/* Its callers drive worker 1. */
static void setup_caller(void)
{
    open_with(TL_PROGRESS_CALLER);
}

/* A worker without a driver does not answer a peer that closes and waits for it, so it goes first. */
static void teardown(void)
{
    cluster_close(&cluster, 1);
    cluster_close(&cluster, 0);
    tl_cq_destroy(cq);
}

static void publish(const char *key, uint64_t size_bytes, unsigned seed)
{
    struct tl_tensor *tensor = cluster_tensor(size_bytes, seed);
    cluster_publish(cluster.workers[0], key, 0, tensor);
    tl_tensor_put(tensor);
}

/* ------------------------------------------------------------------------------------------------------ queues -- */

static bool is_readable(int fd, int timeout_ms)
{
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    return poll(&wait, 1, timeout_ms) == 1;
}

START_TEST(descriptor_is_readable_while_completions_wait)
{
    int fd = tl_cq_fd(cq);
    ck_assert_int_eq(fd, tl_cq_fd(cq));
    ck_assert(!is_readable(fd, 0));
    publish("p", 100, 1);
    for (int i = 0; i < 3; i++)
        cluster_recv(cluster.workers[1], 0, "p", 0, cq);
    struct tl_completion completions[4];
    size_t got = 0;
    while (got < 3) {
        ck_assert(is_readable(fd, 20000));
        size_t count = tl_cq_poll(cq, completions, 1);
        ck_assert_uint_eq(count, 1);
        tl_tensor_put(completions[0].tensor);
        got += count;
    }
    ck_assert(!is_readable(fd, 0));
    ck_assert_uint_eq(tl_cq_poll(cq, completions, 4), 0);
}
END_TEST

START_TEST(descriptor_may_be_asked_for_late)
{
    publish("p", 100, 1);
    cluster_recv(cluster.workers[1], 0, "p", 0, cq);
    cluster_recv(cluster.workers[1], 0, "none", 0, cq);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[1]).open_operations == 1);
    ck_assert(is_readable(tl_cq_fd(cq), 20000));
    cluster_expect(cq, TL_OK);
    ck_assert(!is_readable(tl_cq_fd(cq), 0));
}
END_TEST

START_TEST(queue_is_read_in_batches)
{
    struct tl_completion completions[8];
    publish("p", 100, 1);
    for (int i = 0; i < 20; i++)
        cluster_recv(cluster.workers[1], 0, "p", 0, cq);
    ck_assert_uint_eq(tl_cq_wait(cq, completions, 0, 0), 0);
    for (size_t got = 0; got < 20;) {
        size_t count = tl_cq_wait(cq, completions, 8, CLUSTER_LONG);
        ck_assert(count >= 1 && count <= 8);
        for (size_t i = 0; i < count; i++)
            tl_tensor_put(completions[i].tensor);
        got += count;
    }
    ck_assert_uint_eq(tl_cq_wait(cq, completions, 8, 0), 0);
    ck_assert_uint_eq(tl_cq_wait(cq, completions, 8, CLUSTER_SECOND / 50), 0);
    ck_assert_uint_eq(tl_cq_wait(cq, completions, 8, -5), 0);
    tl_cq_destroy(NULL);
}
END_TEST

START_TEST(one_queue_serves_several_workers)
{
    publish("p", 100, 1);
    struct tl_tensor *tensor = cluster_tensor(100, 1);
    cluster_publish(cluster.workers[1], "p", 0, tensor);
    for (unsigned i = 0; i < 100; i++)
        cluster_recv(cluster.workers[i % 2], 1 - i % 2, "p", 0, cq);
    for (unsigned i = 0; i < 100; i++)
        cluster_expect(cq, TL_OK);
    tl_tensor_put(tensor);
}
END_TEST

/* Returns how many completions a wait for so many takes; they are tensors that were received. */
static size_t take_many(size_t capacity, size_t min_count, int64_t timeout_ns)
{
    struct tl_completion completions[64];
    ck_assert_uint_le(capacity, TL_ARRAY_COUNT(completions));
    size_t count = tl_cq_wait_many(cq, completions, capacity, min_count, timeout_ns);
    for (size_t i = 0; i < count; i++) {
        ck_assert_int_eq(completions[i].status.code, TL_OK);
        tl_tensor_put(completions[i].tensor);
    }
    return count;
}

START_TEST(many_are_awaited_at_once)
{
    publish("p", 100, 1);
    for (unsigned repetition = 0; repetition < 20; repetition++) {
        for (unsigned i = 0; i < 20; i++)
            cluster_recv(cluster.workers[1], 0, "p", 0, cq);
        ck_assert_uint_eq(take_many(8, 20, CLUSTER_LONG), 8);
        ck_assert_uint_eq(take_many(8, 12, 0), 8); /* these are there */
        ck_assert_uint_eq(take_many(8, 4, 0), 4);
    }
}
END_TEST

START_TEST(wait_for_many_ends_with_its_time)
{
    publish("p", 100, 1);
    cluster_recv(cluster.workers[1], 0, "p", 0, cq);
    cluster_recv(cluster.workers[1], 0, "q", 0, cq);
    int64_t begin_ns = tl_clock_now_ns();
    size_t count = take_many(8, 2, CLUSTER_SECOND / 10);
    ck_assert(tl_clock_now_ns() - begin_ns >= CLUSTER_SECOND / 10);
    ck_assert_uint_le(count, 1);
    publish("q", 100, 2);
    ck_assert_uint_eq(take_many(8, 2 - count, CLUSTER_LONG), 2 - count);
    ck_assert(cluster_is_quiet(cq));
}
END_TEST

START_TEST(many_of_several_workers_are_awaited)
{
    publish("p", 100, 1);
    struct tl_tensor *tensor = cluster_tensor(100, 1);
    cluster_publish(cluster.workers[1], "p", 0, tensor);
    tl_tensor_put(tensor);
    for (unsigned repetition = 0; repetition < 20; repetition++) {
        for (unsigned i = 0; i < 50; i++)
            cluster_recv(cluster.workers[i % 2], 1 - i % 2, "p", 0, cq);
        ck_assert_uint_eq(take_many(50, 50, CLUSTER_LONG), 50);
    }
}
END_TEST

static uint64_t rounds_of_callers(unsigned task)
{
    struct tl_progress_engine *progress = &cluster.workers[task]->progress;
    pthread_mutex_lock(&progress->mutex);
    uint64_t rounds = progress->caller_rounds;
    pthread_mutex_unlock(&progress->mutex);
    return rounds;
}

static void receive_in_a_row(unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        cluster_recv(cluster.workers[1], 0, "p", 0, cq);
        cluster_expect(cq, TL_OK);
    }
}

START_TEST(readers_take_over_the_loop)
{
    publish("p", 8, 1);
    ck_assert_uint_eq(rounds_of_callers(1), 0);
    do
        receive_in_a_row(100);
    while (rounds_of_callers(1) == 0);
    /* The thread serves the worker again when its readers have gone. */
    struct tl_tensor *tensor = cluster_tensor(100, 2);
    cluster_publish(cluster.workers[1], "q", 0, tensor);
    tl_tensor_put(tensor);
    tl_tensor_put(cluster_recv_wait(cluster.workers[0], 1, "q", 0));
    receive_in_a_row(100);
}
END_TEST

static void *read_one(void *context)
{
    struct tl_completion *completion = context;
    ck_assert_uint_eq(tl_cq_wait(cq, completion, 1, TL_TIMEOUT_NONE), 1);
    return NULL;
}

static bool has_reader(unsigned task)
{
    return __atomic_load_n(&cluster.workers[task]->progress.reader_count, __ATOMIC_RELAXED) > 0;
}

/* A reader makes the progress of worker 1 when that closes. It then waits for what another worker completes. */
START_TEST(worker_closes_beside_its_reader)
{
    publish("p", 8, 1);
    receive_in_a_row(20);
    struct tl_completion completion;
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, read_one, &completion), 0);
    CLUSTER_UNTIL(has_reader(1));
    cluster_close(&cluster, 1);
    cluster_recv(cluster.workers[0], 0, "p", 0, cq);
    pthread_join(thread, NULL);
    ck_assert_int_eq(completion.status.code, TL_OK);
    tl_tensor_put(completion.tensor);
}
END_TEST

/* ---------------------------------------------------------------------------------------------- without thread -- */

START_TEST(caller_drives_by_waiting)
{
    publish("p", 100000, 1);
    struct tl_tensor *tensor = cluster_recv_wait(cluster.workers[1], 0, "p", 0);
    ck_assert(cluster_tensor_is(tensor, 100000, 1));
    tl_tensor_put(tensor);
    cluster_recv(cluster.workers[1], 0, "p", 0, cq);
    cluster_expect(cq, TL_OK);
    cluster_recv(cluster.workers[1], 0, "p", 0, cq);
    struct tl_completion completion;
    while (tl_cq_poll(cq, &completion, 1) == 0)
        ck_assert_int_eq(tl_worker_progress(cluster.workers[1], CLUSTER_LONG), TL_OK);
    tl_tensor_put(completion.tensor);
    tl_peer_id peer = cluster_peer(cluster.workers[1], 0);
    ck_assert_int_eq(tl_worker_wait_for_peers(cluster.workers[1], &peer, 1, 1, CLUSTER_LONG, &error), TL_OK);
    ck_assert_uint_eq(cluster_stats(cluster.workers[1]).tensors_received, 3);
}
END_TEST

static uint64_t call_count;

static void note_calls(struct tl_closure *closure)
{
    (void)closure;
    call_count = __atomic_load_n(&cluster.workers[1]->operations.blocked_calls, __ATOMIC_RELAXED);
}

/* A worker that closes is there until the threads that make its progress have left it. */
START_TEST(progress_is_a_call_that_closing_awaits)
{
    struct tl_closure closure = {.run = note_calls};
    call_count = UINT64_MAX;
    tl_progress_post(&cluster.workers[1]->progress, &closure);
    while (call_count == UINT64_MAX)
        ck_assert_int_eq(tl_worker_progress(cluster.workers[1], CLUSTER_LONG), TL_OK);
    ck_assert_uint_eq(call_count, 1);
}
END_TEST

START_TEST(progress_is_for_workers_without_thread)
{
    ck_assert_int_eq(tl_worker_progress(cluster.workers[0], 0), TL_FAILED_PRECONDITION);
    while (tl_worker_progress(cluster.workers[1], 0) == TL_OK)
        continue;
    ck_assert_int_eq(tl_worker_progress(cluster.workers[1], 0), TL_DEADLINE_EXCEEDED);
    ck_assert_int_eq(tl_worker_progress(cluster.workers[1], CLUSTER_SECOND / 50), TL_DEADLINE_EXCEEDED);
}
END_TEST

START_TEST(deadlines_hold_without_a_thread)
{
    struct tl_completion completion;
    ck_assert_int_eq(tl_recv_wait(cluster.workers[1], cluster_peer(cluster.workers[1], 0), "none", 0, NULL,
                                  CLUSTER_SECOND / 50, &completion, &error),
                     TL_DEADLINE_EXCEEDED);
    ck_assert_int_eq(tl_recv(cluster.workers[1], cluster_peer(cluster.workers[1], 0), "none", 0, NULL,
                             CLUSTER_SECOND / 50, cq, NULL, NULL, &error),
                     TL_OK);
    cluster_expect(cq, TL_DEADLINE_EXCEEDED);
}
END_TEST

START_TEST(queue_drives_one_worker_only)
{
    struct cluster other;
    cluster_init(&other, 1, NULL);
    other.progress = TL_PROGRESS_CALLER;
    cluster_open(&other, 0);
    cluster_recv(cluster.workers[1], 1, "none", 0, cq);
    struct tl_tensor *tensor = cluster_tensor(10, 1);
    ck_assert_int_eq(tl_send(other.workers[0], "a", 0, tensor, 0, cq, NULL, NULL, &error), TL_FAILED_PRECONDITION);
    ck_assert_int_eq(
        tl_recv(other.workers[0], cluster_peer(other.workers[0], 0), "a", 0, NULL, 0, cq, NULL, NULL, &error),
        TL_FAILED_PRECONDITION);
    /* The worker is free once the first caller has gone. */
    cluster_close(&cluster, 1);
    cluster_expect(cq, TL_CANCELLED);
    cluster_send(other.workers[0], "a", 0, tensor, cq);
    tl_tensor_put(cluster_recv_wait(other.workers[0], 0, "a", 0));
    cluster_expect(cq, TL_OK);
    tl_tensor_put(tensor);
    cluster_close_all(&other);
}
END_TEST

/* The reader sleeps in the loop of worker 1 when worker 0, which has a thread, completes something. */
START_TEST(queue_of_both_kinds_wakes_its_reader)
{
    for (unsigned i = 0; i < 50; i++) {
        cluster_recv(cluster.workers[1], 1, "none", i, cq);
        cluster_recv(cluster.workers[0], 0, "soon", i, cq);
        struct tl_tensor *tensor = cluster_tensor(10, 1);
        struct tl_cq *send_cq = cluster_cq();
        cluster_send(cluster.workers[0], "soon", i, tensor, send_cq);
        tl_tensor_put(tensor);
        cluster_expect(cq, TL_OK);
        cluster_expect(send_cq, TL_OK);
        tl_cq_destroy(send_cq);
    }
    cluster_close(&cluster, 1);
    for (unsigned i = 0; i < 50; i++)
        cluster_expect(cq, TL_CANCELLED);
}
END_TEST

/* ------------------------------------------------------------------------------------------------ many threads -- */

struct task {
    pthread_t thread;
    unsigned number;
    unsigned done;
};

static void run_threads(void *(*run)(void *), struct task *tasks)
{
    for (unsigned i = 0; i < THREADS; i++) {
        tasks[i] = (struct task){.number = i};
        ck_assert_int_eq(pthread_create(&tasks[i].thread, NULL, run, &tasks[i]), 0);
    }
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(tasks[i].thread, NULL);
}

#define EXCHANGES 100

/* Moves one tensor. The caller blocks in worker 1, which may have no thread. */
static bool exchange_one(unsigned from, const char *key, uint64_t step, struct tl_tensor *tensor, struct tl_cq *own_cq,
                         struct tl_completion *ret_received)
{
    tl_peer_id peer = cluster_peer(cluster.workers[1 - from], from);
    struct tl_completion sent = {.status.code = TL_OK};
    enum tl_status status;
    if (from == 0) {
        cluster_send(cluster.workers[0], key, step, tensor, own_cq);
        status = tl_recv_wait(cluster.workers[1], peer, key, step, NULL, CLUSTER_LONG, ret_received, NULL);
        return status == TL_OK && tl_cq_wait(own_cq, &sent, 1, CLUSTER_LONG) == 1 && sent.status.code == TL_OK;
    }
    cluster_recv(cluster.workers[0], 1, key, step, own_cq);
    status = tl_send_wait(cluster.workers[1], key, step, tensor, CLUSTER_LONG, NULL);
    return status == TL_OK && tl_cq_wait(own_cq, ret_received, 1, CLUSTER_LONG) == 1 &&
           ret_received->status.code == TL_OK;
}

static void *exchange(void *context)
{
    struct task *task = context;
    char key[16];
    snprintf(key, sizeof(key), "k%u", task->number);
    struct tl_tensor *tensor = cluster_tensor(1000 + task->number, task->number);
    struct tl_cq *own_cq = cluster_cq();
    for (uint64_t step = 0; step < EXCHANGES; step++) {
        struct tl_completion received;
        if (!exchange_one(task->number % 2, key, step, tensor, own_cq, &received)) break;
        task->done += cluster_tensor_is(received.tensor, 1000 + task->number, task->number);
        tl_tensor_put(received.tensor);
    }
    tl_tensor_put(tensor);
    tl_cq_destroy(own_cq);
    return NULL;
}

START_TEST(many_threads_exchange)
{
    struct task tasks[THREADS];
    run_threads(exchange, tasks);
    for (unsigned i = 0; i < THREADS; i++)
        ck_assert_uint_eq(tasks[i].done, EXCHANGES);
}
END_TEST

/* Every thread submits receives to one queue and reads whatever completes on it. */
static void *share_queue(void *context)
{
    struct task *task = context;
    for (unsigned i = 0; i < EXCHANGES; i++) {
        struct tl_completion completion;
        cluster_recv(cluster.workers[1], 0, "p", 0, cq);
        if (tl_cq_wait(cq, &completion, 1, CLUSTER_LONG) != 1) break;
        if (completion.status.code != TL_OK || !cluster_tensor_is(completion.tensor, 5000, 1)) break;
        tl_tensor_put(completion.tensor);
        task->done++;
    }
    return NULL;
}

START_TEST(many_threads_read_one_queue)
{
    struct task tasks[THREADS];
    publish("p", 5000, 1);
    run_threads(share_queue, tasks);
    for (unsigned i = 0; i < THREADS; i++)
        ck_assert_uint_eq(tasks[i].done, EXCHANGES);
    ck_assert(cluster_is_quiet(cq));
}
END_TEST

#define AT_ONCE 5

/* The same, but each thread waits for as many as it has asked for. */
static void *share_queue_for_many(void *context)
{
    struct task *task = context;
    for (unsigned i = 0; i < EXCHANGES; i++) {
        struct tl_completion completions[AT_ONCE];
        for (unsigned k = 0; k < AT_ONCE; k++)
            cluster_recv(cluster.workers[1], 0, "p", 0, cq);
        if (tl_cq_wait_many(cq, completions, AT_ONCE, AT_ONCE, CLUSTER_LONG) != AT_ONCE) break;
        for (unsigned k = 0; k < AT_ONCE; k++) {
            task->done += completions[k].status.code == TL_OK;
            tl_tensor_put(completions[k].tensor);
        }
    }
    return NULL;
}

START_TEST(many_threads_wait_for_many)
{
    struct task tasks[THREADS];
    publish("p", 5000, 1);
    run_threads(share_queue_for_many, tasks);
    for (unsigned i = 0; i < THREADS; i++)
        ck_assert_uint_eq(tasks[i].done, EXCHANGES * AT_ONCE);
    ck_assert(cluster_is_quiet(cq));
}
END_TEST

/* Every kind of call at once. */
static void *mixture(void *context)
{
    struct task *task = context;
    struct tl_worker *worker = cluster.workers[task->number % 2];
    unsigned other = 1 - task->number % 2;
    char key[16];
    snprintf(key, sizeof(key), "m%u", task->number);
    struct tl_tensor *tensor = cluster_tensor(20000, task->number);
    struct tl_cq *own_cq = cluster_cq();
    for (unsigned i = 0; i < EXCHANGES; i++) {
        struct tl_completion completion;
        uint64_t step = task->number * 1000 + i;
        cluster_publish(worker, key, i, tensor);
        (void)cluster_stats(worker);
        (void)cluster_peer_info(worker, other);
        tl_op_id op = cluster_recv(worker, other, "not sent", step, own_cq);
        if (tl_recv_wait(worker, cluster_peer(worker, 1 - other), key, i, NULL, CLUSTER_LONG, &completion, NULL) !=
            TL_OK)
            break;
        tl_tensor_put(completion.tensor);
        if (i % 3 == 0 && tl_worker_abort_step(worker, step, TL_ABORTED, "enough", NULL) != TL_OK) break;
        if (i % 3 == 1 && tl_worker_end_step(worker, step, NULL, NULL) != TL_OK) break;
        if (i % 3 == 2 && tl_cancel(worker, op) != TL_OK) break;
        enum tl_status expected = i % 3 == 0 ? TL_ABORTED : TL_CANCELLED;
        if (tl_cq_wait(own_cq, &completion, 1, CLUSTER_LONG) != 1 || completion.status.code != expected) break;
        if (tl_withdraw(worker, key, NULL) != TL_OK) break;
        task->done++;
    }
    tl_tensor_put(tensor);
    tl_cq_destroy(own_cq);
    return NULL;
}

START_TEST(many_threads_call_everything)
{
    struct task tasks[THREADS];
    run_threads(mixture, tasks);
    for (unsigned i = 0; i < THREADS; i++)
        ck_assert_uint_eq(tasks[i].done, EXCHANGES);
    /* The second call drives worker 1, which sends its cancels to worker 0. */
    CLUSTER_UNTIL(
        cluster_stats(cluster.workers[0]).waiting_receivers + cluster_stats(cluster.workers[1]).waiting_receivers == 0);
    for (unsigned i = 0; i < 2; i++)
        ck_assert_uint_eq(cluster_stats(cluster.workers[i]).open_operations, 0);
}
END_TEST

static TCase *threads_case(const char *name, void (*with)(void))
{
    TCase *threads = tcase_create(name);
    tcase_add_checked_fixture(threads, with, teardown);
    tcase_add_test(threads, many_threads_exchange);
    tcase_add_test(threads, many_threads_read_one_queue);
    tcase_add_test(threads, many_threads_wait_for_many);
    tcase_add_test(threads, many_threads_call_everything);
    return threads;
}

int main(void)
{
    Suite *suite = suite_create("worker_threads");
    TCase *queues = tcase_create("queues");
    tcase_add_checked_fixture(queues, setup, teardown);
    tcase_add_test(queues, descriptor_is_readable_while_completions_wait);
    tcase_add_test(queues, descriptor_may_be_asked_for_late);
    tcase_add_test(queues, queue_is_read_in_batches);
    tcase_add_test(queues, one_queue_serves_several_workers);
    tcase_add_test(queues, many_are_awaited_at_once);
    tcase_add_test(queues, wait_for_many_ends_with_its_time);
    tcase_add_test(queues, many_of_several_workers_are_awaited);
    tcase_add_test(queues, readers_take_over_the_loop);
    tcase_add_test(queues, worker_closes_beside_its_reader);
    suite_add_tcase(suite, queues);
    TCase *caller = tcase_create("caller");
    tcase_add_checked_fixture(caller, setup_caller, teardown);
    tcase_add_test(caller, caller_drives_by_waiting);
    tcase_add_test(caller, many_are_awaited_at_once);
    tcase_add_test(caller, wait_for_many_ends_with_its_time);
    tcase_add_test(caller, progress_is_a_call_that_closing_awaits);
    tcase_add_test(caller, progress_is_for_workers_without_thread);
    tcase_add_test(caller, deadlines_hold_without_a_thread);
    tcase_add_test(caller, queue_drives_one_worker_only);
    tcase_add_test(caller, queue_of_both_kinds_wakes_its_reader);
    tcase_add_test(caller, worker_closes_beside_its_reader);
    suite_add_tcase(suite, caller);
    suite_add_tcase(suite, threads_case("threads", setup));
    suite_add_tcase(suite, threads_case("threads without thread", setup_caller));
    return run_suite_in_process(suite);
}
