// SPDX-License-Identifier: Apache-2.0
/*
 * Tensors as the transports see them: meta-data and reference-counted bytes that a transport reads from or writes to.
 *
 * A tensor's bytes can have a guard: something to ask before each read, because the bytes may stop being readable (a
 * mapped file that was truncated). A string tensor's bytes are its serialized form: for each element a little-endian
 * 64-bit length, then the bytes of all elements in order.
 */
#ifndef TENSOR_TENSOR_H
#define TENSOR_TENSOR_H

#include <tensorlane/tensor.h>

#include "tensor/annotations.h"
#include "tensor/box.h"
#include "tensor/meta_data.h"

/* Asked before a range of the tensor is read. Errors: the one that the reader's peer gets. Thread: any. */
typedef enum tl_status (*tl_tensor_guard_fn)(void *context, const void *data, uint64_t len_bytes,
                                             struct tl_error *ret_error);

/* The meta-data; valid as long as the caller's reference. */
const struct tl_meta_data *tl_tensor_meta_data(const struct tl_tensor *tensor);

/* Bring what a transport reads of the tensor, and then the first of its bytes, into the processor's caches. The second
 * one waits for the first. */
void tl_tensor_prefetch(const struct tl_tensor *tensor);
void tl_tensor_prefetch_data(const struct tl_tensor *tensor);

/* Creates a tensor of this meta-data with memory of its own to receive into: plain, string (bytes undefined until
 * tl_tensor_check_strings) or dead.
 * Errors: as tl_meta_data_validate; TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_tensor_create_for(const struct tl_meta_data *meta_data, struct tl_tensor **ret_tensor,
                                    struct tl_error *ret_error) TL_MUST_USE;

/* Creates a tensor of this meta-data, which has been validated, around memory of size_bytes (data is ignored when there
 * are none): plain, string (bytes undefined until tl_tensor_check_strings) or dead. release may be NULL; it is called
 * with data when the last reference is put.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory; release is not called. */
enum tl_status tl_tensor_create_around(const struct tl_meta_data *meta_data, void *data, tl_release_fn release,
                                       void *context, struct tl_tensor **ret_tensor,
                                       struct tl_error *ret_error) TL_MUST_USE;

/* Creates a tensor of this meta-data, which is neither of strings nor dead and has been validated, in memory of a
 * device that was allocated for it, and takes the memory over: also when it fails.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory. */
struct tl_device_memory;
enum tl_status tl_tensor_create_in(struct tl_device device, const struct tl_meta_data *meta_data,
                                   struct tl_device_memory *memory, struct tl_tensor **ret_tensor,
                                   struct tl_error *ret_error) TL_MUST_USE;

/* The memory of a device that the tensor lies in, valid as long as the caller's reference; NULL: it lies on the host.
 */
struct tl_device_memory *tl_tensor_device_memory(const struct tl_tensor *tensor);

/* Checks the serialized form of a string tensor that came from outside: the lengths add up to the bytes.
 * Errors: TL_DATA_LOSS: they do not. TL_OK for every other dtype. */
enum tl_status tl_tensor_check_strings(const struct tl_tensor *tensor, struct tl_error *ret_error) TL_MUST_USE;

/* True when there is a reference besides the one of the caller. Only meaningful when no other thread may take a new
 * one. */
bool tl_tensor_is_shared(const struct tl_tensor *tensor);

/* True when the bytes may be written by a transport. */
bool tl_tensor_is_writable(const struct tl_tensor *tensor);

/* Creates a read-only tensor that shows the memory of base and holds a reference on it. release (its data is base's) is
 * called when the last reference to the alias is put, after the one on base: it shows that the alias is not read any
 * more. Errors: TL_RESOURCE_EXHAUSTED: no memory; release is not called. */
enum tl_status tl_tensor_create_alias(struct tl_tensor *base, tl_release_fn release, void *context,
                                      struct tl_tensor **ret_tensor, struct tl_error *ret_error) TL_MUST_USE;

/* Creates such an alias in memory of the caller, of tl_tensor_place_bytes and aligned to 8 bytes. Base itself stays as
 * long as the alias. The memory is not touched any more once release, which is not NULL, is called. */
struct tl_tensor *tl_tensor_create_alias_in(void *place, struct tl_tensor *base, tl_release_fn release, void *context);
extern const size_t tl_tensor_place_bytes;

