// SPDX-License-Identifier: Apache-2.0
/*
 * Sessions. What the reactor's thread does is marked; everything else is the loop's. A field that both use belongs to
 * whoever has the letter.
 */
#include "server/session.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "base/numbers.h"
#include "server/peer_internal.h"

/* Sessions that a peer has offered and that are not up, but on their way there or to their end: one of the present
 * attempt, and one of an attempt or a link before it that is not gone yet. */
#define MAX_ATTEMPTS_OF_PEER 2
/* Of all peers together that are no members of the cluster. */
#define MAX_ATTEMPTS_OF_GUESTS 128
/* Requests that were answered over a session and are remembered until it ends. Whatever was answered before them, the
 * peer has heard of long ago. */
#define MAX_UNCONFIRMED 1024

struct tl_session {
    struct tl_plane *plane;
    struct tl_list link; /* in plane->sessions */
    const struct tl_session_events *events;
    void *owner; /* NULL: abandoned */
    struct tl_identity peer;
    bool is_opener;
    bool is_guest; /* of a peer that is no member of the cluster */
    bool is_up;
    bool is_over;         /* closed has come, or nothing was created */
    bool is_end_asked;    /* end_letter has been posted */
    unsigned letters_out; /* on their way to the reactor or back */
    size_t request_count; /* given to the session and not done */
    struct tl_numbers answered;
    struct tl_conn_measures measures; /* the reactor's until up_letter has come */

    struct tl_memory_making making; /* its letter creates the connection, and comes back */
    struct tl_letter connect_letter;
    struct tl_letter drain_letter;
    struct tl_letter end_letter;
    uint8_t bytes[TL_CONN_INTRODUCTION_BYTES]; /* create, connect: the peer's. create, coming back: ours */
    uint32_t len_bytes;                        /* create, coming back, 0: not to be told, closed follows */
    struct tl_error failure;                   /* create, coming back */
    struct tl_error end_reason;                /* end */

    /* The reactor's. */
    struct tl_conn *conn; /* NULL: none, or no more */
    bool is_ended;        /* asked to end, perhaps before there was one */
    struct tl_letter up_letter;
    struct tl_letter closed_letter;
    struct tl_error closed_reason; /* of closed_letter */
};

/* ------------------------------------------------------------------------------------------- letters, both ways -- */

static void send_out(struct tl_session *session, struct tl_letter *letter, void (*deliver)(struct tl_letter *letter))
{
    session->letters_out++;
    letter->deliver = deliver;
    tl_plane_post(session->plane, letter);
}

static void post_to_reactor(void *context, struct tl_letter *letter)
{
    tl_plane_post(context, letter);
}

/* The reactor's: the letter goes to the loop. */
static void send_home(struct tl_plane *plane, struct tl_letter *letter, void (*deliver)(struct tl_letter *letter))
{
    const struct tl_home *home = &plane->worker->home;
    letter->deliver = deliver;
    home->post(home, letter);
}

static void maybe_free(struct tl_session *session)
{
    if (!session->is_over || session->letters_out > 0 || session->request_count > 0) return;
    struct tl_plane *plane = session->plane;
    tl_list_remove(&session->link);
    tl_numbers_fini(&session->answered);
    free(session);
    tl_plane_session_gone(plane);
}

