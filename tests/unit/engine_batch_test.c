// SPDX-License-Identifier: Apache-2.0
/* Messages that share slots: what is ready in one round leaves together, and each message is handled as if it had come
 * alone. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "dataplane/engine/request_internal.h"
#include "fakes/engine_case.h"
#include "fakes/fake_clock.h"
#include "fakes/raw_peer.h"
#include "fakes/run_suite.h"

enum { COUNT = 20, MOST_ROUNDS = 1000 };

static struct engine_ask asks[COUNT];
static struct raw_peer raw;

static void setup(void)
{
    engine_pair_defaults(&options);
}

/* Asks for the key of an own number. */
static void start(struct engine_ask *started, unsigned number, uint64_t step)
{
    char key[16];
    snprintf(key, sizeof(key), "key%u", number);
    *started = (struct engine_ask){.is_open = false};
    engine_ask_start(asker, started, key, step);
}

static void start_many(struct engine_ask *started, unsigned count, uint64_t step)
{
    for (unsigned i = 0; i < count; i++)
        start(&started[i], i, step);
}

static void start_all(void)
{
    start_many(asks, COUNT, 1);
}

/* Cancels all, and closes the pair when the peer has said that they are over. */
static void cancel_and_close(struct engine_ask *started, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        engine_ask_cancel(&started[i]);
    engine_pair_run(&pair);
    for (unsigned i = 0; i < count; i++)
        engine_ask_fini(&started[i]);
    engine_pair_close(&pair);
}

static void send_all_dead(void)
{
    char key[16];
    for (unsigned i = 0; i < COUNT; i++) {
        struct tl_tensor *tensor;
        snprintf(key, sizeof(key), "key%u", i);
        ck_assert_int_eq(tl_tensor_create_dead(&tensor, NULL), TL_OK);
        engine_side_send(owner, key, 1, tensor);
    }
}

static void expect_all(enum tl_status code)
{
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert_uint_eq(asks[i].done_count, 1);
        ck_assert_msg(asks[i].result.code == code, "%u: %s", i, asks[i].result.message);
        engine_ask_fini(&asks[i]);
    }
}

static void expect_credits_agree(void)
{
    for (unsigned s = 0; s < 2; s++) {
        ck_assert_uint_eq(pair.sides[s].conn->credits.peer_slots_used,
                          pair.sides[1 - s].conn->credits.own_slots_returned);
    }
}

/* ------------------------------------------------------------------------------------------------------ sharing -- */

/* The keys of a batch are prefetched, whether they are new, have a number, or travel as text. */
START_TEST(keys_of_a_batch_are_prefetched)
{
    options.engine.key_count = COUNT - 5;
    open_pair();
    for (unsigned round = 1; round <= 3; round++) {
        start_all();
        send_all_dead();
        engine_pair_run(&pair);
        expect_all(TL_OK);
        ck_assert_uint_eq(owner->prefetched_count, round * COUNT);
    }
    engine_pair_close(&pair);
}
END_TEST

START_TEST(messages_of_a_round_share_a_slot)
{
    open_pair();
    struct tl_engine_stats asked = engine_side_stats(asker), answered = engine_side_stats(owner);
    start_all();
    (void)engine_side_round(asker);
    ck_assert_uint_eq(engine_side_stats(asker).messages_sent - asked.messages_sent, COUNT);
    ck_assert_uint_eq(engine_side_stats(asker).slots_sent - asked.slots_sent, 1);
    send_all_dead();
    engine_pair_run(&pair);
    ck_assert_uint_eq(engine_side_stats(owner).messages_sent - answered.messages_sent, COUNT);
    ck_assert_uint_eq(engine_side_stats(owner).slots_sent - answered.slots_sent, 1);
    ck_assert_uint_eq(engine_side_stats(owner).slots_received - answered.slots_received, 1);
    ck_assert_uint_eq(engine_side_stats(owner).messages_received - answered.messages_received, COUNT);
    expect_credits_agree();
    expect_all(TL_OK);
    ck_assert_uint_eq(engine_side_values(owner), 0); /* Each DONE was completed. */
    engine_pair_close(&pair);
}
END_TEST

static uint64_t in_place(struct engine_side *side)
{
    struct fake_counters counters;
    fake_provider_get_counters(side->provider, &counters);
    return counters.messages_in_place;
}

