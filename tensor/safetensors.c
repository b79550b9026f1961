// SPDX-License-Identifier: Apache-2.0
/*
 * Reading safetensors: 8 bytes of header length, a JSON object that gives each tensor a dtype, a shape and a range of
 * the data, and the data.
 *
 * Happy path: the header is parsed where it lies in the mapping, every entry is checked alone, the entries are sorted
 * by place and must tile the data exactly; then each becomes a tensor in the mapping.
 *
 * Failure modes: the file is hostile until proven otherwise. The length of the header, the number of its values and
 * its nesting are bounded before memory is spent on it; numbers that do not fit are refused by the JSON parser; every
 * message names the file and the tensor.
 */
#include "tensor/safetensors.h"

#include <endian.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "tensor/file_reader.h"

struct entry {
    const char *name; /* in the header's JSON */
    enum tl_dtype dtype;
    struct tl_shape shape;
    uint64_t begin_bytes; /* from the start of the data */
    uint64_t end_bytes;
};

struct header {
    json_t *root;
    struct entry *entries; /* [count], in the order of the data */
    size_t count;
    uint64_t data_offset_bytes; /* in the file */
    uint64_t data_bytes;
};

bool tl_safetensors_has_dtype(enum tl_dtype dtype)
{
    switch (dtype) {
    case TL_STRING:
    case TL_C128:
    case TL_I4:
    case TL_U4:
        return false;
    default:
        return tl_dtype_is_plain(dtype);
    }
}

static void header_fini(struct header *header)
{
    free(header->entries);
    json_decref(header->root);
}

/* ---------------------------------------------------------------------------------------------- JSON of header -- */

/* Returns how many values the JSON has at most: it has a ',' or a ':' outside of texts beside each of them. */
static uint64_t count_values(const char *text, uint64_t len_bytes)
{
    uint64_t count = 0;
    bool is_in_text = false;
    for (uint64_t i = 0; i < len_bytes; i++) {
        if (text[i] == '"')
            is_in_text = !is_in_text;
        else if (is_in_text)
            i += text[i] == '\\';
        else
            count += text[i] == ',' || text[i] == ':';
    }
    return count;
}

static enum tl_status check_header_text(const char *text, uint64_t len_bytes, const char *where,
                                        struct tl_error *ret_error)
{
    if (len_bytes == 0 || text[0] != '{')
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: the header does not start with '{'", where);
    if (count_values(text, len_bytes) > TL_SAFETENSORS_MAX_HEADER_VALUES)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: the header has more than %" PRIu64 " values; split the file", where,
                            TL_SAFETENSORS_MAX_HEADER_VALUES);
    return TL_OK;
}

static enum tl_status load_json(const char *text, uint64_t len_bytes, const char *where, json_t **ret_root,
                                struct tl_error *ret_error)
{
    json_error_t error;
    enum tl_status status = check_header_text(text, len_bytes, where, ret_error);
    if (status != TL_OK) return status;
    *ret_root = json_loadb(text, len_bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    if (*ret_root) return TL_OK;
    /* The parser says nothing at all when it has no memory. */
    if (error.text[0] == '\0' || json_error_code(&error) == json_error_out_of_memory)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no memory for the header", where);
    /* The parser quotes from the header and may cut the quotation anywhere. */
    bool is_utf8 = tl_text_is_utf8(error.text, strlen(error.text));
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: the header is not valid JSON at byte %d: %s", where,
                        error.position, is_utf8 ? error.text : "invalid text");
}

static enum tl_status check_meta_data(const json_t *value, const char *where, struct tl_error *ret_error)
{
    const char *key;
    json_t *item;
    if (json_is_null(value)) return TL_OK; /* as the reference implementation has it */
    bool is_map = json_is_object(value);
    if (is_map) {
        json_object_foreach((json_t *)value, key, item) is_map = is_map && json_is_string(item);
    }
    if (is_map) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: %s is not an object of strings", where,
                        TL_SAFETENSORS_META_DATA_KEY);
}

/* --------------------------------------------------------------------------------------------------- one entry -- */

