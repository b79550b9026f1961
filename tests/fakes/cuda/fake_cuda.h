// SPDX-License-Identifier: Apache-2.0
/*
 * A double of NVIDIA's libcudart, with the functions of libcuda that it gives access to: a shared library with the same
 * soname, once as CUDA 11.8, once as 12.9 and once as 13.0.
 *
 * Device memory is a file in memory that is mapped twice. The addresses that the program gets allow no access, so that
 * the CPU, and a system call too, fails on them; the double itself uses the other mapping. New memory holds
 * FAKE_POISON, memory that was freed is never used again.
 *
 * Memory that processes can map (cuMemCreate) is a file in memory of its own, of which an export is another descriptor.
 * Each process that maps it sees it twice, like its other memory. Its addresses are never used again.
 *
 * Copies, events and kernels run on a thread of the double, later, from one stream after another in an order that comes
 * from the seed; a copy reads its source only then. The legacy stream waits for blocking streams, and they for it.
 *
 * A misuse ends the process with a line on stderr: host memory in a copy that is not pinned when the copy begins or
 * runs, memory that is not allocated or was freed, memory that was unmapped while it was registered, memory to which
 * the device of a stream has no access, a stream or event of another device, an event that is recorded in a stream that
 * is being captured, and any call while `is_forbidden` says so. Calls that may wait for the device do wait for it.
 *
 * What the table offers stands for the program beside us, which uses CUDA as well: it is not counted, does not fail,
 * and is allowed everywhere.
 */
#ifndef FAKES_CUDA_FAKE_CUDA_H
#define FAKES_CUDA_FAKE_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_POISON 0xcb
#define FAKE_CUDA_DEVICES 2

/* What there is now, and what has happened so far. */
struct fake_cuda_counts {
    unsigned contexts;
    unsigned device_allocations;
    unsigned host_allocations;
    unsigned registrations; /* the library registered memory that it has mapped itself */
    unsigned streams;
    unsigned events;
    unsigned copies;
    uint64_t copied_bytes;
    uint64_t begun_bytes; /* how much has been copied, or is in a stream to be copied */
    unsigned handles;     /* memory that processes can map: what was created or imported */
    unsigned mappings;
    unsigned reservations; /* ranges of addresses */
    unsigned imports;      /* so far */
};

/* What CUDA keeps for the calling thread. */
struct fake_cuda_thread {
    int device;
    void *context;
    unsigned pushed; /* contexts below the current one */
    int capture_mode;
    int last_error;
};

struct fake_cuda {
    /* Every call that is not the table's fails the test while this returns true. */
    void (*set_forbidden)(bool (*is_forbidden)(void));
    void (*set_seed)(uint64_t seed);
    /* Before the first call: the version of CUDA that the driver supports (0: there is no driver), and how many devices
     * there are. */
    void (*set_machine)(int supported_version, int device_count);
    /* How much the library may have of each device. */
    void (*set_capacity)(size_t size_bytes);

    /* The number-th call from now on returns error: that one, or it and all later ones. 0: none. */
    void (*fail_call)(unsigned number, int error, bool is_for_good);
    /* The call that was made to fail last; NULL: none was. */
    const char *(*failed_call)(void);
    /* Every call that has to do with the device returns error from now on; what runs there ends, and its memory is not
     * counted any more. */
    void (*break_device)(int device, int error);

    void (*get_counts)(struct fake_cuda_counts *ret_counts);
    void (*get_thread)(struct fake_cuda_thread *ret_thread);
    void (*make_current)(int device);

    void *(*allocate)(int device, size_t size_bytes);
    void *(*allocate_managed)(size_t size_bytes);
    void (*free)(void *memory);
    /* By what RDMA cards may access devices; at first by both. */
    void (*set_direct)(bool has_dma_buf, bool has_peermem);
    /* Whether devices have memory that other processes can map; at first they have. */
    void (*set_sharing)(bool has_sharing);
    /* Whether devices order what cards write; at first they do. */
    void (*order_writes)(bool are_ordered);
    /* Whether synchronous copies in this allocation are over when their calls return. */
    bool (*is_synchronous)(const void *memory);
    /* Where a card finds the bytes at an address: on the host that is the address itself. */
    void *(*reach)(const void *memory);
    /* The same bytes where the test may touch them. */
    void *(*view)(const void *memory);

    void *(*create_stream)(int device, bool is_blocking);
    /* Runs a function in a stream, on the double's thread. */
    void (*launch)(void *stream, void (*run)(void *context), void *context);
    /* Nothing of the stream runs while it is held; NULL: nothing at all. */
    void (*hold)(void *stream, bool is_held);
    /* Begins a capture that no thread may disturb. Ends it, and returns whether it was left alone. */
    void (*begin_capture)(void *stream);
    bool (*end_capture)(void *stream);
};

/* Loads the double of CUDA `major` (11, 12 or 13) into this process, where the library finds it. */
const struct fake_cuda *fake_cuda_open(int major);
/* Its folder, for LD_LIBRARY_PATH. */
const char *fake_cuda_folder(int major);

#endif
