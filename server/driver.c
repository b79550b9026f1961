// SPDX-License-Identifier: Apache-2.0
#include "server/driver.h"

#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"

/* Waits that come this close after each other are one streak, */
#define STREAK_GAP_NS (500 * 1000)
/* and after so many of them the callers drive. */
#define STREAK_LENGTH 4
/* How long nobody may drive before the parked thread takes the loop back. */
#define PARKED_LOOK_NS (1 * TL_NS_PER_MS)

static void cond_init_monotonic(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* False when the deadline has come. */
static bool cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t deadline_ns)
{
    if (deadline_ns == TL_TIME_NEVER) return pthread_cond_wait(cond, mutex) == 0;
    struct timespec time = {.tv_sec = deadline_ns / TL_NS_PER_SEC, .tv_nsec = deadline_ns % TL_NS_PER_SEC};
    return pthread_cond_timedwait(cond, mutex, &time) == 0;
}

/* ------------------------------------------------------------------------------------------------------- rounds -- */

/* Whether a caller may take the loop now. */
static bool is_loop_free(const struct tl_driver *driver)
{
    return !driver->is_driven && (driver->progress == TL_PROGRESS_CALLER || driver->is_parked);
}

/* Lets the first of those that wait take the loop. */
static void hand_on(struct tl_driver *driver)
{
    if (!is_loop_free(driver) || tl_list_is_empty(&driver->waits)) return;
    pthread_cond_signal(&TL_CONTAINER_OF(driver->waits.next, struct tl_wait, link)->cond);
}

/* One round. The mutex is held before and after, not meanwhile. */
static bool drive(struct tl_driver *driver, int64_t deadline_ns)
{
    driver->is_driven = true;
    pthread_mutex_unlock(&driver->mutex);
    bool did_work = tl_turn_run(&driver->turn, deadline_ns);
    pthread_mutex_lock(&driver->mutex);
    driver->is_driven = false;
    driver->round_count++;
    TL_LIST_FOREACH(&driver->waits, link)
    {
        struct tl_wait *wait = TL_CONTAINER_OF(link, struct tl_wait, link);
        if (wait->is_each_turn) pthread_cond_signal(&wait->cond);
    }
    return did_work;
}

/* ------------------------------------------------------------------------------------------------------- thread -- */

/* Sleeps while callers drive. */
static void park(struct tl_driver *driver)
{
    driver->is_park_wanted = false;
    __atomic_store_n(&driver->is_parked, true, __ATOMIC_RELAXED);
    hand_on(driver);
    uint64_t turns = driver->caller_turns;
    bool is_over = false;
    while (!is_over && !driver->is_stopping) {
        if (driver->is_driven) {
            driver->is_leave_awaited = true;
            pthread_cond_wait(&driver->thread_cond, &driver->mutex);
        } else {
            bool is_quiet =
                !cond_wait_until(&driver->thread_cond, &driver->mutex, tl_clock_deadline_ns(PARKED_LOOK_NS));
            is_over = !driver->is_driven && (driver->is_thread_wanted || (is_quiet && turns == driver->caller_turns));
            turns = driver->caller_turns;
        }
    }
    __atomic_store_n(&driver->is_parked, false, __ATOMIC_RELAXED);
    driver->is_thread_wanted = false;
    driver->is_leave_awaited = false;
    driver->streak = 0;
}

static void *run(void *context)
{
    struct tl_driver *driver = context;
    pthread_mutex_lock(&driver->mutex);
    while (!driver->is_stopping) {
        if (driver->is_park_wanted) {
            park(driver);
        } else {
            drive(driver, TL_TIME_NEVER);
        }
    }
    pthread_mutex_unlock(&driver->mutex);
    return NULL;
}

/* Rounds of one beat at most: a beat is to answer what has come, not to take the loop from its users. */
#define BEAT_ROUNDS 16

/* The helper's: nobody has driven since it looked last. */
static void beat(void *context)
{
    struct tl_driver *driver = context;
    pthread_mutex_lock(&driver->mutex);
    if (!driver->is_driven && driver->round_count == driver->beat_round) {
        tl_turn_want_grpc(&driver->turn);
        bool did_work = true;
        for (unsigned i = 0; i < BEAT_ROUNDS && did_work && !driver->is_driven; i++)
            did_work = drive(driver, 0);
        hand_on(driver);
    }
    driver->beat_round = driver->round_count;
    pthread_mutex_unlock(&driver->mutex);
}

static void fini(struct tl_driver *driver)
{
    pthread_cond_destroy(&driver->thread_cond);
    pthread_mutex_destroy(&driver->mutex);
}

enum tl_status tl_driver_init(struct tl_driver *driver, struct tl_loop *loop, const struct tl_home *home,
                              const struct tl_turn_reactor *reactors, size_t reactor_count, enum tl_progress progress,
                              struct tl_error *ret_error)
{
    *driver = (struct tl_driver){.loop = loop, .progress = progress};
    tl_list_init(&driver->waits);
    tl_list_init(&driver->queues);
    pthread_mutex_init(&driver->mutex, NULL);
    cond_init_monotonic(&driver->thread_cond);
    const struct tl_turn_beat beats = {.look = beat, .context = driver};
    enum tl_status status = tl_turn_init(&driver->turn, loop, home, reactors, reactor_count, &beats, ret_error);
    if (status != TL_OK) {
        fini(driver);
        return status;
    }
    if (progress == TL_PROGRESS_CALLER) return TL_OK;
    status = tl_thread_start("tl-control", run, driver, &driver->thread, ret_error);
    if (status == TL_OK) return TL_OK;
    tl_turn_fini(&driver->turn);
    fini(driver);
    return status;
}

