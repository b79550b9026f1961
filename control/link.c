// SPDX-License-Identifier: Apache-2.0
/*
 * The life of a link.
 *
 * Happy path: opened (by us: the host's address, a channel of its own and a call; by the peer: an accepted call), Hello
 * out, Hello in and checked, up; frames flow; drained when idle, or closed. Failure modes: no Hello in time ends the
 * link with DEADLINE_EXCEEDED; the wrong worker or version with FAILED_PRECONDITION, which is sent to the peer; a frame
 * that breaks the protocol with INVALID_ARGUMENT, counted. Whatever the end, it is handled in one place, link_ended:
 * what is open on the link ends, some in each round of the loop, and the owner hears of the end when nothing is left.
 */
#include "control/link.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/random.h"
#include "control/connection.h"
#include "control/credentials.h"
#include "control/grpc_text.h"
#include "control/link_serves.h"

#define EXCHANGE_METHOD "/tensorlane.v1.Transfer/Exchange"
/* Numbers of received tensors in a handshake; more follow in frames. */
#define MAX_HELLO_NUMBERS 1024

static const struct tl_link_events no_events;

static void flush(struct tl_closure *closure)
{
    struct tl_link *link = TL_CONTAINER_OF(closure, struct tl_link, flush_closure);
    link->is_flush_deferred = false;
    struct tl_list failed;
    tl_list_init(&failed);
    tl_list_splice_back(&failed, &link->to_fail);
    struct tl_list *place;
    struct tl_error error;
    tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "no memory for a request");
    while ((place = tl_list_pop_front(&failed)) != NULL) {
        struct tl_fetch *fetch = TL_CONTAINER_OF(place, struct tl_fetch, transport_link);
        fetch->ops->done(fetch, &error);
    }
    link_send_frames(link);
    if (link->state == LINK_UP || link->state == LINK_DRAINING) link_read_on(link); /* nothing may be left to send */
    link_maybe_drained(link);
}

void link_flush_later(struct tl_link *link)
{
    if (link->is_flush_deferred) return;
    link->is_flush_deferred = true;
    tl_loop_defer(link->control->loop, &link->flush_closure);
}

/* Begins the end: nothing is sent or handled any more, the stream's end will come. */
static void begin_close(struct tl_link *link, const struct tl_error *reason)
{
    if (link->state == LINK_CLOSING) return;
    link->state = LINK_CLOSING;
    tl_list_remove(&link->asking_link);
    link->close_reason = *reason;
    link->has_close_reason = true;
    tl_timers_disarm(tl_loop_timers(link->control->loop), &link->handshake_timer);
    link_stall_fini(link);
    if (link->stream == NULL) {
        if (link->lookup != NULL) tl_lookup_abandon(link->lookup);
        link->lookup = NULL;
        if (link->dial != NULL) tl_tls_dial_abandon(link->dial);
        link->dial = NULL;
        tl_loop_defer(link->control->loop, &link->end_closure);
    } else if (link->is_ours) {
        tl_stream_cancel(link->stream);
    } else if (reason->code == TL_OK || tl_stream_can_send(link->stream)) {
        tl_stream_finish(link->stream, reason);
        link_stall_await_end(link);
    } else {
        /* The peer may never read the message that is in flight, and what is reserved for it would stay so. */
        tl_stream_abort(link->stream, reason);
    }
}

void link_protocol_error(struct tl_link *link, const char *format, ...)
{
    char what[512];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof(what), format, args);
    va_end(args);
    link->control->stats.protocol_errors++;
    struct tl_error reason;
    tl_error_set(&reason, TL_INVALID_ARGUMENT, "%s broke the protocol: %s",
                 link->peer.name[0] != '\0' ? link->peer.name : link->peer.address, what);
    link_log_end(link, format, &reason);
    begin_close(link, &reason);
}

/* Asks the peer, which opened the link, to end it. Only its answer proves that all we have sent has arrived: a server
 * that ends the call itself and exits may reset a connection that still carries the last bytes. */
