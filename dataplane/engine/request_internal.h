// SPDX-License-Identifier: Apache-2.0
/*
 * A request as its files see it: request_states.c (one table for all that may happen), request_memory.c (where the
 * bytes go), request_turns.c (what it posts), request_map.c (what needs no bytes), request.c (what the peer says; how
 * it begins and ends).
 */
#ifndef DATAPLANE_ENGINE_REQUEST_INTERNAL_H
#define DATAPLANE_ENGINE_REQUEST_INTERNAL_H

#include "dataplane/engine/conn_internal.h"

/*
 *   PREPARING --memory is there--> QUEUED --posted--> ASKED --all has come--> REVOKING --revoked--> (told, freed)
 *       ^                                               |  \---cancel--> CANCELLING --last word--> REVOKING
 *       \---revoked--- RENEWING <---META_DATA_UPDATE---/
 */
enum request_state {
    REQUEST_NEVER,      /* no state */
    REQUEST_PREPARING,  /* waits for the slow worker to register the destination, or for room in the pool */
    REQUEST_QUEUED,     /* waits for its turn (and a window) to send REQUEST or RE_REQUEST */
    REQUEST_ASKED,      /* waits for the peer's answer */
    REQUEST_RENEWING,   /* other memory is needed; waits until nobody can write the former */
    REQUEST_CANCELLING, /* CANCEL is queued or sent; waits for the peer's last word */
    REQUEST_REVOKING,   /* has its result; waits until nobody can write its memory */
    REQUEST_FINISHED,   /* waits to be told, in conn->finished */
};

enum request_event {
    /* Events that this code raises. One that the table does not list for the state is a bug: TL_CHECK. */
    EVENT_READY,             /* the destination's memory can be exposed, or none is needed */
    EVENT_SENT,              /* REQUEST or RE_REQUEST is posted */
    EVENT_FAILED,            /* the request cannot be made; the result says why */
    EVENT_ABANDONED_ASKED,   /* the request ends before it has asked (again), and the peer may still write */
    EVENT_ABANDONED_UNASKED, /* the request ends before it has asked, and the peer will not write */
    EVENT_BROKEN,            /* the queue pair is drained, and no registration or memory wait is left */
    REQUEST_OWN_EVENTS,

    /* Events of the peer, the card and the user. One that the table does not list ends the connection. */
    EVENT_META_DATA = REQUEST_OWN_EVENTS, /* the value has other meta-data than expected */
    EVENT_COMPLETE,                       /* all of the value has come */
    EVENT_STATUS,                         /* the owner's status has come */
    EVENT_CANCEL,                         /* the worker gives the request up */
    EVENT_CANCELLED,                      /* the peer says that it will not write */
    EVENT_REVOKED,                        /* the peer cannot write the memory any more */
    REQUEST_EVENTS,
};

/* Used again for the next one, by the same connection. */
struct request {
    struct tl_conn *conn;
    struct tl_list place;        /* in conn->finished, conn->told or conn->spare_requests */
    struct pending_post pending; /* REQUEST, RE_REQUEST or CANCEL */
    struct pending_post revoke;  /* of the exposure */
    struct tl_work revoke_work;
    struct tl_timer cancel_timer;

    /* From here to `expected` all is zero when a request begins. */
    struct tl_fetch *fetch;
    enum request_state state;
    uint32_t handle;
    bool is_asked; /* REQUEST has been posted: the peer knows the handle */
    bool is_registering;
    bool is_cancelled; /* while it registers or waits for room: to be given up as soon as that is over. Once it has a
                          result: asks no more */
    bool is_revoke_posted;
    bool is_place_sent; /* the peer knows where to write what is expected */
    bool has_meta_data; /* expected; of the cache, then of META_DATA_UPDATE */
    bool is_exposed;    /* until it is certain that nobody writes through the exposure any more */
    bool is_source_bounced;
    bool is_done_expected; /* a DONE follows the data */
    bool is_answered;      /* with a status, which is the last word */
    bool has_checksum;
    bool may_map; /* MAPPED is a possible answer */
    bool is_mapped;
    bool is_map_refused;                  /* what is to be mapped cannot be: the fetch asks again */
    struct conn_memory_wait *memory_wait; /* it waits for that; NULL: it does not */
    struct tl_tensor *kept;               /* the destination, while it may be exposed; one reference */
    struct tl_pin pin;                    /* of the destination, or of the proxy */
    struct tl_tensor *proxy;  /* in the pool, copied from at the end; NULL: the peer writes the destination itself */
    const char *proxy_reason; /* why there is one; lives for ever */
    uint64_t received_bytes;
    uint64_t checksum;
    uint32_t sent_slot;            /* how many slots were used up to the latest that was sent */
    const struct tl_error *result; /* kept; NULL: TL_OK */

    struct tl_meta_cached expected; /* when has_meta_data */
    struct tl_exposure exposure;
};

extern const struct tl_error request_out_of_memory;

/* -------------------------------------------------------------------------------------------- request_states.c -- */

/* Takes the transition that the table lists for the event. */
void request_handle(struct request *request, enum request_event event);
/* The first real error wins. */
void request_set_result(struct request *request, const struct tl_error *error);
void request_set_given_up(struct request *request);
/* Sets the result and handles EVENT_FAILED. */
void request_fail(struct request *request, const struct tl_error *error);
/* The peer has not answered CANCEL in time. */
void request_cancel_timeout(struct tl_timer *timer);

/* -------------------------------------------------------------------------------------------- request_memory.c -- */

enum placing {
    PLACING_DONE,
    PLACING_WAITS, /* memory_came follows */
    PLACING_FAILED,
};

/* Makes the destination for the expected meta-data, in the room if it is the engine's to choose. PLACING_FAILED: not
 * possible, with the reason. */
enum placing request_place(struct request *request, struct tl_memory_wait *memory_wait, struct tl_error *ret_error);
/* Decides where the bytes go until they are in the destination; EVENT_READY or EVENT_FAILED follows. */
void request_prepare_memory(struct request *request);
/* Both, in the room (NULL: in what is free). */
void request_place_and_prepare(struct request *request, struct tl_memory_wait *memory_wait);
void request_release_memory(struct request *request);

/* --------------------------------------------------------------------------------------------- request_turns.c -- */

void request_posts_init(struct request *request);
/* Wants to send REQUEST, RE_REQUEST or CANCEL, as its state says; EVENT_SENT follows the first two. */
void request_queue_post(struct request *request);
/* It wants no turn, and leaves the window that it may have been woken for to the next one. */
void request_leave_queue(struct request *request);
/* Sees to it that nobody can write the memory; EVENT_REVOKED follows. */
void request_start_revoke(struct request *request);
/* Nobody can. */
void request_exposure_over(struct request *request);

/* ----------------------------------------------------------------------------------------------- request_map.c -- */

/* MAPPED has come: maps the value, or remembers that it cannot be. */
void request_map(struct request *request, const struct tl_message *message);
/* Why a value that was to be mapped was written instead. */
const char *request_why_not_mapped(const struct request *request);
/* It cannot be: the fetch begins once more, without the permission. Frees the request. */
void request_ask_without_map(struct request *request);

/* --------------------------------------------------------------------------------------------------- request.c -- */

/* Its memory is released. Clears it for the next one. */
void request_free(struct request *request);

/* The action of the table for REQUEST_FINISHED: the fetch is completed at the end of the round. */
void request_finish(struct request *request);

#endif
