// SPDX-License-Identifier: Apache-2.0
/*
 * The functions of libcuda that a program calls itself, beside the library: the checks of tests/gpu do. A test gives
 * the double the name libcuda.so.1 for that. As what the table offers, they are not counted and do not fail.
 *
 * The double runs no PTX. It has a function of its own for each kernel of tests/gpu/kernels.ptx, and wants the text of
 * a module to have an entry of that name. A kernel holds its stream until its delay is over, so that other streams go
 * on meanwhile. FAKE_CUDA_WRONG_KERNELS in the environment lets kernels write other bytes, so that a test can see a
 * check fail.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fakes/cuda/state.h"
#include "tests/gpu/libcuda.h"

#define EXPORT __attribute__((visibility("default")))
#define NOT_FOUND 500
#define WAIT_US 100

#define DECLARE(name, parameters) EXPORT int name parameters;
LIBCUDA_FUNCTIONS(DECLARE)

/* The parameters of both kernels, by value. */
struct kernel {
    unsigned char *to;
    uint64_t words;
    uint64_t delay_ns;
    union {
        uint32_t seed;
        unsigned char *from;
    };
    bool is_copy;
};

static const char *const names[] = {"fill_late", "copy_late"};

int cuInit(unsigned flags)
{
    if (flags != 0) misuse("cuInit with flags %u", flags);
    return fake_cuda_device_count() == 0 ? TL_CUDA_NO_DEVICE : TL_CUDA_OK;
}

int cuDriverGetVersion(int *ret_version)
{
    *ret_version = fake_cuda_supported_version();
    return TL_CUDA_OK;
}

int cuDeviceGetCount(int *ret_count)
{
    *ret_count = fake_cuda_device_count();
    return TL_CUDA_OK;
}

int cuDeviceGet(int *ret_device, int index)
{
    *ret_device = FIRST_DEVICE + index;
    return TL_CUDA_OK;
}

int cuDeviceGetName(char *ret_name, int capacity, int device)
{
    snprintf(ret_name, (size_t)capacity, "Fake GPU %d", device - FIRST_DEVICE);
    return TL_CUDA_OK;
}

int cuDevicePrimaryCtxRetain(void **ret_context, int device)
{
    *ret_context = &state_devices[device - FIRST_DEVICE];
    return TL_CUDA_OK;
}

int cuCtxSetCurrent(void *context)
{
    this_thread.context = context;
    return TL_CUDA_OK;
}

/* ------------------------------------------------------------------------------------------------------ memory -- */

int cuMemGetInfo_v2(size_t *ret_free, size_t *ret_total)
{
    pthread_mutex_lock(&state_mutex);
    size_t used_bytes = state_devices[fake_cuda_device_here()].allocated_bytes;
    *ret_free = used_bytes < state_capacity_bytes ? state_capacity_bytes - used_bytes : 0;
    pthread_mutex_unlock(&state_mutex);
    *ret_total = state_capacity_bytes;
    return TL_CUDA_OK;
}

static void *allocate(enum memory_kind kind, size_t size_bytes)
{
    pthread_mutex_lock(&state_mutex);
    struct memory *memory = memory_create_locked(kind, fake_cuda_device_here(), size_bytes, true);
    pthread_mutex_unlock(&state_mutex);
    return memory ? memory->address : NULL;
}

int cuMemAlloc_v2(unsigned long long *ret_memory, size_t size_bytes)
{
    *ret_memory = (uintptr_t)allocate(MEMORY_DEVICE, size_bytes);
    return *ret_memory ? TL_CUDA_OK : TL_CUDA_NO_MEMORY;
}

int cuMemHostAlloc(void **ret_memory, size_t size_bytes, unsigned flags)
{
    (void)flags;
    *ret_memory = allocate(MEMORY_HOST, size_bytes);
    return *ret_memory ? TL_CUDA_OK : TL_CUDA_NO_MEMORY;
}

int cuMemFree_v2(unsigned long long memory)
{
    pthread_mutex_lock(&state_mutex);
    streams_wait_locked(fake_cuda_device_here());
    memory_free_locked(memory_find_locked((void *)(uintptr_t)memory));
    pthread_mutex_unlock(&state_mutex);
    return TL_CUDA_OK;
}

/* ----------------------------------------------------------------------------------------------------- streams -- */

int cuStreamCreate(void **ret_stream, unsigned flags)
{
    pthread_mutex_lock(&state_mutex);
    *ret_stream = stream_create_locked(fake_cuda_device_here(), !(flags & TL_CUDA_STREAM_NON_BLOCKING), true);
    pthread_mutex_unlock(&state_mutex);
    return TL_CUDA_OK;
}

int cuStreamQuery(void *handle)
{
    pthread_mutex_lock(&state_mutex);
    struct stream *stream = stream_find_locked(handle, fake_cuda_device_here());
    if (!stream) misuse("%p is not a stream", handle);
    bool is_busy = stream->first != NULL;
    pthread_mutex_unlock(&state_mutex);
    return is_busy ? TL_CUDA_NOT_READY : TL_CUDA_OK;
}

int cuStreamSynchronize(void *handle)
{
    while (cuStreamQuery(handle) == TL_CUDA_NOT_READY)
        usleep(WAIT_US);
    return TL_CUDA_OK;
}

