// SPDX-License-Identifier: Apache-2.0
#include "server/progress/progress.h"

#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"

/* Waits that follow each other within this time are one streak, */
#define STREAK_GAP_NS (500 * 1000)
/* and after so many of them the callers run the rounds. */
#define STREAK_LENGTH 4
/* After this time without a round the parked thread takes the loop back. */
#define PARKED_LOOK_NS (1 * TL_NS_PER_MS)

static void cond_init_monotonic(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* Returns false when the deadline has come. */
static bool cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t deadline_ns)
{
    if (deadline_ns == TL_TIME_NEVER) return pthread_cond_wait(cond, mutex) == 0;
    struct timespec time = {.tv_sec = deadline_ns / TL_NS_PER_SEC, .tv_nsec = deadline_ns % TL_NS_PER_SEC};
    return pthread_cond_timedwait(cond, mutex, &time) == 0;
}

/* ------------------------------------------------------------------------------------------------------ rounds -- */

/* Returns whether a caller may take the loop now. */
static bool is_loop_free(const struct tl_progress_engine *progress)
{
    return !progress->is_running && (progress->mode == TL_PROGRESS_CALLER || progress->is_parked);
}

/* Lets the first caller that waits take the loop. */
static void hand_on(struct tl_progress_engine *progress)
{
    if (!is_loop_free(progress) || tl_list_is_empty(&progress->waits)) return;
    pthread_cond_signal(&TL_CONTAINER_OF(progress->waits.next, struct tl_wait, link)->cond);
}

/* Returns whether something was posted that no caller will run. The loop is free. */
static bool has_abandoned_work(const struct tl_progress_engine *progress)
{
    return tl_list_is_empty(&progress->waits) && tl_loop_has_work(progress->loop);
}

/* Runs one round. The mutex is held before and after it, and free meanwhile. Returns whether anything was done. */
static bool run_locked(struct tl_progress_engine *progress, int64_t deadline_ns)
{
    bool is_borrowing = progress->is_parked;
    progress->is_running = true;
    pthread_mutex_unlock(&progress->mutex);
    if (is_borrowing) tl_poller_borrow(&progress->poller);
    bool did_work = tl_poller_run(&progress->poller, deadline_ns);
    pthread_mutex_lock(&progress->mutex);
    progress->is_running = false;
    progress->round_count++;
    TL_LIST_FOREACH(&progress->waits, link)
    {
        struct tl_wait *wait = TL_CONTAINER_OF(link, struct tl_wait, link);
        if (wait->is_each_round) pthread_cond_signal(&wait->cond);
    }
    return did_work;
}

/* ------------------------------------------------------------------------------------------------------ thread -- */

/* Sleeps while callers run the rounds. */
static void park(struct tl_progress_engine *progress)
{
    progress->is_park_wanted = false;
    __atomic_store_n(&progress->is_parked, true, __ATOMIC_RELAXED);
    hand_on(progress);
    progress->is_thread_wanted = has_abandoned_work(progress);
    uint64_t rounds = progress->caller_rounds;
    bool is_over = false, is_same_round = false;
    while (!is_over && !progress->is_stopping) {
        if (progress->is_running && (is_same_round || progress->is_thread_wanted)) {
            progress->is_leave_awaited = true;
            pthread_cond_wait(&progress->thread_cond, &progress->mutex);
            is_same_round = false;
        } else {
            int64_t look_ns = tl_clock_deadline_ns(PARKED_LOOK_NS);
            bool is_quiet =
                !progress->is_thread_wanted && !cond_wait_until(&progress->thread_cond, &progress->mutex, look_ns);
            is_same_round = rounds == progress->caller_rounds;
            is_over = !progress->is_running && (progress->is_thread_wanted || (is_quiet && is_same_round));
            rounds = progress->caller_rounds;
        }
    }
    tl_poller_give_back(&progress->poller);
    __atomic_store_n(&progress->is_parked, false, __ATOMIC_RELAXED);
    progress->is_thread_wanted = false;
    progress->is_leave_awaited = false;
    progress->streak = 0;
}

static void *run(void *context)
{
    struct tl_progress_engine *progress = context;
    pthread_mutex_lock(&progress->mutex);
    while (!progress->is_stopping) {
        if (progress->is_park_wanted) {
            park(progress);
        } else {
            run_locked(progress, TL_TIME_NEVER);
        }
    }
    pthread_mutex_unlock(&progress->mutex);
    return NULL;
}

