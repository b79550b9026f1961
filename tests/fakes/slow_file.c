// SPDX-License-Identifier: Apache-2.0
/* The two parts of the file system: mounting it, and the server, which speaks the protocol of /dev/fuse. */
#include "fakes/slow_file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/check.h"

#define FILE_NAME "slow"
#define FILE_NODE 2
#define MAX_WAITING 256
#define MAX_READ_BYTES (128 << 10)

struct request {
    struct fuse_in_header header;
    uint32_t read_bytes;
};

static int device;
static pid_t owner;
static bool answers_all;
static struct request waiting[MAX_WAITING];
static size_t waiting_count;

/* ----------------------------------------------------------------------------------------------------- answers -- */

static void send_answer(const struct fuse_in_header *header, int error, const void *body, size_t body_bytes)
{
    const struct fuse_out_header out = {
        .len = (uint32_t)(sizeof(out) + body_bytes), .error = -error, .unique = header->unique};
    struct iovec parts[] = {{.iov_base = (void *)(uintptr_t)&out, .iov_len = sizeof(out)},
                            {.iov_base = (void *)(uintptr_t)body, .iov_len = body_bytes}};
    /* This fails when the process that has asked was killed meanwhile. */
    (void)!writev(device, parts, body_bytes > 0 ? 2 : 1);
}

static struct fuse_attr attributes(uint64_t node)
{
    bool is_file = node == FILE_NODE;
    return (struct fuse_attr){.ino = node,
                              .size = is_file ? SLOW_FILE_BYTES : 0,
                              .mode = is_file ? S_IFREG | 0600 : S_IFDIR | 0700,
                              .nlink = 1,
                              .uid = getuid(),
                              .gid = getgid(),
                              .blksize = 4096};
}

static void answer(const struct request *request)
{
    static uint8_t bytes[MAX_READ_BYTES];
    const struct fuse_in_header *header = &request->header;
    switch (header->opcode) {
    case FUSE_INIT: {
        const struct fuse_init_out init = {
            .major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION, .max_write = 4096};
        send_answer(header, 0, &init, sizeof(init));
        return;
    }
    case FUSE_LOOKUP: {
        const struct fuse_entry_out entry = {.nodeid = FILE_NODE, .attr = attributes(FILE_NODE)};
        send_answer(header, 0, &entry, sizeof(entry));
        return;
    }
    case FUSE_GETATTR: {
        const struct fuse_attr_out attr = {.attr = attributes(header->nodeid)};
        send_answer(header, 0, &attr, sizeof(attr));
        return;
    }
    case FUSE_OPEN: {
        const struct fuse_open_out open = {.fh = 1};
        send_answer(header, 0, &open, sizeof(open));
        return;
    }
    case FUSE_READ:
        memset(bytes, SLOW_FILE_BYTE, sizeof(bytes));
        send_answer(header, 0, bytes, request->read_bytes < MAX_READ_BYTES ? request->read_bytes : MAX_READ_BYTES);
        return;
    case FUSE_FLUSH:
    case FUSE_RELEASE:
        send_answer(header, 0, NULL, 0);
        return;
    default:
        send_answer(header, ENOSYS, NULL, 0);
        return;
    }
}

/* ------------------------------------------------------------------------------------------------------ server -- */

static void take_request(int notify_fd)
{
    static uint8_t bytes[FUSE_MIN_READ_BUFFER + (64 << 10)];
    struct request request = {.read_bytes = 0};
    ssize_t len_bytes = read(device, bytes, sizeof(bytes));
    if (len_bytes < (ssize_t)sizeof(request.header)) return; /* the request was cancelled meanwhile */
    memcpy(&request.header, bytes, sizeof(request.header));
    uint32_t opcode = request.header.opcode;
    if (opcode == FUSE_READ) {
        struct fuse_read_in in;
        memcpy(&in, bytes + sizeof(request.header), sizeof(in));
        request.read_bytes = in.size;
    }
    /* These requests need no answer. */
    if (opcode == FUSE_FORGET || opcode == FUSE_BATCH_FORGET || opcode == FUSE_INTERRUPT) return;
    bool is_ours = request.header.pid == (uint32_t)owner || opcode == FUSE_INIT || opcode == FUSE_RELEASE;
    if (is_ours || answers_all || waiting_count == MAX_WAITING) {
        answer(&request);
        return;
    }
    waiting[waiting_count++] = request;
    (void)send(notify_fd, SLOW_FILE_WAITS, sizeof(SLOW_FILE_WAITS), MSG_NOSIGNAL);
}

static void serve(int notify_fd, int control)
{
    struct pollfd fds[] = {{.fd = device, .events = POLLIN}, {.fd = control, .events = POLLIN}};
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(SLOW_FILE_SECONDS);
    while (getppid() == owner && poll(fds, 2, -1) > 0 && (fds[0].revents & (POLLERR | POLLHUP)) == 0) {
        if (fds[0].revents != 0) take_request(notify_fd);
        if (fds[1].revents == 0) continue;
        char byte;
        if (recv(control, &byte, sizeof(byte), 0) <= 0) return;
        answers_all = true;
        for (size_t i = 0; i < waiting_count; i++)
            answer(&waiting[i]);
        waiting_count = 0;
        (void)send(control, &byte, sizeof(byte), MSG_NOSIGNAL);
    }
}

/* ---------------------------------------------------------------------------------------------------- mounting -- */

static bool write_text(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return false;
    bool is_written = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    close(fd);
    return is_written;
}

/* Enters a namespace of mounts, in one of users where that is needed. The process keeps its user there. */
static bool enter_namespace(void)
{
    char users[64], groups[64];
    if (unshare(CLONE_NEWNS) == 0) return true;
    snprintf(users, sizeof(users), "%u %u 1", (unsigned)geteuid(), (unsigned)geteuid());
    snprintf(groups, sizeof(groups), "%u %u 1", (unsigned)getegid(), (unsigned)getegid());
    return unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 && write_text("/proc/self/setgroups", "deny") &&
           write_text("/proc/self/uid_map", users) && write_text("/proc/self/gid_map", groups);
}

const char *slow_file_begin(struct slow_file *file, int notify_fd)
{
    char options[128];
    int fds[2];
    if (!enter_namespace()) return "a namespace of mounts cannot be created";
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) return "mounts cannot be made private";
    device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (device < 0) return "/dev/fuse cannot be opened";
    snprintf(options, sizeof(options), "fd=%d,rootmode=40000,user_id=%u,group_id=%u", device, (unsigned)geteuid(),
             (unsigned)getegid());
    if (mount("slow", SLOW_FILE_FOLDER, "fuse", MS_NOSUID | MS_NODEV, options) != 0) {
        close(device);
        return "a file system of /dev/fuse cannot be mounted";
    }
    TL_CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) == 0);
    owner = getpid();
    file->server = fork();
    TL_CHECK(file->server >= 0);
    if (file->server == 0) {
        close(fds[0]);
        serve(notify_fd, fds[1]);
        _exit(0);
    }
    close(fds[1]);
    close(device); /* the file system ends when the server closes its descriptor */
    file->control = fds[0];
    file->fd = open(SLOW_FILE_FOLDER "/" FILE_NAME, O_RDWR | O_CLOEXEC);
    return file->fd >= 0 ? NULL : "a file of /dev/fuse cannot be opened";
}

void slow_file_let_go(struct slow_file *file)
{
    char byte = 0;
    TL_CHECK(send(file->control, &byte, sizeof(byte), MSG_NOSIGNAL) == sizeof(byte));
    TL_CHECK(recv(file->control, &byte, sizeof(byte), 0) == sizeof(byte));
}
