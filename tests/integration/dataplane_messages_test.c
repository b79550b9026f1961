// SPDX-License-Identifier: Apache-2.0
/*
 * What two sides of a link tell each other about data connections: messages arrive whole, in order and in front of
 * requests; an impossible message ends the link, an unknown one is ignored, and an offer that cannot be used is refused
 * with a reason.
 *
 * One side is a control object in the test's own thread, or a raw call; the other is a fake or a real worker.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "fakes/cluster.h"
#include "fakes/raw_call.h"
#include "control/control.h"
#include "dataplane/local/local.h"
#include "dataplane/local/local_internal.h"
#include "dataplane/engine/message.h"
#include "tensorlane/v1/transfer.pb-c.h"
#include "fakes/run_suite.h"

#define PATIENCE_NS (100 * TL_NS_PER_SEC)
#define EXCHANGE "/tensorlane.v1.Transfer/Exchange"
#define MAX_HEARD 16
#define INCARNATION 77

typedef Tensorlane__V1__Frame Frame;
typedef Tensorlane__V1__ConnectionMessage Message;

/* --------------------------------------------------------------------------------------- two sides in one loop -- */

struct side {
    struct tl_control *control;
    struct tl_link *link;
    bool is_answering;
    unsigned up_count;
    unsigned closed_count;
    unsigned heard_count;
    struct tl_connection_message heard[MAX_HEARD];
    unsigned requests_before; /* The requests that had come when the latest message did. */
    unsigned requests;
    bool is_stopped;
};

static struct tl_loop *loop;
static struct side server;
static struct side client;

static void side_up(struct tl_link *link)
{
    ((struct side *)tl_link_owner(link))->up_count++;
}

static void side_closed(struct tl_link *link, const struct tl_error *reason)
{
    (void)reason;
    struct side *side = tl_link_owner(link);
    side->closed_count++;
    side->link = NULL;
}

static void side_hears(struct tl_link *link, const struct tl_connection_message *message)
{
    struct side *side = tl_link_owner(link);
    ck_assert_uint_lt(side->heard_count, MAX_HEARD);
    side->heard[side->heard_count++] = *message;
    side->requests_before = side->requests;
    if (!side->is_answering) return;
    struct tl_connection_message answer = {
        .kind = TL_CONNECTION_MESSAGE_ANSWER, .attempt = message->attempt, .len_bytes = 2};
    snprintf(answer.transport, sizeof(answer.transport), "%s", message->transport);
    memcpy(answer.bytes, "ok", 2);
    tl_link_send_connection_message(link, &answer);
}

static const struct tl_link_events side_events = {
    .up = side_up, .closed = side_closed, .connection_message = side_hears};

static void server_link_up(void *context, struct tl_link *link)
{
    struct side *side = context;
    side->link = link;
    side->up_count++;
    tl_link_set_events(link, &side_events, side);
}

static void server_request(void *context, struct tl_serve *serve)
{
    struct side *side = context;
    side->requests++;
    struct tl_error error;
    tl_error_set(&error, TL_NOT_FOUND, "nothing here");
    serve->ops->reply(serve, &error, NULL);
}

static void server_closed(void *context, struct tl_serve *serve, enum tl_serve_end end)
{
    (void)context;
    (void)serve;
    (void)end;
}

static void server_received(void *context, const struct tl_request_id *id)
{
    (void)context;
    (void)id;
}

static const struct tl_control_handlers handlers = {
    .source = {.request = server_request,
               .closed = server_closed,
               .received = server_received,
               .given_up = server_received},
    .link_up = server_link_up,
};

static void side_create(struct side *side, uint64_t incarnation)
{
    const struct tl_control_options options = {
        .self = {.source = TL_IDENTITY_CLAIMED, .incarnation = incarnation},
        .chunk_bytes = 1 << 20,
        .inflight_bytes = 64 << 20,
        .max_calls = 100,
        .connect_timeout_ns = PATIENCE_NS,
        .max_link_age_ns = TL_TIME_NEVER,
        .request_timeout_ns = PATIENCE_NS,
        .max_unsent = 65536,
        .stalled_timeout_ns = TL_TIME_NEVER,
        .keepalive_ns = 10 * TL_NS_PER_SEC,
        .keepalive_timeout_ns = 10 * TL_NS_PER_SEC,
        .handlers = &handlers,
        .worker = side,
    };
    *side = (struct side){0};
    ck_assert_int_eq(tl_control_create(loop, &options, &side->control, NULL), TL_OK);
}

