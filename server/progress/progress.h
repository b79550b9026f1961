// SPDX-License-Identifier: Apache-2.0
/*
 * Who drives a worker's loop: a thread of ours, or the callers that wait.
 *
 * Without a thread (TL_PROGRESS_CALLER) whoever waits takes the loop for one round after another until what it waits
 * for has happened, and hands it to the next that waits. A reactor that is driven with it is looked after by its helper
 * thread while nobody does (server/progress/poller.h).
 *
 * With a thread (TL_PROGRESS_THREAD) the thread drives. But a caller that blocks in one call after another would pay
 * two thread switches for each; so after a few such calls in close succession the thread parks and lets the callers
 * drive, as above. It takes the loop back when they have stopped for a moment, or at once when work comes that nobody
 * waits for (tl_progress_post).
 *
 *      DRIVING --park wanted--> PARKED --nobody has driven for a while, or work was posted--> DRIVING
 */
#ifndef SERVER_PROGRESS_PROGRESS_H
#define SERVER_PROGRESS_PROGRESS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/worker.h>

#include "base/list.h"
#include "server/progress/poller.h"

struct tl_progress_engine {
    struct tl_loop *loop;
    struct tl_poller poller;
    enum tl_progress mode;
    pthread_t thread;
    pthread_mutex_t mutex;
    struct tl_list waits;  /* of struct tl_wait: the threads that wait, in the order they came */
    struct tl_list queues; /* of struct tl_cq whose readers drive this; without a thread (completion_queue.c) */
    bool is_running;       /* somebody is in tl_poller_run */
    uint64_t round_count;  /* rounds that are over */
    uint64_t beat_round;   /* round_count when the helper looked last */
    bool is_stopping;

    /* With a thread. */
    pthread_cond_t thread_cond; /* what the parked thread sleeps on */
    bool is_park_wanted;
    bool is_parked;         /* callers drive */
    bool is_thread_wanted;  /* work was posted that no caller waits for */
    bool is_leave_awaited;  /* the parked thread sleeps until the present driver leaves */
    uint64_t caller_rounds; /* how often a caller has driven */
    unsigned streak;        /* waits in close succession */
    int64_t last_left_ns;   /* when the latest wait ended */
};

/* Starts the thread, if there is to be one. executor: of the loop's owner. The reactors are driven with the loop.
 * Errors: TL_RESOURCE_EXHAUSTED: no thread or descriptor. */
enum tl_status tl_progress_init(struct tl_progress_engine *progress, struct tl_loop *loop,
                                const struct tl_executor *executor, const struct tl_polled_reactor *reactors,
                                size_t reactor_count, enum tl_progress mode, struct tl_error *ret_error) TL_MUST_USE;

/* Ends the thread; nobody may wait. */
void tl_progress_fini(struct tl_progress_engine *progress);

/* Brings work that its poster does not wait for. Thread: any. */
void tl_progress_post(struct tl_progress_engine *progress, struct tl_closure *closure);

/* Counts requests that travel on the data plane (+1, -1): while there are any, who drives a reactor polls it. Thread:
 * the loop's owner. */
static inline void tl_progress_busy(struct tl_progress_engine *progress, int change)
{
    progress->poller.busy_count += change;
}

/* How many rounds are over; for tl_progress_step. Thread: any. */
uint64_t tl_progress_rounds(struct tl_progress_engine *progress);

/* Without a thread: one round by this thread, or the end of somebody else's, unless one has ended since there were
 * `rounds`; false when deadline_ns came first. Who looks for what rounds bring counts them before it looks. */
bool tl_progress_step(struct tl_progress_engine *progress, uint64_t rounds, int64_t deadline_ns);

/* Something that one thread waits for. */
struct tl_wait {
    struct tl_progress_engine *progress;
    struct tl_list link; /* in driver->waits while it sleeps or drives */
    pthread_cond_t cond;
    bool is_done;       /* under driver->mutex */
    bool is_each_round; /* wants to be woken after every round of others */
};

void tl_wait_init(struct tl_wait *wait, struct tl_progress_engine *progress);
void tl_wait_fini(struct tl_wait *wait);
/* It has happened. The wait may be gone afterwards. Thread: the loop's owner. */
void tl_wait_done(struct tl_wait *wait);
/* Waits until it has happened; false when deadline_ns came first. */
bool tl_wait_for(struct tl_wait *wait, int64_t deadline_ns);

#endif
