// SPDX-License-Identifier: Apache-2.0
/*
 * The contract between the transports and the worker above them: a fetch (a request for one tensor from one peer, the
 * receiver's side) and a serve (the same request, the owner's side). Transports know nothing of rendezvous, deadlines
 * or retries; the worker knows nothing of frames.
 *
 * A request has an identity that does not depend on the transport: the incarnation of the worker that asks, and a
 * number. When a connection breaks, the worker starts the same fetch again, on any transport, and the bytes that have
 * arrived count.
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

#define TL_MAX_NAME_BYTES 300 /* "/job:J/task:N" with its NUL */
#define TL_MAX_ADDRESS_BYTES 320
#define TL_MAX_PRIORITY 3

/* The other side of a call, and how its identity is known. */
enum tl_identity_source {
    TL_IDENTITY_NONE = 0,    /* it has not identified itself */
    TL_IDENTITY_CLAIMED = 1, /* it has identified itself, over a connection that proves nothing */
    TL_IDENTITY_PROVEN = 2,  /* over a TLS connection; `certified` is the name in its certificate */
};

#define TL_HOST_NAME_BYTES 256

/* Bytes that tell hosts apart. */
#define TL_HOST_BYTES 16

struct tl_identity {
    enum tl_identity_source source;
    char name[TL_MAX_NAME_BYTES];      /* "/job:ps/task:0"; "" for a client */
    char certified[TL_MAX_NAME_BYTES]; /* PROVEN: "/job:ps/task:0", or the name of a client; "" otherwise */
    bool is_member;                    /* PROVEN: certified is the name of a member */
    bool is_foreign;                   /* PROVEN: of another trust domain; certified, and name, are the whole URI */
    uint64_t incarnation;              /* 0: unknown */
    char address[TL_MAX_ADDRESS_BYTES];
    struct tl_share_client client; /* the client that is charged for what it holds */
    uint8_t host[TL_HOST_BYTES];   /* equal for workers on one host between two starts of it; zeros: not known */
    char host_name[TL_HOST_NAME_BYTES];
    uint64_t process_id; /* 0: unknown */
    bool serves_probes;  /* it answers the requests of probes (server/probe_values.h) */
    bool serves_subscriptions;
    bool serves_parts;       /* it answers requests for parts of tensors (tensor/part.h) */
    bool fetches_puts;       /* it can fetch what is published on it (struct tl_put_source) */
    bool is_one_way;         /* requests travel on the link in one direction only, from the side that opened it */
    uint64_t cluster_digest; /* covers the tasks and addresses that it is configured with; 0: unknown */
};

static inline bool tl_identity_has_host(const struct tl_identity *identity)
{
    uint8_t bits = 0;
    for (unsigned i = 0; i < TL_HOST_BYTES; i++)
        bits |= identity->host[i];
    return bits != 0;
}

struct tl_request_id {
    uint64_t incarnation; /* the incarnation of the worker that asks */
    uint64_t number;      /* unique within it, starting at 1 */
};

/* Where the tensor of a put is ready to be fetched. */
struct tl_put_source {
    uint64_t incarnation; /* names the process that puts it */
    uint64_t number;      /* names it there; 0: it is not to be fetched */
};

