// SPDX-License-Identifier: Apache-2.0
/* What the commands write to the terminal: escaped text, colours where they are wanted, errors, and the exit code of a
 * standard output that could not be written. */
#ifndef SERVER_CLI_OUTPUT_H
#define SERVER_CLI_OUTPUT_H

#include <stdbool.h>
#include <stdio.h>

/* Colours as SGR parameters, for tl_output_paint and the cells of tables. */
#define TL_COLOUR_RED "31"
#define TL_COLOUR_GREEN "32"
#define TL_COLOUR_YELLOW "33"

/* True when the stream is a terminal that takes colours and NO_COLOR is not set. */
bool tl_output_has_colours(FILE *stream);

/* Columns of the terminal; 0 when the stream is none. */
unsigned tl_output_width(FILE *stream);

/* Writes text that comes from elsewhere: what could steer a terminal (control characters, invisible characters that
 * reorder text) and invalid UTF-8 are written as \n, \xNN or \u{N}. */
void tl_output_put_escaped(FILE *stream, const char *text);

/* The same into memory; NULL when there is none. Ownership: free. */
char *tl_output_escape(const char *text);

/* Columns that the first len_bytes bytes of an escaped text take. */
unsigned tl_output_columns(const char *text, size_t len_bytes);

/* Writes "tensorlane COMMAND: message" as one line to stderr, escaped. */
void tl_output_error(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Writes the text and the end of a line to standard output. Why that fails is kept for tl_output_finish. */
void tl_output_line(const char *text);

/* Flushes standard output. When something could not be written, says so on stderr, with the reason where it is known,
 * and returns exit_code, or TL_EXIT_FAILED instead of 0. */
int tl_output_finish(const char *command, int exit_code);

#endif
