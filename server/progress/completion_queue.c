// SPDX-License-Identifier: Apache-2.0
/*
 * The completion queue: a list under a mutex, a condition for the threads that wait, and, once the program has asked
 * for it, a descriptor that is readable while the list is not empty.
 *
 * A worker attaches the queues that its operations name. A reader of an attached queue waits as the blocking calls do
 * (tl_wait): it runs the worker's rounds where callers run them, and a push ends its wait. Attaching and detaching are
 * rare and happen under one lock for all queues, so that a worker that closes and a queue that is destroyed at the same
 * time do not miss each other.
 *
 * A queue of several workers with threads is attached to none of them: its readers sleep, and each worker's thread
 * wakes them. A worker without a thread keeps the queue whatever others push to it, because only the readers can make
 * its progress.
 */
#include "server/progress/completion_queue.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"

/* Pause between two checks whether the readers have left the loop of a worker that closes. */
#define DETACH_PAUSE_US 100
/* A wait for many completions, such as those of a large group, counts as several waits in close succession: one for so
 * many, up to so many waits. The worker's thread does not work beside one that waits for long. */
#define COMPLETIONS_OF_WAIT 64
#define LONGEST_WAIT 16

/* A thread that waits at the queue: it makes a worker's progress, or it sleeps. */
struct reader {
    struct tl_list link;  /* in cq->readers, until it was woken */
    size_t min_count;     /* it is woken when the queue has so many items */
    struct tl_wait *wait; /* ends its progress; NULL: it sleeps */
    pthread_cond_t cond;  /* on which it sleeps; without it while it makes progress */
};

struct tl_cq {
    pthread_mutex_t mutex;
    struct tl_list items;
    size_t item_count;
    struct tl_list readers; /* struct reader, in the order in which they came */
    int fd;
    bool is_fd_used;
    bool is_waited;   /* the program's latest look at the queue waited, */
    pthread_t waiter; /* in this thread */
    /* Written under attach_mutex and mutex, read under either. */
    bool is_shared;                      /* by workers with threads: the queue is attached to none of them */
    struct tl_progress_engine *progress; /* the worker's whose progress the readers make; NULL: none */
    struct tl_list progress_link;        /* in progress->queues; under attach_mutex */
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
    tl_list_init(&cq->items);
    tl_list_init(&cq->readers);
    tl_list_init(&cq->progress_link);
    *ret_cq = cq;
    return TL_OK;
}

/* Under the mutex. */
static void wake(struct reader *reader)
{
    tl_list_remove(&reader->link);
    if (reader->wait != NULL)
        tl_wait_done(reader->wait);
    else
        pthread_cond_signal(&reader->cond);
}

/* Wakes one of the readers for which there are enough items now, or all of them. Under the mutex. */
static void wake_for_items(struct tl_cq *cq, bool is_one)
{
    TL_LIST_FOREACH_SAFE(&cq->readers, link)
    {
        struct reader *reader = TL_CONTAINER_OF(link, struct reader, link);
        if (reader->min_count > cq->item_count) continue;
        wake(reader);
        if (is_one) return;
    }
}

/* Under attach_mutex. */
static void set_progress(struct tl_cq *cq, struct tl_progress_engine *progress)
{
    pthread_mutex_lock(&cq->mutex);
    struct tl_progress_engine *former = cq->progress;
    bool is_awaited = !tl_list_is_empty(&cq->readers);
    cq->progress = progress;
    while (!tl_list_is_empty(&cq->readers))
        wake(TL_CONTAINER_OF(cq->readers.next, struct reader, link));
    /* A reader may sleep in the loop. */
    if (is_awaited && former != NULL) tl_loop_wake(former->loop);
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
    pthread_mutex_destroy(&cq->mutex);
    free(cq);
}

/* Returns whether nothing has to change for the worker to push to the queue. */
static bool is_attached(struct tl_cq *cq, const struct tl_progress_engine *progress)
{
    pthread_mutex_lock(&cq->mutex);
    bool is_known = cq->progress == progress || (cq->is_shared && progress->mode == TL_PROGRESS_THREAD);
    pthread_mutex_unlock(&cq->mutex);
    return is_known;
}

/* Returns whether the queue's present worker cannot do without its readers. */
static bool is_needed(const struct tl_cq *cq)
{
    return cq->progress != NULL && cq->progress->mode == TL_PROGRESS_CALLER;
}

enum tl_status tl_cq_attach(struct tl_cq *cq, struct tl_progress_engine *progress, struct tl_error *ret_error)
{
    if (is_attached(cq, progress)) return TL_OK;
    pthread_mutex_lock(&attach_mutex);
    bool has_thread = progress->mode == TL_PROGRESS_THREAD;
    bool is_other = cq->progress != NULL && cq->progress != progress;
    bool is_refused = is_other && is_needed(cq) && !has_thread;
    if (!is_refused && has_thread && (is_other || cq->is_shared)) {
        pthread_mutex_lock(&cq->mutex);
        cq->is_shared = true;
        pthread_mutex_unlock(&cq->mutex);
        if (!is_needed(cq)) set_progress(cq, NULL);
    } else if (!is_refused) {
        set_progress(cq, progress);
    }
    pthread_mutex_unlock(&attach_mutex);
    if (!is_refused) return TL_OK;
    return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                        "the completion queue already drives another worker; use one queue for each");
}