static void send_goodbye(struct tl_link *link)
{
    if (link->has_said_goodbye) return;
    Tensorlane__V1__Frame frame = TENSORLANE__V1__FRAME__INIT;
    frame.goodbye = 1;
    grpc_byte_buffer *message = tl_wire_write(&frame.base);
    struct tl_error reason;
    if (message == NULL) {
        tl_error_set(&reason, TL_UNAVAILABLE, "%s: no memory for a frame", link->control->options.self.name);
        begin_close(link, &reason);
        return;
    }
    link->has_said_goodbye = true;
    link->control->stats.frames_sent++;
    tl_stream_send(link->stream, message);
}

void link_maybe_drained(struct tl_link *link)
{
    if (link->state != LINK_DRAINING || !tl_link_is_idle(link)) return;
    if (link->received.count > link->framed_count || link->cancels.count > 0) return;
    if (!tl_stream_can_send(link->stream)) return;
    if (!link->is_ours) {
        send_goodbye(link);
        return;
    }
    link->state = LINK_CLOSING;
    link->close_reason = (struct tl_error){.code = TL_OK};
    link->has_close_reason = true;
    link->has_half_closed = true;
    tl_stream_half_close(link->stream);
    link_stall_await_end(link);
}

/* --------------------------------------------------------------------------------------------------------- end -- */

static void close_status(const struct tl_link *link, const struct tl_error *stream_status, struct tl_error *ret_status)
{
    if (link->has_close_reason) {
        *ret_status = link->close_reason;
    } else if (stream_status->code == TL_OK || stream_status->code == TL_CANCELLED) {
        tl_error_set(ret_status, TL_UNAVAILABLE, "%s closed the connection", link->peer.address);
    } else if (stream_status->code == TL_DEADLINE_EXCEEDED) {
        tl_error_set(ret_status, TL_UNAVAILABLE, "the connection to %s has reached its greatest age",
                     link->peer.address);
    } else {
        *ret_status = *stream_status;
        tl_grpc_text_explain(ret_status, link->peer.address);
    }
}

static void link_free(struct tl_link *link)
{
    tl_list_remove(&link->control_link);
    if (link->is_flush_deferred) tl_list_remove(&link->flush_closure.link);
    tl_timers_disarm(tl_loop_timers(link->control->loop), &link->handshake_timer);
    tl_numbers_fini(&link->cancels);
    tl_numbers_fini(&link->received);
    link_connections_drop(link);
    link_keys_fini(link);
    tl_number_map_fini(&link->fetches);
    tl_hash_table_fini(&link->answers.serves);
    link_unsent_fini(link);
    if (link->channel != NULL) grpc_channel_destroy(link->channel);
    free(link);
}

/* Ends what is open on a link that has ended, as much as the loop's quota allows, and the rest when others had their
 * turn. The link is gone after that. */
static void end_open(struct tl_closure *closure)
{
    struct tl_link *link = TL_CONTAINER_OF(closure, struct tl_link, end_closure);
    struct tl_control *control = link->control;
    const struct tl_error *reason = &link->close_reason;
    struct tl_error unavailable = *reason;
    if (reason->code != TL_FAILED_PRECONDITION) unavailable.code = TL_UNAVAILABLE;
    if (reason->code == TL_OK) tl_error_set(&unavailable, TL_UNAVAILABLE, "%s: link closed", link->peer.address);
    if (!link_fetches_break(link, &unavailable) || !link_serves_break(link)) {
        tl_loop_defer(control->loop, &link->end_closure);
        return;
    }
    if (link->is_in_order) link_confirm(link, link->confirmed_count + link->framed_count);
    if (link->events->closed != NULL) link->events->closed(link, reason);
    link_free(link);
    tl_control_link_gone(control);
}

/* Nothing of a link that has ended goes on. */
static void stop(struct tl_link *link)
{
    link->state = LINK_CLOSING;
    link->stream = NULL;
    tl_list_remove(&link->asking_link);
    tl_list_remove(&link->round_closure.link);
    if (link->held.frame != NULL) grpc_byte_buffer_destroy(link->held.frame);
    link->held.frame = NULL;
    link->answers.is_read_paused = false; /* there is nothing to read */
    tl_timers_disarm(tl_loop_timers(link->control->loop), &link->handshake_timer);
    link_stall_fini(link);
}