static void run_until(const unsigned *count, unsigned wanted)
{
    int64_t deadline_ns = tl_clock_deadline_ns(PATIENCE_NS);
    while (*count < wanted && tl_clock_now_ns() < deadline_ns)
        (void)tl_loop_run_once(loop, deadline_ns);
    ck_assert_uint_eq(*count, wanted);
}

static void setup_pair(void)
{
    uint16_t port;
    char address[32];
    ck_assert_int_eq(tl_loop_create(&loop, NULL), TL_OK);
    side_create(&server, 8);
    side_create(&client, 7);
    ck_assert_int_eq(tl_control_start(server.control, "127.0.0.1:0", &port, NULL), TL_OK);
    snprintf(address, sizeof(address), "127.0.0.1:%u", port);
    ck_assert_int_eq(tl_link_open(client.control, &(const struct tl_link_address){.address = address}, NULL, 0,
                                  &side_events, &client, &client.link, NULL),
                     TL_OK);
    run_until(&client.up_count, 1);
}

static void stopped(void *context)
{
    ((struct side *)context)->is_stopped = true;
}

static void side_stop(struct side *side)
{
    tl_control_stop(side->control, tl_clock_deadline_ns(PATIENCE_NS), stopped, side);
    while (!side->is_stopped)
        (void)tl_loop_run_once(loop, TL_TIME_NEVER);
}

static void teardown_pair(void)
{
    side_stop(&client);
    side_stop(&server);
    tl_control_destroy(client.control);
    tl_control_destroy(server.control);
    tl_loop_destroy(loop);
}

static void tell_offer(uint64_t attempt, uint32_t len_bytes)
{
    struct tl_connection_message offer = {
        .transport = "verbs", .kind = TL_CONNECTION_MESSAGE_OFFER, .attempt = attempt, .len_bytes = len_bytes};
    for (uint32_t i = 0; i < len_bytes; i++)
        offer.bytes[i] = (uint8_t)(i + attempt);
    tl_link_send_connection_message(client.link, &offer);
}

START_TEST(an_offer_and_its_answer_arrive_whole)
{
    setup_pair();
    server.is_answering = true;
    tell_offer(5, TL_CONNECTION_ADDRESS_BYTES);
    run_until(&client.heard_count, 1);
    const struct tl_connection_message *offer = &server.heard[0];
    ck_assert_str_eq(offer->transport, "verbs");
    ck_assert_int_eq(offer->kind, TL_CONNECTION_MESSAGE_OFFER);
    ck_assert_uint_eq(offer->attempt, 5);
    ck_assert_uint_eq(offer->len_bytes, TL_CONNECTION_ADDRESS_BYTES);
    for (uint32_t i = 0; i < offer->len_bytes; i++)
        ck_assert_uint_eq(offer->bytes[i], (uint8_t)(i + 5));
    ck_assert_int_eq(client.heard[0].kind, TL_CONNECTION_MESSAGE_ANSWER);
    ck_assert_uint_eq(client.heard[0].attempt, 5);
    ck_assert_uint_eq(client.heard[0].len_bytes, 2);
    teardown_pair();
}
END_TEST

START_TEST(a_refusal_carries_its_reason)
{
    setup_pair();
    struct tl_connection_message refusal = {
        .transport = "verbs", .kind = TL_CONNECTION_MESSAGE_REFUSAL, .is_final = true, .reason = "no RDMA device"};
    tl_link_send_connection_message(client.link, &refusal);
    run_until(&server.heard_count, 1);
    ck_assert_int_eq(server.heard[0].kind, TL_CONNECTION_MESSAGE_REFUSAL);
    ck_assert_str_eq(server.heard[0].reason, "no RDMA device");
    ck_assert(server.heard[0].is_final);
    ck_assert_uint_eq(server.heard[0].attempt, 0);
    ck_assert_uint_eq(server.heard[0].len_bytes, 0);
    teardown_pair();
}
END_TEST

