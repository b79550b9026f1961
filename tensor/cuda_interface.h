// SPDX-License-Identifier: Apache-2.0
/*
 * The part of the CUDA interface that we use, in our own declarations, so that building needs none of NVIDIA's headers
 * and one binary works with the libraries of CUDA 11.3 to 13. tests/structure/cuda.py compares all of this with their
 * headers.
 *
 * Handles (streams, events, contexts) are void pointers, enums are ints; cudaError_t and CUresult have the same numbers
 * wherever we look at them. cudaDeviceProp is not used: its size changes with every release.
 */
#ifndef TENSOR_CUDA_INTERFACE_H
#define TENSOR_CUDA_INTERFACE_H

#include <stddef.h>

typedef int tl_cuda_error;

enum {
    TL_CUDA_OK = 0,
    TL_CUDA_INVALID_VALUE = 1,
    TL_CUDA_NO_MEMORY = 2,
    TL_CUDA_UNLOADING = 4, /* the process ends */
    TL_CUDA_TOO_OLD = 35,  /* cudaErrorInsufficientDriver */
    TL_CUDA_NO_DEVICE = 100,
    TL_CUDA_INVALID_CONTEXT = 201,
    TL_CUDA_INVALID_HANDLE = 400,
    TL_CUDA_NOT_READY = 600,
    TL_CUDA_CAPTURE_IMPLICIT = 906,
};

enum {
    TL_CUDA_MEMORY_UNKNOWN = 0,
    TL_CUDA_MEMORY_HOST = 1,
    TL_CUDA_MEMORY_DEVICE = 2,
    TL_CUDA_MEMORY_MANAGED = 3,
};

enum {
    TL_CUDA_COPY_DEFAULT = 4,        /* cudaMemcpyDefault: the addresses say from where to where */
    TL_CUDA_STREAM_NON_BLOCKING = 1, /* the legacy stream does not wait for it */
    TL_CUDA_EVENT_DISABLE_TIMING = 2,
    TL_CUDA_CAPTURE_MODE_RELAXED = 2,
    TL_CUDA_CAPTURE_NONE = 0,
    TL_CUDA_HOST_REGISTER_PORTABLE = 1, /* for all devices */
};

enum {
    TL_CUDA_DEVICE_DIRECT_SUPPORTED = 116,  /* GPUDirect RDMA by the address (nvidia-peermem) */
    TL_CUDA_DEVICE_WRITES_ORDERING = 118,   /* which contexts see the writes of cards in order */
    TL_CUDA_WRITES_ORDERED_FOR_OWNER = 100, /* the context that the memory belongs to; greater: more */
    TL_CUDA_DEVICE_DMA_BUF_SUPPORTED = 124, /* the same by a dma-buf */
    TL_CUDA_POINTER_SYNC_MEMOPS = 6,
    TL_CUDA_RANGE_DMA_BUF = 1,
};

enum {
    TL_CUDA_DEVICE_VIRTUAL_MEMORY_SUPPORTED = 102, /* cuMemCreate and what belongs to it */
    TL_CUDA_DEVICE_FILES_SUPPORTED = 103,          /* such memory as a file descriptor */
    TL_CUDA_DEVICE_DIRECT_WITH_FILES = 110,        /* such memory can be made so that RDMA cards reach it */
    TL_CUDA_ALLOCATION_PINNED = 1,
    TL_CUDA_HANDLE_FILE = 1,
    TL_CUDA_LOCATION_DEVICE = 1,
    TL_CUDA_GRANULARITY_MINIMUM = 0,
    TL_CUDA_ACCESS_READ = 1,
    TL_CUDA_ACCESS_READ_WRITE = 3,
    TL_CUDA_CONTEXT_SYNC_MEMOPS = 0x80,
};

/* struct cudaPointerAttributes has 24 bytes in CUDA 11 and 12 and 88 in 13, and begins with the same fields. There is
 * space for more. */
