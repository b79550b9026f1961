// SPDX-License-Identifier: Apache-2.0
/*
 * Fetches the tensor of a put from the process that puts it, over the data connection to it (control/control.h).
 *
 * Happy path: the fetch finds the data connection of the process that has the tensor ready (server/put_sources.h),
 * waits until it is up here as well, asks on it as for any tensor, into memory of the transport, and hands the tensor
 * over.
 *
 * Failure modes: without a data connection that is up, and when the fetch fails or breaks, nothing is published, and
 * the process that puts sends the bytes, or asks again.
 *
 * Thread: the loop's owner.
 */
#ifndef SERVER_TRANSFERS_PUT_FETCH_H
#define SERVER_TRANSFERS_PUT_FETCH_H

#include "control/control.h"

/* Errors: TL_UNAVAILABLE: no data connection to that process. TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_put_fetch_start(void *worker, const struct tl_identity *client, const struct tl_push *push,
                                  tl_put_fetched fetched, void *context, struct tl_put_fetch **ret_fetch,
                                  struct tl_error *ret_error) TL_MUST_USE;
void tl_put_fetch_stop(void *worker, struct tl_put_fetch *fetch);

#endif
