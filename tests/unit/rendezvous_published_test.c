// SPDX-License-Identifier: Apache-2.0
/* Rendezvous table: published values. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tensorlane/worker.h>

#include "base/error.h"
#include "fakes/run_suite.h"
#include "fakes/table_list.h"
#include "fakes/whole_steps.h"
#include "server/rendezvous/rendezvous.h"
#include "server/rendezvous/rendezvous_table.h"

static struct tl_rendezvous *table;
static int released_count; /* Counts tensors whose memory was given back. */

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
    static char memory[1000];
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

/* Publishes a tensor to which the table has the only reference; returns the publication's number. */
static uint64_t publish(const char *key, uint64_t step, uint64_t size_bytes)
{
    struct tl_tensor *tensor = make_tensor(size_bytes);
    uint64_t number = 0;
    ck_assert_int_eq(tl_rendezvous_publish(table, key, step, tensor, &number, NULL), TL_OK);
    ck_assert_uint_ne(number, 0);
    tl_tensor_put(tensor);
    return number;
}

struct receiver {
    struct tl_receiver base;
    int count;
    enum tl_status code;
    struct tl_offer offer;
};

static void on_deliver(struct tl_receiver *base, const struct tl_error *status, const struct tl_offer *offer)
{
    struct receiver *receiver = (struct receiver *)base;
    receiver->count++;
    receiver->code = status->code;
    if (offer) receiver->offer = *offer;
}

static void ask(struct receiver *receiver, uint64_t number, const char *key, uint64_t step)
{
    *receiver = (struct receiver){.base = {.id = {1, number}, .key = key, .step = step, .deliver = on_deliver}};
    tl_rendezvous_receive(table, &receiver->base);
}

static void assert_got(struct receiver *receiver, uint64_t publication, uint64_t step, bool is_one_shot)
{
    ck_assert_int_eq(receiver->count, 1);
    ck_assert_int_eq(receiver->code, TL_OK);
    ck_assert_uint_eq(receiver->offer.publication, publication);
    ck_assert_uint_eq(receiver->offer.step, step);
    ck_assert(receiver->offer.is_one_shot == is_one_shot);
    tl_tensor_put(receiver->offer.tensor);
    receiver->offer.tensor = NULL;
}

static void over(struct tl_sender *sender, const struct tl_error *status)
{
    (void)sender, (void)status;
}

static struct tl_rendezvous_stats stats_now(void)
{
    struct tl_rendezvous_stats stats;
    tl_rendezvous_get_stats(table, &stats);
    return stats;
}

static void set_up(void)
{
    const struct tl_rendezvous_limits limits = {100, 1000, 10, 0};
    released_count = 0;
    ck_assert_int_eq(tl_rendezvous_create(&limits, &table, NULL), TL_OK);
}

static void tear_down(void)
{
    struct tl_error status;
    tl_error_set(&status, TL_CANCELLED, "the test is over");
    tl_rendezvous_close(table, &status);
    ck_assert_uint_eq(stats_now().published_tensors, 0);
    ck_assert_uint_eq(stats_now().published_bytes, 0);
    tl_rendezvous_destroy(table);
}

START_TEST(any_number_of_receivers)
{
    static struct receiver receivers[3];
    uint64_t number = publish("key", 5, 7);
    for (uint64_t i = 0; i < 3; i++) {
        ask(&receivers[i], i, "key", i == 2 ? 0 : 5);
        assert_got(&receivers[i], number, 5, false);
        /* Nothing is reserved, so there is nothing to end. */
        tl_rendezvous_acknowledge(table, &receivers[i].base.id);
        tl_rendezvous_release(table, &receivers[i].base.id);
        tl_rendezvous_receiver_lost(table, &receivers[i].base.id, 1);
    }
    ck_assert_int_eq(expire_all(table, INT64_MAX), INT64_MAX);
    ck_assert_uint_eq(stats_now().published_tensors, 1);
    ck_assert_uint_eq(stats_now().published_bytes, 7);
    ck_assert_uint_eq(stats_now().held_tensors, 0);
    ck_assert_int_eq(released_count, 0);
}
END_TEST

