// SPDX-License-Identifier: Apache-2.0
/*
 * The files that a worker publishes when it opens.
 *
 * Happy path: a file is mapped, and each of its tensors is published. On the host it is served from the mapping, and
 * the file is watched, because others may change it; for a card it is copied once into memory that the card can read.
 * Where the setting "device" names a GPU, each tensor is copied there, and the file is not needed afterwards.
 *
 * Failure modes: where the copy for a card cannot be made, the mapping is served, whose bytes are copied each time. A
 * file that cannot be read, or does not fit on the device, keeps the worker from opening.
 */
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "server/troubles.h"
#include "server/worker_internal.h"
#include "tensor/device.h"
#include "tensor/mapped_tensor.h"
#include "tensor/tensor_file.h"

/* -------------------------------------------------------------------------------------------------- on the host -- */

static void copy_for_card(struct tl_worker *worker, const char *path, const struct tl_named_tensor *named)
{
    struct tl_transport *transport = tl_transport_needing_regions(worker);
    struct tl_error error;
    if (transport == NULL || tl_transport_copy(transport, named->tensor, &error) == TL_OK) return;
    TL_LOG_AT_WARN("a tensor is served from its file, which the data plane copies each time", TL_STR("file", path),
                   TL_STR("tensor", named->name), TL_STR("reason", error.message));
}

/* Watches the file that the tensors lie in, which that of the first tells. */
static enum tl_status watch_file(struct tl_worker *worker, const struct tl_tensor_list *list,
                                 struct tl_error *ret_error)
{
    uint64_t offset;
    for (size_t t = 0; t < list->count; t++) {
        struct tl_mapped_file *file = tl_mapped_tensor_file(list->items[t].tensor, &offset);
        if (file != NULL) return tl_troubles_watch_file(worker->troubles, file, ret_error);
    }
    return TL_OK;
}

/* -------------------------------------------------------------------------------------------------- on a device -- */

/* Says which tensor does not fit, and what to do. */
static enum tl_status refuse(struct tl_device device, const char *path, const struct tl_named_tensor *named,
                             struct tl_error *error)
{
    char name[TL_DEVICE_TEXT_BYTES], size[32];
    const struct tl_error cause = *error;
    tl_device_format(device, name);
    tl_text_format_size(tl_tensor_size_bytes(named->tensor), size, sizeof(size));
    return tl_error_set(error, cause.code, "%s: tensor '%s' (%s) cannot be kept on %s: %s%s", path, named->name, size,
                        name, cause.message,
                        cause.code == TL_RESOURCE_EXHAUSTED
                            ? "; publish less there, free memory of the GPU, or set \"device\" to \"host\""
                            : "");
}

/* Replaces a tensor of a file by its copy on the device. Blocks: until the bytes are there. */
static enum tl_status move(struct tl_device device, const char *path, struct tl_named_tensor *named,
                           struct tl_error *ret_error)
{
    const struct tl_meta_data *meta_data = tl_tensor_meta_data(named->tensor);
    struct tl_tensor *tensor;
    enum tl_status status =
        tl_tensor_create_on(device, meta_data->dtype, meta_data->shape.rank, meta_data->shape.dims, &tensor, ret_error);
    if (status != TL_OK) return refuse(device, path, named, ret_error);
    tl_tensor_set_stream(tensor, TL_STREAM_NONE); /* nothing else has worked with its memory */
    tl_tensor_set_annotations(tensor, tl_tensor_annotations(named->tensor));
    status = tl_tensor_copy(tensor, named->tensor, ret_error);
    if (status != TL_OK) {
        tl_tensor_put(tensor);
        return refuse(device, path, named, ret_error);
    }
    tl_tensor_put(named->tensor);
    named->tensor = tensor;
    return TL_OK;
}

/* ---------------------------------------------------------------------------------------------------- publishing -- */

static enum tl_status publish_tensor(struct tl_worker *worker, const char *path, struct tl_named_tensor *named,
                                     struct tl_error *ret_error)
{
    uint64_t publication;
    if (worker->settings.device.kind == TL_DEVICE_HOST) {
        copy_for_card(worker, path, named);
    } else {
        enum tl_status status = move(worker->settings.device, path, named, ret_error);
        if (status != TL_OK) return status;
    }
    return tl_rendezvous_publish(worker->table, named->name, 0, named->tensor, &publication, ret_error);
}

enum tl_status tl_worker_publish_files(struct tl_worker *worker, struct tl_error *ret_error)
{
    for (size_t i = 0; worker->setup.task != NULL && i < worker->settings.publish_count; i++) {
        const char *path = worker->settings.publish[i];
        struct tl_tensor_list list;
        enum tl_status status = tl_tensor_file_read(path, &list, ret_error);
        if (status != TL_OK) return status;
        for (size_t t = 0; status == TL_OK && t < list.count; t++)
            status = publish_tensor(worker, path, &list.items[t], ret_error);
        if (status == TL_OK) status = watch_file(worker, &list, ret_error);
        tl_tensor_list_fini(&list);
        if (status != TL_OK) return status;
    }
    return TL_OK;
}

enum tl_status tl_worker_open_device(const struct tl_worker *worker, struct tl_error *ret_error)
{
    if (worker->setup.task == NULL || worker->settings.device.kind == TL_DEVICE_HOST) return TL_OK;
    struct tl_error cause;
    enum tl_status status = tl_device_open(worker->settings.device, &cause);
    if (status == TL_OK) return TL_OK;
    return tl_error_set(ret_error, status,
                        "\"device\": %s; set it to a GPU that tensorlane devices shows on this machine, or to \"host\"",
                        cause.message);
}
