// SPDX-License-Identifier: Apache-2.0
/* The meta-data cache: what it finds, what it forgets first, copies, and allocations that fail. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "tests/fakes/fault_alloc.h"

#include "dataplane/engine/meta_cache.c"
#include "fakes/run_suite.h"

static struct tl_meta_cache *cache;
static struct tl_meta_cached found;

static void open_cache(uint32_t capacity)
{
    ck_assert_int_eq(tl_meta_cache_create(capacity, &cache, NULL), TL_OK);
}

static void teardown(void)
{
    tl_meta_cache_destroy(cache);
    cache = NULL;
}

static void put(const char *key, uint64_t dim)
{
    const struct tl_meta_cached cached = {
        .meta_data = {.dtype = TL_U8, .shape = {.rank = 1, .dims = {dim}}, .size_bytes = dim},
        .step = dim + 1,
        .is_published = dim % 2 == 1,
        .is_mapped = dim % 2 == 1};
    tl_meta_cache_put(cache, key, &cached);
}

static bool has(const char *key)
{
    return tl_meta_cache_find(cache, key, &found);
}

START_TEST(found_as_put)
{
    open_cache(4);
    ck_assert(!has("a"));
    put("a", 5);
    ck_assert(has("a"));
    ck_assert_uint_eq(found.meta_data.shape.dims[0], 5);
    ck_assert_uint_eq(found.meta_data.size_bytes, 5);
    ck_assert_uint_eq(found.step, 6);
    ck_assert(found.is_published && found.is_mapped);
    ck_assert(!has("ab"));
    ck_assert(!has(""));
    put("a", 6);
    ck_assert(has("a"));
    ck_assert_uint_eq(found.step, 7);
    ck_assert(!found.is_published);
    ck_assert_uint_eq(tl_meta_cache_count(cache), 1);
}
END_TEST

START_TEST(entries_are_copies)
{
    char key[] = "key";
    open_cache(4);
    put(key, 5);
    key[0] = 'x';
    ck_assert(has("key"));
    found.meta_data.size_bytes = 77;
    ck_assert(has("key"));
    ck_assert_uint_eq(found.meta_data.size_bytes, 5);
}
END_TEST

START_TEST(least_recently_used_goes_first)
{
    open_cache(3);
    put("a", 1);
    put("b", 2);
    put("c", 3);
    ck_assert(has("a")); /* Used by a find. */
    put("b", 4);         /* Used by a put. */
    put("d", 5);
    ck_assert_uint_eq(tl_meta_cache_count(cache), 3);
    ck_assert(!has("c"));
    ck_assert(has("a") && has("b") && has("d"));
}
END_TEST

/* The steps come in order, out of order, and for missing keys. */
START_TEST(found_in_any_order)
{
    static const char *const orders[] = {"abcd", "abcd", "dcba", "bbda", "xaxb", "cxdc"};
    open_cache(4);
    for (unsigned i = 0; i < 4; i++)
        put((const char[]){(char)('a' + i), '\0'}, i + 1);
    for (unsigned i = 0; i < sizeof(orders) / sizeof(orders[0]); i++) {
        for (const char *c = orders[i]; *c != '\0'; c++) {
            bool is_there = has((const char[]){*c, '\0'});
            ck_assert_int_eq(is_there, *c != 'x');
            if (is_there) ck_assert_uint_eq(found.meta_data.size_bytes, (uint64_t)(*c - 'a' + 1));
        }
    }
}
END_TEST

START_TEST(bounded)
{
    char key[16];
    open_cache(100);
    for (unsigned i = 0; i < 1000; i++) {
        snprintf(key, sizeof(key), "key%u", i);
        put(key, i);
        ck_assert_uint_eq(tl_meta_cache_count(cache), i < 100 ? i + 1 : 100);
    }
    ck_assert(has("key999") && has("key900") && !has("key899"));
}
END_TEST

START_TEST(capacities)
{
    open_cache(0);
    put("a", 1);
    ck_assert(!has("a"));
    ck_assert_uint_eq(tl_meta_cache_count(cache), 0);
    tl_meta_cache_destroy(cache);
    open_cache(1);
    put("a", 1);
    put("b", 2);
    ck_assert(!has("a") && has("b"));
}
END_TEST

START_TEST(destroy_takes_null)
{
    tl_meta_cache_destroy(NULL);
}
END_TEST

START_TEST(create_without_memory)
{
    struct tl_error error;
    fault_arm(1);
    ck_assert_int_eq(tl_meta_cache_create(4, &cache, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_int_eq(error.code, TL_RESOURCE_EXHAUSTED);
    ck_assert(fault_was_hit());
    ck_assert_ptr_null(cache);
}
END_TEST

/* The cache stays usable after any failure: it has nothing that was not put, and loses only what had to go. */
START_TEST(put_without_memory)
{
    bool was_hit = true;
    for (unsigned number = 1; was_hit; number++) {
        char key[16];
        unsigned remembered = 0;
        open_cache(64);
        fault_arm(number);
        for (unsigned i = 0; i < 200; i++) {
            snprintf(key, sizeof(key), "key%u", i);
            put(key, i);
        }
        was_hit = fault_was_hit();
        for (unsigned i = 0; i < 200; i++) {
            snprintf(key, sizeof(key), "key%u", i);
            if (!has(key)) continue;
            ck_assert_uint_eq(found.meta_data.size_bytes, i);
            remembered++;
        }
        ck_assert_uint_eq(remembered, tl_meta_cache_count(cache));
        ck_assert_uint_ge(remembered, 63);
        teardown();
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("meta_cache");
    TCase *tcase = tcase_create("meta_cache");
    tcase_add_checked_fixture(tcase, NULL, teardown);
    tcase_add_test(tcase, found_as_put);
    tcase_add_test(tcase, entries_are_copies);
    tcase_add_test(tcase, least_recently_used_goes_first);
    tcase_add_test(tcase, found_in_any_order);
    tcase_add_test(tcase, bounded);
    tcase_add_test(tcase, capacities);
    tcase_add_test(tcase, destroy_takes_null);
    tcase_add_test(tcase, create_without_memory);
    tcase_add_test(tcase, put_without_memory);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
