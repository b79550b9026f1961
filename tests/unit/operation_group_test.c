// SPDX-License-Identifier: Apache-2.0
/* Groups of receives and sends alone: in which rounds members begin and end, which completions come and in what order,
 * what a group says when it is over, and what calls refuse. The table of values, peers, queues and the loop are
 * fakes. */
#include "fakes/fault_alloc.h"
#include "base/hash_table.c"
#include "fakes/operation_case.h"
#include "server/transfers/operation_many.c"
#include "fakes/run_suite.h"

/* More than two rounds begin. */
#define MANY 1100
#define KEY_BYTES 16

static struct tl_recv_item recv_items[MANY];
static struct tl_send_item send_items[MANY];
static char keys[MANY][KEY_BYTES];
static struct tl_recv_many_options recv_options;
static struct tl_send_many_options send_options;
static tl_op_id group_id;
static int my_data;

static void setup_group(void)
{
    setup();
    is_crowd = true;
    can_cancel = true;
    recv_options =
        (struct tl_recv_many_options){.size_bytes = sizeof(recv_options), .item_bytes = sizeof(recv_items[0])};
    send_options =
        (struct tl_send_many_options){.size_bytes = sizeof(send_options), .item_bytes = sizeof(send_items[0])};
    for (size_t i = 0; i < MANY; i++) {
        snprintf(keys[i], KEY_BYTES, "key/%zu", i);
        recv_items[i] = (struct tl_recv_item){.key = keys[i], .step = i % 2, .user_data = &keys[i]};
        send_items[i] = (struct tl_send_item){.key = keys[i], .step = i % 2, .tensor = tensor, .user_data = &keys[i]};
    }
}

static void teardown_group(void)
{
    while (closure_count > 0)
        run_round_of_loop();
    ck_assert_uint_eq(worker.operations.open_ops, 0);
    ck_assert_uint_eq(worker.operations.calls.count, 0);
    ck_assert_ptr_null(worker.operations.steps);
    ck_assert(tl_list_is_empty(&worker.operations.starting.groups));
    ck_assert_uint_eq(timers.count, 0);
}

