// SPDX-License-Identifier: Apache-2.0
/* Timers: order, moving, disarming from within, lack of memory; a random walk against a list that is searched. */
#include <check.h>
#include <stdlib.h>

#include "tests/fakes/fault_alloc.h"

#include "base/timer.c"
#include "fakes/run_suite.h"

static struct tl_timers timers;
static int fired[256];
static unsigned fired_count;

struct alarm {
    struct tl_timer timer;
    int number;
};

static void record(struct tl_timer *timer)
{
    ck_assert_uint_eq(timer->heap_place, 0);
    fired[fired_count++ % 256] = TL_CONTAINER_OF(timer, struct alarm, timer)->number;
}

static struct alarm alarms[100];

static void setup(void)
{
    tl_timers_init(&timers);
    for (int i = 0; i < 100; i++)
        alarms[i] = (struct alarm){.timer.fire = record, .number = i};
}

static void teardown(void)
{
    tl_timers_fini(&timers);
}

static void ignore(struct tl_timer *timer)
{
    (void)timer;
}

static void arm(int number, int64_t due_ns)
{
    ck_assert_int_eq(tl_timers_arm(&timers, &alarms[number].timer, due_ns), TL_OK);
}

START_TEST(empty)
{
    ck_assert_int_eq(tl_timers_next_due_ns(&timers), TL_TIME_NEVER);
    ck_assert_uint_eq(tl_timers_fire_due(&timers, INT64_MAX, &(struct tl_quota){0}), 0);
    tl_timers_disarm(&timers, &alarms[0].timer);
}
END_TEST

START_TEST(earliest_first)
{
    arm(1, 30);
    arm(2, 10);
    arm(3, 20);
    ck_assert_int_eq(tl_timers_next_due_ns(&timers), 10);
    ck_assert_uint_eq(tl_timers_fire_due(&timers, 9, &(struct tl_quota){0}), 0);
    ck_assert_uint_eq(tl_timers_fire_due(&timers, 20, &(struct tl_quota){0}), 2);
    ck_assert_int_eq(fired[0], 2);
    ck_assert_int_eq(fired[1], 3);
    ck_assert_int_eq(tl_timers_next_due_ns(&timers), 30);
}
END_TEST

START_TEST(moved_when_armed_again)
{
    arm(1, 10);
    arm(2, 20);
    arm(1, 30);
    ck_assert_int_eq(tl_timers_next_due_ns(&timers), 20);
    arm(1, 5);
    ck_assert_int_eq(tl_timers_next_due_ns(&timers), 5);
    ck_assert_uint_eq(tl_timers_fire_due(&timers, 100, &(struct tl_quota){0}), 2);
}
END_TEST

START_TEST(never_disarms)
{
    arm(1, 10);
    arm(1, TL_TIME_NEVER);
    arm(2, TL_TIME_NEVER);
    ck_assert_int_eq(tl_timers_next_due_ns(&timers), TL_TIME_NEVER);
    ck_assert_uint_eq(alarms[1].timer.heap_place, 0);
}
END_TEST

static void disarm_second(struct tl_timer *timer)
{
    record(timer);
    tl_timers_disarm(&timers, &alarms[2].timer);
}

START_TEST(disarmed_from_fire)
{
    alarms[1].timer.fire = disarm_second;
    arm(1, 10);
    arm(2, 10);
    arm(3, 11);
    arm(2, 11);
    ck_assert_uint_eq(tl_timers_fire_due(&timers, 20, &(struct tl_quota){0}), 2);
    ck_assert_int_eq(fired[0], 1);
    ck_assert_int_eq(fired[1], 3);
}
END_TEST

static void arm_again(struct tl_timer *timer)
{
    record(timer);
    ck_assert_int_eq(tl_timers_arm(&timers, timer, timer->due_ns), TL_OK);
}

START_TEST(armed_again_from_fire_does_not_loop)
{
    alarms[1].timer.fire = arm_again;
    arm(1, 10);
    ck_assert_uint_eq(tl_timers_fire_due(&timers, 20, &(struct tl_quota){0}), 1);
    ck_assert_int_eq(tl_timers_next_due_ns(&timers), 10);
    ck_assert_uint_eq(tl_timers_fire_due(&timers, 20, &(struct tl_quota){0}), 1);
}
END_TEST

/* Thousands that are due together leave room for others. */
START_TEST(so_many_in_one_call)
{
    static struct alarm many[TL_QUOTA + 10];
    for (size_t i = 0; i < TL_ARRAY_COUNT(many); i++) {
        many[i].timer.fire = ignore;
        ck_assert_int_eq(tl_timers_arm(&timers, &many[i].timer, (int64_t)i), TL_OK);
    }
    ck_assert_uint_eq(tl_timers_fire_due(&timers, INT64_MAX, &(struct tl_quota){0}), TL_QUOTA);
    ck_assert_int_eq(tl_timers_next_due_ns(&timers), TL_QUOTA);
    ck_assert_uint_eq(tl_timers_fire_due(&timers, INT64_MAX, &(struct tl_quota){0}), 10);
}
END_TEST

