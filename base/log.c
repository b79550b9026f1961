// SPDX-License-Identifier: Apache-2.0
/*
 * The log. A line is built in a buffer of fixed size on the stack and given to stderr with one write, so that lines of
 * several threads and processes do not mix and no memory is allocated.
 *
 * A line that is too long is cut inside its last value, keeps its form, and ends with cut=true. A line is lost when
 * stderr is full or closed, or when its reader has gone or does not read. Lost lines are counted; the next line that
 * can be written comes behind one with their number.
 */
#include "base/log.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/stderr.h"
#include "base/text.h"

#define MAX_LINE_BYTES TL_STDERR_PIECE_BYTES
/* Kept free for the end of a line: a quote, the mark of a cut, a brace, the newline. */
#define RESERVED_BYTES 32

static const char *const level_names[] = {
    [TL_LOG_ERROR] = "error",
    [TL_LOG_WARN] = "warn",
    [TL_LOG_INFO] = "info",
    [TL_LOG_DEBUG] = "debug",
};

/* The settings of the program and, for what these leave open, of the worker that was opened last. The lock is held for
 * reading while the program's function takes a line, so that the function can be replaced. */
static pthread_rwlock_t settings_lock = PTHREAD_RWLOCK_INITIALIZER;
static struct tl_log_options of_program;
static struct tl_log_options of_worker = {.level = TL_LOG_WARN, .format = TL_LOG_KEY_VALUE};

/* The level and format that follow from them, for every line. */
static atomic_int current_level = TL_LOG_WARN;
static atomic_int current_format = TL_LOG_KEY_VALUE;
static atomic_uint_least64_t lost_count; /* lost lines that were not reported yet */

/* Decides what applies. Called under the lock, after a change. */
static void decide(void)
{
    const enum tl_log_level level = of_program.level != TL_LOG_LEVEL_CONFIGURED ? of_program.level : of_worker.level;
    const enum tl_log_format format =
        of_program.format != TL_LOG_FORMAT_CONFIGURED ? of_program.format : of_worker.format;
    atomic_store_explicit(&current_level, (int)level, memory_order_relaxed);
    atomic_store_explicit(&current_format, (int)format, memory_order_relaxed);
}

void tl_log_take_over(const struct tl_log_options *options)
{
    pthread_rwlock_wrlock(&settings_lock);
    of_program = *options;
    decide();
    pthread_rwlock_unlock(&settings_lock);
}

void tl_log_configure(enum tl_log_level level, enum tl_log_format format)
{
    tl_log_take_over(&(struct tl_log_options){.level = level, .format = format});
}

void tl_log_adopt(enum tl_log_level level, enum tl_log_format format)
{
    pthread_rwlock_wrlock(&settings_lock);
    of_worker.level = level;
    of_worker.format = format;
    decide();
    pthread_rwlock_unlock(&settings_lock);
}

bool tl_log_is_enabled(enum tl_log_level level)
{
    return (int)level <= atomic_load_explicit(&current_level, memory_order_relaxed);
}

bool tl_log_parse_level(const char *text, enum tl_log_level *ret_level)
{
    for (size_t i = TL_LOG_ERROR; i < TL_ARRAY_COUNT(level_names); i++) {
        if (strcmp(text, level_names[i]) != 0) continue;
        *ret_level = (enum tl_log_level)i;
        return true;
    }
    return false;
}

/* --------------------------------------------------------------------------------------------- building a line -- */

struct line {
    bool is_json;
    bool is_cut;
    size_t len;
    char text[MAX_LINE_BYTES];
};

/* Appends all of it or, marking the line as cut, nothing; true when it did. */
static bool put(struct line *line, const char *text, size_t len)
{
    if (line->is_cut || line->len + len > MAX_LINE_BYTES - RESERVED_BYTES) {
        line->is_cut = true;
        return false;
    }
    memcpy(line->text + line->len, text, len);
    line->len += len;
    return true;
}

/* Appends into the reserved end. */
static void put_end(struct line *line, const char *text)
{
    size_t len = strlen(text);
    TL_CHECK(line->len + len <= MAX_LINE_BYTES);
    memcpy(line->text + line->len, text, len);
    line->len += len;
}

/* Code point of a valid character of at most two bytes; other ones are never escaped. */
static unsigned short_code_point(const char *text, size_t len)
{
    unsigned first = (unsigned char)text[0];
    return len == 1 ? first : (first & 0x1Fu) << 6 | ((unsigned char)text[1] & 0x3Fu);
}

/* Appends one character of a string, escaped when it must not reach a terminal or would end the string; returns how
 * many bytes of the value it took. */
static size_t put_char(struct line *line, const char *value, size_t left)
{
    char escaped[8];
    size_t len = tl_text_utf8_char_len(value, left);
    if (len == 0) {
        snprintf(escaped, sizeof(escaped), line->is_json ? "\\ufffd" : "\\x%02x", (unsigned char)value[0]);
        put(line, escaped, strlen(escaped));
        return 1;
    }
    unsigned point = len > 2 ? 0xFFFF : short_code_point(value, len);
    if (value[0] == '"' || value[0] == '\\') {
        char pair[2] = {'\\', value[0]};
        put(line, pair, 2);
    } else if (value[0] == '\n') {
        put(line, "\\n", 2);
    } else if (value[0] == '\t') {
        put(line, "\\t", 2);
    } else if (point < 0x20 || (point >= 0x7F && point < 0xA0)) {
        snprintf(escaped, sizeof(escaped), line->is_json || len > 1 ? "\\u%04x" : "\\x%02x", point);
        put(line, escaped, strlen(escaped));
    } else {
        put(line, value, len);
    }
    return len;
}

