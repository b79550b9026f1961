// SPDX-License-Identifier: Apache-2.0
/*
 * Writing safetensors: the header, padded with spaces so that the data starts at a multiple of 64 bytes, then the
 * tensors, those with the largest elements first, so that every element lies at a multiple of its size.
 *
 * Failure modes: everything about names, dtypes and sizes is refused before the file is created.
 */
#include "tensor/safetensors.h"

#include <endian.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "tensor/npy.h"
#include "tensor/tensor_writer.h"

#define DATA_ALIGNMENT_BYTES 64
/* What the JSON of a tensor without dimensions counts as, at most: see TL_SAFETENSORS_MAX_HEADER_VALUES. */
#define VALUES_OF_ENTRY 8

/* Where one tensor goes. */
struct piece {
    const struct tl_tensor_slot *slot;
    size_t index;         /* number of the slot */
    uint64_t begin_bytes; /* from the start of the data */
};

struct layout {
    struct piece *pieces; /* [count], in the order of the data */
    size_t count;
    uint64_t data_bytes;
    json_t *root;          /* the header */
    uint64_t json_bytes;   /* its text */
    uint64_t header_bytes; /* the same padded */
};

static void layout_fini(struct layout *layout)
{
    free(layout->pieces);
    json_decref(layout->root);
}

/* The reference implementation multiplies the dimensions from left to right, and reads nothing of a file where that
 * overflows, even if a 0 follows. */
static bool is_shape_readable(const struct tl_shape *shape)
{
    uint64_t product = 1;
    for (unsigned i = 0; i < shape->rank; i++)
        if (!tl_mul_u64(product, shape->dims[i], &product)) return false;
    return true;
}

static enum tl_status check_slot(const struct tl_tensor_slot *slot, struct tl_error *ret_error)
{
    uint64_t count;
    char text[TL_SHAPE_TEXT_BYTES];
    enum tl_dtype dtype = slot->meta_data.dtype;
    enum tl_status status = tl_tensor_slot_check(slot, ret_error);
    if (status != TL_OK) return status;
    if (strcmp(slot->name, TL_SAFETENSORS_META_DATA_KEY) == 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "safetensors files cannot have a tensor named '%s'",
                            slot->name);
    if (!tl_safetensors_has_dtype(dtype))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "tensor '%s': safetensors files cannot hold dtype %s; %sleave it out with --exclude '%s'",
                            slot->name, tl_dtype_name(dtype),
                            tl_npy_descr(dtype) ? "write npy files instead (--format npy), or " : "", slot->name);
    if (!is_shape_readable(&slot->meta_data.shape))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "tensor '%s': a safetensors file with the shape %s, whose product overflows before the 0, "
                            "cannot be read; leave it out with --exclude '%s'",
                            slot->name, tl_shape_format(&slot->meta_data.shape, text, sizeof(text)), slot->name);
    TL_CHECK(tl_shape_element_count(&slot->meta_data.shape, &count, NULL) == TL_OK);
    if (count % 8 * tl_dtype_bits(dtype) % 8 != 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "tensor '%s': %" PRIu64
                            " elements of %s do not fill their last byte, which safetensors files"
                            " demand; leave it out with --exclude '%s'",
                            slot->name, count, tl_dtype_name(dtype), slot->name);
    return TL_OK;
}

static int compare_pieces(const void *left, const void *right)
{
    const struct piece *a = left, *b = right;
    unsigned a_bits = tl_dtype_bits(a->slot->meta_data.dtype), b_bits = tl_dtype_bits(b->slot->meta_data.dtype);
    if (a_bits != b_bits) return a_bits > b_bits ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

/* Checks every slot, orders them and gives each its place. */
static enum tl_status place_all(struct layout *layout, const struct tl_tensor_slot *slots, const char *path,
                                struct tl_error *ret_error)
{
    for (size_t i = 0; i < layout->count; i++) {
        enum tl_status status = check_slot(&slots[i], ret_error);
        if (status != TL_OK) return status;
        layout->pieces[i] = (struct piece){.slot = &slots[i], .index = i};
    }
    if (layout->count > 0) qsort(layout->pieces, layout->count, sizeof(layout->pieces[0]), compare_pieces);
    for (size_t i = 0; i < layout->count; i++) {
        uint64_t size_bytes = layout->pieces[i].slot->meta_data.size_bytes;
        layout->pieces[i].begin_bytes = layout->data_bytes;
        if (!tl_add_u64(layout->data_bytes, size_bytes, &layout->data_bytes) || layout->data_bytes > INT64_MAX)
            return tl_error_set(ret_error, TL_OUT_OF_RANGE, "the tensors of %s have more than 2^63-1 bytes", path);
    }
    return TL_OK;
}

static bool add_entry(json_t *root, const struct piece *piece)
{
    const struct tl_meta_data *meta_data = &piece->slot->meta_data;
    json_t *shape = json_array();
    for (unsigned i = 0; shape && i < meta_data->shape.rank; i++) {
        if (json_array_append_new(shape, json_integer((json_int_t)meta_data->shape.dims[i])) == 0) continue;
        json_decref(shape);
        shape = NULL;
    }
    /* "o" takes the shape over, also when it is NULL and packing fails. */
    json_t *entry =
        json_pack("{s:s, s:o, s:[I, I]}", "dtype", tl_dtype_name(meta_data->dtype), "shape", shape, "data_offsets",
                  (json_int_t)piece->begin_bytes, (json_int_t)(piece->begin_bytes + meta_data->size_bytes));
    return json_object_set_new(root, piece->slot->name, entry) == 0;
}

/* They come first, as the reference implementation writes them. */
static bool add_annotations(json_t *root, const struct tl_annotations *annotations)
{
    size_t count;
    const struct tl_annotation *items = tl_annotations_items(annotations, &count);
    if (count == 0) return true;
    json_t *map = json_object();
    bool is_complete = map != NULL;
    for (size_t i = 0; is_complete && i < count; i++)
        is_complete = json_object_set_new(map, items[i].key, json_string(items[i].value)) == 0;
    return json_object_set_new(root, TL_SAFETENSORS_META_DATA_KEY, map) == 0 && is_complete;
}

/* A file whose header has more could not be read again. */
static enum tl_status check_value_count(const struct layout *layout, const struct tl_annotations *annotations,
                                        const char *path, struct tl_error *ret_error)
{
    size_t annotation_count;
    (void)tl_annotations_items(annotations, &annotation_count);
    uint64_t value_count = 2 * (uint64_t)annotation_count + 2;
    for (size_t i = 0; i < layout->count; i++)
        value_count += VALUES_OF_ENTRY + layout->pieces[i].slot->meta_data.shape.rank;
    if (value_count <= TL_SAFETENSORS_MAX_HEADER_VALUES) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "%s would have a header of %" PRIu64 " values, at most %" PRIu64
                        " are possible; write fewer tensors into one file",
                        path, value_count, TL_SAFETENSORS_MAX_HEADER_VALUES);
}

