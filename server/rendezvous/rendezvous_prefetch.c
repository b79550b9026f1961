// SPDX-License-Identifier: Apache-2.0
/*
 * Rendezvous table: what is known of many keys is brought into the processor's caches at once.
 *
 * From a key to the bytes of its value there are five places in memory, or six for a sent one, each of which is known
 * from the one before. With many keys hardly one of them is in a cache, so that a look-up waits five times. Here all
 * keys go from one place to the next together, and wait for each other's memory at the same time. Nothing is changed,
 * and nothing is promised: another thread may publish or withdraw meanwhile.
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

/* What a look-up comes to: a published value, and that of the oldest step that was sent. */
struct found {
    const struct tl_table_publication *publication; /* NULL: none */
    const struct tl_table_place *place;             /* NULL: none, or a look-up finds its place in an index */
};

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

static struct found find(const struct tl_table_name *name)
{
    const struct tl_list *first = name->places.next;
    bool has_place = first != &name->places && !name->has_index;
    return (struct found){.publication = name->publication,
                          .place = has_place ? TL_CONTAINER_OF(first, struct tl_table_place, name_link) : NULL};
}

/* Of a sent value, and the place of the step after it, at which a look-up for another step arrives. */
static void prefetch_value(const struct tl_table_place *place)
{
    const struct tl_list *next = place->name_link.next;
    prefetch_object(place->value);
    if (next != &place->name->places) prefetch_object(TL_CONTAINER_OF(next, struct tl_table_place, name_link));
}

static const struct tl_tensor *sent_tensor(const struct found *found)
{
    return found->place != NULL && found->place->value != NULL ? found->place->value->tensor : NULL;
}

static void prefetch(const struct tl_rendezvous *table, const struct tl_key_text *keys, size_t count)
{
    uint32_t hashes[PREFETCHED_KEYS];
    struct tl_hash_link *names[PREFETCHED_KEYS];
    struct found found[PREFETCHED_KEYS];
    size_t found_count = 0;
    prefetch_names(table, keys, count, hashes, names);
    for (size_t i = 0; i < count; i++) {
        const struct tl_hash_link *link = tl_hash_skip(names[i], hashes[i]);
        if (link == NULL) continue;
        found[found_count] = find(TL_CONTAINER_OF(link, struct tl_table_name, hash));
        prefetch_object(found[found_count].publication);
        prefetch_object(found[found_count].place);
        found_count++;
    }
    for (size_t i = 0; i < found_count; i++) {
        if (found[i].publication != NULL) tl_tensor_prefetch(found[i].publication->tensor);
        if (found[i].place != NULL) prefetch_value(found[i].place);
    }
    for (size_t i = 0; i < found_count; i++) {
        if (found[i].publication != NULL) tl_tensor_prefetch_data(found[i].publication->tensor);
        if (sent_tensor(&found[i]) != NULL) tl_tensor_prefetch(sent_tensor(&found[i]));
    }
    for (size_t i = 0; i < found_count; i++)
        if (sent_tensor(&found[i]) != NULL) tl_tensor_prefetch_data(sent_tensor(&found[i]));
}

void tl_rendezvous_prefetch(struct tl_rendezvous *table, const struct tl_key_text *keys, size_t count)
{
    tl_table_lock(table);
    for (size_t done = 0; table->names.count > 0 && done < count; done += PREFETCHED_KEYS)
        prefetch(table, keys + done, tl_min_u64(count - done, PREFETCHED_KEYS));
    tl_table_unlock(table);
}
