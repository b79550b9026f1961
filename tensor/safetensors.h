// SPDX-License-Identifier: Apache-2.0
/* What reader and writer of safetensors share. Between siblings of this folder. */
#ifndef TENSOR_SAFETENSORS_H
#define TENSOR_SAFETENSORS_H

#include <stdbool.h>

#include <tensorlane/tensor.h>

/* The limit of the reference implementation. */
#define TL_SAFETENSORS_MAX_HEADER_BYTES UINT64_C(100000000)

/* Bounds the memory that a header can cost: a JSON value takes up to 100 bytes or so. */
#define TL_SAFETENSORS_MAX_HEADER_VALUES (UINT64_C(4) << 20)

/* The key of the header that is no tensor. */
#define TL_SAFETENSORS_META_DATA_KEY "__metadata__"

/* True when the format has the dtype. */
bool tl_safetensors_has_dtype(enum tl_dtype dtype);

#endif
