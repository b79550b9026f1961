// SPDX-License-Identifier: Apache-2.0
/*
 * The worker as its files see it: worker.c (open, close, queries), peer.c (who is reachable and how), source.c
 * (requests of peers), operation.c (sends and receives of this process).
 *
 * Everything here belongs to the loop's owner, except what says otherwise. The public functions bring their work to
 * that thread as letters.
 */
#ifndef SERVER_WORKER_INTERNAL_H
#define SERVER_WORKER_INTERNAL_H

#include <tensorlane/worker.h>

#include "base/mailbox.h"
#include "base/timer.h"
#include "config/config.h"
#include "control/control.h"
#include "server/driver.h"
#include "server/rendezvous.h"

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

struct tl_op;
struct tl_peer;

struct tl_worker {
    struct tl_config *config;
    const struct tl_config_task *task; /* NULL: a client that is no member */
    struct tl_settings settings;
    struct tl_identity self;
    uint16_t port;
    int64_t opened_ns;
    struct tl_loop *loop;
    struct tl_driver driver;
    struct tl_control *control;
    struct tl_rendezvous *table;
    bool is_closing;

    struct tl_peer **peers; /* [peer_count], in the order of the configuration */
    size_t peer_count;
    struct tl_list peer_waits; /* of struct tl_peer_wait (peer.c) */

    struct tl_op *ops;             /* by id: all that have not completed */
    uint64_t next_op;              /* any thread, atomic */
    uint64_t open_ops;             /* submitted and not completed; any thread, atomic */
    uint64_t next_request;         /* number of the latest request to a peer */
    uint64_t blocked_calls;        /* threads that wait inside the library; any thread, atomic */
    struct tl_list serves;         /* of struct served (source.c) */
    struct tl_timer expire_timer;  /* for reservations whose receiver broke off */
    struct pushed_account *pushed; /* what clients have pushed (source.c) */

    uint64_t requests_retried;
    struct tl_wait *stopped_wait; /* the closing thread */
    bool is_stopped;
};

/* A piece of work for the loop's owner, waited for by the thread that brought it. */
struct tl_command {
    struct tl_letter letter;
    struct tl_worker *worker;
    struct tl_wait wait;
    void (*run)(struct tl_command *command);
};

/* Runs command->run on the loop's owner and waits for it. Thread: any but the owner's. */
void tl_worker_run(struct tl_worker *worker, struct tl_command *command, void (*run)(struct tl_command *command));

/* Around every wait: close does not free the worker while a thread still leaves it. Thread: any. */
static inline void tl_worker_enter(struct tl_worker *worker)
{
    __atomic_fetch_add(&worker->blocked_calls, 1, __ATOMIC_ACQ_REL);
}

static inline void tl_worker_leave(struct tl_worker *worker)
{
    __atomic_fetch_sub(&worker->blocked_calls, 1, __ATOMIC_ACQ_REL);
}

/* ------------------------------------------------------------------------------------------------------- peers -- */

enum tl_status tl_peers_create(struct tl_worker *worker, struct tl_error *ret_error) TL_MUST_USE;
void tl_peers_destroy(struct tl_worker *worker);
/* Connects to all of them, where the configuration says so. */
void tl_peers_start(struct tl_worker *worker);
/* Stops trying; links are left to the control plane. */
void tl_peers_stop(struct tl_worker *worker);

/* A link that a peer has opened and greeted on. */
void tl_peers_link_up(struct tl_worker *worker, struct tl_link *link);
enum tl_status tl_peers_describe(struct tl_worker *worker, struct tl_description *description,
                                 struct tl_error *ret_error) TL_MUST_USE;

/* NULL: no such peer. Thread: any; the set of peers does not change while the worker is open. */
struct tl_peer *tl_peer_by_id(const struct tl_worker *worker, tl_peer_id id);
bool tl_peer_is_self(const struct tl_peer *peer);
const char *tl_peer_name(const struct tl_peer *peer);
/* "up", or the state and why it is not up. */
void tl_peer_format_state(const struct tl_peer *peer, char *buffer, size_t capacity);

/* A fetch on its way to a peer: waits there until the peer is up, then is on its link. */
struct tl_peer_request {
    struct tl_fetch fetch;
    struct tl_peer *peer;
    struct tl_list place; /* in the peer's list of those that wait */
    struct tl_link *link; /* that carries it; NULL: it waits, or is not started */
};

/* Asks the peer as soon as it is up; fetch.ops->done follows once, unless cancelled. */
void tl_peer_fetch(struct tl_peer *peer, struct tl_peer_request *request);
void tl_peer_cancel(struct tl_peer_request *request);
/* To be told by fetch.ops->done, first thing. */
void tl_peer_fetch_done(struct tl_peer_request *request);

/* ------------------------------------------------------------------------------------------------------ source -- */

/* The worker's half of tl_control_handlers. */
extern const struct tl_control_handlers tl_worker_handlers;
/* Fails the requests of peers that still wait for a tensor. */
void tl_source_refuse_waiting(struct tl_worker *worker);
/* Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_source_init(struct tl_worker *worker, struct tl_error *ret_error) TL_MUST_USE;
void tl_source_fini(struct tl_worker *worker); /* after a failed init too */

/* -------------------------------------------------------------------------------------------------- operations -- */

/* Ends every open operation, or with `step` those of one step, that receives from a peer. */
void tl_ops_fail_receives(struct tl_worker *worker, const uint64_t *step, const struct tl_error *status);
/* Lets go of the sends whose memory nobody but this worker's own receivers holds: they keep it beyond the worker. */
void tl_ops_forget_loans(struct tl_worker *worker);

#endif
