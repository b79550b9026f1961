// SPDX-License-Identifier: Apache-2.0
/* The states of a response: the table of transitions, and its actions. */
#include "dataplane/engine/response_internal.h"

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"

const struct tl_error response_out_of_memory = {.code = TL_RESOURCE_EXHAUSTED, .message = "no memory for a request"};

/* ------------------------------------------------------------------------------------------------------ status -- */

void response_set_status(struct response *response, const struct tl_error *status)
{
    struct response_sending *sending = response->sending;
    if (sending->status != NULL) return;
    sending->status = tl_error_keep(status);
    /* A final failure would end a subscription, which goes on with other values. UNAVAILABLE stays final, since the
     * peer would ask for this value again otherwise; subscriptions go on after it. */
    bool has_value = sending->offer.tensor != NULL;
    if (has_value && status->code != TL_UNAVAILABLE && status->code != TL_UNIMPLEMENTED)
        response->serve.is_final = false;
}

void response_fail(struct response *response, const struct tl_error *error)
{
    response_set_status(response, error);
    response_handle(response, RESPONSE_EVENT_FAILED);
}

/* ----------------------------------------------------------------------------------------------------- actions -- */

static bool is_all_written(const struct response *response)
{
    const struct response_sending *sending = response->sending;
    bool has_bytes = sending->offer.tensor != NULL;
    return has_bytes && sending->posted_bytes == tl_tensor_size_bytes(sending->offer.tensor) &&
           (!sending->is_done_wanted || sending->is_outcome_posted);
}

static bool is_anything_out(const struct response *response)
{
    const struct response_sending *sending = response->sending;
    return sending->pieces.out > 0 || sending->is_message_out || sending->source.is_exposed ||
           sending->is_registering || sending->memory_wait != NULL;
}

/* Something is over: closes the response if that was all. When anything was flushed the queue pair is about to be
 * drained, and open responses end as broken then. */
static void maybe_over(struct response *response)
{
    if (is_anything_out(response) || response->sending->is_flushed) return;
    if (!is_all_written(response)) return;
    response->conn->engine->stats.tensors_sent++;
    response_close(response, TL_SERVE_RECEIVED);
}

/* Whether the peer asks for the value over the link, for which it stays reserved. */
static bool is_for_the_link(const struct response *response)
{
    return response->sending->status->code == TL_UNIMPLEMENTED && !response->serve.is_final;
}

static void outcome_posted(struct response *response)
{
    struct response_sending *sending = response->sending;
    if (is_anything_out(response) || !sending->is_outcome_posted || sending->is_flushed) return;
    bool is_sent = sending->status == NULL;
    if (is_sent) response->conn->engine->stats.tensors_sent++;
    /* A value that was offered and could not be sent is offered again. */
    bool is_kept = !is_sent && (sending->offer.tensor != NULL || sending->is_late);
    response_close(response, !is_kept                    ? TL_SERVE_RECEIVED
                             : is_for_the_link(response) ? TL_SERVE_BROKEN
                                                         : TL_SERVE_CANCELLED);
}

static void disarm(struct response *response)
{
    tl_timers_disarm(tl_reactor_timers(response->conn->engine->reactor), &response->sending->park_timer);
}

/* Closes a response that is not to send anything. */
static void end_stopped(struct response *response, enum tl_serve_end end)
{
    struct tl_conn *conn = response->conn;
    uint32_t handle_ = response->handle;
    response_close(response, end);
    response_send_cancelled(conn, handle_);
}

void response_maybe_stopped(struct response *response)
{
    if (is_anything_out(response) || response->sending->is_flushed) return;
    end_stopped(response, is_all_written(response) ? TL_SERVE_RECEIVED : TL_SERVE_CANCELLED);
}

static void stop(struct response *response)
{
    struct response_sending *sending = response->sending;
    if (sending == NULL) {
        end_stopped(response, TL_SERVE_CANCELLED);
        return;
    }
    disarm(response);
    tl_list_remove(&sending->pending.place);
    conn_try_next_window(response->conn); /* it may have been woken for a window that it does not take now */
    conn_cancel_memory_wait(&sending->memory_wait);
    response_stop_awaiting_copy(response);
    response_maybe_stopped(response);
}

void response_park_timeout(struct tl_timer *timer)
{
    response_handle(TL_CONTAINER_OF(timer, struct response_sending, park_timer)->response, RESPONSE_EVENT_LATE);
}

static void park(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct tl_conn *conn = response->conn;
    response->expected_step = sending->offer.step;
    sending->is_update_wanted = true;
    response_queue_post(response);
    conn_arm(conn, &sending->park_timer, conn->engine->options.parked_ns);
}

static void prepare_parked(struct response *response)
{
    disarm(response);
    response_prepare(response);
}

/* The value cannot be shown: it is written. */
static void park_unshown(struct response *response)
{
    response_release_source(response);
    park(response);
}

