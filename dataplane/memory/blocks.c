// SPDX-License-Identifier: Apache-2.0
/*
 * Best fit over a treap of free blocks: a search tree by (length, address) that is also a heap by random priorities, so
 * that its depth is logarithmic whatever the order of requests. Its nodes are the blocks themselves, so that giving
 * back needs no memory and cannot fail.
 */
#include "dataplane/memory/blocks.h"

#include <stdlib.h>

#include "base/alloc.h"
#include "base/check.h"

/* --------------------------------------------------------------------------------------------- the free blocks -- */

/* Returns true when the block comes before (len_bytes, address). */
static bool is_less(const struct tl_block *block, uint64_t len_bytes, uintptr_t address)
{
    return block->len_bytes < len_bytes || (block->len_bytes == len_bytes && block->address < address);
}

/* Splits a tree into the blocks before (len_bytes, address) and the others. */
static void split(struct tl_block *tree, uint64_t len_bytes, uintptr_t address, struct tl_block **ret_less,
                  struct tl_block **ret_others)
{
    while (tree) {
        if (is_less(tree, len_bytes, address)) {
            *ret_less = tree;
            ret_less = &tree->right;
            tree = tree->right;
        } else {
            *ret_others = tree;
            ret_others = &tree->left;
            tree = tree->left;
        }
    }
    *ret_less = NULL;
    *ret_others = NULL;
}

/* Makes one tree of two, where all of less come before all of others. */
static struct tl_block *join(struct tl_block *less, struct tl_block *others)
{
    struct tl_block *root;
    struct tl_block **place = &root;
    while (less && others) {
        if (less->priority > others->priority) {
            *place = less;
            place = &less->right;
            less = less->right;
        } else {
            *place = others;
            place = &others->left;
            others = others->left;
        }
    }
    *place = less ? less : others;
    return root;
}

/* Returns where in the tree the block is, or the first block of lower priority on the way to where it belongs. */
static struct tl_block **find_place(struct tl_blocks *blocks, const struct tl_block *block)
{
    struct tl_block **place = &blocks->root;
    while (*place && *place != block && (*place)->priority >= block->priority)
        place = is_less(*place, block->len_bytes, block->address) ? &(*place)->right : &(*place)->left;
    return place;
}

static void insert(struct tl_blocks *blocks, struct tl_block *block)
{
    struct tl_block **place = find_place(blocks, block);
    split(*place, block->len_bytes, block->address, &block->left, &block->right);
    *place = block;
    block->is_free = true;
}

static void remove_free(struct tl_blocks *blocks, struct tl_block *block)
{
    struct tl_block **place = find_place(blocks, block);
    TL_CHECK(*place == block);
    *place = join(block->left, block->right);
    block->is_free = false;
}

/* Returns the first block that does not come before (len_bytes, address); NULL when there is none. */
static struct tl_block *lower_bound(const struct tl_blocks *blocks, uint64_t len_bytes, uintptr_t address)
{
    struct tl_block *found = NULL;
    for (struct tl_block *block = blocks->root; block;) {
        if (is_less(block, len_bytes, address)) {
            block = block->right;
        } else {
            found = block;
            block = block->left;
        }
    }
    return found;
}

/* -------------------------------------------------------------------------------------------------- the ranges -- */

static struct tl_block *create_block(struct tl_blocks *blocks, uintptr_t address, uint64_t len_bytes, void *owner)
{
    struct tl_block *block = tl_alloc_zeroed(sizeof(*block));
    if (!block) return NULL;
    /* SplitMix64 of a counter. */
    uint64_t z = ++blocks->added_count * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    block->priority = z ^ (z >> 31);
    block->address = address;
    block->len_bytes = len_bytes;
    block->owner = owner;
    return block;
}

static void link_after(struct tl_block *block, struct tl_block *added)
{
    added->before = block;
    added->after = block->after;
    if (block->after) block->after->before = added;
    block->after = added;
}

/* Joins the block with its free neighbour behind it. */
static void absorb_after(struct tl_block *block)
{
    struct tl_block *after = block->after;
    block->len_bytes += after->len_bytes;
    block->after = after->after;
    if (after->after) after->after->before = block;
    free(after);
}

struct tl_block *tl_blocks_add(struct tl_blocks *blocks, uintptr_t address, uint64_t len_bytes, void *owner)
{
    struct tl_block *block = create_block(blocks, address, len_bytes, owner);
    if (block) insert(blocks, block);
    return block;
}

void tl_blocks_remove(struct tl_blocks *blocks, struct tl_block *block)
{
    TL_CHECK(tl_block_is_whole_range(block));
    remove_free(blocks, block);
    free(block);
}

bool tl_block_is_whole_range(const struct tl_block *block)
{
    return block->is_free && !block->before && !block->after;
}

/* Returns how many bytes lie before the first multiple of alignment. */
static uint64_t gap_bytes(const struct tl_block *block, uint64_t alignment)
{
    return -block->address & (alignment - 1);
}

struct tl_block *tl_blocks_find(const struct tl_blocks *blocks, uint64_t len_bytes, uint64_t alignment)
{
    struct tl_block *block = lower_bound(blocks, len_bytes, 0);
    /* Few blocks are large enough but badly aligned: they exceed len_bytes by less than alignment. */
    while (block && block->len_bytes - len_bytes < gap_bytes(block, alignment))
        block = lower_bound(blocks, block->len_bytes, block->address + 1);
    return block;
}

struct tl_block *tl_blocks_take(struct tl_blocks *blocks, struct tl_block *block, uint64_t len_bytes,
                                uint64_t alignment)
{
    uint64_t gap = gap_bytes(block, alignment);
    uint64_t rest = block->len_bytes - gap - len_bytes;
    struct tl_block *taken = block, *behind = NULL;
    if (gap > 0) taken = create_block(blocks, block->address + gap, len_bytes, block->owner);
    if (rest > 0) behind = create_block(blocks, block->address + gap + len_bytes, rest, block->owner);
    if (!taken || (rest > 0 && !behind)) {
        if (taken != block) free(taken);
        free(behind);
        return NULL;
    }
    remove_free(blocks, block);
    if (gap > 0) {
        block->len_bytes = gap;
        link_after(block, taken);
        insert(blocks, block);
    }
    taken->len_bytes = len_bytes;
    if (behind) {
        link_after(taken, behind);
        insert(blocks, behind);
    }
    blocks->used_bytes += len_bytes;
    return taken;
}

struct tl_block *tl_blocks_give(struct tl_blocks *blocks, struct tl_block *block)
{
    TL_CHECK(!block->is_free);
    blocks->used_bytes -= block->len_bytes;
    if (block->after && block->after->is_free) {
        remove_free(blocks, block->after);
        absorb_after(block);
    }
    if (block->before && block->before->is_free) {
        block = block->before;
        remove_free(blocks, block);
        absorb_after(block);
    }
    insert(blocks, block);
    return block;
}
