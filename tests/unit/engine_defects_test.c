// SPDX-License-Identifier: Apache-2.0
/*
 * What TensorFlow's verbs transport got wrong, one test for each defect that two engines over the fake provider can
 * stage; they are numbered as where they were collected. For each test tests/defects/ has a patch that puts the defect
 * into this code; tests/defects/run shows that the test then fails.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/error.h"
#include "dataplane/engine/message.h"
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

static void expect_transfer(const char *key, uint64_t step, struct tl_tensor *tensor)
{
    uint64_t size_bytes = tl_tensor_size_bytes(tensor);
    engine_side_send(owner, key, step, tensor);
    fetch(key, step);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert(engine_is_bytes(ask.fetch.destination, size_bytes, step));
    engine_ask_fini(&ask);
}

/* A completion with an error ends its connection; another connection between the same two workers goes on. */
START_TEST(v01_bad_completion_ends_one_connection)
{
    struct tl_conn *first[2];
    open_pair();
    for (unsigned i = 0; i < 2; i++) {
        first[i] = pair.sides[i].conn;
        pair.sides[i].conn = NULL;
    }
    engine_pair_connect(&pair);
    engine_pair_run(&pair);
    ck_assert_uint_eq(pair.left->up_count, 2);
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_BREAK, .provider = owner->provider});
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, 100, 1));
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    ck_assert_uint_eq(owner->closed_count, 1);
    fake_clock_advance(2 * options.engine.peer_timeout_ns);
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    for (unsigned i = 0; i < 2; i++)
        pair.sides[i].conn = first[i];
    engine_ask_start(asker, &ask, NULL, 0); /* Again, over the other connection. */
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_OK);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v02_restarted_peer_has_another_incarnation)
{
    uint8_t bytes[TL_CONN_ADDRESS_BYTES];
    struct tl_error error;
    engine_pair_init(&pair, &options);
    engine_side_create_conn(pair.left);
    pair.right->self.incarnation++; /* The right side has restarted since the left side learned its address. */
    engine_side_create_conn(pair.right);
    uint32_t len_bytes = tl_conn_get_address(pair.right->conn, bytes);
    ck_assert_int_eq(tl_conn_connect(pair.left->conn, bytes, len_bytes, &error), TL_FAILED_PRECONDITION);
    ck_assert_ptr_nonnull(strstr(error.message, "restarted"));
    tl_conn_close(pair.left->conn, &error);
    tl_conn_close(pair.right->conn, &error);
    engine_pair_run(&pair);
    engine_pair_connect(&pair);
    engine_pair_run(&pair);
    ck_assert_uint_eq(pair.left->up_count, 1);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v03_address_of_a_stranger)
{
    uint8_t bytes[TL_CONN_ADDRESS_BYTES];
    struct tl_error error;
    for (unsigned i = 0; i < 256; i++) {
        engine_pair_init(&pair, &options);
        engine_side_create_conn(pair.left);
        memset(bytes, (int)i, sizeof(bytes));
        ck_assert_int_ne(tl_conn_connect(pair.left->conn, bytes, 1 + i / 2, &error), TL_OK);
        engine_pair_close(&pair);
    }
}
END_TEST

static void put_number(uint8_t *place, uint32_t value)
{
    for (unsigned i = 0; i < 4; i++)
        place[i] = (uint8_t)(value >> (8 * i));
}

