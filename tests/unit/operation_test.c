// SPDX-License-Identifier: Apache-2.0
/* The states of sends and receives: every edge of the two tables, every event that they leave out, and how each kind
 * ends. The table of values, peers, queues and the loop are fakes. */
#include "fakes/operation_case.h"
#include "fakes/device_case.h"
#include "fakes/run_suite.h"

/* ------------------------------------------------------------------------------------------------------ edges -- */

static const struct send_edge {
    enum op_state from;
    enum op_event event;
    bool is_released, is_lent; /* before */
    enum op_state to;
    const char *calls;
} send_edges[] = {
    {OP_NEW, OP_EVENT_START, false, false, OP_RUNNING, "send"},
    {OP_NEW, OP_EVENT_REFUSED, false, false, OP_LINGERING, ""},
    {OP_RUNNING, OP_EVENT_OVER, false, false, OP_LINGERING, ""},
    {OP_RUNNING, OP_EVENT_OVER, true, true, OP_LINGERING, ""},
    {OP_RUNNING, OP_EVENT_OVER, true, false, OP_COMPLETE, "complete: why"},
    {OP_RUNNING, OP_EVENT_RELEASED, false, false, OP_RUNNING, ""},
    {OP_RUNNING, OP_EVENT_RETURNED, true, true, OP_RUNNING, ""},
    {OP_LINGERING, OP_EVENT_RELEASED, false, true, OP_LINGERING, ""},
    {OP_LINGERING, OP_EVENT_RELEASED, false, false, OP_COMPLETE, "complete: ok"},
    {OP_LINGERING, OP_EVENT_RETURNED, false, true, OP_LINGERING, ""},
    {OP_LINGERING, OP_EVENT_RETURNED, true, true, OP_COMPLETE, "complete: ok"},
    {OP_LINGERING, OP_EVENT_FREE, true, false, OP_COMPLETE, "complete: ok"},
};

START_TEST(each_send_edge)
{
    const struct send_edge *edge = &send_edges[_i];
    create_send();
    register_op();
    op->state = (uint8_t)edge->from;
    op->send.is_released = edge->is_released;
    op->send.borrow = edge->is_lent ? (struct tl_borrow *)&the_borrow : NULL;
    tl_op_handle(op, edge->event, &why);
    if (edge->event == OP_EVENT_START) check_calls(""); /* others may begin, and go into the table with it */
    tl_ops_send(&worker);
    ck_assert_int_eq(op->state, edge->to);
    check_calls(edge->calls);
    ck_assert_int_eq(op->send.is_released, edge->is_released || edge->event == OP_EVENT_RELEASED);
    ck_assert_int_eq(op->send.borrow != NULL, edge->is_lent && edge->event != OP_EVENT_RETURNED);
    if (edge->from == OP_NEW) ck_assert_ptr_null(op->send.alias);
}
END_TEST

static const struct receive_edge {
    enum op_state from;
    enum op_event event;
    bool is_self;
    enum op_state to;
    const char *calls;
} receive_edges[] = {
    {OP_NEW, OP_EVENT_START, false, OP_RUNNING, "fetch"},
    {OP_NEW, OP_EVENT_START, true, OP_RUNNING, "receive"},
    {OP_NEW, OP_EVENT_REFUSED, false, OP_COMPLETE, "give_up complete: why"},
    {OP_RUNNING, OP_EVENT_REFUSED, true, OP_COMPLETE, "give_up complete: why"},
    {OP_RUNNING, OP_EVENT_ARRIVED, false, OP_COMPLETE, "complete: ok"},
    {OP_RUNNING, OP_EVENT_OFFERED, true, OP_COMPLETE, "borrow complete: ok acknowledge"},
    {OP_RUNNING, OP_EVENT_FAILED, false, OP_COMPLETE, "give_up complete: why"},
    {OP_RUNNING, OP_EVENT_BROKEN, false, OP_RETRYING, ""},
    {OP_RUNNING, OP_EVENT_REROUTED, false, OP_RUNNING, "fetch_on_link"},
    {OP_RUNNING, OP_EVENT_CANCEL, false, OP_CANCELLING, ""},
    {OP_RUNNING, OP_EVENT_FENCED, false, OP_FENCED, ""},
    {OP_RUNNING, OP_EVENT_APART, true, OP_COMPLETE, "borrow complete: ok acknowledge"},
    {OP_RUNNING, OP_EVENT_TAKEN, true, OP_RUNNING, "receive"},
    {OP_FENCED, OP_EVENT_FAILED, false, OP_COMPLETE, "give_up complete: why"},
    {OP_FENCED, OP_EVENT_REACHED, false, OP_RUNNING, "fetch"},
    {OP_DELIVERING, OP_EVENT_ARRIVED, true, OP_COMPLETE, "complete: ok"},
    {OP_DELIVERING, OP_EVENT_FAILED, true, OP_COMPLETE, "give_up complete: why"},
    {OP_DELIVERING, OP_EVENT_TAKEN, true, OP_RUNNING, "receive"},
    {OP_DELIVERING, OP_EVENT_CANCEL, true, OP_CANCELLING, ""},
    {OP_RETRYING, OP_EVENT_FAILED, false, OP_COMPLETE, "give_up complete: why"},
    {OP_RETRYING, OP_EVENT_RETRY, false, OP_RUNNING, "fetch"},
    {OP_CANCELLING, OP_EVENT_REFUSED, true, OP_COMPLETE, "give_up complete: first"},
    {OP_CANCELLING, OP_EVENT_ARRIVED, false, OP_COMPLETE, "complete: ok"},
    {OP_CANCELLING, OP_EVENT_OFFERED, true, OP_COMPLETE, "complete: first release"},
    {OP_CANCELLING, OP_EVENT_FAILED, false, OP_COMPLETE, "give_up complete: first"},
    {OP_CANCELLING, OP_EVENT_BROKEN, false, OP_COMPLETE, "give_up complete: first"},
    {OP_CANCELLING, OP_EVENT_REROUTED, false, OP_COMPLETE, "give_up complete: first"},
};

