// SPDX-License-Identifier: Apache-2.0
/* What processes that are gone had in the rendezvous table is offered to others in rounds, while the table is used. The
 * loop is a fake, the table is not. Senders and receivers are static, because the table is closed last. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#undef fail /* check.h has a macro of this name */
#include "server/gone_processes.c"
#include "base/clock.h"
#include "fakes/run_suite.h"

#define MANY 1100 /* More than two rounds offer. */
#define GONE 5
#define OTHER 6
#define GONE_AS_WELL 7

struct sender {
    struct tl_sender base;
    unsigned count;
    enum tl_status code;
};

struct receiver {
    struct tl_receiver base;
    unsigned count;
    enum tl_status code;
};

static struct tl_worker worker;
static struct tl_quota quota; /* the loop has it */
static struct tl_closure *deferred;
static struct tl_tensor *tensor;
static struct sender senders[MANY];
static struct receiver had[MANY];     /* receivers that the process which is gone has: they were given the values */
static struct receiver waiting[MANY]; /* the same: they wait */
static struct receiver next[MANY];    /* receivers that another process has: they want the same values */
static unsigned subscribed_count;     /* how many subscriptions were given the published value */

/* ------------------------------------------------------------------------------------------------------- fakes -- */

struct tl_quota *tl_loop_quota(struct tl_loop *loop)
{
    (void)loop;
    return &quota;
}

void tl_loop_defer(struct tl_loop *loop, struct tl_closure *closure)
{
    (void)loop;
    ck_assert_ptr_null(deferred);
    deferred = closure;
}

/* ----------------------------------------------------------------------------------------------------- helpers -- */

static void on_over(struct tl_sender *base, const struct tl_error *status)
{
    struct sender *sender = (struct sender *)base;
    sender->count++;
    sender->code = status->code;
}

static void on_deliver(struct tl_receiver *base, const struct tl_error *status, const struct tl_offer *offer)
{
    struct receiver *receiver = (struct receiver *)base;
    receiver->count++;
    receiver->code = status->code;
    if (offer != NULL) tl_tensor_put(offer->tensor);
}

static void on_subscribed(struct tl_receiver *base, const struct tl_error *status, const struct tl_offer *offer)
{
    (void)base;
    ck_assert_int_eq(status->code, TL_OK);
    tl_tensor_put(offer->tensor);
    subscribed_count++;
}

static void ask(struct receiver *receiver, uint64_t incarnation, const char *kind, unsigned number)
{
    static uint64_t last_number;
    char key[16];
    snprintf(key, sizeof(key), "%s%u", kind, number);
    *receiver = (struct receiver){
        .base = {.id = {incarnation, ++last_number}, .key = key, .step = 1, .deliver = on_deliver}, .code = TL_UNKNOWN};
    tl_rendezvous_receive(worker.table, &receiver->base);
}

static void offer(struct sender *sender, unsigned number)
{
    char key[16];
    snprintf(key, sizeof(key), "value%u", number);
    *sender = (struct sender){.base.over = on_over};
    ck_assert_int_eq(tl_rendezvous_send(worker.table, key, 1, tensor, &sender->base, NULL), TL_OK);
}

/* Asks as a subscription of the process that is gone. */
static void subscribe(unsigned number)
{
    struct tl_receiver receiver = {.id = {GONE, 100000 + number},
                                   .key = "published",
                                   .step = 1,
                                   .subscription = number + 1,
                                   .deliver = on_subscribed};
    tl_rendezvous_receive(worker.table, &receiver);
    if (receiver.is_waiting) ck_assert(tl_rendezvous_cancel(worker.table, &receiver));
}

static void setup(void)
{
    const struct tl_rendezvous_limits limits = {
        .waiting_receivers = 10 * MANY, .held_bytes = 10 * MANY, .subscription_ns = TL_TIME_NEVER};
    ck_assert_int_eq(tl_rendezvous_create(&limits, &worker.table, NULL), TL_OK);
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, (uint64_t[]){1}, &tensor, NULL), TL_OK);
    tl_gone_processes_init(&worker.sources.gone);
    ck_assert_int_eq(tl_rendezvous_publish(worker.table, "published", 1, tensor, NULL, NULL), TL_OK);
    for (unsigned i = 0; i < MANY; i++) {
        offer(&senders[i], i);
        ask(&had[i], GONE, "value", i);
        ck_assert_int_eq(had[i].code, TL_OK);
        ask(&waiting[i], GONE, "absent", i);
        ask(&next[i], OTHER, "value", i);
        subscribe(i);
    }
    ck_assert_uint_eq(subscribed_count, MANY);
}

static void close_table(void)
{
    tl_rendezvous_close(worker.table, &(struct tl_error){.code = TL_CANCELLED});
}

static void teardown(void)
{
    close_table();
    tl_gone_processes_fini(&worker.sources.gone);
    tl_rendezvous_destroy(worker.table);
    tl_tensor_put(tensor);
}

static unsigned count_of(const struct receiver *receivers)
{
    unsigned count = 0;
    for (unsigned i = 0; i < MANY; i++) {
        ck_assert_uint_le(receivers[i].count, 1);
        count += receivers[i].count;
    }
    return count;
}

/* Runs a round. Returns whether another one follows. */
static bool run_round(void)
{
    struct tl_closure *closure = deferred;
    unsigned ended_before = count_of(waiting), given_before = count_of(next);
    if (closure == NULL) return false;
    deferred = NULL;
    tl_quota_renew(&quota);
    closure->run(closure);
    unsigned ended = count_of(waiting), given = count_of(next);
    ck_assert_uint_le(ended + given - ended_before - given_before, TL_QUOTA);
    if (given > 0) ck_assert_uint_eq(ended, MANY);
    return true;
}

