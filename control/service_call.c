// SPDX-License-Identifier: Apache-2.0
/* Calls that the services answer: the part that is the same for all of them. */
#include "control/service_call.h"

#include <stddef.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"

/* Largest message of a call that has one request: a key or a pattern and what stands around it. */
#define MAX_REQUEST_BYTES (64 * 1024)
/* What a client that sends much must keep up: half a megabit per second, which every network for tensors has. */
#define MIN_BYTES_PER_SECOND (64 * 1024)

static struct tl_timers *timers_of(const struct tl_service_call *call)
{
    return tl_loop_timers(call->control->loop);
}

/* Ends the call without waiting for what is in flight. */
static void abort_call(struct tl_service_call *call, const struct tl_error *status)
{
    call->is_finished = true;
    tl_service_call_expect_nothing(call);
    tl_stream_abort(call->stream, status);
}

static void progress_timeout(struct tl_timer *timer)
{
    struct tl_service_call *call = TL_CONTAINER_OF(timer, struct tl_service_call, progress_timer);
    char duration[32];
    struct tl_error status;
    tl_text_format_duration(call->control->options.request_timeout_ns, duration, sizeof(duration));
    if (tl_clock_now_ns() < call->pace_deadline_ns) {
        tl_error_set(&status, TL_DEADLINE_EXCEEDED, "the client made no progress for %s", duration);
    } else {
        tl_error_set(
            &status, TL_DEADLINE_EXCEEDED,
            "the client sends too slowly: after the first %s it must keep up %d bytes per second; use a faster "
            "network or raise timeouts.request of the worker",
            duration, MIN_BYTES_PER_SECOND);
    }
    abort_call(call, &status);
}

void tl_service_call_expect_progress(struct tl_service_call *call)
{
    int64_t due_ns = tl_clock_deadline_ns(call->control->options.request_timeout_ns);
    if (call->pace_deadline_ns < due_ns) due_ns = call->pace_deadline_ns;
    if (tl_timers_arm(timers_of(call), &call->progress_timer, due_ns) == TL_OK) return;
    struct tl_error status;
    tl_error_set(&status, TL_RESOURCE_EXHAUSTED, "no memory for a timer");
    abort_call(call, &status);
}

void tl_service_call_expect_bytes(struct tl_service_call *call, uint64_t received_bytes)
{
    /* No overflow: the bytes are in memory, so that they are fewer than 2^48. */
    int64_t earned_ns = (int64_t)received_bytes * (TL_NS_PER_SEC / MIN_BYTES_PER_SECOND);
    call->pace_deadline_ns = call->accepted_ns + call->control->options.request_timeout_ns + earned_ns;
    tl_service_call_expect_progress(call);
}

void tl_service_call_expect_nothing(struct tl_service_call *call)
{
    tl_timers_disarm(timers_of(call), &call->progress_timer);
}

void tl_service_call_read(struct tl_service_call *call)
{
    if (!call->is_finished) tl_stream_read(call->stream);
}

void tl_service_call_send(struct tl_service_call *call, grpc_byte_buffer *message)
{
    if (message != NULL) {
        tl_stream_send(call->stream, message);
        return;
    }
    struct tl_error status;
    tl_error_set(&status, TL_RESOURCE_EXHAUSTED, "no memory for the answer");
    tl_service_call_finish(call, &status);
}

void tl_service_call_finish(struct tl_service_call *call, const struct tl_error *status)
{
    if (call->is_finished) return;
    call->is_finished = true;
    call->pace_deadline_ns = TL_TIME_NEVER;
    tl_service_call_expect_progress(call);
    tl_stream_finish(call->stream, status);
}

void tl_service_call_finish_ok(struct tl_service_call *call)
{
    const struct tl_error ok = {.code = TL_OK};
    tl_service_call_finish(call, &ok);
}

void tl_service_call_answer(struct tl_service_call *call, const ProtobufCMessage *response)
{
    tl_service_call_send(call, tl_wire_write(response));
    tl_service_call_finish_ok(call);
}

