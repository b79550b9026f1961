// SPDX-License-Identifier: Apache-2.0
/* The tree of ranks: compared with an array, in any order of adding and removing, with keys that are near each other,
 * far from each other and the same; and few objects are looked at, however many there are. */
#include <check.h>

#include "base/rank_tree.c"
#include "fakes/run_suite.h"

enum { OBJECTS = 500, MANY = 20000, ROUNDS = 20000, MAX_LEVELS = 129 };

static struct tl_rank_link objects[OBJECTS];
static struct tl_rank_link many[MANY];
static struct tl_rank_tree tree;
static uint64_t random_state = 1;

/* SplitMix64. */
static uint64_t next_random(void)
{
    uint64_t z = (random_state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Small numbers, any numbers, and those at the end. */
static uint64_t random_key(void)
{
    uint64_t number = next_random();
    switch (number % 4) {
    case 0:
        return number >> 60;
    case 1:
        return UINT64_MAX - (number >> 60);
    default:
        return next_random();
    }
}

static struct tl_rank_link *expected_from(uint64_t key)
{
    struct tl_rank_link *first = NULL;
    for (size_t i = 0; i < OBJECTS; i++) {
        struct tl_rank_link *link = &objects[i];
        if (link->tree != NULL && link->key >= key && (first == NULL || link->rank < first->rank)) first = link;
    }
    return first;
}

START_TEST(as_an_array)
{
    for (uint64_t i = 0; i < ROUNDS; i++) {
        struct tl_rank_link *link = &objects[next_random() % OBJECTS];
        uint64_t key = random_key();
        if (link->tree != NULL) {
            tl_rank_tree_remove(link);
            ck_assert_ptr_null(link->tree);
        } else {
            tl_rank_tree_add(&tree, link, key, _i == 0 ? i : next_random());
        }
        key = random_key();
        ck_assert_ptr_eq(tl_rank_tree_first_from(&tree, key), expected_from(key));
        ck_assert_ptr_eq(tl_rank_tree_first_from(&tree, link->key), expected_from(link->key));
        ck_assert_ptr_eq(tl_rank_tree_first_from(&tree, 0), expected_from(0));
    }
    for (size_t i = 0; i < OBJECTS; i++)
        tl_rank_tree_remove(&objects[i]);
    ck_assert_ptr_null(tree.root);
    ck_assert_ptr_null(tl_rank_tree_first_from(&tree, 0));
}
END_TEST

/* Keys that grow, that are the same and that are anything: each call looks at a path. */
START_TEST(few_are_looked_at)
{
    for (uint64_t i = 0; i < MANY; i++)
        tl_rank_tree_add(&tree, &many[i], _i == 0 ? i : _i == 1 ? UINT64_C(1) << 40 : next_random(), i);
    ck_assert_uint_le(tree.visit_count, (uint64_t)MANY * MAX_LEVELS);
    for (uint64_t i = 0; i < MANY; i++)
        (void)tl_rank_tree_first_from(&tree, many[next_random() % MANY].key);
    for (uint64_t i = 0; i < MANY; i++)
        tl_rank_tree_remove(&many[i]);
    ck_assert_uint_le(tree.visit_count, (uint64_t)MANY * 3 * MAX_LEVELS);
    ck_assert_ptr_null(tree.root);
}
END_TEST

/* More objects with one key and rank than a key and a rank have bits. */
START_TEST(all_the_same)
{
    for (size_t i = 0; i < OBJECTS; i++)
        tl_rank_tree_add(&tree, &objects[i], 5, 7);
    for (size_t left = OBJECTS; left > 0; left--) {
        ck_assert_ptr_nonnull(tl_rank_tree_first_from(&tree, 5));
        ck_assert_ptr_null(tl_rank_tree_first_from(&tree, 6));
        tl_rank_tree_remove(&objects[left * 3 % OBJECTS]);
    }
    ck_assert_ptr_null(tree.root);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("rank_tree");
    TCase *tcase = tcase_create("rank_tree");
    tcase_set_timeout(tcase, 300);
    tcase_add_loop_test(tcase, as_an_array, 0, 2);
    tcase_add_loop_test(tcase, few_are_looked_at, 0, 3);
    tcase_add_test(tcase, all_the_same);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
