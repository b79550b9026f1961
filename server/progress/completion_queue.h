// SPDX-License-Identifier: Apache-2.0
/* The completion queue, as operations use it. */
#ifndef SERVER_PROGRESS_COMPLETION_QUEUE_H
#define SERVER_PROGRESS_COMPLETION_QUEUE_H

#include <tensorlane/worker.h>

#include "base/list.h"
#include "server/progress/progress.h"

/* A completion that was not read yet. It is embedded in the object that has completed, so that reporting it cannot
 * fail. */
struct tl_cq_item {
    struct tl_list link;
    /* Fills the completion and frees what embeds the item. Thread: the reader's. */
    void (*take)(struct tl_cq_item *item, struct tl_completion *ret_completion);
};

/* Attaches the queue to a worker, since one of its operations names the queue: the readers of the queue then make the
 * worker's progress as its blocking calls do. A queue that workers with threads share is attached to none of them.
 * Errors: TL_FAILED_PRECONDITION: the worker and the one that the queue belongs to have no thread. */
enum tl_status tl_cq_attach(struct tl_cq *cq, struct tl_progress_engine *progress,
                            struct tl_error *ret_error) TL_MUST_USE;

/* Detaches the queues of a worker that closes: their readers no longer make its progress. Blocks: until none of them
 * does. */
void tl_cq_detach_all(struct tl_progress_engine *progress);

/* Posts work whose result goes to the queue (NULL: its poster waits for it). Without the thread of the worker when a
 * wait is likely to follow that makes this worker's progress: the program's latest look at the queue was a wait in this
 * thread, and the queue is attached to the worker. Thread: any. */
void tl_cq_post(struct tl_cq *cq, struct tl_progress_engine *progress, struct tl_closure *closure);

/* Adds all items of the list, which is empty then, with one wake. Thread: the progress engine's. */
void tl_cq_push_all(struct tl_cq *cq, struct tl_list *items, const struct tl_progress_engine *progress);
/* Adds an item. Thread: the progress engine's. */
void tl_cq_push(struct tl_cq *cq, struct tl_cq_item *item, const struct tl_progress_engine *progress);

#endif
