// SPDX-License-Identifier: Apache-2.0
/*
 * The reactor: an event loop (base/loop_core.h) over a provider.
 *
 * A round runs closures, fires timers, polls the provider and runs the deferred closures. A round that finds nothing
 * waits, if it may: while work is under way it polls on until spin_ns have gone by without a result; then it sleeps on
 * the provider's descriptor and its own eventfd until the deadline or the next timer.
 *
 * A waiting reactor polls all the time, so that a poll must cost neither a lock nor a system call: a thread that posts
 * or wakes leaves a bit in `attention`, and the clock is read once in many polls.
 *
 * No wake-up is lost. A closure: the mailbox is marked as asleep only when no closure waits, and the next post writes
 * the eventfd. A wake: it writes the eventfd each time, and the owner forgets that only where it is about to return. An
 * event of the provider: the provider is armed first and polled once more afterwards, so that either this poll sees the
 * event or the event makes the descriptor readable.
 *
 * A provider without a descriptor cannot wake its reactor: the reactor then sleeps for NAP_NS at most, and an owner
 * that wants to sleep on another descriptor may not do so.
 *
 * For an owner that sleeps elsewhere a timerfd stands for the timers, and an epoll descriptor for the eventfd, the
 * timerfd and the provider.
 */
#include "dataplane/reactor.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"

#define POLLS_PER_CLOCK 16
/* A thousand naps a second are about a hundredth of a core. */
#define NAP_NS TL_NS_PER_MS

enum attention {
    ATTENTION_CLOSURES = 1,
    ATTENTION_WAKE = 2,
};

struct tl_reactor {
    struct tl_provider *provider;
    int64_t spin_ns;
    int wake_fd;  /* eventfd */
    int timer_fd; /* for owners that sleep elsewhere */
    int epoll_fd; /* for the same: watches wake_fd, timer_fd and the provider's */
    struct tl_loop_core core;
    int64_t busy_count;
    int64_t idle_since_ns;    /* when spinning began; 0: something was done since */
    unsigned rounds_to_clock; /* until a busy reactor looks at its timers again */
    bool is_asleep_outside;   /* from prepare_sleep to end_sleep */
    int64_t timer_fd_due_ns;  /* what timer_fd is set to; TL_TIME_NEVER: it is off */
    atomic_uint attention;    /* enum attention */
    _Atomic uint64_t rounds;  /* only the owner writes the counters */
    _Atomic uint64_t sleeps;
    _Atomic uint64_t events;
};

static void count(_Atomic uint64_t *counter, uint64_t change)
{
    uint64_t value = atomic_load_explicit(counter, memory_order_relaxed);
    atomic_store_explicit(counter, value + change, memory_order_relaxed);
}

/* --------------------------------------------------------------------------------------------- from any thread -- */

static void write_wake_fd(struct tl_reactor *reactor)
{
    uint64_t one = 1;
    ssize_t written;
    do {
        written = write(reactor->wake_fd, &one, sizeof(one));
    } while (written < 0 && errno == EINTR);
    /* EAGAIN: the counter is full, and the descriptor is readable. */
    TL_CHECK(written == sizeof(one) || errno == EAGAIN);
}

static void note_posted(struct tl_reactor *reactor, bool must_wake)
{
    atomic_fetch_or_explicit(&reactor->attention, ATTENTION_CLOSURES, memory_order_release);
    if (must_wake) write_wake_fd(reactor);
}

void tl_reactor_post(struct tl_reactor *reactor, struct tl_closure *closure)
{
    note_posted(reactor, tl_loop_core_post(&reactor->core, closure));
}

void tl_reactor_post_all(struct tl_reactor *reactor, struct tl_list *closures)
{
    note_posted(reactor, tl_loop_core_post_all(&reactor->core, closures));
}

void tl_reactor_wake(struct tl_reactor *reactor)
{
    atomic_fetch_or_explicit(&reactor->attention, ATTENTION_WAKE, memory_order_release);
    write_wake_fd(reactor);
}

void tl_reactor_get_stats(const struct tl_reactor *reactor, struct tl_reactor_stats *ret_stats)
{
    *ret_stats = (struct tl_reactor_stats){
        .rounds = atomic_load_explicit(&reactor->rounds, memory_order_relaxed),
        .sleeps = atomic_load_explicit(&reactor->sleeps, memory_order_relaxed),
        .events = atomic_load_explicit(&reactor->events, memory_order_relaxed),
        .most_members = tl_max_u64(tl_quota_most(&reactor->core.quota), tl_quota_most(&reactor->provider->quota)),
    };
}

