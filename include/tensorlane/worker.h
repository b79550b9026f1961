// SPDX-License-Identifier: Apache-2.0
/*
 * Workers: a worker is one member of the cluster, in this process, with the tensors that it sends, receives and
 * publishes.
 *
 * Happy path: tl_worker_open with the cluster's JSON and the task of this process; tl_worker_find_peer for each peer of
 * interest; tl_send here and tl_recv there meet by key and step; tl_publish keeps a tensor until it is replaced or
 * withdrawn; tl_worker_close.
 *
 * Every operation has an asynchronous form, which takes a completion queue and completes exactly once on it, and a
 * blocking form with the suffix _wait. Every operation has a deadline. Completions are read from the queue by the
 * threads that the caller chooses; no code of the caller ever runs on a thread of the library, except release
 * callbacks of wrapped tensors and the log function of tl_log_set.
 *
 * All functions may be called from any thread, except that tl_worker_close and tl_cq_destroy must be the last call on
 * their object. After fork() only the parent may use a worker.
 */
#ifndef TENSORLANE_WORKER_H
#define TENSORLANE_WORKER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/path.h>
#include <tensorlane/status.h>
#include <tensorlane/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* For timeout_ns: the request time-out of the configuration. */
#define TL_TIMEOUT_DEFAULT INT64_C(-1)
/* For timeout_ns: no limit. */
#define TL_TIMEOUT_NONE INT64_MAX

/* -------------------------------------------------------------------------------------------------------- worker -- */

struct tl_worker;

enum tl_progress {
    /* A thread of the library makes progress, or for a while blocking calls and tl_cq_wait when these follow each other
     * closely; whether the program calls them makes no difference to peers. */
    TL_PROGRESS_THREAD = 0,
    /* There is no thread: blocking calls, tl_cq_wait and tl_worker_progress make progress. While the program calls none
     * of them, peers are not answered; over gRPC alone they take such a worker for lost after timeouts.keepalive and
     * keepalive_answer. For a worker with a data plane a thread runs one round of progress eight times in each
     * verbs.peer_timeout, so that peers keep their connections to it; release callbacks may run there. */
    TL_PROGRESS_CALLER = 1,
};

/* How to open a worker. Set size_bytes to sizeof(struct tl_worker_options), everything unused to zero. */
struct tl_worker_options {
    size_t size_bytes;
    const char *config_path; /* the cluster's JSON file; NULL: see config_json */
    const char *config_json; /* the same as text; both NULL: the environment variable TF_CONFIG */
    const char *job;         /* the job of this process; NULL: the task of TF_CONFIG, or none with is_client */
    uint32_t task;
    bool is_client; /* not a member of the cluster: it does not listen, sends only to itself, receives from all peers,
                       and has the settings of the configuration's top level */
    enum tl_progress progress;
    uint32_t unused;     /* ignored; what follows begins where the struct of older programs ends */
    const char *address; /* not NULL: the worker belongs to no cluster, and is at this address, "host:port", which
                            peers dial; port 0: any that is free. The configuration has settings alone, or there is
                            none; its setting "listen" binds elsewhere. It is called job and task, or when job is NULL
                            as its certificate says, or without one by a random name. Peers come by
                            tl_worker_add_peer; any worker may receive from it. "" with is_client: a client of no
                            cluster */
};

/* Opens a worker: reads and checks the configuration, listens, publishes the configured files, starts.
 * Errors: TL_INVALID_ARGUMENT: the configuration is wrong, with file, line, column and path. TL_NOT_FOUND: the task is
 * not in the cluster, or a file is missing. TL_ALREADY_EXISTS: the address is in use by another process.
 * TL_UNIMPLEMENTED: a protocol this version does not have, or an option that it does not know (tensorlane.h).
 * TL_RESOURCE_EXHAUSTED: no memory or descriptors. With
 * "rdma": "require" also why no transport but gRPC can be used, each with its reason, under the code of one of them.
 * Ownership: *ret_worker until tl_worker_close. Blocks: while files are mapped, and cards tried, some seconds. */
TL_API enum tl_status tl_worker_open(const struct tl_worker_options *options, struct tl_worker **ret_worker,
                                     struct tl_error *ret_error) TL_MUST_USE;

/* Refuses new requests of peers, lets running transfers finish for at most timeout_ns (TL_TIMEOUT_DEFAULT: the
 * configured drain time-out), completes every operation that is still open with TL_CANCELLED, frees the worker.
 * Completions stay readable in their queues. NULL is accepted. Blocks: yes. */
TL_API void tl_worker_close(struct tl_worker *worker, int64_t timeout_ns);

/* Returns "/job:ps/task:0", "" for a client; valid until close. */
TL_API const char *tl_worker_name(const struct tl_worker *worker);
/* Returns the random number that was drawn when the worker was opened. */
TL_API uint64_t tl_worker_incarnation(const struct tl_worker *worker);
/* Returns the address that peers dial, "host:port", "" for a worker that none can dial; valid until close. */
TL_API const char *tl_worker_address(const struct tl_worker *worker);
/* Returns the port that it listens on, 0 for a client. */
TL_API uint16_t tl_worker_port(const struct tl_worker *worker);

