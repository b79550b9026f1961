// SPDX-License-Identifier: Apache-2.0
/*
 * What we ask: one request per fetch, from its handle to done.
 *
 * Happy path: the meta-data is known from last time: the destination is made, REQUEST goes out with where to write it,
 * the writes arrive and are counted by their immediates, the exposure is revoked, done. Meta-data that is unknown or
 * has changed costs one META_DATA_UPDATE and one RE_REQUEST. A value without bytes comes as a DONE, and leaves what is
 * known of the key as it is.
 *
 * Failure modes: memory that cannot be registered is copied through the pool. When the pool is full the request waits
 * for room, before the peer hears of it; what never fits fails. A cancelled request keeps its memory until the peer
 * says CANCELLED; a peer that does not say it in time costs the connection. When the connection ends, fetches end with
 * UNAVAILABLE once the queue pair is drained: nothing can write their memory any more. Answers to handles that are over
 * are counted and dropped.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "dataplane/conn_internal.h"

/*
 *   PREPARING --memory is there--> QUEUED --posted--> ASKED --all has come--> REVOKING --revoked--> (told, freed)
 *       ^                                               |  \---cancel--> CANCELLING --last word--> REVOKING
 *       \---revoked--- RENEWING <---META_DATA_UPDATE---/
 */
enum request_state {
    REQUEST_PREPARING,  /* waits for the slow worker to register the destination, or for room in the pool */
    REQUEST_QUEUED,     /* waits for its turn (and a window) to send REQUEST or RE_REQUEST */
    REQUEST_ASKED,      /* waits for the peer's answer */
    REQUEST_RENEWING,   /* other memory is needed; waits until nobody can write the former */
    REQUEST_CANCELLING, /* CANCEL is queued or sent; waits for the peer's last word */
    REQUEST_REVOKING,   /* has its result; waits until nobody can write its memory */
    REQUEST_FINISHED,   /* waits to be told, in conn->finished */
    REQUEST_STATES,
};

enum request_event {
    EVENT_READY,     /* the destination's memory can be exposed, or none is needed */
    EVENT_SENT,      /* what it waited to send is posted */
    EVENT_META_DATA, /* the value is another than expected */
    EVENT_COMPLETE,  /* all of it has come */
    EVENT_STATUS,    /* the owner's status */
    EVENT_FAILED,    /* ours */
    EVENT_CANCEL,    /* the worker gives up */
    EVENT_CANCELLED, /* the peer says that it will not write */
    EVENT_REVOKED,
    REQUEST_EVENTS,
};

struct request {
    struct tl_conn *conn;
    struct tl_fetch *fetch;
    struct tl_list place; /* in conn->finished */
    enum request_state state;
    uint32_t handle;
    struct turn turn;   /* REQUEST, RE_REQUEST or CANCEL */
    struct turn revoke; /* of the exposure */
    struct tl_work revoke_work;
    bool is_asked; /* REQUEST has been posted: the peer knows the handle */
    bool is_registering;
    bool is_cancelled; /* while it registers or waits for room: to be given up as soon as that is over */
    bool is_revoke_posted;
    bool is_place_told; /* the peer knows where to write what is expected */

    bool has_meta_data; /* expected; of the cache, then of META_DATA_UPDATE */
    struct tl_meta_cached expected;
    struct room_wait *room;  /* it waits for that; NULL: it does not */
    struct tl_tensor *kept;  /* the destination, while it may be exposed; one reference */
    struct tl_pin pin;       /* of the destination, or of the proxy */
    struct tl_tensor *proxy; /* in the pool, copied from at the end; NULL: the peer writes the destination itself */
    struct tl_exposure exposure;
    bool is_exposed; /* until it is certain that nobody writes through the exposure any more */
    uint64_t received_bytes;
    bool is_source_bounced;
    bool is_told; /* a DONE follows the data */
    struct tl_timer cancel_timer;
    bool has_checksum;
    uint64_t checksum;
    uint32_t sent_slot;      /* how many slots were used up to the latest that was sent */
    struct tl_error *result; /* NULL: TL_OK */
};

static const struct tl_error out_of_memory = {.code = TL_RESOURCE_EXHAUSTED, .message = "no memory for a request"};

static void handle(struct request *request, enum request_event event);

/* ------------------------------------------------------------------------------------------------------- result -- */

