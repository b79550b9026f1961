// SPDX-License-Identifier: Apache-2.0
/*
 * Lists the devices of CUDA without opening any: libcuda tells of each what it is, and no context is created, which
 * would take some hundred MB of the device. What it does not tell stays empty.
 */
#include <ctype.h>
#include <stdlib.h>

#include "base/error.h"
#include "tensor/cuda_internal.h"

void tl_cuda_describe(const struct tl_cuda *cuda, int index, struct tl_device_info *ret_info)
{
    int device;
    size_t memory_bytes = 0;
    *ret_info = (struct tl_device_info){.device = {.kind = TL_DEVICE_CUDA, .index = index}};
    if (cuda->cuDeviceGet(&device, index) != TL_CUDA_OK) return;
    if (cuda->cuDeviceGetName(ret_info->name, sizeof(ret_info->name), device) != TL_CUDA_OK) ret_info->name[0] = '\0';
    if (cuda->cuDeviceTotalMem(&memory_bytes, device) == TL_CUDA_OK) ret_info->memory_bytes = memory_bytes;
    if (cuda->cuDeviceGetPCIBusId(ret_info->pci_address, sizeof(ret_info->pci_address), device) != TL_CUDA_OK)
        ret_info->pci_address[0] = '\0';
    for (char *byte = ret_info->pci_address; *byte; byte++)
        *byte = (char)tolower((unsigned char)*byte);
}

enum tl_status tl_device_list(struct tl_device_info **ret_devices, size_t *ret_count, struct tl_error *ret_error)
{
    struct tl_cuda cuda;
    int count = 0;
    enum tl_status status = tl_cuda_load(&cuda, ret_error);
    if (status != TL_OK) return status;
    tl_cuda_error error = cuda.cudaGetDeviceCount(&count);
    if (error != TL_CUDA_OK)
        return tl_error_set(ret_error, TL_INTERNAL, "the devices of CUDA cannot be counted: %s (CUDA error %d)",
                            cuda.cudaGetErrorString(error), error);
    struct tl_device_info *devices = calloc((size_t)count + 1, sizeof(*devices));
    if (!devices) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a list of devices");
    for (int i = 0; i < count; i++)
        tl_cuda_describe(&cuda, i, &devices[i]);
    *ret_devices = devices;
    *ret_count = (size_t)count;
    return TL_OK;
}
