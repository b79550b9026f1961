// SPDX-License-Identifier: Apache-2.0
/*
 * A clock that stands still until the test moves it. Included by one source of a program, it takes the place of
 * base/clock.c in the whole program, so that what waits can be tested without waiting. Threads of the
 * library look at it, too, while the test moves it.
 */
#ifndef TESTS_FAKES_FAKE_CLOCK_H
#define TESTS_FAKES_FAKE_CLOCK_H

#include "base/clock.h"

static _Atomic int64_t fake_clock_ns = TL_NS_PER_SEC;

static inline void fake_clock_advance(int64_t ns)
{
    fake_clock_ns += ns;
}

int64_t tl_clock_now_ns(void)
{
    return fake_clock_ns;
}

int64_t tl_clock_unix_ns(void)
{
    return fake_clock_ns;
}

int64_t tl_clock_deadline_ns(int64_t timeout_ns)
{
    const int64_t now_ns = fake_clock_ns;
    if (timeout_ns > TL_TIME_NEVER - now_ns) return TL_TIME_NEVER;
    return now_ns + (timeout_ns > 0 ? timeout_ns : 0);
}

int64_t tl_clock_remaining_ns(int64_t deadline_ns)
{
    const int64_t now_ns = fake_clock_ns;
    if (deadline_ns == TL_TIME_NEVER) return TL_TIME_NEVER;
    return deadline_ns > now_ns ? deadline_ns - now_ns : 0;
}

#endif
