// SPDX-License-Identifier: Apache-2.0
/*
 * What we ask: one request per fetch, from its handle to the completion of the fetch.
 *
 * Happy path: the meta-data is known from the last value of the key. The destination is made, REQUEST says where to
 * write, the writes arrive and are counted by their immediates, the exposure is revoked, and the fetch is completed.
 * Meta-data that is unknown or has changed costs one META_DATA_UPDATE and one RE_REQUEST. A value without bytes comes
 * as a DONE, and changes nothing of what is known of the key. A small value comes inside of its DONE, into memory that
 * no peer reaches; then nothing is remembered of the key. A value that may be mapped may come as a MAPPED. A
 * receiver that reads gets a SOURCE (request_read.c).
 *
 * Failure modes: memory that cannot be registered is replaced by a bounce buffer in the pool. When the pool is full,
 * the request asks without a place, waits for memory when the peer has the value, or gives the source back that it
 * cannot read yet; a tensor larger than the pool may be takes the link, or fails where that is not allowed. A sent
 * value for whose destination there is no memory when its DONE comes stays in its slot, and slots are not given back,
 * until there is memory. A cancelled request keeps its memory until the peer says CANCELLED; a peer that does not say
 * it in time costs the connection. When the connection ends, fetches end with UNAVAILABLE once the queue pair is
 * drained, when nothing can write their memory any more. Answers to handles that are over are counted and dropped.
 */
#include "base/copy.h"
#include "dataplane/engine/request_internal.h"

#include <inttypes.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/prefetch.h"
#include "base/reason.h"

/* What is known of so many requests is prefetched together. */
#define PREFETCHED_REQUESTS 32

/* ----------------------------------------------------------------------------------------------- from the peer -- */

static struct request *find(struct tl_conn *conn, uint32_t handle)
{
    struct request *request = conn_find_request(conn, handle);
    if (request == NULL) conn->engine->stats.late_answers++;
    return request;
}

/* Notes what the value is. Returns false without memory for that; the connection is closed then. */
static bool expect(struct request *request, const struct tl_message *message)
{
    if (!request_has_placement(request)) {
        tl_conn_close(request->conn, &request_out_of_memory);
        return false;
    }
    struct tl_meta_cached *expected = &request->placement->expected;
    tl_meta_data_copy(&expected->meta_data, &message->meta_data);
    expected->step = message->step;
    expected->is_published = message->is_published;
    expected->is_mapped = false;
    request->has_meta_data = true;
    tl_fetch_begun(request->fetch);
    return true;
}

static void remember(struct request *request)
{
    tl_asked_keys_expect(&request->conn->requests.keys, request->key_number, request->fetch->key,
                         &request->placement->expected);
}

static void handle_meta_data(struct request *request, const struct tl_message *message)
{
    struct tl_conn *conn = request->conn;
    conn->engine->stats.meta_data_updates++;
    request->is_file_slow = message->is_file_slow;
    request->is_reading = false; /* the owner does not show its memory: it writes */
    if (!message->has_meta_data || message->meta_data.size_bytes == 0) {
        conn_protocol_error(conn, "META_DATA_UPDATE for %s with a value without bytes", request->fetch->key);
        return;
    }
    if (request->received_bytes > 0) {
        conn_protocol_error(conn, "META_DATA_UPDATE for %s after some of its bytes", request->fetch->key);
        return;
    }
    if (request->state == REQUEST_ASKED) {
        request->is_place_sent = false;
        if (!expect(request, message)) return;
        remember(request);
    }
    request_handle(request, REQUEST_EVENT_META_DATA);
}

/* The next value is asked for without a place. */
static void remember_nothing(struct request *request)
{
    const struct tl_meta_cached nothing = {.meta_data = {.size_bytes = 0}};
    if (request->has_meta_data)
        tl_asked_keys_expect(&request->conn->requests.keys, request->key_number, request->fetch->key, &nothing);
}

