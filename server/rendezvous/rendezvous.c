// SPDX-License-Identifier: Apache-2.0
/*
 * Rendezvous table: senders, receivers, reservations and steps.
 *
 * Happy path of a sent value: tl_rendezvous_send puts it into its place and reserves it for the first waiter there, or
 * tl_rendezvous_receive finds it and reserves it; the receiver is given the value; tl_rendezvous_acknowledge takes it
 * out and calls the sender.
 *
 * When a receiver gives up (release), does not come back (orphan, expire) or is gone (release_incarnation), its value
 * is offered to the next waiter, or stays. When a step fails (abort_step), all its values and waiters are taken out
 * with its status. When a step ends, values without a receiver are taken out. A value on its way leaves its place, so
 * that the step's number can be used again, and is taken out when its receiver is done, well or not.
 *
 * Without memory to reserve a value its receiver fails, and the value stays.
 *
 * Every function decides under the mutex and collects what it has decided; callbacks run when the mutex is free. By
 * then a receiver or sender that is going to be called has no entry any more, so that cancel and unsend return false.
 */
#include "server/rendezvous/rendezvous.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/random.h"
#include "server/rendezvous/rendezvous_table.h"

static const struct tl_error superseded = {.code = TL_ABORTED, .message = "the same request was made again"};
static const struct tl_error no_memory = {.code = TL_RESOURCE_EXHAUSTED,
                                          .message = "no memory to reserve the tensor for its receiver"};
static const struct tl_error given_up = {.code = TL_CANCELLED,
                                         .message = "the step has ended and the receiver has given up"};
static const struct tl_error not_wanted = {.code = TL_CANCELLED, .message = "the receiver has given up"};
static const struct tl_error gone = {.code = TL_ABORTED, .message = "the process that asked is gone"};

/* ---------------------------------------------------------------------------------------------------- lifetime -- */

/* The mutex is held for some hundred instructions, or for those of at most 16 values, so that the thread that waits for
 * it rather spins than sleeps. */
static void init_mutex(pthread_mutex_t *mutex)
{
    pthread_mutexattr_t attributes;
    TL_CHECK(pthread_mutexattr_init(&attributes) == 0);
    TL_CHECK(pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ADAPTIVE_NP) == 0);
    TL_CHECK(pthread_mutex_init(mutex, &attributes) == 0);
    pthread_mutexattr_destroy(&attributes);
}

