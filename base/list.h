// SPDX-License-Identifier: Apache-2.0
/* Intrusive doubly linked list. The head is a node that belongs to no object; a node that is in no list points to
 * itself. */
#ifndef BASE_LIST_H
#define BASE_LIST_H

#include <stdbool.h>
#include <stddef.h>

#include "base/check.h"

struct tl_list {
    struct tl_list *prev;
    struct tl_list *next;
};

static inline void tl_list_init(struct tl_list *node)
{
    node->prev = node;
    node->next = node;
}

static inline bool tl_list_is_empty(const struct tl_list *head)
{
    return head->next == head;
}

/* Returns whether the node is in a list. */
static inline bool tl_list_is_linked(const struct tl_list *node)
{
    return node->next != node;
}

static inline void tl_list_insert_before(struct tl_list *place, struct tl_list *node)
{
    node->prev = place->prev;
    node->next = place;
    place->prev->next = node;
    place->prev = node;
}

static inline void tl_list_push_back(struct tl_list *head, struct tl_list *node)
{
    tl_list_insert_before(head, node);
}

static inline void tl_list_push_front(struct tl_list *head, struct tl_list *node)
{
    tl_list_insert_before(head->next, node);
}

/* Takes the node out of its list, if it is in one. */
static inline void tl_list_remove(struct tl_list *node)
{
    node->prev->next = node->next;
    node->next->prev = node->prev;
    tl_list_init(node);
}

/* Takes the first node out of the list and returns it; NULL when the list is empty. */
static inline struct tl_list *tl_list_pop_front(struct tl_list *head)
{
    if (tl_list_is_empty(head)) return NULL;
    struct tl_list *node = head->next;
    tl_list_remove(node);
    return node;
}

/* Moves every node of *from to the end of *to. */
static inline void tl_list_splice_back(struct tl_list *to, struct tl_list *from)
{
    if (tl_list_is_empty(from)) return;
    from->next->prev = to->prev;
    to->prev->next = from->next;
    from->prev->next = to;
    to->prev = from->prev;
    tl_list_init(from);
}

#define TL_LIST_FOREACH(head, node) for (struct tl_list *node = (head)->next; (node) != (head); (node) = (node)->next)

/* The body may take node out of the list. */
#define TL_LIST_FOREACH_SAFE(head, node)                                                                               \
    for (struct tl_list *node = (head)->next, *node##_next = (node)->next; (node) != (head);                           \
         (node) = node##_next, node##_next = (node)->next)

#endif
