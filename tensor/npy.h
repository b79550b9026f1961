// SPDX-License-Identifier: Apache-2.0
/* What reader and writer of .npy files share. Between siblings of this folder. */
#ifndef TENSOR_NPY_H
#define TENSOR_NPY_H

#include <stddef.h>

#include <tensorlane/tensor.h>

#define TL_NPY_MAGIC "\x93NUMPY"
#define TL_NPY_MAGIC_BYTES 6

/* "<f4", "|b1"; NULL for a dtype that NumPy does not have. */
const char *tl_npy_descr(enum tl_dtype dtype);

/* The dtype of such a text; TL_DTYPE_INVALID for all that are not supported. Byte order marks are ignored for
 * single-byte dtypes, and '=' is little-endian, as on every machine this runs on. */
enum tl_dtype tl_npy_dtype(const char *descr, size_t len_bytes);

#endif
