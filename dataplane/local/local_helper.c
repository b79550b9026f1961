// SPDX-License-Identifier: Apache-2.0
/*
 * Helper threads.
 *
 * The reactor starts a reading and goes on; the helper's thread reads, writes the eventfd, and waits for the next
 * reading. What is read goes through a buffer of the thread's that stays in the cache, and from there to its
 * destination only while the reactor has not taken that back: a call that the peer keeps waiting cannot be cancelled,
 * and so must have nothing of the user's to write to.
 */
#include "dataplane/local/local_helper.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/copy.h"
#include "base/error.h"
#include "base/thread.h"
#include "dataplane/memory/pages.h"

/* The thread of a helper that has had nothing to read for so long ends. */
#define IDLE_NS TL_NS_PER_SEC
/* What is read at a time: what is written and what is read of it fit into the second cache together. */
#define BUFFER_BYTES (UINT64_C(128) << 10)

struct local_helper {
    int done_fd;
    bool is_busy; /* used by the reactor alone */
    atomic_bool is_done;
    int error; /* of the reading that is done; errno */

    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t has_work;
    struct local_reading reading;
    bool must_read; /* there is a reading that the thread has not finished */
    bool has_thread;
    bool is_ended;   /* the thread frees the helper */
    uint8_t *buffer; /* [BUFFER_BYTES] used by the thread alone; NULL: nothing was read yet */
};

/* ----------------------------------------------------------------------------------------------------- reading -- */

/* Copies what is in the buffer to the destination. Returns false when the destination was taken back. */
static bool hand_over(struct local_helper *helper, uint64_t done_bytes, size_t len_bytes)
{
    TL_CHECK(pthread_mutex_lock(&helper->mutex) == 0);
    bool is_wanted = helper->reading.destination != NULL;
    /* Only large tensors are read. */
    if (is_wanted) tl_copy_uncached(helper->reading.destination + done_bytes, helper->buffer, len_bytes);
    TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
    return is_wanted;
}

