// SPDX-License-Identifier: Apache-2.0
/* Dtypes, shapes, sizes and meta-data from outside. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "fakes/run_suite.h"
#include "tensor/meta_data.h"

#define MAX_DIM ((uint64_t)INT64_MAX)

static struct tl_error error;

START_TEST(dtypes)
{
    ck_assert_str_eq(tl_dtype_name(TL_BF16), "BF16");
    ck_assert_str_eq(tl_dtype_name(TL_F8_E4M3FNUZ), "F8_E4M3FNUZ");
    ck_assert_str_eq(tl_dtype_name(TL_DTYPE_INVALID), "INVALID");
    ck_assert_str_eq(tl_dtype_name((enum tl_dtype)TL_DTYPE_COUNT), "INVALID");
    ck_assert_str_eq(tl_dtype_name((enum tl_dtype) - 1), "INVALID");
    for (int i = 1; i < TL_DTYPE_COUNT; i++) {
        enum tl_dtype dtype = (enum tl_dtype)i;
        const char *name = tl_dtype_name(dtype);
        ck_assert_int_eq(tl_dtype_from_name(name, strlen(name)), dtype);
        ck_assert_int_eq(tl_dtype_is_plain(dtype), dtype != TL_STRING);
        ck_assert_int_eq(tl_dtype_bits(dtype) > 0, dtype != TL_STRING);
    }
    ck_assert_int_eq(tl_dtype_from_name("INVALID", 7), TL_DTYPE_INVALID);
    ck_assert_int_eq(tl_dtype_from_name("f32", 3), TL_DTYPE_INVALID);
    ck_assert_int_eq(tl_dtype_from_name("F32x", 3), TL_F32);
    ck_assert_int_eq(tl_dtype_from_name("F32", 2), TL_DTYPE_INVALID);
    ck_assert_int_eq(tl_dtype_from_name("", 0), TL_DTYPE_INVALID);
    ck_assert(!tl_dtype_is_plain(TL_DTYPE_INVALID));
    ck_assert_uint_eq(tl_dtype_bits((enum tl_dtype) - 1), 0);
}
END_TEST

START_TEST(bits)
{
    static const struct {
        enum tl_dtype dtype;
        unsigned bits;
    } cases[] = {
        {TL_BOOL, 8},    {TL_I16, 16},    {TL_F32, 32},        {TL_F64, 64}, {TL_C64, 64}, {TL_C128, 128},
        {TL_F8_E8M0, 8}, {TL_F8_E5M2, 8}, {TL_F8_E5M2FNUZ, 8}, {TL_I4, 4},   {TL_U4, 4},   {TL_F4, 4},
        {TL_F6_E2M3, 6}, {TL_F6_E3M2, 6}, {TL_BF16, 16},       {TL_F16, 16},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++)
        ck_assert_uint_eq(tl_dtype_bits(cases[i].dtype), cases[i].bits);
}
END_TEST

START_TEST(element_count)
{
    uint64_t count = 77;
    struct tl_shape shape = {0};
    ck_assert_int_eq(tl_shape_element_count(&shape, &count, &error), TL_OK);
    ck_assert_uint_eq(count, 1);
    shape = (struct tl_shape){.rank = 3, .dims = {2, 3, 4}};
    ck_assert_int_eq(tl_shape_element_count(&shape, &count, &error), TL_OK);
    ck_assert_uint_eq(count, 24);
    shape = (struct tl_shape){.rank = 3, .dims = {MAX_DIM, MAX_DIM, 0}};
    ck_assert_int_eq(tl_shape_element_count(&shape, &count, &error), TL_OK);
    ck_assert_uint_eq(count, 0);
    shape = (struct tl_shape){.rank = 1, .dims = {MAX_DIM}};
    ck_assert_int_eq(tl_shape_element_count(&shape, &count, &error), TL_OK);
    ck_assert_uint_eq(count, MAX_DIM);
    shape.rank = TL_MAX_RANK;
    for (unsigned i = 0; i < TL_MAX_RANK; i++)
        shape.dims[i] = i % 4 ? 1 : 2;
    ck_assert_int_eq(tl_shape_element_count(&shape, &count, &error), TL_OK);
    ck_assert_uint_eq(count, 16);
}
END_TEST

START_TEST(element_count_errors)
{
    uint64_t count = 77;
    struct tl_shape shape = {.rank = TL_MAX_RANK + 1};
    ck_assert_int_eq(tl_shape_element_count(&shape, &count, &error), TL_INVALID_ARGUMENT);
    shape = (struct tl_shape){.rank = 1, .dims = {MAX_DIM + 1}};
    ck_assert_int_eq(tl_shape_element_count(&shape, &count, &error), TL_OUT_OF_RANGE);
    shape = (struct tl_shape){.rank = 2, .dims = {MAX_DIM + 1, 0}};
    ck_assert_int_eq(tl_shape_element_count(&shape, &count, &error), TL_OUT_OF_RANGE);
    shape = (struct tl_shape){.rank = 2, .dims = {UINT64_C(1) << 32, UINT64_C(1) << 31}};
    ck_assert_int_eq(tl_shape_element_count(&shape, &count, &error), TL_OUT_OF_RANGE);
    ck_assert_ptr_nonnull(strstr(error.message, "[4294967296, 2147483648]"));
    /* A product that wraps around to something small. */
    shape = (struct tl_shape){.rank = 3, .dims = {UINT64_C(1) << 32, UINT64_C(1) << 32, 3}};
    ck_assert_int_eq(tl_shape_element_count(&shape, &count, &error), TL_OUT_OF_RANGE);
    ck_assert_uint_eq(count, 77);
}
END_TEST

