// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include "python/dtype.h"

struct names {
    const char *format; /* NULL: the buffer protocol has none */
    int code;           /* enum dlpack_code, or NO_CODE */
};

#define NO_CODE (-1)

static const struct names all[TL_DTYPE_COUNT] = {
    [TL_DTYPE_INVALID] = {NULL, NO_CODE},
    [TL_BOOL] = {"?", DLPACK_BOOL},
    [TL_U8] = {"B", DLPACK_UINT},
    [TL_I8] = {"b", DLPACK_INT},
    [TL_U16] = {"H", DLPACK_UINT},
    [TL_I16] = {"h", DLPACK_INT},
    [TL_U32] = {"I", DLPACK_UINT},
    [TL_I32] = {"i", DLPACK_INT},
    [TL_U64] = {"L", DLPACK_UINT},
    [TL_I64] = {"l", DLPACK_INT},
    [TL_F16] = {"e", DLPACK_FLOAT},
    [TL_BF16] = {NULL, DLPACK_BFLOAT},
    [TL_F32] = {"f", DLPACK_FLOAT},
    [TL_F64] = {"d", DLPACK_FLOAT},
    [TL_C64] = {"Zf", DLPACK_COMPLEX},
    [TL_C128] = {"Zd", DLPACK_COMPLEX},
    [TL_F8_E4M3] = {NULL, DLPACK_F8_E4M3FN},
    [TL_F8_E5M2] = {NULL, DLPACK_F8_E5M2},
    [TL_F8_E4M3FNUZ] = {NULL, DLPACK_F8_E4M3FNUZ},
    [TL_F8_E5M2FNUZ] = {NULL, DLPACK_F8_E5M2FNUZ},
    [TL_F8_E8M0] = {NULL, DLPACK_F8_E8M0FNU},
    [TL_I4] = {NULL, DLPACK_INT},
    [TL_U4] = {NULL, DLPACK_UINT},
    [TL_F4] = {NULL, DLPACK_F4_E2M1FN},
    [TL_F6_E2M3] = {NULL, DLPACK_F6_E2M3FN},
    [TL_F6_E3M2] = {NULL, DLPACK_F6_E3M2FN},
    [TL_STRING] = {NULL, NO_CODE},
};

const char *py_dtype_format(enum tl_dtype dtype)
{
    return (unsigned)dtype < TL_DTYPE_COUNT ? all[dtype].format : NULL;
}

/* Integers have several letters for one size. */
static enum tl_dtype integer(bool is_signed, size_t item_bytes)
{
    switch (item_bytes) {
    case 1:
        return is_signed ? TL_I8 : TL_U8;
    case 2:
        return is_signed ? TL_I16 : TL_U16;
    case 4:
        return is_signed ? TL_I32 : TL_U32;
    case 8:
        return is_signed ? TL_I64 : TL_U64;
    default:
        return TL_DTYPE_INVALID;
    }
}

enum tl_dtype py_dtype_of_format(const char *format, size_t item_bytes)
{
    if (format == NULL) return item_bytes == 1 ? TL_U8 : TL_DTYPE_INVALID;
    if (*format != '\0' && strchr("@=<|", *format) != NULL) {
        format++;
    } else if (*format != '\0' && strchr(">!", *format) != NULL && item_bytes == 1) {
        format++; /* one byte has no order */
    }
    if (strlen(format) == 1 && strchr("bhilqn", *format) != NULL) return integer(true, item_bytes);
    if (strlen(format) == 1 && strchr("BHILQNc", *format) != NULL) return integer(false, item_bytes);
    for (enum tl_dtype dtype = TL_BOOL; dtype < TL_DTYPE_COUNT; dtype++)
        if (all[dtype].format != NULL && strcmp(format, all[dtype].format) == 0)
            return tl_dtype_bits(dtype) == 8 * item_bytes ? dtype : TL_DTYPE_INVALID;
    return TL_DTYPE_INVALID;
}

enum tl_dtype py_dtype_of_name(const char *name)
{
    for (enum tl_dtype dtype = TL_BOOL; dtype < TL_DTYPE_COUNT; dtype++)
        if (strcmp(name, tl_dtype_name(dtype)) == 0) return dtype;
    return TL_DTYPE_INVALID;
}

bool py_dtype_to_dlpack(enum tl_dtype dtype, struct dlpack_dtype *ret_dtype)
{
    if ((unsigned)dtype >= TL_DTYPE_COUNT || all[dtype].code == NO_CODE) return false;
    *ret_dtype = (struct dlpack_dtype){(uint8_t)all[dtype].code, (uint8_t)tl_dtype_bits(dtype), 1};
    return true;
}

enum tl_dtype py_dtype_of_dlpack(struct dlpack_dtype dtype)
{
    struct dlpack_dtype other;
    for (enum tl_dtype found = TL_BOOL; found < TL_DTYPE_COUNT && dtype.lanes == 1; found++)
        if (py_dtype_to_dlpack(found, &other) && other.code == dtype.code && other.bits == dtype.bits) return found;
    return TL_DTYPE_INVALID;
}
