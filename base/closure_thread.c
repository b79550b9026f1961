// SPDX-License-Identifier: Apache-2.0
#include "base/closure_thread.h"

#include "base/check.h"
#include "base/thread.h"

void tl_closure_thread_init(struct tl_closure_thread *thread, const char *name)
{
    thread->name = name;
    TL_CHECK(pthread_mutex_init(&thread->mutex, NULL) == 0);
    TL_CHECK(pthread_cond_init(&thread->wake, NULL) == 0);
    tl_list_init(&thread->waiting);
    tl_list_init(&thread->urgent);
    thread->was_urgent = false;
    thread->is_started = false;
    thread->is_stopping = false;
}

void tl_closure_thread_fini(struct tl_closure_thread *thread)
{
    TL_CHECK(!thread->is_started);
    TL_CHECK(pthread_cond_destroy(&thread->wake) == 0);
    TL_CHECK(pthread_mutex_destroy(&thread->mutex) == 0);
}

static void lock(struct tl_closure_thread *thread)
{
    TL_CHECK(pthread_mutex_lock(&thread->mutex) == 0);
}

static void unlock(struct tl_closure_thread *thread)
{
    TL_CHECK(pthread_mutex_unlock(&thread->mutex) == 0);
}

/* Takes the closure that runs next; NULL: none waits. The two queues alternate, so that neither starves the other. */
static struct tl_closure *take_next(struct tl_closure_thread *thread)
{
    bool is_urgent = !tl_list_is_empty(&thread->urgent) && (!thread->was_urgent || tl_list_is_empty(&thread->waiting));
    struct tl_list *queue = is_urgent ? &thread->urgent : &thread->waiting;
    if (tl_list_is_empty(queue)) return NULL;
    thread->was_urgent = is_urgent;
    return TL_CONTAINER_OF(tl_list_pop_front(queue), struct tl_closure, link);
}

static void *run(void *argument)
{
    struct tl_closure_thread *thread = argument;
    lock(thread);
    while (!thread->is_stopping) {
        struct tl_closure *closure = take_next(thread);
        if (closure == NULL) {
            pthread_cond_wait(&thread->wake, &thread->mutex);
            continue;
        }
        unlock(thread);
        closure->run(closure);
        lock(thread);
    }
    unlock(thread);
    return NULL;
}

enum tl_status tl_closure_thread_start(struct tl_closure_thread *thread, struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    lock(thread);
    if (!thread->is_started) {
        status = tl_thread_start(thread->name, run, thread, &thread->thread, ret_error);
        thread->is_started = status == TL_OK;
    }
    unlock(thread);
    return status;
}

void tl_closure_thread_post(struct tl_closure_thread *thread, struct tl_closure *closure)
{
    lock(thread);
    TL_CHECK(!thread->is_stopping);
    tl_list_push_back(&thread->waiting, &closure->link);
    pthread_cond_signal(&thread->wake);
    unlock(thread);
}

void tl_closure_thread_post_urgent(struct tl_closure_thread *thread, struct tl_closure *closure)
{
    lock(thread);
    if (!tl_list_is_linked(&closure->link)) {
        tl_list_push_back(&thread->urgent, &closure->link);
        pthread_cond_signal(&thread->wake);
    }
    unlock(thread);
}

bool tl_closure_thread_is_stopping(struct tl_closure_thread *thread)
{
    lock(thread);
    bool is_stopping = thread->is_stopping;
    unlock(thread);
    return is_stopping;
}

void tl_closure_thread_stop(struct tl_closure_thread *thread, struct tl_list *ret_left)
{
    lock(thread);
    thread->is_stopping = true;
    pthread_cond_signal(&thread->wake);
    unlock(thread);
    if (thread->is_started) TL_CHECK(pthread_join(thread->thread, NULL) == 0);
    thread->is_started = false;
    tl_list_init(ret_left);
    tl_list_splice_back(ret_left, &thread->urgent);
    tl_list_splice_back(ret_left, &thread->waiting);
}