static void copy_inline(void *context, unsigned char *to, size_t len_bytes)
{
    const uint8_t **from = context;
    tl_copy(to, *from, len_bytes);
    *from += len_bytes;
}

/* Copies an inline value into its destination, which is made outside of the pool. A peer to which another destination
 * is exposed may write there until that is over. */
static enum tl_status take_inline(struct request *request, const struct tl_message *message, struct tl_error *ret_error)
{
    struct tl_fetch *fetch = request->fetch;
    uint64_t size_bytes = message->meta_data.size_bytes;
    bool is_any = message->is_published || tl_fetch_subscription(fetch) != 0;
    const uint8_t *from = message->data;
    fetch->allocator = NULL;
    enum tl_status status =
        tl_fetch_start(fetch, &message->meta_data, 1, is_any ? message->step : fetch->step, ret_error);
    fetch->allocator = &request->conn->requests.placing.allocator;
    if (status == TL_OK) status = tl_fetch_fill(fetch, size_bytes, copy_inline, &from, ret_error);
    if (status != TL_OK) return status;
    tl_fetch_advance(fetch, size_bytes);
    request->received_bytes = size_bytes;
    request->is_inline = true;
    request->conn->engine->stats.bytes_received += size_bytes;
    return TL_OK;
}

static enum tl_status take_empty(struct request *request, const struct tl_message *message, struct tl_error *ret_error)
{
    if (!request_has_placement(request)) {
        *ret_error = request_out_of_memory;
        return ret_error->code;
    }
    if (expect(request, message) && request_place(request, NULL, ret_error) == PLACING_DONE) return TL_OK;
    return ret_error->code;
}

/* Takes the value of a DONE, which its owner does not keep. Without memory for a sent value, which is nowhere else any
 * more, the DONE stays in its slot until there is some. Returns false then. */
static bool has_taken(struct request *request, const struct tl_message *message)
{
    struct tl_error error;
    enum tl_status status =
        message->is_inline ? take_inline(request, message, &error) : take_empty(request, message, &error);
    if (status == TL_RESOURCE_EXHAUSTED && !message->is_published) return false;
    if (status != TL_OK) request_set_result(request, &error);
    request->has_checksum = message->has_checksum;
    request->checksum = message->checksum;
    return true;
}

/* Whether the value that a DONE has may be inline, or has no bytes. */
static bool is_value_allowed(const struct request *request, const struct tl_message *message)
{
    uint64_t most_bytes = message->is_inline ? request->conn->engine->options.inline_bytes : 0;
    bool is_inline_allowed = !message->is_inline || !request->fetch->is_for_device;
    return message->has_meta_data && message->meta_data.size_bytes <= most_bytes && is_inline_allowed;
}

/* Keeps the slot whose messages are handled from the peer, and those that come after it. Those before it are free, and
 * the peer may know that by answers, which say so without a `consumed`: what we say meanwhile must not be less. */
static void keep_slot(struct tl_conn *conn)
{
    struct conn_credits *credits = &conn->credits;
    if (conn->requests.unplaced_count++ == 0) credits->own_slots_reported = credits->own_slots_returned - 1;
}

static void take_value(struct request *request, const struct tl_message *message)
{
    const struct engine_incoming *incoming = &request->conn->engine->incoming;
    /* A request that was given up takes the value all the same if it comes first. */
    bool is_wanted = request->state == REQUEST_ASKED || request->state == REQUEST_CANCELLING;
    if (is_wanted && request->result == NULL && !has_taken(request, message)) {
        request->is_unplaced = true;
        request->unplaced = incoming->bytes;
        request->unplaced_bytes = (uint16_t)incoming->len_bytes;
        request->is_cancelled |= request->state == REQUEST_CANCELLING;
        keep_slot(request->conn);
    }
    request_handle(request, REQUEST_EVENT_COMPLETE);
}

/* Handles a value that has no bytes: it is dead, or its size is zero. It is not remembered: it needs no memory, and the
 * next value that has bytes is more likely to be like the last one that had. */
