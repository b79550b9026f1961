// SPDX-License-Identifier: Apache-2.0
/*
 * A request whose destination is on a device, over a provider whose peers can show memory of devices (docs/gpu.md).
 *
 * Happy path: REQUEST says that the receiver reads. SOURCE names memory of a device, which is imported, unless an
 * earlier value lay there; a copy from device to device takes the place of the reads of a card. When it is over, the
 * release goes to the owner. The value counts when the release has reached an owner that was alive: then the memory was
 * the value's until the copy was over.
 *
 * Failure modes: memory that cannot be imported is given back, and the owner writes the value through the pool, with
 * the reason. A copy that fails gives the request up. A cancel waits for the copy that runs, and so does the end of the
 * connection, since the copy writes into the destination.
 */
#include <stdlib.h>

#include "base/error.h"
#include "base/reason.h"
#include "dataplane/engine/request_internal.h"

/* A copy from imported memory to the destination of a request. */
struct request_import {
    struct request *request;
    uint64_t offset_bytes;        /* where the value begins in the memory */
    struct conn_import_wait wait; /* while it is being imported */
    struct tl_device_copy copy;
    struct conn_device_call call;
    const struct tl_error *failure; /* kept; NULL: none */
    struct tl_work release_work;
};

bool requests_may_import(const struct tl_conn *conn, const struct tl_fetch *fetch)
{
    const struct tl_engine_options *options = &conn->engine->options;
    return conn->pair->ops->find_memory != NULL && fetch->is_for_device && !fetch->wants_checksum &&
           !options->is_bounce_forced && !options->is_gpu_proxy_forced;
}

bool request_is_imported(const struct request *request)
{
    return request->has_source && request->conn->pair->ops->find_memory != NULL;
}

bool request_is_importing(const struct request *request)
{
    return request->placement->landing.import != NULL && request->placement->landing.import->is_running;
}

/* The owner writes the value instead. */
static void refuse(struct request *request, const struct tl_error *error)
{
    struct request_placement *placement = request->placement;
    placement->landing.import_refusal = tl_reason(error->message);
    placement->bounce_reason = placement->landing.import_refusal;
    request_return_source(request);
    request_use_bounce_buffer(request, NULL);
}

static void import_over(struct conn_import_wait *wait)
{
    struct request *request = TL_CONTAINER_OF(wait, struct request_import, wait)->request;
    struct conn_import *import = request->placement->landing.import;
    if (import->failure == NULL) {
        request_handle(request, REQUEST_EVENT_READY);
        return;
    }
    struct tl_error error = *import->failure;
    request_leave_import(request);
    refuse(request, &error);
}

void request_import(struct request *request)
{
    struct request_placement *placement = request->placement;
    struct tl_error error = request_out_of_memory;
    struct request_import *copied = calloc(1, sizeof(*copied));
    placement->landing.copied = copied;
    if (copied != NULL)
        placement->landing.import =
            conn_import_get(request->conn, &placement->source, placement->expected.meta_data.size_bytes,
                            tl_tensor_device(placement->kept), &copied->offset_bytes, &error);
    if (placement->landing.import == NULL) {
        request_leave_import(request);
        refuse(request, &error);
        return;
    }
    copied->request = request;
    if (placement->landing.import->is_running) {
        copied->wait.over = import_over;
        tl_list_push_back(&placement->landing.import->waiting, &copied->wait.link);
    } else {
        request_handle(request, REQUEST_EVENT_READY);
    }
}

void request_leave_import(struct request *request)
{
    struct request_placement *placement = request->placement;
    struct conn_import *import = placement->landing.import;
    if (import != NULL && import->is_running) tl_list_remove(&placement->landing.copied->wait.link);
    free(placement->landing.copied);
    placement->landing.copied = NULL;
    placement->landing.import = NULL;
    if (import != NULL) conn_import_put(import);
}

/* -------------------------------------------------------------------------------------------------------- copy -- */

/* The copy is over, and nothing touches the destination any more. */
static void copied_here(struct conn_device_call *call)
{
    struct request_import *copied = TL_CONTAINER_OF(call, struct request_import, call);
    struct request *request = copied->request;
    struct request_placement *placement = request->placement;
    struct tl_conn *conn = request->conn;
    const struct tl_error *failure = copied->failure;
    placement->landing.is_copy_running = false;
    copied->failure = NULL;
    placement->read_count--;
    if (failure != NULL) {
        struct tl_error error = *failure;
        tl_error_prefix(&error, "%s: ", request->fetch->key);
        request_set_result(request, &error);
        tl_error_drop(failure);
    }
    if (request->state == REQUEST_COPYING) {
        request_copy_rest(request);
    } else if (request->state == REQUEST_CANCELLING) {
        request_handle(request, REQUEST_EVENT_STOPPED);
    } else if (request->result != NULL) {
        request_handle(request, REQUEST_EVENT_CANCEL);
    } else {
        request->received_bytes = placement->expected.meta_data.size_bytes;
        conn->engine->stats.bytes_received += request->received_bytes;
        request_handle(request, REQUEST_EVENT_COMPLETE);
    }
    conn_pump_later(conn);
}

/* Thread: the device's. */
static void copy_over(struct tl_device_copy *copy, const struct tl_error *status)
{
    struct request_import *copied = TL_CONTAINER_OF(copy, struct request_import, copy);
    if (status->code != TL_OK) copied->failure = tl_error_keep(status);
    conn_device_call_post(&copied->call);
}

void request_copy_source(struct request *request)
{
    struct request_placement *placement = request->placement;
    struct request_import *copied = placement->landing.copied;
    const uint8_t *memory = tl_device_memory_data(placement->landing.import->memory);
    copied->copy = (struct tl_device_copy){.device = tl_tensor_device(placement->kept),
                                           .to = tl_tensor_data(placement->kept),
                                           .from = memory + copied->offset_bytes,
                                           .len_bytes = placement->expected.meta_data.size_bytes,
                                           .done = copy_over};
    placement->landing.is_copy_running = true;
    placement->read_count++;
    request->conn->engine->stats.memory_copied++;
    conn_device_call_init(&copied->call, request->conn, copied_here);
    tl_device_copy_start(&copied->copy);
    request_handle(request, REQUEST_EVENT_READ);
}

/* ----------------------------------------------------------------------------------------------------- release -- */

static void released(struct tl_work *work, enum tl_status status)
{
    struct request *request = TL_CONTAINER_OF(work, struct request_import, release_work)->request;
    if (status != TL_OK) return; /* the queue pair is about to be drained, and the request ends then */
    conn_space_freed(request->conn);
    request_handle(request, REQUEST_EVENT_RELEASED);
}

void request_release_import(struct request *request)
{
    static const struct tl_descriptor nowhere;
    struct tl_work *work = &request->placement->landing.copied->release_work;
    *work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = released};
    conn_post_write(request->conn, NULL, NULL, 0, &nowhere, 0, request->handle, work);
}
