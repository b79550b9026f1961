// SPDX-License-Identifier: Apache-2.0
/*
 * A request whose destination is on a device (docs/gpu.md).
 *
 * Happy path: a new destination is allocated by a thread of the device. Where the card may write the device, the peer
 * writes the destination, or its owner's memory is read into it, and the CPU copies nothing. Otherwise the peer writes
 * a bounce buffer, and what has come goes on to the device in pieces (tensor/piece.h), one at a time, while the rest
 * arrives. When all bytes are on the device and a checksum is wanted, they are read back in pieces, so that it covers
 * what the device holds.
 *
 * Failure modes: an allocation that fails ends the request; before it has asked, the next value may still need less. A
 * copy that fails gives the request up, with its error. Whatever ends a request, the fetch is not done before the
 * device has let go of the destination. When the pool can never have a block for a bounce buffer, the fetch may travel
 * over the link.
 */

#include "base/copy.h"
#include "base/error.h"
#include "base/reason.h"
#include "dataplane/engine/request_internal.h"
#include "tensor/allocation.h"
#include "tensor/piece.h"

static const char reason_checksum[] = "its owner has it on the host, or a CPU makes the checksum that is wanted";
static const char reason_not_shown[] = "its owner has it on the host, or could not show the memory of its GPU";
static const char reason_proxy_forced[] = "no card accesses the memory of GPUs (gpu.proxy)";

/* ------------------------------------------------------------------------------------------------------ memory -- */

/* The memory of the destination is there, or never will be. */
static void allocated(void *context, struct tl_tensor *tensor, const struct tl_error *status)
{
    struct request *request = context;
    struct tl_conn *conn = request->conn;
    struct tl_error error = *status;
    request->placement->landing.allocation = NULL;
    request->placement->landing.allocated = tensor;
    request_end_limit(request);
    conn->requests.placing.request = request;
    if (error.code != TL_OK) tl_error_prefix(&error, "tensor '%s': ", request->fetch->key);
    if (error.code == TL_OK && tl_fetch_place(request->fetch, &error) == TL_OK) {
        request_prepare_memory(request);
    } else if (!request->is_asked) { /* the value may be another one than last time */
        request_drop_place(request);
        request_handle(request, REQUEST_EVENT_READY);
    } else {
        request_fail(request, &error);
    }
}

enum tl_status request_create_on_device(struct request *request, struct tl_device device,
                                        const struct tl_meta_data *meta_data, struct tl_tensor **ret_tensor,
                                        struct tl_error *ret_error)
{
    struct request_placement *placement = request->placement;
    const struct tl_allocation_options options = {.device = device,
                                                  .meta_data = meta_data,
                                                  .post = conn_post_to_reactor,
                                                  .loop = request->conn->engine->reactor,
                                                  .done = allocated,
                                                  .context = request};
    if (meta_data->size_bytes == 0) return tl_tensor_create_in(device, meta_data, NULL, ret_tensor, ret_error);
    *ret_tensor = placement->landing.allocated;
    placement->landing.allocated = NULL;
    if (*ret_tensor != NULL) return TL_OK;
    placement->landing.allocation = tl_allocation_start(&options);
    if (placement->landing.allocation == NULL) return tl_error_copy(ret_error, &request_out_of_memory);
    request_limit_wait(request);
    return TL_OK;
}

void request_drop_allocation(struct request *request)
{
    tl_allocation_put(request->placement->landing.allocation);
    request->placement->landing.allocation = NULL;
}

/* Why the peer cannot write the destination itself; NULL: it can. */
static const char *why_not_direct(const struct request *request)
{
    const struct request_placement *placement = request->placement;
    const struct tl_conn *conn = request->conn;
    const struct tl_engine *engine = conn->engine;
    if (engine->options.is_bounce_forced) return request_reason_forced;
    if (engine->options.is_gpu_proxy_forced) return reason_proxy_forced;
    if (placement->landing.import_refusal != NULL) return placement->landing.import_refusal;
    if (conn->pair->ops->find_memory != NULL)
        return request->fetch->wants_checksum ? reason_checksum : reason_not_shown;
    if (conn->pair->outside_refusal != NULL) return conn->pair->outside_refusal;
    const char *why_not =
        tl_memory_why_not_written(engine->memory, tl_tensor_device(placement->kept), engine->options.keys);
    if (why_not == NULL && conn_is_small(conn, placement->kept)) why_not = request_reason_small;
    return why_not;
}

void request_prepare_on_device(struct request *request)
{
    struct request_placement *placement = request->placement;
    placement->landing.is_on_device = true;
    if (request_is_imported(request)) {
        request_import(request);
        return;
    }
    placement->bounce_reason = why_not_direct(request);
    if (placement->bounce_reason != NULL) {
        request_use_bounce_buffer(request, NULL);
    } else if (tl_memory_pin(request->conn->memory, placement->kept, TL_REGION_WRITE, &placement->pin)) {
        request_handle(request, REQUEST_EVENT_READY);
    } else {
        request_register_destination(request);
    }
}

void request_reroute(struct request *request, const struct tl_error *error)
{
    /* The owner keeps the value for another request, and not for this one. */
    if (request->has_source) request_return_source(request);
    request->fetch->is_rerouted = true;
    request->fetch->path_reason = tl_reason(error->message);
    request->conn->engine->stats.rerouted++;
}

