// SPDX-License-Identifier: Apache-2.0
/*
 * Where the bytes of a request go: into the destination itself, or into a bounce buffer in the pool from which they are
 * copied, as always when the destination has no address.
 *
 * What has come into a bounce buffer is copied on while the rest is on its way. One that is smaller than the value is
 * written round and round: COPIED tells the peer of each quarter that was copied on, and a peer that writes more than
 * that breaks the protocol (docs/protocol.md, "Asking").
 *
 * A value may not exist yet, and may need others to arrive before it does. So a request gets a place before the peer
 * has said that there is a value only while a quarter of the windows and of the pool stays free; it waits for neither.
 * Otherwise it asks without a place, and chooses one when META_DATA_UPDATE has come. Then it may wait, because it ends.
 *
 * Failure modes: memory that cannot be registered is replaced by a bounce buffer, and a small destination for which the
 * pool has no block is registered; the fetch reports why a bounce buffer was used. A tensor for which the pool can
 * never have memory may travel over the link, or fails. A request that reads knows only from SOURCE how much it needs:
 * when the pool does not grow at once, it gives the source back, and is written to when there is memory. Where the peer
 * can only write its own pool, everything else gets a bounce buffer. A large value whose bounce buffer does not come in
 * time is read by the kernel, or written to its destination. One whose destination does not lie in one piece waits for
 * its bounce buffer without a limit. Destinations on devices are those of request_device.c.
 */
#include "dataplane/engine/request_internal.h"

#include <stdlib.h>

#include "base/arith.h"
#include "base/clock.h"
#include "base/copy.h"
#include "base/error.h"
#include "base/reason.h"

const char request_reason_forced[] = "everything is copied through the pool (verbs.bounce)";
const char request_reason_small[] = "the allocation that it lies in is too small to be registered (verbs.register)";
static const char reason_cheap[] = "it is small: copying it twice takes less time than having it read by the kernel";
/* So many large values, for which there was no free memory at first, are copied at a time. Others wait: all of their
 * bounce buffers together would not stay in the caches, and each takes memory of the pool. */
#define MAX_LAPS 4

/* A shorter run is not copied past the caches: much of it lies in cache lines that others share. */
#define UNCACHED_RUN_BYTES 1024

static const char reason_runs[] = "its bytes do not lie in one piece in the destination";
static const char reason_lap[] =
    "both sides copy it at the same time, piece by piece, which takes less time than having it read by the kernel";

static void memory_came(struct tl_closure *closure);

bool request_has_placement(struct request *request)
{
    if (request->placement != NULL) return true;
    struct request_placement *placement =
        tl_spares_get(&request->conn->engine->spares.placements, sizeof(struct request_placement));
    if (placement == NULL) return false;
    placement->request = request;
    tl_list_init(&placement->lap_link);
    request_revoke_init(placement);
    request->placement = placement;
    return true;
}

void request_end_placement(struct request *request)
{
    if (request->placement == NULL) return;
    tl_list_remove(&request->placement->revoke.place);
    tl_list_remove(&request->placement->lap_link);
    tl_spares_put(&request->conn->engine->spares.placements, request->placement);
    request->placement = NULL;
}

static void give_lap(struct request_placement *placement)
{
    struct tl_conn *conn = placement->request->conn;
    placement->lap_bytes = 0;
    tl_list_remove(&placement->lap_link);
    if (!placement->has_lap) return;
    placement->has_lap = false;
    conn->requests.placing.lap_count--;
    if (!tl_list_is_empty(&conn->requests.placing.awaiting_laps)) conn_pump_later(conn);
}

