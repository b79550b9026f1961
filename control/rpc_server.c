// SPDX-License-Identifier: Apache-2.0
/*
 * The gRPC server.
 *
 * For each method, and for calls of no method, a few requests for calls ("slots") are outstanding with gRPC at all
 * times; a slot that was answered is armed again before the call is handed on. A server without an outstanding request
 * for unknown methods would leave such calls unanswered for ever.
 *
 * Connections come from a listener of ours (control/listener.h); gRPC is given those that were taken.
 *
 * Order of the end: the listener is closed, shutdown_and_notify (new calls are refused, slots come back unanswered),
 * the deadline cancels the calls that are left, and stopped is called when the notification, all slots and all streams
 * are back. Only then may the server be destroyed.
 */
#include "control/rpc_server.h"

#include <grpc/compression.h>
#include <grpc/grpc_security.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "base/shares.h"
#include "control/connection.h"
#include "control/credentials.h"
#include "control/endpoint.h"
#include "control/guard.h"
#include "control/listener.h"
#include "control/stream_hook.h"
#include "control/tag.h"
#include "tensor/transfer.h"

#define SLOTS_PER_METHOD 8
#define MAX_METHODS 24
#define GRACE_WITHOUT_CALLS_NS (200 * TL_NS_PER_MS)
#define MAX_METADATA_BYTES 16384
/* Half of the shortest keepalive that can be configured: a client that probes that often is no attacker. */
#define MIN_PING_INTERVAL_MS 50
#define MAX_CALLS_PER_CONNECTION 4096
/* So many of the largest messages may be unfinished on all connections together. */
#define MAX_UNFINISHED_MESSAGES 64

struct method {
    struct tl_rpc_server *server;
    const char *name;        /* NULL: every method that was not added */
    void *registration;      /* gRPC's */
    enum tl_action action;   /* what its callers must be allowed */
    struct tl_shares *calls; /* what its calls are charged to */
    tl_accept_fn accept;
    void *context;
};

struct slot {
    struct tl_tag tag;
    struct method *method;
    grpc_call *call;
    grpc_call_details details; /* only of the method without name */
    grpc_metadata_array metadata;
    gpr_timespec deadline;
};

/* A call that is charged to its client. */
struct charged_call {
    struct tl_rpc_server *server;
    struct tl_share *share;
};

struct tl_rpc_server {
    struct tl_loop *loop;
    struct tl_shares *calls;        /* limits.connections */
    struct tl_shares *health_calls; /* as many again, for health checks alone */
    grpc_server *server;
    grpc_server_credentials *credentials;
    struct tl_guard *guard;
    struct tl_listener *listener; /* NULL: not started, or stopping */
    struct tl_rpc_server_options options;
    pthread_mutex_t adding; /* guards is_closed */
    bool is_closed;         /* gRPC is given no connection any more */
    struct method methods[MAX_METHODS];
    size_t method_count;
    struct slot slots[MAX_METHODS * SLOTS_PER_METHOD];
    unsigned armed_slots;
    uint64_t open_calls;
    bool is_started;
    bool is_stopping;
    bool is_notified;
    struct tl_tag notify_tag;
    int64_t stop_deadline_ns;
    struct tl_timer stop_timer; /* stopping: the deadline, or the end of the grace without calls */
    void (*stopped)(void *context);
    void *stopped_context;
};

static void maybe_stopped(struct tl_rpc_server *server)
{
    if (!server->is_notified || server->armed_slots > 0 || server->open_calls > 0) return;
    tl_timers_disarm(tl_loop_timers(server->loop), &server->stop_timer);
    if (server->stopped == NULL) return;
    void (*stopped)(void *) = server->stopped;
    server->stopped = NULL;
    stopped(server->stopped_context);
}

/* Stopping: with calls until the deadline, without calls for a grace. Connections of clients that do not answer gRPC's
 * goodbye - an idle client of some languages looks at its connection every few seconds only - would otherwise hold the
 * stop up to the deadline. */
