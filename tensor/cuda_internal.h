// SPDX-License-Identifier: Apache-2.0
/* What the files of the CUDA device share: the device and its threads. */
#ifndef TENSOR_CUDA_INTERNAL_H
#define TENSOR_CUDA_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/closure_thread.h"
#include "tensor/cuda_load.h"
#include "tensor/device.h"

#define TL_CUDA_MAX_DEVICES 64
#define TL_CUDA_STREAMS 2 /* one for copies to devices, one for copies to the host: they overlap */

struct tl_device_fence {
    struct tl_cuda_device *device;
    void *event;
    unsigned reference_count; /* under device->mutex */
    struct tl_list link;      /* in device->fences while it is unused */
};

/* The thread that makes copies (cuda_copy.c). */
struct tl_cuda_copies {
    char name[TL_DEVICE_TEXT_BYTES];
    bool is_started;       /* under the mutex of opening */
    bool is_ready;         /* the thread's: its current device is set */
    pthread_mutex_t mutex; /* guards posted */
    pthread_cond_t wake;
    struct tl_list posted;                   /* struct tl_device_copy */
    struct tl_list waiting;                  /* the thread's: copies that wait for fences */
    struct tl_list running[TL_CUDA_STREAMS]; /* the thread's: copies in streams, the oldest first */
};

/* Memory that other processes can map, or that was imported from one (cuda_share.c). */
struct tl_cuda_shared {
    uint64_t number;           /* 0: it has none, and cannot be exported */
    unsigned long long handle; /* valid when it has a number */
    unsigned long long address;
    uint64_t len_bytes; /* how long the whole allocation is */
    void *barrier;      /* memory of cudaMalloc: its free waits for all work of the device, which an unmap does not */
    struct tl_list watches; /* struct tl_device_watch, under the device's mutex */
};

struct tl_device_memory {
    struct tl_closure closure; /* gives it back */
    struct tl_cuda_device *device;
    void *data;            /* NULL: no bytes */
    tl_release_fn release; /* gives wrapped memory back; NULL: nothing to call */
    void *release_context;
    struct tl_cuda_shared shared; /* address 0: it is other memory */
};

struct tl_cuda_device {
    struct tl_device device;
    char name[TL_DEVICE_TEXT_BYTES];
    char memory_thread_name[TL_DEVICE_TEXT_BYTES];
    char free_thread_name[TL_DEVICE_TEXT_BYTES];
    const struct tl_cuda *cuda; /* set while it is opened, as the next four */
    struct tl_device_info info;
    void *context;
    void *streams[TL_CUDA_STREAMS];
    struct tl_cuda_direct direct; /* the memory thread's, as the next one (cuda_direct.c) */
    bool is_direct_loaded;
    struct tl_cuda_sharing sharing; /* the memory thread's, as the next three; the thread that frees reads it, too */
    bool is_sharing_loaded;
    uint64_t page_bytes;        /* for memory that other processes can map; 0: there is none, for this reason: */
    const char *why_not_shared; /* static */
    atomic_bool is_open;        /* written under the mutex of opening */
    struct tl_closure_thread memory_thread; /* allocates, pins and looks */
    struct tl_closure_thread free_thread;   /* frees, which can wait for all work of the device */
    struct tl_cuda_copies copies;
    pthread_mutex_t mutex;  /* guards what follows */
    pthread_cond_t changed; /* a job is done, or a block was taken */
    struct tl_list fences;  /* those that are free */
    void *staging;          /* all blocks; NULL: not allocated yet */
    bool is_block_used[TL_STAGING_BLOCKS];
    unsigned kept_blocks;
    struct tl_list staging_waits;  /* struct tl_staging_wait */
    struct tl_closure pin_closure; /* pins the blocks for those that wait */
    bool is_pinning;               /* it was posted */
    bool is_lost;
    char lost_reason[TL_DEVICE_LOST_BYTES / 2]; /* what failed when it was lost */
};

/* Finds the device and opens it if need be. Errors: those of tensor/device.h. */
enum tl_status tl_cuda_device_open(struct tl_device device, struct tl_cuda_device **ret_device,
                                   struct tl_error *ret_error) TL_MUST_USE;
