// SPDX-License-Identifier: Apache-2.0
/*
 * A connection with one peer, as the files of the engine see it: struct tl_conn is made of one struct for each thing
 * that the connection keeps. On the right is what each file takes care of.
 *
 *   conn.c            how it begins and ends, what arrives, and when the peer is given up    ending, peer_timeout
 *   conn_posts.c      what waits to be posted, and credits                                   posts, credits
 *   conn_memory.c     registrations and memory of pools, from the registration thread        ending.held_count
 *   conn_handles.c    the table of open requests                                             requests
 *   conn_keys.c       the numbers of keys                                                    requests, responses
 *   handshake.c       how it comes up                                                        handshake
 *   handshake_reason.c  why it does not come up
 *   measure.c         how fast it is                                                         handshake.measuring
 *   request*.c        what we ask of the peer                                                requests
 *   response*.c       what the peer asks of us                                               responses
 *
 * request_memory.c and response_memory.c count ending.held_count down when their registrations come back.
 *
 * Five things are scarce, and each has a queue. Posts wait for slots at the peer and for space in the queue pair
 * (posts.slot_queues, posts.space_queue). Requests and responses wait for windows (posts.window_queue). Requests that
 * read wait until one of the reads that are posted is over (posts.reads.queues). Fetches wait for handles
 * (requests.waiting), of which the peer gives out more than may wait for their values. Requests and responses wait for
 * memory of a pool (struct conn_memory_wait).
 */
#ifndef DATAPLANE_ENGINE_CONN_INTERNAL_H
#define DATAPLANE_ENGINE_CONN_INTERNAL_H

#include <pthread.h>

#include "base/check.h"
#include "base/list.h"
#include "base/spares.h"
#include "base/timer.h"
#include "dataplane/engine/asked_keys.h"
#include "dataplane/engine/engine.h"
#include "dataplane/engine/kept_keys.h"
#include "dataplane/engine/message.h"
#include "tensor/device.h"

/* The owner learns from its card, or from the peer's ring, that an answer has arrived. What has filled our slots once
 * may all be unknown to it, and as much again while the word of that is on its way. A peer with more slots than we have
 * may be as much slower to look at its card. */
#define UNCONFIRMED_ROUNDS 2

/* Messages for one slot of a peer, until they are posted: at the end of the pump that has begun the batch, or before a
 * message that does not fit. */
struct engine_batch {
    struct tl_conn *conn; /* NULL: no batch is open */
    uint32_t len_bytes;
    uint64_t passed_bytes; /* so many bytes of writes were posted since it was begun */
    struct tl_work *works; /* what waits for its end, linked by `next` */
    struct tl_work **works_end;
    uint8_t *bytes; /* in `memory`, or where the provider sends it from */
    uint8_t memory[TL_SLOT_BYTES];
};

/* Where values are found. */
struct engine_source {
    const struct tl_source_ops *ops;
    void *context;
};

/* Objects of all connections, to be used again. */
struct engine_spares {
    struct tl_spares requests;   /* struct request */
    struct tl_spares placements; /* struct request_placement */
    struct tl_spares responses;  /* struct response */
    struct tl_spares sendings;   /* struct response_sending */
    struct tl_spares texts;      /* struct tl_kept_text of requests whose keys have no numbers */
    struct tl_spares meta_data;  /* struct tl_kept_meta_data of these */
};

/* The message that is being handled, and where it lies in its slot. */
struct engine_incoming {
    struct tl_message message;
    const uint8_t *bytes;
    uint32_t len_bytes;
};

struct tl_engine {
    struct tl_reactor *reactor;
    struct tl_provider *provider;
    struct tl_memory *memory;
    struct tl_peer_memories *peer_memories; /* NULL unless the keys are TL_KEYS_REGION */
    struct tl_engine_options options;
    struct engine_source source;
    uint64_t piece_bytes; /* the most that one write carries */
    struct tl_list conns;
    struct tl_engine_stats stats;
    uint32_t asked_count; /* requests of subscriptions that were posted, modulo 2^32; never 0 after the first */
    struct engine_incoming incoming;
    struct tl_message outgoing; /* the message that is being composed */
    struct engine_batch batch;
    uint8_t inline_copy[TL_INLINE_BYTES]; /* a value in a file is copied here, and checked when it was read */
    struct engine_spares spares;
};

/* ------------------------------------------------------------------------------------------- posts and credits -- */

