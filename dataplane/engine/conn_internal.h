// SPDX-License-Identifier: Apache-2.0
/*
 * A connection as its files see it: conn.c (life, credits, turns), conn_memory.c (memory), handshake.c (how it comes
 * up), measure.c (how fast it is), request.c (what we ask), response.c (what the peer asks).
 *
 * Four scarce things pass through here, each with one queue: slots at the peer and room in the queue pair, which turns
 * wait for; windows, which requests wait for; handles, which fetches wait for; room in a pool, which requests and
 * responses wait for.
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
    struct tl_peer_memories *peer_memories; /* NULL: not under TL_KEYS_REGION */
    struct tl_engine_options options;
    const struct tl_source_ops *source;
    void *source_context;
    uint64_t piece_bytes; /* of one write */
    struct tl_list conns;
    uint64_t name_seed; /* of the numbers of peers' names: nobody can choose a name with the number of another one */
    struct tl_engine_stats stats;
    struct tl_message incoming; /* the message that is being handled */
    struct tl_message outgoing; /* the message that is being composed */
    uint8_t slot[TL_SLOT_BYTES];
};

/* Something that wants to post one message or write. Waits in conn->turns for a slot at the peer and for room. */
struct pending_post {
    struct tl_list place;
    /* Posts at most one message or write, and one expose before it; true when it wants another turn. */
    bool (*post)(struct pending_post *pending);
};

/* What the CPU hashes and copies of tensors in one pump, about: then messages come first. A peer takes for dead who is
 * busy for longer than its peer_timeout_ns. */
#define PUMP_BYTES (16 * 1024 * 1024)

/* Of a probe: what is written to measure the rate. */
#define PROBE_BYTES 65536

#define MEASURE_WRITES 8

/* The course of the measuring (measure.c). */
struct measuring {
    struct pending_post pending;
    struct measured_write {
        struct tl_work work;
        struct tl_conn *conn;
    } writes[MEASURE_WRITES]; /* of one round */
    unsigned round;
    unsigned writes_left; /* of this round, to be posted */
    unsigned writes_open; /* posted */
    uint64_t bytes;       /* of this round, posted */
    int64_t began_ns;
};

/*
 *   NEW --connect--> HANDSHAKE --verified both ways--> UP --drain--> DRAINING --idle--> CLOSING
 *     any state --broken, refused, tl_conn_close--> CLOSING --drained, nothing held--> (freed)
 */
enum conn_state {
    CONN_NEW,       /* waits for the peer's address */
    CONN_HANDSHAKE, /* waits for the peer's HELLO, its probe, our writes, and its word that ours was right; or the timer
                     */
    CONN_UP,        /* carries requests */
    CONN_DRAINING,  /* takes no new ones; waits for those that are open */
    CONN_CLOSING,   /* waits until no operation is posted and nothing is held */
};

struct tl_conn {
    struct tl_engine *engine;
    struct tl_list engine_link;
    const struct tl_conn_events *events;
    void *owner;
    struct tl_identity peer;
    uint64_t self_incarnation;
    bool is_opener;
    enum conn_state state;
    struct tl_queue_pair *pair;
    struct tl_memory *memory;      /* where the peer may be let write: the engine's, or its own under TL_KEYS_REGION */
    struct tl_allocator allocator; /* of destinations, there */
    struct tl_memory_wait
        *placing_wait;      /* of the request that chooses its destination now; NULL: it has waited for none */
    uint64_t placing_bytes; /* ... and there was no room for so many; 0: that is not what it failed for */
    bool is_busy;           /* it has begun to greet: counted by the reactor */
    bool is_drained;
    struct tl_error close_reason;
    unsigned held_count; /* registrations that will come back to us, and waits for room */
    struct tl_closure end_closure;
    bool is_end_deferred;