static enum tl_status parse_dtype(const json_t *value, struct entry *entry, const char *where,
                                  struct tl_error *ret_error)
{
    if (!json_is_string(value))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: tensor '%s': dtype is missing or not a string", where,
                            entry->name);
    entry->dtype = tl_dtype_from_name(json_string_value(value), json_string_length(value));
    if (!tl_safetensors_has_dtype(entry->dtype))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: tensor '%s': unknown dtype \"%s\"", where, entry->name,
                            json_string_value(value));
    return TL_OK;
}

static bool get_unsigned(const json_t *value, uint64_t *ret_number)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0) return false;
    *ret_number = (uint64_t)json_integer_value(value);
    return true;
}

static enum tl_status parse_shape(const json_t *value, struct entry *entry, const char *where,
                                  struct tl_error *ret_error)
{
    if (!json_is_array(value))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: tensor '%s': shape is missing or not an array", where,
                            entry->name);
    size_t rank = json_array_size(value);
    if (rank > TL_MAX_RANK)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: tensor '%s': rank %zu; at most %d dimensions", where,
                            entry->name, rank, TL_MAX_RANK);
    entry->shape.rank = (unsigned)rank;
    for (size_t i = 0; i < rank; i++)
        if (!get_unsigned(json_array_get(value, i), &entry->shape.dims[i]))
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                                "%s: tensor '%s': dimension %zu is not an integer of at least 0", where, entry->name,
                                i);
    return TL_OK;
}

static enum tl_status parse_offsets(const json_t *value, struct entry *entry, uint64_t data_bytes, const char *where,
                                    struct tl_error *ret_error)
{
    if (!json_is_array(value) || json_array_size(value) != 2 ||
        !get_unsigned(json_array_get(value, 0), &entry->begin_bytes) ||
        !get_unsigned(json_array_get(value, 1), &entry->end_bytes))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: tensor '%s': data_offsets are missing or not two integers of at least 0", where,
                            entry->name);
    if (entry->begin_bytes > entry->end_bytes || entry->end_bytes > data_bytes)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: tensor '%s': data_offsets [%" PRIu64 ", %" PRIu64 "] do not lie in order within the"
                            " %" PRIu64 " bytes of data; is the file complete?",
                            where, entry->name, entry->begin_bytes, entry->end_bytes, data_bytes);
    return TL_OK;
}

/* Shape, dtype and data_offsets must give the same size. */
static enum tl_status check_size(const struct entry *entry, const char *where, struct tl_error *ret_error)
{
    uint64_t size_bytes, count;
    char text[TL_SHAPE_TEXT_BYTES];
    enum tl_status status = tl_shape_size_bytes(entry->dtype, &entry->shape, &size_bytes, NULL);
    if (status == TL_OK) status = tl_shape_element_count(&entry->shape, &count, NULL);
    if (status != TL_OK)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: tensor '%s': %s of shape %s has more than 2^63-1 bytes", where, entry->name,
                            tl_dtype_name(entry->dtype), tl_shape_format(&entry->shape, text, sizeof(text)));
    if (size_bytes != entry->end_bytes - entry->begin_bytes)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: tensor '%s': %s of shape %s has %" PRIu64 " bytes, data_offsets span %" PRIu64, where,
                            entry->name, tl_dtype_name(entry->dtype),
                            tl_shape_format(&entry->shape, text, sizeof(text)), size_bytes,
                            entry->end_bytes - entry->begin_bytes);
    if (count % 8 * tl_dtype_bits(entry->dtype) % 8 != 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: tensor '%s': %s of shape %s does not fill its last byte", where, entry->name,
                            tl_dtype_name(entry->dtype), tl_shape_format(&entry->shape, text, sizeof(text)));
    return TL_OK;
}