START_TEST(fini_disarms)
{
    arm(1, 10);
    tl_timers_fini(&timers);
    ck_assert_uint_eq(alarms[1].timer.heap_place, 0);
    ck_assert_uint_eq(fired_count, 0);
    tl_timers_init(&timers);
}
END_TEST

START_TEST(no_memory)
{
    fault_arm(1);
    ck_assert_int_eq(tl_timers_arm(&timers, &alarms[0].timer, 5), TL_RESOURCE_EXHAUSTED);
    ck_assert_uint_eq(alarms[0].timer.heap_place, 0);
    ck_assert_int_eq(tl_timers_next_due_ns(&timers), TL_TIME_NEVER);
    for (int i = 0; i < 16; i++)
        arm(i, 100 + i);
    fault_arm(1);
    ck_assert_int_eq(tl_timers_arm(&timers, &alarms[16].timer, 5), TL_RESOURCE_EXHAUSTED);
    /* Moving needs no memory. */
    fault_arm(1);
    arm(15, 1);
    ck_assert(!fault_was_hit());
    ck_assert_uint_eq(tl_timers_fire_due(&timers, 1000, &(struct tl_quota){0}), 16);
    ck_assert_int_eq(fired[0], 15);
    ck_assert_int_eq(fired[15], 14);
}
END_TEST

/* Other timers leave the place free that is kept for one. */
START_TEST(a_place_is_kept)
{
    fault_arm(1);
    ck_assert_int_eq(tl_timers_reserve(&timers), TL_RESOURCE_EXHAUSTED);
    ck_assert_int_eq(tl_timers_reserve(&timers), TL_OK);
    for (int i = 0; i < 15; i++)
        arm(i, 100 + i);
    for (int i = 0; i < 2; i++) {
        fault_arm(1);
        ck_assert_int_eq(tl_timers_arm(&timers, &alarms[15].timer, 5), TL_RESOURCE_EXHAUSTED);
        tl_timers_arm_reserved(&timers, &alarms[16].timer, 1);
        ck_assert_uint_eq(tl_timers_fire_due(&timers, 1, &(struct tl_quota){0}), 1);
        ck_assert_int_eq(fired[i], 16);
    }
    tl_timers_arm_reserved(&timers, &alarms[16].timer, TL_TIME_NEVER);
    ck_assert_int_eq(tl_timers_next_due_ns(&timers), 100);
    tl_timers_release(&timers);
    fault_arm(1);
    ck_assert_int_eq(tl_timers_arm(&timers, &alarms[15].timer, 5), TL_OK);
    ck_assert(!fault_was_hit());
}
END_TEST

/* The model: due times by number, TL_TIME_NEVER when not armed. */
START_TEST(as_a_searched_list)
{
    int64_t due[100], now = 0;
    unsigned seed = 12345;
    for (int i = 0; i < 100; i++)
        due[i] = TL_TIME_NEVER;
    for (int step = 0; step < 20000; step++) {
        int number = rand_r(&seed) % 100;
        int action = rand_r(&seed) % 8;
        if (action < 5) {
            due[number] = now + rand_r(&seed) % 50;
            arm(number, due[number]);
        } else if (action < 7) {
            due[number] = TL_TIME_NEVER;
            tl_timers_disarm(&timers, &alarms[number].timer);
        } else {
            now += rand_r(&seed) % 20;
            unsigned expected = 0, first = fired_count;
            for (int i = 0; i < 100; i++)
                expected += due[i] <= now;
            ck_assert_uint_eq(tl_timers_fire_due(&timers, now, &(struct tl_quota){0}), expected);
            ck_assert_uint_eq(fired_count - first, expected);
            int64_t before = 0;
            for (unsigned i = first; i < fired_count; i++) {
                ck_assert_int_le(due[fired[i % 256]], now);
                ck_assert_int_ge(due[fired[i % 256]], before);
                before = due[fired[i % 256]];
            }
            for (unsigned i = first; i < fired_count; i++)
                due[fired[i % 256]] = TL_TIME_NEVER;
        }
        int64_t next = TL_TIME_NEVER;
        for (int i = 0; i < 100; i++)
            next = due[i] < next ? due[i] : next;
        ck_assert_int_eq(tl_timers_next_due_ns(&timers), next);
    }
    ck_assert_uint_gt(fired_count, 1000);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("timer");
    TCase *tcase = tcase_create("timer");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, empty);
    tcase_add_test(tcase, earliest_first);
    tcase_add_test(tcase, moved_when_armed_again);
    tcase_add_test(tcase, never_disarms);
    tcase_add_test(tcase, disarmed_from_fire);
    tcase_add_test(tcase, armed_again_from_fire_does_not_loop);
    tcase_add_test(tcase, fini_disarms);
    tcase_add_test(tcase, no_memory);
    tcase_add_test(tcase, a_place_is_kept);
    tcase_add_test(tcase, as_a_searched_list);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("so_many_in_one_call"); /* tests/defects runs it alone */
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, so_many_in_one_call);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