    /* Handshake. */
    uint64_t own_token;  /* the peer must present it */
    uint64_t peer_token; /* we present it */
    uint64_t own_challenge;
    uint64_t peer_challenge;
    struct tl_descriptor peer_probe;
    uint8_t *probe; /* PROBE_BYTES that the peer writes, then as many that we write to it; NULL: not any more */
    struct tl_tensor *probe_block; /* of the pool, in which it lies; NULL: in memory of its own */
    struct tl_pin probe_pin;
    struct tl_region *probe_region; /* the pool's, or its own */
    struct tl_exposure probe_exposure;
    struct tl_work probe_work;  /* our write */
    struct tl_work revoke_work; /* the end of the exposure */
    unsigned probe_uses;        /* of these two, not done */
    struct measuring measuring;
    struct tl_conn_measures measures;
    struct pending_post hello_post;
    struct pending_post probe_post;
    struct pending_post probed_post;
    bool is_hello_right; /* the peer's HELLO was right */
    bool is_probe_right; /* its write has arrived */
    bool is_probed;      /* ours has */
    struct tl_timer handshake_timer;

    /* Credits, modulo 2^32. */
    uint32_t slots_used;     /* of the peer, by us */
    uint32_t slots_returned; /* of these, the peer has told or shown */
    uint32_t consumed;       /* slots of ours that the peer has used and that are posted again */
    uint32_t consumed_sent;
    uint32_t peer_slot_count;
    bool is_credit_wanted; /* a CREDIT is to be sent */
    bool is_ping_wanted;   /* and is to be answered by one */

    struct tl_list pending_posts; /* of struct pending_post: want a slot and room */
    struct tl_list revokes;       /* of struct pending_post: want room only */
    struct tl_list windows;       /* of struct pending_post of requests: want a window to become free */
    uint64_t exposures_count;     /* of requests, now */
    struct tl_work space_work;
    bool is_space_work_out; /* posted; its end tells that there is room */
    struct tl_closure pump_closure;
    bool is_pump_deferred;
    uint64_t posts_left_bytes; /* of PUMP_BYTES, what turns may still hash and copy in this pump */
    uint64_t
        completions_left_bytes; /* ... and what finished requests may; each side has its own, so that both get on */

    struct tl_timer peer_timer;
    struct tl_timer drain_timer; /* closing: the provider is looked at, even if nothing happens */
    int64_t heard_ns;            /* as the silence timer has seen it */
    bool has_heard;              /* since the silence timer looked */

    /* What we ask. */
    struct request **requests; /* [request_count] by index */
    uint16_t *generations;     /* [request_count] */
    uint16_t *free_indexes;    /* [request_count], a stack */
    uint32_t request_count;
    uint32_t free_count;
    struct tl_list spare_requests; /* of struct request: over, for those that begin */
    struct tl_list waiting;        /* of tl_fetch: want a handle */
    struct tl_list finished;       /* of struct request: done is to be called */
    struct tl_list completed;      /* of struct request: done was called; to be freed when what waits has left */
    struct tl_list refused;        /* of tl_fetch: cannot begin, or given up before; done is to be called */
    struct tl_timer reroute_timer; /* armed while fetches wait for a handle */
    bool has_moved;                /* since it was armed something has come for a request */
    struct tl_meta_cache *cache;

    /* What the peer asks. */
    struct response *spare_responses; /* over, for those that begin; linked by `next` */
    unsigned spare_response_count;
    struct response **responses; /* [response_places]: lists of those whose handles have the same index there */
    uint32_t response_places;    /* a power of two */
    uint32_t response_count;
    uint64_t late_response_count; /* parked too long: for each, one RE_REQUEST may still come */
    uint32_t notice_count;        /* CANCELLED that wait for their turn */
    uint32_t peer_request_count;
    struct pending_post goodbye_post;
    struct tl_work goodbye_work;
    bool is_goodbye_sent;
};

/* ------------------------------------------------------------------------------------------------------ conn.c -- */

