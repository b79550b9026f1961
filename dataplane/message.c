// SPDX-License-Identifier: Apache-2.0
/* Writing and reading of control messages. A reader that finds too little remembers that and goes on with zeros, so
 * that what is read needs one check at the end. */
#include "dataplane/message.h"

#include <endian.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "base/text.h"

#define HEAD_BYTES 12

enum {
    FLAG_META_DATA = 1,
    FLAG_CHECKSUM = 2,
    FLAG_FINAL = 4,
    FLAG_PING = 8,
    FLAG_PUBLISHED = 16,
};

/* What a message of each type may and must contain. */
struct layout {
    const char *name;
    uint8_t flags; /* that may be set */
    bool has_hello;
    bool has_request;
    bool has_step;
    bool has_destination;
    bool has_status;
    bool has_checksum_field; /* when its flag is set */
};

static const struct layout layouts[] = {
    [TL_MESSAGE_HELLO] = {.name = "HELLO", .has_hello = true, .has_destination = true},
    [TL_MESSAGE_PROBED] = {.name = "PROBED"},
    [TL_MESSAGE_REQUEST] = {.name = "REQUEST",
                            .flags = FLAG_META_DATA | FLAG_CHECKSUM,
                            .has_request = true,
                            .has_destination = true},
    [TL_MESSAGE_META_DATA_UPDATE] = {.name = "META_DATA_UPDATE",
                                     .flags = FLAG_META_DATA | FLAG_PUBLISHED,
                                     .has_step = true},
    [TL_MESSAGE_RE_REQUEST] = {.name = "RE_REQUEST", .has_destination = true},
    [TL_MESSAGE_DONE] = {.name = "DONE",
                         .flags = FLAG_META_DATA | FLAG_CHECKSUM | FLAG_PUBLISHED,
                         .has_step = true,
                         .has_checksum_field = true},
    [TL_MESSAGE_ERROR_STATUS] = {.name = "ERROR_STATUS", .flags = FLAG_FINAL, .has_status = true},
    [TL_MESSAGE_CANCEL] = {.name = "CANCEL"},
    [TL_MESSAGE_CANCELLED] = {.name = "CANCELLED"},
    [TL_MESSAGE_CREDIT] = {.name = "CREDIT", .flags = FLAG_PING},
    [TL_MESSAGE_GOODBYE] = {.name = "GOODBYE"},
};

const char *tl_message_name(enum tl_message_type type)
{
    bool is_known = (size_t)type < TL_ARRAY_COUNT(layouts) && layouts[type].name != NULL;
    return is_known ? layouts[type].name : "?";
}

/* ------------------------------------------------------------------------------------------------------ writing -- */

struct writer {
    uint8_t *bytes;
    uint32_t len_bytes;
};

/* Always inlined: of constant length, a number is one store. */
static inline __attribute__((always_inline)) void put(struct writer *writer, uint64_t value, unsigned len_bytes)
{
    TL_CHECK(writer->len_bytes + len_bytes <= TL_SLOT_BYTES);
    uint64_t little = htole64(value);
    memcpy(writer->bytes + writer->len_bytes, &little, len_bytes);
    writer->len_bytes += len_bytes;
}

static void put_bytes(struct writer *writer, const void *bytes, uint32_t len_bytes)
{
    TL_CHECK(writer->len_bytes + len_bytes <= TL_SLOT_BYTES);
    if (len_bytes > 0) memcpy(writer->bytes + writer->len_bytes, bytes, len_bytes);
    writer->len_bytes += len_bytes;
}

static void put_meta_data(struct writer *writer, const struct tl_meta_data *meta_data)
{
    put(writer, (uint64_t)meta_data->dtype, 1);
    put(writer, meta_data->is_dead, 1);
    put(writer, meta_data->shape.rank, 1);
    for (unsigned i = 0; i < meta_data->shape.rank; i++)
        put(writer, meta_data->shape.dims[i], 8);
    put(writer, meta_data->size_bytes, 8);
}

