// SPDX-License-Identifier: Apache-2.0
/*
 * Timers of one owner thread in a binary heap, earliest at the root. Every timer knows its place in the heap, so that
 * it can be moved or taken out in logarithmic time. Only arming a timer that was not armed can fail, for lack of
 * memory, unless a place is kept for it.
 */
#include "base/timer.h"

#include <stdlib.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"

static void place(struct tl_timers *timers, size_t index, struct tl_timer *timer)
{
    timers->heap[index - 1] = timer;
    timer->heap_place = index;
}

static void sift_up(struct tl_timers *timers, struct tl_timer *timer)
{
    size_t index = timer->heap_place;
    while (index > 1 && timers->heap[index / 2 - 1]->due_ns > timer->due_ns) {
        place(timers, index, timers->heap[index / 2 - 1]);
        index /= 2;
    }
    place(timers, index, timer);
}

static void sift_down(struct tl_timers *timers, struct tl_timer *timer)
{
    size_t index = timer->heap_place;
    while (index <= timers->count / 2) {
        size_t child = index * 2;
        if (child < timers->count && timers->heap[child]->due_ns < timers->heap[child - 1]->due_ns) child++;
        if (timers->heap[child - 1]->due_ns >= timer->due_ns) break;
        place(timers, index, timers->heap[child - 1]);
        index = child;
    }
    place(timers, index, timer);
}

/* Makes space for one more timer besides the places that are kept. */
static bool reserve(struct tl_timers *timers)
{
    if (timers->count + timers->reserved_count < timers->capacity) return true;
    uint64_t len_bytes;
    size_t capacity = timers->capacity ? timers->capacity * 2 : 16;
    if (!tl_mul_u64(capacity, sizeof(struct tl_timer *), &len_bytes)) return false;
    struct tl_timer **heap = realloc(timers->heap, len_bytes);
    if (!heap) return false;
    timers->heap = heap;
    timers->capacity = capacity;
    return true;
}

void tl_timers_init(struct tl_timers *timers)
{
    *timers = (struct tl_timers){0};
}

void tl_timers_fini(struct tl_timers *timers)
{
    for (size_t i = 0; i < timers->count; i++)
        timers->heap[i]->heap_place = 0;
    free(timers->heap);
    *timers = (struct tl_timers){0};
}

enum tl_status tl_timers_arm(struct tl_timers *timers, struct tl_timer *timer, int64_t due_ns)
{
    if (timer->heap_place == 0 && due_ns != TL_TIME_NEVER && !reserve(timers)) return TL_RESOURCE_EXHAUSTED;
    tl_timers_arm_reserved(timers, timer, due_ns);
    return TL_OK;
}

enum tl_status tl_timers_reserve(struct tl_timers *timers)
{
    if (!reserve(timers)) return TL_RESOURCE_EXHAUSTED;
    timers->reserved_count++;
    return TL_OK;
}

void tl_timers_release(struct tl_timers *timers)
{
    TL_CHECK(timers->reserved_count > 0);
    timers->reserved_count--;
}

void tl_timers_arm_reserved(struct tl_timers *timers, struct tl_timer *timer, int64_t due_ns)
{
    TL_CHECK(timer->fire);
    if (due_ns == TL_TIME_NEVER) {
        tl_timers_disarm(timers, timer);
        return;
    }
    if (timer->heap_place == 0) {
        TL_CHECK(timers->count < timers->capacity);
        place(timers, ++timers->count, timer);
    }
    timer->due_ns = due_ns;
    sift_up(timers, timer);
    sift_down(timers, timer);
}

void tl_timers_remove(struct tl_timers *timers, struct tl_timer *timer)
{
    size_t index = timer->heap_place;
    TL_CHECK(index > 0 && index <= timers->count && timers->heap[index - 1] == timer);
    struct tl_timer *last = timers->heap[--timers->count];
    timer->heap_place = 0;
    if (last == timer) return;
    place(timers, index, last);
    sift_up(timers, last);
    sift_down(timers, last);
}

unsigned tl_timers_fire_due(struct tl_timers *timers, int64_t now_ns, struct tl_quota *quota)
{
    unsigned fired = 0;
    /* The number of timers ends the loop when one arms itself again for a time that has already come. */
    for (size_t left = timers->count; left > 0 && timers->count > 0; left--) {
        struct tl_timer *timer = timers->heap[0];
        uint32_t used = quota->used;
        if (timer->due_ns > now_ns || tl_quota_left(quota) == 0) break;
        tl_timers_disarm(timers, timer);
        timer->fire(timer);
        if (quota->used == used) tl_quota_use(quota, 1); /* it has counted nothing itself */
        fired++;
    }
    return fired;
}

int64_t tl_timers_next_due_ns(const struct tl_timers *timers)
{
    return timers->count ? timers->heap[0]->due_ns : TL_TIME_NEVER;
}