enum tl_status tl_rendezvous_create(const struct tl_rendezvous_limits *limits, struct tl_rendezvous **ret_table,
                                    struct tl_error *ret_error)
{
    struct tl_rendezvous *table = calloc(1, sizeof(*table));
    if (table == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the rendezvous table");
    table->waiting = tl_shares_create("limits.waiting", limits->waiting_receivers);
    if (table->waiting == NULL) {
        free(table);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the rendezvous table");
    }
    init_mutex(&table->mutex);
    table->limits = *limits;
    table->hash_seed = tl_random_u64();
    /* Numbers do not begin at 1: after a restart no number may mean a value of the former process. */
    table->last_publication = tl_random_u64();
    tl_list_init(&table->publications);
    tl_list_init(&table->walks);
    tl_list_init(&table->releases);
    tl_list_init(&table->marks);
    tl_list_init(&table->orphans);
    tl_list_init(&table->unused_subscriptions);
    *ret_table = table;
    return TL_OK;
}

static struct tl_table_value *step_value(const struct tl_list *values)
{
    return TL_CONTAINER_OF(values->next, struct tl_table_value, step_link);
}

static struct tl_receiver *step_waiter(const struct tl_list *waiters)
{
    return TL_CONTAINER_OF(waiters->next, struct tl_receiver, wait.step_link);
}

/* Takes everything out of the step. The caller holds a use of it. */
static void fail_step(struct tl_rendezvous *table, struct tl_table_step *step, const struct tl_error *status,
                      struct tl_list *deferred_calls)
{
    tl_list_splice_back(&step->values, &step->ending_values);
    tl_list_splice_back(&step->waiters, &step->ending_waiters);
    while (!tl_list_is_empty(&step->values))
        tl_table_value_conclude(table, step_value(&step->values), status, deferred_calls);
    while (!tl_list_is_empty(&step->waiters))
        tl_table_waiter_conclude(table, step_waiter(&step->waiters), status, NULL, deferred_calls);
    if (step->is_ending) tl_table_step_put(table, step);
    step->is_ending = false;
}

static void clear(struct tl_rendezvous *table, const struct tl_error *status, struct tl_list *deferred_calls)
{
    while (tl_list_pop_front(&table->releases) != NULL)
        continue;
    while (table->steps) {
        struct tl_table_step *step = table->steps;
        step->use_count++;
        fail_step(table, step, status, deferred_calls);
        tl_table_step_unmark(table, step);
        tl_table_step_put(table, step);
    }
    while (!tl_list_is_empty(&table->publications))
        tl_table_publication_end(table, TL_CONTAINER_OF(table->publications.next, struct tl_table_publication, link),
                                 deferred_calls);
    tl_table_subscriptions_clear(table, status, deferred_calls);
    TL_CHECK(table->names.count == 0 && table->places.count == 0 && table->waiters.count == 0 &&
             table->reservations == NULL && table->given_back == NULL);
}

void tl_rendezvous_close(struct tl_rendezvous *table, const struct tl_error *status)
{
    struct tl_list deferred_calls;
    TL_CHECK(status->code != TL_OK);
    tl_list_init(&deferred_calls);
    tl_table_lock(table);
    if (!table->is_closed) {
        table->is_closed = true;
        table->close_status = *status;
        clear(table, status, &deferred_calls);
    }
    tl_table_unlock_and_run(table, &deferred_calls);
}

void tl_rendezvous_destroy(struct tl_rendezvous *table)
{
    struct tl_list deferred_calls;
    if (table == NULL) return;
    tl_list_init(&deferred_calls);
    tl_table_lock(table);
    TL_CHECK(table->stats.waiting_receivers == 0 && table->stats.held_tensors == 0);
    clear(table, &superseded, &deferred_calls);
    tl_table_unlock_and_run(table, &deferred_calls);
    TL_CHECK(pthread_mutex_destroy(&table->mutex) == 0);
    tl_spares_fini(&table->spare_places);
    tl_spares_fini(&table->spare_values);
    tl_hash_table_fini(&table->names);
    tl_hash_table_fini(&table->places);
    tl_hash_table_fini(&table->waiters);
    tl_shares_destroy(table->waiting);
    free(table);
}

void tl_rendezvous_get_stats(struct tl_rendezvous *table, struct tl_rendezvous_stats *ret_stats)
{
    tl_table_lock(table);
    *ret_stats = table->stats;
    tl_table_unlock(table);
}

/* ----------------------------------------------------------------------------------------------------- senders -- */

/* Gives an unreserved value of a place to the first waiter there, else to a subscription. */
static void offer_value(struct tl_rendezvous *table, struct tl_table_value *value, struct tl_list *deferred_calls)
{
    struct tl_list *waiters = &value->place->waiters;
    while (!value->is_reserved && !tl_list_is_empty(waiters)) {
        struct tl_receiver *receiver = tl_table_waiter_at(waiters->next);
        struct tl_offer offer;
        if (!tl_table_value_reserve(table, value, &receiver->id, NULL)) {
            tl_table_waiter_conclude(table, receiver, &no_memory, NULL, deferred_calls);
            continue;
        }
        tl_table_value_offer(value, &offer);
        tl_table_waiter_conclude(table, receiver, NULL, &offer, deferred_calls);
    }
    if (!value->is_reserved) tl_table_subscriptions_offer_value(table, value, deferred_calls);
}

/* Whether a value of this size may be put into its place. */
static enum tl_status check_place(struct tl_rendezvous *table, const struct tl_table_place *place, uint64_t size_bytes,
                                  struct tl_error *ret_error)
{
    const char *key = place->name->key;
    uint64_t step = place->step->step;
    if (place->value)
        return tl_error_set(ret_error, TL_ALREADY_EXISTS,
                            "%s of step %" PRIu64 " is already offered; end the step or cancel that send first", key,
                            step);
    /* What is held is never above the limit, because each send is checked. */
    if (size_bytes > table->limits.held_bytes - table->stats.held_bytes)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            "%s of step %" PRIu64 " has %" PRIu64 " bytes, and %" PRIu64 " of at most %" PRIu64
                            " bytes are held for receivers; raise limits.held",
                            key, step, size_bytes, table->stats.held_bytes, table->limits.held_bytes);
    return TL_OK;
}

