// SPDX-License-Identifier: Apache-2.0
/*
 * One gRPC call as a stream.
 *
 *      OPEN --finish/half_close asked, message in flight--> ending after it is sent
 *      OPEN --status received (client) / client gone or status sent (server)--> CLOSED, once no batch is outstanding
 *
 * Each kind of batch (close, read, send, last) has one tag and is outstanding at most once; `pending` counts them. The
 * call ends when the batch that reports its end has completed, the server's own status, if it sent one, is out, and
 * nothing is pending: then on_closed runs and the stream is freed.
 */
#include "control/stream.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "base/text.h"
#include "control/grpc_text.h"
#include "control/stream_hook.h"
#include "control/tag.h"
#include "tensor/transfer.h"

struct tl_stream {
    struct tl_loop *loop;
    grpc_call *call;
    bool is_client;
    const struct tl_stream_events *events;
    void *owner;
    const struct tl_stream_hooks *hooks; /* the server's; NULL: none */
    void *hooks_context;
    struct tl_connection connection; /* a server's */
    struct tl_tls_peer *tls_peer;    /* NULL: no TLS */

    unsigned pending;      /* batches outstanding */
    bool is_end_known;     /* the close batch has completed */
    bool is_reading;       /* the read batch is outstanding */
    bool is_held;          /* the hooks know that this process does not read */
    bool is_sending;       /* the send batch is outstanding */
    bool is_through;       /* on_sent waits for the kernel */
    bool has_sent_initial; /* server: initial metadata is out or under way */
    bool is_last_wanted;   /* finish or half_close was asked for */
    bool is_last_started;  /* its batch is, or was, outstanding */
    struct tl_tag close_tag;
    struct tl_tag read_tag;
    struct tl_tag send_tag;
    struct tl_tag last_tag;

    grpc_byte_buffer *sending;
    grpc_byte_buffer *received;
    grpc_metadata_array initial_metadata;
    grpc_metadata_array trailing_metadata;
    grpc_status_code status_code;
    grpc_slice status_details;
    int is_cancelled;            /* server: the client went away before the status */
    struct tl_error last_status; /* server: what to finish with */
};

static const struct tl_stream_events no_events;

static void stream_free(struct tl_stream *stream)
{
    grpc_call_unref(stream->call);
    tl_tls_peer_release(stream->tls_peer);
    grpc_metadata_array_destroy(&stream->initial_metadata);
    grpc_metadata_array_destroy(&stream->trailing_metadata);
    grpc_slice_unref(stream->status_details);
    free(stream);
}

/* Copies a server's message as text that may be logged and sent on: valid UTF-8 in one line, without control
 * characters. */
static void copy_details(const grpc_slice *details, char *text, size_t capacity)
{
    const char *from = (const char *)GRPC_SLICE_START_PTR(*details);
    size_t length = GRPC_SLICE_LENGTH(*details);
    if (length >= capacity) {
        length = capacity - 1;
        /* The text ends before the character that does not fit. */
        while (length > 0 && ((unsigned char)from[length] & 0xC0) == 0x80)
            length--;
    }
    memcpy(text, from, length);
    text[length] = '\0';
    tl_text_make_utf8(text, length);
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)text[i] < ' ' || text[i] == 0x7f) text[i] = ' ';
}

static void end_status(const struct tl_stream *stream, struct tl_error *ret_status)
{
    if (!stream->is_client) {
        *ret_status = (struct tl_error){.code = TL_OK};
        if (stream->is_cancelled) tl_error_set(ret_status, TL_CANCELLED, "the client went away");
        return;
    }
    enum tl_status code =
        stream->status_code >= 0 && stream->status_code <= 16 ? (enum tl_status)stream->status_code : TL_UNKNOWN;
    ret_status->code = code;
    copy_details(&stream->status_details, ret_status->message, sizeof(ret_status->message));
    tl_grpc_text_unwrap(ret_status->message);
    /* The current core leaves out a reason that takes more than 2 KiB. */
    if (code != TL_OK && ret_status->message[0] == '\0') tl_error_set(ret_status, code, "the server gave no reason");
}

