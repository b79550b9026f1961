// SPDX-License-Identifier: Apache-2.0
/*
 * A provider: one-sided operations between two workers, under the data-plane engine.
 *
 * Verbs, shared memory, and the scripted one of the tests each fill a const table of functions; what a provider leaves
 * out answers "not supported". The engine knows nothing of addresses, keys or cards:
 *
 *   region       memory that was made known to the provider; operations read and write only there
 *   descriptor   where a peer may write: made by the provider of the memory's owner, read by that of the writer,
 *                opaque bytes in between
 *   queue pair   an ordered, reliable connection to one peer. It carries control messages into slots that the peer has
 *                posted, and writes into memory that the peer has exposed
 *
 * Life of a queue pair: create -> introduce (bytes that travel over the control plane) -> connect with the peer's ->
 * posts and events -> break -> broken, then drained -> destroy. What a card or a peer does wrong breaks one queue pair
 * and nothing else.
 *
 * Posts never fail for room: who posts has looked at `room` before. Posted work leaves with `ring`, so that several
 * posts share one doorbell; it is over when its `done` is called: exactly once, in the order of posting, with TL_OK, or
 * with TL_CANCELLED when the queue pair broke first. Callbacks run inside `poll` only, and may post, ring and break.
 *
 * Thread: the reactor that owns the provider, unless a function says otherwise.
 */
#ifndef DATAPLANE_PROVIDER_H
#define DATAPLANE_PROVIDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

struct tl_provider;
struct tl_mapped_file;
struct tl_queue_pair;
struct tl_region;

/* The outside_refusal of a queue pair whose peer knows the key of a region and no other. */
extern const char tl_outside_refused[];

#define TL_DESCRIPTOR_MAX_BYTES 48
#define TL_PAIR_ADDRESS_MAX_BYTES 192
/* Slots of this size hold every control message. */
#define TL_SLOT_BYTES 1152

/* Where a peer may write. Travels inside control messages. */
struct tl_descriptor {
    uint8_t len_bytes; /* 0: nowhere */
    uint8_t bytes[TL_DESCRIPTOR_MAX_BYTES];
};

/* What a peer must know to connect. Travels over the control plane. */
struct tl_pair_address {
    uint32_t len_bytes;
    uint8_t bytes[TL_PAIR_ADDRESS_MAX_BYTES];
};

/* Embedded in whatever waits for a posted operation. */
#define TL_WORK_MAGIC UINT32_C(0x774b724f)
struct tl_work {
    uint32_t magic; /* TL_WORK_MAGIC */
    /* status: TL_OK, or TL_CANCELLED: flushed, nothing may be said about whether it happened. */
    void (*done)(struct tl_work *work, enum tl_status status);
};

/* Memory of ours that one peer may write, from expose until revoke is done. Embedded in the request it serves. */
struct tl_exposure {
    struct tl_region *region; /* NULL: it lies in none */
    void *address;
    uint64_t len_bytes;
    struct tl_descriptor descriptor;
    void *provider_state; /* a memory window */
};

/* How narrow the memory is that a peer can write to. */
enum tl_keys {
    TL_KEYS_WINDOW, /* the destination of a request, while it runs */
    TL_KEYS_REGION, /* a region that was made for this peer */
};

enum tl_region_access {
    TL_REGION_READ,  /* a source only: may be read-only memory */
    TL_REGION_WRITE, /* source and destination; a peer reaches it through an exposure only */
};

struct tl_queue_pair_events {
    /* A control message has arrived; data is valid during the call, after which its slot is posted again. The peer may
     * change data meanwhile (shared memory): it is copied before it is checked. */
    void (*message)(void *owner, const void *data, uint32_t len_bytes);
    /* A write with an immediate has arrived, which wrote len_bytes; its slot is posted again. All earlier writes of the
     * peer on this queue pair are in memory. */
    void (*immediate)(void *owner, uint32_t immediate, uint64_t len_bytes);
    /* The queue pair has failed, or was broken by us: nothing can be posted any more. What had arrived before, and so
     * was done for the peer, comes still, until it is drained. Once. */
    void (*broken)(void *owner, const struct tl_error *reason);
    /* Every posted operation is done, no window lets the peer write any more: it may be destroyed. Once, last. */
    void (*drained)(void *owner);
};

struct tl_queue_pair_options {
    uint32_t slot_count; /* messages and immediates that may be under way to us */
    uint32_t work_count; /* operations that may be posted at a time; the provider adds what it needs itself */
    enum tl_keys keys;
    uint64_t peer; /* a number of the peer's name, under which what it leaves behind is counted; 0: nobody is known */
};

/* What a provider is like; fixed while it is open. */
struct tl_provider_limits {
    uint64_t max_write_bytes; /* of one write */
    uint32_t max_queue_pairs;
    uint32_t max_pool_regions; /* that a pool may have at a time; 0: any number */
    bool has_windows;          /* TL_KEYS_WINDOW works */
    bool needs_regions;        /* sources, and what is exposed, must lie in a region */
    int numa_node;             /* of the card; -1: none */
};