/* The peer has no memory to read into: the value is kept until it has, and then written. */
static void hide(struct response *response)
{
    disarm(response);
    response_start_return(response);
}

static void hidden(struct response *response)
{
    if (response->sending->source.is_exposed) return;
    response_handle(response, response->sending->source.is_place_known ? RESPONSE_EVENT_READY : RESPONSE_EVENT_DIFFERS);
}

/* SOURCE has said what META_DATA_UPDATE would. */
static void park_hidden(struct response *response)
{
    struct tl_conn *conn = response->conn;
    response_release_source(response);
    response->expected_step = response->sending->offer.step;
    conn_arm(conn, &response->sending->park_timer, conn->engine->options.parked_ns);
}

static void prepare_hidden(struct response *response)
{
    response_release_source(response);
    response->expected_step = response->sending->offer.step;
    response_prepare(response);
}

static void stop_showing(struct response *response)
{
    if (response->sending->source.is_exposed) response_start_return(response);
    stop(response);
}

/* A peer that does not release a source keeps memory of ours for ever: its connection ends. One that has read other
 * sources meanwhile is alive, and this one has waited for its turn; but it cannot wait for ever, because reads take
 * turns. */
static void end_lease(struct response *response)
{
    struct response_source *source = &response->sending->source;
    struct tl_conn *conn = response->conn;
    struct tl_error reason;
    if (conn->state == CONN_CLOSING) return;
    if (source->released_count != conn->responses.released_count && source->renewal_count < MAX_RENEWALS) {
        source->renewal_count++;
        response_arm_lease(response);
        return;
    }
    tl_error_set(&reason, TL_UNAVAILABLE,
                 "%s has not read %s, whose memory was shown to it, in time (timeouts.stalled)", conn->peer.name,
                 response->serve.key);
    conn->engine->stats.connections_broken++;
    tl_conn_close(conn, &reason);
}

static void take_back(struct response *response)
{
    struct tl_conn *conn = response->conn;
    disarm(response);
    response->sending->source.is_released = true;
    conn->responses.released_count++;
    conn->engine->stats.tensors_sent++;
    conn->engine->stats.bytes_sent += tl_tensor_size_bytes(response->sending->offer.tensor);
    response_start_return(response);
}

static void taken_back(struct response *response)
{
    if (!response->sending->source.is_exposed) response_close(response, TL_SERVE_RECEIVED);
}

/* The value is not kept for the peer any longer; the peer may ask again. Its RE_REQUEST may be under way. */
static void give_up(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct tl_conn *conn = response->conn;
    struct tl_error error;
    tl_error_set(&error, TL_UNAVAILABLE, "%s has sent no RE_REQUEST for %s within %lld ms (timeouts.stalled)",
                 conn->peer.name, response->serve.key, (long long)(conn->engine->options.parked_ns / TL_NS_PER_MS));
    response_set_status(response, &error);
    response->serve.is_final = false;
    sending->is_late = true;
    tl_tensor_put(sending->offer.tensor);
    sending->offer.tensor = NULL;
    conn->responses.late_count++;
    response_queue_post(response);
}

/* No memory of the pool has come for the next piece. What fills the pool may wait for the peer, and the peer for us:
 * the peer asks over the link, and gives back the memory that it keeps for this value. */
static void leave_pool(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct tl_error error;
    if (sending->memory_wait == NULL) return;
    tl_memory_format_wait(response->conn->engine->memory, sending->memory_wait->memory_wait.wait.len_bytes, &error);
    conn_cancel_memory_wait(&sending->memory_wait);
    if (sending->memory_wait != NULL) return; /* the memory is on its way */
    error.code = TL_UNIMPLEMENTED;
    tl_error_prefix(&error, "its owner must copy it: ");
    response->serve.is_final = false;
    response_fail(response, &error);
}

static void written(struct response *response)
{
    if (!is_all_written(response)) {
        response_queue_post(response);
        return;
    }
    maybe_over(response);
}

/* --------------------------------------------------------------------------------------------------- the table -- */

/* The table of all transitions. The response is in state `next` before the action runs; an action that is NULL does
 * nothing. Events that the table leaves out (RESPONSE_NEVER) cannot happen in that state unless the peer, the card or
 * this code is at fault. */
struct transition {
    enum response_state next;
    void (*action)(struct response *response);
};

