// SPDX-License-Identifier: Apache-2.0
/*
 * The sockets of the local provider: where others call, what passes over a connection, and who may.
 *
 * A socket in a folder gets its name only once it listens: a name whose socket refuses calls belongs to a process that
 * has died, and is removed by whoever opens next. Nothing here ever blocks but local_receive.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "base/random.h"
#include "base/text.h"
#include "dataplane/local_internal.h"

#define NAME_PREFIX "tensorlane-"
#define NAME_SUFFIX ".sock"
#define UNFINISHED_SUFFIX ".new"
/* A socket that was not given its name in that time never is. */
#define UNFINISHED_SECONDS 60
#define BACKLOG 512
#define MAX_DESCRIPTORS 4

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

static int make_socket(void)
{
    return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

/* ----------------------------------------------------------------------------------------------------- listening -- */

static bool ends_with(const char *text, const char *end)
{
    size_t len = strlen(text), end_len = strlen(end);
    return len >= end_len && strcmp(text + len - end_len, end) == 0;
}

/* Connects with the socket of that name in the folder, and follows no link: somebody else may have put one there that
 * leads to where opening waits. errno tells why not. */
static bool connect_in(int socket, int folder_fd, const char *name)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct stat stat;
    int fd = openat(folder_fd, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return false;
    bool is_connected = false;
    if (fstat(fd, &stat) == 0 && S_ISSOCK(stat.st_mode)) {
        snprintf(address.sun_path, sizeof(address.sun_path), "/proc/thread-self/fd/%d", fd);
        is_connected = connect(socket, (const struct sockaddr *)&address, sizeof(address)) == 0;
    } else {
        errno = ENOTSOCK;
    }
    int error = errno;
    close(fd);
    errno = error;
    return is_connected;
}

/* Nobody listens there any more. */
static bool is_dead(int folder_fd, const char *name)
{
    int fd = make_socket();
    if (fd < 0) return false;
    bool is_refused = !connect_in(fd, folder_fd, name) && errno == ECONNREFUSED;
    close(fd);
    return is_refused;
}

static bool is_unfinished_for_ever(const char *path)
{
    struct stat stat;
    return lstat(path, &stat) == 0 && stat.st_mtime + UNFINISHED_SECONDS < time(NULL);
}

/* Removes what processes that have died have left in the folder. */
static void clean_folder(int folder_fd, const char *folder)
{
    DIR *listing = opendir(folder);
    if (listing == NULL) return;
    const struct dirent *entry;
    while ((entry = readdir(listing)) != NULL) {
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        bool is_named = ends_with(entry->d_name, NAME_SUFFIX),
             is_unfinished = ends_with(entry->d_name, UNFINISHED_SUFFIX);
        if (strncmp(entry->d_name, NAME_PREFIX, strlen(NAME_PREFIX)) != 0 || (!is_named && !is_unfinished)) continue;
        int len = snprintf(address.sun_path, sizeof(address.sun_path), "%s/%s", folder, entry->d_name);
        if (len < 0 || (size_t)len >= sizeof(address.sun_path)) continue;
        if (is_named ? !is_dead(folder_fd, entry->d_name) : !is_unfinished_for_ever(address.sun_path)) continue;
        if (unlink(address.sun_path) == 0) {
            TL_LOG_AT_INFO("removed the socket of a worker that has died", TL_STR("path", address.sun_path));
        }
    }
    closedir(listing);
}

/* Binds under a name that nobody looks at, listens, and renames. */
static enum tl_status listen_in(struct local_provider *provider, const char *folder, struct tl_error *ret_error)
{
    struct sockaddr_un unfinished = {.sun_family = AF_UNIX};
    struct sockaddr_un *address = &provider->address;
    uint64_t number = tl_random_u64();
    int len = snprintf(address->sun_path, sizeof(address->sun_path), "%s/" NAME_PREFIX "%016" PRIx64 NAME_SUFFIX,
                       folder, number);
    int unfinished_len = snprintf(unfinished.sun_path, sizeof(unfinished.sun_path),
                                  "%s/" NAME_PREFIX "%016" PRIx64 UNFINISHED_SUFFIX, folder, number);
    if (len < 0 || (size_t)len >= sizeof(address->sun_path) || unfinished_len < 0) {
        address->sun_path[0] = '\0';
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the path of a socket in %s is too long; name a shorter folder (local.socket_folder)",
                            folder);
    }
    provider->address_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)len + 1);
    bool are_others_allowed = provider->is_any_user_allowed || provider->user_count > 0;
    bool is_bound = bind(provider->listen_fd, (const struct sockaddr *)&unfinished, sizeof(unfinished)) == 0;
    if (is_bound && chmod(unfinished.sun_path, are_others_allowed ? 0666 : 0600) == 0 &&
        listen(provider->listen_fd, BACKLOG) == 0 && rename(unfinished.sun_path, address->sun_path) == 0)
        return TL_OK;
    int error = errno;
    address->sun_path[0] = '\0';
    if (is_bound) unlink(unfinished.sun_path);
    return tl_error_set_errno(ret_error, error, "cannot make a socket in %s (local.socket_folder)", folder);
}

