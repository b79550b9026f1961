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

static void visit(struct tl_op_step_member *member, void *context)
{
    visits[member - members]++;
    if (context != NULL) tl_op_steps_leave(&steps, member);
}

START_TEST(members_of_one_step)
{
    for (size_t i = 0; i < 6; i++)
        ck_assert(tl_op_steps_join(&steps, i % 2, &members[i]));
    ck_assert_uint_eq(tl_op_steps_walk(&steps, 2, visit, &steps), 0);
    ck_assert_uint_eq(tl_op_steps_walk(&steps, 1, visit, NULL), 3);
    ck_assert_uint_eq(tl_op_steps_walk(&steps, 1, visit, &steps), 3);
    ck_assert_uint_eq(tl_op_steps_walk(&steps, 1, visit, NULL), 0);
    for (size_t i = 0; i < 6; i++) {
        ck_assert_uint_eq(visits[i], i % 2 == 1 ? 2 : 0);
        tl_op_steps_leave(&steps, &members[i]);
        tl_op_steps_leave(&steps, &members[i]);
    }
    ck_assert_ptr_null(steps);
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
    return run_suite(suite);
}
