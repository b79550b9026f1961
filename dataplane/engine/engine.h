// SPDX-License-Identifier: Apache-2.0
/*
 * The data-plane engine: moves tensors between this worker and its peers by one-sided writes.
 *
 * The receiver sends a REQUEST that carries where the bytes may be written and the meta-data it has seen last under the
 * key; the owner writes the tensor straight from its memory into the receiver's, with the request's handle as the
 * immediate. When the meta-data has changed the owner says so first (META_DATA_UPDATE) and the receiver asks again with
 * memory that fits (RE_REQUEST). Everything else is told in control messages (dataplane/engine/message.h,
 * docs/protocol.md).
 *
 * An engine belongs to one reactor and one provider. A connection is one queue pair with one peer: a path. It does the
 * same for the worker above as a link of the control plane: fetches and serves (tensor/transfer.h), and an end that
 * gives all of them back.
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

struct tl_engine_options {
    enum tl_keys keys;
    uint32_t slot_count;    /* messages and immediates under way to us from one peer; 16..4096 */
    uint32_t work_count;    /* operations posted to one peer at a time; at least 16 */
    uint32_t request_count; /* open requests to one peer, and from it, at a time: at most 65535; others wait */
    uint32_t cache_count;   /* keys whose meta-data is remembered, per peer */
    uint64_t piece_bytes;   /* of one write; the provider's limit if that is smaller; 0: that */
    struct tl_memory_options peer_memory; /* under TL_KEYS_REGION each peer has a pool of its own to write into */
    uint64_t register_bytes; /* users' allocations of at least so many bytes are registered; tensors in smaller ones are
                                copied through the pool. Where nothing need be registered: tensors of so many bytes */
    bool is_mapping_allowed; /* peers that ask for it may map the files that published tensors lie in */
    bool is_bounce_forced;   /* everything is copied through the pool, on both sides */
    int64_t peer_timeout_ns; /* a peer from which nothing has come for so long while something is expected is dead */
    int64_t connect_ns;      /* from connect until up */
    int64_t cancel_ns;       /* for the peer to answer a cancel */
    int64_t reroute_ns;      /* when all request_count are open and nothing comes for any of them for so long, fetches
                                  that wait for one are turned away; 0: they wait */
    int64_t parked_ns;       /* for the peer to say where a value goes, once it was told of other meta-data */
};

/* Counters of all connections since create. */
struct tl_engine_stats {
    uint64_t tensors_sent;
    uint64_t tensors_received;
    uint64_t tensors_mapped; /* of those received: no byte of them has moved */
    uint64_t bytes_sent;     /* by writes */
    uint64_t bytes_received; /* by writes */
    uint64_t bytes_bounced;  /* copied by the CPU, on the way out or in */
    uint64_t messages_sent;
    uint64_t messages_received;
    uint64_t writes_posted;
    uint64_t meta_data_updates; /* received */
    uint64_t credits_sent;      /* messages that carry nothing but credits, and answers to pings */
    uint64_t rerouted;          /* fetches that found no place */
    uint64_t late_answers;      /* for requests that were over; dropped */
    uint64_t protocol_errors;
    uint64_t connections_broken; /* by a peer or a card, not by us */
};

/* The source answers the peers' requests; its functions are called on the reactor's thread. What is passed in stays the
 * caller's and outlives the engine. memory belongs to the reactor's provider. Errors: TL_RESOURCE_EXHAUSTED: no memory
 * or no thread. */
enum tl_status tl_engine_create(struct tl_reactor *reactor, struct tl_memory *memory,
                                const struct tl_engine_options *options, const struct tl_source_ops *source,
                                void *source_context, struct tl_engine **ret_engine,
                                struct tl_error *ret_error) TL_MUST_USE;
/* No connection is left. NULL is accepted. */
void tl_engine_destroy(struct tl_engine *engine);
void tl_engine_get_stats(const struct tl_engine *engine, struct tl_engine_stats *ret_stats);
/* Of its memory and those of its peers together. Thread: any. */
void tl_engine_get_memory_stats(const struct tl_engine *engine, struct tl_memory_stats *ret_stats);

/* ------------------------------------------------------------------------------------------------- connections -- */

