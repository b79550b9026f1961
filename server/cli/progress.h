// SPDX-License-Identifier: Apache-2.0
/* Progress of a long transfer on stderr: a bar with bytes, rate and time left on a terminal, now and then a plain line
 * elsewhere. */
#ifndef SERVER_CLI_PROGRESS_H
#define SERVER_CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct tl_progress_bar {
    const char *verb; /* "pulled": what has happened to the bytes */
    uint64_t total_bytes;
    bool is_quiet;
    /* private */
    bool is_terminal;
    int64_t start_ns;
    int64_t shown_ns;   /* when it was shown last */
    int64_t sampled_ns; /* when the rate was sampled last */
    uint64_t sampled_bytes;
    double bytes_per_sec;
    bool has_bar; /* a bar stands on the terminal's line */
};

/* Starts the clock and shows the bar at once; verb, total_bytes and is_quiet are set. */
void tl_progress_bar_start(struct tl_progress_bar *progress);

/* Reports how many bytes have been moved since the start. Cheap: prints at most ten times a second. stall: why nothing
 * moves and how long that may last, shown instead of rate and time left; NULL: something moves. */
void tl_progress_bar_update(struct tl_progress_bar *progress, uint64_t bytes, const char *stall);

/* Shows on a terminal what is done before or after the transfer, in place of the bar; is_quiet is set. */
void tl_progress_bar_print(struct tl_progress_bar *progress, const char *text);

/* Removes the bar. Other lines may be written from now on. */
void tl_progress_bar_end(struct tl_progress_bar *progress);

#endif
