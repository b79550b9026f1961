// SPDX-License-Identifier: Apache-2.0
/*
 * Reading .npy: a magic, a version, the length of the header, a Python dictionary of exactly three keys, and the data.
 *
 * The dictionary is read by a parser that knows strings, True and False, and tuples of integers, which is all that
 * NumPy writes there; nothing is evaluated. It looks at every byte once and allocates nothing.
 *
 * Failure modes: whatever is not understood, or does not fit the length of the file, is refused with the name of the
 * file and what is wrong.
 */
#include "tensor/npy.h"

#include <endian.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "tensor/file_reader.h"

/* ------------------------------------------------------------------------------------------------------ dtypes -- */

static const struct {
    enum tl_dtype dtype;
    const char *descr;
} dtypes[] = {
    {TL_BOOL, "|b1"}, {TL_U8, "|u1"},  {TL_I8, "|i1"},  {TL_U16, "<u2"},   {TL_I16, "<i2"},
    {TL_U32, "<u4"},  {TL_I32, "<i4"}, {TL_U64, "<u8"}, {TL_I64, "<i8"},   {TL_F16, "<f2"},
    {TL_F32, "<f4"},  {TL_F64, "<f8"}, {TL_C64, "<c8"}, {TL_C128, "<c16"},
};

const char *tl_npy_descr(enum tl_dtype dtype)
{
    for (size_t i = 0; i < TL_ARRAY_COUNT(dtypes); i++)
        if (dtypes[i].dtype == dtype) return dtypes[i].descr;
    return NULL;
}

enum tl_dtype tl_npy_dtype(const char *descr, size_t len_bytes)
{
    for (size_t i = 0; i < TL_ARRAY_COUNT(dtypes); i++) {
        const char *known = dtypes[i].descr;
        if (len_bytes != strlen(known) || memcmp(descr + 1, known + 1, len_bytes - 1) != 0) continue;
        bool is_single_byte = known[0] == '|';
        if (strchr(is_single_byte ? "|<=>" : "<=", descr[0]) && descr[0] != '\0') return dtypes[i].dtype;
    }
    return TL_DTYPE_INVALID;
}

/* -------------------------------------------------------------------------------------------------- dictionary -- */

/* The text that is left of the header. */
struct cursor {
    const char *at;
    const char *end;
};

struct npy_header {
    bool is_structured; /* the value of descr is a list or a tuple */
    const char *descr;  /* in the file; NULL: not seen */
    size_t descr_len;
    bool has_order;
    bool is_fortran_order;
    bool has_shape;
    struct tl_shape shape;
};

static void skip_space(struct cursor *cursor)
{
    while (cursor->at < cursor->end && strchr(" \t\n\r", *cursor->at) && *cursor->at)
        cursor->at++;
}

/* Takes the character, after any space, when it is next. */
static bool take(struct cursor *cursor, char c)
{
    skip_space(cursor);
    if (cursor->at >= cursor->end || *cursor->at != c) return false;
    cursor->at++;
    return true;
}

static bool take_word(struct cursor *cursor, const char *word)
{
    size_t len = strlen(word);
    skip_space(cursor);
    if ((size_t)(cursor->end - cursor->at) < len || memcmp(cursor->at, word, len) != 0) return false;
    cursor->at += len;
    return true;
}

/* A string without escapes. */
static bool take_string(struct cursor *cursor, const char **ret_text, size_t *ret_len)
{
    char quote = '\'';
    if (!take(cursor, quote)) {
        quote = '"';
        if (!take(cursor, quote)) return false;
    }
    const char *start = cursor->at;
    for (; cursor->at < cursor->end && *cursor->at != quote; cursor->at++)
        if (*cursor->at == '\\' || *cursor->at == '\n') return false;
    if (cursor->at == cursor->end) return false;
    *ret_text = start;
    *ret_len = (size_t)(cursor->at++ - start);
    return true;
}

static bool take_number(struct cursor *cursor, uint64_t *ret_number)
{
    uint64_t number = 0;
    skip_space(cursor);
    const char *start = cursor->at;
    for (; cursor->at < cursor->end && *cursor->at >= '0' && *cursor->at <= '9'; cursor->at++) {
        if (!tl_mul_u64(number, 10, &number)) return false;
        if (!tl_add_u64(number, (uint64_t)(*cursor->at - '0'), &number)) return false;
    }
    if (cursor->at == start || number > INT64_MAX) return false;
    if (cursor->at < cursor->end && *cursor->at == 'L') cursor->at++; /* a long of Python 2 */
    *ret_number = number;
    return true;
}

