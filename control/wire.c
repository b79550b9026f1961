// SPDX-License-Identifier: Apache-2.0
/*
 * Messages on the wire.
 *
 * Reading walks over the top-level fields of a message, copying them into a head buffer, until field 15 with wire type
 * 2: the data, which must reach exactly to the end. The head is then checked (check_head: lengths, nesting, UTF-8 and
 * NUL of every string) before protobuf-c sees it, because protobuf-c checks none of that; its allocations are bounded
 * by the arena.
 */
#include "control/wire.h"

#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "base/text.h"
#include "control/internal.h"
#include "tensor/tensor.h"

#define DATA_FIELD 15
#define DATA_TAG ((DATA_FIELD << 3) | WIRE_LENGTH)
#define MAX_NESTING 8
#define MAX_VARINT_BYTES 10
/* Times beyond the year 2116 are no times. */
#define MAX_UNIX_NS (INT64_C(1) << 62)

enum wire_type { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_LENGTH = 2, WIRE_32 = 5 };

/* ------------------------------------------------------------------------------------------------------- arena -- */

static void *arena_alloc(void *context, size_t size)
{
    struct tl_wire_arena *arena = context;
    size_t at = (arena->used + 15) & ~(size_t)15;
    if (at > arena->capacity || size > arena->capacity - at) return NULL;
    arena->used = at + size;
    return arena->memory + at;
}

static void arena_free(void *context, void *pointer)
{
    (void)context;
    (void)pointer;
}

enum tl_status tl_wire_arena_init(struct tl_wire_arena *arena, size_t capacity, struct tl_error *ret_error)
{
    *arena = (struct tl_wire_arena){.capacity = capacity};
    arena->memory = malloc(capacity);
    if (arena->memory == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for messages");
    arena->allocator = (ProtobufCAllocator){.alloc = arena_alloc, .free = arena_free, .allocator_data = arena};
    return TL_OK;
}

void tl_wire_arena_reset(struct tl_wire_arena *arena)
{
    arena->used = 0;
}

void tl_wire_arena_fini(struct tl_wire_arena *arena)
{
    free(arena->memory);
    *arena = (struct tl_wire_arena){0};
}

/* -------------------------------------------------------------------------------------------------------- data -- */

static bool refill(struct tl_wire_data *data)
{
    while (data->run_bytes == 0) {
        if (!grpc_byte_buffer_reader_peek(&data->reader, &data->slice)) return false;
        data->run = GRPC_SLICE_START_PTR(*data->slice);
        data->run_bytes = GRPC_SLICE_LENGTH(*data->slice);
    }
    return true;
}

size_t tl_wire_data_next(struct tl_wire_data *data, uint64_t max_bytes, const void **ret_run)
{
    TL_CHECK(data->left_bytes > 0 && refill(data));
    size_t take = (size_t)tl_min_u64(data->run_bytes, max_bytes);
    *ret_run = data->run;
    data->run += take;
    data->run_bytes -= take;
    data->left_bytes -= take;
    return take;
}

grpc_slice tl_wire_data_take(struct tl_wire_data *data, uint64_t max_bytes)
{
    const void *run;
    size_t count = tl_wire_data_next(data, max_bytes, &run);
    size_t begin = (size_t)((const unsigned char *)run - GRPC_SLICE_START_PTR(*data->slice));
    return grpc_slice_sub(*data->slice, begin, begin + count);
}

void tl_wire_data_fini(struct tl_wire_data *data)
{
    grpc_byte_buffer_reader_destroy(&data->reader);
}

enum tl_status tl_wire_read_plain(const ProtobufCMessageDescriptor *descriptor, grpc_byte_buffer *buffer,
                                  struct tl_wire_arena *arena, ProtobufCMessage **ret_message,
                                  struct tl_error *ret_error)
{
    struct tl_wire_data data;
    enum tl_status status = tl_wire_read(descriptor, buffer, arena, ret_message, &data, ret_error);
    if (status == TL_OK) tl_wire_data_fini(&data);
    return status;
}

/* -------------------------------------------------------------------------------------------------------- head -- */

/* Bytes of the head as they are copied out of the slices. */
struct head {
    struct tl_wire_data *data;
    unsigned char *bytes; /* in the arena, [TL_MAX_FRAME_HEAD_BYTES] or the whole message if shorter */
    size_t used;
    size_t capacity;
};

static bool head_copy(struct head *head, uint64_t count)
{
    if (count > head->data->left_bytes || count > head->capacity - head->used) return false;
    while (count > 0) {
        const void *run;
        size_t got = tl_wire_data_next(head->data, count, &run);
        memcpy(head->bytes + head->used, run, got);
        head->used += got;
        count -= got;
    }
    return true;
}

/* Copies a varint to the head and gives its value. */
static bool head_varint(struct head *head, uint64_t *ret_value)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < MAX_VARINT_BYTES; i++) {
        if (!head_copy(head, 1)) return false;
        unsigned char byte = head->bytes[head->used - 1];
        value |= (uint64_t)(byte & 0x7f) << (7 * i);
        if ((byte & 0x80) == 0) {
            *ret_value = value;
            return true;
        }
    }
    return false;
}

