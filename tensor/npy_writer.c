// SPDX-License-Identifier: Apache-2.0
/*
 * Writing .npy files, a folder of them or one, version 1.0: with at most 16 dimensions the header always fits
 * into the 65535 bytes of that version.
 *
 * Failure modes: names, dtypes and too many tensors are refused before anything is created, and so are two tensors of
 * which one would be a file and the other would need a folder of the same name; a name that comes twice shows when its
 * file exists already in the temporary folder, which no other process uses.
 */
#include "tensor/npy.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tensorlane/tensor.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "tensor/safetensors.h"
#include "tensor/tensor_writer.h"

#define MAX_TENSOR_NAME_BYTES 251 /* with ".npy" the 255 of a file name */
/* Each file is mapped, and tensor/fault_guard.c guards 16384 mappings; the others are left for files that are read. */
#define MAX_FILES 16000
#define HEADER_ALIGNMENT_BYTES 64
#define MAX_HEADER_BYTES 1024 /* with magic and length; 16 dimensions of 19 digits take some 450 */

static enum tl_status check_dtype(const struct tl_tensor_slot *slot, struct tl_error *ret_error)
{
    enum tl_dtype dtype = slot->meta_data.dtype;
    if (tl_npy_descr(dtype)) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "tensor '%s': NumPy has no dtype %s; %sleave it out with --exclude '%s'", slot->name,
                        tl_dtype_name(dtype),
                        tl_safetensors_has_dtype(dtype) ? "write a safetensors file instead, or " : "", slot->name);
}

/* NumPy multiplies the size of an element and all dimensions that are not 0, also when the array is empty. */
static enum tl_status check_shape(const struct tl_tensor_slot *slot, struct tl_error *ret_error)
{
    char text[TL_SHAPE_TEXT_BYTES];
    const struct tl_shape *shape = &slot->meta_data.shape;
    uint64_t product = tl_dtype_bits(slot->meta_data.dtype) / 8;
    bool fits = true;
    for (unsigned i = 0; i < shape->rank && fits; i++)
        fits = shape->dims[i] == 0 || (tl_mul_u64(product, shape->dims[i], &product) && product <= INT64_MAX);
    if (fits) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "tensor '%s': NumPy cannot read the shape %s, whose dimensions other than 0 have a product "
                        "that is too large; leave it out with --exclude '%s'",
                        slot->name, tl_shape_format(shape, text, sizeof(text)), slot->name);
}

/* Each part between slashes can be the name of a folder or file, and none leads out of the folder. */
static bool is_relative_path(const char *name)
{
    for (;;) {
        size_t len = strcspn(name, "/");
        if (len == 0 || len > MAX_TENSOR_NAME_BYTES || name[0] == '.') return false;
        if (name[len] == '\0') return true;
        name += len + 1;
    }
}

static enum tl_status check_slot(const struct tl_tensor_slot *slot, bool is_folder, struct tl_error *ret_error)
{
    enum tl_status status = tl_tensor_slot_check(slot, ret_error);
    if (status == TL_OK) status = check_dtype(slot, ret_error);
    if (status == TL_OK) status = check_shape(slot, ret_error);
    if (status != TL_OK || !is_folder) return status;
    if (!is_relative_path(slot->name))
        return tl_error_set(
            ret_error, TL_INVALID_ARGUMENT,
            "tensor '%s': the name cannot be that of a file: between '/' there are 1 to %d bytes without '.' in front;"
            " write a safetensors file instead",
            slot->name, MAX_TENSOR_NAME_BYTES);
    return TL_OK;
}

static int compare_names(const void *left, const void *right)
{
    const struct tl_tensor_slot *const *a = left, *const *b = right;
    return strcmp((*a)->name, (*b)->name);
}

/* The tensor whose file has the name of a folder that this name needs, as "x" for "x.npy/y"; NULL if there is none.
 * sorted: [count], by name. */
