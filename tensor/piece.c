// SPDX-License-Identifier: Apache-2.0
/*
 * Pieces.
 *
 *   reading:  FENCED --fence reached--> WAITING --block--> COPYING --copied--> RESTING --put--> (freed)
 *   writing:  FENCED --fence reached--> WAITING --block--> FILLING --tl_piece_copy--> COPYING --copied--> RESTING
 *                                          ^ \--blocks are free--> HINTED --one still is--> FILLING
 *                                           \------------------------/ none is
 *   with memory of the caller, both ways:  FENCED --fence reached--> COPYING --copied--> RESTING
 *   any state --failed--> RESTING
 *
 * The loop may take long to run, or not run at all for a while. So what waits for it keeps few blocks: bytes that were
 * read move to memory of their own when half of the blocks are kept, and a piece that would be filled is only told that
 * a block is free. A piece that was written has none.
 *
 * What a piece waits for ends on other threads. These change the state and post the closure, which calls notify, under
 * the mutex of the piece; tl_piece_put marks it as given up under the same mutex. So either the closure was posted
 * before, and frees the piece when it runs, or nothing will be posted any more, and the thread on which the waiting
 * ends frees it.
 */
#include "tensor/piece.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/error.h"
#include "tensor/tensor.h"

/* Bytes up to which a copy costs less than a block that is kept. */
#define COPY_BYTES (64 * 1024)

enum piece_state {
    FENCED,  /* waits for the fence */
    WAITING, /* for a block */
    HINTED,  /* for the loop, to look for a block that may be free */
    FILLING, /* for the caller */
    COPYING, /* for the device */
    RESTING, /* for nothing */
};

struct tl_piece {
    struct tl_piece_options options;
    bool is_writing;
    struct tl_closure closure;
    struct tl_device_copy copy;
    struct tl_staging_wait wait;
    void *block;           /* NULL: not there yet */
    void *data;            /* the block, as far as the caller knows */
    bool is_kept;          /* the block counts as kept */
    bool is_copied;        /* the block is memory of the piece's own */
    pthread_mutex_t mutex; /* guards what follows */
    enum piece_state state;
    bool is_posted; /* the closure is on its way */
    bool is_given_up;
    const struct tl_error *failure; /* kept; NULL: none */
};

static void lock(struct tl_piece *piece)
{
    TL_CHECK(pthread_mutex_lock(&piece->mutex) == 0);
}

static void unlock(struct tl_piece *piece)
{
    TL_CHECK(pthread_mutex_unlock(&piece->mutex) == 0);
}

static void give_block(struct tl_piece *piece)
{
    if (piece->is_copied) {
        free(piece->block);
    } else if (piece->block) {
        tl_device_staging_put(piece->copy.device, piece->block, piece->is_kept);
    }
    piece->block = NULL;
    piece->is_kept = false;
}

static void destroy(struct tl_piece *piece)
{
    give_block(piece);
    tl_device_fence_put(piece->options.after);
    tl_tensor_put(piece->options.tensor);
    tl_tensor_put(piece->options.host);
    tl_error_drop(piece->failure);
    TL_CHECK(pthread_mutex_destroy(&piece->mutex) == 0);
    free(piece);
}

static void deliver(struct tl_closure *closure)
{
    static const struct tl_error success = {.code = TL_OK};
    struct tl_piece *piece = TL_CONTAINER_OF(closure, struct tl_piece, closure);
    lock(piece);
    bool is_given_up = piece->is_given_up;
    const struct tl_error *failure = piece->failure;
    piece->is_posted = false;
    bool is_hint = piece->state == HINTED;
    if (is_hint && !is_given_up) {
        piece->block = tl_device_staging_try(piece->copy.device);
        piece->state = piece->block ? FILLING : WAITING;
    }
    bool must_wait = piece->state == WAITING;
    piece->data = piece->block;
    unlock(piece);
    if (is_given_up) {
        destroy(piece);
    } else if (must_wait) {
        tl_device_staging_request(&piece->wait);
    } else {
        piece->options.notify(piece->options.context, piece, failure ? failure : &success);
    }
}

/* Moves on. Returns false when the piece was given up, and is freed. Thread: any. */
static bool set_state(struct tl_piece *piece, enum piece_state state)
{
    lock(piece);
    bool is_given_up = piece->is_given_up;
    if (!is_given_up) piece->state = state;
    unlock(piece);
    if (is_given_up) destroy(piece);
    return !is_given_up;
}

