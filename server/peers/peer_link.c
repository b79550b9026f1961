// SPDX-License-Identifier: Apache-2.0
/*
 * The links to a peer.
 *
 *      IDLE --wanted--> CONNECTING --greeted--> UP --link lost--> IDLE, or CONNECTING while wanted
 *                        |   ^
 *                  failed|   |back-off over
 *                        v   |
 *                        DOWN
 *
 * A peer is wanted while somebody waits for it: a fetch, tl_worker_wait_for_peers, or always with "connect": "eager".
 * A pair of workers uses one link. When both have opened one at the same time, both keep the one that was opened by the
 * worker with the smaller name and drain the other. A peer that opens one while it should have one has lost that: it is
 * replaced. So it is by a link with a new incarnation: the peer has restarted, and what was reserved for its former
 * self is offered again.
 *
 * One-shot tensors that have arrived, but of which a lost link may not have told the peer, are told on the next link.
 * For that a peer is wanted too, for as long as its values wait.
 *
 * The data connections to the peer (server/peers/data_connections.h) live on the link in use, and end with it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/random.h"
#include "server/peers/peer_internal.h"

#define FIRST_BACK_OFF_NS (20 * TL_NS_PER_MS)
#define MAX_BACK_OFF_NS (1 * TL_NS_PER_SEC)
/* Links that end before they are that old, */
#define SETTLED_NS (5 * TL_NS_PER_SEC)
/* Workers of one cluster start within this time. */
#define START_NS (30 * TL_NS_PER_SEC)
/* and more than so many of them in a row, are opened again only after longer and longer pauses, as if they had failed:
 * two processes that claim one task end each other's links. */
#define LOSSES_WITHOUT_PAUSE 3

static void connect_now(struct tl_peer *peer);
static const struct tl_link_events link_events;

/* ------------------------------------------------------------------------------------------------------- state -- */

static bool is_wanted(const struct tl_peer *peer)
{
    if (peer->worker->is_closing || peer->is_self) return false;
    if (!tl_list_is_empty(&peer->requests) || peer->awaited > 0 || peer->is_eager) return true;
    return peer->received.count + peer->given_up.count > 0 && tl_clock_now_ns() < peer->received_until_ns;
}

/* Workers start one after the other, and end before each other: a peer that has not been there yet, or has left in
 * order, is no reason for a warning. One that does not start is. */
static void log_absence(struct tl_peer *peer, const struct tl_error *reason, bool is_changed)
{
    struct link_path *path = &peer->path;
    int64_t now_ns = tl_clock_now_ns();
    if (path->failure_count == 0) path->down_since_ns = now_ns;
    bool is_starting = peer->incarnation == 0 && now_ns - path->down_since_ns < START_NS;
    bool is_expected = reason->code == TL_UNAVAILABLE && (path->has_left || is_starting);
    if (is_expected ? !is_changed : !is_changed && path->has_warned) return;
    TL_LOG(is_expected ? TL_LOG_INFO : TL_LOG_WARN, "peer cannot be reached", TL_STR("peer", peer->name),
           TL_STR("reason", reason->message));
    path->has_warned = !is_expected;
}

static void set_state(struct tl_peer *peer, enum tl_peer_state state, const struct tl_error *reason)
{
    struct link_path *path = &peer->path;
    bool was_up = path->state == TL_PEER_UP;
    /* Not when only the words differ: they alternate with how far an attempt came. */
    bool is_changed = reason != NULL && (path->failure_count == 0 || path->reason.code != reason->code);
    path->state = state;
    if (reason != NULL) path->reason = *reason;
    if (state == TL_PEER_UP) {
        path->reason = (struct tl_error){.code = TL_OK};
        path->failure_count = 0;
        path->has_left = false;
        path->has_warned = false;
        TL_LOG_AT_INFO("peer up", TL_STR("peer", peer->name), TL_STR("address", peer->address),
                       TL_STR("transport", "grpc"), TL_INCARNATION("incarnation", peer->incarnation));
    } else if (was_up && reason != NULL && reason->code == TL_OK) {
        path->has_left = true;
        TL_LOG_AT_INFO("peer has closed its connection", TL_STR("peer", peer->name));
    } else if (was_up && reason != NULL) {
        TL_LOG_AT_WARN("peer lost", TL_STR("peer", peer->name), TL_STR("reason", reason->message));
    } else if (state == TL_PEER_DOWN && reason != NULL && !peer->worker->is_closing) {
        log_absence(peer, reason, is_changed);
    }
    tl_peer_check_waits(peer->worker);
}

/* Tries again after a while that doubles with each failure, a random part of it, so that many workers do not come at
 * once. */
