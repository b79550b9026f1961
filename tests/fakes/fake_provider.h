// SPDX-License-Identifier: Apache-2.0
/*
 * A provider whose card, cable and peer are one process and do what a test says.
 *
 * A fabric connects the queue pairs of its providers (one provider for each simulated worker). What is posted and rung
 * waits in its queue pair, in order, and is carried to the peer by steps: one step carries the first operation of one
 * queue pair. Steps are made by the test (options.is_manual), or by the poll of the provider that posted. Only a step
 * reads a source and writes a destination, and what it causes (messages, immediates, completions, breaks) waits for the
 * poll of the provider it is for: between post, step and poll a test can put anything.
 *
 * It behaves as a reliable connection does:
 *   - operations of a queue pair are carried and completed in the order of posting; those of different queue pairs in
 *     any order, which the test, or its seed, chooses;
 *   - a message, and an immediate, takes a slot of the peer, which comes back when the callback returns. Without one
 * the step is tried again, rnr_tries times; then both queue pairs break;
 *   - a write outside of what the peer exposes, or after its revocation, changes nothing and breaks both;
 *   - a peer that is broken or destroyed is noticed by what is posted next: that breaks ours. One that has not
 * connected yet is waited for;
 *   - a broken queue pair flushes one operation with each step, then it is drained;
 *   - a file that is shared is mapped by being named: both sides have the same mapping.
 *
 * What a user of provider.h must not do ends the test with a failed check: posting without room or to what is broken,
 * sources outside of their region, memory that is given back while something names it, and so on.
 *
 * Thread: any, as far as provider.h allows; a poll of one provider may run beside that of another.
 */
#ifndef TESTS_FAKES_FAKE_PROVIDER_H
#define TESTS_FAKES_FAKE_PROVIDER_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dataplane/provider.h"

struct fake_fabric;

/* ---------------------------------------------------------------------------------------- fabric and providers -- */

struct fake_fabric_options {
    bool is_manual; /* nothing moves but by the functions below; false: a poll carries what its provider posted */
    bool is_hollow; /* large writes move no bytes: for tensors that are larger than memory */
    bool is_flushed_first; /* a queue pair that breaks tells its owner after the cancelled operations, not before */
    uint64_t seed;         /* of every choice; 0: no choice, queue pairs take turns in the order of their creation */
    unsigned rnr_tries;    /* 0: 7 */
    unsigned poll_batch;   /* events that one poll handles; 0: 16 */
};

/* options NULL: all zero. */
struct fake_fabric *fake_fabric_create(const struct fake_fabric_options *options);
/* All providers are closed. NULL is accepted. */
void fake_fabric_destroy(struct fake_fabric *fabric);

struct fake_provider_options {
    bool has_no_windows;
    bool needs_no_regions;
    bool has_no_fd;
    bool has_no_mapping;      /* of files */
    uint64_t max_write_bytes; /* 0: 1 GiB */
    uint32_t max_queue_pairs; /* 0: 64 */
    unsigned network;         /* queue pairs of different networks do not fit */
};

/* options NULL: all zero. Closed by ops->close. */
struct tl_provider *fake_provider_open(struct fake_fabric *fabric, const char *name,
                                       const struct fake_provider_options *options);
/* The queue pair at this place among those that the provider has now, in the order of their creation; NULL: none. */
struct tl_queue_pair *fake_provider_pair(struct tl_provider *provider, unsigned place);

/* While it is held, its polls tell nothing. */
void fake_provider_hold(struct tl_provider *provider, bool is_held);

/* While they are held, nobody who registers memory comes back from that. */
void fake_fabric_hold_regions(struct fake_fabric *fabric, bool are_held);

/* ------------------------------------------------------------------------------------------------------- steps -- */

/* From now on. */
void fake_fabric_set_manual(struct fake_fabric *fabric, bool is_manual);
/* Carries, or tries again to carry, the first operation of the queue pair. False: there is nothing to carry, or it is
 * held (dropped, or the peer has not connected). */
bool fake_fabric_step(struct fake_fabric *fabric, struct tl_queue_pair *pair);
/* A step of one queue pair that is not held, or the arrival of a late operation, chosen by the seed. False: none. */
bool fake_fabric_step_any(struct fake_fabric *fabric);
/* What was cancelled here, but had left already, arrives at its peer: the oldest first. False: there is none. Not
 * manual: the peer's poll does it. */
bool fake_fabric_land_late(struct fake_fabric *fabric);

/* ------------------------------------------------------------------------------------------------------ faults -- */

enum fake_kind {
    FAKE_MESSAGE = 1,
    FAKE_WRITE = 2,
    FAKE_BIND = 4, /* an expose under TL_KEYS_WINDOW */
    FAKE_REVOKE = 8,
};

