// SPDX-License-Identifier: Apache-2.0
/* Listening sockets: what can be bound, how long a bind waits for a busy port, and a temporary lack of descriptors.
 * rpc_server_test.c has the other addresses that cannot be bound. */
#include <arpa/inet.h>
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "control/listener.h"
#include "fakes/run_suite.h"

#define PATIENCE_MS 60000

static struct tl_error error;
static struct tl_listener *listener;
static uint16_t port;
static int taken_pipe[2]; /* The descriptors that were taken, in order. */

static void take(void *context, int fd)
{
    ck_assert_ptr_eq(context, &error);
    ck_assert_int_eq(write(taken_pipe[1], &fd, sizeof(fd)), sizeof(fd));
}

static void setup(void)
{
    ck_assert_int_eq(pipe2(taken_pipe, O_CLOEXEC), 0);
    listener = NULL;
}

static void teardown(void)
{
    tl_listener_close(listener);
}

static void open_at(const char *address)
{
    enum tl_status status = tl_listener_open(address, take, &error, &listener, &port, &error);
    ck_assert_msg(status == TL_OK, "%s: %s", address, error.message);
    ck_assert_uint_ne(port, 0);
}

/* Connects a socket to the port at an IPv4 address. */
static void dial_with(int fd, const char *host)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(port)};
    ck_assert_int_eq(inet_pton(AF_INET, host, &v4.sin_addr), 1);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&v4, sizeof(v4)), 0);
}

/* Connects to the port at an IPv4 or IPv6 address. */
static int dial(const char *host)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    bool is_v4 = inet_pton(AF_INET, host, &v4.sin_addr) == 1;
    ck_assert(is_v4 || inet_pton(AF_INET6, host, &v6.sin6_addr) == 1);
    int fd = socket(is_v4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    int result =
        is_v4 ? connect(fd, (struct sockaddr *)&v4, sizeof(v4)) : connect(fd, (struct sockaddr *)&v6, sizeof(v6));
    ck_assert_msg(result == 0, "%s: %s", host, strerror(errno));
    return fd;
}

static bool is_anything_taken(int timeout_ms)
{
    struct pollfd wait = {.fd = taken_pipe[0], .events = POLLIN};
    return poll(&wait, 1, timeout_ms) == 1;
}

/* Returns the next connection that was taken, which must come. */
static int next_taken(void)
{
    int fd = -1;
    ck_assert(is_anything_taken(PATIENCE_MS));
    ck_assert_int_eq(read(taken_pipe[0], &fd, sizeof(fd)), sizeof(fd));
    return fd;
}

