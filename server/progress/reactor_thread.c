// SPDX-License-Identifier: Apache-2.0
#include "server/progress/reactor_thread.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"

enum reactor_owner {
    OWNER_THREAD,
    OWNER_NONE, /* the reactor rests or was left, and belongs to the first who takes it */
    OWNER_BORROWER,
};

enum { WATCHED_CALL, WATCHED_LEFT, WATCHED_REACTOR };

/* A borrower that comes and goes leaves events behind, such as the credit that a peer returns now and then. The thread
 * handles so many of them, and rests the reactor again each time, before it keeps a reactor that is not borrowed. */
enum { MOST_LEFT_EVENTS = 4 };

/* The descriptors are looked at only when one of them has woken the thread, since that takes system calls. */
static bool take(struct tl_reactor_thread *thread, enum reactor_owner owner)
{
    int none = OWNER_NONE;
    if (!atomic_compare_exchange_strong(&thread->owner, &none, owner)) return false;
    tl_reactor_end_sleep(thread->reactor, !atomic_load(&thread->is_watched));
    return true;
}

/* The reactor has no owner before it is watched, so that its thread can take it as soon as that is woken. The thread
 * notes that it was woken before it looks whose the reactor is: either it finds a resting one, or the reactor is
 * watched again here. */
static bool rest(struct tl_reactor_thread *thread)
{
    if (!tl_reactor_prepare_sleep(thread->reactor)) return false;
    atomic_store(&thread->owner, OWNER_NONE);
    if (atomic_exchange(&thread->is_watched, true)) return true;
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.u32 = WATCHED_REACTOR};
    TL_CHECK(epoll_ctl(thread->epoll_fd, EPOLL_CTL_MOD, tl_reactor_fd(thread->reactor), &event) == 0);
    return true;
}

/* ------------------------------------------------------------------------------------------------------ thread -- */

/* Rests the reactor for those who have asked for it, as soon as it has nothing to do. */
static void lend(struct tl_reactor_thread *thread)
{
    atomic_store(&thread->is_asked_for, false);
    thread->left_events = 0;
    if (tl_reactor_provider(thread->reactor)->fd < 0) return;
    while (!atomic_load(&thread->is_stopping) && !rest(thread))
        (void)tl_reactor_run_once(thread->reactor, 0);
    atomic_fetch_add(&thread->lent_count, 1);
    tl_loop_wake(thread->loop);
}

/* Handles what has happened, and rests the reactor again. Returns false when the thread keeps it. */
static bool rest_again(struct tl_reactor_thread *thread)
{
    for (;;) {
        thread->left_events += tl_reactor_run_once(thread->reactor, 0);
        if (thread->left_events > MOST_LEFT_EVENTS) return false;
        atomic_store(&thread->is_asked_for, false); /* the borrower that has asked finds it resting */
        if (rest(thread)) return true;
        thread->left_events++; /* something happens at this moment */
    }
}

/* Sleeps until the reactor belongs to the thread again, or this may be so. */
static void watch(struct tl_reactor_thread *thread)
{
    struct epoll_event event;
    uint64_t count_read;
    int count = epoll_wait(thread->epoll_fd, &event, 1, -1);
    TL_CHECK(count >= 0 || errno == EINTR);
    if (count <= 0) return;
    if (event.data.u32 == WATCHED_CALL) {
        (void)!read(thread->call_fd, &count_read, sizeof(count_read));
        return;
    }
    if (event.data.u32 == WATCHED_LEFT)
        (void)!read(thread->left_fd, &count_read, sizeof(count_read));
    else
        atomic_store(&thread->is_watched, false);
    if (take(thread, OWNER_THREAD) && !rest_again(thread)) atomic_fetch_add(&thread->taken_count, 1);
}

static void *run(void *context)
{
    struct tl_reactor_thread *thread = context;
    const struct tl_executor *former = tl_executor_enter(thread->executor);
    while (!atomic_load(&thread->is_stopping)) {
        if (atomic_load(&thread->owner) != OWNER_THREAD)
            watch(thread);
        else if (atomic_load(&thread->is_asked_for))
            lend(thread);
        else
            (void)tl_reactor_run_once(thread->reactor, TL_TIME_NEVER);
    }
    (void)take(thread, OWNER_THREAD);
    tl_executor_leave(former);
    return NULL;
}

