// SPDX-License-Identifier: Apache-2.0
/*
 * Tensors: a dtype, a shape and reference-counted memory.
 *
 * A tensor is created with memory of the library (tl_tensor_create), around memory of the caller (tl_tensor_wrap),
 * from strings (tl_tensor_create_strings) or dead (tl_tensor_create_dead). It starts with one reference, owned by the
 * caller. While a tensor is handed to a worker (send, publish, as a destination) the worker holds references of its
 * own; the memory is given back - freed, or the release callback called - when the last one is put, on whichever
 * thread that happens.
 *
 * Elements lie in the memory of the host or of a device (docs/gpu.md). A tensor on a device is sent, published and
 * received like any other, but only its own program or tl_tensor_copy may touch its elements.
 *
 * Elements lie in row-major order without gaps, little-endian. Types smaller than a byte are packed, first element in
 * the low bits, and the last byte is padded with zero bits.
 */
#ifndef TENSORLANE_TENSOR_H
#define TENSORLANE_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The numbers are part of the wire format and never change. */
enum tl_dtype {
    TL_DTYPE_INVALID = 0,
    TL_BOOL = 1, /* one byte, 0 or 1 */
    TL_U8 = 2,
    TL_I8 = 3,
    TL_U16 = 4,
    TL_I16 = 5,
    TL_U32 = 6,
    TL_I32 = 7,
    TL_U64 = 8,
    TL_I64 = 9,
    TL_F16 = 10,
    TL_BF16 = 11,
    TL_F32 = 12,
    TL_F64 = 13,
    TL_C64 = 14,     /* two float32: real, imaginary */
    TL_C128 = 15,    /* two float64 */
    TL_F8_E4M3 = 16, /* the finite variant, as PyTorch's float8_e4m3fn */
    TL_F8_E5M2 = 17,
    TL_F8_E4M3FNUZ = 18,
    TL_F8_E5M2FNUZ = 19,
    TL_F8_E8M0 = 20,
    TL_I4 = 21,      /* 4 bits, packed */
    TL_U4 = 22,      /* 4 bits, packed */
    TL_F4 = 23,      /* e2m1, 4 bits, packed */
    TL_F6_E2M3 = 24, /* 6 bits, packed */
    TL_F6_E3M2 = 25, /* 6 bits, packed */
    TL_STRING = 26,  /* byte strings of any length; cannot be copied byte by byte, travels serialized */
    TL_DTYPE_COUNT = 27,
};

#define TL_MAX_RANK 16

/* Returns the name as safetensors spells it ("F32", "BF16"), or "C128", "I4", "U4", "STRING" where safetensors has
 * none; "INVALID" for a number that is no dtype. Static, never NULL. */
TL_API const char *tl_dtype_name(enum tl_dtype dtype);

/* Returns the bits of one element; 0 for TL_STRING, TL_DTYPE_INVALID and any number that is no dtype. */
TL_API unsigned tl_dtype_bits(enum tl_dtype dtype);

/* Where the elements lie. */
enum tl_device_kind {
    TL_DEVICE_HOST = 0,
    TL_DEVICE_CUDA = 1,
};

struct tl_device {
    enum tl_device_kind kind;
    int32_t index; /* number of the device, as CUDA counts in this process; 0 for host */
};

/* The stream whose work a device tensor follows, as DLPack numbers streams: one of these, or a cudaStream_t. */
typedef intptr_t tl_stream;
#define TL_STREAM_DEFAULT 0    /* the legacy stream */
#define TL_STREAM_LEGACY 1     /* the same */
#define TL_STREAM_PER_THREAD 2 /* the stream of the thread that calls */
#define TL_STREAM_NONE (-1)    /* there is nothing to wait for */

/* A worker names a tensor by a key (UTF-8 without NUL, 1..512 bytes) and a 64-bit step. */
#define TL_MAX_KEY_BYTES 512

struct tl_tensor;

/* Gives wrapped memory back to its owner. Thread: any; it must not call into the worker that last held the tensor. */
typedef void (*tl_release_fn)(void *data, void *context);

