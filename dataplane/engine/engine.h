// SPDX-License-Identifier: Apache-2.0
/*
 * The data-plane engine: moves tensors between this worker and its peers by one-sided writes.
 *
 * The receiver sends a REQUEST that says where the bytes may be written, and which meta-data it has seen last under the
 * key. The owner writes the tensor straight from its memory into the receiver's, with the request's handle as the
 * immediate. When the meta-data has changed, the owner says so first (META_DATA_UPDATE), and the receiver asks again
 * with memory that fits (RE_REQUEST). A receiver with options.is_reading says that it reads: the owner then shows its
 * memory (SOURCE), and the receiver reads the bytes and releases the source (docs/gdr.md). All messages are in
 * dataplane/engine/message.h and docs/protocol.md.
 *
 * An engine belongs to one reactor and one provider. A connection is one queue pair with one peer. It does for the
 * worker what a link of the control plane does: fetches and serves (tensor/transfer.h), and an end that gives all of
 * them back.
 *
 * Thread: the reactor's owner, unless a function says otherwise. No callback runs inside a call to these functions.
 */
#ifndef DATAPLANE_ENGINE_ENGINE_H
#define DATAPLANE_ENGINE_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "dataplane/memory/memory.h"
#include "dataplane/memory/peer_memories.h"
#include "dataplane/reactor.h"
#include "tensor/transfer.h"

struct tl_engine;
struct tl_conn;

/* The largest value that travels inside of a message: two of them share a slot. Larger ones take less time when they
 * are written. */
#define TL_INLINE_BYTES 4096
/* The largest one whose destination the receiver's library chooses. A larger one is written there, which saves a copy.
 */
#define TL_INLINE_LIBRARY_BYTES 2560

/* How many keys of a peer have numbers: a few hundred bytes each, on both sides, of those that are asked for. */
#define TL_MAX_KEYS 32768

struct tl_engine_options {
    enum tl_keys keys;
    uint32_t slot_count;    /* how many messages and immediates of one peer may be under way to us; 16..4096 */
    uint32_t inline_bytes;  /* values of at most so many bytes come to us inside of messages; at most TL_INLINE_BYTES */
    uint32_t work_count;    /* how many operations may be posted to one peer at a time; at least 16 */
    uint32_t request_count; /* how many requests of one peer may be open at a time, at most 2^20 - 1; the peer's others
                               wait. The source refuses some rather than let all that are open wait for their values */
    uint32_t key_count;     /* how many keys of a peer have numbers; those of clients have fewer */
    uint64_t piece_bytes;   /* the most that one write carries; 0, or more than the provider's limit: that limit */
    struct tl_memory_options peer_memory; /* under TL_KEYS_REGION each peer has a pool of its own to write into */
    uint64_t register_bytes; /* users' allocations of at least so many bytes are registered; tensors in smaller ones are
                                copied through the pool. Where nothing need be registered: tensors of so many bytes */
    uint64_t copy_bytes; /* where nothing need be registered, received tensors are copied through the pool while half
                            of it is free, each through at most so many bytes; 0: none are */
    bool is_mapping_allowed;  /* peers that ask for it may map the files that published tensors lie in */
    bool is_bounce_forced;    /* everything is copied through the pool, on both sides */
    bool is_gpu_proxy_forced; /* no card and no other process accesses the memory of this process's devices */
    bool is_reading;          /* what is received is read from the memory of its owner, where both sides can do that */
    int64_t peer_timeout_ns; /* a peer from which nothing comes for so long while something is expected of it is dead */
    int64_t connect_ns;      /* how long a connection may take until it is up */
    int64_t cancel_ns;       /* how long a peer may take to answer a CANCEL, from when it is posted */
    int64_t parked_ns; /* how long a peer may take to say where a value goes, after META_DATA_UPDATE, and to release
                          a SOURCE (response_source.c says how much longer) */
};

/* Counters of all connections since the engine was created. */
struct tl_engine_stats {
    uint64_t tensors_sent;
    uint64_t tensors_received;
    uint64_t tensors_mapped; /* how many of the received tensors were mapped, so that no byte of them has moved */
    uint64_t bytes_sent;     /* by writes, and read by peers */
    uint64_t bytes_received; /* by writes of peers, and by reads */
    uint64_t bytes_bounced;  /* copied by the CPU through the pool, by the sender or by the receiver */
    uint64_t messages_sent;
    uint64_t messages_received;
    uint64_t slots_sent; /* posts of messages, each of which may carry several; a write with an immediate is none */
    uint64_t slots_received;
    uint64_t writes_posted;
    uint64_t reads_posted;
    uint64_t sources_shown;     /* SOURCE messages sent */
    uint64_t memory_imported;   /* memory of devices of peers */
    uint64_t memory_copied;     /* received tensors that were copied out of such memory */
    uint64_t meta_data_updates; /* received */
    uint64_t credits_sent;      /* messages that carry nothing but credits, and answers to pings */
    uint64_t rerouted;          /* fetches that were turned away */
    uint64_t late_answers;      /* answers that came when their request was over */
    uint64_t protocol_errors;
    uint64_t connections_broken; /* broken by a peer or a card, not closed by us */
};

/* Creates an engine whose source answers the requests of peers; its functions are called on the reactor's thread. All
 * arguments stay the caller's and outlive the engine; memory belongs to the reactor's provider. Errors:
 * TL_RESOURCE_EXHAUSTED: no memory or no thread. */