static const struct tl_tensor_slot *find_clash(const char *name, const struct tl_tensor_slot *const *sorted,
                                               size_t count)
{
    char prefix[TL_MAX_KEY_BYTES + 1];
    for (const char *slash = strchr(name, '/'); slash; slash = strchr(slash + 1, '/')) {
        size_t len = (size_t)(slash - name);
        if (len <= strlen(".npy") || strncmp(slash - strlen(".npy"), ".npy", strlen(".npy")) != 0) continue;
        *(char *)mempcpy(prefix, name, len - strlen(".npy")) = '\0';
        const struct tl_tensor_slot wanted = {.name = prefix}, *key = &wanted;
        const struct tl_tensor_slot *const *found = bsearch(&key, sorted, count, sizeof(sorted[0]), compare_names);
        if (found) return *found;
    }
    return NULL;
}

/* Refuses two tensors that cannot lie in one folder, because the file of one has the name of a folder of the other. */
static enum tl_status check_folders(const struct tl_tensor_slot *slots, size_t count, struct tl_error *ret_error)
{
    const struct tl_tensor_slot **sorted = calloc(count + 1, sizeof(sorted[0]));
    if (!sorted) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %zu names", count);
    for (size_t i = 0; i < count; i++)
        sorted[i] = &slots[i];
    qsort(sorted, count, sizeof(sorted[0]), compare_names);
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < count && status == TL_OK; i++) {
        const struct tl_tensor_slot *clash = find_clash(slots[i].name, sorted, count);
        if (!clash) continue;
        status = tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                              "tensors '%s' and '%s' cannot be files of one folder, because %s.npy would be a file and "
                              "a folder; leave one out, or write a safetensors file instead",
                              clash->name, slots[i].name, clash->name);
    }
    free(sorted);
    return status;
}

/* Composes everything in front of the data, a multiple of 64 bytes; returns how many. */
static size_t compose_header(const struct tl_meta_data *meta_data, unsigned char *buffer)
{
    const size_t text_offset = TL_NPY_MAGIC_BYTES + 4;
    char *text = (char *)buffer + text_offset;
    const size_t capacity = MAX_HEADER_BYTES - text_offset;
    const struct tl_shape *shape = &meta_data->shape;
    size_t len = (size_t)snprintf(text, capacity, "{'descr': '%s', 'fortran_order': False, 'shape': (",
                                  tl_npy_descr(meta_data->dtype));
    for (unsigned i = 0; i < shape->rank; i++) {
        const char *separator = shape->rank == 1 ? "," : i + 1 < shape->rank ? ", " : "";
        len += (size_t)snprintf(text + len, capacity - len, "%" PRIu64 "%s", shape->dims[i], separator);
    }
    len += (size_t)snprintf(text + len, capacity - len, "), }");
    size_t total = text_offset + len + 1;
    total += (HEADER_ALIGNMENT_BYTES - total % HEADER_ALIGNMENT_BYTES) % HEADER_ALIGNMENT_BYTES;
    TL_CHECK(total <= MAX_HEADER_BYTES);
    memset(text + len, ' ', total - text_offset - len);
    buffer[total - 1] = '\n';
    memcpy(buffer, TL_NPY_MAGIC, TL_NPY_MAGIC_BYTES);
    buffer[TL_NPY_MAGIC_BYTES] = 1;
    buffer[TL_NPY_MAGIC_BYTES + 1] = 0;
    buffer[TL_NPY_MAGIC_BYTES + 2] = (unsigned char)((total - text_offset) & 0xFF);
    buffer[TL_NPY_MAGIC_BYTES + 3] = (unsigned char)((total - text_offset) >> 8);
    return total;
}

