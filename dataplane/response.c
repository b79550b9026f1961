// SPDX-License-Identifier: Apache-2.0
/*
 * What the peer asks: one response per request, from REQUEST to the end of its serve.
 *
 * Happy path: the source answers with a tensor whose meta-data is the one that the request expects; its bytes are
 * written from where they lie into the peer's memory, piece by piece, each with the request's handle as immediate; when
 * the last write is done the peer has them. Meta-data that differs is told first, the tensor is kept, and RE_REQUEST
 * says where to write. A value without bytes, a checksum, and the step of a published value that the peer cannot know
 * are told with a DONE.
 *
 * Failure modes: a status is told whole. Memory that is not registered is registered if it is large, else copied
 * through the pool, for whose room it waits; so is what cannot be registered. A cancelled response writes nothing more,
 * and says CANCELLED when what was posted is done. When the connection ends, serves end as broken once the queue pair
 * is drained: the source keeps what was reserved for the asker, who may come back.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/error.h"
#include "dataplane/conn_internal.h"

/* Of a tensor that is copied through the pool, in one write; and how many of them are under way. */
#define BOUNCE_PIECE_BYTES (256 * 1024)
#define MAX_BOUNCES 4

/*
 *   WAITING --offer fits--> PREPARING --memory is there--> WRITING --all written, all told--> (closed, freed)
 *      |  \--offer differs--> PARKED --RE_REQUEST--> PREPARING
 *      \--status, or no bytes--> TELLING --told--> (closed, freed)
 *   WAITING, PARKED, PREPARING, WRITING --cancel--> STOPPING --nothing under way--> (closed, CANCELLED told)
 */
enum response_state {
    RESPONSE_WAITING,   /* for the source's reply */
    RESPONSE_PARKED,    /* META_DATA_UPDATE is queued or sent; waits for RE_REQUEST */
    RESPONSE_PREPARING, /* for the slow worker to register the source tensor */
    RESPONSE_WRITING,   /* for its turns, for what it has posted, or for room in the pool */
    RESPONSE_TELLING,   /* for its turn to send its only message, and for that to be done */
    RESPONSE_STOPPING,  /* cancelled: for what is under way */
    RESPONSE_STATES,
};

enum response_event {
    EVENT_STATUS,     /* the source's reply is a status */
    EVENT_EMPTY,      /* is a value without bytes */
    EVENT_FITS,       /* is what the request expects */
    EVENT_DIFFERS,    /* is not */
    EVENT_RE_REQUEST, /* the peer has memory for it now */
    EVENT_READY,      /* the source tensor can be read */
    EVENT_WORK_DONE,  /* something posted is over */
    EVENT_CANCEL,     /* the peer gives up */
    RESPONSE_EVENTS,
};

struct response;

/* A write under way. */
struct piece {
    struct tl_work work;
    struct response *response;
    struct tl_tensor *block; /* in the pool, what it is copied to; NULL: written from the tensor itself */
    struct tl_pin pin;
};

struct response {
    struct tl_conn *conn;
    struct tl_serve serve;
    enum response_state state;
    uint32_t handle;
    struct turn turn;
    bool is_refused; /* the source never saw it */
    bool wants_checksum;
    bool has_meta_data; /* expected by the peer */
    struct tl_meta_data expected;
    uint64_t expected_step;
    struct tl_descriptor destination;

    struct tl_offer offer; /* holds the tensor's reference */
    bool is_update_wanted; /* PARKED: META_DATA_UPDATE has not been posted */
    bool is_registering;
    struct tl_pin pin;
    bool is_bounced;
    struct room_wait *room;    /* the next piece waits for that; NULL: it does not */
    struct room_wait *granted; /* it has come; NULL: none */
    uint64_t posted_bytes;
    unsigned pieces_out;
    struct piece first_piece; /* the rest is allocated */
    bool is_first_piece_used;
    bool is_done_wanted; /* a DONE follows the bytes */
    bool is_told;        /* DONE or ERROR_STATUS is posted */
    bool is_message_out;
    struct tl_work message_work;
    bool is_flushed; /* something posted did not arrive for certain */
    struct tl_error *status;

