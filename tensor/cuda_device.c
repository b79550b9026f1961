// SPDX-License-Identifier: Apache-2.0
/*
 * CUDA devices: how one is opened, how it is lost, and fences in the streams of the caller.
 *
 * Opening: the first thread that asks for a device makes its struct and starts its threads. The memory thread loads
 * CUDA (once for the process), makes the device current, which creates its primary context, the one that other
 * libraries use, and creates two streams. A step that fails is tried again the next time. Nothing of it is ever closed:
 * CUDA itself lives as long as the process. A process that is forked afterwards has neither the threads nor CUDA, and
 * is refused.
 *
 * Losing: some errors, such as a kernel that wrote where it must not, end a context for good, and every later call
 * returns them. Which errors these are depends on the release; so after each error a stream of ours is asked, and when
 * it has failed as well, the device is lost. That is logged, unless CUDA fails because the process ends.
 *
 * Fences: an event is recorded on the caller's thread through libcuda, with the device's context pushed and popped.
 * That leaves the thread's current device alone, also when a context was made current that is not the runtime's. Events
 * are reused, so that to give one back needs no call.
 */
#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "base/loop_core.h"
#include "tensor/cuda_internal.h"

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
/* Written under the mutex of opening. */
static _Atomic(struct tl_cuda_device *) devices[TL_CUDA_MAX_DEVICES];
static struct tl_cuda cuda;
static bool is_cuda_loaded;
static pthread_once_t process_once = PTHREAD_ONCE_INIT;
static atomic_bool is_forked;
/* A device would wait for this thread, which is one of a device. */
static _Thread_local bool is_ours;

char *tl_device_format(struct tl_device device, char buffer[TL_DEVICE_TEXT_BYTES])
{
    if (device.kind == TL_DEVICE_HOST) {
        snprintf(buffer, TL_DEVICE_TEXT_BYTES, "host");
    } else {
        snprintf(buffer, TL_DEVICE_TEXT_BYTES, "gpu:%" PRId32, device.index);
    }
    return buffer;
}

/* -------------------------------------------------------------------------------------------------------- jobs -- */

static void lock(pthread_mutex_t *mutex)
{
    TL_CHECK(pthread_mutex_lock(mutex) == 0);
}

static void unlock(pthread_mutex_t *mutex)
{
    TL_CHECK(pthread_mutex_unlock(mutex) == 0);
}

static void run_job(struct tl_closure *closure)
{
    struct tl_cuda_job *job = TL_CONTAINER_OF(closure, struct tl_cuda_job, closure);
    struct tl_cuda_device *device = job->device;
    enum tl_status status = job->run(job, job->error);
    lock(&device->mutex);
    job->status = status;
    job->is_done = true;
    pthread_cond_broadcast(&device->changed);
    unlock(&device->mutex);
}

/* Runs the job on a thread of the device and waits for it. */
static enum tl_status run_on(struct tl_closure_thread *thread, struct tl_cuda_device *device, struct tl_cuda_job *job,
                             enum tl_status (*run)(struct tl_cuda_job *job, struct tl_error *ret_error),
                             struct tl_error *ret_error)
{
    TL_CHECK(!tl_loop_core_is_driven_here() && !is_ours);
    *job = (struct tl_cuda_job){.closure.run = run_job, .device = device, .run = run, .error = ret_error};
    tl_closure_thread_post(thread, &job->closure);
    lock(&device->mutex);
    while (!job->is_done)
        pthread_cond_wait(&device->changed, &device->mutex);
    unlock(&device->mutex);
    return job->status;
}

enum tl_status tl_cuda_run(struct tl_cuda_device *device, struct tl_cuda_job *job,
                           enum tl_status (*run)(struct tl_cuda_job *job, struct tl_error *ret_error),
                           struct tl_error *ret_error)
{
    return run_on(&device->memory_thread, device, job, run, ret_error);
}

enum tl_status tl_cuda_run_behind_frees(struct tl_cuda_device *device, struct tl_cuda_job *job,
                                        enum tl_status (*run)(struct tl_cuda_job *job, struct tl_error *ret_error),
                                        struct tl_error *ret_error)
{
    return run_on(&device->free_thread, device, job, run, ret_error);
}

/* ------------------------------------------------------------------------------------------------------ errors -- */

enum tl_status tl_cuda_check_lost(struct tl_cuda_device *device, struct tl_error *ret_error)
{
    lock(&device->mutex);
    enum tl_status status = TL_OK;
    if (device->is_lost)
        status = tl_error_set(ret_error, TL_FAILED_PRECONDITION, "%s is lost until this process starts anew, since %s",
                              device->name, device->lost_reason);
    unlock(&device->mutex);
    return status;
}