/* Creates a tensor with memory of its own, 64-byte aligned, contents undefined.
 * Shape: rank in 0..TL_MAX_RANK; dims[rank] sizes, outermost first, each 0..2^63-1; dims may be NULL for rank 0.
 * Errors: TL_INVALID_ARGUMENT: not a dtype, TL_STRING, or rank out of range. TL_OUT_OF_RANGE: the bytes of the shape
 * exceed 2^63-1. TL_RESOURCE_EXHAUSTED: no memory.
 * Ownership: *ret_tensor is one reference, put with tl_tensor_put. Thread: any. */
TL_API enum tl_status tl_tensor_create(enum tl_dtype dtype, unsigned rank, const uint64_t *dims,
                                       struct tl_tensor **ret_tensor, struct tl_error *ret_error) TL_MUST_USE;

/* Creates a tensor in the memory of a device, contents undefined; on the host it is tl_tensor_create. Its stream is
 * TL_STREAM_DEFAULT. The first call for a device loads CUDA and takes some hundred milliseconds.
 * Errors: as tl_tensor_create. TL_UNIMPLEMENTED: not a kind of device. TL_NOT_FOUND: there is no such device.
 * TL_FAILED_PRECONDITION: CUDA or the driver is missing or too old, naming what; the device has failed and is lost
 * until the process starts anew; or this is called from a release callback or log function on a thread of a worker.
 * TL_RESOURCE_EXHAUSTED: the device has not so much memory. TL_INTERNAL: CUDA failed otherwise.
 * Ownership: as tl_tensor_create. The memory is freed on a thread of the library, some time after the last reference
 * was put; a later call of this function that lacks memory waits for that. Thread: any; its current device stays.
 * Blocks: yes. */
TL_API enum tl_status tl_tensor_create_on(struct tl_device device, enum tl_dtype dtype, unsigned rank,
                                          const uint64_t *dims, struct tl_tensor **ret_tensor,
                                          struct tl_error *ret_error) TL_MUST_USE;

/* Creates a tensor in pages of its own, which receivers on this host may map once it is published (may_map in
 * tl_recv_options). Its elements are zero at first, and must never change again after it was published, even if it was
 * withdrawn. Where the kernel has no such memory it is a tensor like any other.
 * Shape, Errors, Ownership, Thread: as tl_tensor_create; a descriptor of the process is in use as long as it lives. */
TL_API enum tl_status tl_tensor_create_shared(enum tl_dtype dtype, unsigned rank, const uint64_t *dims,
                                              struct tl_tensor **ret_tensor, struct tl_error *ret_error) TL_MUST_USE;

/* Memory that tl_tensor_wrap wraps. Set size_bytes to sizeof(struct tl_tensor_view), everything unused to zero. */
struct tl_tensor_view {
    size_t size_bytes;
    enum tl_dtype dtype;
    unsigned rank;
    const uint64_t *dims;    /* [rank]; may be NULL for rank 0 */
    const int64_t *strides;  /* [rank] in elements, NULL: contiguous */
    struct tl_device device; /* where data lies */
    void *data;              /* start of the allocation; may be NULL when the tensor has no bytes */
    uint64_t offset_bytes;   /* offset of the first element in data */
    uint64_t capacity_bytes; /* size of the allocation behind data; the tensor must lie within it */
    bool read_only;          /* true: the tensor is refused as a destination */
    tl_release_fn release;   /* called once, when the last reference is put; NULL: nothing is called */
    void *release_context;
    tl_stream stream; /* its work is done before the tensor is used; ignored for host memory */
};

/* Wraps memory of the caller without copying it. Device memory must be what cudaMalloc and the like return, not managed
 * memory; its release callback runs on a thread of the library that is for such callbacks alone, and may call CUDA.
 * Errors: TL_INVALID_ARGUMENT: as tl_tensor_create, or the strides are not those of a contiguous row-major tensor, or
 * the tensor does not lie within capacity_bytes, or size_bytes is wrong. TL_OUT_OF_RANGE: as tl_tensor_create, or
 * capacity_bytes exceeds 2^63-1 or reaches beyond the address space. TL_UNIMPLEMENTED: not a kind of device, managed
 * memory, or a field that this version does not know (tensorlane.h). TL_RESOURCE_EXHAUSTED: no memory. On error release
 * is not called. For device memory also those of tl_tensor_create_on, and TL_INVALID_ARGUMENT: the memory is not that
 * device's. Ownership: data must stay valid until release has been called. Thread: any. Blocks: for device memory. */
