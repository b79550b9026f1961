// SPDX-License-Identifier: Apache-2.0
/*
 * Memory of CUDA devices as RDMA cards reach it: by a dma-buf, or by its address (nvidia-peermem).
 *
 * Happy path: the memory thread asks for the whole allocation, because a card shall know each allocation once; sets
 * CU_POINTER_ATTRIBUTE_SYNC_MEMOPS on it, or CU_CTX_SYNC_MEMOPS on the context; and exports the pages that it lies in
 * as a dma-buf. An allocation need not begin at a page, so the file begins a little earlier, and offset_bytes says how
 * much.
 *
 * Failure modes: functions that only later releases of CUDA have are looked for when they are first needed. Without
 * that of dma-buf, or when the device or its driver has none, there is no file, and the reason is given; the card may
 * still know the memory by its address. Without the others no card may access the device.
 */
#include <stdio.h>
#include <unistd.h>

#include "base/error.h"
#include "tensor/cuda_internal.h"

struct finding {
    struct tl_cuda_job job;
    const void *data;
    uint64_t len_bytes;
    struct tl_device_allocation *allocation;
};

void tl_cuda_load_more(struct tl_cuda_device *device)
{
    if (device->is_direct_loaded) return;
    tl_cuda_load_direct(device->cuda, &device->direct);
    tl_cuda_load_sharing(device->cuda, &device->sharing);
    device->is_direct_loaded = true;
}

static enum tl_status unsupported(const struct tl_cuda_device *device, const char *why, struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_UNIMPLEMENTED, "no RDMA card can access the memory of %s: %s", device->name, why);
}

/* Asks for an attribute of the device; one that the driver does not know is 0. */
static int get_attribute(struct tl_cuda_device *device, int attribute)
{
    int value = 0, handle;
    bool is_known = device->direct.cuDeviceGetAttribute &&
                    device->cuda->cuDeviceGet(&handle, device->device.index) == TL_CUDA_OK &&
                    device->direct.cuDeviceGetAttribute(&value, attribute, handle) == TL_CUDA_OK;
    return is_known ? value : 0;
}

bool tl_cuda_has_attribute(struct tl_cuda_device *device, int attribute)
{
    return get_attribute(device, attribute) != 0;
}

static enum tl_status find_range(struct finding *finding, struct tl_error *ret_error)
{
    struct tl_cuda_device *device = finding->job.device;
    unsigned long long base, address = (uintptr_t)finding->data;
    size_t size_bytes;
    tl_cuda_error error = device->direct.cuMemGetAddressRange(&base, &size_bytes, address);
    if (error != TL_CUDA_OK) return tl_cuda_fail(device, error, ret_error, "finding the allocation of a tensor");
    if (address - base > size_bytes || finding->len_bytes > size_bytes - (address - base))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "no RDMA card can access %p on %s: its %llu bytes lie in more than one allocation",
                            finding->data, device->name, (unsigned long long)finding->len_bytes);
    finding->allocation->address = (void *)(uintptr_t)base;
    finding->allocation->len_bytes = size_bytes;
    return TL_OK;
}

/* Without a file the reason is noted, unless the device is lost. */
static enum tl_status export_file(struct finding *finding, struct tl_error *ret_error)
{
    struct tl_cuda_device *device = finding->job.device;
    struct tl_device_allocation *allocation = finding->allocation;
    uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t begin = (uintptr_t)allocation->address / page_bytes * page_bytes;
    uint64_t end = (uintptr_t)allocation->address + allocation->len_bytes;
    end = (end + page_bytes - 1) / page_bytes * page_bytes;
    const char *why = NULL;
    if (!device->direct.cuMemGetHandleForAddressRange) {
        why = "this CUDA has no dma-buf, which came with CUDA 11.7";
    } else if (!tl_cuda_has_attribute(device, TL_CUDA_DEVICE_DMA_BUF_SUPPORTED)) {
        why = "its driver has no dma-buf (the open kernel modules of NVIDIA have it)";
    }
    if (why) {
        snprintf(allocation->why_no_file, sizeof(allocation->why_no_file), "%s", why);
        return TL_OK;
    }
    int file = -1;
    tl_cuda_error error =
        device->direct.cuMemGetHandleForAddressRange(&file, begin, end - begin, TL_CUDA_RANGE_DMA_BUF, 0);
    if (error == TL_CUDA_OK) {
        allocation->file = file;
        allocation->offset_bytes = (uintptr_t)allocation->address - begin;
        return TL_OK;
    }
    struct tl_error failure;
    (void)tl_cuda_fail(device, error, &failure, "exporting memory as a dma-buf");
    enum tl_status status = tl_cuda_check_lost(device, ret_error);
    if (status == TL_OK) snprintf(allocation->why_no_file, sizeof(allocation->why_no_file), "%.190s", failure.message);
    return status;
}

