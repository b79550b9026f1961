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
 * Two more indexes by request id lead to the value that is reserved for it and to the waiter that has it. Names, places
 * and steps are counted: they exist as long as something uses them. Hashes are seeded, because keys, steps and ids come
 * from peers.
 *
 * While a place has a value that is not reserved, no receiver waits there.
 *
 * Everything is guarded by the table's mutex. What must happen without it - callbacks, and putting tensors, which may
 * call the user's release function - is an deferred_call: collected in a list under the mutex, run after it.
 */
#ifndef SERVER_RENDEZVOUS_RENDEZVOUS_TABLE_H
#define SERVER_RENDEZVOUS_RENDEZVOUS_TABLE_H

#include <pthread.h>

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

#include "server/rendezvous/rendezvous.h"

/* Something to do once the mutex is free. */
struct tl_table_deferred_call {
    struct tl_list link;
    void (*run)(
        struct tl_table_deferred_call *deferred_call); /* frees the object that the deferred_call is embedded in */
};

/* A key; used by its places, values and publication. */
struct tl_table_name {
    UT_hash_handle hh; /* in tl_rendezvous.names, by key */
    size_t use_count;
    struct tl_table_publication *publication; /* NULL: none */
    struct tl_list places;
    char key[];
};

struct tl_table_place_id {
    uint64_t name; /* address of the name */
    uint64_t step;
};

/* Where senders and receivers of (key, step) meet; used by its value and its waiters. */
struct tl_table_place {
    UT_hash_handle hh; /* in tl_rendezvous.places, by id */
    struct tl_table_place_id id;
    size_t use_count;
    struct tl_table_name *name;
    struct tl_list name_link;
    struct tl_table_value *value; /* NULL: nothing is sent */
    struct tl_list waiters;
};

/* A step; used by its values, its waiters and its mark. */
struct tl_table_step {
    UT_hash_handle hh; /* in tl_rendezvous.steps, by step */
    uint64_t step;
    size_t use_count;
    struct tl_list values;  /* in the order they came */
    struct tl_list waiters; /* in the order they came */
    struct tl_error *mark;  /* the status that it was aborted with; NULL: it was not */
    struct tl_list mark_link;
};

/* A sent value. */
struct tl_table_value {
    struct tl_table_deferred_call deferred_call; /* calls over */
    const struct tl_error *status;               /* what the deferred_call reports; valid until it has run */
    struct tl_sender *sender;
    struct tl_tensor *tensor;
    uint64_t size_bytes;
    uint64_t publication;
    struct tl_table_name *name;
    struct tl_table_place *place; /* NULL: the step has ended, and only its receiver may have the value */
    struct tl_table_step *step;
    struct tl_list step_link;
    bool is_reserved;
    struct tl_request_id id;    /* the request that it is reserved for */
    uint64_t holder_count;      /* how many receivers with that id have been given it and have not broken off */
    UT_hash_handle hh;          /* in tl_rendezvous.reservations, by id, while reserved */
    struct tl_list orphan_link; /* in tl_rendezvous.orphans while its receiver has broken off */
    int64_t deadline_ns;        /* until when the receiver may come back */
};

/* A receiver that waits. */
struct tl_table_waiter {
    struct tl_table_deferred_call deferred_call; /* calls deliver */
    const struct tl_error *status;               /* what the deferred_call reports; valid until it has run */
    struct tl_offer offer;                       /* what the deferred_call hands over with TL_OK */
    struct tl_receiver *receiver;
    struct tl_share *share; /* what its client is charged to; NULL: the receiver is this program's */
    struct tl_request_id id;
    UT_hash_handle hh; /* in tl_rendezvous.waiters, by id */
    struct tl_table_place *place;
    struct tl_list place_link;
    struct tl_table_step *step;
    struct tl_list step_link;
};

/* A published value. */
struct tl_table_publication {
    struct tl_table_deferred_call deferred_call; /* puts the tensor */
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

    struct tl_table_name *names;
    struct tl_table_place *places;
    struct tl_table_step *steps;
    struct tl_table_value *reservations;
    struct tl_table_waiter *waiters;
    struct tl_list publications;
    struct tl_list walks; /* of struct tl_table_walk, over publications */
    struct tl_list marks; /* steps with a mark, the oldest first */
    uint64_t mark_count;
    struct tl_list orphans; /* values, by deadline */
};

void tl_table_lock(struct tl_rendezvous *table);
void tl_table_unlock(struct tl_rendezvous *table);
/* Unlocks, then runs and empties the list. */
void tl_table_unlock_and_run(struct tl_rendezvous *table, struct tl_list *deferred_calls);

/* Returns a number that no other value of this table has had; never 0. */
uint64_t tl_table_next_publication(struct tl_rendezvous *table);

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
/* False: no memory. */
bool tl_table_value_reserve(struct tl_rendezvous *table, struct tl_table_value *value,
                            const struct tl_request_id *id) TL_MUST_USE;
/* Ends the reservation of a value, if there is one. */
void tl_table_value_unreserve(struct tl_rendezvous *table, struct tl_table_value *value);
/* Notes that a receiver of the reserved value has broken off; the last of them starts the deadline. */
void tl_table_value_orphan(struct tl_rendezvous *table, struct tl_table_value *value, int64_t deadline_ns);
/* Frees the place for another value, if it holds this one. */
void tl_table_value_detach(struct tl_rendezvous *table, struct tl_table_value *value);
/* Returns the offer for the receiver that the value is reserved for, with a reference of its own. Takes a deadline
 * away. */
void tl_table_value_offer(struct tl_table_value *value, struct tl_offer *ret_offer);
/* Takes the value out of the table without calling its sender. */
void tl_table_value_remove(struct tl_rendezvous *table, struct tl_table_value *value);
/* The same, and an deferred_call calls the sender with the status (NULL: TL_OK). */
void tl_table_value_conclude(struct tl_rendezvous *table, struct tl_table_value *value, const struct tl_error *status,
                             struct tl_list *deferred_calls);

/* Takes the share over unless it fails. NULL: no memory. */
struct tl_table_waiter *tl_table_waiter_add(struct tl_rendezvous *table, struct tl_receiver *receiver,
                                            struct tl_share *share);
struct tl_table_waiter *tl_table_waiter_find(struct tl_rendezvous *table, const struct tl_request_id *id);
/* Takes the waiter out of the table without calling its receiver. */
void tl_table_waiter_remove(struct tl_rendezvous *table, struct tl_table_waiter *waiter);
/* The same, and an deferred_call calls the receiver with the status (NULL: TL_OK, with waiter->offer, which has been
 * filled in). */
void tl_table_waiter_conclude(struct tl_rendezvous *table, struct tl_table_waiter *waiter,
                              const struct tl_error *status, struct tl_list *deferred_calls);

/* Returns the offer for a receiver, with a reference of its own. */
void tl_table_publication_offer(const struct tl_table_publication *publication, struct tl_offer *ret_offer);
/* Takes the publication out of the table; an deferred_call puts its tensor. */
void tl_table_publication_end(struct tl_rendezvous *table, struct tl_table_publication *publication,
                              struct tl_list *deferred_calls);

#endif
