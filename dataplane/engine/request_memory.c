// SPDX-License-Identifier: Apache-2.0
/*
 * Where the bytes of a request go: into the destination itself, or into a bounce buffer in the pool from which they are
 * copied.
 *
 * Failure modes: memory that cannot be registered is replaced by a bounce buffer, and a small destination for which the
 * pool has no block is registered; the fetch reports why a bounce buffer was used. When the pool is full, the request
 * waits for memory before the peer hears of it; a tensor larger than the pool fails. A request that reads knows only
 * from SOURCE how much it needs: when the pool does not grow at once, it gives the source back, and is written to when
 * there is memory. Where the peer can only write its own pool, everything else gets a bounce buffer.
 */
#include "dataplane/engine/request_internal.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/reason.h"

static const char reason_forced[] = "everything is copied through the pool (verbs.bounce)";
static const char reason_small[] = "the allocation that it lies in is too small to be registered (verbs.register)";
static const char reason_cheap[] = "it is small: copying it twice takes less time than having it read by the kernel";

/* Time enough for the pool to grow where it may. */
#define GROW_NS TL_NS_PER_SEC

static void memory_came(struct tl_closure *closure);

void request_release_memory(struct request *request)
{
    struct tl_conn *conn = request->conn;
    if (request->bounce_buffer != NULL) {
        conn_block_destroy(conn->memory, &request->bounce_buffer, &request->pin);
    } else {
        tl_memory_unpin(conn->memory, &request->pin);
    }
    tl_tensor_put(request->kept);
    request->kept = NULL;
    request->pin = (struct tl_pin){.region = NULL};
    request->received_bytes = 0;
    request->sender_flags = 0;
    request->is_done_expected = false;
    request->asked_bytes = 0;
}

/* Waits for memory of the pool; with a SOURCE, which its owner keeps for us, not for long. Returns false when it will
 * never come, with the reason in ret_error. */
static bool await_memory(struct request *request, uint64_t len_bytes, struct tl_error *ret_error)
{
    struct tl_conn *conn = request->conn;
    request->memory_wait = conn_await_memory(conn, conn->memory, len_bytes, request, memory_came, ret_error);
    if (request->memory_wait == NULL) return false;
    int64_t most_ns = conn->engine->options.parked_ns / 4;
    if (request->has_source) conn_arm(conn, &request->timer, most_ns < GROW_NS ? most_ns : GROW_NS);
    return true;
}

/* Makes the peer write to a block of the pool: of the memory that was waited for, or of what is free (memory_wait
 * NULL). Waits for memory when the pool is full. Returns false when neither is possible. */
static bool use_bounce_buffer(struct request *request, struct conn_memory_wait *memory_wait, struct tl_error *ret_error)
{
    uint64_t size_bytes = request->expected.meta_data.size_bytes;
    enum tl_status status = conn_block_create(request->conn->memory, memory_wait, size_bytes, &request->bounce_buffer,
                                              &request->pin, ret_error);
    if (status == TL_UNAVAILABLE) return await_memory(request, size_bytes, ret_error);
    if (status == TL_OK) request_handle(request, REQUEST_EVENT_READY);
    return status == TL_OK;
}

/* The peer will write to the pool if a block can be spared, since the value may not be sent for long. Returns false
 * when the peer will not. */
static bool use_free_bounce_buffer(struct request *request)
{
    struct tl_conn *conn = request->conn;
    if (!conn_block_create_spare(conn, conn->memory, request->expected.meta_data.size_bytes, &request->bounce_buffer,
                                 &request->pin))
        return false;
    request_handle(request, REQUEST_EVENT_READY);
    return true;
}

static void registered(struct tl_closure *closure)
{
    struct registering *registering = conn_registered(closure);
    const struct tl_registration *registration = &registering->registration;
    struct request *request = registering->owner;
    struct tl_conn *conn = request->conn;
    struct tl_error error;
    conn->ending.held_count--;
    request->is_registering = false;
    if (registration->error.code == TL_OK) request->pin = registration->pin;
    if (conn->ending.is_pair_drained) {
        request_handle(request, REQUEST_EVENT_BROKEN);
    } else if (registration->error.code == TL_OK || request->is_cancelled) {
        request_handle(request, REQUEST_EVENT_READY);
    } else {
        request->bounce_reason = tl_reason(registration->error.message);
        if (!use_bounce_buffer(request, NULL, &error)) request_fail(request, &error);
    }
    free(registering);
}

