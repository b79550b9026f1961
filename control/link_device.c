// SPDX-License-Identifier: Apache-2.0
/*
 * Devices and links: values on devices that are sent, and destinations on devices, also those that are still being
 * allocated.
 *
 * Sending: a value whose stream still works on it waits (FENCED) while others pass by. When it may be sent, a piece of
 * it is read from its device (STAGING, control/device_reader.h) before the link sends it (ACTIVE), and the next piece
 * is read meanwhile. A stream, a device or memory that fails is the answer to the request. A serve that ends while it
 * waits gives the wait or the reader up.
 *
 * Receiving, which is the landing of a fetch: the bytes of a chunk stay in gRPC's memory until a block of the device is
 * free, which is nearly always at once (tensor/piece.h). They are copied into it, and the device copies them on while
 * the next ones arrive. When all are on the device, and a checksum is wanted, they are read back, so that it covers
 * what the device holds. While bytes wait, the peer is not read, so that a link keeps the bytes of one frame at most.
 * They wait for the device and not for a stream of the caller, because a receive asks for its tensor after its
 * destination may be written. Only memory for a new tensor may have to wait for frees, and these for kernels, when the
 * device is full.
 *
 * A fetch may leave its link in the middle. The device must let go of the destination before the fetch is done; until
 * then its entry belongs to no link. What was put into blocks counts as received, unless a copy fails.
 */
#include <grpc/slice_buffer.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "control/link_serves.h"
#include "tensor/piece.h"

static void post_to_loop(void *loop, struct tl_closure *closure)
{
    tl_loop_post(loop, closure);
}

/* ----------------------------------------------------------------------------------------------------- sending -- */

bool link_serve_is_on_device(const struct link_serve *entry)
{
    return tl_tensor_is_on_device(entry->sending->offer.tensor) &&
           tl_tensor_size_bytes(entry->sending->offer.tensor) > 0;
}

void link_serve_stop_reading(struct link_serve *entry)
{
    struct link_sending *sending = entry->sending;
    tl_piece_put(sending->fence_wait);
    sending->fence_wait = NULL;
    tl_device_reader_end(&sending->reader);
}

void link_serve_fail_reading(struct link_serve *entry, struct tl_error *error)
{
    tl_error_prefix(error, "%s: ", entry->serve.key);
    link_serve_fail(entry, error);
}

static void fence_reached(void *context, struct tl_piece *piece, const struct tl_error *status)
{
    struct link_serve *entry = context;
    struct tl_error error = *status;
    TL_CHECK(entry->state == SERVE_FENCED && entry->sending->fence_wait == piece);
    entry->sending->fence_wait = NULL;
    tl_piece_put(piece);
    entry->link->stall.has_progressed = true; /* the peer waits for us */
    if (error.code == TL_OK) {
        link_serve_become_ready(entry);
    } else {
        link_serve_fail_reading(entry, &error);
    }
}

void link_serve_await_fence(struct link_serve *entry)
{
    struct link_sending *sending = entry->sending;
    struct tl_tensor *tensor = sending->offer.tensor;
    const struct tl_piece_options options = {.tensor = tensor,
                                             .after = tl_tensor_fence(tensor),
                                             .post = post_to_loop,
                                             .loop = entry->link->control->loop,
                                             .notify = fence_reached,
                                             .context = entry};
    struct tl_error error;
    sending->fence_wait = tl_piece_read(&options);
    if (sending->fence_wait != NULL) {
        link_serve_set_state(entry, SERVE_FENCED);
        return;
    }
    tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "no memory to wait for its stream");
    link_serve_fail_reading(entry, &error);
}

/* Whether nothing is left to be read, also when nothing had to be sent but a checksum. */
static bool is_all_read(const struct tl_device_reader *reader)
{
    return reader->read_bytes == tl_tensor_size_bytes(reader->tensor);
}

