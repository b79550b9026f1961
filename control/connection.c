// SPDX-License-Identifier: Apache-2.0
#include "control/connection.h"

#include <grpc/grpc_posix.h>
#include <grpc/support/alloc.h>
#include <stdio.h>
#include <sys/socket.h>

#include "control/grpc_adapter.h"

uint64_t tl_connection_cookie(int fd)
{
    uint64_t cookie = 0;
    socklen_t length = sizeof(cookie);
    return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &length) == 0 ? cookie : 0;
}

/* Fills in what the open descriptor tells. */
static void describe(int fd, struct tl_connection *ret_connection)
{
    *ret_connection = (struct tl_connection){.fd = fd, .cookie = tl_connection_cookie(fd)};
    if (!tl_endpoint_peer(fd, ret_connection->address)) ret_connection->address[0] = '\0';
}

#ifdef TENSORLANE_GRPC_CURRENT

void tl_connection_add(grpc_server *server, int fd, grpc_server_credentials *credentials)
{
    struct tl_connection connection;
    char name[TL_ENDPOINT_TARGET_BYTES + 48];
    (void)credentials; /* the insecure ones, which contain nothing */
    describe(fd, &connection);
    snprintf(name, sizeof(name), "fd:%d %016llx %s", fd, (unsigned long long)connection.cookie, connection.address);
    tl_grpc_add_connection(server, fd, name);
}

static void parse(const char *name, struct tl_connection *ret_connection)
{
    unsigned long long cookie;
    int fd, address_at;
    if (sscanf(name, "fd:%d %16llx%n", &fd, &cookie, &address_at) != 2 || name[address_at] != ' ') return;
    ret_connection->fd = fd;
    ret_connection->cookie = cookie;
    snprintf(ret_connection->address, sizeof(ret_connection->address), "%s", &name[address_at + 1]);
}

#else

void tl_connection_add(grpc_server *server, int fd, grpc_server_credentials *credentials)
{
    grpc_server_add_channel_from_fd(server, fd, credentials);
}

static void parse(const char *name, struct tl_connection *ret_connection)
{
    int fd;
    if (sscanf(name, "fd:%d", &fd) == 1) describe(fd, ret_connection);
}

#endif

void tl_connection_of(grpc_call *call, struct tl_connection *ret_connection)
{
    char *name = grpc_call_get_peer(call);
    *ret_connection = (struct tl_connection){.fd = -1};
    if (name != NULL) parse(name, ret_connection);
    gpr_free(name);
}
