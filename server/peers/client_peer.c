// SPDX-License-Identifier: Apache-2.0
/*
 * Client peers: processes that open a link and are no members of the cluster, such as a client that pulls. They send
 * requests and never receive any. Data connections over their link are set up like those of a peer. A client peer lives
 * as long as its link.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "control/endpoint.h"
#include "server/peers/data_connections.h"
#include "server/worker_internal.h"

struct client_peer {
    struct tl_list place; /* in worker->members.client_peers */
    struct tl_link *link;
    struct tl_data_connections data;
};

static void changed(void *owner)
{
    const struct client_peer *client_peer = owner;
    tl_put_fetches_go_on(client_peer->data.worker);
}

static const struct tl_data_connection_events data_connection_events = {.changed = changed};

static void link_closed(struct tl_link *link, const struct tl_error *reason)
{
    (void)reason;
    struct client_peer *client_peer = tl_link_owner(link);
    tl_data_connections_end(&client_peer->data);
    tl_data_connections_fini(&client_peer->data);
    tl_list_remove(&client_peer->place);
    free(client_peer);
}

static void connection_message(struct tl_link *link, const struct tl_connection_message *message)
{
    struct client_peer *client_peer = tl_link_owner(link);
    tl_data_connections_handle_message(&client_peer->data, link, message);
}

static const struct tl_link_events link_events = {.closed = link_closed, .connection_message = connection_message};

void tl_client_peer_add(struct tl_worker *worker, struct tl_link *link)
{
    struct client_peer *client_peer = calloc(1, sizeof(*client_peer));
    if (client_peer == NULL ||
        tl_data_connections_init(&client_peer->data, worker, "", &data_connection_events, client_peer) != TL_OK) {
        struct tl_error error;
        free(client_peer);
        tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "%s has no memory for a client", worker->self.name);
        tl_link_close(link, &error);
        return;
    }
    client_peer->link = link;
    tl_list_push_back(&worker->members.client_peers, &client_peer->place);
    tl_link_set_events(link, &link_events, client_peer);
    tl_data_connections_begin(&client_peer->data, link, false);
}

static bool is_elsewhere(const struct tl_identity *a, const struct tl_identity *b)
{
    struct tl_ip first, second;
    if (strcmp(a->name, b->name) != 0) return true;
    return tl_endpoint_ip(a->address, &first) && tl_endpoint_ip(b->address, &second) &&
           !tl_ip_is_equal(&first, &second);
}

bool tl_client_peer_has_incarnation(const struct tl_worker *worker, const struct tl_identity *who)
{
    TL_LIST_FOREACH(&worker->members.client_peers, place)
    {
        const struct tl_identity *other = tl_link_peer(TL_CONTAINER_OF(place, const struct client_peer, place)->link);
        if (other->incarnation == who->incarnation && is_elsewhere(other, who)) return true;
    }
    return false;
}

const struct tl_data_connections *tl_client_peers_find_data(const struct tl_worker *worker,
                                                            const struct tl_identity *caller, uint64_t incarnation)
{
    const struct tl_data_connections *data = NULL;
    TL_LIST_FOREACH(&worker->members.client_peers, place)
    {
        const struct client_peer *client_peer = TL_CONTAINER_OF(place, const struct client_peer, place);
        const struct tl_identity *who = tl_link_peer(client_peer->link);
        if (who->incarnation != incarnation || strcmp(who->certified, caller->certified) != 0) continue;
        data = tl_data_connections_sooner(data, &client_peer->data);
    }
    return data;
}

void tl_client_peers_evict(struct tl_worker *worker, const char *name, uint64_t incarnation)
{
    struct tl_error reason;
    TL_LIST_FOREACH(&worker->members.client_peers, place)
    {
        struct tl_link *link = TL_CONTAINER_OF(place, struct client_peer, place)->link;
        const struct tl_identity *who = tl_link_peer(link);
        if (who->incarnation != incarnation || (who->is_one_way && strcmp(who->name, name) == 0)) continue;
        tl_error_set(&reason, TL_UNAVAILABLE, "the incarnation belongs to a member of the cluster");
        tl_link_close(link, &reason);
    }
}
