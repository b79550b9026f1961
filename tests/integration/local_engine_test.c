// SPDX-License-Identifier: Apache-2.0
/* Two engines that exchange tensors over local providers: what arrives, over which path, and what stays open or
 * mapped. */
#include <check.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "dataplane/local/local_internal.h"
#include "dataplane/memory/pages.h"
#include "fakes/engine_case.h"
#include "fakes/local_sides.h"
#include "fakes/run_suite.h"

#define LARGE_BYTES (UINT64_C(9) << 20)
#define LAP_BYTES (UINT64_C(512) << 10)

static struct tl_local_options local_options;
static unsigned descriptors;

static struct tl_provider *open_local(const char *name)
{
    struct tl_provider *provider;
    (void)name;
    TL_CHECK(tl_local_open(&local_options, &provider, NULL) == TL_OK);
    return provider;
}

static bool is_at_work(const struct tl_provider *provider)
{
    TL_LIST_FOREACH(&local_provider_of(provider)->pairs, link)
    if (local_pair_is_reading(TL_CONTAINER_OF(link, struct local_pair, link))) return true;
    return false;
}

static void setup(void)
{
    local_options = (struct tl_local_options){0};
    engine_pair_defaults(&options);
    options.open_provider = open_local;
    options.is_at_work = is_at_work;
    options.engine.keys = TL_KEYS_REGION;
    options.engine.peer_timeout_ns = options.engine.cancel_ns = 20 * TL_NS_PER_SEC;
    descriptors = count_descriptors();
}

static void close_pair(void)
{
    int64_t until_ns = tl_clock_now_ns() + PATIENCE_NS;
    engine_pair_close(&pair);
    /* Threads that are still closing and unmapping finish soon. */
    while ((count_descriptors() != descriptors || count_mappings() != 0) && tl_clock_now_ns() < until_ns)
        usleep(1000);
    ck_assert_uint_eq(count_descriptors(), descriptors);
    ck_assert_uint_eq(count_mappings(), 0);
}

static void fetch(const char *key, uint64_t step)
{
    engine_ask_start(asker, &ask, key, step);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
}

static void expect(uint64_t size_bytes, uint64_t seed, enum tl_path path)
{
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert(engine_is_bytes(ask.fetch.destination, size_bytes, seed));
    ck_assert_int_eq(ask.fetch.path, path);
    engine_ask_fini(&ask);
}

/* ----------------------------------------------------------------------------------------------- into the pool -- */

/* The sources are ordinary memory: none of them is registered or copied. */
START_TEST(into_the_pool)
{
    static const uint64_t sizes[] = {1, 8, 1000, 65536, 1 << 20, LARGE_BYTES};
    open_pair();
    for (uint64_t step = 1; step <= 3; step++) {
        for (unsigned i = 0; i < TL_ARRAY_COUNT(sizes); i++) {
            char key[16];
            snprintf(key, sizeof(key), "key %u", i);
            engine_side_send(owner, key, step, engine_bytes(sizes[i], step + i));
            fetch(key, step);
            expect(sizes[i], step + i, TL_PATH_ZERO_COPY);
        }
    }
    ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced + engine_side_stats(owner).bytes_bounced, 0);
    ck_assert_uint_eq(engine_side_memory(asker).registrations + engine_side_memory(owner).registrations, 0);
    ck_assert_uint_eq(engine_side_values(owner), 0);
    close_pair();
}
END_TEST

START_TEST(in_both_directions_at_once)
{
    enum { COUNT = 40 };
    static struct engine_ask asks[2][COUNT];
    open_pair();
    for (unsigned i = 0; i < COUNT; i++) {
        for (unsigned j = 0; j < 2; j++) {
            char key[16];
            snprintf(key, sizeof(key), "key %u", i);
            asks[j][i] = (struct engine_ask){.is_open = false};
            engine_side_send(&pair.sides[1 - j], key, 1, engine_bytes(i * 4001 + 1, i + j));
            engine_ask_start(&pair.sides[j], &asks[j][i], key, 1);
        }
    }
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++) {
        for (unsigned j = 0; j < 2; j++) {
            ck_assert_msg(asks[j][i].result.code == TL_OK, "%s", asks[j][i].result.message);
            ck_assert(engine_is_bytes(asks[j][i].fetch.destination, i * 4001 + 1, i + j));
            engine_ask_fini(&asks[j][i]);
        }
    }
    close_pair();
}
END_TEST

START_TEST(strings_and_values_without_bytes)
{
    const uint64_t dims[] = {2};
    const struct tl_string texts[] = {{"first", 5}, {"and the second one", 18}};
    struct tl_tensor *strings, *dead, *empty;
    ck_assert_int_eq(tl_tensor_create_strings(1, dims, texts, &strings, NULL), TL_OK);
    ck_assert_int_eq(tl_tensor_create_dead(&dead, NULL), TL_OK);
    ck_assert_int_eq(tl_tensor_create(TL_U8, 1, &(uint64_t){0}, &empty, NULL), TL_OK);
    open_pair();
    engine_side_send(owner, "strings", 1, strings);
    fetch("strings", 1);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert_int_eq(ask.fetch.path, TL_PATH_SERIALIZED);
    engine_ask_fini(&ask);
    engine_side_send(owner, "dead", 1, dead);
    fetch("dead", 1);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert(tl_tensor_meta_data(ask.fetch.destination)->is_dead);
    engine_ask_fini(&ask);
    engine_side_send(owner, "empty", 1, empty);
    fetch("empty", 1);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert_int_eq(ask.fetch.path, TL_PATH_NONE);
    engine_ask_fini(&ask);
    close_pair();
}
END_TEST