static void handle_empty(struct request *request, const struct tl_message *message)
{
    if (!is_value_allowed(request, message)) {
        conn_protocol_error(request->conn, "DONE for %s with the meta-data of a value that has bytes",
                            request->fetch->key);
        return;
    }
    if (request->received_bytes > 0) {
        conn_protocol_error(request->conn, "DONE for %s without bytes after some of its bytes", request->fetch->key);
        return;
    }
    take_value(request, message);
}

static void handle_inline(struct request *request, const struct tl_message *message)
{
    struct tl_conn *conn = request->conn;
    if (request->received_bytes > 0 || !is_value_allowed(request, message)) {
        conn_protocol_error(conn, "an inline value of %" PRIu64 " bytes for %s, which the request does not allow",
                            message->meta_data.size_bytes, request->fetch->key);
        return;
    }
    remember_nothing(request);
    take_value(request, message);
}

static void handle_done(struct request *request, const struct tl_message *message)
{
    struct request_placement *placement = request->placement;
    if (message->is_inline) {
        handle_inline(request, message);
        return;
    }
    if (message->has_meta_data) {
        handle_empty(request, message);
        return;
    }
    bool is_whole = request->received_bytes > 0 && placement != NULL &&
                    request->received_bytes == placement->expected.meta_data.size_bytes;
    if (!is_whole) {
        conn_protocol_error(request->conn, "DONE for %s before all of its bytes", request->fetch->key);
        return;
    }
    if (!request->is_done_expected) {
        conn_protocol_error(request->conn, "DONE for %s that its bytes did not announce", request->fetch->key);
        return;
    }
    placement->expected.step = message->step;
    placement->expected.is_published = message->is_published;
    request->fetch->offer_step = message->step;
    remember(request);
    request->has_checksum = message->has_checksum;
    request->checksum = message->checksum;
    request_handle(request, REQUEST_EVENT_COMPLETE);
}

static void handle_mapped(struct request *request, const struct tl_message *message)
{
    if (!request->mapping.is_allowed || !message->has_meta_data || message->meta_data.size_bytes == 0 ||
        request->received_bytes > 0) {
        conn_protocol_error(request->conn, "MAPPED for %s, which the request does not allow", request->fetch->key);
        return;
    }
    bool is_wanted = request->state == REQUEST_ASKED || request->state == REQUEST_CANCELLING;
    if (is_wanted && request->result == NULL) request_map(request, message);
    request_handle(request, REQUEST_EVENT_COMPLETE);
}

static void handle_source(struct request *request, const struct tl_message *message)
{
    bool is_open = request->state == REQUEST_ASKED || request->state == REQUEST_CANCELLING;
    if (!request->is_reading || !is_open || !message->has_meta_data || message->meta_data.size_bytes == 0 ||
        message->destination.len_bytes == 0 ||
        (request->conn->pair->ops->find_memory != NULL && message->meta_data.dtype == TL_STRING)) {
        conn_protocol_error(request->conn, "SOURCE for %s, which the request does not allow", request->fetch->key);
        return;
    }
    if (request->state == REQUEST_CANCELLING) return; /* CANCEL is on its way, and its answer is the last */
    if (expect(request, message)) request_source(request, message);
}

static size_t peek_answered(const struct tl_conn *conn, struct tl_batch batch, const struct request **ret_requests)
{
    const uint8_t *bytes;
    uint32_t len_bytes, handle;
    size_t count = 0;
    while (count < PREFETCHED_REQUESTS && tl_batch_next(&batch, &bytes, &len_bytes)) {
        if (!tl_message_peek_done(bytes, len_bytes, &handle)) continue;
        const struct request *request = conn_find_request(conn, handle);
        if (request == NULL) continue;
        tl_prefetch(request, sizeof(*request));
        ret_requests[count++] = request;
    }
    return count;
}

