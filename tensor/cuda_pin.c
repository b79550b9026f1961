// SPDX-License-Identifier: Apache-2.0
/*
 * Memory of the caller that is pinned for all devices.
 *
 * The memory thread pins. Unpinning can wait for work of the device, so the thread that frees does it, and no caller
 * waits for that.
 *
 * Failure modes: memory that cannot be unpinned stays pinned, and its owner leaves it mapped. That happens when the
 * device is lost, until the process starts anew, or when the process ends.
 */
#include <inttypes.h>
#include <stdio.h>

#include "base/check.h"
#include "base/error.h"
#include "tensor/cuda_internal.h"

struct pinning {
    struct tl_cuda_job job;
    void *address;
    uint64_t len_bytes;
};

static enum tl_status pin(struct tl_cuda_job *job, struct tl_error *ret_error)
{
    const struct pinning *pinning = TL_CONTAINER_OF(job, struct pinning, job);
    char what[64];
    tl_cuda_error error =
        job->device->cuda->cudaHostRegister(pinning->address, pinning->len_bytes, TL_CUDA_HOST_REGISTER_PORTABLE);
    if (error == TL_CUDA_OK) return TL_OK;
    snprintf(what, sizeof(what), "pinning %" PRIu64 " bytes of the host", pinning->len_bytes);
    return tl_cuda_fail(job->device, error, ret_error, what);
}

enum tl_status tl_device_pin(struct tl_device which, void *address, uint64_t len_bytes, struct tl_error *ret_error)
{
    struct pinning pinning = {.address = address, .len_bytes = len_bytes};
    struct tl_cuda_device *device;
    enum tl_status status = tl_cuda_device_open(which, &device, ret_error);
    return status == TL_OK ? tl_cuda_run(device, &pinning.job, pin, ret_error) : status;
}

static void unpin(struct tl_closure *closure)
{
    struct tl_device_unpin *unpinned = TL_CONTAINER_OF(closure, struct tl_device_unpin, closure);
    struct tl_cuda_device *device = tl_cuda_device_of(unpinned->device);
    struct tl_error status = {.code = TL_OK};
    tl_cuda_error error = device->cuda->cudaHostUnregister(unpinned->address);
    if (error != TL_CUDA_OK) (void)tl_cuda_fail(device, error, &status, "unpinning memory of the host");
    unpinned->done(unpinned, &status);
}

void tl_device_unpin(struct tl_device_unpin *unpinned)
{
    static const struct tl_error success = {.code = TL_OK};
    if (tl_cuda_is_forked()) {
        unpinned->done(unpinned, &success);
        return;
    }
    unpinned->closure.run = unpin;
    tl_list_init(&unpinned->closure.link);
    tl_closure_thread_post(&tl_cuda_device_of(unpinned->device)->free_thread, &unpinned->closure);
}
