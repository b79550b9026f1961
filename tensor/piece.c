// SPDX-License-Identifier: Apache-2.0
/*
 * Pieces.
 *
 *   reading:  FENCED --fence reached--> WAITING --block--> COPYING --copied--> RESTING --put--> (freed)
 *   writing:  FENCED --fence reached--> WAITING --block--> FILLING --tl_piece_copy--> COPYING --copied--> RESTING
 *   any state --failed--> RESTING
 *
 * What a piece waits for ends on other threads. These change the state and post the closure, which calls notify, under
 * the mutex of the piece; whoever puts the piece marks it as given up under the same mutex. So either the closure was
 * posted before, and frees the piece when it runs, or nothing will be posted any more, and the thread on which the
 * waiting ends frees it.
 */
#include "tensor/piece.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/error.h"
#include "tensor/tensor.h"

enum piece_state {
    FENCED,  /* waits for the fence */
    WAITING, /* for a block */
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
    void *block; /* NULL: not there yet */
    void *data;  /* the block, as far as the caller knows */
    bool is_kept;
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

static void destroy(struct tl_piece *piece)
{
    if (piece->block) tl_device_staging_put(piece->copy.device, piece->block, piece->is_kept);
    tl_device_fence_put(piece->options.after);
    tl_tensor_put(piece->options.tensor);
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
    piece->data = piece->block;
    unlock(piece);
    if (is_given_up) {
        destroy(piece);
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

/* The copy is over. Thread: the device's. */
static void copied(struct tl_device_copy *copy, const struct tl_error *status)
{
    arrive(TL_CONTAINER_OF(copy, struct tl_piece, copy), RESTING, status);
}

static void start_copy(struct tl_piece *piece)
{
    unsigned char *data = tl_tensor_data(piece->options.tensor);
    void *bytes = data ? data + piece->options.offset_bytes : NULL;
    piece->copy.to = piece->is_writing ? bytes : piece->block;
    piece->copy.from = piece->is_writing ? piece->block : bytes;
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
    if (status->code != TL_OK || piece->is_writing) {
        arrive(piece, FILLING, status);
    } else if (set_state(piece, COPYING)) {
        start_copy(piece);
    }
}

/* The fence is reached. Thread: the device's. */
static void fence_reached(struct tl_device_copy *copy, const struct tl_error *status)
{
    struct tl_piece *piece = TL_CONTAINER_OF(copy, struct tl_piece, copy);
    if (status->code != TL_OK || piece->options.len_bytes == 0) {
        arrive(piece, RESTING, status);
    } else if (set_state(piece, WAITING)) {
        tl_device_staging_request(&piece->wait);
    }
}

static struct tl_piece *create(const struct tl_piece_options *options, bool is_writing)
{
    TL_CHECK(options->len_bytes <= TL_STAGING_BLOCK_BYTES);
    struct tl_piece *piece = tl_alloc_zeroed(sizeof(*piece));
    if (!piece) return NULL;
    TL_CHECK(pthread_mutex_init(&piece->mutex, NULL) == 0);
    piece->options = *options;
    piece->options.tensor = tl_tensor_get(options->tensor);
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
        piece->state = WAITING;
        tl_device_staging_request(&piece->wait);
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

bool tl_piece_keep(struct tl_piece *piece)
{
    TL_CHECK(!piece->is_kept);
    piece->is_kept = tl_device_staging_keep(piece->copy.device);
    return piece->is_kept;
}

/* Gives the piece up. Returns false, and does nothing, when its copy must be waited for. */
static bool give_up(struct tl_piece *piece, bool is_copy_left)
{
    struct tl_tensor *tensor = NULL;
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
        piece->options.tensor = NULL;
    }
    unlock(piece);
    tl_tensor_put(tensor);
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