/* Puts a value into the table. *ret_value is NULL without memory, which is no error yet. */
static enum tl_status add_value(struct tl_rendezvous *table, const struct tl_rendezvous_value *sent,
                                struct tl_table_value **ret_value, struct tl_error *ret_error)
{
    *ret_value = NULL;
    if (table->is_closed) return tl_error_copy(ret_error, &table->close_status);
    struct tl_table_step *marked = table->mark_count > 0 ? tl_table_step_find(table, sent->step) : NULL;
    if (marked && marked->mark) return tl_error_copy(ret_error, marked->mark);
    struct tl_table_place *place = tl_table_place_get(table, sent->key, sent->step);
    if (place == NULL) return TL_OK;
    enum tl_status status = check_place(table, place, tl_tensor_size_bytes(sent->tensor), ret_error);
    if (status == TL_OK) *ret_value = tl_table_value_add(table, place, sent->tensor, sent->sender);
    tl_table_place_put(table, place);
    return status;
}

static enum tl_status send_one(struct tl_rendezvous *table, const struct tl_rendezvous_value *sent,
                               struct tl_list *deferred_calls, struct tl_error *ret_error)
{
    struct tl_table_value *value;
    sent->sender->entry = NULL;
    enum tl_status status = add_value(table, sent, &value, ret_error);
    if (value) {
        offer_value(table, value, deferred_calls);
    } else if (status == TL_OK) {
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to offer %s of step %" PRIu64, sent->key,
                              sent->step);
    }
    return status;
}

void tl_rendezvous_send_many(struct tl_rendezvous *table, const struct tl_rendezvous_value *values, size_t count,
                             struct tl_error *ret_statuses)
{
    struct tl_list deferred_calls;
    tl_list_init(&deferred_calls);
    tl_table_lock(table);
    for (size_t i = 0; i < count; i++)
        ret_statuses[i].code = send_one(table, &values[i], &deferred_calls, &ret_statuses[i]);
    tl_table_unlock_and_run(table, &deferred_calls);
}

enum tl_status tl_rendezvous_send(struct tl_rendezvous *table, const char *key, uint64_t step, struct tl_tensor *tensor,
                                  struct tl_sender *sender, struct tl_error *ret_error)
{
    const struct tl_rendezvous_value value = {.key = key, .step = step, .tensor = tensor, .sender = sender};
    struct tl_error status;
    tl_rendezvous_send_many(table, &value, 1, &status);
    return status.code == TL_OK ? TL_OK : tl_error_copy(ret_error, &status);
}

bool tl_rendezvous_unsend(struct tl_rendezvous *table, struct tl_sender *sender)
{
    tl_table_lock(table);
    struct tl_table_value *value = sender->entry;
    struct tl_tensor *tensor = NULL;
    if (value) {
        tensor = value->tensor;
        tl_table_value_remove(table, value);
        tl_spares_put(&table->spare_values, value);
    }
    tl_table_unlock(table);
    tl_tensor_put(tensor);
    return tensor != NULL;
}

/* --------------------------------------------------------------------------------------------------- receivers -- */

/* Answers a receiver that asks again with the value that is reserved for its id already. */
static void answer_again(struct tl_table_value *value, const struct tl_receiver *receiver, struct tl_error *ret_status,
                         struct tl_offer *ret_offer)
{
    uint64_t subscription = value->subscription != NULL ? value->subscription->id.number : 0;
    bool is_same = subscription == receiver->subscription && strcmp(value->name->key, receiver->key) == 0 &&
                   (subscription != 0 || value->step->step == receiver->step);
    if (!is_same) {
        tl_error_set(ret_status, TL_INVALID_ARGUMENT,
                     "request %" PRIu64 " asks for %s of step %" PRIu64
                     ", but was made for another tensor; use a new number for each request",
                     receiver->id.number, receiver->key, receiver->step);
        return;
    }
    tl_table_value_offer(value, ret_offer);
}

