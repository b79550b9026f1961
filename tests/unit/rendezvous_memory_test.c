// SPDX-License-Identifier: Apache-2.0
/*
 * The rendezvous table without memory: every allocation of every operation fails once. The operation says so,
 * everything is as it was before, and the same operation succeeds when there is memory again.
 *
 * The sources of the table are compiled here once more, with allocation functions that fail on demand; the library's
 * own copy is not linked then.
 */
#include <stdlib.h>
#include <string.h>

static long allocations_left = -1; /* How many allocations succeed until one fails; negative: none fails. */
static size_t largest_allocation;  /* Larger allocations fail; 0: no limit. */
static long failed_allocations;
static long tried_allocations;

static int must_fail(size_t size)
{
    tried_allocations++;
    int is_too_large = largest_allocation > 0 && size > largest_allocation;
    if (!is_too_large && (allocations_left < 0 || allocations_left-- > 0)) return 0;
    failed_allocations++;
    return 1;
}

static void *test_malloc(size_t size)
{
    return must_fail(size) ? NULL : malloc(size);
}

static void *test_calloc(size_t count, size_t size)
{
    return must_fail(count * size) ? NULL : calloc(count, size);
}

#define malloc test_malloc
#define calloc test_calloc
#include "base/hash_table.c"
#include "server/rendezvous/rendezvous.c"
#include "server/rendezvous/rendezvous_published.c"
#define no_memory no_memory_for_subscription
#define find find_subscription
#define create create_subscription
#define give_up give_up_subscription
#include "server/rendezvous/rendezvous_subscriptions.c"
#undef no_memory
#undef find
#undef create
#undef give_up
#include "server/rendezvous/rendezvous_table.c"
#undef malloc
#undef calloc

#include <check.h>
#include <stdio.h>

#include "fakes/run_suite.h"
#include "fakes/whole_steps.h"

_Static_assert(sizeof(struct tl_receiver) <= 112 && sizeof(struct tl_table_place) <= 72 &&
                   sizeof(struct tl_table_name) <= 56,
               "a receiver that waits is small");

/* ----------------------------------------------------------------------------------------------------- helpers -- */

static struct tl_rendezvous *table;
static struct tl_tensor *tensor;
static int released_count;

struct outcome {
    int count;
    enum tl_status code;
};

struct sender {
    struct tl_sender base;
    struct outcome outcome;
};

struct receiver {
    struct tl_receiver base;
    struct outcome outcome;
};

static struct sender senders[2];
static struct receiver receivers[2];

static void on_over(struct tl_sender *base, const struct tl_error *status)
{
    struct outcome *outcome = &((struct sender *)base)->outcome;
    outcome->count++;
    outcome->code = status->code;
}

static void on_deliver(struct tl_receiver *base, const struct tl_error *status, const struct tl_offer *offer)
{
    struct outcome *outcome = &((struct receiver *)base)->outcome;
    outcome->count++;
    outcome->code = status->code;
    if (offer) tl_tensor_put(offer->tensor);
}

static void on_release(void *data, void *context)
{
    (void)data, (void)context;
    released_count++;
}

static enum tl_status send(struct sender *sender, const char *key)
{
    *sender = (struct sender){.base.over = on_over};
    return tl_rendezvous_send(table, key, 1, tensor, &sender->base, NULL);
}

static void ask(struct receiver *receiver, uint64_t number, const char *key)
{
    *receiver = (struct receiver){.base = {.id = {1, number}, .key = key, .step = 1, .deliver = on_deliver}};
    tl_rendezvous_receive(table, &receiver->base);
}

static struct tl_rendezvous_stats stats_now(void)
{
    struct tl_rendezvous_stats stats;
    tl_rendezvous_get_stats(table, &stats);
    return stats;
}

static void set_up(void)
{
    static char memory[8];
    const struct tl_rendezvous_limits limits = {1000, 1000, 2, 0};
    const uint64_t dims[1] = {sizeof(memory)};
    const struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                        .dtype = TL_U8,
                                        .rank = 1,
                                        .dims = dims,
                                        .data = memory,
                                        .capacity_bytes = sizeof(memory),
                                        .release = on_release};
    tl_log_configure(TL_LOG_ERROR, TL_LOG_KEY_VALUE);
    released_count = 0;
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, NULL), TL_OK);
    ck_assert_int_eq(tl_rendezvous_create(&limits, &table, NULL), TL_OK);
}

static void tear_down(void)
{
    struct tl_error status;
    tl_error_set(&status, TL_CANCELLED, "the test is over");
    tl_rendezvous_close(table, &status);
    tl_rendezvous_destroy(table);
    tl_tensor_put(tensor);
    ck_assert_int_eq(released_count, 1);
}

