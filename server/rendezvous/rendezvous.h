// SPDX-License-Identifier: Apache-2.0
/*
 * Rendezvous table: where values and receivers meet, by key and step.
 *
 * A value is either sent (one-shot: exactly one receiver, reserved for it from the match until it acknowledges) or
 * published (any number of receivers, until replaced or withdrawn). A receiver of (key, step) is given, in this order:
 * the value that is reserved for its request id; an unreserved sent value of exactly (key, step); the published value
 * of key if its step is at least `step`; the status of an aborted step; else it waits. Receivers of one (key, step) are
 * served in the order they came.
 *
 * Reservation: once matched, a sent value belongs to the receiver's request id. Asking again with the same id gets the
 * same value again (the connection broke, the transfer is resumed). It ends with acknowledge (the value is dropped, the
 * sender's send is over), release (the receiver gave up: the value is offered again), or, for a receiver that broke
 * off, expiry (offered again).
 *
 * The table is the one object that several threads share: it has a mutex of its own, which is never held while a
 * callback runs. Callbacks run on the thread whose call caused them, before that call returns. A callback may call
 * into the table; what that call causes is nested in it. All functions but destroy: Thread: any.
 */
#ifndef SERVER_RENDEZVOUS_RENDEZVOUS_H
#define SERVER_RENDEZVOUS_RENDEZVOUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/hash_table.h"
#include "base/list.h"
#include "base/mailbox.h"
#include "base/quota.h"
#include "base/shares.h"
#include "tensor/transfer.h"

struct tl_rendezvous;
struct tl_table_place;
struct tl_table_subscription;

struct tl_rendezvous_limits {
    uint64_t waiting_receivers; /* receivers that may wait at a time: divided among clients (base/shares.h), and again
                                   that many of this program */
    uint64_t held_bytes;        /* bytes of sent values not yet acknowledged */
    uint64_t aborted_steps;     /* marks of aborted steps that are kept, 0: none; beyond it the oldest is forgotten */
    int64_t subscription_ns;    /* for so long a subscription without requests and values is remembered at least */
};

struct tl_rendezvous_stats {
    uint64_t waiting_receivers;
    uint64_t held_tensors; /* sent, reserved or not */
    uint64_t held_bytes;
    uint64_t published_tensors;
    uint64_t published_bytes;
    uint64_t dropped_tensors; /* since create: by tl_rendezvous_end_step */
};

/* Errors: TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_rendezvous_create(const struct tl_rendezvous_limits *limits, struct tl_rendezvous **ret_table,
                                    struct tl_error *ret_error) TL_MUST_USE;

/* No receiver may wait and no sender be registered: tl_rendezvous_close first. NULL is accepted. */
void tl_rendezvous_destroy(struct tl_rendezvous *table);

/* Fails every receiver and every sender with the status, drops all values, and refuses everything from now on with it.
 * A second close changes nothing. */
void tl_rendezvous_close(struct tl_rendezvous *table, const struct tl_error *status);

/* --------------------------------------------------------------------------------------------------- producers -- */

/* Embedded in what sends; must stay valid until over is called or tl_rendezvous_unsend has returned true. */
struct tl_sender {
    /* The value has left the table, exactly once: TL_OK when a receiver acknowledged it. The table has put its
     * reference; the receiver's transport may still hold one. */
    void (*over)(struct tl_sender *sender, const struct tl_error *status);
    void *entry; /* the table's */
};

/* Offers a tensor once; the table takes a reference of its own. over may be called before this returns, when a receiver
 * acknowledges at once.
 * Errors: TL_ALREADY_EXISTS: (key, step) is already offered. TL_RESOURCE_EXHAUSTED: limits.held_bytes, or no memory.
 * The status of an aborted step, or of close. On error over is not called. */
enum tl_status tl_rendezvous_send(struct tl_rendezvous *table, const char *key, uint64_t step, struct tl_tensor *tensor,
                                  struct tl_sender *sender, struct tl_error *ret_error) TL_MUST_USE;

