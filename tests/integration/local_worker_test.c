// SPDX-License-Identifier: Apache-2.0
/*
 * Workers of one process exchange tensors through shared memory, each with or without threads of its own. The index of
 * a loop test says which of the sender and the receiver have threads.
 */
#include <check.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fakes/cluster.h"
#include "fakes/run_suite.h"
#include "server/worker_internal.h"

#define LARGE (1 << 20)

static struct cluster cluster;
static struct tl_cq *sent;
static struct tl_error error;

static void open_pair(int index, const char *settings)
{
    cluster_init(&cluster, 2, settings);
    cluster.protocol = "auto";
    for (unsigned task = 0; task < 2; task++) {
        cluster.progress = (index >> task) % 2 == 1 ? TL_PROGRESS_CALLER : TL_PROGRESS_THREAD;
        cluster_open(&cluster, task);
    }
    sent = cluster_cq();
}

static void teardown(void)
{
    cluster_close(&cluster, 1);
    cluster_close_all(&cluster);
    tl_cq_destroy(sent);
}

/* Runs one round of the workers that have no thread. Always returns true. */
static bool driven(void)
{
    for (unsigned task = 0; task < 2; task++)
        (void)!tl_worker_progress(cluster.workers[task], 0);
    return true;
}

struct count {
    struct tl_command command;
    uint64_t bytes;
};

static void run_count(struct tl_command *command)
{
    struct tl_engine_stats engine;
    struct tl_memory_stats memory;
    struct tl_reactor_stats reactor;
    tl_transports_get_stats(command->worker, &engine, &memory, &reactor);
    TL_CONTAINER_OF(command, struct count, command)->bytes = engine.bytes_bounced;
}

static uint64_t bounced_bytes(void)
{
    uint64_t sum = 0;
    for (unsigned task = 0; task < 2; task++) {
        struct count count = {.bytes = 0};
        tl_worker_run(cluster.workers[task], &count.command, run_count);
        sum += count.bytes;
    }
    return sum;
}

static struct tl_completion transfer(uint64_t step, struct tl_tensor *destination)
{
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination};
    struct tl_tensor *tensor = cluster_tensor(LARGE, (unsigned)step);
    struct tl_cq *cq = cluster_cq();
    tl_op_id id;
    cluster_send(cluster.workers[0], "w", step, tensor, sent);
    tl_tensor_put(tensor);
    ck_assert_int_eq(tl_recv(cluster.workers[1], cluster_peer(cluster.workers[1], 0), "w", step, &options, CLUSTER_LONG,
                             cq, NULL, &id, &error),
                     TL_OK);
    struct tl_completion got, done;
    CLUSTER_UNTIL(driven() && tl_cq_poll(cq, &got, 1) == 1);
    CLUSTER_UNTIL(driven() && tl_cq_poll(sent, &done, 1) == 1);
    ck_assert_msg(got.status.code == TL_OK, "%s", got.status.message);
    ck_assert_int_eq(done.status.code, TL_OK);
    ck_assert(cluster_tensor_is(got.tensor, LARGE, (unsigned)step));
    tl_tensor_put(got.tensor);
    tl_cq_destroy(cq);
    return got;
}

/* A sent value without bytes, a dead one or an empty one, stays with its owner when it does not fit the destination. */
START_TEST(without_bytes_that_does_not_fit_stays)
{
    const uint64_t none = 0;
    open_pair(0, "\"rdma\": \"require\"");
    struct tl_completion first = transfer(1, NULL), got;
    ck_assert_int_eq(first.path, TL_PATH_ZERO_COPY);
    struct tl_tensor *value, *destination = cluster_tensor(LARGE, 99);
    ck_assert_int_eq(
        _i == 0 ? tl_tensor_create_dead(&value, &error) : tl_tensor_create(TL_U8, 1, &none, &value, &error), TL_OK);
    cluster_send(cluster.workers[0], "v", 1, value, sent);
    tl_tensor_put(value);
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination};
    ck_assert_int_eq(tl_recv_wait(cluster.workers[1], cluster_peer(cluster.workers[1], 0), "v", 1, &options,
                                  CLUSTER_LONG, &got, &error),
                     TL_FAILED_PRECONDITION);
    ck_assert_ptr_nonnull(strstr(error.message, "does not fit the destination, which is U8 [1048576]"));
    tl_tensor_put(destination);
    value = cluster_recv_wait(cluster.workers[1], 0, "v", 1);
    ck_assert_uint_eq(tl_tensor_size_bytes(value), 0);
    tl_tensor_put(value);
    cluster_expect(sent, TL_OK);
}
END_TEST

