// SPDX-License-Identifier: Apache-2.0
/*
 * One call of a tool to a server: the way there, stage by stage, and the call.
 *
 * Happy path: tl_client_open finds the server and speaks HTTP/2 with it; tl_client_start begins the call; responses are
 * given to `take` as they come; tl_client_wait runs until the end; tl_client_close. tl_client_ask is all of that for a
 * call that has one request. tl_client_attach, in place of open, makes a call on a loop and a channel that exist
 * already, and tells its end by a callback.
 *
 * Thread: one. Blocks: open and wait.
 */
#ifndef CONTROL_CLIENT_CALL_H
#define CONTROL_CLIENT_CALL_H

#include "control/client.h"
#include "control/stream.h"
#include "control/wire.h"

struct tl_client;

/* Takes over what a response says; the message is borrowed. Errors: end the call with them. */
typedef enum tl_status (*tl_response_fn)(void *context, grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                         struct tl_error *ret_error);

struct tl_client_method {
    const char *name; /* "/package.Service/Method" */
    bool is_single;   /* exactly one response belongs to a call that succeeds */
    tl_response_fn take;
    void (*sent)(struct tl_client *client); /* NULL: not interested */
};

struct tl_client {
    const struct tl_call_options *options;
    enum tl_call_stage stage;
    struct tl_loop *loop;
    grpc_channel *channel;
    grpc_metadata *metadata;    /* the options' headers */
    struct tl_wire_arena arena; /* the response that is being handled */
    const struct tl_client_method *method;
    void *context;            /* argument of method->take */
    struct tl_stream *stream; /* NULL: not started, or ended */
    size_t response_count;
    struct tl_error failure; /* why we have ended the call; TL_OK: we have not */
    struct tl_error status;  /* how the call ended */
    bool is_attached;        /* loop and channel are the caller's */
    void (*ended)(
        struct tl_client *client); /* the call has ended; NULL: tl_client_wait notices. It may close the client */
};

extern const struct tl_client_method tl_client_list_method;     /* its context is a struct tl_listing_builder */
extern const struct tl_client_method tl_client_withdraw_method; /* its context is a uint64_t: how many */

/* Connects, within options->connect_timeout_ns. client->stage says how far it came. On error, too, tl_client_close
 * follows. Errors: TL_INVALID_ARGUMENT: the address. TL_UNAVAILABLE: not reached. TL_RESOURCE_EXHAUSTED: no memory or
 * descriptors. */
enum tl_status tl_client_open(struct tl_client *client, const struct tl_call_options *options,
                              struct tl_error *ret_error) TL_MUST_USE;

/* Prepares a call on a loop and a channel of the caller's; answers take at most arena_bytes in memory. options says
 * what messages and the time-out of calls need: address and rpc_timeout_ns. Errors: TL_RESOURCE_EXHAUSTED: no memory.
 */
enum tl_status tl_client_attach(struct tl_client *client, const struct tl_call_options *options, struct tl_loop *loop,
                                grpc_channel *channel, size_t arena_bytes, void (*ended)(struct tl_client *client),
                                struct tl_error *ret_error) TL_MUST_USE;

/* Starts the call with its first message, which is taken over (NULL: there was no memory for it). */
enum tl_status tl_client_start(struct tl_client *client, const struct tl_client_method *method, void *context,
                               int64_t deadline_ns, grpc_byte_buffer *request, struct tl_error *ret_error) TL_MUST_USE;

/* Ends the call with an error of ours; the first one counts. */
void tl_client_fail(struct tl_client *client, const struct tl_error *failure);

/* Runs until the call has ended; returns how. */
enum tl_status tl_client_wait(struct tl_client *client, struct tl_error *ret_error) TL_MUST_USE;

/* Returns how a call has ended. */
enum tl_status tl_client_result(struct tl_client *client, struct tl_error *ret_error) TL_MUST_USE;

/* The call has ended, or was never started. */
void tl_client_close(struct tl_client *client);

/* A whole call with one request and the deadline options->rpc_timeout_ns. ret_stage may be NULL. */
enum tl_status tl_client_ask(const struct tl_call_options *options, const struct tl_client_method *method,
                             const ProtobufCMessage *request, void *context, enum tl_call_stage *ret_stage,
                             struct tl_error *ret_error) TL_MUST_USE;

#endif
