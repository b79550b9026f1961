// SPDX-License-Identifier: Apache-2.0
/*
 * Rendezvous table: subscriptions. A subscription of a key has as many requests waiting as its asker has free buffers.
 *
 * A sent value that no receiver of exactly its key and step waits for goes to the subscription that has waited longest;
 * a request of a subscription gets the sent value with the lowest step, else the published value unless the
 * subscription has had it. The value is reserved for that request as for any other. An asker that gives a value up
 * refuses it: the subscription does not get it again, and others may. What is remembered of that is a mark of the value
 * and one step of the subscription, behind which it goes on with marked values. Values without a mark come to it
 * whatever their step, because an asker also gives values up for lack of memory, or to have them over another path.
 *
 * A subscription without requests and values is kept for limits.subscription_ns, because its asker may have lost its
 * connection, or all its buffers may be in use; then it knows which published value was the last. Each one counts as a
 * waiting receiver of its client, so that a peer cannot make the table remember more than it may.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/arith.h"
#include "base/clock.h"
#include "base/error.h"
#include "server/rendezvous/rendezvous_table.h"

static const struct tl_error no_memory = {.code = TL_RESOURCE_EXHAUSTED,
                                          .message = "no memory to reserve the tensor for its subscription"};

/* -------------------------------------------------------------------------------------------------------- life -- */

static struct tl_table_subscription *find(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    struct tl_table_subscription *subscription;
    unsigned hash = (unsigned)XXH3_64bits_withSeed(id, sizeof(*id), table->hash_seed);
    HASH_FIND_BYHASHVALUE(hh, table->subscriptions, id, sizeof(*id), hash, subscription);
    return subscription;
}

/* Puts a value that is not reserved into a tree of its key. */
static void keep_value(struct tl_table_value *value)
{
    struct tl_table_subscribed *subscribed = value->name->subscribed;
    struct tl_rank_tree *values = value->was_refused ? &subscribed->refused : &subscribed->offered;
    uint64_t step = value->step->step;
    if (value->offered_link.tree == NULL) tl_rank_tree_add(values, &value->offered_link, step, step);
}

/* The first subscription of a key finds the values that are there. */
static void keep_values(const struct tl_table_name *name)
{
    TL_LIST_FOREACH(&name->places, link)
    {
        struct tl_table_value *value = TL_CONTAINER_OF(link, struct tl_table_place, name_link)->value;
        if (value && !value->is_reserved) keep_value(value);
    }
}

static void free_subscription(struct tl_rendezvous *table, struct tl_table_subscription *subscription)
{
    TL_LIST_FOREACH(&table->releases, link)
    {
        struct tl_table_release *release = TL_CONTAINER_OF(link, struct tl_table_release, link);
        if (release->subscription == subscription) release->subscription = subscription->hh.next;
    }
    HASH_DELETE(hh, table->subscriptions, subscription);
    tl_list_remove(&subscription->link);
    subscription->name->subscribed->subscription_count--;
    tl_table_name_put(table, subscription->name);
    tl_table_dismiss(table, subscription->share);
    free(subscription);
}

/* Returns false without memory. */
static bool may_be_subscribed(struct tl_table_name *name)
{
    if (name->subscribed != NULL) return true;
    name->subscribed = calloc(1, sizeof(*name->subscribed));
    if (name->subscribed == NULL) return false;
    tl_list_init(&name->subscribed->subscriptions);
    return true;
}

