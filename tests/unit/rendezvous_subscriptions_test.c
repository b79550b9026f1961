// SPDX-License-Identifier: Apache-2.0
/* Subscriptions in the rendezvous table: who gets which value, what is remembered, for how long, and who pays. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "fakes/fake_clock.h"
#include "fakes/run_suite.h"
#include "fakes/whole_steps.h"
#include "server/rendezvous/rendezvous_table.h"

enum { WAITING_LIMIT = 16, ASKER = 77, OTHER = 88, MANY = 4000, MAX_LEVELS = 129 };
#define REMEMBERED_NS (30 * TL_NS_PER_SEC)

static struct tl_rendezvous *table;
static struct tl_tensor *tensor;
static struct tl_share_client client = {.link = 1};

struct sender {
    struct tl_sender base;
    enum tl_status code; /* TL_UNKNOWN: not over */
};

struct receiver {
    struct tl_receiver base;
    int count;
    enum tl_status code;
    uint64_t step;
    uint64_t publication;
};

static struct sender senders[MANY];
static struct receiver receivers[64];
static uint64_t last_number;

static void on_over(struct tl_sender *base, const struct tl_error *status)
{
    ((struct sender *)base)->code = status->code;
}

static void send(uint64_t step)
{
    struct sender *sender = &senders[step];
    *sender = (struct sender){.base.over = on_over, .code = TL_UNKNOWN};
    ck_assert_int_eq(tl_rendezvous_send(table, "key", step, tensor, &sender->base, NULL), TL_OK);
}

static void publish(uint64_t step)
{
    ck_assert_int_eq(tl_rendezvous_publish(table, "key", step, tensor, NULL, NULL), TL_OK);
}

static void on_deliver(struct tl_receiver *base, const struct tl_error *status, const struct tl_offer *offer)
{
    struct receiver *receiver = (struct receiver *)base;
    receiver->count++;
    receiver->code = status->code;
    if (offer == NULL) return;
    receiver->step = offer->step;
    receiver->publication = offer->publication;
    tl_tensor_put(offer->tensor);
}

/* Asks as request `number` of the process. */
static struct receiver *ask_as(uint64_t incarnation, uint64_t number, uint64_t subscription, const char *key,
                               uint64_t step)
{
    struct receiver *receiver = &receivers[number];
    *receiver = (struct receiver){.base = {.id = {incarnation, number},
                                           .key = key,
                                           .step = step,
                                           .subscription = subscription,
                                           .client = &client,
                                           .deliver = on_deliver},
                                  .code = TL_UNKNOWN};
    tl_rendezvous_receive(table, &receiver->base);
    return receiver;
}

static struct receiver *ask(uint64_t subscription, uint64_t step)
{
    return ask_as(ASKER, ++last_number, subscription, "key", step);
}

static void check_given(const struct receiver *receiver, uint64_t step)
{
    ck_assert_int_eq(receiver->count, 1);
    ck_assert_int_eq(receiver->code, TL_OK);
    ck_assert_uint_eq(receiver->step, step);
}

static void check_waits(const struct receiver *receiver)
{
    ck_assert_int_eq(receiver->count, 0);
}

static void acknowledge(const struct receiver *receiver)
{
    tl_rendezvous_acknowledge(table, &receiver->base.id);
}

static void setup(void)
{
    const struct tl_rendezvous_limits limits = {.waiting_receivers = WAITING_LIMIT,
                                                .held_bytes = 4 * MANY,
                                                .subscription_ns = REMEMBERED_NS,
                                                .aborted_steps = 2};
    const uint64_t dims[] = {4};
    last_number = 0;
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, dims, &tensor, NULL), TL_OK);
    ck_assert_int_eq(tl_rendezvous_create(&limits, &table, NULL), TL_OK);
}

static void teardown(void)
{
    const struct tl_error closed = {.code = TL_CANCELLED};
    tl_rendezvous_close(table, &closed);
    tl_rendezvous_destroy(table);
    tl_tensor_put(tensor);
}

/* --------------------------------------------------------------------------------------------------------- sent -- */

START_TEST(sent_in_the_order_of_steps)
{
    send(5);
    send(3);
    send(9);
    send(4);
    check_given(ask(1, 4), 4);
    check_given(ask(1, 4), 5);
    check_given(ask(1, 4), 9);
    struct receiver *first = ask(1, 4), *second = ask(1, 4);
    send(2);
    check_waits(first);
    send(10);
    check_given(first, 10);
    check_waits(second);
    send(8); /* it was sent late, and is wanted all the same */
    check_given(second, 8);
    acknowledge(second);
    ck_assert_int_eq(senders[8].code, TL_OK);
    ck_assert_int_eq(senders[3].code, TL_UNKNOWN);
}
END_TEST

