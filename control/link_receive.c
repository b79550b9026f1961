// SPDX-License-Identifier: Apache-2.0
/*
 * The receiving half of a link: what a frame of the peer says, and where its bytes go.
 *
 * Happy path: the head of the frame is unpacked; acknowledgements, cancels and requests are handed on; failures end
 * their fetches; the bytes of each chunk are copied once, from gRPC's memory to the destination of its fetch; a fetch
 * whose bytes are complete is verified, acknowledged if it was a one-shot tensor, and done. Failure modes: bytes for a
 * request that was given up are skipped and counted; bytes that do not fit what was announced end that fetch; a frame
 * that does not add up ends the link.
 */
#include <stdlib.h>

#include <tensorlane/tensor.h>

#include "base/check.h"
#include "base/copy.h"
#include "base/error.h"
#include "control/link_frame.h"
#include "control/link_serves.h"
#include "control/packed.h"

/* Tensors from this size on would not stay in the caches until they are used anyway. */
#define UNCACHED_BYTES (4 * 1024 * 1024)

/* ----------------------------------------------------------------------------------------------------- fetches -- */

/* Most answers come in the order of the requests, so that the request that was made first is looked at first. */
static struct link_fetch *fetch_find(struct tl_link *link, uint64_t number)
{
    if (!tl_list_is_empty(&link->asked)) {
        struct link_fetch *first = TL_CONTAINER_OF(link->asked.next, struct link_fetch, request_link);
        if (first->number == number) return first;
    }
    return tl_number_map_find(&link->fetches, number);
}

void tl_link_fetch(struct tl_link *link, struct tl_fetch *fetch)
{
    fetch->is_final = false;
    fetch->placed = link_landing_placed;
    struct link_fetch *entry = tl_spares_get(&link->control->fetches, sizeof(*entry));
    bool is_added = entry != NULL && tl_number_map_add(&link->fetches, fetch->number, entry);
    if (is_added) {
        entry->number = fetch->number;
        entry->fetch = fetch;
        entry->link = link;
        tl_list_init(&entry->request_link);
        fetch->transport_state = entry;
        tl_list_push_back(&link->to_request, &entry->request_link);
    } else {
        free(entry);
        fetch->transport_state = NULL;
        tl_list_push_back(&link->to_fail, &fetch->transport_link);
    }
    link_flush_later(link);
}

/* Takes the fetch off its link. Returns true when it is over and its entry is gone; false when it will be done with
 * this error as soon as a device has let go of its destination. */
static bool take_off(struct link_fetch *entry, const struct tl_error *error)
{
    tl_number_map_remove(&entry->link->fetches, entry->number);
    tl_list_remove(&entry->request_link);
    if (entry->landing != NULL && !link_landing_end(entry, error)) return false;
    entry->fetch->transport_state = NULL;
    tl_spares_put(&entry->link->control->fetches, entry);
    return true;
}

/* Takes the fetch off its link and ends it. */
static void end_fetch(struct link_fetch *entry, const struct tl_error *error)
{
    struct tl_fetch *fetch = entry->fetch;
    struct tl_link *link = entry->link;
    if (take_off(entry, error)) fetch->ops->done(fetch, error);
    if (link->state == LINK_DRAINING) link_flush_later(link);
    link_read_on(link);
}

void link_confirm(struct tl_link *link, uint64_t count_received)
{
    if (count_received <= link->confirmed_count) return;
    size_t count = (size_t)(count_received - link->confirmed_count);
    tl_numbers_drop(&link->received, count);
    link->framed_count -= count;
    link->confirmed_count = count_received;
}

/* Informs the peer that the request is given up. When there is no memory to remember that, the link is ended instead.
 */
static void queue_cancel(struct tl_link *link, uint64_t number)
{
    if (link->state == LINK_CLOSING) return;
    if (tl_numbers_push(&link->cancels, number)) {
        link_flush_later(link);
        return;
    }
    struct tl_error error;
    tl_error_set(&error, TL_UNAVAILABLE, "no memory to cancel a request");
    tl_link_close(link, &error);
}