/* Messages are composed where they are sent from, and not copied. */
START_TEST(batches_are_composed_in_place)
{
    open_pair();
    uint64_t asked = in_place(asker), answered = in_place(owner);
    start_all();
    send_all_dead();
    engine_pair_run(&pair);
    ck_assert_uint_eq(in_place(asker) - asked, 1);
    ck_assert_uint_eq(in_place(owner) - answered, 1);
    expect_all(TL_OK);
    engine_pair_close(&pair);
}
END_TEST

/* A write that is posted meanwhile may need that place. */
START_TEST(a_write_moves_the_batch)
{
    static const bool is_written[] = {false, true, false};
    enum { THREE = TL_ARRAY_COUNT(is_written), SIZE_BYTES = 8000 };
    char key[16];
    open_pair();
    for (uint64_t step = 1; step <= 2; step++) { /* the first makes the meta-data known */
        start_many(asks, THREE, step);
        engine_pair_run(&pair);
        for (unsigned i = 0; i < THREE; i++) {
            struct tl_tensor *tensor = engine_pool_bytes(owner, SIZE_BYTES, 1);
            if (!is_written[i]) {
                tl_tensor_put(tensor);
                ck_assert_int_eq(tl_tensor_create_dead(&tensor, NULL), TL_OK);
            }
            snprintf(key, sizeof(key), "key%u", i);
            engine_side_send(owner, key, step, tensor);
        }
        uint64_t before = in_place(owner);
        struct tl_engine_stats answered = engine_side_stats(owner);
        (void)engine_side_round(owner);
        if (step == 2) {
            ck_assert_uint_eq(in_place(owner), before);
            ck_assert_uint_eq(engine_side_stats(owner).writes_posted - answered.writes_posted, 1);
            ck_assert_uint_eq(engine_side_stats(owner).messages_sent - answered.messages_sent, 2);
            ck_assert_uint_eq(engine_side_stats(owner).slots_sent - answered.slots_sent, 1);
        }
        engine_pair_run(&pair);
        for (unsigned i = 0; i < THREE; i++) {
            ck_assert_msg(asks[i].result.code == TL_OK, "%s", asks[i].result.message);
            engine_ask_fini(&asks[i]);
        }
    }
    engine_pair_close(&pair);
}
END_TEST

/* However many begin at once, each round leaves room for other connections. */
START_TEST(so_many_requests_in_a_round)
{
    enum { MANY = 1100 };
    static struct engine_ask many[MANY];
    options.engine.request_count = MANY;
    options.engine.slot_count = options.engine.work_count = 256;
    open_pair();
    uint64_t before = engine_side_stats(asker).messages_sent;
    for (unsigned i = 0; i < MANY; i++)
        engine_ask_start(asker, &many[i], "key", i);
    static const unsigned begun[] = {512, 1024, MANY};
    for (unsigned i = 0; i < TL_ARRAY_COUNT(begun); i++) {
        (void)engine_side_round(asker);
        ck_assert_uint_eq(engine_side_stats(asker).messages_sent - before, begun[i]);
    }
    cancel_and_close(many, MANY);
}
END_TEST

/* An owner posts so many bytes of a group in a round, and at most one piece more. */
START_TEST(so_many_bytes_in_a_round)
{
    enum { MANY = 10, PIECE_BYTES = 256 * 1024, SIZE_BYTES = 3 * PIECE_BYTES, MOST_BYTES = 2 * 1024 * 1024 };
    static struct engine_ask many[MANY];
    options.engine.piece_bytes = PIECE_BYTES;
    open_pair();
    for (uint64_t i = 0; i < MANY; i++) {
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, SIZE_BYTES, i));
        engine_ask_start(asker, &many[i], "key", i);
    }
    uint64_t before = engine_side_stats(owner).bytes_sent, most = 0;
    for (unsigned i = 0; i < MOST_ROUNDS; i++) {
        (void)engine_side_round(asker);
        engine_side_settle(asker);
        uint64_t sent = engine_side_stats(owner).bytes_sent;
        (void)engine_side_round(owner);
        sent = engine_side_stats(owner).bytes_sent - sent;
        ck_assert_uint_le(sent, MOST_BYTES + PIECE_BYTES);
        if (sent > most) most = sent;
    }
    engine_pair_run(&pair);
    ck_assert_uint_eq(engine_side_stats(owner).bytes_sent - before, MANY * SIZE_BYTES);
    ck_assert_uint_ge(most, MOST_BYTES);
    for (unsigned i = 0; i < MANY; i++) {
        ck_assert_msg(many[i].result.code == TL_OK, "%s", many[i].result.message);
        engine_ask_fini(&many[i]);
    }
    engine_pair_close(&pair);
}
END_TEST