    struct response *next; /* in its list of conn->responses */
    char key[];
};

/* CANCELLED for a request that is over, or that we never saw. */
struct notice {
    struct turn turn;
    struct tl_conn *conn;
    uint32_t handle;
};

static const struct tl_error out_of_memory = {.code = TL_RESOURCE_EXHAUSTED, .message = "no memory for a request"};

static void handle(struct response *response, enum response_event event);

/* ---------------------------------------------------------------------------------------------------------- end -- */

/* What points at the response with this handle, or ends the list that it would be in. */
static struct response **find_place(struct tl_conn *conn, uint32_t handle_)
{
    struct response **place = &conn->responses[tl_handle_index(handle_) & (conn->response_places - 1)];
    while (*place != NULL && (*place)->handle != handle_)
        place = &(*place)->next;
    return place;
}

static void response_close(struct response *response, enum tl_serve_end end)
{
    struct tl_conn *conn = response->conn;
    struct tl_engine *engine = conn->engine;
    struct response **place = find_place(conn, response->handle);
    TL_CHECK(*place == response);
    *place = response->next;
    conn->response_count--;
    tl_list_remove(&response->turn.place);
    conn_drop_room(&response->granted);
    tl_memory_unpin(engine->memory, &response->pin);
    tl_tensor_put(response->offer.tensor);
    if (!response->is_refused) engine->source->closed(engine->source_context, &response->serve, end);
    if (response->status != &out_of_memory) free(response->status);
    free(response);
    conn_pump_later(conn);
}

/* What a peer may have open: responses live a little longer than the requests they answer. */
static uint32_t most_responses(const struct tl_conn *conn)
{
    return 2 * conn->engine->options.request_count + conn->engine->options.slot_count;
}

static bool take_notice(struct turn *turn)
{
    struct notice *notice = TL_CONTAINER_OF(turn, struct notice, turn);
    struct tl_conn *conn = notice->conn;
    conn_post_message(conn, conn_compose(conn, TL_MESSAGE_CANCELLED, notice->handle), NULL);
    conn->notice_count--;
    free(notice);
    return false;
}

static void tell_cancelled(struct tl_conn *conn, uint32_t handle_)
{
    /* Who cancels what it has not asked for, and gives no slots back, is not answered without end. */
    if (conn->notice_count >= most_responses(conn)) {
        conn_protocol_error(conn, "more CANCELs than requests");
        return;
    }
    struct notice *notice = calloc(1, sizeof(*notice));
    if (notice == NULL) {
        tl_conn_close(conn, &out_of_memory);
        return;
    }
    notice->turn.take = take_notice;
    tl_list_init(&notice->turn.place);
    notice->conn = conn;
    notice->handle = handle_;
    conn_want_turn(conn, &notice->turn);
    conn->notice_count++;
    /* A connection that is closing takes no turns. */
    if (!tl_list_is_linked(&notice->turn.place)) {
        conn->notice_count--;
        free(notice);
    }
}

static bool is_all_written(const struct response *response)
{
    bool has_bytes = response->offer.tensor != NULL;
    return has_bytes && response->posted_bytes == tl_tensor_size_bytes(response->offer.tensor) &&
           (!response->is_done_wanted || response->is_told);
}

static bool is_anything_out(const struct response *response)
{
    return response->pieces_out > 0 || response->is_message_out || response->is_registering || response->room != NULL;
}

/* Something is over: perhaps that was all. A queue pair that has flushed anything is about to be drained, and what is
 * open then ends as broken. */
static void maybe_over(struct response *response)
{
    if (is_anything_out(response) || response->is_flushed) return;
    if (!is_all_written(response)) return;
    response->conn->engine->stats.tensors_sent++;
    response_close(response, TL_SERVE_RECEIVED);
}