/* Creates the file of a tensor, of which nothing is written yet. */
static enum tl_status add_slot(struct tl_tensor_writer *writer, bool is_folder, size_t index,
                               const struct tl_tensor_slot *slot, struct tl_output_file **ret_file,
                               struct tl_error *ret_error)
{
    unsigned char header[MAX_HEADER_BYTES];
    char name[TL_MAX_KEY_BYTES + sizeof(".npy")]; /* a path, whose parts check_slot has checked */
    uint64_t len_bytes;
    size_t header_bytes = compose_header(&slot->meta_data, header);
    snprintf(name, sizeof(name), "%s.npy", slot->name);
    if (!tl_add_u64(header_bytes, slot->meta_data.size_bytes, &len_bytes))
        return tl_error_set(ret_error, TL_OUT_OF_RANGE, "tensor '%s' is too large for a file", slot->name);
    enum tl_status status = tl_tensor_writer_add_file(writer, is_folder ? name : NULL, len_bytes, ret_file, ret_error);
    if (status == TL_ALREADY_EXISTS && is_folder)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "tensor '%s' is there twice", slot->name);
    if (status != TL_OK) return status;
    return tl_tensor_writer_add_tensor(writer, index, slot, *ret_file, header_bytes, ret_error);
}

static void write_header(const struct tl_tensor_slot *slot, struct tl_output_file *file)
{
    unsigned char header[MAX_HEADER_BYTES];
    size_t header_bytes = compose_header(&slot->meta_data, header);
    memcpy(tl_output_file_data(file), header, header_bytes);
}

/* All files are made, with their space, before any of it is given back, which shows that all of them fit on the disk.
 */
static enum tl_status fill_writer(struct tl_tensor_writer *writer, bool is_folder, const struct tl_tensor_slot *slots,
                                  size_t count, struct tl_error *ret_error)
{
    struct tl_output_file **files = calloc(count + 1, sizeof(files[0]));
    if (!files) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %zu files", count);
    enum tl_status status = TL_OK;
    for (size_t i = 0; i < count && status == TL_OK; i++)
        status = add_slot(writer, is_folder, i, &slots[i], &files[i], ret_error);
    if (status == TL_OK) status = tl_tensor_writer_give_back_space(writer, ret_error);
    for (size_t i = 0; i < count && status == TL_OK; i++)
        write_header(&slots[i], files[i]);
    free(files);
    return status;
}

static enum tl_status create(const char *path, bool is_folder, const struct tl_tensor_slot *slots, size_t count,
                             const struct tl_writer_stop *stop, struct tl_tensor_writer **ret_writer,
                             struct tl_error *ret_error)
{
    struct tl_tensor_writer *writer;
    enum tl_status status = TL_OK;
    if (count > MAX_FILES)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s would be a folder of %zu .npy files, and at most %d are possible; write a safetensors "
                            "file instead",
                            path, count, MAX_FILES);
    for (size_t i = 0; i < count && status == TL_OK; i++)
        status = check_slot(&slots[i], is_folder, ret_error);
    if (status == TL_OK && is_folder) status = check_folders(slots, count, ret_error);
    if (status != TL_OK) return status;
    status = tl_tensor_writer_start(path, count, is_folder, stop, &writer, ret_error);
    if (status != TL_OK) return status;
    status = fill_writer(writer, is_folder, slots, count, ret_error);
    if (status != TL_OK) {
        tl_tensor_writer_destroy(writer);
        return status;
    }
    *ret_writer = writer;
    return TL_OK;
}

enum tl_status tl_npy_writer_create(const char *path, const struct tl_tensor_slot *slots, size_t count,
                                    const struct tl_writer_stop *stop, struct tl_tensor_writer **ret_writer,
                                    struct tl_error *ret_error)
{
    return create(path, true, slots, count, stop, ret_writer, ret_error);
}

enum tl_status tl_npy_file_writer_create(const char *path, const struct tl_tensor_slot *slot,
                                         const struct tl_writer_stop *stop, struct tl_tensor_writer **ret_writer,
                                         struct tl_error *ret_error)
{
    return create(path, false, slot, 1, stop, ret_writer, ret_error);
}
