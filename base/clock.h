// SPDX-License-Identifier: Apache-2.0
/* Time. All waits use monotonic nanoseconds, so that a step of the wall clock changes nothing. */
#ifndef BASE_CLOCK_H
#define BASE_CLOCK_H

#include <stdint.h>

#define TL_NS_PER_SEC INT64_C(1000000000)
#define TL_NS_PER_MS INT64_C(1000000)

/* A time that never comes. */
#define TL_TIME_NEVER INT64_MAX

/* Returns the monotonic time now, in nanoseconds. */
int64_t tl_clock_now_ns(void);

/* Returns the time of day, in nanoseconds since 1970; it may jump. */
int64_t tl_clock_unix_ns(void);

/* Returns now + timeout, or TL_TIME_NEVER when timeout_ns is TL_TIME_NEVER or the sum does not fit; a negative timeout
 * counts as zero. */
int64_t tl_clock_deadline_ns(int64_t timeout_ns);

/* Returns the nanoseconds until the deadline, never negative; TL_TIME_NEVER for TL_TIME_NEVER. */
int64_t tl_clock_remaining_ns(int64_t deadline_ns);

/* As milliseconds, INT32_MAX at most. */
static inline int tl_clock_to_ms(int64_t ns)
{
    int64_t ms = ns / 1000000;
    return ms > INT32_MAX ? INT32_MAX : (int)ms;
}

#endif
