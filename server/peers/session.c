// SPDX-License-Identifier: Apache-2.0
/*
 * A session's states and its connection. The functions that run on the reactor's thread say so; all others run on the
 * loop's. The closure that is out decides which of the two threads may use the fields that both need.
 */
#include "server/peers/session_internal.h"
#include "server/worker_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"

/* One peer may have this many sessions that it has offered and that are not up: one of the present attempt, and one of
 * an earlier attempt or link that has not ended yet. */
#define MAX_ATTEMPTS_OF_PEER 2
/* All peers that are no members of the cluster may have this many of them together. */
#define MAX_ATTEMPTS_OF_CLIENT_PEERS 128

/* ---------------------------------------------------------------------------------------------------- closures -- */

static void send_out(struct tl_session *session, struct tl_closure *closure, void (*run)(struct tl_closure *closure))
{
    session->closures_out++;
    closure->run = run;
    tl_transport_send(session->transport, closure);
}

static void post_to_reactor(void *context, struct tl_closure *closure)
{
    tl_transport_post(context, closure);
}

void session_send_to_loop(struct tl_transport *transport, struct tl_closure *closure,
                          void (*run)(struct tl_closure *closure))
{
    closure->run = run;
    tl_transport_send_back(transport, closure);
}

static void came_back(struct tl_session *session)
{
    session->closures_out--;
    session_handle(session, SESSION_EVENT_RETURNED, NULL);
}

/* -------------------------------------------------------------------------------------------------- connection -- */

static void up_came(struct tl_closure *closure)
{
    session_handle(TL_CONTAINER_OF(closure, struct tl_session, up_closure), SESSION_EVENT_UP, NULL);
}

static void closed_came(struct tl_closure *closure)
{
    struct tl_session *session = TL_CONTAINER_OF(closure, struct tl_session, closed_closure);
    session_handle(session, SESSION_EVENT_CLOSED, &session->closed_reason);
}

/* Runs on the reactor. */
static void conn_up(struct tl_conn *conn)
{
    struct tl_session *session = tl_conn_owner(conn);
    session->measures = *tl_conn_measured(conn);
    session_send_to_loop(session->transport, &session->up_closure, up_came);
}

/* Runs on the reactor. */
static void conn_closed(struct tl_conn *conn, const struct tl_error *reason)
{
    struct tl_session *session = tl_conn_owner(conn);
    session->conn = NULL;
    session->closed_reason = *reason;
    session_send_to_loop(session->transport, &session->closed_closure, closed_came);
}

static const struct tl_conn_events conn_events = {.up = conn_up, .closed = conn_closed};

static void created(struct tl_closure *closure)
{
    struct tl_session *session = TL_CONTAINER_OF(closure, struct tl_session, making.closure);
    session->closures_out--;
    if (session->failure.code != TL_OK) {
        session_handle(session, SESSION_EVENT_FAILED, &session->failure);
    } else {
        session_handle(session, session->is_opener ? SESSION_EVENT_CREATED : SESSION_EVENT_ACCEPTED, NULL);
    }
}

/* Makes the connection with the memory for this peer. The side that did not open the link has the peer's address in
 * `bytes` and connects at once. Runs on the reactor. */
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
    session_send_to_loop(transport, closure, created);
}

static void connected(struct tl_closure *closure)
{
    came_back(TL_CONTAINER_OF(closure, struct tl_session, connect_closure));
}

/* Runs on the reactor. */
static void connect_now(struct tl_closure *closure)
{
    struct tl_session *session = TL_CONTAINER_OF(closure, struct tl_session, connect_closure);
    struct tl_error error;
    if (session->conn != NULL && tl_conn_connect(session->conn, session->bytes, session->len_bytes, &error) != TL_OK) {
        tl_conn_close(session->conn, &error);
    }
    session_send_to_loop(session->transport, closure, connected);
}

static void drained(struct tl_closure *closure)
{
    came_back(TL_CONTAINER_OF(closure, struct tl_session, drain_closure));
}

/* Runs on the reactor. */
static void drain(struct tl_closure *closure)
{
    struct tl_session *session = TL_CONTAINER_OF(closure, struct tl_session, drain_closure);
    if (session->conn != NULL) tl_conn_drain(session->conn);
    session_send_to_loop(session->transport, closure, drained);
}

