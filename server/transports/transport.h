// SPDX-License-Identifier: Apache-2.0
/*
 * One transport of a worker: provider, registered memory, reactor and engine, and the thread that runs them. A worker
 * has several (server/transports/transports.h).
 *
 * Happy path: the settings determine which devices can be chosen; the first one through which a write has been verified
 * is taken (server/transports/transport_choice.h); memory is registered; the reactor gets a thread, which can lend it
 * (TL_PROGRESS_THREAD, server/progress/reactor_thread.h), or runs in the rounds of the loop (server/progress/poller.h);
 * connections to peers are sessions (server/peers/session.h); a serving that belongs to the reactor looks up what peers
 * request. Failure modes: if no device can be used there is no transport, and a reason is kept.
 *
 * Thread: the loop's owner, unless a function says otherwise. The reactor's objects are reached by closures only.
 */
#ifndef SERVER_TRANSPORTS_TRANSPORT_H
#define SERVER_TRANSPORTS_TRANSPORT_H

#include "config/config.h"
#include "control/client.h"
#include "dataplane/engine/engine.h"
#include "server/progress/reactor_thread.h"
#include "server/transfers/serving.h"
#include "server/transports/transport_choice.h"

struct tl_transport;
struct tl_worker;

/* By how much an attempt outlasts its handshake, so that the handshake gives the reason. */
#define TL_TRANSPORT_REASON_NS (500 * TL_NS_PER_MS)

/* Options for the parts of a transport. */
struct tl_transport_options {
    struct tl_memory_options memory;
    struct tl_reactor_options reactor;
    struct tl_engine_options engine;
    int64_t attempt_ns; /* how long one attempt to set up a data connection to a peer may take; longer than
                           engine.connect_ns, whose end says more about the reason */
};

/* The source of a transport: how its provider is found and opened. */
struct tl_transport_source {
    /* The name in messages and in paths, for example "verbs"; at most TL_CONNECTION_TRANSPORT_BYTES with NUL. */
    const char *name;
    /* Returns why these settings want no such transport; NULL: they want it. */
    const char *(*refusal)(const struct tl_settings *settings);
    /* Reads the options from the settings. */
    void (*read)(const struct tl_settings *settings, struct tl_transport_options *ret_options);
    /* Identifies this host, for a transport that reaches only workers of the same host. NULL: it reaches other hosts
     * too. */
    enum tl_status (*find_host)(void *context, uint8_t ret_host[TL_HOST_BYTES], struct tl_error *ret_error);
    /* Only where find_host is set. Returns what to change so that a peer of this host may connect from an address that
     * this host does not have; NULL: it may already. */
    const char *(*address_remedy)(const struct tl_settings *settings);
    /* Lists what may be opened, in order, at least one. address is the worker's own ("host:port", NULL: it has none).
     * Ownership: one block with all details, freed by the caller with free(). Errors: the reason why there is none.
     * Blocks. */
    enum tl_status (*list)(void *context, const struct tl_settings *settings, const char *address,
                           struct tl_transport_candidate **ret_candidates, size_t *ret_count,
                           struct tl_error *ret_error);
    /* Opens the candidate at this place of the list. Errors: the reason why it cannot be used. */
    enum tl_status (*open)(void *context, const struct tl_settings *settings, const char *address, unsigned order,
                           struct tl_provider **ret_provider, struct tl_error *ret_error);
    /* Describes what the open transport works with, for tools. NULL: its device is named, and why it was chosen. */
    void (*describe_state)(const struct tl_transport *transport, char *ret_text, size_t capacity);
    /* Describes a card for tools; detail is that of its candidate (NULL: nothing is known). Fills its part of the
     * description with new copies (strdup), or NULL where there is no memory. NULL: this transport has no cards. One
     * entry of TL_TRANSPORTS at most has it, because Identify describes one card. */
    void (*describe_card)(const void *detail, const struct tl_settings *settings,
                          struct tl_data_plane_description *ret_description);
    /* Changes the options that were read from the settings; NULL: they stay as they are. */
    void (*adjust)(void *context, struct tl_transport_options *options);
    void *context;
};

/* Returns half of this machine's memory: what "auto" means for memory that may be registered. */
uint64_t tl_transport_half_of_memory(void);
/* Returns how many requests of one peer may be open on a data connection: more than limits.waiting admits, so that
 * those whose values exist always find a place beside those that wait for theirs. */
uint32_t tl_transport_request_count(const struct tl_settings *settings);

/* The transport through shared memory, between workers of this host. */
extern const struct tl_transport_source tl_transport_local;
/* The transport through the RDMA cards of this machine. */
extern const struct tl_transport_source tl_transport_verbs;