/* ------------------------------------------------------------------------------------------------------ stream -- */

static void refuse_count(struct tl_service_call *call, const char *what)
{
    struct tl_error status;
    tl_error_set(&status, TL_INVALID_ARGUMENT, "%s; this method takes exactly one request", what);
    tl_service_call_finish(call, &status);
}

/* Refuses a request that is longer than any that makes sense, so that it does not wait in memory for the half-close. */
static bool refuse_size(struct tl_service_call *call, grpc_byte_buffer *message)
{
    size_t length = grpc_byte_buffer_length(message);
    size_t max_bytes = call->ops->max_request_bytes > 0 ? call->ops->max_request_bytes : MAX_REQUEST_BYTES;
    if (length <= max_bytes) return false;
    struct tl_error status;
    tl_error_set(&status, TL_INVALID_ARGUMENT, "a request of %zu bytes; this method takes at most %zu", length,
                 max_bytes);
    tl_service_call_finish(call, &status);
    return true;
}

static void stream_message(struct tl_stream *stream, grpc_byte_buffer *message)
{
    struct tl_service_call *call = tl_stream_owner(stream);
    if (!call->is_finished && !call->ops->is_stream && call->only_request == NULL && !refuse_size(call, message)) {
        call->only_request = message;
        tl_service_call_read(call);
        return;
    }
    if (!call->is_finished && call->ops->is_stream) {
        call->ops->request(call, message);
    } else if (!call->is_finished) {
        refuse_count(call, "the client sent a second message");
    }
    grpc_byte_buffer_destroy(message);
}

static void stream_half_closed(struct tl_stream *stream)
{
    struct tl_service_call *call = tl_stream_owner(stream);
    if (call->is_finished) return;
    if (call->ops->is_stream) {
        call->ops->half_closed(call);
    } else if (call->only_request == NULL) {
        refuse_count(call, "the client sent no message");
    } else {
        tl_service_call_expect_nothing(call);
        call->ops->request(call, call->only_request);
    }
}

static void stream_sent(struct tl_stream *stream)
{
    struct tl_service_call *call = tl_stream_owner(stream);
    if (!call->is_finished && call->ops->sent != NULL) call->ops->sent(call);
}

static void stream_closed(struct tl_stream *stream, const struct tl_error *status)
{
    struct tl_service_call *call = tl_stream_owner(stream);
    call->is_finished = true;
    tl_service_call_expect_nothing(call);
    if (call->ops->closed != NULL) call->ops->closed(call, status->code == TL_OK);
    grpc_byte_buffer_destroy(call->only_request);
    free(call);
}

static const struct tl_stream_events stream_events = {
    .on_message = stream_message,
    .on_half_closed = stream_half_closed,
    .on_sent = stream_sent,
    .on_closed = stream_closed,
};

void tl_service_call_accept(struct tl_control *control, struct tl_stream *stream, const struct tl_service_call_ops *ops)
{
    TL_CHECK(ops->size_bytes >= sizeof(struct tl_service_call));
    struct tl_service_call *call = calloc(1, ops->size_bytes);
    if (call == NULL) {
        struct tl_error refusal;
        tl_error_set(&refusal, TL_RESOURCE_EXHAUSTED, "no memory for a call");
        tl_stream_finish(stream, &refusal);
        return;
    }
    call->ops = ops;
    call->control = control;
    call->stream = stream;
    call->accepted_ns = tl_clock_now_ns();
    call->pace_deadline_ns = TL_TIME_NEVER;
    call->progress_timer.fire = progress_timeout;
    tl_stream_peer_address(stream, call->client.address, sizeof(call->client.address));
    call->client.client = tl_share_client_of(call->client.address);
    tl_stream_certify(stream, &call->client);
    tl_stream_set_owner(stream, call);
    tl_stream_set_events(stream, &stream_events);
    tl_service_call_expect_progress(call);
    tl_service_call_read(call);
}
