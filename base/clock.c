// SPDX-License-Identifier: Apache-2.0
/* Monotonic time, the time of day, and deadlines that saturate instead of overflowing. */
#include "base/clock.h"

#include <time.h>

#include "base/check.h"

int64_t tl_clock_now_ns(void)
{
    struct timespec now;
    TL_CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    return (int64_t)now.tv_sec * TL_NS_PER_SEC + now.tv_nsec;
}

int64_t tl_clock_unix_ns(void)
{
    struct timespec now;
    TL_CHECK(clock_gettime(CLOCK_REALTIME, &now) == 0);
    return (int64_t)now.tv_sec * TL_NS_PER_SEC + now.tv_nsec;
}

int64_t tl_clock_deadline_ns(int64_t timeout_ns)
{
    int64_t deadline_ns;
    if (timeout_ns == TL_TIME_NEVER) return TL_TIME_NEVER;
    if (timeout_ns < 0) timeout_ns = 0;
    if (__builtin_add_overflow(tl_clock_now_ns(), timeout_ns, &deadline_ns)) return TL_TIME_NEVER;
    return deadline_ns;
}

int64_t tl_clock_remaining_ns(int64_t deadline_ns)
{
    if (deadline_ns == TL_TIME_NEVER) return TL_TIME_NEVER;
    int64_t now_ns = tl_clock_now_ns();
    return deadline_ns > now_ns ? deadline_ns - now_ns : 0;
}
