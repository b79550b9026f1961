// SPDX-License-Identifier: Apache-2.0
/*
 * Copies of whole tensors, between host and devices.
 *
 * Host memory that a device reads or writes must be pinned, and that of a tensor is not. So between the host and a
 * device the bytes travel in pieces through pinned blocks of the device: while the device copies from or to one block,
 * the calling thread copies from or to another. Between devices a tensor is one piece, which needs no block. Each piece
 * begins when the fences of both tensors are reached, so that the streams of the caller wait for nothing.
 *
 * A copy that no caller waits for is made by a thread of the library, which stands for the calling one. It posts the
 * closure that calls `done` under the mutex of the copy, and the closure takes that mutex first: so `done` may end the
 * loop.
 */
#include <pthread.h>

#include "base/check.h"
#include "base/copy.h"
#include "base/error.h"
#include "base/alloc.h"
#include "base/closure_thread.h"
#include "tensor/device.h"
#include "tensor/tensor.h"
#include "tensor/tensor_copy.h"

#define PIECES 2

struct piece {
    struct tl_device_copy copy;
    struct transfer *transfer;
    void *block; /* pinned; NULL: none is needed */
    uint64_t offset_bytes;
    bool is_begun;   /* the caller has not taken its end yet */
    bool is_running; /* under transfer->mutex: the device has not reported its end */
};

struct transfer {
    const struct tl_tensor *to;
    const struct tl_tensor *from;
    struct tl_device device;      /* makes the copies */
    struct tl_device from_device; /* where the source lies, if that is another device; else the host */
    uint64_t size_bytes;
    uint64_t piece_bytes;
    bool is_from_host;
    bool is_to_host;
    struct tl_device_fence *after[2];
    struct piece pieces[PIECES];
    unsigned piece_count;
    pthread_mutex_t mutex;
    pthread_cond_t over;
    struct tl_error error; /* under the mutex: the first one of a piece */
};

static unsigned char *byte_of(const struct tl_tensor *tensor, uint64_t offset_bytes)
{
    return (unsigned char *)tl_tensor_data(tensor) + offset_bytes;
}

/* ------------------------------------------------------------------------------------------------------ pieces -- */

static void piece_done(struct tl_device_copy *copy, const struct tl_error *status)
{
    struct piece *piece = TL_CONTAINER_OF(copy, struct piece, copy);
    struct transfer *transfer = piece->transfer;
    TL_CHECK(pthread_mutex_lock(&transfer->mutex) == 0);
    piece->is_running = false;
    if (transfer->error.code == TL_OK) tl_error_copy(&transfer->error, status);
    pthread_cond_signal(&transfer->over);
    TL_CHECK(pthread_mutex_unlock(&transfer->mutex) == 0);
}

static void start_piece(struct piece *piece, void *to, const void *from, uint64_t len_bytes)
{
    struct transfer *transfer = piece->transfer;
    piece->copy = (struct tl_device_copy){.device = transfer->device,
                                          .to = to,
                                          .from = from,
                                          .len_bytes = len_bytes,
                                          .is_to_host = transfer->is_to_host,
                                          .from_device = transfer->from_device,
                                          .after = {transfer->after[0], transfer->after[1]},
                                          .done = piece_done};
    piece->is_begun = true;
    piece->is_running = true;
    tl_device_copy_start(&piece->copy);
}

/* Starts the copy of len_bytes at an offset. Errors: the source cannot be read. */
static enum tl_status begin_piece(struct piece *piece, uint64_t offset_bytes, uint64_t len_bytes,
                                  struct tl_error *ret_error)
{
    struct transfer *transfer = piece->transfer;
    if (transfer->is_from_host) {
        enum tl_status status = tl_tensor_check_readable(transfer->from, offset_bytes, len_bytes, ret_error);
        if (status != TL_OK) return status;
        tl_copy(piece->block, byte_of(transfer->from, offset_bytes), len_bytes);
    }
    piece->offset_bytes = offset_bytes;
    start_piece(piece, transfer->is_to_host ? piece->block : byte_of(transfer->to, offset_bytes),
                transfer->is_from_host ? piece->block : byte_of(transfer->from, offset_bytes), len_bytes);
    return TL_OK;
}

