// SPDX-License-Identifier: Apache-2.0
/*
 * The guard: ends accepted connections that take more of the worker than they may.
 *
 * gRPC reads and parses on the thread of the control loop, and does not come back as long as a connection has more to
 * read. It also keeps what it has received of a message, or of a block of headers, for as long as the rest is missing.
 * The guard therefore watches from a thread of its own, twice a second, how many bytes the kernel has received on each
 * connection and how many of them have arrived here in whole messages. It ends
 *
 *  - the connection that sent most, when the loop has used its processor for half a second without getting anywhere;
 *  - a connection of which more bytes are unfinished than the whole server may hold;
 *  - a connection whose bytes are still unfinished after a time in which this process has read them.
 *
 * Ending means that the socket is disconnected; gRPC then closes the descriptor. The client may connect again.
 */
#ifndef CONTROL_GUARD_H
#define CONTROL_GUARD_H

#include <stdbool.h>
#include <stdint.h>

#include "control/connection.h"
#include "control/loop.h"

struct tl_guard;

struct tl_guard_options {
    struct tl_loop *loop;          /* whose rounds are watched; must outlive the guard */
    uint64_t max_unfinished_bytes; /* bound for one connection */
    uint64_t max_message_bytes;    /* what the end of a call may give back */
    int64_t max_unfinished_ns;     /* for how long bytes may stay unfinished; TL_TIME_NEVER: no limit */
};

/* Starts the thread. Errors: TL_RESOURCE_EXHAUSTED: no memory, thread or descriptor. */
enum tl_status tl_guard_create(const struct tl_guard_options *options, struct tl_guard **ret_guard,
                               struct tl_error *ret_error) TL_MUST_USE;

/* Ends the thread. No connection is ended any more. NULL is accepted. */
void tl_guard_destroy(struct tl_guard *guard);

/* Watches a connection that was accepted, before gRPC gets it: fd is gRPC's descriptor, and socket that of the TCP
 * connection with the cookie, which is the same one unless a relay is between them. The relay may have ended it
 * already. Without memory the connection is not watched. Thread: any. */
void tl_guard_add(struct tl_guard *guard, int fd, int socket, uint64_t cookie);

/* What came of the connection's bytes; one that is not watched, or no longer, is ignored. Thread: any. */
void tl_guard_call_began(struct tl_guard *guard, const struct tl_connection *connection);
void tl_guard_message(struct tl_guard *guard, const struct tl_connection *connection, uint64_t message_bytes);
/* A call's messages stay unread because of this process, or no longer. Meanwhile the client is not to blame for how
 * long messages stay unfinished. Thread: any. */
void tl_guard_hold(struct tl_guard *guard, const struct tl_connection *connection, bool is_held);
void tl_guard_call_ended(struct tl_guard *guard, const struct tl_connection *connection);

#endif
