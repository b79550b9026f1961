// SPDX-License-Identifier: Apache-2.0
#include "dataplane/engine/asked_keys.h"

#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/prefetch.h"

#include <xxhash.h>

#define FIRST_CAPACITY 64
/* A number goes to another key when so many times as many requests as there are numbers have not named its key. */
#define IDLE_ROUNDS 4
/* After so many requests in a row for keys without numbers, there are far more keys than numbers: hardly one has a
 * number, and one that got a number would lose it before it is asked for again. From then on only one request in
 * LOOK_INTERVAL looks for its key, and may take a number. */
#define MANY_MISSES 64
#define LOOK_INTERVAL 16

struct tl_asked_key {
    struct tl_hash_link hash; /* in keys->entries */
    struct tl_list place;     /* in keys->used */
    uint32_t number;
    bool is_number_sent;           /* the peer knows the number */
    uint64_t used;                 /* keys->clock when the key was last asked for */
    uint64_t expected_step;        /* what the latest request has said; valid when is_number_sent */
    struct tl_meta_data *sent;     /* what the peer remembers of the requests; NULL: nothing, or that is not known */
    struct tl_meta_cached *cached; /* what the next value is expected to be; NULL: nothing is known */
    char key[];
};

/* The keys are those of our own program, so that their hashes need no secret. */
static uint32_t hash_of(const char *key, size_t key_bytes)
{
    return (uint32_t)XXH3_64bits(key, key_bytes);
}

static void forget_entry(struct tl_asked_keys *keys, struct tl_asked_key *entry)
{
    tl_hash_table_remove(&keys->entries, &entry->hash);
    tl_list_remove(&entry->place);
    free(entry->sent);
    free(entry->cached);
    free(entry);
}

void tl_asked_keys_fini(struct tl_asked_keys *keys)
{
    for (uint32_t number = 0; number < keys->count; number++)
        forget_entry(keys, keys->by_number[number]);
    tl_hash_table_fini(&keys->entries);
    free(keys->by_number);
    *keys = (struct tl_asked_keys){.limit = 0};
}

static struct tl_asked_key *oldest_entry(const struct tl_asked_keys *keys)
{
    return TL_CONTAINER_OF(keys->used.next, struct tl_asked_key, place);
}

static void use_entry(struct tl_asked_keys *keys, struct tl_asked_key *entry)
{
    entry->used = keys->clock;
    if (entry->place.next == &keys->used) return; /* the latest already */
    tl_list_remove(&entry->place);
    tl_list_push_back(&keys->used, &entry->place);
}

/* Steps ask for the same keys in the same order, so the next key is usually the least recently used one. */
static bool is_oldest(const struct tl_asked_keys *keys, const char *key)
{
    return keys->entries.count > 0 && strcmp(oldest_entry(keys)->key, key) == 0;
}

/* Returns NULL when there is no entry. */
static struct tl_asked_key *find_entry(const struct tl_asked_keys *keys, const char *key)
{
    if (keys->entries.count == 0) return NULL;
    struct tl_hash_link *link = tl_hash_table_find(&keys->entries, hash_of(key, strlen(key)));
    while (link != NULL && strcmp(TL_CONTAINER_OF(link, struct tl_asked_key, hash)->key, key) != 0)
        link = tl_hash_table_another(link);
    return link != NULL ? TL_CONTAINER_OF(link, struct tl_asked_key, hash) : NULL;
}

static bool grow_numbers(struct tl_asked_keys *keys)
{
    if (keys->count < keys->capacity) return true;
    uint32_t capacity = keys->capacity == 0 ? FIRST_CAPACITY : 2 * keys->capacity;
    struct tl_asked_key **by_number = realloc(keys->by_number, capacity * sizeof(struct tl_asked_key *));
    if (by_number == NULL) return false;
    keys->by_number = by_number;
    keys->capacity = capacity;
    return true;
}

/* Whether all numbers are given, to keys that are still in use. */
static bool are_numbers_used(const struct tl_asked_keys *keys)
{
    if (keys->count < keys->limit) return false;
    return keys->entries.count == 0 || keys->clock - oldest_entry(keys)->used < IDLE_ROUNDS * (uint64_t)keys->limit;
}