/* Tensors are copied once, into memory that the library or the user has chosen. */
START_TEST(copied_once)
{
    open_pair(_i, _i < 4 ? NULL : "\"rdma\": \"require\"");
    struct tl_tensor *destination = cluster_tensor(LARGE, 99);
    for (unsigned step = 1; step < 8; step++) {
        struct tl_completion got = transfer(step, NULL);
        ck_assert_msg(got.path == TL_PATH_ZERO_COPY, "%s: %s", tl_path_name(got.path), got.path_reason);
    }
    ck_assert_uint_eq(bounced_bytes(), 0);
    ck_assert_str_eq(cluster_peer_info(cluster.workers[1], 0).transport, "local");
    struct tl_completion got = transfer(8, destination);
    ck_assert_msg(got.path == TL_PATH_ZERO_COPY || got.path == TL_PATH_BOUNCE, "%s", tl_path_name(got.path));
    ck_assert(got.path == TL_PATH_ZERO_COPY || got.path_reason[0] != '\0');
    tl_tensor_put(destination);
    teardown();
}
END_TEST

START_TEST(copied_twice)
{
    open_pair(_i, "\"local\": {\"process_vm\": \"off\"}");
    struct tl_tensor *destination = cluster_tensor(LARGE, 99);
    struct tl_completion got = transfer(1, destination);
    ck_assert_int_eq(got.path, TL_PATH_BOUNCE);
    ck_assert_str_ne(got.path_reason, "");
    ck_assert_uint_eq(bounced_bytes(), LARGE);
    tl_tensor_put(destination);
    teardown();
}
END_TEST

/* A small tensor is copied twice, because waking the thread that reads large ones would take longer. */
START_TEST(small_tensor_in_a_large_allocation_is_copied_twice)
{
    static uint8_t memory[LARGE];
    const uint64_t size_bytes = 10000;
    const struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                        .dtype = TL_U8,
                                        .rank = 1,
                                        .dims = &size_bytes,
                                        .data = memory,
                                        .offset_bytes = LARGE / 2,
                                        .capacity_bytes = LARGE};
    struct tl_tensor *destination, *tensor = cluster_tensor(size_bytes, 5);
    struct tl_completion got;
    open_pair(2 * _i, NULL);
    ck_assert_int_eq(tl_tensor_wrap(&view, &destination, &error), TL_OK);
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination};
    cluster_publish(cluster.workers[0], "w", 1, tensor);
    tl_tensor_put(tensor);
    ck_assert_int_eq(tl_recv_wait(cluster.workers[1], cluster_peer(cluster.workers[1], 0), "w", 1, &options,
                                  CLUSTER_LONG, &got, &error),
                     TL_OK);
    ck_assert_msg(got.path == TL_PATH_BOUNCE, "%s: %s", tl_path_name(got.path), got.path_reason);
    ck_assert_msg(strstr(got.path_reason, "it is small") != NULL, "%s", got.path_reason);
    ck_assert(cluster_tensor_is(got.tensor, size_bytes, 5));
    tl_tensor_put(got.tensor);
    tl_tensor_put(destination);
    teardown();
}
END_TEST

/* What a call has given to the data plane is on its way when the call returns: a program without a thread of the worker
 * need not drive it once more. The heart-beat would, much later. */
START_TEST(published_value_leaves_with_the_call)
{
    open_pair(1, "\"local\": {\"peer_timeout\": \"1h\"}");
    struct tl_tensor *tensor = cluster_tensor(8, 7);
    struct tl_cq *cq = cluster_cq();
    struct tl_completion got;
    tl_op_id subscription;
    const struct tl_subscribe_options options = {.size_bytes = sizeof(options), .from_step = 1, .count = 1};
    cluster_publish(cluster.workers[0], "there", 1, tensor);
    cluster_recv(cluster.workers[1], 0, "there", 1, cq);
    CLUSTER_UNTIL(driven() && tl_cq_poll(cq, &got, 1) == 1);
    tl_tensor_put(got.tensor);
    ck_assert_int_eq(tl_subscribe(cluster.workers[1], cluster_peer(cluster.workers[1], 0), "w", &options, cq, NULL,
                                  &subscription, &error),
                     TL_OK);
    CLUSTER_UNTIL(driven() && cluster_stats(cluster.workers[0]).waiting_receivers == 1);
    ck_assert_str_eq(cluster_peer_info(cluster.workers[1], 0).transport, "local");
    cluster_publish(cluster.workers[0], "w", 1, tensor);
    ck_assert_uint_eq(tl_cq_wait(cq, &got, 1, CLUSTER_LONG / 3), 1);
    ck_assert_msg(got.status.code == TL_OK, "%s", got.status.message);
    ck_assert(cluster_tensor_is(got.tensor, 8, 7));
    tl_tensor_put(got.tensor);
    tl_tensor_put(tensor);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], subscription), TL_OK);
    CLUSTER_UNTIL(driven() && tl_cq_poll(cq, &got, 1) == 1);
    tl_cq_destroy(cq);
    teardown();
}
END_TEST

