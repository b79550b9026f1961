// SPDX-License-Identifier: Apache-2.0
/*
 * A reactor: an event loop (base/loop_core.h) that polls a provider. It spins while work is under way, for a bounded
 * time, and then sleeps on the provider's descriptor.
 *
 * Its owner is a thread of the library, or a thread of the program that waits for an operation: a round is the same for
 * both, as with the control loop.
 *
 * Thread: the owner's, unless a function says otherwise.
 */
#ifndef DATAPLANE_REACTOR_H
#define DATAPLANE_REACTOR_H

#include <stdbool.h>
#include <stdint.h>

#include "base/loop_core.h"
#include "dataplane/provider.h"

struct tl_reactor;

struct tl_reactor_options {
    int64_t spin_ns; /* how long to poll without a result before sleeping, while work is under way; 0: not at all */
};

struct tl_reactor_stats {
    uint64_t rounds;
    uint64_t sleeps;
    uint64_t events;       /* that the provider has reported */
    uint64_t most_members; /* the most that were handled before others had their turn (base/quota.h) */
};

/* Creates a reactor over a provider, which stays the caller's and must outlive it. Errors: TL_RESOURCE_EXHAUSTED: no
 * memory or descriptor. Ownership: *ret_reactor until tl_reactor_destroy. */
enum tl_status tl_reactor_create(struct tl_provider *provider, const struct tl_reactor_options *options,
                                 struct tl_reactor **ret_reactor, struct tl_error *ret_error) TL_MUST_USE;
/* Runs the closures that are left and frees the reactor. Every object that belongs to it must be gone, and it must not
 * be busy. NULL is accepted. */
void tl_reactor_destroy(struct tl_reactor *reactor);

/* Runs one round; sleeps until deadline_ns (monotonic; 0: not at all) when there is nothing to do and it has spun
 * enough. Returns whether anything was done; a wake counts. */
bool tl_reactor_run_once(struct tl_reactor *reactor, int64_t deadline_ns);
/* Returns whether the next round has posted closures to run, or was asked for by tl_reactor_wake. */
bool tl_reactor_is_wanted(const struct tl_reactor *reactor);

/* Posts a closure, which runs on the owner's thread. Thread: any. */
void tl_reactor_post(struct tl_reactor *reactor, struct tl_closure *closure);
/* Posts all closures of a list, which is empty afterwards. Thread: any. */
void tl_reactor_post_all(struct tl_reactor *reactor, struct tl_list *closures);
/* Makes a sleeping owner return. Thread: any. */
void tl_reactor_wake(struct tl_reactor *reactor);
/* Runs the closure at the end of this round; it must not be deferred already. */
void tl_reactor_defer(struct tl_reactor *reactor, struct tl_closure *closure);
/* Runs the closure behind all that this round defers; it must not be deferred already. */
void tl_reactor_defer_last(struct tl_reactor *reactor, struct tl_closure *closure);

/* Return the timers and the provider, valid as long as the reactor. */
struct tl_timers *tl_reactor_timers(struct tl_reactor *reactor);
struct tl_provider *tl_reactor_provider(struct tl_reactor *reactor);

/* Returns whether no peer can answer while this thread polls, because all of them run on its processor. */
bool tl_reactor_shares_processor(const struct tl_reactor *reactor);
/* Counts work that is under way (+1, -1): while the sum is not 0, the reactor spins before it sleeps. */
void tl_reactor_busy(struct tl_reactor *reactor, int change);

/* For an owner that sleeps on another descriptor. tl_reactor_prepare_sleep returns true when the owner may sleep; until
 * tl_reactor_end_sleep, which must follow, the descriptor of tl_reactor_fd is readable as soon as there is something to
 * do. It returns false when there is something to do already, of which events may have been handled, or when the
 * provider has no descriptor; the owner then runs a round instead of sleeping. is_woken: false: the descriptor did not
 * end the sleep, and need not be looked at. */
int tl_reactor_fd(const struct tl_reactor *reactor);
bool tl_reactor_prepare_sleep(struct tl_reactor *reactor);
void tl_reactor_end_sleep(struct tl_reactor *reactor, bool is_woken);

/* Reads the counters at this moment. Thread: any. */
void tl_reactor_get_stats(const struct tl_reactor *reactor, struct tl_reactor_stats *ret_stats);

#endif
