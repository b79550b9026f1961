// SPDX-License-Identifier: Apache-2.0
/*
 * What the checks on a GPU do themselves, without tensorlane: memory, streams and kernels of the program. It calls
 * libcuda.so.1 in our own declarations, which tests/structure/cuda.py compares with NVIDIA's headers, so that building
 * needs no header of NVIDIA. Kernels are PTX, which libcuda compiles for the GPU.
 *
 * A call that fails prints a line and ends the process with 1: a check cannot go on without it.
 */
#ifndef TESTS_GPU_LIBCUDA_H
#define TESTS_GPU_LIBCUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* clang-format off */
/* X(name, parameters): each returns an error, 0 for success. */
#define LIBCUDA_FUNCTIONS(X)                                                                                           \
    X(cuInit, (unsigned flags))                                                                                        \
    X(cuDriverGetVersion, (int *ret_version))                                                                          \
    X(cuDeviceGetCount, (int *ret_count))                                                                              \
    X(cuDeviceGet, (int *ret_device, int index))                                                                       \
    X(cuDeviceGetName, (char *ret_name, int capacity, int device))                                                     \
    X(cuDevicePrimaryCtxRetain, (void **ret_context, int device))                                                      \
    X(cuCtxSetCurrent, (void *context))                                                                                \
    X(cuModuleLoadData, (void **ret_module, const void *image))                                                        \
    X(cuModuleGetFunction, (void **ret_function, void *module, const char *name))                                      \
    X(cuLaunchKernel, (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,            \
                       unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **parameters,     \
                       void **extra))                                                                                  \
    X(cuStreamCreate, (void **ret_stream, unsigned flags))                                                             \
    X(cuStreamQuery, (void *stream))                                                                                   \
    X(cuStreamSynchronize, (void *stream))                                                                             \
    X(cuMemGetInfo_v2, (size_t *ret_free, size_t *ret_total))                                                          \
    X(cuMemAlloc_v2, (unsigned long long *ret_memory, size_t size_bytes))                                              \
    X(cuMemFree_v2, (unsigned long long memory))                                                                       \
    X(cuMemHostAlloc, (void **ret_memory, size_t size_bytes, unsigned flags))                                          \
    X(cuMemcpyHtoD_v2, (unsigned long long to, const void *from, size_t len_bytes))                                    \
    X(cuMemcpyDtoH_v2, (void *to, unsigned long long from, size_t len_bytes))                                          \
    X(cuMemcpyDtoD_v2, (unsigned long long to, unsigned long long from, size_t len_bytes))
/* clang-format on */

enum {
    LIBCUDA_NON_BLOCKING = 1, /* CU_STREAM_NON_BLOCKING */
    LIBCUDA_NOT_READY = 600,  /* CUDA_ERROR_NOT_READY */
};

struct libcuda {
#define LIBCUDA_FIELD(name, parameters) int(*name) parameters;
    LIBCUDA_FUNCTIONS(LIBCUDA_FIELD)
#undef LIBCUDA_FIELD
};

/* Loads libcuda. Returns NULL, or what is missing. */
const char *gpu_open(void);
const struct libcuda *gpu_calls(void);
int gpu_count(void);
/* Makes a device current on this thread. */
void gpu_use(int device);

/* Prints and ends the process unless error is 0. */
void gpu_must(int error, const char *what);
#define GPU_CALL(name, ...) gpu_must(gpu_calls()->name(__VA_ARGS__), #name)

/* Memory of the current device, in words of 32 bits. */
void *gpu_allocate(size_t size_bytes);
void gpu_free(void *memory);
size_t gpu_free_bytes(void);
void *gpu_pinned(size_t size_bytes);
void gpu_to_device(void *to, const void *from, size_t len_bytes);
void gpu_to_host(void *to, const void *from, size_t len_bytes);

void *gpu_stream(void); /* one for which the legacy stream does not wait, nor it for that */
bool gpu_is_busy(void *stream);
void gpu_wait(void *stream);

/* Kernels that first run for delay_ns. The first one writes word i as gpu_word(seed, i); the second one copies. */
void gpu_launch_fill(void *stream, void *to, size_t words, uint32_t seed, uint64_t delay_ns);
void gpu_launch_copy(void *stream, void *to, const void *from, size_t words, uint64_t delay_ns);
uint32_t gpu_word(uint32_t seed, size_t index);

#endif
