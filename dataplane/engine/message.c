// SPDX-License-Identifier: Apache-2.0
/* Writing and reading of control messages. A reader checks each part of fixed length once, and then reads its fields
 * where they lie. Numbers that are mostly small take few bytes, because a card fetches a short message with the work
 * request that posts it. */
#include "dataplane/engine/message.h"

#include <endian.h>
#include <inttypes.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "base/prefetch.h"
#include "base/text.h"
#include "tensor/transfer.h"

#define HEAD_BYTES 8
#define STATUS_BYTES 6 /* how long an ERROR_STATUS is before its text */
#define NUMBER_MAX_BYTES 10
#define HELLO_BYTES 28

enum {
    FLAG_META_DATA = 1,
    FLAG_CHECKSUM = 2,
    FLAG_FINAL = 4,
    FLAG_SUBSCRIPTION = 4, /* in REQUEST */
    FLAG_INLINE = 4,       /* in DONE */
    FLAG_PING = 8,
    FLAG_REMOTE = 8,    /* in REQUEST */
    FLAG_FILE_SLOW = 8, /* in META_DATA_UPDATE */
    FLAG_PUBLISHED = 16,
    FLAG_FIXED = 16, /* in REQUEST */
    FLAG_MAY_MAP = 32,
    FLAG_ON_DEVICE = 32, /* in SOURCE */
    FLAG_COPYING = 64,
    FLAG_READING = 128,
};

/* What a message of each type may contain, and must contain. */
struct layout {
    const char *name;
    uint8_t flags; /* the flags that may be set */
    bool has_hello;
    bool has_request;
    bool has_step;
    bool has_offset;
    bool has_destination;
    bool has_lap; /* the message has it when the receiver copies */
    bool has_status;
    bool has_checksum_field; /* the message has a checksum when its flag is set */
    bool has_data;           /* the message has data when its flag is set */
};

static const struct layout layouts[] = {
    [TL_MESSAGE_HELLO] = {.name = "HELLO", .has_hello = true, .has_destination = true},
    [TL_MESSAGE_PROBED] = {.name = "PROBED"},
    [TL_MESSAGE_REQUEST] = {.name = "REQUEST",
                            .flags = FLAG_META_DATA | FLAG_CHECKSUM | FLAG_SUBSCRIPTION | FLAG_REMOTE | FLAG_FIXED |
                                     FLAG_MAY_MAP | FLAG_COPYING | FLAG_READING,
                            .has_request = true,
                            .has_destination = true,
                            .has_lap = true},
    [TL_MESSAGE_META_DATA_UPDATE] = {.name = "META_DATA_UPDATE",
                                     .flags = FLAG_META_DATA | FLAG_FILE_SLOW | FLAG_PUBLISHED,
                                     .has_step = true},
    [TL_MESSAGE_RE_REQUEST] = {.name = "RE_REQUEST", .flags = FLAG_COPYING, .has_destination = true, .has_lap = true},
    [TL_MESSAGE_DONE] = {.name = "DONE",
                         .flags = FLAG_META_DATA | FLAG_CHECKSUM | FLAG_INLINE | FLAG_PUBLISHED,
                         .has_step = true,
                         .has_checksum_field = true,
                         .has_data = true},
    [TL_MESSAGE_ERROR_STATUS] = {.name = "ERROR_STATUS", .flags = FLAG_FINAL, .has_status = true},
    [TL_MESSAGE_CANCEL] = {.name = "CANCEL"},
    [TL_MESSAGE_CANCELLED] = {.name = "CANCELLED"},
    [TL_MESSAGE_CREDIT] = {.name = "CREDIT", .flags = FLAG_PING},
    [TL_MESSAGE_GOODBYE] = {.name = "GOODBYE"},
    [TL_MESSAGE_MAPPED] = {.name = "MAPPED",
                           .flags = FLAG_META_DATA | FLAG_PUBLISHED,
                           .has_step = true,
                           .has_offset = true,
                           .has_destination = true},
    [TL_MESSAGE_SOURCE] = {.name = "SOURCE",
                           .flags = FLAG_META_DATA | FLAG_CHECKSUM | FLAG_PUBLISHED | FLAG_COPYING | FLAG_ON_DEVICE,
                           .has_step = true,
                           .has_checksum_field = true,
                           .has_destination = true},
    [TL_MESSAGE_COPIED] = {.name = "COPIED"},
};

