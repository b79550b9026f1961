// SPDX-License-Identifier: Apache-2.0
/*
 * TLS connections without gRPC: which peers the two sides accept, what they say of others, and what becomes of
 * connections when certificates change.
 */
#include <arpa/inet.h>
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/sockios.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "control/connection.h"
#include "control/tls.h"
#include "fakes/certificates.h"
#include "fakes/log_capture.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"
#include "security/tls_internal.h"
#include "security/tls_session.h"

#define PATIENCE_MS 60000
#define MEMBER_0 "URI:spiffe://test/job/node/task/0"
#define MEMBER_1 "URI:spiffe://test/job/node/task/1"

static struct tl_error error;
static struct tl_loop *loop;
static struct authority authority;
static int accepted_pipe[2]; /* gRPC's ends of the connections that were accepted */

/* One process: its files and its TLS. */
struct side {
    char ca[200], certificate[200], key[200], crl[200];
    struct tl_tls_options options;
    struct tl_tls *tls;
};

static struct side server, client;
static int listening = -1;
static char target[64];

/* In the place of the C library's, for OpenSSL, too: certificates end without waiting for it. */
static atomic_long passed_s;
static pthread_t test_thread;

__attribute__((visibility("default"))) time_t time(time_t *ret_now)
{
    struct timespec now;
    (void)syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    now.tv_sec += atomic_load(&passed_s);
    if (ret_now != NULL) *ret_now = now.tv_sec;
    return now.tv_sec;
}

/* While it is held, the clock stands still for the thread of the tests: however long other programs keep it from its
 * work, its loop does not notice. */
static bool is_clock_held;
static struct timespec held_now;

static bool is_test_thread(void)
{
    return pthread_equal(pthread_self(), test_thread);
}

__attribute__((visibility("default"))) int clock_gettime(clockid_t clock, struct timespec *ret_now)
{
    if (clock != CLOCK_MONOTONIC || !is_test_thread() || !is_clock_held)
        return syscall(SYS_clock_gettime, clock, ret_now) == 0 ? 0 : -1;
    *ret_now = held_now;
    return 0;
}

static void hold_clock(bool is_held)
{
    is_clock_held = false;
    ck_assert_int_eq(clock_gettime(CLOCK_MONOTONIC, &held_now), 0);
    is_clock_held = is_held;
}

/* As many processors as a test wants. */
static unsigned processor_count;

__attribute__((visibility("default"))) int sched_getaffinity(pid_t thread, size_t size_bytes, cpu_set_t *ret_processors)
{
    if (processor_count == 0)
        return (int)syscall(SYS_sched_getaffinity, thread, size_bytes, ret_processors) < 0 ? -1 : 0;
    CPU_ZERO_S(size_bytes, ret_processors);
    for (size_t i = 0; i < processor_count; i++)
        CPU_SET_S(i, size_bytes, ret_processors);
    return 0;
}

/* The relay takes from gRPC's ends with this. */
static atomic_size_t moved_here_bytes, moved_elsewhere_bytes;

__attribute__((visibility("default"))) ssize_t recv(int fd, void *bytes, size_t capacity, int flags)
{
    ssize_t got = recvfrom(fd, bytes, capacity, flags, NULL, NULL);
    if (got > 0) atomic_fetch_add(is_test_thread() ? &moved_here_bytes : &moved_elsewhere_bytes, (size_t)got);
    return got;
}

/* The relay sends to the peer with this. */
static atomic_bool is_peer_full;

__attribute__((visibility("default"))) ssize_t send(int fd, const void *bytes, size_t len_bytes, int flags)
{
    int domain = AF_UNSPEC;
    ssize_t sent = sendto(fd, bytes, len_bytes, flags, NULL, 0);
    int error_number = errno;
    (void)getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &(socklen_t){sizeof(domain)});
    if (domain == AF_INET) atomic_store(&is_peer_full, sent < 0 && error_number == EAGAIN);
    errno = error_number;
    return sent;
}

/* While it is set, this system is one without SO_COOKIE. */
static atomic_bool lacks_cookies;

__attribute__((visibility("default"))) int getsockopt(int fd, int level, int option, void *ret_value, socklen_t *length)
{
    if (level == SOL_SOCKET && option == SO_COOKIE && atomic_load(&lacks_cookies)) {
        errno = ENOPROTOOPT;
        return -1;
    }
    return (int)syscall(SYS_getsockopt, fd, level, option, ret_value, length) < 0 ? -1 : 0;
}

/* How often the loop of the tests has given its connections back: the relay then lets its thread wait for the sockets
 * again, by a change of its outer instance, which alone has no pointer with it. */
static unsigned given_back_count;

__attribute__((visibility("default"))) int epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event)
{
    if (is_test_thread() && operation == EPOLL_CTL_MOD && event->data.ptr == NULL && event->events == EPOLLIN)
        given_back_count++;
    return (int)syscall(SYS_epoll_ctl, epoll, operation, fd, event) < 0 ? -1 : 0;
}

/* ------------------------------------------------------------------------------------------------------- sides -- */

static void side_name_files(struct side *side, const char *name)
{
    snprintf(side->ca, sizeof(side->ca), "%s/ca.pem", temp_folder);
    snprintf(side->certificate, sizeof(side->certificate), "%s/%s.pem", temp_folder, name);
    snprintf(side->key, sizeof(side->key), "%s/%s.key", temp_folder, name);
    snprintf(side->crl, sizeof(side->crl), "%s/%s.crl", temp_folder, name);
    side->options = (struct tl_tls_options){
        .settings = {.ca = side->ca, .certificate = side->certificate, .key = side->key},
        .handshake_timeout_ns = 30 * TL_NS_PER_SEC,
        .keepalive_timeout_ns = 5 * TL_NS_PER_SEC,
    };
}

static long side_issue(struct side *side, const struct certificate_kind *kind)
{
    return authority_issue(&authority, kind, side->certificate, side->key);
}

static void side_start(struct side *side)
{
    enum tl_status status = tl_tls_create(&side->options, &side->tls, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
}

static void side_end(struct side *side)
{
    if (side->tls != NULL) tl_tls_end(side->tls);
    tl_tls_release(side->tls);
    side->tls = NULL;
}

static void note_accepted(void *context, int fd, int connection, uint64_t cookie)
{
    (void)context;
    ck_assert_int_ge(connection, 0);
    ck_assert_uint_ne(cookie, 0);
    ck_assert_int_eq(write(accepted_pipe[1], &fd, sizeof(fd)), sizeof(fd));
}

static void listen_here(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof(address);
    listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(listening, (struct sockaddr *)&address, sizeof(address)), 0);
    ck_assert_int_eq(listen(listening, 100), 0);
    ck_assert_int_eq(getsockname(listening, (struct sockaddr *)&address, &length), 0);
    snprintf(target, sizeof(target), "ipv4:127.0.0.1:%u", ntohs(address.sin_port));
}

static void setup(void)
{
    processor_count = 0;
    test_thread = pthread_self();
    temp_folder_make();
    authority_init(&authority, "test authority", temp_path("ca.pem"));
    side_name_files(&server, "server");
    side_name_files(&client, "client");
    side_issue(&server, &(struct certificate_kind){.names = MEMBER_0});
    side_issue(&client, &(struct certificate_kind){.names = MEMBER_1});
    ck_assert_int_eq(pipe2(accepted_pipe, O_CLOEXEC), 0);
    ck_assert(tl_loop_create(&loop, &error) == TL_OK);
    listen_here();
}

static void teardown(void)
{
    side_end(&client);
    side_end(&server);
    tl_loop_destroy(loop);
    (void)close(listening);
    authority_fini(&authority);
    temp_folder_remove();
}

/* -------------------------------------------------------------------------------------------------- connections -- */

static bool is_dialled;
static int dialled_fd;
static struct tl_error dialled_error;

static void note_dialled(void *owner, int fd, const struct tl_error *failure)
{
    ck_assert_ptr_eq(owner, &client);
    is_dialled = true;
    dialled_fd = fd;
    dialled_error = *failure;
}