/* Waits for the end of a piece, if it was begun, and copies what has come for the host. */
static enum tl_status end_piece(struct piece *piece, struct tl_error *ret_error)
{
    struct transfer *transfer = piece->transfer;
    TL_CHECK(pthread_mutex_lock(&transfer->mutex) == 0);
    while (piece->is_running)
        pthread_cond_wait(&transfer->over, &transfer->mutex);
    bool is_failed = transfer->error.code != TL_OK;
    TL_CHECK(pthread_mutex_unlock(&transfer->mutex) == 0);
    if (is_failed) return tl_error_copy(ret_error, &transfer->error);
    if (piece->is_begun && transfer->is_to_host && piece->block)
        tl_copy(byte_of(transfer->to, piece->offset_bytes), piece->block, piece->copy.len_bytes);
    piece->is_begun = false;
    return TL_OK;
}

static enum tl_status copy_pieces(struct transfer *transfer, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    unsigned number = 0;
    for (uint64_t offset = 0; status == TL_OK && offset < transfer->size_bytes; offset += transfer->piece_bytes) {
        struct piece *piece = &transfer->pieces[number++ % transfer->piece_count];
        uint64_t left_bytes = transfer->size_bytes - offset;
        status = end_piece(piece, ret_error);
        if (status == TL_OK)
            status = begin_piece(piece, offset, left_bytes < transfer->piece_bytes ? left_bytes : transfer->piece_bytes,
                                 ret_error);
    }
    /* Whatever has happened: nothing may go on behind the caller's back. */
    for (unsigned i = 0; i < transfer->piece_count; i++) {
        struct piece *piece = &transfer->pieces[number++ % transfer->piece_count];
        enum tl_status end = end_piece(piece, status == TL_OK ? ret_error : NULL);
        if (status == TL_OK) status = end;
    }
    return status;
}

/* ------------------------------------------------------------------------------------------------------ blocks -- */

/* Waits for the fences. */
static enum tl_status wait_for_streams(struct transfer *transfer, struct tl_error *ret_error)
{
    struct piece *piece = &transfer->pieces[0];
    if (!transfer->after[0] && !transfer->after[1]) return TL_OK;
    start_piece(piece, NULL, NULL, 0);
    return end_piece(piece, ret_error);
}

/* No block is held while a stream is waited for, because that can take as long as the program likes. */
static enum tl_status copy_through_blocks(struct transfer *transfer, struct tl_error *ret_error)
{
    void *blocks[PIECES];
    enum tl_status status = wait_for_streams(transfer, ret_error);
    if (status == TL_OK) status = tl_device_staging_take(transfer->device, blocks, &transfer->piece_count, ret_error);
    if (status != TL_OK) return status;
    for (unsigned i = 0; i < transfer->piece_count; i++)
        transfer->pieces[i].block = blocks[i];
    transfer->piece_bytes = TL_STAGING_BLOCK_BYTES;
    status = copy_pieces(transfer, ret_error);
    tl_device_staging_give(transfer->device, blocks, transfer->piece_count);
    return status;
}

/* What is made of a transfer once its pieces can be waited for. */
typedef enum tl_status action(struct transfer *transfer, struct tl_error *ret_error);

static enum tl_status run(struct transfer *transfer, action *run_action, struct tl_error *ret_error)
{
    TL_CHECK(pthread_mutex_init(&transfer->mutex, NULL) == 0);
    TL_CHECK(pthread_cond_init(&transfer->over, NULL) == 0);
    for (unsigned i = 0; i < PIECES; i++)
        transfer->pieces[i].transfer = transfer;
    enum tl_status status = run_action(transfer, ret_error);
    TL_CHECK(pthread_cond_destroy(&transfer->over) == 0);
    TL_CHECK(pthread_mutex_destroy(&transfer->mutex) == 0);
    return status;
}

