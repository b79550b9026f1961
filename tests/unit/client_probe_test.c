// SPDX-License-Identifier: Apache-2.0
/* What a probe makes of connections and calls that fail. integration/cli_probe_net_test.py loses real packets. */
#include <check.h>

#include "fakes/run_suite.h"

#undef fail /* check.h has a macro of this name */
#include "base/clock.h"
#include "control/client_call.h"
#include "control/responses.h"

/* What each connection and each Echo ends with, in their order; TL_OK after the last. */
static struct tl_error opens[4], echoes[8];
static enum tl_call_stage stages[4];
static size_t open_count, echo_count;
static bool is_sent_by_peer;
static int64_t peer_unix_ns;

static enum tl_status fake_open(struct tl_client *client, const struct tl_call_options *options,
                                struct tl_error *ret_error)
{
    *client = (struct tl_client){.options = options, .stage = stages[open_count]};
    *ret_error = opens[open_count++];
    return ret_error->code;
}

static enum tl_status fake_start(struct tl_client *client, struct tl_echo_response *response, grpc_byte_buffer *request)
{
    client->context = response;
    grpc_byte_buffer_destroy(request);
    return TL_OK;
}

static enum tl_status fake_wait(struct tl_client *client, struct tl_echo_response *ret_response, uint64_t checksum,
                                uint32_t answer_bytes, struct tl_error *ret_error)
{
    *ret_error = echoes[echo_count++];
    if (is_sent_by_peer) client->status = *ret_error;
    *ret_response = (struct tl_echo_response){.name = "/job:ps/task:0",
                                              .incarnation = 7,
                                              .unix_ns = peer_unix_ns,
                                              .checksum = checksum,
                                              .data_bytes = answer_bytes};
    return ret_error->code;
}

#define tl_client_open fake_open
#define tl_client_close(client) ((void)(client))
#define tl_client_start(client, method, context, deadline, message, error)                                             \
    ((void)(method), (void)(deadline), (void)(error), fake_start(client, context, message))
#define tl_stream_half_close(stream) ((void)(stream))
#define tl_client_wait(client, error)                                                                                  \
    fake_wait(client, ret_response, XXH3_64bits(zeros, send_bytes), answer_bytes, error)
#include "control/client_probe.c"

static struct tl_peer_probe result;

static void probe(void)
{
    result = (struct tl_peer_probe){.name = "/job:ps/task:0", .address = "ps-0:4000"};
    open_count = echo_count = 0;
    tl_client_probe_peer(&result, NULL, tl_clock_deadline_ns(60 * TL_NS_PER_SEC));
}

static void expect_ok(const char *reason)
{
    ck_assert_msg(result.is_ok, "%s: %s", result.stage, result.reason);
    ck_assert_str_eq(result.stage, "");
    ck_assert_str_eq(result.direction, "");
    ck_assert_str_eq(result.reason, reason);
    ck_assert_str_eq(result.remedy, "");
}

static void expect_failure(const char *stage, const char *direction, const char *remedy)
{
    ck_assert(!result.is_ok);
    ck_assert_str_eq(result.stage, stage);
    ck_assert_str_eq(result.direction, direction);
    ck_assert_msg(strstr(result.remedy, remedy) != NULL, "\"%s\" lacks \"%s\"", result.remedy, remedy);
}

static const struct tl_error lost = {.code = TL_DEADLINE_EXCEEDED, .message = "Deadline Exceeded"};
static const struct tl_error ended = {.code = TL_UNAVAILABLE,
                                      .message = "ps-0:4000 closed the connection; see its log"};
static const struct tl_error short_of = {.code = TL_RESOURCE_EXHAUSTED, .message = "no descriptors; raise the limit"};

START_TEST(all_arrives)
{
    probe();
    expect_ok("");
    ck_assert_uint_eq(open_count, 1);
    ck_assert_uint_eq(echo_count, 3);
    ck_assert_uint_eq(result.incarnation, 7);
}
END_TEST

/* A peer without a clock is not one that lives in 1970. */
START_TEST(clock_of_the_peer)
{
    probe();
    ck_assert_int_eq(result.clock_offset_ns, 0);
    peer_unix_ns = tl_clock_unix_ns() + 1000 * TL_NS_PER_SEC;
    probe();
    ck_assert_int_gt(result.clock_offset_ns, 900 * TL_NS_PER_SEC);
    ck_assert_int_lt(result.clock_offset_ns, 1100 * TL_NS_PER_SEC);
}
END_TEST

START_TEST(large_messages_are_lost)
{
    echoes[1] = lost;
    probe();
    expect_failure("large", "to", "tcp_mtu_probing");
    echoes[2] = lost;
    probe();
    expect_failure("large", "both", "tcp_mtu_probing");
    echoes[1].code = TL_OK;
    probe();
    expect_failure("large", "from", "tcp_mtu_probing");
    ck_assert_uint_eq(open_count, 1);
}
END_TEST

/* A peer that is started anew during the probe loses no large messages. */
START_TEST(connection_ends_during_a_large_message)
{
    echoes[1 + _i] = ended;
    probe();
    expect_ok("");
    ck_assert_uint_eq(open_count, 2);
    echoes[3 + 2 * _i] = ended;
    probe();
    expect_failure("grpc", _i == 0 ? "to" : "from", "see its log");
    ck_assert_uint_eq(open_count, 2);
}
END_TEST

START_TEST(second_connection_fails)
{
    echoes[1] = lost;
    opens[1] = (struct tl_error){.code = TL_UNAVAILABLE, .message = "ps-0:4000 has not answered; is it stopped?"};
    stages[1] = TL_CALL_SILENT;
    probe();
    expect_failure("grpc", "to", "tensorlane doctor");
}
END_TEST

/* The message of a failed connection may ask; a remedy says what to do. */
START_TEST(no_question_is_a_remedy)
{
    opens[0] = (struct tl_error){.code = TL_UNAVAILABLE, .message = "ps-0:4000 has not answered; is it stopped?"};
    stages[0] = TL_CALL_SILENT;
    probe();
    expect_failure("grpc", "to", "tensorlane doctor");
    ck_assert_str_eq(result.reason, "ps-0:4000 has not answered");
    stages[0] = TL_CALL_CONNECT;
    probe();
    expect_failure("tcp", "to", "start the worker there");
    opens[0] = (struct tl_error){.code = TL_UNAVAILABLE, .message = "no such host; check the name"};
    stages[0] = TL_CALL_RESOLVE;
    probe();
    expect_failure("resolve", "to", "check the name");
}
END_TEST

/* What the worker that probes lacks is no fault of its peer, what the peer lacks is. */
START_TEST(own_lack)
{
    opens[0] = short_of;
    stages[0] = TL_CALL_CONNECT;
    probe();
    expect_ok("no descriptors");
    opens[0].code = TL_OK;
    echoes[0] = short_of;
    probe();
    expect_ok("no descriptors");
    is_sent_by_peer = true;
    probe();
    expect_failure("small", "both", "raise the limit");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("client_probe");
    TCase *tcase = tcase_create("client_probe");
    tcase_add_test(tcase, all_arrives);
    tcase_add_test(tcase, clock_of_the_peer);
    tcase_add_test(tcase, large_messages_are_lost);
    tcase_add_loop_test(tcase, connection_ends_during_a_large_message, 0, 2);
    tcase_add_test(tcase, second_connection_fails);
    tcase_add_test(tcase, no_question_is_a_remedy);
    tcase_add_test(tcase, own_lack);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
