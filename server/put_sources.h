// SPDX-License-Identifier: Apache-2.0
/*
 * The tensors that this worker puts at peers, ready to be fetched: a peer that accepts a put asks for its tensor under
 * TL_PUT_KEY, with the number of the put as the step. They are in no table, and only the process that a put is for gets
 * its tensor.
 */
#ifndef SERVER_PUT_SOURCES_H
#define SERVER_PUT_SOURCES_H

#include <pthread.h>

#include "tensor/transfer.h"

#define TL_PUT_KEY "tensorlane.put"

struct tl_put_sources {
    pthread_mutex_t mutex;
    struct tl_list items; /* struct tl_put_item */
};

/* A put under way; its owner's memory. Zeroed: it is not ready. */
struct tl_put_item {
    struct tl_list place;
    struct tl_tensor *tensor; /* valid while it is ready */
    uint64_t number;
    uint64_t receiver; /* incarnation of the process that may fetch it */
};

void tl_put_sources_init(struct tl_put_sources *sources);
void tl_put_sources_fini(struct tl_put_sources *sources);

/* Makes a tensor ready for this process, under a new number. Thread: the loop's owner. */
void tl_put_sources_add(struct tl_put_sources *sources, struct tl_put_item *item, struct tl_tensor *tensor,
                        uint64_t receiver);
/* Nothing fetches it from now on; what is being fetched keeps its reference. Thread: the loop's owner. */
void tl_put_sources_remove(struct tl_put_sources *sources, struct tl_put_item *item);

/* Returns whether a request is one for a put. *ret_offer is its answer, with a reference for the caller; its tensor is
 * NULL when there is nothing to fetch for this process. Thread: any. */
bool tl_put_sources_find(struct tl_put_sources *sources, const char *key, uint64_t number, uint64_t receiver,
                         struct tl_offer *ret_offer);

#endif