bool tl_link_cancel(struct tl_link *link, struct tl_fetch *fetch)
{
    struct link_fetch *entry = fetch->transport_state;
    if (entry == NULL) {
        tl_list_remove(&fetch->transport_link);
        return true;
    }
    if (entry->link == NULL) return false; /* it has ended, and the link may be gone */
    bool was_asked = entry->is_asked;
    uint64_t number = entry->number;
    struct tl_error error;
    tl_error_set(&error, TL_CANCELLED, "%s was cancelled", fetch->key);
    bool is_over = take_off(entry, &error);
    if (was_asked) queue_cancel(link, number);
    if (link->state == LINK_DRAINING) link_flush_later(link);
    link_read_on(link);
    return is_over;
}

/* Ends the fetch of the link that is the first of a list. */
static void break_first(struct tl_link *link, struct tl_list *list, const struct tl_error *reason)
{
    if (list == &link->to_fail) {
        struct tl_fetch *fetch = TL_CONTAINER_OF(tl_list_pop_front(list), struct tl_fetch, transport_link);
        fetch->ops->done(fetch, reason);
        return;
    }
    struct link_fetch *entry = TL_CONTAINER_OF(tl_list_pop_front(list), struct link_fetch, request_link);
    struct tl_fetch *fetch = entry->fetch;
    if (entry->is_asked) fetch->is_unsettled = true;
    if (take_off(entry, reason)) fetch->ops->done(fetch, reason);
}

bool link_fetches_break(struct tl_link *link, const struct tl_error *reason)
{
    struct tl_quota *quota = tl_loop_quota(link->control->loop);
    struct tl_list *const lists[] = {&link->to_fail, &link->asked, &link->to_request};
    for (size_t i = 0; i < TL_ARRAY_COUNT(lists); i++) {
        while (!tl_list_is_empty(lists[i])) {
            if (tl_quota_left(quota) == 0) return false;
            tl_quota_use(quota, 1);
            break_first(link, lists[i], reason);
        }
    }
    return true;
}

void link_fetch_fail(struct link_fetch *entry, const struct tl_error *error)
{
    queue_cancel(entry->link, entry->number);
    end_fetch(entry, error);
}

void link_fetch_complete(struct link_fetch *entry, bool has_checksum, uint64_t checksum)
{
    struct tl_link *link = entry->link;
    struct tl_error result; /* its text is not cleared, because this runs for every tensor */
    if (tl_fetch_verify(entry->fetch, has_checksum, checksum, &result) != TL_OK) {
        link_fetch_fail(entry, &result);
        return;
    }
    if (entry->is_one_shot && !tl_numbers_push(&link->received, entry->number)) {
        tl_error_set(&result, TL_RESOURCE_EXHAUSTED, "no memory to acknowledge %s", entry->fetch->key);
        link_fetch_fail(entry, &result);
        return;
    }
    if (entry->is_one_shot) link_flush_later(link);
    link->control->stats.tensors_received++;
    result.code = TL_OK;
    result.message[0] = '\0';
    entry->fetch->path = tl_fetch_meta_data(entry->fetch)->dtype == TL_STRING ? TL_PATH_SERIALIZED : TL_PATH_GRPC;
    end_fetch(entry, &result);
}

/* ------------------------------------------------------------------------------------------------------ chunks -- */

static void skip(struct tl_wire_data *data, uint64_t count)
{
    while (count > 0) {
        const void *run;
        count -= tl_wire_data_next(data, count, &run);
    }
}

