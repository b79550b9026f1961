// SPDX-License-Identifier: Apache-2.0
#include "server/peers/added_peers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

#define FIRST_SLOTS 16
/* The configuration's peers have generation 1. */
#define FIRST_GENERATION 2

struct tl_added_slot {
    struct tl_added *peer; /* NULL: free */
    uint32_t generation;   /* that of the peer, or of the next one */
    uint32_t next_free;    /* index of the next free slot, plus 1; 0: none */
};

void tl_added_peers_init(struct tl_added_peers *added, size_t first_index)
{
    added->first_index = first_index;
    pthread_mutex_init(&added->mutex, NULL);
    added->has_mutex = true;
}

void tl_added_peers_fini(struct tl_added_peers *added)
{
    if (!added->has_mutex) return;
    TL_CHECK(added->count == 0 && added->by_name == NULL && added->hidden_count == 0);
    free(added->slots);
    pthread_mutex_destroy(&added->mutex);
    added->has_mutex = false;
}

static bool grow(struct tl_added_peers *added)
{
    size_t count = added->slot_count == 0 ? FIRST_SLOTS : 2 * added->slot_count;
    if (count > UINT32_MAX / 2) return false;
    struct tl_added_slot *slots = realloc(added->slots, count * sizeof(*slots));
    if (slots == NULL) return false;
    added->slots = slots;
    for (size_t i = count; i-- > added->slot_count;) {
        slots[i] = (struct tl_added_slot){.generation = FIRST_GENERATION, .next_free = added->free_slot};
        added->free_slot = (uint32_t)i + 1;
    }
    added->slot_count = count;
    return true;
}

/* Without memory it is found by its id only. */
static void add_name(struct tl_added_peers *added, struct tl_added *peer)
{
    bool is_free = tl_added_peers_by_name(added, peer->name) == NULL;
    peer->is_found_by_name = is_free;
#undef uthash_nonfatal_oom
#define uthash_nonfatal_oom(object) peer->is_found_by_name = false
    if (is_free) HASH_ADD_KEYPTR(hh, added->by_name, peer->name, strlen(peer->name), peer);
    if (!peer->is_found_by_name) added->hidden_count++;
}

/* Another peer with this name is found by it from now on. */
static void remove_name(struct tl_added_peers *added, struct tl_added *peer)
{
    if (!peer->is_found_by_name) {
        added->hidden_count--;
        return;
    }
    HASH_DEL(added->by_name, peer);
    peer->is_found_by_name = false;
    for (size_t i = 0; added->hidden_count > 0 && i < added->slot_count; i++) {
        struct tl_added *other = added->slots[i].peer;
        if (other == NULL || other == peer || other->is_found_by_name || strcmp(other->name, peer->name) != 0) continue;
        added->hidden_count--;
        add_name(added, other);
        return;
    }
}

bool tl_added_peers_insert(struct tl_added_peers *added, struct tl_added *peer)
{
    pthread_mutex_lock(&added->mutex);
    bool has_slot = added->free_slot != 0 || grow(added);
    if (has_slot) {
        size_t index = added->free_slot - 1;
        struct tl_added_slot *slot = &added->slots[index];
        added->free_slot = slot->next_free;
        added->count++;
        slot->peer = peer;
        peer->id = (uint64_t)slot->generation << 32 | (added->first_index + index + 1);
        add_name(added, peer);
    }
    pthread_mutex_unlock(&added->mutex);
    return has_slot;
}

void tl_added_peers_rename(struct tl_added_peers *added, struct tl_added *peer, const char *name, char *memory,
                           size_t name_bytes)
{
    pthread_mutex_lock(&added->mutex);
    remove_name(added, peer);
    snprintf(memory, name_bytes, "%s", name);
    add_name(added, peer);
    pthread_mutex_unlock(&added->mutex);
}

void tl_added_peers_remove(struct tl_added_peers *added, struct tl_added *peer)
{
    pthread_mutex_lock(&added->mutex);
    size_t index = (uint32_t)peer->id - 1 - added->first_index;
    struct tl_added_slot *slot = &added->slots[index];
    TL_CHECK(slot->peer == peer);
    remove_name(added, peer);
    slot->peer = NULL;
    slot->generation = slot->generation == UINT32_MAX ? FIRST_GENERATION : slot->generation + 1;
    slot->next_free = added->free_slot;
    added->free_slot = (uint32_t)index + 1;
    added->count--;
    pthread_mutex_unlock(&added->mutex);
}

struct tl_added *tl_added_peers_by_id(const struct tl_added_peers *added, uint64_t id)
{
    uint64_t index = (id & UINT32_MAX) - 1 - added->first_index;
    if (index >= added->slot_count) return NULL;
    struct tl_added *peer = added->slots[index].peer;
    return peer != NULL && peer->id == id ? peer : NULL;
}

struct tl_added *tl_added_peers_by_name(const struct tl_added_peers *added, const char *name)
{
    struct tl_added *peer;
    HASH_FIND_STR(added->by_name, name, peer);
    return peer;
}

struct tl_added *tl_added_peers_next(const struct tl_added_peers *added, size_t *place)
{
    while (*place < added->slot_count) {
        struct tl_added *peer = added->slots[(*place)++].peer;
        if (peer != NULL) return peer;
    }
    return NULL;
}

void tl_added_peers_lock(struct tl_added_peers *added)
{
    pthread_mutex_lock(&added->mutex);
}

void tl_added_peers_unlock(struct tl_added_peers *added)
{
    pthread_mutex_unlock(&added->mutex);
}