START_TEST(each_receive_edge)
{
    const struct receive_edge *edge = &receive_edges[_i];
    const struct tl_error first = {.code = TL_CANCELLED, .message = "first"};
    struct tl_op sender = {.send.base = tensor};
    is_self = edge->is_self;
    create_receive();
    if (op->receive.rare == NULL) op->receive.rare = calloc(1, sizeof(*op->receive.rare));
    register_op();
    op->state = (uint8_t)edge->from;
    if (edge->from == OP_RETRYING) op->receive.retry_timer = (struct tl_timer){.fire = retry};
    if (edge->from == OP_CANCELLING) op_set_error(op, &first);
    op->receive.rare->offer = (struct tl_offer){.tensor = tl_tensor_get(tensor), .is_one_shot = true};
    reserved = &sender.send.sender;
    if (edge->event == OP_EVENT_FENCED) {
        setup_cuda();
        op->tensor = bytes_on(gpu0, 4);
    }
    tl_op_handle(op, edge->event, &why);
    ck_assert_int_eq(op->state, edge->to);
    check_calls(edge->calls);
    if (edge->to == OP_RETRYING) ck_assert_uint_ne(op->receive.retry_timer.heap_place, 0);
    if (edge->to == OP_CANCELLING) ck_assert_str_eq(op->error->message, "why");
}
END_TEST

START_TEST(no_other_edge)
{
    bool is_send[OP_STATES][OP_EVENTS] = {{false}}, is_receive[OP_STATES][OP_EVENTS] = {{false}};
    for (size_t i = 0; i < TL_ARRAY_COUNT(send_edges); i++)
        is_send[send_edges[i].from][send_edges[i].event] = true;
    for (size_t i = 0; i < TL_ARRAY_COUNT(receive_edges); i++)
        is_receive[receive_edges[i].from][receive_edges[i].event] = true;
    for (unsigned from = 0; from < OP_STATES; from++) {
        for (unsigned event = 0; event < OP_EVENTS; event++) {
            ck_assert_int_eq(op_send_transitions[from][event].next != OP_NEVER, is_send[from][event]);
            ck_assert_int_eq(op_receive_transitions[from][event].next != OP_NEVER, is_receive[from][event]);
        }
    }
}
END_TEST