/* Takes a TCP connection to the server. */
static void serve_one(void)
{
    struct pollfd wait = {.fd = listening, .events = POLLIN};
    ck_assert_int_eq(poll(&wait, 1, PATIENCE_MS), 1);
    int fd = accept4(listening, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    ck_assert_int_ge(fd, 0);
    tl_tls_accept(server.tls, fd, note_accepted, NULL);
}

/* Begins to dial the server as this name, and lets it accept; the result will be in dialled_fd and dialled_error. */
static void begin_dialling(const char *expected_name, void (*accept_one)(void))
{
    const struct tl_tls_address address = {.target = target,
                                           .label = "the server",
                                           .expected_name = expected_name,
                                           .deadline_ns = tl_clock_deadline_ns(20 * TL_NS_PER_SEC)};
    struct tl_tls_dial *handle;
    is_dialled = false;
    ck_assert(tl_tls_dial(client.tls, loop, &address, note_dialled, &client, &handle, &error) == TL_OK);
    accept_one();
}

static void dial_with(const char *expected_name, void (*accept_one)(void))
{
    begin_dialling(expected_name, accept_one);
    while (!is_dialled)
        (void)tl_loop_run_once(loop, TL_TIME_NEVER);
}

static void dial(const char *expected_name)
{
    dial_with(expected_name, serve_one);
}

/* Connects a socket to where the server listens, which has not accepted it. */
static int connect_socket(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    address.sin_port = htons((uint16_t)strtoul(strrchr(target, ':') + 1, NULL, 10));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    return fd;
}

/* Connects a socket to the server without TLS. */
static int dial_plainly(void)
{
    int fd = connect_socket();
    serve_one();
    return fd;
}

static void start_both(void)
{
    side_start(&server);
    side_start(&client);
}

/* What a gRPC server sends first; the client's handshake waits for it. */
static void *say_hello(void *argument)
{
    (void)argument;
    struct pollfd wait = {.fd = accepted_pipe[0], .events = POLLIN};
    int fd;
    if (poll(&wait, 1, PATIENCE_MS) != 1 || read(accepted_pipe[0], &fd, sizeof(fd)) != sizeof(fd))
        return (void *)(intptr_t)-1;
    (void)!write(fd, "hello", 5);
    return (void *)(intptr_t)fd;
}

struct connected {
    int client_fd;
    int server_fd;
};

static struct connected connect_both(const char *expected_name)
{
    pthread_t thread;
    void *server_fd;
    ck_assert_int_eq(pthread_create(&thread, NULL, say_hello, NULL), 0);
    dial(expected_name);
    ck_assert_msg(dialled_fd >= 0, "%s", dialled_error.message);
    ck_assert_int_eq(pthread_join(thread, &server_fd), 0);
    struct connected connected = {.client_fd = dialled_fd, .server_fd = (int)(intptr_t)server_fd};
    ck_assert_int_ge(connected.server_fd, 0);
    char text[6] = "";
    struct pollfd wait = {.fd = connected.client_fd, .events = POLLIN};
    ck_assert_int_eq(poll(&wait, 1, PATIENCE_MS), 1);
    ck_assert_int_eq(read(connected.client_fd, text, 5), 5);
    ck_assert_str_eq(text, "hello");
    return connected;
}

static void disconnect(const struct connected *connected)
{
    (void)close(connected->client_fd);
    (void)close(connected->server_fd);
}

static void assert_peer(struct tl_tls *tls, int fd, const char *name)
{
    struct tl_tls_peer *peer = tl_tls_find(tls, tl_connection_cookie(fd));
    ck_assert_ptr_nonnull(peer);
    ck_assert_str_eq(peer->name.text, name);
    tl_tls_peer_release(peer);
}

static void assert_failed(const char *words)
{
    ck_assert_int_eq(dialled_fd, -1);
    ck_assert_msg(strstr(dialled_error.message, words) != NULL, "%s", dialled_error.message);
    ck_assert_msg(strncmp(dialled_error.message, "the server: ", 12) == 0, "%s", dialled_error.message);
}

/* Dials, and checks that it fails with a message that has these words. */
static void assert_refused(const char *expected_name, const char *words)
{
    begin_dialling(expected_name, serve_one);
    while (!is_dialled) {
        (void)tl_loop_run_once(loop, tl_clock_deadline_ns(10 * TL_NS_PER_MS));
        ck_assert_msg(poll(&(struct pollfd){.fd = accepted_pipe[0], .events = POLLIN}, 1, 0) == 0, "it was accepted");
    }
    assert_failed(words);
}

/* Waits until the other end is closed, and checks that nothing else comes. */
static void assert_ends(int fd)
{
    char byte;
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    ck_assert_int_eq(poll(&wait, 1, PATIENCE_MS), 1);
    ssize_t got = read(fd, &byte, 1);
    ck_assert_msg(got == 0 || (got < 0 && errno == ECONNRESET), "%zd", got);
}

static bool is_open(int fd)
{
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    return poll(&wait, 1, 0) == 0;
}

/* ------------------------------------------------------------------------------------------------------- tests -- */

START_TEST(bytes_pass_both_ways)
{
    start_both();
    struct connected connected = connect_both("/job:node/task:0");
    assert_peer(server.tls, connected.server_fd, "/job:node/task:1");
    assert_peer(client.tls, connected.client_fd, "/job:node/task:0");
    enum { TOTAL = 8 << 20, PIECE = 70000 };
    static uint8_t sent[TOTAL], received[TOTAL];
    for (size_t i = 0; i < TOTAL; i++)
        sent[i] = (uint8_t)(i * 2654435761u >> 13);
    int ends[2][2] = {{connected.client_fd, connected.server_fd}, {connected.server_fd, connected.client_fd}};
    for (unsigned way = 0; way < 2; way++) {
        size_t out = 0, in = 0;
        while (in < TOTAL) {
            struct pollfd waits[2] = {{.fd = ends[way][0], .events = out < TOTAL ? POLLOUT : 0},
                                      {.fd = ends[way][1], .events = POLLIN}};
            ck_assert_int_ge(poll(waits, 2, PATIENCE_MS), 1);
            size_t piece = TOTAL - out < PIECE ? TOTAL - out : PIECE;
            ssize_t moved = out < TOTAL ? send(ends[way][0], sent + out, piece, MSG_DONTWAIT) : 0;
            if (moved > 0) out += (size_t)moved;
            moved = recv(ends[way][1], received + in, TOTAL - in, MSG_DONTWAIT);
            if (moved > 0) in += (size_t)moved;
        }
        ck_assert_int_eq(memcmp(sent, received, TOTAL), 0);
        memset(received, 0, TOTAL);
    }
    disconnect(&connected);
}
END_TEST

/* A closure that writes as gRPC does when it is given something to send. */
struct writing {
    struct tl_closure closure;
    int fd;
};

static void write_one(struct tl_closure *closure)
{
    const struct writing *writing = TL_CONTAINER_OF(closure, struct writing, closure);
    tl_loop_begin_write(loop);
    ck_assert_int_eq(write(writing->fd, "x", 1), 1);
}

static void assert_comes(int fd)
{
    char byte;
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    ck_assert_int_eq(poll(&wait, 1, PATIENCE_MS), 1);
    ck_assert_int_eq(read(fd, &byte, 1), 1);
    ck_assert_int_eq(byte, 'x');
}

/* The client's loop moves the bytes of its connection while it is at work. */
static struct connected connect_driven(void)
{
    start_both();
    ck_assert(tl_tls_attach(client.tls, loop, &error) == TL_OK);
    return connect_both(NULL);
}

START_TEST(a_loop_at_work_moves_bytes)
{
    struct connected connected = connect_driven();
    struct writing writing = {.closure.run = write_one, .fd = connected.client_fd};
    for (unsigned i = 0; i < 1000; i++) {
        tl_loop_post(loop, &writing.closure);
        (void)tl_loop_run_once(loop, 0);
        assert_comes(connected.server_fd);
        ck_assert_int_eq(write(connected.server_fd, "x", 1), 1);
        struct pollfd wait = {.fd = connected.client_fd, .events = POLLIN};
        while (poll(&wait, 1, 0) == 0)
            (void)tl_loop_run_once(loop, tl_clock_deadline_ns(TL_NS_PER_MS));
        assert_comes(connected.client_fd);
    }
    disconnect(&connected);
}
END_TEST

/* Closures also run between rounds; what they send does not wait for the next one. The thread that runs them moves it,
 * unless the relay's thread is at work just then, as it is for a moment once a second. */
START_TEST(closures_between_rounds_move_bytes)
{
    enum { IN_A_ROW = 50, MOST_WRITES = 5000 };
    struct connected connected = connect_driven();
    struct writing writing = {.closure.run = write_one, .fd = connected.client_fd};
    unsigned row_count = 0;
    hold_clock(true);
    for (unsigned i = 0; i < MOST_WRITES && row_count < IN_A_ROW; i++) {
        size_t former_bytes = atomic_load(&moved_here_bytes);
        tl_loop_post(loop, &writing.closure);
        (void)tl_loop_run_closures(loop);
        row_count = atomic_load(&moved_here_bytes) > former_bytes ? row_count + 1 : 0;
        assert_comes(connected.server_fd);
    }
    hold_clock(false);
    ck_assert_uint_eq(row_count, IN_A_ROW);
    disconnect(&connected);
}
END_TEST

enum { LARGE_BYTES = 4 << 20, PIECE_BYTES = 512 << 10 };

/* A closure that writes a piece of a large tensor. */
struct writing_large {
    struct tl_closure closure;
    int fd;
    size_t written_bytes;
};

static void write_piece(struct tl_closure *closure)
{
    static const uint8_t piece[PIECE_BYTES];
    struct writing_large *writing = TL_CONTAINER_OF(closure, struct writing_large, closure);
    size_t left_bytes = LARGE_BYTES - writing->written_bytes;
    tl_loop_begin_write(loop);
    ssize_t sent = send(writing->fd, piece, left_bytes < PIECE_BYTES ? left_bytes : PIECE_BYTES, MSG_DONTWAIT);
    if (sent > 0) writing->written_bytes += (size_t)sent;
}

static void pass_large(const struct connected *connected)
{
    static uint8_t received[PIECE_BYTES];
    struct writing_large writing = {.closure.run = write_piece, .fd = connected->client_fd};
    size_t received_bytes = 0;
    atomic_store(&moved_here_bytes, 0);
    atomic_store(&moved_elsewhere_bytes, 0);
    while (received_bytes < LARGE_BYTES) {
        if (writing.written_bytes < LARGE_BYTES) tl_loop_post(loop, &writing.closure);
        (void)tl_loop_run_once(loop, 0);
        ssize_t got = recvfrom(connected->server_fd, received, sizeof(received), MSG_DONTWAIT, NULL, NULL);
        if (got > 0) received_bytes += (size_t)got;
    }
    ck_assert_uint_eq(atomic_load(&moved_here_bytes) + atomic_load(&moved_elsewhere_bytes), LARGE_BYTES);
}

/* A loop at work moves large tensors by itself where a thread beside it would take its processor from others. The
 * thread has them after a millisecond in which other programs keep the loop from its work, which the held clock hides,
 * and for a moment once a second. */
START_TEST(large_tensors_on_two_processors)
{
    processor_count = 2;
    struct connected connected = connect_driven();
    size_t most_bytes = 0;
    for (unsigned i = 0; i < 100 && most_bytes < LARGE_BYTES; i++) {
        hold_clock(true);
        pass_large(&connected);
        hold_clock(false);
        most_bytes = tl_max_u64(most_bytes, atomic_load(&moved_here_bytes));
    }
    ck_assert_uint_eq(most_bytes, LARGE_BYTES);
    disconnect(&connected);
}
END_TEST

/* However many connections have large tensors, a round of the loop moves a few MiB and goes on to other work. */
START_TEST(large_tensors_share_a_round)
{
    enum { CONNECTIONS = 16, MOST_BYTES = CONNECTIONS * PIECE_BYTES / 2 };
    struct connected connections[CONNECTIONS];
    processor_count = 2;
    connections[0] = connect_driven();
    for (unsigned i = 1; i < CONNECTIONS; i++)
        connections[i] = connect_both(NULL);
    size_t written_bytes = 0, moved_bytes = 0, most_bytes = 0;
    hold_clock(true); /* so that the loop keeps the connections */
    for (unsigned i = 0; i < CONNECTIONS; i++) {
        struct writing_large writing = {.closure.run = write_piece, .fd = connections[i].client_fd};
        write_piece(&writing.closure);
        written_bytes += writing.written_bytes;
    }
    ck_assert_uint_gt(written_bytes, MOST_BYTES);
    while (moved_bytes + atomic_load(&moved_elsewhere_bytes) < written_bytes) {
        size_t former_bytes = moved_bytes;
        (void)tl_loop_run_once(loop, 0);
        moved_bytes = atomic_load(&moved_here_bytes);
        most_bytes = tl_max_u64(most_bytes, moved_bytes - former_bytes);
    }
    hold_clock(false);
    ck_assert_uint_le(most_bytes, MOST_BYTES);
    for (unsigned i = 0; i < CONNECTIONS; i++)
        disconnect(&connections[i]);
}
END_TEST

static bool has_left(const struct connected *connected)
{
    int left_bytes;
    ck_assert_int_eq(ioctl(connected->client_fd, SIOCOUTQ, &left_bytes), 0);
    return left_bytes > 0;
}

/* Writes until the peer took nothing of what the loop has sent last. Returns how much was written. */
static size_t fill(const struct connected *connected)
{
    static const uint8_t piece[PIECE_BYTES];
    size_t written_bytes = 0;
    while (!atomic_load(&is_peer_full) || !has_left(connected)) {
        tl_loop_begin_write(loop);
        ssize_t sent = send(connected->client_fd, piece, sizeof(piece), MSG_DONTWAIT);
        if (sent > 0) written_bytes += (size_t)sent;
        (void)tl_loop_run_once(loop, 0);
    }
    return written_bytes;
}

/* Lets the peer read what was written. It comes without another round of the loop that has given its connections back;
 * another loop runs some. */
static void drain(const struct connected *connected, size_t written_bytes, bool is_given_back)
{
    static uint8_t bytes[2 << 20];
    for (size_t received = 0; received < written_bytes;) {
        struct pollfd wait = {.fd = connected->server_fd, .events = POLLIN};
        while (!is_given_back && poll(&wait, 1, 1) == 0)
            (void)tl_loop_run_once(loop, 0);
        ck_assert_int_eq(poll(&wait, 1, PATIENCE_MS), 1);
        ssize_t got = read(connected->server_fd, bytes, sizeof(bytes));
        ck_assert_int_gt(got, 0);
        received += (size_t)got;
    }
}

/* Returns whether the loop itself has given its connections back. Once a second the thread has them before that. */
static bool pause_gives_back(void)
{
    unsigned former_count = given_back_count;
    tl_loop_pause(loop);
    return given_back_count > former_count;
}

enum { PAUSES = 3, MOST_PAUSES = 30 };

/* A peer that takes no more blocks the connection of a loop that then runs no more rounds. */
START_TEST(a_loop_that_pauses_leaves_the_rest_to_the_thread)
{
    processor_count = 2;
    struct connected connected = connect_driven();
    unsigned given_count = 0;
    for (unsigned i = 0; i < MOST_PAUSES && given_count < PAUSES; i++) {
        size_t written_bytes = fill(&connected);
        tl_loop_begin_write(loop);
        bool is_given_back = pause_gives_back();
        drain(&connected, written_bytes, is_given_back);
        given_count += is_given_back;
    }
    ck_assert_uint_eq(given_count, PAUSES);
    disconnect(&connected);
}
END_TEST

/* Each of these connections has one step of the loop's last pass, which is less than was written to it. */
START_TEST(a_loop_that_pauses_leaves_what_is_ready_to_the_thread)
{
    enum { CONNECTIONS = 8 };
    struct connected connections[CONNECTIONS];
    size_t written_bytes[CONNECTIONS];
    processor_count = 2;
    connections[0] = connect_driven();
    for (unsigned i = 1; i < CONNECTIONS; i++)
        connections[i] = connect_both(NULL);
    unsigned given_count = 0;
    for (unsigned i = 0; i < MOST_PAUSES && given_count < PAUSES; i++) {
        for (unsigned j = 0; j < CONNECTIONS; j++) {
            struct writing_large writing = {.closure.run = write_piece, .fd = connections[j].client_fd};
            write_piece(&writing.closure);
            written_bytes[j] = writing.written_bytes;
        }
        (void)tl_loop_run_closures(loop);
        bool is_left = false;
        for (unsigned j = 0; j < CONNECTIONS; j++)
            is_left |= has_left(&connections[j]);
        bool is_given_back = pause_gives_back();
        given_count += is_left && is_given_back;
        for (unsigned j = 0; j < CONNECTIONS; j++)
            drain(&connections[j], written_bytes[j], is_given_back);
    }
    ck_assert_uint_eq(given_count, PAUSES);
    for (unsigned j = 0; j < CONNECTIONS; j++)
        disconnect(&connections[j]);
}
END_TEST

/* A machine under load may not let the thread run while much is passed. */
START_TEST(large_tensors_on_many_processors)
{
    processor_count = 64;
    struct connected connected = connect_driven();
    atomic_store(&moved_elsewhere_bytes, 0);
    for (unsigned i = 0; i < 100 && atomic_load(&moved_elsewhere_bytes) == 0; i++)
        pass_large(&connected);
    ck_assert_uint_gt(atomic_load(&moved_elsewhere_bytes), 0);
    disconnect(&connected);
}
END_TEST

START_TEST(a_loop_that_stops_working_gives_its_connections_back)
{
    struct connected connected = connect_driven();
    struct writing writing = {.closure.run = write_one, .fd = connected.client_fd};
    for (unsigned i = 0; i < 2; i++) {
        tl_loop_post(loop, &writing.closure);
        (void)tl_loop_run_once(loop, 0);
        /* No round follows. */
        ck_assert_int_eq(write(connected.server_fd, "x", 1), 1);
        assert_comes(connected.client_fd);
        assert_comes(connected.server_fd);
    }
    (void)close(connected.server_fd);
    assert_ends(connected.client_fd);
    (void)close(connected.client_fd);
}
END_TEST

START_TEST(what_was_sent_before_the_end_arrives)
{
    start_both();
    struct connected connected = connect_both(NULL);
    enum { TOTAL = 150000 };
    static uint8_t bytes[TOTAL];
    memset(bytes, 7, sizeof(bytes));
    ck_assert_int_eq(write(connected.server_fd, bytes, TOTAL), TOTAL);
    (void)close(connected.server_fd);
    size_t received = 0;
    for (;;) {
        struct pollfd wait = {.fd = connected.client_fd, .events = POLLIN};
        ck_assert_int_eq(poll(&wait, 1, PATIENCE_MS), 1);
        ssize_t got = read(connected.client_fd, bytes, TOTAL);
        if (got <= 0) break;
        received += (size_t)got;
    }
    ck_assert_uint_eq(received, TOTAL);
    (void)close(connected.client_fd);
}
END_TEST

/* A peer that does not read, and makes the session answer, ends it before it takes memory without end. */
START_TEST(what_waits_for_a_peer_is_bounded)
{
    int pair[2];
    struct tl_tls_context *contexts[2];
    struct tl_tls_session *sessions[2];
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
    const struct tl_tls_settings *settings[] = {&server.options.settings, &client.options.settings};
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(tl_tls_context_load(settings[i], NULL, &contexts[i], &error), TL_OK);
        ck_assert_int_eq(tl_tls_session_create(contexts[i], i == 0 ? TL_TLS_ACCEPTS : TL_TLS_DIALS, pair[i], NULL,
                                               &sessions[i], &error),
                         TL_OK);
    }
    enum tl_tls_progress progress = TL_TLS_WANTS_READ;
    while (progress == TL_TLS_WANTS_READ) {
        (void)tl_tls_session_handshake(sessions[1], &error);
        ck_assert_int_eq(tl_tls_session_flush(sessions[1]), TL_TLS_FLUSHED);
        progress = tl_tls_session_handshake(sessions[0], &error);
        ck_assert_int_eq(tl_tls_session_flush(sessions[0]), TL_TLS_FLUSHED);
    }
    ck_assert_int_eq(progress, TL_TLS_DONE);
    static uint8_t bytes[128 << 10];
    unsigned count = 0;
    while (count < 100 && tl_tls_session_write(sessions[0], bytes, sizeof(bytes)))
        count++;
    ck_assert_uint_eq(count, 7);
    for (int i = 0; i < 2; i++) {
        tl_tls_session_destroy(sessions[i]);
        tl_tls_context_release(contexts[i]);
        (void)close(pair[i]);
    }
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- keys -- */

static struct tl_tls_context *load_server(const struct tl_tls_context *before)
{
    struct tl_tls_context *context;
    ck_assert_int_eq(tl_tls_context_load(&server.options.settings, before, &context, &error), TL_OK);
    return context;
}

static const EVP_PKEY *key_of(const struct tl_tls_context *context)
{
    return SSL_CTX_get0_privatekey(tl_tls_context_ssl(context));
}

/* Connections keep what they were made with: each reading of a list of revoked certificates would take another key. */
START_TEST(contexts_with_one_key_share_it)
{
    enum { COUNT = 100 };
    struct tl_tls_context *contexts[COUNT] = {load_server(NULL)};
    for (int i = 1; i < COUNT; i++) {
        contexts[i] = load_server(contexts[i - 1]);
        ck_assert_ptr_eq(key_of(contexts[i]), key_of(contexts[0]));
    }
    side_issue(&server, &(struct certificate_kind){.names = MEMBER_1});
    struct tl_tls_context *other = load_server(contexts[0]);
    ck_assert_ptr_ne(key_of(other), key_of(contexts[0]));
    tl_tls_context_release(other);
    for (int i = 0; i < COUNT; i++)
        tl_tls_context_release(contexts[i]);
}
END_TEST

/* Takes all memory for keys in blocks, each of which begins with the one before, and returns the last. */
static void **take_key_memory(void **last)
{
    void **block;
    for (size_t size = 4096; size >= 32; size /= 2) {
        while ((block = OPENSSL_secure_malloc(size)) != NULL) {
            *block = last;
            last = block;
        }
    }
    return last;
}

static void give_key_memory(void **last)
{
    while (last != NULL) {
        void **before = *last;
        OPENSSL_secure_free(last);
        last = before;
    }
}

static void assert_no_key_memory(const char *beginning)
{
    struct tl_tls_context *context;
    ck_assert_int_eq(tl_tls_context_load(&server.options.settings, NULL, &context, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_msg(strncmp(error.message, beginning, strlen(beginning)) == 0, "%s", error.message);
}

START_TEST(no_memory_for_keys)
{
    start_both();
    ck_assert_int_eq(CRYPTO_secure_malloc_initialized(), 1);
    void *for_context = OPENSSL_secure_malloc(64), *for_text = OPENSSL_secure_malloc(256);
    void **blocks = take_key_memory(NULL);
    assert_no_key_memory("no memory for TLS: no locked memory is left for keys, because this process has too many TLS");
    OPENSSL_secure_free(for_context);
    assert_no_key_memory("no memory for keys to read ");
    OPENSSL_secure_free(for_text);
    assert_no_key_memory("the key ");
    blocks = take_key_memory(blocks);
    assert_refused(NULL, "too many TLS connections");
    give_key_memory(blocks);
    struct connected connected = connect_both(NULL);
    disconnect(&connected);
}
END_TEST

/* ------------------------------------------------------------------------------------ peers that misuse OpenSSL -- */

/* A session of the server and a careless client of it, which can both read and write. */
struct careless_pair {
    int fds[2];
    struct tl_tls_context *context;
    struct tl_tls_session *session;
    SSL *ssl;
};

static SSL *open_careless(const struct side *side, int fd);

static void open_careless_pair(struct careless_pair *pair)
{
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair->fds), 0);
    ck_assert_int_eq(tl_tls_context_load(&server.options.settings, NULL, &pair->context, &error), TL_OK);
    ck_assert_int_eq(tl_tls_session_create(pair->context, TL_TLS_ACCEPTS, pair->fds[0], NULL, &pair->session, &error),
                     TL_OK);
    pair->ssl = open_careless(&client, pair->fds[1]);
    enum tl_tls_progress progress = TL_TLS_WANTS_READ;
    while (progress == TL_TLS_WANTS_READ) {
        (void)SSL_connect(pair->ssl);
        progress = tl_tls_session_handshake(pair->session, &error);
        ck_assert_int_eq(tl_tls_session_flush(pair->session), TL_TLS_FLUSHED);
    }
    ck_assert_int_eq(progress, TL_TLS_DONE);
}

static void close_careless_pair(struct careless_pair *pair)
{
    SSL_free(pair->ssl);
    tl_tls_session_destroy(pair->session);
    tl_tls_context_release(pair->context);
    (void)close(pair->fds[0]);
    (void)close(pair->fds[1]);
}

static uint8_t read_bytes[128 << 10];

static enum tl_tls_progress read_some(struct careless_pair *pair, size_t *ret_len_bytes)
{
    return tl_tls_session_read(pair->session, read_bytes, sizeof(read_bytes), ret_len_bytes, &error);
}

static bool renew_keys(SSL *ssl)
{
    return SSL_key_update(ssl, SSL_KEY_UPDATE_NOT_REQUESTED) == 1 && SSL_do_handshake(ssl) == 1;
}

/* OpenSSL would take new keys for as long as they come, and the thread that moves the bytes of all connections would
 * do nothing else. */
START_TEST(keys_that_change_without_end)
{
    struct careless_pair pair;
    size_t len_bytes;
    open_careless_pair(&pair);
    /* New keys now and then are nothing special. */
    for (unsigned i = 0; i < 5; i++) {
        ck_assert(renew_keys(pair.ssl) && SSL_write(pair.ssl, "data", 4) == 4);
        ck_assert_int_eq(read_some(&pair, &len_bytes), TL_TLS_WANTS_READ);
        ck_assert_uint_eq(len_bytes, 4);
    }
    unsigned count = 0;
    while (count < 1000 && renew_keys(pair.ssl))
        count++;
    ck_assert_uint_gt(count, 100);
    ck_assert_int_eq(read_some(&pair, &len_bytes), TL_TLS_FAILED);
    ck_assert_int_eq(error.code, TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.message, "messages of TLS without end"));
    close_careless_pair(&pair);
}
END_TEST

