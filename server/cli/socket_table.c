// SPDX-License-Identifier: Apache-2.0
/* Reads /proc/net/tcp and tcp6. An IPv4 address and the IPv6 address that it is mapped to are the same there as well.
 */
#include "server/cli/socket_table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STATE_LISTEN 0x0a

/* Reads an address as the kernel writes it: words of 32 bits in the order of this machine, in hexadecimal digits. */
static bool read_ip(const char *text, struct tl_ip *ret_ip)
{
    const size_t digits = strlen(text), words = digits / 8;
    if (digits != 8 && digits != 32) return false;
    (void)tl_ip_parse("0.0.0.0", ret_ip); /* the words replace its end, or all of it */
    for (size_t i = 0; i < words; i++) {
        char word[9] = "";
        memcpy(word, text + 8 * i, 8);
        uint32_t value = (uint32_t)strtoul(word, NULL, 16);
        memcpy(ret_ip->bytes + sizeof(ret_ip->bytes) - 4 * (words - i), &value, sizeof(value));
    }
    return true;
}

/* One line. False: it is no socket that listens at the port. */
static bool read_socket(const char *line, uint16_t port, struct tl_bound_socket *ret_socket)
{
    char address[40];
    unsigned bound, state, user;
    unsigned long inode;
    if (sscanf(line, " %*u: %39[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*x:%*x %*x:%*x %*x %u %*u %lu", address, &bound,
               &state, &user, &inode) != 5)
        return false;
    if (state != STATE_LISTEN || bound != port) return false;
    ret_socket->user = user;
    ret_socket->inode = inode;
    return read_ip(address, &ret_socket->ip);
}

/* Adds those of one file. False: it cannot be read. */
static bool read_file(const char *proc, const char *name, uint16_t port, struct tl_bound_socket *sockets, size_t *count)
{
    char path[1024], line[512];
    snprintf(path, sizeof(path), "%s/net/%s", proc, name);
    FILE *file = fopen(path, "re");
    if (!file) return false;
    while (*count < TL_MAX_BOUND_SOCKETS && fgets(line, sizeof(line), file) != NULL)
        if (read_socket(line, port, &sockets[*count])) ++*count;
    fclose(file);
    return true;
}

bool tl_socket_table_find(const char *proc, uint16_t port, struct tl_bound_socket ret_sockets[TL_MAX_BOUND_SOCKETS],
                          size_t *ret_count)
{
    *ret_count = 0;
    bool is_read = read_file(proc, "tcp", port, ret_sockets, ret_count);
    return read_file(proc, "tcp6", port, ret_sockets, ret_count) || is_read;
}

bool tl_socket_table_takes(const struct tl_ip *bound, const struct tl_ip *dialled)
{
    struct tl_ip all_v4, all_v6;
    (void)tl_ip_parse("0.0.0.0", &all_v4);
    (void)tl_ip_parse("::", &all_v6);
    if (tl_ip_is_equal(bound, &all_v6)) return true;
    if (tl_ip_is_equal(bound, &all_v4)) return tl_ip_is_v4(dialled);
    return tl_ip_is_equal(bound, dialled);
}
