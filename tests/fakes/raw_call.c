// SPDX-License-Identifier: Apache-2.0
/* Calls that send any bytes. */
#include "fakes/raw_call.h"

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "control/credentials.h"

static void on_message(struct tl_stream *stream, grpc_byte_buffer *message)
{
    struct raw_call *call = tl_stream_owner(stream);
    call->is_reading = false;
    call->received = message;
}

static void on_half_closed(struct tl_stream *stream)
{
    struct raw_call *call = tl_stream_owner(stream);
    call->is_at_end = true;
}

static void on_closed(struct tl_stream *stream, const struct tl_error *status)
{
    struct raw_call *call = tl_stream_owner(stream);
    call->status = *status;
    call->stream = NULL;
}

static const struct tl_stream_events events = {
    .on_message = on_message, .on_half_closed = on_half_closed, .on_closed = on_closed};

static void run(struct raw_call *call)
{
    (void)tl_loop_run_once(call->loop, TL_TIME_NEVER);
}

void raw_call_open(struct raw_call *call, const char *address, const char *method, int64_t timeout_ns)
{
    const struct tl_stream_headers none = {.count = 0};
    raw_call_open_with(call, &none, address, method, timeout_ns);
}

void raw_call_open_with(struct raw_call *call, const struct tl_stream_headers *headers, const char *address,
                        const char *method, int64_t timeout_ns)
{
    const struct tl_channel_options options = {.keepalive_ns = TL_TIME_NEVER,
                                               .keepalive_timeout_ns = TL_TIME_NEVER,
                                               .connect_timeout_ns = 20 * TL_NS_PER_SEC,
                                               .max_message_bytes = 64 << 20};
    struct tl_error error;
    memset(call, 0, sizeof(*call));
    TL_CHECK(tl_loop_create(&call->loop, &error) == TL_OK);
    call->channel = tl_channel_create(address, &options);
    TL_CHECK(tl_stream_call_with(headers, call->loop, call->channel, method, tl_clock_deadline_ns(timeout_ns), &events,
                                 call, &call->stream, &error) == TL_OK);
}

static void send_buffer(struct raw_call *call, grpc_byte_buffer *buffer)
{
    if (call->stream == NULL) {
        grpc_byte_buffer_destroy(buffer);
        return;
    }
    tl_stream_send(call->stream, buffer);
    while (call->stream != NULL && !tl_stream_can_send(call->stream)) {
        run(call);
        if (call->is_at_end) return;
    }
}

void raw_call_send(struct raw_call *call, const void *bytes, size_t len_bytes)
{
    grpc_slice slice = grpc_slice_from_copied_buffer(bytes, len_bytes);
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    send_buffer(call, buffer);
}

void raw_call_send_message(struct raw_call *call, const ProtobufCMessage *message)
{
    size_t len_bytes = protobuf_c_message_get_packed_size(message);
    unsigned char *bytes = malloc(len_bytes + 1);
    TL_CHECK(bytes != NULL);
    protobuf_c_message_pack(message, bytes);
    raw_call_send(call, bytes, len_bytes);
    free(bytes);
}

void raw_call_half_close(struct raw_call *call)
{
    if (call->stream != NULL) tl_stream_half_close(call->stream);
}

static grpc_byte_buffer *receive_buffer(struct raw_call *call)
{
    while (call->stream != NULL && call->received == NULL && !call->is_at_end) {
        if (!call->is_reading) {
            call->is_reading = true;
            tl_stream_read(call->stream);
        }
        run(call);
    }
    grpc_byte_buffer *buffer = call->received;
    call->received = NULL;
    return buffer;
}

unsigned char *raw_call_receive(struct raw_call *call, size_t *ret_len_bytes)
{
    grpc_byte_buffer *buffer = receive_buffer(call);
    if (buffer == NULL) return NULL;
    grpc_byte_buffer_reader reader;
    TL_CHECK(grpc_byte_buffer_reader_init(&reader, buffer));
    grpc_slice all = grpc_byte_buffer_reader_readall(&reader);
    size_t len_bytes = GRPC_SLICE_LENGTH(all);
    unsigned char *bytes = malloc(len_bytes + 1);
    TL_CHECK(bytes != NULL);
    memcpy(bytes, GRPC_SLICE_START_PTR(all), len_bytes);
    bytes[len_bytes] = '\0';
    grpc_slice_unref(all);
    grpc_byte_buffer_reader_destroy(&reader);
    grpc_byte_buffer_destroy(buffer);
    *ret_len_bytes = len_bytes;
    return bytes;
}

void *raw_call_receive_message(struct raw_call *call, const ProtobufCMessageDescriptor *descriptor)
{
    size_t len_bytes;
    unsigned char *bytes = raw_call_receive(call, &len_bytes);
    if (bytes == NULL) return NULL;
    ProtobufCMessage *message = protobuf_c_message_unpack(descriptor, NULL, len_bytes, bytes);
    TL_CHECK(message != NULL);
    free(bytes);
    return message;
}

const struct tl_error *raw_call_wait_closed(struct raw_call *call)
{
    while (call->stream != NULL)
        run(call);
    return &call->status;
}

const struct tl_error *raw_call_finish(struct raw_call *call)
{
    grpc_byte_buffer *buffer;
    while ((buffer = receive_buffer(call)) != NULL)
        grpc_byte_buffer_destroy(buffer);
    return raw_call_wait_closed(call);
}

void raw_call_cancel(struct raw_call *call)
{
    if (call->stream != NULL) tl_stream_cancel(call->stream);
}

void raw_call_close(struct raw_call *call)
{
    raw_call_cancel(call);
    raw_call_wait_closed(call);
    grpc_byte_buffer_destroy(call->received);
    grpc_channel_destroy(call->channel);
    tl_loop_destroy(call->loop);
}
