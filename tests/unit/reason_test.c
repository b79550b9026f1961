// SPDX-License-Identifier: Apache-2.0
/* Reasons that last: one copy each, a limited number, and reasons that differ only in numbers share a copy. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "base/reason.h"
#include "fakes/run_suite.h"

#define MANY 1100

START_TEST(one_copy)
{
    char text[] = "the cable is out";
    const char *first = tl_reason(text);
    ck_assert_str_eq(first, text);
    ck_assert_ptr_ne(first, text);
    text[0] = 'T';
    ck_assert_str_eq(first, "the cable is out");
    ck_assert_ptr_eq(tl_reason("the cable is out"), first);
    ck_assert_ptr_ne(tl_reason(text), first);
    ck_assert_str_eq(tl_reason(NULL), "");
    ck_assert_str_eq(tl_reason(""), "");
}
END_TEST

START_TEST(numbers_that_change)
{
    char text[100];
    for (unsigned i = 0; i < MANY; i++) {
        snprintf(text, sizeof(text), "/job:node/task:1 has been silent for %u ms (error 0x%x).", i, i);
        const char *reason = tl_reason(text);
        if (strcmp(reason, text) == 0) continue;
        ck_assert_uint_ge(i, TL_MAX_REASONS / 2);
        ck_assert_str_eq(reason, "/job:node/task:1 has been silent for # ms (error #).");
    }
    ck_assert_str_eq(tl_reason("another one"), "another one");
    ck_assert_str_eq(tl_reason("another one, the 2nd"), "another one, the 2nd");
}
END_TEST

START_TEST(too_many)
{
    char text[100];
    for (unsigned i = 0; i < MANY; i++) {
        snprintf(text, sizeof(text), "card%u is gone", i);
        ck_assert_str_eq(tl_reason(text), i < TL_MAX_REASONS ? text : "see the log");
    }
    ck_assert_str_eq(tl_reason("card7 is gone"), "card7 is gone");
}
END_TEST

START_TEST(long_text)
{
    char text[2001];
    for (unsigned i = 0; i < TL_MAX_REASONS / 2; i++) {
        snprintf(text, sizeof(text), "%u", i);
        (void)tl_reason(text);
    }
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    const char *reason = tl_reason(text);
    ck_assert_uint_eq(strlen(reason), 1023);
    ck_assert_int_eq(strncmp(reason, text, 1023), 0);
}
END_TEST

START_TEST(same_reason)
{
    ck_assert(tl_reason_is_same("", ""));
    ck_assert(tl_reason_is_same("12 of 4096 bytes, 0.5 s: 0x7f", "3 of 1 bytes, 17.25 s: 0xffff"));
    ck_assert(tl_reason_is_same("queue pair 17.", "queue pair 18."));
    ck_assert(tl_reason_is_same("a=1", "a=2"));
    ck_assert(!tl_reason_is_same("task:1", "task:2"));
    ck_assert(!tl_reason_is_same("10.0.0.1:5", "10.0.0.2:5"));
    ck_assert(!tl_reason_is_same("mlx5_0", "mlx5_1"));
    ck_assert(!tl_reason_is_same("12 ms", "12 s"));
    ck_assert(!tl_reason_is_same("12", ""));
    ck_assert(!tl_reason_is_same("v1.2.3", "v1.2.4"));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("reason");
    TCase *tcase = tcase_create("reason");
    tcase_add_test(tcase, one_copy);
    tcase_add_test(tcase, numbers_that_change);
    tcase_add_test(tcase, too_many);
    tcase_add_test(tcase, long_text);
    tcase_add_test(tcase, same_reason);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
