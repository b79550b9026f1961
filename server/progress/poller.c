// SPDX-License-Identifier: Apache-2.0
#include "server/progress/poller.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"

/* Rounds between two looks at gRPC while the data plane is busy. */
#define ROUNDS_PER_GRPC 16
/* Reactors whose provider cannot wake a sleeper are polled that often. */
#define NAP_NS TL_NS_PER_MS

/* So many requests must have begun before reactors are asked for: each time costs two switches of threads. */
#define REQUESTS_TO_BORROW 16
/* With more requests than these under way a reactor's own thread works beside the one that makes them, unless there are
 * few processors. */
#define FEW_REQUESTS 8
/* How often a borrower tries to rest a reactor before it goes away. */
#define REST_TRIES 4

/* The helper watches reactors, by their index, and this. */
#define WATCHED_STOP UINT32_MAX

/* ------------------------------------------------------------------------------------------------------ helper -- */

static void *watch(void *context)
{
    const struct tl_poller *poller = context;
    for (;;) {
        struct epoll_event event;
        int count = epoll_wait(poller->epoll_fd, &event, 1, poller->beat_ms);
        TL_CHECK(count >= 0 || errno == EINTR);
        if (count == 0) poller->beat.look(poller->beat.context);
        if (count <= 0) continue;
        if (event.data.u32 == WATCHED_STOP) return NULL;
        tl_loop_wake(poller->loop);
    }
}

static bool add(const struct tl_poller *poller, int fd, uint32_t watched, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.u32 = watched};
    return epoll_ctl(poller->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

/* Lets the helper wake the loop once for each reactor, as soon as that has something to do. */
static void arm_helper(const struct tl_poller *poller)
{
    for (uint32_t i = 0; i < poller->reactor_count; i++) {
        struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.u32 = i};
        TL_CHECK(epoll_ctl(poller->epoll_fd, EPOLL_CTL_MOD, tl_reactor_fd(poller->reactors[i].reactor), &event) == 0);
    }
}

static enum tl_status start_helper(struct tl_poller *poller, struct tl_error *ret_error)
{
    poller->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (poller->epoll_fd >= 0) poller->stop_fd = eventfd(0, EFD_CLOEXEC);
    bool is_complete = poller->stop_fd >= 0 && add(poller, poller->stop_fd, WATCHED_STOP, EPOLLIN);
    for (uint32_t i = 0; i < poller->reactor_count && is_complete; i++)
        is_complete = add(poller, tl_reactor_fd(poller->reactors[i].reactor), i, EPOLLONESHOT);
    if (!is_complete) {
        return tl_error_set_errno(ret_error, errno, "no descriptor to wait for the data plane");
    }
    return tl_thread_start("tl-waker", watch, poller, &poller->helper, ret_error);
}

static void release(struct tl_poller *poller)
{
    free(poller->reactors);
    if (poller->epoll_fd >= 0) close(poller->epoll_fd);
    if (poller->stop_fd >= 0) close(poller->stop_fd);
}

/* With more requests under way reactors are not borrowed. */
static int64_t most_to_borrow(void)
{
    return tl_thread_has_few_processors() ? INT64_MAX : FEW_REQUESTS;
}

