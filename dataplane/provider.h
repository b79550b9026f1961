// SPDX-License-Identifier: Apache-2.0
/*
 * A provider: one-sided operations between two workers, under the data-plane engine.
 *
 * Verbs, shared memory, and the scripted provider of the tests each fill a const table of functions; an operation that
 * a provider leaves out answers "not supported". The engine knows nothing of addresses, keys or cards:
 *
 *  region       memory that is known to the provider; operations read and write only there
 *  descriptor   names memory that a peer may write or read: the provider of the memory's owner makes it, the provider
 *               of the peer understands it, and to everything in between it is opaque bytes
 *  queue pair   an ordered, reliable connection to one peer. It carries control messages into slots that the peer has
 *               posted, and writes into memory that the peer has exposed
 *
 * Life of a queue pair: create -> get_address (bytes that travel over the control plane) -> connect with the peer's ->
 * posts and events -> disconnect, or a failure -> broken, then drained -> destroy. A fault of a card or a peer breaks
 * one queue pair and nothing else.
 *
 * Posts never fail for lack of space: a caller looks at `space` before it posts. Posted work leaves with `doorbell`, so
 * that several posts share one write to the card; it is over when its `done` is called: exactly once, in the order of
 * posting, with TL_OK, or with TL_CANCELLED when the queue pair broke first. Callbacks run inside `poll` only, and may
 * post, ring the doorbell and disconnect.
 *
 * Thread: the reactor that owns the provider, unless a function says otherwise.
 */
#ifndef DATAPLANE_PROVIDER_H
#define DATAPLANE_PROVIDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

#include "base/quota.h"

struct tl_device_allocation;
struct tl_device_memory;
struct tl_provider;
struct tl_mapped_file;
struct tl_queue_pair;
struct tl_region;

/* The outside_refusal of a queue pair whose peer knows the key of one region only. */
extern const char tl_outside_refused[];

#define TL_DESCRIPTOR_MAX_BYTES 48
#define TL_PAIR_ADDRESS_MAX_BYTES 192
/* A slot of this size holds any control message, or several. */
#define TL_SLOT_BYTES 8704
/* The most messages in one slot. */
#define TL_SLOT_MESSAGES 64

/* Names memory that a peer may write, or may read. It travels inside control messages. */
struct tl_descriptor {
    uint8_t len_bytes; /* 0: it names no memory */
    uint8_t bytes[TL_DESCRIPTOR_MAX_BYTES];
};

/* The data that a peer needs to connect. It travels over the control plane. */
struct tl_pair_address {
    uint32_t len_bytes;
    uint8_t bytes[TL_PAIR_ADDRESS_MAX_BYTES];
};

/* Embedded in the object that waits for a posted operation. */
#define TL_WORK_MAGIC UINT32_C(0x774b724f)
struct tl_work {
    uint32_t magic; /* TL_WORK_MAGIC */
    /* status is TL_OK, or TL_CANCELLED for flushed work, which may or may not have taken effect. */
    void (*done)(struct tl_work *work, enum tl_status status);
    struct tl_work *next; /* another object that waits for the same operation; NULL: none */
    /* Copies len_bytes bytes from offset_bytes on to this place. For a write without a source, and only where
     * is_processor_writing. */
    void (*fill)(struct tl_work *work, void *to, uint64_t offset_bytes, uint64_t len_bytes);
};

/* Called by a provider when the operation is over. work NULL: nothing waits for it. Returns how many objects did. */
static inline uint32_t tl_work_done(struct tl_work *work, enum tl_status status)
{
    uint32_t count = 0;
    for (; work != NULL; count++) {
        struct tl_work *next = work->next;
        work->done(work, status);
        work = next;
    }
    return count;
}

/* Memory of this process that one peer may write, or may read, from expose until revoke is done. Embedded in the
 * request that it serves. */
struct tl_exposure {
    struct tl_region *region; /* NULL: it lies in none */
    void *address;
    uint64_t len_bytes;
    struct tl_descriptor descriptor;
    void *provider_state; /* a memory window */
};

/* How much memory a peer can write to. */
enum tl_keys {
    TL_KEYS_WINDOW, /* the destination of a request, while the request runs */
    TL_KEYS_REGION, /* a region that was made for this peer */
};

enum tl_region_access {
    TL_REGION_READ,  /* a source only: may be read-only memory */
    TL_REGION_WRITE, /* source and destination; a peer reaches it through an exposure only */
};