struct tl_conn_events {
    /* A write in both directions has been verified. */
    void (*up)(struct tl_conn *conn);
    /* The end, exactly once; the connection is freed when it returns. All its fetches and serves have been ended, and
     * no operation can touch their memory any more. Errors: TL_UNAVAILABLE: the peer or the card failed.
     * TL_DEADLINE_EXCEEDED: not up in time. TL_FAILED_PRECONDITION: the two do not fit. TL_OK: closed by either side.
     */
    void (*closed)(struct tl_conn *conn, const struct tl_error *reason);
};

/* Bytes with which a connection is introduced to its peer, over the control plane. */
#define TL_CONN_ADDRESS_BYTES 256

/* Makes the memory that a connection is created with; the closure follows exactly once. Without TL_KEYS_REGION none is
 * needed, and it comes at once with NULL. What has come is passed to tl_conn_create. Errors, in the closure:
 * TL_RESOURCE_EXHAUSTED: those of tl_memory_create. Thread: any. */
void tl_engine_make_memory(struct tl_engine *engine, struct tl_memory_making *making);

/* Checks what a peer's tl_conn_get_address wrote, as far as that is possible without a connection. Errors:
 * TL_INVALID_ARGUMENT: not an address. TL_FAILED_PRECONDITION: another version, another incarnation, or another
 * host where that matters. Thread: any. */
enum tl_status tl_conn_check_address(const struct tl_provider *provider, const struct tl_identity *peer,
                                     const uint8_t *bytes, uint32_t len_bytes, struct tl_error *ret_error) TL_MUST_USE;

/* Creates a connection and its queue pair. memory is from tl_engine_make_memory and taken over, also on error. peer
 * names the peer in messages and is handed to the source; its incarnation is the one whose address will be
 * accepted. Exactly one of the two sides is the opener: it says hello first, and must connect after the other has.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory, or the card has no more. TL_UNIMPLEMENTED: options.keys. */
enum tl_status tl_conn_create(struct tl_engine *engine, struct tl_memory *memory, const struct tl_identity *peer,
                              uint64_t self_incarnation, bool is_opener, const struct tl_conn_events *events,
                              void *owner, struct tl_conn **ret_conn, struct tl_error *ret_error) TL_MUST_USE;
/* Writes at most TL_CONN_ADDRESS_BYTES bytes; returns how many. */
uint32_t tl_conn_get_address(const struct tl_conn *conn, uint8_t *ret_bytes);
/* Connects with what the peer's tl_conn_get_address wrote; up or closed follows. On error closed does not follow: the
 * connection is closed with tl_conn_close. Errors: TL_INVALID_ARGUMENT: not an address. TL_FAILED_PRECONDITION:
 * another version, another incarnation, or parameters that do not fit. TL_UNAVAILABLE: the card refuses, or the
 * connection has ended already. */
enum tl_status tl_conn_connect(struct tl_conn *conn, const uint8_t *bytes, uint32_t len_bytes,
                               struct tl_error *ret_error) TL_MUST_USE;

void *tl_conn_owner(const struct tl_conn *conn);

/* How fast it is: measured while it came up, by a few writes to the peer that its card has acknowledged. And what with.
 */
struct tl_conn_measures {
    uint64_t latency_ns;         /* there and back, the fastest of some small writes */
    uint64_t bytes_per_second;   /* of large ones, from the first one's posting to the last one's acknowledgement */
    uint32_t mtu_bytes;          /* of a packet, as the two have agreed; 0: not known */
    const char *outside_refusal; /* why memory outside of a pool is copied once more; NULL: it is not. For ever */
};
/* The connection is up. */
const struct tl_conn_measures *tl_conn_measured(const struct tl_conn *conn);
bool tl_conn_is_up(const struct tl_conn *conn);

/* Asks for the tensor of the fetch; fetch->ops->done follows exactly once. The connection is up. Progress that the
 * fetch has made elsewhere is dropped. fetch->allocator is set while the engine has it. */
void tl_conn_fetch(struct tl_conn *conn, struct tl_fetch *fetch);
/* Gives the fetch up: done follows, with TL_CANCELLED unless the tensor has arrived meanwhile, once no write of the
 * peer can land in the destination any more. TL_RESOURCE_EXHAUSTED: it was still waiting for room in the pool, or for
 * one of the requests that may be open. */
void tl_conn_cancel(struct tl_conn *conn, struct tl_fetch *fetch);

/* Closes it once it is idle; new requests of the peer are refused with TL_UNAVAILABLE meanwhile. */
void tl_conn_drain(struct tl_conn *conn);
/* Ends it now, with this reason; closed follows. */
void tl_conn_close(struct tl_conn *conn, const struct tl_error *reason);

#endif
