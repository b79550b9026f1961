// SPDX-License-Identifier: Apache-2.0
#include "dataplane/engine/kept_keys.h"

#include <stdlib.h>
#include <string.h>

#include "base/arith.h"

#define FIRST_CAPACITY 64

static bool grow_kept(struct tl_numbered_keys *keys, uint32_t number)
{
    uint64_t capacity = keys->capacity == 0 ? FIRST_CAPACITY : keys->capacity;
    while (capacity <= number)
        capacity *= 2;
    capacity = tl_min_u64(capacity, keys->limit);
    if (capacity <= keys->capacity) return true;
    struct tl_kept_key *entries = realloc(keys->entries, (size_t)capacity * sizeof(*entries));
    if (entries == NULL) return false;
    memset(entries + keys->capacity, 0, ((size_t)capacity - keys->capacity) * sizeof(*entries));
    keys->entries = entries;
    keys->capacity = (uint32_t)capacity;
    return true;
}

struct tl_kept_text *tl_kept_text_create(const char *text, size_t text_bytes)
{
    struct tl_kept_text *kept = malloc(sizeof(*kept) + text_bytes + 1);
    if (kept == NULL) return NULL;
    kept->reference_count = 1;
    kept->is_short = false;
    memcpy(kept->text, text, text_bytes);
    kept->text[text_bytes] = '\0';
    return kept;
}

struct tl_kept_meta_data *tl_kept_meta_data_create(const struct tl_meta_data *meta_data)
{
    struct tl_kept_meta_data *kept = malloc(sizeof(*kept));
    if (kept == NULL) return NULL;
    kept->reference_count = 1;
    tl_meta_data_copy(&kept->meta_data, meta_data);
    return kept;
}

static void clear_kept(struct tl_kept_key *key)
{
    tl_kept_text_put(key->text);
    tl_kept_meta_data_put(key->expected);
    *key = (struct tl_kept_key){.text = NULL};
}

struct tl_kept_key *tl_numbered_keys_give(struct tl_numbered_keys *keys, uint32_t number, const char *text)
{
    if (!grow_kept(keys, number)) return NULL;
    struct tl_kept_key *key = &keys->entries[number];
    clear_kept(key);
    key->text = tl_kept_text_create(text, strlen(text));
    return key->text != NULL ? key : NULL;
}

bool tl_kept_key_expect(struct tl_kept_key *key, const struct tl_meta_data *meta_data)
{
    if (key->expected != NULL && key->expected->reference_count == 1) {
        tl_meta_data_copy(&key->expected->meta_data, meta_data);
        return true;
    }
    struct tl_kept_meta_data *expected = tl_kept_meta_data_create(meta_data);
    if (expected == NULL) return false;
    tl_kept_meta_data_put(key->expected);
    key->expected = expected;
    return true;
}

void tl_numbered_keys_fini(struct tl_numbered_keys *keys)
{
    for (uint32_t number = 0; number < keys->capacity; number++)
        clear_kept(&keys->entries[number]);
    free(keys->entries);
    *keys = (struct tl_numbered_keys){.limit = 0};
}