struct tl_queue_pair_events {
    /* A control message has arrived. After the call its slot is posted again; data stays there until the peer, which
     * counts slots, uses that slot again, or the queue pair is destroyed. The peer may change data meanwhile (shared
     * memory): it is copied before it is checked. */
    void (*message)(void *owner, const void *data, uint32_t len_bytes);
    /* A write with an immediate has arrived, which wrote len_bytes; its slot is posted again. All earlier writes of the
     * peer on this queue pair are in memory. */
    void (*immediate)(void *owner, uint32_t immediate, uint64_t len_bytes);
    /* The queue pair has failed or was disconnected: nothing can be posted any more. Events that arrived before are
     * still delivered, until it is drained. Called once. TL_DEADLINE_EXCEEDED: the peer's card does not answer. */
    void (*broken)(void *owner, const struct tl_error *reason);
    /* Memory of a device that the peer has shown is given back, or was forgotten: it must not be mapped any longer than
     * what reads it lasts. NULL: nothing is mapped. */
    void (*memory_gone)(void *owner, uint64_t number);
    /* Every posted operation is done, and no window lets the peer write any more: the queue pair may be destroyed.
     * Called once, last. */
    void (*drained)(void *owner);
};

/* Memory of a device that the peer has shown, or a part of it. */
struct tl_peer_memory {
    uint64_t number;       /* names the allocation, and no other one of this peer */
    uint64_t len_bytes;    /* how long the allocation is */
    uint64_t offset_bytes; /* where the part begins */
};

struct tl_queue_pair_options {
    uint32_t slot_count; /* messages and immediates that may be under way to us */
    uint32_t work_count; /* operations that may be posted at a time; the provider adds what it needs itself */
    enum tl_keys keys;
};

/* Properties of a provider, fixed while it is open. */
struct tl_provider_limits {
    uint64_t max_write_bytes; /* the largest write */
    uint32_t max_queue_pairs;
    uint32_t max_pool_regions; /* the most that a pool may have at a time; 0: any number */
    bool has_windows;          /* TL_KEYS_WINDOW works */
    bool needs_regions;        /* sources, and what is exposed, must lie in a region */
    bool is_processor_writing; /* a processor of this host writes to exposed memory, not a card */
    int numa_node;             /* the card's; -1: none */
};

/* What lies between the two ends of a connected queue pair, for messages. */
struct tl_route {
    char own_address[64];
    char peer_address[64];
    uint32_t head_bytes; /* what a packet has besides its data, as interfaces count it for their MTU */
    const char *blocked; /* why nothing arrives, and the remedy, when the two ends work: "cause; remedy" */
};

struct tl_provider_ops {
    const char *name;     /* "verbs": its name in messages, and the transport of a path */
    const char *settings; /* "verbs": the object of the configuration that remedies refer to */

    void (*close)(struct tl_provider *provider); /* No queue pair and no region is left. */
    /* Opens the same device once more, for a probe beside the reactor that owns this one. NULL: it cannot. Thread: any.
     * Blocks. Errors: those of opening. */
    enum tl_status (*reopen)(const struct tl_provider *provider, struct tl_provider **ret_provider,
                             struct tl_error *ret_error);
    /* Handles events, of each queue pair as many as the quota allows. Returns how many there were. */
    unsigned (*poll)(struct tl_provider *provider);
    /* Makes `fd` readable once, as soon as there is something to poll. Returns false when there is already: poll again.
     */
    bool (*arm)(struct tl_provider *provider);
    /* Called after sleeping on fd. is_woken: fd was perhaps readable; false: it did not end the sleep, so that the
     * system call that looks at it can wait. */
    void (*disarm)(struct tl_provider *provider, bool is_woken);
    /* Sleeps on fd, between arm and disarm, and on `other` as well, at most until until_ns (TL_TIME_NEVER: without a
     * limit); may return earlier. Returns whether other is readable. `other` stays registered until another one is
     * named; -1: none, and no sleep. NULL: the caller sleeps with poll. */
    bool (*sleep)(struct tl_provider *provider, int other, int64_t until_ns);