const char *tl_message_name(enum tl_message_type type)
{
    bool is_known = (size_t)type < TL_ARRAY_COUNT(layouts) && layouts[type].name != NULL;
    return is_known ? layouts[type].name : "?";
}

/* ----------------------------------------------------------------------------------------------------- writing -- */

#define REQUEST_MAX_BYTES (6 * NUMBER_MAX_BYTES) /* how long a REQUEST is before the text of its key */
#define META_DATA_MAX_BYTES (3 + NUMBER_MAX_BYTES * (TL_MAX_RANK + 1))
/* The longest key and the longest text, so that nothing need be counted while a message is written. */
#define KEY_MAX_BYTES                                                                                                  \
    (TL_MESSAGE_BYTES - HEAD_BYTES - REQUEST_MAX_BYTES - META_DATA_MAX_BYTES - 1 - TL_DESCRIPTOR_MAX_BYTES -           \
     NUMBER_MAX_BYTES)
#define TEXT_MAX_BYTES (TL_MESSAGE_BYTES - HEAD_BYTES - STATUS_BYTES)
_Static_assert(TL_MESSAGE_KEY_BYTES <= KEY_MAX_BYTES && TL_ERROR_MESSAGE_BYTES <= TEXT_MAX_BYTES,
               "messages are too short");
_Static_assert(TL_BATCH_HEAD_BYTES + TL_MESSAGE_BYTES <= TL_SLOT_BYTES, "slots are too small");
_Static_assert(HEAD_BYTES + NUMBER_MAX_BYTES + sizeof(uint64_t) + META_DATA_MAX_BYTES <= TL_INLINE_HEAD_BYTES &&
                   TL_INLINE_HEAD_BYTES <= TL_STAYING_BYTES,
               "the head of an inline value is too long");

static inline uint8_t *put_u16(uint8_t *at, uint64_t value)
{
    uint16_t little = htole16((uint16_t)value);
    memcpy(at, &little, sizeof(little));
    return at + sizeof(little);
}

static inline uint8_t *put_u32(uint8_t *at, uint32_t value)
{
    uint32_t little = htole32(value);
    memcpy(at, &little, sizeof(little));
    return at + sizeof(little);
}

static inline uint8_t *put_u64(uint8_t *at, uint64_t value)
{
    uint64_t little = htole64(value);
    memcpy(at, &little, sizeof(little));
    return at + sizeof(little);
}

/* Writes seven bits in each byte, the lowest first; all bytes but the last have the highest bit set. */
static inline uint8_t *put_number(uint8_t *at, uint64_t value)
{
    for (; value >= 0x80; value >>= 7)
        *at++ = (uint8_t)(value | 0x80);
    *at++ = (uint8_t)value;
    return at;
}

static inline uint8_t *put_bytes(uint8_t *at, const void *bytes, size_t len_bytes)
{
    memcpy(at, bytes, len_bytes);
    return at + len_bytes;
}

static uint8_t *put_meta_data(uint8_t *at, const struct tl_meta_data *meta_data)
{
    TL_CHECK(meta_data->shape.rank <= TL_MAX_RANK);
    *at++ = (uint8_t)meta_data->dtype;
    *at++ = meta_data->is_dead;
    *at++ = (uint8_t)meta_data->shape.rank;
    for (unsigned i = 0; i < meta_data->shape.rank; i++)
        at = put_number(at, meta_data->shape.dims[i]);
    return put_number(at, meta_data->size_bytes);
}

/* A key begins with a number: its form in these bits, then the priority in as many, then the rest. */
#define KEY_FORM_BITS 2
_Static_assert(TL_MAX_PRIORITY < 1 << KEY_FORM_BITS, "a priority does not fit");

