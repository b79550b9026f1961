// SPDX-License-Identifier: Apache-2.0
/* Writing folders of .npy files: written files can be read, names, what NumPy cannot hold, full disks. */
#include <check.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "fakes/run_suite.h"
#include "tensor/npy.h"
#include "tensor/tensor_file.h"
#include "tests/fakes/temp_folder.h"

static struct tl_error error;
static struct tl_tensor_writer *writer;

static void teardown(void)
{
    tl_tensor_writer_destroy(writer);
    temp_folder_remove();
}

static struct tl_tensor_slot slot(const char *name, enum tl_dtype dtype, unsigned rank, uint64_t first, uint64_t rest)
{
    struct tl_tensor_slot made = {.name = name, .meta_data = {.dtype = dtype, .shape = {.rank = rank}}};
    for (unsigned i = 0; i < rank; i++)
        made.meta_data.shape.dims[i] = i == 0 ? first : rest;
    ck_assert_int_eq(tl_shape_size_bytes(dtype, &made.meta_data.shape, &made.meta_data.size_bytes, &error), TL_OK);
    return made;
}

static void create(const struct tl_tensor_slot *slots, size_t count)
{
    enum tl_status status = tl_npy_writer_create(temp_path("out"), slots, count, NULL, &writer, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
}

START_TEST(read_again)
{
    char path[64];
    const struct tl_tensor_slot slots[] = {
        slot("scalar", TL_F64, 0, 0, 0),        slot("vector", TL_BOOL, 1, 3, 0),
        slot("matrix", TL_C128, 2, 2, 3),       slot("none", TL_I64, 2, 0, 7),
        slot("caf\xc3\xa9 0", TL_U16, 3, 1, 2), slot("rank16", TL_F16, 16, 2, 1),
        slot("widest", TL_U8, 2, 0, INT64_MAX), slot("a..b", TL_I8, 1, 1, 0),
    };
    create(slots, TL_ARRAY_COUNT(slots));
    for (size_t i = 0; i < TL_ARRAY_COUNT(slots); i++) {
        struct tl_tensor *tensor = tl_tensor_writer_destination(writer, i);
        ck_assert(tl_meta_data_is_equal(tl_tensor_meta_data(tensor), &slots[i].meta_data));
        ck_assert_uint_eq((uintptr_t)tl_tensor_data(tensor) % 64, 0);
        memset(tl_tensor_data(tensor), (int)i + 1, tl_tensor_size_bytes(tensor));
        tl_tensor_put(tensor);
    }
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    ck_assert_uint_eq(temp_entry_count(temp_path("out")), TL_ARRAY_COUNT(slots));
    for (size_t i = 0; i < TL_ARRAY_COUNT(slots); i++) {
        struct tl_tensor_list list = {0};
        snprintf(path, sizeof(path), "out/%s.npy", slots[i].name);
        enum tl_status status = tl_npy_read(temp_path(path), &list, &error);
        ck_assert_msg(status == TL_OK, "%s", error.message);
        ck_assert_str_eq(list.items[0].name, slots[i].name);
        ck_assert(tl_meta_data_is_equal(tl_tensor_meta_data(list.items[0].tensor), &slots[i].meta_data));
        const unsigned char *data = tl_tensor_data(list.items[0].tensor);
        for (uint64_t k = 0; k < slots[i].meta_data.size_bytes; k++)
            ck_assert_uint_eq(data[k], i + 1);
        tl_tensor_list_fini(&list);
    }
}
END_TEST

/* The header as NumPy writes it: the same text, padded with blanks to a multiple of 64 bytes. */
START_TEST(exact_bytes)
{
    static const char start[] = "\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }";
    const struct tl_tensor_slot one = slot("w", TL_F32, 2, 3, 4);
    char bytes[300];
    create(&one, 1);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    int fd = open(temp_path("out/w.npy"), O_RDONLY);
    ck_assert_int_eq(read(fd, bytes, sizeof(bytes)), 128 + 48);
    close(fd);
    ck_assert_mem_eq(bytes, start, sizeof(start) - 1);
    for (size_t i = sizeof(start) - 1; i < 127; i++)
        ck_assert_int_eq(bytes[i], ' ');
    ck_assert_int_eq(bytes[127], '\n');
}
END_TEST

/* The same as a file of NumPy's, except for the number of blanks. */
START_TEST(as_numpy)
{
    char path[1024], theirs[256] = "", ours[256] = "";
    const char *source = getenv("TENSORLANE_SOURCE");
    const struct tl_tensor_slot one = slot("w", TL_F32, 2, 3, 4);
    create(&one, 1);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    snprintf(path, sizeof(path), "%s/tests/fuzz/corpus/npy/good-f4.npy", source ? source : ".");
    int their_fd = open(path, O_RDONLY), our_fd = open(temp_path("out/w.npy"), O_RDONLY);
    ck_assert_int_gt(pread(their_fd, theirs, 127, 0), 100);
    ck_assert_int_gt(pread(our_fd, ours, 127, 0), 100);
    close(their_fd);
    close(our_fd);
    ck_assert_mem_eq(theirs, ours, 127);
}
END_TEST

START_TEST(no_tensors)
{
    create(NULL, 0);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    ck_assert_uint_eq(temp_entry_count(temp_path("out")), 0);
}
END_TEST

static void refuse(const struct tl_tensor_slot *slots, size_t count, enum tl_status status, const char *part)
{
    writer = NULL;
    ck_assert_int_eq(tl_npy_writer_create(temp_path("out"), slots, count, NULL, &writer, &error), status);
    ck_assert_ptr_null(writer);
    ck_assert_msg(strstr(error.message, part) != NULL, "%s", error.message);
    ck_assert_uint_eq(temp_entry_count(temp_folder), 0);
}

START_TEST(names_refused)
{
    static const char *const names[] = {"a//b",    "a/",     "/a", "..",  ".", "../../etc/passwd",
                                        ".hidden", "a/../b", "",   "\xff"};
    char name[300];
    for (size_t i = 0; i < TL_ARRAY_COUNT(names); i++) {
        const struct tl_tensor_slot bad[] = {slot("good", TL_U8, 0, 0, 0), slot(names[i], TL_U8, 0, 0, 0)};
        refuse(bad, 2, TL_INVALID_ARGUMENT, i < 7 ? names[i] : "name");
    }
    snprintf(name, sizeof(name), "%0252d", 0);
    const struct tl_tensor_slot long_name = slot(name, TL_U8, 0, 0, 0);
    refuse(&long_name, 1, TL_INVALID_ARGUMENT, name);
    name[251] = '\0';
    const struct tl_tensor_slot longest = slot(name, TL_U8, 0, 0, 0);
    create(&longest, 1);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
}
END_TEST

/* 512 bytes, in three folders. */
START_TEST(longest_path)
{
    char path[600], name[513];
    memset(name, 'n', sizeof(name));
    name[100] = name[260] = name[400] = '/';
    name[512] = '\0';
    const struct tl_tensor_slot longest = slot(name, TL_U8, 0, 0, 0);
    create(&longest, 1);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    snprintf(path, sizeof(path), "out/%s.npy", name);
    ck_assert_int_eq(access(temp_path(path), F_OK), 0);
}
END_TEST

START_TEST(twice)
{
    const struct tl_tensor_slot slots[] = {slot("w", TL_U8, 0, 0, 0), slot("v", TL_U8, 0, 0, 0),
                                           slot("w", TL_F32, 0, 0, 0)};
    refuse(slots, 3, TL_INVALID_ARGUMENT, "'w'");
}
END_TEST

START_TEST(a_file_where_another_tensor_needs_a_folder)
{
    const struct tl_tensor_slot first[] = {slot("a", TL_U8, 0, 0, 0), slot("x", TL_U8, 0, 0, 0),
                                           slot("x.npy/y", TL_U8, 0, 0, 0)};
    const struct tl_tensor_slot last[] = {slot("d/x.npy/y/z", TL_U8, 0, 0, 0), slot("d/x", TL_U8, 0, 0, 0)};
    const struct tl_tensor_slot fine[] = {slot("x", TL_U8, 0, 0, 0), slot("x/y", TL_U8, 0, 0, 0),
                                          slot("y.npy/z", TL_U8, 0, 0, 0)};
    refuse(first, 3, TL_INVALID_ARGUMENT, "tensors 'x' and 'x.npy/y' cannot be files of one folder");
    refuse(last, 2, TL_INVALID_ARGUMENT, "tensors 'd/x' and 'd/x.npy/y/z' cannot be files of one folder");
    create(fine, 3);
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    ck_assert(access(temp_path("out/x.npy"), F_OK) == 0 && access(temp_path("out/x/y.npy"), F_OK) == 0);
}
END_TEST

START_TEST(too_many_files)
{
    enum { COUNT = 16001 };
    static char names[COUNT][8];
    struct tl_tensor_slot *slots = calloc(COUNT, sizeof(slots[0]));
    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof(names[i]), "t%u", i);
        slots[i] = slot(names[i], TL_U8, 0, 0, 0);
    }
    refuse(slots, COUNT, TL_INVALID_ARGUMENT,
           "/out would be a folder of 16001 .npy files, and at most 16000 are possible; write a safetensors file");
    free(slots);
}
END_TEST

