// SPDX-License-Identifier: Apache-2.0
/*
 * Tries a gRPC server over a TCP connection of its own, with few bytes and with many, in both directions.
 *
 * Happy path: connect; the preface of HTTP/2, SETTINGS and PING, which are 50 bytes, and the answer to the PING; a
 * frame of an unknown type with 16,000 bytes, which HTTP/2 says to ignore, and another PING, whose answer shows that
 * all of it arrived; a call of the reflection service, whose answer has some thousand bytes. gRPC itself cannot be
 * used: it does not let its caller limit the size of segments, and does not say how far it came. Where the cluster has
 * TLS, its handshake comes first, and the rest goes through it.
 *
 * Failure modes: what is not answered within its time ends the attempt, and how far it came is the result. A server
 * without reflection answers few bytes; that is not counted as a failure.
 */
#include "server/cli/doctor_tcp.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "security/tls_session.h"

#define STEP_NS (2 * TL_NS_PER_SEC)

enum frame_type { FRAME_DATA = 0, FRAME_HEADERS = 1, FRAME_SETTINGS = 4, FRAME_PING = 6, FRAME_UNKNOWN = 0xbb };
enum { FLAG_END_STREAM = 1, FLAG_ACK = 1, FLAG_END_HEADERS = 4 };

#define FRAME_HEAD_BYTES 9
#define MAX_FRAME_BYTES 16384

struct attempt {
    int fd;
    struct tl_tls_session *tls;                        /* NULL: plain */
    uint8_t bytes[FRAME_HEAD_BYTES + MAX_FRAME_BYTES]; /* what was received of the next frame */
    size_t len_bytes;
    unsigned ping_count; /* answers to PING */
    bool is_foreign;     /* it ended the connection, or sent something else, before the first frame of HTTP/2 */
    bool is_answered;    /* the call has ended */
    bool has_frame;
};

/* -------------------------------------------------------------------------------------------------- connection -- */

/* Waits until the socket is ready. Returns 0, or errno. */
static int wait_for(int fd, short events, int64_t deadline_ns)
{
    for (;;) {
        struct pollfd wait = {.fd = fd, .events = events};
        int64_t left_ns = tl_clock_remaining_ns(deadline_ns);
        int count = poll(&wait, 1, (int)(left_ns / TL_NS_PER_MS) + 1);
        if (count > 0) return 0;
        if (count < 0 && errno != EINTR) return errno;
        if (count == 0 && tl_clock_remaining_ns(deadline_ns) == 0) return ETIMEDOUT;
    }
}