void request_release_memory(struct request *request)
{
    struct request_placement *placement = request->placement;
    struct tl_conn *conn = request->conn;
    request->received_bytes = 0;
    request->is_sender_copying = false;
    request->is_from_device = false;
    request->is_done_expected = false;
    if (placement == NULL) return;
    give_lap(placement);
    placement->reported_bytes = 0;
    if (placement->bounce_buffer != NULL) {
        conn_block_destroy(conn->memory, &placement->bounce_buffer, &placement->pin);
    } else {
        tl_memory_unpin(conn->memory, &placement->pin);
    }
    tl_tensor_put(placement->kept);
    placement->kept = NULL;
    tl_tensor_put(placement->landing.allocated);
    placement->landing.allocated = NULL;
    placement->pin = (struct tl_pin){.region = NULL};
    placement->asked_bytes = 0;
    placement->landing.hashed_bytes = 0;
    request_leave_import(request);
    placement->landing.is_on_device = false;
}

void request_drop_place(struct request *request)
{
    request_release_memory(request);
    request_end_placement(request);
    tl_fetch_restart(request->fetch);
    request->has_meta_data = false;
}

/* Returns why the peer cannot write to the destination itself, or NULL if it can. */
static const char *why_not_itself(const struct request *request)
{
    const struct tl_conn *conn = request->conn;
    if (conn->engine->options.is_bounce_forced) return request_reason_forced;
    if (tl_tensor_is_in_runs(request->placement->kept)) return reason_runs;
    return conn->pair->outside_refusal;
}

void request_limit_wait(struct request *request)
{
    const struct request_placement *placement = request->placement;
    bool has_choice = placement != NULL && placement->has_lap && why_not_itself(request) == NULL;
    if (request->has_source || has_choice) request_limit(request, conn_grow_ns(request->conn));
}

/* Waits for memory of the pool. Returns false when it will never come, with the reason in ret_error. */
static bool await_memory(struct request *request, uint64_t len_bytes, struct tl_error *ret_error)
{
    struct tl_conn *conn = request->conn;
    struct request_placement *placement = request->placement;
    placement->memory_wait = conn_await_memory(conn, conn->memory, len_bytes, request, memory_came, ret_error);
    if (placement->memory_wait == NULL) return false;
    request_limit_wait(request);
    return true;
}

/* Returns how large the bounce buffer is. The CPU copies on what has arrived while the rest is on its way, so that a
 * large value needs no memory of its size. */
static uint64_t choose_lap(struct request *request)
{
    struct request_placement *placement = request->placement;
    uint64_t size_bytes = placement->expected.meta_data.size_bytes;
    uint64_t copy_bytes = request->conn->engine->options.copy_bytes;
    bool is_whole =
        copy_bytes == 0 || size_bytes <= copy_bytes || placement->landing.is_on_device || request->has_source;
    placement->lap_bytes = is_whole ? 0 : copy_bytes;
    return is_whole ? size_bytes : copy_bytes;
}

/* Returns false when the pool can never have the memory, with the reason in ret_error. */
static bool try_bounce_buffer(struct request *request, struct conn_memory_wait *memory_wait, struct tl_error *ret_error)
{
    struct request_placement *placement = request->placement;
    uint64_t size_bytes = choose_lap(request);
    struct tl_memory *memory = request->conn->memory;
    enum tl_status status =
        request->is_asked
            ? conn_block_create(memory, memory_wait, size_bytes, &placement->bounce_buffer, &placement->pin, ret_error)
            : conn_block_create_early(memory, size_bytes, &placement->bounce_buffer, &placement->pin, ret_error);
    if (status == TL_UNAVAILABLE && !request->is_asked) {
        request_drop_place(request);
        request_handle(request, REQUEST_EVENT_READY);
        return true;
    }
    if (status == TL_UNAVAILABLE) return await_memory(request, size_bytes, ret_error);
    if (status == TL_OK) request_handle(request, REQUEST_EVENT_READY);
    return status == TL_OK;
}

static void fail_without_block(struct request *request, const struct tl_error *error)
{
    request_reroute(request, error);
    request_fail(request, error);
}

