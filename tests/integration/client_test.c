// SPDX-License-Identifier: Apache-2.0
/* Calls of tools: to a worker, to servers that answer wrongly, and to what is no server at all. */
#include <arpa/inet.h>
#include <check.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "control/client.h"
#include "control/responses.h"
#include "control/rpc_server.h"
#include "fakes/fake_worker.h"
#include "fakes/run_suite.h"
#include "tensorlane/v1/cluster.pb-c.h"

static struct tl_error error;
static enum tl_call_stage stage;

static struct tl_call_options options_for(const char *address)
{
    return (struct tl_call_options){
        .address = address, .connect_timeout_ns = 20 * TL_NS_PER_SEC, .rpc_timeout_ns = 20 * TL_NS_PER_SEC};
}

static void expect(enum tl_status status, enum tl_status code, enum tl_call_stage expected_stage, const char *words)
{
    ck_assert_msg(status == code, "%s instead of %s: %s", tl_status_name(status), tl_status_name(code), error.message);
    ck_assert_int_eq(stage, expected_stage);
    if (code == TL_OK) return;
    ck_assert_int_eq(error.code, code);
    ck_assert_msg(strstr(error.message, words) != NULL, "\"%s\" lacks \"%s\"", error.message, words);
}

/* ---------------------------------------------------------------------------------------------------- a worker -- */

static struct fake_worker worker;

static void setup(void)
{
    fake_worker_init(&worker);
}

static void teardown(void)
{
    fake_worker_stop(&worker, 0);
}

START_TEST(identify_reads_everything)
{
    worker.script.peer_count = 2;
    worker.script.peer_reason = "";
    fake_worker_start(&worker);
    struct tl_call_options options = options_for(worker.address);
    struct tl_description description;
    expect(tl_client_identify(&options, &description, &stage, &error), TL_OK, TL_CALL_RPC, "");
    ck_assert_str_eq(description.job, "ps");
    ck_assert_uint_eq(description.task, 3);
    ck_assert_uint_eq(description.incarnation, 42);
    ck_assert_str_eq(description.software_version, "1.2.3");
    ck_assert_uint_eq(description.protocol_version, 1);
    ck_assert(description.is_serving);
    ck_assert_uint_eq(description.uptime_ns, 5);
    ck_assert_uint_eq(description.transport_count, 1);
    ck_assert_str_eq(description.transports[0].name, "grpc");
    ck_assert(description.transports[0].is_available);
    ck_assert_str_eq(description.transports[0].reason, "always there");
    ck_assert_uint_eq(description.peer_count, 2);
    ck_assert_str_eq(description.peers[1].name, "/job:worker/task:1");
    ck_assert_str_eq(description.peers[1].state, "up");
    ck_assert_str_eq(description.peers[1].transport, "grpc");
    ck_assert_str_eq(description.peers[1].reason, "");
    ck_assert_uint_eq(description.peers[1].incarnation, 2);
    ck_assert_uint_eq(description.counter_count, 1);
    ck_assert_str_eq(description.counters[0].name, "bytes_sent");
    ck_assert_uint_eq(description.counters[0].value, UINT64_MAX);
    tl_description_fini(&description);
    ck_assert_ptr_null(description.job);
    tl_description_fini(&description);
}
END_TEST

START_TEST(status_of_the_worker_is_the_result)
{
    tl_error_set(&worker.script.describe, TL_PERMISSION_DENIED, "not for you");
    fake_worker_start(&worker);
    struct tl_call_options options = options_for(worker.address);
    struct tl_description description = {.task = 99};
    expect(tl_client_identify(&options, &description, &stage, &error), TL_PERMISSION_DENIED, TL_CALL_RPC,
           "not for you");
    ck_assert_uint_eq(description.task, 99);
    ck_assert_int_eq(tl_client_identify(&options, &description, NULL, NULL), TL_PERMISSION_DENIED);
}
END_TEST

static void serve_health(struct fake_worker *fake, void *context)
{
    (void)context;
    tl_control_set_health(fake->control, "tensorlane.v1.Transfer", TL_HEALTH_SERVING);
}

