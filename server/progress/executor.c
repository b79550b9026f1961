// SPDX-License-Identifier: Apache-2.0
/* Homes: each thread remembers the one that it is in. */
#include "server/progress/executor.h"

#include <stdlib.h>

static _Thread_local const struct tl_executor *present;

static const struct tl_error ok = {.code = TL_OK};
static const struct tl_error no_memory = {.code = TL_RESOURCE_EXHAUSTED, .message = "no memory"};

bool tl_executor_is_here(const struct tl_executor *executor)
{
    return executor->is_only || present == executor;
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

const struct tl_error *tl_error_keep(const struct tl_error *error)
{
    if (error == NULL || error->code == TL_OK) return NULL;
    struct tl_error *kept = malloc(sizeof(*kept));
    if (kept == NULL) return &no_memory;
    *kept = *error;
    return kept;
}

void tl_error_drop(const struct tl_error *kept)
{
    if (kept != &no_memory) free((struct tl_error *)kept);
}

const struct tl_error *tl_error_kept(const struct tl_error *kept)
{
    return kept != NULL ? kept : &ok;
}
