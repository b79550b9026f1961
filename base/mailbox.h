// SPDX-License-Identifier: Apache-2.0
/*
 * Mailbox of one owner thread: any thread posts closures, and the owner takes all of them at once, but runs no more of
 * them at a time than its quota allows.
 *
 * A closure is embedded in the object that it carries; ownership of that object travels with it. Closures run in the
 * order in which they were posted.
 */
#ifndef BASE_MAILBOX_H
#define BASE_MAILBOX_H

#include <pthread.h>
#include <stdbool.h>

#include <tensorlane/status.h>

#include "base/list.h"
#include "base/quota.h"

struct tl_closure {
    struct tl_list link;
    void (*run)(struct tl_closure *closure); /* called on the owner's thread */
};

struct tl_mailbox {
    pthread_mutex_t mutex;
    struct tl_list closures;
    struct tl_list taken; /* the owner's: closures that it has taken and not run yet */
    bool is_owner_asleep; /* the owner is about to sleep: the next post must wake it */
};

void tl_mailbox_init(struct tl_mailbox *mailbox);

/* The mailbox must be empty. */
void tl_mailbox_fini(struct tl_mailbox *mailbox);

/* Posts a closure. Returns true when the caller must wake the owner: at most once per sleep. Thread: any. */
bool tl_mailbox_post(struct tl_mailbox *mailbox, struct tl_closure *closure) TL_MUST_USE;

/* Posts all closures of a list, which is empty afterwards. Returns as tl_mailbox_post. Thread: any. */
bool tl_mailbox_post_all(struct tl_mailbox *mailbox, struct tl_list *closures) TL_MUST_USE;

/* Takes all closures and runs them, as long as some of the quota is left; each uses at least 1 of it. Returns how many
 * have run. The others wait for the next call, as do those that are posted meanwhile. Thread: owner. */
unsigned tl_mailbox_run(struct tl_mailbox *mailbox, struct tl_quota *quota);

/* Returns whether closures were taken that wait for the next run. Thread: owner. */
static inline bool tl_mailbox_has_taken(const struct tl_mailbox *mailbox)
{
    return !tl_list_is_empty(&mailbox->taken);
}

/* Announces a sleep. Returns false when closures wait: the owner must not sleep then. Thread: owner. */
bool tl_mailbox_prepare_sleep(struct tl_mailbox *mailbox) TL_MUST_USE;

/* Ends a sleep. Returns whether a post has asked its caller to wake the owner meanwhile. Thread: owner. */
bool tl_mailbox_end_sleep(struct tl_mailbox *mailbox);

#endif