/* The tensor that an owner gives for a request. */
struct tl_offer {
    struct tl_tensor *tensor;
    uint64_t step;
    uint64_t publication; /* identifies the value: another one under the same key has another number; never 0 */
    bool is_one_shot;     /* its receiver must acknowledge it */
    bool was_given_back;  /* an earlier receiver has had it and could not use it */
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

/* The memory that a transport prefers for destinations that it may choose. */
struct tl_allocator {
    /* Creates a tensor of this meta-data, with memory of the device or of the host to receive into. *ret_tensor is NULL
     * when memory of a device comes later: then the transport asks again for a place (tl_fetch_place), and gives the
     * tensor. Errors: TL_RESOURCE_EXHAUSTED. Thread: the transport's. */
    enum tl_status (*create)(void *context, struct tl_device device, const struct tl_meta_data *meta_data,
                             struct tl_tensor **ret_tensor, struct tl_error *ret_error);
    void *context;
};

struct tl_fetch_ops {
    /* Called when the meta-data is known: chooses the destination, with a reference for the caller. fetch->allocator
     * makes new memory if there is one, else tl_tensor_create_for. Called again when a value of other meta-data
     * replaces the one that was begun. *ret_destination is NULL when memory of a device is still being allocated: by
     * the allocator, or, where there is none, by the callee, which then calls fetch->placed. Errors: the fetch ends
     * with them. Thread: the transport's. */
    enum tl_status (*place)(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                            struct tl_tensor **ret_destination, struct tl_error *ret_error);
    /* Returns the only meta-data that `place` accepts; NULL: any will do, as where this is NULL. */
    const struct tl_meta_data *(*wanted)(const struct tl_fetch *fetch);
    bool
        makes_memory; /* `place` always makes new memory; else, when some meta-data is wanted, it gives the program's */
    /* Returns the number of the subscription that asks, within the incarnation; 0: none, as where this is NULL. */
    uint64_t (*subscription)(const struct tl_fetch *fetch);
    /* Called when the fetch is over, exactly once per start. TL_OK: all bytes are in the destination, checked as asked.
     * TL_UNAVAILABLE, unless is_final: the connection broke, and the fetch may be started again. The transport forgets
     * the fetch before it calls, so that the callee may start or free it. */
    void (*done)(struct tl_fetch *fetch, const struct tl_error *result);
};

/* A receive that waits has one, so that each field counts (tests/unit/operation_test.c). */
struct tl_fetch {
    const struct tl_fetch_ops *ops;
    uint64_t number; /* the request's, unique within the incarnation of the worker that asks, starting at 1 */
    const char *key;
    uint64_t step;
    uint32_t asked_order;  /* in which order a data connection has asked for a subscription's values, modulo 2^32; 0: it
                              has not asked for this one; atomic (tl_fetch_asked) */
    enum tl_path path : 8; /* how the bytes travelled; in done with TL_OK */
    uint8_t priority; /* at most TL_MAX_PRIORITY: of what is ready for one peer the owner sends the greater first */
    bool is_begun;    /* a value was given for it, and arrives; atomic (tl_fetch_begun) */
    bool wants_checksum : 1;
    bool is_for_device : 1; /* the destination lies on a device, or will */
    bool may_map : 1;       /* the destination may be a mapping, read-only; the caller then gives none of its own */
    bool is_verified : 1;   /* part of the progress */
    bool is_final : 1;      /* in done: the status is the owner's answer, whatever its code */
    bool is_rerouted : 1;  /* in done with TL_UNAVAILABLE or TL_RESOURCE_EXHAUSTED: the transport works but cannot carry
                          the fetch, for the reason in path_reason; another transport may take it */
    bool is_unsettled : 1; /* it was requested on a connection that broke, and no final answer has come since: the owner
                          may keep a value for it */

    /* The progress, which survives a broken connection. Zero before the first start. */
    struct tl_tensor *destination; /* one reference of the fetch; NULL until placed */
    union {
        struct tl_meta_data *unplaced; /* the value's, while its destination is awaited, and is NULL */
        void *hash_state; /* the state of XXH3 over received_bytes, when there is a destination; NULL unless
                             wants_checksum */
    };
    uint64_t publication;    /* the value that the bytes come from, 0: none yet */
    uint64_t offer_step;     /* its step */
    uint64_t received_bytes; /* so many bytes of the value, from its first, are in the destination */

    const char *path_reason; /* with TL_PATH_BOUNCE and TL_PATH_GPU_PROXY: why the bytes were copied on the way; with
                                TL_PATH_ZERO_COPY, when the tensor could have been mapped: why it was not; over a link:
                                why it is not carried by a data connection. NULL or "": there is none. Never freed
                                (base/reason.h) */