/* Runs rounds until so many receivers of the other process have an answer. */
static void run_until_given(unsigned count)
{
    while (count_of(next) < count)
        ck_assert(run_round());
}

static void acknowledge(const struct receiver *receiver)
{
    tl_rendezvous_acknowledge(worker.table, &receiver->base.id);
}

/* The subscriptions are forgotten: each is given the published value once more. */
static void expect_no_subscriptions(void)
{
    for (unsigned i = 0; i < MANY; i++)
        subscribe(i);
    ck_assert_uint_eq(subscribed_count, 2 * MANY);
}

/* ------------------------------------------------------------------------------------------------------- tests -- */

/* The receivers end first; values are offered in the order in which they were reserved. */
START_TEST(offered_in_rounds)
{
    unsigned rounds = 1;
    tl_process_is_gone(&worker, GONE);
    for (unsigned given = 0; run_round(); rounds++) {
        while (given < MANY && next[given].count == 1)
            given++;
        ck_assert_uint_eq(count_of(next), given);
    }
    ck_assert_uint_eq(rounds, 4 * MANY / TL_QUOTA + 1); /* other receivers, and subscriptions, are looked at as well */
    ck_assert_uint_eq(tl_quota_most(&quota), TL_QUOTA);
    for (unsigned i = 0; i < MANY; i++) {
        ck_assert_uint_eq(waiting[i].count, 1);
        ck_assert_int_eq(waiting[i].code, TL_ABORTED);
        ck_assert_uint_eq(next[i].count, 1);
        ck_assert_int_eq(next[i].code, TL_OK);
        ck_assert_uint_eq(senders[i].count, 0);
        acknowledge(&had[i]); /* has it no more */
        ck_assert_uint_eq(senders[i].count, 0);
        acknowledge(&next[i]);
        ck_assert_uint_eq(senders[i].count, 1);
        ck_assert_int_eq(senders[i].code, TL_OK);
    }
    expect_no_subscriptions();
}
END_TEST

/* Between two rounds values end, are taken back and given to others: also the one that comes next. */
START_TEST(used_meanwhile)
{
    tl_process_is_gone(&worker, GONE);
    run_until_given(1);
    unsigned given = count_of(next);
    ck_assert_uint_lt(given + 3, MANY);
    acknowledge(&had[given]);
    ck_assert_uint_eq(senders[given].count, 1);
    ck_assert(tl_rendezvous_unsend(worker.table, &senders[given + 1].base));
    tl_rendezvous_release(worker.table, &had[given + 2].base.id);
    ck_assert_uint_eq(next[given + 2].count, 1);
    acknowledge(&had[MANY - 1]);
    tl_rendezvous_receiver_lost(worker.table, &had[MANY - 2].base.id, 0);
    tl_rendezvous_unsubscribe(worker.table, &(struct tl_request_id){GONE, 1});
    while (run_round())
        continue;
    for (unsigned i = 0; i < MANY; i++) {
        bool is_over = i == given || i == given + 1 || i == MANY - 1;
        ck_assert_uint_eq(waiting[i].count, 1);
        ck_assert_uint_eq(next[i].count, is_over ? 0 : 1);
        ck_assert_uint_eq(senders[i].count, i == given || i == MANY - 1 ? 1 : 0);
    }
    ck_assert_int_eq(tl_rendezvous_expire(worker.table, TL_TIME_NEVER - 1, &quota), TL_TIME_NEVER);
    expect_no_subscriptions();
}
END_TEST

/* Processes that are gone meanwhile have their turn when the former ones are over. */
START_TEST(one_after_the_other)
{
    static struct receiver receivers[2];
    ask(&receivers[0], GONE_AS_WELL, "absent", 0);
    ask(&receivers[1], GONE_AS_WELL, "absent", 1);
    tl_process_is_gone(&worker, GONE);
    tl_process_is_gone(&worker, GONE_AS_WELL);
    tl_process_is_gone(&worker, OTHER);
    run_until_given(MANY);
    ck_assert_uint_eq(receivers[0].count + receivers[1].count, 0);
    while (run_round())
        continue;
    ck_assert_int_eq(receivers[0].code, TL_ABORTED);
    ck_assert_int_eq(receivers[1].code, TL_ABORTED);
    /* Nothing is reserved any more. */
    for (unsigned i = 0; i < MANY; i++) {
        ask(&had[i], GONE_AS_WELL, "value", i);
        ck_assert_int_eq(had[i].code, TL_OK);
        ck_assert_uint_eq(had[i].count, 1);
    }
}
END_TEST

/* The table is closed: while the receivers end, values are offered, or subscriptions are forgotten. */
START_TEST(closed_meanwhile)
{
    tl_process_is_gone(&worker, GONE);
    if (_i > 0) run_until_given(_i == 1 ? 1 : MANY);
    ck_assert_ptr_nonnull(deferred);
    close_table();
    ck_assert(run_round());
    ck_assert_ptr_null(deferred);
    ck_assert_uint_eq(worker.sources.gone.incarnations.count, 0);
    for (unsigned i = 0; i < MANY; i++) {
        ck_assert_uint_eq(senders[i].count, 1);
        ck_assert_int_eq(senders[i].code, TL_CANCELLED);
        ck_assert_uint_eq(waiting[i].count, 1);
        ck_assert_uint_eq(next[i].count, 1);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("gone_processes");
    TCase *tcase = tcase_create("offered_in_rounds"); /* tests/defects runs it alone */
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, offered_in_rounds);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("used_meanwhile"); /* this one as well */
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, used_meanwhile);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("meanwhile");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, one_after_the_other);
    tcase_add_loop_test(tcase, closed_meanwhile, 0, 3);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