/* Posts that wait for the same thing leave in the order of their ranks. Everything but values has rank 0; the rank of a
 * value follows from its priority. */
#define VALUE_RANK(priority) (1 + TL_MAX_PRIORITY - (priority))
#define POST_RANKS (1 + VALUE_RANK(0))

/* Something that waits to post one message or one write. */
struct pending_post {
    struct tl_list place; /* in one of the lists of struct conn_posts */
    uint8_t rank;
    uint32_t sent_slot; /* a request's, for which there is space here: how many slots we had used when its latest
                           REQUEST or RE_REQUEST was sent */
    /* Posts at most one message or write, and at most one expose before it. Returns true when it wants to post again
     * and is to be queued for that; false when it does not, or has queued itself. */
    bool (*post)(struct pending_post *pending);
};

/* How many bytes of tensors the CPU hashes and copies in one pump, about. After that messages are handled: a peer takes
 * a worker for dead that is silent for longer than peer_timeout_ns. */
#define PUMP_BYTES (16 * 1024 * 1024)

/* How many bytes the CPU copies out of bounce buffers that go round and round in one poll, and in one pump. */
#define COPY_BYTES ((uint64_t)256 * 1024)

/* How many bytes of several values an owner posts in one pump, and at most one piece more. After that other connections
 * have their turn. */
#define VALUES_BYTES (2 * 1024 * 1024)

/* The most reads that are posted at a time, whatever the card allows. */
#define MAX_READS 16

/* One posted read. */
struct conn_read {
    struct tl_work work;
    struct request *request; /* NULL: this entry is free */
    uint64_t len_bytes;
};

/* Reads of the peer's memory. A card holds back messages that are posted behind one read too many, so that no more are
 * posted than it carries out at a time. */
struct conn_reads {
    struct tl_list queues[POST_RANKS]; /* struct pending_post of requests: each posts one read in its turn */
    uint32_t posted_count;
    struct conn_read entries[MAX_READS];
};

/* What is left for this pump. */
struct conn_budgets {
    uint64_t response_bytes;   /* how much of PUMP_BYTES, for responses */
    uint64_t values_bytes;     /* how much of VALUES_BYTES */
    uint64_t completion_bytes; /* how much of PUMP_BYTES, for finished requests */
    uint64_t copy_bytes;       /* how much of COPY_BYTES, until the next pump */
};

/* What waits to be posted, and the pump that posts it at the end of a round. */
struct conn_posts {
    struct tl_list slot_queues[POST_RANKS]; /* struct pending_post: these need a slot at the peer, and space in the
                                               queue pair */
    struct tl_list space_queue;             /* struct pending_post: these need space in the queue pair only */
    struct tl_list copy_queue;   /* struct pending_post: requests that need their turn to copy what has arrived */
    struct tl_list window_queue; /* struct pending_post: these need a window of another request or response */
    uint64_t windows_used;       /* windows that requests and responses have now */
    uint64_t early_windows;      /* those of them that requests have got before the peer has said that a value exists */
    struct conn_budgets budgets;
    uint32_t unsent_messages;  /* posted since the last doorbell */
    uint64_t unsent_bytes;     /* posted since then, with the bytes of writes */
    struct tl_work space_work; /* completes when there is space in the queue pair again */
    bool is_space_work_out;    /* space_work is posted */
    bool is_pump_queued;       /* pump_closure is queued */
    struct tl_closure pump_closure;
    struct conn_reads reads;
};

/* The latest REQUESTs are in two lots, of which the peer has taken the former one from its slots before a third one
 * begins. A REQUEST in its slot costs the peer nothing. One that it has taken and cannot answer, because word of our
 * free slots lies behind further REQUESTs, takes memory that leaves the caches meanwhile. */
struct conn_asked {
    uint32_t count;       /* REQUESTs of the latter lot */
    uint32_t former_slot; /* the last slot of the former lot */
    bool is_ping_wanted;  /* the peer was asked, or is to be asked, what it has taken, since the latter lot is full */
    uint32_t prefetched_count; /* so many fetches that are asked for next may be in the processor's caches */
};

/* Slots are the receive buffers that each side has posted for messages and immediates of the other. All numbers but
 * peer_slot_count are counted modulo 2^32 since the connection began. */
