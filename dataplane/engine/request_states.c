// SPDX-License-Identifier: Apache-2.0
/* The states of a request: the table of transitions, and its actions. */
#include "dataplane/engine/request_internal.h"

#include "base/check.h"
#include "base/error.h"

/* So many rounds take what has come of all peers. */
#define MOST_LOOKS 4096

const struct tl_error request_out_of_memory = {.code = TL_RESOURCE_EXHAUSTED, .message = "no memory for a request"};

/* ------------------------------------------------------------------------------------------------------ result -- */

void request_set_result(struct request *request, const struct tl_error *error)
{
    if (request->result != NULL) return;
    request->result = tl_error_keep(error);
}

void request_set_given_up(struct request *request)
{
    struct tl_error error;
    tl_error_set(&error, TL_CANCELLED, "%s was given up", request->fetch->key);
    request_set_result(request, &error);
}

void request_fail(struct request *request, const struct tl_error *error)
{
    request_set_result(request, error);
    request_handle(request, REQUEST_EVENT_FAILED);
}

/* -------------------------------------------------------------------------------------------------- cancelling -- */

static void look_again(struct tl_closure *closure);

static void time_is_up(struct tl_timer *timer)
{
    struct request *request = TL_CONTAINER_OF(timer, struct request_limit, timer)->request;
    if (request->conn->state != CONN_CLOSING) request_handle(request, REQUEST_EVENT_LATE);
}

void request_limit(struct request *request, int64_t after_ns)
{
    if (request->limit == NULL) {
        request->limit = malloc(sizeof(*request->limit));
        if (request->limit == NULL) {
            tl_conn_close(request->conn, &request_out_of_memory);
            return;
        }
        *request->limit =
            (struct request_limit){.timer.fire = time_is_up, .request = request, .look_closure.run = look_again};
        tl_list_init(&request->limit->look_closure.link);
    }
    tl_list_remove(&request->limit->look_closure.link);
    request->limit->slots_returned = request->conn->credits.peer_slots_returned;
    conn_arm(request->conn, &request->limit->timer, after_ns);
}

void request_end_limit(struct request *request)
{
    if (request->limit == NULL) return;
    tl_timers_disarm(tl_reactor_timers(request->conn->engine->reactor), &request->limit->timer);
    tl_list_remove(&request->limit->look_closure.link);
    free(request->limit);
    request->limit = NULL;
}

/* Whether the peer has to act: to return a slot for CANCEL or for the release of a source, or to answer CANCEL. */
static bool awaits_peer(const struct request *request)
{
    bool is_unreleased = request->state == REQUEST_RELEASING && tl_list_is_linked(&request->pending.place);
    return is_unreleased || request->state == REQUEST_CANCELLING;
}

static void format_late(const struct request *request, struct tl_error *ret_reason)
{
    const char *peer = request->conn->peer.name;
    const char *key = request->fetch->key;
    if (request->state == REQUEST_RELEASING) {
        tl_error_set(ret_reason, TL_UNAVAILABLE, "%s has returned no slot in time to release %s", peer, key);
    } else {
        tl_error_set(ret_reason, TL_UNAVAILABLE, "%s has not answered the cancel of %s in time", peer, key);
    }
}

/* What is not sent waits on while slots come back: others are before it, or values that have come wait for memory of
 * ours, while nothing but pings is sent. If this process stood still, the answer may have come in time, behind messages
 * that were not taken yet: then each round looks again. */
static void end_unanswered(struct request *request)
{
    struct tl_conn *conn = request->conn;
    struct request_limit *limit = request->limit;
    bool is_unsent = tl_list_is_linked(&request->pending.place);
    if (!awaits_peer(request)) return;
    if (is_unsent && limit->slots_returned != conn->credits.peer_slots_returned) {
        request_limit(request, conn->engine->options.peer_timeout_ns);
        return;
    }
    limit->look_count = 0;
    limit->slots_taken = conn->credits.own_slots_returned;
    tl_reactor_defer(conn->engine->reactor, &limit->look_closure);
}

/* Others may keep the reactor busy, so that the looks have an end; in the first round nothing was taken since. */
static void look_again(struct tl_closure *closure)
{
    struct request_limit *limit = TL_CONTAINER_OF(closure, struct request_limit, look_closure);
    struct request *request = limit->request;
    struct tl_conn *conn = request->conn;
    struct tl_error reason;
    struct tl_reactor_stats stats;
    tl_reactor_get_stats(conn->engine->reactor, &stats);
    bool has_more = stats.events != limit->event_count && limit->look_count < MOST_LOOKS &&
                    conn->credits.own_slots_returned - limit->slots_taken < conn->engine->options.slot_count;
    if (conn->state == CONN_CLOSING || !awaits_peer(request)) return;
    if (limit->look_count == 0 || has_more) {
        limit->look_count++;
        limit->event_count = stats.events;
        tl_reactor_defer(conn->engine->reactor, &limit->look_closure);
        return;
    }
    format_late(request, &reason);
    conn->engine->stats.connections_broken++;
    tl_conn_close(conn, &reason);
}

