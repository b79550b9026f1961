// SPDX-License-Identifier: Apache-2.0
/* Tensors that lie in a mapped file: how they are made, and how they are recognised. */
#ifndef TENSOR_MAPPED_TENSOR_H
#define TENSOR_MAPPED_TENSOR_H

#include "tensor/mapped_file.h"
#include "tensor/tensor.h"

/* A read-only tensor around the bytes at offset, guarded by tl_mapped_file_check; it holds a reference to the file.
 * Shape: plain meta-data, valid. Errors: TL_INVALID_ARGUMENT: it does not lie within the file, or is no plain tensor.
 * TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_mapped_tensor_create(struct tl_mapped_file *file, uint64_t offset_bytes, enum tl_dtype dtype,
                                       const struct tl_shape *shape, struct tl_tensor **ret_tensor,
                                       struct tl_error *ret_error) TL_MUST_USE;

/* The file that a tensor (or what it is an alias of) was made around, and where it lies in it; valid as long
 * as the tensor. NULL: it lies in no file. */
struct tl_mapped_file *tl_mapped_tensor_file(const struct tl_tensor *tensor, uint64_t *ret_offset_bytes);

/* True when the bytes of the tensor may change or go while they are read, because they lie in a file that others can
 * write. They were the tensor's bytes only if tl_tensor_check_readable still agrees after they were read. */
bool tl_tensor_may_change(const struct tl_tensor *tensor);

#endif