static void set_held(struct tl_stream *stream, bool is_held)
{
    if (stream->hooks == NULL || stream->is_held == is_held) return;
    stream->is_held = is_held;
    stream->hooks->hold(stream->hooks_context, &stream->connection, is_held);
}

/* Ends the stream when nothing is outstanding any more. The stream may be gone afterwards. */
static void maybe_end(struct tl_stream *stream)
{
    if (!stream->is_end_known || stream->pending > 0) return;
    struct tl_error status;
    end_status(stream, &status);
    if (stream->events->on_closed != NULL) stream->events->on_closed(stream, &status);
    set_held(stream, false);
    if (stream->hooks != NULL) stream->hooks->end(stream->hooks_context, &stream->connection);
    stream_free(stream);
}

static void start_batch(struct tl_stream *stream, const grpc_op *ops, size_t count, struct tl_tag *tag)
{
    if (tag != &stream->read_tag) tl_loop_begin_write(stream->loop);
    grpc_call_error error = grpc_call_start_batch(stream->call, ops, count, tag, NULL);
    TL_CHECK(error == GRPC_CALL_OK);
    stream->pending++;
}

static grpc_op initial_metadata_op(void)
{
    grpc_op op = {.op = GRPC_OP_SEND_INITIAL_METADATA};
    return op;
}

/* Sends the end of our side when it is wanted and nothing is in flight before it. */
static void maybe_start_last(struct tl_stream *stream)
{
    if (!stream->is_last_wanted || stream->is_last_started || stream->is_sending) return;
    stream->is_last_started = true;
    if (stream->is_end_known) return;
    grpc_op ops[2];
    size_t count = 0;
    grpc_slice details = grpc_empty_slice();
    if (stream->is_client) {
        ops[count++] = (grpc_op){.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};
    } else {
        if (!stream->has_sent_initial) ops[count++] = initial_metadata_op();
        stream->has_sent_initial = true;
        details = grpc_slice_from_copied_string(stream->last_status.message);
        ops[count] = (grpc_op){.op = GRPC_OP_SEND_STATUS_FROM_SERVER};
        ops[count].data.send_status_from_server.status = (grpc_status_code)stream->last_status.code;
        ops[count].data.send_status_from_server.status_details = &details;
        count++;
    }
    start_batch(stream, ops, count, &stream->last_tag);
    grpc_slice_unref(details);
}

static void close_complete(struct tl_tag *tag, bool is_ok)
{
    (void)is_ok;
    struct tl_stream *stream = TL_CONTAINER_OF(tag, struct tl_stream, close_tag);
    stream->pending--;
    stream->is_end_known = true;
    maybe_end(stream);
}

static void last_complete(struct tl_tag *tag, bool is_ok)
{
    (void)is_ok;
    struct tl_stream *stream = TL_CONTAINER_OF(tag, struct tl_stream, last_tag);
    stream->pending--;
    maybe_end(stream);
}

static void send_complete(struct tl_tag *tag, bool is_ok)
{
    struct tl_stream *stream = TL_CONTAINER_OF(tag, struct tl_stream, send_tag);
    grpc_byte_buffer_destroy(stream->sending);
    stream->sending = NULL;
    stream->is_sending = false;
    if (is_ok && !stream->is_end_known && stream->events->on_sent != NULL) stream->events->on_sent(stream);
    maybe_start_last(stream);
    stream->pending--; /* last, so that the callback cannot see the stream end */
    maybe_end(stream);
}

