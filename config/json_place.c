// SPDX-License-Identifier: Apache-2.0
/*
 * The scanner that finds the place of every value in a JSON text.
 *
 * Happy path: one loop over the text; a bracket opens or closes a container, a string where a key is due makes a node
 * without a value, everything else is the value of that node or a node of its own. The open containers are the chain of
 * parents, so depth costs no stack.
 *
 * Failure modes: no memory. Text that is no JSON ends the scan or gives nodes that mean nothing; offsets stay inside.
 */
#include "config/json_place.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "config/quote.h"

/* Deeper paths than this are shown by their last steps. */
#define MAX_SHOWN_STEPS 12
/* Longer keys are quoted, which cuts them. */
#define MAX_PLAIN_BYTES 64

struct scan {
    struct tl_json_places *places;
    json_malloc_t allocate;
    uint32_t capacity;
    uint32_t container; /* the open one */
    uint32_t pending;   /* a member whose value is due */
};

static bool grow(struct scan *scan)
{
    struct tl_json_places *places = scan->places;
    if (places->count < scan->capacity) return true;
    size_t capacity = scan->capacity ? (size_t)scan->capacity * 2 : 64;
    struct tl_json_node *nodes = scan->allocate(capacity * sizeof(*nodes));
    if (!nodes) return false;
    if (places->count > 0) memcpy(nodes, places->nodes, places->count * sizeof(*nodes));
    places->release(places->nodes);
    places->nodes = nodes;
    scan->capacity = (uint32_t)capacity;
    return true;
}

static bool add_node(struct scan *scan, uint32_t key, uint32_t value, uint32_t *ret_node)
{
    if (!grow(scan)) return false;
    uint32_t node = scan->places->count++;
    scan->places->nodes[node] =
        (struct tl_json_node){.key = key, .value = value, .parent = scan->container, .end = node + 1};
    *ret_node = node;
    return true;
}

/* A value starts at offset: that of the pending member, or an element, or the root. */
static bool begin_value(struct scan *scan, uint32_t offset, uint32_t *ret_node)
{
    if (scan->pending == TL_JSON_NONE) return add_node(scan, TL_JSON_NONE, offset, ret_node);
    *ret_node = scan->pending;
    scan->places->nodes[scan->pending].value = offset;
    scan->pending = TL_JSON_NONE;
    return true;
}

static void close_container(struct scan *scan)
{
    if (scan->container == TL_JSON_NONE) return;
    struct tl_json_node *node = &scan->places->nodes[scan->container];
    node->end = scan->places->count;
    scan->container = node->parent;
    scan->pending = TL_JSON_NONE;
}

static bool is_key_due(const struct scan *scan)
{
    if (scan->container == TL_JSON_NONE || scan->pending != TL_JSON_NONE) return false;
    return scan->places->text[scan->places->nodes[scan->container].value] == '{';
}

/* The offset behind the string that starts at offset. */
static size_t skip_string(const char *text, size_t len_bytes, size_t offset)
{
    size_t i = offset + 1;
    while (i < len_bytes && text[i] != '"') {
        i += text[i] == '\\' ? 2 : 1;
    }
    return i < len_bytes ? i + 1 : len_bytes;
}

static size_t skip_word(const char *text, size_t len_bytes, size_t offset)
{
    size_t i = offset + 1;
    while (i < len_bytes && !memchr("{}[],:\" \t\r\n", text[i], 11)) {
        i++;
    }
    return i;
}

/* Reads the token at *offset and moves behind it. */
static bool scan_token(struct scan *scan, size_t *offset)
{
    const char *text = scan->places->text;
    size_t len_bytes = scan->places->len_bytes;
    uint32_t here = (uint32_t)*offset;
    uint32_t node;
    switch (text[*offset]) {
    case ' ':
    case '\t':
    case '\r':
    case '\n':
    case ',':
    case ':':
        *offset += 1;
        return true;
    case '{':
    case '[':
        *offset += 1;
        if (!begin_value(scan, here, &node)) return false;
        scan->container = node;
        return true;
    case '}':
    case ']':
        *offset += 1;
        close_container(scan);
        return true;
    case '"':
        *offset = skip_string(text, len_bytes, *offset);
        if (!is_key_due(scan)) return begin_value(scan, here, &node);
        return add_node(scan, here, TL_JSON_NONE, &scan->pending);
    default:
        *offset = skip_word(text, len_bytes, *offset);
        return begin_value(scan, here, &node);
    }
}

bool tl_json_places_init(struct tl_json_places *places, const char *text, size_t len_bytes)
{
    TL_CHECK(len_bytes < TL_JSON_NONE / 2);
    *places = (struct tl_json_places){.text = text, .len_bytes = len_bytes};
    struct scan scan = {.places = places, .container = TL_JSON_NONE, .pending = TL_JSON_NONE};
    json_get_alloc_funcs(&scan.allocate, &places->release);
    for (size_t offset = 0; offset < len_bytes;) {
        if (!scan_token(&scan, &offset)) {
            tl_json_places_fini(places);
            return false;
        }
    }
    places->open = scan.pending != TL_JSON_NONE ? scan.pending : scan.container;
    while (scan.container != TL_JSON_NONE) {
        close_container(&scan);
    }
    return true;
}

