// SPDX-License-Identifier: Apache-2.0
/* Receive and Publish of clients that have no link, over a real connection, with good and bad messages. */
#include <check.h>
#include <grpc/compression.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/clock.h"
#include "base/error.h"
#include "control/credentials.h"
#include "fakes/fake_worker.h"
#include "fakes/raw_call.h"
#include "fakes/run_suite.h"
#include "tensorlane/v1/transfer.pb-c.h"

#define RECEIVE "/tensorlane.v1.Transfer/Receive"
#define PUBLISH "/tensorlane.v1.Transfer/Publish"

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

static bool is_received(const struct fake_seen *seen)
{
    return seen->ended[TL_SERVE_RECEIVED] == 1;
}

static bool is_cancelled(const struct fake_seen *seen)
{
    return seen->ended[TL_SERVE_CANCELLED] == 1;
}

static bool is_requested(const struct fake_seen *seen)
{
    return seen->requests == 1;
}

static bool two_are_requested(const struct fake_seen *seen)
{
    return seen->requests >= 2;
}

static bool are_requested(const struct fake_seen *seen)
{
    return seen->requests >= 3;
}

static bool three_are_received(const struct fake_seen *seen)
{
    return seen->ended[TL_SERVE_RECEIVED] == 3;
}

static bool five_are_received(const struct fake_seen *seen)
{
    return seen->ended[TL_SERVE_RECEIVED] == 5;
}

static bool are_cancelled(const struct fake_seen *seen)
{
    return seen->ended[TL_SERVE_CANCELLED] >= 3;
}

static bool is_broken_off(const struct fake_seen *seen)
{
    return seen->broken_off == 1;
}

static bool is_admitted(const struct fake_seen *seen)
{
    return seen->admitted == 1;
}

static void fill(unsigned char *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        bytes[i] = (unsigned char)(i * 7 + i / 256);
}

static struct tl_tensor *make_tensor(uint64_t size_bytes)
{
    struct tl_tensor *tensor;
    struct tl_error error;
    ck_assert_msg(tl_tensor_create(TL_U8, 1, &size_bytes, &tensor, &error) == TL_OK, "%s", error.message);
    if (size_bytes > 0) fill(tl_tensor_data(tensor), size_bytes);
    return tensor;
}

/* ----------------------------------------------------------------------------------------------------- Receive -- */

static void ask_with(struct raw_call *receive, const char *key, uint64_t step, bool wants_checksum)
{
    Tensorlane__V1__ReceiveRequest request = TENSORLANE__V1__RECEIVE_REQUEST__INIT;
    request.key = (char *)key;
    request.step = step;
    request.wants_checksum = wants_checksum;
    raw_call_open(receive, worker.address, RECEIVE, TL_TIME_NEVER);
    raw_call_send_message(receive, &request.base);
    raw_call_half_close(receive);
}

static void ask(const char *key, uint64_t step, bool wants_checksum)
{
    ask_with(&call, key, step, wants_checksum);
}

static Tensorlane__V1__ReceiveResponse *next_piece(void)
{
    return raw_call_receive_message(&call, &tensorlane__v1__receive_response__descriptor);
}

static void drop_piece(Tensorlane__V1__ReceiveResponse *piece)
{
    tensorlane__v1__receive_response__free_unpacked(piece, NULL);
}

/* Receives a tensor of 2500 bytes in pieces of 1024. */
static void receive_pieces(bool wants_checksum)
{
    unsigned char expected[2500];
    fill(expected, sizeof(expected));
    ask("weights", 4, wants_checksum);
    size_t offset = 0;
    for (unsigned i = 0; i < 3; i++) {
        Tensorlane__V1__ReceiveResponse *piece = next_piece();
        ck_assert_ptr_nonnull(piece);
        ck_assert_uint_eq(piece->offset, offset);
        ck_assert_uint_eq(piece->data.len, i < 2 ? 1024 : 452);
        ck_assert_mem_eq(piece->data.data, expected + offset, piece->data.len);
        ck_assert_int_eq(piece->meta_data != NULL, i == 0);
        ck_assert_uint_eq(piece->step, i == 0 ? 9 : 0);
        if (i == 0) {
            ck_assert_int_eq(piece->meta_data->dtype, TENSORLANE__V1__DTYPE__U8);
            ck_assert_uint_eq(piece->meta_data->n_dims, 1);
            ck_assert_uint_eq(piece->meta_data->dims[0], 2500);
            ck_assert_uint_eq(piece->meta_data->size_bytes, 2500);
        }
        ck_assert_int_eq(piece->has_checksum != 0, i == 2 && wants_checksum);
        if (piece->has_checksum) ck_assert_uint_eq(piece->checksum, XXH3_64bits(expected, sizeof(expected)));
        offset += piece->data.len;
        drop_piece(piece);
    }
    ck_assert_ptr_null(next_piece());
    ck_assert_int_eq(raw_call_finish(&call)->code, TL_OK);
    raw_call_close(&call);
}