void tl_cq_detach_all(struct tl_progress_engine *progress)
{
    pthread_mutex_lock(&attach_mutex);
    while (!tl_list_is_empty(&progress->queues))
        set_progress(TL_CONTAINER_OF(progress->queues.next, struct tl_cq, progress_link), NULL);
    pthread_mutex_unlock(&attach_mutex);
    while (__atomic_load_n(&progress->reader_count, __ATOMIC_ACQUIRE) > 0)
        usleep(DETACH_PAUSE_US);
}

/* Returns whether this thread waits at the queue again and again, and makes the worker's progress meanwhile. */
static bool is_waiter(struct tl_cq *cq, const struct tl_progress_engine *progress)
{
    pthread_mutex_lock(&cq->mutex);
    bool is_waiter = cq->is_waited && pthread_equal(cq->waiter, pthread_self()) && cq->progress == progress;
    pthread_mutex_unlock(&cq->mutex);
    return is_waiter;
}

void tl_cq_post(struct tl_cq *cq, struct tl_progress_engine *progress, struct tl_closure *closure)
{
    if (cq == NULL || is_waiter(cq, progress)) {
        tl_loop_post(progress->loop, closure);
    } else {
        tl_progress_post(progress, closure);
    }
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
    cq->is_waited = false;
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
    size_t count = 0;
    TL_LIST_FOREACH(items, link)
    count++;
    pthread_mutex_lock(&cq->mutex);
    bool was_empty = tl_list_is_empty(&cq->items);
    tl_list_splice_back(&cq->items, items);
    cq->item_count += count;
    if (was_empty && cq->is_fd_used) fd_signal(cq->fd);
    wake_for_items(cq, count == 1);
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
        cq->item_count--;
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
    cq->is_waited = false;
    take_items(cq, &items, capacity);
    pthread_mutex_unlock(&cq->mutex);
    return fill(&items, ret_completions);
}

/* Sleeps until it is woken. Returns false when the deadline came first. Under the mutex, which is free meanwhile. */
static bool sleep_until(struct tl_cq *cq, struct reader *reader, int64_t deadline_ns)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&reader->cond, &attributes);
    pthread_condattr_destroy(&attributes);
    int result;
    if (deadline_ns == TL_TIME_NEVER) {
        result = pthread_cond_wait(&reader->cond, &cq->mutex);
    } else {
        struct timespec until = {.tv_sec = deadline_ns / TL_NS_PER_SEC, .tv_nsec = deadline_ns % TL_NS_PER_SEC};
        result = pthread_cond_timedwait(&reader->cond, &cq->mutex, &until);
    }
    pthread_cond_destroy(&reader->cond);
    return result == 0;
}

/* The same while the worker's progress is made, by this thread or by another one. */
static bool progress_until(struct tl_cq *cq, struct reader *reader, int64_t deadline_ns)
{
    struct tl_progress_engine *progress = cq->progress;
    struct tl_wait wait;
    tl_wait_init(&wait, progress);
    wait.weight += (unsigned)tl_min_u64((reader->min_count - cq->item_count) / COMPLETIONS_OF_WAIT, LONGEST_WAIT);
    reader->wait = &wait;
    __atomic_fetch_add(&progress->reader_count, 1, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&cq->mutex);
    bool is_in_time = tl_wait_for(&wait, deadline_ns);
    pthread_mutex_lock(&cq->mutex);
    tl_list_remove(&reader->link);
    tl_wait_fini(&wait);
    __atomic_fetch_sub(&progress->reader_count, 1, __ATOMIC_RELEASE); /* the worker may be gone from here on */
    return is_in_time;
}

/* Waits until the reader was woken. Returns false when the deadline came first. Under the mutex. */
static bool wait_until(struct tl_cq *cq, size_t min_count, int64_t deadline_ns)
{
    struct reader reader = {.min_count = min_count};
    tl_list_push_back(&cq->readers, &reader.link);
    bool is_in_time =
        cq->progress != NULL ? progress_until(cq, &reader, deadline_ns) : sleep_until(cq, &reader, deadline_ns);
    tl_list_remove(&reader.link);
    return is_in_time;
}

size_t tl_cq_wait_many(struct tl_cq *cq, struct tl_completion *ret_completions, size_t capacity, size_t min_count,
                       int64_t timeout_ns)
{
    int64_t deadline_ns = tl_clock_deadline_ns(timeout_ns);
    bool is_in_time = capacity > 0;
    struct tl_list items;
    tl_list_init(&items);
    pthread_mutex_lock(&cq->mutex);
    cq->is_waited = timeout_ns > 0;
    cq->waiter = pthread_self();
    while (cq->item_count < min_count && is_in_time) {
        wake_for_items(cq, true); /* this reader may have been woken in place of one that needs less */
        is_in_time = wait_until(cq, min_count, deadline_ns);
    }
    take_items(cq, &items, capacity);
    if (cq->item_count > 0) wake_for_items(cq, true);
    pthread_mutex_unlock(&cq->mutex);
    return fill(&items, ret_completions);
}

size_t tl_cq_wait(struct tl_cq *cq, struct tl_completion *ret_completions, size_t capacity, int64_t timeout_ns)
{
    return tl_cq_wait_many(cq, ret_completions, capacity, 1, timeout_ns);
}