static void retry_later(struct tl_peer *peer)
{
    struct link_path *path = &peer->path;
    unsigned losses = path->loss_count > LOSSES_WITHOUT_PAUSE ? path->loss_count - LOSSES_WITHOUT_PAUSE : 0;
    unsigned count = path->failure_count + losses;
    unsigned shift = count < 6 ? count : 6;
    int64_t pause_ns = FIRST_BACK_OFF_NS << shift;
    if (pause_ns > MAX_BACK_OFF_NS) pause_ns = MAX_BACK_OFF_NS;
    pause_ns = pause_ns / 2 + (int64_t)(tl_random_u64() % (uint64_t)(pause_ns / 2));
    int64_t due_ns = tl_clock_now_ns() + pause_ns;
    if (tl_timers_arm(tl_loop_timers(peer->worker->loop), &path->back_off, due_ns) != TL_OK) {
        TL_LOG_AT_ERROR("no memory to try a peer again", TL_STR("peer", peer->name));
    }
}

static void back_off_over(struct tl_timer *timer)
{
    struct tl_peer *peer = TL_CONTAINER_OF(timer, struct tl_peer, path.back_off);
    connect_now(peer);
}

void tl_peer_remember_received(struct tl_peer *peer, const uint64_t *numbers, size_t count)
{
    if (!tl_numbers_push_all(&peer->received, numbers, count)) {
        TL_LOG_AT_ERROR("no memory to acknowledge tensors again", TL_STR("peer", peer->name), TL_U64("tensors", count));
    }
    peer->received_until_ns = tl_clock_deadline_ns(peer->worker->settings.reservation_timeout_ns);
}

/* Takes over what the peer may not have heard of when a link to it ends. */
static void inherit_received(struct tl_peer *peer, const struct tl_link *link)
{
    const uint64_t *numbers;
    size_t count = tl_link_unconfirmed(link, &numbers);
    uint64_t incarnation = tl_link_peer(link)->incarnation; /* 0: it never was up */
    if (count == 0 || (incarnation != 0 && incarnation != peer->incarnation)) return;
    int64_t until_ns = peer->received_until_ns;
    tl_peer_remember_received(peer, numbers, count);
    if (incarnation == 0) peer->received_until_ns = until_ns;
}

void tl_peer_give_up(struct tl_peer_request *request)
{
    struct tl_peer *peer = request->peer;
    if (peer == NULL || !request->fetch.is_unsettled) return;
    request->fetch.is_unsettled = false;
    /* Without memory for that the value waits until its owner's patience ends. */
    if (!tl_numbers_push(&peer->given_up, request->fetch.id.number)) return;
    peer->received_until_ns = tl_clock_deadline_ns(peer->worker->settings.reservation_timeout_ns);
    tl_peer_tell_received(peer);
    if (peer->given_up.count > 0) tl_peer_want(peer);
}

/* Tells it on the link in use. */
void tl_peer_tell_received(struct tl_peer *peer)
{
    struct tl_link *link = peer->path.link;
    struct tl_numbers *received = &peer->received;
    struct tl_numbers *given_up = &peer->given_up;
    if (link == NULL) return;
    if (tl_link_tell_received(link, tl_numbers_items(received), received->count)) {
        tl_numbers_drop(received, received->count);
    }
    if (tl_link_tell_given_up(link, tl_numbers_items(given_up), given_up->count)) {
        tl_numbers_drop(given_up, given_up->count);
    }
}

static void connect_now(struct tl_peer *peer)
{
    struct link_path *path = &peer->path;
    if (!is_wanted(peer) || path->link != NULL || path->opening != NULL) return;
    tl_timers_disarm(tl_loop_timers(peer->worker->loop), &path->back_off);
    struct tl_numbers *received = &peer->received;
    struct tl_error error;
    if (tl_link_open(peer->worker->control, peer->address, peer->name, tl_numbers_items(received), received->count,
                     &link_events, peer, &path->opening, &error) == TL_OK) {
        tl_numbers_drop(received, received->count);
        set_state(peer, TL_PEER_CONNECTING, NULL);
    } else {
        set_state(peer, TL_PEER_DOWN, &error);
        retry_later(peer);
        path->failure_count++;
    }
}

void tl_peer_want(struct tl_peer *peer)
{
    if (peer->path.back_off.heap_place == 0) connect_now(peer);
}

/* ------------------------------------------------------------------------------------------------------- links -- */

/* The process behind the peer is another one than before. */
static void note_incarnation(struct tl_peer *peer, uint64_t incarnation)
{
    if (peer->incarnation == incarnation) return;
    if (peer->incarnation != 0) {
        peer->restart_count++;
        TL_LOG_AT_INFO("peer has restarted", TL_STR("peer", peer->name), TL_INCARNATION("incarnation", incarnation));
        tl_rendezvous_release_incarnation(peer->worker->table, peer->incarnation);
    }
    peer->incarnation = incarnation;
    tl_client_peers_evict(peer->worker, incarnation);
    tl_numbers_drop(&peer->received, peer->received.count);
    tl_numbers_drop(&peer->given_up, peer->given_up.count);
}

/* Of two links, one opened by each side. */
static bool is_ours_preferred(const struct tl_peer *peer)
{
    return strcmp(peer->worker->self.name, peer->name) < 0;
}