struct conn_credits {
    uint32_t peer_slots_used;     /* slots at the peer that we have used */
    uint32_t peer_slots_returned; /* how many of these the peer has given back, as far as we know */
    uint32_t own_slots_returned;  /* slots of ours that the peer has used and that are posted again */
    uint32_t own_slots_reported;  /* the last value of own_slots_returned that we have posted */
    uint32_t peer_slot_count;     /* how many slots the peer has */
    uint32_t peer_slot_bytes;     /* how much of each we fill at most */
    bool is_wanted;               /* a CREDIT is to be sent */
    bool is_ping_wanted;          /* the CREDIT is to be answered by one */
    struct conn_asked asked;
};

/* How many slots at the peer are free, as far as we know. */
static inline uint32_t credits_left(const struct conn_credits *credits)
{
    return credits->peer_slot_count - (credits->peer_slots_used - credits->peer_slots_returned);
}

/* The peer has given back all slots up to this number. An older number than the one that is known changes nothing. */
static inline void credits_returned(struct conn_credits *credits, uint32_t upto)
{
    if (credits->peer_slots_used - upto < credits->peer_slots_used - credits->peer_slots_returned)
        credits->peer_slots_returned = upto;
}

/* ------------------------------------------------------------------------------------- requests and responses -- */

/* The allocator of destinations, what it was last asked for, and memory of devices of the peer that is mapped here. */
struct conn_placing {
    struct tl_allocator allocator; /* creates destinations in conn->memory, and on devices */
    struct request *request;       /* the request being placed */
    struct tl_memory_wait *wait;   /* memory that the request being placed has waited for; NULL: it has not waited */
    bool is_early;                 /* the value may never exist: a quarter of the pool stays free for others */
    uint64_t missing_bytes;        /* the size that the pool lacked; 0: it lacked nothing */
    struct tl_list imports;        /* struct conn_import */
    struct tl_list awaiting_laps;  /* struct request_placement: large values that wait for others to be copied on */
    uint32_t lap_count;            /* requests that have a bounce buffer for which they have waited */
};

/* One index of the table of open requests. */
struct conn_handle {
    struct request *request; /* NULL: the index is free */
    uint32_t next;           /* while it is free: the index that is used after this one */
    uint16_t generation;     /* changes with each use of the index */
};

/* What the latest REQUEST of one direction has said, to which the next one is relative. */
struct conn_latest {
    uint64_t number;
    uint64_t step;
};

/* What we ask of the peer. A handle is an index into `handles` with a generation (conn_handles.c). */
struct conn_requests {
    struct conn_handle *handles; /* [handle_count] */
    uint32_t handle_count;
    uint32_t open_count; /* how many of them have a request */
    uint32_t first_free; /* the index that has been free for longest, and the last one; valid while one is */
    uint32_t last_free;
    uint32_t capacity;          /* how many requests the peer takes at a time */
    struct tl_list waiting;     /* struct tl_fetch: they need a handle */
    struct tl_list finished;    /* struct request: their fetches are to be completed */
    struct tl_list completed;   /* struct request: their fetches are completed; freed at the end of the pump */
    struct tl_list unplaced;    /* struct request: finished, but there was no memory for their values */
    uint32_t unplaced_count;    /* requests whose values are in our slots, of which none is reported meanwhile */
    struct tl_list unrequested; /* struct tl_fetch: refused or cancelled before they had a request, and to be
                                   completed */
    struct tl_asked_keys keys;
    struct conn_latest latest; /* REQUEST that was posted */
    struct conn_placing placing;
};

/* What the peer asks of us. */
struct conn_responses {
    struct response **by_handle; /* [place_count]: lists of responses, by the hash of their handles */
    uint32_t place_count;        /* a power of two, which grows with the number of responses */
    uint64_t seed;               /* random, so that a peer does not know the hashes */
    uint32_t count;              /* open responses */
    uint32_t inline_bytes;       /* values of at most so many bytes go to the peer inside of messages */
    struct tl_numbered_keys keys;
    struct conn_latest latest;  /* REQUEST that has come */
    uint32_t cancelled_count;   /* CANCELLED messages that wait to be posted */
    uint64_t late_count;        /* responses that were parked for too long; one RE_REQUEST may still come for each */
    uint64_t shown_bytes;       /* the sizes of all sources that the peer may read now, added up */
    uint64_t released_count;    /* sources that the peer has read, since the connection began */
    struct tl_list idle_copies; /* struct conn_lent_copy: memory for copies that peers import (response_lend.c) */
    uint64_t idle_copy_bytes;   /* the sizes of the idle copies, added up */
    uint64_t copied_bytes;      /* the sizes of all copies, idle, in use or requested, added up */
    struct tl_list awaiting_copies; /* values that wait for memory of other copies */
};