static struct tl_asked_key *create_entry(struct tl_asked_keys *keys, const char *key)
{
    size_t key_bytes = strlen(key);
    struct tl_asked_key *entry = calloc(1, sizeof(*entry) + key_bytes + 1);
    if (entry == NULL) return NULL;
    memcpy(entry->key, key, key_bytes + 1);
    tl_list_init(&entry->place);
    if (keys->entries.count == 0) tl_list_init(&keys->used);
    if (!tl_hash_table_add(&keys->entries, &entry->hash, hash_of(key, key_bytes))) {
        free(entry);
        return NULL;
    }
    tl_list_push_back(&keys->used, &entry->place);
    return entry;
}

uint32_t tl_asked_keys_get(struct tl_asked_keys *keys, const char *key)
{
    struct tl_asked_key *entry = is_oldest(keys, key) ? oldest_entry(keys) : NULL;
    keys->clock++;
    if (entry == NULL) {
        bool is_rare = keys->count == keys->limit && keys->missed_count >= MANY_MISSES;
        if (is_rare && keys->clock % LOOK_INTERVAL != 0) return TL_NO_KEY_NUMBER;
        entry = find_entry(keys, key);
    }
    keys->missed_count = entry != NULL ? 0 : keys->missed_count + 1;
    if (entry == NULL && !are_numbers_used(keys)) {
        bool is_replacing = keys->count == keys->limit;
        if (!is_replacing && !grow_numbers(keys)) return TL_NO_KEY_NUMBER;
        entry = create_entry(keys, key);
        if (entry == NULL) return TL_NO_KEY_NUMBER;
        entry->number = is_replacing ? oldest_entry(keys)->number : keys->count++;
        if (is_replacing) forget_entry(keys, oldest_entry(keys));
        keys->has_replaced |= is_replacing;
        keys->by_number[entry->number] = entry;
    }
    if (entry == NULL) return TL_NO_KEY_NUMBER;
    use_entry(keys, entry);
    tl_prefetch(oldest_entry(keys), sizeof(*entry)); /* probably the next one */
    return entry->number;
}

/* Returns the entry of the key, unless the number belongs to another one by now. */
static struct tl_asked_key *entry_at(const struct tl_asked_keys *keys, uint32_t number, const char *key)
{
    struct tl_asked_key *entry = number < keys->count ? keys->by_number[number] : NULL;
    return entry != NULL && (!keys->has_replaced || strcmp(entry->key, key) == 0) ? entry : NULL;
}

const struct tl_meta_cached *tl_asked_keys_expected(const struct tl_asked_keys *keys, uint32_t number, const char *key)
{
    const struct tl_asked_key *entry = entry_at(keys, number, key);
    const struct tl_meta_cached *cached = entry != NULL ? entry->cached : NULL;
    return cached != NULL && cached->meta_data.size_bytes > 0 ? cached : NULL;
}

void tl_asked_keys_expect(struct tl_asked_keys *keys, uint32_t number, const char *key,
                          const struct tl_meta_cached *expected)
{
    struct tl_asked_key *entry = entry_at(keys, number, key);
    if (entry == NULL || (entry->cached == NULL && expected->meta_data.size_bytes == 0)) return;
    if (entry->cached == NULL) entry->cached = malloc(sizeof(*entry->cached));
    if (entry->cached != NULL) tl_meta_cached_copy(entry->cached, expected);
}

/* Notes that the peer remembers the meta-data. Without memory it is sent each time. */
static void note_sent(struct tl_asked_key *entry, const struct tl_meta_data *meta_data)
{
    struct tl_meta_data *sent = entry->sent != NULL ? entry->sent : malloc(sizeof(*sent));
    if (sent != NULL) tl_meta_data_copy(sent, meta_data);
    entry->sent = sent;
}

enum tl_key_form tl_asked_keys_tell(struct tl_asked_keys *keys, const struct tl_message *request, uint64_t *ret_base)
{
    struct tl_asked_key *entry = entry_at(keys, request->key_number, request->key);
    *ret_base = request->step;
    if (entry == NULL) return TL_KEY_TEXT;
    const struct tl_meta_data *meta_data = request->has_meta_data ? &request->meta_data : NULL;
    bool is_as_before = entry->sent != NULL && meta_data != NULL && tl_meta_data_is_equal(entry->sent, meta_data);
    enum tl_key_form form = !entry->is_number_sent ? TL_KEY_NEW : is_as_before ? TL_KEY_AS_BEFORE : TL_KEY_KNOWN;
    if (entry->is_number_sent) *ret_base = entry->expected_step;
    entry->is_number_sent = true;
    entry->expected_step = request->expected_step;
    if (meta_data != NULL && !is_as_before) note_sent(entry, meta_data);
    return form;
}
