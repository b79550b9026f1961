// SPDX-License-Identifier: Apache-2.0
/*
 * Quoting: a key or a value of the file appears in messages, which end on terminals and in logs. Nothing in it may act
 * there as a control sequence, and none may be so long that it displaces the remedy.
 */
#include "config/quote.h"

#include <stdbool.h>
#include <string.h>

#include "base/text.h"

#define MAX_SHOWN_BYTES 64

/* The length of the printable character at the front of text, 0 when that is a control character or no UTF-8. */
static size_t printable_length(const char *text)
{
    unsigned char first = (unsigned char)text[0];
    if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
    size_t length = tl_text_utf8_char_len(text, strnlen(text, 4));
    bool is_c1_control = first == 0xc2 && (unsigned char)text[1] < 0xa0;
    return is_c1_control ? 0 : length;
}

/* Writes the character at the front of text, escaped when it must be, to out; moves *text behind it. Writes at most
 * four bytes and no NUL; returns the end of what it wrote. */
static char *put_char(char *out, const char **text)
{
    size_t length = printable_length(*text);
    if (length > 0) {
        out = mempcpy(out, *text, length);
        *text += length;
        return out;
    }
    static const char digits[] = "0123456789abcdef";
    unsigned char byte = (unsigned char)**text;
    *text += 1;
    return mempcpy(out, (const char[]){'\\', 'x', digits[byte >> 4], digits[byte & 15]}, 4);
}

char *tl_quote(const char *text, char ret_buffer[TL_QUOTE_BYTES])
{
    char *out = ret_buffer;
    const char *start = text;
    *out++ = '"';
    while (*text != '\0') {
        const char *next = text;
        char piece[4];
        size_t length = (size_t)(put_char(piece, &next) - piece);
        if (next - start > MAX_SHOWN_BYTES) {
            out = stpcpy(out, "...");
            break;
        }
        if (*text == '"' || *text == '\\') *out++ = '\\';
        out = mempcpy(out, piece, length);
        text = next;
    }
    strcpy(out, "\"");
    return ret_buffer;
}

char *tl_quote_bare(const char *text, char *ret_buffer, size_t capacity)
{
    char *out = ret_buffer;
    const char *end = ret_buffer + capacity;
    while (*text != '\0' && end - out > 4) {
        out = put_char(out, &text);
    }
    *out = '\0';
    return ret_buffer;
}
