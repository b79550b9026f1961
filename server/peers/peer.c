// SPDX-License-Identifier: Apache-2.0
/*
 * Peers: the tasks of the cluster as this worker sees them, and what is asked of them.
 *
 * A peer is reached by its link (server/peers/peer_link.c) and by the data connections over it
 * (server/peers/data_connections.h), each with its own state. A request takes the first data connection that is up,
 * waits while one is being set up for the first time, and takes the link when none can be used. Where "rdma": "require"
 * forbids the link, it fails with the reason.
 *
 * The tasks of the configuration are peers for as long as the worker is open. What a program adds is in added_peer.c.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "server/peers/peer_internal.h"
#include "server/peers/prober.h"
#include "server/transports/transports.h"
#include "server/peers/session.h"
#include "tensor/part.h"

/* No more of the requests that wait for a peer are sent in one round. */
#define ROUND_REQUESTS 512

/* ---------------------------------------------------------------------------------------------------- requests -- */

static void refused(struct tl_closure *closure)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(closure, struct tl_peer_request, closure);
    struct tl_error error;
    char where[TL_MAX_NAME_BYTES + 8];
    snprintf(where, sizeof(where), "from %s", request->peer->name);
    if (request->is_probe) {
        tl_error_set(&error, TL_UNAVAILABLE, "%s", request->fetch.path_reason);
    } else {
        tl_transports_require(request->peer->worker, TL_UNAVAILABLE, where, request->fetch.path_reason, &error);
    }
    request->fetch.is_final = true;
    request->fetch.ops->done(&request->fetch, &error);
}

static void refuse(struct tl_peer_request *request, const char *reason)
{
    request->carrier = TL_CARRIER_REFUSAL;
    request->fetch.path_reason = reason;
    request->closure.run = refused;
    tl_loop_defer(request->peer->worker->loop, &request->closure);
}

static void not_subscribed(struct tl_closure *closure)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(closure, struct tl_peer_request, closure);
    struct tl_error error;
    tl_error_set(&error, TL_UNIMPLEMENTED,
                 "%s is of an older version, which knows no subscriptions; receive %s step by step",
                 request->peer->name, request->fetch.key);
    request->fetch.is_final = true;
    request->fetch.ops->done(&request->fetch, &error);
}

static void knows_no_parts(struct tl_closure *closure)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(closure, struct tl_peer_request, closure);
    struct tl_error error;
    tl_error_set(&error, TL_UNIMPLEMENTED,
                 "%s is of an older version, which knows no parts of tensors; receive the whole of %s",
                 request->peer->name, tl_part_key(request->fetch.key));
    request->fetch.is_final = true;
    request->fetch.ops->done(&request->fetch, &error);
}

static void peer_is_gone(struct tl_closure *closure)
{
    struct tl_peer_request *request = TL_CONTAINER_OF(closure, struct tl_peer_request, closure);
    request->fetch.is_final = true;
    request->fetch.ops->done(&request->fetch, &request->peer->added->gone);
}

/* Refuses a request to a peer that was removed, or whose process is gone for ever. */
static void refuse_gone(struct tl_peer_request *request)
{
    request->carrier = TL_CARRIER_REFUSAL;
    request->closure.run = peer_is_gone;
    tl_loop_defer(request->peer->worker->loop, &request->closure);
}

/* Refuses what a peer of an older version would take for another request. */
static void refuse_unknown(struct tl_peer_request *request, void (*tell)(struct tl_closure *closure))
{
    request->carrier = TL_CARRIER_REFUSAL;
    request->closure.run = tell;
    tl_loop_defer(request->peer->worker->loop, &request->closure);
}

static void send_on_link(struct tl_link *link, struct tl_peer_request *request, const char *reason)
{
    request->link = link;
    request->carrier = TL_CARRIER_LINK;
    request->fetch.path_reason = reason;
    tl_link_fetch(link, &request->fetch);
}

/* Sends the request of a probe on the connection that carries requests, or refuses it when there is none. Returns false
 * when it must wait. */
static bool dispatch_probe(struct tl_peer *peer, struct tl_peer_request *request)
{
    const struct tl_data_connection *best = tl_data_connections_best(&peer->data);
    if (best != NULL && tl_link_peer(peer->links.link)->serves_probes) {
        tl_session_fetch(best->session, request);
    } else if (tl_data_connections_are_judged(&peer->data)) {
        refuse(request, tl_data_connections_lasting_reason(&peer->data));
    } else {
        return false;
    }
    return true;
}