START_TEST(dtypes)
{
    for (int i = 1; i < TL_DTYPE_COUNT; i++) {
        enum tl_dtype dtype = (enum tl_dtype)i;
        if (tl_npy_descr(dtype) || dtype == TL_STRING) continue;
        const struct tl_tensor_slot bad = slot("w", dtype, 1, 8, 0);
        refuse(&bad, 1, TL_INVALID_ARGUMENT, tl_dtype_name(dtype));
        refuse(&bad, 1, TL_INVALID_ARGUMENT, "leave it out with --exclude 'w'");
        bool is_in_safetensors = strstr(error.message, "write a safetensors file instead") != NULL;
        ck_assert_int_eq(is_in_safetensors, dtype != TL_I4 && dtype != TL_U4);
    }
    const struct tl_tensor_slot strings = {.name = "w",
                                           .meta_data = {.dtype = TL_STRING, .shape = {1, {1}}, .size_bytes = 8}};
    refuse(&strings, 1, TL_INVALID_ARGUMENT, "STRING");
    const struct tl_tensor_slot dead = {.name = "w", .meta_data.is_dead = true};
    refuse(&dead, 1, TL_INVALID_ARGUMENT, "'w'");
}
END_TEST

/* They have no elements, and NumPy multiplies what is not 0. */
START_TEST(shapes)
{
    const struct tl_tensor_slot fits[] = {slot("u", TL_F64, 2, 0, (UINT64_C(1) << 60) - 1)};
    const struct tl_tensor_slot bad[] = {slot("v", TL_F64, 2, 0, UINT64_C(1) << 60),
                                         slot("w", TL_U8, 3, 0, UINT64_C(1) << 40)};
    refuse(&bad[0], 1, TL_INVALID_ARGUMENT, "tensor 'v': NumPy cannot read the shape [0, 1152921504606846976]");
    refuse(&bad[1], 1, TL_INVALID_ARGUMENT, "leave it out with --exclude 'w'");
    ck_assert_int_eq(tl_npy_file_writer_create(temp_path("out"), &bad[0], NULL, &writer, &error), TL_INVALID_ARGUMENT);
    create(fits, 1);
}
END_TEST