/* A valid address with one wrong number: its length, or a number inside. */
START_TEST(v03_address_whose_lengths_lie)
{
    enum { INNER_LENGTH = 40 };
    uint8_t bytes[TL_CONN_ADDRESS_BYTES] = {0};
    struct tl_error error;
    const uint32_t lies[] = {0, 1, TL_PAIR_ADDRESS_MAX_BYTES, TL_PAIR_ADDRESS_MAX_BYTES + 1, UINT32_MAX};
    engine_pair_init(&pair, &options);
    engine_side_create_conn(pair.left);
    engine_side_create_conn(pair.right);
    uint32_t len_bytes = tl_conn_get_address(pair.right->conn, bytes);
    for (uint32_t shorter = 0; shorter < len_bytes; shorter++)
        ck_assert_int_eq(tl_conn_connect(pair.left->conn, bytes, shorter, &error), TL_INVALID_ARGUMENT);
    for (unsigned i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        put_number(bytes + INNER_LENGTH, lies[i]);
        ck_assert_int_eq(tl_conn_connect(pair.left->conn, bytes, len_bytes, &error), TL_INVALID_ARGUMENT);
    }
    put_number(bytes + INNER_LENGTH, len_bytes - INNER_LENGTH - 4);
    ck_assert_int_eq(tl_conn_connect(pair.left->conn, bytes, len_bytes, &error), TL_OK);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v04_status_of_an_aborted_step_reaches_the_peer)
{
    open_pair();
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    engine_side_refuse(owner, "key", TL_ABORTED, "step 1 was aborted: out of luck", true);
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_ABORTED);
    ck_assert_str_eq(ask.result.message, "step 1 was aborted: out of luck");
    ck_assert(ask.fetch.is_final);
    ck_assert_uint_eq(asker->closed_count + owner->closed_count, 0);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v05_more_work_than_the_queues_hold)
{
    enum { COUNT = 400 };
    static struct engine_ask asks[COUNT];
    options.engine.work_count = options.engine.slot_count = 16;
    options.engine.request_count = COUNT;
    open_pair();
    for (unsigned i = 0; i < COUNT; i++) {
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, 64, i));
        engine_ask_start(asker, &asks[i], "key", i);
    }
    engine_pair_run(&pair);
    struct fake_counters counters;
    fake_provider_get_counters(asker->provider, &counters);
    ck_assert_uint_eq(counters.rnr_tries, 0);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert_int_eq(asks[i].result.code, TL_OK);
        engine_ask_fini(&asks[i]);
    }
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v06_longest_key_and_longest_status)
{
    char key[TL_MAX_KEY_BYTES + 1];
    char text[TL_ERROR_MESSAGE_BYTES];
    memset(key, 'k', sizeof(key));
    key[TL_MAX_KEY_BYTES] = '\0';
    memset(text, 't', sizeof(text));
    text[sizeof(text) - 1] = '\0';
    open_pair();
    expect_transfer(key, 1, engine_pool_bytes(owner, 100, 1));
    expect_transfer(key, 2, engine_pool_bytes(owner, 100, 2));
    engine_side_refuse(owner, key, TL_INTERNAL, text, true);
    fetch(key, 3);
    ck_assert_str_eq(ask.result.message, text);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v06_text_longer_than_a_slot)
{
    static uint8_t bytes[TL_SLOT_BYTES];
    static struct tl_message decoded;
    static char text[2 * TL_SLOT_BYTES];
    memset(text, 't', sizeof(text) - 1);
    const struct tl_message message = {.type = TL_MESSAGE_ERROR_STATUS, .code = TL_INTERNAL, .text = text};
    uint32_t len_bytes = tl_message_encode(&message, bytes);
    ck_assert_uint_le(len_bytes, sizeof(bytes));
    ck_assert_int_eq(tl_message_decode(bytes, len_bytes, &decoded, NULL), TL_OK);
    ck_assert_uint_eq(strlen(decoded.text), TL_ERROR_MESSAGE_BYTES - 1);
}
END_TEST

