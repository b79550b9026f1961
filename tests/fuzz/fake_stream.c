// SPDX-License-Identifier: Apache-2.0
/*
 * Streams and a server without gRPC.
 *
 * A stream here keeps the promises of control/stream.h and is strict about what the library may ask: that is checked
 * with TL_CHECK. It is meaner than gRPC where the contract allows it: messages are still delivered after the library
 * has asked for the end, and the end comes only when the test says so.
 */
#include "fuzz/fake_stream.h"

#include <grpc/byte_buffer.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "control/credentials.h"
#include "control/rpc_server.h"
#include "control/stream_hook.h"

#define MAX_METHODS 24

struct tl_stream {
    unsigned slot;
    const char *method;
    struct tl_loop *loop;
    bool is_client;
    bool is_reading;
    bool is_end_wanted; /* For finish and half_close. */
    bool is_through;    /* as tl_stream_report_sent_by_kernel has it */
    bool is_cancelled;
    const struct tl_stream_events *events;
    void *owner;
    const struct tl_stream_hooks *hooks;
    void *hooks_context;
    grpc_byte_buffer *sending; /* NULL: none. */
    struct tl_closure end_closure;
};

struct method {
    const char *name;
    tl_accept_fn accept;
    void *context;
};

struct tl_rpc_server {
    struct tl_loop *loop;
    struct tl_closure closure;
    void (*stopped)(void *context);
    void *stopped_context;
};

static const struct tl_stream_events no_events;
static const struct tl_connection no_connection = {.fd = -1};
static struct tl_stream *streams[FAKE_STREAMS];
static struct method methods[MAX_METHODS]; /* The methods of the one server. */
static size_t method_count;
static struct tl_loop *server_loop;

bool fake_stream_ends_itself;
void (*fake_stream_on_send)(unsigned slot, grpc_byte_buffer *message);

/* ------------------------------------------------------------------------------------- the library's functions -- */

static void close_stream(struct tl_stream *stream, const struct tl_error *status)
{
    grpc_byte_buffer_destroy(stream->sending);
    stream->sending = NULL;
    stream->is_end_wanted = true;
    if (tl_list_is_linked(&stream->end_closure.link)) tl_list_remove(&stream->end_closure.link);
    if (stream->events->on_closed != NULL) stream->events->on_closed(stream, status);
    if (stream->hooks != NULL) stream->hooks->end(stream->hooks_context, &no_connection);
    TL_CHECK(stream->sending == NULL);
    streams[stream->slot] = NULL;
    free(stream);
}

static void end_cancelled(struct tl_closure *closure)
{
    struct tl_error status;
    tl_error_set(&status, TL_CANCELLED, "the call was cancelled");
    close_stream(TL_CONTAINER_OF(closure, struct tl_stream, end_closure), &status);
}

static struct tl_stream *stream_create(struct tl_loop *loop, const char *method, bool is_client)
{
    for (unsigned slot = 0; slot < FAKE_STREAMS; slot++) {
        if (streams[slot] != NULL) continue;
        struct tl_stream *stream = calloc(1, sizeof(*stream));
        TL_CHECK(stream != NULL);
        *stream = (struct tl_stream){
            .slot = slot, .method = method, .loop = loop, .is_client = is_client, .events = &no_events};
        stream->end_closure.run = end_cancelled;
        tl_list_init(&stream->end_closure.link);
        streams[slot] = stream;
        return stream;
    }
    return NULL;
}