/* ---------------------------------------------------------------------------------------- beginning and ending -- */

/* How many bytes a write has that measures the rate. */
#define PROBE_BYTES 65536

#define MEASURE_WRITES 8

struct measured_write {
    struct tl_work work;
    struct tl_conn *conn;
};

/* The rounds of writes that measure latency and rate (measure.c). */
struct measuring {
    struct pending_post pending;
    struct measured_write writes[MEASURE_WRITES]; /* the writes of one round */
    unsigned round;
    unsigned writes_left; /* writes of this round that are to be posted */
    unsigned writes_open; /* writes of this round that are posted */
    uint64_t bytes;       /* posted in this round */
    bool is_started;
    bool is_over;
    uint64_t passed_bytes; /* the largest write that has arrived; 0: none */
    int64_t began_ns;
};

/* What proves to each side that the other is the one whose address came over the control plane. */
struct handshake_keys {
    uint64_t own_token;      /* the peer must present it */
    uint64_t peer_token;     /* we present it */
    uint64_t own_challenge;  /* the peer must write it into our probe */
    uint64_t peer_challenge; /* we write it into the peer's probe */
};

/* Memory in which each side shows that its writes arrive. */
struct handshake_probe {
    struct tl_descriptor peer; /* where we write */
    uint8_t *bytes; /* the peer writes the first PROBE_BYTES; we write from the other PROBE_BYTES. NULL: freed */
    struct tl_tensor *block; /* the block of the pool in which the probe lies; NULL: it has memory of its own */
    struct tl_pin pin;
    struct tl_region *region; /* the pool's region, or its own */
    struct tl_exposure exposure;
    struct tl_work write_work;  /* our write into the peer's probe */
    struct tl_work revoke_work; /* the end of the exposure */
    unsigned uses;              /* how many of these two are not done */
};

/* A read of what we have written into the peer's probe, where we read what we receive. */
struct handshake_read {
    struct pending_post post;
    struct tl_work work;
    uint64_t len_bytes;
    bool is_posted;
    bool is_over;
};

/* Our HELLO. */
struct handshake_hello {
    struct pending_post post;
    struct tl_work work;
    bool is_sent; /* the peer's card has it */
};

/* How the connection comes up (handshake.c). */
struct conn_handshake {
    uint64_t self_incarnation;
    bool is_opener;
    bool is_hello_verified;      /* the peer's HELLO is valid */
    bool is_peer_write_verified; /* the peer's write has arrived with the right bytes */
    bool is_own_write_verified;  /* PROBED has come: our write has arrived with the right bytes */
    bool is_counted_busy; /* the handshake has begun: the reactor counts the connection as busy until it is freed */
    struct handshake_keys keys;
    struct handshake_probe probe;
    struct measuring measuring;
    struct tl_conn_measures measures;
    struct handshake_hello hello;
    struct handshake_read read;
    struct pending_post probe_post;
    struct pending_post probed_post;
    struct tl_timer timer;
};

/* Notices a peer from which nothing comes while something is expected of it. */
struct conn_peer_timeout {
    struct tl_timer timer;
    int64_t last_seen_ns; /* when something had come last, as the timer saw it */
    bool is_peer_seen;    /* something has come since the timer looked */
};

/* How the connection ends. */
struct conn_ending {
    bool is_pair_drained; /* the queue pair is drained: no operation is posted any more */
    bool is_breaking;     /* the queue pair is drained, and requests or responses may be left that have to end */
    uint32_t broken_handle_count; /* handles of requests that were looked at for that, from the first one on */
    uint32_t broken_place_count;  /* lists of responses */
    bool is_end_queued;           /* closure is queued */
    bool is_goodbye_sent;
    unsigned held_count; /* registrations and memory waits that will come back; the connection does not end before */
    struct tl_error reason;
    struct tl_closure closure;
    struct tl_timer drain_poll_timer; /* while it closes: polls the provider even if nothing happens */
    struct pending_post goodbye_post;
    struct tl_work goodbye_work;
};

/*
 *   NEW --connect--> HANDSHAKE --verified both ways--> UP --drain--> DRAINING --idle--> CLOSING
 *     any state --broken, refused, tl_conn_close--> CLOSING --drained, nothing held--> (freed)
 */
