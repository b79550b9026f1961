// SPDX-License-Identifier: Apache-2.0
#include <check.h>
#include <dlfcn.h>
#include <stdio.h>

#include "fakes/cuda/fake_cuda.h"

const char *fake_cuda_folder(int major)
{
    static char folder[512];
    snprintf(folder, sizeof(folder), "%s/%d", FAKE_CUDA_FOLDER, major);
    return folder;
}

const struct fake_cuda *fake_cuda_open(int major)
{
    char path[600];
    snprintf(path, sizeof(path), "%s/libcudart.so.%s", fake_cuda_folder(major),
             major == 11   ? "11.0"
             : major == 12 ? "12"
                           : "13");
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    ck_assert_msg(handle != NULL, "%s", dlerror());
    const struct fake_cuda *table = dlsym(handle, "fake_cuda_table");
    ck_assert_ptr_nonnull(table);
    return table;
}
