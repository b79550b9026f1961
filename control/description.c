// SPDX-License-Identifier: Apache-2.0
/* Frees what workers say about themselves and about their tensors. */
#include <stdlib.h>
#include <string.h>

#include "control/control.h"

static void fini_data_plane(struct tl_data_plane_description *data_plane)
{
    if (data_plane == NULL) return;
    free(data_plane->memlock);
    free(data_plane->device);
    free(data_plane->gid);
    free(data_plane->gid_type);
    free(data_plane->interface);
    free(data_plane->port_state);
    free(data_plane->link_layer);
    free(data_plane->keys);
    free(data_plane->reason);
    free(data_plane->passed_over);
    free(data_plane->not_tried);
    free(data_plane);
}

static void fini_gpus(struct tl_description *description)
{
    for (size_t i = 0; i < description->gpu_count; i++) {
        const struct tl_gpu_description *gpu = &description->gpus[i];
        free(gpu->name);
        free(gpu->model);
        free(gpu->pci_address);
        free(gpu->card);
        free(gpu->distance);
        free(gpu->path);
        free(gpu->reason);
    }
    free(description->gpus);
}

static void fini_own_state(struct tl_description *description)
{
    for (size_t i = 0; i < description->setting_count; i++) {
        free(description->settings[i].path);
        free(description->settings[i].value);
    }
    free(description->settings);
    for (size_t i = 0; i < description->listen_count; i++)
        free(description->listens[i]);
    free(description->listens);
    free(description->host_name);
    for (size_t i = 0; i < description->trouble_count; i++) {
        free(description->troubles[i].what);
        free(description->troubles[i].reason);
        free(description->troubles[i].remedy);
    }
    free(description->troubles);
    fini_gpus(description);
    free(description->reason);
    free(description->remedy);
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
        free(description->peers[i].address);
        free(description->peers[i].host_name);
    }
    free(description->peers);
    for (size_t i = 0; i < description->counter_count; i++)
        free(description->counters[i].name);
    free(description->counters);
    fini_data_plane(description->data_plane);
    fini_own_state(description);
    memset(description, 0, sizeof(*description));
}