static void read_complete(struct tl_tag *tag, bool is_ok)
{
    struct tl_stream *stream = TL_CONTAINER_OF(tag, struct tl_stream, read_tag);
    grpc_byte_buffer *message = stream->received;
    stream->received = NULL;
    stream->is_reading = false;
    if (message != NULL && stream->hooks != NULL) {
        stream->hooks->message(stream->hooks_context, &stream->connection, grpc_byte_buffer_length(message));
    }
    if (is_ok && message != NULL && stream->events->on_message != NULL) {
        stream->events->on_message(stream, message);
        set_held(stream,
                 !stream->is_reading && stream->events->is_held_up != NULL && stream->events->is_held_up(stream));
    } else if (message != NULL) {
        grpc_byte_buffer_destroy(message);
    } else if (!grpc_call_failed_before_recv_message(stream->call) && stream->events->on_half_closed != NULL) {
        stream->events->on_half_closed(stream);
    }
    stream->pending--;
    maybe_end(stream);
}

static struct tl_stream *stream_create(struct tl_loop *loop, const struct tl_stream_events *events, void *owner)
{
    struct tl_stream *stream = calloc(1, sizeof(*stream));
    if (stream == NULL) return NULL;
    stream->loop = loop;
    stream->events = events != NULL ? events : &no_events;
    stream->owner = owner;
    grpc_metadata_array_init(&stream->initial_metadata);
    grpc_metadata_array_init(&stream->trailing_metadata);
    stream->status_details = grpc_empty_slice();
    tl_tag_init(&stream->close_tag, close_complete);
    tl_tag_init(&stream->read_tag, read_complete);
    tl_tag_init(&stream->send_tag, send_complete);
    tl_tag_init(&stream->last_tag, last_complete);
    return stream;
}

enum tl_status tl_stream_call(struct tl_loop *loop, grpc_channel *channel, const char *method, int64_t deadline_ns,
                              const struct tl_stream_events *events, void *owner, struct tl_stream **ret_stream,
                              struct tl_error *ret_error)
{
    static const struct tl_stream_headers none;
    return tl_stream_call_with(&none, loop, channel, method, deadline_ns, events, owner, ret_stream, ret_error);
}

