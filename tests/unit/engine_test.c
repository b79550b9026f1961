// SPDX-License-Identifier: Apache-2.0
/* A transfer without faults: one message and one write, from the owner's tensor into the asker's. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "fakes/engine_case.h"
#include "fakes/fake_clock.h"
#include "fakes/run_suite.h"

static void setup(void)
{
    engine_pair_defaults(&options);
}

static void fetch(const char *key, uint64_t step)
{
    engine_ask_start(asker, &ask, key, step);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
}

static void expect_ok(uint64_t size_bytes, uint64_t seed, enum tl_path path)
{
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert(engine_is_bytes(ask.fetch.destination, size_bytes, seed));
    ck_assert_int_eq(ask.fetch.path, path);
    engine_ask_fini(&ask);
}

/* Sends and receives one value of this size. */
static void transfer(uint64_t step, uint64_t size_bytes)
{
    engine_side_send(owner, "key", step, engine_pool_bytes(owner, size_bytes, step));
    fetch("key", step);
    expect_ok(size_bytes, step, TL_PATH_ZERO_COPY);
    ck_assert_uint_eq(engine_side_values(owner), 0);
}

static struct tl_engine_stats before[2];

static void remember_stats(void)
{
    before[0] = engine_side_stats(asker);
    before[1] = engine_side_stats(owner);
}

#define SINCE(side, counter) (engine_side_stats(side).counter - before[(side) == asker ? 0 : 1].counter)

/* Returns what has gone over the wire since, apart from credits. */
static void expect_traffic(uint64_t asked, uint64_t answered, uint64_t writes)
{
    ck_assert_uint_eq(SINCE(asker, messages_sent) - SINCE(asker, credits_sent), asked);
    ck_assert_uint_eq(SINCE(owner, messages_sent) - SINCE(owner, credits_sent), answered);
    ck_assert_uint_eq(SINCE(owner, writes_posted), writes);
    ck_assert_uint_eq(SINCE(asker, writes_posted), 0);
}

/* ------------------------------------------------------------------------------------------------ one transfer -- */

START_TEST(unknown_meta_data)
{
    open_pair();
    remember_stats();
    transfer(1, 5000);
    expect_traffic(2, 1, 1); /* REQUEST and RE_REQUEST; META_DATA_UPDATE; the tensor. */
    ck_assert_uint_eq(SINCE(asker, meta_data_updates), 1);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(known_meta_data)
{
    open_pair();
    transfer(1, 5000);
    for (uint64_t step = 2; step < 300; step++) {
        remember_stats();
        transfer(step, 5000);
        expect_traffic(1, 0, 1);
        ck_assert_uint_le(SINCE(asker, credits_sent) + SINCE(owner, credits_sent), 1);
    }
    ck_assert_uint_eq(engine_side_stats(owner).bytes_bounced, 0);
    ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced, 0);
    ck_assert_uint_eq(engine_side_memory(owner).bounced_bytes, 0);
    ck_assert_uint_eq(engine_side_memory(asker).bounced_bytes, 0);
    ck_assert_uint_eq(engine_side_memory(owner).registrations, 0);
    ck_assert_uint_eq(engine_side_stats(owner).tensors_sent, 299);
    ck_assert_uint_eq(engine_side_stats(asker).tensors_received, 299);
    ck_assert_uint_eq(engine_side_stats(owner).bytes_sent, 299 * 5000 + 8); /* And the probe. */
    ck_assert_uint_eq(engine_side_stats(asker).bytes_received, 299 * 5000);
    /* A slot has come back for every message, including those of the handshake, without many messages for that. */
    ck_assert_uint_le(engine_side_stats(asker).credits_sent, 20);
    ck_assert_uint_le(engine_side_stats(owner).credits_sent, 20);
    engine_pair_close(&pair);
}
END_TEST

