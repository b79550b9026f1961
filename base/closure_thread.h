// SPDX-License-Identifier: Apache-2.0
/*
 * A thread that runs closures one after the other, for work that takes too long for an event loop.
 *
 * Happy path: the thread is started when it is first needed; any thread posts closures to it; each runs once. Urgent
 * closures have a queue of their own. While both queues have closures, the thread takes from them in turn, so that
 * neither waits for the other to become empty.
 * tl_closure_thread_stop lets the running closure finish, ends the thread and returns the closures that have not run,
 * so that the caller can cancel them.
 *
 * Thread: any, unless a function says otherwise.
 */
#ifndef BASE_CLOSURE_THREAD_H
#define BASE_CLOSURE_THREAD_H

#include <pthread.h>
#include <stdbool.h>

#include <tensorlane/status.h>

#include "base/mailbox.h"

struct tl_closure_thread {
    const char *name; /* the name that the thread has */
    pthread_t thread;
    pthread_mutex_t mutex;  /* guards what follows */
    pthread_cond_t wake;    /* a closure waits, or the thread is to stop */
    struct tl_list waiting; /* closures that were posted with tl_closure_thread_post */
    struct tl_list urgent;  /* closures that were posted with tl_closure_thread_post_urgent */
    bool was_urgent;        /* the closure that was taken last came from `urgent` */
    bool is_started;
    bool is_stopping;
};

/* name has at most 15 bytes and outlives the thread. */
void tl_closure_thread_init(struct tl_closure_thread *thread, const char *name);
/* The thread does not run: it was stopped, or never started. */
void tl_closure_thread_fini(struct tl_closure_thread *thread);

/* Starts the thread, unless it runs already. Errors: TL_RESOURCE_EXHAUSTED: the system gives no thread. */
enum tl_status tl_closure_thread_start(struct tl_closure_thread *thread, struct tl_error *ret_error) TL_MUST_USE;

/* Posts a closure behind the others that are not urgent. It waits until the thread is started. The thread must not be
 * stopping. */
void tl_closure_thread_post(struct tl_closure_thread *thread, struct tl_closure *closure);
/* Posts a closure behind the other urgent ones; does nothing if it waits already. Its link must be initialised. */
void tl_closure_thread_post_urgent(struct tl_closure_thread *thread, struct tl_closure *closure);

/* Returns whether tl_closure_thread_stop was called: a closure that runs may then end early. */
bool tl_closure_thread_is_stopping(struct tl_closure_thread *thread);

/* Ends the thread and moves the closures that have not run to *ret_left, urgent ones first, otherwise in order. Blocks:
 * until the running closure has returned. */
void tl_closure_thread_stop(struct tl_closure_thread *thread, struct tl_list *ret_left);

#endif