/* A single message leaves in the round that has made it, in a slot of its own. */
START_TEST(single_message)
{
    open_pair();
    uint64_t slots_sent = engine_side_stats(asker).slots_sent;
    engine_ask_start(asker, &ask, "key", 1);
    (void)engine_side_round(asker);
    ck_assert_uint_eq(engine_side_stats(asker).slots_sent - slots_sent, 1);
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, 500, 1));
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_OK);
    ck_assert_uint_eq(engine_side_stats(asker).slots_sent - slots_sent, 2);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* What does not fit takes further slots. */
START_TEST(more_messages_than_a_slot_holds)
{
    enum { TEXT_BYTES = 700 };
    char key[16], text[TEXT_BYTES + 1];
    open_pair();
    memset(text, 't', TEXT_BYTES);
    text[TEXT_BYTES] = '\0';
    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(key, sizeof(key), "key%u", i);
        engine_side_refuse(owner, key, TL_INTERNAL, text, true);
    }
    uint64_t slots_sent = engine_side_stats(owner).slots_sent;
    start_all();
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++)
        ck_assert_str_eq(asks[i].result.message, text);
    unsigned in_a_slot = (TL_SLOT_BYTES - TL_BATCH_HEAD_BYTES) / (TEXT_BYTES + 14);
    ck_assert_uint_eq(engine_side_stats(owner).slots_sent - slots_sent, (COUNT + in_a_slot - 1) / in_a_slot);
    expect_credits_agree();
    expect_all(TL_INTERNAL);
    engine_pair_close(&pair);
}
END_TEST

static uint64_t rings(struct engine_side *side)
{
    struct fake_counters counters;
    fake_provider_get_counters(side->provider, &counters);
    return counters.rings;
}

/* The peer works on the first of many messages while the rest is composed. */
START_TEST(many_messages_leave_in_parts)
{
    enum { MANY = 200, PARTS = 4 };
    static struct engine_ask many[MANY];
    options.engine.request_count = MANY;
    open_pair();
    start_many(many, MANY, 1);
    uint64_t rung = rings(asker), slots_sent = engine_side_stats(asker).slots_sent;
    (void)engine_side_round(asker);
    ck_assert_uint_eq(engine_side_stats(asker).slots_sent - slots_sent, PARTS);
    ck_assert_uint_eq(rings(asker) - rung, PARTS);
    cancel_and_close(many, MANY);
}
END_TEST

/* An asker whose peer takes nothing sends requests of two lots, and one question what the peer has taken; the others
 * follow when that is known, although nothing was answered. Until then most of them have not begun. */
START_TEST(requests_wait_for_those_before)
{
    enum { ROUND = 512, SENT = 4 * ROUND, MANY = 10 * ROUND };
    static struct engine_ask many[MANY];
    options.engine.request_count = MANY;
    options.engine.slot_count = 128;
    open_pair();
    struct tl_engine_stats before = engine_side_stats(asker), taken = engine_side_stats(owner);
    for (unsigned i = 0; i < MANY; i++) {
        start(&many[i], i, 1);
        if ((i + 1) % ROUND == 0) (void)engine_side_round(asker);
    }
    struct tl_engine_stats after = engine_side_stats(asker);
    ck_assert_uint_eq(after.credits_sent - before.credits_sent, 1);
    ck_assert_uint_eq(after.messages_sent - before.messages_sent, SENT + 1);
    ck_assert_uint_eq(asker->conn->requests.open_count, SENT + ROUND);
    while (engine_side_round(owner))
        continue;
    while (engine_side_round(asker))
        continue;
    ck_assert_uint_eq(engine_side_stats(asker).messages_sent - before.messages_sent, 2 * (SENT + 1));
    engine_pair_run(&pair);
    ck_assert_uint_eq(engine_side_stats(owner).messages_received - taken.messages_received, MANY + 2);
    cancel_and_close(many, MANY);
}
END_TEST

