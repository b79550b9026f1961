// SPDX-License-Identifier: Apache-2.0
#include "control/device_reader.h"

#include <xxhash.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "control/loop.h"
#include "tensor/piece.h"
#include "tensor/tensor.h"

static void put_piece(void *piece)
{
    tl_piece_put(piece);
}

/* The bytes of a piece from `skip` on; the piece is the slice's. */
static grpc_slice slice_of(struct tl_device_reader *reader, struct tl_piece *piece, uint64_t skip)
{
    unsigned char *bytes = (unsigned char *)tl_piece_data(piece) + skip;
    size_t count = (size_t)(tl_piece_len_bytes(piece) - skip);
    if (tl_piece_is_copied(piece)) *reader->copied_bytes += count;
    return grpc_slice_new_with_user_data(bytes, count, put_piece, piece);
}

static void post(void *loop, struct tl_closure *closure)
{
    tl_loop_post(loop, closure);
}

static void piece_came(void *context, struct tl_piece *piece, const struct tl_error *status)
{
    struct tl_device_reader *reader = context;
    struct tl_error error = *status;
    reader->piece = NULL;
    if (error.code != TL_OK) {
        tl_piece_put(piece);
        reader->came(reader, &error);
        return;
    }
    reader->is_fence_reached = true;
    uint64_t begin = reader->read_bytes, count = tl_piece_len_bytes(piece);
    if (reader->hash_state != NULL) XXH3_64bits_update(reader->hash_state, tl_piece_data(piece), (size_t)count);
    reader->read_bytes += count;
    if (reader->read_bytes > reader->skip_bytes) {
        uint64_t skip = begin < reader->skip_bytes ? reader->skip_bytes - begin : 0;
        reader->slices[reader->count++] = slice_of(reader, piece, skip);
    } else {
        tl_piece_put(piece);
    }
    if (tl_device_reader_go_on(reader, &error) == TL_OK) error.code = TL_OK;
    reader->came(reader, &error);
}

enum tl_status tl_device_reader_begin(struct tl_device_reader *reader, struct tl_error *ret_error)
{
    /* What is skipped is read all the same when it has to be hashed. */
    reader->read_bytes = reader->hash_state != NULL ? 0 : reader->skip_bytes;
    return tl_device_reader_go_on(reader, ret_error);
}

enum tl_status tl_device_reader_go_on(struct tl_device_reader *reader, struct tl_error *ret_error)
{
    uint64_t left = tl_tensor_size_bytes(reader->tensor) - reader->read_bytes;
    if (reader->piece != NULL || reader->count == TL_DEVICE_READER_SLICES || left == 0) return TL_OK;
    const struct tl_piece_options options = {
        .tensor = reader->tensor,
        .offset_bytes = reader->read_bytes,
        .len_bytes = tl_min_u64(left, TL_STAGING_BLOCK_BYTES),
        .after = reader->is_fence_reached ? NULL : tl_tensor_fence(reader->tensor),
        .post = post,
        .loop = reader->loop,
        .notify = piece_came,
        .context = reader,
    };
    reader->piece = tl_piece_read(&options);
    if (reader->piece != NULL) return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to read a tensor from its device");
}

uint64_t tl_device_reader_bytes(const struct tl_device_reader *reader)
{
    return reader->count > 0 ? GRPC_SLICE_LENGTH(reader->slices[0]) : 0;
}

grpc_slice tl_device_reader_take(struct tl_device_reader *reader, uint64_t max_bytes)
{
    TL_CHECK(reader->count > 0 && max_bytes > 0);
    if (max_bytes < GRPC_SLICE_LENGTH(reader->slices[0]))
        return grpc_slice_split_head(&reader->slices[0], (size_t)max_bytes);
    grpc_slice slice = reader->slices[0];
    reader->count--;
    for (unsigned i = 0; i < reader->count; i++)
        reader->slices[i] = reader->slices[i + 1];
    return slice;
}

void tl_device_reader_end(struct tl_device_reader *reader)
{
    tl_piece_put(reader->piece);
    reader->piece = NULL;
    while (reader->count > 0)
        grpc_slice_unref(reader->slices[--reader->count]);
}