    /* Makes memory known to the card. Blocks: pins the pages, which takes milliseconds per gigabyte and more. Thread:
     * any. Errors: TL_RESOURCE_EXHAUSTED: the limit of locked memory (the message contains the remedy) or the card's
     * table. TL_INVALID_ARGUMENT: not memory that can be registered. */
    enum tl_status (*region_create)(struct tl_provider *provider, void *address, uint64_t len_bytes,
                                    enum tl_region_access access, struct tl_region **ret_region,
                                    struct tl_error *ret_error);
    /* Makes an allocation of a device known to the card: by its dma-buf, else by its address. NULL: the provider
     * reaches no memory of devices. Thread: any. Blocks. Errors: TL_RESOURCE_EXHAUSTED as with region_create, or the
     * card's window to the device is full. TL_INVALID_ARGUMENT: it cannot be registered, and why. */
    enum tl_status (*region_create_on)(struct tl_provider *provider, const struct tl_device_allocation *allocation,
                                       enum tl_region_access access, struct tl_region **ret_region,
                                       struct tl_error *ret_error);
    /* Makes memory for a pool, as large as asked (a multiple of TL_PAGE_BYTES), and its region for writing, for a
     * provider whose peers reach only memory that it has made. The memory outlives the region, and is unmapped with
     * tl_pages_unmap. NULL: anonymous memory and region_create are used. Thread: any. Blocks. Errors:
     * TL_RESOURCE_EXHAUSTED. */
    enum tl_status (*region_map)(struct tl_provider *provider, uint64_t len_bytes, struct tl_region **ret_region,
                                 struct tl_error *ret_error);
    /* No posted operation and no exposure may name the region. Thread: any. */
    void (*region_destroy)(struct tl_region *region);

    /* Creates a queue pair. Errors: TL_RESOURCE_EXHAUSTED: the card has no more, or there is no memory.
     * TL_UNIMPLEMENTED: options.keys. */
    enum tl_status (*create)(struct tl_provider *provider, const struct tl_queue_pair_options *options,
                             const struct tl_queue_pair_events *events, void *owner, struct tl_queue_pair **ret_pair,
                             struct tl_error *ret_error);
    void (*get_address)(const struct tl_queue_pair *pair, struct tl_pair_address *ret_pair_address);
    /* Checks as much of an address as is possible without a queue pair. NULL: nothing is checked. Thread: any. Errors:
     * TL_INVALID_ARGUMENT, TL_FAILED_PRECONDITION: as with connect. */
    enum tl_status (*check)(const struct tl_provider *provider, const struct tl_pair_address *peer,
                            struct tl_error *ret_error);
    /* Connects with a peer; slots are posted before it returns. Errors: TL_INVALID_ARGUMENT: not an address.
     * TL_FAILED_PRECONDITION: an address that does not fit ours, and why. TL_UNAVAILABLE: the card refuses. */
    enum tl_status (*connect)(struct tl_queue_pair *pair, const struct tl_pair_address *peer,
                              struct tl_error *ret_error);
    /* Describes the network between the ends of a connected queue pair. NULL: there is none. */
    void (*describe_route)(const struct tl_queue_pair *pair, struct tl_route *ret_route);
    /* Disconnects: broken (with the reason) and drained follow from poll. Harmless when the queue pair is broken
     * already. */
    void (*disconnect)(struct tl_queue_pair *pair, const struct tl_error *reason);
    /* Called after drained, or when connect was never called or has failed. */
    void (*destroy)(struct tl_queue_pair *pair);

