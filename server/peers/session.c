// SPDX-License-Identifier: Apache-2.0
/*
 * Sessions. What the reactor's thread does is marked; everything else is the loop's. A field that both use belongs to
 * whoever has the closure.
 */
#include "server/peers/session.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "base/numbers.h"
#include "server/peers/peer_internal.h"

/* Sessions that a peer has offered and that are not up, but on their way there or to their end: one of the present
 * attempt, and one of an attempt or a link before it that is not gone yet. */
#define MAX_ATTEMPTS_OF_PEER 2
/* Of all peers together that are no members of the cluster. */
#define MAX_ATTEMPTS_OF_CLIENT_PEERS 128
/* Requests that were answered over a session and are remembered until it ends. Whatever was answered before them, the
 * peer has heard of long ago. */
#define MAX_UNCONFIRMED 1024

struct tl_session {
    struct tl_transport *transport;
    struct tl_list link; /* in transport->sessions */
    const struct tl_session_events *events;
    void *owner; /* NULL: abandoned */
    struct tl_identity peer;
    bool is_opener;
    bool is_client_peer; /* of a peer that is no member of the cluster */
    bool is_up;
    bool is_over;          /* closed has come, or nothing was created */
    bool is_end_asked;     /* end_closure has been posted */
    unsigned closures_out; /* on their way to the reactor or back */
    size_t request_count;  /* given to the session and not done */
    struct tl_numbers answered;
    struct tl_conn_measures measures; /* the reactor's until up_closure has come */

    struct tl_memory_making making; /* its closure creates the connection, and comes back */
    struct tl_closure connect_closure;
    struct tl_closure drain_closure;
    struct tl_closure end_closure;
    uint8_t bytes[TL_CONN_ADDRESS_BYTES]; /* create, connect: the peer's. create, coming back: ours */
    uint32_t len_bytes;                   /* create, coming back, 0: not to be told, closed follows */
    struct tl_error failure;              /* create, coming back */
    struct tl_error end_reason;           /* end */

    /* The reactor's. */
    struct tl_conn *conn; /* NULL: none, or no more */
    bool is_ended;        /* asked to end, perhaps before there was one */
    struct tl_closure up_closure;
    struct tl_closure closed_closure;
    struct tl_error closed_reason; /* of closed_closure */
};

/* ----------------------------------------------------------------------------------------- closures, both ways -- */

static void send_out(struct tl_session *session, struct tl_closure *closure, void (*run)(struct tl_closure *closure))
{
    session->closures_out++;
    closure->run = run;
    tl_transport_post(session->transport, closure);
}

static void post_to_reactor(void *context, struct tl_closure *closure)
{
    tl_transport_post(context, closure);
}

/* The reactor's: the closure goes to the loop. */
static void send_to_executor(struct tl_transport *transport, struct tl_closure *closure,
                             void (*run)(struct tl_closure *closure))
{
    const struct tl_executor *executor = &transport->worker->executor;
    closure->run = run;
    executor->post(executor, closure);
}

static void maybe_free(struct tl_session *session)
{
    if (!session->is_over || session->closures_out > 0 || session->request_count > 0) return;
    struct tl_transport *transport = session->transport;
    tl_list_remove(&session->link);
    tl_numbers_fini(&session->answered);
    free(session);
    tl_transport_session_gone(transport);
}

static void came_back(struct tl_session *session)
{
    session->closures_out--;
    maybe_free(session);
}

static void over(struct tl_session *session, const struct tl_error *reason)
{
    void *owner = session->owner;
    session->is_over = true;
    session->is_up = false;
    if (owner != NULL) session->events->closed(owner, reason);
    session->owner = NULL;
    maybe_free(session);
}

/* -------------------------------------------------------------------------------------------------- connection -- */

static void up_came(struct tl_closure *closure)
{
    struct tl_session *session = TL_CONTAINER_OF(closure, struct tl_session, up_closure);
    if (session->is_end_asked) return;
    session->is_up = true;
    if (session->owner != NULL) session->events->up(session->owner);
}

