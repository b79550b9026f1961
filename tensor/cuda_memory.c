// SPDX-License-Identifier: Apache-2.0
/*
 * Memory of CUDA devices, and pinned memory of the host.
 *
 * The memory thread of a device allocates and looks at addresses. Another thread frees, because a free waits for all
 * work of the device. An allocation for which there is no memory waits for the frees that were asked for before it, and
 * is tried again. Release callbacks of the caller have one thread for the process, because they may wait for anything,
 * such as a lock that a caller of ours holds.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/error.h"
#include "tensor/cuda_internal.h"

static enum tl_status no_memory(struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a tensor on a device");
}

void *tl_device_memory_data(const struct tl_device_memory *memory)
{
    return memory->data;
}

/* -------------------------------------------------------------------------------------------------- own memory -- */

void tl_cuda_free_memory(struct tl_closure *closure)
{
    struct tl_device_memory *memory = TL_CONTAINER_OF(closure, struct tl_device_memory, closure);
    struct tl_cuda_device *device = memory->device;
    struct tl_error error;
    if (memory->shared.address != 0) {
        tl_cuda_shared_destroy(device, &memory->shared);
    } else {
        tl_cuda_error result = memory->data ? device->cuda->cudaFree(memory->data) : TL_CUDA_OK;
        if (result != TL_CUDA_OK) (void)tl_cuda_fail(device, result, &error, "freeing memory");
    }
    free(memory);
}

/* Allocates bytes for the memory, which has none. What cannot be shared, though it should, is other memory, unless it
 * must be. */
static enum tl_status allocate_bytes(struct tl_cuda_device *device, uint64_t size_bytes, bool is_shared,
                                     struct tl_device_memory *memory, struct tl_error *ret_error)
{
    char what[64];
    if (is_shared || tl_cuda_is_worth_sharing(device, size_bytes)) {
        enum tl_status status = tl_cuda_shared_create(device, size_bytes, memory, ret_error);
        if (status == TL_OK || status == TL_RESOURCE_EXHAUSTED || is_shared) return status;
    }
    tl_cuda_error error = device->cuda->cudaMalloc(&memory->data, size_bytes);
    if (error == TL_CUDA_OK) return TL_OK;
    snprintf(what, sizeof(what), "allocating %" PRIu64 " bytes", size_bytes);
    return tl_cuda_fail(device, error, ret_error, what);
}

/* Memory of the library, without bytes; NULL: no memory. */
static struct tl_device_memory *create(struct tl_cuda_device *device)
{
    struct tl_device_memory *memory = tl_alloc_zeroed(sizeof(*memory));
    if (!memory) return NULL;
    memory->closure.run = tl_cuda_free_memory;
    memory->device = device;
    return memory;
}

struct allocation {
    struct tl_cuda_job job;
    uint64_t size_bytes;
    struct tl_device_memory *memory;
};

static enum tl_status allocate(struct tl_cuda_job *job, struct tl_error *ret_error)
{
    struct allocation *allocation = TL_CONTAINER_OF(job, struct allocation, job);
    return allocate_bytes(job->device, allocation->size_bytes, false, allocation->memory, ret_error);
}

/* A job behind the frees. */
static enum tl_status do_nothing(struct tl_cuda_job *job, struct tl_error *ret_error)
{
    (void)job;
    (void)ret_error;
    return TL_OK;
}

static enum tl_status allocate_after_frees(struct tl_cuda_device *device, struct allocation *allocation,
                                           struct tl_error *ret_error)
{
    enum tl_status status = tl_cuda_run(device, &allocation->job, allocate, ret_error);
    if (status != TL_RESOURCE_EXHAUSTED) return status;
    status = tl_cuda_run_behind_frees(device, &allocation->job, do_nothing, ret_error);
    return status == TL_OK ? tl_cuda_run(device, &allocation->job, allocate, ret_error) : status;
}

enum tl_status tl_device_memory_create(struct tl_device which, uint64_t size_bytes,
                                       struct tl_device_memory **ret_memory, struct tl_error *ret_error)
{
    struct allocation allocation = {.size_bytes = size_bytes};
    struct tl_cuda_device *device;
    enum tl_status status = tl_cuda_device_open(which, &device, ret_error);
    if (status != TL_OK) return status;
    struct tl_device_memory *memory = create(device);
    if (!memory) return no_memory(ret_error);
    allocation.memory = memory;
    if (size_bytes > 0) status = allocate_after_frees(device, &allocation, ret_error);
    if (status != TL_OK) {
        free(memory);
        return status;
    }
    *ret_memory = memory;
    return TL_OK;
}