/* Memory that other processes can map does not take the attribute; then the whole context gets it. Without a function
 * for that, the error stays. */
static tl_cuda_error make_context_synchronous(struct tl_cuda_device *device, tl_cuda_error error)
{
    unsigned flags;
    if (!device->sharing.cuCtxGetFlags || !device->sharing.cuCtxSetFlags) return error;
    (void)device->cuda->cudaGetLastError();
    error = device->sharing.cuCtxGetFlags(&flags);
    if (error != TL_CUDA_OK || (flags & TL_CUDA_CONTEXT_SYNC_MEMOPS) != 0) return error;
    return device->sharing.cuCtxSetFlags(flags | TL_CUDA_CONTEXT_SYNC_MEMOPS);
}

static enum tl_status find(struct tl_cuda_job *job, struct tl_error *ret_error)
{
    static const unsigned is_synchronous = 1;
    struct finding *finding = TL_CONTAINER_OF(job, struct finding, job);
    struct tl_cuda_device *device = job->device;
    tl_cuda_load_more(device);
    if (!device->direct.cuMemGetAddressRange || !device->direct.cuPointerSetAttribute ||
        !device->direct.cuDeviceGetAttribute)
        return unsupported(device, "the NVIDIA driver lacks a function for that", ret_error);
    enum tl_status status = find_range(finding, ret_error);
    if (status != TL_OK) return status;
    status = export_file(finding, ret_error);
    if (status != TL_OK) return status;
    if (finding->allocation->file < 0 && !tl_cuda_has_attribute(device, TL_CUDA_DEVICE_DIRECT_SUPPORTED))
        return unsupported(device, finding->allocation->why_no_file, ret_error);
    tl_cuda_error error = device->direct.cuPointerSetAttribute(&is_synchronous, TL_CUDA_POINTER_SYNC_MEMOPS,
                                                               (uintptr_t)finding->allocation->address);
    if (error != TL_CUDA_OK) error = make_context_synchronous(device, error);
    if (error == TL_CUDA_OK) return TL_OK;
    if (finding->allocation->file >= 0) close(finding->allocation->file);
    return tl_cuda_fail(device, error, ret_error, "setting CU_POINTER_ATTRIBUTE_SYNC_MEMOPS");
}

enum tl_status tl_device_find_allocation(struct tl_device which, const void *data, uint64_t len_bytes,
                                         struct tl_device_allocation *ret_allocation, struct tl_error *ret_error)
{
    struct tl_cuda_device *device;
    struct tl_device_allocation allocation = {.file = -1};
    struct finding finding = {.data = data, .len_bytes = len_bytes, .allocation = &allocation};
    enum tl_status status = tl_cuda_device_open(which, &device, ret_error);
    if (status == TL_OK) status = tl_cuda_run(device, &finding.job, find, ret_error);
    if (status == TL_OK) *ret_allocation = allocation;
    return status;
}

static enum tl_status check_order(struct tl_cuda_job *job, struct tl_error *ret_error)
{
    struct tl_cuda_device *device = job->device;
    tl_cuda_load_more(device);
    if (get_attribute(device, TL_CUDA_DEVICE_WRITES_ORDERING) >= TL_CUDA_WRITES_ORDERED_FOR_OWNER) return TL_OK;
    return tl_error_set(ret_error, TL_UNIMPLEMENTED,
                        "%s does not order what cards write (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)",
                        device->name);
}

enum tl_status tl_device_check_write_order(struct tl_device which, struct tl_error *ret_error)
{
    struct tl_cuda_device *device;
    struct tl_cuda_job job = {.device = NULL};
    enum tl_status status = tl_cuda_device_open(which, &device, ret_error);
    return status == TL_OK ? tl_cuda_run(device, &job, check_order, ret_error) : status;
}
