// SPDX-License-Identifier: Apache-2.0
/*
 * The receiving half that all transports share.
 *
 * Happy path: tl_fetch_begin places the announced value, or tl_fetch_place does so later when memory of a device is
 * there; tl_fetch_fill says where each piece goes and tl_fetch_advance counts and hashes it; when all announced bytes
 * have arrived, tl_fetch_verify compares the checksum.
 *
 * Failure modes: a connection that breaks leaves the progress in the fetch; the next begin continues at exactly that
 * byte of the same value, or starts over when the owner has another one. A peer that announces impossible meta-data,
 * resumes elsewhere or sends too much ends the fetch with a status; nothing is written outside of the destination.
 */
#include "tensor/transfer.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"

void tl_fetch_init(struct tl_fetch *fetch, const struct tl_fetch_ops *ops)
{
    *fetch = (struct tl_fetch){.ops = ops};
    tl_list_init(&fetch->transport_link);
}

const struct tl_meta_data *tl_fetch_meta_data(const struct tl_fetch *fetch)
{
    static const struct tl_meta_data none = {.dtype = TL_DTYPE_INVALID};
    if (fetch->destination) return tl_tensor_meta_data(fetch->destination);
    return fetch->unplaced ? fetch->unplaced : &none;
}

/* Forgets what has arrived, keeps nothing. */
static void drop_progress(struct tl_fetch *fetch)
{
    if (fetch->destination) {
        (void)XXH3_freeState(fetch->hash_state);
        tl_tensor_put(fetch->destination);
        fetch->destination = NULL;
    } else {
        free(fetch->unplaced);
    }
    fetch->unplaced = NULL;
    fetch->publication = 0;
    fetch->offer_step = 0;
    fetch->received_bytes = 0;
    fetch->is_verified = false;
}

void tl_fetch_restart(struct tl_fetch *fetch)
{
    drop_progress(fetch);
}

void tl_fetch_fini(struct tl_fetch *fetch)
{
    drop_progress(fetch);
}

static enum tl_status check_resume(const struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                                   uint64_t publication, uint64_t offset, struct tl_error *ret_error)
{
    if (fetch->destination && publication == fetch->publication && offset == fetch->received_bytes &&
        tl_meta_data_is_equal(meta_data, tl_fetch_meta_data(fetch)))
        return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                        "tensor '%s': the peer continues value %" PRIx64 " at byte %" PRIu64 ", but %" PRIu64
                        " bytes of value %" PRIx64 " have arrived",
                        fetch->key, publication, offset, fetch->received_bytes, fetch->publication);
}

/* Creates the state of a hash, if one is wanted; the output is NULL otherwise. */
static enum tl_status create_hash(const struct tl_fetch *fetch, void **ret_hash_state, struct tl_error *ret_error)
{
    *ret_hash_state = fetch->wants_checksum ? XXH3_createState() : NULL;
    if (*ret_hash_state || !fetch->wants_checksum) return TL_OK;
    return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "tensor '%s': no memory for its checksum", fetch->key);
}

/* Remembers the meta-data of a value until its destination is there. */
static enum tl_status remember(struct tl_fetch *fetch, const struct tl_meta_data *meta_data, struct tl_error *ret_error)
{
    if (!fetch->unplaced) fetch->unplaced = malloc(sizeof(*fetch->unplaced));
    if (!fetch->unplaced)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "tensor '%s': no memory for its meta-data", fetch->key);
    if (meta_data != fetch->unplaced) tl_meta_data_copy(fetch->unplaced, meta_data);
    return TL_OK;
}

/* Asks for a destination, which may come later. */
static enum tl_status ask_for_place(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                                    struct tl_error *ret_error)
{
    struct tl_tensor *destination = NULL;
    void *hash_state;
    enum tl_status status = create_hash(fetch, &hash_state, ret_error);
    if (status == TL_OK) status = fetch->ops->place(fetch, meta_data, &destination, ret_error);
    if (!destination) (void)XXH3_freeState(hash_state);
    if (status != TL_OK) return status;
    bool may_wait = fetch->placed != NULL || fetch->allocator != NULL;
    TL_CHECK(destination ? tl_tensor_size_bytes(destination) == meta_data->size_bytes : may_wait);
    if (!destination) return remember(fetch, meta_data, ret_error);
    free(fetch->unplaced);
    fetch->destination = destination;
    fetch->hash_state = hash_state;
    if (hash_state) tl_fetch_hash_again(fetch);
    return TL_OK;
}

enum tl_status tl_fetch_place(struct tl_fetch *fetch, struct tl_error *ret_error)
{
    TL_CHECK(!fetch->destination && fetch->unplaced);
    return ask_for_place(fetch, fetch->unplaced, ret_error);
}

/* Starts a value at its first byte, in the destination that is there when it fits. */
static enum tl_status start_value(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                                  struct tl_error *ret_error)
{
    if (fetch->destination && tl_meta_data_is_equal(meta_data, tl_fetch_meta_data(fetch))) {
        fetch->received_bytes = 0;
        if (fetch->hash_state) tl_fetch_hash_again(fetch);
        return TL_OK;
    }
    if (fetch->destination) drop_progress(fetch); /* without one there is none */
    return ask_for_place(fetch, meta_data, ret_error);
}

enum tl_status tl_fetch_start(struct tl_fetch *fetch, const struct tl_meta_data *meta_data, uint64_t publication,
                              uint64_t offer_step, struct tl_error *ret_error)
{
    enum tl_status status = start_value(fetch, meta_data, ret_error);
    fetch->offer_step = offer_step; /* also of a value that cannot be received */
    if (status == TL_OK) fetch->publication = publication;
    return status;
}

