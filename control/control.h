// SPDX-License-Identifier: Apache-2.0
/*
 * The control plane of one worker: gRPC server and clients. The one header that this folder shows to server/.
 *
 * Happy path: tl_control_create on a loop, with who we are and with the handlers that know the tensors;
 * tl_control_start listens; peers' links arrive through handlers->link_up, our own are made with tl_link_open
 * (control/link.h); tl_control_stop drains; tl_control_destroy.
 *
 * Services: tensorlane.v1.Transfer and Cluster, grpc.health.v1.Health, grpc.reflection.v1 and v1alpha.
 *
 * Thread: the loop's owner, for everything; all handlers are called on it.
 */
#ifndef CONTROL_CONTROL_H
#define CONTROL_CONTROL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/action.h"
#include "control/client.h"
#include "control/link.h"
#include "control/loop.h"
#include "control/tls.h"
#include "tensor/transfer.h"

struct tl_control;

/* As in grpc.health.v1. */
enum tl_health {
    TL_HEALTH_UNKNOWN = 0,
    TL_HEALTH_SERVING = 1,
    TL_HEALTH_NOT_SERVING = 2,
    TL_HEALTH_SERVICE_UNKNOWN = 3,
};

/* What a client wants to publish. */
struct tl_push {
    const char *key;
    uint64_t step;
    bool may_go_back; /* to an older step than the published tensor has */
    struct tl_meta_data meta_data;
    struct tl_annotations *annotations; /* the tensor has them as well; NULL: none */
    struct tl_put_source source;
};

/* The end of fetching a put: with its tensor, of which one reference is the callee's, or with a failure. */
struct tl_put_fetch;
typedef void (*tl_put_fetched)(void *context, struct tl_tensor *tensor, enum tl_path path,
                               const struct tl_error *status);

/* What has been found of a pattern; the worker's object begins with it. */
struct tl_walk {
    bool is_complete;
    uint64_t withdrawn_count;
    struct tl_listing listing; /* unless it withdraws; to be taken with tl_listing_take when it is complete */
};

enum tl_link_admission {
    TL_LINK_ADMITTED,           /* as a task of the cluster, which has one such link */
    TL_LINK_ADMITTED_AS_CLIENT, /* its name, if it has one, is that of no task */
    TL_LINK_REFUSED,
    TL_LINK_LATER,
};

/* What the worker answers for the services. `worker` is options.worker. */
struct tl_control_handlers {
    struct tl_source_ops source; /* requests for tensors; its `source` is `worker` */

    /* Whether the caller may do this; asked before a call is given to its service. Errors: TL_PERMISSION_DENIED: no.
     * NULL: everybody may do everything. */
    enum tl_status (*may)(void *worker, const struct tl_identity *caller, enum tl_action action,
                          struct tl_error *ret_error);
    /* A peer has opened a link and claims to be tl_link_peer: whether that may be. After TL_LINK_LATER it is asked
     * again when tl_control_ask_again has been called. TL_LINK_REFUSED: ret_error says why. NULL: every peer is
     * admitted as a client. */
    enum tl_link_admission (*admit_link)(void *worker, const struct tl_identity *peer, struct tl_error *ret_error);
    /* It was admitted; set its events with tl_link_set_events now. */
    void (*link_up)(void *worker, struct tl_link *link);

    /* A client wants to publish a tensor: errors refuse it before any memory is taken. *ret_admission is the worker's,
     * for publish. */
    enum tl_status (*admit)(void *worker, const struct tl_identity *client, const struct tl_push *push,
                            void **ret_admission, struct tl_error *ret_error);
    /* Its bytes are complete and checked, and lie on options.device unless they are strings; the callee takes a
     * reference of its own. Called exactly once for each admit that succeeded, with what that returned: with tensor
     * NULL when the client broke off or the tensor could not be kept; nothing of push is set then. */
    enum tl_status (*publish)(void *worker, void *admission, const struct tl_push *push, struct tl_tensor *tensor,
                              uint64_t *ret_publication, struct tl_error *ret_error);
    /* Fetches the tensor of a push that was admitted from its source, over a data connection to the process there. Then
     * fetched comes once, and not inside of this call. Errors: the client has to send the bytes. NULL: the worker never
     * can. */
    enum tl_status (*fetch_put)(void *worker, const struct tl_identity *client, const struct tl_push *push,
                                tl_put_fetched fetched, void *context, struct tl_put_fetch **ret_fetch,
                                struct tl_error *ret_error);
    /* Gives that up. fetched comes all the same, at once or when nothing can write the memory any more. */
    void (*stop_fetch)(void *worker, struct tl_put_fetch *fetch);
    /* Looks for the published tensors whose key matches a pattern ("": all), and lists or withdraws them. */
    enum tl_status (*walk_begin)(void *worker, const struct tl_identity *client, const char *pattern, bool withdraws,
                                 struct tl_walk **ret_walk, struct tl_error *ret_error);
    /* Goes on for at most a few milliseconds; to be called until walk->is_complete. Errors end the walk. */
    enum tl_status (*walk_step)(void *worker, struct tl_walk *walk, struct tl_error *ret_error);
    /* Ends the walk at any time, which is the callee's afterwards. A large listing is freed in steps. */
    void (*walk_end)(void *worker, struct tl_walk *walk);
    /* Fills a zeroed description, all but protocol_version; freed with tl_description_fini, also on error. */
    enum tl_status (*describe)(void *worker, struct tl_description *ret_description, struct tl_error *ret_error);
    /* Tries all peers. *ret_results: what is known already, valid until the next call; NULL: tl_control_probed follows.
     * NULL: the worker cannot. */
    enum tl_status (*probe)(void *worker, const struct tl_probe_results **ret_results, struct tl_error *ret_error);
};

