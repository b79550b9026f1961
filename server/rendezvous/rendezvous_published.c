// SPDX-License-Identifier: Apache-2.0
/*
 * Rendezvous table: published values. Each key has at most one. It is given to any number of receivers and reserved for
 * none, so a receiver that asks again may get a newer one. Receivers keep a value that is replaced or withdrawn by
 * their own references.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "server/rendezvous/rendezvous_table.h"

/* The nearest published key is searched among at most that many. When so much work is done no other key is compared:
 * the product of the lengths of the keys, some 100 us, during which the mutex is held. */
#define NEAREST_KEYS 1000
#define NEAREST_WORK (UINT64_C(1) << 17)

/* Gives the publication to all waiters of the place; NULL is accepted. */
static void offer_at_place(struct tl_rendezvous *table, const struct tl_table_publication *publication,
                           struct tl_table_place *place, struct tl_list *deferred_calls)
{
    table->publish_visits++;
    if (place == NULL || place->step->step > publication->step) return;
    place->hash.use_count++;
    while (!tl_list_is_empty(&place->waiters)) {
        struct tl_offer offer;
        tl_table_publication_offer(publication, &offer);
        tl_table_waiter_conclude(table, tl_table_waiter_at(place->waiters.next), NULL, &offer, deferred_calls);
    }
    tl_table_place_put(table, place);
}

/* Gives the publication to all waiters for at most its step. None waits for a step before `from_step`, so that most
 * often the version that comes next has one place to look at, however many there are. */
static void offer_to_waiters(struct tl_rendezvous *table, const struct tl_table_publication *publication,
                             uint64_t from_step, struct tl_list *deferred_calls)
{
    struct tl_table_name *name = publication->name;
    if (name->waiter_count == 0 || publication->step < from_step) return;
    uint64_t last = publication->step - from_step;
    if (last < name->place_count) {
        for (uint64_t i = 0; i <= last && name->waiter_count > 0; i++)
            offer_at_place(table, publication, tl_table_place_find(table, name, from_step + i), deferred_calls);
        return;
    }
    TL_LIST_FOREACH_SAFE(&name->places, link)
    {
        if (name->waiter_count == 0) return;
        offer_at_place(table, publication, TL_CONTAINER_OF(link, struct tl_table_place, name_link), deferred_calls);
    }
}

/* Replaces the publication of the key by one of the tensor. *ret_from_step is the first step for which receivers may
 * wait: the former publication has served those of its own step and of earlier ones. Returns NULL without memory. */
static struct tl_table_publication *add_publication(struct tl_rendezvous *table, const char *key, uint64_t step,
                                                    struct tl_tensor *tensor, uint64_t *ret_from_step,
                                                    struct tl_list *deferred_calls)
{
    struct tl_table_publication *publication = calloc(1, sizeof(*publication));
    if (publication == NULL) return NULL;
    publication->name = tl_table_name_get(table, key);
    if (publication->name == NULL) {
        free(publication);
        return NULL;
    }
    struct tl_table_publication *earlier = publication->name->publication;
    *ret_from_step = 0;
    if (earlier) {
        /* Behind the last step there is none, and no receiver waits. */
        *ret_from_step = earlier->step + 1;
        /* It takes the place of the former one in the list, so that walks meet the key once. */
        tl_list_insert_before(earlier->link.next, &publication->link);
        tl_table_publication_end(table, earlier, deferred_calls);
    } else {
        tl_list_push_back(&table->publications, &publication->link);
    }
    publication->name->publication = publication;
    publication->tensor = tl_tensor_get(tensor);
    publication->size_bytes = tl_tensor_size_bytes(tensor);
    publication->step = step;
    publication->number = tl_table_next_publication(table);
    table->stats.published_tensors++;
    table->stats.published_bytes += publication->size_bytes;
    return publication;
}

enum tl_status tl_rendezvous_publish(struct tl_rendezvous *table, const char *key, uint64_t step,
                                     struct tl_tensor *tensor, uint64_t *ret_publication, struct tl_error *ret_error)
{
    struct tl_list deferred_calls;
    enum tl_status status = TL_OK;
    tl_list_init(&deferred_calls);
    tl_table_lock(table);
    if (table->is_closed) {
        status = tl_error_copy(ret_error, &table->close_status);
    } else {
        uint64_t from_step;
        struct tl_table_publication *publication =
            add_publication(table, key, step, tensor, &from_step, &deferred_calls);
        if (publication) {
            if (ret_publication) *ret_publication = publication->number;
            offer_to_waiters(table, publication, from_step, &deferred_calls);
            tl_table_subscriptions_offer_publication(table, publication, &deferred_calls);
        } else {
            status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to publish %s", key);
        }
    }
    tl_table_unlock_and_run(table, &deferred_calls);
    return status;
}

