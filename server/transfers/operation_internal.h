// SPDX-License-Identifier: Apache-2.0
/* An operation, as its files see it: operation.c (life, and the public functions), operation_send.c,
 * operation_receive.c, operation_place.c (where a receive puts its value), operation_group.c (many at once). */
#ifndef SERVER_TRANSFERS_OPERATION_INTERNAL_H
#define SERVER_TRANSFERS_OPERATION_INTERNAL_H

#include "base/hash_table.h"
#include "server/progress/completion_queue.h"
#include "server/transfers/operation_steps.h"
#include "server/worker_internal.h"
#include "tensor/allocation.h"
#include "tensor/delivery.h"
#include "tensor/device.h"
#include "tensor/part.h"
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

struct op_group;
struct tl_op;

extern const struct tl_error op_out_of_memory;

/* Sets the error of an operation; the first one wins. A receive is not ended with its step any more. */
void op_set_error(struct tl_op *op, const struct tl_error *error);
/* Adds the reason to the error that is set. */
void op_explain_error(struct tl_op *op, const struct tl_error *why);
/* Drops the error: the operation has succeeded all the same. */
void op_drop_error(struct tl_op *op);

struct op_send {
    struct tl_closure closure; /* takes signals to the loop */
    struct tl_sender sender;
    struct tl_tensor *alias;            /* until it is in the table */
    struct tl_tensor *base;             /* the caller's; valid as long as the alias */
    const struct tl_error *over_status; /* that of SEND_SIGNAL_OVER; kept */
    struct tl_borrow *borrow;           /* lends the memory to a receiver of this worker; NULL: none */
    const char *key;
    uint64_t step;
    uint64_t bytes;
    uint8_t signals;   /* what has happened on other threads: SEND_SIGNAL_OVER, SEND_SIGNAL_RELEASED; atomic */
    bool is_released;  /* no transport reads the memory any more */
    bool is_discarded; /* it was never submitted */
};

#define SEND_SIGNAL_OVER 1u     /* the value has left the table */
#define SEND_SIGNAL_RELEASED 2u /* the last reference to the alias is gone */

/* What only a receive from this worker itself, for a device, or of a part for a box of its destination needs. */
struct op_receive_rare {
    struct tl_op *op;
    struct tl_tensor *whole;              /* the caller's destination, of which op->tensor shows a box; NULL: none */
    struct tl_receiver receiver;          /* when the peer is this worker */
    struct tl_closure answer_closure;     /* the table has answered on another thread */
    const struct tl_error *answer_status; /* the status that answer_closure carries; kept */
    struct tl_offer offer;                /* what the table has answered with TL_OK */
    struct tl_device_fence *fence;        /* comes before the destination is written; NULL: none, or not any more */
    struct tl_piece *stream_wait;         /* waits for the fence; NULL: not in OP_FENCED */
    struct tl_delivery *delivery;         /* NULL: not in OP_DELIVERING */
    struct tl_device device;              /* where a new one lies */
    struct tl_allocation *allocation;     /* makes a new one on a device; NULL: none is under way */
    struct tl_tensor *allocated;          /* what it has brought, and the fetch has not taken; NULL: nothing */
    bool is_place_awaited;                /* the fetch waits for the allocation */
};

struct op_receive {
    union {
        struct tl_peer_request request; /* has key, step and priority; when the receive has arrived, its fetch has the
                                           step of the value, the path, and whether it is verified */
        struct tl_timer retry_timer;    /* in OP_RETRYING, where the closure of the request is not used */
    };
    struct op_receive_rare *rare; /* NULL: neither from this worker nor for a device */
};

/* An operation. There may be hundreds of thousands that wait, so that its size is bounded
 * (tests/unit/operation_test.c). */
struct tl_op {
    union {
        struct tl_cq_item item; /* the completion, once it is over. The first closure of a send or a receive lies
                                   here too, and does not travel any more then */
        struct op_send send;
        struct op_receive receive;
    };
    struct op_call *call;
    void *user_data;          /* blocking form of a single operation: its tl_wait */
    struct tl_tensor *tensor; /* a receive's: the caller's destination (NULL: a new one), and when it has arrived the
                                 value */
    union {
        struct tl_op_step_member step_member; /* a receive's while it is_in_step: in worker->operations.steps */
        struct {
            const struct tl_error *error; /* kept; NULL: TL_OK */
            int64_t duration_ns;          /* in OP_COMPLETE */
        };
    };
    uint8_t kind;         /* enum tl_op_kind */
    uint8_t state;        /* enum op_state */
    uint8_t retry_count;  /* a receive's: each retry waits longer */
    bool has_arrived : 1; /* a receive's: the tensor is the value */
    bool is_in_step : 1;  /* a receive's: it can be ended with its step, and has no error */
};

