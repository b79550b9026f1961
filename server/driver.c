// SPDX-License-Identifier: Apache-2.0
#include "server/driver.h"

#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"

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

static void *run(void *context)
{
    struct tl_driver *driver = context;
    while (!__atomic_load_n(&driver->is_stopping, __ATOMIC_ACQUIRE)) tl_loop_run_once(driver->loop, TL_TIME_NEVER);
    return NULL;
}

enum tl_status tl_driver_init(struct tl_driver *driver, struct tl_loop *loop, enum tl_progress progress,
                              struct tl_error *ret_error)
{
    *driver = (struct tl_driver){.loop = loop, .progress = progress};
    tl_list_init(&driver->queues);
    pthread_mutex_init(&driver->mutex, NULL);
    cond_init_monotonic(&driver->turn);
    if (progress == TL_PROGRESS_CALLER) return TL_OK;
    int failure = pthread_create(&driver->thread, NULL, run, driver);
    if (failure == 0) {
        pthread_setname_np(driver->thread, "tl-control");
        return TL_OK;
    }
    pthread_cond_destroy(&driver->turn);
    pthread_mutex_destroy(&driver->mutex);
    return tl_error_set_errno(ret_error, failure, "cannot start the control thread");
}

void tl_driver_fini(struct tl_driver *driver)
{
    if (driver->progress == TL_PROGRESS_THREAD) {
        __atomic_store_n(&driver->is_stopping, true, __ATOMIC_RELEASE);
        tl_loop_wake(driver->loop);
        pthread_join(driver->thread, NULL);
    }
    TL_CHECK(!driver->is_driven && driver->waiting == 0);
    pthread_cond_destroy(&driver->turn);
    pthread_mutex_destroy(&driver->mutex);
}

bool tl_driver_step(struct tl_driver *driver, int64_t deadline_ns)
{
    TL_CHECK(driver->progress == TL_PROGRESS_CALLER);
    bool is_in_time = true;
    pthread_mutex_lock(&driver->mutex);
    if (driver->is_driven) {
        driver->waiting++;
        is_in_time = cond_wait_until(&driver->turn, &driver->mutex, deadline_ns);
        driver->waiting--;
        pthread_mutex_unlock(&driver->mutex);
        return is_in_time;
    }
    driver->is_driven = true;
    pthread_mutex_unlock(&driver->mutex);
    bool did_work = tl_loop_run_once(driver->loop, deadline_ns);
    pthread_mutex_lock(&driver->mutex);
    driver->is_driven = false;
    if (driver->waiting > 0) pthread_cond_broadcast(&driver->turn);
    pthread_mutex_unlock(&driver->mutex);
    return did_work || tl_clock_now_ns() < deadline_ns;
}

void tl_wait_init(struct tl_wait *wait, struct tl_driver *driver)
{
    wait->driver = driver;
    wait->is_done = false;
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

static bool wait_is_done(struct tl_wait *wait)
{
    pthread_mutex_lock(&wait->driver->mutex);
    bool is_done = wait->is_done;
    pthread_mutex_unlock(&wait->driver->mutex);
    return is_done;
}

bool tl_wait_for(struct tl_wait *wait, int64_t deadline_ns)
{
    struct tl_driver *driver = wait->driver;
    if (driver->progress == TL_PROGRESS_CALLER) {
        while (!wait_is_done(wait)) {
            if (!tl_driver_step(driver, deadline_ns)) return wait_is_done(wait);
        }
        return true;
    }
    pthread_mutex_lock(&driver->mutex);
    bool is_in_time = true;
    while (!wait->is_done && is_in_time) is_in_time = cond_wait_until(&wait->cond, &driver->mutex, deadline_ns);
    bool is_done = wait->is_done;
    pthread_mutex_unlock(&driver->mutex);
    return is_done;
}