/* The time to answer begins when CANCEL is posted. Until then the peer has its time-out to return each slot, because
 * one that is alive and returns none must not keep a request for ever. */
static void start_cancel(struct request *request)
{
    struct tl_conn *conn = request->conn;
    request_leave_queue(request);
    if (request->has_source) { /* the peer writes nothing: only our own reads touch the memory */
        if (request->placement->read_count == 0) request_handle(request, REQUEST_EVENT_STOPPED);
        return;
    }
    request_queue_post(request);
    request_limit(request, conn->engine->options.peer_timeout_ns);
}

static void give_up(struct request *request)
{
    request_set_given_up(request);
    if (request->has_source) request_tell_given_up(request);
    request_start_revoke(request);
}

/* The request ends before it has asked, or asked again. A peer that knows the handle and has not answered may still
 * write. */
static void abandon(struct request *request)
{
    bool may_peer_write = request->is_asked && !request->is_answered && !request->has_source;
    request_handle(request, may_peer_write ? REQUEST_EVENT_ABANDONED_ASKED : REQUEST_EVENT_ABANDONED_UNASKED);
}

static void set_given_up_waiting(struct request *request)
{
    struct tl_error error;
    tl_memory_format_wait(request->conn->memory, request->placement->memory_wait->memory_wait.wait.len_bytes, &error);
    request_set_result(request, &error);
}

bool request_stop_waiting(struct request *request)
{
    struct request_placement *placement = request->placement;
    if (placement == NULL) return true;
    conn_cancel_memory_wait(&placement->memory_wait);
    tl_list_remove(&placement->lap_link);
    request_drop_allocation(request);
    if (request_is_importing(request)) request_leave_import(request);
    return placement->memory_wait == NULL;
}

static void cancel_preparing(struct request *request)
{
    const struct request_placement *placement = request->placement;
    bool is_waiting = placement->memory_wait != NULL || tl_list_is_linked(&placement->lap_link) ||
                      placement->landing.allocation != NULL || request_is_importing(request);
    if (placement->memory_wait != NULL) {
        set_given_up_waiting(request);
    } else {
        request_set_given_up(request);
    }
    request->is_cancelled = true;
    if (request_stop_waiting(request) && is_waiting) request_handle(request, REQUEST_EVENT_READY);
}

/* ----------------------------------------------------------------------------------------------- other actions -- */

static void ready(struct request *request)
{
    if (request->is_cancelled) {
        abandon(request);
    } else if (request->has_source) {
        request_queue_read(request);
    } else {
        request_queue_post(request);
    }
}

/* The bytes can be read now. */
static void place_source(struct request *request)
{
    request_place_and_prepare(request, NULL);
}

static void sent(struct request *request)
{
    conn_watch(request->conn);
}

static void note_cancel(struct request *request)
{
    request->is_cancelled = true;
}

static void wait_no_longer(struct request *request)
{
    if (request->has_source) {
        request_return_source(request);
    } else {
        request_wait_no_longer(request);
    }
}

/* The value needs other memory than the first attempt had exposed. */
static void prepare_again(struct request *request)
{
    request_release_memory(request);
    request_place_and_prepare(request, NULL);
}

/* --------------------------------------------------------------------------------------------------- the table -- */

/* The table of all transitions. The request is in state `next` before the action runs; an action that is NULL does
 * nothing. Events that the table leaves out (REQUEST_NEVER) cannot happen in that state unless the peer, the card or
 * this code is at fault. */
struct transition {
    enum request_state next;
    void (*action)(struct request *request);
};