START_TEST(exact_receivers_come_first)
{
    struct receiver *subscribed = ask(1, 0), *exact = ask_as(OTHER, ++last_number, 0, "key", 1);
    send(1);
    check_given(exact, 1);
    check_waits(subscribed);
    send(2);
    check_given(subscribed, 2);
}
END_TEST

START_TEST(subscriptions_alternate)
{
    struct receiver *a[] = {ask(1, 0), ask(1, 0), ask(1, 0)};
    struct receiver *b[2];
    for (unsigned i = 0; i < 2; i++)
        b[i] = ask_as(OTHER, ++last_number, 1, "key", 0);
    for (uint64_t step = 1; step <= 5; step++)
        send(step);
    check_given(a[0], 1);
    check_given(b[0], 2);
    check_given(a[1], 3);
    check_given(b[1], 4);
    check_given(a[2], 5);
}
END_TEST

/* What was refused goes to others, and does not come back. */
START_TEST(refused)
{
    struct receiver *a[] = {ask(1, 0), ask(1, 0), ask(1, 0)};
    send(1);
    check_given(a[0], 1);
    tl_rendezvous_release(table, &a[0]->base.id);
    check_waits(a[1]);
    struct receiver *b = ask(2, 0);
    check_given(b, 1);
    tl_rendezvous_give_up(table, &b->base.id);
    check_waits(a[1]);
    check_waits(ask(2, 0));
    send(2);
    check_given(a[1], 2);
    check_given(ask_as(OTHER, ++last_number, 0, "key", 1), 1);
}
END_TEST

/* A value that was given up, for lack of memory for instance, keeps no other value from coming: earlier steps that are
 * sent later, too, and those between values that were given up. */
START_TEST(earlier_steps_after_a_refusal)
{
    struct receiver *a = ask(1, 2), *b = ask(1, 2);
    send(9);
    check_given(a, 9);
    tl_rendezvous_release(table, &a->base.id);
    check_waits(b);
    send(1); /* it is not wanted */
    check_waits(b);
    send(3);
    check_given(b, 3);
    struct receiver *c = ask(2, 5);
    check_given(c, 9);
    tl_rendezvous_release(table, &c->base.id);
    send(6);
    send(12);
    send(4);
    check_given(ask(1, 2), 4);
    struct receiver *d = ask(1, 2);
    check_given(d, 6);
    tl_rendezvous_release(table, &d->base.id);
    check_given(ask(1, 2), 12);
    check_waits(ask(1, 2));
    check_given(ask_as(ASKER, c->base.id.number, 2, "key", 5), 9);
    check_given(ask(3, 2), 6);
}
END_TEST

/* A request that asks again over another path gets its value, also when one of an earlier step has come meanwhile,
 * which the next request gets. */
START_TEST(earlier_step_before_asking_again)
{
    struct receiver *a = ask(1, 0);
    send(5);
    tl_rendezvous_release(table, &a->base.id);
    send(3);
    check_given(ask_as(ASKER, a->base.id.number, 1, "key", 0), 5);
    check_given(ask(1, 0), 3);
}
END_TEST

/* There is no step behind the last one. */
START_TEST(refused_of_the_last_step)
{
    struct receiver *a = ask(1, 0), *b = ask(1, 0);
    senders[0].base.over = on_over;
    ck_assert_int_eq(tl_rendezvous_send(table, "key", UINT64_MAX, tensor, &senders[0].base, NULL), TL_OK);
    check_given(a, UINT64_MAX);
    tl_rendezvous_release(table, &a->base.id);
    check_waits(b);
    check_waits(ask(1, 0));
    check_given(ask_as(ASKER, a->base.id.number, 1, "key", 0), UINT64_MAX);
    tl_rendezvous_release(table, &a->base.id);
    check_given(ask(2, 0), UINT64_MAX);
}
END_TEST

/* A request that has given its value back may ask again for the same one, over another path. */
START_TEST(given_back_and_asked_again)
{
    struct receiver *a = ask(1, 1);
    send(0);
    send(1);
    send(2);
    tl_rendezvous_release(table, &a->base.id);
    a = ask_as(ASKER, a->base.id.number, 1, "key", 1);
    check_given(a, 1);
    tl_rendezvous_release(table, &a->base.id);
    check_given(ask_as(OTHER, ++last_number, 0, "key", 1), 1);
    check_given(ask_as(ASKER, a->base.id.number, 1, "key", 1), 2);
}
END_TEST

/* How often the values of the key that are offered were looked at. */
static uint64_t visits(void)
{
    return tl_table_name_find(table, "key")->subscribed->offered.visit_count;
}