    /* Returns how many more operations may be posted now. message, write, read and revoke need one each; expose and
     * expose_source need one more. */
    uint32_t (*space)(const struct tl_queue_pair *pair);
    /* Returns memory of TL_SLOT_BYTES in which the next message may be composed, so that it need not be copied: it is
     * valid until a message, a write or a read is posted. The peer may read and change it, and it can be read until the
     * queue pair is drained. The operation, and what it returns, may be NULL: there is no such memory, or not now. */
    void *(*message_place)(struct tl_queue_pair *pair);
    /* Sends at most TL_SLOT_BYTES bytes of control messages; data is copied, unless it lies in the message_place. work
     * NULL: its end is not reported. */
    void (*message)(struct tl_queue_pair *pair, const void *data, uint32_t len_bytes, struct tl_work *work);
    /* Writes len_bytes (at most max_write_bytes) from source into the peer's exposed memory at offset_bytes, and then,
     * with has_immediate, notifies the peer. region is NULL when the provider needs none, or len_bytes is 0. Source is
     * read until work is done. */
    void (*write)(struct tl_queue_pair *pair, const struct tl_region *region, const void *source, uint64_t len_bytes,
                  const struct tl_descriptor *destination, uint64_t offset_bytes, bool has_immediate,
                  uint32_t immediate, struct tl_work *work);
    /* Lets the peer write address..len_bytes (not 0), which lie in region; fills exposure->descriptor. region may be
     * NULL where none is needed and outside_refusal is NULL. It takes effect before anything that is posted later.
     * Errors: TL_RESOURCE_EXHAUSTED: no window is left. */
    enum tl_status (*expose)(struct tl_queue_pair *pair, struct tl_region *region, void *address, uint64_t len_bytes,
                             struct tl_exposure *exposure, struct tl_error *ret_error);
    /* Returns whether a quarter of the queue pair's windows stays free when one more is exposed, after making more of
     * them if there are more: the peer decides how long windows are kept. NULL: exposures take none. */
    bool (*has_spare_window)(struct tl_queue_pair *pair);
    /* Reads len_bytes (1 to max_write_bytes) of the peer's exposed source, from offset_bytes on, into destination,
     * which lies in region. Destination is written until work is done. At most read_depth reads may be posted at a
     * time. NULL, as expose_source: the provider does not read. */
    void (*read)(struct tl_queue_pair *pair, const struct tl_region *region, void *destination, uint64_t len_bytes,
                 const struct tl_descriptor *source, uint64_t offset_bytes, struct tl_work *work);
    /* Does the same as expose, but the peer may read the memory, and write it only if is_writable. Only under
     * TL_KEYS_WINDOW. */
    enum tl_status (*expose_source)(struct tl_queue_pair *pair, struct tl_region *region, void *address,
                                    uint64_t len_bytes, bool is_writable, struct tl_exposure *exposure,
                                    struct tl_error *ret_error);
    /* Ends an exposure, once: when work is done (NULL: that is not reported), no write or read through the descriptor
     * can take effect. One of the peer that comes later breaks the queue pair. Under TL_KEYS_REGION the exposure is
     * only forgotten, which needs no space, and work is NULL. */
    void (*revoke)(struct tl_queue_pair *pair, struct tl_exposure *exposure, struct tl_work *work);
    /* Sends what was posted. */
    void (*doorbell)(struct tl_queue_pair *pair);

    /* Lets the peer map, for reading, a file that tensors of this process lie in: fills ret_descriptor, which a message
     * that is posted later may carry. The same file may be shared again and again; a file that was shared long ago may
     * be forgotten. Errors: those of tl_queue_pair_share. */
    enum tl_status (*share)(struct tl_queue_pair *pair, struct tl_mapped_file *file,
                            struct tl_descriptor *ret_descriptor, struct tl_error *ret_error);
    /* Maps the peer's file of this descriptor: one reference for the caller, which may outlive the queue pair. Errors:
     * those of tl_queue_pair_map. */
    enum tl_status (*map)(struct tl_queue_pair *pair, const struct tl_descriptor *descriptor,
                          struct tl_mapped_file **ret_file, struct tl_error *ret_error);

    /* Lets the peer import memory of a device that has a number (tensor/device.h), and fills ret_descriptor for what
     * begins at offset_bytes in it. file is an export of the memory, which stays the caller's; -1: the peer may have it
     * already. Memory that was shown long ago may be forgotten. NULL, as find_memory: the provider cannot do that.
     * Errors: TL_NOT_FOUND: file is -1, and the peer does not have it. TL_UNAVAILABLE: not now. TL_RESOURCE_EXHAUSTED.
     */
    enum tl_status (*show_memory)(struct tl_queue_pair *pair, struct tl_device_memory *memory, int file,
                                  uint64_t offset_bytes, struct tl_descriptor *ret_descriptor,
                                  struct tl_error *ret_error);
    /* Finds the peer's memory of this descriptor, of which len_bytes are to be read. With ret_file it also opens the
     * file to import, which is the caller's; the peer may have sent anything. Errors: TL_NOT_FOUND: the peer has not
     * shown it, or has given it back, or too many others since. TL_INVALID_ARGUMENT: not a descriptor, or beyond its
     * allocation. TL_RESOURCE_EXHAUSTED: no descriptor. */
    enum tl_status (*find_memory)(struct tl_queue_pair *pair, const struct tl_descriptor *descriptor,
                                  uint64_t len_bytes, struct tl_peer_memory *ret_memory, int *ret_file,
                                  struct tl_error *ret_error);
    /* Returns whether all peers have last run on the processor of this thread: none can answer while it polls. NULL:
     * that cannot be. */
    bool (*shares_processor)(struct tl_provider *provider);
};