static inline bool has_text(const struct tl_message *message)
{
    return message->key_form == TL_KEY_TEXT || message->key_form == TL_KEY_NEW;
}

static uint8_t *put_key_head(uint8_t *at, const struct tl_message *message, uint64_t rest)
{
    unsigned low = (unsigned)message->priority << KEY_FORM_BITS | (unsigned)message->key_form;
    return put_number(at, rest << 2 * KEY_FORM_BITS | low);
}

static uint8_t *put_key(uint8_t *at, const struct tl_message *message)
{
    TL_CHECK(message->priority <= TL_MAX_PRIORITY);
    if (!has_text(message)) return put_key_head(at, message, message->key_number);
    size_t key_bytes = strlen(message->key);
    TL_CHECK(key_bytes <= KEY_MAX_BYTES);
    if (message->key_form == TL_KEY_NEW) {
        at = put_key_head(at, message, message->key_number);
        at = put_number(at, key_bytes);
    } else {
        at = put_key_head(at, message, key_bytes);
    }
    return put_bytes(at, message->key, key_bytes);
}

static uint8_t *put_request(uint8_t *at, const struct tl_message *message)
{
    at = put_number(at, message->number);
    at = put_number(at, message->step);
    at = put_number(at, message->expected_step);
    if (message->subscription != 0) at = put_number(at, message->subscription);
    return put_key(at, message);
}

static uint8_t *put_hello(uint8_t *at, const struct tl_message *message)
{
    at = put_u32(at, message->version);
    at = put_u64(at, message->incarnation);
    at = put_u64(at, message->token);
    return put_u64(at, message->challenge);
}

static uint8_t *put_destination(uint8_t *at, const struct tl_descriptor *destination)
{
    TL_CHECK(destination->len_bytes <= TL_DESCRIPTOR_MAX_BYTES);
    *at++ = destination->len_bytes;
    return put_bytes(at, destination->bytes, destination->len_bytes);
}

static uint8_t *put_status(uint8_t *at, const struct tl_message *message)
{
    char text[TL_ERROR_MESSAGE_BYTES];
    size_t text_bytes = strnlen(message->text, TL_ERROR_MESSAGE_BYTES - 1);
    memcpy(text, message->text, text_bytes);
    /* The peer ends a connection with a text that is not UTF-8, and an error may name a file whose path is not. */
    tl_text_make_utf8(text, text_bytes);
    at = put_u32(at, (uint32_t)message->code);
    at = put_u16(at, text_bytes);
    return put_bytes(at, text, text_bytes);
}

/* Some flags mean another thing in another type. */
static inline unsigned flags_of(const struct tl_message *message, enum tl_message_type type)
{
    unsigned flags = (message->has_meta_data ? FLAG_META_DATA : 0) | (message->has_checksum ? FLAG_CHECKSUM : 0) |
                     (message->is_copying ? FLAG_COPYING : 0) | (message->is_reading ? FLAG_READING : 0);
    if (type == TL_MESSAGE_REQUEST) {
        flags |= (message->subscription != 0 ? FLAG_SUBSCRIPTION : 0) | (message->is_remote ? FLAG_REMOTE : 0) |
                 (message->is_fixed ? FLAG_FIXED : 0);
    } else {
        bool has_4 = type == TL_MESSAGE_DONE ? message->is_inline : message->is_final;
        bool has_8 = type == TL_MESSAGE_META_DATA_UPDATE ? message->is_file_slow : message->is_ping;
        flags |= (has_4 ? FLAG_FINAL : 0) | (has_8 ? FLAG_PING : 0) | (message->is_published ? FLAG_PUBLISHED : 0);
    }
    bool has_32 = type == TL_MESSAGE_SOURCE ? message->is_on_device : message->may_map;
    flags |= has_32 ? FLAG_MAY_MAP : 0;
    return flags & layouts[type].flags;
}

/* Nearly all messages are of two types. What a message of these may contain is known when this is compiled. */
#define FOR_TYPE(type, function, ...)                                                                                  \
    ((type) == TL_MESSAGE_DONE      ? function(TL_MESSAGE_DONE, __VA_ARGS__)                                           \
     : (type) == TL_MESSAGE_REQUEST ? function(TL_MESSAGE_REQUEST, __VA_ARGS__)                                        \
                                    : function((type), __VA_ARGS__))
