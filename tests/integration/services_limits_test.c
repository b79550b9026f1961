// SPDX-License-Identifier: Apache-2.0
/*
 * Metadata of calls that is longer than a server takes: the caller gets an error that says so, the call does not reach
 * its handler, and the server answers the next one. The test uses gRPC's client, and a client that speaks HTTP/2 by
 * hand.
 *
 * gRPC answers RESOURCE_EXHAUSTED as soon as it has read too much. When more follows, it may end the connection, and
 * the status is UNAVAILABLE. It counts each frame of headers by itself.
 */
#include <arpa/inet.h>
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "fakes/fake_worker.h"
#include "fakes/raw_call.h"
#include "fakes/run_suite.h"
#include "grpc/health/v1/health.pb-c.h"
#include "tensorlane/v1/transfer.pb-c.h"

#define CHECK "/grpc.health.v1.Health/Check"
#define LIST "/tensorlane.v1.Transfer/List"
#define LIMIT_BYTES 16384 /* docs/protocol.md has this number. */
#define MAX_HEADERS 400

static struct fake_worker worker;

static void setup(void)
{
    fake_worker_init(&worker);
    fake_worker_start(&worker);
}

static void teardown(void)
{
    fake_worker_stop(&worker, 0);
}

/* ----------------------------------------------------------------------------------------------- gRPC's client -- */

/* Lists over a connection of its own, with so many headers of so many bytes; returns the code of the status. */
static enum tl_status list_with(size_t count, size_t value_bytes)
{
    static grpc_metadata metadata[MAX_HEADERS];
    struct raw_call call;
    char *value = malloc(value_bytes + 1);
    ck_assert(value != NULL && count <= MAX_HEADERS);
    memset(value, 'v', value_bytes);
    value[value_bytes] = '\0';
    for (size_t i = 0; i < count; i++) {
        char key[32];
        snprintf(key, sizeof(key), "x-header-%zu", i);
        metadata[i].key = grpc_slice_from_copied_string(key);
        metadata[i].value = grpc_slice_from_copied_string(value);
    }
    const struct tl_stream_headers headers = {.metadata = metadata, .count = count};
    raw_call_open_with(&call, &headers, worker.address, LIST, 30 * TL_NS_PER_SEC);
    Tensorlane__V1__ListRequest request = TENSORLANE__V1__LIST_REQUEST__INIT;
    raw_call_send_message(&call, &request.base);
    raw_call_half_close(&call);
    enum tl_status status = raw_call_finish(&call)->code;
    if (status != TL_OK) ck_assert_str_ne(call.status.message, "");
    raw_call_close(&call);
    for (size_t i = 0; i < count; i++) {
        grpc_slice_unref(metadata[i].key);
        grpc_slice_unref(metadata[i].value);
    }
    free(value);
    return status;
}

static bool was_listed(void)
{
    struct fake_seen seen = fake_worker_seen(&worker);
    return seen.pattern[0] != '?';
}

/* The answer then shows what the handler has done. */
static void forget_pattern(struct fake_worker *fake, void *context)
{
    (void)context;
    strcpy(fake->seen.pattern, "?");
}

static void expect_refused(size_t count, size_t value_bytes, bool may_be_cut)
{
    fake_worker_run(&worker, forget_pattern, NULL);
    enum tl_status status = list_with(count, value_bytes);
    ck_assert_msg(status == TL_RESOURCE_EXHAUSTED || (may_be_cut && status == TL_UNAVAILABLE), "%zu of %zu bytes: %s",
                  count, value_bytes, tl_status_name(status));
    ck_assert(!was_listed());
    ck_assert_int_eq(list_with(0, 0), TL_OK);
    ck_assert(was_listed());
}

START_TEST(metadata_up_to_the_limit_is_taken)
{
    ck_assert_int_eq(list_with(1, LIMIT_BYTES - 1024), TL_OK);
    ck_assert_int_eq(list_with(100, 100), TL_OK);
}
END_TEST

START_TEST(metadata_beyond_the_limit_is_refused)
{
    expect_refused(1, LIMIT_BYTES, false);
    expect_refused(1, 300000, true);
    expect_refused(MAX_HEADERS, 64, true); /* Each header is small. */
}
END_TEST

/* ---------------------------------------------------------------------------------------------- HTTP/2 by hand -- */

enum frame_type { FRAME_DATA = 0, FRAME_HEADERS = 1, FRAME_RST_STREAM = 3, FRAME_SETTINGS = 4 };
#define FLAG_ACKNOWLEDGED 1
#define FLAG_END_STREAM 1
#define FLAG_END_HEADERS 4

static int dial(void)
{
    unsigned port;
    ck_assert_int_eq(sscanf(worker.address, "127.0.0.1:%u", &port), 1);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    address.sin_port = htons((uint16_t)port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0);
    const struct timeval timeout = {.tv_sec = 30};
    ck_assert_int_eq(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)), 0);
    return fd;
}

static size_t put_frame(unsigned char *to, enum frame_type type, unsigned char flags, unsigned stream,
                        const void *payload, size_t len_bytes)
{
    const unsigned char head[9] = {(unsigned char)(len_bytes >> 16),
                                   (unsigned char)(len_bytes >> 8),
                                   (unsigned char)len_bytes,
                                   (unsigned char)type,
                                   flags,
                                   0,
                                   0,
                                   0,
                                   (unsigned char)stream};
    memcpy(to, head, sizeof(head));
    memcpy(to + sizeof(head), payload, len_bytes);
    return sizeof(head) + len_bytes;
}