START_TEST(receive_sends_pieces_with_checksum)
{
    fake_worker_offer(&worker, "weights", make_tensor(2500));
    fake_worker_start(&worker);
    receive_pieces(true);
    fake_worker_wait(&worker, is_received);
    struct fake_seen seen = fake_worker_seen(&worker);
    ck_assert_uint_eq(seen.step, 4);
    ck_assert(seen.is_client_known);
    ck_assert_uint_eq(seen.requests, 1);
}
END_TEST

START_TEST(receive_sends_pieces_when_answered_later)
{
    worker.script.replies_later = true;
    fake_worker_offer(&worker, "weights", make_tensor(2500));
    fake_worker_start(&worker);
    receive_pieces(false);
    fake_worker_wait(&worker, is_received);
}
END_TEST

START_TEST(receive_ids_never_repeat)
{
    fake_worker_offer(&worker, "weights", make_tensor(2500));
    fake_worker_start(&worker);
    receive_pieces(false);
    receive_pieces(false);
    struct fake_seen seen = fake_worker_seen(&worker);
    ck_assert_uint_eq(seen.requests, 2);
    ck_assert_uint_ne(seen.ids[0].incarnation, 0);
    ck_assert_uint_eq(seen.ids[0].incarnation, seen.ids[1].incarnation);
    ck_assert_uint_eq(seen.ids[0].number, 1);
    ck_assert_uint_eq(seen.ids[1].number, 2);
}
END_TEST

static void get_stats(struct fake_worker *fake, void *context)
{
    tl_control_get_stats(fake->control, context);
}

START_TEST(receive_and_publish_are_counted)
{
    fake_worker_offer(&worker, "weights", make_tensor(2500));
    fake_worker_start(&worker);
    receive_pieces(false);
    struct tl_control_stats stats;
    fake_worker_run(&worker, get_stats, &stats);
    ck_assert_uint_eq(stats.tensors_sent, 1);
    ck_assert_uint_eq(stats.bytes_sent, 2500);
    ck_assert_uint_eq(stats.bytes_copied_send, 0);
}
END_TEST

/* The only message describes the tensor and has no bytes. */
static void expect_single(const char *key, bool is_dead)
{
    ask(key, 0, true);
    Tensorlane__V1__ReceiveResponse *piece = next_piece();
    ck_assert_ptr_nonnull(piece);
    ck_assert_ptr_nonnull(piece->meta_data);
    ck_assert_int_eq(piece->meta_data->is_dead != 0, is_dead);
    ck_assert_uint_eq(piece->data.len, 0);
    ck_assert(piece->has_checksum);
    ck_assert_uint_eq(piece->checksum, XXH3_64bits(NULL, 0));
    drop_piece(piece);
    ck_assert_ptr_null(next_piece());
    ck_assert_int_eq(raw_call_finish(&call)->code, TL_OK);
    raw_call_close(&call);
}

START_TEST(receive_of_no_bytes_is_one_message)
{
    struct tl_tensor *dead;
    ck_assert(tl_tensor_create_dead(&dead, NULL) == TL_OK);
    fake_worker_offer(&worker, "dead", dead);
    fake_worker_offer(&worker, "empty", make_tensor(0));
    fake_worker_start(&worker);
    expect_single("dead", true);
    expect_single("empty", false);
}
END_TEST

START_TEST(receive_passes_the_status_on)
{
    fake_worker_start(&worker);
    ask("refused", 12, false);
    ck_assert_ptr_null(next_piece());
    const struct tl_error *status = raw_call_finish(&call);
    ck_assert_int_eq(status->code, TL_ABORTED);
    ck_assert_str_eq(status->message, "refused: step 12 was aborted");
    raw_call_close(&call);
    fake_worker_wait(&worker, is_received);
}
END_TEST

/* Sends these bytes as the only message and expects the status. */
static void expect_refused(const char *method, const void *bytes, size_t len_bytes, enum tl_status code,
                           const char *words)
{
    raw_call_open(&call, worker.address, method, TL_TIME_NEVER);
    raw_call_send(&call, bytes, len_bytes);
    raw_call_half_close(&call);
    const struct tl_error *status = raw_call_finish(&call);
    ck_assert_msg(status->code == code, "%s instead of %s: %s", tl_status_name(status->code), tl_status_name(code),
                  status->message);
    ck_assert_msg(strstr(status->message, words) != NULL, "\"%s\" lacks \"%s\"", status->message, words);
    raw_call_close(&call);
}

START_TEST(receive_refuses_bad_requests)
{
    fake_worker_start(&worker);
    expect_refused(RECEIVE, "", 0, TL_INVALID_ARGUMENT, "key");
    expect_refused(RECEIVE, "\x0a\xff\xff", 3, TL_INVALID_ARGUMENT, "");
    expect_refused(RECEIVE, "\x0a\x02\xc3\x28", 4, TL_INVALID_ARGUMENT, "UTF-8");
    expect_refused(RECEIVE,
                   "\x0a\x02"
                   "a\0",
                   4, TL_INVALID_ARGUMENT, "NUL");
    expect_refused(RECEIVE, "\x0b", 1, TL_INVALID_ARGUMENT, "");
    static unsigned char request[70000];
    memset(request, 'k', sizeof(request));
    memcpy(request, "\x0a\x81\x04", 3);
    expect_refused(RECEIVE, request, 3 + 513, TL_INVALID_ARGUMENT, "at most 512");
    memcpy(request, "\x0a\xec\xa2\x04", 4);
    expect_refused(RECEIVE, request, 4 + 70000 - 4, TL_INVALID_ARGUMENT, "at most 65536");
    ck_assert_uint_eq(fake_worker_seen(&worker).requests, 0);
}
END_TEST