/* What the operations of one call share. A single send or receive is a call with one operation, of which there may be
 * as many, so that its size is bounded, too. */
struct op_call {
    struct tl_worker *worker;
    tl_op_id id; /* that of the operation, or of the group, and then those of its members follow */
    union {
        struct tl_closure closure;    /* takes the call to the loop */
        struct {                      /* there */
            struct tl_hash_link hash; /* in worker->operations.calls, by id */
            bool is_registered;
            bool is_group; /* it is in a struct op_group, and otherwise in a struct op_single */
        };
    };
    struct tl_timer deadline_timer; /* has the deadline before it is armed */
    int64_t submitted_ns;
    struct tl_cq *cq; /* NULL: blocking form */
};

/* A single operation, in one block with its call, its key and, of a send, its alias. */
struct op_single {
    struct op_call call;
    struct tl_op op;
    char key[];
};

static inline const char *op_key(const struct tl_op *op)
{
    return op->kind == TL_OP_SEND ? op->send.key : op->receive.request.fetch.key;
}

/* The step that is sent or wanted. */
static inline uint64_t op_step(const struct tl_op *op)
{
    return op->kind == TL_OP_SEND ? op->send.step : op->receive.request.fetch.step;
}

static inline struct tl_worker *op_worker(const struct tl_op *op)
{
    return op->call->worker;
}

/* operation.c */

/* Initialises a call that the loop takes with `start`. */
void op_call_init(struct op_call *call, struct tl_worker *worker, int64_t timeout_ns,
                  void (*start)(struct tl_closure *));
/* Checks a key. Errors: TL_INVALID_ARGUMENT. */
enum tl_status op_check_key(const char *key, struct tl_error *ret_error) TL_MUST_USE;
/* Checks what a receive asks for. *ret_name is its key, or the name of the part of it, in the buffer. Errors: those of
 * the call of tl_recv. */
enum tl_status op_name(const char *key, const struct tl_part *part, char buffer[TL_MAX_KEY_BYTES + 1],
                       const char **ret_name, struct tl_error *ret_error) TL_MUST_USE;
/* Makes the call known by its id, and watches its deadline. Returns false when there is no memory for that. */
bool op_call_register(struct op_call *call, bool is_group) TL_MUST_USE;
void op_call_unregister(struct op_call *call);
/* Returns the operations of a call that is registered, and their number. */
struct tl_op *op_call_ops(struct op_call *call, size_t *ret_count);
/* Gives the call `id_count` ids and passes it to the loop. Returns its id. */
tl_op_id op_call_submit(struct op_call *call, uint64_t id_count);

/* Starts an operation of a call that is registered, or refuses it for the reason. tl_ops_send comes after one or
 * several of these. */
void op_start(struct tl_op *op, const struct tl_error *refusal);
/* Ends an operation that waits, with an error. Returns false when it is past that, and completes by itself. */
bool op_end(struct tl_op *op, const struct tl_error *error);
/* The same, because its deadline has come. */
void op_end_late(struct tl_op *op);
/* The same, because the caller wants it. */
bool op_cancel(struct tl_op *op);
/* Fills the completion of an operation, which has this id and place in its call, and frees what it still holds. */
void op_read(struct tl_op *op, tl_op_id id, size_t place, struct tl_completion *ret_completion);
/* Moves the operation as its table says. All events come from this program: one that the table leaves out aborts. error
 * is NULL where the event has none. The operation may be gone when this returns. */
void tl_op_handle(struct tl_op *op, enum op_event event, const struct tl_error *error);
/* The action of the last transition: hands the completion to its reader, whatever `error`. The operation may be gone
 * when this returns. */
void tl_op_complete(struct tl_op *op, const struct tl_error *error);

/* operation_send.c */

extern const struct op_transition op_send_transitions[OP_STATES][OP_EVENTS];
/* Initialises a zeroed operation, whose call is set. The key must stay valid, and so must alias_place
 * (tl_tensor_place_bytes), where the alias of the tensor is made. Ownership: its completion, or tl_op_send_discard.
 * Errors: those of the call of tl_send. */