/* Keys that are published, sent, waited for, withdrawn, not known, or in one chain: nothing changes. */
START_TEST(prefetching_changes_nothing)
{
    static struct tl_key_text keys[200];
    static char texts[200][16];
    static struct receiver receiver, waiting;
    for (unsigned i = 0; i < 200; i++) {
        snprintf(texts[i], sizeof(texts[i]), "key%u", i);
        keys[i] = (struct tl_key_text){.text = texts[i], .text_bytes = strlen(texts[i])};
    }
    tl_rendezvous_prefetch(table, keys, 200);
    for (unsigned i = 0; i < 100; i++)
        (void)publish(texts[i], 1, i == 0 ? 0 : 7);
    ck_assert_int_eq(tl_rendezvous_withdraw(table, texts[3], NULL), TL_OK);
    ask(&waiting, 1, texts[150], 1);
    struct tl_rendezvous_stats before = stats_now();
    for (size_t count = 0; count <= 200; count++)
        tl_rendezvous_prefetch(table, keys, count);
    struct tl_rendezvous_stats after = stats_now();
    ck_assert_mem_eq(&before, &after, sizeof(before));
    ck_assert_int_eq(released_count, 1);
    ask(&receiver, 2, texts[99], 1);
    ck_assert_int_eq(receiver.code, TL_OK);
    tl_tensor_put(receiver.offer.tensor);
    ck_assert_int_eq(waiting.count, 0);
    ck_assert(tl_rendezvous_cancel(table, &waiting.base));
}
END_TEST

START_TEST(receivers_wait_for_a_version)
{
    static struct receiver receivers[5];
    publish("key", 1, 1);
    ask(&receivers[0], 0, "key", 2);
    ask(&receivers[1], 1, "key", 3);
    ask(&receivers[2], 2, "key", 2);
    ask(&receivers[3], 3, "key", 4);
    ask(&receivers[4], 4, "another", 2);
    ck_assert_uint_eq(stats_now().waiting_receivers, 5);
    uint64_t number = publish("key", 3, 1);
    for (int i = 0; i < 3; i++)
        assert_got(&receivers[i], number, 3, false);
    ck_assert_int_eq(receivers[3].count, 0);
    ck_assert_int_eq(receivers[4].count, 0);
    ck_assert_uint_eq(stats_now().waiting_receivers, 2);
}
END_TEST

/* Versions that skip steps, go back or are withdrawn: each receiver gets the first one that is new enough. */
START_TEST(receivers_wait_for_versions_in_any_order)
{
    static struct receiver receivers[12];
    for (uint64_t step = 0; step < 12; step++)
        ask(&receivers[step], step, "key", step);
    uint64_t number = publish("key", 2, 1);
    for (uint64_t step = 0; step <= 2; step++)
        assert_got(&receivers[step], number, 2, false);
    number = publish("key", 5, 1);
    for (uint64_t step = 3; step <= 5; step++)
        assert_got(&receivers[step], number, 5, false);
    publish("key", 1, 1);
    ask(&receivers[0], 20, "key", 3);
    ck_assert_int_eq(receivers[0].count, 0);
    number = publish("key", 6, 1);
    assert_got(&receivers[0], number, 6, false);
    assert_got(&receivers[6], number, 6, false);
    ck_assert_int_eq(tl_rendezvous_withdraw(table, "key", NULL), TL_OK);
    ask(&receivers[1], 21, "key", 0);
    number = publish("key", 0, 1);
    assert_got(&receivers[1], number, 0, false);
    ck_assert_int_eq(receivers[7].count, 0);
    number = publish("key", UINT64_MAX, 1);
    for (uint64_t step = 7; step < 12; step++)
        assert_got(&receivers[step], number, UINT64_MAX, false);
    publish("key", 3, 1);
    ask(&receivers[2], 22, "key", UINT64_MAX);
    ck_assert_int_eq(receivers[2].count, 0);
    number = publish("key", UINT64_MAX, 1);
    assert_got(&receivers[2], number, UINT64_MAX, false);
    ck_assert_uint_eq(stats_now().waiting_receivers, 0);
}
END_TEST

/* However many receivers wait for later versions, few places are looked at for each version. */
START_TEST(receivers_of_later_versions_are_passed_over)
{
    static struct receiver receivers[61];
    for (uint64_t step = 1; step <= 60; step++)
        ask(&receivers[step], step, "key", step);
    for (uint64_t step = 1; step <= 60; step++)
        assert_got(&receivers[step], publish("key", step, 1), step, false);
    ck_assert_uint_le(table->publish_visits, 120);
}
END_TEST