static void ended(struct tl_closure *closure)
{
    came_back(TL_CONTAINER_OF(closure, struct tl_session, end_closure));
}

/* Runs on the reactor. */
static void end(struct tl_closure *closure)
{
    struct tl_session *session = TL_CONTAINER_OF(closure, struct tl_session, end_closure);
    session->is_ended = true;
    if (session->conn != NULL) tl_conn_close(session->conn, &session->end_reason);
    session_send_to_loop(session->transport, closure, ended);
}

/* ----------------------------------------------------------------------------------------------------- actions -- */

static void report_address(struct tl_session *session, const struct tl_error *reason)
{
    (void)reason;
    if (session->owner == NULL || session->len_bytes == 0) return;
    session->events->address_ready(session->owner, session->bytes, session->len_bytes);
}

static void connect_at_reactor(struct tl_session *session, const struct tl_error *reason)
{
    (void)reason;
    send_out(session, &session->connect_closure, connect_now);
}

static void report_up(struct tl_session *session, const struct tl_error *reason)
{
    (void)reason;
    if (session->owner != NULL) session->events->up(session->owner);
}

static void drain_at_reactor(struct tl_session *session, const struct tl_error *reason)
{
    (void)reason;
    send_out(session, &session->drain_closure, drain);
}

static void end_at_reactor(struct tl_session *session, const struct tl_error *reason)
{
    session->end_reason = *reason;
    send_out(session, &session->end_closure, end);
}

static void maybe_free(struct tl_session *session, const struct tl_error *reason)
{
    (void)reason;
    if (session->closures_out > 0 || session->request_count > 0) return;
    struct tl_transport *transport = session->transport;
    tl_list_remove(&session->link);
    tl_numbers_fini(&session->answered);
    free(session);
    tl_transport_session_gone(transport);
}

static void report_closed(struct tl_session *session, const struct tl_error *reason)
{
    void *owner = session->owner;
    if (owner != NULL) session->events->closed(owner, reason);
    session->owner = NULL;
    maybe_free(session, NULL);
}

/* --------------------------------------------------------------------------------------------------- the table -- */

/* One table for all that may happen. `next` is where the session goes before the action runs. A NULL action: nothing
 * to do. SESSION_NEVER, what the table leaves out: it cannot happen. */
struct transition {
    enum session_state next;
    void (*action)(struct tl_session *session, const struct tl_error *reason);
};

/* clang-format off */
static const struct transition transitions[SESSION_STATES][SESSION_EVENTS] = {
    [SESSION_CREATING] = {
        [SESSION_EVENT_CREATED] = {SESSION_CREATED, report_address},
        [SESSION_EVENT_ACCEPTED] = {SESSION_CONNECTING, report_address},
        [SESSION_EVENT_FAILED] = {SESSION_OVER, report_closed},
        [SESSION_EVENT_DRAIN] = {SESSION_ENDING, end_at_reactor},
        [SESSION_EVENT_END] = {SESSION_ENDING, end_at_reactor},
    },
    [SESSION_CREATED] = {
        [SESSION_EVENT_CONNECT] = {SESSION_CONNECTING, connect_at_reactor},
        [SESSION_EVENT_CLOSED] = {SESSION_OVER, report_closed},
        [SESSION_EVENT_DRAIN] = {SESSION_ENDING, end_at_reactor},
        [SESSION_EVENT_END] = {SESSION_ENDING, end_at_reactor},
    },
    [SESSION_CONNECTING] = {
        [SESSION_EVENT_UP] = {SESSION_UP, report_up},
        [SESSION_EVENT_CLOSED] = {SESSION_OVER, report_closed},
        [SESSION_EVENT_RETURNED] = {SESSION_CONNECTING, NULL},
        [SESSION_EVENT_DRAIN] = {SESSION_ENDING, end_at_reactor},
        [SESSION_EVENT_END] = {SESSION_ENDING, end_at_reactor},
    },
    [SESSION_UP] = {
        [SESSION_EVENT_CLOSED] = {SESSION_OVER, report_closed},
        [SESSION_EVENT_RETURNED] = {SESSION_UP, NULL},
        [SESSION_EVENT_DRAIN] = {SESSION_DRAINING, drain_at_reactor},
        [SESSION_EVENT_END] = {SESSION_ENDING, end_at_reactor},
    },
    [SESSION_DRAINING] = {
        [SESSION_EVENT_CLOSED] = {SESSION_OVER, report_closed},
        [SESSION_EVENT_RETURNED] = {SESSION_DRAINING, NULL},
        [SESSION_EVENT_END] = {SESSION_ENDING, end_at_reactor},
    },
    [SESSION_ENDING] = {
        [SESSION_EVENT_CREATED] = {SESSION_ENDING, report_address}, /* made before the reactor knew of the end */
        [SESSION_EVENT_ACCEPTED] = {SESSION_ENDING, report_address},
        [SESSION_EVENT_FAILED] = {SESSION_OVER, report_closed},
        [SESSION_EVENT_UP] = {SESSION_ENDING, NULL},
        [SESSION_EVENT_CLOSED] = {SESSION_OVER, report_closed},
        [SESSION_EVENT_RETURNED] = {SESSION_ENDING, NULL},
        [SESSION_EVENT_CONNECT] = {SESSION_ENDING, NULL}, /* the answer of the peer comes too late */
        [SESSION_EVENT_DRAIN] = {SESSION_ENDING, NULL},
        [SESSION_EVENT_END] = {SESSION_ENDING, NULL},
    },
    [SESSION_OVER] = {
        [SESSION_EVENT_RETURNED] = {SESSION_OVER, maybe_free},
        [SESSION_EVENT_DRAIN] = {SESSION_OVER, NULL},
        [SESSION_EVENT_END] = {SESSION_OVER, NULL},
    },
};
/* clang-format on */

