// SPDX-License-Identifier: Apache-2.0
/*
 * What the peer asks: one response per request, from REQUEST to the end of its serve.
 *
 * Happy path: the source answers with a tensor whose meta-data is the one that the request expects. Its bytes are
 * written from where they lie into the peer's memory, piece by piece, each with the request's handle as immediate. When
 * the last write is done the peer has them. When the meta-data differs, META_DATA_UPDATE says so, the tensor is kept,
 * and RE_REQUEST says where to write. A DONE carries a value without bytes, a checksum, or the step of a published
 * value that the peer cannot know. A MAPPED carries a value that the peer may map. To a peer that reads SOURCE shows
 * the tensor (response_source.c).
 *
 * Failure modes: a status is sent as it is. Memory that is not registered is registered if it is large; else, or if
 * that fails, it is copied through the pool, whose memory it may wait for. A cancelled response writes nothing more,
 * and says CANCELLED when what was posted is done. When the connection ends, serves end as broken once the queue pair
 * is drained: the source keeps what was reserved for the asker, which may come back.
 */
#include "dataplane/engine/response_internal.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/check.h"
#include "base/error.h"

/* How many ended responses are kept to be used again. */
#define MAX_SPARE_RESPONSES 64

/* A message without content about a request that is over or was never seen. */
struct notice {
    struct pending_post pending;
    struct tl_conn *conn;
    enum tl_message_type type;
    uint32_t handle;
};

/* --------------------------------------------------------------------------------------------------------- end -- */

/* Returns what points at the response with this handle, or the end of the list that it would be in. */
static struct response **find_place(struct tl_conn *conn, uint32_t handle_)
{
    struct response **place = &conn->responses.by_handle[tl_handle_index(handle_) & (conn->responses.place_count - 1)];
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
            struct response **place = &by_handle[tl_handle_index(response->handle) & (responses->place_count - 1)];
            next = response->next;
            response->next = *place;
            *place = response;
        }
    }
}

/* Clears the fields that are zero when a response begins. */
static void clear(struct response *response)
{
    size_t begin = offsetof(struct response, state), end = offsetof(struct response, serve);
    memset((char *)response + begin, 0, end - begin);
}

static void give_response(struct tl_conn *conn, struct response *response)
{
    if (conn->responses.spare_count == MAX_SPARE_RESPONSES) {
        free(response);
        return;
    }
    clear(response); /* here, because no peer waits for it at this point */
    response->next = conn->responses.spare;
    conn->responses.spare = response;
    conn->responses.spare_count++;
}

void responses_fini(struct tl_conn *conn)
{
    struct response *next;
    for (struct response *response = conn->responses.spare; response != NULL; response = next) {
        next = response->next;
        free(response);
    }
}

void response_close(struct response *response, enum tl_serve_end end)
{
    struct tl_conn *conn = response->conn;
    struct tl_engine *engine = conn->engine;
    struct response **place = find_place(conn, response->handle);
    tl_timers_disarm(tl_reactor_timers(engine->reactor), &response->park_timer);
    TL_CHECK(*place == response);
    *place = response->next;
    conn->responses.count--;
    tl_list_remove(&response->pending.place);
    conn_free_memory_wait(&response->granted);
    if (response->source.is_reading) response_release_source(response);
    response_stop_reading(response);
    tl_memory_unpin(engine->memory, &response->pin);
    tl_tensor_put(response->offer.tensor);
    if (!response->is_refused) engine->source->closed(engine->source_context, &response->serve, end);
    tl_error_drop(response->status);
    if (response->hash_state != NULL) (void)XXH3_freeState(response->hash_state);
    give_response(conn, response);
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

static void reply(struct tl_serve *serve, const struct tl_error *status, const struct tl_offer *offer)
{
    struct response *response = TL_CONTAINER_OF(serve, struct response, serve);
    if (status->code != TL_OK) {
        response_set_status(response, status);
        response_handle(response, RESPONSE_EVENT_STATUS);
        return;
    }
    response->offer = *offer;
    const struct tl_meta_data *meta_data = tl_tensor_meta_data(offer->tensor);
    bool is_empty = meta_data->size_bytes == 0 || response_share(response);
    response->small.is_used = !is_empty && response_may_be_inline(response);
    if (is_empty || response->small.is_used) {
        response_handle(response, RESPONSE_EVENT_EMPTY);
    } else if (response_may_lend(response) ||
               (response->source.is_reading && response_may_show(response->conn) &&
                (!response_is_on_device(response) || response_may_be_direct(response)))) {
        response_handle(response, RESPONSE_EVENT_SHOWN);
    } else if (response->has_meta_data && response->destination.len_bytes > 0 &&
               tl_meta_data_is_equal(meta_data, &response->expected)) {
        response_handle(response, RESPONSE_EVENT_FITS);
    } else {
        response_handle(response, RESPONSE_EVENT_DIFFERS);
    }
}

static const struct tl_serve_ops serve_ops = {.reply = reply};

/* ----------------------------------------------------------------------------------------------- from the peer -- */

/* Returns a spare response or a new one; NULL when there is no memory. */
static struct response *take_response(struct tl_conn *conn)
{
    struct response *response = conn->responses.spare;
    if (response != NULL) {
        conn->responses.spare = response->next;
        conn->responses.spare_count--;
        response->next = NULL;
        return response;
    }
    response = malloc(sizeof(*response));
    if (response == NULL) return NULL;
    clear(response);
    response->conn = conn;
    response->pending.post = response_post_next;
    response->park_timer = (struct tl_timer){.fire = response_park_timeout};
    tl_list_init(&response->pending.place);
    response_source_init(response);
    return response;
}

static struct response *response_create(struct tl_conn *conn, const struct tl_message *message)
{
    struct response *response = take_response(conn);
    if (response == NULL) return NULL;
    response->handle = message->handle;
    response->state = RESPONSE_WAITING;
    response->wants_checksum = message->has_checksum;
    response->mapping.is_allowed = message->may_map;
    response->is_receiver_copying = message->is_copying;
    response->source.is_reading = message->is_reading;
    response->small.is_remote = message->is_remote;
    response->small.is_fixed = message->is_fixed;
    response->has_meta_data = message->has_meta_data;
    if (message->has_meta_data) tl_meta_data_copy(&response->expected, &message->meta_data);
    response->expected_step = message->expected_step;
    response->destination = message->destination;
    memcpy(response->key, message->key, message->key_bytes + 1);
    response->serve = (struct tl_serve){.ops = &serve_ops,
                                        .id = {.incarnation = conn->peer.incarnation, .number = message->number},
                                        .peer = &conn->peer,
                                        .key = response->key,
                                        .step = message->step,
                                        .subscription = message->subscription,
                                        .takes_devices = true};
    return response;
}

static void handle_request(struct tl_conn *conn, struct tl_message *message)
{
    const struct tl_engine *engine = conn->engine;
    if (!conn_complete_request(conn, message)) return;
    maybe_grow(&conn->responses);
    struct response **place = find_place(conn, message->handle);
    if (tl_handle_index(message->handle) >= TL_MAX_REQUESTS || (message->handle & ~TL_HANDLE_MASK) != 0 ||
        message->number == 0 || conn->responses.count >= most_responses(conn) || *place != NULL) {
        conn_protocol_error(conn, "a REQUEST that is invalid or one too many (handle %#x)", message->handle);
        return;
    }
    struct response *response = response_create(conn, message);
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
        response_set_status(response, &error);
        response_handle(response, RESPONSE_EVENT_STATUS);
        return;
    }
    engine->source->request(engine->source_context, &response->serve);
}