START_TEST(health_is_reported)
{
    fake_worker_start(&worker);
    fake_worker_run(&worker, serve_health, NULL);
    struct tl_call_options options = options_for(worker.address);
    int health = -1;
    expect(tl_client_check_health(&options, "", &health, &stage, &error), TL_OK, TL_CALL_RPC, "");
    ck_assert_int_eq(health, TL_HEALTH_NOT_SERVING);
    expect(tl_client_check_health(&options, "tensorlane.v1.Transfer", &health, &stage, &error), TL_OK, TL_CALL_RPC, "");
    ck_assert_int_eq(health, TL_HEALTH_SERVING);
    health = -1;
    expect(tl_client_check_health(&options, "nobody", &health, &stage, &error), TL_NOT_FOUND, TL_CALL_RPC,
           "\"nobody\"");
    ck_assert_int_eq(health, -1);
}
END_TEST

START_TEST(list_reads_all_messages)
{
    worker.script.list_count = 1000;
    worker.script.list_key_bytes = 512;
    fake_worker_start(&worker);
    struct tl_call_options options = options_for(worker.address);
    struct tl_listing listing;
    expect(tl_client_list(&options, "k*", &listing, &stage, &error), TL_OK, TL_CALL_RPC, "");
    ck_assert_uint_eq(listing.count, 1000);
    for (size_t i = 0; i < listing.count; i++) {
        ck_assert_uint_eq(strlen(listing.items[i].key), 512);
        ck_assert_uint_eq(listing.items[i].step, i);
        ck_assert_uint_eq(listing.items[i].publication, i + 1);
        ck_assert_int_eq(listing.items[i].meta_data.dtype, TL_F32);
        ck_assert_uint_eq(listing.items[i].meta_data.shape.dims[1], 3);
    }
    tl_listing_fini(&listing);
    tl_listing_fini(&listing);
    ck_assert_str_eq(fake_worker_seen(&worker).pattern, "k*");
}
END_TEST

START_TEST(list_may_be_empty)
{
    fake_worker_start(&worker);
    struct tl_call_options options = options_for(worker.address);
    struct tl_listing listing;
    expect(tl_client_list(&options, "", &listing, &stage, &error), TL_OK, TL_CALL_RPC, "");
    ck_assert_uint_eq(listing.count, 0);
    tl_listing_fini(&listing);
}
END_TEST

START_TEST(withdraw_counts)
{
    worker.script.withdraw_count = 3;
    fake_worker_start(&worker);
    struct tl_call_options options = options_for(worker.address);
    uint64_t count;
    expect(tl_client_withdraw(&options, "layer/*", &count, &stage, &error), TL_OK, TL_CALL_RPC, "");
    ck_assert_uint_eq(count, 3);
    expect(tl_client_withdraw(&options, "", &count, &stage, &error), TL_INVALID_ARGUMENT, TL_CALL_RPC, "pattern");
}
END_TEST

static void add_progress(void *context, uint64_t bytes)
{
    *(uint64_t *)context += bytes;
}

static struct tl_tensor *make_tensor(uint64_t size_bytes)
{
    struct tl_tensor *tensor;
    ck_assert(tl_tensor_create(TL_U8, 1, &size_bytes, &tensor, &error) == TL_OK);
    unsigned char *bytes = tl_tensor_data(tensor);
    for (uint64_t i = 0; i < size_bytes; i++)
        bytes[i] = (unsigned char)(i * 7 + i / 256);
    return tensor;
}

static void publish(uint64_t size_bytes, uint64_t chunk_bytes)
{
    struct tl_call_options options = options_for(worker.address);
    struct tl_tensor *tensor = make_tensor(size_bytes);
    uint64_t progress = 0;
    expect(
        tl_client_publish(&options, "weights", 8, false, tensor, chunk_bytes, add_progress, &progress, &stage, &error),
        TL_OK, TL_CALL_RPC, "");
    ck_assert_uint_eq(progress, size_bytes);
    struct fake_seen seen = fake_worker_seen(&worker);
    ck_assert_str_eq(seen.key, "weights");
    ck_assert_uint_eq(seen.published_step, 8);
    ck_assert_uint_eq(tl_tensor_size_bytes(seen.tensor), size_bytes);
    if (size_bytes > 0) ck_assert_mem_eq(tl_tensor_data(seen.tensor), tl_tensor_data(tensor), size_bytes);
    tl_tensor_put(tensor);
}