TL_API enum tl_status tl_tensor_wrap(const struct tl_tensor_view *view, struct tl_tensor **ret_tensor,
                                     struct tl_error *ret_error) TL_MUST_USE;

/* One element of a string tensor. */
struct tl_string {
    const void *data; /* may be NULL when len_bytes is 0 */
    uint64_t len_bytes;
};

/* Creates a TL_STRING tensor; the strings (as many as the shape has elements, row-major) are copied.
 * Errors: as tl_tensor_create. Ownership and Thread: as tl_tensor_create. */
TL_API enum tl_status tl_tensor_create_strings(unsigned rank, const uint64_t *dims, const struct tl_string *strings,
                                               struct tl_tensor **ret_tensor, struct tl_error *ret_error) TL_MUST_USE;

/* Creates a dead tensor: it has no data, is delivered like any other, and means that there is no value.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory. Ownership and Thread: as tl_tensor_create. */
TL_API enum tl_status tl_tensor_create_dead(struct tl_tensor **ret_tensor, struct tl_error *ret_error) TL_MUST_USE;

/* Takes one more reference; returns the tensor. Thread: any. */
TL_API struct tl_tensor *tl_tensor_get(struct tl_tensor *tensor);

/* Gives one reference back; NULL is accepted. Thread: any. */
TL_API void tl_tensor_put(struct tl_tensor *tensor);

/* The properties of a tensor. For all of these functions: Thread: any. The pointers stay valid as long as the caller's
 * reference. */
TL_API enum tl_dtype tl_tensor_dtype(const struct tl_tensor *tensor);
TL_API unsigned tl_tensor_rank(const struct tl_tensor *tensor);
TL_API const uint64_t *tl_tensor_dims(const struct tl_tensor *tensor); /* [rank] */
TL_API uint64_t tl_tensor_element_count(const struct tl_tensor *tensor);
/* Returns the bytes of the elements, or of the serialized form for TL_STRING. */
TL_API uint64_t tl_tensor_size_bytes(const struct tl_tensor *tensor);
/* Returns the address of the elements (of the serialized form for TL_STRING); it may be NULL when there are no bytes.
 */
TL_API void *tl_tensor_data(const struct tl_tensor *tensor);
TL_API bool tl_tensor_is_dead(const struct tl_tensor *tensor);
/* Returns where the elements lie; the address that tl_tensor_data returns is one of that device. */
TL_API struct tl_device tl_tensor_device(const struct tl_tensor *tensor);
/* Returns whether the elements must not be written: this holds for a tensor that was wrapped as read-only, received by
 * reference, or mapped. Writing into a mapping ends the process. */
TL_API bool tl_tensor_is_read_only(const struct tl_tensor *tensor);

/* Sets the stream whose earlier work must be done before the bytes are read or written by the next operation. It is
 * ignored for host tensors. The stream must live as long as the tensor has it. Thread: any, as long as no other uses
 * the tensor. */
TL_API void tl_tensor_set_stream(struct tl_tensor *tensor, tl_stream stream);

/* Waits until what the stream of a tensor holds at the time of the call is done, so that whatever stream is launched
 * into afterwards sees its bytes. It does nothing for host tensors and for TL_STREAM_NONE.
 * Errors: those of the stream (tl_send), TL_INTERNAL: CUDA failed. Thread: any; its current device stays. With
 * TL_STREAM_PER_THREAD the one whose stream is meant. Blocks: yes. */
TL_API enum tl_status tl_tensor_wait(const struct tl_tensor *tensor, struct tl_error *ret_error) TL_MUST_USE;

/* Copies all bytes between tensors of the same dtype and shape, on any devices. What the streams of both tensors hold
 * at the time of the call comes before the copy. When it returns, the bytes are visible to everything that is launched
 * or read afterwards; on failure the contents of `to` are undefined. Errors: TL_INVALID_ARGUMENT: dtype or shape
 * differ, `to` is read-only or dead, or they share memory; the stream is not one of the device. TL_UNIMPLEMENTED:
 * TL_STRING. TL_FAILED_PRECONDITION: the stream is being captured into a graph, or as tl_tensor_create_on.
 * TL_DATA_LOSS: as tl_tensor_check, of the source. TL_RESOURCE_EXHAUSTED: no memory can be pinned. TL_INTERNAL: CUDA
 * failed. Thread: any; its current device stays. With TL_STREAM_PER_THREAD the one whose stream is meant. Blocks: yes.
 */
