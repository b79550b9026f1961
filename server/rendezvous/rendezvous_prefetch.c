// SPDX-License-Identifier: Apache-2.0
/*
 * Rendezvous table: what is known of many keys is brought into the processor's caches at once.
 *
 * From a key to the bytes of its published value there are five places in memory, each of which is known from the one
 * before. With many keys hardly one of them is in a cache, so that a look-up waits five times. Here all keys go from
 * one place to the next together, and wait for each other's memory at the same time. Nothing is changed, and nothing is
 * promised: another thread may publish or withdraw meanwhile.
 */
#include "base/arith.h"
#include "base/prefetch.h"
#include "server/rendezvous/rendezvous_table.h"

/* So many keys go together: what they bring fits into the first cache. */
#define PREFETCHED_KEYS 32
/* So much is needed of a name, a place or a publication. */
#define OBJECT_BYTES 128

/* NULL is accepted. */
static void prefetch_object(const void *object)
{
    if (object != NULL) tl_prefetch(object, OBJECT_BYTES);
}

/* A look-up walks the places of its name. A name has seldom more than those of a few steps. */
static void prefetch_place(const struct tl_table_name *name)
{
    if (name->places.next != &name->places && !name->has_index)
        prefetch_object(TL_CONTAINER_OF(name->places.next, struct tl_table_place, name_link));
}

static void prefetch_names(const struct tl_rendezvous *table, const struct tl_key_text *keys, size_t count,
                           uint32_t *ret_hashes, struct tl_hash_link **ret_first)
{
    for (size_t i = 0; i < count; i++) {
        ret_hashes[i] = tl_table_hash_of_key(table, keys[i].text, keys[i].text_bytes);
        tl_hash_table_prefetch(&table->names, ret_hashes[i]);
    }
    for (size_t i = 0; i < count; i++) {
        ret_first[i] = tl_hash_table_chain(&table->names, ret_hashes[i]);
        prefetch_object(ret_first[i]);
    }
}

static void prefetch(const struct tl_rendezvous *table, const struct tl_key_text *keys, size_t count)
{
    uint32_t hashes[PREFETCHED_KEYS];
    struct tl_hash_link *names[PREFETCHED_KEYS];
    const struct tl_table_publication *publications[PREFETCHED_KEYS];
    prefetch_names(table, keys, count, hashes, names);
    for (size_t i = 0; i < count; i++) {
        const struct tl_hash_link *link = tl_hash_skip(names[i], hashes[i]);
        publications[i] = NULL;
        if (link == NULL) continue;
        const struct tl_table_name *name = TL_CONTAINER_OF(link, struct tl_table_name, hash);
        publications[i] = name->publication;
        prefetch_object(name->publication);
        prefetch_place(name);
    }
    for (size_t i = 0; i < count; i++)
        if (publications[i] != NULL) tl_tensor_prefetch(publications[i]->tensor);
    for (size_t i = 0; i < count; i++)
        if (publications[i] != NULL) tl_tensor_prefetch_data(publications[i]->tensor);
}

void tl_rendezvous_prefetch(struct tl_rendezvous *table, const struct tl_key_text *keys, size_t count)
{
    tl_table_lock(table);
    for (size_t done = 0; table->names.count > 0 && done < count; done += PREFETCHED_KEYS)
        prefetch(table, keys + done, tl_min_u64(count - done, PREFETCHED_KEYS));
    tl_table_unlock(table);
}