static struct op_group *receive_many(size_t count)
{
    enum tl_status status = tl_recv_many(&worker, 1, recv_items, count, &recv_options, TL_NS_PER_SEC,
                                         (struct tl_cq *)&worker, &my_data, &group_id, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return TL_CONTAINER_OF(posted, struct op_group, call.closure);
}

static struct op_group *send_many(size_t count)
{
    enum tl_status status = tl_send_many(&worker, send_items, count, &send_options, TL_NS_PER_SEC,
                                         (struct tl_cq *)&worker, &my_data, &group_id, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return TL_CONTAINER_OF(posted, struct op_group, call.closure);
}

static void start_all(void)
{
    while (closure_count > 0)
        run_round_of_loop();
}

/* Returns how many of them are sends. */
static uint64_t end_unstarted_of(uint64_t step)
{
    uint64_t send_count = 0;
    do {
        tl_quota_renew(&loop_quota);
    } while (!tl_ops_end_unstarted(&worker, step, &why, &send_count));
    return send_count;
}

static void fail_step(uint64_t step)
{
    for (int is_delivering = 0; is_delivering < 2; is_delivering++) {
        do {
            tl_quota_renew(&loop_quota);
        } while (!tl_ops_fail_step(&worker, step, is_delivering, &why));
    }
}

/* Returns in how many portions: members that have not begun begin first, and are refused. */
static unsigned fail_receives(const void *peer, const struct tl_error *status)
{
    size_t chain = 0;
    for (unsigned portions = 1;; portions++) {
        tl_quota_renew(&loop_quota);
        bool is_over = tl_ops_fail_receives(&worker, peer, status, &chain);
        ck_assert_uint_le(loop_quota.used, TL_QUOTA);
        if (is_over) return portions;
    }
}

/* The value of the member has come, or it has failed. */
static void fetch_ends(struct op_group *group, size_t place, enum tl_status code)
{
    struct tl_fetch *fetch = &op_group_member(group, place)->receive.request.fetch;
    const struct tl_error result = {.code = code, .message = "it failed"};
    if (code == TL_OK) fetch->destination = tl_tensor_get(tensor);
    fetch->ops->done(fetch, &result);
}

/* The next completion is that of a member. */
static void expect_member(size_t number, size_t place, enum tl_status status)
{
    ck_assert_uint_lt(number, pushed_count);
    struct tl_completion *completion = &pushed[number];
    ck_assert_uint_eq(completion->item, place);
    ck_assert_uint_eq(completion->op, group_id + 1 + place);
    ck_assert_ptr_eq(completion->user_data, &keys[place]);
    ck_assert_msg(completion->status.code == status, "%s", completion->status.message);
    tl_tensor_put(completion->tensor);
}

static void expect_group(size_t number, enum tl_status status, uint64_t ok_count, uint64_t failed_count)
{
    ck_assert_uint_lt(number, pushed_count);
    const struct tl_completion *completion = &pushed[number];
    ck_assert(completion->kind == TL_OP_RECV_MANY || completion->kind == TL_OP_SEND_MANY);
    ck_assert_uint_eq(completion->op, group_id);
    ck_assert_ptr_eq(completion->user_data, &my_data);
    ck_assert_msg(completion->status.code == status, "%s", completion->status.message);
    ck_assert_uint_eq(completion->ok_count, ok_count);
    ck_assert_uint_eq(completion->failed_count, failed_count);
}

/* ------------------------------------------------------------------------------------------------------ rounds -- */

/* One closure takes the group to the loop, and is posted again for each further round; one timer watches all members.
 */
START_TEST(begins_in_rounds)
{
    struct op_group *group = receive_many(MANY);
    ck_assert_uint_eq(all_closure_count, 1);
    const size_t begun[] = {512, 1024, MANY};
    for (size_t i = 0; i < TL_ARRAY_COUNT(begun); i++) {
        run_round_of_loop();
        ck_assert_uint_eq(fetch_count, begun[i]);
        ck_assert_int_eq(tl_list_is_empty(&worker.operations.starting.groups), i == 2);
    }
    ck_assert_uint_eq(closure_count, 0);
    ck_assert_uint_eq(all_closure_count, 3);
    ck_assert_uint_eq(timers.count, 1);
    for (size_t i = 0; i < MANY; i++)
        fetch_ends(group, i, TL_OK);
    ck_assert_uint_eq(pushed_count, 0);
    run_round_of_loop();
    ck_assert_uint_eq(pushed_count, MANY + 1);
    for (size_t i = 0; i < MANY; i++)
        expect_member(i, i, TL_OK);
    expect_group(MANY, TL_OK, MANY, 0);
    ck_assert_uint_eq(all_closure_count, 3);
}
END_TEST

/* Over a data connection the owner has the first requests while further members begin. */
START_TEST(begins_in_small_rounds_over_data_connections)
{
    is_on_session = true;
    struct op_group *group = receive_many(150);
    const size_t begun[] = {64, 128, 150};
    for (size_t i = 0; i < TL_ARRAY_COUNT(begun); i++) {
        run_round_of_loop();
        ck_assert_uint_eq(fetch_count, begun[i]);
    }
    ck_assert_uint_eq(closure_count, 0);
    for (size_t i = 0; i < 150; i++)
        fetch_ends(group, i, TL_OK);
    run_round_of_loop();
    ck_assert_uint_eq(pushed_count, 151);
    for (size_t i = 0; i < 150; i++)
        expect_member(i, i, TL_OK);
    expect_group(150, TL_OK, 150, 0);
}
END_TEST

/* Time-outs of a group: one timer besides the deadline. */
START_TEST(has_two_timers_at_most)
{
    recv_options.group_timeout_ns = TL_NS_PER_SEC / 2;
    struct op_group *group = receive_many(MANY);
    start_all();
    ck_assert_uint_eq(timers.count, 2);
    for (size_t i = 0; i < MANY; i++)
        fetch_ends(group, i, TL_OK);
    ck_assert_uint_eq(timers.count, 0);
    run_round_of_loop();
    for (size_t i = 0; i < MANY; i++)
        tl_tensor_put(pushed[i].tensor);
}
END_TEST

/* Members end in rounds too, and each says why. _i: a cancel, the deadline, the time of the group. */
START_TEST(ends_in_rounds)
{
    recv_options.group_timeout_ns = _i == 2 ? TL_NS_PER_SEC / 2 : 0;
    receive_many(MANY);
    start_all();
    if (_i == 0) {
        ck_assert_int_eq(tl_cancel(&worker, group_id), TL_OK);
        ck_assert_int_eq(tl_cancel(&worker, group_id), TL_NOT_FOUND);
    } else {
        fake_clock_advance(_i == 1 ? TL_NS_PER_SEC : TL_NS_PER_SEC / 2);
        tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0});
    }
    const size_t ended[] = {512, 1024, MANY + 1};
    for (size_t i = 0; i < TL_ARRAY_COUNT(ended); i++) {
        run_round_of_loop();
        ck_assert_uint_eq(pushed_count, ended[i]);
    }
    static const char *const reasons[] = {"the group was cancelled", "key/0 of step 0 did not come from /job:ps/task:1",
                                          "the group was over when 0 of 1100 had come"};
    ck_assert_msg(strstr(pushed[0].status.message, reasons[_i]) != NULL, "%s", pushed[0].status.message);
    for (size_t i = 0; i < MANY; i++)
        expect_member(i, i, _i == 1 ? TL_DEADLINE_EXCEEDED : TL_CANCELLED);
    expect_group(MANY, _i == 0 ? TL_CANCELLED : TL_DEADLINE_EXCEEDED, 0, MANY);
}
END_TEST