static enum tl_status build_header(struct layout *layout, const struct tl_annotations *annotations, const char *path,
                                   struct tl_error *ret_error)
{
    layout->root = json_object();
    if (layout->root && !add_annotations(layout->root, annotations)) goto no_memory;
    for (size_t i = 0; layout->root && i < layout->count; i++) {
        const char *name = layout->pieces[i].slot->name;
        if (json_object_get(layout->root, name))
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "tensor '%s' is there twice", name);
        if (!add_entry(layout->root, &layout->pieces[i])) goto no_memory;
    }
    if (!layout->root) goto no_memory;
    layout->json_bytes = json_dumpb(layout->root, NULL, 0, JSON_COMPACT);
    if (layout->json_bytes == 0) goto no_memory;
    uint64_t end_bytes = sizeof(uint64_t) + layout->json_bytes;
    uint64_t padding_bytes = (DATA_ALIGNMENT_BYTES - end_bytes % DATA_ALIGNMENT_BYTES) % DATA_ALIGNMENT_BYTES;
    layout->header_bytes = layout->json_bytes + padding_bytes;
    if (layout->header_bytes > TL_SAFETENSORS_MAX_HEADER_BYTES)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s would have a header of %" PRIu64 " bytes, at most %" PRIu64
                            " are possible; write fewer tensors into one file",
                            path, layout->header_bytes, TL_SAFETENSORS_MAX_HEADER_BYTES);
    return TL_OK;

no_memory:
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the header of %s", path);
}

/* Writes the header where it belongs in the mapping. */
static enum tl_status write_header(const struct layout *layout, struct tl_output_file *file, struct tl_error *ret_error)
{
    unsigned char *data = tl_output_file_data(file);
    uint64_t header_bytes = htole64(layout->header_bytes);
    memcpy(data, &header_bytes, sizeof(header_bytes));
    char *text = (char *)data + sizeof(header_bytes);
    memset(text, ' ', layout->header_bytes);
    if (json_dumpb(layout->root, text, layout->header_bytes, JSON_COMPACT) != layout->json_bytes)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the header of %s",
                            tl_output_file_path(file));
    return TL_OK;
}

static enum tl_status fill_writer(struct tl_tensor_writer *writer, const struct layout *layout,
                                  struct tl_error *ret_error)
{
    struct tl_output_file *file;
    uint64_t data_offset = sizeof(uint64_t) + layout->header_bytes;
    enum tl_status status = tl_tensor_writer_add_file(writer, NULL, data_offset + layout->data_bytes, &file, ret_error);
    if (status == TL_OK) status = tl_tensor_writer_give_back_space(writer, ret_error);
    if (status == TL_OK) status = write_header(layout, file, ret_error);
    for (size_t i = 0; i < layout->count && status == TL_OK; i++) {
        const struct piece *piece = &layout->pieces[i];
        status = tl_tensor_writer_add_tensor(writer, piece->index, piece->slot, file, data_offset + piece->begin_bytes,
                                             ret_error);
    }
    return status;
}

enum tl_status tl_safetensors_writer_create(const char *path, const struct tl_tensor_slot *slots, size_t count,
                                            const struct tl_annotations *annotations, const struct tl_writer_stop *stop,
                                            struct tl_tensor_writer **ret_writer, struct tl_error *ret_error)
{
    struct tl_tensor_writer *writer = NULL;
    struct layout layout = {.count = count, .pieces = calloc(count + 1, sizeof(layout.pieces[0]))};
    if (!layout.pieces)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the %zu tensors of %s", count, path);
    enum tl_status status = place_all(&layout, slots, path, ret_error);
    if (status == TL_OK) status = check_value_count(&layout, annotations, path, ret_error);
    if (status == TL_OK) status = build_header(&layout, annotations, path, ret_error);
    if (status == TL_OK) status = tl_tensor_writer_start(path, count, false, stop, &writer, ret_error);
    if (status == TL_OK) status = fill_writer(writer, &layout, ret_error);
    layout_fini(&layout);
    if (status != TL_OK) {
        tl_tensor_writer_destroy(writer);
        return status;
    }
    *ret_writer = writer;
    return TL_OK;
}
