// SPDX-License-Identifier: Apache-2.0
/* Writing safetensors: written files can be read, alignment, what the format cannot hold, full disks, and lack of
 * memory. */
#include <check.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "tests/fakes/fault_alloc.h"
#include "tests/fakes/temp_folder.h"

#include "fakes/run_suite.h"
#include "tensor/safetensors_writer.c"

static struct tl_error error;
static struct tl_tensor_writer *writer;
static struct tl_tensor_list list;

static void teardown(void)
{
    tl_tensor_writer_destroy(writer);
    tl_tensor_list_fini(&list);
    temp_folder_remove();
}

static struct tl_tensor_slot slot(const char *name, enum tl_dtype dtype, uint64_t count)
{
    struct tl_tensor_slot made = {.name = name, .meta_data = {.dtype = dtype, .shape = {1, {count}}}};
    ck_assert_int_eq(tl_shape_size_bytes(dtype, &made.meta_data.shape, &made.meta_data.size_bytes, &error), TL_OK);
    return made;
}

static void create(const struct tl_tensor_slot *slots, size_t count)
{
    enum tl_status status = tl_safetensors_writer_create(temp_path("out"), slots, count, NULL, NULL, &writer, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
}

static void commit_and_read(void)
{
    ck_assert_int_eq(tl_tensor_writer_commit(writer, &error), TL_OK);
    enum tl_status status = tl_safetensors_read(temp_path("out"), &list, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
}

static struct tl_tensor *find(const char *name)
{
    for (size_t i = 0; i < list.count; i++)
        if (strcmp(list.items[i].name, name) == 0) return list.items[i].tensor;
    ck_abort_msg("%s is not there", name);
    return NULL;
}

START_TEST(read_again)
{
    const struct tl_tensor_slot slots[] = {
        slot("bytes", TL_U8, 3),
        slot("floats", TL_F32, 5),
        slot("none", TL_F64, 0),
        {.name = "empty", .meta_data = {.dtype = TL_U8, .shape = {3, {0, UINT64_C(1) << 40, UINT64_C(1) << 40}}}},
        slot("packed", TL_F6_E2M3, 4),
        slot("caf\xc3\xa9 \"quoted\"\n", TL_BF16, 1),
        {.name = "scalar", .meta_data = {.dtype = TL_C64, .size_bytes = 8}},
        {.name = "matrix", .meta_data = {.dtype = TL_I64, .shape = {2, {2, 3}}, .size_bytes = 48}},
    };
    create(slots, TL_ARRAY_COUNT(slots));
    for (size_t i = 0; i < TL_ARRAY_COUNT(slots); i++) {
        struct tl_tensor *tensor = tl_tensor_writer_destination(writer, i);
        ck_assert(tl_meta_data_is_equal(tl_tensor_meta_data(tensor), &slots[i].meta_data));
        memset(tl_tensor_data(tensor), (int)i + 1, tl_tensor_size_bytes(tensor));
        tl_tensor_put(tensor);
    }
    commit_and_read();
    ck_assert_uint_eq(list.count, TL_ARRAY_COUNT(slots));
    for (size_t i = 0; i < TL_ARRAY_COUNT(slots); i++) {
        struct tl_tensor *tensor = find(slots[i].name);
        ck_assert(tl_meta_data_is_equal(tl_tensor_meta_data(tensor), &slots[i].meta_data));
        const unsigned char *data = tl_tensor_data(tensor);
        for (uint64_t k = 0; k < tl_tensor_size_bytes(tensor); k++)
            ck_assert_uint_eq(data[k], i + 1);
        /* Every element lies at a multiple of its size. */
        unsigned bits = tl_dtype_bits(slots[i].meta_data.dtype);
        if (bits >= 8) ck_assert_uint_eq((uintptr_t)data % (bits / 8), 0);
    }
}
END_TEST

START_TEST(exact_bytes)
{
    static const char header[] = "{\"w\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}";
    const struct tl_tensor_slot one = slot("w", TL_U8, 2);
    char bytes[200];
    create(&one, 1);
    struct tl_tensor *tensor = tl_tensor_writer_destination(writer, 0);
    memcpy(tl_tensor_data(tensor), "ab", 2);
    tl_tensor_put(tensor);
    commit_and_read();
    int fd = open(temp_path("out"), O_RDONLY);
    ck_assert_int_eq(read(fd, bytes, sizeof(bytes)), 66);
    close(fd);
    ck_assert_mem_eq(bytes, "\x38\0\0\0\0\0\0\0", 8);
    ck_assert_mem_eq(bytes + 8, header, sizeof(header) - 1);
    ck_assert_mem_eq(bytes + 8 + sizeof(header) - 1, "  ", 2);
    ck_assert_mem_eq(bytes + 64, "ab", 2);
}
END_TEST

START_TEST(annotations_come_first)
{
    static const char header[] = "{\"__metadata__\":{\"caf\xc3\xa9\":\"\",\"format\":\"pt\\n\"},\"w\":{";
    static const struct tl_annotation pairs[] = {{"format", "pt\n"}, {"caf\xc3\xa9", ""}};
    const struct tl_tensor_slot one = slot("w", TL_U8, 2);
    struct tl_annotations *annotations;
    char bytes[200];
    ck_assert_int_eq(tl_annotations_create(pairs, 2, &annotations, &error), TL_OK);
    ck_assert_int_eq(tl_safetensors_writer_create(temp_path("out"), &one, 1, annotations, NULL, &writer, &error),
                     TL_OK);
    commit_and_read();
    int fd = open(temp_path("out"), O_RDONLY);
    ck_assert_int_ge(read(fd, bytes, sizeof(bytes)), 128);
    close(fd);
    ck_assert_mem_eq(bytes + 8, header, sizeof(header) - 1);
    ck_assert_int_eq(tl_annotations_compare(tl_tensor_annotations(find("w")), annotations), 0);
    tl_annotations_put(annotations);
}
END_TEST

START_TEST(no_tensors)
{
    create(NULL, 0);
    commit_and_read();
    ck_assert_uint_eq(list.count, 0);
}
END_TEST

START_TEST(many_tensors)
{
    enum { COUNT = 2000 };
    static char names[COUNT][32];
    static struct tl_tensor_slot slots[COUNT];
    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof(names[i]), "layer.%u", i);
        slots[i] = slot(names[i], TL_I32, i % 3);
    }
    create(slots, COUNT);
    commit_and_read();
    ck_assert_uint_eq(list.count, COUNT);
}
END_TEST

