// SPDX-License-Identifier: Apache-2.0
/* Ports for tests. */
#ifndef FAKES_PORTS_H
#define FAKES_PORTS_H

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

/* A loopback port that was free a moment ago; 0 when there is none. The kernel hands such ports out in turn, so that
 * the next caller gets another one. */
static inline unsigned tl_free_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof(address);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return 0;
    unsigned port = 0;
    if (bind(fd, (struct sockaddr *)&address, sizeof(address)) == 0 &&
        getsockname(fd, (struct sockaddr *)&address, &length) == 0) {
        port = ntohs(address.sin_port);
    }
    close(fd);
    return port;
}

#endif
