// SPDX-License-Identifier: Apache-2.0
/*
 * Reads a JSON text, and composes the errors that point into it.
 *
 * Happy path: size, NUL and byte order mark are checked, jansson reads the text, the scanner notes the places. Failure
 * modes: what jansson refuses is reported with its line, column and words, and the path that was open there; for a key
 * that appears twice, both places are named.
 */
#include "config/json_doc.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "base/text.h"
#include "config/quote.h"

/* A longer file name is cut, and its end is shown. */
#define MAX_SHOWN_SOURCE_BYTES 256
/* Longer names, and longer lists of candidates, are not searched for the nearest. */
#define MAX_COMPARED_BYTES 128
#define MAX_COMPARED_COUNT 1024
/* Longer lists of candidates are not printed. */
#define MAX_LISTED_COUNT 16

const char *tl_json_shown_source(const char *source)
{
    size_t length = strlen(source);
    if (length <= MAX_SHOWN_SOURCE_BYTES) return source;
    const char *end = source + length - MAX_SHOWN_SOURCE_BYTES;
    while (((unsigned char)*end & 0xc0) == 0x80) {
        end++;
    }
    return end;
}

enum tl_status tl_json_no_memory(const char *source, struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no memory for the configuration",
                        tl_json_shown_source(source));
}

/* ----------------------------------------------------------------------------------------------------- reading -- */

static const char *syntax_remedy(enum json_error_code code)
{
    switch (code) {
    case json_error_invalid_utf8:
        return "save the file as UTF-8";
    case json_error_premature_end_of_input:
        return "the text is not complete";
    case json_error_end_of_input_expected:
        return "the file must contain exactly one object";
    case json_error_null_character:
    case json_error_null_byte_in_key:
        return "remove it";
    case json_error_numeric_overflow:
        return "write a smaller number";
    case json_error_stack_overflow:
        return "nest less deeply";
    default:
        return "JSON has no comments and no comma after the last member";
    }
}

static enum tl_status fail_duplicate(const struct tl_json_places *places, const char *source, const json_error_t *error,
                                     struct tl_error *ret_error)
{
    char path[TL_JSON_PATH_BYTES];
    unsigned line = (unsigned)error->line;
    unsigned column = (unsigned)error->column;
    uint32_t first = places->count > 0 ? tl_json_places_find_same_key(places, places->count - 1) : TL_JSON_NONE;
    if (first == TL_JSON_NONE) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s:%u:%u: a key appears twice; keep one", source, line,
                            column);
    }
    unsigned first_line, first_column;
    tl_json_locate(places->text, places->nodes[places->count - 1].key, &line, &column);
    tl_json_locate(places->text, places->nodes[first].key, &first_line, &first_column);
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "%s:%u:%u: %s: this key appears twice, first on line %u, column %u; keep one", source, line,
                        column, tl_json_places_path(places, first, path), first_line, first_column);
}

static enum tl_status fail_syntax(const char *text, size_t len_bytes, const char *source, const json_error_t *error,
                                  struct tl_error *ret_error)
{
    /* jansson has no words for want of memory. */
    if (error->text[0] == '\0') return tl_json_no_memory(source, ret_error);
    /* jansson stands behind the token that it did not like; a key that appears twice is fine by itself, other tokens
     * are not, and must not close or open anything. */
    enum json_error_code code = json_error_code(error);
    size_t good_bytes = error->position > 0 ? (size_t)error->position : 0;
    if (good_bytes > len_bytes) good_bytes = len_bytes;
    bool is_last_good = code == json_error_duplicate_key || code == json_error_premature_end_of_input;
    if (good_bytes > 0 && !is_last_good) good_bytes--;
    struct tl_json_places places;
    if (!tl_json_places_init(&places, text, good_bytes)) return tl_json_no_memory(source, ret_error);
    if (code == json_error_duplicate_key) {
        fail_duplicate(&places, tl_json_shown_source(source), error, ret_error);
    } else {
        char words[4 * JSON_ERROR_TEXT_LENGTH];
        char path[TL_JSON_PATH_BYTES];
        tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s:%d:%d: %s: not JSON: %s; %s", tl_json_shown_source(source),
                     error->line > 0 ? error->line : 1, error->column > 0 ? error->column : 1,
                     tl_json_places_path(&places, places.open, path), tl_quote_bare(error->text, words, sizeof(words)),
                     syntax_remedy(code));
    }
    tl_json_places_fini(&places);
    return TL_INVALID_ARGUMENT;
}