struct tl_provider_ops {
    const char *name;     /* "verbs": in messages, and as a path's transport */
    const char *settings; /* "verbs": the object of the configuration that remedies name */

    void (*close)(struct tl_provider *provider); /* no queue pair and no region is left */
    /* Handles what has happened, at most a batch of it; returns how many events there were. */
    unsigned (*poll)(struct tl_provider *provider);
    /* Makes `fd` readable as soon as there is something to poll, once. False: there is already; poll again. */
    bool (*arm)(struct tl_provider *provider);
    /* After sleeping on fd. */
    void (*disarm)(struct tl_provider *provider);
    /* Sleeps on fd, between arm and disarm, and on `other` as well, at most for timeout_ns (TL_TIME_NEVER: as long as
     * it takes); true: other is readable. `other` stays known until another one is named; -1: none, and no sleep. NULL:
     * whoever sleeps does it with poll. */
    bool (*sleep)(struct tl_provider *provider, int other, int64_t timeout_ns);

    /* Makes memory known. Blocks: pins the pages, milliseconds per gigabyte and more. Thread: any.
     * Errors: TL_RESOURCE_EXHAUSTED: the limit of locked memory (the message tells the remedy) or the card's table.
     * TL_INVALID_ARGUMENT: not memory that can be registered. */
    enum tl_status (*region_create)(struct tl_provider *provider, void *address, uint64_t len_bytes,
                                    enum tl_region_access access, struct tl_region **ret_region,
                                    struct tl_error *ret_error);
    /* Makes memory for a pool, as large as asked (a multiple of TL_PAGE_BYTES), and its region for writing: for a
     * provider whose peers reach only what it has made. What is mapped outlives the region, and is unmapped with
     * tl_pages_unmap. NULL: anonymous memory and region_create. Thread: any. Blocks. Errors: TL_RESOURCE_EXHAUSTED. */
    enum tl_status (*region_map)(struct tl_provider *provider, uint64_t len_bytes, struct tl_region **ret_region,
                                 struct tl_error *ret_error);
    /* No posted operation and no exposure names it. Thread: any. */
    void (*region_destroy)(struct tl_region *region);

    /* Errors: TL_RESOURCE_EXHAUSTED: the card has no more, or no memory. TL_UNIMPLEMENTED: options.keys. */
    enum tl_status (*create)(struct tl_provider *provider, const struct tl_queue_pair_options *options,
                             const struct tl_queue_pair_events *events, void *owner, struct tl_queue_pair **ret_pair,
                             struct tl_error *ret_error);
    void (*get_address)(const struct tl_queue_pair *pair, struct tl_pair_address *ret_pair_address);
    /* Checks what can be checked of an address without a queue pair. NULL: nothing. Thread: any.
     * Errors: TL_INVALID_ARGUMENT, TL_FAILED_PRECONDITION: those of connect. */
    enum tl_status (*check)(const struct tl_provider *provider, const struct tl_pair_address *peer,
                            struct tl_error *ret_error);
    /* Slots are posted before this returns. Errors: TL_INVALID_ARGUMENT: not an address.
     * TL_FAILED_PRECONDITION: one that does not fit ours, and why. TL_UNAVAILABLE: the card refuses. */
    enum tl_status (*connect)(struct tl_queue_pair *pair, const struct tl_pair_address *peer,
                              struct tl_error *ret_error);
    /* Begins the end: broken (with the reason) and drained follow from poll. Harmless when it is broken already. */
    void (*disconnect)(struct tl_queue_pair *pair, const struct tl_error *reason);
    /* After drained, or when connect was never called, or has failed. */
    void (*destroy)(struct tl_queue_pair *pair);

    /* How many more operations may be posted now. message, write and revoke need one each; expose one more. */
    uint32_t (*space)(const struct tl_queue_pair *pair);
    /* Sends a control message of at most TL_SLOT_BYTES; data is copied. work NULL: nobody waits. */
    void (*message)(struct tl_queue_pair *pair, const void *data, uint32_t len_bytes, struct tl_work *work);
    /* Writes len_bytes (at most max_write_bytes) from source into the peer's exposed memory at offset_bytes, and then,
     * with has_immediate, tells the peer. region NULL when the provider needs none, or len_bytes is 0. Source is read
     * until work is done. */
    void (*write)(struct tl_queue_pair *pair, const struct tl_region *region, const void *source, uint64_t len_bytes,
                  const struct tl_descriptor *destination, uint64_t offset_bytes, bool has_immediate,
                  uint32_t immediate, struct tl_work *work);
    /* Lets the peer write address..len_bytes (not 0), which lie in region; fills exposure->descriptor. region may be
     * NULL where none is needed and outside_refusal is NULL. Takes effect before anything posted later.
     * Errors: TL_RESOURCE_EXHAUSTED: no window left. */
    enum tl_status (*expose)(struct tl_queue_pair *pair, struct tl_region *region, void *address, uint64_t len_bytes,
                             struct tl_exposure *exposure, struct tl_error *ret_error);
    /* Ends it, once: when work is done (NULL: nobody waits), no write through the descriptor can land. A write of the
     * peer that comes later breaks the queue pair. Under TL_KEYS_REGION there is nothing to end: the exposure is
     * forgotten, which needs no room, and work is NULL. */
    void (*revoke)(struct tl_queue_pair *pair, struct tl_exposure *exposure, struct tl_work *work);
    /* What was posted leaves now. */
    void (*doorbell)(struct tl_queue_pair *pair);

