// SPDX-License-Identifier: Apache-2.0
/* Words from outside, made fit to stand in a message. */
#ifndef CONFIG_QUOTE_H
#define CONFIG_QUOTE_H

#include <stddef.h>

/* Holds every quoted text: 64 bytes of it, each at most four bytes long when escaped, and quotes, dots and NUL. */
#define TL_QUOTE_BYTES 272

/* Writes the text in double quotes, control characters and bytes that are no UTF-8 as \xNN, cut with "..." after 64
 * bytes; returns the buffer. */
char *tl_quote(const char *text, char ret_buffer[TL_QUOTE_BYTES]);

/* Copies a text that has its own words around it, with control characters and bytes that are no UTF-8 as \xNN, cut when
 * the buffer is full; returns the buffer. */
char *tl_quote_bare(const char *text, char *ret_buffer, size_t capacity);

#endif