static void closed_came(struct tl_closure *closure)
{
    struct tl_session *session = TL_CONTAINER_OF(closure, struct tl_session, closed_closure);
    over(session, &session->closed_reason);
}

/* The reactor's. */
static void conn_up(struct tl_conn *conn)
{
    struct tl_session *session = tl_conn_owner(conn);
    session->measures = *tl_conn_measured(conn);
    send_to_executor(session->transport, &session->up_closure, up_came);
}

/* The reactor's. */
static void conn_closed(struct tl_conn *conn, const struct tl_error *reason)
{
    struct tl_session *session = tl_conn_owner(conn);
    session->conn = NULL;
    session->closed_reason = *reason;
    send_to_executor(session->transport, &session->closed_closure, closed_came);
}

static const struct tl_conn_events conn_events = {.up = conn_up, .closed = conn_closed};

static void created(struct tl_closure *closure)
{
    struct tl_session *session = TL_CONTAINER_OF(closure, struct tl_session, making.closure);
    session->closures_out--;
    if (session->failure.code != TL_OK) {
        over(session, &session->failure);
        return;
    }
    if (session->owner != NULL && session->len_bytes > 0) {
        session->events->address_ready(session->owner, session->bytes, session->len_bytes);
    }
}

/* The reactor's, with the memory for this peer. The side that did not open the link connects at once: what the peer
 * told is in bytes. */
static void create(struct tl_closure *closure)
{
    struct tl_session *session = TL_CONTAINER_OF(closure, struct tl_session, making.closure);
    struct tl_transport *transport = session->transport;
    uint8_t own[TL_CONN_ADDRESS_BYTES];
    session->failure = session->making.error;
    if (session->failure.code == TL_OK) {
        session->failure.code = tl_conn_create(transport->engine, session->making.memory, &session->peer,
                                               transport->worker->self.incarnation, session->is_opener, &conn_events,
                                               session, &session->conn, &session->failure);
    }
    if (session->failure.code == TL_OK && session->is_ended) {
        tl_conn_close(session->conn, &session->end_reason);
        session->len_bytes = 0;
    } else if (session->failure.code == TL_OK) {
        uint32_t own_len_bytes = tl_conn_get_address(session->conn, own);
        struct tl_error error;
        if (!session->is_opener &&
            tl_conn_connect(session->conn, session->bytes, session->len_bytes, &error) != TL_OK) {
            tl_conn_close(session->conn, &error);
            own_len_bytes = 0;
        }
        memcpy(session->bytes, own, own_len_bytes);
        session->len_bytes = own_len_bytes;
    }
    send_to_executor(transport, closure, created);
}

static void connected(struct tl_closure *closure)
{
    came_back(TL_CONTAINER_OF(closure, struct tl_session, connect_closure));
}

/* The reactor's. */
static void connect_now(struct tl_closure *closure)
{
    struct tl_session *session = TL_CONTAINER_OF(closure, struct tl_session, connect_closure);
    struct tl_error error;
    if (session->conn != NULL && tl_conn_connect(session->conn, session->bytes, session->len_bytes, &error) != TL_OK) {
        tl_conn_close(session->conn, &error);
    }
    send_to_executor(session->transport, closure, connected);
}

static void drained(struct tl_closure *closure)
{
    came_back(TL_CONTAINER_OF(closure, struct tl_session, drain_closure));
}

/* The reactor's. */
static void drain(struct tl_closure *closure)
{
    struct tl_session *session = TL_CONTAINER_OF(closure, struct tl_session, drain_closure);
    if (session->conn != NULL) tl_conn_drain(session->conn);
    send_to_executor(session->transport, closure, drained);
}

static void ended(struct tl_closure *closure)
{
    came_back(TL_CONTAINER_OF(closure, struct tl_session, end_closure));
}

/* The reactor's. */
static void end(struct tl_closure *closure)
{
    struct tl_session *session = TL_CONTAINER_OF(closure, struct tl_session, end_closure);
    session->is_ended = true;
    if (session->conn != NULL) tl_conn_close(session->conn, &session->end_reason);
    send_to_executor(session->transport, closure, ended);
}