/* The first real error wins. */
static void set_result(struct request *request, const struct tl_error *error)
{
    if (request->result != NULL || error->code == TL_OK) return;
    request->result = malloc(sizeof(*request->result));
    if (request->result != NULL) {
        *request->result = *error;
    } else {
        request->result = (struct tl_error *)&out_of_memory;
    }
}

static void fail(struct request *request, const struct tl_error *error)
{
    set_result(request, error);
    handle(request, EVENT_FAILED);
}

/* ------------------------------------------------------------------------------------------------------- memory -- */

static void release_memory(struct request *request)
{
    struct tl_conn *conn = request->conn;
    if (request->proxy != NULL) {
        conn_block_destroy(conn->memory, &request->proxy, &request->pin);
    } else {
        tl_memory_unpin(conn->memory, &request->pin);
    }
    tl_tensor_put(request->kept);
    request->kept = NULL;
    request->pin = (struct tl_pin){.region = NULL};
    request->received_bytes = 0;
    request->is_source_bounced = false;
    request->is_told = false;
}

static void finish(struct request *request);
static void room_came(struct tl_letter *letter);

/* Waits for room in the pool. False: it never comes, for the reason in ret_error. */
static bool await_room(struct request *request, uint64_t len_bytes, struct tl_error *ret_error)
{
    struct tl_conn *conn = request->conn;
    request->room = conn_await_room(conn, conn->memory, len_bytes, request, room_came, ret_error);
    return request->room != NULL;
}

/* The peer will write to the pool, in the room or in what is free (room NULL); else it waits for room. False: neither.
 */
static bool use_proxy(struct request *request, struct room_wait *room, struct tl_error *ret_error)
{
    uint64_t size_bytes = request->expected.meta_data.size_bytes;
    enum tl_status status =
        conn_block_create(request->conn->memory, room, size_bytes, &request->proxy, &request->pin, ret_error);
    if (status == TL_UNAVAILABLE) return await_room(request, size_bytes, ret_error);
    if (status == TL_OK) handle(request, EVENT_READY);
    return status == TL_OK;
}

static void registered(struct tl_letter *letter)
{
    struct registering *registering = conn_registered(letter);
    const struct tl_registration *registration = &registering->registration;
    struct request *request = registering->owner;
    struct tl_conn *conn = request->conn;
    struct tl_error error;
    conn->held_count--;
    request->is_registering = false;
    if (registration->error.code == TL_OK) request->pin = registration->pin;
    if (conn->is_drained) {
        finish(request);
    } else if (registration->error.code == TL_OK || request->is_cancelled) {
        handle(request, EVENT_READY);
    } else if (!use_proxy(request, NULL, &error)) {
        fail(request, &registration->error);
    }
    free(registering);
}

static void register_destination(struct request *request)
{
    struct tl_conn *conn = request->conn;
    request->is_registering = conn_register(conn, conn->memory, request, request->kept, TL_REGION_WRITE, registered);
    if (!request->is_registering) fail(request, &out_of_memory);
}

/* Decides where the bytes go until they are in the destination. */
static void prepare_memory(struct request *request)
{
    struct tl_conn *conn = request->conn;
    struct tl_tensor *destination = request->fetch->destination;
    struct tl_error error;
    request->kept = tl_tensor_get(destination);
    if (conn->engine->options.is_bounce_forced) {
        if (!use_proxy(request, NULL, &error)) fail(request, &error);
    } else if (tl_memory_pin(conn->memory, destination, TL_REGION_WRITE, &request->pin)) {
        handle(request, EVENT_READY);
    } else if (!conn_is_small(conn, destination) || !use_proxy(request, NULL, &error)) {
        register_destination(request);
    }
}

enum placing {
    PLACING_DONE,
    PLACING_WAITS, /* room_came follows */
    PLACING_FAILED,
};

/* Makes the destination for the expected meta-data, in the room if it is the engine's to choose. PLACING_FAILED: not
 * possible, with the reason. */
static enum placing place(struct request *request, struct tl_room *room, struct tl_error *ret_error)
{
    struct tl_conn *conn = request->conn;
    struct tl_fetch *fetch = request->fetch;
    const struct tl_meta_cached *expected = &request->expected;
    /* The number only tells values apart when a transfer is resumed, which this transport never does. */
    uint64_t step = expected->is_published ? expected->step : fetch->step;
    conn->placing_room = room;
    conn->placing_bytes = 0;
    if (tl_fetch_begin(fetch, &expected->meta_data, 1, step, 0, ret_error) == TL_OK) return PLACING_DONE;
    if (conn->placing_bytes == 0) return PLACING_FAILED;
    return await_room(request, conn->placing_bytes, ret_error) ? PLACING_WAITS : PLACING_FAILED;
}

