// SPDX-License-Identifier: Apache-2.0
/*
 * The links to a peer. One table at the end of the states' section says what each state does with each event.
 *
 *      IDLE --wanted--> CONNECTING --link up--> UP --link lost--> IDLE, or CONNECTING while the peer is wanted
 *                        |   ^
 *                  failed|   |back-off over
 *                        v   |
 *                        DOWN
 *
 * IDLE and CONNECTING after a loss wait for a request, for the back-off, or for a link; CONNECTING otherwise waits for
 * the link that we open; UP waits for the end of the link in use; DOWN waits for the back-off, or for a request. In
 * each state the peer may open a link.
 *
 * A peer is wanted while a fetch, a call or tl_worker_wait_for_peers waits for it, or always with "connect": "eager".
 * A pair of workers uses one link. When both have opened one at the same time, both keep the one that was opened by the
 * worker with the smaller name and drain the other. A peer that opens a second link while we believe that it has one
 * has lost that one: the new link replaces it. A link with a new incarnation replaces it too: the peer has restarted,
 * and what was reserved for its former process is offered again.
 *
 * A lost link may not have acknowledged all one-shot tensors that have arrived; the next link acknowledges them again.
 * A peer is wanted for that as well, as long as its values wait.
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
#include "server/back_off.h"
#include "server/peers/peer_internal.h"

/* After more than so many links in a row that ended before TL_SETTLED_NS, the next is opened after longer and longer
 * pauses, as if they had failed: two processes that claim one task end each other's links. */
#define LOSSES_WITHOUT_PAUSE 3
/* Workers of one cluster start within this time. */
#define START_NS (30 * TL_NS_PER_SEC)

static void connect_now(struct tl_peer *peer);
static const struct tl_link_events link_events;

/* ------------------------------------------------------------------------------------------------------- state -- */

static bool is_wanted(const struct tl_peer *peer)
{
    if (peer->worker->closing.is_closing || peer->is_self) return false;
    if (peer->added != NULL && peer->added->gone.code != TL_OK) return false;
    if (!tl_list_is_empty(&peer->requests) || peer->awaited > 0 || peer->is_eager) return true;
    if (!tl_list_is_empty(&peer->links.calls.waiting)) return true;
    return peer->received.count + peer->given_up.count > 0 && tl_clock_now_ns() < peer->received_until_ns;
}

/* Workers start one after the other and end one after the other, so a peer that has not started yet or has left in
 * order causes no warning. A peer that does not start within START_NS does. */
static void log_absence(struct tl_peer *peer, const struct tl_error *reason, bool is_changed)
{
    struct peer_links *links = &peer->links;
    int64_t now_ns = tl_clock_now_ns();
    if (links->failure_count == 0) links->down_since_ns = now_ns;
    bool is_starting = peer->incarnation == 0 && now_ns - links->down_since_ns < START_NS;
    bool is_expected = reason->code == TL_UNAVAILABLE && (links->has_left || is_starting);
    if (is_expected ? !is_changed : !is_changed && links->has_warned) return;
    TL_LOG(is_expected ? TL_LOG_INFO : TL_LOG_WARN, "peer cannot be reached", TL_STR("peer", peer->name),
           TL_STR("reason", reason->message));
    links->has_warned = !is_expected;
}

/* Arms the next attempt, after a pause that grows with each failure. */
static void retry_later(struct tl_peer *peer)
{
    struct peer_links *links = &peer->links;
    unsigned losses = links->loss_count > LOSSES_WITHOUT_PAUSE ? links->loss_count - LOSSES_WITHOUT_PAUSE : 0;
    int64_t pause_ns =
        tl_back_off_ns(TL_LINK_FIRST_BACK_OFF_NS, TL_LINK_MAX_BACK_OFF_NS, links->failure_count + losses);
    tl_timers_arm_reserved(tl_loop_timers(peer->worker->loop), &links->back_off, tl_clock_now_ns() + pause_ns);
}

/* ----------------------------------------------------------------------------------------------------- actions -- */

/* Two processes that claim one task replace each other again and again; one warning has said so. */
static enum tl_log_level level_of(const struct tl_peer *peer, enum tl_log_level level)
{
    return tl_rivals_are_active(&peer->rivals) ? TL_LOG_DEBUG : level;
}