/* Cancelled before and while it begins: what has not begun is never asked for. */
START_TEST(cancelled_while_it_begins)
{
    receive_many(MANY);
    run_round_of_loop();
    ck_assert_int_eq(tl_cancel(&worker, group_id), TL_OK);
    start_all();
    ck_assert_uint_eq(fetch_count, 512);
    ck_assert_uint_eq(pushed_count, MANY + 1);
    expect_group(MANY, TL_CANCELLED, 0, MANY);
}
END_TEST

START_TEST(worker_closes_while_it_begins)
{
    struct tl_error closed = {.code = TL_CANCELLED, .message = "the worker was closed"};
    receive_many(MANY);
    run_round_of_loop();
    worker.closing.is_closing = true;
    ck_assert_uint_eq(fail_receives(NULL, &closed), 4);
    start_all();
    ck_assert_uint_eq(fetch_count, 512);
    ck_assert_uint_eq(pushed_count, MANY + 1);
    expect_group(MANY, TL_CANCELLED, 0, MANY);
}
END_TEST

/* A peer that is gone ends what receives from it, in portions, and nothing that receives from another. */
START_TEST(peer_goes)
{
    receive_many(MANY);
    run_round_of_loop();
    ck_assert_uint_eq(fail_receives(&worker, &why), 1);
    ck_assert_uint_eq(worker.operations.calls.count, 1);
    ck_assert_uint_eq(fail_receives(&the_peer, &why), 4);
    start_all();
    ck_assert_uint_eq(fetch_count, 512);
    ck_assert_uint_eq(pushed_count, MANY + 1);
    expect_group(MANY, TL_UNAVAILABLE, 0, MANY);
}
END_TEST

/* A member that is cancelled before it begins is never asked for; the others are. */
START_TEST(member_cancelled_before_it_begins)
{
    receive_many(MANY);
    run_round_of_loop();
    ck_assert_int_eq(tl_cancel(&worker, group_id + 1 + 600), TL_OK);
    ck_assert_int_eq(tl_cancel(&worker, group_id + 1 + 600), TL_NOT_FOUND);
    ck_assert_int_eq(tl_cancel(&worker, group_id + 1 + MANY), TL_NOT_FOUND);
    start_all();
    ck_assert_uint_eq(fetch_count, MANY - 1);
    expect_member(0, 600, TL_CANCELLED);
    ck_assert_int_eq(tl_cancel(&worker, group_id), TL_OK);
    start_all();
    expect_group(MANY, TL_CANCELLED, 0, MANY);
}
END_TEST

