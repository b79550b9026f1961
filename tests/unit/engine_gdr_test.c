// SPDX-License-Identifier: Apache-2.0
/*
 * Tensors that the receiver reads: how they come, what is written instead where nothing can be read, and what
 * TensorFlow's gdr transport got wrong, one test (gNN_) for each defect of the list that they were collected in. For
 * each of these tests tests/defects/ has a patch that puts the defect into this code; tests/defects/run shows that the
 * test then fails.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/clock.h"
#include "base/error.h"
#include "dataplane/engine/request_internal.h"
#include "fakes/engine_case.h"
#include "fakes/fake_clock.h"
#include "fakes/run_suite.h"

#define SIZE_BYTES 5000
#define READ_REASON "read from the memory of its owner"

static void setup(void)
{
    engine_pair_defaults(&options);
    options.engine.is_reading = true;
    options.engine.register_bytes = 1000;
}

static void fetch(const char *key, uint64_t step)
{
    engine_ask_start(asker, &ask, key, step);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
}

/* Receives what was sent under this step, and returns how. */
static enum tl_path receive(uint64_t step, uint64_t size_bytes)
{
    fetch("key", step);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert(engine_is_bytes(ask.fetch.destination, size_bytes, step));
    ck_assert_int_eq(owner->last_end, TL_SERVE_RECEIVED);
    return ask.fetch.path;
}

static struct fake_counters counters_of(const struct engine_side *side)
{
    struct fake_counters counters;
    fake_provider_get_counters(side->provider, &counters);
    return counters;
}

/* Returns how many reads the asker has made, without that of its handshake. */
static uint64_t reads(void)
{
    return counters_of(asker).reads - 1;
}

static void close_quiet(void)
{
    const char *why = "";
    ck_assert_msg(fake_fabric_is_quiet(pair.fabric, &why), "%s", why);
    engine_pair_close(&pair);
}

/* ------------------------------------------------------------------------------------------------- how they come -- */

/* It costs a message each way, a read, and a write without bytes. */
START_TEST(one_read_and_one_release)
{
    open_pair();
    struct fake_counters before[2] = {counters_of(asker), counters_of(owner)};
    uint64_t sent_bytes = engine_side_stats(owner).bytes_sent;
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 1));
    ck_assert_int_eq(receive(1, SIZE_BYTES), TL_PATH_ZERO_COPY);
    ck_assert_str_eq(ask.fetch.path_reason, READ_REASON);
    struct fake_counters after[2] = {counters_of(asker), counters_of(owner)};
    ck_assert_uint_eq(after[0].messages - before[0].messages, 1);
    ck_assert_uint_eq(after[1].messages - before[1].messages, 1);
    ck_assert_uint_eq(after[0].reads - before[0].reads, 1);
    ck_assert_uint_eq(after[0].read_bytes - before[0].read_bytes, SIZE_BYTES);
    ck_assert_uint_eq(after[0].immediates - before[0].immediates, 1);
    ck_assert_uint_eq(after[0].write_bytes - before[0].write_bytes, 0);
    ck_assert_uint_eq(after[1].writes - before[1].writes, 0);
    ck_assert_uint_eq(after[0].exposures - before[0].exposures, 0); /* REQUEST exposes nothing. */
    ck_assert_uint_eq(after[1].exposures - before[1].exposures, 1);
    ck_assert_uint_eq(engine_side_stats(owner).bytes_sent - sent_bytes, SIZE_BYTES);
    ck_assert_uint_eq(engine_side_values(owner), 0);
    engine_ask_fini(&ask);
    close_quiet();
}
END_TEST

START_TEST(in_pieces)
{
    options.engine.piece_bytes = 700;
    open_pair();
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 1));
    ck_assert_int_eq(receive(1, SIZE_BYTES), TL_PATH_ZERO_COPY);
    ck_assert_uint_eq(reads(), 8);
    engine_ask_fini(&ask);
    close_quiet();
}
END_TEST

/* The owner registers its memory, and the asker too. */
START_TEST(memory_of_users)
{
    open_pair();
    engine_side_send(owner, "key", 1, engine_bytes(SIZE_BYTES, 1));
    ask.is_unregistered = true;
    ck_assert_int_eq(receive(1, SIZE_BYTES), TL_PATH_ZERO_COPY);
    ck_assert_uint_eq(engine_side_memory(owner).registrations, 1);
    ck_assert_uint_eq(engine_side_memory(asker).registrations, 1);
    engine_ask_fini(&ask);
    close_quiet();
}
END_TEST

