// SPDX-License-Identifier: Apache-2.0
/*
 * Receive: one tensor for a client that has no link.
 *
 * Happy path: the request becomes a serve that the worker answers; the tensor leaves in messages of at most
 * options.chunk_bytes and MAX_PIECE_BYTES, one at a time, as slices of its own memory; the last one carries the
 * checksum, if it was asked for; then the status.
 *
 * A client whose calls hold too much waits (control/receive_hold.h): the call lets its value go, and asks for it again
 * later. A one-shot value is kept in any case, because it is reserved for this call.
 *
 * Failure modes: the status of the worker is that of the call. Bytes that stop being readable end the call with what
 * their guard says, also when that shows only after the last of them has left. A client that goes away ends the serve
 * as cancelled, because it cannot come back with the same request.
 */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "base/random.h"
#include "control/device_reader.h"
#include "control/receive_hold.h"
#include "control/requests.h"
#include "control/service_call.h"
#include "control/transfer_calls.h"
#include "tensor/mapped_tensor.h"

/* gRPC's clients refuse messages of more than 4 MiB unless they are configured otherwise. */
#define MAX_PIECE_BYTES (2 * 1024 * 1024)

/*
 *   READING --request--> WAITING --reply: offer--> SENDING --all sent--> ENDED --closed--> (freed)
 *      \--bad request--> ENDED     \--reply: status--> ENDED
 *   too much is held: WAITING --reply: offer--> QUEUED --there is space--> WAITING
 *   a value on a device: SENDING --nothing read--> STAGING --a piece was read--> SENDING
 */
enum receive_state {
    RECEIVE_READING, /* for the request; woken by the stream or the progress timer */
    RECEIVE_WAITING, /* for the source's reply */
    RECEIVE_QUEUED,  /* for other calls of the client to end; has let its value go */
    RECEIVE_SENDING, /* for the client to take the piece in flight; woken by the stream or the progress timer */
    RECEIVE_STAGING, /* for a piece of the tensor to be read from its device */
    RECEIVE_ENDED,   /* for the end of the stream */
};

struct receive_call {
    struct tl_service_call call;
    enum receive_state state;
    struct tl_serve serve;
    bool is_asked; /* the source knows the serve */
    char key[TL_MAX_KEY_BYTES + 1];
    bool wants_checksum;
    struct tl_offer offer; /* holds the tensor's reference until the end */
    struct tl_receive_hold hold;
    uint64_t sent_bytes;
    bool is_last_sent;
    bool is_complete;               /* all of it has left and could be read until then */
    XXH3_state_t *hash_state;       /* NULL: no checksum */
    struct tl_device_reader reader; /* reads the tensor when it lies on a device */
};

static void receive_fail(struct receive_call *receive, const struct tl_error *status)
{
    receive->state = RECEIVE_ENDED;
    tl_device_reader_end(&receive->reader);
    tl_service_call_finish(&receive->call, status);
}

/* Whether the tensor has bytes, on a device. */
static bool is_on_device(const struct receive_call *receive)
{
    return tl_tensor_is_on_device(receive->offer.tensor) && tl_tensor_size_bytes(receive->offer.tensor) > 0;
}

/* Checks that the bytes may be read and adds them to the checksum. That they could be read until the end is checked
 * when the kernel has all of them. */
static enum tl_status prepare_piece(struct receive_call *receive, uint64_t count, struct tl_error *ret_error)
{
    if (count == 0 || is_on_device(receive)) return TL_OK; /* the reader hashes */
    struct tl_tensor *tensor = receive->offer.tensor;
    enum tl_status status = tl_tensor_check_readable(tensor, receive->sent_bytes, count, ret_error);
    if (status != TL_OK || receive->hash_state == NULL) return status;
    const unsigned char *data = tl_tensor_data(tensor);
    XXH3_64bits_update(receive->hash_state, data + receive->sent_bytes, (size_t)count);
    return TL_OK;
}

