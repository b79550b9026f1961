// SPDX-License-Identifier: Apache-2.0
/*
 * A request whose value is mapped read-only from the file that it lies in, so that no bytes are sent.
 *
 * Happy path: MAPPED says what the value is and where it lies in which file. The provider gives the file, and a tensor
 * around those bytes takes the place of a destination.
 *
 * Failure modes: when the provider does not give the file, or the value does not lie in it, the fetch begins once more
 * without the permission to map. It gets another handle, because the owner may still have the first one.
 */
#include "dataplane/engine/request_internal.h"
#include "tensor/mapped_tensor.h"

static enum tl_status open_value(struct tl_conn *conn, const struct tl_message *message, struct tl_tensor **ret_tensor)
{
    const struct tl_meta_data *meta_data = &message->meta_data;
    struct tl_mapped_file *file;
    struct tl_error error;
    enum tl_status status = tl_queue_pair_map(conn->pair, &message->destination, &file, &error);
    if (status != TL_OK) return status;
    status = tl_mapped_tensor_create(file, message->offset, meta_data->dtype, &meta_data->shape, ret_tensor, &error);
    tl_mapped_file_put(file);
    return status;
}

void request_map(struct request *request, const struct tl_message *message)
{
    struct tl_conn *conn = request->conn;
    struct tl_fetch *fetch = request->fetch;
    struct tl_tensor *tensor;
    if (open_value(conn, message, &tensor) != TL_OK) {
        request->mapping.is_refused = true;
        request->is_cancelled |= request->state == REQUEST_CANCELLING;
        return;
    }
    request->mapping.is_done = true;
    conn->engine->stats.tensors_mapped++;
    tl_fetch_take(fetch, tensor, message->step);
    const struct tl_meta_cached cached = {.meta_data = message->meta_data,
                                          .step = message->step,
                                          .is_published = message->is_published,
                                          .is_mapped = true};
    tl_asked_keys_expect(&conn->requests.keys, request->key_number, fetch->key, &cached);
}

const char *request_why_not_mapped(const struct request *request)
{
    if (!request->fetch->may_map) return "the file that it lies in cannot be mapped here";
    if (request->fetch->wants_checksum) return "not mapped: a checksum is wanted";
    if (!request->mapping.is_allowed) return "not mapped: only workers of one host can do that (local)";
    return "not mapped: it is small, lies in no published file, or its owner does not allow it (local.map)";
}

void request_ask_without_map(struct request *request)
{
    struct tl_conn *conn = request->conn;
    struct tl_fetch *fetch = request->fetch;
    request_release_memory(request);
    request_free(request);
    fetch->allocator = NULL;
    fetch->may_map = false;
    tl_conn_fetch(conn, fetch);
}
