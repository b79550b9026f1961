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
 *   - a write or read outside of what the peer exposes for it, or after its revocation, changes nothing and breaks
 * both;
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
    bool is_manual; /* Nothing moves except by the functions below; false: a poll carries what its provider posted. */
    bool is_hollow; /* Large writes move no bytes, for tensors that are larger than memory. */
    bool is_flushed_first; /* A queue pair that breaks reports it after the cancelled operations, not before. */
    /* The seed of every choice; 0: no choice, and queue pairs are served in the order of their creation. */
    uint64_t seed;
    unsigned rnr_tries;  /* 0 stands for 7. */
    unsigned poll_batch; /* Events that one poll handles; 0 stands for 16. */
};

/* options NULL: all zero. */
struct fake_fabric *fake_fabric_create(const struct fake_fabric_options *options);
/* Destroys a fabric whose providers are closed. Accepts NULL. */
void fake_fabric_destroy(struct fake_fabric *fabric);

struct fake_provider_options {
    bool has_no_windows;
    bool needs_no_regions;
    bool has_no_fd;
    bool has_no_mapping; /* Files cannot be mapped. */
    bool has_no_reads;
    uint32_t read_depth;      /* Reads that may be posted at a time; 0 stands for 4. */
    uint64_t max_write_bytes; /* 0 stands for 1 GiB. */
    uint32_t max_queue_pairs; /* 0 stands for 64. */
    uint32_t window_count;    /* Windows of a queue pair; 0: any number. */
    /* Finds the bytes at an address, which may lie on a device; NULL: memory of devices cannot be registered. */
    void *(*reach)(const void *memory);
    unsigned network; /* Queue pairs of different networks do not fit. */
};

/* options NULL: all zero. ops->close closes the provider. */
struct tl_provider *fake_provider_open(struct fake_fabric *fabric, const char *name,
                                       const struct fake_provider_options *options);
/* Returns the queue pair at this place among those that the provider has now, in the order of their creation, or
 * NULL. */
struct tl_queue_pair *fake_provider_pair(struct tl_provider *provider, unsigned place);

/* While the provider is held, its polls pass no events on. */
void fake_provider_hold(struct tl_provider *provider, bool is_held);

/* While regions are held, no registration of memory returns. */
void fake_fabric_hold_regions(struct fake_fabric *fabric, bool are_held);

/* ------------------------------------------------------------------------------------------------------- steps -- */

/* Applies from now on. */
void fake_fabric_set_manual(struct fake_fabric *fabric, bool is_manual);
/* Carries, or tries again to carry, the first operation of the queue pair. Returns false when there is nothing to
 * carry, or it is held (dropped, or the peer has not connected). */
bool fake_fabric_step(struct fake_fabric *fabric, struct tl_queue_pair *pair);
/* Makes a step of one queue pair that is not held, or lets a late operation arrive; the seed chooses. Returns false
 * when there is none. */
bool fake_fabric_step_any(struct fake_fabric *fabric);
/* Lets the oldest operation arrive that was cancelled here but had left already. Returns false when there is none. When
 * steps are not manual, the peer's poll does it. */
bool fake_fabric_land_late(struct fake_fabric *fabric);

/* ------------------------------------------------------------------------------------------------------ faults -- */

enum fake_kind {
    FAKE_MESSAGE = 1,
    FAKE_WRITE = 2,
    FAKE_BIND = 4, /* An expose under TL_KEYS_WINDOW. */
    FAKE_REVOKE = 8,
    FAKE_READ = 16,
};

enum fake_fault {
    /* The fault of an operation, decided when it is posted. */
    FAKE_DROP,     /* It is never carried: it and the operations behind it wait until the queue pair breaks. */
    FAKE_DELAY,    /* It takes `count` more steps. */
    FAKE_LOSE_ACK, /* It is carried, but never completes; others wait as above. */
    /* As FAKE_DROP; but once it has been cancelled it arrives, if the peer is not drained by then. */
    FAKE_LATE,
    FAKE_RNR,          /* The peer seems to have no slot, `count` times; 0: always. */
    FAKE_CORRUPT,      /* A write or read: the first byte arrives wrong. */
    FAKE_BREAK,        /* It fails: the queue pair breaks, without an event at its peer. */
    FAKE_UNANSWERED,   /* The same, because the peer's card does not answer. */
    FAKE_POST_FAILURE, /* The card refuses it: the queue pair breaks at once. */
    FAKE_CQ_OVERRUN,   /* To carry it breaks all queue pairs of its provider. */
    FAKE_DEVICE_GONE,  /* To carry it breaks them, and from now on the provider refuses everything. */
    /* The faults of a call. */
    FAKE_REGION_FAILURE,  /* region_create: TL_RESOURCE_EXHAUSTED. */
    FAKE_CREATE_FAILURE,  /* create: TL_RESOURCE_EXHAUSTED. */
    FAKE_CONNECT_FAILURE, /* connect: TL_UNAVAILABLE. */
    FAKE_EXPOSE_FAILURE,  /* expose: TL_RESOURCE_EXHAUSTED. */
    FAKE_SHARE_FAILURE,   /* share: TL_UNAVAILABLE. */
    FAKE_MAP_FAILURE,     /* map: TL_NOT_FOUND. */
    FAKE_FAULT_COUNT,
};

