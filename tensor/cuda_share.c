// SPDX-License-Identifier: Apache-2.0
/*
 * Memory of CUDA devices that other processes of this host can map (CUDA's virtual memory management).
 *
 * Happy path of the owner: the memory thread creates an allocation, reserves addresses, maps it there, and lets the
 * device access it. An export makes a file descriptor of it. Happy path of the reader: an import makes an allocation of
 * the descriptor and maps it, for reads. CUDA keeps the memory for as long as one process has it mapped.
 *
 * An unmap does not wait for work of the device, as cudaFree does. So each allocation of ours comes with a tiny one of
 * cudaMalloc, which is freed first. Copies from imported memory are the library's, and over when it is given back.
 *
 * Failure modes: where functions or the device cannot do it, the reason is given, and other memory is used. What was
 * made before a step fails is given back. A descriptor that is no such memory is refused by CUDA.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/error.h"
#include "tensor/cuda_internal.h"

/* Rounding up may cost so much of the size. */
#define MOST_WASTE_DIVISOR 8
/* Devices have pages of 2 MiB. Below this they are not even asked. */
#define LEAST_BYTES (UINT64_C(1) << 20)

static atomic_uint_fast64_t last_number;

/* ----------------------------------------------------------------------------------------------------- support -- */

static struct tl_cuda_properties properties_of(struct tl_cuda_device *device)
{
    struct tl_cuda_properties properties = {.type = TL_CUDA_ALLOCATION_PINNED,
                                            .handle_types = TL_CUDA_HANDLE_FILE,
                                            .location = {TL_CUDA_LOCATION_DEVICE, device->device.index}};
    properties.is_direct_capable = tl_cuda_has_attribute(device, TL_CUDA_DEVICE_DIRECT_WITH_FILES);
    return properties;
}

static bool has_functions(const struct tl_cuda_sharing *sharing)
{
#define FIND(name, parameters, version)                                                                                \
    if (!sharing->name) return false;
    TL_CUDA_SHARING_FUNCTIONS(FIND)
#undef FIND
    return true;
}

/* Looks, once, whether the device has memory that other processes can map. An error is tried again. */
static void load(struct tl_cuda_device *device)
{
    size_t page_bytes = 0;
    struct tl_error error;
    if (device->is_sharing_loaded) return;
    tl_cuda_load_more(device);
    device->is_sharing_loaded = true;
    if (!has_functions(&device->sharing)) {
        device->why_not_shared = "this CUDA is older than 12.1";
        return;
    }
    if (!tl_cuda_has_attribute(device, TL_CUDA_DEVICE_VIRTUAL_MEMORY_SUPPORTED) ||
        !tl_cuda_has_attribute(device, TL_CUDA_DEVICE_FILES_SUPPORTED)) {
        device->why_not_shared = "this device or its driver cannot make a file descriptor of its memory";
        return;
    }
    struct tl_cuda_properties properties = properties_of(device);
    tl_cuda_error result =
        device->sharing.cuMemGetAllocationGranularity(&page_bytes, &properties, TL_CUDA_GRANULARITY_MINIMUM);
    if (result == TL_CUDA_OK && page_bytes > 0) {
        device->page_bytes = page_bytes;
        return;
    }
    device->why_not_shared = "CUDA does not tell the size of its pages";
    device->is_sharing_loaded = false;
    (void)tl_cuda_fail(device, result, &error, "asking for the granularity of memory");
}

static uint64_t whole_pages(const struct tl_cuda_device *device, uint64_t size_bytes)
{
    uint64_t over_bytes = size_bytes % device->page_bytes;
    return over_bytes == 0 ? size_bytes : size_bytes - over_bytes + device->page_bytes;
}

bool tl_cuda_is_worth_sharing(struct tl_cuda_device *device, uint64_t size_bytes)
{
    if (size_bytes < LEAST_BYTES || size_bytes > INT64_MAX) return false;
    load(device);
    if (device->page_bytes == 0) return false;
    return whole_pages(device, size_bytes) - size_bytes <= size_bytes / MOST_WASTE_DIVISOR;
}

/* ----------------------------------------------------------------------------------------------------- mapping -- */

