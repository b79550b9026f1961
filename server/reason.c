// SPDX-License-Identifier: Apache-2.0
/* The table of reasons: it only grows, to a limit, and lasts as long as the process. */
#include "server/reason.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

struct reason {
    UT_hash_handle hh; /* by text */
    char text[];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct reason *reasons;

static const char *find_or_add(const char *text)
{
    struct reason *reason;
    size_t len = strlen(text);
    HASH_FIND(hh, reasons, text, len, reason);
    if (reason != NULL) return reason->text;
    if (HASH_COUNT(reasons) < TL_MAX_REASONS) reason = calloc(1, sizeof(*reason) + len + 1);
    if (reason == NULL) return "see the log";
    memcpy(reason->text, text, len);
    bool is_added = true;
#undef uthash_nonfatal_oom
#define uthash_nonfatal_oom(object) is_added = false
    HASH_ADD_KEYPTR(hh, reasons, reason->text, len, reason);
    if (is_added) return reason->text;
    free(reason);
    return "see the log";
}

const char *tl_reason(const char *text)
{
    if (text == NULL || text[0] == '\0') return "";
    pthread_mutex_lock(&mutex);
    const char *found = find_or_add(text);
    pthread_mutex_unlock(&mutex);
    return found;
}