static void prefetch_wanted(const struct tl_fetch *fetch)
{
    const struct tl_meta_data *wanted = fetch->ops->wanted != NULL ? fetch->ops->wanted(fetch) : NULL;
    if (wanted != NULL) tl_prefetch(wanted, sizeof(*wanted));
}

/* Between a handle and its destination lie four places in memory, each found through the one before. Each step
 * prefetches one place for all answers, so that they wait for memory together. */
void requests_prefetch(const struct tl_conn *conn, const struct tl_batch *batch)
{
    const struct request *requests[PREFETCHED_REQUESTS];
    const struct tl_fetch *fetches[PREFETCHED_REQUESTS];
    size_t request_count = peek_answered(conn, *batch, requests), count = 0;
    for (size_t i = 0; i < request_count; i++) {
        if (requests[i]->state != REQUEST_ASKED) continue;
        tl_prefetch(requests[i]->fetch, sizeof(*requests[i]->fetch));
        fetches[count++] = requests[i]->fetch;
    }
    for (size_t i = 0; i < count; i++)
        prefetch_wanted(fetches[i]);
}

void requests_message(struct tl_conn *conn, const struct tl_message *message)
{
    struct request *request = find(conn, message->handle);
    if (request == NULL) return;
    conn_credits_seen(conn, request->pending.sent_slot);
    /* It was given up without waiting for the answer, which comes all the same. */
    bool is_over = request->state == REQUEST_FINISHED || request->state == REQUEST_COPYING;
    if (request->has_source && is_over && message->type == TL_MESSAGE_CANCELLED) {
        conn->engine->stats.late_answers++;
        return;
    }
    if (request->has_source) { /* reads may be posted, whose memory an answer must not give back */
        conn_protocol_error(conn, "%s for %s after its SOURCE", tl_message_name(message->type), request->fetch->key);
        return;
    }
    if (request->state == REQUEST_FINISHED) { /* what has come stays as it is */
        conn->engine->stats.late_answers++;
        return;
    }
    switch (message->type) {
    case TL_MESSAGE_META_DATA_UPDATE:
        handle_meta_data(request, message);
        break;
    case TL_MESSAGE_DONE:
        handle_done(request, message);
        break;
    case TL_MESSAGE_MAPPED:
        handle_mapped(request, message);
        break;
    case TL_MESSAGE_SOURCE:
        handle_source(request, message);
        break;
    case TL_MESSAGE_ERROR_STATUS: {
        struct tl_error error;
        bool has_come = request->state == REQUEST_REVOKING || request->state == REQUEST_COPYING;
        if (!request->is_asked || has_come) {
            conn_protocol_error(conn, "ERROR_STATUS for %s %s", request->fetch->key,
                                has_come ? "after its last answer" : "before its REQUEST");
            return;
        }
        /* An owner that cannot send this value over the data connection says so. */
        bool is_rerouted = message->code == TL_UNIMPLEMENTED && !message->is_final;
        tl_error_set(&error, is_rerouted ? TL_UNAVAILABLE : message->code, "%s", message->text);
        request->fetch->is_final = message->is_final;
        request->fetch->is_rerouted = is_rerouted;
        if (is_rerouted) {
            request->fetch->path_reason = tl_reason(message->text);
            request->fetch->is_unsettled = true; /* the owner keeps the value for the link */
        }
        request->is_answered = true;
        request_set_result(request, &error);
        request_handle(request, REQUEST_EVENT_STATUS);
        break;
    }
    default:
        request_handle(request, REQUEST_EVENT_CANCELLED);
        break;
    }
}