/* Each call takes so many records that it ends soon, however little they carry. */
START_TEST(records_of_one_byte)
{
    struct careless_pair pair;
    size_t len_bytes;
    unsigned count = 0, total = 0;
    open_careless_pair(&pair);
    while (count < 1000 && SSL_write(pair.ssl, "x", 1) == 1)
        count++;
    ck_assert_uint_gt(count, 100);
    while (read_some(&pair, &len_bytes) == TL_TLS_DONE) {
        ck_assert_uint_eq(len_bytes, 64);
        total += 64;
    }
    ck_assert_uint_gt(total, 64);
    ck_assert_uint_eq(total + len_bytes, count);
    close_careless_pair(&pair);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- refusals -- */

START_TEST(another_name)
{
    start_both();
    assert_refused("/job:node/task:7", "for /job:node/task:0, and not for /job:node/task:7");
}
END_TEST

START_TEST(server_with_the_certificate_of_a_client)
{
    side_issue(&server, &(struct certificate_kind){.names = "URI:spiffe://test/client/ann"});
    start_both();
    assert_refused(NULL, "that of a client, spiffe://test/client/ann");
}
END_TEST

START_TEST(another_trust_domain)
{
    side_issue(&client, &(struct certificate_kind){.names = "URI:spiffe://other/job/node/task/1"});
    start_both();
    assert_refused(NULL, "trust domain");
}
END_TEST

START_TEST(trust_domain_that_is_named)
{
    static const char *const names[] = {"URI:spiffe://other/job/node/task/1", "URI:spiffe://other/client/ann"};
    side_issue(&client, &(struct certificate_kind){.names = names[_i]});
    server.options.settings.foreign_names = "third other";
    client.options.settings.foreign_names = "test";
    start_both();
    struct connected connected = connect_both(NULL);
    assert_peer(server.tls, connected.server_fd, names[_i] + strlen("URI:"));
    disconnect(&connected);
    assert_refused("/job:node/task:0", "is for spiffe://test/job/node/task/0, and not for "
                                       "/job:node/task:0");
}
END_TEST

/* Rules for single names of another trust domain. */
static void name_single_ones(void)
{
    server.options.settings.foreign_names = "third spiffe://other/job/node/task/1 spiffe://other/client/ann";
    client.options.settings.foreign_names = "spiffe://test/job/node/task/0";
}

START_TEST(foreign_name_that_is_named)
{
    static const char *const names[] = {"URI:spiffe://other/job/node/task/1", "URI:spiffe://other/client/ann"};
    name_single_ones();
    side_issue(&client, &(struct certificate_kind){.names = names[_i]});
    start_both();
    struct connected connected = connect_both(NULL);
    assert_peer(server.tls, connected.server_fd, names[_i] + strlen("URI:"));
    disconnect(&connected);
}
END_TEST

START_TEST(foreign_name_beside_those_that_are_named)
{
    static const char *const names[] = {"URI:spiffe://other/job/node/task/11", "URI:spiffe://other/job/node/task/0",
                                        "URI:spiffe://other/client/an"};
    name_single_ones();
    side_issue(&client, &(struct certificate_kind){.names = names[_i]});
    start_both();
    assert_refused(NULL, "it does not accept our certificate");
}
END_TEST

/* A rule cannot name it: a DNS name that is spelt like a trust domain is none. */
START_TEST(dns_name_like_a_foreign_trust_domain)
{
    server.options.settings.foreign_names = "other.org";
    client.options.settings.foreign_names = "test";
    side_issue(&client, &(struct certificate_kind){.names = "DNS:other.org"});
    start_both();
    assert_refused(NULL, "it does not accept our certificate");
}
END_TEST

START_TEST(dns_name_beside_a_trust_domain)
{
    client.options.settings.foreign_names = "node-0.test";
    side_issue(&server, &(struct certificate_kind){.names = "DNS:node-0.test"});
    start_both();
    assert_refused(NULL,
                   "/job:node/task:0, which is of no trust domain, and ours is for \"test\"; issue one with a URI");
}
END_TEST

START_TEST(trust_domain_with_another_beginning)
{
    side_issue(&client, &(struct certificate_kind){.names = "URI:spiffe://other/job/node/task/1"});
    server.options.settings.foreign_names = "othe other.org xother";
    client.options.settings.foreign_names = "test";
    start_both();
    assert_refused(NULL, "it does not accept our certificate");
}
END_TEST

START_TEST(another_authority)
{
    struct authority other;
    authority_init(&other, "other authority", temp_path("other.pem"));
    authority_issue(&other, &(struct certificate_kind){.names = MEMBER_1}, client.certificate, client.key);
    authority_fini(&other);
    start_both();
    assert_refused(NULL, "not of an authority that it trusts");
}
END_TEST

START_TEST(self_signed)
{
    side_issue(&client, &(struct certificate_kind){.names = MEMBER_1, .is_self_signed = true});
    start_both();
    assert_refused(NULL, "not of an authority that it trusts");
}
END_TEST

START_TEST(expires_before_the_handshake)
{
    side_issue(&client, &(struct certificate_kind){.names = MEMBER_1, .end_s = 1000});
    start_both();
    atomic_store(&passed_s, 1001);
    assert_refused(NULL, "has expired");
}
END_TEST

/* A session of OpenSSL over this socket, which presents the files of this side without looking at them. */
static SSL *open_careless(const struct side *side, int fd)
{
    SSL_CTX *context = SSL_CTX_new(TLS_method());
    SSL_CTX_set_security_level(context, 0);
    ck_assert_int_eq(SSL_CTX_use_certificate_chain_file(context, side->certificate), 1);
    ck_assert_int_eq(SSL_CTX_use_PrivateKey_file(context, side->key, SSL_FILETYPE_PEM), 1);
    ck_assert_int_eq(SSL_CTX_set_alpn_protos(context, (const uint8_t *)"\2h2", 3), 0);
    SSL *ssl = SSL_new(context);
    SSL_CTX_free(context);
    ck_assert_int_eq(SSL_set_fd(ssl, fd), 1);
    return ssl;
}

static void *accept_carelessly(void *argument)
{
    int fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
    SSL *ssl = open_careless(&server, fd);
    (void)argument;
    (void)SSL_accept(ssl);
    char byte;
    (void)SSL_read(ssl, &byte, 1); /* until the other side ends the connection */
    SSL_free(ssl);
    (void)close(fd);
    return NULL;
}

static pthread_t careless_thread;

static void accept_beside(void)
{
    ck_assert_int_eq(pthread_create(&careless_thread, NULL, accept_carelessly, NULL), 0);
}

START_TEST(server_whose_certificate_is_not_yet_valid)
{
    side_issue(&server, &(struct certificate_kind){.names = MEMBER_0, .begin_s = 1000, .end_s = 2000});
    side_start(&client);
    dial_with(NULL, accept_beside);
    assert_failed("certificate is not yet valid; renew it, or correct the clock of one side");
    ck_assert_int_eq(pthread_join(careless_thread, NULL), 0);
}
END_TEST

/* Waits until the server says or ends something; it must not accept the client. */
static void await_refusal(int fd)
{
    struct pollfd waits[] = {{.fd = fd, .events = POLLIN}, {.fd = accepted_pipe[0], .events = POLLIN}};
    ck_assert_int_ge(poll(waits, 2, PATIENCE_MS), 1);
    ck_assert_msg(waits[1].revents == 0, "the client was accepted");
}

/* The client presents what it could not load itself; the server says why it refuses that. */
static void assert_careless_client_refused(const struct certificate_kind *kind, const char *reason)
{
    log_capture_begin();
    side_issue(&client, kind);
    side_start(&server);
    int fd = dial_plainly();
    SSL *ssl = open_careless(&client, fd);
    char byte;
    /* Under TLS 1.3 the client's half of the handshake is over before the server looks at its certificate. */
    ck_assert_int_eq(SSL_connect(ssl), 1);
    await_refusal(fd);
    ck_assert_int_le(SSL_read(ssl, &byte, 1), 0);
    ck_assert_int_eq(ERR_GET_REASON(ERR_peek_last_error()), SSL_R_SSLV3_ALERT_BAD_CERTIFICATE);
    SSL_free(ssl);
    (void)close(fd);
    side_end(&server);
    ck_assert_uint_eq(log_capture_count(reason), 1);
    ck_assert_int_eq(poll(&(struct pollfd){.fd = accepted_pipe[0], .events = POLLIN}, 1, 0), 0);
}

START_TEST(client_whose_certificate_is_not_yet_valid)
{
    assert_careless_client_refused(&(struct certificate_kind){.names = MEMBER_1, .begin_s = 1000, .end_s = 2000},
                                   "certificate is not yet valid; renew it, or correct the clock");
}
END_TEST

START_TEST(client_whose_key_is_weak)
{
    assert_careless_client_refused(&(struct certificate_kind){.names = MEMBER_1, .rsa_bits = 1024},
                                   "EE certificate key too weak");
}
END_TEST

/* Connects once with OpenSSL, after prepare has taken something away from the client, and expects this reason. */
static void assert_lacking_client_refused(void (*prepare)(SSL *ssl), const char *reason)
{
    log_capture_begin();
    side_start(&server);
    int fd = dial_plainly();
    SSL *ssl = open_careless(&client, fd);
    prepare(ssl);
    (void)SSL_connect(ssl); /* it fails, unless the server looks at something after the client's half */
    await_refusal(fd);
    SSL_free(ssl);
    (void)close(fd);
    side_end(&server);
    ck_assert_uint_eq(log_capture_count(reason), 1);
    ck_assert_int_eq(poll(&(struct pollfd){.fd = accepted_pipe[0], .events = POLLIN}, 1, 0), 0);
}

static void take_certificate(SSL *ssl)
{
    SSL_certs_clear(ssl);
}

static void take_alpn(SSL *ssl)
{
    ck_assert_int_eq(SSL_set_alpn_protos(ssl, NULL, 0), 0);
}

static void take_tls_1_3(SSL *ssl)
{
    ck_assert_int_eq(SSL_set_max_proto_version(ssl, TLS1_2_VERSION), 1);
}

START_TEST(client_without_a_certificate)
{
    assert_lacking_client_refused(take_certificate, "it has no certificate");
}
END_TEST

START_TEST(client_without_alpn)
{
    assert_lacking_client_refused(take_alpn, "it does not ask for HTTP/2 by ALPN");
}
END_TEST

START_TEST(client_without_tls_1_3)
{
    assert_lacking_client_refused(take_tls_1_3, "it offers no version of TLS that is accepted here");
}
END_TEST

START_TEST(revoked)
{
    long serial = side_issue(&client, &(struct certificate_kind){.names = MEMBER_1});
    authority_revoke(&authority, &serial, 1, server.crl);
    server.options.settings.crl = server.crl;
    start_both();
    assert_refused(NULL, "revoked");
}
END_TEST

static void append_file(const char *path, const char *more)
{
    FILE *from = fopen(more, "r"), *to = fopen(path, "a");
    ck_assert(from != NULL && to != NULL);
    for (int byte; (byte = fgetc(from)) != EOF;)
        ck_assert_int_eq(fputc(byte, to), byte);
    ck_assert_int_eq(fclose(from) | fclose(to), 0);
}

/* Puts an authority, which ends after so many seconds (0: in an hour), between the trusted one and the client. Returns
 * its serial number. */
static long put_between(struct authority *between, long end_s)
{
    authority_init_below(&authority, between, "authority in between", end_s, temp_path("between.pem"));
    authority_issue(between, &(struct certificate_kind){.names = MEMBER_1}, client.certificate, client.key);
    append_file(client.certificate, temp_path("between.pem"));
    return authority.next_serial - 1;
}

/* A list names an authority in between, and is not asked for it; the list of that authority is asked for its clients.
 * Where that one is missing, its clients are refused. */
START_TEST(revoked_authority_in_between)
{
    struct authority between;
    log_capture_begin();
    long serial = put_between(&between, 0);
    server.options.settings.crl = server.crl;
    authority_revoke(&authority, &serial, 1, server.crl);
    authority_revoke(&between, NULL, 0, temp_path("between.crl"));
    if (_i > 0) append_file(server.crl, temp_path("between.crl"));
    start_both();
    if (_i > 0) {
        struct connected connected = connect_both(NULL);
        disconnect(&connected);
    } else {
        assert_refused(NULL, "not of an authority that it trusts");
        side_end(&server); /* it has logged all then */
        ck_assert_uint_eq(log_capture_count("unable to get certificate CRL; bring security.tls.crl up to date"), 1);
    }
    authority_fini(&between);
}
END_TEST

START_TEST(revoked_by_an_authority_in_between)
{
    struct authority between;
    (void)put_between(&between, 0);
    server.options.settings.crl = server.crl;
    long serial = between.next_serial - 1;
    authority_revoke(&authority, NULL, 0, server.crl);
    authority_revoke(&between, &serial, 1, temp_path("between.crl"));
    append_file(server.crl, temp_path("between.crl"));
    start_both();
    assert_refused(NULL, "our certificate is revoked");
    authority_fini(&between);
}
END_TEST

/* To revoke an authority in between, the trusted one is replaced; connections of its clients end. */
START_TEST(authority_above_the_one_in_between_is_replaced)
{
    struct authority between, other;
    (void)put_between(&between, 0);
    start_both();
    struct connected connected = connect_both(NULL);
    authority_init(&other, "other authority", temp_path("other.pem"));
    authority_issue(&other, &(struct certificate_kind){.names = MEMBER_0}, server.certificate, server.key);
    ck_assert_int_eq(rename(temp_path("other.pem"), server.ca), 0);
    assert_ends(connected.server_fd);
    disconnect(&connected);
    authority_fini(&between);
    authority_fini(&other);
}
END_TEST

START_TEST(no_name)
{
    side_issue(&server, &(struct certificate_kind){.names = "email:somebody@example.org"});
    enum tl_status status = tl_tls_create(&server.options, &server.tls, &error);
    ck_assert_int_eq(status, TL_INVALID_ARGUMENT);
    ck_assert_msg(strstr(error.message, "server.pem") != NULL, "%s", error.message);
}
END_TEST

/* Connects with OpenSSL, TLS 1.2 and these ciphers alone; returns whether the server takes one of them. */
static bool takes_cipher(const char *ciphers)
{
    int fd = dial_plainly();
    SSL *ssl = open_careless(&client, fd);
    ck_assert_int_eq(SSL_set_max_proto_version(ssl, TLS1_2_VERSION), 1);
    ck_assert_int_eq(SSL_set_cipher_list(ssl, ciphers), 1);
    bool is_taken = SSL_connect(ssl) == 1;
    SSL_free(ssl);
    (void)close(fd);
    return is_taken;
}

/* A private key signs, and nothing is encrypted for it: who gets hold of it later cannot read what was recorded. */
START_TEST(ciphers_of_tls_1_2)
{
    log_capture_begin();
    side_issue(&server, &(struct certificate_kind){.names = MEMBER_0, .rsa_bits = 2048});
    server.options.settings.is_tls12_allowed = true;
    side_start(&server);
    ck_assert(!takes_cipher("kRSA"));
    side_end(&server);
    /* The key could not decrypt; but no client is to get as far as asking it. */
    ck_assert_uint_eq(log_capture_count("no shared cipher"), 1);
    side_start(&server);
    ck_assert(takes_cipher("kRSA:ECDHE-RSA-AES128-GCM-SHA256"));
}
END_TEST

static void assert_not_loaded(enum tl_status expected, const char *words)
{
    enum tl_status status = tl_tls_create(&server.options, &server.tls, &error);
    ck_assert_msg(status == expected && strstr(error.message, words) != NULL, "%d: %s", status, error.message);
}

START_TEST(files_that_cannot_be_used)
{
    side_issue(&server, &(struct certificate_kind){.names = MEMBER_0, .begin_s = -100, .end_s = -10});
    assert_not_loaded(TL_FAILED_PRECONDITION, "has expired");
    side_issue(&server, &(struct certificate_kind){.names = MEMBER_0, .begin_s = 1000, .end_s = 2000});
    assert_not_loaded(TL_FAILED_PRECONDITION, "not valid yet");
    side_issue(&server, &(struct certificate_kind){.names = MEMBER_0, .rsa_bits = 1024});
    assert_not_loaded(TL_FAILED_PRECONDITION, "RSA needs 2,048 bits");
    side_issue(&server, &(struct certificate_kind){.names = MEMBER_0});
    ck_assert_int_eq(chmod(server.key, 0644), 0);
    assert_not_loaded(TL_PERMISSION_DENIED, "chmod 600");
    ck_assert_int_eq(chmod(server.key, 0600), 0);
    server.options.settings.key = client.key;
    assert_not_loaded(TL_INVALID_ARGUMENT, "does not belong to the certificate");
    server.options.settings.key = temp_path("nothing.key");
    assert_not_loaded(TL_NOT_FOUND, "nothing.key");
    server.options.settings.key = server.key;
    server.options.settings.ca = server.key;
    assert_not_loaded(TL_INVALID_ARGUMENT, "has no certificate");
}
END_TEST

/* Takes the right to lock memory from this process. */
static void forbid_locking(void)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3];
    ck_assert_int_eq((int)syscall(SYS_capget, &head, sets), 0);
    sets[0].effective &= ~(1U << CAP_IPC_LOCK);
    ck_assert_int_eq((int)syscall(SYS_capset, &head, sets), 0);
    ck_assert_int_eq(setrlimit(RLIMIT_MEMLOCK, &(struct rlimit){0}), 0);
}

