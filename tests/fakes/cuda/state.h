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

#define FIRST_DEVICE 40 /* the number that libcuda has for the first device */
#define ARENA_BYTES (UINT64_C(512) << 20)

enum memory_kind { MEMORY_NONE = 0, MEMORY_HOST = 1, MEMORY_DEVICE = 2, MEMORY_MANAGED = 3 };

struct memory {
    struct memory *next;
    unsigned char *address;
    size_t size_bytes;
    enum memory_kind kind;
    int device;
    bool is_freed;
    bool is_foreign; /* the program's, which is not counted */
    bool is_synchronous;
};

struct op {
    struct op *next;
    uint64_t number; /* over all streams */
    struct event *event;
    void *to;
    const void *from;
    size_t len_bytes; /* 0: no copy */
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
    unsigned char *arena; /* that no one may touch */
    unsigned char *view;
    size_t used_bytes;
    size_t allocated_bytes; /* by the library */
    bool has_context;
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
extern size_t state_capacity_bytes; /* of each device, for the library */
/* With this model it is where LeakSanitizer can look. */
extern _Thread_local struct thread_state this_thread __attribute__((tls_model("initial-exec")));

_Noreturn void misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* memory.c */
struct memory *memory_create_locked(enum memory_kind kind, int device, size_t size_bytes, bool is_foreign);
void memory_free_locked(struct memory *memory);
/* Counts the memory of a device no longer. */
void memory_forget_locked(int device);
/* What an address is in; NULL: nothing that is known. It may have been freed. */
struct memory *memory_find_locked(const void *address);
/* Ends the process unless all of the range may be in a copy. */
void memory_check_locked(const void *address, size_t len_bytes);
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
void streams_set_seed(uint64_t seed);
/* Whether a stream that the legacy one waits for is being captured. */
struct stream *streams_captured_locked(int device);

/* calls.c */
int fake_cuda_device_here(void);
/* Begins a call of libcuda, and takes the mutex; an error is the result of the call. Ends it. */
tl_cuda_error fake_cuda_enter(const char *name);
tl_cuda_error fake_cuda_leave(tl_cuda_error error);

/* dmabuf.c */
struct fake_entry {
    const char *name;
    void *function;
};
extern const struct fake_entry fake_dmabuf_entries[]; /* ends with an empty one */
void fake_dmabuf_set(bool has_dma_buf, bool has_peermem);

#endif
