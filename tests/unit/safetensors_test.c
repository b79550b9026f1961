// SPDX-License-Identifier: Apache-2.0
/* Reading safetensors: valid files, every wrong header, and lack of memory. */
#include <check.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "tests/fakes/fault_alloc.h"
#include "tests/fakes/temp_folder.h"

#include "fakes/run_suite.h"
#include "tensor/safetensors.c"
#include "tensor/tensor_file.c"

static struct tl_error error;
static struct tl_tensor_list list;

static void teardown(void)
{
    tl_tensor_list_fini(&list);
    temp_folder_remove();
}

/* Makes a file in memory of exactly its size: header length, header, data. The caller frees it. */
static unsigned char *compose(const char *header, size_t header_len, size_t data_len, size_t *ret_len)
{
    unsigned char *bytes = calloc(1, 8 + header_len + data_len);
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)((uint64_t)header_len >> (8 * i));
    memcpy(bytes + 8, header, header_len);
    for (size_t i = 0; i < data_len; i++)
        bytes[8 + header_len + i] = (unsigned char)i;
    *ret_len = 8 + header_len + data_len;
    return bytes;
}

static enum tl_status check_bytes(const char *header, size_t header_len, size_t data_len)
{
    size_t len;
    unsigned char *bytes = compose(header, header_len, data_len, &len);
    error = (struct tl_error){0};
    enum tl_status status = tl_safetensors_check(bytes, len, "the file", &error);
    ck_assert_int_eq(tl_safetensors_check(bytes, len, "the file", NULL), status);
    free(bytes);
    return status;
}

static void accept(const char *header, size_t data_len)
{
    enum tl_status status = check_bytes(header, strlen(header), data_len);
    ck_assert_msg(status == TL_OK, "%s: %s", header, error.message);
}

/* The message must name the file and hold `part`. */
static void refuse(const char *header, size_t data_len, const char *part)
{
    enum tl_status status = check_bytes(header, strlen(header), data_len);
    ck_assert_msg(status == TL_INVALID_ARGUMENT, "%s: %d", header, (int)status);
    ck_assert_msg(strncmp(error.message, "the file: ", 10) == 0, "%s", error.message);
    ck_assert_msg(strstr(error.message, part) != NULL, "%s: %s", header, error.message);
}

#define ENTRY(name, dtype, shape, begin, end)                                                                          \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