/* Thread: the memory thread. */
static void try_request(struct tl_closure *closure);

/* Thread: the one that frees. What was given back before is free now. */
static void try_request_again(struct tl_closure *closure)
{
    struct tl_device_request *request = TL_CONTAINER_OF(closure, struct tl_device_request, closure);
    request->closure.run = try_request;
    tl_closure_thread_post(&tl_cuda_device_of(request->device)->memory_thread, closure);
}

static void try_request(struct tl_closure *closure)
{
    struct tl_device_request *request = TL_CONTAINER_OF(closure, struct tl_device_request, closure);
    struct tl_cuda_device *device = tl_cuda_device_of(request->device);
    struct tl_error error = {.code = TL_OK};
    struct tl_device_memory *memory = create(device);
    if (!memory) {
        (void)no_memory(&error);
    } else if (request->size_bytes > 0 &&
               allocate_bytes(device, request->size_bytes, request->is_shared, memory, &error) ==
                   TL_RESOURCE_EXHAUSTED &&
               !request->is_tried) {
        free(memory);
        request->is_tried = true;
        request->closure.run = try_request_again;
        tl_closure_thread_post(&device->free_thread, closure);
        return;
    }
    if (error.code != TL_OK) {
        free(memory);
        memory = NULL;
    }
    request->done(request, memory, &error);
}

void tl_device_memory_request(struct tl_device_request *request)
{
    request->closure.run = try_request;
    request->is_tried = false;
    tl_list_init(&request->closure.link);
    tl_closure_thread_post(&tl_cuda_device_of(request->device)->memory_thread, &request->closure);
}

/* --------------------------------------------------------------------------------------------- wrapped memory -- */

/* Runs release callbacks. It is started with the first wrapped tensor and lives as long as the process. */
static struct tl_closure_thread release_thread;
static pthread_once_t release_thread_once = PTHREAD_ONCE_INIT;

static void init_release_thread(void)
{
    tl_closure_thread_init(&release_thread, "tl-gpu-release");
}

static void release_memory(struct tl_closure *closure)
{
    struct tl_device_memory *memory = TL_CONTAINER_OF(closure, struct tl_device_memory, closure);
    memory->release(memory->data, memory->release_context);
    free(memory);
}

struct inspection {
    struct tl_cuda_job job;
    const void *byte;
};

/* A job: whether a byte is in memory of the device. */
static enum tl_status inspect(struct tl_cuda_job *job, struct tl_error *ret_error)
{
    const struct inspection *inspection = TL_CONTAINER_OF(job, struct inspection, job);
    struct tl_cuda_device *device = job->device;
    struct tl_cuda_pointer pointer = {.type = TL_CUDA_MEMORY_UNKNOWN};
    tl_cuda_error error = device->cuda->cudaPointerGetAttributes(&pointer, inspection->byte);
    if (error != TL_CUDA_OK && error != TL_CUDA_INVALID_VALUE)
        return tl_cuda_fail(device, error, ret_error, "looking at memory");
    if (error == TL_CUDA_INVALID_VALUE) (void)device->cuda->cudaGetLastError();
    if (pointer.type == TL_CUDA_MEMORY_MANAGED)
        return tl_error_set(ret_error, TL_UNIMPLEMENTED,
                            "%p is managed memory, which moves between host and devices; copy it into memory of %s",
                            inspection->byte, device->name);
    if (pointer.type != TL_CUDA_MEMORY_DEVICE)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%p is not memory of %s but of the host; wrap it as such",
                            inspection->byte, device->name);
    if (pointer.device != device->device.index)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%p is memory of gpu:%d, not of %s", inspection->byte,
                            pointer.device, device->name);
    return TL_OK;
}

static enum tl_status inspect_range(struct tl_cuda_device *device, const void *data, uint64_t capacity_bytes,
                                    struct tl_error *ret_error)
{
    struct inspection inspection = {.byte = data};
    if (!data || capacity_bytes == 0) return TL_OK;
    enum tl_status status = tl_cuda_run(device, &inspection.job, inspect, ret_error);
    if (status != TL_OK) return status;
    inspection.byte = (const unsigned char *)data + capacity_bytes - 1;
    return tl_cuda_run(device, &inspection.job, inspect, ret_error);
}