/* What tl_rendezvous_send offers. */
struct tl_rendezvous_value {
    const char *key;
    uint64_t step;
    struct tl_tensor *tensor;
    struct tl_sender *sender;
};

/* Does the same for `count` values: the table is locked once. ret_statuses [count]: how tl_rendezvous_send would have
 * returned for each of them. */
void tl_rendezvous_send_many(struct tl_rendezvous *table, const struct tl_rendezvous_value *values, size_t count,
                             struct tl_error *ret_statuses);

/* Takes a sent value back, reserved or not. A transfer that runs goes on by the transport's own reference, and its
 * acknowledgement is ignored. True: over will not be called any more. False: it has been or is being called, or the
 * send has failed. */
bool tl_rendezvous_unsend(struct tl_rendezvous *table, struct tl_sender *sender) TL_MUST_USE;

/* Publishes, replacing what the key had; the table takes a reference. Receivers that wait for at most `step` get it.
 * ret_publication may be NULL.
 * Errors: TL_RESOURCE_EXHAUSTED: no memory. The status of close. */
enum tl_status tl_rendezvous_publish(struct tl_rendezvous *table, const char *key, uint64_t step,
                                     struct tl_tensor *tensor, uint64_t *ret_publication,
                                     struct tl_error *ret_error) TL_MUST_USE;

/* Checks that a tensor of this step would not replace a newer one. On the thread that publishes the answer stays true.
 * Errors: TL_FAILED_PRECONDITION, naming both steps. */
enum tl_status tl_rendezvous_check_version(struct tl_rendezvous *table, const char *key, uint64_t step,
                                           struct tl_error *ret_error) TL_MUST_USE;

/* The tensor that a key is published with, one reference; NULL: none. On the thread that publishes it stays so. */
struct tl_tensor *tl_rendezvous_published(struct tl_rendezvous *table, const char *key);

/* Ends one publication. Errors: TL_NOT_FOUND: naming the nearest key that is published. The status of close. */
enum tl_status tl_rendezvous_withdraw(struct tl_rendezvous *table, const char *key,
                                      struct tl_error *ret_error) TL_MUST_USE;

/* Ends this publication of the key. Returns false when it has ended already. */
bool tl_rendezvous_withdraw_number(struct tl_rendezvous *table, const char *key, uint64_t publication);

/* A walk over what is published, a few at a time, so that the mutex is never held for long. Each key that is published
 * from the beginning to the end of the walk is met exactly once, with the publication that it has in that moment; keys
 * that come or go meanwhile may be met. The table may not be destroyed before the end. */
struct tl_table_walk {
    struct tl_list link;  /* in the table's walks */
    struct tl_list *next; /* the next publication's link, or the list's head */
    uint64_t
        left_count; /* how many publications to visit at most, so that the walk ends even if others publish faster */
};

/* A copy of what the table says of one publication. */
struct tl_table_entry {
    char key[TL_MAX_KEY_BYTES + 1];
    uint64_t step;
    uint64_t publication;
    struct tl_meta_data meta_data;
    struct tl_annotations *annotations; /* one reference; NULL: none */
};

/* Errors: The status of close. */
enum tl_status tl_rendezvous_walk_begin(struct tl_rendezvous *table, struct tl_table_walk *walk,
                                        struct tl_error *ret_error) TL_MUST_USE;
/* Copies the next publications, at most capacity; returns how many, 0 at the end. Ownership: the caller puts the
 * annotations.
 */
size_t tl_rendezvous_walk_next(struct tl_rendezvous *table, struct tl_table_walk *walk, struct tl_table_entry *entries,
                               size_t capacity);
void tl_rendezvous_walk_end(struct tl_rendezvous *table, struct tl_table_walk *walk);

/* --------------------------------------------------------------------------------------------------- receivers -- */

