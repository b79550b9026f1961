// SPDX-License-Identifier: Apache-2.0
/*
 * The completion queue: a list under a mutex, a condition for the threads that wait, and, once the program has asked
 * for it, a descriptor that is readable while the list is not empty.
 *
 * The readers of a queue that a worker without a thread has attached make that worker's progress. Attaching and
 * detaching are rare and happen under one lock for all queues, so that a worker that closes and a queue that is
 * destroyed at the same time do not miss each other.
 */
#include "server/progress/completion_queue.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"

/* Pause between two checks whether the readers have left the loop of a worker that closes. */
#define DETACH_PAUSE_US 100

struct tl_cq {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    struct tl_list items;
    int fd;
    bool is_fd_used;
    /* Written under attach_mutex and mutex, read under either. */
    struct tl_progress_engine *progress; /* the worker's whose progress the readers make; NULL: none */
    /* Under attach_mutex. */
    struct tl_list progress_link; /* in progress->queues */
    unsigned running_count;       /* readers in tl_progress_step */
};

static pthread_mutex_t attach_mutex = PTHREAD_MUTEX_INITIALIZER;

enum tl_status tl_cq_create(struct tl_cq **ret_cq, struct tl_error *ret_error)
{
    struct tl_cq *cq = calloc(1, sizeof(*cq));
    if (cq == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a completion queue");
    cq->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (cq->fd < 0) {
        free(cq);
        return tl_error_set_errno(ret_error, errno, "cannot make the descriptor of a completion queue");
    }
    pthread_mutex_init(&cq->mutex, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&cq->cond, &attributes);
    pthread_condattr_destroy(&attributes);
    tl_list_init(&cq->items);
    tl_list_init(&cq->progress_link);
    *ret_cq = cq;
    return TL_OK;
}

static void set_progress(struct tl_cq *cq, struct tl_progress_engine *progress)
{
    pthread_mutex_lock(&cq->mutex);
    cq->progress = progress;
    pthread_cond_broadcast(&cq->cond);
    pthread_mutex_unlock(&cq->mutex);
    tl_list_remove(&cq->progress_link);
    if (progress != NULL) tl_list_push_back(&progress->queues, &cq->progress_link);
}

void tl_cq_destroy(struct tl_cq *cq)
{
    if (cq == NULL) return;
    struct tl_completion completion;
    while (tl_cq_poll(cq, &completion, 1) == 1) {
        tl_tensor_put(completion.tensor);
        tl_listing_destroy(completion.listing);
    }
    pthread_mutex_lock(&attach_mutex);
    set_progress(cq, NULL);
    pthread_mutex_unlock(&attach_mutex);
    close(cq->fd);
    pthread_cond_destroy(&cq->cond);
    pthread_mutex_destroy(&cq->mutex);
    free(cq);
}

enum tl_status tl_cq_attach(struct tl_cq *cq, struct tl_progress_engine *progress, struct tl_error *ret_error)
{
    if (progress->mode == TL_PROGRESS_THREAD) return TL_OK;
    pthread_mutex_lock(&attach_mutex);
    bool is_free = cq->progress == NULL || cq->progress == progress;
    if (cq->progress == NULL) set_progress(cq, progress);
    pthread_mutex_unlock(&attach_mutex);
    if (is_free) return TL_OK;
    return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                        "the completion queue already drives another worker; use one queue for each");
}

void tl_cq_detach_all(struct tl_progress_engine *progress)
{
    pthread_mutex_lock(&attach_mutex);
    while (!tl_list_is_empty(&progress->queues)) {
        struct tl_cq *cq = TL_CONTAINER_OF(progress->queues.next, struct tl_cq, progress_link);
        if (cq->running_count == 0) {
            set_progress(cq, NULL);
            continue;
        }
        /* Its readers look again after each round. One may be on its way into a round still: so again and again. */
        pthread_mutex_unlock(&attach_mutex);
        tl_loop_wake(progress->loop);
        usleep(DETACH_PAUSE_US);
        pthread_mutex_lock(&attach_mutex);
    }
    pthread_mutex_unlock(&attach_mutex);
}

static void fd_signal(int fd)
{
    uint64_t one = 1;
    ssize_t written = write(fd, &one, sizeof(one));
    TL_CHECK(written == sizeof(one) || errno == EAGAIN);
}

int tl_cq_fd(const struct tl_cq *const_cq)
{
    struct tl_cq *cq = (struct tl_cq *)const_cq;
    pthread_mutex_lock(&cq->mutex);
    if (!cq->is_fd_used) {
        cq->is_fd_used = true;
        if (!tl_list_is_empty(&cq->items)) fd_signal(cq->fd);
    }
    pthread_mutex_unlock(&cq->mutex);
    return cq->fd;
}

