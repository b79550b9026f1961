// SPDX-License-Identifier: Apache-2.0
/*
 * A data connection as its files see it: data_connection_states.c (one table for all that may happen) and
 * data_connection.c (messages of the peer, links, what requests ask).
 */
#ifndef SERVER_PEERS_DATA_CONNECTION_INTERNAL_H
#define SERVER_PEERS_DATA_CONNECTION_INTERNAL_H

#include "server/peers/data_connection.h"

enum event_kind {
    /* The link. */
    EVENT_LINK,       /* there is a link that the connection may be set up over */
    EVENT_LINK_UNFIT, /* there is a link, and the connection cannot be set up over it */
    EVENT_LINK_LOST,
    /* What comes next. */
    EVENT_OFFER,   /* our link: it is time for an attempt */
    EVENT_EXPECT,  /* the peer's link: it is time for the peer's attempt */
    EVENT_CLOSING, /* the worker is shutting down, so that no attempt begins */
    /* Messages of the peer. */
    EVENT_OFFER_HEARD,   /* with an attempt that may be answered */
    EVENT_ANSWER_HEARD,  /* to the present attempt */
    EVENT_REFUSAL_HEARD, /* of all attempts, or of the present one */
    /* The session. */
    EVENT_OFFER_SENT,  /* our link: our pair address was sent to the peer */
    EVENT_ANSWER_SENT, /* the peer's link: the same */
    EVENT_UP,
    EVENT_CLOSED, /* with the reason */
    EVENT_TIMEOUT,
    /* What follows from a failure (`failed`). */
    EVENT_FINAL,   /* there will be no other attempt over this link */
    EVENT_RETRY,   /* our link: there will be another attempt after a pause */
    EVENT_AWAIT,   /* the peer's link: the peer will offer again */
    EVENT_PASSING, /* it has ended for the link that takes this one's place, which is no failure */
    EVENTS,
};

struct event {
    enum event_kind kind;
    const struct tl_connection_message *message; /* of a message of the peer */
    const struct tl_error *reason;               /* of EVENT_CLOSED */
};

/* Moves the connection as its table says. Messages that the peer may not send are refused before they become events, so
 * that an event that the table leaves out is an error of this program and aborts. */
void data_connection_handle(struct tl_data_connection *connection, const struct event *event);

/* The same for an event that carries nothing. */
static inline void data_connection_happen(struct tl_data_connection *connection, enum event_kind kind)
{
    data_connection_handle(connection, &(struct event){.kind = kind});
}

/* Sets why the connection cannot be used. */
void data_connection_set_reason(struct tl_data_connection *connection, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Sends the peer a REFUSAL of this attempt, or with attempt 0 of all; is_final: for as long as the link. */
void data_connection_tell_refusal(struct tl_link *link, const char *transport, uint64_t attempt, bool is_final,
                                  const char *reason);

#endif
