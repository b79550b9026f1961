// SPDX-License-Identifier: Apache-2.0
/* The beginning of most programs that test a pair of engines: the pair, its options, and one fetch. */
#ifndef TESTS_FAKES_ENGINE_CASE_H
#define TESTS_FAKES_ENGINE_CASE_H

#include "fakes/engine_pair.h"

static struct engine_pair pair;
static struct engine_pair_options options;
static struct engine_side *asker; /* The left side. */
static struct engine_side *owner;
static struct engine_ask ask;

/* Opens the pair with the options as they are. */
static inline void open_pair(void)
{
    engine_pair_open(&pair, &options);
    asker = pair.left;
    owner = pair.right;
    ask = (struct engine_ask){.is_open = false};
}

#endif
