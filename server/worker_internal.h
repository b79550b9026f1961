// SPDX-License-Identifier: Apache-2.0
/*
 * The worker as its files see it: worker*.c (open, close, queries), peer*.c and data_connection*.c (which peers are
 * reachable, and how), source.c and serving.c (requests of peers), operation*.c (sends and receives of this process),
 * transport*.c and session.c (the transports).
 *
 * Everything here belongs to the loop's owner unless its comment says otherwise. The public functions pass their work
 * to that thread as closures.
 */
#ifndef SERVER_WORKER_INTERNAL_H
#define SERVER_WORKER_INTERNAL_H

#include <tensorlane/worker.h>

#include "base/hash_table.h"
#include "base/ip.h"
#include "base/log_limit.h"
#include "base/mailbox.h"
#include "base/timer.h"
#include "config/config.h"
#include "control/control.h"
#include "server/progress/progress.h"
#include "server/progress/executor.h"
#include "server/peers/added_peers.h"
#include "server/probe_values.h"
#include "server/put_sources.h"
#include "server/transports/transports.h"
#include "server/rendezvous/rendezvous.h"
#include "server/gone_processes.h"
#include "server/operation_ending.h"
#include "server/transfers/serving.h"

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

struct op_call;
struct tl_op;
struct tl_op_step;
struct tl_subscription;
struct tl_peer_op;
struct tl_peer;
struct tl_probe_round;
struct tl_session;
struct tl_data_connection;
struct tl_data_connections;
struct tl_troubles;
struct tl_permissions;

/* The configuration with which the worker was opened. */
struct worker_setup {
    struct tl_config *config;
    const struct tl_config_task *task; /* NULL: the worker is a client and no member of the cluster */
    struct tl_config_task own_task;    /* `task` of a worker that was opened with an address, without a cluster */
    char own_name[TL_MAX_NAME_BYTES];  /* that of own_task, and its job */
    char own_job[TL_CONFIG_JOB_BYTES];
    char address[TL_MAX_ADDRESS_BYTES]; /* what peers dial; "": nothing */
    uint16_t port;
    int64_t opened_ns;
};

/* The transports of a worker. */
struct worker_transports {
    struct tl_transport_slot transports[TL_MAX_TRANSPORTS]; /* [transport_count], the preferred one first */
    size_t transport_count;
    bool is_transport_required; /* "rdma": "require": tensors travel over these transports only */
};

/* Probes of the peers (server/peers/prober.h). */
struct worker_probing {
    struct tl_probe_round *round;   /* under way; NULL: none */
    struct tl_probe_results latest; /* what the latest round found; items NULL: there was none */
    int64_t latest_ns;              /* when it ended */
};

/* The log of connections that are refused for one kind of reason. */
struct worker_refusal_log {
    struct tl_log_limit limit;
    uint64_t unlogged_count; /* refusals since the last that was logged */
};

/* Which peers are reachable, and which callers may connect. */
struct worker_members {
    struct tl_peer **peers; /* [peer_count], in the order of the configuration; they stay */
    size_t peer_count;
    struct tl_added_peers added;  /* the peers of tl_worker_add_peer */
    struct tl_list removed_peers; /* list of struct tl_peer: those of them that something still refers to */
    /* [peer_network_count] networks from which members may connect (server/peers/admission.h) */
    struct tl_ip_network *peer_networks;
    size_t peer_network_count;
    bool takes_any_origin;                     /* members may connect from everywhere */
    struct worker_refusal_log origin_log;      /* names of others, and of this task; the limit is for each task */
    struct worker_refusal_log incarnation_log; /* incarnations of other processes; for each task and address */
    struct tl_list client_peers; /* list of struct client_peer (client_peer.c): links of clients that are no members */
    struct tl_list peer_waits;   /* list of struct tl_peer_wait (peer.c) */
    struct worker_probing probing;
    struct tl_permissions *permissions; /* which caller may do what; NULL: without certificates, everybody everything */
};

/* So many values of sends are put into the table together. */
#define TL_UNSENT_COUNT 16

/* The operations that begin. */
struct worker_starting {
    struct tl_list groups;                 /* struct op_group with members that have not begun */
    struct tl_op *unsent[TL_UNSENT_COUNT]; /* sends that have begun, and whose values are not in the table yet */
    size_t unsent_count;                   /* 0 but while operations are being started */
};