START_TEST(exists)
{
    const struct tl_tensor_slot one = slot("w", TL_U8, 0, 0, 0);
    ck_assert_int_eq(tl_npy_writer_create(temp_folder, &one, 1, NULL, &writer, &error), TL_ALREADY_EXISTS);
    ck_assert_ptr_nonnull(strstr(error.message, temp_folder));
}
END_TEST

/* 2 PiB, after a file that fits. */
START_TEST(disk_is_full)
{
    const struct tl_tensor_slot slots[] = {slot("v", TL_U8, 1, 5, 0), slot("w", TL_F32, 1, UINT64_C(1) << 49, 0)};
    refuse(slots, 2, TL_RESOURCE_EXHAUSTED, "2251799813685376 bytes");
    const struct tl_tensor_slot deep[] = {slot("a/v", TL_U8, 1, 5, 0), slot("a/b/w", TL_F32, 1, UINT64_C(1) << 49, 0)};
    refuse(deep, 2, TL_RESOURCE_EXHAUSTED, "2251799813685376 bytes");
}
END_TEST

START_TEST(larger_than_any_file)
{
    const struct tl_tensor_slot slots[] = {slot("v", TL_U8, 1, 5, 0), slot("w", TL_U8, 1, INT64_MAX, 0)};
    refuse(slots, 2, TL_RESOURCE_EXHAUSTED, "bytes");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("npy_writer");
    TCase *tcase = tcase_create("npy_writer");
    tcase_add_checked_fixture(tcase, temp_folder_make, teardown);
    tcase_add_test(tcase, read_again);
    tcase_add_test(tcase, exact_bytes);
    tcase_add_test(tcase, as_numpy);
    tcase_add_test(tcase, no_tensors);
    tcase_add_test(tcase, names_refused);
    tcase_add_test(tcase, longest_path);
    tcase_add_test(tcase, twice);
    tcase_add_test(tcase, a_file_where_another_tensor_needs_a_folder);
    tcase_add_test(tcase, too_many_files);
    tcase_add_test(tcase, dtypes);
    tcase_add_test(tcase, shapes);
    tcase_add_test(tcase, exists);
    tcase_add_test(tcase, disk_is_full);
    tcase_add_test(tcase, larger_than_any_file);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
