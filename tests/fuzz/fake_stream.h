// SPDX-License-Identifier: Apache-2.0
/*
 * The test takes the place of gRPC: streams (control/stream.h) and the server (control/rpc_server.h) without
 * connections.
 *
 * A program that has fake_stream.c among its sources gets these instead of the real ones, and channels that lead
 * nowhere. The test is the peer: it opens calls of the methods that the services have added, gives messages, takes
 * those that are sent, and ends or breaks calls. Callbacks run only inside the functions below, never inside those of
 * the library, as the contract requires.
 *
 * Streams live in slots, so that no test holds a pointer to a stream that is gone. What the library must not do (two
 * reads or sends at once, a half-close by a server) aborts.
 */
#ifndef FUZZ_FAKE_STREAM_H
#define FUZZ_FAKE_STREAM_H

#include "control/stream.h"

#define FAKE_STREAMS 8

/* True: a stream that the library cancels ends by itself in the loop's next round, and a server that stops breaks all
 * calls. This is for closing, when the test cannot act because the library waits. */
extern bool fake_stream_ends_itself;

/* Sees every message inside tl_stream_send; may be NULL. It must not call the library. */
extern void (*fake_stream_on_send)(unsigned slot, grpc_byte_buffer *message);

size_t fake_stream_method_count(void);
/* A client calls the method, counted in the order in which the services have added them. Returns the slot, or -1 when
 * all are taken. */
int fake_stream_accept(size_t method);
/* Returns the method's number; aborts when there is none of that name. */
size_t fake_stream_method(const char *name);

bool fake_stream_is_open(unsigned slot);
/* "/package.Service/Method"; the stream is open. */
const char *fake_stream_called(unsigned slot);
bool fake_stream_is_client(unsigned slot);
bool fake_stream_is_reading(unsigned slot);
bool fake_stream_is_sending(unsigned slot);
bool fake_stream_is_cancelled(unsigned slot);

/* As tl_stream_report_sent_by_kernel has set it. */
bool fake_stream_is_through(unsigned slot);

/* Each of these does nothing, and returns false, when the stream is not open or not in the state for it. */
/* Answers the read with a message, which is taken over in any case. */
bool fake_stream_give(unsigned slot, grpc_byte_buffer *message);
/* Answers the read with the peer's half-close, which is the end of a client's stream. */
bool fake_stream_half_close(unsigned slot);
/* The message in flight has left. */
bool fake_stream_take(unsigned slot);
/* Ends the stream if the library has asked for that and nothing is in flight before it. */
bool fake_stream_end(unsigned slot);
/* The connection breaks, or the server ends the call: on_closed with this status at a client, CANCELLED at a server. */
bool fake_stream_break(unsigned slot, const struct tl_error *status);

#endif
