// SPDX-License-Identifier: Apache-2.0
/*
 * A connection with one peer, as the files of the engine see it: struct tl_conn is made of one struct for each thing
 * that the connection keeps. On the right is what each file takes care of.
 *
 *   conn.c            how it begins and ends, what arrives, and when the peer is given up    ending, peer_timeout
 *   conn_posts.c      what waits to be posted, and credits                                   posts, credits
 *   conn_memory.c     registrations and memory of pools, from the registration thread        ending.held_count
 *   handshake.c       how it comes up                                                        handshake
 *   handshake_reason.c  why it does not come up
 *   measure.c         how fast it is                                                         handshake.measuring
 *   request*.c        what we ask of the peer                                                requests
 *   response*.c       what the peer asks of us                                               responses
 *
 * request_memory.c and response_memory.c count ending.held_count down when their registrations come back.
 *
 * Five things are scarce, and each has a queue. Posts wait for slots at the peer and for space in the queue pair
 * (posts.slot_queue, posts.space_queue). Requests and responses wait for windows (posts.window_queue). Requests that
 * read wait until one of the reads that are posted is over (posts.reads.queue). Fetches wait for handles
 * (requests.waiting). Requests and responses wait for memory of a pool (struct conn_memory_wait).
 */
#ifndef DATAPLANE_ENGINE_CONN_INTERNAL_H
#define DATAPLANE_ENGINE_CONN_INTERNAL_H

#include "base/check.h"
#include "base/list.h"
#include "base/timer.h"
#include "dataplane/engine/engine.h"
#include "dataplane/engine/message.h"
#include "dataplane/engine/meta_cache.h"

struct tl_engine {
    struct tl_reactor *reactor;
    struct tl_provider *provider;
    struct tl_memory *memory;
    struct tl_peer_memories *peer_memories; /* NULL unless the keys are TL_KEYS_REGION */
    struct tl_engine_options options;
    const struct tl_source_ops *source;
    void *source_context;
    uint64_t piece_bytes; /* the most that one write carries */
    struct tl_list conns;
    struct tl_engine_stats stats;
    struct tl_message incoming; /* the message that is being handled */
    struct tl_message outgoing; /* the message that is being composed */
    uint8_t slot[TL_SLOT_BYTES];
};

/* ------------------------------------------------------------------------------------------- posts and credits -- */

/* Something that waits to post one message or one write. */
struct pending_post {
    struct tl_list place; /* in one of the lists of struct conn_posts */
    /* Posts at most one message or write, and at most one expose before it. Returns true when it wants to post again
     * and is to be queued for that; false when it does not, or has queued itself. */
    bool (*post)(struct pending_post *pending);
};

/* How many bytes of tensors the CPU hashes and copies in one pump, about. After that messages are handled: a peer takes
 * a worker for dead that is silent for longer than peer_timeout_ns. */
#define PUMP_BYTES (16 * 1024 * 1024)

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
    struct tl_list queue; /* struct pending_post of requests: each posts one read in its turn */
    uint32_t posted_count;
    struct conn_read entries[MAX_READS];
};

/* What waits to be posted, and the pump that posts it at the end of a round. */
struct conn_posts {
    struct tl_list slot_queue;   /* struct pending_post: these need a slot at the peer, and space in the queue pair */
    struct tl_list space_queue;  /* struct pending_post: these need space in the queue pair only */
    struct tl_list window_queue; /* struct pending_post: these need a window of another request or response */
    uint64_t windows_used;       /* windows that requests and responses have now */
    uint64_t response_budget_bytes;   /* how much of PUMP_BYTES is left for responses in this pump */
    uint64_t completion_budget_bytes; /* how much of PUMP_BYTES is left for finished requests in this pump */
    struct tl_work space_work;        /* completes when there is space in the queue pair again */
    bool is_space_work_out;           /* space_work is posted */
    bool is_pump_queued;              /* pump_closure is queued */
    struct tl_closure pump_closure;
    struct conn_reads reads;
};

/* Slots are the receive buffers that each side has posted for messages and immediates of the other. All numbers but
 * peer_slot_count are counted modulo 2^32 since the connection began. */
