// SPDX-License-Identifier: Apache-2.0
/* How a connection comes up, and all the ways in which it can fail to. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "fakes/engine_pair.h"
#include "fakes/fake_clock.h"
#include "fakes/raw_peer.h"
#include "fakes/run_suite.h"

static struct engine_pair pair;
static struct engine_pair_options options;
static struct raw_peer raw;
static struct tl_error error;

static void setup(void)
{
    engine_pair_defaults(&options);
}

static void open_raw(void)
{
    options.is_right_raw = true;
    engine_pair_init(&pair, &options);
    raw_peer_open(&raw, &pair);
    raw_peer_run(&raw);
    ck_assert_ptr_nonnull(raw_peer_heard(&raw, TL_MESSAGE_HELLO));
}

static void close_raw(void)
{
    raw_peer_close(&raw);
    engine_pair_close(&pair);
}

/* The engine has ended the connection before it was up. */
static void expect_refused(enum tl_status code, const char *words)
{
    raw_peer_run(&raw);
    ck_assert_uint_eq(pair.left->up_count, 0);
    ck_assert_uint_eq(pair.left->closed_count, 1);
    ck_assert_msg(pair.left->reason.code == code, "%d: %s", pair.left->reason.code, pair.left->reason.message);
    ck_assert_msg(strstr(pair.left->reason.message, words) != NULL, "%s", pair.left->reason.message);
    ck_assert_msg(strstr(pair.left->reason.message, "/job:right/task:0") != NULL, "%s", pair.left->reason.message);
    close_raw();
}

/* ----------------------------------------------------------------------------------------------------- success -- */

START_TEST(up_after_a_write_both_ways)
{
    for (int keys = TL_KEYS_WINDOW; keys <= TL_KEYS_REGION; keys++) {
        options.engine.keys = keys;
        engine_pair_open(&pair, &options);
        ck_assert(tl_conn_is_up(pair.left->conn) && tl_conn_is_up(pair.right->conn));
        unsigned probe_count = 0;
        for (size_t i = 0; i < fake_fabric_write_count(pair.fabric); i++) {
            struct fake_write write = fake_fabric_write_at(pair.fabric, i);
            ck_assert(write.has_landed);
            if (!write.has_immediate) continue;
            ck_assert(write.immediate == TL_IMMEDIATE_PROBE && write.len_bytes == 8);
            probe_count++;
        }
        ck_assert_uint_eq(probe_count, 2);
        struct fake_counters counters;
        fake_provider_get_counters(pair.left->provider, &counters);
        ck_assert_uint_eq(counters.regions_out, keys == TL_KEYS_WINDOW ? 1 : 2); /* The pools of both sides. */
        /* No peer can write any more what was exposed for the probes. */
        const char *why = "";
        ck_assert_msg(fake_fabric_is_quiet(pair.fabric, &why), "%s", why);
        engine_pair_close(&pair);
    }
}
END_TEST

/* Connects while each round takes so long; the measurement takes at most four rounds. */
static void connect_slowly(int64_t round_ns)
{
    engine_pair_init(&pair, &options);
    engine_pair_connect(&pair);
    for (unsigned i = 0; i < 200 && pair.left->up_count + pair.right->up_count < 2; i++) {
        (void)engine_side_round(pair.left);
        (void)engine_side_round(pair.right);
        fake_clock_advance(round_ns);
    }
    for (unsigned i = 0; i < 2; i++) {
        ck_assert_uint_eq(pair.sides[i].up_count, 1);
        const struct tl_conn_measures *measures = tl_conn_measured(pair.sides[i].conn);
        ck_assert_uint_ge(measures->latency_ns, (uint64_t)round_ns);
        ck_assert_uint_le(measures->latency_ns, 4 * (uint64_t)round_ns);
    }
}

