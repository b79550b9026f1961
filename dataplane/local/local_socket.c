// SPDX-License-Identifier: Apache-2.0
/*
 * The sockets of the local provider: accept sockets, which receive the HELLO of a peer, and control sockets. The
 * address of a queue pair names its accept socket, and travels over the control plane.
 *
 * An accept socket is a datagram socket with a name. The kernel runs its filter before it queues a packet, and drops a
 * packet without the token of the queue pair while it is being sent. So only the peer that has got the token can leave
 * something in the socket. A connection has two control sockets, one for each direction, each made by its reader.
 *
 * A file whose socket refuses connections belongs to a process that has died; the next provider that opens in the
 * folder removes it. It may remove one that is being bound at that moment, too; then that pair is made again. Nothing
 * here blocks.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/random.h"
#include "dataplane/local/local_internal.h"

#define NAME_PREFIX "tensorlane-"
#define NAME_SUFFIX ".sock"

/* ---------------------------------------------------------------------------------------------- accept sockets -- */

void local_choose_token(uint8_t ret_token[LOCAL_TOKEN_BYTES])
{
    const uint64_t token[2] = {tl_random_u64(), tl_random_u64()};
    _Static_assert(sizeof(token) == LOCAL_TOKEN_BYTES, "two numbers");
    memcpy(ret_token, token, sizeof(token));
}

void local_clean_folder(const char *folder)
{
    tl_unix_socket_clean_folder(folder, NAME_PREFIX, NAME_SUFFIX);
}

/* Binds the socket to a file in the folder; the mode of the socket becomes that of the file. */
static enum tl_status name_in_folder(const char *folder, int fd, struct tl_unix_address *address,
                                     struct tl_error *ret_error)
{
    char name[64];
    snprintf(name, sizeof(name), NAME_PREFIX "%016" PRIx64 NAME_SUFFIX, tl_random_u64());
    if (!tl_unix_address_in_folder(address, folder, name)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "the path of a socket in %s is too long; name a shorter folder (local.socket_folder)",
                            folder);
    }
    if (fchmod(fd, 0600) == 0 && tl_unix_socket_bind(fd, address)) return TL_OK;
    return tl_error_set_errno(ret_error, errno, "cannot make a socket in %s (local.socket_folder)", folder);
}

/* Binds the socket to a random abstract name. Returns false with errno on failure. */
static bool name_abstractly(int fd, struct tl_unix_address *address)
{
    tl_unix_address_choose(address, NAME_PREFIX);
    return tl_unix_socket_bind(fd, address);
}

enum tl_status local_accept_socket_open(const struct local_provider *provider, struct local_address *self,
                                        int *ret_accept_socket, struct tl_error *ret_error)
{
    static const int yes = 1;
    struct tl_unix_address address = {.len_bytes = 0};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return tl_error_set_errno(ret_error, errno, "no socket for workers of this host");
    enum tl_status status = TL_OK;
    if (!tl_unix_socket_filter(fd, offsetof(struct local_hello, to), self->token, LOCAL_TOKEN_BYTES) ||
        setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &yes, sizeof(yes)) != 0) {
        status = tl_error_set(ret_error, TL_UNAVAILABLE,
                              "the kernel cannot refuse packets of other senders: %s (SO_ATTACH_FILTER, SO_PASSCRED)",
                              strerror(errno));
    } else if (provider->socket_folder != NULL) {
        status = name_in_folder(provider->socket_folder, fd, &address, ret_error);
    } else if (!name_abstractly(fd, &address)) {
        status = tl_error_set_errno(ret_error, errno, "cannot make a socket for workers of this host");
    }
    if (status != TL_OK) {
        close(fd);
        return status;
    }
    self->name_bytes = (uint8_t)(address.len_bytes - offsetof(struct sockaddr_un, sun_path));
    memcpy(self->name, address.address.sun_path, self->name_bytes);
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

bool local_send(int socket, const void *packet, size_t len_bytes, int fd)
{
    return tl_unix_socket_send(socket, NULL, packet, len_bytes, &fd, fd >= 0 ? 1 : 0);
}

/* Finds the address of the peer's accept socket on this side. Returns false when its name is not one that a worker
 * makes. */
static bool find_peer(const struct local_provider *provider, const struct local_address *peer,
                      struct tl_unix_address *ret_address)
{
    char part[sizeof(peer->name)];
    if (!is_abstract(peer)) {
        return provider->socket_folder != NULL && get_last_part(peer, part, sizeof(part)) &&
               tl_unix_address_in_folder(ret_address, provider->socket_folder, part);
    }
    tl_unix_address_set(ret_address, peer->name, peer->name_bytes);
    return is_of_ours(peer);
}

enum tl_status local_call(const struct local_provider *provider, int accept_socket, const struct local_address *peer,
                          const struct local_hello *hello, const int fds[LOCAL_HELLO_DESCRIPTORS],
                          struct tl_error *ret_error)
{
    struct tl_unix_address address;
    errno = ECONNREFUSED;
    bool is_sent = find_peer(provider, peer, &address) &&
                   tl_unix_socket_send(accept_socket, &address, hello, sizeof(*hello), fds, LOCAL_HELLO_DESCRIPTORS);
    if (is_sent) return TL_OK;
    return tl_error_set(ret_error, TL_UNAVAILABLE,
                        "no worker answers at the peer's socket%s%.*s: %s; has it ended, or is it in a container with "
                        "another network namespace, or another folder of sockets? (local.socket_folder)",
                        is_abstract(peer) ? "" : " ", is_abstract(peer) ? 0 : (int)peer->name_bytes,
                        (const char *)peer->name, strerror(errno));
}

