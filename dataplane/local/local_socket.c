// SPDX-License-Identifier: Apache-2.0
/*
 * The sockets of the local provider: accept sockets, which receive the HELLO of a peer, and control sockets.
 *
 * An accept socket is a datagram socket with a name. The kernel runs its filter before it queues a packet, and drops a
 * packet without the token of the queue pair while it is being sent. So only the peer that has got the token can leave
 * something in the socket. A connection has two control sockets, one for each direction, each made by its reader.
 *
 * An accept socket that is a file is renamed to its final name when it is bound. So a file whose socket refuses
 * connections belongs to a process that has died, and the next provider that opens in the folder removes it. Nothing
 * here blocks.
 */
#include <dirent.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/filter.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "base/random.h"
#include "dataplane/local/local_internal.h"

#define NAME_PREFIX "tensorlane-"
#define NAME_SUFFIX ".sock"
#define UNFINISHED_SUFFIX ".new"
/* After this time a socket that still has its temporary name belongs to a process that has died. */
#define UNFINISHED_SECONDS 60
#define MAX_DESCRIPTORS 4

/* ---------------------------------------------------------------------------------------------- accept sockets -- */

void local_choose_token(uint8_t ret_token[LOCAL_TOKEN_BYTES])
{
    const uint64_t token[2] = {tl_random_u64(), tl_random_u64()};
    _Static_assert(sizeof(token) == LOCAL_TOKEN_BYTES, "two numbers");
    memcpy(ret_token, token, sizeof(token));
}

/* Sets a filter that passes only packets that have the token where a HELLO has `to`. */
static bool set_filter(int fd, const uint8_t *token)
{
    enum { WORDS = LOCAL_TOKEN_BYTES / 4 };
    struct sock_filter steps[2 * WORDS + 2];
    uint32_t words[WORDS];
    memcpy(words, token, LOCAL_TOKEN_BYTES);
    for (unsigned i = 0; i < WORDS; i++) {
        uint32_t at = (uint32_t)offsetof(struct local_hello, to) + 4 * i;
        uint8_t rest = (uint8_t)(2 * (WORDS - i - 1) + 1); /* jumps to the last step */
        steps[2 * i] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at);
        steps[2 * i + 1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, be32toh(words[i]), 0, rest);
    }
    steps[2 * WORDS] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, UINT32_MAX);
    steps[2 * WORDS + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, 0);
    const struct sock_fprog filter = {.len = TL_ARRAY_COUNT(steps), .filter = steps};
    return setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof(filter)) == 0;
}

static bool ends_with(const char *text, const char *end)
{
    size_t len = strlen(text), end_len = strlen(end);
    return len >= end_len && strcmp(text + len - end_len, end) == 0;
}

/* Composes the path of this name in the folder. Returns false when it does not fit. */
static bool find_path(const char *folder, const char *name, struct sockaddr_un *ret_address)
{
    *ret_address = (struct sockaddr_un){.sun_family = AF_UNIX};
    int len = snprintf(ret_address->sun_path, sizeof(ret_address->sun_path), "%s/%s", folder, name);
    return len > 0 && (size_t)len < sizeof(ret_address->sun_path);
}

/* Returns whether no process has this socket any more. */
static bool is_dead(const struct sockaddr_un *address)
{
    int caller = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool is_refused = caller >= 0 && connect(caller, (const struct sockaddr *)address, sizeof(*address)) != 0 &&
                      errno == ECONNREFUSED;
    if (caller >= 0) close(caller);
    return is_refused;
}

static bool is_unfinished_for_ever(const char *path)
{
    struct stat stat;
    return lstat(path, &stat) == 0 && stat.st_mtime + UNFINISHED_SECONDS < time(NULL);
}

void local_clean_folder(const char *folder)
{
    DIR *listing = opendir(folder);
    if (listing == NULL) return;
    const struct dirent *entry;
    while ((entry = readdir(listing)) != NULL) {
        const char *name = entry->d_name;
        struct sockaddr_un address;
        bool is_named = ends_with(name, NAME_SUFFIX), is_unfinished = ends_with(name, UNFINISHED_SUFFIX);
        if (strncmp(name, NAME_PREFIX, strlen(NAME_PREFIX)) != 0 || (!is_named && !is_unfinished)) continue;
        if (!find_path(folder, name, &address)) continue;
        if (is_named ? !is_dead(&address) : !is_unfinished_for_ever(address.sun_path)) continue;
        if (unlink(address.sun_path) == 0) {
            TL_LOG_AT_INFO("removed the socket of a worker that has died", TL_STR("folder", folder),
                           TL_STR("name", name));
        }
    }
    closedir(listing);
}