/* Values that are sent, and a receiver that has given up: no place is looked at, since no receiver waits. */
START_TEST(values_without_receivers_are_passed_over)
{
    static struct tl_sender senders[60];
    static struct receiver receiver;
    struct tl_tensor *tensor = make_tensor(1);
    for (uint64_t i = 0; i < 60; i++) {
        senders[i].over = over;
        ck_assert_int_eq(tl_rendezvous_send(table, "key", 1000 + i, tensor, &senders[i], NULL), TL_OK);
    }
    tl_tensor_put(tensor);
    ask(&receiver, 1, "key", 1);
    ck_assert(tl_rendezvous_cancel(table, &receiver.base));
    for (uint64_t step = 1; step <= 10; step++)
        publish("key", step, 1);
    ck_assert_uint_eq(table->publish_visits, 0);
}
END_TEST

START_TEST(replaced_value_lives_on_with_its_receivers)
{
    static struct receiver before, after;
    uint64_t first = publish("key", 1, 10);
    ask(&before, 1, "key", 1);
    uint64_t second = publish("key", 2, 20);
    ck_assert_uint_ne(first, second);
    ck_assert_uint_eq(stats_now().published_tensors, 1);
    ck_assert_uint_eq(stats_now().published_bytes, 20);
    ck_assert_int_eq(released_count, 0);
    ck_assert_uint_eq(tl_tensor_size_bytes(before.offer.tensor), 10);
    assert_got(&before, first, 1, false);
    ck_assert_int_eq(released_count, 1);
    ask(&after, 2, "key", 1);
    assert_got(&after, second, 2, false);
    /* Without a receiver the value is gone at once; a lower version replaces a higher one. */
    uint64_t third = publish("key", 0, 30);
    ck_assert_int_eq(released_count, 2);
    ask(&after, 3, "key", 0);
    assert_got(&after, third, 0, false);
    ask(&after, 4, "key", 1);
    ck_assert_int_eq(after.count, 0);
}
END_TEST

START_TEST(sent_value_comes_first)
{
    static struct receiver first, second, third;
    static struct tl_sender sender = {.over = over};
    struct tl_tensor *tensor = make_tensor(1);
    uint64_t number = publish("key", 5, 1);
    ck_assert_int_eq(tl_rendezvous_send(table, "key", 4, tensor, &sender, NULL), TL_OK);
    ask(&first, 1, "key", 3);
    assert_got(&first, number, 5, false);
    ask(&second, 2, "key", 4);
    assert_got(&second, second.offer.publication, 4, true);
    ck_assert_uint_ne(second.offer.publication, number);
    /* The sent value is reserved for another request, so the published one comes. */
    ask(&third, 3, "key", 4);
    assert_got(&third, number, 5, false);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(publication_serves_receivers_behind_a_reserved_value)
{
    static struct receiver first, second;
    static struct tl_sender sender = {.over = over};
    struct tl_tensor *tensor = make_tensor(1);
    ask(&first, 1, "key", 4);
    ask(&second, 2, "key", 4);
    ck_assert_int_eq(tl_rendezvous_send(table, "key", 4, tensor, &sender, NULL), TL_OK);
    assert_got(&first, first.offer.publication, 4, true);
    ck_assert_int_eq(second.count, 0);
    uint64_t number = publish("key", 4, 1);
    assert_got(&second, number, 4, false);
    /* The sent value was given back, and waits for the next receiver. */
    tl_rendezvous_release(table, &first.base.id);
    ask(&second, 3, "key", 4);
    assert_got(&second, first.offer.publication, 4, true);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(published_value_is_given_of_an_aborted_step)
{
    static struct receiver receiver;
    struct tl_error status;
    tl_error_set(&status, TL_DATA_LOSS, "lost");
    abort_whole_step(table, 1, &status);
    uint64_t number = publish("key", 1, 1);
    ask(&receiver, 1, "key", 1);
    assert_got(&receiver, number, 1, false);
    ask(&receiver, 2, "another", 1);
    ck_assert_int_eq(receiver.code, TL_DATA_LOSS);
    ck_assert_uint_eq(end_whole_step(table, 1), 0);
    ck_assert_uint_eq(stats_now().published_tensors, 1);
}
END_TEST

START_TEST(number_is_never_zero)
{
    table->last_publication = UINT64_MAX;
    ck_assert_uint_eq(publish("a", 1, 1), 1);
    ck_assert_uint_eq(publish("b", 1, 1), 2);
}
END_TEST

START_TEST(number_is_optional)
{
    struct tl_tensor *tensor = make_tensor(1);
    ck_assert_int_eq(tl_rendezvous_publish(table, "key", 1, tensor, NULL, NULL), TL_OK);
    ck_assert_uint_eq(stats_now().published_tensors, 1);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(withdraw)
{
    static struct receiver receiver;
    struct tl_error error;
    publish("layer1/weights", 1, 10);
    publish("layer2/weights", 1, 20);
    ck_assert_int_eq(tl_rendezvous_withdraw(table, "layer1/weights", NULL), TL_OK);
    ck_assert_int_eq(released_count, 1);
    ck_assert_uint_eq(stats_now().published_tensors, 1);
    ck_assert_uint_eq(stats_now().published_bytes, 20);
    ask(&receiver, 1, "layer1/weights", 0);
    ck_assert_int_eq(receiver.count, 0);
    /* A key for which receivers wait counts as unpublished. */
    ck_assert_int_eq(tl_rendezvous_withdraw(table, "layer1/weights", &error), TL_NOT_FOUND);
    ck_assert_int_eq(error.code, TL_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.message, "did you mean layer2/weights?"));
    ck_assert_int_eq(tl_rendezvous_withdraw(table, "something else entirely", &error), TL_NOT_FOUND);
    ck_assert_ptr_null(strstr(error.message, "did you mean"));
}
END_TEST

START_TEST(withdraw_looks_for_the_nearest_among_some)
{
    char key[TL_MAX_KEY_BYTES + 1], wanted[TL_MAX_KEY_BYTES + 1];
    struct tl_error error;
    /* There are more short keys than are compared. */
    for (int i = 0; i < 1200; i++) {
        snprintf(key, sizeof(key), "short-%d", i);
        publish(key, 1, 0);
    }
    ck_assert_int_eq(tl_rendezvous_withdraw(table, "short-1x", &error), TL_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.message, "did you mean short-1?"));
    ck_assert_uint_eq(table_withdraw_matching(table, "short-*"), 1200);
    /* There are long keys, with more work than is spent: one of them is compared. The last one would be nearer. */
    memset(wanted, 'x', TL_MAX_KEY_BYTES);
    wanted[TL_MAX_KEY_BYTES] = '\0';
    for (int i = 0; i < 10; i++) {
        memcpy(key, wanted, sizeof(key));
        snprintf(key, sizeof(key), "%03d", i);
        key[3] = 'x';
        publish(key, 1, 0);
    }
    wanted[2] = '9';
    ck_assert_int_eq(tl_rendezvous_withdraw(table, wanted, &error), TL_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.message, "did you mean 000"));
}
END_TEST

