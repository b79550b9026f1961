// SPDX-License-Identifier: Apache-2.0
/*
 * A response, as its files see it: response_states.c (the table of transitions), response_memory.c (where the bytes are
 * read from), response_posts.c (what it posts), response_source.c (sources that the peer reads), response.c (messages
 * of the peer and replies of the source; how a response ends).
 */
#ifndef DATAPLANE_ENGINE_RESPONSE_INTERNAL_H
#define DATAPLANE_ENGINE_RESPONSE_INTERNAL_H

#include "dataplane/engine/conn_internal.h"

/* The largest piece of a tensor that is copied through the pool, or has no address, and how many such pieces are posted
 * at a time. */
#define BOUNCE_PIECE_BYTES ((uint64_t)256 * 1024)
#define MAX_BOUNCES 4

/* How often the lease of a source is renewed at most. */
#define MAX_RENEWALS 15

/*
 *   WAITING --offer fits--> PREPARING --memory is there--> WRITING --all written--> (closed, freed)
 *      |  \--offer differs--> PARKED --RE_REQUEST--> PREPARING
 *      |                        \--too late--> ENDING
 *      \--status, no bytes, or mapped--> ENDING --sent--> (closed, freed)
 *
 *   WAITING --the peer reads--> LOCATING --memory is there--> SHOWING --release--> RETURNING
 *   RETURNING --revoked--> (closed, freed)
 *   LOCATING, SHOWING --cannot be shown--> PARKED
 *   SHOWING --the peer gives it back unread--> HIDING --revoked--> PARKED, or PREPARING
 *
 *   WAITING, PARKED, PREPARING, WRITING, LOCATING, SHOWING, HIDING
 *      --cancel--> STOPPING --nothing under way--> (closed, CANCELLED sent)
 */
enum response_state {
    RESPONSE_NEVER,     /* no state */
    RESPONSE_WAITING,   /* waits for the source's reply */
    RESPONSE_PARKED,    /* META_DATA_UPDATE is queued or sent, or the peer has given the source back; waits for
                           RE_REQUEST, or the park timer */
    RESPONSE_PREPARING, /* waits for the registration thread to register the source tensor */
    RESPONSE_WRITING,   /* waits for slots, for posted pieces to be done, or for memory of the pool */
    RESPONSE_LOCATING,  /* the peer reads; waits for the registration thread to register the source for that */
    RESPONSE_SHOWING,   /* copies and hashes the source where needed, waits for a slot and a window to send SOURCE, then
                           for the peer's release, or the lease timer */
    RESPONSE_HIDING,    /* the peer has given the source back unread; waits until it cannot read it any more */
    RESPONSE_RETURNING, /* the peer has read all; waits until it cannot read any more */
    RESPONSE_ENDING,    /* waits for a slot to send its only or last message, and for that message to be done */
    RESPONSE_STOPPING,  /* is cancelled; waits until nothing is posted, shown, registering or waiting for memory */
    RESPONSE_STATES,
};

enum response_event {
    /* Events that this code raises. One that the table does not list for the state is a bug: TL_CHECK. */
    RESPONSE_EVENT_STATUS,  /* the source has replied with a status */
    RESPONSE_EVENT_EMPTY,   /* the source has replied with a value of which no bytes are written */
    RESPONSE_EVENT_FITS,    /* the source has replied with the value that the request expects */
    RESPONSE_EVENT_DIFFERS, /* the source has replied with a value that has other meta-data; or the peer reads, and
                               the value cannot be shown or is not shown any more */
    RESPONSE_EVENT_SHOWN,   /* the source has replied with a value that the peer may read */
    RESPONSE_EVENT_READY,  /* the source tensor is registered, its fence is reached, memory of the pool has come, or the
                              peer cannot read a  source any more and has said where to write */
    RESPONSE_EVENT_FAILED, /* the rest of the tensor cannot be sent; the status says why */
    RESPONSE_OWN_EVENTS,

    /* Events of the peer, the card and timers. One that the table does not list ends the connection. */
    RESPONSE_EVENT_RE_REQUEST = RESPONSE_OWN_EVENTS, /* the peer has memory for the value now */
    RESPONSE_EVENT_WORK_DONE,                        /* a posted write or message is over */
    RESPONSE_EVENT_RELEASE,                          /* the peer has read the value */
    RESPONSE_EVENT_COPIED, /* the peer has copied on what was written, and more can be written */
    RESPONSE_EVENT_RETURN, /* the peer has no memory to read the value into, and will say where to write it */
    RESPONSE_EVENT_CANCEL, /* the peer gives the request up */
    RESPONSE_EVENT_LATE,   /* RE_REQUEST, the release, or memory of the pool has not come in time */
    RESPONSE_EVENTS,
};

struct response;

/* A posted write of one part of the tensor. */
struct piece {
    struct tl_work work;
    struct response *response;
    uint64_t offset_bytes;   /* where it begins in the tensor */
    struct tl_tensor *block; /* the copy in the pool that is written; NULL: the tensor itself is written */
    struct tl_pin pin;
};

