// SPDX-License-Identifier: Apache-2.0
/* Rendezvous table: senders, receivers, reservations and steps. Senders and receivers are static, because the table is
 * closed, and tells those that are left, when the test has returned. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "fakes/run_suite.h"
#include "fakes/table_list.h"
#include "fakes/whole_steps.h"
#include "server/rendezvous/rendezvous.h"

enum { WAITING_LIMIT = 4, HELD_LIMIT = 1000, ABORTED_LIMIT = 2 };

static struct tl_rendezvous *table;
static int released_count; /* Counts tensors whose memory was given back. */

/* ----------------------------------------------------------------------------------------------------- helpers -- */

static void count_release(void *data, void *context)
{
    struct tl_rendezvous_stats stats;
    (void)data, (void)context;
    released_count++;
    /* This call would wait for ever if the table's mutex were held. */
    tl_rendezvous_get_stats(table, &stats);
}

static struct tl_tensor *make_tensor(uint64_t size_bytes)
{
    static char memory[HELD_LIMIT + 1];
    struct tl_tensor *tensor;
    const struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                        .dtype = TL_U8,
                                        .rank = 1,
                                        .dims = &size_bytes,
                                        .data = memory,
                                        .capacity_bytes = sizeof(memory),
                                        .release = count_release};
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, NULL), TL_OK);
    return tensor;
}

struct sender {
    struct tl_sender base;
    int over_count;
    int released_before_over; /* The value of released_count when over was called. */
    enum tl_status code;
    char message[128];
};

static void on_over(struct tl_sender *base, const struct tl_error *status)
{
    struct sender *sender = (struct sender *)base;
    sender->over_count++;
    sender->released_before_over = released_count;
    sender->code = status->code;
    snprintf(sender->message, sizeof(sender->message), "%.100s", status->message);
}

/* Sends a tensor to which the table has the only reference. */
static enum tl_status send_bytes(struct sender *sender, const char *key, uint64_t step, uint64_t size_bytes,
                                 struct tl_error *ret_error)
{
    struct tl_tensor *tensor = make_tensor(size_bytes);
    *sender = (struct sender){.base.over = on_over, .code = TL_UNKNOWN};
    enum tl_status status = tl_rendezvous_send(table, key, step, tensor, &sender->base, ret_error);
    tl_tensor_put(tensor);
    return status;
}

static void send_ok(struct sender *sender, const char *key, uint64_t step)
{
    ck_assert_int_eq(send_bytes(sender, key, step, 10, NULL), TL_OK);
}

struct receiver {
    struct tl_receiver base;
    int count;
    enum tl_status code;
    char message[256];
    struct tl_offer offer;
};

static void on_deliver(struct tl_receiver *base, const struct tl_error *status, const struct tl_offer *offer)
{
    struct receiver *receiver = (struct receiver *)base;
    ck_assert_int_eq(status->code == TL_OK, offer != NULL);
    receiver->count++;
    receiver->code = status->code;
    snprintf(receiver->message, sizeof(receiver->message), "%.200s", status->message);
    if (offer) {
        ck_assert_uint_ne(offer->publication, 0);
        receiver->offer = *offer;
        tl_tensor_put(offer->tensor);
    }
}

/* Asks as the request {incarnation, number}. */
static void ask(struct receiver *receiver, uint64_t incarnation, uint64_t number, const char *key, uint64_t step)
{
    *receiver = (struct receiver){
        .base = {.id = {incarnation, number}, .key = key, .step = step, .deliver = on_deliver}, .code = TL_UNKNOWN};
    tl_rendezvous_receive(table, &receiver->base);
}

static struct tl_rendezvous_stats stats_now(void)
{
    struct tl_rendezvous_stats stats;
    tl_rendezvous_get_stats(table, &stats);
    return stats;
}

static void assert_empty(void)
{
    struct tl_rendezvous_stats stats = stats_now();
    ck_assert_uint_eq(stats.waiting_receivers, 0);
    ck_assert_uint_eq(stats.held_tensors, 0);
    ck_assert_uint_eq(stats.held_bytes, 0);
}

static void assert_waits(const struct receiver *receiver)
{
    ck_assert_int_eq(receiver->count, 0);
}

static void assert_got(const struct receiver *receiver, enum tl_status code)
{
    ck_assert_int_eq(receiver->count, 1);
    ck_assert_int_eq(receiver->code, code);
}

static void assert_over(const struct sender *sender, enum tl_status code)
{
    ck_assert_int_eq(sender->over_count, 1);
    ck_assert_int_eq(sender->code, code);
}

static void acknowledge(const struct receiver *receiver)
{
    tl_rendezvous_acknowledge(table, &receiver->base.id);
}

static void set_up(void)
{
    const struct tl_rendezvous_limits limits = {WAITING_LIMIT, HELD_LIMIT, ABORTED_LIMIT, 0};
    released_count = 0;
    ck_assert_int_eq(tl_rendezvous_create(&limits, &table, NULL), TL_OK);
}

static void tear_down(void)
{
    struct tl_error status;
    tl_error_set(&status, TL_CANCELLED, "the test is over");
    tl_rendezvous_close(table, &status);
    assert_empty();
    tl_rendezvous_destroy(table);
}

/* -------------------------------------------------------------------------------------------- send and receive -- */

START_TEST(sender_first)
{
    static struct sender sender;
    static struct receiver receiver;
    send_ok(&sender, "key", 7);
    ck_assert_uint_eq(stats_now().held_tensors, 1);
    ck_assert_uint_eq(stats_now().held_bytes, 10);
    ask(&receiver, 1, 1, "key", 7);
    assert_got(&receiver, TL_OK);
    ck_assert_uint_eq(receiver.offer.step, 7);
    ck_assert(receiver.offer.is_one_shot);
    /* The value is held until the receiver has it, and only then the sender completes. */
    ck_assert_int_eq(sender.over_count, 0);
    ck_assert_int_eq(released_count, 0);
    ck_assert_uint_eq(stats_now().held_bytes, 10);
    acknowledge(&receiver);
    assert_over(&sender, TL_OK);
    ck_assert_int_eq(sender.released_before_over, 1);
    assert_empty();
    acknowledge(&receiver);
    assert_over(&sender, TL_OK);
}
END_TEST