struct conn_credits {
    uint32_t peer_slots_used;     /* slots at the peer that we have used */
    uint32_t peer_slots_returned; /* how many of these the peer has given back, as far as we know */
    uint32_t own_slots_returned;  /* slots of ours that the peer has used and that are posted again */
    uint32_t own_slots_reported;  /* the last value of own_slots_returned that we have sent */
    uint32_t peer_slot_count;     /* how many slots the peer has */
    bool is_wanted;               /* a CREDIT is to be sent */
    bool is_ping_wanted;          /* the CREDIT is to be answered by one */
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

/* The allocator of destinations, and what it was last asked for. */
struct conn_placing {
    struct tl_allocator allocator; /* creates destinations in conn->memory */
    struct tl_memory_wait *wait;   /* memory that the request being placed has waited for; NULL: it has not waited */
    uint64_t missing_bytes;        /* the size that the pool lacked; 0: it lacked nothing */
};

/* What we ask of the peer. A handle is an index into `by_index` with a generation. */
struct conn_requests {
    struct request **by_index; /* [capacity]; NULL: no request has this index */
    uint16_t *generations;     /* [capacity] */
    uint16_t *free_indexes;    /* [capacity], a stack of free_count indexes */
    uint32_t capacity;         /* how many requests we may have open */
    uint32_t free_count;
    uint32_t peer_capacity;     /* how many requests the peer takes at a time */
    bool has_progressed;        /* something has come for a request since reroute_timer was armed */
    struct tl_list spare;       /* struct request: ended ones that are used again */
    struct tl_list waiting;     /* struct tl_fetch: they need a handle */
    struct tl_list finished;    /* struct request: their fetches are to be completed */
    struct tl_list completed;   /* struct request: their fetches are completed; freed at the end of the pump */
    struct tl_list unrequested; /* struct tl_fetch: refused, cancelled or rerouted before they had a request, and to be
                                   completed */
    struct tl_timer reroute_timer; /* armed while fetches wait for a handle */
    struct tl_meta_cache *cache;
    struct conn_placing placing;
};

/* What the peer asks of us. */
struct conn_responses {
    struct response **by_handle; /* [place_count]: lists of the responses whose handles end with these bits */
    uint32_t place_count;        /* a power of two */
    uint32_t count;              /* open responses */
    struct response *spare;      /* ended ones that are used again, linked by `next` */
    unsigned spare_count;
    uint32_t cancelled_count; /* CANCELLED messages that wait to be posted */
    uint64_t late_count;      /* responses that were parked for too long; one RE_REQUEST may still come for each */
    uint64_t shown_bytes;     /* the sizes of all sources that the peer may read now, added up */
    uint64_t released_count;  /* sources that the peer has read, since the connection began */
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
    bool is_end_queued;   /* closure is queued */
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
/* The same for a post that needs no slot: a revoke, or a write without an immediate. */
void conn_post_when_space(struct tl_conn *conn, struct pending_post *pending);
/* Queues a post of one read, which waits for its turn. */
void conn_post_when_readable(struct tl_conn *conn, struct pending_post *pending);
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
/* Posts the message, and with it how many slots we have consumed, which is written into it. work may be NULL. */
void conn_post_message(struct tl_conn *conn, struct tl_message *message, struct tl_work *work);
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
/* The same for a holder that can do without the block, and may keep it for long because the peer decides that: of what
 * is free now, and only while all blocks together take at most one region or half of the pool, and never more than half
 * of what the pool may grow to. The rest is for holders that need a block to go on. Returns false when no block is free
 * within these limits. */
bool conn_block_create_spare(const struct tl_conn *conn, struct tl_memory *memory, uint64_t len_bytes,
                             struct tl_tensor **ret_block, struct tl_pin *ret_pin) TL_MUST_USE;
void conn_block_destroy(struct tl_memory *memory, struct tl_tensor **block, struct tl_pin *pin);

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

/* --------------------------------------------------------------------------------------------------- request.c -- */

/* Begins requests for waiting fetches, as long as there are handles. */
void requests_begin(struct tl_conn *conn);
/* Fetches have waited for a handle for reroute_ns. */
void requests_reroute(struct tl_timer *timer);
/* A message about a request of ours: META_DATA_UPDATE, DONE, ERROR_STATUS, CANCELLED, MAPPED or SOURCE. */
void requests_message(struct tl_conn *conn, const struct tl_message *message);
void requests_immediate(struct tl_conn *conn, uint32_t immediate, uint64_t len_bytes);
/* Completes the fetches that are finished, as far as this pump may hash and copy their bytes, and those that end
 * without a request. */
void requests_complete_fetches(struct tl_conn *conn);
/* Whether what this side receives is read. */
bool requests_are_read(const struct tl_conn *conn);
/* The queue pair is drained: ends the requests that are open. */
void requests_break(struct tl_conn *conn);
bool requests_are_over(const struct tl_conn *conn);
/* Frees the requests whose fetches are completed; what waited was posted before. */
void requests_free_completed(struct tl_conn *conn);
/* Frees the spare requests. */
void requests_fini(struct tl_conn *conn);

/* -------------------------------------------------------------------------------------------------- response.c -- */

/* A message about a request of the peer: REQUEST, RE_REQUEST or CANCEL. */
void responses_message(struct tl_conn *conn, const struct tl_message *message);
/* A write without bytes has come: the peer has read the source of the response with this handle. */
void responses_released(struct tl_conn *conn, uint32_t handle);
/* Posts a message without content about a request, such as CANCELLED, as soon as there is a slot. It may stay unsent
 * when the connection ends. */
void conn_send_notice(struct tl_conn *conn, enum tl_message_type type, uint32_t handle);
/* The queue pair is drained: ends the responses that are open. */
void responses_break(struct tl_conn *conn);
bool responses_are_over(const struct tl_conn *conn);
/* Frees the spare responses. */
void responses_fini(struct tl_conn *conn);

#endif
