// SPDX-License-Identifier: Apache-2.0
/*
 * How two queue pairs are connected. Each side does the same as soon as it knows the address of the other one:
 *
 *   we  -- HELLO, an end of our control socket, our ring, our eventfd -->  the peer's accept socket
 *   our accept socket  <-- HELLO, an end of its control socket, its ring, its eventfd --  the peer
 *
 * A control socket is a socket pair: we read from one end, and the peer writes to the other. The peer writes to our
 * eventfd to wake us. A packet in an accept socket comes from a process that knows its token. The packet and the
 * process that has sent it are checked while the packet stays in the socket; only when both are right it is taken out,
 * with its descriptors. Then a helper thread tries to read the peer's memory.
 *
 * Failure modes: there is no such accept socket, or the peer belongs to another user, sends an invalid HELLO, or closes
 * the connection: the queue pair breaks. So it does when this process has no descriptor or no memory for what the peer
 * has passed, which is not the peer's fault.
 */
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/error.h"
#include "base/reason.h"
#include "dataplane/local/local_internal.h"
#include "dataplane/memory/segment.h"

enum tl_status local_shake_hands(struct local_pair *pair, struct tl_error *ret_error)
{
    const int fds[LOCAL_HELLO_DESCRIPTORS] = {pair->sockets.peers_end, pair->sockets.ring, pair->sockets.wake_in};
    struct local_hello hello = {.kind = LOCAL_PACKET_HELLO,
                                .protocol = LOCAL_PROTOCOL,
                                .slot_count = pair->rings.in.slot_count,
                                .proof_address = (uintptr_t)&pair->proof.own,
                                .proof = pair->proof.own};
    memcpy(hello.from, pair->self.token, LOCAL_TOKEN_BYTES);
    memcpy(hello.to, pair->peer.token, LOCAL_TOKEN_BYTES);
    enum tl_status status = local_call(pair->provider, pair->sockets.accept, &pair->peer, &hello, fds, ret_error);
    if (status != TL_OK) return status;
    local_close_fd(&pair->sockets.peers_end);
    local_close_fd(&pair->sockets.ring);
    return TL_OK;
}

static bool is_for(const struct local_pair *pair, const struct local_hello *hello)
{
    return hello->protocol == LOCAL_PROTOCOL && memcmp(hello->from, pair->peer.token, LOCAL_TOKEN_BYTES) == 0 &&
           memcmp(hello->to, pair->self.token, LOCAL_TOKEN_BYTES) == 0;
}

/* Connects the pair. refusal says why the peer's memory cannot be read; NULL: it can be read. */
static void complete_handshake(struct local_pair *pair, const char *refusal)
{
    pair->base.outside_refusal = refusal;
    pair->state = LOCAL_CONNECTED;
    pair->has_connected = true;
    pair->packets.must_read = pair->provider->must_look = true;
}

void local_proof_was_read(struct local_pair *pair, int error)
{
    struct tl_error refusal;
    bool is_right = error == 0 && pair->proof.read == pair->proof.peers;
    if (!is_right) {
        (void)tl_error_set(&refusal, TL_PERMISSION_DENIED,
                           "this process may not read the peer's memory: %s (process_vm_readv; see "
                           "/proc/sys/kernel/yama/ptrace_scope)",
                           error != 0 ? strerror(error) : "the address in its HELLO holds another number");
    }
    complete_handshake(pair, is_right ? NULL : tl_reason(refusal.message));
}

/* Makes a helper thread read the number whose address the peer has sent. */
static void try_reading(struct local_pair *pair, const struct local_hello *hello)
{
    struct tl_error error;
    const struct tl_memory_reading reading = {.process = pair->credentials.pid,
                                              .source = hello->proof_address,
                                              .destination = (uint8_t *)&pair->proof.read,
                                              .len_bytes = sizeof(pair->proof.read),
                                              .is_buffered = true};
    pair->proof.peers = hello->proof;
    if (tl_memory_reader_read(pair->helpers[0], &reading, &error) != TL_OK)
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "%s", error.message);
}