/* Returns how many writes have no completion, and their greatest length. The right side's writes come last. */
static unsigned count_measuring(const struct engine_side *side, uint64_t *ret_max_bytes)
{
    unsigned count = 0;
    *ret_max_bytes = 0;
    for (size_t i = 0; i < fake_fabric_write_count(pair.fabric); i++) {
        struct fake_write write = fake_fabric_write_at(pair.fabric, i);
        if (write.has_immediate || write.provider != side->provider) continue;
        count++;
        if (write.len_bytes > *ret_max_bytes) *ret_max_bytes = write.len_bytes;
        if (side == pair.left) ck_assert_uint_eq(count, i + 1);
    }
    return count;
}

START_TEST(latency_and_rate_are_measured)
{
    static const struct {
        int64_t round_ns;
        uint64_t piece_bytes;
        unsigned writes;
        uint64_t max_bytes;
        uint64_t row_bytes;
    } cases[] = {
        {10000, 0, 4 + 3 + 2 + 8, 65536, 8 * 65536},
        {10000, 4096, 4 + 3 + 2 + 8, 4096, 8 * 4096},
        {TL_NS_PER_MS, 0, 4 + 3 + 2, 65536, 65536},
    };
    options.engine.piece_bytes = cases[_i].piece_bytes;
    connect_slowly(cases[_i].round_ns);
    for (unsigned i = 0; i < 2; i++) {
        uint64_t max_bytes, rate = tl_conn_measured(pair.sides[i].conn)->bytes_per_second;
        ck_assert_uint_eq(count_measuring(&pair.sides[i], &max_bytes), cases[_i].writes);
        ck_assert_uint_eq(max_bytes, cases[_i].max_bytes);
        uint64_t fastest = cases[_i].row_bytes * (uint64_t)TL_NS_PER_SEC / (uint64_t)cases[_i].round_ns;
        ck_assert_uint_le(rate, fastest);
        ck_assert_uint_ge(rate, fastest / 10);
    }
    engine_pair_close(&pair);
}
END_TEST

START_TEST(up_with_a_peer_by_hand)
{
    open_raw();
    raw_peer_shake_hands(&raw);
    ck_assert(tl_conn_is_up(pair.left->conn));
    ck_assert_uint_eq(raw.memory[0] | raw.memory[1] << 8, 777);
    close_raw();
}
END_TEST

/* The connection is up only after our own write was confirmed and the peer's write has come. */
START_TEST(both_halves_are_needed)
{
    open_raw();
    struct tl_message hello = raw_peer_hello(&raw);
    raw_peer_send(&raw, &hello);
    struct tl_message probed = raw_peer_message(TL_MESSAGE_PROBED, 0);
    raw_peer_send(&raw, &probed);
    raw_peer_run(&raw);
    ck_assert_uint_eq(pair.left->up_count, 0);
    const struct tl_message *theirs = raw_peer_heard(&raw, TL_MESSAGE_HELLO);
    memcpy(raw.memory, &theirs->challenge, 8);
    raw_peer_write(&raw, &theirs->destination, 0, 8, TL_IMMEDIATE_PROBE);
    raw_peer_run(&raw);
    ck_assert_uint_eq(pair.left->up_count, 1);
    close_raw();
}
END_TEST

/* -------------------------------------------------------------------------------------------------- handshakes -- */

START_TEST(hello_with_another_token)
{
    open_raw();
    struct tl_message hello = raw_peer_hello(&raw);
    hello.token ^= 1;
    raw_peer_send(&raw, &hello);
    expect_refused(TL_FAILED_PRECONDITION, "pair address");
}
END_TEST

/* What one link has told opens no other one, not even one of the same peer. */
START_TEST(hello_with_the_token_of_an_earlier_link)
{
    open_raw();
    uint64_t token = raw.token;
    raw_peer_shake_hands(&raw);
    error = (struct tl_error){.code = TL_OK};
    tl_conn_close(pair.left->conn, &error);
    raw_peer_close(&raw);
    ck_assert_uint_eq(pair.left->closed_count, 1);
    pair.left->up_count = pair.left->closed_count = 0;
    raw_peer_open(&raw, &pair);
    raw_peer_run(&raw);
    ck_assert_ptr_nonnull(raw_peer_heard(&raw, TL_MESSAGE_HELLO));
    struct tl_message hello = raw_peer_hello(&raw);
    ck_assert(hello.token != token);
    hello.token = token;
    raw_peer_send(&raw, &hello);
    expect_refused(TL_FAILED_PRECONDITION, "pair address");
}
END_TEST

