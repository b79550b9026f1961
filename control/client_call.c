// SPDX-License-Identifier: Apache-2.0
/*
 * Calls of tools.
 *
 * Happy path: the name is resolved and the port dialled by us, so that a message can say what was wrong; then gRPC
 * connects, with TLS when that is asked for; once its channel is ready, the call is made. All of it happens in a loop
 * of its own, run by the caller's thread.
 *
 * Failure modes: whatever answers the connection but no HTTP/2 settings, with something else or with nothing, shows as
 * a channel that does not become ready, and so does a lack of descriptors that only gRPC met. What a server answers is
 * checked; an answer that cannot be ends the call with INTERNAL. A call whose deadline passes is ended by gRPC.
 */
#include "control/client_call.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "control/credentials.h"
#include "control/endpoint.h"
#include "control/grpc_text.h"
#include "control/tag.h"
#include "control/tls.h"

#define ARENA_BYTES (4 * 1024 * 1024)
#define MAX_RESPONSE_BYTES (4 * 1024 * 1024)
/* Before it is unpacked, which can make it a thousand times larger. */
#define MAX_GZIP_RESPONSE_BYTES (64 * 1024)

/* -------------------------------------------------------------------------------------------------- connecting -- */

/* A look-out for a change of the channel's state. */
struct look_out {
    struct tl_tag tag;
    bool is_over;
};

static void look_out_complete(struct tl_tag *tag, bool is_ok)
{
    (void)is_ok;
    TL_CONTAINER_OF(tag, struct look_out, tag)->is_over = true;
}

static void stream_closed(struct tl_stream *stream, const struct tl_error *status)
{
    struct tl_client *client = tl_stream_owner(stream);
    client->status = *status;
    client->stream = NULL;
    if (client->ended != NULL) client->ended(client);
}

/* What gRPC says of a failed connection, without the names of what it has tried. */
static const char *cut_to_reason(const char *message)
{
    static const char *const before[] = {"Ssl handshake failed: ", "last error: "};
    for (size_t i = 0; i < TL_ARRAY_COUNT(before); i++) {
        const char *found = strstr(message, before[i]);
        if (found != NULL) return found + strlen(before[i]);
    }
    return message;
}

/* The state of a channel does not say why it is as it is, the end of a call does: sets client->status. */
static enum tl_status learn_why(struct tl_client *client, int64_t deadline_ns, struct tl_error *ret_error)
{
    static const struct tl_stream_events events = {.on_closed = stream_closed};
    enum tl_status status = tl_stream_call(client->loop, client->channel, "/grpc.health.v1.Health/Check", deadline_ns,
                                           &events, client, &client->stream, ret_error);
    while (client->stream != NULL)
        (void)tl_loop_run_once(client->loop, TL_TIME_NEVER);
    return status;
}

static enum tl_status no_tls(struct tl_client *client, struct tl_error *ret_error)
{
    const char *message = client->status.message;
    if (strncmp(message, "empty address list", 18) == 0) { /* gRPC could make no connection out of the address */
        client->stage = TL_CALL_OPTIONS;
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "TLS rejects the certificates or the key; check that each file is complete and that the "
                            "key belongs to the certificate");
    }
    return tl_error_set(ret_error, TL_UNAVAILABLE,
                        "%s accepts connections but the TLS handshake failed: %.600s; does it speak TLS, is its "
                        "certificate for this name and of a trusted authority, and does it want one of ours?",
                        client->options->address, cut_to_reason(message));
}

/* The time that what listens has to speak HTTP/2, once it has taken a connection. */
static int64_t http2_ns(const struct tl_call_options *options)
{
    int64_t timeout_ns = options->http2_timeout_ns;
    return timeout_ns > 0 && timeout_ns < options->connect_timeout_ns ? timeout_ns : options->connect_timeout_ns;
}

static enum tl_status no_http2(struct tl_client *client, bool is_silent, struct tl_error *ret_error)
{
    if (!is_silent) {
        return tl_error_set(ret_error, TL_UNAVAILABLE,
                            "%s accepts connections but does not speak gRPC (HTTP/2 without TLS): %.600s; is it the "
                            "port of another program?",
                            client->options->address, cut_to_reason(client->status.message));
    }
    char duration[32];
    client->stage = TL_CALL_SILENT;
    return tl_error_set(
        ret_error, TL_UNAVAILABLE,
        "%s accepts connections but has not answered within %s; is the process stopped or overloaded, or "
        "is it the port of another program?",
        client->options->address, tl_text_format_duration(http2_ns(client->options), duration, sizeof(duration)));
}