/* Memory that is too small to be registered, and memory that cannot be, is read from the pool. */
START_TEST(copied_at_the_owner)
{
    const uint64_t size_bytes = _i == 0 ? 500 : SIZE_BYTES;
    open_pair();
    const struct fake_rule rule = {.fault = FAKE_REGION_FAILURE, .provider = owner->provider, .times = FAKE_ALWAYS};
    if (_i == 1) fake_fabric_add_rule(pair.fabric, &rule);
    engine_side_send(owner, "key", 1, engine_bytes(size_bytes, 1));
    ck_assert_int_eq(receive(1, size_bytes), TL_PATH_BOUNCE);
    ck_assert_str_eq(ask.fetch.path_reason, "copied by the owner");
    ck_assert_uint_eq(engine_side_stats(owner).bytes_bounced, size_bytes);
    ck_assert_uint_eq(reads(), 1);
    engine_ask_fini(&ask);
    close_quiet();
}
END_TEST

START_TEST(copied_on_both_sides)
{
    options.engine.is_bounce_forced = true;
    options.engine.piece_bytes = 900;
    open_pair();
    engine_side_send(owner, "key", 1, engine_bytes(SIZE_BYTES, 1));
    ck_assert_int_eq(receive(1, SIZE_BYTES), TL_PATH_BOUNCE);
    ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced, SIZE_BYTES);
    engine_ask_fini(&ask);
    close_quiet();
}
END_TEST

/* A file that may change is copied, and its checks come before SOURCE. */
START_TEST(file_that_may_change)
{
    open_pair();
    engine_side_publish(owner, "key", 1, engine_file_bytes(SIZE_BYTES, 1));
    ck_assert_int_eq(receive(1, SIZE_BYTES), TL_PATH_BOUNCE);
    engine_ask_fini(&ask);
    close_quiet();
}
END_TEST

START_TEST(checksum)
{
    open_pair();
    ask.wants_checksum = true;
    if (_i == 1) fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_CORRUPT, .kinds = FAKE_READ});
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, 3 * PUMP_BYTES / 16, 1));
    fetch("key", 1);
    ck_assert_int_eq(ask.result.code, _i == 0 ? TL_OK : TL_DATA_LOSS);
    if (_i == 0) ck_assert(ask.fetch.is_verified);
    engine_ask_fini(&ask);
    close_quiet();
}
END_TEST

START_TEST(values_without_bytes_and_statuses)
{
    struct tl_tensor *dead;
    open_pair();
    ck_assert_int_eq(tl_tensor_create_dead(&dead, NULL), TL_OK);
    engine_side_send(owner, "key", 1, dead);
    fetch("key", 1);
    ck_assert(ask.result.code == TL_OK && tl_tensor_is_dead(ask.fetch.destination));
    engine_ask_fini(&ask);
    engine_side_refuse(owner, "key", TL_ABORTED, "out of luck", true);
    fetch("key", 2);
    ck_assert_int_eq(ask.result.code, TL_ABORTED);
    engine_ask_fini(&ask);
    ck_assert_uint_eq(reads(), 0);
    close_quiet();
}
END_TEST

START_TEST(step_of_a_published_value)
{
    open_pair();
    engine_side_publish(owner, "key", 7, engine_pool_bytes(owner, SIZE_BYTES, 7));
    fetch("key", 0);
    ck_assert_int_eq(ask.result.code, TL_OK);
    ck_assert_uint_eq(ask.fetch.offer_step, 7);
    engine_ask_fini(&ask);
    close_quiet();
}
END_TEST

/* More sources than there are windows wait for each other. */
START_TEST(more_sources_than_windows)
{
    enum { COUNT = 20 };
    static struct engine_ask asks[COUNT];
    options.engine.work_count = 16;
    open_pair();
    const struct fake_rule scarce = {.fault = FAKE_EXPOSE_FAILURE, .provider = owner->provider, .from = 3, .times = 9};
    fake_fabric_add_rule(pair.fabric, &scarce);
    for (unsigned i = 0; i < COUNT; i++) {
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, SIZE_BYTES, i));
        engine_ask_start(asker, &asks[i], "key", i);
    }
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert_int_eq(asks[i].result.code, TL_OK);
        ck_assert(engine_is_bytes(asks[i].fetch.destination, SIZE_BYTES, i));
        engine_ask_fini(&asks[i]);
    }
    close_quiet();
}
END_TEST

