// SPDX-License-Identifier: Apache-2.0
/*
 * Tensors: meta-data, a reference count, and bytes that are the tensor's own, the caller's (wrapped), or none at all
 * (dead and zero-size). The last put gives the bytes back: frees them or calls the release callback; for those on a
 * device that is left to a thread of the library (tensor/device.h).
 *
 * Failure modes: wrong arguments and sizes are refused before anything is allocated; a failed allocation leaves nothing
 * behind. Putting a reference too often is a programming error and ends the process.
 */
#include "tensor/tensor.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/alloc.h"
#include "base/arith.h"
#include "base/check.h"
#include "base/copy.h"
#include "base/error.h"
#include "base/prefetch.h"
#include "base/struct_version.h"
#include "tensor/device.h"
#include "tensor/strings.h"

#define TENSOR_MAGIC 0x746c544eu
#define SMALL_ALIGNMENT_BYTES 64
/* The bytes of a tensor of at most this size follow its struct: one allocation takes half of the time of two. */
#define INSIDE_BYTES 4096
#define HUGE_PAGE_BYTES (UINT64_C(2) << 20)
/* So many bytes of a tensor are prefetched; the processor itself sees that the others follow. */
#define PREFETCHED_BYTES 256

struct tl_tensor {
    uint32_t magic;
    atomic_uint reference_count;
    struct tl_meta_data meta_data;
    void *data;       /* first byte of the elements; NULL: no bytes */
    void *own_memory; /* freed with the tensor; NULL: none */
    void *allocation; /* that data lies in; NULL: none */
    uint64_t capacity_bytes;
    bool is_read_only;
    bool is_in_place; /* made by tl_tensor_create_alias_in: the caller frees its memory */
    struct tl_device device;
    tl_stream stream;                       /* orders what is done with a tensor on a device */
    struct tl_device_memory *device_memory; /* that the bytes lie in; NULL: on the host, or an alias */
    struct tl_device_fence *fence;          /* to be reached before the bytes are touched; NULL: none */
    struct tl_tensor *base;                 /* whose memory an alias shows, with a reference; NULL: no alias */
    struct tl_box_runs *runs;               /* which make up a tensor without an address; NULL: it has one */
    struct tl_string_index *strings;        /* an alias has its base's; NULL unless TL_STRING */
    tl_release_fn release;                  /* NULL: nothing to release */
    void *release_data;
    void *release_context;
    tl_tensor_guard_fn guard; /* NULL: always readable */
    void *guard_context;
    struct tl_annotations *annotations;                 /* one reference; NULL: none */
    _Atomic(struct tl_tensor_attachment *) attachments; /* the latest first; an alias has none */
};

/* -------------------------------------------------------------------------------------------------- life cycle -- */

static void detach_all(struct tl_tensor *tensor)
{
    struct tl_tensor_attachment *attachment = atomic_load_explicit(&tensor->attachments, memory_order_acquire);
    while (attachment) {
        struct tl_tensor_attachment *next = attachment->next;
        attachment->detach(attachment);
        attachment = next;
    }
}

static void destroy(struct tl_tensor *tensor)
{
    tl_release_fn release = tensor->release;
    void *data = tensor->release_data, *context = tensor->release_context;
    if (!tensor->base && tensor->strings) tl_string_index_destroy(tensor->strings);
    detach_all(tensor);
    if (tensor->base) tl_tensor_put(tensor->base);
    if (tensor->own_memory) free(tensor->own_memory);
    if (tensor->device_memory) tl_device_memory_destroy(tensor->device_memory);
    if (tensor->fence) tl_device_fence_put(tensor->fence);
    tl_annotations_put(tensor->annotations);
    free(tensor->runs);
    tensor->magic = 0;
    if (!tensor->is_in_place) free(tensor);
    if (release) release(data, context); /* the memory of one that is_in_place may be freed now */
}

static enum tl_status no_memory(struct tl_error *ret_error, uint64_t size_bytes)
{
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a tensor of %" PRIu64 " bytes", size_bytes);
}

