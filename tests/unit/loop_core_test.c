// SPDX-License-Identifier: Apache-2.0
/* The core of event loops: closures, deferred closures, timers, and when the owner may sleep. */
#include <check.h>

#include "base/loop_core.h"
#include "fakes/fake_clock.h"
#include "fakes/run_suite.h"

static struct tl_loop_core core;
static unsigned run_count;

static void count(struct tl_closure *closure)
{
    (void)closure;
    run_count++;
}

static void defer_again(struct tl_closure *closure)
{
    run_count++;
    tl_loop_core_defer(&core, closure);
}

static void post_and_defer(struct tl_closure *closure)
{
    static struct tl_closure posted = {.run = count}, deferred = {.run = count};
    (void)closure;
    run_count++;
    (void)tl_loop_core_post(&core, &posted);
    tl_loop_core_defer(&core, &deferred);
}

static void fired(struct tl_timer *timer)
{
    (void)timer;
    run_count++;
}

static void setup(void)
{
    run_count = 0;
    tl_loop_core_init(&core);
}

static void teardown(void)
{
    tl_loop_core_fini(&core);
}

START_TEST(posted_closures_run)
{
    struct tl_closure first = {.run = count}, second = {.run = count};
    ck_assert(!tl_loop_core_post(&core, &first));
    ck_assert(!tl_loop_core_post(&core, &second));
    ck_assert_uint_eq(tl_loop_core_run_closures(&core), 2);
    ck_assert_uint_eq(run_count, 2);
    ck_assert_uint_eq(tl_loop_core_run_closures(&core), 0);
}
END_TEST

static void note_driven(struct tl_closure *closure)
{
    (void)closure;
    run_count += tl_loop_core_is_driven_here();
}

START_TEST(what_is_left_at_the_end_runs_in_a_loop)
{
    struct tl_closure closure = {.run = note_driven};
    ck_assert(!tl_loop_core_is_driven_here());
    ck_assert(!tl_loop_core_post(&core, &closure));
    tl_loop_core_fini(&core);
    ck_assert_uint_eq(run_count, 1);
    ck_assert(!tl_loop_core_is_driven_here());
    tl_loop_core_init(&core);
}
END_TEST

START_TEST(deferred_closures_run_once)
{
    struct tl_closure closure = {.run = count};
    ck_assert(!tl_loop_core_run_deferred(&core));
    tl_loop_core_defer(&core, &closure);
    ck_assert(tl_loop_core_has_deferred(&core));
    ck_assert(tl_loop_core_run_deferred(&core));
    ck_assert(!tl_loop_core_has_deferred(&core));
    ck_assert(!tl_loop_core_run_deferred(&core));
    ck_assert_uint_eq(run_count, 1);
}
END_TEST

START_TEST(what_is_deferred_meanwhile_waits)
{
    static struct tl_closure closure = {.run = defer_again};
    tl_loop_core_defer(&core, &closure);
    ck_assert(tl_loop_core_run_deferred(&core));
    ck_assert_uint_eq(run_count, 1);
    ck_assert(tl_loop_core_has_deferred(&core));
    closure.run = count;
}
END_TEST

static struct tl_closure last_closure;

static void defer_last(struct tl_closure *closure)
{
    (void)closure;
    run_count++;
    tl_loop_core_defer_last(&core, &last_closure);
}

static void is_last(struct tl_closure *closure)
{
    (void)closure;
    ck_assert_uint_eq(run_count, 2);
    run_count++;
}

/* It runs behind all others of the round, also when one of these has deferred it. */
START_TEST(last_closures_run_behind_the_deferred_ones)
{
    struct tl_closure first = {.run = defer_last}, second = {.run = count};
    last_closure = (struct tl_closure){.run = is_last};
    tl_loop_core_defer(&core, &first);
    tl_loop_core_defer(&core, &second);
    ck_assert(tl_loop_core_run_deferred(&core));
    ck_assert_uint_eq(run_count, 3);
    ck_assert(!tl_loop_core_has_deferred(&core));
    run_count = 2;
    tl_loop_core_defer_last(&core, &last_closure);
    ck_assert(tl_loop_core_has_deferred(&core));
    ck_assert(!tl_loop_core_prepare_sleep(&core));
    ck_assert(tl_loop_core_run_deferred(&core));
    ck_assert_uint_eq(run_count, 3);
}
END_TEST