/* Creates a tensor of this meta-data, of no strings, that shows bytes of base from this offset on and holds a reference
 * on it; the bytes lie in base. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_tensor_create_view(struct tl_tensor *base, const struct tl_meta_data *meta_data,
                                     uint64_t offset_bytes, bool is_read_only, struct tl_tensor **ret_tensor,
                                     struct tl_error *ret_error) TL_MUST_USE;

/* Creates a tensor that shows a box of base, which was checked with tl_box_check, and holds a reference on base. A box
 * that is not in one piece lies on the host; its tensor has no address, and tl_tensor_walk alone reads and writes it.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_tensor_create_box(struct tl_tensor *base, const struct tl_box *box, bool is_read_only,
                                    struct tl_tensor **ret_tensor, struct tl_error *ret_error) TL_MUST_USE;
/* Whether it is such a tensor without an address. A transport that sends gets one only where its serve takes runs. */
bool tl_tensor_is_in_runs(const struct tl_tensor *tensor);
/* Calls back with len_bytes bytes of a tensor on the host from offset_bytes on, run by run. */
void tl_tensor_walk(const struct tl_tensor *tensor, uint64_t offset_bytes, uint64_t len_bytes, tl_bytes_fn visit,
                    void *context);
/* Copies these bytes out of the tensor, or into it. */
void tl_tensor_read(const struct tl_tensor *tensor, uint64_t offset_bytes, uint64_t len_bytes, void *to);
void tl_tensor_write(const struct tl_tensor *tensor, uint64_t offset_bytes, uint64_t len_bytes, const void *from);

/* The whole allocation that the tensor's bytes lie in: what was wrapped, or the tensor's own memory; of an alias that
 * of its base. NULL and 0 when there is none. */
void tl_tensor_allocation(const struct tl_tensor *tensor, void **ret_data, uint64_t *ret_capacity_bytes);

/* The context with which the memory that the tensor shows is released, if that is done by this function; else NULL. */
void *tl_tensor_release_context(const struct tl_tensor *tensor, tl_release_fn release);

/* Whether this function is called when the tensor itself goes, whatever its base is. */
bool tl_tensor_is_released_by(const struct tl_tensor *tensor, tl_release_fn release);

/* The stream that was set for the tensor. */
tl_stream tl_tensor_stream(const struct tl_tensor *tensor);

/* Whether the bytes lie on a device, where the CPU must not touch them. */
bool tl_tensor_is_on_device(const struct tl_tensor *tensor);

/* Records the fence of the tensor in the stream that was set for it; *ret_fence stays for a tensor on the host.
 * Errors, Ownership, Thread: as tl_device_fence_record. */
struct tl_device_fence;
enum tl_status tl_tensor_record_fence(const struct tl_tensor *tensor, struct tl_device_fence **ret_fence,
                                      struct tl_error *ret_error) TL_MUST_USE;
/* Sets the fence that must be reached before the bytes are read or written; takes over the reference. NULL: none.
 * Before the tensor is shared. */
void tl_tensor_set_fence(struct tl_tensor *tensor, struct tl_device_fence *fence);
/* That fence, valid as long as the caller's reference to the tensor; NULL: none. An alias has that of its base, unless
 * it has one of its own. */
struct tl_device_fence *tl_tensor_fence(const struct tl_tensor *tensor);

/* An object that is called when the memory of a tensor is freed; the caller that attaches it owns it. */
struct tl_tensor_attachment {
    const void *owner; /* whose it is; stays valid until detach, so that no other has the same address */
    /* The last reference to the memory was put: called once, before the memory is released, the latest attachment
     * first. Gives the attachment back to its owner. Thread: any. */
    void (*detach)(struct tl_tensor_attachment *attachment);
    struct tl_tensor_attachment *next; /* the tensor's */
};
/* Attaches to whose memory the tensor shows: itself, or its base. There is no way back but detach. Thread: any. */
void tl_tensor_attach(struct tl_tensor *tensor, struct tl_tensor_attachment *attachment);
/* The latest attachment of this owner; NULL when there is none. Thread: any. */
struct tl_tensor_attachment *tl_tensor_find_attachment(const struct tl_tensor *tensor, const void *owner);

/* The annotations of the tensor, valid as long as the caller's reference; NULL: none. An alias has
 * those that its base had when it was created. */
struct tl_annotations *tl_tensor_annotations(const struct tl_tensor *tensor);

/* Sets the guard; before the tensor is shared. */
void tl_tensor_set_guard(struct tl_tensor *tensor, tl_tensor_guard_fn guard, void *context);
/* NULL and NULL: it has none. */
void tl_tensor_get_guard(const struct tl_tensor *tensor, tl_tensor_guard_fn *ret_guard, void **ret_context);

/* Asks the guard about a range that is about to be read; TL_OK when there is no guard. The range must lie within the
 * tensor. */
enum tl_status tl_tensor_check_readable(const struct tl_tensor *tensor, uint64_t offset_bytes, uint64_t len_bytes,
                                        struct tl_error *ret_error) TL_MUST_USE;

#endif
