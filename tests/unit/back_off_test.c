// SPDX-License-Identifier: Apache-2.0
/* Pauses between attempts: how they grow, where they stop growing, and that they differ. */
#include <check.h>
#include <limits.h>

#include "base/back_off.h"
#include "base/random.h"
#include "fakes/run_suite.h"

/* It takes the place of base/random.c. */
static uint64_t next_random;

uint64_t tl_random_u64(void)
{
    return next_random;
}

static int64_t shortest_ns(unsigned failure_count)
{
    next_random = 0;
    return tl_back_off_ns(20, 1000, failure_count);
}

static int64_t longest_ns(unsigned failure_count)
{
    int64_t half_ns = shortest_ns(failure_count);
    next_random = (uint64_t)half_ns - 1;
    return tl_back_off_ns(20, 1000, failure_count);
}

START_TEST(it_doubles_up_to_the_limit)
{
    static const int64_t pauses_ns[] = {20, 40, 80, 160, 320, 640, 1000, 1000};
    for (unsigned i = 0; i < 8; i++) {
        ck_assert_int_eq(shortest_ns(i), pauses_ns[i] / 2);
        ck_assert_int_eq(longest_ns(i), pauses_ns[i] - 1);
    }
}
END_TEST

START_TEST(it_stays_at_the_limit)
{
    ck_assert_int_eq(longest_ns(UINT_MAX), 999);
    next_random = 0;
    ck_assert_int_eq(tl_back_off_ns(2, INT64_MAX, UINT_MAX), INT64_MAX / 2);
}
END_TEST

START_TEST(any_random_number_will_do)
{
    next_random = UINT64_MAX;
    int64_t pause_ns = tl_back_off_ns(20, 1000, 3);
    ck_assert_int_ge(pause_ns, 80);
    ck_assert_int_lt(pause_ns, 160);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("back_off");
    TCase *tcase = tcase_create("back_off");
    tcase_add_test(tcase, it_doubles_up_to_the_limit);
    tcase_add_test(tcase, it_stays_at_the_limit);
    tcase_add_test(tcase, any_random_number_will_do);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
