// SPDX-License-Identifier: Apache-2.0
#include "base/rank_tree.h"

#include <stddef.h>

#define KEY_BITS 64

/* Returns the side that the object goes to at this level. */
static unsigned side_of(const struct tl_rank_link *link, unsigned level)
{
    uint64_t bits = level < KEY_BITS ? link->key >> (KEY_BITS - 1 - level) : link->rank >> (level % KEY_BITS);
    return (unsigned)(bits & 1);
}

/* Returns the one with the lower rank; each may be NULL. */
static struct tl_rank_link *lower(struct tl_rank_link *a, struct tl_rank_link *b)
{
    if (a == NULL || b == NULL) return a != NULL ? a : b;
    return a->rank < b->rank ? a : b;
}

void tl_rank_tree_add(struct tl_rank_tree *tree, struct tl_rank_link *link, uint64_t key, uint64_t rank)
{
    struct tl_rank_link **place = &tree->root;
    *link = (struct tl_rank_link){.tree = tree, .key = key, .rank = rank};
    for (unsigned level = 0; *place != NULL; level++) {
        struct tl_rank_link *there = *place;
        tree->visit_count++;
        if (link->rank < there->rank) { /* it takes this place, and what was there goes on */
            struct tl_rank_link *children[] = {there->children[0], there->children[1]};
            there->children[0] = there->children[1] = NULL;
            link->children[0] = children[0];
            link->children[1] = children[1];
            *place = link;
            link = there;
        }
        place = &(*place)->children[side_of(link, level)];
    }
    *place = link;
}

void tl_rank_tree_remove(struct tl_rank_link *link)
{
    struct tl_rank_tree *tree = link->tree;
    if (tree == NULL) return;
    struct tl_rank_link **place = &tree->root, *moved;
    for (unsigned level = 0; *place != link; level++) {
        tree->visit_count++;
        place = &(*place)->children[side_of(link, level)];
    }
    /* The child with the lower rank moves up, as long as there is one. */
    while ((moved = lower(link->children[0], link->children[1])) != NULL) {
        unsigned side = moved == link->children[1];
        struct tl_rank_link *other = link->children[!side];
        tree->visit_count++;
        link->children[0] = moved->children[0];
        link->children[1] = moved->children[1];
        moved->children[!side] = other;
        *place = moved;
        place = &moved->children[side];
    }
    *place = NULL;
    link->tree = NULL;
}

struct tl_rank_link *tl_rank_tree_first_from(struct tl_rank_tree *tree, uint64_t key)
{
    struct tl_rank_link *first = NULL, *link = tree->root;
    for (unsigned level = 0; link != NULL; level++) {
        tree->visit_count++;
        if (link->key >= key) return lower(first, link); /* it is the first of its subtree */
        unsigned side = (unsigned)(key >> (KEY_BITS - 1 - level) & 1);
        if (side == 0) first = lower(first, link->children[1]); /* all keys there are higher */
        link = link->children[side];
    }
    return first;
}