enum tl_status tl_device_memory_wrap(struct tl_device which, void *data, uint64_t capacity_bytes, tl_release_fn release,
                                     void *context, struct tl_device_memory **ret_memory, struct tl_error *ret_error)
{
    struct tl_cuda_device *device;
    enum tl_status status = tl_cuda_device_open(which, &device, ret_error);
    if (status == TL_OK) status = inspect_range(device, data, capacity_bytes, ret_error);
    if (status != TL_OK) return status;
    if (release) {
        TL_CHECK(pthread_once(&release_thread_once, init_release_thread) == 0);
        status = tl_closure_thread_start(&release_thread, ret_error);
        if (status != TL_OK) return status;
    }
    struct tl_device_memory *memory = tl_alloc_zeroed(sizeof(*memory));
    if (!memory) return no_memory(ret_error);
    *memory = (struct tl_device_memory){
        .closure.run = release_memory, .device = device, .data = data, .release = release, .release_context = context};
    *ret_memory = memory;
    return TL_OK;
}

void tl_device_memory_destroy(struct tl_device_memory *memory)
{
    if (!memory || tl_cuda_is_forked()) return; /* the process that it was forked from has it */
    if (memory->closure.run == tl_cuda_free_memory) {
        tl_cuda_shared_tell(memory);
        tl_closure_thread_post(&memory->device->free_thread, &memory->closure);
    } else if (memory->release) {
        tl_closure_thread_post(&release_thread, &memory->closure);
    } else {
        free(memory);
    }
}

/* ----------------------------------------------------------------------------------------------------- staging -- */

static void lock(struct tl_cuda_device *device)
{
    TL_CHECK(pthread_mutex_lock(&device->mutex) == 0);
}

static void unlock(struct tl_cuda_device *device)
{
    TL_CHECK(pthread_mutex_unlock(&device->mutex) == 0);
}

/* Pins the blocks, unless that was done before. Thread: the device's memory thread. */
static enum tl_status pin_blocks(struct tl_cuda_device *device, struct tl_error *ret_error)
{
    void *staging;
    if (device->staging) return TL_OK;
    tl_cuda_error error = device->cuda->cudaHostAlloc(&staging, TL_STAGING_BLOCKS * TL_STAGING_BLOCK_BYTES, 0);
    if (error != TL_CUDA_OK) return tl_cuda_fail(device, error, ret_error, "pinning host memory for copies");
    lock(device);
    device->staging = staging;
    unlock(device);
    return TL_OK;
}

/* Takes a block; NULL: none is free, or they are not pinned yet. The mutex is held. */
static void *take_block(struct tl_cuda_device *device)
{
    if (!device->staging) return NULL;
    for (unsigned i = 0; i < TL_STAGING_BLOCKS; i++) {
        if (device->is_block_used[i]) continue;
        device->is_block_used[i] = true;
        return (unsigned char *)device->staging + i * TL_STAGING_BLOCK_BYTES;
    }
    return NULL;
}

/* Gives blocks to those that wait, as long as there are any. */
static void serve_waits(struct tl_cuda_device *device)
{
    static const struct tl_error success = {.code = TL_OK};
    for (;;) {
        lock(device);
        void *block = tl_list_is_empty(&device->staging_waits) ? NULL : take_block(device);
        struct tl_list *link = block ? tl_list_pop_front(&device->staging_waits) : NULL;
        unlock(device);
        if (!link) return;
        struct tl_staging_wait *wait = TL_CONTAINER_OF(link, struct tl_staging_wait, link);
        wait->ready(wait, block, &success);
    }
}

/* Pinning has failed: says so to those that wait. Who asks from now on tries again. */
static void fail_waits(struct tl_cuda_device *device, const struct tl_error *error)
{
    lock(device);
    device->is_pinning = false;
    struct tl_list *last = tl_list_is_empty(&device->staging_waits) ? NULL : device->staging_waits.prev;
    unlock(device);
    while (last) {
        lock(device);
        struct tl_list *link = tl_list_pop_front(&device->staging_waits);
        unlock(device);
        if (!link) return;
        if (link == last) last = NULL;
        struct tl_staging_wait *wait = TL_CONTAINER_OF(link, struct tl_staging_wait, link);
        wait->ready(wait, NULL, error);
    }
}