/* A piece of the value was read from its device, or could not be. */
static void staged(struct tl_device_reader *reader, const struct tl_error *status)
{
    struct link_serve *entry = TL_CONTAINER_OF(reader, struct link_sending, reader)->entry;
    struct tl_error error = *status;
    entry->link->stall.has_progressed = true; /* the peer waits for us */
    if (status->code != TL_OK) {
        link_serve_fail_reading(entry, &error);
    } else if (entry->state == SERVE_STAGING && (tl_device_reader_bytes(reader) > 0 || is_all_read(reader))) {
        link_serve_set_state(entry, SERVE_ACTIVE);
        link_queue_push(&entry->link->answers.active, entry);
        link_flush_later(entry->link);
    }
}

void link_serve_stage(struct link_serve *entry)
{
    struct link_sending *sending = entry->sending;
    struct tl_control *control = entry->link->control;
    struct tl_error error;
    link_serve_set_state(entry, SERVE_STAGING);
    sending->reader = (struct tl_device_reader){.loop = control->loop,
                                                .tensor = sending->offer.tensor,
                                                .hash_state = sending->hash_state,
                                                .skip_bytes = sending->sent_bytes,
                                                .copied_bytes = &control->stats.bytes_copied_send,
                                                .came = staged,
                                                .is_fence_reached = true};
    if (tl_device_reader_begin(&sending->reader, &error) != TL_OK) link_serve_fail_reading(entry, &error);
}

/* --------------------------------------------------------------------------------------------------- receiving -- */

#define PIECES 2

struct link_landing {
    grpc_slice_buffer waiting;       /* bytes that have come and are in no block */
    bool is_counted;                 /* in link->landing_count */
    struct tl_piece *pieces[PIECES]; /* on their way; NULL: none. At most one waits for a block */
    bool is_filled[PIECES];          /* its block has the bytes */
    uint64_t filled_bytes;           /* so many bytes of the value, from its first, were put into blocks */
    bool is_complete;                /* all bytes have come, and what the peer says of them: */
    bool has_checksum;
    uint64_t checksum;
    bool is_read_back; /* pieces[0] reads what is on the device */
    uint64_t read_bytes;
    const struct tl_error *end; /* the entry is off its link, and the fetch will be done with this; kept */
    bool has_failed;            /* a copy has failed since then */
};

enum tl_status link_landing_begin(struct link_fetch *entry, struct tl_error *ret_error)
{
    struct link_landing *landing = calloc(1, sizeof(*landing));
    if (landing == NULL)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no memory for bytes on their way to a device",
                            entry->fetch->key);
    grpc_slice_buffer_init(&landing->waiting);
    landing->filled_bytes = entry->fetch->received_bytes;
    entry->landing = landing;
    return TL_OK;
}

/* The link counts the fetches that have bytes which wait, and reads on when there are none. */
static void count_waiting(struct link_fetch *entry)
{
    struct link_landing *landing = entry->landing;
    bool is_waiting = landing->waiting.length > 0;
    if (is_waiting == landing->is_counted) return;
    landing->is_counted = is_waiting;
    entry->link->landing_count += is_waiting ? 1 : (size_t)-1;
}

static void landing_free(struct link_fetch *entry)
{
    grpc_slice_buffer_destroy(&entry->landing->waiting);
    tl_error_drop(entry->landing->end);
    free(entry->landing);
    entry->landing = NULL;
}

static bool has_pieces(const struct link_landing *landing)
{
    for (unsigned i = 0; i < PIECES; i++)
        if (landing->pieces[i] != NULL) return true;
    return false;
}

/* ------------------------------------------------------------------------------------------------------ pieces -- */

static void piece_came(void *context, struct tl_piece *piece, const struct tl_error *status);

