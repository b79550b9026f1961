// SPDX-License-Identifier: Apache-2.0
/*
 * Writing to standard error without waiting for its reader.
 *
 * Happy path: one system call writes everything and returns EAGAIN instead of waiting: send(2) for a socket,
 * pwritev2(2) for a pipe. Kernels before 6.5 do not support the latter for pipes, and none does for terminals: there
 * poll(2) is called first, by one thread at a time. Files on disks are simply written.
 *
 * Failure modes: when there is no space, the first attempt waits a little, and further ones not at all until a text was
 * written again, so that a log that is not read costs nothing. On an old kernel another process that fills the space
 * between poll and write can still hold up one thread; the others then give up after the same short time. Errors (a
 * full disk, a reader that has gone) lose the text.
 */
#include "base/stderr.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PATIENCE_MS 50

static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool is_stuck;    /* the last attempt found no space */
static atomic_bool is_mid_line; /* the last text was written in part */

static int patience_ms(void)
{
    return atomic_load_explicit(&is_stuck, memory_order_relaxed) ? 0 : PATIENCE_MS;
}

static bool has_space(int timeout_ms)
{
    struct pollfd place = {.fd = STDERR_FILENO, .events = POLLOUT};
    return poll(&place, 1, timeout_ms) > 0;
}

/* For descriptors that cannot return EAGAIN: no other thread of this process writes between poll and write. */
static ssize_t ask_and_write(const char *text, size_t len)
{
    for (int left_ms = patience_ms(); pthread_mutex_trylock(&writing) != 0; left_ms--) {
        if (left_ms <= 0) {
            errno = EAGAIN;
            return -1;
        }
        poll(NULL, 0, 1);
    }
    ssize_t written = -1;
    int error_number = EAGAIN;
    if (has_space(0)) {
        written = write(STDERR_FILENO, text, len);
        error_number = errno;
    }
    pthread_mutex_unlock(&writing);
    errno = error_number;
    return written;
}

/* Writes a part of the text, or fails with EAGAIN when there is no space. */
static ssize_t write_some(const char *text, size_t len)
{
    struct stat info;
    struct iovec piece = {.iov_base = (void *)text, .iov_len = len};
    if (fstat(STDERR_FILENO, &info) != 0) return -1;
    if (S_ISREG(info.st_mode)) return write(STDERR_FILENO, text, len);
    if (S_ISSOCK(info.st_mode)) return send(STDERR_FILENO, text, len, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (S_ISFIFO(info.st_mode)) {
        ssize_t written = pwritev2(STDERR_FILENO, &piece, 1, -1, RWF_NOWAIT);
        if (written >= 0 || errno == EAGAIN || errno == EINTR || errno == EPIPE) return written;
    }
    return ask_and_write(text, len);
}

static bool write_all(const char *text, size_t len)
{
    size_t done = 0;
    bool has_waited = false;
    while (done < len) {
        size_t piece = len - done < TL_STDERR_PIECE_BYTES ? len - done : TL_STDERR_PIECE_BYTES;
        ssize_t written = write_some(text + done, piece);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0 && errno == EAGAIN && !has_waited && has_space(patience_ms())) {
            has_waited = true;
            continue;
        }
        if (written <= 0) break;
        done += (size_t)written;
        has_waited = false;
    }
    atomic_store_explicit(&is_stuck, done < len, memory_order_relaxed);
    if (done > 0) atomic_store_explicit(&is_mid_line, done < len, memory_order_relaxed);
    return done == len;
}

bool tl_stderr_put(const char *text, size_t len_bytes)
{
    int old_errno = errno;
    sigset_t pipe_only, pending, old_mask;
    const struct timespec no_wait = {0};
    sigemptyset(&pipe_only);
    sigaddset(&pipe_only, SIGPIPE);
    if (pthread_sigmask(SIG_BLOCK, &pipe_only, &old_mask) != 0) return false;
    bool was_pending = sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE) == 1;
    bool is_at_start = !atomic_load_explicit(&is_mid_line, memory_order_relaxed) || write_all("\n", 1);
    bool is_written = is_at_start && write_all(text, len_bytes);
    if (!was_pending) {
        while (sigtimedwait(&pipe_only, NULL, &no_wait) < 0 && errno == EINTR) {
        }
    }
    pthread_sigmask(SIG_SETMASK, &old_mask, NULL);
    errno = old_errno;
    return is_written;
}