static enum tl_status copy_on_devices(struct transfer *transfer, struct tl_error *ret_error)
{
    if (transfer->is_from_host || transfer->is_to_host) return run(transfer, copy_through_blocks, ret_error);
    transfer->piece_count = 1;
    transfer->piece_bytes = transfer->size_bytes;
    return run(transfer, copy_pieces, ret_error);
}

/* -------------------------------------------------------------------------------------------------------- copy -- */

enum tl_status tl_tensor_record_fence(const struct tl_tensor *tensor, struct tl_device_fence **ret_fence,
                                      struct tl_error *ret_error)
{
    struct tl_device device = tl_tensor_device(tensor);
    if (device.kind == TL_DEVICE_HOST) return TL_OK;
    return tl_device_fence_record(device, tl_tensor_stream(tensor), ret_fence, ret_error);
}

enum tl_status tl_tensor_wait(const struct tl_tensor *tensor, struct tl_error *ret_error)
{
    struct transfer transfer = {.to = tensor, .from = tensor, .device = tl_tensor_device(tensor)};
    enum tl_status status = tl_tensor_record_fence(tensor, &transfer.after[0], ret_error);
    if (status == TL_OK) status = run(&transfer, wait_for_streams, ret_error);
    tl_device_fence_put(transfer.after[0]);
    return status;
}

/* At least one of them is on a device. */
static void init_transfer(struct transfer *transfer, const struct tl_tensor *to, const struct tl_tensor *from)
{
    *transfer = (struct transfer){.to = to, .from = from, .size_bytes = tl_tensor_size_bytes(from)};
    transfer->is_from_host = tl_tensor_device(from).kind == TL_DEVICE_HOST;
    transfer->is_to_host = tl_tensor_device(to).kind == TL_DEVICE_HOST;
    transfer->device = tl_tensor_device(transfer->is_to_host ? from : to);
    if (tl_tensor_device(from).index != transfer->device.index && !transfer->is_from_host)
        transfer->from_device = tl_tensor_device(from);
}

static enum tl_status copy_with_device(const struct tl_tensor *to, const struct tl_tensor *from,
                                       struct tl_error *ret_error)
{
    struct transfer transfer;
    init_transfer(&transfer, to, from);
    enum tl_status status = tl_tensor_record_fence(from, &transfer.after[0], ret_error);
    if (status == TL_OK) status = tl_tensor_record_fence(to, &transfer.after[1], ret_error);
    if (status == TL_OK) status = copy_on_devices(&transfer, ret_error);
    tl_device_fence_put(transfer.after[0]);
    tl_device_fence_put(transfer.after[1]);
    return status;
}

static bool is_overlapping(const struct tl_tensor *a, const struct tl_tensor *b)
{
    uintptr_t a_begin = (uintptr_t)tl_tensor_data(a), b_begin = (uintptr_t)tl_tensor_data(b);
    return a_begin < b_begin + tl_tensor_size_bytes(b) && b_begin < a_begin + tl_tensor_size_bytes(a);
}

static enum tl_status check(const struct tl_tensor *to, const struct tl_tensor *from, struct tl_error *ret_error)
{
    char ours[TL_SHAPE_TEXT_BYTES], theirs[TL_SHAPE_TEXT_BYTES];
    const struct tl_meta_data *target = tl_tensor_meta_data(to), *source = tl_tensor_meta_data(from);
    if (source->dtype == TL_STRING || target->dtype == TL_STRING)
        return tl_error_set(ret_error, TL_UNIMPLEMENTED, "tensors of STRING cannot be copied; create another one");
    if (!tl_tensor_is_writable(to))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the tensor to copy to is read-only or dead");
    if (!tl_meta_data_is_equal(target, source))
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "a tensor of %s %s cannot be copied into one of %s %s",
                            source->is_dead ? "no value" : tl_dtype_name(source->dtype),
                            tl_shape_format(&source->shape, theirs, sizeof(theirs)), tl_dtype_name(target->dtype),
                            tl_shape_format(&target->shape, ours, sizeof(ours)));
    if (is_overlapping(to, from)) return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the two tensors share memory");
    return TL_OK;
}

