// SPDX-License-Identifier: Apache-2.0
/*
 * How two queue pairs get connected.
 *
 *   the smaller token                      the larger token
 *   dials, HELLO + ring  ----------------> takes the call, looks who it is, finds the queue pair by its token
 *                        <---------------- HELLO + ring
 *
 * The words of a HELLO are looked at where they are; only of a caller whose tokens are right the queue pair's porter
 * takes the ring. Who calls before the queue pair that he wants was told of him waits in provider->callers, as do those
 * who have not said anything yet; of these there are never more than a few.
 *
 * Failure modes: a caller of another user, with tokens that are not ours, or that says anything else: his connection is
 * closed, and the log says so. Nobody at the socket, or an answer that cannot be: the queue pair breaks.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "dataplane/local_porter.h"

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

bool local_is_awaited(const struct local_pair *pair, const struct local_hello *hello)
{
    return (pair->state == LOCAL_DIALING || pair->state == LOCAL_CALLED) && hello->protocol == LOCAL_PROTOCOL &&
           is_token(hello->from, pair->peer.token) && is_token(hello->to, pair->self.token);
}

void local_hello_came(struct local_pair *pair, const struct local_hello *hello, void *ring, const char *reading_refusal)
{
    local_ring_place(&pair->out, ring, hello->slot_count);
    if (pair->state == LOCAL_CALLED && !send_hello(pair)) return;
    pair->process_fd = local_process_fd(pair->socket, pair->credentials.pid);
    if (pair->process_fd < 0 && (errno == EMFILE || errno == ENFILE)) {
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "no descriptor for the peer's process: %s", strerror(errno));
        return;
    }
    if (pair->process_fd >= 0 &&
        !local_watch_news(pair->provider, pair->process_fd, pair->number | LOCAL_PROCESS_NUMBER)) {
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "the peer cannot be watched: %s", strerror(errno));
        return;
    }
    pair->base.outside_refusal = reading_refusal;
    if (pair->provider->is_reading_forbidden) {
        pair->base.outside_refusal = "memory outside of the pool is copied, as the settings say (local.process_vm)";
    } else if (pair->credentials.pid <= 0) {
        pair->base.outside_refusal = "the peer's process is in another container, its memory cannot be read";
    }
    pair->state = LOCAL_CONNECTED;
    pair->has_connected = true;
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
    local_hang_up(provider, caller->socket);
    caller_free(provider, caller);
}

/* The pair waits for exactly this caller: his connection becomes the pair's. */
static void adopt(struct local_pair *pair, struct local_caller *caller)
{
    struct local_provider *provider = pair->provider;
    pair->socket = caller->socket;
    pair->credentials = caller->credentials;
    caller_free(provider, caller);
    pair->state = LOCAL_CALLED;
    if (!local_watch_news(provider, pair->socket, pair->number)) {
        local_pair_break(pair, TL_RESOURCE_EXHAUSTED, "the peer cannot be watched: %s", strerror(errno));
        return;
    }
    pair->must_hear = provider->must_look = true;
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

static bool has_hung_up(int socket)
{
    struct pollfd descriptor = {.fd = socket, .events = POLLRDHUP};
    return poll(&descriptor, 1, 0) > 0;
}

void local_hear_caller(struct local_provider *provider, struct local_caller *caller)
{
    union local_packet packet;
    bool is_known;
    if (caller->has_spoken) { /* what else he says is heard by whom he wants */
        if (has_hung_up(caller->socket)) local_caller_close(provider, caller);
        return;
    }
    enum local_received received = local_look_at(caller->socket, &packet);
    if (received == LOCAL_RECEIVED_NOTHING) return;
    bool is_hello = received == LOCAL_RECEIVED_PASSED && packet.kind == LOCAL_PACKET_HELLO &&
                    packet.hello.protocol == LOCAL_PROTOCOL;
    if (!is_hello) {
        if (received != LOCAL_RECEIVED_END) log_refusal(provider, "it does not speak the protocol of this release");
        local_caller_close(provider, caller);
        return;
    }
    caller->has_spoken = true;
    caller->hello = packet.hello;
    if (match(provider, caller, &is_known)) return;
    if (is_known && !has_hung_up(caller->socket)) return; /* if he does later, that is told */
    if (!is_known) log_refusal(provider, "it does not know the token of a connection that is awaited");
    local_caller_close(provider, caller);
}

static unsigned count_callers(const struct local_provider *provider, uid_t uid, struct local_caller **ret_oldest)
{
    unsigned count = 0;
    TL_LIST_FOREACH(&provider->callers, link)
    {
        struct local_caller *caller = TL_CONTAINER_OF(link, struct local_caller, link);
        if (caller->credentials.uid == uid && count++ == 0) *ret_oldest = caller;
    }
    return count;
}

/* There are too many: the user who has most of them loses his oldest, so that nobody can keep others out. */
static void drop_caller(struct local_provider *provider)
{
    struct local_caller *chosen = NULL, *oldest = NULL;
    unsigned most = 0;
    TL_LIST_FOREACH(&provider->callers, link)
    {
        uid_t uid = TL_CONTAINER_OF(link, struct local_caller, link)->credentials.uid;
        unsigned count = count_callers(provider, uid, &oldest);
        if (count <= most) continue;
        most = count;
        chosen = oldest;
    }
    log_refusal(provider, "too many callers say nothing");
    local_caller_close(provider, chosen);
}

static void add_caller(struct local_provider *provider, int socket, const struct local_credentials *credentials)
{
    struct local_caller *caller = calloc(1, sizeof(*caller));
    if (caller == NULL || !local_watch_news(provider, socket, provider->last_number + 1)) {
        free(caller);
        local_hang_up(provider, socket);
        return;
    }
    caller->number = ++provider->last_number;
    caller->socket = socket;
    caller->credentials = *credentials;
    tl_list_push_back(&provider->callers, &caller->link);
    if (provider->caller_count++ == LOCAL_MAX_CALLERS) drop_caller(provider);
}

/* No descriptor is left: a call that stays in the queue would keep the socket readable for ever. */
static void turn_away(struct local_provider *provider)
{
    log_refusal(provider, "no file descriptor is left");
    close(provider->spare_fd);
    int fd = accept4(provider->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) local_hang_up(provider, fd);
    provider->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void local_take_calls(struct local_provider *provider)
{
    /* Who was turned away comes first: so strangers cannot take all descriptors. */
    for (unsigned i = 0; i < CALLS_PER_LOOK && provider->hung_up_count == 0; i++) {
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
            local_hang_up(provider, fd);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- dialing -- */

static void dial(struct local_pair *pair)
{
    struct tl_error error;
    enum tl_status status = local_dial(pair->provider, pair->peer.name, pair->peer.name_bytes, &pair->socket, &error);
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