static void refuse(const struct tl_tensor_slot *slots, size_t count, enum tl_status status, const char *part)
{
    writer = NULL;
    ck_assert_int_eq(tl_safetensors_writer_create(temp_path("out"), slots, count, NULL, NULL, &writer, &error), status);
    ck_assert_ptr_null(writer);
    ck_assert_msg(strstr(error.message, part) != NULL, "%s", error.message);
    ck_assert_uint_eq(temp_entry_count(temp_folder), 0);
}

START_TEST(refused)
{
    const struct tl_tensor_slot twice[] = {slot("w", TL_U8, 1), slot("v", TL_U8, 1), slot("w", TL_F32, 1)};
    refuse(twice, 3, TL_INVALID_ARGUMENT, "'w'");
    static const enum tl_dtype dtypes[] = {TL_C128, TL_I4, TL_U4};
    for (size_t i = 0; i < TL_ARRAY_COUNT(dtypes); i++) {
        const struct tl_tensor_slot bad = slot("w", dtypes[i], 2);
        refuse(&bad, 1, TL_INVALID_ARGUMENT, "'w'");
        refuse(&bad, 1, TL_INVALID_ARGUMENT, "leave it out with --exclude 'w'");
        ck_assert_int_eq(strstr(error.message, "--format npy") != NULL, dtypes[i] == TL_C128);
    }
    /* The reference implementation reads nothing of such a file. */
    const uint64_t large = UINT64_C(1) << 40;
    const struct tl_tensor_slot overflows = {.name = "w",
                                             .meta_data = {.dtype = TL_U8, .shape = {3, {large, large, 0}}}};
    refuse(&overflows, 1, TL_INVALID_ARGUMENT,
           "tensor 'w': a safetensors file with the shape [1099511627776, 1099511627776, 0]");
    refuse(&overflows, 1, TL_INVALID_ARGUMENT, "leave it out with --exclude 'w'");
    const struct tl_tensor_slot strings = {.name = "w",
                                           .meta_data = {.dtype = TL_STRING, .shape = {1, {1}}, .size_bytes = 8}};
    refuse(&strings, 1, TL_INVALID_ARGUMENT, "STRING");
    const struct tl_tensor_slot dead = {.name = "w", .meta_data.is_dead = true};
    refuse(&dead, 1, TL_INVALID_ARGUMENT, "dead");
    const struct tl_tensor_slot half = slot("w", TL_F4, 3);
    refuse(&half, 1, TL_INVALID_ARGUMENT, "fill");
    refuse(&half, 1, TL_INVALID_ARGUMENT, "leave it out with --exclude 'w'");
    const struct tl_tensor_slot reserved = slot("__metadata__", TL_U8, 1);
    refuse(&reserved, 1, TL_INVALID_ARGUMENT, "__metadata__");
    const struct tl_tensor_slot unnamed = slot("", TL_U8, 1);
    refuse(&unnamed, 1, TL_INVALID_ARGUMENT, "name");
    const struct tl_tensor_slot huge[] = {slot("v", TL_U8, INT64_MAX), slot("w", TL_U8, 1)};
    refuse(huge, 2, TL_OUT_OF_RANGE, "2^63-1");
}
END_TEST

