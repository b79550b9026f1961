// SPDX-License-Identifier: Apache-2.0
/*
 * How two queue pairs get connected. Each side does the same, as soon as it has been told of the other one:
 *
 *   we  -- HELLO, an end of our control socket, our ring -->  the peer's accept socket
 *   our accept socket  <-- HELLO, an end of its control socket, its ring --  the peer
 *
 * A control socket is a socket pair: we hear on one end, the peer speaks on the other. What is in an accept socket was
 * put there by somebody who knows its token. The words are looked at where they are, and who has sent them; only when
 * both are right the queue pair's helper thread takes what was passed.
 *
 * Failure modes: nobody at the accept socket, a peer of a user who may not, a HELLO that cannot be, a peer that hangs
 * up: the queue pair breaks.
 */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "dataplane/local/local_helper.h"

static void close_fd(int *fd)
{
    close(*fd);
    *fd = -1;
}

enum tl_status local_shake_hands(struct local_pair *pair, struct tl_error *ret_error)
{
    const int fds[LOCAL_HELLO_DESCRIPTORS] = {pair->peers_end, pair->in_fd};
    struct local_hello hello = {.kind = LOCAL_PACKET_HELLO,
                                .protocol = LOCAL_PROTOCOL,
                                .slot_count = pair->in.slot_count,
                                .proof_address = (uintptr_t)&pair->proof,
                                .proof = pair->proof};
    memcpy(hello.from, pair->self.token, LOCAL_TOKEN_BYTES);
    memcpy(hello.to, pair->peer.token, LOCAL_TOKEN_BYTES);
    enum tl_status status = local_call(pair->provider, pair->accept_socket, &pair->peer, &hello, fds, ret_error);
    if (status != TL_OK) return status;
    close_fd(&pair->peers_end);
    close_fd(&pair->in_fd);
    return TL_OK;
}

static bool is_for(const struct local_pair *pair, const struct local_hello *hello)
{
    return hello->protocol == LOCAL_PROTOCOL && memcmp(hello->from, pair->peer.token, LOCAL_TOKEN_BYTES) == 0 &&
           memcmp(hello->to, pair->self.token, LOCAL_TOKEN_BYTES) == 0;
}

/* The HELLO in front of the accept socket, and what was passed with it. */
static enum tl_status have_it_taken(struct local_pair *pair, struct tl_error *ret_error)
{
    struct local_provider *provider = pair->provider;
    const struct local_taking taking = {.socket = pair->accept_socket,
                                        .is_accept_socket = true,
                                        .peer = provider->is_reading_forbidden ? 0 : pair->credentials.pid};
    enum tl_status status = local_check_user(provider, pair->credentials.uid, ret_error);
    if (status == TL_OK) status = local_helper_may_serve_user(pair->credentials.uid, ret_error);
    if (status != TL_OK) return status;
    local_forget_socket(provider, pair->accept_socket);
    local_accept_socket_remove_name(provider, &pair->self);
    status = local_helper_take(pair->helper, &taking, ret_error);
    if (status == TL_OK) pair->accept_socket = -1;
    return status;
}

unsigned local_read_accept_socket(struct local_pair *pair)
{
    union local_packet packet;
    struct tl_error error;
    if (pair->accept_socket < 0) return 0; /* the helper thread has it */
    enum local_received received = local_look_at(pair->accept_socket, &packet, &pair->credentials);
    if (received == LOCAL_RECEIVED_NOTHING && local_peer_lives(pair)) return 0;
    if (received == LOCAL_RECEIVED_NOTHING) {
        local_pair_break(pair, TL_UNAVAILABLE,
                         "the peer has closed the connection instead of sending its hello; if it runs as another "
                         "user, which the local transport does not connect, its log says so");
    } else if (received != LOCAL_RECEIVED_PASSED || packet.kind != LOCAL_PACKET_HELLO || !is_for(pair, &packet.hello)) {
        local_pair_violation(pair, "a hello of another release or of another process");
    } else {
        enum tl_status status = have_it_taken(pair, &error);
        if (status != TL_OK) local_pair_break(pair, status, "%s", error.message);
    }
    return 1;
}

void local_hello_came(struct local_pair *pair, const struct local_hello *hello, void *ring, int control_socket,
                      const char *reading_refusal)
{
    local_ring_place(&pair->out, ring, hello->slot_count);
    pair->out_socket = control_socket;
    pair->process_fd = local_process_fd(pair->credentials.pid);
    bool is_unwatched = pair->process_fd < 0 && pair->credentials.pid > 0;
    if (is_unwatched && (errno == EMFILE || errno == ENFILE)) {
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "no descriptor for the peer's process: %s", strerror(errno));
        return;
    }
    if (is_unwatched && errno == ESRCH) {
        local_pair_break(pair, TL_UNAVAILABLE, "the peer's process has ended");
        return;
    }
    if (pair->process_fd >= 0 &&
        !local_watch_socket(pair->provider, pair->process_fd, pair->number | LOCAL_PROCESS_NUMBER)) {
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "the peer cannot be watched: %s", strerror(errno));
        return;
    }
    pair->base.outside_refusal = reading_refusal;
    if (pair->provider->is_reading_forbidden) {
        pair->base.outside_refusal = "memory outside of the pool is copied, as the settings say (local.process_vm)";
    } else if (pair->credentials.pid <= 0) {
        pair->base.outside_refusal = "the peer's process is in another container, its memory cannot be read";
    } else if (is_unwatched) { /* somebody else may get its number */
        pair->base.outside_refusal = "this kernel does not tell when the peer's process ends (pidfd_open)";
    }
    pair->state = LOCAL_CONNECTED;
    pair->has_connected = true;
}