enum tl_status tl_stream_call(struct tl_loop *loop, grpc_channel *channel, const char *method, int64_t deadline_ns,
                              const struct tl_stream_events *events, void *owner, struct tl_stream **ret_stream,
                              struct tl_error *ret_error)
{
    (void)deadline_ns;
    TL_CHECK(channel != NULL && method[0] == '/');
    struct tl_stream *stream = stream_create(loop, method, true);
    if (stream == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no slot for a call of %s", method);
    stream->events = events;
    stream->owner = owner;
    *ret_stream = stream;
    return TL_OK;
}

enum tl_status tl_stream_call_with(const struct tl_stream_headers *headers, struct tl_loop *loop, grpc_channel *channel,
                                   const char *method, int64_t deadline_ns, const struct tl_stream_events *events,
                                   void *owner, struct tl_stream **ret_stream, struct tl_error *ret_error)
{
    (void)headers;
    return tl_stream_call(loop, channel, method, deadline_ns, events, owner, ret_stream, ret_error);
}

void *tl_stream_owner(const struct tl_stream *stream)
{
    return stream->owner;
}

void tl_stream_set_owner(struct tl_stream *stream, void *owner)
{
    stream->owner = owner;
}

void tl_stream_set_events(struct tl_stream *stream, const struct tl_stream_events *events)
{
    stream->events = events;
}

void tl_stream_set_hooks(struct tl_stream *stream, const struct tl_stream_hooks *hooks, void *context)
{
    stream->hooks = hooks;
    stream->hooks_context = context;
}

const char *tl_stream_peer_address(const struct tl_stream *stream, char *buffer, size_t capacity)
{
    snprintf(buffer, capacity, "ipv4:127.0.0.1:%u", 40000 + stream->slot);
    return buffer;
}

void tl_stream_set_tls_peer(struct tl_stream *stream, struct tl_tls_peer *peer)
{
    (void)stream;
    (void)peer;
}

void tl_stream_certify(const struct tl_stream *stream, struct tl_identity *identity)
{
    (void)stream;
    (void)identity;
}

bool tl_stream_can_send(const struct tl_stream *stream)
{
    return stream->sending == NULL && !stream->is_end_wanted;
}

void tl_stream_report_sent_by_kernel(struct tl_stream *stream, bool is_through)
{
    stream->is_through = is_through;
}

void tl_stream_send(struct tl_stream *stream, grpc_byte_buffer *message)
{
    TL_CHECK(message != NULL);
    if (stream->is_end_wanted) {
        grpc_byte_buffer_destroy(message);
        return;
    }
    TL_CHECK(stream->sending == NULL);
    stream->sending = message;
    if (fake_stream_on_send != NULL) fake_stream_on_send(stream->slot, message);
}

void tl_stream_half_close(struct tl_stream *stream)
{
    TL_CHECK(stream->is_client && !stream->is_end_wanted);
    stream->is_end_wanted = true;
}

void tl_stream_read(struct tl_stream *stream)
{
    TL_CHECK(!stream->is_reading);
    stream->is_reading = true;
}

void tl_stream_finish(struct tl_stream *stream, const struct tl_error *status)
{
    TL_CHECK(!stream->is_client && (status->code == TL_OK || status->message[0] != '\0'));
    stream->is_end_wanted = true;
}

void tl_stream_cancel(struct tl_stream *stream)
{
    stream->is_cancelled = true;
    if (!fake_stream_ends_itself || tl_list_is_linked(&stream->end_closure.link)) return;
    tl_loop_defer(stream->loop, &stream->end_closure);
}

void tl_stream_abort(struct tl_stream *stream, const struct tl_error *status)
{
    TL_CHECK(!stream->is_client && status->code != TL_OK);
    stream->is_end_wanted = true;
    tl_stream_cancel(stream);
}

void tl_stream_abandon(struct tl_stream *stream)
{
    stream->events = &no_events;
    stream->owner = NULL;
    tl_stream_cancel(stream);
}

grpc_channel *tl_channel_create(const char *address, const struct tl_channel_options *options)
{
    TL_CHECK(options != NULL);
    return grpc_lame_client_channel_create(address, GRPC_STATUS_UNAVAILABLE, "fake");
}

grpc_channel *tl_channel_create_from_fd(int fd, const char *target, const struct tl_channel_options *options)
{
    (void)fd;
    (void)target;
    (void)options;
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------ server -- */

enum tl_status tl_rpc_server_create(struct tl_loop *loop, const struct tl_rpc_server_options *options,
                                    struct tl_rpc_server **ret_server, struct tl_error *ret_error)
{
    (void)options;
    (void)ret_error;
    TL_CHECK(method_count == 0);
    struct tl_rpc_server *server = calloc(1, sizeof(*server));
    TL_CHECK(server != NULL);
    server->loop = loop;
    server_loop = loop;
    *ret_server = server;
    return TL_OK;
}

enum tl_status tl_rpc_server_add_method(struct tl_rpc_server *server, const char *method, enum tl_action action,
                                        tl_accept_fn accept, void *context, struct tl_error *ret_error)
{
    (void)action;
    (void)server;
    (void)ret_error;
    TL_CHECK(method_count < MAX_METHODS);
    methods[method_count++] = (struct method){.name = method, .accept = accept, .context = context};
    return TL_OK;
}

enum tl_status tl_rpc_server_add_health_method(struct tl_rpc_server *server, const char *method, enum tl_action action,
                                               tl_accept_fn accept, void *context, struct tl_error *ret_error)
{
    return tl_rpc_server_add_method(server, method, action, accept, context, ret_error);
}

enum tl_status tl_rpc_server_start(struct tl_rpc_server *server, const char *address, uint16_t *ret_port,
                                   struct tl_error *ret_error)
{
    (void)server;
    (void)address;
    (void)ret_error;
    *ret_port = 1;
    return TL_OK;
}

static void deliver_stopped(struct tl_closure *closure)
{
    struct tl_rpc_server *server = TL_CONTAINER_OF(closure, struct tl_rpc_server, closure);
    for (unsigned slot = 0; slot < FAKE_STREAMS; slot++) {
        if (streams[slot] != NULL && !streams[slot]->is_client) (void)fake_stream_break(slot, NULL);
    }
    server->stopped(server->stopped_context);
}

bool tl_rpc_server_uses_spares(const struct tl_rpc_server *of)
{
    (void)of;
    return false;
}

int64_t tl_rpc_server_short_ns(const struct tl_rpc_server *of)
{
    (void)of;
    return 0;
}

size_t tl_rpc_server_describe(const struct tl_rpc_server *of, char (*ret_texts)[TL_LISTENER_TEXT_BYTES],
                              size_t capacity)
{
    (void)of, (void)ret_texts, (void)capacity;
    return 0;
}

void tl_rpc_server_stop(struct tl_rpc_server *server, int64_t deadline_ns, void (*stopped)(void *context),
                        void *context)
{
    (void)deadline_ns;
    server->stopped = stopped;
    server->stopped_context = context;
    server->closure.run = deliver_stopped;
    tl_list_init(&server->closure.link);
    tl_loop_defer(server->loop, &server->closure);
}

void tl_rpc_server_destroy(struct tl_rpc_server *server)
{
    if (server == NULL) return;
    method_count = 0;
    free(server);
}

/* ---------------------------------------------------------------------------------------------------- the peer -- */

size_t fake_stream_method_count(void)
{
    return method_count;
}

size_t fake_stream_method(const char *name)
{
    size_t i = 0;
    while (i < method_count && strcmp(methods[i].name, name) != 0)
        i++;
    TL_CHECK(i < method_count);
    return i;
}

int fake_stream_accept(size_t method)
{
    TL_CHECK(method < method_count);
    struct tl_stream *stream = stream_create(server_loop, methods[method].name, false);
    if (stream == NULL) return -1;
    int slot = (int)stream->slot;
    methods[method].accept(methods[method].context, stream);
    return slot;
}

bool fake_stream_is_open(unsigned slot)
{
    return streams[slot] != NULL;
}

const char *fake_stream_called(unsigned slot)
{
    TL_CHECK(streams[slot] != NULL);
    return streams[slot]->method;
}

bool fake_stream_is_client(unsigned slot)
{
    return streams[slot] != NULL && streams[slot]->is_client;
}

bool fake_stream_is_reading(unsigned slot)
{
    return streams[slot] != NULL && streams[slot]->is_reading;
}

bool fake_stream_is_cancelled(unsigned slot)
{
    return streams[slot] != NULL && streams[slot]->is_cancelled;
}

bool fake_stream_is_sending(unsigned slot)
{
    return streams[slot] != NULL && streams[slot]->sending != NULL;
}

bool fake_stream_is_through(unsigned slot)
{
    return streams[slot]->is_through;
}

bool fake_stream_give(unsigned slot, grpc_byte_buffer *message)
{
    struct tl_stream *stream = streams[slot];
    if (!fake_stream_is_reading(slot) || stream->events->on_message == NULL) {
        grpc_byte_buffer_destroy(message);
        return false;
    }
    stream->is_reading = false;
    tl_quota_renew(tl_loop_quota(stream->loop));
    stream->events->on_message(stream, message);
    return true;
}

bool fake_stream_half_close(unsigned slot)
{
    struct tl_stream *stream = streams[slot];
    if (!fake_stream_is_reading(slot)) return false;
    stream->is_reading = false;
    if (stream->events->on_half_closed != NULL) stream->events->on_half_closed(stream);
    return true;
}

bool fake_stream_take(unsigned slot)
{
    struct tl_stream *stream = streams[slot];
    if (stream == NULL || stream->sending == NULL || stream->is_cancelled) return false;
    grpc_byte_buffer_destroy(stream->sending);
    stream->sending = NULL;
    if (stream->events->on_sent != NULL) stream->events->on_sent(stream);
    return true;
}

bool fake_stream_end(unsigned slot)
{
    struct tl_stream *stream = streams[slot];
    if (stream == NULL || (!stream->is_cancelled && (!stream->is_end_wanted || stream->sending != NULL))) return false;
    struct tl_error status = {.code = TL_OK};
    if (stream->is_cancelled) tl_error_set(&status, TL_CANCELLED, "the call was cancelled");
    close_stream(stream, &status);
    return true;
}

bool fake_stream_break(unsigned slot, const struct tl_error *status)
{
    struct tl_stream *stream = streams[slot];
    if (stream == NULL) return false;
    struct tl_error gone;
    tl_error_set(&gone, TL_CANCELLED, "the client went away");
    close_stream(stream, stream->is_client ? status : &gone);
    return true;
}