static void maybe_stopped(struct response *response)
{
    if (is_anything_out(response) || response->is_flushed) return;
    struct tl_conn *conn = response->conn;
    uint32_t handle_ = response->handle;
    response_close(response, is_all_written(response) ? TL_SERVE_RECEIVED : TL_SERVE_CANCELLED);
    tell_cancelled(conn, handle_);
}

static void told(struct response *response)
{
    if (is_anything_out(response) || !response->is_told || response->is_flushed) return;
    if (response->status == NULL) response->conn->engine->stats.tensors_sent++;
    response_close(response, TL_SERVE_RECEIVED);
}

static void stop(struct response *response)
{
    tl_list_remove(&response->turn.place);
    conn_leave_room(&response->room);
    maybe_stopped(response);
}

/* ------------------------------------------------------------------------------------------------------ posting -- */

static void message_done(struct tl_work *work, enum tl_status status)
{
    struct response *response = TL_CONTAINER_OF(work, struct response, message_work);
    response->is_message_out = false;
    response->is_flushed |= status != TL_OK;
    conn_room_free(response->conn);
    handle(response, EVENT_WORK_DONE);
}

static void piece_done(struct tl_work *work, enum tl_status status)
{
    struct piece *piece = TL_CONTAINER_OF(work, struct piece, work);
    struct response *response = piece->response;
    struct tl_conn *conn = response->conn;
    conn_block_destroy(conn->engine->memory, &piece->block, &piece->pin);
    if (piece == &response->first_piece) {
        response->is_first_piece_used = false;
    } else {
        free(piece);
    }
    response->pieces_out--;
    response->is_flushed |= status != TL_OK;
    if (status == TL_OK) conn_heard(conn);
    conn_room_free(conn);
    handle(response, EVENT_WORK_DONE);
}

static struct piece *piece_create(struct response *response)
{
    struct piece *piece;
    if (response->is_first_piece_used) {
        piece = calloc(1, sizeof(*piece));
        if (piece == NULL) return NULL;
    } else {
        piece = &response->first_piece;
        response->is_first_piece_used = true;
    }
    *piece = (struct piece){.work = {.magic = TL_WORK_MAGIC, .done = piece_done}, .response = response};
    return piece;
}

static void piece_destroy(struct response *response, struct piece *piece)
{
    if (piece == &response->first_piece) {
        response->is_first_piece_used = false;
    } else {
        free(piece);
    }
}

static void set_status(struct response *response, const struct tl_error *status)
{
    if (response->status != NULL) return;
    response->status = malloc(sizeof(*response->status));
    if (response->status != NULL) {
        *response->status = *status;
    } else {
        response->status = (struct tl_error *)&out_of_memory;
    }
}

static void post_told(struct response *response, const struct tl_message *message)
{
    response->is_told = true;
    response->is_message_out = true;
    response->message_work = (struct tl_work){.magic = TL_WORK_MAGIC, .done = message_done};
    conn_post_message(response->conn, message, &response->message_work);
}

static void post_error(struct response *response)
{
    struct tl_message *message = conn_compose(response->conn, TL_MESSAGE_ERROR_STATUS, response->handle);
    message->code = response->status->code;
    message->text = response->status->message;
    message->is_final = response->serve.is_final;
    post_told(response, message);
}

static void post_done(struct response *response)
{
    const struct tl_offer *offer = &response->offer;
    struct tl_message *message = conn_compose(response->conn, TL_MESSAGE_DONE, response->handle);
    message->step = offer->step;
    message->is_published = !offer->is_one_shot;
    if (tl_tensor_size_bytes(offer->tensor) == 0) {
        message->has_meta_data = true;
        message->meta_data = *tl_tensor_meta_data(offer->tensor);
    }
    if (response->wants_checksum) {
        message->has_checksum = true;
        message->checksum = XXH3_64bits(tl_tensor_data(offer->tensor), (size_t)tl_tensor_size_bytes(offer->tensor));
    }
    post_told(response, message);
}

