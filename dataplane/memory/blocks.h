// SPDX-License-Identifier: Apache-2.0
/*
 * Which parts of some ranges of memory are free. Allocation is best fit, and free neighbours coalesce.
 *
 * The ranges themselves are never touched: a peer may write there, and what it writes must not steer the allocator.
 * Finding a block, taking it and giving it back each cost O(log n) in the number of free blocks.
 *
 * Thread: the caller locks.
 */
#ifndef DATAPLANE_MEMORY_BLOCKS_H
#define DATAPLANE_MEMORY_BLOCKS_H

#include <stdbool.h>
#include <stdint.h>

/* A piece of a range, free or taken. Users only read it. */
struct tl_block {
    uintptr_t address;
    uint64_t len_bytes;
    void *owner; /* the owner of the range */
    bool is_free;
    struct tl_block *before, *after; /* neighbours in the range; NULL: its end */
    struct tl_block *left, *right;   /* free blocks: a tree by length and address */
    uint64_t priority;               /* the tree is a heap by this */
};

struct tl_blocks {
    struct tl_block *root; /* the tree of free blocks; NULL: there is none */
    uint64_t added_count;  /* how many blocks were made so far: the seed of priorities */
    uint64_t used_bytes;   /* in taken blocks */
};

/* Zeroed memory is a valid struct tl_blocks without ranges; it needs no fini when every range was removed. */

/* Adds a range, wholly free, as one block. Returns NULL when there is no memory. */
struct tl_block *tl_blocks_add(struct tl_blocks *blocks, uintptr_t address, uint64_t len_bytes, void *owner);
/* Removes the range of this block, which is free and all of its range. */
void tl_blocks_remove(struct tl_blocks *blocks, struct tl_block *block);
/* Returns true when the block is free and all of its range. */
bool tl_block_is_whole_range(const struct tl_block *block);

/* Returns the smallest free block that holds len_bytes (not 0) at a multiple of alignment (a power of two), and the
 * lowest of several; NULL when there is none. */
struct tl_block *tl_blocks_find(const struct tl_blocks *blocks, uint64_t len_bytes, uint64_t alignment);
/* Takes len_bytes at the lowest multiple of alignment out of a block that tl_blocks_find has found. Returns NULL when
 * there is no memory; nothing has changed then. */
struct tl_block *tl_blocks_take(struct tl_blocks *blocks, struct tl_block *block, uint64_t len_bytes,
                                uint64_t alignment);
/* Gives a taken block back. Returns the free block that it is part of now. Never fails. */
struct tl_block *tl_blocks_give(struct tl_blocks *blocks, struct tl_block *block);

#endif
