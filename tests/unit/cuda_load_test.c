// SPDX-License-Identifier: Apache-2.0
/* Finding CUDA, with libraries that are missing, too old, or lack something; the machine's own are never loaded. */
#include <check.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static void *find_library(const char *name, int mode);
static void *find_symbol(void *handle, const char *name);
#define dlopen find_library
#define dlsym find_symbol
#include "tensor/cuda_load.c"
#undef dlopen
#undef dlsym

#include "fakes/cuda/fake_cuda.h"
#include "fakes/run_suite.h"

static struct tl_cuda cuda;
static struct tl_error error;
static const struct fake_cuda *fakes[14];
static int majors_on_disk[4]; /* the libraries that the process does not have yet */
static const char *lacking;   /* the function that every library lacks */

static void *find_library(const char *name, int mode)
{
    void *handle = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    for (unsigned i = 0; !handle && mode == RTLD_NOW && majors_on_disk[i] != 0; i++) {
        char soname[32];
        snprintf(soname, sizeof(soname), "libcudart.so.%d%s", majors_on_disk[i], majors_on_disk[i] == 11 ? ".0" : "");
        if (strcmp(soname, name) == 0) (void)fake_cuda_open(majors_on_disk[i]);
        handle = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    }
    return handle;
}

static void *find_symbol(void *handle, const char *name)
{
    return lacking && strcmp(name, lacking) == 0 ? NULL : dlsym(handle, name);
}

static void expect(enum tl_status status, const char *text)
{
    ck_assert_int_eq(tl_cuda_load(&cuda, &error), status);
    ck_assert_msg(strstr(error.message, text) != NULL, "%s", error.message);
}

START_TEST(what_the_process_has_comes_first)
{
    fakes[_i] = fake_cuda_open(_i);
    majors_on_disk[0] = 13;
    majors_on_disk[1] = 12;
    ck_assert_msg(tl_cuda_load(&cuda, &error) == TL_OK, "%s", error.message);
    ck_assert_int_eq(cuda.version / 1000, _i);
    struct fake_cuda_thread thread;
    void *context = &thread;
    ck_assert_int_eq(cuda.cuCtxGetCurrent(&context), TL_CUDA_OK);
    ck_assert_ptr_null(context);
}
END_TEST

START_TEST(the_newest_is_loaded)
{
    majors_on_disk[0] = 11;
    majors_on_disk[1] = 12;
    ck_assert_msg(tl_cuda_load(&cuda, &error) == TL_OK, "%s", error.message);
    ck_assert_int_eq(cuda.version, 12090);
}
END_TEST

START_TEST(no_library)
{
    expect(TL_FAILED_PRECONDITION, "there is no libcudart");
}
END_TEST

START_TEST(no_libcuda)
{
    fake_cuda_open(_i)->set_machine(0, 0);
    expect(TL_FAILED_PRECONDITION, "there is no NVIDIA driver");
}
END_TEST

START_TEST(a_libcuda_that_is_too_old)
{
    fake_cuda_open(_i)->set_machine(10020, 1);
    expect(TL_FAILED_PRECONDITION, "it supports CUDA 10.2, and libcudart.so.1");
}
END_TEST

START_TEST(an_older_library_for_an_older_libcuda)
{
    fake_cuda_open(13)->set_machine(12090, 1);
    majors_on_disk[0] = 12;
    ck_assert_msg(tl_cuda_load(&cuda, &error) == TL_OK, "%s", error.message);
    ck_assert_int_eq(cuda.version, 12090);
}
END_TEST

START_TEST(no_device)
{
    fake_cuda_open(12)->set_machine(12090, 0);
    expect(TL_NOT_FOUND, "CUDA sees no device");
}
END_TEST

static const char *const needed[] = {
#define NAME(name, parameters) #name,
    TL_CUDA_RUNTIME_FUNCTIONS(NAME)
#undef NAME
        "cudaGetErrorString",
    "cudaGetDriverEntryPoint"};

START_TEST(a_library_that_lacks_a_function)
{
    (void)fake_cuda_open(12);
    lacking = needed[_i];
    expect(TL_FAILED_PRECONDITION, "CUDA 11.3 or later is needed");
    if (strcmp(lacking, "cudaGetDriverEntryPoint") != 0) ck_assert_ptr_nonnull(strstr(error.message, lacking));
}
END_TEST

/* Versions, the count of devices, and each function of the driver. */
START_TEST(a_call_that_fails)
{
    const struct fake_cuda *fake = fake_cuda_open(13);
    bool was_hit = true;
    for (unsigned number = 1; was_hit; number++) {
        fake->fail_call(number, 999, true);
        enum tl_status status = tl_cuda_load(&cuda, &error);
        was_hit = fake->failed_call() != NULL;
        ck_assert_int_eq(status != TL_OK, was_hit);
        ck_assert(was_hit || number > 9);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("cuda_load");
    TCase *tcase = tcase_create("cuda_load");
    tcase_add_loop_test(tcase, what_the_process_has_comes_first, 11, 14);
    tcase_add_test(tcase, the_newest_is_loaded);
    tcase_add_test(tcase, no_library);
    tcase_add_loop_test(tcase, no_libcuda, 11, 14);
    tcase_add_loop_test(tcase, a_libcuda_that_is_too_old, 11, 14);
    tcase_add_test(tcase, an_older_library_for_an_older_libcuda);
    tcase_add_test(tcase, no_device);
    tcase_add_loop_test(tcase, a_library_that_lacks_a_function, 0, TL_ARRAY_COUNT(needed));
    tcase_add_test(tcase, a_call_that_fails);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