START_TEST(keys_that_cannot_be_locked)
{
    log_capture_begin();
    forbid_locking();
    start_both();
    ck_assert_uint_eq(log_capture_count("private keys lie in memory that is not locked"), 1); /* not for each side */
    struct connected connected = connect_both(NULL);
    disconnect(&connected);
}
END_TEST

START_TEST(server_that_does_not_speak_tls)
{
    side_start(&client);
    const struct tl_tls_address address = {
        .target = target, .label = "the server", .deadline_ns = tl_clock_deadline_ns(20 * TL_NS_PER_SEC)};
    struct tl_tls_dial *handle;
    is_dialled = false;
    ck_assert(tl_tls_dial(client.tls, loop, &address, note_dialled, &client, &handle, &error) == TL_OK);
    int fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
    static const uint8_t settings[] = {0, 0, 0, 4, 0, 0, 0, 0, 0};
    ck_assert_int_eq(write(fd, settings, sizeof(settings)), sizeof(settings));
    while (!is_dialled)
        (void)tl_loop_run_once(loop, TL_TIME_NEVER);
    ck_assert_int_eq(dialled_fd, -1);
    ck_assert_msg(strstr(dialled_error.message, "does not speak TLS") != NULL, "%s", dialled_error.message);
    (void)close(fd);
}
END_TEST

