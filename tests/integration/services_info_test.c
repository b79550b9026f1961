// SPDX-License-Identifier: Apache-2.0
/* List, Withdraw, Identify, health and reflection, over a real connection, with good and bad messages. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "fakes/fake_worker.h"
#include "fakes/raw_call.h"
#include "fakes/run_suite.h"
#include "grpc/health/v1/health.pb-c.h"
#include "grpc/reflection/v1/reflection.pb-c.h"
#include "grpc/reflection/v1alpha/reflection.pb-c.h"
#include "proto_descriptors.h"
#include "tensorlane/v1/cluster.pb-c.h"
#include "tensorlane/v1/transfer.pb-c.h"

static struct fake_worker worker;
static struct raw_call call;

static void setup(void)
{
    fake_worker_init(&worker);
}

static void teardown(void)
{
    fake_worker_stop(&worker, 0);
}

static void open_with(const char *method, const ProtobufCMessage *request)
{
    raw_call_open(&call, worker.address, method, TL_TIME_NEVER);
    raw_call_send_message(&call, request);
}

static void expect_status(enum tl_status code, const char *words)
{
    const struct tl_error *status = raw_call_finish(&call);
    ck_assert_msg(status->code == code, "%s instead of %s: %s", tl_status_name(status->code), tl_status_name(code),
                  status->message);
    ck_assert_msg(strstr(status->message, words) != NULL, "\"%s\" lacks \"%s\"", status->message, words);
    raw_call_close(&call);
}

static void expect_bytes_refused(const char *method, const void *bytes, size_t len_bytes, const char *words)
{
    raw_call_open(&call, worker.address, method, TL_TIME_NEVER);
    raw_call_send(&call, bytes, len_bytes);
    raw_call_half_close(&call);
    expect_status(TL_INVALID_ARGUMENT, words);
}

/* ------------------------------------------------------------------------------------------- List and Withdraw -- */

#define LIST "/tensorlane.v1.Transfer/List"
#define WITHDRAW "/tensorlane.v1.Transfer/Withdraw"

/* Counts what a listing has; every entry is checked. */
static size_t list_all(const char *pattern, unsigned *ret_messages)
{
    Tensorlane__V1__ListRequest request = TENSORLANE__V1__LIST_REQUEST__INIT;
    request.pattern = (char *)pattern;
    open_with(LIST, &request.base);
    raw_call_half_close(&call);
    size_t count = 0;
    *ret_messages = 0;
    Tensorlane__V1__ListResponse *response;
    while ((response = raw_call_receive_message(&call, &tensorlane__v1__list_response__descriptor)) != NULL) {
        ck_assert_uint_gt(response->n_entries, 0);
        ck_assert_uint_le(response->n_entries, 256);
        ck_assert_uint_le(protobuf_c_message_get_packed_size(&response->base), TL_MAX_FRAME_HEAD_BYTES);
        for (size_t i = 0; i < response->n_entries; i++, count++) {
            const Tensorlane__V1__ListEntry *entry = response->entries[i];
            char number[8];
            snprintf(number, sizeof(number), "%06zu", count);
            ck_assert_uint_eq(strlen(entry->key), worker.script.list_key_bytes);
            ck_assert_mem_eq(entry->key, number, 6);
            ck_assert_uint_eq(entry->step, count);
            ck_assert_uint_eq(entry->publication, count + 1);
            ck_assert_uint_eq(entry->meta_data->n_dims, 2);
            ck_assert_uint_eq(entry->meta_data->dims[1], 3);
            ck_assert_uint_eq(entry->meta_data->size_bytes, 24);
        }
        ++*ret_messages;
        tensorlane__v1__list_response__free_unpacked(response, NULL);
    }
    expect_status(TL_OK, "");
    return count;
}

START_TEST(list_in_batches)
{
    unsigned messages;
    worker.script.list_count = 1000;
    fake_worker_start(&worker);
    ck_assert_uint_eq(list_all("a*", &messages), 1000);
    ck_assert_uint_eq(messages, 4);
    ck_assert_str_eq(fake_worker_seen(&worker).pattern, "a*");
}
END_TEST

START_TEST(list_of_long_keys)
{
    unsigned messages;
    worker.script.list_count = 600;
    worker.script.list_key_bytes = 512;
    fake_worker_start(&worker);
    ck_assert_uint_eq(list_all("", &messages), 600);
    ck_assert_uint_ge(messages, 3);
    ck_assert_str_eq(fake_worker_seen(&worker).pattern, "");
}
END_TEST