START_TEST(publish_in_pieces)
{
    fake_worker_start(&worker);
    publish(0, 1000);
    publish(1, 1000);
    publish(1000, 1000);
    publish(1001, 1000);
    publish(5000000, 1 << 20);
    ck_assert_uint_eq(fake_worker_seen(&worker).published, 5);
    ck_assert_uint_eq(fake_worker_seen(&worker).broken_off, 0);
}
END_TEST

START_TEST(publish_of_a_dead_tensor)
{
    fake_worker_start(&worker);
    struct tl_call_options options = options_for(worker.address);
    struct tl_tensor *tensor;
    ck_assert(tl_tensor_create_dead(&tensor, &error) == TL_OK);
    expect(tl_client_publish(&options, "dead", 0, false, tensor, 1024, NULL, NULL, &stage, &error), TL_OK, TL_CALL_RPC,
           "");
    ck_assert(tl_tensor_is_dead(fake_worker_seen(&worker).tensor));
    tl_tensor_put(tensor);
}
END_TEST

START_TEST(publish_refused_early)
{
    tl_error_set(&worker.script.admit, TL_RESOURCE_EXHAUSTED, "limits.published is full");
    fake_worker_start(&worker);
    struct tl_call_options options = options_for(worker.address);
    struct tl_tensor *tensor = make_tensor(50000000);
    expect(tl_client_publish(&options, "weights", 8, false, tensor, 1 << 20, NULL, NULL, &stage, &error),
           TL_RESOURCE_EXHAUSTED, TL_CALL_RPC, "limits.published is full");
    tl_tensor_put(tensor);
}
END_TEST

static enum tl_status failing_guard(void *context, const void *data, uint64_t len_bytes, struct tl_error *ret_error)
{
    int *left = context;
    (void)data;
    (void)len_bytes;
    if ((*left)-- > 0) return TL_OK;
    return tl_error_set(ret_error, TL_DATA_LOSS, "model.safetensors was truncated");
}

static bool is_broken_off(const struct fake_seen *seen)
{
    return seen->broken_off == seen->admitted;
}

START_TEST(publish_of_bytes_that_cannot_be_read)
{
    fake_worker_start(&worker);
    struct tl_call_options options = options_for(worker.address);
    /* Three pieces and the look at the end: each may be the one that fails. */
    for (int passing = 0; passing < 4; passing++) {
        struct tl_tensor *tensor = make_tensor(3000);
        int left = passing;
        tl_tensor_set_guard(tensor, failing_guard, &left);
        expect(tl_client_publish(&options, "weights", 8, false, tensor, 1000, NULL, NULL, &stage, &error), TL_DATA_LOSS,
               TL_CALL_RPC, "model.safetensors was truncated");
        fake_worker_wait(&worker, is_broken_off);
        tl_tensor_put(tensor);
    }
    ck_assert_uint_eq(fake_worker_seen(&worker).published, 0);
}
END_TEST

START_TEST(publish_under_a_bad_key)
{
    fake_worker_start(&worker);
    struct tl_call_options options = options_for(worker.address);
    struct tl_tensor *tensor = make_tensor(3);
    expect(tl_client_publish(&options, "", 8, false, tensor, 1000, NULL, NULL, &stage, &error), TL_INVALID_ARGUMENT,
           TL_CALL_RPC, "key");
    expect(tl_client_publish(&options, "bad\xff", 8, false, tensor, 1000, NULL, NULL, &stage, &error),
           TL_INVALID_ARGUMENT, TL_CALL_RPC, "UTF-8");
    tl_tensor_put(tensor);
}
END_TEST

/* --------------------------------------------------------------------------------------------- hostile servers -- */

/* A server whose only method answers each call in one way. */
struct hostile {
    const char *method;
    const void *bytes;
    size_t len_bytes;
    unsigned messages; /* The answer has these bytes. */
    struct tl_error status;
    bool is_silent; /* It never reads and never answers. */
    struct tl_loop *loop;
    struct tl_rpc_server *server;
    char address[64];
    pthread_t thread;
    bool is_stopped;
    struct tl_closure stop_closure;
};

