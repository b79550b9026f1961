// SPDX-License-Identifier: Apache-2.0
/*
 * A source that the peer reads (docs/gdr.md).
 *
 * Happy path: the tensor is registered for writing, since a window needs that, though nothing is written to it. A
 * window shows its bytes to this peer alone, and SOURCE says where they are. The peer reads them and releases the
 * source; the window is revoked, and the serve ends.
 *
 * Failure modes: memory that cannot be registered for writing, such as a file that is mapped read-only, is copied into
 * the pool, with its checks. When neither is possible, or the card has no window, META_DATA_UPDATE asks for memory to
 * write to instead. A peer that has no memory to read into gives the source back, which is kept as after
 * META_DATA_UPDATE. A source that is not released in time costs the connection, with which the window ends, unless the
 * peer has released others meanwhile. A source belongs to its response, so that no other peer can release it.
 */
#include <stdlib.h>

#include <xxhash.h>

#include "base/arith.h"
#include "base/clock.h"
#include "base/copy.h"
#include "base/error.h"
#include "dataplane/engine/response_internal.h"
#include "tensor/mapped_tensor.h"

/* The slowest network that a lease is made for, per second. */
#define LEASE_BYTES_PER_SECOND (UINT64_C(1) << 20)
#define MAX_LEASE_SECONDS 86400

bool response_may_show(const struct tl_conn *conn)
{
    return conn->pair->ops->expose_source != NULL && conn->engine->options.keys == TL_KEYS_WINDOW;
}

/* -------------------------------------------------------------------------------------------------- its memory -- */

/* Makes the peer read a copy in the pool, which response_post_source fills. There is no wait for the pool, and the peer
 * decides how long it keeps the copy: a tensor that would fill more than half of the pool is written in pieces. */
static void use_block(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct tl_conn *conn = response->conn;
    uint64_t size_bytes = tl_tensor_size_bytes(sending->offer.tensor);
    if (response_is_on_device(response)) { /* which is written through its pinned memory, piece by piece */
        response_handle(response, RESPONSE_EVENT_DIFFERS);
        return;
    }
    sending->is_sender_copying = true;
    bool has_block =
        conn_block_create_spare(conn, conn->engine->memory, size_bytes, &sending->source.block, &sending->pin);
    response_handle(response, has_block ? RESPONSE_EVENT_READY : RESPONSE_EVENT_DIFFERS);
}

static void registered(struct tl_closure *closure)
{
    struct registering *registering = conn_registered(closure);
    const struct tl_registration *registration = &registering->registration;
    struct response *response = registering->owner;
    bool is_registered = registration->error.code == TL_OK;
    response->conn->ending.held_count--;
    response->sending->is_registering = false;
    if (is_registered) response->sending->pin = registration->pin;
    free(registering);
    if (response->conn->ending.is_pair_drained) {
        response_close(response, TL_SERVE_BROKEN);
    } else if (is_registered || response->state == RESPONSE_STOPPING) {
        response_handle(response, RESPONSE_EVENT_READY);
    } else {
        use_block(response);
    }
}

void response_locate(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct tl_conn *conn = response->conn;
    struct tl_engine *engine = conn->engine;
    struct tl_tensor *tensor = sending->offer.tensor;
    bool is_copied = engine->options.is_bounce_forced || tl_tensor_may_change(tensor);
    if (response_may_lend(response)) {
        response_lend(response);
        return;
    }
    if (!is_copied && tl_memory_pin(engine->memory, tensor, TL_REGION_WRITE, &sending->pin)) {
        response_handle(response, RESPONSE_EVENT_READY);
        return;
    }
    if (!is_copied && !conn_is_small(conn, tensor))
        sending->is_registering = conn_register(conn, engine->memory, response, tensor, TL_REGION_WRITE, registered);
    if (!sending->is_registering) use_block(response);
}

static void exposure_over(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct tl_conn *conn = response->conn;
    if (!sending->source.is_exposed) return;
    sending->source.is_exposed = false;
    conn->responses.shown_bytes -= tl_tensor_size_bytes(sending->offer.tensor);
    if (sending->lend.is_lent) return;
    conn->posts.windows_used--;
    conn_try_next_window(conn);
}

void response_release_source(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct tl_memory *memory = response->conn->engine->memory;
    exposure_over(response);
    response_end_lending(response);
    tl_list_remove(&sending->window.revoke.place);
    conn_block_destroy(memory, &sending->source.block, &sending->pin);
    tl_memory_unpin(memory, &sending->pin);
    if (sending->hash_state != NULL) (void)XXH3_freeState(sending->hash_state);
    sending->hash_state = NULL;
    sending->is_sender_copying = false;
    sending->source.seen_bytes = 0;
}

/* ----------------------------------------------------------------------------------------------------- showing -- */

