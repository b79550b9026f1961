// SPDX-License-Identifier: Apache-2.0
/*
 * A lying peer: the test is task 1 of a cluster, opens a link to a real worker, gets requests and answers with
 * impossible chunks; or it sends invalid frames, does not read, or disappears. The worker ends that request or that
 * link, with a status, and serves the next one.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/clock.h"
#include "base/log.h"
#include "fakes/cluster.h"
#include "fakes/device_case.h"
#include "fakes/log_capture.h"
#include "fakes/pattern.h"
#include "fakes/raw_call.h"
#include "fakes/run_suite.h"
#include "tensorlane/v1/transfer.pb-c.h"

#define EXCHANGE "/tensorlane.v1.Transfer/Exchange"
#define INCARNATION 77

typedef Tensorlane__V1__Frame Frame;
typedef Tensorlane__V1__Chunk Chunk;
typedef Tensorlane__V1__MetaData MetaData;

static struct cluster cluster;
static struct tl_worker *worker;
static struct tl_cq *cq;
static struct raw_call call;
static struct tl_error error;
static unsigned char bytes[1000];

/* ---------------------------------------------------------------------------------------------------- the peer -- */

static void say(const Frame *frame)
{
    raw_call_send_message(&call, &frame->base);
}

static Frame *hear(void)
{
    return raw_call_receive_message(&call, &tensorlane__v1__frame__descriptor);
}

static void forget(Frame *frame)
{
    tensorlane__v1__frame__free_unpacked(frame, NULL);
}

static void dial(void)
{
    char address[32];
    snprintf(address, sizeof(address), "127.0.0.1:%u", cluster.ports[0]);
    raw_call_open(&call, address, EXCHANGE, TL_TIME_NEVER);
}

static void shake_hands(const char *name, uint64_t incarnation)
{
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    Tensorlane__V1__Hello hello = TENSORLANE__V1__HELLO__INIT;
    hello.protocol_version = 1;
    hello.name = (char *)name;
    hello.incarnation = incarnation;
    hello.serves_parts = 1;
    frame.hello = &hello;
    say(&frame);
    Frame *answer = hear();
    ck_assert_ptr_nonnull(answer);
    ck_assert_ptr_nonnull(answer->hello);
    ck_assert_uint_eq(answer->hello->incarnation, tl_worker_incarnation(worker));
    forget(answer);
}

static void connect_as_peer(void)
{
    dial();
    shake_hands("/job:node/task:1", INCARNATION);
}

/* Returns the number of the next request. Acknowledgements and cancels before it are ignored. */
static uint64_t hear_request(void)
{
    for (;;) {
        Frame *frame = hear();
        ck_assert_ptr_nonnull(frame);
        uint64_t number = frame->n_requests > 0 ? frame->requests[0]->number : 0;
        forget(frame);
        if (number != 0) return number;
    }
}

static void hear_cancel(uint64_t number)
{
    for (bool is_cancelled = false; !is_cancelled;) {
        Frame *frame = hear();
        ck_assert_ptr_nonnull(frame);
        for (size_t i = 0; i < frame->n_cancels; i++)
            is_cancelled |= frame->cancels[i] == number;
        forget(frame);
    }
}

/* Makes a correct chunk: all of `bytes` as a U8 vector. */
struct answer {
    Chunk chunk;
    MetaData meta_data;
    uint64_t dims[20];
    size_t data_bytes;
};

static void answer_init(struct answer *answer, uint64_t number)
{
    tensorlane__v1__chunk__init(&answer->chunk);
    tensorlane__v1__meta_data__init(&answer->meta_data);
    for (unsigned i = 0; i < 20; i++)
        answer->dims[i] = 1;
    answer->dims[0] = sizeof(bytes);
    answer->meta_data.dtype = TENSORLANE__V1__DTYPE__U8;
    answer->meta_data.n_dims = 1;
    answer->meta_data.dims = answer->dims;
    answer->meta_data.size_bytes = sizeof(bytes);
    answer->chunk.number = number;
    answer->chunk.len_bytes = sizeof(bytes);
    answer->chunk.meta_data = &answer->meta_data;
    answer->chunk.publication = 5;
    answer->data_bytes = sizeof(bytes);
}