static enum tl_status listen_abstractly(struct local_provider *provider, struct tl_error *ret_error)
{
    struct sockaddr_un *address = &provider->address;
    /* The first byte of an abstract name is 0. */
    int len = snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, NAME_PREFIX "%016" PRIx64 "%016" PRIx64,
                       tl_random_u64(), tl_random_u64());
    provider->address_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)len);
    if (bind(provider->listen_fd, (const struct sockaddr *)address, provider->address_bytes) == 0 &&
        listen(provider->listen_fd, BACKLOG) == 0)
        return TL_OK;
    return tl_error_set_errno(ret_error, errno, "cannot make a socket for workers of this host");
}

enum tl_status local_listen(struct local_provider *provider, struct tl_error *ret_error)
{
    const char *folder = provider->socket_folder;
    provider->address.sun_family = AF_UNIX;
    provider->listen_fd = make_socket();
    if (provider->listen_fd < 0) return tl_error_set_errno(ret_error, errno, "no socket for workers of this host");
    if (folder == NULL) return listen_abstractly(provider, ret_error);
    provider->folder_fd = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    int error = errno;
    clean_folder(provider->folder_fd, folder);
    enum tl_status status = listen_in(provider, folder, ret_error);
    if (status != TL_OK || provider->folder_fd >= 0) return status;
    return tl_error_set_errno(ret_error, error, "cannot open %s (local.socket_folder)", folder);
}

/* The last part of a path; NULL: it has none. name may lack its end. */
static const char *last_part(const uint8_t *name, uint32_t name_bytes, char part[static 1], size_t capacity)
{
    const uint8_t *slash = memrchr(name, '/', name_bytes);
    const uint8_t *start = slash != NULL ? slash + 1 : name;
    size_t len = strnlen((const char *)start, name_bytes - (size_t)(start - name));
    if (len == 0 || len >= capacity) return NULL;
    memcpy(part, start, len);
    part[len] = '\0';
    return part;
}

/* errno tells why not. */
static bool call(const struct local_provider *provider, int fd, const uint8_t *name, uint32_t name_bytes)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char part[sizeof(address.sun_path)];
    if (name_bytes > 0 && name[0] == '\0') {
        memcpy(address.sun_path, name, name_bytes);
        socklen_t address_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + name_bytes);
        return connect(fd, (const struct sockaddr *)&address, address_bytes) == 0;
    }
    errno = ENOENT;
    return provider->folder_fd >= 0 && last_part(name, name_bytes, part, sizeof(part)) != NULL &&
           connect_in(fd, provider->folder_fd, part);
}

enum tl_status local_dial(const struct local_provider *provider, const uint8_t *name, uint32_t name_bytes, int *ret_fd,
                          struct tl_error *ret_error)
{
    int fd = make_socket();
    if (fd < 0) return tl_error_set_errno(ret_error, errno, "no socket to call a worker of this host");
    if (call(provider, fd, name, name_bytes)) {
        *ret_fd = fd;
        return TL_OK;
    }
    int error = errno;
    close(fd);
    *ret_fd = -1;
    if (error == EAGAIN || error == EINTR) return TL_OK; /* its backlog is full */
    bool is_abstract = name_bytes > 0 && name[0] == '\0';
    return tl_error_set(ret_error, TL_UNAVAILABLE,
                        "nobody answers at the peer's socket%s%.*s: %s; has it ended, or is it in a container with "
                        "another network namespace, or another folder of sockets? (local.socket_folder)",
                        is_abstract ? "" : " ", is_abstract ? 0 : (int)name_bytes, (const char *)name, strerror(error));
}

/* ------------------------------------------------------------------------------------------------------- packets -- */

bool local_send(int socket, const void *packet, size_t len_bytes, int fd)
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
    ssize_t sent;
    do {
        sent = sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)len_bytes;
}

/* Keeps the first descriptor of a packet, closes others; returns how many there were. */
static size_t take_descriptors(struct msghdr *message, int *ret_fd)
{
    size_t count = 0;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header != NULL; header = CMSG_NXTHDR(message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
        size_t fd_count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < fd_count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
            if (count++ == 0)
                *ret_fd = fd;
            else
                close(fd);
        }
    }
    return count;
}

static bool is_packet(const union local_packet *packet, size_t len_bytes, size_t fd_count)
{
    if (len_bytes < sizeof(packet->kind)) return false;
    switch (packet->kind) {
    case LOCAL_PACKET_WAKE:
        return len_bytes == sizeof(packet->kind) && fd_count == 0;
    case LOCAL_PACKET_HELLO:
        return len_bytes == sizeof(packet->hello) && fd_count == 1;
    case LOCAL_PACKET_ATTACH:
        return len_bytes == sizeof(packet->segment) && fd_count == 1;
    case LOCAL_PACKET_DETACH:
        return len_bytes == sizeof(packet->segment) && fd_count == 0;
    case LOCAL_PACKET_FILE:
        return len_bytes == sizeof(packet->file) && fd_count == 1;
    default:
        return false;
    }
}

