// SPDX-License-Identifier: Apache-2.0
/*
 * Devices: memory, copies and points in streams, without a word of CUDA (docs/gpu.md).
 *
 * Happy path: tl_device_memory_create allocates; tl_device_fence_record notes on the caller's thread how far a stream
 * of the caller has come; tl_device_copy_start hands over a copy that begins when its fences are reached; the copy
 * reports its end on a thread of the device. Pinned memory for copies from and to the host comes from
 * tl_device_staging_take.
 *
 * A device is opened when it is first asked for: that loads CUDA and starts the threads of the device. One makes and
 * polls copies, one allocates and looks, and one frees, which can wait for all work of the device. All calls into CUDA
 * happen on them, except that fences are recorded on the caller's thread, because streams may belong to a thread.
 *
 * A device whose context has failed is lost until the process starts anew: all that is asked of it fails with
 * TL_FAILED_PRECONDITION. Nothing here ends the process.
 */
#ifndef TENSOR_DEVICE_H
#define TENSOR_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/tensor.h>

#include "base/list.h"
#include "base/mailbox.h"

/* Writes "host" or "gpu:0"; returns buffer. */
#define TL_DEVICE_TEXT_BYTES 24
char *tl_device_format(struct tl_device device, char buffer[TL_DEVICE_TEXT_BYTES]);

/* Errors of every function that opens a device: TL_UNIMPLEMENTED: not a kind of device. TL_NOT_FOUND: there is no such
 * device. TL_FAILED_PRECONDITION: CUDA is missing or too old, naming what; the device is lost; the thread drives a loop
 * or a device, which must not wait; or the process was forked from one that used CUDA. TL_RESOURCE_EXHAUSTED: no memory
 * or thread. TL_INTERNAL: CUDA failed otherwise. */

/* Opens the device. Errors: as above. Blocks: yes. */
enum tl_status tl_device_open(struct tl_device device, struct tl_error *ret_error) TL_MUST_USE;

/* -------------------------------------------------------------------------------------------------------- list -- */

/* A device, as its driver describes it. */
struct tl_device_info {
    struct tl_device device;
    char name[128];        /* "NVIDIA H100 80GB HBM3"; empty: unknown, as the next two */
    char pci_address[24];  /* "0000:3b:00.0" */
    uint64_t memory_bytes; /* 0: unknown */
    bool is_lost;          /* it was opened, and is lost */
};

/* Lists the devices that CUDA shows to this process. None of them is opened, but CUDA is loaded.
 * Errors: as of functions that open a device. Ownership: the caller frees the list with free(). Thread: one that uses
 * no CUDA itself, because an error of CUDA stays at the thread. Blocks: yes. */
enum tl_status tl_device_list(struct tl_device_info **ret_devices, size_t *ret_count,
                              struct tl_error *ret_error) TL_MUST_USE;

/* Lists the devices that this process has opened, as they were found then. Calls nothing of CUDA.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory. Ownership: the caller frees the list with free(). Thread: any, also one
 * that drives a loop. */
enum tl_status tl_device_list_open(struct tl_device_info **ret_devices, size_t *ret_count,
                                   struct tl_error *ret_error) TL_MUST_USE;

/* ------------------------------------------------------------------------------------------------------ memory -- */

struct tl_device_memory;

/* Allocates memory of a device; size_bytes may be 0. Opens the device.
 * Errors: as above; TL_RESOURCE_EXHAUSTED: the device has not so much memory, also after all that was given back before
 * is free. Blocks: yes. */
enum tl_status tl_device_memory_create(struct tl_device device, uint64_t size_bytes,
                                       struct tl_device_memory **ret_memory, struct tl_error *ret_error) TL_MUST_USE;

/* An allocation that no thread waits for, embedded in what it is part of. */
struct tl_device_request {
    struct tl_device device; /* open */
    uint64_t size_bytes;     /* may be 0 */
    bool is_shared;          /* it must be memory that other processes can map, with at least one byte */
    /* The memory is there, which is the callee's, or NULL and a status that says why not. Thread: the device's; it must
     * not wait. */
    void (*done)(struct tl_device_request *request, struct tl_device_memory *memory, const struct tl_error *status);
    struct tl_closure closure; /* the device's, from here on */
    bool is_tried;             /* there was no memory, and it waits for frees */
};