/* Sends a request on the best connection. Returns false when it must wait. */
static bool dispatch(struct tl_peer *peer, struct tl_peer_request *request)
{
    struct tl_link *link = peer->links.link;
    if (link == NULL || !tl_link_is_up(link)) return false;
    if (request->is_probe) return dispatch_probe(peer, request);
    if (tl_fetch_subscription(&request->fetch) != 0 && !tl_link_peer(link)->serves_subscriptions) {
        refuse_unknown(request, not_subscribed);
        return true;
    }
    if (tl_part_is_name(request->fetch.key) && !tl_link_peer(link)->serves_parts) {
        refuse_unknown(request, knows_no_parts);
        return true;
    }
    bool is_required = peer->worker->data_plane.is_transport_required;
    const struct tl_data_connection *connection;
    switch (tl_data_connections_use(&peer->data, &connection)) {
    case TL_DATA_CONNECTION_TAKE:
        tl_session_fetch(connection->session, request);
        return true;
    case TL_DATA_CONNECTION_AWAIT:
        return false;
    case TL_DATA_CONNECTION_AVOID:
        break;
    }
    if (is_required) {
        refuse(request, tl_data_connections_lasting_reason(&peer->data));
    } else {
        send_on_link(link, request, tl_data_connections_lasting_reason(&peer->data));
    }
    return true;
}

void tl_peer_send_waiting(struct tl_peer *peer)
{
    size_t sent_count = 0;
    if (tl_list_is_linked(&peer->round_closure.link)) return; /* its turn comes */
    TL_LIST_FOREACH_SAFE(&peer->requests, place)
    {
        struct tl_peer_request *request = TL_CONTAINER_OF(place, struct tl_peer_request, closure.link);
        if (sent_count == ROUND_REQUESTS) {
            tl_loop_defer(peer->worker->loop, &peer->round_closure);
            return;
        }
        tl_list_remove(place);
        if (dispatch(peer, request)) {
            sent_count++;
            continue;
        }
        tl_list_insert_before(place_next, place);
        if (!request->is_probe) return;
    }
}

/* Others have had their turn. */
static void next_round(struct tl_closure *closure)
{
    tl_peer_send_waiting(TL_CONTAINER_OF(closure, struct tl_peer, round_closure));
}

void tl_peer_request_init(struct tl_peer_request *request, const struct tl_request_ops *ops)
{
    *request = (struct tl_peer_request){.is_probe = false};
    tl_fetch_init(&request->fetch, &ops->on_loop);
    tl_list_init(&request->closure.link);
}

void tl_peer_fetch(struct tl_peer *peer, struct tl_peer_request *request)
{
    request->peer = peer;
    request->carrier = TL_CARRIER_NONE;
    request->fetch.path_reason = "";
    if (peer->added != NULL && peer->added->gone.code != TL_OK) {
        refuse_gone(request);
        return;
    }
    tl_list_push_back(&peer->requests, &request->closure.link);
    if (peer->links.link != NULL && tl_link_is_up(peer->links.link)) {
        tl_peer_send_waiting(peer);
    } else {
        tl_peer_want(peer);
    }
}

void tl_peer_fetch_on_link(struct tl_peer *peer, struct tl_peer_request *request, const char *reason)
{
    struct tl_link *link = peer->links.link;
    request->fetch.is_rerouted = false;
    bool is_understood = link != NULL && (!tl_part_is_name(request->fetch.key) || tl_link_peer(link)->serves_parts);
    if (is_understood && tl_link_is_up(link)) {
        send_on_link(link, request, reason);
    } else {
        tl_peer_fetch(peer, request);
    }
}

bool tl_peer_cancel(struct tl_peer_request *request)
{
    if (request->carrier == TL_CARRIER_SESSION) {
        tl_session_cancel(request);
        return false;
    }
    if (request->carrier == TL_CARRIER_LINK) {
        request->carrier = TL_CARRIER_NONE;
        return tl_link_cancel(request->link, &request->fetch);
    }
    /* It is in the peer's list, or deferred. */
    tl_list_remove(&request->closure.link);
    request->carrier = TL_CARRIER_NONE;
    return true;
}

void tl_peer_fetch_done(struct tl_peer_request *request)
{
    request->carrier = TL_CARRIER_NONE;
}

void tl_peer_answered(struct tl_peer *peer, uint64_t incarnation, uint64_t number)
{
    if (incarnation != peer->incarnation) return;
    tl_peer_remember_received(peer, &number, 1);
    tl_peer_acknowledge(peer);
}

static void data_connection_changed(void *owner)
{
    tl_peer_send_waiting(owner);
    tl_peer_calls_go_on(owner);
    tl_put_fetches_go_on(((const struct tl_peer *)owner)->worker);
}

static void unconfirmed(void *owner, uint64_t incarnation, const uint64_t *numbers, size_t count)
{
    struct tl_peer *peer = owner;
    if (incarnation != peer->incarnation) return;
    tl_peer_remember_received(peer, numbers, count);
    tl_peer_acknowledge(peer);
}

