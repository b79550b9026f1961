// SPDX-License-Identifier: Apache-2.0
/*
 * The caller starts a reading and goes on; the reader's thread reads, writes the eventfd, and waits for the next
 * reading. It reads pieces straight into the destination, and holds the mutex during each call: a call cannot be
 * cancelled, so that the destination is given back when the call returns. A reading that is buffered goes through a
 * buffer of the thread instead: its pages may come late or never, and the destination can be given back at once. So
 * does one to a destination that the kernel would copy to slowly (tl_copy_is_close).
 */
#include "dataplane/memory/memory_reader.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/copy.h"
#include "base/thread.h"
#include "dataplane/memory/pages.h"

/* The thread of a reader ends when it had nothing to read for this time. */
#define IDLE_NS TL_NS_PER_SEC
/* The most bytes that one call reads straight into the destination; its owner may have to wait for that call. */
#define DIRECT_BYTES (UINT64_C(1) << 20)
/* The most bytes that one call reads through the buffer; the buffer and its copy fit into the second-level cache
 * together. */
#define BUFFER_BYTES (UINT64_C(256) << 10)

struct tl_memory_reader {
    int done_fd;
    bool is_busy; /* used by the caller alone */
    atomic_bool is_done;
    atomic_bool must_stop; /* the reading must stop before its next piece */
    int error;             /* errno of the reading that is done; 0: it succeeded */

    pthread_mutex_t mutex; /* guards the following members */
    pthread_cond_t has_work;
    struct tl_memory_reading reading;
    bool must_read; /* there is a reading that the thread has not finished */
    bool has_thread;
    bool is_ended;   /* the thread frees the reader */
    uint8_t *buffer; /* [BUFFER_BYTES] used by the thread alone; NULL until it is first needed */
};

/* ----------------------------------------------------------------------------------------------------- reading -- */

/* The following functions return what process_vm_readv returns, with ECANCELED when the destination was taken back. */
static ssize_t call(const struct tl_memory_reading *reading, uint64_t done_bytes, uint8_t *to, uint64_t most_bytes)
{
    size_t len_bytes = (size_t)tl_min_u64(reading->len_bytes - done_bytes, most_bytes);
    const struct iovec local = {.iov_base = to, .iov_len = len_bytes};
    const struct iovec remote = {.iov_base = (void *)(uintptr_t)(reading->source + done_bytes), .iov_len = len_bytes};
    return process_vm_readv(reading->process, &local, 1, &remote, 1, 0);
}

static ssize_t read_directly(struct tl_memory_reader *reader, uint64_t done_bytes)
{
    ssize_t read_bytes = -1;
    TL_CHECK(pthread_mutex_lock(&reader->mutex) == 0);
    uint8_t *destination = reader->reading.destination;
    errno = ECANCELED;
    if (destination != NULL) read_bytes = call(&reader->reading, done_bytes, destination + done_bytes, DIRECT_BYTES);
    int error = errno;
    TL_CHECK(pthread_mutex_unlock(&reader->mutex) == 0);
    errno = error;
    return read_bytes;
}

static ssize_t read_through_buffer(struct tl_memory_reader *reader, uint64_t done_bytes)
{
    if (reader->buffer == NULL) reader->buffer = aligned_alloc(TL_PAGE_BYTES, BUFFER_BYTES);
    errno = ENOMEM;
    ssize_t read_bytes = reader->buffer != NULL ? call(&reader->reading, done_bytes, reader->buffer, BUFFER_BYTES) : -1;
    if (read_bytes <= 0) return read_bytes;
    TL_CHECK(pthread_mutex_lock(&reader->mutex) == 0);
    uint8_t *destination = reader->reading.destination;
    if (destination != NULL) tl_copy(destination + done_bytes, reader->buffer, (size_t)read_bytes);
    TL_CHECK(pthread_mutex_unlock(&reader->mutex) == 0);
    errno = ECANCELED;
    return destination != NULL ? read_bytes : -1;
}

