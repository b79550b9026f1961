// SPDX-License-Identifier: Apache-2.0
/* The scanner: every value's place and path, in texts that are whole, cut, or no JSON at all. */
#include <check.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "config/json_place.h"
#include "fakes/run_suite.h"

static struct tl_json_places places;

static void scan(const char *text)
{
    ck_assert(tl_json_places_init(&places, text, strlen(text)));
}

/* Returns the node whose path is this. */
static uint32_t node_at(const char *path)
{
    char buffer[TL_JSON_PATH_BYTES];
    for (uint32_t node = 0; node < places.count; node++) {
        if (strcmp(tl_json_places_path(&places, node, buffer), path) == 0) return node;
    }
    ck_abort_msg("there is no %s", path);
    return 0;
}

static void check_place(const char *path, unsigned key_line, unsigned key_column, unsigned line, unsigned column)
{
    unsigned got_line, got_column;
    const struct tl_json_node *node = &places.nodes[node_at(path)];
    tl_json_locate(places.text, node->value, &got_line, &got_column);
    ck_assert_msg(got_line == line && got_column == column, "%s: value at %u:%u", path, got_line, got_column);
    if (key_line == 0) {
        ck_assert_uint_eq(node->key, TL_JSON_NONE);
        return;
    }
    tl_json_locate(places.text, node->key, &got_line, &got_column);
    ck_assert_msg(got_line == key_line && got_column == key_column, "%s: key at %u:%u", path, got_line, got_column);
}

START_TEST(every_value_has_a_place)
{
    scan("{ \"a\": 1,\n"
         "  \"b\" : [true, null , -1.5e3,\"x\"],\n"
         "  \"c\":{\"d\":{}, \"e\":[]\n"
         ",\"f\":\n"
         "[[7]]}}\n");
    check_place("top level", 0, 0, 1, 1);
    check_place("a", 1, 3, 1, 8);
    check_place("b", 2, 3, 2, 9);
    check_place("b[0]", 0, 0, 2, 10);
    check_place("b[1]", 0, 0, 2, 16);
    check_place("b[2]", 0, 0, 2, 23);
    check_place("b[3]", 0, 0, 2, 30);
    check_place("c", 3, 3, 3, 7);
    check_place("c.d", 3, 8, 3, 12);
    check_place("c.e", 3, 16, 3, 20);
    check_place("c.f", 4, 2, 5, 1);
    check_place("c.f[0]", 0, 0, 5, 2);
    check_place("c.f[0][0]", 0, 0, 5, 3);
    ck_assert_uint_eq(places.count, 13);
    ck_assert_uint_eq(places.open, TL_JSON_NONE);
    tl_json_places_fini(&places);
}
END_TEST

START_TEST(columns_count_characters)
{
    scan("{\"\xc3\xa9\xf0\x9f\x98\x80\": \"\xe2\x82\xac\", \"b\": 2}");
    check_place("b", 1, 13, 1, 18);
    tl_json_places_fini(&places);
}
END_TEST

START_TEST(strings_hide_what_looks_like_structure)
{
    scan("{\"a\\\"}]{[\": \"}\\\\\", \"b\\\\\": [\"]\", \"\\\"\"], \"c\": 3}");
    check_place("c", 1, 40, 1, 45);
    check_place("\"b\\\\\"[1]", 0, 0, 1, 33);
    check_place("\"a\\\"}]{[\"", 1, 2, 1, 13);
    tl_json_places_fini(&places);
}
END_TEST

START_TEST(keys_that_are_no_words_are_quoted_in_paths)
{
    char path[TL_JSON_PATH_BYTES];
    scan("{\"odd.name\": {\"0\": {\"\": 1}}, \"\\u0070s\": 2, \"a-b_C$\": 3, \"\\u001b[0m\": 4}");
    ck_assert_str_eq(tl_json_places_path(&places, 1, path), "\"odd.name\"");
    ck_assert_str_eq(tl_json_places_path(&places, 2, path), "\"odd.name\".0");
    ck_assert_str_eq(tl_json_places_path(&places, 3, path), "\"odd.name\".0.\"\"");
    ck_assert_str_eq(tl_json_places_path(&places, 4, path), "ps");
    ck_assert_str_eq(tl_json_places_path(&places, 5, path), "a-b_C$");
    ck_assert_str_eq(tl_json_places_path(&places, 6, path), "\"\\x1b[0m\"");
    ck_assert_str_eq(tl_json_places_path(&places, 7, path), "top level");
    tl_json_places_fini(&places);
}
END_TEST

START_TEST(long_and_deep_paths_are_cut)
{
    char text[4096] = "", path[TL_JSON_PATH_BYTES];
    for (size_t i = 0; i < 40; i++) {
        sprintf(text + strlen(text), "{\"k%zu\":", i);
    }
    strcat(text, "1");
    scan(text);
    ck_assert_str_eq(tl_json_places_path(&places, places.count - 1, path),
                     "...k28.k29.k30.k31.k32.k33.k34.k35.k36.k37.k38.k39");
    tl_json_places_fini(&places);

    text[0] = '\0';
    for (size_t i = 0; i < 12; i++) {
        sprintf(text + strlen(text), "{\"%0100zu\":", i);
    }
    strcat(text, "1");
    scan(text);
    tl_json_places_path(&places, places.count - 1, path);
    ck_assert_uint_lt(strlen(path), sizeof(path));
    ck_assert_str_eq(path + strlen(path) - 7, "...\"...");
    tl_json_places_fini(&places);
}
END_TEST

