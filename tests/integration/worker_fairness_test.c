// SPDX-License-Identifier: Apache-2.0
/* No thread handles more than 512 members of whatever there are many of before others have their turn: the counters of
 * both workers say so after floods of each kind. */
#include "control/client.h"
#include "fakes/group_case.h"

#define MANY 6000
#define MOST_MEMBERS 512
#define SHORT_NS (CLUSTER_SECOND / 2)

/* Checks the counters of a worker, of which there is one at least. */
static void check_worker(unsigned task)
{
    struct tl_description description = {0};
    char address[64];
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster.ports[task]);
    const struct tl_call_options options = {
        .address = address, .connect_timeout_ns = CLUSTER_LONG, .rpc_timeout_ns = CLUSTER_LONG};
    ck_assert_int_eq(tl_client_identify(&options, &description, NULL, &error), TL_OK);
    unsigned found_count = 0;
    uint64_t most_members = 0;
    for (size_t i = 0; i < description.counter_count; i++) {
        const struct tl_counter *counter = &description.counters[i];
        if (strstr(counter->name, "most_members") == NULL) continue;
        found_count++;
        most_members += counter->value;
        ck_assert_msg(counter->value <= MOST_MEMBERS, "worker %u: %s is %llu", task, counter->name,
                      (unsigned long long)counter->value);
    }
    ck_assert_uint_ge(found_count, 1);
    if (task == 0) ck_assert_uint_gt(most_members, 0); /* the other one may have done nothing */
    tl_description_fini(&description);
}

static void check(void)
{
    check_worker(0);
    check_worker(1);
}

/* Each of these calls has a deadline of its own. */
static void receive_from(tl_peer_id peer, const struct items *made, int64_t timeout_ns)
{
    const struct tl_recv_options options = {.size_bytes = sizeof(options)};
    for (size_t i = 0; i < made->count; i++) {
        tl_op_id id;
        enum tl_status status =
            tl_recv(cluster.workers[1], peer, made->items[i].key, 1, &options, timeout_ns, cq, (void *)i, &id, &error);
        ck_assert_msg(status == TL_OK, "%s", error.message);
    }
}

static void receive_singly(const struct items *made, int64_t timeout_ns)
{
    receive_from(cluster_peer(cluster.workers[1], 0), made, timeout_ns);
}

static void expect_singles(size_t count, enum tl_status wanted)
{
    for (size_t i = 0; i < count; i++) {
        struct tl_completion completion = cluster_next(cq);
        ck_assert_msg(completion.status.code == wanted, "%s", completion.status.message);
        tl_tensor_put(completion.tensor);
    }
}

/* Worker 0 sends all items; with a key as many values of that key, of steps from 1 on. Their completions go to the same
 * queue. */
static void send_values(const struct items *made, const char *key)
{
    struct tl_send_item *sends = calloc(made->count, sizeof(*sends));
    const struct tl_send_many_options options = {
        .size_bytes = sizeof(options), .item_bytes = sizeof(struct tl_send_item), .is_quiet = true};
    for (size_t i = 0; i < made->count; i++)
        sends[i] = (struct tl_send_item){.key = key != NULL ? key : made->keys[i],
                                         .step = key != NULL ? i + 1 : 1,
                                         .tensor = cluster_tensor(VALUE_BYTES, (unsigned)i)};
    tl_op_id id;
    enum tl_status status =
        tl_send_many(cluster.workers[0], sends, made->count, &options, CLUSTER_LONG, cq, NULL, &id, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    for (size_t i = 0; i < made->count; i++)
        tl_tensor_put(sends[i].tensor);
    free(sends);
}

static void send_all(const struct items *made)
{
    send_values(made, NULL);
}

/* Takes completions until both groups are over. Returns how many members have arrived. */
static size_t expect_both_groups(void)
{
    unsigned group_count = 0;
    size_t arrived = 0;
    while (group_count < 2) {
        struct tl_completion completion = cluster_next(cq);
        group_count += completion.kind == TL_OP_RECV_MANY || completion.kind == TL_OP_SEND_MANY;
        arrived += completion.kind == TL_OP_RECV && completion.status.code == TL_OK;
        tl_tensor_put(completion.tensor);
    }
    return arrived;
}

/* Twice, so that the second time keys have numbers. */
START_TEST(published)
{
    struct items made = make_items(MANY);
    struct tl_recv_many_options options = group_options();
    publish_values(0, MANY);
    for (unsigned round = 0; round < 2; round++) {
        tl_op_id id = ask(&made, &options);
        expect_members(id, MANY);
        expect_group(id, TL_OK, MANY, 0);
    }
    receive_singly(&made, CLUSTER_LONG);
    expect_singles(MANY, TL_OK);
    check();
    free_items(&made);
}
END_TEST

/* The values come after the receives, or before. */
START_TEST(sent)
{
    struct items made = make_items(MANY);
    struct tl_recv_many_options options = group_options();
    if (_i == 0) send_all(&made);
    (void)ask(&made, &options);
    if (_i == 1) {
        wait_for_waiting(0, MANY);
        send_all(&made);
    }
    ck_assert_uint_eq(expect_both_groups(), MANY);
    check();
    free_items(&made);
}
END_TEST

/* All buffers of a subscription ask; each gets a value, and asks once more; then it ends. */
START_TEST(subscribed)
{
    static unsigned counts[MANY];
    struct items made = make_items(MANY);
    const struct tl_subscribe_options options = {.size_bytes = sizeof(options), .count = MANY};
    tl_op_id id;
    enum tl_status status =
        tl_subscribe(cluster.workers[1], cluster_peer(cluster.workers[1], 0), "key", &options, cq, NULL, &id, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    wait_for_waiting(0, MANY);
    send_values(&made, "key");
    for (size_t i = 0; i < MANY + 1; i++) {
        struct tl_completion completion = cluster_next(cq);
        ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
        if (completion.kind == TL_OP_SUBSCRIBE) ck_assert_uint_eq(counts[completion.step - 1]++, 0);
        tl_tensor_put(completion.tensor);
    }
    wait_for_waiting(0, MANY);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], id), TL_OK);
    struct tl_completion last = cluster_next(cq);
    ck_assert(last.is_last && last.status.code == TL_CANCELLED);
    check();
    free_items(&made);
}
END_TEST

