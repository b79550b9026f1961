// SPDX-License-Identifier: Apache-2.0
#include "server/turn.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
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
/* What cannot wake anybody is polled that often. */
#define NAP_NS TL_NS_PER_MS

/* What the helper watches: a reactor by its place, or this. */
#define WATCHED_STOP UINT32_MAX

/* ------------------------------------------------------------------------------------------------------- helper -- */

static void *watch(void *context)
{
    const struct tl_turn *turn = context;
    for (;;) {
        struct epoll_event event;
        int count = epoll_wait(turn->epoll_fd, &event, 1, turn->beat_ms);
        TL_CHECK(count >= 0 || errno == EINTR);
        if (count == 0) turn->beat.look(turn->beat.context);
        if (count <= 0) continue;
        if (event.data.u32 == WATCHED_STOP) return NULL;
        tl_loop_wake(turn->loop);
    }
}

static bool add(const struct tl_turn *turn, int fd, uint32_t watched, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.u32 = watched};
    return epoll_ctl(turn->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

/* The helper wakes the loop once for each reactor, as soon as it would have something to do. */
static void arm_helper(const struct tl_turn *turn)
{
    for (uint32_t i = 0; i < turn->reactor_count; i++) {
        struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT, .data.u32 = i};
        TL_CHECK(epoll_ctl(turn->epoll_fd, EPOLL_CTL_MOD, tl_reactor_fd(turn->reactors[i].reactor), &event) == 0);
    }
}

static enum tl_status start_helper(struct tl_turn *turn, struct tl_error *ret_error)
{
    turn->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (turn->epoll_fd >= 0) turn->stop_fd = eventfd(0, EFD_CLOEXEC);
    bool is_complete = turn->stop_fd >= 0 && add(turn, turn->stop_fd, WATCHED_STOP, EPOLLIN);
    for (uint32_t i = 0; i < turn->reactor_count && is_complete; i++)
        is_complete = add(turn, tl_reactor_fd(turn->reactors[i].reactor), i, EPOLLONESHOT);
    if (!is_complete) {
        return tl_error_set_errno(ret_error, errno, "no descriptor to wait for the data plane");
    }
    return tl_thread_start("tl-waker", watch, turn, &turn->helper, ret_error);
}

static void close_descriptors(struct tl_turn *turn)
{
    if (turn->epoll_fd >= 0) close(turn->epoll_fd);
    if (turn->stop_fd >= 0) close(turn->stop_fd);
}

enum tl_status tl_turn_init(struct tl_turn *turn, struct tl_loop *loop, const struct tl_home *loop_home,
                            const struct tl_turn_reactor *reactors, size_t count, const struct tl_turn_beat *beat,
                            struct tl_error *ret_error)
{
    TL_CHECK(count <= TL_MAX_DRIVEN);
    *turn = (struct tl_turn){.loop = loop, .loop_home = loop_home, .epoll_fd = -1, .stop_fd = -1};
    if (count == 0) return TL_OK;
    uint64_t beat_ns = UINT64_MAX;
    for (size_t i = 0; i < count; i++) {
        turn->reactors[i] = reactors[i];
        if (reactors[i].spin_ns > turn->spin_ns) turn->spin_ns = reactors[i].spin_ns;
        beat_ns = tl_min_u64(beat_ns, (uint64_t)reactors[i].beat_ns);
    }
    turn->reactor_count = count;
    turn->beat = *beat;
    turn->beat_ms = (int)tl_min_u64(beat_ns / TL_NS_PER_MS + 1, INT_MAX);
    enum tl_status status = start_helper(turn, ret_error);
    if (status != TL_OK) close_descriptors(turn);
    return status;
}

void tl_turn_fini(struct tl_turn *turn)
{
    if (turn->reactor_count == 0) return;
    uint64_t one = 1;
    TL_CHECK(write(turn->stop_fd, &one, sizeof(one)) == sizeof(one));
    pthread_join(turn->helper, NULL);
    close_descriptors(turn);
}

/* ------------------------------------------------------------------------------------------------------- rounds -- */