struct hostile_call {
    struct hostile *hostile;
    unsigned left;
};

static void hostile_advance(struct tl_stream *stream)
{
    struct hostile_call *call = tl_stream_owner(stream);
    if (call->left == 0) {
        tl_stream_finish(stream, &call->hostile->status);
        return;
    }
    call->left--;
    grpc_slice slice = grpc_slice_from_copied_buffer(call->hostile->bytes, call->hostile->len_bytes);
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    tl_stream_send(stream, buffer);
}

static void hostile_message(struct tl_stream *stream, grpc_byte_buffer *message)
{
    grpc_byte_buffer_destroy(message);
    hostile_advance(stream);
}

static void hostile_closed(struct tl_stream *stream, const struct tl_error *status)
{
    (void)status;
    free(tl_stream_owner(stream));
}

static const struct tl_stream_events hostile_events = {
    .on_message = hostile_message, .on_sent = hostile_advance, .on_closed = hostile_closed};

static void hostile_accept(void *context, struct tl_stream *stream)
{
    struct hostile *hostile = context;
    struct hostile_call *call = calloc(1, sizeof(*call));
    TL_CHECK(call != NULL);
    *call = (struct hostile_call){hostile, hostile->messages};
    tl_stream_set_owner(stream, call);
    tl_stream_set_events(stream, &hostile_events);
    if (!hostile->is_silent) tl_stream_read(stream);
}

static void *hostile_serve(void *context)
{
    struct hostile *hostile = context;
    while (!hostile->is_stopped)
        (void)tl_loop_run_once(hostile->loop, TL_TIME_NEVER);
    return NULL;
}

static void hostile_start(struct hostile *hostile)
{
    const struct tl_rpc_server_options options = {.keepalive_ns = TL_TIME_NEVER,
                                                  .keepalive_timeout_ns = TL_TIME_NEVER,
                                                  .max_unfinished_ns = TL_TIME_NEVER,
                                                  .max_message_bytes = 1 << 20,
                                                  .max_calls = 100};
    uint16_t port = 0;
    TL_CHECK(tl_loop_create(&hostile->loop, NULL) == TL_OK);
    TL_CHECK(tl_rpc_server_create(hostile->loop, &options, &hostile->server, NULL) == TL_OK);
    TL_CHECK(tl_rpc_server_add_method(hostile->server, hostile->method, TL_ACTION_READ, hostile_accept, hostile,
                                      NULL) == TL_OK);
    TL_CHECK(tl_rpc_server_start(hostile->server, "127.0.0.1:0", &port, &error) == TL_OK);
    snprintf(hostile->address, sizeof(hostile->address), "127.0.0.1:%u", (unsigned)port);
    TL_CHECK(pthread_create(&hostile->thread, NULL, hostile_serve, hostile) == 0);
}

static void hostile_stopped(void *context)
{
    ((struct hostile *)context)->is_stopped = true;
}

static void hostile_begin_stop(struct tl_closure *closure)
{
    struct hostile *hostile = TL_CONTAINER_OF(closure, struct hostile, stop_closure);
    tl_rpc_server_stop(hostile->server, 0, hostile_stopped, hostile);
}

static void hostile_stop(struct hostile *hostile)
{
    hostile->stop_closure.run = hostile_begin_stop;
    tl_list_init(&hostile->stop_closure.link);
    tl_loop_post(hostile->loop, &hostile->stop_closure);
    pthread_join(hostile->thread, NULL);
    tl_rpc_server_destroy(hostile->server);
    tl_loop_destroy(hostile->loop);
}

#define IDENTIFY "/tensorlane.v1.Cluster/Identify"
#define LIST "/tensorlane.v1.Transfer/List"