static void send_answer(struct answer *answer)
{
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    Chunk *chunks[1] = {&answer->chunk};
    frame.n_chunks = 1;
    frame.chunks = chunks;
    frame.data.data = bytes;
    frame.data.len = answer->data_bytes;
    say(&frame);
}

static void setup(void)
{
    cluster_init(&cluster, 2, "\"timeouts\": {\"reservation\": \"300ms\"}");
    worker = cluster_open(&cluster, 0);
    cq = cluster_cq();
    pattern_fill(bytes, sizeof(bytes), 1);
}

static void teardown(void)
{
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
}

/* The link still works. */
static void expect_good_transfer(void)
{
    struct answer answer;
    cluster_recv(worker, 1, "good", 0, cq);
    answer_init(&answer, hear_request());
    send_answer(&answer);
    struct tl_completion received = cluster_next(cq);
    ck_assert_msg(received.status.code == TL_OK, "%s", received.status.message);
    ck_assert(cluster_tensor_is(received.tensor, sizeof(bytes), 1));
    tl_tensor_put(received.tensor);
}

/* ------------------------------------------------------------------------------------------------ lying chunks -- */

static void no_meta_data(struct answer *answer)
{
    answer->chunk.meta_data = NULL;
}

static void no_dtype(struct answer *answer)
{
    answer->meta_data.dtype = TENSORLANE__V1__DTYPE__INVALID;
}

static void unknown_dtype(struct answer *answer)
{
    answer->meta_data.dtype = (Tensorlane__V1__DType)27;
}

static void negative_dtype(struct answer *answer)
{
    answer->meta_data.dtype = (Tensorlane__V1__DType)-1;
}

static void too_many_dims(struct answer *answer)
{
    answer->meta_data.n_dims = 17;
}

static void dims_that_overflow(struct answer *answer)
{
    answer->meta_data.n_dims = 3;
    answer->dims[0] = UINT64_C(1) << 32;
    answer->dims[1] = UINT64_C(1) << 32;
    answer->dims[2] = sizeof(bytes);
}

static void size_too_large(struct answer *answer)
{
    answer->meta_data.size_bytes++;
}

static void size_too_small(struct answer *answer)
{
    answer->meta_data.size_bytes--;
}

static void more_than_there_is_memory(struct answer *answer)
{
    answer->dims[0] = UINT64_C(1) << 61;
    answer->meta_data.size_bytes = UINT64_C(1) << 61;
}

static void dead_with_bytes(struct answer *answer)
{
    answer->meta_data.is_dead = 1;
}

static void no_publication(struct answer *answer)
{
    answer->chunk.publication = 0;
}

static void offset_in_the_first(struct answer *answer)
{
    answer->chunk.offset = 10;
}

static void more_bytes_than_announced(struct answer *answer)
{
    answer->dims[0] = 10;
    answer->meta_data.size_bytes = 10;
}

static void bytes_for_an_empty_tensor(struct answer *answer)
{
    answer->dims[0] = 0;
    answer->meta_data.size_bytes = 0;
}

static void no_checksum(struct answer *answer)
{
    answer->chunk.has_checksum = 0;
}

static void wrong_checksum(struct answer *answer)
{
    answer->chunk.has_checksum = 1;
    answer->chunk.checksum = XXH3_64bits(bytes, sizeof(bytes)) + 1;
}

static void strings_without_table(struct answer *answer)
{
    answer->meta_data.dtype = TENSORLANE__V1__DTYPE__STRING;
    answer->dims[0] = sizeof(bytes) / 8 + 1;
}

static void strings_that_do_not_add_up(struct answer *answer)
{
    answer->meta_data.dtype = TENSORLANE__V1__DTYPE__STRING;
    answer->dims[0] = 3;
    answer->chunk.has_checksum = 1;
    answer->chunk.checksum = XXH3_64bits(bytes, sizeof(bytes));
}

static void another_shape(struct answer *answer)
{
    answer->meta_data.n_dims = 2;
}

