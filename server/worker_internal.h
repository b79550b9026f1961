// SPDX-License-Identifier: Apache-2.0
/*
 * The worker as its files see it: worker*.c (open, close, queries), peer*.c and data_connection*.c (who is reachable
 * and how), source.c and serving.c (requests of peers), operation*.c (sends and receives of this process), transport*.c
 * and session.c (the transports).
 *
 * Everything here belongs to the loop's owner, except what says otherwise. The public functions bring their work to
 * that thread as closures.
 */
#ifndef SERVER_WORKER_INTERNAL_H
#define SERVER_WORKER_INTERNAL_H

#include <tensorlane/worker.h>

#include "base/ip.h"
#include "base/mailbox.h"
#include "base/timer.h"
#include "config/config.h"
#include "control/control.h"
#include "server/progress/progress.h"
#include "server/progress/executor.h"
#include "server/transports/transports.h"
#include "server/rendezvous/rendezvous.h"
#include "server/transfers/serving.h"

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

struct tl_op;
struct tl_peer;
struct tl_session;

/* How the worker was opened. */
struct worker_setup {
    struct tl_config *config;
    const struct tl_config_task *task; /* NULL: a client that is no member */
    uint16_t port;
    int64_t opened_ns;
};

/* The transports of the data plane. */
struct worker_transports {
    struct tl_transport_slot transports[TL_MAX_TRANSPORTS]; /* [transport_count], the preferred one first */
    size_t transport_count;
    bool is_transport_required; /* "rdma": "require": nothing travels another way */
};

/* Who is reachable, and who may connect. */
struct worker_members {
    struct tl_peer **peers; /* [peer_count], in the order of the configuration */
    size_t peer_count;
    struct tl_ip_network
        *peer_networks; /* [peer_network_count]: members may call from there (server/peers/admission.h) */
    size_t peer_network_count;
    bool takes_any_origin;       /* from everywhere */
    struct tl_list client_peers; /* of struct client_peer (client_peer.c): all links of clients that are no members */
    struct tl_list peer_waits;   /* of struct tl_peer_wait (peer.c) */
};

/* The operations of this process. */
struct worker_operations {
    struct tl_op *ops;      /* by id: all that have not completed */
    uint64_t next_op;       /* any thread, atomic */
    uint64_t open_ops;      /* submitted and not completed; any thread, atomic */
    uint64_t next_request;  /* number of the latest request to a peer */
    uint64_t blocked_calls; /* threads that wait inside the library; any thread, atomic */
    uint64_t requests_retried;
};

/* What belongs to the requests of peers and clients. */
struct worker_sources {
    struct tl_timer expire_timer; /* for reservations whose receiver broke off */
    struct tl_closure expire_closure;
    bool is_expire_asked;       /* expire_closure is on its way; any thread, atomic */
    struct tl_shares *pushed;   /* what clients have of limits.held (source.c) */
    struct tl_shares *listings; /* bytes of listings that were made for clients (walk.c) */
    struct tl_list ended_walks; /* of struct walk (walk.c): to be freed */
    struct tl_closure ended_walks_closure;
};

/* How far closing the worker has come. */
struct worker_closing {
    size_t draining_transports; /* when it closes */
    void (*transports_drained)(void *context);
    void *transports_drained_context;
    bool is_closing;
    struct tl_wait *stopped_wait; /* the closing thread */
    int64_t stop_deadline_ns;
    bool is_stopped;
};

struct tl_worker {
    struct tl_settings settings;
    struct tl_identity self;
    struct tl_loop *loop;
    struct tl_executor executor; /* of the loop's owner */
    struct tl_progress_engine progress;
    struct tl_control *control;
    struct tl_rendezvous *table;
    struct tl_serving serving; /* requests over links */
    struct worker_setup setup;
    struct worker_transports data_plane;
    struct worker_members members;
    struct worker_operations operations;
    struct worker_sources sources;
    struct worker_closing closing;
};

/* tl_worker_open with transports from elsewhere, the preferred one first; at most TL_MAX_TRANSPORTS, all of which
 * outlive the worker. */
enum tl_status tl_worker_open_with(const struct tl_worker_options *options,
                                   const struct tl_transport_source *const *transports, size_t transport_count,
                                   struct tl_worker **ret_worker, struct tl_error *ret_error) TL_MUST_USE;

/* A piece of work for the loop's owner, waited for by the thread that brought it. */
struct tl_command {
    struct tl_closure closure;
    struct tl_worker *worker;
    struct tl_wait wait;
    void (*run)(struct tl_command *command);
};

/* Runs command->run on the loop's owner and waits for it. Thread: any but the owner's. */
void tl_worker_run(struct tl_worker *worker, struct tl_command *command, void (*run)(struct tl_command *command));

/* Around every wait: close does not free the worker while a thread still leaves it. Thread: any. */
static inline void tl_worker_enter(struct tl_worker *worker)
{
    __atomic_fetch_add(&worker->operations.blocked_calls, 1, __ATOMIC_ACQ_REL);
}

static inline void tl_worker_leave(struct tl_worker *worker)
{
    __atomic_fetch_sub(&worker->operations.blocked_calls, 1, __ATOMIC_ACQ_REL);
}