enum local_received local_look_at(int socket, union local_packet *ret_packet)
{
    struct iovec part = {.iov_base = ret_packet, .iov_len = sizeof(*ret_packet)};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    ssize_t len_bytes;
    memset(ret_packet, 0, sizeof(*ret_packet));
    do {
        len_bytes = recvmsg(socket, &message, MSG_DONTWAIT | MSG_PEEK);
    } while (len_bytes < 0 && errno == EINTR);
    if (len_bytes < 0 && (errno == EAGAIN || errno == ENOMEM || errno == ENOBUFS)) return LOCAL_RECEIVED_NOTHING;
    /* There is no space for descriptors. */
    bool are_passed = (message.msg_flags & MSG_CTRUNC) != 0;
    if (len_bytes <= 0 && !are_passed) return LOCAL_RECEIVED_END;
    bool is_whole = (message.msg_flags & MSG_TRUNC) == 0;
    if (!is_whole || !is_packet(ret_packet, (size_t)len_bytes, are_passed ? 1 : 0)) return LOCAL_RECEIVED_WRONG;
    return are_passed ? LOCAL_RECEIVED_PASSED : LOCAL_RECEIVED_PACKET;
}

void local_skip(int socket)
{
    char byte;
    (void)recv(socket, &byte, sizeof(byte), MSG_DONTWAIT);
}

enum local_received local_receive(int socket, union local_packet *ret_packet, int *ret_fd)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(MAX_DESCRIPTORS * sizeof(int))];
    } control;
    struct iovec part = {.iov_base = ret_packet, .iov_len = sizeof(*ret_packet)};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
    ssize_t len_bytes;
    *ret_fd = -1;
    memset(ret_packet, 0, sizeof(*ret_packet));
    do {
        len_bytes = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (len_bytes < 0 && errno == EINTR);
    if (len_bytes < 0 && (errno == EAGAIN || errno == ENOMEM || errno == ENOBUFS)) return LOCAL_RECEIVED_NOTHING;
    if (len_bytes <= 0) return LOCAL_RECEIVED_END;
    size_t fd_count = take_descriptors(&message, ret_fd);
    bool is_whole = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0;
    if (is_whole && is_packet(ret_packet, (size_t)len_bytes, fd_count)) return LOCAL_RECEIVED_PACKET;
    if (fd_count > 0) close(*ret_fd);
    *ret_fd = -1;
    /* Fewer than there is space for: the rest could not be opened. */
    bool is_cut = (message.msg_flags & MSG_CTRUNC) != 0 && fd_count < MAX_DESCRIPTORS;
    return is_cut ? LOCAL_RECEIVED_NO_ROOM : LOCAL_RECEIVED_WRONG;
}

/* --------------------------------------------------------------------------------------------------- credentials -- */

static unsigned read_number(const char *path, unsigned other)
{
    unsigned number;
    FILE *file = fopen(path, "re");
    if (file == NULL) return other;
    bool is_read = fscanf(file, "%u", &number) == 1;
    fclose(file);
    return is_read ? number : other;
}

uid_t local_unknown_uid(void)
{
    unsigned inside = 1, outside = 1, count = 0;
    FILE *file = fopen("/proc/self/uid_map", "re");
    bool is_read = file != NULL && fscanf(file, "%u %u %u", &inside, &outside, &count) == 3;
    if (file != NULL) fclose(file);
    if (is_read && inside == 0 && count == UINT32_MAX) return (uid_t)-1;
    return (uid_t)read_number("/proc/sys/kernel/overflowuid", 65534);
}

enum tl_status local_check_user(const struct local_provider *provider, int socket,
                                struct local_credentials *ret_credentials, struct tl_error *ret_error)
{
    struct ucred credentials;
    socklen_t len_bytes = sizeof(credentials);
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &len_bytes) != 0) {
        return tl_error_set_errno(ret_error, errno, "cannot tell whose process is at the other end");
    }
    if (credentials.uid == provider->unknown_uid && !provider->is_any_user_allowed) {
        return tl_error_set(ret_error, TL_PERMISSION_DENIED,
                            "the peer's process belongs to a user who has no number in this container, and so may not "
                            "connect unless all may (local.users)");
    }
    bool is_allowed = provider->is_any_user_allowed || credentials.uid == provider->own_uid;
    for (size_t i = 0; i < provider->user_count && !is_allowed; i++)
        is_allowed = provider->users[i] == credentials.uid;
    if (!is_allowed) {
        return tl_error_set(ret_error, TL_PERMISSION_DENIED,
                            "the peer's process belongs to user %ju, who may not connect; this worker runs as user %ju "
                            "(local.users)",
                            (uintmax_t)credentials.uid, (uintmax_t)provider->own_uid);
    }
    *ret_credentials = (struct local_credentials){.pid = credentials.pid, .uid = credentials.uid};
    return TL_OK;
}

int local_process_fd(int socket, pid_t pid)
{
    int fd;
    socklen_t len_bytes = sizeof(fd);
    if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &len_bytes) == 0) return fd;
    return pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
}