void tl_tensor_prefetch(const struct tl_tensor *tensor)
{
    tl_prefetch(tensor, sizeof(*tensor) + TL_CACHE_LINE_BYTES - 1); /* it need not begin a line */
}

void tl_tensor_prefetch_data(const struct tl_tensor *tensor)
{
    if (tensor->device.kind != TL_DEVICE_HOST) return;
    tl_prefetch(tensor->data, (size_t)tl_min_u64(tensor->meta_data.size_bytes, PREFETCHED_BYTES));
}

/* The size that follows from meta-data that was checked; 0 for a dead tensor. */
static uint64_t element_count_of(const struct tl_meta_data *meta_data)
{
    uint64_t count = 1;
    if (meta_data->is_dead) return 0;
    for (unsigned i = 0; i < meta_data->shape.rank; i++)
        count *= meta_data->shape.dims[i];
    return count;
}

/* Makes a tensor with one reference and no bytes yet. */
static void init(struct tl_tensor *tensor, const struct tl_meta_data *meta_data)
{
    tensor->magic = TENSOR_MAGIC;
    atomic_init(&tensor->reference_count, 1);
    tl_meta_data_copy(&tensor->meta_data, meta_data);
    memset(&tensor->data, 0, sizeof(*tensor) - offsetof(struct tl_tensor, data));
}

/* Returns a tensor with so much memory behind it; NULL when there is no memory. */
static struct tl_tensor *create_with(const struct tl_meta_data *meta_data, size_t more_bytes)
{
    struct tl_tensor *tensor = malloc(sizeof(*tensor) + more_bytes);
    if (tensor) init(tensor, meta_data);
    return tensor;
}

static struct tl_tensor *create_empty(const struct tl_meta_data *meta_data)
{
    return create_with(meta_data, 0);
}

static void *align(void *address, uintptr_t alignment_bytes)
{
    return (void *)(((uintptr_t)address + alignment_bytes - 1) & ~(alignment_bytes - 1));
}

/* Memory for the elements; ret_own: what is freed. Large tensors ask for huge pages: touching fresh memory a page at a
 * time costs as much as copying into it. They are aligned here and not by glibc, which first looks for the alignment in
 * addition to the size: of the memory that a tensor has given back it would not make the next one of that size, so that
 * each would have new pages, which the kernel makes zero. */
static void *allocate_bytes(uint64_t size_bytes, void **ret_own)
{
    if (size_bytes < 2 * HUGE_PAGE_BYTES)
        return posix_memalign(ret_own, SMALL_ALIGNMENT_BYTES, size_bytes) == 0 ? *ret_own : NULL;
    *ret_own = size_bytes <= PTRDIFF_MAX ? malloc(size_bytes + HUGE_PAGE_BYTES) : NULL;
    if (*ret_own == NULL) return NULL;
    void *memory = align(*ret_own, HUGE_PAGE_BYTES);
    /* Only advice: whole huge pages inside, so that the last part costs no more than it needs. */
    (void)madvise(memory, size_bytes - size_bytes % HUGE_PAGE_BYTES, MADV_HUGEPAGE);
    return memory;
}

/* Memory that is all the tensor's. */
static void set_bytes(struct tl_tensor *tensor, void *data)
{
    tensor->data = data;
    tensor->allocation = data;
    tensor->capacity_bytes = tensor->meta_data.size_bytes;
}

/* Creates a tensor of validated meta-data with memory of its own. */
static enum tl_status create_own(const struct tl_meta_data *meta_data, uint64_t element_count,
                                 struct tl_tensor **ret_tensor, struct tl_error *ret_error)
{
    uint64_t size_bytes = meta_data->size_bytes;
    bool is_inside = size_bytes > 0 && size_bytes <= INSIDE_BYTES;
    struct tl_tensor *tensor = create_with(meta_data, is_inside ? SMALL_ALIGNMENT_BYTES - 1 + size_bytes : 0);
    if (!tensor) goto fail;
    if (is_inside) {
        set_bytes(tensor, align(tensor + 1, SMALL_ALIGNMENT_BYTES));
    } else if (size_bytes > 0) {
        void *own = NULL;
        void *data = allocate_bytes(size_bytes, &own);
        if (!data) goto fail;
        tensor->own_memory = own;
        set_bytes(tensor, data);
    }
    if (meta_data->dtype == TL_STRING) {
        tensor->strings = tl_string_index_create(element_count);
        if (!tensor->strings) goto fail;
    }
    *ret_tensor = tensor;
    return TL_OK;

fail:
    if (tensor) destroy(tensor);
    return no_memory(ret_error, size_bytes);
}

