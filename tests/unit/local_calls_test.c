// SPDX-License-Identifier: Apache-2.0
/*
 * Which system calls the local provider makes, and in which thread. The reactor's thread, which is the thread of these
 * tests, must not unmap memory that a peer has passed: the process that unmaps memory last frees all of its pages,
 * which takes long.
 */
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/memfd.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "dataplane/local/local_internal.h"
#include "fakes/local_sides.h"
#include "fakes/run_suite.h"

#define FILE_BYTES 8192
#define SEGMENT_BYTES (8 * MIB)

static pthread_t reactor;
static bool is_watching;   /* the calls of the reactor's thread are watched */
static unsigned freed;     /* number of unmapped memories that a peer has passed */
static unsigned sockets;   /* number of sockets that have got a filter */
static unsigned open_ones; /* number of those that pass a token of zeros */

/* ------------------------------------------------------------------------------------ instead of the C library -- */

static bool is_watched(void)
{
    return pthread_equal(pthread_self(), reactor) != 0 && is_watching;
}

int munmap(void *address, size_t len_bytes)
{
    /* No ring has one of these sizes. */
    if (is_watched() && (len_bytes == FILE_BYTES || len_bytes == SEGMENT_BYTES)) freed++;
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

/* The owner closes the descriptor of a segment as soon as the peer has it. The peer unmaps a segment that is given up,
 * but not on the reactor's thread. */
START_TEST(segments_that_are_given_up)
{
    struct tl_exposure exposure = {0};
    unsigned descriptors = count_descriptors();
    struct tl_region *region = side_map(&a, SEGMENT_BYTES);
    is_watching = true;
    side_expose(&a, region, region->address, SEGMENT_BYTES, &exposure);
    side_message(&a, &exposure.descriptor, sizeof(exposure.descriptor), NULL);
    PUMP_UNTIL(b.messages == 1 && count_descriptors() == descriptors);
    ck_assert_uint_eq(local_pair_of(b.pair)->mappings.count, 1);
    is_watching = false;
    region_drop(region);
    is_watching = true;
    PUMP_UNTIL(local_pair_of(b.pair)->mappings.count == 0);
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

int main(void)
{
    Suite *suite = suite_create("local_calls");
    TCase *tcase = tcase_create("local_calls");
    tcase_set_timeout(tcase, 100);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, segments_that_are_given_up);
    tcase_add_test(tcase, files_that_are_forgotten);
    tcase_add_test(tcase, every_accept_socket_has_a_token);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
