// SPDX-License-Identifier: Apache-2.0
/* What all formats share: choice by name, names, lists. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fakes/temp_folder.h"

#include "fakes/run_suite.h"
#include "tensor/file_reader.h"

static struct tl_error error;
static struct tl_tensor_list list;

static const char npy[] = "\x93NUMPY\x01\x00\x3a\x00{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }\nabc";
static const char safetensors[] = "\x02\0\0\0\0\0\0\0{}";

START_TEST(chosen_by_name)
{
    temp_write(temp_path("a.npy"), npy, sizeof(npy) - 1);
    temp_write(temp_path("b.safetensors"), safetensors, sizeof(safetensors) - 1);
    temp_write(temp_path("npy"), safetensors, sizeof(safetensors) - 1);
    ck_assert_int_eq(tl_tensor_file_read(temp_path("a.npy"), &list, &error), TL_OK);
    ck_assert_uint_eq(list.count, 1);
    tl_tensor_list_fini(&list);
    ck_assert_int_eq(tl_tensor_file_read(temp_path("b.safetensors"), &list, &error), TL_OK);
    ck_assert_uint_eq(list.count, 0);
    tl_tensor_list_fini(&list);
    ck_assert_int_eq(tl_tensor_file_read(temp_path("npy"), &list, &error), TL_OK);
    tl_tensor_list_fini(&list);
}
END_TEST

START_TEST(errors_are_passed_on)
{
    ck_assert_int_eq(tl_tensor_file_read(temp_path("none.npy"), &list, &error), TL_NOT_FOUND);
    ck_assert_int_eq(tl_tensor_file_read(temp_path("none"), &list, &error), TL_NOT_FOUND);
    temp_write(temp_path("wrong.npy"), safetensors, sizeof(safetensors) - 1);
    ck_assert_int_eq(tl_tensor_file_read(temp_path("wrong.npy"), &list, &error), TL_INVALID_ARGUMENT);
    temp_write(temp_path("wrong"), npy, sizeof(npy) - 1);
    ck_assert_int_eq(tl_tensor_file_read(temp_path("wrong"), &list, &error), TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(names)
{
    char name[514];
    memset(name, 'a', sizeof(name));
    ck_assert(tl_tensor_name_is_valid(name, 1));
    ck_assert(tl_tensor_name_is_valid(name, 512));
    ck_assert(!tl_tensor_name_is_valid(name, 513));
    ck_assert(!tl_tensor_name_is_valid(name, 0));
    ck_assert(!tl_tensor_name_is_valid("a\0b", 3));
    ck_assert(!tl_tensor_name_is_valid("\xc3", 1));
}
END_TEST

START_TEST(empty_list)
{
    struct tl_tensor_list empty = {0};
    tl_tensor_list_fini(&empty);
    tl_tensor_list_fini(&empty);
    ck_assert_uint_eq(empty.count, 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("tensor_file");
    TCase *tcase = tcase_create("tensor_file");
    tcase_add_checked_fixture(tcase, temp_folder_make, temp_folder_remove);
    tcase_add_test(tcase, chosen_by_name);
    tcase_add_test(tcase, errors_are_passed_on);
    tcase_add_test(tcase, names);
    tcase_add_test(tcase, empty_list);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