static grpc_byte_buffer *compose_piece(struct receive_call *receive, uint64_t count)
{
    struct tl_tensor *tensor = receive->offer.tensor;
    Tensorlane__V1__ReceiveResponse response = TENSORLANE__V1__RECEIVE_RESPONSE__INIT;
    Tensorlane__V1__MetaData meta_data;
    uint64_t dims[TL_MAX_RANK];
    if (receive->sent_bytes == 0) {
        tl_wire_from_meta_data(tl_tensor_meta_data(tensor), dims, &meta_data);
        response.meta_data = &meta_data;
        response.step = receive->offer.step;
    }
    response.offset = receive->sent_bytes;
    if (receive->is_last_sent && receive->hash_state != NULL) {
        response.has_checksum = 1;
        response.checksum = XXH3_64bits_digest(receive->hash_state);
    }
    if (count == 0) return tl_wire_write(&response.base);
    grpc_slice slice = is_on_device(receive) ? tl_device_reader_take(&receive->reader, count)
                                             : tl_wire_slice_of_tensor(tensor, receive->sent_bytes, count);
    grpc_byte_buffer *message = tl_wire_write_with_data(&response.base, &slice, 1, count);
    grpc_slice_unref(slice);
    return message;
}

static void send_piece(struct receive_call *receive)
{
    struct tl_control *control = receive->call.control;
    uint64_t left = tl_tensor_size_bytes(receive->offer.tensor) - receive->sent_bytes;
    uint64_t count = tl_min_u64(left, tl_min_u64(control->options.chunk_bytes, MAX_PIECE_BYTES));
    struct tl_error error;
    if (is_on_device(receive)) count = tl_min_u64(count, tl_device_reader_bytes(&receive->reader));
    if (prepare_piece(receive, count, &error) != TL_OK) {
        receive_fail(receive, &error);
        return;
    }
    receive->is_last_sent = count == left;
    grpc_byte_buffer *message = compose_piece(receive, count);
    receive->sent_bytes += count;
    control->stats.bytes_sent += count;
    tl_service_call_expect_progress(&receive->call);
    tl_service_call_send(&receive->call, message);
    if (is_on_device(receive) && tl_device_reader_go_on(&receive->reader, &error) != TL_OK)
        receive_fail(receive, &error);
}

/* Sends the next piece, or waits for it. */
static void send_next(struct receive_call *receive)
{
    if (is_on_device(receive) && tl_device_reader_bytes(&receive->reader) == 0) {
        receive->state = RECEIVE_STAGING;
        tl_service_call_expect_nothing(&receive->call); /* the client waits for us */
    } else {
        send_piece(receive);
    }
}

/* A piece was read from the device, or could not be. */
static void staged(struct tl_device_reader *reader, const struct tl_error *status)
{
    struct receive_call *receive = TL_CONTAINER_OF(reader, struct receive_call, reader);
    struct tl_error error = *status;
    if (receive->state != RECEIVE_STAGING && receive->state != RECEIVE_SENDING) return;
    if (status->code != TL_OK) {
        tl_error_prefix(&error, "%s: ", receive->key);
        receive_fail(receive, &error);
    } else if (receive->state == RECEIVE_STAGING && tl_device_reader_bytes(reader) > 0) {
        receive->state = RECEIVE_SENDING;
        send_piece(receive);
    }
}

static void begin_staging(struct receive_call *receive)
{
    struct tl_control *control = receive->call.control;
    struct tl_error error;
    receive->reader = (struct tl_device_reader){.loop = control->loop,
                                                .tensor = receive->offer.tensor,
                                                .hash_state = receive->hash_state,
                                                .copied_bytes = &control->stats.bytes_copied_send,
                                                .came = staged};
    if (tl_device_reader_begin(&receive->reader, &error) == TL_OK) {
        send_next(receive);
    } else {
        receive_fail(receive, &error);
    }
}

/* All pieces have left: they were the tensor's bytes only if those can still be read. */
static void receive_complete(struct receive_call *receive)
{
    struct tl_error error;
    if (receive->sent_bytes > 0 &&
        tl_tensor_check_readable(receive->offer.tensor, 0, receive->sent_bytes, &error) != TL_OK) {
        receive_fail(receive, &error);
        return;
    }
    receive->call.control->stats.tensors_sent++;
    receive->state = RECEIVE_ENDED;
    receive->is_complete = true;
    tl_service_call_finish_ok(&receive->call);
}

static void receive_sent(struct tl_service_call *call)
{
    struct receive_call *receive = TL_CONTAINER_OF(call, struct receive_call, call);
    if (receive->state != RECEIVE_SENDING) return;
    if (receive->is_last_sent) {
        receive_complete(receive);
    } else {
        send_next(receive);
    }
}

