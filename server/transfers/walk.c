// SPDX-License-Identifier: Apache-2.0
#include "server/transfers/walk.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/glob.h"
#include "control/listing.h"
#include "server/worker_internal.h"

#define PAGE_ENTRIES 16
#define FIRST_CAPACITY 64
/* The clock is read once per this many entries that are freed. */
#define FREE_BATCH 256

struct walk {
    struct tl_walk base;
    struct tl_table_walk cursor;
    struct tl_glob *glob; /* NULL: everything matches */
    struct tl_list place; /* in worker->sources.ended_walks once it has ended */
    struct tl_share_client client;
    bool withdraws;
    size_t capacity;        /* items that the listing has memory for */
    struct tl_share *share; /* the part of worker->sources.listings that charged_bytes are charged to */
    uint64_t charged_bytes;
    struct tl_table_entry page[PAGE_ENTRIES]; /* [page_count]; the first page_used have been looked at */
    size_t page_count;
    size_t page_used;
};

enum tl_status tl_walk_begin(void *context, const struct tl_identity *client, const char *pattern, bool withdraws,
                             struct tl_walk **ret_walk, struct tl_error *ret_error)
{
    struct tl_worker *worker = context;
    struct walk *walk = calloc(1, sizeof(*walk));
    if (walk != NULL && pattern[0] != '\0') walk->glob = tl_glob_create(pattern);
    if (walk == NULL || (pattern[0] != '\0' && walk->glob == NULL)) {
        free(walk);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to look for a pattern");
    }
    walk->client = client->client;
    walk->withdraws = withdraws;
    enum tl_status status = tl_rendezvous_walk_begin(worker->table, &walk->cursor, ret_error);
    if (status != TL_OK) {
        tl_glob_destroy(walk->glob);
        free(walk);
        return status;
    }
    *ret_walk = &walk->base;
    return TL_OK;
}

static enum tl_status charge(struct tl_worker *worker, struct walk *walk, uint64_t bytes, struct tl_error *ret_error)
{
    if (tl_shares_take(worker->sources.listings, &walk->client, bytes, &walk->share, NULL) != TL_OK)
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED,
                            "listings that clients have not read take %llu of %llu bytes already; read them to their "
                            "end, or ask for fewer tensors with a pattern",
                            (unsigned long long)tl_shares_used(worker->sources.listings),
                            (unsigned long long)TL_LISTINGS_BYTES);
    walk->charged_bytes += bytes;
    return TL_OK;
}

