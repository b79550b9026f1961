// SPDX-License-Identifier: Apache-2.0
/*
 * Aligned tables. Every column is as wide as its widest cell; on a terminal that is too narrow the columns that may
 * wrap give way, widest first, and their cells take more lines. Elsewhere a row is one line, so that it can be
 * searched. Notes are whole sentences that belong to a row; they stand below it and wrap everywhere.
 */
#include "server/cli/table.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "server/cli/output.h"

#define MAX_COLUMNS 16
#define GAP_COLUMNS 2
#define MIN_WRAPPED_COLUMNS 12
#define NOTE_INDENT_COLUMNS 4
#define NOTE_COLUMNS 80 /* where there is no terminal */

struct cell {
    char *text; /* escaped */
    const char *colour;
};

struct note {
    const char *label;
    char *text;      /* escaped */
    size_t row_cell; /* the first cell of its row */
};

struct tl_table {
    const struct tl_column *columns;
    size_t column_count;
    struct cell *cells; /* row by row */
    size_t cell_count;
    size_t cell_capacity;
    struct note *notes; /* in the order of the rows */
    size_t note_count;
    bool is_broken; /* ran out of memory */
};

struct tl_table *tl_table_create(const struct tl_column *columns, size_t count)
{
    TL_CHECK(count > 0 && count <= MAX_COLUMNS);
    struct tl_table *table = calloc(1, sizeof(*table));
    if (!table) return NULL;
    table->columns = columns;
    table->column_count = count;
    return table;
}

void tl_table_destroy(struct tl_table *table)
{
    if (!table) return;
    for (size_t i = 0; i < table->cell_count; i++)
        free(table->cells[i].text);
    for (size_t i = 0; i < table->note_count; i++)
        free(table->notes[i].text);
    free(table->notes);
    free(table->cells);
    free(table);
}

static bool reserve_cell(struct tl_table *table)
{
    if (table->cell_count < table->cell_capacity) return true;
    size_t capacity = table->cell_capacity ? 2 * table->cell_capacity : 64;
    struct cell *cells = reallocarray(table->cells, capacity, sizeof(*cells));
    if (!cells) return false;
    table->cells = cells;
    table->cell_capacity = capacity;
    return true;
}

void tl_table_add(struct tl_table *table, const char *format, ...)
{
    char *raw = NULL, *text = NULL;
    va_list arguments;
    va_start(arguments, format);
    int len = vasprintf(&raw, format, arguments);
    va_end(arguments);
    if (len >= 0) {
        text = tl_output_escape(raw);
        free(raw);
    }
    if (!text || !reserve_cell(table)) {
        free(text);
        table->is_broken = true;
        return;
    }
    table->cells[table->cell_count++] = (struct cell){.text = text};
}

void tl_table_paint(struct tl_table *table, const char *colour)
{
    if (table->cell_count > 0) table->cells[table->cell_count - 1].colour = colour;
}

void tl_table_add_note(struct tl_table *table, const char *label, const char *text)
{
    if (text[0] == '\0') return;
    TL_CHECK(table->is_broken || table->cell_count > 0);
    struct note *notes = reallocarray(table->notes, table->note_count + 1, sizeof(*notes));
    if (notes) table->notes = notes;
    char *escaped = notes && !table->is_broken ? tl_output_escape(text) : NULL;
    if (!escaped) {
        table->is_broken = true;
        return;
    }
    size_t row_cell = (table->cell_count - 1) / table->column_count * table->column_count;
    table->notes[table->note_count++] = (struct note){.label = label, .text = escaped, .row_cell = row_cell};
}

/* ---------------------------------------------------------------------------------------------------- printing -- */

/* How it is printed: the width of every column. */
struct layout {
    FILE *stream;
    unsigned widths[MAX_COLUMNS];
    bool is_hidden[MAX_COLUMNS]; /* optional and without text */
    bool has_colours;
};

static void measure(const struct tl_table *table, struct layout *layout)
{
    for (size_t i = 0; i < table->column_count; i++) {
        layout->widths[i] = tl_output_columns(table->columns[i].title, strlen(table->columns[i].title));
        layout->is_hidden[i] = table->columns[i].is_optional;
    }
    for (size_t i = 0; i < table->cell_count; i++) {
        const char *text = table->cells[i].text;
        unsigned columns = tl_output_columns(text, strlen(text));
        unsigned *width = &layout->widths[i % table->column_count];
        if (columns > *width) *width = columns;
        if (text[0] != '\0' && strcmp(text, "-") != 0) layout->is_hidden[i % table->column_count] = false;
    }
}

