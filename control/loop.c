// SPDX-License-Identifier: Apache-2.0
/*
 * The control loop over a gRPC completion queue.
 *
 * To wake a sleeping owner, a post starts an empty batch on a call that serves only this purpose, on a lame channel.
 * gRPC puts the tag of such a batch into the queue at once and allows that from any thread.
 */
#include "control/loop.h"

#include <errno.h>
#include <grpc/grpc.h>
#include <grpc/support/time.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "control/grpc_start.h"
#include "control/tag.h"
#include "control/tls_relay.h"

/* So many events are handled before the deferred closures run: this bounds how long a small answer is held back. */
#define EVENTS_PER_ROUND 64

struct tl_loop {
    grpc_completion_queue *cq;
    grpc_channel *wake_channel;
    grpc_call *wake_call;
    struct tl_tag wake_tag;
    struct tl_loop_core core;
    struct tl_tls_relay *relay;  /* NULL: none */
    int wake_fd;                 /* wakes an owner that waits for TLS connections; -1: there never were any */
    atomic_bool is_watching;     /* the owner waits for TLS connections, and not in gRPC */
    bool has_heard;              /* gRPC had an event in this round */
    bool has_written;            /* gRPC was given something to send in this round */
    unsigned moved_count;        /* sockets for which something came at the end of the round before */
    atomic_uint_fast64_t rounds; /* odd while the owner is inside gRPC */
    atomic_int owner_clock;      /* clockid_t: processor time of the latest owner */
};

static void wake_complete(struct tl_tag *tag, bool is_ok)
{
    (void)tag;
    (void)is_ok;
}

/* Seconds that gRPC's monotonic clock is ahead of the system's: a constant, 0 in 1.51 and 5 in newer cores. */
static int64_t clock_lead_s(void)
{
    gpr_timespec now = gpr_now(GPR_CLOCK_MONOTONIC);
    int64_t lead_ns = now.tv_sec * TL_NS_PER_SEC + now.tv_nsec - tl_clock_now_ns();
    return (lead_ns + TL_NS_PER_SEC / 2) / TL_NS_PER_SEC;
}

gpr_timespec tl_deadline_to_gpr(int64_t deadline_ns)
{
    static _Atomic int64_t lead_s = -1;
    if (deadline_ns == TL_TIME_NEVER) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
    if (deadline_ns <= 0) return gpr_inf_past(GPR_CLOCK_MONOTONIC);
    int64_t seconds = atomic_load_explicit(&lead_s, memory_order_relaxed);
    if (seconds < 0) {
        seconds = clock_lead_s();
        atomic_store_explicit(&lead_s, seconds, memory_order_relaxed);
    }
    return (gpr_timespec){.tv_sec = deadline_ns / TL_NS_PER_SEC + seconds,
                          .tv_nsec = (int32_t)(deadline_ns % TL_NS_PER_SEC),
                          .clock_type = GPR_CLOCK_MONOTONIC};
}