void responses_message(struct tl_conn *conn, struct tl_message *message)
{
    if (message->type == TL_MESSAGE_REQUEST) {
        handle_request(conn, message);
        return;
    }
    struct response *response = *find_place(conn, message->handle);
    if (message->type == TL_MESSAGE_CANCEL) {
        if (response != NULL) {
            response_handle(response, RESPONSE_EVENT_CANCEL);
        } else {
            response_send_cancelled(conn, message->handle);
        }
    } else if ((response == NULL || response->is_late) && conn->responses.late_count > 0) {
        conn->responses.late_count--; /* it has crossed our status that says that it comes too late */
    } else if (response != NULL && response->source.is_exposed && response->state == RESPONSE_SHOWING &&
               message->destination.len_bytes == 0) {
        response_handle(response, RESPONSE_EVENT_RETURN);
    } else if (response == NULL || message->destination.len_bytes == 0 || response->source.is_place_known) {
        conn_protocol_error(conn, "a RE_REQUEST that no response waits for (handle %#x)", message->handle);
    } else {
        response->source.is_place_known = response->state == RESPONSE_HIDING;
        if (response->state == RESPONSE_PARKED || response->state == RESPONSE_HIDING) {
            response->destination = message->destination;
            response->is_receiver_copying = message->is_copying;
        }
        response_handle(response, RESPONSE_EVENT_RE_REQUEST);
    }
}

void responses_released(struct tl_conn *conn, uint32_t handle_)
{
    struct response *response = *find_place(conn, handle_);
    if (response == NULL || !response->source.is_exposed) {
        conn_protocol_error(conn, "a release of a source that was not shown (immediate %#x)", handle_);
        return;
    }
    response_handle(response, RESPONSE_EVENT_RELEASE);
}

void responses_break(struct tl_conn *conn)
{
    for (uint32_t i = 0; i < conn->responses.place_count; i++) {
        struct response *next;
        for (struct response *response = conn->responses.by_handle[i]; response != NULL; response = next) {
            next = response->next;
            /* Responses whose bytes the peer has for certain were closed when their last work was done. */
            /* A peer that gives a SOURCE up waits for no answer, and does not ask for the value again. */
            bool is_given_up = response->state == RESPONSE_STOPPING && response->source.is_exposed;
            enum tl_serve_end end = response->source.is_released ? TL_SERVE_RECEIVED
                                    : is_given_up                ? TL_SERVE_CANCELLED
                                                                 : TL_SERVE_BROKEN;
            conn_cancel_memory_wait(&response->memory_wait);
            if (!response->is_registering && response->memory_wait == NULL) response_close(response, end);
        }
    }
    TL_LIST_FOREACH_SAFE(&conn->posts.slot_queue, place)
    {
        struct pending_post *pending = TL_CONTAINER_OF(place, struct pending_post, place);
        if (pending->post != take_notice) continue;
        tl_list_remove(place);
        free_notice(TL_CONTAINER_OF(pending, struct notice, pending));
    }
}

bool responses_are_over(const struct tl_conn *conn)
{
    return conn->responses.count == 0;
}