/* The stream has ended, or a link without one. */
static void link_ended(struct tl_link *link, const struct tl_error *stream_status)
{
    struct tl_error reason;
    close_status(link, stream_status, &reason);
    /* A call that ends in order has brought everything to the other side. That a status was sent proves nothing. */
    link->is_in_order = link->is_ours ? stream_status->code == TL_OK : link->has_half_closed;
    link->close_reason = reason;
    stop(link);
    link->end_closure.run = end_open;
    end_open(&link->end_closure);
}

static void stream_closed(struct tl_stream *stream, const struct tl_error *stream_status)
{
    link_ended(tl_stream_owner(stream), stream_status);
}

static void end_without_stream(struct tl_closure *closure)
{
    struct tl_link *link = TL_CONTAINER_OF(closure, struct tl_link, end_closure);
    link_ended(link, &link->close_reason);
}

static void stream_half_closed(struct tl_stream *stream)
{
    struct tl_link *link = tl_stream_owner(stream);
    if (link->is_ours || link->state == LINK_CLOSING) return;
    struct tl_error reason = {.code = TL_OK};
    link->has_half_closed = true;
    begin_close(link, &reason);
}

/* ------------------------------------------------------------------------------------------------------ frames -- */

static void stream_sent(struct tl_stream *stream)
{
    struct tl_link *link = tl_stream_owner(stream);
    if (link->state == LINK_HANDSHAKE || link->state == LINK_ASKING || link->state == LINK_CLOSING) return;
    link_serves_left(link);
    link_send_frames(link);
    link_read_on(link);
    link_maybe_drained(link);
}

void link_read_on(struct tl_link *link)
{
    if (!link->answers.is_read_paused || link->held.frame != NULL) return;
    if (link->landing_count > 0 || link_is_congested(link)) return;
    link->answers.is_read_paused = false;
    tl_stream_read(link->stream);
}

/* Whether the frame that was handled last is to be handled again, as a whole or the rest of it. */
static bool is_frame_open(const struct tl_link *link)
{
    return link->state == LINK_ASKING || link->held.is_begun;
}

static void stream_message(struct tl_stream *stream, grpc_byte_buffer *message)
{
    struct tl_link *link = tl_stream_owner(stream);
    if (link->state != LINK_CLOSING) {
        link_receive_frame(link, message);
        link->answers.is_read_paused = link->landing_count > 0 || link_is_congested(link) || is_frame_open(link);
    } else if (link->has_half_closed) {
        link_receive_last(link, message);
    }
    if (link->state == LINK_ASKING && grpc_byte_buffer_length(message) > TL_MAX_FRAME_HEAD_BYTES) {
        link_protocol_error(link, "a hello of %zu bytes", grpc_byte_buffer_length(message));
    }
    if (is_frame_open(link)) {
        link->held.frame = message;
        if (link->held.is_begun) tl_loop_defer(link->control->loop, &link->round_closure);
    } else {
        grpc_byte_buffer_destroy(message);
    }
    /* Also when closing: the peer may be in the middle of a message, and answers only after it. */
    if (!link->answers.is_read_paused) tl_stream_read(stream);
    /* Reading goes on when something was sent, and the window does not hold up a side that does not read. */
    if (link->answers.is_read_paused && link->state != LINK_ASKING) link_flush_later(link);
}

/* Others have had their turn: goes on with a frame, or drops it when the link is closing. */
static void next_round(struct tl_closure *closure)
{
    struct tl_link *link = TL_CONTAINER_OF(closure, struct tl_link, round_closure);
    grpc_byte_buffer *frame = link->held.frame;
    link->held.frame = NULL;
    link->answers.is_read_paused = false;
    if (link->state == LINK_CLOSING) link->held.is_begun = false;
    stream_message(link->stream, frame);
}

void tl_links_ask_again(struct tl_control *control)
{
    struct tl_list asking;
    struct tl_list *place;
    tl_list_init(&asking);
    tl_list_splice_back(&asking, &control->asking_links);
    while ((place = tl_list_pop_front(&asking)) != NULL) {
        struct tl_link *link = TL_CONTAINER_OF(place, struct tl_link, asking_link);
        grpc_byte_buffer *frame = link->held.frame;
        link->held.frame = NULL;
        link->answers.is_read_paused = false;
        link->state = LINK_HANDSHAKE;
        stream_message(link->stream, frame);
    }
}

