// SPDX-License-Identifier: Apache-2.0
/*
 * Published files and the data plane. Task 0 publishes a file and has threads of its own; task 1 receives, once with
 * threads and once driven by its caller (the loop's index).
 */
#include <check.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fakes/cluster.h"
#include "fakes/fake_transport.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"
#include "server/worker_internal.h"

#define FILE_BYTES (5 << 20)
#define HEADER_BYTES 128

static struct cluster cluster;
static struct fake_transport transport;
static struct tl_worker *sender;
static struct tl_worker *receiver;
static struct tl_error error;
static struct tl_tensor *content; /* The bytes of the file. */

/* Writes a file of npy format with one tensor, "w". */
static void write_file(void)
{
    static char bytes[HEADER_BYTES + FILE_BYTES];
    memset(bytes, ' ', HEADER_BYTES);
    memcpy(bytes, "\x93NUMPY\x01\x00\x76\x00", 10);
    char shape[80];
    int len = snprintf(shape, sizeof(shape), "{'descr': '|u1', 'fortran_order': False, 'shape': (%d,), }", FILE_BYTES);
    memcpy(bytes + 10, shape, (size_t)len);
    bytes[HEADER_BYTES - 1] = '\n';
    memcpy(bytes + HEADER_BYTES, tl_tensor_data(content), FILE_BYTES);
    temp_write(temp_path("w.npy"), bytes, sizeof(bytes));
}

static void setup(void)
{
    static char settings[2048];
    temp_folder_make();
    content = cluster_tensor(FILE_BYTES, 3);
    write_file();
    snprintf(settings, sizeof(settings), "\"rdma\": \"require\", \"connect\": \"eager\", \"publish\": [\"%s\"]",
             temp_path("w.npy"));
    cluster_init(&cluster, 2, settings);
    fake_transport_init(&transport, &cluster);
}

static void teardown(void)
{
    cluster_close(&cluster, 1);
    cluster_close_all(&cluster);
    fake_transport_fini(&transport);
    tl_tensor_put(content);
    temp_folder_remove();
}

/* pool_bytes is for the sender; 0 stands for plenty. */
static void open_both(int progress, uint64_t pool_bytes)
{
    transport.pool_bytes = pool_bytes;
    sender = fake_transport_open(&transport, 0, TL_PROGRESS_THREAD);
    transport.pool_bytes = 0;
    receiver = fake_transport_open(&transport, 1, progress);
}

static enum tl_status receive(struct tl_completion *ret_got)
{
    return tl_recv_wait(receiver, cluster_peer(receiver, 0), "w", 0, NULL, CLUSTER_LONG, ret_got, &error);
}

static void expect_file(enum tl_path path)
{
    struct tl_completion got;
    enum tl_status status = receive(&got);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert_msg(got.path == path, "%s: %s", tl_path_name(got.path), got.path_reason);
    ck_assert(cluster_tensor_is(got.tensor, FILE_BYTES, 3));
    tl_tensor_put(got.tensor);
}

/* Advances a worker that has no thread; returns true. */
static bool driven(struct tl_worker *worker)
{
    (void)!tl_worker_progress(worker, 0);
    return true;
}

static struct tl_memory_stats memory_of(const struct tl_worker *worker)
{
    struct tl_memory_stats stats;
    tl_memory_get_stats(worker->data_plane.transports[0].transport->memory, &stats);
    return stats;
}

/* In the steady state nothing is copied or registered, and the file is no longer needed. */
START_TEST(a_file_is_read_once)
{
    open_both(_i, 0);
    uint64_t used_bytes = memory_of(sender).pool_used_bytes;
    ck_assert_uint_ge(used_bytes, FILE_BYTES);
    for (unsigned i = 0; i < 3; i++)
        expect_file(TL_PATH_ZERO_COPY);
    ck_assert_int_eq(truncate(temp_path("w.npy"), HEADER_BYTES), 0);
    expect_file(TL_PATH_ZERO_COPY);
    ck_assert_int_eq(unlink(temp_path("w.npy")), 0);
    expect_file(TL_PATH_ZERO_COPY);
    ck_assert_uint_eq(memory_of(sender).bounced_bytes, 0);
    ck_assert_uint_eq(memory_of(receiver).bounced_bytes, 0);
    ck_assert_uint_eq(memory_of(sender).registrations, 0);
    teardown();
}
END_TEST

/* The pool cannot hold the file, and the card cannot read the mapping, so each transfer copies it piece by piece. When
 * the file changes or shrinks, the receiver gets an error; the connection stays. */
START_TEST(a_file_that_does_not_fit_is_copied_and_watched)
{
    struct tl_completion got;
    open_both(_i % 2, 4 << 20);
    CLUSTER_UNTIL(driven(receiver) && strcmp(cluster_peer_info(receiver, 0).transport, "verbs") == 0);
    const struct fake_rule rule = {
        .fault = FAKE_REGION_FAILURE, .provider = transport.cards[0].provider, .times = FAKE_ALWAYS};
    fake_fabric_add_rule(transport.fabric, &rule);
    expect_file(TL_PATH_BOUNCE);
    expect_file(TL_PATH_BOUNCE);
    ck_assert_uint_eq(memory_of(sender).bounced_bytes, 2 * FILE_BYTES);
    ck_assert_uint_eq(memory_of(receiver).bounced_bytes, 0);
    if (_i / 2 == 0) {
        ck_assert_int_eq(truncate(temp_path("w.npy"), FILE_BYTES / 2), 0);
    } else {
        write_file();
    }
    ck_assert_int_eq(receive(&got), TL_DATA_LOSS);
    ck_assert_msg(strstr(error.message, temp_path("w.npy")) != NULL, "%s", error.message);
    ck_assert_msg(strstr(error.message, "publish it again") != NULL, "%s", error.message);
    ck_assert_str_eq(cluster_peer_info(receiver, 0).transport, "verbs");
    fake_fabric_clear_rules(transport.fabric);
    teardown();
}
END_TEST

/* The file holds no tensor any more when the worker starts, or starts again. */
START_TEST(a_file_that_was_cut_is_refused)
{
    ck_assert_int_eq(truncate(temp_path("w.npy"), FILE_BYTES / 2), 0);
    ck_assert_int_ne(fake_transport_try(&transport, 0, TL_PROGRESS_THREAD, &error), TL_OK);
    ck_assert_msg(strstr(error.message, temp_path("w.npy")) != NULL, "%s", error.message);
    cluster_close_all(&cluster);
    fake_transport_fini(&transport);
    tl_tensor_put(content);
    temp_folder_remove();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("dataplane_files");
    TCase *tcase = tcase_create("dataplane_files");
    tcase_set_timeout(tcase, 100);
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_loop_test(tcase, a_file_is_read_once, 0, 2);
    tcase_add_loop_test(tcase, a_file_that_does_not_fit_is_copied_and_watched, 0, 4);
    tcase_add_test(tcase, a_file_that_was_cut_is_refused);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