START_TEST(client_that_does_not_speak_tls)
{
    side_start(&server);
    int fd = dial_plainly();
    static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    ck_assert_int_eq(write(fd, preface, sizeof(preface) - 1), sizeof(preface) - 1);
    char text[200] = "";
    size_t len = 0;
    while (strstr(text + 26, "security.tls") == NULL) {
        ssize_t got = read(fd, text + len, sizeof(text) - 1 - len);
        ck_assert_int_gt(got, 0);
        len += (size_t)got;
    }
    /* The connection stays until the client goes, so that the reason comes first. */
    ck_assert(is_open(fd));
    ck_assert_str_eq(text + 26, "this worker speaks TLS only: give the client security.tls");
    (void)close(fd);
}
END_TEST

/* Connects without TLS, says this, and goes when the server has answered. */
static void talk_plainly(const char *text)
{
    char answer[200];
    int fd = dial_plainly();
    ck_assert_int_eq(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    ck_assert_int_ge(read(fd, answer, sizeof(answer)), 0);
    (void)close(fd);
}

START_TEST(each_reason_is_logged_once_a_minute)
{
    log_capture_begin();
    side_start(&server);
    for (unsigned i = 0; i < 3; i++)
        talk_plainly("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    talk_plainly("nonsense that is no TLS");
    side_end(&server);
    ck_assert_uint_eq(log_capture_count("TLS handshake failed"), 2);
    ck_assert_uint_eq(log_capture_count("others=2"), 1);
}
END_TEST

/* A connection that says nothing ends at its deadline, and one that never ends its handshake too. */
START_TEST(silent_and_slow_clients)
{
    server.options.handshake_timeout_ns = TL_NS_PER_SEC;
    side_start(&server);
    int silent = dial_plainly();
    int slow = dial_plainly();
    static const uint8_t beginning[] = {22, 3, 1, 2, 0, 1};
    ck_assert_int_eq(write(slow, beginning, sizeof(beginning)), sizeof(beginning));
    assert_ends(silent);
    assert_ends(slow);
    (void)close(silent);
    (void)close(slow);
}
END_TEST

/* Raises the limit of descriptors of this process to this many, or as far as it may. Returns the limit. */
static rlim_t allow_descriptors(rlim_t count)
{
    struct rlimit limit;
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    if (limit.rlim_cur >= count) return limit.rlim_cur;
    limit.rlim_cur = tl_min_u64(count, limit.rlim_max);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    return limit.rlim_cur;
}

START_TEST(others_are_served_beside_a_thousand_half_open)
{
    enum { COUNT = 1100, OTHERS = 200 };
    static int silent[COUNT];
    /* Both ends of each are in this process. */
    size_t count = (allow_descriptors(2 * COUNT + OTHERS) - OTHERS) / 2;
    if (count < COUNT) printf("the hard limit of descriptors allows %zu of %d half open connections\n", count, COUNT);
    count = tl_min_u64(count, COUNT);
    start_both();
    for (size_t i = 0; i < count; i++)
        silent[i] = dial_plainly();
    struct connected connected = connect_both(NULL);
    if (count == COUNT) assert_ends(silent[0]); /* the oldest made place */
    ck_assert(is_open(silent[count - 1]));
    disconnect(&connected);
    for (size_t i = 0; i < count; i++)
        (void)close(silent[i]);
}
END_TEST

START_TEST(certificates_change_while_connections_run)
{
    struct connected first, second;
    log_capture_begin();
    tl_log_configure(TL_LOG_INFO, TL_LOG_KEY_VALUE);
    authority_revoke(&authority, NULL, 0, server.crl);
    server.options.settings.crl = server.crl;
    long serial = side_issue(&client, &(struct certificate_kind){.names = MEMBER_1});
    start_both();
    first = connect_both(NULL);
    /* The client's certificate is replaced: its connection stays, and the next one has the new certificate. */
    side_issue(&client, &(struct certificate_kind){.names = "URI:spiffe://test/job/node/task/2"});
    while (log_capture_count("certificates loaded again") == 0)
        usleep(10000);
    second = connect_both(NULL);
    ck_assert(is_open(first.server_fd));
    assert_peer(server.tls, first.server_fd, "/job:node/task:1");
    assert_peer(server.tls, second.server_fd, "/job:node/task:2");
    /* The first certificate is revoked: only its connection ends. */
    authority_revoke(&authority, &serial, 1, server.crl);
    assert_ends(first.server_fd);
    ck_assert(is_open(second.server_fd));
    assert_peer(server.tls, second.server_fd, "/job:node/task:2");
    disconnect(&first);
    disconnect(&second);
}
END_TEST

START_TEST(a_client_that_has_gone_when_it_is_accepted_has_an_address)
{
    log_capture_begin();
    tl_log_configure(TL_LOG_WARN, TL_LOG_KEY_VALUE);
    side_start(&server);
    int fd = connect_socket();
    const struct linger reset = {.l_onoff = 1};
    ck_assert_int_eq(setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset)), 0);
    (void)close(fd);
    serve_one();
    while (log_capture_count("TLS handshake failed") == 0)
        usleep(10000);
    ck_assert_uint_eq(log_capture_count("address=ipv4:127.0.0.1:"), 1);
}
END_TEST