START_TEST(accepted)
{
    accept("{}", 0);
    accept("{}      ", 0);
    accept("{" ENTRY("w", "F32", "[2,3]", 0, 24) "}", 24);
    accept("{" ENTRY("w", "F32", "[2,3]", 0, 24) "," ENTRY("b", "BF16", "[1]", 24, 26) "}  ", 26);
    /* Any order in the header, any alignment, tensors without elements anywhere between two. */
    accept("{" ENTRY("b", "F64", "[]", 3, 11) "," ENTRY("a", "U8", "[3]", 0, 3) "}", 11);
    accept("{" ENTRY("a", "U8", "[0]", 0, 0) "," ENTRY("b", "U8", "[2]", 0, 2) "," ENTRY("c", "U8", "[0,7]", 2, 2) "}",
           2);
    accept("{\"__metadata__\":{\"format\":\"pt\",\"x\":\"\"}," ENTRY("a", "BOOL", "[1]", 0, 1) "}", 1);
    accept("{\"__metadata__\":{}}", 0);
    accept("{\"w\":{\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1],\"later\":null}}", 1);
    accept("{" ENTRY("caf\xc3\xa9/\\u20ac", "F4", "[2]", 0, 1) "}", 1);
    accept("{" ENTRY("w", "F6_E2M3", "[4]", 0, 3) "}", 3);
    accept("{" ENTRY("w", "F32", "[9223372036854775807,0]", 0, 0) "}", 0);
    accept("{" ENTRY("w", "U8", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", 0, 1) "}", 1);
}
END_TEST

START_TEST(every_dtype)
{
    for (int i = 1; i < TL_DTYPE_COUNT; i++) {
        enum tl_dtype dtype = (enum tl_dtype)i;
        char header[200];
        unsigned len = tl_dtype_bits(dtype); /* Eight elements. */
        snprintf(header, sizeof(header), "{\"w\":{\"dtype\":\"%s\",\"shape\":[8],\"data_offsets\":[0,%u]}}",
                 tl_dtype_name(dtype), len);
        bool is_there = dtype != TL_STRING && dtype != TL_C128 && dtype != TL_I4 && dtype != TL_U4;
        ck_assert_int_eq(tl_safetensors_has_dtype(dtype), is_there);
        if (is_there) {
            accept(header, len);
        } else {
            refuse(header, len, "dtype");
        }
    }
    ck_assert(!tl_safetensors_has_dtype(TL_DTYPE_INVALID));
}
END_TEST

START_TEST(truncated)
{
    static const unsigned char beginning[] = {3, 0, 0, 0, 0, 0, 0, 0, '{', '}'};
    for (size_t len = 0; len <= sizeof(beginning); len++) {
        /* The memory has exactly as many bytes as it says, so that a sanitizer sees a read beyond. */
        unsigned char *bytes = malloc(len > 0 ? len : 1);
        memcpy(bytes, beginning, len);
        ck_assert_int_eq(tl_safetensors_check(bytes, len, "the file", &error), TL_INVALID_ARGUMENT);
        free(bytes);
    }
    ck_assert_int_eq(tl_safetensors_check(NULL, 0, "the file", &error), TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(header_length_lies)
{
    static const uint64_t lengths[] = {3, 100000000, 100000001, UINT64_MAX, UINT64_MAX - 7, INT64_MAX};
    unsigned char bytes[10] = {0, 0, 0, 0, 0, 0, 0, 0, '{', '}'};
    for (size_t i = 0; i < TL_ARRAY_COUNT(lengths); i++) {
        uint64_t len = htole64(lengths[i]);
        memcpy(bytes, &len, 8);
        ck_assert_int_eq(tl_safetensors_check(bytes, sizeof(bytes), "the file", &error), TL_INVALID_ARGUMENT);
        ck_assert_ptr_nonnull(strstr(error.message, "header of"));
    }
}
END_TEST

START_TEST(not_an_object)
{
    refuse("", 0, "'{'");
    refuse(" {}", 0, "'{'");
    refuse("[]", 0, "'{'");
    refuse("{", 0, "JSON");
    refuse("{}}", 0, "JSON");
    refuse("{} x", 0, "JSON");
    refuse("{\"a\":1,}", 0, "JSON");
    ck_assert_int_eq(check_bytes("{}\0", 3, 0), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(check_bytes("{\"\xff\":{}}", 9, 0), TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(duplicates)
{
    refuse("{" ENTRY("w", "U8", "[1]", 0, 1) "," ENTRY("w", "U8", "[1]", 1, 2) "}", 2, "JSON");
    refuse("{\"w\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "JSON");
}
END_TEST

START_TEST(names)
{
    char header[700];
    refuse("{" ENTRY("", "U8", "[1]", 0, 1) "}", 1, "name");
    refuse("{" ENTRY("a\\u0000b", "U8", "[1]", 0, 1) "}", 1, "JSON");
    for (int len = 512; len <= 513; len++) {
        snprintf(header, sizeof(header), "{\"%0*d\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", len, 0);
        if (len == 512) {
            accept(header, 1);
        } else {
            refuse(header, 1, "name");
        }
    }
}
END_TEST

START_TEST(entries)
{
    refuse("{\"w\":1}", 0, "'w'");
    refuse("{\"w\":[]}", 0, "'w'");
    refuse("{\"w\":{}}", 0, "dtype");
    refuse("{\"w\":{\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "dtype");
    refuse("{" ENTRY("w", "f32", "[1]", 0, 4) "}", 4, "dtype");
    refuse("{" ENTRY("w", "INVALID", "[1]", 0, 4) "}", 4, "dtype");
    refuse("{\"w\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "shape");
    refuse("{" ENTRY("w", "U8", "1", 0, 1) "}", 1, "shape");
    refuse("{" ENTRY("w", "U8", "[1.0]", 0, 1) "}", 1, "dimension");
    refuse("{" ENTRY("w", "U8", "[-1]", 0, 1) "}", 1, "dimension");
    refuse("{" ENTRY("w", "U8", "[\"1\"]", 0, 1) "}", 1, "dimension");
    refuse("{" ENTRY("w", "U8", "[9223372036854775808]", 0, 1) "}", 1, "JSON");
    refuse("{" ENTRY("w", "U8", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", 0, 1) "}", 1, "rank");
}
END_TEST

START_TEST(offsets)
{
    refuse("{\"w\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "data_offsets");
    refuse("{\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "data_offsets");
    refuse("{\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}", 1, "data_offsets");
    refuse("{\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1.0]}}", 1, "data_offsets");
    refuse("{" ENTRY("w", "U8", "[1]", -1, 0) "}", 1, "data_offsets");
    refuse("{" ENTRY("w", "U8", "[1]", 1, 0) "}", 1, "in order");
    refuse("{" ENTRY("w", "U8", "[2]", 0, 2) "}", 1, "within");
    refuse("{" ENTRY("w", "U8", "[1]", 9223372036854775806, 9223372036854775807) "}", 1, "within");
    refuse("{" ENTRY("w", "U8", "[1]", 0, 9223372036854775808) "}", 1, "JSON");
}
END_TEST

START_TEST(sizes)
{
    refuse("{" ENTRY("w", "F32", "[2]", 0, 7) "}", 7, "span");
    refuse("{" ENTRY("w", "F32", "[0]", 0, 4) "}", 4, "span");
    refuse("{" ENTRY("w", "F32", "[4611686018427387904,4611686018427387904]", 0, 0) "}", 0, "2^63-1");
    refuse("{" ENTRY("w", "F32", "[4294967296,4294967296]", 0, 0) "}", 0, "2^63-1");
    refuse("{" ENTRY("w", "C64", "[9223372036854775807]", 0, 8) "}", 8, "2^63-1");
    refuse("{" ENTRY("w", "F4", "[3]", 0, 2) "}", 2, "fill");
    refuse("{" ENTRY("w", "F6_E3M2", "[2]", 0, 2) "}", 2, "fill");
}
END_TEST

START_TEST(tiling)
{
    refuse("{}", 1, "end at byte 0");
    refuse("{" ENTRY("w", "U8", "[1]", 0, 1) "}", 2, "end at byte 1");
    refuse("{" ENTRY("w", "U8", "[1]", 1, 2) "}", 2, "hole");
    refuse("{" ENTRY("v", "U8", "[1]", 0, 1) "," ENTRY("w", "U8", "[1]", 2, 3) "}", 3, "hole");
    refuse("{" ENTRY("v", "U8", "[2]", 0, 2) "," ENTRY("w", "U8", "[2]", 1, 3) "}", 3, "overlaps");
    refuse("{" ENTRY("v", "U8", "[2]", 0, 2) "," ENTRY("w", "U8", "[2]", 0, 2) "}", 2, "overlaps");
    /* A tensor without elements lies inside another. */
    refuse("{" ENTRY("v", "U8", "[2]", 0, 2) "," ENTRY("w", "U8", "[0]", 1, 1) "}", 2, "overlaps");
}
END_TEST

START_TEST(meta_data)
{
    refuse("{\"__metadata__\":[]}", 0, "__metadata__");
    accept("{\"__metadata__\":null}", 0);
    accept("{\"__metadata__\":{\"a\":\"b\\u0000c\"}}", 0);
    refuse("{\"__metadata__\":{\"a\":1}}", 0, "__metadata__");
    refuse("{\"__metadata__\":{\"a\":{}}}", 0, "__metadata__");
}
END_TEST

/* These need much memory for few bytes, or a deep stack. */
START_TEST(bounded)
{
    size_t len = 9000000;
    char *header = malloc(len);
    memcpy(header, "{\"a\":[", 6);
    for (size_t i = 6; i < len; i++)
        header[i] = i % 2 ? ',' : '1';
    ck_assert_int_eq(check_bytes(header, len, 0), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "values"));
    memset(header + 5, '[', len - 5);
    ck_assert_int_eq(check_bytes(header, len, 0), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "depth"));
    free(header);
}
END_TEST

/* What only looks like many values: a long text. */
START_TEST(commas_in_texts)
{
    static const char begin[] = "{\"__metadata__\":{\"a\":\"\\\"", end[] = "\"}}";
    size_t len = 9000000;
    char *header = malloc(len);
    memset(header, ',', len);
    memcpy(header, begin, strlen(begin));
    memcpy(header + len - strlen(end), end, strlen(end));
    ck_assert_msg(check_bytes(header, len, 0) == TL_OK, "%s", error.message);
    free(header);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- reading -- */

static const char *write_example(void)
{
    static const char header[] =
        "{" ENTRY("b", "F32", "[2]", 3, 11) "," ENTRY("a", "U8", "[3]", 0, 3) "," ENTRY("c", "I64", "[0]", 11, 11) "}";
    size_t len;
    unsigned char *bytes = compose(header, strlen(header), 11, &len);
    temp_write(temp_path("x.safetensors"), bytes, len);
    free(bytes);
    return temp_path("x.safetensors");
}

START_TEST(read_file)
{
    static const char *const names[] = {"a", "b", "c"};
    ck_assert_int_eq(tl_safetensors_read(write_example(), &list, &error), TL_OK);
    ck_assert_uint_eq(list.count, 3);
    for (size_t i = 0; i < 3; i++) {
        ck_assert_str_eq(list.items[i].name, names[i]);
        ck_assert(!tl_tensor_is_writable(list.items[i].tensor));
    }
    struct tl_tensor *b = list.items[1].tensor;
    ck_assert_int_eq(tl_tensor_dtype(b), TL_F32);
    ck_assert_uint_eq(tl_tensor_rank(b), 1);
    ck_assert_uint_eq(tl_tensor_dims(b)[0], 2);
    ck_assert_mem_eq(tl_tensor_data(b), "\x03\x04\x05\x06\x07\x08\x09\x0a", 8);
    /* Nothing was copied: the second lies behind the first. */
    ck_assert_ptr_eq(tl_tensor_data(b), (char *)tl_tensor_data(list.items[0].tensor) + 3);
    ck_assert_uint_eq(tl_tensor_size_bytes(list.items[2].tensor), 0);
}
END_TEST

START_TEST(tensors_keep_the_file)
{
    ck_assert_int_eq(tl_safetensors_read(write_example(), &list, &error), TL_OK);
    struct tl_tensor *a = tl_tensor_get(list.items[0].tensor);
    tl_tensor_list_fini(&list);
    ck_assert_ptr_null(list.items);
    unlink(temp_path("x.safetensors"));
    ck_assert_int_eq(tl_tensor_check_readable(a, 0, 3, &error), TL_OK);
    ck_assert_mem_eq(tl_tensor_data(a), "\x00\x01\x02", 3);
    tl_tensor_put(a);
}
END_TEST

START_TEST(tensors_are_guarded)
{
    ck_assert_int_eq(tl_safetensors_read(write_example(), &list, &error), TL_OK);
    ck_assert_int_eq(truncate(temp_path("x.safetensors"), 100), 0);
    ck_assert_int_eq(tl_tensor_check_readable(list.items[1].tensor, 0, 8, &error), TL_DATA_LOSS);
    ck_assert_ptr_nonnull(strstr(error.message, "x.safetensors"));
}
END_TEST

START_TEST(not_read)
{
    struct tl_tensor_list untouched = {.count = 77};
    ck_assert_int_eq(tl_safetensors_read(temp_path("none"), &untouched, &error), TL_NOT_FOUND);
    ck_assert_int_eq(tl_safetensors_read(temp_folder, &untouched, &error), TL_INVALID_ARGUMENT);
    temp_write(temp_path("bad"), "", 0);
    ck_assert_int_eq(tl_safetensors_read(temp_path("bad"), &untouched, &error), TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, temp_path("bad")));
    ck_assert_uint_eq(untouched.count, 77);
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

/* The JSON parser takes some failed allocations for errors in the text, and the two cannot be told apart. */
static void walk_allocations(bool is_json)
{
    const char *path = write_example();
    for (unsigned n = 1;; n++) {
        fault_arm(n);
        enum tl_status status = tl_safetensors_read(path, &list, &error);
        if (!fault_was_hit()) {
            ck_assert_uint_gt(n, (is_json ? 20U : 5U));
            ck_assert_int_eq(status, TL_OK);
            break;
        }
        ck_assert_msg(status == TL_RESOURCE_EXHAUSTED || (is_json && status == TL_INVALID_ARGUMENT), "%u: %s", n,
                      error.message);
        ck_assert_ptr_null(list.items);
    }
}

START_TEST(out_of_memory)
{
    walk_allocations(false);
}
END_TEST

START_TEST(out_of_memory_for_json)
{
    json_set_alloc_funcs(json_malloc, json_free);
    walk_allocations(true);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("safetensors");
    TCase *tcase = tcase_create("safetensors");
    tcase_add_checked_fixture(tcase, temp_folder_make, teardown);
    tcase_add_test(tcase, accepted);
    tcase_add_test(tcase, every_dtype);
    tcase_add_test(tcase, truncated);
    tcase_add_test(tcase, header_length_lies);
    tcase_add_test(tcase, not_an_object);
    tcase_add_test(tcase, duplicates);
    tcase_add_test(tcase, names);
    tcase_add_test(tcase, entries);
    tcase_add_test(tcase, offsets);
    tcase_add_test(tcase, sizes);
    tcase_add_test(tcase, tiling);
    tcase_add_test(tcase, meta_data);
    tcase_add_test(tcase, bounded);
    tcase_add_test(tcase, commas_in_texts);
    tcase_add_test(tcase, read_file);
    tcase_add_test(tcase, tensors_keep_the_file);
    tcase_add_test(tcase, tensors_are_guarded);
    tcase_add_test(tcase, not_read);
    tcase_add_test(tcase, out_of_memory);
    tcase_add_test(tcase, out_of_memory_for_json);
    tcase_set_timeout(tcase, 60);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
