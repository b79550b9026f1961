// SPDX-License-Identifier: Apache-2.0
/* What a worker reports of itself: descriptors, registered memory, paths, and a file that cannot be read.
 * integration/cli_health_test.py has what else becomes of files. */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fakes/fake_clock.h"
#include "tests/fakes/temp_folder.h"

#undef fail /* check.h has a macro of this name */
#include "server/worker_internal.h"
#include "tensor/device.h"

static struct tl_memory_stats memory;
static int64_t fake_short_ns;
static size_t breaking_count;
static struct tl_data_connection *breaking;
static unsigned lost_count;
static int eventfd_failure; /* errno; 0: none */
static char engine_memory;
static struct tl_engine *const fake_engine = (struct tl_engine *)&engine_memory;

static void fake_stats(const struct tl_engine *engine, struct tl_memory_stats *ret_stats)
{
    ck_assert_ptr_eq(engine, fake_engine);
    *ret_stats = memory;
}

#define tl_engine_get_memory_stats fake_stats
#define eventfd(count, flags) (eventfd_failure != 0 ? (errno = eventfd_failure, -1) : eventfd(count, flags))
#define tl_control_short_ns(control) ((void)(control), fake_short_ns)
#define tl_peers_find_breaking(worker, peer, connection)                                                               \
    ((void)(worker), *(peer) = NULL, *(connection) = breaking, breaking_count)
#define tl_device_count_lost(reason) (snprintf(reason, TL_DEVICE_LOST_BYTES, "gpu:3 is lost: it failed"), lost_count)
#define tl_peer_name(peer) ((void)(peer), "/job:ps/task:1")
#include "fakes/run_suite.h"
#include "server/troubles.c"

static const struct tl_transport_source source = {.name = "verbs"};
static struct tl_transport transport;
static struct tl_worker worker;
static struct tl_data_connection connection;
static struct tl_description description;
static struct tl_error error;

static void setup(void)
{
    transport.engine = fake_engine;
    worker.data_plane.transports[0] = (struct tl_transport_slot){.source = &source, .transport = &transport};
    worker.data_plane.transport_count = 1;
    connection.slot = &worker.data_plane.transports[0];
    connection.break_reason = "the cable is out";
    breaking = &connection;
    ck_assert_int_eq(tl_troubles_create(&worker, &worker.troubles, &error), TL_OK);
}

static void teardown(void)
{
    tl_description_fini(&description);
    tl_troubles_destroy(worker.troubles);
}

/* Describes the worker anew. Returns its only trouble; NULL: it has none. */
static const struct tl_trouble *only_trouble(void)
{
    tl_description_fini(&description);
    ck_assert_int_eq(tl_troubles_describe(&worker, &description, &error), TL_OK);
    ck_assert_uint_le(description.trouble_count, 1);
    return description.trouble_count > 0 ? description.troubles : NULL;
}

static void expect(const char *what, const char *reason, const char *remedy, bool breaks_transfers)
{
    const struct tl_trouble *trouble = only_trouble();
    ck_assert_ptr_nonnull(trouble);
    ck_assert_str_eq(trouble->what, what);
    ck_assert_msg(strstr(trouble->reason, reason) != NULL, "\"%s\" lacks \"%s\"", trouble->reason, reason);
    ck_assert_msg(strstr(trouble->remedy, remedy) != NULL, "\"%s\" lacks \"%s\"", trouble->remedy, remedy);
    ck_assert_int_eq(trouble->breaks_transfers, breaks_transfers);
}

START_TEST(all_is_well)
{
    look_at_memory(worker.troubles);
    ck_assert_ptr_null(only_trouble());
    /* A transport that could not be opened has no engine, and no requests. */
    worker.data_plane.transports[0].transport = NULL;
    memory.pool_waiting = 1;
    look_at_memory(worker.troubles);
    fake_clock_advance(LONG_WAIT_NS);
    look_at_memory(worker.troubles);
    ck_assert_ptr_null(only_trouble());
    worker.data_plane.transports[0].transport = &transport;
    ck_assert_ptr_null(only_trouble());
    /* A client has none. */
    struct tl_worker client = {.troubles = NULL};
    ck_assert_int_eq(tl_troubles_describe(&client, &description, &error), TL_OK);
    ck_assert_int_eq(tl_troubles_watch_file(NULL, NULL, &error), TL_OK);
}
END_TEST

START_TEST(requests_wait_for_memory)
{
    memory = (struct tl_memory_stats){.pool_waiting = 7, .pool_bytes = 64000000, .pool_used_bytes = 63000000};
    look_at_memory(worker.troubles);
    fake_clock_advance(LONG_WAIT_NS - 1);
    look_at_memory(worker.troubles);
    ck_assert_ptr_null(only_trouble());
    fake_clock_advance(1);
    expect("pool", "7 requests over verbs wait for registered memory, 63.0 MB of 64.0 MB are in use",
           "raise verbs.max_pool", false);
    memory.pool_waiting = 0;
    look_at_memory(worker.troubles);
    memory.pool_waiting = 1;
    look_at_memory(worker.troubles);
    ck_assert_ptr_null(only_trouble());
}
END_TEST

