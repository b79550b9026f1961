// SPDX-License-Identifier: Apache-2.0
#include "server/peers/peer_calls.h"

#include "base/error.h"
#include "server/peers/peer_internal.h"

/* More calls at a time would bring no more bytes, and have the peer hold more tensors that are not complete. */
#define MAX_RUNNING 8

static bool is_connecting(const struct tl_peer *peer)
{
    return peer->links.state == TL_PEER_CONNECTING || peer->links.opening != NULL;
}

enum tl_data_connection_use tl_peer_put_use(struct tl_peer *peer, const char **ret_reason)
{
    const struct tl_link *link = peer->links.link;
    const struct tl_data_connection *unused;
    /* A link for calls alone carries no data connection. */
    *ret_reason = "the link that a data connection needs has ended";
    if (link == NULL) return is_connecting(peer) ? TL_DATA_CONNECTION_AWAIT : TL_DATA_CONNECTION_AVOID;
    *ret_reason = "the peer is of an older version, which fetches no puts";
    if (!tl_link_peer(link)->fetches_puts) return TL_DATA_CONNECTION_AVOID;
    *ret_reason = tl_data_connections_lasting_reason(&peer->data);
    return tl_data_connections_use(&peer->data, &unused);
}

/* Takes the first call that waits for nothing but its place; NULL: there is none. */
static struct tl_call_wait *next_waiting(struct tl_peer *peer)
{
    const char *unused;
    bool is_data_awaited = tl_peer_put_use(peer, &unused) == TL_DATA_CONNECTION_AWAIT;
    TL_LIST_FOREACH(&peer->links.calls.waiting, place)
    {
        struct tl_call_wait *wait = TL_CONTAINER_OF(place, struct tl_call_wait, place);
        if (wait->awaits_data && is_data_awaited) continue;
        tl_list_remove(place);
        return wait;
    }
    return NULL;
}

/* ------------------------------------------------------------------------------------------- the additional link -- */

/* Returns a link that calls can be made on; NULL: there is none yet. */
static struct tl_link *usable(const struct tl_peer *peer)
{
    struct tl_link *links[] = {peer->links.link, peer->links.calls.link};
    for (size_t i = 0; i < TL_ARRAY_COUNT(links); i++) {
        if (links[i] != NULL && tl_link_is_ours(links[i]) && tl_link_is_up(links[i])) return links[i];
    }
    return NULL;
}

static void link_up(struct tl_link *link)
{
    tl_peer_calls_go_on(tl_link_owner(link));
}

static void refuse(struct tl_peer *peer, const struct tl_error *reason)
{
    struct tl_list failed;
    struct tl_list *place;
    tl_list_init(&failed);
    tl_list_splice_back(&failed, &peer->links.calls.waiting);
    while ((place = tl_list_pop_front(&failed)) != NULL) {
        struct tl_call_wait *wait = TL_CONTAINER_OF(place, struct tl_call_wait, place);
        wait->failed(wait, reason);
    }
}

static void link_closed(struct tl_link *link, const struct tl_error *reason)
{
    struct tl_peer *peer = tl_link_owner(link);
    struct tl_error error;
    bool was_up = tl_link_peer(link)->incarnation != 0;
    peer->links.calls.link = NULL;
    if (was_up || usable(peer) != NULL) {
        tl_peer_calls_go_on(peer);
    } else {
        enum tl_status code = reason->code == TL_PERMISSION_DENIED ? reason->code : TL_UNAVAILABLE;
        tl_error_set(&error, code, "%s", reason->code != TL_OK ? reason->message : "the worker closes");
        refuse(peer, &error);
    }
}

static const struct tl_link_events link_events = {.up = link_up, .closed = link_closed};

static void open_link(struct tl_peer *peer)
{
    const struct tl_link_address address = {.address = peer->address, .expected_name = peer->name, .is_one_way = true};
    struct tl_error error;
    if (tl_link_open(peer->worker->control, &address, NULL, 0, &link_events, peer, &peer->links.calls.link, &error) ==
        TL_OK)
        return;
    peer->links.calls.link = NULL;
    refuse(peer, &error);
}

/* --------------------------------------------------------------------------------------------------------- calls -- */

/* Whether the peer has just refused a link because of who this worker is, so that none is tried yet. */
static bool is_refused(const struct tl_peer *peer)
{
    const struct peer_links *links = &peer->links;
    return links->state == TL_PEER_DOWN && links->reason.code == TL_PERMISSION_DENIED &&
           links->back_off.heap_place != 0;
}

static void next_round(struct tl_closure *closure)
{
    struct tl_peer *peer = TL_CONTAINER_OF(closure, struct tl_peer, links.calls.round_closure);
    struct peer_calls *calls = &peer->links.calls;
    struct tl_link *link = usable(peer);
    struct tl_call_wait *wait;
    if (tl_list_is_empty(&calls->waiting)) return;
    if (link == NULL && is_refused(peer)) {
        refuse(peer, &peer->links.reason);
        return;
    }
    if (peer->links.link == NULL) {
        tl_peer_want(peer);
    } else if (link == NULL && calls->link == NULL && tl_link_is_up(peer->links.link)) {
        open_link(peer);
    }
    while (link != NULL && calls->running_count < MAX_RUNNING && (wait = next_waiting(peer)) != NULL) {
        calls->running_count++;
        wait->is_running = true;
        wait->ready(wait, link);
    }
}

void tl_peer_calls_init(struct tl_peer *peer)
{
    tl_list_init(&peer->links.calls.waiting);
    tl_list_init(&peer->links.calls.round_closure.link);
    peer->links.calls.round_closure.run = next_round;
}

void tl_peer_calls_go_on(struct tl_peer *peer)
{
    if (!tl_list_is_linked(&peer->links.calls.round_closure.link))
        tl_loop_defer(peer->worker->loop, &peer->links.calls.round_closure);
}

void tl_peer_call_wait(struct tl_peer *peer, struct tl_call_wait *wait)
{
    wait->is_running = false;
    tl_list_push_back(&peer->links.calls.waiting, &wait->place);
    tl_peer_calls_go_on(peer);
}

void tl_peer_call_over(struct tl_peer *peer, struct tl_call_wait *wait)
{
    tl_list_remove(&wait->place);
    if (!wait->is_running) return;
    wait->is_running = false;
    peer->links.calls.running_count--;
    tl_peer_calls_go_on(peer);
}
