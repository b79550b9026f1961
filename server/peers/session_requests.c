// SPDX-License-Identifier: Apache-2.0
/*
 * The requests that travel over a session. One closure gives a request to the reactor and brings it back; those of a
 * round travel together (tl_transport_send). While the request is on the connection, the closure rests, and may take a
 * cancel to the reactor.
 */
#include "server/peers/session_internal.h"

#include "base/check.h"
#include "base/error.h"
#include "server/worker_internal.h"

/* Where the closure of a request is, and what it does there. The loop and the reactor agree on it:
 *
 *   GOING --start--> RESTING --result--> RETURNING
 *     | cancel          | cancel             ^
 *     v                 v                    |
 *   GIVEN_UP        CANCELLING --at the reactor--> CANCELLED
 */
enum request_way {
    WAY_GOING,      /* on its way to the reactor */
    WAY_GIVEN_UP,   /* the same; the request is not to be asked any more */
    WAY_RESTING,    /* nowhere; the side that changes this may post it */
    WAY_CANCELLING, /* takes a cancel to the reactor, and from there perhaps a result back */
    WAY_CANCELLED,  /* the reactor's, until there is a result */
    WAY_RETURNING,  /* on its way to the loop, with the result */
};

/* Changes the way if it is `from`. Returns whether it was. */
static bool change_way(struct tl_peer_request *request, uint8_t from, uint8_t to)
{
    return __atomic_compare_exchange_n(&request->way, &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* The request is back, and has no closure at the reactor. */
static void done_came(struct tl_closure *closure)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(closure, struct tl_peer_request, closure);
    struct tl_session *session = request->session;
    const struct tl_error *failure = request->fetch.result;
    const struct tl_request_ops *ops = TL_CONTAINER_OF(request->fetch.ops, const struct tl_request_ops, on_reactor);
    request->fetch.ops = &ops->on_loop;
    request->fetch.result = NULL;
    request->session = NULL;
    request->carrier = TL_CARRIER_NONE;
    tl_progress_busy(&session->transport->worker->progress, -1);
    /* An owner that abandoned the session has taken over the answers until then; the peer keeps the later ones. */
    if (failure == NULL && session->owner == NULL) {
        if (request->peer != NULL) tl_peer_answered(request->peer, session->peer.incarnation, request->fetch.number);
    } else if (failure == NULL && tl_numbers_push(&session->answered, request->fetch.number) &&
               session->answered.count > session->measures.most_unconfirmed) {
        tl_numbers_drop(&session->answered, 1);
    }
    session->request_count--;
    ops->on_loop.done(&request->fetch, tl_error_kept(failure));
    tl_error_drop(failure);
    session_handle(session, SESSION_EVENT_RETURNED, NULL);
}

/* Sends the request back with its result, unless a cancel is on its way here, which then does that. Runs on the
 * reactor. */
static void come_back(struct tl_peer_request *request)
{
    if (change_way(request, WAY_RESTING, WAY_RETURNING) || change_way(request, WAY_CANCELLED, WAY_RETURNING))
        session_send_to_loop(request->session->transport, &request->closure, done_came);
}

void tl_session_fetch_done(struct tl_fetch *fetch, const struct tl_error *result)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(fetch, struct tl_peer_request, fetch);
    request->is_on_conn = false;
    fetch->result = tl_error_keep(result);
    come_back(request);
}

/* Runs on the reactor. */
static void start(struct tl_closure *closure)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(closure, struct tl_peer_request, closure);
    struct tl_session *session = request->session;
    struct tl_error error;
    if (!change_way(request, WAY_GOING, WAY_RESTING)) {
        change_way(request, WAY_GIVEN_UP, WAY_CANCELLED);
        tl_error_set(&error, TL_CANCELLED, "%s was given up", request->fetch.key);
    } else if (session->conn != NULL && tl_conn_is_up(session->conn)) {
        request->is_on_conn = true;
        tl_conn_fetch(session->conn, &request->fetch);
        return;
    } else {
        tl_error_set(&error, TL_UNAVAILABLE, "the connection to %s has ended", session->peer.name);
    }
    tl_session_fetch_done(&request->fetch, &error);
}

/* Runs on the reactor. */
static void cancel(struct tl_closure *closure)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(closure, struct tl_peer_request, closure);
    change_way(request, WAY_CANCELLING, WAY_CANCELLED);
    if (request->is_on_conn) {
        tl_conn_cancel(request->session->conn, &request->fetch);
    } else {
        come_back(request); /* it has its result already */
    }
}

void tl_session_fetch(struct tl_session *session, struct tl_peer_request *request)
{
    request->session = session;
    request->carrier = TL_CARRIER_SESSION;
    request->way = WAY_GOING;
    request->fetch.ops = &TL_CONTAINER_OF(request->fetch.ops, const struct tl_request_ops, on_loop)->on_reactor;
    request->fetch.is_final = false;
    session->request_count++;
    tl_progress_busy(&session->transport->worker->progress, 1);
    request->closure.run = start;
    tl_transport_send(session->transport, &request->closure);
}

void tl_session_cancel(struct tl_peer_request *request)
{
    if (change_way(request, WAY_GOING, WAY_GIVEN_UP) || !change_way(request, WAY_RESTING, WAY_CANCELLING)) return;
    request->closure.run = cancel;
    tl_transport_send(request->session->transport, &request->closure);
}