struct tl_cuda_pointer {
    int type;
    int device;
    void *device_pointer;
    void *host_pointer;
    unsigned char later[104];
};

/* struct CUmemLocation */
struct tl_cuda_location {
    int type;
    int id; /* the number of the device */
};

/* struct CUmemAllocationProp */
struct tl_cuda_properties {
    int type;
    int handle_types;
    struct tl_cuda_location location;
    void *windows; /* NULL */
    unsigned char compression;
    unsigned char is_direct_capable;
    unsigned short usage;
    unsigned char reserved[4];
};

/* struct CUmemAccessDesc */
struct tl_cuda_access {
    struct tl_cuda_location location;
    int flags;
};

/* clang-format off */
/* X(name, parameters): functions of libcudart, which return a tl_cuda_error. */
#define TL_CUDA_RUNTIME_FUNCTIONS(X)                                                                                   \
    X(cudaRuntimeGetVersion, (int *ret_version))                                                                       \
    X(cudaDriverGetVersion, (int *ret_version))                                                                        \
    X(cudaGetDeviceCount, (int *ret_count))                                                                            \
    X(cudaSetDevice, (int device))                                                                                     \
    X(cudaMalloc, (void **ret_memory, size_t size_bytes))                                                              \
    X(cudaFree, (void *memory))                                                                                        \
    X(cudaHostAlloc, (void **ret_memory, size_t size_bytes, unsigned flags))                                           \
    X(cudaHostRegister, (void *memory, size_t size_bytes, unsigned flags))                                             \
    X(cudaHostUnregister, (void *memory))                                                                              \
    X(cudaPointerGetAttributes, (struct tl_cuda_pointer *ret_pointer, const void *memory))                             \
    X(cudaStreamCreateWithFlags, (void **ret_stream, unsigned flags))                                                  \
    X(cudaStreamQuery, (void *stream))                                                                                 \
    X(cudaStreamSynchronize, (void *stream))                                                                           \
    X(cudaThreadExchangeStreamCaptureMode, (int *mode))                                                                \
    X(cudaEventRecord, (void *event, void *stream))                                                                    \
    X(cudaEventQuery, (void *event))                                                                                   \
    X(cudaMemcpyAsync, (void *to, const void *from, size_t len_bytes, int kind, void *stream))                         \
    X(cudaMemcpyPeerAsync,                                                                                             \
      (void *to, int to_device, const void *from, int from_device, size_t len_bytes, void *stream))                    \
    X(cudaGetLastError, (void))

/* X(name, parameters): functions of libcuda. They serve on the threads of the caller, because they change nothing of
 * what the runtime keeps for a thread. */
#define TL_CUDA_LIBCUDA_FUNCTIONS(X)                                                                                   \
    X(cuDeviceGet, (int *ret_device, int index))                                                                       \
    X(cuDeviceGetName, (char *ret_name, int capacity, int device))                                                     \
    X(cuDeviceGetPCIBusId, (char *ret_address, int capacity, int device))                                              \
    X(cuDeviceTotalMem, (size_t *ret_bytes, int device))                                                               \
    X(cuCtxGetCurrent, (void **ret_context))                                                                           \
    X(cuCtxPushCurrent, (void *context))                                                                               \
    X(cuCtxPopCurrent, (void **ret_context))                                                                           \
    X(cuThreadExchangeStreamCaptureMode, (int *mode))                                                                  \
    X(cuStreamIsCapturing, (void *stream, int *ret_capture))                                                           \
    X(cuEventCreate, (void **ret_event, unsigned flags))                                                               \
    X(cuEventRecord, (void *event, void *stream))

/* X(name, parameters, version): functions of libcuda that only the direct access of RDMA cards needs, and the release
 * of CUDA that they have come with. One that is missing is NULL. */