/* The device, which was opened before. */
struct tl_cuda_device *tl_cuda_device_of(struct tl_device device);

/* Makes an error of what CUDA returned; what names the call and its object. Thread: one of a device. Looks whether the
 * device is lost; then that is the error. */
enum tl_status tl_cuda_fail(struct tl_cuda_device *device, tl_cuda_error error, struct tl_error *ret_error,
                            const char *what);
/* The error of a lost device; TL_OK: it is not. */
enum tl_status tl_cuda_check_lost(struct tl_cuda_device *device, struct tl_error *ret_error) TL_MUST_USE;

/* Tells what the device of this number is. */
void tl_cuda_describe(const struct tl_cuda *cuda, int index, struct tl_device_info *ret_info);

/* Whether devices were opened before this process was forked: it has none of their threads. */
bool tl_cuda_is_forked(void);

/* Sets up the calling thread, which is the library's: its current device, and a capture mode in which what it calls
 * does not disturb captures of other threads. It may open no device from then on, which would wait for itself. */
tl_cuda_error tl_cuda_adopt_thread(struct tl_cuda_device *device);

/* Something to do on a thread of the device, for a caller that waits for it. */
struct tl_cuda_job {
    struct tl_closure closure;
    struct tl_cuda_device *device;
    enum tl_status (*run)(struct tl_cuda_job *job, struct tl_error *ret_error);
    struct tl_error *error; /* NULL is allowed */
    enum tl_status status;
    bool is_done;
};
/* On the memory thread. */
enum tl_status tl_cuda_run(struct tl_cuda_device *device, struct tl_cuda_job *job,
                           enum tl_status (*run)(struct tl_cuda_job *job, struct tl_error *ret_error),
                           struct tl_error *ret_error) TL_MUST_USE;

/* On the thread that frees: all that was given back before is free. */
enum tl_status tl_cuda_run_behind_frees(struct tl_cuda_device *device, struct tl_cuda_job *job,
                                        enum tl_status (*run)(struct tl_cuda_job *job, struct tl_error *ret_error),
                                        struct tl_error *ret_error) TL_MUST_USE;

/* Takes a free fence or makes one; the device's context is current. */
tl_cuda_error tl_cuda_fence_take(struct tl_cuda_device *device, struct tl_device_fence **ret_fence);

/* Finds the functions for RDMA cards and for sharing, once. Thread: the memory thread. */
void tl_cuda_load_more(struct tl_cuda_device *device);
/* Asks for an attribute of the device; one that the driver does not know is 0. Thread: the memory thread. */
bool tl_cuda_has_attribute(struct tl_cuda_device *device, int attribute);

/* Whether memory of this size shall be such that other processes can map it. Thread: the memory thread. */
bool tl_cuda_is_worth_sharing(struct tl_cuda_device *device, uint64_t size_bytes);
/* Allocates memory that other processes can map. Errors: TL_UNIMPLEMENTED: the device has none, and why.
 * TL_RESOURCE_EXHAUSTED: it has no more. Thread: the memory thread. */
enum tl_status tl_cuda_shared_create(struct tl_cuda_device *device, uint64_t size_bytes,
                                     struct tl_device_memory *memory, struct tl_error *ret_error) TL_MUST_USE;
/* Frees it, or unmaps what was imported. Thread: the one that frees. */
void tl_cuda_shared_destroy(struct tl_cuda_device *device, struct tl_cuda_shared *shared);
/* Tells those that watch the memory that it is given back. Thread: any. */
void tl_cuda_shared_tell(struct tl_device_memory *memory);
/* The closure that frees memory of the library. */
void tl_cuda_free_memory(struct tl_closure *closure);

void tl_cuda_copies_init(struct tl_cuda_copies *copies);
/* Starts the thread that makes copies, unless it runs. Errors: TL_RESOURCE_EXHAUSTED: no thread. */
enum tl_status tl_cuda_copies_start(struct tl_cuda_device *device, struct tl_error *ret_error) TL_MUST_USE;

#endif