void request_use_bounce_buffer(struct request *request, struct conn_memory_wait *memory_wait)
{
    struct tl_error error;
    if (request->placement->landing.is_on_device) /* begins to pin the pool */
        (void)tl_memory_why_not_pinned(request->conn->memory, tl_tensor_device(request->placement->kept));
    if (!try_bounce_buffer(request, memory_wait, &error)) fail_without_block(request, &error);
}

/* The peer will write to the pool if a block can be spared, since the value may not be sent for long. Returns false
 * when the peer will not. */
static bool use_free_bounce_buffer(struct request *request)
{
    struct request_placement *placement = request->placement;
    struct tl_conn *conn = request->conn;
    if (!conn_block_create_spare(conn, conn->memory, choose_lap(request), &placement->bounce_buffer, &placement->pin)) {
        placement->lap_bytes = 0;
        return false;
    }
    request_handle(request, REQUEST_EVENT_READY);
    return true;
}

static void registered(struct tl_closure *closure)
{
    struct registering *registering = conn_registered(closure);
    const struct tl_registration *registration = &registering->registration;
    struct request *request = registering->owner;
    struct tl_conn *conn = request->conn;
    conn->ending.held_count--;
    request->is_registering = false;
    if (registration->error.code == TL_OK) request->placement->pin = registration->pin;
    if (conn->ending.is_pair_drained) {
        request_break(request);
    } else if (registration->error.code == TL_OK || request->is_cancelled) {
        request_handle(request, REQUEST_EVENT_READY);
    } else {
        request->placement->bounce_reason = tl_reason(registration->error.message);
        request_use_bounce_buffer(request, NULL);
    }
    free(registering);
}

void request_register_destination(struct request *request)
{
    struct tl_conn *conn = request->conn;
    request->is_registering =
        conn_register(conn, conn->memory, request, request->placement->kept, TL_REGION_WRITE, registered);
    if (!request->is_registering) request_fail(request, &request_out_of_memory);
}

/* Makes the peer write to the destination, which has no registration yet, or to a bounce buffer where it cannot. */
static void expose_itself(struct request *request)
{
    struct tl_tensor *destination = request->placement->kept;
    if (why_not_itself(request) != NULL) {
        request_use_bounce_buffer(request, NULL);
        return;
    }
    if (request->conn->engine->provider->limits.needs_regions) {
        request_register_destination(request);
        return;
    }
    request->placement->pin =
        (struct tl_pin){.address = tl_tensor_data(destination), .len_bytes = tl_tensor_size_bytes(destination)};
    request_handle(request, REQUEST_EVENT_READY);
}

/* Makes the peer write to a bounce buffer in turn with other large values. */
static void take_lap(struct request *request)
{
    struct tl_error error;
    request->placement->has_lap = true;
    request->conn->requests.placing.lap_count++;
    if (try_bounce_buffer(request, NULL, &error)) return;
    give_lap(request->placement);
    expose_itself(request);
}

/* Makes a large value wait for a bounce buffer. One that may not exist yet is asked for without a place first, since
 * others would wait for it. Returns false when the pool cannot become large enough. */
static bool await_lap(struct request *request)
{
    struct tl_conn *conn = request->conn;
    struct tl_memory_stats stats;
    tl_memory_get_stats(conn->memory, &stats);
    uint64_t most_bytes = conn->engine->options.peer_memory.max_pool_bytes;
    if (stats.pool_used_bytes + conn->engine->options.copy_bytes > most_bytes) return false;
    if (!request->is_asked) {
        request_drop_place(request);
        request_handle(request, REQUEST_EVENT_READY);
    } else if (conn->requests.placing.lap_count < MAX_LAPS) {
        take_lap(request);
    } else {
        tl_list_push_back(&conn->requests.placing.awaiting_laps, &request->placement->lap_link);
        if (why_not_itself(request) == NULL) request_limit(request, conn_grow_ns(conn));
    }
    return true;
}