static void arm_stop_timer(struct tl_rpc_server *server)
{
    if (!server->is_stopping || server->is_notified) return;
    int64_t due_ns = server->stop_deadline_ns;
    int64_t grace_ns = tl_clock_deadline_ns(GRACE_WITHOUT_CALLS_NS);
    if (server->open_calls == 0 && grace_ns < due_ns) due_ns = grace_ns;
    if (tl_timers_arm(tl_loop_timers(server->loop), &server->stop_timer, due_ns) != TL_OK) {
        grpc_server_cancel_all_calls(server->server);
    }
}

static void message_came(void *context, const struct tl_connection *connection, uint64_t message_bytes)
{
    struct tl_rpc_server *server = context;
    tl_guard_message(server->guard, connection, message_bytes);
}

static void call_held(void *context, const struct tl_connection *connection, bool is_held)
{
    struct tl_rpc_server *server = context;
    tl_guard_hold(server->guard, connection, is_held);
}

static void call_ended(void *context, const struct tl_connection *connection)
{
    struct tl_rpc_server *server = context;
    tl_guard_call_ended(server->guard, connection);
    server->open_calls--;
    if (server->open_calls == 0) arm_stop_timer(server);
    maybe_stopped(server);
}

static const struct tl_stream_hooks stream_hooks = {.message = message_came, .hold = call_held, .end = call_ended};

static void slot_arm(struct slot *slot)
{
    struct tl_rpc_server *server = slot->method->server;
    grpc_completion_queue *cq = tl_loop_cq(server->loop);
    grpc_metadata_array_init(&slot->metadata);
    grpc_call_error error;
    if (slot->method->name == NULL) {
        grpc_call_details_init(&slot->details);
        error =
            grpc_server_request_call(server->server, &slot->call, &slot->details, &slot->metadata, cq, cq, &slot->tag);
    } else {
        error = grpc_server_request_registered_call(server->server, slot->method->registration, &slot->call,
                                                    &slot->deadline, &slot->metadata, NULL, cq, cq, &slot->tag);
    }
    TL_CHECK(error == GRPC_CALL_OK);
    server->armed_slots++;
}

static void charged_message_came(void *context, const struct tl_connection *connection, uint64_t message_bytes)
{
    struct charged_call *charged = context;
    message_came(charged->server, connection, message_bytes);
}

static void charged_call_held(void *context, const struct tl_connection *connection, bool is_held)
{
    const struct charged_call *charged = context;
    call_held(charged->server, connection, is_held);
}

static void charged_call_ended(void *context, const struct tl_connection *connection)
{
    struct charged_call *charged = context;
    struct tl_rpc_server *server = charged->server;
    tl_shares_give(charged->share, 1);
    free(charged);
    call_ended(server, connection);
}

static const struct tl_stream_hooks charged_hooks = {
    .message = charged_message_came, .hold = charged_call_held, .end = charged_call_ended};