/* ------------------------------------------------------------------------------------------------------- asking -- */

static void remember(struct request *request)
{
    tl_meta_cache_put(request->conn->cache, request->fetch->key, &request->expected);
}

static bool take_cancel(struct request *request)
{
    struct tl_conn *conn = request->conn;
    conn_post_message(conn, conn_compose(conn, TL_MESSAGE_CANCEL, request->handle), NULL);
    return false;
}

/* Perhaps there is a window for the one that has waited for one longest. */
static void try_next_window(struct tl_engine *engine)
{
    struct tl_list *place = tl_list_pop_front(&engine->windows);
    if (place == NULL) return;
    struct turn *turn = TL_CONTAINER_OF(place, struct turn, place);
    conn_want_turn(TL_CONTAINER_OF(turn, struct request, turn)->conn, turn);
}

static void exposure_over(struct request *request)
{
    struct tl_engine *engine = request->conn->engine;
    if (!request->is_exposed) return;
    request->is_exposed = false;
    engine->exposures_count--;
    try_next_window(engine);
}

/* False: there is no window now, or never. */
static bool expose(struct request *request)
{
    struct tl_engine *engine = request->conn->engine;
    struct tl_error error;
    if (tl_queue_pair_expose(request->conn->pair, request->pin.region, request->pin.address,
                             request->expected.meta_data.size_bytes, &request->exposure, &error) == TL_OK) {
        request->is_exposed = true;
        engine->exposures_count++;
        try_next_window(engine);
        return true;
    }
    if (error.code == TL_RESOURCE_EXHAUSTED && engine->exposures_count > 0) {
        tl_list_push_front(&engine->windows, &request->turn.place);
    } else {
        fail(request, &error);
    }
    return false;
}

static bool take_turn(struct turn *turn)
{
    struct request *request = TL_CONTAINER_OF(turn, struct request, turn);
    struct tl_conn *conn = request->conn;
    const struct tl_fetch *fetch = request->fetch;
    if (request->state == REQUEST_CANCELLING) return take_cancel(request);
    if (request->pin.address != NULL && !expose(request)) return false;
    struct tl_message *message;
    if (!request->is_asked) {
        message = conn_compose(conn, TL_MESSAGE_REQUEST, request->handle);
        message->number = fetch->id.number;
        message->step = fetch->step;
        message->expected_step =
            request->has_meta_data && request->expected.is_published ? request->expected.step : fetch->step;
        message->key = fetch->key;
        message->has_checksum = fetch->wants_checksum;
        message->has_meta_data = request->has_meta_data;
        message->meta_data = request->expected.meta_data;
    } else {
        message = conn_compose(conn, TL_MESSAGE_RE_REQUEST, request->handle);
    }
    if (request->pin.address != NULL) message->destination = request->exposure.descriptor;
    conn_post_message(conn, message, NULL);
    request->is_asked = true;
    request->fetch->is_unsettled = false; /* the last word comes, or the connection breaks */
    request->is_place_told = request->pin.address != NULL;
    request->sent_slot = conn->slots_used;
    handle(request, EVENT_SENT);
    return false;
}

static void want_turn(struct request *request)
{
    conn_want_turn(request->conn, &request->turn);
}

/* It wants no turn, and leaves the window that it may have been woken for to the next one. */
static void leave_queue(struct request *request)
{
    tl_list_remove(&request->turn.place);
    try_next_window(request->conn->engine);
}

static void sent(struct request *request)
{
    conn_watch(request->conn);
}

/* ------------------------------------------------------------------------------------------------------ revoking -- */

static void revoke_done(struct tl_work *work, enum tl_status status)
{
    struct request *request = TL_CONTAINER_OF(work, struct request, revoke_work);
    request->is_revoke_posted = false;
    /* Flushed: only when the queue pair is drained is it certain that nobody writes any more. */
    if (status != TL_OK) return;
    conn_room_free(request->conn);
    exposure_over(request);
    handle(request, EVENT_REVOKED);
}

static bool take_revoke(struct turn *turn)
{
    struct request *request = TL_CONTAINER_OF(turn, struct request, revoke);
    struct tl_conn *conn = request->conn;
    request->is_revoke_posted = true;
    conn->pair->ops->revoke(conn->pair, &request->exposure, &request->revoke_work);
    return false;
}

