// SPDX-License-Identifier: Apache-2.0
/*
 * Threads that are used again. To start one under AddressSanitizer takes longer than what most inputs do, so that the
 * threads of a fuzz target's product run in those that have ended before. The linker passes the calls here
 * (--wrap=tl_thread_start,--wrap=pthread_join).
 */
#include "fuzz/kept_threads.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/list.h"
#include "base/thread.h"

/* A thread, which waits for something to run or runs it. */
struct kept {
    struct kept *next; /* among all */
    pthread_t thread;
    pthread_cond_t has_changed;
    void *(*run)(void *argument); /* NULL: it has nothing to run */
    void *argument;
    void *result;
    bool is_joinable; /* what it runs, or has run, was not waited for yet */
};

/* What a thread would run. */
struct held {
    struct tl_list place;
    void *(*run)(void *argument);
    void *argument;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the next two */
static struct kept *all;
static struct tl_list all_held = {&all_held, &all_held};
static const char *held_name = "";

/* The linker's names. */
enum tl_status __real_tl_thread_start(const char *name, void *(*run)(void *argument), void *argument,
                                      pthread_t *ret_thread, struct tl_error *ret_error);
enum tl_status __wrap_tl_thread_start(const char *name, void *(*run)(void *argument), void *argument,
                                      pthread_t *ret_thread, struct tl_error *ret_error);
int __real_pthread_join(pthread_t thread, void **ret_result);
int __wrap_pthread_join(pthread_t thread, void **ret_result);

static void *run_kept(void *argument)
{
    struct kept *kept = argument;
    TL_CHECK(pthread_mutex_lock(&mutex) == 0);
    for (;;) {
        while (kept->run == NULL)
            TL_CHECK(pthread_cond_wait(&kept->has_changed, &mutex) == 0);
        TL_CHECK(pthread_mutex_unlock(&mutex) == 0);
        void *result = kept->run(kept->argument);
        TL_CHECK(pthread_mutex_lock(&mutex) == 0);
        kept->result = result;
        kept->run = NULL;
        TL_CHECK(pthread_cond_broadcast(&kept->has_changed) == 0);
    }
    return NULL;
}

/* Returns one that has nothing to run. */
static struct kept *find_free(struct tl_error *ret_error)
{
    struct kept *kept = all;
    while (kept != NULL && (kept->run != NULL || kept->is_joinable))
        kept = kept->next;
    if (kept != NULL) return kept;
    kept = calloc(1, sizeof(*kept));
    TL_CHECK(kept != NULL && pthread_cond_init(&kept->has_changed, NULL) == 0);
    if (__real_tl_thread_start("tl-kept", run_kept, kept, &kept->thread, ret_error) != TL_OK) abort();
    kept->next = all;
    all = kept;
    return kept;
}

enum tl_status __wrap_tl_thread_start(const char *name, void *(*run)(void *argument), void *argument,
                                      pthread_t *ret_thread, struct tl_error *ret_error)
{
    TL_CHECK(pthread_mutex_lock(&mutex) == 0);
    if (ret_thread == NULL && strcmp(name, held_name) == 0) {
        struct held *held = calloc(1, sizeof(*held));
        TL_CHECK(held != NULL);
        held->run = run;
        held->argument = argument;
        tl_list_push_back(&all_held, &held->place);
        TL_CHECK(pthread_mutex_unlock(&mutex) == 0);
        return TL_OK;
    }
    struct kept *kept = find_free(ret_error);
    kept->run = run;
    kept->argument = argument;
    kept->is_joinable = ret_thread != NULL;
    if (ret_thread != NULL) *ret_thread = kept->thread;
    TL_CHECK(pthread_cond_broadcast(&kept->has_changed) == 0);
    TL_CHECK(pthread_mutex_unlock(&mutex) == 0);
    return TL_OK;
}

int __wrap_pthread_join(pthread_t thread, void **ret_result)
{
    TL_CHECK(pthread_mutex_lock(&mutex) == 0);
    struct kept *kept = all;
    while (kept != NULL && pthread_equal(kept->thread, thread) == 0)
        kept = kept->next;
    if (kept != NULL) {
        TL_CHECK(kept->is_joinable);
        while (kept->run != NULL)
            TL_CHECK(pthread_cond_wait(&kept->has_changed, &mutex) == 0);
        kept->is_joinable = false;
        if (ret_result != NULL) *ret_result = kept->result;
    }
    TL_CHECK(pthread_mutex_unlock(&mutex) == 0);
    return kept != NULL ? 0 : __real_pthread_join(thread, ret_result);
}

void kept_threads_hold(const char *name)
{
    held_name = name;
}

void kept_threads_run_held(void)
{
    TL_CHECK(pthread_mutex_lock(&mutex) == 0);
    struct tl_list *place;
    while ((place = tl_list_pop_front(&all_held)) != NULL) {
        struct held held = *TL_CONTAINER_OF(place, struct held, place);
        free(TL_CONTAINER_OF(place, struct held, place));
        TL_CHECK(pthread_mutex_unlock(&mutex) == 0);
        (void)held.run(held.argument);
        TL_CHECK(pthread_mutex_lock(&mutex) == 0);
    }
    TL_CHECK(pthread_mutex_unlock(&mutex) == 0);
}
