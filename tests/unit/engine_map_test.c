// SPDX-License-Identifier: Apache-2.0
/*
 * Published files that are mapped instead of copied: one message each way and nothing else; which side may refuse;
 * failures, after which the tensor is copied; and what stays when everything else has gone.
 */
#include <check.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "fakes/engine_case.h"
#include "fakes/fake_clock.h"
#include "fakes/run_suite.h"
#include "tensor/mapped_tensor.h"

#define SIZE_BYTES 50000

static void setup(void)
{
    engine_pair_defaults(&options);
    options.provider.needs_no_regions = true; /* A tensor that is copied is written from the file. */
}

static void fetch(bool may_map)
{
    ask.may_map = may_map;
    engine_ask_start(asker, &ask, "key", 0);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
}

static void expect(uint64_t size_bytes, uint64_t version, enum tl_path path)
{
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert(engine_is_bytes(ask.fetch.destination, size_bytes, version));
    ck_assert_int_eq(ask.fetch.path, path);
    ck_assert_uint_eq(ask.fetch.offer_step, version);
    ck_assert(tl_tensor_is_writable(ask.fetch.destination) == (path != TL_PATH_MAPPED));
}

static void publish_file(uint64_t version)
{
    engine_side_publish(owner, "key", version, engine_file_bytes(SIZE_BYTES, version));
}

static bool lies_in_a_file(const struct tl_tensor *tensor)
{
    uint64_t offset;
    return tl_mapped_tensor_file(tensor, &offset) != NULL;
}

/* ------------------------------------------------------------------------------------------------------ mapped -- */

START_TEST(mapped)
{
    open_pair();
    publish_file(3);
    for (unsigned i = 0; i < 3; i++) {
        struct tl_engine_stats before[2] = {engine_side_stats(asker), engine_side_stats(owner)};
        uint64_t pool_bytes = engine_side_memory(asker).pool_used_bytes;
        ask.fetch.ops = NULL;
        ask.may_map = true;
        engine_ask_start(asker, &ask, "key", 0);
        engine_pair_run(&pair);
        struct tl_engine_stats after[2] = {engine_side_stats(asker), engine_side_stats(owner)};
        expect(SIZE_BYTES, 3, TL_PATH_MAPPED);
        ck_assert(lies_in_a_file(ask.fetch.destination));
        ck_assert_uint_eq(ask.place_count, 0);
        ck_assert_uint_eq(after[0].messages_sent - before[0].messages_sent, 1);
        ck_assert_uint_eq(after[1].messages_sent - before[1].messages_sent, 1);
        ck_assert_uint_eq(after[1].writes_posted, before[1].writes_posted);
        ck_assert_uint_eq(after[0].bytes_received, 0);
        ck_assert_uint_eq(after[0].bytes_bounced + after[1].bytes_bounced, 0);
        ck_assert_uint_eq(after[0].tensors_received, i + 1);
        ck_assert_uint_eq(after[0].tensors_mapped, i + 1);
        ck_assert_uint_eq(after[1].tensors_sent, i + 1);
        ck_assert_uint_eq(engine_side_memory(asker).pool_used_bytes, pool_bytes);
        ck_assert_int_eq(owner->last_end, TL_SERVE_RECEIVED);
        engine_ask_fini(&ask);
    }
    engine_pair_close(&pair);
}
END_TEST

/* The mapping needs neither the publication nor the connection. */
START_TEST(outlives_everything)
{
    open_pair();
    publish_file(3);
    fetch(true);
    expect(SIZE_BYTES, 3, TL_PATH_MAPPED);
    struct tl_tensor *tensor = tl_tensor_get(ask.fetch.destination);
    engine_ask_fini(&ask);
    engine_side_publish(owner, "key", 4, engine_file_bytes(SIZE_BYTES + 1, 4));
    fetch(true);
    expect(SIZE_BYTES + 1, 4, TL_PATH_MAPPED);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
    ck_assert(engine_is_bytes(tensor, SIZE_BYTES, 3));
    tl_tensor_put(tensor);
}
END_TEST