/* The address took our connection, and then gRPC, which dials anew, found that this process lacks something. */
static enum tl_status no_connection(struct tl_client *client, struct tl_error *ret_error)
{
    static const int lacks[] = {EMFILE, ENFILE, ENOBUFS, ENOMEM};
    for (size_t i = 0; i < TL_ARRAY_COUNT(lacks); i++) {
        if (strstr(client->status.message, strerror(lacks[i])) == NULL) continue;
        client->stage = TL_CALL_CONNECT;
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            "%s was not dialled: %s; this process needs more descriptors or memory",
                            client->options->address, strerror(lacks[i]));
    }
    return client->options->tls != NULL ? no_tls(client, ret_error) : no_http2(client, false, ret_error);
}

/* Waits until the channel speaks HTTP/2. A channel that has become idle again did, for a moment: what listens has ended
 * the connection, and the call tells why. */
static enum tl_status wait_ready(struct tl_client *client, int64_t deadline_ns, struct tl_error *ret_error)
{
    for (bool is_first = true;; is_first = false) {
        grpc_connectivity_state state = grpc_channel_check_connectivity_state(client->channel, 1);
        bool is_late = tl_clock_remaining_ns(deadline_ns) == 0;
        if (state == GRPC_CHANNEL_READY || (state == GRPC_CHANNEL_IDLE && !is_first && !is_late)) return TL_OK;
        if (state == GRPC_CHANNEL_TRANSIENT_FAILURE || state == GRPC_CHANNEL_SHUTDOWN) {
            enum tl_status status = learn_why(client, deadline_ns, ret_error);
            return status != TL_OK ? status : no_connection(client, ret_error);
        }
        if (is_late) return no_http2(client, true, ret_error);
        struct look_out look_out = {.is_over = false};
        tl_tag_init(&look_out.tag, look_out_complete);
        grpc_channel_watch_connectivity_state(client->channel, state, tl_deadline_to_gpr(deadline_ns),
                                              tl_loop_cq(client->loop), &look_out.tag);
        while (!look_out.is_over)
            (void)tl_loop_run_once(client->loop, TL_TIME_NEVER);
    }
}

/* How a dial ended. */
struct dialled {
    bool is_over;
    int fd;
    struct tl_error failure;
};

static void dial_over(void *owner, int fd, const struct tl_error *failure)
{
    struct dialled *dialled = owner;
    *dialled = (struct dialled){.is_over = true, .fd = fd, .failure = *failure};
}

/* Connects with TLS and returns gRPC's end of the connection. */
static enum tl_status connect_tls(struct tl_client *client, const char *target, int64_t deadline_ns, int *ret_fd,
                                  struct tl_error *ret_error)
{
    const struct tl_tls_address address = {
        .target = target,
        .label = client->options->address,
        .expected_name = client->options->expected_name,
        .deadline_ns = deadline_ns,
    };
    struct dialled dialled = {.is_over = false};
    struct tl_tls_dial *dial;
    enum tl_status status =
        tl_tls_dial(client->options->secure, client->loop, &address, dial_over, &dialled, &dial, ret_error);
    if (status != TL_OK) return status;
    while (!dialled.is_over)
        (void)tl_loop_run_once(client->loop, TL_TIME_NEVER);
    *ret_fd = dialled.fd;
    return dialled.fd >= 0 ? TL_OK : tl_error_copy(ret_error, &dialled.failure);
}

static void tell_where(const struct tl_call_options *options, const struct tl_endpoint *endpoint, const char *target)
{
    struct tl_ip ip;
    char text[TL_IP_TEXT_BYTES];
    _Static_assert(TL_CALL_WHERE_BYTES >= TL_ENDPOINT_WHERE_BYTES, "it holds every address");
    if (options->ret_where == NULL || tl_ip_parse(endpoint->host, &ip) || !tl_endpoint_ip(target, &ip)) return;
    snprintf(options->ret_where, TL_CALL_WHERE_BYTES, "%s %s", tl_ip_family(&ip), tl_ip_format(&ip, text));
}

/* Finds out which address of the host accepts connections. gRPC is given that one, and so does not ask a name service
 * of its own, which may know other names than this machine does. */
static enum tl_status connect_tcp(struct tl_client *client, int64_t deadline_ns,
                                  char ret_target[TL_ENDPOINT_TARGET_BYTES], struct tl_error *ret_error)
{
    struct tl_endpoint endpoint;
    struct addrinfo *found;
    client->stage = TL_CALL_RESOLVE;
    enum tl_status status = tl_endpoint_parse(client->options->address, &endpoint, ret_error);
    if (status == TL_OK) status = tl_endpoint_resolve(&endpoint, deadline_ns, &found, ret_error);
    if (status != TL_OK) return status;
    client->stage = TL_CALL_CONNECT;
    status = tl_endpoint_dial(&endpoint, found, deadline_ns, ret_target, ret_error);
    freeaddrinfo(found);
    if (status == TL_OK) tell_where(client->options, &endpoint, ret_target);
    return status;
}