/* Collects dtype and shape of a caller; the size is left at zero. */
static enum tl_status describe(enum tl_dtype dtype, unsigned rank, const uint64_t *dims,
                               struct tl_meta_data *ret_meta_data, struct tl_error *ret_error)
{
    if (rank > TL_MAX_RANK)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "a tensor of rank %u is not possible; at most %u dimensions", rank, TL_MAX_RANK);
    if (rank > 0 && !dims)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a tensor of rank %u needs dims, which is NULL", rank);
    *ret_meta_data = (struct tl_meta_data){.dtype = dtype, .shape.rank = rank};
    for (unsigned i = 0; i < rank; i++)
        ret_meta_data->shape.dims[i] = dims[i];
    return TL_OK;
}

/* The same for plain dtypes, with the size in bytes. */
static enum tl_status describe_plain(enum tl_dtype dtype, unsigned rank, const uint64_t *dims,
                                     struct tl_meta_data *ret_meta_data, uint64_t *ret_count,
                                     struct tl_error *ret_error)
{
    enum tl_status status = describe(dtype, rank, dims, ret_meta_data, ret_error);
    if (status != TL_OK) return status;
    if (dtype == TL_STRING)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "a tensor of STRING is created with tl_tensor_create_strings");
    status = tl_shape_size_bytes(dtype, &ret_meta_data->shape, &ret_meta_data->size_bytes, ret_error);
    if (status != TL_OK) return status;
    return tl_shape_element_count(&ret_meta_data->shape, ret_count, ret_error);
}

enum tl_status tl_tensor_create(enum tl_dtype dtype, unsigned rank, const uint64_t *dims, struct tl_tensor **ret_tensor,
                                struct tl_error *ret_error)
{
    struct tl_meta_data meta_data;
    uint64_t count = 0;
    enum tl_status status = describe_plain(dtype, rank, dims, &meta_data, &count, ret_error);
    if (status != TL_OK) return status;
    return create_own(&meta_data, count, ret_tensor, ret_error);
}

enum tl_status tl_tensor_create_on(struct tl_device device, enum tl_dtype dtype, unsigned rank, const uint64_t *dims,
                                   struct tl_tensor **ret_tensor, struct tl_error *ret_error)
{
    struct tl_meta_data meta_data;
    uint64_t count = 0;
    if (device.kind == TL_DEVICE_HOST) return tl_tensor_create(dtype, rank, dims, ret_tensor, ret_error);
    enum tl_status status = describe_plain(dtype, rank, dims, &meta_data, &count, ret_error);
    if (status != TL_OK) return status;
    struct tl_device_memory *memory;
    status = tl_device_memory_create(device, meta_data.size_bytes, &memory, ret_error);
    return status == TL_OK ? tl_tensor_create_in(device, &meta_data, memory, ret_tensor, ret_error) : status;
}

enum tl_status tl_tensor_create_in(struct tl_device device, const struct tl_meta_data *meta_data,
                                   struct tl_device_memory *memory, struct tl_tensor **ret_tensor,
                                   struct tl_error *ret_error)
{
    struct tl_tensor *tensor = create_empty(meta_data);
    if (!tensor) {
        tl_device_memory_destroy(memory);
        return no_memory(ret_error, meta_data->size_bytes);
    }
    tensor->device = device;
    tensor->device_memory = memory;
    if (meta_data->size_bytes > 0) set_bytes(tensor, tl_device_memory_data(memory));
    *ret_tensor = tensor;
    return TL_OK;
}

