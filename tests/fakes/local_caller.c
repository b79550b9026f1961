// SPDX-License-Identifier: Apache-2.0
#include "fakes/local_caller.h"

#include <stddef.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"

void caller_open(struct local_caller *caller, const struct local_address *peer)
{
    const struct local_provider provider = {.socket_folder = NULL};
    struct tl_error error;
    *caller = (struct local_caller){.out = -1, .wake_out = -1};
    memcpy(caller->self.host_id, peer->host_id, sizeof(caller->self.host_id));
    TL_CHECK(local_accept_socket_open(&provider, &caller->self, &caller->accept_socket, &error) == TL_OK);
    TL_CHECK(local_control_socket_make(&caller->in, &caller->peers_end, &error) == TL_OK);
    caller->wake_in = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    TL_CHECK(caller->wake_in >= 0);
}

static void close_fd(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

void caller_close(struct local_caller *caller)
{
    close_fd(&caller->accept_socket);
    close_fd(&caller->in);
    close_fd(&caller->peers_end);
    close_fd(&caller->out);
    close_fd(&caller->wake_in);
    close_fd(&caller->wake_out);
}

struct local_hello caller_hello(const struct local_address *peer, uint32_t slot_count)
{
    struct local_hello hello = {.kind = LOCAL_PACKET_HELLO, .protocol = LOCAL_PROTOCOL, .slot_count = slot_count};
    memcpy(hello.to, peer->token, sizeof(hello.to));
    return hello;
}

bool caller_say(const struct local_address *peer, const void *bytes, size_t len_bytes, const int *fds, size_t fd_count)
{
    struct tl_unix_address address;
    tl_unix_address_set(&address, peer->name, peer->name_bytes);
    int mouth = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    TL_CHECK(mouth >= 0);
    bool is_said = tl_unix_socket_send(mouth, &address, bytes, len_bytes, fds, fd_count);
    close(mouth);
    return is_said;
}

void caller_call(struct local_caller *caller, const struct local_address *peer, const struct local_hello *hello,
                 int ring)
{
    const int fds[] = {caller->peers_end, ring, caller->wake_in};
    TL_CHECK(caller_say(peer, hello, sizeof(*hello), fds, LOCAL_HELLO_DESCRIPTORS));
    close_fd(&caller->peers_end);
}

int caller_take(struct local_caller *caller, struct local_hello *ret_hello)
{
    union local_packet packet;
    int fds[LOCAL_HELLO_DESCRIPTORS];
    TL_CHECK(local_receive(caller->accept_socket, &packet, fds) == TL_UNIX_PACKET && packet.kind == LOCAL_PACKET_HELLO);
    caller->out = fds[0];
    caller->wake_out = fds[2];
    *ret_hello = packet.hello;
    return fds[1];
}
