// SPDX-License-Identifier: Apache-2.0
/*
 * Copies of whole tensors, from or to devices, that no caller waits for. They run one after the other on a thread of
 * the library, which makes what tl_tensor_copy makes. What the streams of both tensors hold is not waited for.
 */
#ifndef TENSOR_TENSOR_COPY_H
#define TENSOR_TENSOR_COPY_H

#include <tensorlane/tensor.h>

#include "base/mailbox.h"

struct tl_copying_options {
    struct tl_tensor *to; /* the copy takes references of its own */
    struct tl_tensor *from;
    void (*post)(void *loop, struct tl_closure *closure); /* posts a closure from any thread */
    void *loop;
    /* The copy is over, and neither side is touched any more. Thread: the one that runs the closures of `post`. */
    void (*done)(void *context, const struct tl_error *status);
    void *context;
};

/* Starts a copy between tensors of the same dtype and shape, one of them or both on devices that are open; done follows
 * once, with TL_OK or the errors of tl_tensor_copy.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory or thread; done is not called. Thread: any, also one that drives a loop. */
enum tl_status tl_copying_start(const struct tl_copying_options *options, struct tl_error *ret_error) TL_MUST_USE;

#endif
