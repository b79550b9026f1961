// SPDX-License-Identifier: Apache-2.0
/* A subscription, as its files see it: subscription.c (life, retries, and the public function), subscription_values.c
 * (completions, and what is lent), subscription_requests.c (what a slot asks). Everything belongs to the loop. */
#ifndef SERVER_TRANSFERS_SUBSCRIPTION_INTERNAL_H
#define SERVER_TRANSFERS_SUBSCRIPTION_INTERNAL_H

#include "server/progress/completion_queue.h"
#include "server/transfers/borrow.h"
#include "server/transfers/subscription.h"

/*
 *   FREE --ask--> ASKED --arrived, failed--> HELD --in order--> LENT --put, read--> FREE
 *                 |   ^
 *           broken|   |retry
 *                 v   |
 *                BROKEN
 */
enum slot_state {
    SLOT_FREE,   /* waits for its turn to ask, or for memory; while the subscription ends, it has ended */
    SLOT_ASKED,  /* waits for the peer, or for the table of this worker */
    SLOT_BROKEN, /* waits for the retry timer */
    SLOT_HELD,   /* has its value or status; waits for a value that was given before it and still arrives */
    SLOT_LENT,   /* its value is the program's, or the completion with its status */
};

/* A completion, from before the slot asks until it is read. */
struct value {
    struct tl_cq_item item;
    tl_op_id op;
    void *user_data;
    const struct tl_error *error; /* kept; NULL: TL_OK */
    struct tl_tensor *tensor;
    struct tl_tensor *token; /* its last put says that the completion of an error was read */
    uint64_t step;
    uint64_t bytes;
    enum tl_path path;
    const char *path_reason;
    int64_t duration_ns;
    bool is_verified;
};

/* What a slot needs when the peer is this worker. */
struct own_request {
    struct tl_receiver receiver;
    struct tl_closure closure;     /* the table has answered on another thread */
    const struct tl_error *status; /* kept; the answer that the closure carries; NULL: TL_OK */
    struct tl_offer offer;
};

struct slot {
    struct tl_subscription *subscription;
    struct tl_list link;        /* FREE: in subscription->unasked; ASKED, BROKEN, HELD: in subscription->open */
    struct tl_list followers;   /* HELD slots whose values were given later than this one's */
    struct tl_list follow_link; /* HELD: in the followers of another slot, or in subscription->unchecked */
    enum slot_state state;
    bool is_asked_again;            /* its connection broke: the owner may keep a value for this very request */
    struct tl_peer_request request; /* when the peer is another worker */
    struct own_request own;         /* when the peer is this worker */
    struct tl_tensor *memory;       /* the caller's destination, or the library's memory once there is some */
    struct tl_tensor *arrived;      /* HELD: the value; NULL: a status */
    struct tl_borrow *borrow;       /* LENT: tells when it comes back; NULL: nothing will come back */
    struct value *value;            /* the completion that comes next; NULL: LENT, or no memory yet */
    int64_t asked_ns;
};

struct tl_subscription {
    struct tl_cq_item last; /* the last completion */
    struct tl_worker *worker;
    struct tl_peer *peer;
    tl_op_id id;
    UT_hash_handle hh; /* in worker->operations.subscriptions, by id */
    bool is_registered;
    bool is_ending;
    bool has_destinations;
    bool wants_checksum;
    unsigned retry_count;            /* since a value came last: each retry waits longer */
    unsigned hold_count;             /* calls that still use the subscription */
    struct tl_list unasked;          /* struct slot, FREE: they ask in this order */
    struct tl_list open;             /* struct slot, in the order in which they have asked first */
    struct tl_list unchecked;        /* struct slot, HELD: it is not known whether they wait for another one */
    struct tl_list *retried;         /* in `open`: from here on broken slots ask again; the list's head: none do */
    size_t busy_count;               /* slots that are not FREE */
    struct tl_closure round_closure; /* takes it to the loop, and then does what was left over */
    unsigned own_answer_count;       /* answers of the table of this worker that are on their way; atomic */
    bool is_deferred;                /* round_closure waits until others had their turn */
    size_t ended_count;              /* slots that were ended, while it is_ending */
    struct tl_timer retry_timer;
    int64_t submitted_ns;
    int64_t duration_ns; /* from then to the last completion */
    uint64_t from_step;
    struct tl_cq *cq;
    void *user_data;
    const struct tl_error *error; /* kept; with which it ends */
    struct tl_tensor *token;      /* without bytes; completions with an error borrow it */
    char *key;
    size_t slot_count;
    struct slot slots[];
};

extern const struct tl_error subscription_out_of_memory;

/* subscription.c */

/* Ends the subscription, with this status of its last completion. It may be gone when this returns, unless it is held.
 */
void subscription_end(struct tl_subscription *subscription, const struct tl_error *error);
/* Completes a subscription that ends, once nothing uses its slots any more. It may be gone when this returns. */
void subscription_maybe_over(struct tl_subscription *subscription);
/* Between these two the subscription stays. The second one passes on the values that need not wait any more. */
void subscription_hold(struct tl_subscription *subscription);
void subscription_let_go(struct tl_subscription *subscription);
/* Asks again after a pause, for all slots that are broken or free. Does nothing while the subscription ends. */
void subscription_retry_later(struct tl_subscription *subscription);
/* Returns whether the loop's quota allows one more slot to be handled; otherwise the rest is done when others had their
 * turn. */
bool subscription_may_go_on(struct tl_subscription *subscription);
/* Lets free slots ask, as the quota allows. The subscription must be held. */
void subscription_ask(struct tl_subscription *subscription);
/* The slot is about to be LENT or FREE, so that later values need not wait for it. */
void slot_close(struct slot *slot);
/* The slot is free, and asks when it is its turn. */
void slot_free(struct slot *slot);

/* subscription_values.c */

/* Fills what all completions of a subscription have. error NULL: TL_OK. */
void subscription_fill(struct tl_completion *ret_completion, tl_op_id op, void *user_data,
                       const struct tl_error *error);
void slot_take_value(struct tl_cq_item *item, struct tl_completion *ret_completion);
/* A value has arrived in the tensor, whose reference is taken over. The subscription must be held. */
void slot_arrived(struct slot *slot, struct tl_tensor *tensor, uint64_t step, enum tl_path path);
/* A request has failed for good. While the subscription ends, that is what was wanted. It must be held. */
void slot_failed(struct slot *slot, const struct tl_error *error, uint64_t step, bool is_refusal);
/* Passes the values and statuses to the program that need not wait for earlier ones any more, as the quota allows. */
void subscription_push_held(struct tl_subscription *subscription);
/* It is not known any more that values which follow the slot's were given later. */
void slot_drop_followers(struct slot *slot);

/* subscription_requests.c */

void slot_init_request(struct slot *slot);
/* Its connection broke, and it asks once more. */
void slot_forget_connection(struct slot *slot);
/* Asks the table of this worker, or the peer, with this number. */
void slot_ask_own(struct slot *slot, uint64_t number);
void slot_ask_peer(struct slot *slot, uint64_t number);

#endif