#define ALWAYS_INLINE inline __attribute__((always_inline))

static ALWAYS_INLINE uint32_t encode(enum tl_message_type type, const struct tl_message *message, uint8_t *buffer)
{
    const struct layout *layout = &layouts[type];
    unsigned flags = flags_of(message, type);
    buffer[0] = (uint8_t)type;
    buffer[1] = (uint8_t)flags;
    uint8_t *at = put_u32(buffer + 4, message->handle);
    if (layout->has_hello) at = put_hello(at, message);
    if (layout->has_request) at = put_request(at, message);
    if (layout->has_step) at = put_number(at, message->step);
    if (layout->has_offset) at = put_number(at, message->offset);
    if (layout->has_checksum_field && message->has_checksum) at = put_u64(at, message->checksum);
    if ((flags & FLAG_META_DATA) != 0) at = put_meta_data(at, &message->meta_data);
    if (layout->has_destination) at = put_destination(at, &message->destination);
    if (layout->has_lap && message->is_copying) at = put_number(at, message->lap_bytes);
    if (layout->has_status) at = put_status(at, message);
    if (layout->has_data && message->is_inline)
        at = put_bytes(at, message->data, (size_t)message->meta_data.size_bytes);
    uint32_t len_bytes = (uint32_t)(at - buffer);
    (void)put_u16(buffer + 2, len_bytes);
    return len_bytes;
}

uint32_t tl_message_encode(const struct tl_message *message, uint8_t *buffer)
{
    return FOR_TYPE(message->type, encode, message, buffer);
}

static ALWAYS_INLINE uint32_t most_bytes(enum tl_message_type type, const struct tl_message *message)
{
    const struct layout *layout = &layouts[type];
    size_t count = HEAD_BYTES;
    if (layout->has_hello) count += HELLO_BYTES;
    if (layout->has_request) count += REQUEST_MAX_BYTES + (has_text(message) ? strlen(message->key) : 0);
    if (layout->has_step) count += NUMBER_MAX_BYTES;
    if (layout->has_offset) count += NUMBER_MAX_BYTES;
    if (layout->has_checksum_field && message->has_checksum) count += sizeof(message->checksum);
    if (message->has_meta_data) count += 3 + NUMBER_MAX_BYTES * (message->meta_data.shape.rank + 1);
    if (layout->has_destination) count += 1 + (size_t)message->destination.len_bytes;
    if (layout->has_lap && message->is_copying) count += NUMBER_MAX_BYTES;
    if (layout->has_status) count += STATUS_BYTES + strnlen(message->text, TL_ERROR_MESSAGE_BYTES - 1);
    if (layout->has_data && message->is_inline) count += (size_t)message->meta_data.size_bytes;
    return (uint32_t)count;
}

uint32_t tl_message_most_bytes(const struct tl_message *message)
{
    return FOR_TYPE(message->type, most_bytes, message);
}

void tl_batch_encode_head(uint8_t *buffer, uint32_t consumed)
{
    (void)put_u32(buffer, consumed);
}

/* ----------------------------------------------------------------------------------------------------- reading -- */

struct reader {
    const uint8_t *at;
    const uint8_t *end;
};

/* Returns the next len_bytes bytes; NULL when there are fewer, and then for all that follow. */
static inline const uint8_t *take(struct reader *reader, uint64_t len_bytes)
{
    const uint8_t *at = reader->at;
    if (len_bytes > (uint64_t)(reader->end - at)) {
        reader->at = NULL;
        reader->end = NULL;
        return NULL;
    }
    reader->at += len_bytes;
    return at;
}

static inline uint64_t get_u16(const uint8_t *at)
{
    uint16_t little;
    memcpy(&little, at, sizeof(little));
    return le16toh(little);
}

static inline uint32_t get_u32(const uint8_t *at)
{
    uint32_t little;
    memcpy(&little, at, sizeof(little));
    return le32toh(little);
}

