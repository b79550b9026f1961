// SPDX-License-Identifier: Apache-2.0
/*
 * A session as its files see it: session.c (its states, the connection, the public functions) and session_requests.c
 * (the requests that travel over it).
 */
#ifndef SERVER_PEERS_SESSION_INTERNAL_H
#define SERVER_PEERS_SESSION_INTERNAL_H

#include "base/numbers.h"
#include "server/peers/session.h"

/*
 *   CREATING --opener: made--> CREATED --the peer's answer--> CONNECTING --verified--> UP --drain--> DRAINING
 *       |                                                        ^
 *       \------other side: made, with the peer's address---------/
 *
 *   any of these --end--> ENDING        these and ENDING --closed--> OVER --all has come back--> freed
 *   CREATING, ENDING --could not be made--> OVER
 */
enum session_state {
    SESSION_NEVER,      /* no state */
    SESSION_CREATING,   /* waits for the reactor to make the connection */
    SESSION_CREATED,    /* opener: waits for the owner to bring the peer's answer */
    SESSION_CONNECTING, /* waits for the reactor to verify the connection */
    SESSION_UP,         /* carries requests; waits for its end */
    SESSION_DRAINING,   /* carries what it has; waits for the reactor to close the idle connection */
    SESSION_ENDING,     /* has asked for the end; waits until the reactor has closed the connection */
    SESSION_OVER,       /* the owner knows of the end; waits for closures and requests to come back, then is freed */
    SESSION_STATES,
};

/* The reactor raises the first five through closures, which arrive in the order in which it posts them. */
enum session_event {
    SESSION_EVENT_CREATED,  /* opener: the connection exists */
    SESSION_EVENT_ACCEPTED, /* other side: the connection exists and connects already */
    SESSION_EVENT_FAILED,   /* the connection could not be made, for this reason */
    SESSION_EVENT_UP,       /* the connection is verified */
    SESSION_EVENT_CLOSED,   /* the connection has ended, for this reason */
    SESSION_EVENT_RETURNED, /* a closure or a request has come back */
    SESSION_EVENT_CONNECT,  /* opener: the owner has put the peer's answer into the session */
    SESSION_EVENT_DRAIN,    /* the worker shuts down: this is the reason for what is not up */
    SESSION_EVENT_END,      /* the owner or the worker ends the session, for this reason */
    SESSION_EVENTS,
};

/* The loop's thread owns the first part. A closure that is out owns the fields that it names. */
struct tl_session {
    struct tl_transport *transport;
    struct tl_list link; /* in transport->sessions */
    const struct tl_session_events *events;
    void *owner; /* NULL: abandoned */
    struct tl_identity peer;
    enum session_state state;
    bool is_opener;                   /* does not change */
    bool is_client_peer;              /* the peer is no member of the cluster */
    unsigned closures_out;            /* on their way to the reactor or back */
    size_t request_count;             /* given to the session and not done */
    struct tl_numbers answered;       /* the latest requests that were answered, measures.most_unconfirmed of them */
    struct tl_conn_measures measures; /* the reactor's until up_closure has come */

    struct tl_memory_making making; /* its closure creates the connection, and comes back */
    struct tl_closure connect_closure;
    struct tl_closure drain_closure;
    struct tl_closure end_closure;
    uint8_t bytes[TL_CONN_ADDRESS_BYTES]; /* on the way there the peer's address, on the way back ours */
    uint32_t len_bytes;                   /* on the way back 0: only SESSION_EVENT_CLOSED follows */
    struct tl_error failure;              /* why the connection could not be made; read when `making` is back */
    struct tl_error end_reason;           /* written once, before end_closure is posted */

    /* The reactor's thread owns the rest. */
    struct tl_conn *conn; /* NULL: there is none yet, or none any more */
    bool is_ended;        /* end_closure has run, perhaps before there was a connection */
    struct tl_closure up_closure;
    struct tl_closure closed_closure;
    struct tl_error closed_reason; /* the loop's when closed_closure has come */
};

/* Moves the session as its table says. An event that the table leaves out is an error of this program and aborts.
 * reason is NULL where the event has none. The session may be freed when this returns. */
void session_handle(struct tl_session *session, enum session_event event, const struct tl_error *reason);

/* Posts a closure to the loop's thread. Runs on the reactor. */
void session_send_to_loop(struct tl_transport *transport, struct tl_closure *closure,
                          void (*run)(struct tl_closure *closure));

#endif
