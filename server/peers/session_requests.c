// SPDX-License-Identifier: Apache-2.0
/*
 * The requests that travel over a session. A request is given to the reactor by one closure, is cancelled by a second
 * one, and comes back with a third one; those of a round travel together (tl_transport_send). It is done when its
 * result has come and no cancel is on its way.
 */
#include "server/peers/session_internal.h"

#include "base/check.h"
#include "base/error.h"
#include "server/peers/peer_internal.h"

/* A session remembers this many of the requests that were answered over it. The peer has heard of all answers before
 * them long ago. */
#define MAX_UNCONFIRMED 1024

/* Ends the request once its result has come and no closure of it is left at the reactor. */
static void maybe_done(struct tl_peer_request *request)
{
    if (!request->is_done || request->is_cancel_out) return;
    struct tl_session *session = request->session;
    const struct tl_error *failure = request->result;
    request->fetch.ops = request->ops;
    request->session = NULL;
    request->carrier = TL_CARRIER_NONE;
    request->result = NULL;
    tl_progress_busy(&session->transport->worker->progress, -1);
    /* An owner that abandoned the session has taken over the answers until then; the peer keeps the later ones. */
    if (failure == NULL && session->owner == NULL) {
        tl_peer_answered(request->peer, session->peer.incarnation, request->fetch.id.number);
    } else if (failure == NULL && tl_numbers_push(&session->answered, request->fetch.id.number) &&
               session->answered.count > MAX_UNCONFIRMED) {
        tl_numbers_drop(&session->answered, 1);
    }
    session->request_count--;
    request->ops->done(&request->fetch, tl_error_kept(failure));
    tl_error_drop(failure);
    session_handle(session, SESSION_EVENT_RETURNED, NULL);
}

static void done_came(struct tl_closure *closure)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(closure, struct tl_peer_request, closure);
    request->is_done = true;
    maybe_done(request);
}

static void cancel_came_back(struct tl_closure *closure)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(closure, struct tl_peer_request, cancel_closure);
    request->is_cancel_out = false;
    maybe_done(request);
}

/* Runs on the reactor. */
static enum tl_status place(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                            struct tl_tensor **ret_destination, struct tl_error *ret_error)
{
    const struct tl_peer_request *request = TL_CONTAINER_OF(fetch, struct tl_peer_request, fetch);
    return request->ops->place(fetch, meta_data, ret_destination, ret_error);
}

/* Runs on the reactor. */
static const struct tl_meta_data *wanted(const struct tl_fetch *fetch)
{
    const struct tl_peer_request *request = TL_CONTAINER_OF(fetch, const struct tl_peer_request, fetch);
    return request->ops->wanted != NULL ? request->ops->wanted(fetch) : NULL;
}

/* Runs on the reactor. */
static void fetch_done(struct tl_fetch *fetch, const struct tl_error *result)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(fetch, struct tl_peer_request, fetch);
    request->is_on_conn = false;
    request->result = tl_error_keep(result);
    session_send_to_loop(request->session->transport, &request->closure, done_came);
}

static const struct tl_fetch_ops fetch_ops = {.place = place, .wanted = wanted, .done = fetch_done};

/* Runs on the reactor. */
static void start(struct tl_closure *closure)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(closure, struct tl_peer_request, closure);
    struct tl_session *session = request->session;
    if (session->conn != NULL && tl_conn_is_up(session->conn)) {
        request->is_on_conn = true;
        tl_conn_fetch(session->conn, &request->fetch);
        return;
    }
    struct tl_error error;
    tl_error_set(&error, TL_UNAVAILABLE, "the connection to %s has ended", session->peer.name);
    fetch_done(&request->fetch, &error);
}

/* Runs on the reactor. */
static void cancel(struct tl_closure *closure)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(closure, struct tl_peer_request, cancel_closure);
    if (request->is_on_conn) tl_conn_cancel(request->session->conn, &request->fetch);
    session_send_to_loop(request->session->transport, closure, cancel_came_back);
}

void tl_session_fetch(struct tl_session *session, struct tl_peer_request *request)
{
    request->session = session;
    request->carrier = TL_CARRIER_SESSION;
    request->ops = request->fetch.ops;
    request->is_done = false;
    request->fetch.ops = &fetch_ops;
    request->fetch.is_final = false;
    session->request_count++;
    tl_progress_busy(&session->transport->worker->progress, 1);
    request->closure.run = start;
    tl_transport_send(session->transport, &request->closure);
}

void tl_session_cancel(struct tl_peer_request *request)
{
    if (request->is_cancel_out || request->is_done) return;
    request->is_cancel_out = true;
    request->cancel_closure.run = cancel;
    tl_transport_send(request->session->transport, &request->cancel_closure);
}