static enum tl_status begin(struct link_fetch *entry, const Tensorlane__V1__Chunk *chunk, struct tl_error *ret_error)
{
    struct tl_fetch *fetch = entry->fetch;
    if (chunk->meta_data != NULL && entry->landing != NULL) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: %s begins it twice", fetch->key,
                            entry->link->peer.name);
    }
    if (chunk->meta_data != NULL) {
        struct tl_meta_data meta_data;
        enum tl_status status = tl_wire_to_meta_data(chunk->meta_data, &meta_data, ret_error);
        if (status != TL_OK) {
            tl_error_prefix(ret_error, "tensor '%s': ", fetch->key);
            return status;
        }
        status = tl_fetch_begin(fetch, &meta_data, chunk->publication, chunk->step, chunk->offset, ret_error);
        if (status != TL_OK) return status;
        entry->is_begun = true;
        tl_fetch_begun(fetch);
        entry->is_one_shot = chunk->is_one_shot != 0;
        bool is_landing = fetch->destination == NULL || tl_tensor_is_on_device(fetch->destination);
        if (is_landing && link_landing_begin(entry, ret_error) != TL_OK) return ret_error->code;
    }
    if (!entry->is_begun) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: %s sent bytes before the meta-data", fetch->key,
                            entry->link->peer.name);
    }
    if (chunk->offset != fetch->received_bytes) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: %s sent bytes at offset %llu where %llu was next",
                            fetch->key, entry->link->peer.name, (unsigned long long)chunk->offset,
                            (unsigned long long)fetch->received_bytes);
    }
    return TL_OK;
}

static void copy(void *context, unsigned char *to, size_t count)
{
    const unsigned char **from = context;
    tl_copy(to, *from, count);
    *from += count;
}

static void copy_uncached(void *context, unsigned char *to, size_t count)
{
    const unsigned char **from = context;
    tl_copy_uncached(to, *from, count);
    *from += count;
}

/* What is verified is read again at once, so that it has to be in the caches. For runs, which may be short, the end of
 * each copy past the caches would be waited for. */
static tl_bytes_fn copy_for(const struct tl_fetch *fetch)
{
    bool is_uncached = tl_fetch_meta_data(fetch)->size_bytes >= UNCACHED_BYTES && !fetch->wants_checksum &&
                       !(fetch->destination != NULL && tl_tensor_is_in_runs(fetch->destination));
    return is_uncached ? copy_uncached : copy;
}

/* Copies the chunk's bytes to the destination. */
static enum tl_status place(struct link_fetch *entry, uint64_t count, struct tl_wire_data *data,
                            struct tl_error *ret_error)
{
    struct tl_control *control = entry->link->control;
    while (count > 0) {
        const void *run;
        size_t got = tl_wire_data_next(data, count, &run);
        const unsigned char *from = run;
        enum tl_status status = tl_fetch_fill(entry->fetch, got, copy_for(entry->fetch), &from, ret_error);
        if (status != TL_OK) return status;
        count -= got;
        tl_fetch_advance(entry->fetch, got);
        control->stats.bytes_received += got;
    }
    return TL_OK;
}

static void handle_chunk(struct tl_link *link, const Tensorlane__V1__Chunk *chunk, struct tl_wire_data *data)
{
    if (chunk->len_bytes > data->left_bytes) {
        link_protocol_error(link, "a chunk of %llu bytes in a frame that has %llu left",
                            (unsigned long long)chunk->len_bytes, (unsigned long long)data->left_bytes);
        return;
    }
    struct link_fetch *entry = fetch_find(link, chunk->number);
    if (entry == NULL || !entry->is_asked) {
        skip(data, chunk->len_bytes);
        link->control->stats.late_chunks++;
        return;
    }
    link_confirm(link, entry->framed_before);
    struct tl_error error;
    uint64_t left_bytes = data->left_bytes - chunk->len_bytes;
    enum tl_status status = begin(entry, chunk, &error);
    if (status == TL_OK && entry->landing != NULL) {
        status = link_landing_take(entry, chunk->len_bytes, data, &error);
    } else if (status == TL_OK) {
        status = place(entry, chunk->len_bytes, data, &error);
    }
    if (status != TL_OK) {
        skip(data, data->left_bytes - left_bytes);
        if (status == TL_INVALID_ARGUMENT || status == TL_OUT_OF_RANGE) link->control->stats.protocol_errors++;
        link_fetch_fail(entry, &error);
    } else if (entry->landing != NULL) {
        link_landing_go_on(entry, chunk);
    } else if (tl_fetch_is_complete(entry->fetch)) {
        link_fetch_complete(entry, chunk->has_checksum != 0, chunk->checksum);
    }
}