void tl_driver_fini(struct tl_driver *driver)
{
    if (driver->progress == TL_PROGRESS_THREAD) {
        pthread_mutex_lock(&driver->mutex);
        driver->is_stopping = true;
        pthread_cond_signal(&driver->thread_cond);
        pthread_mutex_unlock(&driver->mutex);
        tl_loop_wake(driver->loop);
        pthread_join(driver->thread, NULL);
    }
    tl_turn_fini(&driver->turn);
    TL_CHECK(!driver->is_driven && tl_list_is_empty(&driver->waits));
    fini(driver);
}

void tl_driver_post(struct tl_driver *driver, struct tl_letter *letter)
{
    tl_loop_post(driver->loop, letter);
    /* A thread that parks only now finds the letter when it looks next. */
    if (!__atomic_load_n(&driver->is_parked, __ATOMIC_RELAXED)) return;
    pthread_mutex_lock(&driver->mutex);
    if (driver->is_parked && !driver->is_driven) {
        driver->is_thread_wanted = true;
        pthread_cond_signal(&driver->thread_cond);
    }
    pthread_mutex_unlock(&driver->mutex);
}

/* -------------------------------------------------------------------------------------------------------- waits -- */

void tl_wait_init(struct tl_wait *wait, struct tl_driver *driver)
{
    *wait = (struct tl_wait){.driver = driver};
    tl_list_init(&wait->link);
    cond_init_monotonic(&wait->cond);
}

void tl_wait_fini(struct tl_wait *wait)
{
    pthread_cond_destroy(&wait->cond);
}

void tl_wait_done(struct tl_wait *wait)
{
    struct tl_driver *driver = wait->driver;
    pthread_mutex_lock(&driver->mutex);
    wait->is_done = true;
    pthread_cond_signal(&wait->cond);
    pthread_mutex_unlock(&driver->mutex);
}

/* Drives one round in place of the thread, or of nobody. */
static bool take_turn(struct tl_driver *driver, int64_t deadline_ns)
{
    driver->caller_turns++;
    bool did_work = drive(driver, deadline_ns);
    return did_work || tl_clock_now_ns() < deadline_ns;
}

/* A wait begins: remembers whether it follows closely on the one before. */
static void enter(struct tl_driver *driver, struct tl_wait *wait)
{
    if (driver->progress == TL_PROGRESS_THREAD) {
        bool is_close = tl_clock_now_ns() - driver->last_left_ns < STREAK_GAP_NS;
        driver->streak = is_close ? driver->streak + 1 : 0;
    }
    tl_list_push_back(&driver->waits, &wait->link);
}

static void leave(struct tl_driver *driver, struct tl_wait *wait)
{
    tl_list_remove(&wait->link);
    hand_on(driver);
    if (driver->progress == TL_PROGRESS_CALLER) return;
    driver->last_left_ns = tl_clock_now_ns();
    if (driver->is_leave_awaited && !driver->is_driven) {
        driver->is_leave_awaited = false;
        pthread_cond_signal(&driver->thread_cond);
    }
}

/* Asks the thread to park when the callers would do better without it. */
static void maybe_want_park(struct tl_driver *driver)
{
    if (driver->progress == TL_PROGRESS_CALLER || driver->is_parked || driver->is_park_wanted) return;
    if (driver->streak < STREAK_LENGTH) return;
    driver->is_park_wanted = true;
    pthread_mutex_unlock(&driver->mutex);
    tl_loop_wake(driver->loop);
    pthread_mutex_lock(&driver->mutex);
}

bool tl_wait_for(struct tl_wait *wait, int64_t deadline_ns)
{
    struct tl_driver *driver = wait->driver;
    bool is_in_time = true;
    pthread_mutex_lock(&driver->mutex);
    enter(driver, wait);
    maybe_want_park(driver);
    while (!wait->is_done && is_in_time) {
        is_in_time = is_loop_free(driver) ? take_turn(driver, deadline_ns)
                                          : cond_wait_until(&wait->cond, &driver->mutex, deadline_ns);
    }
    leave(driver, wait);
    bool is_done = wait->is_done;
    pthread_mutex_unlock(&driver->mutex);
    return is_done;
}

uint64_t tl_driver_rounds(struct tl_driver *driver)
{
    pthread_mutex_lock(&driver->mutex);
    uint64_t rounds = driver->round_count;
    pthread_mutex_unlock(&driver->mutex);
    return rounds;
}

bool tl_driver_step(struct tl_driver *driver, uint64_t rounds, int64_t deadline_ns)
{
    TL_CHECK(driver->progress == TL_PROGRESS_CALLER);
    struct tl_wait wait;
    bool is_in_time = true;
    tl_wait_init(&wait, driver);
    wait.is_each_turn = true;
    pthread_mutex_lock(&driver->mutex);
    enter(driver, &wait);
    if (driver->round_count == rounds) {
        is_in_time = is_loop_free(driver) ? take_turn(driver, deadline_ns)
                                          : cond_wait_until(&wait.cond, &driver->mutex, deadline_ns);
    }
    leave(driver, &wait);
    pthread_mutex_unlock(&driver->mutex);
    tl_wait_fini(&wait);
    return is_in_time;
}