enum tl_status tl_fetch_begin(struct tl_fetch *fetch, const struct tl_meta_data *meta_data, uint64_t publication,
                              uint64_t offer_step, uint64_t offset, struct tl_error *ret_error)
{
    enum tl_status status = tl_meta_data_validate(meta_data, ret_error);
    if (status != TL_OK) {
        tl_error_prefix(ret_error, "tensor '%s': the peer's meta-data: ", fetch->key);
        return status;
    }
    if (publication == 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "tensor '%s': the peer sends a value without a publication number", fetch->key);
    if (offset > 0) {
        status = check_resume(fetch, meta_data, publication, offset, ret_error);
        if (status != TL_OK) return status;
        fetch->offer_step = offer_step;
        return TL_OK;
    }
    return tl_fetch_start(fetch, meta_data, publication, offer_step, ret_error);
}

enum tl_status tl_fetch_fill(struct tl_fetch *fetch, uint64_t len_bytes, tl_bytes_fn write, void *context,
                             struct tl_error *ret_error)
{
    uint64_t size_bytes = tl_fetch_meta_data(fetch)->size_bytes;
    uint64_t left_bytes = size_bytes - fetch->received_bytes;
    if (!fetch->destination || len_bytes > left_bytes)
        return tl_error_set(ret_error, TL_OUT_OF_RANGE,
                            "tensor '%s': the peer sends %" PRIu64 " bytes where %" PRIu64 " of %" PRIu64
                            " announced bytes are left",
                            fetch->key, len_bytes, left_bytes, size_bytes);
    tl_tensor_walk(fetch->destination, fetch->received_bytes, len_bytes, write, context);
    return TL_OK;
}

static void hash(void *hash_state, unsigned char *bytes, size_t len_bytes)
{
    TL_CHECK(XXH3_64bits_update(hash_state, bytes, len_bytes) == XXH_OK);
}

void tl_fetch_advance(struct tl_fetch *fetch, uint64_t len_bytes)
{
    TL_CHECK(fetch->destination && len_bytes <= tl_tensor_size_bytes(fetch->destination) - fetch->received_bytes);
    if (len_bytes == 0) return;
    if (fetch->hash_state && !tl_tensor_is_on_device(fetch->destination))
        tl_tensor_walk(fetch->destination, fetch->received_bytes, len_bytes, hash, fetch->hash_state);
    fetch->received_bytes += len_bytes;
}

void tl_fetch_hash_again(struct tl_fetch *fetch)
{
    TL_CHECK(XXH3_64bits_reset(fetch->hash_state) == XXH_OK);
}

void tl_fetch_hash(struct tl_fetch *fetch, const void *data, uint64_t len_bytes)
{
    TL_CHECK(XXH3_64bits_update(fetch->hash_state, data, len_bytes) == XXH_OK);
}

void tl_fetch_take(struct tl_fetch *fetch, struct tl_tensor *tensor, uint64_t offer_step)
{
    drop_progress(fetch);
    fetch->destination = tensor;
    fetch->offer_step = offer_step;
    fetch->received_bytes = tl_tensor_size_bytes(tensor);
}

struct tl_tensor *tl_fetch_pass_destination(struct tl_fetch *fetch)
{
    struct tl_tensor *destination = fetch->destination;
    (void)XXH3_freeState(fetch->hash_state);
    fetch->destination = NULL;
    fetch->unplaced = NULL;
    return destination;
}

bool tl_fetch_is_complete(const struct tl_fetch *fetch)
{
    return fetch->destination && fetch->received_bytes == tl_tensor_size_bytes(fetch->destination);
}

static enum tl_status verify_checksum(struct tl_fetch *fetch, bool has_checksum, uint64_t checksum,
                                      struct tl_error *ret_error)
{
    if (!fetch->wants_checksum) return TL_OK;
    if (!has_checksum)
        return tl_error_set(ret_error, TL_DATA_LOSS, "tensor '%s': the peer sent no checksum, which was asked for",
                            fetch->key);
    uint64_t actual = XXH3_64bits_digest(fetch->hash_state);
    if (actual != checksum)
        return tl_error_set(ret_error, TL_DATA_LOSS,
                            "tensor '%s': the checksum of the %" PRIu64 " bytes that arrived is %016" PRIx64
                            ", the peer's %016" PRIx64,
                            fetch->key, fetch->received_bytes, actual, checksum);
    return TL_OK;
}

enum tl_status tl_fetch_verify(struct tl_fetch *fetch, bool has_checksum, uint64_t checksum, struct tl_error *ret_error)
{
    TL_CHECK(tl_fetch_is_complete(fetch));
    enum tl_status status = verify_checksum(fetch, has_checksum, checksum, ret_error);
    if (status != TL_OK) return status;
    status = tl_tensor_check_strings(fetch->destination, ret_error);
    if (status != TL_OK) {
        tl_error_prefix(ret_error, "tensor '%s': ", fetch->key);
        return status;
    }
    fetch->is_verified = fetch->wants_checksum;
    return TL_OK;
}

const char *tl_path_name(enum tl_path path)
{
    static const char *const names[] = {"none",   "self",       "grpc",      "serialized", "zero-copy", "bounce",
                                        "mapped", "gpu-direct", "gpu-proxy", "gpu-ipc",    "inline"};
    return (size_t)path < TL_ARRAY_COUNT(names) ? names[path] : "none";
}