/* What jansson would refuse with words that do not help. */
static enum tl_status check_bytes(const char *text, size_t len_bytes, const char *source, struct tl_error *ret_error)
{
    const char *shown = tl_json_shown_source(source);
    if (len_bytes > TL_JSON_MAX_BYTES) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s:1:1: top level: larger than %zu MiB; a cluster's configuration is never that large",
                            shown, TL_JSON_MAX_BYTES >> 20);
    }
    const char *nul = len_bytes > 0 ? memchr(text, '\0', len_bytes) : NULL;
    if (nul) {
        unsigned line, column;
        tl_json_locate(text, (size_t)(nul - text), &line, &column);
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s:%u:%u: top level: a NUL byte; save the file as UTF-8",
                            shown, line, column);
    }
    if (len_bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s:1:1: top level: a byte order mark; save the file without it", shown);
    }
    return TL_OK;
}

enum tl_status tl_json_doc_open(struct tl_json_doc *doc, const char *text, size_t len_bytes, const char *source,
                                struct tl_error *ret_error)
{
    enum tl_status status = check_bytes(text, len_bytes, source, ret_error);
    if (status != TL_OK) return status;
    json_error_t error = {0};
    /* json_loadb takes a null pointer for an error without words, even when the length is zero. */
    json_t *root = json_loadb(len_bytes > 0 ? text : "", len_bytes, JSON_REJECT_DUPLICATES, &error);
    if (!root) return fail_syntax(text, len_bytes, source, &error, ret_error);
    struct tl_json_doc opened = {.source = source, .root = root, .line = 1};
    if (!tl_json_places_init(&opened.places, text, len_bytes)) {
        json_decref(root);
        return tl_json_no_memory(source, ret_error);
    }
    struct tl_json_value value = tl_json_root(&opened);
    status = tl_json_expect(&value, JSON_OBJECT, "an object, {\"cluster\": ...}", ret_error);
    if (status != TL_OK) {
        tl_json_doc_close(&opened);
        return status;
    }
    *doc = opened;
    return TL_OK;
}

void tl_json_doc_close(struct tl_json_doc *doc)
{
    json_decref(doc->root);
    doc->root = NULL;
    tl_json_places_fini(&doc->places);
}

/* ----------------------------------------------------------------------------------------------------- walking -- */

struct tl_json_value tl_json_root(struct tl_json_doc *doc)
{
    return (struct tl_json_value){.doc = doc, .json = doc->root};
}

bool tl_json_first(const struct tl_json_value *parent, struct tl_json_value *ret_child)
{
    struct tl_json_value child = {.doc = parent->doc};
    if (json_is_object(parent->json)) {
        void *position = json_object_iter(parent->json);
        if (!position) return false;
        child.key = json_object_iter_key(position);
        child.json = json_object_iter_value(position);
    } else {
        child.json = json_array_get(parent->json, 0);
    }
    child.node = tl_json_places_first(&parent->doc->places, parent->node);
    if (!child.json || child.node == TL_JSON_NONE) return false;
    *ret_child = child;
    return true;
}

bool tl_json_next(const struct tl_json_value *parent, struct tl_json_value *child)
{
    struct tl_json_value next = {.doc = parent->doc, .index = child->index + 1};
    if (child->key) {
        void *position = json_object_iter_next(parent->json, json_object_key_to_iter(child->key));
        if (!position) return false;
        next.key = json_object_iter_key(position);
        next.json = json_object_iter_value(position);
    } else {
        next.json = json_array_get(parent->json, next.index);
    }
    next.node = tl_json_places_next(&parent->doc->places, child->node);
    if (!next.json || next.node == TL_JSON_NONE) return false;
    *child = next;
    return true;
}

bool tl_json_member(const struct tl_json_value *object, const char *key, struct tl_json_value *ret_member)
{
    struct tl_json_value member;
    TL_JSON_FOREACH(object, member)
    {
        if (member.key && strcmp(member.key, key) == 0) {
            *ret_member = member;
            return true;
        }
    }
    return false;
}

const char *tl_json_type_name(const json_t *json)
{
    switch (json_typeof(json)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "a list";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
    case JSON_REAL:
        return "a number";
    case JSON_TRUE:
        return "true";
    case JSON_FALSE:
        return "false";
    case JSON_NULL:
        return "null";
    }
    return "a value";
}

unsigned tl_json_line(const struct tl_json_value *value)
{
    struct tl_json_doc *doc = value->doc;
    const struct tl_json_node *node = &doc->places.nodes[value->node];
    size_t offset = node->key != TL_JSON_NONE ? node->key : node->value;
    if (offset < doc->line_offset) {
        doc->line_offset = 0;
        doc->line = 1;
    }
    for (; doc->line_offset < offset; doc->line_offset++) {
        if (doc->places.text[doc->line_offset] == '\n') doc->line++;
    }
    return doc->line;
}

