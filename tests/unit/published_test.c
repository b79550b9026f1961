// SPDX-License-Identifier: Apache-2.0
/* Tests of choosing published tensors by patterns. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/run_suite.h"
#include "server/cli/published.h"

static struct tl_listing listing;
static struct tl_error error;

static void setup(void)
{
    static const char *const keys[] = {"a.bias", "a.weight", "b.bias", "scalar"};
    listing.items = calloc(4, sizeof(*listing.items));
    listing.count = 4;
    for (size_t i = 0; i < 4; i++)
        listing.items[i].key = strdup(keys[i]);
}

static void teardown(void)
{
    for (size_t i = 0; i < listing.count; i++)
        free(listing.items[i].key);
    free(listing.items);
    listing = (struct tl_listing){0};
}

/* Selects, and compares the remaining names, in order; NULL ends the list. */
static void assert_selected(const char *const *patterns, size_t pattern_count, const char *const *excluded,
                            size_t excluded_count, const char *const *expected)
{
    size_t count = 0;
    ck_assert_int_eq(tl_published_select(&listing, patterns, pattern_count, excluded, excluded_count, NULL, &error),
                     TL_OK);
    while (expected[count])
        count++;
    ck_assert_uint_eq(listing.count, count);
    for (size_t i = 0; i < count; i++)
        ck_assert_str_eq(listing.items[i].key, expected[i]);
}

START_TEST(no_pattern_is_all)
{
    assert_selected(NULL, 0, NULL, 0, (const char *const[]){"a.bias", "a.weight", "b.bias", "scalar", NULL});
}
END_TEST

START_TEST(any_pattern_is_enough)
{
    assert_selected((const char *const[]){"*.bias", "s*", "scalar"}, 3, NULL, 0,
                    (const char *const[]){"a.bias", "b.bias", "scalar", NULL});
}
END_TEST

START_TEST(excluded_ones_are_left_out)
{
    assert_selected((const char *const[]){"a.*"}, 1, (const char *const[]){"*.bias", "nothing"}, 2,
                    (const char *const[]){"a.weight", NULL});
    assert_selected(NULL, 0, (const char *const[]){"*"}, 1, (const char *const[]){NULL});
}
END_TEST

START_TEST(a_pattern_without_a_match_is_an_error)
{
    const char *const patterns[] = {"*.bias", "a.wieght"};
    size_t unmatched = 7;
    ck_assert_int_eq(tl_published_select(&listing, patterns, 2, NULL, 0, &unmatched, &error), TL_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.message, "'a.wieght'; the nearest is 'a.weight'"));
    ck_assert_uint_eq(unmatched, 1);
    ck_assert_uint_eq(listing.count, 4);
    const char *const far[] = {"zzzzzzzzzzzz"};
    ck_assert_int_eq(tl_published_select(&listing, far, 1, NULL, 0, NULL, &error), TL_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.message, "there are 4 tensors, such as 'a.bias'"));
}
END_TEST

START_TEST(nothing_published_is_said)
{
    struct tl_listing nothing = {0};
    const char *const patterns[] = {"*"};
    ck_assert_int_eq(tl_published_select(&nothing, patterns, 1, NULL, 0, NULL, &error), TL_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.message, "nothing is published at all"));
    ck_assert_int_eq(tl_published_select(&nothing, NULL, 0, NULL, 0, NULL, &error), TL_OK);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("published");
    TCase *tcase = tcase_create("published");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, no_pattern_is_all);
    tcase_add_test(tcase, any_pattern_is_enough);
    tcase_add_test(tcase, excluded_ones_are_left_out);
    tcase_add_test(tcase, a_pattern_without_a_match_is_an_error);
    tcase_add_test(tcase, nothing_published_is_said);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