enum conn_state {
    CONN_NEW,       /* waits for the peer's address */
    CONN_HANDSHAKE, /* waits for the peer's HELLO, its write, our write and the peer's PROBED, or for the timer */
    CONN_UP,        /* carries requests */
    CONN_DRAINING,  /* takes no new requests; waits for those that are open */
    CONN_CLOSING,   /* waits until no operation is posted and nothing is held */
};

/* Ordered by use: what each tensor needs comes first. */
struct tl_conn {
    struct tl_engine *engine;
    struct tl_queue_pair *pair; /* what messages and writes are posted to; belongs to the connection */
    struct tl_memory *memory;   /* where the peer may write: the engine's memory, or a pool made for this peer alone
                                   (TL_KEYS_REGION) */
    enum conn_state state;
    struct conn_credits credits;
    struct conn_posts posts;
    struct conn_peer_timeout peer_timeout;
    struct conn_requests requests;
    struct conn_responses responses;
    struct tl_identity peer; /* names the peer in messages, and is passed to the source */
    struct conn_ending ending;
    struct conn_handshake handshake;
    const struct tl_conn_events *events; /* tell the owner that the connection is up or closed */
    void *owner;                         /* tl_conn_owner: the object of the caller that the events are for */
    struct tl_list engine_link;          /* in engine->conns */
};

/* ------------------------------------------------------------------------------------------------------ conn.c -- */

static inline bool conn_is_open(const struct tl_conn *conn)
{
    return conn->state == CONN_UP || conn->state == CONN_DRAINING;
}

/* The peer broke the protocol: counts that, and closes the connection. */
void conn_protocol_error(struct tl_conn *conn, const char *format, ...) __attribute__((cold, format(printf, 2, 3)));
/* Ends what is open on a connection whose queue pair is drained, as much as the quota allows. Another pump goes on. */
void conn_break_open(struct tl_conn *conn);
/* The peer or its card has shown that it lives. */
static inline void conn_peer_seen(struct tl_conn *conn)
{
    conn->peer_timeout.is_peer_seen = true;
}
/* An answer of the peer shows that it has given back all slots up to this one. */
static inline void conn_credits_seen(struct tl_conn *conn, uint32_t slot)
{
    credits_returned(&conn->credits, slot);
}
/* Something is expected of the peer: starts to watch for the peer time-out. */
void conn_watch(struct tl_conn *conn);
/* Something that was open is over: a draining or closing connection may go on. */
void conn_check_idle(struct tl_conn *conn);
/* Arms a timer of the connection. Without memory for that the connection is closed. */
void conn_arm(struct tl_conn *conn, struct tl_timer *timer, int64_t after_ns);

/* ------------------------------------------------------------------------------------------------ conn_posts.c -- */

void conn_posts_init(struct tl_conn *conn);
/* Queues a post that needs a slot at the peer. Does nothing when it is queued already, or the connection is closing. */
void conn_post_when_slot(struct tl_conn *conn, struct pending_post *pending);
/* Whether a post that needs a slot may be posted now. What is posted leaves with the next doorbell, at the end of a
 * pump. */
bool conn_may_post(const struct tl_conn *conn);
/* The same for a post that needs no slot: a revoke, or a write without an immediate. */
void conn_post_when_space(struct tl_conn *conn, struct pending_post *pending);
/* Queues a post of one read, which waits for its turn. */
void conn_post_when_readable(struct tl_conn *conn, struct pending_post *pending);
/* Queues a copy of what has arrived, of at most COPY_BYTES; the pump makes it. */
void conn_copy_later(struct tl_conn *conn, struct pending_post *pending);
/* How many reads may be posted at a time; 0: none. */
uint32_t conn_read_depth(const struct tl_conn *conn);
/* There may be a free window: lets the request or response try that has waited longest. */
static inline void conn_try_next_window(struct tl_conn *conn)
{
    if (tl_list_is_empty(&conn->posts.window_queue)) return;
    struct tl_list *place = tl_list_pop_front(&conn->posts.window_queue);
    conn_post_when_slot(conn, TL_CONTAINER_OF(place, struct pending_post, place));
}
/* A posted operation is over: posts that wait for space may go on. */
void conn_space_freed(struct tl_conn *conn);
/* Posts what is queued and completes what is finished, at the end of this round. */
void conn_pump_later(struct tl_conn *conn);
/* Clears the engine's outgoing message and sets its type. Returns it. */
struct tl_message *conn_compose(struct tl_conn *conn, enum tl_message_type type, uint32_t handle);
/* Adds the message to the open batch, which is posted first when the message does not fit. Called by posts of a pump
 * only. work may be NULL. */
