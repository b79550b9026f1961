// SPDX-License-Identifier: Apache-2.0
/*
 * A data connection: how one peer is reached by one of the transports, over one link at a time. The table of its states
 * is in data_connection_states.c.
 *
 *      OFF --link--> HELD, until a faster connection has failed or been refused (server/peers/data_connections.h); then
 *                  ours                                        theirs
 *      HELD -------> CREATING --address----> OFFERED      HELD -------> EXPECTING <--refused by us, broken--
 *                       ^                       | ANSWER                    | OFFER                         |
 *                       |pause over             v                           v                               |
 *                    BACK_OFF <--failed-- CONNECTING --verified--> UP <-- CONNECTING ----------------------->
 *                       ^-------------------broken-----------------'
 *      any state --final refusal, other host, parameters that do not fit--> REFUSED, until another link
 *      any state --link lost--> OFF
 *
 * The side that opened the link offers, and offers again with growing pauses when an attempt fails or the connection
 * breaks; the other side answers, also while it holds the connection. Without a data plane of our own the connection is
 * REFUSED from the beginning, and the peer is sent the reason. Every attempt has a deadline. The side that sees the
 * connection break sends a message to the other side, over the link. When two workers have opened links to each other,
 * the one whose link stays is the last to use it: in the meantime its connection over the other's link may end at any
 * point, which is no failure.
 *
 * Thread: the loop's owner.
 */
#ifndef SERVER_PEERS_DATA_CONNECTION_H
#define SERVER_PEERS_DATA_CONNECTION_H

#include <stddef.h>

#include "base/timer.h"
#include "control/link.h"

struct tl_transport_slot;
struct tl_worker;
struct tl_session;

/* A connection that breaks so often within a minute needs attention. */
#define TL_MANY_BREAKS 3

/* The reason of a connection whose first attempt is under way; `health` recognizes it. */
#define TL_DATA_CONNECTION_BEGINS "the data connection is being set up"

enum tl_data_connection_state {
    TL_DATA_CONNECTION_OFF,        /* waits for a link */
    TL_DATA_CONNECTION_HELD,       /* waits until all faster ones have failed or been refused */
    TL_DATA_CONNECTION_EXPECTING,  /* waits for the peer's offer, for the first one until the timer fires */
    TL_DATA_CONNECTION_CREATING,   /* waits for the reactor to make the connection, and its address */
    TL_DATA_CONNECTION_OFFERED,    /* waits for the peer's answer */
    TL_DATA_CONNECTION_CONNECTING, /* waits for the connection to be verified */
    TL_DATA_CONNECTION_UP,         /* carries requests */
    TL_DATA_CONNECTION_BACK_OFF,   /* waits for the pause to end */
    TL_DATA_CONNECTION_REFUSED,    /* cannot be set up over this link; waits for another */
};

struct tl_data_connection_events {
    /* tl_data_connection_use may answer otherwise than before. */
    void (*changed)(void *owner);
    /* A session ends. The peer may not have heard that the tensors of these requests have arrived. */
    void (*unconfirmed)(void *owner, uint64_t incarnation, const uint64_t *numbers, size_t count);
};

struct tl_data_connection {
    struct tl_worker *worker;
    const struct tl_transport_slot *slot;
    const char *name; /* the peer's; "" for a client */
    const struct tl_data_connection_events *events;
    void *owner;
    enum tl_data_connection_state state; /* set by the table in data_connection_states.c only */
    struct tl_link *link;                /* NULL: OFF */
    struct tl_session *session;          /* our half, from CREATING to UP; NULL: none */
    uint64_t attempt;                    /* number of the latest offer, ours or the peer's */
    bool is_first;                       /* no attempt on this link has failed yet */
    unsigned tries;                      /* attempts that have failed since the link came, or since it was up last */
    bool is_being_replaced; /* another link is about to take the place of this one: the next failure is none */
    bool is_elsewhere;      /* the peer is on a host that this transport does not reach */
    bool is_left;           /* the peer has closed it in order: it restarts, or offers again */
    unsigned failure_count; /* failed attempts in a row, and connections that did not last */
    int64_t up_since_ns;    /* while UP */
    struct tl_timer timer;  /* end of the attempt, or of the pause; a place is kept for it */
    char reason[TL_ERROR_MESSAGE_BYTES]; /* why it cannot be used; "" when UP */
    const char *lasting_reason;          /* `reason` in a form for completions (base/reason.h) */
    char logged[TL_ERROR_MESSAGE_BYTES]; /* the reason that was logged last */
    bool has_logged;
    int64_t broken_ns[TL_MANY_BREAKS]; /* when it broke while it was UP, the latest ones; 0: it did not */
    unsigned break_count;
    const char *break_reason; /* why it broke last; never freed (base/reason.h) */
};

/* Returns whether it has broken TL_MANY_BREAKS times within the last minute. */
bool tl_data_connection_keeps_breaking(const struct tl_data_connection *connection);

/* What a request should do. */
enum tl_data_connection_use {
    TL_DATA_CONNECTION_TAKE,  /* travel on connection->session */
    TL_DATA_CONNECTION_AWAIT, /* wait: `changed` will be called */
    TL_DATA_CONNECTION_AVOID, /* it cannot be used now */
};

/* Prepares a connection without a link. name lives as long as the connection, slot as long as the worker.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory for its timer. */
enum tl_status tl_data_connection_init(struct tl_data_connection *connection, struct tl_worker *worker,
                                       const struct tl_transport_slot *slot, const char *name,
                                       const struct tl_data_connection_events *events, void *owner) TL_MUST_USE;
/* The connection has no link. */
void tl_data_connection_fini(struct tl_data_connection *connection);
/* Sets the link in use, in place of another or of none: the connection is held, or refused. is_being_replaced: the peer
 * has opened this link, and a link of ours will take its place unless that fails. */
void tl_data_connection_begin(struct tl_data_connection *connection, struct tl_link *link, bool is_being_replaced);
/* The link of ours that was to take the place of this one has failed. */
void tl_data_connection_stay(struct tl_data_connection *connection);
/* The link has ended. May be called without a link. */
void tl_data_connection_end(struct tl_data_connection *connection);
/* Refuses an offer of a transport that this worker does not have. */
void tl_data_connection_refuse_offer(const struct tl_worker *worker, struct tl_link *link,
                                     const struct tl_connection_message *offer);
/* Begins to set up a connection that is held; does nothing otherwise. */
void tl_data_connection_go_on(struct tl_data_connection *connection);
/* Takes a message of the peer about this transport, from any of its links. */
void tl_data_connection_handle_message(struct tl_data_connection *connection, struct tl_link *link,
                                       const struct tl_connection_message *message);

/* Returns whether it has been refused, or has failed on this link once. */
bool tl_data_connection_has_failed(const struct tl_data_connection *connection);
/* Returns whether its reason says why it cannot be set up: it has been refused, or two attempts have failed in a row.
 * One may fail for a reason that passes, such as a link that another takes the place of. */
bool tl_data_connection_is_judged(const struct tl_data_connection *connection);
enum tl_data_connection_use tl_data_connection_use(const struct tl_data_connection *connection);

#endif
