// SPDX-License-Identifier: Apache-2.0
/*
 * The order of a subscription's completions: that in which the owner gave the values, also when a later one overtakes
 * an earlier one on its way, as values inside of messages overtake written ones. Peers, the queue and the loop are
 * fakes: a test says in which order requests were asked, and what arrives when.
 */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "fakes/fake_clock.h"

#undef fail /* check.h has a macro of this name */
#include "server/transfers/subscription.c"
#include "server/transfers/subscription_requests.c"
#include "server/transfers/subscription_values.c"
#include "fakes/calls.h"
#include "fakes/run_suite.h"

#define COUNT 4

static struct tl_worker worker;
static struct tl_timers timers;
static struct tl_quota quota; /* the loop has it */
static struct tl_closure *posted;
static struct tl_subscription *subscription;
static struct tl_tensor *tensor;
static tl_op_id subscription_id;
static int the_peer, the_borrow; /* stand for a peer and a borrow */

/* ------------------------------------------------------------------------------------------------------- fakes -- */

struct tl_timers *tl_loop_timers(struct tl_loop *loop)
{
    (void)loop;
    return &timers;
}

struct tl_quota *tl_loop_quota(struct tl_loop *loop)
{
    (void)loop;
    return &quota;
}

void tl_loop_defer(struct tl_loop *loop, struct tl_closure *closure)
{
    (void)loop;
    posted = closure;
}

void tl_progress_post(struct tl_progress_engine *progress, struct tl_closure *closure)
{
    (void)progress;
    posted = closure;
}

enum tl_status tl_cq_attach(struct tl_cq *cq, struct tl_progress_engine *progress, struct tl_error *ret_error)
{
    (void)cq, (void)progress, (void)ret_error;
    return TL_OK;
}

/* Notes the step of a completion; with an error and without a step its code. */
void tl_cq_push(struct tl_cq *cq, struct tl_cq_item *item, const struct tl_progress_engine *progress)
{
    (void)cq, (void)progress;
    struct tl_completion completion;
    char text[32];
    item->take(item, &completion);
    ck_assert_uint_eq(completion.op, subscription_id);
    if (completion.step != 0) {
        snprintf(text, sizeof(text), "%s%u",
                 completion.status.code == TL_OK ? "" : "failed:", (unsigned)completion.step);
    } else {
        snprintf(text, sizeof(text), "end:%d", (int)completion.status.code);
    }
    note(text);
    tl_tensor_put(completion.tensor);
}

enum tl_status op_check_key(const char *key, struct tl_error *ret_error)
{
    (void)key, (void)ret_error;
    return TL_OK;
}

struct tl_peer *tl_peer_acquire(struct tl_worker *of, tl_peer_id id)
{
    (void)of, (void)id;
    return (struct tl_peer *)&the_peer;
}

void tl_peer_retain(struct tl_peer *peer)
{
    (void)peer;
}

void tl_peer_release(struct tl_peer *peer)
{
    (void)peer;
}

bool tl_peer_is_self(const struct tl_peer *peer)
{
    (void)peer;
    return false;
}

const char *tl_peer_name(const struct tl_peer *peer)
{
    (void)peer;
    return "/job:ps/task:0";
}

void tl_peer_fetch(struct tl_peer *peer, struct tl_peer_request *request)
{
    (void)peer, (void)request;
}

void tl_peer_fetch_on_link(struct tl_peer *peer, struct tl_peer_request *request, const char *reason)
{
    (void)peer, (void)request, (void)reason;
}

bool tl_peer_cancel(struct tl_peer_request *request)
{
    (void)request;
    return true;
}

void tl_session_fetch_done(struct tl_fetch *fetch, const struct tl_error *result)
{
    (void)fetch, (void)result;
}

void tl_peer_fetch_done(struct tl_peer_request *request)
{
    (void)request;
}

void tl_peer_give_up(struct tl_peer_request *request)
{
    (void)request;
}

