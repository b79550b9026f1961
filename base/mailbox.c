// SPDX-License-Identifier: Apache-2.0
/*
 * Mailbox of one owner thread.
 *
 * No closure is lost when the owner sleeps: the owner marks the mailbox under the mutex before it sleeps, and only when
 * no closure waits. The first post after that finds the mark, removes it and asks its caller to wake the owner; further
 * posts find no mark. A wake that comes before the owner really sleeps must be remembered by what the owner sleeps on
 * (an eventfd, a completion queue).
 */
#include "base/mailbox.h"

void tl_mailbox_init(struct tl_mailbox *mailbox)
{
    TL_CHECK(pthread_mutex_init(&mailbox->mutex, NULL) == 0);
    tl_list_init(&mailbox->closures);
    tl_list_init(&mailbox->taken);
    mailbox->is_owner_asleep = false;
}

void tl_mailbox_fini(struct tl_mailbox *mailbox)
{
    TL_CHECK(tl_list_is_empty(&mailbox->closures) && tl_list_is_empty(&mailbox->taken));
    TL_CHECK(pthread_mutex_destroy(&mailbox->mutex) == 0);
}

bool tl_mailbox_post(struct tl_mailbox *mailbox, struct tl_closure *closure)
{
    TL_CHECK(closure->run);
    TL_CHECK(pthread_mutex_lock(&mailbox->mutex) == 0);
    tl_list_push_back(&mailbox->closures, &closure->link);
    bool must_wake = mailbox->is_owner_asleep;
    mailbox->is_owner_asleep = false;
    TL_CHECK(pthread_mutex_unlock(&mailbox->mutex) == 0);
    return must_wake;
}

bool tl_mailbox_post_all(struct tl_mailbox *mailbox, struct tl_list *closures)
{
    TL_CHECK(pthread_mutex_lock(&mailbox->mutex) == 0);
    tl_list_splice_back(&mailbox->closures, closures);
    bool must_wake = mailbox->is_owner_asleep;
    mailbox->is_owner_asleep = false;
    TL_CHECK(pthread_mutex_unlock(&mailbox->mutex) == 0);
    return must_wake;
}

unsigned tl_mailbox_run(struct tl_mailbox *mailbox, struct tl_quota *quota)
{
    unsigned count = 0;
    TL_CHECK(pthread_mutex_lock(&mailbox->mutex) == 0);
    tl_list_splice_back(&mailbox->taken, &mailbox->closures);
    TL_CHECK(pthread_mutex_unlock(&mailbox->mutex) == 0);
    for (; tl_mailbox_has_taken(mailbox) && tl_quota_left(quota) > 0; count++) {
        struct tl_closure *closure = TL_CONTAINER_OF(tl_list_pop_front(&mailbox->taken), struct tl_closure, link);
        uint32_t used = quota->used;
        closure->run(closure);
        if (quota->used == used) tl_quota_use(quota, 1); /* it has counted nothing itself */
    }
    return count;
}

bool tl_mailbox_prepare_sleep(struct tl_mailbox *mailbox)
{
    TL_CHECK(pthread_mutex_lock(&mailbox->mutex) == 0);
    bool may_sleep = tl_list_is_empty(&mailbox->closures) && !tl_mailbox_has_taken(mailbox);
    mailbox->is_owner_asleep = may_sleep;
    TL_CHECK(pthread_mutex_unlock(&mailbox->mutex) == 0);
    return may_sleep;
}

bool tl_mailbox_end_sleep(struct tl_mailbox *mailbox)
{
    TL_CHECK(pthread_mutex_lock(&mailbox->mutex) == 0);
    bool is_woken = !mailbox->is_owner_asleep;
    mailbox->is_owner_asleep = false;
    TL_CHECK(pthread_mutex_unlock(&mailbox->mutex) == 0);
    return is_woken;
}
