// SPDX-License-Identifier: Apache-2.0
/*
 * The pieces of tensors in the frames of a link.
 *
 * A frame carries at most options.chunk_bytes of tensor bytes: one piece of a large tensor, or hundreds of small ones.
 * Tensors that are being sent alternate, frame by frame; how many are begun is bounded by options.inflight_bytes.
 *
 * The bytes are slices of the tensors' own memory, which gRPC gives back when it has written them. Tensors of at most
 * LINK_COPY_BYTES are copied, many into one slice, because a reference and a slice for each cost more; and so are
 * tensors whose bytes do not lie in one piece.
 *
 * A file may be cut or changed while it is sent, and the kernel then reads zeros or other bytes. So the last bytes of a
 * tensor that lies in a file are sent only when the kernel has read all others and the file is still what it was; these
 * last bytes are copied, and checked after that. A small tensor of a file is copied as a whole. With a checksum the
 * receiver notices, and nothing is held back.
 */
#include <string.h>
#include <xxhash.h>

#include "base/arith.h"
#include "base/check.h"
#include "control/link_frame.h"
#include "tensor/mapped_tensor.h"

/* Pieces of several tensors in one frame, which is what a link sends before others have their turn. */
#define ROUND_BYTES (2 * 1024 * 1024)
/* A tensor in a file is copied up to this size. The end of a larger one is held back: so many bytes. */
#define FILE_COPY_BYTES (64 * 1024)
#define FILE_END_BYTES 4096
/* Bytes hashed again for one frame before resumed transfers go on: of all of them together. */
#define CATCH_UP_BYTES (4 * 1024 * 1024)

/* Begins what is ready, as far as fits. What has been begun with a lesser priority does not count, so that it holds up
 * nothing: it goes on behind. */
static void activate_ready(struct tl_link *link)
{
    struct link_serve *entry;
    while ((entry = link_queue_first(&link->answers.ready)) != NULL) {
        if (!link_serve_fits_link(entry, link_active_bytes(link, entry->priority))) return;
        if (entry->sending->offer.tensor == NULL) {
            if (link_active_bytes(link, 0) > 0 && !link_serve_fits_worker(entry)) return;
            if (tl_quota_left(tl_loop_quota(link->control->loop)) == 0) { /* the sources have copied many bytes */
                link_flush_later(link);
                return;
            }
            link_serve_ask_again(entry);
            continue;
        }
        tl_list_remove(&entry->place);
        if (link_serve_is_on_device(entry) &&
            (link_serve_bytes_left(entry) > 0 || entry->sending->hash_state != NULL)) {
            link_serve_stage(entry);
            continue;
        }
        link_queue_push(&link->answers.active, entry);
        link_serve_set_state(entry, SERVE_ACTIVE);
    }
}

static void hash(void *hash_state, unsigned char *bytes, size_t len_bytes)
{
    TL_CHECK(XXH3_64bits_update(hash_state, bytes, len_bytes) == XXH_OK);
}

/* Hashes up to where the transfer goes on, and takes the bytes from *budget_bytes. Returns false while there is more to
 * hash, or when the serve has failed. */
static bool serve_catch_up(struct link_serve *entry, uint64_t *budget_bytes)
{
    struct link_sending *sending = entry->sending;
    if (sending->hash_state == NULL || sending->hashed_bytes == sending->sent_bytes) return true;
    if (link_serve_is_on_device(entry)) return true; /* hashed when it was read */
    if (*budget_bytes == 0) return false;
    uint64_t take = tl_min_u64(sending->sent_bytes - sending->hashed_bytes, *budget_bytes);
    *budget_bytes -= take;
    struct tl_error error;
    if (tl_tensor_check_readable(sending->offer.tensor, sending->hashed_bytes, take, &error) != TL_OK) {
        link_serve_fail(entry, &error);
        return false;
    }
    tl_tensor_walk(sending->offer.tensor, sending->hashed_bytes, take, hash, sending->hash_state);
    sending->hashed_bytes += take;
    entry->link->stall.has_progressed = true; /* the peer waits for us */
    return sending->hashed_bytes == sending->sent_bytes;
}

