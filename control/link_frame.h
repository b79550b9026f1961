// SPDX-License-Identifier: Apache-2.0
/* The frame that is being composed, as the files that add to it see it: link_send.c, link_requests.c and
 * link_chunks.c. */
#ifndef CONTROL_LINK_FRAME_H
#define CONTROL_LINK_FRAME_H

#include "control/link_serves.h"
#include "control/packed.h"

/* As many as the peer handles before it looks at others. */
#define LINK_FRAME_REQUESTS TL_QUOTA
#define LINK_FRAME_FAILURES 64
#define LINK_FRAME_CHUNKS 256
/* The size of a frame's head; the peer accepts TL_MAX_FRAME_HEAD_BYTES. */
#define LINK_FRAME_HEAD_BYTES (192 * 1024)

/* Tensors of at most so many bytes are copied. */
#define LINK_COPY_BYTES 2048

/* Memory that pieces are copied to, one behind the other. */
struct frame_copies {
    grpc_slice memory;  /* unless space_bytes is 0 */
    size_t space_bytes; /* the size of memory */
    size_t begin_bytes; /* the copies from here on are in no slice of the frame yet */
    size_t end_bytes;   /* the end of the copies in memory */
};

struct tl_frame_builder {
    Tensorlane__V1__Frame frame;
    size_t head_bytes; /* estimate, never too low */
    Tensorlane__V1__ConnectionMessage *connection_messages[LINK_MAX_CONNECTION_MESSAGES];
    size_t request_count; /* in either form */
    Tensorlane__V1__Request requests[LINK_FRAME_REQUESTS];
    Tensorlane__V1__Request *request_pointers[LINK_FRAME_REQUESTS];
    struct tl_packer packed_requests;
    unsigned char packed_request_bytes[LINK_FRAME_HEAD_BYTES + TL_MAX_KEY_BYTES + TL_PACKED_REQUEST_BYTES];
    Tensorlane__V1__Failure failures[LINK_FRAME_FAILURES];
    Tensorlane__V1__Status statuses[LINK_FRAME_FAILURES];
    Tensorlane__V1__Failure *failure_pointers[LINK_FRAME_FAILURES];
    struct link_serve *failed[LINK_FRAME_FAILURES];
    size_t chunk_count; /* in either form */
    Tensorlane__V1__Chunk chunks[LINK_FRAME_CHUNKS];
    Tensorlane__V1__Chunk *chunk_pointers[LINK_FRAME_CHUNKS];
    Tensorlane__V1__MetaData meta_data[LINK_FRAME_CHUNKS];
    uint64_t dims[LINK_FRAME_CHUNKS][TL_MAX_RANK];
    struct tl_packer packed_chunks;
    unsigned char packed_chunk_bytes[LINK_FRAME_CHUNKS * TL_PACKED_CHUNK_BYTES];
    struct link_serve *complete[LINK_FRAME_CHUNKS]; /* whose last piece is in this frame */
    size_t complete_count;
    struct frame_copies copies;
    grpc_slice slices[LINK_FRAME_CHUNKS];
    size_t slice_count;
    uint64_t data_bytes;
};

/* Adds the requests that wait, as many as fit. */
void link_requests_add(struct tl_link *link, struct tl_frame_builder *builder);

/* Adds pieces of the active tensors, one after the other, until the frame is full. */
void link_chunks_add(struct tl_link *link, struct tl_frame_builder *builder);

/* link_copies.c */
/* Space for the copy of a piece, behind the one before if it fits there. The copy counts when copies.end_bytes has been
 * moved behind it. */
unsigned char *link_copies_space(struct tl_frame_builder *builder, const struct tl_link *link, size_t count);
/* Adds what was copied since the last slice as one. */
void link_copies_end(struct tl_frame_builder *builder);
/* The same, and lets the memory go. */
void link_copies_drop(struct tl_frame_builder *builder);

#endif
