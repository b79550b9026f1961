// SPDX-License-Identifier: Apache-2.0
/*
 * The closer: a thread with a table of descriptors of its own, in which there is nothing but the end of a socket pair.
 *
 *   reactor              closer                   one thread for each socket
 *   passes the socket -> sees that there is one,
 *   and closes it        starts a thread     ---> copies that table, takes the socket into its copy, and ends
 *
 * It waits until the reactor has closed it. So the last one to have the socket is a thread that ends: the kernel then
 * closes what lies in it without waiting for what lingers, as it does when a process ends.
 */
#include <errno.h>
#include <linux/close_range.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "base/thread.h"
#include "dataplane/local_porter.h"

/* Threads that have begun to close a socket and have not ended: of a closer, and, where there is none, of all. What a
 * stranger has left may keep them. */
#define MAX_CLOSING 64
#define MAX_LINGERING 1024
#define LOOK_USEC 1000

/* Of a closer, while it starts; and of one of its threads, until it has the socket. */
struct closing {
    int fd;
    bool has_table; /* of its own */
    sem_t *handed;  /* of the closer: as often as the reactor has closed what it has passed */
    sem_t is_ready;
    pid_t thread; /* who has taken the last one */
};

struct threads {
    pid_t ids[MAX_CLOSING];
    unsigned count;
};

/* Keeps only fd, in a table of descriptors of its own. False: the kernel cannot do that. */
static bool keep_only(int fd)
{
    if (syscall(SYS_close_range, fd + 1, ~0u, CLOSE_RANGE_UNSHARE) != 0) return false;
    return fd == 0 || syscall(SYS_close_range, 0, fd - 1, 0) == 0;
}

/* Calls on descriptors of a table of its own go past the C library: tools that follow descriptors there know one table
 * only, in which the number is somebody else's. */
static bool is_one_waiting(int fd)
{
    char byte;
    return syscall(SYS_recvfrom, fd, &byte, sizeof(byte), MSG_PEEK, NULL, NULL) > 0;
}

static int take_descriptor(int fd)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    char byte;
    struct iovec part = {.iov_base = &byte, .iov_len = sizeof(byte)};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
    int taken = -1;
    if (syscall(SYS_recvmsg, fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) < 0) return -1;
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL && header->cmsg_type == SCM_RIGHTS) memcpy(&taken, CMSG_DATA(header), sizeof(taken));
    return taken;
}

static void wait_for(sem_t *semaphore)
{
    while (sem_wait(semaphore) != 0)
        TL_CHECK(errno == EINTR);
}

static void *close_one(void *argument)
{
    struct closing *closing = argument;
    pthread_setname_np(pthread_self(), "tl-closing");
    bool has_table = keep_only(closing->fd);
    closing->thread = (pid_t)syscall(SYS_gettid);
    int socket = take_descriptor(closing->fd);
    sem_post(&closing->is_ready);
    if (!has_table && socket >= 0) close(socket);
    return NULL;
}

/* Waits until there may be one more. */
static void await_place(struct threads *threads)
{
    while (true) {
        for (unsigned i = 0; i < threads->count;) {
            bool has_ended = syscall(SYS_tgkill, getpid(), threads->ids[i], 0) != 0;
            if (has_ended) threads->ids[i] = threads->ids[--threads->count];
            i += !has_ended;
        }
        if (threads->count < MAX_CLOSING) return;
        usleep(LOOK_USEC);
    }
}

static void *run(void *argument)
{
    struct closing *start = argument;
    struct closing closing = {.fd = start->fd};
    sem_t *handed = start->handed;
    struct threads threads = {.count = 0};
    struct tl_error error;
    pthread_setname_np(pthread_self(), "tl-closer");
    bool has_table = start->has_table = keep_only(closing.fd);
    sem_post(&start->is_ready);
    sem_init(&closing.is_ready, 0, 0);
    while (has_table && is_one_waiting(closing.fd)) {
        await_place(&threads);
        wait_for(handed);
        if (tl_thread_start("tl-closing", close_one, &closing, NULL, &error) == TL_OK) {
            wait_for(&closing.is_ready);
            threads.ids[threads.count++] = closing.thread;
        } else {
            sem_post(handed);
            usleep(LOOK_USEC);
        }
    }
    sem_destroy(&closing.is_ready);
    sem_destroy(handed); /* its table goes with the thread */
    free(handed);
    return NULL;
}

void local_closer_open(struct local_closer *closer)
{
    int ends[2];
    struct tl_error error;
    struct closing start;
    closer->fd = -1;
    start.handed = malloc(sizeof(*start.handed));
    if (start.handed == NULL) return;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        free(start.handed);
        return;
    }
    closer->handed = start.handed;
    sem_init(start.handed, 0, 0);
    start.fd = ends[1];
    sem_init(&start.is_ready, 0, 0);
    bool is_started = tl_thread_start("tl-closer", run, &start, NULL, &error) == TL_OK;
    if (is_started) {
        wait_for(&start.is_ready);
    } else {
        free(start.handed);
    }
    sem_destroy(&start.is_ready);
    close(ends[1]);
    if (is_started && start.has_table) {
        closer->fd = ends[0];
    } else {
        close(ends[0]);
    }
}

void local_closer_end(struct local_closer *closer)
{
    if (closer->fd >= 0) close(closer->fd);
    closer->fd = -1;
}

/* --------------------------------------------------------------------------------------------- where there is none --
 */

static atomic_uint lingering_count;

static void *close_lingering(void *argument)
{
    pthread_setname_np(pthread_self(), "tl-closing");
    close((int)(intptr_t)argument);
    atomic_fetch_sub_explicit(&lingering_count, 1, memory_order_relaxed);
    return NULL;
}

static bool close_in_thread(int socket)
{
    struct tl_error error;
    if (atomic_fetch_add_explicit(&lingering_count, 1, memory_order_relaxed) < MAX_LINGERING &&
        tl_thread_start("tl-closing", close_lingering, (void *)(intptr_t)socket, NULL, &error) == TL_OK)
        return true;
    atomic_fetch_sub_explicit(&lingering_count, 1, memory_order_relaxed);
    return false;
}

bool local_closer_take(struct local_closer *closer, int socket)
{
    const uint32_t kind = LOCAL_PACKET_WAKE;
    if (closer->fd < 0) return close_in_thread(socket);
    if (local_send(closer->fd, &kind, sizeof(kind), socket)) {
        close(socket);
        sem_post(closer->handed);
        return true;
    }
    if (errno != EPIPE && errno != ECONNRESET && errno != ENOTCONN) return false;
    local_closer_end(closer); /* somebody has shut its socket down, and it has ended */
    return close_in_thread(socket);
}
