// SPDX-License-Identifier: Apache-2.0
/* Tests of the JSON that commands print. */
#include <check.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/run_suite.h"
#include "server/cli/json_out.h"

/* Parses the text of json. */
static json_t *reread(struct tl_json_out *json)
{
    char *text = tl_json_out_text(json, false);
    ck_assert_ptr_nonnull(text);
    json_t *read = json_loads(text, 0, NULL);
    free(text);
    ck_assert_ptr_nonnull(read);
    return read;
}

START_TEST(every_type_is_written)
{
    struct tl_json_out *root = tl_json_out_object();
    tl_json_out_put_text(root, "text", "a\"b\n");
    tl_json_out_put_u64(root, "number", INT64_MAX);
    tl_json_out_put_real(root, "real", 1.5);
    tl_json_out_put_bool(root, "yes", true);
    tl_json_out_put_json(root, "list", "[1, 2]");
    tl_json_out_put_json(root, "word", "\"1MiB\"");
    tl_json_out_put_incarnation(root, "incarnation", UINT64_MAX);
    json_t *read = reread(root);
    ck_assert_str_eq(json_string_value(json_object_get(read, "text")), "a\"b\n");
    ck_assert(json_integer_value(json_object_get(read, "number")) == INT64_MAX);
    ck_assert(json_real_value(json_object_get(read, "real")) == 1.5);
    ck_assert(json_is_true(json_object_get(read, "yes")));
    ck_assert_uint_eq(json_array_size(json_object_get(read, "list")), 2);
    ck_assert_str_eq(json_string_value(json_object_get(read, "word")), "1MiB");
    ck_assert_str_eq(json_string_value(json_object_get(read, "incarnation")), "0xffffffffffffffff");
    json_decref(read);
}
END_TEST

START_TEST(numbers_that_are_too_large_are_texts)
{
    struct tl_json_out *root = tl_json_out_object();
    tl_json_out_put_u64(root, "number", (uint64_t)INT64_MAX + 1);
    json_t *read = reread(root);
    ck_assert_str_eq(json_string_value(json_object_get(read, "number")), "9223372036854775808");
    json_decref(read);
}
END_TEST

START_TEST(text_that_is_not_utf8_is_escaped)
{
    struct tl_json_out *root = tl_json_out_object();
    tl_json_out_put_text(root, "text", "a\xFF");
    tl_json_out_append_text(tl_json_out_put_array(root, "list"), "\xC3");
    tl_json_out_put_json(root, "json", "{broken");
    json_t *read = reread(root);
    ck_assert_str_eq(json_string_value(json_object_get(read, "text")), "a\\xFF");
    ck_assert_str_eq(json_string_value(json_array_get(json_object_get(read, "list"), 0)), "\\xC3");
    ck_assert_str_eq(json_string_value(json_object_get(read, "json")), "{broken");
    json_decref(read);
}
END_TEST

START_TEST(members_are_made_once)
{
    static const char text[] = "{\"jobs\": {\"ps\": {\"checksum\": true}}, \"publish\": [\"x\"]}";
    struct tl_json_out *root = tl_json_out_parse(text, strlen(text));
    ck_assert_ptr_nonnull(root);
    struct tl_json_out *ps = tl_json_out_put_object(tl_json_out_put_object(root, "jobs"), "ps");
    tl_json_out_put_text(ps, "listen", "a:1");
    tl_json_out_append_text(tl_json_out_put_array(root, "publish"), "y");
    tl_json_out_append_text(tl_json_out_put_new_array(root, "other"), "z");
    tl_json_out_append_text(tl_json_out_put_new_array(root, "other"), "new");
    json_t *read = reread(root);
    json_t *job = json_object_get(json_object_get(read, "jobs"), "ps");
    ck_assert(json_is_true(json_object_get(job, "checksum")));
    ck_assert_str_eq(json_string_value(json_object_get(job, "listen")), "a:1");
    ck_assert_uint_eq(json_array_size(json_object_get(read, "publish")), 2);
    ck_assert_uint_eq(json_array_size(json_object_get(read, "other")), 1);
    json_decref(read);
}
END_TEST

START_TEST(what_is_no_object_is_not_read)
{
    ck_assert_ptr_null(tl_json_out_parse("[1]", 3));
    ck_assert_ptr_null(tl_json_out_parse("{", 1));
    ck_assert_ptr_null(tl_json_out_parse("", 0));
}
END_TEST

START_TEST(objects_in_lists)
{
    struct tl_json_out *root = tl_json_out_object();
    struct tl_json_out *list = tl_json_out_put_array(root, "list");
    for (uint64_t i = 0; i < 3; i++)
        tl_json_out_put_u64(tl_json_out_append_object(list), "i", i);
    json_t *read = reread(root);
    json_t *last = json_array_get(json_object_get(read, "list"), 2);
    ck_assert_int_eq(json_integer_value(json_object_get(last, "i")), 2);
    json_decref(read);
}
END_TEST

START_TEST(failed_addition_is_reported)
{
    tl_json_out_put_text(NULL, "key", "text");
    struct tl_json_out *root = tl_json_out_object();
    ck_assert_ptr_null(tl_json_out_text(root, false));
    ck_assert(!tl_json_out_print(tl_json_out_object(), true));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("json_out");
    TCase *tcase = tcase_create("json_out");
    tcase_add_test(tcase, every_type_is_written);
    tcase_add_test(tcase, numbers_that_are_too_large_are_texts);
    tcase_add_test(tcase, text_that_is_not_utf8_is_escaped);
    tcase_add_test(tcase, members_are_made_once);
    tcase_add_test(tcase, what_is_no_object_is_not_read);
    tcase_add_test(tcase, objects_in_lists);
    tcase_add_test(tcase, failed_addition_is_reported);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
