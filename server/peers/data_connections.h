// SPDX-License-Identifier: Apache-2.0
/*
 * The data connections to one peer, one for each of the worker's transports, over one link at a time.
 *
 * Happy path: the first is set up at once; the next one only when it has been refused or has failed once, so that a
 * pair of workers with the fastest connection has no other. Requests take the first that is up. Failure modes: one that
 * broke is set up again, and carries requests again as soon as it is up; when none is left, requests take the link, or
 * fail.
 *
 * Thread: the loop's owner.
 */
#ifndef SERVER_PEERS_DATA_CONNECTIONS_H
#define SERVER_PEERS_DATA_CONNECTIONS_H

#include "server/peers/data_connection.h"
#include "server/transports/transports.h"

struct tl_data_connections {
    struct tl_worker *worker;
    struct tl_data_connection items[TL_MAX_TRANSPORTS]; /* [worker->data_plane.transport_count] */
    const struct tl_data_connection_events *events;
    void *owner;
    const char *lasting_reason;                   /* lasting_parts in one text */
    const char *lasting_parts[TL_MAX_TRANSPORTS]; /* the reason of each connection */
};

/* Prepares the connections to the peer with this name ("" for a client), which lives as long as they do.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory for their timers. */
enum tl_status tl_data_connections_init(struct tl_data_connections *connections, struct tl_worker *worker,
                                        const char *name, const struct tl_data_connection_events *events,
                                        void *owner) TL_MUST_USE;
/* The connections have no link. */
void tl_data_connections_fini(struct tl_data_connections *connections);
/* Sets the link in use, in place of another or of none. is_being_replaced: as tl_data_connection_begin. */
void tl_data_connections_begin(struct tl_data_connections *connections, struct tl_link *link, bool is_being_replaced);
/* The link of ours that was to take the place of this one has failed. May be called without one. */
void tl_data_connections_stay(struct tl_data_connections *connections);
/* The link has ended. May be called without a link. */
void tl_data_connections_end(struct tl_data_connections *connections);
/* Takes a message of the peer, from any of its links. */
void tl_data_connections_handle_message(struct tl_data_connections *connections, struct tl_link *link,
                                        const struct tl_connection_message *message);

/* Returns what a request should do; with TL_DATA_CONNECTION_TAKE, also on which connection. */
enum tl_data_connection_use tl_data_connections_use(const struct tl_data_connections *connections,
                                                    const struct tl_data_connection **ret_connection);
/* Returns the connection that carries requests; NULL: none is up. */
const struct tl_data_connection *tl_data_connections_best(const struct tl_data_connections *connections);
/* Returns whether a connection is about to be up: the peer may use it already. */
bool tl_data_connections_are_coming_up(const struct tl_data_connections *connections);
/* Returns those of two that can carry a request sooner, the first ones where it is equal. NULL: there are none. */
const struct tl_data_connections *tl_data_connections_sooner(const struct tl_data_connections *first,
                                                             const struct tl_data_connections *second);
/* Writes why the connections before the best one carry no requests; "" when the best one is the first. */
void tl_data_connections_format_reason(const struct tl_data_connections *connections, char *ret_text, size_t capacity);
/* Returns whether there is nothing to wait for: a connection is up, or each says why it cannot be. */
bool tl_data_connections_are_judged(const struct tl_data_connections *connections);
/* Returns why the first connection that could carry requests does not; "": one does, none has failed yet, the peer has
 * closed it in order, or the two workers have none in common, which is a failure where one is required. */
const char *tl_data_connections_failure(const struct tl_data_connections *connections);
/* Returns why no connection carries requests; the text lives for ever (base/reason.h). */
const char *tl_data_connections_lasting_reason(struct tl_data_connections *connections);

#endif
