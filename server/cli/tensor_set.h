// SPDX-License-Identifier: Apache-2.0
/* The tensors of several files, each under a key of its own. */
#ifndef SERVER_CLI_TENSOR_SET_H
#define SERVER_CLI_TENSOR_SET_H

#include <stddef.h>
#include <stdint.h>

#include "tensor/tensor_file.h"

struct tl_set_item {
    char *key;
    struct tl_tensor *tensor;
    const char *path; /* the file that it came from */
};

struct tl_tensor_set {
    struct tl_set_item *items; /* [count], in the order of the files */
    size_t count;
};

/* Reads files (tl_tensor_file_read), each of which keeps a descriptor: the soft limit of these is raised. A key is
 * prefix and the tensor's name. paths must stay valid. Errors: those of tl_tensor_file_read. TL_INVALID_ARGUMENT: a key
 * longer than TL_MAX_KEY_BYTES or not UTF-8. TL_ALREADY_EXISTS: two tensors with one key, naming both files. Ownership:
 * tl_tensor_set_fini, also after an error. */
enum tl_status tl_tensor_set_read(struct tl_tensor_set *set, const char *const *paths, size_t path_count,
                                  const char *prefix, struct tl_error *ret_error) TL_MUST_USE;
void tl_tensor_set_fini(struct tl_tensor_set *set); /* a zeroed one is accepted */

/* Bytes of all tensors. */
uint64_t tl_tensor_set_bytes(const struct tl_tensor_set *set);

#endif