#define TL_CUDA_DIRECT_FUNCTIONS(X)                                                                                    \
    X(cuDeviceGetAttribute, (int *ret_value, int attribute, int device), 11030)                                        \
    X(cuMemGetAddressRange, (unsigned long long *ret_base, size_t *ret_size_bytes, unsigned long long address), 11030) \
    X(cuPointerSetAttribute, (const void *value, int attribute, unsigned long long address), 11030)                    \
    X(cuMemGetHandleForAddressRange,                                                                                   \
      (void *ret_handle, unsigned long long address, size_t len_bytes, int type, unsigned long long flags), 11070)

/* X(name, parameters, version): functions of libcuda that only memory needs that other processes can map, and, the last
 * two, its registration for RDMA cards. One that is missing is NULL. */
#define TL_CUDA_SHARING_FUNCTIONS(X)                                                                                   \
    X(cuMemGetAllocationGranularity, (size_t *ret_bytes, const struct tl_cuda_properties *properties, int option),     \
      11030)                                                                                                           \
    X(cuMemCreate, (unsigned long long *ret_handle, size_t size_bytes, const struct tl_cuda_properties *properties,    \
                    unsigned long long flags), 11030)                                                                  \
    X(cuMemRelease, (unsigned long long handle), 11030)                                                                \
    X(cuMemAddressReserve, (unsigned long long *ret_address, size_t len_bytes, size_t alignment,                       \
                            unsigned long long hint, unsigned long long flags), 11030)                                 \
    X(cuMemAddressFree, (unsigned long long address, size_t len_bytes), 11030)                                         \
    X(cuMemMap, (unsigned long long address, size_t len_bytes, size_t offset_bytes, unsigned long long handle,         \
                 unsigned long long flags), 11030)                                                                     \
    X(cuMemUnmap, (unsigned long long address, size_t len_bytes), 11030)                                               \
    X(cuMemSetAccess, (unsigned long long address, size_t len_bytes, const struct tl_cuda_access *accesses,            \
                       size_t count), 11030)                                                                           \
    X(cuMemExportToShareableHandle, (void *ret_file, unsigned long long handle, int type, unsigned long long flags),   \
      11030)                                                                                                           \
    X(cuMemImportFromShareableHandle, (unsigned long long *ret_handle, void *file, int type), 11030)                   \
    X(cuCtxGetFlags, (unsigned *ret_flags), 11030)                                                                     \
    X(cuCtxSetFlags, (unsigned flags), 12010)
/* clang-format on */

/* How libcudart tells the address of a function of libcuda: the second form has come with CUDA 12, the third one, which
 * takes the place of the others, with 12.5. */
typedef tl_cuda_error (*tl_cuda_entry_3_fn)(const char *name, void **ret_function, unsigned long long flags);
typedef tl_cuda_error (*tl_cuda_entry_4_fn)(const char *name, void **ret_function, unsigned long long flags,
                                            int *ret_found);
typedef tl_cuda_error (*tl_cuda_entry_version_fn)(const char *name, void **ret_function, unsigned version,
                                                  unsigned long long flags, int *ret_found);

struct tl_cuda {
#define TL_CUDA_FIELD(name, parameters) tl_cuda_error(*name) parameters;
    TL_CUDA_RUNTIME_FUNCTIONS(TL_CUDA_FIELD)
    TL_CUDA_LIBCUDA_FUNCTIONS(TL_CUDA_FIELD)
#undef TL_CUDA_FIELD
    const char *(*cudaGetErrorString)(tl_cuda_error error);
    int version;   /* what libcudart says: 1000 * major + 10 * minor */
    void *library; /* libcudart, which stays loaded */
};

struct tl_cuda_sharing {
#define TL_CUDA_FIELD(name, parameters, version) tl_cuda_error(*name) parameters;
    TL_CUDA_SHARING_FUNCTIONS(TL_CUDA_FIELD)
#undef TL_CUDA_FIELD
};

struct tl_cuda_direct {
#define TL_CUDA_FIELD(name, parameters, version) tl_cuda_error(*name) parameters;
    TL_CUDA_DIRECT_FUNCTIONS(TL_CUDA_FIELD)
#undef TL_CUDA_FIELD
};

#endif