/* Sees to it that nobody can write the memory. */
static void start_revoke(struct request *request)
{
    struct tl_conn *conn = request->conn;
    leave_queue(request);
    tl_timers_disarm(tl_reactor_timers(conn->engine->reactor), &request->cancel_timer);
    if (!request->is_exposed) {
        handle(request, EVENT_REVOKED);
    } else if (conn->engine->options.keys == TL_KEYS_REGION) {
        conn->pair->ops->revoke(conn->pair, &request->exposure, NULL);
        exposure_over(request);
        handle(request, EVENT_REVOKED);
    } else if (!request->is_revoke_posted) {
        conn_want_room(conn, &request->revoke);
    }
}

static void finish(struct request *request)
{
    request->state = REQUEST_FINISHED;
    tl_list_push_back(&request->conn->finished, &request->place);
    conn_pump_later(request->conn);
}

/* ------------------------------------------------------------------------------------------------------ answers -- */

static void cancel_timeout(struct tl_timer *timer)
{
    struct request *request = TL_CONTAINER_OF(timer, struct request, cancel_timer);
    struct tl_conn *conn = request->conn;
    struct tl_error reason;
    if (conn->state == CONN_CLOSING) return;
    tl_error_set(&reason, TL_UNAVAILABLE, "%s has not answered the cancel of %s in time", conn->peer.name,
                 request->fetch->key);
    conn->engine->stats.connections_broken++;
    tl_conn_close(conn, &reason);
}

static void start_cancel(struct request *request)
{
    struct tl_conn *conn = request->conn;
    leave_queue(request);
    want_turn(request);
    int64_t due_ns = tl_clock_deadline_ns(conn->engine->options.cancel_ns);
    if (tl_timers_arm(tl_reactor_timers(conn->engine->reactor), &request->cancel_timer, due_ns) != TL_OK) {
        tl_conn_close(conn, &out_of_memory);
    }
}

static void set_given_up(struct request *request)
{
    struct tl_error error;
    tl_error_set(&error, TL_CANCELLED, "%s was given up", request->fetch->key);
    set_result(request, &error);
}

static void give_up(struct request *request)
{
    set_given_up(request);
    request->state = REQUEST_REVOKING;
    start_revoke(request);
}

/* Cancelled before the peer knows of it: nobody can write. */
static void cancel_unasked(struct request *request)
{
    if (request->is_asked) {
        request->state = REQUEST_CANCELLING;
        start_cancel(request);
    } else {
        give_up(request);
    }
}

static void set_given_up_waiting(struct request *request)
{
    struct tl_memory_stats stats;
    struct tl_error error;
    tl_memory_get_stats(request->conn->memory, &stats);
    tl_error_set(&error, TL_RESOURCE_EXHAUSTED,
                 "it waited for %" PRIu64 " bytes of the pool, of which %" PRIu64 " of %" PRIu64
                 " are in use; release received tensors sooner, or raise its maximum (verbs.max_pool)",
                 request->room->room.wait.len_bytes, stats.pool_used_bytes, stats.pool_bytes);
    set_result(request, &error);
}

static void cancel_preparing(struct request *request)
{
    bool is_waiting = request->room != NULL;
    if (is_waiting) {
        set_given_up_waiting(request);
    } else {
        set_given_up(request);
    }
    request->is_cancelled = true;
    conn_leave_room(&request->room);
    if (is_waiting && request->room == NULL) handle(request, EVENT_READY);
}

static void ready(struct request *request)
{
    if (request->is_cancelled) {
        cancel_unasked(request);
    } else {
        want_turn(request);
    }
}

/* In the room (NULL: in what is free). */
static void place_and_prepare(struct request *request, struct tl_room *room)
{
    struct tl_error error;
    switch (place(request, room, &error)) {
    case PLACING_DONE:
        prepare_memory(request);
        break;
    case PLACING_WAITS:
        break;
    case PLACING_FAILED:
        fail(request, &error); /* the peer may keep the value until it hears from us */
        break;
    }
}

/* The memory of the first attempt was exposed in vain. */
static void prepare_again(struct request *request)
{
    release_memory(request);
    place_and_prepare(request, NULL);
}