/* Copies every field in front of the data; leaves head->data at the first byte of the data. */
static bool head_read(struct head *head)
{
    while (head->data->left_bytes > 0) {
        size_t field_start = head->used;
        uint64_t tag;
        uint64_t length;
        if (!head_varint(head, &tag)) return false;
        switch (tag & 7) {
        case WIRE_VARINT:
            if (!head_varint(head, &length)) return false;
            break;
        case WIRE_64:
            if (!head_copy(head, 8)) return false;
            break;
        case WIRE_32:
            if (!head_copy(head, 4)) return false;
            break;
        case WIRE_LENGTH:
            if (!head_varint(head, &length)) return false;
            if (tag == DATA_TAG) {
                head->used = field_start;
                return length == head->data->left_bytes;
            }
            if (!head_copy(head, length)) return false;
            break;
        default:
            return false;
        }
    }
    return true;
}

/* A varint within bytes; returns its length, 0 when there is none. */
static size_t parse_varint(const unsigned char *bytes, size_t count, uint64_t *ret_value)
{
    uint64_t value = 0;
    for (size_t i = 0; i < count && i < MAX_VARINT_BYTES; i++) {
        value |= (uint64_t)(bytes[i] & 0x7f) << (7 * i);
        if ((bytes[i] & 0x80) == 0) {
            *ret_value = value;
            return i + 1;
        }
    }
    return 0;
}

static bool check_message(const ProtobufCMessageDescriptor *descriptor, const unsigned char *bytes, size_t count,
                          unsigned nesting);

static bool check_length_field(const ProtobufCFieldDescriptor *field, const unsigned char *bytes, size_t count,
                               unsigned nesting)
{
    if (field == NULL) return true;
    if (field->type == PROTOBUF_C_TYPE_STRING) return tl_text_is_utf8((const char *)bytes, count);
    if (field->type == PROTOBUF_C_TYPE_MESSAGE) return check_message(field->descriptor, bytes, count, nesting + 1);
    return true;
}

/* Checks what protobuf-c does not: that strings are UTF-8 without NUL, and that nesting is bounded. */
static bool check_message(const ProtobufCMessageDescriptor *descriptor, const unsigned char *bytes, size_t count,
                          unsigned nesting)
{
    if (nesting > MAX_NESTING) return false;
    size_t at = 0;
    while (at < count) {
        uint64_t tag;
        uint64_t value = 0;
        size_t used = parse_varint(bytes + at, count - at, &tag);
        if (used == 0 || (tag >> 3) == 0 || (tag >> 3) > 0x1fffffff) return false;
        at += used;
        switch (tag & 7) {
        case WIRE_VARINT:
            used = parse_varint(bytes + at, count - at, &value);
            if (used == 0) return false;
            break;
        case WIRE_64:
            used = 8;
            break;
        case WIRE_32:
            used = 4;
            break;
        case WIRE_LENGTH: {
            size_t prefix = parse_varint(bytes + at, count - at, &value);
            if (prefix == 0 || value > count - at - prefix) return false;
            const ProtobufCFieldDescriptor *field =
                protobuf_c_message_descriptor_get_field(descriptor, (unsigned)(tag >> 3));
            if (!check_length_field(field, bytes + at + prefix, (size_t)value, nesting)) return false;
            used = prefix + (size_t)value;
            break;
        }
        default:
            return false;
        }
        if (used > count - at) return false;
        at += used;
    }
    return true;
}