/* Makes progress, waiting for at most timeout_ns (0: not at all) for something to do. It is only for
 * TL_PROGRESS_CALLER; one thread at a time makes progress, and others wait until it has.
 * Errors: TL_FAILED_PRECONDITION: the worker has a thread of its own. TL_DEADLINE_EXCEEDED: nothing happened. */
TL_API enum tl_status tl_worker_progress(struct tl_worker *worker, int64_t timeout_ns) TL_MUST_USE;

/* --------------------------------------------------------------------------------------------------------- peers -- */

/* A peer is a task of the cluster, or was added by tl_worker_add_peer. An id is never used again for another one. 0 is
 * no peer. */
typedef uint64_t tl_peer_id;

enum tl_peer_state {
    TL_PEER_IDLE = 0,       /* nothing was requested from it yet */
    TL_PEER_CONNECTING = 1, /* a connection is being set up, or will be after a back-off */
    TL_PEER_UP = 2,         /* it has identified itself, and requests flow */
    TL_PEER_DOWN = 3,       /* the last attempt failed; requests wait and it is tried again */
};

struct tl_peer_info {
    size_t size_bytes; /* set by the caller to sizeof(struct tl_peer_info) */
    tl_peer_id id;
    char name[320];
    char address[320];
    enum tl_peer_state state;
    uint64_t incarnation;   /* that of the process that answered last; 0: none yet */
    uint64_t restart_count; /* how often a new incarnation was seen */
    char transport[16];     /* in use, "" when not up */
    struct tl_error reason; /* why it is down; TL_OK otherwise */
};

/* Adds a worker that no configuration names, by the address that it is dialled at, "host:port". Nothing is connected
 * until something is asked of it (or tl_worker_wait_for_peers). name: "/job:ps/task:0", any other worker that answers
 * there is refused; NULL: any worker, which is called by its address until it has answered, and then by its name.
 * incarnation: that of the process that is meant (tl_worker_incarnation); when another one answers at that address, all
 * that is asked of the peer ends with TL_UNAVAILABLE, then and later; 0: any, a peer that restarts is the same peer.
 * A peer that was added before with the same address, name and incarnation is returned again, and so is a task of the
 * configuration. The worker that is added needs to know nothing of this one, and may add it as well.
 * Errors: TL_INVALID_ARGUMENT: the address or the name is none. TL_ALREADY_EXISTS: the name is that of a peer with
 * another address. TL_UNAVAILABLE: this worker itself is at the address, with another incarnation.
 * TL_RESOURCE_EXHAUSTED: no memory. */
TL_API enum tl_status tl_worker_add_peer(struct tl_worker *worker, const char *address, const char *name,
                                         uint64_t incarnation, tl_peer_id *ret_peer,
                                         struct tl_error *ret_error) TL_MUST_USE;

/* Removes a peer that was added. Operations that receive from it, subscriptions too, complete with TL_CANCELLED, soon;
 * the connection ends, and its memory is given back when nothing writes it any more.
 * Errors: TL_NOT_FOUND: no such peer. TL_FAILED_PRECONDITION: a task of the configuration, or the worker itself. */
TL_API enum tl_status tl_worker_remove_peer(struct tl_worker *worker, tl_peer_id peer,
                                            struct tl_error *ret_error) TL_MUST_USE;

/* Finds the peer with this name ("/job:ps/task:0"), which may be the worker itself.
 * Errors: TL_NOT_FOUND: no such peer, naming the nearest task. */
TL_API enum tl_status tl_worker_find_peer(struct tl_worker *worker, const char *name, tl_peer_id *ret_peer,
                                          struct tl_error *ret_error) TL_MUST_USE;

/* Fills up to capacity entries and returns how many peers there are. */
TL_API size_t tl_worker_peers(struct tl_worker *worker, tl_peer_id *ret_peers, size_t capacity);

/* Describes a peer. Errors: TL_NOT_FOUND: no such peer. TL_INVALID_ARGUMENT: size_bytes. */
TL_API enum tl_status tl_worker_peer_info(struct tl_worker *worker, tl_peer_id peer, struct tl_peer_info *ret_info,
                                          struct tl_error *ret_error) TL_MUST_USE;

/* Connects to the peers (peers NULL: all) and waits until at least min_count of them are up at the same time (0: all).
 * Errors: TL_DEADLINE_EXCEEDED: naming one that is not up and why. TL_NOT_FOUND: no such peer, or too many of them were
 * removed meanwhile. TL_INVALID_ARGUMENT: min_count is above the number of peers. TL_UNAVAILABLE: another process
 * answers where one of a certain incarnation is meant. TL_CANCELLED: the worker was closed. Blocks: yes. */
TL_API enum tl_status tl_worker_wait_for_peers(struct tl_worker *worker, const tl_peer_id *peers, size_t count,
                                               size_t min_count, int64_t timeout_ns,
                                               struct tl_error *ret_error) TL_MUST_USE;