/* Identify and List, when these bytes answer them, fail with this status. */
static void expect_answer(const char *method, const void *bytes, size_t len_bytes, unsigned messages,
                          enum tl_status code, const char *words)
{
    struct hostile hostile = {.method = method, .bytes = bytes, .len_bytes = len_bytes, .messages = messages};
    hostile_start(&hostile);
    struct tl_call_options options = options_for(hostile.address);
    if (strcmp(method, LIST) == 0) {
        struct tl_listing listing = {.count = 99};
        expect(tl_client_list(&options, "", &listing, &stage, &error), code, TL_CALL_RPC, words);
        ck_assert_uint_eq(listing.count, 99);
    } else {
        struct tl_description description = {.task = 99};
        expect(tl_client_identify(&options, &description, &stage, &error), code, TL_CALL_RPC, words);
        ck_assert_uint_eq(description.task, 99);
    }
    if (code == TL_INTERNAL) ck_assert_ptr_nonnull(strstr(error.message, hostile.address));
    hostile_stop(&hostile);
}

START_TEST(answers_that_are_no_messages)
{
    expect_answer(IDENTIFY, "\xff\xff", 2, 1, TL_INTERNAL, "sent an invalid response");
    expect_answer(IDENTIFY, "\x0a\x01\xff", 3, 1, TL_INTERNAL, "UTF-8");
    expect_answer(LIST, "\x0a\x05", 2, 1, TL_INTERNAL, "sent an invalid response");
}
END_TEST

START_TEST(answers_with_bad_values)
{
    /* An entry without key; one with a key but without meta-data; one with impossible meta-data. */
    expect_answer(LIST, "\x0a\x00", 2, 1, TL_INTERNAL, "key");
    expect_answer(LIST, "\x0a\x03\x0a\x01k", 5, 1, TL_INTERNAL, "meta-data");
    expect_answer(LIST, "\x0a\x07\x0a\x01k\x1a\x02\x08\x02", 9, 1, TL_INTERNAL, "k: ");
}
END_TEST

START_TEST(answers_with_too_many_or_no_messages)
{
    expect_answer(IDENTIFY, "", 0, 2, TL_INTERNAL, "more than one answer");
    expect_answer(IDENTIFY, "", 0, 0, TL_INTERNAL, "without a message");
}
END_TEST

START_TEST(answers_that_are_too_long)
{
    static unsigned char bytes[5 << 20];
    expect_answer(IDENTIFY, bytes, sizeof(bytes), 1, TL_RESOURCE_EXHAUSTED, "larger than max");
    /* A field of 300,000 bytes, more than the head of a message may have. */
    memcpy(bytes, "\x0a\xe0\xa7\x12", 4);
    expect_answer(IDENTIFY, bytes, 300004, 1, TL_INTERNAL, "too long");
    /* A text of 5000 bytes. */
    memset(bytes, 'k', sizeof(bytes));
    memcpy(bytes, "\x0a\x88\x27", 3);
    expect_answer(IDENTIFY, bytes, 5003, 1, TL_INTERNAL, "at most 4096");
}
END_TEST

START_TEST(messages_of_a_status_are_made_printable)
{
    struct hostile hostile = {.method = IDENTIFY};
    tl_error_set(&hostile.status, TL_ABORTED, "red \x1b[31m\nand \xff\xc3\xa9");
    hostile_start(&hostile);
    struct tl_call_options options = options_for(hostile.address);
    struct tl_description description;
    expect(tl_client_identify(&options, &description, &stage, &error), TL_ABORTED, TL_CALL_RPC, "");
    ck_assert_str_eq(error.message, "red  [31m and ?\xc3\xa9");
    hostile_stop(&hostile);
}
END_TEST

START_TEST(methods_that_the_server_lacks)
{
    struct hostile hostile = {.method = "/other.Service/Method"};
    hostile_start(&hostile);
    struct tl_call_options options = options_for(hostile.address);
    int health;
    expect(tl_client_check_health(&options, "", &health, &stage, &error), TL_UNIMPLEMENTED, TL_CALL_RPC,
           "no such method");
    hostile_stop(&hostile);
}
END_TEST

START_TEST(servers_that_do_not_answer)
{
    struct hostile hostile = {.method = IDENTIFY, .is_silent = true};
    hostile_start(&hostile);
    struct tl_call_options options = options_for(hostile.address);
    options.rpc_timeout_ns = 200 * TL_NS_PER_MS;
    struct tl_description description;
    expect(tl_client_identify(&options, &description, &stage, &error), TL_DEADLINE_EXCEEDED, TL_CALL_RPC,
           "did not answer /tensorlane.v1.Cluster/Identify within 200 ms");
    hostile_stop(&hostile);
}
END_TEST