/* Marks the device as lost, unless it is already. */
static void lose(struct tl_cuda_device *device, tl_cuda_error error, const char *what)
{
    lock(&device->mutex);
    bool is_new = !device->is_lost;
    if (is_new)
        snprintf(device->lost_reason, sizeof(device->lost_reason), "%s failed: %s (CUDA error %d)", what,
                 device->cuda->cudaGetErrorString(error), error);
    device->is_lost = true;
    unlock(&device->mutex);
    /* The reason does not change any more. */
    if (is_new && error != TL_CUDA_UNLOADING)
        TL_LOG_AT_ERROR("a device is lost", TL_STR("device", device->name), TL_STR("reason", device->lost_reason),
                        TL_STR("remedy", "start this process anew"));
}

unsigned tl_device_count_lost(char ret_reason[TL_DEVICE_LOST_BYTES])
{
    unsigned count = 0;
    for (unsigned i = 0; i < TL_CUDA_MAX_DEVICES && !tl_cuda_is_forked(); i++) {
        struct tl_cuda_device *device = atomic_load_explicit(&devices[i], memory_order_acquire);
        if (!device) continue;
        lock(&device->mutex);
        if (device->is_lost && count++ == 0)
            snprintf(ret_reason, TL_DEVICE_LOST_BYTES, "%s is lost: %s", device->name, device->lost_reason);
        unlock(&device->mutex);
    }
    return count;
}

enum tl_status tl_cuda_fail(struct tl_cuda_device *device, tl_cuda_error error, struct tl_error *ret_error,
                            const char *what)
{
    (void)device->cuda->cudaGetLastError(); /* forgets the error; that of a lost device comes again */
    if (device->streams[0]) {
        tl_cuda_error state = device->cuda->cudaStreamQuery(device->streams[0]);
        if (state != TL_CUDA_OK && state != TL_CUDA_NOT_READY) {
            (void)device->cuda->cudaGetLastError();
            /* Once more: a call that fails once does not end a device. */
            state = device->cuda->cudaStreamQuery(device->streams[0]);
        }
        if (state != TL_CUDA_OK && state != TL_CUDA_NOT_READY) lose(device, error, what);
    }
    enum tl_status status = tl_cuda_check_lost(device, ret_error);
    if (status != TL_OK) return status;
    return tl_error_set(ret_error, error == TL_CUDA_NO_MEMORY ? TL_RESOURCE_EXHAUSTED : TL_INTERNAL,
                        "%s failed on %s: %s (CUDA error %d)", what, device->name,
                        device->cuda->cudaGetErrorString(error), error);
}

/* ----------------------------------------------------------------------------------------------------- opening -- */

tl_cuda_error tl_cuda_adopt_thread(struct tl_cuda_device *device)
{
    int mode = TL_CUDA_CAPTURE_MODE_RELAXED;
    is_ours = true;
    /* First, because any other call could create a context on the first device. */
    tl_cuda_error error = device->cuda->cudaSetDevice(device->device.index);
    if (error == TL_CUDA_OK) error = device->cuda->cudaThreadExchangeStreamCaptureMode(&mode);
    /* Makes the context current, which libcuda wants and cudaSetDevice of CUDA 11 does not do. */
    return error == TL_CUDA_OK ? device->cuda->cudaFree(NULL) : error;
}

static enum tl_status check_exists(const struct tl_cuda_device *device, struct tl_error *ret_error)
{
    int count = 0;
    tl_cuda_error error = cuda.cudaGetDeviceCount(&count);
    if (error != TL_CUDA_OK)
        return tl_error_set(ret_error, TL_INTERNAL, "the devices of CUDA cannot be counted: %s (CUDA error %d)",
                            cuda.cudaGetErrorString(error), error);
    if (device->device.index < count) return TL_OK;
    return tl_error_set(ret_error, TL_NOT_FOUND, "there is no %s; CUDA sees %d of them, counted from gpu:0",
                        device->name, count);
}