enum tl_status tl_loop_create(struct tl_loop **ret_loop, struct tl_error *ret_error)
{
    enum tl_status status = tl_grpc_start(ret_error);
    if (status != TL_OK) return status;
    struct tl_loop *loop = calloc(1, sizeof(*loop));
    if (loop == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the control loop");
    loop->cq = grpc_completion_queue_create_for_next(NULL);
    loop->wake_channel = grpc_lame_client_channel_create("wake", GRPC_STATUS_UNAVAILABLE, "wake");
    loop->wake_call = grpc_channel_create_call(loop->wake_channel, NULL, GRPC_PROPAGATE_DEFAULTS, loop->cq,
                                               grpc_slice_from_static_string("/wake"), NULL,
                                               gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    TL_CHECK(loop->wake_call != NULL);
    tl_tag_init(&loop->wake_tag, wake_complete);
    tl_loop_core_init(&loop->core);
    loop->wake_fd = -1;
    *ret_loop = loop;
    return TL_OK;
}

void tl_loop_destroy(struct tl_loop *loop)
{
    if (loop == NULL) return;
    tl_loop_core_fini(&loop->core); /* runs abandoned look-ups, which free themselves */
    grpc_call_unref(loop->wake_call);
    grpc_channel_destroy(loop->wake_channel);
    grpc_completion_queue_shutdown(loop->cq);
    grpc_event event;
    do {
        event = grpc_completion_queue_next(loop->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        TL_CHECK(event.type == GRPC_QUEUE_SHUTDOWN || event.tag == &loop->wake_tag);
    } while (event.type != GRPC_QUEUE_SHUTDOWN);
    grpc_completion_queue_destroy(loop->cq);
    if (loop->wake_fd >= 0) (void)close(loop->wake_fd);
    free(loop);
}

grpc_completion_queue *tl_loop_cq(struct tl_loop *loop)
{
    return loop->cq;
}

struct tl_timers *tl_loop_timers(struct tl_loop *loop)
{
    return &loop->core.timers;
}

struct tl_quota *tl_loop_quota(struct tl_loop *loop)
{
    return &loop->core.quota;
}

void tl_loop_wake(struct tl_loop *loop)
{
    grpc_call_error error = grpc_call_start_batch(loop->wake_call, NULL, 0, &loop->wake_tag, NULL);
    TL_CHECK(error == GRPC_CALL_OK);
    if (atomic_load(&loop->is_watching)) (void)eventfd_write(loop->wake_fd, 1);
}

void tl_loop_post(struct tl_loop *loop, struct tl_closure *closure)
{
    if (tl_loop_core_post(&loop->core, closure)) tl_loop_wake(loop);
}

void tl_loop_post_all(struct tl_loop *loop, struct tl_list *closures)
{
    if (tl_loop_core_post_all(&loop->core, closures)) tl_loop_wake(loop);
}

void tl_loop_defer(struct tl_loop *loop, struct tl_closure *closure)
{
    tl_loop_core_defer(&loop->core, closure);
}

void tl_loop_defer_last(struct tl_loop *loop, struct tl_closure *closure)
{
    tl_loop_core_defer_last(&loop->core, closure);
}

/* The loop has one owner at a time, so that a load and a store are enough. */
static void count_round(struct tl_loop *loop)
{
    uint64_t rounds = atomic_load_explicit(&loop->rounds, memory_order_relaxed);
    atomic_store_explicit(&loop->rounds, rounds + 1, memory_order_relaxed);
}

void tl_loop_get_pulse(const struct tl_loop *loop, struct tl_loop_pulse *ret_pulse)
{
    struct timespec used;
    clockid_t clock = atomic_load_explicit(&loop->owner_clock, memory_order_relaxed);
    ret_pulse->rounds = atomic_load_explicit(&loop->rounds, memory_order_relaxed);
    ret_pulse->is_in_grpc = ret_pulse->rounds % 2 == 1;
    ret_pulse->cpu_ns = clock_gettime(clock, &used) == 0 ? used.tv_sec * TL_NS_PER_SEC + used.tv_nsec : 0;
}

/* Handles the events of gRPC, at most EVENTS_PER_ROUND; waits for the first one until deadline_ns. Returns how many. */
static unsigned handle_events(struct tl_loop *loop, int64_t deadline_ns)
{
    unsigned count = 0;
    clockid_t clock;
    if (pthread_getcpuclockid(pthread_self(), &clock) == 0) {
        atomic_store_explicit(&loop->owner_clock, clock, memory_order_relaxed);
    }
    while (count < EVENTS_PER_ROUND) {
        count_round(loop);
        grpc_event event = grpc_completion_queue_next(loop->cq, tl_deadline_to_gpr(count == 0 ? deadline_ns : 0), NULL);
        count_round(loop);
        if (event.type != GRPC_OP_COMPLETE) break;
        struct tl_tag *tag = event.tag;
        TL_CHECK(tag->magic == TL_TAG_MAGIC);
        loop->has_heard |= tag != &loop->wake_tag;
        tl_quota_renew(&loop->core.quota); /* each event is of another stream or call */
        tag->complete(tag, event.success != 0);
        count++;
    }
    return count;
}

/* ---------------------------------------------------------------------------------------------- TLS connections -- */

enum tl_status tl_loop_enter_relay(struct tl_loop *loop, struct tl_tls_relay *relay, struct tl_error *ret_error)
{
    loop->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (loop->wake_fd < 0) return tl_error_set_errno(ret_error, errno, "no descriptor to wait for TLS connections");
    enum tl_status status = tl_tls_relay_attach(relay, loop->wake_fd, ret_error);
    if (status == TL_OK) loop->relay = relay;
    return status;
}

void tl_loop_leave_relay(struct tl_loop *loop)
{
    tl_tls_relay_detach(loop->relay);
    atomic_store(&loop->is_watching, false);
    loop->relay = NULL;
}

static bool is_watching(const struct tl_loop *loop)
{
    return atomic_load_explicit(&loop->is_watching, memory_order_relaxed);
}

/* The owner is at work: from now on it looks at the TLS connections itself. */
static void begin_watching(struct tl_loop *loop)
{
    if (loop->relay == NULL || is_watching(loop)) return;
    if (tl_tls_relay_enter(loop->relay)) atomic_store(&loop->is_watching, true);
}

void tl_loop_begin_write(struct tl_loop *loop)
{
    begin_watching(loop);
    loop->has_written = true;
}

/* Moves bytes of TLS connections, and waits for some until deadline_ns, but not for long. Returns for how many sockets
 * any came. */
static unsigned move_bytes(struct tl_loop *loop, int64_t deadline_ns)
{
    bool is_over;
    if (!is_watching(loop)) return 0;
    unsigned count = tl_tls_relay_drive(loop->relay, deadline_ns, &is_over);
    if (is_over) atomic_store(&loop->is_watching, false);
    return count;
}

void tl_loop_pause(struct tl_loop *loop)
{
    if (is_watching(loop) && tl_tls_relay_pause(loop->relay)) atomic_store(&loop->is_watching, false);
}

/* ------------------------------------------------------------------------------------------------------- rounds -- */

static bool run_closures_and_timers(struct tl_loop *loop)
{
    unsigned count = tl_loop_core_run_closures(&loop->core);
    return tl_loop_core_fire_timers(&loop->core) + count > 0;
}

static bool run_all_closures(struct tl_loop *loop)
{
    bool did_work = run_closures_and_timers(loop);
    return tl_loop_core_run_deferred(&loop->core) || did_work;
}

/* Moves what gRPC was given to send: the next round may be far away. What gRPC says itself, about windows, leaves with
 * what is sent next. */
static void flush_written(struct tl_loop *loop)
{
    if (loop->has_written) loop->moved_count += move_bytes(loop, 0);
    loop->has_written = false;
}

bool tl_loop_run_closures(struct tl_loop *loop)
{
    tl_loop_core_enter();
    bool did_work = run_all_closures(loop);
    flush_written(loop);
    tl_loop_core_leave();
    return did_work;
}

bool tl_loop_has_work(struct tl_loop *loop)
{
    if (!tl_loop_core_prepare_sleep(&loop->core)) return true;
    (void)tl_loop_core_end_sleep(&loop->core);
    return false;
}

/* Handles the events behind what was moved: gRPC looks at one of its sockets each time, and says nothing when that had
 * no more than window updates. */
static bool handle_moved(struct tl_loop *loop, unsigned count)
{
    bool has_any = false;
    for (unsigned i = 0; i < count; i++)
        has_any |= handle_events(loop, 0) > 0;
    return has_any;
}

/* Waits in gRPC, or for TLS connections, until deadline_ns, and handles what comes. Returns whether anything did. */
static bool wait_for_events(struct tl_loop *loop, int64_t deadline_ns)
{
    if (!is_watching(loop)) return handle_events(loop, deadline_ns) > 0;
    /* What is there already; at least the ends of what was sent. */
    if (handle_moved(loop, loop->moved_count + 1)) return true;
    unsigned count = move_bytes(loop, deadline_ns);
    (void)handle_moved(loop, count);
    return count > 0 || (!is_watching(loop) && handle_events(loop, deadline_ns) > 0);
}

bool tl_loop_run_once(struct tl_loop *loop, int64_t deadline_ns)
{
    tl_loop_core_enter();
    bool did_work = run_all_closures(loop);
    bool may_sleep = !did_work && tl_loop_core_prepare_sleep(&loop->core);
    bool has_events = wait_for_events(loop, may_sleep ? tl_loop_core_sleep_until_ns(&loop->core, deadline_ns) : 0);
    if (may_sleep) (void)tl_loop_core_end_sleep(&loop->core);
    if (loop->has_heard) begin_watching(loop);
    loop->has_heard = false;
    did_work |= run_all_closures(loop) || has_events;
    loop->moved_count = 0;
    flush_written(loop);
    tl_loop_core_leave();
    return did_work;
}
