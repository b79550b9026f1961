// SPDX-License-Identifier: Apache-2.0
/* Groups of receives: members complete alone, a group is over when enough have come or its time is up, and what goes
 * wrong with a member concerns no other. */
#include "fakes/group_case.h"

/* ------------------------------------------------------------------------------------------------------- whole -- */

START_TEST(all_published)
{
    struct items made = make_items(2000);
    struct tl_recv_many_options options = group_options();
    publish_values(0, 2000);
    tl_op_id id = ask(&made, &options);
    expect_members(id, 2000);
    expect_group(id, TL_OK, 2000, 0);
    ck_assert(cluster_is_quiet(cq));
    no_operation_is_open(1);
    free_items(&made);
}
END_TEST

START_TEST(from_itself)
{
    struct items made = make_items(1300);
    struct tl_recv_many_options options = group_options();
    publish_from(1, 0, 700);
    tl_op_id id = ask_from(1, &made, &options);
    expect_members(id, 700);
    publish_from(1, 700, 600);
    expect_members(id, 600);
    expect_group(id, TL_OK, 1300, 0);
    free_items(&made);
}
END_TEST

/* A group without items completes at once; its items may be NULL. */
START_TEST(empty)
{
    struct items made = make_items(0);
    struct tl_recv_many_options options = group_options();
    tl_op_id id = ask(&made, &options);
    expect_group(id, TL_OK, 0, 0);
    ck_assert_int_eq(tl_recv_many_wait(cluster.workers[1], cluster_peer(cluster.workers[1], 0), NULL, 0, &options,
                                       CLUSTER_LONG, NULL, &error),
                     TL_OK);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], id), TL_NOT_FOUND);
    no_operation_is_open(1);
    free_items(&made);
}
END_TEST

/* A published value comes twice; of a sent one only one member gets it. */
START_TEST(key_twice)
{
    struct items made = make_items(4);
    struct tl_recv_many_options options = group_options();
    struct tl_tensor *tensor = cluster_tensor(VALUE_BYTES, 2);
    made.items[1].key = "k0";
    made.items[3].key = "k2";
    publish_values(0, 1);
    cluster_send(cluster.workers[0], "k2", 1, tensor, cq);
    tl_tensor_put(tensor);
    options.min_count = 3;
    tl_op_id id = ask(&made, &options);
    unsigned arrived = 0, cancelled = 0, sent = 0;
    for (struct tl_completion completion = cluster_next(cq);; completion = cluster_next(cq)) {
        if (completion.kind == TL_OP_RECV_MANY) {
            check_group(&completion, id, TL_OK, 3, 1);
            break;
        }
        sent += completion.kind == TL_OP_SEND;
        arrived += completion.kind == TL_OP_RECV && completion.status.code == TL_OK;
        cancelled += completion.status.code == TL_CANCELLED;
        tl_tensor_put(completion.tensor);
    }
    if (sent == 0) ck_assert_int_eq(cluster_next(cq).kind, TL_OP_SEND);
    ck_assert_uint_eq(arrived, 3);
    ck_assert_uint_eq(cancelled, 1);
    free_items(&made);
}
END_TEST

START_TEST(many_keys)
{
    const size_t count = 100000, group = 10000;
    struct tl_recv_many_options options = group_options();
    publish_values(0, count);
    struct items made = make_items(count);
    for (size_t first = 0; first < count; first += group) {
        struct items part = {.items = made.items + first, .count = group};
        tl_op_id id = ask(&part, &options);
        for (size_t i = 0; i < group; i++) {
            struct tl_completion completion = cluster_next(cq);
            size_t place = (size_t)completion.user_data;
            ck_assert_uint_eq(place, first + completion.item);
            ck_assert(cluster_tensor_is(completion.tensor, VALUE_BYTES, (unsigned)place));
            tl_tensor_put(completion.tensor);
        }
        expect_group(id, TL_OK, group, 0);
    }
    free_items(&made);
}
END_TEST