/* Slots that were used for other messages since the last lot of requests may be any number. */
START_TEST(requests_after_any_number_of_slots)
{
    static const uint32_t distances[] = {0, 0x40000000, 0x80000000, 0xC0000000, 0xFFFFFFF0};
    enum { MANY = 1100 };
    static struct engine_ask many[MANY];
    options.engine.request_count = MANY;
    open_pair();
    asker->conn->credits.peer_slots_used += distances[_i];
    asker->conn->credits.peer_slots_returned += distances[_i];
    owner->conn->credits.own_slots_returned += distances[_i];
    owner->conn->credits.own_slots_reported += distances[_i];
    struct tl_engine_stats before = engine_side_stats(owner);
    start_many(many, MANY, 1);
    engine_pair_run(&pair);
    ck_assert_uint_ge(engine_side_stats(owner).messages_received - before.messages_received, MANY);
    cancel_and_close(many, MANY);
}
END_TEST

/* Values leave in parts, too. */
START_TEST(many_bytes_leave_in_parts)
{
    enum { SIZE_BYTES = 32 * 1024, PARTS = COUNT / 2 };
    char key[16];
    open_pair();
    for (uint64_t step = 1; step <= 2; step++) { /* the first makes the meta-data known */
        start_many(asks, COUNT, step);
        engine_pair_run(&pair);
        uint64_t rung = rings(owner);
        for (unsigned i = 0; i < COUNT; i++) {
            snprintf(key, sizeof(key), "key%u", i);
            engine_side_send(owner, key, step, engine_pool_bytes(owner, SIZE_BYTES, (uint8_t)i));
        }
        (void)engine_side_round(owner);
        if (step == 2) ck_assert_uint_ge(rings(owner) - rung, PARTS);
        engine_pair_run(&pair);
        expect_all(TL_OK);
    }
    engine_pair_close(&pair);
}
END_TEST

static bool has_large_begun(void)
{
    const struct request *request = asks[1].fetch.transport_state;
    return request != NULL && request->received_bytes > 0;
}

/* A message is not held back by the pieces of a large tensor that are posted in the same round. */
START_TEST(large_tensors_do_not_pass)
{
    enum { PIECE_BYTES = 16 * 1024, SIZE_BYTES = 40 * PIECE_BYTES, MOST_BYTES = 256 * 1024 + PIECE_BYTES };
    struct tl_tensor *dead;
    options.engine.piece_bytes = PIECE_BYTES;
    options.fabric.poll_batch = 1;
    open_pair();
    engine_side_send(owner, "large", 1, engine_pool_bytes(owner, SIZE_BYTES, 1));
    asks[1] = (struct engine_ask){.is_open = false};
    engine_ask_start(asker, &asks[1], "large", 1); /* makes its meta-data known */
    engine_pair_run(&pair);
    engine_ask_fini(&asks[1]);
    asks[0] = asks[1] = (struct engine_ask){.is_open = false};
    engine_ask_start(asker, &asks[0], "dead", 2);
    engine_ask_start(asker, &asks[1], "large", 2);
    engine_pair_run(&pair);
    ck_assert_int_eq(tl_tensor_create_dead(&dead, NULL), TL_OK);
    engine_side_send(owner, "dead", 2, dead);
    engine_side_send(owner, "large", 2, engine_pool_bytes(owner, SIZE_BYTES, 2));
    for (unsigned i = 0; i < MOST_ROUNDS && asks[0].done_count == 0; i++) {
        (void)engine_side_round(owner);
        (void)engine_side_round(asker);
        if (asks[0].done_count > 0 || !has_large_begun()) continue;
        const struct request *request = asks[1].fetch.transport_state;
        ck_assert_uint_le(request->received_bytes, MOST_BYTES);
    }
    ck_assert_uint_eq(asks[0].done_count, 1);
    engine_pair_run(&pair);
    ck_assert(engine_is_bytes(asks[1].fetch.destination, SIZE_BYTES, 2));
    engine_ask_fini(&asks[0]);
    engine_ask_fini(&asks[1]);
    engine_pair_close(&pair);
}
END_TEST

