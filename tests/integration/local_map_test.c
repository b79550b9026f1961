// SPDX-License-Identifier: Apache-2.0
/*
 * Published files that are mapped over the local transport, between two processes: task 0, which publishes a
 * safetensors file, is a child; the test is task 1. A mapping stays valid whatever happens to its owner, nothing is
 * copied, nothing stays open, and a file that becomes shorter does not end a process that has asked for the guard.
 */
#include <check.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fakes/cluster.h"
#include "fakes/descriptors.h"
#include "fakes/pattern.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"
#include "server/worker_internal.h"

#define SMALL_BYTES 100
#define LARGE_BYTES (3 << 20)

static struct cluster cluster;
static struct tl_worker *worker;
static pid_t owner;
static struct tl_error error;

/* Writes a file with the tensors "small" and "large". */
static void write_file(void)
{
    static char bytes[8 + 248 + SMALL_BYTES + LARGE_BYTES];
    uint64_t header_bytes = 248;
    memset(bytes, ' ', sizeof(bytes));
    memcpy(bytes, &header_bytes, sizeof(header_bytes));
    int len = snprintf(bytes + 8, 248,
                       "{\"small\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[0,%d]},"
                       "\"large\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[%d,%d]}}",
                       SMALL_BYTES, SMALL_BYTES, LARGE_BYTES, SMALL_BYTES, SMALL_BYTES + LARGE_BYTES);
    bytes[8 + len] = ' ';
    pattern_fill(bytes + 8 + 248, SMALL_BYTES, 1);
    pattern_fill(bytes + 8 + 248 + SMALL_BYTES, LARGE_BYTES, 2);
    temp_write(temp_path("model.safetensors"), bytes, sizeof(bytes));
}

static void prepare(const char *map)
{
    static char settings[2048];
    temp_folder_make();
    write_file();
    snprintf(settings, sizeof(settings),
             "\"protocol\": \"grpc+local\", \"rdma\": \"require\", \"local\": {\"map\": \"%s\"}", map);
    cluster_init(&cluster, 2, settings);
    snprintf(cluster.task_settings[0], sizeof(cluster.task_settings[0]), "\"publish\": [\"%s\"]",
             temp_path("model.safetensors"));
}

/* Starts task 0 in a process of its own, before this process has any thread. Task 0 withdraws "large" at the first
 * SIGUSR1. */
static void start_owner(void)
{
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR1);
    ck_assert_int_eq(sigprocmask(SIG_BLOCK, &signals, NULL), 0);
    owner = fork();
    ck_assert_int_ge(owner, 0);
    if (owner > 0) return;
    int number;
    struct tl_tensor *tensor;
    const uint64_t size = LARGE_BYTES;
    struct tl_worker *published = cluster_open(&cluster, 0);
    if (tl_tensor_create_shared(TL_U8, 1, &size, &tensor, &error) != TL_OK) _exit(1);
    pattern_fill(tl_tensor_data(tensor), LARGE_BYTES, 3);
    cluster_publish(published, "made", 7, tensor);
    tl_tensor_put(tensor);
    sigwait(&signals, &number);
    if (tl_withdraw(published, "large", &error) != TL_OK) _exit(1);
    for (;;)
        pause();
}

static void stop_owner(void)
{
    if (owner <= 0) return;
    ck_assert_int_eq(kill(owner, SIGKILL), 0);
    ck_assert_int_eq(waitpid(owner, NULL, 0), owner);
    owner = 0;
}

static void open_both(const char *map)
{
    prepare(map);
    start_owner();
    worker = cluster_open(&cluster, 1);
}

static void end(void)
{
    stop_owner();
    cluster_close_all(&cluster);
    temp_folder_remove();
}

static struct tl_completion receive(const char *key)
{
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .may_map = true};
    struct tl_completion got;
    enum tl_status status = tl_recv_wait(worker, cluster_peer(worker, 0), key, 0, &options, CLUSTER_LONG, &got, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return got;
}

/* Receives "large" and checks that it is mapped. The caller has one reference. */
static struct tl_tensor *receive_mapped(void)
{
    struct tl_completion got = receive("large");
    ck_assert_msg(got.path == TL_PATH_MAPPED, "%s: %s", tl_path_name(got.path), got.path_reason);
    ck_assert(tl_tensor_is_read_only(got.tensor));
    ck_assert(cluster_tensor_is(got.tensor, LARGE_BYTES, 2));
    ck_assert_msg(tl_tensor_check(got.tensor, &error) == TL_OK, "%s", error.message);
    return got.tensor;
}

START_TEST(mapped)
{
    struct tl_engine_stats engine;
    struct tl_memory_stats memory;
    struct tl_reactor_stats reactor;
    open_both("files");
    for (unsigned i = 0; i < 3; i++)
        tl_tensor_put(receive_mapped());
    tl_transports_get_stats(worker, &engine, &memory, &reactor);
    ck_assert_uint_eq(engine.tensors_mapped, 3);
    ck_assert_uint_eq(engine.bytes_received, 0);
    ck_assert_uint_eq(engine.bytes_bounced, 0);
    ck_assert_str_eq(cluster_peer_info(worker, 0).transport, "local");
    struct tl_completion got = receive("small");
    ck_assert_msg(got.path == TL_PATH_INLINE, "%s", tl_path_name(got.path));
    ck_assert(cluster_tensor_is(got.tensor, SMALL_BYTES, 1));
    tl_tensor_put(got.tensor);
    end();
}
END_TEST

