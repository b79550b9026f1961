// SPDX-License-Identifier: Apache-2.0
/*
 * A request, as its files see it: request_states.c (the table of transitions), request_memory.c (where the bytes go),
 * request_device.c (destinations on devices), request_posts.c (what it posts), request_map.c (values that are mapped),
 * request_read.c (values that are read), request.c (messages of the peer; how a request begins and ends). The table of
 * requests is in conn_handles.c.
 */
#ifndef DATAPLANE_ENGINE_REQUEST_INTERNAL_H
#define DATAPLANE_ENGINE_REQUEST_INTERNAL_H

#include "dataplane/engine/conn_internal.h"

/*
 *   PREPARING --memory is there, or none now--> QUEUED --posted--> ASKED --all has come--> REVOKING --revoked-->
 * COPYING ^                                               |  \---cancel--> CANCELLING --last word--> REVOKING
 *       \---revoked--- RENEWING <---META_DATA_UPDATE---/
 *
 *   COPYING --no copy is left--> (completed, freed)
 *
 *   One that reads: PREPARING --> QUEUED --posted--> ASKED --SOURCE--> PREPARING --memory is there--> QUEUED
 *       --first read is posted--> READING --all is read--> RELEASING --release is posted--> REVOKING
 *   READING --cancel--> CANCELLING --no read is posted, CANCEL is queued--> REVOKING
 *   PREPARING --no memory for the source in time: it goes back--> PREPARING --memory is there--> QUEUED --> ASKED
 */
enum request_state {
    REQUEST_NEVER,      /* no state */
    REQUEST_PREPARING,  /* waits for the registration thread to register the destination, or for memory of a device;
                           after  META_DATA_UPDATE or SOURCE for memory of the pool as well */
    REQUEST_QUEUED,     /* waits for a slot to send REQUEST, for a slot and a window to send RE_REQUEST, or for its turn
                           to read */
    REQUEST_ASKED,      /* waits for the peer's answer */
    REQUEST_RENEWING,   /* other memory is needed; waits until the peer cannot write the former memory */
    REQUEST_READING,    /* waits for its posted reads, or for its turn to post more */
    REQUEST_RELEASING,  /* all is read; waits for a slot to release the source, if there is none now */
    REQUEST_CANCELLING, /* CANCEL is queued or sent; waits for the peer's answer, which is its last. With a SOURCE
                           CANCEL is sent later, and it waits for its posted reads only */
    REQUEST_REVOKING,   /* has its result; waits until the peer cannot write its memory, which one that reads has never
                           exposed */
    REQUEST_COPYING,    /* the peer cannot write any more, or the queue pair is drained; waits for copies to or from the
                           device of its destination. Others have none, and leave this state at once */
    REQUEST_FINISHED,   /* waits in requests.finished until its fetch is completed */
};

enum request_event {
    /* Events that this code raises. One that the table does not list for the state is a bug: TL_CHECK. */
    REQUEST_EVENT_READY,             /* the destination's memory can be exposed, or none is needed */
    REQUEST_EVENT_SENT,              /* REQUEST or RE_REQUEST is posted */
    REQUEST_EVENT_FAILED,            /* the request cannot be made; the result says why */
    REQUEST_EVENT_ABANDONED_ASKED,   /* the request ends before it has asked (again), and the peer may still write */
    REQUEST_EVENT_ABANDONED_UNASKED, /* the request ends before it has asked, and the peer will not write */
    REQUEST_EVENT_READ,              /* the first read is posted */
    REQUEST_EVENT_RELEASED,          /* the release of the source is posted */
    REQUEST_EVENT_STOPPED,           /* one that reads is given up, and no read is posted */
    REQUEST_EVENT_COPIED,            /* no copy to or from a device is left or under way */
    REQUEST_EVENT_LATE,              /* CANCEL was not sent or answered in time, a source was not released in time, or
                                        no memory has come for one */
    REQUEST_EVENT_BROKEN,            /* the queue pair is drained, and no registration or memory wait is left */
    REQUEST_OWN_EVENTS,

    /* Events of the peer, the card and the user. One that the table does not list ends the connection. */
    REQUEST_EVENT_META_DATA = REQUEST_OWN_EVENTS, /* the value has other meta-data than expected */
    REQUEST_EVENT_SOURCE,                         /* the owner shows the value, which can be read */
    REQUEST_EVENT_COMPLETE,                       /* all of the value has come */
    REQUEST_EVENT_STATUS,                         /* the owner's status has come */
    REQUEST_EVENT_CANCEL,                         /* the worker gives the request up */
    REQUEST_EVENT_CANCELLED,                      /* the peer says that it will not write */
    REQUEST_EVENT_REVOKED,                        /* the peer cannot write the memory any more */
    REQUEST_EVENTS,
};

