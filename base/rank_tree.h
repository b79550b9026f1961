// SPDX-License-Identifier: Apache-2.0
/*
 * A search tree of objects that have a key and a rank, both numbers. It answers one question: which object has the
 * lowest rank among those whose key is at least some number? Where the rank is the key, this is the next key.
 *
 * Objects have their places in themselves, so that nothing is allocated. Each one has the lowest rank of its subtree.
 * At each level an object goes to the side that the next bit of its key names, the highest bit first, and then those of
 * its rank, the lowest bit first. So an object is at most 128 deep, whatever its key is, and the tree is never
 * balanced. Source: E. McCreight, Priority Search Trees, SIAM Journal on Computing 14 (1985), section 3.
 */
#ifndef BASE_RANK_TREE_H
#define BASE_RANK_TREE_H

#include <stdint.h>

/* Embedded in an object. Zeroed memory is in no tree. */
struct tl_rank_link {
    struct tl_rank_tree *tree;        /* NULL: it is in none */
    struct tl_rank_link *children[2]; /* by the bit of this level; NULL: there is none */
    uint64_t key;
    uint64_t rank;
};

/* Zeroed memory is an empty tree. */
struct tl_rank_tree {
    struct tl_rank_link *root; /* NULL: it is empty */
    uint64_t visit_count;      /* how many objects were looked at */
};

/* Adds an object that is in no tree. Objects with the same key and rank lie below each other: there should be few. */
void tl_rank_tree_add(struct tl_rank_tree *tree, struct tl_rank_link *link, uint64_t key, uint64_t rank);
/* Takes the object out of its tree, if it is in one. */
void tl_rank_tree_remove(struct tl_rank_link *link);
/* Returns the object with the lowest rank whose key is at least this one; NULL: there is none. */
struct tl_rank_link *tl_rank_tree_first_from(struct tl_rank_tree *tree, uint64_t key);

#endif