/* Watches the peer's process. Returns false when the pair is broken. */
static bool watch_process(struct local_pair *pair)
{
    pid_t pid = pair->credentials.pid;
    pair->sockets.process = pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
    bool is_missing = pair->sockets.process < 0 && pid > 0;
    if (is_missing && (errno == EMFILE || errno == ENFILE)) {
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "no descriptor for the peer's process: %s", strerror(errno));
    } else if (is_missing && errno == ESRCH) {
        local_pair_break(pair, TL_UNAVAILABLE, "the peer's process has ended");
    } else if (pair->sockets.process >= 0 &&
               !local_watch(pair->provider, pair->sockets.process, pair->number | LOCAL_PROCESS_NUMBER, EPOLLET)) {
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "the peer cannot be watched: %s", strerror(errno));
    }
    return pair->state == LOCAL_CALLING;
}

static void use_hello(struct local_pair *pair, const struct local_hello *hello)
{
    if (!watch_process(pair)) return;
    if (pair->provider->is_reading_forbidden) {
        complete_handshake(pair, "memory outside of the pool is copied, as the settings say (local.process_vm)");
    } else if (pair->credentials.pid <= 0) {
        complete_handshake(pair, "the peer's process is in another container, its memory cannot be read");
    } else if (pair->sockets.process < 0) { /* Another process could get the process id of the peer. */
        complete_handshake(pair, "this kernel does not tell when the peer's process ends (pidfd_open)");
    } else {
        try_reading(pair, hello);
    }
}

/* Takes the HELLO of a process that may connect, with the ring and the end of the control socket. */
static void take_hello(struct local_pair *pair)
{
    union local_packet packet;
    struct tl_error error;
    void *ring = NULL;
    int fds[LOCAL_HELLO_DESCRIPTORS];
    enum tl_unix_received received = local_receive(pair->sockets.accept, &packet, fds);
    if (received == TL_UNIX_NO_DESCRIPTOR) {
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, LOCAL_NO_DESCRIPTOR);
    } else if (received != TL_UNIX_PACKET) {
        local_pair_violation(pair, "a HELLO of another release or another process");
    } else if (!local_ring_is_count(packet.hello.slot_count)) {
        local_pair_violation(pair, "a HELLO with an invalid number of ring slots");
    } else if (!local_is_eventfd(fds[2])) {
        local_pair_violation(pair, "a hello without an eventfd");
    } else if (tl_segment_map(fds[1], local_ring_bytes(packet.hello.slot_count), &ring, &error) != TL_OK) {
        local_pair_unmapped(pair, &error);
    }
    if (fds[1] >= 0) close(fds[1]);
    pair->sockets.out = fds[0];
    pair->sockets.wake_out = fds[2];
    if (ring == NULL) return;
    local_ring_place(&pair->rings.out, ring, packet.hello.slot_count);
    use_hello(pair, &packet.hello);
}

unsigned local_read_accept_socket(struct local_pair *pair)
{
    union local_packet packet;
    struct tl_error error;
    /* The HELLO was taken, and the attempt to read the peer's memory has not ended yet. */
    if (pair->rings.out.head != NULL) return 0;
    enum tl_unix_received received = local_peek_packet(pair->sockets.accept, &packet, &pair->credentials);
    if (received == TL_UNIX_NOTHING && local_peer_lives(pair)) return 0;
    if (received == TL_UNIX_NOTHING) {
        local_pair_break(pair, TL_UNAVAILABLE,
                         "the peer has closed the connection instead of sending its hello; if it runs as another "
                         "user, which the local transport does not connect, its log says so");
    } else if (received != TL_UNIX_PACKET || packet.kind != LOCAL_PACKET_HELLO || !is_for(pair, &packet.hello)) {
        local_pair_violation(pair, "a HELLO of another release or another process");
    } else if (local_check_user(pair->provider, pair->credentials.uid, &error) != TL_OK) {
        local_pair_break(pair, error.code, "%s", error.message);
    } else {
        local_forget_descriptor(pair->provider, pair->sockets.accept);
        local_accept_socket_remove_name(&pair->self);
        take_hello(pair);
        local_close_fd(&pair->sockets.accept);
    }
    return 1;
}