static enum tl_status parse_entry(const char *name, const json_t *value, uint64_t data_bytes, const char *where,
                                  struct entry *ret_entry, struct tl_error *ret_error)
{
    size_t name_len = strlen(name);
    *ret_entry = (struct entry){.name = name};
    if (!tl_tensor_name_is_valid(name, name_len))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: the name of a tensor has %zu bytes, not 1 to 512: '%s'", where, name_len, name);
    if (!json_is_object(value))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: tensor '%s': the entry is not an object", where, name);
    enum tl_status status = parse_dtype(json_object_get(value, "dtype"), ret_entry, where, ret_error);
    if (status != TL_OK) return status;
    status = parse_shape(json_object_get(value, "shape"), ret_entry, where, ret_error);
    if (status != TL_OK) return status;
    status = parse_offsets(json_object_get(value, "data_offsets"), ret_entry, data_bytes, where, ret_error);
    if (status != TL_OK) return status;
    return check_size(ret_entry, where, ret_error);
}

/* ------------------------------------------------------------------------------------------------- all entries -- */

static int compare_places(const void *left, const void *right)
{
    const struct entry *a = left, *b = right;
    if (a->begin_bytes != b->begin_bytes) return a->begin_bytes < b->begin_bytes ? -1 : 1;
    if (a->end_bytes != b->end_bytes) return a->end_bytes < b->end_bytes ? -1 : 1;
    return strcmp(a->name, b->name);
}

static enum tl_status check_tiling(const struct header *header, const char *where, struct tl_error *ret_error)
{
    uint64_t place = 0;
    for (size_t i = 0; i < header->count; i++) {
        const struct entry *entry = &header->entries[i];
        if (entry->begin_bytes != place)
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                                "%s: tensor '%s' starts at byte %" PRIu64 " of the data and %s the one before, which"
                                " ends at %" PRIu64,
                                where, entry->name, entry->begin_bytes,
                                entry->begin_bytes < place ? "overlaps" : "leaves a hole behind", place);
        place = entry->end_bytes;
    }
    if (place != header->data_bytes)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: the tensors end at byte %" PRIu64 " of the data, which has %" PRIu64
                            " bytes; is the file complete?",
                            where, place, header->data_bytes);
    return TL_OK;
}

static enum tl_status parse_entries(struct header *header, const char *where, struct tl_error *ret_error)
{
    const char *name;
    json_t *value;
    header->entries = calloc(json_object_size(header->root) + 1, sizeof(header->entries[0]));
    if (!header->entries) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no memory for the header", where);
    json_object_foreach(header->root, name, value)
    {
        enum tl_status status;
        if (strcmp(name, TL_SAFETENSORS_META_DATA_KEY) == 0) {
            status = check_meta_data(value, where, ret_error);
        } else {
            status = parse_entry(name, value, header->data_bytes, where, &header->entries[header->count], ret_error);
            header->count++;
        }
        if (status != TL_OK) return status;
    }
    qsort(header->entries, header->count, sizeof(header->entries[0]), compare_places);
    return check_tiling(header, where, ret_error);
}

static enum tl_status parse_file(const void *data, uint64_t len_bytes, const char *where, struct header *ret_header,
                                 struct tl_error *ret_error)
{
    struct header header = {0};
    uint64_t header_bytes;
    if (len_bytes == 0) return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s is empty", where);
    if (len_bytes >= 4 && memcmp(data, "PK\003\004", 4) == 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s is a zip archive, as .npz files are; write its arrays as .npy files, or as safetensors",
                            where);
    if (len_bytes < sizeof(header_bytes))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: %" PRIu64 " bytes are too few for a safetensors file; is the file complete?", where,
                            len_bytes);
    memcpy(&header_bytes, data, sizeof(header_bytes));
    header_bytes = le64toh(header_bytes);
    if (header_bytes > TL_SAFETENSORS_MAX_HEADER_BYTES)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: a header of %" PRIu64 " bytes; at most %" PRIu64 "; is this a safetensors file?",
                            where, header_bytes, TL_SAFETENSORS_MAX_HEADER_BYTES);
    if (header_bytes > len_bytes - sizeof(header_bytes))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: a header of %" PRIu64 " bytes in a file of %" PRIu64 "; is the file complete?", where,
                            header_bytes, len_bytes);
    header.data_offset_bytes = sizeof(header_bytes) + header_bytes;
    header.data_bytes = len_bytes - header.data_offset_bytes;
    const char *text = (const char *)data + sizeof(header_bytes);
    enum tl_status status = load_json(text, header_bytes, where, &header.root, ret_error);
    if (status == TL_OK) status = parse_entries(&header, where, ret_error);
    if (status != TL_OK) {
        header_fini(&header);
        return status;
    }
    *ret_header = header;
    return TL_OK;
}