/* Starts an allocation; done follows exactly once, and never in this call. Thread: any, also one that drives a loop. */
void tl_device_memory_request(struct tl_device_request *request);

/* Takes over memory of the caller, after a look at its first and last byte. Opens the device. release may be NULL.
 * Errors: as above; TL_INVALID_ARGUMENT: it is not memory of this device. TL_UNIMPLEMENTED: managed memory. release is
 * not called then. Blocks: yes. */
enum tl_status tl_device_memory_wrap(struct tl_device device, void *data, uint64_t capacity_bytes,
                                     tl_release_fn release, void *context, struct tl_device_memory **ret_memory,
                                     struct tl_error *ret_error) TL_MUST_USE;

/* Frees the memory, or calls release, later and on a thread of the library. In a process that was forked it does
 * nothing. NULL is accepted. Thread: any, also one that drives a loop. */
void tl_device_memory_destroy(struct tl_device_memory *memory);

void *tl_device_memory_data(const struct tl_device_memory *memory);

/* ------------------------------------------------------------------------------------------------------ fences -- */

/* A point in a stream of the caller: what was in the stream before it. */
struct tl_device_fence;

/* Records a fence; *ret_fence is NULL for TL_STREAM_NONE. Opens the device.
 * Errors: as above; TL_FAILED_PRECONDITION: the stream is being captured into a graph, or, for the legacy stream, one
 * that it would wait for. TL_INVALID_ARGUMENT: not a stream of this device.
 * Ownership: *ret_fence until tl_device_fence_put. Thread: that of the stream for TL_STREAM_PER_THREAD, else any. The
 * current device and the capture mode of the thread stay what they are. */
enum tl_status tl_device_fence_record(struct tl_device device, tl_stream stream, struct tl_device_fence **ret_fence,
                                      struct tl_error *ret_error) TL_MUST_USE;

/* One more reference to a fence, for tl_device_fence_put; NULL for NULL. Thread: any. */
struct tl_device_fence *tl_device_fence_get(struct tl_device_fence *fence);

/* Gives a reference back; no copy waits for the fence after the last one. NULL is accepted. Thread: any, also one that
 * drives a loop. */
void tl_device_fence_put(struct tl_device_fence *fence);

/* ------------------------------------------------------------------------------------------------------ copies -- */

/* A copy, embedded in what it is part of. */
struct tl_device_copy {
    struct tl_device device;                /* makes the copy; open */
    void *to;                               /* memory of any device, or pinned memory */
    const void *from;                       /* the same */
    uint64_t len_bytes;                     /* 0: nothing is copied; it only waits for the fences */
    bool is_to_host;                        /* `to` is pinned memory */
    struct tl_device from_device;           /* where `from` lies, if that is another device than `device`, on which `to`
                                               lies then; else the host */
    const struct tl_device_fence *after[2]; /* both must be reached before a byte is read or written; may be NULL */
    /* The copy is over, and neither side is touched any more. With TL_OK the bytes are visible to everything that
     * begins afterwards. Thread: the device's; it must not wait, nor call functions of this header that do. */
    void (*done)(struct tl_device_copy *copy, const struct tl_error *status);
    struct tl_list link;              /* the device's, from here on */
    struct tl_device_fence *finished; /* recorded behind the copy */
};

/* Starts a copy; done follows exactly once, whatever happens. Copies that wait for fences do not hold up others.
 * Thread: any, also one that drives a loop. */
void tl_device_copy_start(struct tl_device_copy *copy);

/* ----------------------------------------------------------------------------------------------------- sharing -- */

/* Other processes of this host can map memory that tl_device_memory_create or tl_device_memory_request has allocated,
 * if CUDA can do that on this device and rounding the size up to whole pages of the device costs at most an eighth of
 * it; and, with is_shared, whatever that costs. Each such allocation has a number, unique in this process and at
 * least 1. */

/* Returns the number; 0: no other process can map this memory. *ret_len_bytes is the length of the whole allocation. */
uint64_t tl_device_memory_number(const struct tl_device_memory *memory, uint64_t *ret_len_bytes);