/* The table's part of a receiver that waits. */
struct tl_table_wait {
    struct tl_hash_link hash;                   /* in the table, by id */
    struct tl_table_place *place;               /* NULL: it waits for a subscription */
    struct tl_table_subscription *subscription; /* NULL: it waits for exactly one value */
    struct tl_list link;                        /* in place->waiters or subscription->waiters */
    union {
        struct tl_list step_link; /* in place->step->waiters */
        uint64_t step;            /* which the subscription wants at least */
    };
};

/* The answer to a receiver that has waited. */
struct tl_table_answer {
    struct tl_closure closure;     /* calls deliver once the mutex is free */
    const struct tl_error *status; /* valid until deliver has returned */
    struct tl_offer offer;         /* with TL_OK */
};

/* Embedded in what wants a tensor. Hundreds of thousands may wait, so that what is needed one after the other shares
 * its memory. */
struct tl_receiver {
    struct tl_request_id id;
    /* When the request was made first: the table counts requests. 0: now; the table sets it. One that asks again keeps
     * its number. */
    uint64_t order;
    /* The answer, exactly once unless cancelled: a status, or with TL_OK an offer whose tensor reference the callee
     * takes over. */
    void (*deliver)(struct tl_receiver *receiver, const struct tl_error *status, const struct tl_offer *offer);
    struct tl_share *share; /* the table's, while it waits: what its client is charged to; NULL: it is this program's */
    bool is_waiting;        /* the table's */
    union {
        /* What is wanted, set for each call of tl_rendezvous_receive. */
        struct {
            const char *key; /* valid until that call returns */
            uint64_t step;
            uint64_t subscription; /* a number within the incarnation: any value of at least `step` that the
                                      subscription has not had, sent ones in the order of their steps; 0: none */
            const struct tl_share_client *client; /* is charged while it waits; NULL: this program */
        };
        struct tl_table_wait wait;     /* the table's, while it waits */
        struct tl_table_answer answer; /* the table's, until deliver is called; then free to be used */
    };
};

/* Brings what is known of these keys into the processor's caches; many are to be received now. */
void tl_rendezvous_prefetch(struct tl_rendezvous *table, const struct tl_key_text *keys, size_t count);

/* Wants (key, step). deliver is called before this returns when the answer is known. Of two receivers
 * with the same id, the one whose request was made first is superseded: it gets TL_ABORTED. A receiver beyond
 * limits.waiting_receivers, or for which there is no memory, gets TL_RESOURCE_EXHAUSTED; one whose id has another (key,
 * step) reserved, or whose subscription is one of another key, gets TL_INVALID_ARGUMENT. A subscription counts as one
 * waiting receiver besides its requests. */
void tl_rendezvous_receive(struct tl_rendezvous *table, struct tl_receiver *receiver);

/* Stops waiting, freeing the slot at once. True: deliver will not be called any more. False: it has been or is being
 * called (on another thread, it may not have returned yet). */
bool tl_rendezvous_cancel(struct tl_rendezvous *table, struct tl_receiver *receiver) TL_MUST_USE;

/* The asker needs a subscription no more: it is forgotten as soon as no request of it waits and no value is reserved
 * for it. The id has the number of the subscription. Ignored when there is none. */
void tl_rendezvous_unsubscribe(struct tl_rendezvous *table, const struct tl_request_id *id);

/* Returns the sender of the value that is reserved for the id; NULL: none is. */
struct tl_sender *tl_rendezvous_reserved_sender(struct tl_rendezvous *table, const struct tl_request_id *id);

/* Drops the value that is reserved for the id: its receiver has all of it. Ignored when none is reserved. */
void tl_rendezvous_acknowledge(struct tl_rendezvous *table, const struct tl_request_id *id);
/* The same for `count` ids: the table is locked once. */
void tl_rendezvous_acknowledge_many(struct tl_rendezvous *table, const struct tl_request_id *ids, size_t count);