START_TEST(receiver_first)
{
    static struct sender sender;
    static struct receiver receiver;
    ask(&receiver, 1, 1, "key", 7);
    assert_waits(&receiver);
    ck_assert_uint_eq(stats_now().waiting_receivers, 1);
    send_ok(&sender, "key", 7);
    assert_got(&receiver, TL_OK);
    ck_assert_uint_eq(stats_now().waiting_receivers, 0);
    acknowledge(&receiver);
    assert_over(&sender, TL_OK);
    assert_empty();
}
END_TEST

START_TEST(only_key_and_step_meet)
{
    static struct sender sender;
    static struct receiver receivers[4];
    ask(&receivers[0], 1, 1, "key", 8);
    ask(&receivers[1], 1, 2, "key", 6);
    ask(&receivers[2], 1, 3, "ke", 7);
    ask(&receivers[3], 1, 4, "key2", 7);
    send_ok(&sender, "key", 7);
    for (int i = 0; i < 4; i++)
        assert_waits(&receivers[i]);
    ck_assert(tl_rendezvous_unsend(table, &sender.base));
}
END_TEST

START_TEST(receivers_are_served_in_order)
{
    static struct sender senders[3];
    static struct receiver receivers[3];
    for (int i = 0; i < 3; i++)
        ask(&receivers[i], 1, (uint64_t)(10 - i), "key", 0);
    for (int i = 0; i < 3; i++) {
        send_ok(&senders[i], "key", 0);
        for (int j = 0; j < 3; j++)
            ck_assert_int_eq(receivers[j].count, j <= i);
        acknowledge(&receivers[i]);
        assert_over(&senders[i], TL_OK);
    }
}
END_TEST

/* Each of the values that are sent together has its own status, and those that can be offered are. */
START_TEST(sent_together)
{
    static struct sender senders[4];
    static struct receiver receivers[2];
    static const char *const keys[] = {"a", "b", "a", "c"};
    struct tl_rendezvous_value values[4];
    struct tl_error statuses[4];
    ask(&receivers[0], 1, 1, "a", 7);
    assert_waits(&receivers[0]);
    for (size_t i = 0; i < 4; i++) {
        senders[i] = (struct sender){.base.over = on_over, .code = TL_UNKNOWN};
        values[i] = (struct tl_rendezvous_value){keys[i], 7, make_tensor(i == 3 ? HELD_LIMIT : 10), &senders[i].base};
    }
    tl_rendezvous_send_many(table, values, 4, statuses);
    for (size_t i = 0; i < 4; i++)
        tl_tensor_put(values[i].tensor);
    ck_assert_int_eq(statuses[0].code, TL_OK);
    ck_assert_int_eq(statuses[1].code, TL_OK);
    ck_assert_int_eq(statuses[2].code, TL_ALREADY_EXISTS);
    ck_assert_ptr_nonnull(strstr(statuses[2].message, "a of step 7"));
    ck_assert_int_eq(statuses[3].code, TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(statuses[3].message, "limits.held"));
    assert_got(&receivers[0], TL_OK);
    ask(&receivers[1], 1, 2, "b", 7);
    assert_got(&receivers[1], TL_OK);
    const struct tl_request_id ids[] = {receivers[0].base.id, {1, 9}, receivers[1].base.id};
    tl_rendezvous_acknowledge_many(table, ids, 3);
    assert_over(&senders[0], TL_OK);
    assert_over(&senders[1], TL_OK);
    ck_assert_int_eq(senders[2].over_count, 0);
    ck_assert_int_eq(senders[3].over_count, 0);
}
END_TEST

START_TEST(send_twice)
{
    static struct sender sender, second;
    static struct receiver receiver;
    struct tl_error error;
    send_ok(&sender, "key", 7);
    ck_assert_int_eq(send_bytes(&second, "key", 7, 1, &error), TL_ALREADY_EXISTS);
    ck_assert_int_eq(error.code, TL_ALREADY_EXISTS);
    ck_assert_ptr_nonnull(strstr(error.message, "key of step 7"));
    ck_assert_int_eq(released_count, 1);
    ck_assert(!tl_rendezvous_unsend(table, &second.base));
    ask(&receiver, 1, 1, "key", 7);
    ck_assert_int_eq(send_bytes(&second, "key", 7, 1, NULL), TL_ALREADY_EXISTS);
    acknowledge(&receiver);
    send_ok(&second, "key", 7);
    ck_assert_int_eq(second.over_count, 0);
}
END_TEST

START_TEST(held_bytes_are_limited)
{
    static struct sender full, more, empty;
    static struct receiver receiver;
    struct tl_error error;
    ck_assert_int_eq(send_bytes(&more, "more", 0, HELD_LIMIT + 1, NULL), TL_RESOURCE_EXHAUSTED);
    ck_assert_int_eq(send_bytes(&full, "full", 0, HELD_LIMIT, NULL), TL_OK);
    ck_assert_int_eq(send_bytes(&more, "more", 0, 1, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.message, "limits.held"));
    ck_assert_int_eq(send_bytes(&empty, "empty", 0, 0, NULL), TL_OK);
    /* A waiting receiver does not help: until it acknowledges, the bytes are held. */
    ask(&receiver, 1, 1, "more", 0);
    ck_assert_int_eq(send_bytes(&more, "more", 0, 1, NULL), TL_RESOURCE_EXHAUSTED);
    assert_waits(&receiver);
    ck_assert(tl_rendezvous_unsend(table, &full.base));
    ck_assert_int_eq(send_bytes(&more, "more", 0, 1, NULL), TL_OK);
    assert_got(&receiver, TL_OK);
}
END_TEST

