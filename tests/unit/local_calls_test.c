// SPDX-License-Identifier: Apache-2.0
/*
 * Which system calls the local provider makes, in which thread and of what: what a peer could make wait or take long is
 * no call of the reactor's, which is the thread of these tests.
 */
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/memfd.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "dataplane/local/local_internal.h"
#include "fakes/local_sides.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"

#define FILE_BYTES 8192

static pthread_t reactor;
static bool is_watching;   /* the reactor's calls */
static unsigned freed;     /* by it: memory that a peer may have, and what it has passed */
static unsigned sockets;   /* that have got a filter */
static unsigned open_ones; /* of those: they let through whoever guesses zeros */
static const char *put_in; /* what somebody puts where a socket has just been made; NULL: nobody does */

/* ------------------------------------------------------------------------------------ instead of the C library -- */

static bool is_watched(void)
{
    return is_watching && pthread_equal(pthread_self(), reactor) != 0;
}

int close(int fd)
{
    if (is_watched() && fcntl(fd, F_GET_SEALS) > 0) freed++;
    return (int)syscall(SYS_close, fd);
}

int munmap(void *address, size_t len_bytes)
{
    if (is_watched() && len_bytes == FILE_BYTES) freed++; /* no ring */
    return (int)syscall(SYS_munmap, address, len_bytes);
}

int setsockopt(int fd, int level, int name, const void *value, socklen_t value_bytes)
{
    if (level == SOL_SOCKET && name == SO_ATTACH_FILTER) {
        const struct sock_fprog *filter = value;
        bool has_token = false;
        for (unsigned i = 0; i < filter->len; i++)
            has_token |= BPF_CLASS(filter->filter[i].code) == BPF_JMP && filter->filter[i].k != 0;
        sockets++;
        open_ones += !has_token;
    }
    return (int)syscall(SYS_setsockopt, fd, level, name, value, value_bytes);
}

int bind(int fd, const struct sockaddr *address, socklen_t address_bytes)
{
    int error = (int)syscall(SYS_bind, fd, address, address_bytes);
    const char *path = ((const struct sockaddr_un *)(const void *)address)->sun_path;
    if (error == 0 && put_in != NULL && path[0] != '\0') ck_assert(unlink(path) == 0 && symlink(put_in, path) == 0);
    return error;
}

/* ----------------------------------------------------------------------------------------------------- freeing -- */

static void setup(void)
{
    reactor = pthread_self();
    sides_set_up(NULL);
}

static void teardown(void)
{
    is_watching = false;
    sides_tear_down();
}

static int make_memory(void)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert(fd >= 0 && ftruncate(fd, FILE_BYTES) == 0);
    ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    return fd;
}

static bool pass(const void *packet, size_t len_bytes)
{
    int fd = make_memory();
    bool is_passed = local_send_counted(local_pair_of(a.pair), packet, len_bytes, fd);
    (void)syscall(SYS_close, fd);
    return is_passed;
}

static bool pass_file(uint64_t number)
{
    const struct local_file_packet packet = {.kind = LOCAL_PACKET_FILE, .number = number, .size_bytes = FILE_BYTES};
    return pass(&packet, sizeof(packet));
}

/* A peer that has died leaves all of its pages to whoever closes last. The descriptor is closed as soon as the peer has
 * it. */
START_TEST(segments_that_are_given_up)
{
    struct tl_exposure exposure = {0};
    unsigned descriptors = count_descriptors();
    struct tl_region *region = side_map(&a, 8 * MIB);
    is_watching = true;
    side_expose(&a, region, region->address, 8 * MIB, &exposure);
    side_message(&a, &exposure.descriptor, sizeof(exposure.descriptor), NULL);
    PUMP_UNTIL(b.messages == 1 && count_descriptors() == descriptors);
    ck_assert_uint_eq(local_pair_of(b.pair)->mapped_count, 1);
    is_watching = false;
    region_drop(region);
    is_watching = true;
    PUMP_UNTIL(local_pair_of(b.pair)->mapped_count == 0);
    ck_assert_uint_eq(freed, 0);
}
END_TEST

START_TEST(files_that_are_forgotten)
{
    is_watching = true;
    for (uint64_t number = 1; number <= LOCAL_FILES + 3; number++) {
        ck_assert(pass_file(number));
        side_message(&a, "", 0, NULL);
        PUMP_UNTIL(b.messages == number);
    }
    ck_assert_uint_eq(freed, 0);
}
END_TEST

/* 0: a file with a number that was there before; 1: a segment out of turn. */
START_TEST(what_comes_out_of_order)
{
    const struct local_segment_packet segment = {.kind = LOCAL_PACKET_ATTACH, .number = 2, .len_bytes = FILE_BYTES};
    if (_i == 0) {
        ck_assert(pass_file(1));
        side_message(&a, "", 0, NULL);
        PUMP_UNTIL(b.messages == 1);
    }
    const struct local_pair *pair = local_pair_of(b.pair);
    is_watching = true;
    ck_assert(_i == 0 ? pass_file(1) : pass(&segment, sizeof(segment)));
    PUMP_UNTIL(pair->is_distrusted);
    ck_assert_uint_eq(freed, 0);
    is_watching = false;
    PUMP_UNTIL(a.drained && b.drained);
    ck_assert_ptr_nonnull(strstr(b.reason.message, "broken the protocol"));
}
END_TEST

/* ---------------------------------------------------------------------------------------------- accept sockets -- */

START_TEST(every_accept_socket_has_a_token)
{
    struct side side;
    side_open(&side, "side", NULL);
    side_create(&side, 16, 16, TL_KEYS_REGION);
    side_close(&side);
    ck_assert_uint_ge(sockets, 2);
    ck_assert_uint_eq(open_ones, 0);
}
END_TEST

/* Somebody who may write to the folder puts a link where an accept socket has just been made. */
START_TEST(links_instead_of_sockets)
{
    struct stat info;
    struct tl_error error;
    struct tl_provider *provider = NULL;
    temp_folder_make();
    const char *file = temp_path("file");
    const struct tl_local_options options = {.socket_folder = temp_folder};
    temp_write(file, "x", 1);
    ck_assert_int_eq(chmod(file, 0640), 0);
    put_in = file;
    enum tl_status status = tl_local_open(&options, &provider, &error);
    put_in = NULL;
    ck_assert_int_eq(stat(file, &info), 0);
    ck_assert_uint_eq(info.st_mode & 0777, 0640);
    ck_assert_int_ne(status, TL_OK);
    ck_assert_ptr_nonnull(strstr(error.message, "local.socket_folder"));
    temp_folder_remove();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("local_calls");
    TCase *tcase = tcase_create("local_calls");
    tcase_set_timeout(tcase, 100);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, segments_that_are_given_up);
    tcase_add_test(tcase, files_that_are_forgotten);
    tcase_add_loop_test(tcase, what_comes_out_of_order, 0, 2);
    tcase_add_test(tcase, every_accept_socket_has_a_token);
    tcase_add_test(tcase, links_instead_of_sockets);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
