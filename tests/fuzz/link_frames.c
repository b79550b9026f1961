// SPDX-License-Identifier: Apache-2.0
/*
 * Composes frames.
 *
 * A frame is described by two bytes of flags (enum field and enum form), then for each field that is there a few bytes:
 * small numbers, of which a few values mean something extreme. The data of chunks is link_frames_byte of the offset,
 * and a checksum is right unless the input says otherwise, so that transfers can succeed.
 */
#include "fuzz/link_frames.h"

#include <string.h>
#include <xxhash.h>

#include "base/check.h"
#include "control/packed.h"
#include "control/wire.h"

enum field {
    FIELD_HELLO = 1,
    FIELD_REQUEST = 2,
    FIELD_CANCEL = 4,
    FIELD_RECEIVED = 8,
    FIELD_FAILURE = 16,
    FIELD_CHUNK = 32,
    FIELD_SECOND = 64, /* The frame has two requests and two chunks. */
    FIELD_GOODBYE = 128,
};

/* The form of requests and chunks: another byte of flags, which follows the first one. */
enum form {
    FORM_REQUESTS = 1, /* Requests are packed. */
    FORM_TEXTS = 2,    /* Their keys are texts; else numbers, which may not be told yet. */
    FORM_KEPT = 4,     /* Their texts get numbers. */
    FORM_CHUNKS = 8,   /* Chunks are packed. */
    FORM_CUT = 16,     /* What is packed lacks its last byte. */
};

#define MAX_DATA 8192

const char *const link_frames_keys[LINK_FRAMES_MAX_KEYS] = {"p0", "p1", "p2", "o1", "o2", "f", "w", "\xc3\xa4/w"};

/* Everything that one frame points to. */
struct frame_parts {
    Tensorlane__V1__Frame frame;
    Tensorlane__V1__Hello hello;
    Tensorlane__V1__Request requests[2];
    Tensorlane__V1__Request *request_pointers[2];
    Tensorlane__V1__Failure failure;
    Tensorlane__V1__Failure *failure_pointer;
    Tensorlane__V1__Status status;
    Tensorlane__V1__Chunk chunks[2];
    Tensorlane__V1__Chunk *chunk_pointers[2];
    Tensorlane__V1__MetaData meta_data[2];
    uint64_t dims[2][2];
    uint64_t cancels[2];
    uint64_t received[3];
    unsigned char data[MAX_DATA];
    unsigned char packed_requests[2 * (TL_PACKED_REQUEST_BYTES + TL_MAX_KEY_BYTES)];
    unsigned char packed_chunks[2 * TL_PACKED_CHUNK_BYTES];
};

/* Returns a small number, except for a few values. */
static uint64_t take_number(struct fuzz_input *input)
{
    uint8_t byte = fuzz_take_u8(input);
    if (byte == 255) return UINT64_MAX;
    if (byte == 254) return UINT64_C(1) << 62;
    return byte;
}

static void add_hello(struct frame_parts *parts, struct fuzz_input *input)
{
    static const char *const names[] = {LINK_FRAMES_PEER, "", LINK_FRAMES_SELF, "/job:worker/task:2"};
    uint8_t flags = fuzz_take_u8(input);
    Tensorlane__V1__Hello *hello = &parts->hello;
    tensorlane__v1__hello__init(hello);
    hello->protocol_version = (flags & 1) != 0 && (flags & 2) != 0 && (flags & 4) != 0 ? 2 : 1;
    hello->name = (char *)names[flags >> 3 & 3];
    hello->incarnation = (flags & 0x20) != 0 ? flags & 7 : 77;
    hello->expected_name = (flags & 0x40) != 0 ? LINK_FRAMES_SELF : "";
    hello->received = parts->received;
    hello->n_received = (flags & 0x80) != 0 ? 3 : 0;
    hello->reads_packed = (flags & 2) == 0;
    hello->kept_keys = (flags & 4) != 0 ? 2 : UINT32_MAX;
    parts->frame.hello = hello;
}