    union {
        const struct tl_allocator *allocator; /* the transport's, from start to done; NULL: none */
        const struct tl_error *result;        /* while the transport does not have the fetch, its caller's own */
    };
    /* The transport's, from start to done; NULL: its allocator takes care of devices. Called once after a `place` that
     * left the destination for later, unless the fetch has ended before. TL_OK: tl_fetch_place will find it; else the
     * transport ends the fetch with this status. Thread: the transport's. */
    void (*placed)(struct tl_fetch *fetch, const struct tl_error *status);
    struct tl_list transport_link; /* the transport's, from start to done */
    void *transport_state;
};

/* Returns the number of the subscription that asks; 0: none. */
static inline uint64_t tl_fetch_subscription(const struct tl_fetch *fetch)
{
    return fetch->ops->subscription != NULL ? fetch->ops->subscription(fetch) : 0;
}

/* Says that the owner has given a value for the fetch. Thread: the transport's. */
static inline void tl_fetch_begun(struct tl_fetch *fetch)
{
    __atomic_store_n(&fetch->is_begun, true, __ATOMIC_RELEASE);
}

/* Thread: any. */
static inline bool tl_fetch_is_begun(const struct tl_fetch *fetch)
{
    return __atomic_load_n(&fetch->is_begun, __ATOMIC_ACQUIRE);
}

/* Says that the owner knows of the fetch, and gives values to those first that it knew first. Thread: the transport's.
 */
static inline void tl_fetch_asked(struct tl_fetch *fetch, uint32_t order)
{
    __atomic_store_n(&fetch->asked_order, order, __ATOMIC_RELEASE);
}

/* Whether it was asked on a data connection before the other one was. Thread: any. */
static inline bool tl_fetch_was_asked_before(const struct tl_fetch *fetch, const struct tl_fetch *other)
{
    uint32_t order = __atomic_load_n(&fetch->asked_order, __ATOMIC_ACQUIRE);
    uint32_t other_order = __atomic_load_n(&other->asked_order, __ATOMIC_ACQUIRE);
    return order != 0 && other_order != 0 && order - other_order > UINT32_MAX / 2;
}

/* Initialises a fetch without destination and progress. */
void tl_fetch_init(struct tl_fetch *fetch, const struct tl_fetch_ops *ops);
/* Puts the destination and frees the hash state. */
void tl_fetch_fini(struct tl_fetch *fetch);
/* Returns the meta-data of the value that was begun; before that, meta-data of no value. Valid until the next call with
 * the fetch. */
const struct tl_meta_data *tl_fetch_meta_data(const struct tl_fetch *fetch);
/* Forgets the progress, for a transport that begins every value at its first byte. */
void tl_fetch_restart(struct tl_fetch *fetch);

/* The receiving half that all transports share. tl_fetch_begin is called when the owner has begun to send (or resumed)
 * a value: it places the value, or checks that it continues at exactly fetch->received_bytes. While the destination is
 * NULL after it, the transport takes no bytes of the value: it waits for the memory, and calls tl_fetch_place.
 * Errors: those of ops->place; TL_INVALID_ARGUMENT: impossible meta-data, or a resume at the wrong offset;
 * TL_RESOURCE_EXHAUSTED: no memory to remember the value while its destination is awaited. */
enum tl_status tl_fetch_begin(struct tl_fetch *fetch, const struct tl_meta_data *meta_data, uint64_t publication,
                              uint64_t offer_step, uint64_t offset, struct tl_error *ret_error) TL_MUST_USE;
/* Begins a value at its first byte, with meta-data that was validated when it came. Errors: those of ops->place. */
enum tl_status tl_fetch_start(struct tl_fetch *fetch, const struct tl_meta_data *meta_data, uint64_t publication,
                              uint64_t offer_step, struct tl_error *ret_error) TL_MUST_USE;
/* Gives the fetch the destination that `place` has left for later. Errors: those of ops->place. */
enum tl_status tl_fetch_place(struct tl_fetch *fetch, struct tl_error *ret_error) TL_MUST_USE;
/* Calls back with the places for the next len_bytes bytes, in order, to have them written there. The destination is on
 * the host. Errors: TL_OUT_OF_RANGE: more than was announced; nothing is called. */
enum tl_status tl_fetch_fill(struct tl_fetch *fetch, uint64_t len_bytes, tl_bytes_fn write, void *context,
                             struct tl_error *ret_error) TL_MUST_USE;
/* Counts len_bytes bytes that were written to the destination, and hashes them unless they lie on a device. */
void tl_fetch_advance(struct tl_fetch *fetch, uint64_t len_bytes);
/* Hashes the value again from its first byte, where the destination could not be hashed on the way. */
void tl_fetch_hash_again(struct tl_fetch *fetch);
/* Hashes the next bytes of the value, which were read back from a device. */
void tl_fetch_hash(struct tl_fetch *fetch, const void *data, uint64_t len_bytes);
/* Takes over the reference to a tensor that is the whole value without a transfer, in place of a destination that the
 * fetch may have. */
void tl_fetch_take(struct tl_fetch *fetch, struct tl_tensor *tensor, uint64_t offer_step);
/* Returns the destination, with the reference of the fetch, which has none then. In done with TL_OK. */
struct tl_tensor *tl_fetch_pass_destination(struct tl_fetch *fetch);
bool tl_fetch_is_complete(const struct tl_fetch *fetch);
/* Called when all bytes have arrived: verifies the checksum if one was wanted, and the strings of a string tensor.
 * Errors: TL_DATA_LOSS, naming the key: the checksum is missing or differs, or the strings are damaged. */
enum tl_status tl_fetch_verify(struct tl_fetch *fetch, bool has_checksum, uint64_t checksum,
                               struct tl_error *ret_error) TL_MUST_USE;

/* ------------------------------------------------------------------------------------------------------- serve -- */

struct tl_serve;

struct tl_serve_ops {
    /* Answers, once: with a status, or with TL_OK and an offer (the callee takes over offer->tensor's reference).
     * Thread: the transport's. */
    void (*reply)(struct tl_serve *serve, const struct tl_error *status, const struct tl_offer *offer);
};

/* A request that a transport has received. The transport owns it until it calls the source's `closed`. */
struct tl_serve {
    const struct tl_serve_ops *ops;
    struct tl_request_id id;
    const struct tl_identity *peer; /* valid as long as the serve */
    const char *key;                /* NUL-terminated, valid as long as the serve */
    uint64_t step;
    uint64_t subscription; /* number of the subscription that asks, within the incarnation of the id; 0: none */
    bool takes_devices;    /* the transport's: it sends tensors that lie on devices */
    bool takes_runs;       /* the transport's: it sends tensors without an address (tl_tensor_is_in_runs) */
    bool is_final;         /* a status in the reply is the answer, whatever its code; else the asker may ask again after
                              TL_UNAVAILABLE, and asks over the link after TL_UNIMPLEMENTED */
    void *source_state;    /* the source's */
    uint64_t order;        /* the source's: kept while the serve asks again */
};

/* How a serve ended. */
enum tl_serve_end {
    TL_SERVE_RECEIVED,  /* The asker has the whole tensor, or a status. */
    TL_SERVE_CANCELLED, /* The asker has given up and will not ask again. */
    TL_SERVE_BROKEN,    /* The asker cannot be reached and may come back with the same id. */
};

/* A key, of which no NUL need follow. */
struct tl_key_text {
    const char *text;
    size_t text_bytes;
};

/* The source in which transports find tensors, implemented by the worker. Thread: the transport's. */
struct tl_source_ops {
    /* A peer asks. The source answers by serve->ops->reply, now or later. */
    void (*request)(void *source, struct tl_serve *serve);
    /* Requests of these keys follow: brings what is known of them into the processor's caches, all at once, because one
     * after the other each would wait for memory several times. NULL: does nothing. */
    void (*prefetch)(void *source, const struct tl_key_text *keys, size_t count);
    /* The serve is over: called exactly once for each request, whether it was answered or not. The transport frees the
     * serve afterwards, or asks again with it. */
    void (*closed)(void *source, struct tl_serve *serve, enum tl_serve_end end);
    /* The asker reports (again) that it has received a tensor whose serve has ended. */
    void (*received)(void *source, const struct tl_request_id *id);
    /* The asker reports that it will never again ask for what it requested on another connection. */
    void (*given_up)(void *source, const struct tl_request_id *id);
};

#endif
