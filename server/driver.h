// SPDX-License-Identifier: Apache-2.0
/*
 * Who drives a worker's loop: a thread of ours, or the callers that wait.
 *
 * With a thread, that thread owns the loop and everybody else waits on a condition. Without one, whoever waits takes the loop for one round
 * at a time; others that wait meanwhile are woken after each round, to look again and perhaps to take the next.
 */
#ifndef SERVER_DRIVER_H
#define SERVER_DRIVER_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/worker.h>

#include "base/list.h"
#include "control/loop.h"

struct tl_driver {
    struct tl_loop *loop;
    enum tl_progress progress;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t turn; /* a round is over, or something that was waited for is done */
    unsigned waiting;    /* threads in tl_driver_step that wait for their turn */
    bool is_driven;      /* somebody is in tl_loop_run_once */
    bool is_stopping;
    struct tl_list queues; /* of struct tl_cq whose readers drive this; without a thread (completion_queue.c) */
};

/* Starts the thread, if there is to be one. Errors: TL_RESOURCE_EXHAUSTED: no thread. */
enum tl_status tl_driver_init(struct tl_driver *driver, struct tl_loop *loop, enum tl_progress progress,
                              struct tl_error *ret_error) TL_MUST_USE;

/* Ends the thread; nobody may wait. */
void tl_driver_fini(struct tl_driver *driver);

/* Without a thread: one round by this thread, or the end of somebody else's round; false when deadline_ns came first. */
bool tl_driver_step(struct tl_driver *driver, int64_t deadline_ns);

/* Something that one thread waits for. */
struct tl_wait {
    struct tl_driver *driver;
    pthread_cond_t cond; /* with a thread of ours */
    bool is_done;        /* under driver->mutex */
};

void tl_wait_init(struct tl_wait *wait, struct tl_driver *driver);
void tl_wait_fini(struct tl_wait *wait);
/* It has happened. The wait may be gone afterwards. Thread: the loop's owner. */
void tl_wait_done(struct tl_wait *wait);
/* Waits until it has happened; false when deadline_ns came first. */
bool tl_wait_for(struct tl_wait *wait, int64_t deadline_ns);

#endif