static void post_update(struct response *response)
{
    const struct tl_offer *offer = &response->offer;
    struct tl_message *message = conn_compose(response->conn, TL_MESSAGE_META_DATA_UPDATE, response->handle);
    message->step = offer->step;
    message->is_published = !offer->is_one_shot;
    message->has_meta_data = true;
    message->meta_data = *tl_tensor_meta_data(offer->tensor);
    conn_post_message(response->conn, message, NULL);
    response->is_update_wanted = false;
}

static void room_came(struct tl_letter *letter);

/* Copies the piece into the pool. Errors: TL_UNAVAILABLE: not now: it will have another turn. TL_RESOURCE_EXHAUSTED:
 * never. */
static enum tl_status bounce(struct response *response, struct piece *piece, const uint8_t *source, uint64_t len_bytes,
                             struct tl_error *ret_error)
{
    struct tl_conn *conn = response->conn;
    struct tl_memory *memory = conn->engine->memory;
    enum tl_status status =
        conn_block_create(memory, response->granted, len_bytes, &piece->block, &piece->pin, ret_error);
    conn_drop_room(&response->granted);
    if (status == TL_UNAVAILABLE && response->pieces_out == 0) {
        response->room = conn_await_room(conn, memory, len_bytes, response, room_came, ret_error);
        return response->room != NULL ? TL_UNAVAILABLE : TL_RESOURCE_EXHAUSTED;
    }
    if (status != TL_OK) return status;
    memcpy(tl_tensor_data(piece->block), source, (size_t)len_bytes);
    conn->engine->stats.bytes_bounced += len_bytes;
    tl_memory_count_bounce(conn->engine->memory, len_bytes);
    return TL_OK;
}

/* What is left cannot be sent: the status takes its place. */
static bool fail(struct response *response, const struct tl_error *error)
{
    set_status(response, error);
    response->state = RESPONSE_TELLING;
    return true;
}

/* Posts the next piece of the tensor; true when more is to be posted and may be now. */
static bool post_piece(struct response *response)
{
    struct tl_conn *conn = response->conn;
    const struct tl_tensor *tensor = response->offer.tensor;
    uint64_t left_bytes = tl_tensor_size_bytes(tensor) - response->posted_bytes;
    uint64_t piece_bytes = conn->engine->piece_bytes;
    if (response->is_bounced && piece_bytes > BOUNCE_PIECE_BYTES) piece_bytes = BOUNCE_PIECE_BYTES;
    uint64_t len_bytes = left_bytes < piece_bytes ? left_bytes : piece_bytes;
    const uint8_t *source = (const uint8_t *)tl_tensor_data(tensor) + response->posted_bytes;
    if (response->is_bounced && response->pieces_out >= MAX_BOUNCES) return false; /* the next one that is done */
    struct tl_error error;
    if (tl_tensor_check_readable(tensor, response->posted_bytes, len_bytes, &error) != TL_OK) {
        return fail(response, &error);
    }
    struct piece *piece = piece_create(response);
    if (piece == NULL) return fail(response, &out_of_memory);
    enum tl_status status = response->is_bounced ? bounce(response, piece, source, len_bytes, &error) : TL_OK;
    if (status != TL_OK) {
        piece_destroy(response, piece);
        if (status == TL_UNAVAILABLE || response->pieces_out > 0) return false;
        tl_error_prefix(&error, "%s cannot be sent through the pool: ", response->key);
        return fail(response, &error);
    }
    const struct tl_region *region = response->is_bounced ? piece->pin.region : response->pin.region;
    uint32_t immediate = response->handle | (response->is_bounced ? TL_IMMEDIATE_BOUNCED : 0) |
                         (response->is_done_wanted ? TL_IMMEDIATE_TOLD : 0);
    response->pieces_out++;
    conn_post_write(conn, region, piece->block != NULL ? tl_tensor_data(piece->block) : source, len_bytes,
                    &response->destination, response->posted_bytes, immediate, &piece->work);
    response->posted_bytes += len_bytes;
    return len_bytes < left_bytes || response->is_done_wanted;
}

