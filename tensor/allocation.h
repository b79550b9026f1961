// SPDX-License-Identifier: Apache-2.0
/*
 * A tensor on a device whose memory is allocated by a thread of the device, so that the caller does not wait: an
 * allocation can take as long as the work of the device.
 *
 * Happy path: tl_allocation_start leaves the work to a thread of the device, and `done` brings the tensor. Failure
 * modes: `done` brings the status instead. An allocation that is given up frees what it has still allocated by itself.
 *
 * Thread: all functions and `done` are for the thread that runs the closures of options.post.
 */
#ifndef TENSOR_ALLOCATION_H
#define TENSOR_ALLOCATION_H

#include "base/mailbox.h"
#include "tensor/device.h"
#include "tensor/meta_data.h"

struct tl_allocation;

struct tl_allocation_options {
    struct tl_device device;                              /* open (tl_device_open) */
    const struct tl_meta_data *meta_data;                 /* validated; neither strings nor dead. Copied */
    void (*post)(void *loop, struct tl_closure *closure); /* posts a closure from any thread */
    void *loop;
    /* The tensor is there, with one reference for the callee, or NULL and a status that says why not. The allocation is
     * gone afterwards. */
    void (*done)(void *context, struct tl_tensor *tensor, const struct tl_error *status);
    void *context;
};

/* Starts an allocation; done follows once, unless it is given up. NULL: no memory. */
struct tl_allocation *tl_allocation_start(const struct tl_allocation_options *options);

const struct tl_meta_data *tl_allocation_meta_data(const struct tl_allocation *allocation);

/* Gives the allocation up: done is not called any more. NULL is accepted. */
void tl_allocation_put(struct tl_allocation *allocation);

#endif