static inline bool conn_is_open(const struct tl_conn *conn)
{
    return conn->state == CONN_UP || conn->state == CONN_DRAINING;
}

/* Wants a turn; once until it is taken. */
void conn_post_when_ready(struct tl_conn *conn, struct pending_post *pending);
/* Wants room only: for a revoke, or for a write without an immediate. */
void conn_post_when_space(struct tl_conn *conn, struct pending_post *pending);
/* Something posted is over: who waits for room may go on. */
void conn_space_freed(struct tl_conn *conn);
/* Looks at turns and finished requests at the end of this round. */
void conn_pump_later(struct tl_conn *conn);
/* Clears the message to compose and gives it a type. */
struct tl_message *conn_compose(struct tl_conn *conn, enum tl_message_type type, uint32_t handle);
/* Posts the message, and with it how many slots we have consumed, which is written into it. work may be NULL. */
void conn_post_message(struct tl_conn *conn, struct tl_message *message, struct tl_work *work);
/* Posts a write with an immediate; counts its slot. */
void conn_post_write(struct tl_conn *conn, const struct tl_region *region, const void *source, uint64_t len_bytes,
                     const struct tl_descriptor *destination, uint64_t offset_bytes, uint32_t immediate,
                     struct tl_work *work);
/* The peer broke the protocol: counts it, ends the connection. */
void conn_protocol_error(struct tl_conn *conn, const char *format, ...) __attribute__((cold, format(printf, 2, 3)));
/* The peer or its card has shown that it lives. */
static inline void conn_heard(struct tl_conn *conn)
{
    conn->has_heard = true;
}
/* An answer of the peer shows that it has consumed everything up to this slot. */
void conn_shows(struct tl_conn *conn, uint32_t slot);
/* Something is expected of the peer: watches for silence. */
void conn_watch(struct tl_conn *conn);
/* Something that was open is over: a draining or closing connection may go on. */
void conn_something_over(struct tl_conn *conn);
/* Arms a timer of the connection; without memory for that the connection ends. */
void conn_arm(struct tl_conn *conn, struct tl_timer *timer, int64_t after_ns);

/* ----------------------------------------------------------------------------------------------- conn_memory.c -- */

/* Sets conn->memory, which takes over what was made for this peer (NULL: the engine's), and conn->allocator. */
void conn_memory_init(struct tl_conn *conn, struct tl_memory *memory);
/* Gives a memory of the peer's own back. */
void conn_memory_fini(struct tl_conn *conn);

/* Whether it costs less to copy the tensor through the pool. Where memory must be registered, a small tensor in a large
 * allocation shares its registration with all others there; where it need not be, only the tensor's own size counts. */
bool conn_is_small(const struct tl_conn *conn, const struct tl_tensor *tensor);

/* Registers the memory of a tensor by the slow worker; deliver is called on the reactor and takes over the
 * registration, which it frees. False: no memory for that. */
struct registering {
    struct tl_registration registration;
    void *owner;
};
bool conn_register(struct tl_conn *conn, struct tl_memory *memory, void *owner, struct tl_tensor *tensor,
                   enum tl_region_access access, void (*run)(struct tl_closure *closure));
static inline struct registering *conn_registered(struct tl_closure *closure)
{
    return TL_CONTAINER_OF(closure, struct registering, registration.closure);
}

/* A wait for room in a pool; deliver is called on the reactor and takes over what comes back, which it drops. NULL: it
 * need not wait, for the reason in ret_error. */
struct conn_memory_wait {
    struct tl_memory_wait memory_wait;
    struct tl_conn *conn;
    struct tl_memory *memory;
    void *owner;
};
struct conn_memory_wait *conn_await_memory(struct tl_conn *conn, struct tl_memory *memory, uint64_t len_bytes,
                                           void *owner, void (*run)(struct tl_closure *closure),
                                           struct tl_error *ret_error);