/* The reader does not read behind the message, and does not write behind the space for a key. */
START_TEST(v06_key_length_that_lies)
{
    enum { KEY_LENGTH = 11, BEHIND = UINT16_MAX };
    static uint8_t bytes[TL_SLOT_BYTES + BEHIND];
    static struct {
        struct tl_message message;
        uint8_t behind[BEHIND];
    } decoded;
    static const uint8_t untouched[BEHIND];
    const struct tl_message message = {.type = TL_MESSAGE_REQUEST, .number = 1, .key = "key"};
    const uint32_t lies[] = {5, TL_MAX_KEY_BYTES, TL_MAX_KEY_BYTES + 1, TL_SLOT_BYTES, UINT16_MAX};
    for (unsigned i = 0; i < sizeof(lies) / sizeof(lies[0]); i++) {
        memset(bytes, 'k', sizeof(bytes));
        uint32_t len_bytes = tl_message_encode(&message, bytes);
        ck_assert_uint_eq(bytes[KEY_LENGTH], 3 << 4 | TL_KEY_TEXT);
        uint8_t *at = bytes + KEY_LENGTH;
        for (uint32_t lie = lies[i] << 4; lie > 0; lie >>= 7)
            *at++ = (uint8_t)(lie | (lie >= 0x80 ? 0x80 : 0));
        ck_assert_int_eq(tl_message_decode(bytes, len_bytes, &decoded.message, NULL), TL_INVALID_ARGUMENT);
        ck_assert_mem_eq(decoded.behind, untouched, sizeof(untouched));
    }
}
END_TEST

START_TEST(v07_shapes_of_any_rank_and_dimension)
{
    static const struct {
        unsigned rank;
        uint64_t dims[TL_MAX_RANK];
    } shapes[] = {{0, {0}},
                  {7, {2, 1, 2, 1, 2, 1, 2}},
                  {4, {1, 70000, 1, 1}},
                  {TL_MAX_RANK, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 1}},
                  {3, {UINT64_C(1) << 40, 0, 5}}};
    open_pair();
    for (unsigned i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        for (uint64_t step = 0; step < 2; step++) {
            struct tl_tensor *tensor;
            ck_assert_int_eq(tl_tensor_create(TL_U16, shapes[i].rank, shapes[i].dims, &tensor, NULL), TL_OK);
            if (tl_tensor_size_bytes(tensor) > 0) memset(tl_tensor_data(tensor), 7, tl_tensor_size_bytes(tensor));
            engine_side_send(owner, "key", 10 * i + step, tensor);
            fetch("key", 10 * i + step);
            ck_assert_int_eq(ask.result.code, TL_OK);
            ck_assert_uint_eq(tl_tensor_rank(ask.fetch.destination), shapes[i].rank);
            for (unsigned d = 0; d < shapes[i].rank; d++)
                ck_assert_uint_eq(tl_tensor_dims(ask.fetch.destination)[d], shapes[i].dims[d]);
            engine_ask_fini(&ask);
        }
    }
    engine_pair_close(&pair);
}
END_TEST

/* The bytes of a message depend on its content, not on what was in the memory before. */
START_TEST(v08_no_unwritten_byte_is_sent)
{
    uint8_t buffers[2][TL_SLOT_BYTES];
    struct tl_message message;
    for (int type = TL_MESSAGE_HELLO; type <= TL_MESSAGE_GOODBYE; type++) {
        uint32_t len_bytes[2];
        for (unsigned i = 0; i < 2; i++) {
            memset(&message, 0, sizeof(message));
            memset(message.text_capacity, i == 0 ? 0xaa : 0x55, sizeof(message.text_capacity));
            memset(buffers[i], i == 0 ? 0xaa : 0x55, sizeof(buffers[i]));
            memset(message.destination.bytes, i == 0 ? 0xaa : 0x55, sizeof(message.destination.bytes));
            memset(message.meta_data.shape.dims, i == 0 ? 0xaa : 0x55, sizeof(message.meta_data.shape.dims));
            message.type = (enum tl_message_type)type;
            message.has_meta_data = true;
            message.key = "key";
            message.text = "text";
            len_bytes[i] = tl_message_encode(&message, buffers[i]);
        }
        ck_assert_uint_eq(len_bytes[0], len_bytes[1]);
        ck_assert_mem_eq(buffers[0], buffers[1], len_bytes[0]);
    }
}
END_TEST

static void transfer_strings(uint64_t step, const char *text)
{
    const uint64_t dims[] = {1};
    const struct tl_string part = {text, strlen(text)};
    struct tl_string got;
    struct tl_tensor *tensor;
    ck_assert_int_eq(tl_tensor_create_strings(1, dims, &part, &tensor, NULL), TL_OK);
    engine_side_send(owner, "key", step, tensor);
    fetch("key", step);
    ck_assert_int_eq(ask.result.code, TL_OK);
    ck_assert_int_eq(tl_tensor_string(ask.fetch.destination, 0, &got, NULL), TL_OK);
    ck_assert_uint_eq(got.len_bytes, part.len_bytes);
    ck_assert_mem_eq(got.data, text, got.len_bytes);
    engine_ask_fini(&ask);
}