/* ----------------------------------------------------------------------------------------------- written instead -- */

static void expect_written(const char *reason)
{
    uint64_t before = reads();
    for (uint64_t step = 1; step <= 2; step++) {
        engine_side_send(owner, "key", step, engine_pool_bytes(owner, SIZE_BYTES, step));
        ck_assert_int_eq(receive(step, SIZE_BYTES), TL_PATH_ZERO_COPY);
        ck_assert_str_eq(ask.fetch.path_reason, reason);
        engine_ask_fini(&ask);
    }
    ck_assert_uint_eq(reads(), before);
}

START_TEST(written_under_keys_of_regions)
{
    options.engine.keys = TL_KEYS_REGION;
    open_pair();
    expect_written("written: the fabric does not read");
    close_quiet();
}
END_TEST

START_TEST(written_where_the_provider_does_not_read)
{
    options.provider.has_no_reads = true;
    open_pair();
    expect_written("written: the fabric does not read");
    close_quiet();
}
END_TEST

/* The probe of the card has found that it does not read. */
START_TEST(written_where_the_card_does_not_read)
{
    engine_pair_init(&pair, &options);
    asker = pair.left;
    owner = pair.right;
    ask = (struct engine_ask){.is_open = false};
    asker->provider->read_failure = "a probe read failed: it came to nothing";
    engine_pair_connect(&pair);
    engine_pair_run(&pair);
    expect_written("a probe read failed: it came to nothing");
    ck_assert_uint_eq(counters_of(asker).reads, 0);
    close_quiet();
}
END_TEST

/* A path on which nothing can be read is noticed before a tensor depends on it. */
START_TEST(handshake_tries_a_read)
{
    static const struct {
        enum fake_fault fault;
        const char *words;
    } ways[] = {
        {FAKE_BREAK, "a read of its memory does not: "},
        {FAKE_DROP, "a read of its memory does not: its bytes do not come; set protocol to grpc+verbs"},
        {FAKE_CORRUPT, "a read of its memory through left has delivered wrong bytes"},
    };
    engine_pair_init(&pair, &options);
    asker = pair.left;
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = ways[_i].fault, .kinds = FAKE_READ});
    engine_pair_connect(&pair);
    engine_pair_run(&pair);
    fake_clock_advance(2 * options.engine.connect_ns);
    engine_pair_run(&pair);
    ck_assert_uint_eq(asker->up_count, 0);
    ck_assert_uint_eq(asker->closed_count, 1);
    ck_assert_int_ne(asker->reason.code, TL_OK);
    ck_assert_msg(strstr(asker->reason.message, ways[_i].words) != NULL, "%s", asker->reason.message);
    engine_pair_close(&pair);
}
END_TEST

/* No window can be had at all. The value is kept, and written. */
START_TEST(written_where_nothing_can_be_shown)
{
    open_pair();
    const struct fake_rule none = {.fault = FAKE_EXPOSE_FAILURE, .provider = owner->provider, .times = FAKE_ALWAYS};
    fake_fabric_add_rule(pair.fabric, &none);
    ask.wants_checksum = true;
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 1));
    ck_assert_int_eq(receive(1, SIZE_BYTES), TL_PATH_ZERO_COPY);
    ck_assert_str_eq(ask.fetch.path_reason, "written by its owner, which could not show its memory");
    engine_ask_fini(&ask);
    close_quiet();
}
END_TEST

