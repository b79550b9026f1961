// SPDX-License-Identifier: Apache-2.0
/* The guard of the accepted connections: what it does in one look. The loop is a fake, and the connections are real. */
#include <arpa/inet.h>
#include <check.h>
#include <sys/resource.h>

#include "fakes/fake_clock.h"

#include "base/thread.h"
/* The tests look in place of the thread. */
#define tl_thread_start(name, run, argument, ret_thread, ret_error) ((void)(run), (void)(ret_thread), TL_OK)
#include "control/guard.c"
#include "fakes/run_suite.h"

#define LIMIT_BYTES (100 * 1024)
#define DESCRIPTORS 100
#define LIMIT_NS (60 * TL_NS_PER_SEC)

static struct tl_guard *guard;
static struct tl_error error;
static int client;
static int accepted;

void tl_loop_get_pulse(const struct tl_loop *loop, struct tl_loop_pulse *ret_pulse)
{
    (void)loop;
    *ret_pulse = (struct tl_loop_pulse){0};
}

static void connect_both(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(address);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(listener, (struct sockaddr *)&address, sizeof(address)), 0);
    ck_assert_int_eq(listen(listener, 1), 0);
    ck_assert_int_eq(getsockname(listener, (struct sockaddr *)&address, &len), 0);
    client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(connect(client, (struct sockaddr *)&address, sizeof(address)), 0);
    accepted = accept(listener, NULL, NULL);
    ck_assert_int_ge(accepted, 0);
    close(listener);
}

static void setup(void)
{
    const struct tl_guard_options options = {
        .max_unfinished_bytes = LIMIT_BYTES, .max_message_bytes = LIMIT_BYTES, .max_unfinished_ns = LIMIT_NS};
    ck_assert_int_eq(tl_guard_create(&options, &guard, &error), TL_OK);
    guard->has_thread = false;
    connect_both();
    tl_guard_add(guard, accepted, accepted, tl_connection_cookie(accepted));
    pthread_mutex_lock(&guard->mutex);
    guard->connections[accepted].limit_ns = INT64_MAX;
}

static void teardown(void)
{
    pthread_mutex_unlock(&guard->mutex);
    tl_guard_destroy(guard);
    close(client);
    close(accepted);
}

static bool is_connected(void)
{
    struct sockaddr_in peer;
    socklen_t len = sizeof(peer);
    return getpeername(accepted, (struct sockaddr *)&peer, &len) == 0;
}

/* Sends so many bytes, which the kernel has received when this returns. */
static void send_bytes(size_t len_bytes)
{
    static char bytes[1024];
    struct tcp_info info = {0};
    ck_assert(get_info(accepted, &info));
    uint64_t before = info.tcpi_bytes_received;
    for (size_t sent = 0; sent < len_bytes; sent += sizeof(bytes)) {
        ck_assert_int_eq(send(client, bytes, sizeof(bytes), 0), sizeof(bytes));
        ck_assert_int_eq(recv(accepted, bytes, sizeof(bytes), MSG_WAITALL), sizeof(bytes));
    }
    ck_assert(get_info(accepted, &info));
    ck_assert_uint_eq(info.tcpi_bytes_received - before, len_bytes);
}

START_TEST(too_many_unfinished_bytes)
{
    send_bytes(LIMIT_BYTES);
    look(guard);
    ck_assert(is_connected());
    send_bytes(1024);
    look(guard);
    ck_assert(!is_connected());
    ck_assert_uint_eq(guard->count, 0);
}
END_TEST

/* A process that has no descriptor left ends a connection at once all the same, and keeps nothing of it. */
START_TEST(without_descriptors)
{
    const struct rlimit limit = {.rlim_cur = DESCRIPTORS, .rlim_max = DESCRIPTORS};
    send_bytes(LIMIT_BYTES + 1024);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    while (dup(client) >= 0)
        continue;
    ck_assert_int_eq(errno, EMFILE);
    look(guard);
    ck_assert(!is_connected());
    ck_assert_uint_eq(guard->count, 0);
    ck_assert_uint_eq(tl_connection_cookie(guard->spare), 0);
}
END_TEST