/* The posted write names the users' own memory on both sides. */
START_TEST(pointers_are_the_users)
{
    open_pair();
    transfer(1, 5000);
    struct tl_tensor *source = engine_pool_bytes(owner, 5000, 2);
    ask.destination = engine_pool_bytes(asker, 5000, 0);
    const void *destination = tl_tensor_data(ask.destination);
    const void *bytes = tl_tensor_data(source);
    size_t count = fake_fabric_write_count(pair.fabric);
    engine_side_send(owner, "key", 2, source);
    fetch("key", 2);
    ck_assert_uint_eq(fake_fabric_write_count(pair.fabric), count + 1);
    struct fake_write write = fake_fabric_write_at(pair.fabric, count);
    ck_assert_ptr_eq(write.source, bytes);
    ck_assert_ptr_eq(write.destination, destination);
    ck_assert_uint_eq(write.len_bytes, 5000);
    ck_assert(write.has_immediate && write.has_landed);
    ck_assert_ptr_eq(tl_tensor_data(ask.fetch.destination), destination);
    expect_ok(5000, 2, TL_PATH_ZERO_COPY);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(both_ways_at_once)
{
    enum { COUNT = 40 };
    static struct engine_ask asks[2][COUNT];
    char key[16];
    open_pair();
    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(key, sizeof(key), "key%u", i);
        for (unsigned s = 0; s < 2; s++) {
            engine_side_send(&pair.sides[s], key, 1, engine_pool_bytes(&pair.sides[s], 100 + i, i + s));
            engine_ask_start(&pair.sides[s], &asks[s][i], key, 1);
        }
    }
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++) {
        for (unsigned s = 0; s < 2; s++) {
            ck_assert_int_eq(asks[s][i].result.code, TL_OK);
            ck_assert(engine_is_bytes(asks[s][i].fetch.destination, 100 + i, i + 1 - s));
            engine_ask_fini(&asks[s][i]);
        }
    }
    engine_pair_close(&pair);
}
END_TEST

/* ----------------------------------------------------------------------------------------- meta-data and steps -- */

START_TEST(meta_data_that_changes_every_step)
{
    open_pair();
    for (uint64_t step = 1; step <= 50; step++) {
        remember_stats();
        transfer(step, 100 + step);
        expect_traffic(2, 1, 1);
    }
    engine_pair_close(&pair);
}
END_TEST

/* V12: a value that is dead at every second step costs no more than one that is not. */
START_TEST(dead_every_second_step)
{
    open_pair();
    transfer(1, 5000);
    for (uint64_t step = 2; step <= 20; step++) {
        struct tl_tensor *dead;
        remember_stats();
        if (step % 2 == 1) {
            transfer(step, 5000);
            expect_traffic(1, 0, 1);
            continue;
        }
        ck_assert_int_eq(tl_tensor_create_dead(&dead, NULL), TL_OK);
        engine_side_send(owner, "key", step, dead);
        fetch("key", step);
        ck_assert_int_eq(ask.result.code, TL_OK);
        ck_assert(tl_tensor_is_dead(ask.fetch.destination));
        ck_assert_int_eq(ask.fetch.path, TL_PATH_NONE);
        engine_ask_fini(&ask);
        expect_traffic(1, 1, 0);
    }
    engine_pair_close(&pair);
}
END_TEST

START_TEST(zero_size)
{
    const uint64_t dims[] = {7, 0, 3};
    for (int wants_checksum = 0; wants_checksum < 2; wants_checksum++) {
        open_pair();
        for (uint64_t step = 1; step <= 3; step++) {
            struct tl_tensor *tensor;
            ck_assert_int_eq(tl_tensor_create(TL_F32, 3, dims, &tensor, NULL), TL_OK);
            engine_side_send(owner, "key", step, tensor);
            ask.wants_checksum = wants_checksum;
            remember_stats();
            fetch("key", step);
            ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
            ck_assert_uint_eq(tl_tensor_rank(ask.fetch.destination), 3);
            ck_assert_uint_eq(tl_tensor_dims(ask.fetch.destination)[0], 7);
            ck_assert_int_eq(ask.fetch.path, TL_PATH_NONE);
            ck_assert_uint_eq(ask.fetch.offer_step, step);
            engine_ask_fini(&ask);
            expect_traffic(1, 1, 0);
        }
        engine_pair_close(&pair);
    }
}
END_TEST