START_TEST(receive_takes_the_longest_key)
{
    fake_worker_start(&worker);
    char key[513];
    memset(key, 'k', 512);
    key[512] = '\0';
    ask(key, 0, false);
    fake_worker_wait(&worker, is_requested);
    raw_call_close(&call);
    fake_worker_wait(&worker, is_cancelled);
}
END_TEST

START_TEST(receive_wants_exactly_one_message)
{
    fake_worker_start(&worker);
    raw_call_open(&call, worker.address, RECEIVE, TL_TIME_NEVER);
    raw_call_half_close(&call);
    const struct tl_error *status = raw_call_finish(&call);
    ck_assert_int_eq(status->code, TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(status->message, "no message"));
    raw_call_close(&call);

    Tensorlane__V1__ReceiveRequest request = TENSORLANE__V1__RECEIVE_REQUEST__INIT;
    request.key = (char *)"k";
    raw_call_open(&call, worker.address, RECEIVE, TL_TIME_NEVER);
    raw_call_send_message(&call, &request.base);
    raw_call_send_message(&call, &request.base);
    status = raw_call_finish(&call);
    ck_assert_int_eq(status->code, TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(status->message, "second message"));
    raw_call_close(&call);
    ck_assert_uint_eq(fake_worker_seen(&worker).requests, 0);
}
END_TEST

START_TEST(receive_cancelled_while_it_waits)
{
    fake_worker_start(&worker);
    ask("nothing", 0, false);
    fake_worker_wait(&worker, is_requested);
    ck_assert_uint_eq(fake_worker_seen(&worker).ended[TL_SERVE_CANCELLED], 0);
    raw_call_close(&call);
    fake_worker_wait(&worker, is_cancelled);
}
END_TEST

START_TEST(receive_deadline_of_the_client)
{
    fake_worker_start(&worker);
    Tensorlane__V1__ReceiveRequest request = TENSORLANE__V1__RECEIVE_REQUEST__INIT;
    request.key = (char *)"nothing";
    raw_call_open(&call, worker.address, RECEIVE, 300 * TL_NS_PER_MS);
    raw_call_send_message(&call, &request.base);
    raw_call_half_close(&call);
    ck_assert_int_eq(raw_call_finish(&call)->code, TL_DEADLINE_EXCEEDED);
    raw_call_close(&call);
    fake_worker_wait(&worker, is_cancelled);
}
END_TEST

#define BIG_BYTES (UINT64_C(64) << 20)

START_TEST(receive_cancelled_in_the_middle)
{
    worker.script.chunk_bytes = 1 << 20;
    fake_worker_offer(&worker, "big", make_tensor(BIG_BYTES));
    fake_worker_start(&worker);
    ask("big", 0, true);
    for (unsigned i = 0; i < 2; i++) {
        Tensorlane__V1__ReceiveResponse *piece = next_piece();
        ck_assert_ptr_nonnull(piece);
        drop_piece(piece);
    }
    raw_call_close(&call);
    fake_worker_wait(&worker, is_cancelled);
    ck_assert_uint_eq(fake_worker_seen(&worker).ended[TL_SERVE_RECEIVED], 0);
}
END_TEST

START_TEST(receive_of_a_client_that_does_not_read)
{
    worker.script.chunk_bytes = 1 << 20;
    worker.script.request_timeout_ns = 5 * TL_NS_PER_SEC;
    fake_worker_offer(&worker, "big", make_tensor(BIG_BYTES));
    fake_worker_start(&worker);
    ask("big", 0, false);
    /* The connection is alive, but no message is taken off it. */
    while (call.stream != NULL && fake_worker_seen(&worker).ended[TL_SERVE_CANCELLED] == 0)
        (void)tl_loop_run_once(call.loop, tl_clock_deadline_ns(TL_NS_PER_MS));
    const struct tl_error *status = raw_call_finish(&call);
    ck_assert_msg(status->code == TL_DEADLINE_EXCEEDED, "%s: %s", tl_status_name(status->code), status->message);
    ck_assert_ptr_nonnull(strstr(status->message, "no progress"));
    raw_call_close(&call);
    fake_worker_wait(&worker, is_cancelled);
}
END_TEST

/* The calls of one client hold two values of any size, here of more than the bound of 1 MiB together. No window of a
 * stream is as large: threads of the current core take messages that their program has not asked for. */
#define INFLIGHT_BYTES (64 << 10)
#define HALF_BYTES (UINT64_C(80) << 20)

static void start_with_values(void)
{
    worker.script.chunk_bytes = 64 << 10;
    worker.script.inflight_bytes = INFLIGHT_BYTES;
    fake_worker_offer(&worker, "half", make_tensor(HALF_BYTES));
    fake_worker_offer(&worker, "small", make_tensor(100));
    fake_worker_offer(&worker, "empty", make_tensor(0));
    fake_worker_offer(&worker, "once", make_tensor(HALF_BYTES));
    worker.script.offers[3].offer.is_one_shot = true;
    fake_worker_start(&worker);
}

