// SPDX-License-Identifier: Apache-2.0
/* Tests of command-line flags. */
#include <check.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fakes/run_suite.h"
#include "server/cli/options.h"

#define USAGE_EXIT 42

struct values {
    bool flag;
    const char *text;
    struct tl_texts texts;
    int64_t duration_ns;
    uint32_t u32;
    uint64_t u64;
};

static struct values values;

static int parse(bool is_single_dash, int *ret_first, int argc, char **argv)
{
    const struct tl_option items[] = {
        {"flag", 'f', TL_OPTION_FLAG, &values.flag, NULL, "a flag"},
        {"text", 't', TL_OPTION_TEXT, &values.text, "TEXT", "a text"},
        {"each", 'e', TL_OPTION_TEXTS, &values.texts, "TEXT", "texts"},
        {"wait", 0, TL_OPTION_DURATION, &values.duration_ns, "DURATION", "a time"},
        {"small", 0, TL_OPTION_U32, &values.u32, "N", "a number"},
        {"large", 0, TL_OPTION_U64, &values.u64, "N", "a number"},
        {"tls", 0, TL_OPTION_REFUSED, NULL, "not in this version", ""},
    };
    const struct tl_options options = {.command = "test",
                                       .usage = "ARGUMENT",
                                       .description = "Tests.",
                                       .items = items,
                                       .count = sizeof(items) / sizeof(items[0]),
                                       .is_single_dash = is_single_dash,
                                       .usage_exit = USAGE_EXIT};
    return tl_options_parse(&options, argc, argv, ret_first);
}

#define PARSE(is_single_dash, ret_first, ...)                                                                          \
    parse(is_single_dash, ret_first, (int)(sizeof((char *[]){__VA_ARGS__}) / sizeof(char *)) - 1,                      \
          (char *[]){__VA_ARGS__})

/* Errors go to stderr, which this test does not read. */
static void setup(void)
{
    values = (struct values){0};
    ck_assert_ptr_nonnull(freopen("/dev/null", "w", stderr));
}

static void teardown(void)
{
    tl_texts_fini(&values.texts);
}

START_TEST(nothing_changes_nothing)
{
    int first = 0;
    values.duration_ns = 7;
    ck_assert_int_eq(PARSE(false, &first, "test", NULL), -1);
    ck_assert_int_eq(first, 1);
    ck_assert_int_eq(values.duration_ns, 7);
    ck_assert_uint_eq(values.texts.count, 0);
}
END_TEST

START_TEST(every_kind_is_stored)
{
    int first = 0;
    ck_assert_int_eq(PARSE(false, &first, "test", "a", "--flag", "-t", "x", "--each", "1", "b", "--each=2", "-e3",
                           "--wait", "1m30s", "--small", "4294967295", "--large=18446744073709551615", NULL),
                     -1);
    ck_assert(values.flag);
    ck_assert_str_eq(values.text, "x");
    ck_assert_uint_eq(values.texts.count, 3);
    ck_assert_str_eq(values.texts.items[0], "1");
    ck_assert_str_eq(values.texts.items[2], "3");
    ck_assert_int_eq(values.duration_ns, INT64_C(90000000000));
    ck_assert_uint_eq(values.u32, UINT32_MAX);
    ck_assert_uint_eq(values.u64, UINT64_MAX);
    ck_assert_int_eq(first, 13);
}
END_TEST

START_TEST(arguments_come_last)
{
    int first = 0;
    char *argv[] = {"test", "a", "--flag", "b", "--", "--text", NULL};
    ck_assert_int_eq(parse(false, &first, 6, argv), -1);
    ck_assert_str_eq(argv[first], "a");
    ck_assert_str_eq(argv[first + 1], "b");
    ck_assert_str_eq(argv[first + 2], "--text");
    ck_assert_ptr_null(values.text);
}
END_TEST

START_TEST(flags_take_a_value)
{
    int first;
    const char *const no[] = {"--flag=false", "--flag=0", "--flag=F", "--flag=False"};
    const char *const yes[] = {"--flag=true", "--flag=1", "--flag=t", "--flag=TRUE"};
    for (size_t i = 0; i < 4; i++) {
        values.flag = true;
        ck_assert_int_eq(PARSE(false, &first, "test", (char *)no[i], NULL), -1);
        ck_assert(!values.flag);
        ck_assert_int_eq(PARSE(false, &first, "test", (char *)yes[i], NULL), -1);
        ck_assert(values.flag);
    }
    ck_assert_int_eq(PARSE(false, &first, "test", "--flag=maybe", NULL), USAGE_EXIT);
}
END_TEST