/* Bytes that wait for a device do not wait for the peer. */
static bool stream_is_held_up(const struct tl_stream *stream)
{
    const struct tl_link *link = tl_stream_owner(stream);
    return link->landing_count > 0;
}

static const struct tl_stream_events stream_events = {
    .on_message = stream_message,
    .is_held_up = stream_is_held_up,
    .on_half_closed = stream_half_closed,
    .on_sent = stream_sent,
    .on_closed = stream_closed,
};

static void handshake_timeout(struct tl_timer *timer)
{
    struct tl_link *link = TL_CONTAINER_OF(timer, struct tl_link, handshake_timer);
    struct tl_error reason;
    tl_error_set(&reason, TL_DEADLINE_EXCEEDED, "%s %s within the connect time-out", link->peer.address,
                 link->state == LINK_SEARCHING  ? "was not found"
                 : link->state == LINK_DIALLING ? "did not finish the TLS handshake"
                 : link->state == LINK_ASKING   ? "could not be compared with the addresses of the peer's host"
                                                : "did not answer");
    begin_close(link, &reason);
}

static struct tl_link *link_create(struct tl_control *control, struct tl_error *ret_error)
{
    struct tl_link *link = calloc(1, sizeof(*link));
    if (link == NULL) {
        tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a link");
        return NULL;
    }
    link->control = control;
    link->peer.client.link = ++control->link_count;
    link->events = &no_events;
    link->state = LINK_HANDSHAKE;
    link->end_closure.run = end_without_stream;
    link->flush_closure.run = flush;
    link->handshake_timer.fire = handshake_timeout;
    link_stall_init(link);
    tl_list_init(&link->control_link);
    tl_list_init(&link->asking_link);
    tl_list_init(&link->flush_closure.link);
    tl_list_init(&link->round_closure.link);
    link->round_closure.run = next_round;
    tl_list_init(&link->to_request);
    tl_list_init(&link->asked);
    tl_list_init(&link->to_fail);
    tl_list_init(&link->connection_messages);
    tl_list_init(&link->answers.failures);
    link->answers.factor = tl_random_u64() | 1;
    link_queue_init(&link->answers.ready);
    link_queue_init(&link->answers.active);
    tl_list_init(&link->answers.leaving);
    int64_t due_ns = tl_clock_deadline_ns(control->options.connect_timeout_ns);
    if (tl_timers_arm(tl_loop_timers(control->loop), &link->handshake_timer, due_ns) != TL_OK) {
        tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a link");
        free(link);
        return NULL;
    }
    tl_list_push_back(&control->links, &link->control_link);
    return link;
}

/* Starts the call of a link of ours, and sends the hello. fd is gRPC's end of a TLS connection with the peer, which is
 * taken over; -1 and NULL: gRPC dials the target. */
static enum tl_status start_stream(struct tl_link *link, const char *target, int fd, struct tl_tls_peer *peer,
                                   struct tl_error *ret_error)
{
    struct tl_control *control = link->control;
    const struct tl_channel_options channel_options = {
        .keepalive_ns = control->options.keepalive_ns,
        .keepalive_timeout_ns = control->options.keepalive_timeout_ns,
        .connect_timeout_ns = control->options.connect_timeout_ns,
        .max_message_bytes = tl_control_max_message_bytes(&control->options),
        .authority = link->peer.address,
    };
    link->framed_count = link->received.count < MAX_HELLO_NUMBERS ? link->received.count : MAX_HELLO_NUMBERS;
    link_window_init(link, target);
    link_keys_offer(link);
    grpc_byte_buffer *hello = link_hello(link, link->framed_count);
    if (hello == NULL) {
        if (fd >= 0) (void)close(fd);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the hello");
    }
    link->channel =
        fd >= 0 ? tl_channel_create_from_fd(fd, target, &channel_options) : tl_channel_create(target, &channel_options);
    int64_t deadline_ns = tl_clock_deadline_ns(control->options.max_link_age_ns);
    enum tl_status status = tl_stream_call(control->loop, link->channel, EXCHANGE_METHOD, deadline_ns, &stream_events,
                                           link, &link->stream, ret_error);
    if (status != TL_OK) {
        grpc_byte_buffer_destroy(hello);
        return status;
    }
    if (peer != NULL) tl_stream_set_tls_peer(link->stream, peer);
    tl_stream_certify(link->stream, &link->peer);
    link->state = LINK_HANDSHAKE;
    tl_stream_send(link->stream, hello);
    tl_stream_read(link->stream);
    return TL_OK;
}