enum tl_status tl_safetensors_check(const void *data, uint64_t len_bytes, const char *where, struct tl_error *ret_error)
{
    struct header header = {0};
    enum tl_status status = parse_file(data, len_bytes, where, &header, ret_error);
    if (status == TL_OK) header_fini(&header);
    return status;
}

/* ----------------------------------------------------------------------------------------------------- reading -- */

/* The texts of the file, which may be more than annotations can be: then the file is read without them. */
static enum tl_status read_annotations(const struct header *header, const char *path,
                                       struct tl_annotations **ret_annotations, struct tl_error *ret_error)
{
    json_t *root = json_object_get(header->root, TL_SAFETENSORS_META_DATA_KEY);
    size_t count = 0;
    struct tl_annotation *items = calloc(json_object_size(root) + 1, sizeof(*items));
    if (!items) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s: no memory for the header", path);
    const char *key;
    json_t *value;
    struct tl_error error;
    enum tl_status status = TL_OK;
    json_object_foreach(root, key, value)
    {
        items[count++] = (struct tl_annotation){key, json_string_value(value)};
        if (strlen(json_string_value(value)) != json_string_length(value))
            status = tl_error_set(&error, TL_INVALID_ARGUMENT, "annotation '%s' contains a zero byte", key);
    }
    if (status == TL_OK) status = tl_annotations_create(items, count, ret_annotations, &error);
    free(items);
    if (status == TL_OK) return TL_OK;
    if (status != TL_INVALID_ARGUMENT) return tl_error_copy(ret_error, &error);
    TL_LOG_AT_WARN("a file is read without its annotations", TL_STR("file", path), TL_STR("reason", error.message));
    *ret_annotations = NULL;
    return TL_OK;
}

static enum tl_status create_tensors(const struct header *header, struct tl_mapped_file *file,
                                     struct tl_annotations *annotations, struct tl_tensor_list *list,
                                     struct tl_error *ret_error)
{
    list->items = calloc(header->count + 1, sizeof(list->items[0]));
    if (!list->items)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the tensors of %s",
                            tl_mapped_file_path(file));
    for (size_t i = 0; i < header->count; i++) {
        const struct entry *entry = &header->entries[i];
        enum tl_status status = tl_tensor_list_append_mapped(list, entry->name, strlen(entry->name), file,
                                                             header->data_offset_bytes + entry->begin_bytes,
                                                             entry->dtype, &entry->shape, ret_error);
        if (status != TL_OK) return status;
        tl_tensor_set_annotations(list->items[i].tensor, annotations);
    }
    /* The header may have been read from a file that was shrinking. */
    return tl_mapped_file_check(file, NULL, 0, ret_error);
}

enum tl_status tl_safetensors_read(const char *path, struct tl_tensor_list *ret_list, struct tl_error *ret_error)
{
    struct tl_mapped_file *file;
    struct header header = {0};
    struct tl_tensor_list list = {0};
    struct tl_annotations *annotations = NULL;
    enum tl_status status = tl_mapped_file_open(path, &file, ret_error);
    if (status != TL_OK) return status;
    status = parse_file(tl_mapped_file_data(file), tl_mapped_file_size_bytes(file), path, &header, ret_error);
    if (status != TL_OK) status = tl_mapped_file_blame(file, status, ret_error);
    if (status == TL_OK) status = read_annotations(&header, path, &annotations, ret_error);
    if (status == TL_OK) status = create_tensors(&header, file, annotations, &list, ret_error);
    tl_annotations_put(annotations);
    header_fini(&header);
    tl_mapped_file_put(file);
    if (status != TL_OK) {
        tl_tensor_list_fini(&list);
        return status;
    }
    *ret_list = list;
    return TL_OK;
}