/* Takes back what was made for the memory, the latest first. Returns the first error. */
static tl_cuda_error unmake(struct tl_cuda_device *device, struct tl_cuda_shared *shared, bool is_mapped,
                            bool has_handle)
{
    const struct tl_cuda_sharing *cuda = &device->sharing;
    tl_cuda_error error = TL_CUDA_OK, result;
    if (is_mapped) error = cuda->cuMemUnmap(shared->address, shared->len_bytes);
    /* Addresses that are still mapped are kept. */
    if (shared->address != 0 && error == TL_CUDA_OK) error = cuda->cuMemAddressFree(shared->address, shared->len_bytes);
    result = has_handle ? cuda->cuMemRelease(shared->handle) : TL_CUDA_OK;
    if (error == TL_CUDA_OK) error = result;
    shared->address = 0;
    return error;
}

/* Maps the allocation with this handle somewhere, for accesses of the device. */
static tl_cuda_error map(struct tl_cuda_device *device, struct tl_cuda_shared *shared, int flags, bool *ret_is_mapped)
{
    const struct tl_cuda_sharing *cuda = &device->sharing;
    const struct tl_cuda_access access = {.location = {TL_CUDA_LOCATION_DEVICE, device->device.index}, .flags = flags};
    tl_cuda_error error = cuda->cuMemAddressReserve(&shared->address, shared->len_bytes, 0, 0, 0);
    if (error != TL_CUDA_OK) shared->address = 0;
    if (error == TL_CUDA_OK) error = cuda->cuMemMap(shared->address, shared->len_bytes, 0, shared->handle, 0);
    *ret_is_mapped = error == TL_CUDA_OK;
    return *ret_is_mapped ? cuda->cuMemSetAccess(shared->address, shared->len_bytes, &access, 1) : error;
}

enum tl_status tl_cuda_shared_create(struct tl_cuda_device *device, uint64_t size_bytes,
                                     struct tl_device_memory *memory, struct tl_error *ret_error)
{
    struct tl_cuda_shared *shared = &memory->shared;
    bool is_mapped = false, has_handle = false;
    char what[64];
    load(device);
    if (device->page_bytes == 0)
        return tl_error_set(ret_error, TL_UNIMPLEMENTED, "no other process can map memory of %s: %s", device->name,
                            device->why_not_shared);
    if (size_bytes > INT64_MAX)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s has no memory for %" PRIu64 " bytes", device->name,
                            size_bytes);
    struct tl_cuda_properties properties = properties_of(device);
    shared->len_bytes = whole_pages(device, size_bytes);
    /* A full device fails here, before addresses are taken. */
    tl_cuda_error error = device->sharing.cuMemCreate(&shared->handle, shared->len_bytes, &properties, 0);
    has_handle = error == TL_CUDA_OK;
    if (error == TL_CUDA_OK) error = map(device, shared, TL_CUDA_ACCESS_READ_WRITE, &is_mapped);
    if (error == TL_CUDA_OK) error = device->cuda->cudaMalloc(&shared->barrier, 1);
    if (error != TL_CUDA_OK) {
        (void)unmake(device, shared, is_mapped, has_handle);
        snprintf(what, sizeof(what), "allocating %" PRIu64 " bytes", size_bytes);
        return tl_cuda_fail(device, error, ret_error, what);
    }
    tl_list_init(&shared->watches);
    shared->number = atomic_fetch_add(&last_number, 1) + 1;
    memory->data = (void *)(uintptr_t)shared->address;
    return TL_OK;
}

void tl_cuda_shared_destroy(struct tl_cuda_device *device, struct tl_cuda_shared *shared)
{
    struct tl_error ignored;
    tl_cuda_error error = shared->barrier ? device->cuda->cudaFree(shared->barrier) : TL_CUDA_OK;
    if (error != TL_CUDA_OK) (void)tl_cuda_fail(device, error, &ignored, "freeing memory");
    error = unmake(device, shared, true, shared->number != 0);
    if (error != TL_CUDA_OK) (void)tl_cuda_fail(device, error, &ignored, "freeing memory");
}

uint64_t tl_device_memory_number(const struct tl_device_memory *memory, uint64_t *ret_len_bytes)
{
    if (memory->shared.number != 0) *ret_len_bytes = memory->shared.len_bytes;
    return memory->shared.number;
}

/* ----------------------------------------------------------------------------------------- exports and imports -- */

static void run_export(struct tl_closure *closure)
{
    struct tl_device_export *exporting = TL_CONTAINER_OF(closure, struct tl_device_export, closure);
    const struct tl_device_memory *memory = exporting->memory;
    struct tl_error status = {.code = TL_OK};
    int file = -1;
    tl_cuda_error error =
        memory->device->sharing.cuMemExportToShareableHandle(&file, memory->shared.handle, TL_CUDA_HANDLE_FILE, 0);
    if (error == TL_CUDA_OK) {
        (void)fcntl(file, F_SETFD, FD_CLOEXEC);
    } else {
        file = -1;
        (void)tl_cuda_fail(memory->device, error, &status, "exporting memory");
    }
    exporting->done(exporting, file, &status);
}

