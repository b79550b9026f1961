// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/libcuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#define BLOCKS 16u /* they are resident at the same time, and leave space on the GPU for others */
#define THREADS 256u

/* The text of kernels.ptx, which ends with a zero byte. */
extern const char gpu_kernels[];
__asm__(".section .rodata\n"
        ".global gpu_kernels\n"
        "gpu_kernels:\n"
        ".incbin \"" GPU_KERNELS "\"\n"
        ".byte 0\n"
        ".text\n");

static struct libcuda calls;
static int device_count;
static void *modules[16];
static int current;

const struct libcuda *gpu_calls(void)
{
    return &calls;
}

int gpu_count(void)
{
    return device_count;
}

void gpu_must(int error, const char *what)
{
    if (error == 0) return;
    printf("FAIL   %s: CUDA error %d\n", what, error);
    exit(EXIT_FAILURE);
}

const char *gpu_open(void)
{
    static char missing[160];
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return "there is no libcuda.so.1: the NVIDIA driver is not installed here, or not passed through";
#define FIND(name, parameters)                                                                                         \
    *(void **)&calls.name = dlsym(library, #name);                                                                     \
    if (!calls.name) {                                                                                                 \
        snprintf(missing, sizeof(missing), "libcuda.so.1 has no %s", #name);                                           \
        return missing;                                                                                                \
    }
    LIBCUDA_FUNCTIONS(FIND)
#undef FIND
    int error = calls.cuInit(0);
    if (error == 0) error = calls.cuDeviceGetCount(&device_count);
    if (error == 0 && device_count > 0) return NULL;
    snprintf(missing, sizeof(missing), "libcuda.so.1 shows no device (CUDA error %d)", error);
    return missing;
}

void gpu_use(int device)
{
    int handle;
    void *context;
    GPU_CALL(cuDeviceGet, &handle, device);
    GPU_CALL(cuDevicePrimaryCtxRetain, &context, handle);
    GPU_CALL(cuCtxSetCurrent, context);
    current = device;
}

/* ------------------------------------------------------------------------------------------------------ memory -- */

void *gpu_allocate(size_t size_bytes)
{
    unsigned long long memory;
    GPU_CALL(cuMemAlloc_v2, &memory, size_bytes);
    return (void *)(uintptr_t)memory;
}

void gpu_free(void *memory)
{
    GPU_CALL(cuMemFree_v2, (uintptr_t)memory);
}

size_t gpu_free_bytes(void)
{
    size_t free_bytes, total_bytes;
    GPU_CALL(cuMemGetInfo_v2, &free_bytes, &total_bytes);
    return free_bytes;
}

void *gpu_pinned(size_t size_bytes)
{
    void *memory;
    GPU_CALL(cuMemHostAlloc, &memory, size_bytes, 0);
    return memory;
}

void gpu_to_device(void *to, const void *from, size_t len_bytes)
{
    GPU_CALL(cuMemcpyHtoD_v2, (uintptr_t)to, from, len_bytes);
}

void gpu_to_host(void *to, const void *from, size_t len_bytes)
{
    GPU_CALL(cuMemcpyDtoH_v2, to, (uintptr_t)from, len_bytes);
}

/* --------------------------------------------------------------------------------------------------- streams -- */

void *gpu_stream(void)
{
    void *stream;
    GPU_CALL(cuStreamCreate, &stream, LIBCUDA_NON_BLOCKING);
    return stream;
}

bool gpu_is_busy(void *stream)
{
    int error = calls.cuStreamQuery(stream);
    if (error != LIBCUDA_NOT_READY) gpu_must(error, "cuStreamQuery");
    return error == LIBCUDA_NOT_READY;
}

void gpu_wait(void *stream)
{
    GPU_CALL(cuStreamSynchronize, stream);
}

static void launch(const char *name, void *stream, void **parameters)
{
    void *function;
    if (!modules[current]) GPU_CALL(cuModuleLoadData, &modules[current], gpu_kernels);
    GPU_CALL(cuModuleGetFunction, &function, modules[current], name);
    GPU_CALL(cuLaunchKernel, function, BLOCKS, 1, 1, THREADS, 1, 1, 0, stream, parameters, NULL);
}

void gpu_launch_fill(void *stream, void *to, size_t words, uint32_t seed, uint64_t delay_ns)
{
    uint64_t word_count = words;
    launch("fill_late", stream, (void *[]){&to, &word_count, &delay_ns, &seed});
}

void gpu_launch_copy(void *stream, void *to, const void *from, size_t words, uint64_t delay_ns)
{
    uint64_t word_count = words;
    launch("copy_late", stream, (void *[]){&to, &word_count, &delay_ns, &from});
}

uint32_t gpu_word(uint32_t seed, size_t index)
{
    return (uint32_t)index * 0x9e3779b1 + seed;
}
