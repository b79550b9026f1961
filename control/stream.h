// SPDX-License-Identifier: Apache-2.0
/*
 * A stream: one gRPC call, of either side and any kind, as messages in both directions and one end.
 *
 *   client: tl_stream_call -> send*, half_close; read* -> on_message / on_half_closed; on_closed(status of the server)
 *   server: accept of a method (control/rpc_server.h) -> read* -> on_message / on_half_closed; send*, finish ->
 * on_closed
 *
 * One message may be in flight in each direction: send only while tl_stream_can_send, again after on_sent; on_message
 * comes once for each tl_stream_read. on_closed is the last callback and comes exactly once, when every operation of
 * the call has ended; the stream is freed when it returns. No callback runs inside a call to these functions.
 *
 * Thread: the loop's owner.
 */
#ifndef CONTROL_STREAM_H
#define CONTROL_STREAM_H

#include <grpc/grpc.h>
#include <stdbool.h>
#include <stdint.h>

#include "control/loop.h"
#include "control/tls.h"

struct tl_identity;
struct tl_stream;

/* Callbacks; NULL: not interested. */
struct tl_stream_events {
    void (*on_message)(struct tl_stream *stream, grpc_byte_buffer *message); /* the callee destroys message */
    /* Asked after on_message when no further read has begun: whether this process is the cause, and not the peer. */
    bool (*is_held_up)(const struct tl_stream *stream);
    /* The answer to a read when the peer has said that it sends no more. A read that is cut short by the end of the
     * call has no answer but on_closed. */
    void (*on_half_closed)(struct tl_stream *stream);
    void (*on_sent)(struct tl_stream *stream); /* the message has left; another one may be sent */
    /* The end. Client: the status of the call. Server: TL_OK when the status was delivered to gRPC before the client
     * went away, TL_CANCELLED otherwise. */
    void (*on_closed)(struct tl_stream *stream, const struct tl_error *status);
};

/* Starts a call as client. method is a static string "/package.Service/Method". deadline_ns TL_TIME_NEVER only for
 * streams that something else watches. Failures come as on_closed. */
enum tl_status tl_stream_call(struct tl_loop *loop, grpc_channel *channel, const char *method, int64_t deadline_ns,
                              const struct tl_stream_events *events, void *owner, struct tl_stream **ret_stream,
                              struct tl_error *ret_error) TL_MUST_USE;

struct tl_stream_headers {
    grpc_metadata *metadata; /* [count]; keys and values must be legal for gRPC, which takes references */
    size_t count;
};

/* The same, with metadata that is sent in front of the request. */
enum tl_status tl_stream_call_with(const struct tl_stream_headers *headers, struct tl_loop *loop, grpc_channel *channel,
                                   const char *method, int64_t deadline_ns, const struct tl_stream_events *events,
                                   void *owner, struct tl_stream **ret_stream, struct tl_error *ret_error) TL_MUST_USE;

/* Wraps a call that a server has accepted; takes over the call. */
enum tl_status tl_stream_accept(struct tl_loop *loop, grpc_call *call, const struct tl_stream_events *events,
                                void *owner, struct tl_stream **ret_stream, struct tl_error *ret_error) TL_MUST_USE;

void *tl_stream_owner(const struct tl_stream *stream);
void tl_stream_set_owner(struct tl_stream *stream, void *owner);
void tl_stream_set_events(struct tl_stream *stream, const struct tl_stream_events *events);

/* Whose TLS connection the call goes over; the stream keeps a reference. Before anything else. */
void tl_stream_set_tls_peer(struct tl_stream *stream, struct tl_tls_peer *peer);

/* Writes down who the TLS connection proves the caller to be: source, certified and is_member. */
void tl_stream_certify(const struct tl_stream *stream, struct tl_identity *identity);

/* Where a server's call comes from: "ipv4:127.0.0.1:1234"; returns buffer. */
const char *tl_stream_peer_address(const struct tl_stream *stream, char *buffer, size_t capacity);

bool tl_stream_can_send(const struct tl_stream *stream);
/* Sends a message, which the stream takes over; dropped when the stream is ending. */
void tl_stream_send(struct tl_stream *stream, grpc_byte_buffer *message);
/* From the next message on, on_sent comes only when the kernel has all bytes of the message, so that nothing reads the
 * memory that its slices refer to any more; otherwise it comes as soon as flow control lets the message go. Also true
 * of all messages before it. */
void tl_stream_report_sent_by_kernel(struct tl_stream *stream, bool is_through);
/* Client: no more messages. After the last send, which may still be in flight. */
void tl_stream_half_close(struct tl_stream *stream);
/* Asks for one message. Only when no read is outstanding. */
void tl_stream_read(struct tl_stream *stream);
/* Server: ends the call with a status, after the message in flight, if any. Once; later calls are ignored. */
void tl_stream_finish(struct tl_stream *stream, const struct tl_error *status);
/* Ends the call at once; on_closed follows. */
void tl_stream_cancel(struct tl_stream *stream);

/* Server: ends the call at once with a status, dropping what has not been sent; for a client that does not read. */
void tl_stream_abort(struct tl_stream *stream, const struct tl_error *status);

/* The last callbacks are not wanted any more: replaces them by none, cancels. The stream frees itself. */
void tl_stream_abandon(struct tl_stream *stream);

#endif
