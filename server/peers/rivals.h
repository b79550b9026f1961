// SPDX-License-Identifier: Apache-2.0
/*
 * Two processes that claim one task. Each of them connects as that task, and replaces the other: the incarnations of
 * the peer alternate. A process that has restarted never comes back with an incarnation that was there before.
 *
 * Thread: the loop's owner.
 */
#ifndef SERVER_PEERS_RIVALS_H
#define SERVER_PEERS_RIVALS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tensor/transfer.h"

/* How the text about two processes begins. */
#define TL_RIVALS "two processes are"

struct tl_rivals {
    struct tl_identity latest; /* the process behind the peer; incarnation 0: none yet */
    struct tl_identity former; /* the one before it; incarnation 0: none */
    unsigned return_count;     /* how often a former process has come back */
    int64_t returned_ns;       /* when one did last */
    int64_t warned_ns;         /* when that was logged last; 0: never */
};

/* Notes the process that a link of the peer leads to. Logs a warning when two processes alternate, at most once a
 * minute. */
void tl_rivals_note(struct tl_rivals *rivals, const char *name, const struct tl_identity *who);

/* Whether two processes have alternated within the last minute. */
bool tl_rivals_are_active(const struct tl_rivals *rivals);

/* Writes which two processes there are, and what to do. */
void tl_rivals_format(const struct tl_rivals *rivals, const char *name, char *ret_text, size_t capacity);

#endif
