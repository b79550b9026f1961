// SPDX-License-Identifier: Apache-2.0
/* The memory for a connection of an engine, for callers that may wait until it is made. */
#ifndef TESTS_FAKES_MADE_MEMORY_H
#define TESTS_FAKES_MADE_MEMORY_H

#include <semaphore.h>

#include "base/check.h"
#include "dataplane/engine/engine.h"

static inline void made_memory_reached(void *context, struct tl_closure *closure)
{
    (void)closure;
    TL_CHECK(sem_post(context) == 0);
}

/* Errors: those of tl_engine_make_memory. */
static inline enum tl_status made_memory(struct tl_engine *engine, struct tl_memory **ret_memory,
                                         struct tl_error *ret_error)
{
    sem_t reached;
    TL_CHECK(sem_init(&reached, 0, 0) == 0);
    struct tl_memory_making making = {.post = made_memory_reached, .context = &reached};
    tl_engine_make_memory(engine, &making);
    while (sem_wait(&reached) != 0) {
    }
    TL_CHECK(sem_destroy(&reached) == 0);
    if (making.error.code == TL_OK) *ret_memory = making.memory;
    if (making.error.code != TL_OK && ret_error != NULL) *ret_error = making.error;
    return making.error.code;
}

#endif