void requests_immediate(struct tl_conn *conn, uint32_t immediate, uint64_t len_bytes)
{
    struct request *request = find(conn, immediate & TL_HANDLE_MASK);
    if (request == NULL) return;
    conn_credits_seen(conn, request->pending.sent_slot);
    bool is_awaited =
        request->is_place_sent && (request->state == REQUEST_ASKED || request->state == REQUEST_CANCELLING);
    uint64_t left_bytes = is_awaited ? request_most_awaited(request) : 0;
    if (!is_awaited || len_bytes == 0 || len_bytes > left_bytes) {
        conn_protocol_error(conn, "%" PRIu64 " bytes of %s where at most %" PRIu64 " are expected", len_bytes,
                            request->fetch->key, left_bytes);
        return;
    }
    if (request->received_bytes == 0) tl_fetch_begun(request->fetch);
    request->received_bytes += len_bytes;
    request->is_sender_copying |= (immediate & TL_IMMEDIATE_SENDER_COPYING) != 0;
    request->is_from_device |= (immediate & TL_IMMEDIATE_ON_DEVICE) != 0;
    request->is_done_expected |= (immediate & TL_IMMEDIATE_DONE_FOLLOWS) != 0;
    request_advance_early(request);
    bool is_whole = request->received_bytes == request->placement->expected.meta_data.size_bytes;
    if (is_whole && !request->is_done_expected) request_handle(request, REQUEST_EVENT_COMPLETE);
}

/* --------------------------------------------------------------------------------------------------- beginning -- */

/* The transport_state of a fetch that was cancelled before it had a request. */
static char given_up;

/* Returns a spare request or a new one; NULL when there is no memory. */
static struct request *request_create(struct tl_conn *conn)
{
    struct request *request = tl_spares_get(&conn->engine->spares.requests, sizeof(*request));
    if (request == NULL) return NULL;
    request->conn = conn;
    request_posts_init(request);
    return request;
}

static bool begin(struct tl_conn *conn, struct tl_fetch *fetch)
{
    struct request *request = request_create(conn);
    if (request == NULL) return false;
    if (!conn_take_handle(conn, request, &request->handle)) {
        tl_spares_put(&conn->engine->spares.requests, request);
        return false;
    }
    request->state = REQUEST_PREPARING;
    request->fetch = fetch;
    fetch->transport_state = request;
    fetch->allocator = &conn->requests.placing.allocator;
    tl_fetch_restart(fetch);
    request->key_number = tl_asked_keys_get(&conn->requests.keys, fetch->key);
    request->is_reading = requests_are_read(conn) || requests_may_import(conn, fetch);
    if (request->is_reading) { /* the destination is made when SOURCE has come */
        request_handle(request, REQUEST_EVENT_READY);
        return true;
    }
    /* A key whose last value was inline is asked without a place. */
    const struct tl_meta_cached *expected =
        tl_asked_keys_expected(&conn->requests.keys, request->key_number, fetch->key);
    request->mapping.is_allowed = fetch->may_map && !fetch->wants_checksum && conn->pair->ops->map != NULL;
    /* A value that is mapped again needs no memory. */
    bool needs_place = expected != NULL && !(request->mapping.is_allowed && expected->is_mapped);
    request->has_meta_data = needs_place && requests_may_expose_early(conn) && request_has_placement(request);
    if (request->has_meta_data) tl_meta_cached_copy(&request->placement->expected, expected);
    if (!request->has_meta_data) {
        request_handle(request, REQUEST_EVENT_READY);
        return true;
    }
    switch (request_place(request, NULL, NULL)) {
    case PLACING_DONE:
        request_prepare_memory(request);
        break;
    case PLACING_WAITS:
        break;
    case PLACING_FAILED:
        /* The last value does not fit the caller's destination, and the next one may; or the pool has nothing to spare.
         */
        request_drop_place(request);
        request_handle(request, REQUEST_EVENT_READY);
        break;
    }
    return true;
}

/* When many fetches wait, they wait for longer than what is known of them stays in the caches. Each step prefetches one
 * place in memory for the next ones, so that they wait for it together. */