static void room_came(struct tl_letter *letter)
{
    struct room_wait *room = conn_room_came(letter);
    struct request *request = room->owner;
    struct tl_error error;
    request->room = NULL;
    if (request->conn->is_drained) {
        finish(request);
    } else if (request->is_cancelled) {
        handle(request, EVENT_READY);
    } else if (room->room.wait.error.code != TL_OK) {
        fail(request, &room->room.wait.error);
    } else if (request->kept == NULL) {
        place_and_prepare(request, &room->room);
    } else if (!use_proxy(request, room, &error)) {
        fail(request, &error);
    }
    conn_drop_room(&room);
}

/* One table for all that may happen. A NULL action: nothing to do. `next` is where it goes before the action runs;
 * REQUEST_STATES: what the peer may not say then. */
struct transition {
    enum request_state next;
    void (*action)(struct request *request);
};

#define NEVER                                                                                                          \
    {                                                                                                                  \
        REQUEST_STATES, NULL                                                                                           \
    }

/* clang-format off */
static const struct transition transitions[REQUEST_FINISHED][REQUEST_EVENTS] = {
    [REQUEST_PREPARING] = {
        [EVENT_READY] = {REQUEST_QUEUED, ready},
        [EVENT_SENT] = NEVER,
        [EVENT_META_DATA] = NEVER,
        [EVENT_COMPLETE] = NEVER,
        [EVENT_STATUS] = NEVER,
        [EVENT_FAILED] = {REQUEST_CANCELLING, cancel_unasked},
        [EVENT_CANCEL] = {REQUEST_PREPARING, cancel_preparing},
        [EVENT_CANCELLED] = NEVER,
        [EVENT_REVOKED] = NEVER,
    },
    [REQUEST_QUEUED] = {
        [EVENT_READY] = NEVER,
        [EVENT_SENT] = {REQUEST_ASKED, sent},
        [EVENT_META_DATA] = NEVER,
        [EVENT_COMPLETE] = NEVER,
        [EVENT_STATUS] = NEVER,
        [EVENT_FAILED] = {REQUEST_CANCELLING, cancel_unasked},
        [EVENT_CANCEL] = {REQUEST_CANCELLING, cancel_unasked},
        [EVENT_CANCELLED] = NEVER,
        [EVENT_REVOKED] = NEVER,
    },
    [REQUEST_ASKED] = {
        [EVENT_READY] = NEVER,
        [EVENT_SENT] = NEVER,
        [EVENT_META_DATA] = {REQUEST_RENEWING, start_revoke},
        [EVENT_COMPLETE] = {REQUEST_REVOKING, start_revoke},
        [EVENT_STATUS] = {REQUEST_REVOKING, start_revoke},
        [EVENT_FAILED] = NEVER,
        [EVENT_CANCEL] = {REQUEST_CANCELLING, start_cancel},
        [EVENT_CANCELLED] = NEVER,
        [EVENT_REVOKED] = NEVER,
    },
    [REQUEST_RENEWING] = {
        [EVENT_READY] = NEVER,
        [EVENT_SENT] = NEVER,
        [EVENT_META_DATA] = NEVER,
        [EVENT_COMPLETE] = NEVER,
        [EVENT_STATUS] = NEVER,
        [EVENT_FAILED] = NEVER,
        [EVENT_CANCEL] = {REQUEST_CANCELLING, start_cancel},
        [EVENT_CANCELLED] = NEVER,
        [EVENT_REVOKED] = {REQUEST_PREPARING, prepare_again},
    },
    [REQUEST_CANCELLING] = {
        [EVENT_READY] = NEVER,
        [EVENT_SENT] = NEVER,
        [EVENT_META_DATA] = {REQUEST_CANCELLING, NULL},
        [EVENT_COMPLETE] = {REQUEST_REVOKING, start_revoke},
        [EVENT_STATUS] = {REQUEST_REVOKING, start_revoke},
        [EVENT_FAILED] = NEVER,
        [EVENT_CANCEL] = {REQUEST_CANCELLING, NULL},
        [EVENT_CANCELLED] = {REQUEST_REVOKING, give_up},
        [EVENT_REVOKED] = {REQUEST_CANCELLING, NULL},
    },
    [REQUEST_REVOKING] = {
        [EVENT_READY] = NEVER,
        [EVENT_SENT] = NEVER,
        [EVENT_META_DATA] = NEVER,
        [EVENT_COMPLETE] = NEVER,
        [EVENT_STATUS] = NEVER,
        [EVENT_FAILED] = NEVER,
        [EVENT_CANCEL] = {REQUEST_REVOKING, NULL},
        [EVENT_CANCELLED] = {REQUEST_REVOKING, NULL},
        [EVENT_REVOKED] = {REQUEST_FINISHED, finish},
    },
};
/* clang-format on */