/* Returns 0, or why there is no connection. */
static int connect_to(struct attempt *attempt, const struct tl_ip *ip, unsigned port, unsigned max_segment)
{
    struct sockaddr_storage address;
    socklen_t len_bytes = tl_ip_to_sockaddr(ip, (uint16_t)port, &address);
    int failure = 0, on = 1;
    socklen_t failure_bytes = sizeof(failure);
    attempt->fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (attempt->fd < 0) return errno;
    /* Before the connection is made, so that the peer is asked for small segments, too. */
    if (max_segment > 0 && setsockopt(attempt->fd, IPPROTO_TCP, TCP_MAXSEG, &max_segment, sizeof(max_segment)) != 0) {
        return errno;
    }
    (void)setsockopt(attempt->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    if (connect(attempt->fd, (const struct sockaddr *)&address, len_bytes) == 0) return 0;
    if (errno != EINPROGRESS) return errno;
    int error_number = wait_for(attempt->fd, POLLOUT, tl_clock_deadline_ns(STEP_NS));
    if (error_number != 0) return error_number;
    if (getsockopt(attempt->fd, SOL_SOCKET, SO_ERROR, &failure, &failure_bytes) != 0) return errno;
    return failure;
}

/* --------------------------------------------------------------------------------------------------------- TLS -- */

/* Sends what the session has composed. */
static bool flush(const struct attempt *attempt, int64_t deadline_ns)
{
    for (;;) {
        enum tl_tls_flushed flushed = tl_tls_session_flush(attempt->tls);
        if (flushed != TL_TLS_BLOCKED) return flushed == TL_TLS_FLUSHED;
        if (wait_for(attempt->fd, POLLOUT, deadline_ns) != 0) return false;
    }
}

/* Makes the handshake. TL_DOCTOR_REACH_ALL: it is done. */
static enum tl_doctor_reach secure(struct attempt *attempt, const struct tl_doctor_endpoint *endpoint,
                                   struct tl_error *ret_error)
{
    const int64_t deadline_ns = tl_clock_deadline_ns(STEP_NS);
    if (tl_tls_session_create(endpoint->tls, TL_TLS_DIALS, attempt->fd, endpoint->task, &attempt->tls, ret_error) !=
        TL_OK)
        return TL_DOCTOR_REACH_NO_TLS;
    for (;;) {
        enum tl_tls_progress progress = tl_tls_session_handshake(attempt->tls, ret_error);
        bool is_flushed = flush(attempt, deadline_ns); /* a refusal, too */
        if (progress == TL_TLS_DONE) return TL_DOCTOR_REACH_ALL;
        if (progress == TL_TLS_FAILED) return TL_DOCTOR_REACH_NO_TLS;
        if (progress == TL_TLS_ENDED || !is_flushed) {
            (void)tl_error_set(ret_error, TL_UNAVAILABLE, "no TLS connection: it ended the connection");
            return TL_DOCTOR_REACH_NO_TLS;
        }
        if (wait_for(attempt->fd, POLLIN, deadline_ns) != 0) return TL_DOCTOR_REACH_TCP;
    }
}

/* As recv. */
static ssize_t receive(const struct attempt *attempt, void *bytes, size_t capacity)
{
    size_t len_bytes;
    struct tl_error error;
    if (attempt->tls == NULL) return recv(attempt->fd, bytes, capacity, 0);
    enum tl_tls_progress progress = tl_tls_session_read(attempt->tls, bytes, capacity, &len_bytes, &error);
    if (len_bytes > 0) return (ssize_t)len_bytes;
    if (progress == TL_TLS_ENDED) return 0;
    errno = progress == TL_TLS_FAILED ? ECONNRESET : EAGAIN;
    return -1;
}

static void close_attempt(struct attempt *attempt)
{
    if (attempt->tls != NULL) {
        tl_tls_session_write_end(attempt->tls);
        (void)tl_tls_session_flush(attempt->tls);
    }
    tl_tls_session_destroy(attempt->tls);
    if (attempt->fd >= 0) close(attempt->fd);
}

/* ------------------------------------------------------------------------------------------------------ frames -- */

static uint32_t frame_len(const uint8_t *head)
{
    return (uint32_t)head[0] << 16 | (uint32_t)head[1] << 8 | head[2];
}

static size_t put_frame(uint8_t *to, enum frame_type type, uint8_t flags, uint8_t stream, const void *payload,
                        size_t len_bytes)
{
    const uint8_t head[FRAME_HEAD_BYTES] = {(uint8_t)(len_bytes >> 16),
                                            (uint8_t)(len_bytes >> 8),
                                            (uint8_t)len_bytes,
                                            (uint8_t)type,
                                            flags,
                                            0,
                                            0,
                                            0,
                                            stream};
    memcpy(to, head, sizeof(head));
    if (payload) memcpy(to + sizeof(head), payload, len_bytes);
    return sizeof(head) + len_bytes;
}

/* Takes the frame that was received whole. */
static void take_frame(struct attempt *attempt)
{
    const uint8_t *head = attempt->bytes;
    const uint8_t type = head[3], flags = head[4], stream = head[8];
    if (!attempt->has_frame && type != FRAME_SETTINGS) attempt->is_foreign = true;
    attempt->has_frame = true;
    if (type == FRAME_PING && (flags & FLAG_ACK) != 0) attempt->ping_count++;
    if (stream == 1 && (type == FRAME_DATA || type == FRAME_HEADERS) && (flags & FLAG_END_STREAM) != 0)
        attempt->is_answered = true;
}

/* Reads more of a frame, or waits until there is more. False: the connection is over, what comes is no HTTP/2, or the
 * time is up. */
static bool read_some(struct attempt *attempt, int64_t deadline_ns)
{
    size_t wanted = FRAME_HEAD_BYTES;
    if (attempt->len_bytes >= FRAME_HEAD_BYTES) wanted += frame_len(attempt->bytes);
    ssize_t count = receive(attempt, attempt->bytes + attempt->len_bytes, wanted - attempt->len_bytes);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return wait_for(attempt->fd, POLLIN, deadline_ns) == 0;
    if (count <= 0) {
        attempt->is_foreign = !attempt->has_frame;
        return false;
    }
    attempt->len_bytes += (size_t)count;
    if (attempt->len_bytes < FRAME_HEAD_BYTES) return true;
    if (frame_len(attempt->bytes) > MAX_FRAME_BYTES) {
        attempt->is_foreign = !attempt->has_frame;
        return false;
    }
    if (attempt->len_bytes == FRAME_HEAD_BYTES + frame_len(attempt->bytes)) {
        take_frame(attempt);
        attempt->len_bytes = 0;
    }
    return !attempt->is_foreign;
}

/* Reads until so many PINGs are answered, or, with 0, until the call is. */
static bool await(struct attempt *attempt, unsigned ping_count)
{
    const int64_t deadline_ns = tl_clock_deadline_ns(STEP_NS);
    while (ping_count > 0 ? attempt->ping_count < ping_count : !attempt->is_answered) {
        if (!read_some(attempt, deadline_ns)) return false;
    }
    return true;
}

static bool send_all(const struct attempt *attempt, const uint8_t *bytes, size_t len_bytes)
{
    const int64_t deadline_ns = tl_clock_deadline_ns(STEP_NS);
    if (attempt->tls != NULL)
        return tl_tls_session_write(attempt->tls, bytes, len_bytes) && flush(attempt, deadline_ns);
    while (len_bytes > 0) {
        ssize_t count = send(attempt->fd, bytes, len_bytes, MSG_NOSIGNAL);
        if (count < 0 && errno != EAGAIN && errno != EINTR) return false;
        if (count < 0 && wait_for(attempt->fd, POLLOUT, deadline_ns) != 0) return false;
        if (count > 0) {
            bytes += count;
            len_bytes -= (size_t)count;
        }
    }
    return true;
}

/* ------------------------------------------------------------------------------------------------------- steps -- */

static bool try_small(struct attempt *attempt)
{
    static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    static const uint8_t number[8] = {1};
    uint8_t bytes[128];
    size_t len_bytes = sizeof(preface) - 1;
    memcpy(bytes, preface, len_bytes);
    len_bytes += put_frame(bytes + len_bytes, FRAME_SETTINGS, 0, 0, NULL, 0);
    len_bytes += put_frame(bytes + len_bytes, FRAME_PING, 0, 0, number, sizeof(number));
    return send_all(attempt, bytes, len_bytes) && await(attempt, 1);
}

static bool try_large_to(struct attempt *attempt)
{
    static const uint8_t number[8] = {2};
    static const uint8_t zeros[TL_DOCTOR_LARGE_BYTES];
    uint8_t bytes[FRAME_HEAD_BYTES * 2 + sizeof(zeros) + sizeof(number)];
    size_t len_bytes = put_frame(bytes, FRAME_UNKNOWN, 0, 0, zeros, sizeof(zeros));
    len_bytes += put_frame(bytes + len_bytes, FRAME_PING, 0, 0, number, sizeof(number));
    return send_all(attempt, bytes, len_bytes) && await(attempt, 2);
}

/* Appends a header that is not indexed. */
static size_t put_header(uint8_t *to, const char *name, const char *value)
{
    size_t name_bytes = strlen(name), value_bytes = strlen(value);
    to[0] = 0;
    to[1] = (uint8_t)name_bytes;
    memcpy(to + 2, name, name_bytes);
    to[2 + name_bytes] = (uint8_t)value_bytes;
    memcpy(to + 3 + name_bytes, value, value_bytes);
    return 3 + name_bytes + value_bytes;
}

/* Asks for the description of the service, which is larger than a packet. */
static bool try_large_from(struct attempt *attempt)
{
    static const char symbol[] = "tensorlane.v1.Cluster";
    uint8_t headers[512], message[64], bytes[1024];
    size_t headers_bytes = 0;
    headers_bytes += put_header(headers + headers_bytes, ":method", "POST");
    headers_bytes += put_header(headers + headers_bytes, ":scheme", "http");
    headers_bytes +=
        put_header(headers + headers_bytes, ":path", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo");
    headers_bytes += put_header(headers + headers_bytes, ":authority", "tensorlane");
    headers_bytes += put_header(headers + headers_bytes, "content-type", "application/grpc");
    headers_bytes += put_header(headers + headers_bytes, "te", "trailers");
    /* A message of gRPC with field 4 of ServerReflectionRequest, file_containing_symbol. */
    const uint8_t head[] = {0, 0, 0, 0, sizeof(symbol) + 1, 4 << 3 | 2, sizeof(symbol) - 1};
    memcpy(message, head, sizeof(head));
    memcpy(message + sizeof(head), symbol, sizeof(symbol) - 1);
    size_t len_bytes = put_frame(bytes, FRAME_HEADERS, FLAG_END_HEADERS, 1, headers, headers_bytes);
    len_bytes +=
        put_frame(bytes + len_bytes, FRAME_DATA, FLAG_END_STREAM, 1, message, sizeof(head) + sizeof(symbol) - 1);
    return send_all(attempt, bytes, len_bytes) && await(attempt, 0);
}

static enum tl_doctor_reach try_steps(struct attempt *attempt)
{
    if (!try_small(attempt)) return attempt->is_foreign ? TL_DOCTOR_REACH_FOREIGN : TL_DOCTOR_REACH_TCP;
    if (!try_large_to(attempt)) return TL_DOCTOR_REACH_SMALL;
    return try_large_from(attempt) ? TL_DOCTOR_REACH_ALL : TL_DOCTOR_REACH_LARGE_TO;
}

void tl_doctor_try_tcp(const struct tl_doctor_endpoint *endpoint, const struct tl_ip *ip, unsigned max_segment,
                       struct tl_doctor_attempt *ret_attempt)
{
    struct attempt attempt = {.fd = -1};
    struct tl_error error = {.message = ""};
    int segment_bytes = 0;
    socklen_t len_bytes = sizeof(segment_bytes);
    *ret_attempt = (struct tl_doctor_attempt){.error_number = connect_to(&attempt, ip, endpoint->port, max_segment)};
    if (ret_attempt->error_number == 0) {
        ret_attempt->reach = endpoint->tls != NULL ? secure(&attempt, endpoint, &error) : TL_DOCTOR_REACH_ALL;
        if (ret_attempt->reach == TL_DOCTOR_REACH_ALL) ret_attempt->reach = try_steps(&attempt);
        snprintf(ret_attempt->tls_reason, sizeof(ret_attempt->tls_reason), "%s", error.message);
        if (getsockopt(attempt.fd, IPPROTO_TCP, TCP_MAXSEG, &segment_bytes, &len_bytes) == 0 && segment_bytes > 0)
            ret_attempt->segment_bytes = (unsigned)segment_bytes;
    }
    close_attempt(&attempt);
}

void tl_doctor_reach(const struct tl_doctor_endpoint *endpoint, const struct tl_ip *ip,
                     struct tl_doctor_reached *ret_reached)
{
    *ret_reached = (struct tl_doctor_reached){.ip = *ip};
    tl_doctor_try_tcp(endpoint, ip, 0, &ret_reached->usual);
    enum tl_doctor_reach reach = ret_reached->usual.reach;
    bool is_behind_tcp =
        reach == TL_DOCTOR_REACH_TCP || reach == TL_DOCTOR_REACH_SMALL || reach == TL_DOCTOR_REACH_LARGE_TO;
    if (is_behind_tcp) tl_doctor_try_tcp(endpoint, ip, TL_DOCTOR_SMALL_SEGMENT, &ret_reached->small);
}