static void prefetch_waiting(struct tl_conn *conn)
{
    const struct tl_list *waiting = &conn->requests.waiting;
    uint32_t *prefetched_count = &conn->credits.asked.prefetched_count;
    const struct tl_fetch *fetches[PREFETCHED_REQUESTS];
    uint32_t count = 0;
    if (*prefetched_count > 0) {
        --*prefetched_count;
        return;
    }
    if (waiting->next == waiting->prev) return; /* one fetch, with no other to wait together with */
    TL_LIST_FOREACH(waiting, link)
    {
        fetches[count] = TL_CONTAINER_OF(link, struct tl_fetch, transport_link);
        tl_prefetch(fetches[count], sizeof(*fetches[count]));
        if (++count == PREFETCHED_REQUESTS) break;
    }
    for (uint32_t i = 0; i < count; i++)
        prefetch_wanted(fetches[i]);
    *prefetched_count = count - 1;
}

bool requests_begin(struct tl_conn *conn)
{
    struct tl_quota *quota = &conn->engine->provider->quota;
    for (; !tl_list_is_empty(&conn->requests.waiting); tl_quota_use(quota, 1)) {
        if (tl_quota_left(quota) == 0) return true; /* others have their turn first */
        if (!conn_has_handle(conn)) requests_free_completed(conn);
        if (!conn_has_handle(conn)) return false; /* the next request that ends gives one */
        prefetch_waiting(conn);
        struct tl_fetch *fetch =
            TL_CONTAINER_OF(tl_list_pop_front(&conn->requests.waiting), struct tl_fetch, transport_link);
        if (!begin(conn, fetch)) tl_list_push_back(&conn->requests.unrequested, &fetch->transport_link);
    }
    return false;
}

void tl_conn_fetch(struct tl_conn *conn, struct tl_fetch *fetch)
{
    fetch->transport_state = NULL;
    fetch->is_final = false;
    fetch->is_rerouted = false;
    tl_list_push_back(conn->state == CONN_UP ? &conn->requests.waiting : &conn->requests.unrequested,
                      &fetch->transport_link);
    conn_pump_later(conn);
}

void tl_conn_cancel(struct tl_conn *conn, struct tl_fetch *fetch)
{
    const void *state = fetch->transport_state;
    if (state == &given_up) return;
    if (state != NULL) {
        request_handle(fetch->transport_state, REQUEST_EVENT_CANCEL);
        return;
    }
    tl_list_remove(&fetch->transport_link);
    fetch->transport_state = &given_up;
    tl_list_push_back(&conn->requests.unrequested, &fetch->transport_link);
    conn_pump_later(conn);
}

/* --------------------------------------------------------------------------------------------------------- end -- */

static enum tl_path path_of(const struct request *request)
{
    const struct request_placement *placement = request->placement;
    if (request->mapping.is_done) return TL_PATH_MAPPED;
    if (request->received_bytes == 0) return TL_PATH_NONE;
    if (tl_fetch_meta_data(request->fetch)->dtype == TL_STRING) return TL_PATH_SERIALIZED;
    if (request->is_inline) return TL_PATH_INLINE;
    if (placement->landing.import != NULL) return TL_PATH_GPU_IPC;
    bool is_from_device = request->is_from_device;
    bool is_sender_copying = request->is_sender_copying;
    bool is_copying = placement->bounce_buffer != NULL;
    if ((is_sender_copying && is_from_device) || (is_copying && placement->landing.is_on_device))
        return TL_PATH_GPU_PROXY;
    if (is_sender_copying || is_copying) return TL_PATH_BOUNCE;
    return is_from_device || placement->landing.is_on_device ? TL_PATH_GPU_DIRECT : TL_PATH_ZERO_COPY;
}

/* Tries again to take the value of a DONE that is still in its slot. Returns false without memory for that. A program
 * that has given the request up, and the connection too, does not want the value any more. */
