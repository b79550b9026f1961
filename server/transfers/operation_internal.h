// SPDX-License-Identifier: Apache-2.0
/* An operation, as its files see it: operation.c (life, and the public functions), operation_send.c,
 * operation_receive.c. */
#ifndef SERVER_TRANSFERS_OPERATION_INTERNAL_H
#define SERVER_TRANSFERS_OPERATION_INTERNAL_H

#include "server/progress/completion_queue.h"
#include "server/worker_internal.h"

/*
 *      NEW --closure--> RUNNING --over--> LINGERING --memory free--> COMPLETE      a send
 *      NEW --closure--> RUNNING <--> RETRYING             --> COMPLETE             a receive
 *                         \--ended--> CANCELLING --let go--> COMPLETE
 */
enum op_state {
    OP_NEW,        /* waits for the loop's owner to take the closure */
    OP_RUNNING,    /* waits for the table, the peer or the transport */
    OP_RETRYING,   /* receive: waits for the retry timer */
    OP_CANCELLING, /* receive: over, waits for the transport, or the table, to let go of the memory */
    OP_LINGERING,  /* send: over, waits for the last reader of the memory */
    OP_COMPLETE,   /* waits for the reader of the completion */
};

struct tl_op {
    struct tl_worker *worker;
    tl_op_id id;
    enum tl_op_kind kind;
    enum op_state state;
    UT_hash_handle hh; /* in worker->ops */
    bool is_registered;
    struct tl_closure closure;
    struct tl_timer deadline_timer;
    struct tl_timer retry_timer;
    int64_t submitted_ns;
    int64_t deadline_ns;
    int64_t retry_pause_ns;
    uint64_t step;

    struct tl_cq *cq;     /* NULL: blocking form */
    struct tl_wait *wait; /* NULL: asynchronous form */
    void *user_data;
    struct tl_cq_item item;

    /* Send. */
    struct tl_sender sender;
    struct tl_tensor *alias; /* until it is in the table */
    struct tl_tensor *base;  /* the caller's; valid as long as the alias */
    struct tl_closure released_closure;
    struct tl_closure over_closure;     /* the value has left the table on another thread */
    const struct tl_error *over_status; /* of over_closure; kept */
    bool is_released;                   /* no transport reads the memory any more */
    struct tl_borrow *borrow;           /* to a receiver of this worker; NULL: none */

    /* Receive. */
    struct tl_peer *peer;
    struct tl_peer_request request;       /* from a peer */
    struct tl_receiver receiver;          /* from this worker */
    struct tl_closure answer_closure;     /* the table has answered on another thread, */
    const struct tl_error *answer_status; /* with this; kept */
    struct tl_offer answer_offer;         /* or this */
    struct tl_tensor *destination;        /* the caller's, NULL: a new one */
    bool wants_checksum;
    bool may_map;

    /* Result. */
    const struct tl_error *error; /* kept; NULL: TL_OK */
    struct tl_tensor *tensor;
    uint64_t bytes;
    uint64_t result_step;
    enum tl_path path;
    const char *path_reason; /* why no faster one; lives for ever */
    bool is_verified;
    int64_t duration_ns;

    char key[]; /* NUL-terminated */
};

/* operation.c */

/* Errors: TL_INVALID_ARGUMENT: the key. TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_op_create(struct tl_worker *worker, enum tl_op_kind kind, const char *key, uint64_t step,
                            int64_t timeout_ns, struct tl_op **ret_op, struct tl_error *ret_error) TL_MUST_USE;
void tl_op_free(struct tl_op *op);
/* Sets the result; the first error wins. */
void tl_op_set_error(struct tl_op *op, const struct tl_error *error);
/* Adds the reason to the error that is set. */
void tl_op_explain_error(struct tl_op *op, const struct tl_error *why);
/* It has succeeded all the same. */
void tl_op_drop_error(struct tl_op *op);
/* Everything is over: tells who submitted it. The operation may be gone afterwards. */
void tl_op_complete(struct tl_op *op);

/* operation_send.c */

enum tl_status tl_op_send_create(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                                 int64_t timeout_ns, struct tl_op **ret_op, struct tl_error *ret_error) TL_MUST_USE;
/* refusal: why it cannot begin; NULL: it can. */
void tl_op_send_start(struct tl_op *op, const struct tl_error *refusal);
/* Ends one that runs. False: it is past that, and completes by itself. */
bool tl_op_send_end(struct tl_op *op, const struct tl_error *error);

/* The borrow of its memory has come back; context is the send. */
void tl_op_borrow_returned(void *context);

/* operation_receive.c */

enum tl_status tl_op_receive_create(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                                    const struct tl_recv_options *options, int64_t timeout_ns, struct tl_op **ret_op,
                                    struct tl_error *ret_error) TL_MUST_USE;
/* Undoes it for an operation that was not submitted. */
void tl_op_receive_discard(struct tl_op *op);
void tl_op_receive_start(struct tl_op *op);
void tl_op_receive_fail(struct tl_op *op, const struct tl_error *error);
bool tl_op_receive_end(struct tl_op *op, const struct tl_error *error);

#endif
