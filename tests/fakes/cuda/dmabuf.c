// SPDX-License-Identifier: Apache-2.0
/* The functions of libcuda by which RDMA cards reach memory. The file that stands for a dma-buf is empty. */
#include <string.h>
#include <sys/mman.h>

#include "fakes/cuda/state.h"

#define NOT_SUPPORTED 801
#define PAGE_BYTES 4096

static bool has_dma_buf = true, has_peermem = true;
static int write_order = TL_CUDA_WRITES_ORDERED_FOR_OWNER;

void fake_dmabuf_set(bool dma_buf, bool peermem)
{
    pthread_mutex_lock(&state_mutex);
    has_dma_buf = dma_buf;
    has_peermem = peermem;
    pthread_mutex_unlock(&state_mutex);
}

void fake_dmabuf_order_writes(bool are_ordered)
{
    pthread_mutex_lock(&state_mutex);
    write_order = are_ordered ? TL_CUDA_WRITES_ORDERED_FOR_OWNER : 0;
    pthread_mutex_unlock(&state_mutex);
}

static struct memory *find_device_memory(unsigned long long address, const char *what)
{
    struct memory *memory = memory_find_locked((const void *)(uintptr_t)address);
    if (!memory || memory->kind != MEMORY_DEVICE || memory->is_freed) misuse("%s of %#llx", what, address);
    return memory;
}

static tl_cuda_error device_get_attribute(int *ret_value, int attribute, int device)
{
    tl_cuda_error error = fake_cuda_enter("cuDeviceGetAttribute");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    if (device < FIRST_DEVICE || device >= FIRST_DEVICE + FAKE_CUDA_DEVICES)
        misuse("an attribute of device %d", device);
    if (attribute == TL_CUDA_DEVICE_DMA_BUF_SUPPORTED) {
        *ret_value = has_dma_buf;
    } else if (attribute == TL_CUDA_DEVICE_DIRECT_SUPPORTED) {
        *ret_value = has_peermem;
    } else if (attribute == TL_CUDA_DEVICE_VIRTUAL_MEMORY_SUPPORTED || attribute == TL_CUDA_DEVICE_FILES_SUPPORTED ||
               attribute == TL_CUDA_DEVICE_DIRECT_WITH_FILES) {
        *ret_value = fake_sharing_is_on();
    } else if (attribute == TL_CUDA_DEVICE_WRITES_ORDERING) {
        *ret_value = write_order;
    } else {
        misuse("attribute %d of a device", attribute);
    }
    return fake_cuda_leave(TL_CUDA_OK);
}

static tl_cuda_error mem_get_address_range(unsigned long long *ret_base, size_t *ret_size_bytes,
                                           unsigned long long address)
{
    tl_cuda_error error = fake_cuda_enter("cuMemGetAddressRange");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    const struct memory *memory = find_device_memory(address, "the range");
    *ret_base = (uintptr_t)memory->address;
    *ret_size_bytes = memory->size_bytes;
    return fake_cuda_leave(TL_CUDA_OK);
}

static tl_cuda_error pointer_set_attribute(const void *value, int attribute, unsigned long long address)
{
    unsigned flag;
    tl_cuda_error error = fake_cuda_enter("cuPointerSetAttribute");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    memcpy(&flag, value, sizeof(flag));
    if (attribute != TL_CUDA_POINTER_SYNC_MEMOPS || flag != 1) misuse("attribute %d of memory", attribute);
    struct memory *memory = find_device_memory(address, "an attribute");
    if (memory->view) return fake_cuda_leave(NOT_SUPPORTED);
    memory->is_synchronous = true;
    return fake_cuda_leave(TL_CUDA_OK);
}

static tl_cuda_error mem_get_handle(void *ret_handle, unsigned long long address, size_t len_bytes, int type,
                                    unsigned long long flags)
{
    tl_cuda_error error = fake_cuda_enter("cuMemGetHandleForAddressRange");
    if (error != TL_CUDA_OK) return fake_cuda_leave(error);
    if (address % PAGE_BYTES != 0 || len_bytes % PAGE_BYTES != 0 || type != TL_CUDA_RANGE_DMA_BUF || flags != 0)
        misuse("a handle of %zu bytes at %#llx, type %d, flags %llu", len_bytes, address, type, flags);
    (void)find_device_memory(address, "a handle");
    if (!has_dma_buf) return fake_cuda_leave(NOT_SUPPORTED);
    int file = memfd_create("fake-dma-buf", MFD_CLOEXEC);
    if (file < 0) misuse("there is no file for a dma-buf");
    memcpy(ret_handle, &file, sizeof(file));
    return fake_cuda_leave(TL_CUDA_OK);
}

const struct fake_entry fake_dmabuf_entries[] = {
    {"cuDeviceGetAttribute", (void *)device_get_attribute},
    {"cuMemGetAddressRange", (void *)mem_get_address_range},
    {"cuPointerSetAttribute", (void *)pointer_set_attribute},
    {"cuMemGetHandleForAddressRange", (void *)mem_get_handle},
    {NULL, NULL},
};
