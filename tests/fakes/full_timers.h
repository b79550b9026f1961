// SPDX-License-Identifier: Apache-2.0
/*
 * Timers of a loop that has no memory for more of them. A test includes this before the .c file that it tests, which
 * then uses this copy of base/timer.c.
 */
#ifndef TESTS_FAKES_FULL_TIMERS_H
#define TESTS_FAKES_FULL_TIMERS_H

#include <check.h>

#include "tests/fakes/fault_alloc.h"

#include "base/timer.c"

static struct tl_timer other_timers[64];

static void other_fired(struct tl_timer *timer)
{
    (void)timer;
}

/* Arms other timers, which are never due, until the heap would have to grow. */
static inline void timers_fill(struct tl_timers *timers)
{
    size_t count = 0;
    enum tl_status status = TL_OK;
    while (status == TL_OK) {
        ck_assert_uint_lt(count, sizeof(other_timers) / sizeof(other_timers[0]));
        other_timers[count].fire = other_fired;
        fault_arm(1);
        status = tl_timers_arm(timers, &other_timers[count++], TL_TIME_NEVER - 1);
    }
    ck_assert(fault_was_hit());
}

#endif
