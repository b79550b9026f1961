// SPDX-License-Identifier: Apache-2.0
/* Objects by hash: compared with an array, in any order of adding and removing; without memory chains become longer up
 * to a limit, and then nothing changes. */
#include <check.h>

#include "fakes/fault_alloc.h"

#include "base/hash_table.c"
#include "fakes/run_suite.h"

#define OBJECTS 5000

static struct tl_hash_link objects[OBJECTS];
static bool is_in[OBJECTS];
static struct tl_hash_table table;

/* Some hashes are those of several objects, and many end with the same bits. */
static uint32_t hash_of(size_t i)
{
    return i % 3 == 0 ? (uint32_t)i / 9 : (uint32_t)i << 10;
}

static bool is_found(size_t i)
{
    struct tl_hash_link *link = tl_hash_table_find(&table, hash_of(i));
    while (link != NULL && link != &objects[i])
        link = tl_hash_table_another(link);
    return link != NULL;
}

static void expect_same(void)
{
    size_t count = 0, met_count = 0;
    for (size_t i = 0; i < OBJECTS; i++) {
        ck_assert(is_found(i) == is_in[i]);
        count += is_in[i];
    }
    for (const struct tl_hash_link *link = tl_hash_table_first(&table); link != NULL;
         link = tl_hash_table_after(&table, link)) {
        ck_assert(is_in[link - objects]);
        met_count++;
    }
    ck_assert_uint_eq(table.count, count);
    ck_assert_uint_eq(met_count, count);
}

START_TEST(empty_table_needs_no_memory)
{
    ck_assert_ptr_null(tl_hash_table_find(&table, 1));
    ck_assert_ptr_null(tl_hash_table_first(&table));
    ck_assert_ptr_null(table.chains);
}
END_TEST

START_TEST(finds_what_was_added_and_not_removed)
{
    uint64_t random = 1;
    for (size_t step = 0; step < 20000; step++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        size_t i = (size_t)(random >> 33) % OBJECTS;
        if (is_in[i]) {
            tl_hash_table_remove(&table, &objects[i]);
        } else {
            ck_assert(tl_hash_table_add(&table, &objects[i], hash_of(i)));
        }
        is_in[i] = !is_in[i];
        if (step % 1000 == 0) expect_same();
    }
    expect_same();
    ck_assert_uint_le(table.count, USUAL_CHAIN * table.chain_count);
    ck_assert_uint_gt(table.count, USUAL_CHAIN * table.chain_count / 4);
    tl_hash_table_fini(&table);
}
END_TEST

START_TEST(removed_while_all_are_visited)
{
    struct tl_hash_link *next;
    for (size_t i = 0; i < OBJECTS; i++)
        is_in[i] = tl_hash_table_add(&table, &objects[i], hash_of(i));
    for (struct tl_hash_link *link = tl_hash_table_first(&table); link != NULL; link = next) {
        next = tl_hash_table_after(&table, link);
        tl_hash_table_remove(&table, link);
        is_in[link - objects] = false;
    }
    expect_same();
    ck_assert_uint_eq(table.count, 0);
    ck_assert_ptr_null(table.chains); /* it was large */
}
END_TEST

static bool add_without_memory(size_t i)
{
    fault_arm(1);
    bool is_added = tl_hash_table_add(&table, &objects[i], hash_of(i));
    (void)fault_was_hit();
    return is_added;
}

START_TEST(without_memory)
{
    size_t i = 1;
    ck_assert(!add_without_memory(0));
    expect_same();
    is_in[0] = tl_hash_table_add(&table, &objects[0], hash_of(0));
    ck_assert(is_in[0]);
    while (add_without_memory(i))
        is_in[i++] = true;
    ck_assert_uint_eq(i, LONGEST_CHAIN * FIRST_CHAINS);
    expect_same();
    is_in[i] = tl_hash_table_add(&table, &objects[i], hash_of(i));
    ck_assert(is_in[i]);
    expect_same();
    tl_hash_table_fini(&table);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("hash_table");
    TCase *tcase = tcase_create("hash_table");
    tcase_add_test(tcase, empty_table_needs_no_memory);
    tcase_add_test(tcase, finds_what_was_added_and_not_removed);
    tcase_add_test(tcase, removed_while_all_are_visited);
    tcase_add_test(tcase, without_memory);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
