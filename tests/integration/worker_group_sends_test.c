// SPDX-License-Identifier: Apache-2.0
/* Groups of sends, and many publications in one call: members complete alone, quiet ones are counted, and what ends a
 * member concerns no other. */
#include "fakes/group_case.h"

#define STEP 1
#define OTHER_STEP 2
/* More than two rounds begin. */
#define MANY 1300
#define SHORT_NS (CLUSTER_SECOND / 5)

static struct tl_cq *send_cq;
static int my_sends;

static void setup_cq(void)
{
    send_cq = cluster_cq();
}

static void teardown_cq(void)
{
    if (cluster.workers[0] != NULL) cluster_close(&cluster, 0);
    tl_cq_destroy(send_cq);
}

/* Items "k0" and so on, each with a pattern of its own. */
static struct tl_send_item *make_sends(const struct items *made)
{
    struct tl_send_item *sends = calloc(made->count + 1, sizeof(*sends));
    for (size_t i = 0; i < made->count; i++)
        sends[i] = (struct tl_send_item){.key = made->keys[i],
                                         .step = made->items[i].step,
                                         .tensor = cluster_tensor(VALUE_BYTES, (unsigned)i),
                                         .user_data = (void *)i};
    return sends;
}

static void free_sends(struct tl_send_item *sends, size_t count)
{
    for (size_t i = 0; i < count; i++)
        tl_tensor_put(sends[i].tensor);
    free(sends);
}

static struct tl_send_many_options sending(bool is_quiet)
{
    return (struct tl_send_many_options){.size_bytes = sizeof(struct tl_send_many_options),
                                         .item_bytes = sizeof(struct tl_send_item),
                                         .is_quiet = is_quiet};
}

