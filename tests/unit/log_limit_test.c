// SPDX-License-Identifier: Apache-2.0
/* How often each cause is logged, and how many causes. */
#include <check.h>
#include <stdio.h>

#include "base/log_limit.h"
#include "fakes/fake_clock.h"
#include "fakes/run_suite.h"

static struct tl_log_limit limit;

static void setup(void)
{
    tl_log_limit_init(&limit);
}

static void teardown(void)
{
    tl_log_limit_fini(&limit);
}

START_TEST(each_cause_once_a_minute)
{
    ck_assert(tl_log_limit_passes(&limit, "one"));
    ck_assert(!tl_log_limit_passes(&limit, "one"));
    ck_assert(tl_log_limit_passes(&limit, "another"));
    fake_clock_advance(30 * TL_NS_PER_SEC);
    ck_assert(!tl_log_limit_passes(&limit, "one"));
    fake_clock_advance(30 * TL_NS_PER_SEC);
    ck_assert(tl_log_limit_passes(&limit, "one"));
    ck_assert(!tl_log_limit_passes(&limit, "one"));
}
END_TEST

static unsigned count_passing(unsigned from, unsigned to)
{
    unsigned count = 0;
    for (unsigned i = from; i < to; i++) {
        char cause[16];
        snprintf(cause, sizeof(cause), "%u", i);
        count += tl_log_limit_passes(&limit, cause);
    }
    return count;
}

START_TEST(so_many_causes_a_minute)
{
    ck_assert_uint_eq(count_passing(0, 1000), TL_LOG_LIMIT_CAUSES);
    fake_clock_advance(60 * TL_NS_PER_SEC);
    ck_assert_uint_eq(count_passing(500, 2000), TL_LOG_LIMIT_CAUSES);
    ck_assert_uint_eq(count_passing(0, 2000), 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("log_limit");
    TCase *tcase = tcase_create("log_limit");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, each_cause_once_a_minute);
    tcase_add_test(tcase, so_many_causes_a_minute);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