static void came_back(struct tl_session *session)
{
    session->letters_out--;
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

static void up_came(struct tl_letter *letter)
{
    struct tl_session *session = TL_CONTAINER_OF(letter, struct tl_session, up_letter);
    if (session->is_end_asked) return;
    session->is_up = true;
    if (session->owner != NULL) session->events->up(session->owner);
}

static void closed_came(struct tl_letter *letter)
{
    struct tl_session *session = TL_CONTAINER_OF(letter, struct tl_session, closed_letter);
    over(session, &session->closed_reason);
}

/* The reactor's. */
static void conn_up(struct tl_conn *conn)
{
    struct tl_session *session = tl_conn_owner(conn);
    session->measures = *tl_conn_measured(conn);
    send_home(session->plane, &session->up_letter, up_came);
}

/* The reactor's. */
static void conn_closed(struct tl_conn *conn, const struct tl_error *reason)
{
    struct tl_session *session = tl_conn_owner(conn);
    session->conn = NULL;
    session->closed_reason = *reason;
    send_home(session->plane, &session->closed_letter, closed_came);
}

static const struct tl_conn_events conn_events = {.up = conn_up, .closed = conn_closed};

static void created(struct tl_letter *letter)
{
    struct tl_session *session = TL_CONTAINER_OF(letter, struct tl_session, making.letter);
    session->letters_out--;
    if (session->failure.code != TL_OK) {
        over(session, &session->failure);
        return;
    }
    if (session->owner != NULL && session->len_bytes > 0) {
        session->events->introduced(session->owner, session->bytes, session->len_bytes);
    }
}

/* The reactor's, with the memory for this peer. The side that did not open the link connects at once: what the peer
 * told is in bytes. */
static void create(struct tl_letter *letter)
{
    struct tl_session *session = TL_CONTAINER_OF(letter, struct tl_session, making.letter);
    struct tl_plane *plane = session->plane;
    uint8_t own[TL_CONN_INTRODUCTION_BYTES];
    session->failure = session->making.error;
    if (session->failure.code == TL_OK) {
        session->failure.code =
            tl_conn_create(plane->engine, session->making.memory, &session->peer, plane->worker->self.incarnation,
                           session->is_opener, &conn_events, session, &session->conn, &session->failure);
    }
    if (session->failure.code == TL_OK && session->is_ended) {
        tl_conn_close(session->conn, &session->end_reason);
        session->len_bytes = 0;
    } else if (session->failure.code == TL_OK) {
        uint32_t own_len_bytes = tl_conn_introduce(session->conn, own);
        struct tl_error error;
        if (!session->is_opener &&
            tl_conn_connect(session->conn, session->bytes, session->len_bytes, &error) != TL_OK) {
            tl_conn_close(session->conn, &error);
            own_len_bytes = 0;
        }
        memcpy(session->bytes, own, own_len_bytes);
        session->len_bytes = own_len_bytes;
    }
    send_home(plane, letter, created);
}

static void connected(struct tl_letter *letter)
{
    came_back(TL_CONTAINER_OF(letter, struct tl_session, connect_letter));
}

/* The reactor's. */
static void connect_now(struct tl_letter *letter)
{
    struct tl_session *session = TL_CONTAINER_OF(letter, struct tl_session, connect_letter);
    struct tl_error error;
    if (session->conn != NULL && tl_conn_connect(session->conn, session->bytes, session->len_bytes, &error) != TL_OK) {
        tl_conn_close(session->conn, &error);
    }
    send_home(session->plane, letter, connected);
}

static void drained(struct tl_letter *letter)
{
    came_back(TL_CONTAINER_OF(letter, struct tl_session, drain_letter));
}

/* The reactor's. */
static void drain(struct tl_letter *letter)
{
    struct tl_session *session = TL_CONTAINER_OF(letter, struct tl_session, drain_letter);
    if (session->conn != NULL) tl_conn_drain(session->conn);
    send_home(session->plane, letter, drained);
}

static void ended(struct tl_letter *letter)
{
    came_back(TL_CONTAINER_OF(letter, struct tl_session, end_letter));
}

/* The reactor's. */
static void end(struct tl_letter *letter)
{
    struct tl_session *session = TL_CONTAINER_OF(letter, struct tl_session, end_letter);
    session->is_ended = true;
    if (session->conn != NULL) tl_conn_close(session->conn, &session->end_reason);
    send_home(session->plane, letter, ended);
}

static void ask_end(struct tl_session *session, const struct tl_error *reason)
{
    if (session->is_over || session->is_end_asked) return;
    session->is_end_asked = true;
    session->is_up = false;
    session->end_reason = *reason;
    send_out(session, &session->end_letter, end);
}

static bool is_guest(const struct tl_plane *plane, const struct tl_identity *peer)
{
    return tl_peer_by_name(plane->worker, peer->name) == NULL;
}

/* Whether anything may be made for an offer. */
static enum tl_status check_offer(const struct tl_plane *plane, const struct tl_identity *peer, const uint8_t *offer,
                                  uint32_t len_bytes, struct tl_error *ret_error)
{
    enum tl_status status = tl_conn_check_introduction(plane->provider, peer, offer, len_bytes, ret_error);
    if (status != TL_OK) return status;
    size_t peer_count = 0, guest_count = 0;
    TL_LIST_FOREACH(&plane->sessions, place)
    {
        const struct tl_session *session = TL_CONTAINER_OF(place, const struct tl_session, link);
        if (session->is_opener || session->is_up) continue;
        peer_count += session->peer.incarnation == peer->incarnation && strcmp(session->peer.name, peer->name) == 0;
        guest_count += session->is_guest;
    }
    bool are_guests_too_many = guest_count >= MAX_ATTEMPTS_OF_GUESTS && is_guest(plane, peer);
    if (peer_count < MAX_ATTEMPTS_OF_PEER && !are_guests_too_many) return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                        "%zu data paths of %s to %s are being set up or have not ended yet; offer again later",
                        are_guests_too_many ? guest_count : peer_count, are_guests_too_many ? "clients" : "this peer",
                        plane->worker->self.name);
}