static bool take_turn(struct turn *turn)
{
    struct response *response = TL_CONTAINER_OF(turn, struct response, turn);
    switch (response->state) {
    case RESPONSE_PARKED:
        if (response->is_update_wanted) post_update(response);
        return false;
    case RESPONSE_WRITING:
        if (response->posted_bytes < tl_tensor_size_bytes(response->offer.tensor)) return post_piece(response);
        if (response->is_done_wanted && !response->is_told) post_done(response);
        return false;
    case RESPONSE_TELLING:
        if (response->is_told) return false;
        if (response->status != NULL) {
            post_error(response);
        } else {
            post_done(response);
        }
        return false;
    default:
        return false;
    }
}

static void want_turn(struct response *response)
{
    conn_want_turn(response->conn, &response->turn);
}

static void want_update(struct response *response)
{
    response->is_update_wanted = true;
    want_turn(response);
}

static void written(struct response *response)
{
    if (!is_all_written(response)) {
        want_turn(response);
        return;
    }
    maybe_over(response);
}

/* ------------------------------------------------------------------------------------------------------- memory -- */

static void room_came(struct tl_letter *letter)
{
    struct room_wait *room = conn_room_came(letter);
    struct response *response = room->owner;
    const struct tl_error *error = &room->room.wait.error;
    response->room = NULL;
    response->granted = room;
    if (response->conn->is_drained) {
        response_close(response, TL_SERVE_BROKEN);
    } else if (response->state == RESPONSE_STOPPING) {
        maybe_stopped(response);
    } else {
        if (error->code != TL_OK) (void)fail(response, error);
        want_turn(response);
    }
}

static void registered(struct tl_letter *letter)
{
    struct registering *registering = conn_registered(letter);
    const struct tl_registration *registration = &registering->registration;
    struct response *response = registering->owner;
    struct tl_conn *conn = response->conn;
    conn->held_count--;
    response->is_registering = false;
    if (registration->error.code == TL_OK) {
        response->pin = registration->pin;
    } else {
        response->is_bounced = true;
    }
    free(registering);
    if (conn->is_drained) {
        response_close(response, TL_SERVE_BROKEN);
    } else {
        handle(response, EVENT_READY);
    }
}

/* Decides where the bytes are read from. */
static void prepare(struct response *response)
{
    struct tl_engine *engine = response->conn->engine;
    struct tl_tensor *tensor = response->offer.tensor;
    const struct tl_offer *offer = &response->offer;
    response->is_done_wanted = response->wants_checksum || offer->step != response->expected_step;
    bool is_direct =
        !engine->options.is_bounce_forced && (!engine->provider->limits.needs_regions ||
                                              tl_memory_pin(engine->memory, tensor, TL_REGION_READ, &response->pin));
    bool is_small = conn_is_small(response->conn, tensor);
    if (is_direct) {
        handle(response, EVENT_READY);
    } else if (engine->options.is_bounce_forced || is_small) {
        response->is_bounced = true;
        handle(response, EVENT_READY);
    } else {
        response->is_registering =
            conn_register(response->conn, engine->memory, response, tensor, TL_REGION_READ, registered);
        response->is_bounced = !response->is_registering;
        if (response->is_bounced) handle(response, EVENT_READY);
    }
}

/* ------------------------------------------------------------------------------------------------------ the table --
 */

struct transition {
    enum response_state next;
    void (*action)(struct response *response);
};

#define NEVER                                                                                                          \
    {                                                                                                                  \
        RESPONSE_STATES, NULL                                                                                          \
    }