START_TEST(list_of_nothing)
{
    unsigned messages;
    fake_worker_start(&worker);
    ck_assert_uint_eq(list_all("", &messages), 0);
    ck_assert_uint_eq(messages, 0);
}
END_TEST

START_TEST(list_passes_the_status_on)
{
    tl_error_set(&worker.script.list, TL_RESOURCE_EXHAUSTED, "no memory for the listing");
    fake_worker_start(&worker);
    Tensorlane__V1__ListRequest request = TENSORLANE__V1__LIST_REQUEST__INIT;
    open_with(LIST, &request.base);
    raw_call_half_close(&call);
    expect_status(TL_RESOURCE_EXHAUSTED, "no memory for the listing");
}
END_TEST

START_TEST(list_cancelled_in_the_middle)
{
    worker.script.list_count = 100000;
    worker.script.list_key_bytes = 512;
    fake_worker_start(&worker);
    Tensorlane__V1__ListRequest request = TENSORLANE__V1__LIST_REQUEST__INIT;
    open_with(LIST, &request.base);
    raw_call_half_close(&call);
    Tensorlane__V1__ListResponse *response =
        raw_call_receive_message(&call, &tensorlane__v1__list_response__descriptor);
    ck_assert_ptr_nonnull(response);
    tensorlane__v1__list_response__free_unpacked(response, NULL);
    raw_call_close(&call);
}
END_TEST

START_TEST(withdraw_tells_how_many)
{
    worker.script.withdraw_count = 7;
    fake_worker_start(&worker);
    Tensorlane__V1__WithdrawRequest request = TENSORLANE__V1__WITHDRAW_REQUEST__INIT;
    request.pattern = (char *)"layer/*";
    open_with(WITHDRAW, &request.base);
    raw_call_half_close(&call);
    Tensorlane__V1__WithdrawResponse *response =
        raw_call_receive_message(&call, &tensorlane__v1__withdraw_response__descriptor);
    ck_assert_ptr_nonnull(response);
    ck_assert_uint_eq(response->count, 7);
    tensorlane__v1__withdraw_response__free_unpacked(response, NULL);
    expect_status(TL_OK, "");
    ck_assert_str_eq(fake_worker_seen(&worker).pattern, "layer/*");
}
END_TEST