START_TEST(withdraw_by_pattern)
{
    publish("layer1/weights", 1, 10);
    publish("layer1/bias", 1, 20);
    publish("layer2/bias", 1, 30);
    ck_assert_uint_eq(table_withdraw_matching(table, "nothing*"), 0);
    ck_assert_uint_eq(table_withdraw_matching(table, "layer1/*"), 2);
    ck_assert_int_eq(released_count, 2);
    ck_assert_uint_eq(stats_now().published_bytes, 30);
    ck_assert_uint_eq(table_withdraw_matching(table, "*"), 1);
    ck_assert_uint_eq(stats_now().published_tensors, 0);
}
END_TEST

START_TEST(list)
{
    struct tl_listing listing;
    publish("b", 2, 20);
    uint64_t number = publish("a", 1, 10);
    publish("c/d", 3, 30);
    ck_assert_int_eq(table_list(table, NULL, &listing, NULL), TL_OK);
    ck_assert_uint_eq(listing.count, 3);
    ck_assert_str_eq(listing.items[0].key, "a");
    ck_assert_str_eq(listing.items[1].key, "b");
    ck_assert_str_eq(listing.items[2].key, "c/d");
    ck_assert_uint_eq(listing.items[0].step, 1);
    ck_assert_uint_eq(listing.items[0].publication, number);
    ck_assert_int_eq(listing.items[0].meta_data.dtype, TL_U8);
    ck_assert_uint_eq(listing.items[0].meta_data.size_bytes, 10);
    /* The listing stays when what it lists goes. */
    ck_assert_uint_eq(table_withdraw_matching(table, "a"), 1);
    ck_assert_str_eq(listing.items[0].key, "a");
    table_listing_fini(&listing);
    ck_assert_uint_eq(listing.count, 0);
    table_listing_fini(&listing);
    ck_assert_int_eq(table_list(table, "", &listing, NULL), TL_OK);
    ck_assert_uint_eq(listing.count, 2);
    table_listing_fini(&listing);
    ck_assert_int_eq(table_list(table, "c*", &listing, NULL), TL_OK);
    ck_assert_uint_eq(listing.count, 1);
    ck_assert_str_eq(listing.items[0].key, "c/d");
    table_listing_fini(&listing);
    ck_assert_int_eq(table_list(table, "x", &listing, NULL), TL_OK);
    ck_assert_uint_eq(listing.count, 0);
    table_listing_fini(&listing);
}
END_TEST