/* ---------------------------------------------------------------------------------------------- completion queue -- */

struct tl_cq;

/* An operation, for tl_cancel; never used again. 0 is none. */
typedef uint64_t tl_op_id;

enum tl_op_kind {
    TL_OP_SEND = 1,
    TL_OP_RECV = 2,
    TL_OP_RECV_MANY = 3, /* the end of a group of receives */
    TL_OP_SEND_MANY = 4, /* the end of a group of sends */
    TL_OP_SUBSCRIBE = 5, /* a value of a subscription, or its end */
    TL_OP_PUT = 6,
    TL_OP_LIST = 7,
    TL_OP_STAT = 8,
    TL_OP_REMOVE = 9,
};

struct tl_listing;

struct tl_completion {
    size_t size_bytes; /* set by the library: sizeof(struct tl_completion), the same in every version */
    tl_op_id op;
    enum tl_op_kind kind;
    void *user_data;
    struct tl_error status;
    struct tl_tensor *tensor; /* the tensor of a receive that succeeded: one reference, the caller's; NULL otherwise */
    uint64_t step;            /* the step of the value: for a published tensor its version */
    enum tl_path path;
    const char *path_reason;    /* why it was this path and not a faster one; "" when there is no reason. Static */
    uint64_t bytes;             /* bytes of the tensor that moved */
    int64_t duration_ns;        /* from the call to the completion */
    bool is_verified;           /* a checksum was wanted and matches */
    uint64_t item;              /* in a group: the place of a member among the items */
    uint64_t ok_count;          /* for a group: members that had succeeded when it completed, dead ones too, */
    uint64_t dead_count;        /* ... those of them whose tensor is dead, so that a group is dead if both are equal, */
    uint64_t failed_count;      /* ... and members that had failed, those that were cancelled too */
    struct tl_listing *listing; /* what a list or a stat has found: the caller's, tl_listing_destroy; NULL: nothing */
    uint64_t removed_count;     /* for a remove: how many tensors are no longer published there */
    bool is_last;               /* it ends a subscription: no completion of that follows */
    uint64_t reserved[1];       /* zero; fields of later versions, so that the size of the struct never changes */
};

/* Creates a completion queue. Errors: TL_RESOURCE_EXHAUSTED. Ownership: until tl_cq_destroy. */
TL_API enum tl_status tl_cq_create(struct tl_cq **ret_cq, struct tl_error *ret_error) TL_MUST_USE;

/* Destroys a queue that no open operation names. Completions that were not read are dropped, with their tensors
 * and listings. NULL is accepted. */
TL_API void tl_cq_destroy(struct tl_cq *cq);

/* Returns a descriptor that is readable while completions wait; it is only for poll, select and epoll. */
TL_API int tl_cq_fd(const struct tl_cq *cq);

/* Takes up to capacity completions without waiting. Returns how many. */
TL_API size_t tl_cq_poll(struct tl_cq *cq, struct tl_completion *ret_completions, size_t capacity);

/* Takes up to capacity completions, waiting for at least one for at most timeout_ns. Returns how many; 0 when the time
 * was up. Blocks: yes. */
TL_API size_t tl_cq_wait(struct tl_cq *cq, struct tl_completion *ret_completions, size_t capacity, int64_t timeout_ns);

/* The same, but waits until the queue has at least min_count completions, which may be more than capacity. Use it where
 * nothing can be done before so many are there, such as all members of a group and its end: the thread waits once
 * instead of once for every few. When the time is up it takes what there is. With 0 it does not wait. */
TL_API size_t tl_cq_wait_many(struct tl_cq *cq, struct tl_completion *ret_completions, size_t capacity,
                              size_t min_count, int64_t timeout_ns);

/* ---------------------------------------------------------------------------------------------------- operations -- */

struct tl_byte_range {
    uint64_t offset_bytes; /* in the elements of the tensor */
    uint64_t len_bytes;
};

/* A part of a tensor: either a box, which is a tensor of its sizes and of the dtype of the whole, or ranges of bytes,
 * which come one behind the other as a TL_U8 tensor with one dimension. Set size_bytes to sizeof(struct tl_part),
 * everything unused to zero. */
struct tl_part {
    size_t size_bytes;
    unsigned rank;                      /* that of the tensor, for a box */
    const uint64_t *start;              /* [rank] */
    const uint64_t *size;               /* [rank]; NULL: no box */
    const struct tl_byte_range *ranges; /* [range_count] */
    size_t range_count;                 /* 0: no ranges */
    /* [rank]: where in the destination, which has the rank and dtype of the tensor, the box begins; the rest of the
     * destination stays. NULL: the destination has the shape of the box */
    const uint64_t *destination_start;
};

