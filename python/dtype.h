// SPDX-License-Identifier: Apache-2.0
/* What the dtypes of the library are called by DLPack and by the buffer protocol of Python. */
#ifndef PYTHON_DTYPE_H
#define PYTHON_DTYPE_H

#include <stdbool.h>
#include <stddef.h>

#include <tensorlane/tensor.h>

#include "python/dlpack.h"

/* Returns the format of one element in the buffer protocol, NULL when it has none (BF16, F8 and smaller, STRING). */
const char *py_dtype_format(enum tl_dtype dtype);

/* Returns the dtype of a format such as "f", "<i" or "Zd", whose elements have so many bytes; TL_DTYPE_INVALID when
 * there is none. NULL is a format, too: bytes. */
enum tl_dtype py_dtype_of_format(const char *format, size_t item_bytes);

/* Returns the dtype with the name that tl_dtype_name gives, TL_DTYPE_INVALID when there is none. */
enum tl_dtype py_dtype_of_name(const char *name);

/* Says what DLPack calls a dtype. Returns false when it has no name for it (STRING). */
bool py_dtype_to_dlpack(enum tl_dtype dtype, struct dlpack_dtype *ret_dtype);

/* Returns the dtype that DLPack calls so, TL_DTYPE_INVALID when there is none. */
enum tl_dtype py_dtype_of_dlpack(struct dlpack_dtype dtype);

#endif