/* The operations of this process. */
struct worker_operations {
    struct tl_hash_table calls; /* struct op_call: those with operations that have not completed, by id */
    struct worker_starting starting;
    struct tl_subscription *subscriptions; /* all that have not ended, by id (subscription.c) */
    struct tl_peer_op *peer_ops;           /* all that have not completed, by id (peer_operation.c) */
    struct tl_op_step *steps;              /* the receives among them, by step */
    uint64_t step_visits;                  /* number of operations that ends and aborts of steps have looked at */
    struct tl_command *ending_step;        /* the end or abort of a step that is under way; NULL: none is */
    uint64_t slot_visits;   /* how many requests of subscriptions were looked at for the order of values */
    uint64_t scan_count;    /* how often all members were looked at that have not begun */
    uint64_t next_op;       /* id of the latest operation; any thread, atomic */
    uint64_t open_ops;      /* number of operations that were submitted and are not completed; any thread, atomic */
    uint64_t next_request;  /* number of the latest request to a peer */
    uint64_t blocked_calls; /* number of threads that wait inside the library; any thread, atomic */
    uint64_t requests_retried;
    uint64_t sends_dropped; /* sends whose step ended before the table had them */
};

/* The state of the requests of peers and clients. */
struct worker_sources {
    struct tl_timer expire_timer; /* ends reservations whose receiver has disconnected */
    struct tl_closure expire_closure;
    bool is_expire_asked; /* expire_closure was posted and has not come yet; any thread, atomic */
    struct tl_gone_processes gone;
    struct tl_shares *pushed;   /* the parts of limits.held that clients use (source.c) */
    struct tl_shares *listings; /* the bytes of listings that were made for clients (walk.c) */
    struct tl_probe_values probe_values;
    struct tl_put_sources puts; /* the tensors of this worker's puts, for the peers that accept them */
    struct tl_list put_fetches; /* struct tl_put_fetch that wait until a data connection is up */
    struct tl_list ended_walks; /* list of struct walk (walk.c) that are to be freed */
    struct tl_closure ended_walks_closure;
};

/* The state of closing the worker. */
struct worker_closing {
    size_t draining_transports; /* number of transports that have not drained yet */
    void (*transports_drained)(void *context);
    void *transports_drained_context;
    bool is_closing;
    struct tl_error reason; /* with which operations end */
    struct tl_ops_ending ending;
    struct tl_wait *stopped_wait; /* the closing thread waits here */
    int64_t stop_deadline_ns;
    bool is_stopped;
};

struct tl_worker {
    struct tl_settings settings;
    struct tl_identity self;
    struct tl_loop *loop;
    struct tl_executor executor; /* posts closures to the loop's owner */
    struct tl_progress_engine progress;
    struct tl_control *control;
    struct tl_rendezvous *table;
    struct tl_serving serving; /* serves the requests that come over links */
    struct worker_setup setup;
    struct worker_transports data_plane;
    struct worker_members members;
    struct worker_operations operations;
    struct worker_sources sources;
    struct worker_closing closing;
    struct tl_troubles *troubles; /* NULL: the worker is a client */
};

/* Does what tl_worker_open does, with the given transports, the preferred one first. There may be TL_MAX_TRANSPORTS at
 * most; all outlive the worker. */
enum tl_status tl_worker_open_with(const struct tl_worker_options *options,
                                   const struct tl_transport_source *const *transports, size_t transport_count,
                                   struct tl_worker **ret_worker, struct tl_error *ret_error) TL_MUST_USE;

/* A piece of work for the loop's owner. The thread that submits it waits for its end. */
struct tl_command {
    struct tl_closure closure;
    struct tl_worker *worker;
    struct tl_wait wait;
    void (*run)(struct tl_command *command);
    bool is_unfinished; /* it runs once more, when others had their turn; set by run */
};

/* Runs command->run on the loop's owner and waits for it. Thread: any but the owner's. */
void tl_worker_run(struct tl_worker *worker, struct tl_command *command, void (*run)(struct tl_command *command));
/* The same between tl_worker_enter and tl_worker_leave. */
void tl_worker_run_inside(struct tl_worker *worker, struct tl_command *command,
                          void (*run)(struct tl_command *command));

/* This and tl_worker_leave enclose every wait, so that close does not free the worker while a thread still leaves it.
 * Thread: any. */
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
/* The address of a worker without a cluster has its port now. */
void tl_peers_address_known(struct tl_worker *worker);
/* Connects to all peers if the configuration says so. */
void tl_peers_start(struct tl_worker *worker);
/* Ends all attempts to connect; the control transport closes the links. */
void tl_peers_stop(struct tl_worker *worker);

/* Takes a link that a peer has opened and whose handshake is complete. */
void tl_peers_link_up(struct tl_worker *worker, struct tl_link *link);
/* Returns why memory of users is copied twice on the way to a peer over this transport, which is one within the host;
 * NULL: to no peer is it copied twice. The text is never freed. */
