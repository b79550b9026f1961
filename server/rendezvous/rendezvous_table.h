// SPDX-License-Identifier: Apache-2.0
/*
 * Inside the rendezvous table: what it consists of, for the files server/rendezvous*.c only.
 *
 *     name (key) --- publication                    the one published value of the key
 *        |
 *      place (key, step) --- value                  the one sent value, reserved for a request or not
 *        |                     |
 *      waiter, waiter, ...     |                    receivers, in the order they came
 *        |                     |
 *      step (number) ----------+--- mark            all values and waiters of a step; the status it was aborted with
 *
 * A waiter is a struct tl_receiver (rendezvous.h), in which the table keeps where it waits. Three more indexes by
 * request id lead to the value that is reserved for it, to the value that it has given back and to the waiter that has
 * it. Names, places and steps are counted: they exist as long as something uses them. Hashes are seeded, because keys,
 * steps and ids come from peers.
 *
 *      subscription (incarnation, number)            its waiters have no place and no step; in the list of its name
 *                                                    while it has some
 *
 * While a place has a value that is not reserved, no receiver waits there, and no subscription that may have it.
 *
 * Everything is guarded by the table's mutex. What must happen without it - callbacks, and putting tensors, which may
 * call the user's release function - is a deferred call: collected in a list under the mutex, run after it.
 */
#ifndef SERVER_RENDEZVOUS_RENDEZVOUS_TABLE_H
#define SERVER_RENDEZVOUS_RENDEZVOUS_TABLE_H

#include <pthread.h>

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

#include "base/rank_tree.h"
#include "base/spares.h"
#include "server/rendezvous/rendezvous.h"

/* What a key has once it had a subscription. */
struct tl_table_subscribed {
    struct tl_list subscriptions; /* those with waiters, the one that has waited longest first */
    size_t subscription_count;    /* all subscriptions of the key, with and without waiters */
    /* Sent values that are not reserved, by step; maintained while there is a subscription. */
    struct tl_rank_tree offered; /* those that no subscription has refused */
    struct tl_rank_tree refused; /* the others */
};

/* A key; used by its places, values, publication and subscriptions, which it counts in hash.use_count. */
struct tl_table_name {
    struct tl_hash_link hash;                 /* in tl_rendezvous.names, by key */
    struct tl_table_publication *publication; /* NULL: none */
    struct tl_list places;
    struct tl_table_subscribed *subscribed; /* NULL: the key had no subscription */
    uint32_t waiter_count;                  /* waiters of all its places */
    uint32_t place_count : 31;
    bool has_index : 1; /* the places are in tl_rendezvous.places */
    char key[];
};

/* Where senders and receivers of a key and step meet; used by its value and its waiters, which it counts in
 * hash.use_count. */
struct tl_table_place {
    struct tl_hash_link hash; /* in tl_rendezvous.places, by name and step, if the name has an index */
    struct tl_table_name *name;
    struct tl_table_step *step;
    struct tl_list name_link;
    struct tl_table_value *value; /* NULL: nothing is sent */
    struct tl_list waiters;       /* struct tl_receiver */
};

/* A step; used by its values, its places and its mark. */
struct tl_table_step {
    UT_hash_handle hh; /* in tl_rendezvous.steps, by step */
    uint64_t step;
    size_t use_count;
    struct tl_list values;        /* in the order they came */
    struct tl_list waiters;       /* struct tl_receiver, in the order they came */
    struct tl_list ending_values; /* those of an end or abort that is under way, which uses the step */
    struct tl_list ending_waiters;
    bool is_ending;
    struct tl_error *mark; /* the status that it was aborted with; NULL: it was not */
    struct tl_list mark_link;
};