START_TEST(no_descriptor_at_the_start)
{
    const struct rlimit limit = {.rlim_cur = DESCRIPTORS, .rlim_max = DESCRIPTORS};
    const struct tl_guard_options options = {.max_unfinished_ns = LIMIT_NS};
    struct tl_guard *other;
    int last = -1;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    for (int fd = dup(client); fd >= 0; fd = dup(client))
        last = fd;
    for (unsigned free_count = 0; free_count < 2; free_count++) { /* it needs two */
        if (free_count == 1) close(last);
        ck_assert_int_eq(tl_guard_create(&options, &other, &error), TL_RESOURCE_EXHAUSTED);
        ck_assert_ptr_nonnull(strstr(error.message, "Too many open files"));
    }
}
END_TEST

/* Sends more than the guard tolerates, and lets the time pass in which that must have come to something. */
static void leave_unfinished(void)
{
    guard->options.max_unfinished_bytes = UINT64_MAX;
    guard->connections[accepted].limit_ns = tl_clock_deadline_ns(LIMIT_NS);
    send_bytes(2 * SLACK_BYTES);
    for (unsigned i = 0; i < 2; i++) {
        look(guard);
        ck_assert(is_connected());
        fake_clock_advance(i == 0 ? LIMIT_NS : LIMIT_NS - 1);
    }
    look(guard);
    ck_assert(is_connected());
    fake_clock_advance(1);
}

static void hold(bool is_held)
{
    const struct tl_connection connection = {.fd = accepted, .cookie = tl_connection_cookie(accepted)};
    pthread_mutex_unlock(&guard->mutex);
    tl_guard_hold(guard, &connection, is_held);
    pthread_mutex_lock(&guard->mutex);
}

START_TEST(unfinished_for_too_long)
{
    leave_unfinished();
    look(guard);
    ck_assert(!is_connected());
}
END_TEST

/* What this process does not read itself is not held against the client, which has as long again when it is read. */
START_TEST(unread_bytes_do_not_count)
{
    hold(true);
    hold(true);
    leave_unfinished();
    look(guard);
    hold(false);
    fake_clock_advance(2 * LIMIT_NS);
    look(guard);
    ck_assert(is_connected());
    hold(false);
    fake_clock_advance(LIMIT_NS - 1);
    look(guard);
    ck_assert(is_connected());
    fake_clock_advance(1);
    look(guard);
    ck_assert(!is_connected());
}
END_TEST

/* What comes of calls that outlive their connection is not the next one's that has the descriptor. */
START_TEST(descriptor_is_used_again)
{
    const struct tl_connection before = {.fd = accepted, .cookie = tl_connection_cookie(accepted) - 1};
    const struct tl_connection unknown = {.fd = -1};
    pthread_mutex_unlock(&guard->mutex);
    tl_guard_call_began(guard, &before);
    tl_guard_message(guard, &before, LIMIT_BYTES);
    tl_guard_hold(guard, &before, true);
    tl_guard_call_ended(guard, &before);
    tl_guard_call_ended(guard, &unknown);
    pthread_mutex_lock(&guard->mutex);
    ck_assert_uint_eq(guard->connections[accepted].credit, 0);
    ck_assert_uint_eq(guard->connections[accepted].held_count, 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("guard");
    TCase *tcase = tcase_create("guard");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, too_many_unfinished_bytes);
    tcase_add_test(tcase, without_descriptors);
    tcase_add_test(tcase, no_descriptor_at_the_start);
    tcase_add_test(tcase, unfinished_for_too_long);
    tcase_add_test(tcase, unread_bytes_do_not_count);
    tcase_add_test(tcase, descriptor_is_used_again);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
