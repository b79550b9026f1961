// SPDX-License-Identifier: Apache-2.0
/*
 * The sending half of a link: frames, and the failures in them.
 *
 * Whenever the stream can take a message, one frame is composed of all that waits: requests (link_requests.c), cancels,
 * acknowledgements, failures, and pieces of tensors (link_chunks.c), as many as fit. No tensor's bytes are sent while
 * the peer has too much to take.
 */
#include <stdlib.h>
#include <string.h>

#include <tensorlane/version.h>

#include "base/arith.h"
#include "base/error.h"
#include "control/link_frame.h"

#define MAX_NUMBERS TL_QUOTA

struct tl_frame_builder *tl_frame_builder_create(void)
{
    return malloc(sizeof(struct tl_frame_builder));
}

void tl_frame_builder_destroy(struct tl_frame_builder *builder)
{
    free(builder);
}

grpc_byte_buffer *link_hello(struct tl_link *link, size_t received_count)
{
    const struct tl_identity *self = &link->control->options.self;
    Tensorlane__V1__Hello hello = TENSORLANE__V1__HELLO__INIT;
    hello.protocol_version = TL_PROTOCOL_VERSION;
    hello.name = (char *)self->name;
    hello.incarnation = self->incarnation;
    hello.software_version = (char *)TL_VERSION;
    hello.expected_name = link->expected_name;
    hello.window_bytes = link->window.ours_bytes;
    if (tl_identity_has_host(self)) {
        hello.host = (ProtobufCBinaryData){.len = TL_HOST_BYTES, .data = (uint8_t *)self->host};
    }
    hello.host_name = (char *)self->host_name;
    hello.process_id = self->process_id;
    hello.cluster_digest = self->cluster_digest;
    hello.serves_probes = self->serves_probes;
    hello.serves_subscriptions = self->serves_subscriptions;
    hello.serves_parts = self->serves_parts;
    hello.fetches_puts = self->fetches_puts;
    hello.is_one_way = link->is_ours && link->peer.is_one_way;
    hello.reads_packed = 1;
    hello.kept_keys = link->keys.kept.limit;
    hello.n_received = received_count;
    hello.received = (uint64_t *)tl_numbers_items(&link->received);
    Tensorlane__V1__Frame frame = TENSORLANE__V1__FRAME__INIT;
    frame.hello = &hello;
    return tl_wire_write(&frame.base);
}

/* ---------------------------------------------------------------------------------------------------- failures -- */

static void add_failures(struct tl_link *link, struct tl_frame_builder *builder)
{
    while (!tl_list_is_empty(&link->answers.failures) && builder->frame.n_failures < LINK_FRAME_FAILURES &&
           builder->head_bytes < LINK_FRAME_HEAD_BYTES) {
        struct link_serve *entry =
            TL_CONTAINER_OF(tl_list_pop_front(&link->answers.failures), struct link_serve, place);
        const struct link_status *failure = entry->sending != NULL ? entry->sending->failure : NULL;
        enum tl_status code = failure != NULL ? failure->code : TL_RESOURCE_EXHAUSTED;
        const char *message = failure != NULL ? failure->message : "no memory";
        size_t i = builder->frame.n_failures++;
        builder->failed[i] = entry;
        tensorlane__v1__failure__init(&builder->failures[i]);
        tensorlane__v1__status__init(&builder->statuses[i]);
        builder->statuses[i].code = (uint32_t)code;
        builder->statuses[i].message = (char *)message;
        builder->failures[i].number = entry->serve.id.number;
        builder->failures[i].status = &builder->statuses[i];
        builder->failures[i].is_final = entry->serve.is_final;
        builder->head_bytes += strlen(message) + 48;
    }
}

/* ------------------------------------------------------------------------------------------------------ frames -- */

static bool is_anything_waiting(const struct tl_link *link)
{
    return !tl_list_is_empty(&link->connection_messages) || !tl_list_is_empty(&link->to_request) ||
           link->cancels.count > 0 || link->received.count > link->framed_count ||
           !tl_list_is_empty(&link->answers.failures) || link_window_must_report(link) ||
           ((!link_queue_is_empty(&link->answers.ready) || !link_queue_is_empty(&link->answers.active)) &&
            !link_window_is_full(link));
}