START_TEST(hello_of_another_version)
{
    open_raw();
    struct tl_message hello = raw_peer_hello(&raw);
    hello.version++;
    raw_peer_send(&raw, &hello);
    expect_refused(TL_FAILED_PRECONDITION, "pair address");
}
END_TEST

START_TEST(hello_of_another_incarnation)
{
    open_raw();
    struct tl_message hello = raw_peer_hello(&raw);
    hello.incarnation++;
    raw_peer_send(&raw, &hello);
    expect_refused(TL_FAILED_PRECONDITION, "restarted");
}
END_TEST

START_TEST(hello_twice)
{
    open_raw();
    struct tl_message hello = raw_peer_hello(&raw);
    raw_peer_send(&raw, &hello);
    raw_peer_send(&raw, &hello);
    expect_refused(TL_UNAVAILABLE, "second HELLO");
}
END_TEST

START_TEST(hello_without_a_destination)
{
    open_raw();
    struct tl_message hello = raw_peer_hello(&raw);
    hello.destination.len_bytes = 0;
    raw_peer_send(&raw, &hello);
    expect_refused(TL_UNAVAILABLE, "without a descriptor");
}
END_TEST

START_TEST(hello_with_a_foreign_destination)
{
    open_raw();
    struct tl_message hello = raw_peer_hello(&raw);
    hello.destination.bytes[9] ^= 0xff;
    raw_peer_send(&raw, &hello);
    expect_refused(TL_UNAVAILABLE, "access");
}
END_TEST

START_TEST(probe_with_wrong_bytes)
{
    open_raw();
    struct tl_message hello = raw_peer_hello(&raw);
    raw_peer_send(&raw, &hello);
    raw_peer_write(&raw, &raw_peer_heard(&raw, TL_MESSAGE_HELLO)->destination, 0, 8, TL_IMMEDIATE_PROBE);
    expect_refused(TL_UNAVAILABLE, "wrong bytes");
}
END_TEST

START_TEST(probe_twice)
{
    open_raw();
    raw_peer_shake_hands(&raw);
    raw_peer_write(&raw, NULL, 0, 0, TL_IMMEDIATE_PROBE);
    raw_peer_run(&raw);
    ck_assert_uint_eq(pair.left->closed_count, 1);
    ck_assert_int_eq(pair.left->reason.code, TL_UNAVAILABLE);
    close_raw();
}
END_TEST

/* Every message except a handshake, before the handshake. */
START_TEST(not_handshake_done)
{
    enum tl_message_type type = (enum tl_message_type)_i;
    open_raw();
    struct tl_message message = raw_peer_message(type, 1);
    raw_peer_send(&raw, &message);
    raw_peer_run(&raw);
    bool is_harmless = type == TL_MESSAGE_PROBED || type == TL_MESSAGE_CREDIT;
    if (is_harmless) {
        ck_assert_uint_eq(pair.left->closed_count, 0);
        ck_assert_uint_eq(pair.left->up_count, 0);
        close_raw();
    } else {
        expect_refused(TL_UNAVAILABLE, "before the handshake was over");
    }
}
END_TEST

START_TEST(data_before_the_handshake)
{
    open_raw();
    raw_peer_write(&raw, NULL, 0, 0, 5);
    expect_refused(TL_UNAVAILABLE, "before the handshake was over");
}
END_TEST

