// SPDX-License-Identifier: Apache-2.0
/* What a response posts: pieces of the tensor, and messages. */
#include "dataplane/engine/response_internal.h"

#include <stdlib.h>

#include <xxhash.h>

#include "base/arith.h"
#include "base/error.h"
#include "tensor/piece.h"

#define MIN_BOUNCING_BYTES ((uint64_t)16 * 1024)
#define BOUNCING_PIECES 16

/* ---------------------------------------------------------------------------------------------------- messages -- */

static void message_done(struct tl_work *work, enum tl_status status)
{
    struct response *response = TL_CONTAINER_OF(work, struct response_sending, message_work)->response;
    response->sending->is_message_out = false;
    response->sending->is_flushed |= status != TL_OK;
    conn_space_freed(response->conn);
    response_handle(response, RESPONSE_EVENT_WORK_DONE);
}

static void post_outcome(struct response *response, struct tl_message *message)
{
    struct response_sending *sending = response->sending;
    sending->is_outcome_posted = true;
    sending->is_message_out = true;
    sending->message_work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = message_done};
    conn_post_message(response->conn, message, &sending->message_work);
}

static void post_error(struct response *response)
{
    struct tl_message *message = conn_compose(response->conn, TL_MESSAGE_ERROR_STATUS, response->handle);
    message->code = response->sending->status->code;
    message->text = response->sending->status->message;
    message->is_final = response->serve.is_final;
    post_outcome(response, message);
}

uint64_t response_checksum(const struct response *response)
{
    /* A value without bytes has a checksum as well. */
    return response->sending->hash_state != NULL ? XXH3_64bits_digest(response->sending->hash_state)
                                                 : XXH3_64bits(NULL, 0);
}

static void post_inline(struct response *response, const uint8_t *bytes)
{
    struct tl_conn *conn = response->conn;
    const struct tl_offer *offer = &response->sending->offer;
    uint64_t size_bytes = tl_tensor_size_bytes(offer->tensor);
    uint64_t *budget_bytes = &conn->posts.budgets.response_bytes;
    struct tl_message *message = conn_compose(conn, TL_MESSAGE_DONE, response->handle);
    message->step = offer->step;
    message->is_published = !offer->is_one_shot;
    message->has_meta_data = true;
    tl_meta_data_copy(&message->meta_data, tl_tensor_meta_data(offer->tensor));
    message->is_inline = true;
    message->data = bytes;
    message->has_checksum = response->wants_checksum;
    if (response->wants_checksum) message->checksum = XXH3_64bits(bytes, (size_t)size_bytes);
    conn->engine->stats.bytes_sent += size_bytes;
    *budget_bytes -= tl_min_u64(size_bytes, *budget_bytes);
    post_outcome(response, message);
}

static void post_done(struct response *response)
{
    const struct tl_offer *offer = &response->sending->offer;
    struct tl_message *message = conn_compose(response->conn, TL_MESSAGE_DONE, response->handle);
    message->step = offer->step;
    message->is_published = !offer->is_one_shot;
    if (tl_tensor_size_bytes(offer->tensor) == 0) {
        message->has_meta_data = true;
        tl_meta_data_copy(&message->meta_data, tl_tensor_meta_data(offer->tensor));
    }
    if (response->wants_checksum) {
        message->has_checksum = true;
        message->checksum = response_checksum(response);
    }
    post_outcome(response, message);
}

static void post_mapped(struct response *response)
{
    struct response_sending *sending = response->sending;
    const struct tl_offer *offer = &sending->offer;
    struct tl_message *message = conn_compose(response->conn, TL_MESSAGE_MAPPED, response->handle);
    message->step = offer->step;
    message->is_published = true;
    message->offset = sending->mapping.offset_bytes;
    message->has_meta_data = true;
    message->meta_data = *tl_tensor_meta_data(offer->tensor);
    message->destination = sending->destination;
    post_outcome(response, message);
}