static const struct {
    void (*lie)(struct answer *answer);
    enum tl_status status;
    bool has_destination;
} lies[] = {
    {no_meta_data, TL_INVALID_ARGUMENT, false},
    {no_dtype, TL_INVALID_ARGUMENT, false},
    {unknown_dtype, TL_INVALID_ARGUMENT, false},
    {negative_dtype, TL_INVALID_ARGUMENT, false},
    {too_many_dims, TL_INVALID_ARGUMENT, false},
    {dims_that_overflow, TL_OUT_OF_RANGE, false},
    {size_too_large, TL_INVALID_ARGUMENT, false},
    {size_too_small, TL_INVALID_ARGUMENT, false},
    {more_than_there_is_memory, TL_RESOURCE_EXHAUSTED, false},
    {dead_with_bytes, TL_INVALID_ARGUMENT, false},
    {no_publication, TL_INVALID_ARGUMENT, false},
    {offset_in_the_first, TL_INVALID_ARGUMENT, false},
    {more_bytes_than_announced, TL_OUT_OF_RANGE, false},
    {bytes_for_an_empty_tensor, TL_OUT_OF_RANGE, false},
    {no_checksum, TL_DATA_LOSS, false},
    {wrong_checksum, TL_DATA_LOSS, false},
    {strings_without_table, TL_INVALID_ARGUMENT, false},
    {strings_that_do_not_add_up, TL_DATA_LOSS, false},
    {another_shape, TL_FAILED_PRECONDITION, true},
};

START_TEST(lie_ends_its_request_only)
{
    struct tl_tensor *destination = cluster_tensor(sizeof(bytes), 0);
    connect_as_peer();
    for (size_t i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        struct answer answer;
        const struct tl_recv_options options = {.size_bytes = sizeof(options),
                                                .wants_checksum = true,
                                                .destination = lies[i].has_destination ? destination : NULL};
        ck_assert_int_eq(
            tl_recv(worker, cluster_peer(worker, 1), "lie", i, &options, CLUSTER_LONG, cq, NULL, NULL, &error), TL_OK);
        uint64_t number = hear_request();
        answer_init(&answer, number);
        lies[i].lie(&answer);
        send_answer(&answer);
        struct tl_completion received = cluster_next(cq);
        ck_assert_msg(received.status.code == lies[i].status, "lie %zu: %s instead of %s: %s", i,
                      tl_status_name(received.status.code), tl_status_name(lies[i].status), received.status.message);
        ck_assert_ptr_nonnull(strstr(received.status.message, "lie"));
        hear_cancel(number);
        expect_good_transfer();
    }
    tl_tensor_put(destination);
    raw_call_close(&call);
}
END_TEST

/* Answers a request for 1,000 of 4,000 bytes. A checksum covers what has travelled. */
START_TEST(falsified_byte_of_a_part)
{
    const struct tl_byte_range ranges[] = {{3000, 600}, {0, 400}};
    const struct tl_part part = {.size_bytes = sizeof(part), .ranges = ranges, .range_count = 2};
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .wants_checksum = true, .part = &part};
    connect_as_peer();
    for (unsigned char is_falsified = 0; is_falsified < 2; is_falsified++) {
        struct answer answer;
        ck_assert_int_eq(
            tl_recv(worker, cluster_peer(worker, 1), "part", 0, &options, CLUSTER_LONG, cq, NULL, NULL, &error), TL_OK);
        answer_init(&answer, hear_request());
        answer.chunk.has_checksum = 1;
        answer.chunk.checksum = XXH3_64bits(bytes, sizeof(bytes));
        bytes[700] ^= is_falsified;
        send_answer(&answer);
        bytes[700] ^= is_falsified;
        struct tl_completion received = cluster_next(cq);
        ck_assert_msg(received.status.code == (is_falsified ? TL_DATA_LOSS : TL_OK), "%s", received.status.message);
        ck_assert(is_falsified || (received.is_verified && cluster_tensor_is(received.tensor, sizeof(bytes), 1)));
        tl_tensor_put(received.tensor);
    }
    expect_good_transfer();
    raw_call_close(&call);
}
END_TEST

/* Starts a receive and answers with the first half of a correct tensor. */
static uint64_t answer_half(struct answer *answer)
{
    cluster_recv(worker, 1, "half", 0, cq);
    uint64_t number = hear_request();
    answer_init(answer, number);
    answer->data_bytes = 500;
    answer->chunk.len_bytes = 500;
    send_answer(answer);
    answer->chunk.offset = 500;
    return number;
}

static void expect_refused(uint64_t number)
{
    cluster_expect(cq, TL_INVALID_ARGUMENT);
    hear_cancel(number);
    expect_good_transfer();
}

