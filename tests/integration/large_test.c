// SPDX-License-Identifier: Apache-2.0
/*
 * A tensor beyond 4 GiB: every size and offset on the way is 64-bit, and memory does not grow with it.
 *
 * The source is a sparse file of 5 GiB with marks on both sides of the 4 GiB line. The destination is as much address
 * space over one small piece of memory, mapped again and again: it takes every byte, and keeps the last ones. The
 * checksum covers all of them as they arrive.
 */
#include <check.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <tensorlane/tensorlane.h>

#include "fakes/run_suite.h"
#include "tests/fakes/ports.h"

#define GIB (UINT64_C(1) << 30)
#define TENSOR_BYTES (5 * GIB + 12345)
#define WINDOW_BYTES (UINT64_C(64) << 20)
#define MEMORY_LIMIT_KIB (1 << 20)

static const char tail_mark[] = "the end of a tensor beyond four gibibytes";

/* Makes a sparse file with marks, mapped read-only. */
static void *map_source(void)
{
    char path[] = "/tmp/tensorlane-large-XXXXXX";
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    unlink(path);
    ck_assert_int_eq(ftruncate(fd, (off_t)TENSOR_BYTES), 0);
    ck_assert_int_eq(pwrite(fd, "start", 5, 0), 5);
    ck_assert_int_eq(pwrite(fd, "around", 6, (off_t)(4 * GIB - 3)), 6);
    off_t tail = (off_t)(TENSOR_BYTES - sizeof(tail_mark));
    ck_assert_int_eq(pwrite(fd, tail_mark, sizeof(tail_mark), tail), sizeof(tail_mark));
    void *data = mmap(NULL, TENSOR_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    ck_assert_ptr_ne(data, MAP_FAILED);
    close(fd);
    return data;
}

/* Makes TENSOR_BYTES of writable addresses over WINDOW_BYTES of memory. */
static void *map_destination(void)
{
    int fd = memfd_create("window", MFD_CLOEXEC);
    ck_assert_int_eq(ftruncate(fd, (off_t)WINDOW_BYTES), 0);
    unsigned char *base = mmap(NULL, TENSOR_BYTES + WINDOW_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ck_assert_ptr_ne(base, MAP_FAILED);
    for (uint64_t at = 0; at < TENSOR_BYTES; at += WINDOW_BYTES) {
        void *window = mmap(base + at, WINDOW_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
        ck_assert_ptr_ne(window, MAP_FAILED);
    }
    close(fd);
    return base;
}

static struct tl_tensor *wrap(void *data, bool is_read_only)
{
    uint64_t dims[1] = {TENSOR_BYTES};
    struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                  .dtype = TL_U8,
                                  .rank = 1,
                                  .dims = dims,
                                  .data = data,
                                  .capacity_bytes = TENSOR_BYTES,
                                  .read_only = is_read_only};
    struct tl_tensor *tensor;
    ck_assert_int_eq(tl_tensor_wrap(&view, &tensor, NULL), TL_OK);
    return tensor;
}

/* Returns the process's own memory in KiB, without mapped files and without the window, which counts once for each time
 * it is mapped. */
static long private_memory_kib(void)
{
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    long value = 0;
    while (fgets(line, sizeof(line), status) != NULL) {
        if (sscanf(line, "RssAnon: %ld", &value) == 1) break;
    }
    fclose(status);
    ck_assert_int_gt(value, 0);
    return value;
}

static struct tl_worker *open_worker(const char *json, const char *job)
{
    struct tl_worker_options options = {.size_bytes = sizeof(options), .config_json = json, .job = job};
    struct tl_worker *worker;
    struct tl_error error;
    enum tl_status status = tl_worker_open(&options, &worker, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return worker;
}

START_TEST(moves_five_gibibytes_in_bounded_memory)
{
    char json[256];
    snprintf(json, sizeof(json),
             "{\"cluster\": {\"ps\": [\"127.0.0.1:%u\"], \"worker\": [\"127.0.0.1:%u\"]}, \"protocol\": \"grpc\"}",
             tl_free_port(), tl_free_port());
    struct tl_worker *owner = open_worker(json, "ps");
    struct tl_worker *receiver = open_worker(json, "worker");
    void *source = map_source();
    unsigned char *destination = map_destination();
    struct tl_tensor *published = wrap(source, true);
    struct tl_tensor *into = wrap(destination, false);
    ck_assert_int_eq(tl_publish(owner, "large", 0, published, NULL), TL_OK);
    tl_peer_id peer;
    ck_assert_int_eq(tl_worker_find_peer(receiver, "/job:ps/task:0", &peer, NULL), TL_OK);
    struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = into, .wants_checksum = true};
    struct tl_completion completion;
    struct tl_error error;
    enum tl_status status =
        tl_recv_wait(receiver, peer, "large", 0, &options, INT64_C(100000000000), &completion, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert_uint_eq(completion.bytes, TENSOR_BYTES);
    ck_assert(completion.is_verified);
    ck_assert_mem_eq(destination + TENSOR_BYTES - sizeof(tail_mark), tail_mark, sizeof(tail_mark));
    ck_assert_int_lt(private_memory_kib(), MEMORY_LIMIT_KIB);
    struct tl_worker_stats stats = {.size_bytes = sizeof(stats)};
    ck_assert_int_eq(tl_worker_stats(owner, &stats, NULL), TL_OK);
    ck_assert_uint_eq(stats.bytes_sent, TENSOR_BYTES);
    ck_assert_uint_le(stats.bytes_copied_send, 256);
    tl_tensor_put(completion.tensor);
    tl_tensor_put(into);
    tl_tensor_put(published);
    tl_worker_close(receiver, TL_TIMEOUT_DEFAULT);
    tl_worker_close(owner, TL_TIMEOUT_DEFAULT);
    munmap(destination, TENSOR_BYTES + WINDOW_BYTES);
    munmap(source, TENSOR_BYTES);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("large");
    TCase *cases = tcase_create("large");
    tcase_set_timeout(cases, 110);
    tcase_add_test(cases, moves_five_gibibytes_in_bounded_memory);
    suite_add_tcase(suite, cases);
    return run_suite_in_process(suite);
}
