// SPDX-License-Identifier: Apache-2.0
/* Frames that a peer could send, composed from a few bytes of a fuzz target's input: nearly right ones, so that the
 * fuzzer reaches what lies behind the reader of frames. */
#ifndef FUZZ_LINK_FRAMES_H
#define FUZZ_LINK_FRAMES_H

#include <stdbool.h>

#include "fuzz/fuzz_input.h"

#define LINK_FRAMES_SELF "/job:ps/task:0"
#define LINK_FRAMES_PEER "/job:worker/task:1"
#define LINK_FRAMES_MAX_KEYS 8

extern const char *const link_frames_keys[LINK_FRAMES_MAX_KEYS];

/* The bytes of every tensor that a composed frame carries, and that the target offers. */
static inline unsigned char link_frames_byte(uint64_t offset)
{
    return (unsigned char)(offset * 7 + offset / 256);
}

/* The next frame. Its first bytes tell which fields it has, and their form; `with_hello` adds a handshake that fits. */
grpc_byte_buffer *link_frames_compose(struct fuzz_input *input, bool with_hello);

#endif