START_TEST(deadlines)
{
    struct items made = make_items(MANY);
    receive_singly(&made, SHORT_NS);
    expect_singles(MANY, TL_DEADLINE_EXCEEDED);
    check();
    free_items(&made);
}
END_TEST

/* The step of receives that wait: at the asker, or at their owner. */
START_TEST(step_ends)
{
    struct items made = make_items(MANY);
    struct tl_recv_many_options options = group_options();
    unsigned where = _i % 2;
    bool is_abort = _i / 2 == 1;
    (void)ask(&made, &options);
    wait_for_waiting(0, MANY);
    enum tl_status status = is_abort ? tl_worker_abort_step(cluster.workers[where], 1, TL_ABORTED, "why", &error)
                                     : tl_worker_end_step(cluster.workers[where], 1, NULL, &error);
    ck_assert_int_eq(status, TL_OK);
    expect_failed(MANY, is_abort ? TL_ABORTED : TL_CANCELLED);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_int_eq(completion.kind, TL_OP_RECV_MANY);
    check();
    free_items(&made);
}
END_TEST

START_TEST(step_of_values_ends)
{
    struct items made = make_items(MANY);
    uint64_t dropped_count;
    send_all(&made);
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).held_tensors == MANY);
    ck_assert_int_eq(tl_worker_end_step(cluster.workers[0], 1, &dropped_count, &error), TL_OK);
    ck_assert_uint_eq(dropped_count, MANY);
    for (struct tl_completion completion = cluster_next(cq); completion.kind != TL_OP_SEND_MANY;)
        completion = cluster_next(cq);
    check();
    free_items(&made);
}
END_TEST

START_TEST(cancelled)
{
    struct items made = make_items(MANY);
    struct tl_recv_many_options options = group_options();
    tl_op_id id = ask(&made, &options);
    wait_for_waiting(0, MANY);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], id), TL_OK);
    expect_failed(MANY, TL_CANCELLED);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_int_eq(completion.kind, TL_OP_RECV_MANY);
    check();
    free_items(&made);
}
END_TEST

/* Half of what waits is a group. The owner closes, or the asker; or the owner was added, and is removed. */
START_TEST(peer_goes)
{
    struct items made = make_items(MANY / 2);
    struct tl_recv_many_options options = group_options();
    char address[64];
    tl_peer_id peer = cluster_peer(cluster.workers[1], 0);
    snprintf(address, sizeof(address), "localhost:%u", cluster.ports[0]);
    if (_i == 2) ck_assert_int_eq(tl_worker_add_peer(cluster.workers[1], address, NULL, 0, &peer, &error), TL_OK);
    receive_from(peer, &made, CLUSTER_LONG);
    ck_assert_int_eq(
        tl_recv_many(cluster.workers[1], peer, made.items, made.count, &options, CLUSTER_LONG, cq, NULL, NULL, &error),
        TL_OK);
    wait_for_waiting(0, MANY);
    if (_i == 2) ck_assert_int_eq(tl_worker_remove_peer(cluster.workers[1], peer, &error), TL_OK);
    if (_i < 2) cluster_close(&cluster, _i == 0 ? 0 : 1);
    if (_i == 0) {
        CLUSTER_UNTIL(cluster_peer_info(cluster.workers[1], 0).state != TL_PEER_UP);
        check_worker(1);
        cluster_close(&cluster, 1);
    }
    for (size_t i = 0; i < MANY + 1; i++) {
        struct tl_completion completion = cluster_next(cq);
        ck_assert_msg(completion.status.code == TL_CANCELLED, "%s", completion.status.message);
    }
    if (_i != 0) wait_for_waiting(0, 0);
    if (_i != 0) check_worker(0);
    if (_i == 2) check_worker(1);
    free_items(&made);
}
END_TEST