START_TEST(with_a_checksum)
{
    open_pair();
    ask.wants_checksum = true;
    engine_side_send(owner, "key", 1, engine_bytes(LARGE_BYTES, 1));
    fetch("key", 1);
    ck_assert(ask.fetch.is_verified);
    expect(LARGE_BYTES, 1, TL_PATH_ZERO_COPY);
    close_pair();
}
END_TEST

/* -------------------------------------------------------------------------------------- into the user's memory -- */

/* The receiver reads large tensors; small ones go through the pool. */
START_TEST(into_memory_of_users)
{
    static const struct {
        uint64_t size_bytes;
        enum tl_path path;
    } sizes[] = {{100, TL_PATH_BOUNCE}, {1 << 20, TL_PATH_ZERO_COPY}, {LARGE_BYTES, TL_PATH_ZERO_COPY}};
    open_pair();
    for (unsigned i = 0; i < TL_ARRAY_COUNT(sizes); i++) {
        ask.destination = engine_bytes(sizes[i].size_bytes, 0);
        engine_side_send(owner, "key", i + 1, engine_bytes(sizes[i].size_bytes, i));
        fetch("key", i + 1);
        expect(sizes[i].size_bytes, i, sizes[i].path);
    }
    ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced, 100);
    ck_assert_uint_eq(engine_side_stats(owner).bytes_bounced, 0);
    struct tl_local_stats stats;
    tl_local_get_stats(asker->provider, &stats);
    ck_assert_uint_eq(stats.bytes_read, (1 << 20) + LARGE_BYTES);
    close_pair();
}
END_TEST

/* Both sides copy large values in pieces through a small part of the pool, which is used again and again. */
START_TEST(into_memory_of_users_in_laps)
{
    local_options.is_reading_forbidden = _i == 1;
    options.engine.copy_bytes = LAP_BYTES;
    open_pair();
    uint64_t copied_bytes = 0;
    for (uint64_t i = 0; i < 24; i++) {
        uint64_t size_bytes = LAP_BYTES + 1 + i * i * 12345;
        struct tl_tensor *destination = engine_bytes(size_bytes + 40, 0);
        const struct tl_meta_data meta_data = {
            .dtype = TL_U8, .shape = {.rank = 1, .dims = {size_bytes}}, .size_bytes = size_bytes};
        /* It begins and ends within a cache line. */
        ck_assert_int_eq(tl_tensor_create_view(destination, &meta_data, i, false, &ask.destination, NULL), TL_OK);
        tl_tensor_put(destination);
        engine_side_send(owner, "key", i + 1, engine_bytes(size_bytes, i));
        fetch("key", i + 1);
        expect(size_bytes, i, TL_PATH_BOUNCE);
        copied_bytes += size_bytes;
    }
    ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced, copied_bytes);
    ck_assert_uint_eq(engine_side_memory(asker).pool_used_bytes, 0);
    close_pair();
}
END_TEST

START_TEST(where_reading_is_forbidden)
{
    local_options.is_reading_forbidden = true;
    open_pair();
    ask.destination = engine_bytes(LARGE_BYTES, 0);
    engine_side_send(owner, "key", 1, engine_bytes(LARGE_BYTES, 1));
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    ck_assert_ptr_nonnull(strstr(ask.fetch.path_reason, "local.process_vm"));
    expect(LARGE_BYTES, 1, TL_PATH_BOUNCE);
    ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced, LARGE_BYTES);
    close_pair();
}
END_TEST

/* -------------------------------------------------------------------------------------------------------- ends -- */

/* A fetch into the pool or into the user's memory is cancelled after each number of rounds until it is complete. */
START_TEST(cancelled_in_the_middle)
{
    options.engine.copy_bytes = _i == 1 ? LAP_BYTES : 0;
    open_pair();
    unsigned given_up = 0;
    for (unsigned i = 0; i < 30; i++) {
        engine_side_send(owner, "key", i + 1, engine_bytes(LARGE_BYTES, i));
        if (i % 2 == 1) ask.destination = engine_bytes(LARGE_BYTES, 99);
        engine_ask_start(asker, &ask, "key", i + 1);
        for (unsigned j = 0; j < i; j++) {
            (void)engine_side_round(asker);
            (void)engine_side_round(owner);
        }
        engine_ask_cancel(&ask);
        engine_pair_run(&pair);
        ck_assert_uint_eq(ask.done_count, 1);
        if (ask.result.code == TL_OK) {
            expect(LARGE_BYTES, i, _i == 1 && i % 2 == 1 ? TL_PATH_BOUNCE : TL_PATH_ZERO_COPY);
            continue;
        }
        ck_assert_int_eq(ask.result.code, TL_CANCELLED);
        given_up++;
        engine_ask_fini(&ask);
        fetch("key", i + 1); /* the next receiver gets the value */
        expect(LARGE_BYTES, i, TL_PATH_ZERO_COPY);
    }
    ck_assert_uint_gt(given_up, 0);
    ck_assert_uint_eq(engine_side_values(owner), 0);
    close_pair();
}
END_TEST