/* Moves on and notifies. Thread: any. */
static void arrive(struct tl_piece *piece, enum piece_state state, const struct tl_error *status)
{
    lock(piece);
    bool is_given_up = piece->is_given_up;
    if (status->code != TL_OK) piece->failure = tl_error_keep(status);
    piece->state = status->code == TL_OK ? state : RESTING;
    if (!is_given_up) {
        piece->is_posted = true;
        piece->options.post(piece->options.loop, &piece->closure);
    }
    unlock(piece);
    if (is_given_up) destroy(piece);
}

/* Leaves the bytes where they can wait for the loop. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
static enum tl_status leave_bytes(struct tl_piece *piece, struct tl_error *ret_error)
{
    size_t len_bytes = (size_t)piece->options.len_bytes;
    piece->is_kept = len_bytes > COPY_BYTES && tl_device_staging_keep(piece->copy.device);
    if (piece->is_kept) return TL_OK;
    void *bytes = malloc(len_bytes);
    if (!bytes) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for bytes of a device");
    memcpy(bytes, piece->block, len_bytes);
    give_block(piece);
    piece->block = bytes;
    piece->is_copied = true;
    return TL_OK;
}

/* Gives back what the copy is between. */
static void let_go(struct tl_piece *piece)
{
    struct tl_tensor *tensor = piece->options.tensor, *host = piece->options.host;
    piece->options.tensor = piece->options.host = NULL;
    tl_tensor_put(tensor);
    tl_tensor_put(host);
}

/* The copy is over. Thread: the device's. */
static void copied(struct tl_device_copy *copy, const struct tl_error *status)
{
    struct tl_piece *piece = TL_CONTAINER_OF(copy, struct tl_piece, copy);
    struct tl_error error;
    tl_error_copy(&error, status);
    if (piece->is_writing) {
        give_block(piece);
    } else if (status->code == TL_OK && piece->block && leave_bytes(piece, &error) == TL_OK) {
        error.code = TL_OK;
    }
    let_go(piece);
    arrive(piece, RESTING, &error);
}

static void start_copy(struct tl_piece *piece)
{
    const struct tl_piece_options *options = &piece->options;
    void *bytes = (unsigned char *)tl_tensor_data(options->tensor) + options->offset_bytes;
    void *pinned = piece->block;
    if (options->host) pinned = (unsigned char *)tl_tensor_data(options->host) + options->host_offset_bytes;
    piece->copy.to = piece->is_writing ? bytes : pinned;
    piece->copy.from = piece->is_writing ? pinned : bytes;
    piece->copy.len_bytes = piece->options.len_bytes;
    piece->copy.is_to_host = !piece->is_writing;
    piece->copy.after[0] = NULL;
    piece->copy.done = copied;
    tl_device_copy_start(&piece->copy);
}

/* A block is there, or never will be. Thread: any. */
static void block_came(struct tl_staging_wait *wait, void *block, const struct tl_error *status)
{
    struct tl_piece *piece = TL_CONTAINER_OF(wait, struct tl_piece, wait);
    piece->block = block;
    if (status->code != TL_OK) {
        arrive(piece, RESTING, status);
    } else if (piece->is_writing) {
        bool is_kept = tl_device_staging_keep(piece->copy.device);
        piece->is_kept = is_kept;
        if (!is_kept) {
            tl_device_staging_decline(wait, block);
            piece->block = NULL;
        }
        arrive(piece, is_kept ? FILLING : HINTED, status);
    } else if (set_state(piece, COPYING)) {
        start_copy(piece);
    }
}

/* Nothing comes before the block, or the copy, any more. */
static void ask_or_copy(struct tl_piece *piece)
{
    if (piece->options.host) {
        start_copy(piece);
    } else {
        tl_device_staging_request(&piece->wait);
    }
}

/* The fence is reached. Thread: the device's. */
static void fence_reached(struct tl_device_copy *copy, const struct tl_error *status)
{
    struct tl_piece *piece = TL_CONTAINER_OF(copy, struct tl_piece, copy);
    if (status->code != TL_OK || piece->options.len_bytes == 0) {
        arrive(piece, RESTING, status);
    } else if (set_state(piece, piece->options.host ? COPYING : WAITING)) {
        ask_or_copy(piece);
    }
}