static void handle_failure(struct tl_link *link, const Tensorlane__V1__Failure *failure)
{
    struct link_fetch *entry = fetch_find(link, failure->number);
    if (entry == NULL || !entry->is_asked) return;
    link_confirm(link, entry->framed_before);
    struct tl_error error;
    const Tensorlane__V1__Status *status = failure->status;
    enum tl_status code = status != NULL && status->code >= 1 && status->code <= TL_UNAUTHENTICATED
                              ? (enum tl_status)status->code
                              : TL_UNKNOWN;
    tl_error_set(&error, code, "%s",
                 status != NULL && status->message[0] != '\0' ? status->message : "the peer gave no reason");
    entry->fetch->is_final = failure->is_final != 0;
    end_fetch(entry, &error);
}

/* ------------------------------------------------------------------------------------------------------ frames -- */

/* All at once: what was received must not be lost with the link. */
static void handle_settled(struct tl_link *link, const Tensorlane__V1__Frame *frame)
{
    for (size_t i = 0; i < frame->n_received; i++)
        link_serve_received(link, frame->received[i]);
    for (size_t i = 0; i < frame->n_cancels; i++)
        link_serve_cancel(link, frame->cancels[i]);
    tl_quota_use(tl_loop_quota(link->control->loop), (uint32_t)(frame->n_received + frame->n_cancels));
}

static void handle_control_fields(struct tl_link *link, const Tensorlane__V1__Frame *frame)
{
    link_window_reported(link, frame->taken_bytes);
    if (link->state != LINK_CLOSING) handle_settled(link, frame);
}

/* Returns how many chunks there were. */
static size_t handle_packed_chunks(struct tl_link *link, const ProtobufCBinaryData *field, struct tl_wire_data *data)
{
    struct tl_unpacker unpacker = tl_unpacker_begin(field);
    size_t count = 0;
    while (!tl_unpacker_is_at_end(&unpacker) && link->state != LINK_CLOSING) {
        struct tl_unpacked_chunk unpacked;
        struct tl_error error;
        if (tl_unpack_chunk(&unpacker, &unpacked, &error) != TL_OK) {
            link_protocol_error(link, "%s", error.message);
            break;
        }
        handle_chunk(link, &unpacked.chunk, data);
        count++;
    }
    return count;
}

/* Whether the other side makes requests, or ends some, on a link that we have opened for our own alone. It was not
 * admitted as a peer may be that asks. */
static bool is_asked_one_way(const struct tl_link *link, const Tensorlane__V1__Frame *frame)
{
    if (!link->is_ours || !link->peer.is_one_way) return false;
    return frame->n_requests > 0 || frame->packed_requests.len > 0 || frame->n_received > 0 || frame->n_cancels > 0 ||
           (frame->hello != NULL && frame->hello->n_received > 0);
}

/* Handles what stands in front of the requests. False: the link has ended, or the frame must wait. */
static bool handle_front(struct tl_link *link, const Tensorlane__V1__Frame *frame)
{
    if ((frame->hello != NULL) != (link->state == LINK_HANDSHAKE)) {
        link_protocol_error(link, frame->hello != NULL ? "a second hello" : "a frame before the hello");
        return false;
    }
    if (is_asked_one_way(link, frame)) {
        link_protocol_error(link, "it asks on a link that is for requests to it alone");
        return false;
    }
    if (frame->hello != NULL) link_handshake_done(link, frame->hello);
    if (link->state == LINK_ASKING) return false;
    link_connections_handle(link, frame);
    if (link->state == LINK_CLOSING) return false;
    handle_control_fields(link, frame);
    return link->state != LINK_CLOSING;
}

