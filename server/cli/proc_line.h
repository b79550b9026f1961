// SPDX-License-Identifier: Apache-2.0
/* One line of a file of the kernel that has a key at the beginning of each: /proc/PID/status, /proc/PID/limits. */
#ifndef SERVER_CLI_PROC_LINE_H
#define SERVER_CLI_PROC_LINE_H

#include <stdbool.h>
#include <stddef.h>

/* Finds the line that begins with the key, and writes what follows it, without blanks before and the end of line.
 * False: there is none, or the file cannot be read. */
bool tl_proc_find_line(const char *path, const char *key, char *ret_rest, size_t capacity);

#endif