enum tl_status tl_tensor_create_for(const struct tl_meta_data *meta_data, struct tl_tensor **ret_tensor,
                                    struct tl_error *ret_error)
{
    uint64_t count = 0;
    enum tl_status status = tl_meta_data_validate(meta_data, ret_error);
    if (status != TL_OK) return status;
    if (meta_data->is_dead) return tl_tensor_create_dead(ret_tensor, ret_error);
    status = tl_shape_element_count(&meta_data->shape, &count, ret_error);
    if (status != TL_OK) return status;
    return create_own(meta_data, count, ret_tensor, ret_error);
}

enum tl_status tl_tensor_create_around(const struct tl_meta_data *meta_data, void *data, tl_release_fn release,
                                       void *context, struct tl_tensor **ret_tensor, struct tl_error *ret_error)
{
    TL_CHECK(data || meta_data->size_bytes == 0);
    struct tl_tensor *tensor = create_empty(meta_data);
    if (!tensor) return no_memory(ret_error, meta_data->size_bytes);
    if (meta_data->dtype == TL_STRING) {
        tensor->strings = tl_string_index_create(element_count_of(meta_data));
        if (!tensor->strings) {
            destroy(tensor);
            return no_memory(ret_error, meta_data->size_bytes);
        }
    }
    if (meta_data->size_bytes > 0) set_bytes(tensor, data);
    tensor->release = release;
    tensor->release_data = data;
    tensor->release_context = context;
    *ret_tensor = tensor;
    return TL_OK;
}

enum tl_status tl_tensor_create_dead(struct tl_tensor **ret_tensor, struct tl_error *ret_error)
{
    static const struct tl_meta_data dead = {.is_dead = true};
    struct tl_tensor *tensor = create_empty(&dead);
    if (!tensor) return no_memory(ret_error, 0);
    *ret_tensor = tensor;
    return TL_OK;
}

enum tl_status tl_tensor_create_strings(unsigned rank, const uint64_t *dims, const struct tl_string *strings,
                                        struct tl_tensor **ret_tensor, struct tl_error *ret_error)
{
    struct tl_meta_data meta_data;
    struct tl_tensor *tensor;
    uint64_t count = 0;
    enum tl_status status = describe(TL_STRING, rank, dims, &meta_data, ret_error);
    if (status != TL_OK) return status;
    status = tl_shape_element_count(&meta_data.shape, &count, ret_error);
    if (status != TL_OK) return status;
    if (count > 0 && !strings)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "strings is NULL, the shape has %" PRIu64 " of them",
                            count);
    status = tl_strings_size_bytes(strings, count, &meta_data.size_bytes, ret_error);
    if (status != TL_OK) return status;
    status = create_own(&meta_data, count, &tensor, ret_error);
    if (status != TL_OK) return status;
    if (count > 0) tl_strings_serialize(strings, count, tensor->data);
    TL_CHECK(tl_string_index_build(tensor->strings, tensor->data, meta_data.size_bytes, NULL) == TL_OK);
    *ret_tensor = tensor;
    return TL_OK;
}

/* ---------------------------------------------------------------------------------------------------- wrapping -- */

/* Strides of dimensions of one element, and all of a tensor without elements, are never used and may be anything. */
static enum tl_status check_strides(const struct tl_shape *shape, const int64_t *strides, uint64_t element_count,
                                    struct tl_error *ret_error)
{
    int64_t expected = 1;
    if (!strides || element_count == 0) return TL_OK;
    for (unsigned i = shape->rank; i-- > 0;) {
        if (shape->dims[i] != 1 && strides[i] != expected)
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                                "the stride of dimension %u is %" PRId64 ", not %" PRId64
                                "; only contiguous row-major tensors can be wrapped, copy this one first",
                                i, strides[i], expected);
        expected *= (int64_t)shape->dims[i];
    }
    return TL_OK;
}