bool requests_can_give_laps(const struct tl_conn *conn)
{
    return conn->requests.placing.lap_count < MAX_LAPS && !tl_list_is_empty(&conn->requests.placing.awaiting_laps);
}

void requests_give_laps(struct tl_conn *conn)
{
    while (requests_can_give_laps(conn)) {
        struct request_placement *placement = TL_CONTAINER_OF(tl_list_pop_front(&conn->requests.placing.awaiting_laps),
                                                              struct request_placement, lap_link);
        request_end_limit(placement->request);
        take_lap(placement->request);
    }
}

void request_wait_no_longer(struct request *request)
{
    struct request_placement *placement = request->placement;
    conn_cancel_memory_wait(&placement->memory_wait);
    if (placement->memory_wait != NULL) return; /* the memory has come, and is on its way */
    request_end_limit(request);
    give_lap(placement);
    expose_itself(request);
}

/* Whether the peer could write the destination when the program has it back already: a processor of the peer that
 * stands still in the middle of a copy goes on with it even when the connection has broken meanwhile. */
static bool may_be_written_late(const struct request *request)
{
    const struct tl_fetch *fetch = request->fetch;
    bool is_of_program = !fetch->ops->makes_memory && fetch->ops->wanted != NULL && fetch->ops->wanted(fetch) != NULL;
    return is_of_program && request->conn->engine->provider->limits.is_processor_writing;
}

/* Whether the processor of the peer, which has other receivers, would wait for a file. A helper thread of ours reads
 * the value then, wherever it goes. */
static bool is_read_from_file(const struct request *request)
{
    const struct tl_conn *conn = request->conn;
    return request->is_file_slow && conn->engine->provider->limits.is_processor_writing &&
           why_not_itself(request) == NULL && !conn_is_small(conn, request->placement->kept);
}

void request_prepare_memory(struct request *request)
{
    struct request_placement *placement = request->placement;
    struct tl_conn *conn = request->conn;
    struct tl_tensor *destination = request->fetch->destination;
    struct tl_error error;
    placement->kept = tl_tensor_get(destination);
    if (tl_tensor_is_on_device(destination)) {
        request_prepare_on_device(request);
        return;
    }
    const char *refusal = why_not_itself(request);
    if (is_read_from_file(request)) {
        expose_itself(request);
        return;
    }
    if (!conn->engine->options.is_bounce_forced && !may_be_written_late(request) &&
        tl_memory_pin(conn->memory, destination, TL_REGION_WRITE, &placement->pin)) {
        request_handle(request, REQUEST_EVENT_READY);
        return;
    }
    uint64_t copy_bytes = conn->engine->options.copy_bytes;
    bool is_large = tl_tensor_size_bytes(destination) > copy_bytes;
    bool has_bounce_buffer;
    placement->bounce_reason = refusal != NULL                                ? refusal
                               : conn->engine->provider->limits.needs_regions ? request_reason_small
                               : is_large                                     ? reason_lap
                                                                              : reason_cheap;
    if (refusal == NULL && conn_is_small(conn, destination)) {
        has_bounce_buffer = try_bounce_buffer(request, NULL, &error);
    } else {
        has_bounce_buffer = copy_bytes > 0 && (refusal == NULL || (is_large && refusal == reason_runs)) &&
                            (use_free_bounce_buffer(request) || (is_large && await_lap(request)));
    }
    if (!has_bounce_buffer) expose_itself(request);
}

