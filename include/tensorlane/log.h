// SPDX-License-Identifier: Apache-2.0
/*
 * The log of the library: one line for each event, such as a peer that cannot be reached or a data path that comes up;
 * no line for each tensor below the level debug.
 *
 * A process has one log, because some threads of the library serve all of its workers. These settings apply, in this
 * order:
 *
 * 1. the options that the program has passed to tl_log_set; for those that it leaves open
 * 2. "log.level" and "log.format" of the configuration of the worker that was opened last, also after it was closed
 *    (clients have the settings of the configuration's top level)
 * 3. before a worker was opened: warnings and errors as key=value.
 *
 * Lines go to standard error, or to a function of the program. A line that standard error does not take at once is
 * lost, and a later line contains the number of lost lines.
 */
#ifndef TENSORLANE_LOG_H
#define TENSORLANE_LOG_H

#include <stddef.h>

#include <tensorlane/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The least important events that are written. */
enum tl_log_level {
    TL_LOG_LEVEL_CONFIGURED = 0, /* the level of the configuration */
    TL_LOG_ERROR = 1,
    TL_LOG_WARN = 2,
    TL_LOG_INFO = 3,
    TL_LOG_DEBUG = 4,
};

enum tl_log_format {
    TL_LOG_FORMAT_CONFIGURED = 0, /* the format of the configuration */
    TL_LOG_KEY_VALUE = 1,         /* ts=2026-01-02T03:04:05.678Z level=info msg="peer up" peer=/job:ps/task:0 */
    TL_LOG_JSON = 2,              /* {"ts":"2026-01-02T03:04:05.678Z","level":"info","msg":"peer up",...} */
};

/* Takes one line: its level, and its text without newline, which ends with a NUL and is valid until the function
 * returns. The text is UTF-8 in the format that is set, at most 4096 bytes, without control characters.
 * Thread: any thread of the library or of the program, several at the same time, perhaps with locks of the library
 * held: the function must not call the library, and transfers wait until it returns. */
typedef void (*tl_log_fn)(enum tl_log_level level, const char *line, size_t len_bytes, void *context);

/* How to log. Set size_bytes to sizeof(struct tl_log_options), everything unused to zero. */
struct tl_log_options {
    size_t size_bytes;
    enum tl_log_level level;
    enum tl_log_format format;
    tl_log_fn write; /* takes the lines; NULL: standard error */
    void *context;   /* for write */
};

/* Sets the log of the process, before or while workers are open; NULL restores the default. While write is set, the
 * lines that gRPC logs go there too: its errors as warnings, everything else at the level debug. gRPC also has one log
 * for the process; a program that has set gRPC's log function itself sets it again afterwards.
 * Errors: TL_INVALID_ARGUMENT: size_bytes, or a level or format that does not exist. TL_UNIMPLEMENTED: an option that
 * this version does not know (tensorlane.h).
 * Ownership: context must stay valid until a call of tl_log_set that sets something else has returned; from then on
 * write is not called any more. Thread: any, but not from write. Blocks: until calls of the former write return. */
TL_API enum tl_status tl_log_set(const struct tl_log_options *options, struct tl_error *ret_error) TL_MUST_USE;

#ifdef __cplusplus
}
#endif

#endif