START_TEST(unsend)
{
    static struct sender sender;
    static struct receiver receiver, other;
    send_ok(&sender, "key", 1);
    ck_assert(tl_rendezvous_unsend(table, &sender.base));
    ck_assert(!tl_rendezvous_unsend(table, &sender.base));
    ck_assert_int_eq(released_count, 1);
    assert_empty();
    /* The value is reserved: the receiver's transfer does not belong to the table any more. */
    ask(&receiver, 1, 1, "key", 1);
    send_ok(&sender, "key", 1);
    ask(&other, 1, 2, "key", 1);
    ck_assert(tl_rendezvous_unsend(table, &sender.base));
    acknowledge(&receiver);
    tl_rendezvous_release(table, &receiver.base.id);
    ck_assert_int_eq(sender.over_count, 0);
    assert_waits(&other);
    send_ok(&sender, "key", 1);
    acknowledge(&other);
    assert_over(&sender, TL_OK);
    ck_assert(!tl_rendezvous_unsend(table, &sender.base));
}
END_TEST

START_TEST(waiting_receivers_are_limited)
{
    static struct receiver receivers[WAITING_LIMIT], more, again;
    for (int i = 0; i < WAITING_LIMIT; i++)
        ask(&receivers[i], 1, (uint64_t)i, "key", 1);
    ask(&more, 1, 100, "other", 2);
    assert_got(&more, TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(more.message, "limits.waiting"));
    ck_assert_uint_eq(stats_now().waiting_receivers, WAITING_LIMIT);
    /* A request that takes its own place needs no other. */
    ask(&again, 1, 0, "key", 1);
    assert_waits(&again);
    assert_got(&receivers[0], TL_ABORTED);
    ck_assert(tl_rendezvous_cancel(table, &again.base));
    ask(&more, 1, 100, "other", 2);
    assert_waits(&more);
}
END_TEST

START_TEST(cancel)
{
    static struct sender sender;
    static struct receiver receiver, next;
    ask(&receiver, 1, 1, "key", 1);
    ask(&next, 1, 2, "key", 1);
    ck_assert(tl_rendezvous_cancel(table, &receiver.base));
    ck_assert(!tl_rendezvous_cancel(table, &receiver.base));
    ck_assert_uint_eq(stats_now().waiting_receivers, 1);
    send_ok(&sender, "key", 1);
    assert_waits(&receiver);
    assert_got(&next, TL_OK);
    ck_assert(!tl_rendezvous_cancel(table, &next.base));
}
END_TEST

/* ------------------------------------------------------------------------------------------------ reservations -- */

START_TEST(same_request_gets_same_value)
{
    static struct sender sender;
    static struct receiver receiver, again, other;
    send_ok(&sender, "key", 1);
    ask(&receiver, 5, 1, "key", 1);
    ask(&other, 6, 1, "key", 1);
    ask(&again, 5, 1, "key", 1);
    assert_waits(&other);
    assert_got(&again, TL_OK);
    ck_assert_uint_eq(again.offer.publication, receiver.offer.publication);
    acknowledge(&again);
    assert_over(&sender, TL_OK);
    /* A request with the number of a value that is gone is a new request. */
    ask(&again, 5, 1, "key", 1);
    assert_waits(&again);
    send_ok(&sender, "key", 1);
    assert_got(&other, TL_OK);
    ck_assert_uint_ne(other.offer.publication, receiver.offer.publication);
}
END_TEST

START_TEST(same_request_for_another_tensor)
{
    static struct sender sender, another;
    static struct receiver receiver;
    send_ok(&sender, "key", 1);
    send_ok(&another, "another", 1);
    ask(&receiver, 5, 1, "key", 1);
    ask(&receiver, 5, 1, "another", 1);
    assert_got(&receiver, TL_INVALID_ARGUMENT);
    ask(&receiver, 5, 1, "key", 2);
    assert_got(&receiver, TL_INVALID_ARGUMENT);
    ask(&receiver, 5, 1, "key", 1);
    assert_got(&receiver, TL_OK);
}
END_TEST

START_TEST(waiting_request_is_superseded)
{
    static struct sender sender;
    static struct receiver receiver, again, moved;
    ask(&receiver, 5, 1, "key", 1);
    ask(&again, 5, 1, "key", 1);
    assert_got(&receiver, TL_ABORTED);
    ck_assert(!tl_rendezvous_cancel(table, &receiver.base));
    ck_assert_uint_eq(stats_now().waiting_receivers, 1);
    ask(&moved, 5, 1, "another", 2);
    assert_got(&again, TL_ABORTED);
    send_ok(&sender, "key", 1);
    assert_waits(&moved);
    ck_assert_int_eq(sender.over_count, 0);
}
END_TEST

START_TEST(waiting_request_is_not_superseded_by_one_that_asks_again)
{
    static struct sender sender;
    static struct receiver receiver, first, late;
    ask(&first, 5, 1, "key", 1);
    assert_waits(&first);
    late = (struct receiver){
        .base = {.id = {5, 1}, .order = first.base.order, .key = "key", .step = 1, .deliver = on_deliver}};
    ask(&receiver, 5, 1, "key", 1);
    assert_got(&first, TL_ABORTED);
    tl_rendezvous_receive(table, &late.base);
    assert_got(&late, TL_ABORTED);
    assert_waits(&receiver);
    ck_assert_uint_eq(stats_now().waiting_receivers, 1);
    send_ok(&sender, "key", 1);
    assert_got(&receiver, TL_OK);
}
END_TEST