static enum tl_status check_view(const struct tl_tensor_view *view, const struct tl_meta_data *meta_data,
                                 uint64_t element_count, struct tl_error *ret_error)
{
    uint64_t end_bytes;
    if (!view->data && meta_data->size_bytes > 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "data is NULL, the tensor has %" PRIu64 " bytes",
                            meta_data->size_bytes);
    uintptr_t allocation_end;
    if (view->data && (view->capacity_bytes > PTRDIFF_MAX ||
                       __builtin_add_overflow((uintptr_t)view->data, view->capacity_bytes, &allocation_end)))
        return tl_error_set(ret_error, TL_OUT_OF_RANGE,
                            "capacity_bytes is %" PRIu64 ", and no allocation at %p can be so large",
                            view->capacity_bytes, view->data);
    if (!tl_add_u64(view->offset_bytes, meta_data->size_bytes, &end_bytes) || end_bytes > view->capacity_bytes)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "%" PRIu64 " bytes at offset %" PRIu64 " do not lie within the %" PRIu64
                            " bytes of the allocation",
                            meta_data->size_bytes, view->offset_bytes, view->capacity_bytes);
    return check_strides(&meta_data->shape, view->strides, element_count, ret_error);
}

/* Leaves the memory to the device, which gives it back, too. */
static enum tl_status wrap_on_device(const struct tl_tensor_view *view, struct tl_tensor *tensor,
                                     struct tl_error *ret_error)
{
    tensor->device = view->device;
    tensor->stream = view->stream;
    return tl_device_memory_wrap(view->device, view->data, view->capacity_bytes, view->release, view->release_context,
                                 &tensor->device_memory, ret_error);
}

enum tl_status tl_tensor_wrap(const struct tl_tensor_view *caller_view, struct tl_tensor **ret_tensor,
                              struct tl_error *ret_error)
{
    struct tl_tensor_view view;
    struct tl_meta_data meta_data;
    uint64_t count = 0;
    enum tl_status status =
        tl_struct_read(&view, sizeof(view), TL_TENSOR_VIEW_FIRST_BYTES, caller_view, "tl_tensor_view", ret_error);
    if (status != TL_OK) return status;
    status = describe_plain(view.dtype, view.rank, view.dims, &meta_data, &count, ret_error);
    if (status != TL_OK) return status;
    status = check_view(&view, &meta_data, count, ret_error);
    if (status != TL_OK) return status;
    struct tl_tensor *tensor = create_empty(&meta_data);
    if (!tensor) return no_memory(ret_error, 0);
    if (view.data) {
        tensor->data = (unsigned char *)view.data + view.offset_bytes;
        tensor->allocation = view.data;
        tensor->capacity_bytes = view.capacity_bytes;
    }
    tensor->is_read_only = view.read_only;
    if (view.device.kind != TL_DEVICE_HOST) {
        status = wrap_on_device(&view, tensor, ret_error);
        if (status != TL_OK) {
            destroy(tensor);
            return status;
        }
    } else {
        tensor->release = view.release;
        tensor->release_data = view.data;
        tensor->release_context = view.release_context;
    }
    *ret_tensor = tensor;
    return TL_OK;
}

/* Returns what an alias of this tensor keeps: not an alias that adds nothing, or a value that is received from its own
 * worker and published again, time after time, would be a chain of them. */
static struct tl_tensor *find_base(struct tl_tensor *tensor)
{
    for (;; tensor = tensor->base) {
        const struct tl_tensor *base = tensor->base;
        bool adds_nothing = base != NULL && tensor->release == NULL && tensor->fence == NULL && tensor->runs == NULL &&
                            tensor->data == base->data && tl_meta_data_is_equal(&tensor->meta_data, &base->meta_data);
        if (!adds_nothing) return tensor;
    }
}

/* The alias keeps `kept`, which is the base or what find_base has found. */
static void init_alias(struct tl_tensor *tensor, struct tl_tensor *base, struct tl_tensor *kept, tl_release_fn release,
                       void *context)
{
    tensor->data = base->data;
    tensor->allocation = base->allocation;
    tensor->capacity_bytes = base->capacity_bytes;
    tensor->is_read_only = true;
    tensor->device = base->device;
    tensor->stream = TL_STREAM_NONE; /* that of the base may change; what it held is in the fence */
    tensor->base = tl_tensor_get(kept);
    tensor->strings = base->strings;
    tensor->guard = base->guard;
    tensor->guard_context = base->guard_context;
    tensor->annotations = tl_annotations_get(base->annotations);
    tensor->release = release;
    tensor->release_data = base->data;
    tensor->release_context = context;
}