static struct tl_piece *start_piece(struct link_fetch *entry, uint64_t offset_bytes, uint64_t left_bytes,
                                    struct tl_piece *(*start)(const struct tl_piece_options *options))
{
    const struct tl_piece_options options = {
        .tensor = entry->fetch->destination,
        .offset_bytes = offset_bytes,
        .len_bytes = left_bytes < TL_STAGING_BLOCK_BYTES ? left_bytes : TL_STAGING_BLOCK_BYTES,
        .post = post_to_loop,
        .loop = entry->link->control->loop,
        .notify = piece_came,
        .context = entry,
    };
    return start(&options);
}

/* Puts bytes that wait into the block of a piece, and starts its copy. */
static void fill(struct link_landing *landing, unsigned i)
{
    struct tl_piece *piece = landing->pieces[i];
    size_t len_bytes = (size_t)tl_piece_len_bytes(piece);
    grpc_slice_buffer_move_first_into_buffer(&landing->waiting, len_bytes, tl_piece_data(piece));
    landing->filled_bytes += len_bytes;
    landing->is_filled[i] = true;
    tl_piece_copy(piece);
}

/* A place for a further piece; PIECES: none, or a piece waits for a block already. */
static unsigned find_place(const struct link_landing *landing)
{
    unsigned place = PIECES;
    for (unsigned i = 0; i < PIECES; i++) {
        if (landing->pieces[i] == NULL) place = i;
        if (landing->pieces[i] != NULL && !landing->is_filled[i]) return PIECES;
    }
    return place;
}

static void fail_without_memory(struct link_fetch *entry)
{
    struct tl_error error;
    tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "%s: no memory for a copy to its device", entry->fetch->key);
    link_fetch_fail(entry, &error);
}

/* Reads what is on the device, piece by piece; then the fetch is complete. */
static void read_back(struct link_fetch *entry)
{
    struct link_landing *landing = entry->landing;
    uint64_t left = tl_fetch_meta_data(entry->fetch)->size_bytes - landing->read_bytes;
    if (!landing->is_read_back) tl_fetch_hash_again(entry->fetch);
    landing->is_read_back = true;
    if (left == 0) {
        link_fetch_complete(entry, landing->has_checksum, landing->checksum);
        return;
    }
    landing->pieces[0] = start_piece(entry, landing->read_bytes, left, tl_piece_read);
    if (landing->pieces[0] == NULL) fail_without_memory(entry);
}

static void go_on(struct link_fetch *entry)
{
    struct link_landing *landing = entry->landing;
    struct tl_link *link = entry->link;
    while (landing->waiting.length > 0 && entry->fetch->destination != NULL) {
        unsigned i = find_place(landing);
        if (i == PIECES) break;
        landing->is_filled[i] = false;
        landing->pieces[i] = start_piece(entry, landing->filled_bytes, landing->waiting.length, tl_piece_write);
        if (landing->pieces[i] == NULL) {
            fail_without_memory(entry);
            return;
        }
        if (tl_piece_data(landing->pieces[i]) != NULL) fill(landing, i);
    }
    count_waiting(entry);
    bool has_landed = landing->is_complete && entry->fetch->destination != NULL && landing->waiting.length == 0 &&
                      !has_pieces(landing);
    if (has_landed && entry->fetch->wants_checksum) {
        read_back(entry);
    } else if (has_landed) {
        link_fetch_complete(entry, landing->has_checksum, landing->checksum);
    }
    link_read_on(link);
}

/* --------------------------------------------------------------------------------------------------------- end -- */

/* A piece of a fetch that is off its link has ended. */
static void finish(struct link_fetch *entry, const struct tl_error *status)
{
    struct link_landing *landing = entry->landing;
    struct tl_fetch *fetch = entry->fetch;
    if (status->code != TL_OK) landing->has_failed = true;
    if (has_pieces(landing)) return;
    if (landing->has_failed) tl_fetch_restart(fetch);
    const struct tl_error *end = landing->end;
    landing->end = NULL;
    landing_free(entry);
    fetch->transport_state = NULL;
    free(entry);
    fetch->ops->done(fetch, tl_error_kept(end));
    tl_error_drop(end);
}

