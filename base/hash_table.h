// SPDX-License-Identifier: Apache-2.0
/*
 * A hash table of objects that have their places in themselves: 16 bytes each, and 8 to 16 bytes of the table. The user
 * computes the hashes and compares the keys. Chained; the table doubles when it has as many objects as chains.
 * Without memory for that its chains become somewhat longer first.
 */
#ifndef BASE_HASH_TABLE_H
#define BASE_HASH_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Embedded in an object. */
struct tl_hash_link {
    struct tl_hash_link *next;
    uint32_t hash;
    uint32_t use_count; /* the object's own, for which there is space here */
};

/* Zeroed memory is an empty table. */
struct tl_hash_table {
    struct tl_hash_link **chains; /* [chain_count]; NULL: nothing is allocated */
    size_t chain_count;           /* a power of two */
    size_t count;
};

/* Adds an object that is in no table. False: there is no memory, and nothing has changed. */
bool tl_hash_table_add(struct tl_hash_table *table, struct tl_hash_link *link, uint32_t hash);
/* Takes the object out; it is in the table. */
void tl_hash_table_remove(struct tl_hash_table *table, struct tl_hash_link *link);
/* Returns the first object; NULL: there is none. */
struct tl_hash_link *tl_hash_table_first(const struct tl_hash_table *table);
/* Returns the first object in the chains from this one on; NULL: there is none. *chain is then the one that it is in.
 * Who begins with 0 and goes on so comes to all that were in the table at the beginning, also when others are added and
 * removed meanwhile, and to some of them twice when the table has grown. */
struct tl_hash_link *tl_hash_table_first_from(const struct tl_hash_table *table, size_t *chain);
/* Returns the object behind this one, in no order; NULL: that was the last one. */
struct tl_hash_link *tl_hash_table_after(const struct tl_hash_table *table, const struct tl_hash_link *link);
void tl_hash_table_fini(struct tl_hash_table *table);

/* Returns the first object with this hash from `link` on, in its chain. */
static inline struct tl_hash_link *tl_hash_skip(struct tl_hash_link *link, uint32_t hash)
{
    while (link != NULL && link->hash != hash)
        link = link->next;
    return link;
}

/* Returns the first object of the chain that objects with this hash are in; NULL: there is none. The table is not
 * empty.
 */
static inline struct tl_hash_link *tl_hash_table_chain(const struct tl_hash_table *table, uint32_t hash)
{
    return table->chains[hash & (table->chain_count - 1)];
}

/* Brings what tl_hash_table_chain reads into the processor's caches. */
static inline void tl_hash_table_prefetch(const struct tl_hash_table *table, uint32_t hash)
{
    __builtin_prefetch(&table->chains[hash & (table->chain_count - 1)]);
}

/* Returns an object with this hash, of which there may be several; NULL: there is none. */
static inline struct tl_hash_link *tl_hash_table_find(const struct tl_hash_table *table, uint32_t hash)
{
    return table->count > 0 ? tl_hash_skip(tl_hash_table_chain(table, hash), hash) : NULL;
}

/* Returns another one with the same hash; NULL: there is no more. */
static inline struct tl_hash_link *tl_hash_table_another(const struct tl_hash_link *link)
{
    return tl_hash_skip(link->next, link->hash);
}

#endif