static void add_requests(struct frame_parts *parts, struct fuzz_input *input, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        Tensorlane__V1__Request *request = &parts->requests[i];
        tensorlane__v1__request__init(request);
        request->number = take_number(input);
        uint8_t flags = fuzz_take_u8(input);
        request->key = (char *)link_frames_keys[flags % LINK_FRAMES_MAX_KEYS];
        request->wants_checksum = (flags & 0x10) != 0;
        request->priority = flags / 0x40;
        if ((flags & 0x20) != 0) {
            request->publication = 1 + (flags % LINK_FRAMES_MAX_KEYS);
            request->resume_offset = take_number(input) * 8;
        }
        parts->request_pointers[i] = request;
    }
    parts->frame.requests = parts->request_pointers;
    parts->frame.n_requests = count;
}

static void add_failure(struct frame_parts *parts, struct fuzz_input *input)
{
    tensorlane__v1__failure__init(&parts->failure);
    tensorlane__v1__status__init(&parts->status);
    parts->failure.number = take_number(input);
    uint8_t flags = fuzz_take_u8(input);
    parts->status.code = flags & 31;
    parts->status.message = (flags & 0x20) != 0 ? "why" : "";
    parts->failure.status = (flags & 0x40) != 0 ? NULL : &parts->status;
    parts->failure.is_final = (flags & 0x80) != 0;
    parts->failure_pointer = &parts->failure;
    parts->frame.failures = &parts->failure_pointer;
    parts->frame.n_failures = 1;
}

static uint64_t checksum(uint64_t size_bytes)
{
    static unsigned char bytes[MAX_DATA];
    for (uint64_t i = 0; i < size_bytes && i < MAX_DATA; i++)
        bytes[i] = link_frames_byte(i);
    return XXH3_64bits(bytes, size_bytes < MAX_DATA ? size_bytes : MAX_DATA);
}

static void add_meta_data(struct frame_parts *parts, unsigned i, uint8_t flags, uint64_t size)
{
    static const Tensorlane__V1__DType dtypes[] = {TENSORLANE__V1__DTYPE__U8, TENSORLANE__V1__DTYPE__STRING,
                                                   TENSORLANE__V1__DTYPE__U4, TENSORLANE__V1__DTYPE__INVALID};
    Tensorlane__V1__MetaData *meta_data = &parts->meta_data[i];
    tensorlane__v1__meta_data__init(meta_data);
    meta_data->dtype = dtypes[flags & 3];
    meta_data->dims = parts->dims[i];
    meta_data->n_dims = 1;
    meta_data->size_bytes = size;
    parts->dims[i][0] = size;
    parts->dims[i][1] = 1;
    if (meta_data->dtype == TENSORLANE__V1__DTYPE__STRING) parts->dims[i][0] = size / 16;
    if (meta_data->dtype == TENSORLANE__V1__DTYPE__U4) parts->dims[i][0] = size * 2;
    if (meta_data->dtype == TENSORLANE__V1__DTYPE__INVALID) {
        meta_data->is_dead = 1;
        meta_data->n_dims = 0;
    }
    if ((flags & 4) != 0) meta_data->n_dims = 2;
    parts->chunks[i].meta_data = meta_data;
}

static void add_chunk(struct frame_parts *parts, struct fuzz_input *input, unsigned i)
{
    Tensorlane__V1__Chunk *chunk = &parts->chunks[i];
    tensorlane__v1__chunk__init(chunk);
    chunk->number = take_number(input);
    chunk->offset = take_number(input) * 8;
    chunk->len_bytes = (uint64_t)fuzz_take_u8(input) * 8;
    uint8_t flags = fuzz_take_u8(input);
    uint64_t size = take_number(input) * 8;
    if ((flags & 8) != 0) {
        add_meta_data(parts, i, flags, size);
        chunk->publication = 1 + (flags & 1);
        chunk->is_one_shot = (flags & 0x10) != 0;
    }
    if ((flags & 0x20) != 0) {
        chunk->has_checksum = 1;
        chunk->checksum = checksum(size) + ((flags & 0x40) != 0 ? 1 : 0);
    }
    for (uint64_t b = 0; b < chunk->len_bytes; b++)
        parts->data[parts->frame.data.len++] = link_frames_byte(chunk->offset + b);
    if ((flags & 0x80) != 0) chunk->len_bytes = UINT64_MAX - 7;
    parts->chunk_pointers[i] = chunk;
}