/* "()", "(3,)", "(3, 4)"; "(3)" is a number in Python. */
static bool take_shape(struct cursor *cursor, struct tl_shape *ret_shape)
{
    struct tl_shape shape = {0};
    bool has_comma = true;
    if (!take(cursor, '(')) return false;
    while (!take(cursor, ')')) {
        if (!has_comma || shape.rank == TL_MAX_RANK) return false;
        if (!take_number(cursor, &shape.dims[shape.rank++])) return false;
        has_comma = take(cursor, ',');
    }
    if (shape.rank == 1 && !has_comma) return false;
    *ret_shape = shape;
    return true;
}

static bool is_text(const char *text, size_t len, const char *expected)
{
    return len == strlen(expected) && memcmp(text, expected, len) == 0;
}

/* The value of one key; false when key or value is none of those that belong here, or the key comes twice. */
static bool take_value(struct cursor *cursor, const char *key, size_t key_len, struct npy_header *header)
{
    if (is_text(key, key_len, "descr")) {
        header->is_structured = take(cursor, '[') || take(cursor, '(');
        return !header->is_structured && !header->descr && take_string(cursor, &header->descr, &header->descr_len);
    }
    if (is_text(key, key_len, "shape")) {
        if (header->has_shape) return false;
        header->has_shape = true;
        return take_shape(cursor, &header->shape);
    }
    if (!is_text(key, key_len, "fortran_order") || header->has_order) return false;
    header->has_order = true;
    header->is_fortran_order = take_word(cursor, "True");
    return header->is_fortran_order || take_word(cursor, "False");
}

static bool take_dictionary(struct cursor *cursor, struct npy_header *header)
{
    bool has_comma = true;
    if (!take(cursor, '{')) return false;
    while (!take(cursor, '}')) {
        const char *key;
        size_t key_len;
        if (!has_comma || !take_string(cursor, &key, &key_len) || !take(cursor, ':')) return false;
        if (!take_value(cursor, key, key_len, header)) return false;
        has_comma = take(cursor, ',');
    }
    skip_space(cursor);
    return cursor->at == cursor->end && header->descr && header->has_order && header->has_shape;
}

/* -------------------------------------------------------------------------------------------------------- file -- */

struct npy {
    enum tl_dtype dtype;
    struct tl_shape shape;
    uint64_t data_offset_bytes;
};

/* Finds the header's text and where it ends. */
static enum tl_status find_header(const unsigned char *data, uint64_t len_bytes, const char *where,
                                  struct cursor *ret_cursor, struct tl_error *ret_error)
{
    uint64_t start = TL_NPY_MAGIC_BYTES + 2, header_bytes;
    if (len_bytes == 0) return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s is empty", where);
    if (len_bytes < start + 2 || memcmp(data, TL_NPY_MAGIC, TL_NPY_MAGIC_BYTES) != 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s does not start as a .npy file does", where);
    unsigned major = data[TL_NPY_MAGIC_BYTES], minor = data[TL_NPY_MAGIC_BYTES + 1];
    if (major < 1 || major > 3 || minor != 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s has .npy version %u.%u; 1.0 to 3.0 can be read", where,
                            major, minor);
    if (major == 1) {
        header_bytes = (uint64_t)data[start] | (uint64_t)data[start + 1] << 8;
        start += 2;
    } else {
        uint32_t length;
        if (len_bytes < start + sizeof(length))
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s ends inside its header; is the file complete?",
                                where);
        memcpy(&length, data + start, sizeof(length));
        header_bytes = le32toh(length);
        start += sizeof(length);
    }
    if (header_bytes > len_bytes - start)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: a header of %" PRIu64 " bytes in a file of %" PRIu64 "; is the file complete?", where,
                            header_bytes, len_bytes);
    ret_cursor->at = (const char *)data + start;
    ret_cursor->end = ret_cursor->at + header_bytes;
    return TL_OK;
}