START_TEST(lie_in_the_middle)
{
    struct answer answer;
    connect_as_peer();
    const uint64_t wrong_offsets[] = {0, 499, 501, 1000, UINT64_MAX};
    for (unsigned i = 0; i < 5; i++) {
        uint64_t number = answer_half(&answer);
        answer.chunk.meta_data = NULL;
        answer.chunk.offset = wrong_offsets[i];
        send_answer(&answer);
        expect_refused(number);
    }
    uint64_t number = answer_half(&answer);
    answer.dims[1] = 1;
    answer.meta_data.n_dims = 2;
    send_answer(&answer);
    expect_refused(number);
    number = answer_half(&answer);
    answer.chunk.publication++;
    send_answer(&answer);
    expect_refused(number);
    raw_call_close(&call);
}
END_TEST

START_TEST(what_is_no_lie_is_taken)
{
    struct answer answer;
    connect_as_peer();
    /* Empty chunks, repeated meta-data, and a fresh start with another shape. */
    answer_half(&answer);
    answer.chunk.len_bytes = 0;
    answer.data_bytes = 0;
    send_answer(&answer);
    answer.chunk.meta_data = NULL;
    send_answer(&answer);
    answer_init(&answer, answer.chunk.number);
    answer.dims[0] = 500;
    answer.meta_data.size_bytes = 500;
    answer.chunk.len_bytes = 500;
    answer.data_bytes = 500;
    answer.chunk.publication = 6;
    answer.chunk.step = 9;
    send_answer(&answer);
    struct tl_completion received = cluster_next(cq);
    ck_assert_int_eq(received.status.code, TL_OK);
    ck_assert_uint_eq(received.step, 9);
    ck_assert(cluster_tensor_is(received.tensor, 500, 1));
    tl_tensor_put(received.tensor);
    /* Chunks for a request that is over, and for one that never was. */
    send_answer(&answer);
    answer.chunk.number = 999999;
    send_answer(&answer);
    answer.chunk.number = 0;
    send_answer(&answer);
    expect_good_transfer();
    ck_assert_uint_eq(cluster_stats(worker).protocol_errors, 0);
    raw_call_close(&call);
}
END_TEST

START_TEST(failures_are_passed_on)
{
    const struct {
        uint32_t code;
        enum tl_status status;
    } codes[] = {{TL_ABORTED, TL_ABORTED}, {TL_OK, TL_UNKNOWN}, {17, TL_UNKNOWN}, {UINT32_MAX, TL_UNKNOWN}};
    char message[3000];
    memset(message, 'm', sizeof(message));
    message[sizeof(message) - 1] = '\0';
    connect_as_peer();
    for (unsigned i = 0; i < 5; i++) {
        Frame frame = TENSORLANE__V1__FRAME__INIT;
        Tensorlane__V1__Failure failure = TENSORLANE__V1__FAILURE__INIT;
        Tensorlane__V1__Failure *failures[1] = {&failure};
        Tensorlane__V1__Status status = TENSORLANE__V1__STATUS__INIT;
        cluster_recv(worker, 1, "fails", i, cq);
        failure.number = hear_request();
        failure.status = i < 4 ? &status : NULL;
        status.code = i < 4 ? codes[i].code : 0;
        status.message = message;
        frame.n_failures = 1;
        frame.failures = failures;
        say(&frame);
        struct tl_completion received = cluster_expect(cq, i < 4 ? codes[i].status : TL_UNKNOWN);
        ck_assert_str_ne(received.status.message, "");
        say(&frame); /* The second time it means nothing. */
    }
    expect_good_transfer();
    raw_call_close(&call);
}
END_TEST

/* ----------------------------------------------------------------------------------------------- broken frames -- */

/* A length-delimited field, for messages that the library would not write. */
static size_t put_field(unsigned char *to, unsigned char tag, const void *data, size_t len_bytes)
{
    size_t used = 0;
    to[used++] = tag;
    for (size_t left = len_bytes; used == 1 || left > 0; left >>= 7)
        to[used++] = (unsigned char)((left & 0x7f) | (left > 0x7f ? 0x80 : 0));
    memcpy(to + used, data, len_bytes);
    return used + len_bytes;
}

static size_t garbage(unsigned char *to)
{
    memset(to, 0xff, 100);
    return 100;
}

static size_t no_field(unsigned char *to)
{
    memset(to, 0, 10);
    return 10;
}

