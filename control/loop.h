// SPDX-License-Identifier: Apache-2.0
/*
 * The control loop: one owner at a time waits for gRPC's completion queue, closures and timers, and runs what they call
 * for.
 *
 * Happy path: the owner calls tl_loop_run_once again and again; each call delivers closures, fires timers, waits for
 * the completion queue, handles a batch of its events and then runs what was deferred meanwhile, so that many small
 * things leave in one message. Any thread may post a closure, which wakes the owner if it sleeps.
 *
 * All control objects belong to a loop, and their functions are for its owner's thread unless they say otherwise.
 */
#ifndef CONTROL_LOOP_H
#define CONTROL_LOOP_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mailbox.h"
#include "base/timer.h"

struct tl_loop;

/* The first one starts gRPC and its threads. Errors: TL_RESOURCE_EXHAUSTED: no memory, or not enough threads. Thread:
 * any. */
enum tl_status tl_loop_create(struct tl_loop **ret_loop, struct tl_error *ret_error) TL_MUST_USE;

/* Everything that belongs to the loop must be gone. NULL is accepted. Blocks: until the completion queue is empty. */
void tl_loop_destroy(struct tl_loop *loop);

/* One round, sleeping until deadline_ns (monotonic; 0: not at all) when there is nothing to do. True when something
 * was done. */
bool tl_loop_run_once(struct tl_loop *loop, int64_t deadline_ns);

/* The part of a round that does not look at gRPC: closures, timers, and what was deferred. True when there was any. */
bool tl_loop_run_closures(struct tl_loop *loop);

/* Thread: any. The closure is delivered on the owner's thread. */
void tl_loop_post(struct tl_loop *loop, struct tl_closure *closure);

/* Makes a sleeping owner return from tl_loop_run_once. Thread: any. */
void tl_loop_wake(struct tl_loop *loop);

/* Runs the closure at the end of this round; it must not be deferred already. */
void tl_loop_defer(struct tl_loop *loop, struct tl_closure *closure);

/* What the owner is at. */
struct tl_loop_pulse {
    uint64_t rounds; /* a number that changes whenever the owner enters or leaves gRPC */
    bool is_in_grpc; /* it has entered and not left */
    int64_t cpu_ns;  /* processor time of the owner's thread so far; 0: unknown */
};

/* Thread: any. */
void tl_loop_get_pulse(const struct tl_loop *loop, struct tl_loop_pulse *ret_pulse);

struct tl_timers *tl_loop_timers(struct tl_loop *loop);

#endif
