// SPDX-License-Identifier: Apache-2.0
/*
 * Guests: who opens a link and is no member of the cluster, as a client that pulls. They ask and are never asked; data
 * paths over their link are set up like those of a peer. A guest lives as long as its link.
 */
#include <stdlib.h>

#include "base/log.h"
#include "server/data_paths.h"
#include "server/worker_internal.h"

struct guest {
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
        TL_LOG_AT_WARN("no memory for a data path to a client");
        return;
    }
    tl_data_paths_init(&guest->data, worker, "", &data_path_events, guest);
    tl_link_set_events(link, &link_events, guest);
    tl_data_paths_begin(&guest->data, link, false);
}
