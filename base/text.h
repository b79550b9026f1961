// SPDX-License-Identifier: Apache-2.0
/* Text from outside: UTF-8, sizes and durations with units, nearest names, formatting for people. */
#ifndef BASE_TEXT_H
#define BASE_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* True when the bytes are valid UTF-8 (no surrogates, no overlong forms) without a NUL. */
bool tl_text_is_utf8(const char *text, size_t len_bytes);

/* Bytes of the valid UTF-8 character that the text begins with (a NUL counts as one); 0 when it is none. */
size_t tl_text_utf8_char_len(const char *text, size_t len_bytes);

/* Writes '?' over each byte that belongs to no valid UTF-8 character, so that the text keeps its length. */
void tl_text_make_utf8(char *text, size_t len_bytes);

/* Parses "512MiB", "4 KiB", "1GB", "100" (bytes). Units B, KB/MB/GB/TB (powers of 1000), KiB/MiB/GiB/TiB, any case;
 * a fraction is accepted when the product is whole. False when it is not such a text or does not fit. */
bool tl_text_parse_size(const char *text, uint64_t *ret_bytes);

/* Parses Go durations: "250ms", "1s", "1m30s", "1.5h", "0"; units ns, us, ms, s, m, h. False when it is not one, has a
 * sign or does not fit into int64 nanoseconds. Fractions of a nanosecond are dropped. */
bool tl_text_parse_duration(const char *text, int64_t *ret_ns);

/* Writes "553 MB"-style (powers of 1000, three digits) text; returns buffer. */
char *tl_text_format_size(uint64_t bytes, char *buffer, size_t capacity);

/* Writes "1.52 s", "13.1 ms", "4m05s", "2h13m"-style text, a negative duration as zero; returns buffer. */
char *tl_text_format_duration(int64_t ns, char *buffer, size_t capacity);

/* Writes the name of this host; "" when it has none, or one that is not UTF-8. */
void tl_text_host_name(char *ret_text, size_t capacity);

/* The candidate with the smallest edit distance to name, the first of several; NULL when none is near (more than a
 * third of the name's length, at least 2, away, or nothing in common) and for names longer than 512 bytes. */
const char *tl_text_nearest(const char *name, const char *const *candidates, size_t count);

#endif