/* Returns NULL without memory. */
static struct tl_table_subscription *add(struct tl_rendezvous *table, const struct tl_request_id *id, const char *key)
{
    struct tl_table_subscription *subscription = calloc(1, sizeof(*subscription));
    if (subscription == NULL) return NULL;
    subscription->id = *id;
    tl_list_init(&subscription->waiters);
    tl_list_init(&subscription->link);
    subscription->name = tl_table_name_get(table, key);
    if (subscription->name == NULL || !may_be_subscribed(subscription->name)) goto fail;
    unsigned hash = (unsigned)XXH3_64bits_withSeed(id, sizeof(*id), table->hash_seed);
    HASH_ADD_KEYPTR_BYHASHVALUE(hh, table->subscriptions, &subscription->id, sizeof(*id), hash, subscription);
    if (subscription->hh.tbl == NULL) goto fail;
    if (subscription->name->subscribed->subscription_count++ == 0) keep_values(subscription->name);
    return subscription;
fail:
    if (subscription->name) tl_table_name_put(table, subscription->name);
    free(subscription);
    return NULL;
}

static enum tl_status create(struct tl_rendezvous *table, const struct tl_receiver *receiver,
                             const struct tl_request_id *id, struct tl_table_subscription **ret_subscription,
                             struct tl_error *ret_error)
{
    struct tl_share *share;
    enum tl_status status = tl_table_admit(table, receiver, &share, ret_error);
    if (status != TL_OK) {
        tl_error_prefix(ret_error, "the subscription of %s also counts as one: ", receiver->key);
        return status;
    }
    struct tl_table_subscription *subscription = add(table, id, receiver->key);
    if (subscription == NULL) {
        tl_table_dismiss(table, share);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the subscription of %s", receiver->key);
    }
    subscription->share = share;
    *ret_subscription = subscription;
    return TL_OK;
}

enum tl_status tl_table_subscription_get(struct tl_rendezvous *table, const struct tl_receiver *receiver,
                                         struct tl_table_subscription **ret_subscription, struct tl_error *ret_error)
{
    const struct tl_request_id id = {.incarnation = receiver->id.incarnation, .number = receiver->subscription};
    struct tl_table_subscription *subscription = find(table, &id);
    if (subscription == NULL) {
        enum tl_status status = create(table, receiver, &id, &subscription, ret_error);
        if (status != TL_OK) return status;
    }
    if (strcmp(subscription->name->key, receiver->key) != 0)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "subscription %" PRIu64 " is one of %s, not of %s; use a new number for each subscription",
                            receiver->subscription, subscription->name->key, receiver->key);
    if (subscription->use_count++ == 0) tl_list_remove(&subscription->link);
    subscription->is_given_up = false;
    *ret_subscription = subscription;
    return TL_OK;
}

void tl_table_subscription_put(struct tl_rendezvous *table, struct tl_table_subscription *subscription)
{
    if (--subscription->use_count > 0) return;
    if (subscription->is_given_up) {
        free_subscription(table, subscription);
        return;
    }
    subscription->deadline_ns = tl_clock_deadline_ns(table->limits.subscription_ns);
    tl_list_remove(&subscription->link);
    tl_list_push_back(&table->unused_subscriptions, &subscription->link);
}

bool tl_table_subscriptions_sweep(struct tl_rendezvous *table, bool is_all)
{
    int64_t now_ns = tl_clock_now_ns();
    bool has_swept = false;
    TL_LIST_FOREACH_SAFE(&table->unused_subscriptions, link)
    {
        struct tl_table_subscription *subscription = TL_CONTAINER_OF(link, struct tl_table_subscription, link);
        if (!is_all && subscription->deadline_ns > now_ns) break;
        free_subscription(table, subscription);
        has_swept = true;
    }
    return has_swept;
}

/* The asker needs the subscription no more. It is forgotten now, or when nothing uses it. */
static void give_up(struct tl_rendezvous *table, struct tl_table_subscription *subscription)
{
    subscription->is_given_up = true;
    if (subscription->use_count == 0) free_subscription(table, subscription);
}

void tl_rendezvous_unsubscribe(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    tl_table_lock(table);
    struct tl_table_subscription *subscription = find(table, id);
    if (subscription) give_up(table, subscription);
    tl_table_unlock(table);
}