void tl_json_places_fini(struct tl_json_places *places)
{
    if (places->release) places->release(places->nodes);
    *places = (struct tl_json_places){0};
}

uint32_t tl_json_places_first(const struct tl_json_places *places, uint32_t node)
{
    if (node >= places->count || places->nodes[node].end <= node + 1) return TL_JSON_NONE;
    return node + 1;
}

uint32_t tl_json_places_next(const struct tl_json_places *places, uint32_t node)
{
    if (node >= places->count) return TL_JSON_NONE;
    uint32_t parent = places->nodes[node].parent;
    uint32_t next = places->nodes[node].end;
    if (parent == TL_JSON_NONE || next >= places->nodes[parent].end) return TL_JSON_NONE;
    return next;
}

/* The key of a node as text, NULL when it has none or there is no memory. The caller frees *ret_string. */
static const char *decode_key(const struct tl_json_places *places, uint32_t node, json_t **ret_string)
{
    *ret_string = NULL;
    size_t start = places->nodes[node].key;
    if (start == TL_JSON_NONE) return NULL;
    size_t end = skip_string(places->text, places->len_bytes, start);
    *ret_string = json_loadb(places->text + start, end - start, JSON_DECODE_ANY, NULL);
    return json_string_value(*ret_string);
}

uint32_t tl_json_places_find_same_key(const struct tl_json_places *places, uint32_t node)
{
    uint32_t parent = places->nodes[node].parent;
    if (parent == TL_JSON_NONE) return TL_JSON_NONE;
    json_t *wanted_string;
    const char *wanted = decode_key(places, node, &wanted_string);
    uint32_t other = wanted ? tl_json_places_first(places, parent) : TL_JSON_NONE;
    while (other != TL_JSON_NONE && other < node) {
        json_t *string;
        const char *key = decode_key(places, other, &string);
        bool is_same = key && strcmp(key, wanted) == 0;
        json_decref(string);
        if (is_same) break;
        other = tl_json_places_next(places, other);
    }
    json_decref(wanted_string);
    return other < node ? other : TL_JSON_NONE;
}

static bool is_plain_key(const char *key)
{
    size_t length = strspn(key, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-$");
    return length > 0 && length <= MAX_PLAIN_BYTES && key[length] == '\0';
}

/* Writes one step of a path, as ".key", "[3]" or the plain key at the front; returns its length. */
static size_t format_step(const struct tl_json_places *places, uint32_t node, bool is_front, char *buffer, size_t size)
{
    if (places->nodes[node].key == TL_JSON_NONE) {
        size_t index = 0;
        uint32_t other = tl_json_places_first(places, places->nodes[node].parent);
        for (; other < node; other = tl_json_places_next(places, other)) {
            index++;
        }
        return (size_t)snprintf(buffer, size, "[%zu]", index);
    }
    json_t *string;
    char quoted[TL_QUOTE_BYTES];
    const char *key = decode_key(places, node, &string);
    if (!key) key = "?";
    const char *shown = is_plain_key(key) ? key : tl_quote(key, quoted);
    size_t length = (size_t)snprintf(buffer, size, "%s%s", is_front ? "" : ".", shown);
    json_decref(string);
    return length;
}

char *tl_json_places_path(const struct tl_json_places *places, uint32_t node, char ret_path[TL_JSON_PATH_BYTES])
{
    if (node >= places->count || places->nodes[node].parent == TL_JSON_NONE) return strcpy(ret_path, "top level");
    uint32_t steps[MAX_SHOWN_STEPS];
    size_t step_count = 0;
    uint32_t step = node;
    for (; places->nodes[step].parent != TL_JSON_NONE && step_count < MAX_SHOWN_STEPS;
         step = places->nodes[step].parent) {
        steps[step_count++] = step;
    }
    bool is_cut = places->nodes[step].parent != TL_JSON_NONE;
    size_t used = is_cut ? (size_t)snprintf(ret_path, TL_JSON_PATH_BYTES, "..") : 0;
    while (step_count > 0) {
        step_count--;
        char text[TL_QUOTE_BYTES + 8];
        size_t length = format_step(places, steps[step_count], used == 0, text, sizeof(text));
        if (used + length + sizeof("...") > TL_JSON_PATH_BYTES) {
            strcpy(ret_path + used, "...");
            break;
        }
        memcpy(ret_path + used, text, length + 1);
        used += length;
    }
    return ret_path;
}

void tl_json_locate(const char *text, size_t offset, unsigned *ret_line, unsigned *ret_column)
{
    unsigned line = 1;
    unsigned column = 1;
    for (size_t i = 0; i < offset; i++) {
        if (text[i] == '\n') {
            line++;
            column = 1;
        } else if (((unsigned char)text[i] & 0xc0) != 0x80) {
            column++;
        }
    }
    *ret_line = line;
    *ret_column = column;
}