/* ------------------------------------------------------------------------------------------------------ copies -- */

struct copy {
    unsigned char *to;
    const unsigned char *from;
    size_t len_bytes;
};

static void run_copy(void *context)
{
    const struct copy *copy = context;
    memmove(copy->to, copy->from, copy->len_bytes);
}

/* A synchronous copy, in the legacy stream as the real ones. The side of the host need not be pinned. */
static int copy_now(const void *to, const void *from, size_t len_bytes, const void *on_device)
{
    pthread_mutex_lock(&state_mutex);
    memory_check_locked(on_device, len_bytes);
    struct copy copy = {memory_view_locked(to), memory_view_locked(from), len_bytes};
    struct stream *stream = stream_find_locked((void *)1, fake_cuda_device_here());
    stream_push_locked(stream, (struct op){.run = run_copy, .context = &copy});
    pthread_mutex_unlock(&state_mutex);
    return cuStreamSynchronize((void *)1);
}

int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t len_bytes)
{
    return copy_now((void *)(uintptr_t)to, from, len_bytes, (void *)(uintptr_t)to);
}

int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t len_bytes)
{
    return copy_now(to, (void *)(uintptr_t)from, len_bytes, (void *)(uintptr_t)from);
}

int cuMemcpyDtoD_v2(unsigned long long to, unsigned long long from, size_t len_bytes)
{
    return copy_now((void *)(uintptr_t)to, (void *)(uintptr_t)from, len_bytes, (void *)(uintptr_t)from);
}

/* ----------------------------------------------------------------------------------------------------- kernels -- */

int cuModuleLoadData(void **ret_module, const void *image)
{
    *ret_module = (void *)image;
    return strstr(image, ".version ") ? TL_CUDA_OK : TL_CUDA_INVALID_VALUE;
}

int cuModuleGetFunction(void **ret_function, void *module, const char *name)
{
    char entry[64];
    snprintf(entry, sizeof(entry), ".entry %s(", name);
    for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (strcmp(names[i], name) != 0 || !strstr(module, entry)) continue;
        *ret_function = (void *)names[i];
        return TL_CUDA_OK;
    }
    return NOT_FOUND;
}

static void run_kernel(void *context)
{
    struct kernel *kernel = context;
    pthread_mutex_lock(&state_mutex);
    memory_check_locked(kernel->to, kernel->words * sizeof(uint32_t));
    unsigned char *to = memory_view_locked(kernel->to);
    const unsigned char *from = kernel->is_copy ? memory_view_locked(kernel->from) : NULL;
    pthread_mutex_unlock(&state_mutex);
    uint32_t wrong = getenv("FAKE_CUDA_WRONG_KERNELS") ? 1 : 0;
    for (uint64_t i = 0; i < kernel->words; i++) {
        uint32_t word = (uint32_t)i * 0x9e3779b1 + kernel->seed;
        if (from) memcpy(&word, from + i * sizeof(word), sizeof(word));
        word += wrong;
        memcpy(to + i * sizeof(word), &word, sizeof(word));
    }
    free(kernel);
}

struct release {
    struct stream *stream;
    uint64_t delay_ns;
};

static void *release_late(void *context)
{
    struct release release = *(struct release *)context;
    free(context);
    struct timespec time = {.tv_sec = (time_t)(release.delay_ns / 1000000000),
                            .tv_nsec = (long)(release.delay_ns % 1000000000)};
    nanosleep(&time, NULL);
    pthread_mutex_lock(&state_mutex);
    stream_hold_locked(release.stream, false);
    pthread_mutex_unlock(&state_mutex);
    return NULL;
}

/* One kernel with a delay at a time is enough for each stream. */
static void hold_for(struct stream *stream, uint64_t delay_ns)
{
    pthread_t thread;
    struct release *release = malloc(sizeof(*release));
    *release = (struct release){stream, delay_ns};
    stream_hold_locked(stream, true);
    if (pthread_create(&thread, NULL, release_late, release) != 0) misuse("the double has no thread");
    pthread_detach(thread);
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void *handle, void **parameters,
                   void **extra)
{
    if (grid_x * grid_y * grid_z == 0 || block_x * block_y * block_z == 0 || shared_bytes != 0 || extra)
        misuse("a kernel is launched with an empty grid");
    struct kernel *kernel = calloc(1, sizeof(*kernel));
    memcpy(&kernel->to, parameters[0], sizeof(kernel->to));
    memcpy(&kernel->words, parameters[1], sizeof(kernel->words));
    memcpy(&kernel->delay_ns, parameters[2], sizeof(kernel->delay_ns));
    kernel->is_copy = function == names[1];
    memcpy(&kernel->from, parameters[3], kernel->is_copy ? sizeof(kernel->from) : sizeof(kernel->seed));
    pthread_mutex_lock(&state_mutex);
    struct stream *stream = stream_find_locked(handle, fake_cuda_device_here());
    if (!stream) misuse("%p is not a stream", handle);
    if (kernel->delay_ns > 0) hold_for(stream, kernel->delay_ns);
    stream_push_locked(stream, (struct op){.run = run_kernel, .context = kernel});
    pthread_mutex_unlock(&state_mutex);
    return TL_CUDA_OK;
}