START_TEST(timers_fire_when_they_are_due)
{
    struct tl_timer timer = {.fire = fired};
    ck_assert_uint_eq(tl_loop_core_fire_timers(&core), 0);
    ck_assert_int_eq(tl_timers_arm(&core.timers, &timer, tl_clock_now_ns() + 10), TL_OK);
    ck_assert_uint_eq(tl_loop_core_fire_timers(&core), 0);
    fake_clock_advance(10);
    ck_assert_uint_eq(tl_loop_core_fire_timers(&core), 1);
    ck_assert_uint_eq(run_count, 1);
}
END_TEST

START_TEST(sleep_ends_with_the_deadline_or_a_timer)
{
    struct tl_timer timer = {.fire = fired};
    ck_assert_int_eq(tl_loop_core_sleep_until_ns(&core, 20), 20);
    ck_assert_int_eq(tl_loop_core_sleep_until_ns(&core, TL_TIME_NEVER), TL_TIME_NEVER);
    ck_assert_int_eq(tl_timers_arm(&core.timers, &timer, 10), TL_OK);
    ck_assert_int_eq(tl_loop_core_sleep_until_ns(&core, 20), 10);
    ck_assert_int_eq(tl_loop_core_sleep_until_ns(&core, 5), 5);
    tl_timers_disarm(&core.timers, &timer);
}
END_TEST

START_TEST(no_sleep_while_closures_wait)
{
    struct tl_closure closure = {.run = count};
    tl_loop_core_defer(&core, &closure);
    ck_assert(!tl_loop_core_prepare_sleep(&core));
    ck_assert(tl_loop_core_run_deferred(&core));
    (void)tl_loop_core_post(&core, &closure);
    ck_assert(!tl_loop_core_prepare_sleep(&core));
    ck_assert_uint_eq(tl_loop_core_run_closures(&core), 1);
    ck_assert(tl_loop_core_prepare_sleep(&core));
    (void)tl_loop_core_end_sleep(&core);
}
END_TEST

START_TEST(one_post_wakes_a_sleeping_owner)
{
    struct tl_closure first = {.run = count}, second = {.run = count}, third = {.run = count};
    ck_assert(tl_loop_core_prepare_sleep(&core));
    ck_assert(tl_loop_core_post(&core, &first));
    ck_assert(!tl_loop_core_post(&core, &second));
    (void)tl_loop_core_end_sleep(&core);
    ck_assert(!tl_loop_core_post(&core, &third));
    ck_assert_uint_eq(tl_loop_core_run_closures(&core), 3);
}
END_TEST

/* Whatever is left runs at the end, and what it leads to as well. */
START_TEST(the_end_runs_what_is_left)
{
    struct tl_closure posted = {.run = post_and_defer}, deferred = {.run = count};
    (void)tl_loop_core_post(&core, &posted);
    tl_loop_core_defer(&core, &deferred);
    tl_loop_core_fini(&core);
    ck_assert_uint_eq(run_count, 4);
    tl_loop_core_init(&core);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("loop_core");
    TCase *tcase = tcase_create("loop_core");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, posted_closures_run);
    tcase_add_test(tcase, what_is_left_at_the_end_runs_in_a_loop);
    tcase_add_test(tcase, deferred_closures_run_once);
    tcase_add_test(tcase, what_is_deferred_meanwhile_waits);
    tcase_add_test(tcase, last_closures_run_behind_the_deferred_ones);
    tcase_add_test(tcase, timers_fire_when_they_are_due);
    tcase_add_test(tcase, sleep_ends_with_the_deadline_or_a_timer);
    tcase_add_test(tcase, no_sleep_while_closures_wait);
    tcase_add_test(tcase, one_post_wakes_a_sleeping_owner);
    tcase_add_test(tcase, the_end_runs_what_is_left);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
