// SPDX-License-Identifier: Apache-2.0
/*
 * What the peer asks: one response per request, from REQUEST to the end of its serve.
 *
 * Happy path: the source answers with a tensor whose meta-data is the one that the request expects. Its bytes are
 * written into the peer's memory, from where they lie unless they have no address (tl_tensor_is_in_runs), piece by
 * piece, each with the request's handle as immediate. When the last write is done the peer has them. When the meta-data
 * differs, META_DATA_UPDATE says so, the tensor is kept, and RE_REQUEST says where to write. A DONE carries a value
 * without bytes, a checksum, or the step of a published value that the peer cannot know. A MAPPED carries a value that
 * the peer may map. To a peer that reads SOURCE shows the tensor (response_source.c).
 *
 * Failure modes: a status is sent as it is. Memory that is not registered is registered if it is large; else, or if
 * that fails, it is copied through the pool, whose memory it may wait for. A cancelled response writes nothing more,
 * and says CANCELLED when what was posted is done. When the connection ends, serves end as broken once the queue pair
 * is drained: the source keeps what was reserved for the asker, which may come back.
 */
#include "dataplane/engine/response_internal.h"

#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/check.h"
#include "base/error.h"
#include "tensor/mapped_file.h"

/* A message without content about a request that is over or was never seen. */
struct notice {
    struct pending_post pending;
    struct tl_conn *conn;
    enum tl_message_type type;
    uint32_t handle;
};

/* --------------------------------------------------------------------------------------------------------- end -- */

/* Returns the list for this handle. The seed keeps a peer, which chooses the handles, from filling one list. */
static struct response **list_of(const struct conn_responses *responses, uint32_t handle_)
{
    uint64_t hash = XXH3_64bits_withSeed(&handle_, sizeof(handle_), responses->seed);
    return &responses->by_handle[hash & (responses->place_count - 1)];
}

/* Returns what points at the response with this handle, or the end of the list that it would be in. */
static struct response **find_place(struct tl_conn *conn, uint32_t handle_)
{
    struct response **place = list_of(&conn->responses, handle_);
    while (*place != NULL && (*place)->handle != handle_)
        place = &(*place)->next;
    return place;
}

/* Doubles the number of lists when there are as many responses. Without memory the lists become longer. */
static void maybe_grow(struct conn_responses *responses)
{
    if (responses->count < responses->place_count) return;
    uint32_t old = responses->place_count;
    struct response **by_handle = realloc(responses->by_handle, 2 * (size_t)old * sizeof(struct response *));
    if (by_handle == NULL) return;
    responses->by_handle = by_handle;
    responses->place_count = 2 * old;
    for (uint32_t i = 0; i < old; i++) {
        struct response *response = by_handle[i], *next;
        by_handle[i] = by_handle[old + i] = NULL;
        for (; response != NULL; response = next) {
            struct response **place = list_of(responses, response->handle);
            next = response->next;
            response->next = *place;
            *place = response;
        }
    }
}

/* Gives the response what it needs to send, unless it has it. Returns false when there is no memory. */
static bool has_sending(struct response *response)
{
    if (response->sending != NULL) return true;
    struct response_sending *sending =
        tl_spares_get(&response->conn->engine->spares.sendings, sizeof(struct response_sending));
    if (sending == NULL) return false;
    sending->response = response;
    sending->pending.post = response_post_next;
    sending->pending.rank = VALUE_RANK(response->priority);
    sending->park_timer.fire = response_park_timeout;
    tl_list_init(&sending->pending.place);
    response_source_init(sending);
    response->sending = sending;
    return true;
}

/* Gives back what the response has needed to send. Nothing of it is under way. */
static void end_sending(struct response *response)
{
    struct response_sending *sending = response->sending;
    struct tl_engine *engine = response->conn->engine;
    if (sending == NULL) return;
    tl_timers_disarm(tl_reactor_timers(engine->reactor), &sending->park_timer);
    tl_list_remove(&sending->pending.place);
    conn_free_memory_wait(&sending->granted);
    if (response->is_reading) response_release_source(response);
    response_stop_reading(response);
    tl_memory_unpin(engine->memory, &sending->pin);
    tl_tensor_put(sending->offer.tensor);
    tl_error_drop(sending->status);
    if (sending->hash_state != NULL) (void)XXH3_freeState(sending->hash_state);
    tl_spares_put(&engine->spares.sendings, sending);
    response->sending = NULL;
}