/* How to receive. Zeroed means: wait for the default time-out, no checksum, memory of the library. */
struct tl_recv_options {
    size_t size_bytes;             /* sizeof(struct tl_recv_options) */
    struct tl_tensor *destination; /* receive into this tensor; NULL: a new one. Undefined contents on failure */
    bool wants_checksum;           /* verify all bytes end to end */
    bool may_map; /* the program only reads the tensor, which may then be a file of the peer's, mapped read-only. It is
                     when both are on one host, the peer allows it, and no checksum is wanted; the completion's path
                     shows it. What was read counts once tl_tensor_check has succeeded */
    uint32_t unused;            /* ignored; what follows begins where the struct of older programs ends */
    struct tl_device device;    /* where a new tensor shall lie; zero: on the host. Strings and dead tensors always lie
                                   there. With a destination: zero, or where that lies */
    const struct tl_part *part; /* receive this part, whose bytes alone travel; NULL: the whole */
};

/* Offers a tensor to one receiver of (key, step), which may ask before or after. The memory is read, not copied: its
 * contents must not change until the completion. The operation completes when the receiver has acknowledged the whole
 * tensor. What the stream of a device tensor holds at the time of the call comes before it is read.
 * Errors of the call: TL_INVALID_ARGUMENT: the key, or a stream that is not one of the device. TL_FAILED_PRECONDITION:
 * the stream is being captured into a graph, or as tl_tensor_create_on. TL_RESOURCE_EXHAUSTED: no memory. Errors of the
 * completion: TL_ALREADY_EXISTS: (key, step) is already offered here. TL_RESOURCE_EXHAUSTED: the
 * worker holds as many bytes as the configuration allows. TL_DEADLINE_EXCEEDED: no receiver came in time. TL_CANCELLED:
 * tl_cancel, close, or the step ended. The status of tl_worker_abort_step.
 * Ownership: the worker takes a reference of its own, and the completion comes only after the last one is put. */
TL_API enum tl_status tl_send(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                              int64_t timeout_ns, struct tl_cq *cq, void *user_data, tl_op_id *ret_op,
                              struct tl_error *ret_error) TL_MUST_USE;

/* Receives from a peer what it offers as (key, step), or what it has published as key with a version of at least step,
 * whichever is there first. The completion carries the tensor. A connection that breaks is no error: the same request
 * is made again until the deadline. What the stream of a destination on a device holds at the time of the call comes
 * before it is written; when the completion comes, the bytes are visible to everything that is launched afterwards. A
 * tensor of this worker itself comes by reference when it lies where it is wanted, else as a copy. A part comes like a
 * tensor of its own, with a checksum of its bytes; a sent tensor is over when a part of it has been received.
 * Errors of the call: TL_INVALID_ARGUMENT: the key, size_bytes, a part that is none, or whose numbers have more than
 * TL_MAX_KEY_BYTES bytes with the key when they are written down, a destination that is read-only, a destination or a
 * device with may_map, or a destination that is not on the device. TL_UNIMPLEMENTED: an option that this version does
 * not know (tensorlane.h). TL_NOT_FOUND: no such peer. With a device, or a destination on one, also those of
 * tl_tensor_create_on and of the stream (tl_send).
 * Errors of the completion: TL_DEADLINE_EXCEEDED, naming the state of the peer. TL_CANCELLED: tl_cancel or close.
 * TL_FAILED_PRECONDITION: the tensor does not fit the destination (dtype, shape), or it has no such part: strings, or a
 * box that begins or ends within a byte. TL_OUT_OF_RANGE: the part is not within the tensor. TL_UNIMPLEMENTED: the peer
 * is of an older version and knows no parts, or the part is not in one piece and lies on a device. TL_DATA_LOSS: the
 * checksum does not match, or the peer's file changed. TL_RESOURCE_EXHAUSTED: too many receivers wait at the peer, or
 * there is no memory here. The status of an aborted step, here or at the peer. Ownership: the worker holds a reference
 * to the destination until the completion. */
TL_API enum tl_status tl_recv(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                              const struct tl_recv_options *options, int64_t timeout_ns, struct tl_cq *cq,
                              void *user_data, tl_op_id *ret_op, struct tl_error *ret_error) TL_MUST_USE;

