// SPDX-License-Identifier: Apache-2.0
/* Reasons for people that outlive what they are about: completions may be read long after their worker was closed. */
#ifndef BASE_REASON_H
#define BASE_REASON_H

#include <stdbool.h>

/* A copy of this text that is never freed; equal texts give equal pointers, "" for NULL. Peers compose some of them, so
 * there are at most TL_MAX_REASONS: the first half of them whole, later ones with # in the place of their numbers,
 * which are what mostly differs; one too many is "see the log". Who logs or shows a reason now takes his own text.
 * Thread: any. */
#define TL_MAX_REASONS 1024
const char *tl_reason(const char *text);

/* Equal but for their numbers: the same reason again. */
bool tl_reason_is_same(const char *a, const char *b);

#endif