enum tl_status tl_tensor_copy(struct tl_tensor *to, const struct tl_tensor *from, struct tl_error *ret_error)
{
    enum tl_status status = check(to, from, ret_error);
    if (status != TL_OK || tl_tensor_size_bytes(from) == 0) return status;
    bool is_on_host = tl_tensor_device(to).kind == TL_DEVICE_HOST && tl_tensor_device(from).kind == TL_DEVICE_HOST;
    if (!is_on_host) {
        status = copy_with_device(to, from, ret_error);
    } else {
        status = tl_tensor_check(from, ret_error);
        if (status == TL_OK) tl_copy(tl_tensor_data(to), tl_tensor_data(from), tl_tensor_size_bytes(from));
    }
    return status == TL_OK ? tl_tensor_check(from, ret_error) : status;
}

/* --------------------------------------------------------------------------------------- copies without waiting -- */

/* Makes the copies that no caller waits for. It is started with the first one and lives as long as the process. */
static struct tl_closure_thread copy_thread;
static pthread_once_t copy_thread_once = PTHREAD_ONCE_INIT;

struct copying {
    struct tl_copying_options options;
    struct tl_closure closure; /* to the thread, and then to the loop */
    pthread_mutex_t mutex;     /* held while the closure is posted to the loop */
    struct tl_error result;
};

static void init_copy_thread(void)
{
    tl_closure_thread_init(&copy_thread, "tl-copy");
}

static void destroy_copying(struct copying *copying)
{
    tl_tensor_put(copying->options.to);
    tl_tensor_put(copying->options.from);
    TL_CHECK(pthread_mutex_destroy(&copying->mutex) == 0);
    free(copying);
}

static void deliver(struct tl_closure *closure)
{
    struct copying *copying = TL_CONTAINER_OF(closure, struct copying, closure);
    TL_CHECK(pthread_mutex_lock(&copying->mutex) == 0);
    TL_CHECK(pthread_mutex_unlock(&copying->mutex) == 0);
    copying->options.done(copying->options.context, &copying->result);
    destroy_copying(copying);
}

static enum tl_status make(const struct tl_tensor *to, const struct tl_tensor *from, struct tl_error *ret_error)
{
    struct transfer transfer;
    enum tl_status status = check(to, from, ret_error);
    if (status != TL_OK || tl_tensor_size_bytes(from) == 0) return status;
    init_transfer(&transfer, to, from);
    status = copy_on_devices(&transfer, ret_error);
    return status == TL_OK ? tl_tensor_check(from, ret_error) : status;
}

/* Thread: the one for copies. */
static void run_copying(struct tl_closure *closure)
{
    struct copying *copying = TL_CONTAINER_OF(closure, struct copying, closure);
    copying->result.code = make(copying->options.to, copying->options.from, &copying->result);
    closure->run = deliver;
    TL_CHECK(pthread_mutex_lock(&copying->mutex) == 0);
    copying->options.post(copying->options.loop, closure);
    TL_CHECK(pthread_mutex_unlock(&copying->mutex) == 0);
}

enum tl_status tl_copying_start(const struct tl_copying_options *options, struct tl_error *ret_error)
{
    TL_CHECK(pthread_once(&copy_thread_once, init_copy_thread) == 0);
    enum tl_status status = tl_closure_thread_start(&copy_thread, ret_error);
    if (status != TL_OK) return status;
    struct copying *copying = tl_alloc_zeroed(sizeof(*copying));
    if (!copying) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to copy a tensor");
    copying->options = *options;
    tl_tensor_get(options->to);
    tl_tensor_get(options->from);
    copying->closure.run = run_copying;
    tl_list_init(&copying->closure.link);
    TL_CHECK(pthread_mutex_init(&copying->mutex, NULL) == 0);
    tl_closure_thread_post(&copy_thread, &copying->closure);
    return TL_OK;
}