static struct tl_piece *create(const struct tl_piece_options *options, bool is_writing)
{
    TL_CHECK(options->host || options->len_bytes <= TL_STAGING_BLOCK_BYTES);
    struct tl_piece *piece = tl_alloc_zeroed(sizeof(*piece));
    if (!piece) return NULL;
    TL_CHECK(pthread_mutex_init(&piece->mutex, NULL) == 0);
    piece->options = *options;
    piece->options.tensor = tl_tensor_get(options->tensor);
    piece->options.host = options->host ? tl_tensor_get(options->host) : NULL;
    piece->options.after = tl_device_fence_get(options->after);
    piece->is_writing = is_writing;
    piece->closure.run = deliver;
    tl_list_init(&piece->closure.link);
    piece->copy.device = tl_tensor_device(options->tensor);
    piece->wait = (struct tl_staging_wait){.device = piece->copy.device, .ready = block_came};
    /* It may be taken back before the thread on which the fence is reached has asked. */
    tl_list_init(&piece->wait.link);
    return piece;
}

/* Waits for the fence, even if there is none and no byte to copy, so that every piece notifies. */
static void wait_for_fence(struct tl_piece *piece)
{
    piece->state = FENCED;
    piece->copy.after[0] = piece->options.after;
    piece->copy.done = fence_reached;
    tl_device_copy_start(&piece->copy);
}

struct tl_piece *tl_piece_read(const struct tl_piece_options *options)
{
    struct tl_piece *piece = create(options, false);
    if (!piece) return NULL;
    if (options->after || options->len_bytes == 0) {
        wait_for_fence(piece);
    } else {
        piece->state = options->host ? COPYING : WAITING;
        ask_or_copy(piece);
    }
    return piece;
}

struct tl_piece *tl_piece_write(const struct tl_piece_options *options)
{
    struct tl_piece *piece = create(options, true);
    if (!piece) return NULL;
    if (options->after || options->len_bytes == 0) {
        wait_for_fence(piece);
        return piece;
    }
    if (options->host) {
        piece->state = COPYING;
        start_copy(piece);
        return piece;
    }
    piece->block = tl_device_staging_try(piece->copy.device);
    piece->data = piece->block;
    piece->state = piece->block ? FILLING : WAITING;
    if (!piece->block) tl_device_staging_request(&piece->wait);
    return piece;
}

void tl_piece_copy(struct tl_piece *piece)
{
    lock(piece);
    TL_CHECK(piece->state == FILLING);
    piece->state = COPYING;
    unlock(piece);
    start_copy(piece);
}

void *tl_piece_data(const struct tl_piece *piece)
{
    return piece->data;
}

uint64_t tl_piece_len_bytes(const struct tl_piece *piece)
{
    return piece->options.len_bytes;
}

bool tl_piece_is_copied(const struct tl_piece *piece)
{
    return piece->is_copied;
}

/* Gives the piece up. Returns false, and does nothing, when its copy must be waited for. */
static bool give_up(struct tl_piece *piece, bool is_copy_left)
{
    struct tl_tensor *tensor = NULL, *host = NULL;
    lock(piece);
    bool is_copying = piece->state == COPYING || (piece->state == RESTING && piece->is_posted);
    if (is_copying && !is_copy_left) {
        unlock(piece);
        return false;
    }
    bool is_over = !piece->is_posted && (piece->state == RESTING || piece->state == FILLING);
    if (piece->state == WAITING) is_over = tl_device_staging_cancel(&piece->wait);
    piece->is_given_up = true;
    if (piece->state == FENCED) {
        /* The fence may be reached in an hour; until then the tensor must not be kept. */
        tensor = piece->options.tensor;
        host = piece->options.host;
        piece->options.tensor = piece->options.host = NULL;
    }
    unlock(piece);
    tl_tensor_put(tensor);
    tl_tensor_put(host);
    if (is_over) destroy(piece);
    return true;
}

bool tl_piece_stop(struct tl_piece *piece)
{
    return give_up(piece, false);
}

void tl_piece_put(struct tl_piece *piece)
{
    if (piece) (void)give_up(piece, true);
}
