// SPDX-License-Identifier: Apache-2.0
/* Documents: errors, walking, and how messages are composed. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "config/json_doc.h"
#include "fakes/run_suite.h"

static struct tl_json_doc doc;
static struct tl_error error;

static void open_text(const char *text)
{
    ck_assert_int_eq(tl_json_doc_open(&doc, text, strlen(text), "file.json", &error), TL_OK);
}

static void check_refused(const char *text, size_t len_bytes, const char *message)
{
    /* The copy has exactly this size, so that a sanitizer sees a read beyond it. */
    char *copy = malloc(len_bytes > 0 ? len_bytes : 1);
    memcpy(copy, text, len_bytes);
    ck_assert_int_eq(tl_json_doc_open(&doc, copy, len_bytes, "file.json", &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(error.code, TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, message);
    ck_assert_int_eq(tl_json_doc_open(&doc, copy, len_bytes, "file.json", NULL), TL_INVALID_ARGUMENT);
    free(copy);
}

START_TEST(what_is_no_json_is_refused)
{
    static const struct {
        const char *text;
        const char *message;
    } cases[] = {
        {"", "file.json:1:1: top level: not JSON: '[' or '{' expected near end of file; the text is not complete"},
        {"{\"a\": [1,]}", "file.json:1:10: a: not JSON: unexpected token near ']'; JSON has no comments and no comma "
                          "after the last member"},
        {"{\"a\": 1,\n}", "file.json:2:1: top level: not JSON: string or '}' expected near '}'; JSON has no comments "
                          "and no comma after the last member"},
        {"{\"a\" 1}", "file.json:1:6: a: not JSON: ':' expected near '1'; JSON has no comments and no comma after the "
                      "last member"},
        {"{\"a\": {\"b\": 1", "file.json:1:13: a: not JSON: '}' expected near end of file; the text is not complete"},
        {"{\"a\": 1} {}", "file.json:1:10: top level: not JSON: end of file expected near '{'; the file must contain "
                          "exactly one object"},
        {"{\"a\": [\"\xff\"]}",
         "file.json:1:8: a: not JSON: unable to decode byte 0xff near '\"'; save the file as UTF-8"},
        {"{\"a\": 99999999999999999999}",
         "file.json:1:26: top level: not JSON: too big integer near '99999999999999999999'; write a smaller number"},
        {"{\"a\": \"\\u0000\"}", "file.json:1:14: top level: not JSON: \\u0000 is not allowed without JSON_ALLOW_NUL "
                                 "near '\"\\u0000\"'; remove it"},
        {"\xef\xbb\xbf{}", "file.json:1:1: top level: a byte order mark; save the file without it"},
        {"[]", "file.json:1:1: top level: must be an object, {\"cluster\": ...}, not a list"},
        {"\n {\"a\": [\x1b]}", "file.json:2:9: a: not JSON: invalid token near '\\x1b'; JSON has no comments and no "
                               "comma after the last member"},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        check_refused(cases[i].text, strlen(cases[i].text), cases[i].message);
    }
}
END_TEST

START_TEST(nul_bytes_are_refused)
{
    check_refused("{}\n \0", 5, "file.json:2:2: top level: a NUL byte; save the file as UTF-8");
    check_refused("{\0}\0", 4, "file.json:1:2: top level: a NUL byte; save the file as UTF-8");
}
END_TEST

START_TEST(duplicates_name_both_places)
{
    const char *text = "{\"a\": {\"x.y\": 1,\n  \"b\": 2,\n  \"x\\u002ey\": 3}}";
    check_refused(text, strlen(text),
                  "file.json:3:3: a.\"x.y\": this key appears twice, first on line 1, column 8; keep one");
    text = "{\"\": 1, \"\": 2}";
    check_refused(text, strlen(text),
                  "file.json:1:9: \"\": this key appears twice, first on line 1, column 2; keep one");
}
END_TEST

START_TEST(depth_and_size_are_bounded)
{
    size_t len_bytes = TL_JSON_MAX_BYTES + 1;
    char *text = malloc(len_bytes);
    memset(text, ' ', len_bytes);
    memcpy(text, "{}", 2);
    check_refused(text, len_bytes,
                  "file.json:1:1: top level: larger than 16 MiB; a cluster's configuration is never that large");
    ck_assert_int_eq(tl_json_doc_open(&doc, text, len_bytes - 1, "file.json", &error), TL_OK);
    tl_json_doc_close(&doc);
    memset(text, '[', 100000);
    ck_assert_int_eq(tl_json_doc_open(&doc, text, 100000, "file.json", &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "nest less deeply"));
    free(text);
}
END_TEST

START_TEST(walking_gives_values_with_their_places)
{
    struct tl_json_value child, element, member;
    open_text("{\"z\": [10, 20],\n\"a\": {\"k\": true}, \"m\": 5}");
    struct tl_json_value root = tl_json_root(&doc);
    ck_assert(tl_json_first(&root, &child));
    ck_assert_str_eq(child.key, "z");
    ck_assert_uint_eq(tl_json_line(&child), 1);
    ck_assert(tl_json_first(&child, &element));
    ck_assert_int_eq(json_integer_value(element.json), 10);
    ck_assert_ptr_null(element.key);
    ck_assert(tl_json_next(&child, &element));
    ck_assert_int_eq(json_integer_value(element.json), 20);
    ck_assert_uint_eq(element.index, 1);
    ck_assert(!tl_json_next(&child, &element));
    ck_assert(tl_json_next(&root, &child));
    ck_assert_str_eq(child.key, "a");
    ck_assert_uint_eq(tl_json_line(&child), 2);
    ck_assert(tl_json_member(&child, "k", &member));
    ck_assert(json_is_true(member.json));
    ck_assert(!tl_json_member(&child, "m", &member));
    ck_assert(!tl_json_first(&member, &element));
    ck_assert(tl_json_next(&root, &child));
    ck_assert_str_eq(child.key, "m");
    ck_assert(!tl_json_next(&root, &child));
    /* Lines may be asked for in any order. */
    ck_assert(tl_json_member(&root, "z", &member));
    ck_assert_uint_eq(tl_json_line(&member), 1);
    ck_assert(!tl_json_member(&root, "k", &member));
    tl_json_doc_close(&doc);
}
END_TEST

START_TEST(empty_containers_have_no_children)
{
    struct tl_json_value child, none;
    open_text("{\"a\": {}, \"b\": []}");
    struct tl_json_value root = tl_json_root(&doc);
    TL_JSON_FOREACH(&root, child)
    {
        ck_assert(!tl_json_first(&child, &none));
    }
    tl_json_doc_close(&doc);
}
END_TEST

START_TEST(errors_point_at_value_or_key)
{
    struct tl_json_value member;
    open_text("{\"jobs\":\n  {\"a b\": \"x\"}}");
    struct tl_json_value root = tl_json_root(&doc);
    ck_assert(tl_json_member(&root, "jobs", &member));
    ck_assert(tl_json_first(&member, &member));
    ck_assert_int_eq(tl_json_fail(&member, TL_NOT_FOUND, &error, "is %d", 3), TL_NOT_FOUND);
    ck_assert_str_eq(error.message, "file.json:2:11: jobs.\"a b\": is 3");
    ck_assert_int_eq(error.code, TL_NOT_FOUND);
    ck_assert_int_eq(tl_json_fail_key(&member, TL_INVALID_ARGUMENT, &error, "is %s", "bad"), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "file.json:2:4: jobs.\"a b\": is bad");
    ck_assert_int_eq(tl_json_fail(&root, TL_INVALID_ARGUMENT, &error, "x"), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "file.json:1:1: top level: x");
    ck_assert_int_eq(tl_json_expect(&member, JSON_STRING, "a string", &error), TL_OK);
    ck_assert_int_eq(tl_json_expect(&member, JSON_ARRAY, "a list", &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "file.json:2:11: jobs.\"a b\": must be a list, not a string");
    tl_json_doc_close(&doc);
}
END_TEST

START_TEST(unknown_names_get_the_nearest_or_the_list)
{
    static const char *const names[] = {"chunk", "inflight"};
    struct tl_json_value member;
    open_text("{\"chnk\": 1, \"zzzzzzzz\": 2}");
    struct tl_json_value root = tl_json_root(&doc);
    ck_assert(tl_json_first(&root, &member));
    ck_assert_int_eq(tl_json_fail_unknown_key(&member, "setting", names, 2, &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "file.json:1:2: chnk: there is no setting \"chnk\"; did you mean \"chunk\"?");
    ck_assert(tl_json_next(&root, &member));
    ck_assert_int_eq(tl_json_fail_unknown_key(&member, "setting", names, 2, &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message,
                     "file.json:1:13: zzzzzzzz: there is no setting \"zzzzzzzz\"; use one of \"chunk\", \"inflight\"");
    tl_json_doc_close(&doc);
}
END_TEST

START_TEST(suggestions_fit_their_buffer)
{
    const char *names[20];
    char text[64], long_name[2000];
    for (size_t i = 0; i < 20; i++) {
        names[i] = "candidate";
    }
    tl_json_suggest("zzzzzzzzzzzzzzzzzzz", names, 20, text, sizeof(text));
    ck_assert_uint_lt(strlen(text), sizeof(text));
    ck_assert_int_eq(strncmp(text, "use one of \"candidate\", ", 24), 0);
    memset(long_name, 'c', sizeof(long_name) - 1);
    long_name[sizeof(long_name) - 1] = '\0';
    ck_assert_str_eq(tl_json_suggest(long_name, names, 1, text, sizeof(text)), "use \"candidate\"");
}
END_TEST

START_TEST(long_sources_are_shown_from_their_end)
{
    char source[1001];
    memset(source, 'd', 1000);
    strcpy(source + 990, "/file.json");
    ck_assert_int_eq(tl_json_doc_open(&doc, "[]", 2, source, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "d/file.json:1:1: top level: must be an object"));
    ck_assert_uint_lt(strlen(error.message), 400);
    /* The cut is between characters. */
    strcpy(source, "\xc3\xa9");
    memset(source + 2, 'x', 255);
    source[257] = '\0';
    ck_assert_str_eq(tl_json_shown_source(source), source + 2);
}
END_TEST

START_TEST(every_type_has_a_name)
{
    static const char *const names[] = {"an object", "a list", "a string", "a number",
                                        "a number",  "true",   "false",    "null"};
    struct tl_json_value root, child;
    size_t i = 0;
    open_text("{\"a\": {}, \"b\": [], \"c\": \"\", \"d\": 1, \"e\": 1.5, \"f\": true, \"g\": false, \"h\": null}");
    root = tl_json_root(&doc);
    TL_JSON_FOREACH(&root, child)
    {
        ck_assert_str_eq(tl_json_type_name(child.json), names[i++]);
    }
    ck_assert_uint_eq(i, TL_ARRAY_COUNT(names));
    tl_json_doc_close(&doc);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("json_doc");
    TCase *tcase = tcase_create("json_doc");
    tcase_add_test(tcase, what_is_no_json_is_refused);
    tcase_add_test(tcase, nul_bytes_are_refused);
    tcase_add_test(tcase, duplicates_name_both_places);
    tcase_add_test(tcase, depth_and_size_are_bounded);
    tcase_add_test(tcase, walking_gives_values_with_their_places);
    tcase_add_test(tcase, empty_containers_have_no_children);
    tcase_add_test(tcase, errors_point_at_value_or_key);
    tcase_add_test(tcase, unknown_names_get_the_nearest_or_the_list);
    tcase_add_test(tcase, suggestions_fit_their_buffer);
    tcase_add_test(tcase, long_sources_are_shown_from_their_end);
    tcase_add_test(tcase, every_type_has_a_name);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
