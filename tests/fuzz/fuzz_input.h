// SPDX-License-Identifier: Apache-2.0
/* The input of a fuzz target, read front to back as a script: missing bytes at its end read as zeros. */
#ifndef FUZZ_FUZZ_INPUT_H
#define FUZZ_FUZZ_INPUT_H

#include <grpc/byte_buffer.h>
#include <grpc/slice.h>
#include <stddef.h>
#include <stdint.h>

struct fuzz_input {
    const uint8_t *data;
    size_t left;
};

static inline uint8_t fuzz_take_u8(struct fuzz_input *input)
{
    if (input->left == 0) return 0;
    input->left--;
    return *input->data++;
}

static inline uint16_t fuzz_take_u16(struct fuzz_input *input)
{
    unsigned low = fuzz_take_u8(input);
    return (uint16_t)(low | (unsigned)fuzz_take_u8(input) << 8);
}

/* Returns the bytes as a message of two slices, cut in the middle. */
static inline grpc_byte_buffer *fuzz_message(const void *data, size_t len_bytes)
{
    size_t cut = len_bytes / 2;
    grpc_slice slices[2] = {grpc_slice_from_copied_buffer((const char *)data, cut),
                            grpc_slice_from_copied_buffer((const char *)data + cut, len_bytes - cut)};
    grpc_byte_buffer *message = grpc_raw_byte_buffer_create(slices, 2);
    grpc_slice_unref(slices[0]);
    grpc_slice_unref(slices[1]);
    return message;
}

/* Returns a message as it is in the input: two bytes with its length, little-endian, then its bytes. */
static inline grpc_byte_buffer *fuzz_take_message(struct fuzz_input *input)
{
    size_t len_bytes = fuzz_take_u16(input);
    if (len_bytes > input->left) len_bytes = input->left;
    grpc_byte_buffer *message = fuzz_message(input->data, len_bytes);
    input->data += len_bytes;
    input->left -= len_bytes;
    return message;
}

#endif
