// SPDX-License-Identifier: Apache-2.0
/*
 * Publishing a tensor on a worker.
 *
 * Happy path: the first message carries key, meta-data, annotations and the first bytes; each further one leaves when
 * the one before has; the last carries the checksum of all; then the half-close, and the answer.
 *
 * Failure modes: bytes that stop being readable end the call with what their guard says. The call as a whole has no
 * deadline, because it is not known how long a large tensor takes; a timer ends it when no piece has left, or no answer
 * has come, for options->rpc_timeout_ns (TL_TIME_NEVER: the caller watches it).
 */
#include <stddef.h>
#include <stdlib.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "control/client_publish.h"
#include "control/responses.h"

static void stalled(struct tl_timer *timer)
{
    struct tl_client_publish *publish = TL_CONTAINER_OF(timer, struct tl_client_publish, stall_timer);
    const struct tl_call_options *options = publish->client.options;
    char duration[32];
    struct tl_error failure;
    tl_error_set(&failure, TL_DEADLINE_EXCEEDED, "%s: %s made no progress for %s", publish->key, options->address,
                 tl_text_format_duration(options->rpc_timeout_ns, duration, sizeof(duration)));
    tl_client_fail(&publish->client, &failure);
}

static enum tl_status expect_progress(struct tl_client_publish *publish, struct tl_error *ret_error)
{
    if (publish->client.options->rpc_timeout_ns == TL_TIME_NEVER) return TL_OK;
    int64_t due_ns = tl_clock_deadline_ns(publish->client.options->rpc_timeout_ns);
    if (tl_timers_arm(tl_loop_timers(publish->client.loop), &publish->stall_timer, due_ns) == TL_OK) return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a timer");
}

/* Packs the next piece into the request; *ret_message is NULL when there is no memory. */
static enum tl_status compose_piece(struct tl_client_publish *publish, Tensorlane__V1__PublishRequest *request,
                                    grpc_byte_buffer **ret_message, struct tl_error *ret_error)
{
    uint64_t offset = publish->composed_bytes;
    uint64_t left = tl_tensor_size_bytes(publish->tensor) - offset;
    uint64_t count = tl_min_u64(left, publish->chunk_bytes);
    if (count > 0) {
        enum tl_status status = tl_tensor_check_readable(publish->tensor, offset, count, ret_error);
        if (status != TL_OK) return status;
        const unsigned char *data = tl_tensor_data(publish->tensor);
        XXH3_64bits_update(publish->hash_state, data + offset, (size_t)count);
    }
    publish->composed_bytes += count;
    publish->piece_bytes = count;
    publish->is_last_composed = count == left;
    if (publish->is_last_composed) {
        request->has_checksum = 1;
        request->checksum = XXH3_64bits_digest(publish->hash_state);
    }
    if (count == 0) {
        *ret_message = tl_wire_write(&request->base);
        return TL_OK;
    }
    grpc_slice slice = tl_wire_slice_of_tensor(publish->tensor, offset, count);
    *ret_message = tl_wire_write_with_data(&request->base, &slice, 1, count);
    grpc_slice_unref(slice);
    return TL_OK;
}

/* The first message, which says what comes, or where it can be fetched. */
static enum tl_status compose_first(struct tl_client_publish *publish, grpc_byte_buffer **ret_message,
                                    struct tl_error *ret_error)
{
    Tensorlane__V1__PublishRequest request = TENSORLANE__V1__PUBLISH_REQUEST__INIT;
    Tensorlane__V1__MetaData meta_data;
    Tensorlane__V1__Annotations annotations;
    uint64_t dims[TL_MAX_RANK];
    tl_wire_from_meta_data(tl_tensor_meta_data(publish->tensor), dims, &meta_data);
    if (!tl_wire_from_annotations(tl_tensor_annotations(publish->tensor), &annotations))
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for annotations");
    request.key = (char *)publish->key;
    request.step = publish->step;
    request.may_go_back = publish->may_go_back;
    request.meta_data = &meta_data;
    request.source_incarnation = publish->source.incarnation;
    request.source_number = publish->source.number;
    if (annotations.n_items > 0) request.annotations = &annotations;
    enum tl_status status = TL_OK;
    if (publish->source.number != 0) {
        publish->is_last_composed = true;
        *ret_message = tl_wire_write(&request.base);
    } else {
        status = compose_piece(publish, &request, ret_message, ret_error);
    }
    free(annotations.items);
    return status;
}