/* Returns whether the memory of any tensor, a peer's or our own, is mapped. */
static bool is_memory_mapped(void)
{
    char line[512];
    bool is_mapped = false;
    FILE *maps = fopen("/proc/self/maps", "r");
    ck_assert_ptr_nonnull(maps);
    while (fgets(line, sizeof(line), maps) != NULL)
        is_mapped |= strstr(line, "memfd:tensorlane-tensor") != NULL;
    fclose(maps);
    return is_mapped;
}

/* A tensor that a program has made without a file is mapped until its reader puts it, and no longer. */
START_TEST(memory)
{
    open_both("files");
    for (unsigned i = 0; i < 3; i++) {
        struct tl_completion got = receive("made");
        ck_assert_msg(got.path == TL_PATH_MAPPED, "%s: %s", tl_path_name(got.path), got.path_reason);
        ck_assert_uint_eq(got.step, 7);
        ck_assert(tl_tensor_is_read_only(got.tensor) && is_memory_mapped());
        ck_assert(cluster_tensor_is(got.tensor, LARGE_BYTES, 3));
        if (i == 2) stop_owner();
        ck_assert(cluster_tensor_is(got.tensor, LARGE_BYTES, 3));
        tl_tensor_put(got.tensor);
        ck_assert(!is_memory_mapped());
    }
    end();
}
END_TEST

START_TEST(owner_refuses)
{
    open_both("off");
    struct tl_completion got = receive("large");
    ck_assert_msg(got.path == TL_PATH_ZERO_COPY, "%s", tl_path_name(got.path));
    ck_assert_msg(strstr(got.path_reason, "local.map") != NULL, "%s", got.path_reason);
    ck_assert(!tl_tensor_is_read_only(got.tensor));
    ck_assert(cluster_tensor_is(got.tensor, LARGE_BYTES, 2));
    tl_tensor_put(got.tensor);
    end();
}
END_TEST

static bool is_withdrawn(void)
{
    struct tl_completion got;
    enum tl_status status =
        tl_recv_wait(worker, cluster_peer(worker, 0), "large", 0, NULL, CLUSTER_SECOND / 10, &got, &error);
    tl_tensor_put(got.tensor);
    return status == TL_DEADLINE_EXCEEDED;
}

/* A mapped tensor stays valid after the end of the publication, of the owner, of its file, and of the worker that
 * received it. */
START_TEST(outlives_everything)
{
    open_both("files");
    struct tl_tensor *tensor = receive_mapped();
    ck_assert_int_eq(kill(owner, SIGUSR1), 0);
    CLUSTER_UNTIL(is_withdrawn());
    ck_assert(cluster_tensor_is(tensor, LARGE_BYTES, 2));
    stop_owner();
    CLUSTER_UNTIL(cluster_peer_info(worker, 0).state != TL_PEER_UP);
    ck_assert(cluster_tensor_is(tensor, LARGE_BYTES, 2));
    ck_assert_int_eq(unlink(temp_path("model.safetensors")), 0);
    end();
    ck_assert(cluster_tensor_is(tensor, LARGE_BYTES, 2));
    ck_assert_int_eq(tl_tensor_check(tensor, &error), TL_OK);
    tl_tensor_put(tensor);
}
END_TEST

/* A file becomes shorter while it is mapped: the process goes on and reads zeros, and tl_tensor_check says that what
 * was read before does not count. Later receives fail. */
START_TEST(file_is_cut)
{
    struct tl_completion got;
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .may_map = true};
    open_both("files");
    signal(SIGBUS, SIG_DFL);
    ck_assert_int_eq(tl_guard_mapped_files(&error), TL_OK);
    struct tl_tensor *tensor = receive_mapped();
    ck_assert_int_eq(truncate(temp_path("model.safetensors"), 8192), 0);
    ck_assert_int_eq(((const volatile uint8_t *)tl_tensor_data(tensor))[LARGE_BYTES - 1], 0);
    ck_assert_int_eq(tl_tensor_check(tensor, &error), TL_DATA_LOSS);
    ck_assert_msg(strstr(error.message, "model.safetensors") != NULL, "%s", error.message);
    ck_assert_int_eq(tl_recv_wait(worker, cluster_peer(worker, 0), "large", 0, &options, CLUSTER_LONG, &got, &error),
                     TL_DATA_LOSS);
    tl_tensor_put(tensor);
    end();
}
END_TEST

/* Receiving the same file many times opens no more descriptors. */
START_TEST(nothing_stays_open)
{
    open_both("files");
    tl_tensor_put(receive_mapped());
    unsigned count = count_descriptors();
    for (unsigned i = 0; i < 50; i++)
        tl_tensor_put(receive_mapped());
    ck_assert_uint_le(count_descriptors(), count);
    end();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("local_map");
    TCase *tcase = tcase_create("local_map");
    tcase_set_timeout(tcase, 100);
    tcase_add_test(tcase, mapped);
    tcase_add_test(tcase, memory);
    tcase_add_test(tcase, owner_refuses);
    tcase_add_test(tcase, outlives_everything);
    tcase_add_test(tcase, file_is_cut);
    tcase_add_test(tcase, nothing_stays_open);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