/* Carries out the reading. Returns 0 or an errno. */
static int read_memory(struct tl_memory_reader *reader)
{
    bool is_direct = !reader->reading.is_buffered;
    for (uint64_t done_bytes = 0; done_bytes < reader->reading.len_bytes;) {
        if (atomic_load_explicit(&reader->must_stop, memory_order_relaxed)) return ECANCELED;
        ssize_t read_bytes = is_direct ? read_directly(reader, done_bytes) : read_through_buffer(reader, done_bytes);
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

static void free_reader(struct tl_memory_reader *reader)
{
    pthread_cond_destroy(&reader->has_work);
    pthread_mutex_destroy(&reader->mutex);
    free(reader->buffer);
    free(reader);
}

/* Waits for a reading or the end, with the mutex held. Returns false when neither has come for a while. */
static bool wait_for_reading(struct tl_memory_reader *reader)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += IDLE_NS / TL_NS_PER_SEC;
    while (!reader->must_read && !reader->is_ended) {
        int error = pthread_cond_timedwait(&reader->has_work, &reader->mutex, &until);
        if (error == ETIMEDOUT) return reader->must_read || reader->is_ended;
        TL_CHECK(error == 0);
    }
    return true;
}

static void *run(void *argument)
{
    const uint64_t one = 1;
    struct tl_memory_reader *reader = argument;
    TL_CHECK(pthread_mutex_lock(&reader->mutex) == 0);
    while (wait_for_reading(reader) && !reader->is_ended) {
        TL_CHECK(pthread_mutex_unlock(&reader->mutex) == 0);
        int error = read_memory(reader);
        TL_CHECK(pthread_mutex_lock(&reader->mutex) == 0);
        reader->must_read = false;
        reader->error = error;
        if (reader->is_ended) break;
        atomic_store_explicit(&reader->is_done, true, memory_order_release);
        (void)!write(reader->done_fd, &one, sizeof(one));
    }
    bool is_ended = reader->is_ended;
    reader->has_thread = false;
    TL_CHECK(pthread_mutex_unlock(&reader->mutex) == 0);
    if (is_ended) free_reader(reader);
    return NULL; /* the next reading starts another thread */
}

/* ------------------------------------------------------------------------------------------------------ caller -- */

struct tl_memory_reader *tl_memory_reader_create(int done_fd)
{
    pthread_condattr_t attributes;
    struct tl_memory_reader *reader = calloc(1, sizeof(*reader));
    if (reader == NULL) return NULL;
    reader->done_fd = done_fd;
    pthread_mutex_init(&reader->mutex, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&reader->has_work, &attributes);
    pthread_condattr_destroy(&attributes);
    return reader;
}

/* Whether the kernel would copy slowly to the destination, and does not to the buffer, which starts with a page. */
static bool is_slow_directly(const struct tl_memory_reading *reading)
{
    return reading->len_bytes >= TL_COPY_CLOSE_BYTES &&
           tl_copy_is_close((uintptr_t)reading->destination, reading->source) && !tl_copy_is_close(0, reading->source);
}

enum tl_status tl_memory_reader_read(struct tl_memory_reader *reader, const struct tl_memory_reading *reading,
                                     struct tl_error *ret_error)
{
    enum tl_status status = TL_OK;
    TL_CHECK(!reader->is_busy);
    atomic_store_explicit(&reader->is_done, false, memory_order_relaxed);
    atomic_store_explicit(&reader->must_stop, false, memory_order_relaxed);
    TL_CHECK(pthread_mutex_lock(&reader->mutex) == 0);
    reader->reading = *reading;
    if (is_slow_directly(reading)) reader->reading.is_buffered = true;
    reader->must_read = true;
    if (reader->has_thread) {
        pthread_cond_signal(&reader->has_work);
    } else {
        status = tl_thread_start("tl-helper", run, reader, NULL, ret_error);
        reader->has_thread = reader->must_read = status == TL_OK;
    }
    TL_CHECK(pthread_mutex_unlock(&reader->mutex) == 0);
    reader->is_busy = status == TL_OK;
    return status;
}

bool tl_memory_reader_is_busy(const struct tl_memory_reader *reader)
{
    return reader != NULL && reader->is_busy;
}

bool tl_memory_reader_is_done(struct tl_memory_reader *reader, int *ret_error)
{
    if (!reader->is_busy || !atomic_load_explicit(&reader->is_done, memory_order_acquire)) return false;
    reader->is_busy = false;
    *ret_error = reader->error;
    return true;
}

void tl_memory_reader_take_back(struct tl_memory_reader *reader)
{
    /* Without this the thread, which gives the mutex up between two pieces, could take it again for each of them. */
    atomic_store_explicit(&reader->must_stop, true, memory_order_relaxed);
    TL_CHECK(pthread_mutex_lock(&reader->mutex) == 0);
    reader->reading.destination = NULL;
    TL_CHECK(pthread_mutex_unlock(&reader->mutex) == 0);
}

bool tl_memory_reader_try_to_take_back(struct tl_memory_reader *reader)
{
    /* Once is_done is set the thread may hold the mutex, and does not write the eventfd again. */
    if (!reader->is_busy || atomic_load_explicit(&reader->is_done, memory_order_acquire)) return true;
    atomic_store_explicit(&reader->must_stop, true, memory_order_relaxed);
    if (pthread_mutex_trylock(&reader->mutex) != 0) return false;
    reader->reading.destination = NULL;
    TL_CHECK(pthread_mutex_unlock(&reader->mutex) == 0);
    return true;
}

void tl_memory_reader_destroy(struct tl_memory_reader *reader)
{
    if (reader == NULL) return;
    TL_CHECK(pthread_mutex_lock(&reader->mutex) == 0);
    reader->is_ended = true;
    bool has_thread = reader->has_thread;
    if (has_thread) pthread_cond_signal(&reader->has_work);
    TL_CHECK(pthread_mutex_unlock(&reader->mutex) == 0);
    if (!has_thread) free_reader(reader);
}