/* The blocking forms. *ret_completion->status holds the result that is also returned. */
TL_API enum tl_status tl_send_wait(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                                   int64_t timeout_ns, struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_recv_wait(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                                   const struct tl_recv_options *options, int64_t timeout_ns,
                                   struct tl_completion *ret_completion, struct tl_error *ret_error) TL_MUST_USE;

/* How to subscribe. */
struct tl_subscribe_options {
    size_t size_bytes;                     /* sizeof(struct tl_subscribe_options) */
    uint64_t from_step;                    /* values of earlier steps are not wanted */
    struct tl_tensor *const *destinations; /* [count] different tensors on the host; NULL: memory of the library */
    size_t count;                          /* how many values may be under way or not yet put, at least 1; with 2, one
                                              comes while another one is read */
    bool wants_checksum;                   /* verify all bytes end to end */
};

/* Receives every value that a peer has or will have under a key, without asking for each: of what is sent, every value
 * from from_step on, that with the lowest step first when several are there; of what is published, from from_step on,
 * the newest version that this subscription has not had. Each is a completion (TL_OP_SUBSCRIBE, with step and tensor;
 * duration_ns counts from when its buffer was free). Its tensor lends one of the buffers: when its last reference is
 * put, on any thread, another value may be written there. So a program that puts none gets at most `count` values; that
 * holds up nothing else.
 * A receive of exactly (key, step) that waits comes before subscriptions. Several subscriptions of a sent key take
 * turns, and each published value comes to all of them.
 * Completions come in the order in which the peer has given the values, failures too, also when a later one has arrived
 * first. Two cases are left out: values that come when a connection has just broken, and over gRPC those of different
 * sizes, where a small value may come before a larger one. After a connection was broken for longer than
 * timeouts.reservation, a published value may come once more.
 * A value that cannot be received is a completion with its step and status, and without a tensor: it does not fit the
 * destinations, its checksum is wrong, its file has changed at the peer, the peer cannot read or send it, its step was
 * aborted here, it lies on a device of this very worker, or there is no memory. Its buffer is used again once that
 * completion was read. The subscription goes on with other values; a sent value that does not fit is then offered to
 * others. Steps that are aborted or ended at the peer are left out. A peer that cannot be reached is no error: what it
 * has under the key comes when it is back. When it has restarted, its values are new ones, whatever their steps. A
 * subscription ends with tl_cancel, with close, or when it cannot go on, and then has one last completion (is_last),
 * without tensor and step, whose status is not TL_OK: TL_CANCELLED; TL_UNIMPLEMENTED: the peer is of an older version;
 * TL_RESOURCE_EXHAUSTED: the peer lets no more of this worker's receivers wait (limits.waiting; a subscription counts
 * as count + 1), or there is no memory; TL_UNAVAILABLE: "rdma": "require" leaves no way to the peer. Values that arrive
 * meanwhile come before it. TL_TIMEOUT_DEFAULT does not apply.
 * Errors of the call: TL_INVALID_ARGUMENT: the key, no options, size_bytes, count, or a destination that is NULL,
 * read-only, on a device, or unlike the first. TL_UNIMPLEMENTED: an option that this version does not know.
 * TL_NOT_FOUND: no such peer. TL_RESOURCE_EXHAUSTED: no memory. TL_FAILED_PRECONDITION: cq drives another worker
 * (TL_PROGRESS_CALLER).
 * Ownership: references to the destinations are held until the last completion; tensors that were delivered outlive it,
 * and the worker. Thread: any. */
TL_API enum tl_status tl_subscribe(struct tl_worker *worker, tl_peer_id peer, const char *key,
                                   const struct tl_subscribe_options *options, struct tl_cq *cq, void *user_data,
                                   tl_op_id *ret_op, struct tl_error *ret_error) TL_MUST_USE;

/* Asks an operation to end. It completes with TL_CANCELLED unless it has completed otherwise before.
 * Errors: TL_NOT_FOUND: it is not open any more. */
TL_API enum tl_status tl_cancel(struct tl_worker *worker, tl_op_id op) TL_MUST_USE;

/* Publishes a tensor under a key, with step as its version, replacing what was published under it; transfers that run
 * finish with the old bytes. The contents must not change until the tensor is replaced or withdrawn and its memory
 * released. Errors: TL_INVALID_ARGUMENT: the key. TL_RESOURCE_EXHAUSTED: no memory. For a
 * device tensor, whose stream comes first, those of tl_send. Ownership: the worker takes a reference. */
TL_API enum tl_status tl_publish(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                                 struct tl_error *ret_error) TL_MUST_USE;

/* Ends a publication; transfers that run finish. Errors: TL_NOT_FOUND: nothing is published under the key. */
TL_API enum tl_status tl_withdraw(struct tl_worker *worker, const char *key, struct tl_error *ret_error) TL_MUST_USE;

/* Fails, with this code and message, all operations that wait here for the step (sends, receives of this worker, and
 * requests of peers) and all that ask for it later, until tl_worker_end_step. The 1,024 steps that were aborted last
 * are remembered. Errors: TL_INVALID_ARGUMENT: status is TL_OK or not a status, or the message is too long or not
 * UTF-8. */
TL_API enum tl_status tl_worker_abort_step(struct tl_worker *worker, uint64_t step, enum tl_status status,
                                           const char *message, struct tl_error *ret_error) TL_MUST_USE;

/* Ends a step: sends that were not received complete with TL_CANCELLED and are counted, waiting receivers fail with
 * TL_CANCELLED, and the mark of an abort is removed. Returns in *ret_dropped_count (may be NULL) how many tensors were
 * dropped. */
TL_API enum tl_status tl_worker_end_step(struct tl_worker *worker, uint64_t step, uint64_t *ret_dropped_count,
                                         struct tl_error *ret_error) TL_MUST_USE;

/* ----------------------------------------------------------------------------------------------------- at a peer -- */

/* How to put. Zeroed means: a tensor of a later step is not replaced. */
struct tl_put_options {
    size_t size_bytes;
    bool may_go_back; /* replaces what is published there under the key with a later step, too */
};

/* Publishes a tensor at a peer, under a key and with step as its version, in place of what was published there under
 * it. The peer keeps it in its own memory, or on the device where it keeps what it publishes, until it is replaced or
 * withdrawn; it lives on when this worker has closed. The operation completes when the peer has accepted it, and all
 * who receive from the peer then get it, or when it was refused. The peer fetches the tensor over the fastest path that
 * the two have, as for a receive; over gRPC it is sent, with a checksum. At the worker itself it is tl_publish: the
 * tensor is referred to. What was published there before stays whole until the new tensor is complete. The completion
 * names the path and, as for a receive, why it was not a faster one.
 * A peer that cannot be reached is no error; a connection that breaks is none either: the tensor is sent again, until
 * the deadline.
 * Errors of the call: TL_INVALID_ARGUMENT: the key, or size_bytes. TL_UNIMPLEMENTED: the tensor lies on a device; an
 * option that this version does not know. TL_NOT_FOUND: no such peer. TL_RESOURCE_EXHAUSTED: no memory.
 * TL_FAILED_PRECONDITION: cq drives another worker (TL_PROGRESS_CALLER). Errors of the completion:
 * TL_FAILED_PRECONDITION: a later step is published there. TL_RESOURCE_EXHAUSTED: beyond what this worker may have
 * there (limits.held). TL_PERMISSION_DENIED: its role does not allow it. TL_DATA_LOSS: the tensor's file has changed.
 * TL_DEADLINE_EXCEEDED, naming the state of the peer. TL_CANCELLED: tl_cancel, close, or the peer was removed; the peer
 * may have accepted it all the same.
 * Ownership: the worker takes a reference of its own. The contents must not change until the completion, which comes
 * only when nothing reads them any more. */
TL_API enum tl_status tl_put(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                             struct tl_tensor *tensor, const struct tl_put_options *options, int64_t timeout_ns,
                             struct tl_cq *cq, void *user_data, tl_op_id *ret_op,
                             struct tl_error *ret_error) TL_MUST_USE;

/* Lists what a peer has published: all of it (pattern ""), or what matches a pattern: `*` stands for any text, `?` for
 * one character, `[a-z]` for one of a set, and a backslash takes the next character as it is. The completion has the
 * listing, sorted by key; nothing that matches is no error. A connection that breaks is none either.
 * Errors of the call: TL_INVALID_ARGUMENT: the pattern is NULL, longer than TL_MAX_KEY_BYTES, or not UTF-8.
 * TL_NOT_FOUND, TL_RESOURCE_EXHAUSTED, TL_FAILED_PRECONDITION: as tl_put. Errors of the completion:
 * TL_PERMISSION_DENIED, TL_DEADLINE_EXCEEDED, TL_CANCELLED: as tl_put. TL_RESOURCE_EXHAUSTED: more than 1,000,000
 * tensors or 256 MiB of names. */
TL_API enum tl_status tl_list(struct tl_worker *worker, tl_peer_id peer, const char *pattern, int64_t timeout_ns,
                              struct tl_cq *cq, void *user_data, tl_op_id *ret_op,
                              struct tl_error *ret_error) TL_MUST_USE;

/* Describes what a peer has published under a key. The completion has a listing of one tensor.
 * Errors: as tl_list, and of the call TL_INVALID_ARGUMENT: the key; of the completion TL_NOT_FOUND: nothing is
 * published under it. */
TL_API enum tl_status tl_stat(struct tl_worker *worker, tl_peer_id peer, const char *key, int64_t timeout_ns,
                              struct tl_cq *cq, void *user_data, tl_op_id *ret_op,
                              struct tl_error *ret_error) TL_MUST_USE;

/* Ends what a peer has published under all keys that match the pattern ("*": all); transfers that run finish. The
 * completion has removed_count, which may be 0.
 * Errors: as tl_list; of the call also TL_INVALID_ARGUMENT: the pattern is empty; of the completion TL_UNAVAILABLE: the
 * connection broke, and it is not known whether the peer has done it. */
TL_API enum tl_status tl_remove(struct tl_worker *worker, tl_peer_id peer, const char *pattern, int64_t timeout_ns,
                                struct tl_cq *cq, void *user_data, tl_op_id *ret_op,
                                struct tl_error *ret_error) TL_MUST_USE;

/* The blocking forms. Outputs are written on success only. Blocks: yes. */
TL_API enum tl_status tl_put_wait(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                                  struct tl_tensor *tensor, const struct tl_put_options *options, int64_t timeout_ns,
                                  struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_list_wait(struct tl_worker *worker, tl_peer_id peer, const char *pattern, int64_t timeout_ns,
                                   struct tl_listing **ret_listing, struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_stat_wait(struct tl_worker *worker, tl_peer_id peer, const char *key, int64_t timeout_ns,
                                   struct tl_listing **ret_listing, struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_remove_wait(struct tl_worker *worker, tl_peer_id peer, const char *pattern, int64_t timeout_ns,
                                     uint64_t *ret_count, struct tl_error *ret_error) TL_MUST_USE;

/* A tensor in a listing. Set size_bytes to sizeof(struct tl_listing_entry); pointers are valid as long as the listing.
 */
struct tl_listing_entry {
    size_t size_bytes;
    const char *key;
    uint64_t step; /* its version */
    enum tl_dtype dtype;
    unsigned rank;
    const uint64_t *dims;                    /* [rank] */
    uint64_t tensor_bytes;                   /* bytes of the elements, or of the serialized form for TL_STRING */
    const struct tl_annotation *annotations; /* [annotation_count], sorted by key */
    size_t annotation_count;
    bool is_dead;
};

TL_API size_t tl_listing_count(const struct tl_listing *listing);
/* Errors: TL_OUT_OF_RANGE: place is not below the count. TL_INVALID_ARGUMENT: size_bytes. */
TL_API enum tl_status tl_listing_entry(const struct tl_listing *listing, size_t place,
                                       struct tl_listing_entry *ret_entry, struct tl_error *ret_error) TL_MUST_USE;
/* NULL is accepted. */
TL_API void tl_listing_destroy(struct tl_listing *listing);

/* -------------------------------------------------------------------------------------------------- many at once -- */

/* One of many receives. Set everything unused to zero. */
struct tl_recv_item {
    const char *key;
    uint64_t step;
    struct tl_tensor *destination; /* as in tl_recv_options; two items with the same one overwrite each other */
    uint32_t priority;             /* 0..3: of what is ready for this worker the peer sends the greater first */
    void *user_data;               /* for the completion of this item */
    const struct tl_part *part;    /* as in tl_recv_options */
};

/* What becomes of the members of a group that are open when the group is over. */
enum tl_rest {
    TL_REST_CANCEL = 0, /* they are given up and complete with TL_CANCELLED, before the group does */
    TL_REST_LEAVE = 1,  /* they go on until their deadline, and complete after the group */
};

/* How to receive many tensors. Zeroed but for the first two fields means: the group is over when all have completed; no
 * checksum; memory of the library. */
struct tl_recv_many_options {
    size_t size_bytes;        /* sizeof(struct tl_recv_many_options) */
    size_t item_bytes;        /* sizeof(struct tl_recv_item) */
    size_t min_count;         /* the group is over when so many members have succeeded; 0: all */
    int64_t group_timeout_ns; /* the group is over after this time, whatever has come; 0: no such limit */
    enum tl_rest rest;
    bool wants_checksum;     /* for all items, as in tl_recv_options, */
    bool may_map;            /* the same; it concerns the items without destination */
    struct tl_device device; /* the same */
};

/* Receives many tensors from one peer, which may be the worker itself, as so many calls of tl_recv would, at a fraction
 * of their cost. Each item is a member of the group, with a completion of its own (TL_OP_RECV) as soon as it is there,
 * in any order; no member waits for another, and a member that fails, waits or is dead concerns no other. The group has
 * a completion (TL_OP_RECV_MANY, user_data), the last of all; with TL_REST_LEAVE it comes when the group is over, and
 * members may complete after it. Its status is TL_OK when min_count members have succeeded, dead ones too; else that of
 * the member that failed first, or TL_DEADLINE_EXCEEDED when group_timeout_ns came before any of these. A group without
 * items completes at once. The same (key, step) twice is two receives: both get a published value, and one of them a
 * sent one. timeout_ns is the deadline of all members.
 *
 * *ret_group (may be NULL) is the id of the group; those of the members follow it: *ret_group + 1 + place. tl_cancel
 * ends one member, or with the id of the group all that are open.
 *
 * Errors of the call, after which nothing is asked: TL_INVALID_ARGUMENT: options is NULL, or size_bytes, item_bytes,
 * min_count (above count) or group_timeout_ns (negative) is wrong; an item, naming its place: as in tl_recv, or its
 * priority. TL_UNIMPLEMENTED: an option or a field that this version does not know. TL_NOT_FOUND: no such peer.
 * TL_RESOURCE_EXHAUSTED: no memory. TL_FAILED_PRECONDITION: cq drives another worker (TL_PROGRESS_CALLER). With devices
 * also those of tl_recv. Errors of the members: as of tl_recv;
 * TL_CANCELLED too when the group was over.
 * Ownership: of each destination the worker holds a reference until the completion of its item; items and keys may go
 * when the call returns. */
TL_API enum tl_status tl_recv_many(struct tl_worker *worker, tl_peer_id peer, const struct tl_recv_item *items,
                                   size_t count, const struct tl_recv_many_options *options, int64_t timeout_ns,
                                   struct tl_cq *cq, void *user_data, tl_op_id *ret_group,
                                   struct tl_error *ret_error) TL_MUST_USE;

/* The blocking form. Fills ret_completions[count], in the order of the items, and returns the status of the group. When
 * the call itself fails, each completion has its status and no tensor. Errors: also TL_INVALID_ARGUMENT: TL_REST_LEAVE,
 * because no completion can come after the call. Ownership: the tensors in the completions are the caller's, whatever
 * is returned. Blocks: yes. */
TL_API enum tl_status tl_recv_many_wait(struct tl_worker *worker, tl_peer_id peer, const struct tl_recv_item *items,
                                        size_t count, const struct tl_recv_many_options *options, int64_t timeout_ns,
                                        struct tl_completion *ret_completions, struct tl_error *ret_error) TL_MUST_USE;

/* One of many sends, or publications. Set everything unused to zero. */
struct tl_send_item {
    const char *key;
    uint64_t step;
    struct tl_tensor *tensor;
    void *user_data; /* for the completion of this item; not used by tl_publish_many */
};

/* How to send many tensors. */
struct tl_send_many_options {
    size_t size_bytes; /* sizeof(struct tl_send_many_options) */
    size_t item_bytes; /* sizeof(struct tl_send_item) */
    bool is_quiet;     /* members that succeed have no completion of their own; the group counts them */
};

/* Offers many tensors, as so many calls of tl_send would. Each is a member of the group and completes by itself
 * (TL_OP_SEND); one that cannot be offered concerns no other. The group has a completion (TL_OP_SEND_MANY), the last of
 * all: TL_OK when all have succeeded, else the status of the member that failed first. Ids: as of tl_recv_many.
 * Errors of the call, after which nothing is offered: TL_INVALID_ARGUMENT: options is NULL, or size_bytes or item_bytes
 * is wrong; an item, naming its place: as in tl_send, or no tensor. TL_UNIMPLEMENTED: an option or a field that this
 * version does not know. TL_RESOURCE_EXHAUSTED: no memory. TL_FAILED_PRECONDITION: cq drives another worker
 * (TL_PROGRESS_CALLER). For device tensors those of tl_send.
 * Ownership: the worker holds a reference to each tensor until its completion, or with is_quiet that of the group. */
TL_API enum tl_status tl_send_many(struct tl_worker *worker, const struct tl_send_item *items, size_t count,
                                   const struct tl_send_many_options *options, int64_t timeout_ns, struct tl_cq *cq,
                                   void *user_data, tl_op_id *ret_group, struct tl_error *ret_error) TL_MUST_USE;

/* The blocking form. Fills ret_completions[count], in the order of the items, unless it is NULL, and returns the status
 * of the group. Blocks: yes. */
TL_API enum tl_status tl_send_many_wait(struct tl_worker *worker, const struct tl_send_item *items, size_t count,
                                        const struct tl_send_many_options *options, int64_t timeout_ns,
                                        struct tl_completion *ret_completions, struct tl_error *ret_error) TL_MUST_USE;

/* Publishes many tensors, as so many calls of tl_publish would: one after the other, and not at one moment. item_bytes
 * is sizeof(struct tl_send_item). *ret_count (may be NULL) is how many were published, from the first: all unless there
 * is an error. Errors: TL_INVALID_ARGUMENT: item_bytes, or an item, naming its place, and nothing is published;
 * TL_UNIMPLEMENTED: a field that this version does not know, the same. Those of tl_publish, naming the item. */
TL_API enum tl_status tl_publish_many(struct tl_worker *worker, const struct tl_send_item *items, size_t count,
                                      size_t item_bytes, size_t *ret_count, struct tl_error *ret_error) TL_MUST_USE;

/* ------------------------------------------------------------------------------------------------------ counters -- */

/* Counters since open. Set size_bytes to sizeof(struct tl_worker_stats). */
struct tl_worker_stats {
    size_t size_bytes;
    uint64_t tensors_sent;      /* tensors sent over a transport, acknowledged or published */
    uint64_t tensors_received;  /* over a transport */
    uint64_t bytes_sent;        /* bytes of tensors handed to the transport */
    uint64_t bytes_received;    /* bytes of tensors placed into destinations */
    uint64_t bytes_copied_send; /* copied by the CPU on the sending side: small tensors only */
    uint64_t frames_sent;       /* messages between workers */
    uint64_t frames_received;
    uint64_t requests_retried;  /* requests made again after a broken connection */
    uint64_t tensors_dropped;   /* tensors sent, never received, and dropped at the end of a step */
    uint64_t waiting_receivers; /* now: receives, local and remote, that wait for a tensor of this worker */
    uint64_t held_tensors;      /* now: sent and not yet received */
    uint64_t held_bytes;        /* now */
    uint64_t published_tensors; /* now */
    uint64_t published_bytes;   /* now */
    uint64_t open_operations;   /* now */
    uint64_t protocol_errors;   /* connections ended because a peer broke the protocol */
};

/* Reads the counters. Errors: TL_INVALID_ARGUMENT: size_bytes. */
TL_API enum tl_status tl_worker_stats(struct tl_worker *worker, struct tl_worker_stats *ret_stats,
                                      struct tl_error *ret_error) TL_MUST_USE;

#ifdef __cplusplus
}
#endif

#endif