/* clang-format off */
static const struct transition transitions[RESPONSE_STATES][RESPONSE_EVENTS] = {
    [RESPONSE_WAITING] = {
        [EVENT_STATUS] = {RESPONSE_TELLING, want_turn},
        [EVENT_EMPTY] = {RESPONSE_TELLING, want_turn},
        [EVENT_FITS] = {RESPONSE_PREPARING, prepare},
        [EVENT_DIFFERS] = {RESPONSE_PARKED, want_update},
        [EVENT_RE_REQUEST] = NEVER,
        [EVENT_READY] = NEVER,
        [EVENT_WORK_DONE] = NEVER,
        [EVENT_CANCEL] = {RESPONSE_STOPPING, stop},
    },
    [RESPONSE_PARKED] = {
        [EVENT_STATUS] = NEVER,
        [EVENT_EMPTY] = NEVER,
        [EVENT_FITS] = NEVER,
        [EVENT_DIFFERS] = NEVER,
        [EVENT_RE_REQUEST] = {RESPONSE_PREPARING, prepare},
        [EVENT_READY] = NEVER,
        [EVENT_WORK_DONE] = NEVER,
        [EVENT_CANCEL] = {RESPONSE_STOPPING, stop},
    },
    [RESPONSE_PREPARING] = {
        [EVENT_STATUS] = NEVER,
        [EVENT_EMPTY] = NEVER,
        [EVENT_FITS] = NEVER,
        [EVENT_DIFFERS] = NEVER,
        [EVENT_RE_REQUEST] = NEVER,
        [EVENT_READY] = {RESPONSE_WRITING, want_turn},
        [EVENT_WORK_DONE] = NEVER,
        [EVENT_CANCEL] = {RESPONSE_STOPPING, stop},
    },
    [RESPONSE_WRITING] = {
        [EVENT_STATUS] = NEVER,
        [EVENT_EMPTY] = NEVER,
        [EVENT_FITS] = NEVER,
        [EVENT_DIFFERS] = NEVER,
        [EVENT_RE_REQUEST] = NEVER,
        [EVENT_READY] = NEVER,
        [EVENT_WORK_DONE] = {RESPONSE_WRITING, written},
        [EVENT_CANCEL] = {RESPONSE_STOPPING, stop},
    },
    [RESPONSE_TELLING] = {
        [EVENT_STATUS] = NEVER,
        [EVENT_EMPTY] = NEVER,
        [EVENT_FITS] = NEVER,
        [EVENT_DIFFERS] = NEVER,
        [EVENT_RE_REQUEST] = NEVER,
        [EVENT_READY] = NEVER,
        [EVENT_WORK_DONE] = {RESPONSE_TELLING, told},
        [EVENT_CANCEL] = {RESPONSE_TELLING, NULL}, /* what it tells is the last word */
    },
    [RESPONSE_STOPPING] = {
        [EVENT_STATUS] = NEVER,
        [EVENT_EMPTY] = NEVER,
        [EVENT_FITS] = NEVER,
        [EVENT_DIFFERS] = NEVER,
        [EVENT_RE_REQUEST] = {RESPONSE_STOPPING, NULL},
        [EVENT_READY] = {RESPONSE_STOPPING, maybe_stopped},
        [EVENT_WORK_DONE] = {RESPONSE_STOPPING, maybe_stopped},
        [EVENT_CANCEL] = {RESPONSE_STOPPING, NULL},
    },
};
/* clang-format on */

static void handle(struct response *response, enum response_event event)
{
    const struct transition *transition = &transitions[response->state][event];
    if (transition->next == RESPONSE_STATES) {
        conn_protocol_error(response->conn, "a message that does not fit the state of its request (%d, %d)",
                            (int)response->state, (int)event);
        return;
    }
    response->state = transition->next;
    if (transition->action != NULL) transition->action(response);
}

/* ---------------------------------------------------------------------------------------------- from the source -- */

static void reply(struct tl_serve *serve, const struct tl_error *status, const struct tl_offer *offer)
{
    struct response *response = TL_CONTAINER_OF(serve, struct response, serve);
    if (status->code != TL_OK) {
        set_status(response, status);
        handle(response, EVENT_STATUS);
        return;
    }
    response->offer = *offer;
    const struct tl_meta_data *meta_data = tl_tensor_meta_data(offer->tensor);
    if (meta_data->size_bytes == 0) {
        handle(response, EVENT_EMPTY);
    } else if (response->has_meta_data && response->destination.len_bytes > 0 &&
               tl_meta_data_is_equal(meta_data, &response->expected)) {
        handle(response, EVENT_FITS);
    } else {
        response->expected_step = offer->step;
        handle(response, EVENT_DIFFERS);
    }
}