/* The job that opens a device. */
static enum tl_status set_up(struct tl_cuda_job *job, struct tl_error *ret_error)
{
    struct tl_cuda_device *device = job->device;
    enum tl_status status = is_cuda_loaded ? TL_OK : tl_cuda_load(&cuda, ret_error);
    if (status != TL_OK) return status;
    is_cuda_loaded = true;
    device->cuda = &cuda;
    status = check_exists(device, ret_error);
    if (status != TL_OK) return status;
    tl_cuda_describe(&cuda, device->device.index, &device->info);
    tl_cuda_error error = tl_cuda_adopt_thread(device);
    if (error != TL_CUDA_OK) return tl_cuda_fail(device, error, ret_error, "making the device current");
    error = cuda.cuCtxGetCurrent(&device->context);
    if (error != TL_CUDA_OK) return tl_cuda_fail(device, error, ret_error, "finding the context");
    for (unsigned i = 0; i < TL_CUDA_STREAMS && error == TL_CUDA_OK; i++)
        if (!device->streams[i])
            error = cuda.cudaStreamCreateWithFlags(&device->streams[i], TL_CUDA_STREAM_NON_BLOCKING);
    return error == TL_CUDA_OK ? TL_OK : tl_cuda_fail(device, error, ret_error, "a stream of the library");
}

/* The job that makes the thread ready that frees. */
static enum tl_status set_up_frees(struct tl_cuda_job *job, struct tl_error *ret_error)
{
    tl_cuda_error error = tl_cuda_adopt_thread(job->device);
    return error == TL_CUDA_OK ? TL_OK : tl_cuda_fail(job->device, error, ret_error, "making the device current");
}

static void note_fork(void)
{
    atomic_store(&is_forked, true);
}

/* Before the first thread that never ends is started. */
static void prepare_process(void)
{
    Dl_info here;
    (void)pthread_atfork(NULL, NULL, note_fork);
    /* The library must stay where it is, even if the program closes it (dlclose). */
    if (dladdr(devices, &here) != 0) (void)dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

bool tl_cuda_is_forked(void)
{
    return atomic_load_explicit(&is_forked, memory_order_relaxed);
}

/* A device that is not open yet; NULL: no memory. */
static struct tl_cuda_device *create(struct tl_device which)
{
    struct tl_cuda_device *device = tl_alloc_zeroed(sizeof(*device));
    if (!device) return NULL;
    TL_CHECK(pthread_once(&process_once, prepare_process) == 0);
    device->device = which;
    tl_device_format(which, device->name);
    snprintf(device->memory_thread_name, sizeof(device->memory_thread_name), "tl-gpu%" PRId32 "-mem", which.index);
    snprintf(device->free_thread_name, sizeof(device->free_thread_name), "tl-gpu%" PRId32 "-free", which.index);
    snprintf(device->copies.name, sizeof(device->copies.name), "tl-gpu%" PRId32 "-copy", which.index);
    tl_closure_thread_init(&device->memory_thread, device->memory_thread_name);
    tl_closure_thread_init(&device->free_thread, device->free_thread_name);
    tl_cuda_copies_init(&device->copies);
    TL_CHECK(pthread_mutex_init(&device->mutex, NULL) == 0);
    TL_CHECK(pthread_cond_init(&device->changed, NULL) == 0);
    tl_list_init(&device->fences);
    tl_list_init(&device->staging_waits);
    return device;
}

/* The mutex of opening is held. */
static enum tl_status open_locked(struct tl_device which, struct tl_cuda_device **ret_device,
                                  struct tl_error *ret_error)
{
    struct tl_cuda_device *device = atomic_load_explicit(&devices[which.index], memory_order_relaxed);
    if (!device) {
        device = create(which);
        if (!device) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for gpu:%" PRId32, which.index);
        atomic_store_explicit(&devices[which.index], device, memory_order_release);
    }
    *ret_device = device;
    if (atomic_load_explicit(&device->is_open, memory_order_relaxed)) return TL_OK;
    struct tl_cuda_job job;
    enum tl_status status = tl_closure_thread_start(&device->memory_thread, ret_error);
    if (status == TL_OK) status = tl_cuda_run(device, &job, set_up, ret_error);
    if (status == TL_OK) status = tl_closure_thread_start(&device->free_thread, ret_error);
    if (status == TL_OK) status = tl_cuda_run_behind_frees(device, &job, set_up_frees, ret_error);
    if (status == TL_OK) status = tl_cuda_copies_start(device, ret_error);
    atomic_store_explicit(&device->is_open, status == TL_OK, memory_order_release);
    return status;
}

/* A device that is open is found without the mutex, under which another device may take seconds to open. */
static enum tl_status find(struct tl_device which, struct tl_cuda_device **ret_device, struct tl_error *ret_error)
{
    *ret_device = atomic_load_explicit(&devices[which.index], memory_order_acquire);
    if (*ret_device && atomic_load_explicit(&(*ret_device)->is_open, memory_order_acquire)) return TL_OK;
    lock(&opening);
    enum tl_status status = open_locked(which, ret_device, ret_error);
    unlock(&opening);
    return status;
}

enum tl_status tl_cuda_device_open(struct tl_device which, struct tl_cuda_device **ret_device,
                                   struct tl_error *ret_error)
{
    if (which.kind != TL_DEVICE_CUDA)
        return tl_error_set(ret_error, TL_UNIMPLEMENTED, "this version has no device of kind %d", (int)which.kind);
    if (which.index < 0 || which.index >= TL_CUDA_MAX_DEVICES)
        return tl_error_set(ret_error, TL_NOT_FOUND, "there is no gpu:%" PRId32 "; %d is the largest number",
                            which.index, TL_CUDA_MAX_DEVICES - 1);
    if (tl_loop_core_is_driven_here() || is_ours)
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "gpu:%" PRId32 " cannot be used here, because this thread drives a worker or a device; a "
                            "release callback or a log function must leave that to another thread",
                            which.index);
    if (tl_cuda_is_forked())
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "gpu:%" PRId32 " cannot be used here, because this process was forked from one that used "
                            "CUDA; start it by exec (in Python, with the start method \"spawn\")",
                            which.index);
    enum tl_status status = find(which, ret_device, ret_error);
    return status == TL_OK ? tl_cuda_check_lost(*ret_device, ret_error) : status;
}

