// SPDX-License-Identifier: Apache-2.0
/*
 * What a worker reports about the GPUs that its process has opened: where each is, how far from the worker's card, and
 * how its tensors travel to other hosts. A worker that has used no GPU reports none, and nothing of CUDA is loaded for
 * the answer. Whether a card reaches a GPU is not tried for it either: what is known is reported.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tensorlane/path.h>

#include "base/error.h"
#include "base/reason.h"
#include "server/pci_place.h"
#include "server/worker_internal.h"
#include "tensor/device.h"

/* How tensors of one GPU travel, and why. */
struct travel {
    const char *path; /* "": not known yet */
    const char *reason;
    bool is_slower;
};

/* The slot of the transport over cards; NULL: this build has none. */
static const struct tl_transport_slot *find_cards(const struct tl_worker *worker)
{
    for (size_t i = 0; i < worker->data_plane.transport_count; i++)
        if (worker->data_plane.transports[i].source->describe_card != NULL) return &worker->data_plane.transports[i];
    return NULL;
}

static struct travel find_travel(const struct tl_transport_slot *slot, struct tl_device device)
{
    const char *direct = tl_path_name(TL_PATH_GPU_DIRECT), *proxy = tl_path_name(TL_PATH_GPU_PROXY);
    const char *why_not_read, *why_not_written;
    if (slot == NULL || slot->transport == NULL)
        return (struct travel){.path = tl_path_name(TL_PATH_GRPC), .reason = slot != NULL ? slot->reason : ""};
    const struct tl_transport *transport = slot->transport;
    const struct tl_engine_options *options = &transport->options.engine;
    if (options->is_gpu_proxy_forced) return (struct travel){.path = proxy, .reason = "gpu.proxy is set"};
    if (options->is_bounce_forced) return (struct travel){.path = proxy, .reason = "verbs.bounce is set"};
    if (!tl_memory_look_direct(transport->memory, device, options->keys, TL_REGION_READ, &why_not_read) ||
        !tl_memory_look_direct(transport->memory, device, options->keys, TL_REGION_WRITE, &why_not_written))
        return (struct travel){.path = "", .reason = "the card tries it with the first tensor"};
    if (why_not_read != NULL) return (struct travel){.path = proxy, .reason = why_not_read, .is_slower = true};
    if (why_not_written != NULL) {
        char reason[TL_ERROR_MESSAGE_BYTES];
        snprintf(reason, sizeof(reason), "when they are sent; received as %s: %.900s", proxy, why_not_written);
        return (struct travel){.path = direct, .reason = tl_reason(reason)};
    }
    return (struct travel){.path = direct, .reason = "the card reaches the GPU"};
}

static enum tl_status describe(const struct tl_worker *worker, const struct tl_description *description,
                               const struct tl_device_info *info, struct tl_gpu_description *to,
                               struct tl_error *ret_error)
{
    char name[TL_DEVICE_TEXT_BYTES];
    const struct tl_transport_slot *slot = find_cards(worker);
    const struct tl_device *kept = &worker->settings.device;
    const struct travel travel = find_travel(slot, info->device);
    bool has_card = slot != NULL && slot->transport != NULL && description->data_plane != NULL;
    const char *card = has_card ? description->data_plane->device : "";
    const char *distance =
        has_card ? tl_pci_distance_name(tl_pci_distance_to_card("/sys", info->pci_address, card)) : "";
    to->name = strdup(tl_device_format(info->device, name));
    to->model = strdup(info->name);
    to->pci_address = strdup(info->pci_address);
    to->is_lost = info->is_lost;
    to->is_kept_on = worker->setup.task != NULL && kept->kind == info->device.kind && kept->index == info->device.index;
    to->card = strdup(card);
    to->distance = strdup(distance);
    to->path = strdup(travel.path);
    to->reason = strdup(travel.reason);
    to->is_slower = travel.is_slower;
    if (to->name != NULL && to->model != NULL && to->pci_address != NULL && to->card != NULL && to->distance != NULL &&
        to->path != NULL && to->reason != NULL)
        return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the description of GPUs");
}

enum tl_status tl_transports_describe_gpus(const struct tl_worker *worker, struct tl_description *description,
                                           struct tl_error *ret_error)
{
    struct tl_device_info *infos;
    size_t count;
    enum tl_status status = tl_device_list_open(&infos, &count, ret_error);
    if (status != TL_OK) return status;
    if (count > 0) description->gpus = calloc(count, sizeof(*description->gpus));
    if (count > 0 && description->gpus == NULL)
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the description of GPUs");
    for (size_t i = 0; i < count && status == TL_OK; i++)
        status = describe(worker, description, &infos[i], &description->gpus[description->gpu_count++], ret_error);
    free(infos);
    return status;
}
