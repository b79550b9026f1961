// SPDX-License-Identifier: Apache-2.0
/*
 * A published file is cut while it is served, after a check has found it unchanged and before its last bytes are read.
 * Its last page stays mapped, so the missing bytes are read as zeros, without a signal. Its path is not UTF-8,
 * and the receiver is told all the same, in a text that names the file.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fakes/cluster.h"
#include "fakes/run_suite.h"
#include "tensor/mapped_tensor.h"

#define CUT_BYTES 50
#define PATH_TEMPLATE "/tmp/tensorlane-\xe9.XXXXXX"

static struct cluster cluster;
static struct tl_error error;
static char path[] = PATH_TEMPLATE;
static uint64_t file_bytes;
static unsigned check_count;
static unsigned passing_count;

static void setup(void)
{
    check_count = 0;
}

/* The last check that passes cuts the file of the context. */
static enum tl_status check_and_cut(void *file, const void *data, uint64_t len_bytes, struct tl_error *ret_error)
{
    enum tl_status status = tl_mapped_file_check(file, data, len_bytes, ret_error);
    if (__atomic_add_fetch(&check_count, 1, __ATOMIC_RELAXED) == passing_count) {
        ck_assert(truncate(path, (off_t)(file_bytes - CUT_BYTES)) == 0);
    }
    return status;
}

static struct tl_tensor *make_file_tensor(uint64_t rows, uint64_t columns)
{
    struct tl_mapped_file *file;
    struct tl_tensor *tensor;
    const struct tl_shape shape = {.rank = 2, .dims = {rows, columns}};
    uint64_t size_bytes = rows * columns;
    struct tl_tensor *bytes = cluster_tensor(size_bytes, 1);
    snprintf(path, sizeof(path), "%s", PATH_TEMPLATE);
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
    uint64_t rows, columns;
    bool has_destination; /* The destination is the caller's memory; otherwise the library's. */
    bool is_part;         /* All columns but the first are received. */
    /* So many checks pass. A part is checked before and after it is made out of the value; then come those of its
     * transfer, except where the worker receives from itself, which copies it when it makes it. */
    unsigned passing_count;
} cases[] = {
    {"grpc", 0, 1, 100, false, false, 1},           {"grpc", 0, 1, 50001, false, false, 1},
    {"grpc", 0, 1, 70001, false, false, 1}, /* One piece, and the end that is held back. */
    {"grpc", 1, 1, 70001, true, false, 1},          {"grpc+local", 0, 1, 100, false, false, 1},
    {"grpc+local", 0, 5000, 1001, false, false, 1}, {"grpc+local", 0, 5000, 1001, true, false, 1},
    {"grpc", 0, 5000, 1001, false, true, 3},        {"grpc", 0, 5000, 1001, true, true, 3},
    {"grpc", 1, 5000, 1001, true, true, 1},         {"grpc+local", 0, 5000, 1001, false, true, 3},
    {"grpc+local", 0, 5000, 1001, true, true, 3},
};

/* The first tensor to a peer goes over gRPC. */
static void await_local(struct tl_worker *owner)
{
    struct tl_tensor *tensor = cluster_tensor(8, 1);
    cluster_publish(owner, "first", 1, tensor);
    tl_tensor_put(tensor);
    tl_tensor_put(cluster_recv_wait(cluster.workers[1], 0, "first", 1));
    CLUSTER_UNTIL(strcmp(cluster_peer_info(cluster.workers[1], 0).transport, "local") == 0);
}

START_TEST(file_that_is_cut_while_it_is_read_is_no_success)
{
    struct tl_completion completion;
    struct tl_tensor *destination = NULL;
    const bool is_part = cases[_i].is_part;
    const uint64_t start[] = {0, 1}, size[] = {cases[_i].rows, cases[_i].columns - is_part};
    const struct tl_part part = {.size_bytes = sizeof(part), .rank = 2, .start = start, .size = size};
    passing_count = cases[_i].passing_count;
    cluster_init(&cluster, 2, NULL);
    cluster.protocol = cases[_i].protocol;
    cluster_open_all(&cluster);
    struct tl_worker *owner = cluster.workers[cases[_i].from];
    struct tl_worker *receiver = cluster.workers[1];
    if (strcmp(cases[_i].protocol, "grpc+local") == 0) await_local(owner);
    struct tl_tensor *tensor = make_file_tensor(cases[_i].rows, cases[_i].columns);
    if (cases[_i].has_destination) ck_assert_int_eq(tl_tensor_create(TL_U8, 2, size, &destination, &error), TL_OK);
    const struct tl_recv_options options = {
        .size_bytes = sizeof(options), .destination = destination, .part = is_part ? &part : NULL};
    cluster_publish(owner, "w", 1, tensor);
    tl_tensor_put(tensor);
    enum tl_status status = tl_recv_wait(receiver, cluster_peer(receiver, cases[_i].from), "w", 1, &options,
                                         CLUSTER_LONG, &completion, &error);
    ck_assert_msg(status == TL_DATA_LOSS, "%d %s", (int)status, error.message);
    ck_assert_ptr_nonnull(strstr(error.message, cases[_i].from == 0 ? "/tmp/tensorlane-?." : path));
    ck_assert_uint_gt(__atomic_load_n(&check_count, __ATOMIC_RELAXED), passing_count);
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