#define NEVER_SENT 5000

static struct tl_cq *ask_in_vain(void)
{
    struct tl_cq *cq = cluster_cq();
    tl_tensor_put(cluster_recv_wait(cluster.workers[1], 0, "there", 1));
    for (unsigned step = 0; step < NEVER_SENT; step++)
        cluster_recv(cluster.workers[1], 0, "never", step, cq);
    return cq;
}

static enum tl_status receive(const char *key, int64_t timeout_ns, struct tl_completion *ret_got)
{
    return tl_recv_wait(cluster.workers[1], cluster_peer(cluster.workers[1], 0), key, 1, NULL, timeout_ns, ret_got,
                        &error);
}

static void publish_there(void)
{
    struct tl_tensor *tensor = cluster_tensor(LARGE, 3);
    cluster_publish(cluster.workers[0], "there", 1, tensor);
    tl_tensor_put(tensor);
}

/* A receive that waits for its value holds nothing that others need. */
START_TEST(published_tensor_arrives_while_many_others_are_awaited)
{
    struct tl_completion got;
    open_pair(0, _i == 0 ? NULL : "\"rdma\": \"require\"");
    publish_there();
    struct tl_cq *cq = ask_in_vain();
    ck_assert_msg(receive("there", CLUSTER_LONG / 3, &got) == TL_OK, "%s", error.message);
    ck_assert(cluster_tensor_is(got.tensor, LARGE, 3));
    ck_assert_int_eq(got.path, TL_PATH_ZERO_COPY);
    tl_tensor_put(got.tensor);
    for (unsigned step = 0; step < NEVER_SENT; step++) {
        struct tl_tensor *tensor = cluster_tensor(8, step);
        cluster_send(cluster.workers[0], "never", step, tensor, sent);
        tl_tensor_put(tensor);
    }
    for (unsigned step = 0; step < NEVER_SENT; step++)
        cluster_expect(cq, TL_OK);
    tl_cq_destroy(cq);
    teardown();
}
END_TEST

/* ------------------------------------------------------------------------------------------- lending the reactor -- */

#define ROUND 200

static const struct tl_reactor_thread *thread_of(unsigned task)
{
    return &cluster.workers[task]->data_plane.transports[0].transport->thread;
}

static void receive_some(void)
{
    for (unsigned i = 0; i < ROUND; i++)
        tl_tensor_put(cluster_recv_wait(cluster.workers[1], 0, "small", 1));
}

/* A program that waits again and again drives the reactor, which serves peers also when the program waits no more. */
START_TEST(waiting_callers_borrow_the_reactor)
{
    open_pair(0, NULL);
    struct tl_tensor *tensor = cluster_tensor(8, 7);
    for (unsigned task = 0; task < 2; task++)
        cluster_publish(cluster.workers[task], "small", 1, tensor);
    tl_tensor_put(tensor);
    for (unsigned i = 0; i < 10; i++) {
        uint64_t lent = atomic_load(&thread_of(1)->lent_count);
        do
            receive_some();
        while (atomic_load(&thread_of(1)->lent_count) == lent);
        ck_assert_uint_ge(cluster_stats(cluster.workers[1]).tensors_received, ROUND);
        /* The other way, with a queue that is not waited at. */
        struct tl_completion got;
        struct tl_cq *cq = cluster_cq();
        cluster_recv(cluster.workers[0], 1, "small", 1, cq);
        CLUSTER_UNTIL(tl_cq_poll(cq, &got, 1) == 1);
        ck_assert_msg(got.status.code == TL_OK, "%s", got.status.message);
        tl_tensor_put(got.tensor);
        tl_cq_destroy(cq);
    }
    ck_assert_uint_eq(atomic_load(&thread_of(0)->lent_count), 0);
    teardown();
}
END_TEST

static void *receive_in_thread(void *argument)
{
    receive_some();
    return argument;
}

START_TEST(callers_in_several_threads_share_the_reactor)
{
    pthread_t threads[4];
    open_pair(0, NULL);
    struct tl_tensor *tensor = cluster_tensor(8, 7);
    cluster_publish(cluster.workers[0], "small", 1, tensor);
    tl_tensor_put(tensor);
    do {
        for (unsigned i = 0; i < 4; i++)
            ck_assert_int_eq(pthread_create(&threads[i], NULL, receive_in_thread, NULL), 0);
        for (unsigned i = 0; i < 4; i++)
            pthread_join(threads[i], NULL);
    } while (atomic_load(&thread_of(1)->lent_count) == 0);
    teardown();
}
END_TEST