/* A sent value. */
struct tl_table_value {
    struct tl_closure closure;     /* calls over once the mutex is free */
    const struct tl_error *status; /* what the closure reports; valid until it has run */
    struct tl_sender *sender;
    struct tl_tensor *tensor;
    uint64_t size_bytes;
    uint64_t publication;
    struct tl_table_name *name;
    struct tl_table_place *place; /* NULL: the step has ended, and only its receiver may have the value */
    struct tl_table_step *step;
    struct tl_list step_link;
    bool is_reserved;
    bool was_given_back;              /* it was reserved before */
    bool was_refused;                 /* a subscription did not take it */
    struct tl_request_id id;          /* the request that it is reserved for */
    uint64_t holder_count;            /* how many receivers with that id have been given it and have not broken off */
    UT_hash_handle hh;                /* by id: in tl_rendezvous.reservations while reserved, then in given_back */
    struct tl_list orphan_link;       /* in tl_rendezvous.orphans while its receiver has broken off */
    int64_t deadline_ns;              /* until when the receiver may come back */
    struct tl_rank_link offered_link; /* in name->subscribed->offered or refused */
    struct tl_table_subscription *subscription; /* the one whose request it is reserved for; NULL: none */
};

/* A subscription of a key. It is known from its first request on, and is forgotten when its asker gives it up or is
 * gone, or some time after its last request. */
struct tl_table_subscription {
    UT_hash_handle hh;       /* in tl_rendezvous.subscriptions, by id */
    struct tl_request_id id; /* the number is that of the subscription */
    struct tl_table_name *name;
    struct tl_share *share;       /* what its client is charged to; NULL: it is this program's */
    struct tl_list waiters;       /* struct tl_receiver, in the order they came */
    struct tl_list link;          /* with waiters: in name->subscribed->subscriptions; unused: in
                                     tl_rendezvous.unused_subscriptions */
    size_t use_count;             /* waiters, and values that are reserved for it */
    uint64_t from_step;           /* refused values of lower steps are not given: it has refused one before this step */
    bool has_refused_last;        /* no step is behind the one that it has refused */
    uint64_t publication;         /* the published value that was given last; 0: none */
    uint64_t publication_request; /* number of the request that it was given to */
    bool is_given_up;             /* it is forgotten once it is unused */
    int64_t deadline_ns;          /* unused: when it may be forgotten */
};

/* A published value. */
struct tl_table_publication {
    struct tl_closure closure; /* puts the tensor once the mutex is free */
    struct tl_table_name *name;
    struct tl_list link; /* in tl_rendezvous.publications */
    struct tl_tensor *tensor;
    uint64_t size_bytes;
    uint64_t step;
    uint64_t number;
};

struct tl_rendezvous {
    pthread_mutex_t mutex;
    struct tl_rendezvous_limits limits;
    struct tl_rendezvous_stats stats;
    struct tl_shares *waiting; /* what clients have of limits.waiting_receivers */
    uint64_t own_waiting;      /* receivers of this program that wait */
    uint64_t hash_seed;
    uint64_t last_publication; /* the number that was given last */
    uint64_t last_order;       /* that of the request that was made last */
    bool is_closed;
    struct tl_error close_status;

    struct tl_hash_table names;
    struct tl_hash_table places; /* those of names with more than a few */
    struct tl_table_step *steps;
    struct tl_table_step *latest_step; /* that was found last, as most are looked up many times in a row; NULL: none */
    struct tl_table_value *reservations;
    struct tl_table_value *given_back; /* what each request of a subscription gave back last; offered */
    uint64_t publish_visits;           /* how many places were looked at for waiters of publications */
    struct tl_hash_table waiters;      /* struct tl_receiver */
    struct tl_list publications;
    struct tl_list walks;    /* struct tl_table_walk, over publications */
    struct tl_list releases; /* struct tl_table_release, which have come to the values */
    struct tl_list marks;    /* steps with a mark, the oldest first */
    uint64_t mark_count;     /* atomic: it is also read without the mutex */
    struct tl_list orphans;  /* values, by deadline */
    struct tl_table_subscription *subscriptions;
    struct tl_list unused_subscriptions; /* by deadline */

    /* To be used again. */
    struct tl_spares spare_places;
    struct tl_spares spare_values;
};

/* rendezvous_calls.c */

void tl_table_lock(struct tl_rendezvous *table);
void tl_table_unlock(struct tl_rendezvous *table);
/* Unlocks, then runs and empties the list. */
void tl_table_unlock_and_run(struct tl_rendezvous *table, struct tl_list *deferred_calls);
/* Add the call to the sender, the receiver, or the put of the tensor, of what has left the table. status: NULL: TL_OK,
 * for a receiver with the offer. A value may be used again or freed with the next unlock, and so may a publication. */
