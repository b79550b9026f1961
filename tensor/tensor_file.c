// SPDX-License-Identifier: Apache-2.0
/* What all formats of tensor files have in common: lists of named tensors, and choosing the format by the name. */
#include "tensor/file_reader.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "tensor/mapped_tensor.h"

#define MAX_NAME_BYTES 512

void tl_tensor_list_fini(struct tl_tensor_list *list)
{
    for (size_t i = 0; i < list->count; i++) {
        free(list->items[i].name);
        tl_tensor_put(list->items[i].tensor);
    }
    free(list->items);
    *list = (struct tl_tensor_list){0};
}

bool tl_tensor_name_is_valid(const char *name, size_t len_bytes)
{
    return len_bytes >= 1 && len_bytes <= MAX_NAME_BYTES && tl_text_is_utf8(name, len_bytes);
}

enum tl_status tl_tensor_list_append_mapped(struct tl_tensor_list *list, const char *name, size_t name_len,
                                            struct tl_mapped_file *file, uint64_t offset_bytes, enum tl_dtype dtype,
                                            const struct tl_shape *shape, struct tl_error *ret_error)
{
    struct tl_named_tensor item;
    item.name = strndup(name, name_len);
    if (!item.name)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the tensors of %s",
                            tl_mapped_file_path(file));
    enum tl_status status = tl_mapped_tensor_create(file, offset_bytes, dtype, shape, &item.tensor, ret_error);
    if (status != TL_OK) {
        free(item.name);
        return status;
    }
    list->items[list->count++] = item;
    return TL_OK;
}

enum tl_status tl_tensor_file_read(const char *path, struct tl_tensor_list *ret_list, struct tl_error *ret_error)
{
    size_t len = strlen(path);
    if (len >= 4 && strcmp(path + len - 4, ".npy") == 0) return tl_npy_read(path, ret_list, ret_error);
    return tl_safetensors_read(path, ret_list, ret_error);
}