static const struct tl_data_connection_events data_connection_events = {.changed = data_connection_changed,
                                                                        .unconfirmed = unconfirmed};

/* ----------------------------------------------------------------------------------------------------- members -- */

struct tl_peer *tl_peer_create(struct tl_worker *worker, const char *name, const char *address)
{
    struct tl_peer *peer = calloc(1, sizeof(*peer));
    if (peer == NULL) return NULL;
    peer->worker = worker;
    snprintf(peer->name, sizeof(peer->name), "%s", name);
    snprintf(peer->address, sizeof(peer->address), "%s", address);
    peer->is_self = strcmp(name, worker->self.name) == 0;
    if (peer->is_self) peer->incarnation = worker->self.incarnation;
    if (tl_peer_link_init(peer) != TL_OK) goto fail;
    if (tl_data_connections_init(&peer->data, worker, peer->name, &data_connection_events, peer) != TL_OK) {
        tl_peer_link_fini(peer);
        goto fail;
    }
    tl_peer_calls_init(peer);
    tl_list_init(&peer->requests);
    tl_list_init(&peer->round_closure.link);
    peer->round_closure.run = next_round;
    return peer;
fail:
    free(peer);
    return NULL;
}

void tl_peer_destroy(struct tl_peer *peer)
{
    tl_data_connections_end(&peer->data);
    TL_CHECK(tl_list_is_empty(&peer->requests) && peer->links.link == NULL && peer->links.opening == NULL);
    TL_CHECK(tl_list_is_empty(&peer->links.calls.waiting) && peer->links.calls.link == NULL);
    tl_data_connections_fini(&peer->data);
    tl_peer_link_fini(peer);
    tl_list_remove(&peer->round_closure.link);
    tl_list_remove(&peer->links.calls.round_closure.link);
    tl_origin_fini(&peer->origin);
    tl_numbers_fini(&peer->received);
    tl_numbers_fini(&peer->given_up);
    /* When the worker closes, it may wait in the loop to free the peer. */
    if (peer->added != NULL) tl_list_remove(&peer->added->free_closure.link);
    if (peer->added != NULL) tl_list_remove(&peer->added->ending.closure.link);
    free(peer->added);
    free(peer);
}