static void ask_end(struct tl_session *session, const struct tl_error *reason)
{
    if (session->is_over || session->is_end_asked) return;
    session->is_end_asked = true;
    session->is_up = false;
    session->end_reason = *reason;
    send_out(session, &session->end_closure, end);
}

static bool is_client_peer(const struct tl_transport *transport, const struct tl_identity *peer)
{
    return tl_peer_by_name(transport->worker, peer->name) == NULL;
}

/* Whether anything may be made for an offer. */
static enum tl_status check_offer(const struct tl_transport *transport, const struct tl_identity *peer,
                                  const uint8_t *offer, uint32_t len_bytes, struct tl_error *ret_error)
{
    enum tl_status status = tl_conn_check_address(transport->provider, peer, offer, len_bytes, ret_error);
    if (status != TL_OK) return status;
    size_t peer_count = 0, client_peer_count = 0;
    TL_LIST_FOREACH(&transport->sessions, place)
    {
        const struct tl_session *session = TL_CONTAINER_OF(place, const struct tl_session, link);
        if (session->is_opener || session->is_up) continue;
        peer_count += session->peer.incarnation == peer->incarnation && strcmp(session->peer.name, peer->name) == 0;
        client_peer_count += session->is_client_peer;
    }
    bool are_client_peers_too_many =
        client_peer_count >= MAX_ATTEMPTS_OF_CLIENT_PEERS && is_client_peer(transport, peer);
    if (peer_count < MAX_ATTEMPTS_OF_PEER && !are_client_peers_too_many) return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                        "%zu data connections of %s to %s are being set up or have not ended yet; offer again later",
                        are_client_peers_too_many ? client_peer_count : peer_count,
                        are_client_peers_too_many ? "clients" : "this peer", transport->worker->self.name);
}

enum tl_status tl_session_open(struct tl_transport *transport, const struct tl_identity *peer, const uint8_t *offer,
                               uint32_t len_bytes, const struct tl_session_events *events, void *owner,
                               struct tl_session **ret_session, struct tl_error *ret_error)
{
    if (len_bytes > TL_CONN_ADDRESS_BYTES) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s has sent a pair address of %u bytes", peer->name,
                            len_bytes);
    }
    enum tl_status status = offer != NULL ? check_offer(transport, peer, offer, len_bytes, ret_error) : TL_OK;
    if (status != TL_OK) return status;
    struct tl_session *session = calloc(1, sizeof(*session));
    if (session == NULL) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a connection to %s", peer->name);
    }
    session->transport = transport;
    session->events = events;
    session->owner = owner;
    session->peer = *peer;
    session->is_opener = offer == NULL;
    session->is_client_peer = is_client_peer(transport, peer);
    if (offer != NULL) memcpy(session->bytes, offer, len_bytes);
    session->len_bytes = len_bytes;
    tl_list_push_back(&transport->sessions, &session->link);
    session->closures_out++;
    session->making.closure.run = create;
    session->making.post = post_to_reactor;
    session->making.context = transport;
    tl_engine_make_memory(transport->engine, &session->making);
    *ret_session = session;
    return TL_OK;
}

enum tl_status tl_session_connect(struct tl_session *session, const uint8_t *bytes, uint32_t len_bytes,
                                  struct tl_error *ret_error)
{
    if (len_bytes > TL_CONN_ADDRESS_BYTES) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s has sent a pair address of %u bytes",
                            session->peer.name, len_bytes);
    }
    if (session->is_end_asked) return TL_OK; /* closed follows */
    memcpy(session->bytes, bytes, len_bytes);
    session->len_bytes = len_bytes;
    send_out(session, &session->connect_closure, connect_now);
    return TL_OK;
}

void tl_session_abandon(struct tl_session *session, const struct tl_error *reason)
{
    session->owner = NULL;
    ask_end(session, reason);
}

size_t tl_session_unconfirmed(const struct tl_session *session, const uint64_t **ret_numbers)
{
    *ret_numbers = tl_numbers_items(&session->answered);
    return session->answered.count;
}

const struct tl_conn_measures *tl_session_measures(const struct tl_session *session)
{
    static const struct tl_conn_measures none;
    return session->is_up ? &session->measures : &none;
}

