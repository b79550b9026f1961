// SPDX-License-Identifier: Apache-2.0
/* Text from outside: UTF-8, sizes, durations, nearest names, patterns. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/text.h"
#include "fakes/run_suite.h"

static bool is_utf8(const char *text)
{
    return tl_text_is_utf8(text, strlen(text));
}

START_TEST(utf8_accepts_valid)
{
    ck_assert(is_utf8(""));
    ck_assert(is_utf8("plain"));
    ck_assert(is_utf8("caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"));
    ck_assert(is_utf8("\xc2\x80"));
    ck_assert(is_utf8("\xed\x9f\xbf\xee\x80\x80"));
    ck_assert(is_utf8("\xf4\x8f\xbf\xbf"));
}
END_TEST

START_TEST(utf8_refuses_invalid)
{
    static const char *const bad[] = {
        "\x80",         "\xc3",         "\xc0\x80",         "\xc1\xbf",         "\xe0\x80\x80",     "\xe0\x9f\xbf",
        "\xed\xa0\x80", "\xed\xbf\xbf", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xe2\x82",
        "\xff",         "a\xc3(",       "\xe2\x28\xa1",     "\xf0\x9f\x98(",
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(bad); i++)
        ck_assert_msg(!is_utf8(bad[i]), "number %zu was accepted", i);
    ck_assert(!tl_text_is_utf8("a\0b", 3));
    /* The length counts, not the bytes behind it. */
    ck_assert(!tl_text_is_utf8("\xc3\xa9", 1));
}
END_TEST

START_TEST(utf8_char_len)
{
    ck_assert_uint_eq(tl_text_utf8_char_len("", 0), 0);
    ck_assert_uint_eq(tl_text_utf8_char_len("\0", 1), 1);
    ck_assert_uint_eq(tl_text_utf8_char_len("\xe2\x82\xacx", 4), 3);
    ck_assert_uint_eq(tl_text_utf8_char_len("\xe2\x82\xacx", 2), 0);
    ck_assert_uint_eq(tl_text_utf8_char_len("\x9f", 1), 0);
}
END_TEST

START_TEST(utf8_is_made)
{
    static const struct {
        const char *from, *to;
    } cases[] = {
        {"", ""},
        {"plain\n", "plain\n"},
        {"caf\xc3\xa9 \xf0\x9f\x98\x80", "caf\xc3\xa9 \xf0\x9f\x98\x80"},
        {"jos\xe9/a", "jos?/a"},
        {"\xed\xa0\x80", "???"},
        {"\xe2\x82", "??"},
        {"\xe2\xc3\xa9\xff", "?\xc3\xa9?"},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        char text[32];
        snprintf(text, sizeof(text), "%s", cases[i].from);
        tl_text_make_utf8(text, strlen(text));
        ck_assert_str_eq(text, cases[i].to);
    }
    /* The length counts, not the bytes behind it. */
    char cut[] = "\xc3\xa9";
    tl_text_make_utf8(cut, 1);
    ck_assert_str_eq(cut, "?\xa9");
}
END_TEST

START_TEST(size_accepts)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {
        {"0", 0},
        {"100", 100},
        {"7B", 7},
        {"4 KiB", 4096},
        {"512MiB", UINT64_C(512) << 20},
        {"512mib", UINT64_C(512) << 20},
        {"1GB", UINT64_C(1000000000)},
        {"1.5KiB", 1536},
        {"1.50 kb", 1500},
        {"0.5TiB", UINT64_C(1) << 39},
        {"1.0", 1},
        {"18446744073709551615", UINT64_MAX},
        {"16777215TiB", UINT64_C(16777215) << 40},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(good); i++) {
        uint64_t bytes = 1234567;
        ck_assert_msg(tl_text_parse_size(good[i].text, &bytes), "%s", good[i].text);
        ck_assert_uint_eq(bytes, good[i].bytes);
    }
}
END_TEST

START_TEST(size_refuses)
{
    static const char *const bad[] = {
        "",
        " ",
        "-1",
        "+1",
        "x",
        "1 ",
        " 1",
        "1.",
        ".5KB",
        "1.5",
        "1.5B",
        "1K",
        "1 M",
        "1MiBs",
        "1Mi B",
        "1.1KiB",
        "0x10",
        "18446744073709551616",
        "16777216TiB",
        "1e3",
        "1..5",
        "1.0.0KB",
        "1\tKiB",
        "KiB",
        "1.0000000000000000001TB",
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(bad); i++) {
        uint64_t bytes = 77;
        ck_assert_msg(!tl_text_parse_size(bad[i], &bytes), "%s", bad[i]);
        ck_assert_uint_eq(bytes, 77);
    }
}
END_TEST

START_TEST(duration_accepts)
{
    static const struct {
        const char *text;
        int64_t ns;
    } good[] = {
        {"0", 0},
        {"0s", 0},
        {"250ms", 250000000},
        {"1s", 1000000000},
        {"1m30s", INT64_C(90000000000)},
        {"1.5h", INT64_C(5400000000000)},
        {"3us", 3000},
        {"7ns", 7},
        {"1.9ns", 1},
        {"1h1m1s1ms1us1ns", INT64_C(3661001001001)},
        {"9223372036854775807ns", INT64_MAX},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(good); i++) {
        int64_t ns = -5;
        ck_assert_msg(tl_text_parse_duration(good[i].text, &ns), "%s", good[i].text);
        ck_assert_int_eq(ns, good[i].ns);
    }
}
END_TEST

