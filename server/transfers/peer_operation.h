// SPDX-License-Identifier: Apache-2.0
/*
 * Operations at a peer: tl_put, tl_list, tl_stat, tl_remove, from the call to their one completion.
 *
 * Happy path: the operation waits until a call can be made to the peer (server/peers/peer_calls.h), makes it
 * (control/peer_call.h), and completes with what the peer has answered. At the worker itself it looks into its own
 * table. A put completes only when nothing reads the tensor any more, which an alias of it tells.
 *
 * Failure modes: a connection that breaks is no end: the call is made again after a pause, but for that of a remove,
 * whose count would be wrong. A deadline, a cancel, the removal of the peer and the close of the worker end an
 * operation wherever it is.
 */
#ifndef SERVER_TRANSFERS_PEER_OPERATION_H
#define SERVER_TRANSFERS_PEER_OPERATION_H

#include "server/worker_internal.h"

/* Ends an operation. Returns false when there is none with this id, or it ends already. Thread: the loop's. */
bool tl_peer_op_cancel(struct tl_worker *worker, tl_op_id id);

#endif