START_TEST(released_value_is_offered_again)
{
    static struct sender sender;
    static struct receiver receiver, next;
    send_ok(&sender, "key", 1);
    ask(&receiver, 5, 1, "key", 1);
    tl_rendezvous_release(table, &receiver.base.id);
    acknowledge(&receiver);
    ck_assert_int_eq(sender.over_count, 0);
    ask(&receiver, 5, 2, "key", 1);
    assert_got(&receiver, TL_OK);
    ask(&next, 5, 3, "key", 1);
    assert_waits(&next);
    tl_rendezvous_release(table, &receiver.base.id);
    assert_got(&next, TL_OK);
    ck_assert_uint_eq(next.offer.publication, receiver.offer.publication);
    acknowledge(&next);
    assert_over(&sender, TL_OK);
}
END_TEST

/* A receiver gives up over another connection, while it waits and when it has been given the value. */
START_TEST(given_up_from_elsewhere)
{
    static struct sender sender;
    static struct receiver waits, has, next;
    ask(&waits, 5, 1, "key", 1);
    assert_waits(&waits);
    tl_rendezvous_give_up(table, &waits.base.id);
    assert_got(&waits, TL_CANCELLED);
    send_ok(&sender, "key", 1);
    tl_rendezvous_give_up(table, &waits.base.id);
    ask(&has, 5, 2, "key", 1);
    assert_got(&has, TL_OK);
    tl_rendezvous_receiver_lost(table, &has.base.id, 100);
    ask(&next, 6, 1, "key", 1);
    assert_waits(&next);
    tl_rendezvous_give_up(table, &has.base.id);
    assert_got(&next, TL_OK);
    ck_assert_int_eq(expire_all(table, 0), TL_TIME_NEVER);
    /* It has nothing any more that it could acknowledge. */
    acknowledge(&has);
    ck_assert_int_eq(sender.over_count, 0);
    acknowledge(&next);
    assert_over(&sender, TL_OK);
}
END_TEST

START_TEST(nothing_is_reserved_for_a_stranger)
{
    static struct sender sender;
    const struct tl_request_id unknown = {7, 7};
    send_ok(&sender, "key", 1);
    tl_rendezvous_acknowledge(table, &unknown);
    tl_rendezvous_release(table, &unknown);
    tl_rendezvous_receiver_lost(table, &unknown, 5);
    release_whole_incarnation(table, 7);
    ck_assert_int_eq(expire_all(table, INT64_MAX), TL_TIME_NEVER);
    ck_assert_int_eq(sender.over_count, 0);
    ck_assert_uint_eq(stats_now().held_tensors, 1);
}
END_TEST

/* No more are offered again than the quota allows; the others are due at once. */
START_TEST(orphans_expire_as_the_quota_allows)
{
    static struct sender senders[3];
    static struct receiver receivers[3], next[3];
    struct tl_quota quota = {.used = TL_QUOTA - 2};
    char key[8];
    for (unsigned i = 0; i < 3; i++) {
        snprintf(key, sizeof(key), "k%u", i);
        send_ok(&senders[i], key, 1);
        ask(&receivers[i], 5, i, key, 1);
        ask(&next[i], 6, i, key, 1);
        tl_rendezvous_receiver_lost(table, &receivers[i].base.id, 100);
    }
    ck_assert_int_eq(tl_rendezvous_expire(table, 150, &quota), 100);
    ck_assert_uint_eq(quota.used, TL_QUOTA);
    ck_assert_int_eq(next[0].count + next[1].count + next[2].count, 2);
    tl_quota_renew(&quota);
    ck_assert_int_eq(tl_rendezvous_expire(table, 150, &quota), TL_TIME_NEVER);
    for (unsigned i = 0; i < 3; i++)
        assert_got(&next[i], TL_OK);
}
END_TEST

START_TEST(orphans_expire_by_deadline)
{
    static const int64_t deadlines[] = {300, 100, 200};
    static const char *const keys[] = {"a", "b", "c"};
    static struct sender senders[3];
    static struct receiver receivers[3], next[3];
    for (int i = 0; i < 3; i++) {
        send_ok(&senders[i], keys[i], 1);
        ask(&receivers[i], 5, (uint64_t)i, keys[i], 1);
        ask(&next[i], 6, (uint64_t)i, keys[i], 1);
        tl_rendezvous_receiver_lost(table, &receivers[i].base.id, deadlines[i]);
    }
    ck_assert_int_eq(expire_all(table, 99), 100);
    assert_waits(&next[1]);
    ck_assert_int_eq(expire_all(table, 100), 200);
    assert_got(&next[1], TL_OK);
    assert_waits(&next[2]);
    ck_assert_int_eq(expire_all(table, 1000), TL_TIME_NEVER);
    assert_got(&next[0], TL_OK);
    assert_got(&next[2], TL_OK);
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(senders[i].over_count, 0);
}
END_TEST

START_TEST(orphan_comes_back)
{
    static struct sender sender;
    static struct receiver receiver, next;
    send_ok(&sender, "key", 1);
    ask(&receiver, 5, 1, "key", 1);
    ask(&next, 6, 1, "key", 1);
    tl_rendezvous_receiver_lost(table, &receiver.base.id, 100);
    ask(&receiver, 5, 1, "key", 1);
    assert_got(&receiver, TL_OK);
    ck_assert_int_eq(expire_all(table, 1000), TL_TIME_NEVER);
    assert_waits(&next);
    /* The receiver breaks off again, and once more with a later deadline; then it acknowledges on a connection of its
     * own. */
    tl_rendezvous_receiver_lost(table, &receiver.base.id, 2000);
    tl_rendezvous_receiver_lost(table, &receiver.base.id, 3000);
    ck_assert_int_eq(expire_all(table, 2000), 3000);
    acknowledge(&receiver);
    ck_assert_int_eq(expire_all(table, 2000), TL_TIME_NEVER);
    assert_over(&sender, TL_OK);
    assert_waits(&next);
}
END_TEST