/* However many values are there that the request does not want, few are looked at. */
START_TEST(values_that_are_not_wanted)
{
    for (uint64_t step = 0; step < MANY; step++)
        send(step);
    check_waits(ask(1, MANY));
    uint64_t before = visits();
    check_given(ask(2, MANY - 2), MANY - 2);
    check_given(ask(2, MANY - 2), MANY - 1);
    check_given(ask(3, 1), 1);
    check_given(ask(3, MANY / 2), MANY / 2);
    ck_assert_uint_le(visits() - before, 8 * MAX_LEVELS);
}
END_TEST

/* Whether steps grow, fall or come in any order while values are sent, and whether the key has a subscription then: few
 * values are passed to find the place of another one. */
START_TEST(many_values)
{
    const unsigned factors[] = {1, MANY - 1, 1667};
    unsigned factor = factors[_i % 3];
    bool is_subscribed = _i / 3 == 1;
    if (is_subscribed) check_waits(ask(1, MANY));
    for (uint64_t i = 0; i < MANY; i++)
        send(i * factor % MANY);
    if (!is_subscribed) check_waits(ask(1, MANY));
    ck_assert_uint_le(visits(), MANY * MAX_LEVELS);
    for (uint64_t i = 1; i <= 5; i++)
        check_given(ask(2, 1), i);
    check_given(ask(2, MANY - 1), MANY - 1);
}
END_TEST

/* A broken connection: the value is kept for the request, and for the subscription if that does not come back. */
START_TEST(asked_again)
{
    struct receiver *a = ask(1, 0), *other = ask(1, 0);
    send(1);
    check_given(a, 1);
    uint64_t publication = a->publication, number = a->base.id.number;
    tl_rendezvous_receiver_lost(table, &a->base.id, tl_clock_now_ns() + 1);
    check_waits(other);
    a = ask_as(ASKER, number, 1, "key", 0);
    check_given(a, 1);
    ck_assert_uint_eq(a->publication, publication);
    ck_assert_int_eq(ask_as(ASKER, number, 2, "key", 0)->code, TL_INVALID_ARGUMENT);
    ck_assert_int_eq(ask_as(ASKER, number, 0, "key", 1)->code, TL_INVALID_ARGUMENT);
    tl_rendezvous_receiver_lost(table, &a->base.id, tl_clock_now_ns() + 1);
    tl_rendezvous_receiver_lost(table, &a->base.id, tl_clock_now_ns() + 1);
    fake_clock_advance(2);
    ck_assert_int_eq(expire_all(table, tl_clock_now_ns()), TL_TIME_NEVER);
    check_given(other, 1);
}
END_TEST