enum tl_status tl_session_open(struct tl_plane *plane, const struct tl_identity *peer, const uint8_t *offer,
                               uint32_t len_bytes, const struct tl_session_events *events, void *owner,
                               struct tl_session **ret_session, struct tl_error *ret_error)
{
    if (len_bytes > TL_CONN_INTRODUCTION_BYTES) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s has introduced itself with %u bytes", peer->name,
                            len_bytes);
    }
    enum tl_status status = offer != NULL ? check_offer(plane, peer, offer, len_bytes, ret_error) : TL_OK;
    if (status != TL_OK) return status;
    struct tl_session *session = calloc(1, sizeof(*session));
    if (session == NULL) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a connection to %s", peer->name);
    }
    session->plane = plane;
    session->events = events;
    session->owner = owner;
    session->peer = *peer;
    session->is_opener = offer == NULL;
    session->is_guest = is_guest(plane, peer);
    if (offer != NULL) memcpy(session->bytes, offer, len_bytes);
    session->len_bytes = len_bytes;
    tl_list_push_back(&plane->sessions, &session->link);
    session->letters_out++;
    session->making.letter.deliver = create;
    session->making.post = post_to_reactor;
    session->making.context = plane;
    tl_engine_make_memory(plane->engine, &session->making);
    *ret_session = session;
    return TL_OK;
}

enum tl_status tl_session_connect(struct tl_session *session, const uint8_t *bytes, uint32_t len_bytes,
                                  struct tl_error *ret_error)
{
    if (len_bytes > TL_CONN_INTRODUCTION_BYTES) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s has introduced itself with %u bytes",
                            session->peer.name, len_bytes);
    }
    if (session->is_end_asked) return TL_OK; /* closed follows */
    memcpy(session->bytes, bytes, len_bytes);
    session->len_bytes = len_bytes;
    send_out(session, &session->connect_letter, connect_now);
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

void tl_sessions_drain(struct tl_plane *plane)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s is shutting down", plane->worker->self.name);
    TL_LIST_FOREACH(&plane->sessions, place)
    {
        struct tl_session *session = TL_CONTAINER_OF(place, struct tl_session, link);
        if (session->is_over || session->is_end_asked) continue;
        if (session->is_up) {
            send_out(session, &session->drain_letter, drain);
        } else {
            ask_end(session, &reason);
        }
    }
}

void tl_sessions_close(struct tl_plane *plane, const struct tl_error *reason)
{
    TL_LIST_FOREACH(&plane->sessions, place)
    {
        ask_end(TL_CONTAINER_OF(place, struct tl_session, link), reason);
    }
}

/* ----------------------------------------------------------------------------------------------------- requests -- */

/* The result is at home, and nothing of the request is left at the reactor. */
static void maybe_done(struct tl_peer_request *request)
{
    if (!request->is_done || request->is_cancel_out) return;
    struct tl_session *session = request->session;
    const struct tl_error *failure = request->result;
    request->fetch.ops = request->ops;
    request->session = NULL;
    request->result = NULL;
    tl_driver_busy(&session->plane->worker->driver, -1);
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

static void done_came(struct tl_letter *letter)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(letter, struct tl_peer_request, done_letter);
    request->is_done = true;
    maybe_done(request);
}

static void cancel_came_back(struct tl_letter *letter)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(letter, struct tl_peer_request, cancel_letter);
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
    send_home(request->session->plane, &request->done_letter, done_came);
}

static const struct tl_fetch_ops fetch_ops = {.place = place, .done = fetch_done};

/* The reactor's. */
static void start(struct tl_letter *letter)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(letter, struct tl_peer_request, start_letter);
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
static void cancel(struct tl_letter *letter)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(letter, struct tl_peer_request, cancel_letter);
    if (request->is_on_conn) tl_conn_cancel(request->session->conn, &request->fetch);
    send_home(request->session->plane, letter, cancel_came_back);
}

void tl_session_fetch(struct tl_session *session, struct tl_peer_request *request)
{
    request->session = session;
    request->ops = request->fetch.ops;
    request->is_done = false;
    request->fetch.ops = &fetch_ops;
    request->fetch.is_final = false;
    session->request_count++;
    tl_driver_busy(&session->plane->worker->driver, 1);
    request->start_letter.deliver = start;
    tl_plane_post(session->plane, &request->start_letter);
}

void tl_session_cancel(struct tl_peer_request *request)
{
    if (request->is_cancel_out || request->is_done) return;
    request->is_cancel_out = true;
    request->cancel_letter.deliver = cancel;
    tl_plane_post(request->session->plane, &request->cancel_letter);
}
