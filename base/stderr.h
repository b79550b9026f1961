// SPDX-License-Identifier: Apache-2.0
/*
 * Standard error as a place that never blocks a writer. A pipe that is not read, a terminal that is stopped or a socket
 * with a full buffer would make it wait for ever.
 *
 * Text that cannot be written is given up instead. The descriptor is not made non-blocking, because other processes
 * share it and do not expect that.
 */
#ifndef BASE_STDERR_H
#define BASE_STDERR_H

#include <stdbool.h>
#include <stddef.h>

/* What the system writes as one piece, also among other writers. */
#define TL_STDERR_PIECE_BYTES 4096

/* Writes text. Returns false when it was not written, or not completely; the next text then starts on a new line. A
 * SIGPIPE that this causes is removed before the program sees it, and errno is kept. Thread: any. Blocks: up to 0.1 s
 * per piece for a reader that falls behind, not at all for one that did so before. */
bool tl_stderr_put(const char *text, size_t len_bytes);

#endif
