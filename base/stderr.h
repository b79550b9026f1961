// SPDX-License-Identifier: Apache-2.0
/*
 * Standard error as a place that never holds anybody up.
 *
 * A pipe that nobody reads, a terminal that is stopped and a socket with a full buffer would make a writer wait for
 * ever. What cannot be written is given up instead. The descriptor is not made non-blocking: it is shared with other
 * processes, which do not expect that.
 */
#ifndef BASE_STDERR_H
#define BASE_STDERR_H

#include <stdbool.h>
#include <stddef.h>

/* What the system writes as one piece, also among other writers. */
#define TL_STDERR_PIECE_BYTES 4096

/* Writes text. False: it was not written, or not all of it; what is written next starts on a new line then. A SIGPIPE
 * that this causes is taken away before anybody sees it, errno is kept. Thread: any. Blocks: up to 0.1 s per piece for
 * a reader that falls behind, not at all for one that did so before.
 */
bool tl_stderr_put(const char *text, size_t len_bytes);

#endif