/* True when a value can stand in a key=value line without quotes. */
static bool is_bare(const char *value)
{
    for (const char *c = value; *c; c++)
        if (*c <= ' ' || *c >= 0x7F || *c == '"' || *c == '=' || *c == '\\') return false;
    return true;
}

static void put_string(struct line *line, const char *prefix, const char *value, bool is_quoted)
{
    char start[160];
    snprintf(start, sizeof(start), is_quoted ? "%s\"" : "%s", prefix);
    if (!put(line, start, strlen(start))) return;
    for (size_t left = strlen(value); left > 0 && !line->is_cut;) {
        size_t taken = put_char(line, value, left);
        value += taken;
        left -= taken;
    }
    /* The reserved end has space for the quote even when the value was cut. */
    if (is_quoted) put_end(line, "\"");
}

static void put_field(struct line *line, const struct tl_log_field *field)
{
    char prefix[128], number[160];
    const char *str = field->str ? field->str : "";
    snprintf(prefix, sizeof(prefix), line->is_json ? ",\"%.100s\":" : " %.100s=", field->key);
    switch (field->kind) {
    case TL_LOG_KIND_STR:
        put_string(line, prefix, str, line->is_json || !is_bare(str));
        return;
    case TL_LOG_KIND_I64:
        snprintf(number, sizeof(number), "%s%" PRId64, prefix, field->i64);
        break;
    case TL_LOG_KIND_U64:
        snprintf(number, sizeof(number), "%s%" PRIu64, prefix, field->u64);
        break;
    case TL_LOG_KIND_INCARNATION:
        snprintf(number, sizeof(number), line->is_json ? "%s\"" TL_INCARNATION_FORMAT "\"" : "%s" TL_INCARNATION_FORMAT,
                 prefix, field->u64);
        break;
    case TL_LOG_KIND_BOOL:
        snprintf(number, sizeof(number), "%s%s", prefix, field->u64 ? "true" : "false");
        break;
    }
    put(line, number, strlen(number));
}

/* Appends "ts=... level=..." */
static void put_start(struct line *line, enum tl_log_level level)
{
    struct timespec now;
    struct tm utc;
    char text[96];
    TL_CHECK(clock_gettime(CLOCK_REALTIME, &now) == 0);
    TL_CHECK(gmtime_r(&now.tv_sec, &utc));
    size_t len =
        strftime(text, sizeof(text), line->is_json ? "{\"ts\":\"%Y-%m-%dT%H:%M:%S" : "ts=%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(text + len, sizeof(text) - len, line->is_json ? ".%03dZ\",\"level\":\"%s\"" : ".%03dZ level=%s",
             (int)(now.tv_nsec / 1000000), level_names[level]);
    put(line, text, strlen(text));
}

/* ----------------------------------------------------------------------------------------------------- writing -- */

static void build(struct line *line, enum tl_log_level level, const char *message, const struct tl_log_field *fields)
{
    line->is_json = atomic_load_explicit(&current_format, memory_order_relaxed) == TL_LOG_JSON;
    line->is_cut = false;
    line->len = 0;
    put_start(line, level);
    put_string(line, line->is_json ? ",\"msg\":" : " msg=", message, true);
    for (; fields->key && !line->is_cut; fields++)
        put_field(line, fields);
    if (line->is_cut) put_end(line, line->is_json ? ",\"cut\":true" : " cut=true");
    put_end(line, line->is_json ? "}\n" : "\n");
}

/* Reports lost lines, whatever the level is. Returns false when they could not be reported. */
static bool report_lost(void)
{
    uint64_t count = atomic_exchange_explicit(&lost_count, 0, memory_order_relaxed);
    if (count == 0) return true;
    struct line line;
    const struct tl_log_field fields[] = {TL_U64("lines", count), {.key = NULL}};
    build(&line, TL_LOG_WARN, "lines were lost here: standard error could not be written without waiting", fields);
    if (tl_stderr_put(line.text, line.len)) return true;
    atomic_fetch_add_explicit(&lost_count, count, memory_order_relaxed);
    return false;
}

void tl_log_put(const char *text, size_t len_bytes)
{
    bool is_written = report_lost() && tl_stderr_put(text, len_bytes);
    if (!is_written) atomic_fetch_add_explicit(&lost_count, 1, memory_order_relaxed);
}

/* Gives the line, without its newline, to the program's function. Returns false when it has none. */
static bool hand_over(struct line *line, enum tl_log_level level)
{
    pthread_rwlock_rdlock(&settings_lock);
    bool is_taken = of_program.write != NULL;
    if (is_taken) {
        line->text[--line->len] = '\0';
        of_program.write(level, line->text, line->len, of_program.context);
    }
    pthread_rwlock_unlock(&settings_lock);
    return is_taken;
}

void tl_log_write(enum tl_log_level level, const char *message, const struct tl_log_field *fields)
{
    int old_errno = errno;
    struct line line;
    build(&line, level, message, fields);
    if (!hand_over(&line, level)) tl_log_put(line.text, line.len);
    errno = old_errno;
}