/* An export of memory that has a number, embedded in what it is part of. */
struct tl_device_export {
    struct tl_device_memory *memory; /* the caller keeps it until `done` */
    /* The file descriptor, which the callee closes, or -1 and a status that says why not. Thread: the device's; it must
     * not wait. */
    void (*done)(struct tl_device_export *exporting, int file, const struct tl_error *status);
    struct tl_closure closure; /* the device's, from here on */
};

/* Starts an export; done follows exactly once, and never in this call. Thread: any, also one that drives a loop. */
void tl_device_export_start(struct tl_device_export *exporting);

/* An import of memory that another process has exported, embedded in what it is part of. */
struct tl_device_import {
    struct tl_device device; /* that reads the memory; open */
    int file;                /* taken over. It may be anything: what is no such memory is refused */
    uint64_t len_bytes;      /* how long the whole allocation is */
    /* The memory, which the callee gives back when no copy reads it any more; or NULL and a status that says why not.
     * Copies may read it, whatever becomes of the process that has exported it. Thread: the device's; it must not wait.
     */
    void (*done)(struct tl_device_import *importing, struct tl_device_memory *memory, const struct tl_error *status);
    struct tl_closure closure; /* the device's, from here on */
};

/* Starts an import; done follows exactly once, and never in this call. Thread: any, also one that drives a loop. */
void tl_device_import_start(struct tl_device_import *importing);

/* A wait for the moment when memory that has a number is given back, embedded in what it is for. */
struct tl_device_watch {
    /* The memory is given back, and is freed afterwards. Thread: that of tl_device_memory_destroy; it must neither wait
     * nor call a function of this header. */
    void (*freed)(struct tl_device_watch *watch);
    struct tl_device device; /* the device's, like the next one */
    struct tl_list link;
};

/* Begins to watch: freed is called once, unless the watch ends before. Thread: any, also one that drives a loop. */
void tl_device_watch_start(struct tl_device_watch *watch, struct tl_device_memory *memory);
/* Ends the watch: freed is over or will not be called. Thread: as above. */
void tl_device_watch_end(struct tl_device_watch *watch);

/* ----------------------------------------------------------------------------------------------- direct access -- */

/* A whole allocation of a device, as an RDMA card can register it. */
struct tl_device_allocation {
    void *address;
    uint64_t len_bytes;
    int file; /* its dma-buf, which the caller closes; -1: there is none, for the reason in `why_no_file` */
    uint64_t offset_bytes; /* where the allocation begins in the file */
    char why_no_file[192];
};

/* Finds the allocation that `data` lies in, and prepares it for RDMA cards: from now on synchronous copies and fills of
 * CUDA in this allocation are over when their calls return, and no card sees half of one.
 * Errors: as above; TL_UNIMPLEMENTED: this CUDA or this device cannot do it, and why. TL_INVALID_ARGUMENT: all
 * len_bytes of data do not lie in one allocation. Blocks: yes. */
enum tl_status tl_device_find_allocation(struct tl_device device, const void *data, uint64_t len_bytes,
                                         struct tl_device_allocation *ret_allocation,
                                         struct tl_error *ret_error) TL_MUST_USE;

/* Says whether what an RDMA card writes into memory of the device is visible, without a flush, to all that CUDA begins
 * there after the card has completed the write.
 * Errors: as above; TL_UNIMPLEMENTED: it is not, or this CUDA cannot tell. Blocks: yes. */
enum tl_status tl_device_check_write_order(struct tl_device device, struct tl_error *ret_error) TL_MUST_USE;

/* ----------------------------------------------------------------------------------------------------- pinning -- */

/* Pins memory of the caller, so that copies of every device may use it. Other processes may have mapped it too. Opens
 * the device, whose threads call CUDA for it.
 * Errors: as above; TL_RESOURCE_EXHAUSTED: so much memory cannot be pinned. TL_INTERNAL: CUDA failed otherwise, because
 * a part of the memory is pinned already, for instance. Ownership: the memory must stay mapped until tl_device_unpin is
 * done. Blocks: yes. */
