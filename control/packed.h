// SPDX-License-Identifier: Apache-2.0
/*
 * The packed form of requests and chunks: Frame.packed_requests and Frame.packed_chunks.
 *
 * A field is a row of records. A record begins with flags, which say what follows; numbers are differences to those of
 * the record before in the same field. So a request or chunk takes some ten bytes, and reading it allocates nothing.
 * docs/protocol.md has the bytes. The functions here convert between records and the messages of protobuf, which the
 * rest of the link works with; they know no link and no table of keys.
 */
#ifndef CONTROL_PACKED_H
#define CONTROL_PACKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/tensor.h>
#include "tensorlane/v1/transfer.pb-c.h"

/* The most that a request takes besides the text of its key, and the most that a chunk takes. */
#define TL_PACKED_REQUEST_BYTES 64
#define TL_PACKED_CHUNK_BYTES 288

/* The key of a packed request. */
struct tl_packed_key {
    const char *text; /* [text_bytes], without NUL; NULL: the key has the number below */
    size_t text_bytes;
    bool is_kept;    /* with a text: the key gets the next number */
    uint32_t number; /* without a text */
};

/* What the differences of the next record refer to. Zeroed memory is the state in front of the first record. */
struct tl_packed_state {
    uint64_t number;
    uint64_t step;
    uint64_t publication;
    uint64_t key_number;
    uint64_t subscription;
};

/* A field that is being written. Before each call there must be space for the greatest record. */
struct tl_packer {
    unsigned char *bytes;
    size_t used;
    struct tl_packed_state last;
};

/* A field that is being read. */
struct tl_unpacker {
    const unsigned char *at;
    const unsigned char *end;
    struct tl_packed_state last;
};

/* Adds a record. request->key is not looked at: `key` says how the key travels. */
void tl_pack_request(struct tl_packer *packer, const Tensorlane__V1__Request *request, const struct tl_packed_key *key);
void tl_pack_chunk(struct tl_packer *packer, const Tensorlane__V1__Chunk *chunk);

/* Begins to read a field, which may be empty. */
static inline struct tl_unpacker tl_unpacker_begin(const ProtobufCBinaryData *field)
{
    struct tl_unpacker unpacker = {.at = field->data, .end = field->data};
    if (field->len > 0) unpacker.end += field->len;
    return unpacker;
}

static inline bool tl_unpacker_is_at_end(const struct tl_unpacker *unpacker)
{
    return unpacker->at == unpacker->end;
}

/* Reads the next record. ret_request->key is "": *ret_key says what the key is; its text is not checked.
 * Errors: TL_INVALID_ARGUMENT: the record ends too early, or has a flag that does not exist or a number of more than 64
 * bits, or of a key more than 32, or a subscription 0. */
enum tl_status tl_unpack_request(struct tl_unpacker *unpacker, Tensorlane__V1__Request *ret_request,
                                 struct tl_packed_key *ret_key, struct tl_error *ret_error) TL_MUST_USE;

/* A chunk that was read, with what it points to. */
struct tl_unpacked_chunk {
    Tensorlane__V1__Chunk chunk;
    Tensorlane__V1__MetaData meta_data;
    uint64_t dims[TL_MAX_RANK];
};

/* Reads the next record; ret_chunk->chunk points into *ret_chunk.
 * Errors: TL_INVALID_ARGUMENT: as above, or more than TL_MAX_RANK dimensions. */
enum tl_status tl_unpack_chunk(struct tl_unpacker *unpacker, struct tl_unpacked_chunk *ret_chunk,
                               struct tl_error *ret_error) TL_MUST_USE;

#endif