/* Worker 0 sends the items from `first` on. */
static tl_op_id send_part(const struct items *made, size_t first, size_t count, bool is_quiet, int64_t timeout_ns)
{
    tl_op_id id;
    struct tl_send_item *sends = make_sends(made);
    struct tl_send_many_options options = sending(is_quiet);
    enum tl_status status =
        tl_send_many(cluster.workers[0], sends + first, count, &options, timeout_ns, send_cq, &my_sends, &id, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    free_sends(sends, made->count);
    return id;
}

static tl_op_id send_all(const struct items *made, bool is_quiet)
{
    return send_part(made, 0, made->count, is_quiet, CLUSTER_LONG);
}

/* The next completion is that of a member with this status; returns its place. */
static size_t expect_sent(tl_op_id id, enum tl_status status)
{
    struct tl_completion completion = cluster_next(send_cq);
    ck_assert_int_eq(completion.kind, TL_OP_SEND);
    ck_assert_msg(completion.status.code == status, "%s", completion.status.message);
    ck_assert_uint_eq(completion.op, id + 1 + completion.item);
    ck_assert_ptr_null(completion.tensor);
    return completion.item;
}

static void expect_each_sent(tl_op_id id, size_t count, enum tl_status status)
{
    bool *is_known = calloc(count, sizeof(*is_known));
    for (size_t i = 0; i < count; i++) {
        size_t place = expect_sent(id, status);
        ck_assert(!is_known[place]);
        is_known[place] = true;
    }
    free(is_known);
}

static void expect_end(tl_op_id id, enum tl_status status, uint64_t ok_count, uint64_t failed_count)
{
    struct tl_completion completion = cluster_next(send_cq);
    ck_assert_int_eq(completion.kind, TL_OP_SEND_MANY);
    ck_assert_msg(completion.status.code == status, "%s", completion.status.message);
    ck_assert_uint_eq(completion.op, id);
    ck_assert_ptr_eq(completion.user_data, &my_sends);
    ck_assert_uint_eq(completion.ok_count, ok_count);
    ck_assert_uint_eq(completion.failed_count, failed_count);
    ck_assert_uint_eq(completion.dead_count, 0);
    ck_assert(cluster_is_quiet(send_cq));
}

static void wait_for_held(uint64_t count)
{
    CLUSTER_UNTIL(cluster_stats(cluster.workers[0]).held_tensors == count);
}

/* ------------------------------------------------------------------------------------------------------- whole -- */

/* _i: quiet; whether receivers are there before. */
START_TEST(all_received)
{
    struct items made = make_items(MANY);
    struct tl_recv_many_options options = group_options();
    bool is_quiet = _i % 2 == 1;
    tl_op_id asked = _i < 2 ? ask(&made, &options) : 0;
    tl_op_id sent = send_all(&made, is_quiet);
    if (_i >= 2) asked = ask(&made, &options);
    expect_members(asked, MANY);
    expect_group(asked, TL_OK, MANY, 0);
    if (!is_quiet) expect_each_sent(sent, MANY, TL_OK);
    expect_end(sent, TL_OK, MANY, 0);
    wait_for_held(0);
    no_operation_is_open(0);
    free_items(&made);
}
END_TEST

START_TEST(to_itself)
{
    struct items made = make_items(MANY);
    struct tl_recv_many_options options = group_options();
    struct tl_completion *completions = calloc(MANY, sizeof(*completions));
    tl_op_id sent = send_all(&made, true);
    ck_assert_int_eq(tl_recv_many_wait(cluster.workers[0], cluster_peer(cluster.workers[0], 0), made.items, MANY,
                                       &options, CLUSTER_LONG, completions, &error),
                     TL_OK);
    for (size_t i = 0; i < MANY; i++) {
        ck_assert_int_eq(completions[i].path, TL_PATH_SELF);
        ck_assert(cluster_tensor_is(completions[i].tensor, VALUE_BYTES, (unsigned)i));
        tl_tensor_put(completions[i].tensor);
    }
    expect_end(sent, TL_OK, MANY, 0);
    free(completions);
    free_items(&made);
}
END_TEST

/* _i: with completions, which come in the order of the items; without. */
START_TEST(blocking)
{
    struct items made = make_items(MANY);
    struct tl_recv_many_options options = group_options();
    struct tl_send_many_options send_options = sending(true);
    struct tl_send_item *sends = make_sends(&made);
    struct tl_completion *completions = calloc(MANY, sizeof(*completions));
    tl_op_id asked = ask(&made, &options);
    ck_assert_int_eq(tl_send_many_wait(cluster.workers[0], sends, MANY, &send_options, CLUSTER_LONG,
                                       _i == 0 ? completions : NULL, &error),
                     TL_OK);
    for (size_t i = 0; i < MANY && _i == 0; i++) {
        ck_assert_int_eq(completions[i].kind, TL_OP_SEND);
        ck_assert_int_eq(completions[i].status.code, TL_OK);
        ck_assert_uint_eq(completions[i].item, i);
        ck_assert_uint_eq((size_t)completions[i].user_data, i);
        ck_assert_uint_eq(completions[i].bytes, VALUE_BYTES);
    }
    expect_members(asked, MANY);
    expect_group(asked, TL_OK, MANY, 0);
    free_sends(sends, MANY);
    free(completions);
    free_items(&made);
}
END_TEST

START_TEST(without_items)
{
    struct items made = make_items(0);
    struct tl_send_many_options options = sending(false);
    tl_op_id id = send_all(&made, false);
    expect_end(id, TL_OK, 0, 0);
    ck_assert_int_eq(tl_send_many_wait(cluster.workers[0], NULL, 0, &options, CLUSTER_LONG, NULL, &error), TL_OK);
    no_operation_is_open(0);
    free_items(&made);
}
END_TEST

/* ------------------------------------------------------------------------------------------- members that fail -- */

/* A key twice: the second one cannot be offered, and the first one is received. Quiet members that fail report it. */
START_TEST(key_twice)
{
    struct items made = make_items(3);
    snprintf(made.keys[1], KEY_BYTES, "k0");
    tl_op_id sent = send_all(&made, true);
    ck_assert_uint_eq(expect_sent(sent, TL_ALREADY_EXISTS), 1);
    for (unsigned i = 0; i < 3; i += 2) {
        struct tl_tensor *got = cluster_recv_wait(cluster.workers[1], 0, made.keys[i], STEP);
        ck_assert(cluster_tensor_is(got, VALUE_BYTES, i));
        tl_tensor_put(got);
    }
    expect_end(sent, TL_ALREADY_EXISTS, 2, 1);
    free_items(&made);
}
END_TEST

/* No receiver asks: each send says at the deadline how long it has waited. */
START_TEST(deadline)
{
    struct items made = make_items(MANY);
    tl_op_id sent = send_part(&made, 0, MANY, true, SHORT_NS);
    struct tl_completion completion = cluster_next(send_cq);
    ck_assert_int_eq(completion.status.code, TL_DEADLINE_EXCEEDED);
    ck_assert_msg(strstr(completion.status.message, "k0 of step 1 was not received within") != NULL, "%s",
                  completion.status.message);
    for (size_t i = 1; i < MANY; i++)
        expect_sent(sent, TL_DEADLINE_EXCEEDED);
    expect_end(sent, TL_DEADLINE_EXCEEDED, 0, MANY);
    wait_for_held(0);
    free_items(&made);
}
END_TEST

START_TEST(cancelled)
{
    struct items made = make_items(MANY);
    tl_op_id sent = send_all(&made, false);
    ck_assert_int_eq(tl_cancel(cluster.workers[0], sent + 1 + 7), TL_OK);
    ck_assert_uint_eq(expect_sent(sent, TL_CANCELLED), 7);
    ck_assert_int_eq(tl_cancel(cluster.workers[0], sent + 1 + 7), TL_NOT_FOUND);
    tl_tensor_put(cluster_recv_wait(cluster.workers[1], 0, "k8", STEP));
    ck_assert_uint_eq(expect_sent(sent, TL_OK), 8);
    ck_assert_int_eq(tl_cancel(cluster.workers[0], sent), TL_OK);
    for (size_t i = 2; i < MANY; i++)
        expect_sent(sent, TL_CANCELLED);
    expect_end(sent, TL_CANCELLED, 1, MANY - 1);
    wait_for_held(0);
    free_items(&made);
}
END_TEST

/* A step ends, or is aborted, while the group begins: all of its sends end, and the others arrive. */
START_TEST(step_that_is_over)
{
    struct items made = make_items(MANY);
    struct tl_recv_many_options options = group_options();
    uint64_t dropped = 0;
    for (size_t i = 0; i < MANY / 2; i++)
        made.items[2 * i].step = OTHER_STEP;
    tl_op_id sent = send_all(&made, true);
    enum tl_status status = _i == 0 ? TL_CANCELLED : TL_DATA_LOSS;
    if (_i == 1) ck_assert_int_eq(tl_worker_abort_step(cluster.workers[0], OTHER_STEP, status, "why", &error), TL_OK);
    ck_assert_int_eq(tl_worker_end_step(cluster.workers[0], OTHER_STEP, &dropped, &error), TL_OK);
    ck_assert_uint_eq(dropped, _i == 0 ? MANY / 2 : 0);
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).tensors_dropped, dropped);
    for (size_t i = 0; i < MANY / 2; i++)
        ck_assert_uint_eq(expect_sent(sent, status) % 2, 0);
    for (size_t i = 0; i < MANY / 2; i++)
        made.items[i] = made.items[2 * i + 1];
    made.count = MANY / 2;
    ask(&made, &options);
    for (size_t i = 0; i < MANY / 2; i++) {
        struct tl_completion got = cluster_expect(cq, TL_OK);
        ck_assert_uint_eq((size_t)got.user_data, 2 * got.item + 1);
    }
    ck_assert_uint_eq(cluster_next(cq).ok_count, MANY / 2);
    expect_end(sent, status, MANY / 2, MANY / 2);
    wait_for_held(0);
    free_items(&made);
}
END_TEST

