// SPDX-License-Identifier: Apache-2.0
/* Tests of what commands write to a terminal. */
#include <check.h>
#include <fcntl.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fakes/run_suite.h"
#include "server/cli/command.h"
#include "server/cli/output.h"

static void assert_escaped(const char *text, const char *expected)
{
    char *escaped = tl_output_escape(text);
    ck_assert_ptr_nonnull(escaped);
    ck_assert_str_eq(escaped, expected);
    free(escaped);
}

START_TEST(ordinary_text_stays)
{
    assert_escaped("", "");
    assert_escaped("layer.0/weight:0 'a' \"b\" \\", "layer.0/weight:0 'a' \"b\" \\");
    assert_escaped("große Zahl 数 \xF0\x9F\x98\x80", "große Zahl 数 \xF0\x9F\x98\x80");
}
END_TEST

START_TEST(controls_are_escaped)
{
    assert_escaped("a\nb\tc\rd", "a\\nb\\tc\\rd");
    assert_escaped("\x1b[31m\x07\x7f", "\\x1B[31m\\x07\\x7F");
    assert_escaped("\xC2\x9B"
                   "31m", /* CSI as one character. */
                   "\\u{9B}31m");
    assert_escaped("\xE2\x80\xAE\xE2\x81\xA6\xE2\x80\x8B\xEF\xBB\xBF", "\\u{202E}\\u{2066}\\u{200B}\\u{FEFF}");
    assert_escaped("\xE2\x80\xA8", "\\u{2028}");
    assert_escaped("\xF3\xA0\x80\x81", "\\u{E0001}");
}
END_TEST

START_TEST(invalid_bytes_are_escaped)
{
    assert_escaped("a\xFFz", "a\\xFFz");
    assert_escaped("\xC3", "\\xC3");
    assert_escaped("\xED\xA0\x80", "\\xED\\xA0\\x80");
    assert_escaped("\xC0\x9B", "\\xC0\\x9B");
}
END_TEST

START_TEST(columns_are_counted)
{
    setlocale(LC_CTYPE, "C.UTF-8");
    ck_assert_uint_eq(tl_output_columns("abc", 3), 3);
    ck_assert_uint_eq(tl_output_columns("ß", 2), 1);
    ck_assert_uint_eq(tl_output_columns("数", 3), 2);
    ck_assert_uint_eq(tl_output_columns("数数", 3), 2);
    ck_assert_uint_eq(tl_output_columns("", 0), 0);
}
END_TEST

/* From here on, standard output goes to the file. */
static void redirect_stdout(const char *path)
{
    fflush(stdout);
    int fd = open(path, O_WRONLY);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(dup2(fd, STDOUT_FILENO), STDOUT_FILENO);
    close(fd);
}

START_TEST(a_full_disk_is_a_failure)
{
    redirect_stdout("/dev/full");
    printf("text\n");
    ck_assert_int_eq(tl_output_finish("ls", TL_EXIT_OK), TL_EXIT_FAILED);
}
END_TEST

START_TEST(an_earlier_failure_keeps_its_code)
{
    redirect_stdout("/dev/full");
    printf("text\n");
    ck_assert_int_eq(tl_output_finish("ls", TL_EXIT_USAGE), TL_EXIT_USAGE);
}
END_TEST

START_TEST(output_that_was_written_is_none)
{
    redirect_stdout("/dev/null");
    printf("text\n");
    ck_assert_int_eq(tl_output_finish("ls", TL_EXIT_OK), TL_EXIT_OK);
}
END_TEST

START_TEST(a_file_is_no_terminal)
{
    FILE *file = tmpfile();
    ck_assert_ptr_nonnull(file);
    ck_assert(!tl_output_has_colours(file));
    ck_assert_uint_eq(tl_output_width(file), 0);
    fclose(file);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("output");
    TCase *tcase = tcase_create("output");
    tcase_add_test(tcase, ordinary_text_stays);
    tcase_add_test(tcase, controls_are_escaped);
    tcase_add_test(tcase, invalid_bytes_are_escaped);
    tcase_add_test(tcase, columns_are_counted);
    tcase_add_test(tcase, a_full_disk_is_a_failure);
    tcase_add_test(tcase, an_earlier_failure_keeps_its_code);
    tcase_add_test(tcase, output_that_was_written_is_none);
    tcase_add_test(tcase, a_file_is_no_terminal);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
