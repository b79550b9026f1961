// SPDX-License-Identifier: Apache-2.0
/* Parts of tensors, as Python gives them: a tensorlane.Box, or a sequence of (offset, length) in bytes. */
#ifndef PYTHON_PART_H
#define PYTHON_PART_H

#include "python/module.h"

struct py_part {
    struct tl_part part; /* refers to what follows */
    uint64_t start[TL_MAX_RANK], size[TL_MAX_RANK], into_start[TL_MAX_RANK];
    struct tl_byte_range *ranges;
};

/* Reads a part; py_part_fini is called whatever comes of it. Returns false with an exception. */
bool py_part_init(struct py_part *part, PyObject *object);
void py_part_fini(struct py_part *part);

#endif
