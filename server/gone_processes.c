// SPDX-License-Identifier: Apache-2.0
#include "server/gone_processes.h"

#include "server/worker_internal.h"

static void release_some(struct tl_closure *closure)
{
    struct tl_worker *worker = TL_CONTAINER_OF(closure, struct tl_worker, sources.gone.closure);
    struct tl_gone_processes *gone = &worker->sources.gone;
    for (; gone->incarnations.count > 0; tl_numbers_drop(&gone->incarnations, 1)) {
        gone->releasing.incarnation = *tl_numbers_items(&gone->incarnations);
        if (!tl_rendezvous_release_incarnation(worker->table, &gone->releasing, tl_loop_quota(worker->loop))) {
            tl_loop_defer(worker->loop, closure);
            return;
        }
        gone->releasing = (struct tl_table_release){0};
    }
}

void tl_process_is_gone(struct tl_worker *worker, uint64_t incarnation)
{
    struct tl_gone_processes *gone = &worker->sources.gone;
    if (!tl_numbers_push(&gone->incarnations, incarnation)) return;
    if (gone->incarnations.count == 1) release_some(&gone->closure);
}

void tl_gone_processes_init(struct tl_gone_processes *gone)
{
    *gone = (struct tl_gone_processes){.closure.run = release_some};
    tl_list_init(&gone->closure.link);
}

void tl_gone_processes_fini(struct tl_gone_processes *gone)
{
    tl_list_remove(&gone->closure.link);
    tl_numbers_fini(&gone->incarnations);
}