enum tl_status tl_tensor_create_alias(struct tl_tensor *base, tl_release_fn release, void *context,
                                      struct tl_tensor **ret_tensor, struct tl_error *ret_error)
{
    struct tl_tensor *tensor = create_empty(&base->meta_data);
    if (!tensor) return no_memory(ret_error, 0);
    init_alias(tensor, base, find_base(base), release, context);
    *ret_tensor = tensor;
    return TL_OK;
}

const size_t tl_tensor_place_bytes = sizeof(struct tl_tensor);

struct tl_tensor *tl_tensor_create_alias_in(void *place, struct tl_tensor *base, tl_release_fn release, void *context)
{
    struct tl_tensor *tensor = place;
    init(tensor, &base->meta_data);
    init_alias(tensor, base, base, release, context);
    tensor->is_in_place = true;
    return tensor;
}

enum tl_status tl_tensor_create_view(struct tl_tensor *base, const struct tl_meta_data *meta_data,
                                     uint64_t offset_bytes, bool is_read_only, struct tl_tensor **ret_tensor,
                                     struct tl_error *ret_error)
{
    uint64_t end_bytes;
    TL_CHECK(base->meta_data.dtype != TL_STRING && meta_data->dtype != TL_STRING);
    TL_CHECK(tl_add_u64(offset_bytes, meta_data->size_bytes, &end_bytes) && end_bytes <= base->meta_data.size_bytes);
    enum tl_status status = tl_tensor_create_alias(base, NULL, NULL, ret_tensor, ret_error);
    if (status != TL_OK) return status;
    struct tl_tensor *tensor = *ret_tensor;
    tl_meta_data_copy(&tensor->meta_data, meta_data);
    tensor->data = meta_data->size_bytes > 0 ? (unsigned char *)base->data + offset_bytes : NULL;
    tensor->is_read_only = is_read_only;
    return TL_OK;
}

enum tl_status tl_tensor_create_box(struct tl_tensor *base, const struct tl_box *box, bool is_read_only,
                                    struct tl_tensor **ret_tensor, struct tl_error *ret_error)
{
    struct tl_meta_data meta_data;
    uint64_t offset_bytes;
    tl_box_meta_data(box, &base->meta_data, &meta_data);
    if (tl_box_is_dense(box, &base->meta_data, &offset_bytes))
        return tl_tensor_create_view(base, &meta_data, offset_bytes, is_read_only, ret_tensor, ret_error);
    TL_CHECK(base->runs == NULL && base->device.kind == TL_DEVICE_HOST);
    struct tl_box_runs *runs = malloc(sizeof(*runs));
    if (!runs) return no_memory(ret_error, 0);
    enum tl_status status = tl_tensor_create_view(base, &meta_data, 0, is_read_only, ret_tensor, ret_error);
    if (status != TL_OK) {
        free(runs);
        return status;
    }
    tl_box_find_runs(box, &base->meta_data, runs);
    (*ret_tensor)->runs = runs;
    (*ret_tensor)->data = NULL;
    return TL_OK;
}

bool tl_tensor_is_in_runs(const struct tl_tensor *tensor)
{
    return tensor->runs != NULL;
}

void tl_tensor_walk(const struct tl_tensor *tensor, uint64_t offset_bytes, uint64_t len_bytes, tl_bytes_fn visit,
                    void *context)
{
    uint64_t end_bytes;
    TL_CHECK(tl_add_u64(offset_bytes, len_bytes, &end_bytes) && end_bytes <= tensor->meta_data.size_bytes);
    if (tensor->runs) {
        tl_box_walk(tensor->runs, tensor->base->data, offset_bytes, len_bytes, visit, context);
    } else if (len_bytes > 0) {
        visit(context, (unsigned char *)tensor->data + offset_bytes, (size_t)len_bytes);
    }
}

static void read_run(void *context, unsigned char *bytes, size_t len_bytes)
{
    unsigned char **to = context;
    tl_copy(*to, bytes, len_bytes);
    *to += len_bytes;
}

static void write_run(void *context, unsigned char *bytes, size_t len_bytes)
{
    const unsigned char **from = context;
    tl_copy(bytes, *from, len_bytes);
    *from += len_bytes;
}