/* ----------------------------------------------------------------------------------------------------- a round -- */

static void drain(int fd)
{
    uint64_t value;
    while (read(fd, &value, sizeof(value)) < 0 && errno == EINTR) {
    }
}

bool tl_reactor_is_wanted(const struct tl_reactor *reactor)
{
    return atomic_load_explicit(&reactor->attention, memory_order_relaxed) != 0;
}

/* Runs the posted closures. Returns how many there were; a wake counts as one, so that the owner returns. */
static unsigned run_closures(struct tl_reactor *reactor)
{
    unsigned attention = atomic_exchange_explicit(&reactor->attention, 0, memory_order_acquire);
    unsigned done_count = tl_loop_core_run_closures(&reactor->core);
    if (tl_loop_core_has_left(&reactor->core))
        atomic_fetch_or_explicit(&reactor->attention, ATTENTION_CLOSURES, memory_order_relaxed);
    if (attention & ATTENTION_WAKE) {
        drain(reactor->wake_fd);
        done_count++;
    }
    return done_count;
}

static unsigned run_timers(struct tl_reactor *reactor)
{
    unsigned fired = tl_loop_core_fire_timers(&reactor->core);
    reactor->rounds_to_clock = tl_quota_left(&reactor->core.quota) == 0 ? 1 : POLLS_PER_CLOCK; /* more may be due */
    return fired;
}

static unsigned poll_provider(struct tl_reactor *reactor)
{
    unsigned events = reactor->provider->ops->poll(reactor->provider);
    count(&reactor->rounds, 1);
    if (events > 0) count(&reactor->events, events);
    return events;
}

/* Runs the rest of a round, once the provider was polled. Every idle round looks at the timers, and one of sixteen busy
 * rounds. Returns whether the round has done anything. */
static bool finish_round(struct tl_reactor *reactor, bool did_work)
{
    if (tl_reactor_is_wanted(reactor)) did_work |= run_closures(reactor) > 0;
    if (!did_work || --reactor->rounds_to_clock == 0) did_work |= run_timers(reactor) > 0;
    if (tl_loop_core_has_deferred(&reactor->core)) did_work |= tl_loop_core_run_deferred(&reactor->core);
    if (did_work) reactor->idle_since_ns = 0;
    return did_work;
}

static bool run_round(struct tl_reactor *reactor)
{
    bool did_work = tl_reactor_is_wanted(reactor) && run_closures(reactor) > 0;
    did_work |= poll_provider(reactor) > 0;
    return finish_round(reactor, did_work);
}

/* ---------------------------------------------------------------------------------------- creating, destroying -- */

static enum tl_status watch(struct tl_reactor *reactor, int fd, struct tl_error *ret_error)
{
    struct epoll_event event = {.events = EPOLLIN};
    if (epoll_ctl(reactor->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0) return TL_OK;
    return tl_error_set_errno(ret_error, errno, "the reactor of %s cannot watch a descriptor", reactor->provider->name);
}

static enum tl_status open_descriptors(struct tl_reactor *reactor, struct tl_error *ret_error)
{
    reactor->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (reactor->wake_fd >= 0) reactor->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (reactor->timer_fd >= 0) reactor->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (reactor->epoll_fd < 0) {
        return tl_error_set_errno(ret_error, errno, "no descriptor for the reactor of %s", reactor->provider->name);
    }
    enum tl_status status = watch(reactor, reactor->wake_fd, ret_error);
    if (status == TL_OK) status = watch(reactor, reactor->timer_fd, ret_error);
    if (status == TL_OK && reactor->provider->fd >= 0) status = watch(reactor, reactor->provider->fd, ret_error);
    return status;
}

enum tl_status tl_reactor_create(struct tl_provider *provider, const struct tl_reactor_options *options,
                                 struct tl_reactor **ret_reactor, struct tl_error *ret_error)
{
    struct tl_reactor *reactor = calloc(1, sizeof(*reactor));
    if (reactor == NULL) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the reactor of %s", provider->name);
    }
    reactor->provider = provider;
    reactor->spin_ns = options->spin_ns;
    reactor->wake_fd = -1;
    reactor->timer_fd = -1;
    reactor->epoll_fd = -1;
    reactor->timer_fd_due_ns = TL_TIME_NEVER;
    reactor->rounds_to_clock = POLLS_PER_CLOCK;
    tl_loop_core_init(&reactor->core);
    enum tl_status status = open_descriptors(reactor, ret_error);
    if (status != TL_OK) {
        tl_reactor_destroy(reactor);
        return status;
    }
    *ret_reactor = reactor;
    return TL_OK;
}