static inline uint64_t get_u64(const uint8_t *at)
{
    uint64_t little;
    memcpy(&little, at, sizeof(little));
    return le64toh(little);
}

static enum tl_status too_short(struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a message that ends before its last field");
}

static enum tl_status bad_number(struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "a number that is incomplete, too large or has more bytes than it needs");
}

/* Reads a number of several bytes. */
static __attribute__((noinline)) bool take_long_number(struct reader *reader, uint64_t *ret_number)
{
    const uint8_t *at = reader->at;
    uint64_t number = 0;
    unsigned shift = 0;
    for (; at < reader->end && *at >= 0x80 && shift < 63; at++, shift += 7)
        number |= (uint64_t)(*at & 0x7f) << shift;
    if (at == reader->end || *at > (shift < 63 ? 0x7f : 1) || *at == 0) return false;
    *ret_number = number | (uint64_t)*at << shift;
    reader->at = at + 1;
    return true;
}

/* Reads the next number. Returns false when the message ends before it does, or it has more than 64 bits or more bytes
 * than it needs. */
static inline bool take_number(struct reader *reader, uint64_t *ret_number)
{
    const uint8_t *at = reader->at;
    if (at != reader->end && at[0] < 0x80) {
        *ret_number = at[0];
        reader->at = at + 1;
        return true;
    }
    if (reader->end - at < 2 || at[1] >= 0x80 || at[1] == 0) return take_long_number(reader, ret_number);
    *ret_number = (uint64_t)at[1] << 7 | (at[0] & 0x7f);
    reader->at = at + 2;
    return true;
}

/* Copies text of at most capacity - 1 bytes into ret_text. Returns false when it is longer, or is not UTF-8. */
static bool take_text(struct reader *reader, uint64_t len_bytes, char *ret_text, uint64_t capacity)
{
    const uint8_t *bytes = take(reader, len_bytes);
    if (bytes == NULL || len_bytes >= capacity || !tl_text_is_utf8((const char *)bytes, (size_t)len_bytes))
        return false;
    memcpy(ret_text, bytes, (size_t)len_bytes);
    ret_text[len_bytes] = '\0';
    return true;
}

static ALWAYS_INLINE enum tl_status take_meta_data(struct reader *reader, struct tl_meta_data *meta_data,
                                                   struct tl_error *ret_error)
{
    const uint8_t *at = take(reader, 3);
    if (at == NULL) return too_short(ret_error);
    unsigned rank = at[2];
    if (at[1] > 1 || rank > TL_MAX_RANK) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "meta-data of rank %u, or with an invalid flag", rank);
    }
    meta_data->dtype = (enum tl_dtype)at[0];
    meta_data->is_dead = at[1] != 0;
    meta_data->shape.rank = rank;
    for (unsigned i = 0; i < rank; i++)
        if (!take_number(reader, &meta_data->shape.dims[i])) return bad_number(ret_error);
    if (!take_number(reader, &meta_data->size_bytes)) return bad_number(ret_error);
    return tl_meta_data_validate(meta_data, ret_error);
}

static enum tl_status take_hello(struct reader *reader, struct tl_message *message, struct tl_error *ret_error)
{
    const uint8_t *at = take(reader, HELLO_BYTES);
    if (at == NULL) return too_short(ret_error);
    message->version = get_u32(at);
    message->incarnation = get_u64(at + 4);
    message->token = get_u64(at + 12);
    message->challenge = get_u64(at + 20);
    return TL_OK;
}