/* The new connection is there before the table knows that the old one is broken. */
START_TEST(orphan_has_come_back_already)
{
    static struct sender sender;
    static struct receiver receiver, again, next;
    send_ok(&sender, "key", 1);
    ask(&receiver, 5, 1, "key", 1);
    ask(&next, 6, 1, "key", 1);
    ask(&again, 5, 1, "key", 1);
    tl_rendezvous_receiver_lost(table, &receiver.base.id, 100);
    ck_assert_int_eq(expire_all(table, 1000), TL_TIME_NEVER);
    assert_waits(&next);
    tl_rendezvous_receiver_lost(table, &again.base.id, 2000);
    ck_assert_int_eq(expire_all(table, 1000), 2000);
    ck_assert_int_eq(expire_all(table, 2000), TL_TIME_NEVER);
    assert_got(&next, TL_OK);
    /* The next value is held once, however often the one before was. */
    tl_rendezvous_receiver_lost(table, &next.base.id, 3000);
    ck_assert_int_eq(expire_all(table, 2000), 3000);
}
END_TEST

START_TEST(incarnation_is_released)
{
    static struct sender senders[3];
    static struct receiver gone[2], other, waits_gone, waits;
    for (int i = 0; i < 3; i++)
        send_ok(&senders[i], (const char *[]){"a", "b", "c"}[i], 1);
    ask(&gone[0], 5, 1, "a", 1);
    ask(&gone[1], 5, 2, "b", 1);
    ask(&other, 6, 1, "c", 1);
    ask(&waits_gone, 5, 3, "a", 1);
    ask(&waits, 6, 2, "b", 1);
    tl_rendezvous_receiver_lost(table, &gone[0].base.id, 100);
    release_whole_incarnation(table, 5);
    ck_assert_int_eq(expire_all(table, 0), TL_TIME_NEVER);
    assert_got(&waits, TL_OK);
    assert_got(&waits_gone, TL_ABORTED);
    ck_assert_uint_eq(stats_now().waiting_receivers, 0);
    acknowledge(&gone[0]);
    acknowledge(&gone[1]);
    acknowledge(&waits_gone);
    ck_assert_int_eq(senders[0].over_count + senders[1].over_count, 0);
    acknowledge(&waits);
    acknowledge(&other);
    assert_over(&senders[1], TL_OK);
    assert_over(&senders[2], TL_OK);
    ask(&waits, 6, 3, "a", 1);
    assert_got(&waits, TL_OK);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- steps -- */

static void abort_step(uint64_t step, const char *message)
{
    struct tl_error status;
    tl_error_set(&status, TL_DATA_LOSS, "%s", message);
    abort_whole_step(table, step, &status);
}

START_TEST(abort_fails_all_of_the_step)
{
    static struct sender offered, reserved, another;
    static struct receiver has, waits, waits_another;
    send_ok(&offered, "a", 1);
    send_ok(&reserved, "b", 1);
    send_ok(&another, "b", 2);
    ask(&has, 5, 1, "b", 1);
    ask(&waits, 5, 2, "b", 1);
    ask(&waits_another, 5, 3, "a", 2);
    abort_step(1, "loss is not a number");
    assert_over(&offered, TL_DATA_LOSS);
    assert_over(&reserved, TL_DATA_LOSS);
    assert_got(&waits, TL_DATA_LOSS);
    ck_assert_str_eq(offered.message, "loss is not a number");
    ck_assert_str_eq(waits.message, "loss is not a number");
    ck_assert_int_eq(released_count, 2);
    acknowledge(&has);
    ck_assert_int_eq(reserved.over_count, 1);
    ck_assert_int_eq(another.over_count, 0);
    assert_waits(&waits_another);
    ck_assert_uint_eq(stats_now().dropped_tensors, 0);
}
END_TEST

START_TEST(abort_is_remembered)
{
    static struct sender sender;
    static struct receiver receiver;
    struct tl_error error;
    abort_step(1, "loss is not a number");
    ck_assert_int_eq(send_bytes(&sender, "a", 1, 1, &error), TL_DATA_LOSS);
    ck_assert_str_eq(error.message, "loss is not a number");
    ck_assert(!tl_rendezvous_unsend(table, &sender.base));
    ask(&receiver, 5, 1, "a", 1);
    assert_got(&receiver, TL_DATA_LOSS);
    ck_assert_str_eq(receiver.message, "loss is not a number");
    abort_step(1, "second");
    ask(&receiver, 5, 1, "a", 1);
    ck_assert_str_eq(receiver.message, "second");
    ck_assert_uint_eq(end_whole_step(table, 1), 0);
    ask(&receiver, 5, 1, "a", 1);
    assert_waits(&receiver);
}
END_TEST

START_TEST(abort_can_be_asked_for)
{
    struct tl_error error;
    ck_assert_int_eq(tl_rendezvous_check_step(table, 1, NULL), TL_OK);
    abort_step(1, "loss is not a number");
    ck_assert_int_eq(tl_rendezvous_check_step(table, 1, &error), TL_DATA_LOSS);
    ck_assert_str_eq(error.message, "loss is not a number");
    ck_assert_int_eq(tl_rendezvous_check_step(table, 2, NULL), TL_OK);
    ck_assert_uint_eq(end_whole_step(table, 1), 0);
    ck_assert_int_eq(tl_rendezvous_check_step(table, 1, NULL), TL_OK);
}
END_TEST

START_TEST(oldest_abort_is_forgotten)
{
    static struct sender sender;
    abort_step(1, "one");
    abort_step(2, "two");
    abort_step(1, "one, again");
    abort_step(3, "three");
    ck_assert_int_eq(send_bytes(&sender, "a", 1, 1, NULL), TL_DATA_LOSS);
    ck_assert_int_eq(send_bytes(&sender, "a", 3, 1, NULL), TL_DATA_LOSS);
    send_ok(&sender, "a", 2);
}
END_TEST

START_TEST(aborts_need_not_be_remembered)
{
    const struct tl_rendezvous_limits limits = {1, 10, 0, 0};
    struct tl_rendezvous *before = table;
    static struct sender sender;
    ck_assert_int_eq(tl_rendezvous_create(&limits, &table, NULL), TL_OK);
    send_ok(&sender, "a", 1);
    abort_step(1, "one");
    assert_over(&sender, TL_DATA_LOSS);
    send_ok(&sender, "a", 1);
    ck_assert(tl_rendezvous_unsend(table, &sender.base));
    tl_rendezvous_destroy(table);
    table = before;
}
END_TEST

START_TEST(end_of_step)
{
    static struct sender dropped[2], reserved, another;
    static struct receiver has, waits, waits_another;
    send_ok(&dropped[0], "a", 1);
    send_ok(&dropped[1], "b", 1);
    send_ok(&reserved, "c", 1);
    send_ok(&another, "a", 2);
    ask(&has, 5, 1, "c", 1);
    ask(&waits, 5, 2, "d", 1);
    ask(&waits_another, 5, 3, "d", 2);
    ck_assert_uint_eq(end_whole_step(table, 1), 2);
    assert_over(&dropped[0], TL_CANCELLED);
    assert_over(&dropped[1], TL_CANCELLED);
    ck_assert_ptr_nonnull(strstr(dropped[0].message, "step 1 ended"));
    assert_got(&waits, TL_CANCELLED);
    assert_waits(&waits_another);
    ck_assert_int_eq(another.over_count, 0);
    ck_assert_uint_eq(stats_now().dropped_tensors, 2);
    ck_assert_uint_eq(stats_now().held_tensors, 2);
    /* A reserved value still belongs to its receiver, which may ask again. */
    ck_assert_uint_eq(end_whole_step(table, 1), 0);
    ask(&has, 5, 1, "c", 1);
    assert_got(&has, TL_OK);
    acknowledge(&has);
    assert_over(&reserved, TL_OK);
    ck_assert_uint_eq(stats_now().dropped_tensors, 2);
}
END_TEST

/* A step ends, or is aborted, in rounds: as many each time as the quota allows. What comes meanwhile is no part of it.
 */
START_TEST(step_ends_as_the_quota_allows)
{
    enum { COUNT = 3 };
    static struct sender senders[COUNT], reserved, later;
    static struct receiver waiting[COUNT], has, late;
    struct tl_quota quota = {.used = TL_QUOTA - 2};
    bool is_abort = _i == 1;
    static const struct tl_error status = {.code = TL_ABORTED, .message = "why"};
    char key[8];
    send_ok(&reserved, "r", 1);
    ask(&has, 5, 100, "r", 1);
    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(key, sizeof(key), "s%u", i);
        send_ok(&senders[i], key, 1);
        snprintf(key, sizeof(key), "w%u", i);
        ask(&waiting[i], 5, i + 1, key, 1);
    }
    uint64_t dropped_count = 0;
    unsigned rounds = 1, over;
    while (is_abort ? !tl_rendezvous_abort_step(table, 1, &status, &quota)
                    : !tl_rendezvous_end_step(table, 1, &quota, &dropped_count)) {
        ck_assert_uint_eq(quota.used, TL_QUOTA);
        over = 0;
        for (unsigned i = 0; i < COUNT; i++)
            over += (unsigned)senders[i].over_count + (unsigned)waiting[i].count;
        ck_assert_uint_le(over, 2 * rounds);
        ck_assert_uint_ge(over + 1, 2 * rounds); /* the reserved one counts as well */
        if (rounds++ == 1 && !is_abort) {
            send_ok(&later, "later", 1);
            ask(&late, 5, 200, "late", 1);
        }
        quota.used = TL_QUOTA - 2;
    }
    ck_assert_uint_eq(rounds, 4);
    for (unsigned i = 0; i < COUNT; i++) {
        assert_over(&senders[i], is_abort ? TL_ABORTED : TL_CANCELLED);
        assert_got(&waiting[i], is_abort ? TL_ABORTED : TL_CANCELLED);
    }
    if (is_abort) {
        assert_over(&reserved, TL_ABORTED);
    } else {
        ck_assert_uint_eq(dropped_count, COUNT);
        ck_assert_int_eq(reserved.over_count + later.over_count, 0);
        assert_waits(&late);
        acknowledge(&has);
        assert_over(&reserved, TL_OK);
        ck_assert_uint_eq(end_whole_step(table, 1), 1);
    }
}
END_TEST