START_TEST(forbidden_edge)
{
    if (_i == 0) {
        create_send();
    } else {
        create_receive();
    }
    tl_op_handle(op, OP_EVENT_ARRIVED, NULL);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ sends -- */

START_TEST(sent)
{
    create_send();
    start_op();
    check_calls("send");
    worker.executor.is_only = _i == 0; /* else the value leaves the table on another thread */
    op->send.sender.over(&op->send.sender, &(struct tl_error){.code = TL_OK});
    if (!worker.executor.is_only) {
        ck_assert_int_eq(op->state, OP_RUNNING);
        posted->run(posted);
    }
    ck_assert_int_eq(op->state, OP_LINGERING);
    ck_assert(!tl_op_send_end(op, &why));
    check_calls("");
    tl_tensor_put(value);
    posted->run(posted);
    check_calls("complete: ok");
}
END_TEST

/* The value leaves the table and its memory is free on another thread: one closure tells both. 1: the loop has heard of
 * the first when the second comes. */
START_TEST(one_post_for_a_send_that_is_over)
{
    create_send();
    start_op();
    worker.executor.is_only = false;
    size_t before = all_closure_count;
    op->send.sender.over(&op->send.sender, &(struct tl_error){.code = TL_OK});
    if (_i == 1) posted->run(posted);
    tl_tensor_put(value);
    ck_assert_uint_eq(all_closure_count, before + 1 + (size_t)_i);
    ck_assert_int_ne(op->state, OP_COMPLETE);
    check_calls("send");
    posted->run(posted);
    check_calls("complete: ok");
}
END_TEST

START_TEST(send_that_ends)
{
    create_send();
    start_op();
    ck_assert(!tl_op_send_end(op, &why));
    check_calls("send unsend");
    can_take_back = true;
    fake_clock_advance(TL_NS_PER_SEC);
    tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0});
    check_calls("unsend");
    tl_tensor_put(value);
    posted->run(posted);
    check_calls("complete: key of step 1 was not received within 1.00 s");
}
END_TEST

START_TEST(send_that_fails)
{
    create_send();
    send_status = TL_ALREADY_EXISTS;
    worker.closing.is_closing = _i == 1;
    start_op();
    check_calls(_i == 1 ? "" : "send");
    posted->run(posted);
    check_calls(_i == 1 ? "complete: the worker was closed" : "complete: full");
}
END_TEST

START_TEST(send_that_is_lent)
{
    create_send();
    start_op();
    op->send.borrow = (struct tl_borrow *)&the_borrow;
    op->send.sender.over(&op->send.sender, &(struct tl_error){.code = TL_OK});
    tl_tensor_put(value);
    posted->run(posted);
    check_calls("send");
    tl_ops_forget_borrows(&worker);
    check_calls("complete: ok");
}
END_TEST

/* --------------------------------------------------------------------------------------------------- receives -- */

static void fetch_ends(enum tl_status code, const char *message)
{
    struct tl_error result = {.code = code};
    snprintf(result.message, sizeof(result.message), "%s", message);
    op->receive.request.fetch.ops->done(&op->receive.request.fetch, &result);
}

START_TEST(fetched_after_retries)
{
    create_receive();
    start_op();
    for (unsigned i = 0; i < 3; i++) {
        fetch_ends(TL_UNAVAILABLE, "broken");
        ck_assert_int_eq(op->state, OP_RETRYING);
        fake_clock_advance(TL_RECEIVE_FIRST_BACK_OFF_NS << i);
        tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0});
    }
    check_calls("fetch fetch fetch fetch");
    op->receive.request.fetch.is_rerouted = true;
    fetch_ends(TL_UNAVAILABLE, "no place");
    check_calls("fetch_on_link");
    op->receive.request.fetch.destination = tl_tensor_get(tensor);
    fetch_ends(TL_OK, "");
    check_calls("complete: ok");
    ck_assert(op->has_arrived);
    tl_tensor_put(op->tensor);
}
END_TEST

START_TEST(receive_that_fails)
{
    create_receive();
    step_status = _i == 0 ? TL_ABORTED : TL_OK;
    start_op();
    op->receive.request.fetch.is_final = _i == 1;
    if (_i == 2) {
        worker.closing.is_closing = true;
        tl_error_set(&worker.closing.reason, TL_CANCELLED, "the worker was closed");
    }
    if (_i > 0) fetch_ends(TL_UNAVAILABLE, "gone");
    check_calls(_i == 0   ? "give_up complete: aborted"
                : _i == 1 ? "fetch give_up complete: gone"
                          : "fetch give_up complete: the worker was closed");
}
END_TEST

/* Ends at once, or when the transport has let go of the memory; what has arrived all the same is delivered. */
START_TEST(receive_that_ends)
{
    is_self = _i == 1;
    create_receive();
    can_cancel = _i < 2;
    start_op();
    calls[0] = '\0';
    if (_i == 2) fetch_ends(TL_UNAVAILABLE, "broken");
    ck_assert(tl_op_receive_end(op, &why));
    if (_i < 3) {
        check_calls("give_up complete: why");
        return;
    }
    ck_assert_int_eq(op->state, OP_CANCELLING);
    ck_assert(!tl_op_receive_end(op, &why));
    check_calls("");
    op->receive.request.fetch.destination = tl_tensor_get(tensor);
    fetch_ends(_i == 3 ? TL_OK : TL_RESOURCE_EXHAUSTED, "no memory");
    check_calls(_i == 3 ? "complete: ok" : "give_up complete: why; no memory");
}
END_TEST