/* The connection ends during a fetch: the value is kept for its receiver, and the peer cannot write to the destination
 * any more. */
START_TEST(broken_in_the_middle)
{
    struct tl_error reason;
    options.engine.copy_bytes = _i == 1 ? LAP_BYTES : 0;
    for (unsigned i = 0; i < 12; i++) {
        open_pair();
        tl_error_set(&reason, TL_UNAVAILABLE, "the test ends it");
        engine_side_send(owner, "key", 1, engine_bytes(LARGE_BYTES, i));
        if (i % 3 == 2) ask.destination = engine_bytes(LARGE_BYTES, 99);
        engine_ask_start(asker, &ask, "key", 1);
        for (unsigned j = 0; j < 2 * i; j++) {
            (void)engine_side_round(asker);
            (void)engine_side_round(owner);
        }
        struct engine_side *side = i % 2 == 0 ? asker : owner;
        if (side->conn != NULL) tl_conn_close(side->conn, &reason);
        engine_pair_run(&pair);
        ck_assert_uint_eq(ask.done_count, 1);
        ck_assert_uint_eq(asker->closed_count, 1);
        ck_assert_uint_eq(owner->closed_count, 1);
        if (ask.result.code == TL_OK) {
            ck_assert(engine_is_bytes(ask.fetch.destination, LARGE_BYTES, i));
        } else {
            ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
            ck_assert(ask.destination != NULL || ask.fetch.destination == NULL);
            ck_assert_uint_eq(engine_side_values(owner), 1);
        }
        engine_ask_fini(&ask);
        close_pair();
    }
}
END_TEST

START_TEST(a_received_tensor_outlives_everything)
{
    open_pair();
    engine_side_send(owner, "key", 1, engine_bytes(LARGE_BYTES, 1));
    fetch("key", 1);
    struct tl_tensor *kept = tl_tensor_get(ask.fetch.destination);
    expect(LARGE_BYTES, 1, TL_PATH_ZERO_COPY);
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "the test ends it");
    tl_conn_close(asker->conn, &reason);
    engine_pair_run(&pair);
    ck_assert(engine_is_bytes(kept, LARGE_BYTES, 1));
    tl_tensor_put(kept);
    close_pair();
}
END_TEST

/* The receiver keeps many tensors. With regions of the pool's first size these would need more regions than a peer may
 * map and, with one descriptor for each, more descriptors than this process may have open. */
START_TEST(more_regions_than_a_process_has_descriptors)
{
    enum { COUNT = 1500, AT_ONCE = 60, DESCRIPTORS = 128 };
    static struct engine_ask asks[COUNT];
    struct rlimit limit;
    options.engine.peer_memory.pool_bytes = TL_PAGE_BYTES;
    open_pair();
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = DESCRIPTORS;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    for (unsigned i = 0; i < COUNT; i++) {
        asks[i] = (struct engine_ask){.is_open = false};
        engine_side_send(owner, "key", i, engine_bytes(TL_PAGE_BYTES, i));
        engine_ask_start(asker, &asks[i], "key", i);
        if (i % AT_ONCE == 0 || i == COUNT - 1) engine_pair_run(&pair);
    }
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert_uint_eq(asks[i].done_count, 1);
        ck_assert_msg(asks[i].result.code == TL_OK, "%u: %s", i, asks[i].result.message);
        ck_assert(engine_is_bytes(asks[i].fetch.destination, TL_PAGE_BYTES, i));
    }
    ck_assert_uint_gt(engine_side_memory(asker).pool_regions, DESCRIPTORS);
    ck_assert_uint_lt(engine_side_memory(asker).pool_regions, LOCAL_MAX_POOL_REGIONS);
    for (unsigned i = 0; i < COUNT; i++)
        engine_ask_fini(&asks[i]);
    close_pair();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("local_engine");
    TCase *tcase = tcase_create("local_engine");
    tcase_set_timeout(tcase, 100);
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, into_the_pool);
    tcase_add_test(tcase, in_both_directions_at_once);
    tcase_add_test(tcase, strings_and_values_without_bytes);
    tcase_add_test(tcase, with_a_checksum);
    tcase_add_test(tcase, into_memory_of_users);
    tcase_add_loop_test(tcase, into_memory_of_users_in_laps, 0, 2);
    tcase_add_test(tcase, where_reading_is_forbidden);
    tcase_add_loop_test(tcase, cancelled_in_the_middle, 0, 2);
    tcase_add_loop_test(tcase, broken_in_the_middle, 0, 2);
    tcase_add_test(tcase, a_received_tensor_outlives_everything);
    tcase_add_test(tcase, more_regions_than_a_process_has_descriptors);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