/* The table is closed while a step ends. */
START_TEST(closed_while_a_step_ends)
{
    static struct sender senders[2];
    static struct receiver waiting[2];
    struct tl_quota quota = {.used = TL_QUOTA - 1};
    uint64_t dropped_count = 0;
    send_ok(&senders[0], "a", 1);
    send_ok(&senders[1], "b", 1);
    ask(&waiting[0], 5, 1, "c", 1);
    ask(&waiting[1], 5, 2, "d", 1);
    ck_assert(!tl_rendezvous_end_step(table, 1, &quota, &dropped_count));
    const struct tl_error closed = {.code = TL_UNAVAILABLE, .message = "closed"};
    tl_rendezvous_close(table, &closed);
    assert_over(&senders[0], TL_CANCELLED);
    assert_over(&senders[1], TL_UNAVAILABLE);
    assert_got(&waiting[0], TL_UNAVAILABLE);
    assert_got(&waiting[1], TL_UNAVAILABLE);
    tl_quota_renew(&quota);
    ck_assert(tl_rendezvous_end_step(table, 1, &quota, &dropped_count));
    ck_assert_uint_eq(dropped_count, 1);
}
END_TEST

START_TEST(reserved_value_of_an_ended_step_is_not_offered)
{
    static struct sender senders[2], newer;
    static struct receiver receivers[2], next;
    send_ok(&senders[0], "a", 1);
    send_ok(&senders[1], "b", 1);
    ask(&receivers[0], 5, 1, "a", 1);
    ask(&receivers[1], 5, 2, "b", 1);
    ck_assert_uint_eq(end_whole_step(table, 1), 0);
    /* The step is used again while old transfers run. */
    ask(&next, 6, 1, "a", 1);
    assert_waits(&next);
    tl_rendezvous_release(table, &receivers[0].base.id);
    assert_over(&senders[0], TL_CANCELLED);
    assert_waits(&next);
    send_ok(&newer, "b", 1);
    tl_rendezvous_receiver_lost(table, &receivers[1].base.id, 10);
    ck_assert_int_eq(expire_all(table, 10), TL_TIME_NEVER);
    assert_over(&senders[1], TL_CANCELLED);
    ck_assert_uint_eq(stats_now().dropped_tensors, 2);
    ck_assert_int_eq(newer.over_count, 0);
    ask(&receivers[1], 5, 2, "b", 1);
    acknowledge(&receivers[1]);
    assert_over(&newer, TL_OK);
}
END_TEST

