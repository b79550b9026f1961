// SPDX-License-Identifier: Apache-2.0
/*
 * The control loop: an event loop (base/loop_core.h) over gRPC's completion queue.
 *
 * Happy path: the owner calls tl_loop_run_once again and again. Each call runs the posted closures, fires timers, waits
 * for the completion queue, handles a batch of its events and then runs the closures that were deferred meanwhile, so
 * that many small items leave in one message. Any thread may post a closure, which wakes the owner if it sleeps.
 *
 * All control objects belong to a loop, and their functions are for its owner's thread unless they say otherwise.
 */
#ifndef CONTROL_LOOP_H
#define CONTROL_LOOP_H

#include <stdbool.h>
#include <stdint.h>

#include "base/loop_core.h"

struct tl_loop;
struct tl_tls_relay;

/* Creates a loop; the first one starts gRPC and its threads. Errors: TL_RESOURCE_EXHAUSTED: no memory, or not enough
 * threads. Ownership: *ret_loop until tl_loop_destroy. Thread: any. */
enum tl_status tl_loop_create(struct tl_loop **ret_loop, struct tl_error *ret_error) TL_MUST_USE;

/* Runs the closures that are left and frees the loop. Every object that belongs to it must be gone. NULL is accepted.
 * Blocks: until the completion queue is empty. */
void tl_loop_destroy(struct tl_loop *loop);

/* Runs one round; sleeps until deadline_ns (monotonic; 0: not at all) when there is nothing to do. Returns whether
 * anything was done. */
bool tl_loop_run_once(struct tl_loop *loop, int64_t deadline_ns);

/* From now on the owner moves the bytes of these TLS connections itself while it is at work (control/tls_relay.h),
 * until tl_loop_leave_relay. Once. Errors: TL_RESOURCE_EXHAUSTED: no descriptor. */
enum tl_status tl_loop_enter_relay(struct tl_loop *loop, struct tl_tls_relay *relay,
                                   struct tl_error *ret_error) TL_MUST_USE;
void tl_loop_leave_relay(struct tl_loop *loop);
/* The owner runs no round for now: what is left of these bytes is moved without it. */
void tl_loop_pause(struct tl_loop *loop);
/* gRPC is about to be given something to send, which leaves by the end of this round. */
void tl_loop_begin_write(struct tl_loop *loop);

/* Runs the part of a round that does not look at gRPC: closures, timers, deferred closures. Returns whether there were
 * any. */
bool tl_loop_run_closures(struct tl_loop *loop);

/* Returns whether closures wait to be run: posted, left by the quota, or deferred. */
bool tl_loop_has_work(struct tl_loop *loop);

/* Posts a closure, which runs on the owner's thread. Thread: any. */
void tl_loop_post(struct tl_loop *loop, struct tl_closure *closure);
/* Posts all closures of a list, which is empty afterwards. Thread: any. */
void tl_loop_post_all(struct tl_loop *loop, struct tl_list *closures);

/* Makes a sleeping owner return from tl_loop_run_once. Thread: any. */
void tl_loop_wake(struct tl_loop *loop);

/* Runs the closure at the end of this round; it must not be deferred already. */
void tl_loop_defer(struct tl_loop *loop, struct tl_closure *closure);
/* Runs the closure behind all that this round defers; it must not be deferred already. */
void tl_loop_defer_last(struct tl_loop *loop, struct tl_closure *closure);

/* What the owner is doing. */
struct tl_loop_pulse {
    uint64_t rounds; /* a number that changes whenever the owner enters or leaves gRPC */
    bool is_in_grpc; /* it has entered gRPC and not left */
    int64_t cpu_ns;  /* processor time of the owner's thread so far; 0: unknown */
};

/* Reads the pulse at this moment. Thread: any. */
void tl_loop_get_pulse(const struct tl_loop *loop, struct tl_loop_pulse *ret_pulse);

/* Returns the timers of the loop, valid as long as the loop. */
struct tl_timers *tl_loop_timers(struct tl_loop *loop);
/* Returns what is handled at a time, valid as long as the loop. It is renewed before each event of gRPC, and where
 * closures, timers and deferred closures are run. */
struct tl_quota *tl_loop_quota(struct tl_loop *loop);

#endif
