// SPDX-License-Identifier: Apache-2.0
/*
 * A published file is cut while it is served, after a check has found it unchanged and before its last bytes are read.
 * Its last page stays mapped, so the missing bytes are read as zeros, without a signal.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "fakes/cluster.h"
#include "fakes/run_suite.h"
#include "tensor/mapped_tensor.h"

#define CUT_BYTES 50

static struct cluster cluster;
static struct tl_error error;
static char path[] = "/tmp/tensorlane-cut.XXXXXX";
static uint64_t file_bytes;
static unsigned check_count;

static void setup(void)
{
    check_count = 0;
}

/* The first check passes and then cuts the file of the context. */
static enum tl_status check_and_cut(void *file, const void *data, uint64_t len_bytes, struct tl_error *ret_error)
{
    enum tl_status status = tl_mapped_file_check(file, data, len_bytes, ret_error);
    if (__atomic_add_fetch(&check_count, 1, __ATOMIC_RELAXED) == 1) {
        ck_assert(truncate(path, (off_t)(file_bytes - CUT_BYTES)) == 0);
    }
    return status;
}

static struct tl_tensor *make_file_tensor(uint64_t size_bytes)
{
    struct tl_mapped_file *file;
    struct tl_tensor *tensor;
    const struct tl_shape shape = {.rank = 1, .dims = {size_bytes}};
    struct tl_tensor *bytes = cluster_tensor(size_bytes, 1);
    snprintf(path, sizeof(path), "/tmp/tensorlane-cut.XXXXXX");
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    ck_assert(write(fd, tl_tensor_data(bytes), size_bytes) == (ssize_t)size_bytes);
    close(fd);
    tl_tensor_put(bytes);
    file_bytes = size_bytes;
    ck_assert_msg(tl_mapped_file_open(path, &file, &error) == TL_OK, "%s", error.message);
    ck_assert(tl_mapped_tensor_create(file, 0, TL_U8, &shape, &tensor, &error) == TL_OK);
    tl_tensor_set_guard(tensor, check_and_cut, file);
    tl_mapped_file_put(file); /* The tensor has a checksum. */
    return tensor;
}

static const struct {
    const char *protocol;
    unsigned from; /* Worker 1 receives from itself, or from worker 0. */
    uint64_t size_bytes;
    bool has_destination; /* The destination is the caller's memory; otherwise the library's. */
} cases[] = {
    {"grpc", 0, 100, false},           {"grpc", 0, 50001, false},
    {"grpc", 0, 70001, false}, /* One piece, and the end that is held back. */
    {"grpc", 1, 70001, true},          {"grpc+local", 0, 100, false},
    {"grpc+local", 0, 5000001, false}, {"grpc+local", 0, 5000001, true},
};

START_TEST(file_that_is_cut_while_it_is_read_is_no_success)
{
    struct tl_completion completion;
    cluster_init(&cluster, 2, NULL);
    cluster.protocol = cases[_i].protocol;
    cluster_open_all(&cluster);
    struct tl_worker *owner = cluster.workers[cases[_i].from];
    struct tl_worker *receiver = cluster.workers[1];
    struct tl_tensor *tensor = make_file_tensor(cases[_i].size_bytes);
    struct tl_tensor *destination = cases[_i].has_destination ? cluster_tensor(cases[_i].size_bytes, 2) : NULL;
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination};
    cluster_publish(owner, "w", 1, tensor);
    tl_tensor_put(tensor);
    enum tl_status status = tl_recv_wait(receiver, cluster_peer(receiver, cases[_i].from), "w", 1, &options,
                                         CLUSTER_LONG, &completion, &error);
    ck_assert_msg(status == TL_DATA_LOSS, "%d %s", (int)status, error.message);
    ck_assert_uint_ge(__atomic_load_n(&check_count, __ATOMIC_RELAXED), 2);
    tl_tensor_put(destination);
    cluster_close_all(&cluster);
    ck_assert_int_eq(unlink(path), 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("worker_files");
    TCase *tcase = tcase_create("cut");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_loop_test(tcase, file_that_is_cut_while_it_is_read_is_no_success, 0, sizeof(cases) / sizeof(cases[0]));
    suite_add_tcase(suite, tcase);
    return run_suite_in_process(suite);
}
