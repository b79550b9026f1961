// SPDX-License-Identifier: Apache-2.0
/*
 * The order of a subscription's completions: that in which the owner gave the values, also when a later one overtakes
 * an earlier one on its way, as values inside of messages overtake written ones. With many buffers, how many of them
 * are handled before others have their turn, and how many are looked at for that. Peers, the queue and the loop are
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
#define MANY 1100 /* More than two rounds handle. */

static struct tl_worker worker;
static struct tl_timers timers;
static struct tl_quota quota; /* the loop has it */
static struct tl_closure *posted;
static struct tl_subscription *subscription;
static struct tl_tensor *tensor;
static tl_op_id subscription_id;
static int the_peer, the_borrow; /* stand for a peer and a borrow */
static size_t fetch_count;       /* requests that were given to the peer */
static uint64_t last_number;     /* the number of the latest one */
static bool has_many;            /* there are MANY buffers, and values come in the order of their steps, from 1 on */
static size_t pushed_count;

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
    tl_tensor_put(completion.tensor);
    if (has_many && completion.step != 0) {
        ck_assert_uint_eq(completion.step, ++pushed_count);
        return;
    }
    if (completion.step != 0) {
        snprintf(text, sizeof(text), "%s%u",
                 completion.status.code == TL_OK ? "" : "failed:", (unsigned)completion.step);
    } else {
        snprintf(text, sizeof(text), "end:%d", (int)completion.status.code);
    }
    note(text);
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

const char *tl_peer_copy_name(const struct tl_peer *peer, char ret_name[TL_MAX_NAME_BYTES])
{
    (void)peer;
    snprintf(ret_name, TL_MAX_NAME_BYTES, "/job:ps/task:0");
    return ret_name;
}

const char *tl_peer_name(const struct tl_peer *peer)
{
    (void)peer;
    return "/job:ps/task:0";
}

void tl_peer_fetch(struct tl_peer *peer, struct tl_peer_request *request)
{
    (void)peer;
    ck_assert_uint_gt(request->fetch.number, last_number);
    last_number = request->fetch.number;
    fetch_count++;
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

static void subscribe(size_t count)
{
    const uint64_t dims[] = {4};
    const struct tl_subscribe_options options = {.size_bytes = sizeof(options), .count = count};
    struct tl_error error;
    tl_timers_init(&timers);
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, dims, &tensor, &error), TL_OK);
    ck_assert_int_eq(tl_subscribe(&worker, 1, "w", &options, (struct tl_cq *)&worker, NULL, &subscription_id, &error),
                     TL_OK);
    subscription = TL_CONTAINER_OF(posted, struct tl_subscription, round_closure);
}

/* Runs what was posted or deferred, if there is any; with a new quota. */
static bool run_round(void)
{
    struct tl_closure *closure = posted;
    if (closure == NULL) return false;
    posted = NULL;
    tl_quota_renew(&quota);
    closure->run(closure);
    return true;
}

