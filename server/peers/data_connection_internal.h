// SPDX-License-Identifier: Apache-2.0
/*
 * A data connection as its files see it: data_connection_states.c (one table for all that may happen) and
 * data_connection.c (messages of the peer, links, what requests ask).
 */
#ifndef SERVER_PEERS_DATA_CONNECTION_INTERNAL_H
#define SERVER_PEERS_DATA_CONNECTION_INTERNAL_H

#include "server/peers/data_connection.h"

enum connection_event_kind {
    /* The link. */
    CONNECTION_EVENT_LINK,       /* there is a link that the connection may be set up over */
    CONNECTION_EVENT_LINK_UNFIT, /* there is a link, and the connection cannot be set up over it */
    CONNECTION_EVENT_LINK_LOST,
    /* What comes next. */
    CONNECTION_EVENT_OFFER,   /* our link: it is time for an attempt */
    CONNECTION_EVENT_EXPECT,  /* the peer's link: it is time for the peer's attempt */
    CONNECTION_EVENT_CLOSING, /* the worker is shutting down, so that no attempt begins */
    /* Messages of the peer. */
    CONNECTION_EVENT_OFFER_RECEIVED,   /* with an attempt that may be answered */
    CONNECTION_EVENT_ANSWER_RECEIVED,  /* to the present attempt */
    CONNECTION_EVENT_REFUSAL_RECEIVED, /* for all attempts, or for the present one */
    /* The session. */
    CONNECTION_EVENT_OFFER_SENT,  /* our link: our pair address was sent to the peer */
    CONNECTION_EVENT_ANSWER_SENT, /* the peer's link: the same */
    CONNECTION_EVENT_UP,
    CONNECTION_EVENT_CLOSED, /* with the reason */
    CONNECTION_EVENT_TIMEOUT,
    /* What follows from a failure (`failed`). */
    CONNECTION_EVENT_FINAL,   /* there will be no other attempt over this link */
    CONNECTION_EVENT_RETRY,   /* our link: there will be another attempt after a pause */
    CONNECTION_EVENT_AWAIT,   /* the peer's link: the peer will offer again */
    CONNECTION_EVENT_PASSING, /* it has ended for the link that takes this one's place, which is no failure */
    CONNECTION_EVENTS,
};

struct connection_event {
    enum connection_event_kind kind;
    const struct tl_connection_message *message; /* what the peer has sent; NULL: it is no message of the peer */
    const struct tl_error *reason;               /* CONNECTION_EVENT_CLOSED: why */
};

/* Moves the connection as its table says. Messages that the peer may not send are refused before they become events, so
 * that an event that the table leaves out is an error of this program and aborts. */
void data_connection_handle(struct tl_data_connection *connection, const struct connection_event *event);

/* The same for an event that carries nothing. */
static inline void data_connection_happen(struct tl_data_connection *connection, enum connection_event_kind kind)
{
    data_connection_handle(connection, &(struct connection_event){.kind = kind});
}

/* Sets why the connection cannot be used. */
void data_connection_set_reason(struct tl_data_connection *connection, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Sends the peer a REFUSAL of this attempt, or with attempt 0 of all; is_final: for as long as the link. */
void data_connection_send_refusal(struct tl_link *link, const char *transport, uint64_t attempt, bool is_final,
                                  const char *reason);

#endif
