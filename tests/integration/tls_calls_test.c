// SPDX-License-Identifier: Apache-2.0
/* Calls over TLS: each belongs to the connection that it came over, whatever descriptors are used again. */
#include <check.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "control/credentials.h"
#include "control/rpc_server.h"
#include "fakes/certificates.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"
#include "tensor/transfer.h"

#define CLIENT_COUNT 8
#define CALL_COUNT 1600

static struct tl_loop *loop;
static struct tl_rpc_server *server;
static struct tl_tls *server_tls;
static struct tl_error error;
static char target[64];
static unsigned accepted_count[2];
static unsigned wrong_count;
static bool is_stopped;

/* The two identities; each calls a method of its own. */
static const char *const names[] = {"/job:node/task:1", "/job:node/task:2"};
static const char *const methods[] = {"/test.Service/One", "/test.Service/Two"};
static struct tl_tls *identities[2];

/* ------------------------------------------------------------------------------------------------------ server -- */

static const struct tl_stream_events no_events;

static void accept_call(void *context, struct tl_stream *stream)
{
    unsigned which = (unsigned)(uintptr_t)context;
    struct tl_identity identity = {.source = TL_IDENTITY_NONE};
    tl_stream_certify(stream, &identity);
    accepted_count[which]++;
    bool is_right = identity.source == TL_IDENTITY_PROVEN && strcmp(identity.certified, names[which]) == 0;
    if (!is_right) wrong_count++;
    tl_stream_set_events(stream, &no_events);
    const struct tl_error ok = {.code = TL_OK};
    tl_stream_finish(stream, &ok);
}