/* Subscribes with COUNT buffers, which are asked for in the order of their slots. */
static void setup(void)
{
    subscribe(COUNT);
    ck_assert(run_round());
    ck_assert(!run_round());
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

static void setup_many(void)
{
    has_many = true;
    subscribe(MANY);
}

static void teardown_many(void)
{
    ck_assert(tl_subscription_cancel(&worker, subscription_id));
    while (run_round())
        continue;
    check_calls("end:1");
    ck_assert_uint_eq(worker.operations.open_ops, 0);
    ck_assert_uint_eq(tl_quota_most(&quota), TL_QUOTA);
    tl_tensor_put(tensor);
    tl_timers_fini(&timers);
}

/* A data connection has asked for all slots, with numbers that begin with this one. */
static void asked_on_a_data_connection(uint32_t first)
{
    for (size_t i = 0; i < subscription->slot_count; i++) {
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

/* Requests are asked again in the order of their numbers. */
static void retry_timer_fires(void)
{
    fake_clock_advance(TL_RECEIVE_MAX_BACK_OFF_NS);
    last_number = 0;
    tl_quota_renew(&quota);
    ck_assert_uint_gt(tl_timers_fire_due(&timers, tl_clock_now_ns(), &(struct tl_quota){0}), 0);
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

/* The owner has the value and cannot send it now. That is the end of this value only. */
START_TEST(a_value_that_is_unavailable)
{
    asked_on_a_data_connection(1);
    fetch_of(0)->is_final = true;
    fails(0, 1, TL_UNAVAILABLE);
    check_calls("failed:1");
    arrive(1, 2);
    check_calls("2");
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
    retry_timer_fires();
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

/* No request can travel to the peer, now and later. */
START_TEST(ends_without_a_way_to_the_peer)
{
    fetch_of(0)->is_final = true;
    subscription->slots[0].request.carrier = TL_CARRIER_REFUSAL;
    fails(0, 0, TL_UNAVAILABLE);
    check_calls("end:14"); /* TL_UNAVAILABLE */
    tl_tensor_put(tensor);
    tl_timers_fini(&timers);
}
END_TEST

/* The end of many requests leaves room for others. */
START_TEST(ends_in_rounds)
{
    tl_quota_renew(&quota);
    tl_quota_use(&quota, TL_QUOTA - 1);
    ck_assert(tl_subscription_cancel(&worker, subscription_id));
    check_calls("");
    ck_assert_uint_eq(subscription->ended_count, 1);
    ck_assert(run_round());
    check_calls("end:1");
    tl_tensor_put(tensor);
    tl_timers_fini(&timers);
}
END_TEST

/* Runs all rounds, in each of which at most 512 requests are asked. */
static void ask_in_rounds(void)
{
    for (size_t before = fetch_count; run_round(); before = fetch_count)
        ck_assert_uint_le(fetch_count - before, TL_QUOTA);
}

START_TEST(asks_in_rounds)
{
    ask_in_rounds();
    ck_assert_uint_eq(fetch_count, MANY);
    ck_assert_int_eq(subscription->slots[MANY - 1].state, SLOT_ASKED);
}
END_TEST

/* A connection breaks, and all is asked again. Meanwhile a value comes for the request whose turn is next. */
START_TEST(asks_again_in_rounds)
{
    ask_in_rounds();
    for (size_t i = 0; i < MANY; i++)
        fails(i * 7 % MANY, 0, TL_UNAVAILABLE);
    fetch_count = 0;
    retry_timer_fires();
    ck_assert_uint_eq(fetch_count, TL_QUOTA);
    struct slot *next = TL_CONTAINER_OF(subscription->retried, struct slot, link);
    ck_assert_int_eq(next->state, SLOT_BROKEN);
    tl_quota_renew(&quota);
    arrive((size_t)(next - subscription->slots), 1);
    ck_assert_uint_eq(pushed_count, 1);
    ask_in_rounds();
    ck_assert_uint_eq(fetch_count, MANY - 1);
    ck_assert_uint_eq(worker.operations.requests_retried, MANY - 1);
}
END_TEST

/* The value of the i-th place in the order of arrival. */
static size_t arriving(int order, size_t i)
{
    switch (order) {
    case 0: /* in order */
        return i;
    case 1: /* the last one first */
        return MANY - 1 - i;
    case 2: /* the first one last */
        return (i + 1) % MANY;
    case 3: /* those of odd places, as inline ones, and then the others, as written ones */
        return i < MANY / 2 ? 2 * i + 1 : 2 * (i - MANY / 2);
    default: /* mixed */
        return i * 7 % MANY;
    }
}

/* Whatever the order in which values arrive: how many requests are looked at does not grow with the number of buffers,
 * and no more than 512 values are passed on at once. */
START_TEST(order_costs_little)
{
    ask_in_rounds();
    asked_on_a_data_connection(1);
    for (size_t i = 0; i < MANY; i++) {
        size_t slot = arriving(_i, i), before = pushed_count;
        tl_quota_renew(&quota);
        arrive(slot, slot + 1);
        ck_assert_uint_le(pushed_count - before, TL_QUOTA);
    }
    for (size_t before = pushed_count; run_round(); before = pushed_count)
        ck_assert_uint_le(pushed_count - before, TL_QUOTA);
    ck_assert_uint_eq(pushed_count, MANY);
    ck_assert_uint_le(worker.operations.slot_visits, 2 * MANY);
}
END_TEST

static void add_many(Suite *suite, const char *name, const TTest *test, int count)
{
    TCase *tcase = tcase_create(name);
    tcase_add_checked_fixture(tcase, setup_many, teardown_many);
    tcase_add_loop_test(tcase, test, 0, count);
    suite_add_tcase(suite, tcase);
}

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
    tcase_add_test(tcase, a_value_that_is_unavailable);
    tcase_add_test(tcase, broken_connections_hold_nothing_up);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("end");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, the_end_comes_last);
    tcase_add_test(tcase, ends_without_a_way_to_the_peer);
    tcase_add_test(tcase, ends_in_rounds);
    suite_add_tcase(suite, tcase);
    add_many(suite, "asks_in_rounds", asks_in_rounds, 1); /* tests/defects runs each of these alone */
    add_many(suite, "asks_again_in_rounds", asks_again_in_rounds, 1);
    add_many(suite, "order_costs_little", order_costs_little, 5);
    return run_suite(suite);
}