static void announce(struct link_serve *entry, struct tl_frame_builder *builder, size_t i)
{
    struct link_sending *sending = entry->sending;
    Tensorlane__V1__Chunk *chunk = &builder->chunks[i];
    tl_wire_from_meta_data(tl_tensor_meta_data(sending->offer.tensor), builder->dims[i], &builder->meta_data[i]);
    chunk->meta_data = &builder->meta_data[i];
    chunk->publication = sending->offer.publication;
    chunk->step = sending->offer.step;
    chunk->is_one_shot = sending->offer.is_one_shot;
    sending->is_announced = true;
    builder->head_bytes += 64 + 10 * (size_t)builder->meta_data[i].n_dims;
}

/* Whether the bytes must be checked after they were read, because no checksum shows a change. */
static bool is_of_a_file(const struct link_serve *entry)
{
    return entry->sending->hash_state == NULL && tl_tensor_may_change(entry->sending->offer.tensor);
}

static bool is_copied(const struct link_serve *entry)
{
    if (entry->sending->size_bytes <= LINK_COPY_BYTES || tl_tensor_is_in_runs(entry->sending->offer.tensor))
        return true;
    return is_of_a_file(entry) &&
           (entry->sending->size_bytes <= FILE_COPY_BYTES || link_serve_bytes_left(entry) <= FILE_END_BYTES);
}

/* Adds the next bytes on the host. As far as the CPU reads them, to hash or copy them, they are checked before, and
 * again after, because a file may be cut in between and be read as zeros. */
static enum tl_status add_host_bytes(struct link_serve *entry, uint64_t count, struct tl_frame_builder *builder,
                                     struct tl_error *ret_error)
{
    struct link_sending *sending = entry->sending;
    struct tl_tensor *tensor = sending->offer.tensor;
    bool is_copy = is_copied(entry);
    enum tl_status status = tl_tensor_check_readable(tensor, sending->sent_bytes, count, ret_error);
    if (status != TL_OK) return status;
    unsigned char *copy = is_copy ? link_copies_space(builder, entry->link, (size_t)count) : NULL;
    if (is_copy) tl_tensor_read(tensor, sending->sent_bytes, count, copy);
    if (sending->hash_state != NULL) {
        hash(sending->hash_state, is_copy ? copy : (unsigned char *)tl_tensor_data(tensor) + sending->sent_bytes,
             (size_t)count);
        sending->hashed_bytes += count;
    }
    if (is_copy || sending->hash_state != NULL) {
        status = tl_tensor_check_readable(tensor, sending->sent_bytes, count, ret_error);
    }
    if (status != TL_OK) return status;
    if (is_copy) {
        builder->copies.end_bytes += count;
        entry->link->control->stats.bytes_copied_send += count;
    } else {
        link_copies_end(builder);
        builder->slices[builder->slice_count++] = tl_wire_slice_of_tensor(tensor, sending->sent_bytes, count);
    }
    return TL_OK;
}

static enum tl_status add_bytes(struct link_serve *entry, uint64_t count, struct tl_frame_builder *builder,
                                struct tl_error *ret_error)
{
    if (!link_serve_is_on_device(entry)) return add_host_bytes(entry, count, builder, ret_error);
    link_copies_end(builder);
    builder->slices[builder->slice_count++] = tl_device_reader_take(&entry->sending->reader, count);
    return TL_OK;
}

/* How many more bytes the frame takes: one piece of options.chunk_bytes, or smaller ones of at most ROUND_BYTES, so
 * that other links soon have their turn. */
static uint64_t space_bytes(const struct tl_link *link, const struct tl_frame_builder *builder)
{
    uint64_t limit = link->control->options.chunk_bytes;
    if (builder->chunk_count > 0) limit = tl_min_u64(limit, ROUND_BYTES);
    return limit > builder->data_bytes ? limit - builder->data_bytes : 0;
}

/* How many bytes the next piece of an active tensor has. */
static uint64_t next_bytes(const struct link_serve *entry, const struct tl_frame_builder *builder)
{
    uint64_t left = link_serve_bytes_left(entry);
    if (link_serve_is_on_device(entry)) left = tl_device_reader_bytes(&entry->sending->reader);
    if (is_of_a_file(entry) && !is_copied(entry)) left -= FILE_END_BYTES;
    return tl_min_u64(left, space_bytes(entry->link, builder));
}