static struct tl_tensor *strings(const char *first, const char *second)
{
    const uint64_t dims[] = {2};
    const struct tl_string parts[] = {{first, strlen(first)}, {second, strlen(second)}};
    struct tl_tensor *tensor;
    ck_assert_int_eq(tl_tensor_create_strings(1, dims, parts, &tensor, NULL), TL_OK);
    return tensor;
}

START_TEST(string_tensors)
{
    open_pair();
    for (uint64_t step = 1; step <= 5; step++) {
        struct tl_string part;
        engine_side_send(owner, "key", step, strings("one", step == 3 ? "and a longer one" : "two"));
        fetch("key", step);
        ck_assert_int_eq(ask.result.code, TL_OK);
        ck_assert_int_eq(ask.fetch.path, TL_PATH_SERIALIZED);
        ck_assert_int_eq(tl_tensor_string(ask.fetch.destination, 1, &part, NULL), TL_OK);
        ck_assert_uint_eq(part.len_bytes, step == 3 ? 16 : 3);
        ck_assert_mem_eq(part.data, step == 3 ? "and a longer one" : "two", part.len_bytes);
        engine_ask_fini(&ask);
    }
    engine_pair_close(&pair);
}
END_TEST

/* Bytes that are no string tensor are an error of that request only. */
START_TEST(damaged_strings)
{
    open_pair();
    struct tl_tensor *tensor = strings("one", "two");
    memset(tl_tensor_data(tensor), 0xff, 8);
    engine_side_send(owner, "key", 1, tensor);
    fetch("key", 1);
    ck_assert_int_eq(ask.result.code, TL_DATA_LOSS);
    engine_ask_fini(&ask);
    transfer(2, 100);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(published_value)
{
    open_pair();
    for (uint64_t version = 10; version < 30; version++) {
        engine_side_publish(owner, "key", version, engine_pool_bytes(owner, 5000, version));
        for (unsigned again = 0; again < 3; again++) {
            remember_stats();
            fetch("key", 0);
            ck_assert_uint_eq(ask.fetch.offer_step, version);
            expect_ok(5000, version, TL_PATH_ZERO_COPY);
            if (version == 10 && again == 0) continue;
            /* The version is logged once. */
            expect_traffic(1, again == 0 ? 1 : 0, 1);
        }
    }
    engine_pair_close(&pair);
}
END_TEST

START_TEST(publication_changes_its_shape)
{
    open_pair();
    for (uint64_t version = 10; version < 30; version++) {
        engine_side_publish(owner, "key", version, engine_pool_bytes(owner, 50 * version, version));
        fetch("key", 0);
        ck_assert_uint_eq(ask.fetch.offer_step, version);
        expect_ok(50 * version, version, TL_PATH_ZERO_COPY);
    }
    engine_pair_close(&pair);
}
END_TEST

/* --------------------------------------------------------------------------------------------------- checksums -- */

START_TEST(checksum)
{
    open_pair();
    for (uint64_t step = 1; step <= 3; step++) {
        engine_side_send(owner, "key", step, engine_pool_bytes(owner, 5000, step));
        ask.wants_checksum = true;
        fetch("key", step);
        ck_assert(ask.fetch.is_verified);
        expect_ok(5000, step, TL_PATH_ZERO_COPY);
    }
    engine_pair_close(&pair);
}
END_TEST

/* A bit changes between the source and the destination. */
START_TEST(checksum_wrong)
{
    options.fabric.is_manual = true;
    engine_pair_init(&pair, &options);
    engine_pair_connect(&pair);
    asker = pair.left;
    owner = pair.right;
    for (unsigned i = 0; i < 100; i++) {
        while (fake_fabric_step_any(pair.fabric)) {
        }
        engine_pair_run(&pair);
    }
    ck_assert_uint_eq(asker->up_count, 1);
    struct tl_tensor *source = engine_pool_bytes(owner, 5000, 1);
    engine_side_send(owner, "key", 1, tl_tensor_get(source));
    ask = (struct engine_ask){.wants_checksum = true};
    engine_ask_start(asker, &ask, "key", 1);
    size_t count = fake_fabric_write_count(pair.fabric);
    for (unsigned i = 0; i < 100 && ask.done_count == 0; i++) {
        engine_pair_run(&pair);
        (void)fake_fabric_step_any(pair.fabric);
        bool has_landed =
            fake_fabric_write_count(pair.fabric) > count && fake_fabric_write_at(pair.fabric, count).has_landed;
        if (has_landed) ((uint8_t *)tl_tensor_data(ask.fetch.destination))[4321] ^= 1;
        if (has_landed) count++;
    }
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_int_eq(ask.result.code, TL_DATA_LOSS);
    ck_assert(!ask.fetch.is_verified);
    tl_tensor_put(source);
    engine_ask_fini(&ask);
    struct tl_error reason;
    tl_error_set(&reason, TL_CANCELLED, "over");
    for (unsigned i = 0; i < 2; i++)
        tl_conn_close(pair.sides[i].conn, &reason);
    for (unsigned i = 0; i < 100; i++) {
        engine_pair_run(&pair);
        while (fake_fabric_step_any(pair.fabric)) {
        }
    }
    engine_pair_close(&pair);
}
END_TEST

/* ------------------------------------------------------------------------------------------- order and waiting -- */

START_TEST(request_comes_first)
{
    open_pair();
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 0);
    ck_assert_uint_eq(owner->open_serve_count, 1);
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, 777, 3));
    engine_pair_run(&pair);
    expect_ok(777, 3, TL_PATH_ZERO_COPY);
    ck_assert_int_eq(owner->last_end, TL_SERVE_RECEIVED);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(long_status_arrives_complete)
{
    char text[TL_ERROR_MESSAGE_BYTES];
    memset(text, 's', sizeof(text));
    text[sizeof(text) - 1] = '\0';
    for (int is_final = 0; is_final < 2; is_final++) {
        open_pair();
        engine_side_refuse(owner, "key", TL_ABORTED, text, is_final);
        fetch("key", 1);
        ck_assert_int_eq(ask.result.code, TL_ABORTED);
        ck_assert_str_eq(ask.result.message, text);
        ck_assert_int_eq(ask.fetch.is_final, is_final);
        ck_assert_int_eq(owner->last_end, TL_SERVE_RECEIVED);
        engine_ask_fini(&ask);
        engine_pair_close(&pair);
    }
}
END_TEST

