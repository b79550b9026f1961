// SPDX-License-Identifier: Apache-2.0
/*
 * What every transport and the worker above it agree on: a fetch (one tensor asked of one peer, the receiver's side)
 * and a serve (the same request, the owner's side). Transports know nothing of rendezvous, deadlines or retries; the
 * worker knows nothing of frames.
 *
 * A request has an identity that does not depend on the transport: the asker's incarnation and a number. When a
 * connection breaks, the worker starts the same fetch again, on any transport, and the bytes that have arrived count.
 */
#ifndef TENSOR_TRANSFER_H
#define TENSOR_TRANSFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/path.h>
#include <tensorlane/tensor.h>

#include "base/list.h"
#include "base/shares.h"
#include "tensor/tensor.h"

#define TL_MAX_NAME_BYTES 300 /* of "/job:J/task:N", with NUL */
#define TL_MAX_ADDRESS_BYTES 320

/* Who is on the other side of a call, and how we know. */
enum tl_identity_source {
    TL_IDENTITY_NONE = 0,    /* did not say */
    TL_IDENTITY_CLAIMED = 1, /* said so, over a connection that proves nothing */
};

/* Of what tells hosts apart. */
#define TL_HOST_BYTES 16

struct tl_identity {
    enum tl_identity_source source;
    char name[TL_MAX_NAME_BYTES]; /* "/job:ps/task:0"; "" for a client */
    uint64_t incarnation;         /* 0: unknown */
    char address[TL_MAX_ADDRESS_BYTES];
    struct tl_share_client client; /* who is charged for what it holds */
    uint8_t host[TL_HOST_BYTES];   /* equal for workers of one host that has run on since; zeros: not told */
};

static inline bool tl_identity_has_host(const struct tl_identity *identity)
{
    uint8_t bits = 0;
    for (unsigned i = 0; i < TL_HOST_BYTES; i++)
        bits |= identity->host[i];
    return bits != 0;
}

struct tl_request_id {
    uint64_t incarnation; /* of the asker */
    uint64_t number;      /* unique within it, starting at 1 */
};

/* What an owner gives for a request. */
struct tl_offer {
    struct tl_tensor *tensor;
    uint64_t step;
    uint64_t publication; /* identifies the value: another one under the same key has another number; never 0 */
    bool is_one_shot;     /* must be acknowledged by its receiver */
};

/* One published tensor in a listing; the key lives as long as the listing. */
struct tl_listed {
    char *key;
    uint64_t step;
    uint64_t publication;
    struct tl_meta_data meta_data;
    struct tl_annotations *annotations; /* one reference; NULL: none */
};

struct tl_listing {
    struct tl_listed *items; /* [count], sorted by key */
    size_t count;
};

/* ------------------------------------------------------------------------------------------------------- fetch -- */

struct tl_fetch;

/* Where a transport wants destinations to lie that it may choose. */
struct tl_allocator {
    /* A tensor of this meta-data with memory to receive into. Errors: TL_RESOURCE_EXHAUSTED. Thread: the transport's.
     */
    enum tl_status (*create)(void *context, const struct tl_meta_data *meta_data, struct tl_tensor **ret_tensor,
                             struct tl_error *ret_error);
    void *context;
};

struct tl_fetch_ops {
    /* The meta-data is known: chooses where the bytes go, with a reference for the caller: fetch->allocator makes new
     * memory if there is one, else tl_tensor_create_for. Called again when a value of other meta-data takes the place
     * of the one that was begun. Errors: end the fetch with them. Thread: the transport's. */
    enum tl_status (*place)(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                            struct tl_tensor **ret_destination, struct tl_error *ret_error);
    /* The fetch is over; exactly once per start. TL_OK: all bytes are in the destination, checked as asked.
     * TL_UNAVAILABLE, unless is_final: the connection broke, the fetch may be started again. The transport forgets the
     * fetch before it calls, so the callee may start or free it. */
    void (*done)(struct tl_fetch *fetch, const struct tl_error *result);
};

struct tl_fetch {
    const struct tl_fetch_ops *ops;
    struct tl_request_id id;
    const char *key;
    uint64_t step;
    bool wants_checksum;
    bool may_map; /* the destination may be a mapping, read-only; there is none of the caller's then */

    /* Progress; survives a broken connection. Zero before the first start. */
    struct tl_tensor *destination; /* one reference, the fetch's; NULL until placed */
    struct tl_meta_data meta_data;
    uint64_t publication;    /* the value that the bytes come from, 0: none yet */
    uint64_t offer_step;     /* its step */
    uint64_t received_bytes; /* the first that many bytes of it are in the destination */
    void *hash_state;        /* XXH3 over them; NULL unless wants_checksum */
    bool is_verified;
    bool is_final;     /* in done: the status is the owner's answer, whatever its code */
    bool is_rerouted;  /* in done with TL_UNAVAILABLE: the transport works and has no place for the fetch, for the
                             reason in path_reason; another transport may take it */
    bool is_unsettled; /* it was asked for on a connection that broke, and no last word has come since: the owner may
                          keep a value for it */

