// SPDX-License-Identifier: Apache-2.0
/*
 * Receives that may map. Task 0 publishes a file; task 1 is on the same host, or not, and receives, once with threads
 * and once driven by its caller (the loop's index).
 */
#include <check.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fakes/pattern.h"
#include "fakes/transport_case.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"
#include "server/worker_internal.h"

#define FILE_BYTES (5 << 20)
#define HEADER_BYTES 128

/* Writes a file of npy format with one tensor, "w". */
static void write_file(void)
{
    static char bytes[HEADER_BYTES + FILE_BYTES];
    char shape[80];
    memset(bytes, ' ', HEADER_BYTES);
    memcpy(bytes, "\x93NUMPY\x01\x00\x76\x00", 10);
    int len = snprintf(shape, sizeof(shape), "{'descr': '|u1', 'fortran_order': False, 'shape': (%d,), }", FILE_BYTES);
    memcpy(bytes + 10, shape, (size_t)len);
    bytes[HEADER_BYTES - 1] = '\n';
    pattern_fill(bytes + HEADER_BYTES, FILE_BYTES, 3);
    temp_write(temp_path("w.npy"), bytes, sizeof(bytes));
}

static void setup(void)
{
    static char settings[2048];
    temp_folder_make();
    write_file();
    snprintf(settings, sizeof(settings), "\"connect\": \"eager\", \"publish\": [\"%s\"]", temp_path("w.npy"));
    prepare(settings);
    transport.has_local = true;
}

static void end(void)
{
    teardown();
    temp_folder_remove();
}

static struct tl_completion receive(bool wants_checksum)
{
    const struct tl_recv_options options = {
        .size_bytes = sizeof(options), .wants_checksum = wants_checksum, .may_map = true};
    struct tl_completion got;
    enum tl_status status =
        tl_recv_wait(receiver, cluster_peer(receiver, 0), "w", 0, &options, CLUSTER_LONG, &got, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return got;
}

static void expect(struct tl_completion *got, enum tl_path path, const char *reason)
{
    ck_assert_msg(got->path == path, "%s: %s", tl_path_name(got->path), got->path_reason);
    ck_assert_msg(strstr(got->path_reason, reason) != NULL, "%s", got->path_reason);
    ck_assert(tl_tensor_is_read_only(got->tensor) == (path == TL_PATH_MAPPED));
    ck_assert(cluster_tensor_is(got->tensor, FILE_BYTES, 3));
    ck_assert_int_eq(tl_tensor_check(got->tensor, &error), TL_OK);
}

static struct tl_engine_stats engine_of(struct tl_worker *worker)
{
    struct tl_engine_stats engine;
    struct tl_memory_stats memory;
    struct tl_reactor_stats reactor;
    tl_transports_get_stats(worker, &engine, &memory, &reactor);
    return engine;
}

/* The mapping also works when the file was copied for a card, and lasts as long as the receiver keeps it. */
START_TEST(mapped)
{
    open_both(_i);
    struct tl_completion got = receive(false);
    expect(&got, TL_PATH_MAPPED, "");
    ck_assert_uint_eq(got.bytes, FILE_BYTES);
    ck_assert_uint_eq(engine_of(receiver).tensors_mapped, 1);
    ck_assert_uint_eq(engine_of(receiver).bytes_received, 0);
    cluster_close(&cluster, 0);
    end();
    ck_assert(cluster_tensor_is(got.tensor, FILE_BYTES, 3));
    tl_tensor_put(got.tensor);
}
END_TEST

START_TEST(checksum)
{
    open_both(_i);
    struct tl_completion got = receive(true);
    ck_assert(got.is_verified);
    expect(&got, TL_PATH_ZERO_COPY, "a checksum is wanted");
    tl_tensor_put(got.tensor);
    end();
}
END_TEST

START_TEST(other_host)
{
    transport.locals[1].host = 2;
    open_both(_i);
    struct tl_completion got = receive(false);
    expect(&got, TL_PATH_ZERO_COPY, "only workers of one host");
    tl_tensor_put(got.tensor);
    end();
}
END_TEST

START_TEST(published_from_memory)
{
    open_both(_i);
    struct tl_tensor *tensor = cluster_tensor(FILE_BYTES, 3);
    cluster_publish(sender, "w", 1, tensor);
    tl_tensor_put(tensor);
    struct tl_completion got = receive(false);
    ck_assert_uint_eq(got.step, 1);
    expect(&got, TL_PATH_ZERO_COPY, "lies in no published file");
    tl_tensor_put(got.tensor);
    end();
}
END_TEST

/* Nothing is read from a changed file, except what a card's memory already had (the loop's index, above the progress,
 * chooses the card). */
START_TEST(file_has_changed)
{
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .may_map = true};
    struct tl_completion got;
    bool is_copied = _i / 2 == 1;
    if (is_copied) transport.locals[1].host = 2;
    open_both(_i % 2);
    ck_assert_int_eq(truncate(temp_path("w.npy"), HEADER_BYTES), 0);
    if (is_copied) {
        got = receive(false);
        expect(&got, TL_PATH_ZERO_COPY, "");
        tl_tensor_put(got.tensor);
    } else {
        ck_assert_int_eq(
            tl_recv_wait(receiver, cluster_peer(receiver, 0), "w", 0, &options, CLUSTER_LONG, &got, &error),
            TL_DATA_LOSS);
        ck_assert_msg(strstr(error.message, "publish it again") != NULL, "%s", error.message);
    }
    end();
}
END_TEST

START_TEST(no_destination)
{
    open_both(_i);
    struct tl_tensor *destination = cluster_tensor(FILE_BYTES, 0);
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination, .may_map = true};
    struct tl_completion got;
    ck_assert_int_eq(tl_recv_wait(receiver, cluster_peer(receiver, 0), "w", 0, &options, CLUSTER_LONG, &got, &error),
                     TL_INVALID_ARGUMENT);
    tl_tensor_put(destination);
    end();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("dataplane_map");
    TCase *tcase = tcase_create("dataplane_map");
    tcase_set_timeout(tcase, 100);
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_loop_test(tcase, mapped, 0, 2);
    tcase_add_loop_test(tcase, checksum, 0, 2);
    tcase_add_loop_test(tcase, other_host, 0, 2);
    tcase_add_loop_test(tcase, published_from_memory, 0, 2);
    tcase_add_loop_test(tcase, file_has_changed, 0, 4);
    tcase_add_loop_test(tcase, no_destination, 0, 2);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
