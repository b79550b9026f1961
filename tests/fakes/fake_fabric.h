// SPDX-License-Identifier: Apache-2.0
/*
 * Inside of the fake provider: fake_provider.c is the table of operations and the poll, fake_fabric.c carries
 * operations, fake_faults.c says what goes wrong. One mutex guards everything of a fabric; callbacks run without it.
 *
 * Life of a queue pair:
 *
 *   CREATED --connect--> CONNECTED --a fault, the peer, disconnect--> BROKEN
 *      |                                                                ^  |
 *      +---------------------- disconnect, device gone -----------------+  | its operations are cancelled
 *                                                                          v
 *                            destroy <--after the owner was notified-- DRAINED
 */
#ifndef TESTS_FAKES_FAKE_FABRIC_H
#define TESTS_FAKES_FAKE_FABRIC_H

#include <pthread.h>

#include "base/list.h"
#include "fakes/fake_provider.h"

enum { FAKE_MAX_RULES = 32 };

struct rule_state {
    struct fake_rule rule;
    uint64_t match_count;
};

struct fake_fabric {
    struct fake_fabric_options options;
    pthread_mutex_t mutex;
    pthread_cond_t regions_go; /* Signalled when are_regions_held becomes false. */
    bool are_regions_held;
    void *(*reach)(const void *memory); /* NULL: everything lies on the host */
    struct tl_list providers;           /* Elements are struct fake_provider. */
    struct tl_list pairs;  /* Elements are struct fake_pair: all of them, in the order of their creation. */
    struct tl_list shared; /* Elements are struct fake_shared. */
    struct tl_list late;   /* Elements are struct fake_operation: cancelled, but on their way. */
    uint64_t next_number;  /* The next number of a queue pair or key. */
    uint64_t random;
    struct rule_state rules[FAKE_MAX_RULES];
    unsigned rule_count;
    unsigned chances[FAKE_FAULT_COUNT]; /* Probabilities in a million. */
    struct fake_write *writes;
    size_t write_count;
    size_t write_capacity;
    uint64_t next_choice; /* The place of step_any without a seed. */
};

struct fake_provider {
    struct tl_provider base;
    struct tl_provider_ops ops; /* The operations that this provider has. */
    struct fake_fabric *fabric;
    struct tl_list link;
    struct tl_list events;  /* Elements are struct fake_event, for the next polls. */
    struct tl_list regions; /* Elements are struct fake_region. */
    struct fake_counters counters;
    struct fake_provider_options options; /* It was opened with these. */
    unsigned network;
    uint32_t read_depth; /* 0: no reads. */
    bool is_armed;
    bool is_gone;
    bool is_held;
    bool is_polling;
};

struct fake_region {
    struct tl_region base;
    struct tl_list link;
    uint64_t key;
    unsigned use_count; /* The number of operations and exposures that name the region. */
};

/* Memory that one queue pair lets its peer write, or read. Under TL_KEYS_REGION it only counts the exposure, unless it
 * lies in no region. */
struct fake_window {
    struct tl_list link;
    uint64_t key;
    struct fake_region *region; /* NULL: no region is needed. */
    uint8_t *address;
    uint64_t len_bytes;
    bool is_source;   /* The peer may read it. */
    bool is_writable; /* The peer may write it. */
    bool is_bound;    /* From the step of its bind to that of its revoke. */
};

enum fake_pair_state { PAIR_CREATED, PAIR_CONNECTED, PAIR_BROKEN, PAIR_DRAINED };

struct fake_pair {
    struct tl_queue_pair base;
    struct tl_list link;
    uint64_t number;
    uint64_t peer_number; /* 0: not connected. */
    struct tl_queue_pair_options options;
    const struct tl_queue_pair_events *events;
    void *owner;
    enum fake_pair_state state;
    bool is_break_queued;   /* The event is on its way. */
    bool is_break_reported; /* The owner knows. */
    bool is_drain_reported;
    struct tl_error reason;
    struct tl_list operations; /* Elements are struct fake_operation: posted, not carried. */
    struct tl_list windows;
    unsigned rung_count; /* The number of operations that may leave. */
    unsigned out_count;  /* Posted and not done. */
    unsigned reads_out;  /* The reads among them. */
    unsigned slots_free;
    uint8_t **slots; /* [options.slot_count]: what they have received last. */
    unsigned next_slot;
    bool has_message_place; /* a message may be composed in message_place */
    uint8_t message_place[TL_SLOT_BYTES];
};