/* A mapped tensor lies in a file, too. */
START_TEST(published_again)
{
    open_pair();
    publish_file(3);
    fetch(true);
    engine_side_publish(asker, "other", 3, tl_tensor_get(ask.fetch.destination));
    engine_ask_fini(&ask);
    ask.may_map = true;
    engine_ask_start(owner, &ask, "other", 0);
    engine_pair_run(&pair);
    expect(SIZE_BYTES, 3, TL_PATH_MAPPED);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* The memory that was made for the expected bytes is given back. */
START_TEST(copied_then_mapped_then_copied)
{
    options.engine.keys = _i == 0 ? TL_KEYS_WINDOW : TL_KEYS_REGION;
    open_pair();
    publish_file(3);
    for (unsigned i = 0; i < 4; i++) {
        fetch(i % 2 == 1);
        expect(SIZE_BYTES, 3, i % 2 == 1 ? TL_PATH_MAPPED : TL_PATH_ZERO_COPY);
        engine_ask_fini(&ask);
        struct fake_counters counters;
        fake_provider_get_counters(asker->provider, &counters);
        ck_assert_uint_eq(counters.exposures_out, 0);
    }
    ck_assert_uint_eq(engine_side_stats(asker).meta_data_updates, 1);
    engine_pair_close(&pair);
}
END_TEST

/* -------------------------------------------------------------------------------------------------- not mapped -- */

static void expect_copied(uint64_t size_bytes)
{
    for (unsigned i = 0; i < 2; i++) {
        fetch(true);
        expect(size_bytes, 3, TL_PATH_ZERO_COPY);
        engine_ask_fini(&ask);
    }
    ck_assert_uint_eq(engine_side_stats(asker).tensors_mapped, 0);
    /* The second time the receiver knows that bytes will come. */
    ck_assert_uint_eq(engine_side_stats(asker).meta_data_updates, 1);
    engine_pair_close(&pair);
}

START_TEST(owner_does_not_allow_it)
{
    options.engine.is_mapping_allowed = false;
    open_pair();
    publish_file(3);
    expect_copied(SIZE_BYTES);
}
END_TEST

START_TEST(provider_cannot)
{
    options.provider.has_no_mapping = true;
    open_pair();
    publish_file(3);
    expect_copied(SIZE_BYTES);
}
END_TEST

START_TEST(file_cannot_be_shared)
{
    open_pair();
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_SHARE_FAILURE, .times = FAKE_ALWAYS});
    publish_file(3);
    expect_copied(SIZE_BYTES);
}
END_TEST

START_TEST(lies_in_memory)
{
    open_pair();
    engine_side_publish(owner, "key", 3, engine_pool_bytes(owner, SIZE_BYTES, 3));
    expect_copied(SIZE_BYTES);
}
END_TEST

START_TEST(small)
{
    open_pair();
    engine_side_publish(owner, "key", 3, engine_file_bytes(4095, 3));
    expect_copied(4095);
}
END_TEST

START_TEST(sent_once)
{
    open_pair();
    engine_side_send(owner, "key", 0, engine_file_bytes(SIZE_BYTES, 0));
    fetch(true);
    expect(SIZE_BYTES, 0, TL_PATH_ZERO_COPY);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(checksum_is_wanted)
{
    open_pair();
    publish_file(3);
    ask.wants_checksum = true;
    fetch(true);
    ck_assert(ask.fetch.is_verified);
    expect(SIZE_BYTES, 3, TL_PATH_ZERO_COPY);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(dead)
{
    struct tl_tensor *tensor;
    open_pair();
    ck_assert_int_eq(tl_tensor_create_dead(&tensor, NULL), TL_OK);
    engine_side_publish(owner, "key", 3, tensor);
    fetch(true);
    ck_assert_int_eq(ask.result.code, TL_OK);
    ck_assert(tl_tensor_is_dead(ask.fetch.destination));
    ck_assert_int_eq(ask.fetch.path, TL_PATH_NONE);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* A changed file goes to no receiver, mapped or not. */
START_TEST(file_has_changed)
{
    uint64_t offset;
    open_pair();
    struct tl_tensor *tensor = engine_file_bytes(SIZE_BYTES, 3);
    ck_assert_int_eq(ftruncate(tl_mapped_file_fd(tl_mapped_tensor_file(tensor, &offset)), SIZE_BYTES - 1), 0);
    engine_side_publish(owner, "key", 3, tensor);
    fetch(true);
    ck_assert_int_eq(ask.result.code, TL_DATA_LOSS);
    ck_assert_uint_eq(engine_side_stats(asker).tensors_mapped, 0);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* --------------------------------------------------------------------------------------- what cannot be mapped -- */

START_TEST(asked_again_without)
{
    open_pair();
    publish_file(3);
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_MAP_FAILURE, .times = FAKE_ALWAYS});
    for (unsigned i = 0; i < 3; i++) {
        fetch(true);
        expect(SIZE_BYTES, 3, TL_PATH_ZERO_COPY);
        engine_ask_fini(&ask);
    }
    ck_assert_uint_eq(engine_side_stats(asker).tensors_mapped, 0);
    ck_assert_uint_eq(engine_side_stats(asker).tensors_received, 3);
    engine_pair_close(&pair);
}
END_TEST

/* One of all the requests that the two may have open suffices. */
START_TEST(asked_again_with_one_handle)
{
    static struct engine_ask asks[5];
    options.engine.request_count = 1;
    open_pair();
    publish_file(3);
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_MAP_FAILURE, .times = 3});
    for (unsigned i = 0; i < 5; i++) {
        asks[i].may_map = true;
        engine_ask_start(asker, &asks[i], "key", 0);
    }
    engine_pair_run(&pair);
    for (unsigned i = 0; i < 5; i++) {
        ck_assert_uint_eq(asks[i].done_count, 1);
        ck_assert_int_eq(asks[i].fetch.path, i < 3 ? TL_PATH_ZERO_COPY : TL_PATH_MAPPED);
        engine_ask_fini(&asks[i]);
    }
    engine_pair_close(&pair);
}
END_TEST