TL_API enum tl_status tl_tensor_copy(struct tl_tensor *to, const struct tl_tensor *from,
                                     struct tl_error *ret_error) TL_MUST_USE;

/* Annotations: texts that go with published tensors, such as {"format": "pt"}. They are what a safetensors file has
 * under `__metadata__`: listings show them, and a file that is pulled has those of its tensors. Receives do not carry
 * them. Tensors that belong together refer to the same annotations:
 *
 *     const struct tl_annotation items[] = {{"format", "pt"}, {"epoch", "7"}};
 *     struct tl_annotations *annotations;
 *     if (tl_annotations_create(items, 2, &annotations, &error) != TL_OK) ...
 *     tl_tensor_set_annotations(weights, annotations);
 *     tl_tensor_set_annotations(biases, annotations);
 *     tl_annotations_put(annotations);
 *     if (tl_publish(worker, "weights", step, weights, &error) != TL_OK) ...
 */
struct tl_annotations;

struct tl_annotation {
    const char *key; /* UTF-8, as value; both may be "" */
    const char *value;
};

#define TL_MAX_ANNOTATIONS 1024
/* The size of all keys and values together. */
#define TL_MAX_ANNOTATIONS_BYTES (64 * 1024)

/* Copies the pairs, in any order; they never change afterwards. items may be NULL when count is 0.
 * Errors: TL_INVALID_ARGUMENT: more than TL_MAX_ANNOTATIONS pairs or TL_MAX_ANNOTATIONS_BYTES bytes, a key twice, or a
 * text that is NULL or not UTF-8. TL_RESOURCE_EXHAUSTED: no memory. *ret_annotations is left as it is then.
 * Ownership: *ret_annotations is one reference, put with tl_annotations_put, or NULL when count is 0. Thread: any. */
TL_API enum tl_status tl_annotations_create(const struct tl_annotation *items, size_t count,
                                            struct tl_annotations **ret_annotations,
                                            struct tl_error *ret_error) TL_MUST_USE;

/* Gives one reference back; NULL is accepted. Thread: any. */
TL_API void tl_annotations_put(struct tl_annotations *annotations);

/* Sets the annotations of a tensor, in place of those that it has; NULL: none. An alias keeps those that its base had
 * when the alias was created.
 * Ownership: the tensor takes a reference of its own. Thread: any, as long as no other uses the tensor and no worker
 * has it yet. */
TL_API void tl_tensor_set_annotations(struct tl_tensor *tensor, struct tl_annotations *annotations);

/* Checks that a tensor that lies in a file still is what it was: the file has neither been shortened nor changed, and
 * could be read. Everything that was read before a check that succeeds was right. It always succeeds for tensors that
 * lie in memory.
 * Errors: TL_DATA_LOSS, naming the file. Thread: any. */
TL_API enum tl_status tl_tensor_check(const struct tl_tensor *tensor, struct tl_error *ret_error) TL_MUST_USE;

/* Installs a handler for SIGBUS. Reading a page of a mapped file that another process has shortened raises this signal,
 * which ends a process without a handler; this handler puts zeros there and lets tl_tensor_check fail. Any other SIGBUS
 * is passed on to the handler that was there before. It is for programs that publish files or receive with may_map; a
 * library leaves that to its program.
 * Errors: TL_INTERNAL: sigaction failed. Thread: any. */
TL_API enum tl_status tl_guard_mapped_files(struct tl_error *ret_error) TL_MUST_USE;

/* Returns one string of a TL_STRING tensor; it points into the tensor.
 * Errors: TL_INVALID_ARGUMENT: not a string tensor. TL_OUT_OF_RANGE: index is not below the element count. */
TL_API enum tl_status tl_tensor_string(const struct tl_tensor *tensor, uint64_t index, struct tl_string *ret_string,
                                       struct tl_error *ret_error) TL_MUST_USE;

#ifdef __cplusplus
}
#endif

#endif