static enum tl_status check_data(const struct npy *npy, uint64_t len_bytes, const char *where,
                                 struct tl_error *ret_error)
{
    uint64_t size_bytes, data_bytes = len_bytes - npy->data_offset_bytes;
    char text[TL_SHAPE_TEXT_BYTES];
    tl_shape_format(&npy->shape, text, sizeof(text));
    if (tl_shape_size_bytes(npy->dtype, &npy->shape, &size_bytes, NULL) != TL_OK)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: %s of shape %s has more than 2^63-1 bytes", where,
                            tl_dtype_name(npy->dtype), text);
    if (size_bytes != data_bytes)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: %s of shape %s has %" PRIu64 " bytes, but %" PRIu64 " follow the header", where,
                            tl_dtype_name(npy->dtype), text, size_bytes, data_bytes);
    return TL_OK;
}

static enum tl_status refuse_dtype(const struct npy_header *header, const char *where, struct tl_error *ret_error)
{
    bool is_printable = header->descr_len <= 32;
    for (size_t i = 0; is_printable && i < header->descr_len; i++)
        is_printable = header->descr[i] >= ' ' && header->descr[i] <= '~';
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "%s: dtype '%.*s' is not supported; little-endian numbers and booleans are", where,
                        is_printable ? (int)header->descr_len : 1, is_printable ? header->descr : "?");
}

static enum tl_status parse_file(const void *data, uint64_t len_bytes, const char *where, struct npy *ret_npy,
                                 struct tl_error *ret_error)
{
    struct cursor cursor = {0};
    struct npy_header header = {0};
    enum tl_status status = find_header(data, len_bytes, where, &cursor, ret_error);
    if (status != TL_OK) return status;
    bool is_understood = take_dictionary(&cursor, &header);
    if (header.is_structured)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: a structured dtype is not supported; save each field as an array of its own", where);
    if (!is_understood)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s: the header is not a dictionary of descr, fortran_order and shape (of at most %d"
                            " dimensions); it is not understood from byte %" PRIu64,
                            where, TL_MAX_RANK, (uint64_t)(cursor.at - (const char *)data));
    struct npy npy = {
        .dtype = tl_npy_dtype(header.descr, header.descr_len),
        .shape = header.shape,
        .data_offset_bytes = (uint64_t)(cursor.end - (const char *)data),
    };
    if (npy.dtype == TL_DTYPE_INVALID) return refuse_dtype(&header, where, ret_error);
    if (header.is_fortran_order && npy.shape.rank > 1)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%s is in Fortran order; save numpy.ascontiguousarray of it", where);
    enum tl_status data_status = check_data(&npy, len_bytes, where, ret_error);
    if (data_status == TL_OK) *ret_npy = npy;
    return data_status;
}

enum tl_status tl_npy_check(const void *data, uint64_t len_bytes, const char *where, struct tl_error *ret_error)
{
    struct npy npy;
    return parse_file(data, len_bytes, where, &npy, ret_error);
}

/* ----------------------------------------------------------------------------------------------------- reading -- */

static enum tl_status create_tensor(const struct npy *npy, struct tl_mapped_file *file, struct tl_tensor_list *list,
                                    struct tl_error *ret_error)
{
    const char *path = tl_mapped_file_path(file);
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    size_t name_len = strlen(name);
    if (name_len > 4 && strcmp(name + name_len - 4, ".npy") == 0) name_len -= 4;
    if (!tl_tensor_name_is_valid(name, name_len))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the name of %s is not 1 to 512 bytes of UTF-8", path);
    list->items = calloc(1, sizeof(list->items[0]));
    if (!list->items) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the tensor of %s", path);
    enum tl_status status = tl_tensor_list_append_mapped(list, name, name_len, file, npy->data_offset_bytes, npy->dtype,
                                                         &npy->shape, ret_error);
    if (status != TL_OK) return status;
    /* The header may have been read from a file that was shrinking. */
    return tl_mapped_file_check(file, NULL, 0, ret_error);
}

enum tl_status tl_npy_read(const char *path, struct tl_tensor_list *ret_list, struct tl_error *ret_error)
{
    struct tl_mapped_file *file;
    struct tl_tensor_list list = {0};
    struct npy npy;
    enum tl_status status = tl_mapped_file_open(path, &file, ret_error);
    if (status != TL_OK) return status;
    status = parse_file(tl_mapped_file_data(file), tl_mapped_file_size_bytes(file), path, &npy, ret_error);
    if (status != TL_OK) status = tl_mapped_file_blame(file, status, ret_error);
    if (status == TL_OK) status = create_tensor(&npy, file, &list, ret_error);
    tl_mapped_file_put(file);
    if (status != TL_OK) {
        tl_tensor_list_fini(&list);
        return status;
    }
    *ret_list = list;
    return TL_OK;
}