/* An abort takes the values of its step, and the subscription goes on; so does the end of a step. */
START_TEST(steps)
{
    const struct tl_error why = {.code = TL_DATA_LOSS};
    send(1);
    send(2);
    send(3);
    abort_whole_step(table, 1, &why);
    ck_assert_uint_eq(end_whole_step(table, 2), 1);
    struct receiver *a = ask(1, 0), *b = ask(1, 0);
    check_given(a, 3);
    abort_whole_step(table, 5, &why);
    check_waits(b);
    ck_assert_uint_eq(end_whole_step(table, 3), 0);
    send(4);
    check_given(b, 4);
    acknowledge(a);
    ck_assert_int_eq(senders[3].code, TL_OK);
    abort_whole_step(table, 4, &why);
    ck_assert_int_eq(senders[4].code, TL_DATA_LOSS);
    acknowledge(b);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- published -- */

START_TEST(newest_wins_and_none_twice)
{
    publish(3);
    check_given(ask(1, 2), 3);
    struct receiver *a = ask(1, 2), *b = ask(1, 2), *other = ask(2, 5);
    check_waits(a);
    publish(4);
    check_given(a, 4);
    check_waits(b);
    publish(1); /* older than what is wanted */
    check_waits(b);
    publish(6);
    check_given(b, 6);
    check_given(other, 6);
    publish(7);
    publish(8); /* nothing waited for 7 */
    check_given(ask(1, 2), 8);
    publish(8); /* another value of the same version */
    check_given(ask(1, 2), 8);
    check_waits(ask(1, 2));
}
END_TEST

/* The request that was given the newest value may ask for it again; another one of the subscription has had it. */
START_TEST(published_asked_again)
{
    struct receiver *a = ask(1, 0);
    publish(1);
    check_given(a, 1);
    check_given(ask_as(ASKER, a->base.id.number, 1, "key", 0), 1);
    check_waits(ask(1, 0));
    publish(2);
    check_waits(ask_as(ASKER, a->base.id.number, 1, "key", 0));
}
END_TEST

/* -------------------------------------------------------------------------------------------- what is remembered -- */

START_TEST(given_up)
{
    publish(1);
    check_given(ask(1, 0), 1);
    struct receiver *a = ask(1, 0), *b = ask(1, 0);
    tl_rendezvous_unsubscribe(table, &(struct tl_request_id){ASKER, 1});
    ck_assert(tl_rendezvous_cancel(table, &a->base));
    ck_assert(tl_rendezvous_cancel(table, &b->base));
    check_given(ask(1, 0), 1);
    tl_rendezvous_unsubscribe(table, &(struct tl_request_id){ASKER, 1});
    check_given(ask(1, 0), 1);
    tl_rendezvous_unsubscribe(table, &(struct tl_request_id){ASKER, 2});
}
END_TEST

START_TEST(gone)
{
    publish(1);
    check_given(ask(1, 0), 1);
    struct receiver *a = ask(1, 0), *b = ask(1, 0), *other = ask_as(OTHER, ++last_number, 1, "key", 2);
    send(2);
    check_given(a, 2);
    release_whole_incarnation(table, ASKER);
    ck_assert_int_eq(b->code, TL_ABORTED);
    check_given(other, 2);
    check_given(ask(1, 0), 1);
}
END_TEST

/* Subscriptions that nothing uses count against their client, until others need the place. */
START_TEST(too_many)
{
    uint64_t most = 0;
    publish(1);
    while (most < WAITING_LIMIT && ask(most + 1, 0)->code == TL_OK)
        most++;
    ck_assert_uint_lt(most, WAITING_LIMIT);
    ck_assert_int_eq(receivers[last_number].code, TL_RESOURCE_EXHAUSTED);
    ck_assert_int_eq(ask(1, 0)->code, TL_RESOURCE_EXHAUSTED);
    ck_assert_int_eq(ask_as(ASKER, ++last_number, 0, "other", 0)->code, TL_RESOURCE_EXHAUSTED);
    fake_clock_advance(REMEMBERED_NS - 1);
    ck_assert_int_eq(ask(most + 1, 0)->code, TL_RESOURCE_EXHAUSTED);
    fake_clock_advance(1);
    check_given(ask(most + 1, 0), 1);
    check_waits(ask(most + 1, 0));
}
END_TEST

START_TEST(of_another_key)
{
    check_waits(ask(1, 0));
    ck_assert_int_eq(ask_as(ASKER, ++last_number, 1, "other", 0)->code, TL_INVALID_ARGUMENT);
    check_waits(ask_as(OTHER, ++last_number, 1, "other", 0));
    send(1);
    check_given(&receivers[1], 1);
}
END_TEST

START_TEST(closed)
{
    const struct tl_error why = {.code = TL_CANCELLED};
    struct receiver *a = ask(1, 0), *b = ask(1, 0);
    send(1);
    check_given(a, 1);
    tl_rendezvous_close(table, &why);
    ck_assert_int_eq(b->code, TL_CANCELLED);
    ck_assert_int_eq(senders[1].code, TL_CANCELLED);
    ck_assert_int_eq(ask(1, 0)->code, TL_CANCELLED);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("rendezvous_subscriptions");
    TCase *sent = tcase_create("sent"), *published = tcase_create("published"), *known = tcase_create("remembered");
    TCase *tcases[] = {sent, published, known};
    for (size_t i = 0; i < sizeof(tcases) / sizeof(tcases[0]); i++) {
        tcase_add_checked_fixture(tcases[i], setup, teardown);
        suite_add_tcase(suite, tcases[i]);
    }
    tcase_add_test(sent, sent_in_the_order_of_steps);
    tcase_add_test(sent, exact_receivers_come_first);
    tcase_add_test(sent, subscriptions_alternate);
    tcase_add_test(sent, refused);
    tcase_add_test(sent, earlier_steps_after_a_refusal);
    tcase_add_test(sent, earlier_step_before_asking_again);
    tcase_add_test(sent, refused_of_the_last_step);
    tcase_add_test(sent, given_back_and_asked_again);
    tcase_add_test(sent, values_that_are_not_wanted);
    tcase_add_loop_test(sent, many_values, 0, 6);
    tcase_add_test(sent, asked_again);
    tcase_add_test(sent, steps);
    tcase_add_test(published, newest_wins_and_none_twice);
    tcase_add_test(published, published_asked_again);
    tcase_add_test(known, given_up);
    tcase_add_test(known, gone);
    tcase_add_test(known, too_many);
    tcase_add_test(known, of_another_key);
    tcase_add_test(known, closed);
    return run_suite(suite);
}