bool tl_table_subscriptions_end(struct tl_rendezvous *table, struct tl_table_release *release, struct tl_quota *quota)
{
    for (; release->subscription != NULL && release->left_count > 0; release->left_count--) {
        struct tl_table_subscription *subscription = release->subscription;
        if (tl_quota_left(quota) == 0) return false;
        tl_quota_use(quota, 1);
        release->subscription = subscription->hh.next;
        if (subscription->id.incarnation == release->incarnation) give_up(table, subscription);
    }
    return true;
}

void tl_table_subscriptions_clear(struct tl_rendezvous *table, const struct tl_error *status,
                                  struct tl_list *deferred_calls)
{
    struct tl_table_subscription *subscription, *next;
    HASH_ITER(hh, table->subscriptions, subscription, next)
    {
        subscription->use_count++;
        while (!tl_list_is_empty(&subscription->waiters))
            tl_table_waiter_conclude(table, tl_table_waiter_at(subscription->waiters.next), status, NULL,
                                     deferred_calls);
        tl_table_subscription_put(table, subscription);
    }
    (void)tl_table_subscriptions_sweep(table, true);
}

/* ------------------------------------------------------------------------------------------------ who gets what -- */

void tl_table_subscription_requeue(struct tl_table_subscription *subscription)
{
    tl_list_remove(&subscription->link);
    if (tl_list_is_empty(&subscription->waiters)) return;
    tl_list_push_back(&subscription->name->subscribed->subscriptions, &subscription->link);
}

void tl_table_subscription_refuse(struct tl_table_value *value)
{
    struct tl_table_subscription *subscription = value->subscription;
    if (subscription == NULL) return;
    value->was_refused = true;
    if (value->step->step < subscription->from_step) return;
    subscription->has_refused_last = value->step->step == UINT64_MAX;
    subscription->from_step = value->step->step < UINT64_MAX ? value->step->step + 1 : UINT64_MAX;
}

/* Whether a request of the subscription that wants at least `from_step` may have the value. */
static bool may_have(const struct tl_table_subscription *subscription, uint64_t from_step,
                     const struct tl_table_value *value)
{
    uint64_t step = value->step->step;
    bool is_behind_refused = step >= subscription->from_step && !subscription->has_refused_last;
    return step >= from_step && (!value->was_refused || is_behind_refused);
}

/* Returns the first value of the tree whose step is at least `from_step`; NULL: none. */
static struct tl_table_value *first_from(struct tl_rank_tree *values, uint64_t from_step)
{
    struct tl_rank_link *link = tl_rank_tree_first_from(values, from_step);
    return link != NULL ? TL_CONTAINER_OF(link, struct tl_table_value, offered_link) : NULL;
}

/* Returns the one with the lower step; each may be NULL. */
static struct tl_table_value *lower(struct tl_table_value *a, struct tl_table_value *b)
{
    if (a == NULL || b == NULL) return a != NULL ? a : b;
    return a->step->step < b->step->step ? a : b;
}

/* Returns the value with the lowest step that a request which wants at least `from_step` may have; NULL: none. */
static struct tl_table_value *lowest_value(const struct tl_table_subscription *subscription, uint64_t from_step)
{
    struct tl_table_subscribed *subscribed = subscription->name->subscribed;
    struct tl_table_value *offered = first_from(&subscribed->offered, from_step);
    if (subscription->has_refused_last) return offered;
    return lower(offered, first_from(&subscribed->refused, tl_max_u64(from_step, subscription->from_step)));
}

/* Returns the value that the request gets; NULL: none. A request that has given a value back, because it comes over
 * another path, may have it again, and no other request of its subscription may. */
static struct tl_table_value *first_value(struct tl_rendezvous *table, const struct tl_table_subscription *subscription,
                                          const struct tl_receiver *receiver)
{
    struct tl_table_value *had = tl_table_value_find_given_back(table, &receiver->id);
    if (had != NULL && had->name == subscription->name) return had;
    return lowest_value(subscription, receiver->step);
}