enum placing request_place(struct request *request, struct tl_memory_wait *memory_wait, struct tl_error *ret_error)
{
    struct tl_conn *conn = request->conn;
    struct tl_fetch *fetch = request->fetch;
    const struct tl_meta_cached *expected = &request->placement->expected;
    /* The publication number tells values apart when a transfer is resumed, which this transport never does. */
    uint64_t step = request_expected_step(request);
    conn->requests.placing.request = request;
    conn->requests.placing.wait = memory_wait;
    conn->requests.placing.is_early = !request->is_asked;
    conn->requests.placing.missing_bytes = 0;
    if (tl_fetch_start(fetch, &expected->meta_data, 1, step, ret_error) == TL_OK)
        return request->placement->landing.allocation == NULL ? PLACING_DONE : PLACING_WAITS;
    if (conn->requests.placing.missing_bytes == 0 || !request->is_asked) return PLACING_FAILED;
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
    case PLACING_FAILED: /* the peer may keep the value until it hears from us */
        if (request->is_asked && request->conn->requests.placing.missing_bytes > 0) {
            fail_without_block(request, &error);
        } else {
            request_fail(request, &error);
        }
        break;
    }
}

static void memory_came(struct tl_closure *closure)
{
    struct conn_memory_wait *memory_wait = conn_memory_came(closure);
    struct request *request = memory_wait->owner;
    request->placement->memory_wait = NULL;
    request_end_limit(request);
    if (request->conn->ending.is_pair_drained) {
        request_break(request);
    } else if (request->is_cancelled) {
        request_handle(request, REQUEST_EVENT_READY);
    } else if (memory_wait->memory_wait.wait.error.code != TL_OK && request->placement->has_lap) {
        give_lap(request->placement);
        expose_itself(request);
    } else if (memory_wait->memory_wait.wait.error.code != TL_OK) {
        fail_without_block(request, &memory_wait->memory_wait.wait.error);
    } else if (request->placement->kept == NULL) {
        request_place_and_prepare(request, &memory_wait->memory_wait);
    } else {
        request_use_bounce_buffer(request, memory_wait);
    }
    conn_free_memory_wait(&memory_wait);
}

/* ----------------------------------------------------------------------------------------------------- copying -- */

struct tl_tensor *request_bounce_buffer(const struct request *request)
{
    return request->placement != NULL ? request->placement->bounce_buffer : NULL;
}

/* Returns whether the bounce buffer is smaller than the value. */
static bool goes_round(const struct request *request)
{
    return request->placement != NULL && request->placement->lap_bytes > 0;
}

/* Whether so much is copied that others have their turn in between. One of many runs takes longer than its bytes. */
static bool is_copied_slowly(const struct request *request)
{
    return goes_round(request) || (request_bounce_buffer(request) != NULL && request->fetch->destination != NULL &&
                                   tl_tensor_is_in_runs(request->fetch->destination));
}

static void copy(void *context, unsigned char *to, size_t len_bytes)
{
    unsigned char **from = context;
    tl_copy(to, *from, len_bytes);
    *from += len_bytes;
}

static void copy_run_uncached(void *context, unsigned char *to, size_t len_bytes)
{
    unsigned char **from = context;
    if (len_bytes >= UNCACHED_RUN_BYTES) {
        tl_copy_run_uncached(to, *from, len_bytes);
    } else {
        tl_copy(to, *from, len_bytes);
    }
    *from += len_bytes;
}

static void copy_out(void *context, unsigned char *to, size_t len_bytes)
{
    unsigned char **from = context;
    tl_copy_out(to, *from, len_bytes);
    *from += len_bytes;
}

static void copy_out_uncached(void *context, unsigned char *to, size_t len_bytes)
{
    unsigned char **from = context;
    tl_copy_out_uncached(to, *from, len_bytes);
    *from += len_bytes;
}

/* Copies bytes of the bounce buffer into the destination. A run may be shorter than a cache line, so that the lines of
 * all runs are taken back together. What is hashed is hashed afterwards, where it lies then. */