static const struct tl_serve_ops serve_ops = {.reply = reply};

/* ------------------------------------------------------------------------------------------------ from the peer -- */

static struct response *response_create(struct tl_conn *conn, const struct tl_message *message)
{
    size_t key_bytes = strlen(message->key);
    struct response *response = tl_alloc_zeroed(sizeof(*response) + key_bytes + 1);
    if (response == NULL) return NULL;
    response->conn = conn;
    response->handle = message->handle;
    response->turn.take = take_turn;
    tl_list_init(&response->turn.place);
    response->wants_checksum = message->has_checksum;
    response->has_meta_data = message->has_meta_data;
    response->expected = message->meta_data;
    response->expected_step = message->expected_step;
    response->destination = message->destination;
    memcpy(response->key, message->key, key_bytes + 1);
    response->serve = (struct tl_serve){.ops = &serve_ops,
                                        .id = {.incarnation = conn->peer.incarnation, .number = message->number},
                                        .peer = &conn->peer,
                                        .key = response->key,
                                        .step = message->step};
    return response;
}

static void handle_request(struct tl_conn *conn, const struct tl_message *message)
{
    const struct tl_engine *engine = conn->engine;
    struct response **place = find_place(conn, message->handle);
    if (tl_handle_index(message->handle) >= TL_MAX_REQUESTS || (message->handle & ~TL_HANDLE_MASK) != 0 ||
        message->number == 0 || conn->response_count >= most_responses(conn) || *place != NULL) {
        conn_protocol_error(conn, "a REQUEST with the handle %#x", message->handle);
        return;
    }
    struct response *response = response_create(conn, message);
    if (response == NULL) {
        tl_conn_close(conn, &out_of_memory);
        return;
    }
    *place = response;
    conn->response_count++;
    conn_watch(conn);
    if (conn->state == CONN_DRAINING) {
        struct tl_error error;
        tl_error_set(&error, TL_UNAVAILABLE, "the data connection is about to be closed");
        response->is_refused = true;
        set_status(response, &error);
        handle(response, EVENT_STATUS);
        return;
    }
    engine->source->request(engine->source_context, &response->serve);
}

void responses_message(struct tl_conn *conn, const struct tl_message *message)
{
    if (message->type == TL_MESSAGE_REQUEST) {
        handle_request(conn, message);
        return;
    }
    struct response *response = *find_place(conn, message->handle);
    if (message->type == TL_MESSAGE_CANCEL) {
        if (response != NULL) {
            handle(response, EVENT_CANCEL);
        } else {
            tell_cancelled(conn, message->handle);
        }
    } else if (response == NULL || message->destination.len_bytes == 0) {
        conn_protocol_error(conn, "a RE_REQUEST with the handle %#x", message->handle);
    } else {
        if (response->state == RESPONSE_PARKED) response->destination = message->destination;
        handle(response, EVENT_RE_REQUEST);
    }
}

void responses_break(struct tl_conn *conn)
{
    for (uint32_t i = 0; i < conn->response_places; i++) {
        struct response *next;
        for (struct response *response = conn->responses[i]; response != NULL; response = next) {
            next = response->next;
            /* What the peer has for certain was closed when its last work was done. */
            conn_leave_room(&response->room);
            if (!response->is_registering && response->room == NULL) response_close(response, TL_SERVE_BROKEN);
        }
    }
    TL_LIST_FOREACH_SAFE(&conn->turns, place)
    {
        struct turn *turn = TL_CONTAINER_OF(place, struct turn, place);
        if (turn->take != take_notice) continue;
        tl_list_remove(place);
        conn->notice_count--;
        free(TL_CONTAINER_OF(turn, struct notice, turn));
    }
}

bool responses_are_over(const struct tl_conn *conn)
{
    return conn->response_count == 0;
}
