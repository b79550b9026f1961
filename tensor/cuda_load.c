// SPDX-License-Identifier: Apache-2.0
/*
 * Finds CUDA at run time: libcudart by its soname, and the functions of the driver's library through libcudart, which
 * knows where that is.
 *
 * A process may have a libcudart already, for instance that of PyTorch: it is tried first, because its driver is known
 * to do. The others follow, the newest first. One whose driver is too old does not end the search, since the machine
 * may have an older libcudart as well. The error is that of the first one that was found.
 *
 * Nothing is unloaded after a failure: a library that has started threads must not go.
 */
#include "tensor/cuda_load.h"

#include <dlfcn.h>

#include "base/check.h"
#include "base/error.h"

static const char *const libraries[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"};

/* Driver functions are wanted as CUDA 11.3 has them, which every later driver offers. */
#define WANTED_VERSION 11030
#define MAJOR(version) ((version) / 1000)
#define MINOR(version) ((version) % 1000 / 10)

static enum tl_status missing(const char *library, const char *name, struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "%s has no %s; CUDA 11.3 or later is needed", library, name);
}

static enum tl_status find_runtime(void *handle, const char *library, struct tl_cuda *cuda, struct tl_error *ret_error)
{
#define FIND(name, parameters)                                                                                         \
    *(void **)&cuda->name = dlsym(handle, #name);                                                                      \
    if (!cuda->name) return missing(library, #name, ret_error);
    TL_CUDA_RUNTIME_FUNCTIONS(FIND)
    FIND(cudaGetErrorString, )
#undef FIND
    return TL_OK;
}

static enum tl_status too_old(const char *library, int supported, struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                        "the NVIDIA driver is too old: it supports CUDA %d.%d, and %s needs a newer one; update the "
                        "driver or install an older libcudart",
                        MAJOR(supported), MINOR(supported), library);
}

/* Looks whether there are a driver and a device that this library can use. Without a driver that it can use, some
 * releases do not even tell their version. */
static enum tl_status try_devices(struct tl_cuda *cuda, const char *library, struct tl_error *ret_error)
{
    int supported = 0, count = 0;
    if (cuda->cudaDriverGetVersion(&supported) != TL_CUDA_OK || supported == 0)
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "there is no NVIDIA driver (libcuda.so.1), which %s needs; install the driver, or in a "
                            "container pass it through",
                            library);
    tl_cuda_error error = cuda->cudaRuntimeGetVersion(&cuda->version);
    if (error == TL_CUDA_OK) error = cuda->cudaGetDeviceCount(&count);
    if (error == TL_CUDA_TOO_OLD) return too_old(library, supported, ret_error);
    if (error == TL_CUDA_NO_DEVICE || (error == TL_CUDA_OK && count == 0))
        return tl_error_set(ret_error, TL_NOT_FOUND,
                            "CUDA sees no device; look at nvidia-smi and at CUDA_VISIBLE_DEVICES");
    if (error != TL_CUDA_OK)
        return tl_error_set(ret_error, TL_INTERNAL, "CUDA does not start: %s (CUDA error %d)",
                            cuda->cudaGetErrorString(error), error);
    return TL_OK;
}

/* Finds one function of the driver; NULL: there is none. */
static void *find_entry(void *handle, const struct tl_cuda *cuda, const char *name, unsigned version)
{
    tl_cuda_entry_version_fn by_version;
    tl_cuda_entry_4_fn with_4;
    tl_cuda_entry_3_fn with_3;
    *(void **)&by_version = dlsym(handle, "cudaGetDriverEntryPointByVersion");
    *(void **)&with_4 = dlsym(handle, "cudaGetDriverEntryPoint");
    *(void **)&with_3 = dlsym(handle, "cudaGetDriverEntryPoint");
    void *function = NULL;
    int found;
    tl_cuda_error error = TL_CUDA_INVALID_VALUE;
    if (by_version) {
        error = by_version(name, &function, version, 0, &found);
    } else if (with_4 && cuda->version >= 12000) {
        error = with_4(name, &function, 0, &found);
    } else if (with_3) {
        error = with_3(name, &function, 0);
    }
    return error == TL_CUDA_OK ? function : NULL;
}

static enum tl_status find_libcuda(void *handle, const char *library, struct tl_cuda *cuda, struct tl_error *ret_error)
{
#define FIND(name, parameters)                                                                                         \
    *(void **)&cuda->name = find_entry(handle, cuda, #name, WANTED_VERSION);                                           \
    if (!cuda->name) return missing(library, #name, ret_error);
    TL_CUDA_LIBCUDA_FUNCTIONS(FIND)
#undef FIND
    return TL_OK;
}

static enum tl_status try_library(void *handle, const char *library, struct tl_cuda *ret_cuda,
                                  struct tl_error *ret_error)
{
    struct tl_cuda cuda;
    enum tl_status status = find_runtime(handle, library, &cuda, ret_error);
    if (status != TL_OK) return status;
    status = try_devices(&cuda, library, ret_error);
    if (status == TL_OK) status = find_libcuda(handle, library, &cuda, ret_error);
    cuda.library = handle;
    if (status == TL_OK) *ret_cuda = cuda;
    return status;
}

enum tl_status tl_cuda_load(struct tl_cuda *ret_cuda, struct tl_error *ret_error)
{
    static const int modes[] = {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW};
    struct tl_error first = {.code = TL_OK}, error;
    for (size_t i = 0; i < TL_ARRAY_COUNT(modes); i++) {
        for (size_t j = 0; j < TL_ARRAY_COUNT(libraries); j++) {
            void *handle = dlopen(libraries[j], modes[i]);
            if (!handle) continue;
            if (try_library(handle, libraries[j], ret_cuda, &error) == TL_OK) return TL_OK;
            if (first.code == TL_OK) first = error;
        }
    }
    if (first.code != TL_OK) return tl_error_copy(ret_error, &first);
    return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                        "there is no libcudart (libcudart.so.13, .12 or .11.0); install NVIDIA's CUDA runtime, or add "
                        "its folder to LD_LIBRARY_PATH");
}

void tl_cuda_load_direct(const struct tl_cuda *cuda, struct tl_cuda_direct *ret_direct)
{
#define FIND(name, parameters, version) *(void **)&ret_direct->name = find_entry(cuda->library, cuda, #name, version);
    TL_CUDA_DIRECT_FUNCTIONS(FIND)
#undef FIND
}

void tl_cuda_load_sharing(const struct tl_cuda *cuda, struct tl_cuda_sharing *ret_sharing)
{
#define FIND(name, parameters, version) *(void **)&ret_sharing->name = find_entry(cuda->library, cuda, #name, version);
    TL_CUDA_SHARING_FUNCTIONS(FIND)
#undef FIND
}