void tl_rendezvous_receive(struct tl_rendezvous *table, struct tl_receiver *receiver)
{
    (void)table, (void)receiver;
}

bool tl_rendezvous_cancel(struct tl_rendezvous *table, struct tl_receiver *receiver)
{
    (void)table, (void)receiver;
    return true;
}

void tl_rendezvous_unsubscribe(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    (void)table, (void)id;
}

void tl_rendezvous_acknowledge(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    (void)table, (void)id;
}

void tl_rendezvous_release(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    (void)table, (void)id;
}

enum tl_status tl_rendezvous_check_step(struct tl_rendezvous *table, uint64_t step, struct tl_error *ret_error)
{
    (void)table, (void)step, (void)ret_error;
    return TL_OK;
}

/* What is lent stays the program's. */
enum tl_status tl_borrow_create(struct tl_worker *of, struct tl_tensor *base, void (*returned_)(void *context),
                                void *context, struct tl_borrow **ret_borrow, struct tl_tensor **ret_tensor,
                                struct tl_error *ret_error)
{
    (void)of, (void)returned_, (void)context, (void)ret_error;
    *ret_borrow = (struct tl_borrow *)&the_borrow;
    *ret_tensor = tl_tensor_get(base);
    return TL_OK;
}

bool tl_borrow_forget(struct tl_borrow *borrow)
{
    (void)borrow;
    return true;
}

/* ----------------------------------------------------------------------------------------------------- fixture -- */

static struct tl_fetch *fetch_of(size_t slot)
{
    return &subscription->slots[slot].request.fetch;
}

/* Subscribes with COUNT buffers, which are asked for in the order of their slots. */
static void setup(void)
{
    const uint64_t dims[] = {4};
    const struct tl_subscribe_options options = {.size_bytes = sizeof(options), .count = COUNT};
    struct tl_error error;
    tl_timers_init(&timers);
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, dims, &tensor, &error), TL_OK);
    ck_assert_int_eq(tl_subscribe(&worker, 1, "w", &options, (struct tl_cq *)&worker, NULL, &subscription_id, &error),
                     TL_OK);
    subscription = TL_CONTAINER_OF(posted, struct tl_subscription, round_closure);
    posted->run(posted);
    for (size_t i = 0; i < COUNT; i++)
        ck_assert_int_eq(subscription->slots[i].state, SLOT_ASKED);
}

static void teardown(void)
{
    ck_assert(tl_subscription_cancel(&worker, subscription_id));
    check_calls("end:1"); /* TL_CANCELLED */
    ck_assert_uint_eq(worker.operations.open_ops, 0);
    tl_tensor_put(tensor);
    tl_timers_fini(&timers);
}

/* A data connection has asked for all slots, with numbers that begin with this one. */
static void asked_on_a_data_connection(uint32_t first)
{
    for (size_t i = 0; i < COUNT; i++) {
        uint32_t number = first + (uint32_t)i;
        if (first + (uint32_t)i < first) number++; /* 0 is left out */
        tl_fetch_asked(fetch_of(i), number);
    }
}

/* The value of this step, which the owner gave for the slot, is here. */
static void arrive(size_t slot, uint64_t step)
{
    struct tl_fetch *fetch = fetch_of(slot);
    fetch->destination = tl_tensor_get(tensor);
    fetch->offer_step = step;
    fetch->ops->done(fetch, &(struct tl_error){.code = TL_OK});
}

static void fails(size_t slot, uint64_t step, enum tl_status code)
{
    struct tl_fetch *fetch = fetch_of(slot);
    fetch->offer_step = step;
    fetch->ops->done(fetch, &(struct tl_error){.code = code, .message = "it failed"});
}

/* ------------------------------------------------------------------------------------------------------- tests -- */

/* The first value is written and three come inside of messages, the last one first. What the receiver knows of the
 * written one at that time is only that its request was asked before. The numbers of requests may wrap. */
