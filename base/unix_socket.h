// SPDX-License-Identifier: Apache-2.0
/* Unix sockets: their names, and packets with descriptors. No function blocks. Thread: any. */
#ifndef BASE_UNIX_SOCKET_H
#define BASE_UNIX_SOCKET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

#define TL_UNIX_MAX_DESCRIPTORS 4 /* The greatest number of descriptors in a packet. */

struct tl_unix_address {
    struct sockaddr_un address;
    socklen_t len_bytes;
};

/* Composes the path of this name in the folder. Returns false when it is too long. */
bool tl_unix_address_in_folder(struct tl_unix_address *address, const char *folder, const char *name);
/* Chooses an abstract name that begins with the prefix and cannot be guessed. */
void tl_unix_address_choose(struct tl_unix_address *address, const char *prefix);
/* Sets the address to the first name_bytes of a sun_path. */
void tl_unix_address_set(struct tl_unix_address *address, const void *name, size_t name_bytes);
/* Returns false with errno on failure. */
bool tl_unix_socket_bind(int socket, const struct tl_unix_address *address);
/* Removes the files in the folder that are sockets of processes that have died, if their names begin and end like this.
 * Datagram sockets of processes that live stay, as do files of other kinds. It may remove one that is being bound at
 * that moment, too. */
void tl_unix_socket_clean_folder(const char *folder, const char *prefix, const char *suffix);

/* Attaches a filter: the kernel drops a packet at send time unless it has these bytes at this offset. len_bytes is a
 * multiple of 4, at most TL_UNIX_MAX_FILTER_BYTES. Returns false with errno on failure. */
#define TL_UNIX_MAX_FILTER_BYTES 64
bool tl_unix_socket_filter(int socket, size_t offset_bytes, const uint8_t *bytes, size_t len_bytes);

/* Sends a packet with fd_count descriptors, which stay the caller's. With `to` NULL it goes to the other end of the
 * socket. Returns false with errno when the packet cannot be sent now, or not any more. */
bool tl_unix_socket_send(int socket, const struct tl_unix_address *to, const void *packet, size_t len_bytes,
                         const int *fds, size_t fd_count);

enum tl_unix_received {
    TL_UNIX_NOTHING,
    TL_UNIX_PACKET,
    TL_UNIX_WRONG,         /* the packet is longer than the buffer, or has too many descriptors */
    TL_UNIX_NO_DESCRIPTOR, /* this process has no free descriptor for what was passed, which is lost */
    TL_UNIX_END,           /* the other side has closed the socket, or died, or has sent an empty packet */
};

/* Reads the next packet without taking it out. The socket must have SO_PASSCRED; without it descriptors that
 * the packet has would stay open. *ret_sender is the process that has sent it; its pid is 0 and its uid is -1 when
 * there is no packet. */
enum tl_unix_received tl_unix_socket_peek(int socket, void *packet, size_t capacity_bytes, size_t *ret_len_bytes,
                                          struct ucred *ret_sender);
/* Takes the next packet. The descriptors belong to the caller; there are none unless TL_UNIX_PACKET is returned. */
enum tl_unix_received tl_unix_socket_receive(int socket, void *packet, size_t capacity_bytes, size_t *ret_len_bytes,
                                             int ret_fds[TL_UNIX_MAX_DESCRIPTORS], size_t *ret_fd_count);

/* Returns the number by which the kernel shows all users that are unknown (the overflow uid) in this container; -1:
 * every user is known. */
uid_t tl_unix_unknown_uid(void);

#endif