static void call(const struct tl_reactor_thread *thread)
{
    uint64_t one = 1;
    ssize_t written = write(thread->call_fd, &one, sizeof(one));
    TL_CHECK(written == sizeof(one));
}

static bool open_descriptors(struct tl_reactor_thread *thread)
{
    struct epoll_event call_event = {.events = EPOLLIN, .data.u32 = WATCHED_CALL};
    struct epoll_event left_event = {.events = EPOLLIN, .data.u32 = WATCHED_LEFT};
    struct epoll_event reactor_event = {.events = EPOLLONESHOT, .data.u32 = WATCHED_REACTOR};
    thread->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (thread->epoll_fd >= 0) thread->call_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (thread->call_fd >= 0) thread->left_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    return thread->left_fd >= 0 && epoll_ctl(thread->epoll_fd, EPOLL_CTL_ADD, thread->call_fd, &call_event) == 0 &&
           epoll_ctl(thread->epoll_fd, EPOLL_CTL_ADD, thread->left_fd, &left_event) == 0 &&
           epoll_ctl(thread->epoll_fd, EPOLL_CTL_ADD, tl_reactor_fd(thread->reactor), &reactor_event) == 0;
}

static void close_descriptors(const struct tl_reactor_thread *thread)
{
    if (thread->left_fd >= 0) close(thread->left_fd);
    if (thread->call_fd >= 0) close(thread->call_fd);
    if (thread->epoll_fd >= 0) close(thread->epoll_fd);
}

enum tl_status tl_reactor_thread_start(struct tl_reactor_thread *thread, struct tl_reactor *reactor,
                                       const struct tl_executor *executor, struct tl_loop *loop,
                                       struct tl_error *ret_error)
{
    *thread = (struct tl_reactor_thread){
        .reactor = reactor, .executor = executor, .loop = loop, .epoll_fd = -1, .call_fd = -1, .left_fd = -1};
    enum tl_status status = TL_OK;
    if (!open_descriptors(thread)) {
        status = tl_error_set_errno(ret_error, errno, "no descriptor for the thread of %s",
                                    tl_reactor_provider(reactor)->name);
    }
    if (status == TL_OK) status = tl_thread_start("tl-reactor", run, thread, &thread->thread, ret_error);
    if (status != TL_OK) close_descriptors(thread);
    return status;
}

void tl_reactor_thread_stop(struct tl_reactor_thread *thread)
{
    atomic_store(&thread->is_stopping, true);
    tl_reactor_wake(thread->reactor);
    call(thread);
    pthread_join(thread->thread, NULL);
    close_descriptors(thread);
}

/* ---------------------------------------------------------------------------------------------------- borrowers -- */

void tl_reactor_thread_ask(struct tl_reactor_thread *thread)
{
    if (!atomic_exchange(&thread->is_asked_for, true)) tl_reactor_wake(thread->reactor);
}

bool tl_reactor_thread_borrow(struct tl_reactor_thread *thread)
{
    if (!take(thread, OWNER_BORROWER)) return false;
    thread->left_events = 0;
    return true;
}

bool tl_reactor_thread_rest(struct tl_reactor_thread *thread)
{
    return rest(thread);
}

/* The time begins when the reactor has no owner: before that its thread could not take it, and would not look again. */
void tl_reactor_thread_leave(struct tl_reactor_thread *thread)
{
    const struct itimerspec time = {.it_value.tv_nsec = TL_REACTOR_LEFT_NS};
    atomic_store(&thread->owner, OWNER_NONE);
    TL_CHECK(timerfd_settime(thread->left_fd, 0, &time, NULL) == 0);
}

void tl_reactor_thread_give_back(struct tl_reactor_thread *thread)
{
    atomic_store(&thread->owner, OWNER_THREAD);
    call(thread);
}

bool tl_reactor_thread_has_lent(const struct tl_reactor_thread *thread)
{
    return atomic_load(&thread->owner) == OWNER_BORROWER;
}
