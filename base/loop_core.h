// SPDX-License-Identifier: Apache-2.0
/*
 * The core of an event loop: what the control loop and the reactors have in common.
 *
 * An event loop has one owner at a time, which runs rounds. In a round it runs the closures that other threads have
 * posted, fires the timers that are due, handles its own kind of events, and at the end runs the closures that were
 * deferred meanwhile. When a round finds nothing to do, the owner may sleep. What it sleeps on, and how a post wakes
 * it, is the business of the loop that contains the core.
 *
 * Thread: the owner's, unless a function says otherwise.
 */
#ifndef BASE_LOOP_CORE_H
#define BASE_LOOP_CORE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mailbox.h"
#include "base/quota.h"
#include "base/timer.h"

struct tl_loop_core {
    struct tl_mailbox mailbox;
    struct tl_timers timers;
    struct tl_list deferred; /* struct tl_closure */
    struct tl_list last;     /* the same: run when the deferred ones have run */
    struct tl_quota quota;
};

void tl_loop_core_init(struct tl_loop_core *core);
/* Runs the closures that are left, and those that they post or defer. Timers that are left are disarmed. */
void tl_loop_core_fini(struct tl_loop_core *core);

/* Posts a closure. Returns true when the caller must wake the owner. Thread: any. */
static inline bool tl_loop_core_post(struct tl_loop_core *core, struct tl_closure *closure)
{
    return tl_mailbox_post(&core->mailbox, closure);
}

/* Posts all closures of a list, which is empty afterwards. Returns as tl_loop_core_post. Thread: any. */
static inline bool tl_loop_core_post_all(struct tl_loop_core *core, struct tl_list *closures)
{
    return tl_mailbox_post_all(&core->mailbox, closures);
}

/* Runs closures that were posted before the call, as many as the quota allows. Returns how many. */
static inline unsigned tl_loop_core_run_closures(struct tl_loop_core *core)
{
    tl_quota_renew(&core->quota);
    return tl_mailbox_run(&core->mailbox, &core->quota);
}

/* Returns whether closures are left that the quota did not allow. */
static inline bool tl_loop_core_has_left(const struct tl_loop_core *core)
{
    return tl_mailbox_has_taken(&core->mailbox);
}

/* Fires the timers that are due; reads the clock only if a timer is armed. Returns how many were fired. */
unsigned tl_loop_core_fire_timers(struct tl_loop_core *core);

/* Defers a closure to the end of the round. The closure must not be deferred already. */
static inline void tl_loop_core_defer(struct tl_loop_core *core, struct tl_closure *closure)
{
    tl_list_push_back(&core->deferred, &closure->link);
}

/* Defers a closure behind all deferred ones of this round, also behind those that only defer it. It must not be
 * deferred already. */
static inline void tl_loop_core_defer_last(struct tl_loop_core *core, struct tl_closure *closure)
{
    tl_list_push_back(&core->last, &closure->link);
}

static inline bool tl_loop_core_has_deferred(const struct tl_loop_core *core)
{
    return !tl_list_is_empty(&core->deferred) || !tl_list_is_empty(&core->last);
}

/* Runs the closures that were deferred before the call, then those that were deferred to be last; others that they
 * defer wait for the next call. Returns whether there were any. */
bool tl_loop_core_run_deferred(struct tl_loop_core *core);

/* Mark the begin and the end of what an owner does with a loop. They nest, since a round of one loop may run rounds of
 * others. */
extern _Thread_local unsigned tl_loop_core_depth __attribute__((tls_model("initial-exec")));
static inline void tl_loop_core_enter(void)
{
    tl_loop_core_depth++;
}
static inline void tl_loop_core_leave(void)
{
    tl_loop_core_depth--;
}

/* Returns whether this thread drives a loop: it must not wait for anything else meanwhile. Thread: any. */
static inline bool tl_loop_core_is_driven_here(void)
{
    return tl_loop_core_depth > 0;
}

/* Returns until when the owner may sleep: the deadline, or the next timer if that is due earlier. */
static inline int64_t tl_loop_core_sleep_until_ns(const struct tl_loop_core *core, int64_t deadline_ns)
{
    int64_t due_ns = tl_timers_next_due_ns(&core->timers);
    return due_ns < deadline_ns ? due_ns : deadline_ns;
}

/* Announces a sleep, so that the next post asks its caller to wake the owner. Returns false when closures wait, posted,
 * left or deferred: the owner must not sleep then. */
static inline bool tl_loop_core_prepare_sleep(struct tl_loop_core *core)
{
    return !tl_loop_core_has_deferred(core) && tl_mailbox_prepare_sleep(&core->mailbox);
}

/* Ends what tl_loop_core_prepare_sleep has announced. Returns whether a post has asked its caller to wake the owner. */
static inline bool tl_loop_core_end_sleep(struct tl_loop_core *core)
{
    return tl_mailbox_end_sleep(&core->mailbox);
}

#endif