#define OWN_COUNT 64
#define OWN_BYTES (UINT64_C(4) << 20)
/* tl_worker_progress runs two rounds, in each of which the member that uses the rest of the quota may copy more. */
#define MOST_BYTES (2 * ((UINT64_C(32) << 20) + OWN_BYTES))

static struct tl_worker *own_worker;

static void setup_own(void)
{
    cluster_init(&cluster, 1, NULL);
    cluster.progress = TL_PROGRESS_CALLER;
    own_worker = cluster_open(&cluster, 0);
    cq = cluster_cq();
}

static void ask_itself(const struct items *made, bool is_group)
{
    struct tl_recv_many_options options = group_options();
    tl_peer_id self = cluster_peer(own_worker, 0);
    if (is_group) {
        enum tl_status status =
            tl_recv_many(own_worker, self, made->items, made->count, &options, CLUSTER_LONG, cq, NULL, NULL, &error);
        ck_assert_msg(status == TL_OK, "%s", error.message);
        return;
    }
    for (size_t i = 0; i < made->count; i++) {
        const struct tl_recv_options single = {.size_bytes = sizeof(single), .destination = made->items[i].destination};
        enum tl_status status =
            tl_recv(own_worker, self, made->items[i].key, 1, &single, CLUSTER_LONG, cq, NULL, NULL, &error);
        ck_assert_msg(status == TL_OK, "%s", error.message);
    }
}

/* What a worker receives from itself is copied by its loop, which looks at others after some of it; in a group (_i 0),
 * singly (1), and when one publication comes to all that wait (2). */
START_TEST(own_values)
{
    struct items made = make_items(OWN_COUNT);
    struct tl_tensor *value = cluster_tensor(OWN_BYTES, 1);
    for (size_t i = 0; i < OWN_COUNT; i++) {
        if (_i == 2) made.items[i].key = made.keys[0];
        if (_i < 2) cluster_publish(own_worker, made.keys[i], 1, value);
        made.items[i].destination = cluster_tensor(OWN_BYTES, 2);
    }
    ask_itself(&made, _i == 0);
    if (_i == 2) CLUSTER_UNTIL(cluster_stats(own_worker).waiting_receivers == OWN_COUNT);
    if (_i == 2) cluster_publish(own_worker, made.keys[0], 1, value);
    size_t done_count = 0;
    struct tl_completion completions[OWN_COUNT + 1];
    while (done_count < OWN_COUNT) {
        size_t count = tl_cq_poll(cq, completions, OWN_COUNT + 1), copied_count = 0;
        for (size_t i = 0; i < count; i++) {
            ck_assert_msg(completions[i].status.code == TL_OK, "%s", completions[i].status.message);
            copied_count += completions[i].kind == TL_OP_RECV;
            tl_tensor_put(completions[i].tensor);
        }
        if (_i < 2) ck_assert_uint_le(copied_count * OWN_BYTES, MOST_BYTES);
        if (_i == 2) ck_assert_uint_lt(copied_count, OWN_COUNT); /* tl_publish has run a few rounds before */
        done_count += copied_count;
        if (done_count < OWN_COUNT) ck_assert_int_eq(tl_worker_progress(own_worker, 0), TL_OK);
    }
    for (size_t i = 0; i < OWN_COUNT; i++)
        tl_tensor_put(made.items[i].destination);
    tl_tensor_put(value);
    free_items(&made);
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
}
END_TEST

static void add(TCase *tcase)
{
    tcase_add_test(tcase, published);
    tcase_add_loop_test(tcase, sent, 0, 2);
    tcase_add_test(tcase, subscribed);
    tcase_add_test(tcase, deadlines);
    tcase_add_loop_test(tcase, step_ends, 0, 4);
    tcase_add_test(tcase, step_of_values_ends);
    tcase_add_test(tcase, cancelled);
    tcase_add_loop_test(tcase, peer_goes, 0, 3);
}

int main(void)
{
    Suite *suite = suite_create("worker_fairness");
    add_cases(suite, add);
    TCase *own = tcase_create("own_values");
    tcase_set_timeout(own, 60);
    tcase_add_checked_fixture(own, setup_own, NULL);
    tcase_add_loop_test(own, own_values, 0, 3);
    suite_add_tcase(suite, own);
    return run_suite(suite);
}