/* The pieces of a response. When the value lies on a device, the next piece is read into its block of the pool before
 * it is written. */
struct response_pieces {
    unsigned out;          /* posted */
    bool is_first_used;    /* first_piece is one of them */
    struct piece *piece;   /* the next one, when the value lies on a device; NULL: it was not made yet */
    struct tl_piece *read; /* reads it, or waits for the fence of a value that the card reads; NULL: neither */
    uint64_t len_bytes;    /* how much the next one has */
    bool is_fence_reached;
};

/* A source that the peer reads. */
struct response_source {
    bool is_exposed;         /* the peer may read the source; SOURCE is posted */
    bool is_released;        /* the peer has read all */
    bool is_place_known;     /* HIDING: RE_REQUEST has come */
    uint64_t seen_bytes;     /* copied and hashed so far */
    uint64_t released_count; /* responses.released_count when the lease timer was armed */
    unsigned renewal_count;  /* how often it was armed again */
    struct tl_tensor *block; /* the copy in the pool that the peer reads; NULL: it reads the tensor itself */
};

/* Memory of a device that the peer imports (response_lend.c). */
struct response_lend {
    bool is_lent;                /* the source is shown so */
    struct conn_lent_copy *copy; /* a copy of the value; NULL: the value itself is shown */
    struct lending *awaiting;    /* waits until others give back what their copies use; NULL: it does not */
    uint64_t offset_bytes;       /* where the value begins in its memory */
    struct tl_descriptor descriptor;
};

/* A value that the peer maps. */
struct response_mapping {
    bool is_used;          /* the peer gets the file, which `destination` names */
    uint64_t offset_bytes; /* where the value lies in the file */
};

/* How the peer reads it. */
struct response_window {
    struct pending_post revoke; /* the end of the exposure */
    struct tl_work revoke_work;
    struct tl_exposure exposure; /* valid when source.is_exposed */
};

/* What a response needs only when its value is there, or when the REQUEST has said where to write it. */
struct response_sending {
    struct response *response;
    struct pending_post pending;
    bool is_inline;        /* the value goes inside of its DONE */
    bool is_update_wanted; /* PARKED: META_DATA_UPDATE has not been posted */
    bool is_registering;
    bool is_sender_copying; /* the bytes are copied into the pool here before they are written */
    bool is_done_wanted;    /* a DONE follows the bytes */
    bool is_file_slow;      /* PARKED: pages of the tensor may have to come from a file first */
    bool may_change;        /* the bytes lie in a file, which is checked when all of them were read, before the DONE */
    bool is_outcome_posted; /* DONE or ERROR_STATUS is posted */
    bool is_message_out;
    bool is_late;          /* it was parked for too long, and the tensor was given back */
    bool is_flushed;       /* a posted operation was flushed: whether it has arrived is not known */
    void *hash_state;      /* XXH3 over the posted bytes; NULL: no checksum is wanted, or nothing is posted yet */
    struct tl_offer offer; /* holds a reference of the tensor */
    struct tl_pin pin;
    struct conn_memory_wait *memory_wait; /* the next piece waits for this memory; NULL: it does not wait */
    struct conn_memory_wait *granted;     /* memory that has come for the next piece; NULL: none */
    uint64_t posted_bytes;
    uint64_t lap_bytes;    /* size of a destination that is written round and round; 0: it holds the whole value */
    uint64_t copied_bytes; /* so many bytes of the value the peer has copied on, as it has told */
    struct response_pieces pieces;
    struct response_source source;
    struct response_lend lend;
    struct response_mapping mapping;
    const struct tl_error *status; /* kept; NULL: TL_OK */
    struct tl_descriptor destination;
    struct piece first_piece; /* further pieces are allocated */
    struct tl_work message_work;
    struct response_window window;
    struct tl_timer park_timer;
};

/* Many of them may wait for their values, so that its size is bounded (tests/unit/engine_waits_test.c). */
struct response {
    struct tl_conn *conn;
    struct response *next; /* in its list of responses.by_handle */
    uint32_t handle;
    enum response_state state : 8;
    uint8_t priority;
    bool is_refused; /* the source was never asked */
    bool wants_checksum;
    bool may_map;             /* the peer may get the file instead of the bytes */
    bool is_reading;          /* the peer reads the bytes, unless they cannot be shown */
    bool is_receiver_copying; /* the peer copies the bytes on as they arrive */
    bool is_remote;           /* no processor of the peer reaches its destination: the value must not go inline */
    bool is_fixed;            /* the peer takes a value of the expected meta-data only */
    bool is_broken;           /* it ends with its connection, perhaps when memory comes back */
    uint64_t expected_step;
    struct tl_kept_meta_data *expected; /* from the REQUEST, with a reference; NULL: it had none */
    struct response_sending *sending;   /* NULL: WAITING, and the REQUEST has not said where to write */
    struct tl_serve serve;              /* its key is in a struct tl_kept_text, with a reference */
};