/* Binds the socket under a name that no other worker looks at, and renames it. The mode of the socket becomes that of
 * the file. */
static enum tl_status name_in_folder(const struct local_provider *provider, int fd, struct sockaddr_un *address,
                                     socklen_t *ret_bytes, struct tl_error *ret_error)
{
    char name[64], unfinished_name[64];
    struct sockaddr_un unfinished;
    const char *folder = provider->socket_folder;
    uint64_t number = tl_random_u64();
    snprintf(name, sizeof(name), NAME_PREFIX "%016" PRIx64 NAME_SUFFIX, number);
    snprintf(unfinished_name, sizeof(unfinished_name), NAME_PREFIX "%016" PRIx64 UNFINISHED_SUFFIX, number);
    if (!find_path(folder, name, address) || !find_path(folder, unfinished_name, &unfinished)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the path of a socket in %s is too long; name a shorter folder (local.socket_folder)",
                            folder);
    }
    *ret_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(address->sun_path) + 1);
    bool is_bound = fchmod(fd, 0600) == 0 && bind(fd, (const struct sockaddr *)&unfinished, sizeof(unfinished)) == 0;
    if (is_bound && rename(unfinished.sun_path, address->sun_path) == 0) return TL_OK;
    int error = errno;
    if (is_bound) unlink(unfinished.sun_path);
    return tl_error_set_errno(ret_error, error, "cannot make a socket in %s (local.socket_folder)", folder);
}

/* Binds the socket to a random abstract name. Returns false with errno on failure. */
static bool name_abstractly(int fd, struct sockaddr_un *address, socklen_t *ret_bytes)
{
    /* The first byte of an abstract name is 0. */
    int len = snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, NAME_PREFIX "%016" PRIx64 "%016" PRIx64,
                       tl_random_u64(), tl_random_u64());
    *ret_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)len);
    return bind(fd, (const struct sockaddr *)address, *ret_bytes) == 0;
}

enum tl_status local_accept_socket_open(const struct local_provider *provider, struct local_address *self,
                                        int *ret_accept_socket, struct tl_error *ret_error)
{
    static const int yes = 1;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t address_bytes = 0;
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return tl_error_set_errno(ret_error, errno, "no socket for workers of this host");
    enum tl_status status = TL_OK;
    if (!set_filter(fd, self->token) || setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &yes, sizeof(yes)) != 0) {
        status = tl_error_set(ret_error, TL_UNAVAILABLE,
                              "the kernel does not let a socket refuse strangers: %s (SO_ATTACH_FILTER, SO_PASSCRED)",
                              strerror(errno));
    } else if (provider->socket_folder != NULL) {
        status = name_in_folder(provider, fd, &address, &address_bytes, ret_error);
    } else if (!name_abstractly(fd, &address, &address_bytes)) {
        status = tl_error_set_errno(ret_error, errno, "cannot make a socket for workers of this host");
    }
    if (status != TL_OK) {
        close(fd);
        return status;
    }
    self->name_bytes = (uint32_t)(address_bytes - offsetof(struct sockaddr_un, sun_path));
    memcpy(self->name, address.sun_path, self->name_bytes);
    *ret_accept_socket = fd;
    return TL_OK;
}

/* Copies the last part of the path in the address, which may lack its final zero. Returns false when the path has no
 * such part. */
static bool get_last_part(const struct local_address *of, char part[static 1], size_t capacity)
{
    const uint8_t *slash = memrchr(of->name, '/', of->name_bytes);
    const uint8_t *start = slash != NULL ? slash + 1 : of->name;
    size_t len = strnlen((const char *)start, of->name_bytes - (size_t)(start - of->name));
    if (len == 0 || len >= capacity) return false;
    memcpy(part, start, len);
    part[len] = '\0';
    return true;
}

static bool is_abstract(const struct local_address *pair_address)
{
    return pair_address->name_bytes > 0 && pair_address->name[0] == '\0';
}

/* Returns whether a worker can have made this abstract name. No other socket is used, whatever the peer says. */
static bool is_of_ours(const struct local_address *pair_address)
{
    return pair_address->name_bytes > strlen(NAME_PREFIX) &&
           memcmp(pair_address->name + 1, NAME_PREFIX, strlen(NAME_PREFIX)) == 0;
}

void local_accept_socket_remove_name(const struct local_address *self)
{
    if (!is_abstract(self)) (void)unlink((const char *)self->name);
}