START_TEST(devices_are_lost)
{
    lost_count = 1;
    expect("device", "gpu:3 is lost: it failed", "start the worker's process anew", true);
    ck_assert_ptr_null(strstr(only_trouble()->reason, "more"));
    lost_count = 3;
    expect("device", "gpu:3 is lost: it failed (and 2 more devices)", "NVRM: Xid", true);
}
END_TEST

START_TEST(descriptors)
{
    struct rlimit limit;
    int used = open("/dev/null", O_RDONLY | O_CLOEXEC);
    while (used < 50) {
        ck_assert_int_ge(used, 0);
        used = dup(used);
    }
    close(used);
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = (rlim_t)used + 1;
    look_at_descriptors(worker.troubles);
    fake_short_ns = tl_clock_now_ns();
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    expect("descriptors", "descriptors are open, so that connections and files cannot be opened", "prlimit --pid",
           true);
    fake_clock_advance(SHORTAGE_KEPT_NS);
    expect("descriptors", "descriptors are open", "LimitNOFILE=", false);
    limit.rlim_cur = (rlim_t)used;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    expect("descriptors", "so that connections and files cannot be opened", "LimitNOFILE=", true);
    limit.rlim_cur = 1000;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    fake_short_ns = tl_clock_now_ns();
    ck_assert_ptr_null(only_trouble());
}
END_TEST

/* The limit of the process says nothing when the machine has none left. */
START_TEST(descriptors_of_the_machine)
{
    eventfd_failure = ENFILE;
    look_at_descriptors(worker.troubles);
    expect("descriptors", "the machine has no descriptors left, so that", "fs.file-max", true);
    eventfd_failure = ENOMEM;
    ck_assert_ptr_null(only_trouble());
}
END_TEST

/* Clients learn the name of a file, and not its folder, wherever the path stands in the message. */
START_TEST(file_that_cannot_be_read)
{
    const struct timespec times[2] = {{.tv_sec = 1000000000}, {.tv_sec = 1000000000}};
    struct tl_mapped_file *file = NULL;
    temp_folder_make();
    temp_write(temp_path("weights"), "hello", 5);
    ck_assert_int_eq(utimensat(AT_FDCWD, temp_path("weights"), times, 0), 0);
    ck_assert_int_eq(tl_mapped_file_open(temp_path("weights"), &file, &error), TL_OK);
    ck_assert_int_eq(tl_troubles_watch_file(worker.troubles, file, &error), TL_OK);
    ck_assert_int_eq(tl_guard_mapped_files(&error), TL_OK);
    ck_assert_int_eq(truncate(temp_path("weights"), 0), 0);
    ck_assert_int_eq(*(const volatile char *)tl_mapped_file_data(file), 0);
    ck_assert_int_eq(truncate(temp_path("weights"), 5), 0);
    ck_assert_int_eq(utimensat(AT_FDCWD, temp_path("weights"), times, 0), 0);
    look_at_files(worker.troubles);
    expect("file", "a part of weights could not be read", "publish it again", true);
    ck_assert_ptr_null(strstr(description.troubles[0].reason, temp_folder));
    ck_assert_int_eq(truncate(temp_path("weights"), 4), 0);
    look_at_files(worker.troubles);
    expect("file", "weights had 5 bytes when it was opened and has 4 now", "publish it again", true);
    ck_assert_int_eq(description.troubles[0].reason[0], 'w');
    tell_change("a part of /secret/fold", "/secret/folder/weights", error.message, sizeof(error.message));
    ck_assert_str_eq(error.message, "weights was changed, or could not be read");
    tl_mapped_file_put(file);
    temp_folder_remove();
}
END_TEST

START_TEST(paths_that_break)
{
    breaking_count = 1;
    expect("path", "the path to /job:ps/task:1 over verbs breaks again and again: the cable is out", "logs of both",
           false);
    breaking_count = 3;
    worker.data_plane.is_transport_required = true;
    expect("path", "the cable is out (and 2 more paths)", "logs of both", true);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("troubles");
    TCase *tcase = tcase_create("troubles");
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, all_is_well);
    tcase_add_test(tcase, requests_wait_for_memory);
    tcase_add_test(tcase, devices_are_lost);
    tcase_add_test(tcase, descriptors);
    tcase_add_test(tcase, descriptors_of_the_machine);
    tcase_add_test(tcase, file_that_cannot_be_read);
    tcase_add_test(tcase, paths_that_break);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
