// SPDX-License-Identifier: Apache-2.0
/* The link, as its files see it: link.c (life, Hello), link_requests.c (requests out and in), link_serves.c
 * (requests of the peer), link_send.c (frames out), link_chunks.c (tensors in them), link_receive.c (frames in),
 * link_window.c (how far each side is ahead of the other), link_stall.c (the end of links whose peer takes nothing),
 * link_unsent.c (how many answers may wait), link_connections.c (messages about data connections, out and in),
 * link_device.c (values and destinations on devices). */
#ifndef CONTROL_LINK_INTERNAL_H
#define CONTROL_LINK_INTERNAL_H

#include "base/hash_table.h"
#include "base/number_map.h"
#include "base/numbers.h"
#include "base/timer.h"
#include "control/internal.h"
#include "control/key_numbers.h"
#include "control/link.h"
#include "control/lookup.h"
#include "control/stream.h"
#include "control/wire.h"

/*
 *   opened by the peer: HANDSHAKE <--Hello, not known yet / asked again--> ASKING
 *   SEARCHING --found--> (with TLS: DIALLING --authenticated-->) HANDSHAKE --Hello of the peer fits--> UP
 * --tl_link_drain, goodbye--> DRAINING --idle--> CLOSING any state --broken, refused, tl_link_close--> CLOSING --stream
 * ended--> (freed)
 */
enum link_state {
    LINK_SEARCHING, /* ours: has no stream yet; waits for the address of the peer's host */
    LINK_DIALLING,  /* ours: waits for the TLS handshake */
    LINK_HANDSHAKE, /* waits for the peer's Hello; woken by the stream or the handshake timer */
    LINK_ASKING,    /* has the peer's first frame in held.frame; waits until it is known whether the peer may be who it
                       says it is; woken by tl_control_ask_again or the handshake timer */
    LINK_UP,        /* carries requests */
    LINK_DRAINING,  /* refuses new requests; waits for fetches and serves to end */
    LINK_CLOSING,   /* waits for the end of the stream; nothing is sent or handled any more */
};

/* How far each side is ahead of the other: bytes of Frame.data since the link began. */
struct link_window {
    uint64_t ours_bytes;      /* the peer may be so far ahead; 0: as far as HTTP/2 lets it */
    uint64_t taken_bytes;     /* bytes of the peer's that were taken */
    uint64_t reported_bytes;  /* the part of taken_bytes that was reported to the peer */
    uint64_t peers_bytes;     /* we may be so far ahead; 0: as far as HTTP/2 lets us */
    uint64_t sent_bytes;      /* bytes of ours */
    uint64_t confirmed_bytes; /* the part of sent_bytes that the peer has taken */
};

/* Whether the peer takes what waits for it. */
struct link_stall {
    struct tl_timer timer;
    bool has_progressed; /* since the timer looked */
    int64_t since_ns;    /* progress was made then or later */
};

#define LINK_PRIORITIES (1 + TL_MAX_PRIORITY)

/* Serves in the order in which they are sent: the greater priority first, and then as they came. */
struct link_queue {
    struct tl_list lists[LINK_PRIORITIES]; /* by priority; items are link_serve */
};

/* The requests of the peer, and what is sent for them. */
struct link_answers {
    struct tl_hash_table serves; /* items are link_serve: all requests of the peer that are not over, by number */
    size_t broken_chain;         /* the link has ended: those in the chains of the table before this one are over */
    uint64_t factor;             /* for the hashes of the numbers: odd and random */
    struct tl_list failures;     /* items are link_serve: a status waits to be sent */
    struct link_queue ready;     /* have an offer, wait until less is in flight */
    struct link_queue active;    /* are being sent; those of one priority one after the other */
    struct tl_list leaving; /* items are link_serve: the frame in flight, or one before it, has bytes of their files */
    uint64_t active_bytes[LINK_PRIORITIES]; /* left to send of the active ones, by priority */
    uint64_t ready_bytes;                   /* left to send of the ready ones that refer to their values */
    uint64_t unbegun_bytes;                 /* left to send of all that are ready */
    size_t unsent_count;  /* serves that are over as soon as enough was sent: ready, active, staging, leaving, failed */
    size_t staging_count; /* those of them that wait for a device, and those that */
    size_t fenced_count;  /* ... wait for a stream of one */
    uint64_t unsent_left; /* how many of them may be: taken from control->unsent */
    struct tl_share *unsent_share;   /* invalid while unsent_left is 0 */
    struct link_status *last_status; /* status of the serve that has failed last; NULL: none waits */
    bool is_read_paused;             /* the peer is not read: too many answers wait, or bytes wait for a device */
};

/* The keys that have numbers on this link. */
struct link_keys {
    struct tl_key_numbers sent; /* the peer knows their numbers */
    struct tl_kept_keys kept;   /* the peer has sent them; limit is what our Hello offers */
    bool is_of_task;            /* the peer is a task of the cluster, and no client */
    struct tl_share *share;     /* what a client's keys are charged to; NULL: nothing */
};