START_TEST(connections_are_given_away)
{
    open_at("127.0.0.1:0");
    tl_listener_start(listener);
    for (unsigned n = 0; n < 200; n++) {
        int client = dial("127.0.0.1");
        int fd = next_taken();
        ck_assert_int_ne(fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
        ck_assert_int_ne(fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
        ck_assert_int_eq(write(fd, "x", 1), 1);
        char text = 0;
        ck_assert_int_eq(read(client, &text, 1), 1);
        close(fd);
        close(client);
    }
}
END_TEST

START_TEST(clients_wait_for_the_start)
{
    open_at("127.0.0.1:0");
    int client = dial("127.0.0.1");
    ck_assert(!is_anything_taken(50));
    tl_listener_start(listener);
    close(next_taken());
    close(client);
}
END_TEST

START_TEST(nothing_is_taken_after_the_close)
{
    open_at("127.0.0.1:0");
    tl_listener_start(listener);
    int client = dial("127.0.0.1");
    close(next_taken());
    close(client);
    tl_listener_close(listener);
    char address[32];
    snprintf(address, sizeof(address), "127.0.0.1:%u", port);
    /* Once the thread and its sockets have gone, another listener gets the port at once. */
    open_at(address);
    client = dial("127.0.0.1");
    ck_assert(!is_anything_taken(0));
    close(client);
}
END_TEST

START_TEST(never_started)
{
    open_at("127.0.0.1:0");
    tl_listener_close(listener);
    listener = NULL;
    tl_listener_close(NULL);
}
END_TEST

static bool has_ipv6(void)
{
    struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool can_bind = fd >= 0 && bind(fd, (struct sockaddr *)&any, sizeof(any)) == 0;
    if (fd >= 0) close(fd);
    return can_bind;
}

START_TEST(all_addresses_of_both_versions)
{
    if (!has_ipv6()) return; /* Then no client can ask for it either. */
    open_at("[::]:0");
    tl_listener_start(listener);
    int first = dial("::1");
    close(next_taken());
    int second = dial("127.0.0.1");
    close(next_taken());
    close(first);
    close(second);
}
END_TEST

START_TEST(all_addresses_of_a_name)
{
    open_at("localhost:0");
    tl_listener_start(listener);
    int client = dial("127.0.0.1");
    close(next_taken());
    close(client);
}
END_TEST

START_TEST(address_of_another)
{
    struct tl_listener *other = NULL;
    uint16_t other_port = 7;
    char address[32];
    open_at("127.0.0.1:0");
    snprintf(address, sizeof(address), "127.0.0.1:%u", port);
    ck_assert_int_eq(tl_listener_open(address, take, &error, &other, &other_port, &error), TL_ALREADY_EXISTS);
    ck_assert_ptr_nonnull(strstr(error.message, address));
    snprintf(address, sizeof(address), "[::]:%u", port);
    ck_assert_int_ne(tl_listener_open(address, take, &error, &other, &other_port, &error), TL_OK);
    ck_assert_ptr_null(other);
    ck_assert_uint_eq(other_port, 7);
}
END_TEST

static void limit_descriptors(rlim_t count)
{
    struct rlimit limit;
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = count;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

START_TEST(no_descriptor_to_listen)
{
    struct tl_listener *other = NULL;
    limit_descriptors((rlim_t)(taken_pipe[1] + 1));
    ck_assert_int_eq(tl_listener_open("127.0.0.1:0", take, &error, &other, &port, &error), TL_RESOURCE_EXHAUSTED);
    limit_descriptors((rlim_t)(taken_pipe[1] + 2)); /* Enough descriptors for the event. */
    ck_assert_int_eq(tl_listener_open("127.0.0.1:0", take, &error, &other, &port, &error), TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_null(other);
}
END_TEST

enum { LIMIT = 100, SPARES = 4 };

/* Uses up all descriptors with copies of one. Returns how many there are. */
static unsigned fill(int fd, int filling[LIMIT])
{
    unsigned count = 0;
    while ((filling[count] = dup(fd)) >= 0)
        count++;
    return count;
}

static void close_all(const int *fds, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        close(fds[i]);
}

/* Waits until as many descriptors are free as before, which includes that the listener has opened all spares. */
static void await_free(int fd, unsigned free_count)
{
    int filling[LIMIT];
    for (unsigned count = 0; count != free_count;) {
        poll(NULL, 0, 10);
        count = fill(fd, filling);
        close_all(filling, count);
    }
}

/* A worker that is exactly at its limit lacks nothing. */
START_TEST(the_last_descriptor_is_no_lack)
{
    int filling[LIMIT];
    limit_descriptors(LIMIT);
    open_at("127.0.0.1:0");
    int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    /* A listener that has started holds a descriptor for a moment when it looks for connections. */
    unsigned count = fill(client, filling);
    close(filling[--count]);
    tl_listener_start(listener);
    dial_with(client, "127.0.0.1");
    int fd = next_taken();
    ck_assert_int_eq(dup(fd), -1);
    ck_assert(!is_anything_taken(300)); /* The listener looks again. */
    ck_assert_int_eq(tl_listener_short_ns(listener), 0);
    close_all(filling, count);
    close(fd);
    close(client);
}
END_TEST

/* Spare descriptors serve some connections; one that cannot be taken waits, however often that happens. */
START_TEST(a_lack_of_descriptors_passes)
{
    enum { CLIENTS = 20 };
    int clients[CLIENTS], fds[CLIENTS], filling[LIMIT];
    unsigned free_count = 0;
    limit_descriptors(LIMIT);
    open_at("127.0.0.1:0");
    tl_listener_start(listener);
    for (unsigned round = 0; round < 2; round++) {
        int64_t begin_ns = tl_clock_now_ns();
        clients[0] = dial("127.0.0.1");
        fds[0] = next_taken();
        for (unsigned i = 1; i < SPARES + 2; i++)
            clients[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (round > 0) await_free(fds[0], free_count);
        free_count = fill(fds[0], filling);
        unsigned taken_count = 1;
        for (unsigned i = 1; i < SPARES + 2; i++)
            dial_with(clients[i], "127.0.0.1");
        fds[taken_count++] = next_taken();
        ck_assert_int_ge(tl_listener_short_ns(listener), begin_ns);
        while (taken_count < SPARES + 1)
            fds[taken_count++] = next_taken();
        ck_assert(!is_anything_taken(300)); /* The last one waits. */
        close_all(filling, free_count);
        while (taken_count < SPARES + 2)
            fds[taken_count++] = next_taken();
        for (unsigned i = SPARES + 2; i < CLIENTS; i++) {
            clients[i] = dial("127.0.0.1");
            fds[i] = next_taken();
        }
        for (unsigned i = 0; i < CLIENTS; i++) {
            close(clients[i]);
            close(fds[i]);
        }
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("listener");
    TCase *tcase = tcase_create("listener");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_set_timeout(tcase, 100);
    tcase_add_test(tcase, connections_are_given_away);
    tcase_add_test(tcase, clients_wait_for_the_start);
    tcase_add_test(tcase, nothing_is_taken_after_the_close);
    tcase_add_test(tcase, never_started);
    tcase_add_test(tcase, all_addresses_of_both_versions);
    tcase_add_test(tcase, all_addresses_of_a_name);
    tcase_add_test(tcase, address_of_another);
    tcase_add_test(tcase, no_descriptor_to_listen);
    tcase_add_test(tcase, the_last_descriptor_is_no_lack);
    tcase_add_test(tcase, a_lack_of_descriptors_passes);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