/* ------------------------------------------------------------------------------------------------------ errors -- */

static enum tl_status fail_at(const struct tl_json_value *value, size_t offset, enum tl_status code,
                              struct tl_error *ret_error, const char *message)
{
    struct tl_json_doc *doc = value->doc;
    char path[TL_JSON_PATH_BYTES];
    unsigned line, column;
    doc->error_offset = offset;
    tl_json_locate(doc->places.text, offset, &line, &column);
    return tl_error_set(ret_error, code, "%s:%u:%u: %s: %s", tl_json_shown_source(doc->source), line, column,
                        tl_json_places_path(&doc->places, value->node, path), message);
}

enum tl_status tl_json_fail(const struct tl_json_value *value, enum tl_status code, struct tl_error *ret_error,
                            const char *format, ...)
{
    char message[TL_ERROR_MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    return fail_at(value, value->doc->places.nodes[value->node].value, code, ret_error, message);
}

enum tl_status tl_json_fail_key(const struct tl_json_value *value, enum tl_status code, struct tl_error *ret_error,
                                const char *format, ...)
{
    char message[TL_ERROR_MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    const struct tl_json_node *node = &value->doc->places.nodes[value->node];
    size_t offset = node->key != TL_JSON_NONE ? node->key : node->value;
    return fail_at(value, offset, code, ret_error, message);
}

enum tl_status tl_json_collect(const struct tl_json_doc *doc, enum tl_status status, const struct tl_error *error)
{
    struct tl_config_errors *errors = doc->errors;
    if (status == TL_OK || !errors || status == TL_RESOURCE_EXHAUSTED) return status;
    for (size_t i = 0; i < errors->count; i++) {
        bool is_same = errors->items[i].offset == doc->error_offset;
        if (is_same && strcmp(errors->items[i].error.message, error->message) == 0) return TL_OK;
    }
    if (errors->count == TL_CONFIG_MAX_ERRORS) {
        errors->is_full = true;
        return status;
    }
    errors->items[errors->count].offset = doc->error_offset;
    errors->items[errors->count].error = *error;
    errors->count++;
    return TL_OK;
}

static void append(char *buffer, size_t capacity, const char *text)
{
    size_t used = strlen(buffer);
    if (used + strlen(text) < capacity) strcpy(buffer + used, text);
}

char *tl_json_suggest(const char *name, const char *const *candidates, size_t count, char *buffer, size_t capacity)
{
    buffer[0] = '\0';
    char quoted[TL_QUOTE_BYTES];
    const char *nearest = NULL;
    if (strnlen(name, MAX_COMPARED_BYTES + 1) <= MAX_COMPARED_BYTES) {
        nearest = tl_text_nearest(name, candidates, count < MAX_COMPARED_COUNT ? count : MAX_COMPARED_COUNT);
    }
    if (nearest) {
        snprintf(buffer, capacity, "did you mean %s?", tl_quote(nearest, quoted));
        return buffer;
    }
    if (count == 0) return strcpy(buffer, "there is none at all");
    append(buffer, capacity, count > 1 ? "use one of " : "use ");
    for (size_t i = 0; i < count && i < MAX_LISTED_COUNT; i++) {
        if (i > 0) append(buffer, capacity, ", ");
        append(buffer, capacity, tl_quote(candidates[i], quoted));
    }
    if (count > MAX_LISTED_COUNT) append(buffer, capacity, ", ...");
    return buffer;
}

enum tl_status tl_json_fail_unknown_key(const struct tl_json_value *value, const char *what,
                                        const char *const *candidates, size_t count, struct tl_error *ret_error)
{
    char suggestion[TL_ERROR_MESSAGE_BYTES / 2];
    char quoted[TL_QUOTE_BYTES];
    return tl_json_fail_key(value, TL_INVALID_ARGUMENT, ret_error, "there is no %s %s; %s", what,
                            tl_quote(value->key, quoted),
                            tl_json_suggest(value->key, candidates, count, suggestion, sizeof(suggestion)));
}

enum tl_status tl_json_expect(const struct tl_json_value *value, json_type type, const char *what,
                              struct tl_error *ret_error)
{
    if (json_typeof(value->json) == type) return TL_OK;
    return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error, "must be %s, not %s", what,
                        tl_json_type_name(value->json));
}