enum tl_status tl_engine_create(struct tl_reactor *reactor, struct tl_memory *memory,
                                const struct tl_engine_options *options, const struct tl_source_ops *source,
                                void *source_context, struct tl_engine **ret_engine,
                                struct tl_error *ret_error) TL_MUST_USE;
/* No connection may be left. NULL is accepted. */
void tl_engine_destroy(struct tl_engine *engine);
void tl_engine_get_stats(const struct tl_engine *engine, struct tl_engine_stats *ret_stats);
/* The sum over the engine's memory and that of its peers. Thread: any. */
void tl_engine_get_memory_stats(const struct tl_engine *engine, struct tl_memory_stats *ret_stats);

/* ------------------------------------------------------------------------------------------------- connections -- */

struct tl_conn_events {
    /* A write in each direction has been verified. */
    void (*up)(struct tl_conn *conn);
    /* The connection ends; called exactly once. It is freed when the callback returns. All its fetches and serves have
     * ended, and no operation can touch their memory any more. Errors: TL_UNAVAILABLE: the peer or the card failed.
     * TL_DEADLINE_EXCEEDED: not up in time. TL_FAILED_PRECONDITION: the two sides do not fit. TL_OK: closed by either
     * side. */
    void (*closed)(struct tl_conn *conn, const struct tl_error *reason);
};

/* The most bytes of a connection's address, which a peer gets over the control plane. */
#define TL_CONN_ADDRESS_BYTES 256

/* Makes the memory that a connection is created with. The closure follows exactly once; its memory is passed to
 * tl_conn_create. Without TL_KEYS_REGION a connection needs none, and the closure comes at once with NULL. Errors, in
 * the closure: TL_RESOURCE_EXHAUSTED: those of tl_memory_create. Thread: any. */
void tl_engine_make_memory(struct tl_engine *engine, struct tl_memory_making *making);

/* Checks the bytes that a peer's tl_conn_get_address wrote, as far as that is possible without a connection. Errors:
 * TL_INVALID_ARGUMENT: not an address. TL_FAILED_PRECONDITION: another version, another incarnation, or another host
 * where that matters. Thread: any. */
enum tl_status tl_conn_check_address(const struct tl_provider *provider, const struct tl_identity *peer,
                                     const uint8_t *bytes, uint32_t len_bytes, struct tl_error *ret_error) TL_MUST_USE;

/* Creates a connection and its queue pair. memory comes from tl_engine_make_memory, and is taken over, also on error.
 * peer names the peer in messages and is passed to the source; only an address of its incarnation is accepted. Exactly
 * one of the two sides is the opener: it sends HELLO first, and must connect after the other side has connected.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory, or the card has no more queue pairs. TL_UNIMPLEMENTED: options.keys. */
enum tl_status tl_conn_create(struct tl_engine *engine, struct tl_memory *memory, const struct tl_identity *peer,
                              uint64_t self_incarnation, bool is_opener, const struct tl_conn_events *events,
                              void *owner, struct tl_conn **ret_conn, struct tl_error *ret_error) TL_MUST_USE;
/* Writes at most TL_CONN_ADDRESS_BYTES bytes. Returns how many. */
uint32_t tl_conn_get_address(const struct tl_conn *conn, uint8_t *ret_bytes);
/* Connects with the bytes that the peer's tl_conn_get_address wrote; up or closed follows. On error neither follows,
 * and the caller closes the connection with tl_conn_close. Errors: TL_INVALID_ARGUMENT: not an address.
 * TL_FAILED_PRECONDITION: another version, another incarnation, or parameters that do not fit. TL_UNAVAILABLE: the card
 * refuses, or the connection has ended already. */
enum tl_status tl_conn_connect(struct tl_conn *conn, const uint8_t *bytes, uint32_t len_bytes,
                               struct tl_error *ret_error) TL_MUST_USE;

void *tl_conn_owner(const struct tl_conn *conn);

/* How fast the connection is, measured during the handshake by a few writes, how it reaches memory, and how many
 * answers it holds. */
struct tl_conn_measures {
    uint64_t latency_ns;         /* there and back, of the fastest of some small writes */
    uint64_t bytes_per_second;   /* large writes, from the posting of the first to the acknowledgement of the last */
    uint32_t mtu_bytes;          /* in one packet, as the two sides have agreed; 0: not known */
    const char *outside_refusal; /* why memory outside of a pool is copied once more; NULL: it is not. Never freed */
    uint32_t most_unconfirmed;   /* answers of the peer that have come and whose arrival it may not know of */
};
/* The connection must be up. */
const struct tl_conn_measures *tl_conn_measured(const struct tl_conn *conn);
bool tl_conn_is_up(const struct tl_conn *conn);

/* Asks for the tensor of the fetch; fetch->ops->done follows exactly once. The connection must be up. Progress that the
 * fetch has made elsewhere is dropped. fetch->allocator is set while the engine has the fetch. */
void tl_conn_fetch(struct tl_conn *conn, struct tl_fetch *fetch);
/* Gives the fetch up. done follows once no write of the peer can land in the destination any more: with TL_OK when the
 * tensor has arrived meanwhile, with TL_RESOURCE_EXHAUSTED when the fetch was waiting for memory of the pool, else
 * with TL_CANCELLED. */
void tl_conn_cancel(struct tl_conn *conn, struct tl_fetch *fetch);

/* Closes the connection once it is idle. New requests of the peer are refused with TL_UNAVAILABLE meanwhile. */
void tl_conn_drain(struct tl_conn *conn);
/* Closes the connection now, for this reason; closed follows. */
void tl_conn_close(struct tl_conn *conn, const struct tl_error *reason);

#endif