/* A frame that was not handled yet, while ASKING, or not to its end. */
struct link_held_frame {
    grpc_byte_buffer *frame; /* NULL: none */
    bool is_begun;           /* a part of it was handled; others have their turn now */
    size_t handled_requests; /* so many of its requests */
};

struct tl_link {
    struct tl_control *control;
    struct tl_list control_link; /* in control->links */
    bool is_ours;                /* opened by us, not by the peer */
    struct tl_lookup *lookup;    /* NULL: not SEARCHING */
    struct tl_tls_dial *dial;    /* NULL: not DIALLING */
    struct tl_stream *stream;    /* NULL: SEARCHING, or it has ended */
    grpc_channel *channel;       /* with the stream, of a link of ours */
    const struct tl_link_events *events;
    void *owner;
    enum link_state state;
    struct tl_identity peer;
    char expected_name[TL_MAX_NAME_BYTES];
    struct tl_list asking_link; /* in control->asking_links while ASKING */
    struct link_held_frame held;
    struct tl_closure round_closure; /* goes on with the frame that is held */
    struct tl_timer handshake_timer;
    struct tl_error close_reason; /* code TL_OK: none was given, the stream's status is the reason */
    bool has_close_reason;
    bool has_said_goodbye; /* opened by the peer: it was asked to end the stream */
    bool has_half_closed;  /* the side that opened it has half-closed, with nothing open */
    bool is_in_order;      /* it has ended in order, so that the other side has everything */

    struct tl_closure end_closure; /* deferred: the end of a link without a stream, or a part of the end of any */
    struct tl_closure flush_closure;
    bool is_flush_deferred;

    struct tl_number_map fetches; /* items are link_fetch: all that were given to us and are not done */
    struct tl_list to_request;    /* items are link_fetch: not asked yet */
    struct tl_list asked;         /* items are link_fetch: the others, in the order in which they were asked */
    struct tl_list to_fail;       /* items are tl_fetch: could not even be started */
    bool is_packed;               /* requests and chunks travel packed, because the peer reads that and we do */
    struct link_keys keys;
    struct tl_numbers cancels;  /* numbers that the peer must still be sent */
    struct tl_numbers received; /* one-shot tensors that have arrived: all that the peer may not know of */
    size_t framed_count;        /* the first ones of received, which are in frames already */
    uint64_t confirmed_count;   /* dropped from the front of received, since the peer knows of them */

    struct link_window window;
    struct link_stall stall;

    struct tl_list connection_messages; /* items are link_connection_message: wait to be sent */
    size_t connection_message_count;

    struct link_answers answers;
    size_t landing_count; /* fetches that have bytes which wait for a device */
};

/* Bytes on their way to a destination on a device; see link_device.c. */
struct link_landing;

/* A fetch while it is on a link. */
struct link_fetch {
    uint64_t number;
    struct tl_fetch *fetch;
    struct tl_link *link;         /* NULL: it is off the link, and waits for the device to let go of the destination */
    struct link_landing *landing; /* NULL: the destination is on the host, or no value was begun */
    struct tl_list request_link;  /* in to_request or asked */
    uint64_t framed_before;       /* how many of `received` were sent before this request, confirmed ones too */
    bool is_asked;
    bool is_begun; /* meta-data has come on this link */
    bool is_one_shot;
};

/* A status that failed serves send; counts the serves that refer to it. */
struct link_status {
    size_t reference_count;
    enum tl_status code;
    char message[];
};