static void register_destination(struct request *request)
{
    struct tl_conn *conn = request->conn;
    request->is_registering = conn_register(conn, conn->memory, request, request->kept, TL_REGION_WRITE, registered);
    if (!request->is_registering) request_fail(request, &request_out_of_memory);
}

/* Makes the peer write to the destination, which has no registration yet. */
static void expose_itself(struct request *request)
{
    struct tl_tensor *destination = request->kept;
    if (request->conn->engine->provider->limits.needs_regions) {
        register_destination(request);
        return;
    }
    request->pin =
        (struct tl_pin){.address = tl_tensor_data(destination), .len_bytes = tl_tensor_size_bytes(destination)};
    request_handle(request, REQUEST_EVENT_READY);
}

void request_prepare_memory(struct request *request)
{
    struct tl_conn *conn = request->conn;
    struct tl_tensor *destination = request->fetch->destination;
    struct tl_error error;
    request->kept = tl_tensor_get(destination);
    bool is_forced = conn->engine->options.is_bounce_forced;
    if (!is_forced && tl_memory_pin(conn->memory, destination, TL_REGION_WRITE, &request->pin)) {
        request_handle(request, REQUEST_EVENT_READY);
    } else if (is_forced || conn->pair->outside_refusal != NULL) {
        request->bounce_reason = is_forced ? reason_forced : conn->pair->outside_refusal;
        if (!use_bounce_buffer(request, NULL, &error)) request_fail(request, &error);
    } else {
        request->bounce_reason = conn->engine->provider->limits.needs_regions ? reason_small : reason_cheap;
        bool is_small = conn_is_small(conn, destination);
        bool is_copied = tl_tensor_size_bytes(destination) < conn->engine->options.copy_bytes;
        bool has_bounce_buffer =
            is_small ? use_bounce_buffer(request, NULL, &error) : is_copied && use_free_bounce_buffer(request);
        if (!has_bounce_buffer) expose_itself(request);
    }
}

enum placing request_place(struct request *request, struct tl_memory_wait *memory_wait, struct tl_error *ret_error)
{
    struct tl_conn *conn = request->conn;
    struct tl_fetch *fetch = request->fetch;
    const struct tl_meta_cached *expected = &request->expected;
    /* The publication number tells values apart when a transfer is resumed, which this transport never does. */
    uint64_t step = expected->is_published ? expected->step : fetch->step;
    conn->requests.placing.wait = memory_wait;
    conn->requests.placing.missing_bytes = 0;
    if (tl_fetch_start(fetch, &expected->meta_data, 1, step, ret_error) == TL_OK) return PLACING_DONE;
    if (conn->requests.placing.missing_bytes == 0) return PLACING_FAILED;
    return await_memory(request, conn->requests.placing.missing_bytes, ret_error) ? PLACING_WAITS : PLACING_FAILED;
}

void request_place_and_prepare(struct request *request, struct tl_memory_wait *memory_wait)
{
    struct tl_error error;
    switch (request_place(request, memory_wait, &error)) {
    case PLACING_DONE:
        request_prepare_memory(request);
        break;
    case PLACING_WAITS:
        break;
    case PLACING_FAILED:
        request_fail(request, &error); /* the peer may keep the value until it hears from us */
        break;
    }
}

static void memory_came(struct tl_closure *closure)
{
    struct conn_memory_wait *memory_wait = conn_memory_came(closure);
    struct request *request = memory_wait->owner;
    struct tl_error error;
    request->memory_wait = NULL;
    tl_timers_disarm(tl_reactor_timers(request->conn->engine->reactor), &request->timer);
    if (request->conn->ending.is_pair_drained) {
        request_handle(request, REQUEST_EVENT_BROKEN);
    } else if (request->is_cancelled) {
        request_handle(request, REQUEST_EVENT_READY);
    } else if (memory_wait->memory_wait.wait.error.code != TL_OK) {
        request_fail(request, &memory_wait->memory_wait.wait.error);
    } else if (request->kept == NULL) {
        request_place_and_prepare(request, &memory_wait->memory_wait);
    } else if (!use_bounce_buffer(request, memory_wait, &error)) {
        request_fail(request, &error);
    }
    conn_free_memory_wait(&memory_wait);
}
