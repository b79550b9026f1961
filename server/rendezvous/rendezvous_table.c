// SPDX-License-Identifier: Apache-2.0
/*
 * The parts of the rendezvous table and its indexes; see rendezvous_table.h. Nothing here decides who gets what.
 *
 * Without memory nothing is added and everything is as before. Taking something out always succeeds.
 */
#include "server/rendezvous/rendezvous_table.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Keys are short, so that a call would cost as much as the hash. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/check.h"
#include "base/error.h"

/* A key with more places than these has them in an index; fewer are found sooner without one. */
#define SCANNED_PLACES 4

uint64_t tl_table_next_publication(struct tl_rendezvous *table)
{
    if (++table->last_publication == 0) table->last_publication = 1;
    return table->last_publication;
}

/* uthash's macros evaluate the hash more than once, so it goes into a variable first. */
static unsigned hash_of(const struct tl_rendezvous *table, const void *data, size_t len_bytes)
{
    return (unsigned)XXH3_64bits_withSeed(data, len_bytes, table->hash_seed);
}

/* ------------------------------------------------------------------------------------------------------- names -- */

uint32_t tl_table_hash_of_key(const struct tl_rendezvous *table, const char *key, size_t key_bytes)
{
    return hash_of(table, key, key_bytes);
}

static struct tl_table_name *find_name(const struct tl_rendezvous *table, const char *key, uint32_t hash)
{
    for (struct tl_hash_link *link = tl_hash_table_find(&table->names, hash); link != NULL;
         link = tl_hash_table_another(link)) {
        struct tl_table_name *name = TL_CONTAINER_OF(link, struct tl_table_name, hash);
        if (strcmp(name->key, key) == 0) return name;
    }
    return NULL;
}

struct tl_table_name *tl_table_name_find(struct tl_rendezvous *table, const char *key)
{
    return find_name(table, key, tl_table_hash_of_key(table, key, strlen(key)));
}

static struct tl_table_name *add_name(struct tl_rendezvous *table, const char *key, size_t len, uint32_t hash)
{
    struct tl_table_name *name = calloc(1, offsetof(struct tl_table_name, key) + len + 1);
    if (name == NULL) return NULL;
    memcpy(name->key, key, len + 1);
    tl_list_init(&name->places);
    if (tl_hash_table_add(&table->names, &name->hash, hash)) return name;
    free(name);
    return NULL;
}

struct tl_table_name *tl_table_name_get(struct tl_rendezvous *table, const char *key)
{
    size_t len = strlen(key);
    uint32_t hash = tl_table_hash_of_key(table, key, len);
    struct tl_table_name *name = find_name(table, key, hash);
    if (name == NULL) name = add_name(table, key, len, hash);
    if (name != NULL) name->hash.use_count++;
    return name;
}

void tl_table_name_put(struct tl_rendezvous *table, struct tl_table_name *name)
{
    if (--name->hash.use_count > 0) return;
    TL_CHECK(name->waiter_count == 0);
    tl_hash_table_remove(&table->names, &name->hash);
    free(name->subscribed);
    free(name);
}

/* ------------------------------------------------------------------------------------------------------ places -- */

static struct tl_table_place *place_at(struct tl_list *link)
{
    return TL_CONTAINER_OF(link, struct tl_table_place, name_link);
}

static uint32_t hash_of_place(const struct tl_rendezvous *table, const struct tl_table_name *name, uint64_t step)
{
    const uint64_t id[] = {(uintptr_t)name, step};
    return hash_of(table, id, sizeof(id));
}

/* Returns false without memory. */
static bool add_to_index(struct tl_rendezvous *table, struct tl_table_place *place)
{
    return tl_hash_table_add(&table->places, &place->hash, hash_of_place(table, place->name, place->step->step));
}

/* Returns false without memory. */
static bool make_index(struct tl_rendezvous *table, struct tl_table_name *name)
{
    TL_LIST_FOREACH(&name->places, link)
    {
        if (add_to_index(table, place_at(link))) continue;
        while ((link = link->prev) != &name->places)
            tl_hash_table_remove(&table->places, &place_at(link)->hash);
        return false;
    }
    name->has_index = true;
    return true;
}