static bool run_loop(const struct tl_turn *turn, int64_t deadline_ns)
{
    const struct tl_home *former = tl_home_enter(turn->loop_home);
    bool did_work = tl_loop_run_once(turn->loop, deadline_ns);
    tl_home_leave(former);
    return did_work;
}

static bool run_reactors(const struct tl_turn *turn)
{
    bool did_work = false;
    for (size_t i = 0; i < turn->reactor_count; i++) {
        const struct tl_home *former = tl_home_enter(turn->reactors[i].home);
        did_work |= tl_reactor_run_once(turn->reactors[i].reactor, 0);
        tl_home_leave(former);
    }
    return did_work;
}

static bool run_all(struct tl_turn *turn)
{
    bool did_work = run_reactors(turn);
    if (turn->busy_count == 0 || turn->rounds_to_grpc == 0) {
        turn->rounds_to_grpc = ROUNDS_PER_GRPC;
        return run_loop(turn, 0) || did_work;
    }
    turn->rounds_to_grpc--;
    const struct tl_home *former = tl_home_enter(turn->loop_home);
    did_work |= tl_loop_run_letters(turn->loop);
    tl_home_leave(former);
    return did_work;
}

/* Ends the sleep of the first `count` reactors. */
static void end_sleep(const struct tl_turn *turn, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const struct tl_home *former = tl_home_enter(turn->reactors[i].home);
        tl_reactor_end_sleep(turn->reactors[i].reactor);
        tl_home_leave(former);
    }
}

/* All of them, or none. */
static bool prepare_sleep(const struct tl_turn *turn, bool *ret_can_never)
{
    for (size_t i = 0; i < turn->reactor_count; i++) {
        const struct tl_home *former = tl_home_enter(turn->reactors[i].home);
        bool may_sleep = tl_reactor_prepare_sleep(turn->reactors[i].reactor);
        tl_home_leave(former);
        if (may_sleep) continue;
        *ret_can_never = tl_reactor_provider(turn->reactors[i].reactor)->fd < 0;
        end_sleep(turn, i);
        return false;
    }
    return true;
}

/* Sleeps in the loop. */
static bool sleep_until(struct tl_turn *turn, int64_t deadline_ns)
{
    bool can_never = false;
    if (!prepare_sleep(turn, &can_never)) {
        int64_t nap_ns = can_never ? tl_clock_deadline_ns(NAP_NS) : 0;
        return run_loop(turn, nap_ns < deadline_ns ? nap_ns : deadline_ns);
    }
    arm_helper(turn);
    bool did_work = run_loop(turn, deadline_ns);
    end_sleep(turn, turn->reactor_count);
    return did_work;
}

/* Until when a helper thread of some provider is expected to take; 0: none is at work. */
static int64_t helper_until_ns(const struct tl_turn *turn)
{
    int64_t until_ns = 0;
    for (unsigned i = 0; i < turn->reactor_count; i++) {
        int64_t its_ns = tl_reactor_provider(turn->reactors[i].reactor)->helper_until_ns;
        if (its_ns > until_ns) until_ns = its_ns;
    }
    return until_ns;
}

/* Polls for so long as a result is expected. False: there was none. */
static bool spin(struct tl_turn *turn, int64_t now_ns, int64_t deadline_ns)
{
    int64_t spin_until_ns = now_ns + turn->spin_ns, helper_ns;
    while ((helper_ns = helper_until_ns(turn), now_ns < (helper_ns != 0 ? helper_ns : spin_until_ns)) &&
           now_ns < deadline_ns) {
        if (run_all(turn)) return true;
        if (helper_ns != 0) (void)sched_yield();
        now_ns = tl_clock_now_ns();
    }
    return false;
}

bool tl_turn_run(struct tl_turn *turn, int64_t deadline_ns)
{
    if (turn->reactor_count == 0) return run_loop(turn, deadline_ns);
    if (run_all(turn)) return true;
    if (deadline_ns == 0) return false;
    int64_t now_ns = tl_clock_now_ns();
    if (turn->busy_count > 0 && turn->spin_ns > 0 && spin(turn, now_ns, deadline_ns)) return true;
    return now_ns < deadline_ns && sleep_until(turn, deadline_ns);
}
