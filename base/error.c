// SPDX-License-Identifier: Apache-2.0
/*
 * Composing errors: a code and one sentence. A message that is too long is cut at a character boundary; the arguments
 * may point into the error that is written.
 */
#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const status_names[] = {
    [TL_OK] = "OK",
    [TL_CANCELLED] = "CANCELLED",
    [TL_UNKNOWN] = "UNKNOWN",
    [TL_INVALID_ARGUMENT] = "INVALID_ARGUMENT",
    [TL_DEADLINE_EXCEEDED] = "DEADLINE_EXCEEDED",
    [TL_NOT_FOUND] = "NOT_FOUND",
    [TL_ALREADY_EXISTS] = "ALREADY_EXISTS",
    [TL_PERMISSION_DENIED] = "PERMISSION_DENIED",
    [TL_RESOURCE_EXHAUSTED] = "RESOURCE_EXHAUSTED",
    [TL_FAILED_PRECONDITION] = "FAILED_PRECONDITION",
    [TL_ABORTED] = "ABORTED",
    [TL_OUT_OF_RANGE] = "OUT_OF_RANGE",
    [TL_UNIMPLEMENTED] = "UNIMPLEMENTED",
    [TL_INTERNAL] = "INTERNAL",
    [TL_UNAVAILABLE] = "UNAVAILABLE",
    [TL_DATA_LOSS] = "DATA_LOSS",
    [TL_UNAUTHENTICATED] = "UNAUTHENTICATED",
};

const char *tl_status_name(enum tl_status status)
{
    size_t index = (size_t)status;
    return index < sizeof(status_names) / sizeof(status_names[0]) ? status_names[index] : "UNKNOWN";
}

/* The largest length up to max_bytes that does not end inside a character. */
static size_t cut_len(const char *text, size_t max_bytes)
{
    size_t len = max_bytes;
    while (len > 0 && max_bytes - len < 3 && ((unsigned char)text[len] & 0xC0) == 0x80)
        len--;
    return len;
}

/* Copies a NUL-terminated text into the message, cut when it is too long. */
static void store_message(struct tl_error *error, const char *text)
{
    size_t len = strlen(text);
    if (len >= TL_ERROR_MESSAGE_BYTES) len = cut_len(text, TL_ERROR_MESSAGE_BYTES - 1);
    memcpy(error->message, text, len);
    error->message[len] = '\0';
}

/* A text that may be twice as long as a message, so that what follows the format can be cut too. */
struct draft {
    char text[2 * TL_ERROR_MESSAGE_BYTES];
};

static void draft_format(struct draft *draft, const char *format, va_list arguments)
{
    if (vsnprintf(draft->text, TL_ERROR_MESSAGE_BYTES + 4, format, arguments) < 0) draft->text[0] = '\0';
}

enum tl_status tl_error_set(struct tl_error *ret_error, enum tl_status code, const char *format, ...)
{
    if (!ret_error) return code;
    struct draft draft;
    va_list arguments;
    va_start(arguments, format);
    draft_format(&draft, format, arguments);
    va_end(arguments);
    ret_error->code = code;
    store_message(ret_error, draft.text);
    return code;
}

static enum tl_status code_of_errno(int error_number)
{
    switch (error_number) {
    case ENOENT:
    case ENOTDIR:
        return TL_NOT_FOUND;
    case EACCES:
    case EPERM:
    case EROFS:
        return TL_PERMISSION_DENIED;
    case ENOMEM:
    case ENOSPC:
    case EMFILE:
    case ENFILE:
    case EDQUOT:
    case EFBIG:
    case ENOBUFS:
        return TL_RESOURCE_EXHAUSTED;
    case EEXIST:
        return TL_ALREADY_EXISTS;
    case ETIMEDOUT:
        return TL_DEADLINE_EXCEEDED;
    case EINVAL:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
        return TL_INVALID_ARGUMENT;
    case ECONNREFUSED:
    case ECONNRESET:
    case ECONNABORTED:
    case ENETUNREACH:
    case ENETDOWN:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENOTCONN:
    case EPIPE:
        return TL_UNAVAILABLE;
    default:
        return TL_INTERNAL;
    }
}

enum tl_status tl_error_set_errno(struct tl_error *ret_error, int error_number, const char *format, ...)
{
    enum tl_status code = code_of_errno(error_number);
    if (!ret_error) return code;
    struct draft draft;
    char reason_buffer[128];
    const char *reason = strerror_r(error_number, reason_buffer, sizeof(reason_buffer));
    va_list arguments;
    va_start(arguments, format);
    draft_format(&draft, format, arguments);
    va_end(arguments);

    /* When both do not fit, the reason stays and the text before it is cut. */
    size_t reason_len = strlen(reason) + 2;
    size_t len = strlen(draft.text);
    if (len + reason_len >= TL_ERROR_MESSAGE_BYTES) len = cut_len(draft.text, TL_ERROR_MESSAGE_BYTES - 1 - reason_len);
    snprintf(draft.text + len, sizeof(draft.text) - len, ": %s", reason);
    ret_error->code = code;
    store_message(ret_error, draft.text);
    return code;
}

enum tl_status tl_error_copy(struct tl_error *ret_error, const struct tl_error *source)
{
    if (ret_error && ret_error != source) {
        ret_error->code = source->code;
        store_message(ret_error, source->message);
    }
    return source->code;
}

void tl_error_prefix(struct tl_error *error, const char *format, ...)
{
    if (!error) return;
    struct draft draft;
    va_list arguments;
    va_start(arguments, format);
    draft_format(&draft, format, arguments);
    va_end(arguments);
    size_t len = strlen(draft.text);
    snprintf(draft.text + len, sizeof(draft.text) - len, "%s", error->message);
    store_message(error, draft.text);
}

/* -------------------------------------------------------------------------------------------------------- kept -- */

static const struct tl_error kept_ok = {.code = TL_OK};
static const struct tl_error kept_without_memory = {.code = TL_RESOURCE_EXHAUSTED, .message = "no memory"};

const struct tl_error *tl_error_keep(const struct tl_error *error)
{
    if (error == NULL || error->code == TL_OK) return NULL;
    struct tl_error *kept = malloc(sizeof(*kept));
    if (kept == NULL) return &kept_without_memory;
    tl_error_copy(kept, error);
    return kept;
}

void tl_error_drop(const struct tl_error *kept)
{
    if (kept != &kept_without_memory) free((struct tl_error *)kept);
}

const struct tl_error *tl_error_kept(const struct tl_error *kept)
{
    return kept != NULL ? kept : &kept_ok;
}