START_TEST(a_reason_that_is_not_utf8_ends_no_link)
{
    setup_pair();
    const struct tl_connection_message refusal = {
        .transport = "verbs", .kind = TL_CONNECTION_MESSAGE_REFUSAL, .reason = "/run/caf\xe9: No such file"};
    tl_link_send_connection_message(client.link, &refusal);
    run_until(&server.heard_count, 1);
    ck_assert_str_eq(server.heard[0].reason, "/run/caf?: No such file");
    teardown_pair();
}
END_TEST

static void fetch_done(struct tl_fetch *fetch, const struct tl_error *result)
{
    (void)fetch;
    ck_assert_int_eq(result->code, TL_NOT_FOUND);
}

START_TEST(more_than_fit_a_frame_arrive_in_order_before_requests)
{
    setup_pair();
    static const struct tl_fetch_ops ops = {.done = fetch_done};
    struct tl_fetch fetch;
    tl_fetch_init(&fetch, &ops);
    fetch.number = 1;
    fetch.key = "w";
    for (uint64_t i = 1; i <= 12; i++)
        tell_offer(i, 10);
    run_until(&server.heard_count, 12);
    for (unsigned i = 0; i < 12; i++)
        ck_assert_uint_eq(server.heard[i].attempt, i + 1);
    /* Both are in one frame: the message is processed first although it was queued last. */
    tl_link_fetch(client.link, &fetch);
    tell_offer(13, 10);
    run_until(&server.heard_count, 13);
    ck_assert_uint_eq(server.requests_before, 0);
    run_until(&server.requests, 1);
    tl_fetch_fini(&fetch);
    teardown_pair();
}
END_TEST

START_TEST(a_message_for_a_link_that_ends_is_dropped)
{
    setup_pair();
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "enough");
    struct tl_link *link = client.link;
    tell_offer(1, 10);
    tl_link_close(link, &reason);
    tell_offer(2, 10);
    run_until(&client.closed_count, 1);
    teardown_pair();
}
END_TEST

/* --------------------------------------------------------------------------------------- against a real worker -- */

static struct cluster cluster;
static struct tl_worker *worker;
static struct raw_call call;
static uint8_t host_id[TL_HOST_ID_BYTES]; /* The host of the raw peer. */

static void setup_worker(void)
{
    cluster_init(&cluster, 2, "\"protocol\": \"grpc\"");
    worker = cluster_open(&cluster, 0);
}

static void teardown_worker(void)
{
    raw_call_close(&call);
    cluster_close_all(&cluster);
}

static void connect_as(const char *name)
{
    char address[32];
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster.ports[0]);
    raw_call_open(&call, address, EXCHANGE, TL_TIME_NEVER);
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    Tensorlane__V1__Hello hello = TENSORLANE__V1__HELLO__INIT;
    hello.protocol_version = 1;
    hello.name = (char *)name;
    hello.incarnation = INCARNATION;
    hello.host = (ProtobufCBinaryData){.len = sizeof(host_id), .data = host_id};
    frame.hello = &hello;
    raw_call_send_message(&call, &frame.base);
    Frame *answer = raw_call_receive_message(&call, &tensorlane__v1__frame__descriptor);
    ck_assert_ptr_nonnull(answer->hello);
    tensorlane__v1__frame__free_unpacked(answer, NULL);
}

static void say_message(Message *message)
{
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    frame.n_connections = 1;
    frame.connections = &message;
    raw_call_send_message(&call, &frame.base);
}

static void expect_protocol_error(const char *what)
{
    const struct tl_error *status = raw_call_finish(&call);
    ck_assert_int_eq(status->code, TL_INVALID_ARGUMENT);
    ck_assert_msg(strstr(status->message, what) != NULL, "%s", status->message);
}

static Message offer_message(void)
{
    Message message = TENSORLANE__V1__CONNECTION_MESSAGE__INIT;
    message.transport = (char *)"verbs";
    message.kind = TENSORLANE__V1__CONNECTION_MESSAGE__KIND__OFFER;
    message.attempt = 3;
    return message;
}