static void dialled(void *owner, int fd, const struct tl_error *failure)
{
    struct tl_link *link = owner;
    link->dial = NULL;
    struct tl_error error = *failure;
    struct tl_tls_peer *peer = fd >= 0 ? tl_tls_find(link->control->tls, tl_connection_cookie(fd)) : NULL;
    if (fd >= 0 && peer == NULL) {
        (void)close(fd);
        tl_error_set(&error, TL_UNAVAILABLE, "%s ended the connection", link->peer.address);
    }
    if (peer == NULL || start_stream(link, peer->target, fd, peer, &error) != TL_OK) begin_close(link, &error);
    tl_tls_peer_release(peer);
}

/* The address of the peer is known. */
static enum tl_status start_at(struct tl_link *link, const char *target, struct tl_error *ret_error)
{
    struct tl_control *control = link->control;
    if (control->tls == NULL) return start_stream(link, target, -1, NULL, ret_error);
    link->state = LINK_DIALLING;
    const struct tl_tls_address address = {
        .target = target,
        .label = link->peer.address,
        .expected_name = link->expected_name[0] != '\0' ? link->expected_name : NULL,
        .deadline_ns = link->handshake_timer.due_ns,
    };
    return tl_tls_dial(control->tls, control->loop, &address, dialled, link, &link->dial, ret_error);
}

static void address_found(void *owner, const char *target, const struct tl_error *failure)
{
    struct tl_link *link = owner;
    link->lookup = NULL;
    struct tl_error error = *failure;
    if (error.code == TL_OK && start_at(link, target, &error) == TL_OK) return;
    begin_close(link, &error);
}

/* A host that is a name is looked up first. */
static enum tl_status start(struct tl_link *link, struct tl_error *ret_error)
{
    struct tl_endpoint endpoint;
    char target[TL_ENDPOINT_TARGET_BYTES];
    enum tl_status status = tl_endpoint_parse(link->peer.address, &endpoint, ret_error);
    if (status != TL_OK) return status;
    if (tl_endpoint_target(&endpoint, target)) return start_at(link, target, ret_error);
    link->state = LINK_SEARCHING;
    return tl_lookup_start(link->control->loop, &endpoint, link->handshake_timer.due_ns, address_found, link,
                           &link->lookup, ret_error);
}

enum tl_status tl_link_open(struct tl_control *control, const struct tl_link_address *address, const uint64_t *again,
                            size_t again_count, const struct tl_link_events *events, void *owner,
                            struct tl_link **ret_link, struct tl_error *ret_error)
{
    struct tl_link *link = link_create(control, ret_error);
    if (link == NULL) return TL_RESOURCE_EXHAUSTED;
    link->is_ours = true;
    link->peer.is_one_way = address->is_one_way;
    snprintf(link->peer.address, sizeof(link->peer.address), "%s", address->address);
    if (address->expected_name != NULL)
        snprintf(link->expected_name, sizeof(link->expected_name), "%s", address->expected_name);
    tl_link_set_events(link, events, owner);
    enum tl_status status = TL_RESOURCE_EXHAUSTED;
    if (tl_numbers_push_all(&link->received, again, again_count)) {
        status = start(link, ret_error);
    } else {
        tl_error_set(ret_error, status, "no memory for the hello");
    }
    if (status != TL_OK) {
        link_free(link);
        return status;
    }
    *ret_link = link;
    return TL_OK;
}

static void accept_link(void *context, struct tl_stream *stream)
{
    struct tl_control *control = context;
    struct tl_error error;
    struct tl_link *link = link_create(control, &error);
    if (link == NULL) {
        tl_stream_finish(stream, &error);
        return;
    }
    link->stream = stream;
    link_window_init(link, tl_stream_peer_address(stream, link->peer.address, sizeof(link->peer.address)));
    tl_stream_certify(stream, &link->peer);
    tl_stream_set_owner(stream, link);
    tl_stream_set_events(stream, &stream_events);
    tl_stream_read(stream);
}

