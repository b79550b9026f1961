// SPDX-License-Identifier: Apache-2.0
/* The process that forks: it takes orders over a socket, one after the other, and ends with the test. */
#include "fakes/forker.h"

#include <check.h>
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/check.h"

#define MAX_CHILDREN 64

struct order {
    int (*start)(int fd); /* comes with the child's end of its socket; NULL: wait for pid */
    pid_t pid;
};

static int orders = -1;
static pid_t forker;

/* ----------------------------------------------------------------------------------------------------- packets -- */

bool forker_pass(int socket, const void *packet, size_t len_bytes, int fd)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec part = {.iov_base = (void *)(uintptr_t)packet, .iov_len = len_bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof(control.bytes);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &fd, sizeof(fd));
    }
    return sendmsg(socket, &message, MSG_NOSIGNAL) == (ssize_t)len_bytes;
}

size_t forker_take(int socket, void *packet, size_t capacity_bytes, int *ret_fd)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {.iov_base = packet, .iov_len = capacity_bytes};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
    ssize_t len_bytes;
    *ret_fd = -1;
    do {
        len_bytes = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    } while (len_bytes < 0 && errno == EINTR);
    struct cmsghdr *header = len_bytes > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (header != NULL && header->cmsg_type == SCM_RIGHTS) memcpy(ret_fd, CMSG_DATA(header), sizeof(*ret_fd));
    return len_bytes > 0 ? (size_t)len_bytes : 0;
}

/* ------------------------------------------------------------------------------------------------- the process -- */

static pid_t start(const struct order *order, int orders_fd, int child_fd)
{
    pid_t pid = fork();
    TL_CHECK(pid >= 0);
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(orders_fd);
        _exit(order->start(child_fd));
    }
    close(child_fd);
    return pid;
}

static void serve(int orders_fd)
{
    pid_t children[MAX_CHILDREN];
    size_t count = 0;
    struct order order;
    int child_fd;
    while (forker_take(orders_fd, &order, sizeof(order), &child_fd) == sizeof(order)) {
        int answer = 0;
        if (order.start != NULL) {
            TL_CHECK(count < MAX_CHILDREN);
            answer = children[count++] = start(&order, orders_fd, child_fd);
        } else {
            TL_CHECK(waitpid(order.pid, &answer, 0) == order.pid);
            size_t i = 0;
            while (i < count && children[i] != order.pid)
                i++;
            if (i < count) children[i] = children[--count];
        }
        (void)forker_pass(orders_fd, &answer, sizeof(answer), -1);
    }
    for (size_t i = 0; i < count; i++)
        (void)kill(children[i], SIGKILL);
    for (size_t i = 0; i < count; i++)
        (void)waitpid(children[i], NULL, 0);
}

/* ---------------------------------------------------------------------------------------------------- the test -- */

void forker_open(void)
{
    int fds[2];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
    forker = fork();
    ck_assert_int_ge(forker, 0);
    if (forker == 0) {
        /* check's handler would end the whole test when a child's alarm goes off. */
        (void)signal(SIGALRM, SIG_DFL);
        close(fds[0]);
        serve(fds[1]);
        _exit(0);
    }
    close(fds[1]);
    orders = fds[0];
}

void forker_close(void)
{
    int status;
    if (orders < 0) return;
    close(orders);
    orders = -1;
    ck_assert_int_eq(waitpid(forker, &status, 0), forker);
    ck_assert_int_eq(status, 0);
}

static int give(const struct order *order, int child_fd)
{
    int answer, no_fd;
    ck_assert(forker_pass(orders, order, sizeof(*order), child_fd));
    ck_assert_uint_eq(forker_take(orders, &answer, sizeof(answer), &no_fd), sizeof(answer));
    return answer;
}

pid_t forker_start(int (*child)(int fd), int *ret_fd)
{
    int fds[2];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
    const struct order order = {.start = child};
    pid_t pid = give(&order, fds[1]);
    close(fds[1]);
    *ret_fd = fds[0];
    return pid;
}

int forker_wait(pid_t pid)
{
    const struct order order = {.pid = pid};
    return give(&order, -1);
}