START_TEST(size_bytes)
{
    static const struct {
        enum tl_dtype dtype;
        struct tl_shape shape;
        uint64_t size_bytes;
    } cases[] = {
        {TL_F32, {0}, 4},
        {TL_F32, {2, {3, 4}}, 48},
        {TL_F32, {2, {3, 0}}, 0},
        {TL_I4, {1, {1}}, 1},
        {TL_I4, {1, {2}}, 1},
        {TL_I4, {1, {3}}, 2},
        {TL_F6_E2M3, {1, {4}}, 3},
        {TL_F6_E2M3, {1, {5}}, 4},
        {TL_U8, {1, {MAX_DIM}}, MAX_DIM},
        {TL_I4, {1, {MAX_DIM}}, (MAX_DIM + 1) / 2},
        {TL_C128, {1, {MAX_DIM / 16}}, MAX_DIM / 16 * 16},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        uint64_t size_bytes = 77;
        ck_assert_int_eq(tl_shape_size_bytes(cases[i].dtype, &cases[i].shape, &size_bytes, &error), TL_OK);
        ck_assert_uint_eq(size_bytes, cases[i].size_bytes);
    }
}
END_TEST

START_TEST(size_bytes_errors)
{
    uint64_t size_bytes = 77;
    struct tl_shape shape = {.rank = 1, .dims = {MAX_DIM / 4 + 1}};
    ck_assert_int_eq(tl_shape_size_bytes(TL_F32, &shape, &size_bytes, &error), TL_OUT_OF_RANGE);
    shape.dims[0] = MAX_DIM;
    ck_assert_int_eq(tl_shape_size_bytes(TL_C128, &shape, &size_bytes, &error), TL_OUT_OF_RANGE);
    ck_assert_int_eq(tl_shape_size_bytes(TL_STRING, &shape, &size_bytes, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_shape_size_bytes(TL_DTYPE_INVALID, &shape, &size_bytes, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_shape_size_bytes((enum tl_dtype)99, &shape, &size_bytes, &error), TL_INVALID_ARGUMENT);
    shape.rank = 17;
    ck_assert_int_eq(tl_shape_size_bytes(TL_F32, &shape, &size_bytes, &error), TL_INVALID_ARGUMENT);
    ck_assert_uint_eq(size_bytes, 77);
}
END_TEST

START_TEST(equality)
{
    struct tl_shape a = {.rank = 2, .dims = {3, 4, 99}}, b = {.rank = 2, .dims = {3, 4, 98}};
    ck_assert(tl_shape_is_equal(&a, &b));
    b.dims[1] = 5;
    ck_assert(!tl_shape_is_equal(&a, &b));
    b = a;
    b.rank = 1;
    ck_assert(!tl_shape_is_equal(&a, &b));
    a.rank = b.rank = 1000;
    ck_assert(!tl_shape_is_equal(&a, &b));

    struct tl_meta_data first = {.dtype = TL_F32, .shape = {.rank = 1, .dims = {2}}, .size_bytes = 8};
    struct tl_meta_data second = first;
    ck_assert(tl_meta_data_is_equal(&first, &second));
    second.dtype = TL_I32;
    ck_assert(!tl_meta_data_is_equal(&first, &second));
    second = first;
    second.size_bytes = 9;
    ck_assert(!tl_meta_data_is_equal(&first, &second));
    second = first;
    second.is_dead = true;
    ck_assert(!tl_meta_data_is_equal(&first, &second));
    second = first;
    second.shape.dims[0] = 1;
    ck_assert(!tl_meta_data_is_equal(&first, &second));
}
END_TEST

START_TEST(format)
{
    char text[TL_SHAPE_TEXT_BYTES];
    struct tl_shape shape = {0};
    ck_assert_str_eq(tl_shape_format(&shape, text, sizeof(text)), "[]");
    shape = (struct tl_shape){.rank = 4, .dims = {64, 3, 3, 3}};
    ck_assert_str_eq(tl_shape_format(&shape, text, sizeof(text)), "[64, 3, 3, 3]");
    ck_assert_str_eq(tl_shape_format(&shape, text, 6), "[64, ");
    shape.rank = TL_MAX_RANK;
    for (unsigned i = 0; i < TL_MAX_RANK; i++)
        shape.dims[i] = UINT64_MAX;
    tl_shape_format(&shape, text, sizeof(text));
    ck_assert_int_eq(text[strlen(text) - 1], ']');
    ck_assert_uint_eq(strlen(text), TL_MAX_RANK * 22);
    /* An impossible rank is not used. */
    shape.rank = 1000;
    tl_shape_format(&shape, text, sizeof(text));
    ck_assert_uint_eq(strlen(text), TL_MAX_RANK * 22);
    text[0] = 'x';
    tl_shape_format(&shape, text, 0);
    ck_assert_int_eq(text[0], 'x');
}
END_TEST

START_TEST(validate_accepts)
{
    static const struct tl_meta_data good[] = {
        {.dtype = TL_F32, .shape = {2, {3, 4}}, .size_bytes = 48},
        {.dtype = TL_F32, .shape = {0}, .size_bytes = 4},
        {.dtype = TL_I4, .shape = {1, {3}}, .size_bytes = 2},
        {.dtype = TL_U8, .shape = {2, {0, 7}}, .size_bytes = 0},
        {.is_dead = true},
        {.dtype = TL_STRING, .shape = {1, {2}}, .size_bytes = 16},
        {.dtype = TL_STRING, .shape = {1, {2}}, .size_bytes = 17},
        {.dtype = TL_STRING, .shape = {1, {0}}, .size_bytes = 0},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(good); i++)
        ck_assert_int_eq(tl_meta_data_validate(&good[i], &error), TL_OK);
}
END_TEST

START_TEST(validate_refuses)
{
    static const struct {
        struct tl_meta_data meta_data;
        enum tl_status status;
    } bad[] = {
        {{.dtype = TL_F32, .shape = {2, {3, 4}}, .size_bytes = 47}, TL_INVALID_ARGUMENT},
        {{.dtype = TL_F32, .shape = {2, {3, 4}}, .size_bytes = 0}, TL_INVALID_ARGUMENT},
        {{.dtype = TL_DTYPE_INVALID}, TL_INVALID_ARGUMENT},
        {{.dtype = (enum tl_dtype)27}, TL_INVALID_ARGUMENT},
        {{.dtype = (enum tl_dtype) - 1}, TL_INVALID_ARGUMENT},
        {{.dtype = TL_U8, .shape = {.rank = 17}, .size_bytes = 1}, TL_INVALID_ARGUMENT},
        {{.dtype = TL_U8, .shape = {1, {MAX_DIM + 1}}, .size_bytes = 1}, TL_OUT_OF_RANGE},
        {{.dtype = TL_U8, .shape = {2, {MAX_DIM, 3}}, .size_bytes = 1}, TL_OUT_OF_RANGE},
        {{.is_dead = true, .dtype = TL_F32}, TL_INVALID_ARGUMENT},
        {{.is_dead = true, .size_bytes = 1}, TL_INVALID_ARGUMENT},
        {{.is_dead = true, .shape = {1, {1}}}, TL_INVALID_ARGUMENT},
        {{.dtype = TL_STRING, .shape = {1, {2}}, .size_bytes = 15}, TL_INVALID_ARGUMENT},
        {{.dtype = TL_STRING, .shape = {.rank = 17}, .size_bytes = 800}, TL_INVALID_ARGUMENT},
        {{.dtype = TL_STRING, .shape = {1, {MAX_DIM / 8 + 1}}, .size_bytes = MAX_DIM}, TL_OUT_OF_RANGE},
        {{.dtype = TL_STRING, .shape = {1, {1}}, .size_bytes = MAX_DIM + 1}, TL_OUT_OF_RANGE},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(bad); i++) {
        error = (struct tl_error){0};
        ck_assert_msg(tl_meta_data_validate(&bad[i].meta_data, &error) == bad[i].status, "case %zu", i);
        ck_assert_int_eq(error.code, bad[i].status);
        ck_assert_uint_gt(strlen(error.message), 10);
        ck_assert_int_eq(tl_meta_data_validate(&bad[i].meta_data, NULL), bad[i].status);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("meta_data");
    TCase *tcase = tcase_create("meta_data");
    tcase_add_test(tcase, dtypes);
    tcase_add_test(tcase, bits);
    tcase_add_test(tcase, element_count);
    tcase_add_test(tcase, element_count_errors);
    tcase_add_test(tcase, size_bytes);
    tcase_add_test(tcase, size_bytes_errors);
    tcase_add_test(tcase, equality);
    tcase_add_test(tcase, format);
    tcase_add_test(tcase, validate_accepts);
    tcase_add_test(tcase, validate_refuses);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