bool link_landing_end(struct link_fetch *entry, const struct tl_error *error)
{
    struct link_landing *landing = entry->landing;
    grpc_slice_buffer_reset_and_unref(&landing->waiting);
    count_waiting(entry);
    entry->fetch->received_bytes = landing->filled_bytes;
    if (landing->has_failed) tl_fetch_restart(entry->fetch);
    for (unsigned i = 0; i < PIECES; i++)
        if (landing->pieces[i] != NULL && tl_piece_stop(landing->pieces[i])) landing->pieces[i] = NULL;
    if (!has_pieces(landing)) {
        landing_free(entry);
        return true;
    }
    entry->link = NULL;
    landing->end = tl_error_keep(error);
    return false;
}

/* ------------------------------------------------------------------------------------------------------ events -- */

static void piece_came(void *context, struct tl_piece *piece, const struct tl_error *status)
{
    struct link_fetch *entry = context;
    struct link_landing *landing = entry->landing;
    unsigned i = landing->pieces[0] == piece ? 0 : 1;
    bool is_to_fill = status->code == TL_OK && !landing->is_read_back && !landing->is_filled[i] && entry->link != NULL;
    if (is_to_fill) {
        fill(landing, i);
        go_on(entry);
        return;
    }
    landing->pieces[i] = NULL;
    if (landing->is_read_back && status->code == TL_OK && entry->link != NULL) {
        tl_fetch_hash(entry->fetch, tl_piece_data(piece), tl_piece_len_bytes(piece));
        landing->read_bytes += tl_piece_len_bytes(piece);
    }
    struct tl_error error = *status;
    tl_piece_put(piece);
    if (entry->link == NULL) {
        finish(entry, &error);
    } else if (error.code != TL_OK) {
        tl_error_prefix(&error, "%s: ", entry->fetch->key);
        landing->has_failed = true;
        link_fetch_fail(entry, &error);
    } else if (landing->is_read_back) {
        read_back(entry);
    } else {
        go_on(entry);
    }
}

enum tl_status link_landing_take(struct link_fetch *entry, uint64_t count, struct tl_wire_data *data,
                                 struct tl_error *ret_error)
{
    struct tl_fetch *fetch = entry->fetch;
    uint64_t left = tl_fetch_meta_data(fetch)->size_bytes - fetch->received_bytes;
    if (count > left)
        return tl_error_set(ret_error, TL_OUT_OF_RANGE, "%s: %s sends %llu bytes where %llu are left", fetch->key,
                            entry->link->peer.name, (unsigned long long)count, (unsigned long long)left);
    fetch->received_bytes += count;
    entry->link->control->stats.bytes_received += count;
    while (count > 0) {
        grpc_slice slice = tl_wire_data_take(data, count);
        count -= GRPC_SLICE_LENGTH(slice);
        grpc_slice_buffer_add(&entry->landing->waiting, slice);
    }
    return TL_OK;
}

void link_landing_go_on(struct link_fetch *entry, const Tensorlane__V1__Chunk *chunk)
{
    struct link_landing *landing = entry->landing;
    if (entry->fetch->received_bytes == tl_fetch_meta_data(entry->fetch)->size_bytes) {
        landing->is_complete = true;
        landing->has_checksum = chunk->has_checksum != 0;
        landing->checksum = chunk->checksum;
    }
    go_on(entry);
}

void link_landing_placed(struct tl_fetch *fetch, const struct tl_error *status)
{
    struct link_fetch *entry = fetch->transport_state;
    struct tl_error error = *status;
    if (entry == NULL || entry->link == NULL) return; /* it has left its link */
    if (error.code != TL_OK || tl_fetch_place(fetch, &error) != TL_OK) {
        link_fetch_fail(entry, &error);
        return;
    }
    go_on(entry);
}
