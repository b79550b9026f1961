// SPDX-License-Identifier: Apache-2.0
/* The gRPC server by itself: where it can listen, what it survives, and how it stops. */
#include <arpa/inet.h>
#include <check.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "control/credentials.h"
#include "control/rpc_server.h"
#include "fakes/run_suite.h"

#define METHOD "/test.Service/Method"

static struct tl_loop *loop;
static struct tl_rpc_server *server;
static struct tl_error error;
static uint16_t port;
static unsigned accepted;
static unsigned closed;
static bool is_stopped;

static struct tl_rpc_server *create(void)
{
    const struct tl_rpc_server_options options = {.keepalive_ns = TL_TIME_NEVER,
                                                  .keepalive_timeout_ns = TL_TIME_NEVER,
                                                  .max_unfinished_ns = TL_TIME_NEVER,
                                                  .max_message_bytes = 1 << 20,
                                                  .max_calls = 100};
    struct tl_rpc_server *created;
    ck_assert(tl_rpc_server_create(loop, &options, &created, &error) == TL_OK);
    return created;
}

static void setup(void)
{
    accepted = 0;
    closed = 0;
    is_stopped = false;
    ck_assert(tl_loop_create(&loop, &error) == TL_OK);
    server = create();
}

static void teardown(void)
{
    tl_rpc_server_destroy(server);
    tl_loop_destroy(loop);
}

/* With its newer way to make read buffers, gRPC 1.51 aborts when a connection floods it. */
START_TEST(older_read_buffers_are_chosen)
{
    if (strncmp(grpc_version_string(), "29.", 3) != 0) return;
    const char *experiments = getenv("GRPC_EXPERIMENTS");
    ck_assert_ptr_nonnull(experiments);
    ck_assert_ptr_nonnull(strstr(experiments, "-tcp_read_chunks"));
}
END_TEST

static void note_closed(struct tl_stream *stream, const struct tl_error *status)
{
    (void)stream;
    (void)status;
    closed++;
}

static const struct tl_stream_events server_events = {.on_closed = note_closed};

/* Accepts a call and never answers it. */
static void accept_call(void *context, struct tl_stream *stream)
{
    (void)context;
    tl_stream_set_events(stream, &server_events);
    accepted++;
}

static void note_stopped(void *context)
{
    (void)context;
    is_stopped = true;
}

static void start(void)
{
    ck_assert(tl_rpc_server_add_method(server, METHOD, TL_ACTION_READ, accept_call, NULL, &error) == TL_OK);
    ck_assert_msg(tl_rpc_server_start(server, "127.0.0.1:0", &port, &error) == TL_OK, "%s", error.message);
    ck_assert_uint_ne(port, 0);
}

static void stop(int64_t deadline_ns)
{
    tl_rpc_server_stop(server, deadline_ns, note_stopped, NULL);
    while (!is_stopped)
        (void)tl_loop_run_once(loop, TL_TIME_NEVER);
}

/* A call of this test's own loop. */
struct client {
    grpc_channel *channel;
    struct tl_stream *stream;
    bool is_closed;
    struct tl_error status;
};

static void client_closed(struct tl_stream *stream, const struct tl_error *status)
{
    struct client *client = tl_stream_owner(stream);
    client->is_closed = true;
    client->status = *status;
}

static const struct tl_stream_events client_events = {.on_closed = client_closed};

static void client_open(struct client *client)
{
    char address[64];
    const struct tl_channel_options options = {.keepalive_ns = TL_TIME_NEVER,
                                               .keepalive_timeout_ns = TL_TIME_NEVER,
                                               .connect_timeout_ns = 20 * TL_NS_PER_SEC,
                                               .max_message_bytes = 1 << 20};
    snprintf(address, sizeof(address), "127.0.0.1:%u", (unsigned)port);
    *client = (struct client){.channel = tl_channel_create(address, &options)};
    ck_assert(tl_stream_call(loop, client->channel, METHOD, TL_TIME_NEVER, &client_events, client, &client->stream,
                             &error) == TL_OK);
    unsigned before = accepted;
    while (accepted == before)
        (void)tl_loop_run_once(loop, TL_TIME_NEVER);
}