START_TEST(patterns_are_checked)
{
    unsigned char request[1100];
    memset(request, 'k', sizeof(request));
    memcpy(request, "\x0a\x81\x08", 3);
    fake_worker_start(&worker);
    expect_bytes_refused(WITHDRAW, "", 0, "pattern is missing");
    expect_bytes_refused(WITHDRAW, request, 3 + 1025, "at most 1024");
    expect_bytes_refused(WITHDRAW, "\xff", 1, "");
    expect_bytes_refused(LIST, request, 3 + 1025, "at most 1024");
    expect_bytes_refused(LIST, "\x0a\x02\xc3\x28", 4, "UTF-8");
    expect_bytes_refused(LIST, "\x0a\x05k", 3, "");
    ck_assert_str_eq(fake_worker_seen(&worker).pattern, "");
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- Identify -- */

#define IDENTIFY "/tensorlane.v1.Cluster/Identify"

static Tensorlane__V1__IdentifyResponse *identify(void)
{
    Tensorlane__V1__IdentifyRequest request = TENSORLANE__V1__IDENTIFY_REQUEST__INIT;
    open_with(IDENTIFY, &request.base);
    raw_call_half_close(&call);
    Tensorlane__V1__IdentifyResponse *response =
        raw_call_receive_message(&call, &tensorlane__v1__identify_response__descriptor);
    ck_assert_ptr_nonnull(response);
    expect_status(TL_OK, "");
    return response;
}

START_TEST(identify_tells_everything)
{
    worker.script.peer_count = 2;
    worker.script.peer_reason = "links are fine";
    fake_worker_start(&worker);
    Tensorlane__V1__IdentifyResponse *response = identify();
    ck_assert_str_eq(response->job, "ps");
    ck_assert_uint_eq(response->task, 3);
    ck_assert_uint_eq(response->incarnation, 42);
    ck_assert_str_eq(response->software_version, "1.2.3");
    ck_assert_uint_eq(response->protocol_version, 1);
    ck_assert(response->is_serving);
    ck_assert_uint_eq(response->uptime_ns, 5);
    ck_assert_uint_eq(response->n_transports, 1);
    ck_assert_str_eq(response->transports[0]->name, "grpc");
    ck_assert(response->transports[0]->is_available);
    ck_assert_str_eq(response->transports[0]->reason, "always there");
    ck_assert_uint_eq(response->n_peers, 2);
    ck_assert_str_eq(response->peers[1]->name, "/job:worker/task:1");
    ck_assert_str_eq(response->peers[1]->state, "up");
    ck_assert_str_eq(response->peers[1]->transport, "grpc");
    ck_assert_str_eq(response->peers[1]->reason, "links are fine");
    ck_assert_uint_eq(response->peers[1]->incarnation, 2);
    ck_assert_uint_eq(response->peers[1]->latency_ns, 1500);
    ck_assert_uint_eq(response->peers[1]->bytes_per_second, 7);
    ck_assert_uint_eq(response->peers[1]->mtu_bytes, 1024);
    ck_assert_ptr_null(response->data_plane);
    ck_assert_uint_eq(response->n_counters, 1);
    ck_assert_str_eq(response->counters[0]->name, "bytes_sent");
    ck_assert_uint_eq(response->counters[0]->value, UINT64_MAX);
    ck_assert_uint_eq(response->cluster_digest, 7);
    ck_assert_str_eq(response->host_name, "gpu-0");
    ck_assert_uint_eq(response->process_id, 4711);
    ck_assert_int_eq(response->unix_ns, -1);
    ck_assert_uint_eq(response->n_settings, 1);
    ck_assert_str_eq(response->settings[0]->path, "connect");
    ck_assert_str_eq(response->settings[0]->value, "lazy");
    ck_assert_uint_eq(response->n_listens, 1);
    ck_assert_str_eq(response->listens[0], "127.0.0.1:4000");
    ck_assert_uint_eq(response->n_troubles, 1);
    ck_assert_str_eq(response->troubles[0]->what, "pool");
    ck_assert(response->troubles[0]->breaks_transfers);
    ck_assert_str_eq(response->reason, "");
    tensorlane__v1__identify_response__free_unpacked(response, NULL);
}
END_TEST

START_TEST(identify_tells_of_the_data_plane)
{
    worker.script.has_data_plane = true;
    fake_worker_start(&worker);
    Tensorlane__V1__IdentifyResponse *response = identify();
    const Tensorlane__V1__DataPlane *transport = response->data_plane;
    ck_assert_ptr_nonnull(transport);
    ck_assert_str_eq(transport->memlock, "too little");
    ck_assert_str_eq(transport->device, "mlx5_0");
    ck_assert_uint_eq(transport->port, 2);
    ck_assert_uint_eq(transport->gid_index, 3);
    ck_assert_str_eq(transport->gid, "10.0.0.1");
    ck_assert_str_eq(transport->gid_type, "RoCE v2");
    ck_assert_str_eq(transport->port_state, "active");
    ck_assert_str_eq(transport->link_layer, "Ethernet");
    ck_assert_uint_eq(transport->mtu_bytes, 4096);
    ck_assert_str_eq(transport->reason, "its GID fits");
    ck_assert_str_eq(transport->passed_over, "mlx5_1:1: broken");
    ck_assert_str_eq(transport->not_tried, "mlx5_0:2 GID 4 10.0.0.1");
    /* One is no UTF-8, one was not filled. */
    ck_assert_str_eq(transport->interface, "bad ? name");
    ck_assert_str_eq(transport->keys, "");
    tensorlane__v1__identify_response__free_unpacked(response, NULL);
}
END_TEST

START_TEST(identify_shows_what_is_not_utf8)
{
    worker.script.peer_count = 1;
    worker.script.peer_reason = "bad \xff bytes";
    fake_worker_start(&worker);
    Tensorlane__V1__IdentifyResponse *response = identify();
    ck_assert_str_eq(response->peers[0]->reason, "bad ? bytes");
    ck_assert_str_eq(response->peers[0]->name, "/job:worker/task:0");
    tensorlane__v1__identify_response__free_unpacked(response, NULL);
}
END_TEST

START_TEST(identify_of_a_large_cluster)
{
    worker.script.peer_count = 1000;
    worker.script.peer_reason_bytes = 1000;
    fake_worker_start(&worker);
    Tensorlane__V1__IdentifyResponse *response = identify();
    ck_assert_uint_eq(response->n_peers, 1000);
    ck_assert_str_eq(response->peers[999]->reason, "");
    ck_assert_str_eq(response->peers[999]->state, "up");
    ck_assert_uint_le(protobuf_c_message_get_packed_size(&response->base), TL_MAX_FRAME_HEAD_BYTES);
    tensorlane__v1__identify_response__free_unpacked(response, NULL);
}
END_TEST

START_TEST(identify_passes_the_status_on)
{
    tl_error_set(&worker.script.describe, TL_RESOURCE_EXHAUSTED, "no memory for the description");
    fake_worker_start(&worker);
    Tensorlane__V1__IdentifyRequest request = TENSORLANE__V1__IDENTIFY_REQUEST__INIT;
    open_with(IDENTIFY, &request.base);
    raw_call_half_close(&call);
    expect_status(TL_RESOURCE_EXHAUSTED, "no memory for the description");
}
END_TEST

START_TEST(identify_refuses_garbage)
{
    fake_worker_start(&worker);
    expect_bytes_refused(IDENTIFY, "\x0a\x05k", 3, "IdentifyRequest");
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ health -- */

#define CHECK "/grpc.health.v1.Health/Check"
#define WATCH "/grpc.health.v1.Health/Watch"

struct health_change {
    const char *service;
    enum tl_health health;
};

static void apply(struct fake_worker *fake, void *context)
{
    const struct health_change *change = context;
    tl_control_set_health(fake->control, change->service, change->health);
}

static void set_health(const char *service, enum tl_health health)
{
    struct health_change change = {service, health};
    fake_worker_run(&worker, apply, &change);
}

static void ask_health(const char *method, const char *service)
{
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    request.service = (char *)service;
    open_with(method, &request.base);
    raw_call_half_close(&call);
}

static void expect_health(enum tl_health health)
{
    Grpc__Health__V1__HealthCheckResponse *response =
        raw_call_receive_message(&call, &grpc__health__v1__health_check_response__descriptor);
    ck_assert_ptr_nonnull(response);
    ck_assert_int_eq((int)response->status, (int)health);
    grpc__health__v1__health_check_response__free_unpacked(response, NULL);
}

static void check(const char *service, enum tl_health health)
{
    ask_health(CHECK, service);
    expect_health(health);
    expect_status(TL_OK, "");
}

START_TEST(check_tells_the_present_health)
{
    fake_worker_start(&worker);
    check("", TL_HEALTH_NOT_SERVING);
    set_health("", TL_HEALTH_SERVING);
    set_health("tensorlane.v1.Transfer", TL_HEALTH_NOT_SERVING);
    check("", TL_HEALTH_SERVING);
    check("tensorlane.v1.Transfer", TL_HEALTH_NOT_SERVING);
    set_health("tensorlane.v1.Transfer", TL_HEALTH_SERVING);
    check("tensorlane.v1.Transfer", TL_HEALTH_SERVING);
}
END_TEST

START_TEST(check_of_an_unknown_service)
{
    fake_worker_start(&worker);
    ask_health(CHECK, "tensorlane.v1.Cluster");
    expect_status(TL_NOT_FOUND, "\"tensorlane.v1.Cluster\"");
}
END_TEST

START_TEST(check_refuses_bad_requests)
{
    unsigned char request[600];
    memset(request, 'k', sizeof(request));
    memcpy(request, "\x0a\x81\x04", 3);
    fake_worker_start(&worker);
    expect_bytes_refused(CHECK, request, 3 + 513, "at most 512");
    expect_bytes_refused(WATCH, request, 3 + 513, "at most 512");
    expect_bytes_refused(WATCH, "\x0a\x01\xff", 3, "UTF-8");
}
END_TEST

START_TEST(watch_tells_each_change_once)
{
    fake_worker_start(&worker);
    set_health("", TL_HEALTH_SERVING);
    ask_health(WATCH, "");
    expect_health(TL_HEALTH_SERVING);
    set_health("", TL_HEALTH_SERVING);
    set_health("tensorlane.v1.Transfer", TL_HEALTH_SERVING);
    set_health("", TL_HEALTH_NOT_SERVING);
    expect_health(TL_HEALTH_NOT_SERVING);
    set_health("", TL_HEALTH_SERVING);
    expect_health(TL_HEALTH_SERVING);
    raw_call_close(&call);
}
END_TEST

START_TEST(watch_of_a_service_that_comes_later)
{
    fake_worker_start(&worker);
    ask_health(WATCH, "tensorlane.v1.Cluster");
    expect_health(TL_HEALTH_SERVICE_UNKNOWN);
    set_health("tensorlane.v1.Cluster", TL_HEALTH_SERVING);
    expect_health(TL_HEALTH_SERVING);
    raw_call_close(&call);
}
END_TEST

static void set_not_serving_and_stop(struct fake_worker *fake, void *context)
{
    (void)context;
    tl_control_set_health(fake->control, "", TL_HEALTH_NOT_SERVING);
    tl_health_service_stop(fake->control->health);
}

START_TEST(watch_ends_when_the_server_stops)
{
    fake_worker_start(&worker);
    set_health("", TL_HEALTH_SERVING);
    ask_health(WATCH, "");
    expect_health(TL_HEALTH_SERVING);
    fake_worker_run(&worker, set_not_serving_and_stop, NULL);
    expect_health(TL_HEALTH_NOT_SERVING);
    expect_status(TL_UNAVAILABLE, "shutting down");
}
END_TEST

START_TEST(stop_does_not_wait_for_watchers)
{
    fake_worker_start(&worker);
    ask_health(WATCH, "");
    expect_health(TL_HEALTH_NOT_SERVING);
    fake_worker_stop(&worker, TL_TIME_NEVER);
    expect_status(TL_UNAVAILABLE, "");
    fake_worker_init(&worker);
    fake_worker_start(&worker);
}
END_TEST

/* One of many calls on one connection. */
struct watcher {
    struct tl_stream *stream; /* NULL: ended. */
    unsigned *refused;
    unsigned *ended;
};

static void note_end(struct tl_stream *stream, const struct tl_error *status)
{
    struct watcher *watcher = tl_stream_owner(stream);
    watcher->stream = NULL;
    ++*watcher->ended;
    if (status->code == TL_RESOURCE_EXHAUSTED &&
        strstr(status->message, "1024 calls of Watch may be open, and 768 are") != NULL) {
        ++*watcher->refused;
    }
}

#define WATCHERS 769 /* One more than three quarters of 1024. */

START_TEST(watchers_are_bounded)
{
    static const struct tl_stream_events events = {.on_closed = note_end};
    static struct watcher watchers[WATCHERS];
    unsigned refused = 0, ended = 0;
    struct tl_error error;
    fake_worker_start(&worker);
    raw_call_open(&call, worker.address, WATCH, TL_TIME_NEVER);
    struct raw_call many = call;
    tl_stream_set_owner(many.stream, &many);
    for (unsigned i = 0; i < WATCHERS; i++) {
        watchers[i] = (struct watcher){.refused = &refused, .ended = &ended};
        ck_assert(tl_stream_call(many.loop, many.channel, WATCH, TL_TIME_NEVER, &events, &watchers[i],
                                 &watchers[i].stream, &error) == TL_OK);
        tl_stream_send(watchers[i].stream, grpc_raw_byte_buffer_create(NULL, 0));
        tl_stream_half_close(watchers[i].stream);
        tl_stream_read(watchers[i].stream);
    }
    while (ended == 0)
        (void)tl_loop_run_once(many.loop, TL_TIME_NEVER);
    ck_assert_uint_eq(refused, 1);
    check("", TL_HEALTH_NOT_SERVING);
    for (unsigned i = 0; i < WATCHERS; i++) {
        if (watchers[i].stream != NULL) tl_stream_cancel(watchers[i].stream);
    }
    while (ended < WATCHERS)
        (void)tl_loop_run_once(many.loop, TL_TIME_NEVER);
    ck_assert_uint_eq(refused, 1);
    raw_call_close(&many);
}
END_TEST

/* -------------------------------------------------------------------------------------------------- reflection -- */

#define REFLECTION_V1 "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
#define REFLECTION_V1ALPHA "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"

#define QUESTION(kind) GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_##kind
#define ANSWER(kind) GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_##kind

typedef Grpc__Reflection__V1__ServerReflectionRequest reflection_request;
typedef Grpc__Reflection__V1__ServerReflectionResponse reflection_response;

static reflection_response *answer_to(const reflection_request *request)
{
    raw_call_send_message(&call, &request->base);
    reflection_response *response =
        raw_call_receive_message(&call, &grpc__reflection__v1__server_reflection_response__descriptor);
    ck_assert_ptr_nonnull(response);
    ck_assert_ptr_nonnull(response->original_request);
    ck_assert_int_eq(response->original_request->message_request_case, request->message_request_case);
    return response;
}

static void drop_answer(reflection_response *response)
{
    grpc__reflection__v1__server_reflection_response__free_unpacked(response, NULL);
}

static reflection_response *ask_symbol(const char *symbol)
{
    reflection_request request = GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT;
    request.host = (char *)"here";
    request.message_request_case = QUESTION(FILE_CONTAINING_SYMBOL);
    request.file_containing_symbol = (char *)symbol;
    reflection_response *response = answer_to(&request);
    ck_assert_str_eq(response->valid_host, "here");
    ck_assert_str_eq(response->original_request->file_containing_symbol, symbol);
    return response;
}

static void expect_file(const char *symbol, const char *file)
{
    reflection_response *response = ask_symbol(symbol);
    ck_assert_msg(response->message_response_case == ANSWER(FILE_DESCRIPTOR_RESPONSE), "%s: no file", symbol);
    ck_assert_uint_eq(response->file_descriptor_response->n_file_descriptor_proto, 1);
    const ProtobufCBinaryData *bytes = &response->file_descriptor_response->file_descriptor_proto[0];
    const struct tl_proto_file *found = NULL;
    for (size_t i = 0; i < tl_proto_file_count; i++) {
        if (strcmp(tl_proto_files[i].name, file) == 0) found = &tl_proto_files[i];
    }
    ck_assert_ptr_nonnull(found);
    ck_assert_uint_eq(bytes->len, found->len_bytes);
    ck_assert_mem_eq(bytes->data, found->bytes, bytes->len);
    drop_answer(response);
}

static void expect_error(reflection_response *response, enum tl_status code)
{
    ck_assert_int_eq(response->message_response_case, ANSWER(ERROR_RESPONSE));
    ck_assert_int_eq(response->error_response->error_code, (int)code);
    ck_assert_str_ne(response->error_response->error_message, "");
    drop_answer(response);
}

static void expect_services(void)
{
    static const char *const names[] = {
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "tensorlane.v1.Cluster",
        "tensorlane.v1.Transfer",
    };
    reflection_request request = GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT;
    request.message_request_case = QUESTION(LIST_SERVICES);
    request.list_services = (char *)"*";
    reflection_response *response = answer_to(&request);
    ck_assert_int_eq(response->message_response_case, ANSWER(LIST_SERVICES_RESPONSE));
    ck_assert_uint_eq(response->list_services_response->n_service, 5);
    for (size_t i = 0; i < 5; i++)
        ck_assert_str_eq(response->list_services_response->service[i]->name, names[i]);
    drop_answer(response);
}

START_TEST(reflection_lists_services)
{
    fake_worker_start(&worker);
    raw_call_open(&call, worker.address, REFLECTION_V1, TL_TIME_NEVER);
    expect_services();
    expect_services();
    raw_call_half_close(&call);
    expect_status(TL_OK, "");
    raw_call_open(&call, worker.address, REFLECTION_V1ALPHA, TL_TIME_NEVER);
    expect_services();
    raw_call_half_close(&call);
    expect_status(TL_OK, "");
}
END_TEST

/* Everything that protobuf-c generated from a file must be found in that file. */
static void expect_message(const ProtobufCMessageDescriptor *message, const char *file)
{
    char symbol[256];
    expect_file(message->name, file);
    for (unsigned i = 0; i < message->n_fields; i++) {
        snprintf(symbol, sizeof(symbol), "%s.%s", message->name, message->fields[i].name);
        expect_file(symbol, file);
    }
}

static void expect_enum(const ProtobufCEnumDescriptor *enumeration, const char *scope, const char *file)
{
    char symbol[256];
    expect_file(enumeration->name, file);
    for (unsigned i = 0; i < enumeration->n_values; i++) {
        snprintf(symbol, sizeof(symbol), "%s.%s", scope, enumeration->values[i].name);
        expect_file(symbol, file);
    }
}

START_TEST(reflection_finds_every_symbol)
{
    static const ProtobufCMessageDescriptor *const transfer[] = {
        &tensorlane__v1__meta_data__descriptor,
        &tensorlane__v1__status__descriptor,
        &tensorlane__v1__hello__descriptor,
        &tensorlane__v1__request__descriptor,
        &tensorlane__v1__chunk__descriptor,
        &tensorlane__v1__failure__descriptor,
        &tensorlane__v1__frame__descriptor,
        &tensorlane__v1__receive_request__descriptor,
        &tensorlane__v1__receive_response__descriptor,
        &tensorlane__v1__publish_request__descriptor,
        &tensorlane__v1__publish_response__descriptor,
        &tensorlane__v1__withdraw_request__descriptor,
        &tensorlane__v1__withdraw_response__descriptor,
        &tensorlane__v1__list_request__descriptor,
        &tensorlane__v1__list_entry__descriptor,
        &tensorlane__v1__list_response__descriptor,
    };
    static const ProtobufCMessageDescriptor *const cluster[] = {
        &tensorlane__v1__identify_request__descriptor, &tensorlane__v1__identify_response__descriptor,
        &tensorlane__v1__transport_state__descriptor,  &tensorlane__v1__peer_state__descriptor,
        &tensorlane__v1__counter__descriptor,
    };
    fake_worker_start(&worker);
    raw_call_open(&call, worker.address, REFLECTION_V1, TL_TIME_NEVER);
    for (size_t i = 0; i < sizeof(transfer) / sizeof(transfer[0]); i++) {
        expect_message(transfer[i], "tensorlane/v1/transfer.proto");
    }
    for (size_t i = 0; i < sizeof(cluster) / sizeof(cluster[0]); i++) {
        expect_message(cluster[i], "tensorlane/v1/cluster.proto");
    }
    expect_enum(&tensorlane__v1__dtype__descriptor, "tensorlane.v1", "tensorlane/v1/transfer.proto");
    expect_enum(&grpc__health__v1__health_check_response__serving_status__descriptor,
                "grpc.health.v1.HealthCheckResponse", "grpc/health/v1/health.proto");
    expect_file("tensorlane.v1.Transfer", "tensorlane/v1/transfer.proto");
    expect_file("tensorlane.v1.Transfer.Exchange", "tensorlane/v1/transfer.proto");
    expect_file("tensorlane.v1.Cluster.Identify", "tensorlane/v1/cluster.proto");
    expect_file("grpc.health.v1.Health.Watch", "grpc/health/v1/health.proto");
    expect_file("grpc.reflection.v1.ServerReflection", "grpc/reflection/v1/reflection.proto");
    expect_file("grpc.reflection.v1.ServerReflectionRequest.message_request", "grpc/reflection/v1/reflection.proto");
    expect_message(&grpc__reflection__v1alpha__server_reflection_response__descriptor,
                   "grpc/reflection/v1alpha/reflection.proto");
    raw_call_half_close(&call);
    expect_status(TL_OK, "");
}
END_TEST

START_TEST(reflection_does_not_find_others)
{
    static const char *const unknown[] = {
        "",
        ".",
        "tensorlane",
        "tensorlane.v1",
        "tensorlane.v1.",
        "tensorlane.v1.Chun",
        "tensorlane.v1.Chunks",
        "tensorlane.v1.Chunk.",
        "tensorlane.v1.Chunk.numbe",
        "tensorlane.v1.Chunk.number.x",
        "tensorlane.v1.DType.BOOL",
        "tensorlane.v1.Transfer.Nothing",
        ".tensorlane.v1.Chunk",
        "tensorlane.v2.Chunk",
        "grpc.health.v1.Health.Check.x",
        "\xe2\x82\xac",
    };
    fake_worker_start(&worker);
    raw_call_open(&call, worker.address, REFLECTION_V1ALPHA, TL_TIME_NEVER);
    for (size_t i = 0; i < sizeof(unknown) / sizeof(unknown[0]); i++) {
        reflection_response *response = ask_symbol(unknown[i]);
        ck_assert_msg(response->message_response_case == ANSWER(ERROR_RESPONSE), "%s was found", unknown[i]);
        expect_error(response, TL_NOT_FOUND);
    }
    raw_call_close(&call);
}
END_TEST

START_TEST(reflection_gives_files_by_name)
{
    fake_worker_start(&worker);
    raw_call_open(&call, worker.address, REFLECTION_V1, TL_TIME_NEVER);
    reflection_request request = GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT;
    request.message_request_case = QUESTION(FILE_BY_FILENAME);
    for (size_t i = 0; i < tl_proto_file_count; i++) {
        request.file_by_filename = (char *)tl_proto_files[i].name;
        reflection_response *response = answer_to(&request);
        ck_assert_int_eq(response->message_response_case, ANSWER(FILE_DESCRIPTOR_RESPONSE));
        ck_assert_uint_ge(response->file_descriptor_response->n_file_descriptor_proto, 1);
        ck_assert_mem_eq(response->file_descriptor_response->file_descriptor_proto[0].data, tl_proto_files[i].bytes,
                         tl_proto_files[i].len_bytes);
        drop_answer(response);
    }
    request.file_by_filename = (char *)"tensorlane/v1/nothing.proto";
    expect_error(answer_to(&request), TL_NOT_FOUND);
    raw_call_close(&call);
}
END_TEST

START_TEST(reflection_has_no_extensions)
{
    fake_worker_start(&worker);
    raw_call_open(&call, worker.address, REFLECTION_V1, TL_TIME_NEVER);
    Grpc__Reflection__V1__ExtensionRequest extension = GRPC__REFLECTION__V1__EXTENSION_REQUEST__INIT;
    extension.containing_type = (char *)"tensorlane.v1.Chunk";
    extension.extension_number = 100;
    reflection_request request = GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT;
    request.message_request_case = QUESTION(FILE_CONTAINING_EXTENSION);
    request.file_containing_extension = &extension;
    expect_error(answer_to(&request), TL_NOT_FOUND);
    request.message_request_case = QUESTION(ALL_EXTENSION_NUMBERS_OF_TYPE);
    request.all_extension_numbers_of_type = (char *)"tensorlane.v1.Chunk";
    reflection_response *response = answer_to(&request);
    ck_assert_int_eq(response->message_response_case, ANSWER(ALL_EXTENSION_NUMBERS_RESPONSE));
    ck_assert_str_eq(response->all_extension_numbers_response->base_type_name, "tensorlane.v1.Chunk");
    ck_assert_uint_eq(response->all_extension_numbers_response->n_extension_number, 0);
    drop_answer(response);
    request.all_extension_numbers_of_type = (char *)"tensorlane.v1.Transfer";
    expect_error(answer_to(&request), TL_NOT_FOUND);
    raw_call_close(&call);
}
END_TEST

START_TEST(reflection_of_bad_requests)
{
    unsigned char request[600];
    memset(request, 'k', sizeof(request));
    memcpy(request, "\x1a\x81\x04", 3);
    fake_worker_start(&worker);
    expect_bytes_refused(REFLECTION_V1, request, 3 + 513, "at most 512");
    expect_bytes_refused(REFLECTION_V1, "\x1a\x01\xff", 3, "UTF-8");
    expect_bytes_refused(REFLECTION_V1ALPHA, "\x1a\x05k", 3, "");
    raw_call_open(&call, worker.address, REFLECTION_V1, TL_TIME_NEVER);
    reflection_request nothing = GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT;
    expect_error(answer_to(&nothing), TL_UNIMPLEMENTED);
    raw_call_close(&call);
}
END_TEST

START_TEST(reflection_ends_silent_calls)
{
    worker.script.request_timeout_ns = 2 * TL_NS_PER_SEC;
    fake_worker_start(&worker);
    raw_call_open(&call, worker.address, REFLECTION_V1, TL_TIME_NEVER);
    expect_services();
    expect_status(TL_DEADLINE_EXCEEDED, "no progress");
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        list_in_batches,
        list_of_long_keys,
        list_of_nothing,
        list_passes_the_status_on,
        list_cancelled_in_the_middle,
        withdraw_tells_how_many,
        patterns_are_checked,
        identify_tells_everything,
        identify_tells_of_the_data_plane,
        identify_shows_what_is_not_utf8,
        identify_of_a_large_cluster,
        identify_passes_the_status_on,
        identify_refuses_garbage,
        check_tells_the_present_health,
        check_of_an_unknown_service,
        check_refuses_bad_requests,
        watch_tells_each_change_once,
        watch_of_a_service_that_comes_later,
        watch_ends_when_the_server_stops,
        stop_does_not_wait_for_watchers,
        watchers_are_bounded,
        reflection_lists_services,
        reflection_finds_every_symbol,
        reflection_does_not_find_others,
        reflection_gives_files_by_name,
        reflection_has_no_extensions,
        reflection_of_bad_requests,
        reflection_ends_silent_calls,
    };
    Suite *suite = suite_create("services_info");
    TCase *tcase = tcase_create("services_info");
    tcase_add_checked_fixture(tcase, setup, teardown);
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++)
        tcase_add_test(tcase, tests[i]);
    suite_add_tcase(suite, tcase);
    return run_suite_in_process(suite);
}