START_TEST(a_system_without_cookies_of_sockets)
{
    log_capture_begin();
    tl_log_configure(TL_LOG_WARN, TL_LOG_KEY_VALUE);
    start_both();
    atomic_store(&lacks_cookies, true);
    dial(NULL);
    while (log_capture_count("TLS handshake failed") == 0)
        usleep(10000);
    atomic_store(&lacks_cookies, false);
    ck_assert_int_eq(dialled_fd, -1);
    ck_assert_uint_eq(log_capture_count("lacks the socket option SO_COOKIE, which Linux has since 4.12: "
                                        "Protocol not available"),
                      1);
}
END_TEST

/* A connection belongs to the trust domain in which it was accepted. */
START_TEST(own_trust_domain_changes_while_connections_run)
{
    log_capture_begin();
    server.options.settings.foreign_names = "test other";
    client.options.settings.foreign_names = "test other";
    start_both();
    struct connected first = connect_both(NULL);
    side_issue(&server, &(struct certificate_kind){.names = "URI:spiffe://other/job/node/task/0"});
    assert_ends(first.server_fd);
    struct connected second = connect_both(NULL);
    assert_peer(server.tls, second.server_fd, "spiffe://test/job/node/task/1");
    ck_assert(is_open(second.server_fd));
    side_end(&server);
    ck_assert_uint_eq(log_capture_count("this worker's certificate is for trust domain \\\"other\\\" now"), 1);
    disconnect(&first);
    disconnect(&second);
}
END_TEST

