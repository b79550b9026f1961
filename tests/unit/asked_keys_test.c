// SPDX-License-Identifier: Apache-2.0
/* The numbers of keys that a peer is asked for: which key has one, when it goes to another key, what is expected of the
 * next value, what the peer was told, and allocations that fail. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "tests/fakes/fault_alloc.h"

#include "dataplane/engine/asked_keys.c"
#include "fakes/run_suite.h"

static struct tl_asked_keys keys;
static struct tl_message request;

static void open_keys(uint32_t limit)
{
    tl_asked_keys_fini(&keys);
    keys.limit = limit;
}

static void teardown(void)
{
    tl_asked_keys_fini(&keys);
}

static const char *name_of(unsigned i)
{
    static char name[16];
    snprintf(name, sizeof(name), "key%u", i);
    return name;
}

static struct tl_meta_data bytes(uint64_t size_bytes)
{
    return (struct tl_meta_data){.dtype = TL_U8, .shape = {.rank = 1, .dims = {size_bytes}}, .size_bytes = size_bytes};
}

static void expect(const char *key, uint64_t size_bytes)
{
    const struct tl_meta_cached cached = {
        .meta_data = bytes(size_bytes), .step = size_bytes + 1, .is_published = true, .is_mapped = true};
    tl_asked_keys_expect(&keys, tl_asked_keys_get(&keys, key), key, &cached);
}

/* Returns the size that is expected; 0: none. */
static uint64_t expected(const char *key)
{
    const struct tl_meta_cached *cached = tl_asked_keys_expected(&keys, tl_asked_keys_get(&keys, key), key);
    if (cached == NULL) return 0;
    ck_assert(cached->is_published && cached->is_mapped && cached->step == cached->meta_data.size_bytes + 1);
    return cached->meta_data.size_bytes;
}

static enum tl_key_form tell(const char *key, uint64_t size_bytes, uint64_t expected_step, uint64_t *ret_base)
{
    request = (struct tl_message){.type = TL_MESSAGE_REQUEST, .key = key, .step = 5, .expected_step = expected_step};
    request.key_number = tl_asked_keys_get(&keys, key);
    request.has_meta_data = size_bytes > 0;
    request.meta_data = bytes(size_bytes);
    return tl_asked_keys_tell(&keys, &request, ret_base);
}

START_TEST(expectations_belong_to_keys)
{
    open_keys(4);
    ck_assert_uint_eq(expected("a"), 0);
    expect("a", 5);
    expect("b", 6);
    ck_assert_uint_eq(expected("a"), 5);
    ck_assert_uint_eq(expected("b"), 6);
    ck_assert_uint_eq(expected("ab"), 0);
    expect("a", 0); /* nothing is expected */
    ck_assert_uint_eq(expected("a"), 0);
    ck_assert_ptr_null(tl_asked_keys_expected(&keys, 0, "b"));
    ck_assert_ptr_null(tl_asked_keys_expected(&keys, TL_NO_KEY_NUMBER, "b"));
    ck_assert_ptr_null(tl_asked_keys_expected(&keys, 3, "b"));
}
END_TEST

START_TEST(numbers_follow_each_other)
{
    open_keys(1000);
    for (unsigned round = 0; round < 3; round++) {
        for (unsigned i = 0; i < 1000; i++)
            ck_assert_uint_eq(tl_asked_keys_get(&keys, name_of(i)), i);
    }
    for (unsigned i = 1000; i-- > 0;)
        ck_assert_uint_eq(tl_asked_keys_get(&keys, name_of(i)), i);
    ck_assert_uint_eq(tl_asked_keys_get(&keys, "another"), TL_NO_KEY_NUMBER);
    expect("another", 5);
    ck_assert_uint_eq(expected("another"), 0);
}
END_TEST

/* When more keys than there are numbers are asked for in turn, as many keys as possible keep their numbers. */
START_TEST(keys_in_use_keep_their_numbers)
{
    open_keys(10);
    for (unsigned round = 0; round < 20; round++) {
        for (unsigned i = 0; i < 30; i++)
            ck_assert_uint_eq(tl_asked_keys_get(&keys, name_of(i)), i < 10 ? i : TL_NO_KEY_NUMBER);
    }
}
END_TEST

/* The key that was asked for longest ago gives its number away, and what was known of it. */
START_TEST(idle_keys_give_their_numbers_away)
{
    uint64_t base;
    open_keys(2);
    expect("idle", 5);
    ck_assert_int_eq(tell("idle", 5, 5, &base), TL_KEY_NEW);
    for (unsigned i = 0; i < IDLE_ROUNDS * 2; i++)
        ck_assert_uint_eq(tl_asked_keys_get(&keys, "used"), 1);
    ck_assert_uint_eq(tl_asked_keys_get(&keys, "new"), 0);
    ck_assert_uint_eq(expected("new"), 0);
    ck_assert_ptr_null(tl_asked_keys_expected(&keys, 0, "idle"));
    ck_assert_int_eq(tell("new", 5, 5, &base), TL_KEY_NEW); /* the peer is told, although it knows the number */
    request.key = "idle";
    request.key_number = 0;
    ck_assert_int_eq(tl_asked_keys_tell(&keys, &request, &base), TL_KEY_TEXT);
    ck_assert_uint_eq(keys.count, 2);
}
END_TEST

