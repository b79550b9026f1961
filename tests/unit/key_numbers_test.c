// SPDX-License-Identifier: Apache-2.0
/* The numbers of keys at both ends of a link. */
#include <check.h>
#include <string.h>

#include "fakes/fault_alloc.h"

#include "control/key_numbers.c"
#include "fakes/run_suite.h"

static const char *name_of(uint32_t i)
{
    static char name[32];
    snprintf(name, sizeof(name), "key/%u", i);
    return name;
}

static enum tl_key_status tell(struct tl_key_numbers *numbers, const char *name, uint32_t *ret_number)
{
    return tl_key_numbers_get(numbers, name, strlen(name), ret_number);
}

START_TEST(both_sides_count_alike)
{
    struct tl_key_numbers numbers = {0};
    struct tl_kept_keys kept = {.limit = 1000};
    uint32_t number;
    tl_key_numbers_init(&numbers, 1000);
    for (unsigned round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < 1000; i++) {
            const char *name = name_of(i);
            ck_assert_int_eq(tell(&numbers, name, &number), round == 0 ? TL_KEY_IS_NEW : TL_KEY_WAS_SENT);
            ck_assert_uint_eq(number, i);
            if (round == 0) ck_assert_str_eq(tl_kept_keys_add(&kept, name, strlen(name)), name);
            ck_assert_str_eq(tl_kept_keys_get(&kept, number), name);
        }
    }
    ck_assert_int_eq(tell(&numbers, "another", &number), TL_KEY_HAS_NONE);
    ck_assert_int_eq(tell(&numbers, "key/12", &number), TL_KEY_WAS_SENT);
    ck_assert_int_eq(tl_key_numbers_get(&numbers, "key/123", 6, &number), TL_KEY_WAS_SENT);
    ck_assert_uint_eq(number, 12);
    ck_assert_ptr_null(tl_kept_keys_get(&kept, 1000));
    tl_key_numbers_fini(&numbers);
    tl_kept_keys_fini(&kept);
}
END_TEST

START_TEST(owner_that_offers_too_much_is_not_believed)
{
    struct tl_key_numbers numbers = {0};
    tl_key_numbers_init(&numbers, UINT32_MAX);
    ck_assert_uint_eq(numbers.limit, TL_MAX_KEY_NUMBERS);
    tl_key_numbers_fini(&numbers);
}
END_TEST

START_TEST(owner_that_keeps_none_is_sent_none)
{
    struct tl_key_numbers numbers = {0};
    uint32_t number;
    ck_assert_int_eq(tell(&numbers, "a", &number), TL_KEY_HAS_NONE);
    ck_assert_uint_eq(numbers.capacity, 0);
    tl_key_numbers_fini(&numbers);
}
END_TEST

/* Without memory a key has no number, now and when the table must grow, and has one when there is memory again. */
START_TEST(without_memory_a_key_has_no_number)
{
    struct tl_key_numbers numbers = {0};
    uint32_t number;
    tl_key_numbers_init(&numbers, 1000);
    for (uint32_t i = 0; i <= FIRST_CAPACITY; i++) {
        unsigned fault = 0;
        enum tl_key_status status;
        bool was_hit;
        do {
            fault_arm(++fault);
            status = tell(&numbers, name_of(i), &number);
            was_hit = fault_was_hit();
            if (was_hit) ck_assert_int_eq(status, TL_KEY_HAS_NONE);
        } while (was_hit);
        ck_assert_int_eq(status, TL_KEY_IS_NEW);
        ck_assert_uint_eq(number, i);
        if (i == 0 || i == FIRST_CAPACITY) ck_assert_uint_ge(fault, 3);
    }
    for (uint32_t i = 0; i <= FIRST_CAPACITY; i++)
        ck_assert_int_eq(tell(&numbers, name_of(i), &number), TL_KEY_WAS_SENT);
    tl_key_numbers_fini(&numbers);
}
END_TEST

START_TEST(without_memory_no_key_is_kept)
{
    struct tl_kept_keys kept = {.limit = 1000};
    fault_arm(1);
    ck_assert_ptr_null(tl_kept_keys_add(&kept, "a", 1));
    ck_assert(fault_was_hit());
    ck_assert_uint_eq(kept.count, 0);
    ck_assert_str_eq(tl_kept_keys_add(&kept, "ab", 1), "a");
    ck_assert_uint_eq(kept.count, 1);
    tl_kept_keys_fini(&kept);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("key_numbers");
    TCase *tcase = tcase_create("key_numbers");
    tcase_add_test(tcase, both_sides_count_alike);
    tcase_add_test(tcase, owner_that_offers_too_much_is_not_believed);
    tcase_add_test(tcase, owner_that_keeps_none_is_sent_none);
    tcase_add_test(tcase, without_memory_a_key_has_no_number);
    tcase_add_test(tcase, without_memory_no_key_is_kept);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
