// SPDX-License-Identifier: Apache-2.0
/*
 * The end of every check program: runs its suite, prints what failed, and returns what main returns. check forks each
 * test, so that one that crashes fails alone.
 */
#ifndef FAKES_RUN_SUITE_H
#define FAKES_RUN_SUITE_H

#include <check.h>

/* Makes the test a case of its own, which CK_RUN_CASE selects: tests/defects runs it alone. */
static inline void add_own_case(Suite *suite, const char *name, SFun setup, SFun teardown, const TTest *test)
{
    TCase *tcase = tcase_create(name);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, test);
    suite_add_tcase(suite, tcase);
}

static inline int run_and_free(SRunner *runner)
{
    srunner_run_all(runner, CK_NORMAL);
    int failed_count = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed_count != 0;
}

static inline int run_suite(Suite *suite)
{
    return run_and_free(srunner_create(suite));
}

/* Runs all tests in this process, one after the other, for subjects that do not survive a fork. */
static inline int run_suite_in_process(Suite *suite)
{
    SRunner *runner = srunner_create(suite);
    srunner_set_fork_status(runner, CK_NOFORK);
    return run_and_free(runner);
}

#endif
