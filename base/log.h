// SPDX-License-Identifier: Apache-2.0
/*
 * The log: one line per event on stderr, or to a function of the program, as key=value or JSON.
 *
 *     TL_LOG_AT_INFO("worker ready", TL_STR("address", address), TL_I64("port", 4000));
 *     -> ts=2026-01-02T03:04:05.678Z level=info msg="worker ready" address=127.0.0.1:4000 port=4000
 *
 * Values are escaped; control characters and invalid UTF-8 never reach the terminal. A line is one write of at most
 * 4096 bytes. A full disk, a closed stderr, or a pipe that is not read loses the line, never the process or its time;
 * lost lines are counted, and the count is logged when writing works again. The log
 * contains no secrets (keys, tokens, rkeys) and, at info, no line for each tensor.
 */
#ifndef BASE_LOG_H
#define BASE_LOG_H

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/log.h>

enum tl_log_kind { TL_LOG_KIND_STR, TL_LOG_KIND_I64, TL_LOG_KIND_U64, TL_LOG_KIND_INCARNATION, TL_LOG_KIND_BOOL };

/* The form of incarnations in logs, tables and JSON. In JSON it is a text, since numbers above 2^53 lose digits there.
 */
#define TL_INCARNATION_FORMAT "0x%016" PRIx64

struct tl_log_field {
    const char *key;
    enum tl_log_kind kind;
    const char *str; /* NULL is written as empty */
    int64_t i64;
    uint64_t u64;
};

#define TL_STR(k, v) ((struct tl_log_field){.key = (k), .kind = TL_LOG_KIND_STR, .str = (v)})
#define TL_I64(k, v) ((struct tl_log_field){.key = (k), .kind = TL_LOG_KIND_I64, .i64 = (int64_t)(v)})
#define TL_U64(k, v) ((struct tl_log_field){.key = (k), .kind = TL_LOG_KIND_U64, .u64 = (uint64_t)(v)})
#define TL_INCARNATION(k, v) ((struct tl_log_field){.key = (k), .kind = TL_LOG_KIND_INCARNATION, .u64 = (uint64_t)(v)})
#define TL_BOOLEAN(k, v) ((struct tl_log_field){.key = (k), .kind = TL_LOG_KIND_BOOL, .u64 = (v) ? 1 : 0})

#define TL_LOG(level, message, ...)                                                                                    \
    do {                                                                                                               \
        if (tl_log_is_enabled(level)) {                                                                                \
            const struct tl_log_field tl_log_fields_[] = {__VA_ARGS__ __VA_OPT__(, ){.key = NULL}};                    \
            tl_log_write(level, message, tl_log_fields_);                                                              \
        }                                                                                                              \
    } while (0)
#define TL_LOG_AT_ERROR(...) TL_LOG(TL_LOG_ERROR, __VA_ARGS__)
#define TL_LOG_AT_WARN(...) TL_LOG(TL_LOG_WARN, __VA_ARGS__)
#define TL_LOG_AT_INFO(...) TL_LOG(TL_LOG_INFO, __VA_ARGS__)
#define TL_LOG_AT_DEBUG(...) TL_LOG(TL_LOG_DEBUG, __VA_ARGS__)

/* Sets the settings of the process, whatever workers are opened (tensorlane/log.h). Thread: any. */
void tl_log_configure(enum tl_log_level level, enum tl_log_format format);

/* Sets everything: what is zero in the options is left to the workers. Thread: any. */
void tl_log_take_over(const struct tl_log_options *options);

/* Sets the settings of a worker that is opened, for what the program has left open. Thread: any. */
void tl_log_adopt(enum tl_log_level level, enum tl_log_format format);
bool tl_log_is_enabled(enum tl_log_level level);

/* Writes one line; fields end with a NULL key. Thread: any. */
void tl_log_write(enum tl_log_level level, const char *message, const struct tl_log_field *fields);

/* Passes on a line of another process, with its newline, in the same way. Thread: any. */
void tl_log_put(const char *text, size_t len_bytes);

/* Parses "error", "warn", "info", "debug". Returns false for any other text. */
bool tl_log_parse_level(const char *text, enum tl_log_level *ret_level);

#endif