START_TEST(an_address_that_is_too_long_ends_the_link)
{
    setup_worker();
    connect_as("/job:node/task:1");
    static uint8_t bytes[TL_CONNECTION_ADDRESS_BYTES + 1];
    Message message = offer_message();
    message.pair_address = (ProtobufCBinaryData){.len = sizeof(bytes), .data = bytes};
    say_message(&message);
    expect_protocol_error("a pair address of 1025 bytes");
    teardown_worker();
}
END_TEST

START_TEST(a_transport_that_is_too_long_or_empty_ends_the_link)
{
    static const char *const transports[] = {"", "a transport with thirty-two byte"};
    setup_worker();
    connect_as("/job:node/task:1");
    Message message = offer_message();
    message.transport = (char *)transports[_i];
    say_message(&message);
    expect_protocol_error("transport");
    teardown_worker();
}
END_TEST

START_TEST(a_reason_that_is_too_long_ends_the_link)
{
    setup_worker();
    connect_as("/job:node/task:1");
    static char reason[TL_ERROR_MESSAGE_BYTES + 1];
    memset(reason, 'r', sizeof(reason) - 1);
    Message message = offer_message();
    message.kind = TENSORLANE__V1__CONNECTION_MESSAGE__KIND__REFUSAL;
    message.reason = reason;
    say_message(&message);
    expect_protocol_error("reason");
    teardown_worker();
}
END_TEST

START_TEST(a_peer_that_does_not_take_its_refusals_ends_the_link)
{
    setup_worker();
    connect_as("/job:node/task:1");
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    Message message = offer_message();
    Message *messages[80];
    for (size_t i = 0; i < 80; i++)
        messages[i] = &message;
    message.transport = (char *)"pigeon";
    frame.n_connections = 80;
    frame.connections = messages;
    raw_call_send_message(&call, &frame.base);
    expect_protocol_error("does not read the answers");
    teardown_worker();
}
END_TEST

/* -------------------------------------------------------------------------------------------- storms of offers -- */

#define STORM 40
#define MEMBER "/job:node/task:1"

static void setup_local(void)
{
    struct tl_error error;
    ck_assert_msg(tl_host_id_get(host_id, &error) == TL_OK, "%s", error.message);
    cluster_init(&cluster, 2, "\"protocol\": \"grpc+local\"");
    worker = cluster_open(&cluster, 0);
}

static uint8_t *put_number(uint8_t *place, uint64_t value, unsigned len_bytes)
{
    for (unsigned i = 0; i < len_bytes; i++)
        *place++ = (uint8_t)(value >> (8 * i));
    return place;
}

/* Writes the address of a peer on this host; returns its length in bytes. */
static size_t get_address(uint8_t *ret_bytes)
{
    struct local_address pair_address = {.name_bytes = 8, .name = "nowhere"};
    struct tl_pair_address pair;
    memcpy(pair_address.host_id, host_id, sizeof(host_id));
    memset(pair_address.token, 7, sizeof(pair_address.token));
    local_address_write(&pair_address, &pair);
    uint8_t *place = put_number(ret_bytes, TL_DATAPLANE_VERSION, 4);
    place = put_number(place, INCARNATION, 8);
    place = put_number(place, 1, 8);
    place = put_number(place, 256, 4);           /* slots, */
    place = put_number(place, TL_SLOT_BYTES, 4); /* their length, */
    place = put_number(place, 0, 4);             /* inline values */
    place = put_number(place, 64, 4);            /* requests */
    place = put_number(place, 0, 4);             /* and keys */
    place = put_number(place, pair.len_bytes, 4);
    memcpy(place, pair.bytes, pair.len_bytes);
    return (size_t)(place - ret_bytes) + pair.len_bytes;
}

/* Offers so many data connections in one frame, the first as this attempt. */
static void say_offers(size_t count, uint64_t attempt, uint8_t *pair_address, size_t len_bytes)
{
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    Message offers[STORM], *messages[STORM];
    ck_assert_uint_le(count, STORM);
    for (size_t i = 0; i < count; i++) {
        offers[i] = offer_message();
        offers[i].transport = (char *)"local";
        offers[i].attempt = attempt + i;
        offers[i].pair_address = (ProtobufCBinaryData){.len = len_bytes, .data = pair_address};
        messages[i] = &offers[i];
    }
    frame.n_connections = count;
    frame.connections = messages;
    raw_call_send_message(&call, &frame.base);
}