struct tl_control_options {
    struct tl_identity self;          /* name "" for a client */
    uint64_t chunk_bytes;             /* largest piece of a tensor in one message */
    uint64_t inflight_bytes;          /* bytes of tensors being sent over one link at a time */
    const struct tl_tls_options *tls; /* NULL: no TLS; not used after create */
    uint64_t max_calls;
    uint64_t max_unsent; /* answers that may wait to be sent on links that peers have opened: limits.waiting */
    int64_t connect_timeout_ns;
    int64_t max_link_age_ns;    /* for one that we opened: the deadline of its call */
    int64_t request_timeout_ns; /* for a call of a foreign client to make progress */
    int64_t stalled_timeout_ns; /* for a peer to take something of the answers that wait for it */
    int64_t keepalive_ns;
    int64_t keepalive_timeout_ns;
    struct tl_device device; /* where tensors that clients publish are kept; open (tl_device_open) */
    const struct tl_control_handlers *handlers;
    void *worker;
};

/* Counters of all links, and of the calls of clients without one, since create. */
struct tl_control_stats {
    uint64_t tensors_sent;
    uint64_t tensors_received;
    uint64_t bytes_sent;
    uint64_t bytes_received;
    uint64_t bytes_copied_send;
    uint64_t frames_sent;
    uint64_t frames_received;
    uint64_t protocol_errors;
    uint64_t late_chunks; /* pieces of requests that were already given up */
};

enum tl_status tl_control_create(struct tl_loop *loop, const struct tl_control_options *options,
                                 struct tl_control **ret_control, struct tl_error *ret_error) TL_MUST_USE;

/* Listens on "host:port". Errors: as tl_rpc_server_start. Not called for a client. */
enum tl_status tl_control_start(struct tl_control *control, const char *address, uint16_t *ret_port,
                                struct tl_error *ret_error) TL_MUST_USE;

/* The addresses of the bound sockets, each "10.0.0.7:4000", as many as there is space for. Returns how many. */
#define TL_CONTROL_LISTEN_BYTES 64
#define TL_CONTROL_MAX_LISTENS 16 /* the most that are bound */
size_t tl_control_listens(const struct tl_control *control, char (*ret_texts)[TL_CONTROL_LISTEN_BYTES],
                          size_t capacity);

/* Asks handlers->admit_link again for all links that it has put off, soon. */
void tl_control_ask_again(struct tl_control *control);

/* Sets what health watchers and checks see: a service by name, "" for the whole worker. */
void tl_control_set_health(struct tl_control *control, const char *service, enum tl_health health);

/* Answers all calls that wait for the end of a probe; results NULL: none will come, because the worker is closed. */
void tl_control_probed(struct tl_control *control, const struct tl_probe_results *results);

/* Stops listening and ends all links and calls: at once when they are idle, else when they have finished, at
 * deadline_ns at the latest. stopped is called once, when nothing of them is left. */
void tl_control_stop(struct tl_control *control, int64_t deadline_ns, void (*stopped)(void *context), void *context);

/* NULL: none. Valid until tl_control_destroy, and for as long as it is retained. */
struct tl_tls *tl_control_tls(const struct tl_control *control);

/* Stopped. NULL is accepted. */
void tl_control_destroy(struct tl_control *control);

#define TL_CONTROL_GRPC_CORE_BYTES 96

/* Sends what gRPC logs in this process to our log, in its format. For programs, not for libraries. Thread: any, before
 * the first loop is created. */
void tl_control_route_grpc_log(bool is_ours);

/* Writes which gRPC core the process uses: "gRPC core 29.0.0 of the system", or "gRPC core 58.0.0 built in from gRPC
 * 1.85.3". Returns the buffer. */
const char *tl_control_grpc_core(char buffer[TL_CONTROL_GRPC_CORE_BYTES]);

/* Whether connections have taken the spare descriptors of the listener (control/listener.h). */
bool tl_control_uses_spares(const struct tl_control *control);

/* When a connection came and no descriptor was free for the last time (monotonic); 0: never. */
int64_t tl_control_short_ns(const struct tl_control *control);

void tl_control_get_stats(const struct tl_control *control, struct tl_control_stats *ret_stats);

#endif
