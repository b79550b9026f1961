// SPDX-License-Identifier: Apache-2.0
/*
 * Terminal output of the commands.
 *
 * Text that comes from peers, files and flags is escaped before it is written, so that no tensor's name can move the
 * cursor, change colours or hide what stands beside it. A standard output that is full or whose reader has gone is
 * noticed once, at the end, and becomes the exit code.
 */
#include "server/cli/output.h"

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include <wchar.h>

#include "base/text.h"
#include "server/cli/command.h"

#define DEFAULT_COLUMNS 80

bool tl_output_has_colours(FILE *stream)
{
    const char *no_color = getenv("NO_COLOR");
    const char *term = getenv("TERM");
    if (no_color && no_color[0]) return false;
    if (term && strcmp(term, "dumb") == 0) return false;
    return isatty(fileno(stream)) == 1;
}

unsigned tl_output_width(FILE *stream)
{
    struct winsize size;
    if (isatty(fileno(stream)) != 1) return 0;
    if (ioctl(fileno(stream), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return DEFAULT_COLUMNS;
    return size.ws_col;
}

/* The code point of the valid UTF-8 character of len bytes. */
static uint32_t code_point(const char *text, size_t len)
{
    const unsigned char *bytes = (const unsigned char *)text;
    if (len == 1) return bytes[0];
    uint32_t point = bytes[0] & (0x7Fu >> len);
    for (size_t i = 1; i < len; i++)
        point = point << 6 | (bytes[i] & 0x3Fu);
    return point;
}

/* True for what must not reach a terminal: controls, line and paragraph separators, marks that reorder or hide. */
static bool is_unsafe(uint32_t point)
{
    return point < 0x20 || (point >= 0x7F && point < 0xA0) || point == 0xAD || point == 0x61C ||
           (point >= 0x200B && point <= 0x200F) || (point >= 0x2028 && point <= 0x202E) ||
           (point >= 0x2060 && point <= 0x206F) || point == 0xFEFF || (point >= 0xFFF9 && point <= 0xFFFB) ||
           (point >= 0xE0000 && point <= 0xE0FFF);
}

void tl_output_put_escaped(FILE *stream, const char *text)
{
    size_t left = strlen(text);
    while (left > 0) {
        size_t len = tl_text_utf8_char_len(text, left);
        uint32_t point = len > 0 ? code_point(text, len) : 0;
        if (len == 0) {
            len = 1;
            fprintf(stream, "\\x%02X", (unsigned char)*text);
        } else if (!is_unsafe(point)) {
            fwrite(text, 1, len, stream);
        } else if (point == '\n' || point == '\t' || point == '\r') {
            fprintf(stream, "\\%c", point == '\n' ? 'n' : point == '\t' ? 't' : 'r');
        } else if (point < 0x80) {
            fprintf(stream, "\\x%02X", (unsigned)point);
        } else {
            fprintf(stream, "\\u{%X}", (unsigned)point);
        }
        text += len;
        left -= len;
    }
}

char *tl_output_escape(const char *text)
{
    char *escaped = NULL;
    size_t len = 0;
    FILE *stream = open_memstream(&escaped, &len);
    if (!stream) return NULL;
    tl_output_put_escaped(stream, text);
    bool is_complete = !ferror(stream);
    if (fclose(stream) != 0 || !is_complete) {
        free(escaped);
        return NULL;
    }
    return escaped;
}

unsigned tl_output_columns(const char *text, size_t len_bytes)
{
    unsigned columns = 0;
    for (size_t place = 0; place < len_bytes;) {
        size_t len = tl_text_utf8_char_len(text + place, len_bytes - place);
        int width = len > 0 ? wcwidth((wchar_t)code_point(text + place, len)) : 1;
        columns += width >= 0 ? (unsigned)width : 1;
        place += len > 0 ? len : 1;
    }
    return columns;
}

/* Why standard output could not be written; 0: it could, or the reason is not known. */
static int write_error;

static bool flush_stdout(void)
{
    errno = 0;
    bool is_written = fflush(stdout) == 0 && !ferror(stdout);
    if (!is_written && write_error == 0) write_error = errno;
    return is_written;
}

void tl_output_line(const char *text)
{
    errno = 0;
    if (puts(text) == EOF && write_error == 0) write_error = errno;
}

void tl_output_error(const char *command, const char *format, ...)
{
    char message[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    flush_stdout();
    fprintf(stderr, "tensorlane%s%s: ", command[0] ? " " : "", command);
    tl_output_put_escaped(stderr, message);
    fputc('\n', stderr);
    fflush(stderr);
}

int tl_output_finish(const char *command, int exit_code)
{
    if (flush_stdout()) return exit_code;
    tl_output_error(command, "cannot write to standard output%s%s", write_error ? ": " : "",
                    write_error ? strerror(write_error) : "");
    return exit_code != TL_EXIT_OK ? exit_code : TL_EXIT_FAILED;
}