static ALWAYS_INLINE enum tl_status take_key(struct reader *reader, struct tl_message *message,
                                             struct tl_error *ret_error)
{
    uint64_t field;
    if (!take_number(reader, &field)) return bad_number(ret_error);
    message->key_form = (enum tl_key_form)(field & ((1u << KEY_FORM_BITS) - 1));
    message->priority = (uint8_t)(field >> KEY_FORM_BITS & TL_MAX_PRIORITY);
    field >>= 2 * KEY_FORM_BITS;
    if (message->key_form != TL_KEY_TEXT && field > UINT32_MAX)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a key with the number %" PRIu64, field);
    message->key_number = message->key_form == TL_KEY_TEXT ? 0 : (uint32_t)field;
    if (message->key_form == TL_KEY_NEW && !take_number(reader, &field)) return bad_number(ret_error);
    if (message->key_form == TL_KEY_AS_BEFORE && message->has_meta_data)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "meta-data twice");
    if (!has_text(message)) return TL_OK;
    message->key = message->text_capacity;
    message->key_bytes = (size_t)field;
    bool is_text = take_text(reader, field, message->text_capacity, TL_MESSAGE_KEY_BYTES + 1);
    if (is_text && message->text_capacity[0] != '\0') return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a key that is not UTF-8 of 1 to %d bytes",
                        TL_MESSAGE_KEY_BYTES);
}

static ALWAYS_INLINE enum tl_status take_request(struct reader *reader, bool has_subscription,
                                                 struct tl_message *message, struct tl_error *ret_error)
{
    if (!take_number(reader, &message->number) || !take_number(reader, &message->step) ||
        !take_number(reader, &message->expected_step) ||
        (has_subscription && (!take_number(reader, &message->subscription) || message->subscription == 0))) {
        return bad_number(ret_error);
    }
    return take_key(reader, message, ret_error);
}

static ALWAYS_INLINE enum tl_status take_value(struct reader *reader, const struct layout *layout,
                                               struct tl_message *message, struct tl_error *ret_error)
{
    if (!take_number(reader, &message->step)) return bad_number(ret_error);
    if (layout->has_offset && !take_number(reader, &message->offset)) return bad_number(ret_error);
    if (!layout->has_checksum_field || !message->has_checksum) return TL_OK;
    const uint8_t *at = take(reader, 8);
    if (at == NULL) return too_short(ret_error);
    message->checksum = get_u64(at);
    return TL_OK;
}

static enum tl_status take_status(struct reader *reader, struct tl_message *message, struct tl_error *ret_error)
{
    const uint8_t *at = take(reader, STATUS_BYTES);
    if (at == NULL) return too_short(ret_error);
    uint32_t code = get_u32(at);
    message->code = code >= TL_CANCELLED && code <= TL_UNAUTHENTICATED ? (enum tl_status)code : TL_UNKNOWN;
    message->text = message->text_capacity;
    if (take_text(reader, get_u16(at + 4), message->text_capacity, sizeof(message->text_capacity))) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a status whose text is not UTF-8 of at most %d bytes",
                        TL_ERROR_MESSAGE_BYTES - 1);
}

static enum tl_status take_destination(struct reader *reader, struct tl_descriptor *destination,
                                       struct tl_error *ret_error)
{
    const uint8_t *at = take(reader, 1);
    if (at == NULL) return too_short(ret_error);
    unsigned len_bytes = at[0];
    const uint8_t *bytes = take(reader, len_bytes);
    if (bytes == NULL || len_bytes > TL_DESCRIPTOR_MAX_BYTES) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a descriptor of %u bytes", len_bytes);
    }
    destination->len_bytes = (uint8_t)len_bytes;
    memcpy(destination->bytes, bytes, len_bytes);
    return TL_OK;
}

static ALWAYS_INLINE enum tl_status take_data(struct reader *reader, struct tl_message *message,
                                              struct tl_error *ret_error)
{
    uint64_t size_bytes = message->meta_data.size_bytes;
    message->data = take(reader, size_bytes);
    if (size_bytes > 0 && message->data != NULL) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "an inline value without its bytes or its meta-data");
}

static enum tl_status take_lap(struct reader *reader, struct tl_message *message, struct tl_error *ret_error)
{
    if (!take_number(reader, &message->lap_bytes)) return bad_number(ret_error);
    if (message->lap_bytes == 0 || message->lap_bytes >= TL_LAP_PARTS) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a lap of %" PRIu64 " bytes, which has no quarters",
                        message->lap_bytes);
}