/* Whether the failures and chunks of a frame may be handled before others have their turn. How many packed chunks there
 * are is not known before. */
static bool has_quota_for_rest(const struct tl_link *link, const Tensorlane__V1__Frame *frame)
{
    size_t most = frame->n_failures + frame->n_chunks + (frame->packed_chunks.len > 0 ? LINK_FRAME_CHUNKS : 0);
    uint32_t left = tl_quota_left(tl_loop_quota(link->control->loop));
    return most <= left || left == TL_QUOTA;
}

/* Handles a frame, or a part of it: then link->held.is_begun, and the rest follows when others had their turn.
 * *ret_chunk_count is how many chunks there were. */
static void handle_frame(struct tl_link *link, const Tensorlane__V1__Frame *frame, struct tl_wire_data *data,
                         size_t *ret_chunk_count)
{
    *ret_chunk_count = frame->n_chunks;
    if (!link->held.is_begun && !handle_front(link, frame)) return;
    link->held.is_begun = true;
    if (!link_requests_handle(link, frame) || !has_quota_for_rest(link, frame)) return;
    link->held.is_begun = false;
    link->held.handled_requests = 0;
    for (size_t i = 0; i < frame->n_failures && link->state != LINK_CLOSING; i++) {
        handle_failure(link, frame->failures[i]);
    }
    for (size_t i = 0; i < frame->n_chunks && link->state != LINK_CLOSING; i++) {
        handle_chunk(link, frame->chunks[i], data);
    }
    *ret_chunk_count += handle_packed_chunks(link, &frame->packed_chunks, data);
    tl_quota_use(tl_loop_quota(link->control->loop), (uint32_t)(*ret_chunk_count + frame->n_failures));
    if (link->state != LINK_CLOSING && data->left_bytes > 0) {
        link_protocol_error(link, "%llu bytes that belong to no chunk", (unsigned long long)data->left_bytes);
    }
    if (frame->goodbye && tl_link_is_ours(link)) tl_link_drain(link);
    link_maybe_drained(link);
}

void link_receive_last(struct tl_link *link, grpc_byte_buffer *buffer)
{
    ProtobufCMessage *message;
    struct tl_wire_data data;
    if (tl_wire_read(&tensorlane__v1__frame__descriptor, buffer, link->control->arena, &message, &data, NULL) != TL_OK)
        return;
    const Tensorlane__V1__Frame *frame = (const Tensorlane__V1__Frame *)message;
    link->control->stats.frames_received++;
    if (!is_asked_one_way(link, frame)) handle_settled(link, frame);
    tl_wire_data_fini(&data);
}

void link_receive_frame(struct tl_link *link, grpc_byte_buffer *buffer)
{
    link->control->stats.frames_received++;
    ProtobufCMessage *message;
    struct tl_wire_data data;
    struct tl_error error;
    if (tl_wire_read(&tensorlane__v1__frame__descriptor, buffer, link->control->arena, &message, &data, &error) !=
        TL_OK) {
        link_protocol_error(link, "%s", error.message);
        return;
    }
    uint64_t data_bytes = data.left_bytes;
    size_t chunk_count;
    handle_frame(link, (const Tensorlane__V1__Frame *)message, &data, &chunk_count);
    if (link->state == LINK_CLOSING) {
        link->held.is_begun = false;
        link->held.handled_requests = 0;
    }
    if (link->state == LINK_ASKING || link->held.is_begun) {
        link->control->stats.frames_received--; /* it comes again */
    } else {
        link_window_took(link, data_bytes);
        link_stall_progressed(link, chunk_count);
    }
    tl_wire_data_fini(&data);
}