/* clang-format off */
static const struct transition transitions[REQUEST_FINISHED][REQUEST_EVENTS] = {
    [REQUEST_PREPARING] = {
        [REQUEST_EVENT_READY] = {REQUEST_QUEUED, ready},
        [REQUEST_EVENT_FAILED] = {REQUEST_PREPARING, abandon},
        [REQUEST_EVENT_ABANDONED_ASKED] = {REQUEST_CANCELLING, start_cancel},
        [REQUEST_EVENT_ABANDONED_UNASKED] = {REQUEST_REVOKING, give_up},
        [REQUEST_EVENT_CANCEL] = {REQUEST_PREPARING, cancel_preparing},
        [REQUEST_EVENT_STATUS] = {REQUEST_PREPARING, cancel_preparing}, /* the owner needs no destination */
        [REQUEST_EVENT_LATE] = {REQUEST_PREPARING, wait_no_longer},
        [REQUEST_EVENT_BROKEN] = {REQUEST_COPYING, request_copy_rest},
    },
    [REQUEST_QUEUED] = {
        [REQUEST_EVENT_SENT] = {REQUEST_ASKED, sent},
        [REQUEST_EVENT_READ] = {REQUEST_READING, NULL},
        [REQUEST_EVENT_FAILED] = {REQUEST_QUEUED, abandon},
        [REQUEST_EVENT_ABANDONED_ASKED] = {REQUEST_CANCELLING, start_cancel},
        [REQUEST_EVENT_ABANDONED_UNASKED] = {REQUEST_REVOKING, give_up},
        [REQUEST_EVENT_CANCEL] = {REQUEST_QUEUED, abandon},
        [REQUEST_EVENT_STATUS] = {REQUEST_QUEUED, abandon},
        [REQUEST_EVENT_BROKEN] = {REQUEST_COPYING, request_copy_rest},
    },
    [REQUEST_ASKED] = {
        [REQUEST_EVENT_META_DATA] = {REQUEST_RENEWING, request_start_revoke},
        [REQUEST_EVENT_SOURCE] = {REQUEST_PREPARING, place_source},
        [REQUEST_EVENT_COMPLETE] = {REQUEST_REVOKING, request_start_revoke},
        [REQUEST_EVENT_STATUS] = {REQUEST_REVOKING, request_start_revoke},
        [REQUEST_EVENT_CANCEL] = {REQUEST_CANCELLING, start_cancel},
        [REQUEST_EVENT_BROKEN] = {REQUEST_COPYING, request_copy_rest},
    },
    [REQUEST_RENEWING] = {
        [REQUEST_EVENT_CANCEL] = {REQUEST_CANCELLING, start_cancel},
        [REQUEST_EVENT_STATUS] = {REQUEST_REVOKING, NULL},
        [REQUEST_EVENT_REVOKED] = {REQUEST_PREPARING, prepare_again},
        [REQUEST_EVENT_BROKEN] = {REQUEST_COPYING, request_copy_rest},
    },
    [REQUEST_READING] = {
        [REQUEST_EVENT_COMPLETE] = {REQUEST_RELEASING, request_release_source},
        [REQUEST_EVENT_CANCEL] = {REQUEST_CANCELLING, start_cancel},
        [REQUEST_EVENT_BROKEN] = {REQUEST_COPYING, request_copy_rest},
    },
    [REQUEST_RELEASING] = {
        [REQUEST_EVENT_RELEASED] = {REQUEST_REVOKING, request_start_revoke},
        [REQUEST_EVENT_CANCEL] = {REQUEST_RELEASING, note_cancel},
        [REQUEST_EVENT_LATE] = {REQUEST_RELEASING, end_unanswered},
        [REQUEST_EVENT_BROKEN] = {REQUEST_COPYING, request_copy_rest},
    },
    [REQUEST_CANCELLING] = {
        [REQUEST_EVENT_STOPPED] = {REQUEST_REVOKING, give_up},
        [REQUEST_EVENT_META_DATA] = {REQUEST_CANCELLING, NULL},
        [REQUEST_EVENT_COMPLETE] = {REQUEST_REVOKING, request_start_revoke},
        [REQUEST_EVENT_STATUS] = {REQUEST_REVOKING, request_start_revoke},
        [REQUEST_EVENT_CANCEL] = {REQUEST_CANCELLING, NULL},
        [REQUEST_EVENT_CANCELLED] = {REQUEST_REVOKING, give_up},
        [REQUEST_EVENT_LATE] = {REQUEST_CANCELLING, end_unanswered},
        [REQUEST_EVENT_REVOKED] = {REQUEST_CANCELLING, NULL},
        [REQUEST_EVENT_BROKEN] = {REQUEST_COPYING, request_copy_rest},
    },
    [REQUEST_REVOKING] = {
        [REQUEST_EVENT_CANCEL] = {REQUEST_REVOKING, note_cancel},
        [REQUEST_EVENT_CANCELLED] = {REQUEST_REVOKING, NULL},
        [REQUEST_EVENT_REVOKED] = {REQUEST_COPYING, request_copy_rest},
        [REQUEST_EVENT_BROKEN] = {REQUEST_COPYING, request_copy_rest},
    },
    [REQUEST_COPYING] = {
        [REQUEST_EVENT_COPIED] = {REQUEST_FINISHED, request_finish},
        [REQUEST_EVENT_CANCEL] = {REQUEST_COPYING, note_cancel}, /* the owner knows that all has arrived */
        [REQUEST_EVENT_CANCELLED] = {REQUEST_COPYING, NULL},
    },
};
/* clang-format on */

void request_handle(struct request *request, enum request_event event)
{
    if (request->state == REQUEST_FINISHED) {
        request->is_cancelled |= event == REQUEST_EVENT_CANCEL;
        return;
    }
    const struct transition *transition = &transitions[request->state][event];
    if (transition->next == REQUEST_NEVER) {
        TL_CHECK(event >= REQUEST_OWN_EVENTS);
        conn_protocol_error(request->conn, "an answer that does not fit the state of its request (state %d, event %d)",
                            (int)request->state, (int)event);
        return;
    }
    request->state = transition->next;
    if (transition->action != NULL) transition->action(request);
}