/* ------------------------------------------------------------------------------------------------------ copies -- */

static void piece_came(void *context, struct tl_piece *piece, const struct tl_error *status);

/* Starts a piece at this byte; one that goes to the device leaves from `host`, or without one from a block. Without
 * memory the request has its result. */
static void start_piece(struct request *request, uint64_t offset_bytes, uint64_t left_bytes, struct tl_tensor *host,
                        struct tl_piece *(*start)(const struct tl_piece_options *options))
{
    struct request_placement *placement = request->placement;
    const struct tl_piece_options options = {
        .tensor = request->fetch->destination,
        .offset_bytes = offset_bytes,
        .len_bytes = left_bytes < TL_STAGING_BLOCK_BYTES ? left_bytes : TL_STAGING_BLOCK_BYTES,
        .host = host,
        .host_offset_bytes = offset_bytes,
        .post = conn_post_to_reactor,
        .loop = request->conn->engine->reactor,
        .notify = piece_came,
        .context = request,
    };
    placement->landing.is_piece_filled = host != NULL;
    placement->landing.piece = start(&options);
    if (placement->landing.piece == NULL) request_set_result(request, &request_out_of_memory);
}

/* Puts bytes of the bounce buffer into the block of the piece, and starts its copy. */
static void fill(struct request *request)
{
    struct request_placement *placement = request->placement;
    struct tl_engine *engine = request->conn->engine;
    const uint8_t *source = (const uint8_t *)tl_tensor_data(placement->bounce_buffer) + request->fetch->received_bytes;
    uint64_t len_bytes = tl_piece_len_bytes(placement->landing.piece);
    tl_copy(tl_piece_data(placement->landing.piece), source, (size_t)len_bytes);
    engine->stats.bytes_bounced += len_bytes;
    tl_memory_count_bounce(engine->memory, len_bytes);
    placement->landing.is_piece_filled = true;
    tl_piece_copy(placement->landing.piece);
}

void request_copy_on(struct request *request)
{
    struct request_placement *placement = request->placement;
    const struct tl_fetch *fetch = request->fetch;
    uint64_t left_bytes = request->received_bytes - fetch->received_bytes;
    if (left_bytes == 0 || placement->landing.piece != NULL || request->result != NULL) return;
    struct tl_tensor *bytes = placement->bounce_buffer;
    struct tl_tensor *host = tl_memory_is_pinned(request->conn->memory, bytes) ? bytes : NULL;
    start_piece(request, fetch->received_bytes, left_bytes, host, tl_piece_write);
    if (placement->landing.piece != NULL && tl_piece_data(placement->landing.piece) != NULL) fill(request);
}

/* Reads back what is on the device and not hashed yet. */
static void hash_on(struct request *request)
{
    uint64_t left_bytes = request->received_bytes - request->placement->landing.hashed_bytes;
    if (left_bytes > 0) start_piece(request, request->placement->landing.hashed_bytes, left_bytes, NULL, tl_piece_read);
}

/* Whether a copy is left; if so, one is under way. */
static bool is_copying(struct request *request)
{
    struct request_placement *placement = request->placement;
    struct tl_fetch *fetch = request->fetch;
    if (placement->landing.is_copy_running) return true;
    if (request->result != NULL) {
        if (placement->landing.piece != NULL && tl_piece_stop(placement->landing.piece))
            placement->landing.piece = NULL;
        return placement->landing.piece != NULL;
    }
    if (placement->bounce_buffer == NULL) tl_fetch_advance(fetch, request->received_bytes - fetch->received_bytes);
    request_copy_on(request);
    if (placement->landing.piece == NULL && request->result == NULL && fetch->wants_checksum) hash_on(request);
    return placement->landing.piece != NULL;
}

void request_copy_rest(struct request *request)
{
    if (request->placement != NULL && request->placement->landing.is_on_device && is_copying(request)) return;
    request_handle(request, REQUEST_EVENT_COPIED);
}

/* A block is there to be filled, or the copy is over, or has failed. */
static void piece_came(void *context, struct tl_piece *piece, const struct tl_error *status)
{
    struct request *request = context;
    struct request_placement *placement = request->placement;
    struct tl_fetch *fetch = request->fetch;
    struct tl_error error = *status;
    bool is_back = fetch->received_bytes == request->received_bytes; /* it was read back */
    if (error.code == TL_OK && !is_back && !placement->landing.is_piece_filled) {
        fill(request);
        return;
    }
    placement->landing.piece = NULL;
    if (error.code != TL_OK) {
        tl_error_prefix(&error, "%s: ", fetch->key);
        request_set_result(request, &error);
        request_handle(request, REQUEST_EVENT_CANCEL);
    } else if (is_back) {
        tl_fetch_hash(fetch, tl_piece_data(piece), tl_piece_len_bytes(piece));
        placement->landing.hashed_bytes += tl_piece_len_bytes(piece);
    } else {
        tl_fetch_advance(fetch, tl_piece_len_bytes(piece));
    }
    tl_piece_put(piece);
    if (request->state == REQUEST_COPYING) {
        request_copy_rest(request);
    } else {
        request_copy_on(request);
    }
}
