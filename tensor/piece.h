// SPDX-License-Identifier: Apache-2.0
/*
 * A piece of a tensor on a device, on its way to or from the host through a pinned block, or between the device and
 * pinned memory of the caller. No thread waits for it.
 *
 * Happy path of reading: tl_piece_read waits for a fence, then for a block, then for the copy from the device, and
 * calls `notify`: the bytes are at tl_piece_data. Of writing: tl_piece_write waits for a block and calls `notify`,
 * unless a block is there at once; the caller fills it and calls tl_piece_copy, which calls `notify` when the bytes are
 * on the device. A block is waited for only when the fence is reached, so that a kernel that runs for long keeps no
 * block from others.
 *
 * With pinned memory of the caller (options.host) there is no block: after the fence the bytes are copied between the
 * device and this memory, and `notify` is called when that is over, for both directions.
 *
 * A piece can be given up at any time. A copy that is under way then ends by itself; who must know that it has ended
 * calls tl_piece_stop.
 *
 * Failure modes: a device that fails, and no memory for blocks, come to `notify` as a status.
 *
 * Thread: all functions and `notify` are for the thread that runs the closures of options.post, unless they say
 * otherwise.
 */
#ifndef TENSOR_PIECE_H
#define TENSOR_PIECE_H

#include "base/mailbox.h"
#include "tensor/device.h"

struct tl_piece;

struct tl_piece_options {
    struct tl_tensor *tensor; /* on a device; the piece takes a reference of its own */
    uint64_t offset_bytes;
    uint64_t len_bytes;            /* at most TL_STAGING_BLOCK_BYTES, unless there is `host` */
    struct tl_device_fence *after; /* what comes before a byte is touched; NULL: nothing */
    /* A tensor in pinned memory of the host, from or to whose byte host_offset_bytes the piece is copied. The piece
     * takes a reference of its own, which a copy keeps until it is over. NULL: a block. */
    struct tl_tensor *host;
    uint64_t host_offset_bytes;
    void (*post)(void *loop, struct tl_closure *closure); /* posts a closure from any thread */
    void *loop;
    /* What was waited for has come; or the status says why it never will. */
    void (*notify)(void *context, struct tl_piece *piece, const struct tl_error *status);
    void *context;
};

/* Starts to read; with 0 bytes it only waits for the fence. NULL: no memory. */
struct tl_piece *tl_piece_read(const struct tl_piece_options *options);

/* Starts to write. When tl_piece_data is not NULL afterwards, the block is there, and `notify` is not called for it.
 * With `host` the bytes are there already: only the end of the copy is notified. NULL: no memory. */
struct tl_piece *tl_piece_write(const struct tl_piece_options *options);
/* Starts the copy of the block, which the caller has filled. */
void tl_piece_copy(struct tl_piece *piece);

/* The bytes of a piece that was read, for as long as it lives, or the block of one that is to be filled; else NULL.
 * Always NULL with `host`. */
void *tl_piece_data(const struct tl_piece *piece);
uint64_t tl_piece_len_bytes(const struct tl_piece *piece);

/* Whether the bytes of a piece that was read were copied once more, so that they keep no block. */
bool tl_piece_is_copied(const struct tl_piece *piece);

/* Gives the piece up unless its copy has begun and `notify` is still to come. Returns whether the piece is gone, so
 * that nothing touches the memory of the tensor for it. */
bool tl_piece_stop(struct tl_piece *piece) TL_MUST_USE;

/* Gives the piece up, or back; `notify` is not called any more. A copy that runs ends by itself, and the tensor is kept
 * until then. NULL is accepted. Thread: any, for a piece
 * that was read and has notified. */
void tl_piece_put(struct tl_piece *piece);

#endif
