// SPDX-License-Identifier: Apache-2.0
/*
 * The gRPC server: methods, a port, and an orderly end.
 *
 * Happy path: create, add methods, listen, start; each accepted call becomes a stream given to its method; stop refuses
 * new calls, waits for the running ones until the deadline, cancels what is left, then calls back; destroy. A call to a
 * method that was not added is answered with UNIMPLEMENTED.
 *
 * The calls that may be open are divided among the clients by their addresses (base/shares.h). Health checks have an
 * account of their own, as large, so that no other call can keep them from being answered.
 */
#ifndef CONTROL_RPC_SERVER_H
#define CONTROL_RPC_SERVER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/action.h"
#include "control/listener.h"
#include "control/stream.h"
#include "control/tls.h"

struct tl_rpc_server;

struct tl_rpc_server_options {
    int64_t keepalive_ns;         /* after which a connection is probed, whether it has calls or not */
    int64_t keepalive_timeout_ns; /* for the client to answer, else the connection ends */
    int64_t max_unfinished_ns;    /* for which a connection may leave messages unfinished */
    uint64_t max_message_bytes;   /* received */
    struct tl_tls *tls; /* accepts only what has passed its handshakes; outlives start to stop; NULL: no TLS */
    uint64_t max_calls; /* open at a time: limits.connections; more are refused RESOURCE_EXHAUSTED */
    /* Whether the caller may do what a method does (control/control.h); NULL: everybody may do everything. */
    enum tl_status (*may)(void *worker, const struct tl_identity *caller, enum tl_action action,
                          struct tl_error *ret_error);
    void *worker;
};

/* A new call: set owner and events of the stream, read from it. */
typedef void (*tl_accept_fn)(void *context, struct tl_stream *stream);

enum tl_status tl_rpc_server_create(struct tl_loop *loop, const struct tl_rpc_server_options *options,
                                    struct tl_rpc_server **ret_server, struct tl_error *ret_error) TL_MUST_USE;

/* Before start. method is a static string "/package.Service/Method"; action is what its callers must be allowed. */
enum tl_status tl_rpc_server_add_method(struct tl_rpc_server *server, const char *method, enum tl_action action,
                                        tl_accept_fn accept, void *context, struct tl_error *ret_error) TL_MUST_USE;

/* The same for a method of the health check. */
enum tl_status tl_rpc_server_add_health_method(struct tl_rpc_server *server, const char *method, enum tl_action action,
                                               tl_accept_fn accept, void *context,
                                               struct tl_error *ret_error) TL_MUST_USE;

/* Binds "host:port" (port 0: any) and starts. Errors: TL_ALREADY_EXISTS: the address is in use. TL_UNAVAILABLE: it
 * cannot be resolved or bound, naming it and why. TL_INVALID_ARGUMENT: it is no such address. TL_RESOURCE_EXHAUSTED: no
 * memory, descriptor or thread. */
enum tl_status tl_rpc_server_start(struct tl_rpc_server *server, const char *address, uint16_t *ret_port,
                                   struct tl_error *ret_error) TL_MUST_USE;

/* tl_listener_describe of its sockets; none before start and after stop. */
size_t tl_rpc_server_describe(const struct tl_rpc_server *server, char (*ret_texts)[TL_LISTENER_TEXT_BYTES],
                              size_t capacity);

/* Refuses new calls, gives the running ones until deadline_ns, cancels the rest; stopped is called once, when no call
 * is left. Only after start. */
void tl_rpc_server_stop(struct tl_rpc_server *server, int64_t deadline_ns, void (*stopped)(void *context),
                        void *context);

/* tl_listener_uses_spares; false: it does not listen. */
bool tl_rpc_server_uses_spares(const struct tl_rpc_server *server);

/* When a connection came and no descriptor was free for the last time (monotonic); 0: never, or it does not listen. */
int64_t tl_rpc_server_short_ns(const struct tl_rpc_server *server);

/* Stopped or never started. NULL is accepted. */
void tl_rpc_server_destroy(struct tl_rpc_server *server);

#endif