START_TEST(no_message_at_all)
{
    open_raw();
    raw_peer_send_bytes(&raw, "nonsense", 8);
    expect_refused(TL_UNAVAILABLE, "broke the protocol");
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- in time -- */

START_TEST(nothing_comes)
{
    open_raw();
    fake_clock_advance(options.engine.connect_ns - 1);
    raw_peer_run(&raw);
    ck_assert_uint_eq(pair.left->closed_count, 0);
    fake_clock_advance(1);
    expect_refused(TL_DEADLINE_EXCEEDED, "its card takes packets of ");
}
END_TEST

START_TEST(only_a_handshake_comes)
{
    open_raw();
    struct tl_message hello = raw_peer_hello(&raw);
    raw_peer_send(&raw, &hello);
    raw_peer_run(&raw);
    fake_clock_advance(options.engine.connect_ns);
    expect_refused(TL_DEADLINE_EXCEEDED, "from 10.0.0.2, its writes do not; ");
}
END_TEST

START_TEST(our_write_is_not_confirmed)
{
    open_raw();
    struct tl_message hello = raw_peer_hello(&raw);
    raw_peer_send(&raw, &hello);
    const struct tl_message *theirs = raw_peer_heard(&raw, TL_MESSAGE_HELLO);
    memcpy(raw.memory, &theirs->challenge, 8);
    raw_peer_write(&raw, &theirs->destination, 0, 8, TL_IMMEDIATE_PROBE);
    raw_peer_run(&raw);
    fake_clock_advance(options.engine.connect_ns);
    expect_refused(TL_DEADLINE_EXCEEDED, "its program does not confirm them; ");
}
END_TEST

/* The network between the two loses what the rule says; the side of the rule gives the reason. */
static void expect_lost(const struct fake_rule *rule, bool is_of_left, int64_t after_ns, const char *words)
{
    engine_pair_init(&pair, &options);
    struct fake_rule lost = *rule;
    lost.times = FAKE_ALWAYS;
    lost.provider = is_of_left ? pair.left->provider : pair.right->provider;
    fake_fabric_add_rule(pair.fabric, &lost);
    engine_pair_connect(&pair);
    engine_pair_run(&pair);
    fake_clock_advance(after_ns);
    engine_pair_run(&pair);
    const struct engine_side *side = is_of_left ? pair.left : pair.right;
    ck_assert_uint_eq(side->up_count, 0);
    ck_assert_uint_eq(side->closed_count, 1);
    ck_assert_msg(strstr(side->reason.message, words) != NULL, "%s", side->reason.message);
    engine_pair_close(&pair);
}

START_TEST(nothing_arrives)
{
    expect_lost(&(struct fake_rule){.fault = FAKE_DROP}, true, options.engine.connect_ns,
                "nothing arrives through left (10.0.0.1) from 10.0.0.2, at any size, while the link over TCP works: "
                "the fabric is blocked; open it");
}
END_TEST

/* Each size that is tried, the size before it, and what a hop must carry for it. */
START_TEST(large_packets_are_lost)
{
    static const struct {
        uint64_t min_bytes;
        const char *words;
    } cases[] = {
        {9, "packets with 8 bytes of data pass through left from 10.0.0.1 to 10.0.0.2, those with 512 do not: a hop "
            "carries less than 572 bytes; set verbs.mtu to 256, or raise the MTU"},
        {513, "packets with 512 bytes of data pass through left from 10.0.0.1 to 10.0.0.2, those with 1024 do not: a "
              "hop carries less than 1084 bytes; set verbs.mtu to 512"},
        {2000, "those with 2048 do not: a hop carries less than 2108 bytes; set verbs.mtu to 1024"},
        {60000, "packets with 2048 bytes of data pass through left from 10.0.0.1 to 10.0.0.2, a write of 65536 bytes "
                "in packets of 2048 does not; packets are lost under load"},
    };
    expect_lost(&(struct fake_rule){.fault = FAKE_DROP, .kinds = FAKE_WRITE, .min_bytes = cases[_i].min_bytes}, true,
                options.engine.connect_ns, cases[_i].words);
}
END_TEST

/* The side that accepts measures second, towards the other one. */
START_TEST(large_packets_are_lost_on_the_way_back)
{
    expect_lost(&(struct fake_rule){.fault = FAKE_DROP, .kinds = FAKE_WRITE, .min_bytes = 1400}, false,
                options.engine.connect_ns,
                "packets with 1024 bytes of data pass through right from 10.0.0.1 to 10.0.0.2, those with 2048 do not");
}
END_TEST

/* The card notices before the handshake takes too long, and how far it came counts all the same. */
START_TEST(card_gives_up_first)
{
    expect_lost(&(struct fake_rule){.fault = FAKE_UNANSWERED}, true, 0, "nothing arrives through left");
    expect_lost(&(struct fake_rule){.fault = FAKE_UNANSWERED, .kinds = FAKE_WRITE, .min_bytes = 1400}, true, 0,
                "those with 2048 do not");
}
END_TEST

/* HELLO has passed, and the peer is gone: that says nothing about sizes. */
START_TEST(first_write_is_lost)
{
    expect_lost(&(struct fake_rule){.fault = FAKE_DROP, .kinds = FAKE_WRITE}, true, options.engine.connect_ns,
                "it stopped acknowledging ours: its process or machine is gone, or packets are lost; ");
    expect_lost(&(struct fake_rule){.fault = FAKE_UNANSWERED, .kinds = FAKE_WRITE}, true, 0,
                "it stopped acknowledging ours (left: the peer's card does not answer): its process or machine");
    expect_lost(&(struct fake_rule){.fault = FAKE_UNANSWERED, .kinds = FAKE_WRITE, .from = 2}, true, 0,
                "it stopped acknowledging ours");
}
END_TEST

/* The side that does not send the first handshake waits as long. */
START_TEST(opener_says_nothing)
{
    uint8_t left[TL_CONN_ADDRESS_BYTES];
    engine_pair_init(&pair, &options);
    engine_side_create_conn(pair.left);
    engine_side_create_conn(pair.right);
    uint32_t left_bytes = tl_conn_get_address(pair.left->conn, left);
    ck_assert_int_eq(tl_conn_connect(pair.right->conn, left, left_bytes, NULL), TL_OK);
    engine_pair_run(&pair);
    fake_clock_advance(options.engine.connect_ns);
    engine_pair_run(&pair);
    ck_assert_uint_eq(pair.right->closed_count, 1);
    ck_assert_int_eq(pair.right->reason.code, TL_DEADLINE_EXCEEDED);
    ck_assert_ptr_nonnull(strstr(pair.right->reason.message, "its program stands still, or the fabric is blocked; "));
    engine_pair_close(&pair);
}
END_TEST

/* --------------------------------------------------------------------------------------------------- addresses -- */

static uint8_t bytes[TL_CONN_ADDRESS_BYTES + 1];
static uint32_t len_bytes;

static void get_address(void)
{
    engine_pair_init(&pair, &options);
    engine_side_create_conn(pair.left);
    engine_side_create_conn(pair.right);
    len_bytes = tl_conn_get_address(pair.left->conn, bytes);
    ck_assert_uint_le(len_bytes, TL_CONN_ADDRESS_BYTES);
}

static void expect_address_refused(enum tl_status code)
{
    ck_assert_int_eq(tl_conn_connect(pair.right->conn, bytes, len_bytes, &error), code);
    ck_assert_int_eq(error.code, code);
    ck_assert_uint_gt(strlen(error.message), 0);
    engine_pair_run(&pair);
    ck_assert_uint_eq(pair.right->closed_count, 0); /* The call to tl_conn_close that follows closes it. */
    engine_pair_close(&pair);
    ck_assert_uint_eq(pair.right->closed_count, 1);
}

START_TEST(address_truncated)
{
    get_address();
    uint32_t whole_bytes = len_bytes;
    engine_pair_close(&pair);
    for (uint32_t cut = 0; cut < whole_bytes; cut++) {
        get_address();
        len_bytes = cut;
        expect_address_refused(TL_INVALID_ARGUMENT);
    }
    get_address();
    len_bytes++;
    expect_address_refused(TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(address_of_another_version)
{
    get_address();
    bytes[0]++;
    expect_address_refused(TL_FAILED_PRECONDITION);
}
END_TEST

START_TEST(address_of_another_incarnation)
{
    get_address();
    bytes[4]++;
    expect_address_refused(TL_FAILED_PRECONDITION);
}
END_TEST

/* Impossible numbers: slots, their length, inline values, requests, the length of the provider's part. */
START_TEST(address_with_impossible_numbers)
{
    static const struct {
        unsigned place;
        uint32_t value;
    } cases[] = {{20, 0},          {20, 15}, {20, 65537},         {20, UINT32_MAX}, {24, 1151},
                 {24, 65537},      {32, 0},  {32, (1 << 20) + 1}, {32, UINT32_MAX}, {28, TL_SLOT_BYTES - 255},
                 {28, UINT32_MAX}, {40, 0},  {40, 193},           {40, UINT32_MAX}};
    get_address();
    memcpy(bytes + cases[_i].place, &cases[_i].value, 4);
    expect_address_refused(TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(address_that_the_provider_refuses)
{
    get_address();
    bytes[44] ^= 1;
    expect_address_refused(TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(card_refuses_to_connect)
{
    get_address();
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_CONNECT_FAILURE});
    expect_address_refused(TL_UNAVAILABLE);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- creating -- */

static void expect_create_fails(enum tl_status code)
{
    struct tl_conn *conn = NULL;
    ck_assert_int_eq(tl_conn_create(pair.left->engine, NULL, &pair.right->self, 1, true, NULL, NULL, &conn, &error),
                     code);
    ck_assert_int_eq(error.code, code);
    ck_assert_ptr_null(conn);
    engine_pair_close(&pair);
}

START_TEST(no_queue_pair_left)
{
    engine_pair_init(&pair, &options);
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_CREATE_FAILURE});
    expect_create_fails(TL_RESOURCE_EXHAUSTED);
}
END_TEST

START_TEST(no_windows)
{
    options.provider.has_no_windows = true;
    engine_pair_init(&pair, &options);
    expect_create_fails(TL_UNIMPLEMENTED);
    options.engine.keys = TL_KEYS_REGION;
    engine_pair_open(&pair, &options);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(no_window_for_the_probe)
{
    engine_pair_init(&pair, &options);
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_EXPOSE_FAILURE, .times = FAKE_ALWAYS});
    engine_pair_connect(&pair);
    engine_pair_run(&pair);
    ck_assert_uint_eq(pair.left->closed_count, 1);
    ck_assert_int_eq(pair.left->reason.code, TL_RESOURCE_EXHAUSTED);
    engine_pair_close(&pair);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- closing -- */

START_TEST(closed_before_it_connects)
{
    engine_pair_init(&pair, &options);
    engine_side_create_conn(pair.left);
    engine_side_create_conn(pair.right);
    tl_error_set(&error, TL_CANCELLED, "not wanted");
    tl_conn_close(pair.left->conn, &error);
    ck_assert_uint_eq(pair.left->closed_count, 0); /* No callback runs inside a call. */
    /* The peer's address comes too late. */
    uint8_t pair_address[TL_CONN_ADDRESS_BYTES];
    uint32_t len_bytes = tl_conn_get_address(pair.right->conn, pair_address);
    ck_assert_int_eq(tl_conn_connect(pair.left->conn, pair_address, len_bytes, &error), TL_UNAVAILABLE);
    tl_conn_drain(pair.right->conn);
    engine_pair_run(&pair);
    ck_assert_uint_eq(pair.left->closed_count, 1);
    ck_assert_str_eq(pair.left->reason.message, "not wanted");
    ck_assert_uint_eq(pair.right->closed_count, 1);
    ck_assert_int_eq(pair.right->reason.code, TL_CANCELLED);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(closed_while_it_connects)
{
    for (unsigned rounds = 0; rounds < 8; rounds++) {
        engine_pair_init(&pair, &options);
        engine_pair_connect(&pair);
        for (unsigned i = 0; i < rounds; i++)
            (void)engine_side_round(&pair.sides[i % 2]);
        tl_error_set(&error, TL_CANCELLED, "not wanted");
        tl_conn_close(pair.left->conn, &error);
        tl_conn_close(pair.left->conn, &error);
        engine_pair_run(&pair);
        ck_assert_uint_eq(pair.left->closed_count, 1);
        ck_assert_str_eq(pair.left->reason.message, "not wanted");
        fake_clock_advance(options.engine.connect_ns);
        engine_pair_run(&pair);
        if (pair.right->up_count == 0) ck_assert_uint_eq(pair.right->closed_count, 1);
        engine_pair_close(&pair);
    }
}
END_TEST

/* The card goes away before, while and after it connects. */
START_TEST(device_gone)
{
    for (unsigned rounds = 0; rounds < 12; rounds++) {
        engine_pair_init(&pair, &options);
        engine_side_create_conn(pair.left);
        if (rounds == 0) fake_provider_remove(pair.left->provider);
        engine_pair_run(&pair);
        if (rounds > 0) {
            struct tl_error reason;
            tl_error_set(&reason, TL_CANCELLED, "again");
            tl_conn_close(pair.left->conn, &reason);
            engine_pair_run(&pair);
            engine_pair_connect(&pair);
            for (unsigned i = 1; i < rounds; i++)
                (void)engine_side_round(&pair.sides[i % 2]);
            fake_provider_remove(pair.left->provider);
            engine_pair_run(&pair);
        }
        ck_assert_ptr_null(pair.left->conn);
        ck_assert_int_eq(pair.left->reason.code, TL_UNAVAILABLE);
        engine_pair_close(&pair);
    }
}
END_TEST

static void add_tests(TCase *tcase)
{
    tcase_add_test(tcase, up_after_a_write_both_ways);
    tcase_add_loop_test(tcase, latency_and_rate_are_measured, 0, 3);
    tcase_add_test(tcase, up_with_a_peer_by_hand);
    tcase_add_test(tcase, both_halves_are_needed);
    tcase_add_test(tcase, hello_of_another_version);
    tcase_add_test(tcase, hello_of_another_incarnation);
    tcase_add_test(tcase, hello_twice);
    tcase_add_test(tcase, hello_without_a_destination);
    tcase_add_test(tcase, hello_with_a_foreign_destination);
    tcase_add_test(tcase, probe_with_wrong_bytes);
    tcase_add_test(tcase, probe_twice);
    tcase_add_loop_test(tcase, not_handshake_done, TL_MESSAGE_PROBED, TL_MESSAGE_GOODBYE + 1);
    tcase_add_test(tcase, data_before_the_handshake);
    tcase_add_test(tcase, no_message_at_all);
    tcase_add_test(tcase, nothing_comes);
    tcase_add_test(tcase, only_a_handshake_comes);
    tcase_add_test(tcase, nothing_arrives);
    tcase_add_loop_test(tcase, large_packets_are_lost, 0, 4);
    tcase_add_test(tcase, large_packets_are_lost_on_the_way_back);
    tcase_add_test(tcase, card_gives_up_first);
    tcase_add_test(tcase, first_write_is_lost);
    tcase_add_test(tcase, our_write_is_not_confirmed);
    tcase_add_test(tcase, opener_says_nothing);
    tcase_add_test(tcase, address_truncated);
    tcase_add_test(tcase, address_of_another_version);
    tcase_add_test(tcase, address_of_another_incarnation);
    tcase_add_loop_test(tcase, address_with_impossible_numbers, 0, 14);
    tcase_add_test(tcase, address_that_the_provider_refuses);
    tcase_add_test(tcase, card_refuses_to_connect);
    tcase_add_test(tcase, no_queue_pair_left);
    tcase_add_test(tcase, no_windows);
    tcase_add_test(tcase, no_window_for_the_probe);
    tcase_add_test(tcase, closed_before_it_connects);
    tcase_add_test(tcase, closed_while_it_connects);
    tcase_add_test(tcase, device_gone);
}

int main(void)
{
    Suite *suite = suite_create("engine_connect");
    TCase *tcase = tcase_create("engine_connect");
    tcase_add_checked_fixture(tcase, setup, NULL);
    add_tests(tcase);
    suite_add_tcase(suite, tcase);
    TCase *tokens = tcase_create("tokens");
    tcase_add_checked_fixture(tokens, setup, NULL);
    tcase_add_test(tokens, hello_with_another_token);
    tcase_add_test(tokens, hello_with_the_token_of_an_earlier_link);
    suite_add_tcase(suite, tokens);
    return run_suite(suite);
}