/* Copies the next bytes into the block and hashes them. */
static enum tl_status fill(struct response *response, struct tl_error *ret_error)
{
    struct response_sending *sending = response->sending;
    const struct tl_tensor *tensor = sending->offer.tensor;
    uint64_t size_bytes = tl_tensor_size_bytes(tensor);
    uint64_t offset_bytes = sending->source.seen_bytes;
    uint64_t len_bytes = tl_min_u64(size_bytes - offset_bytes, BOUNCE_PIECE_BYTES);
    const uint8_t *source = (const uint8_t *)tl_tensor_data(tensor) + offset_bytes;
    if (!response_has_hash_state(response)) return tl_error_copy(ret_error, &response_out_of_memory);
    enum tl_status status = tl_tensor_check_readable(tensor, offset_bytes, len_bytes, ret_error);
    if (status != TL_OK) return status;
    if (sending->source.block != NULL) {
        uint8_t *copy = (uint8_t *)tl_tensor_data(sending->source.block) + offset_bytes;
        tl_copy(copy, source, (size_t)len_bytes);
        response->conn->engine->stats.bytes_bounced += len_bytes;
        tl_memory_count_bounce(response->conn->engine->memory, len_bytes);
        source = copy;
    }
    response_read_piece(response, source, len_bytes);
    sending->source.seen_bytes += len_bytes;
    /* The bytes of a file were the tensor's only if the file is unchanged once all of them have been read. */
    if (sending->source.seen_bytes < size_bytes) return TL_OK;
    return tl_tensor_check_readable(tensor, 0, size_bytes, ret_error);
}

/* Lets the peer read. Returns false when there is no window now, or none at all. */
static bool expose(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct tl_conn *conn = response->conn;
    struct tl_error error;
    uint64_t size_bytes = tl_tensor_size_bytes(sending->offer.tensor);
    if (sending->lend.is_lent) {
        sending->window.exposure.descriptor = sending->lend.descriptor;
        sending->source.is_exposed = true;
        conn->responses.shown_bytes += size_bytes;
        return true;
    }
    if (tl_queue_pair_expose_source(conn->pair, sending->pin.region, sending->pin.address, size_bytes, false,
                                    &sending->window.exposure, &error) == TL_OK) {
        sending->source.is_exposed = true;
        conn->posts.windows_used++;
        conn->responses.shown_bytes += size_bytes;
        conn_try_next_window(conn);
        return true;
    }
    if (error.code == TL_RESOURCE_EXHAUSTED && conn->posts.windows_used > 0) {
        tl_list_push_front(&conn->posts.window_queue, &sending->pending.place);
    } else {
        response_handle(response, RESPONSE_EVENT_DIFFERS);
        conn_try_next_window(conn); /* others that wait would not be woken by a window of this one */
    }
    return false;
}

/* A lease is so long that a slow network carries all that the peer may read now. */
static int64_t lease_ns(const struct tl_conn *conn)
{
    uint64_t seconds = tl_min_u64(conn->responses.shown_bytes / LEASE_BYTES_PER_SECOND, MAX_LEASE_SECONDS);
    return conn->engine->options.parked_ns + (int64_t)seconds * TL_NS_PER_SEC;
}

void response_arm_lease(struct response *response)
{
    struct tl_conn *conn = response->conn;
    response->sending->source.released_count = conn->responses.released_count;
    conn_arm(conn, &response->sending->park_timer, lease_ns(conn));
}

bool response_post_source(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct tl_conn *conn = response->conn;
    const struct tl_offer *offer = &sending->offer;
    bool is_read_here = sending->source.block != NULL || response->wants_checksum;
    struct tl_error error;
    if (sending->source.is_exposed) return false;
    if (is_read_here && sending->source.seen_bytes < tl_tensor_size_bytes(offer->tensor)) {
        if (fill(response, &error) == TL_OK) return true;
        response_fail(response, &error);
        return false;
    }
    if (response_is_on_device(response) && !response_await_fence(response)) return false;
    if (!expose(response)) return false;
    struct tl_message *message = conn_compose(conn, TL_MESSAGE_SOURCE, response->handle);
    message->step = offer->step;
    message->is_published = !offer->is_one_shot;
    message->is_copying = sending->source.block != NULL || sending->lend.copy != NULL;
    message->is_on_device = response_is_on_device(response);
    message->has_meta_data = true;
    tl_meta_data_copy(&message->meta_data, tl_tensor_meta_data(offer->tensor));
    message->destination = sending->window.exposure.descriptor;
    message->has_checksum = response->wants_checksum;
    if (response->wants_checksum) message->checksum = response_checksum(response);
    conn->engine->stats.sources_shown++;
    conn_post_message(conn, message, NULL);
    response_arm_lease(response);
    return false;
}

/* ------------------------------------------------------------------------------------------------------ ending -- */

static void revoke_done(struct tl_work *work, enum tl_status status)
{
    struct response *response = TL_CONTAINER_OF(work, struct response_sending, window.revoke_work)->response;
    response->sending->is_flushed |= status != TL_OK;
    if (status != TL_OK) return; /* the peer may read until the queue pair is drained */
    conn_space_freed(response->conn);
    exposure_over(response);
    response_handle(response, RESPONSE_EVENT_WORK_DONE);
}

static bool post_revoke(struct pending_post *pending)
{
    struct response *response = TL_CONTAINER_OF(pending, struct response_sending, window.revoke)->response;
    struct response_sending *sending = response->sending;
    struct tl_conn *conn = response->conn;
    sending->window.revoke_work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = revoke_done};
    conn->pair->ops->revoke(conn->pair, &sending->window.exposure, &sending->window.revoke_work);
    return false;
}

void response_start_return(struct response *response)
{
    if (response->sending->lend.is_lent) { /* the peer has no copy under way */
        exposure_over(response);
        if (response->state != RESPONSE_STOPPING) response_handle(response, RESPONSE_EVENT_WORK_DONE);
        return;
    }
    conn_post_when_space(response->conn, &response->sending->window.revoke);
}

void response_source_init(struct response_sending *sending)
{
    sending->window.revoke.post = post_revoke;
    tl_list_init(&sending->window.revoke.place);
}