    /* Lets the peer map a file that tensors of ours lie in, for reading: fills ret_descriptor, which a message that is
     * posted later may carry to it. The same file may be shared again and again; what was shared long ago may be
     * forgotten. Errors: those of tl_queue_pair_share. */
    enum tl_status (*share)(struct tl_queue_pair *pair, struct tl_mapped_file *file,
                            struct tl_descriptor *ret_descriptor, struct tl_error *ret_error);
    /* The peer's file of this descriptor, mapped: one reference for the caller, who may keep it longer than the queue
     * pair. Errors: those of tl_queue_pair_map. */
    enum tl_status (*map)(struct tl_queue_pair *pair, const struct tl_descriptor *descriptor,
                          struct tl_mapped_file **ret_file, struct tl_error *ret_error);
};

/* The first member of every provider's own struct. */
struct tl_provider {
    const struct tl_provider_ops *ops;
    struct tl_provider_limits limits;
    int fd;                  /* to sleep on, after arm; -1: never sleeps */
    char name[64];           /* of the device: "mlx5_0:1" */
    char reason[256];        /* why this device, port and GID */
    int64_t helper_until_ns; /* a helper thread does what is awaited, until about then: who polls meanwhile gives way to
                                other threads, and sleeps afterwards; 0: there is none */
    struct tl_error failure; /* code TL_OK: it works. Else it is broken for good: why, and what to do. The reactor's */
};

/* The first member of every provider's own struct. */
struct tl_queue_pair {
    const struct tl_provider_ops *ops;
    struct tl_provider *provider;
    uint32_t mtu_bytes;          /* of a packet, once it is connected; 0: there are no packets */
    const char *outside_refusal; /* why memory outside of the pool that was made for the peer cannot be exposed; set
                                    when its first event comes; NULL: it can. Lives for ever */
};

/* The first member of every provider's own struct. */
struct tl_region {
    struct tl_provider *provider;
    void *address;
    uint64_t len_bytes;
    enum tl_region_access access;
};

/* How the engine calls them: an operation that the table leaves out (NULL) answers "not supported" - TL_UNIMPLEMENTED,
 * no room, nothing to poll, nothing to do. Required: close, poll, create, introduce, connect, disconnect, destroy,
 * room, message and write; and revoke with expose. */
enum tl_status tl_region_create(struct tl_provider *provider, void *address, uint64_t len_bytes,
                                enum tl_region_access access, struct tl_region **ret_region,
                                struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_region_map(struct tl_provider *provider, uint64_t len_bytes, struct tl_region **ret_region,
                             struct tl_error *ret_error) TL_MUST_USE;
void tl_region_destroy(struct tl_region *region); /* NULL is accepted */
enum tl_status tl_queue_pair_create(struct tl_provider *provider, const struct tl_queue_pair_options *options,
                                    const struct tl_queue_pair_events *events, void *owner,
                                    struct tl_queue_pair **ret_pair, struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_queue_pair_expose(struct tl_queue_pair *pair, struct tl_region *region, void *address,
                                    uint64_t len_bytes, struct tl_exposure *exposure,
                                    struct tl_error *ret_error) TL_MUST_USE;
/* Errors: TL_UNIMPLEMENTED: the provider has no such thing. TL_UNAVAILABLE: not now. TL_RESOURCE_EXHAUSTED: no memory
 * or descriptor. */
enum tl_status tl_queue_pair_share(struct tl_queue_pair *pair, struct tl_mapped_file *file,
                                   struct tl_descriptor *ret_descriptor, struct tl_error *ret_error) TL_MUST_USE;
/* Errors: TL_UNIMPLEMENTED: the provider has no such thing. TL_NOT_FOUND: the peer has shared no such file, or too many
 * since. TL_DATA_LOSS: the file is not any more what it was when the peer mapped it. TL_INVALID_ARGUMENT: what the peer
 * has shared is no file that can be mapped. TL_RESOURCE_EXHAUSTED: no memory or descriptor. */
enum tl_status tl_queue_pair_map(struct tl_queue_pair *pair, const struct tl_descriptor *descriptor,
                                 struct tl_mapped_file **ret_file, struct tl_error *ret_error) TL_MUST_USE;
/* Called by a provider when its device has failed as a whole: sets `failure` to the reason with the remedy, and logs
 * it, once. */
void tl_provider_fail(struct tl_provider *provider, const struct tl_error *reason);
bool tl_provider_arm(struct tl_provider *provider);
void tl_provider_disarm(struct tl_provider *provider);
void tl_queue_pair_doorbell(struct tl_queue_pair *pair);

#endif