/* The frame was sent: ends the serves that have nothing more to send. */
static void finish_frame(struct tl_link *link, struct tl_frame_builder *builder)
{
    link_connections_sent(link, builder->frame.n_connections);
    tl_numbers_drop(&link->cancels, builder->frame.n_cancels);
    link->framed_count += builder->frame.n_received;
    for (size_t i = 0; i < builder->frame.n_failures; i++) {
        struct link_serve *entry = builder->failed[i];
        bool has_value = entry->sending == NULL || entry->sending->offer.tensor != NULL; /* or it had one */
        link_serve_end(entry, has_value ? TL_SERVE_CANCELLED : TL_SERVE_RECEIVED);
    }
    for (size_t i = 0; i < builder->complete_count; i++) {
        struct link_serve *entry = builder->complete[i];
        link->control->stats.tensors_sent++;
        if (!entry->sending->offer.is_one_shot) {
            link_serve_end(entry, TL_SERVE_RECEIVED);
            continue;
        }
        link_serve_set_state(entry, SERVE_SENT);
        tl_tensor_put(entry->sending->offer.tensor);
        entry->sending->offer.tensor = NULL;
    }
}

static void begin_frame(struct tl_link *link, struct tl_frame_builder *builder)
{
    Tensorlane__V1__Frame *frame = &builder->frame;
    tensorlane__v1__frame__init(frame);
    builder->request_count = 0;
    builder->packed_requests = (struct tl_packer){.bytes = builder->packed_request_bytes};
    builder->chunk_count = 0;
    builder->packed_chunks = (struct tl_packer){.bytes = builder->packed_chunk_bytes};
    builder->complete_count = 0;
    builder->slice_count = 0;
    builder->data_bytes = 0;
    builder->copies = (struct frame_copies){.space_bytes = 0};
    frame->requests = builder->request_pointers;
    frame->failures = builder->failure_pointers;
    frame->chunks = builder->chunk_pointers;
    frame->cancels = (uint64_t *)tl_numbers_items(&link->cancels);
    frame->n_cancels = tl_min_u64(link->cancels.count, MAX_NUMBERS);
    frame->n_received = tl_min_u64(link->received.count - link->framed_count, MAX_NUMBERS - frame->n_cancels);
    if (frame->n_received > 0) frame->received = (uint64_t *)tl_numbers_items(&link->received) + link->framed_count;
    frame->taken_bytes = link_window_update(link);
    frame->connections = builder->connection_messages;
    frame->n_connections = link_connections_add(link, builder->connection_messages);
    builder->head_bytes =
        10 * (1 + frame->n_cancels + frame->n_received) + frame->n_connections * sizeof(struct tl_connection_message);
}

/* Sets the fields of what was added. Returns whether there is anything to send. */
static bool end_frame(struct tl_link *link, struct tl_frame_builder *builder)
{
    Tensorlane__V1__Frame *frame = &builder->frame;
    if (link->is_packed) {
        frame->packed_requests = (ProtobufCBinaryData){builder->packed_requests.used, builder->packed_request_bytes};
        frame->packed_chunks = (ProtobufCBinaryData){builder->packed_chunks.used, builder->packed_chunk_bytes};
    } else {
        frame->n_chunks = builder->chunk_count;
    }
    for (size_t i = 0; i < frame->n_requests; i++)
        builder->request_pointers[i] = &builder->requests[i];
    for (size_t i = 0; i < frame->n_failures; i++)
        builder->failure_pointers[i] = &builder->failures[i];
    for (size_t i = 0; i < frame->n_chunks; i++)
        builder->chunk_pointers[i] = &builder->chunks[i];
    size_t count = frame->n_connections + builder->request_count + frame->n_failures + builder->chunk_count +
                   frame->n_cancels + frame->n_received;
    return count > 0 || link_window_must_report(link);
}

static void send_frame(struct tl_link *link)
{
    if (!tl_stream_can_send(link->stream) || !is_anything_waiting(link)) return;
    struct tl_frame_builder *builder = link->control->builder;
    begin_frame(link, builder);
    link_requests_add(link, builder);
    if (!link_window_is_full(link)) link_chunks_add(link, builder);
    add_failures(link, builder);
    link_copies_drop(builder);
    if (!end_frame(link, builder)) return;
    grpc_byte_buffer *message =
        tl_wire_write_with_data(&builder->frame.base, builder->slices, builder->slice_count, builder->data_bytes);
    for (size_t i = 0; i < builder->slice_count; i++)
        grpc_slice_unref(builder->slices[i]);
    if (message == NULL) {
        struct tl_error error;
        tl_error_set(&error, TL_UNAVAILABLE, "%s: no memory for a frame", link->control->options.self.name);
        tl_link_close(link, &error);
        return;
    }
    link->control->stats.frames_sent++;
    tl_stream_report_sent_by_kernel(link->stream, !tl_list_is_empty(&link->answers.leaving));
    tl_stream_send(link->stream, message);
    link_window_sent(link, builder->data_bytes);
    link_stall_sent(link, builder->chunk_count);
    finish_frame(link, builder);
}

void link_send_frames(struct tl_link *link)
{
    if (link->state != LINK_UP && link->state != LINK_DRAINING) return;
    send_frame(link);
    link_unsent_release_quota(link);
    if (link->state != LINK_CLOSING) link_stall_watch(link);
}