START_TEST(without_memory_to_register)
{
    receive_many(3);
    fault_arm(1);
    run_round_of_loop();
    ck_assert(fault_was_hit());
    start_all();
    ck_assert_uint_eq(fetch_count, 0);
    for (size_t i = 0; i < 3; i++)
        expect_member(i, i, TL_RESOURCE_EXHAUSTED);
    expect_group(3, TL_RESOURCE_EXHAUSTED, 0, 3);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- partial -- */

/* The completion says how many had come when the group was over, however late it is read. */
START_TEST(counts_when_it_is_over)
{
    recv_options.min_count = 2;
    recv_options.rest = TL_REST_LEAVE;
    struct op_group *group = receive_many(5);
    start_all();
    fetch_ends(group, 4, TL_NOT_FOUND);
    fetch_ends(group, 0, TL_OK);
    fetch_ends(group, 1, TL_OK);
    fetch_ends(group, 2, TL_OK);
    fetch_ends(group, 3, TL_NOT_FOUND);
    run_round_of_loop();
    ck_assert_uint_eq(pushed_count, 6);
    expect_member(0, 4, TL_NOT_FOUND);
    expect_member(1, 0, TL_OK);
    expect_member(2, 1, TL_OK);
    expect_group(3, TL_OK, 2, 1);
    expect_member(4, 2, TL_OK);
    expect_member(5, 3, TL_NOT_FOUND);
}
END_TEST

/* A group is dead when all that have come are: _i is how many of them are. */
START_TEST(dead_members)
{
    struct tl_tensor *dead;
    ck_assert_int_eq(tl_tensor_create_dead(&dead, &error), TL_OK);
    struct op_group *group = receive_many(3);
    start_all();
    struct tl_tensor *alive = tensor;
    for (size_t i = 0; i < 3; i++) {
        tensor = i >= 3 - (size_t)_i ? dead : alive;
        fetch_ends(group, i, TL_OK);
    }
    run_round_of_loop();
    for (size_t i = 0; i < 3; i++)
        expect_member(i, i, TL_OK);
    expect_group(3, TL_OK, 3, 0);
    ck_assert_uint_eq(pushed[3].dead_count, _i);
    tl_tensor_put(dead);
}
END_TEST

/* The status is that of the member that failed first, also when the time of the group is up. */
START_TEST(first_failure_counts)
{
    recv_options.group_timeout_ns = _i == 1 ? TL_NS_PER_SEC / 2 : 0;
    struct op_group *group = receive_many(3);
    start_all();
    fetch_ends(group, 1, TL_DATA_LOSS);
    run_round_of_loop();
    run_round_of_loop();
    ck_assert_uint_eq(pushed_count, 1);
    fetch_ends(group, 0, TL_NOT_FOUND);
    if (_i == 0) {
        fetch_ends(group, 2, TL_OK);
    } else {
        fake_clock_advance(TL_NS_PER_SEC / 2);
        tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0});
    }
    start_all();
    run_round_of_loop();
    ck_assert_uint_eq(pushed_count, 4);
    expect_member(2, 2, _i == 0 ? TL_OK : TL_CANCELLED);
    expect_group(3, TL_DATA_LOSS, _i == 0 ? 1 : 0, _i == 0 ? 2 : 3);
}
END_TEST

/* The whole rest can still be cancelled when the group is over. */
START_TEST(rest_is_cancelled)
{
    recv_options.min_count = 1;
    recv_options.rest = TL_REST_LEAVE;
    recv_options.group_timeout_ns = TL_NS_PER_SEC / 2;
    struct op_group *group = receive_many(3);
    start_all();
    fetch_ends(group, 2, TL_OK);
    run_round_of_loop();
    expect_member(0, 2, TL_OK);
    expect_group(1, TL_OK, 1, 0);
    ck_assert_uint_eq(timers.count, 1);
    ck_assert_int_eq(tl_cancel(&worker, group_id), TL_OK);
    start_all();
    expect_member(2, 0, TL_CANCELLED);
    expect_member(3, 1, TL_CANCELLED);
    ck_assert_uint_eq(pushed_count, 4);
}
END_TEST

