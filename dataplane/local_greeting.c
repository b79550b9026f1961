// SPDX-License-Identifier: Apache-2.0
/*
 * How two queue pairs get connected.
 *
 *   the smaller token                      the larger token
 *   dials, HELLO + ring  ----------------> takes the call, looks who it is, finds the queue pair by its token
 *                        <---------------- HELLO + ring
 *
 * Who calls before the queue pair that he wants was told of him waits in provider->callers, as do those who have not
 * said anything yet; of these there are never more than a few.
 *
 * Failure modes: a caller of another user, with tokens that are not ours, or that says anything else: his connection is
 * closed, and the log says so. Nobody at the socket, or an answer that cannot be: the queue pair breaks.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "dataplane/local_internal.h"

#define CALLS_PER_LOOK 16
/* A stranger can call without end. */
#define REFUSAL_LOG_NS (10 * TL_NS_PER_SEC)

static void log_refusal(struct local_provider *provider, const char *reason)
{
    int64_t now_ns = tl_clock_now_ns();
    if (now_ns < provider->next_refusal_log_ns) return;
    provider->next_refusal_log_ns = now_ns + REFUSAL_LOG_NS;
    TL_LOG_AT_WARN("refused a call over the local transport", TL_STR("reason", reason));
}

/* ----------------------------------------------------------------------------------------------------- connected -- */

static bool is_token(const uint8_t *a, const uint8_t *b)
{
    return memcmp(a, b, LOCAL_TOKEN_BYTES) == 0;
}

static bool is_count(uint32_t slot_count)
{
    return slot_count >= LOCAL_MIN_RING_SLOTS && slot_count <= LOCAL_MAX_RING_SLOTS &&
           (slot_count & (slot_count - 1)) == 0;
}

static bool send_hello(struct local_pair *pair)
{
    struct local_hello hello = {.kind = LOCAL_PACKET_HELLO,
                                .protocol = LOCAL_PROTOCOL,
                                .slot_count = pair->in.slot_count,
                                .proof_address = (uintptr_t)&pair->proof,
                                .proof = pair->proof};
    memcpy(hello.from, pair->self.token, LOCAL_TOKEN_BYTES);
    memcpy(hello.to, pair->peer.token, LOCAL_TOKEN_BYTES);
    if (!local_send(pair->socket, &hello, sizeof(hello), pair->in_fd)) {
        local_pair_break(pair, TL_UNAVAILABLE, "the peer has hung up: %s", strerror(errno));
        return false;
    }
    close(pair->in_fd);
    pair->in_fd = -1;
    return true;
}

/* The peer's ring is here. Takes over ring_fd. */
static bool take_ring(struct local_pair *pair, const struct local_hello *hello, int ring_fd)
{
    void *address;
    struct tl_error error;
    bool is_mapped = is_count(hello->slot_count) &&
                     local_memory_map(ring_fd, local_ring_bytes(hello->slot_count), &address, &error) == TL_OK;
    close(ring_fd);
    if (!is_mapped) {
        local_pair_violation(pair, is_count(hello->slot_count) ? error.message : "a ring of a size that cannot be");
        return false;
    }
    local_ring_place(&pair->out, address, hello->slot_count);
    return true;
}

/* A pipe costs less than the socket, which does without. The peer must not be able to make us wait: it gets the other
 * end, and nothing of ours. */
static void pass_pipe(struct local_pair *pair)
{
    const struct local_segment_packet packet = {.kind = LOCAL_PACKET_PIPE};
    if (pipe2(pair->pipe, O_CLOEXEC | O_NONBLOCK) != 0) {
        pair->pipe[0] = pair->pipe[1] = -1;
    } else if (!local_send_news(pair, &packet, sizeof(packet), pair->pipe[0])) {
        close(pair->pipe[0]);
        close(pair->pipe[1]);
        pair->pipe[0] = pair->pipe[1] = -1;
    }
}

void local_pipe_came(struct local_pair *pair, int fd)
{
    if (pair->peer_pipe >= 0) {
        close(fd);
        local_pair_violation(pair, "a second pipe");
        return;
    }
    pair->peer_pipe = fd;
    if (!local_watch_news(pair->provider, fd, pair->number | LOCAL_PIPE_NUMBER)) {
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "the peer cannot be watched: %s", strerror(errno));
    }
}

static void become_connected(struct local_pair *pair, const struct local_hello *hello)
{
    pair->process_fd = local_process_fd(pair->socket, pair->credentials.pid);
    if (pair->process_fd >= 0 &&
        !local_watch_news(pair->provider, pair->process_fd, pair->number | LOCAL_PROCESS_NUMBER)) {
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "the peer cannot be watched: %s", strerror(errno));
        return;
    }
    pass_pipe(pair);
    pair->base.outside_refusal = local_try_reading(pair, hello->proof_address, hello->proof);
    pair->state = LOCAL_CONNECTED;
    pair->has_connected = true;
}

void local_hello_came(struct local_pair *pair, const struct local_hello *hello, int ring_fd)
{
    bool is_right = pair->state == LOCAL_DIALING && hello->protocol == LOCAL_PROTOCOL &&
                    is_token(hello->from, pair->peer.token) && is_token(hello->to, pair->self.token);
    if (!is_right) {
        close(ring_fd);
        local_pair_violation(pair, "a greeting that is not for us");
        return;
    }
    if (take_ring(pair, hello, ring_fd)) become_connected(pair, hello);
}

/* ------------------------------------------------------------------------------------------------------- callers -- */

static void caller_free(struct local_provider *provider, struct local_caller *caller)
{
    tl_list_remove(&caller->link);
    provider->caller_count--;
    free(caller);
}