enum fake_fault {
    /* Of an operation, decided when it is posted. */
    FAKE_DROP,         /* it is never carried; it, and what is behind it, waits until the queue pair breaks */
    FAKE_DELAY,        /* it takes `count` more steps */
    FAKE_LOSE_ACK,     /* it is carried, but never completes: waits as above */
    FAKE_LATE,         /* as FAKE_DROP, but once it has been cancelled it arrives, if the peer is not drained by then */
    FAKE_RNR,          /* the peer seems to have no slot, `count` times; 0: always */
    FAKE_CORRUPT,      /* of a write: the first byte arrives wrong */
    FAKE_BREAK,        /* it fails: the queue pair breaks, and its peer is not told */
    FAKE_POST_FAILURE, /* the card refuses it: the queue pair breaks at once */
    FAKE_CQ_OVERRUN,   /* carrying it breaks all queue pairs of its provider */
    FAKE_DEVICE_GONE,  /* carrying it breaks them, and from now on the provider refuses everything */
    /* Of a call. */
    FAKE_REGION_FAILURE,  /* region_create: TL_RESOURCE_EXHAUSTED */
    FAKE_CREATE_FAILURE,  /* create: TL_RESOURCE_EXHAUSTED */
    FAKE_CONNECT_FAILURE, /* connect: TL_UNAVAILABLE */
    FAKE_EXPOSE_FAILURE,  /* expose: TL_RESOURCE_EXHAUSTED */
    FAKE_SHARE_FAILURE,   /* share: TL_UNAVAILABLE */
    FAKE_MAP_FAILURE,     /* map: TL_NOT_FOUND */
    FAKE_FAULT_COUNT,
};

#define FAKE_ALWAYS UINT_MAX

/* A fault happens at the operations, or calls, that match. */
struct fake_rule {
    enum fake_fault fault;
    const struct tl_provider *provider; /* NULL: any */
    const struct tl_queue_pair *pair;   /* NULL: any */
    unsigned kinds;                     /* of enum fake_kind; 0: any */
    unsigned from;                      /* the first of the matches that it happens at, from 1; 0: 1 */
    unsigned times;                     /* at how many in a row; 0: 1 */
    unsigned count;                     /* see above */
};

/* The first rule that says anything about an operation decides. At most 32 rules. One about a provider ends with it. */
void fake_fabric_add_rule(struct fake_fabric *fabric, const struct fake_rule *rule);
void fake_fabric_clear_rules(struct fake_fabric *fabric);
/* Besides the rules, by the seed: the fault happens to one in a million times per_million. DELAY takes 1..8 steps,
 * RNR 1..3 tries. */
void fake_fabric_set_chance(struct fake_fabric *fabric, enum fake_fault fault, unsigned per_million);
/* The two faults of a provider, now. */
void fake_provider_overrun(struct tl_provider *provider);
void fake_provider_remove(struct tl_provider *provider);

/* ------------------------------------------------------------------------------------------- what has happened -- */

#define FAKE_MTU_BYTES 2048
/* What this thread does now, a reactor does. */
extern _Thread_local bool fake_is_reactor;

struct fake_counters {
    /* Carried to the peer, since open. */
    uint64_t messages;
    uint64_t writes;
    uint64_t write_bytes;
    uint64_t immediates;
    /* Since open. */
    uint64_t exposures;
    uint64_t revokes;
    uint64_t regions;
    uint64_t creates;         /* of queue pairs, also those that failed */
    uint64_t reactor_regions; /* made or destroyed in fake_is_reactor */
    uint64_t rings;
    uint64_t shares;
    uint64_t maps;
    uint64_t slots_taken; /* by the peers' messages and immediates */
    uint64_t rnr_tries;
    uint64_t done;
    uint64_t cancelled;
    uint64_t late_landed;  /* here */
    uint64_t late_refused; /* here: drained, revoked, or no slot */
    /* Now. */
    unsigned exposures_out;
    unsigned regions_out;
    unsigned operations_out; /* posted, and not done */
    unsigned slots_out;      /* taken, and not posted again */
    unsigned queue_pairs;
};

void fake_provider_get_counters(struct tl_provider *provider, struct fake_counters *ret_counters);

/* Nothing is under way: no operation, event or late arrival, no exposure, all slots are posted. Regions and queue pairs
 * may be there. False: *ret_why (may be NULL) names the first thing that is. */
bool fake_fabric_is_quiet(struct fake_fabric *fabric, const char **ret_why);
/* Moreover no region and no queue pair is left. */
bool fake_fabric_is_clean(struct fake_fabric *fabric, const char **ret_why);

/* A write, as it was posted. */
struct fake_write {
    const struct tl_provider *provider;
    const void *source;
    void *destination; /* in the peer's memory; NULL when the destination is no descriptor */
    uint64_t len_bytes;
    bool has_immediate;
    uint32_t immediate;
    bool has_landed; /* its bytes are there */
};

size_t fake_fabric_write_count(struct fake_fabric *fabric);
/* In the order of posting. */
struct fake_write fake_fabric_write_at(struct fake_fabric *fabric, size_t place);

#endif