/* The first member of every provider's own struct. */
struct tl_provider {
    const struct tl_provider_ops *ops;
    struct tl_provider_limits limits;
    int fd;                   /* to sleep on, after arm; -1: the provider cannot wake a sleeper */
    char name[64];            /* the device: "mlx5_0:1" */
    char reason[256];         /* why this device, port and GID were chosen */
    int64_t helper_until_ns;  /* a helper thread works on what is awaited, until about then: a thread that polls
                                 meanwhile yields to others, and sleeps afterwards; 0: none does */
    const char *read_failure; /* why a read of the probe has failed: neither this side nor a peer reads then; NULL: none
                                 has failed. Never freed (base/reason.h) */
    struct tl_error failure;  /* code TL_OK: it works; else it is broken for good, with the reason and the remedy. Owned
                                 by the reactor */
    struct tl_quota quota; /* for the messages, works and requests of one queue pair, in a poll and in what is deferred
                              for it. Messages and requests are counted by the owner of the queue pair */
};

/* The first member of every provider's own struct. */
struct tl_queue_pair {
    const struct tl_provider_ops *ops;
    struct tl_provider *provider;
    uint32_t mtu_bytes;          /* size of a packet, once connected; 0: there are no packets */
    uint32_t read_depth;         /* how many reads may be posted at a time, once connected; 0: none */
    const char *read_refusal;    /* why nothing can be read from the peer, once connected, where the provider reads and
                                    read_depth is 0. Static */
    const char *outside_refusal; /* why memory outside the pool that was made for the peer cannot be exposed; set when
                                    its first event comes; NULL: it can be. Static */
};

/* The first member of every provider's own struct. */
struct tl_region {
    struct tl_provider *provider;
    void *address;
    uint64_t len_bytes;
    enum tl_region_access access;
    bool is_on_device; /* no CPU may touch it */
};

/* How the engine calls the operations. One that the table leaves out (NULL) answers "not supported": TL_UNIMPLEMENTED,
 * no space, nothing to poll, nothing to do. Required are close, poll, create, get_address, connect, disconnect,
 * destroy, space, message and write; and revoke with expose. */
enum tl_status tl_region_create(struct tl_provider *provider, void *address, uint64_t len_bytes,
                                enum tl_region_access access, struct tl_region **ret_region,
                                struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_region_create_on(struct tl_provider *provider, const struct tl_device_allocation *allocation,
                                   enum tl_region_access access, struct tl_region **ret_region,
                                   struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_provider_reopen(const struct tl_provider *provider, struct tl_provider **ret_provider,
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
enum tl_status tl_queue_pair_expose_source(struct tl_queue_pair *pair, struct tl_region *region, void *address,
                                           uint64_t len_bytes, bool is_writable, struct tl_exposure *exposure,
                                           struct tl_error *ret_error) TL_MUST_USE;
/* Errors: TL_UNIMPLEMENTED: the provider cannot share files. TL_UNAVAILABLE: not now. TL_RESOURCE_EXHAUSTED: no memory
 * or descriptor. */
enum tl_status tl_queue_pair_share(struct tl_queue_pair *pair, struct tl_mapped_file *file,
                                   struct tl_descriptor *ret_descriptor, struct tl_error *ret_error) TL_MUST_USE;
/* Errors: TL_UNIMPLEMENTED: the provider cannot share files. TL_NOT_FOUND: the peer has not shared this file, or too
 * many others since. TL_DATA_LOSS: the file is no longer what it was when the peer mapped it. TL_INVALID_ARGUMENT: the
 * peer has shared something that cannot be mapped. TL_RESOURCE_EXHAUSTED: no memory or descriptor. */
enum tl_status tl_queue_pair_map(struct tl_queue_pair *pair, const struct tl_descriptor *descriptor,
                                 struct tl_mapped_file **ret_file, struct tl_error *ret_error) TL_MUST_USE;
/* Called by a provider when its device has failed as a whole: sets `failure` to the reason with the remedy, and logs
 * it, once. */
void tl_provider_fail(struct tl_provider *provider, const struct tl_error *reason);
bool tl_provider_arm(struct tl_provider *provider);
void tl_provider_disarm(struct tl_provider *provider, bool is_woken);
void *tl_queue_pair_message_place(struct tl_queue_pair *pair);
void tl_queue_pair_doorbell(struct tl_queue_pair *pair);
bool tl_queue_pair_has_spare_window(struct tl_queue_pair *pair);

#endif