#define FAKE_ALWAYS UINT_MAX

/* A fault that happens at the matching operations or calls. */
struct fake_rule {
    enum fake_fault fault;
    const struct tl_provider *provider; /* NULL: any. */
    const struct tl_queue_pair *pair;   /* NULL: any. */
    unsigned kinds;                     /* The kinds, of enum fake_kind; 0: any. */
    unsigned from;                      /* The first match at which it happens, from 1; 0 stands for 1. */
    unsigned times;                     /* At how many matches in a row; 0 stands for 1. */
    unsigned count;                     /* The `count` of the fault, see above. */
    uint64_t min_bytes;                 /* Operations of at least so many bytes; 0: any. */
};

/* The first rule that applies to an operation decides. There are at most 32 rules. A rule about a provider ends with
 * it. */
void fake_fabric_add_rule(struct fake_fabric *fabric, const struct fake_rule *rule);
void fake_fabric_clear_rules(struct fake_fabric *fabric);
/* In addition to the rules, the seed lets the fault happen per_million times in a million. DELAY takes 1..8 steps, RNR
 * 1..3 tries. */
void fake_fabric_set_chance(struct fake_fabric *fabric, enum fake_fault fault, unsigned per_million);
/* The two faults of a provider happen now. */
void fake_provider_overrun(struct tl_provider *provider);
void fake_provider_remove(struct tl_provider *provider);

/* ------------------------------------------------------------------------------------------- what has happened -- */

#define FAKE_MTU_BYTES 2048
/* What this thread does now counts as done by a reactor. */
extern _Thread_local bool fake_is_reactor;

struct fake_counters {
    /* Carried to the peer, since open. */
    uint64_t messages;
    uint64_t writes;
    uint64_t write_bytes;
    uint64_t immediates;
    uint64_t reads;
    uint64_t read_bytes;
    /* Counted since open. */
    uint64_t exposures;
    uint64_t unregistered_exposures; /* those of memory without a region */
    uint64_t revokes;
    uint64_t regions;
    uint64_t creates;         /* Queue pairs, including those that failed. */
    uint64_t reactor_regions; /* Made or destroyed in fake_is_reactor. */
    uint64_t rings;
    uint64_t messages_in_place; /* composed in a message_place, and not moved */
    uint64_t shares;
    uint64_t maps;
    uint64_t slots_taken; /* Taken by the peers' messages and immediates. */
    uint64_t rnr_tries;
    uint64_t done;
    uint64_t cancelled;
    uint64_t late_landed;  /* Late operations that arrived at this provider. */
    uint64_t late_refused; /* Late operations that it refused: drained, revoked, or no slot. */
    /* The present state. */
    unsigned exposures_out;
    unsigned regions_out;
    unsigned operations_out; /* Posted and not done. */
    unsigned most_reads_out; /* The most reads that were posted and not done at a time. */
    unsigned slots_out;      /* Taken and not posted again. */
    unsigned queue_pairs;
};

void fake_provider_get_counters(struct tl_provider *provider, struct fake_counters *ret_counters);

/* Returns whether nothing is under way: no operation, event or late arrival, no exposure, and all slots are posted.
 * Regions and queue pairs may be there. On false, *ret_why (may be NULL) names the first thing that is under way. */
bool fake_fabric_is_quiet(struct fake_fabric *fabric, const char **ret_why);
/* Returns whether, moreover, no region and no queue pair is left. */
bool fake_fabric_is_clean(struct fake_fabric *fabric, const char **ret_why);

/* A write, as it was posted. */
struct fake_write {
    const struct tl_provider *provider;
    const void *source;
    void *destination; /* In the peer's memory; NULL when the destination is no descriptor. */
    uint64_t len_bytes;
    bool has_immediate;
    uint32_t immediate;
    bool has_landed; /* Its bytes are there. */
};

size_t fake_fabric_write_count(struct fake_fabric *fabric);
/* Returns the writes in the order of posting. */
struct fake_write fake_fabric_write_at(struct fake_fabric *fabric, size_t place);

#endif