/* ------------------------------------------------------------------------------------------------------- peers -- */

enum tl_status tl_peers_create(struct tl_worker *worker, struct tl_error *ret_error) TL_MUST_USE;
void tl_peers_destroy(struct tl_worker *worker);
/* Connects to all of them, where the configuration says so. */
void tl_peers_start(struct tl_worker *worker);
/* Stops trying; links are left to the control transport. */
void tl_peers_stop(struct tl_worker *worker);

/* A link that a peer has opened and greeted on. */
void tl_peers_link_up(struct tl_worker *worker, struct tl_link *link);
/* Why memory of users is copied twice on the path to some peer of this host; NULL: to none. Lives for ever. */
const char *tl_peers_outside_refusal(const struct tl_worker *worker);
enum tl_status tl_peers_describe(struct tl_worker *worker, struct tl_description *description,
                                 struct tl_error *ret_error) TL_MUST_USE;

/* NULL: no such peer. Thread: any; the set of peers does not change while the worker is open. */
struct tl_peer *tl_peer_by_id(const struct tl_worker *worker, tl_peer_id id);
bool tl_peer_is_self(const struct tl_peer *peer);
const char *tl_peer_name(const struct tl_peer *peer);
/* "up", or the state and why it is not up. */
void tl_peer_format_state(const struct tl_peer *peer, char *buffer, size_t capacity);

/* A fetch on its way to a peer: waits there until the peer is up, then is on its link or on a session of the data
 * transport. Closures take it from the loop to the reactor and back. */
struct tl_peer_request {
    struct tl_fetch fetch;
    struct tl_peer *peer;
    struct tl_list place;           /* in the peer's list of those that wait */
    struct tl_link *link;           /* that carries it; NULL: none */
    bool is_refused;                /* done_closure is deferred: it cannot travel */
    const char *path_reason;        /* why it travels over the link; lives for ever */
    struct tl_session *session;     /* that carries it; NULL: none */
    const struct tl_fetch_ops *ops; /* the worker's, while session has put its own into the fetch */
    struct tl_closure start_closure;
    struct tl_closure cancel_closure;
    struct tl_closure done_closure;
    const struct tl_error *result; /* of done_closure; kept, NULL: TL_OK */
    bool is_cancel_out;            /* cancel_closure is at the reactor, or on its way */
    bool is_done;                  /* done_closure has come */
    bool is_on_conn;               /* the reactor's */
};

/* Asks the peer as soon as it is up; fetch.ops->done follows once, unless cancelled. */
void tl_peer_fetch(struct tl_peer *peer, struct tl_peer_request *request);
/* The same over the link if that is up, for this reason, which lives for ever: the data connection has turned it away.
 */
void tl_peer_fetch_on_link(struct tl_peer *peer, struct tl_peer_request *request, const char *reason);
/* True: it is given up, done will not be called. False: done follows, once the memory cannot be written any more. */
bool tl_peer_cancel(struct tl_peer_request *request) TL_MUST_USE;
/* To be told by fetch.ops->done, first thing. */
void tl_peer_fetch_done(struct tl_peer_request *request);
/* The request is over without its tensor: tells the peer, if it may still keep a value for it. */
void tl_peer_give_up(struct tl_peer_request *request);
/* The tensor of this request has arrived over a path that has ended: the peer may not have heard. */
void tl_peer_answered(struct tl_peer *peer, uint64_t incarnation, uint64_t number);

/* A link of somebody who is no member. */
void tl_client_peer_add(struct tl_worker *worker, struct tl_link *link);
/* Whether a client peer of another name or at another address has this one's incarnation. */
bool tl_client_peer_has_incarnation(const struct tl_worker *worker, const struct tl_identity *who);
/* The incarnation has turned out to be that of a member: ends the links of client peers that have given it. */
void tl_client_peers_evict(struct tl_worker *worker, uint64_t incarnation);

/* ------------------------------------------------------------------------------------------------------ source -- */

/* The worker's half of tl_control_handlers. */
extern const struct tl_control_handlers tl_worker_handlers;
/* Frees what was reserved for receivers that did not come back, now and when it is time. Thread: any. */
void tl_source_expire(struct tl_worker *worker);
/* Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_source_init(struct tl_worker *worker, struct tl_error *ret_error) TL_MUST_USE;
void tl_source_fini(struct tl_worker *worker); /* after a failed init too */

/* The counters of all transports. */
void tl_worker_count(struct tl_worker *worker, struct tl_worker_stats *ret_stats);
/* The handler of tl_control_handlers. */
enum tl_status tl_worker_describe(void *context, struct tl_description *ret_description,
                                  struct tl_error *ret_error) TL_MUST_USE;

/* -------------------------------------------------------------------------------------------------- operations -- */

/* Ends every open operation, or with `step` those of one step, that receives from a peer. */
void tl_ops_fail_receives(struct tl_worker *worker, const uint64_t *step, const struct tl_error *status);
/* Lets go of the sends whose memory nobody but this worker's own receivers holds: they keep it beyond the worker. */
void tl_ops_forget_borrows(struct tl_worker *worker);

#endif
