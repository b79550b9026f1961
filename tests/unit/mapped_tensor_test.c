// SPDX-License-Identifier: Apache-2.0
/* Tensors in mapped files: where they lie, what does not fit, what they hold. */
#include <check.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "fakes/run_suite.h"
#include "tensor/mapped_tensor.h"
#include "tests/fakes/temp_folder.h"

static struct tl_error error;
static struct tl_mapped_file *file;
static struct tl_tensor *tensor;
static const struct tl_shape three = {.rank = 1, .dims = {3}};

static void setup(void)
{
    temp_folder_make();
    temp_write(temp_path("f"), "hello, world", 12);
    ck_assert_int_eq(tl_mapped_file_open(temp_path("f"), &file, &error), TL_OK);
}

static void teardown(void)
{
    tl_tensor_put(tensor);
    temp_folder_remove();
}

START_TEST(lies_in_the_file)
{
    uint64_t offset = 0;
    ck_assert_int_eq(tl_mapped_tensor_create(file, 7, TL_U8, &three, &tensor, &error), TL_OK);
    ck_assert_mem_eq(tl_tensor_data(tensor), "wor", 3);
    ck_assert(!tl_tensor_is_writable(tensor) && tl_tensor_is_read_only(tensor));
    ck_assert_ptr_eq(tl_mapped_tensor_file(tensor, &offset), file);
    ck_assert_uint_eq(offset, 7);
    /* The tensor keeps the file. */
    tl_mapped_file_put(file);
    ck_assert_mem_eq(tl_tensor_data(tensor), "wor", 3);
    ck_assert_int_eq(tl_tensor_check_readable(tensor, 0, 3, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_check(tensor, &error), TL_OK);
    ck_assert_int_eq(truncate(temp_path("f"), 11), 0);
    ck_assert_int_eq(tl_tensor_check_readable(tensor, 0, 3, &error), TL_DATA_LOSS);
    ck_assert_int_eq(tl_tensor_check(tensor, &error), TL_DATA_LOSS);
}
END_TEST

START_TEST(alias)
{
    struct tl_tensor *base = NULL;
    uint64_t offset = 0;
    ck_assert_int_eq(tl_mapped_tensor_create(file, 2, TL_U8, &three, &base, &error), TL_OK);
    ck_assert_int_eq(tl_tensor_create_alias(base, NULL, NULL, &tensor, &error), TL_OK);
    tl_tensor_put(base);
    ck_assert_ptr_eq(tl_mapped_tensor_file(tensor, &offset), file);
    ck_assert_uint_eq(offset, 2);
    tl_mapped_file_put(file);
}
END_TEST

START_TEST(does_not_fit)
{
    ck_assert_int_eq(tl_mapped_tensor_create(file, 10, TL_U8, &three, &tensor, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_mapped_tensor_create(file, UINT64_MAX, TL_U8, &three, &tensor, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_mapped_tensor_create(file, 0, TL_STRING, &three, &tensor, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_null(tensor);
    tl_mapped_file_put(file);
}
END_TEST

START_TEST(shared)
{
    const struct tl_shape none = {.rank = 1};
    const struct tl_shape impossible = {.rank = 2, .dims = {INT64_MAX, 2}};
    uint64_t offset = 1;
    tl_mapped_file_put(file);
    ck_assert_int_eq(tl_tensor_create_shared(TL_F32, 1, three.dims, &tensor, &error), TL_OK);
    ck_assert_uint_eq(tl_tensor_size_bytes(tensor), 12);
    ck_assert(tl_tensor_is_writable(tensor));
    ck_assert_mem_eq(tl_tensor_data(tensor), "\0\0\0\0\0\0\0\0\0\0\0", 12);
    memset(tl_tensor_data(tensor), 7, 12);
    file = tl_mapped_tensor_file(tensor, &offset);
    ck_assert_ptr_nonnull(file);
    ck_assert(tl_mapped_file_is_memory(file));
    ck_assert_uint_eq(offset, 0);
    ck_assert_int_eq(tl_tensor_check(tensor, &error), TL_OK);
    tl_tensor_put(tensor);
    tensor = NULL;
    ck_assert_int_eq(tl_tensor_create_shared(TL_F32, 2, impossible.dims, &tensor, &error), TL_OUT_OF_RANGE);
    ck_assert_int_eq(tl_tensor_create_shared(TL_STRING, 1, three.dims, &tensor, &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_tensor_create_shared(TL_F32, 1, none.dims, &tensor, &error), TL_OK);
    ck_assert_ptr_null(tl_mapped_tensor_file(tensor, &offset));
}
END_TEST

/* Without descriptors it is a tensor like any other. */
START_TEST(made_without_descriptors)
{
    const struct rlimit none = {.rlim_cur = 0, .rlim_max = 4096};
    const struct rlimit some = {.rlim_cur = 4096, .rlim_max = 4096};
    uint64_t offset;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
    ck_assert_int_eq(tl_tensor_create_shared(TL_F32, 1, three.dims, &tensor, &error), TL_OK);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &some), 0);
    ck_assert_mem_eq(tl_tensor_data(tensor), "\0\0\0\0\0\0\0\0\0\0\0", 12);
    ck_assert_ptr_null(tl_mapped_tensor_file(tensor, &offset));
    tl_mapped_file_put(file);
}
END_TEST

START_TEST(in_no_file)
{
    uint64_t offset = 0;
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, three.dims, &tensor, &error), TL_OK);
    ck_assert_ptr_null(tl_mapped_tensor_file(tensor, &offset));
    ck_assert(!tl_tensor_is_read_only(tensor));
    tl_mapped_file_put(file);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("mapped_tensor");
    TCase *tcase = tcase_create("mapped_tensor");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, lies_in_the_file);
    tcase_add_test(tcase, alias);
    tcase_add_test(tcase, does_not_fit);
    tcase_add_test(tcase, shared);
    tcase_add_test(tcase, made_without_descriptors);
    tcase_add_test(tcase, in_no_file);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