/* Memory that cannot be registered, and for which the pool is too small, is written in pieces. */
START_TEST(written_where_the_pool_is_too_small)
{
    const uint64_t size_bytes = 400000;
    open_pair();
    pair.left->engine->options.register_bytes = 1;
    const struct fake_rule rule = {.fault = FAKE_REGION_FAILURE, .provider = owner->provider, .times = FAKE_ALWAYS};
    fake_fabric_add_rule(pair.fabric, &rule);
    struct tl_tensor *full[64];
    unsigned count = 0;
    const struct tl_meta_data block = {.dtype = TL_U8, .shape = {.rank = 1, .dims = {100000}}, .size_bytes = 100000};
    while (count < 64 && tl_memory_tensor_take(owner->memory, &block, NULL, &full[count], NULL) == TL_OK)
        count++;
    ck_assert(count > 3 && count < 64);
    for (unsigned i = 0; i < 3; i++)
        tl_tensor_put(full[--count]);
    engine_side_send(owner, "key", 1, engine_bytes(size_bytes, 1));
    ck_assert_int_eq(receive(1, size_bytes), TL_PATH_BOUNCE);
    ck_assert_uint_eq(reads(), 0);
    engine_ask_fini(&ask);
    while (count > 0)
        tl_tensor_put(full[--count]);
    close_quiet();
}
END_TEST

/* A card that has lost its windows wakes all that wait for one, not the first only. */
START_TEST(written_where_no_window_comes_back)
{
    enum { COUNT = 4 };
    static struct engine_ask asks[COUNT];
    open_pair();
    const struct fake_rule lost = {
        .fault = FAKE_EXPOSE_FAILURE, .provider = owner->provider, .from = 2, .times = FAKE_ALWAYS};
    fake_fabric_add_rule(pair.fabric, &lost);
    for (unsigned i = 0; i < COUNT; i++) {
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, SIZE_BYTES, i));
        engine_ask_start(asker, &asks[i], "key", i);
    }
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert_uint_eq(asks[i].done_count, 1);
        ck_assert_int_eq(asks[i].result.code, TL_OK);
        engine_ask_fini(&asks[i]);
    }
    ck_assert_uint_eq(reads(), 1);
    close_quiet();
}
END_TEST

/* Takes so many bytes of the pool, or all. Returns how many blocks that are. */
static unsigned take(struct engine_side *side, uint64_t most_bytes, struct tl_tensor **blocks, unsigned most)
{
    unsigned count = 0;
    for (uint64_t size_bytes = 1 << 20; size_bytes >= 64; size_bytes /= 2) {
        const struct tl_meta_data bytes = {
            .dtype = TL_U8, .shape = {.rank = 1, .dims = {size_bytes}}, .size_bytes = size_bytes};
        while (most_bytes >= size_bytes &&
               tl_memory_tensor_take(side->memory, &bytes, NULL, &blocks[count], NULL) == TL_OK) {
            ck_assert_uint_lt(++count, most);
            most_bytes -= size_bytes;
        }
    }
    return count;
}

/* Copies that peers keep as long as they like take at most half of the pool. */
START_TEST(written_where_half_of_the_pool_is_used)
{
    static struct tl_tensor *blocks[200];
    options.memory.max_pool_bytes = options.engine.peer_memory.max_pool_bytes = options.memory.pool_bytes;
    open_pair();
    unsigned count = take(owner, options.memory.pool_bytes / 2, blocks, 200);
    engine_side_send(owner, "key", 1, engine_bytes(500, 1));
    ck_assert_int_eq(receive(1, 500), TL_PATH_BOUNCE);
    ck_assert_uint_eq(reads(), 0);
    engine_ask_fini(&ask);
    while (count > 0)
        tl_tensor_put(blocks[--count]);
    close_quiet();
}
END_TEST

static void pass(int64_t ns, int64_t step_ns)
{
    for (int64_t passed_ns = 0; passed_ns < ns; passed_ns += step_ns) {
        fake_clock_advance(step_ns);
        engine_pair_run(&pair);
    }
}

/* A receiver whose pool is full gives the source back long before its lease ends, keeps its connection, and is written
 * to when it has memory. */