static bool has_placed(struct request *request, struct tl_error *ret_error)
{
    struct tl_conn *conn = request->conn;
    struct tl_message *message = &conn->engine->incoming.message;
    uint8_t copy[TL_SLOT_BYTES];
    memcpy(copy, request->unplaced, request->unplaced_bytes); /* shared memory can change while it is read */
    enum tl_status status = tl_message_decode(copy, request->unplaced_bytes, message, ret_error);
    if (status != TL_OK || message->type != TL_MESSAGE_DONE || !is_value_allowed(request, message)) {
        conn_protocol_error(conn, "a DONE for %s that has changed in its slot", request->fetch->key);
        request_set_given_up(request);
    } else if (!has_taken(request, message)) {
        if (conn->state != CONN_CLOSING || !request->is_cancelled) return false;
        request_set_given_up(request);
    }
    request->is_unplaced = false;
    conn->requests.unplaced_count--;
    conn_pump_later(conn); /* what had to wait is posted */
    return true;
}

/* Completes a request whose bytes are in the destination or its bounce buffer, where the peer cannot write them any
 * more. Returns whether it is over; *ret_result then says how. It is not over while this pump may not copy and hash all
 * of the bytes: the next pump goes on. Until then the request stays FINISHED, which neither a cancel nor the end of the
 * connection changes. */
static bool complete(struct request *request, struct tl_error *ret_result)
{
    struct tl_fetch *fetch = request->fetch;
    if (!request->mapping.is_done && request_advance(request, ret_result) != TL_OK) return true;
    if (fetch->received_bytes < request->received_bytes) return false;
    fetch->path = path_of(request);
    fetch->path_reason =
        request->is_inline || fetch->path == TL_PATH_SERIALIZED               ? NULL
        : request_bounce_buffer(request) != NULL                              ? request->placement->bounce_reason
        : fetch->path == TL_PATH_GPU_DIRECT || fetch->path == TL_PATH_GPU_IPC ? NULL
        : fetch->path == TL_PATH_ZERO_COPY
            ? (request->conn->engine->options.is_reading ? request_how_read(request) : request_why_not_mapped(request))
            : "copied by the owner";
    if (tl_fetch_verify(fetch, request->has_checksum, request->checksum, ret_result) == TL_OK) {
        ret_result->code = TL_OK;
        request->conn->engine->stats.tensors_received++;
    }
    return true;
}

void request_free(struct request *request)
{
    struct tl_conn *conn = request->conn;
    request_end_limit(request);
    tl_list_remove(&request->pending.place);
    request_end_placement(request);
    conn_give_handle(conn, request->handle);
    tl_error_drop(request->result);
    tl_spares_put(&conn->engine->spares.requests, request);
}

void requests_free_completed(struct tl_conn *conn)
{
    struct tl_list *place;
    while ((place = tl_list_pop_front(&conn->requests.completed)) != NULL)
        request_free(TL_CONTAINER_OF(place, struct request, pending.place));
}

void request_finish(struct request *request)
{
    tl_list_remove(&request->pending.place);
    tl_list_push_back(&request->conn->requests.finished, &request->pending.place);
    conn_pump_later(request->conn);
}

/* The next attempt, perhaps over another transport, begins with the first byte: of another value, what was copied early
 * would be a part. A destination in the peer's own pool that has not received its value is left, because the peer may
 * write there as long as the pool lives; the next attempt gets another one. */
static void leave_destination(const struct request *request, struct tl_fetch *fetch)
{
    const struct tl_conn *conn = request->conn;
    struct tl_pin pin = {.region = NULL};
    if (fetch->destination == NULL) return;
    bool is_in_pool =
        conn->memory != conn->engine->memory && tl_memory_pin(conn->memory, fetch->destination, TL_REGION_WRITE, &pin);
    if (is_in_pool) tl_memory_unpin(conn->memory, &pin);
    if (is_in_pool || request_bounce_buffer(request) != NULL) tl_fetch_restart(fetch);
}