void conn_post_message(struct tl_conn *conn, const struct tl_message *message, struct tl_work *work);
/* Posts the open batch, and with it how many slots we have consumed. Does nothing when none is open. */
void conn_post_batch(struct tl_conn *conn);
/* Posts a write with an immediate, which uses a slot at the peer. work may be NULL. */
void conn_post_write(struct tl_conn *conn, const struct tl_region *region, const void *source, uint64_t len_bytes,
                     const struct tl_descriptor *destination, uint64_t offset_bytes, uint32_t immediate,
                     struct tl_work *work);

/* ----------------------------------------------------------------------------------------------- conn_memory.c -- */

/* Sets conn->memory to the memory made for this peer, which it takes over, or to the engine's (memory NULL). */
void conn_memory_init(struct tl_conn *conn, struct tl_memory *memory);
/* Gives the memory made for this peer back. */
void conn_memory_fini(struct tl_conn *conn);

/* Whether copying the tensor through the pool costs less. Where memory must be registered, the size of the allocation
 * counts, since all tensors in it share its registration; elsewhere the size of the tensor counts. */
bool conn_is_small(const struct tl_conn *conn, const struct tl_tensor *tensor);

/* How long something waits for the pool that keeps memory, or a peer, meanwhile. */
int64_t conn_grow_ns(const struct tl_conn *conn);

/* Posts a closure to the reactor from any thread. */
void conn_post_to_reactor(void *reactor, struct tl_closure *closure);

/* A registration of a tensor's memory by the registration thread. `run` is called on the reactor, and frees the
 * registering. */
struct registering {
    struct tl_registration registration;
    void *owner;
};
/* Returns false when there is no memory for that; `run` is not called then. */
bool conn_register(struct tl_conn *conn, struct tl_memory *memory, void *owner, struct tl_tensor *tensor,
                   enum tl_region_access access, void (*run)(struct tl_closure *closure));
static inline struct registering *conn_registered(struct tl_closure *closure)
{
    return TL_CONTAINER_OF(closure, struct registering, registration.closure);
}

/* A wait for memory of a pool. */
struct conn_memory_wait {
    struct tl_memory_wait memory_wait;
    struct tl_conn *conn;
    struct tl_memory *memory;
    void *owner;
};
/* Waits for a block of this size. `run` is called on the reactor, and frees the wait (conn_free_memory_wait). Returns
 * NULL when waiting is not possible, with the reason in ret_error. */
struct conn_memory_wait *conn_await_memory(struct tl_conn *conn, struct tl_memory *memory, uint64_t len_bytes,
                                           void *owner, void (*run)(struct tl_closure *closure),
                                           struct tl_error *ret_error);
/* The wait that `run` was called for; it is not held any more. */
struct conn_memory_wait *conn_memory_came(struct tl_closure *closure);
/* Cancels the wait and sets *wait to NULL, unless the closure is on its way. Does nothing when *wait is NULL. */
void conn_cancel_memory_wait(struct conn_memory_wait **wait);
/* Gives back what is left of the memory, frees the wait and sets *wait to NULL. Does nothing when *wait is NULL. */
void conn_free_memory_wait(struct conn_memory_wait **wait);

/* Creates a block from the memory that was waited for, or from what is free (memory_wait NULL). Errors: those of
 * tl_memory_tensor_take. */
enum tl_status conn_block_create(struct tl_memory *memory, struct conn_memory_wait *memory_wait, uint64_t len_bytes,
                                 struct tl_tensor **ret_block, struct tl_pin *ret_pin,
                                 struct tl_error *ret_error) TL_MUST_USE;
/* Creates a block of what is free now for a value that may never exist: a quarter of the pool stays free for others.
 * Errors: those of tl_memory_tensor_take_early. */
enum tl_status conn_block_create_early(struct tl_memory *memory, uint64_t len_bytes, struct tl_tensor **ret_block,
                                       struct tl_pin *ret_pin, struct tl_error *ret_error) TL_MUST_USE;
/* The same for a holder that can do without the block, and may keep it for long because the peer decides that: of what
 * is free now, and only while all blocks together take at most one region or half of the pool, and never more than half
 * of what the pool may grow to. The rest is for holders that need a block to go on. Returns false when no block is free
 * within these limits. */
