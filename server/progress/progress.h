// SPDX-License-Identifier: Apache-2.0
/*
 * Progress: which thread runs a worker's loop. It is a thread of the library, or the callers that wait.
 *
 * Without a thread (TL_PROGRESS_CALLER) a caller that waits takes the loop and runs one round after another until what
 * it waits for has happened; then it hands the loop to the next caller that waits. While no caller runs them, a helper
 * thread sees to it that reactors in the same rounds run now and then (server/progress/poller.h).
 *
 * With a thread (TL_PROGRESS_THREAD) the thread runs the rounds. But a caller that blocks in one call after another,
 * or waits at a completion queue again and again, would pay two thread switches for each; so after a few such waits in
 * close succession the thread parks and the callers run the rounds, as above. It takes the loop back when they have
 * stopped for a moment, or at once when work is posted that no caller waits for (tl_progress_post).
 *
 * A reactor with a thread is borrowed from it by such callers (server/progress/reactor_thread.h), and rests when the
 * last of them leaves.
 *
 *     RUNNING --park wanted--> PARKED --no round for a while, or work was posted--> RUNNING
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
    struct tl_list waits;  /* struct tl_wait: the threads that wait, in the order in which they came */
    struct tl_list queues; /* struct tl_cq whose readers run the rounds (completion_queue.c) */
    unsigned reader_count; /* atomic: threads that wait at these queues */
    bool is_running;       /* a thread is in tl_poller_run */
    uint64_t round_count;  /* rounds that have ended */
    uint64_t beat_round;   /* round_count when the helper last checked it */
    bool is_stopping;

    /* With a thread. */
    pthread_cond_t thread_cond; /* the parked thread sleeps on it */
    bool is_park_wanted;
    bool is_parked;         /* callers run the rounds */
    bool is_thread_wanted;  /* work was posted that no caller waits for */
    bool is_leave_awaited;  /* the parked thread sleeps until the present caller has left */
    uint64_t caller_rounds; /* rounds that callers have run */
    unsigned streak;        /* waits in close succession */
    int64_t last_left_ns;   /* when the latest wait ended */
};

/* From here on work may be posted. It runs once the engine has started. */
void tl_progress_init(struct tl_progress_engine *progress, struct tl_loop *loop, enum tl_progress mode);

/* Nothing is posted any more: a thread that posts uses the engine after its closure has begun to run. The engine has
 * not started, or has stopped. */
void tl_progress_fini(struct tl_progress_engine *progress);

/* Starts the thread, if there is to be one. executor is that of the loop's owner. The reactors run in the rounds of the
 * loop. Errors: TL_RESOURCE_EXHAUSTED: no thread or descriptor. */
enum tl_status tl_progress_start(struct tl_progress_engine *progress, const struct tl_executor *executor,
                                 const struct tl_polled_reactor *reactors, size_t reactor_count,
                                 struct tl_error *ret_error) TL_MUST_USE;

/* Ends the thread. No caller may wait. */
void tl_progress_stop(struct tl_progress_engine *progress);

/* Posts work that its poster does not wait for. Thread: any. */
void tl_progress_post(struct tl_progress_engine *progress, struct tl_closure *closure);
/* The same for all closures of a list, which is empty afterwards. */
void tl_progress_post_all(struct tl_progress_engine *progress, struct tl_list *closures);

/* Counts requests that travel on the data plane (+1, -1): while there are any, reactors are polled all the time.
 * Thread: the loop's owner. */
static inline void tl_progress_busy(struct tl_progress_engine *progress, int change)
{
    tl_poller_busy(&progress->poller, change);
}

/* Returns how many rounds have ended, for tl_progress_step. Thread: any. */
uint64_t tl_progress_rounds(struct tl_progress_engine *progress);

/* Runs one round on this thread or waits for the end of another thread's round, unless one has ended since there were
 * `rounds`; only without a thread. Returns false when deadline_ns came first. A caller that looks for the results of
 * rounds counts the rounds before it looks. */
bool tl_progress_step(struct tl_progress_engine *progress, uint64_t rounds, int64_t deadline_ns);

/* An event that one thread waits for. */
struct tl_wait {
    struct tl_progress_engine *progress;
    struct tl_list link; /* in progress->waits while it sleeps or runs rounds */
    pthread_cond_t cond;
    bool is_done;       /* under progress->mutex */
    bool is_each_round; /* it is woken after every round of other threads */
    unsigned weight;    /* how many short waits it lasts as long as, about; 1 at first */
};

void tl_wait_init(struct tl_wait *wait, struct tl_progress_engine *progress);
void tl_wait_fini(struct tl_wait *wait);
/* Reports that the event has happened. The wait may be gone afterwards. Thread: the loop's owner. */
void tl_wait_done(struct tl_wait *wait);
/* Waits for the event. Returns false when deadline_ns came first. */
bool tl_wait_for(struct tl_wait *wait, int64_t deadline_ns);

#endif