START_TEST(written_where_the_receiver_has_no_memory)
{
    static struct tl_tensor *blocks[200];
    struct engine_ask other = {.is_open = false, .is_unregistered = true};
    const int64_t lease_ns = options.engine.parked_ns = 800 * TL_NS_PER_MS;
    options.memory.max_pool_bytes = options.memory.pool_bytes;
    open_pair();
    unsigned count = take(asker, UINT64_MAX, blocks, 200);
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 1));
    ask.wants_checksum = _i == 1;
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    ck_assert_uint_eq(counters_of(owner).exposures_out, 1);
    pass(lease_ns / 2, lease_ns / 8);
    ck_assert_uint_eq(counters_of(owner).exposures_out, 0);
    pass(lease_ns * 5 / 8, lease_ns / 8);
    ck_assert_uint_eq(owner->closed_count, 0);
    engine_side_send(owner, "other", 1, engine_pool_bytes(owner, SIZE_BYTES, 2));
    engine_ask_start(asker, &other, "other", 1);
    engine_pair_run(&pair);
    ck_assert_int_eq(other.result.code, TL_OK);
    ck_assert_uint_eq(ask.done_count, 0);
    while (count > 0)
        tl_tensor_put(blocks[--count]);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert(engine_is_bytes(ask.fetch.destination, SIZE_BYTES, 1));
    ck_assert_int_eq(ask.fetch.path, TL_PATH_ZERO_COPY);
    ck_assert_str_eq(ask.fetch.path_reason, "written by its owner: the pool had no memory to read it into");
    ck_assert_uint_eq(engine_side_values(owner), 0);
    engine_ask_fini(&ask);
    engine_ask_fini(&other);
    close_quiet();
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ cancels -- */

/* CANCEL and the end of the connection arrive together: the value is there for others at once. The link says it too. */
START_TEST(cancel_just_before_the_end)
{
    open_pair();
    const struct fake_rule slow = {.fault = FAKE_DELAY, .kinds = FAKE_READ, .count = 10};
    fake_fabric_add_rule(pair.fabric, &slow);
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 1));
    engine_ask_start(asker, &ask, "key", 1);
    const struct request *request = NULL;
    for (unsigned i = 0; i < 40 && (request == NULL || request->state != REQUEST_READING); i++) {
        (void)engine_side_round(i % 2 == 0 ? asker : owner);
        request = ask.fetch.transport_state;
    }
    ck_assert_int_eq(request->state, REQUEST_READING);
    engine_ask_cancel(&ask);
    tl_conn_drain(asker->conn);
    owner->is_silent = true;
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_CANCELLED);
    ck_assert(ask.fetch.is_unsettled);
    owner->is_silent = false;
    engine_pair_run(&pair);
    ck_assert_ptr_null(owner->conn);
    ck_assert_int_eq(owner->last_end, TL_SERVE_CANCELLED);
    ck_assert_uint_eq(engine_side_values(owner), 1);
    engine_ask_fini(&ask);
    close_quiet();
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- defects -- */

static unsigned releases(void)
{
    unsigned count = 0;
    for (size_t i = 0; i < fake_fabric_write_count(pair.fabric); i++)
        count += fake_fabric_write_at(pair.fabric, i).len_bytes == 0;
    return count;
}

START_TEST(g01_failed_read_releases_nothing)
{
    options.fabric.is_flushed_first = true; /* The failed read is known before the queue pair is known to be broken. */
    options.fabric.poll_batch = 1;
    open_pair();
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_BREAK, .kinds = FAKE_READ});
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 1));
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    fake_clock_advance(2 * options.engine.peer_timeout_ns);
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    ck_assert_uint_eq(releases(), 0);
    ck_assert_int_eq(owner->last_end, TL_SERVE_BROKEN);
    ck_assert_uint_eq(engine_side_values(owner), 1);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* Two connections of the same two workers; the first is kept aside. */
static void open_two(struct tl_conn *ret_first[2])
{
    open_pair();
    for (unsigned i = 0; i < 2; i++) {
        ret_first[i] = pair.sides[i].conn;
        pair.sides[i].conn = NULL;
    }
    engine_pair_connect(&pair);
    engine_pair_run(&pair);
    ck_assert_uint_eq(pair.left->up_count, 2);
}

static void use(struct tl_conn *const conns[2])
{
    for (unsigned i = 0; i < 2; i++)
        pair.sides[i].conn = conns[i];
}

static void close_current(void)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_CANCELLED, "the test is over");
    for (unsigned i = 0; i < 2; i++)
        tl_conn_close(pair.sides[i].conn, &reason);
    engine_pair_run(&pair);
}

static uint32_t handle_of(const struct engine_ask *of)
{
    return ((const struct request *)of->fetch.transport_state)->handle;
}

