// SPDX-License-Identifier: Apache-2.0
/* The maker of peers' memories: a thread that makes and destroys them, and the list of those that exist. */
#include "dataplane/memory/peer_memories.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/closure_thread.h"
#include "base/error.h"
#include "base/list.h"

struct member {
    struct tl_peer_memories *memories;
    struct tl_memory *memory;
    struct tl_list link;
    struct tl_closure destroy_job; /* no run: it was not given back yet */
};

struct tl_peer_memories {
    struct tl_provider *provider;
    struct tl_memory_options options;
    struct tl_closure_thread maker;
    pthread_mutex_t mutex;       /* guards what follows; never held while the provider works */
    struct tl_list members;      /* struct member */
    struct tl_memory_stats past; /* counters of those that are gone */
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

static void make(struct tl_closure *job)
{
    struct tl_memory_making *making = TL_CONTAINER_OF(job, struct tl_memory_making, job);
    struct tl_peer_memories *memories = making->memories;
    struct member *member = calloc(1, sizeof(*member));
    struct tl_memory *memory = NULL;
    if (member != NULL) {
        making->error.code = tl_memory_create(memories->provider, &memories->options, &memory, &making->error);
    } else {
        (void)tl_error_set(&making->error, TL_RESOURCE_EXHAUSTED, "no memory for the memory of a peer");
    }
    if (memory != NULL) {
        member->memories = memories;
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

static void destroy(struct tl_closure *job)
{
    struct member *member = TL_CONTAINER_OF(job, struct member, destroy_job);
    struct tl_peer_memories *memories = member->memories;
    struct tl_memory_stats stats;
    tl_memory_get_stats(member->memory, &stats);
    pthread_mutex_lock(&memories->mutex);
    add_since_create(&memories->past, &stats);
    tl_list_remove(&member->link);
    pthread_mutex_unlock(&memories->mutex);
    tl_memory_destroy(member->memory);
    free(member);
}

void tl_peer_memories_make(struct tl_peer_memories *memories, struct tl_memory_making *making)
{
    making->memory = NULL;
    making->error.code = TL_OK;
    making->error.message[0] = '\0';
    making->memories = memories;
    making->job.run = make;
    tl_closure_thread_post(&memories->maker, &making->job);
}

void tl_peer_memories_give(struct tl_peer_memories *memories, struct tl_memory *memory)
{
    struct member *given = NULL;
    pthread_mutex_lock(&memories->mutex);
    TL_LIST_FOREACH(&memories->members, place)
    {
        struct member *member = TL_CONTAINER_OF(place, struct member, link);
        if (member->memory == memory) given = member;
    }
    TL_CHECK(given != NULL && given->destroy_job.run == NULL);
    given->destroy_job.run = destroy;
    tl_list_init(&given->destroy_job.link);
    pthread_mutex_unlock(&memories->mutex);
    tl_closure_thread_post_urgent(&memories->maker, &given->destroy_job);
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
    tl_closure_thread_init(&memories->maker, "tl-peer-memory");
    tl_list_init(&memories->members);
    enum tl_status status = tl_closure_thread_start(&memories->maker, ret_error);
    if (status != TL_OK) {
        tl_peer_memories_destroy(memories);
        return status;
    }
    *ret_memories = memories;
    return TL_OK;
}

void tl_peer_memories_destroy(struct tl_peer_memories *memories)
{
    if (memories == NULL) return;
    struct tl_list left, *link;
    tl_closure_thread_stop(&memories->maker, &left);
    while ((link = tl_list_pop_front(&left)) != NULL) {
        struct tl_closure *job = TL_CONTAINER_OF(link, struct tl_closure, link);
        if (job->run == destroy) {
            destroy(job);
            continue;
        }
        struct tl_memory_making *making = TL_CONTAINER_OF(job, struct tl_memory_making, job);
        (void)tl_error_set(&making->error, TL_CANCELLED, "the data plane was stopped");
        making->post(making->context, &making->closure);
    }
    TL_CHECK(tl_list_is_empty(&memories->members));
    tl_closure_thread_fini(&memories->maker);
    pthread_mutex_destroy(&memories->mutex);
    free(memories);
}