static void post_update(struct response *response)
{
    const struct tl_offer *offer = &response->sending->offer;
    struct tl_message *message = conn_compose(response->conn, TL_MESSAGE_META_DATA_UPDATE, response->handle);
    message->step = offer->step;
    message->is_published = !offer->is_one_shot;
    message->is_file_slow = response->sending->is_file_slow;
    message->has_meta_data = true;
    tl_meta_data_copy(&message->meta_data, tl_tensor_meta_data(offer->tensor));
    conn_post_message(response->conn, message, NULL);
    response->sending->is_update_wanted = false;
}

/* ------------------------------------------------------------------------------------------------------ pieces -- */

static void piece_done(struct tl_work *work, enum tl_status status)
{
    struct piece *piece = TL_CONTAINER_OF(work, struct piece, work);
    struct response *response = piece->response;
    struct response_sending *sending = response->sending;
    struct tl_conn *conn = response->conn;
    conn_block_destroy(conn->engine->memory, &piece->block, &piece->pin);
    if (piece == &sending->first_piece) {
        sending->pieces.is_first_used = false;
    } else {
        free(piece);
    }
    sending->pieces.out--;
    sending->is_flushed |= status != TL_OK;
    if (status == TL_OK) conn_peer_seen(conn);
    conn_space_freed(conn);
    response_handle(response, RESPONSE_EVENT_WORK_DONE);
}

static struct piece *piece_create(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct piece *piece;
    if (sending->pieces.is_first_used) {
        piece = calloc(1, sizeof(*piece));
        if (piece == NULL) return NULL;
    } else {
        piece = &sending->first_piece;
        sending->pieces.is_first_used = true;
    }
    *piece = (struct piece){.work = {.magic = TL_WORK_MAGIC, .done = piece_done}, .response = response};
    return piece;
}

static void piece_destroy(struct response *response, struct piece *piece)
{
    if (piece == &response->sending->first_piece) {
        response->sending->pieces.is_first_used = false;
    } else {
        free(piece);
    }
}

/* The size of the pieces for a peer that copies them on: so small that it begins early, and so large that the work for
 * each piece is a small part. */
static uint64_t bouncing_bytes(uint64_t size_bytes)
{
    return tl_max_u64(MIN_BOUNCING_BYTES, tl_min_u64(size_bytes / BOUNCING_PIECES, BOUNCE_PIECE_BYTES));
}

/* How many bytes can be written now in one piece; 0: none until the peer has copied more of them on. */
static uint64_t free_space(const struct response_sending *sending)
{
    uint64_t lap_bytes = sending->lap_bytes;
    if (lap_bytes == 0) return UINT64_MAX;
    uint64_t free_bytes = sending->copied_bytes + lap_bytes - sending->posted_bytes;
    return tl_min_u64(free_bytes, lap_bytes - sending->posted_bytes % lap_bytes);
}

static bool is_in_runs(const struct response *response)
{
    return tl_tensor_is_in_runs(response->sending->offer.tensor);
}

/* The most bytes that the next piece may have. Bytes that are copied or hashed are read by the CPU in this pump. */
static uint64_t most_bytes(const struct response *response)
{
    uint64_t piece_bytes = response->conn->engine->piece_bytes;
    if (response->is_receiver_copying)
        piece_bytes = tl_min_u64(piece_bytes, bouncing_bytes(tl_tensor_size_bytes(response->sending->offer.tensor)));
    uint64_t read_bytes = response->sending->is_sender_copying || is_in_runs(response) ? BOUNCE_PIECE_BYTES
                          : response->wants_checksum                                   ? PUMP_BYTES
                                                                                       : UINT64_MAX;
    return tl_min_u64(tl_min_u64(piece_bytes, read_bytes), free_space(response->sending));
}

static void hash(void *hash_state, unsigned char *bytes, size_t len_bytes)
{
    TL_CHECK(XXH3_64bits_update(hash_state, bytes, len_bytes) == XXH_OK);
}

