// SPDX-License-Identifier: Apache-2.0
/* Ports for tests. */
#ifndef FAKES_PORTS_H
#define FAKES_PORTS_H

#include <netinet/in.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <unistd.h>

/* Returns a loopback port that the kernel says is free, or 0. */
static inline unsigned tl_some_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof(address);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return 0;
    unsigned port = 0;
    if (bind(fd, (struct sockaddr *)&address, sizeof(address)) == 0 &&
        getsockname(fd, (struct sockaddr *)&address, &length) == 0)
        port = ntohs(address.sin_port);
    close(fd);
    return port;
}

/* Does the same, but never returns one of the latest ports, since the kernel picks at random and may repeat itself.
 * Thread: one. */
static inline unsigned tl_free_port(void)
{
    enum { REMEMBERED = 256 };
    static unsigned given[REMEMBERED];
    static unsigned count;
    unsigned port;
    bool is_repeated;
    do {
        port = tl_some_port();
        is_repeated = false;
        for (unsigned i = 0; i < REMEMBERED; i++)
            is_repeated |= port != 0 && given[i] == port;
    } while (is_repeated);
    given[count++ % REMEMBERED] = port;
    return port;
}

#endif