/* Completes the fetch. Returns false when the next pump must go on. */
static bool end_fetch(struct request *request)
{
    struct tl_fetch *fetch = request->fetch;
    struct tl_error result;
    result.code = TL_OK;
    result.message[0] = '\0';
    if (request->is_unplaced && !has_placed(request, &result)) return false;
    if (request->mapping.is_refused && request->is_cancelled) request_set_given_up(request);
    if (request->mapping.is_refused && request->result == NULL) {
        request_ask_without_map(request);
        return true;
    }
    if (request->result != NULL) {
        result = *request->result;
    } else if (!complete(request, &result)) {
        return false;
    }
    if (result.code != TL_OK) leave_destination(request, fetch);
    request_release_memory(request); /* before `done`: the caller may hold the last other reference */
    tl_list_push_back(&request->conn->requests.completed, &request->pending.place);
    fetch->allocator = NULL;
    fetch->transport_state = NULL;
    fetch->ops->done(fetch, &result);
    return true;
}

void requests_complete_fetches(struct tl_conn *conn)
{
    struct tl_quota *quota = &conn->engine->provider->quota;
    struct tl_list *place;
    /* Each completion frees a handle, for which a fetch waits. */
    if (!tl_list_is_empty(&conn->requests.finished) && !tl_list_is_empty(&conn->requests.waiting))
        conn_pump_later(conn);
    while (tl_quota_left(quota) > 0 && (place = tl_list_pop_front(&conn->requests.finished)) != NULL) {
        tl_quota_use(quota, 1);
        struct request *request = TL_CONTAINER_OF(place, struct request, pending.place);
        if (end_fetch(request)) continue;
        if (request->is_unplaced) {
            tl_list_push_back(&conn->requests.unplaced, place);
            continue;
        }
        tl_list_push_front(&conn->requests.finished, place);
        conn_pump_later(conn);
        break;
    }
    while (tl_quota_left(quota) > 0 && (place = tl_list_pop_front(&conn->requests.unrequested)) != NULL) {
        tl_quota_use(quota, 1);
        struct tl_fetch *fetch = TL_CONTAINER_OF(place, struct tl_fetch, transport_link);
        struct tl_error error;
        if (fetch->transport_state == &given_up) {
            tl_error_set(&error, TL_CANCELLED, "%s was given up", fetch->key);
        } else if (conn->state == CONN_UP) {
            error = request_out_of_memory;
        } else {
            tl_error_set(&error, TL_UNAVAILABLE, "%s: the data connection is closed", conn->peer.name);
        }
        fetch->transport_state = NULL;
        fetch->ops->done(fetch, &error);
    }
    if (!tl_list_is_empty(&conn->requests.finished) || !tl_list_is_empty(&conn->requests.unrequested))
        conn_pump_later(conn);
}

void request_break(struct request *request)
{
    const struct tl_conn *conn = request->conn;
    struct tl_error error = conn->ending.reason;
    error.code = TL_UNAVAILABLE;
    if (conn->ending.reason.code == TL_OK) {
        tl_error_set(&error, TL_UNAVAILABLE, "%s has closed the data connection", conn->peer.name);
    }
    if (request->state == REQUEST_CANCELLING) request_set_given_up(request);
    if (request->state != REQUEST_REVOKING) request_set_result(request, &error);
    if (request->state != REQUEST_REVOKING && request->is_asked) request->fetch->is_unsettled = true;
    request_exposure_over(request);
    if (!request_stop_waiting(request)) return; /* it ends when that comes back */
    if (!request->is_registering) request_handle(request, REQUEST_EVENT_BROKEN);
}

bool requests_break(struct tl_conn *conn)
{
    struct tl_quota *quota = &conn->engine->provider->quota;
    uint32_t *place = &conn->ending.broken_handle_count;
    tl_list_splice_back(&conn->requests.unrequested, &conn->requests.waiting);
    for (; *place < conn->requests.handle_count; (*place)++) {
        struct request *request = conn->requests.handles[*place].request;
        if (request == NULL || request->state >= REQUEST_COPYING) continue;
        if (tl_quota_left(quota) == 0) return false;
        tl_quota_use(quota, 1);
        request_break(request);
    }
    return true;
}

bool requests_are_over(const struct tl_conn *conn)
{
    return conn->requests.open_count == 0 && tl_list_is_empty(&conn->requests.waiting) &&
           tl_list_is_empty(&conn->requests.unrequested);
}