/* Tries to answer at once. Returns true when the answer, a status or an offer, is there. */
static bool answer(struct tl_rendezvous *table, const struct tl_receiver *receiver,
                   struct tl_table_subscription *subscription, struct tl_error *ret_status, struct tl_offer *ret_offer)
{
    if (table->is_closed) {
        *ret_status = table->close_status;
        return true;
    }
    struct tl_table_value *value = tl_table_value_find(table, &receiver->id);
    if (value) {
        answer_again(value, receiver, ret_status, ret_offer);
        return true;
    }
    if (subscription) return tl_table_subscription_answer(table, subscription, receiver, ret_status, ret_offer);
    struct tl_table_name *name = tl_table_name_find(table, receiver->key);
    struct tl_table_place *place = name ? tl_table_place_find(table, name, receiver->step) : NULL;
    if (place && place->value && !place->value->is_reserved) {
        if (tl_table_value_reserve(table, place->value, &receiver->id, NULL)) {
            tl_table_value_offer(place->value, ret_offer);
        } else {
            *ret_status = no_memory;
        }
        return true;
    }
    if (name && name->publication && name->publication->step >= receiver->step) {
        tl_table_publication_offer(name->publication, ret_offer);
        return true;
    }
    struct tl_table_step *step = tl_table_step_find(table, receiver->step);
    if (step && step->mark) {
        *ret_status = *step->mark;
        return true;
    }
    return false;
}

static bool wait_for_value(struct tl_rendezvous *table, struct tl_receiver *receiver,
                           struct tl_table_subscription *subscription, struct tl_error *ret_status)
{
    struct tl_share *share;
    if (tl_table_admit(table, receiver, &share, ret_status) != TL_OK) {
        tl_error_prefix(ret_status, "%s of step %" PRIu64 " is not there yet, and ", receiver->key, receiver->step);
        return false;
    }
    if (tl_table_waiter_add(table, receiver, subscription, share)) return true;
    tl_table_dismiss(table, share);
    tl_error_set(ret_status, TL_RESOURCE_EXHAUSTED, "no memory to wait for %s of step %" PRIu64, receiver->key,
                 receiver->step);
    return false;
}

/* Returns whether the receiver waits; otherwise the answer, a status or an offer, is there. */
static bool find_or_wait(struct tl_rendezvous *table, struct tl_receiver *receiver, struct tl_error *ret_status,
                         struct tl_offer *ret_offer)
{
    struct tl_table_subscription *subscription = NULL;
    if (receiver->subscription != 0 && !table->is_closed &&
        tl_table_subscription_get(table, receiver, &subscription, ret_status) != TL_OK)
        return false;
    bool is_waiting = !answer(table, receiver, subscription, ret_status, ret_offer) &&
                      wait_for_value(table, receiver, subscription, ret_status);
    if (subscription) tl_table_subscription_put(table, subscription);
    return is_waiting;
}

void tl_rendezvous_receive(struct tl_rendezvous *table, struct tl_receiver *receiver)
{
    struct tl_list deferred_calls;
    struct tl_error status; /* no need to clear its text for each receiver */
    struct tl_offer offer = {.tensor = NULL};
    status.code = TL_OK;
    status.message[0] = '\0';
    tl_list_init(&deferred_calls);
    tl_table_lock(table);
    receiver->is_waiting = false;
    struct tl_receiver *earlier = tl_table_waiter_find(table, &receiver->id);
    if (receiver->order == 0) receiver->order = ++table->last_order;
    bool is_superseded = earlier && earlier->order > receiver->order;
    if (is_superseded) status = superseded;
    if (earlier && !is_superseded) tl_table_waiter_conclude(table, earlier, &superseded, NULL, &deferred_calls);
    bool is_waiting = !is_superseded && find_or_wait(table, receiver, &status, &offer);
    tl_table_unlock_and_run(table, &deferred_calls);
    if (!is_waiting) receiver->deliver(receiver, &status, status.code == TL_OK ? &offer : NULL);
}

