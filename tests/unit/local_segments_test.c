// SPDX-License-Identifier: Apache-2.0
/* Segments of the local provider that cannot be mapped, or whose end the peer cannot be told at once. */
#include <check.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "dataplane/memory/pages.h"
#include "dataplane/memory/segment.h"
#include "fakes/local_sides.h"
#include "fakes/run_suite.h"

static bool is_out_of_memory; /* for what is mapped */

enum tl_status __real_tl_segment_map(int fd, uint64_t len_bytes, void **ret_address, struct tl_error *ret_error);
enum tl_status __wrap_tl_segment_map(int fd, uint64_t len_bytes, void **ret_address, struct tl_error *ret_error);

enum tl_status __wrap_tl_segment_map(int fd, uint64_t len_bytes, void **ret_address, struct tl_error *ret_error)
{
    if (is_out_of_memory) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "cannot map %d bytes", (int)len_bytes);
    return __real_tl_segment_map(fd, len_bytes, ret_address, ret_error);
}

static void setup(void)
{
    sides_set_up(NULL);
}

static struct tl_region *attach(struct side *side)
{
    struct tl_exposure exposure;
    struct tl_region *region = side_map(side, 4096);
    side_expose(side, region, region->address, 4096, &exposure);
    return region;
}

/* A message that its sender knows to have arrived is handled, although the segment behind it cannot be mapped. */
START_TEST(a_segment_that_cannot_be_mapped)
{
    struct job job = new_job();
    side_message(&b, "value", 5, &job);
    for (unsigned i = 0; i < 100 && !job.done; i++)
        side_poll(&b);
    ck_assert(job.done && job.status == TL_OK);
    ck_assert_uint_eq(a.messages, 0);
    struct tl_region *region = attach(&b);
    is_out_of_memory = true;
    PUMP_UNTIL(a.broken && b.broken);
    ck_assert_uint_eq(a.messages, 1);
    ck_assert_mem_eq(a.last, "value", 5);
    ck_assert_int_eq(a.reason.code, TL_RESOURCE_EXHAUSTED);
    is_out_of_memory = false;
    region_drop(region);
}
END_TEST

/* A ring for whose mapping this process has no memory is no fault of the peer. */
START_TEST(a_ring_that_cannot_be_mapped)
{
    side_open(&a, "a", NULL);
    side_open(&b, "b", NULL);
    side_create(&a, 16, 16, TL_KEYS_REGION);
    side_create(&b, 16, 16, TL_KEYS_REGION);
    is_out_of_memory = true;
    sides_connect();
    PUMP_UNTIL(a.broken && b.broken);
    is_out_of_memory = false;
    ck_assert_int_eq(a.reason.code, TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(a.reason.message, "cannot map"));
    ck_assert_ptr_null(strstr(a.reason.message, "protocol"));
    sides_tear_down();
}
END_TEST

/* The process can map no more when it has as much address space as it may have. The message says what to do. */
START_TEST(a_segment_beyond_the_limit_of_memory)
{
    const uint64_t len_bytes = UINT64_C(1) << 30;
    struct tl_error error;
    struct rlimit before, limit;
    void *address;
    int fd;
    ck_assert_int_eq(tl_segment_make("test", len_bytes, TL_SEGMENT_SMALL_PAGES, &fd, &address, &error), TL_OK);
    ck_assert_int_eq(getrlimit(RLIMIT_AS, &before), 0);
    limit = before;
    limit.rlim_cur = len_bytes;
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &limit), 0);
    enum tl_status status = tl_segment_map(fd, len_bytes, &address, &error);
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &before), 0);
    ck_assert_int_eq(status, TL_RESOURCE_EXHAUSTED);
    ck_assert_ptr_nonnull(strstr(error.message, "vm.max_map_count"));
    tl_pages_unmap(address, len_bytes);
    close(fd);
}
END_TEST

/* A peer that is stopped for a while unmaps afterwards what has gone meanwhile, and maps as much anew. */
START_TEST(segments_go_while_the_peer_reads_nothing)
{
    enum { COUNT = 1000 };
    static struct tl_region *regions[COUNT];
    unsigned mappings = count_mappings();
    for (unsigned round = 0; round < 2; round++) {
        for (unsigned i = 0; i < COUNT; i++) {
            regions[i] = attach(&a);
            side_message(&a, "", 0, NULL);
            PUMP_UNTIL(b.messages == round * COUNT + i + 1);
        }
        for (unsigned i = 0; i < COUNT; i++) {
            region_drop(regions[i]);
            side_poll(&a);
        }
        const int64_t end_ns = tl_clock_deadline_ns(10 * TL_NS_PER_SEC); /* a defect shows soon enough */
        PUMP_UNTIL(count_mappings() == mappings || tl_clock_remaining_ns(end_ns) == 0);
        ck_assert_uint_eq(count_mappings(), mappings);
    }
    ck_assert(!a.broken && !b.broken);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("local_segments");
    TCase *unmapped = tcase_create("unmapped"), *unread = tcase_create("unread");
    TCase *unconnected = tcase_create("unconnected");
    tcase_set_timeout(unmapped, 100);
    tcase_set_timeout(unread, 100);
    tcase_add_checked_fixture(unmapped, setup, sides_tear_down);
    tcase_add_checked_fixture(unread, setup, sides_tear_down);
    tcase_add_test(unmapped, a_segment_that_cannot_be_mapped);
    tcase_add_test(unread, segments_go_while_the_peer_reads_nothing);
    tcase_add_test(unconnected, a_ring_that_cannot_be_mapped);
    tcase_add_test(unconnected, a_segment_beyond_the_limit_of_memory);
    suite_add_tcase(suite, unmapped);
    suite_add_tcase(suite, unconnected);
    suite_add_tcase(suite, unread);
    return run_suite(suite);
}
