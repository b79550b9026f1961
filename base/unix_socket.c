// SPDX-License-Identifier: Apache-2.0
#include "base/unix_socket.h"

#include <dirent.h>
#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <linux/filter.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"
#include "base/random.h"

/* ------------------------------------------------------------------------------------------------------- names -- */

void tl_unix_address_set(struct tl_unix_address *address, const void *name, size_t name_bytes)
{
    TL_CHECK(name_bytes <= sizeof(address->address.sun_path));
    *address = (struct tl_unix_address){.address.sun_family = AF_UNIX};
    address->len_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + name_bytes);
    memcpy(address->address.sun_path, name, name_bytes);
}

bool tl_unix_address_in_folder(struct tl_unix_address *address, const char *folder, const char *name)
{
    char path[sizeof(address->address.sun_path)];
    int len = snprintf(path, sizeof(path), "%s/%s", folder, name);
    if (len < 0 || (size_t)len >= sizeof(path)) return false;
    tl_unix_address_set(address, path, (size_t)len + 1);
    return true;
}

void tl_unix_address_choose(struct tl_unix_address *address, const char *prefix)
{
    char name[sizeof(address->address.sun_path)];
    int len =
        snprintf(name, sizeof(name), "%c%s%016" PRIx64 "%016" PRIx64, '\0', prefix, tl_random_u64(), tl_random_u64());
    TL_CHECK(len > 0 && (size_t)len < sizeof(name));
    tl_unix_address_set(address, name, (size_t)len);
}

bool tl_unix_socket_bind(int socket, const struct tl_unix_address *address)
{
    return bind(socket, (const struct sockaddr *)&address->address, address->len_bytes) == 0;
}

static bool ends_with(const char *text, const char *end)
{
    size_t len = strlen(text), end_len = strlen(end);
    return len >= end_len && strcmp(text + len - end_len, end) == 0;
}

/* Returns whether this is a socket that no process has any more. connect refuses files of other kinds, too. */
static bool is_dead(const struct tl_unix_address *address)
{
    struct stat status;
    if (lstat(address->address.sun_path, &status) != 0 || !S_ISSOCK(status.st_mode)) return false;
    int caller = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool is_refused = caller >= 0 &&
                      connect(caller, (const struct sockaddr *)&address->address, address->len_bytes) != 0 &&
                      errno == ECONNREFUSED;
    if (caller >= 0) close(caller);
    return is_refused;
}

void tl_unix_socket_clean_folder(const char *folder, const char *prefix, const char *suffix)
{
    DIR *listing = opendir(folder);
    if (listing == NULL) return;
    const struct dirent *entry;
    while ((entry = readdir(listing)) != NULL) {
        const char *name = entry->d_name;
        struct tl_unix_address address;
        if (strncmp(name, prefix, strlen(prefix)) != 0 || !ends_with(name, suffix)) continue;
        if (!tl_unix_address_in_folder(&address, folder, name) || !is_dead(&address)) continue;
        if (unlink(address.address.sun_path) == 0) {
            TL_LOG_AT_INFO("removed the socket of a process that has died", TL_STR("folder", folder),
                           TL_STR("name", name));
        }
    }
    closedir(listing);
}

/* ----------------------------------------------------------------------------------------------------- packets -- */

bool tl_unix_socket_filter(int socket, size_t offset_bytes, const uint8_t *bytes, size_t len_bytes)
{
    struct sock_filter steps[2 * TL_UNIX_MAX_FILTER_BYTES / 4 + 2];
    unsigned count = 0, last = (unsigned)len_bytes / 2 + 1;
    TL_CHECK(len_bytes % 4 == 0 && len_bytes <= TL_UNIX_MAX_FILTER_BYTES);
    for (size_t i = 0; i < len_bytes; i += 4) {
        uint32_t word;
        memcpy(&word, bytes + i, sizeof(word));
        steps[count++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)(offset_bytes + i));
        uint8_t rest = (uint8_t)(last - count - 1); /* jumps to the last step */
        steps[count++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, be32toh(word), 0, rest);
    }
    steps[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, UINT32_MAX);
    steps[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, 0);
    const struct sock_fprog filter = {.len = (unsigned short)count, .filter = steps};
    return setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof(filter)) == 0;
}

union control {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(TL_UNIX_MAX_DESCRIPTORS * sizeof(int)) + CMSG_SPACE(sizeof(struct ucred))];
};