START_TEST(inline_values_overtake_a_written_one)
{
    static const uint32_t firsts[] = {1, UINT32_MAX - 1};
    asked_on_a_data_connection(firsts[_i]);
    arrive(3, 4);
    arrive(2, 3);
    check_calls("");
    arrive(1, 2);
    check_calls("");
    arrive(0, 1);
    check_calls("1 2 3 4");
}
END_TEST

/* What is in order waits for nothing. */
START_TEST(in_order)
{
    asked_on_a_data_connection(1);
    for (uint64_t i = 0; i < COUNT; i++)
        arrive(i, i + 1);
    check_calls("1 2 3 4");
}
END_TEST

/* Over a link, a request whose meta-data is not there may have no value at all. */
START_TEST(only_what_has_begun_is_awaited_on_a_link)
{
    arrive(1, 2);
    check_calls("2");
    tl_fetch_begun(fetch_of(0));
    arrive(2, 3);
    check_calls("");
    arrive(0, 1);
    check_calls("1 3");
}
END_TEST

/* The value that is awaited cannot be received: its completion with the error has its place in the order. */
START_TEST(failures_have_their_place)
{
    asked_on_a_data_connection(1);
    arrive(1, 2);
    fails(2, 3, TL_DATA_LOSS);
    check_calls("");
    fails(0, 1, TL_FAILED_PRECONDITION);
    check_calls("failed:1 2 failed:3");
}
END_TEST

/* A connection that breaks holds nothing up: what was asked on it may have no value. */
START_TEST(broken_connections_hold_nothing_up)
{
    asked_on_a_data_connection(1);
    arrive(2, 3);
    check_calls("");
    fails(0, 0, TL_UNAVAILABLE);
    check_calls("");
    fails(1, 0, TL_UNAVAILABLE);
    check_calls("3");
    /* Both are asked again: the owner may have given the second one its value long before the first. */
    fake_clock_advance(TL_RECEIVE_MAX_BACK_OFF_NS);
    ck_assert_uint_gt(tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0}), 0);
    ck_assert_int_eq(subscription->slots[0].state, SLOT_ASKED);
    ck_assert_int_eq(subscription->slots[1].state, SLOT_ASKED);
    tl_fetch_asked(fetch_of(0), 11);
    tl_fetch_asked(fetch_of(1), 12);
    arrive(1, 2);
    check_calls("2");
    arrive(0, 1);
    check_calls("1");
}
END_TEST

/* Values that were held come before the end. */
START_TEST(the_end_comes_last)
{
    asked_on_a_data_connection(1);
    arrive(1, 2);
    arrive(2, 3);
    check_calls("");
    ck_assert(tl_subscription_cancel(&worker, subscription_id));
    check_calls("2 3 end:1");
    tl_tensor_put(tensor);
    tl_timers_fini(&timers);
}
END_TEST

/* The end of many requests leaves room for others. */
START_TEST(ends_in_rounds)
{
    tl_quota_use(&quota, TL_QUOTA - 1);
    ck_assert(tl_subscription_cancel(&worker, subscription_id));
    check_calls("");
    ck_assert_uint_eq(subscription->ended_count, 1);
    tl_quota_renew(&quota);
    posted->run(posted);
    check_calls("end:1");
    tl_tensor_put(tensor);
    tl_timers_fini(&timers);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("subscription_order");
    TCase *tcase = tcase_create("inline_values_overtake_a_written_one"); /* tests/defects runs it alone */
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_loop_test(tcase, inline_values_overtake_a_written_one, 0, 2);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("order");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, in_order);
    tcase_add_test(tcase, only_what_has_begun_is_awaited_on_a_link);
    tcase_add_test(tcase, failures_have_their_place);
    tcase_add_test(tcase, broken_connections_hold_nothing_up);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("end");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, the_end_comes_last);
    tcase_add_test(tcase, ends_in_rounds);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