void tl_cq_push_all(struct tl_cq *cq, struct tl_list *items, const struct tl_progress_engine *progress)
{
    if (tl_list_is_empty(items)) return;
    bool is_one = items->next == items->prev;
    pthread_mutex_lock(&cq->mutex);
    bool was_empty = tl_list_is_empty(&cq->items);
    tl_list_splice_back(&cq->items, items);
    if (was_empty && cq->is_fd_used) fd_signal(cq->fd);
    if (is_one) {
        pthread_cond_signal(&cq->cond);
    } else {
        pthread_cond_broadcast(&cq->cond);
    }
    /* A reader may sleep in the loop of another worker. */
    if (cq->progress != NULL && cq->progress != progress) tl_loop_wake(cq->progress->loop);
    pthread_mutex_unlock(&cq->mutex);
}

void tl_cq_push(struct tl_cq *cq, struct tl_cq_item *item, const struct tl_progress_engine *progress)
{
    struct tl_list items;
    tl_list_init(&items);
    tl_list_push_back(&items, &item->link);
    tl_cq_push_all(cq, &items, progress);
}

/* Takes items off the queue; the descriptor stops being readable with the last one. Under the mutex. */
static void take_items(struct tl_cq *cq, struct tl_list *ret_items, size_t capacity)
{
    for (size_t i = 0; i < capacity && !tl_list_is_empty(&cq->items); i++) {
        tl_list_push_back(ret_items, tl_list_pop_front(&cq->items));
    }
    if (cq->is_fd_used && tl_list_is_empty(&cq->items)) {
        uint64_t count;
        ssize_t got = read(cq->fd, &count, sizeof(count));
        TL_CHECK(got == sizeof(count) || errno == EAGAIN);
    }
}

static size_t fill(struct tl_list *items, struct tl_completion *ret_completions)
{
    size_t count = 0;
    struct tl_list *link;
    while ((link = tl_list_pop_front(items)) != NULL) {
        struct tl_cq_item *item = TL_CONTAINER_OF(link, struct tl_cq_item, link);
        item->take(item, &ret_completions[count++]);
    }
    return count;
}

size_t tl_cq_poll(struct tl_cq *cq, struct tl_completion *ret_completions, size_t capacity)
{
    struct tl_list items;
    tl_list_init(&items);
    pthread_mutex_lock(&cq->mutex);
    take_items(cq, &items, capacity);
    pthread_mutex_unlock(&cq->mutex);
    return fill(&items, ret_completions);
}

/* Returns the engine that the reader runs; NULL: none. Until run_end the worker stays. */
static struct tl_progress_engine *run_begin(struct tl_cq *cq)
{
    pthread_mutex_lock(&cq->mutex);
    struct tl_progress_engine *progress = cq->progress;
    pthread_mutex_unlock(&cq->mutex);
    if (progress == NULL) return NULL;
    pthread_mutex_lock(&attach_mutex);
    progress = cq->progress;
    if (progress != NULL) cq->running_count++;
    pthread_mutex_unlock(&attach_mutex);
    return progress;
}

static void run_end(struct tl_cq *cq)
{
    pthread_mutex_lock(&attach_mutex);
    cq->running_count--;
    pthread_mutex_unlock(&attach_mutex);
}

/* Sleeps until there is an item, or an engine to run. Returns false when the deadline came first. */
static bool sleep_until(struct tl_cq *cq, int64_t deadline_ns)
{
    int failure = 0;
    struct timespec until = {.tv_sec = deadline_ns / TL_NS_PER_SEC, .tv_nsec = deadline_ns % TL_NS_PER_SEC};
    pthread_mutex_lock(&cq->mutex);
    while (tl_list_is_empty(&cq->items) && cq->progress == NULL && failure == 0) {
        failure = deadline_ns == TL_TIME_NEVER ? pthread_cond_wait(&cq->cond, &cq->mutex)
                                               : pthread_cond_timedwait(&cq->cond, &cq->mutex, &until);
    }
    pthread_mutex_unlock(&cq->mutex);
    return failure == 0;
}

size_t tl_cq_wait(struct tl_cq *cq, struct tl_completion *ret_completions, size_t capacity, int64_t timeout_ns)
{
    int64_t deadline_ns = tl_clock_deadline_ns(timeout_ns);
    bool is_in_time = capacity > 0;
    for (;;) {
        struct tl_progress_engine *progress = run_begin(cq);
        uint64_t rounds = progress != NULL ? tl_progress_rounds(progress) : 0;
        size_t count = tl_cq_poll(cq, ret_completions, capacity);
        bool is_over = count > 0 || !is_in_time;
        if (progress != NULL) {
            if (!is_over) is_in_time = tl_progress_step(progress, rounds, deadline_ns);
            run_end(cq);
        } else if (!is_over) {
            is_in_time = sleep_until(cq, deadline_ns);
        }
        if (is_over) return count;
    }
}