/* A header field; both texts have at most 126 bytes. */
static size_t put_field(unsigned char *to, const char *name, const char *value)
{
    size_t used = 0;
    to[used++] = 0x40;
    to[used++] = (unsigned char)strlen(name);
    memcpy(to + used, name, strlen(name));
    used += strlen(name);
    to[used++] = (unsigned char)strlen(value);
    memcpy(to + used, value, strlen(value));
    return used + strlen(value);
}

static size_t put_headers(unsigned char *to, size_t extra_count)
{
    char value[121];
    memset(value, 'v', sizeof(value) - 1);
    value[sizeof(value) - 1] = '\0';
    size_t used = put_field(to, ":method", "POST");
    used += put_field(to + used, ":scheme", "http");
    used += put_field(to + used, ":path", CHECK);
    used += put_field(to + used, ":authority", "test");
    used += put_field(to + used, "te", "trailers");
    used += put_field(to + used, "content-type", "application/grpc");
    for (size_t i = 0; i < extra_count; i++)
        used += put_field(to + used, "x-header", value);
    return used;
}

static void read_all(int fd, void *to, size_t count)
{
    ck_assert_int_eq(recv(fd, to, count, MSG_WAITALL), (ssize_t)count);
}

struct frame {
    unsigned char type;
    unsigned char flags;
    unsigned char stream;
    size_t len_bytes;
    char payload[70000];
};

static const struct frame *read_frame(int fd)
{
    static struct frame frame;
    unsigned char head[9];
    read_all(fd, head, sizeof(head));
    frame.type = head[3];
    frame.flags = head[4];
    frame.stream = head[8];
    frame.len_bytes = (size_t)head[0] << 16 | (size_t)head[1] << 8 | head[2];
    ck_assert_uint_le(frame.len_bytes, sizeof(frame.payload));
    if (frame.len_bytes > 0) read_all(fd, frame.payload, frame.len_bytes);
    return &frame;
}

static void say(int fd, const unsigned char *bytes, size_t len_bytes)
{
    ck_assert_int_eq(send(fd, bytes, len_bytes, MSG_NOSIGNAL), (ssize_t)len_bytes);
}

/* Introduces itself, and takes the server's settings, which allow frames that are longer than usual. */
static int get_address(void)
{
    static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    unsigned char bytes[64];
    size_t used = sizeof(preface) - 1;
    int fd = dial();
    memcpy(bytes, preface, used);
    used += put_frame(bytes + used, FRAME_SETTINGS, 0, 0, "", 0);
    say(fd, bytes, used);
    const struct frame *frame;
    do {
        frame = read_frame(fd);
    } while (frame->type != FRAME_SETTINGS || frame->flags != 0);
    used = put_frame(bytes, FRAME_SETTINGS, FLAG_ACKNOWLEDGED, 0, "", 0);
    say(fd, bytes, used);
    return fd;
}

/* Calls Check on stream 1 of a new connection with so many headers more, in one frame. */
static int call_by_hand(size_t extra_count)
{
    static unsigned char headers[64 * 1024];
    static unsigned char bytes[80 * 1024];
    ck_assert_uint_le(extra_count, 400);
    size_t header_bytes = put_headers(headers, extra_count);
    size_t used = put_frame(bytes, FRAME_HEADERS, FLAG_END_HEADERS, 1, headers, header_bytes);
    used += put_frame(bytes + used, FRAME_DATA, FLAG_END_STREAM, 1, "\0\0\0\0\0", 5); /* An empty message. */
    int fd = get_address();
    say(fd, bytes, used);
    return fd;
}

/* The status of the call: the text of "grpc-status" in the first headers that have it; gRPC writes it as it is, without
 * Huffman's code. "reset" when the stream ends without. */
static const char *read_status(int fd)
{
    static char status[8];
    for (;;) {
        const struct frame *frame = read_frame(fd);
        if (frame->stream != 1) continue;
        if (frame->type == FRAME_RST_STREAM) return "reset";
        const char *found = memmem(frame->payload, frame->len_bytes, "grpc-status", 11);
        if (frame->type != FRAME_HEADERS || found == NULL) continue;
        size_t length = (unsigned char)found[11];
        ck_assert_uint_lt(length, sizeof(status));
        memcpy(status, found + 12, length);
        status[length] = '\0';
        return status;
    }
}

START_TEST(too_much_metadata_is_refused)
{
    int fd = call_by_hand(1);
    ck_assert_str_eq(read_status(fd), "0");
    close(fd);
    fd = call_by_hand(2 * LIMIT_BYTES / 128);
    ck_assert_str_eq(read_status(fd), "8"); /* RESOURCE_EXHAUSTED */
    close(fd);
    ck_assert_int_eq(list_with(0, 0), TL_OK);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("services_limits");
    TCase *metadata = tcase_create("metadata");
    tcase_add_checked_fixture(metadata, setup, teardown);
    tcase_add_test(metadata, metadata_up_to_the_limit_is_taken);
    tcase_add_test(metadata, metadata_beyond_the_limit_is_refused);
    tcase_add_test(metadata, too_much_metadata_is_refused);
    suite_add_tcase(suite, metadata);
    return run_suite_in_process(suite);
}
