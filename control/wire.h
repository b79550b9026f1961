// SPDX-License-Identifier: Apache-2.0
/*
 * Messages on the wire: protobuf in and out, and the trailing `data` field that is never copied.
 *
 * Messages with tensor bytes (Frame, ReceiveResponse, PublishRequest) carry them in field 15, `data`, always last. They
 * are written as the packed other fields, the tag and length of field 15, then slices of the tensor's own memory; and
 * read by walking over the fields in front of it ("head", bounded), unpacking those with a bounded allocator, and
 * leaving the data where gRPC put it, to be copied once, to where it belongs.
 *
 * All text from outside is checked by the reader of a message: length, UTF-8, NUL (tl_wire_text).
 */
#ifndef CONTROL_WIRE_H
#define CONTROL_WIRE_H

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/slice.h>
#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>
#include "tensor/annotations.h"
#include "tensor/meta_data.h"
#include "tensorlane/v1/transfer.pb-c.h"

/* Memory for one unpacked message: a bump allocator with a hard limit, freed in one go. */
struct tl_wire_arena {
    ProtobufCAllocator allocator; /* given to protobuf-c */
    unsigned char *memory;        /* [capacity] */
    size_t capacity;
    size_t used;
};

/* Errors: TL_RESOURCE_EXHAUSTED. Reset makes it empty again; what was unpacked into it is gone. */
enum tl_status tl_wire_arena_init(struct tl_wire_arena *arena, size_t capacity, struct tl_error *ret_error) TL_MUST_USE;
void tl_wire_arena_reset(struct tl_wire_arena *arena);
void tl_wire_arena_fini(struct tl_wire_arena *arena); /* zeroed is accepted */

/* The data of a received message, read front to back. */
struct tl_wire_data {
    grpc_byte_buffer_reader reader;
    grpc_slice *slice;        /* the current one */
    const unsigned char *run; /* bytes of it that are left */
    size_t run_bytes;
    uint64_t left_bytes; /* in all */
};

/* Reads a message: unpacks its head into the arena, *ret_message as descriptor says, and positions *ret_data at the
 * data (left_bytes 0 when there is none). The buffer must live until tl_wire_data_fini.
 * Errors: TL_INVALID_ARGUMENT: not such a message, head too long, or data that is not the last field. */
enum tl_status tl_wire_read(const ProtobufCMessageDescriptor *descriptor, grpc_byte_buffer *buffer,
                            struct tl_wire_arena *arena, ProtobufCMessage **ret_message, struct tl_wire_data *ret_data,
                            struct tl_error *ret_error) TL_MUST_USE;
void tl_wire_data_fini(struct tl_wire_data *data);

/* Reads a message that has no data. Errors: as tl_wire_read. */
enum tl_status tl_wire_read_plain(const ProtobufCMessageDescriptor *descriptor, grpc_byte_buffer *buffer,
                                  struct tl_wire_arena *arena, ProtobufCMessage **ret_message,
                                  struct tl_error *ret_error) TL_MUST_USE;

/* The next run of data, at most max_bytes, in place; it must not be called when nothing is left. */
size_t tl_wire_data_next(struct tl_wire_data *data, uint64_t max_bytes, const void **ret_run);

/* The same with a reference to the memory, for the caller. */
grpc_slice tl_wire_data_take(struct tl_wire_data *data, uint64_t max_bytes);

/* Writes a message without data. NULL when there is no memory. */
grpc_byte_buffer *tl_wire_write(const ProtobufCMessage *message);

/* Writes a message whose data is the given slices (data_bytes in all; the references stay the caller's). NULL when
 * there is no memory. The message's own data field must be empty. */
grpc_byte_buffer *tl_wire_write_with_data(const ProtobufCMessage *message, grpc_slice *slices, size_t slice_count,
                                          uint64_t data_bytes);

/* A slice of the tensor's memory that holds a reference on the tensor until gRPC has let go of it. */
grpc_slice tl_wire_slice_of_tensor(struct tl_tensor *tensor, uint64_t offset_bytes, uint64_t len_bytes);

/* Meta-data to and from the wire. dims must hold TL_MAX_RANK values and live as long as *ret_message.
 * Errors of the second: as tl_meta_data_validate; TL_INVALID_ARGUMENT: missing. */
void tl_wire_from_meta_data(const struct tl_meta_data *meta_data, uint64_t *dims,
                            Tensorlane__V1__MetaData *ret_message);
enum tl_status tl_wire_to_meta_data(const Tensorlane__V1__MetaData *message, struct tl_meta_data *ret_meta_data,
                                    struct tl_error *ret_error) TL_MUST_USE;

/* Annotations to the wire: *ret_message has space for all pairs in memory that the caller frees (free(items)), and the
 * texts are those of the annotations. False: no memory. */
bool tl_wire_from_annotations(const struct tl_annotations *annotations, Tensorlane__V1__Annotations *ret_message);
/* And from it; *ret_annotations has one reference, or is NULL without any. Errors: as tl_annotations_create. */
enum tl_status tl_wire_to_annotations(const Tensorlane__V1__Annotations *message,
                                      struct tl_annotations **ret_annotations, struct tl_error *ret_error) TL_MUST_USE;

/* Checks a text from outside. `what` names it in the error. Errors: TL_INVALID_ARGUMENT: NULL, shorter than min_bytes,
 * longer than max_bytes, or not UTF-8. */
enum tl_status tl_wire_text(const char *text, size_t min_bytes, size_t max_bytes, const char *what,
                            struct tl_error *ret_error) TL_MUST_USE;

/* Returns a time from outside, 0 when it cannot be one. The difference of two such times does not overflow. */
int64_t tl_wire_unix_ns(int64_t unix_ns);

#endif