/* A value that may be mapped (request_map.c). */
struct request_mapping {
    bool is_allowed : 1; /* MAPPED is a possible answer */
    bool is_done : 1;
    bool is_refused : 1; /* the value cannot be mapped here: the fetch asks again */
};

/* A destination on a device (request_device.c). */
struct request_landing {
    bool is_on_device;                /* the destination is on a device: the CPU must not touch it */
    bool is_piece_filled;             /* the block of the piece has its bytes */
    struct tl_piece *piece;           /* a part of the destination, on its way to the device or back; NULL: none */
    struct tl_allocation *allocation; /* makes a new destination; NULL: none is being made */
    struct tl_tensor *allocated;      /* what it has brought, until that is placed */
    uint64_t hashed_bytes;            /* read back from the device, for the checksum */

    /* With a SOURCE in memory of a device that is imported (request_import.c). */
    struct conn_import *import;    /* NULL: none yet */
    struct request_import *copied; /* the copy out of it; NULL: none. It lies apart, since few requests have one */
    const char *import_refusal;    /* why memory could not be imported, and its source went back; never freed */
    bool is_copy_running;
};

/* What a request needs only when its value is there, or when it asks with a place for the value. */
struct request_placement {
    struct request *request;
    struct pending_post revoke; /* the end of the exposure */
    struct tl_work revoke_work;
    struct conn_memory_wait *memory_wait; /* NULL: it does not wait for memory */
    struct tl_tensor *kept;               /* the destination, while it may be exposed; holds a reference */
    struct tl_pin pin;                    /* registered memory of the destination or the bounce buffer */
    struct tl_tensor *bounce_buffer; /* a block of the pool, from which the bytes are copied on as they arrive; NULL:
                                        the peer writes the destination itself */
    uint64_t lap_bytes;              /* size of the bounce buffer if the value is larger, and is written into it round
                                        and round; else 0 */
    struct tl_list lap_link;         /* in requests.placing.awaiting_laps */
    bool has_lap;                    /* it counts in requests.placing.lap_count */
    uint64_t reported_bytes;         /* the peer knows that so many bytes were copied on */
    const char *bounce_reason;       /* why there is a bounce buffer; never freed */
    uint64_t asked_bytes;            /* for which reads were posted */
    uint32_t read_count;             /* reads that are posted */
    struct request_landing landing;
    struct tl_meta_cached expected; /* valid when has_meta_data */
    struct tl_exposure exposure;
    struct tl_descriptor source; /* valid when has_source */
};

/* The time limit for the slot of CANCEL or of the release of a source, for the answer to CANCEL, for memory to read a
 * source into, or for a lap. Few requests have one. */
struct request_limit {
    struct tl_timer timer;
    struct request *request;
    uint32_t slots_returned;        /* how many slots the peer had given back when it was set */
    struct tl_closure look_closure; /* it is up: looks whether what had come until then was taken; deferred */
    unsigned look_count;
    uint32_t slots_taken; /* our slots that were used when it was up */
    uint64_t event_count; /* events of the reactor until the last look */
};

/* Many of them may wait for their values, so that its size is bounded (tests/unit/engine_waits_test.c). */
struct request {
    struct tl_conn *conn;
    struct tl_fetch *fetch;
    struct pending_post pending; /* REQUEST, RE_REQUEST or CANCEL; a read; the release of the source. Its place is also
                                    the one in requests.finished and requests.completed */
    struct request_limit *limit; /* NULL: it has none */
    struct request_placement *placement; /* NULL: it has none yet, or needs none; not NULL when has_meta_data */
    const struct tl_error *result;       /* kept; NULL: TL_OK */
    uint64_t received_bytes;
    union {
        uint64_t checksum;       /* valid when has_checksum */
        const uint8_t *unplaced; /* the DONE in its slot; valid when is_unplaced */
    };
    uint32_t handle;
    uint32_t key_number;     /* the key's number, unless another key has it by now */
    uint16_t unplaced_bytes; /* how long the DONE is that is unplaced */
    enum request_state state : 8;
    struct request_mapping mapping;
    bool is_unplaced : 1; /* there was no memory yet for the value of a DONE, which is nowhere else */
    bool is_asked : 1;    /* REQUEST has been posted: the peer knows the handle */
    bool is_registering : 1;
    bool is_cancelled : 1; /* it is given up as soon as it has registered or has memory; once it has a result, it does
                              not ask again */
    bool is_revoke_posted : 1;
    bool is_place_sent : 1;      /* the peer knows where to write the expected value */
    bool has_meta_data : 1;      /* it is known, from the cache or from META_DATA_UPDATE, what to expect */
    bool is_exposed : 1;         /* the peer may still write through the exposure */
    bool is_early : 1;           /* it was exposed before the peer has said that the value exists */
    bool is_done_expected : 1;   /* a DONE follows the data */
    bool is_answered : 1;        /* a status has come, which is the peer's last answer */
    bool is_file_slow : 1;       /* the owner has said so: pages of the value may have to come from a file first */
    bool is_reading : 1;         /* the bytes are to be read; the peer writes nothing */
    bool has_source : 1;         /* SOURCE has come, which is the peer's last answer unless it goes back */
    bool is_source_returned : 1; /* it went back, since there was no memory to read it into */
    bool is_inline : 1;          /* the value has come inside of its DONE */
    bool has_checksum : 1;       /* DONE or SOURCE has said it */
    bool is_sender_copying : 1;  /* the owner has said so of the bytes: TL_IMMEDIATE_SENDER_COPYING */
    bool is_from_device : 1;     /* the same: TL_IMMEDIATE_ON_DEVICE */
};