START_TEST(duration_refuses)
{
    static const char *const bad[] = {
        "",
        "1",
        "-1s",
        "+1s",
        "s",
        "1 s",
        "1s ",
        "1.s",
        ".5s",
        "1x",
        "1d",
        "1m 30s",
        "00",
        "1mss",
        "1S",
        "1e3s",
        "9223372036854775808ns",
        "2562048h",
        "1s1",
        "99999999999999999999s",
        "9223372036s1s",
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(bad); i++) {
        int64_t ns = 77;
        ck_assert_msg(!tl_text_parse_duration(bad[i], &ns), "%s", bad[i]);
        ck_assert_int_eq(ns, 77);
    }
}
END_TEST

START_TEST(size_is_formatted)
{
    char buffer[32];
    ck_assert_str_eq(tl_text_format_size(0, buffer, sizeof(buffer)), "0 B");
    ck_assert_str_eq(tl_text_format_size(999, buffer, sizeof(buffer)), "999 B");
    ck_assert_str_eq(tl_text_format_size(1000, buffer, sizeof(buffer)), "1.00 KB");
    ck_assert_str_eq(tl_text_format_size(9994, buffer, sizeof(buffer)), "9.99 KB");
    ck_assert_str_eq(tl_text_format_size(9996, buffer, sizeof(buffer)), "10.0 KB");
    ck_assert_str_eq(tl_text_format_size(13100, buffer, sizeof(buffer)), "13.1 KB");
    ck_assert_str_eq(tl_text_format_size(99960, buffer, sizeof(buffer)), "100 KB");
    ck_assert_str_eq(tl_text_format_size(999499, buffer, sizeof(buffer)), "999 KB");
    ck_assert_str_eq(tl_text_format_size(999999, buffer, sizeof(buffer)), "1.00 MB");
    ck_assert_str_eq(tl_text_format_size(553430176, buffer, sizeof(buffer)), "553 MB");
    ck_assert_str_eq(tl_text_format_size(UINT64_MAX, buffer, sizeof(buffer)), "18.4 EB");
    /* A small buffer is not overrun. */
    ck_assert_str_eq(tl_text_format_size(553430176, buffer, 4), "553");
}
END_TEST

START_TEST(duration_is_formatted)
{
    char buffer[32];
    ck_assert_str_eq(tl_text_format_duration(-5, buffer, sizeof(buffer)), "0 ns");
    ck_assert_str_eq(tl_text_format_duration(999, buffer, sizeof(buffer)), "999 ns");
    ck_assert_str_eq(tl_text_format_duration(1500, buffer, sizeof(buffer)), "1.50 us");
    ck_assert_str_eq(tl_text_format_duration(13100000, buffer, sizeof(buffer)), "13.1 ms");
    ck_assert_str_eq(tl_text_format_duration(999999999, buffer, sizeof(buffer)), "1.00 s");
    ck_assert_str_eq(tl_text_format_duration(1520000000, buffer, sizeof(buffer)), "1.52 s");
    ck_assert_str_eq(tl_text_format_duration(INT64_C(245000000000), buffer, sizeof(buffer)), "4m05s");
    ck_assert_str_eq(tl_text_format_duration(INT64_C(7980000000000), buffer, sizeof(buffer)), "2h13m");
    ck_assert_str_eq(tl_text_format_duration(INT64_MAX, buffer, sizeof(buffer)), "2562047h47m");
}
END_TEST

START_TEST(nearest)
{
    static const char *const names[] = {"cluster", "protocol", "timeouts", "limits", "ps"};
    ck_assert_ptr_eq(tl_text_nearest("protocl", names, 5), names[1]);
    ck_assert_ptr_eq(tl_text_nearest("timeout", names, 5), names[2]);
    ck_assert_ptr_eq(tl_text_nearest("limits", names, 5), names[3]);
    ck_assert_ptr_eq(tl_text_nearest("p", names, 5), names[4]);
    ck_assert_ptr_null(tl_text_nearest("something", names, 5));
    ck_assert_ptr_null(tl_text_nearest("qq", names, 5));
    ck_assert_ptr_null(tl_text_nearest("cluster", names, 0));
    ck_assert_ptr_null(tl_text_nearest("", names, 5));
    static const char *const twice[] = {"abcx", "abcy"};
    ck_assert_ptr_eq(tl_text_nearest("abcz", twice, 2), twice[0]);
}
END_TEST

START_TEST(nearest_bounds)
{
    char name[600];
    const char *candidates[] = {name};
    memset(name, 'x', sizeof(name));
    name[512] = '\0';
    ck_assert_ptr_eq(tl_text_nearest(name, candidates, 1), name);
    name[512] = 'x';
    name[599] = '\0';
    ck_assert_ptr_null(tl_text_nearest(name, candidates, 1));
    ck_assert_ptr_null(tl_text_nearest("xx", candidates, 1));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("text");
    TCase *tcase = tcase_create("text");
    tcase_add_test(tcase, utf8_accepts_valid);
    tcase_add_test(tcase, utf8_refuses_invalid);
    tcase_add_test(tcase, utf8_char_len);
    tcase_add_test(tcase, utf8_is_made);
    tcase_add_test(tcase, size_accepts);
    tcase_add_test(tcase, size_refuses);
    tcase_add_test(tcase, duration_accepts);
    tcase_add_test(tcase, duration_refuses);
    tcase_add_test(tcase, size_is_formatted);
    tcase_add_test(tcase, duration_is_formatted);
    tcase_add_test(tcase, nearest);
    tcase_add_test(tcase, nearest_bounds);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