/* Lets the n-th allocation fail from here on. */
static void fail_allocation(long n)
{
    allocations_left = n;
    failed_allocations = 0;
}

/* Lets no allocation fail any more; returns whether one has failed. */
static bool end_failing(void)
{
    allocations_left = -1;
    largest_allocation = 0;
    return failed_allocations > 0;
}

static void assert_nothing_is_kept(void)
{
    struct tl_rendezvous_stats stats = stats_now();
    ck_assert_uint_eq(stats.held_tensors + stats.held_bytes + stats.waiting_receivers + stats.published_tensors, 0);
    ck_assert_uint_eq(table->names.count + table->places.count + table->waiters.count, 0);
    ck_assert_ptr_null(table->steps);
    ck_assert_ptr_null(table->reservations);
}

/* ------------------------------------------------------------------------------------------------------- tests -- */

START_TEST(create)
{
    const struct tl_rendezvous_limits limits = {1, 1, 1, 0};
    struct tl_rendezvous *other = NULL;
    struct tl_error error;
    fail_allocation(0);
    ck_assert_int_eq(tl_rendezvous_create(&limits, &other, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_int_eq(error.code, TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_null(other);
    ck_assert(end_failing());
}
END_TEST

START_TEST(send_keeps_nothing)
{
    long n = 0;
    for (;; n++) {
        fail_allocation(n);
        enum tl_status status = send(&senders[0], "key");
        if (!end_failing()) break;
        ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
        ck_assert(!tl_rendezvous_unsend(table, &senders[0].base));
        assert_nothing_is_kept();
    }
    ck_assert_int_ge(n, 4);
    ck_assert(tl_rendezvous_unsend(table, &senders[0].base));
    ck_assert_int_eq(senders[0].outcome.count, 0);
    assert_nothing_is_kept();
}
END_TEST

/* A key with many steps has an index of them, which is made with the first step that is one too many. */
START_TEST(steps_of_a_key)
{
    enum { COUNT = 9 };
    static struct sender many[COUNT];
    unsigned failed_count = 0;
    for (unsigned i = 0; i < COUNT; i++) {
        enum tl_status status = TL_RESOURCE_EXHAUSTED;
        for (long n = 0; status != TL_OK; n++) {
            many[i] = (struct sender){.base.over = on_over};
            fail_allocation(n);
            status = tl_rendezvous_send(table, "key", i, tensor, &many[i].base, NULL);
            if (!end_failing()) break;
            failed_count++;
            ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
            ck_assert_uint_eq(stats_now().held_tensors, i);
        }
        ck_assert_int_eq(status, TL_OK);
        ck_assert((table->places.count > 0) == tl_table_name_find(table, "key")->has_index);
    }
    ck_assert(tl_table_name_find(table, "key")->has_index);
    ck_assert_uint_ge(failed_count, COUNT);
    for (unsigned i = COUNT; i-- > 0;) {
        const struct tl_receiver base = {.id = {1, i}, .key = "key", .step = i, .deliver = on_deliver};
        receivers[0] = (struct receiver){.base = base};
        tl_rendezvous_receive(table, &receivers[0].base);
        ck_assert_int_eq(receivers[0].outcome.code, TL_OK);
        tl_rendezvous_acknowledge(table, &base.id);
        ck_assert_int_eq(many[i].outcome.count, 1);
    }
    assert_nothing_is_kept();
}
END_TEST

START_TEST(wait_keeps_nothing)
{
    long n = 0;
    for (;; n++) {
        fail_allocation(n);
        ask(&receivers[0], 1, "key");
        if (!end_failing()) break;
        ck_assert_int_eq(receivers[0].outcome.count, 1);
        ck_assert_int_eq(receivers[0].outcome.code, TL_RESOURCE_EXHAUSTED);
        ck_assert(!tl_rendezvous_cancel(table, &receivers[0].base));
        assert_nothing_is_kept();
    }
    ck_assert_int_ge(n, 4);
    ck_assert(tl_rendezvous_cancel(table, &receivers[0].base));
    assert_nothing_is_kept();
}
END_TEST

static void ask_subscribed(struct receiver *receiver, uint64_t number)
{
    *receiver = (struct receiver){
        .base = {.id = {1, number}, .key = "key", .step = 1, .subscription = 7, .deliver = on_deliver}};
    tl_rendezvous_receive(table, &receiver->base);
}

START_TEST(subscription_keeps_nothing)
{
    long n = 0;
    for (;; n++) {
        fail_allocation(n);
        ask_subscribed(&receivers[0], 1);
        if (!end_failing()) break;
        ck_assert_int_eq(receivers[0].outcome.count, 1);
        ck_assert_int_eq(receivers[0].outcome.code, TL_RESOURCE_EXHAUSTED);
        (void)tl_table_subscriptions_sweep(table, true); /* it may be remembered */
        ck_assert_uint_eq(table->own_waiting, 0);
        assert_nothing_is_kept();
    }
    ck_assert_int_ge(n, 5);
    /* The index of places is there, and stays. */
    ask(&receivers[1], 2, "key");
    ck_assert(tl_rendezvous_cancel(table, &receivers[1].base));
    /* The value stays when it cannot be reserved, and the subscription gets it with its next request. */
    enum tl_status status = TL_UNKNOWN;
    for (n = 0; status != TL_OK; n++) {
        fail_allocation(n);
        status = send(&senders[0], "key");
        ck_assert(end_failing());
    }
    ck_assert_int_eq(receivers[0].outcome.code, TL_RESOURCE_EXHAUSTED);
    ask_subscribed(&receivers[1], 2);
    ck_assert_int_eq(receivers[1].outcome.code, TL_OK);
    tl_rendezvous_acknowledge(table, &receivers[1].base.id);
    tl_rendezvous_unsubscribe(table, &(struct tl_request_id){1, 7});
    ck_assert_uint_eq(table->own_waiting, 0);
    assert_nothing_is_kept();
}
END_TEST

START_TEST(value_that_cannot_be_reserved_stays)
{
    ck_assert_int_eq(send(&senders[0], "key"), TL_OK);
    fail_allocation(0);
    ask(&receivers[0], 1, "key");
    ck_assert(end_failing());
    ck_assert_int_eq(receivers[0].outcome.count, 1);
    ck_assert_int_eq(receivers[0].outcome.code, TL_RESOURCE_EXHAUSTED);
    ck_assert_uint_eq(stats_now().held_tensors, 1);
    ask(&receivers[0], 1, "key");
    ck_assert_int_eq(receivers[0].outcome.code, TL_OK);
    tl_rendezvous_acknowledge(table, &receivers[0].base.id);
    ck_assert_int_eq(senders[0].outcome.code, TL_OK);
    assert_nothing_is_kept();
}
END_TEST

START_TEST(receiver_for_which_nothing_can_be_reserved_fails)
{
    ask(&receivers[0], 1, "key");
    ask(&receivers[1], 2, "key");
    /* A send allocates the value and an index of reservations; the name, the place and the step are there already. */
    fail_allocation(1);
    ck_assert_int_eq(send(&senders[0], "key"), TL_OK);
    ck_assert(end_failing());
    ck_assert_int_eq(receivers[0].outcome.count, 1);
    ck_assert_int_eq(receivers[0].outcome.code, TL_RESOURCE_EXHAUSTED);
    ck_assert_int_eq(receivers[1].outcome.count, 1);
    ck_assert_int_eq(receivers[1].outcome.code, TL_OK);
    /* The value is given back while the only waiting receiver cannot have it: it stays. */
    ask(&receivers[0], 3, "key");
    fail_allocation(0);
    tl_rendezvous_release(table, &receivers[1].base.id);
    ck_assert(end_failing());
    ck_assert_int_eq(receivers[0].outcome.code, TL_RESOURCE_EXHAUSTED);
    ck_assert_int_eq(senders[0].outcome.count, 0);
    ck_assert_uint_eq(stats_now().held_tensors, 1);
    ck_assert_uint_eq(stats_now().waiting_receivers, 0);
}
END_TEST

START_TEST(publish_keeps_the_old)
{
    uint64_t first = 0, second = 0;
    long n = 0;
    for (;; n++) {
        fail_allocation(n);
        enum tl_status status = tl_rendezvous_publish(table, "key", 1, tensor, &first, NULL);
        if (!end_failing()) break;
        ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
        ck_assert_uint_eq(first, 0);
        assert_nothing_is_kept();
    }
    ck_assert_int_ge(n, 2);
    fail_allocation(0);
    ck_assert_int_eq(tl_rendezvous_publish(table, "key", 2, tensor, &second, NULL), TL_RESOURCE_EXHAUSTED);
    ck_assert(end_failing());
    ck_assert_uint_eq(second, 0);
    ck_assert_uint_eq(tl_table_name_find(table, "key")->publication->number, first);
    ck_assert_uint_eq(stats_now().published_tensors, 1);
}
END_TEST

/* Sends one value to a receiver that waits for it, or asks later, until it has been received. */
static void transfer(uint64_t number, bool is_waiting)
{
    if (is_waiting) ask(&receivers[0], number, "key");
    ck_assert_int_eq(send(&senders[0], "key"), TL_OK);
    if (!is_waiting) ask(&receivers[0], number, "key");
    tl_rendezvous_acknowledge(table, &receivers[0].base.id);
    ck_assert_int_eq(receivers[0].outcome.code, TL_OK);
    ck_assert_int_eq(senders[0].outcome.count, 1);
}

/* The key, its step and the indexes are in use by others meanwhile. */
START_TEST(values_and_waiters_are_used_again)
{
    struct receiver lasting;
    ck_assert_int_eq(tl_rendezvous_publish(table, "key", 0, tensor, NULL, NULL), TL_OK);
    ask(&receivers[1], 1, "other");
    ck_assert_int_eq(send(&senders[1], "other"), TL_OK);
    ask(&lasting, 2, "third");
    transfer(3, true);
    tried_allocations = 0;
    for (uint64_t number = 4; number < 20; number++)
        transfer(number, number % 2 == 0);
    ck_assert_int_eq(tried_allocations, 0);
    ck_assert(tl_rendezvous_cancel(table, &lasting.base));
    tl_rendezvous_acknowledge(table, &receivers[1].base.id);
}
END_TEST

START_TEST(abort_is_not_remembered)
{
    struct tl_error status;
    tl_error_set(&status, TL_DATA_LOSS, "lost");
    long n = 0;
    for (;; n++) {
        ask(&receivers[0], 1, "key");
        fail_allocation(n);
        abort_whole_step(table, 1, &status);
        bool has_failed = end_failing();
        ck_assert_int_eq(receivers[0].outcome.count, 1);
        ck_assert_int_eq(receivers[0].outcome.code, TL_DATA_LOSS);
        if (!has_failed) break;
        assert_nothing_is_kept();
    }
    ck_assert_int_ge(n, 1);
    ck_assert_int_eq(send(&senders[0], "key"), TL_DATA_LOSS);
    /* The same when the step was unknown. */
    for (n = 0;; n++) {
        fail_allocation(n);
        abort_whole_step(table, 2, &status);
        if (!end_failing()) break;
        ck_assert_ptr_null(tl_table_step_find(table, 2));
    }
    ck_assert_int_ge(n, 2);
}
END_TEST

START_TEST(index_that_cannot_grow)
{
    enum { COUNT = 3000 };
    static struct receiver many[COUNT];
    static char keys[COUNT][8];
    unsigned waiting_count = 0, refused_count = 0;
    table->limits.waiting_receivers = COUNT;
    /* An index of 64 chains of 8 bytes is made, a larger one is not. */
    fail_allocation(-1);
    largest_allocation = 1000;
    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(keys[i], sizeof(keys[i]), "%u", i);
        ask(&many[i], i, keys[i]);
        waiting_count += many[i].outcome.count == 0;
        refused_count += many[i].outcome.count == 1 && many[i].outcome.code == TL_RESOURCE_EXHAUSTED;
    }
    ck_assert_uint_eq(waiting_count + refused_count, COUNT);
    ck_assert_uint_gt(waiting_count, 50);
    ck_assert_uint_gt(refused_count, 100);
    ck_assert_uint_eq(stats_now().waiting_receivers, waiting_count);
    ck_assert_uint_eq(table->names.chain_count, 64);
    ck_assert(end_failing());
    /* With memory, all refused receivers may wait. */
    for (unsigned i = 0; i < COUNT; i++)
        if (many[i].outcome.count > 0) ask(&many[i], i, keys[i]);
    ck_assert_uint_eq(stats_now().waiting_receivers, COUNT);
    /* To end operations needs no memory. */
    fail_allocation(0);
    for (unsigned i = 0; i < COUNT; i += 2)
        ck_assert(tl_rendezvous_cancel(table, &many[i].base));
    ck_assert_uint_eq(end_whole_step(table, 1), 0);
    ck_assert(!end_failing());
    for (unsigned i = 0; i < COUNT; i++)
        ck_assert_int_eq(many[i].outcome.count, i % 2);
    assert_nothing_is_kept();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("rendezvous_memory");
    TCase *tcase = tcase_create("memory");
    tcase_add_checked_fixture(tcase, set_up, tear_down);
    tcase_add_test(tcase, create);
    tcase_add_test(tcase, send_keeps_nothing);
    tcase_add_test(tcase, steps_of_a_key);
    tcase_add_test(tcase, wait_keeps_nothing);
    tcase_add_test(tcase, subscription_keeps_nothing);
    tcase_add_test(tcase, value_that_cannot_be_reserved_stays);
    tcase_add_test(tcase, receiver_for_which_nothing_can_be_reserved_fails);
    tcase_add_test(tcase, publish_keeps_the_old);
    tcase_add_test(tcase, values_and_waiters_are_used_again);
    tcase_add_test(tcase, abort_is_not_remembered);
    tcase_add_test(tcase, index_that_cannot_grow);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
