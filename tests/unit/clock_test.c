// SPDX-License-Identifier: Apache-2.0
/* Monotonic time, and deadlines that saturate. */
#include <check.h>
#include <stdlib.h>

#include "base/clock.h"
#include "fakes/run_suite.h"

START_TEST(never_goes_back)
{
    int64_t before = tl_clock_now_ns();
    for (int i = 0; i < 1000; i++) {
        int64_t now = tl_clock_now_ns();
        ck_assert_int_ge(now, before);
        before = now;
    }
    ck_assert_int_gt(before, 0);
}
END_TEST

START_TEST(deadline)
{
    int64_t before = tl_clock_now_ns();
    int64_t deadline = tl_clock_deadline_ns(5 * TL_NS_PER_SEC);
    int64_t after = tl_clock_now_ns();
    ck_assert_int_ge(deadline, before + 5 * TL_NS_PER_SEC);
    ck_assert_int_le(deadline, after + 5 * TL_NS_PER_SEC);
}
END_TEST

START_TEST(deadline_saturates)
{
    ck_assert_int_eq(tl_clock_deadline_ns(TL_TIME_NEVER), TL_TIME_NEVER);
    ck_assert_int_eq(tl_clock_deadline_ns(TL_TIME_NEVER - 1), TL_TIME_NEVER);
}
END_TEST

START_TEST(negative_timeout_is_zero)
{
    int64_t before = tl_clock_now_ns();
    int64_t deadline = tl_clock_deadline_ns(INT64_MIN);
    ck_assert_int_ge(deadline, before);
    ck_assert_int_le(deadline, tl_clock_now_ns());
}
END_TEST

START_TEST(remaining)
{
    ck_assert_int_eq(tl_clock_remaining_ns(TL_TIME_NEVER), TL_TIME_NEVER);
    ck_assert_int_eq(tl_clock_remaining_ns(0), 0);
    ck_assert_int_eq(tl_clock_remaining_ns(INT64_MIN), 0);
    int64_t deadline = tl_clock_now_ns() + 1000 * TL_NS_PER_SEC;
    int64_t left = tl_clock_remaining_ns(deadline);
    ck_assert_int_gt(left, 0);
    ck_assert_int_le(left, 1000 * TL_NS_PER_SEC);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("clock");
    TCase *tcase = tcase_create("clock");
    tcase_add_test(tcase, never_goes_back);
    tcase_add_test(tcase, deadline);
    tcase_add_test(tcase, deadline_saturates);
    tcase_add_test(tcase, negative_timeout_is_zero);
    tcase_add_test(tcase, remaining);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