static void finish_well(struct raw_call *receive)
{
    const struct tl_error *status = raw_call_finish(receive);
    ck_assert_msg(status->code == TL_OK, "%s: %s", tl_status_name(status->code), status->message);
    raw_call_close(receive);
}

static bool has_asked_again(const struct fake_seen *seen)
{
    return seen->requests == 4 && seen->ended[TL_SERVE_CANCELLED] == 1;
}

/* Asks for two halves, then for the key. Each call has a connection, so the order is only sure if each is waited for.
 */
static void ask_beyond(struct raw_call calls[3], const char *key)
{
    start_with_values();
    ask_with(&calls[0], "half", 0, false);
    fake_worker_wait(&worker, is_requested);
    ask_with(&calls[1], "half", 0, false);
    fake_worker_wait(&worker, two_are_requested);
    ask_with(&calls[2], key, 0, false);
    fake_worker_wait(&worker, are_requested);
}

START_TEST(receives_beyond_what_their_client_may_hold_ask_again)
{
    struct raw_call calls[3];
    ask_beyond(calls, "half");
    finish_well(&calls[0]);
    fake_worker_wait(&worker, has_asked_again); /* the third one, which had let its value go */
    finish_well(&calls[2]);
    finish_well(&calls[1]);
    fake_worker_wait(&worker, three_are_received);
    ck_assert_uint_eq(fake_worker_seen(&worker).requests, 4);
}
END_TEST

/* Values without bytes need no space, and one-shot values are reserved for their call. */
START_TEST(receives_that_are_answered_in_any_case)
{
    struct raw_call calls[4];
    ask_beyond(calls, "small");
    ask_with(&calls[3], "once", 0, false);
    finish_well(&calls[3]);
    raw_call_close(&calls[2]); /* it waits, and is given up */
    ask("empty", 0, false);
    finish_well(&call);
    finish_well(&calls[0]);
    ask("small", 0, false);
    finish_well(&call);
    finish_well(&calls[1]);
    fake_worker_wait(&worker, five_are_received);
}
END_TEST

START_TEST(stop_ends_receives_that_wait_for_others)
{
    struct raw_call calls[3];
    ask_beyond(calls, "half");
    for (unsigned i = 0; i < 3; i++)
        raw_call_close(&calls[i]);
    fake_worker_wait(&worker, are_cancelled);
}
END_TEST

/* Passes so many checks, then fails. */
static enum tl_status failing_guard(void *context, const void *data, uint64_t len_bytes, struct tl_error *ret_error)
{
    int *left = context;
    (void)data;
    (void)len_bytes;
    if ((*left)-- > 0) return TL_OK;
    return tl_error_set(ret_error, TL_DATA_LOSS, "weights: the file was truncated");
}

static void expect_guarded(int passing_checks, unsigned pieces)
{
    static int left;
    left = passing_checks;
    struct tl_tensor *tensor = make_tensor(2500);
    tl_tensor_set_guard(tensor, failing_guard, &left);
    fake_worker_offer(&worker, "weights", tensor);
    fake_worker_start(&worker);
    ask("weights", 0, true);
    for (unsigned i = 0; i < pieces; i++) {
        Tensorlane__V1__ReceiveResponse *piece = next_piece();
        ck_assert_ptr_nonnull(piece);
        drop_piece(piece);
    }
    ck_assert_ptr_null(next_piece());
    const struct tl_error *status = raw_call_finish(&call);
    ck_assert_int_eq(status->code, TL_DATA_LOSS);
    ck_assert_str_eq(status->message, "weights: the file was truncated");
    raw_call_close(&call);
    fake_worker_wait(&worker, is_cancelled);
}

START_TEST(receive_unreadable_from_the_start)
{
    expect_guarded(0, 0);
}
END_TEST

START_TEST(receive_unreadable_in_the_middle)
{
    expect_guarded(2, 2);
}
END_TEST

START_TEST(receive_unreadable_once_all_was_sent)
{
    expect_guarded(3, 3);
}
END_TEST

START_TEST(receive_without_request_times_out)
{
    worker.script.request_timeout_ns = 200 * TL_NS_PER_MS;
    fake_worker_start(&worker);
    raw_call_open(&call, worker.address, RECEIVE, TL_TIME_NEVER);
    const struct tl_error *status = raw_call_finish(&call);
    ck_assert_int_eq(status->code, TL_DEADLINE_EXCEEDED);
    ck_assert_ptr_nonnull(strstr(status->message, "no progress for 200 ms"));
    raw_call_close(&call);
}
END_TEST

START_TEST(unknown_method_is_unimplemented)
{
    fake_worker_start(&worker);
    expect_refused("/tensorlane.v1.Transfer/Nothing", "", 0, TL_UNIMPLEMENTED, "no such method");
    expect_refused("/other.Service/Receive", "\x0a\x01k", 3, TL_UNIMPLEMENTED, "no such method");
}
END_TEST