extern const struct tl_error request_out_of_memory;

/* -------------------------------------------------------------------------------------------- request_states.c -- */

/* Takes the transition that the table lists for the event. */
void request_handle(struct request *request, enum request_event event);
/* Sets the result unless one is set already, or the code is TL_OK. */
void request_set_result(struct request *request, const struct tl_error *error);
void request_set_given_up(struct request *request);
/* Sets the result and handles REQUEST_EVENT_FAILED. */
void request_fail(struct request *request, const struct tl_error *error);
/* Gives up what the request waits for: memory of the pool or of a device, or an import. Returns false when memory of
 * the pool is on its way. */
bool request_stop_waiting(struct request *request);
/* Sets the time limit, or moves it. Without memory for that the connection is closed. */
void request_limit(struct request *request, int64_t after_ns);
void request_end_limit(struct request *request);

/* -------------------------------------------------------------------------------------------- request_memory.c -- */

/* Why a bounce buffer is used. */
extern const char request_reason_forced[];
extern const char request_reason_small[];

enum placing {
    PLACING_DONE,
    PLACING_WAITS, /* for memory of the pool or of a device, which is placed and prepared when it comes */
    PLACING_FAILED,
};

/* Returns the step of the value that is expected, unless the owner says another one. A sent value has the step that was
 * asked for, or for a subscription a later one. */
static inline uint64_t request_expected_step(const struct request *request)
{
    bool is_any = request->placement->expected.is_published || tl_fetch_subscription(request->fetch) != 0;
    return is_any ? request->placement->expected.step : request->fetch->step;
}

/* Makes the destination for the expected meta-data; where the engine chooses it, in the memory that was waited for.
 * PLACING_FAILED: not possible, with the reason in ret_error. */
enum placing request_place(struct request *request, struct tl_memory_wait *memory_wait, struct tl_error *ret_error);
/* Decides where the peer writes: into the destination or into a bounce buffer. REQUEST_EVENT_READY or
 * REQUEST_EVENT_FAILED follows. */
void request_prepare_memory(struct request *request);
/* Makes the peer write to the destination, which has no registration yet. */
void request_register_destination(struct request *request);
/* Makes the peer write to a block of the pool: of the memory that was waited for, or of what is free (memory_wait
 * NULL). Waits for memory when the pool is full. When neither is possible, the request fails. */
void request_use_bounce_buffer(struct request *request, struct conn_memory_wait *memory_wait);
/* A source, which its owner keeps for us, does not wait for memory for long. */
void request_limit_wait(struct request *request);
/* Does both, in the memory that was waited for, or in what is free (memory_wait NULL). */
void request_place_and_prepare(struct request *request, struct tl_memory_wait *memory_wait);
void request_release_memory(struct request *request);
/* Gives the request a placement, unless it has one. Returns false when there is no memory. */
bool request_has_placement(struct request *request) TL_MUST_USE;
/* Gives the placement back, whose memory is released. */
void request_end_placement(struct request *request);
/* The request asks without a place, which it chooses when the peer has said that the value exists. */
void request_drop_place(struct request *request);
/* The block of the pool that the bytes have come into; NULL: they have come into the destination, or none have. */
struct tl_tensor *request_bounce_buffer(const struct request *request);
/* Copies and hashes as much of the received bytes as this pump may. Errors: TL_OUT_OF_RANGE: more than was announced.
 */
enum tl_status request_advance(struct request *request, struct tl_error *ret_error) TL_MUST_USE;
/* Copies on what has arrived while the rest is on its way, where there is a bounce buffer. The completion does what is
 * left. What arrives in the destination itself is hashed later, when the peer cannot write it any more. */