static void nothing(struct tl_peer *peer, const struct tl_error *reason)
{
    (void)peer;
    (void)reason;
}

static void up(struct tl_peer *peer, const struct tl_error *reason)
{
    (void)reason;
    struct peer_links *links = &peer->links;
    links->reason = (struct tl_error){.code = TL_OK};
    links->failure_count = 0;
    links->is_retrying = false;
    links->has_left = false;
    links->has_warned = false;
    TL_LOG(level_of(peer, TL_LOG_INFO), "peer up", TL_STR("peer", peer->name), TL_STR("address", peer->address),
           TL_STR("transport", "grpc"), TL_INCARNATION("incarnation", peer->incarnation));
}

static void lost(struct tl_peer *peer, const struct tl_error *reason)
{
    peer->links.reason = *reason;
    if (tl_peer_is_removed(peer)) {
        TL_LOG_AT_INFO("peer removed", TL_STR("peer", peer->name));
    } else if (reason->code == TL_OK) {
        peer->links.has_left = true;
        TL_LOG_AT_INFO("peer has closed its connection", TL_STR("peer", peer->name));
    } else {
        TL_LOG(level_of(peer, TL_LOG_WARN), "peer lost", TL_STR("peer", peer->name), TL_STR("reason", reason->message));
    }
}

static void absent(struct tl_peer *peer, const struct tl_error *reason)
{
    struct peer_links *links = &peer->links;
    /* Messages alternate with how far an attempt came, so only another code is a change. */
    bool is_changed = links->failure_count == 0 || links->reason.code != reason->code;
    links->reason = *reason;
    tl_peer_calls_go_on(peer);
    if (!peer->worker->closing.is_closing && !tl_peer_is_removed(peer)) log_absence(peer, reason, is_changed);
    links->is_retrying = is_wanted(peer);
    if (links->is_retrying) retry_later(peer);
    links->failure_count++;
}

/* --------------------------------------------------------------------------------------------------- the table -- */

enum link_event {
    LINK_EVENT_OPENING,       /* a link of ours is being opened */
    LINK_EVENT_OPEN_FAILED,   /* a link of ours could not be opened, for this reason */
    LINK_EVENT_OPENING_ENDED, /* the link that was being opened has ended, for this reason */
    LINK_EVENT_UP,            /* there is a link in use now */
    LINK_EVENT_RESTARTED,     /* a link of another process has replaced the one in use */
    LINK_EVENT_LOST,          /* the link in use has ended, for this reason */
    LINK_EVENT_LOST_WANTED,   /* the same, while the peer is wanted */
    LINK_EVENTS,
};

/* One table for all that may happen. `next` is where the peer goes before the action runs. A NULL action, what the
 * table leaves out: it cannot happen. */
struct transition {
    enum tl_peer_state next;
    void (*action)(struct tl_peer *peer, const struct tl_error *reason);
};

/* clang-format off */
static const struct transition transitions[][LINK_EVENTS] = {
    [TL_PEER_IDLE] = {
        [LINK_EVENT_OPENING] = {TL_PEER_CONNECTING, nothing},
        [LINK_EVENT_OPEN_FAILED] = {TL_PEER_DOWN, absent},
        [LINK_EVENT_OPENING_ENDED] = {TL_PEER_DOWN, absent}, /* it was being opened when the link in use was lost */
        [LINK_EVENT_UP] = {TL_PEER_UP, up},
    },
    [TL_PEER_CONNECTING] = {
        [LINK_EVENT_OPENING] = {TL_PEER_CONNECTING, nothing}, /* again, after a loss */
        [LINK_EVENT_OPEN_FAILED] = {TL_PEER_DOWN, absent},
        [LINK_EVENT_OPENING_ENDED] = {TL_PEER_DOWN, absent},
        [LINK_EVENT_UP] = {TL_PEER_UP, up},
    },
    [TL_PEER_UP] = {
        [LINK_EVENT_OPENING_ENDED] = {TL_PEER_UP, nothing}, /* the peer's link is in use */
        [LINK_EVENT_RESTARTED] = {TL_PEER_UP, up},
        [LINK_EVENT_LOST] = {TL_PEER_IDLE, lost},
        [LINK_EVENT_LOST_WANTED] = {TL_PEER_CONNECTING, lost},
    },
    [TL_PEER_DOWN] = {
        [LINK_EVENT_OPENING] = {TL_PEER_CONNECTING, nothing},
        [LINK_EVENT_OPEN_FAILED] = {TL_PEER_DOWN, absent},
        [LINK_EVENT_UP] = {TL_PEER_UP, up},
    },
};
/* clang-format on */