const struct tl_identity *tl_session_peer(const struct tl_session *session)
{
    return &session->peer;
}

void tl_sessions_drain(struct tl_transport *transport)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s is shutting down", transport->worker->self.name);
    TL_LIST_FOREACH(&transport->sessions, place)
    {
        struct tl_session *session = TL_CONTAINER_OF(place, struct tl_session, link);
        if (session->is_over || session->is_end_asked) continue;
        if (session->is_up) {
            send_out(session, &session->drain_closure, drain);
        } else {
            ask_end(session, &reason);
        }
    }
}

void tl_sessions_close(struct tl_transport *transport, const struct tl_error *reason)
{
    TL_LIST_FOREACH(&transport->sessions, place)
    {
        ask_end(TL_CONTAINER_OF(place, struct tl_session, link), reason);
    }
}

/* ---------------------------------------------------------------------------------------------------- requests -- */

/* The result is at executor, and nothing of the request is left at the reactor. */
static void maybe_done(struct tl_peer_request *request)
{
    if (!request->is_done || request->is_cancel_out) return;
    struct tl_session *session = request->session;
    const struct tl_error *failure = request->result;
    request->fetch.ops = request->ops;
    request->session = NULL;
    request->result = NULL;
    tl_progress_busy(&session->transport->worker->progress, -1);
    /* Who has let the session go has taken over what was answered until then. */
    if (failure == NULL && session->owner == NULL) {
        tl_peer_answered(request->peer, session->peer.incarnation, request->fetch.id.number);
    } else if (failure == NULL && tl_numbers_push(&session->answered, request->fetch.id.number) &&
               session->answered.count > MAX_UNCONFIRMED) {
        tl_numbers_drop(&session->answered, 1);
    }
    session->request_count--;
    request->ops->done(&request->fetch, tl_error_kept(failure));
    tl_error_drop(failure);
    maybe_free(session);
}

static void done_came(struct tl_closure *closure)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(closure, struct tl_peer_request, done_closure);
    request->is_done = true;
    maybe_done(request);
}

static void cancel_came_back(struct tl_closure *closure)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(closure, struct tl_peer_request, cancel_closure);
    request->is_cancel_out = false;
    maybe_done(request);
}

/* The reactor's. */
static enum tl_status place(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                            struct tl_tensor **ret_destination, struct tl_error *ret_error)
{
    const struct tl_peer_request *request = TL_CONTAINER_OF(fetch, struct tl_peer_request, fetch);
    return request->ops->place(fetch, meta_data, ret_destination, ret_error);
}

/* The reactor's. */
static void fetch_done(struct tl_fetch *fetch, const struct tl_error *result)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(fetch, struct tl_peer_request, fetch);
    request->is_on_conn = false;
    request->result = tl_error_keep(result);
    send_to_executor(request->session->transport, &request->done_closure, done_came);
}

static const struct tl_fetch_ops fetch_ops = {.place = place, .done = fetch_done};

/* The reactor's. */
static void start(struct tl_closure *closure)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(closure, struct tl_peer_request, start_closure);
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

/* The reactor's. */
static void cancel(struct tl_closure *closure)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(closure, struct tl_peer_request, cancel_closure);
    if (request->is_on_conn) tl_conn_cancel(request->session->conn, &request->fetch);
    send_to_executor(request->session->transport, closure, cancel_came_back);
}

void tl_session_fetch(struct tl_session *session, struct tl_peer_request *request)
{
    request->session = session;
    request->ops = request->fetch.ops;
    request->is_done = false;
    request->fetch.ops = &fetch_ops;
    request->fetch.is_final = false;
    session->request_count++;
    tl_progress_busy(&session->transport->worker->progress, 1);
    request->start_closure.run = start;
    tl_transport_post(session->transport, &request->start_closure);
}

void tl_session_cancel(struct tl_peer_request *request)
{
    if (request->is_cancel_out || request->is_done) return;
    request->is_cancel_out = true;
    request->cancel_closure.run = cancel;
    tl_transport_post(request->session->transport, &request->cancel_closure);
}
