// SPDX-License-Identifier: Apache-2.0
/* Objects by number: compared with an array, in any order of adding and removing; without memory nothing changes. */
#include <check.h>

#include "fakes/fault_alloc.h"

#include "base/number_map.c"
#include "fakes/run_suite.h"

#define NUMBERS 5000

static char items[NUMBERS];
static bool is_in[NUMBERS];
static size_t count;

/* Numbers that lie close together, far apart, and at both ends. */
static uint64_t number_of(size_t i)
{
    if (i % 3 == 0) return i;
    return i % 3 == 1 ? (uint64_t)i << 40 : UINT64_MAX - i;
}

static void expect_same(const struct tl_number_map *map)
{
    ck_assert_uint_eq(map->count, count);
    for (size_t i = 0; i < NUMBERS; i++)
        ck_assert_ptr_eq(tl_number_map_find(map, number_of(i)), is_in[i] ? &items[i] : NULL);
}

static void add(struct tl_number_map *map, size_t i)
{
    ck_assert(tl_number_map_add(map, number_of(i), &items[i]));
    is_in[i] = true;
    count++;
}

static void take(struct tl_number_map *map, size_t i)
{
    tl_number_map_remove(map, number_of(i));
    is_in[i] = false;
    count--;
}

START_TEST(empty_map_needs_no_memory)
{
    struct tl_number_map map = {0};
    size_t position = 0;
    ck_assert_ptr_null(tl_number_map_find(&map, 1));
    ck_assert_ptr_null(tl_number_map_next(&map, &position));
    ck_assert_ptr_null(map.slots);
    tl_number_map_fini(&map);
}
END_TEST

START_TEST(finds_what_was_added_and_not_removed)
{
    struct tl_number_map map = {0};
    uint64_t random = 1;
    for (size_t step = 0; step < 20000; step++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        size_t i = (size_t)(random >> 33) % (step < 10000 ? NUMBERS : 100);
        if (is_in[i]) {
            take(&map, i);
        } else {
            add(&map, i);
        }
        if (step % 500 == 0) expect_same(&map);
    }
    expect_same(&map);
    for (size_t i = 0; i < NUMBERS; i++)
        if (is_in[i]) take(&map, i);
    expect_same(&map);
    ck_assert_ptr_null(map.slots); /* it was large */
    tl_number_map_fini(&map);
}
END_TEST

/* Removing while walking meets every object, also those at the beginning that were moved there from the end. */
START_TEST(walks_over_all)
{
    for (size_t round = 0; round < 50; round++) {
        struct tl_number_map map = {0};
        size_t seen = 0, position = 0;
        for (size_t i = 0; i < 16 + round; i++)
            add(&map, i);
        while (tl_number_map_next(&map, &position) != NULL) {
            seen++;
            position++;
        }
        ck_assert_uint_eq(seen, 16 + round);
        position = 0;
        char *item;
        while ((item = tl_number_map_next(&map, &position)) != NULL)
            take(&map, (size_t)(item - items));
        ck_assert_uint_eq(map.count, 0);
        tl_number_map_fini(&map);
    }
}
END_TEST

START_TEST(stays_as_it_is_without_memory)
{
    struct tl_number_map map = {0};
    fault_arm(1);
    ck_assert(!tl_number_map_add(&map, number_of(0), &items[0]));
    ck_assert(fault_was_hit());
    expect_same(&map);
    for (size_t i = 0; i < (1 << FIRST_BITS) / 2; i++)
        add(&map, i);
    fault_arm(1);
    ck_assert(!tl_number_map_add(&map, number_of(100), &items[100]));
    ck_assert(fault_was_hit());
    expect_same(&map);
    add(&map, 100);
    expect_same(&map);
    tl_number_map_fini(&map);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("number_map");
    TCase *tcase = tcase_create("number_map");
    tcase_add_test(tcase, empty_map_needs_no_memory);
    tcase_add_test(tcase, finds_what_was_added_and_not_removed);
    tcase_add_test(tcase, walks_over_all);
    tcase_add_test(tcase, stays_as_it_is_without_memory);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