static void handle(struct request *request, enum request_event event)
{
    if (request->state == REQUEST_FINISHED) return;
    const struct transition *transition = &transitions[request->state][event];
    if (transition->next == REQUEST_STATES) {
        conn_protocol_error(request->conn, "an answer that does not fit the state of its request (%d, %d)",
                            (int)request->state, (int)event);
        return;
    }
    request->state = transition->next;
    if (transition->action != NULL) transition->action(request);
}

/* -------------------------------------------------------------------------------------------------- from the peer --
 */

static struct request *find(struct tl_conn *conn, uint32_t handle_)
{
    uint32_t index = tl_handle_index(handle_);
    struct request *request = index < conn->request_count ? conn->requests[index] : NULL;
    if (request != NULL && request->handle == handle_) return request;
    conn->engine->stats.late_answers++;
    return NULL;
}

static void handle_meta_data(struct request *request, const struct tl_message *message)
{
    struct tl_conn *conn = request->conn;
    conn->engine->stats.meta_data_updates++;
    if (!message->has_meta_data || message->meta_data.size_bytes == 0) {
        conn_protocol_error(conn, "a META_DATA_UPDATE of %s without bytes", request->fetch->key);
        return;
    }
    if (request->received_bytes > 0) {
        conn_protocol_error(conn, "a META_DATA_UPDATE of %s in the middle of its bytes", request->fetch->key);
        return;
    }
    if (request->state == REQUEST_ASKED) {
        request->is_place_told = false;
        request->expected = (struct tl_meta_cached){
            .meta_data = message->meta_data, .step = message->step, .is_published = message->is_published};
        request->has_meta_data = true;
        remember(request);
    }
    handle(request, EVENT_META_DATA);
}

/* A value that has no bytes: dead, or of zero size. It is not remembered: it needs no memory, and the next value that
 * does is more likely to be like the last one that did. */
static void handle_empty(struct request *request, const struct tl_message *message)
{
    if (message->meta_data.size_bytes > 0 || request->received_bytes > 0) {
        conn_protocol_error(request->conn, "a DONE of %s, of which bytes are missing", request->fetch->key);
        return;
    }
    /* One that was given up has its value all the same if it comes first. */
    bool is_wanted = request->state == REQUEST_ASKED || request->state == REQUEST_CANCELLING;
    if (is_wanted && request->result == NULL) {
        struct tl_error error;
        request->expected = (struct tl_meta_cached){
            .meta_data = message->meta_data, .step = message->step, .is_published = message->is_published};
        request->has_meta_data = true;
        if (place(request, NULL, &error) != PLACING_DONE) set_result(request, &error);
    }
    request->has_checksum = message->has_checksum;
    request->checksum = message->checksum;
    handle(request, EVENT_COMPLETE);
}

static void handle_done(struct request *request, const struct tl_message *message)
{
    if (message->has_meta_data) {
        handle_empty(request, message);
        return;
    }
    bool is_whole = request->received_bytes > 0 && request->received_bytes == request->expected.meta_data.size_bytes;
    if (!is_whole || !request->is_told) {
        conn_protocol_error(request->conn, "a DONE of %s, of which bytes are missing", request->fetch->key);
        return;
    }
    request->expected.step = message->step;
    request->expected.is_published = message->is_published;
    request->fetch->offer_step = message->step;
    remember(request);
    request->has_checksum = message->has_checksum;
    request->checksum = message->checksum;
    handle(request, EVENT_COMPLETE);
}

void requests_message(struct tl_conn *conn, const struct tl_message *message)
{
    struct request *request = find(conn, message->handle);
    if (request == NULL) return;
    conn_shows(conn, request->sent_slot);
    switch (message->type) {
    case TL_MESSAGE_META_DATA_UPDATE:
        handle_meta_data(request, message);
        break;
    case TL_MESSAGE_DONE:
        handle_done(request, message);
        break;
    case TL_MESSAGE_ERROR_STATUS: {
        struct tl_error error;
        tl_error_set(&error, message->code, "%s", message->text);
        request->fetch->is_final = message->is_final;
        set_result(request, &error);
        handle(request, EVENT_STATUS);
        break;
    }
    default:
        handle(request, EVENT_CANCELLED);
        break;
    }
}