static size_t truncated(unsigned char *to)
{
    return put_field(to, 0x12, "\x08\x01\x12\x01k", 5) - 1;
}

static size_t data_not_last(unsigned char *to)
{
    size_t used = put_field(to, 0x7a, "data", 4);
    return used + put_field(to + used, 0x12, "\x08\x01\x12\x01k", 5);
}

static size_t longer_data_than_there_is(unsigned char *to)
{
    size_t used = put_field(to, 0x7a, "data", 4);
    to[1] = 5;
    return used;
}

static size_t key_with_nul(unsigned char *to)
{
    return put_field(to, 0x12, "\x08\x01\x12\x03k\0k", 7);
}

static size_t key_not_utf8(unsigned char *to)
{
    return put_field(to, 0x12, "\x08\x01\x12\x02k\xff", 6);
}

static size_t head_too_long(unsigned char *to)
{
    static unsigned char unknown[300 * 1024];
    return put_field(to, 0x62, unknown, sizeof(unknown));
}

static size_t too_many_numbers(unsigned char *to)
{
    static unsigned char numbers[250 * 1024];
    memset(numbers, 1, sizeof(numbers));
    return put_field(to, 0x1a, numbers, sizeof(numbers));
}

static size_t second_hello(unsigned char *to)
{
    return put_field(to, 0x0a, "\x08\x01", 2);
}

static size_t bytes_of_no_chunk(unsigned char *to)
{
    return put_field(to, 0x7a, "data", 4);
}