/* Returns whether the request, which wants at least `from_step`, may have the publication, and notes that it has it. */
static bool take_publication(struct tl_table_subscription *subscription, const struct tl_request_id *id,
                             uint64_t from_step, const struct tl_table_publication *publication)
{
    bool had_it = subscription->publication == publication->number;
    if (publication->step < from_step) return false;
    if (had_it && subscription->publication_request != id->number) return false;
    subscription->publication = publication->number;
    subscription->publication_request = id->number;
    return true;
}

bool tl_table_subscription_answer(struct tl_rendezvous *table, struct tl_table_subscription *subscription,
                                  const struct tl_receiver *receiver, struct tl_error *ret_status,
                                  struct tl_offer *ret_offer)
{
    struct tl_table_value *value = first_value(table, subscription, receiver);
    const struct tl_table_publication *publication = subscription->name->publication;
    if (value && tl_table_value_reserve(table, value, &receiver->id, subscription)) {
        tl_table_value_offer(value, ret_offer);
        return true;
    }
    if (value) {
        *ret_status = no_memory;
        return true;
    }
    if (publication == NULL || !take_publication(subscription, &receiver->id, receiver->step, publication))
        return false;
    tl_table_publication_offer(publication, ret_offer);
    return true;
}

static struct tl_receiver *first_waiter(struct tl_list *link)
{
    struct tl_table_subscription *subscription = TL_CONTAINER_OF(link, struct tl_table_subscription, link);
    return tl_table_waiter_at(subscription->waiters.next);
}

/* Returns the request that gets the value; NULL: none waits for it. */
static struct tl_receiver *find_waiter(struct tl_rendezvous *table, const struct tl_table_value *value)
{
    const struct tl_table_subscribed *subscribed = value->name->subscribed;
    if (subscribed == NULL) return NULL;
    TL_LIST_FOREACH(&subscribed->subscriptions, link)
    {
        struct tl_receiver *receiver = first_waiter(link);
        if (may_have(receiver->wait.subscription, receiver->wait.step, value) ||
            tl_table_value_find_given_back(table, &receiver->id) == value)
            return receiver;
    }
    return NULL;
}

void tl_table_subscriptions_offer_value(struct tl_rendezvous *table, struct tl_table_value *value,
                                        struct tl_list *deferred_calls)
{
    const struct tl_table_subscribed *subscribed = value->name->subscribed;
    struct tl_receiver *receiver;
    while (!value->is_reserved && (receiver = find_waiter(table, value)) != NULL) {
        struct tl_offer offer;
        if (!tl_table_value_reserve(table, value, &receiver->id, receiver->wait.subscription)) {
            tl_table_waiter_conclude(table, receiver, &no_memory, NULL, deferred_calls);
            continue;
        }
        tl_table_value_offer(value, &offer);
        tl_table_waiter_conclude(table, receiver, NULL, &offer, deferred_calls);
    }
    if (!value->is_reserved && subscribed != NULL && subscribed->subscription_count > 0) keep_value(value);
}

void tl_table_subscriptions_offer_publication(struct tl_rendezvous *table, struct tl_table_publication *publication,
                                              struct tl_list *deferred_calls)
{
    struct tl_table_subscribed *subscribed = publication->name->subscribed;
    if (subscribed == NULL) return;
    /* A subscription that gets it goes to the end of the list, and is met there once more. */
    TL_LIST_FOREACH_SAFE(&subscribed->subscriptions, link)
    {
        struct tl_receiver *receiver = first_waiter(link);
        struct tl_table_subscription *subscription = receiver->wait.subscription;
        struct tl_offer offer;
        if (subscription->publication == publication->number) break;
        if (!take_publication(subscription, &receiver->id, receiver->wait.step, publication)) continue;
        tl_table_publication_offer(publication, &offer);
        tl_table_waiter_conclude(table, receiver, NULL, &offer, deferred_calls);
    }
}
