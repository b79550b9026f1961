// SPDX-License-Identifier: Apache-2.0
/* Quoting: no text from outside acts on a terminal or is longer than the buffer. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "config/quote.h"
#include "fakes/run_suite.h"

START_TEST(quotes_and_escapes)
{
    static const struct {
        const char *text;
        const char *quoted;
    } cases[] = {
        {"", "\"\""},
        {"plain name", "\"plain name\""},
        {"say \"x\\y\"", "\"say \\\"x\\\\y\\\"\""},
        {"caf\xc3\xa9 \xf0\x9f\x98\x80", "\"caf\xc3\xa9 \xf0\x9f\x98\x80\""},
        {"\x1b[31m\n\t\x7f", "\"\\x1b[31m\\x0a\\x09\\x7f\""},
        {"\xc2\x9b\xc2\xa0", "\"\\xc2\\x9b\xc2\xa0\""}, /* The control sequence introducer of eight bits. */
        {"a\xff\xc3", "\"a\\xff\\xc3\""},
        {"\xed\xa0\x80", "\"\\xed\\xa0\\x80\""},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        char buffer[TL_QUOTE_BYTES];
        ck_assert_str_eq(tl_quote(cases[i].text, buffer), cases[i].quoted);
    }
}
END_TEST

START_TEST(long_texts_are_cut_between_characters)
{
    char text[80], buffer[TL_QUOTE_BYTES], expected[TL_QUOTE_BYTES];
    memset(text, 'a', 64);
    text[64] = '\0';
    sprintf(expected, "\"%s\"", text);
    ck_assert_str_eq(tl_quote(text, buffer), expected);
    strcpy(text + 63, "\xc3\xa9");
    sprintf(expected, "\"%.63s...\"", text);
    ck_assert_str_eq(tl_quote(text, buffer), expected);
}
END_TEST

START_TEST(the_longest_result_fits)
{
    char text[400], buffer[TL_QUOTE_BYTES];
    memset(text, '\x01', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    ck_assert_uint_eq(strlen(tl_quote(text, buffer)), 64 * 4 + 5);
    memset(text, '"', sizeof(text) - 1);
    ck_assert_uint_eq(strlen(tl_quote(text, buffer)), 64 * 2 + 5);
}
END_TEST

START_TEST(bare_keeps_quotes_and_respects_the_capacity)
{
    char buffer[16];
    ck_assert_str_eq(tl_quote_bare("a \"b\" \\ \n", buffer, sizeof(buffer)), "a \"b\" \\ \\x0a");
    ck_assert_str_eq(tl_quote_bare("0123456789abcdefgh", buffer, sizeof(buffer)), "0123456789ab");
    ck_assert_str_eq(tl_quote_bare("\x01\x02\x03\x04\x05", buffer, sizeof(buffer)), "\\x01\\x02\\x03");
    ck_assert_str_eq(tl_quote_bare("", buffer, sizeof(buffer)), "");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("quote");
    TCase *tcase = tcase_create("quote");
    tcase_add_test(tcase, quotes_and_escapes);
    tcase_add_test(tcase, long_texts_are_cut_between_characters);
    tcase_add_test(tcase, the_longest_result_fits);
    tcase_add_test(tcase, bare_keeps_quotes_and_respects_the_capacity);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