enum tl_status tl_poller_init(struct tl_poller *poller, struct tl_loop *loop, const struct tl_executor *loop_executor,
                              const struct tl_polled_reactor *reactors, size_t count,
                              const struct tl_poller_heartbeat *beat, struct tl_error *ret_error)
{
    *poller = (struct tl_poller){.loop = loop,
                                 .loop_executor = loop_executor,
                                 .most_to_borrow = most_to_borrow(),
                                 .epoll_fd = -1,
                                 .stop_fd = -1};
    if (count == 0) return TL_OK;
    poller->reactors = malloc(count * sizeof(*reactors));
    if (poller->reactors == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for reactors");
    memcpy(poller->reactors, reactors, count * sizeof(*reactors));
    uint64_t beat_ns = UINT64_MAX;
    for (size_t i = 0; i < count; i++) {
        if (reactors[i].spin_ns > poller->spin_ns) poller->spin_ns = reactors[i].spin_ns;
        beat_ns = tl_min_u64(beat_ns, (uint64_t)reactors[i].beat_ns);
        poller->reactors[i].is_here = reactors[i].thread == NULL;
        poller->here_count += poller->reactors[i].is_here;
    }
    poller->reactor_count = count;
    poller->has_helper = poller->here_count > 0;
    if (!poller->has_helper) return TL_OK;
    poller->beat = *beat;
    poller->beat_ms = (int)tl_min_u64(beat_ns / TL_NS_PER_MS + 1, INT_MAX);
    enum tl_status status = start_helper(poller, ret_error);
    if (status != TL_OK) release(poller);
    return status;
}

void tl_poller_fini(struct tl_poller *poller)
{
    uint64_t one = 1;
    if (poller->has_helper) {
        TL_CHECK(write(poller->stop_fd, &one, sizeof(one)) == sizeof(one));
        pthread_join(poller->helper, NULL);
    }
    release(poller);
}

/* ------------------------------------------------------------------------------------------------------ rounds -- */

static bool run_loop(const struct tl_poller *poller, int64_t deadline_ns)
{
    const struct tl_executor *former = tl_executor_enter(poller->loop_executor);
    bool did_work = tl_loop_run_once(poller->loop, deadline_ns);
    tl_executor_leave(former);
    return did_work;
}

static bool run_reactor(const struct tl_polled_reactor *polled)
{
    const struct tl_executor *former = tl_executor_enter(polled->executor);
    bool did_work = tl_reactor_run_once(polled->reactor, 0);
    tl_executor_leave(former);
    return did_work;
}

static bool run_reactors(const struct tl_poller *poller)
{
    bool did_work = false;
    for (size_t i = 0; i < poller->reactor_count; i++)
        if (poller->reactors[i].is_here) did_work |= run_reactor(&poller->reactors[i]);
    return did_work;
}

/* What these closures give to the data plane leaves at once. */
static bool run_closures(const struct tl_poller *poller)
{
    const struct tl_executor *former = tl_executor_enter(poller->loop_executor);
    bool did_work = tl_loop_run_closures(poller->loop);
    tl_executor_leave(former);
    for (size_t i = 0; i < poller->reactor_count; i++) {
        const struct tl_polled_reactor *polled = &poller->reactors[i];
        if (polled->is_here && tl_reactor_is_wanted(polled->reactor)) did_work |= run_reactor(polled);
    }
    return did_work;
}

/* Whether the data plane is likely to have something to do soon: own requests travel, or peers have just sent some. */
static bool is_busy(const struct tl_poller *poller)
{
    return poller->busy_count > 0 || poller->is_serving;
}

/* gRPC is looked at last, because that takes longer than all else. */
static bool run_all(struct tl_poller *poller)
{
    bool did_work = run_reactors(poller);
    if (did_work && poller->has_helper) poller->is_serving = true;
    did_work |= run_closures(poller);
    if (is_busy(poller) && poller->rounds_to_grpc > 0) {
        poller->rounds_to_grpc--;
        return did_work;
    }
    poller->rounds_to_grpc = ROUNDS_PER_GRPC;
    return run_loop(poller, 0) || did_work;
}

/* ------------------------------------------------------------------------------------------------------ sleeping -- */

/* Ends the sleep of the first `count` reactors. */
static void end_sleep(const struct tl_poller *poller, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const struct tl_executor *former = tl_executor_enter(poller->reactors[i].executor);
        tl_reactor_end_sleep(poller->reactors[i].reactor, true);
        tl_executor_leave(former);
    }
}

/* Lets all reactors sleep, or none. Returns whether they may sleep; *ret_can_never: one of them can never. */
static bool prepare_sleep(const struct tl_poller *poller, bool *ret_can_never)
{
    for (size_t i = 0; i < poller->reactor_count; i++) {
        const struct tl_executor *former = tl_executor_enter(poller->reactors[i].executor);
        bool may_sleep = tl_reactor_prepare_sleep(poller->reactors[i].reactor);
        tl_executor_leave(former);
        if (may_sleep) continue;
        *ret_can_never = tl_reactor_provider(poller->reactors[i].reactor)->fd < 0;
        end_sleep(poller, i);
        return false;
    }
    return true;
}

static void rest(struct tl_poller *poller, struct tl_polled_reactor *polled)
{
    const struct tl_executor *former = tl_executor_enter(polled->executor);
    polled->is_here = !tl_reactor_thread_rest(polled->thread);
    tl_executor_leave(former);
    if (!polled->is_here) poller->here_count--;
}

static void rest_all(struct tl_poller *poller)
{
    for (size_t i = 0; i < poller->reactor_count; i++)
        if (poller->reactors[i].is_here) rest(poller, &poller->reactors[i]);
}

/* Sleeps in the loop until deadline_ns. Returns whether anything was done. */
static bool sleep_until(struct tl_poller *poller, int64_t deadline_ns)
{
    bool can_never = false;
    if (!poller->has_helper) {
        rest_all(poller);
        return run_loop(poller, poller->here_count > 0 ? 0 : deadline_ns);
    }
    if (!prepare_sleep(poller, &can_never)) {
        int64_t nap_ns = can_never ? tl_clock_deadline_ns(NAP_NS) : 0;
        return run_loop(poller, nap_ns < deadline_ns ? nap_ns : deadline_ns);
    }
    arm_helper(poller);
    bool did_work = run_loop(poller, deadline_ns);
    end_sleep(poller, poller->reactor_count);
    return did_work;
}