START_TEST(certificate_expires_while_its_connection_runs)
{
    side_issue(&client, &(struct certificate_kind){.names = MEMBER_1, .end_s = 1000});
    start_both();
    struct connected connected = connect_both(NULL);
    ck_assert(is_open(connected.server_fd));
    atomic_store(&passed_s, 1001);
    assert_ends(connected.server_fd);
    disconnect(&connected);
}
END_TEST

/* A connection ends with the first certificate of its peer's chain that does; that of the client is valid longer. */
START_TEST(authority_in_between_expires_first)
{
    struct authority between;
    struct careless_pair pair;
    (void)put_between(&between, 1000);
    open_careless_pair(&pair);
    ck_assert_int_le(tl_tls_session_not_after(pair.session), time(NULL) + 1000);
    close_careless_pair(&pair);
    authority_fini(&between);
}
END_TEST

static void send_what_leaves(BIO *leaving, int fd)
{
    char bytes[16384];
    int len = BIO_read(leaving, bytes, sizeof(bytes));
    if (len > 0) ck_assert_int_eq(write(fd, bytes, (size_t)len), len);
}

/* The list counts that is there when the handshake ends. */
START_TEST(revoked_during_the_handshake)
{
    log_capture_begin();
    tl_log_configure(TL_LOG_INFO, TL_LOG_KEY_VALUE);
    long serial = side_issue(&client, &(struct certificate_kind){.names = MEMBER_1});
    authority_revoke(&authority, NULL, 0, server.crl);
    server.options.settings.crl = server.crl;
    side_start(&server);
    int fd = dial_plainly();
    SSL *ssl = open_careless(&client, fd);
    BIO *arrived = BIO_new(BIO_s_mem()), *leaving = BIO_new(BIO_s_mem());
    (void)BIO_set_mem_eof_return(arrived, -1);
    SSL_set_bio(ssl, arrived, leaving);
    char bytes[16384];
    while (SSL_connect(ssl) != 1) {
        send_what_leaves(leaving, fd);
        ssize_t got = read(fd, bytes, sizeof(bytes));
        ck_assert_int_gt(got, 0);
        ck_assert_int_eq(BIO_write(arrived, bytes, (int)got), got);
    }
    authority_revoke(&authority, &serial, 1, server.crl);
    while (log_capture_count("certificates loaded again") == 0)
        usleep(10000);
    send_what_leaves(leaving, fd); /* the certificate and the end of the handshake */
    await_refusal(fd);
    SSL_free(ssl);
    (void)close(fd);
    side_end(&server);
    ck_assert_msg(poll(&(struct pollfd){.fd = accepted_pipe[0], .events = POLLIN}, 1, 0) == 0, "it was accepted");
    ck_assert_uint_eq(log_capture_count("certificate revoked"), 1);
}
END_TEST