void tl_tensor_read(const struct tl_tensor *tensor, uint64_t offset_bytes, uint64_t len_bytes, void *to)
{
    unsigned char *next = to;
    tl_tensor_walk(tensor, offset_bytes, len_bytes, read_run, &next);
}

void tl_tensor_write(const struct tl_tensor *tensor, uint64_t offset_bytes, uint64_t len_bytes, const void *from)
{
    const unsigned char *next = from;
    tl_tensor_walk(tensor, offset_bytes, len_bytes, write_run, &next);
}

/* -------------------------------------------------------------------------------------------------- references -- */

struct tl_tensor *tl_tensor_get(struct tl_tensor *tensor)
{
    TL_CHECK(tensor->magic == TENSOR_MAGIC);
    TL_CHECK(atomic_fetch_add_explicit(&tensor->reference_count, 1, memory_order_relaxed) > 0);
    return tensor;
}

void tl_tensor_put(struct tl_tensor *tensor)
{
    if (!tensor) return;
    TL_CHECK(tensor->magic == TENSOR_MAGIC);
    unsigned before = atomic_fetch_sub_explicit(&tensor->reference_count, 1, memory_order_acq_rel);
    TL_CHECK(before > 0);
    if (before == 1) destroy(tensor);
}

bool tl_tensor_is_shared(const struct tl_tensor *tensor)
{
    return atomic_load_explicit(&tensor->reference_count, memory_order_acquire) > 1;
}

/* ----------------------------------------------------------------------------------------------------- looking -- */

enum tl_dtype tl_tensor_dtype(const struct tl_tensor *tensor)
{
    return tensor->meta_data.dtype;
}

unsigned tl_tensor_rank(const struct tl_tensor *tensor)
{
    return tensor->meta_data.shape.rank;
}

const uint64_t *tl_tensor_dims(const struct tl_tensor *tensor)
{
    return tensor->meta_data.shape.dims;
}

uint64_t tl_tensor_element_count(const struct tl_tensor *tensor)
{
    return element_count_of(&tensor->meta_data);
}

uint64_t tl_tensor_size_bytes(const struct tl_tensor *tensor)
{
    return tensor->meta_data.size_bytes;
}

void *tl_tensor_data(const struct tl_tensor *tensor)
{
    return tensor->data;
}

bool tl_tensor_is_dead(const struct tl_tensor *tensor)
{
    return tensor->meta_data.is_dead;
}

struct tl_device tl_tensor_device(const struct tl_tensor *tensor)
{
    return tensor->device;
}

tl_stream tl_tensor_stream(const struct tl_tensor *tensor)
{
    return tensor->stream;
}

void tl_tensor_set_stream(struct tl_tensor *tensor, tl_stream stream)
{
    tensor->stream = stream;
}

bool tl_tensor_is_on_device(const struct tl_tensor *tensor)
{
    return tensor->device.kind != TL_DEVICE_HOST;
}

struct tl_device_memory *tl_tensor_device_memory(const struct tl_tensor *tensor)
{
    while (tensor->base)
        tensor = tensor->base;
    return tensor->device_memory;
}

void tl_tensor_set_fence(struct tl_tensor *tensor, struct tl_device_fence *fence)
{
    TL_CHECK(!tensor->fence);
    tensor->fence = fence;
}

struct tl_device_fence *tl_tensor_fence(const struct tl_tensor *tensor)
{
    while (!tensor->fence && tensor->base)
        tensor = tensor->base;
    return tensor->fence;
}

const struct tl_meta_data *tl_tensor_meta_data(const struct tl_tensor *tensor)
{
    return &tensor->meta_data;
}

bool tl_tensor_is_writable(const struct tl_tensor *tensor)
{
    return !tensor->is_read_only && !tensor->meta_data.is_dead;
}

bool tl_tensor_is_read_only(const struct tl_tensor *tensor)
{
    return tensor->is_read_only;
}

enum tl_status tl_tensor_check(const struct tl_tensor *tensor, struct tl_error *ret_error)
{
    return tl_tensor_check_readable(tensor, 0, tensor->meta_data.size_bytes, ret_error);
}