START_TEST(servers_that_take_no_bytes)
{
    struct hostile hostile = {.method = "/tensorlane.v1.Transfer/Publish", .is_silent = true};
    hostile_start(&hostile);
    struct tl_call_options options = options_for(hostile.address);
    options.rpc_timeout_ns = 300 * TL_NS_PER_MS;
    struct tl_tensor *tensor = make_tensor(100 << 20);
    expect(tl_client_publish(&options, "weights", 0, false, tensor, 1 << 20, NULL, NULL, &stage, &error),
           TL_DEADLINE_EXCEEDED, TL_CALL_RPC, "weights: 127.0.0.1:");
    tl_tensor_put(tensor);
    hostile_stop(&hostile);
}
END_TEST

/* Entries without end: the listing stops at its bound, not when memory runs out. */
START_TEST(listings_are_bounded)
{
    /* An entry: a key of 512 bytes, then meta-data {U8, [4], 4 bytes}. */
    static const unsigned char meta_data[] = {0x1a, 0x07, 0x08, 0x02, 0x12, 0x01, 0x04, 0x20, 0x04};
    static unsigned char bytes[200 * (6 + 512 + sizeof(meta_data))];
    size_t used = 0;
    for (unsigned i = 0; i < 200; i++) {
        memcpy(bytes + used, "\x0a\x8c\x04\x0a\x80\x04", 6);
        memset(bytes + used + 6, 'k', 512);
        memcpy(bytes + used + 6 + 512, meta_data, sizeof(meta_data));
        used += 6 + 512 + sizeof(meta_data);
    }
    grpc_slice slice = grpc_slice_from_copied_buffer((const char *)bytes, used);
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
    struct tl_wire_arena arena;
    struct tl_listing_builder builder = {0};
    ck_assert(tl_wire_arena_init(&arena, 4 << 20, &error) == TL_OK);
    enum tl_status status = TL_OK;
    while (status == TL_OK)
        status = tl_list_response_read(buffer, &arena, &builder, &error);
    ck_assert_msg(status == TL_RESOURCE_EXHAUSTED, "%s", error.message);
    ck_assert_uint_le(builder.used_bytes, TL_MAX_LISTED_BYTES);
    ck_assert_uint_gt(builder.used_bytes, TL_MAX_LISTED_BYTES - 1000);
    ck_assert_uint_lt(builder.listing.count, TL_MAX_LISTED_COUNT);
    tl_listing_fini(&builder.listing);
    tl_wire_arena_fini(&arena);
    grpc_byte_buffer_destroy(buffer);
    grpc_slice_unref(slice);
}
END_TEST

START_TEST(listings_are_sorted)
{
    /* The keys "b", "a", "a" of dead tensors. */
    static const char bytes[] = "\x0a\x07\x0a\x01"
                                "b\x1a\x02\x18\x01\x0a\x07\x0a\x01"
                                "a\x1a\x02\x18\x01\x0a\x07\x0a\x01"
                                "a\x1a\x02\x18\x01";
    grpc_slice slice = grpc_slice_from_static_buffer(bytes, sizeof(bytes) - 1);
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
    struct tl_wire_arena arena;
    struct tl_listing_builder builder = {0};
    struct tl_listing listing;
    ck_assert(tl_wire_arena_init(&arena, 65536, &error) == TL_OK);
    ck_assert_msg(tl_list_response_read(buffer, &arena, &builder, &error) == TL_OK, "%s", error.message);
    tl_listing_builder_finish(&builder, &listing);
    ck_assert_uint_eq(listing.count, 3);
    ck_assert_str_eq(listing.items[0].key, "a");
    ck_assert_str_eq(listing.items[1].key, "a");
    ck_assert_str_eq(listing.items[2].key, "b");
    ck_assert(listing.items[2].meta_data.is_dead);
    tl_listing_fini(&listing);
    tl_wire_arena_fini(&arena);
    grpc_byte_buffer_destroy(buffer);
}
END_TEST

/* ------------------------------------------------------------------------------------------- no servers at all -- */

