// SPDX-License-Identifier: Apache-2.0
/* Timers of one owner thread: a binary heap of timers that are embedded in the objects that wait. */
#ifndef BASE_TIMER_H
#define BASE_TIMER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

#include "base/quota.h"

struct tl_timer {
    int64_t due_ns;                       /* monotonic */
    size_t heap_place;                    /* 1-based index in the heap, 0: not armed */
    void (*fire)(struct tl_timer *timer); /* called once, already disarmed */
};

struct tl_timers {
    struct tl_timer **heap;
    size_t count;
    size_t capacity;
    size_t reserved_count; /* places of the heap that only tl_timers_arm_reserved uses */
};

void tl_timers_init(struct tl_timers *timers);

/* Frees the heap. Armed timers are disarmed, not fired. */
void tl_timers_fini(struct tl_timers *timers);

/* Arms the timer, or moves it when it is armed; with due_ns TL_TIME_NEVER it is disarmed. A zeroed timer with fire set
 * is valid. Errors: TL_RESOURCE_EXHAUSTED: no memory; the timer is as before. */
enum tl_status tl_timers_arm(struct tl_timers *timers, struct tl_timer *timer, int64_t due_ns) TL_MUST_USE;

/* Keeps a place in the heap for one timer, until tl_timers_release or as long as the heap. Errors:
 * TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_timers_reserve(struct tl_timers *timers) TL_MUST_USE;

/* Gives back a place that tl_timers_reserve has kept. Its timer is not armed. */
void tl_timers_release(struct tl_timers *timers);

/* As tl_timers_arm, for a timer that tl_timers_reserve has kept a place for: it cannot fail. */
void tl_timers_arm_reserved(struct tl_timers *timers, struct tl_timer *timer, int64_t due_ns);

/* Takes an armed timer out. */
void tl_timers_remove(struct tl_timers *timers, struct tl_timer *timer);

/* Disarms the timer if it is armed. */
static inline void tl_timers_disarm(struct tl_timers *timers, struct tl_timer *timer)
{
    if (timer->heap_place != 0) tl_timers_remove(timers, timer);
}

/* Fires the timers due at now_ns, earliest first, as long as some of the quota is left; each uses at least 1 of it.
 * Returns how many. Timers may be armed and disarmed from fire; one that is armed there for a time that has come may
 * have to wait for the next call. */
unsigned tl_timers_fire_due(struct tl_timers *timers, int64_t now_ns, struct tl_quota *quota);

/* Returns when the next timer is due; TL_TIME_NEVER when none is armed. */
int64_t tl_timers_next_due_ns(const struct tl_timers *timers);

#endif
