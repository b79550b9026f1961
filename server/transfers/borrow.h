// SPDX-License-Identifier: Apache-2.0
/*
 * a borrow: the memory of a send that a receiver of this worker itself was given by reference.
 *
 * The sender must not be told that its memory is free before the receiver has put the tensor; so the send waits for the
 * borrow's return. A worker that closes does not wait for its user, who may keep the tensor as long as he likes: it
 * forgets the borrow.
 */
#ifndef SERVER_TRANSFERS_BORROW_H
#define SERVER_TRANSFERS_BORROW_H

#include "server/worker_internal.h"

struct tl_borrow;

/* Creates a tensor that shows base and holds a reference on it; returned(context) is called on the loop's thread when
 * the last reference is put, unless the borrow is forgotten before. The worker must stay until one of the two.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory. Ownership: the borrow frees itself. */
enum tl_status tl_borrow_create(struct tl_worker *worker, struct tl_tensor *base, void (*returned)(void *context),
                                void *context, struct tl_borrow **ret_borrow, struct tl_tensor **ret_tensor,
                                struct tl_error *ret_error) TL_MUST_USE;

/* True: returned will not be called; the borrow is gone. False: it will be called soon. */
bool tl_borrow_forget(struct tl_borrow *borrow) TL_MUST_USE;

#endif