bool conn_block_create_spare(const struct tl_conn *conn, struct tl_memory *memory, uint64_t len_bytes,
                             struct tl_tensor **ret_block, struct tl_pin *ret_pin) TL_MUST_USE;
void conn_block_destroy(struct tl_memory *memory, struct tl_tensor **block, struct tl_pin *pin);

/* ---------------------------------------------------------------------------------------------- conn_handles.c -- */

/* Whether the peer takes one more request. */
bool conn_has_handle(const struct tl_conn *conn);
/* Gives the request a handle. Returns false when there is no memory for that. */
bool conn_take_handle(struct tl_conn *conn, struct request *request, uint32_t *ret_handle);
void conn_give_handle(struct tl_conn *conn, uint32_t handle);
/* Returns the request with this handle; NULL: it is over, or there was none. */
struct request *conn_find_request(const struct tl_conn *conn, uint32_t handle);
/* Brings the requests that the DONEs of a batch answer into the processor's caches, before they are looked at. */
void requests_prefetch(const struct tl_conn *conn, const struct tl_batch *batch);

/* ------------------------------------------------------------------------------------------------- conn_keys.c -- */

/* How many keys of the peer are kept by number. */
uint32_t conn_key_limit(const struct tl_conn *conn);
/* The peer keeps so many keys of ours by number. */
void conn_keys_agree(struct tl_conn *conn, uint32_t key_count);
/* Makes a REQUEST with a key and numbers in full the one that is posted next. key_number: of tl_asked_keys_get. */
void conn_shorten_request(struct tl_conn *conn, uint32_t key_number, struct tl_message *message);
/* Brings what the source knows of the keys in a batch into the processor's caches, before they are asked for. */
void conn_prefetch_requests(struct tl_conn *conn, const struct tl_batch *batch);
/* Gives a REQUEST that has come its key and its numbers in full; *ret_kept is the key with its number, whose meta-data
 * the REQUEST may have; NULL: the key travelled as text. Returns false when the connection is closed: the peer broke
 * the protocol, or there is no memory. */
bool conn_complete_request(struct tl_conn *conn, struct tl_message *message, struct tl_kept_key **ret_kept);

/* ---------------------------------------------------------------------------------------------- conn_imports.c -- */

/* A call from a thread of a device to the reactor. */
struct conn_device_call {
    struct tl_reactor *reactor;
    void (*run)(struct conn_device_call *call);
    struct tl_closure closure;
    pthread_mutex_t mutex; /* held while the closure is posted */
};
/* Makes it ready for one post. The connection must be held until `run` is called. */
void conn_device_call_init(struct conn_device_call *call, struct tl_conn *conn,
                           void (*run)(struct conn_device_call *call));
/* Makes the reactor call `run`. Thread: any. */
void conn_device_call_post(struct conn_device_call *call);

/* A request or a value that waits for an import. */
struct conn_import_wait {
    struct tl_list link;
    void (*over)(struct conn_import_wait *wait); /* the memory is there, or the import has failed */
};

/* Memory of the peer that is mapped for a device of ours. */
struct conn_import {
    struct tl_list link; /* in conn->requests.placing.imports */
    struct tl_conn *conn;
    uint64_t number; /* names the peer's memory */
    struct tl_device_import importing;
    struct conn_device_call call;
    struct tl_device_memory *memory; /* NULL: it is being imported, or that has failed */
    const struct tl_error *failure;  /* kept; NULL: none */
    unsigned user_count;             /* requests that have it */
    bool is_running;                 /* it is being imported */
    bool is_gone;                    /* the peer has given it back */
    struct tl_list waiting;          /* struct conn_import_wait, while it is being imported */
};
/* The import of the memory that the descriptor of a SOURCE names, for a device that reads len_bytes of it; it is begun
 * if there is none. One that is running takes waits. NULL: there will be none, with the reason in ret_error. */
struct conn_import *conn_import_get(struct tl_conn *conn, const struct tl_descriptor *descriptor, uint64_t len_bytes,
                                    struct tl_device device, uint64_t *ret_offset_bytes, struct tl_error *ret_error);
void conn_import_put(struct conn_import *import);
/* The peer has given this memory back. */
void conn_imports_gone(struct tl_conn *conn, uint64_t number);
void conn_imports_fini(struct tl_conn *conn);

/* --------------------------------------------------------------------------------------------- response_lend.c -- */

void conn_lent_copies_fini(struct tl_conn *conn);

/* ------------------------------------------------------------------------------------------------- handshake.c -- */