static enum tl_status copy_on(const struct request *request, unsigned char *from, uint64_t len_bytes,
                              struct tl_error *ret_error)
{
    struct tl_fetch *fetch = request->fetch;
    struct tl_engine *engine = request->conn->engine;
    bool is_processor_writing = engine->provider->limits.is_processor_writing;
    bool is_in_runs = fetch->destination != NULL && tl_tensor_is_in_runs(fetch->destination);
    bool is_uncached = goes_round(request) && !fetch->wants_checksum;
    unsigned char *next = from;
    tl_bytes_fn write = !is_processor_writing ? copy
                        : is_in_runs          ? (is_uncached ? copy_run_uncached : copy)
                        : is_uncached         ? copy_out_uncached
                                              : copy_out;
    enum tl_status status = tl_fetch_fill(fetch, len_bytes, write, &next, ret_error);
    if (status != TL_OK) return status;
    if (is_in_runs && is_processor_writing) tl_take_lines(from, (size_t)len_bytes);
    engine->stats.bytes_bounced += len_bytes;
    tl_memory_count_bounce(engine->memory, len_bytes);
    return TL_OK;
}

/* Tells the peer of each quarter of the bounce buffer that was copied on, as long as it has more to write than it may
 * write now. */
static void tell_copied(struct request *request)
{
    struct request_placement *placement = request->placement;
    uint64_t lap_bytes = placement->lap_bytes;
    uint64_t size_bytes = placement->expected.meta_data.size_bytes;
    if (lap_bytes == 0) return;
    while (request->fetch->received_bytes - placement->reported_bytes >= lap_bytes / TL_LAP_PARTS &&
           size_bytes - placement->reported_bytes > lap_bytes) {
        placement->reported_bytes += lap_bytes / TL_LAP_PARTS;
        conn_send_notice(request->conn, TL_MESSAGE_COPIED, request->handle);
    }
}

enum tl_status request_advance(struct request *request, struct tl_error *ret_error)
{
    struct conn_budgets *budgets = &request->conn->posts.budgets;
    struct tl_fetch *fetch = request->fetch;
    uint64_t len_bytes = request->received_bytes - fetch->received_bytes;
    const struct tl_tensor *bounce_buffer = request_bounce_buffer(request);
    bool is_read = bounce_buffer != NULL || fetch->wants_checksum;
    uint64_t *budget_bytes = is_copied_slowly(request) ? &budgets->copy_bytes : &budgets->completion_bytes;
    if (is_read) len_bytes = tl_min_u64(len_bytes, *budget_bytes);
    if (len_bytes == 0) return TL_OK;
    if (bounce_buffer != NULL) {
        uint64_t lap_bytes = tl_tensor_size_bytes(bounce_buffer);
        uint64_t offset_bytes = fetch->received_bytes % lap_bytes;
        len_bytes = tl_min_u64(len_bytes, lap_bytes - offset_bytes);
        enum tl_status status =
            copy_on(request, (unsigned char *)tl_tensor_data(bounce_buffer) + offset_bytes, len_bytes, ret_error);
        if (status != TL_OK) return status;
    }
    tl_fetch_advance(fetch, len_bytes);
    if (is_read) *budget_bytes -= len_bytes;
    return TL_OK;
}

void request_advance_early(struct request *request)
{
    struct tl_error error; /* complete() finds it again */
    bool is_coming = request->state == REQUEST_ASKED || request->state == REQUEST_READING;
    if (request_bounce_buffer(request) == NULL || !is_coming) return;
    if (request->placement->landing.is_on_device) {
        request_copy_on(request);
        return;
    }
    if (request_advance(request, &error) != TL_OK) return;
    tell_copied(request);
    if (request->fetch->received_bytes == request->received_bytes) return;
    if (!is_copied_slowly(request)) {
        conn_pump_later(request->conn);
    } else if (request->state == REQUEST_ASKED) {
        conn_copy_later(request->conn, &request->pending);
    }
}

uint64_t request_most_awaited(const struct request *request)
{
    const struct request_placement *placement = request->placement;
    uint64_t left_bytes = placement->expected.meta_data.size_bytes - request->received_bytes;
    if (placement->lap_bytes == 0) return left_bytes;
    return tl_min_u64(left_bytes, placement->reported_bytes + placement->lap_bytes - request->received_bytes);
}