static struct tl_table_place *find_in_index(const struct tl_rendezvous *table, const struct tl_table_name *name,
                                            uint64_t step)
{
    for (struct tl_hash_link *link = tl_hash_table_find(&table->places, hash_of_place(table, name, step)); link != NULL;
         link = tl_hash_table_another(link)) {
        struct tl_table_place *place = TL_CONTAINER_OF(link, struct tl_table_place, hash);
        if (place->name == name && place->step->step == step) return place;
    }
    return NULL;
}

struct tl_table_place *tl_table_place_find(struct tl_rendezvous *table, struct tl_table_name *name, uint64_t step)
{
    if (name->has_index) return find_in_index(table, name, step);
    TL_LIST_FOREACH(&name->places, link)
    {
        if (place_at(link)->step->step == step) return place_at(link);
    }
    return NULL;
}

/* Takes over the use of the name, also on failure. */
static struct tl_table_place *add_place(struct tl_rendezvous *table, struct tl_table_name *name, uint64_t step)
{
    struct tl_table_place *place = tl_spares_get(&table->spare_places, sizeof(*place));
    if (place == NULL) goto fail;
    place->name = name;
    place->step = tl_table_step_get(table, step);
    if (place->step == NULL) goto fail;
    tl_list_init(&place->waiters);
    if (name->place_count == SCANNED_PLACES && !name->has_index && !make_index(table, name)) goto fail;
    if (name->has_index && !add_to_index(table, place)) goto fail;
    tl_list_push_back(&name->places, &place->name_link);
    name->place_count++;
    return place;
fail:
    if (place != NULL && place->step != NULL) tl_table_step_put(table, place->step);
    free(place);
    tl_table_name_put(table, name);
    return NULL;
}

struct tl_table_place *tl_table_place_get(struct tl_rendezvous *table, const char *key, uint64_t step)
{
    struct tl_table_name *name = tl_table_name_get(table, key);
    if (name == NULL) return NULL;
    struct tl_table_place *place = tl_table_place_find(table, name, step);
    if (place != NULL) {
        tl_table_name_put(table, name);
    } else {
        place = add_place(table, name, step);
    }
    if (place != NULL) place->hash.use_count++;
    return place;
}

void tl_table_place_put(struct tl_rendezvous *table, struct tl_table_place *place)
{
    struct tl_table_name *name = place->name;
    if (--place->hash.use_count > 0) return;
    if (name->has_index) tl_hash_table_remove(&table->places, &place->hash);
    tl_list_remove(&place->name_link);
    if (--name->place_count == 0) name->has_index = false;
    tl_table_step_put(table, place->step);
    tl_table_name_put(table, name);
    tl_spares_put(&table->spare_places, place);
}

/* ------------------------------------------------------------------------------------------------------- steps -- */

struct tl_table_step *tl_table_step_find(struct tl_rendezvous *table, uint64_t step)
{
    struct tl_table_step *found = table->latest_step;
    if (found != NULL && found->step == step) return found;
    unsigned hash = hash_of(table, &step, sizeof(step));
    HASH_FIND_BYHASHVALUE(hh, table->steps, &step, sizeof(step), hash, found);
    if (found != NULL) table->latest_step = found;
    return found;
}

struct tl_table_step *tl_table_step_get(struct tl_rendezvous *table, uint64_t number)
{
    struct tl_table_step *step = tl_table_step_find(table, number);
    if (step == NULL) {
        step = calloc(1, sizeof(*step));
        if (step == NULL) return NULL;
        step->step = number;
        tl_list_init(&step->values);
        tl_list_init(&step->waiters);
        tl_list_init(&step->ending_values);
        tl_list_init(&step->ending_waiters);
        tl_list_init(&step->mark_link);
        unsigned hash = hash_of(table, &step->step, sizeof(step->step));
        HASH_ADD_KEYPTR_BYHASHVALUE(hh, table->steps, &step->step, sizeof(step->step), hash, step);
        if (step->hh.tbl == NULL) {
            free(step);
            return NULL;
        }
    }
    step->use_count++;
    return step;
}

void tl_table_step_put(struct tl_rendezvous *table, struct tl_table_step *step)
{
    if (--step->use_count > 0) return;
    HASH_DELETE(hh, table->steps, step);
    if (table->latest_step == step) table->latest_step = NULL;
    free(step);
}