/* One beat runs at most so many rounds: it answers what has come, and leaves the loop to its users. */
#define BEAT_ROUNDS 16

/* Called by the helper: runs rounds if none was run since it last looked. */
static void beat(void *context)
{
    struct tl_progress_engine *progress = context;
    pthread_mutex_lock(&progress->mutex);
    if (!progress->is_running && progress->round_count == progress->beat_round) {
        tl_poller_want_grpc(&progress->poller);
        bool did_work = true;
        for (unsigned i = 0; i < BEAT_ROUNDS && did_work && !progress->is_running; i++)
            did_work = run_locked(progress, 0);
        hand_on(progress);
    }
    progress->beat_round = progress->round_count;
    pthread_mutex_unlock(&progress->mutex);
}

void tl_progress_init(struct tl_progress_engine *progress, struct tl_loop *loop, enum tl_progress mode)
{
    *progress = (struct tl_progress_engine){.loop = loop, .mode = mode};
    tl_list_init(&progress->waits);
    tl_list_init(&progress->queues);
    pthread_mutex_init(&progress->mutex, NULL);
    cond_init_monotonic(&progress->thread_cond);
}

void tl_progress_fini(struct tl_progress_engine *progress)
{
    TL_CHECK(!progress->is_running && tl_list_is_empty(&progress->waits));
    pthread_cond_destroy(&progress->thread_cond);
    pthread_mutex_destroy(&progress->mutex);
}

enum tl_status tl_progress_start(struct tl_progress_engine *progress, const struct tl_executor *executor,
                                 const struct tl_polled_reactor *reactors, size_t reactor_count,
                                 struct tl_error *ret_error)
{
    const struct tl_poller_heartbeat beats = {.look = beat, .context = progress};
    enum tl_status status =
        tl_poller_init(&progress->poller, progress->loop, executor, reactors, reactor_count, &beats, ret_error);
    if (status != TL_OK || progress->mode == TL_PROGRESS_CALLER) return status;
    status = tl_thread_start("tl-control", run, progress, &progress->thread, ret_error);
    if (status != TL_OK) tl_poller_fini(&progress->poller);
    return status;
}

void tl_progress_stop(struct tl_progress_engine *progress)
{
    if (progress->mode == TL_PROGRESS_THREAD) {
        pthread_mutex_lock(&progress->mutex);
        progress->is_stopping = true;
        pthread_cond_signal(&progress->thread_cond);
        pthread_mutex_unlock(&progress->mutex);
        tl_loop_wake(progress->loop);
        pthread_join(progress->thread, NULL);
    }
    tl_poller_fini(&progress->poller);
}

/* Something was posted to the loop: lets the parked thread run it. */
static void want_thread(struct tl_progress_engine *progress)
{
    /* A thread that is about to park looks for the closure afterwards. */
    if (!__atomic_load_n(&progress->is_parked, __ATOMIC_RELAXED)) return;
    pthread_mutex_lock(&progress->mutex);
    if (progress->is_parked && !progress->is_running) {
        progress->is_thread_wanted = true;
        pthread_cond_signal(&progress->thread_cond);
    }
    pthread_mutex_unlock(&progress->mutex);
}

void tl_progress_post(struct tl_progress_engine *progress, struct tl_closure *closure)
{
    tl_loop_post(progress->loop, closure);
    want_thread(progress);
}

void tl_progress_post_all(struct tl_progress_engine *progress, struct tl_list *closures)
{
    tl_loop_post_all(progress->loop, closures);
    want_thread(progress);
}

/* ------------------------------------------------------------------------------------------------------- waits -- */

void tl_wait_init(struct tl_wait *wait, struct tl_progress_engine *progress)
{
    *wait = (struct tl_wait){.progress = progress, .weight = 1};
    tl_list_init(&wait->link);
    cond_init_monotonic(&wait->cond);
}

void tl_wait_fini(struct tl_wait *wait)
{
    pthread_cond_destroy(&wait->cond);
}

void tl_wait_done(struct tl_wait *wait)
{
    struct tl_progress_engine *progress = wait->progress;
    pthread_mutex_lock(&progress->mutex);
    wait->is_done = true;
    pthread_cond_signal(&wait->cond);
    pthread_mutex_unlock(&progress->mutex);
}

/* Runs one round on a caller's thread. Returns false when the deadline has come. Without a thread a caller that comes
 * with no time still finishes the work that it finds; else the thread does that. */