bool tl_rendezvous_cancel(struct tl_rendezvous *table, struct tl_receiver *receiver)
{
    tl_table_lock(table);
    bool was_waiting = receiver->is_waiting;
    if (was_waiting) tl_table_waiter_remove(table, receiver);
    tl_table_unlock(table);
    return was_waiting;
}

/* ------------------------------------------------------------------------------------------------ reservations -- */

/* Takes a value from its receiver: it is offered to the next one, or dropped when its step has ended. */
static void release(struct tl_rendezvous *table, struct tl_table_value *value, struct tl_list *deferred_calls)
{
    tl_table_value_give_back(table, value);
    if (value->place) {
        offer_value(table, value, deferred_calls);
    } else {
        tl_table_value_conclude(table, value, &given_up, deferred_calls);
        table->stats.dropped_tensors++;
    }
}

/* Takes a value from its receiver, which does not want it. */
static void refuse(struct tl_rendezvous *table, struct tl_table_value *value, struct tl_list *deferred_calls)
{
    tl_table_subscription_refuse(value);
    release(table, value, deferred_calls);
}

struct tl_sender *tl_rendezvous_reserved_sender(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    tl_table_lock(table);
    struct tl_table_value *value = tl_table_value_find(table, id);
    struct tl_sender *sender = value ? value->sender : NULL;
    tl_table_unlock(table);
    return sender;
}

void tl_rendezvous_acknowledge_many(struct tl_rendezvous *table, const struct tl_request_id *ids, size_t count)
{
    struct tl_list deferred_calls;
    tl_list_init(&deferred_calls);
    tl_table_lock(table);
    for (size_t i = 0; i < count; i++) {
        struct tl_table_value *value = tl_table_value_find(table, &ids[i]);
        if (value) tl_table_value_conclude(table, value, NULL, &deferred_calls);
    }
    tl_table_unlock_and_run(table, &deferred_calls);
}

void tl_rendezvous_acknowledge(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    tl_rendezvous_acknowledge_many(table, id, 1);
}

void tl_rendezvous_release(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    struct tl_list deferred_calls;
    tl_list_init(&deferred_calls);
    tl_table_lock(table);
    struct tl_table_value *value = tl_table_value_find(table, id);
    if (value) refuse(table, value, &deferred_calls);
    tl_table_unlock_and_run(table, &deferred_calls);
}

void tl_rendezvous_give_up(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    struct tl_list deferred_calls;
    tl_list_init(&deferred_calls);
    tl_table_lock(table);
    struct tl_receiver *receiver = tl_table_waiter_find(table, id);
    if (receiver) tl_table_waiter_conclude(table, receiver, &not_wanted, NULL, &deferred_calls);
    struct tl_table_value *value = tl_table_value_find(table, id);
    if (value) refuse(table, value, &deferred_calls);
    tl_table_unlock_and_run(table, &deferred_calls);
}

void tl_rendezvous_receiver_lost(struct tl_rendezvous *table, const struct tl_request_id *id, int64_t deadline_ns)
{
    tl_table_lock(table);
    struct tl_table_value *value = tl_table_value_find(table, id);
    if (value) tl_table_value_orphan(table, value, deadline_ns);
    tl_table_unlock(table);
}

/* Returns the orphan that is due first; NULL when there is none. */
static struct tl_table_value *first_orphan(struct tl_rendezvous *table)
{
    if (tl_list_is_empty(&table->orphans)) return NULL;
    return TL_CONTAINER_OF(table->orphans.next, struct tl_table_value, orphan_link);
}

int64_t tl_rendezvous_expire(struct tl_rendezvous *table, int64_t now_ns, struct tl_quota *quota)
{
    struct tl_list deferred_calls;
    struct tl_table_value *value;
    tl_list_init(&deferred_calls);
    tl_table_lock(table);
    for (; (value = first_orphan(table)) && value->deadline_ns <= now_ns && tl_quota_left(quota) > 0;
         tl_quota_use(quota, 1))
        release(table, value, &deferred_calls);
    tl_table_unlock_and_run(table, &deferred_calls);
    /* The callbacks may have orphaned others. */
    tl_table_lock(table);
    value = first_orphan(table);
    int64_t next_ns = value ? value->deadline_ns : TL_TIME_NEVER;
    tl_table_unlock(table);
    return next_ns;
}