/* 2 PiB is more than any disk here has. */
START_TEST(disk_is_full)
{
    const struct tl_tensor_slot huge = slot("w", TL_F32, UINT64_C(1) << 49);
    refuse(&huge, 1, TL_RESOURCE_EXHAUSTED, "2251799813685");
}
END_TEST

START_TEST(target_is_a_folder)
{
    const struct tl_tensor_slot one = slot("w", TL_U8, 1);
    ck_assert_int_eq(tl_safetensors_writer_create(temp_folder, &one, 1, NULL, NULL, &writer, &error),
                     TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, temp_folder));
}
END_TEST

/* So many tensors, with names of so many digits, do not go into one file. */
static void refuse_many(size_t count, size_t digit_count, const char *part)
{
    struct tl_tensor_slot *slots = calloc(count, sizeof(slots[0]));
    char *names = malloc(count * (digit_count + 1));
    for (size_t i = 0; i < count; i++) {
        char *name = names + i * (digit_count + 1);
        snprintf(name, digit_count + 1, "%0*zu", (int)digit_count, i);
        slots[i] = slot(name, TL_U8, 0);
    }
    refuse(slots, count, TL_INVALID_ARGUMENT, part);
    free(names);
    free(slots);
}

START_TEST(header_too_long)
{
    refuse_many(190000, 512, "bytes, at most");
}
END_TEST

/* Such a file could not be read again. */
START_TEST(header_of_too_many_values)
{
    refuse_many(470000, 6, "values, at most");
}
END_TEST

static void *json_malloc(size_t len)
{
    return fault_malloc(len);
}

static void json_free(void *memory)
{
    free(memory);
}

START_TEST(out_of_memory)
{
    const struct tl_tensor_slot slots[] = {slot("v", TL_U8, 3), slot("w", TL_F32, 2)};
    const struct tl_annotation pair = {"format", "pt"};
    struct tl_annotations *annotations;
    ck_assert_int_eq(tl_annotations_create(&pair, 1, &annotations, &error), TL_OK);
    json_set_alloc_funcs(json_malloc, json_free);
    for (unsigned n = 1;; n++) {
        writer = NULL;
        fault_arm(n);
        enum tl_status status =
            tl_safetensors_writer_create(temp_path("out"), slots, 2, annotations, NULL, &writer, &error);
        if (!fault_was_hit()) {
            ck_assert_uint_gt(n, 20);
            ck_assert_int_eq(status, TL_OK);
            tl_annotations_put(annotations);
            break;
        }
        ck_assert_msg(status == TL_RESOURCE_EXHAUSTED, "%u: %s", n, error.message);
        ck_assert_ptr_null(writer);
        ck_assert_uint_eq(temp_entry_count(temp_folder), 0);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("safetensors_writer");
    TCase *tcase = tcase_create("safetensors_writer");
    tcase_add_checked_fixture(tcase, temp_folder_make, teardown);
    tcase_add_test(tcase, read_again);
    tcase_add_test(tcase, exact_bytes);
    tcase_add_test(tcase, annotations_come_first);
    tcase_add_test(tcase, no_tensors);
    tcase_add_test(tcase, many_tensors);
    tcase_add_test(tcase, refused);
    tcase_add_test(tcase, disk_is_full);
    tcase_add_test(tcase, target_is_a_folder);
    tcase_add_test(tcase, header_too_long);
    tcase_add_test(tcase, header_of_too_many_values);
    tcase_add_test(tcase, out_of_memory);
    tcase_set_timeout(tcase, 60);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
