// SPDX-License-Identifier: Apache-2.0
/*
 * A call of a client that one of the services answers.
 *
 * Happy path: tl_service_call_accept makes the object of the call and reads; a call that has one request gives it to
 * `request` once the client has half-closed, a stream gives every message and then `half_closed`; the service sends,
 * finishes; `closed` is the last callback and the object is freed.
 *
 * Failure modes: a client that does not do what is expected of it within options.request_timeout_ns ends with
 * DEADLINE_EXCEEDED, and so does one that sends much too slowly; none or more than one request where one belongs, with
 * INVALID_ARGUMENT.
 *
 * Thread: the loop's owner. No callback runs inside a call to these functions.
 */
#ifndef CONTROL_SERVICE_CALL_H
#define CONTROL_SERVICE_CALL_H

#include "control/internal.h"
#include "control/stream.h"
#include "control/wire.h"

struct tl_service_call;

/* NULL: not interested. After the call was finished only `closed` comes. */
struct tl_service_call_ops {
    size_t size_bytes; /* size of the object, whose first member is the struct tl_service_call; it starts zeroed */
    size_t max_request_bytes; /* how large the one request may be; 0: 64 KiB */
    bool is_stream;           /* the client may send more than one message */
    void (*request)(struct tl_service_call *call, grpc_byte_buffer *message); /* borrowed */
    void (*half_closed)(struct tl_service_call *call);                        /* streams only */
    void (*sent)(struct tl_service_call *call);
    /* is_delivered: the status was given to gRPC before the client went away. */
    void (*closed)(struct tl_service_call *call, bool is_delivered);
};

struct tl_service_call {
    const struct tl_service_call_ops *ops;
    struct tl_control *control;
    struct tl_stream *stream;
    struct tl_identity client;
    struct tl_timer progress_timer;
    int64_t accepted_ns;
    int64_t pace_deadline_ns;       /* deadline of tl_service_call_expect_bytes; TL_TIME_NEVER: none */
    grpc_byte_buffer *only_request; /* waits for the half-close behind it; NULL: not yet read, or a stream */
    bool is_finished;
};

/* Starts to serve a stream that the server has accepted. Without memory the stream is refused. The client is expected
 * to make progress. */
void tl_service_call_accept(struct tl_control *control, struct tl_stream *stream,
                            const struct tl_service_call_ops *ops);

/* The client has options.request_timeout_ns from now on, until this is called again or tl_service_call_expect_nothing.
 */
void tl_service_call_expect_progress(struct tl_service_call *call);
/* The same for a client that sends much and has sent received_bytes: besides, it must keep up MIN_BYTES_PER_SECOND
 * (service_call.c) from options.request_timeout_ns after its call came. So the time that the whole takes is bounded. */
void tl_service_call_expect_bytes(struct tl_service_call *call, uint64_t received_bytes);
void tl_service_call_expect_nothing(struct tl_service_call *call);

/* Streams: asks for the next message. */
void tl_service_call_read(struct tl_service_call *call);

/* Sends a message, taken over; NULL (there was no memory for it) ends the call. One at a time: again after `sent`. */
void tl_service_call_send(struct tl_service_call *call, grpc_byte_buffer *message);

/* Ends the call, after the message in flight; the first status counts. The client is expected to read until there. */
void tl_service_call_finish(struct tl_service_call *call, const struct tl_error *status);
void tl_service_call_finish_ok(struct tl_service_call *call);

/* The whole answer of a unary call. */
void tl_service_call_answer(struct tl_service_call *call, const ProtobufCMessage *response);

#endif
