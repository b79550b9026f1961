// SPDX-License-Identifier: Apache-2.0
/*
 * Reads a tensor on a device as slices for gRPC, which reads host memory only.
 *
 * Happy path: tl_device_reader_begin; the tensor is read piece by piece (tensor/piece.h), a little ahead of what is
 * taken; `came` is called for each piece; tl_device_reader_take gives slices of what was read, in order, and
 * tl_device_reader_go_on reads on. Each piece is hashed on the way, if asked for.
 *
 * Failure modes: a device that fails, and no memory, come to `came`; the reader then must be ended. It may be ended at
 * any time: a piece that is being read holds its own reference to the tensor until the device is done.
 *
 * Thread: the loop's.
 */
#ifndef CONTROL_DEVICE_READER_H
#define CONTROL_DEVICE_READER_H

#include <grpc/slice.h>
#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/status.h>

struct tl_loop;
struct tl_piece;
struct tl_tensor;

/* Slices that may be ahead of what is taken. */
#define TL_DEVICE_READER_SLICES 2

/* Embedded in what reads. All zero: no reader. */
struct tl_device_reader {
    struct tl_loop *loop;
    struct tl_tensor *tensor; /* on a device; valid as long as the reader */
    void *hash_state;         /* XXH3 state, for all bytes from the first on; NULL: none */
    uint64_t skip_bytes;      /* the slices begin behind so many bytes */
    uint64_t *copied_bytes;   /* counts bytes that the CPU has copied */
    /* A piece was read; or the status says why it was not. */
    void (*came)(struct tl_device_reader *reader, const struct tl_error *status);

    bool is_fence_reached; /* that of the tensor need not be waited for */

    /* The reader's own. */
    struct tl_piece *piece; /* being read; NULL: none */
    grpc_slice slices[TL_DEVICE_READER_SLICES];
    unsigned count;
    uint64_t read_bytes; /* so many bytes of the tensor, from its first, were read */
};

/* Begins to read. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_device_reader_begin(struct tl_device_reader *reader, struct tl_error *ret_error) TL_MUST_USE;
/* Reads on, if there is space for a piece and something left to read. Errors: as above. */
enum tl_status tl_device_reader_go_on(struct tl_device_reader *reader, struct tl_error *ret_error) TL_MUST_USE;
/* So many bytes can be taken at once. */
uint64_t tl_device_reader_bytes(const struct tl_device_reader *reader);
/* Takes at most so many of them, and at least one. */
grpc_slice tl_device_reader_take(struct tl_device_reader *reader, uint64_t max_bytes);
/* Forgets what was read. All zero is accepted. */
void tl_device_reader_end(struct tl_device_reader *reader);

#endif