/* Closures that leave a thread together, in one post at the end of its round. */
struct tl_outbox {
    struct tl_list closures;
    struct tl_closure post_closure; /* deferred while there are closures */
};

struct tl_transport {
    struct tl_worker *worker;
    const struct tl_transport_source *source;
    struct tl_executor executor; /* posts closures to the reactor's owner */
    struct tl_transport_options options;
    struct tl_provider *provider;
    struct tl_memory *memory;
    struct tl_reactor *reactor;
    struct tl_engine *engine;
    struct tl_serving serving;                 /* belongs to the reactor */
    char *describes_device;                    /* the chosen device and the reason, as in "mlx5_0:1: why this one" */
    char *passed_over;                         /* candidates before the chosen one, and why each has failed; "": none */
    char *not_tried;                           /* candidates after the chosen one; "": none */
    struct tl_transport_candidate *candidates; /* all candidates */
    unsigned order;                            /* index of the candidate that is open */
    struct tl_reactor_thread thread;
    bool has_thread;

    struct tl_outbox to_reactor; /* the loop's */
    struct tl_outbox to_loop;    /* the reactor's */
    struct tl_list sessions;     /* list of struct tl_session: all sessions that are not freed */
    struct tl_closure refuse_closure;
    struct tl_timer drain_deadline_timer;
    bool is_refused; /* refuse_closure has come back */
    bool is_draining;
    void (*drained)(void *context);
    void *drained_context;
};

/* Creates a transport: opens the provider and builds the rest. Errors: why there is none, as a text for people: those
 * of tl_transport_choose, tl_memory_create, tl_reactor_create and tl_engine_create, and TL_RESOURCE_EXHAUSTED: no
 * thread. Ownership: the caller destroys *ret_transport with tl_transport_destroy. */
enum tl_status tl_transport_create(struct tl_worker *worker, const struct tl_transport_source *source, bool has_thread,
                                   struct tl_transport **ret_transport, struct tl_error *ret_error) TL_MUST_USE;

/* Post a closure to the reactor, and back to the loop, at the end of this round and together with all others, so that
 * many requests need one lock and one wake. Closures come in the order in which they were sent. Thread: the loop's
 * owner for the first, the reactor's for the second. */
void tl_transport_send(struct tl_transport *transport, struct tl_closure *closure);
void tl_transport_send_back(struct tl_transport *transport, struct tl_closure *closure);
/* Send for the executor of a transport, and for that of a worker (tl_executor.send), in the same way. */
void tl_transport_executor_defer(const struct tl_executor *executor, struct tl_closure *closure);
bool tl_transport_executor_send(const struct tl_executor *executor, const struct tl_executor *to,
                                struct tl_closure *closure);
bool tl_worker_executor_send(const struct tl_executor *executor, const struct tl_executor *to,
                             struct tl_closure *closure);
/* Prepares both ways. */
void tl_transport_init_posts(struct tl_transport *transport);

/* Posts a closure to the reactor at once. Thread: any. */
static inline void tl_transport_post(struct tl_transport *transport, struct tl_closure *closure)
{
    transport->executor.post(&transport->executor, closure);
}

/* Reads the counters. Blocks: until the owner of the reactor has read them, within one round. */
void tl_transport_get_stats(struct tl_transport *transport, struct tl_engine_stats *ret_engine,
                            struct tl_memory_stats *ret_memory);

/* Returns whether the card has failed; *ret_why then says why, and what to do. Blocks: as tl_transport_get_stats. */
bool tl_transport_has_failed(struct tl_transport *transport, struct tl_error *ret_why);

/* Copies a tensor that is about to be published into registered memory, and keeps the copy with it: transports that
 * need their sources in such memory serve the copy (server/transfers/serving.h), all others the tensor. Errors: those
 * of tl_memory_tensor_create, and of the tensor's guard. */
enum tl_status tl_transport_copy(struct tl_transport *transport, struct tl_tensor *tensor,
                                 struct tl_error *ret_error) TL_MUST_USE;
/* Returns the copy that was kept with the tensor; NULL: none. Valid as long as the tensor. Thread: any. */
struct tl_tensor *tl_transport_copy_of(const struct tl_tensor *tensor);

/* Refuses requests of peers, lets those that run finish until deadline_ns, and ends all sessions. drained is called
 * once, when no session is left. */
void tl_transport_drain(struct tl_transport *transport, int64_t deadline_ns, void (*drained)(void *context),
                        void *context);
/* Reports that a session has been freed. */
void tl_transport_session_gone(struct tl_transport *transport);

/* Destroys a transport without sessions. NULL is accepted. Thread: any, when no thread runs its rounds any more. */
void tl_transport_destroy(struct tl_transport *transport);

#endif