START_TEST(broken_files_change_nothing)
{
    start_both();
    temp_write(server.certificate, "nonsense", 8);
    sleep(2);
    struct connected connected = connect_both("/job:node/task:0");
    disconnect(&connected);
}
END_TEST

/* Each is a case of its own, so that it can be run alone. */
#define ADD(test, count)                                                                                               \
    do {                                                                                                               \
        TCase *tcase = tcase_create(#test);                                                                            \
        tcase_add_checked_fixture(tcase, setup, teardown);                                                             \
        tcase_add_loop_test(tcase, test, 0, count);                                                                    \
        suite_add_tcase(suite, tcase);                                                                                 \
    } while (0)

int main(void)
{
    Suite *suite = suite_create("tls");
    ADD(bytes_pass_both_ways, 1);
    ADD(a_loop_at_work_moves_bytes, 1);
    ADD(closures_between_rounds_move_bytes, 1);
    ADD(large_tensors_on_two_processors, 1);
    ADD(large_tensors_on_many_processors, 1);
    ADD(large_tensors_share_a_round, 1);
    ADD(a_loop_that_pauses_leaves_the_rest_to_the_thread, 1);
    ADD(a_loop_that_pauses_leaves_what_is_ready_to_the_thread, 1);
    ADD(a_loop_that_stops_working_gives_its_connections_back, 1);
    ADD(what_was_sent_before_the_end_arrives, 1);
    ADD(what_waits_for_a_peer_is_bounded, 1);
    ADD(keys_that_change_without_end, 1);
    ADD(records_of_one_byte, 1);
    ADD(another_name, 1);
    ADD(server_with_the_certificate_of_a_client, 1);
    ADD(another_trust_domain, 1);
    ADD(trust_domain_that_is_named, 2);
    ADD(trust_domain_with_another_beginning, 1);
    ADD(foreign_name_that_is_named, 2);
    ADD(foreign_name_beside_those_that_are_named, 3);
    ADD(dns_name_like_a_foreign_trust_domain, 1);
    ADD(dns_name_beside_a_trust_domain, 1);
    ADD(contexts_with_one_key_share_it, 1);
    ADD(no_memory_for_keys, 1);
    ADD(another_authority, 1);
    ADD(self_signed, 1);
    ADD(expires_before_the_handshake, 1);
    ADD(server_whose_certificate_is_not_yet_valid, 1);
    ADD(client_whose_certificate_is_not_yet_valid, 1);
    ADD(client_whose_key_is_weak, 1);
    ADD(client_without_a_certificate, 1);
    ADD(client_without_alpn, 1);
    ADD(client_without_tls_1_3, 1);
    ADD(revoked, 1);
    ADD(revoked_authority_in_between, 2);
    ADD(revoked_by_an_authority_in_between, 1);
    ADD(authority_above_the_one_in_between_is_replaced, 1);
    ADD(no_name, 1);
    ADD(ciphers_of_tls_1_2, 1);
    ADD(files_that_cannot_be_used, 1);
    ADD(keys_that_cannot_be_locked, 1);
    ADD(server_that_does_not_speak_tls, 1);
    ADD(client_that_does_not_speak_tls, 1);
    ADD(each_reason_is_logged_once_a_minute, 1);
    ADD(silent_and_slow_clients, 1);
    ADD(others_are_served_beside_a_thousand_half_open, 1);
    ADD(certificates_change_while_connections_run, 1);
    ADD(a_client_that_has_gone_when_it_is_accepted_has_an_address, 1);
    ADD(a_system_without_cookies_of_sockets, 1);
    ADD(own_trust_domain_changes_while_connections_run, 1);
    ADD(certificate_expires_while_its_connection_runs, 1);
    ADD(authority_in_between_expires_first, 1);
    ADD(revoked_during_the_handshake, 1);
    ADD(broken_files_change_nothing, 1);
    return run_suite(suite);
}
