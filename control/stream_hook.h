// SPDX-License-Identifier: Apache-2.0
/* Between stream and server: the server counts the calls that are open. */
#ifndef CONTROL_STREAM_HOOK_H
#define CONTROL_STREAM_HOOK_H

#include "control/stream.h"

/* Called after on_closed, just before the stream is freed. */
void tl_stream_set_end_hook(struct tl_stream *stream, void (*hook)(void *context), void *context);

#endif
