// SPDX-License-Identifier: Apache-2.0
/* The control loop: the thread that runs it is known as its owner, and must not wait for anything else. */
#include <check.h>

#include "base/clock.h"
#include "control/loop.h"
#include "fakes/run_suite.h"

static struct tl_loop *loop;
static unsigned driven_count;

static void note_driven(struct tl_closure *closure)
{
    (void)closure;
    driven_count += tl_loop_core_is_driven_here();
}

static void fired(struct tl_timer *timer)
{
    (void)timer;
    driven_count += tl_loop_core_is_driven_here();
}

START_TEST(its_owner_is_known)
{
    struct tl_error error;
    struct tl_closure closure = {.run = note_driven};
    struct tl_timer timer = {.fire = fired};
    ck_assert_msg(tl_loop_create(&loop, &error) == TL_OK, "%s", error.message);
    ck_assert(!tl_loop_core_is_driven_here());

    tl_loop_post(loop, &closure);
    ck_assert(tl_loop_run_once(loop, 0));
    ck_assert_uint_eq(driven_count, 1);
    ck_assert_int_eq(tl_timers_arm(tl_loop_timers(loop), &timer, 1), TL_OK);
    ck_assert(tl_loop_run_once(loop, tl_clock_now_ns()));
    ck_assert_uint_eq(driven_count, 2);
    tl_loop_post(loop, &closure);
    ck_assert(tl_loop_run_closures(loop));
    ck_assert_uint_eq(driven_count, 3);
    ck_assert(!tl_loop_core_is_driven_here());
    tl_loop_post(loop, &closure);
    tl_loop_destroy(loop);
    ck_assert_uint_eq(driven_count, 4);
    ck_assert(!tl_loop_core_is_driven_here());
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("loop");
    TCase *tcase = tcase_create("loop");
    tcase_add_test(tcase, its_owner_is_known);
    suite_add_tcase(suite, tcase);
    return run_suite_in_process(suite);
}
