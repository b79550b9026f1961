// SPDX-License-Identifier: Apache-2.0
/* A call of a client that may send any bytes, for tests of servers. Runs a loop of its own on the test's thread. */
#ifndef FAKES_RAW_CALL_H
#define FAKES_RAW_CALL_H

#include <protobuf-c/protobuf-c.h>

#include "control/stream.h"

struct raw_call {
    struct tl_loop *loop;
    grpc_channel *channel;
    struct tl_stream *stream;   /* NULL: ended. */
    grpc_byte_buffer *received; /* Not taken yet; NULL: none. */
    bool is_reading;
    bool is_at_end;         /* The server sends no more. */
    struct tl_error status; /* Valid once the call has ended. */
};

/* Opens a call with the given time (TL_TIME_NEVER: none), over a connection of its own. */
void raw_call_open(struct raw_call *call, const char *address, const char *method, int64_t timeout_ns);
/* Opens the same, with metadata of the caller in front. */
void raw_call_open_with(struct raw_call *call, const struct tl_stream_headers *headers, const char *address,
                        const char *method, int64_t timeout_ns);

/* Sends bytes and waits until they have left, or the call has ended. */
void raw_call_send(struct raw_call *call, const void *bytes, size_t len_bytes);
void raw_call_send_message(struct raw_call *call, const ProtobufCMessage *message);
void raw_call_half_close(struct raw_call *call);

/* Returns the next message, flat and followed by NUL, which the caller frees, or NULL when there is no more. */
unsigned char *raw_call_receive(struct raw_call *call, size_t *ret_len_bytes);
/* Returns the next message, unpacked with the system's allocator, or NULL when there is no more. */
void *raw_call_receive_message(struct raw_call *call, const ProtobufCMessageDescriptor *descriptor);

/* Waits for the end without reading; returns the status of the call. */
const struct tl_error *raw_call_wait_closed(struct raw_call *call);
/* Reads to the end and drops what comes; returns the status of the call. */
const struct tl_error *raw_call_finish(struct raw_call *call);
void raw_call_cancel(struct raw_call *call);

/* Cancels the call if it has not ended, waits, frees. */
void raw_call_close(struct raw_call *call);

#endif
