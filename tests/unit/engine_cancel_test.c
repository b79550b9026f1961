// SPDX-License-Identifier: Apache-2.0
/*
 * Cancelling at every moment of a transfer: the fetch is done once, with the tensor or with CANCELLED; its memory is
 * given back only when no peer can write it any more; the owner keeps what was not received.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "fakes/engine_case.h"
#include "fakes/fake_clock.h"
#include "fakes/run_suite.h"

#define SIZE_BYTES 5000
#define CANARY 0x5a

static void setup(void)
{
    engine_pair_defaults(&options);
    options.engine.register_bytes = 1000;
}

/* The key is known afterwards. */
static void transfer_once(void)
{
    struct engine_ask first = {.is_open = false};
    engine_side_send(owner, "key", 100, engine_pool_bytes(owner, SIZE_BYTES, 1));
    engine_ask_start(asker, &first, "key", 100);
    engine_pair_run(&pair);
    ck_assert_int_eq(first.result.code, TL_OK);
    engine_ask_fini(&first);
}

/* ------------------------------------------------------------------------------------------------ every moment -- */

enum kind {
    KIND_KNOWN,
    KIND_UNKNOWN,
    KIND_DEAD,
    KIND_PIECES,
    KIND_BOUNCED,
    KIND_ASKER_REGISTERS,
    KIND_OWNER_REGISTERS,
    KIND_CHECKSUM,
    KIND_STATUS,
    KIND_READ,
    KIND_READ_IN_PIECES,
    KIND_READ_BOUNCED,
    KIND_READ_REGISTERED, /* The asker and the owner register. */
    KIND_READ_CHECKSUM,
    KIND_SOURCE_LATE, /* There is nothing to send when the request comes. */
    KINDS,
};

static struct tl_tensor *make_value(enum kind kind)
{
    struct tl_tensor *tensor;
    if (kind == KIND_OWNER_REGISTERS || kind == KIND_READ_REGISTERED) return engine_bytes(SIZE_BYTES, 2);
    if (kind != KIND_DEAD) return engine_pool_bytes(owner, SIZE_BYTES, 2);
    ck_assert_int_eq(tl_tensor_create_dead(&tensor, NULL), TL_OK);
    return tensor;
}

static void start(enum kind kind)
{
    options.engine.piece_bytes = kind == KIND_PIECES || kind == KIND_READ_IN_PIECES ? 700 : 0;
    options.engine.is_bounce_forced = kind == KIND_BOUNCED || kind == KIND_READ_BOUNCED;
    options.engine.is_reading = kind >= KIND_READ && kind <= KIND_READ_CHECKSUM;
    open_pair();
    if (kind != KIND_UNKNOWN) transfer_once();
    ask.is_unregistered = kind == KIND_ASKER_REGISTERS || kind == KIND_READ_REGISTERED;
    ask.wants_checksum = kind == KIND_CHECKSUM || kind == KIND_READ_CHECKSUM;
    if (kind == KIND_STATUS) {
        engine_side_refuse(owner, "key", TL_ABORTED, "refused", true);
    } else if (kind != KIND_SOURCE_LATE) {
        engine_side_send(owner, "key", 1, make_value(kind));
    }
    engine_ask_start(asker, &ask, "key", 1);
}

static void expect_consistent(enum kind kind)
{
    ck_assert_uint_eq(ask.done_count, 1);
    if (kind == KIND_STATUS) {
        ck_assert(ask.result.code == TL_ABORTED || ask.result.code == TL_CANCELLED);
        return;
    }
    ck_assert_msg(ask.result.code == TL_OK || ask.result.code == TL_CANCELLED, "%s", ask.result.message);
    bool has_it = ask.result.code == TL_OK;
    if (has_it && kind == KIND_DEAD) ck_assert(tl_tensor_is_dead(ask.fetch.destination));
    if (has_it && kind != KIND_DEAD) ck_assert(engine_is_bytes(ask.fetch.destination, SIZE_BYTES, 2));
}

/* The value is either here or there, never both and never neither. A value that was read is there until its owner
 * learns that. */
static void expect_one_value(enum kind kind, bool has_it)
{
    if (kind == KIND_STATUS) return;
    ck_assert_uint_eq(engine_side_values(owner), has_it || kind == KIND_SOURCE_LATE ? 0 : 1);
}

static struct tl_tensor *canary;