static ALWAYS_INLINE enum tl_status take_body(struct reader *reader, const struct layout *layout, unsigned flags,
                                              struct tl_message *message, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    if (layout->has_hello) status = take_hello(reader, message, ret_error);
    if (status == TL_OK && layout->has_request)
        status = take_request(reader, (flags & FLAG_SUBSCRIPTION) != 0, message, ret_error);
    if (status == TL_OK && layout->has_step) status = take_value(reader, layout, message, ret_error);
    if (status == TL_OK && message->has_meta_data) status = take_meta_data(reader, &message->meta_data, ret_error);
    if (status == TL_OK && layout->has_destination) status = take_destination(reader, &message->destination, ret_error);
    if (status == TL_OK && layout->has_lap && message->is_copying) status = take_lap(reader, message, ret_error);
    if (status == TL_OK && layout->has_status) status = take_status(reader, message, ret_error);
    if (status == TL_OK && message->is_inline) status = take_data(reader, message, ret_error);
    return status;
}

static ALWAYS_INLINE enum tl_status decode(enum tl_message_type type, const uint8_t *bytes, uint32_t len_bytes,
                                           struct tl_message *message, struct tl_error *ret_error)
{
    const struct layout *layout = &layouts[type];
    unsigned flags = bytes[1];
    if (layout->name == NULL || (flags & ~(unsigned)layout->flags) != 0) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a message of type %u with flags %#x", bytes[0], flags);
    }
    tl_message_clear(message);
    message->type = type;
    message->has_meta_data = (flags & FLAG_META_DATA) != 0;
    message->has_checksum = (flags & FLAG_CHECKSUM) != 0;
    message->is_final = type == TL_MESSAGE_ERROR_STATUS && (flags & FLAG_FINAL) != 0;
    message->is_inline = type == TL_MESSAGE_DONE && (flags & FLAG_INLINE) != 0;
    message->is_ping = type == TL_MESSAGE_CREDIT && (flags & FLAG_PING) != 0;
    message->is_file_slow = type == TL_MESSAGE_META_DATA_UPDATE && (flags & FLAG_FILE_SLOW) != 0;
    message->is_remote = type == TL_MESSAGE_REQUEST && (flags & FLAG_REMOTE) != 0;
    message->is_fixed = type == TL_MESSAGE_REQUEST && (flags & FLAG_FIXED) != 0;
    message->is_published = type != TL_MESSAGE_REQUEST && (flags & FLAG_PUBLISHED) != 0;
    message->may_map = type != TL_MESSAGE_SOURCE && (flags & FLAG_MAY_MAP) != 0;
    message->is_on_device = type == TL_MESSAGE_SOURCE && (flags & FLAG_ON_DEVICE) != 0;
    message->is_copying = (flags & FLAG_COPYING) != 0;
    message->is_reading = (flags & FLAG_READING) != 0;
    message->handle = get_u32(bytes + 4);
    struct reader reader = {.at = bytes + HEAD_BYTES, .end = bytes + len_bytes};
    enum tl_status status = take_body(&reader, layout, flags, message, ret_error);
    if (status == TL_OK && reader.at != reader.end) {
        status = tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                              "a message of %u bytes that continues after its last field", len_bytes);
    }
    if (status != TL_OK) tl_error_prefix(ret_error, "%s: ", layout->name);
    return status;
}

enum tl_status tl_message_decode(const uint8_t *bytes, uint32_t len_bytes, struct tl_message *ret_message,
                                 struct tl_error *ret_error)
{
    unsigned announced_bytes = len_bytes >= HEAD_BYTES ? (unsigned)get_u16(bytes + 2) : 0;
    if (announced_bytes != len_bytes || announced_bytes < HEAD_BYTES) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a message of %u bytes whose header says %u", len_bytes,
                            announced_bytes);
    }
    enum tl_message_type type = bytes[0] < TL_ARRAY_COUNT(layouts) ? (enum tl_message_type)bytes[0] : 0;
    return FOR_TYPE(type, decode, bytes, len_bytes, ret_message, ret_error);
}