START_TEST(wrong_values_are_refused)
{
    static const char *const wrong[] = {"--wait=0",
                                        "--wait=0s",
                                        "--wait=-1s",
                                        "--wait=5",
                                        "--wait=",
                                        "--small=4294967296",
                                        "--small=-1",
                                        "--small=1x",
                                        "--small=",
                                        "--small= 1",
                                        "--small=+1",
                                        "--large=1.5",
                                        "--large=18446744073709551616"};
    int first = -7;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        ck_assert_int_eq(PARSE(false, &first, "test", (char *)wrong[i], NULL), USAGE_EXIT);
    ck_assert_int_eq(first, -7);
}
END_TEST

START_TEST(unknown_flags_are_refused)
{
    int first;
    ck_assert_int_eq(PARSE(false, &first, "test", "--flog", NULL), USAGE_EXIT);
    ck_assert_int_eq(PARSE(false, &first, "test", "--nothing-like-it=5", NULL), USAGE_EXIT);
    ck_assert_int_eq(PARSE(false, &first, "test", "-x", NULL), USAGE_EXIT);
    ck_assert_int_eq(PARSE(false, &first, "test", "-fx", NULL), USAGE_EXIT);
    ck_assert_int_eq(PARSE(true, &first, "test", "-flog", NULL), USAGE_EXIT);
}
END_TEST

START_TEST(short_flags_take_no_equals_sign)
{
    int first;
    ck_assert_int_eq(PARSE(false, &first, "test", "-t=a", NULL), USAGE_EXIT);
    ck_assert_int_eq(PARSE(false, &first, "test", "-e=a", NULL), USAGE_EXIT);
    ck_assert_int_eq(PARSE(false, &first, "test", "-ft=a", NULL), USAGE_EXIT);
    ck_assert_int_eq(PARSE(false, &first, "test", "-f=true", NULL), USAGE_EXIT);
    ck_assert_ptr_null(values.text);
    ck_assert_int_eq(PARSE(false, &first, "test", "-t", "=a", NULL), -1);
    ck_assert_str_eq(values.text, "=a");
    ck_assert_int_eq(PARSE(false, &first, "test", "-ta=b", NULL), -1);
    ck_assert_str_eq(values.text, "a=b");
}
END_TEST

START_TEST(missing_values_are_refused)
{
    int first;
    ck_assert_int_eq(PARSE(false, &first, "test", "--text", NULL), USAGE_EXIT);
    ck_assert_int_eq(PARSE(false, &first, "test", "-t", NULL), USAGE_EXIT);
    ck_assert_int_eq(PARSE(true, &first, "test", "-text", NULL), USAGE_EXIT);
}
END_TEST

START_TEST(one_dash_is_enough_where_it_is_wanted)
{
    int first;
    ck_assert_int_eq(PARSE(true, &first, "test", "-text", "x", "-wait=1s", "--small", "3", "-flag", NULL), -1);
    ck_assert_str_eq(values.text, "x");
    ck_assert_int_eq(values.duration_ns, INT64_C(1000000000));
    ck_assert_uint_eq(values.u32, 3);
    ck_assert(values.flag);
}
END_TEST

START_TEST(refused_flags_say_so)
{
    int first;
    ck_assert_int_eq(PARSE(true, &first, "test", "-tls", NULL), USAGE_EXIT);
    ck_assert_int_eq(PARSE(true, &first, "test", "-tls=true", NULL), USAGE_EXIT);
    ck_assert_int_eq(PARSE(true, &first, "test", "-tls=file.pem", NULL), USAGE_EXIT);
    ck_assert_int_eq(PARSE(true, &first, "test", "-tls=false", NULL), -1);
}
END_TEST

START_TEST(help_ends_with_success)
{
    int first;
    ck_assert_ptr_nonnull(freopen("/dev/null", "w", stdout));
    ck_assert_int_eq(PARSE(false, &first, "test", "--help", NULL), 0);
    ck_assert_int_eq(PARSE(false, &first, "test", "-h", NULL), 0);
    ck_assert_int_eq(PARSE(true, &first, "test", "-help", NULL), 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("options");
    TCase *tcase = tcase_create("options");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, nothing_changes_nothing);
    tcase_add_test(tcase, every_kind_is_stored);
    tcase_add_test(tcase, arguments_come_last);
    tcase_add_test(tcase, flags_take_a_value);
    tcase_add_test(tcase, wrong_values_are_refused);
    tcase_add_test(tcase, unknown_flags_are_refused);
    tcase_add_test(tcase, short_flags_take_no_equals_sign);
    tcase_add_test(tcase, missing_values_are_refused);
    tcase_add_test(tcase, one_dash_is_enough_where_it_is_wanted);
    tcase_add_test(tcase, refused_flags_say_so);
    tcase_add_test(tcase, help_ends_with_success);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