/* A text for one request alone, with one reference. Returns NULL when there is no memory. */
static struct tl_kept_text *create_text(struct tl_engine *engine, const struct tl_message *message)
{
    struct tl_kept_text *text;
    if (sizeof(*text) + message->key_bytes >= TL_SHORT_TEXT_BYTES)
        return tl_kept_text_create(message->key, message->key_bytes);
    text = tl_spares_get(&engine->spares.texts, TL_SHORT_TEXT_BYTES);
    if (text == NULL) return NULL;
    text->reference_count = 1;
    text->is_short = true;
    memcpy(text->text, message->key, message->key_bytes);
    return text;
}

static void put_text(struct tl_engine *engine, struct tl_kept_text *text)
{
    if (text->is_short) {
        tl_spares_put(&engine->spares.texts, text);
    } else {
        tl_kept_text_put(text);
    }
}

/* The meta-data of one request alone, with one reference. Returns NULL when there is no memory. */
static struct tl_kept_meta_data *create_meta_data(struct tl_engine *engine, const struct tl_message *message)
{
    struct tl_kept_meta_data *meta_data = tl_spares_get(&engine->spares.meta_data, sizeof(*meta_data));
    if (meta_data == NULL) return NULL;
    meta_data->reference_count = 1;
    tl_meta_data_copy(&meta_data->meta_data, &message->meta_data);
    return meta_data;
}

static void put_meta_data(struct tl_engine *engine, struct tl_kept_meta_data *meta_data)
{
    if (meta_data != NULL && --meta_data->reference_count == 0) tl_spares_put(&engine->spares.meta_data, meta_data);
}

static void free_response(struct response *response)
{
    struct tl_engine *engine = response->conn->engine;
    if (response->serve.key != NULL) put_text(engine, tl_kept_text_of(response->serve.key));
    put_meta_data(engine, response->expected);
    tl_spares_put(&engine->spares.responses, response);
}

void response_close(struct response *response, enum tl_serve_end end)
{
    struct tl_conn *conn = response->conn;
    struct tl_engine *engine = conn->engine;
    struct response **place = find_place(conn, response->handle);
    TL_CHECK(*place == response);
    *place = response->next;
    conn->responses.count--;
    end_sending(response);
    if (!response->is_refused) engine->source.ops->closed(engine->source.context, &response->serve, end);
    free_response(response);
    if (conn->state != CONN_UP) conn_pump_later(conn); /* the connection may have waited for this before it ends */
}

/* How many responses a peer may have open. They live a little longer than the requests they answer. */
static uint32_t most_responses(const struct tl_conn *conn)
{
    return 2 * conn->engine->options.request_count + conn->engine->options.slot_count;
}

static void free_notice(struct notice *notice)
{
    if (notice->type == TL_MESSAGE_CANCELLED) notice->conn->responses.cancelled_count--;
    free(notice);
}

static bool take_notice(struct pending_post *pending)
{
    struct notice *notice = TL_CONTAINER_OF(pending, struct notice, pending);
    struct tl_conn *conn = notice->conn;
    conn_post_message(conn, conn_compose(conn, notice->type, notice->handle), NULL);
    free_notice(notice);
    return false;
}

void response_send_cancelled(struct tl_conn *conn, uint32_t handle_)
{
    conn_send_notice(conn, TL_MESSAGE_CANCELLED, handle_);
}

void conn_send_notice(struct tl_conn *conn, enum tl_message_type type, uint32_t handle_)
{
    /* A peer that cancels what it has not asked for, and returns no slots, must not make this queue grow without
     * end. */
    if (type == TL_MESSAGE_CANCELLED && conn->responses.cancelled_count >= most_responses(conn)) {
        conn_protocol_error(conn, "more CANCEL messages than requests");
        return;
    }
    struct notice *notice = calloc(1, sizeof(*notice));
    if (notice == NULL) {
        tl_conn_close(conn, &response_out_of_memory);
        return;
    }
    notice->pending.post = take_notice;
    tl_list_init(&notice->pending.place);
    notice->conn = conn;
    notice->type = type;
    notice->handle = handle_;
    if (type == TL_MESSAGE_CANCELLED) conn->responses.cancelled_count++;
    conn_post_when_slot(conn, &notice->pending);
    /* A connection that is closing queues nothing. */
    if (!tl_list_is_linked(&notice->pending.place)) free_notice(notice);
}

