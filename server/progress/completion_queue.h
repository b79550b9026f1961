// SPDX-License-Identifier: Apache-2.0
/* The completion queue, as operations see it. */
#ifndef SERVER_PROGRESS_COMPLETION_QUEUE_H
#define SERVER_PROGRESS_COMPLETION_QUEUE_H

#include <tensorlane/worker.h>

#include "base/list.h"
#include "server/progress/progress.h"

/* A completion on its way; embedded in what has completed, so that reporting it cannot fail. */
struct tl_cq_item {
    struct tl_list link;
    /* Fills the completion and frees what embeds the item. Thread: the reader's. */
    void (*take)(struct tl_cq_item *item, struct tl_completion *ret_completion);
};

/* An operation of a worker that is driven by its callers names the queue: its readers drive. Errors:
 * TL_FAILED_PRECONDITION: the queue already belongs to another such worker. */
enum tl_status tl_cq_attach(struct tl_cq *cq, struct tl_progress_engine *progress,
                            struct tl_error *ret_error) TL_MUST_USE;

/* The worker goes: readers of its queues no longer drive it; waits until none of them does. */
void tl_cq_detach_all(struct tl_progress_engine *progress);

/* Puts an item in. Thread: the progress engine's. */
void tl_cq_push(struct tl_cq *cq, struct tl_cq_item *item, const struct tl_progress_engine *progress);

#endif
