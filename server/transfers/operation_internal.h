// SPDX-License-Identifier: Apache-2.0
/* An operation, as its files see it: operation.c (life, and the public functions), operation_send.c,
 * operation_receive.c. */
#ifndef SERVER_TRANSFERS_OPERATION_INTERNAL_H
#define SERVER_TRANSFERS_OPERATION_INTERNAL_H

#include "server/progress/completion_queue.h"
#include "server/worker_internal.h"
#include "tensor/allocation.h"
#include "tensor/delivery.h"
#include "tensor/device.h"
#include "tensor/piece.h"

/*
 *   a send:     NEW --start--> RUNNING --over--> LINGERING --memory free--> COMPLETE
 *                 \------------refused-------------^
 *   a receive:  NEW --start--> RUNNING --arrived, failed--> COMPLETE
 *                              |  ^  \--cancel--> CANCELLING --last word--> COMPLETE
 *                        broken|  |retry
 *                              v  |
 *                            RETRYING
 *
 *     from or to a device:     RUNNING --fenced--> FENCED --reached--> RUNNING
 *                              RUNNING --apart--> DELIVERING --arrived, failed--> COMPLETE
 */
enum op_state {
    OP_NEVER,      /* no state */
    OP_NEW,        /* waits for the loop's owner to take the closure */
    OP_RUNNING,    /* waits for the table, the peer or the transport */
    OP_RETRYING,   /* receive: waits for the retry timer */
    OP_FENCED,     /* receive: waits for the stream of its destination, and has not asked yet */
    OP_DELIVERING, /* receive: has a value of this worker; waits for its stream, for memory of a device or for a copy */
    OP_CANCELLING, /* receive: has its error; waits for the transport, or the table, to let go of the memory */
    OP_LINGERING,  /* send: has its result; waits for the last reader of the memory */
    OP_COMPLETE,   /* waits for the reader of the completion */
    OP_STATES,
};

enum op_event {
    OP_EVENT_START,
    OP_EVENT_REFUSED, /* the operation cannot begin, or the table refuses it, for this reason */
    /* Send. */
    OP_EVENT_OVER,     /* the value has left the table, with this status */
    OP_EVENT_RELEASED, /* no transport reads the memory any more */
    OP_EVENT_RETURNED, /* no receiver of this worker reads the memory any more */
    OP_EVENT_FREE,     /* both have happened, and the value has left the table */
    /* Receive. */
    OP_EVENT_ARRIVED,  /* the result has the tensor */
    OP_EVENT_OFFERED,  /* the table of this worker has a value, which is in receive.offer */
    OP_EVENT_FAILED,   /* with this error */
    OP_EVENT_BROKEN,   /* the connection broke, with this error; another attempt may succeed */
    OP_EVENT_REROUTED, /* the data connection has turned the request away, with this error; the link may carry it */
    OP_EVENT_RETRY,    /* the pause is over */
    OP_EVENT_FENCED,   /* what the stream of the destination holds comes first */
    OP_EVENT_REACHED,  /* that has been done */
    OP_EVENT_APART,    /* the value of this worker, or its destination, lies on a device */
    OP_EVENT_TAKEN,    /* the value of this worker was taken back */
    OP_EVENT_CANCEL,   /* the receive ends, for this reason, when its memory is let go of */
    OP_EVENTS,
};

/* One table for each kind of operation. `next` is where the operation goes before the action runs; an action that has
 * more to report raises a further event. A NULL action: nothing to do. OP_NEVER, what a table leaves out: it cannot
 * happen. */
struct op_transition {
    enum op_state next;
    void (*action)(struct tl_op *op, const struct tl_error *error);
};

extern const struct tl_error op_out_of_memory;

/* How an operation ends: what its completion says. */
struct op_result {
    const struct tl_error *error; /* kept; NULL: TL_OK */
    struct tl_tensor *tensor;
    uint64_t bytes;
    uint64_t step;
    enum tl_path path;
    const char *path_reason; /* why no faster one; lives for ever */
    bool is_verified;
    int64_t duration_ns;
};

/* Sets the error; the first one wins. */
void op_result_set_error(struct op_result *result, const struct tl_error *error);
/* Adds the reason to the error that is set. */
void op_result_explain_error(struct op_result *result, const struct tl_error *why);
/* Drops the error: the operation has succeeded all the same. */
void op_result_drop_error(struct op_result *result);

/* Where the completion goes: to a queue, or to the thread that waits in a blocking call. */
struct op_reader {
    struct tl_cq *cq;     /* NULL: blocking form */
    struct tl_wait *wait; /* NULL: asynchronous form */
    void *user_data;
    struct tl_cq_item item;
};

