// SPDX-License-Identifier: Apache-2.0
/*
 * A reactor: one owner at a time polls a provider, closures and timers, and runs what they call for. It spins while
 * work is under way, for a bounded time, and then sleeps on the provider's descriptor.
 *
 * The same shape as the control plane's loop, so that the same drivers drive it: a thread of ours, or whoever waits.
 *
 * Thread: the owner, unless a function says otherwise.
 */
#ifndef DATAPLANE_REACTOR_H
#define DATAPLANE_REACTOR_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mailbox.h"
#include "base/timer.h"
#include "dataplane/provider.h"

struct tl_reactor;

struct tl_reactor_options {
    int64_t spin_ns; /* how long to poll without result before sleeping, while work is under way; 0: sleeps at once */
};

struct tl_reactor_stats {
    uint64_t rounds;
    uint64_t sleeps;
    uint64_t events; /* of the provider */
};

/* The provider stays the caller's, and outlives the reactor. Errors: TL_RESOURCE_EXHAUSTED: no memory or descriptor. */
enum tl_status tl_reactor_create(struct tl_provider *provider, const struct tl_reactor_options *options,
                                 struct tl_reactor **ret_reactor, struct tl_error *ret_error) TL_MUST_USE;
/* Everything that belongs to it is gone, and it is not busy. Closures that are left are delivered. NULL is accepted. */
void tl_reactor_destroy(struct tl_reactor *reactor);

/* One round; sleeps until deadline_ns (monotonic; 0: not at all) when there is nothing to do and it has spun enough.
 * True when something was done, a wake included. */
bool tl_reactor_run_once(struct tl_reactor *reactor, int64_t deadline_ns);

/* Delivered on the owner's thread. Thread: any. */
void tl_reactor_post(struct tl_reactor *reactor, struct tl_closure *closure);
/* Makes a sleeping owner return. Thread: any. */
void tl_reactor_wake(struct tl_reactor *reactor);
/* Runs the closure at the end of this round; it must not be deferred already. */
void tl_reactor_defer(struct tl_reactor *reactor, struct tl_closure *closure);

struct tl_timers *tl_reactor_timers(struct tl_reactor *reactor);
struct tl_provider *tl_reactor_provider(struct tl_reactor *reactor);
/* Counts what is under way (+1, -1): while the sum is not 0, the reactor spins before it sleeps. */
void tl_reactor_busy(struct tl_reactor *reactor, int change);
/* Readable when a sleeping owner would have something to do, after tl_reactor_prepare_sleep has returned true; for an
 * owner that sleeps on something else. tl_reactor_end_sleep follows. False: there is something to do, of which events
 * may have been handled already, or the provider has no descriptor; the owner runs a round instead of sleeping. */
int tl_reactor_fd(const struct tl_reactor *reactor);
bool tl_reactor_prepare_sleep(struct tl_reactor *reactor);
void tl_reactor_end_sleep(struct tl_reactor *reactor);
/* Thread: any; a snapshot. */
void tl_reactor_get_stats(const struct tl_reactor *reactor, struct tl_reactor_stats *ret_stats);

#endif