START_TEST(without_items)
{
    receive_many(0);
    start_all();
    ck_assert_uint_eq(pushed_count, 1);
    expect_group(0, TL_OK, 0, 0);
    ck_assert_int_eq(tl_cancel(&worker, group_id), TL_NOT_FOUND);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- steps -- */

/* The table and the transports let go of what is sent. */
static void put_values(void)
{
    for (size_t i = 0; i < sent_count; i++)
        tl_tensor_put(values[i]);
}

/* A step ends while the group begins: its receives end, begun or not, and the others go on. */
START_TEST(step_ends_while_receives_begin)
{
    receive_many(MANY);
    run_round_of_loop();
    ck_assert_uint_eq(end_unstarted_of(1), 0);
    fail_step(1);
    start_all();
    ck_assert_uint_eq(fetch_count, 512 + (MANY - 512) / 2);
    ck_assert_uint_eq(pushed_count, MANY / 2);
    for (size_t i = 0; i < pushed_count; i++)
        ck_assert_int_eq(pushed[i].status.code, why.code);
    ck_assert_int_eq(tl_cancel(&worker, group_id), TL_OK);
    start_all();
    expect_group(MANY, TL_UNAVAILABLE, 0, MANY);
}
END_TEST

/* A step that ends looks at no group whose members have other steps, however many have not begun. */
START_TEST(step_leaves_groups_of_others_alone)
{
    for (size_t i = 0; i < MANY; i++)
        recv_items[i].step = 10 + i % 2;
    receive_many(MANY);
    run_round_of_loop();
    static const uint64_t others[] = {0, 9, 12, UINT64_MAX};
    for (size_t i = 0; i < TL_ARRAY_COUNT(others); i++)
        ck_assert_uint_eq(end_unstarted_of(others[i]), 0);
    ck_assert_uint_eq(worker.operations.step_visits, 0);
    ck_assert_uint_eq(pushed_count, 0);
    (void)end_unstarted_of(11);
    ck_assert_uint_eq(worker.operations.step_visits, MANY - 512);
    start_all();
    ck_assert_uint_eq(pushed_count, (MANY - 512) / 2);
    ck_assert_int_eq(tl_cancel(&worker, group_id), TL_OK);
    start_all();
}
END_TEST

/* No more members are looked at in a round than the quota allows, each of them once. */
START_TEST(step_ends_in_rounds)
{
    receive_many(MANY);
    run_round_of_loop();
    uint64_t send_count = 0;
    tl_quota_renew(&loop_quota);
    ck_assert(!tl_ops_end_unstarted(&worker, 1, &why, &send_count));
    ck_assert_uint_eq(loop_quota.used, TL_QUOTA);
    ck_assert(!tl_ops_end_unstarted(&worker, 1, &why, &send_count));
    tl_quota_renew(&loop_quota);
    ck_assert(tl_ops_end_unstarted(&worker, 1, &why, &send_count));
    ck_assert_uint_eq(worker.operations.step_visits, MANY - 512);
    fail_step(1);
    start_all();
    ck_assert_uint_eq(pushed_count, MANY / 2);
    ck_assert_int_eq(tl_cancel(&worker, group_id), TL_OK);
    start_all();
}
END_TEST

/* The same with sends: what was not offered is not offered any more, and is counted. */
START_TEST(step_ends_while_sends_begin)
{
    struct op_group *group = send_many(MANY);
    run_round_of_loop();
    ck_assert_uint_eq(sent_count, 512);
    ck_assert_uint_eq(end_unstarted_of(1), (MANY - 512) / 2);
    ck_assert_uint_eq(end_unstarted_of(1), 0);
    start_all();
    ck_assert_uint_eq(sent_count, 512 + (MANY - 512) / 2);
    ck_assert_uint_eq(pushed_count, (MANY - 512) / 2);
    for (size_t i = 0; i < pushed_count; i++) {
        ck_assert_uint_eq(pushed[i].item % 2, 1);
        ck_assert_int_eq(pushed[i].status.code, why.code);
    }
    can_take_back = true;
    ck_assert(op_group_end(group, &why));
    start_all();
    put_values();
    start_all();
    ck_assert_uint_eq(pushed_count, MANY + 1);
    expect_group(MANY, TL_UNAVAILABLE, 0, MANY);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- sends -- */

/* What the table has of a member that is received. */
static void send_ends(struct op_group *group, size_t place, enum tl_status code)
{
    struct tl_sender *sender = &op_group_member(group, place)->send.sender;
    sender->over(sender, &(struct tl_error){.code = code, .message = "it failed"});
}

/* The values of 16 members go into the table together; the last ones do not wait for others. */
START_TEST(values_go_into_the_table_together)
{
    struct op_group *group = send_many(MANY);
    run_round_of_loop();
    ck_assert_uint_eq(sent_count, 512);
    ck_assert_uint_eq(table_lock_count, 512 / TL_UNSENT_COUNT);
    start_all();
    ck_assert_uint_eq(sent_count, MANY);
    ck_assert_uint_eq(table_lock_count, (MANY + TL_UNSENT_COUNT - 1) / TL_UNSENT_COUNT);
    for (size_t i = 0; i < MANY; i++)
        send_ends(group, i, TL_OK);
    put_values();
    start_all();
    ck_assert_uint_eq(pushed_count, MANY + 1);
    expect_group(MANY, TL_OK, MANY, 0);
}
END_TEST

/* Members that succeed quietly are counted, and those that fail are reported. */
START_TEST(quiet_sends)
{
    send_options.is_quiet = true;
    struct op_group *group = send_many(4);
    start_all();
    for (size_t i = 0; i < 4; i++)
        send_ends(group, i, i == 2 ? TL_ABORTED : TL_OK);
    start_all();
    ck_assert_uint_eq(pushed_count, 0);
    put_values();
    start_all();
    ck_assert_uint_eq(pushed_count, 2);
    expect_member(0, 2, TL_ABORTED);
    expect_group(1, TL_ABORTED, 3, 1);
}
END_TEST

/* ------------------------------------------------------------------------------------------------ wrong calls -- */

static void expect_refused(enum tl_status status, enum tl_status expected, const char *text)
{
    ck_assert_msg(status == expected, "%d: %s", (int)status, error.message);
    ck_assert_msg(strstr(error.message, text) != NULL, "%s", error.message);
    ck_assert_uint_eq(all_closure_count, 0);
    ck_assert_uint_eq(worker.operations.open_ops, 0);
}

static enum tl_status try_receive(size_t count, const struct tl_recv_many_options *options)
{
    return tl_recv_many(&worker, 1, recv_items, count, options, TL_NS_PER_SEC, (struct tl_cq *)&worker, NULL, NULL,
                        &error);
}

START_TEST(wrong_receive_options)
{
    struct tl_recv_many_options good = recv_options;
    expect_refused(try_receive(3, NULL), TL_INVALID_ARGUMENT, "struct tl_recv_many_options is missing");
    recv_options.size_bytes--;
    expect_refused(try_receive(3, &recv_options), TL_INVALID_ARGUMENT, "size_bytes of struct tl_recv_many_options");
    recv_options = good;
    for (size_t count = 0; count < 4; count += 3) {
        recv_options.item_bytes = TL_RECV_ITEM_FIRST_BYTES - 1;
        expect_refused(try_receive(count, &recv_options), TL_INVALID_ARGUMENT,
                       "item_bytes of struct tl_recv_item is 3");
        recv_options = good;
    }
    recv_options.min_count = 4;
    expect_refused(try_receive(3, &recv_options), TL_INVALID_ARGUMENT, "min_count is 4, and there are 3 items");
    recv_options = good;
    recv_options.group_timeout_ns = -1;
    expect_refused(try_receive(3, &recv_options), TL_INVALID_ARGUMENT, "group_timeout_ns is negative");
    recv_options = good;
    recv_options.rest = (enum tl_rest)2;
    expect_refused(try_receive(3, &recv_options), TL_UNIMPLEMENTED, "rest 2");
}
END_TEST

/* Each names the item by its place, and by its key where it has one. */
static struct tl_tensor *wrap(unsigned char (*bytes)[4], bool is_read_only, tl_release_fn release)
{
    const uint64_t dims[] = {sizeof(*bytes)};
    const struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                        .dtype = TL_U8,
                                        .rank = 1,
                                        .dims = dims,
                                        .data = bytes,
                                        .capacity_bytes = sizeof(*bytes),
                                        .read_only = is_read_only,
                                        .release = release};
    struct tl_tensor *wrapped;
    ck_assert_int_eq(tl_tensor_wrap(&view, &wrapped, &error), TL_OK);
    return wrapped;
}

static bool is_released;

static void release(void *data, void *context)
{
    (void)data, (void)context;
    is_released = true;
}

START_TEST(wrong_receive_items)
{
    static unsigned char bytes[4];
    struct tl_tensor *writable = wrap(&bytes, false, release), *read_only = wrap(&bytes, true, NULL);
    recv_items[0].destination = writable;
    recv_items[2].destination = read_only;
    expect_refused(try_receive(3, &recv_options), TL_INVALID_ARGUMENT,
                   "item 2: the destination for key/2 is read-only");
    recv_items[0].destination = recv_items[2].destination = NULL;
    tl_tensor_put(read_only);
    tl_tensor_put(writable);
    ck_assert(is_released);
    recv_items[2].key = "";
    expect_refused(try_receive(3, &recv_options), TL_INVALID_ARGUMENT, "item 2: the key is empty");
    recv_items[2].key = NULL;
    expect_refused(try_receive(3, &recv_options), TL_INVALID_ARGUMENT, "item 2: the key is empty");
    recv_items[2].key = "k\xff";
    expect_refused(try_receive(3, &recv_options), TL_INVALID_ARGUMENT, "item 2: the key is not UTF-8");
    recv_items[2].key = keys[2];
    recv_items[1].priority = 4;
    expect_refused(try_receive(3, &recv_options), TL_INVALID_ARGUMENT, "item 1: the priority of key/1 is 4");
    recv_items[1].priority = 0;
    recv_options.device = (struct tl_device){.kind = TL_DEVICE_CUDA};
    recv_items[0].destination = tensor;
    expect_refused(try_receive(3, &recv_options), TL_INVALID_ARGUMENT, "item 0: the destination for key/0 is on");
}
END_TEST

/* The items of a newer program have a field that this version does not know. */
struct later_recv_item {
    struct tl_recv_item item;
    uint64_t unknown;
};

START_TEST(items_of_a_newer_program)
{
    struct later_recv_item later[3] = {{.item = recv_items[0]}, {.item = recv_items[1]}, {.item = recv_items[2]}};
    recv_options.item_bytes = sizeof(later[0]);
    later[2].unknown = 1;
    expect_refused(tl_recv_many(&worker, 1, &later[0].item, 3, &recv_options, TL_NS_PER_SEC, (struct tl_cq *)&worker,
                                NULL, NULL, &error),
                   TL_UNIMPLEMENTED, "item 2: byte 48 of struct tl_recv_item is set");
    later[2].unknown = 0;
    ck_assert_int_eq(tl_recv_many(&worker, 1, &later[0].item, 3, &recv_options, TL_NS_PER_SEC, (struct tl_cq *)&worker,
                                  &my_data, &group_id, &error),
                     TL_OK);
    start_all();
    ck_assert_int_eq(tl_cancel(&worker, group_id), TL_OK);
    start_all();
    for (size_t i = 0; i < 3; i++)
        expect_member(i, i, TL_CANCELLED);
}
END_TEST

static enum tl_status try_send(size_t count, const struct tl_send_many_options *options)
{
    return tl_send_many(&worker, send_items, count, options, TL_NS_PER_SEC, (struct tl_cq *)&worker, NULL, NULL,
                        &error);
}

START_TEST(wrong_sends)
{
    expect_refused(try_send(3, NULL), TL_INVALID_ARGUMENT, "struct tl_send_many_options is missing");
    send_options.size_bytes--;
    expect_refused(try_send(3, &send_options), TL_INVALID_ARGUMENT, "size_bytes of struct tl_send_many_options");
    send_options.size_bytes++;
    for (size_t count = 0; count < 4; count += 3) {
        send_options.item_bytes = sizeof(struct tl_send_item) - 1;
        expect_refused(try_send(count, &send_options), TL_INVALID_ARGUMENT, "item_bytes of struct tl_send_item is 31");
    }
    send_options.item_bytes = sizeof(struct tl_send_item);
    send_items[1].key = NULL;
    expect_refused(try_send(3, &send_options), TL_INVALID_ARGUMENT, "item 1: the key is empty");
    send_items[1].key = keys[1];
    send_items[2].tensor = NULL;
    expect_refused(try_send(3, &send_options), TL_INVALID_ARGUMENT, "item 2: there is no tensor for key/2");
}
END_TEST

/* The blocking forms fill a completion for each item all the same. */
START_TEST(wrong_blocking_calls)
{
    struct tl_completion completions[3];
    recv_items[1].key = send_items[1].key = "";
    for (unsigned way = 0; way < 3; way++) {
        bool is_send = way == 0;
        memset(completions, 0xff, sizeof(completions));
        recv_options.rest = way == 1 ? TL_REST_LEAVE : TL_REST_CANCEL;
        enum tl_status status =
            is_send ? tl_send_many_wait(&worker, send_items, 3, &send_options, TL_NS_PER_SEC, completions, &error)
                    : tl_recv_many_wait(&worker, 1, recv_items, 3, &recv_options, TL_NS_PER_SEC, completions, &error);
        expect_refused(status, TL_INVALID_ARGUMENT, way == 1 ? "use tl_recv_many" : "item 1: the key is empty");
        for (size_t i = 0; i < 3; i++) {
            ck_assert_int_eq(completions[i].status.code, TL_INVALID_ARGUMENT);
            ck_assert_int_eq(completions[i].kind, is_send ? TL_OP_SEND : TL_OP_RECV);
            ck_assert_ptr_null(completions[i].tensor);
            ck_assert_uint_eq(completions[i].item, i);
        }
    }
    ck_assert_int_eq(tl_send_many_wait(&worker, send_items, 3, &send_options, TL_NS_PER_SEC, NULL, NULL),
                     TL_INVALID_ARGUMENT);
}
END_TEST

/* Nothing is asked or kept when memory is scarce. */
START_TEST(without_memory)
{
    is_self = true; /* each receive allocates something of its own */
    for (unsigned number = 1;; number++) {
        fault_arm(number);
        enum tl_status status = try_receive(3, &recv_options);
        if (!fault_was_hit()) {
            ck_assert_int_eq(status, TL_OK);
            break;
        }
        expect_refused(status, TL_RESOURCE_EXHAUSTED, "no memory");
        ck_assert_uint_lt(number, 10);
    }
    group_id = worker.operations.next_op - 3;
    start_all();
    ck_assert_int_eq(tl_cancel(&worker, group_id), TL_OK);
    start_all();
}
END_TEST

static void add(Suite *suite, const char *name, const TTest *test, int rounds)
{
    TCase *tcase = tcase_create(name);
    tcase_add_checked_fixture(tcase, setup_group, teardown_group);
    tcase_add_loop_test(tcase, test, 0, rounds);
    suite_add_tcase(suite, tcase);
}

/* Each test has a case of its own, which tests/defects names. */
#define ADD(test, rounds) add(suite, #test, test, rounds)

int main(void)
{
    Suite *suite = suite_create("operation_group");
    ADD(begins_in_rounds, 1);
    ADD(begins_in_small_rounds_over_data_connections, 1);
    ADD(has_two_timers_at_most, 1);
    ADD(ends_in_rounds, 3);
    ADD(cancelled_while_it_begins, 1);
    ADD(worker_closes_while_it_begins, 1);
    ADD(peer_goes, 1);
    ADD(member_cancelled_before_it_begins, 1);
    ADD(without_memory_to_register, 1);
    ADD(counts_when_it_is_over, 1);
    ADD(dead_members, 4);
    ADD(first_failure_counts, 2);
    ADD(rest_is_cancelled, 1);
    ADD(without_items, 1);
    ADD(step_ends_while_receives_begin, 1);
    ADD(step_ends_while_sends_begin, 1);
    ADD(step_ends_in_rounds, 1);
    ADD(step_leaves_groups_of_others_alone, 1);
    ADD(values_go_into_the_table_together, 1);
    ADD(quiet_sends, 1);
    ADD(wrong_receive_options, 1);
    ADD(wrong_receive_items, 1);
    ADD(items_of_a_newer_program, 1);
    ADD(wrong_sends, 1);
    ADD(wrong_blocking_calls, 1);
    ADD(without_memory, 1);
    return run_suite(suite);
}