/* Charges the client with the call, until the stream ends. */
static enum tl_status charge(struct method *method, struct tl_stream *stream, struct tl_error *ret_error)
{
    char address[TL_MAX_ADDRESS_BYTES];
    const struct tl_share_client client = tl_share_client_of(tl_stream_peer_address(stream, address, sizeof(address)));
    struct charged_call *charged = malloc(sizeof(*charged));
    if (charged == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a call");
    charged->server = method->server;
    enum tl_status status = tl_shares_take(method->calls, &client, 1, &charged->share, ret_error);
    if (status != TL_OK) {
        free(charged);
        return status;
    }
    tl_stream_set_hooks(stream, &charged_hooks, charged);
    return TL_OK;
}

/* Finds out whose call it is; false: its connection has ended. */
static bool identify(const struct tl_rpc_server *server, struct tl_stream *stream)
{
    struct tl_tls_peer *peer = tl_tls_find(server->options.tls, tl_stream_connection(stream)->cookie);
    if (peer == NULL) return false;
    tl_stream_set_tls_peer(stream, peer);
    tl_tls_peer_release(peer);
    return true;
}

static enum tl_status check_caller(const struct method *method, const struct tl_stream *stream,
                                   struct tl_error *ret_error)
{
    const struct tl_rpc_server_options *options = &method->server->options;
    struct tl_identity caller = {.source = TL_IDENTITY_NONE};
    if (options->may == NULL) return TL_OK;
    tl_stream_peer_address(stream, caller.address, sizeof(caller.address));
    tl_stream_certify(stream, &caller);
    return options->may(options->worker, &caller, method->action, ret_error);
}

/* Hands a call on, or refuses it. */
static void dispatch(struct method *method, grpc_call *call)
{
    struct tl_rpc_server *server = method->server;
    struct tl_stream *stream;
    if (tl_stream_accept(server->loop, call, NULL, NULL, &stream, NULL) != TL_OK) return;
    tl_stream_set_hooks(stream, &stream_hooks, server);
    tl_guard_call_began(server->guard, tl_stream_connection(stream));
    server->open_calls++;
    struct tl_error refusal;
    if (server->options.tls != NULL && !identify(server, stream)) {
        tl_error_set(&refusal, TL_UNAVAILABLE, "the TLS connection of this call has ended");
        tl_stream_finish(stream, &refusal);
    } else if (method->name == NULL) {
        tl_error_set(&refusal, TL_UNIMPLEMENTED, "no such method; see the server's reflection for those it has");
        tl_stream_finish(stream, &refusal);
    } else if (check_caller(method, stream, &refusal) != TL_OK || charge(method, stream, &refusal) != TL_OK) {
        tl_stream_finish(stream, &refusal);
    } else {
        method->accept(method->context, stream);
    }
}

static void slot_complete(struct tl_tag *tag, bool is_ok)
{
    struct slot *slot = TL_CONTAINER_OF(tag, struct slot, tag);
    struct tl_rpc_server *server = slot->method->server;
    server->armed_slots--;
    grpc_metadata_array_destroy(&slot->metadata);
    if (slot->method->name == NULL) grpc_call_details_destroy(&slot->details);
    if (!is_ok) {
        maybe_stopped(server);
        return;
    }
    grpc_call *call = slot->call;
    slot->call = NULL;
    if (!server->is_stopping) slot_arm(slot);
    dispatch(slot->method, call);
}

static void notify_complete(struct tl_tag *tag, bool is_ok)
{
    (void)is_ok;
    struct tl_rpc_server *server = TL_CONTAINER_OF(tag, struct tl_rpc_server, notify_tag);
    server->is_notified = true;
    maybe_stopped(server);
}

static void stop_timer_fire(struct tl_timer *timer)
{
    struct tl_rpc_server *server = TL_CONTAINER_OF(timer, struct tl_rpc_server, stop_timer);
    if (server->open_calls > 0) {
        TL_LOG_AT_WARN("cancelling the calls that are still open", TL_U64("calls", server->open_calls));
    }
    grpc_server_cancel_all_calls(server->server);
}

static grpc_arg integer_arg(const char *key, int value)
{
    grpc_arg arg = {.type = GRPC_ARG_INTEGER, .key = (char *)key};
    arg.value.integer = value;
    return arg;
}

enum tl_status tl_rpc_server_create(struct tl_loop *loop, const struct tl_rpc_server_options *options,
                                    struct tl_rpc_server **ret_server, struct tl_error *ret_error)
{
    struct tl_rpc_server *server = calloc(1, sizeof(*server));
    if (server == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the server");
    server->loop = loop;
    server->options = *options;
    pthread_mutex_init(&server->adding, NULL);
    server->calls = tl_shares_create("limits.connections", options->max_calls);
    server->health_calls = tl_shares_create("limits.connections", options->max_calls);
    if (server->calls == NULL || server->health_calls == NULL) {
        tl_shares_destroy(server->calls);
        tl_shares_destroy(server->health_calls);
        free(server);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the server");
    }
    tl_tag_init(&server->notify_tag, notify_complete);
    server->stop_timer.fire = stop_timer_fire;
    const struct tl_guard_options guard_options = {
        .loop = loop,
        .max_unfinished_bytes = MAX_UNFINISHED_MESSAGES * options->max_message_bytes,
        .max_message_bytes = options->max_message_bytes,
        .max_unfinished_ns = options->max_unfinished_ns,
    };
    enum tl_status status = tl_guard_create(&guard_options, &server->guard, ret_error);
    if (status != TL_OK) {
        tl_shares_destroy(server->calls);
        tl_shares_destroy(server->health_calls);
        free(server);
        return status;
    }
    grpc_resource_quota *quota = grpc_resource_quota_create("server");
    grpc_resource_quota_resize(quota, guard_options.max_unfinished_bytes);
    grpc_arg quota_arg = {.type = GRPC_ARG_POINTER, .key = (char *)GRPC_ARG_RESOURCE_QUOTA};
    quota_arg.value.pointer.p = quota;
    quota_arg.value.pointer.vtable = grpc_resource_quota_arg_vtable();
    grpc_arg args[] = {
        integer_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, (int)options->max_message_bytes),
        integer_arg(GRPC_ARG_MAX_METADATA_SIZE, MAX_METADATA_BYTES),
        /* The current core refuses some calls above the limit and all above this one; 1.51 does not know it. */
        integer_arg("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        integer_arg(GRPC_ARG_MAX_CONCURRENT_STREAMS, MAX_CALLS_PER_CONNECTION),
        integer_arg(GRPC_ARG_KEEPALIVE_TIME_MS, tl_clock_to_ms(options->keepalive_ns)),
        integer_arg(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, tl_clock_to_ms(options->keepalive_timeout_ns)),
        integer_arg(TL_ARG_PING_TIMEOUT_MS, tl_clock_to_ms(options->keepalive_timeout_ns)),
        /* Also without calls: a connection whose client has vanished would stay for ever. */
        integer_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
        integer_arg(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
        integer_arg("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        integer_arg(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, TL_HTTP2_FRAME_BYTES),
        /* gRPC unpacks a compressed message before it looks at its size: a small one could take all memory. */
        integer_arg(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1 << GRPC_COMPRESS_NONE),
        integer_arg(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0),
        quota_arg,
    };
    grpc_channel_args channel_args = {.num_args = TL_ARRAY_COUNT(args), .args = args};
    server->credentials = tl_credentials_for_server();
    server->server = grpc_server_create(&channel_args, NULL);
    grpc_resource_quota_unref(quota);
    grpc_server_register_completion_queue(server->server, tl_loop_cq(loop), NULL);
    *ret_server = server;
    return TL_OK;
}

static enum tl_status add_method(struct tl_rpc_server *server, const char *method, enum tl_action action,
                                 struct tl_shares *calls, tl_accept_fn accept, void *context,
                                 struct tl_error *ret_error)
{
    TL_CHECK(!server->is_started && server->method_count < MAX_METHODS);
    void *registration = NULL;
    if (method != NULL) {
        registration = grpc_server_register_method(server->server, method, NULL, GRPC_SRM_PAYLOAD_NONE, 0);
        if (registration == NULL) return tl_error_set(ret_error, TL_ALREADY_EXISTS, "method %s is added twice", method);
    }
    server->methods[server->method_count++] = (struct method){.server = server,
                                                              .name = method,
                                                              .registration = registration,
                                                              .action = action,
                                                              .calls = calls,
                                                              .accept = accept,
                                                              .context = context};
    return TL_OK;
}

enum tl_status tl_rpc_server_add_method(struct tl_rpc_server *server, const char *method, enum tl_action action,
                                        tl_accept_fn accept, void *context, struct tl_error *ret_error)
{
    return add_method(server, method, action, server->calls, accept, context, ret_error);
}

enum tl_status tl_rpc_server_add_health_method(struct tl_rpc_server *server, const char *method, enum tl_action action,
                                               tl_accept_fn accept, void *context, struct tl_error *ret_error)
{
    return add_method(server, method, action, server->health_calls, accept, context, ret_error);
}

/* Over the loopback interface nothing is lost and nothing queues, so that there is nothing for a congestion control to
 * find out; one that paces what it sends, as bbr does, costs a sender of large tensors a fifth of its time. */
static void choose_congestion_control(int fd)
{
    static const char plain[] = "reno"; /* every kernel has it, and every user may choose it */
    char target[TL_ENDPOINT_TARGET_BYTES];
    if (!tl_endpoint_peer(fd, target) || !tl_endpoint_is_loopback(target)) return;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, plain, sizeof(plain) - 1);
}

/* Gives gRPC a connection, or its end of the relay of one, unless the server is stopping. */
static void add_connection(struct tl_rpc_server *server, int fd, int connection, uint64_t cookie)
{
    pthread_mutex_lock(&server->adding);
    bool is_closed = server->is_closed;
    if (!is_closed) {
        tl_guard_add(server->guard, fd, connection, cookie);
        tl_connection_add(server->server, fd, server->credentials);
    }
    pthread_mutex_unlock(&server->adding);
    if (is_closed) (void)close(fd);
}

/* On the handshake thread. */
static void take_secured(void *context, int fd, int connection, uint64_t cookie)
{
    add_connection(context, fd, connection, cookie);
}

/* On the listener's thread. */
static void take_connection(void *context, int fd)
{
    struct tl_rpc_server *server = context;
    choose_congestion_control(fd);
    /* What was sent and is not acknowledged in this time ends the connection, as unanswered pings do. */
    int timeout_ms = tl_clock_to_ms(server->options.keepalive_timeout_ns);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof(timeout_ms));
    if (server->options.tls != NULL) {
        tl_tls_accept(server->options.tls, fd, take_secured, server);
    } else {
        add_connection(server, fd, fd, tl_connection_cookie(fd));
    }
}

enum tl_status tl_rpc_server_start(struct tl_rpc_server *server, const char *address, uint16_t *ret_port,
                                   struct tl_error *ret_error)
{
    TL_CHECK(!server->is_started);
    uint16_t port;
    enum tl_status status = tl_listener_open(address, take_connection, server, &server->listener, &port, ret_error);
    if (status != TL_OK) return status;
    status = tl_rpc_server_add_method(server, NULL, TL_ACTION_HEALTH, NULL, NULL, ret_error);
    if (status != TL_OK) return status;
    grpc_server_start(server->server);
    server->is_started = true;
    for (size_t m = 0; m < server->method_count; m++) {
        for (size_t s = 0; s < SLOTS_PER_METHOD; s++) {
            struct slot *slot = &server->slots[m * SLOTS_PER_METHOD + s];
            slot->method = &server->methods[m];
            tl_tag_init(&slot->tag, slot_complete);
            slot_arm(slot);
        }
    }
    tl_listener_start(server->listener);
    *ret_port = port;
    return TL_OK;
}

size_t tl_rpc_server_describe(const struct tl_rpc_server *server, char (*ret_texts)[TL_LISTENER_TEXT_BYTES],
                              size_t capacity)
{
    return server->listener != NULL ? tl_listener_describe(server->listener, ret_texts, capacity) : 0;
}

void tl_rpc_server_stop(struct tl_rpc_server *server, int64_t deadline_ns, void (*stopped)(void *context),
                        void *context)
{
    TL_CHECK(server->is_started && !server->is_stopping);
    server->is_stopping = true;
    tl_listener_close(server->listener);
    server->listener = NULL;
    /* Handshakes that are under way may still pass. */
    pthread_mutex_lock(&server->adding);
    server->is_closed = true;
    pthread_mutex_unlock(&server->adding);
    server->stopped = stopped;
    server->stopped_context = context;
    server->stop_deadline_ns = deadline_ns;
    grpc_server_shutdown_and_notify(server->server, tl_loop_cq(server->loop), &server->notify_tag);
    arm_stop_timer(server);
}

bool tl_rpc_server_uses_spares(const struct tl_rpc_server *server)
{
    if (server->options.tls != NULL && tl_tls_uses_spares(server->options.tls)) return true;
    return server->listener != NULL && tl_listener_uses_spares(server->listener);
}

int64_t tl_rpc_server_short_ns(const struct tl_rpc_server *server)
{
    return server->listener != NULL ? tl_listener_short_ns(server->listener) : 0;
}

void tl_rpc_server_destroy(struct tl_rpc_server *server)
{
    if (server == NULL) return;
    TL_CHECK(!server->is_started || (server->is_notified && server->open_calls == 0));
    tl_timers_disarm(tl_loop_timers(server->loop), &server->stop_timer);
    tl_listener_close(server->listener);
    tl_guard_destroy(server->guard);
    grpc_server_destroy(server->server);
    grpc_server_credentials_release(server->credentials);
    tl_shares_destroy(server->calls);
    tl_shares_destroy(server->health_calls);
    pthread_mutex_destroy(&server->adding);
    free(server);
}