static void note_status(struct tl_stream *stream, const struct tl_error *status)
{
    *(struct tl_error *)tl_stream_owner(stream) = *status;
}

/* A message of a few KiB that would become 64 MiB. */
START_TEST(compressed_messages_are_refused)
{
    static const struct tl_stream_events events = {.on_closed = note_status};
    fake_worker_start(&worker);
    raw_call_open(&call, worker.address, RECEIVE, TL_TIME_NEVER);
    grpc_arg arg = {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_COMPRESSION_CHANNEL_DEFAULT_ALGORITHM};
    arg.value.integer = GRPC_COMPRESS_GZIP;
    const grpc_channel_args args = {.num_args = 1, .args = &arg};
    grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
    grpc_channel *channel = grpc_channel_create(worker.address, credentials, &args);
    grpc_channel_credentials_release(credentials);
    struct tl_error status = {.code = TL_OK};
    struct tl_stream *stream;
    ck_assert(tl_stream_call(call.loop, channel, PUBLISH, TL_TIME_NEVER, &events, &status, &stream, NULL) == TL_OK);
    grpc_slice zeros = grpc_slice_malloc(64 << 20);
    memset(GRPC_SLICE_START_PTR(zeros), 0, 64 << 20);
    tl_stream_send(stream, grpc_raw_byte_buffer_create(&zeros, 1));
    grpc_slice_unref(zeros);
    tl_stream_read(stream);
    while (status.code == TL_OK)
        (void)tl_loop_run_once(call.loop, TL_TIME_NEVER);
    ck_assert_msg(status.code == TL_UNIMPLEMENTED, "%s: %s", tl_status_name(status.code), status.message);
    grpc_channel_destroy(channel);
    raw_call_close(&call);
}
END_TEST