const char *tl_peers_outside_refusal(const struct tl_worker *worker, const struct tl_transport_source *source);
enum tl_status tl_peers_describe(struct tl_worker *worker, struct tl_description *description,
                                 struct tl_error *ret_error) TL_MUST_USE;

/* Returns how many data connections to peers keep breaking, and which is the first of them. */
size_t tl_peers_find_breaking(const struct tl_worker *worker, const struct tl_peer **ret_peer,
                              const struct tl_data_connection **ret_connection);

/* Returns the peer with this id, which tl_peer_release lets go of; NULL: there is none. Thread: any. */
struct tl_peer *tl_peer_acquire(struct tl_worker *worker, tl_peer_id id);
/* Adds a reference to a peer that the caller has one to. Thread: any. */
void tl_peer_retain(struct tl_peer *peer);
void tl_peer_release(struct tl_peer *peer); /* thread: any; NULL is accepted */
/* Returns the task of the configuration with this name; NULL: there is none. Thread: any. */
struct tl_peer *tl_peer_by_name(const struct tl_worker *worker, const char *name);
/* The same as tl_peer_acquire without a reference. Thread: the loop's owner. */
struct tl_peer *tl_peer_by_id(const struct tl_worker *worker, tl_peer_id id);
bool tl_peer_is_self(const struct tl_peer *peer);
/* Whether nothing can be asked of the peer any more, and why. Thread: the loop's owner. */
bool tl_peer_is_gone(const struct tl_peer *peer, struct tl_error *ret_reason);
/* Thread: the loop's owner, which gives an added peer the name that its process has. */
const char *tl_peer_name(const struct tl_peer *peer);
/* Writes the name and returns it. Thread: any. */
const char *tl_peer_copy_name(const struct tl_peer *peer, char ret_name[TL_MAX_NAME_BYTES]);
uint64_t tl_peer_incarnation(const struct tl_peer *peer); /* 0: there was no handshake yet */
/* Writes "up", or the state and the reason why the peer is not up. */
void tl_peer_format_state(const struct tl_peer *peer, char *buffer, size_t capacity);

/* What the owner of a request is asked and told: on the loop, and by the transport of a session on its reactor. There
 * `done` is tl_session_fetch_done, and the rest is the same. */
struct tl_request_ops {
    struct tl_fetch_ops on_loop, on_reactor;
};

/* A fetch on its way to a peer. It waits until the peer is up, and is then on the peer's link or on a session of a
 * transport. A closure takes it from the loop to the reactor and back. A request that waits is what most memory of a
 * worker may be spent on, so each field counts (tests/unit/operation_test.c). */
struct tl_peer_request {
    struct tl_closure closure; /* takes it to the reactor, a cancel after it, and back; its link: entry in the peer's
                                  list of waiting requests. First, so that the owner of a request can use it before and
                                  after */
    struct tl_fetch fetch;     /* its ops are the on_loop of a tl_request_ops, except while a session has it */
    struct tl_peer *peer;      /* NULL: the tensor of a put, which is fetched on one session only */
    union {
        struct tl_link *link;       /* with TL_CARRIER_LINK */
        struct tl_session *session; /* with TL_CARRIER_SESSION */
    };
    uint8_t way;     /* enum request_way: where `closure` is, while a session has it; atomic */
    bool is_on_conn; /* the request is on the connection; used by the reactor only */
    bool is_probe;   /* it tries a data connection: it takes no link, and holds no other request up */
    uint8_t carrier; /* enum tl_carrier */
};

/* What carries a request. */
enum tl_carrier {
    TL_CARRIER_NONE,
    TL_CARRIER_LINK,
    TL_CARRIER_SESSION,
    TL_CARRIER_REFUSAL, /* it cannot travel: `closure` is deferred and tells why */
};

/* Initialises a request that was not made yet. */
void tl_peer_request_init(struct tl_peer_request *request, const struct tl_request_ops *ops);
/* Sends the request as soon as the peer is up; fetch.ops->done follows once, unless the request is cancelled. */
void tl_peer_fetch(struct tl_peer *peer, struct tl_peer_request *request);
/* Sends a request that the data connection has turned away over the link if that is up. The reason is never freed. */
void tl_peer_fetch_on_link(struct tl_peer *peer, struct tl_peer_request *request, const char *reason);
/* Cancels the request. Returns true when it was given up: done will not be called. Returns false when done follows, as
 * soon as the memory cannot be written any more. */
bool tl_peer_cancel(struct tl_peer_request *request) TL_MUST_USE;
/* Removes the request from its link; fetch.ops->done calls this before anything else. */
void tl_peer_fetch_done(struct tl_peer_request *request);
/* Reports to the peer that the request has ended without its tensor, if the peer may still keep a value for it. */
void tl_peer_give_up(struct tl_peer_request *request);
/* Acknowledges the tensor of this request again: it has arrived over a path that has ended, so that the peer may not
 * know. */