/* Each item has its own destination, checksum included. */
START_TEST(into_destinations)
{
    struct items made = make_items(50);
    struct tl_recv_many_options options = group_options();
    struct tl_completion completions[50];
    options.wants_checksum = true;
    publish_values(0, 50);
    for (size_t i = 0; i < 50; i += 2)
        made.items[i].destination = cluster_tensor(VALUE_BYTES, 77);
    for (size_t i = 0; i < 50; i++)
        made.items[i].priority = i % 4;
    ck_assert_int_eq(tl_recv_many_wait(cluster.workers[1], cluster_peer(cluster.workers[1], 0), made.items, 50,
                                       &options, CLUSTER_LONG, completions, &error),
                     TL_OK);
    for (size_t i = 0; i < 50; i++) {
        ck_assert_uint_eq(completions[i].item, i);
        ck_assert(completions[i].is_verified);
        ck_assert(cluster_tensor_is(completions[i].tensor, VALUE_BYTES, (unsigned)i));
        if (i % 2 == 0)
            ck_assert_ptr_eq(tl_tensor_data(completions[i].tensor), tl_tensor_data(made.items[i].destination));
        tl_tensor_put(completions[i].tensor);
        tl_tensor_put(made.items[i].destination);
    }
    free_items(&made);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- partial -- */

/* Enough have come: the rest is given up, and completes before the group. */
START_TEST(enough_and_cancel)
{
    struct items made = make_items(1500);
    struct tl_recv_many_options options = group_options();
    options.min_count = 100;
    publish_values(0, 100);
    tl_op_id id = ask(&made, &options);
    expect_members(id, 100);
    expect_failed(1400, TL_CANCELLED);
    expect_group(id, TL_OK, 100, 1400);
    wait_for_waiting(0, 0);
    free_items(&made);
}
END_TEST

/* Enough have come: the group completes, and the rest after it. */
START_TEST(enough_and_leave)
{
    struct items made = make_items(1500);
    struct tl_recv_many_options options = group_options();
    options.min_count = 100;
    options.rest = TL_REST_LEAVE;
    publish_values(0, 100);
    tl_op_id id = ask(&made, &options);
    expect_members(id, 100);
    expect_group(id, TL_OK, 100, 0);
    ck_assert(cluster_is_quiet(cq));
    publish_values(100, 1400);
    expect_members(id, 1400);
    ck_assert(cluster_is_quiet(cq));
    no_operation_is_open(1);
    free_items(&made);
}
END_TEST

/* Publishes values from the first on, and receives that one: what follows need not wait for a link. */
static void publish_and_connect(size_t count)
{
    publish_values(0, count);
    tl_tensor_put(cluster_recv_wait(cluster.workers[1], 0, "k0", 1));
}

/* The time is up: what has come counts. _i: what becomes of the rest. */
START_TEST(time_of_the_group)
{
    struct items made = make_items(20);
    struct tl_recv_many_options options = group_options();
    options.group_timeout_ns = CLUSTER_SECOND;
    options.rest = _i == 0 ? TL_REST_CANCEL : TL_REST_LEAVE;
    publish_and_connect(5);
    tl_op_id id = ask(&made, &options);
    expect_members(id, 5);
    if (_i == 0) expect_failed(15, TL_CANCELLED);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_msg(strstr(completion.status.message, "5 of 20 had come") != NULL, "%s", completion.status.message);
    check_group(&completion, id, TL_DEADLINE_EXCEEDED, 5, _i == 0 ? 15 : 0);
    if (_i == 1) {
        publish_values(5, 15);
        expect_members(id, 15);
    }
    ck_assert(cluster_is_quiet(cq));
    free_items(&made);
}
END_TEST

/* Each member says at the deadline of all what it has waited for. */
START_TEST(deadline_of_all)
{
    struct items made = make_items(600);
    struct tl_recv_many_options options = group_options();
    publish_and_connect(1);
    tl_op_id id;
    ck_assert_int_eq(tl_recv_many(cluster.workers[1], cluster_peer(cluster.workers[1], 0), made.items, 600, &options,
                                  CLUSTER_SECOND, cq, &cluster, &id, &error),
                     TL_OK);
    expect_members(id, 1);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_msg(strstr(completion.status.message, "k1 of step 1 did not come from /job:node/task:0") != NULL, "%s",
                  completion.status.message);
    ck_assert_int_eq(completion.status.code, TL_DEADLINE_EXCEEDED);
    expect_failed(598, TL_DEADLINE_EXCEEDED);
    expect_group(id, TL_DEADLINE_EXCEEDED, 1, 599);
    free_items(&made);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- cancel -- */

START_TEST(one_member_is_cancelled)
{
    struct items made = make_items(10);
    struct tl_recv_many_options options = group_options();
    tl_op_id id = ask(&made, &options);
    wait_for_waiting(0, 10);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], id + 1 + 3), TL_OK);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_int_eq(completion.status.code, TL_CANCELLED);
    ck_assert_uint_eq(completion.op, id + 4);
    ck_assert_uint_eq(completion.item, 3);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], id + 1 + 3), TL_NOT_FOUND);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], id + 1 + 10), TL_NOT_FOUND);
    publish_values(0, 10);
    expect_members(id, 9);
    expect_group(id, TL_CANCELLED, 9, 1);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], id + 1), TL_NOT_FOUND);
    free_items(&made);
}
END_TEST