/* The owner cannot send this value over the data connection, and says why. */
START_TEST(a_value_that_the_owner_does_not_send_here)
{
    for (int is_final = 0; is_final < 2; is_final++) {
        open_pair();
        engine_side_refuse(owner, "key", TL_UNIMPLEMENTED, "the tensor lies on gpu:0", is_final);
        fetch("key", 1);
        ck_assert_int_eq(ask.result.code, is_final ? TL_UNIMPLEMENTED : TL_UNAVAILABLE);
        ck_assert_int_eq(ask.fetch.is_rerouted, !is_final);
        if (!is_final) ck_assert_str_eq(ask.fetch.path_reason, "the tensor lies on gpu:0");
        engine_ask_fini(&ask);
        engine_pair_close(&pair);
    }
}
END_TEST

START_TEST(more_fetches_than_requests)
{
    enum { COUNT = 50 };
    static struct engine_ask asks[COUNT];
    options.engine.request_count = 3;
    open_pair();
    for (unsigned i = 0; i < COUNT; i++)
        engine_ask_start(asker, &asks[i], "key", i);
    engine_pair_run(&pair);
    ck_assert_uint_eq(owner->open_serve_count, 3);
    for (unsigned i = 0; i < COUNT; i++)
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, 100, i));
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert_uint_eq(asks[i].done_count, 1);
        ck_assert(engine_is_bytes(asks[i].fetch.destination, 100, i));
        engine_ask_fini(&asks[i]);
    }
    engine_pair_close(&pair);
}
END_TEST