bool tl_unix_socket_send(int socket, const struct tl_unix_address *to, const void *packet, size_t len_bytes,
                         const int *fds, size_t fd_count)
{
    union control control = {0};
    struct iovec part = {.iov_base = (void *)(uintptr_t)packet, .iov_len = len_bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    TL_CHECK(fd_count <= TL_UNIX_MAX_DESCRIPTORS);
    if (to != NULL) {
        message.msg_name = (void *)(uintptr_t)&to->address;
        message.msg_namelen = to->len_bytes;
    }
    if (fd_count > 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(fd_count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(fd_count * sizeof(int));
        memcpy(CMSG_DATA(header), fds, fd_count * sizeof(int));
    }
    ssize_t sent;
    do {
        sent = sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)len_bytes;
}

static enum tl_unix_received receive(int socket, struct msghdr *message, int flags, size_t *ret_len_bytes)
{
    ssize_t len_bytes;
    do {
        len_bytes = recvmsg(socket, message, flags | MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (len_bytes < 0 && errno == EINTR);
    if (len_bytes < 0) message->msg_controllen = 0;
    if (len_bytes < 0 && (errno == EAGAIN || errno == ENOMEM || errno == ENOBUFS)) return TL_UNIX_NOTHING;
    if (len_bytes <= 0) return TL_UNIX_END;
    *ret_len_bytes = (size_t)len_bytes;
    return (message->msg_flags & MSG_TRUNC) == 0 ? TL_UNIX_PACKET : TL_UNIX_WRONG;
}

enum tl_unix_received tl_unix_socket_peek(int socket, void *packet, size_t capacity_bytes, size_t *ret_len_bytes,
                                          struct ucred *ret_sender)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(struct ucred))];
    } control;
    struct iovec part = {.iov_base = packet, .iov_len = capacity_bytes};
    /* The credentials leave no space for descriptors, so that none is opened. */
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
    enum tl_unix_received received = receive(socket, &message, MSG_PEEK, ret_len_bytes);
    *ret_sender = (struct ucred){.pid = 0, .uid = (uid_t)-1, .gid = (gid_t)-1};
    if (received != TL_UNIX_PACKET) return received;
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_CREDENTIALS)
        memcpy(ret_sender, CMSG_DATA(header), sizeof(*ret_sender));
    return received;
}

/* Returns how many descriptors the message has. There is space for no more than TL_UNIX_MAX_DESCRIPTORS. */
static size_t take_descriptors(struct msghdr *message, int *ret_fds)
{
    size_t count = 0;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header != NULL; header = CMSG_NXTHDR(message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
        count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(ret_fds, CMSG_DATA(header), count * sizeof(int));
    }
    return count;
}

enum tl_unix_received tl_unix_socket_receive(int socket, void *packet, size_t capacity_bytes, size_t *ret_len_bytes,
                                             int ret_fds[TL_UNIX_MAX_DESCRIPTORS], size_t *ret_fd_count)
{
    union control control;
    int fds[sizeof(control) / sizeof(int)]; /* without SO_PASSCRED its space may hold descriptors, too */
    struct iovec part = {.iov_base = packet, .iov_len = capacity_bytes};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
    enum tl_unix_received received = receive(socket, &message, 0, ret_len_bytes);
    *ret_fd_count = 0;
    if (received == TL_UNIX_NOTHING) return received;
    size_t fd_count = take_descriptors(&message, fds);
    bool is_cut = (message.msg_flags & MSG_CTRUNC) != 0;
    if (received == TL_UNIX_PACKET && !is_cut && fd_count <= TL_UNIX_MAX_DESCRIPTORS) {
        memcpy(ret_fds, fds, fd_count * sizeof(int));
        *ret_fd_count = fd_count;
        return received;
    }
    for (size_t i = 0; i < fd_count; i++)
        close(fds[i]);
    if (received == TL_UNIX_END) return received;
    /* The packet was cut although there was space for more descriptors: this process could not open the rest. */
    return is_cut && fd_count < TL_UNIX_MAX_DESCRIPTORS ? TL_UNIX_NO_DESCRIPTOR : TL_UNIX_WRONG;
}

/* ------------------------------------------------------------------------------------------------- credentials -- */

static bool read_numbers(const char *path, unsigned *numbers, int count)
{
    FILE *file = fopen(path, "re");
    int read = 0;
    while (file != NULL && read < count && fscanf(file, "%u", &numbers[read]) == 1)
        read++;
    if (file != NULL) fclose(file);
    return read == count;
}

uid_t tl_unix_unknown_uid(void)
{
    unsigned map[3], unknown = 65534; /* first user inside, first user outside, number of users */
    if (read_numbers("/proc/self/uid_map", map, 3) && map[0] == 0 && map[2] == UINT32_MAX) return (uid_t)-1;
    (void)read_numbers("/proc/sys/kernel/overflowuid", &unknown, 1);
    return (uid_t)unknown;
}