START_TEST(the_group_is_cancelled)
{
    struct items made = make_items(1500);
    struct tl_recv_many_options options = group_options();
    publish_values(0, 10);
    tl_op_id id = ask(&made, &options);
    expect_members(id, 10);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], id), TL_OK);
    expect_failed(1490, TL_CANCELLED);
    expect_group(id, TL_CANCELLED, 10, 1490);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], id), TL_NOT_FOUND);
    wait_for_waiting(0, 0);
    free_items(&made);
}
END_TEST

/* A group that is over with its rest left can still be cancelled. */
START_TEST(the_rest_is_cancelled)
{
    struct items made = make_items(3);
    struct tl_recv_many_options options = group_options();
    options.min_count = 1;
    options.rest = TL_REST_LEAVE;
    publish_values(0, 1);
    tl_op_id id = ask(&made, &options);
    expect_members(id, 1);
    expect_group(id, TL_OK, 1, 0);
    ck_assert_int_eq(tl_cancel(cluster.workers[1], id), TL_OK);
    expect_failed(2, TL_CANCELLED);
    no_operation_is_open(1);
    free_items(&made);
}
END_TEST

/* --------------------------------------------------------------------------------------------- members that fail -- */

START_TEST(dead_members)
{
    struct items made = make_items(6);
    struct tl_recv_many_options options = group_options();
    struct tl_tensor *dead;
    ck_assert_int_eq(tl_tensor_create_dead(&dead, &error), TL_OK);
    for (size_t i = 0; i < 3; i++)
        cluster_publish(cluster.workers[0], made.keys[i], 1, dead);
    publish_values(3, 3);
    for (unsigned round = 0; round < 2; round++) {
        made.count = round == 0 ? 6 : 3; /* all of the second group are dead */
        tl_op_id id = ask(&made, &options);
        for (size_t i = 0; i < made.count; i++) {
            struct tl_completion completion = cluster_next(cq);
            ck_assert_int_eq(completion.status.code, TL_OK);
            ck_assert_int_eq(tl_tensor_is_dead(completion.tensor), completion.item < 3);
            tl_tensor_put(completion.tensor);
        }
        struct tl_completion completion = cluster_next(cq);
        check_group(&completion, id, TL_OK, made.count, 0);
        ck_assert_uint_eq(completion.dead_count, 3);
    }
    tl_tensor_put(dead);
    free_items(&made);
}
END_TEST

/* Its destination does not fit. */
START_TEST(a_member_that_fails)
{
    struct items made = make_items(100);
    struct tl_recv_many_options options = group_options();
    made.items[7].destination = cluster_tensor(5, 1);
    publish_values(0, 100);
    tl_op_id id = ask(&made, &options);
    unsigned failed = 0;
    for (size_t i = 0; i < 100; i++) {
        struct tl_completion completion = cluster_next(cq);
        if (completion.item != 7) {
            check_member(&completion, id);
        } else {
            ck_assert_int_eq(completion.status.code, TL_FAILED_PRECONDITION);
            failed++;
        }
    }
    ck_assert_uint_eq(failed, 1);
    expect_group(id, TL_FAILED_PRECONDITION, 99, 1);
    tl_tensor_put(made.items[7].destination);
    free_items(&made);
}
END_TEST

