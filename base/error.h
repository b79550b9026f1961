// SPDX-License-Identifier: Apache-2.0
/* Errors: a code and a message. The function that first decides which error it is calls tl_error_set; its callers pass
 * it on. The compiler lays out the code that leads to an error away from the code that does not (cold). */
#ifndef BASE_ERROR_H
#define BASE_ERROR_H

#include <stddef.h>

#include <tensorlane/status.h>

/* Fills *ret_error (may be NULL) with the code and the message, cut at a UTF-8 character boundary when it is too long,
 * and returns the code, so that a caller can `return tl_error_set(...)`. */
enum tl_status tl_error_set(struct tl_error *ret_error, enum tl_status code, const char *format, ...)
    __attribute__((cold, format(printf, 3, 4)));

/* The same with errno's text appended, and with the code that fits it: ENOENT/ENOTDIR NOT_FOUND, EACCES/EPERM/EROFS
 * PERMISSION_DENIED, ENOMEM/ENOSPC/EMFILE/ENFILE/EDQUOT/EFBIG/ENOBUFS RESOURCE_EXHAUSTED, EEXIST ALREADY_EXISTS,
 * ETIMEDOUT DEADLINE_EXCEEDED, EINVAL/EISDIR/ELOOP/ENAMETOOLONG INVALID_ARGUMENT, ECONNREFUSED and the like
 * UNAVAILABLE, everything else INTERNAL. */
enum tl_status tl_error_set_errno(struct tl_error *ret_error, int error_number, const char *format, ...)
    __attribute__((cold, format(printf, 3, 4)));

/* Copies *source to *ret_error (may be NULL) and returns the code. */
enum tl_status tl_error_copy(struct tl_error *ret_error, const struct tl_error *source);

/* Puts text before the message that *error holds, cut as above; does nothing when error is NULL. */
void tl_error_prefix(struct tl_error *error, const char *format, ...) __attribute__((cold, format(printf, 2, 3)));

/* Keeps an error for later: returns a copy that outlives it, NULL for TL_OK and for NULL, and a constant with code
 * TL_RESOURCE_EXHAUSTED when there is no memory. Ownership: the caller's; tl_error_drop ends it. */
const struct tl_error *tl_error_keep(const struct tl_error *error) TL_MUST_USE;
void tl_error_drop(const struct tl_error *kept); /* NULL is accepted. */

/* Returns the kept error, or one with code TL_OK for NULL. It stays valid until tl_error_drop. */
const struct tl_error *tl_error_kept(const struct tl_error *kept);

#endif