/* Takes columns away from the widest one that wraps until the table fits into width. */
static void shrink(const struct tl_table *table, struct layout *layout, unsigned width)
{
    unsigned total = 0;
    for (size_t i = 0; i < table->column_count; i++)
        if (!layout->is_hidden[i]) total += layout->widths[i] + (total > 0 ? GAP_COLUMNS : 0);
    for (; total > width; total--) {
        unsigned *widest = NULL;
        for (size_t i = 0; i < table->column_count; i++) {
            if (layout->is_hidden[i] || !table->columns[i].wraps || layout->widths[i] <= MIN_WRAPPED_COLUMNS) continue;
            if (!widest || layout->widths[i] > *widest) widest = &layout->widths[i];
        }
        if (!widest) return;
        --*widest;
    }
}

/* Bytes of the text that make its first line of at most width columns: up to the last blank that fits, else as many
 * characters as fit, at least one. */
static size_t line_len(const char *text, unsigned width)
{
    size_t len = strlen(text), fitting = 0, blank = 0;
    if (tl_output_columns(text, len) <= width) return len;
    while (fitting < len) {
        size_t next = fitting + 1;
        while (next < len && ((unsigned char)text[next] & 0xC0) == 0x80)
            next++;
        if (tl_output_columns(text, next) > width && fitting > 0) break;
        if (text[fitting] == ' ') blank = fitting;
        fitting = next;
    }
    if (text[fitting] == ' ') blank = fitting;
    return blank > 0 ? blank : fitting;
}

static void print_padding(FILE *stream, unsigned columns)
{
    fprintf(stream, "%*s", (int)columns, "");
}

/* Prints one line of one cell and moves *rest behind it; is_last: nothing follows on the line. */
static void print_line(const struct layout *layout, const struct tl_column *column, unsigned width, const char **rest,
                       const char *colour, bool is_last)
{
    size_t len = line_len(*rest, width);
    unsigned columns = tl_output_columns(*rest, len);
    unsigned padding = columns < width ? width - columns : 0;
    if (column->is_right) print_padding(layout->stream, padding);
    if (colour && layout->has_colours) fprintf(layout->stream, "\033[%sm", colour);
    fwrite(*rest, 1, len, layout->stream);
    if (colour && layout->has_colours) fputs("\033[0m", layout->stream);
    if (!is_last) print_padding(layout->stream, GAP_COLUMNS + (column->is_right ? 0 : padding));
    *rest += len;
    while (**rest == ' ')
        ++*rest;
}

/* Prints a row in as many lines as its longest cell takes. */
static void print_row(const struct tl_table *table, const struct layout *layout, const struct cell *cells)
{
    const char *rests[MAX_COLUMNS];
    for (size_t i = 0; i < table->column_count; i++)
        rests[i] = layout->is_hidden[i] ? "" : cells[i].text;
    for (bool is_first = true;; is_first = false) {
        size_t used = 0; /* columns up to the last one with text left */
        for (size_t i = 0; i < table->column_count; i++)
            if (*rests[i]) used = i + 1;
        if (used == 0 && !is_first) return;
        for (size_t i = 0; i < used; i++) {
            if (layout->is_hidden[i]) continue;
            print_line(layout, &table->columns[i], layout->widths[i], &rests[i], cells[i].colour, i + 1 == used);
        }
        fputc('\n', layout->stream);
    }
}

/* Prints a note; its further lines stand below the first one's text. */
static void print_note(const struct layout *layout, const struct note *note, unsigned width)
{
    const unsigned indent = NOTE_INDENT_COLUMNS + (unsigned)strlen(note->label) + 2;
    fprintf(layout->stream, "%*s%s: ", NOTE_INDENT_COLUMNS, "", note->label);
    for (const char *rest = note->text; *rest;) {
        size_t len = line_len(rest, width > indent + MIN_WRAPPED_COLUMNS ? width - indent : MIN_WRAPPED_COLUMNS);
        if (rest != note->text) print_padding(layout->stream, indent);
        fwrite(rest, 1, len, layout->stream);
        fputc('\n', layout->stream);
        rest += len;
        while (*rest == ' ')
            rest++;
    }
}

bool tl_table_print(const struct tl_table *table, FILE *stream)
{
    struct layout layout = {.stream = stream, .has_colours = tl_output_has_colours(stream)};
    struct cell titles[MAX_COLUMNS];
    unsigned width = tl_output_width(stream);
    if (table->is_broken) return false;
    TL_CHECK(table->cell_count % table->column_count == 0);
    measure(table, &layout);
    if (width > 0) shrink(table, &layout, width);
    for (size_t i = 0; i < table->column_count; i++) {
        titles[i] = (struct cell){.text = (char *)table->columns[i].title, .colour = "1"};
    }
    print_row(table, &layout, titles);
    const struct note *note = table->notes, *notes_end = table->notes + table->note_count;
    for (size_t i = 0; i < table->cell_count; i += table->column_count) {
        print_row(table, &layout, &table->cells[i]);
        for (; note < notes_end && note->row_cell == i; note++)
            print_note(&layout, note, width > 0 ? width : NOTE_COLUMNS);
    }
    return true;
}