START_TEST(list_of_nothing)
{
    struct tl_listing listing;
    ck_assert_int_eq(table_list(table, NULL, &listing, NULL), TL_OK);
    ck_assert_uint_eq(listing.count, 0);
    table_listing_fini(&listing);
}
END_TEST

static void next_is(struct tl_table_walk *walk, const char *key, uint64_t publication)
{
    struct tl_table_entry entry;
    ck_assert_uint_eq(tl_rendezvous_walk_next(table, walk, &entry, 1), 1);
    ck_assert_str_eq(entry.key, key);
    ck_assert_uint_eq(entry.publication, publication);
}

/* A walk meets a key once that is replaced before or after; keys that come and go meanwhile do no harm. */
START_TEST(walk_while_others_publish)
{
    struct tl_table_walk walk, second;
    struct tl_table_entry entry;
    uint64_t a = publish("a", 1, 1);
    publish("b", 1, 1);
    publish("c", 1, 1);
    uint64_t d = publish("d", 1, 1);
    ck_assert_int_eq(tl_rendezvous_walk_begin(table, &walk, NULL), TL_OK);
    ck_assert_int_eq(tl_rendezvous_walk_begin(table, &second, NULL), TL_OK);
    next_is(&walk, "a", a);
    publish("a", 2, 1);
    uint64_t b = publish("b", 2, 1); /* The key that comes next. */
    ck_assert_int_eq(tl_rendezvous_withdraw(table, "c", NULL), TL_OK);
    next_is(&walk, "b", b);
    for (unsigned i = 0; i < 10; i++) {
        char key[32];
        snprintf(key, sizeof(key), "new%u", i);
        publish(key, 1, 1);
    }
    next_is(&walk, "d", d);
    ck_assert(!tl_rendezvous_withdraw_number(table, "d", d + 100));
    ck_assert(tl_rendezvous_withdraw_number(table, "d", d));
    ck_assert(!tl_rendezvous_withdraw_number(table, "d", d));
    /* As many as there were in the beginning, and no more. */
    ck_assert_uint_eq(tl_rendezvous_walk_next(table, &walk, &entry, 1), 1);
    ck_assert_uint_eq(tl_rendezvous_walk_next(table, &walk, &entry, 1), 0);
    ck_assert_int_eq(tl_rendezvous_withdraw(table, "a", NULL), TL_OK);
    next_is(&second, "b", b);
    tl_rendezvous_walk_end(table, &walk);
    tl_rendezvous_walk_end(table, &second);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("rendezvous_published");
    TCase *tcase = tcase_create("published");
    tcase_add_checked_fixture(tcase, set_up, tear_down);
    tcase_add_test(tcase, any_number_of_receivers);
    tcase_add_test(tcase, prefetching_changes_nothing);
    tcase_add_test(tcase, receivers_wait_for_a_version);
    tcase_add_test(tcase, receivers_wait_for_versions_in_any_order);
    tcase_add_test(tcase, receivers_of_later_versions_are_passed_over);
    tcase_add_test(tcase, values_without_receivers_are_passed_over);
    tcase_add_test(tcase, replaced_value_lives_on_with_its_receivers);
    tcase_add_test(tcase, sent_value_comes_first);
    tcase_add_test(tcase, publication_serves_receivers_behind_a_reserved_value);
    tcase_add_test(tcase, published_value_is_given_of_an_aborted_step);
    tcase_add_test(tcase, number_is_never_zero);
    tcase_add_test(tcase, number_is_optional);
    tcase_add_test(tcase, withdraw);
    tcase_add_test(tcase, withdraw_looks_for_the_nearest_among_some);
    tcase_add_test(tcase, withdraw_by_pattern);
    tcase_add_test(tcase, list);
    tcase_add_test(tcase, list_of_nothing);
    tcase_add_test(tcase, walk_while_others_publish);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
