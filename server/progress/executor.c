// SPDX-License-Identifier: Apache-2.0
/* Executors: each thread remembers the one that it is in. */
#include "server/progress/executor.h"

static _Thread_local const struct tl_executor *present;

bool tl_executor_is_here(const struct tl_executor *executor)
{
    return executor->is_only || present == executor;
}

void tl_executor_post(const struct tl_executor *executor, struct tl_closure *closure)
{
    if (present != NULL && present->send != NULL && present->send(present, executor, closure)) return;
    executor->post(executor, closure);
}

const struct tl_executor *tl_executor_enter(const struct tl_executor *executor)
{
    const struct tl_executor *former = present;
    present = executor;
    return former;
}

void tl_executor_leave(const struct tl_executor *former)
{
    present = former;
}