/* --------------------------------------------------------------------------------------------- close, restart -- */

/* _i: at once; when all are offered. */
START_TEST(close_midway)
{
    struct items made = make_items(MANY);
    tl_op_id sent = send_all(&made, false);
    if (_i == 1) wait_for_held(MANY);
    cluster_close(&cluster, 0);
    expect_each_sent(sent, MANY, TL_CANCELLED);
    expect_end(sent, TL_CANCELLED, 0, MANY);
    free_items(&made);
}
END_TEST

/* The receiver restarts: what it had not asked for comes to the new one, each once. */
START_TEST(receiver_restarts)
{
    struct items made = make_items(MANY);
    struct tl_recv_many_options options = group_options();
    tl_op_id asked = ask(&made, &options);
    tl_op_id sent = send_part(&made, 0, 400, false, CLUSTER_LONG);
    expect_members(asked, 400);
    expect_each_sent(sent, 400, TL_OK);
    expect_end(sent, TL_OK, 400, 0);
    cluster_close(&cluster, 1);
    expect_failed(MANY - 400, TL_CANCELLED);
    expect_group(asked, TL_CANCELLED, 400, MANY - 400);
    sent = send_part(&made, 400, MANY - 400, true, CLUSTER_LONG);
    open_task(1);
    struct items rest = {.items = made.items + 400, .count = MANY - 400};
    ask(&rest, &options);
    for (size_t i = 400; i < MANY; i++) {
        struct tl_completion completion = cluster_next(cq);
        ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
        ck_assert(cluster_tensor_is(completion.tensor, VALUE_BYTES, (unsigned)(size_t)completion.user_data));
        tl_tensor_put(completion.tensor);
    }
    ck_assert_uint_eq(cluster_next(cq).ok_count, MANY - 400);
    expect_end(sent, TL_OK, MANY - 400, 0);
    free_items(&made);
}
END_TEST