/* Moves the peer as its table says. All events come from this program: one that the table leaves out aborts. */
static void handle(struct tl_peer *peer, enum link_event event, const struct tl_error *reason)
{
    const struct transition *transition = &transitions[peer->links.state][event];
    TL_CHECK(transition->action != NULL);
    peer->links.state = transition->next;
    transition->action(peer, reason);
    tl_peer_check_waits(peer->worker);
}

/* -------------------------------------------------------------------------------------------------- connecting -- */

static void back_off_over(struct tl_timer *timer)
{
    struct tl_peer *peer = TL_CONTAINER_OF(timer, struct tl_peer, links.back_off);
    connect_now(peer);
}

void tl_peer_remember_received(struct tl_peer *peer, const uint64_t *numbers, size_t count)
{
    if (!tl_numbers_push_all(&peer->received, numbers, count)) {
        TL_LOG_AT_ERROR("no memory to acknowledge tensors again", TL_STR("peer", peer->name), TL_U64("tensors", count));
    }
    peer->received_until_ns = tl_clock_deadline_ns(peer->worker->settings.reservation_timeout_ns);
}

/* Takes over the answers that the peer may not have heard of when a link to it ends. */
static void inherit_received(struct tl_peer *peer, const struct tl_link *link)
{
    const uint64_t *numbers;
    size_t count = tl_link_unconfirmed(link, &numbers);
    uint64_t incarnation = tl_link_peer(link)->incarnation; /* 0: it was never up */
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
    /* Without memory for the number the value waits until its owner's reservation expires. */
    if (!tl_numbers_push(&peer->given_up, request->fetch.number)) return;
    peer->received_until_ns = tl_clock_deadline_ns(peer->worker->settings.reservation_timeout_ns);
    tl_peer_acknowledge(peer);
    if (peer->given_up.count > 0) tl_peer_want(peer);
}

void tl_peer_acknowledge(struct tl_peer *peer)
{
    struct tl_link *link = peer->links.link;
    struct tl_numbers *received = &peer->received;
    struct tl_numbers *given_up = &peer->given_up;
    if (link == NULL) return;
    if (tl_link_acknowledge(link, tl_numbers_items(received), received->count)) {
        tl_numbers_drop(received, received->count);
    }
    if (tl_link_cancel_requests(link, tl_numbers_items(given_up), given_up->count)) {
        tl_numbers_drop(given_up, given_up->count);
    }
}

static void connect_now(struct tl_peer *peer)
{
    struct peer_links *links = &peer->links;
    if (!is_wanted(peer)) links->is_retrying = false;
    if (!is_wanted(peer) || links->link != NULL || links->opening != NULL) return;
    tl_timers_disarm(tl_loop_timers(peer->worker->loop), &links->back_off);
    struct tl_numbers *received = &peer->received;
    struct tl_error error;
    const struct tl_link_address address = {.address = peer->address,
                                            .expected_name =
                                                peer->added == NULL || peer->added->is_named ? peer->name : NULL,
                                            .is_one_way = peer->added != NULL};
    if (tl_link_open(peer->worker->control, &address, tl_numbers_items(received), received->count, &link_events, peer,
                     &links->opening, &error) == TL_OK) {
        tl_peer_retain(peer);
        tl_numbers_drop(received, received->count);
        handle(peer, LINK_EVENT_OPENING, NULL);
    } else {
        handle(peer, LINK_EVENT_OPEN_FAILED, &error);
    }
}

void tl_peer_want(struct tl_peer *peer)
{
    if (peer->links.back_off.heap_place == 0) connect_now(peer);
}

/* ------------------------------------------------------------------------------------------------------- links -- */