void tl_device_export_start(struct tl_device_export *exporting)
{
    struct tl_device_memory *memory = exporting->memory;
    TL_CHECK(memory->shared.number != 0);
    exporting->closure.run = run_export;
    tl_list_init(&exporting->closure.link);
    tl_closure_thread_post(&memory->device->memory_thread, &exporting->closure);
}

/* Maps the memory of the file. Takes over nothing. */
static enum tl_status import_file(struct tl_cuda_device *device, int file, struct tl_device_memory *memory,
                                  struct tl_error *ret_error)
{
    struct tl_cuda_shared *shared = &memory->shared;
    bool is_mapped = false;
    load(device);
    if (device->page_bytes == 0)
        return tl_error_set(ret_error, TL_UNIMPLEMENTED, "%s maps no memory of another process: %s", device->name,
                            device->why_not_shared);
    tl_cuda_error error =
        device->sharing.cuMemImportFromShareableHandle(&shared->handle, (void *)(intptr_t)file, TL_CUDA_HANDLE_FILE);
    bool has_handle = error == TL_CUDA_OK;
    if (error == TL_CUDA_OK) error = map(device, shared, TL_CUDA_ACCESS_READ, &is_mapped);
    if (error == TL_CUDA_OK) { /* the mapping keeps the memory */
        error = device->sharing.cuMemRelease(shared->handle);
        has_handle = error != TL_CUDA_OK;
    }
    if (error == TL_CUDA_OK) return TL_OK;
    (void)unmake(device, shared, is_mapped, has_handle);
    return tl_cuda_fail(device, error, ret_error, "mapping memory of another process");
}

static void run_import(struct tl_closure *closure)
{
    struct tl_device_import *importing = TL_CONTAINER_OF(closure, struct tl_device_import, closure);
    struct tl_cuda_device *device = tl_cuda_device_of(importing->device);
    struct tl_error status = {.code = TL_OK};
    struct tl_device_memory *memory = tl_alloc_zeroed(sizeof(*memory));
    if (!memory) {
        tl_error_set(&status, TL_RESOURCE_EXHAUSTED, "no memory to map memory of another process");
    } else {
        memory->closure.run = tl_cuda_free_memory;
        memory->device = device;
        memory->shared.len_bytes = importing->len_bytes;
        tl_list_init(&memory->shared.watches);
        if (import_file(device, importing->file, memory, &status) == TL_OK) {
            memory->data = (void *)(uintptr_t)memory->shared.address;
        } else {
            free(memory);
            memory = NULL;
        }
    }
    close(importing->file);
    importing->done(importing, memory, &status);
}

void tl_device_import_start(struct tl_device_import *importing)
{
    importing->closure.run = run_import;
    tl_list_init(&importing->closure.link);
    tl_closure_thread_post(&tl_cuda_device_of(importing->device)->memory_thread, &importing->closure);
}

/* ---------------------------------------------------------------------------------------------------- watching -- */

static void lock(struct tl_cuda_device *device)
{
    TL_CHECK(pthread_mutex_lock(&device->mutex) == 0);
}

static void unlock(struct tl_cuda_device *device)
{
    TL_CHECK(pthread_mutex_unlock(&device->mutex) == 0);
}

void tl_device_watch_start(struct tl_device_watch *watch, struct tl_device_memory *memory)
{
    TL_CHECK(memory->shared.number != 0);
    watch->device = memory->device->device;
    tl_list_init(&watch->link);
    lock(memory->device);
    tl_list_push_back(&memory->shared.watches, &watch->link);
    unlock(memory->device);
}

void tl_device_watch_end(struct tl_device_watch *watch)
{
    struct tl_cuda_device *device = tl_cuda_device_of(watch->device);
    lock(device);
    tl_list_remove(&watch->link);
    unlock(device);
}

void tl_cuda_shared_tell(struct tl_device_memory *memory)
{
    struct tl_list *link;
    if (memory->shared.number == 0) return;
    lock(memory->device);
    while ((link = tl_list_pop_front(&memory->shared.watches)) != NULL) {
        struct tl_device_watch *watch = TL_CONTAINER_OF(link, struct tl_device_watch, link);
        watch->freed(watch);
    }
    unlock(memory->device);
}