/* The wire form of a descriptor. */
struct fake_address {
    uint64_t magic;
    uint64_t key;
    uint64_t address;
    uint64_t len_bytes;
};
#define FAKE_ADDRESS_MAGIC UINT64_C(0x66616b6561646472)

/* The wire form of an address. */
struct fake_pair_address {
    uint64_t magic;
    uint64_t number;
    uint64_t network;
};
#define FAKE_PAIR_ADDRESS_MAGIC UINT64_C(0x66616b65706169)

/* A file that a queue pair has shared, until it is destroyed. */
struct fake_shared {
    struct tl_list link;
    uint64_t pair_number;
    struct tl_mapped_file *file; /* This struct holds one reference. */
};

/* The wire form of a file's name. */
struct fake_file_name {
    uint64_t magic;
    uint64_t file_id;
};
#define FAKE_FILE_MAGIC UINT64_C(0x66616b6566696c65)

struct fake_operation {
    struct tl_list link;
    enum fake_kind kind;
    struct tl_work *work;       /* NULL: no completion is wanted. */
    enum fake_fault fault;      /* FAKE_FAULT_COUNT: none. */
    unsigned fault_count;       /* The steps or tries that are left of the fault. */
    unsigned rnr_count;         /* The tries without a slot. */
    uint8_t *copy;              /* The message, or the bytes of a late write. */
    struct fake_region *region; /* The region of the source, or NULL. */
    const void *source;
    void *target_memory; /* For a read: where its bytes go; destination then names the peer's memory. */
    uint64_t len_bytes;
    struct tl_descriptor destination;
    uint64_t offset_bytes;
    bool has_immediate;
    uint32_t immediate;
    size_t write_place;         /* The place in fabric->writes. */
    struct fake_window *window; /* The window of a bind or revoke. */
    uint64_t target;            /* The number of the queue pair that a late operation is for. */
};

enum fake_event_kind { EVENT_MESSAGE, EVENT_IMMEDIATE, EVENT_DONE, EVENT_BROKEN, EVENT_DRAINED };

struct fake_event {
    struct tl_list link;
    enum fake_event_kind kind;
    struct fake_pair *pair;
    uint8_t *data; /* The bytes of a message, exactly len_bytes. */
    uint64_t len_bytes;
    uint32_t immediate;
    struct fake_operation *operation; /* The operation that is done. */
    enum tl_status status;
};

/* ---------------------------------------------------------------------------- fake_fabric.c; the mutex is held -- */

/* Where the bytes at an address are. */
void *fake_reach(const struct fake_fabric *fabric, const void *memory);
struct fake_provider *fake_provider_of(const struct fake_pair *pair);
struct fake_pair *fake_find_pair(struct fake_fabric *fabric, uint64_t number);
void fake_push_event(struct fake_event *event);
void fake_signal(struct fake_provider *provider);
void fake_break(struct fake_pair *pair, const struct tl_error *reason);
void fake_break_all(struct fake_provider *provider, const char *why);
void fake_operation_free(struct fake_operation *operation);
bool fake_parse_address(const struct tl_descriptor *descriptor, struct fake_address *ret_address);
/* Carries what a poll carries. Returns whether anything moved. */
bool fake_carry_all(struct fake_provider *provider);
bool fake_carry_some(struct fake_provider *provider);
void *fake_alloc(size_t len_bytes); /* Returns zeroed memory, never NULL. */

/* ----------------------------------------------------------------------------- fake_share.c; the mutex is held -- */

void fake_share(struct fake_pair *pair, struct tl_mapped_file *file, struct tl_descriptor *ret_descriptor);
/* Returns one reference, or NULL when the peer has shared no such file. */
struct tl_mapped_file *fake_map(struct fake_pair *pair, const struct tl_descriptor *descriptor);
void fake_forget_shared(struct fake_pair *pair);

/* ---------------------------------------------------------------------------- fake_faults.c; the mutex is held -- */

uint64_t fake_random(struct fake_fabric *fabric, uint64_t below);
/* Forgets a provider that closes, because another one may get its address. */
void fake_forget_rules(struct fake_fabric *fabric, const struct tl_provider *provider);
void fake_choose_fault(struct fake_pair *pair, struct fake_operation *operation);
bool fake_call_fails(struct fake_fabric *fabric, enum fake_fault fault, const struct tl_provider *provider,
                     const struct tl_queue_pair *pair);

#endif
