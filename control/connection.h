// SPDX-License-Identifier: Apache-2.0
/*
 * The connections that a server gives to gRPC, and how a call says which of them it came over.
 *
 * gRPC returns one text for the connection of a call. That of 1.51 is the number of a descriptor, which 1.51 keeps open
 * as long as calls of the connection are left. The current core closes it with the connection, after which the number
 * may be another connection's while calls wait; its text is therefore ours, and contains all that a caller may ask for.
 * With TLS gRPC's peer is the relay, which knows where the connection comes from (tl_tls_find).
 */
#ifndef CONTROL_CONNECTION_H
#define CONTROL_CONNECTION_H

#include <grpc/grpc.h>
#include <stdint.h>

#include "control/endpoint.h"

struct tl_connection {
    int fd;                                 /* gRPC's; another connection may have it by now; -1: unknown */
    uint64_t cookie;                        /* identifies gRPC's socket; 0: unknown */
    char address[TL_ENDPOINT_TARGET_BYTES]; /* where it comes from, as a target; "": unknown */
};

/* Returns what identifies a socket also when its descriptor is used again; 0: it is none. Thread: any. */
uint64_t tl_connection_cookie(int fd);

/* Gives a server a connection. Ownership: the descriptor becomes gRPC's. Thread: any. */
void tl_connection_add(grpc_server *server, int fd, grpc_server_credentials *credentials);

/* Returns over which connection a server's call came. */
void tl_connection_of(grpc_call *call, struct tl_connection *ret_connection);

#endif