void tl_peer_answered(struct tl_peer *peer, uint64_t incarnation, uint64_t number);

/* Returns the data connections to the process with this incarnation, which this caller is, and of several those that
 * can carry a request first; NULL: there are none. */
const struct tl_data_connections *tl_peers_find_data(const struct tl_worker *worker, const struct tl_identity *caller,
                                                     uint64_t incarnation);
/* The same among the client peers. */
const struct tl_data_connections *tl_client_peers_find_data(const struct tl_worker *worker,
                                                            const struct tl_identity *caller, uint64_t incarnation);
/* Takes a link of a client that is no member of the cluster. */
void tl_client_peer_add(struct tl_worker *worker, struct tl_link *link);
/* Returns whether a client peer with another name or address has the same incarnation as this one. */
bool tl_client_peer_has_incarnation(const struct tl_worker *worker, const struct tl_identity *who);
/* Ends the links of client peers that have given this incarnation, which has turned out to be that of the member with
 * this name; the member may have opened one-way links. */
void tl_client_peers_evict(struct tl_worker *worker, const char *name, uint64_t incarnation);

/* ------------------------------------------------------------------------------------------------------ source -- */

/* The worker's implementation of tl_control_handlers. */
extern const struct tl_control_handlers tl_worker_handlers;
/* Frees the values that were reserved for receivers which did not come back in time: now, and later when the time of
 * others is over. Thread: any. */
void tl_source_expire_reservations(struct tl_worker *worker);
/* Prepares the worker for requests. Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_source_init(struct tl_worker *worker, struct tl_error *ret_error) TL_MUST_USE;
void tl_source_fini(struct tl_worker *worker); /* may be called after a failed init too */

/* Opens the device where the worker keeps what it publishes, if it is a member and the settings name one. Errors: as
 * tl_device_open, with what to do. Blocks: yes. */
enum tl_status tl_worker_open_device(const struct tl_worker *worker, struct tl_error *ret_error) TL_MUST_USE;
/* Publishes the files of the settings. Errors: the reason why one cannot be read or kept, naming file and tensor.
 * Blocks: yes. */
enum tl_status tl_worker_publish_files(struct tl_worker *worker, struct tl_error *ret_error) TL_MUST_USE;

/* Reads the counters of the worker and its transports. */
void tl_worker_count(struct tl_worker *worker, struct tl_worker_stats *ret_stats);
/* Implements `describe` of tl_control_handlers. */
enum tl_status tl_worker_describe(void *context, struct tl_description *ret_description,
                                  struct tl_error *ret_error) TL_MUST_USE;

/* -------------------------------------------------------------------------------------------------- operations -- */

/* Ends the open operations that receive from this peer (NULL: from any), as many as the loop's quota allows. *chain is
 * 0 at first, and then as the call before has left it. Returns false when others are left: call again. */
bool tl_ops_fail_receives(struct tl_worker *worker, const struct tl_peer *peer, const struct tl_error *status,
                          size_t *chain);
/* Ends the open receives of a step, those that are being delivered or those that are not, as many as the loop's quota
 * allows. Returns false when others are left: call again. */
bool tl_ops_fail_step(struct tl_worker *worker, uint64_t step, bool is_delivering, const struct tl_error *status);
/* Ends the subscriptions from this peer (NULL: all), as many of their buffers as the loop's quota allows. Returns false
 * when others are left: call again. */
bool tl_subscriptions_end(struct tl_worker *worker, const struct tl_peer *peer, const struct tl_error *status);
/* A data connection has changed: the fetches of puts that wait for it go on, or fail (put_fetch.c). */
void tl_put_fetches_go_on(struct tl_worker *worker);
/* Ends the operations at this peer, such as tl_put (NULL: at all), as many as the loop's quota allows. Returns false
 * when others are left: call again. */
bool tl_peer_ops_end(struct tl_worker *worker, const struct tl_peer *peer, const struct tl_error *status);
/* Ends the members of groups that belong to the step and have not begun; looks at as many as the loop's quota allows.
 * Adds to *send_count how many of them are sends. Returns false when others are left: call again, before the same is
 * done for another step. */
bool tl_ops_end_unstarted(struct tl_worker *worker, uint64_t step, const struct tl_error *status, uint64_t *send_count);
/* Forgets the sends whose memory is held only by receivers in this worker, which keep it after the worker was
 * closed. */
void tl_ops_forget_borrows(struct tl_worker *worker);

#endif
