// SPDX-License-Identifier: Apache-2.0
/* Paths: the ways in which a tensor can travel from one worker to another. */
#ifndef TENSORLANE_PATH_H
#define TENSORLANE_PATH_H

#include <tensorlane/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How the bytes of a tensor travelled from one worker to another. */
enum tl_path {
    TL_PATH_NONE = 0,       /* No bytes travelled: the operation failed, or the tensor is dead or has no elements. */
    TL_PATH_SELF = 1,       /* They stayed within the worker; the receiver got a reference. */
    TL_PATH_GRPC = 2,       /* They came over gRPC and were copied once at the receiver. */
    TL_PATH_SERIALIZED = 3, /* They were serialized (strings), over gRPC or the data plane. */
    TL_PATH_ZERO_COPY = 4,  /* The data plane wrote them straight from the source into the destination tensor. */
    TL_PATH_BOUNCE = 5,     /* The data plane copied them through registered memory on at least one side. */
    TL_PATH_MAPPED = 6,     /* They did not move: the receiver has mapped the file of the owner that they lie in. */
    TL_PATH_GPU_DIRECT = 7, /* A card read or wrote the memory of a GPU itself, and nothing copied them. */
    TL_PATH_GPU_PROXY = 8,  /* They were copied between a GPU and pinned memory of the host, on at least one side. */
    TL_PATH_GPU_IPC = 9,    /* They were copied from one process to another in memory of GPUs. */
    TL_PATH_INLINE = 10,    /* They came inside of a message of the data plane, as small values do. */
};

/* Returns "none", "self", "grpc", "serialized", "zero-copy", "bounce", "mapped", "gpu-direct", "gpu-proxy", "gpu-ipc"
 * or "inline": a static string, never NULL. */
TL_API const char *tl_path_name(enum tl_path path);

#ifdef __cplusplus
}
#endif

#endif