/* Whether gRPC takes the metadata: it would end the process over what it does not. */
static enum tl_status check_headers(const struct tl_call_options *options, struct tl_error *ret_error)
{
    for (size_t i = 0; i < options->header_count; i++) {
        grpc_slice name = grpc_slice_from_static_string(options->headers[i].name);
        grpc_slice value = grpc_slice_from_static_string(options->headers[i].value);
        if (!grpc_header_key_is_legal(name) || strncmp(options->headers[i].name, "grpc-", 5) == 0) {
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                                "the header \"%s\" has a name that gRPC does not take; use lower-case letters, digits, "
                                "'-', '_' and '.', and nothing that begins with grpc-",
                                options->headers[i].name);
        }
        if (!grpc_is_binary_header(name) && !grpc_header_nonbin_value_is_legal(value)) {
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                                "the header \"%s\" has a value with more than printable ASCII; give it a name that "
                                "ends in -bin",
                                options->headers[i].name);
        }
    }
    return TL_OK;
}

/* gRPC uses it as long as the call exists. */
static enum tl_status copy_headers(struct tl_client *client, struct tl_error *ret_error)
{
    size_t count = client->options->header_count;
    client->metadata = calloc(count + 1, sizeof(*client->metadata));
    if (client->metadata == NULL) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %zu headers", count);
    }
    for (size_t i = 0; i < count; i++) {
        client->metadata[i].key = grpc_slice_from_copied_string(client->options->headers[i].name);
        client->metadata[i].value = grpc_slice_from_copied_string(client->options->headers[i].value);
    }
    return TL_OK;
}

enum tl_status tl_client_open(struct tl_client *client, const struct tl_call_options *options,
                              struct tl_error *ret_error)
{
    *client = (struct tl_client){.options = options};
    int64_t deadline_ns = tl_clock_deadline_ns(options->connect_timeout_ns);
    char target[TL_ENDPOINT_TARGET_BYTES];
    const struct tl_call_tls *tls = options->tls;
    enum tl_status status = check_headers(options, ret_error);
    if (status == TL_OK) status = copy_headers(client, ret_error);
    if (status == TL_OK) status = connect_tcp(client, deadline_ns, target, ret_error);
    if (status == TL_OK) status = tl_loop_create(&client->loop, ret_error);
    if (status == TL_OK) status = tl_wire_arena_init(&client->arena, ARENA_BYTES, ret_error);
    if (status != TL_OK) return status;
    client->stage = TL_CALL_HTTP2;
    int64_t silent_ns = tl_clock_deadline_ns(http2_ns(options));
    if (silent_ns < deadline_ns) deadline_ns = silent_ns;
    const struct tl_channel_options channel_options = {
        .keepalive_ns = TL_TIME_NEVER,
        .keepalive_timeout_ns = TL_TIME_NEVER,
        .connect_timeout_ns = TL_TIME_NEVER, /* ours ends first, and knows why */
        .max_message_bytes = options->is_gzip ? MAX_GZIP_RESPONSE_BYTES : MAX_RESPONSE_BYTES,
        .user_agent = options->user_agent,
        .authority = tls != NULL && tls->server_name != NULL ? tls->server_name : options->address,
        .tls = tls,
        .is_gzip = options->is_gzip,
    };
    if (options->secure != NULL) {
        int fd;
        status = connect_tls(client, target, deadline_ns, &fd, ret_error);
        if (status == TL_OK) client->channel = tl_channel_create_from_fd(fd, target, &channel_options);
    } else {
        client->channel = tl_channel_create(target, &channel_options);
        status = wait_ready(client, deadline_ns, ret_error);
    }
    if (status == TL_OK) client->stage = TL_CALL_RPC;
    return status;
}

enum tl_status tl_client_attach(struct tl_client *client, const struct tl_call_options *options, struct tl_loop *loop,
                                grpc_channel *channel, size_t arena_bytes, void (*ended)(struct tl_client *client),
                                struct tl_error *ret_error)
{
    *client = (struct tl_client){.options = options,
                                 .stage = TL_CALL_RPC,
                                 .loop = loop,
                                 .channel = channel,
                                 .is_attached = true,
                                 .ended = ended};
    return tl_wire_arena_init(&client->arena, arena_bytes, ret_error);
}

void tl_client_close(struct tl_client *client)
{
    TL_CHECK(client->stream == NULL);
    if (client->is_attached) {
        tl_wire_arena_fini(&client->arena);
        return;
    }
    if (client->channel != NULL) grpc_channel_destroy(client->channel);
    for (size_t i = 0; client->metadata != NULL && i < client->options->header_count; i++) {
        grpc_slice_unref(client->metadata[i].key);
        grpc_slice_unref(client->metadata[i].value);
    }
    free(client->metadata);
    client->metadata = NULL;
    tl_wire_arena_fini(&client->arena);
    tl_loop_destroy(client->loop);
    client->channel = NULL;
    client->loop = NULL;
}