enum tl_status tl_wire_read(const ProtobufCMessageDescriptor *descriptor, grpc_byte_buffer *buffer,
                            struct tl_wire_arena *arena, ProtobufCMessage **ret_message, struct tl_wire_data *ret_data,
                            struct tl_error *ret_error)
{
    struct tl_wire_data data = {0};
    if (!grpc_byte_buffer_reader_init(&data.reader, buffer)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a message that cannot be decompressed");
    }
    data.left_bytes = grpc_byte_buffer_length(data.reader.buffer_out);
    tl_wire_arena_reset(arena);
    size_t capacity = (size_t)tl_min_u64(data.left_bytes, TL_MAX_FRAME_HEAD_BYTES);
    struct head head = {.data = &data, .bytes = arena_alloc(arena, capacity), .capacity = capacity};
    ProtobufCMessage *message = NULL;
    if (head.bytes != NULL && head_read(&head) && check_message(descriptor, head.bytes, head.used, 0)) {
        message = protobuf_c_message_unpack(descriptor, &arena->allocator, head.used, head.bytes);
    }
    if (message == NULL) {
        tl_wire_data_fini(&data);
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "a message that is no %s, or too long, or has invalid UTF-8 or a NUL in a text, or does "
                            "not end with its data",
                            descriptor->name);
    }
    *ret_message = message;
    *ret_data = data;
    return TL_OK;
}

/* ----------------------------------------------------------------------------------------------------- writing -- */

static size_t put_varint(unsigned char *bytes, uint64_t value)
{
    size_t used = 0;
    while (value >= 0x80) {
        bytes[used++] = (unsigned char)(value | 0x80);
        value >>= 7;
    }
    bytes[used++] = (unsigned char)value;
    return used;
}

grpc_byte_buffer *tl_wire_write(const ProtobufCMessage *message)
{
    return tl_wire_write_with_data(message, NULL, 0, 0);
}

grpc_byte_buffer *tl_wire_write_with_data(const ProtobufCMessage *message, grpc_slice *slices, size_t slice_count,
                                          uint64_t data_bytes)
{
    size_t packed_bytes = protobuf_c_message_get_packed_size(message);
    grpc_slice head = grpc_slice_malloc(packed_bytes + 1 + MAX_VARINT_BYTES);
    unsigned char *bytes = GRPC_SLICE_START_PTR(head);
    size_t used = protobuf_c_message_pack(message, bytes);
    TL_CHECK(used == packed_bytes);
    if (data_bytes > 0) {
        bytes[used++] = DATA_TAG;
        used += put_varint(bytes + used, data_bytes);
    }
    GRPC_SLICE_SET_LENGTH(head, used);
    grpc_slice few[1 + 16];
    grpc_slice *all = slice_count <= 16 ? few : malloc((1 + slice_count) * sizeof(*all));
    if (all == NULL) {
        grpc_slice_unref(head);
        return NULL;
    }
    all[0] = head;
    if (slice_count > 0) memcpy(all + 1, slices, slice_count * sizeof(*slices));
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(all, 1 + slice_count);
    grpc_slice_unref(head);
    if (all != few) free(all);
    return buffer;
}

static void put_tensor(void *tensor)
{
    tl_tensor_put(tensor);
}

grpc_slice tl_wire_slice_of_tensor(struct tl_tensor *tensor, uint64_t offset_bytes, uint64_t len_bytes)
{
    TL_CHECK(offset_bytes <= tl_tensor_size_bytes(tensor) && len_bytes <= tl_tensor_size_bytes(tensor) - offset_bytes);
    unsigned char *start = (unsigned char *)tl_tensor_data(tensor) + offset_bytes;
    return grpc_slice_new_with_user_data(start, (size_t)len_bytes, put_tensor, tl_tensor_get(tensor));
}