/* --------------------------------------------------------------------------------------------- from the source -- */

/* Whether reading the value may wait for a file, which is the receiver's part where it can read our memory. For a
 * checksum we read it ourselves. */
static bool is_file_slow(const struct response *response)
{
    const struct tl_tensor *tensor = response->sending->offer.tensor;
    return response->conn->engine->provider->limits.is_processor_writing && !response_is_on_device(response) &&
           !response->wants_checksum && !tl_tensor_is_in_runs(tensor) && !conn_is_small(response->conn, tensor) &&
           tl_mapped_file_may_wait(tl_tensor_data(tensor), tl_tensor_size_bytes(tensor));
}

/* Refuses a value without bytes that the peer could not take: in a DONE it would have left its owner, and other
 * receivers may still have it. Returns whether it did. */
static bool has_refused(struct response *response, const struct tl_meta_data *meta_data)
{
    struct tl_error error;
    const struct tl_meta_data *wanted = response->expected != NULL ? &response->expected->meta_data : NULL;
    if (meta_data->size_bytes > 0 || !response->is_fixed) return false;
    if (wanted != NULL && tl_meta_data_is_equal(meta_data, wanted)) return false;
    char shape[TL_SHAPE_TEXT_BYTES], wanted_shape[TL_SHAPE_TEXT_BYTES] = "";
    tl_shape_format(&meta_data->shape, shape, sizeof(shape));
    if (wanted != NULL) tl_shape_format(&wanted->shape, wanted_shape, sizeof(wanted_shape));
    tl_error_set(&error, TL_FAILED_PRECONDITION, "%s is %s%s %s and does not fit the destination%s%s %s",
                 response->serve.key, meta_data->is_dead ? "dead, " : "", tl_dtype_name(meta_data->dtype), shape,
                 wanted != NULL ? ", which is " : "", wanted != NULL ? tl_dtype_name(wanted->dtype) : "", wanted_shape);
    response_set_status(response, &error);
    response_handle(response, RESPONSE_EVENT_STATUS);
    return true;
}

static void reply(struct tl_serve *serve, const struct tl_error *status, const struct tl_offer *offer)
{
    struct response *response = TL_CONTAINER_OF(serve, struct response, serve);
    if (!has_sending(response)) { /* with the connection it ends as broken */
        if (offer != NULL) tl_tensor_put(offer->tensor);
        tl_conn_close(response->conn, &response_out_of_memory);
        return;
    }
    struct response_sending *sending = response->sending;
    if (status->code != TL_OK) {
        response_set_status(response, status);
        response_handle(response, RESPONSE_EVENT_STATUS);
        return;
    }
    sending->offer = *offer;
    const struct tl_meta_data *meta_data = tl_tensor_meta_data(offer->tensor);
    if (has_refused(response, meta_data)) return;
    bool is_empty = meta_data->size_bytes == 0 || response_share(response);
    sending->is_inline = !is_empty && response_may_be_inline(response);
    if (is_empty || sending->is_inline) {
        response_handle(response, RESPONSE_EVENT_EMPTY);
    } else if (response_may_lend(response) ||
               (response->is_reading && response_may_show(response->conn) &&
                (!response_is_on_device(response) || response_may_be_direct(response)))) {
        response_handle(response, RESPONSE_EVENT_SHOWN);
    } else {
        bool fits = response->expected != NULL && sending->destination.len_bytes > 0 &&
                    tl_meta_data_is_equal(meta_data, &response->expected->meta_data);
        sending->is_file_slow = is_file_slow(response);
        response_handle(response, fits && !sending->is_file_slow ? RESPONSE_EVENT_FITS : RESPONSE_EVENT_DIFFERS);
    }
}

