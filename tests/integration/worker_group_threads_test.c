// SPDX-License-Identifier: Apache-2.0
/* Groups that many threads begin at once, with and without a thread of the library. */
#include <pthread.h>

#include "fakes/group_case.h"

#define CALLERS 8
#define ROUNDS 15
#define ITEMS 120
/* A mover looks this often whether the test is over. */
#define LOOK_NS (CLUSTER_SECOND / 50)

/* A thread of the program, which sends and receives groups of its own keys. Its errors are looked at when it is over:
 * check does not know other threads. */
struct caller {
    pthread_t thread;
    unsigned number;
    tl_peer_id owner; /* the worker that sends, as the receiver sees it */
    struct tl_cq *sends;
    char keys[ITEMS][KEY_BYTES];
    char problem[TL_ERROR_MESSAGE_BYTES];
};

/* Makes the progress of a worker that has no thread. */
static struct mover {
    pthread_t thread;
    unsigned task;
    bool is_over;
} movers[2];

static void *move(void *context)
{
    struct mover *mover = context;
    while (!__atomic_load_n(&mover->is_over, __ATOMIC_RELAXED))
        (void)!tl_worker_progress(cluster.workers[mover->task], LOOK_NS);
    return NULL;
}

static void open_with(const char *protocol, enum tl_progress progress)
{
    cluster_init(&cluster, 2, NULL);
    cluster.protocol = protocol;
    cluster.progress = progress;
    for (unsigned task = 0; task < 2; task++) {
        open_task(task);
        movers[task] = (struct mover){.task = task};
        if (progress == TL_PROGRESS_CALLER)
            ck_assert_int_eq(pthread_create(&movers[task].thread, NULL, move, &movers[task]), 0);
    }
    cq = cluster_cq();
}

/* A worker that closes waits for its peer to answer, which has its mover until it closes itself. */
static void close_with(enum tl_progress progress)
{
    for (unsigned task = 0; task < 2; task++) {
        __atomic_store_n(&movers[task].is_over, true, __ATOMIC_RELAXED);
        if (progress == TL_PROGRESS_CALLER) pthread_join(movers[task].thread, NULL);
        cluster_close(&cluster, task);
    }
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
}

static void *fail_caller(struct caller *caller, const char *what)
{
    snprintf(caller->problem, sizeof(caller->problem), "%s", what);
    return NULL;
}

/* Sends the keys of a caller, quietly. */
static enum tl_status send_keys(struct caller *caller, uint64_t step, struct tl_error *ret_error)
{
    const struct tl_send_many_options options = {
        .size_bytes = sizeof(options), .item_bytes = sizeof(struct tl_send_item), .is_quiet = true};
    struct tl_send_item items[ITEMS];
    for (unsigned i = 0; i < ITEMS; i++)
        items[i] = (struct tl_send_item){
            .key = caller->keys[i], .step = step, .tensor = cluster_tensor(VALUE_BYTES, caller->number * ITEMS + i)};
    enum tl_status status =
        tl_send_many(cluster.workers[0], items, ITEMS, &options, CLUSTER_LONG, caller->sends, NULL, NULL, ret_error);
    for (unsigned i = 0; i < ITEMS; i++)
        tl_tensor_put(items[i].tensor);
    return status;
}

static bool receive_keys(struct caller *caller, tl_peer_id peer, uint64_t step, struct tl_error *ret_error)
{
    const struct tl_recv_many_options options = group_options();
    struct tl_recv_item items[ITEMS];
    struct tl_completion got[ITEMS];
    bool is_right = true;
    for (unsigned i = 0; i < ITEMS; i++)
        items[i] = (struct tl_recv_item){.key = caller->keys[i], .step = step};
    enum tl_status status =
        tl_recv_many_wait(cluster.workers[1], peer, items, ITEMS, &options, CLUSTER_LONG, got, ret_error);
    for (unsigned i = 0; i < ITEMS; i++) {
        is_right = is_right && got[i].tensor != NULL &&
                   cluster_tensor_is(got[i].tensor, VALUE_BYTES, caller->number * ITEMS + i);
        tl_tensor_put(got[i].tensor);
    }
    return status == TL_OK && is_right;
}

static void *call(void *context)
{
    struct caller *caller = context;
    struct tl_error problem = {.message = "the values are wrong"};
    struct tl_completion end;
    for (uint64_t step = 0; step < ROUNDS; step++) {
        if (send_keys(caller, step, &problem) != TL_OK || !receive_keys(caller, caller->owner, step, &problem))
            return fail_caller(caller, problem.message);
        if (tl_cq_wait(caller->sends, &end, 1, CLUSTER_LONG) != 1) return fail_caller(caller, "the group does not end");
        if (end.kind != TL_OP_SEND_MANY || end.ok_count != ITEMS) return fail_caller(caller, end.status.message);
    }
    return NULL;
}

/* _i / 2: over gRPC, or within the host; _i % 2: without a thread of the library. */
START_TEST(many_callers)
{
    static struct caller callers[CALLERS];
    enum tl_progress progress = _i % 2 == 0 ? TL_PROGRESS_THREAD : TL_PROGRESS_CALLER;
    open_with(_i / 2 == 0 ? "grpc" : "auto", progress);
    for (unsigned i = 0; i < CALLERS; i++) {
        callers[i].number = i;
        callers[i].owner = cluster_peer(cluster.workers[1], 0);
        callers[i].sends = cluster_cq();
        for (unsigned item = 0; item < ITEMS; item++)
            snprintf(callers[i].keys[item], KEY_BYTES, "k%u/%u", i, item);
        ck_assert_int_eq(pthread_create(&callers[i].thread, NULL, call, &callers[i]), 0);
    }
    for (unsigned i = 0; i < CALLERS; i++) {
        pthread_join(callers[i].thread, NULL);
        ck_assert_msg(callers[i].problem[0] == '\0', "caller %u: %s", i, callers[i].problem);
    }
    close_with(progress);
    for (unsigned i = 0; i < CALLERS; i++)
        tl_cq_destroy(callers[i].sends);
}
END_TEST

/* A queue that drives one worker is refused by another, and nothing is asked or offered. */
START_TEST(queue_of_another_worker)
{
    struct items made = make_items(3);
    struct tl_recv_many_options options = group_options();
    struct tl_send_many_options send_options = {.size_bytes = sizeof(send_options),
                                                .item_bytes = sizeof(struct tl_send_item)};
    struct tl_send_item item = {.key = "k0", .tensor = cluster_tensor(VALUE_BYTES, 1)};
    open_with("grpc", TL_PROGRESS_CALLER);
    tl_op_id id = ask(&made, &options);
    ck_assert_int_eq(tl_send_many(cluster.workers[0], &item, 1, &send_options, CLUSTER_LONG, cq, NULL, NULL, &error),
                     TL_FAILED_PRECONDITION);
    ck_assert_int_eq(tl_recv_many(cluster.workers[0], cluster_peer(cluster.workers[0], 1), made.items, 3, &options,
                                  CLUSTER_LONG, cq, NULL, NULL, &error),
                     TL_FAILED_PRECONDITION);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).open_operations, 0);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], id), TL_OK);
    expect_failed(3, TL_CANCELLED);
    expect_group(id, TL_CANCELLED, 0, 3);
    tl_tensor_put(item.tensor);
    close_with(TL_PROGRESS_CALLER);
    free_items(&made);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("worker_group_threads");
    TCase *tcase = tcase_create("threads");
    tcase_set_timeout(tcase, 300);
    tcase_add_loop_test(tcase, many_callers, 0, 4);
    tcase_add_test(tcase, queue_of_another_worker);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