/* Returns how many descriptors a packet of this kind and length has; -1: there is no such packet. */
static int count_descriptors_of(const union local_packet *packet, size_t len_bytes)
{
    if (len_bytes < sizeof(packet->kind)) return -1;
    switch (packet->kind) {
    case LOCAL_PACKET_HELLO:
        return len_bytes == sizeof(packet->hello) ? LOCAL_HELLO_DESCRIPTORS : -1;
    case LOCAL_PACKET_ATTACH:
        return len_bytes == sizeof(packet->segment) ? 1 : -1;
    case LOCAL_PACKET_DETACH:
        return len_bytes == sizeof(packet->segment) ? 0 : -1;
    case LOCAL_PACKET_FILE:
        return len_bytes == sizeof(packet->file) ? 1 : -1;
    case LOCAL_PACKET_MEMORY:
        return len_bytes == sizeof(packet->memory) ? 1 : -1;
    case LOCAL_PACKET_FORGET:
        return len_bytes == sizeof(packet->memory) ? 0 : -1;
    default:
        return -1;
    }
}

enum tl_unix_received local_peek_packet(int socket, union local_packet *ret_packet, struct ucred *ret_sender)
{
    size_t len_bytes;
    memset(ret_packet, 0, sizeof(*ret_packet));
    enum tl_unix_received received =
        tl_unix_socket_peek(socket, ret_packet, sizeof(*ret_packet), &len_bytes, ret_sender);
    bool is_packet = received == TL_UNIX_PACKET && count_descriptors_of(ret_packet, len_bytes) >= 0;
    return received == TL_UNIX_PACKET && !is_packet ? TL_UNIX_WRONG : received;
}

enum tl_unix_received local_receive(int socket, union local_packet *ret_packet, int ret_fds[LOCAL_HELLO_DESCRIPTORS])
{
    size_t len_bytes, fd_count;
    int fds[TL_UNIX_MAX_DESCRIPTORS] = {-1, -1, -1, -1};
    _Static_assert(LOCAL_HELLO_DESCRIPTORS <= TL_UNIX_MAX_DESCRIPTORS, "fits");
    memset(ret_packet, 0, sizeof(*ret_packet));
    memcpy(ret_fds, fds, LOCAL_HELLO_DESCRIPTORS * sizeof(*fds));
    enum tl_unix_received received =
        tl_unix_socket_receive(socket, ret_packet, sizeof(*ret_packet), &len_bytes, fds, &fd_count);
    if (received != TL_UNIX_PACKET) return received;
    if (count_descriptors_of(ret_packet, len_bytes) == (int)fd_count) {
        memcpy(ret_fds, fds, LOCAL_HELLO_DESCRIPTORS * sizeof(*fds));
        return received;
    }
    for (size_t i = 0; i < fd_count; i++)
        close(fds[i]);
    return TL_UNIX_WRONG;
}

enum tl_status local_control_socket_make(int *ret_own, int *ret_peers, struct tl_error *ret_error)
{
    struct tl_unix_address address;
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
        return tl_error_set_errno(ret_error, errno, "no socket for a worker of this host");
    /* Workers of earlier releases accept only a socket that has a name. */
    if (name_abstractly(ends[1], &address)) {
        *ret_own = ends[0];
        *ret_peers = ends[1];
        return TL_OK;
    }
    int error = errno;
    close(ends[0]);
    close(ends[1]);
    return tl_error_set_errno(ret_error, error, "cannot make a socket for a worker of this host");
}

bool local_is_eventfd(int fd)
{
    static const char eventfd[] = "anon_inode:[eventfd]";
    char link[32], target[sizeof(eventfd)];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t len = readlink(link, target, sizeof(target));
    return len == (ssize_t)strlen(eventfd) && memcmp(target, eventfd, strlen(eventfd)) == 0 &&
           (fcntl(fd, F_GETFL) & O_NONBLOCK) != 0;
}

/* ------------------------------------------------------------------------------------------------- credentials -- */

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

/* --------------------------------------------------------------------------------------------------- addresses -- */

/* In version 1 the name was that of a listening socket. */
static const uint8_t format[4] = {2, 'L', 'C', 'L'};
#define FIXED_BYTES offsetof(struct local_address, name)

void local_address_write(const struct local_address *pair_address, struct tl_pair_address *ret_bytes)
{
    struct local_address copy = *pair_address;
    _Static_assert(sizeof(copy) <= TL_PAIR_ADDRESS_MAX_BYTES, "fits");
    memcpy(copy.format, format, sizeof(format));
    ret_bytes->len_bytes = FIXED_BYTES + copy.name_bytes;
    memcpy(ret_bytes->bytes, &copy, ret_bytes->len_bytes);
}

bool local_address_read(const struct tl_pair_address *bytes, struct local_address *ret_address)
{
    struct local_address copy = {.name_bytes = 0};
    if (bytes->len_bytes <= FIXED_BYTES || bytes->len_bytes > sizeof(copy)) return false;
    memcpy(&copy, bytes->bytes, bytes->len_bytes);
    if (memcmp(copy.format, format, sizeof(format)) != 0 || copy.name_bytes != bytes->len_bytes - FIXED_BYTES)
        return false;
    *ret_address = copy;
    return true;
}

enum tl_status local_address_check(const struct tl_provider *base, const struct tl_pair_address *bytes,
                                   struct tl_error *ret_error)
{
    const struct local_provider *provider = TL_CONTAINER_OF(base, const struct local_provider, base);
    struct local_address theirs;
    if (!local_address_read(bytes, &theirs)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: not a pair address", base->name);
    }
    if (memcmp(provider->host_id, theirs.host_id, TL_HOST_ID_BYTES) != 0) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "%s: the peer is on another host", base->name);
    }
    return TL_OK;
}