void tl_reactor_destroy(struct tl_reactor *reactor)
{
    if (reactor == NULL) return;
    tl_loop_core_fini(&reactor->core);
    TL_CHECK(reactor->busy_count == 0);
    if (reactor->provider->ops->sleep != NULL) (void)reactor->provider->ops->sleep(reactor->provider, -1, 0);
    if (reactor->epoll_fd >= 0) close(reactor->epoll_fd);
    if (reactor->timer_fd >= 0) close(reactor->timer_fd);
    if (reactor->wake_fd >= 0) close(reactor->wake_fd);
    free(reactor);
}

/* ----------------------------------------------------------------------------------------------------- waiting -- */

bool tl_reactor_shares_processor(const struct tl_reactor *reactor)
{
    const struct tl_provider_ops *ops = reactor->provider->ops;
    return ops->shares_processor != NULL && ops->shares_processor(reactor->provider);
}

static bool may_spin(const struct tl_reactor *reactor, int64_t now_ns)
{
    int64_t helper_until_ns = reactor->provider->helper_until_ns;
    return helper_until_ns != 0 ? now_ns < helper_until_ns : now_ns - reactor->idle_since_ns < reactor->spin_ns;
}

/* Polls until there is a result, attention is wanted, until_ns has come, spin_ns have gone by (or the time that a
 * helper thread is expected to take), or polling only keeps the peers, or other threads, from their work. Returns how
 * many events there were. */
static unsigned spin(struct tl_reactor *reactor, int64_t until_ns)
{
    if (reactor->busy_count == 0 || reactor->spin_ns <= 0) return 0;
    int64_t now_ns = tl_clock_now_ns(), yield_ns = now_ns + TL_THREAD_YIELD_NS;
    if (reactor->idle_since_ns == 0) reactor->idle_since_ns = now_ns;
    while (now_ns < until_ns && may_spin(reactor, now_ns)) {
        for (unsigned i = 0; i < POLLS_PER_CLOCK; i++) {
            unsigned events = poll_provider(reactor);
            if (events > 0 || tl_reactor_is_wanted(reactor)) return events;
        }
        if (tl_reactor_shares_processor(reactor)) break;
        now_ns = tl_clock_now_ns();
        if (reactor->provider->helper_until_ns != 0) {
            (void)sched_yield();
        } else if (tl_thread_yields(&now_ns, &yield_ns)) {
            break;
        }
    }
    return 0;
}

/* Arranges that every event from now on ends the sleep. Returns false when something has happened already; *ret_events
 * of the provider were handled then. */
static bool begin_sleep(struct tl_reactor *reactor, unsigned *ret_events)
{
    *ret_events = 0;
    if (tl_reactor_is_wanted(reactor) || !tl_loop_core_prepare_sleep(&reactor->core)) {
        atomic_fetch_or_explicit(&reactor->attention, ATTENTION_CLOSURES, memory_order_relaxed);
        return false;
    }
    bool is_armed = tl_provider_arm(reactor->provider);
    *ret_events = poll_provider(reactor);
    if (is_armed && *ret_events == 0) return true;
    (void)tl_loop_core_end_sleep(&reactor->core);
    return false;
}

/* Returns whether wake_fd is readable, or will be in a moment, because of a closure that was posted. */
static bool end_sleep(struct tl_reactor *reactor, bool is_woken)
{
    tl_provider_disarm(reactor->provider, is_woken);
    count(&reactor->sleeps, 1);
    return tl_loop_core_end_sleep(&reactor->core);
}

static void wait_for_descriptors(struct tl_reactor *reactor, int64_t until_ns)
{
    const struct tl_provider_ops *ops = reactor->provider->ops;
    if (ops->sleep != NULL) {
        if (ops->sleep(reactor->provider, reactor->wake_fd, until_ns)) drain(reactor->wake_fd);
        return;
    }
    struct pollfd descriptors[] = {
        {.fd = reactor->wake_fd, .events = POLLIN},
        {.fd = reactor->provider->fd, .events = POLLIN}, /* poll ignores a negative one */
    };
    int64_t timeout_ns = tl_clock_remaining_ns(until_ns);
    if (reactor->provider->fd < 0 && timeout_ns > NAP_NS) timeout_ns = NAP_NS;
    struct timespec timeout = {.tv_sec = timeout_ns / TL_NS_PER_SEC, .tv_nsec = timeout_ns % TL_NS_PER_SEC};
    int ready = ppoll(descriptors, TL_ARRAY_COUNT(descriptors), timeout_ns == TL_TIME_NEVER ? NULL : &timeout, NULL);
    TL_CHECK(ready >= 0 || errno == EINTR || errno == ENOMEM);
    /* The wake is still known by its bit of attention; left in the eventfd it would end the next sleep as well. */
    if (ready > 0 && descriptors[0].revents != 0) drain(reactor->wake_fd);
}