/* A batch is not longer than the slots of its receiver are; the raw peer checks that. */
START_TEST(shorter_slots_of_the_peer)
{
    enum { KEY_BYTES = 300, IN_A_SLOT = 3 };
    char key[KEY_BYTES + 1];
    options.is_right_raw = true;
    raw_peer_slot_bytes = TL_LEAST_SLOT_BYTES;
    engine_pair_init(&pair, &options);
    raw_peer_open(&raw, &pair);
    raw_peer_shake_hands(&raw);
    unsigned heard = raw.heard_count, consumed = raw.consumed;
    memset(key, 'k', KEY_BYTES);
    key[KEY_BYTES] = '\0';
    for (unsigned i = 0; i < COUNT; i++) {
        asks[i] = (struct engine_ask){.is_open = false};
        engine_ask_start(pair.left, &asks[i], key, i);
    }
    raw_peer_run(&raw);
    ck_assert_uint_eq(raw.heard_count - heard, COUNT);
    ck_assert_uint_eq(raw.consumed - consumed, (COUNT + IN_A_SLOT - 1) / IN_A_SLOT);
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "the test is over");
    tl_conn_close(pair.left->conn, &reason);
    raw_peer_close(&raw);
    expect_all(TL_UNAVAILABLE);
    engine_pair_close(&pair);
    raw_peer_slot_bytes = TL_SLOT_BYTES;
}
END_TEST

/* -------------------------------------------------------------------------------------------------------- faults -- */

/* The batch with all answers is lost, or its completion: each value is received once, over the next connection. */
START_TEST(batch_that_is_lost)
{
    static const enum fake_fault faults[] = {FAKE_DROP, FAKE_BREAK, FAKE_POST_FAILURE, FAKE_CQ_OVERRUN};
    open_pair();
    start_all();
    engine_pair_run(&pair);
    fake_fabric_add_rule(
        pair.fabric,
        &(struct fake_rule){.fault = faults[_i], .provider = owner->provider, .kinds = FAKE_MESSAGE, .times = 1});
    send_all_dead();
    for (unsigned i = 0; i < 8; i++) {
        engine_pair_run(&pair);
        fake_clock_advance(options.engine.peer_timeout_ns / 4);
    }
    engine_pair_run(&pair);
    ck_assert_uint_ge(pair.left->closed_count, 1);
    if (pair.right->conn != NULL) {
        struct tl_error reason;
        tl_error_set(&reason, TL_UNAVAILABLE, "the other side has closed");
        tl_conn_close(pair.right->conn, &reason);
        engine_pair_run(&pair);
    }
    engine_pair_connect(&pair);
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert_uint_eq(asks[i].done_count, 1);
        if (asks[i].result.code == TL_OK) continue;
        ck_assert_int_eq(asks[i].result.code, TL_UNAVAILABLE);
        engine_ask_start(asker, &asks[i], NULL, 0);
    }
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert_int_eq(asks[i].result.code, TL_OK);
        engine_ask_fini(&asks[i]);
    }
    ck_assert_uint_eq(engine_side_values(owner), 0);
    engine_pair_close(&pair);
}
END_TEST

static void close_in_callback(struct engine_ask *done)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "closed");
    tl_conn_close(done->side->conn, &reason);
}

