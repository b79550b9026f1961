// SPDX-License-Identifier: Apache-2.0
/*
 * The delivery of a value to a receiver in the same worker, where a device is involved. No thread waits for it.
 *
 * Happy path: tl_delivery_start waits for the fence of the value; then it allocates a new tensor, unless there is a
 * destination or the value lies where it is wanted; then it copies; `done` brings the tensor. Failure modes: `done`
 * brings the status of the step that failed. A delivery can be stopped at any time; only a copy runs to its end.
 *
 * Thread: all functions and `done` are for the thread that runs the closures of options.post.
 */
#ifndef TENSOR_DELIVERY_H
#define TENSOR_DELIVERY_H

#include <stdbool.h>

#include <tensorlane/tensor.h>

#include "base/mailbox.h"

struct tl_delivery;

struct tl_delivery_options {
    struct tl_tensor *value;       /* the delivery takes a reference of its own, as of the destination */
    struct tl_tensor *destination; /* has the same dtype and shape; its fence is not waited for. NULL: none */
    struct tl_device device;       /* without a destination: where the tensor is wanted; open */
    void (*post)(void *loop, struct tl_closure *closure); /* posts a closure from any thread */
    void *loop;
    /* It is over, with one reference for the callee to the destination, the new tensor or the value itself; with an
     * error it is NULL. The delivery is gone afterwards. */
    void (*done)(void *context, struct tl_tensor *tensor, const struct tl_error *status);
    void *context;
};

/* Starts a delivery; done follows once, unless it is stopped. It may come in this call, after *ret_delivery was set.
 * Returns false without memory: then it does not come. */
bool tl_delivery_start(const struct tl_delivery_options *options, struct tl_delivery **ret_delivery) TL_MUST_USE;

/* Stops the delivery. Returns whether it is gone; else a copy runs, and done follows. */
bool tl_delivery_stop(struct tl_delivery *delivery) TL_MUST_USE;

/* Returns whether it waits for the stream of the value. */
bool tl_delivery_is_fenced(const struct tl_delivery *delivery);

#endif