/* Adds the next piece of an active tensor; false when it has failed instead. */
static bool add_chunk(struct link_serve *entry, struct tl_frame_builder *builder)
{
    struct link_sending *sending = entry->sending;
    struct tl_link *link = entry->link;
    uint64_t count = next_bytes(entry, builder);
    struct tl_error error;
    if (count > 0 && add_bytes(entry, count, builder, &error) != TL_OK) {
        link_serve_fail(entry, &error);
        return false;
    }
    size_t i = link->is_packed ? 0 : builder->chunk_count; /* one that is packed is not needed any more */
    builder->chunk_count++;
    Tensorlane__V1__Chunk *chunk = &builder->chunks[i];
    tensorlane__v1__chunk__init(chunk);
    chunk->number = entry->serve.id.number;
    chunk->offset = sending->sent_bytes;
    chunk->len_bytes = count;
    builder->head_bytes += 64;
    if (!sending->is_announced) announce(entry, builder, i);
    builder->data_bytes += count;
    sending->sent_bytes += count;
    link->answers.active_bytes[entry->priority] -= count;
    link->control->referenced_bytes -= count;
    link->control->stats.bytes_sent += count;
    bool is_last = link_serve_bytes_left(entry) == 0;
    if (is_last && sending->hash_state != NULL) {
        chunk->has_checksum = 1;
        chunk->checksum = XXH3_64bits_digest(sending->hash_state);
    }
    if (is_last) builder->complete[builder->complete_count++] = entry;
    if (link->is_packed) tl_pack_chunk(&builder->packed_chunks, chunk);
    return true;
}

/* A piece was sent: where the serve waits for the next one. */
static void wait_for_next(struct link_serve *entry, bool was_copied)
{
    struct tl_link *link = entry->link;
    tl_list_remove(&entry->place);
    if (link_serve_bytes_left(entry) == 0) return;
    struct tl_error error;
    if (link_serve_is_on_device(entry) && tl_device_reader_go_on(&entry->sending->reader, &error) != TL_OK) {
        link_serve_fail_reading(entry, &error);
        return;
    }
    if (link_serve_is_on_device(entry) && tl_device_reader_bytes(&entry->sending->reader) == 0) {
        link_serve_set_state(entry, SERVE_STAGING);
        return;
    }
    /* Its end would be copied, and the bytes before it were not: they leave first. */
    bool is_leaving = !was_copied && is_of_a_file(entry) && is_copied(entry);
    if (is_leaving) link_serve_set_state(entry, SERVE_LEAVING);
    if (is_leaving) {
        tl_list_push_back(&link->answers.leaving, &entry->place);
    } else {
        link_queue_push(&link->answers.active, entry);
    }
}

void link_serves_left(struct tl_link *link)
{
    struct tl_list *place;
    while ((place = tl_list_pop_front(&link->answers.leaving)) != NULL) {
        struct link_serve *entry = TL_CONTAINER_OF(place, struct link_serve, place);
        link_serve_set_state(entry, SERVE_ACTIVE);
        link_queue_push(&link->answers.active, entry);
    }
}

void link_chunks_add(struct tl_link *link, struct tl_frame_builder *builder)
{
    activate_ready(link);
    struct tl_list waiting; /* those that must hash first; they keep their order, so that each has its turn */
    uint64_t budget_bytes = CATCH_UP_BYTES;
    tl_list_init(&waiting);
    struct link_serve *entry;
    while ((entry = link_queue_first(&link->answers.active)) != NULL && builder->chunk_count < LINK_FRAME_CHUNKS &&
           builder->head_bytes < LINK_FRAME_HEAD_BYTES && space_bytes(link, builder) > 0) {
        if (!serve_catch_up(entry, &budget_bytes)) {
            if (entry->state != SERVE_ACTIVE) continue;
            tl_list_remove(&entry->place);
            tl_list_push_back(&waiting, &entry->place);
            continue;
        }
        bool was_copied = is_copied(entry);
        if (!add_chunk(entry, builder)) continue;
        wait_for_next(entry, was_copied);
        activate_ready(link);
    }
    if (!tl_list_is_empty(&waiting)) {
        struct tl_list *place;
        while ((place = tl_list_pop_front(&waiting)) != NULL)
            link_queue_push(&link->answers.active, TL_CONTAINER_OF(place, struct link_serve, place));
        link_flush_later(link);
    }
}
