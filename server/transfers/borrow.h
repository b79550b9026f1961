// SPDX-License-Identifier: Apache-2.0
/*
 * A borrow: the memory of a send that a receiver of this worker itself was given by reference.
 *
 * A send must not complete before the receiver has put the tensor, so it waits for the borrow's return. The program may
 * keep the tensor as long as it likes, so a worker that closes does not wait: it forgets the borrow.
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

/* Forgets the borrow. Returns true when `returned` will not be called and the borrow is gone; false when it will be
 * called soon. */
bool tl_borrow_forget(struct tl_borrow *borrow) TL_MUST_USE;

#endif
