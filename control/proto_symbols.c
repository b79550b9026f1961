// SPDX-License-Identifier: Apache-2.0
/*
 * Symbols of the .proto files, found by walking over their descriptors.
 *
 * A full name is looked for from the outside in: the package in front of it is taken off, then at each level the items
 * whose name the rest begins with are entered. The descriptors are the project's own, but the walker still checks every
 * length against the bytes that are there.
 */
#include "control/proto_symbols.h"

#include <stdint.h>
#include <string.h>

/* Field numbers of google/protobuf/descriptor.proto. */
enum {
    ITEM_NAME = 1, /* type of every item */
    FILE_PACKAGE = 2,
    FILE_DEPENDENCY = 3,
    FILE_MESSAGE = 4,
    FILE_ENUM = 5,
    FILE_SERVICE = 6,
    MESSAGE_FIELD = 2,
    MESSAGE_NESTED = 3,
    MESSAGE_ENUM = 4,
    MESSAGE_ONEOF = 8,
    ENUM_VALUE = 2,
    SERVICE_METHOD = 2,
};

/* One length-delimited field of a message. */
struct field {
    unsigned number;
    const unsigned char *bytes;
    size_t len_bytes;
};

/* What is left of a message. */
struct walk {
    const unsigned char *bytes;
    size_t left_bytes;
};

static bool walk_varint(struct walk *walk, uint64_t *ret_value)
{
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && walk->left_bytes > 0; shift += 7) {
        unsigned char byte = *walk->bytes++;
        walk->left_bytes--;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if ((byte & 0x80) == 0) {
            *ret_value = value;
            return true;
        }
    }
    return false;
}

static bool walk_skip(struct walk *walk, uint64_t count)
{
    if (count > walk->left_bytes) return false;
    walk->bytes += count;
    walk->left_bytes -= (size_t)count;
    return true;
}

/* Gives the next length-delimited field, skipping all others; false at the end. */
static bool walk_next(struct walk *walk, struct field *ret_field)
{
    uint64_t tag;
    while (walk_varint(walk, &tag)) {
        uint64_t value = 0;
        bool is_ok = false;
        switch (tag & 7) {
        case 0:
            is_ok = walk_varint(walk, &value);
            break;
        case 1:
            is_ok = walk_skip(walk, 8);
            break;
        case 2:
            if (!walk_varint(walk, &value)) return false;
            *ret_field = (struct field){(unsigned)(tag >> 3), walk->bytes, (size_t)value};
            return walk_skip(walk, value);
        case 5:
            is_ok = walk_skip(walk, 4);
            break;
        default:
            break;
        }
        if (!is_ok) return false;
    }
    return false;
}

static struct walk walk_field(const struct field *field)
{
    return (struct walk){.bytes = field->bytes, .left_bytes = field->len_bytes};
}

static struct walk walk_file(const struct tl_proto_file *file)
{
    return (struct walk){.bytes = file->bytes, .left_bytes = file->len_bytes};
}

/* The first field of that number as text; empty when there is none. */
static struct tl_proto_text text_of(struct walk walk, unsigned number)
{
    struct field field;
    while (walk_next(&walk, &field)) {
        if (field.number == number) return (struct tl_proto_text){(const char *)field.bytes, field.len_bytes};
    }
    return (struct tl_proto_text){"", 0};
}

/* When the name begins with the text and a dot, or is the text: what is left behind them, else NULL. */
static const char *rest_of(const char *name, struct tl_proto_text text)
{
    if (strncmp(name, text.text, text.len_bytes) != 0) return NULL;
    const char *rest = name + text.len_bytes;
    if (*rest == '.' && rest[1] != '\0') return rest + 1;
    return *rest == '\0' ? rest : NULL;
}

/* Finds a name among those items of the walk that have the number and nothing inside. */
static bool has_leaf(struct walk walk, unsigned number, const char *name)
{
    struct field field;
    while (walk_next(&walk, &field)) {
        if (field.number != number) continue;
        struct tl_proto_text item = text_of(walk_field(&field), ITEM_NAME);
        if (strlen(name) == item.len_bytes && memcmp(name, item.text, item.len_bytes) == 0) return true;
    }
    return false;
}

