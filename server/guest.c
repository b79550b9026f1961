// SPDX-License-Identifier: Apache-2.0
/*
 * Guests: who opens a link and is no member of the cluster, as a client that pulls. They ask and are never asked; data
 * paths over their link are set up like those of a peer. A guest lives as long as its link.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "control/endpoint.h"
#include "server/data_paths.h"
#include "server/worker_internal.h"

struct guest {
    struct tl_list place; /* in worker->guests */
    struct tl_link *link;
    struct tl_data_paths data;
};

static void changed(void *owner)
{
    (void)owner;
}

static const struct tl_data_path_events data_path_events = {.changed = changed};

static void link_closed(struct tl_link *link, const struct tl_error *reason)
{
    (void)reason;
    struct guest *guest = tl_link_owner(link);
    tl_data_paths_end(&guest->data);
    tl_list_remove(&guest->place);
    free(guest);
}

static void path_message(struct tl_link *link, const struct tl_path_message *message)
{
    struct guest *guest = tl_link_owner(link);
    tl_data_paths_hear(&guest->data, link, message);
}

static const struct tl_link_events link_events = {.closed = link_closed, .path_message = path_message};

void tl_guest_welcome(struct tl_worker *worker, struct tl_link *link)
{
    struct guest *guest = calloc(1, sizeof(*guest));
    if (guest == NULL) {
        struct tl_error error;
        tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "%s has no memory for a client", worker->self.name);
        tl_link_close(link, &error);
        return;
    }
    guest->link = link;
    tl_list_push_back(&worker->guests, &guest->place);
    tl_data_paths_init(&guest->data, worker, "", &data_path_events, guest);
    tl_link_set_events(link, &link_events, guest);
    tl_data_paths_begin(&guest->data, link, false);
}

static bool is_elsewhere(const struct tl_identity *a, const struct tl_identity *b)
{
    struct tl_ip first, second;
    if (strcmp(a->name, b->name) != 0) return true;
    return tl_endpoint_ip(a->address, &first) && tl_endpoint_ip(b->address, &second) &&
           !tl_ip_is_equal(&first, &second);
}

bool tl_guest_has_incarnation(const struct tl_worker *worker, const struct tl_identity *who)
{
    TL_LIST_FOREACH(&worker->guests, place)
    {
        const struct tl_identity *other = tl_link_peer(TL_CONTAINER_OF(place, const struct guest, place)->link);
        if (other->incarnation == who->incarnation && is_elsewhere(other, who)) return true;
    }
    return false;
}

void tl_guests_evict(struct tl_worker *worker, uint64_t incarnation)
{
    struct tl_error reason;
    TL_LIST_FOREACH(&worker->guests, place)
    {
        struct tl_link *link = TL_CONTAINER_OF(place, struct guest, place)->link;
        if (tl_link_peer(link)->incarnation != incarnation) continue;
        tl_error_set(&reason, TL_UNAVAILABLE, "the incarnation belongs to a member of the cluster");
        tl_link_close(link, &reason);
    }
}
