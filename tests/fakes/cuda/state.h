// SPDX-License-Identifier: Apache-2.0
/* What the files of the double share. Functions ending in _locked are called with the mutex held. */
#ifndef FAKES_CUDA_STATE_H
#define FAKES_CUDA_STATE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fakes/cuda/fake_cuda.h"
#include "tensor/cuda_interface.h"

#define FIRST_DEVICE 40                      /* the number that libcuda has for the first device */
#define CAPACITY_BYTES (UINT64_C(512) << 20) /* what the library may have of a device unless a test says otherwise */
#define ARENA_BYTES (UINT64_C(16) << 30)     /* the addresses of a device, none of which is used twice */

enum memory_kind { MEMORY_NONE = 0, MEMORY_HOST = 1, MEMORY_DEVICE = 2, MEMORY_MANAGED = 3 };

struct memory {
    struct memory *next;
    unsigned char *address;
    size_t size_bytes;
    enum memory_kind kind;
    int device;
    bool is_freed;
    bool is_foreign;    /* the program's, which is not counted */
    bool is_registered; /* the library has mapped it, and it is pinned */
    bool is_synchronous;
    unsigned char *view;           /* where it is mapped; NULL: it lies in the arena, or on the host */
    int access[FAKE_CUDA_DEVICES]; /* to mapped memory */
};

struct op {
    struct op *next;
    uint64_t number; /* over all streams */
    struct event *event;
    void *to;
    const void *from;
    size_t len_bytes; /* 0: no copy */
    bool is_between_devices;
    void (*run)(void *context);
    void *context;
};

struct stream {
    struct stream *next;
    int device;
    bool is_blocking;
    bool is_legacy;
    bool is_foreign;
    bool is_held;
    bool is_capturing;
    bool is_spoiled; /* its capture was disturbed */
    struct op *first;
    struct op **end;
};

struct event {
    struct event *next;
    int device;
    uint64_t recorded; /* the number of the op that recorded it last; 0: none */
    uint64_t reached;
};

struct device {
    int index;
    tl_cuda_error broken; /* what every call returns */
    unsigned char *arena; /* no access is allowed here */
    unsigned char *view;
    size_t used_bytes;
    size_t allocated_bytes; /* by the library */
    bool has_context;
    unsigned flags; /* those of the context */
    struct stream *legacy;
};

struct thread_state {
    int ordinal;
    struct device *context;
    struct device *below[8];
    unsigned depth;
    int mode;
    tl_cuda_error last_error;
    struct stream *own[FAKE_CUDA_DEVICES];
};

extern pthread_mutex_t state_mutex;
extern struct device state_devices[FAKE_CUDA_DEVICES];
extern struct stream *state_streams;
extern struct fake_cuda_counts state_counts;
extern size_t state_capacity_bytes; /* what the library finds on each device */
/* With this model it is where LeakSanitizer can look. */
extern _Thread_local struct thread_state this_thread __attribute__((tls_model("initial-exec")));

_Noreturn void misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* memory.c */
struct memory *memory_create_locked(enum memory_kind kind, int device, size_t size_bytes, bool is_foreign);
void memory_free_locked(struct memory *memory);
/* Pins memory of the library, and the end of that. */
tl_cuda_error memory_register_locked(int device, void *address, size_t size_bytes);
void memory_unregister_locked(void *address);
/* Knows memory that was mapped; the caller maps and unmaps it. NULL: no memory. */
struct memory *memory_add_mapping_locked(int device, unsigned char *address, unsigned char *view, size_t size_bytes);
/* Counts the memory of a device no longer. */
void memory_forget_locked(int device);
/* What an address is in; NULL: nothing that is known. It may have been freed. */
struct memory *memory_find_locked(const void *address);
/* Ends the process unless all of the range may be in a copy. */
void memory_check_locked(const void *address, size_t len_bytes);
/* Ends the process unless a stream of the device may read, or write, the memory. */
void memory_check_access_locked(const void *address, int device, int access);
/* Where the double may touch the byte. */
unsigned char *memory_view_locked(const void *address);

/* streams.c */
struct stream *stream_create_locked(int device, bool is_blocking, bool is_foreign);
/* The stream that a handle means on a device; NULL: none. */
struct stream *stream_find_locked(void *handle, int device);
void stream_push_locked(struct stream *stream, struct op op);
/* Waits until everything that is in the streams of the device now has run; it may break meanwhile. */
void streams_wait_locked(int device);
void streams_drop_locked(int device);
void streams_hold(void *stream, bool is_held);
void stream_hold_locked(struct stream *stream, bool is_held);
void streams_set_seed(uint64_t seed);
/* Whether a stream that the legacy one waits for is being captured. */
struct stream *streams_captured_locked(int device);

/* calls.c */
int fake_cuda_device_here(void);
int fake_cuda_device_count(void);
int fake_cuda_supported_version(void);
/* Begins a call of libcuda, and takes the mutex; an error is the result of the call. Ends it. */
tl_cuda_error fake_cuda_enter(const char *name);
tl_cuda_error fake_cuda_leave(tl_cuda_error error);

/* What has the same name in dmabuf.c and sharing.c. */
struct fake_entry {
    const char *name;
    void *function;
};
extern const struct fake_entry fake_dmabuf_entries[]; /* ends with an empty one */
void fake_dmabuf_set(bool has_dma_buf, bool has_peermem);
void fake_dmabuf_order_writes(bool are_ordered);

/* sharing.c */
extern const struct fake_entry fake_sharing_entries[]; /* ends with an empty one */
void fake_sharing_set(bool has_sharing);
/* Whether devices have memory that other processes can map. */
bool fake_sharing_is_on(void);
/* Counts what is mapped no longer: the device is broken. */
void fake_sharing_forget_locked(int device);

#endif