void session_handle(struct tl_session *session, enum session_event event, const struct tl_error *reason)
{
    const struct transition *transition = &transitions[session->state][event];
    TL_CHECK(transition->next != SESSION_NEVER);
    session->state = transition->next;
    if (transition->action != NULL) transition->action(session, reason);
}

/* ----------------------------------------------------------------------------------------------------- opening -- */

static bool is_up(const struct tl_session *session)
{
    return session->state == SESSION_UP || session->state == SESSION_DRAINING;
}

static bool is_client_peer(const struct tl_transport *transport, const struct tl_identity *peer)
{
    return tl_peer_by_name(transport->worker, peer->name) == NULL;
}

/* Checks an offer before anything is made for it. Errors: as tl_session_open. */
static enum tl_status check_offer(const struct tl_transport *transport, const struct tl_identity *peer,
                                  const uint8_t *offer, uint32_t len_bytes, struct tl_error *ret_error)
{
    enum tl_status status = tl_conn_check_address(transport->provider, peer, offer, len_bytes, ret_error);
    if (status != TL_OK) return status;
    size_t peer_count = 0, client_peer_count = 0;
    TL_LIST_FOREACH(&transport->sessions, place)
    {
        const struct tl_session *session = TL_CONTAINER_OF(place, const struct tl_session, link);
        if (session->is_opener || is_up(session)) continue;
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
    session->state = SESSION_CREATING;
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
    if (session->state == SESSION_CREATED) { /* an ending session may still have its own address on the way back */
        memcpy(session->bytes, bytes, len_bytes);
        session->len_bytes = len_bytes;
    }
    session_handle(session, SESSION_EVENT_CONNECT, NULL);
    return TL_OK;
}

void tl_session_abandon(struct tl_session *session, const struct tl_error *reason)
{
    session->owner = NULL;
    session_handle(session, SESSION_EVENT_END, reason);
}

size_t tl_session_unconfirmed(const struct tl_session *session, const uint64_t **ret_numbers)
{
    *ret_numbers = tl_numbers_items(&session->answered);
    return session->answered.count;
}

const struct tl_conn_measures *tl_session_measures(const struct tl_session *session)
{
    static const struct tl_conn_measures none;
    return is_up(session) ? &session->measures : &none;
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
        session_handle(TL_CONTAINER_OF(place, struct tl_session, link), SESSION_EVENT_DRAIN, &reason);
    }
}

void tl_sessions_close(struct tl_transport *transport, const struct tl_error *reason)
{
    TL_LIST_FOREACH(&transport->sessions, place)
    {
        session_handle(TL_CONTAINER_OF(place, struct tl_session, link), SESSION_EVENT_END, reason);
    }
}