static struct tl_tls *open_tls(unsigned which)
{
    char certificate[200], key[200], ca[200];
    snprintf(ca, sizeof(ca), "%s/ca.pem", temp_folder);
    snprintf(certificate, sizeof(certificate), "%s/%u.pem", temp_folder, which);
    snprintf(key, sizeof(key), "%s/%u.key", temp_folder, which);
    const struct tl_tls_options options = {
        .settings = {.ca = ca, .certificate = certificate, .key = key},
        .handshake_timeout_ns = 60 * TL_NS_PER_SEC,
        .keepalive_timeout_ns = 60 * TL_NS_PER_SEC,
    };
    struct tl_tls *tls;
    enum tl_status status = tl_tls_create(&options, &tls, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return tls;
}

static void setup(void)
{
    struct authority authority;
    temp_folder_make();
    authority_init(&authority, "test authority", temp_path("ca.pem"));
    for (unsigned which = 0; which < 3; which++) {
        char uri[80], certificate[16], key[16];
        snprintf(uri, sizeof(uri), "URI:spiffe://test/job/node/task/%u", which);
        snprintf(certificate, sizeof(certificate), "%u.pem", which);
        snprintf(key, sizeof(key), "%u.key", which);
        authority_issue(&authority, &(struct certificate_kind){.names = uri}, temp_path(certificate), temp_path(key));
    }
    authority_fini(&authority);
    ck_assert(tl_loop_create(&loop, &error) == TL_OK);
    server_tls = open_tls(0);
    const struct tl_rpc_server_options options = {.keepalive_ns = TL_TIME_NEVER,
                                                  .keepalive_timeout_ns = TL_TIME_NEVER,
                                                  .max_unfinished_ns = TL_TIME_NEVER,
                                                  .max_message_bytes = 1 << 20,
                                                  .tls = server_tls,
                                                  .max_calls = 1000};
    ck_assert(tl_rpc_server_create(loop, &options, &server, &error) == TL_OK);
    uint16_t port;
    for (unsigned which = 0; which < 2; which++) {
        void *context = (void *)(uintptr_t)which;
        ck_assert(tl_rpc_server_add_method(server, methods[which], TL_ACTION_READ, accept_call, context, &error) ==
                  TL_OK);
        identities[which] = open_tls(which + 1);
    }
    ck_assert(tl_rpc_server_start(server, "127.0.0.1:0", &port, &error) == TL_OK);
    snprintf(target, sizeof(target), "ipv4:127.0.0.1:%u", port);
}

static void end_tls(struct tl_tls *tls)
{
    tl_tls_end(tls);
    tl_tls_release(tls);
}

static void note_stopped(void *context)
{
    (void)context;
    is_stopped = true;
}

static void teardown(void)
{
    tl_rpc_server_stop(server, tl_clock_deadline_ns(TL_NS_PER_SEC), note_stopped, NULL);
    while (!is_stopped)
        (void)tl_loop_run_once(loop, TL_TIME_NEVER);
    end_tls(server_tls);
    end_tls(identities[0]);
    end_tls(identities[1]);
    tl_rpc_server_destroy(server);
    tl_loop_destroy(loop);
    temp_folder_remove();
}

/* ----------------------------------------------------------------------------------------------------- clients -- */

/* One connection with one call, again and again. Every third one is cut off before its call has ended. */
struct client {
    unsigned which;
    unsigned count;
    bool is_over;
    grpc_channel *channel;
    struct tl_stream *stream;
};

static unsigned begun_count;
static unsigned answered_count;

static void begin(struct client *client);

static void call_closed(struct tl_stream *stream, const struct tl_error *status)
{
    struct client *client = tl_stream_owner(stream);
    answered_count += status->code == TL_OK;
    client->stream = NULL;
    grpc_channel_destroy(client->channel);
    client->channel = NULL;
    begin(client);
}

static const struct tl_stream_events call_events = {.on_closed = call_closed};

static void dialled(void *owner, int fd, const struct tl_error *failure)
{
    struct client *client = owner;
    ck_assert_msg(fd >= 0, "%s", failure->message);
    const struct tl_channel_options options = {.keepalive_ns = TL_TIME_NEVER,
                                               .keepalive_timeout_ns = TL_TIME_NEVER,
                                               .connect_timeout_ns = TL_TIME_NEVER,
                                               .max_message_bytes = 1 << 20};
    client->channel = tl_channel_create_from_fd(fd, target, &options);
    ck_assert(tl_stream_call(loop, client->channel, methods[client->which], tl_clock_deadline_ns(60 * TL_NS_PER_SEC),
                             &call_events, client, &client->stream, &error) == TL_OK);
    if (client->count % 3 == 0) tl_stream_cancel(client->stream);
}

static void begin(struct client *client)
{
    if (begun_count == CALL_COUNT) {
        client->is_over = true;
        return;
    }
    begun_count++;
    client->count++;
    client->which = (client->which + (client->count & 1)) % 2;
    const struct tl_tls_address address = {.target = target,
                                           .label = "the server",
                                           .expected_name = "/job:node/task:0",
                                           .deadline_ns = tl_clock_deadline_ns(60 * TL_NS_PER_SEC)};
    struct tl_tls_dial *dial;
    ck_assert(tl_tls_dial(identities[client->which], loop, &address, dialled, client, &dial, &error) == TL_OK);
}

/* ------------------------------------------------------------------------------------------------------- tests -- */

static unsigned descriptor_count(void)
{
    return temp_entry_count("/proc/self/fd");
}

START_TEST(interleaved_identities_are_never_mistaken)
{
    static struct client clients[CLIENT_COUNT];
    unsigned before = descriptor_count();
    for (unsigned i = 0; i < CLIENT_COUNT; i++) {
        clients[i].which = i % 2;
        begin(&clients[i]);
    }
    for (unsigned i = 0; i < CLIENT_COUNT; i++)
        while (!clients[i].is_over)
            (void)tl_loop_run_once(loop, TL_TIME_NEVER);
    ck_assert_uint_eq(wrong_count, 0);
    ck_assert_uint_gt(answered_count, CALL_COUNT / 2);
    ck_assert_uint_gt(accepted_count[0], CALL_COUNT / 5);
    ck_assert_uint_gt(accepted_count[1], CALL_COUNT / 5);
    /* No descriptor is left over: not of a connection that was cut off, either. */
    for (int64_t deadline_ns = tl_clock_deadline_ns(60 * TL_NS_PER_SEC); descriptor_count() > before;) {
        ck_assert_int_gt(tl_clock_remaining_ns(deadline_ns), 0);
        (void)tl_loop_run_once(loop, tl_clock_deadline_ns(10 * TL_NS_PER_MS));
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("tls_calls");
    TCase *tcase = tcase_create("tls_calls");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_set_timeout(tcase, 200);
    tcase_add_test(tcase, interleaved_identities_are_never_mistaken);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
