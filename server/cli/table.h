// SPDX-License-Identifier: Apache-2.0
/* Aligned tables. Rows are filled cell by cell; the widths are chosen when all are known. */
#ifndef SERVER_CLI_TABLE_H
#define SERVER_CLI_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

struct tl_column {
    const char *title;
    bool is_right;    /* numbers */
    bool wraps;       /* continues on the next line where the terminal is too narrow */
    bool is_optional; /* left out when no row has text in it; "-" counts as none */
};

struct tl_table;

/* columns must stay valid. NULL: no memory. */
struct tl_table *tl_table_create(const struct tl_column *columns, size_t count);
void tl_table_destroy(struct tl_table *table); /* NULL is accepted */

/* Fills the next cell; the text is escaped. A table that has run out of memory stays as it is and is not printed. */
void tl_table_add(struct tl_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Colours the last cell (TL_COLOUR_...) where the terminal takes colours. */
void tl_table_paint(struct tl_table *table, const char *colour);

/* Puts "label: text" on lines of its own below the current row, wrapped to the terminal's width, and to 80 columns
 * elsewhere. Nothing where the text is empty. */
void tl_table_add_note(struct tl_table *table, const char *label, const char *text);

/* Prints the titles and all rows, on a terminal within its width. False: no memory. */
bool tl_table_print(const struct tl_table *table, FILE *stream);

#endif
