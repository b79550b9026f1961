// SPDX-License-Identifier: Apache-2.0
/*
 * The data connections to one peer, one for each of the worker's transports, over one link at a time.
 *
 * Happy path: the first is set up at once; the next one only when it has been refused or has failed once, so that pairs
 * that have the fastest have no other. Requests take the first that is up. Failure modes: one that broke is set up
 * again, and carries requests again as soon as it is up; when none is left, requests take the link, or fail.
 *
 * Thread: the loop's owner.
 */
#ifndef SERVER_PEERS_DATA_CONNECTIONS_H
#define SERVER_PEERS_DATA_CONNECTIONS_H

#include "server/peers/data_connection.h"
#include "server/transports/transports.h"

struct tl_data_connections {
    struct tl_worker *worker;
    struct tl_data_connection items[TL_MAX_TRANSPORTS]; /* [worker->transport_count] */
    const struct tl_data_connection_events *events;
    void *owner;
    const char *lasting_reason;                   /* of those below, together */
    const char *lasting_parts[TL_MAX_TRANSPORTS]; /* the reasons of all that it was made of */
};

/* name: of the peer, "" for a client; lives as long as the paths. */
void tl_data_connections_init(struct tl_data_connections *connections, struct tl_worker *worker, const char *name,
                              const struct tl_data_connection_events *events, void *owner);
/* This link is in use from now on, in place of another or of none. is_passing: the peer has opened it, and one of ours
 * will take its place unless that fails. */
void tl_data_connections_begin(struct tl_data_connections *connections, struct tl_link *link, bool is_passing);
/* It has failed. Harmless when there was none. */
void tl_data_connections_stay(struct tl_data_connections *connections);
/* There is no link any more. Harmless when there was none. */
void tl_data_connections_end(struct tl_data_connections *connections);
/* What the peer tells on any link of its. */
void tl_data_connections_hear(struct tl_data_connections *connections, struct tl_link *link,
                              const struct tl_connection_message *message);

/* What a request should do; with TL_DATA_CONNECTION_TAKE, on which path. */
enum tl_data_connection_use tl_data_connections_use(const struct tl_data_connections *connections,
                                                    const struct tl_data_connection **ret_connection);
/* The one that carries requests; NULL: none is up. */
const struct tl_data_connection *tl_data_connections_best(const struct tl_data_connections *connections);
/* Why none of those before the best one carries requests; "" when it is the first. */
void tl_data_connections_format_reason(const struct tl_data_connections *connections, char *ret_text, size_t capacity);
/* Why none of them does; lives for ever (base/reason.h). */
const char *tl_data_connections_lasting_reason(struct tl_data_connections *connections);

#endif