/* Asks for `count` keys, one after the other; returns how many of them had no number. */
static unsigned ask_for_keys(unsigned first, unsigned count)
{
    unsigned missed_count = 0;
    for (unsigned i = 0; i < count; i++)
        missed_count += tl_asked_keys_get(&keys, name_of(first + i)) == TL_NO_KEY_NUMBER;
    return missed_count;
}

/* With far more keys than numbers, each key would take a number and lose it before it is asked for again. When there
 * are fewer keys than numbers again, each of them soon has one. */
START_TEST(far_more_keys_than_numbers_seldom_take_any)
{
    const unsigned limit = 32, many = 40 * limit;
    open_keys(limit);
    for (unsigned round = 0; round < 4; round++)
        ck_assert_uint_ge(ask_for_keys(0, many), many - many / 16 - limit);
    for (unsigned round = 0; round < IDLE_ROUNDS + 2 * LOOK_INTERVAL; round++)
        (void)ask_for_keys(many, limit);
    ck_assert_uint_eq(ask_for_keys(many, limit), 0);
}
END_TEST

START_TEST(what_is_sent)
{
    uint64_t base;
    open_keys(2);
    ck_assert_int_eq(tell("a", 0, 7, &base), TL_KEY_NEW);
    ck_assert_uint_eq(base, 5); /* relative to the step of the request itself */
    ck_assert_int_eq(tell("a", 0, 8, &base), TL_KEY_KNOWN);
    ck_assert_uint_eq(base, 7);
    ck_assert_int_eq(tell("a", 100, 9, &base), TL_KEY_KNOWN);
    ck_assert_int_eq(tell("a", 100, 10, &base), TL_KEY_AS_BEFORE);
    ck_assert_uint_eq(base, 9);
    ck_assert_int_eq(tell("a", 0, 10, &base), TL_KEY_KNOWN); /* which leaves what was told */
    ck_assert_int_eq(tell("a", 100, 10, &base), TL_KEY_AS_BEFORE);
    ck_assert_int_eq(tell("a", 101, 10, &base), TL_KEY_KNOWN);
    ck_assert_int_eq(tell("a", 100, 10, &base), TL_KEY_KNOWN);
    ck_assert_int_eq(tell("b", 100, 10, &base), TL_KEY_NEW);
    ck_assert_int_eq(tell("b", 100, 10, &base), TL_KEY_AS_BEFORE);
    ck_assert_int_eq(tell("c", 100, 10, &base), TL_KEY_TEXT);
    ck_assert_uint_eq(base, 5);
}
END_TEST

START_TEST(no_numbers)
{
    uint64_t base;
    open_keys(0);
    ck_assert_uint_eq(tl_asked_keys_get(&keys, "a"), TL_NO_KEY_NUMBER);
    ck_assert_int_eq(tell("a", 100, 10, &base), TL_KEY_TEXT);
    ck_assert_uint_eq(keys.capacity, 0);
}
END_TEST

/* Without memory a key has no number, or its meta-data is sent each time; nothing else is wrong. */
START_TEST(without_memory)
{
    bool was_hit = true;
    for (unsigned number = 1; was_hit; number++) {
        uint64_t base;
        unsigned remembered = 0;
        open_keys(64);
        fault_arm(number);
        for (unsigned i = 0; i < 70; i++) {
            expect(name_of(i), i + 1);
            (void)tell(name_of(i), i + 1, 1, &base);
        }
        was_hit = fault_was_hit();
        for (unsigned i = 0; i < 70; i++) {
            (void)tell(name_of(i), i + 1, 1, &base);
            uint64_t size_bytes = expected(name_of(i));
            ck_assert(size_bytes == 0 || size_bytes == i + 1);
            remembered += size_bytes > 0;
        }
        ck_assert_uint_ge(remembered, 63);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("asked_keys");
    TCase *tcase = tcase_create("asked_keys");
    tcase_add_checked_fixture(tcase, NULL, teardown);
    tcase_add_test(tcase, expectations_belong_to_keys);
    tcase_add_test(tcase, numbers_follow_each_other);
    tcase_add_test(tcase, keys_in_use_keep_their_numbers);
    tcase_add_test(tcase, idle_keys_give_their_numbers_away);
    tcase_add_test(tcase, far_more_keys_than_numbers_seldom_take_any);
    tcase_add_test(tcase, what_is_sent);
    tcase_add_test(tcase, no_numbers);
    tcase_add_test(tcase, without_memory);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
