// SPDX-License-Identifier: Apache-2.0
/* Reasons for people that outlive what they are about: completions may be read long after their worker was closed. */
#ifndef SERVER_REASON_H
#define SERVER_REASON_H

/* The one copy of this text in the process; never freed. There are at most TL_MAX_REASONS of them, because peers
 * compose some: one too many is "see the log". "" for NULL. Equal texts give equal pointers. Thread: any. */
#define TL_MAX_REASONS 1024
const char *tl_reason(const char *text);

#endif