/* Records the incarnation of the process behind the peer. A new one replaces what belonged to the former. */
static void note_incarnation(struct tl_peer *peer, uint64_t incarnation)
{
    if (peer->incarnation == incarnation) return;
    if (peer->incarnation != 0) {
        peer->restart_count++;
        TL_LOG(level_of(peer, TL_LOG_INFO), "peer has restarted", TL_STR("peer", peer->name),
               TL_INCARNATION("incarnation", incarnation));
        tl_process_is_gone(peer->worker, peer->incarnation);
    }
    peer->incarnation = incarnation;
    if (peer->added == NULL) tl_client_peers_evict(peer->worker, peer->name, incarnation);
    tl_numbers_drop(&peer->received, peer->received.count);
    tl_numbers_drop(&peer->given_up, peer->given_up.count);
}

/* Tasks may know different parts of a cluster, and an address may differ where ports are forwarded. So this is no
 * warning; `tensorlane health` compares the configurations. */
static void note_cluster(const struct tl_peer *peer, const struct tl_identity *who)
{
    uint64_t own = peer->worker->self.cluster_digest;
    if (own == 0 || who->cluster_digest == 0 || who->cluster_digest == own) return;
    if (who->cluster_digest == peer->rivals.latest.cluster_digest) return;
    TL_LOG_AT_INFO("peer has another cluster.json, with other tasks or addresses", TL_STR("peer", peer->name),
                   TL_STR("address", who->address));
}

/* Returns whether our link stays when each side has opened one. */
static bool is_ours_preferred(const struct tl_peer *peer)
{
    return strcmp(peer->worker->self.name, peer->name) < 0;
}

/* Returns whether the other link replaces the current one when both lead to the same process and each side has opened
 * one. */
static bool is_preferred(const struct tl_peer *peer, const struct tl_link *current, const struct tl_link *other)
{
    return !tl_link_is_up(current) || tl_link_is_ours(other) == is_ours_preferred(peer);
}

/* Returns whether the link in use is dead at the other side, when another link to the same process has come up. The
 * other side opens a link only while it has none. So the link in use is dead when one side has opened both, and when
 * the peer had it before the new one was begun: a handshake takes no longer than the connect time-out. */
static bool is_dead(const struct tl_peer *peer, const struct tl_link *current, const struct tl_link *other)
{
    if (tl_link_is_ours(current) == tl_link_is_ours(other)) return true;
    int64_t age_ns = tl_clock_now_ns() - peer->links.link_since_ns;
    return tl_link_is_ours(current) && age_ns > peer->worker->settings.connect_timeout_ns;
}

static void close_former(const struct tl_peer *peer, struct tl_link *former, const char *what)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s has %s", peer->name, what);
    tl_link_close(former, &reason);
}

/* Keeps either the link in use or the new one, and ends the other. */
static void choose_link(struct tl_peer *peer, struct tl_link *link, bool is_restart)
{
    struct tl_link *former = peer->links.link;
    bool is_former_dead = is_dead(peer, former, link);
    if (!is_restart && !is_former_dead && !is_preferred(peer, former, link)) {
        tl_link_drain(link);
        return;
    }
    peer->links.link = link;
    if (is_restart || is_former_dead) {
        close_former(peer, former, is_restart ? "restarted" : "connected again");
    } else {
        tl_link_drain(former);
    }
}

static void use_link(struct tl_peer *peer, struct tl_link *link)
{
    struct peer_links *links = &peer->links;
    uint64_t incarnation = tl_link_peer(link)->incarnation;
    note_cluster(peer, tl_link_peer(link));
    tl_rivals_note(&peer->rivals, peer->name, tl_link_peer(link));
    bool is_restart = links->link != NULL && peer->incarnation != incarnation;
    note_incarnation(peer, incarnation);
    if (links->link != NULL) {
        choose_link(peer, link, is_restart);
    } else {
        links->link = link;
    }
    if (links->link != link) return;
    links->link_since_ns = tl_clock_now_ns();
    tl_data_connections_begin(&peer->data, link, links->opening != NULL && is_ours_preferred(peer));
    tl_timers_disarm(tl_loop_timers(peer->worker->loop), &links->back_off);
    if (is_restart) {
        handle(peer, LINK_EVENT_RESTARTED, NULL);
    } else if (links->state != TL_PEER_UP) {
        handle(peer, LINK_EVENT_UP, NULL);
    }
    tl_peer_acknowledge(peer);
    tl_peer_send_waiting(peer);
    tl_peer_calls_go_on(peer);
}

