// SPDX-License-Identifier: Apache-2.0
/*
 * Reasons: texts for people that stay valid for the life of the process.
 *
 * A completion tells why a tensor did not travel on a faster path by a pointer (path_reason of struct tl_completion),
 * which a program may read long after it has closed the worker and destroyed the queue. No object
 * could free such a text. Therefore equal texts are stored once and never freed, in a bounded table.
 */
#ifndef BASE_REASON_H
#define BASE_REASON_H

#include <stdbool.h>

/* Returns a copy of the text that is never freed; equal texts give equal pointers, NULL gives "". Since peers compose
 * some reasons, the table holds at most TL_MAX_REASONS: the first half of them as they are, later ones with # in place
 * of their numbers, in which reasons mostly differ. When the table is full the result is "see the log". A caller that
 * logs or prints a reason at once uses its own text instead. Thread: any. */
#define TL_MAX_REASONS 1024
const char *tl_reason(const char *text);

/* Returns whether two reasons are equal apart from their numbers, that is, the same reason again. */
bool tl_reason_is_same(const char *a, const char *b);

#endif
