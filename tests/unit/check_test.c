// SPDX-License-Identifier: Apache-2.0
/* Always-on assertions end the process, and only when they fail. */
#include <check.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "fakes/run_suite.h"

struct outer {
    int first;
    char inner;
};

START_TEST(holds)
{
    int evaluated = 0;
    TL_CHECK(++evaluated == 1);
    ck_assert_int_eq(evaluated, 1);
}
END_TEST

START_TEST(fails)
{
    TL_CHECK(1 + 1 == 3);
}
END_TEST

START_TEST(fails_without_stderr)
{
    close(STDERR_FILENO);
    TL_CHECK(1 + 1 == 4);
}
END_TEST

START_TEST(long_condition)
{
    char text[2000];
    memset(text, 'x', sizeof(text));
    text[sizeof(text) - 1] = '\0';
    tl_check_failed(__FILE__, __LINE__, text);
}
END_TEST

START_TEST(message_names_the_place)
{
    int ends[2];
    char text[256] = "";
    ck_assert_int_eq(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        signal(SIGABRT, SIG_DFL);
        tl_check_failed("a.c", 12, "x == y");
    }
    close(ends[1]);
    ck_assert_int_gt(read(ends[0], text, sizeof(text) - 1), 0);
    ck_assert_str_eq(text, "tensorlane: a.c:12: check failed: x == y\n");
    close(ends[0]);
}
END_TEST

START_TEST(container_of)
{
    struct outer object;
    ck_assert_ptr_eq(TL_CONTAINER_OF(&object.inner, struct outer, inner), &object);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("check");
    TCase *tcase = tcase_create("check");
    tcase_add_test(tcase, holds);
    tcase_add_test_raise_signal(tcase, fails, SIGABRT);
    tcase_add_test_raise_signal(tcase, fails_without_stderr, SIGABRT);
    tcase_add_test_raise_signal(tcase, long_condition, SIGABRT);
    tcase_add_test(tcase, message_names_the_place);
    tcase_add_test(tcase, container_of);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