static const struct tl_serve_ops serve_ops = {.reply = reply};

/* ----------------------------------------------------------------------------------------------- from the peer -- */

/* Takes over what the REQUEST, whose key has a number (kept) or travels as text (NULL), says of the value. Returns
 * false when there is no memory. */
static bool take_request(struct response *response, const struct tl_message *message, struct tl_kept_key *kept)
{
    const struct tl_kept_text *key =
        kept != NULL ? tl_kept_text_get(kept->text) : create_text(response->conn->engine, message);
    if (key == NULL) return false;
    response->serve.key = key->text;
    if (message->has_meta_data) {
        response->expected =
            kept != NULL ? tl_kept_meta_data_get(kept->expected) : create_meta_data(response->conn->engine, message);
        if (response->expected == NULL) return false;
    }
    if (message->destination.len_bytes == 0) return true;
    if (!has_sending(response)) return false;
    response->sending->destination = message->destination;
    response->sending->lap_bytes = message->lap_bytes;
    return true;
}

/* Returns NULL when there is no memory. */
static struct response *response_create(struct tl_conn *conn, const struct tl_message *message,
                                        struct tl_kept_key *kept)
{
    struct response *response = tl_spares_get(&conn->engine->spares.responses, sizeof(*response));
    if (response == NULL) return NULL;
    response->conn = conn;
    response->handle = message->handle;
    response->state = RESPONSE_WAITING;
    response->priority = message->priority;
    response->wants_checksum = message->has_checksum;
    response->may_map = message->may_map;
    response->is_receiver_copying = message->is_copying;
    response->is_reading = message->is_reading;
    response->is_remote = message->is_remote;
    response->is_fixed = message->is_fixed;
    response->expected_step = message->expected_step;
    response->serve = (struct tl_serve){.ops = &serve_ops,
                                        .id = {.incarnation = conn->peer.incarnation, .number = message->number},
                                        .peer = &conn->peer,
                                        .step = message->step,
                                        .subscription = message->subscription,
                                        .takes_devices = true,
                                        .takes_runs = !message->may_map && !message->is_reading};
    if (take_request(response, message, kept)) return response;
    free_response(response);
    return NULL;
}

static void handle_request(struct tl_conn *conn, struct tl_message *message)
{
    const struct tl_engine *engine = conn->engine;
    struct tl_kept_key *kept;
    if (!conn_complete_request(conn, message, &kept)) return;
    maybe_grow(&conn->responses);
    struct response **place = find_place(conn, message->handle);
    if (tl_handle_index(message->handle) >= TL_MAX_REQUESTS || (message->handle & ~TL_HANDLE_MASK) != 0 ||
        message->number == 0 || conn->responses.count >= most_responses(conn) || *place != NULL) {
        conn_protocol_error(conn, "a REQUEST that is invalid or one too many (handle %#x)", message->handle);
        return;
    }
    struct response *response = response_create(conn, message, kept);
    if (response == NULL) {
        tl_conn_close(conn, &response_out_of_memory);
        return;
    }
    *place = response;
    conn->responses.count++;
    conn_watch(conn);
    if (conn->state == CONN_DRAINING) {
        struct tl_error error;
        tl_error_set(&error, TL_UNAVAILABLE, "the data connection is about to be closed");
        response->is_refused = true;
        reply(&response->serve, &error, NULL);
        return;
    }
    engine->source.ops->request(engine->source.context, &response->serve);
}

static bool is_shown(const struct response *response)
{
    return response != NULL && response->sending != NULL && response->sending->source.is_exposed;
}

/* The peer has copied on a part of what was written. When the response is over, that has crossed its last message. */
static void handle_copied(struct response *response)
{
    struct response_sending *sending = response->sending;
    uint64_t part_bytes = sending != NULL ? sending->lap_bytes / TL_LAP_PARTS : 0;
    if (part_bytes == 0 || sending->posted_bytes - sending->copied_bytes < part_bytes) {
        conn_protocol_error(response->conn, "a COPIED for bytes that were not written (handle %#x)", response->handle);
        return;
    }
    sending->copied_bytes += part_bytes;
    response_handle(response, RESPONSE_EVENT_COPIED);
}