void requests_immediate(struct tl_conn *conn, uint32_t immediate, uint64_t len_bytes)
{
    struct request *request = find(conn, immediate & TL_HANDLE_MASK);
    if (request == NULL) return;
    conn_shows(conn, request->sent_slot);
    bool is_awaited =
        request->is_place_told && (request->state == REQUEST_ASKED || request->state == REQUEST_CANCELLING);
    uint64_t left_bytes = request->expected.meta_data.size_bytes - request->received_bytes;
    if (!is_awaited || len_bytes == 0 || len_bytes > left_bytes) {
        conn_protocol_error(conn, "%" PRIu64 " bytes of %s, of which %" PRIu64 " are expected", len_bytes,
                            request->fetch->key, is_awaited ? left_bytes : 0);
        return;
    }
    request->received_bytes += len_bytes;
    request->is_source_bounced |= (immediate & TL_IMMEDIATE_BOUNCED) != 0;
    request->is_told |= (immediate & TL_IMMEDIATE_TOLD) != 0;
    if (len_bytes == left_bytes && !request->is_told) handle(request, EVENT_COMPLETE);
}

/* --------------------------------------------------------------------------------------------- beginning and end -- */

/* The transport_state of a fetch that was cancelled before it had a request. */
static char given_up;

static bool begin(struct tl_conn *conn, struct tl_fetch *fetch)
{
    struct request *request = tl_alloc_zeroed(sizeof(*request));
    if (request == NULL) return false;
    uint32_t index = conn->free_indexes[--conn->free_count];
    request->conn = conn;
    request->fetch = fetch;
    request->handle = tl_handle(index, conn->generations[index]);
    request->turn.take = take_turn;
    request->revoke.take = take_revoke;
    request->revoke_work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = revoke_done};
    request->cancel_timer.fire = cancel_timeout;
    tl_list_init(&request->place);
    tl_list_init(&request->turn.place);
    tl_list_init(&request->revoke.place);
    conn->requests[index] = request;
    fetch->transport_state = request;
    /* Nobody waits for room who has some: of what is copied through the pool, nothing else lies there. */
    fetch->allocator = conn->engine->options.is_bounce_forced ? NULL : &conn->allocator;
    tl_fetch_restart(fetch);
    request->has_meta_data = tl_meta_cache_find(conn->cache, fetch->key, &request->expected);
    if (!request->has_meta_data || request->expected.meta_data.size_bytes == 0) {
        handle(request, EVENT_READY);
        return true;
    }
    switch (place(request, NULL, NULL)) {
    case PLACING_DONE:
        prepare_memory(request);
        break;
    case PLACING_WAITS:
        break;
    case PLACING_FAILED:
        /* What came last time does not fit the caller's destination; what comes now may. */
        request->has_meta_data = false;
        handle(request, EVENT_READY);
        break;
    }
    return true;
}

void requests_begin(struct tl_conn *conn)
{
    while (!tl_list_is_empty(&conn->waiting) && conn->free_count > 0) {
        if (conn->request_count - conn->free_count >= conn->peer_request_count) return;
        struct tl_fetch *fetch = TL_CONTAINER_OF(tl_list_pop_front(&conn->waiting), struct tl_fetch, transport_link);
        if (!begin(conn, fetch)) tl_list_push_back(&conn->refused, &fetch->transport_link);
    }
}

void tl_conn_fetch(struct tl_conn *conn, struct tl_fetch *fetch)
{
    fetch->transport_state = NULL;
    fetch->is_final = false;
    tl_list_push_back(conn->state == CONN_UP ? &conn->waiting : &conn->refused, &fetch->transport_link);
    conn_pump_later(conn);
}

void tl_conn_cancel(struct tl_conn *conn, struct tl_fetch *fetch)
{
    if (fetch->transport_state == &given_up) return;
    if (fetch->transport_state != NULL) {
        handle(fetch->transport_state, EVENT_CANCEL);
        return;
    }
    tl_list_remove(&fetch->transport_link);
    fetch->transport_state = &given_up;
    tl_list_push_back(&conn->refused, &fetch->transport_link);
    conn_pump_later(conn);
}