/* clang-format off */
static const struct transition transitions[RESPONSE_STATES][RESPONSE_EVENTS] = {
    [RESPONSE_WAITING] = {
        [RESPONSE_EVENT_STATUS] = {RESPONSE_ENDING, response_queue_post},
        [RESPONSE_EVENT_EMPTY] = {RESPONSE_ENDING, response_queue_post},
        [RESPONSE_EVENT_FITS] = {RESPONSE_PREPARING, response_prepare},
        [RESPONSE_EVENT_DIFFERS] = {RESPONSE_PARKED, park},
        [RESPONSE_EVENT_SHOWN] = {RESPONSE_LOCATING, response_locate},
        [RESPONSE_EVENT_CANCEL] = {RESPONSE_STOPPING, stop},
    },
    [RESPONSE_PARKED] = {
        [RESPONSE_EVENT_RE_REQUEST] = {RESPONSE_PREPARING, prepare_parked},
        [RESPONSE_EVENT_CANCEL] = {RESPONSE_STOPPING, stop},
        [RESPONSE_EVENT_LATE] = {RESPONSE_ENDING, give_up},
    },
    [RESPONSE_PREPARING] = {
        [RESPONSE_EVENT_READY] = {RESPONSE_WRITING, response_queue_post},
        [RESPONSE_EVENT_CANCEL] = {RESPONSE_STOPPING, stop},
    },
    [RESPONSE_WRITING] = {
        [RESPONSE_EVENT_READY] = {RESPONSE_WRITING, response_queue_post},
        [RESPONSE_EVENT_FAILED] = {RESPONSE_ENDING, response_queue_post},
        [RESPONSE_EVENT_COPIED] = {RESPONSE_WRITING, response_queue_post},
        [RESPONSE_EVENT_WORK_DONE] = {RESPONSE_WRITING, written},
        [RESPONSE_EVENT_CANCEL] = {RESPONSE_STOPPING, stop},
        [RESPONSE_EVENT_LATE] = {RESPONSE_WRITING, leave_pool},
    },
    [RESPONSE_LOCATING] = {
        [RESPONSE_EVENT_READY] = {RESPONSE_SHOWING, response_queue_post},
        [RESPONSE_EVENT_DIFFERS] = {RESPONSE_PARKED, park_unshown},
        [RESPONSE_EVENT_CANCEL] = {RESPONSE_STOPPING, stop},
    },
    [RESPONSE_SHOWING] = {
        [RESPONSE_EVENT_READY] = {RESPONSE_SHOWING, response_queue_post},
        [RESPONSE_EVENT_DIFFERS] = {RESPONSE_PARKED, park_unshown},
        [RESPONSE_EVENT_FAILED] = {RESPONSE_ENDING, response_queue_post},
        [RESPONSE_EVENT_RELEASE] = {RESPONSE_RETURNING, take_back},
        [RESPONSE_EVENT_RETURN] = {RESPONSE_HIDING, hide},
        [RESPONSE_EVENT_CANCEL] = {RESPONSE_STOPPING, stop_showing},
        [RESPONSE_EVENT_LATE] = {RESPONSE_SHOWING, end_lease},
    },
    [RESPONSE_HIDING] = {
        [RESPONSE_EVENT_WORK_DONE] = {RESPONSE_HIDING, hidden},
        [RESPONSE_EVENT_DIFFERS] = {RESPONSE_PARKED, park_hidden},
        [RESPONSE_EVENT_READY] = {RESPONSE_PREPARING, prepare_hidden},
        [RESPONSE_EVENT_RE_REQUEST] = {RESPONSE_HIDING, NULL}, /* source.is_place_known is set */
        [RESPONSE_EVENT_CANCEL] = {RESPONSE_STOPPING, stop},
    },
    [RESPONSE_RETURNING] = {
        [RESPONSE_EVENT_WORK_DONE] = {RESPONSE_RETURNING, taken_back},
    },
    [RESPONSE_ENDING] = {
        [RESPONSE_EVENT_COPIED] = {RESPONSE_ENDING, NULL},
        [RESPONSE_EVENT_WORK_DONE] = {RESPONSE_ENDING, outcome_posted},
        [RESPONSE_EVENT_CANCEL] = {RESPONSE_ENDING, NULL}, /* the message that it sends is its last */
    },
    [RESPONSE_STOPPING] = {
        [RESPONSE_EVENT_RE_REQUEST] = {RESPONSE_STOPPING, NULL},
        [RESPONSE_EVENT_COPIED] = {RESPONSE_STOPPING, NULL},
        [RESPONSE_EVENT_READY] = {RESPONSE_STOPPING, response_maybe_stopped},
        [RESPONSE_EVENT_FAILED] = {RESPONSE_STOPPING, response_maybe_stopped},
        [RESPONSE_EVENT_WORK_DONE] = {RESPONSE_STOPPING, response_maybe_stopped},
        [RESPONSE_EVENT_CANCEL] = {RESPONSE_STOPPING, NULL},
    },
};
/* clang-format on */

void response_handle(struct response *response, enum response_event event)
{
    const struct transition *transition = &transitions[response->state][event];
    if (transition->next == RESPONSE_NEVER) {
        TL_CHECK(event >= RESPONSE_OWN_EVENTS);
        conn_protocol_error(response->conn, "a message that does not fit the state of its request (state %d, event %d)",
                            (int)response->state, (int)event);
        return;
    }
    response->state = transition->next;
    if (transition->action != NULL) transition->action(response);
}