enum tl_status tl_device_open(struct tl_device device, struct tl_error *ret_error)
{
    struct tl_cuda_device *opened;
    return tl_cuda_device_open(device, &opened, ret_error);
}

enum tl_status tl_device_list_open(struct tl_device_info **ret_devices, size_t *ret_count, struct tl_error *ret_error)
{
    size_t count = 0;
    struct tl_device_info *infos = tl_alloc_zeroed(TL_CUDA_MAX_DEVICES * sizeof(*infos));
    if (!infos) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a list of devices");
    for (unsigned i = 0; i < TL_CUDA_MAX_DEVICES; i++) {
        struct tl_cuda_device *device = atomic_load_explicit(&devices[i], memory_order_acquire);
        if (!device || !atomic_load_explicit(&device->is_open, memory_order_acquire)) continue;
        infos[count] = device->info;
        lock(&device->mutex);
        infos[count++].is_lost = device->is_lost;
        unlock(&device->mutex);
    }
    *ret_devices = infos;
    *ret_count = count;
    return TL_OK;
}

struct tl_cuda_device *tl_cuda_device_of(struct tl_device which)
{
    TL_CHECK(which.kind == TL_DEVICE_CUDA && which.index >= 0 && which.index < TL_CUDA_MAX_DEVICES);
    struct tl_cuda_device *device = atomic_load_explicit(&devices[which.index], memory_order_acquire);
    TL_CHECK(device);
    return device;
}

/* ------------------------------------------------------------------------------------------------------ fences -- */

tl_cuda_error tl_cuda_fence_take(struct tl_cuda_device *device, struct tl_device_fence **ret_fence)
{
    lock(&device->mutex);
    struct tl_list *link = tl_list_pop_front(&device->fences);
    unlock(&device->mutex);
    if (link) {
        *ret_fence = TL_CONTAINER_OF(link, struct tl_device_fence, link);
        (*ret_fence)->reference_count = 1;
        return TL_CUDA_OK;
    }
    struct tl_device_fence *fence = tl_alloc_zeroed(sizeof(*fence));
    if (!fence) return TL_CUDA_NO_MEMORY;
    fence->device = device;
    fence->reference_count = 1;
    tl_list_init(&fence->link);
    tl_cuda_error error = device->cuda->cuEventCreate(&fence->event, TL_CUDA_EVENT_DISABLE_TIMING);
    if (error != TL_CUDA_OK) {
        free(fence);
        return error;
    }
    *ret_fence = fence;
    return TL_CUDA_OK;
}

struct tl_device_fence *tl_device_fence_get(struct tl_device_fence *fence)
{
    if (!fence) return NULL;
    lock(&fence->device->mutex);
    fence->reference_count++;
    unlock(&fence->device->mutex);
    return fence;
}

void tl_device_fence_put(struct tl_device_fence *fence)
{
    if (!fence || tl_cuda_is_forked()) return; /* a thread that this process lacks may have had the mutex */
    struct tl_cuda_device *device = fence->device;
    lock(&device->mutex);
    if (--fence->reference_count == 0) tl_list_push_front(&device->fences, &fence->link);
    unlock(&device->mutex);
}