/* Opens a TCP socket on 127.0.0.1 that listens, or does not. */
static int open_port(int backlog, char *address, size_t capacity)
{
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof(place);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&place, sizeof(place)), 0);
    if (backlog >= 0) ck_assert_int_eq(listen(fd, backlog), 0);
    ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&place, &length), 0);
    snprintf(address, capacity, "127.0.0.1:%u", (unsigned)ntohs(place.sin_port));
    return fd;
}

static void expect_unreached(const struct tl_call_options *options, enum tl_status code,
                             enum tl_call_stage expected_stage, const char *words)
{
    struct tl_description description;
    expect(tl_client_identify(options, &description, &stage, &error), code, expected_stage, words);
}

START_TEST(closed_port)
{
    char address[64], words[128];
    int fd = open_port(-1, address, sizeof(address));
    struct tl_call_options options = options_for(address);
    snprintf(words, sizeof(words), "%s refused the connection; is the worker started?", address);
    expect_unreached(&options, TL_UNAVAILABLE, TL_CALL_CONNECT, words);
    ck_assert_str_eq(error.message, words);
    close(fd);
}
END_TEST

/* What the caller lacks is no fault of the server. */
START_TEST(no_descriptor_to_dial_with)
{
    char address[64];
    struct rlimit limit, none;
    int fd = open_port(0, address, sizeof(address));
    struct tl_call_options options = options_for(address);
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    none = limit;
    none.rlim_cur = 0;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
    expect_unreached(&options, TL_RESOURCE_EXHAUSTED, TL_CALL_CONNECT, "needs more descriptors");
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    close(fd);
}
END_TEST

START_TEST(full_backlog)
{
    char address[64];
    int fd = open_port(0, address, sizeof(address));
    /* Connections that are not accepted fill the queue; the next one gets no answer. */
    struct sockaddr_in place;
    socklen_t length = sizeof(place);
    int filler[4];
    ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&place, &length), 0);
    for (unsigned i = 0; i < 4; i++) {
        filler[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        (void)connect(filler[i], (struct sockaddr *)&place, sizeof(place));
    }
    struct tl_call_options options = options_for(address);
    options.connect_timeout_ns = 300 * TL_NS_PER_MS;
    expect_unreached(&options, TL_UNAVAILABLE, TL_CALL_CONNECT, "did not take the connection in time");
    for (unsigned i = 0; i < 4; i++)
        close(filler[i]);
    close(fd);
}
END_TEST

START_TEST(silent_port)
{
    char address[64];
    int fd = open_port(16, address, sizeof(address));
    struct tl_call_options options = options_for(address);
    options.connect_timeout_ns = 2 * TL_NS_PER_SEC;
    expect_unreached(&options, TL_UNAVAILABLE, TL_CALL_SILENT, "has not answered within 2.00 s");
    close(fd);
}
END_TEST

struct talker {
    int fd;
    const char *words;
};

/* Accepts connections until the socket is shut down, sends its words to each and closes it. */
static void *talk(void *context)
{
    const struct talker *talker = context;
    int fd;
    while ((fd = accept(talker->fd, NULL, NULL)) >= 0) {
        (void)!send(fd, talker->words, strlen(talker->words), MSG_NOSIGNAL);
        close(fd);
    }
    return NULL;
}

static void expect_no_http2(const char *what)
{
    char address[64];
    struct talker talker = {.fd = open_port(16, address, sizeof(address)), .words = what};
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, talk, &talker), 0);
    struct tl_call_options options = options_for(address);
    expect_unreached(&options, TL_UNAVAILABLE, TL_CALL_HTTP2, "does not speak gRPC (HTTP/2 without TLS): ");
    shutdown(talker.fd, SHUT_RDWR);
    pthread_join(thread, NULL);
    close(talker.fd);
}