/* A value that its owner's reactor cannot go on copying in the middle, until it may: as when the process was stopped.
 */
static uint8_t *stopping;
static atomic_bool has_stopped, may_go_on;

static void stop_here(int number, siginfo_t *info, void *context)
{
    (void)number;
    (void)context;
    const uint8_t *address = info->si_addr;
    if (address < stopping || address >= stopping + LARGE) _exit(1);
    atomic_store(&has_stopped, true);
    while (!atomic_load(&may_go_on))
        usleep(1000);
    (void)!mprotect(stopping, LARGE, PROT_READ | PROT_WRITE);
}

static struct tl_tensor *stopping_tensor(unsigned *released)
{
    const struct sigaction action = {.sa_sigaction = stop_here, .sa_flags = SA_SIGINFO};
    stopping = mmap(NULL, LARGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ck_assert(stopping != MAP_FAILED && sigaction(SIGSEGV, &action, NULL) == 0);
    ck_assert_int_eq(mprotect(stopping + LARGE / 2, 4096, PROT_NONE), 0);
    return cluster_wrap(stopping, LARGE, released);
}

static void publish(uint64_t step, struct tl_tensor *tensor)
{
    cluster_publish(cluster.workers[0], "w", step, tensor);
    tl_tensor_put(tensor);
}

/* A connection breaks while the owner copies into memory that is shared with it, and the value comes over gRPC. The
 * copy goes on when the program has the memory. 0: a tensor that was received before is the destination. 1: memory that
 * a subscription had chosen. */
START_TEST(copy_that_outlives_its_connection)
{
    unsigned released = 0;
    tl_op_id id;
    tl_peer_id owner;
    struct tl_cq *cq = cluster_cq();
    open_pair(0, "\"local\": {\"peer_timeout\": \"300ms\"}");
    owner = cluster_peer(cluster.workers[1], 0);
    for (unsigned step = 1; step < 4; step++)
        (void)transfer(step, NULL);
    publish(4, cluster_tensor(LARGE, 4));
    struct tl_tensor *destination = cluster_recv_wait(cluster.workers[1], 0, "w", 4);
    struct tl_completion got;
    if (_i == 0) {
        const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination};
        publish(5, stopping_tensor(&released));
        ck_assert_int_eq(tl_recv(cluster.workers[1], owner, "w", 5, &options, CLUSTER_LONG, cq, NULL, &id, &error),
                         TL_OK);
    } else {
        const struct tl_subscribe_options options = {.size_bytes = sizeof(options), .from_step = 4, .count = 1};
        ck_assert_int_eq(tl_subscribe(cluster.workers[1], owner, "w", &options, cq, NULL, &id, &error), TL_OK);
        got = cluster_next(cq);
        ck_assert(got.status.code == TL_OK && got.path == TL_PATH_ZERO_COPY);
        tl_tensor_put(got.tensor);
        publish(5, stopping_tensor(&released));
    }
    CLUSTER_UNTIL(atomic_load(&has_stopped));
    publish(6, cluster_tensor(LARGE, 6));
    got = cluster_next(cq);
    ck_assert_msg(got.status.code == TL_OK && got.step == 6, "%s", got.status.message);
    ck_assert_int_eq(got.path, TL_PATH_GRPC);
    atomic_store(&may_go_on, true);
    CLUSTER_UNTIL(__atomic_load_n(&released, __ATOMIC_SEQ_CST) == 1); /* the copy is over */
    ck_assert(cluster_tensor_is(got.tensor, LARGE, 6));
    tl_tensor_put(got.tensor);
    tl_tensor_put(destination);
    teardown();
    tl_cq_destroy(cq);
    ck_assert_int_eq(munmap(stopping, LARGE), 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("local_worker");
    TCase *tcase = tcase_create("local_worker");
    tcase_set_timeout(tcase, 100);
    tcase_add_loop_test(tcase, copied_once, 0, 8);
    tcase_add_loop_test(tcase, copied_twice, 0, 4);
    tcase_add_loop_test(tcase, without_bytes_that_does_not_fit_stays, 0, 2);
    tcase_add_loop_test(tcase, small_tensor_in_a_large_allocation_is_copied_twice, 0, 2);
    tcase_add_test(tcase, published_value_leaves_with_the_call);
    tcase_add_loop_test(tcase, published_tensor_arrives_while_many_others_are_awaited, 0, 2);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("copy_that_outlives_its_connection");
    tcase_set_timeout(tcase, 100);
    tcase_add_loop_test(tcase, copy_that_outlives_its_connection, 0, 2);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("lending");
    tcase_set_timeout(tcase, 100);
    tcase_add_test(tcase, waiting_callers_borrow_the_reactor);
    tcase_add_test(tcase, callers_in_several_threads_share_the_reactor);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