void response_read_piece(struct response *response, const uint8_t *source, uint64_t len_bytes)
{
    uint64_t *budget_bytes = &response->conn->posts.budgets.response_bytes;
    struct response_sending *sending = response->sending;
    if (response->wants_checksum && source != NULL) {
        hash(sending->hash_state, (uint8_t *)source, (size_t)len_bytes);
    } else if (response->wants_checksum) {
        tl_tensor_walk(sending->offer.tensor, sending->posted_bytes, len_bytes, hash, sending->hash_state);
    }
    if (response->wants_checksum || sending->is_sender_copying || is_in_runs(response)) {
        *budget_bytes -= len_bytes < *budget_bytes ? len_bytes : *budget_bytes;
    }
}

bool response_has_hash_state(struct response *response)
{
    struct response_sending *sending = response->sending;
    if (!response->wants_checksum || sending->hash_state != NULL) return true;
    sending->hash_state = XXH3_createState();
    return sending->hash_state != NULL && XXH3_64bits_reset(sending->hash_state) == XXH_OK;
}

void response_stop_reading(struct response *response)
{
    struct response_pieces *pieces = &response->sending->pieces;
    tl_piece_put(pieces->read);
    pieces->read = NULL;
    if (pieces->piece == NULL) return;
    conn_block_destroy(response->conn->engine->memory, &pieces->piece->block, &pieces->piece->pin);
    piece_destroy(response, pieces->piece);
    pieces->piece = NULL;
}

/* Makes the next piece, with a copy in the pool if the bytes are copied. NULL: there will be memory later, or the
 * response has failed. */
static struct piece *make_piece(struct response *response, uint64_t len_bytes)
{
    struct response_sending *sending = response->sending;
    struct tl_error error;
    if (sending->memory_wait != NULL) return NULL; /* queued again when the memory has come */
    if ((sending->is_sender_copying || is_in_runs(response)) && sending->pieces.out >= MAX_BOUNCES)
        return NULL; /* queued again when a piece is done */
    if (tl_tensor_check_readable(sending->offer.tensor, sending->posted_bytes, len_bytes, &error) != TL_OK) {
        response_fail(response, &error);
        return NULL;
    }
    struct piece *piece = response_has_hash_state(response) ? piece_create(response) : NULL;
    if (piece == NULL) {
        response_fail(response, &response_out_of_memory);
        return NULL;
    }
    if (!sending->is_sender_copying) return piece;
    enum tl_status status = response_bounce(response, piece, len_bytes, &error);
    if (status == TL_OK) return piece;
    piece_destroy(response, piece);
    if (status == TL_UNAVAILABLE || sending->pieces.out > 0) return NULL;
    tl_error_prefix(&error, "%s cannot be sent through the pool: ", response->serve.key);
    response_fail(response, &error);
    return NULL;
}

/* Takes the next piece of a value on a device, if it was read; else has it read. NULL: later, or the response has
 * failed. Meanwhile the peer may have freed more space than was read. */
static struct piece *take_read_piece(struct response *response, uint64_t len_bytes)
{
    struct response_pieces *pieces = &response->sending->pieces;
    struct tl_error error;
    if (pieces->read != NULL) return NULL;
    struct piece *piece = pieces->piece;
    pieces->piece = NULL;
    if (piece != NULL) return piece;
    piece = make_piece(response, len_bytes);
    if (piece == NULL || response_read_from_device(response, piece, len_bytes, &error) == TL_OK) return NULL;
    conn_block_destroy(response->conn->engine->memory, &piece->block, &piece->pin);
    piece_destroy(response, piece);
    response_fail(response, &error);
    return NULL;
}

static void fill(struct tl_work *work, void *to, uint64_t offset_bytes, uint64_t len_bytes)
{
    const struct piece *piece = TL_CONTAINER_OF(work, struct piece, work);
    tl_tensor_read(piece->response->sending->offer.tensor, piece->offset_bytes + offset_bytes, len_bytes, to);
}

