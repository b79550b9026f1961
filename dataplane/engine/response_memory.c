// SPDX-License-Identifier: Apache-2.0
/*
 * Where the bytes of a response are read from: from the tensor itself, or from pieces in the pool that they are copied
 * to. The device copies its bytes into the pool itself when that is pinned, and else into pinned memory of its own,
 * from where the CPU copies them on: a piece first has its block of the pool, so that the device's memory is never kept
 * by something that waits for the pool. A card that reaches the device reads them there itself, once the fence of the
 * value is reached; nothing is copied then, and the CPU touches none of them.
 *
 * Failure modes: memory that is not registered is registered if it is large; else, or if that fails, it is copied. A
 * copy that finds the pool full waits for the other pieces of its tensor, or for memory of the pool. When that does not
 * come in time, the peer is told to ask over the link: what fills the pool may wait for this value to be sent.
 */
#include "base/copy.h"
#include "dataplane/engine/response_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "tensor/mapped_tensor.h"
#include "tensor/piece.h"

/* Writing a smaller tensor takes less time than mapping it. */
#define SHARED_LEAST_BYTES 4096

bool response_share(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct tl_conn *conn = response->conn;
    const struct tl_offer *offer = &sending->offer;
    uint64_t size_bytes = tl_tensor_size_bytes(offer->tensor);
    struct tl_error error;
    bool may_share = response->may_map && !response->wants_checksum && !offer->is_one_shot &&
                     conn->engine->options.is_mapping_allowed && conn_is_open(conn);
    if (!may_share || size_bytes < SHARED_LEAST_BYTES) return false;
    struct tl_mapped_file *file = tl_mapped_tensor_file(offer->tensor, &sending->mapping.offset_bytes);
    if (file == NULL || tl_mapped_file_check(file, NULL, 0, &error) != TL_OK) return false;
    sending->mapping.is_used = tl_queue_pair_share(conn->pair, file, &sending->destination, &error) == TL_OK;
    return sending->mapping.is_used;
}

bool response_may_be_inline(const struct response *response)
{
    const struct tl_meta_data *meta_data = tl_tensor_meta_data(response->sending->offer.tensor);
    bool is_small = meta_data->size_bytes <= response->conn->responses.inline_bytes;
    if (!is_small || response->is_remote || response_is_on_device(response)) return false;
    if (!response->is_fixed) return meta_data->size_bytes <= TL_INLINE_LIBRARY_BYTES;
    /* The peer refuses a value with other meta-data, and then other receivers may still have it. */
    return response->expected != NULL && tl_meta_data_is_equal(meta_data, &response->expected->meta_data);
}

const uint8_t *response_read_inline(struct response *response)
{
    struct tl_engine *engine = response->conn->engine;
    struct tl_tensor *tensor = response->sending->offer.tensor;
    uint64_t size_bytes = tl_tensor_size_bytes(tensor);
    const uint8_t *bytes = tl_tensor_data(tensor);
    struct tl_error error;
    enum tl_status status = tl_tensor_check_readable(tensor, 0, size_bytes, &error);
    if (status == TL_OK && tl_tensor_may_change(tensor)) { /* only the copy is sent that was checked */
        memcpy(engine->inline_copy, bytes, (size_t)size_bytes);
        bytes = engine->inline_copy;
        status = tl_tensor_check_readable(tensor, 0, size_bytes, &error);
    }
    if (status == TL_OK) return bytes;
    response_set_status(response, &error);
    return NULL;
}

static void memory_came(struct tl_closure *closure)
{
    struct conn_memory_wait *memory_wait = conn_memory_came(closure);
    struct response *response = memory_wait->owner;
    struct response_sending *sending = response->sending;
    const struct tl_error *error = &memory_wait->memory_wait.wait.error;
    sending->memory_wait = NULL;
    sending->granted = memory_wait;
    tl_timers_disarm(tl_reactor_timers(response->conn->engine->reactor), &sending->park_timer);
    if (response->conn->ending.is_pair_drained) {
        response_close(response, TL_SERVE_BROKEN);
    } else if (error->code != TL_OK) {
        response_fail(response, error);
    } else {
        response_handle(response, RESPONSE_EVENT_READY);
    }
}