/* ----------------------------------------------------------------------------------------------------- packets -- */

union control {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(MAX_DESCRIPTORS * sizeof(int)) + CMSG_SPACE(sizeof(struct ucred))];
};

bool local_send_to(int socket, const struct sockaddr_un *to, socklen_t to_bytes, const void *packet, size_t len_bytes,
                   const int *fds, size_t fd_count)
{
    union control control = {0};
    struct iovec part = {.iov_base = (void *)(uintptr_t)packet, .iov_len = len_bytes};
    struct msghdr message = {
        .msg_name = (void *)(uintptr_t)to, .msg_namelen = to_bytes, .msg_iov = &part, .msg_iovlen = 1};
    TL_CHECK(fd_count <= MAX_DESCRIPTORS);
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

bool local_send(int socket, const void *packet, size_t len_bytes, int fd)
{
    return local_send_to(socket, NULL, 0, packet, len_bytes, &fd, fd >= 0 ? 1 : 0);
}

/* Finds the address of the peer's accept socket on this side. Returns false when its name is not one that a worker
 * makes. */
static bool find_peer(const struct local_provider *provider, const struct local_address *peer,
                      struct sockaddr_un *ret_address, socklen_t *ret_bytes)
{
    char part[sizeof(peer->name)];
    *ret_bytes = sizeof(*ret_address);
    if (!is_abstract(peer)) {
        return provider->socket_folder != NULL && get_last_part(peer, part, sizeof(part)) &&
               find_path(provider->socket_folder, part, ret_address);
    }
    *ret_address = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(ret_address->sun_path, peer->name, peer->name_bytes);
    *ret_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + peer->name_bytes);
    return is_of_ours(peer);
}

enum tl_status local_call(const struct local_provider *provider, int accept_socket, const struct local_address *peer,
                          const struct local_hello *hello, const int fds[LOCAL_HELLO_DESCRIPTORS],
                          struct tl_error *ret_error)
{
    struct sockaddr_un address;
    socklen_t address_bytes;
    errno = ECONNREFUSED;
    bool is_sent =
        find_peer(provider, peer, &address, &address_bytes) &&
        local_send_to(accept_socket, &address, address_bytes, hello, sizeof(*hello), fds, LOCAL_HELLO_DESCRIPTORS);
    if (is_sent) return TL_OK;
    return tl_error_set(ret_error, TL_UNAVAILABLE,
                        "no worker answers at the peer's socket%s%.*s: %s; has it ended, or is it in a container with "
                        "another network namespace, or another folder of sockets? (local.socket_folder)",
                        is_abstract(peer) ? "" : " ", is_abstract(peer) ? 0 : (int)peer->name_bytes,
                        (const char *)peer->name, strerror(errno));
}

/* Keeps the first LOCAL_HELLO_DESCRIPTORS descriptors of a packet and closes the others. Returns how many there
 * were. */
static size_t take_descriptors(struct msghdr *message, int *ret_fds)
{
    size_t count = 0;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header != NULL; header = CMSG_NXTHDR(message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
        size_t fd_count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < fd_count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
            if (count < LOCAL_HELLO_DESCRIPTORS)
                ret_fds[count] = fd;
            else
                close(fd);
            count++;
        }
    }
    return count;
}

/* Returns how many descriptors a packet of this kind and length has; -1: there is no such packet. */
static int count_descriptors_of(const union local_packet *packet, size_t len_bytes)
{
    if (len_bytes < sizeof(packet->kind)) return -1;
    switch (packet->kind) {
    case LOCAL_PACKET_WAKE:
        return len_bytes == sizeof(packet->kind) ? 0 : -1;
    case LOCAL_PACKET_HELLO:
        return len_bytes == sizeof(packet->hello) ? LOCAL_HELLO_DESCRIPTORS : -1;
    case LOCAL_PACKET_ATTACH:
        return len_bytes == sizeof(packet->segment) ? 1 : -1;
    case LOCAL_PACKET_DETACH:
        return len_bytes == sizeof(packet->segment) ? 0 : -1;
    case LOCAL_PACKET_FILE:
        return len_bytes == sizeof(packet->file) ? 1 : -1;
    default:
        return -1;
    }
}