/* All bytes are in the destination or its proxy. */
static enum tl_status complete(struct request *request, struct tl_error *ret_error)
{
    struct tl_engine *engine = request->conn->engine;
    struct tl_fetch *fetch = request->fetch;
    uint64_t size_bytes = request->received_bytes;
    bool is_bounced = request->proxy != NULL || request->is_source_bounced;
    bool is_string = fetch->meta_data.dtype == TL_STRING;
    fetch->path = is_string ? TL_PATH_SERIALIZED : is_bounced ? TL_PATH_BOUNCE : TL_PATH_ZERO_COPY;
    if (size_bytes > 0) {
        void *address;
        enum tl_status status = tl_fetch_next(fetch, size_bytes, &address, ret_error);
        if (status != TL_OK) return status;
        if (request->proxy != NULL) {
            memcpy(address, tl_tensor_data(request->proxy), (size_t)size_bytes);
            engine->stats.bytes_bounced += size_bytes;
            tl_memory_count_bounce(engine->memory, size_bytes);
        }
        tl_fetch_advance(fetch, size_bytes);
    } else {
        fetch->path = TL_PATH_NONE;
    }
    return tl_fetch_verify(fetch, request->has_checksum, request->checksum, ret_error);
}

static void request_free(struct request *request)
{
    struct tl_conn *conn = request->conn;
    uint32_t index = tl_handle_index(request->handle);
    release_memory(request);
    tl_timers_disarm(tl_reactor_timers(conn->engine->reactor), &request->cancel_timer);
    tl_list_remove(&request->turn.place);
    tl_list_remove(&request->revoke.place);
    conn->requests[index] = NULL;
    conn->generations[index]++;
    conn->free_indexes[conn->free_count++] = (uint16_t)index;
    if (request->result != &out_of_memory) free(request->result);
    free(request);
}

static void tell(struct request *request)
{
    struct tl_fetch *fetch = request->fetch;
    struct tl_error result;
    result.code = TL_OK;
    result.message[0] = '\0';
    if (request->result != NULL) {
        result = *request->result;
    } else if (complete(request, &result) == TL_OK) {
        result.code = TL_OK;
        request->conn->engine->stats.tensors_received++;
    }
    request_free(request);
    fetch->allocator = NULL;
    fetch->transport_state = NULL;
    fetch->ops->done(fetch, &result);
}

void requests_tell(struct tl_conn *conn)
{
    struct tl_list *place;
    /* Each leaves a handle for a fetch that waits. */
    if (!tl_list_is_empty(&conn->finished) && !tl_list_is_empty(&conn->waiting)) conn_pump_later(conn);
    while ((place = tl_list_pop_front(&conn->finished)) != NULL)
        tell(TL_CONTAINER_OF(place, struct request, place));
    while ((place = tl_list_pop_front(&conn->refused)) != NULL) {
        struct tl_fetch *fetch = TL_CONTAINER_OF(place, struct tl_fetch, transport_link);
        struct tl_error error;
        if (fetch->transport_state != NULL) {
            tl_error_set(&error, TL_CANCELLED, "%s was given up", fetch->key);
        } else if (conn->state == CONN_UP) {
            error = out_of_memory;
        } else {
            tl_error_set(&error, TL_UNAVAILABLE, "%s: the data connection is closed", conn->peer.name);
        }
        fetch->transport_state = NULL;
        fetch->ops->done(fetch, &error);
    }
}

void requests_break(struct tl_conn *conn)
{
    struct tl_error error = conn->close_reason;
    error.code = TL_UNAVAILABLE;
    if (conn->close_reason.code == TL_OK) {
        tl_error_set(&error, TL_UNAVAILABLE, "%s has closed the data connection", conn->peer.name);
    }
    tl_list_splice_back(&conn->refused, &conn->waiting);
    for (uint32_t i = 0; i < conn->request_count; i++) {
        struct request *request = conn->requests[i];
        if (request == NULL || request->state == REQUEST_FINISHED) continue;
        if (request->state == REQUEST_CANCELLING) set_given_up(request);
        if (request->state != REQUEST_REVOKING) set_result(request, &error);
        if (request->state != REQUEST_REVOKING && request->is_asked) request->fetch->is_unsettled = true;
        exposure_over(request);
        conn_leave_room(&request->room);
        if (!request->is_registering && request->room == NULL) finish(request);
    }
}

bool requests_are_over(const struct tl_conn *conn)
{
    return conn->free_count == conn->request_count && tl_list_is_empty(&conn->waiting) &&
           tl_list_is_empty(&conn->refused);
}