static bool run_round(struct tl_progress_engine *progress, int64_t deadline_ns)
{
    progress->caller_rounds++;
    progress->is_thread_wanted = false; /* this round runs what was posted */
    bool did_work = run_locked(progress, deadline_ns);
    return (did_work && progress->mode == TL_PROGRESS_CALLER) || tl_clock_now_ns() < deadline_ns;
}

/* Begins a wait: counts how many have followed each other closely. */
static void enter(struct tl_progress_engine *progress, struct tl_wait *wait)
{
    if (progress->mode == TL_PROGRESS_THREAD) {
        bool is_close = tl_clock_now_ns() - progress->last_left_ns < STREAK_GAP_NS;
        progress->streak = is_close ? progress->streak + wait->weight : wait->weight - 1;
    }
    tl_list_push_back(&progress->waits, &wait->link);
}

/* Rests the reactors that callers have borrowed, because no caller waits any more. The mutex is free meanwhile. */
static void rest_locked(struct tl_progress_engine *progress)
{
    if (!progress->is_parked || progress->is_running || !tl_list_is_empty(&progress->waits)) return;
    if (!tl_poller_has_borrowed(&progress->poller)) return;
    progress->is_running = true;
    pthread_mutex_unlock(&progress->mutex);
    tl_poller_rest(&progress->poller);
    pthread_mutex_lock(&progress->mutex);
    progress->is_running = false;
}

static void leave(struct tl_progress_engine *progress, struct tl_wait *wait)
{
    tl_list_remove(&wait->link);
    rest_locked(progress);
    hand_on(progress);
    if (progress->mode == TL_PROGRESS_CALLER) {
        if (is_loop_free(progress) && tl_list_is_empty(&progress->waits)) tl_loop_pause(progress->loop);
        return;
    }
    progress->last_left_ns = tl_clock_now_ns();
    /* What others posted during the last round has woken no thread. */
    if (is_loop_free(progress) && has_abandoned_work(progress)) {
        progress->is_thread_wanted = true;
        pthread_cond_signal(&progress->thread_cond);
    }
    if (progress->is_leave_awaited && !progress->is_running) {
        progress->is_leave_awaited = false;
        pthread_cond_signal(&progress->thread_cond);
    }
}

/* Asks the thread to park when the callers would do better without it. */
static void maybe_want_park(struct tl_progress_engine *progress)
{
    if (progress->mode == TL_PROGRESS_CALLER || progress->is_parked || progress->is_park_wanted) return;
    if (progress->streak < STREAK_LENGTH) return;
    progress->is_park_wanted = true;
    pthread_mutex_unlock(&progress->mutex);
    tl_loop_wake(progress->loop);
    pthread_mutex_lock(&progress->mutex);
}

bool tl_wait_for(struct tl_wait *wait, int64_t deadline_ns)
{
    struct tl_progress_engine *progress = wait->progress;
    bool is_in_time = true;
    pthread_mutex_lock(&progress->mutex);
    enter(progress, wait);
    maybe_want_park(progress);
    while (!wait->is_done && is_in_time) {
        is_in_time = is_loop_free(progress) ? run_round(progress, deadline_ns)
                                            : cond_wait_until(&wait->cond, &progress->mutex, deadline_ns);
    }
    leave(progress, wait);
    bool is_done = wait->is_done;
    pthread_mutex_unlock(&progress->mutex);
    return is_done;
}

uint64_t tl_progress_rounds(struct tl_progress_engine *progress)
{
    pthread_mutex_lock(&progress->mutex);
    uint64_t rounds = progress->round_count;
    pthread_mutex_unlock(&progress->mutex);
    return rounds;
}

bool tl_progress_step(struct tl_progress_engine *progress, uint64_t rounds, int64_t deadline_ns)
{
    TL_CHECK(progress->mode == TL_PROGRESS_CALLER);
    struct tl_wait wait;
    bool is_in_time = true;
    tl_wait_init(&wait, progress);
    wait.is_each_round = true;
    pthread_mutex_lock(&progress->mutex);
    enter(progress, &wait);
    if (progress->round_count == rounds) {
        is_in_time = is_loop_free(progress) ? run_round(progress, deadline_ns)
                                            : cond_wait_until(&wait.cond, &progress->mutex, deadline_ns);
    }
    leave(progress, &wait);
    pthread_mutex_unlock(&progress->mutex);
    tl_wait_fini(&wait);
    return is_in_time;
}