/* Of two links to the same process, one opened by each side, whether the second one is to be used. */
static bool is_preferred(const struct tl_peer *peer, const struct tl_link *current, const struct tl_link *other)
{
    return !tl_link_is_up(current) || tl_link_is_ours(other) == is_ours_preferred(peer);
}

/* Of two links to the same process, whether the one in use is dead at the other side. That side opens another one only
 * while it has none: so it is when it has opened both, and when it had the present one before the other was begun,
 * whose handshake takes no longer than the connect time-out. */
static bool is_dead(const struct tl_peer *peer, const struct tl_link *current, const struct tl_link *other)
{
    if (tl_link_is_ours(current) == tl_link_is_ours(other)) return true;
    int64_t age_ns = tl_clock_now_ns() - peer->path.link_since_ns;
    return tl_link_is_ours(current) && age_ns > peer->worker->settings.connect_timeout_ns;
}

static void close_former(const struct tl_peer *peer, struct tl_link *former, const char *what)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s has %s", peer->name, what);
    tl_link_close(former, &reason);
}

/* Keeps one of the link in use and another one, ends the other. */
static void choose_link(struct tl_peer *peer, struct tl_link *link, bool is_restart)
{
    struct tl_link *former = peer->path.link;
    bool is_former_dead = is_dead(peer, former, link);
    if (!is_restart && !is_former_dead && !is_preferred(peer, former, link)) {
        tl_link_drain(link);
        return;
    }
    peer->path.link = link;
    if (is_restart || is_former_dead) {
        close_former(peer, former, is_restart ? "restarted" : "connected again");
    } else {
        tl_link_drain(former);
    }
}

static void use_link(struct tl_peer *peer, struct tl_link *link)
{
    struct link_path *path = &peer->path;
    uint64_t incarnation = tl_link_peer(link)->incarnation;
    bool is_restart = path->link != NULL && peer->incarnation != incarnation;
    note_incarnation(peer, incarnation);
    if (path->link != NULL) {
        choose_link(peer, link, is_restart);
    } else {
        path->link = link;
    }
    if (path->link != link) return;
    path->link_since_ns = tl_clock_now_ns();
    tl_data_connections_begin(&peer->data, link, path->opening != NULL && is_ours_preferred(peer));
    tl_timers_disarm(tl_loop_timers(peer->worker->loop), &path->back_off);
    if (path->state != TL_PEER_UP || is_restart) set_state(peer, TL_PEER_UP, NULL);
    tl_peer_tell_received(peer);
    tl_peer_send_waiting(peer);
}

static void link_opened(struct tl_link *link)
{
    struct tl_peer *peer = tl_link_owner(link);
    peer->path.opening = NULL;
    use_link(peer, link);
}

static void link_closed(struct tl_link *link, const struct tl_error *reason)
{
    struct tl_peer *peer = tl_link_owner(link);
    struct link_path *path = &peer->path;
    inherit_received(peer, link);
    if (link == path->opening) {
        path->opening = NULL;
        tl_data_connections_stay(&peer->data);
        tl_peer_tell_received(peer);
        if (path->link != NULL) return;
        set_state(peer, TL_PEER_DOWN, reason);
        if (is_wanted(peer)) retry_later(peer);
        path->failure_count++;
        return;
    }
    if (link != path->link) {
        tl_peer_tell_received(peer);
        return;
    }
    path->link = NULL;
    tl_data_connections_end(&peer->data);
    bool was_settled = tl_clock_now_ns() - path->link_since_ns >= SETTLED_NS;
    path->loss_count = was_settled ? 0 : path->loss_count + 1;
    set_state(peer, is_wanted(peer) ? TL_PEER_CONNECTING : TL_PEER_IDLE, reason);
    if (path->loss_count <= LOSSES_WITHOUT_PAUSE) {
        tl_peer_want(peer);
    } else if (is_wanted(peer)) {
        retry_later(peer);
    }
}

static void connection_message(struct tl_link *link, const struct tl_connection_message *message)
{
    struct tl_peer *peer = tl_link_owner(link);
    tl_data_connections_hear(&peer->data, link, message);
}

static const struct tl_link_events link_events = {
    .up = link_opened, .closed = link_closed, .connection_message = connection_message};

void tl_peers_link_up(struct tl_worker *worker, struct tl_link *link)
{
    const struct tl_identity *identity = tl_link_peer(link);
    struct tl_peer *peer = identity->name[0] != '\0' ? tl_peer_by_name(worker, identity->name) : NULL;
    if (peer == NULL) {
        tl_client_peer_add(worker, link);
        if (identity->name[0] == '\0') return;
        TL_LOG_AT_WARN("a worker that is not in the configuration has connected", TL_STR("peer", identity->name),
                       TL_STR("address", identity->address));
        return;
    }
    tl_link_set_events(link, &link_events, peer);
    use_link(peer, link);
}

void tl_peer_link_init(struct tl_peer *peer)
{
    peer->path.back_off.fire = back_off_over;
}