enum tl_status tl_link_service_add(struct tl_control *control, struct tl_error *ret_error)
{
    return tl_rpc_server_add_method(control->server, EXCHANGE_METHOD, TL_ACTION_READ, accept_link, control, ret_error);
}

/* --------------------------------------------------------------------------------------------------- handshake -- */

static enum tl_status check_hello(const struct tl_link *link, const Tensorlane__V1__Hello *hello,
                                  struct tl_error *ret_error)
{
    const char *self = link->control->options.self.name;
    if (hello->protocol_version != TL_PROTOCOL_VERSION) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "%s (version %.32s) speaks protocol version %u, %s speaks %d; run the same release on both",
                            hello->name[0] != '\0' ? hello->name : "a client", hello->software_version,
                            hello->protocol_version, self[0] != '\0' ? self : "this client", TL_PROTOCOL_VERSION);
    }
    if (hello->incarnation == 0) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "%s gave no incarnation", link->peer.address);
    }
    enum tl_status status = tl_wire_text(hello->name, 0, TL_MAX_NAME_BYTES - 1, "name of the peer", ret_error);
    if (status == TL_OK)
        status = tl_wire_text(hello->host_name, 0, TL_HOST_NAME_BYTES - 1, "host name of the peer", ret_error);
    if (status != TL_OK) return status;
    if (hello->expected_name[0] != '\0' && strcmp(hello->expected_name, self) != 0) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "%.*s was called as %.*s; do both use the same configuration?", TL_MAX_NAME_BYTES, self,
                            TL_MAX_NAME_BYTES, hello->expected_name);
    }
    /* A member may also be a client, without a name: its tools are. */
    if (link->peer.source == TL_IDENTITY_PROVEN && !link->peer.is_foreign && hello->name[0] != '\0' &&
        strcmp(link->peer.certified, hello->name) != 0) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "%s says that it is %s, and its certificate is for %s; give each task its own certificate",
                            link->peer.address, hello->name, link->peer.certified);
    }
    if (link->expected_name[0] != '\0' && strcmp(link->expected_name, hello->name) != 0) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "%s is %s, not %s; do both use the same configuration?",
                            link->peer.address, hello->name[0] != '\0' ? hello->name : "a client", link->expected_name);
    }
    return TL_OK;
}

/* Whether the peer may be who it says it is. Otherwise the link ends, or is put off. */
static bool is_admitted(struct tl_link *link)
{
    const struct tl_control *control = link->control;
    struct tl_error error;
    if (control->options.handlers->admit_link == NULL) return true;
    switch (control->options.handlers->admit_link(control->options.worker, &link->peer, &error)) {
    case TL_LINK_ADMITTED:
        link->keys.is_of_task = true;
        return true;
    case TL_LINK_ADMITTED_AS_CLIENT:
        return true;
    case TL_LINK_REFUSED:
        begin_close(link, &error);
        return false;
    case TL_LINK_LATER:
        link->state = LINK_ASKING;
        tl_list_push_back(&link->control->asking_links, &link->asking_link);
        break;
    }
    return false;
}

