// SPDX-License-Identifier: Apache-2.0
/*
 * The end of links whose peer takes nothing.
 *
 * Answers that have been begun keep memory: the tensors that they send, also values that were replaced in the meantime,
 * and what is in flight. A peer that takes nothing must not keep them for ever. So a link is ended when nothing has
 * moved on it for options.stalled_timeout_ns while something was unsent.
 *
 * Moving means that a frame could be sent. While chunks wait, only a frame with a chunk counts: a peer whose window is
 * full could otherwise keep its tensors by asking for something else now and then. On a link that we have opened it
 * also counts when the peer answers us: it may read nothing while many of its answers wait (link_unsent.c).
 *
 * A timer looks several times in this period, so that sending reads no clock. A link that closes in order has the same
 * time to end: a peer that takes nothing could half-close a link that it has opened, or leave one of ours open.
 */
#include "base/clock.h"
#include "base/error.h"
#include "control/link_serves.h"

/* How often the timer looks in the time that a peer has. */
#define LOOKS 4

/* What waits for a device does not wait for the peer, and neither does what waits behind that. */
static bool has_unsent(const struct tl_link *link)
{
    const struct link_answers *answers = &link->answers;
    bool is_ready = !link_queue_is_empty(&answers->ready) && answers->staging_count == 0;
    return is_ready || !link_queue_is_empty(&answers->active) || !tl_list_is_empty(&answers->leaving) ||
           !tl_list_is_empty(&answers->failures) || !tl_stream_can_send(link->stream);
}

static void end(struct tl_link *link, int64_t stalled_ns)
{
    struct tl_error reason;
    const char *name = link->peer.name[0] != '\0' ? link->peer.name : link->peer.address;
    tl_error_set(&reason, TL_UNAVAILABLE,
                 "%s has taken nothing for %lld ms while %zu answers waited for it; it is stopped or cut off, or the "
                 "network needs a longer timeouts.stalled",
                 name, (long long)(stalled_ns / TL_NS_PER_MS), link->answers.unsent_count);
    link_log_end(link, "has taken nothing", &reason);
    tl_link_close(link, &reason);
}

static void arm(struct tl_link *link, int64_t after_ns)
{
    struct tl_error reason;
    struct tl_timers *timers = tl_loop_timers(link->control->loop);
    if (tl_timers_arm(timers, &link->stall.timer, tl_clock_deadline_ns(after_ns)) == TL_OK) return;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s: no memory to watch a link", link->control->options.self.name);
    tl_link_close(link, &reason);
}

/* Ends a link that was to close in order. The peer may not have read all that was sent. */
static void cut_off(struct tl_link *link)
{
    link->has_half_closed = false;
    tl_stream_cancel(link->stream);
}

static void look(struct tl_timer *timer)
{
    struct tl_link *link = TL_CONTAINER_OF(timer, struct tl_link, stall.timer);
    int64_t limit_ns = link->control->options.stalled_timeout_ns;
    if (link->state == LINK_CLOSING) {
        cut_off(link);
        return;
    }
    if ((link->state != LINK_UP && link->state != LINK_DRAINING) || !has_unsent(link)) return;
    if (link->stall.has_progressed) link->stall.since_ns = tl_clock_now_ns();
    link->stall.has_progressed = false;
    int64_t stalled_ns = tl_clock_now_ns() - link->stall.since_ns;
    if (stalled_ns >= limit_ns) {
        end(link, stalled_ns);
        return;
    }
    int64_t left_ns = limit_ns - stalled_ns;
    arm(link, left_ns < limit_ns / LOOKS ? left_ns : limit_ns / LOOKS);
}

void link_stall_init(struct tl_link *link)
{
    link->stall.timer.fire = look;
}

void link_stall_watch(struct tl_link *link)
{
    if (link->stall.timer.heap_place != 0 || !has_unsent(link)) return;
    int64_t limit_ns = link->control->options.stalled_timeout_ns;
    if (limit_ns == TL_TIME_NEVER) return;
    link->stall.has_progressed = false;
    link->stall.since_ns = tl_clock_now_ns();
    arm(link, limit_ns / LOOKS);
}

void link_stall_sent(struct tl_link *link, size_t chunk_count)
{
    bool do_chunks_wait = !link_queue_is_empty(&link->answers.ready) || !link_queue_is_empty(&link->answers.active);
    if (chunk_count > 0 || !do_chunks_wait) link->stall.has_progressed = true;
}

void link_stall_progressed(struct tl_link *link, size_t chunk_count)
{
    if (link->is_ours && (chunk_count > 0 || link->answers.unsent_count == 0)) link->stall.has_progressed = true;
}

void link_stall_await_end(struct tl_link *link)
{
    struct tl_timers *timers = tl_loop_timers(link->control->loop);
    int64_t limit_ns = link->control->options.stalled_timeout_ns;
    int64_t due_ns = limit_ns != TL_TIME_NEVER ? tl_clock_deadline_ns(limit_ns) : TL_TIME_NEVER;
    if (tl_timers_arm(timers, &link->stall.timer, due_ns) != TL_OK) cut_off(link);
}

void link_stall_fini(struct tl_link *link)
{
    tl_timers_disarm(tl_loop_timers(link->control->loop), &link->stall.timer);
}
