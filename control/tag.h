// SPDX-License-Identifier: Apache-2.0
/* What a gRPC completion-queue tag points to: the start of every completion that a loop waits for. */
#ifndef CONTROL_TAG_H
#define CONTROL_TAG_H

#include <grpc/grpc.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "control/loop.h"

#define TL_TAG_MAGIC UINT32_C(0x746c5467)

struct tl_tag {
    uint32_t magic;
    void (*complete)(struct tl_tag *tag, bool is_ok); /* on the loop owner's thread */
};

static inline void tl_tag_init(struct tl_tag *tag, void (*complete)(struct tl_tag *tag, bool is_ok))
{
    tag->magic = TL_TAG_MAGIC;
    tag->complete = complete;
}

/* The loop's completion queue, for calls and servers. */
grpc_completion_queue *tl_loop_cq(struct tl_loop *loop);

/* A monotonic deadline as gRPC wants it. */
gpr_timespec tl_deadline_to_gpr(int64_t deadline_ns);

#endif
