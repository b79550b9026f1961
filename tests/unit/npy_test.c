// SPDX-License-Identifier: Apache-2.0
/* Reading .npy: files that NumPy wrote, headers by hand, every kind of lie, and lack of memory. */
#include <check.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/fakes/fault_alloc.h"
#include "tests/fakes/temp_folder.h"

#include "fakes/run_suite.h"
#include "tensor/npy.c"
#include "tensor/tensor_file.c"

static struct tl_error error;
static struct tl_tensor_list list;

static void teardown(void)
{
    tl_tensor_list_fini(&list);
    temp_folder_remove();
}

static enum tl_status check_bytes(unsigned major, const char *header, size_t header_len, size_t data_len)
{
    size_t start = major == 1 ? 10 : 12, len = start + header_len + data_len;
    unsigned char *bytes = calloc(1, len);
    memcpy(bytes, "\x93NUMPY", 6);
    bytes[6] = (unsigned char)major;
    bytes[8] = (unsigned char)header_len;
    bytes[9] = (unsigned char)(header_len >> 8);
    memcpy(bytes + start, header, header_len);
    error = (struct tl_error){0};
    enum tl_status status = tl_npy_check(bytes, len, "the file", &error);
    ck_assert_int_eq(tl_npy_check(bytes, len, "the file", NULL), status);
    free(bytes);
    return status;
}

static void accept(const char *header, size_t data_len)
{
    enum tl_status status = check_bytes(1, header, strlen(header), data_len);
    ck_assert_msg(status == TL_OK, "%s: %s", header, error.message);
}

static void refuse(const char *header, size_t data_len, const char *part)
{
    enum tl_status status = check_bytes(1, header, strlen(header), data_len);
    ck_assert_msg(status == TL_INVALID_ARGUMENT, "%s: %d", header, (int)status);
    ck_assert_msg(strncmp(error.message, "the file", 8) == 0, "%s", error.message);
    ck_assert_msg(strstr(error.message, part) != NULL, "%s: %s", header, error.message);
}

#define HEADER(descr, order, shape) "{'descr': '" descr "', 'fortran_order': " order ", 'shape': " shape ", }"

START_TEST(accepted)
{
    accept(HEADER("<f4", "False", "(3, 4)") "      \n", 48);
    accept(HEADER("<f4", "False", "()"), 4);
    accept(HEADER("<f4", "False", "(2,)"), 8);
    accept(HEADER("<f4", "False", "( 2 , 3 , )"), 24);
    accept(HEADER("<f4", "False", "(2L, 3L)"), 24);
    accept(HEADER("<f4", "True", "(2,)"), 8);
    accept(HEADER("<f4", "True", "()"), 4);
    accept(HEADER("=f8", "False", "(1,)"), 8);
    accept(HEADER("<i8", "False", "(0, 9223372036854775807)"), 0);
    accept(HEADER("|u1", "False", "(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)"), 1);
    accept("{\"shape\":(1,),\"fortran_order\":False,\"descr\":\"|b1\"}", 1);
    accept(" \t{ 'shape' : (1,) , 'fortran_order' : False , 'descr' : '<u2' } \r\n", 2);
}
END_TEST

START_TEST(versions)
{
    static const char header[] = HEADER("<f4", "False", "(2,)");
    for (unsigned major = 0; major <= 5; major++) {
        enum tl_status status = check_bytes(major, header, strlen(header), 8);
        ck_assert_int_eq(status, major >= 1 && major <= 3 ? TL_OK : TL_INVALID_ARGUMENT);
    }
    ck_assert_ptr_nonnull(strstr(error.message, "version"));
    ck_assert_int_eq(tl_npy_check("\x93NUMPY\x01\x01\x00\x00", 10, "the file", &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "version"));
}
END_TEST

START_TEST(dtype_names)
{
    static const struct {
        const char *descr;
        enum tl_dtype dtype;
    } cases[] = {
        {"|b1", TL_BOOL}, {"|u1", TL_U8},  {"|i1", TL_I8},  {"<u2", TL_U16},   {"<i2", TL_I16},
        {"<u4", TL_U32},  {"<i4", TL_I32}, {"<u8", TL_U64}, {"<i8", TL_I64},   {"<f2", TL_F16},
        {"<f4", TL_F32},  {"<f8", TL_F64}, {"<c8", TL_C64}, {"<c16", TL_C128},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        ck_assert_str_eq(tl_npy_descr(cases[i].dtype), cases[i].descr);
        ck_assert_int_eq(tl_npy_dtype(cases[i].descr, strlen(cases[i].descr)), cases[i].dtype);
    }
    ck_assert_int_eq(tl_npy_dtype(">u1", 3), TL_U8);
    ck_assert_int_eq(tl_npy_dtype("<b1", 3), TL_BOOL);
    static const char *const bad[] = {"|O",  "<U2",  "|S4", "|V4", ">f4", ">c16", "|f4", "f4",  "",       "<",
                                      "<f3", "<f16", "<c",  "<m8", "<M8", "<f4 ", " f4", "<F4", "float32"};
    for (size_t i = 0; i < TL_ARRAY_COUNT(bad); i++)
        ck_assert_int_eq(tl_npy_dtype(bad[i], strlen(bad[i])), TL_DTYPE_INVALID);
    ck_assert_int_eq(tl_npy_dtype("\0f4", 3), TL_DTYPE_INVALID);
    ck_assert_ptr_null(tl_npy_descr(TL_BF16));
    ck_assert_ptr_null(tl_npy_descr(TL_STRING));
    ck_assert_ptr_null(tl_npy_descr(TL_DTYPE_INVALID));
}
END_TEST