/* ------------------------------------------------------------------------------------------------------ fields -- */

void tl_wire_from_meta_data(const struct tl_meta_data *meta_data, uint64_t *dims, Tensorlane__V1__MetaData *ret_message)
{
    tensorlane__v1__meta_data__init(ret_message);
    ret_message->dtype = (Tensorlane__V1__DType)meta_data->dtype;
    memcpy(dims, meta_data->shape.dims, meta_data->shape.rank * sizeof(*dims));
    ret_message->n_dims = meta_data->shape.rank;
    ret_message->dims = dims;
    ret_message->is_dead = meta_data->is_dead;
    ret_message->size_bytes = meta_data->size_bytes;
}

enum tl_status tl_wire_to_meta_data(const Tensorlane__V1__MetaData *message, struct tl_meta_data *ret_meta_data,
                                    struct tl_error *ret_error)
{
    if (message == NULL) return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the meta-data of the tensor is missing");
    if (message->n_dims > TL_MAX_RANK) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a tensor of %zu dimensions; at most %d are possible",
                            message->n_dims, TL_MAX_RANK);
    }
    struct tl_meta_data meta_data = {
        .dtype = (enum tl_dtype)message->dtype, .is_dead = message->is_dead != 0, .size_bytes = message->size_bytes};
    meta_data.shape.rank = (unsigned)message->n_dims;
    if (message->n_dims > 0) memcpy(meta_data.shape.dims, message->dims, message->n_dims * sizeof(uint64_t));
    enum tl_status status = tl_meta_data_validate(&meta_data, ret_error);
    if (status == TL_OK) *ret_meta_data = meta_data;
    return status;
}

bool tl_wire_from_annotations(const struct tl_annotations *annotations, Tensorlane__V1__Annotations *ret_message)
{
    size_t count;
    const struct tl_annotation *items = tl_annotations_items(annotations, &count);
    Tensorlane__V1__Annotations__ItemsEntry **pointers = calloc(count + 1, sizeof(*pointers) + sizeof(**pointers));
    if (pointers == NULL) return false;
    Tensorlane__V1__Annotations__ItemsEntry *entries = (void *)&pointers[count];
    for (size_t i = 0; i < count; i++) {
        tensorlane__v1__annotations__items_entry__init(&entries[i]);
        entries[i].key = (char *)items[i].key;
        entries[i].value = (char *)items[i].value;
        pointers[i] = &entries[i];
    }
    tensorlane__v1__annotations__init(ret_message);
    ret_message->items = pointers;
    ret_message->n_items = count;
    return true;
}

enum tl_status tl_wire_to_annotations(const Tensorlane__V1__Annotations *message,
                                      struct tl_annotations **ret_annotations, struct tl_error *ret_error)
{
    size_t count = message != NULL ? message->n_items : 0;
    struct tl_annotation *items = calloc(count + 1, sizeof(*items));
    if (items == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for annotations");
    for (size_t i = 0; i < count; i++)
        items[i] = (struct tl_annotation){message->items[i]->key, message->items[i]->value};
    enum tl_status status = tl_annotations_create(items, count, ret_annotations, ret_error);
    free(items);
    return status;
}

enum tl_status tl_wire_text(const char *text, size_t min_bytes, size_t max_bytes, const char *what,
                            struct tl_error *ret_error)
{
    size_t length = text != NULL ? strlen(text) : 0;
    if (length < min_bytes) return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the %s is missing", what);
    if (length > max_bytes) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a %s of %zu bytes; at most %zu are possible", what, length,
                            max_bytes);
    }
    if (!tl_text_is_utf8(text != NULL ? text : "", length)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the %s is not UTF-8", what);
    }
    return TL_OK;
}

int64_t tl_wire_unix_ns(int64_t unix_ns)
{
    return unix_ns > 0 && unix_ns < MAX_UNIX_NS ? unix_ns : 0;
}