void request_advance_early(struct request *request);
/* The time to wait for a bounce buffer is up. */
void request_wait_no_longer(struct request *request);
/* How many bytes the peer may have written now. */
uint64_t request_most_awaited(const struct request *request);

/* -------------------------------------------------------------------------------------------- request_device.c -- */

/* The same as request_prepare_memory for a destination on a device, which is kept already. */
void request_prepare_on_device(struct request *request);
/* Notes that the pool can never have the memory for a bounce buffer, for the reason in `error`: the fetch may travel
 * over the link. The request is to fail with the same error. */
void request_reroute(struct request *request, const struct tl_error *error);
/* Gives up memory of a device that is being allocated. */
void request_drop_allocation(struct request *request);
/* Copies on to the device what has arrived in the bounce buffer. */
void request_copy_on(struct request *request);
/* The action of the table for REQUEST_COPYING: copies what is left, and reads it back for the checksum; a request that
 * has failed only waits for the copy that is under way. REQUEST_EVENT_COPIED follows. */
void request_copy_rest(struct request *request);

/* --------------------------------------------------------------------------------------------- request_posts.c -- */

void request_posts_init(struct request *request);
void request_revoke_init(struct request_placement *placement);
/* Queues a post that sends REQUEST, RE_REQUEST or CANCEL, as the state says. REQUEST_EVENT_SENT follows the first two.
 */
void request_queue_post(struct request *request);
/* Whether a request may have a window although its value may never exist: enough of them stay free for others. */
bool requests_may_expose_early(const struct tl_conn *conn);
/* Takes the request out of its queue. A window that it may have been woken for is offered to the next request. */
void request_leave_queue(struct request *request);
/* Ends the exposure. REQUEST_EVENT_REVOKED follows as soon as the peer cannot write the memory any more. */
void request_start_revoke(struct request *request);
/* The peer cannot write the memory any more: counts that, and wakes a request that waits for a window. */
void request_exposure_over(struct request *request);

/* ----------------------------------------------------------------------------------------------- request_map.c -- */

/* MAPPED has come: maps the value, or notes that it cannot be mapped. */
void request_map(struct request *request, const struct tl_message *message);
/* Why a value that the fetch would have mapped was written instead. Never freed. */
const char *request_why_not_mapped(const struct request *request);
/* The value cannot be mapped: the fetch begins once more without the permission. Frees the request. */
void request_ask_without_map(struct request *request);

/* ---------------------------------------------------------------------------------------------- request_read.c -- */

/* SOURCE has come: chooses the destination, and reads the bytes into it. */
void request_source(struct request *request, const struct tl_message *message);
/* Queues the next read. REQUEST_EVENT_READ follows the first one, REQUEST_EVENT_COMPLETE the last one. */
void request_queue_read(struct request *request);
/* The post of the next read. */
bool request_post_read(struct request *request);
/* All is read: posts the release, now or as soon as there is a slot. REQUEST_EVENT_RELEASED follows. */
void request_release_source(struct request *request);
/* Gives the source back: the request goes on waiting for memory, into which the owner writes. */
void request_return_source(struct request *request);
/* Tells the owner that a request that reads is given up; nothing is waited for. */
void request_tell_given_up(struct request *request);
/* How the bytes came, as the reason of their path. Never freed. */
const char *request_how_read(const struct request *request);

/* -------------------------------------------------------------------------------------------- request_import.c -- */

/* Whether a fetch may ask for memory of a device to import. */
bool requests_may_import(const struct tl_conn *conn, const struct tl_fetch *fetch);
/* Whether its SOURCE names memory of a device to import. */
bool request_is_imported(const struct request *request);
/* Whether it waits for an import. */
bool request_is_importing(const struct request *request);
/* Imports the memory of the SOURCE. REQUEST_EVENT_READY follows; before it the source may go back. */
void request_import(struct request *request);
/* Gives the import up, or back. No copy runs. */
void request_leave_import(struct request *request);
/* Starts the copy. REQUEST_EVENT_READ follows at once, REQUEST_EVENT_COMPLETE when it is over. */
void request_copy_source(struct request *request);
/* Posts the release. REQUEST_EVENT_RELEASED follows when it has reached the owner. */
void request_release_import(struct request *request);

/* --------------------------------------------------------------------------------------------------- request.c -- */

/* The queue pair is drained: ends the request, at once or when what it has waited for comes back. */
void request_break(struct request *request);

/* Frees the request, whose memory is released, for the next one. */
void request_free(struct request *request);

/* The action of the table for REQUEST_FINISHED: the fetch is completed at the end of the round. */
void request_finish(struct request *request);

#endif
