// SPDX-License-Identifier: Apache-2.0
/* The scripted source of a side of an engine pair, as engine_pair.c sees it. */
#ifndef TESTS_FAKES_ENGINE_SOURCE_H
#define TESTS_FAKES_ENGINE_SOURCE_H

#include "tensor/transfer.h"

struct engine_side;

/* The context of these functions is the side. */
extern const struct tl_source_ops engine_source_ops;

/* Forgets all values. */
void engine_source_fini(struct engine_side *side);

#endif