START_TEST(received_from_itself)
{
    struct tl_offer offer = {.tensor = tl_tensor_get(tensor), .is_one_shot = true, .step = 1};
    is_self = true;
    create_receive();
    worker.executor.is_only = false;
    start_op();
    check_calls("receive");
    /* The value is taken back before the receive looks at it. */
    op->receive.rare->receiver.deliver(&op->receive.rare->receiver, &(struct tl_error){.code = TL_OK}, &offer);
    posted->run(posted);
    check_calls("receive");
    offer.is_one_shot = false;
    offer.tensor = tl_tensor_get(tensor);
    op->receive.rare->receiver.deliver(&op->receive.rare->receiver, &(struct tl_error){.code = TL_OK}, &offer);
    posted->run(posted);
    check_calls("complete: ok acknowledge");
    ck_assert_int_eq(op->receive.request.fetch.path, TL_PATH_SELF);
}
END_TEST

START_TEST(refused_by_itself)
{
    is_self = true;
    create_receive();
    start_op();
    op->receive.rare->receiver.deliver(&op->receive.rare->receiver, &why, NULL);
    check_calls("receive give_up complete: why");
}
END_TEST

/* The end of a step looks at its own receives, however many others there are. */
START_TEST(step_that_ends)
{
    struct tl_op *others[20], *first;
    const uint64_t ended = 7;
    can_cancel = true;
    for (size_t i = 0; i < TL_ARRAY_COUNT(others); i++) {
        create_receive();
        op->receive.request.fetch.step = 100 + i;
        start_op();
        others[i] = op;
    }
    create_receive();
    op->receive.request.fetch.step = ended;
    start_op();
    first = op;
    calls[0] = '\0';
    ck_assert(tl_ops_fail_step(&worker, ended + 1, false, &why));
    ck_assert_uint_eq(worker.operations.step_visits, 0);
    ck_assert(tl_ops_fail_step(&worker, ended, false, &why));
    check_calls("give_up complete: why");
    ck_assert_uint_eq(worker.operations.step_visits, 1);
    free_op(first);
    for (size_t i = 0; i < TL_ARRAY_COUNT(others); i++) {
        op = others[i];
        ck_assert_int_eq(op->state, OP_RUNNING);
        ck_assert(tl_op_receive_end(op, &why));
        free_op(op);
    }
    ck_assert_ptr_null(worker.operations.steps);
}
END_TEST

/* What a receive costs while it waits: a member of a group, and a single one with what its call holds. The engine needs
 * some two hundred bytes more. */
START_TEST(bounded_size)
{
    ck_assert_uint_le(sizeof(struct tl_fetch), 128);
    ck_assert_uint_le(sizeof(struct tl_peer_request), 176);
    ck_assert_uint_le(sizeof(struct tl_op), 232);
    ck_assert_uint_le(sizeof(struct op_single), 312);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("operation");
    TCase *post_case = tcase_create("one_post_for_a_send_that_is_over"); /* tests/defects runs it alone */
    TCase *tcase = tcase_create("operation");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_checked_fixture(post_case, setup, NULL);
    tcase_add_loop_test(tcase, each_send_edge, 0, TL_ARRAY_COUNT(send_edges));
    tcase_add_loop_test(tcase, each_receive_edge, 0, TL_ARRAY_COUNT(receive_edges));
    tcase_add_test(tcase, no_other_edge);
    tcase_add_loop_test_raise_signal(tcase, forbidden_edge, SIGABRT, 0, 2);
    tcase_add_loop_test(tcase, sent, 0, 2);
    tcase_add_test(tcase, send_that_ends);
    tcase_add_loop_test(post_case, one_post_for_a_send_that_is_over, 0, 2);
    tcase_add_loop_test(tcase, send_that_fails, 0, 2);
    tcase_add_test(tcase, send_that_is_lent);
    tcase_add_test(tcase, fetched_after_retries);
    tcase_add_loop_test(tcase, receive_that_fails, 0, 3);
    tcase_add_loop_test(tcase, receive_that_ends, 0, 5);
    tcase_add_test(tcase, received_from_itself);
    tcase_add_test(tcase, refused_by_itself);
    tcase_add_test(tcase, step_that_ends);
    tcase_add_test(tcase, bounded_size);
    suite_add_tcase(suite, tcase);
    suite_add_tcase(suite, post_case);
    return run_suite(suite);
}