/* When this callback runs, nothing of the engine holds the destination any more. It asks for the next value, or
 * closes. */
static struct engine_ask next_ask;

static void ask_next(struct engine_ask *completed)
{
    ck_assert(!tl_tensor_is_shared(completed->fetch.destination));
    next_ask = (struct engine_ask){.is_open = false};
    engine_ask_start(asker, &next_ask, "key", 2);
}

START_TEST(asked_by_the_callback_with_the_only_handle)
{
    options.engine.request_count = 1;
    open_pair();
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, 100, 1));
    engine_side_send(owner, "key", 2, engine_pool_bytes(owner, 100, 2));
    ask.on_done = ask_next;
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    ck_assert_uint_eq(next_ask.done_count, 1);
    ck_assert(engine_is_bytes(next_ask.fetch.destination, 100, 2));
    engine_ask_fini(&ask);
    engine_ask_fini(&next_ask);
    /* The memory is free again, with nothing that comes after: a connection without requests can be drained. */
    tl_conn_drain(asker->conn);
    engine_pair_run(&pair);
    ck_assert_uint_eq(asker->closed_count, 1);
    ck_assert_int_eq(asker->reason.code, TL_OK);
    engine_pair_close(&pair);
}
END_TEST

static void close_conn(struct engine_ask *completed)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_CANCELLED, "enough");
    tl_conn_close(completed->side->conn, &reason);
}

START_TEST(closed_by_the_callback)
{
    open_pair();
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, 100, 1));
    ask.on_done = close_conn;
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_OK);
    ck_assert_uint_eq(asker->closed_count, 1);
    ck_assert_str_eq(asker->reason.message, "enough");
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ pieces -- */

static void expect_pieces(uint64_t size_bytes, uint64_t count)
{
    open_pair();
    for (uint64_t step = 1; step <= 3; step++) {
        struct fake_counters then;
        struct fake_counters now;
        fake_provider_get_counters(owner->provider, &then);
        transfer(step, size_bytes);
        fake_provider_get_counters(owner->provider, &now);
        ck_assert_uint_eq(now.immediates - then.immediates, count);
        ck_assert_uint_eq(now.write_bytes - then.write_bytes, size_bytes);
    }
    engine_pair_close(&pair);
}

START_TEST(pieces_of_the_provider)
{
    options.provider.max_write_bytes = 1000;
    expect_pieces(5000, 5);
    expect_pieces(5001, 6);
    expect_pieces(999, 1);
    expect_pieces(100000, 100);
}
END_TEST

START_TEST(pieces_as_configured)
{
    options.provider.max_write_bytes = 3000;
    options.engine.piece_bytes = 700;
    expect_pieces(5000, 8);
    options.engine.piece_bytes = 1 << 20;
    expect_pieces(5000, 2);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine");
    TCase *tcase = tcase_create("engine");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, unknown_meta_data);
    tcase_add_test(tcase, known_meta_data);
    tcase_add_test(tcase, pointers_are_the_users);
    tcase_add_test(tcase, both_ways_at_once);
    tcase_add_test(tcase, meta_data_that_changes_every_step);
    tcase_add_test(tcase, dead_every_second_step);
    tcase_add_test(tcase, zero_size);
    tcase_add_test(tcase, string_tensors);
    tcase_add_test(tcase, damaged_strings);
    tcase_add_test(tcase, published_value);
    tcase_add_test(tcase, publication_changes_its_shape);
    tcase_add_test(tcase, checksum);
    tcase_add_test(tcase, checksum_wrong);
    tcase_add_test(tcase, request_comes_first);
    tcase_add_test(tcase, long_status_arrives_complete);
    tcase_add_test(tcase, a_value_that_the_owner_does_not_send_here);
    tcase_add_test(tcase, more_fetches_than_requests);
    tcase_add_test(tcase, asked_by_the_callback_with_the_only_handle);
    tcase_add_test(tcase, closed_by_the_callback);
    tcase_add_test(tcase, pieces_of_the_provider);
    tcase_add_test(tcase, pieces_as_configured);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