static void link_opened(struct tl_link *link)
{
    struct tl_peer *peer = tl_link_owner(link);
    struct tl_error error;
    if (peer->added != NULL && !tl_added_peer_knows(peer, tl_link_peer(link), &error)) {
        tl_link_close(link, &error);
        return;
    }
    peer->links.opening = NULL;
    use_link(peer, link);
}

static void note_end(struct tl_peer *peer, struct tl_link *link, const struct tl_error *reason)
{
    struct peer_links *links = &peer->links;
    inherit_received(peer, link);
    if (link == links->opening) {
        links->opening = NULL;
        tl_data_connections_stay(&peer->data);
        tl_peer_acknowledge(peer);
        handle(peer, LINK_EVENT_OPENING_ENDED, reason);
        return;
    }
    if (link != links->link) {
        tl_peer_acknowledge(peer);
        return;
    }
    links->link = NULL;
    tl_data_connections_end(&peer->data);
    bool was_settled = tl_clock_now_ns() - links->link_since_ns >= TL_SETTLED_NS;
    links->loss_count = was_settled ? 0 : links->loss_count + 1;
    handle(peer, is_wanted(peer) ? LINK_EVENT_LOST_WANTED : LINK_EVENT_LOST, reason);
    if (links->loss_count <= LOSSES_WITHOUT_PAUSE) {
        tl_peer_want(peer);
    } else if (is_wanted(peer)) {
        retry_later(peer);
    }
}

static void link_closed(struct tl_link *link, const struct tl_error *reason)
{
    struct tl_peer *peer = tl_link_owner(link);
    note_end(peer, link, reason);
    tl_peer_release(peer);
}

/* A link that is being opened ends when it is up (tl_added_peer_knows), or has failed: gRPC 1.51 loses the connection,
 * and its descriptor, of a channel that is destroyed while it connects. */
void tl_peer_unlink(struct tl_peer *peer)
{
    tl_timers_disarm(tl_loop_timers(peer->worker->loop), &peer->links.back_off);
    if (peer->links.link == NULL) return;
    /* What has arrived over data connections, and the peer may not know of, is acknowledged on the link. */
    tl_data_connections_end(&peer->data);
    tl_link_drain(peer->links.link);
}

static void connection_message(struct tl_link *link, const struct tl_connection_message *message)
{
    struct tl_peer *peer = tl_link_owner(link);
    tl_data_connections_handle_message(&peer->data, link, message);
}

static const struct tl_link_events link_events = {
    .up = link_opened, .closed = link_closed, .connection_message = connection_message};

void tl_peers_link_up(struct tl_worker *worker, struct tl_link *link)
{
    const struct tl_identity *identity = tl_link_peer(link);
    struct tl_peer *peer = identity->name[0] != '\0' ? tl_peer_by_name(worker, identity->name) : NULL;
    if (peer == NULL || identity->is_one_way) {
        tl_client_peer_add(worker, link);
        if (identity->name[0] == '\0' || identity->is_one_way) return;
        TL_LOG_AT_WARN("a worker that is not in the configuration has connected", TL_STR("peer", identity->name),
                       TL_STR("address", identity->address));
        return;
    }
    tl_link_set_events(link, &link_events, peer);
    tl_peer_retain(peer);
    use_link(peer, link);
}

enum tl_status tl_peer_link_init(struct tl_peer *peer)
{
    enum tl_status status = tl_timers_reserve(tl_loop_timers(peer->worker->loop));
    if (status != TL_OK) return status;
    peer->links.state = peer->is_self ? TL_PEER_UP : TL_PEER_IDLE;
    peer->links.back_off.fire = back_off_over;
    return TL_OK;
}

void tl_peer_link_fini(struct tl_peer *peer)
{
    struct tl_timers *timers = tl_loop_timers(peer->worker->loop);
    tl_timers_disarm(timers, &peer->links.back_off);
    tl_timers_release(timers);
}
