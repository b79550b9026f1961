// SPDX-License-Identifier: Apache-2.0
/* Allocations of devices, as RDMA cards register them. */
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

static void *find_symbol(void *handle, const char *name);
#define dlsym find_symbol
#include "tensor/cuda_load.c"
#undef dlsym

#include "fakes/device_case.h"
#include "fakes/run_suite.h"
#include "tensor/device.h"

static struct tl_error error;
static struct tl_device_allocation allocation;
static const char *lacking; /* the function that libcuda lacks */

static int no_entry(const char *name, void **ret_function, unsigned long long flags, int *ret_found)
{
    int (*real)(const char *, void **, unsigned long long, int *);
    *(void **)&real = dlsym(dlopen("libcudart.so.12", RTLD_NOW | RTLD_NOLOAD), "cudaGetDriverEntryPoint");
    return lacking && strcmp(name, lacking) == 0 ? 500 : real(name, ret_function, flags, ret_found);
}

static void *find_symbol(void *handle, const char *name)
{
    int (*function)(const char *, void **, unsigned long long, int *) = no_entry;
    return strcmp(name, "cudaGetDriverEntryPoint") == 0 ? *(void **)&function : dlsym(handle, name);
}

static enum tl_status find_of(const struct tl_tensor *tensor)
{
    return tl_device_find_allocation(tl_tensor_device(tensor), tl_tensor_data(tensor), tl_tensor_size_bytes(tensor),
                                     &allocation, &error);
}

static void expect_text(const char *text, const char *part)
{
    ck_assert_msg(strstr(text, part) != NULL, "%s", text);
}

/* A caller that asks for a part gets all of it, in whole pages, and owns the file. */
START_TEST(the_whole_allocation)
{
    const uint64_t part_bytes = 100, size_bytes = 10000;
    void *data = cuda->allocate(0, size_bytes);
    struct tl_tensor_view view = view_of(gpu0, (char *)data + 5000, &part_bytes);
    struct tl_tensor *part = NULL;
    ck_assert_int_eq(tl_tensor_wrap(&view, &part, &error), TL_OK);
    ck_assert(!cuda->is_synchronous(data));
    ck_assert_msg(find_of(part) == TL_OK, "%s", error.message);
    ck_assert_ptr_eq(allocation.address, data);
    ck_assert_uint_eq(allocation.len_bytes, size_bytes);
    ck_assert_uint_eq(allocation.offset_bytes, 0);
    ck_assert_int_ge(fcntl(allocation.file, F_GETFD), 0);
    ck_assert_int_eq(close(allocation.file), 0);
    ck_assert(cuda->is_synchronous(data));
    tl_tensor_put(part);
    cuda->free(data);
}
END_TEST

START_TEST(more_than_one_allocation)
{
    void *data = cuda->allocate(0, 4096);
    ck_assert_int_eq(tl_device_find_allocation(gpu0, data, 4097, &allocation, &error), TL_INVALID_ARGUMENT);
    expect_text(error.message, "more than one allocation");
    cuda->free(data);
}
END_TEST

START_TEST(without_a_file)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 10);
    cuda->set_direct(false, true);
    ck_assert_int_eq(find_of(tensor), TL_OK);
    ck_assert_int_eq(allocation.file, -1);
    expect_text(allocation.why_no_file, "its driver has no dma-buf");
    ck_assert(cuda->is_synchronous(tl_tensor_data(tensor)));
    cuda->set_direct(false, false);
    ck_assert_int_eq(find_of(tensor), TL_UNIMPLEMENTED);
    expect_text(error.message, "no RDMA card can access the memory of gpu:0");
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(an_older_cuda)
{
    static const struct {
        const char *lacking, *text;
        enum tl_status status;
    } cases[] = {
        {"cuMemGetHandleForAddressRange", "came with CUDA 11.7", TL_OK},
        {"cuMemGetAddressRange", "lacks a function", TL_UNIMPLEMENTED},
        {"cuPointerSetAttribute", "lacks a function", TL_UNIMPLEMENTED},
        {"cuDeviceGetAttribute", "lacks a function", TL_UNIMPLEMENTED},
    };
    struct tl_tensor *tensor = bytes_on(gpu0, 10);
    lacking = cases[_i].lacking;
    ck_assert_int_eq(find_of(tensor), cases[_i].status);
    expect_text(cases[_i].status == TL_OK ? allocation.why_no_file : error.message, cases[_i].text);
    lacking = NULL;
    tl_tensor_put(tensor);
}
END_TEST

static unsigned count_files(void)
{
    unsigned count = 0;
    for (int file = 0; file < 256; file++)
        count += fcntl(file, F_GETFD) >= 0;
    return count;
}

/* Each call fails once: that is an error, or the reason why there is no file; no file is left, and the next try works.
 */
START_TEST(a_call_fails)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 10);
    bool was_hit = true;
    unsigned number = 0;
    ck_assert_int_eq(find_of(tensor), TL_OK);
    close(allocation.file);
    while (was_hit) {
        unsigned files = count_files();
        cuda->fail_call(++number, 999, false);
        enum tl_status status = find_of(tensor);
        was_hit = cuda->failed_call() != NULL;
        /* Then the whole context is made synchronous. */
        bool is_replaced = was_hit && strcmp(cuda->failed_call(), "cuPointerSetAttribute") == 0;
        cuda->fail_call(0, 0, false);
        ck_assert(!was_hit || is_replaced || status != TL_OK ||
                  (allocation.file < 0 && allocation.why_no_file[0] != '\0'));
        if (status == TL_OK && allocation.file >= 0) close(allocation.file);
        ck_assert_uint_eq(count_files(), files);
        ck_assert_int_eq(find_of(tensor), TL_OK);
        ck_assert_int_ge(allocation.file, 0);
        close(allocation.file);
    }
    ck_assert_uint_gt(number, 5);
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(a_lost_device)
{
    struct tl_tensor *tensor = bytes_on(gpu0, 10);
    cuda->break_device(0, 700);
    ck_assert_int_eq(find_of(tensor), TL_FAILED_PRECONDITION);
    expect_text(error.message, "gpu:0 is lost");
    tl_tensor_put(tensor);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("device_direct");
    TCase *tcase = tcase_create("device_direct");
    tcase_add_checked_fixture(tcase, setup_cuda, NULL);
    tcase_add_test(tcase, the_whole_allocation);
    tcase_add_test(tcase, more_than_one_allocation);
    tcase_add_test(tcase, without_a_file);
    tcase_add_loop_test(tcase, an_older_cuda, 0, 4);
    tcase_add_test(tcase, a_call_fails);
    tcase_add_test(tcase, a_lost_device);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