    enum tl_path path;       /* how the bytes came; in done with TL_OK */
    const char *path_reason; /* with TL_PATH_BOUNCE: why they were copied on the way; with TL_PATH_ZERO_COPY, when it
                                could have been mapped: why it was not; lives for ever */

    const struct tl_allocator *allocator; /* the transport's, from start to done; NULL: none */
    struct tl_list transport_link;        /* the transport's, from start to done */
    void *transport_state;
};

/* Starts clean: no destination, no progress. */
void tl_fetch_init(struct tl_fetch *fetch, const struct tl_fetch_ops *ops);
/* Puts the destination, frees the hash state. */
void tl_fetch_fini(struct tl_fetch *fetch);
/* Forgets what has arrived: for a transport that begins every value at its first byte. */
void tl_fetch_restart(struct tl_fetch *fetch);

/* The receiving half that all transports share: the owner has begun to send (or resumed) a value. Places it, or checks
 * that it continues what was begun at exactly fetch->received_bytes.
 * Errors: of ops->place; TL_INVALID_ARGUMENT: meta-data that cannot be, or a resume at the wrong offset. */
enum tl_status tl_fetch_begin(struct tl_fetch *fetch, const struct tl_meta_data *meta_data, uint64_t publication,
                              uint64_t offer_step, uint64_t offset, struct tl_error *ret_error) TL_MUST_USE;
/* The same at the first byte, with meta-data that was validated when it came. Errors: of ops->place. */
enum tl_status tl_fetch_start(struct tl_fetch *fetch, const struct tl_meta_data *meta_data, uint64_t publication,
                              uint64_t offer_step, struct tl_error *ret_error) TL_MUST_USE;
/* The address where the next len_bytes bytes go. Errors: TL_OUT_OF_RANGE: more than was announced. */
enum tl_status tl_fetch_next(struct tl_fetch *fetch, uint64_t len_bytes, void **ret_address,
                             struct tl_error *ret_error) TL_MUST_USE;
/* len_bytes bytes have been written to the address that tl_fetch_next gave: counts and hashes them. */
void tl_fetch_advance(struct tl_fetch *fetch, uint64_t len_bytes);
/* The whole value is there without a transfer: this tensor, whose reference the fetch takes over, instead of a
 * destination that it may have. */
void tl_fetch_take(struct tl_fetch *fetch, struct tl_tensor *tensor, uint64_t offer_step);
bool tl_fetch_is_complete(const struct tl_fetch *fetch);
/* All bytes have arrived: checks the checksum when one was asked for, and the strings of a string tensor.
 * Errors: TL_DATA_LOSS, naming the key: the checksum is missing or differs, or the strings are damaged. */
enum tl_status tl_fetch_verify(struct tl_fetch *fetch, bool has_checksum, uint64_t checksum,
                               struct tl_error *ret_error) TL_MUST_USE;

/* ------------------------------------------------------------------------------------------------------- serve -- */

struct tl_serve;

struct tl_serve_ops {
    /* The answer, once: a status, or with TL_OK an offer (the callee takes over offer->tensor's reference). Thread: the
     * transport's. */
    void (*reply)(struct tl_serve *serve, const struct tl_error *status, const struct tl_offer *offer);
};

/* A request that a transport has received. The transport owns it until it calls the source's `closed`. */
struct tl_serve {
    const struct tl_serve_ops *ops;
    struct tl_request_id id;
    const struct tl_identity *peer; /* valid as long as the serve */
    const char *key;                /* NUL-terminated, valid as long as the serve */
    uint64_t step;
    bool is_final;      /* a status that is replied is the answer, whatever its code; TL_UNAVAILABLE else: ask again */
    void *source_state; /* the source's */
};

/* How a serve ended. */
enum tl_serve_end {
    TL_SERVE_RECEIVED,  /* the asker has the whole tensor, or a status */
    TL_SERVE_CANCELLED, /* the asker has given up and will not ask again */
    TL_SERVE_BROKEN,    /* the asker is out of reach and may come back with the same id */
};

/* Where transports find tensors: implemented by the worker. Thread: the transport's. */
struct tl_source_ops {
    /* A peer asks. Answered by serve->ops->reply, now or later. */
    void (*request)(void *source, struct tl_serve *serve);
    /* The serve is over, exactly once; replied to or not. Afterwards the transport frees it. */
    void (*closed)(void *source, struct tl_serve *serve, enum tl_serve_end end);
    /* The asker says (again) that it has received a tensor whose serve is long gone. */
    void (*received)(void *source, const struct tl_request_id *id);
    /* The asker says that it will never ask again for what it asked for on another connection. */
    void (*given_up)(void *source, const struct tl_request_id *id);
};

#endif