/* The user has the memory back, and uses it. */
static void reuse_memory(void)
{
    canary = NULL;
    if (ask.fetch.destination == NULL || tl_tensor_size_bytes(ask.fetch.destination) == 0) return;
    canary = tl_tensor_get(ask.fetch.destination);
    memset(tl_tensor_data(canary), CANARY, tl_tensor_size_bytes(canary));
}

static void expect_memory_untouched(void)
{
    if (canary == NULL) return;
    const uint8_t *data = tl_tensor_data(canary);
    uint64_t kept = 0;
    while (kept < tl_tensor_size_bytes(canary) && data[kept] == CANARY)
        kept++;
    ck_assert_uint_eq(kept, tl_tensor_size_bytes(canary));
    tl_tensor_put(canary);
}

/* Cancels after so many rounds; returns false when the fetch was done before. */
static bool cancel_after(enum kind kind, unsigned rounds, bool is_delayed)
{
    start(kind);
    const struct fake_rule delay = {
        .fault = FAKE_DELAY, .kinds = FAKE_WRITE | FAKE_READ, .times = FAKE_ALWAYS, .count = 7};
    if (is_delayed) fake_fabric_add_rule(pair.fabric, &delay);
    for (unsigned i = 0; i < rounds; i++) {
        if (i > 8) engine_side_settle(asker);
        if (i > 8) engine_side_settle(owner);
        (void)engine_side_round(&pair.sides[i % 2]);
    }
    bool was_open = ask.is_open;
    if (was_open) {
        engine_ask_cancel(&ask);
        ck_assert_uint_eq(ask.done_count, 0); /* No callback runs inside a call. */
        engine_ask_cancel(&ask);
    }
    for (unsigned i = 0; i < 400 && ask.is_open; i++) {
        engine_side_settle(asker);
        engine_side_settle(owner);
        (void)engine_side_round(&pair.sides[i % 2]);
    }
    expect_consistent(kind);
    bool has_it = ask.result.code == TL_OK;
    if (!options.engine.is_reading) expect_one_value(kind, has_it);
    reuse_memory();
    engine_pair_run(&pair);
    expect_one_value(kind, has_it);
    expect_memory_untouched();
    ck_assert_uint_eq(owner->open_serve_count, 0);
    ck_assert_uint_eq(pair.left->closed_count + pair.right->closed_count, 0);
    const char *why = "";
    ck_assert_msg(fake_fabric_is_quiet(pair.fabric, &why), "%s", why);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
    return was_open;
}

START_TEST(every_moment)
{
    for (int keys = TL_KEYS_WINDOW; keys <= TL_KEYS_REGION; keys++) {
        options.engine.keys = (enum tl_keys)keys;
        for (unsigned is_delayed = 0; is_delayed < 2; is_delayed++) {
            unsigned rounds = 0;
            while (cancel_after((enum kind)_i, rounds, is_delayed) && rounds < 30)
                rounds++;
            ck_assert_uint_gt(rounds, 3);
        }
    }
}
END_TEST

/* ------------------------------------------------------------------------------------------ particular moments -- */

START_TEST(before_it_has_a_handle)
{
    struct engine_ask second = {.is_open = false};
    options.engine.request_count = 1;
    open_pair();
    engine_ask_start(asker, &ask, "key", 1);
    engine_ask_start(asker, &second, "key", 2);
    engine_pair_run(&pair);
    uint64_t sent = engine_side_stats(asker).messages_sent;
    engine_ask_cancel(&second);
    engine_ask_cancel(&second);
    engine_pair_run(&pair);
    ck_assert_uint_eq(second.done_count, 1);
    ck_assert_int_eq(second.result.code, TL_CANCELLED);
    ck_assert_uint_eq(engine_side_stats(asker).messages_sent, sent);
    ck_assert(ask.is_open);
    engine_ask_cancel(&ask);
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_CANCELLED);
    ck_assert_int_eq(owner->last_end, TL_SERVE_CANCELLED);
    engine_ask_fini(&ask);
    engine_ask_fini(&second);
    engine_pair_close(&pair);
}
END_TEST