START_TEST(siblings)
{
    scan("{\"a\": [1, {\"x\": 2}, 3], \"b\": {}, \"c\": 4}");
    uint32_t a = tl_json_places_first(&places, 0);
    ck_assert_uint_eq(a, node_at("a"));
    ck_assert_uint_eq(tl_json_places_next(&places, a), node_at("b"));
    ck_assert_uint_eq(tl_json_places_next(&places, node_at("b")), node_at("c"));
    ck_assert_uint_eq(tl_json_places_next(&places, node_at("c")), TL_JSON_NONE);
    ck_assert_uint_eq(tl_json_places_first(&places, node_at("b")), TL_JSON_NONE);
    ck_assert_uint_eq(tl_json_places_first(&places, node_at("c")), TL_JSON_NONE);
    ck_assert_uint_eq(tl_json_places_first(&places, a), node_at("a[0]"));
    ck_assert_uint_eq(tl_json_places_next(&places, node_at("a[1]")), node_at("a[2]"));
    ck_assert_uint_eq(tl_json_places_next(&places, node_at("a[1].x")), TL_JSON_NONE);
    ck_assert_uint_eq(tl_json_places_next(&places, 0), TL_JSON_NONE);
    ck_assert_uint_eq(tl_json_places_first(&places, 99), TL_JSON_NONE);
    ck_assert_uint_eq(tl_json_places_next(&places, 99), TL_JSON_NONE);
    tl_json_places_fini(&places);
}
END_TEST

START_TEST(the_same_key_is_found_however_it_is_written)
{
    scan("{\"ps\": {\"x\": 1}, \"x\": 2, \"\\u0070s\"");
    ck_assert_uint_eq(tl_json_places_find_same_key(&places, 4), 1);
    ck_assert_uint_eq(tl_json_places_find_same_key(&places, 3), TL_JSON_NONE);
    ck_assert_uint_eq(tl_json_places_find_same_key(&places, 0), TL_JSON_NONE);
    tl_json_places_fini(&places);
}
END_TEST

START_TEST(a_cut_text_tells_what_is_open)
{
    static const struct {
        const char *text;
        const char *open;
    } cases[] = {
        {"{\"a\": {\"b\": [1, ", "a.b"},
        {"{\"a\": {\"b\"", "a.b"},
        {"{\"a\": {\"b\":", "a.b"},
        {"{\"a\": {\"b\": 1", "a"},
        {"{\"a\": {\"b\": 1}", "top level"},
        {"{", "top level"},
        {"", "top level"},
        {"[[1], [2, [", "[1][1]"},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        char path[TL_JSON_PATH_BYTES];
        scan(cases[i].text);
        ck_assert_str_eq(tl_json_places_path(&places, places.open, path), cases[i].open);
        tl_json_places_fini(&places);
    }
}
END_TEST

START_TEST(text_that_is_no_json_does_no_harm)
{
    static const char *const texts[] = {
        "}}}]]]",     "\"",   "\"\\", "{\"a\" \"b\" \"c\"", "{]", "[}", "{1:2,3}", "1 2 3", "\\\\\\",
        "{\"a\": \"", "{{{{", ":,:,", "{\"a\":}1{\"b\"}",
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(texts); i++) {
        /* The copy has exactly this size, so that a sanitizer sees a read beyond it. */
        size_t len_bytes = strlen(texts[i]);
        char *copy = malloc(len_bytes);
        memcpy(copy, texts[i], len_bytes);
        ck_assert(tl_json_places_init(&places, copy, len_bytes));
        for (uint32_t node = 0; node < places.count; node++) {
            char path[TL_JSON_PATH_BYTES];
            ck_assert_uint_lt(strlen(tl_json_places_path(&places, node, path)), sizeof(path));
            ck_assert_uint_gt(places.nodes[node].end, node);
            ck_assert_uint_le(places.nodes[node].end, places.count);
        }
        tl_json_places_fini(&places);
        free(copy);
    }
}
END_TEST

static size_t allowed;

static void *limited_malloc(size_t size_bytes)
{
    if (allowed == 0) return NULL;
    allowed--;
    return malloc(size_bytes);
}

START_TEST(no_memory)
{
    char text[2048];
    memset(text, '[', sizeof(text));
    json_set_alloc_funcs(limited_malloc, free);
    for (size_t count = 0; count < 4; count++) {
        allowed = count;
        ck_assert(!tl_json_places_init(&places, text, sizeof(text)));
        ck_assert_ptr_null(places.nodes);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("json_place");
    TCase *tcase = tcase_create("json_place");
    tcase_add_test(tcase, every_value_has_a_place);
    tcase_add_test(tcase, columns_count_characters);
    tcase_add_test(tcase, strings_hide_what_looks_like_structure);
    tcase_add_test(tcase, keys_that_are_no_words_are_quoted_in_paths);
    tcase_add_test(tcase, long_and_deep_paths_are_cut);
    tcase_add_test(tcase, siblings);
    tcase_add_test(tcase, the_same_key_is_found_however_it_is_written);
    tcase_add_test(tcase, a_cut_text_tells_what_is_open);
    tcase_add_test(tcase, text_that_is_no_json_does_no_harm);
    tcase_add_test(tcase, no_memory);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