/* Ends receivers of the process that is gone as the quota allows. Returns whether all have ended. */
static bool end_receivers_of(struct tl_rendezvous *table, struct tl_table_release *releasing, struct tl_quota *quota,
                             struct tl_list *deferred_calls)
{
    struct tl_hash_link *next;
    for (struct tl_hash_link *link = tl_hash_table_first_from(&table->waiters, &releasing->chain); link != NULL;
         link = next) {
        struct tl_receiver *receiver = TL_CONTAINER_OF(link, struct tl_receiver, wait.hash);
        if (tl_quota_left(quota) == 0) return false; /* the next time begins with this chain again */
        tl_quota_use(quota, 1);
        next = link->next;
        if (receiver->id.incarnation == releasing->incarnation)
            tl_table_waiter_conclude(table, receiver, &gone, NULL, deferred_calls);
        if (next != NULL) continue;
        releasing->chain++;
        next = tl_hash_table_first_from(&table->waiters, &releasing->chain);
    }
    return true;
}

/* Offers values again that are reserved for the process that is gone, in the order in which they were reserved, as the
 * quota allows. Returns whether none is left. What is reserved meanwhile is behind them. */
static bool release_values_of(struct tl_rendezvous *table, struct tl_table_release *releasing, struct tl_quota *quota,
                              struct tl_list *deferred_calls)
{
    for (; releasing->value != NULL && releasing->left_count > 0; releasing->left_count--) {
        struct tl_table_value *value = releasing->value;
        if (tl_quota_left(quota) == 0) return false;
        tl_quota_use(quota, 1);
        releasing->value = value->hh.next;
        if (value->id.incarnation == releasing->incarnation) release(table, value, deferred_calls);
    }
    return true;
}

/* The receivers go first, so that no value is offered to them. */
static bool release_some(struct tl_rendezvous *table, struct tl_table_release *releasing, struct tl_quota *quota,
                         struct tl_list *deferred_calls)
{
    if (releasing->phase == TL_RELEASE_RECEIVERS) {
        if (!end_receivers_of(table, releasing, quota, deferred_calls)) return false;
        tl_list_push_back(&table->releases, &releasing->link);
        releasing->phase = TL_RELEASE_VALUES;
        releasing->value = table->reservations;
        releasing->left_count = HASH_COUNT(table->reservations);
    }
    if (releasing->phase == TL_RELEASE_VALUES) {
        if (!release_values_of(table, releasing, quota, deferred_calls)) return false;
        releasing->phase = TL_RELEASE_SUBSCRIPTIONS;
        releasing->value = NULL;
        releasing->subscription = table->subscriptions;
        releasing->left_count = HASH_COUNT(table->subscriptions);
    }
    if (!tl_table_subscriptions_end(table, releasing, quota)) return false;
    tl_list_remove(&releasing->link);
    return true;
}

bool tl_rendezvous_release_incarnation(struct tl_rendezvous *table, struct tl_table_release *releasing,
                                       struct tl_quota *quota)
{
    struct tl_list deferred_calls;
    tl_list_init(&deferred_calls);
    tl_table_lock(table);
    bool is_over = table->is_closed || release_some(table, releasing, quota, &deferred_calls);
    tl_table_unlock_and_run(table, &deferred_calls);
    return is_over;
}

/* ------------------------------------------------------------------------------------------------------- steps -- */

/* Begins to end what the step has now, unless that is under way. Returns the step; NULL: there is none. */
static struct tl_table_step *begin_ending(struct tl_rendezvous *table, uint64_t number)
{
    struct tl_table_step *step = tl_table_step_find(table, number);
    if (!step || step->is_ending) return step;
    step->is_ending = true;
    step->use_count++;
    tl_list_splice_back(&step->ending_values, &step->values);
    tl_list_splice_back(&step->ending_waiters, &step->waiters);
    return step;
}

static void finish_ending(struct tl_rendezvous *table, struct tl_table_step *step)
{
    step->is_ending = false;
    tl_table_step_put(table, step);
}