/* Sleeps until until_ns or until something happens. Returns how many events there were before it could sleep. */
static unsigned sleep_until(struct tl_reactor *reactor, int64_t until_ns)
{
    unsigned events;
    if (tl_clock_remaining_ns(until_ns) == 0) return 0;
    if (!begin_sleep(reactor, &events)) return events;
    wait_for_descriptors(reactor, until_ns);
    (void)end_sleep(reactor, true);
    return poll_provider(reactor);
}

/* Runs the rest of a round that has found nothing. It is not inlined, so that a round that finds something does not pay
 * for its stack frame. */
static __attribute__((noinline)) bool wait(struct tl_reactor *reactor, int64_t deadline_ns)
{
    int64_t until_ns = tl_loop_core_sleep_until_ns(&reactor->core, deadline_ns);
    unsigned events = spin(reactor, until_ns);
    if (events == 0 && !tl_reactor_is_wanted(reactor)) events = sleep_until(reactor, until_ns);
    return finish_round(reactor, events > 0);
}

bool tl_reactor_run_once(struct tl_reactor *reactor, int64_t deadline_ns)
{
    tl_loop_core_enter();
    bool did_work = run_round(reactor);
    if (!did_work && deadline_ns != 0) did_work = wait(reactor, deadline_ns);
    tl_loop_core_leave();
    return did_work;
}

/* --------------------------------------------------------------------------------------- owners of other kinds -- */

int tl_reactor_fd(const struct tl_reactor *reactor)
{
    return reactor->epoll_fd;
}

/* Sets the timerfd if the time of the next timer has changed, since that is a system call. The timerfd stays readable
 * until it is set again, as long as its timer has not fired. */
static void set_timer_fd(struct tl_reactor *reactor)
{
    int64_t due_ns = tl_timers_next_due_ns(&reactor->core.timers);
    if (due_ns == reactor->timer_fd_due_ns) return;
    struct itimerspec setting = {0}; /* zero: off */
    if (due_ns != TL_TIME_NEVER) {
        int64_t at_ns = due_ns > 0 ? due_ns : 1;
        setting.it_value = (struct timespec){.tv_sec = at_ns / TL_NS_PER_SEC, .tv_nsec = at_ns % TL_NS_PER_SEC};
    }
    TL_CHECK(timerfd_settime(reactor->timer_fd, TFD_TIMER_ABSTIME, &setting, NULL) == 0);
    reactor->timer_fd_due_ns = due_ns;
}

bool tl_reactor_prepare_sleep(struct tl_reactor *reactor)
{
    TL_CHECK(!reactor->is_asleep_outside);
    unsigned events = 0;
    if (reactor->provider->fd < 0) return false;
    tl_loop_core_enter();
    bool may_sleep = begin_sleep(reactor, &events);
    tl_loop_core_leave();
    if (!may_sleep) {
        if (events > 0) reactor->idle_since_ns = 0;
        return false;
    }
    set_timer_fd(reactor);
    reactor->is_asleep_outside = true;
    return true;
}

void tl_reactor_end_sleep(struct tl_reactor *reactor, bool is_woken)
{
    if (!reactor->is_asleep_outside) return;
    reactor->is_asleep_outside = false;
    /* ATTENTION_CLOSURES says that something was posted, so wake_fd can be emptied. A thread that has posted may write
     * to it only after this, and then ends the next sleep for nothing. */
    if (end_sleep(reactor, is_woken) || is_woken) drain(reactor->wake_fd);
}

void tl_reactor_defer(struct tl_reactor *reactor, struct tl_closure *closure)
{
    tl_loop_core_defer(&reactor->core, closure);
}

void tl_reactor_defer_last(struct tl_reactor *reactor, struct tl_closure *closure)
{
    tl_loop_core_defer_last(&reactor->core, closure);
}

struct tl_timers *tl_reactor_timers(struct tl_reactor *reactor)
{
    return &reactor->core.timers;
}

struct tl_provider *tl_reactor_provider(struct tl_reactor *reactor)
{
    return reactor->provider;
}

void tl_reactor_busy(struct tl_reactor *reactor, int change)
{
    reactor->busy_count += change;
    TL_CHECK(reactor->busy_count >= 0);
    if (change > 0) reactor->idle_since_ns = 0;
}