enum local_received local_peek_packet(int socket, union local_packet *ret_packet,
                                      struct local_credentials *ret_credentials)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(struct ucred))];
    } control;
    struct iovec part = {.iov_base = ret_packet, .iov_len = sizeof(*ret_packet)};
    /* The message has no space for descriptors, so that none is opened. */
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
    struct ucred sender = {.pid = 0, .uid = (uid_t)-1};
    ssize_t len_bytes;
    memset(ret_packet, 0, sizeof(*ret_packet));
    do {
        len_bytes = recvmsg(socket, &message, MSG_DONTWAIT | MSG_PEEK);
    } while (len_bytes < 0 && errno == EINTR);
    if (len_bytes < 0 && (errno == EAGAIN || errno == ENOMEM || errno == ENOBUFS)) return LOCAL_RECEIVED_NOTHING;
    if (len_bytes < 0) return LOCAL_RECEIVED_END;
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_CREDENTIALS)
        memcpy(&sender, CMSG_DATA(header), sizeof(sender));
    *ret_credentials = (struct local_credentials){.pid = sender.pid, .uid = sender.uid};
    bool is_whole = (message.msg_flags & MSG_TRUNC) == 0 && count_descriptors_of(ret_packet, (size_t)len_bytes) >= 0;
    return is_whole ? LOCAL_RECEIVED_PACKET : LOCAL_RECEIVED_WRONG;
}

enum local_received local_receive(int socket, union local_packet *ret_packet, int ret_fds[LOCAL_HELLO_DESCRIPTORS])
{
    union control control;
    struct iovec part = {.iov_base = ret_packet, .iov_len = sizeof(*ret_packet)};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};
    ssize_t len_bytes;
    ret_fds[0] = ret_fds[1] = -1;
    memset(ret_packet, 0, sizeof(*ret_packet));
    do {
        len_bytes = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (len_bytes < 0 && errno == EINTR);
    if (len_bytes < 0 && (errno == EAGAIN || errno == ENOMEM || errno == ENOBUFS)) return LOCAL_RECEIVED_NOTHING;
    if (len_bytes <= 0) return LOCAL_RECEIVED_END;
    size_t fd_count = take_descriptors(&message, ret_fds);
    bool is_whole = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0;
    if (is_whole && count_descriptors_of(ret_packet, (size_t)len_bytes) == (int)fd_count) return LOCAL_RECEIVED_PACKET;
    for (size_t i = 0; i < LOCAL_HELLO_DESCRIPTORS; i++) {
        if (ret_fds[i] >= 0) close(ret_fds[i]);
        ret_fds[i] = -1;
    }
    /* The packet was cut although there was space for more descriptors: this process could not open the rest. */
    bool is_cut = (message.msg_flags & MSG_CTRUNC) != 0 && fd_count < MAX_DESCRIPTORS;
    return is_cut ? LOCAL_RECEIVED_NO_DESCRIPTOR : LOCAL_RECEIVED_WRONG;
}

enum tl_status local_control_socket_make(int *ret_own, int *ret_peers, struct tl_error *ret_error)
{
    static const int yes = 1;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t address_bytes;
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
        return tl_error_set_errno(ret_error, errno, "no socket for a worker of this host");
    /* Workers of earlier releases accept only a socket that has a name. */
    if (setsockopt(ends[0], SOL_SOCKET, SO_PASSCRED, &yes, sizeof(yes)) == 0 &&
        name_abstractly(ends[1], &address, &address_bytes)) {
        *ret_own = ends[0];
        *ret_peers = ends[1];
        return TL_OK;
    }
    int error = errno;
    close(ends[0]);
    close(ends[1]);
    return tl_error_set_errno(ret_error, error, "cannot make a socket for a worker of this host");
}

bool local_is_control_socket(int fd)
{
    int domain = 0, type = 0;
    socklen_t domain_bytes = sizeof(domain), type_bytes = sizeof(type);
    return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &domain_bytes) == 0 && domain == AF_UNIX &&
           getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &type_bytes) == 0 && type == SOCK_SEQPACKET;
}

/* ------------------------------------------------------------------------------------------------- credentials -- */

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

enum tl_status local_check_user(const struct local_provider *provider, uid_t uid, struct tl_error *ret_error)
{
    if (uid == provider->unknown_uid) {
        return tl_error_set(ret_error, TL_PERMISSION_DENIED,
                            "the peer's process belongs to a user who has no number in this container; only workers of "
                            "one user share memory");
    }
    if (uid == provider->own_uid) return TL_OK;
    return tl_error_set(ret_error, TL_PERMISSION_DENIED,
                        "the peer's process belongs to user %ju and this worker to user %ju; only workers of one user "
                        "share memory",
                        (uintmax_t)uid, (uintmax_t)provider->own_uid);
}

int local_process_fd(pid_t pid)
{
    errno = ESRCH;
    return pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
}