START_TEST(more_calls_than_allowed)
{
    worker.script.max_calls = 1;
    fake_worker_start(&worker);
    ask("nothing", 0, false);
    fake_worker_wait(&worker, is_requested);
    struct raw_call first = call;
    tl_stream_set_owner(first.stream, &first);
    expect_refused(RECEIVE, "\x0a\x01k", 3, TL_RESOURCE_EXHAUSTED, "limits");
    raw_call_close(&first);
    fake_worker_wait(&worker, is_cancelled);
    ck_assert_uint_eq(fake_worker_seen(&worker).requests, 1);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- Publish -- */

struct piece {
    const char *key;
    uint64_t step;
    enum tl_dtype dtype; /* INVALID: no meta-data. */
    uint64_t dim;        /* The only dimension. */
    uint64_t announced_bytes;
    const void *data;
    size_t len_bytes;
    bool has_checksum;
    uint64_t checksum;
};

static void send_piece(const struct piece *piece)
{
    uint64_t dim = piece->dim;
    Tensorlane__V1__MetaData meta_data = TENSORLANE__V1__META_DATA__INIT;
    meta_data.dtype = (Tensorlane__V1__DType)piece->dtype;
    meta_data.n_dims = 1;
    meta_data.dims = &dim;
    meta_data.size_bytes = piece->announced_bytes;
    Tensorlane__V1__PublishRequest request = TENSORLANE__V1__PUBLISH_REQUEST__INIT;
    if (piece->key != NULL) request.key = (char *)piece->key;
    request.step = piece->step;
    if (piece->dtype != TL_DTYPE_INVALID) request.meta_data = &meta_data;
    request.has_checksum = piece->has_checksum;
    request.checksum = piece->checksum;
    request.data.data = (uint8_t *)piece->data;
    request.data.len = piece->len_bytes;
    raw_call_send_message(&call, &request.base);
}

static void open_publish(void)
{
    raw_call_open(&call, worker.address, PUBLISH, TL_TIME_NEVER);
}

static void expect_published(void)
{
    raw_call_half_close(&call);
    Tensorlane__V1__PublishResponse *response =
        raw_call_receive_message(&call, &tensorlane__v1__publish_response__descriptor);
    const struct tl_error *status = raw_call_finish(&call);
    ck_assert_msg(status->code == TL_OK, "%s: %s", tl_status_name(status->code), status->message);
    ck_assert_ptr_nonnull(response);
    ck_assert_uint_eq(response->publication, 77);
    tensorlane__v1__publish_response__free_unpacked(response, NULL);
    raw_call_close(&call);
    struct fake_seen seen = fake_worker_seen(&worker);
    ck_assert_uint_eq(seen.published, 1);
    ck_assert_uint_eq(seen.admitted, 1);
    ck_assert_uint_eq(seen.broken_off, 0);
}

/* The call ends with this status; a worker that had admitted the tensor learns that it does not come. */
static void expect_publish_refused(enum tl_status code, const char *words)
{
    raw_call_half_close(&call);
    const struct tl_error *status = raw_call_finish(&call);
    ck_assert_msg(status->code == code, "%s instead of %s: %s", tl_status_name(status->code), tl_status_name(code),
                  status->message);
    ck_assert_msg(strstr(status->message, words) != NULL, "\"%s\" lacks \"%s\"", status->message, words);
    raw_call_close(&call);
    struct fake_seen seen = fake_worker_seen(&worker);
    ck_assert_uint_eq(seen.published, 0);
    ck_assert_uint_eq(seen.broken_off, seen.admitted);
}

START_TEST(publish_in_one_message)
{
    fake_worker_start(&worker);
    open_publish();
    struct piece piece = {.key = "bias",
                          .step = 6,
                          .dtype = TL_U16,
                          .dim = 2,
                          .announced_bytes = 4,
                          .data = "abcd",
                          .len_bytes = 4,
                          .has_checksum = true,
                          .checksum = XXH3_64bits("abcd", 4)};
    send_piece(&piece);
    expect_published();
    struct fake_seen seen = fake_worker_seen(&worker);
    ck_assert_str_eq(seen.key, "bias");
    ck_assert_uint_eq(seen.published_step, 6);
    ck_assert_int_eq(tl_tensor_dtype(seen.tensor), TL_U16);
    ck_assert_uint_eq(tl_tensor_rank(seen.tensor), 1);
    ck_assert_mem_eq(tl_tensor_data(seen.tensor), "abcd", 4);
}
END_TEST

START_TEST(publish_in_many_messages)
{
    static unsigned char bytes[300000];
    fill(bytes, sizeof(bytes));
    fake_worker_start(&worker);
    open_publish();
    struct piece piece = {.key = "weights", .dtype = TL_U8, .dim = sizeof(bytes), .announced_bytes = sizeof(bytes)};
    send_piece(&piece); /* Without bytes. */
    for (size_t offset = 0; offset < sizeof(bytes);) {
        size_t count = sizeof(bytes) - offset < 70001 ? sizeof(bytes) - offset : 70001;
        piece = (struct piece){.data = bytes + offset, .len_bytes = count};
        send_piece(&piece);
        offset += count;
    }
    piece = (struct piece){.has_checksum = true, .checksum = XXH3_64bits(bytes, sizeof(bytes))};
    send_piece(&piece);
    expect_published();
    ck_assert_mem_eq(tl_tensor_data(fake_worker_seen(&worker).tensor), bytes, sizeof(bytes));
}
END_TEST

START_TEST(publish_without_checksum_or_bytes)
{
    fake_worker_start(&worker);
    open_publish();
    struct piece piece = {.key = "empty", .dtype = TL_F32, .dim = 0};
    send_piece(&piece);
    expect_published();
    ck_assert_uint_eq(tl_tensor_size_bytes(fake_worker_seen(&worker).tensor), 0);
}
END_TEST

START_TEST(publish_of_a_dead_tensor)
{
    fake_worker_start(&worker);
    open_publish();
    /* The key "k", and the meta-data of a dead tensor. */
    raw_call_send(&call, "\x0a\x01k\x1a\x02\x18\x01", 7);
    expect_published();
    ck_assert(tl_tensor_is_dead(fake_worker_seen(&worker).tensor));
}
END_TEST

START_TEST(publish_of_strings)
{
    static const unsigned char serialized[] = {2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 'a', 'b', 'c'};
    fake_worker_start(&worker);
    open_publish();
    struct piece piece = {.key = "names",
                          .dtype = TL_STRING,
                          .dim = 2,
                          .announced_bytes = sizeof(serialized),
                          .data = serialized,
                          .len_bytes = sizeof(serialized)};
    send_piece(&piece);
    expect_published();
    struct tl_string string;
    ck_assert(tl_tensor_string(fake_worker_seen(&worker).tensor, 0, &string, NULL) == TL_OK);
    ck_assert_uint_eq(string.len_bytes, 2);
    ck_assert_mem_eq(string.data, "ab", 2);
}
END_TEST

START_TEST(publish_of_damaged_strings)
{
    static const unsigned char serialized[] = {3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 'a', 'b', 'c'};
    fake_worker_start(&worker);
    open_publish();
    struct piece piece = {.key = "names",
                          .dtype = TL_STRING,
                          .dim = 2,
                          .announced_bytes = sizeof(serialized),
                          .data = serialized,
                          .len_bytes = sizeof(serialized)};
    send_piece(&piece);
    expect_publish_refused(TL_DATA_LOSS, "names");
}
END_TEST

START_TEST(publish_refused_by_the_worker)
{
    tl_error_set(&worker.script.admit, TL_RESOURCE_EXHAUSTED, "limits.published is full");
    fake_worker_start(&worker);
    open_publish();
    struct piece piece = {.key = "k", .dtype = TL_U8, .dim = 4, .announced_bytes = 4, .data = "abcd", .len_bytes = 4};
    send_piece(&piece);
    expect_publish_refused(TL_RESOURCE_EXHAUSTED, "limits.published is full");
    ck_assert_uint_eq(fake_worker_seen(&worker).admitted, 0);
}
END_TEST

START_TEST(publish_refused_when_it_is_complete)
{
    tl_error_set(&worker.script.publish, TL_FAILED_PRECONDITION, "too late");
    fake_worker_start(&worker);
    open_publish();
    struct piece piece = {.key = "k", .dtype = TL_U8, .dim = 4, .announced_bytes = 4, .data = "abcd", .len_bytes = 4};
    send_piece(&piece);
    raw_call_half_close(&call);
    const struct tl_error *status = raw_call_finish(&call);
    ck_assert_int_eq(status->code, TL_FAILED_PRECONDITION);
    ck_assert_str_eq(status->message, "too late");
    raw_call_close(&call);
    struct fake_seen seen = fake_worker_seen(&worker);
    ck_assert_uint_eq(seen.published, 1);
    ck_assert_uint_eq(seen.broken_off, 0);
}
END_TEST

START_TEST(publish_of_too_many_bytes)
{
    fake_worker_start(&worker);
    open_publish();
    struct piece piece = {.key = "k", .dtype = TL_U8, .dim = 4, .announced_bytes = 4, .data = "abcde", .len_bytes = 5};
    send_piece(&piece);
    expect_publish_refused(TL_INVALID_ARGUMENT, "k: 4 bytes were announced, and at least 5 were sent");
}
END_TEST

START_TEST(publish_of_too_many_bytes_later)
{
    fake_worker_start(&worker);
    open_publish();
    struct piece piece = {.key = "k", .dtype = TL_U8, .dim = 4, .announced_bytes = 4, .data = "abcd", .len_bytes = 4};
    send_piece(&piece);
    piece = (struct piece){.data = "e", .len_bytes = 1};
    send_piece(&piece);
    expect_publish_refused(TL_INVALID_ARGUMENT, "at least 5 were sent");
}
END_TEST

START_TEST(publish_of_too_few_bytes)
{
    fake_worker_start(&worker);
    open_publish();
    struct piece piece = {.key = "k", .dtype = TL_U8, .dim = 4, .announced_bytes = 4, .data = "abc", .len_bytes = 3};
    send_piece(&piece);
    expect_publish_refused(TL_DATA_LOSS, "k: 4 bytes were announced, but only 3 were sent");
}
END_TEST

START_TEST(publish_with_the_wrong_checksum)
{
    fake_worker_start(&worker);
    open_publish();
    struct piece piece = {.key = "k",
                          .dtype = TL_U8,
                          .dim = 4,
                          .announced_bytes = 4,
                          .data = "abcd",
                          .len_bytes = 4,
                          .has_checksum = true,
                          .checksum = 1};
    send_piece(&piece);
    expect_publish_refused(TL_DATA_LOSS, "k: the bytes that arrived have checksum");
}
END_TEST

START_TEST(publish_goes_on_behind_the_checksum)
{
    fake_worker_start(&worker);
    open_publish();
    struct piece piece = {.key = "k", .dtype = TL_U8, .dim = 4, .announced_bytes = 4, .has_checksum = true};
    send_piece(&piece);
    piece = (struct piece){.data = "abcd", .len_bytes = 4};
    send_piece(&piece);
    expect_publish_refused(TL_INVALID_ARGUMENT, "after the one with the checksum");
}
END_TEST

static void expect_second_refused(const struct piece *second)
{
    open_publish();
    struct piece piece = {.key = "k", .dtype = TL_U8, .dim = 4, .announced_bytes = 4, .data = "ab", .len_bytes = 2};
    send_piece(&piece);
    send_piece(second);
    expect_publish_refused(TL_INVALID_ARGUMENT, "first message only");
}

START_TEST(publish_says_twice_what_it_is)
{
    fake_worker_start(&worker);
    expect_second_refused(&(struct piece){.key = "k", .data = "cd", .len_bytes = 2});
    expect_second_refused(&(struct piece){.step = 1, .data = "cd", .len_bytes = 2});
    expect_second_refused(&(struct piece){.dtype = TL_U8, .dim = 4, .announced_bytes = 4});
}
END_TEST

START_TEST(publish_with_a_bad_first_message)
{
    fake_worker_start(&worker);
    open_publish();
    expect_publish_refused(TL_INVALID_ARGUMENT, "no message");
    struct piece piece = {.dtype = TL_U8, .dim = 4, .announced_bytes = 4};
    open_publish();
    send_piece(&piece);
    expect_publish_refused(TL_INVALID_ARGUMENT, "key");
    piece = (struct piece){.key = "k", .data = "abcd", .len_bytes = 4};
    open_publish();
    send_piece(&piece);
    expect_publish_refused(TL_INVALID_ARGUMENT, "meta-data");
    piece = (struct piece){.key = "k", .dtype = TL_U8, .dim = 4, .announced_bytes = 5};
    open_publish();
    send_piece(&piece);
    expect_publish_refused(TL_INVALID_ARGUMENT, "k: ");
    piece = (struct piece){.key = "k", .dtype = (enum tl_dtype)99, .dim = 4, .announced_bytes = 4};
    open_publish();
    send_piece(&piece);
    expect_publish_refused(TL_INVALID_ARGUMENT, "k: ");
    open_publish();
    raw_call_send(&call, "\xff\xff\xff", 3);
    expect_publish_refused(TL_INVALID_ARGUMENT, "");
    open_publish();
    /* The data is not the last field. */
    raw_call_send(&call, "\x7a\x01x\x0a\x01k", 6);
    expect_publish_refused(TL_INVALID_ARGUMENT, "");
    ck_assert_uint_eq(fake_worker_seen(&worker).admitted, 0);
}
END_TEST

START_TEST(publish_of_more_than_there_is_memory)
{
    fake_worker_start(&worker);
    open_publish();
    uint64_t size_bytes = UINT64_C(1) << 62;
    struct piece piece = {.key = "k", .dtype = TL_U8, .dim = size_bytes, .announced_bytes = size_bytes};
    send_piece(&piece);
    expect_publish_refused(TL_RESOURCE_EXHAUSTED, "");
    ck_assert_uint_eq(fake_worker_seen(&worker).broken_off, 1);
}
END_TEST

START_TEST(publish_of_a_client_that_goes_away)
{
    fake_worker_start(&worker);
    open_publish();
    struct piece piece = {.key = "k", .dtype = TL_U8, .dim = 4, .announced_bytes = 4, .data = "ab", .len_bytes = 2};
    send_piece(&piece);
    fake_worker_wait(&worker, is_admitted);
    raw_call_close(&call);
    fake_worker_wait(&worker, is_broken_off);
    ck_assert_uint_eq(fake_worker_seen(&worker).published, 0);
}
END_TEST

/* The client leaves after the last byte, without having said that it was the last. */
START_TEST(publish_of_a_client_that_goes_away_at_the_end)
{
    fake_worker_start(&worker);
    open_publish();
    struct piece piece = {.key = "k", .dtype = TL_U8, .dim = 4, .announced_bytes = 4, .data = "abcd", .len_bytes = 4};
    send_piece(&piece);
    fake_worker_wait(&worker, is_admitted);
    raw_call_close(&call);
    fake_worker_wait(&worker, is_broken_off);
    ck_assert_uint_eq(fake_worker_seen(&worker).published, 0);
}
END_TEST

START_TEST(publish_of_a_client_that_stalls)
{
    worker.script.request_timeout_ns = 2 * TL_NS_PER_SEC;
    fake_worker_start(&worker);
    open_publish();
    struct piece piece = {.key = "k", .dtype = TL_U8, .dim = 4, .announced_bytes = 4, .data = "ab", .len_bytes = 2};
    send_piece(&piece);
    const struct tl_error *status = raw_call_finish(&call);
    ck_assert_int_eq(status->code, TL_DEADLINE_EXCEEDED);
    ck_assert_ptr_nonnull(strstr(status->message, "too slowly: after the first 2.00 s"));
    raw_call_close(&call);
    fake_worker_wait(&worker, is_broken_off);
    ck_assert_uint_eq(fake_worker_seen(&worker).published, 0);
}
END_TEST

START_TEST(stop_ends_open_calls)
{
    fake_worker_start(&worker);
    ask("nothing", 0, false);
    fake_worker_wait(&worker, is_requested);
    fake_worker_stop(&worker, 0);
    ck_assert_uint_eq(worker.seen.ended[TL_SERVE_CANCELLED], 1);
    ck_assert_int_ne(raw_call_finish(&call)->code, TL_OK);
    raw_call_close(&call);
    fake_worker_init(&worker);
    fake_worker_start(&worker);
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {
        receive_sends_pieces_with_checksum,
        receive_sends_pieces_when_answered_later,
        receive_ids_never_repeat,
        receive_and_publish_are_counted,
        receive_of_no_bytes_is_one_message,
        receive_passes_the_status_on,
        receive_refuses_bad_requests,
        receive_takes_the_longest_key,
        receive_wants_exactly_one_message,
        receive_cancelled_while_it_waits,
        receive_deadline_of_the_client,
        receive_cancelled_in_the_middle,
        receive_of_a_client_that_does_not_read,
        receives_beyond_what_their_client_may_hold_ask_again,
        receives_that_are_answered_in_any_case,
        stop_ends_receives_that_wait_for_others,
        receive_unreadable_from_the_start,
        receive_unreadable_in_the_middle,
        receive_unreadable_once_all_was_sent,
        receive_without_request_times_out,
        unknown_method_is_unimplemented,
        compressed_messages_are_refused,
        more_calls_than_allowed,
        publish_in_one_message,
        publish_in_many_messages,
        publish_without_checksum_or_bytes,
        publish_of_a_dead_tensor,
        publish_of_strings,
        publish_of_damaged_strings,
        publish_refused_by_the_worker,
        publish_refused_when_it_is_complete,
        publish_of_too_many_bytes,
        publish_of_too_many_bytes_later,
        publish_of_too_few_bytes,
        publish_with_the_wrong_checksum,
        publish_goes_on_behind_the_checksum,
        publish_says_twice_what_it_is,
        publish_with_a_bad_first_message,
        publish_of_more_than_there_is_memory,
        publish_of_a_client_that_goes_away,
        publish_of_a_client_that_goes_away_at_the_end,
        publish_of_a_client_that_stalls,
        stop_ends_open_calls,
    };
    Suite *suite = suite_create("services_transfer");
    TCase *tcase = tcase_create("services_transfer");
    tcase_add_checked_fixture(tcase, setup, teardown);
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++)
        tcase_add_test(tcase, tests[i]);
    suite_add_tcase(suite, tcase);
    return run_suite_in_process(suite);
}
