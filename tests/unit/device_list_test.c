// SPDX-License-Identifier: Apache-2.0
/* Lists of devices: which are valid, and that the data plane accepts all lists that the configuration accepts. */
#include "config/device_list.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "dataplane/verbs/verbs.h"
#include "fakes/run_suite.h"

#define NAME_63 "a23456789b23456789c23456789d23456789e23456789f23456789g23456789"

static struct tl_error error;

START_TEST(lists)
{
    static const char *const good[] = {
        "", "mlx5_0", "mlx5_0:1", "^mlx5_1", "mlx5_0:1,^mlx5_1", "=mlx5_1", "^=mlx5_1:255", "rxe-0.1", NAME_63, "a:01",
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(good); i++) {
        struct tl_verbs_options options;
        ck_assert_msg(tl_device_list_check(good[i], &error) == TL_OK, "%s: %s", good[i], error.message);
        tl_verbs_options_init(&options);
        options.devices = good[i];
        ck_assert_msg(tl_verbs_options_check(&options, &error) == TL_OK, "%s: %s", good[i], error.message);
    }
}
END_TEST

START_TEST(what_is_none)
{
    static const struct {
        const char *text, *message;
    } bad[] = {
        {",", "\"\" does not name a device; entries are like mlx5_0, mlx5_0:1 or ^mlx5_1"},
        {"a,", "\"\" does not name a device"},
        {"^", "\"^\" does not name a device"},
        {"=", "\"=\" does not name a device"},
        {"^^a", "\"^^a\" does not name a device"},
        {":1", "\":1\" does not name a device"},
        {"a b", "\"a b\" does not name a device"},
        {"a, b", "\" b\" does not name a device"},
        {"a/b", "\"a/b\" does not name a device"},
        {"\xff", "\"\\xff\" does not name a device"},
        {NAME_63 "4", "does not name a device"},
        {"a:", "\"a:\": a port is a number of 1 to 255"},
        {"a:0", "\"a:0\": a port is a number of 1 to 255"},
        {"a:256", "\"a:256\": a port"},
        {"a:1x", "\"a:1x\": a port"},
        {"a:0001", "\"a:0001\": a port"},
        {"a:1:1", "\"a:1:1\": a port"},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(bad); i++) {
        ck_assert_int_eq(tl_device_list_check(bad[i].text, &error), TL_INVALID_ARGUMENT);
        ck_assert_msg(strstr(error.message, bad[i].message) != NULL, "%s: %s", bad[i].text, error.message);
        ck_assert_int_eq(tl_device_list_check(bad[i].text, NULL), TL_INVALID_ARGUMENT);
    }
}
END_TEST

START_TEST(entries_are_bounded)
{
    char text[128] = "";
    struct tl_verbs_options options;
    for (int i = 0; i < 32; i++)
        strcat(text, i == 0 ? "a" : ",a");
    ck_assert_int_eq(tl_device_list_check(text, &error), TL_OK);
    tl_verbs_options_init(&options);
    options.devices = text;
    ck_assert_int_eq(tl_verbs_options_check(&options, &error), TL_OK);
    strcat(text, ",a");
    ck_assert_int_eq(tl_device_list_check(text, &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "more than 32 entries; name a common beginning instead");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("device_list");
    TCase *tcase = tcase_create("device_list");
    tcase_add_test(tcase, lists);
    tcase_add_test(tcase, what_is_none);
    tcase_add_test(tcase, entries_are_bounded);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