/* Reads until this attempt is refused; returns the number of refusals. */
static unsigned read_refusals(uint64_t attempt, char *ret_reason)
{
    unsigned refusals = 0;
    for (bool is_found = false; !is_found;) {
        Frame *frame = raw_call_receive_message(&call, &tensorlane__v1__frame__descriptor);
        ck_assert_ptr_nonnull(frame);
        for (size_t i = 0; i < frame->n_connections; i++) {
            const Message *message = frame->connections[i];
            bool is_refusal = message->kind == TENSORLANE__V1__CONNECTION_MESSAGE__KIND__REFUSAL;
            refusals += is_refusal;
            if (!is_refusal || message->attempt != attempt) continue;
            is_found = true;
            snprintf(ret_reason, TL_ERROR_MESSAGE_BYTES, "%s", message->reason);
        }
        tensorlane__v1__frame__free_unpacked(frame, NULL);
    }
    return refusals;
}

START_TEST(an_address_is_looked_at_before_anything_is_made)
{
    char reason[TL_ERROR_MESSAGE_BYTES];
    setup_local();
    connect_as(_i == 0 ? "" : MEMBER);
    say_offers(STORM, 1, NULL, 0);
    ck_assert_uint_eq(read_refusals(STORM, reason), STORM);
    ck_assert_msg(strstr(reason, "a pair address of 0 bytes") != NULL, "%s", reason);
    teardown_worker();
}
END_TEST

/* The first offer of a storm gets an attempt, which the second ends; the third gets another one. Until both have gone
 * no other is made. The next attempt then fails, because the peer has no socket. */
START_TEST(a_storm_of_offers_makes_two_attempts)
{
    uint8_t pair_address[TL_CONNECTION_ADDRESS_BYTES];
    char reason[TL_ERROR_MESSAGE_BYTES];
    setup_local();
    connect_as(_i == 0 ? "" : MEMBER);
    size_t len_bytes = get_address(pair_address);
    say_offers(STORM, 1, pair_address, len_bytes);
    ck_assert_uint_eq(read_refusals(STORM, reason), STORM - 2);
    ck_assert_msg(strstr(reason, "offer again later") != NULL, "%s", reason);
    for (uint64_t attempt = STORM + 1; strstr(reason, "no worker answers at the peer's socket") == NULL; attempt++) {
        usleep(20000);
        say_offers(1, attempt, pair_address, len_bytes);
        ck_assert_uint_eq(read_refusals(attempt, reason), 1);
    }
    teardown_worker();
}
END_TEST

int main(void)
{
    Suite *all = suite_create("dataplane_messages");
    TCase *pair = tcase_create("pair");
    tcase_set_timeout(pair, 60);
    tcase_add_test(pair, an_offer_and_its_answer_arrive_whole);
    tcase_add_test(pair, a_refusal_carries_its_reason);
    tcase_add_test(pair, a_reason_that_is_not_utf8_ends_no_link);
    tcase_add_test(pair, more_than_fit_a_frame_arrive_in_order_before_requests);
    tcase_add_test(pair, a_message_for_a_link_that_ends_is_dropped);
    suite_add_tcase(all, pair);
    TCase *bad = tcase_create("bad");
    tcase_set_timeout(bad, 60);
    tcase_add_test(bad, an_address_that_is_too_long_ends_the_link);
    tcase_add_loop_test(bad, a_transport_that_is_too_long_or_empty_ends_the_link, 0, 2);
    tcase_add_test(bad, a_reason_that_is_too_long_ends_the_link);
    tcase_add_test(bad, a_peer_that_does_not_take_its_refusals_ends_the_link);
    suite_add_tcase(all, bad);
    TCase *storm = tcase_create("storm");
    tcase_set_timeout(storm, 60);
    tcase_add_loop_test(storm, an_address_is_looked_at_before_anything_is_made, 0, 2);
    tcase_add_loop_test(storm, a_storm_of_offers_makes_two_attempts, 0, 2);
    suite_add_tcase(all, storm);
    return run_suite(all);
}