void tl_table_defer_over(struct tl_list *deferred_calls, struct tl_table_value *value, const struct tl_error *status);
void tl_table_defer_deliver(struct tl_list *deferred_calls, struct tl_receiver *receiver, const struct tl_error *status,
                            const struct tl_offer *offer);
void tl_table_defer_put(struct tl_list *deferred_calls, struct tl_table_publication *publication);

/* rendezvous_table.c */

/* Returns a number that no other value of this table has had; never 0. */
uint64_t tl_table_next_publication(struct tl_rendezvous *table);

/* The hash of a key in tl_rendezvous.names. */
uint32_t tl_table_hash_of_key(const struct tl_rendezvous *table, const char *key, size_t key_bytes);

/* get: makes it if it is missing; NULL when there is no memory. find: NULL when it is missing; takes no use. put: gives
 * a use back. */
struct tl_table_name *tl_table_name_get(struct tl_rendezvous *table, const char *key);
struct tl_table_name *tl_table_name_find(struct tl_rendezvous *table, const char *key);
void tl_table_name_put(struct tl_rendezvous *table, struct tl_table_name *name);
struct tl_table_place *tl_table_place_get(struct tl_rendezvous *table, const char *key, uint64_t step);
struct tl_table_place *tl_table_place_find(struct tl_rendezvous *table, struct tl_table_name *name, uint64_t step);
void tl_table_place_put(struct tl_rendezvous *table, struct tl_table_place *place);
struct tl_table_step *tl_table_step_get(struct tl_rendezvous *table, uint64_t step);
struct tl_table_step *tl_table_step_find(struct tl_rendezvous *table, uint64_t step);
void tl_table_step_put(struct tl_rendezvous *table, struct tl_table_step *step);

/* Remembers that the step was aborted, forgetting the oldest such step beyond the limit. Returns false without memory.
 */
bool tl_table_step_mark(struct tl_rendezvous *table, uint64_t step, const struct tl_error *status);
void tl_table_step_unmark(struct tl_rendezvous *table, struct tl_table_step *step);

/* Puts a value into a place that has none. Returns NULL without memory. */
struct tl_table_value *tl_table_value_add(struct tl_rendezvous *table, struct tl_table_place *place,
                                          struct tl_tensor *tensor, struct tl_sender *sender);
struct tl_table_value *tl_table_value_find(struct tl_rendezvous *table, const struct tl_request_id *id);
/* Reserves the value for a request, which may be one of a subscription. False: no memory. */
bool tl_table_value_reserve(struct tl_rendezvous *table, struct tl_table_value *value, const struct tl_request_id *id,
                            struct tl_table_subscription *subscription) TL_MUST_USE;
/* Ends the reservation of a value whose request does not take it. */
void tl_table_value_give_back(struct tl_rendezvous *table, struct tl_table_value *value);
/* Returns the value that a request of a subscription has given back last, unless that was reserved since; NULL: there
 * is none, or there was no memory to remember it. */
struct tl_table_value *tl_table_value_find_given_back(struct tl_rendezvous *table, const struct tl_request_id *id);
/* Notes that a receiver of the reserved value has broken off; the last of them starts the deadline. */
void tl_table_value_orphan(struct tl_rendezvous *table, struct tl_table_value *value, int64_t deadline_ns);
/* Frees the place for another value, if it holds this one. */
void tl_table_value_detach(struct tl_rendezvous *table, struct tl_table_value *value);
/* Returns the offer for the receiver that the value is reserved for, with a reference of its own. Takes a deadline
 * away. */
void tl_table_value_offer(struct tl_table_value *value, struct tl_offer *ret_offer);
/* Takes the value out of the table without calling its sender. */
void tl_table_value_remove(struct tl_rendezvous *table, struct tl_table_value *value);
/* The same, and a deferred call calls the sender with the status (NULL: TL_OK). */
void tl_table_value_conclude(struct tl_rendezvous *table, struct tl_table_value *value, const struct tl_error *status,
                             struct tl_list *deferred_calls);

/* Makes the receiver wait for the subscription, or without one for its key and step. Takes the share over unless it
 * fails. False: no memory. */