static void pack(struct frame_parts *parts, uint8_t form)
{
    struct tl_packer requests = {.bytes = parts->packed_requests};
    struct tl_packer chunks = {.bytes = parts->packed_chunks};
    size_t request_count = (form & FORM_REQUESTS) != 0 ? parts->frame.n_requests : 0;
    size_t chunk_count = (form & FORM_CHUNKS) != 0 ? parts->frame.n_chunks : 0;
    for (size_t i = 0; i < request_count; i++) {
        const char *text = parts->requests[i].key;
        struct tl_packed_key key = {.text = text, .text_bytes = strlen(text), .is_kept = (form & FORM_KEPT) != 0};
        if ((form & FORM_TEXTS) == 0) key = (struct tl_packed_key){.number = (uint32_t)key.text_bytes - 1};
        tl_pack_request(&requests, &parts->requests[i], &key);
    }
    for (size_t i = 0; i < chunk_count; i++)
        tl_pack_chunk(&chunks, &parts->chunks[i]);
    parts->frame.n_requests -= request_count;
    parts->frame.n_chunks -= chunk_count;
    if ((form & FORM_CUT) != 0 && requests.used > 0) requests.used--;
    if ((form & FORM_CUT) != 0 && chunks.used > 0) chunks.used--;
    parts->frame.packed_requests = (ProtobufCBinaryData){requests.used, parts->packed_requests};
    parts->frame.packed_chunks = (ProtobufCBinaryData){chunks.used, parts->packed_chunks};
}

grpc_byte_buffer *link_frames_compose(struct fuzz_input *input, bool with_hello)
{
    static struct frame_parts parts;
    uint8_t flags = fuzz_take_u8(input);
    uint8_t form = fuzz_take_u8(input);
    unsigned count = (flags & FIELD_SECOND) != 0 ? 2 : 1;
    tensorlane__v1__frame__init(&parts.frame);
    for (unsigned i = 0; i < 3; i++)
        parts.received[i] = (flags & FIELD_RECEIVED) != 0 ? take_number(input) : i;
    for (unsigned i = 0; i < 2; i++)
        parts.cancels[i] = (flags & FIELD_CANCEL) != 0 ? take_number(input) : i;
    if ((flags & FIELD_HELLO) != 0 || with_hello) add_hello(&parts, input);
    if ((flags & FIELD_REQUEST) != 0) add_requests(&parts, input, count);
    parts.frame.cancels = parts.cancels;
    parts.frame.n_cancels = (flags & FIELD_CANCEL) != 0 ? 2 : 0;
    parts.frame.received = parts.received;
    parts.frame.n_received = (flags & FIELD_RECEIVED) != 0 ? 3 : 0;
    if ((flags & FIELD_FAILURE) != 0) add_failure(&parts, input);
    parts.frame.data.data = parts.data;
    if ((flags & FIELD_CHUNK) != 0) {
        for (unsigned i = 0; i < count; i++)
            add_chunk(&parts, input, i);
        parts.frame.chunks = parts.chunk_pointers;
        parts.frame.n_chunks = count;
    }
    pack(&parts, form);
    parts.frame.goodbye = (flags & FIELD_GOODBYE) != 0;
    grpc_byte_buffer *flat = tl_wire_write(&parts.frame.base);
    TL_CHECK(flat != NULL);
    return flat;
}