/* Members of a step that is aborted or ended, here or at the peer; the others go on. _i: abort or end; where. */
START_TEST(steps_that_end)
{
    struct items made = make_items(20);
    struct tl_recv_many_options options = group_options();
    struct tl_worker *where = cluster.workers[_i / 2];
    for (size_t i = 0; i < 10; i++)
        made.items[i].step = 9;
    tl_op_id id = ask(&made, &options);
    wait_for_waiting(0, 20);
    enum tl_status status = _i % 2 == 0 ? TL_ABORTED : TL_CANCELLED;
    if (_i % 2 == 0) {
        ck_assert_int_eq(tl_worker_abort_step(where, 9, TL_ABORTED, "why", &error), TL_OK);
    } else {
        ck_assert_int_eq(tl_worker_end_step(where, 9, NULL, &error), TL_OK);
    }
    expect_failed(10, status);
    publish_values(10, 10);
    expect_members(id, 10);
    expect_group(id, status, 10, 10);
    free_items(&made);
}
END_TEST

/* --------------------------------------------------------------------------------------------- close, restart -- */

START_TEST(close_midway)
{
    struct items made = make_items(1500);
    struct tl_recv_many_options options = group_options();
    publish_values(0, 100);
    tl_op_id id = ask(&made, &options);
    expect_members(id, 100);
    cluster_close(&cluster, 1);
    expect_failed(1400, TL_CANCELLED);
    expect_group(id, TL_CANCELLED, 100, 1400);
    ck_assert(cluster_is_quiet(cq));
    free_items(&made);
}
END_TEST

/* Completions that are not read are dropped with their queue. */
START_TEST(unread_completions)
{
    struct items made = make_items(700);
    struct tl_recv_many_options options = group_options();
    publish_values(0, 700);
    ask(&made, &options);
    ask(&made, &options);
    cluster_close(&cluster, 1);
    free_items(&made);
}
END_TEST

START_TEST(peer_restarts)
{
    struct items made = make_items(1200);
    struct tl_recv_many_options options = group_options();
    publish_values(0, 400);
    tl_op_id id = ask(&made, &options);
    expect_members(id, 400);
    wait_for_waiting(0, 800);
    cluster_close(&cluster, 0);
    CLUSTER_UNTIL(cluster_peer_info(cluster.workers[1], 0).state != TL_PEER_UP);
    ck_assert(cluster_is_quiet(cq));
    open_task(0);
    publish_values(400, 800);
    expect_members(id, 800);
    expect_group(id, TL_OK, 1200, 0);
    free_items(&made);
}
END_TEST

static void add(TCase *tcase)
{
    tcase_add_test(tcase, all_published);
    tcase_add_test(tcase, from_itself);
    tcase_add_test(tcase, empty);
    tcase_add_test(tcase, key_twice);
    tcase_add_test(tcase, into_destinations);
    tcase_add_test(tcase, enough_and_cancel);
    tcase_add_test(tcase, enough_and_leave);
    tcase_add_loop_test(tcase, time_of_the_group, 0, 2);
    tcase_add_test(tcase, deadline_of_all);
    tcase_add_test(tcase, one_member_is_cancelled);
    tcase_add_test(tcase, the_group_is_cancelled);
    tcase_add_test(tcase, the_rest_is_cancelled);
    tcase_add_test(tcase, dead_members);
    tcase_add_test(tcase, a_member_that_fails);
    tcase_add_loop_test(tcase, steps_that_end, 0, 4);
    tcase_add_test(tcase, close_midway);
    tcase_add_test(tcase, unread_completions);
    tcase_add_test(tcase, peer_restarts);
    tcase_add_test(tcase, many_keys);
}

int main(void)
{
    Suite *suite = suite_create("worker_groups");
    add_cases(suite, add);
    return run_suite(suite);
}