enum tl_status tl_op_send_init(struct tl_op *op, void *alias_place, const char *key, uint64_t step,
                               struct tl_tensor *tensor, struct tl_error *ret_error) TL_MUST_USE;
/* Puts the values of sends that have begun into the table, for which it is locked once. Comes after op_start. */
void tl_ops_send(struct tl_worker *worker);
/* Frees what a send that was not submitted holds. */
void tl_op_send_discard(struct tl_op *op);
/* Ends a send that runs. Returns false when it is past that, and completes by itself. */
bool tl_op_send_end(struct tl_op *op, const struct tl_error *error);

/* Tells a send, which is the context, that the borrow of its memory has come back. */
void tl_op_borrow_returned(void *context);

/* operation_receive.c */

extern const struct op_transition op_receive_transitions[OP_STATES][OP_EVENTS];
/* Initialises a zeroed operation, whose call is set, with options of this version. The key must stay valid. Ownership:
 * its completion, or tl_op_receive_discard. Errors: those of the call of tl_recv. */
enum tl_status tl_op_receive_init(struct tl_op *op, struct tl_peer *peer, const char *key, uint64_t step,
                                  const struct tl_recv_options *options, struct tl_error *ret_error) TL_MUST_USE;
/* Frees what a receive holds, but for the value that has arrived: when it completes, or is not submitted. */
void tl_op_receive_fini(struct tl_op *op);
/* Returns whether the receive waits for a stream of the program, and the device of that stream. */
bool tl_op_receive_finds_stream(const struct tl_op *op, struct tl_device *ret_device);
/* Ends a receive that runs. Returns false when it is past that, and completes by itself. */
bool tl_op_receive_end(struct tl_op *op, const struct tl_error *error);

/* operation_place.c */

/* Makes the receive write a box of the caller's destination. Errors: TL_INVALID_ARGUMENT, TL_OUT_OF_RANGE: the box is
 * not in the destination. TL_UNIMPLEMENTED: it is not in one piece, and on a device. TL_RESOURCE_EXHAUSTED. */
enum tl_status op_place_in_box(struct tl_op *op, struct tl_tensor *destination, const struct tl_part *part,
                               struct tl_error *ret_error) TL_MUST_USE;
/* Returns what the completion carries of a value that has arrived: the value, or the destination of the caller whose
 * box it is, which has it then. Takes the reference over. */
struct tl_tensor *op_settle_in_box(struct tl_op *op, struct tl_tensor *value);

/* Chooses the destination of a fetch (tl_fetch_ops.place). */
enum tl_status op_fetch_place(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                              struct tl_tensor **ret_destination, struct tl_error *ret_error);
/* Errors: TL_FAILED_PRECONDITION: a value of this meta-data does not fit the caller's destination. */
enum tl_status op_check_destination(const struct tl_op *op, const struct tl_meta_data *meta_data,
                                    struct tl_error *ret_error) TL_MUST_USE;
/* Returns where the destination lies for a value of this meta-data: dead tensors and strings are never on devices. */
struct tl_device op_device_for(const struct tl_op *op, const struct tl_meta_data *meta_data);
/* Gives up what is or was allocated on a device. */
void op_drop_allocation(struct op_receive_rare *rare);
/* Posts to the progress engine that is `loop`. */
void op_post_to_progress(void *loop, struct tl_closure *closure);

/* operation_group.c */

/* Returns the group of a call that is one. */
struct op_group *op_group_of(struct op_call *call);
/* Returns the members of a group, and their number. */
struct tl_op *op_group_members(struct op_group *group, size_t *ret_count);
/* A member of a group has completed. The group may be gone when this returns. */
void op_group_member_over(struct op_group *group, struct tl_op *op);
/* The deadline of a group has come. */
void op_group_late(struct op_group *group);
/* Keeps the group, with its members, until it is let go of: the end of its last member may free it. */
void op_group_hold(struct op_group *group);
void op_group_let_go(struct op_group *group);
/* Ends all members, some in each round. Returns false when none is open. */
bool op_group_end(struct op_group *group, const struct tl_error *error);
/* The same; ends as many now as the quota allows. Returns whether none is left. The caller holds the group. */
bool op_group_end_some(struct op_group *group, const struct tl_error *error);

#endif