static enum tl_status add_member(struct tl_worker *worker, const char *name, const char *address,
                                 struct tl_error *ret_error)
{
    struct tl_peer *peer = tl_peer_create(worker, name, address);
    if (peer == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for peer %s", name);
    enum tl_status status = tl_origin_init(&peer->origin, address, ret_error);
    if (status != TL_OK) {
        tl_peer_destroy(peer);
        return status;
    }
    size_t index = worker->members.peer_count++;
    worker->members.peers[index] = peer;
    /* The upper half is a generation, so that the id of a removed peer never names its successor. */
    peer->id = (UINT64_C(1) << 32) | (index + 1);
    return TL_OK;
}

static enum tl_status add_members(struct tl_worker *worker, struct tl_error *ret_error)
{
    const struct worker_setup *setup = &worker->setup;
    if (setup->task == &setup->own_task) return add_member(worker, setup->own_name, setup->address, ret_error);
    enum tl_status status = TL_OK;
    for (size_t i = 0; status == TL_OK && i < setup->config->task_count; i++) {
        const struct tl_config_task *task = &setup->config->tasks[i];
        status = add_member(worker, task->name, task->address, ret_error);
    }
    return status;
}

enum tl_status tl_peers_create(struct tl_worker *worker, struct tl_error *ret_error)
{
    size_t count = worker->setup.config->task_count + 1; /* a worker without a cluster is a peer of itself */
    tl_list_init(&worker->members.removed_peers);
    enum tl_status status = tl_admission_init(worker, ret_error);
    if (status != TL_OK) return status;
    worker->members.peers = calloc(count, sizeof(*worker->members.peers));
    if (worker->members.peers == NULL) {
        tl_admission_fini(worker);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %zu peers", count);
    }
    enum tl_status added = add_members(worker, ret_error);
    tl_added_peers_init(&worker->members.added, worker->members.peer_count);
    return added;
}

void tl_peers_address_known(struct tl_worker *worker)
{
    struct tl_peer *self = worker->members.peers[0];
    snprintf(self->address, sizeof(self->address), "%s", worker->setup.address);
}

void tl_peers_destroy(struct tl_worker *worker)
{
    tl_prober_fini(worker);
    tl_added_peers_destroy(worker);
    for (size_t i = 0; i < worker->members.peer_count; i++)
        tl_peer_destroy(worker->members.peers[i]);
    free(worker->members.peers);
    tl_admission_fini(worker);
}

void tl_peers_start(struct tl_worker *worker)
{
    if (worker->settings.connect != TL_CONNECT_EAGER || worker->setup.task == NULL) return;
    for (size_t i = 0; i < worker->members.peer_count; i++) {
        worker->members.peers[i]->is_eager = true;
        tl_peer_want(worker->members.peers[i]);
    }
}

void tl_peers_stop(struct tl_worker *worker)
{
    struct tl_peer *peer;
    for (size_t place = 0; (peer = tl_peers_next(worker, &place)) != NULL;)
        tl_timers_disarm(tl_loop_timers(worker->loop), &peer->links.back_off);
    tl_peer_check_waits(worker);
    tl_prober_stop(worker);
}

const struct tl_data_connections *tl_peers_find_data(const struct tl_worker *worker, const struct tl_identity *caller,
                                                     uint64_t incarnation)
{
    const struct tl_data_connections *data = tl_client_peers_find_data(worker, caller, incarnation);
    struct tl_peer *peer;
    for (size_t place = 0; (peer = tl_peers_next(worker, &place)) != NULL;) {
        const struct tl_link *link = peer->links.link;
        if (peer->incarnation != incarnation || link == NULL) continue;
        /* With certificates the call and the link have the same one. */
        if (strcmp(tl_link_peer(link)->certified, caller->certified) != 0) continue;
        data = tl_data_connections_sooner(&peer->data, data);
    }
    return data;
}

struct tl_peer *tl_peer_by_name(const struct tl_worker *worker, const char *name)
{
    for (size_t i = 0; i < worker->members.peer_count; i++) {
        if (strcmp(worker->members.peers[i]->name, name) == 0) return worker->members.peers[i];
    }
    return NULL;
}

/* A task of the configuration; NULL: it is none. Thread: any. */
static struct tl_peer *configured_by_id(const struct tl_worker *worker, tl_peer_id id)
{
    uint64_t index = (id & UINT32_MAX) - 1;
    if (index >= worker->members.peer_count || worker->members.peers[index]->id != id) return NULL;
    return worker->members.peers[index];
}

struct tl_peer *tl_peer_by_id(const struct tl_worker *worker, tl_peer_id id)
{
    struct tl_peer *peer = configured_by_id(worker, id);
    const struct tl_added *added = peer == NULL ? tl_added_peers_by_id(&worker->members.added, id) : NULL;
    return added != NULL ? added->peer : peer;
}

struct tl_peer *tl_peer_acquire(struct tl_worker *worker, tl_peer_id id)
{
    struct tl_peer *peer = configured_by_id(worker, id);
    if (peer != NULL) return peer;
    tl_added_peers_lock(&worker->members.added);
    const struct tl_added *added = tl_added_peers_by_id(&worker->members.added, id);
    if (added != NULL) tl_peer_retain(peer = added->peer);
    tl_added_peers_unlock(&worker->members.added);
    return peer;
}

struct tl_peer *tl_peers_next(const struct tl_worker *worker, size_t *place)
{
    size_t count = worker->members.peer_count;
    if (*place < count) return worker->members.peers[(*place)++];
    size_t slot = *place - count;
    const struct tl_added *added = tl_added_peers_next(&worker->members.added, &slot);
    *place = count + slot;
    return added != NULL ? added->peer : NULL;
}

const char *tl_peer_transport(const struct tl_peer *peer)
{
    if (peer->is_self) return "self";
    const struct tl_data_connection *connection = tl_data_connections_best(&peer->data);
    return connection != NULL ? connection->slot->source->name : "grpc";
}

bool tl_peer_is_self(const struct tl_peer *peer)
{
    return peer->is_self;
}

bool tl_peer_is_gone(const struct tl_peer *peer, struct tl_error *ret_reason)
{
    if (peer->added == NULL || peer->added->gone.code == TL_OK) return false;
    *ret_reason = peer->added->gone;
    return true;
}

const char *tl_peer_name(const struct tl_peer *peer)
{
    return peer->name;
}

const char *tl_peer_copy_name(const struct tl_peer *peer, char ret_name[TL_MAX_NAME_BYTES])
{
    struct tl_added_peers *added = &peer->worker->members.added;
    tl_added_peers_lock(added);
    snprintf(ret_name, TL_MAX_NAME_BYTES, "%s", peer->name);
    tl_added_peers_unlock(added);
    return ret_name;
}

uint64_t tl_peer_incarnation(const struct tl_peer *peer)
{
    return peer->incarnation;
}

const char *tl_peer_state_name(enum tl_peer_state state)
{
    static const char *const names[] = {"idle", "connecting", "up", "down"};
    return names[state];
}

void tl_peer_format_state(const struct tl_peer *peer, char *buffer, size_t capacity)
{
    const struct peer_links *links = &peer->links;
    const char *reason = links->state != TL_PEER_UP ? links->reason.message : "";
    snprintf(buffer, capacity, "%s%s%.700s", tl_peer_state_name(links->state), reason[0] != '\0' ? ": " : "", reason);
}