/* Runs rounds of both sides, with an action in between each time, until the fetch is done. Returns after how many
 * rounds the action was possible. */
static unsigned run_until(unsigned round, void (*act)(void))
{
    unsigned count = 0;
    for (unsigned idle = 0; idle < 40; idle++) {
        if (count++ == round) act();
        bool did_work = engine_side_round(asker);
        did_work |= engine_side_round(owner);
        if (did_work) idle = 0;
    }
    return count;
}

static void cancel(void)
{
    engine_ask_cancel(&ask);
}

/* The end comes at every moment, also between the answer that cannot be mapped and the next question. */
START_TEST(cancelled)
{
    unsigned outcomes[2] = {0, 0};
    options.fabric.poll_batch = 1;
    for (unsigned round = 0; round < 12; round++) {
        open_pair();
        publish_file(3);
        if (_i == 1) fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_MAP_FAILURE});
        ask.may_map = true;
        engine_ask_start(asker, &ask, "key", 0);
        run_until(round, cancel);
        ck_assert_uint_eq(ask.done_count, 1);
        ck_assert(ask.result.code == TL_OK || ask.result.code == TL_CANCELLED);
        outcomes[ask.result.code != TL_OK]++;
        if (ask.result.code == TL_OK) expect(SIZE_BYTES, 3, _i == 1 ? TL_PATH_ZERO_COPY : TL_PATH_MAPPED);
        engine_ask_fini(&ask);
        fake_fabric_clear_rules(pair.fabric);
        fetch(true);
        expect(SIZE_BYTES, 3, TL_PATH_MAPPED);
        engine_ask_fini(&ask);
        engine_pair_close(&pair);
    }
    ck_assert_uint_gt(outcomes[0], 0);
    ck_assert_uint_gt(outcomes[1], 0);
}
END_TEST

static void cancel_other(struct engine_ask *done)
{
    (void)done;
    engine_ask_cancel(&ask);
}

/* A callback of another fetch cancels it, while it waits to be asked again. */
START_TEST(cancelled_before_it_is_asked_again)
{
    static struct engine_ask other;
    open_pair();
    publish_file(3);
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_MAP_FAILURE, .from = 2});
    other = (struct engine_ask){.may_map = true, .on_done = cancel_other};
    ask.may_map = true;
    engine_ask_start(asker, &other, "key", 0);
    engine_ask_start(asker, &ask, "key", 0);
    engine_pair_run(&pair);
    ck_assert_int_eq(other.fetch.path, TL_PATH_MAPPED);
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_int_eq(ask.result.code, TL_CANCELLED);
    engine_ask_fini(&other);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

static void close_conn(void)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "over");
    if (asker->conn != NULL) tl_conn_close(asker->conn, &reason);
}

static void drain_conn(void)
{
    if (asker->conn != NULL) tl_conn_drain(asker->conn);
}

/* The same with the end of the connection: the fetch is not lost, and may be asked again. */
START_TEST(connection_ends)
{
    options.fabric.poll_batch = 1;
    for (unsigned round = 0; round < 12; round++) {
        open_pair();
        publish_file(3);
        if (_i >= 2) fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_MAP_FAILURE});
        ask.may_map = true;
        engine_ask_start(asker, &ask, "key", 0);
        run_until(round, _i % 2 == 0 ? close_conn : drain_conn);
        ck_assert_uint_eq(ask.done_count, 1);
        ck_assert(ask.result.code == TL_OK || ask.result.code == TL_UNAVAILABLE);
        ck_assert(_i < 2 || ask.fetch.path != TL_PATH_MAPPED);
        engine_ask_fini(&ask);
        engine_pair_close(&pair);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_map");
    TCase *tcase = tcase_create("engine_map");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, mapped);
    tcase_add_test(tcase, outlives_everything);
    tcase_add_test(tcase, published_again);
    tcase_add_loop_test(tcase, copied_then_mapped_then_copied, 0, 2);
    tcase_add_test(tcase, owner_does_not_allow_it);
    tcase_add_test(tcase, provider_cannot);
    tcase_add_test(tcase, file_cannot_be_shared);
    tcase_add_test(tcase, lies_in_memory);
    tcase_add_test(tcase, small);
    tcase_add_test(tcase, sent_once);
    tcase_add_test(tcase, checksum_is_wanted);
    tcase_add_test(tcase, dead);
    tcase_add_test(tcase, file_has_changed);
    tcase_add_test(tcase, asked_again_without);
    tcase_add_test(tcase, asked_again_with_one_handle);
    tcase_add_loop_test(tcase, cancelled, 0, 2);
    tcase_add_test(tcase, cancelled_before_it_is_asked_again);
    tcase_add_loop_test(tcase, connection_ends, 0, 4);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