/* Which of the symbols count. */
enum wanted { WANTED_ANY, WANTED_MESSAGE };

/* An enum's values are named as if they stood beside it. */
static bool enum_has(struct walk enumeration, const char *name)
{
    struct tl_proto_text own = text_of(enumeration, ITEM_NAME);
    if (strlen(name) == own.len_bytes && memcmp(name, own.text, own.len_bytes) == 0) return true;
    return has_leaf(enumeration, ENUM_VALUE, name);
}

static bool service_has(struct walk service, const char *name)
{
    const char *rest = rest_of(name, text_of(service, ITEM_NAME));
    if (rest == NULL) return false;
    return *rest == '\0' || has_leaf(service, SERVICE_METHOD, rest);
}

static bool message_has(struct walk message, const char *name, enum wanted wanted)
{
    const char *rest = rest_of(name, text_of(message, ITEM_NAME));
    if (rest == NULL) return false;
    if (*rest == '\0') return true;
    if (wanted == WANTED_ANY && (has_leaf(message, MESSAGE_FIELD, rest) || has_leaf(message, MESSAGE_ONEOF, rest))) {
        return true;
    }
    struct field field;
    while (walk_next(&message, &field)) {
        if (field.number == MESSAGE_NESTED && message_has(walk_field(&field), rest, wanted)) return true;
        if (field.number == MESSAGE_ENUM && wanted == WANTED_ANY && enum_has(walk_field(&field), rest)) return true;
    }
    return false;
}

static bool file_has(const struct tl_proto_file *file, const char *symbol, enum wanted wanted)
{
    struct walk walk = walk_file(file);
    struct tl_proto_text package = text_of(walk, FILE_PACKAGE);
    const char *rest = package.len_bytes > 0 ? rest_of(symbol, package) : symbol;
    if (rest == NULL || *rest == '\0') return false;
    struct field field;
    while (walk_next(&walk, &field)) {
        if (field.number == FILE_MESSAGE && message_has(walk_field(&field), rest, wanted)) return true;
        if (wanted == WANTED_MESSAGE) continue;
        if (field.number == FILE_ENUM && enum_has(walk_field(&field), rest)) return true;
        if (field.number == FILE_SERVICE && service_has(walk_field(&field), rest)) return true;
    }
    return false;
}

static const struct tl_proto_file *file_of(const char *symbol, enum wanted wanted)
{
    for (size_t i = 0; i < tl_proto_file_count; i++) {
        if (file_has(&tl_proto_files[i], symbol, wanted)) return &tl_proto_files[i];
    }
    return NULL;
}

const struct tl_proto_file *tl_proto_file_find(const char *name)
{
    for (size_t i = 0; i < tl_proto_file_count; i++) {
        if (strcmp(tl_proto_files[i].name, name) == 0) return &tl_proto_files[i];
    }
    return NULL;
}

const struct tl_proto_file *tl_proto_file_of_symbol(const char *symbol)
{
    return file_of(symbol, WANTED_ANY);
}

const struct tl_proto_file *tl_proto_file_of_message(const char *name)
{
    return file_of(name, WANTED_MESSAGE);
}

void tl_proto_file_imports(const struct tl_proto_file *file,
                           void (*visit)(void *context, const struct tl_proto_file *import), void *context)
{
    struct walk walk = walk_file(file);
    struct field field;
    while (walk_next(&walk, &field)) {
        if (field.number != FILE_DEPENDENCY) continue;
        for (size_t i = 0; i < tl_proto_file_count; i++) {
            const char *name = tl_proto_files[i].name;
            if (strlen(name) == field.len_bytes && memcmp(name, field.bytes, field.len_bytes) == 0) {
                visit(context, &tl_proto_files[i]);
            }
        }
    }
}

void tl_proto_file_services(const struct tl_proto_file *file,
                            void (*visit)(void *context, struct tl_proto_text package, struct tl_proto_text service),
                            void *context)
{
    struct walk walk = walk_file(file);
    struct tl_proto_text package = text_of(walk, FILE_PACKAGE);
    struct field field;
    while (walk_next(&walk, &field)) {
        if (field.number == FILE_SERVICE) visit(context, package, text_of(walk_field(&field), ITEM_NAME));
    }
}