enum tl_status tl_tensor_string(const struct tl_tensor *tensor, uint64_t index, struct tl_string *ret_string,
                                struct tl_error *ret_error)
{
    if (tensor->meta_data.dtype != TL_STRING)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a tensor of %s has no strings",
                            tl_dtype_name(tensor->meta_data.dtype));
    uint64_t count = tl_tensor_element_count(tensor);
    if (index >= count)
        return tl_error_set(ret_error, TL_OUT_OF_RANGE, "string %" PRIu64 " was asked of a tensor that has %" PRIu64,
                            index, count);
    return tl_string_index_find(tensor->strings, tensor->data, tensor->meta_data.size_bytes, index, ret_string,
                                ret_error);
}

enum tl_status tl_tensor_check_strings(const struct tl_tensor *tensor, struct tl_error *ret_error)
{
    if (tensor->meta_data.dtype != TL_STRING) return TL_OK;
    return tl_string_index_build(tensor->strings, tensor->data, tensor->meta_data.size_bytes, ret_error);
}

/* ------------------------------------------------------------------------------------------------- attachments -- */

void tl_tensor_allocation(const struct tl_tensor *tensor, void **ret_data, uint64_t *ret_capacity_bytes)
{
    *ret_data = tensor->allocation;
    *ret_capacity_bytes = tensor->capacity_bytes;
}

void *tl_tensor_release_context(const struct tl_tensor *tensor, tl_release_fn release)
{
    while (tensor->base)
        tensor = tensor->base;
    return tensor->release == release ? tensor->release_context : NULL;
}

bool tl_tensor_is_released_by(const struct tl_tensor *tensor, tl_release_fn release)
{
    return tensor->release == release;
}

void tl_tensor_attach(struct tl_tensor *tensor, struct tl_tensor_attachment *attachment)
{
    while (tensor->base)
        tensor = tensor->base;
    attachment->next = atomic_load_explicit(&tensor->attachments, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&tensor->attachments, &attachment->next, attachment,
                                                  memory_order_acq_rel, memory_order_relaxed))
        continue;
}

struct tl_tensor_attachment *tl_tensor_find_attachment(const struct tl_tensor *tensor, const void *owner)
{
    while (tensor->base)
        tensor = tensor->base;
    struct tl_tensor_attachment *attachment = atomic_load_explicit(&tensor->attachments, memory_order_acquire);
    while (attachment && attachment->owner != owner)
        attachment = attachment->next;
    return attachment;
}

struct tl_annotations *tl_tensor_annotations(const struct tl_tensor *tensor)
{
    return tensor->annotations;
}

void tl_tensor_set_annotations(struct tl_tensor *tensor, struct tl_annotations *annotations)
{
    struct tl_annotations *earlier = tensor->annotations;
    tensor->annotations = tl_annotations_get(annotations);
    tl_annotations_put(earlier);
}

/* ------------------------------------------------------------------------------------------------------- guard -- */

void tl_tensor_set_guard(struct tl_tensor *tensor, tl_tensor_guard_fn guard, void *context)
{
    tensor->guard = guard;
    tensor->guard_context = context;
}

void tl_tensor_get_guard(const struct tl_tensor *tensor, tl_tensor_guard_fn *ret_guard, void **ret_context)
{
    *ret_guard = tensor->guard;
    *ret_context = tensor->guard_context;
}

enum tl_status tl_tensor_check_readable(const struct tl_tensor *tensor, uint64_t offset_bytes, uint64_t len_bytes,
                                        struct tl_error *ret_error)
{
    uint64_t end_bytes;
    TL_CHECK(tl_add_u64(offset_bytes, len_bytes, &end_bytes) && end_bytes <= tensor->meta_data.size_bytes);
    if (!tensor->guard || len_bytes == 0) return TL_OK;
    if (tensor->runs) return tl_tensor_check_readable(tensor->base, 0, tensor->base->meta_data.size_bytes, ret_error);
    return tensor->guard(tensor->guard_context, (const unsigned char *)tensor->data + offset_bytes, len_bytes,
                         ret_error);
}
