// SPDX-License-Identifier: Apache-2.0
/*
 * How links that we open begin and end: hosts with names, unknown names, ports without a listener, a link that is given
 * up while its peer's address is looked up, and the greatest age of a link.
 *
 * The client here is a control object without a worker, in the test's own thread.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "control/control.h"
#include "control/link.h"
#include "fakes/run_suite.h"
#include "tests/fakes/fake_worker.h"

#define PATIENCE_NS (100 * TL_NS_PER_SEC)

struct client {
    struct tl_loop *loop;
    struct tl_control *control;
    struct tl_link *link;
    unsigned up_count;
    unsigned closed_count;
    struct tl_error reason;
    bool is_stopped;
};

static struct fake_worker server;
static struct client client;
static const struct tl_control_handlers no_handlers;

static void link_up(struct tl_link *link)
{
    struct client *owner = tl_link_owner(link);
    owner->up_count++;
}

static void link_closed(struct tl_link *link, const struct tl_error *reason)
{
    struct client *owner = tl_link_owner(link);
    owner->closed_count++;
    owner->reason = *reason;
    owner->link = NULL;
}

static const struct tl_link_events link_events = {.up = link_up, .closed = link_closed};

static void setup(void)
{
    fake_worker_init(&server);
    fake_worker_start(&server);
}

static void client_start(int64_t max_link_age_ns, int64_t connect_timeout_ns)
{
    const struct tl_control_options options = {
        .self = {.source = TL_IDENTITY_CLAIMED, .incarnation = 7},
        .chunk_bytes = 1 << 20,
        .inflight_bytes = 64 << 20,
        .connect_timeout_ns = connect_timeout_ns,
        .max_link_age_ns = max_link_age_ns,
        .max_unsent = 65536,
        .stalled_timeout_ns = TL_TIME_NEVER,
        .keepalive_ns = 10 * TL_NS_PER_SEC,
        .keepalive_timeout_ns = 10 * TL_NS_PER_SEC,
        .handlers = &no_handlers,
    };
    client = (struct client){0};
    ck_assert_int_eq(tl_loop_create(&client.loop, NULL), TL_OK);
    ck_assert_int_eq(tl_control_create(client.loop, &options, &client.control, NULL), TL_OK);
}

static void client_open(const char *address)
{
    ck_assert_int_eq(tl_link_open(client.control, &(const struct tl_link_address){.address = address}, NULL, 0,
                                  &link_events, &client, &client.link, NULL),
                     TL_OK);
}

static void run_until(const unsigned *count)
{
    int64_t deadline_ns = tl_clock_deadline_ns(PATIENCE_NS);
    while (*count == 0 && tl_clock_now_ns() < deadline_ns)
        (void)tl_loop_run_once(client.loop, deadline_ns);
    ck_assert_uint_eq(*count, 1);
}

static void stopped(void *context)
{
    ((struct client *)context)->is_stopped = true;
}

static void client_stop(void)
{
    tl_control_stop(client.control, tl_clock_deadline_ns(PATIENCE_NS), stopped, &client);
    while (!client.is_stopped)
        (void)tl_loop_run_once(client.loop, TL_TIME_NEVER);
    tl_control_destroy(client.control);
    tl_loop_destroy(client.loop);
}

static void teardown(void)
{
    fake_worker_stop(&server, tl_clock_deadline_ns(PATIENCE_NS));
}

/* Returns the server's address with another spelling of its host. */
static const char *at_host(const char *host)
{
    static char address[128];
    snprintf(address, sizeof(address), "%s%s", host, strrchr(server.address, ':'));
    return address;
}

START_TEST(a_name_is_looked_up)
{
    client_start(TL_TIME_NEVER, PATIENCE_NS);
    client_open(at_host("localhost"));
    run_until(&client.up_count);
    client_stop();
    ck_assert_int_eq(client.reason.code, TL_OK);
}
END_TEST

START_TEST(an_unknown_name)
{
    client_start(TL_TIME_NEVER, PATIENCE_NS);
    client_open(at_host("no-such-host.invalid"));
    run_until(&client.closed_count);
    ck_assert_int_eq(client.reason.code, TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(client.reason.message, "\"no-such-host.invalid\" cannot be resolved"));
    client_stop();
}
END_TEST

START_TEST(a_port_without_a_listener)
{
    client_start(TL_TIME_NEVER, PATIENCE_NS);
    client_open("localhost:1");
    run_until(&client.closed_count);
    ck_assert_int_eq(client.reason.code, TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(client.reason.message, "localhost:1 (IPv"));
    ck_assert_ptr_nonnull(strstr(client.reason.message, ") refused the connection; is the worker started"));
    client_stop();
}
END_TEST

START_TEST(an_address_that_is_none)
{
    client_start(TL_TIME_NEVER, PATIENCE_NS);
    struct tl_error error;
    ck_assert_int_eq(tl_link_open(client.control, &(const struct tl_link_address){.address = "localhost"}, NULL, 0,
                                  &link_events, &client, &client.link, &error),
                     TL_INVALID_ARGUMENT);
    client_stop();
    ck_assert_uint_eq(client.closed_count, 0);
}
END_TEST

/* The look-up of the first link outlives the link, that of the second outlives its loop. */
START_TEST(given_up_while_looked_up)
{
    client_start(TL_TIME_NEVER, PATIENCE_NS);
    client_open(at_host("localhost"));
    struct tl_error reason;
    tl_error_set(&reason, TL_CANCELLED, "enough");
    tl_link_close(client.link, &reason);
    ck_assert_uint_eq(client.closed_count, 0);
    run_until(&client.closed_count);
    ck_assert_int_eq(client.reason.code, TL_CANCELLED);
    client_open(at_host("localhost"));
    client_stop();
    ck_assert_uint_eq(client.closed_count, 2);
    ck_assert_uint_eq(client.up_count, 0);
}
END_TEST

START_TEST(not_found_in_time)
{
    client_start(TL_TIME_NEVER, 0);
    client_open(at_host("localhost"));
    run_until(&client.closed_count);
    ck_assert_uint_eq(client.up_count, 0);
    ck_assert(client.reason.code == TL_DEADLINE_EXCEEDED || client.reason.code == TL_UNAVAILABLE);
    client_stop();
}
END_TEST

START_TEST(a_link_has_a_greatest_age)
{
    client_start(3 * TL_NS_PER_SEC, PATIENCE_NS);
    client_open(server.address);
    run_until(&client.up_count);
    run_until(&client.closed_count);
    ck_assert_int_eq(client.reason.code, TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(client.reason.message, "greatest age"));
    client_stop();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("link_open");
    TCase *cases = tcase_create("link_open");
    tcase_add_checked_fixture(cases, setup, teardown);
    tcase_set_timeout(cases, 120);
    tcase_add_test(cases, a_name_is_looked_up);
    tcase_add_test(cases, an_unknown_name);
    tcase_add_test(cases, a_port_without_a_listener);
    tcase_add_test(cases, an_address_that_is_none);
    tcase_add_test(cases, given_up_while_looked_up);
    tcase_add_test(cases, not_found_in_time);
    tcase_add_test(cases, a_link_has_a_greatest_age);
    suite_add_tcase(suite, cases);
    return run_suite(suite);
}