enum tl_status tl_stream_call_with(const struct tl_stream_headers *headers, struct tl_loop *loop, grpc_channel *channel,
                                   const char *method, int64_t deadline_ns, const struct tl_stream_events *events,
                                   void *owner, struct tl_stream **ret_stream, struct tl_error *ret_error)
{
    struct tl_stream *stream = stream_create(loop, events, owner);
    if (stream == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a call of %s", method);
    stream->is_client = true;
    stream->has_sent_initial = true;
    stream->call =
        grpc_channel_create_call(channel, NULL, GRPC_PROPAGATE_DEFAULTS, tl_loop_cq(loop),
                                 grpc_slice_from_static_string(method), NULL, tl_deadline_to_gpr(deadline_ns), NULL);
    TL_CHECK(stream->call != NULL);
    grpc_op ops[3] = {
        initial_metadata_op(), {.op = GRPC_OP_RECV_INITIAL_METADATA}, {.op = GRPC_OP_RECV_STATUS_ON_CLIENT}};
    ops[0].data.send_initial_metadata.metadata = headers->metadata;
    ops[0].data.send_initial_metadata.count = headers->count;
    ops[1].data.recv_initial_metadata.recv_initial_metadata = &stream->initial_metadata;
    ops[2].data.recv_status_on_client.trailing_metadata = &stream->trailing_metadata;
    ops[2].data.recv_status_on_client.status = &stream->status_code;
    ops[2].data.recv_status_on_client.status_details = &stream->status_details;
    start_batch(stream, ops, 3, &stream->close_tag);
    *ret_stream = stream;
    return TL_OK;
}

enum tl_status tl_stream_accept(struct tl_loop *loop, grpc_call *call, const struct tl_stream_events *events,
                                void *owner, struct tl_stream **ret_stream, struct tl_error *ret_error)
{
    struct tl_stream *stream = stream_create(loop, events, owner);
    if (stream == NULL) {
        grpc_call_cancel_with_status(call, GRPC_STATUS_RESOURCE_EXHAUSTED, "no memory for the call", NULL);
        grpc_call_unref(call);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a call");
    }
    stream->call = call;
    tl_connection_of(call, &stream->connection);
    grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};
    op.data.recv_close_on_server.cancelled = &stream->is_cancelled;
    start_batch(stream, &op, 1, &stream->close_tag);
    *ret_stream = stream;
    return TL_OK;
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

const struct tl_connection *tl_stream_connection(const struct tl_stream *stream)
{
    return &stream->connection;
}

void tl_stream_set_tls_peer(struct tl_stream *stream, struct tl_tls_peer *peer)
{
    stream->tls_peer = tl_tls_peer_retain(peer);
}

void tl_stream_certify(const struct tl_stream *stream, struct tl_identity *identity)
{
    if (stream->tls_peer == NULL) return;
    identity->source = TL_IDENTITY_PROVEN;
    snprintf(identity->certified, sizeof(identity->certified), "%s", stream->tls_peer->name.text);
    identity->is_foreign = stream->tls_peer->name.is_foreign;
    identity->is_member = stream->tls_peer->name.kind == TL_CERTIFICATE_MEMBER && !identity->is_foreign;
}

const char *tl_stream_peer_address(const struct tl_stream *stream, char *buffer, size_t capacity)
{
    snprintf(buffer, capacity, "%s", stream->tls_peer != NULL ? stream->tls_peer->target : stream->connection.address);
    return buffer;
}

bool tl_stream_can_send(const struct tl_stream *stream)
{
    return !stream->is_sending && !stream->is_last_wanted && !stream->is_end_known;
}

void tl_stream_report_sent_by_kernel(struct tl_stream *stream, bool is_through)
{
    stream->is_through = is_through;
}

void tl_stream_send(struct tl_stream *stream, grpc_byte_buffer *message)
{
    if (stream->is_last_wanted || stream->is_end_known) {
        grpc_byte_buffer_destroy(message);
        return;
    }
    TL_CHECK(!stream->is_sending);
    grpc_op ops[2];
    size_t count = 0;
    if (!stream->has_sent_initial) ops[count++] = initial_metadata_op();
    stream->has_sent_initial = true;
    ops[count] = (grpc_op){.op = GRPC_OP_SEND_MESSAGE};
    ops[count].flags = stream->is_through ? GRPC_WRITE_THROUGH : 0;
    ops[count].data.send_message.send_message = message;
    count++;
    stream->sending = message;
    stream->is_sending = true;
    start_batch(stream, ops, count, &stream->send_tag);
}

void tl_stream_half_close(struct tl_stream *stream)
{
    TL_CHECK(stream->is_client);
    stream->is_last_wanted = true;
    maybe_start_last(stream);
}

void tl_stream_read(struct tl_stream *stream)
{
    TL_CHECK(!stream->is_reading);
    set_held(stream, false);
    stream->is_reading = true;
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
    op.data.recv_message.recv_message = &stream->received;
    start_batch(stream, &op, 1, &stream->read_tag);
}

void tl_stream_finish(struct tl_stream *stream, const struct tl_error *status)
{
    TL_CHECK(!stream->is_client);
    if (stream->is_last_wanted) return;
    stream->is_last_wanted = true;
    stream->last_status = *status;
    maybe_start_last(stream);
}

void tl_stream_cancel(struct tl_stream *stream)
{
    tl_loop_begin_write(stream->loop);
    grpc_call_cancel(stream->call, NULL);
}

void tl_stream_abort(struct tl_stream *stream, const struct tl_error *status)
{
    TL_CHECK(!stream->is_client);
    stream->is_last_wanted = true;
    stream->is_last_started = true;
    tl_loop_begin_write(stream->loop);
    grpc_call_cancel_with_status(stream->call, (grpc_status_code)status->code, status->message, NULL);
}

void tl_stream_abandon(struct tl_stream *stream)
{
    stream->events = &no_events;
    stream->owner = NULL;
    tl_stream_cancel(stream);
}
