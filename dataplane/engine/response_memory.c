// SPDX-License-Identifier: Apache-2.0
/*
 * Where the bytes of a response are read from: from the tensor itself, or from pieces in the pool that they are copied
 * to.
 *
 * Failure modes: memory that is not registered is registered if it is large; else, or if that fails, it is copied. A
 * copy that finds the pool full waits for the other pieces of its tensor, or for memory of the pool.
 */
#include "dataplane/engine/response_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "tensor/mapped_tensor.h"

/* Writing a smaller tensor takes less time than mapping it. */
#define SHARED_LEAST_BYTES 4096

bool response_share(struct response *response)
{
    struct tl_conn *conn = response->conn;
    const struct tl_offer *offer = &response->offer;
    uint64_t size_bytes = tl_tensor_size_bytes(offer->tensor);
    struct tl_error error;
    bool may_share = response->may_map && !response->wants_checksum && !offer->is_one_shot &&
                     conn->engine->options.is_mapping_allowed && conn_is_open(conn);
    if (!may_share || size_bytes < SHARED_LEAST_BYTES) return false;
    struct tl_mapped_file *file = tl_mapped_tensor_file(offer->tensor, &response->file_offset);
    if (file == NULL || tl_mapped_file_check(file, NULL, 0, &error) != TL_OK) return false;
    response->is_shared = tl_queue_pair_share(conn->pair, file, &response->destination, &error) == TL_OK;
    return response->is_shared;
}

static void memory_came(struct tl_closure *closure)
{
    struct conn_memory_wait *memory_wait = conn_memory_came(closure);
    struct response *response = memory_wait->owner;
    const struct tl_error *error = &memory_wait->memory_wait.wait.error;
    response->memory_wait = NULL;
    response->granted = memory_wait;
    if (response->conn->ending.is_pair_drained) {
        response_close(response, TL_SERVE_BROKEN);
    } else if (error->code != TL_OK) {
        response_fail(response, error);
    } else {
        response_handle(response, RESPONSE_EVENT_READY);
    }
}

enum tl_status response_bounce(struct response *response, struct piece *piece, const uint8_t *source,
                               uint64_t len_bytes, struct tl_error *ret_error)
{
    struct tl_conn *conn = response->conn;
    struct tl_memory *memory = conn->engine->memory;
    enum tl_status status =
        conn_block_create(memory, response->granted, len_bytes, &piece->block, &piece->pin, ret_error);
    conn_free_memory_wait(&response->granted);
    if (status == TL_UNAVAILABLE && response->pieces_out == 0) {
        response->memory_wait = conn_await_memory(conn, memory, len_bytes, response, memory_came, ret_error);
        return response->memory_wait != NULL ? TL_UNAVAILABLE : TL_RESOURCE_EXHAUSTED;
    }
    if (status != TL_OK) return status;
    memcpy(tl_tensor_data(piece->block), source, (size_t)len_bytes);
    conn->engine->stats.bytes_bounced += len_bytes;
    tl_memory_count_bounce(conn->engine->memory, len_bytes);
    return TL_OK;
}

static void registered(struct tl_closure *closure)
{
    struct registering *registering = conn_registered(closure);
    const struct tl_registration *registration = &registering->registration;
    struct response *response = registering->owner;
    struct tl_conn *conn = response->conn;
    conn->ending.held_count--;
    response->is_registering = false;
    if (registration->error.code == TL_OK) {
        response->pin = registration->pin;
    } else {
        response->is_sender_copying = true;
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
    struct tl_engine *engine = response->conn->engine;
    struct tl_tensor *tensor = response->offer.tensor;
    const struct tl_offer *offer = &response->offer;
    response->may_change = tl_tensor_may_change(tensor);
    response->is_done_wanted =
        response->wants_checksum || response->may_change || offer->step != response->expected_step;
    bool is_direct =
        !engine->options.is_bounce_forced && (!engine->provider->limits.needs_regions ||
                                              tl_memory_pin(engine->memory, tensor, TL_REGION_READ, &response->pin));
    bool is_small = conn_is_small(response->conn, tensor);
    if (is_direct) {
        response_handle(response, RESPONSE_EVENT_READY);
    } else if (engine->options.is_bounce_forced || is_small) {
        response->is_sender_copying = true;
        response_handle(response, RESPONSE_EVENT_READY);
    } else {
        response->is_registering =
            conn_register(response->conn, engine->memory, response, tensor, TL_REGION_READ, registered);
        response->is_sender_copying = !response->is_registering;
        if (response->is_sender_copying) response_handle(response, RESPONSE_EVENT_READY);
    }
}
