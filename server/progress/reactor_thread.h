// SPDX-License-Identifier: Apache-2.0
/*
 * The thread of a reactor, which lends the reactor to the threads of the program that drive the worker's loop.
 *
 * Happy path: the thread runs the rounds. A thread of the program that drives the loop asks for the reactor; the thread
 * rests it, and the borrower takes it and runs it with the loop, without a switch of threads between an operation and
 * its messages. A borrower that sleeps or goes away rests the reactor: it is armed, the thread watches its descriptor,
 * and the first one takes it: the next borrower, or the thread as soon as there is something to do. The thread rests it
 * again after a few events that come between two calls of a borrower, and keeps it after more of them. A borrower that
 * goes away from a busy reactor mostly comes back at once, to take more results: it leaves the reactor, and the thread
 * takes it only after a time.
 *
 *     THREAD --was asked--> RESTING --borrow--> LENT --rest--> RESTING --events--> THREAD
 *                                               LENT --leave--> RESTING --time--> THREAD
 *                                               LENT --give back--> THREAD
 *
 * No event is lost: the reactor is armed before it rests, the thread watches it or the time then, and every way out of
 * RESTING is one atomic change that a single thread makes.
 */
#ifndef SERVER_PROGRESS_REACTOR_THREAD_H
#define SERVER_PROGRESS_REACTOR_THREAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "control/loop.h"
#include "dataplane/reactor.h"
#include "server/progress/executor.h"

struct tl_reactor_thread {
    struct tl_reactor *reactor;
    const struct tl_executor *executor;
    struct tl_loop *loop;
    pthread_t thread;
    int epoll_fd;           /* the thread sleeps on it while it does not own the reactor */
    int call_fd;            /* eventfd, watched by it: the thread owns the reactor, or is to end */
    int left_fd;            /* timerfd, watched by it: a reactor that was left is to be looked at */
    atomic_int owner;       /* enum reactor_owner */
    atomic_bool is_watched; /* the next event of a resting reactor wakes the thread */
    unsigned left_events;   /* the owner's: those that the thread has handled since the reactor was borrowed */
    atomic_bool is_asked_for;
    atomic_bool is_stopping;
    atomic_uint_fast64_t lent_count;  /* how often the thread has rested its reactor for others */
    atomic_uint_fast64_t taken_count; /* how often it has taken a resting one back, and kept it */
};

/* Starts the thread; the reactor and its executor are used until tl_reactor_thread_stop. Errors: TL_RESOURCE_EXHAUSTED:
 * no descriptor or no thread; *thread then needs no stop. */
enum tl_status tl_reactor_thread_start(struct tl_reactor_thread *thread, struct tl_reactor *reactor,
                                       const struct tl_executor *executor, struct tl_loop *loop,
                                       struct tl_error *ret_error) TL_MUST_USE;
/* Ends the thread, when nothing else drives the reactor any more. Blocks: until it has ended. */
void tl_reactor_thread_stop(struct tl_reactor_thread *thread);

/* Asks for the reactor. When the thread has rested it, it wakes the loop. Thread: any. */
void tl_reactor_thread_ask(struct tl_reactor_thread *thread);
/* Takes a resting reactor. Returns false when it does not rest. Thread: the loop's owner. */
bool tl_reactor_thread_borrow(struct tl_reactor_thread *thread);
/* Rests a reactor that was borrowed. Returns false when it has something to do, or can never rest: it is still lent.
 * Thread: the loop's owner. */
bool tl_reactor_thread_rest(struct tl_reactor_thread *thread);
/* Leaves a reactor that was borrowed and has something to do. The thread takes it if no borrower does before
 * TL_REACTOR_LEFT_NS have passed. Thread: the loop's owner. */
#define TL_REACTOR_LEFT_NS (200 * 1000)
void tl_reactor_thread_leave(struct tl_reactor_thread *thread);
/* Gives a reactor that was borrowed back to its thread. Thread: the loop's owner. */
void tl_reactor_thread_give_back(struct tl_reactor_thread *thread);
/* Returns whether the reactor is lent to the loop's owner. Thread: the loop's owner. */
bool tl_reactor_thread_has_lent(const struct tl_reactor_thread *thread);

#endif