uint32_t tl_message_encode(const struct tl_message *message, uint8_t *buffer)
{
    const struct layout *layout = &layouts[message->type];
    struct writer writer = {.bytes = buffer};
    unsigned flags = (message->has_meta_data ? FLAG_META_DATA : 0) | (message->has_checksum ? FLAG_CHECKSUM : 0) |
                     (message->is_final ? FLAG_FINAL : 0) | (message->is_ping ? FLAG_PING : 0) |
                     (message->is_published ? FLAG_PUBLISHED : 0);
    put(&writer, (uint64_t)message->type, 1);
    put(&writer, flags & layout->flags, 1);
    put(&writer, 0, 2);
    put(&writer, message->consumed, 4);
    put(&writer, message->handle, 4);
    if (layout->has_hello) {
        put(&writer, message->version, 4);
        put(&writer, message->incarnation, 8);
        put(&writer, message->token, 8);
        put(&writer, message->challenge, 8);
    }
    if (layout->has_request) {
        size_t key_bytes = strlen(message->key);
        put(&writer, message->number, 8);
        put(&writer, message->step, 8);
        put(&writer, message->expected_step, 8);
        put(&writer, key_bytes, 2);
        put_bytes(&writer, message->key, (uint32_t)key_bytes);
    }
    if (layout->has_step) put(&writer, message->step, 8);
    if (layout->has_checksum_field && message->has_checksum) put(&writer, message->checksum, 8);
    if ((layout->flags & FLAG_META_DATA) != 0 && message->has_meta_data) put_meta_data(&writer, &message->meta_data);
    if (layout->has_destination) {
        put(&writer, message->destination.len_bytes, 1);
        put_bytes(&writer, message->destination.bytes, message->destination.len_bytes);
    }
    if (layout->has_status) {
        size_t text_bytes = strnlen(message->text, TL_ERROR_MESSAGE_BYTES - 1);
        put(&writer, (uint64_t)message->code, 4);
        put(&writer, text_bytes, 2);
        put_bytes(&writer, message->text, (uint32_t)text_bytes);
    }
    buffer[2] = (uint8_t)writer.len_bytes;
    buffer[3] = (uint8_t)(writer.len_bytes >> 8);
    return writer.len_bytes;
}

/* ------------------------------------------------------------------------------------------------------ reading -- */

struct reader {
    const uint8_t *bytes;
    uint32_t left_bytes;
    bool is_short;
};

static inline __attribute__((always_inline)) const uint8_t *take_bytes(struct reader *reader, uint64_t len_bytes)
{
    if (len_bytes > reader->left_bytes) {
        reader->is_short = true;
        reader->left_bytes = 0;
        return NULL;
    }
    const uint8_t *bytes = reader->bytes;
    reader->bytes += len_bytes;
    reader->left_bytes -= (uint32_t)len_bytes;
    return bytes;
}

static inline __attribute__((always_inline)) uint64_t take(struct reader *reader, unsigned len_bytes)
{
    const uint8_t *bytes = take_bytes(reader, len_bytes);
    uint64_t little = 0;
    if (bytes != NULL) memcpy(&little, bytes, len_bytes);
    return le64toh(little);
}

/* Text of at most capacity - 1 bytes into room; false when it is longer, or no text. */
static bool take_text(struct reader *reader, char *room, uint64_t capacity)
{
    uint64_t len_bytes = take(reader, 2);
    const uint8_t *bytes = take_bytes(reader, len_bytes);
    if (bytes == NULL || len_bytes >= capacity || !tl_text_is_utf8((const char *)bytes, (size_t)len_bytes))
        return false;
    memcpy(room, bytes, (size_t)len_bytes);
    room[len_bytes] = '\0';
    return true;
}

static enum tl_status take_meta_data(struct reader *reader, struct tl_meta_data *meta_data, struct tl_error *ret_error)
{
    meta_data->dtype = (enum tl_dtype)take(reader, 1);
    uint64_t is_dead = take(reader, 1);
    meta_data->shape.rank = (unsigned)take(reader, 1);
    if (is_dead > 1 || meta_data->shape.rank > TL_MAX_RANK) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "meta-data of rank %u", meta_data->shape.rank);
    }
    meta_data->is_dead = is_dead != 0;
    for (unsigned i = 0; i < meta_data->shape.rank; i++)
        meta_data->shape.dims[i] = take(reader, 8);
    meta_data->size_bytes = take(reader, 8);
    return tl_meta_data_validate(meta_data, ret_error);
}

