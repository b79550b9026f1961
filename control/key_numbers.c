// SPDX-License-Identifier: Apache-2.0
/*
 * The numbers of keys on one link.
 *
 * The asker finds the number of a key by its hash: the slots are a power of two, at least half of them free, and a key
 * is in the first free slot from its hash on. Keys are never removed. The hash needs no secret, because the keys are
 * those of our own program. Failure modes: without memory a key simply has no number; its text is sent each time.
 */
#include "control/key_numbers.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define FIRST_CAPACITY 64

void tl_key_numbers_init(struct tl_key_numbers *numbers, uint32_t limit)
{
    numbers->limit = limit < TL_MAX_KEY_NUMBERS ? limit : TL_MAX_KEY_NUMBERS;
}

/* The slot of a key, or the free slot where it belongs. */
static uint32_t *find_slot(const struct tl_key_numbers *numbers, uint32_t hash, const char *text, size_t text_bytes)
{
    uint32_t mask = 2 * numbers->capacity - 1;
    for (uint32_t at = hash & mask;; at = (at + 1) & mask) {
        uint32_t *slot = &numbers->slots[at];
        if (*slot == 0) return slot;
        const char *other = numbers->texts[*slot - 1];
        if (numbers->hashes[*slot - 1] == hash && strncmp(other, text, text_bytes) == 0 && other[text_bytes] == '\0') {
            return slot;
        }
    }
}

static bool grow(struct tl_key_numbers *numbers)
{
    uint32_t capacity = numbers->capacity == 0 ? FIRST_CAPACITY : 2 * numbers->capacity;
    char **texts = realloc(numbers->texts, capacity * sizeof(*texts));
    if (texts != NULL) numbers->texts = texts;
    uint32_t *hashes = realloc(numbers->hashes, capacity * sizeof(*hashes));
    if (hashes != NULL) numbers->hashes = hashes;
    uint32_t *slots = calloc(2 * capacity, sizeof(*slots));
    if (texts == NULL || hashes == NULL || slots == NULL) {
        free(slots);
        return false;
    }
    free(numbers->slots);
    numbers->slots = slots;
    numbers->capacity = capacity;
    for (uint32_t i = 0; i < numbers->count; i++)
        *find_slot(numbers, hashes[i], texts[i], strlen(texts[i])) = i + 1;
    return true;
}

enum tl_key_status tl_key_numbers_get(struct tl_key_numbers *numbers, const char *text, size_t text_bytes,
                                      uint32_t *ret_number)
{
    uint32_t hash = (uint32_t)XXH3_64bits(text, text_bytes);
    if (numbers->capacity > 0) {
        uint32_t number = *find_slot(numbers, hash, text, text_bytes);
        *ret_number = number - 1;
        if (number > 0) return TL_KEY_WAS_SENT;
    }
    if (numbers->count == numbers->limit) return TL_KEY_HAS_NONE;
    if (numbers->count == numbers->capacity && !grow(numbers)) return TL_KEY_HAS_NONE;
    char *copy = strndup(text, text_bytes);
    if (copy == NULL) return TL_KEY_HAS_NONE;
    *ret_number = numbers->count++;
    numbers->texts[*ret_number] = copy;
    numbers->hashes[*ret_number] = hash;
    *find_slot(numbers, hash, text, text_bytes) = *ret_number + 1;
    return TL_KEY_IS_NEW;
}

static void free_texts(char **texts, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        free(texts[i]);
    free(texts);
}

void tl_key_numbers_fini(struct tl_key_numbers *numbers)
{
    free_texts(numbers->texts, numbers->count);
    free(numbers->hashes);
    free(numbers->slots);
    *numbers = (struct tl_key_numbers){0};
}

const char *tl_kept_keys_add(struct tl_kept_keys *keys, const char *text, size_t text_bytes)
{
    if (keys->count == keys->capacity) {
        uint32_t capacity = keys->capacity == 0 ? FIRST_CAPACITY : 2 * keys->capacity;
        char **texts = realloc(keys->texts, capacity * sizeof(*texts));
        if (texts == NULL) return NULL;
        keys->texts = texts;
        keys->capacity = capacity;
    }
    char *copy = strndup(text, text_bytes);
    if (copy != NULL) keys->texts[keys->count++] = copy;
    return copy;
}

void tl_kept_keys_fini(struct tl_kept_keys *keys)
{
    free_texts(keys->texts, keys->count);
    *keys = (struct tl_kept_keys){0};
}
