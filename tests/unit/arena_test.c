// SPDX-License-Identifier: Apache-2.0
/* Arena: zeroed, aligned, separate objects; no memory is NULL. */
#include <check.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "config/arena.h"
#include "fakes/run_suite.h"

static bool is_filled(const unsigned char *object, size_t size_bytes, unsigned char value)
{
    for (size_t i = 0; i < size_bytes; i++) {
        if (object[i] != value) return false;
    }
    return true;
}

START_TEST(memory_is_zeroed_aligned_and_separate)
{
    struct tl_arena *arena = tl_arena_create();
    ck_assert_ptr_nonnull(arena);
    unsigned char *objects[600];
    for (size_t i = 0; i < 600; i++) {
        size_t size_bytes = i * 7;
        objects[i] = tl_arena_alloc(arena, size_bytes);
        ck_assert_ptr_nonnull(objects[i]);
        ck_assert_uint_eq((uintptr_t)objects[i] % 16, 0);
        ck_assert(is_filled(objects[i], size_bytes, 0));
        memset(objects[i], (int)(i % 251) + 1, size_bytes);
    }
    for (size_t i = 0; i < 600; i++) {
        ck_assert(is_filled(objects[i], i * 7, (unsigned char)(i % 251 + 1)));
    }
    tl_arena_destroy(arena);
}
END_TEST

START_TEST(zero_bytes_are_an_object)
{
    struct tl_arena *arena = tl_arena_create();
    void *first = tl_arena_alloc(arena, 0);
    void *second = tl_arena_alloc(arena, 0);
    ck_assert_ptr_nonnull(first);
    ck_assert_ptr_ne(first, second);
    tl_arena_destroy(arena);
}
END_TEST

START_TEST(sizes_that_do_not_fit_are_refused)
{
    struct tl_arena *arena = tl_arena_create();
    ck_assert_ptr_null(tl_arena_alloc(arena, SIZE_MAX));
    ck_assert_ptr_null(tl_arena_alloc_array(arena, SIZE_MAX / 2, 3));
    ck_assert_ptr_nonnull(tl_arena_alloc_array(arena, 3, 5));
    tl_arena_destroy(arena);
}
END_TEST

START_TEST(format_writes_the_whole_text)
{
    struct tl_arena *arena = tl_arena_create();
    char *long_text = tl_arena_format(arena, "%09999d|", 7);
    char *text = tl_arena_format(arena, "%s:%u", "name", 3u);
    ck_assert_uint_eq(strlen(long_text), 10000);
    ck_assert_int_eq(long_text[9999], '|');
    ck_assert_str_eq(text, "name:3");
    tl_arena_destroy(arena);
}
END_TEST

START_TEST(null_can_be_destroyed)
{
    tl_arena_destroy(NULL);
}
END_TEST

static size_t allowed;

static void *limited_malloc(size_t size_bytes)
{
    if (allowed == 0) return NULL;
    allowed--;
    return malloc(size_bytes);
}

START_TEST(no_memory_is_null_and_the_arena_goes_on)
{
    json_set_alloc_funcs(limited_malloc, free);
    allowed = 0;
    ck_assert_ptr_null(tl_arena_create());
    allowed = 1;
    struct tl_arena *arena = tl_arena_create();
    ck_assert_ptr_nonnull(arena);
    ck_assert_ptr_null(tl_arena_alloc(arena, 1));
    ck_assert_ptr_null(tl_arena_alloc(arena, 100000));
    ck_assert_ptr_null(tl_arena_format(arena, "text"));
    allowed = 1;
    ck_assert_ptr_nonnull(tl_arena_alloc(arena, 1));
    tl_arena_destroy(arena);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("arena");
    TCase *tcase = tcase_create("arena");
    tcase_add_test(tcase, memory_is_zeroed_aligned_and_separate);
    tcase_add_test(tcase, zero_bytes_are_an_object);
    tcase_add_test(tcase, sizes_that_do_not_fit_are_refused);
    tcase_add_test(tcase, format_writes_the_whole_text);
    tcase_add_test(tcase, null_can_be_destroyed);
    tcase_add_test(tcase, no_memory_is_null_and_the_arena_goes_on);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