/* -------------------------------------------------------------------------------------------------------- call -- */

void tl_client_fail(struct tl_client *client, const struct tl_error *failure)
{
    if (client->failure.code == TL_OK) client->failure = *failure;
    if (client->stream != NULL) tl_stream_cancel(client->stream);
}

static void stream_message(struct tl_stream *stream, grpc_byte_buffer *message)
{
    struct tl_client *client = tl_stream_owner(stream);
    struct tl_error error;
    enum tl_status status = TL_OK;
    if (client->failure.code == TL_OK) {
        if (client->method->is_single && client->response_count > 0) {
            status = tl_error_set(&error, TL_INTERNAL, "more than one answer");
        } else {
            status = client->method->take(client->context, message, &client->arena, &error);
        }
        client->response_count++;
    }
    grpc_byte_buffer_destroy(message);
    if (status != TL_OK) {
        tl_error_prefix(&error, "%s sent an invalid response: ", client->options->address);
        tl_client_fail(client, &error);
    }
    tl_stream_read(stream);
}

static void stream_sent(struct tl_stream *stream)
{
    struct tl_client *client = tl_stream_owner(stream);
    if (client->failure.code == TL_OK && client->method->sent != NULL) client->method->sent(client);
}

static const struct tl_stream_events stream_events = {
    .on_message = stream_message,
    .on_sent = stream_sent,
    .on_closed = stream_closed,
};

enum tl_status tl_client_start(struct tl_client *client, const struct tl_client_method *method, void *context,
                               int64_t deadline_ns, grpc_byte_buffer *request, struct tl_error *ret_error)
{
    if (request == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a request");
    client->method = method;
    client->context = context;
    const struct tl_stream_headers headers = {.metadata = client->metadata, .count = client->options->header_count};
    enum tl_status status = tl_stream_call_with(&headers, client->loop, client->channel, method->name, deadline_ns,
                                                &stream_events, client, &client->stream, ret_error);
    if (status != TL_OK) {
        grpc_byte_buffer_destroy(request);
        return status;
    }
    tl_stream_send(client->stream, request);
    tl_stream_read(client->stream);
    return TL_OK;
}

/* gRPC's own words for a deadline or a broken connection name no peer. */
static void explain(const struct tl_client *client, struct tl_error *error)
{
    bool is_reset = strncmp(error->message, "Received RST_STREAM", strlen("Received RST_STREAM")) == 0;
    if (error->code == TL_UNAVAILABLE || is_reset) tl_grpc_text_explain(error, client->options->address);
    if (error->code == TL_DEADLINE_EXCEEDED && strcmp(error->message, "Deadline Exceeded") == 0) {
        char duration[32];
        tl_error_set(error, TL_DEADLINE_EXCEEDED, "%s did not answer %s within %s", client->options->address,
                     client->method->name,
                     tl_text_format_duration(client->options->rpc_timeout_ns, duration, sizeof(duration)));
    }
}

enum tl_status tl_client_result(struct tl_client *client, struct tl_error *ret_error)
{
    if (client->failure.code != TL_OK) return tl_error_copy(ret_error, &client->failure);
    if (client->status.code != TL_OK) {
        explain(client, &client->status);
        return tl_error_copy(ret_error, &client->status);
    }
    if (client->method->is_single && client->response_count == 0) {
        return tl_error_set(ret_error, TL_INTERNAL, "%s answered %s with success but without a message",
                            client->options->address, client->method->name);
    }
    return TL_OK;
}

enum tl_status tl_client_wait(struct tl_client *client, struct tl_error *ret_error)
{
    while (client->stream != NULL)
        (void)tl_loop_run_once(client->loop, TL_TIME_NEVER);
    return tl_client_result(client, ret_error);
}

enum tl_status tl_client_ask(const struct tl_call_options *options, const struct tl_client_method *method,
                             const ProtobufCMessage *request, void *context, enum tl_call_stage *ret_stage,
                             struct tl_error *ret_error)
{
    struct tl_client client;
    enum tl_status status = tl_client_open(&client, options, ret_error);
    if (status == TL_OK) {
        int64_t deadline_ns = tl_clock_deadline_ns(options->rpc_timeout_ns);
        status = tl_client_start(&client, method, context, deadline_ns, tl_wire_write(request), ret_error);
        if (status == TL_OK) {
            tl_stream_half_close(client.stream);
            status = tl_client_wait(&client, ret_error);
        }
    }
    if (ret_stage != NULL) *ret_stage = client.stage;
    tl_client_close(&client);
    return status;
}