/* The memory stays the engine's as long as the write is under way. */
START_TEST(write_in_flight)
{
    open_pair();
    transfer_once();
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_DELAY, .kinds = FAKE_WRITE, .count = 1000});
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 2));
    engine_ask_start(asker, &ask, "key", 1);
    for (unsigned i = 0; i < 20; i++)
        (void)engine_side_round(&pair.sides[i % 2]);
    size_t place = fake_fabric_write_count(pair.fabric) - 1;
    ck_assert_ptr_eq(fake_fabric_write_at(pair.fabric, place).destination, tl_tensor_data(ask.fetch.destination));
    engine_ask_cancel(&ask);
    for (unsigned i = 0; i < 1000; i++) {
        (void)engine_side_round(&pair.sides[i % 2]);
        bool has_landed = fake_fabric_write_at(pair.fabric, place).has_landed;
        ck_assert_uint_eq(ask.done_count, 0);
        ck_assert(!has_landed);
    }
    while (ask.is_open)
        engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_OK); /* The value has arrived meanwhile. */
    ck_assert(engine_is_bytes(ask.fetch.destination, SIZE_BYTES, 2));
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* A peer that does not answer loses the connection, and only then is the memory given back. */
START_TEST(not_answered)
{
    options.engine.peer_timeout_ns = 1000 * TL_NS_PER_SEC;
    open_pair();
    transfer_once();
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    owner->is_silent = true;
    engine_ask_cancel(&ask);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 0);
    fake_clock_advance(options.engine.cancel_ns - 1);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 0);
    fake_clock_advance(1);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_int_eq(ask.result.code, TL_CANCELLED);
    ck_assert_uint_eq(asker->closed_count, 1);
    ck_assert_int_eq(asker->reason.code, TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(asker->reason.message, "cancel"));
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* The asker stands still while the peer answers: what has come is taken before the peer is given up. */
START_TEST(answer_waits_behind_others)
{
    enum { COUNT = 40 };
    static struct engine_ask asks[COUNT];
    options.fabric.poll_batch = 1;
    options.engine.slot_count = 64;
    options.engine.peer_timeout_ns = 1000 * TL_NS_PER_SEC;
    open_pair();
    for (unsigned i = 0; i < COUNT; i++)
        engine_ask_start(asker, &asks[i], "key", 1 + i);
    engine_ask_start(asker, &ask, "other", 1);
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++) {
        engine_side_send(owner, "key", 1 + i, engine_bytes(8, i));
        (void)engine_side_round(owner); /* so that each takes a slot */
    }
    engine_ask_cancel(&ask);
    (void)engine_side_round(asker);
    ck_assert_int_eq(asks[COUNT / 2].done_count, 0);
    for (unsigned i = 0; i < COUNT; i++)
        (void)engine_side_round(owner);
    fake_clock_advance(2 * options.engine.cancel_ns);
    engine_pair_run(&pair);
    ck_assert_msg(asker->closed_count == 0, "%s", asker->reason.message);
    ck_assert_int_eq(ask.result.code, TL_CANCELLED);
    for (unsigned i = 0; i < COUNT; i++)
        engine_ask_fini(&asks[i]);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* A peer cannot answer what is not sent: a CANCEL that waits for a slot takes no time from the answer. */
START_TEST(time_to_answer_begins_when_it_is_sent)
{
    enum { COUNT = 20 };
    static struct engine_ask asks[COUNT];
    options.engine.slot_count = 16;
    options.engine.peer_timeout_ns = 100 * TL_NS_PER_SEC;
    open_pair();
    owner->is_silent = true;
    for (unsigned i = 0; i < COUNT; i++) {
        engine_ask_start(asker, &asks[i], "key", i);
        (void)engine_side_round(asker); /* so that each REQUEST takes a slot, until there is none */
    }
    uint64_t sent = engine_side_stats(asker).messages_sent;
    engine_ask_cancel(&asks[0]);
    engine_pair_run(&pair);
    fake_clock_advance(2 * options.engine.cancel_ns);
    engine_pair_run(&pair);
    ck_assert_uint_eq(engine_side_stats(asker).messages_sent, sent);
    ck_assert_uint_eq(asker->closed_count, 0);
    owner->is_silent = false;
    engine_pair_run(&pair);
    ck_assert_int_eq(asks[0].result.code, TL_CANCELLED);
    ck_assert_uint_eq(asker->closed_count, 0);
    for (unsigned i = 1; i < COUNT; i++)
        engine_ask_cancel(&asks[i]);
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++)
        engine_ask_fini(&asks[i]);
    engine_pair_close(&pair);
}
END_TEST

