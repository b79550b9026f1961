// SPDX-License-Identifier: Apache-2.0
/* The lists of receives by step: who is looked at, that members may leave meanwhile, and that nothing is left. */
#include <check.h>
#include <stdbool.h>
#include <stdlib.h>

static bool has_memory = true;

static void *test_calloc(size_t count, size_t size)
{
    return has_memory ? calloc(count, size) : NULL;
}

static void *test_malloc(size_t size)
{
    return has_memory ? malloc(size) : NULL;
}

#define calloc test_calloc
#define malloc test_malloc
#include "server/transfers/operation_steps.c"
#undef calloc
#undef malloc

#include "fakes/run_suite.h"

static struct tl_op_step *steps;
static struct tl_op_step_member members[6];
static unsigned visits[6];
static unsigned visit_count;

static void visit(struct tl_op_step_member *member, void *context)
{
    visits[member - members]++;
    visit_count++;
    if (context != NULL) tl_op_steps_leave(&steps, member);
}

/* Returns how many members a whole walk visits. */
static unsigned walk(uint64_t step, void *context)
{
    struct tl_quota quota = {.used = 0};
    visit_count = 0;
    ck_assert(tl_op_steps_walk(&steps, step, &quota, visit, context));
    ck_assert_uint_eq(quota.used, visit_count);
    return visit_count;
}

START_TEST(members_of_one_step)
{
    for (size_t i = 0; i < 6; i++)
        ck_assert(tl_op_steps_join(&steps, i % 2, &members[i]));
    ck_assert_uint_eq(walk(2, &steps), 0);
    ck_assert_uint_eq(walk(1, NULL), 3);
    ck_assert_uint_eq(walk(1, &steps), 3);
    ck_assert_uint_eq(walk(1, NULL), 0);
    for (size_t i = 0; i < 6; i++) {
        ck_assert_uint_eq(visits[i], i % 2 == 1 ? 2 : 0);
        tl_op_steps_leave(&steps, &members[i]);
        tl_op_steps_leave(&steps, &members[i]);
    }
    ck_assert_ptr_null(steps);
}
END_TEST

/* A walk visits as many as the quota allows, goes on where it was, and leaves out those who join meanwhile. */
START_TEST(as_the_quota_allows)
{
    struct tl_quota quota = {.used = TL_QUOTA - 2};
    for (size_t i = 0; i < 5; i++)
        ck_assert(tl_op_steps_join(&steps, 1, &members[i]));
    ck_assert(!tl_op_steps_walk(&steps, 1, &quota, visit, NULL));
    ck_assert_uint_eq(tl_quota_most(&quota), TL_QUOTA);
    ck_assert(tl_op_steps_join(&steps, 1, &members[5]));
    tl_op_steps_leave(&steps, &members[2]);
    tl_op_steps_leave(&steps, &members[0]);
    ck_assert(!tl_op_steps_walk(&steps, 1, &quota, visit, NULL));
    tl_quota_renew(&quota);
    ck_assert(tl_op_steps_walk(&steps, 1, &quota, visit, &steps));
    static const unsigned wanted[] = {1, 1, 0, 1, 1, 0};
    ck_assert_mem_eq(visits, wanted, sizeof(wanted));
    for (size_t i = 0; i < 6; i++)
        tl_op_steps_leave(&steps, &members[i]);
    ck_assert_ptr_null(steps);
}
END_TEST

/* All leave in the middle of a walk. */
START_TEST(all_leave_in_a_walk)
{
    struct tl_quota quota = {.used = TL_QUOTA - 1};
    for (size_t i = 0; i < 3; i++)
        ck_assert(tl_op_steps_join(&steps, 1, &members[i]));
    ck_assert(!tl_op_steps_walk(&steps, 1, &quota, visit, NULL));
    for (size_t i = 0; i < 3; i++)
        tl_op_steps_leave(&steps, &members[i]);
    ck_assert(tl_op_steps_walk(&steps, 1, &quota, visit, NULL));
    ck_assert_ptr_null(steps);
    ck_assert_uint_eq(visit_count, 1);
}
END_TEST

START_TEST(no_memory)
{
    has_memory = false;
    ck_assert(!tl_op_steps_join(&steps, 1, &members[0]));
    ck_assert_ptr_null(members[0].link.next);
    ck_assert_ptr_null(steps);
    tl_op_steps_leave(&steps, &members[0]);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("operation_steps");
    TCase *tcase = tcase_create("operation_steps");
    tcase_add_test(tcase, members_of_one_step);
    tcase_add_test(tcase, no_memory);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("as_the_quota_allows"); /* tests/defects runs it alone */
    tcase_add_test(tcase, as_the_quota_allows);
    tcase_add_test(tcase, all_leave_in_a_walk);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