/* All pieces have left: the client says so only if they could be read until now. */
static enum tl_status finish(struct tl_client_publish *publish, struct tl_error *ret_error)
{
    if (publish->composed_bytes > 0) {
        enum tl_status status = tl_tensor_check_readable(publish->tensor, 0, publish->composed_bytes, ret_error);
        if (status != TL_OK) return status;
    }
    tl_stream_half_close(publish->client.stream);
    return TL_OK;
}

static enum tl_status go_on(struct tl_client_publish *publish, struct tl_error *ret_error)
{
    if (publish->progress != NULL && publish->piece_bytes > 0) {
        publish->progress(publish->progress_context, publish->piece_bytes);
    }
    enum tl_status status = expect_progress(publish, ret_error);
    if (status != TL_OK) return status;
    if (publish->is_last_composed) return finish(publish, ret_error);
    grpc_byte_buffer *message;
    Tensorlane__V1__PublishRequest request = TENSORLANE__V1__PUBLISH_REQUEST__INIT;
    status = compose_piece(publish, &request, &message, ret_error);
    if (status != TL_OK) return status;
    if (message == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a request");
    tl_stream_send(publish->client.stream, message);
    return TL_OK;
}

static void piece_sent(struct tl_client *client)
{
    struct tl_client_publish *publish = TL_CONTAINER_OF(client, struct tl_client_publish, client);
    struct tl_error failure;
    if (go_on(publish, &failure) != TL_OK) tl_client_fail(client, &failure);
}

static enum tl_status take_publication(void *context, grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                       struct tl_error *ret_error)
{
    return tl_publish_response_read(message, arena, context, ret_error);
}

enum tl_status tl_client_publish_start(struct tl_client_publish *publish, struct tl_error *ret_error)
{
    static const struct tl_client_method method = {
        .name = "/tensorlane.v1.Transfer/Publish", .is_single = true, .take = take_publication, .sent = piece_sent};
    TL_CHECK(publish->chunk_bytes > 0);
    grpc_byte_buffer *first;
    publish->hash_state = XXH3_createState();
    if (publish->hash_state == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a checksum");
    XXH3_64bits_reset(publish->hash_state);
    publish->stall_timer.fire = stalled;
    enum tl_status status = compose_first(publish, &first, ret_error);
    if (status == TL_OK)
        status = tl_client_start(&publish->client, &method, &publish->response, TL_TIME_NEVER, first, ret_error);
    if (status != TL_OK) return status;
    struct tl_error failure;
    if (expect_progress(publish, &failure) != TL_OK) tl_client_fail(&publish->client, &failure);
    return TL_OK;
}

void tl_client_publish_fini(struct tl_client_publish *publish)
{
    if (publish->client.loop != NULL) tl_timers_disarm(tl_loop_timers(publish->client.loop), &publish->stall_timer);
    if (publish->hash_state != NULL) XXH3_freeState(publish->hash_state);
    tl_client_close(&publish->client);
}

enum tl_status tl_client_publish(const struct tl_call_options *options, const char *key, uint64_t step,
                                 bool may_go_back, struct tl_tensor *tensor, uint64_t chunk_bytes,
                                 void (*progress)(void *context, uint64_t bytes), void *progress_context,
                                 enum tl_call_stage *ret_stage, struct tl_error *ret_error)
{
    struct tl_client_publish publish = {.key = key,
                                        .step = step,
                                        .may_go_back = may_go_back,
                                        .tensor = tensor,
                                        .chunk_bytes = chunk_bytes,
                                        .progress = progress,
                                        .progress_context = progress_context};
    enum tl_status status = tl_client_open(&publish.client, options, ret_error);
    if (status == TL_OK) status = tl_client_publish_start(&publish, ret_error);
    if (status == TL_OK) status = tl_client_wait(&publish.client, ret_error);
    if (ret_stage != NULL) *ret_stage = publish.client.stage;
    tl_client_publish_fini(&publish);
    /* gRPC takes a file that was cut off for a connection that failed. */
    struct tl_error unreadable;
    if (status == TL_OK || tl_tensor_check_readable(tensor, 0, tl_tensor_size_bytes(tensor), &unreadable) == TL_OK)
        return status;
    return tl_error_copy(ret_error, &unreadable);
}