/* What came in a closure. */
struct conn_memory_wait *conn_memory_came(struct tl_closure *closure);
/* Waits no more, and sets *wait to NULL; harmless when it is NULL. When the closure is on its way, *wait stays. */
void conn_leave_memory_wait(struct conn_memory_wait **wait);
/* Gives back what is left of it, frees it and sets *wait to NULL; harmless when it is NULL. */
void conn_drop_memory_wait(struct conn_memory_wait **wait);

/* A block of a pool: of the room (NULL: of what is free now). Errors: as tl_memory_tensor_take. */
enum tl_status conn_block_create(struct tl_memory *memory, struct conn_memory_wait *memory_wait, uint64_t len_bytes,
                                 struct tl_tensor **ret_block, struct tl_pin *ret_pin,
                                 struct tl_error *ret_error) TL_MUST_USE;
void conn_block_destroy(struct tl_memory *memory, struct tl_tensor **block, struct tl_pin *pin);

/* ------------------------------------------------------------------------------------------------- handshake.c -- */

/* Errors: TL_RESOURCE_EXHAUSTED: no registered memory for the probe. */
enum tl_status handshake_init(struct tl_conn *conn, struct tl_error *ret_error) TL_MUST_USE;
/* Takes over what the peer has told of itself. Errors: as tl_conn_connect. */
enum tl_status handshake_address_received(struct tl_conn *conn, const uint8_t *bytes, uint32_t len_bytes,
                                          struct tl_pair_address *ret_pair, struct tl_error *ret_error) TL_MUST_USE;
/* The queue pair is connected: says HELLO, or waits for it. */
void handshake_start(struct tl_conn *conn);
void handshake_hello(struct tl_conn *conn, const struct tl_message *message);
/* The peer has written into our probe. */
void handshake_probe(struct tl_conn *conn);
/* The peer says that our write was right. */
void handshake_probed(struct tl_conn *conn);
/* The measuring is over. */
void handshake_measured(struct tl_conn *conn);
/* Frees what the handshake has left. */
void handshake_fini(struct tl_conn *conn);

/* --------------------------------------------------------------------------------------------------- measure.c -- */

void measure_init(struct tl_conn *conn);
/* Begins to measure: the peer has exposed its probe. handshake_measured follows, unless the connection breaks. */
void measure_start(struct tl_conn *conn);

/* --------------------------------------------------------------------------------------------------- request.c -- */

/* Begins requests for waiting fetches, as far as there are handles. */
void requests_begin(struct tl_conn *conn);
/* Fetches have waited for a handle for reroute_ns. */
void requests_reroute(struct tl_timer *timer);
/* Messages about requests of ours: META_DATA_UPDATE, DONE, ERROR_STATUS, CANCELLED. */
void requests_message(struct tl_conn *conn, const struct tl_message *message);
void requests_immediate(struct tl_conn *conn, uint32_t immediate, uint64_t len_bytes);
/* Tells those that are finished, as far as this pump may hash and copy their bytes, and the fetches that could not
 * begin. */
void requests_tell(struct tl_conn *conn);
/* The queue pair is drained: ends what is open. */
void requests_break(struct tl_conn *conn);
bool requests_are_over(const struct tl_conn *conn);
/* Frees those that are told: nobody waits for that, and what was posted has left before. */
void requests_free_completed(struct tl_conn *conn);
/* Frees those that are kept. */
void requests_fini(struct tl_conn *conn);

/* -------------------------------------------------------------------------------------------------- response.c -- */

/* Messages of the peer's requests: REQUEST, RE_REQUEST, CANCEL. */
void responses_message(struct tl_conn *conn, const struct tl_message *message);
/* The queue pair is drained: ends what is open. */
void responses_break(struct tl_conn *conn);
bool responses_are_over(const struct tl_conn *conn);
/* Frees those that are kept. */
void responses_fini(struct tl_conn *conn);

#endif