/* A peer that releases what was shown to another one loses its connection, and the source stays. */
START_TEST(g02_release_counts_from_the_reader_only)
{
    static const struct tl_descriptor nowhere;
    struct tl_conn *first[2];
    open_two(first);
    struct tl_conn *second[2] = {pair.left->conn, pair.right->conn};
    use(first);
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_DROP, .kinds = FAKE_READ});
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 1));
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    ck_assert_uint_eq(counters_of(owner).exposures_out, 1);
    use(second);
    owner->open_serve_count = asker->open_ask_count = 0; /* They belong to the first connection. */
    conn_post_write(second[0], NULL, NULL, 0, &nowhere, 0, handle_of(&ask), NULL);
    tl_queue_pair_doorbell(second[0]->pair);
    engine_pair_run(&pair);
    ck_assert_ptr_null(owner->conn);
    ck_assert_uint_eq(engine_side_stats(owner).protocol_errors, 1);
    tl_conn_close(asker->conn, &owner->reason);
    engine_pair_run(&pair);
    owner->open_serve_count = asker->open_ask_count = 1;
    ck_assert_uint_eq(counters_of(owner).exposures_out, 1);
    ck_assert_uint_eq(engine_side_values(owner), 1);
    use(first);
    close_current();
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(g03_two_peers_with_the_same_handle)
{
    struct engine_ask other = {.is_open = false};
    struct tl_conn *first[2];
    open_two(first);
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 1));
    engine_side_send(owner, "other", 1, engine_pool_bytes(owner, SIZE_BYTES, 2));
    engine_ask_start(asker, &other, "other", 1);
    struct tl_conn *second[2] = {pair.left->conn, pair.right->conn};
    use(first);
    engine_ask_start(asker, &ask, "key", 1);
    (void)engine_side_round(asker);
    ck_assert_uint_eq(handle_of(&ask), handle_of(&other));
    engine_pair_run(&pair);
    ck_assert(ask.result.code == TL_OK && other.result.code == TL_OK);
    ck_assert(engine_is_bytes(ask.fetch.destination, SIZE_BYTES, 1));
    ck_assert(engine_is_bytes(other.fetch.destination, SIZE_BYTES, 2));
    engine_ask_fini(&ask);
    engine_ask_fini(&other);
    close_current();
    use(second);
    engine_pair_close(&pair);
}
END_TEST

/* A reader that does not release what it was shown loses its connection, and the memory is back. */
START_TEST(g04_source_is_not_kept_for_ever)
{
    options.engine.parked_ns = options.engine.peer_timeout_ns / 10;
    open_pair();
    uint64_t used_bytes = engine_side_memory(owner).pool_used_bytes;
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_DROP, .kinds = FAKE_READ});
    engine_side_send(owner, "key", 1, engine_bytes(500, 1));
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    ck_assert_uint_gt(engine_side_memory(owner).pool_used_bytes, used_bytes);
    fake_clock_advance(2 * options.engine.parked_ns);
    engine_pair_run(&pair);
    ck_assert_uint_eq(owner->closed_count, 1);
    ck_assert_ptr_nonnull(strstr(owner->reason.message, "timeouts.stalled"));
    ck_assert_int_eq(owner->last_end, TL_SERVE_BROKEN);
    ck_assert_uint_eq(engine_side_memory(owner).pool_used_bytes, used_bytes);
    ck_assert_uint_eq(counters_of(owner).exposures_out, 0);
    fake_clock_advance(2 * options.engine.peer_timeout_ns);
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* The asker has read, and needs a slot for the release, which comes just before the peer time-out or never. */
static void release_late(bool comes_back)
{
    open_pair();
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 1));
    engine_ask_start(asker, &ask, "key", 1);
    struct conn_credits *credits = &asker->conn->credits;
    uint32_t slot_count = credits->peer_slot_count;
    uint64_t sent = engine_side_stats(asker).messages_sent;
    while (engine_side_stats(asker).messages_sent == sent)
        (void)engine_side_round(asker);
    credits->peer_slots_returned = credits->peer_slots_used - 1;
    credits->peer_slot_count = 1;
    engine_pair_run(&pair);
    ck_assert_uint_eq(reads(), 1);
    ck_assert_uint_eq(ask.done_count, 0);
    fake_clock_advance(options.engine.peer_timeout_ns - 1);
    asker->conn->peer_timeout.last_seen_ns = tl_clock_now_ns(); /* the owner sends what needs no slot */
    if (comes_back) credits->peer_slot_count = slot_count;
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, comes_back);
    fake_clock_advance(1);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
}

