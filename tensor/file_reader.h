// SPDX-License-Identifier: Apache-2.0
/* What the readers of tensor files share. Between siblings of this folder. */
#ifndef TENSOR_FILE_READER_H
#define TENSOR_FILE_READER_H

#include <stddef.h>

#include "tensor/mapped_file.h"
#include "tensor/tensor_file.h"

/* Fills the next item of a list that has space for it: copies the name and wraps the bytes at offset of the mapping,
 * which must lie within the file, as a read-only, guarded tensor that holds a reference to the file. Errors:
 * TL_RESOURCE_EXHAUSTED: no memory; the list is as before. */
enum tl_status tl_tensor_list_append_mapped(struct tl_tensor_list *list, const char *name, size_t name_len,
                                            struct tl_mapped_file *file, uint64_t offset_bytes, enum tl_dtype dtype,
                                            const struct tl_shape *shape, struct tl_error *ret_error) TL_MUST_USE;

/* True for 1..512 bytes of UTF-8 without NUL. */
bool tl_tensor_name_is_valid(const char *name, size_t len_bytes);

#endif