void local_caller_close(struct local_provider *provider, struct local_caller *caller)
{
    close(caller->socket);
    if (caller->ring_fd >= 0) close(caller->ring_fd);
    caller_free(provider, caller);
}

/* The pair waits for exactly this caller: his connection becomes the pair's. */
static void adopt(struct local_pair *pair, struct local_caller *caller)
{
    struct local_provider *provider = pair->provider;
    struct local_hello hello = caller->hello;
    int ring_fd = caller->ring_fd;
    pair->socket = caller->socket;
    pair->credentials = caller->credentials;
    caller_free(provider, caller);
    if (!local_watch_news(provider, pair->socket, pair->number)) {
        close(ring_fd);
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "the peer cannot be watched: %s", strerror(errno));
        return;
    }
    if (take_ring(pair, &hello, ring_fd) && send_hello(pair)) become_connected(pair, &hello);
}

/* Finds the pair that the caller wants; false: it is not waiting for him now. */
static bool match(struct local_provider *provider, struct local_caller *caller, bool *ret_is_known)
{
    *ret_is_known = false;
    TL_LIST_FOREACH(&provider->pairs, link)
    {
        struct local_pair *pair = TL_CONTAINER_OF(link, struct local_pair, link);
        if (!is_token(pair->self.token, caller->hello.to)) continue;
        *ret_is_known = pair->state == LOCAL_NEW ||
                        (pair->state == LOCAL_WAITING && is_token(pair->peer.token, caller->hello.from));
        if (pair->state != LOCAL_WAITING || !*ret_is_known) return false;
        adopt(pair, caller);
        return true;
    }
    return false;
}

void local_hear_caller(struct local_provider *provider, struct local_caller *caller)
{
    union local_packet packet;
    int fd;
    bool is_known;
    enum local_received received = local_receive(caller->socket, &packet, &fd);
    if (received == LOCAL_RECEIVED_NOTHING) return;
    bool is_hello = received == LOCAL_RECEIVED_PACKET && packet.kind == LOCAL_PACKET_HELLO && !caller->has_spoken &&
                    packet.hello.protocol == LOCAL_PROTOCOL;
    if (!is_hello) {
        if (fd >= 0) close(fd);
        if (received != LOCAL_RECEIVED_END) {
            log_refusal(provider, received == LOCAL_RECEIVED_NO_ROOM
                                      ? "no descriptor for what it has passed: Too many open files (ulimit -n)"
                                      : "it does not speak the protocol of this release");
        }
        local_caller_close(provider, caller);
        return;
    }
    caller->has_spoken = true;
    caller->hello = packet.hello;
    caller->ring_fd = fd;
    if (match(provider, caller, &is_known) || is_known) return;
    log_refusal(provider, "it does not know the token of a connection that is awaited");
    local_caller_close(provider, caller);
}

static void add_caller(struct local_provider *provider, int socket, const struct local_credentials *credentials)
{
    struct local_caller *caller = calloc(1, sizeof(*caller));
    if (caller == NULL || !local_watch(provider, socket, provider->last_number + 1)) {
        free(caller);
        close(socket);
        return;
    }
    caller->number = ++provider->last_number;
    caller->socket = socket;
    caller->credentials = *credentials;
    caller->ring_fd = -1;
    if (provider->caller_count == LOCAL_MAX_CALLERS) {
        log_refusal(provider, "too many callers say nothing");
        local_caller_close(provider, TL_CONTAINER_OF(provider->callers.next, struct local_caller, link));
    }
    tl_list_push_back(&provider->callers, &caller->link);
    provider->caller_count++;
}

/* No descriptor is left: a call that stays in the queue would keep the socket readable for ever. */
static void turn_away(struct local_provider *provider)
{
    log_refusal(provider, "no file descriptor is left");
    close(provider->spare_fd);
    int fd = accept4(provider->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) close(fd);
    provider->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void local_take_calls(struct local_provider *provider)
{
    for (unsigned i = 0; i < CALLS_PER_LOOK; i++) {
        struct local_credentials credentials;
        struct tl_error error;
        int fd = accept4(provider->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE) turn_away(provider);
            return;
        }
        if (local_check_user(provider, fd, &credentials, &error) == TL_OK) {
            add_caller(provider, fd, &credentials);
        } else {
            log_refusal(provider, error.message);
            close(fd);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- dialing -- */

static void dial(struct local_pair *pair)
{
    struct tl_error error;
    enum tl_status status = local_dial(pair->peer.name, pair->peer.name_bytes, &pair->socket, &error);
    if (status == TL_OK && pair->socket < 0) return; /* later */
    if (status == TL_OK) status = local_check_user(pair->provider, pair->socket, &pair->credentials, &error);
    if (status != TL_OK) {
        local_pair_break(pair, status, "%s", error.message);
    } else if (!local_watch_news(pair->provider, pair->socket, pair->number)) {
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "the peer cannot be watched: %s", strerror(errno));
    } else {
        (void)send_hello(pair);
    }
}

void local_try_connect(struct local_pair *pair)
{
    if (pair->state == LOCAL_DIALING && pair->socket < 0) {
        dial(pair);
        return;
    }
    if (pair->state != LOCAL_WAITING) return;
    TL_LIST_FOREACH(&pair->provider->callers, link)
    {
        struct local_caller *caller = TL_CONTAINER_OF(link, struct local_caller, link);
        if (!caller->has_spoken || !is_token(caller->hello.to, pair->self.token)) continue;
        if (!is_token(caller->hello.from, pair->peer.token)) continue;
        adopt(pair, caller);
        return;
    }
}
