// SPDX-License-Identifier: Apache-2.0
/*
 * Helper threads.
 *
 * The reactor starts a reading and goes on; the helper's thread reads, writes the eventfd, and waits for the next
 * reading. It reads pieces straight into the destination, and holds the mutex during each call: a call cannot be
 * cancelled, so that the destination is given back when the call returns. Memory of a file is read through a buffer of
 * the thread instead: its pages may come late or never, and the destination can be given back at once.
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

/* The thread of a helper ends when it had nothing to read for this time. */
#define IDLE_NS TL_NS_PER_SEC
/* The most bytes that one call reads straight into the destination; its owner may have to wait for that call. */
#define DIRECT_BYTES (UINT64_C(1) << 20)
/* The most bytes that one call reads through the buffer; the buffer and its copy fit into the second-level cache
 * together. */
#define BUFFER_BYTES (UINT64_C(128) << 10)

struct local_helper {
    int done_fd;
    bool is_busy; /* used by the reactor alone */
    atomic_bool is_done;
    atomic_bool must_stop; /* the reading must stop before its next piece */
    int error;             /* errno of the reading that is done; 0: it succeeded */

    pthread_mutex_t mutex; /* guards the following members */
    pthread_cond_t has_work;
    struct local_reading reading;
    bool must_read; /* there is a reading that the thread has not finished */
    bool has_thread;
    bool is_ended;   /* the thread frees the helper */
    uint8_t *buffer; /* [BUFFER_BYTES] used by the thread alone; NULL until it is first needed */
};

/* ----------------------------------------------------------------------------------------------------- reading -- */

/* The following functions return what process_vm_readv returns, with ECANCELED when the destination was taken back. */
static ssize_t call(const struct local_reading *reading, uint64_t done_bytes, uint8_t *to, uint64_t most_bytes)
{
    size_t len_bytes = (size_t)tl_min_u64(reading->len_bytes - done_bytes, most_bytes);
    const struct iovec local = {.iov_base = to, .iov_len = len_bytes};
    const struct iovec remote = {.iov_base = (void *)(uintptr_t)(reading->source + done_bytes), .iov_len = len_bytes};
    return process_vm_readv(reading->peer, &local, 1, &remote, 1, 0);
}

static ssize_t read_directly(struct local_helper *helper, uint64_t done_bytes)
{
    ssize_t read_bytes = -1;
    TL_CHECK(pthread_mutex_lock(&helper->mutex) == 0);
    uint8_t *destination = helper->reading.destination;
    errno = ECANCELED;
    if (destination != NULL) read_bytes = call(&helper->reading, done_bytes, destination + done_bytes, DIRECT_BYTES);
    int error = errno;
    TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
    errno = error;
    return read_bytes;
}

static ssize_t read_through_buffer(struct local_helper *helper, uint64_t done_bytes)
{
    if (helper->buffer == NULL) helper->buffer = aligned_alloc(TL_PAGE_BYTES, BUFFER_BYTES);
    errno = ENOMEM;
    ssize_t read_bytes = helper->buffer != NULL ? call(&helper->reading, done_bytes, helper->buffer, BUFFER_BYTES) : -1;
    if (read_bytes <= 0) return read_bytes;
    TL_CHECK(pthread_mutex_lock(&helper->mutex) == 0);
    uint8_t *destination = helper->reading.destination;
    /* Only large tensors are read, and those should not fill the caches. */
    if (destination != NULL) tl_copy_uncached(destination + done_bytes, helper->buffer, (size_t)read_bytes);
    TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
    errno = ECANCELED;
    return destination != NULL ? read_bytes : -1;
}

/* Carries out the reading. Returns 0 or an errno. */
static int read_memory(struct local_helper *helper)
{
    bool is_direct = !helper->reading.is_buffered;
    for (uint64_t done_bytes = 0; done_bytes < helper->reading.len_bytes;) {
        if (atomic_load_explicit(&helper->must_stop, memory_order_relaxed)) return ECANCELED;
        ssize_t read_bytes = is_direct ? read_directly(helper, done_bytes) : read_through_buffer(helper, done_bytes);
        int error = read_bytes < 0 ? errno : EFAULT;
        if (read_bytes <= 0 && (!is_direct || error == ECANCELED)) return error;
        /* The destination may be memory that cannot be written, such as a file whose disk is full. Reading into the
         * buffer shows whether the source or the destination is at fault. */
        if (read_bytes <= 0) is_direct = false;
        if (read_bytes > 0) done_bytes += (uint64_t)read_bytes;
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
    atomic_store_explicit(&helper->must_stop, false, memory_order_relaxed);
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
    /* Without this the thread, which gives the mutex up between two pieces, could take it again for each of them. */
    atomic_store_explicit(&helper->must_stop, true, memory_order_relaxed);
    TL_CHECK(pthread_mutex_lock(&helper->mutex) == 0);
    helper->reading.destination = NULL;
    TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
}

bool local_helper_try_to_forget(struct local_helper *helper)
{
    /* Once is_done is set the thread may hold the mutex, and does not write the eventfd again. */
    if (!helper->is_busy || atomic_load_explicit(&helper->is_done, memory_order_acquire)) return true;
    atomic_store_explicit(&helper->must_stop, true, memory_order_relaxed);
    if (pthread_mutex_trylock(&helper->mutex) != 0) return false;
    helper->reading.destination = NULL;
    TL_CHECK(pthread_mutex_unlock(&helper->mutex) == 0);
    return true;
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