static void client_close(struct client *client)
{
    if (!client->is_closed) tl_stream_cancel(client->stream);
    while (!client->is_closed)
        (void)tl_loop_run_once(loop, TL_TIME_NEVER);
    grpc_channel_destroy(client->channel);
}

static void expect_refused(const char *address, enum tl_status code, const char *words)
{
    uint16_t other_port = 7;
    struct tl_rpc_server *other = create();
    enum tl_status status = tl_rpc_server_start(other, address, &other_port, &error);
    ck_assert_msg(status == code, "%s: %s: %s", address, tl_status_name(status), error.message);
    ck_assert_msg(strstr(error.message, words) != NULL, "\"%s\" lacks \"%s\"", error.message, words);
    ck_assert_ptr_nonnull(strstr(error.message, address));
    ck_assert_uint_eq(other_port, 7);
    tl_rpc_server_destroy(other);
}

START_TEST(addresses_that_cannot_be_listened_on)
{
    expect_refused("192.0.2.1:0", TL_UNAVAILABLE, "is it an address of this machine?");
    expect_refused("worker-7.invalid:0", TL_UNAVAILABLE, "check the name");
    expect_refused("nowhere", TL_INVALID_ARGUMENT, "no port");
    expect_refused("127.0.0.1:65536", TL_INVALID_ARGUMENT, "0..65535");
    expect_refused(":0", TL_INVALID_ARGUMENT, "0.0.0.0");
    expect_refused("[]:0", TL_INVALID_ARGUMENT, "no host");
    expect_refused("::1:0", TL_INVALID_ARGUMENT, "[::1]:4000");
}
END_TEST

START_TEST(port_of_another_server)
{
    char address[64];
    start();
    snprintf(address, sizeof(address), "127.0.0.1:%u", (unsigned)port);
    expect_refused(address, TL_ALREADY_EXISTS, "another process uses the address");
    snprintf(address, sizeof(address), "0.0.0.0:%u", (unsigned)port);
    expect_refused(address, TL_ALREADY_EXISTS, "another process uses the address");
    stop(0);
}
END_TEST

START_TEST(every_kind_of_address)
{
    static const char *const addresses[] = {"0.0.0.0:0", "localhost:0"};
    for (size_t i = 0; i < TL_ARRAY_COUNT(addresses); i++) {
        struct tl_rpc_server *other = create();
        uint16_t other_port = 0;
        enum tl_status status = tl_rpc_server_start(other, addresses[i], &other_port, &error);
        ck_assert_msg(status == TL_OK, "%s: %s", addresses[i], error.message);
        ck_assert_uint_ne(other_port, 0);
        is_stopped = false;
        tl_rpc_server_stop(other, 0, note_stopped, NULL);
        while (!is_stopped)
            (void)tl_loop_run_once(loop, TL_TIME_NEVER);
        tl_rpc_server_destroy(other);
    }
}
END_TEST

START_TEST(method_added_twice)
{
    ck_assert(tl_rpc_server_add_method(server, METHOD, TL_ACTION_READ, accept_call, NULL, &error) == TL_OK);
    ck_assert_int_eq(tl_rpc_server_add_method(server, METHOD, TL_ACTION_READ, accept_call, NULL, &error),
                     TL_ALREADY_EXISTS);
    ck_assert_ptr_nonnull(strstr(error.message, METHOD));
}
END_TEST