START_TEST(release_waits_for_a_slot)
{
    release_late(true);
    ck_assert_int_eq(ask.result.code, TL_OK);
    ck_assert_uint_eq(asker->closed_count, 0);
    engine_ask_fini(&ask);
    close_quiet();
}
END_TEST

/* An owner that lives, and returns no slot, does not keep the request for ever. */
START_TEST(release_does_not_wait_for_ever)
{
    release_late(false);
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    ck_assert_uint_eq(asker->closed_count, 1);
    ck_assert_ptr_nonnull(strstr(asker->reason.message, "no slot in time to release key"));
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(g05_broken_connection_is_replaced)
{
    open_pair();
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_BREAK, .kinds = FAKE_READ});
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 1));
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    fake_clock_advance(2 * options.engine.peer_timeout_ns);
    engine_pair_run(&pair);
    ck_assert(asker->conn == NULL && owner->conn == NULL);
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    engine_pair_connect(&pair);
    engine_pair_run(&pair);
    engine_ask_start(asker, &ask, NULL, 0);
    engine_pair_run(&pair);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert(engine_is_bytes(ask.fetch.destination, SIZE_BYTES, 1));
    engine_ask_fini(&ask);
    close_quiet();
}
END_TEST

/* The card posts no slots as the queue pair connects; on a card: rdma_vm/verbs_failure_test.c. */
START_TEST(g06_connection_without_slots_is_not_used)
{
    uint8_t bytes[TL_CONN_ADDRESS_BYTES];
    struct tl_error error;
    engine_pair_init(&pair, &options);
    asker = pair.left;
    owner = pair.right;
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_CONNECT_FAILURE});
    engine_side_create_conn(owner);
    engine_side_create_conn(asker);
    uint32_t len_bytes = tl_conn_get_address(asker->conn, bytes);
    ck_assert_int_eq(tl_conn_connect(owner->conn, bytes, len_bytes, &error), TL_UNAVAILABLE);
    tl_conn_close(owner->conn, &error);
    tl_conn_close(asker->conn, &error);
    engine_pair_run(&pair);
    ck_assert(asker->conn == NULL && owner->conn == NULL);
    engine_pair_connect(&pair);
    engine_pair_run(&pair);
    ask = (struct engine_ask){.is_open = false};
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 1));
    ck_assert_int_eq(receive(1, SIZE_BYTES), TL_PATH_ZERO_COPY);
    engine_ask_fini(&ask);
    close_quiet();
}
END_TEST

static unsigned left_to_ask;

static void ask_again(struct engine_ask *of)
{
    ck_assert_int_eq(of->result.code, TL_OK);
    if (left_to_ask-- == 0) return;
    tl_fetch_restart(&of->fetch);
    engine_ask_start(asker, of, NULL, 0);
}

START_TEST(g07_completion_asks_for_more)
{
    open_pair();
    engine_side_publish(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 1));
    ask.on_done = ask_again;
    left_to_ask = 50;
    engine_ask_start(asker, &ask, "key", 0);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 51);
    ck_assert(engine_is_bytes(ask.fetch.destination, SIZE_BYTES, 1));
    engine_ask_fini(&ask);
    close_quiet();
}
END_TEST

/* A tensor costs two doorbells: one for its read, and one for its release and the next REQUEST. */
START_TEST(release_leaves_with_the_next_request)
{
    open_pair();
    engine_side_publish(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 1));
    uint64_t rings = counters_of(asker).rings;
    ask.on_done = ask_again;
    left_to_ask = 49;
    engine_ask_start(asker, &ask, "key", 0);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 50);
    ck_assert_uint_eq(counters_of(asker).rings - rings, 2 * 50 + 1);
    engine_ask_fini(&ask);
    close_quiet();
}
END_TEST

