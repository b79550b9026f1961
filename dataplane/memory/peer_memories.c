// SPDX-License-Identifier: Apache-2.0
/* The maker of peers' memories: two lists under one mutex, which is never held while the provider works. */
#include "dataplane/memory/peer_memories.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/error.h"
#include "base/list.h"
#include "base/thread.h"

struct member {
    struct tl_memory *memory;
    bool is_given;
    struct tl_list link;
};

struct tl_peer_memories {
    struct tl_provider *provider;
    struct tl_memory_options options;
    pthread_t maker;
    bool has_maker;
    pthread_mutex_t mutex; /* of what follows */
    pthread_cond_t wake;   /* something is to be made or destroyed, or the maker is to stop */
    struct tl_list wanted; /* of struct tl_memory_making */
    struct tl_list members;
    size_t given_count;          /* of the members */
    struct tl_memory_stats past; /* counters of those that are gone */
    bool is_stopping;
};

/* ---------------------------------------------------------------------------------------------------- counters -- */

static void add_since_create(struct tl_memory_stats *sum, const struct tl_memory_stats *stats)
{
    sum->pool_waits += stats->pool_waits;
    sum->registrations += stats->registrations;
    sum->evictions += stats->evictions;
    sum->bounced_bytes += stats->bounced_bytes;
}

static void add_now(struct tl_memory_stats *sum, const struct tl_memory_stats *stats)
{
    sum->pool_regions += stats->pool_regions;
    sum->pool_bytes += stats->pool_bytes;
    sum->pool_used_bytes += stats->pool_used_bytes;
    sum->pool_waiting += stats->pool_waiting;
    sum->cached_count += stats->cached_count;
    sum->cached_bytes += stats->cached_bytes;
}

void tl_peer_memories_add_stats(struct tl_peer_memories *memories, struct tl_memory_stats *stats)
{
    pthread_mutex_lock(&memories->mutex);
    add_since_create(stats, &memories->past);
    TL_LIST_FOREACH(&memories->members, place)
    {
        struct tl_memory_stats own;
        tl_memory_get_stats(TL_CONTAINER_OF(place, struct member, link)->memory, &own);
        add_since_create(stats, &own);
        add_now(stats, &own);
    }
    pthread_mutex_unlock(&memories->mutex);
}

/* ------------------------------------------------------------------------------------------------------- maker -- */

static struct member *take_given(struct tl_peer_memories *memories)
{
    if (memories->given_count == 0) return NULL;
    TL_LIST_FOREACH(&memories->members, place)
    {
        struct member *member = TL_CONTAINER_OF(place, struct member, link);
        if (!member->is_given) continue;
        struct tl_memory_stats stats;
        tl_memory_get_stats(member->memory, &stats);
        add_since_create(&memories->past, &stats);
        tl_list_remove(&member->link);
        memories->given_count--;
        return member;
    }
    return NULL;
}

static void carry_out(struct tl_peer_memories *memories, struct tl_memory_making *making)
{
    struct member *member = calloc(1, sizeof(*member));
    struct tl_memory *memory = NULL;
    if (member != NULL) {
        making->error.code = tl_memory_create(memories->provider, &memories->options, &memory, &making->error);
    } else {
        (void)tl_error_set(&making->error, TL_RESOURCE_EXHAUSTED, "no memory for the memory of a peer");
    }
    if (memory != NULL) {
        member->memory = memory;
        pthread_mutex_lock(&memories->mutex);
        tl_list_push_back(&memories->members, &member->link);
        pthread_mutex_unlock(&memories->mutex);
    } else {
        free(member);
    }
    making->memory = memory;
    making->post(making->context, &making->closure);
}

static void *run_maker(void *argument)
{
    struct tl_peer_memories *memories = argument;
    pthread_mutex_lock(&memories->mutex);
    for (;;) {
        struct member *given = take_given(memories);
        struct tl_list *node = given == NULL && !memories->is_stopping ? tl_list_pop_front(&memories->wanted) : NULL;
        if (given == NULL && node == NULL) {
            if (memories->is_stopping) break;
            pthread_cond_wait(&memories->wake, &memories->mutex);
            continue;
        }
        pthread_mutex_unlock(&memories->mutex);
        if (given != NULL) {
            tl_memory_destroy(given->memory);
            free(given);
        } else {
            carry_out(memories, TL_CONTAINER_OF(node, struct tl_memory_making, link));
        }
        pthread_mutex_lock(&memories->mutex);
    }
    pthread_mutex_unlock(&memories->mutex);
    return NULL;
}

void tl_peer_memories_make(struct tl_peer_memories *memories, struct tl_memory_making *making)
{
    tl_list_init(&making->link);
    making->memory = NULL;
    making->error.code = TL_OK;
    making->error.message[0] = '\0';
    pthread_mutex_lock(&memories->mutex);
    TL_CHECK(!memories->is_stopping);
    tl_list_push_back(&memories->wanted, &making->link);
    pthread_cond_signal(&memories->wake);
    pthread_mutex_unlock(&memories->mutex);
}

void tl_peer_memories_give(struct tl_peer_memories *memories, struct tl_memory *memory)
{
    bool is_found = false;
    pthread_mutex_lock(&memories->mutex);
    TL_LIST_FOREACH(&memories->members, place)
    {
        struct member *member = TL_CONTAINER_OF(place, struct member, link);
        if (member->memory != memory) continue;
        TL_CHECK(!member->is_given);
        member->is_given = is_found = true;
    }
    TL_CHECK(is_found);
    memories->given_count++;
    pthread_cond_signal(&memories->wake);
    pthread_mutex_unlock(&memories->mutex);
}

/* -------------------------------------------------------------------------------------------------- life cycle -- */

enum tl_status tl_peer_memories_create(struct tl_provider *provider, const struct tl_memory_options *options,
                                       struct tl_peer_memories **ret_memories, struct tl_error *ret_error)
{
    struct tl_peer_memories *memories = calloc(1, sizeof(*memories));
    if (memories == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the memory of peers");
    memories->provider = provider;
    memories->options = *options;
    pthread_mutex_init(&memories->mutex, NULL);
    pthread_cond_init(&memories->wake, NULL);
    tl_list_init(&memories->wanted);
    tl_list_init(&memories->members);
    enum tl_status status = tl_thread_start("tl-peer-memory", run_maker, memories, &memories->maker, ret_error);
    if (status != TL_OK) {
        tl_peer_memories_destroy(memories);
        return status;
    }
    memories->has_maker = true;
    *ret_memories = memories;
    return TL_OK;
}

void tl_peer_memories_destroy(struct tl_peer_memories *memories)
{
    if (memories == NULL) return;
    struct tl_list *node;
    pthread_mutex_lock(&memories->mutex);
    memories->is_stopping = true;
    pthread_cond_signal(&memories->wake);
    pthread_mutex_unlock(&memories->mutex);
    if (memories->has_maker) TL_CHECK(pthread_join(memories->maker, NULL) == 0);
    while ((node = tl_list_pop_front(&memories->wanted)) != NULL) {
        struct tl_memory_making *making = TL_CONTAINER_OF(node, struct tl_memory_making, link);
        (void)tl_error_set(&making->error, TL_CANCELLED, "the data plane was stopped");
        making->post(making->context, &making->closure);
    }
    TL_CHECK(tl_list_is_empty(&memories->members));
    pthread_cond_destroy(&memories->wake);
    pthread_mutex_destroy(&memories->mutex);
    free(memories);
}