void link_handshake_done(struct tl_link *link, const Tensorlane__V1__Hello *hello)
{
    struct tl_control *control = link->control;
    struct tl_error error;
    if (check_hello(link, hello, &error) != TL_OK) {
        begin_close(link, &error);
        return;
    }
    if (link->peer.source == TL_IDENTITY_NONE) link->peer.source = TL_IDENTITY_CLAIMED;
    link->peer.incarnation = hello->incarnation;
    /* What a worker of another trust domain calls itself may be the name of one of ours. */
    bool is_foreign_worker = link->peer.is_foreign && (link->is_ours || hello->name[0] != '\0');
    snprintf(link->peer.name, sizeof(link->peer.name), "%s", is_foreign_worker ? link->peer.certified : hello->name);
    snprintf(link->peer.host_name, sizeof(link->peer.host_name), "%s", hello->host_name);
    link->peer.process_id = hello->process_id;
    link->peer.cluster_digest = hello->cluster_digest;
    link->peer.serves_probes = hello->serves_probes != 0;
    link->peer.serves_subscriptions = hello->serves_subscriptions != 0;
    link->peer.serves_parts = hello->serves_parts != 0;
    link->peer.fetches_puts = hello->fetches_puts != 0;
    if (!link->is_ours) link->peer.is_one_way = hello->is_one_way != 0;
    if (!link->is_ours && !is_admitted(link)) return;
    tl_timers_disarm(tl_loop_timers(control->loop), &link->handshake_timer);
    if (hello->host.len == TL_HOST_BYTES) memcpy(link->peer.host, hello->host.data, TL_HOST_BYTES);
    link->window.peers_bytes = hello->window_bytes;
    link_keys_agree(link, hello);
    link->state = LINK_UP;
    for (size_t i = 0; i < hello->n_received; i++) {
        struct tl_request_id id = {.incarnation = hello->incarnation, .number = hello->received[i]};
        control->options.handlers->source.received(control->options.worker, &id);
    }
    if (link->is_ours) {
        link_confirm(link, link->framed_count);
        if (link->received.count > 0) link_flush_later(link);
        if (link->events->up != NULL) link->events->up(link);
        return;
    }
    link_keys_offer(link);
    grpc_byte_buffer *answer = link_hello(link, 0);
    if (answer == NULL) {
        tl_error_set(&error, TL_RESOURCE_EXHAUSTED, "no memory for the hello");
        begin_close(link, &error);
        return;
    }
    tl_stream_send(link->stream, answer);
    control->options.handlers->link_up(control->options.worker, link);
    if (control->is_stopping && link->state == LINK_UP) link->state = LINK_DRAINING;
}

/* ------------------------------------------------------------------------------------------------------ public -- */

void tl_link_set_events(struct tl_link *link, const struct tl_link_events *events, void *owner)
{
    link->events = events != NULL ? events : &no_events;
    link->owner = owner;
}

void *tl_link_owner(const struct tl_link *link)
{
    return link->owner;
}

const struct tl_identity *tl_link_peer(const struct tl_link *link)
{
    return &link->peer;
}

bool tl_link_is_up(const struct tl_link *link)
{
    return link->state == LINK_UP;
}

bool tl_link_is_ours(const struct tl_link *link)
{
    return link->is_ours;
}

bool tl_link_is_idle(const struct tl_link *link)
{
    return link->fetches.count == 0 && link->answers.serves.count == 0 && tl_list_is_empty(&link->to_fail);
}

bool tl_link_acknowledge(struct tl_link *link, const uint64_t *numbers, size_t count)
{
    if (!tl_numbers_push_all(&link->received, numbers, count)) return false;
    if (count > 0) link_flush_later(link);
    return true;
}

bool tl_link_cancel_requests(struct tl_link *link, const uint64_t *numbers, size_t count)
{
    if (!tl_numbers_push_all(&link->cancels, numbers, count)) return false;
    if (count > 0) link_flush_later(link);
    return true;
}

size_t tl_link_unconfirmed(const struct tl_link *link, const uint64_t **ret_numbers)
{
    *ret_numbers = tl_numbers_items(&link->received);
    return link->received.count;
}

void tl_link_drain(struct tl_link *link)
{
    struct tl_error reason;
    if (link->state == LINK_SEARCHING || link->state == LINK_DIALLING || link->state == LINK_HANDSHAKE ||
        link->state == LINK_ASKING) {
        tl_error_set(&reason, TL_CANCELLED, "closed before the peer answered");
        begin_close(link, &reason);
    }
    if (link->state != LINK_UP) return;
    link->state = LINK_DRAINING;
    link_flush_later(link);
}

void tl_link_close(struct tl_link *link, const struct tl_error *reason)
{
    begin_close(link, reason);
}

void tl_links_drain(struct tl_control *control)
{
    TL_LIST_FOREACH(&control->links, place)
    {
        tl_link_drain(TL_CONTAINER_OF(place, struct tl_link, control_link));
    }
}

void tl_links_close(struct tl_control *control, const struct tl_error *reason)
{
    TL_LIST_FOREACH(&control->links, place)
    {
        struct tl_link *link = TL_CONTAINER_OF(place, struct tl_link, control_link);
        begin_close(link, reason);
        if (link->stream != NULL) tl_stream_cancel(link->stream);
    }
}