bool tl_table_step_mark(struct tl_rendezvous *table, uint64_t number, const struct tl_error *status)
{
    if (table->limits.aborted_steps == 0) return true;
    struct tl_table_step *step = tl_table_step_find(table, number);
    if (step == NULL || step->mark == NULL) {
        step = tl_table_step_get(table, number);
        if (step == NULL) return false;
        step->mark = malloc(sizeof(*step->mark));
        if (step->mark == NULL) {
            tl_table_step_put(table, step);
            return false;
        }
        __atomic_fetch_add(&table->mark_count, 1, __ATOMIC_RELEASE);
    }
    *step->mark = *status;
    tl_list_remove(&step->mark_link);
    tl_list_push_back(&table->marks, &step->mark_link);
    if (table->mark_count > table->limits.aborted_steps)
        tl_table_step_unmark(table, TL_CONTAINER_OF(table->marks.next, struct tl_table_step, mark_link));
    return true;
}

void tl_table_step_unmark(struct tl_rendezvous *table, struct tl_table_step *step)
{
    if (step->mark == NULL) return;
    free(step->mark);
    step->mark = NULL;
    tl_list_remove(&step->mark_link);
    __atomic_fetch_sub(&table->mark_count, 1, __ATOMIC_RELEASE);
    tl_table_step_put(table, step);
}

/* ------------------------------------------------------------------------------------------------------ values -- */

struct tl_table_value *tl_table_value_add(struct tl_rendezvous *table, struct tl_table_place *place,
                                          struct tl_tensor *tensor, struct tl_sender *sender)
{
    struct tl_table_value *value = tl_spares_get(&table->spare_values, sizeof(*value));
    if (value == NULL) return NULL;
    value->step = place->step;
    value->step->use_count++;
    value->sender = sender;
    value->tensor = tl_tensor_get(tensor);
    value->size_bytes = tl_tensor_size_bytes(tensor);
    value->publication = tl_table_next_publication(table);
    value->name = place->name;
    value->name->hash.use_count++;
    value->place = place;
    place->hash.use_count++;
    place->value = value;
    tl_list_push_back(&value->step->values, &value->step_link);
    tl_list_init(&value->orphan_link);
    sender->entry = value;
    table->stats.held_tensors++;
    table->stats.held_bytes += value->size_bytes;
    return value;
}

struct tl_table_value *tl_table_value_find(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    struct tl_table_value *value;
    if (table->reservations == NULL) return NULL; /* as for every receive while all values are published */
    unsigned hash = hash_of(table, id, sizeof(*id));
    HASH_FIND_BYHASHVALUE(hh, table->reservations, id, sizeof(*id), hash, value);
    return value;
}

struct tl_table_value *tl_table_value_find_given_back(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    struct tl_table_value *value;
    if (table->given_back == NULL) return NULL;
    unsigned hash = hash_of(table, id, sizeof(*id));
    HASH_FIND_BYHASHVALUE(hh, table->given_back, id, sizeof(*id), hash, value);
    return value;
}

static void forget_given_back(struct tl_rendezvous *table, struct tl_table_value *value)
{
    if (value->is_reserved || value->hh.tbl == NULL) return;
    HASH_DELETE(hh, table->given_back, value);
    value->hh.tbl = NULL;
}

bool tl_table_value_reserve(struct tl_rendezvous *table, struct tl_table_value *value, const struct tl_request_id *id,
                            struct tl_table_subscription *subscription)
{
    forget_given_back(table, value);
    value->id = *id;
    value->holder_count = 0;
    unsigned hash = hash_of(table, &value->id, sizeof(value->id));
    HASH_ADD_KEYPTR_BYHASHVALUE(hh, table->reservations, &value->id, sizeof(value->id), hash, value);
    value->is_reserved = value->hh.tbl != NULL;
    if (!value->is_reserved) return false;
    tl_rank_tree_remove(&value->offered_link);
    value->subscription = subscription;
    if (subscription != NULL) subscription->use_count++;
    return true;
}

