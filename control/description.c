// SPDX-License-Identifier: Apache-2.0
/* The ends of what workers tell of themselves and of their tensors. */
#include <stdlib.h>
#include <string.h>

#include "control/control.h"

static void fini_data_plane(struct tl_data_plane_description *plane)
{
    if (plane == NULL) return;
    free(plane->memlock);
    free(plane->device);
    free(plane->gid);
    free(plane->gid_type);
    free(plane->interface);
    free(plane->port_state);
    free(plane->link_layer);
    free(plane->keys);
    free(plane->reason);
    free(plane->passed_over);
    free(plane->not_tried);
    free(plane);
}

void tl_description_fini(struct tl_description *description)
{
    free(description->job);
    free(description->software_version);
    for (size_t i = 0; i < description->transport_count; i++) {
        free(description->transports[i].name);
        free(description->transports[i].reason);
    }
    free(description->transports);
    for (size_t i = 0; i < description->peer_count; i++) {
        free(description->peers[i].name);
        free(description->peers[i].state);
        free(description->peers[i].transport);
        free(description->peers[i].reason);
    }
    free(description->peers);
    for (size_t i = 0; i < description->counter_count; i++)
        free(description->counters[i].name);
    free(description->counters);
    fini_data_plane(description->data_plane);
    memset(description, 0, sizeof(*description));
}

void tl_listing_fini(struct tl_listing *listing)
{
    for (size_t i = 0; i < listing->count; i++) {
        free(listing->items[i].key);
        tl_annotations_put(listing->items[i].annotations);
    }
    free(listing->items);
    memset(listing, 0, sizeof(*listing));
}
