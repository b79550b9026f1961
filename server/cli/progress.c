// SPDX-License-Identifier: Apache-2.0
/* Progress bars. The rate is an average that forgets: what was more than a few seconds ago hardly counts, so that the
 * time left follows the network. */
#include "server/cli/progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/text.h"
#include "server/cli/output.h"

#define BAR_PERIOD_NS (100 * TL_NS_PER_MS)
#define LINE_PERIOD_NS (5 * TL_NS_PER_SEC)
#define SAMPLE_PERIOD_NS (250 * TL_NS_PER_MS)
#define NEW_SAMPLE_WEIGHT 0.3
#define MAX_BAR_COLUMNS 40

static void sample_rate(struct tl_progress_bar *progress, int64_t now_ns, uint64_t bytes)
{
    int64_t passed_ns = now_ns - progress->sampled_ns;
    if (passed_ns < SAMPLE_PERIOD_NS) return;
    uint64_t moved = bytes > progress->sampled_bytes ? bytes - progress->sampled_bytes : 0;
    double rate = (double)moved * (double)TL_NS_PER_SEC / (double)passed_ns;
    double weight = progress->bytes_per_sec > 0 ? NEW_SAMPLE_WEIGHT : 1;
    progress->bytes_per_sec += weight * (rate - progress->bytes_per_sec);
    progress->sampled_ns = now_ns;
    progress->sampled_bytes = bytes;
}

/* "232 MB of 553 MB, 1.21 GB/s, 0.27 s left" */
static void describe(const struct tl_progress_bar *progress, uint64_t bytes, char *buffer, size_t capacity)
{
    char done[32], total[32], rate[32], left[32];
    uint64_t missing = progress->total_bytes > bytes ? progress->total_bytes - bytes : 0;
    double left_ns = (double)missing * (double)TL_NS_PER_SEC / (progress->bytes_per_sec + 1);
    tl_text_format_size(bytes, done, sizeof(done));
    tl_text_format_size(progress->total_bytes, total, sizeof(total));
    if (progress->bytes_per_sec < 1 || left_ns > 1e18) {
        snprintf(buffer, capacity, "%s of %s", done, total);
        return;
    }
    tl_text_format_size((uint64_t)progress->bytes_per_sec, rate, sizeof(rate));
    tl_text_format_duration((int64_t)left_ns, left, sizeof(left));
    snprintf(buffer, capacity, "%s of %s, %s/s, %s left", done, total, rate, left);
}

/* Prints what fits the terminal's line. */
static void show_text(struct tl_progress_bar *progress, const char *text)
{
    unsigned width = tl_output_width(stderr);
    char *escaped = tl_output_escape(text);
    if (escaped == NULL) return;
    size_t len = strlen(escaped);
    while (len > 0 && (tl_output_columns(escaped, len) >= width || ((unsigned char)escaped[len] & 0xC0) == 0x80))
        len--;
    fprintf(stderr, "\r%.*s\033[K", (int)len, escaped);
    fflush(stderr);
    free(escaped);
    progress->has_bar = true;
}

static void show_bar(struct tl_progress_bar *progress, uint64_t bytes, const char *text)
{
    char bar[MAX_BAR_COLUMNS + 1];
    unsigned width = tl_output_width(stderr);
    double share = progress->total_bytes > 0 ? (double)bytes / (double)progress->total_bytes : 1;
    if (share > 1) share = 1;
    size_t beside = strlen(text) + 12; /* what stands beside the bar */
    if (width <= beside) {
        show_text(progress, text);
        return;
    }
    size_t columns = width - beside < MAX_BAR_COLUMNS ? width - beside : MAX_BAR_COLUMNS;
    size_t filled = (size_t)(share * (double)columns);
    memset(bar, '.', columns);
    memset(bar, '#', filled);
    bar[columns] = '\0';
    fprintf(stderr, "\r[%s] %3u%% %s\033[K", bar, (unsigned)(share * 100), text);
    fflush(stderr);
    progress->has_bar = true;
}

static void show(struct tl_progress_bar *progress, uint64_t bytes, const char *stall)
{
    char text[1536], done[32], total[32];
    if (stall != NULL) {
        snprintf(text, sizeof(text), "%s of %s; %s", tl_text_format_size(bytes, done, sizeof(done)),
                 tl_text_format_size(progress->total_bytes, total, sizeof(total)), stall);
    } else {
        describe(progress, bytes, text, sizeof(text));
    }
    if (!progress->is_terminal) {
        fprintf(stderr, "%s ", progress->verb);
        tl_output_put_escaped(stderr, text);
        fputc('\n', stderr);
    } else if (stall != NULL) {
        show_text(progress, text);
    } else {
        show_bar(progress, bytes, text);
    }
}

void tl_progress_bar_start(struct tl_progress_bar *progress)
{
    progress->is_terminal = tl_output_width(stderr) > 0;
    progress->start_ns = tl_clock_now_ns();
    progress->shown_ns = progress->start_ns;
    progress->sampled_ns = progress->start_ns;
    progress->sampled_bytes = 0;
    progress->bytes_per_sec = 0;
    if (progress->is_terminal && !progress->is_quiet) show(progress, 0, NULL);
}

void tl_progress_bar_update(struct tl_progress_bar *progress, uint64_t bytes, const char *stall)
{
    int64_t now_ns = tl_clock_now_ns();
    if (progress->is_quiet) return;
    sample_rate(progress, now_ns, bytes);
    if (now_ns - progress->shown_ns < (progress->is_terminal ? BAR_PERIOD_NS : LINE_PERIOD_NS)) return;
    progress->shown_ns = now_ns;
    show(progress, bytes, stall);
}

void tl_progress_bar_print(struct tl_progress_bar *progress, const char *text)
{
    if (!progress->is_quiet && tl_output_width(stderr) > 0) show_text(progress, text);
}

void tl_progress_bar_end(struct tl_progress_bar *progress)
{
    if (!progress->has_bar) return;
    fputs("\r\033[K", stderr);
    fflush(stderr);
    progress->has_bar = false;
}