/* Ends the reservation of a value, if there is one. */
static void unreserve(struct tl_rendezvous *table, struct tl_table_value *value)
{
    if (!value->is_reserved) return;
    TL_LIST_FOREACH(&table->releases, link)
    {
        struct tl_table_release *release = TL_CONTAINER_OF(link, struct tl_table_release, link);
        if (release->value == value) release->value = value->hh.next;
    }
    HASH_DELETE(hh, table->reservations, value);
    tl_list_remove(&value->orphan_link);
    value->hh.tbl = NULL;
    value->is_reserved = false;
    if (value->subscription != NULL) tl_table_subscription_put(table, value->subscription);
    value->subscription = NULL;
}

void tl_table_value_give_back(struct tl_rendezvous *table, struct tl_table_value *value)
{
    struct tl_table_value *earlier = tl_table_value_find_given_back(table, &value->id);
    bool was_subscribed = value->subscription != NULL;
    unreserve(table, value);
    value->was_given_back = true;
    if (!was_subscribed) return;
    if (earlier != NULL) forget_given_back(table, earlier);
    unsigned hash = hash_of(table, &value->id, sizeof(value->id));
    HASH_ADD_KEYPTR_BYHASHVALUE(hh, table->given_back, &value->id, sizeof(value->id), hash, value);
}

void tl_table_value_orphan(struct tl_rendezvous *table, struct tl_table_value *value, int64_t deadline_ns)
{
    if (value->holder_count > 0 && --value->holder_count > 0) return;
    tl_list_remove(&value->orphan_link);
    value->deadline_ns = deadline_ns;
    /* Deadlines nearly always come in order. */
    struct tl_list *place = &table->orphans;
    while (place->prev != &table->orphans &&
           TL_CONTAINER_OF(place->prev, struct tl_table_value, orphan_link)->deadline_ns > deadline_ns)
        place = place->prev;
    tl_list_insert_before(place, &value->orphan_link);
}

void tl_table_value_detach(struct tl_rendezvous *table, struct tl_table_value *value)
{
    if (value->place == NULL) return;
    value->place->value = NULL;
    tl_table_place_put(table, value->place);
    value->place = NULL;
}

void tl_table_value_offer(struct tl_table_value *value, struct tl_offer *ret_offer)
{
    tl_list_remove(&value->orphan_link);
    value->holder_count++;
    *ret_offer = (struct tl_offer){.tensor = tl_tensor_get(value->tensor),
                                   .step = value->step->step,
                                   .publication = value->publication,
                                   .is_one_shot = true,
                                   .was_given_back = value->was_given_back};
}

void tl_table_value_remove(struct tl_rendezvous *table, struct tl_table_value *value)
{
    unreserve(table, value);
    forget_given_back(table, value);
    tl_table_value_detach(table, value);
    tl_rank_tree_remove(&value->offered_link);
    tl_list_remove(&value->step_link);
    tl_table_step_put(table, value->step);
    tl_table_name_put(table, value->name);
    value->sender->entry = NULL;
    table->stats.held_tensors--;
    table->stats.held_bytes -= value->size_bytes;
}

void tl_table_value_conclude(struct tl_rendezvous *table, struct tl_table_value *value, const struct tl_error *status,
                             struct tl_list *deferred_calls)
{
    tl_table_value_remove(table, value);
    tl_table_defer_over(deferred_calls, value, status);
}

/* ----------------------------------------------------------------------------------------------------- waiters -- */

static enum tl_status charge(struct tl_rendezvous *table, const struct tl_receiver *receiver,
                             struct tl_share **ret_share, struct tl_error *ret_error)
{
    *ret_share = NULL;
    if (receiver->client != NULL) return tl_shares_take(table->waiting, receiver->client, 1, ret_share, ret_error);
    if (table->own_waiting >= table->limits.waiting_receivers) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            "%" PRIu64 " receives of this program wait already; raise limits.waiting",
                            table->own_waiting);
    }
    table->own_waiting++;
    return TL_OK;
}

enum tl_status tl_table_admit(struct tl_rendezvous *table, const struct tl_receiver *receiver,
                              struct tl_share **ret_share, struct tl_error *ret_error)
{
    struct tl_error error;
    enum tl_status status = charge(table, receiver, ret_share, &error);
    if (status != TL_OK && tl_table_subscriptions_sweep(table, false)) {
        status = charge(table, receiver, ret_share, &error);
    }
    return status == TL_OK ? TL_OK : tl_error_copy(ret_error, &error);
}

