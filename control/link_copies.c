// SPDX-License-Identifier: Apache-2.0
/* The copies of tensors in a frame: one behind the other in one piece of memory, which is as large as the small ones
 * that wait may need. What lies together there is one slice of the frame. */
#include "base/arith.h"
#include "control/link_frame.h"

/* The memory that small tensors are copied to has at most so many bytes. */
#define COPIES_BYTES (64 * 1024)

void link_copies_end(struct tl_frame_builder *builder)
{
    struct frame_copies *copies = &builder->copies;
    if (copies->end_bytes == copies->begin_bytes) return;
    builder->slices[builder->slice_count++] = grpc_slice_sub(copies->memory, copies->begin_bytes, copies->end_bytes);
    copies->begin_bytes = copies->end_bytes;
}

void link_copies_drop(struct tl_frame_builder *builder)
{
    link_copies_end(builder);
    if (builder->copies.space_bytes > 0) grpc_slice_unref(builder->copies.memory);
    builder->copies = (struct frame_copies){.space_bytes = 0};
}

unsigned char *link_copies_space(struct tl_frame_builder *builder, const struct tl_link *link, size_t count)
{
    struct frame_copies *copies = &builder->copies;
    if (copies->space_bytes - copies->end_bytes < count) {
        uint64_t expected = tl_min_u64(link->answers.unsent_count * LINK_COPY_BYTES, COPIES_BYTES);
        link_copies_drop(builder);
        copies->space_bytes = count > expected ? count : (size_t)expected;
        copies->memory = grpc_slice_malloc_large(copies->space_bytes);
    }
    return GRPC_SLICE_START_PTR(copies->memory) + copies->end_bytes;
}