static void expect_same_memory(const struct tl_memory_stats before[2], const unsigned regions[2])
{
    for (unsigned i = 0; i < 2; i++) {
        struct fake_counters counters;
        struct tl_memory_stats now = engine_side_memory(&pair.sides[i]);
        fake_provider_get_counters(pair.sides[i].provider, &counters);
        ck_assert_uint_eq(now.pool_used_bytes, before[i].pool_used_bytes);
        ck_assert_uint_eq(now.cached_count, before[i].cached_count);
        ck_assert_uint_eq(counters.regions_out, regions[i]);
        ck_assert_uint_eq(counters.exposures_out, 0);
    }
}

static void remember_memory(struct tl_memory_stats ret_stats[2], unsigned ret_regions[2])
{
    for (unsigned i = 0; i < 2; i++) {
        struct fake_counters counters;
        fake_provider_get_counters(pair.sides[i].provider, &counters);
        ret_stats[i] = engine_side_memory(&pair.sides[i]);
        ret_regions[i] = counters.regions_out;
    }
}

START_TEST(v09_strings_leave_nothing_behind)
{
    struct tl_memory_stats before[2];
    unsigned regions[2];
    open_pair();
    transfer_strings(0, "first");
    remember_memory(before, regions);
    for (uint64_t step = 1; step < 100; step++)
        transfer_strings(step, "steady");
    expect_same_memory(before, regions);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v10_receiver_gives_memory_back)
{
    struct tl_memory_stats before[2];
    unsigned regions[2];
    open_pair();
    expect_transfer("key", 0, engine_pool_bytes(owner, 100, 0));
    remember_memory(before, regions);
    for (uint64_t step = 1; step < 50; step++)
        expect_transfer("key", step, engine_pool_bytes(owner, 100 + step, step));
    expect_same_memory(before, regions);
    engine_side_refuse(owner, "refused", TL_ABORTED, "no", true);
    for (uint64_t step = 1; step < 50; step++) {
        fetch("refused", step);
        engine_ask_fini(&ask);
    }
    expect_same_memory(before, regions);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v10_receiver_gives_memory_back_when_refused)
{
    struct tl_memory_stats before[2];
    unsigned regions[2];
    open_pair();
    expect_transfer("key", 0, engine_pool_bytes(owner, 100, 0));
    remember_memory(before, regions);
    engine_side_refuse(owner, "key", TL_ABORTED, "no", true);
    for (uint64_t step = 1; step < 50; step++) {
        fetch("key", step);
        ck_assert_int_eq(ask.result.code, TL_ABORTED);
        engine_ask_fini(&ask);
    }
    expect_same_memory(before, regions);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v11_steps_do_not_share_meta_data)
{
    enum { COUNT = 30 };
    static struct engine_ask asks[COUNT];
    open_pair();
    expect_transfer("key", 1000, engine_pool_bytes(owner, 100, 1000));
    for (unsigned i = 0; i < COUNT; i++)
        engine_ask_start(asker, &asks[i], "key", i);
    engine_pair_run(&pair);
    for (unsigned i = COUNT; i-- > 0;) {
        struct tl_tensor *tensor = engine_pool_bytes(owner, 100 + i % 3, i);
        if (i % 5 == 4) {
            tl_tensor_put(tensor);
            ck_assert_int_eq(tl_tensor_create_dead(&tensor, NULL), TL_OK);
        }
        engine_side_send(owner, "key", i, tensor);
    }
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert_int_eq(asks[i].result.code, TL_OK);
        ck_assert_int_eq(tl_tensor_is_dead(asks[i].fetch.destination), i % 5 == 4);
        if (i % 5 != 4) ck_assert(engine_is_bytes(asks[i].fetch.destination, 100 + i % 3, i));
        engine_ask_fini(&asks[i]);
    }
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v12_dead_and_alive_alternating_cost_no_round_trip)
{
    open_pair();
    expect_transfer("key", 0, engine_pool_bytes(owner, 100, 0));
    uint64_t updates = engine_side_stats(asker).meta_data_updates;
    for (uint64_t step = 1; step < 20; step += 2) {
        struct tl_tensor *dead;
        ck_assert_int_eq(tl_tensor_create_dead(&dead, NULL), TL_OK);
        engine_side_send(owner, "key", step, dead);
        fetch("key", step);
        ck_assert(tl_tensor_is_dead(ask.fetch.destination));
        engine_ask_fini(&ask);
        expect_transfer("key", step + 1, engine_pool_bytes(owner, 100, step + 1));
    }
    ck_assert_uint_eq(engine_side_stats(asker).meta_data_updates, updates);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v13_tensor_larger_than_one_write)
{
    options.provider.max_write_bytes = 4096;
    open_pair();
    expect_transfer("key", 1, engine_pool_bytes(owner, 1000001, 1));
    expect_transfer("key", 2, engine_bytes(1000001, 2));
    engine_pair_close(&pair);
}
END_TEST