/* Makes space for one more item in the listing. */
static enum tl_status reserve(struct tl_worker *worker, struct walk *walk, struct tl_error *ret_error)
{
    struct tl_listing *listing = &walk->base.listing;
    if (listing->count < walk->capacity) return TL_OK;
    size_t capacity = walk->capacity > 0 ? walk->capacity + walk->capacity / 2 : FIRST_CAPACITY;
    enum tl_status status = charge(worker, walk, (capacity - walk->capacity) * sizeof(*listing->items), ret_error);
    if (status != TL_OK) return status;
    struct tl_listed *items = realloc(listing->items, capacity * sizeof(*items));
    if (items == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to list %zu tensors", capacity);
    listing->items = items;
    walk->capacity = capacity;
    return TL_OK;
}

/* Returns what the annotations add to the listing. Those of one file count once while its tensors follow each other. */
static uint64_t annotations_bytes(const struct walk *walk, const struct tl_table_entry *entry)
{
    const struct tl_listing *listing = &walk->base.listing;
    bool is_counted = listing->count > 0 && listing->items[listing->count - 1].annotations == entry->annotations;
    return is_counted ? 0 : tl_annotations_bytes(entry->annotations);
}

static enum tl_status list(struct tl_worker *worker, struct walk *walk, const struct tl_table_entry *entry,
                           struct tl_error *ret_error)
{
    enum tl_status status = reserve(worker, walk, ret_error);
    if (status == TL_OK)
        status = charge(worker, walk, strlen(entry->key) + 1 + annotations_bytes(walk, entry), ret_error);
    if (status != TL_OK) return status;
    char *key = strdup(entry->key);
    if (key == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory to list %s", entry->key);
    struct tl_listing *listing = &walk->base.listing;
    listing->items[listing->count++] = (struct tl_listed){.key = key,
                                                          .step = entry->step,
                                                          .publication = entry->publication,
                                                          .meta_data = entry->meta_data,
                                                          .annotations = tl_annotations_get(entry->annotations)};
    tl_listing_sift(listing);
    return TL_OK;
}

static enum tl_status handle(struct tl_worker *worker, struct walk *walk, const struct tl_table_entry *entry,
                             struct tl_error *ret_error)
{
    if (walk->glob != NULL && !tl_glob_is_match(walk->glob, entry->key)) return TL_OK;
    if (!walk->withdraws) return list(worker, walk, entry, ret_error);
    if (tl_rendezvous_withdraw_number(worker->table, entry->key, entry->publication)) walk->base.withdrawn_count++;
    return TL_OK;
}

enum tl_status tl_walk_step(void *context, struct tl_walk *base, struct tl_error *ret_error)
{
    struct tl_worker *worker = context;
    struct walk *walk = TL_CONTAINER_OF(base, struct walk, base);
    int64_t end_ns = tl_clock_now_ns() + TL_WALK_STEP_NS;
    do {
        if (walk->page_used == walk->page_count) {
            walk->page_used = 0;
            walk->page_count = tl_rendezvous_walk_next(worker->table, &walk->cursor, walk->page, PAGE_ENTRIES);
            base->is_complete = walk->page_count == 0;
            /* Publishing moves the cursors of walks. A walk whose listing is not read must not cost that, so it ends
             * here. */
            if (base->is_complete) tl_rendezvous_walk_end(worker->table, &walk->cursor);
        } else {
            struct tl_table_entry *entry = &walk->page[walk->page_used++];
            enum tl_status status = handle(worker, walk, entry, ret_error);
            tl_annotations_put(entry->annotations);
            if (status != TL_OK) return status;
        }
    } while (!base->is_complete && tl_clock_now_ns() < end_ns);
    return TL_OK;
}

static void free_walk(struct walk *walk)
{
    tl_listing_fini(&walk->base.listing);
    if (walk->charged_bytes > 0) tl_shares_give(walk->share, walk->charged_bytes);
    free(walk);
}

/* Frees what can be freed of the walks that have ended in one step, the oldest first. */
static void free_ended(struct tl_closure *closure)
{
    struct tl_worker *worker = TL_CONTAINER_OF(closure, struct tl_worker, sources.ended_walks_closure);
    int64_t end_ns = tl_clock_now_ns() + TL_WALK_STEP_NS;
    while (!tl_list_is_empty(&worker->sources.ended_walks) && tl_clock_now_ns() < end_ns) {
        struct walk *walk = TL_CONTAINER_OF(worker->sources.ended_walks.next, struct walk, place);
        for (size_t i = 0; i < FREE_BATCH && walk->base.listing.count > 0; i++)
            tl_listing_drop_last(&walk->base.listing);
        if (walk->base.listing.count > 0) continue;
        tl_list_remove(&walk->place);
        free_walk(walk);
    }
    if (!tl_list_is_empty(&worker->sources.ended_walks)) tl_loop_defer(worker->loop, closure);
}

void tl_walk_end(void *context, struct tl_walk *base)
{
    struct tl_worker *worker = context;
    struct walk *walk = TL_CONTAINER_OF(base, struct walk, base);
    tl_rendezvous_walk_end(worker->table, &walk->cursor);
    while (walk->page_used < walk->page_count)
        tl_annotations_put(walk->page[walk->page_used++].annotations);
    tl_glob_destroy(walk->glob);
    bool is_first = tl_list_is_empty(&worker->sources.ended_walks);
    tl_list_push_back(&worker->sources.ended_walks, &walk->place);
    if (is_first) tl_loop_defer(worker->loop, &worker->sources.ended_walks_closure);
}

void tl_walks_init(struct tl_worker *worker)
{
    tl_list_init(&worker->sources.ended_walks);
    worker->sources.ended_walks_closure.run = free_ended;
}

void tl_walks_fini(struct tl_worker *worker)
{
    struct tl_list *place;
    while ((place = tl_list_pop_front(&worker->sources.ended_walks)) != NULL)
        free_walk(TL_CONTAINER_OF(place, struct walk, place));
}