/* link.c */
void link_flush_later(struct tl_link *link);
/* The peer broke the protocol: counts it, ends the link. */
void link_protocol_error(struct tl_link *link, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The peer's first frame. */
void link_handshake_done(struct tl_link *link, const Tensorlane__V1__Hello *hello);
/* Ends a draining link that has become idle. */
void link_maybe_drained(struct tl_link *link);

/* link_send.c */
void link_send_frames(struct tl_link *link);
/* Our handshake, which acknowledges up to so many tensors that have arrived. NULL: no memory. */
grpc_byte_buffer *link_hello(struct tl_link *link, size_t received_count);

/* link_requests.c */
/* Decides how many keys our Hello offers to keep. Before link_hello. */
void link_keys_offer(struct tl_link *link);
/* The peer's Hello has come: whether records travel packed, and how many keys the peer keeps. */
void link_keys_agree(struct tl_link *link, const Tensorlane__V1__Hello *hello);
void link_keys_fini(struct tl_link *link);
/* Starts the requests of a frame, in both forms, from link->held.handled_requests on, as many as the loop's quota
 * allows. Returns whether all were started; false as well when the link is closing. */
bool link_requests_handle(struct tl_link *link, const Tensorlane__V1__Frame *frame);

/* link_window.c */
/* target: where the peer is. Before our handshake is made. */
void link_window_init(struct tl_link *link, const char *target);
/* True when no tensor's bytes may be sent until the peer has taken more. */
bool link_window_is_full(const struct tl_link *link);
/* True when the peer waits, or soon will, for the report of what was taken. */
bool link_window_must_report(const struct tl_link *link);
/* The next frame's taken_bytes. */
uint64_t link_window_update(const struct tl_link *link);
/* A frame with this report and so much data was sent. */
void link_window_sent(struct tl_link *link, uint64_t data_bytes);
/* A frame with so much data was handled. */
void link_window_took(struct tl_link *link, uint64_t data_bytes);
/* A frame's taken_bytes. */
void link_window_reported(struct tl_link *link, uint64_t taken_bytes);

/* link_unsent.c */
/* Requests in one frame. Ours have fewer. */
#define LINK_MAX_REQUESTS 1024
/* True when so many answers wait for the peer, which has opened the link, that it must not be read. */
bool link_is_congested(struct tl_link *link);
/* Gives back what the link may keep waiting and does not need. */
void link_unsent_release_quota(struct tl_link *link);
void link_unsent_fini(struct tl_link *link);
/* The status as the failures of this link share it, with a reference for the caller; NULL: no memory. */
struct link_status *link_status_get(struct tl_link *link, const struct tl_error *error);
void link_status_put(struct tl_link *link, struct link_status *status); /* NULL is accepted */

/* link_log.c */
/* Logs that the link is ended for this reason, unless another one from the same address has been lately. kind: what
 * such reasons have in common. */
void link_log_end(struct tl_link *link, const char *kind, const struct tl_error *reason);

/* link_stall.c */
void link_stall_init(struct tl_link *link);
/* Something may be unsent: watches whether the peer takes it, unless that is watched already. */
void link_stall_watch(struct tl_link *link);
/* A frame was sent with so many chunks. */
void link_stall_sent(struct tl_link *link, size_t chunk_count);
/* A frame of the peer with so many chunks was handled. */
void link_stall_progressed(struct tl_link *link, size_t chunk_count);
void link_stall_fini(struct tl_link *link);
/* Cancels the stream of a link that closes in order, unless it has ended after options.stalled_timeout_ns. */
void link_stall_await_end(struct tl_link *link);

/* link_connections.c */
/* Messages in one frame. */
#define LINK_MAX_CONNECTION_MESSAGES 8

/* A message on its way out, and its form in a frame. */
struct link_connection_message {
    struct tl_list place; /* in link->connection_messages */
    struct tl_connection_message message;
    Tensorlane__V1__ConnectionMessage wire; /* points into message */
};

/* Puts what waits into a frame; ret_messages has LINK_MAX_CONNECTION_MESSAGES. Returns how many. */
size_t link_connections_add(struct tl_link *link, Tensorlane__V1__ConnectionMessage **ret_messages);
/* The frame with the first `count` has been sent. */
void link_connections_sent(struct tl_link *link, size_t count);
void link_connections_handle(struct tl_link *link, const Tensorlane__V1__Frame *frame);
void link_connections_drop(struct tl_link *link);

/* Reads the peer on, if nothing holds it up any more. */
void link_read_on(struct tl_link *link);

/* link_device.c, receiving */
/* A value was begun whose destination is on a device, or not there yet. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status link_landing_begin(struct link_fetch *entry, struct tl_error *ret_error) TL_MUST_USE;
/* Takes the bytes of a chunk. Errors: TL_OUT_OF_RANGE: more than was announced; none was taken. */
enum tl_status link_landing_take(struct link_fetch *entry, uint64_t count, struct tl_wire_data *data,
                                 struct tl_error *ret_error) TL_MUST_USE;
/* Moves on what was taken; the chunk may have been the last one. The fetch may be over when this returns. */
void link_landing_go_on(struct link_fetch *entry, const Tensorlane__V1__Chunk *chunk);
/* The destination is there, or never will be. */
void link_landing_placed(struct tl_fetch *fetch, const struct tl_error *status);
/* Ends the landing of a fetch that leaves its link. False: the device still touches the destination; when it has let
 * go, the fetch is done with this error. */
bool link_landing_end(struct link_fetch *entry, const struct tl_error *error) TL_MUST_USE;

/* link_receive.c */
/* Ends one fetch with an error of ours and informs the peer, which forgets it. */
void link_fetch_fail(struct link_fetch *entry, const struct tl_error *error);
/* Verifies a fetch whose bytes are all in the destination, and ends it. */
void link_fetch_complete(struct link_fetch *entry, bool has_checksum, uint64_t checksum);
void link_receive_frame(struct tl_link *link, grpc_byte_buffer *buffer);
/* Handles what a frame that crosses our half-close says of requests of earlier connections. The peer does not say it
 * again when the link has ended in order. */
void link_receive_last(struct tl_link *link, grpc_byte_buffer *buffer);
/* The peer knows of the first count_received tensors that were acknowledged on this link. */
void link_confirm(struct tl_link *link, uint64_t count_received);
/* The link has ended: ends its fetches, as many as the loop's quota allows. Returns whether none is left. */
bool link_fetches_break(struct tl_link *link, const struct tl_error *reason);
#endif
