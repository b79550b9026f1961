// SPDX-License-Identifier: Apache-2.0
/* Between stream and server: the server counts the calls that are open, and what comes of a connection's bytes. */
#ifndef CONTROL_STREAM_HOOK_H
#define CONTROL_STREAM_HOOK_H

#include "control/connection.h"
#include "control/stream.h"

/* Each is called with the connection that the call came over. */
struct tl_stream_hooks {
    void (*message)(void *context, const struct tl_connection *connection, uint64_t message_bytes); /* a whole one */
    /* Messages of this call stay unread because of this process, or they are read again. */
    void (*hold)(void *context, const struct tl_connection *connection, bool is_held);
    /* After on_closed, just before the stream is freed. */
    void (*end)(void *context, const struct tl_connection *connection);
};

void tl_stream_set_hooks(struct tl_stream *stream, const struct tl_stream_hooks *hooks, void *context);

/* Over which connection a server's call came. Ownership: the stream's. */
const struct tl_connection *tl_stream_connection(const struct tl_stream *stream);

#endif