static void receive_reply(struct tl_serve *serve, const struct tl_error *status, const struct tl_offer *offer)
{
    struct receive_call *receive = TL_CONTAINER_OF(serve, struct receive_call, serve);
    TL_CHECK(receive->state == RECEIVE_WAITING && receive->offer.tensor == NULL);
    if (status->code != TL_OK) {
        receive_fail(receive, status);
        return;
    }
    if (!offer->is_one_shot && !tl_receive_hold_take(&receive->hold, tl_tensor_size_bytes(offer->tensor))) {
        tl_tensor_put(offer->tensor);
        receive->state = RECEIVE_QUEUED;
        return;
    }
    receive->offer = *offer;
    receive->state = RECEIVE_SENDING;
    tl_stream_report_sent_by_kernel(receive->call.stream, tl_tensor_may_change(offer->tensor));
    if (receive->wants_checksum) {
        receive->hash_state = XXH3_createState();
        if (receive->hash_state == NULL) {
            struct tl_error error;
            tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "%s: no memory for a checksum", receive->key);
            receive_fail(receive, &error);
            return;
        }
        XXH3_64bits_reset(receive->hash_state);
    }
    if (is_on_device(receive)) {
        begin_staging(receive);
    } else {
        send_piece(receive);
    }
}

static const struct tl_serve_ops serve_ops = {.reply = receive_reply};

static void ask_again(struct tl_receive_hold *hold)
{
    struct receive_call *receive = TL_CONTAINER_OF(hold, struct receive_call, hold);
    struct tl_control *control = receive->call.control;
    TL_CHECK(receive->state == RECEIVE_QUEUED);
    receive->state = RECEIVE_WAITING;
    control->options.handlers->source.closed(control->options.worker, &receive->serve, TL_SERVE_CANCELLED);
    control->options.handlers->source.request(control->options.worker, &receive->serve);
}

static struct tl_request_id next_id(struct tl_control *control)
{
    if (control->foreign_id.number++ == 0) control->foreign_id.incarnation = tl_random_u64();
    return control->foreign_id;
}

static void receive_request(struct tl_service_call *call, grpc_byte_buffer *message)
{
    struct receive_call *receive = TL_CONTAINER_OF(call, struct receive_call, call);
    struct tl_control *control = call->control;
    struct tl_receive_request request;
    struct tl_error error;
    receive->hold.retry = ask_again;
    if (tl_receive_request_read(message, control->arena, &request, &error) != TL_OK ||
        tl_receive_hold_join(control, &call->client.client, &receive->hold, &error) != TL_OK) {
        receive_fail(receive, &error);
        return;
    }
    memcpy(receive->key, request.key, strlen(request.key) + 1);
    receive->wants_checksum = request.wants_checksum;
    receive->serve = (struct tl_serve){.ops = &serve_ops,
                                       .id = next_id(control),
                                       .peer = &call->client,
                                       .key = receive->key,
                                       .step = request.step,
                                       .takes_devices = true};
    receive->state = RECEIVE_WAITING;
    receive->is_asked = true;
    control->options.handlers->source.request(control->options.worker, &receive->serve);
}

static void receive_closed(struct tl_service_call *call, bool is_delivered)
{
    struct receive_call *receive = TL_CONTAINER_OF(call, struct receive_call, call);
    struct tl_control *control = call->control;
    if (receive->is_asked) {
        bool has_answer = receive->offer.tensor == NULL || receive->is_complete;
        enum tl_serve_end end = is_delivered && has_answer ? TL_SERVE_RECEIVED : TL_SERVE_CANCELLED;
        control->options.handlers->source.closed(control->options.worker, &receive->serve, end);
    }
    tl_device_reader_end(&receive->reader);
    if (receive->hash_state != NULL) XXH3_freeState(receive->hash_state);
    tl_tensor_put(receive->offer.tensor);
    tl_receive_hold_leave(&receive->hold);
}

static const struct tl_service_call_ops receive_ops = {
    .size_bytes = sizeof(struct receive_call),
    .request = receive_request,
    .sent = receive_sent,
    .closed = receive_closed,
};

void tl_receive_call_accept(void *control, struct tl_stream *stream)
{
    tl_service_call_accept(control, stream, &receive_ops);
}