/* Errors: TL_RESOURCE_EXHAUSTED: no registered memory for the probe. */
enum tl_status handshake_init(struct tl_conn *conn, struct tl_error *ret_error) TL_MUST_USE;
/* Takes over what the peer's address says. Errors: those of tl_conn_connect. */
enum tl_status handshake_address_received(struct tl_conn *conn, const uint8_t *bytes, uint32_t len_bytes,
                                          struct tl_pair_address *ret_pair, struct tl_error *ret_error) TL_MUST_USE;
/* The queue pair is connected: the opener sends HELLO, the other side waits for it. */
void handshake_start(struct tl_conn *conn);
/* Says why the handshake has come no further, as the status of the connection. broken: why the queue pair broke; NULL:
 * the time is up. */
void handshake_explain(const struct tl_conn *conn, const struct tl_error *broken, struct tl_error *ret_reason);
void handshake_hello(struct tl_conn *conn, const struct tl_message *message);
/* The peer has written into our probe. */
void handshake_probe(struct tl_conn *conn);
/* PROBED has come: our write has arrived with the right bytes. */
void handshake_probed(struct tl_conn *conn);
/* Measuring is over. */
void handshake_measured(struct tl_conn *conn);
/* Whether a read of the peer's probe is under way. */
bool handshake_is_reading(const struct tl_conn *conn);
/* Frees what the handshake has left. */
void handshake_fini(struct tl_conn *conn);

/* --------------------------------------------------------------------------------------------------- measure.c -- */

void measure_init(struct tl_conn *conn);
/* The size of the write that is under way, or that comes next. */
uint64_t measure_size(const struct tl_conn *conn);
/* Begins to measure: the peer has exposed its probe. handshake_measured follows, unless the connection breaks. */
void measure_start(struct tl_conn *conn);

/* -------------------------------------------------------------------------------------------- request_device.c -- */

/* Creates a destination on a device for the request. *ret_tensor is NULL while its memory is being allocated: then the
 * request waits, and is placed again. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status request_create_on_device(struct request *request, struct tl_device device,
                                        const struct tl_meta_data *meta_data, struct tl_tensor **ret_tensor,
                                        struct tl_error *ret_error) TL_MUST_USE;

/* --------------------------------------------------------------------------------------------------- request.c -- */

/* Begins requests for waiting fetches, as long as there are handles. Returns true when there are more for another
 * round. */
bool requests_begin(struct tl_conn *conn);
/* A message about a request of ours: META_DATA_UPDATE, DONE, ERROR_STATUS, CANCELLED, MAPPED or SOURCE. */
void requests_message(struct tl_conn *conn, const struct tl_message *message);
void requests_immediate(struct tl_conn *conn, uint32_t immediate, uint64_t len_bytes);
/* Returns whether a large value waits for a bounce buffer that it could have, because others have been copied on. */
bool requests_can_give_laps(const struct tl_conn *conn);
/* Gives bounce buffers to large values that wait for them, as others have been copied on. */
void requests_give_laps(struct tl_conn *conn);
/* Completes the fetches that are finished, as far as this pump may hash and copy their bytes, and those that end
 * without a request. */
void requests_complete_fetches(struct tl_conn *conn);
/* Whether what this side receives is read. */
bool requests_are_read(const struct tl_conn *conn);
/* The queue pair is drained: ends the requests that are open, as many as the quota allows. Returns whether none is
 * left.
 */
bool requests_break(struct tl_conn *conn);
bool requests_are_over(const struct tl_conn *conn);
/* Frees the requests whose fetches are completed; what waited was posted before. */
void requests_free_completed(struct tl_conn *conn);

/* -------------------------------------------------------------------------------------------------- response.c -- */

/* A message about a request of the peer: REQUEST, which is made complete, RE_REQUEST or CANCEL. */
void responses_message(struct tl_conn *conn, struct tl_message *message);
/* A write without bytes has come: the peer has read the source of the response with this handle. */
void responses_released(struct tl_conn *conn, uint32_t handle);
/* Posts a message without content about a request, such as CANCELLED, as soon as there is a slot. It may stay unsent
 * when the connection ends. */
void conn_send_notice(struct tl_conn *conn, enum tl_message_type type, uint32_t handle);
/* The queue pair is drained: ends the responses that are open, as many as the quota allows. Returns whether none is
 * left. */
bool responses_break(struct tl_conn *conn);
bool responses_are_over(const struct tl_conn *conn);

#endif