enum tl_status response_bounce(struct response *response, struct piece *piece, uint64_t len_bytes,
                               struct tl_error *ret_error)
{
    struct response_sending *sending = response->sending;
    struct tl_conn *conn = response->conn;
    struct tl_memory *memory = conn->engine->memory;
    enum tl_status status =
        conn_block_create(memory, sending->granted, len_bytes, &piece->block, &piece->pin, ret_error);
    conn_free_memory_wait(&sending->granted);
    if (status == TL_UNAVAILABLE && sending->pieces.out == 0) {
        sending->memory_wait = conn_await_memory(conn, memory, len_bytes, response, memory_came, ret_error);
        if (sending->memory_wait == NULL) return TL_RESOURCE_EXHAUSTED;
        conn_arm(conn, &sending->park_timer, conn_grow_ns(conn));
        return TL_UNAVAILABLE;
    }
    if (status != TL_OK) return status;
    if (response_is_on_device(response)) return TL_OK;
    tl_tensor_read(sending->offer.tensor, sending->posted_bytes, len_bytes, tl_tensor_data(piece->block));
    conn->engine->stats.bytes_bounced += len_bytes;
    tl_memory_count_bounce(conn->engine->memory, len_bytes);
    return TL_OK;
}

/* ----------------------------------------------------------------------------------------------------- devices -- */

bool response_is_on_device(const struct response *response)
{
    return tl_tensor_is_on_device(response->sending->offer.tensor);
}

static void post_to_reactor(void *reactor, struct tl_closure *closure)
{
    tl_reactor_post(reactor, closure);
}

/* Copies the bytes from pinned memory of the device into the block, at once, so that this memory is free for others
 * while the piece waits for the network. */
static void move_on(struct response *response, const void *bytes)
{
    struct tl_engine *engine = response->conn->engine;
    const struct response_pieces *pieces = &response->sending->pieces;
    tl_copy(tl_tensor_data(pieces->piece->block), bytes, (size_t)pieces->len_bytes);
    engine->stats.bytes_bounced += pieces->len_bytes;
    tl_memory_count_bounce(engine->memory, pieces->len_bytes);
}

/* The bytes are in the block, or in pinned memory of the device, or never will be. */
static void bytes_came(void *context, struct tl_piece *read, const struct tl_error *status)
{
    struct response *response = context;
    struct tl_error error = *status;
    response->sending->pieces.read = NULL;
    if (error.code == TL_OK) {
        if (tl_piece_data(read) != NULL) move_on(response, tl_piece_data(read));
        response->sending->pieces.is_fence_reached = true;
    }
    tl_piece_put(read);
    if (response->state != RESPONSE_WRITING) return;
    if (error.code == TL_OK) {
        response_handle(response, RESPONSE_EVENT_READY);
        return;
    }
    tl_error_prefix(&error, "%s: ", response->serve.key);
    response_stop_reading(response);
    response_fail(response, &error);
}

enum tl_status response_read_from_device(struct response *response, struct piece *piece, uint64_t len_bytes,
                                         struct tl_error *ret_error)
{
    struct response_sending *sending = response->sending;
    struct response_pieces *pieces = &sending->pieces;
    struct tl_memory *memory = response->conn->engine->memory;
    (void)tl_memory_why_not_pinned(memory, tl_tensor_device(sending->offer.tensor)); /* begins to pin the pool */
    const struct tl_piece_options options = {
        .tensor = sending->offer.tensor,
        .host = tl_memory_is_pinned(memory, piece->block) ? piece->block : NULL,
        .offset_bytes = sending->posted_bytes,
        .len_bytes = len_bytes,
        .after = pieces->is_fence_reached ? NULL : tl_tensor_fence(sending->offer.tensor),
        .post = post_to_reactor,
        .loop = response->conn->engine->reactor,
        .notify = bytes_came,
        .context = response,
    };
    pieces->read = tl_piece_read(&options);
    if (pieces->read == NULL) return tl_error_copy(ret_error, &response_out_of_memory);
    pieces->piece = piece;
    pieces->len_bytes = len_bytes;
    return TL_OK;
}

