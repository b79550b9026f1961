// SPDX-License-Identifier: Apache-2.0
/*
 * The call that publishes a tensor on a worker.
 *
 * Happy path: the fields are set; the client is opened or attached; tl_client_publish_start; the call ends, and
 * tl_client_result says how; tl_client_publish_fini.
 *
 * Thread: one.
 */
#ifndef CONTROL_CLIENT_PUBLISH_H
#define CONTROL_CLIENT_PUBLISH_H

#include <xxhash.h>

#include "base/timer.h"
#include "control/client_call.h"
#include "control/responses.h"

struct tl_client_publish {
    struct tl_client client;
    const char *key; /* valid until fini, as is the tensor */
    uint64_t step;
    bool may_go_back;
    struct tl_tensor *tensor;                        /* on the host */
    struct tl_put_source source;                     /* where it can be fetched, instead of its bytes */
    uint64_t chunk_bytes;                            /* size of the pieces, not 0 */
    void (*progress)(void *context, uint64_t bytes); /* NULL: not wanted */
    void *progress_context;

    /* The rest starts zeroed. */
    XXH3_state_t *hash_state;
    uint64_t composed_bytes; /* in messages that were composed */
    uint64_t piece_bytes;    /* in the message that is being sent */
    bool is_last_composed;
    struct tl_timer stall_timer;
    struct tl_publish_response response;
};

/* Starts the call. Errors: that of the tensor when its bytes cannot be read; TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_client_publish_start(struct tl_client_publish *publish, struct tl_error *ret_error) TL_MUST_USE;

/* Closes the client, too. The call has ended, or was never started. */
void tl_client_publish_fini(struct tl_client_publish *publish);

#endif