/* A tensor whose length does not fit into 32 bits, in writes of at most this length. No byte of it is touched. */
static void expect_huge_transfer(uint64_t max_write_bytes)
{
    const uint64_t size_bytes = (UINT64_C(5) << 30) + 1;
    struct tl_tensor *tensors[2];
    void *memory[2];
    options.fabric.is_hollow = true;
    options.provider.max_write_bytes = max_write_bytes;
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
    size_t first = fake_fabric_write_count(pair.fabric); /* Behind those of the handshake. */
    engine_side_send(owner, "key", 1, tensors[0]);
    ask.destination = tensors[1];
    fetch("key", 1);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    uint64_t arrived_bytes = 0;
    for (size_t i = first; i < fake_fabric_write_count(pair.fabric); i++) {
        struct fake_write write = fake_fabric_write_at(pair.fabric, i);
        ck_assert_ptr_eq(write.source, (char *)memory[0] + arrived_bytes);
        ck_assert_ptr_eq(write.destination, (char *)memory[1] + arrived_bytes);
        arrived_bytes += write.len_bytes;
    }
    ck_assert_uint_eq(arrived_bytes, size_bytes);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(munmap(memory[i], size_bytes), 0);
}

START_TEST(v13_tensor_beyond_32_bits)
{
    expect_huge_transfer(UINT64_C(1) << 30);
}
END_TEST

/* The card has no limit. */
START_TEST(v13_write_beyond_32_bits)
{
    expect_huge_transfer(INT64_MAX);
}
END_TEST

