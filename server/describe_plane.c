// SPDX-License-Identifier: Apache-2.0
/*
 * What a worker says of its data plane when it is asked how it is: the card, its port and how peers reach its memory.
 *
 * What a card is like was noted when it was opened; the state of its port is read from the kernel each time, since
 * cables are pulled. Without a data plane the reason is the transport's; when it was the limit of locked memory, that
 * is told apart, because the remedy has nothing to do with cards.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "server/plane.h"
#include "server/plane_choice.h"
#include "server/verbs_settings.h"
#include "server/worker_internal.h"

/* As the kernel numbers them in sysfs. */
static const char *const port_states[] = {"", "down", "waits for the subnet manager", "armed", "active"};

/* The state of the card's port now; "": not known. */
static const char *read_port_state(const struct tl_verbs_candidate *card)
{
    char path[256];
    unsigned state = 0;
    snprintf(path, sizeof(path), "/sys/class/infiniband/%s/ports/%u/state", card->device, card->port);
    FILE *file = fopen(path, "re");
    if (file == NULL) return "";
    if (fscanf(file, "%u", &state) != 1) state = 0;
    fclose(file);
    return state < TL_ARRAY_COUNT(port_states) ? port_states[state] : "";
}

enum tl_status tl_plane_describe(const struct tl_worker *worker, struct tl_description *description,
                                 struct tl_error *ret_error)
{
    static const struct tl_verbs_candidate no_card;
    const struct tl_plane *plane = worker->plane;
    if (plane == NULL && tl_verbs_settings_refusal(&worker->settings) != NULL) return TL_OK;
    const struct tl_verbs_candidate *card = plane != NULL ? &plane->card : &no_card;
    bool is_known = card->device[0] != '\0';
    bool lacks_memlock = plane == NULL && tl_plane_is_about_memlock(worker->plane_reason);
    const char *keys = plane == NULL ? "" : plane->options.engine.keys == TL_KEYS_REGION ? "region" : "window";
    struct tl_data_plane_description *to = calloc(1, sizeof(*to));
    description->data_plane = to;
    if (to != NULL) {
        to->memlock = strdup(lacks_memlock ? worker->plane_reason : "");
        to->device = strdup(is_known || plane == NULL ? card->device : plane->provider->name);
        to->port = card->port;
        to->gid_index = is_known && card->gid_index > 0 ? (uint32_t)card->gid_index : 0;
        to->gid = strdup(card->gid);
        to->gid_type = strdup(card->gid_type);
        to->interface = strdup(card->interface);
        to->port_state = strdup(is_known ? read_port_state(card) : "");
        to->link_layer = strdup(card->link_layer);
        to->mtu_bytes = (uint32_t)tl_min_u64(card->mtu_bytes, worker->settings.verbs.mtu_bytes);
        to->keys = strdup(keys);
        to->reason = strdup(plane != NULL ? plane->provider->reason : "");
        to->passed_over = strdup(plane != NULL ? plane->passed_over : "");
    }
    bool is_complete = to != NULL && to->memlock != NULL && to->device != NULL && to->gid != NULL &&
                       to->gid_type != NULL && to->interface != NULL && to->port_state != NULL &&
                       to->link_layer != NULL && to->keys != NULL && to->reason != NULL && to->passed_over != NULL;
    if (is_complete) return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the description of the data plane");
}
