// SPDX-License-Identifier: Apache-2.0
/* The TCP sockets of this machine that listen, as the kernel lists them. */
#ifndef SERVER_CLI_SOCKET_TABLE_H
#define SERVER_CLI_SOCKET_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/ip.h"

#define TL_MAX_BOUND_SOCKETS 64

struct tl_bound_socket {
    struct tl_ip ip;
    uint32_t user; /* its owner */
    unsigned long inode;
};

/* Finds the sockets that listen at a port in this network namespace, at most TL_MAX_BOUND_SOCKETS. proc is "/proc".
 * False: the kernel's list cannot be read. */
bool tl_socket_table_find(const char *proc, uint16_t port, struct tl_bound_socket ret_sockets[TL_MAX_BOUND_SOCKETS],
                          size_t *ret_count);

/* Whether a socket that is bound to the one address is reached through the other. One for all IPv6 addresses also takes
 * IPv4, as those of workers do. */
bool tl_socket_table_takes(const struct tl_ip *bound, const struct tl_ip *dialled);

#endif
