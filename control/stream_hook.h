// SPDX-License-Identifier: Apache-2.0
/* Between stream and server: the server counts the calls that are open, and what comes of a connection's bytes. */
#ifndef CONTROL_STREAM_HOOK_H
#define CONTROL_STREAM_HOOK_H

#include "control/stream.h"

struct tl_stream_hooks {
    void (*message)(void *context, int connection, uint64_t message_bytes); /* a whole message has come */
    /* Messages of this call stay unread because of this process, or they are read again. */
    void (*hold)(void *context, int connection, bool is_held);
    void (*end)(void *context, int connection); /* after on_closed, just before the stream is freed */
};

/* connection: the descriptor of the connection that the call came over; -1: unknown. */
void tl_stream_set_hooks(struct tl_stream *stream, const struct tl_stream_hooks *hooks, void *context, int connection);

/* The descriptor of the connection that a server's call came over; -1: unknown. */
int tl_stream_connection_of(grpc_call *call);

#endif
