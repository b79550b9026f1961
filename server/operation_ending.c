// SPDX-License-Identifier: Apache-2.0
#include "server/operation_ending.h"

#include "server/worker_internal.h"

static void end_some(struct tl_closure *closure)
{
    struct tl_ops_ending *ending = TL_CONTAINER_OF(closure, struct tl_ops_ending, closure);
    struct tl_worker *worker = ending->worker;
    if (!tl_ops_fail_receives(worker, ending->peer, ending->status, &ending->chain) ||
        !tl_subscriptions_end(worker, ending->peer, ending->status) ||
        !tl_peer_ops_end(worker, ending->peer, ending->status)) {
        tl_loop_defer(worker->loop, &ending->closure);
        return;
    }
    ending->over(ending);
}

void tl_ops_end(struct tl_ops_ending *ending)
{
    tl_list_init(&ending->closure.link);
    ending->closure.run = end_some;
    end_some(&ending->closure);
}