/* Whether work can be put into the stream without being captured, or spoiling a capture. */
static enum tl_status check_capture(struct tl_cuda_device *device, void *stream, struct tl_error *ret_error)
{
    int capture = TL_CUDA_CAPTURE_NONE;
    tl_cuda_error error = device->cuda->cuStreamIsCapturing(stream, &capture);
    if (error == TL_CUDA_OK && capture == TL_CUDA_CAPTURE_NONE) return TL_OK;
    if (error == TL_CUDA_OK || error == TL_CUDA_CAPTURE_IMPLICIT)
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "the stream of the tensor on %s is being captured into a graph; use the tensor outside of "
                            "the capture, or give it another stream (tl_tensor_set_stream)",
                            device->name);
    bool is_foreign =
        error == TL_CUDA_INVALID_HANDLE || error == TL_CUDA_INVALID_CONTEXT || error == TL_CUDA_INVALID_VALUE;
    return tl_error_set(ret_error, is_foreign ? TL_INVALID_ARGUMENT : TL_INTERNAL,
                        "the stream of the tensor cannot be used on %s: %s (CUDA error %d)", device->name,
                        device->cuda->cudaGetErrorString(error), error);
}

/* The device's context is current. */
static enum tl_status record(struct tl_cuda_device *device, void *stream, struct tl_device_fence **ret_fence,
                             struct tl_error *ret_error)
{
    struct tl_device_fence *fence = NULL;
    enum tl_status status = check_capture(device, stream, ret_error);
    if (status != TL_OK) return status;
    tl_cuda_error error = tl_cuda_fence_take(device, &fence);
    if (error == TL_CUDA_OK) error = device->cuda->cuEventRecord(fence->event, stream);
    if (error == TL_CUDA_OK) {
        *ret_fence = fence;
        return TL_OK;
    }
    tl_device_fence_put(fence);
    enum tl_status status_of_error = error == TL_CUDA_NO_MEMORY ? TL_RESOURCE_EXHAUSTED
                                     : error == TL_CUDA_INVALID_HANDLE || error == TL_CUDA_INVALID_CONTEXT
                                         ? TL_INVALID_ARGUMENT
                                         : TL_INTERNAL;
    return tl_error_set(ret_error, status_of_error,
                        "an event cannot be recorded in the stream of a tensor on %s: %s (CUDA error %d)", device->name,
                        device->cuda->cudaGetErrorString(error), error);
}

static enum tl_status record_in_context(struct tl_cuda_device *device, void *stream, struct tl_device_fence **ret_fence,
                                        struct tl_error *ret_error)
{
    void *context;
    int mode = TL_CUDA_CAPTURE_MODE_RELAXED;
    tl_cuda_error error = device->cuda->cuCtxPushCurrent(device->context);
    if (error != TL_CUDA_OK)
        return tl_error_set(ret_error, TL_INTERNAL, "the context of %s cannot be used: %s (CUDA error %d)",
                            device->name, device->cuda->cudaGetErrorString(error), error);
    bool is_relaxed = device->cuda->cuThreadExchangeStreamCaptureMode(&mode) == TL_CUDA_OK;
    enum tl_status status = record(device, stream, ret_fence, ret_error);
    if (is_relaxed) (void)device->cuda->cuThreadExchangeStreamCaptureMode(&mode);
    (void)device->cuda->cuCtxPopCurrent(&context);
    return status;
}

/* A job: looks whether the device is lost. */
static enum tl_status look(struct tl_cuda_job *job, struct tl_error *ret_error)
{
    struct tl_cuda_device *device = job->device;
    tl_cuda_error error = device->cuda->cudaStreamQuery(device->streams[0]);
    if (error == TL_CUDA_OK || error == TL_CUDA_NOT_READY) return TL_OK;
    return tl_cuda_fail(device, error, ret_error, "a stream of the library");
}

enum tl_status tl_device_fence_record(struct tl_device which, tl_stream stream, struct tl_device_fence **ret_fence,
                                      struct tl_error *ret_error)
{
    struct tl_cuda_device *device;
    enum tl_status status = tl_cuda_device_open(which, &device, ret_error);
    if (status != TL_OK) return status;
    if (stream == TL_STREAM_NONE) {
        *ret_fence = NULL;
        return TL_OK;
    }
    if (stream < 0) return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%" PRIdPTR " is not a stream", stream);
    void *handle = (void *)(stream == TL_STREAM_DEFAULT ? TL_STREAM_LEGACY : stream);
    status = record_in_context(device, handle, ret_fence, ret_error);
    if (status != TL_INTERNAL) return status;
    struct tl_cuda_job job;
    struct tl_error lost;
    return tl_cuda_run(device, &job, look, &lost) == TL_OK ? status : tl_error_copy(ret_error, &lost);
}