START_TEST(g08_no_more_reads_than_the_card_takes)
{
    enum { COUNT = 60 };
    static struct engine_ask asks[COUNT];
    options.engine.piece_bytes = 900;
    options.provider.read_depth = 3;
    open_pair();
    for (unsigned i = 0; i < COUNT; i++) {
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, SIZE_BYTES, i));
        engine_ask_start(asker, &asks[i], "key", i);
    }
    engine_pair_run(&pair);
    ck_assert_uint_eq(counters_of(asker).most_reads_out, 3);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert(engine_is_bytes(asks[i].fetch.destination, SIZE_BYTES, i));
        engine_ask_fini(&asks[i]);
    }
    close_quiet();
}
END_TEST

/* A length that does not fit into 32 bits. No byte of it is touched. */
START_TEST(g08_read_beyond_32_bits)
{
    const uint64_t size_bytes = (UINT64_C(5) << 30) + 1;
    struct tl_tensor *tensors[2];
    void *memory[2];
    options.fabric.is_hollow = true;
    options.memory.max_cached_bytes = 2 * size_bytes;
    open_pair();
    for (unsigned i = 0; i < 2; i++) {
        memory[i] = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        ck_assert_ptr_ne(memory[i], MAP_FAILED);
        const struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                            .dtype = TL_U8,
                                            .rank = 1,
                                            .dims = &size_bytes,
                                            .data = memory[i],
                                            .capacity_bytes = size_bytes};
        ck_assert_int_eq(tl_tensor_wrap(&view, &tensors[i], NULL), TL_OK);
    }
    uint64_t before = counters_of(asker).read_bytes;
    engine_side_send(owner, "key", 1, tensors[0]);
    ask.destination = tensors[1];
    fetch("key", 1);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert_uint_eq(counters_of(asker).read_bytes - before, size_bytes);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
    for (unsigned i = 0; i < 2; i++)
        munmap(memory[i], size_bytes);
}
END_TEST

#define ADD(suite, test) suite_add_tcase(suite, make_case(#test, test))

static TCase *make_case(const char *name, const TTest *test)
{
    TCase *tcase = tcase_create(name);
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, test);
    return tcase;
}

int main(void)
{
    Suite *suite = suite_create("engine_gdr");
    TCase *tcase = tcase_create("read");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, one_read_and_one_release);
    tcase_add_test(tcase, in_pieces);
    tcase_add_test(tcase, memory_of_users);
    tcase_add_loop_test(tcase, copied_at_the_owner, 0, 2);
    tcase_add_test(tcase, copied_on_both_sides);
    tcase_add_test(tcase, file_that_may_change);
    tcase_add_loop_test(tcase, checksum, 0, 2);
    tcase_add_test(tcase, values_without_bytes_and_statuses);
    tcase_add_test(tcase, step_of_a_published_value);
    tcase_add_test(tcase, more_sources_than_windows);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("written");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, written_under_keys_of_regions);
    tcase_add_test(tcase, written_where_the_provider_does_not_read);
    tcase_add_test(tcase, written_where_the_card_does_not_read);
    tcase_add_loop_test(tcase, handshake_tries_a_read, 0, 3);
    tcase_add_test(tcase, written_where_nothing_can_be_shown);
    tcase_add_test(tcase, written_where_the_pool_is_too_small);
    tcase_add_test(tcase, written_where_no_window_comes_back);
    tcase_add_test(tcase, written_where_half_of_the_pool_is_used);
    tcase_add_loop_test(tcase, written_where_the_receiver_has_no_memory, 0, 2);
    tcase_add_test(tcase, cancel_just_before_the_end);
    suite_add_tcase(suite, tcase);
    ADD(suite, g01_failed_read_releases_nothing);
    ADD(suite, g02_release_counts_from_the_reader_only);
    ADD(suite, g03_two_peers_with_the_same_handle);
    ADD(suite, g04_source_is_not_kept_for_ever);
    ADD(suite, g05_broken_connection_is_replaced);
    ADD(suite, g06_connection_without_slots_is_not_used);
    ADD(suite, g07_completion_asks_for_more);
    ADD(suite, release_waits_for_a_slot);
    ADD(suite, release_does_not_wait_for_ever);
    ADD(suite, release_leaves_with_the_next_request);
    ADD(suite, g08_no_more_reads_than_the_card_takes);
    ADD(suite, g08_read_beyond_32_bits);
    return run_suite(suite);
}
