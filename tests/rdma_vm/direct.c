// SPDX-License-Identifier: Apache-2.0
/*
 * A library that is loaded before libtensorlane (LD_PRELOAD), so that soft-RoCE reaches the GPUs of the double of
 * libcudart (fakes/cuda). soft-RoCE knows no dma-bufs; in place of one, ibv_reg_dmabuf_mr registers the double's second
 * mapping under the addresses of the GPU. So the card moves the bytes, and the CPU cannot.
 *
 * Failure modes: without the double or libibverbs in the process nothing is registered, as on a card without dma-bufs.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>

#include "fakes/cuda/fake_cuda.h"

#define PAGE_BYTES 4096

static void *find(const char *library, const char *name)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    return handle != NULL ? dlsym(handle, name) : NULL;
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *domain, uint64_t offset, size_t len_bytes, uint64_t iova, int file,
                                 int access)
{
    const struct fake_cuda *cuda = find("libcudart.so.12", "fake_cuda_table");
    struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, uint64_t, unsigned);
    *(void **)&reg_mr = find("libibverbs.so.1", "ibv_reg_mr_iova2");
    if (cuda == NULL || reg_mr == NULL || offset != iova % PAGE_BYTES || fcntl(file, F_GETFD) < 0) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return reg_mr(domain, cuda->reach((void *)(uintptr_t)iova), len_bytes, iova, (unsigned)access);
}