/* Posts the next piece of the tensor. Returns true when more is to be posted and may be posted now. */
static bool post_piece(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct tl_conn *conn = response->conn;
    const struct tl_tensor *tensor = sending->offer.tensor;
    bool is_on_device = response_is_on_device(response);
    uint64_t left_bytes = tl_tensor_size_bytes(tensor) - sending->posted_bytes;
    uint64_t len_bytes = tl_min_u64(left_bytes, most_bytes(response));
    bool is_read_first = is_on_device && sending->is_sender_copying;
    if (is_read_first && sending->pieces.piece != NULL) len_bytes = sending->pieces.len_bytes;
    if (len_bytes == 0) return false; /* COPIED will come */
    if (is_on_device && !is_read_first && !response_await_fence(response)) return false;
    struct piece *piece = is_read_first ? take_read_piece(response, len_bytes) : make_piece(response, len_bytes);
    if (piece == NULL) return false;
    bool is_filled = piece->block == NULL && is_in_runs(response);
    const uint8_t *source = piece->block != NULL ? tl_tensor_data(piece->block)
                            : is_filled          ? NULL
                                                 : (const uint8_t *)tl_tensor_data(tensor) + sending->posted_bytes;
    piece->offset_bytes = sending->posted_bytes;
    if (is_filled) piece->work.fill = fill;
    const struct tl_region *region = sending->is_sender_copying ? piece->pin.region : sending->pin.region;
    uint32_t immediate = response->handle | (sending->is_sender_copying ? TL_IMMEDIATE_SENDER_COPYING : 0) |
                         (sending->is_done_wanted ? TL_IMMEDIATE_DONE_FOLLOWS : 0) |
                         (is_on_device ? TL_IMMEDIATE_ON_DEVICE : 0);
    sending->pieces.out++;
    uint64_t offset_bytes = sending->lap_bytes > 0 ? sending->posted_bytes % sending->lap_bytes : sending->posted_bytes;
    conn_post_write(conn, region, source, len_bytes, &sending->destination, offset_bytes, immediate, &piece->work);
    response_read_piece(response, source, len_bytes);
    sending->posted_bytes += len_bytes;
    return len_bytes < left_bytes || sending->is_done_wanted;
}

/* All bytes are posted: sends DONE. The bytes of a file were the tensor's only if the file is unchanged once all of
 * them have been read, so DONE waits for the last piece; its completion queues the response again. */
static void finish(struct response *response)
{
    struct response_sending *sending = response->sending;
    const struct tl_tensor *tensor = sending->offer.tensor;
    struct tl_error error;
    if (sending->may_change) {
        if (sending->pieces.out > 0) return;
        if (tl_tensor_check_readable(tensor, 0, tl_tensor_size_bytes(tensor), &error) != TL_OK) {
            response_fail(response, &error);
            return;
        }
    }
    post_done(response);
}

/* ------------------------------------------------------------------------------------------------------order -- */

/* Posts the only or last message. */
static void post_end(struct response *response)
{
    struct response_sending *sending = response->sending;
    const uint8_t *bytes = sending->is_inline && sending->status == NULL ? response_read_inline(response) : NULL;
    if (sending->status != NULL) {
        post_error(response);
    } else if (sending->is_inline) {
        post_inline(response, bytes);
    } else if (sending->mapping.is_used) {
        post_mapped(response);
    } else {
        post_done(response);
    }
}

bool response_post_next(struct pending_post *pending)
{
    struct response *response = TL_CONTAINER_OF(pending, struct response_sending, pending)->response;
    struct response_sending *sending = response->sending;
    switch (response->state) {
    case RESPONSE_PARKED:
        if (sending->is_update_wanted) post_update(response);
        return false;
    case RESPONSE_WRITING:
        if (sending->posted_bytes < tl_tensor_size_bytes(sending->offer.tensor)) return post_piece(response);
        if (sending->is_done_wanted && !sending->is_outcome_posted) finish(response);
        return false;
    case RESPONSE_SHOWING:
        return response_post_source(response);
    case RESPONSE_ENDING:
        if (sending->is_outcome_posted) return false;
        post_end(response);
        return false;
    default:
        return false;
    }
}

void response_queue_post(struct response *response)
{
    conn_post_when_slot(response->conn, &response->sending->pending);
}
