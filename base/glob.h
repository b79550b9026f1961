// SPDX-License-Identifier: Apache-2.0
/*
 * Shell patterns, compiled once and then compared with many names.
 *
 * '*' stands for any text, also '/' and '.'; '?' for one character; "[a-z]" for one of a set, "[!a-z]" or "[^a-z]" for
 * one outside of it; a '[' without an end for itself. A backslash takes the next character as it is. Characters are
 * code points; a byte that is not UTF-8 is a character of its own.
 *
 * A comparison looks at each character of the name once, and the work for a character grows with the pattern's length
 * divided by 64. So a pattern may come from a client.
 */
#ifndef BASE_GLOB_H
#define BASE_GLOB_H

#include <stdbool.h>

struct tl_glob;

/* NULL: no memory. Ownership: tl_glob_destroy. */
struct tl_glob *tl_glob_create(const char *pattern);
void tl_glob_destroy(struct tl_glob *glob); /* NULL is accepted */

/* Thread: any; the glob does not change. */
bool tl_glob_is_match(const struct tl_glob *glob, const char *name);

#endif