/* Offers the value that is reserved for the id again: its receiver has given up. Ignored when none is reserved. */
void tl_rendezvous_release(struct tl_rendezvous *table, const struct tl_request_id *id);
/* The same, whether the receiver still waits (it gets TL_CANCELLED) or has been given the value. */
void tl_rendezvous_give_up(struct tl_rendezvous *table, const struct tl_request_id *id);

/* A receiver with this id that was given the reserved value has broken off; it may come back until deadline_ns
 * (monotonic). Asking again with the id takes the deadline away. A receiver that has asked again before this call (over
 * a new connection, while the old one was not yet known to be broken) has the value, and there is no deadline. Ignored
 * when nothing is reserved for the id. */
void tl_rendezvous_receiver_lost(struct tl_rendezvous *table, const struct tl_request_id *id, int64_t deadline_ns);

/* Offers again whatever was orphaned until now_ns, as much as the quota allows; returns when to call next,
 * TL_TIME_NEVER when nothing is orphaned. */
int64_t tl_rendezvous_expire(struct tl_rendezvous *table, int64_t now_ns, struct tl_quota *quota);

/* The end of what a process had that is gone. The caller sets the incarnation; all else is zero, and the table's. */
struct tl_table_release {
    uint64_t incarnation;
    enum { TL_RELEASE_RECEIVERS, TL_RELEASE_VALUES, TL_RELEASE_SUBSCRIPTIONS } phase;
    struct tl_list link;          /* in the table's releases, once the receivers have ended */
    size_t chain;                 /* the receivers in the chains of the table of waiters before this one have ended */
    struct tl_table_value *value; /* the next one to look at; NULL: there is no more */
    struct tl_table_subscription *subscription; /* the same */
    uint64_t left_count; /* so many to look at: those that were there when the phase began, whatever has come since */
};

/* Ends the receivers of a process that is known to be gone with TL_ABORTED, and offers all that is reserved for
 * requests of that incarnation again. Looks at as many receivers, values and subscriptions of all processes as the
 * quota allows, and returns false when some are left: call again. `releasing` must stay valid until true was returned
 * or the table was closed. */
bool tl_rendezvous_release_incarnation(struct tl_rendezvous *table, struct tl_table_release *releasing,
                                       struct tl_quota *quota) TL_MUST_USE;

/* ------------------------------------------------------------------------------------------------------- steps -- */

/* Fails every sender and receiver of the step with the status (not TL_OK) and remembers it for later ones, in place of
 * an earlier status. Reserved values too: a transfer that runs goes on by the transport's own reference, and its
 * acknowledgement is ignored. Without memory the mark is not kept, and the log says so. Fails as many as the quota
 * allows, and returns false when some are left: call again. What comes meanwhile is no part of it. */
bool tl_rendezvous_abort_step(struct tl_rendezvous *table, uint64_t step, const struct tl_error *status,
                              struct tl_quota *quota) TL_MUST_USE;

/* Returns the status of an aborted step, TL_OK for any other: for receives that do not come to this table. */
enum tl_status tl_rendezvous_check_step(struct tl_rendezvous *table, uint64_t step,
                                        struct tl_error *ret_error) TL_MUST_USE;

/* Ends a step: drops its sent values that no receiver was matched with (their senders get TL_CANCELLED); a value that
 * is reserved stays for its receiver alone and is dropped, not offered again, if that one gives up (its sender gets
 * TL_CANCELLED then). Fails the step's waiting receivers with TL_CANCELLED and forgets the mark of an abort. The same
 * step may be used again. Ends as many as the quota allows, and returns false when some are left: call again. What
 * comes meanwhile is no part of it. Adds to *dropped_count how many values were dropped. */
bool tl_rendezvous_end_step(struct tl_rendezvous *table, uint64_t step, struct tl_quota *quota,
                            uint64_t *dropped_count) TL_MUST_USE;

void tl_rendezvous_get_stats(struct tl_rendezvous *table, struct tl_rendezvous_stats *ret_stats);

#endif