void responses_message(struct tl_conn *conn, struct tl_message *message)
{
    if (message->type == TL_MESSAGE_REQUEST) {
        handle_request(conn, message);
        return;
    }
    struct response *response = *find_place(conn, message->handle);
    struct response_sending *sending = response != NULL ? response->sending : NULL;
    if (message->type == TL_MESSAGE_CANCEL) {
        if (response != NULL) {
            response_handle(response, RESPONSE_EVENT_CANCEL);
        } else {
            response_send_cancelled(conn, message->handle);
        }
    } else if (message->type == TL_MESSAGE_COPIED) {
        if (response != NULL) handle_copied(response);
    } else if ((response == NULL || (sending != NULL && sending->is_late)) && conn->responses.late_count > 0) {
        conn->responses.late_count--; /* it has crossed our status that says that it comes too late */
    } else if (is_shown(response) && response->state == RESPONSE_SHOWING && message->destination.len_bytes == 0) {
        response_handle(response, RESPONSE_EVENT_RETURN);
    } else if (sending == NULL || message->destination.len_bytes == 0 || sending->source.is_place_known) {
        conn_protocol_error(conn, "a RE_REQUEST that no response waits for (handle %#x)", message->handle);
    } else {
        sending->source.is_place_known = response->state == RESPONSE_HIDING;
        if (response->state == RESPONSE_PARKED || response->state == RESPONSE_HIDING) {
            sending->destination = message->destination;
            sending->lap_bytes = message->lap_bytes;
            response->is_receiver_copying = message->is_copying;
        }
        response_handle(response, RESPONSE_EVENT_RE_REQUEST);
    }
}

void responses_released(struct tl_conn *conn, uint32_t handle_)
{
    struct response *response = *find_place(conn, handle_);
    if (!is_shown(response)) {
        conn_protocol_error(conn, "a release of a source that was not shown (immediate %#x)", handle_);
        return;
    }
    response_handle(response, RESPONSE_EVENT_RELEASE);
}

/* How a response ends whose connection has ended. Those whose bytes the peer has for certain were closed when their
 * last work was done. */
static enum tl_serve_end broken_end(const struct response *response)
{
    if (response->sending == NULL) return TL_SERVE_BROKEN;
    if (response->sending->source.is_released) return TL_SERVE_RECEIVED;
    /* A peer that gives a SOURCE up waits for no answer, and does not ask for the value again. */
    return response->state == RESPONSE_STOPPING && is_shown(response) ? TL_SERVE_CANCELLED : TL_SERVE_BROKEN;
}

static void end_broken(struct response *response)
{
    struct response_sending *sending = response->sending;
    enum tl_serve_end end = broken_end(response);
    response->is_broken = true;
    if (sending != NULL) {
        conn_cancel_memory_wait(&sending->memory_wait);
        response_stop_awaiting_copy(response);
        if (sending->is_registering || sending->memory_wait != NULL) return; /* it ends when that comes back */
    }
    response_close(response, end);
}

/* Ends the responses of a list, as many as the quota allows. Returns whether none is left. */
static bool break_list(struct response *response, struct tl_quota *quota)
{
    struct response *next;
    for (; response != NULL; response = next) {
        next = response->next;
        if (response->is_broken) continue;
        if (tl_quota_left(quota) == 0) return false;
        tl_quota_use(quota, 1);
        end_broken(response);
    }
    return true;
}

bool responses_break(struct tl_conn *conn)
{
    uint32_t *place = &conn->ending.broken_place_count;
    for (; *place < conn->responses.place_count; (*place)++) {
        if (!break_list(conn->responses.by_handle[*place], &conn->engine->provider->quota)) return false;
    }
    TL_LIST_FOREACH_SAFE(&conn->posts.slot_queues[0], place) /* notices are no values */
    {
        struct pending_post *pending = TL_CONTAINER_OF(place, struct pending_post, place);
        if (pending->post != take_notice) continue;
        tl_list_remove(place);
        free_notice(TL_CONTAINER_OF(pending, struct notice, pending));
    }
    return true;
}

bool responses_are_over(const struct tl_conn *conn)
{
    return conn->responses.count == 0;
}