/* ------------------------------------------------------------------------------------------------- publishing -- */

static void expect_published(uint64_t count)
{
    ck_assert_uint_eq(cluster_stats(cluster.workers[0]).published_tensors, count);
}

/* A wrong item: nothing is published, and the message names it by its place. */
START_TEST(wrong_publications)
{
    struct items made = make_items(MANY);
    struct tl_send_item *sends = make_sends(&made);
    const size_t bytes = sizeof(*sends);
    size_t count = 7;
    struct tl_tensor *tensor = sends[1200].tensor;
    sends[1200].tensor = NULL;
    ck_assert_int_eq(tl_publish_many(cluster.workers[0], sends, MANY, bytes, &count, &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "item 1200: there is no tensor for k1200");
    ck_assert_uint_eq(count, 0);
    sends[1200].tensor = tensor;
    sends[600].key = "";
    ck_assert_int_eq(tl_publish_many(cluster.workers[0], sends, MANY, bytes, NULL, &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "item 600: the key is empty");
    for (size_t items = 0; items < 2; items++) {
        ck_assert_int_eq(tl_publish_many(cluster.workers[0], sends, items, bytes - 1, &count, &error),
                         TL_INVALID_ARGUMENT);
        ck_assert_ptr_nonnull(strstr(error.message, "item_bytes of struct tl_send_item is 31"));
    }
    expect_published(0);
    ck_assert_int_eq(tl_publish_many(cluster.workers[0], NULL, 0, bytes, &count, &error), TL_OK);
    ck_assert_uint_eq(count, 0);
    free_sends(sends, MANY);
    free_items(&made);
}
END_TEST

/* When a key is there twice, its later tensor stays published; the older versions are replaced one after the other. */
START_TEST(published_twice)
{
    struct items made = make_items(MANY);
    snprintf(made.keys[MANY - 1], KEY_BYTES, "k0");
    struct tl_send_item *sends = make_sends(&made);
    size_t count;
    ck_assert_int_eq(tl_publish_many(cluster.workers[0], sends, MANY, sizeof(*sends), &count, &error), TL_OK);
    ck_assert_uint_eq(count, MANY);
    expect_published(MANY - 1);
    struct tl_tensor *got = cluster_recv_wait(cluster.workers[1], 0, "k0", STEP);
    ck_assert(cluster_tensor_is(got, VALUE_BYTES, MANY - 1));
    tl_tensor_put(got);
    free_sends(sends, MANY);
    free_items(&made);
}
END_TEST

static void add(TCase *tcase)
{
    tcase_add_checked_fixture(tcase, setup_cq, teardown_cq);
    tcase_add_loop_test(tcase, all_received, 0, 4);
    tcase_add_test(tcase, to_itself);
    tcase_add_loop_test(tcase, blocking, 0, 2);
    tcase_add_test(tcase, without_items);
    tcase_add_test(tcase, key_twice);
    tcase_add_test(tcase, deadline);
    tcase_add_test(tcase, cancelled);
    tcase_add_loop_test(tcase, step_that_is_over, 0, 2);
    tcase_add_loop_test(tcase, close_midway, 0, 2);
    tcase_add_test(tcase, receiver_restarts);
    tcase_add_test(tcase, wrong_publications);
    tcase_add_test(tcase, published_twice);
}

int main(void)
{
    Suite *suite = suite_create("worker_group_sends");
    add_cases(suite, add);
    return run_suite(suite);
}