extern const struct tl_error response_out_of_memory;

/* ------------------------------------------------------------------------------------------- response_states.c -- */

/* Takes the transition that the table lists for the event. The response may be freed when it returns. */
void response_handle(struct response *response, enum response_event event);
/* Sets the status unless one is set already. */
void response_set_status(struct response *response, const struct tl_error *status);
/* The rest of the tensor cannot be sent: sets the status, which is sent in its place, and handles
 * RESPONSE_EVENT_FAILED. */
void response_fail(struct response *response, const struct tl_error *error);
/* The peer has not said in time where the value goes, or has not released the source. */
void response_park_timeout(struct tl_timer *timer);
/* Closes the response when nothing is under way any more. */
void response_maybe_stopped(struct response *response);

/* ------------------------------------------------------------------------------------------- response_memory.c -- */

/* Decides where the bytes are read from; RESPONSE_EVENT_READY follows. */
void response_prepare(struct response *response);
/* Shares the file that the offered tensor lies in with the peer. Returns false when the bytes must be written
 * instead. */
bool response_share(struct response *response);
/* Whether the value goes inside of its DONE. */
bool response_may_be_inline(const struct response *response);
/* Returns the bytes for that, which stay valid until something else is posted; NULL: they cannot be read, and the
 * status says why. */
const uint8_t *response_read_inline(struct response *response);
/* Whether the value lies on a device. */
bool response_is_on_device(const struct response *response);
/* Whether the card may read the value on its device itself. False: its bytes are copied. */
bool response_may_be_direct(const struct response *response);
/* Whether the fence of the value is reached, before which the card must not read it. False: it is waited for;
 * RESPONSE_EVENT_READY follows, or the response has failed. */
bool response_await_fence(struct response *response);
/* Copies the next bytes into the pool, for this piece. When the value lies on a device, it only provides the block.
 * Errors: TL_UNAVAILABLE: the pool is full; the response is queued again when there is memory. TL_RESOURCE_EXHAUSTED:
 * the piece never fits. */
enum tl_status response_bounce(struct response *response, struct piece *piece, uint64_t len_bytes,
                               struct tl_error *ret_error) TL_MUST_USE;

/* Reads the bytes of the piece, which has a block, from the device; RESPONSE_EVENT_READY follows when they are there.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status response_read_from_device(struct response *response, struct piece *piece, uint64_t len_bytes,
                                         struct tl_error *ret_error) TL_MUST_USE;

/* -------------------------------------------------------------------------------------------- response_posts.c -- */

/* Forgets the piece that is read from a device. */
void response_stop_reading(struct response *response);

/* Posts what the state wants next. RESPONSE_EVENT_WORK_DONE follows, except after META_DATA_UPDATE. */
bool response_post_next(struct pending_post *pending);
void response_queue_post(struct response *response);

/* Hashes the next bytes of the tensor if the peer wants a checksum, and counts what the CPU reads against this pump.
 * source is where they lie, or a copy of them; NULL: they have no address. */
void response_read_piece(struct response *response, const uint8_t *source, uint64_t len_bytes);
/* Creates the state of the hash if it is needed. Returns false when there is no memory. */
bool response_has_hash_state(struct response *response);
/* The checksum of what was hashed. */
uint64_t response_checksum(const struct response *response);

/* ------------------------------------------------------------------------------------------- response_source.c -- */

void response_source_init(struct response_sending *sending);
/* Whether this connection can show memory for reading. */
bool response_may_show(const struct tl_conn *conn);
/* Decides which memory the peer reads. RESPONSE_EVENT_READY follows, or RESPONSE_EVENT_DIFFERS when there is none. */
void response_locate(struct response *response);
/* Copies, hashes, or posts SOURCE. Returns true when it is to be called again. */
bool response_post_source(struct response *response);
/* Gives the peer time to read all that it may read now; RESPONSE_EVENT_LATE follows. */
void response_arm_lease(struct response *response);
/* Ends the exposure. RESPONSE_EVENT_WORK_DONE follows. */
void response_start_return(struct response *response);
/* Gives back what the source has taken: the exposure, which the peer cannot use any more, and memory. */
void response_release_source(struct response *response);

/* --------------------------------------------------------------------------------------------- response_lend.c -- */

/* Whether the peer may import memory of the device for the value. */
bool response_may_lend(const struct response *response);
/* Shows the memory. RESPONSE_EVENT_READY follows, or RESPONSE_EVENT_DIFFERS when it cannot be shown. */
void response_lend(struct response *response);
/* Gives up the wait for memory of other copies, if there is one. */
void response_stop_awaiting_copy(struct response *response);
/* Gives back what that has taken. */
void response_end_lending(struct response *response);

/* -------------------------------------------------------------------------------------------------- response.c -- */

/* Ends the serve and frees the response. */
void response_close(struct response *response, enum tl_serve_end end);
void response_send_cancelled(struct tl_conn *conn, uint32_t handle);

#endif
