// SPDX-License-Identifier: Apache-2.0
/* The table of reasons: it only grows, up to a limit, and lives as long as the process. */
#include "base/reason.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <tensorlane/status.h>

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

#define DIGITS "0123456789"
#define HEX_DIGITS DIGITS "abcdefABCDEF"
/* The characters of a word: a number that is part of a name, an address or a version is not a number by itself. */
#define WORD HEX_DIGITS "ghijklmnopqrstuvwxyzGHIJKLMNOPQRSTUVWXYZ_/.:-"

struct reason {
    UT_hash_handle hh; /* keyed by text */
    char text[];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct reason *reasons;

/* ----------------------------------------------------------------------------------------------------- numbers -- */

static bool is_number(const char *word, size_t len)
{
    if (len > 2 && word[0] == '0' && word[1] == 'x') return strspn(word + 2, HEX_DIGITS) == len - 2;
    size_t digits = strspn(word, DIGITS);
    if (digits == 0 || digits >= len) return digits > 0;
    return word[digits] == '.' && strspn(word + digits + 1, DIGITS) >= len - digits - 1;
}

/* Copies the text with # in place of each number; what does not fit is cut off. */
static void leave_numbers_out(const char *text, char ret_bare[TL_ERROR_MESSAGE_BYTES])
{
    char *bare = ret_bare;
    const char *end = ret_bare + TL_ERROR_MESSAGE_BYTES - 1;
    while (*text != '\0' && bare < end) {
        size_t len = strspn(text, WORD);
        while (len > 1 && strchr("/.:-", text[len - 1]) != NULL)
            len--;
        if (len > 0 && is_number(text, len)) {
            *bare++ = '#';
        } else {
            size_t left_bytes = (size_t)(end - bare);
            if (len == 0) len = 1;
            memcpy(bare, text, len < left_bytes ? len : left_bytes);
            bare += len < left_bytes ? len : left_bytes;
        }
        text += len;
    }
    *bare = '\0';
}

bool tl_reason_is_same(const char *a, const char *b)
{
    char bare_a[TL_ERROR_MESSAGE_BYTES];
    char bare_b[TL_ERROR_MESSAGE_BYTES];
    leave_numbers_out(a, bare_a);
    leave_numbers_out(b, bare_b);
    return strcmp(bare_a, bare_b) == 0;
}

/* ------------------------------------------------------------------------------------------------------- table -- */

/* Returns the stored copy. NULL: the text is not stored, and the table is full or there is no memory. */
static const char *find_or_add(const char *text, unsigned max_count)
{
    struct reason *reason;
    size_t len = strlen(text);
    HASH_FIND(hh, reasons, text, len, reason);
    if (reason != NULL) return reason->text;
    if (HASH_COUNT(reasons) < max_count) reason = calloc(1, sizeof(*reason) + len + 1);
    if (reason == NULL) return NULL;
    memcpy(reason->text, text, len);
    bool is_added = true;
#undef uthash_nonfatal_oom
#define uthash_nonfatal_oom(object) is_added = false
    HASH_ADD_KEYPTR(hh, reasons, reason->text, len, reason);
    if (is_added) return reason->text;
    free(reason);
    return NULL;
}

const char *tl_reason(const char *text)
{
    char bare[TL_ERROR_MESSAGE_BYTES];
    if (text == NULL || text[0] == '\0') return "";
    pthread_mutex_lock(&mutex);
    const char *found = find_or_add(text, TL_MAX_REASONS / 2);
    if (found == NULL) {
        leave_numbers_out(text, bare);
        found = find_or_add(bare, TL_MAX_REASONS);
    }
    pthread_mutex_unlock(&mutex);
    return found != NULL ? found : "see the log";
}