/* The connection is closed while answers of the other side wait for their slot. */
START_TEST(closed_while_messages_wait)
{
    open_pair();
    start_all();
    asks[0].on_done = close_in_callback;
    engine_pair_run(&pair);
    send_all_dead();
    engine_pair_run(&pair);
    expect_all(TL_OK); /* All had come in one slot. */
    ck_assert_uint_eq(engine_side_values(owner), 0);
    engine_pair_close(&pair);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- hostile -- */

static void open_raw(void)
{
    options.is_right_raw = true;
    engine_pair_init(&pair, &options);
    raw_peer_open(&raw, &pair);
    raw_peer_shake_hands(&raw);
}

static void expect_ended(void)
{
    raw_peer_run(&raw);
    ck_assert_uint_eq(pair.left->closed_count, 1);
    ck_assert_uint_eq(engine_side_stats(pair.left).protocol_errors, 1);
    raw_peer_close(&raw);
    engine_pair_close(&pair);
}

/* The messages in front of one that is wrong count. */
START_TEST(wrong_message_behind_others)
{
    uint8_t bytes[TL_SLOT_BYTES];
    open_raw();
    struct tl_message cancel = raw_peer_message(TL_MESSAGE_CANCEL, 5);
    tl_batch_encode_head(bytes, raw.consumed);
    uint32_t len_bytes = TL_BATCH_HEAD_BYTES;
    for (unsigned i = 0; i < 3; i++)
        len_bytes += tl_message_encode(&cancel, bytes + len_bytes);
    uint64_t received = engine_side_stats(pair.left).messages_received;
    if (_i == 0) len_bytes--;                         /* It is cut. */
    if (_i == 1) bytes[len_bytes++] = 0;              /* A byte follows. */
    if (_i == 2) bytes[len_bytes - 8] = 99;           /* There is no such type. */
    if (_i == 3) bytes[len_bytes - 8 + 2] = 9;        /* It says that it has a byte more. */
    if (_i == 4) len_bytes = TL_BATCH_HEAD_BYTES;     /* There is no message. */
    if (_i == 5) len_bytes = TL_BATCH_HEAD_BYTES - 1; /* There is not even a head. */
    raw_peer_send_bytes(&raw, bytes, len_bytes);
    raw_peer_run(&raw);
    uint64_t in_front = _i >= 4 ? 0 : _i == 1 ? 4 : 3;
    ck_assert_uint_eq(engine_side_stats(pair.left).messages_received - received, in_front);
    expect_ended();
}
END_TEST

START_TEST(batch_of_a_peer)
{
    open_raw();
    struct tl_message messages[3] = {raw_peer_message(TL_MESSAGE_CANCEL, 5), raw_peer_message(TL_MESSAGE_CANCEL, 6),
                                     raw_peer_message(TL_MESSAGE_CREDIT, 0)};
    unsigned heard = raw.heard_count, consumed = raw.consumed;
    raw_peer_send_batch(&raw, messages, 3);
    raw_peer_run(&raw);
    ck_assert_uint_eq(raw.heard_count - heard, 2); /* CANCELLED, twice, */
    ck_assert_uint_eq(raw.consumed - consumed, 1); /* in one slot. */
    ck_assert_uint_eq(raw_peer_heard(&raw, TL_MESSAGE_CANCELLED)->handle, 6);
    raw_peer_close(&raw);
    engine_pair_close(&pair);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_batch");
    TCase *tcase = tcase_create("engine_batch");
    tcase_add_checked_fixture(tcase, setup, NULL);
    /* A case of its own, which tests/defects selects. */
    TCase *sharing = tcase_create("messages_of_a_round_share_a_slot");
    tcase_add_checked_fixture(sharing, setup, NULL);
    tcase_add_test(sharing, messages_of_a_round_share_a_slot);
    TCase *parts = tcase_create("many_bytes_leave_in_parts");
    tcase_add_checked_fixture(parts, setup, NULL);
    tcase_add_test(parts, many_bytes_leave_in_parts);
    TCase *lots = tcase_create("requests_wait_for_those_before");
    tcase_add_checked_fixture(lots, setup, NULL);
    tcase_add_test(lots, requests_wait_for_those_before);
    tcase_add_loop_test(lots, requests_after_any_number_of_slots, 0, 5);
    suite_add_tcase(suite, lots);
    suite_add_tcase(suite, parts);
    TCase *rounds = tcase_create("so_many_requests_in_a_round");
    tcase_add_checked_fixture(rounds, setup, NULL);
    tcase_add_test(rounds, so_many_requests_in_a_round);
    suite_add_tcase(suite, rounds);
    TCase *bytes = tcase_create("so_many_bytes_in_a_round");
    tcase_add_checked_fixture(bytes, setup, NULL);
    tcase_add_test(bytes, so_many_bytes_in_a_round);
    suite_add_tcase(suite, bytes);
    suite_add_tcase(suite, sharing);
    add_own_case(suite, "batches_are_composed_in_place", setup, NULL, batches_are_composed_in_place);
    add_own_case(suite, "a_write_moves_the_batch", setup, NULL, a_write_moves_the_batch);
    tcase_add_test(tcase, keys_of_a_batch_are_prefetched);
    tcase_add_test(tcase, single_message);
    tcase_add_test(tcase, more_messages_than_a_slot_holds);
    tcase_add_test(tcase, many_messages_leave_in_parts);
    tcase_add_test(tcase, shorter_slots_of_the_peer);
    tcase_add_test(tcase, large_tensors_do_not_pass);
    tcase_add_loop_test(tcase, batch_that_is_lost, 0, 4);
    tcase_add_test(tcase, closed_while_messages_wait);
    tcase_add_loop_test(tcase, wrong_message_behind_others, 0, 6);
    tcase_add_test(tcase, batch_of_a_peer);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