START_TEST(stop_waits_for_calls)
{
    struct client client;
    start();
    client_open(&client);
    tl_rpc_server_stop(server, TL_TIME_NEVER, note_stopped, NULL);
    for (unsigned i = 0; i < 20; i++)
        (void)tl_loop_run_once(loop, tl_clock_now_ns() + TL_NS_PER_MS);
    ck_assert(!is_stopped);
    ck_assert_uint_eq(closed, 0);
    client_close(&client);
    while (!is_stopped)
        (void)tl_loop_run_once(loop, TL_TIME_NEVER);
    ck_assert_uint_eq(closed, 1);
}
END_TEST

START_TEST(stop_cancels_at_the_deadline)
{
    struct client client;
    start();
    client_open(&client);
    stop(tl_clock_now_ns() + 50 * TL_NS_PER_MS);
    ck_assert_uint_eq(closed, 1);
    client_close(&client);
    ck_assert_int_ne(client.status.code, TL_OK);
}
END_TEST

START_TEST(abandoned_streams_end)
{
    struct client client;
    start();
    client_open(&client);
    tl_stream_abandon(client.stream);
    while (closed == 0)
        (void)tl_loop_run_once(loop, TL_TIME_NEVER);
    ck_assert(!client.is_closed);
    client.is_closed = true;
    client_close(&client);
    stop(TL_TIME_NEVER);
}
END_TEST

/* Returns the congestion control of the one connection that the server has taken. */
static void find_congestion_control(char *ret_name, size_t capacity)
{
    for (int fd = 0; fd < 1024; fd++) {
        struct sockaddr_in ours, theirs;
        socklen_t our_bytes = sizeof(ours), their_bytes = sizeof(theirs), name_bytes = (socklen_t)capacity;
        if (getsockname(fd, (struct sockaddr *)&ours, &our_bytes) != 0 || ours.sin_family != AF_INET) continue;
        if (ours.sin_port != htons(port) || getpeername(fd, (struct sockaddr *)&theirs, &their_bytes) != 0) continue;
        ck_assert_int_eq(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, ret_name, &name_bytes), 0);
        return;
    }
    ck_abort_msg("the server has no connection");
}

START_TEST(connection_over_loopback_is_not_paced)
{
    struct client client;
    char name[16] = "";
    start();
    client_open(&client);
    find_congestion_control(name, sizeof(name));
    ck_assert_str_eq(name, "reno");
    client_close(&client);
    stop(TL_TIME_NEVER);
}
END_TEST

/* The server goes on serving whatever bytes its port gets. */
START_TEST(garbage_on_the_port)
{
    static const char *const garbage[] = {
        "",
        "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "\x16\x03\x01\x02\x00\x01",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    };
    struct client client;
    start();
    for (size_t i = 0; i < TL_ARRAY_COUNT(garbage); i++) {
        struct sockaddr_in place = {.sin_family = AF_INET, .sin_port = htons(port)};
        place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        ck_assert_int_eq(connect(fd, (struct sockaddr *)&place, sizeof(place)), 0);
        ck_assert_int_eq(send(fd, garbage[i], strlen(garbage[i]), MSG_NOSIGNAL), (ssize_t)strlen(garbage[i]));
        client_open(&client);
        close(fd);
        client_close(&client);
    }
    ck_assert_uint_eq(accepted, TL_ARRAY_COUNT(garbage));
    stop(TL_TIME_NEVER);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("rpc_server");
    TCase *tcase = tcase_create("rpc_server");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, older_read_buffers_are_chosen);
    tcase_add_test(tcase, addresses_that_cannot_be_listened_on);
    tcase_add_test(tcase, port_of_another_server);
    tcase_add_test(tcase, every_kind_of_address);
    tcase_add_test(tcase, method_added_twice);
    tcase_add_test(tcase, stop_waits_for_calls);
    tcase_add_test(tcase, stop_cancels_at_the_deadline);
    tcase_add_test(tcase, abandoned_streams_end);
    tcase_add_test(tcase, connection_over_loopback_is_not_paced);
    tcase_add_test(tcase, garbage_on_the_port);
    suite_add_tcase(suite, tcase);
    return run_suite_in_process(suite);
}