static size_t longer_chunk_than_there_is(unsigned char *to)
{
    return put_field(to, 0x32, "\x08\x01\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 13);
}

static size_t request_number_0(unsigned char *to)
{
    return put_field(to, 0x12, "\x12\x01k", 3);
}

static size_t request_number_twice(unsigned char *to)
{
    size_t used = put_field(to, 0x12, "\x08\x01\x12\x01k", 5);
    return used + put_field(to + used, 0x12, "\x08\x01\x12\x01k", 5);
}

static size_t request_without_key(unsigned char *to)
{
    return put_field(to, 0x12, "\x08\x01", 2);
}

static size_t taken_what_was_not_sent(unsigned char *to)
{
    memcpy(to, "\x48\x01", 2);
    return 2;
}

static size_t (*const broken_frames[])(unsigned char *to) = {
    garbage,
    no_field,
    truncated,
    data_not_last,
    key_with_nul,
    longer_data_than_there_is,
    key_not_utf8,
    head_too_long,
    second_hello,
    bytes_of_no_chunk,
    longer_chunk_than_there_is,
    request_number_0,
    request_number_twice,
    request_without_key,
    taken_what_was_not_sent,
};

static void expect_served(void)
{
    struct tl_worker *client = cluster_open_client(&cluster);
    struct tl_tensor *tensor = cluster_tensor(100, 4);
    cluster_publish(worker, "served", 0, tensor);
    tl_tensor_put(tensor);
    tensor = cluster_recv_wait(client, 0, "served", 0);
    ck_assert(cluster_tensor_is(tensor, 100, 4));
    tl_tensor_put(tensor);
    tl_worker_close(client, 0);
}

START_TEST(broken_frame_ends_the_link)
{
    unsigned char *frame = malloc(400 * 1024);
    for (size_t i = 0; i < sizeof(broken_frames) / sizeof(broken_frames[0]); i++) {
        connect_as_peer();
        tl_op_id op = cluster_recv(worker, 1, "k", i, cq);
        (void)hear_request();
        raw_call_send(&call, frame, broken_frames[i](frame));
        const struct tl_error *status = raw_call_finish(&call);
        ck_assert_msg(status->code == TL_INVALID_ARGUMENT, "frame %zu: %s: %s", i, tl_status_name(status->code),
                      status->message);
        raw_call_close(&call);
        ck_assert_uint_eq(cluster_stats(worker).protocol_errors, i + 1);
        ck_assert(cluster_is_quiet(cq));
        ck_assert_int_eq(tl_cancel(worker, op), TL_OK);
        cluster_expect(cq, TL_CANCELLED);
        CLUSTER_UNTIL(cluster_stats(worker).waiting_receivers == 0);
    }
    free(frame);
    expect_served();
}
END_TEST

static void break_the_link(size_t (*broken_frame)(unsigned char *to))
{
    unsigned char frame[100];
    connect_as_peer();
    raw_call_send(&call, frame, broken_frame(frame));
    ck_assert_int_eq(raw_call_finish(&call)->code, TL_INVALID_ARGUMENT);
    raw_call_close(&call);
}

/* A peer that opens a link again and again, and breaks the protocol each time, does not fill the log. */
START_TEST(same_reason_is_logged_once)
{
    log_capture_begin();
    tl_log_configure(TL_LOG_WARN, TL_LOG_KEY_VALUE);
    for (unsigned i = 0; i < 5; i++)
        break_the_link(bytes_of_no_chunk);
    ck_assert_uint_eq(log_capture_count("link ended"), 1);
    break_the_link(taken_what_was_not_sent);
    ck_assert_uint_eq(log_capture_count("link ended"), 2);
    ck_assert_uint_eq(log_capture_count("others=4"), 1);
    ck_assert_uint_eq(cluster_stats(worker).protocol_errors, 6);
}
END_TEST

/* The receiver of a request whose link was ended asks again on the next link, with the same number. */
START_TEST(broken_frame_does_not_end_the_request)
{
    connect_as_peer();
    cluster_recv(worker, 1, "k", 0, cq);
    uint64_t number = hear_request();
    raw_call_send(&call, "\xff\xff\xff", 3);
    raw_call_close(&call);
    connect_as_peer();
    struct answer answer;
    ck_assert_uint_eq(hear_request(), number);
    answer_init(&answer, number);
    send_answer(&answer);
    cluster_expect(cq, TL_OK);
    raw_call_close(&call);
}
END_TEST

START_TEST(numbers_that_mean_nothing_are_ignored)
{
    unsigned char *frame = malloc(400 * 1024);
    connect_as_peer();
    raw_call_send(&call, frame, too_many_numbers(frame)); /* There are 256,000 cancels. */
    frame[0] = 0x22;                                      /* There are as many acknowledgements. */
    raw_call_send(&call, frame, too_many_numbers(frame));
    free(frame);
    expect_good_transfer();
    raw_call_close(&call);
}
END_TEST

/* ----------------------------------------------------------------------------- the first frame, peer time-out -- */

static void expect_hello_refused(const Tensorlane__V1__Hello *hello, enum tl_status expected, const char *text)
{
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    frame.hello = (Tensorlane__V1__Hello *)hello;
    dial();
    say(&frame);
    const struct tl_error *status = raw_call_finish(&call);
    ck_assert_msg(status->code == expected && strstr(status->message, text) != NULL, "%s: %s",
                  tl_status_name(status->code), status->message);
    raw_call_close(&call);
}

START_TEST(hello_that_does_not_fit_is_refused)
{
    char long_name[400];
    memset(long_name, 'n', sizeof(long_name));
    long_name[sizeof(long_name) - 1] = '\0';
    Tensorlane__V1__Hello hello = TENSORLANE__V1__HELLO__INIT;
    hello.protocol_version = 1;
    hello.incarnation = INCARNATION;
    hello.name = "/job:node/task:1";
    Tensorlane__V1__Hello other = hello;
    other.protocol_version = 2;
    expect_hello_refused(&other, TL_FAILED_PRECONDITION, "protocol version 2");
    other.protocol_version = 0;
    expect_hello_refused(&other, TL_FAILED_PRECONDITION, "protocol version 0");
    other = hello;
    other.incarnation = 0;
    expect_hello_refused(&other, TL_FAILED_PRECONDITION, "incarnation");
    other = hello;
    other.expected_name = "/job:node/task:7";
    expect_hello_refused(&other, TL_FAILED_PRECONDITION, "/job:node/task:7");
    other = hello;
    other.name = long_name;
    expect_hello_refused(&other, TL_INVALID_ARGUMENT, "name");
    other = hello;
    other.name = "/job:node/task:0";
    expect_hello_refused(&other, TL_FAILED_PRECONDITION, "twice");
    dial();
    raw_call_send(&call, "\x12\x05\x08\x01\x12\x01k", 7);
    ck_assert_int_eq(raw_call_finish(&call)->code, TL_INVALID_ARGUMENT);
    raw_call_close(&call);
    dial();
    raw_call_send(&call, "", 0);
    ck_assert_int_eq(raw_call_finish(&call)->code, TL_INVALID_ARGUMENT);
    raw_call_close(&call);
    ck_assert_uint_eq(cluster_peer_info(worker, 1).incarnation, 0);
    expect_served();
}
END_TEST

START_TEST(peer_that_disappears_leaves_nothing)
{
    for (unsigned i = 0; i < 30; i++) {
        struct answer answer;
        connect_as_peer();
        uint64_t number = answer_half(&answer);
        /* The peer sends a request, too. */
        raw_call_send(&call, "\x12\x05\x08\x01\x12\x01k", 7);
        CLUSTER_UNTIL(cluster_stats(worker).waiting_receivers == 1);
        raw_call_close(&call);
        CLUSTER_UNTIL(cluster_stats(worker).waiting_receivers == 0);
        connect_as_peer();
        ck_assert_uint_eq(hear_request(), number);
        send_answer(&answer);
        cluster_expect(cq, TL_OK);
        raw_call_close(&call);
    }
}
END_TEST

/* ----------------------------------------------------------------------------------------------- does not read -- */

START_TEST(peer_that_asks_and_does_not_read_stays_bounded)
{
    static unsigned char frame[64 * 1024];
    struct tl_tensor *tensor = cluster_tensor(10000, 1);
    cluster_publish(worker, "p", 0, tensor);
    tl_tensor_put(tensor);
    connect_as_peer();
    for (unsigned number = 1; number <= 100000;) {
        size_t used = 0;
        for (unsigned i = 0; i < 1000; i++, number++) {
            unsigned char request[16] = {0x08,
                                         (unsigned char)(number | 0x80),
                                         (unsigned char)(number >> 7 | 0x80),
                                         (unsigned char)(number >> 14),
                                         0x12,
                                         1,
                                         'p'};
            used += put_field(frame + used, 0x12, request, 7);
        }
        raw_call_send(&call, frame, used);
    }
    expect_served();
    /* It was read no further than there was space for. */
    struct tl_worker_stats stats = cluster_stats(worker);
    ck_assert_uint_lt(stats.frames_received, 60);
    ck_assert_uint_lt(stats.bytes_sent, 100 << 20);
    raw_call_close(&call);
    expect_served();
}
END_TEST

/* What was reserved for it goes to others although it still does not read. */
START_TEST(peer_that_breaks_the_protocol_and_does_not_read_holds_nothing)
{
    struct tl_tensor *tensor = cluster_tensor(32 << 20, 1);
    cluster_send(worker, "p", 0, tensor, cq);
    tl_tensor_put(tensor);
    connect_as_peer();
    raw_call_send(&call, "\x12\x05\x08\x01\x12\x01p", 7);
    CLUSTER_UNTIL(cluster_stats(worker).bytes_sent > 0);
    raw_call_send(&call, "\xff\xff\xff", 3);
    struct tl_worker *client = cluster_open_client(&cluster);
    tensor = cluster_recv_wait(client, 0, "p", 0);
    ck_assert(cluster_tensor_is(tensor, 32 << 20, 1));
    tl_tensor_put(tensor);
    cluster_expect(cq, TL_OK); /* a client that closes at once may not say that it has received the value */
    tl_worker_close(client, 0);
    raw_call_close(&call);
}
END_TEST

/* Two workers that each ask for more than the other can send at once: one of them goes on reading. */
START_TEST(workers_that_ask_much_of_each_other_get_it)
{
    struct cluster pair;
    cluster_init(&pair, 2, NULL);
    cluster_open_all(&pair);
    struct tl_tensor *tensor = cluster_tensor(2000, 1);
    for (unsigned i = 0; i < 2; i++)
        cluster_publish(pair.workers[i], "p", 0, tensor);
    tl_tensor_put(tensor);
    ck_assert_int_eq(tl_worker_wait_for_peers(pair.workers[0], NULL, 0, 0, CLUSTER_LONG, &error), TL_OK);
    for (unsigned i = 0; i < 100000; i++)
        cluster_recv(pair.workers[i % 2], 1 - i % 2, "p", 0, cq);
    for (unsigned i = 0; i < 100000; i++)
        cluster_expect(cq, TL_OK);
    cluster_close_all(&pair);
}
END_TEST

/* A peer that announces a value twice, the second time as one that cannot lie on the device. */
START_TEST(begins_twice_on_a_device)
{
    const struct tl_recv_options wanted = {.size_bytes = sizeof(wanted), .device = gpu0};
    setup_cuda();
    connect_as_peer();
    enum tl_status status =
        tl_recv(worker, cluster_peer(worker, 1), "lie", 0, &wanted, CLUSTER_LONG, cq, NULL, NULL, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    uint64_t number = hear_request();
    struct answer first, second;
    answer_init(&first, number);
    first.chunk.len_bytes = 0;
    answer_init(&second, number);
    second.meta_data.dtype = TENSORLANE__V1__DTYPE__STRING;
    second.dims[0] = 3;
    Chunk *chunks[2] = {&first.chunk, &second.chunk};
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    frame.n_chunks = 2;
    frame.chunks = chunks;
    frame.data.data = bytes;
    frame.data.len = sizeof(bytes);
    say(&frame);
    struct tl_completion received = cluster_next(cq);
    ck_assert_int_eq(received.status.code, TL_INVALID_ARGUMENT);
    ck_assert_msg(strstr(received.status.message, "twice") != NULL, "%s", received.status.message);
    raw_call_close(&call);
}
END_TEST

/* Asks for "x" from this byte of this value on, and returns the checksum of the whole. */
static uint64_t ask_for_checksum(uint64_t number, uint64_t *publication, uint64_t resume_offset)
{
    Tensorlane__V1__Request request = TENSORLANE__V1__REQUEST__INIT, *requests[1] = {&request};
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    request.number = number;
    request.key = (char *)"x";
    request.wants_checksum = 1;
    request.publication = *publication;
    request.resume_offset = resume_offset;
    frame.n_requests = 1;
    frame.requests = requests;
    say(&frame);
    for (;;) {
        Frame *answer = hear();
        ck_assert_ptr_nonnull(answer);
        for (size_t i = 0; i < answer->n_chunks; i++) {
            if (!answer->chunks[i]->has_checksum) continue;
            uint64_t checksum = answer->chunks[i]->checksum;
            if (answer->chunks[i]->publication != 0) *publication = answer->chunks[i]->publication;
            forget(answer);
            return checksum;
        }
        forget(answer);
    }
}

/* A receiver that has all bytes, and has only lost the connection, gets the checksum of all. */
START_TEST(resumed_behind_the_last_byte)
{
    uint64_t publication = 0;
    setup_cuda();
    struct tl_tensor *tensor = bytes_on(_i == 0 ? host : gpu0, 1000);
    fill(tensor, 3);
    cluster_publish(worker, "x", 0, tensor);
    tl_tensor_put(tensor);
    connect_as_peer();
    uint64_t checksum = ask_for_checksum(10, &publication, 0);
    for (uint64_t offset = 0; offset <= 1000; offset += 500)
        ck_assert_uint_eq(ask_for_checksum(11 + offset, &publication, offset), checksum);
    raw_call_close(&call);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("link_protocol");
    TCase *peer = tcase_create("peer");
    tcase_add_checked_fixture(peer, setup, teardown);
    tcase_add_test(peer, lie_ends_its_request_only);
    tcase_add_test(peer, falsified_byte_of_a_part);
    tcase_add_test(peer, lie_in_the_middle);
    tcase_add_test(peer, what_is_no_lie_is_taken);
    tcase_add_test(peer, failures_are_passed_on);
    tcase_add_test(peer, broken_frame_ends_the_link);
    tcase_add_test(peer, same_reason_is_logged_once);
    tcase_add_test(peer, broken_frame_does_not_end_the_request);
    tcase_add_test(peer, numbers_that_mean_nothing_are_ignored);
    tcase_add_test(peer, hello_that_does_not_fit_is_refused);
    tcase_add_test(peer, peer_that_disappears_leaves_nothing);
    tcase_add_test(peer, peer_that_asks_and_does_not_read_stays_bounded);
    tcase_add_test(peer, peer_that_breaks_the_protocol_and_does_not_read_holds_nothing);
    tcase_add_test(peer, workers_that_ask_much_of_each_other_get_it);
    tcase_add_test(peer, begins_twice_on_a_device);
    tcase_add_loop_test(peer, resumed_behind_the_last_byte, 0, 2);
    suite_add_tcase(suite, peer);
    return run_suite_in_process(suite);
}