enum tl_status tl_device_pin(struct tl_device device, void *address, uint64_t len_bytes,
                             struct tl_error *ret_error) TL_MUST_USE;

/* The end of that, embedded in what the memory is part of. */
struct tl_device_unpin {
    struct tl_device device; /* as in tl_device_pin, as the next one */
    void *address;
    /* With TL_OK the memory may be unmapped. Otherwise CUDA still takes it for pinned, and would do so with what is
     * mapped there later: it must stay mapped. Thread: the device's, or in a process that was forked the caller's; it
     * must not wait. */
    void (*done)(struct tl_device_unpin *unpin, const struct tl_error *status);
    struct tl_closure closure; /* the device's, from here on */
};

/* Starts to unpin memory that no copy uses any more; done follows exactly once. In a process that was forked nothing is
 * pinned, and done is called at once. Thread: any, also one that drives a loop. */
void tl_device_unpin(struct tl_device_unpin *unpin);

/* -------------------------------------------------------------------------------------------------------- loss -- */

/* Counts the devices that are lost. With any, it writes what has become of the first: "gpu:0 is lost: a copy failed:
 * an illegal memory access was encountered (CUDA error 700)". Calls nothing of CUDA. Thread: any, also one that drives
 * a loop. */
#define TL_DEVICE_LOST_BYTES 512
unsigned tl_device_count_lost(char ret_reason[TL_DEVICE_LOST_BYTES]);

/* ----------------------------------------------------------------------------------------------------- staging -- */

/* Pinned memory for copies from and to the host: a device has TL_STAGING_BLOCKS of them, allocated when they are first
 * wanted. A caller gives its block back when the copy is over, so that others wait for nothing but the
 * device. */
#define TL_STAGING_BLOCK_BYTES (UINT64_C(2) << 20)
#define TL_STAGING_BLOCKS 8
/* So many blocks may be kept for longer: until a loop runs, for instance, or gRPC has sent what they hold. */
#define TL_STAGING_KEPT_BLOCKS (TL_STAGING_BLOCKS / 2)

/* Takes one block, behind those that asked before, and a second one if it is free and no caller waits for it, so that
 * no taker waits for another that holds one. Opens the device. Errors: as above; TL_RESOURCE_EXHAUSTED: no memory can
 * be pinned. Blocks: until a block is free. */
enum tl_status tl_device_staging_take(struct tl_device device, void *ret_blocks[2], unsigned *ret_count,
                                      struct tl_error *ret_error) TL_MUST_USE;

/* Gives the blocks back; no copy may use them any more. Thread: any, also one that drives a loop. */
void tl_device_staging_give(struct tl_device device, void *const blocks[2], unsigned count);

/* A wait for a block, embedded in what the block is for. */
struct tl_staging_wait {
    struct tl_device device; /* open */
    /* Gives the block, or says why there will be none; once. Thread: any, and the caller's own during the request; it
     * must not wait. */
    void (*ready)(struct tl_staging_wait *wait, void *block, const struct tl_error *status);
    struct tl_list link; /* initialised by the caller; the device's from the request on */
};

/* Asks for a block; blocks are given in the order of the requests. Thread: any, also one that drives a loop. */
void tl_device_staging_request(struct tl_staging_wait *wait);
/* Takes a request back. False: ready was called, is just being called, or will be, since the request was not made yet.
 * Thread: any. */
bool tl_device_staging_cancel(struct tl_staging_wait *wait) TL_MUST_USE;
/* Takes a block if one is free and no request waits; else NULL. Thread: any, also one that drives a loop. */
void *tl_device_staging_try(struct tl_device device);
/* Asks to keep a block that was taken. False: TL_STAGING_KEPT_BLOCKS are kept. Thread: any. */
bool tl_device_staging_keep(struct tl_device device) TL_MUST_USE;
/* Gives back, in `ready`, the block that it has brought; the next request gets it. Thread: that of `ready`. */
void tl_device_staging_decline(struct tl_staging_wait *wait, void *block);
/* Gives a block back, which may have been kept; no copy may use it any more. Thread: any, also one that drives a loop.
 */
void tl_device_staging_put(struct tl_device device, void *block, bool was_kept);

#endif