/* Returns until when a helper thread of a provider is expected to work; 0: none does. */
static int64_t helper_until_ns(const struct tl_poller *poller)
{
    int64_t until_ns = 0;
    for (unsigned i = 0; i < poller->reactor_count; i++) {
        if (!poller->reactors[i].is_here) continue;
        int64_t its_ns = tl_reactor_provider(poller->reactors[i].reactor)->helper_until_ns;
        if (its_ns > until_ns) until_ns = its_ns;
    }
    return until_ns;
}

/* Returns whether the peers of a reactor run on this processor. It is assumed that what is awaited comes from them. */
static bool shares_processor(const struct tl_poller *poller)
{
    for (size_t i = 0; i < poller->reactor_count; i++) {
        const struct tl_polled_reactor *polled = &poller->reactors[i];
        if (polled->is_here && tl_reactor_shares_processor(polled->reactor)) return true;
    }
    return false;
}

/* Polls as long as a result is expected, and keeps no other thread from its work: least of all peers that need this
 * processor to answer. Returns false when there was no result. */
static bool spin(struct tl_poller *poller, int64_t now_ns, int64_t deadline_ns)
{
    int64_t spin_until_ns = now_ns + poller->spin_ns, yield_ns = now_ns + TL_THREAD_YIELD_NS, helper_ns;
    while ((helper_ns = helper_until_ns(poller), now_ns < (helper_ns != 0 ? helper_ns : spin_until_ns)) &&
           now_ns < deadline_ns) {
        if (run_all(poller)) return true;
        bool must_yield = shares_processor(poller) || helper_ns != 0;
        now_ns = tl_clock_now_ns();
        if (must_yield) {
            (void)sched_yield();
        } else if (tl_thread_yields(&now_ns, &yield_ns)) {
            return false;
        }
    }
    return false;
}

bool tl_poller_run(struct tl_poller *poller, int64_t deadline_ns)
{
    if (poller->here_count == 0) return run_loop(poller, deadline_ns);
    if (run_all(poller)) return true;
    int64_t now_ns = tl_clock_now_ns();
    if (is_busy(poller) && poller->spin_ns > 0 && spin(poller, now_ns, deadline_ns)) return true;
    /* A caller that does not wait may not be back soon. Its next round looks at gRPC, so that gRPC is served in every
     * call. */
    if (poller->is_serving && now_ns >= deadline_ns) tl_poller_want_grpc(poller);
    poller->is_serving = false;
    return now_ns < deadline_ns && sleep_until(poller, deadline_ns);
}

/* --------------------------------------------------------------------------------------------------- borrowing -- */

/* Takes a reactor that rests. Returns whether it is here now. */
static bool take(struct tl_poller *poller, struct tl_polled_reactor *polled)
{
    const struct tl_executor *former = tl_executor_enter(polled->executor);
    polled->is_here = tl_reactor_thread_borrow(polled->thread);
    polled->is_left = false;
    tl_executor_leave(former);
    poller->here_count += polled->is_here;
    return polled->is_here;
}

void tl_poller_borrow(struct tl_poller *poller)
{
    if (poller->busy_count > poller->most_to_borrow) {
        tl_poller_give_back(poller);
        return;
    }
    if (poller->here_count == poller->reactor_count) return;
    bool is_asking = poller->begun_count >= REQUESTS_TO_BORROW;
    if (is_asking) poller->begun_count = 0;
    for (size_t i = 0; i < poller->reactor_count; i++) {
        struct tl_polled_reactor *polled = &poller->reactors[i];
        if (!polled->is_here && !take(poller, polled) && is_asking) tl_reactor_thread_ask(polled->thread);
    }
}

static void leave_all(struct tl_poller *poller)
{
    for (size_t i = 0; i < poller->reactor_count; i++) {
        struct tl_polled_reactor *polled = &poller->reactors[i];
        if (!polled->is_here) continue;
        polled->is_here = false;
        poller->here_count--;
        polled->is_left = true;
        tl_reactor_thread_leave(polled->thread);
    }
}

void tl_poller_rest(struct tl_poller *poller)
{
    for (unsigned i = 0; i < REST_TRIES && tl_poller_has_borrowed(poller); i++) {
        rest_all(poller);
        if (run_reactors(poller)) (void)run_closures(poller);
    }
    (void)run_closures(poller);
    leave_all(poller); /* they have more to do than the caller can wait for */
}

void tl_poller_give_back(struct tl_poller *poller)
{
    for (size_t i = 0; i < poller->reactor_count; i++) {
        struct tl_polled_reactor *polled = &poller->reactors[i];
        if (polled->is_left) (void)take(poller, polled); /* what is to be done now would wait for its thread */
        if (polled->thread == NULL || !polled->is_here) continue;
        polled->is_here = false;
        poller->here_count--;
        tl_reactor_thread_give_back(polled->thread);
    }
}
