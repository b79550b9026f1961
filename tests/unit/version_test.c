// SPDX-License-Identifier: Apache-2.0
/* The version of the linked library is that of its headers. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>

#include <tensorlane/version.h>

#include "fakes/run_suite.h"

START_TEST(is_that_of_the_headers)
{
    unsigned major, minor, patch;
    char rest;
    ck_assert_str_eq(tl_version(), TL_VERSION);
    ck_assert_int_eq(sscanf(tl_version(), "%u.%u.%u%c", &major, &minor, &patch, &rest), 3);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("version");
    TCase *tcase = tcase_create("version");
    tcase_add_test(tcase, is_that_of_the_headers);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