static void pin_for_waits(struct tl_closure *closure)
{
    struct tl_cuda_device *device = TL_CONTAINER_OF(closure, struct tl_cuda_device, pin_closure);
    struct tl_error error;
    enum tl_status status = pin_blocks(device, &error);
    if (status == TL_OK) {
        serve_waits(device);
    } else {
        fail_waits(device, &error);
    }
}

void tl_device_staging_request(struct tl_staging_wait *wait)
{
    struct tl_cuda_device *device = tl_cuda_device_of(wait->device);
    lock(device);
    tl_list_push_back(&device->staging_waits, &wait->link);
    bool must_pin = !device->staging && !device->is_pinning;
    if (must_pin) device->is_pinning = true;
    unlock(device);
    if (must_pin) {
        device->pin_closure.run = pin_for_waits;
        tl_closure_thread_post(&device->memory_thread, &device->pin_closure);
    }
    serve_waits(device);
}

bool tl_device_staging_cancel(struct tl_staging_wait *wait)
{
    struct tl_cuda_device *device = tl_cuda_device_of(wait->device);
    lock(device);
    bool is_waiting = tl_list_is_linked(&wait->link);
    tl_list_remove(&wait->link);
    unlock(device);
    return is_waiting;
}

void *tl_device_staging_try(struct tl_device which)
{
    struct tl_cuda_device *device = tl_cuda_device_of(which);
    lock(device);
    void *block = tl_list_is_empty(&device->staging_waits) ? take_block(device) : NULL;
    unlock(device);
    return block;
}

bool tl_device_staging_keep(struct tl_device which)
{
    struct tl_cuda_device *device = tl_cuda_device_of(which);
    lock(device);
    bool may_keep = device->kept_blocks < TL_STAGING_KEPT_BLOCKS;
    if (may_keep) device->kept_blocks++;
    unlock(device);
    return may_keep;
}

/* Marks a block as free. The mutex is held. */
static void free_block(struct tl_cuda_device *device, void *block)
{
    size_t offset_bytes = (size_t)((unsigned char *)block - (unsigned char *)device->staging);
    device->is_block_used[offset_bytes / TL_STAGING_BLOCK_BYTES] = false;
}

void tl_device_staging_decline(struct tl_staging_wait *wait, void *block)
{
    struct tl_cuda_device *device = tl_cuda_device_of(wait->device);
    lock(device);
    free_block(device, block); /* serve_waits, which has called `ready`, goes on */
    unlock(device);
}

void tl_device_staging_put(struct tl_device which, void *block, bool was_kept)
{
    struct tl_cuda_device *device = tl_cuda_device_of(which);
    lock(device);
    free_block(device, block);
    if (was_kept) device->kept_blocks--;
    unlock(device);
    serve_waits(device);
}

/* A caller that waits for a block, behind those that asked before it. */
struct taking {
    struct tl_staging_wait wait;
    struct tl_error error;
    void *block;
    bool is_over; /* under the device's mutex, as the two above until then */
};

static void block_taken(struct tl_staging_wait *wait, void *block, const struct tl_error *status)
{
    struct taking *taking = TL_CONTAINER_OF(wait, struct taking, wait);
    struct tl_cuda_device *device = tl_cuda_device_of(wait->device);
    lock(device);
    taking->block = block;
    tl_error_copy(&taking->error, status);
    taking->is_over = true;
    pthread_cond_broadcast(&device->changed);
    unlock(device);
}

enum tl_status tl_device_staging_take(struct tl_device which, void *ret_blocks[2], unsigned *ret_count,
                                      struct tl_error *ret_error)
{
    struct tl_cuda_device *device;
    struct taking taking = {.wait = {.device = which, .ready = block_taken}};
    enum tl_status status = tl_cuda_device_open(which, &device, ret_error);
    if (status != TL_OK) return status;
    tl_list_init(&taking.wait.link);
    tl_device_staging_request(&taking.wait);
    lock(device);
    while (!taking.is_over)
        pthread_cond_wait(&device->changed, &device->mutex);
    unlock(device);
    if (taking.error.code != TL_OK) return tl_error_copy(ret_error, &taking.error);
    ret_blocks[0] = taking.block;
    ret_blocks[1] = tl_device_staging_try(which);
    *ret_count = ret_blocks[1] ? 2 : 1;
    return TL_OK;
}

void tl_device_staging_give(struct tl_device which, void *const blocks[2], unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        tl_device_staging_put(which, blocks[i], false);
}