static enum tl_status take_request(struct reader *reader, struct tl_message *message, struct tl_error *ret_error)
{
    message->number = take(reader, 8);
    message->step = take(reader, 8);
    message->expected_step = take(reader, 8);
    message->key = message->text_room;
    bool is_text = take_text(reader, message->text_room, TL_MESSAGE_KEY_BYTES + 1);
    if (is_text && message->text_room[0] != '\0') return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a key that is not UTF-8 of 1 to %d bytes",
                        TL_MESSAGE_KEY_BYTES);
}

static enum tl_status take_status(struct reader *reader, struct tl_message *message, struct tl_error *ret_error)
{
    uint64_t code = take(reader, 4);
    message->code = code >= TL_CANCELLED && code <= TL_UNAUTHENTICATED ? (enum tl_status)code : TL_UNKNOWN;
    message->text = message->text_room;
    if (take_text(reader, message->text_room, sizeof(message->text_room))) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a status whose text is not UTF-8 of at most %d bytes",
                        TL_ERROR_MESSAGE_BYTES - 1);
}

static enum tl_status take_destination(struct reader *reader, struct tl_descriptor *destination,
                                       struct tl_error *ret_error)
{
    uint64_t len_bytes = take(reader, 1);
    const uint8_t *bytes = take_bytes(reader, len_bytes);
    if (bytes == NULL || len_bytes > TL_DESCRIPTOR_MAX_BYTES) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a descriptor of %u bytes", (unsigned)len_bytes);
    }
    destination->len_bytes = (uint8_t)len_bytes;
    memcpy(destination->bytes, bytes, (size_t)len_bytes);
    return TL_OK;
}

static enum tl_status take_body(struct reader *reader, const struct layout *layout, struct tl_message *message,
                                struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    if (layout->has_hello) {
        message->version = (uint32_t)take(reader, 4);
        message->incarnation = take(reader, 8);
        message->token = take(reader, 8);
        message->challenge = take(reader, 8);
    }
    if (layout->has_request) status = take_request(reader, message, ret_error);
    if (layout->has_step) message->step = take(reader, 8);
    if (layout->has_checksum_field && message->has_checksum) message->checksum = take(reader, 8);
    if (status == TL_OK && message->has_meta_data) status = take_meta_data(reader, &message->meta_data, ret_error);
    if (status == TL_OK && layout->has_destination) status = take_destination(reader, &message->destination, ret_error);
    if (status == TL_OK && layout->has_status) status = take_status(reader, message, ret_error);
    return status;
}

enum tl_status tl_message_decode(const uint8_t *bytes, uint32_t len_bytes, struct tl_message *ret_message,
                                 struct tl_error *ret_error)
{
    struct reader reader = {.bytes = bytes, .left_bytes = len_bytes};
    uint64_t type = take(&reader, 1);
    uint64_t flags = take(&reader, 1);
    uint64_t told_bytes = take(&reader, 2);
    if (reader.is_short || told_bytes != len_bytes || told_bytes < HEAD_BYTES) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a message of %u bytes that says it has %u", len_bytes,
                            (unsigned)told_bytes);
    }
    const char *name = tl_message_name((enum tl_message_type)type);
    const struct layout *layout = &layouts[name[0] != '?' ? type : 0];
    if (layout->name == NULL || (flags & ~(uint64_t)layout->flags) != 0) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a message of type %u with flags %#x", (unsigned)type,
                            (unsigned)flags);
    }
    struct tl_message *message = ret_message;
    memset(message, 0, offsetof(struct tl_message, text_room));
    message->type = (enum tl_message_type)type;
    message->has_meta_data = (flags & FLAG_META_DATA) != 0;
    message->has_checksum = (flags & FLAG_CHECKSUM) != 0;
    message->is_final = (flags & FLAG_FINAL) != 0;
    message->is_ping = (flags & FLAG_PING) != 0;
    message->is_published = (flags & FLAG_PUBLISHED) != 0;
    message->consumed = (uint32_t)take(&reader, 4);
    message->handle = (uint32_t)take(&reader, 4);
    enum tl_status status = take_body(&reader, layout, message, ret_error);
    if (status == TL_OK && (reader.is_short || reader.left_bytes > 0)) {
        status = tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a message of %u bytes, which is not what it contains",
                              len_bytes);
    }
    if (status != TL_OK) tl_error_prefix(ret_error, "%s: ", name);
    return status;
}