enum tl_status tl_rendezvous_check_version(struct tl_rendezvous *table, const char *key, uint64_t step,
                                           struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    tl_table_lock(table);
    const struct tl_table_name *name = tl_table_name_find(table, key);
    if (name && name->publication && name->publication->step > step)
        status = tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                              "%s is published with step %" PRIu64 ", which is newer than step %" PRIu64
                              "; give a step of at least that, or say that it may go back (push --force)",
                              key, name->publication->step, step);
    tl_table_unlock(table);
    return status;
}

struct tl_tensor *tl_rendezvous_published(struct tl_rendezvous *table, const char *key)
{
    tl_table_lock(table);
    const struct tl_table_name *name = tl_table_name_find(table, key);
    struct tl_tensor *tensor = name && name->publication ? tl_tensor_get(name->publication->tensor) : NULL;
    tl_table_unlock(table);
    return tensor;
}

static enum tl_status not_published(struct tl_rendezvous *table, const char *key, struct tl_error *ret_error)
{
    const char *candidates[NEAREST_KEYS];
    size_t count = 0, key_len = strlen(key);
    uint64_t work = 0;
    TL_LIST_FOREACH(&table->publications, link)
    {
        const char *candidate = TL_CONTAINER_OF(link, struct tl_table_publication, link)->name->key;
        if (count == NEAREST_KEYS || work >= NEAREST_WORK) break;
        work += (uint64_t)key_len * strlen(candidate);
        candidates[count++] = candidate;
    }
    const char *nearest = tl_text_nearest(key, candidates, count);
    if (nearest == NULL)
        return tl_error_set(ret_error, TL_NOT_FOUND, "%s is not published, nor is any key with a name like it", key);
    return tl_error_set(ret_error, TL_NOT_FOUND, "%s is not published; did you mean %s?", key, nearest);
}

enum tl_status tl_rendezvous_withdraw(struct tl_rendezvous *table, const char *key, struct tl_error *ret_error)
{
    struct tl_list deferred_calls;
    enum tl_status status = TL_OK;
    tl_list_init(&deferred_calls);
    tl_table_lock(table);
    struct tl_table_name *name = tl_table_name_find(table, key);
    if (table->is_closed) {
        status = tl_error_copy(ret_error, &table->close_status);
    } else if (name && name->publication) {
        tl_table_publication_end(table, name->publication, &deferred_calls);
    } else {
        status = not_published(table, key, ret_error);
    }
    tl_table_unlock_and_run(table, &deferred_calls);
    return status;
}

bool tl_rendezvous_withdraw_number(struct tl_rendezvous *table, const char *key, uint64_t publication)
{
    struct tl_list deferred_calls;
    tl_list_init(&deferred_calls);
    tl_table_lock(table);
    struct tl_table_name *name = tl_table_name_find(table, key);
    bool is_there = name && name->publication && name->publication->number == publication;
    if (is_there) tl_table_publication_end(table, name->publication, &deferred_calls);
    tl_table_unlock_and_run(table, &deferred_calls);
    return is_there;
}

enum tl_status tl_rendezvous_walk_begin(struct tl_rendezvous *table, struct tl_table_walk *walk,
                                        struct tl_error *ret_error)
{
    tl_table_lock(table);
    enum tl_status status = table->is_closed ? tl_error_copy(ret_error, &table->close_status) : TL_OK;
    walk->next = table->publications.next;
    walk->left_count = table->stats.published_tensors;
    if (status == TL_OK) tl_list_push_back(&table->walks, &walk->link);
    tl_table_unlock(table);
    return status;
}

size_t tl_rendezvous_walk_next(struct tl_rendezvous *table, struct tl_table_walk *walk, struct tl_table_entry *entries,
                               size_t capacity)
{
    size_t count = 0;
    tl_table_lock(table);
    while (count < capacity && walk->left_count > 0 && walk->next != &table->publications) {
        const struct tl_table_publication *from = TL_CONTAINER_OF(walk->next, struct tl_table_publication, link);
        struct tl_table_entry *to = &entries[count++];
        memcpy(to->key, from->name->key, strlen(from->name->key) + 1);
        to->step = from->step;
        to->publication = from->number;
        to->meta_data = *tl_tensor_meta_data(from->tensor);
        to->annotations = tl_annotations_get(tl_tensor_annotations(from->tensor));
        walk->next = walk->next->next;
        walk->left_count--;
    }
    tl_table_unlock(table);
    return count;
}

void tl_rendezvous_walk_end(struct tl_rendezvous *table, struct tl_table_walk *walk)
{
    tl_table_lock(table);
    tl_list_remove(&walk->link);
    tl_table_unlock(table);
}