/* Requests are before a CANCEL, and the peer returns slots seldom, but within its time-out. */
START_TEST(cancel_waits_while_slots_come_back)
{
    enum { COUNT = 600, ROUNDS = 200 };
    static struct engine_ask asks[COUNT];
    char key[TL_MAX_KEY_BYTES + 1];
    options.engine.slot_count = 16;
    options.engine.request_count = COUNT;
    options.fabric.poll_batch = 1;
    open_pair();
    uint64_t before = engine_side_stats(asker).messages_sent;
    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(key, sizeof(key), "%0*u", TL_MAX_KEY_BYTES, i); /* so that few requests fit into a slot */
        engine_ask_start(asker, &asks[i], key, 1);
    }
    for (unsigned i = 0; i < ROUNDS; i++)
        (void)engine_side_round(asker);
    engine_ask_cancel(&asks[0]);
    unsigned waits = 0;
    while (engine_side_stats(asker).messages_sent - before < COUNT) {
        uint64_t credits_sent = engine_side_stats(owner).credits_sent;
        fake_clock_advance(options.engine.peer_timeout_ns / 4 * 3);
        waits++;
        for (unsigned i = 0; i < ROUNDS && engine_side_stats(owner).credits_sent == credits_sent; i++)
            (void)engine_side_round(owner);
        for (unsigned i = 0; i < ROUNDS; i++)
            (void)engine_side_round(asker);
        ck_assert_msg(asker->closed_count == 0, "after %u waits: %s", waits, asker->reason.message);
    }
    ck_assert_uint_ge(waits, 3);
    engine_pair_run(&pair);
    ck_assert_int_eq(asks[0].result.code, TL_CANCELLED);
    ck_assert_uint_eq(asker->closed_count, 0);
    for (unsigned i = 1; i < COUNT; i++)
        engine_ask_cancel(&asks[i]);
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++)
        engine_ask_fini(&asks[i]);
    engine_pair_close(&pair);
}
END_TEST

/* A write that the card still has when the connection ends arrives late, but not in memory that was given back. */
START_TEST(late_write)
{
    open_pair();
    transfer_once();
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_LATE, .kinds = FAKE_WRITE});
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, SIZE_BYTES, 2));
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    engine_ask_cancel(&ask);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 0);
    fake_clock_advance(options.engine.cancel_ns);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
    reuse_memory();
    ck_assert_ptr_nonnull(canary);
    engine_pair_run(&pair);
    while (fake_fabric_land_late(pair.fabric)) {
    }
    expect_memory_untouched();
    engine_ask_fini(&ask);
    ck_assert_uint_eq(engine_side_values(owner), 1);
    engine_pair_close(&pair);
}
END_TEST

/* Many fetches are cancelled at once; some of their answers are on the way. */
START_TEST(many_at_once)
{
    enum { COUNT = 60 };
    static struct engine_ask asks[COUNT];
    options.engine.slot_count = 16;
    open_pair();
    transfer_once();
    unsigned kept_count = 0;
    for (unsigned i = 0; i < COUNT; i++)
        engine_ask_start(asker, &asks[i], "key", i);
    for (unsigned i = 0; i < COUNT; i += 2)
        engine_side_send(owner, "key", i, engine_pool_bytes(owner, SIZE_BYTES, i));
    for (unsigned i = 0; i < 10; i++)
        (void)engine_side_round(&pair.sides[i % 2]);
    for (unsigned i = 0; i < COUNT; i++)
        engine_ask_cancel(&asks[i]);
    engine_pair_run(&pair);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert_uint_eq(asks[i].done_count, 1);
        ck_assert(asks[i].result.code == TL_CANCELLED || (asks[i].result.code == TL_OK && i % 2 == 0));
        if (i % 2 == 0 && asks[i].result.code != TL_OK) kept_count++;
        engine_ask_fini(&asks[i]);
    }
    ck_assert_uint_eq(engine_side_values(owner), kept_count);
    ck_assert_uint_eq(owner->open_serve_count, 0);
    engine_pair_close(&pair);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_cancel");
    TCase *tcase = tcase_create("engine_cancel");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_loop_test(tcase, every_moment, 0, KINDS);
    tcase_add_test(tcase, before_it_has_a_handle);
    tcase_add_test(tcase, write_in_flight);
    tcase_add_test(tcase, not_answered);
    tcase_add_test(tcase, late_write);
    tcase_add_test(tcase, many_at_once);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("answer_waits_behind_others"); /* tests/defects runs it alone */
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, answer_waits_behind_others);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("time_to_answer_begins_when_it_is_sent"); /* tests/defects runs it alone */
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, time_to_answer_begins_when_it_is_sent);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("cancel_waits_while_slots_come_back"); /* tests/defects runs it alone */
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, cancel_waits_while_slots_come_back);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
