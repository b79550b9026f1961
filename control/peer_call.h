// SPDX-License-Identifier: Apache-2.0
/*
 * Calls of a worker to a peer besides its link: what is published there, and what shall be. They are the calls that any
 * client makes, on the connection of a link that this worker has opened.
 *
 * Happy path: tl_peer_call_start; `done` comes once. A call that is to end earlier is cancelled, and `done` comes all
 * the same, because gRPC may still read the memory of a tensor until then.
 *
 * Thread: the loop's owner. No callback runs inside a call to these functions.
 */
#ifndef CONTROL_PEER_CALL_H
#define CONTROL_PEER_CALL_H

#include "tensor/transfer.h"

struct tl_link;
struct tl_peer_call;

enum tl_peer_call_kind {
    TL_PEER_CALL_PUBLISH,
    TL_PEER_CALL_LIST,
    TL_PEER_CALL_WITHDRAW,
};

/* What is asked; all of it stays valid until the end. */
struct tl_peer_call_request {
    enum tl_peer_call_kind kind;
    const char *text;            /* the key; to list and withdraw: a pattern, "": all */
    uint64_t step;               /* these three are only to publish */
    bool may_go_back;            /* replaces a tensor of a later step, too */
    struct tl_tensor *tensor;    /* on the host */
    struct tl_put_source source; /* where the peer can fetch it, instead of its bytes */
};

struct tl_peer_call_result {
    struct tl_error status;
    struct tl_listing listing; /* LIST that succeeded: the callee's, tl_listing_fini */
    uint64_t count;            /* WITHDRAW: how many */
    enum tl_path path;         /* PUBLISH: how a tensor that was fetched has travelled */
    bool wants_data;           /* PUBLISH: nothing is published, because the peer cannot fetch the tensor */
};

typedef void (*tl_peer_call_done)(void *context, struct tl_peer_call_result *result);

/* Starts a call on the connection of a link that this worker has opened and that is up. Errors: TL_RESOURCE_EXHAUSTED:
 * no memory; that of the tensor when its bytes cannot be read. */
enum tl_status tl_peer_call_start(struct tl_link *link, const struct tl_peer_call_request *request,
                                  tl_peer_call_done done, void *context, struct tl_peer_call **ret_call,
                                  struct tl_error *ret_error) TL_MUST_USE;

/* Ends a call with this status, soon. */
void tl_peer_call_cancel(struct tl_peer_call *call, const struct tl_error *reason);

#endif
