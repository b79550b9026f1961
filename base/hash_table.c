// SPDX-License-Identifier: Apache-2.0
#include "base/hash_table.h"

#include <stdlib.h>

#include "base/check.h"

#define FIRST_CHAINS 32
/* So many objects there may be for each chain, and so many without memory for more chains. */
#define USUAL_CHAIN 1
#define LONGEST_CHAIN 8
/* A table that was larger gives its memory back when it is empty. */
#define IDLE_CHAINS 1024

static struct tl_hash_link **chain_of(const struct tl_hash_table *table, uint32_t hash)
{
    return &table->chains[hash & (table->chain_count - 1)];
}

static void push(const struct tl_hash_table *table, struct tl_hash_link *link)
{
    struct tl_hash_link **chain = chain_of(table, link->hash);
    link->next = *chain;
    *chain = link;
}

static bool grow(struct tl_hash_table *table)
{
    size_t old_count = table->chain_count;
    struct tl_hash_link **old = table->chains;
    size_t count = old == NULL ? FIRST_CHAINS : 2 * old_count;
    struct tl_hash_link **chains = calloc(count, sizeof(struct tl_hash_link *));
    if (chains == NULL) return false;
    table->chains = chains;
    table->chain_count = count;
    for (size_t i = 0; i < old_count; i++) {
        struct tl_hash_link *next;
        for (struct tl_hash_link *link = old[i]; link != NULL; link = next) {
            next = link->next;
            push(table, link);
        }
    }
    free(old);
    return true;
}

bool tl_hash_table_add(struct tl_hash_table *table, struct tl_hash_link *link, uint32_t hash)
{
    if (table->count >= USUAL_CHAIN * table->chain_count && !grow(table) &&
        table->count >= LONGEST_CHAIN * table->chain_count)
        return false;
    link->hash = hash;
    push(table, link);
    table->count++;
    return true;
}

void tl_hash_table_remove(struct tl_hash_table *table, struct tl_hash_link *link)
{
    struct tl_hash_link **place = chain_of(table, link->hash);
    while (*place != link) {
        TL_CHECK(*place != NULL);
        place = &(*place)->next;
    }
    *place = link->next;
    if (--table->count == 0 && table->chain_count > IDLE_CHAINS) tl_hash_table_fini(table);
}

struct tl_hash_link *tl_hash_table_first_from(const struct tl_hash_table *table, size_t *chain)
{
    for (; *chain < table->chain_count; (*chain)++)
        if (table->chains[*chain] != NULL) return table->chains[*chain];
    return NULL;
}

struct tl_hash_link *tl_hash_table_first(const struct tl_hash_table *table)
{
    size_t chain = 0;
    return tl_hash_table_first_from(table, &chain);
}

struct tl_hash_link *tl_hash_table_after(const struct tl_hash_table *table, const struct tl_hash_link *link)
{
    if (link->next != NULL) return link->next;
    size_t chain = (link->hash & (table->chain_count - 1)) + 1;
    return tl_hash_table_first_from(table, &chain);
}

void tl_hash_table_fini(struct tl_hash_table *table)
{
    free(table->chains);
    *table = (struct tl_hash_table){.count = 0};
}