/* Ends receivers as the quota allows. Returns whether all have ended. */
static bool end_waiters(struct tl_rendezvous *table, struct tl_table_step *step, const struct tl_error *status,
                        struct tl_quota *quota, struct tl_list *deferred_calls)
{
    for (; !tl_list_is_empty(&step->ending_waiters); tl_quota_use(quota, 1)) {
        if (tl_quota_left(quota) == 0) return false;
        tl_table_waiter_conclude(table, step_waiter(&step->ending_waiters), status, NULL, deferred_calls);
    }
    return true;
}

static bool abort_values(struct tl_rendezvous *table, struct tl_table_step *step, const struct tl_error *status,
                         struct tl_quota *quota, struct tl_list *deferred_calls)
{
    for (; !tl_list_is_empty(&step->ending_values); tl_quota_use(quota, 1)) {
        if (tl_quota_left(quota) == 0) return false;
        tl_table_value_conclude(table, step_value(&step->ending_values), status, deferred_calls);
    }
    return true;
}

bool tl_rendezvous_abort_step(struct tl_rendezvous *table, uint64_t number, const struct tl_error *status,
                              struct tl_quota *quota)
{
    struct tl_list deferred_calls;
    bool is_marked = true, is_over = true;
    TL_CHECK(status->code != TL_OK);
    tl_list_init(&deferred_calls);
    tl_table_lock(table);
    if (!table->is_closed) {
        struct tl_table_step *step = begin_ending(table, number);
        is_marked = tl_table_step_mark(table, number, status);
        is_over = !step || (abort_values(table, step, status, quota, &deferred_calls) &&
                            end_waiters(table, step, status, quota, &deferred_calls));
        if (step && is_over) finish_ending(table, step);
    }
    tl_table_unlock_and_run(table, &deferred_calls);
    if (!is_marked) TL_LOG_AT_WARN("no memory to remember an aborted step", TL_U64("step", number));
    return is_over;
}

/* Ends values without a receiver as the quota allows; those that have one are its alone. Returns whether all have
 * ended. */
static bool drop_values(struct tl_rendezvous *table, struct tl_table_step *step, const struct tl_error *status,
                        struct tl_quota *quota, uint64_t *dropped_count, struct tl_list *deferred_calls)
{
    for (; !tl_list_is_empty(&step->ending_values); tl_quota_use(quota, 1)) {
        struct tl_table_value *value = step_value(&step->ending_values);
        if (tl_quota_left(quota) == 0) return false;
        if (value->is_reserved) {
            tl_table_value_detach(table, value);
            tl_list_remove(&value->step_link);
            tl_list_push_back(&step->values, &value->step_link);
            continue;
        }
        tl_table_value_conclude(table, value, status, deferred_calls);
        table->stats.dropped_tensors++;
        (*dropped_count)++;
    }
    return true;
}

bool tl_rendezvous_end_step(struct tl_rendezvous *table, uint64_t number, struct tl_quota *quota,
                            uint64_t *dropped_count)
{
    struct tl_list deferred_calls;
    struct tl_error value_status, waiter_status;
    tl_error_set(&value_status, TL_CANCELLED, "step %" PRIu64 " ended before the tensor was received", number);
    tl_error_set(&waiter_status, TL_CANCELLED, "step %" PRIu64 " ended before the tensor was sent", number);
    tl_list_init(&deferred_calls);
    tl_table_lock(table);
    struct tl_table_step *step = begin_ending(table, number);
    bool is_over = !step || (drop_values(table, step, &value_status, quota, dropped_count, &deferred_calls) &&
                             end_waiters(table, step, &waiter_status, quota, &deferred_calls));
    if (step && is_over) {
        tl_table_step_unmark(table, step);
        finish_ending(table, step);
    }
    tl_table_unlock_and_run(table, &deferred_calls);
    return is_over;
}

enum tl_status tl_rendezvous_check_step(struct tl_rendezvous *table, uint64_t step, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    if (__atomic_load_n(&table->mark_count, __ATOMIC_ACQUIRE) == 0) return TL_OK; /* each receive asks this */
    tl_table_lock(table);
    const struct tl_table_step *found = tl_table_step_find(table, step);
    if (found && found->mark) status = tl_error_copy(ret_error, found->mark);
    tl_table_unlock(table);
    return status;
}