/* An index is used again only when its request is over, and its late answers are recognised: engine_hostile_test. */
START_TEST(v14_open_requests_keep_their_index)
{
    enum { COUNT = 20 };
    static struct engine_ask asks[COUNT];
    options.engine.request_count = 2;
    open_pair();
    engine_ask_start(asker, &ask, "never", 1); /* It is open all the time. */
    for (unsigned i = 0; i < COUNT; i++) {
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, 100, i));
        engine_ask_start(asker, &asks[i], "key", i);
    }
    engine_pair_run(&pair);
    ck_assert(ask.is_open);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert(engine_is_bytes(asks[i].fetch.destination, 100, i));
        engine_ask_fini(&asks[i]);
    }
    engine_side_send(owner, "never", 1, engine_pool_bytes(owner, 300, 7));
    engine_pair_run(&pair);
    ck_assert(engine_is_bytes(ask.fetch.destination, 300, 7));
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v15_unregistered_source_is_sent)
{
    open_pair();
    expect_transfer("small", 1, engine_bytes(1000, 1));
    expect_transfer("large", 2, engine_bytes(1000000, 2));
    ck_assert_uint_eq(engine_side_memory(owner).registrations, 1);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v16_registration_that_fails_is_noticed)
{
    open_pair();
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_REGION_FAILURE, .times = FAKE_ALWAYS});
    ask.is_unregistered = true;
    expect_transfer("large", 1, engine_bytes(1000000, 1));
    ck_assert_uint_eq(engine_side_stats(owner).bytes_bounced, 1000000);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v16_evicted_registration_is_found_no_more)
{
    enum { ROUNDS = 6 };
    struct tl_tensor *tensors[2];
    options.memory.max_cached_count = 1;
    open_pair();
    for (uint64_t i = 0; i < 2; i++)
        tensors[i] = engine_bytes(1000000, i);
    for (uint64_t step = 0; step < ROUNDS; step++) {
        engine_side_send(owner, "key", step, tl_tensor_get(tensors[step % 2]));
        fetch("key", step);
        ck_assert_int_eq(ask.result.code, TL_OK);
        ck_assert(engine_is_bytes(ask.fetch.destination, 1000000, step % 2));
        engine_ask_fini(&ask);
        ck_assert_uint_eq(engine_side_memory(owner).registrations, step + 1);
    }
    for (unsigned i = 0; i < 2; i++)
        tl_tensor_put(tensors[i]);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v17_no_receive_waits_for_ever)
{
    open_pair();
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    engine_ask_cancel(&ask);
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_CANCELLED);
    engine_ask_fini(&ask);
    engine_ask_start(asker, &ask, "key", 2);
    engine_pair_run(&pair);
    owner->is_silent = true;
    for (unsigned i = 0; i < 8; i++) {
        fake_clock_advance(options.engine.peer_timeout_ns / 4);
        engine_pair_run(&pair);
    }
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(v18_not_up_before_it_is)
{
    engine_pair_init(&pair, &options);
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_DROP, .kinds = FAKE_WRITE});
    engine_pair_connect(&pair);
    engine_pair_run(&pair);
    ck_assert_uint_eq(pair.left->up_count + pair.right->up_count, 0);
    fake_clock_advance(options.engine.connect_ns);
    engine_pair_run(&pair);
    for (unsigned i = 0; i < 2; i++) {
        ck_assert_uint_eq(pair.sides[i].up_count, 0);
        ck_assert_int_eq(pair.sides[i].reason.code, TL_DEADLINE_EXCEEDED);
    }
    engine_pair_close(&pair);
}
END_TEST

#define ADD(suite, test) add_own_case(suite, #test, setup, NULL, test)

int main(void)
{
    Suite *suite = suite_create("engine_defects");
    ADD(suite, v01_bad_completion_ends_one_connection);
    ADD(suite, v02_restarted_peer_has_another_incarnation);
    ADD(suite, v03_address_of_a_stranger);
    ADD(suite, v03_address_whose_lengths_lie);
    ADD(suite, v04_status_of_an_aborted_step_reaches_the_peer);
    ADD(suite, v05_more_work_than_the_queues_hold);
    ADD(suite, v06_longest_key_and_longest_status);
    ADD(suite, v06_text_longer_than_a_slot);
    ADD(suite, v06_key_length_that_lies);
    ADD(suite, v07_shapes_of_any_rank_and_dimension);
    ADD(suite, v08_no_unwritten_byte_is_sent);
    ADD(suite, v09_strings_leave_nothing_behind);
    ADD(suite, v10_receiver_gives_memory_back);
    ADD(suite, v10_receiver_gives_memory_back_when_refused);
    ADD(suite, v11_steps_do_not_share_meta_data);
    ADD(suite, v12_dead_and_alive_alternating_cost_no_round_trip);
    ADD(suite, v13_tensor_larger_than_one_write);
    ADD(suite, v13_tensor_beyond_32_bits);
    ADD(suite, v13_write_beyond_32_bits);
    ADD(suite, v14_open_requests_keep_their_index);
    ADD(suite, v15_unregistered_source_is_sent);
    ADD(suite, v16_registration_that_fails_is_noticed);
    ADD(suite, v16_evicted_registration_is_found_no_more);
    ADD(suite, v17_no_receive_waits_for_ever);
    ADD(suite, v18_not_up_before_it_is);
    return run_suite(suite);
}