START_TEST(ports_of_other_programs)
{
    expect_no_http2("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
    expect_no_http2("SSH-2.0-OpenSSH_9.2p1\r\n");
    expect_no_http2("\x15\x03\x01\x02\x02\x16");
    expect_no_http2("");
}
END_TEST

START_TEST(names_that_do_not_exist)
{
    struct tl_call_options options = options_for("worker-7.invalid:4000");
    expect_unreached(&options, TL_UNAVAILABLE, TL_CALL_RESOLVE, "\"worker-7.invalid\" ");
}
END_TEST

START_TEST(look_ups_have_a_deadline)
{
    /* A deadline in the past: whatever the name service does, it is too late. */
    struct tl_call_options options = options_for("worker-7.invalid:4000");
    options.connect_timeout_ns = 0;
    expect_unreached(&options, TL_UNAVAILABLE, TL_CALL_RESOLVE, "\"worker-7.invalid\" ");
}
END_TEST

START_TEST(bad_addresses)
{
    static const char *const bad[] = {
        "",        "host",     ":",     "host:",       "host:port",   "host:65536", "host:-1",
        "host:1x", "::1:4000", "a:b:1", "unix:/tmp/x", "host:000001", ":4000",
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(bad); i++) {
        struct tl_call_options options = options_for(bad[i]);
        expect_unreached(&options, TL_INVALID_ARGUMENT, TL_CALL_RESOLVE, bad[i]);
    }
    char host[300];
    memset(host, 'h', sizeof(host));
    memcpy(host + 256, ":1", 3);
    struct tl_call_options options = options_for(host);
    expect_unreached(&options, TL_INVALID_ARGUMENT, TL_CALL_RESOLVE, "256 bytes");
}
END_TEST

START_TEST(bad_headers)
{
    static const struct tl_call_header bad[] = {
        {"", "v"},   {"Upper", "v"},    {"two words", "v"}, {":path", "v"}, {"grpc-timeout", "v"},
        {"a", "\n"}, {"a", "\xc3\xa4"}, {"\xc3\xa4", "v"},  {"a:b", "v"},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(bad); i++) {
        const struct tl_call_header headers[] = {{"good", "v"}, bad[i]};
        struct tl_call_options options = options_for("no address");
        options.headers = headers;
        options.header_count = TL_ARRAY_COUNT(headers);
        expect_unreached(&options, TL_INVALID_ARGUMENT, TL_CALL_OPTIONS, bad[i].name);
    }
}
END_TEST

START_TEST(every_kind_of_address_is_dialled)
{
    fake_worker_init(&worker);
    fake_worker_start(&worker);
    char address[64];
    snprintf(address, sizeof(address), "localhost:%s", strchr(worker.address, ':') + 1);
    struct tl_call_options options = options_for(address);
    int health;
    expect(tl_client_check_health(&options, "", &health, &stage, &error), TL_OK, TL_CALL_RPC, "");
    fake_worker_stop(&worker, 0);
    options.address = "[::1]:1";
    expect_unreached(&options, TL_UNAVAILABLE, TL_CALL_CONNECT, "[::1]:1 ");
}
END_TEST

int main(void)
{
    const TTest *const with_worker[] = {
        identify_reads_everything, status_of_the_worker_is_the_result,
        health_is_reported,        list_reads_all_messages,
        list_may_be_empty,         withdraw_counts,
        publish_in_pieces,         publish_of_a_dead_tensor,
        publish_refused_early,     publish_of_bytes_that_cannot_be_read,
        publish_under_a_bad_key,
    };
    const TTest *const without_worker[] = {
        answers_that_are_no_messages,
        answers_with_bad_values,
        answers_with_too_many_or_no_messages,
        answers_that_are_too_long,
        messages_of_a_status_are_made_printable,
        methods_that_the_server_lacks,
        servers_that_do_not_answer,
        servers_that_take_no_bytes,
        listings_are_bounded,
        listings_are_sorted,
        closed_port,
        no_descriptor_to_dial_with,
        full_backlog,
        silent_port,
        ports_of_other_programs,
        names_that_do_not_exist,
        look_ups_have_a_deadline,
        bad_addresses,
        bad_headers,
        every_kind_of_address_is_dialled,
    };
    Suite *suite = suite_create("client");
    TCase *tcase = tcase_create("worker");
    tcase_add_checked_fixture(tcase, setup, teardown);
    for (size_t i = 0; i < TL_ARRAY_COUNT(with_worker); i++)
        tcase_add_test(tcase, with_worker[i]);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("others");
    for (size_t i = 0; i < TL_ARRAY_COUNT(without_worker); i++)
        tcase_add_test(tcase, without_worker[i]);
    suite_add_tcase(suite, tcase);
    return run_suite_in_process(suite);
}