void tl_table_dismiss(struct tl_rendezvous *table, struct tl_share *share)
{
    if (share != NULL) {
        tl_shares_give(share, 1);
    } else {
        table->own_waiting--;
    }
}

bool tl_table_waiter_add(struct tl_rendezvous *table, struct tl_receiver *receiver,
                         struct tl_table_subscription *subscription, struct tl_share *share)
{
    struct tl_table_wait *wait = &receiver->wait;
    uint64_t step = receiver->step;
    struct tl_table_place *place = subscription == NULL ? tl_table_place_get(table, receiver->key, step) : NULL;
    if (subscription == NULL && place == NULL) return false;
    /* What was wanted lies in the same memory. */
    if (!tl_hash_table_add(&table->waiters, &wait->hash, hash_of(table, &receiver->id, sizeof(receiver->id)))) {
        if (place != NULL) tl_table_place_put(table, place);
        return false;
    }
    wait->place = place;
    wait->subscription = subscription;
    receiver->share = share;
    receiver->is_waiting = true;
    table->stats.waiting_receivers++;
    if (subscription == NULL) {
        place->name->waiter_count++;
        tl_list_push_back(&place->waiters, &wait->link);
        tl_list_push_back(&place->step->waiters, &wait->step_link);
        return true;
    }
    wait->step = step;
    bool is_first = tl_list_is_empty(&subscription->waiters);
    tl_list_push_back(&subscription->waiters, &wait->link);
    subscription->use_count++;
    if (is_first) tl_table_subscription_requeue(subscription);
    return true;
}

struct tl_receiver *tl_table_waiter_find(struct tl_rendezvous *table, const struct tl_request_id *id)
{
    if (table->waiters.count == 0) return NULL;
    for (struct tl_hash_link *link = tl_hash_table_find(&table->waiters, hash_of(table, id, sizeof(*id))); link != NULL;
         link = tl_hash_table_another(link)) {
        struct tl_receiver *receiver = TL_CONTAINER_OF(link, struct tl_receiver, wait.hash);
        if (receiver->id.number == id->number && receiver->id.incarnation == id->incarnation) return receiver;
    }
    return NULL;
}

void tl_table_waiter_remove(struct tl_rendezvous *table, struct tl_receiver *receiver)
{
    struct tl_table_wait *wait = &receiver->wait;
    tl_hash_table_remove(&table->waiters, &wait->hash);
    tl_list_remove(&wait->link);
    if (wait->subscription == NULL) {
        tl_list_remove(&wait->step_link);
        wait->place->name->waiter_count--;
        tl_table_place_put(table, wait->place);
    } else {
        tl_table_subscription_requeue(wait->subscription);
        tl_table_subscription_put(table, wait->subscription);
    }
    receiver->is_waiting = false;
    table->stats.waiting_receivers--;
    tl_table_dismiss(table, receiver->share);
}

void tl_table_waiter_conclude(struct tl_rendezvous *table, struct tl_receiver *receiver, const struct tl_error *status,
                              const struct tl_offer *offer, struct tl_list *deferred_calls)
{
    tl_table_waiter_remove(table, receiver);
    tl_table_defer_deliver(deferred_calls, receiver, status, offer);
}

/* ------------------------------------------------------------------------------------------------ publications -- */

void tl_table_publication_offer(const struct tl_table_publication *publication, struct tl_offer *ret_offer)
{
    *ret_offer = (struct tl_offer){.tensor = tl_tensor_get(publication->tensor),
                                   .step = publication->step,
                                   .publication = publication->number,
                                   .is_one_shot = false};
}

void tl_table_publication_end(struct tl_rendezvous *table, struct tl_table_publication *publication,
                              struct tl_list *deferred_calls)
{
    publication->name->publication = NULL;
    TL_LIST_FOREACH(&table->walks, link)
    {
        struct tl_table_walk *walk = TL_CONTAINER_OF(link, struct tl_table_walk, link);
        if (walk->next == &publication->link) walk->next = publication->link.next;
    }
    tl_list_remove(&publication->link);
    tl_table_name_put(table, publication->name);
    table->stats.published_tensors--;
    table->stats.published_bytes -= publication->size_bytes;
    tl_table_defer_put(deferred_calls, publication);
}