bool response_may_be_direct(const struct response *response)
{
    const struct tl_engine *engine = response->conn->engine;
    if (engine->options.is_bounce_forced || engine->options.is_gpu_proxy_forced) return false;
    if (response->wants_checksum) return false; /* which the CPU makes */
    struct tl_device device = tl_tensor_device(response->sending->offer.tensor);
    return tl_memory_why_not_direct(engine->memory, device, engine->options.keys) == NULL;
}

static void fence_reached(void *context, struct tl_piece *read, const struct tl_error *status)
{
    struct response *response = context;
    struct tl_error error = *status;
    response->sending->pieces.read = NULL;
    response->sending->pieces.is_fence_reached = error.code == TL_OK;
    tl_piece_put(read);
    if (response->state != RESPONSE_WRITING && response->state != RESPONSE_SHOWING) return;
    if (error.code == TL_OK) {
        response_handle(response, RESPONSE_EVENT_READY);
        return;
    }
    tl_error_prefix(&error, "%s: ", response->serve.key);
    response_fail(response, &error);
}

bool response_await_fence(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct response_pieces *pieces = &sending->pieces;
    struct tl_device_fence *fence = tl_tensor_fence(sending->offer.tensor);
    if (fence == NULL || pieces->is_fence_reached) return true;
    if (pieces->read != NULL) return false;
    const struct tl_piece_options options = {
        .tensor = sending->offer.tensor,
        .after = fence,
        .post = post_to_reactor,
        .loop = response->conn->engine->reactor,
        .notify = fence_reached,
        .context = response,
    };
    pieces->read = tl_piece_read(&options);
    if (pieces->read == NULL) response_fail(response, &response_out_of_memory);
    return false;
}

/* ------------------------------------------------------------------------------------------------- registering -- */

static void registered(struct tl_closure *closure)
{
    struct registering *registering = conn_registered(closure);
    const struct tl_registration *registration = &registering->registration;
    struct response *response = registering->owner;
    struct response_sending *sending = response->sending;
    struct tl_conn *conn = response->conn;
    conn->ending.held_count--;
    sending->is_registering = false;
    if (registration->error.code == TL_OK) {
        sending->pin = registration->pin;
    } else {
        sending->is_sender_copying = true;
    }
    free(registering);
    if (conn->ending.is_pair_drained) {
        response_close(response, TL_SERVE_BROKEN);
    } else {
        response_handle(response, RESPONSE_EVENT_READY);
    }
}

void response_prepare(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct tl_engine *engine = response->conn->engine;
    struct tl_tensor *tensor = sending->offer.tensor;
    const struct tl_offer *offer = &sending->offer;
    bool is_on_device = response_is_on_device(response);
    sending->may_change = tl_tensor_may_change(tensor);
    sending->is_done_wanted = response->wants_checksum || sending->may_change || offer->step != response->expected_step;
    bool is_copied = engine->options.is_bounce_forced || (is_on_device && !response_may_be_direct(response)) ||
                     (tl_tensor_is_in_runs(tensor) && !engine->provider->limits.is_processor_writing);
    bool is_direct = !is_copied && (!engine->provider->limits.needs_regions ||
                                    tl_memory_pin(engine->memory, tensor, TL_REGION_READ, &sending->pin));
    bool is_small = conn_is_small(response->conn, tensor);
    if (is_direct) {
        response_handle(response, RESPONSE_EVENT_READY);
    } else if (is_copied || is_small) {
        sending->is_sender_copying = true;
        response_handle(response, RESPONSE_EVENT_READY);
    } else {
        sending->is_registering =
            conn_register(response->conn, engine->memory, response, tensor, TL_REGION_READ, registered);
        sending->is_sender_copying = !sending->is_registering;
        if (sending->is_sender_copying) response_handle(response, RESPONSE_EVENT_READY);
    }
}