struct op_send {
    struct tl_sender sender;
    struct tl_tensor *alias; /* until it is in the table */
    struct tl_tensor *base;  /* the caller's; valid as long as the alias */
    struct tl_closure released_closure;
    struct tl_closure over_closure;     /* the value has left the table on another thread */
    const struct tl_error *over_status; /* the status that over_closure carries; kept */
    bool is_released;                   /* no transport reads the memory any more */
    struct tl_borrow *borrow;           /* lends the memory to a receiver of this worker; NULL: none */
};

struct op_receive {
    struct tl_peer *peer;
    struct tl_peer_request request;       /* when the peer is another worker */
    struct tl_receiver receiver;          /* when the peer is this worker */
    struct tl_closure answer_closure;     /* the table has answered on another thread */
    const struct tl_error *answer_status; /* the status that answer_closure carries; kept */
    struct tl_offer offer;                /* what the table has answered with TL_OK */
    struct tl_tensor *destination;        /* the caller's, NULL: a new one */
    struct tl_device_fence *fence;        /* comes before the destination is written; NULL: none, or not any more */
    struct tl_piece *stream_wait;         /* waits for the fence; NULL: not in OP_FENCED */
    struct tl_delivery *delivery;         /* NULL: not in OP_DELIVERING */
    struct tl_device device;              /* where a new one lies */
    struct tl_allocation *allocation;     /* of a new one on a device, under way; NULL: none */
    struct tl_tensor *allocated;          /* what it has brought, and the fetch has not taken; NULL: nothing */
    bool is_place_awaited;                /* the fetch waits for the allocation */
    struct tl_timer retry_timer;
    unsigned retry_count; /* retries so far: each waits longer */
    bool wants_checksum;
    bool may_map;
};

struct tl_op {
    struct tl_worker *worker;
    tl_op_id id;
    enum tl_op_kind kind;
    enum op_state state;
    const struct op_transition (*transitions)[OP_EVENTS]; /* [OP_STATES], by the kind */
    UT_hash_handle hh;                                    /* in worker->operations.ops */
    bool is_registered;
    struct tl_closure closure;
    struct tl_timer deadline_timer;
    int64_t submitted_ns;
    int64_t deadline_ns;
    uint64_t step;
    struct op_reader reader;
    struct op_result result;
    struct op_send send;       /* of a send */
    struct op_receive receive; /* of a receive */

    char key[]; /* NUL-terminated */
};

/* operation.c */

/* Creates an operation of this kind, whose table is `transitions`. Ownership: tl_op_free, or its completion. Errors:
 * TL_INVALID_ARGUMENT: the key. TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_op_create(struct tl_worker *worker, enum tl_op_kind kind,
                            const struct op_transition (*transitions)[OP_EVENTS], const char *key, uint64_t step,
                            int64_t timeout_ns, struct tl_op **ret_op, struct tl_error *ret_error) TL_MUST_USE;
void tl_op_free(struct tl_op *op);
/* Moves the operation as its table says. All events come from this program: one that the table leaves out aborts. error
 * is NULL where the event has none. The operation may be gone when this returns. */
void tl_op_handle(struct tl_op *op, enum op_event event, const struct tl_error *error);
/* The action of the last transition: hands the completion to its reader, whatever `error`. The operation may be gone
 * when this returns. */
void tl_op_complete(struct tl_op *op, const struct tl_error *error);

/* operation_send.c */

enum tl_status tl_op_send_create(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                                 int64_t timeout_ns, struct tl_op **ret_op, struct tl_error *ret_error) TL_MUST_USE;
/* Ends a send that runs. Returns false when it is past that, and completes by itself. */
bool tl_op_send_end(struct tl_op *op, const struct tl_error *error);

/* Tells a send, which is the context, that the borrow of its memory has come back. */
void tl_op_borrow_returned(void *context);

/* operation_receive.c */

enum tl_status tl_op_receive_create(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                                    const struct tl_recv_options *options, int64_t timeout_ns, struct tl_op **ret_op,
                                    struct tl_error *ret_error) TL_MUST_USE;
/* Frees a receive that was not submitted. */
void tl_op_receive_discard(struct tl_op *op);
/* Frees what a receive holds besides its result. */
void tl_op_receive_fini(struct tl_op *op);
/* Returns whether the receive waits for a stream of the program, and the device of that stream. */
bool tl_op_receive_finds_stream(const struct tl_op *op, struct tl_device *ret_device);
/* Ends a receive that runs. Returns false when it is past that, and completes by itself. */
bool tl_op_receive_end(struct tl_op *op, const struct tl_error *error);

#endif