START_TEST(unsupported)
{
    refuse(HEADER("|O", "False", "(1,)"), 8, "'|O'");
    refuse(HEADER(">f4", "False", "(1,)"), 4, "'>f4'");
    refuse(HEADER("\x01", "False", "(1,)"), 4, "dtype");
    refuse("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", 4, "structured");
    refuse("{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (1,), }", 8, "structured");
    refuse(HEADER("<f4", "True", "(2, 2)"), 16, "Fortran");
}
END_TEST

START_TEST(not_the_three_keys)
{
    static const char *const bad[] = {
        "",
        "{",
        "{}",
        "[]",
        "{'descr': '<f4', 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': False}",
        "{'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}",
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'shape': (1,)}",
        "{'descr': '<f4' 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} x",
        "{'descr': '<f4', 'fortran_order': false, 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}",
        "{'descr': '<f4, 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f\\x34', 'fortran_order': False, 'shape': (1,)}",
        "{descr: '<f4', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': [1]}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': 1}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1 1)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1.0,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775808,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999999,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,",
        "{'descr': '",
        "{'",
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(bad); i++)
        refuse(bad[i], 4, "understood");
    ck_assert_int_eq(check_bytes(1, "{\0}", 3, 0), TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(sizes)
{
    refuse(HEADER("<f4", "False", "(2,)"), 7, "8 bytes");
    refuse(HEADER("<f4", "False", "(2,)"), 9, "8 bytes");
    refuse(HEADER("<f4", "False", "(4294967296, 4294967296)"), 0, "2^63-1");
    refuse(HEADER("<c16", "False", "(9223372036854775807,)"), 0, "2^63-1");
}
END_TEST

START_TEST(truncated)
{
    static const unsigned char bytes[] = "\x93NUMPY\x02\x00\x05\x00\x00\x00{'de";
    for (size_t len = 0; len < sizeof(bytes); len++) {
        unsigned char *part = malloc(len > 0 ? len : 1);
        memcpy(part, bytes, len);
        ck_assert_int_eq(tl_npy_check(part, len, "the file", &error), TL_INVALID_ARGUMENT);
        free(part);
    }
    ck_assert_int_eq(tl_npy_check(NULL, 0, "the file", &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_npy_check("\x93NUMPX\x01\x00\x00\x00", 10, "the file", &error), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(tl_npy_check("\x93NUMPY\x02\x00\xff\xff\xff\xff", 12, "the file", &error), TL_INVALID_ARGUMENT);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- reading -- */

static const char *numpy_file(const char *name)
{
    static char path[1024];
    const char *source = getenv("TENSORLANE_SOURCE");
    snprintf(path, sizeof(path), "%s/tests/fuzz/corpus/npy/%s", source ? source : ".", name);
    return path;
}

static struct tl_tensor *read_numpy(const char *name)
{
    tl_tensor_list_fini(&list);
    enum tl_status status = tl_npy_read(numpy_file(name), &list, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert_uint_eq(list.count, 1);
    return list.items[0].tensor;
}

START_TEST(read_what_numpy_wrote)
{
    struct tl_tensor *tensor = read_numpy("good-f4.npy");
    ck_assert_str_eq(list.items[0].name, "good-f4");
    ck_assert_int_eq(tl_tensor_dtype(tensor), TL_F32);
    ck_assert_uint_eq(tl_tensor_rank(tensor), 2);
    ck_assert_uint_eq(tl_tensor_dims(tensor)[0], 3);
    ck_assert_uint_eq(tl_tensor_dims(tensor)[1], 4);
    for (int i = 0; i < 12; i++)
        ck_assert_float_eq(((const float *)tl_tensor_data(tensor))[i], (float)i);
    ck_assert(!tl_tensor_is_writable(tensor));

    tensor = read_numpy("good-scalar.npy");
    ck_assert_int_eq(tl_tensor_dtype(tensor), TL_F64);
    ck_assert_uint_eq(tl_tensor_rank(tensor), 0);
    ck_assert_double_eq(*(const double *)tl_tensor_data(tensor), 2.5);

    tensor = read_numpy("good-bool.npy");
    ck_assert_int_eq(tl_tensor_dtype(tensor), TL_BOOL);
    ck_assert_mem_eq(tl_tensor_data(tensor), "\1\0\1", 3);

    tensor = read_numpy("good-c16-v2.npy");
    ck_assert_int_eq(tl_tensor_dtype(tensor), TL_C128);
    ck_assert_double_eq(((const double *)tl_tensor_data(tensor))[1], 2.0);

    ck_assert_int_eq(tl_tensor_dtype(read_numpy("good-f2-v3.npy")), TL_F16);
    ck_assert_uint_eq(tl_tensor_rank(read_numpy("good-u1-rank16.npy")), 16);
    ck_assert_uint_eq(tl_tensor_size_bytes(read_numpy("good-zero.npy")), 0);
    ck_assert_int_eq(tl_tensor_dtype(read_numpy("good-fortran-vector.npy")), TL_U16);
}
END_TEST

START_TEST(refuse_what_numpy_wrote)
{
    static const char *const names[] = {"bad-big-endian.npy", "bad-fortran.npy", "bad-object.npy", "bad-structured.npy",
                                        "bad-strings.npy",    "bad-rank17.npy",  "bad-void.npy"};
    for (size_t i = 0; i < TL_ARRAY_COUNT(names); i++) {
        ck_assert_int_eq(tl_npy_read(numpy_file(names[i]), &list, &error), TL_INVALID_ARGUMENT);
        ck_assert_ptr_nonnull(strstr(error.message, names[i]));
    }
}
END_TEST

static const char *write_example(const char *name)
{
    static const char bytes[] = "\x93NUMPY\x01\x00\x3a\x00" HEADER("|u1", "False", "(3,)") "\nabc";
    temp_write(temp_path(name), bytes, sizeof(bytes) - 1);
    return temp_path(name);
}

START_TEST(names)
{
    char long_name[300];
    ck_assert_int_eq(tl_npy_read(write_example("a.b.npy"), &list, &error), TL_OK);
    ck_assert_str_eq(list.items[0].name, "a.b");
    tl_tensor_list_fini(&list);
    ck_assert_int_eq(tl_npy_read(write_example("plain"), &list, &error), TL_OK);
    ck_assert_str_eq(list.items[0].name, "plain");
    tl_tensor_list_fini(&list);
    ck_assert_int_eq(chdir(temp_folder), 0);
    ck_assert_int_eq(tl_npy_read("plain", &list, &error), TL_OK);
    ck_assert_str_eq(list.items[0].name, "plain");
    tl_tensor_list_fini(&list);
    ck_assert_int_eq(tl_npy_read(write_example("bad\xff.npy"), &list, &error), TL_INVALID_ARGUMENT);
    snprintf(long_name, sizeof(long_name), "%0251d.npy", 0);
    ck_assert_int_eq(tl_npy_read(write_example(long_name), &list, &error), TL_OK);
    ck_assert_uint_eq(strlen(list.items[0].name), 251);
}
END_TEST

START_TEST(tensor_is_guarded)
{
    ck_assert_int_eq(tl_npy_read(write_example("x.npy"), &list, &error), TL_OK);
    ck_assert_mem_eq(tl_tensor_data(list.items[0].tensor), "abc", 3);
    ck_assert_int_eq(tl_tensor_check_readable(list.items[0].tensor, 0, 3, &error), TL_OK);
    ck_assert_int_eq(truncate(temp_path("x.npy"), 20), 0);
    ck_assert_int_eq(tl_tensor_check_readable(list.items[0].tensor, 0, 3, &error), TL_DATA_LOSS);
}
END_TEST

START_TEST(not_read)
{
    struct tl_tensor_list untouched = {.count = 77};
    ck_assert_int_eq(tl_npy_read(temp_path("none.npy"), &untouched, &error), TL_NOT_FOUND);
    ck_assert_int_eq(tl_npy_read(temp_folder, &untouched, &error), TL_INVALID_ARGUMENT);
    temp_write(temp_path("empty.npy"), "", 0);
    ck_assert_int_eq(tl_npy_read(temp_path("empty.npy"), &untouched, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, temp_path("empty.npy")));
    ck_assert_uint_eq(untouched.count, 77);
}
END_TEST

START_TEST(out_of_memory)
{
    const char *path = write_example("x.npy");
    for (unsigned n = 1;; n++) {
        fault_arm(n);
        enum tl_status status = tl_npy_read(path, &list, &error);
        if (!fault_was_hit()) {
            ck_assert_uint_gt(n, 2);
            ck_assert_int_eq(status, TL_OK);
            break;
        }
        ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
        ck_assert_ptr_null(list.items);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("npy");
    TCase *tcase = tcase_create("npy");
    tcase_add_checked_fixture(tcase, temp_folder_make, teardown);
    tcase_add_test(tcase, accepted);
    tcase_add_test(tcase, versions);
    tcase_add_test(tcase, dtype_names);
    tcase_add_test(tcase, unsupported);
    tcase_add_test(tcase, not_the_three_keys);
    tcase_add_test(tcase, sizes);
    tcase_add_test(tcase, truncated);
    tcase_add_test(tcase, read_what_numpy_wrote);
    tcase_add_test(tcase, refuse_what_numpy_wrote);
    tcase_add_test(tcase, names);
    tcase_add_test(tcase, tensor_is_guarded);
    tcase_add_test(tcase, not_read);
    tcase_add_test(tcase, out_of_memory);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