/* Returns 0 or an errno. */
static int read_memory(struct local_helper *helper)
{
    const struct local_reading *reading = &helper->reading;
    if (helper->buffer == NULL) helper->buffer = aligned_alloc(TL_PAGE_BYTES, BUFFER_BYTES);
    if (helper->buffer == NULL) return ENOMEM;
    for (uint64_t done_bytes = 0; done_bytes < reading->len_bytes;) {
        size_t len_bytes = (size_t)tl_min_u64(reading->len_bytes - done_bytes, BUFFER_BYTES);
        struct iovec to = {.iov_base = helper->buffer, .iov_len = len_bytes};
        struct iovec from = {.iov_base = (void *)(uintptr_t)(reading->source + done_bytes), .iov_len = len_bytes};
        ssize_t read_bytes = process_vm_readv(reading->peer, &to, 1, &from, 1, 0);
        if (read_bytes <= 0) return read_bytes < 0 ? errno : EFAULT;
        if (!hand_over(helper, done_bytes, (size_t)read_bytes)) return ECANCELED;
        done_bytes += (uint64_t)read_bytes;
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------------ thread -- */

static void free_helper(struct local_helper *helper)
{
    pthread_cond_destroy(&helper->has_work);
    pthread_mutex_destroy(&helper->mutex);
    free(helper->buffer);
    free(helper);
}

/* Waits for a reading or the end, with the mutex held. Returns false when neither has come for a while. */
static bool wait_for_reading(struct local_helper *helper)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += IDLE_NS / TL_NS_PER_SEC;
    while (!helper->must_read && !helper->is_ended) {
        int error = pthread_cond_timedwait(&helper->has_work, &helper->mutex, &until);
        if (error == ETIMEDOUT) return helper->must_read || helper->is_ended;
        TL_CHECK(error == 0);
    }
    return true;
}

static void *run(void *argument)
{
    const uint64_t one = 1;
    struct local_helper *helper = argument;
    TL_CHECK(pthread_mutex_lock(&helper->mutex) == 0);
    while (wait_for_reading(helper) && !helper->is_ended) {
        TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
        int error = read_memory(helper);
        TL_CHECK(pthread_mutex_lock(&helper->mutex) == 0);
        helper->must_read = false;
        helper->error = error;
        if (helper->is_ended) break;
        atomic_store_explicit(&helper->is_done, true, memory_order_release);
        (void)!write(helper->done_fd, &one, sizeof(one));
    }
    bool is_ended = helper->is_ended;
    helper->has_thread = false;
    TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
    if (is_ended) free_helper(helper);
    return NULL; /* the next reading starts another thread */
}

/* ----------------------------------------------------------------------------------------------------- reactor -- */

struct local_helper *local_helper_create(int done_fd)
{
    pthread_condattr_t attributes;
    struct local_helper *helper = calloc(1, sizeof(*helper));
    if (helper == NULL) return NULL;
    helper->done_fd = done_fd;
    pthread_mutex_init(&helper->mutex, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&helper->has_work, &attributes);
    pthread_condattr_destroy(&attributes);
    return helper;
}

enum tl_status local_helper_read(struct local_helper *helper, const struct local_reading *reading,
                                 struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    TL_CHECK(!helper->is_busy);
    atomic_store_explicit(&helper->is_done, false, memory_order_relaxed);
    TL_CHECK(pthread_mutex_lock(&helper->mutex) == 0);
    helper->reading = *reading;
    helper->must_read = true;
    if (helper->has_thread) {
        pthread_cond_signal(&helper->has_work);
    } else {
        status = tl_thread_start("tl-helper", run, helper, NULL, ret_error);
        helper->has_thread = helper->must_read = status == TL_OK;
    }
    TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
    helper->is_busy = status == TL_OK;
    return status;
}

bool local_helper_is_busy(const struct local_helper *helper)
{
    return helper != NULL && helper->is_busy;
}

bool local_helper_is_done(struct local_helper *helper, int *ret_error)
{
    if (!helper->is_busy || !atomic_load_explicit(&helper->is_done, memory_order_acquire)) return false;
    helper->is_busy = false;
    *ret_error = helper->error;
    return true;
}

void local_helper_forget(struct local_helper *helper)
{
    TL_CHECK(pthread_mutex_lock(&helper->mutex) == 0);
    helper->reading.destination = NULL;
    TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
}

void local_helper_destroy(struct local_helper *helper)
{
    if (helper == NULL) return;
    TL_CHECK(pthread_mutex_lock(&helper->mutex) == 0);
    helper->is_ended = true;
    bool has_thread = helper->has_thread;
    if (has_thread) pthread_cond_signal(&helper->has_work);
    TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
    if (!has_thread) free_helper(helper);
}

/* ---------------------------------------------------------------------------------------------------- dropping -- */

static void drop(struct local_leftovers *leftovers)
{
    for (unsigned i = 0; i < leftovers->socket_count; i++)
        close(leftovers->sockets[i]);
    local_ring_unmap(&leftovers->ring);
    for (size_t i = 0; i < leftovers->mapped_count; i++)
        local_unmap(&leftovers->mapped[i]);
    for (size_t i = 0; i < leftovers->file_count; i++)
        local_file_free(&leftovers->files[i]);
    free(leftovers->mapped);
    free(leftovers->files);
}

static void *run_drop(void *leftovers)
{
    drop(leftovers);
    free(leftovers);
    return NULL;
}

void local_drop(const struct local_leftovers *leftovers)
{
    struct tl_error error;
    struct local_leftovers *copy = malloc(sizeof(*copy)), own = *leftovers;
    if (copy != NULL) *copy = *leftovers;
    if (copy != NULL && tl_thread_start("tl-drop", run_drop, copy, NULL, &error) == TL_OK) return;
    free(copy);
    drop(&own);
}