START_TEST(reserved_value_of_an_ended_step_is_aborted)
{
    static struct sender sender;
    static struct receiver receiver;
    send_ok(&sender, "a", 1);
    ask(&receiver, 5, 1, "a", 1);
    ck_assert_uint_eq(end_whole_step(table, 1), 0);
    abort_step(1, "late");
    assert_over(&sender, TL_DATA_LOSS);
    assert_empty();
}
END_TEST

START_TEST(unknown_step)
{
    ck_assert_uint_eq(end_whole_step(table, 77), 0);
    ck_assert_uint_eq(stats_now().dropped_tensors, 0);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- close -- */

START_TEST(close_ends_everything)
{
    static struct sender offered, reserved;
    static struct receiver has, waits;
    struct tl_listing listing;
    struct tl_error status, error;
    struct tl_tensor *tensor = make_tensor(1);
    ck_assert_int_eq(tl_rendezvous_publish(table, "p", 1, tensor, NULL, NULL), TL_OK);
    send_ok(&offered, "a", 1);
    send_ok(&reserved, "b", 1);
    ask(&has, 5, 1, "b", 1);
    ask(&waits, 5, 2, "c", 1);
    abort_step(9, "nine");
    tl_error_set(&status, TL_UNAVAILABLE, "the worker stops");
    tl_rendezvous_close(table, &status);
    assert_over(&offered, TL_UNAVAILABLE);
    assert_over(&reserved, TL_UNAVAILABLE);
    assert_got(&waits, TL_UNAVAILABLE);
    assert_empty();
    ck_assert_uint_eq(stats_now().published_tensors, 0);
    ck_assert_int_eq(released_count, 2);
    /* From now on everything is refused, also for a step that was aborted. */
    tl_error_set(&status, TL_INTERNAL, "a second status");
    tl_rendezvous_close(table, &status);
    ck_assert_int_eq(send_bytes(&offered, "a", 1, 1, &error), TL_UNAVAILABLE);
    ck_assert_str_eq(error.message, "the worker stops");
    ask(&waits, 5, 2, "c", 9);
    assert_got(&waits, TL_UNAVAILABLE);
    ck_assert_int_eq(tl_rendezvous_publish(table, "p", 1, tensor, NULL, NULL), TL_UNAVAILABLE);
    ck_assert_int_eq(tl_rendezvous_withdraw(table, "p", NULL), TL_UNAVAILABLE);
    ck_assert_uint_eq(table_withdraw_matching(table, "*"), 0);
    ck_assert_int_eq(table_list(table, NULL, &listing, NULL), TL_UNAVAILABLE);
    ck_assert(!tl_rendezvous_cancel(table, &waits.base));
    ck_assert(!tl_rendezvous_unsend(table, &offered.base));
    abort_step(1, "one");
    ck_assert_uint_eq(end_whole_step(table, 1), 0);
    acknowledge(&has);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(destroy_accepts_null)
{
    int before = released_count;
    tl_rendezvous_destroy(NULL);
    ck_assert_int_eq(released_count, before);
}
END_TEST

START_TEST(destroy_puts_publications)
{
    const struct tl_rendezvous_limits limits = {1, 1, 1, 0};
    struct tl_rendezvous *other;
    struct tl_tensor *tensor = make_tensor(1);
    ck_assert_int_eq(tl_rendezvous_create(&limits, &other, NULL), TL_OK);
    ck_assert_int_eq(tl_rendezvous_publish(other, "p", 1, tensor, NULL, NULL), TL_OK);
    tl_tensor_put(tensor);
    ck_assert_int_eq(released_count, 0);
    tl_rendezvous_destroy(other);
    ck_assert_int_eq(released_count, 1);
}
END_TEST

/* --------------------------------------------------------------------------------------------------- callbacks -- */

/* This receiver acknowledges as soon as it has the offer, and frees itself: nothing of it may be touched afterwards. */
static void deliver_acknowledge_and_free(struct tl_receiver *base, const struct tl_error *status,
                                         const struct tl_offer *offer)
{
    ck_assert_int_eq(status->code, TL_OK);
    tl_tensor_put(offer->tensor);
    tl_rendezvous_acknowledge(table, &base->id);
    free(base);
}

static int freed_senders;

static void over_and_free(struct tl_sender *base, const struct tl_error *status)
{
    struct tl_rendezvous_stats stats;
    ck_assert_int_eq(status->code, TL_OK);
    tl_rendezvous_get_stats(table, &stats);
    freed_senders++;
    free(base);
}

static struct tl_receiver *make_receiver(uint64_t number)
{
    struct tl_receiver *receiver = calloc(1, sizeof(*receiver));
    ck_assert_ptr_nonnull(receiver);
    *receiver =
        (struct tl_receiver){.id = {1, number}, .key = "key", .step = 1, .deliver = deliver_acknowledge_and_free};
    return receiver;
}

START_TEST(callbacks_may_free_their_objects)
{
    struct tl_tensor *tensor = make_tensor(1);
    freed_senders = 0;
    for (int i = 0; i < 2; i++) {
        struct tl_sender *sender = calloc(1, sizeof(*sender));
        ck_assert_ptr_nonnull(sender);
        sender->over = over_and_free;
        if (i == 0) tl_rendezvous_receive(table, make_receiver(1));
        /* With a receiver that waits and acknowledges at once, over comes before send returns. */
        ck_assert_int_eq(tl_rendezvous_send(table, "key", 1, tensor, sender, NULL), TL_OK);
        ck_assert_int_eq(freed_senders, i == 0 ? 1 : i);
        if (i == 1) tl_rendezvous_receive(table, make_receiver(2));
        ck_assert_int_eq(freed_senders, i + 1);
    }
    tl_tensor_put(tensor);
    assert_empty();
}
END_TEST

/* This receiver gets the status of the aborted step, and cancels its neighbour, which gets it in the same call. */
static struct receiver *neighbour;
static bool was_neighbour_cancelled;

static void deliver_cancel_neighbour(struct tl_receiver *base, const struct tl_error *status,
                                     const struct tl_offer *offer)
{
    on_deliver(base, status, offer);
    was_neighbour_cancelled = tl_rendezvous_cancel(table, &neighbour->base);
}

START_TEST(cancel_while_its_callback_is_due)
{
    static struct receiver first = {.base = {.id = {1, 1}, .key = "a", .step = 1, .deliver = deliver_cancel_neighbour}};
    static struct receiver second;
    neighbour = &second;
    tl_rendezvous_receive(table, &first.base);
    ask(&second, 1, 2, "b", 1);
    abort_step(1, "one");
    ck_assert(!was_neighbour_cancelled);
    assert_got(&first, TL_DATA_LOSS);
    assert_got(&second, TL_DATA_LOSS);
}
END_TEST

/* Sends the same again, as often as the test asks. */
static struct tl_tensor *again_tensor;
static int again_left;

static void over_send_again(struct tl_sender *base, const struct tl_error *status)
{
    ck_assert_int_eq(status->code, TL_OK);
    if (again_left-- > 0) ck_assert_int_eq(tl_rendezvous_send(table, "key", 1, again_tensor, base, NULL), TL_OK);
}

START_TEST(sender_may_send_again_from_over)
{
    struct tl_sender sender = {.over = over_send_again};
    again_tensor = make_tensor(1);
    again_left = 2;
    for (uint64_t i = 0; i < 3; i++)
        tl_rendezvous_receive(table, make_receiver(i));
    ck_assert_int_eq(tl_rendezvous_send(table, "key", 1, again_tensor, &sender, NULL), TL_OK);
    ck_assert_int_eq(again_left, -1);
    assert_empty();
    tl_tensor_put(again_tensor);
}
END_TEST

static TCase *make_case(const char *name)
{
    TCase *tcase = tcase_create(name);
    tcase_add_checked_fixture(tcase, set_up, tear_down);
    return tcase;
}

int main(void)
{
    Suite *suite = suite_create("rendezvous");
    TCase *meet = make_case("meet"), *reservation = make_case("reservation"), *step = make_case("step"),
          *end = make_case("end");
    tcase_add_test(meet, sender_first);
    tcase_add_test(meet, receiver_first);
    tcase_add_test(meet, only_key_and_step_meet);
    tcase_add_test(meet, receivers_are_served_in_order);
    tcase_add_test(meet, sent_together);
    tcase_add_test(meet, send_twice);
    tcase_add_test(meet, held_bytes_are_limited);
    tcase_add_test(meet, unsend);
    tcase_add_test(meet, waiting_receivers_are_limited);
    tcase_add_test(meet, cancel);
    tcase_add_test(reservation, same_request_gets_same_value);
    tcase_add_test(reservation, same_request_for_another_tensor);
    tcase_add_test(reservation, waiting_request_is_superseded);
    tcase_add_test(reservation, waiting_request_is_not_superseded_by_one_that_asks_again);
    tcase_add_test(reservation, released_value_is_offered_again);
    tcase_add_test(reservation, given_up_from_elsewhere);
    tcase_add_test(reservation, nothing_is_reserved_for_a_stranger);
    tcase_add_test(reservation, orphans_expire_by_deadline);
    tcase_add_test(reservation, orphan_comes_back);
    tcase_add_test(reservation, orphan_has_come_back_already);
    tcase_add_test(reservation, incarnation_is_released);
    tcase_add_test(step, abort_fails_all_of_the_step);
    tcase_add_test(step, abort_is_remembered);
    tcase_add_test(step, abort_can_be_asked_for);
    tcase_add_test(step, oldest_abort_is_forgotten);
    tcase_add_test(step, aborts_need_not_be_remembered);
    tcase_add_test(step, end_of_step);
    tcase_add_test(step, reserved_value_of_an_ended_step_is_not_offered);
    tcase_add_test(step, reserved_value_of_an_ended_step_is_aborted);
    tcase_add_test(step, unknown_step);
    TCase *quota = make_case("step_ends_as_the_quota_allows"); /* tests/defects runs it alone */
    tcase_add_loop_test(quota, step_ends_as_the_quota_allows, 0, 2);
    tcase_add_test(quota, closed_while_a_step_ends);
    TCase *expiry = make_case("orphans_expire_as_the_quota_allows"); /* the same */
    tcase_add_test(expiry, orphans_expire_as_the_quota_allows);
    tcase_add_test(end, close_ends_everything);
    tcase_add_test(end, destroy_accepts_null);
    tcase_add_test(end, destroy_puts_publications);
    tcase_add_test(end, callbacks_may_free_their_objects);
    tcase_add_test(end, cancel_while_its_callback_is_due);
    tcase_add_test(end, sender_may_send_again_from_over);
    suite_add_tcase(suite, meet);
    suite_add_tcase(suite, reservation);
    suite_add_tcase(suite, step);
    suite_add_tcase(suite, quota);
    suite_add_tcase(suite, expiry);
    suite_add_tcase(suite, end);
    return run_suite(suite);
}
