// SPDX-License-Identifier: Apache-2.0
/*
 * The numbers of keys on one link: as the asker remembers which it has sent (struct tl_key_numbers), and as the owner
 * keeps the keys that came (struct tl_kept_keys). Keys get the numbers 0, 1, 2, ... in the order in which they
 * are sent, so that both sides count alike. The tables end with the link.
 */
#ifndef CONTROL_KEY_NUMBERS_H
#define CONTROL_KEY_NUMBERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* More keys are not numbered, whatever the owner offers. */
#define TL_MAX_KEY_NUMBERS 32768

/* Keys that were sent to the peer, by their text. Zeroed memory is a table without any, for a peer that keeps none. */
struct tl_key_numbers {
    uint32_t limit; /* so many keys does the peer keep */
    uint32_t count;
    char **texts;      /* [capacity] by number */
    uint32_t *hashes;  /* [capacity] by number */
    uint32_t capacity; /* a power of two; 0: nothing is allocated yet */
    uint32_t *slots;   /* [2 * capacity]: number + 1 of a key, 0: free; a key is at its hash or behind */
};

enum tl_key_status {
    TL_KEY_WAS_SENT, /* the peer knows it by *ret_number */
    TL_KEY_IS_NEW,   /* its text must be sent now, and has a number from then on */
    TL_KEY_HAS_NONE, /* it has no number, because there are no more or there is no memory */
};

void tl_key_numbers_init(struct tl_key_numbers *numbers, uint32_t limit);
/* Looks for a key, and gives it the next number if it has none. */
enum tl_key_status tl_key_numbers_get(struct tl_key_numbers *numbers, const char *text, size_t text_bytes,
                                      uint32_t *ret_number);
void tl_key_numbers_fini(struct tl_key_numbers *numbers);

/* Keys that the peer has sent, by their number. Zeroed memory is a table that keeps none. */
struct tl_kept_keys {
    uint32_t limit;
    uint32_t count;
    uint32_t capacity;
    char **texts; /* [capacity], each NUL-terminated, until tl_kept_keys_fini */
};

/* Keeps a key under the next number. Returns it, NUL-terminated; NULL when there is no memory. There must be a number
 * left (count < limit). */
const char *tl_kept_keys_add(struct tl_kept_keys *keys, const char *text, size_t text_bytes);
/* NULL: the number was not sent. */
static inline const char *tl_kept_keys_get(const struct tl_kept_keys *keys, uint32_t number)
{
    return number < keys->count ? keys->texts[number] : NULL;
}
void tl_kept_keys_fini(struct tl_kept_keys *keys);

#endif
