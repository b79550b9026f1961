// SPDX-License-Identifier: Apache-2.0
/*
 * A data connection: how one peer is reached by one of the transports, over one link at a time.
 *
 *      OFF --link--> HELD, until a faster path has failed or been refused (server/peers/data_connections.h); then
 *                  ours                                        theirs
 *      HELD -------> CREATING --introduced--> OFFERED     HELD -------> EXPECTING <--refused by us, broken--
 *                       ^                       | ANSWER                    | OFFER                         |
 *                       |pause over             v                           v                               |
 *                    BACK_OFF <--failed-- CONNECTING --verified--> UP <-- CONNECTING ----------------------->
 *                       ^-------------------broken-----------------'
 *      any state --final refusal, other host, parameters that do not fit--> REFUSED, until another link
 *      any state --link lost--> OFF
 *
 * The side that opened the link offers, and offers again with growing pauses when an attempt fails or the connection
 * breaks; the other side answers, also while it holds the path. Without a data plane of our own the path is REFUSED
 * from the beginning, and the peer is told so, with the reason. Every attempt has a deadline. Who sees a path break
 * tells the other side, over the link. When two have opened links to each other, the one whose link stays is the last
 * to use it: a path over the other's link may end under its hands in the meantime, at any point, which is no failure.
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

enum tl_data_connection_state {
    TL_DATA_CONNECTION_OFF,        /* waits for a link */
    TL_DATA_CONNECTION_HELD,       /* waits until no faster one is hoped for */
    TL_DATA_CONNECTION_EXPECTING,  /* waits for the peer's offer; for the first one not for ever */
    TL_DATA_CONNECTION_CREATING,   /* waits for the reactor to make the connection, and its address */
    TL_DATA_CONNECTION_OFFERED,    /* waits for the peer's answer */
    TL_DATA_CONNECTION_CONNECTING, /* waits for the connection to be verified */
    TL_DATA_CONNECTION_UP,         /* carries requests */
    TL_DATA_CONNECTION_BACK_OFF,   /* waits for the pause to end */
    TL_DATA_CONNECTION_REFUSED,    /* cannot be had on this link; waits for another */
};

struct tl_data_connection_events {
    /* What tl_data_connection_use says may be another than before. */
    void (*changed)(void *owner);
    /* A session ends: the peer may not have heard that the tensors of these requests have arrived. */
    void (*unconfirmed)(void *owner, uint64_t incarnation, const uint64_t *numbers, size_t count);
};

struct tl_data_connection {
    struct tl_worker *worker;
    const struct tl_transport_slot *slot;
    const char *name; /* of the peer; "" for a client */
    const struct tl_data_connection_events *events;
    void *owner;
    enum tl_data_connection_state state;
    struct tl_link *link;       /* NULL: OFF */
    struct tl_session *session; /* from CREATING to UP, of our side; NULL: none */
    uint64_t attempt;           /* of the latest offer, ours or the peer's */
    bool is_first;              /* no attempt on this link has failed yet */
    bool is_passing;            /* another link is about to take the place of this one: the next failure is none */
    bool is_elsewhere;          /* the peer is on a host that this transport does not reach */
    bool is_left;               /* the peer has closed it in order: it restarts, or will be offered one again */
    unsigned failure_count;     /* attempts in a row, and connections that did not last */
    int64_t up_since_ns;        /* while UP */
    struct tl_timer timer;      /* end of the attempt, or of the pause */
    char reason[TL_ERROR_MESSAGE_BYTES]; /* why it cannot be used; "" when UP */
    const char *lasting_reason;          /* the same for completions (base/reason.h) */
    char logged[TL_ERROR_MESSAGE_BYTES]; /* the reason that was logged last */
    bool has_logged;
};

/* What a request should do. */
enum tl_data_connection_use {
    TL_DATA_CONNECTION_TAKE,  /* travel on path->session */
    TL_DATA_CONNECTION_AWAIT, /* wait: `changed` will be called */
    TL_DATA_CONNECTION_AVOID, /* it cannot be used now */
};

/* name lives as long as the path, slot as long as the worker. */
void tl_data_connection_init(struct tl_data_connection *connection, struct tl_worker *worker,
                             const struct tl_transport_slot *slot, const char *name,
                             const struct tl_data_connection_events *events, void *owner);
/* This link is in use from now on, in place of another or of none: the path is held, or refused. is_passing: the peer
 * has opened it, and one of ours will take its place unless that fails. */
void tl_data_connection_begin(struct tl_data_connection *connection, struct tl_link *link, bool is_passing);
/* It has failed. */
void tl_data_connection_stay(struct tl_data_connection *connection);
/* There is no link any more. Harmless when there was none. */
void tl_data_connection_end(struct tl_data_connection *connection);
/* Refuses an offer of a transport that this worker does not have. */
void tl_data_connection_refuse_offer(const struct tl_worker *worker, struct tl_link *link,
                                     const struct tl_connection_message *offer);
/* Sets out, if it is held. */
void tl_data_connection_go_on(struct tl_data_connection *connection);
/* What the peer tells of this transport on any link of its. */
void tl_data_connection_hear(struct tl_data_connection *connection, struct tl_link *link,
                             const struct tl_connection_message *message);

/* It has been refused, or has failed on this link once. */
bool tl_data_connection_has_failed(const struct tl_data_connection *connection);
enum tl_data_connection_use tl_data_connection_use(const struct tl_data_connection *connection);

#endif
