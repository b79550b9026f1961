// SPDX-License-Identifier: Apache-2.0
/* Tensors that lie in a mapped file. Such a tensor is known by its guard, which aliases have from their base. */
#include "tensor/mapped_tensor.h"

#include <string.h>

static void release_file(void *data, void *context)
{
    (void)data;
    tl_mapped_file_put(context);
}

static enum tl_status create(struct tl_mapped_file *file, uint64_t offset_bytes, enum tl_dtype dtype, unsigned rank,
                             const uint64_t *dims, bool is_read_only, struct tl_tensor **ret_tensor,
                             struct tl_error *ret_error)
{
    struct tl_tensor *tensor;
    const struct tl_tensor_view view = {
        .size_bytes = sizeof(view),
        .dtype = dtype,
        .rank = rank,
        .dims = dims,
        .data = (void *)tl_mapped_file_data(file),
        .offset_bytes = offset_bytes,
        .capacity_bytes = tl_mapped_file_size_bytes(file),
        .read_only = is_read_only,
        .release = release_file,
        .release_context = file,
    };
    enum tl_status status = tl_tensor_wrap(&view, &tensor, ret_error);
    if (status != TL_OK) return status;
    /* From here on the release callback owes the file this reference. */
    tl_mapped_file_get(file);
    tl_tensor_set_guard(tensor, tl_mapped_file_check, file);
    *ret_tensor = tensor;
    return TL_OK;
}

enum tl_status tl_mapped_tensor_create(struct tl_mapped_file *file, uint64_t offset_bytes, enum tl_dtype dtype,
                                       const struct tl_shape *shape, struct tl_tensor **ret_tensor,
                                       struct tl_error *ret_error)
{
    return create(file, offset_bytes, dtype, shape->rank, shape->dims, true, ret_tensor, ret_error);
}

enum tl_status tl_tensor_create_shared(enum tl_dtype dtype, unsigned rank, const uint64_t *dims,
                                       struct tl_tensor **ret_tensor, struct tl_error *ret_error)
{
    struct tl_mapped_file *file;
    struct tl_tensor *tensor;
    /* One that is like any other says what is wrong with the shape, and how large it is; its memory is never used. */
    enum tl_status status = tl_tensor_create(dtype, rank, dims, &tensor, ret_error);
    if (status != TL_OK) return status;
    uint64_t size_bytes = tl_tensor_size_bytes(tensor);
    if (size_bytes == 0 || tl_mapped_file_make(size_bytes, &file, NULL) != TL_OK) {
        if (size_bytes > 0) memset(tl_tensor_data(tensor), 0, (size_t)size_bytes);
        *ret_tensor = tensor;
        return TL_OK;
    }
    tl_tensor_put(tensor);
    status = create(file, 0, dtype, rank, dims, false, ret_tensor, ret_error);
    tl_mapped_file_put(file);
    return status;
}

bool tl_tensor_may_change(const struct tl_tensor *tensor)
{
    tl_tensor_guard_fn guard;
    void *context;
    tl_tensor_get_guard(tensor, &guard, &context);
    if (guard == NULL) return false;
    return guard != tl_mapped_file_check || !tl_mapped_file_is_memory(context);
}

struct tl_mapped_file *tl_mapped_tensor_file(const struct tl_tensor *tensor, uint64_t *ret_offset_bytes)
{
    tl_tensor_guard_fn guard;
    void *context;
    tl_tensor_get_guard(tensor, &guard, &context);
    const char *data = tl_tensor_data(tensor);
    if (guard != tl_mapped_file_check || data == NULL) return NULL;
    *ret_offset_bytes = (uint64_t)(data - (const char *)tl_mapped_file_data(context));
    return context;
}