bool tl_table_waiter_add(struct tl_rendezvous *table, struct tl_receiver *receiver,
                         struct tl_table_subscription *subscription, struct tl_share *share) TL_MUST_USE;
struct tl_receiver *tl_table_waiter_find(struct tl_rendezvous *table, const struct tl_request_id *id);
/* Takes a receiver that waits out of the table without calling it. */
void tl_table_waiter_remove(struct tl_rendezvous *table, struct tl_receiver *receiver);
/* The same, and a deferred call answers it with the status (NULL: TL_OK, with the offer). */
void tl_table_waiter_conclude(struct tl_rendezvous *table, struct tl_receiver *receiver, const struct tl_error *status,
                              const struct tl_offer *offer, struct tl_list *deferred_calls);

/* The receiver whose entry in a list of a place or subscription this is. */
static inline struct tl_receiver *tl_table_waiter_at(struct tl_list *link)
{
    return TL_CONTAINER_OF(link, struct tl_receiver, wait.link);
}

/* Charges the client that the receiver belongs to. *ret_share is NULL where that is this program. Errors:
 * TL_RESOURCE_EXHAUSTED. */
enum tl_status tl_table_admit(struct tl_rendezvous *table, const struct tl_receiver *receiver,
                              struct tl_share **ret_share, struct tl_error *ret_error) TL_MUST_USE;
/* Gives back what tl_table_admit has charged. */
void tl_table_dismiss(struct tl_rendezvous *table, struct tl_share *share);

/* rendezvous_subscriptions.c */

/* Finds the receiver's subscription, or adds it, with a use for the caller. Errors: TL_INVALID_ARGUMENT: it is of
 * another key. TL_RESOURCE_EXHAUSTED: limits.waiting_receivers, or no memory. */
enum tl_status tl_table_subscription_get(struct tl_rendezvous *table, const struct tl_receiver *receiver,
                                         struct tl_table_subscription **ret_subscription,
                                         struct tl_error *ret_error) TL_MUST_USE;
/* Gives a use back. */
void tl_table_subscription_put(struct tl_rendezvous *table, struct tl_table_subscription *subscription);
/* Forgets subscriptions that are unused: those whose time is over, or all. Returns whether there were any. */
bool tl_table_subscriptions_sweep(struct tl_rendezvous *table, bool is_all);
/* Forgets the subscriptions of a process that is gone, whose waiters and values were ended, as the quota allows.
 * Returns whether none is left. */
bool tl_table_subscriptions_end(struct tl_rendezvous *table, struct tl_table_release *release, struct tl_quota *quota);
/* Ends all subscriptions with the status. No value may be reserved. */
void tl_table_subscriptions_clear(struct tl_rendezvous *table, const struct tl_error *status,
                                  struct tl_list *deferred_calls);
/* Makes the subscription the last one that is served, or takes it out while it has no waiters. */
void tl_table_subscription_requeue(struct tl_table_subscription *subscription);
/* Answers a request of the subscription with what is there. Returns false when it must wait. */
bool tl_table_subscription_answer(struct tl_rendezvous *table, struct tl_table_subscription *subscription,
                                  const struct tl_receiver *receiver, struct tl_error *ret_status,
                                  struct tl_offer *ret_offer);
/* Gives an unreserved value to the subscription that has waited longest; without one it stays offered. */
void tl_table_subscriptions_offer_value(struct tl_rendezvous *table, struct tl_table_value *value,
                                        struct tl_list *deferred_calls);
/* Gives a new publication to each subscription that waits for it. */
void tl_table_subscriptions_offer_publication(struct tl_rendezvous *table, struct tl_table_publication *publication,
                                              struct tl_list *deferred_calls);
/* Notes that the asker has refused a value: of the values that a subscription has refused, its own one gets none of
 * that step or an earlier one any more. */
void tl_table_subscription_refuse(struct tl_table_value *value);

/* Returns the offer for a receiver, with a reference of its own. */
void tl_table_publication_offer(const struct tl_table_publication *publication, struct tl_offer *ret_offer);
/* Takes the publication out of the table; a deferred call puts its tensor. */
void tl_table_publication_end(struct tl_rendezvous *table, struct tl_table_publication *publication,
                              struct tl_list *deferred_calls);

#endif