bool tl_message_peek_key(const uint8_t *bytes, uint32_t len_bytes, struct tl_message_key *ret_key)
{
    if (len_bytes < HEAD_BYTES || bytes[0] != TL_MESSAGE_REQUEST) return false;
    struct reader reader = {.at = bytes + HEAD_BYTES, .end = bytes + len_bytes};
    unsigned skipped_count = 3 + ((bytes[1] & FLAG_SUBSCRIPTION) != 0);
    uint64_t field;
    for (unsigned i = 0; i < skipped_count; i++)
        if (!take_number(&reader, &field)) return false;
    if (!take_number(&reader, &field)) return false;
    enum tl_key_form form = (enum tl_key_form)(field & ((1u << KEY_FORM_BITS) - 1));
    field >>= 2 * KEY_FORM_BITS;
    *ret_key = (struct tl_message_key){.number = (uint32_t)field};
    if (form == TL_KEY_KNOWN || form == TL_KEY_AS_BEFORE) return true;
    if (form == TL_KEY_NEW && !take_number(&reader, &field)) return false;
    ret_key->text = (const char *)take(&reader, field);
    ret_key->text_bytes = (size_t)field;
    return ret_key->text != NULL && field > 0;
}

bool tl_message_peek_done(const uint8_t *bytes, uint32_t len_bytes, uint32_t *ret_handle)
{
    if (len_bytes < HEAD_BYTES || bytes[0] != TL_MESSAGE_DONE) return false;
    *ret_handle = get_u32(bytes + 4);
    return true;
}

/* The length of the message that begins here and ends in left_bytes; tl_message_decode refuses what is no message. */
static uint32_t message_bytes(const uint8_t *bytes, uint32_t left_bytes)
{
    uint32_t len_bytes = left_bytes >= HEAD_BYTES ? (uint32_t)get_u16(bytes + 2) : left_bytes;
    return len_bytes < HEAD_BYTES || len_bytes > left_bytes ? left_bytes : len_bytes;
}

static bool has_staying_value(const uint8_t *bytes, uint32_t len_bytes)
{
    return len_bytes > TL_STAYING_BYTES && bytes[0] == TL_MESSAGE_DONE && (bytes[1] & FLAG_INLINE) != 0;
}

void tl_batch_copy(uint8_t *to, const uint8_t *batch, uint32_t len_bytes)
{
    uint32_t at = len_bytes < TL_BATCH_HEAD_BYTES ? len_bytes : TL_BATCH_HEAD_BYTES;
    memcpy(to, batch, at);
    while (len_bytes - at > TL_STAYING_BYTES) {
        memcpy(to + at, batch + at, TL_INLINE_HEAD_BYTES);
        uint32_t next_bytes = message_bytes(to + at, len_bytes - at);
        if (!has_staying_value(to + at, next_bytes)) break;
        tl_prefetch(batch + at + TL_INLINE_HEAD_BYTES, next_bytes - TL_INLINE_HEAD_BYTES);
        at += next_bytes;
    }
    memcpy(to + at, batch + at, len_bytes - at);
}

enum tl_status tl_batch_decode_head(const uint8_t *bytes, uint32_t len_bytes, struct tl_batch *ret_batch,
                                    struct tl_error *ret_error)
{
    if (len_bytes <= TL_BATCH_HEAD_BYTES) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a batch of %u bytes without a message", len_bytes);
    }
    *ret_batch =
        (struct tl_batch){.at = bytes + TL_BATCH_HEAD_BYTES, .end = bytes + len_bytes, .consumed = get_u32(bytes)};
    return TL_OK;
}

bool tl_batch_has_many(const struct tl_batch *batch)
{
    uint64_t left_bytes = (uint64_t)(batch->end - batch->at);
    return left_bytes >= 2 * HEAD_BYTES && get_u16(batch->at + 2) < left_bytes;
}

bool tl_batch_next(struct tl_batch *batch, const uint8_t **ret_bytes, uint32_t *ret_len_bytes)
{
    uint32_t left_bytes = (uint32_t)(batch->end - batch->at);
    if (left_bytes == 0) return false;
    *ret_bytes = batch->at;
    *ret_len_bytes = message_bytes(batch->at, left_bytes);
    batch->at += *ret_len_bytes;
    return true;
}
