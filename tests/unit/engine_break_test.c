// SPDX-License-Identifier: Apache-2.0
/*
 * The end of a connection: a card or a peer that fails at every operation, a peer time-out, draining, closing.
 * Everything that was open ends exactly once, and what was not received is received once over the next connection.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "fakes/engine_case.h"
#include "fakes/fake_clock.h"
#include "fakes/run_suite.h"

#define COUNT 60 /* The number of asks in each direction. */

#define CROWD 1100 /* More than two rounds end. */

static struct engine_ask asks[2][COUNT];

static void setup(void)
{
    engine_pair_defaults(&options);
    options.engine.register_bytes = 1000;
}

static void start_many(void)
{
    char key[16];
    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(key, sizeof(key), "key%u", i % 5);
        for (unsigned s = 0; s < 2; s++) {
            bool is_pooled = i % 3 != 0;
            struct engine_side *side = &pair.sides[s];
            asks[s][i] = (struct engine_ask){.is_unregistered = i % 4 == 0};
            if (i % 7 == 6) continue; /* It is asked for before it is sent. */
            engine_side_send(side, key, i,
                             is_pooled ? engine_pool_bytes(side, 500 + 600 * (i % 5), i)
                                       : engine_bytes(500 + 600 * (i % 5), i));
        }
    }
    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(key, sizeof(key), "key%u", i % 5);
        for (unsigned s = 0; s < 2; s++)
            engine_ask_start(&pair.sides[s], &asks[s][i], key, i);
    }
}

/* Everything ends at the first try, or after another connection. */
static void finish_many(unsigned unconfirmed_count)
{
    char key[16];
    for (unsigned attempt = 0; attempt < 2; attempt++) {
        engine_pair_run(&pair);
        ck_assert((pair.left->conn == NULL) == (pair.right->conn == NULL));
        if (pair.left->conn == NULL) engine_pair_connect(&pair);
        engine_pair_run(&pair);
        ck_assert(tl_conn_is_up(pair.left->conn) && tl_conn_is_up(pair.right->conn));
        for (unsigned i = 0; i < 2 * COUNT; i++) {
            struct engine_ask *one = &asks[i % 2][i / 2];
            if (one->is_open || one->result.code == TL_OK) continue;
            ck_assert_int_eq(one->result.code, TL_UNAVAILABLE);
            ck_assert(!one->fetch.is_final);
            engine_ask_start(&pair.sides[i % 2], one, NULL, 0);
        }
        for (unsigned i = 6; attempt == 0 && i < COUNT; i += 7) {
            snprintf(key, sizeof(key), "key%u", i % 5);
            for (unsigned s = 0; s < 2; s++)
                engine_side_send(&pair.sides[s], key, i, engine_pool_bytes(&pair.sides[s], 500 + 600 * (i % 5), i));
        }
        engine_pair_run(&pair);
    }
    for (unsigned i = 0; i < 2 * COUNT; i++) {
        struct engine_ask *one = &asks[i % 2][i / 2];
        ck_assert_msg(one->result.code == TL_OK, "%s", one->result.message);
        ck_assert(engine_is_bytes(one->fetch.destination, 500 + 600 * (i / 2 % 5), i / 2));
        engine_ask_fini(one);
    }
    ck_assert_uint_le(engine_side_values(pair.left) + engine_side_values(pair.right), unconfirmed_count);
}

/* --------------------------------------------------------------------------------------------- every operation -- */

static const enum fake_fault faults[] = {FAKE_DROP,  FAKE_LOSE_ACK,     FAKE_LATE,      FAKE_RNR,
                                         FAKE_BREAK, FAKE_POST_FAILURE, FAKE_CQ_OVERRUN};
#define FAULT_COUNT ((int)(sizeof(faults) / sizeof(faults[0])))

/* Returns false when nothing has failed. */
static bool break_at(enum fake_fault fault, unsigned number, unsigned side)
{
    open_pair();
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = fault,
                                                          .provider = pair.sides[side].provider,
                                                          .kinds = FAKE_MESSAGE | FAKE_WRITE,
                                                          .from = number});
    start_many();
    engine_pair_run(&pair);
    for (unsigned i = 0; i < 12; i++) { /* The peer time-out notices what is stuck, and then the other side does. */
        fake_clock_advance(options.engine.peer_timeout_ns / 4);
        engine_pair_run(&pair);
    }
    bool has_broken = pair.left->closed_count + pair.right->closed_count > 0;
    if (has_broken) ck_assert_uint_eq(engine_side_stats(pair.left).protocol_errors, 0);
    fake_fabric_clear_rules(pair.fabric);
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "the other side has closed");
    for (unsigned s = 0; s < 2; s++) {
        /* A side that posts nothing does not notice the end; the control plane reports it. */
        if (pair.sides[s].conn != NULL && pair.sides[1 - s].conn == NULL) tl_conn_close(pair.sides[s].conn, &reason);
    }
    /* An owner that never learns that its write has arrived keeps the value for its asker. */
    finish_many(fault == FAKE_LOSE_ACK || fault == FAKE_LATE ? 1 : 0);
    engine_pair_close(&pair);
    return has_broken;
}

START_TEST(every_operation)
{
    unsigned number = 1;
    for (unsigned side = 0; number < 60 && break_at(faults[_i], number, side); side = 1 - side) {
        options.fabric.is_flushed_first = number / 2 % 2;
        number += number < 25 ? 1 : 8;
    }
    ck_assert_uint_gt(number, 40);
}
END_TEST

START_TEST(closed_at_every_round)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "not wanted any more");
    for (unsigned rounds = 0; rounds < 30; rounds++) {
        open_pair();
        start_many();
        for (unsigned i = 0; i < rounds; i++)
            (void)engine_side_round(&pair.sides[i % 2]);
        tl_conn_close(pair.sides[rounds % 2].conn, &reason);
        engine_pair_run(&pair);
        for (unsigned s = 0; s < 2; s++) {
            if (pair.sides[s].conn != NULL) tl_conn_close(pair.sides[s].conn, &reason);
        }
        engine_pair_run(&pair);
        ck_assert_uint_eq(pair.left->open_ask_count + pair.right->open_ask_count, 0);
        finish_many(0);
        engine_pair_close(&pair);
    }
}
END_TEST

/* One-shot values that were offered are kept for their asker; those that came count as received. */
START_TEST(source_learns_how_each_serve_ended)
{
    open_pair();
    engine_side_send(owner, "first", 1, engine_pool_bytes(owner, 100, 1));
    engine_ask_start(asker, &ask, "first", 1);
    engine_pair_run(&pair);
    ck_assert_int_eq(owner->last_end, TL_SERVE_RECEIVED);
    engine_ask_fini(&ask);
    fake_fabric_add_rule(pair.fabric, &(struct fake_rule){.fault = FAKE_BREAK, .kinds = FAKE_WRITE});
    engine_side_send(owner, "second", 1, engine_pool_bytes(owner, 100, 1));
    engine_ask_start(asker, &ask, "second", 1);
    engine_pair_run(&pair);
    ck_assert_int_eq(owner->last_end, TL_SERVE_BROKEN);
    ck_assert_uint_eq(engine_side_values(owner), 1);
    ck_assert_uint_eq(owner->closed_count, 1);
    ck_assert_uint_eq(engine_side_stats(owner).connections_broken, 1);
    for (unsigned i = 0; i < 2; i++) { /* First what the side had received before, then nothing. */
        fake_clock_advance(options.engine.peer_timeout_ns);
        engine_pair_run(&pair);
    }
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

#define MANY 2000

/* What may be unknown to the owner is bounded by the slots of its peer, because a batch has only so many messages. */
START_TEST(unconfirmed_answers_are_bounded)
{
    static struct engine_ask many[MANY];
    options.engine.slot_count = 16;
    options.engine.inline_bytes = 16;
    options.engine.request_count = MANY;
    open_pair();
    uint32_t most = tl_conn_measured(asker->conn)->most_unconfirmed;
    for (unsigned i = 0; i < MANY; i++)
        engine_ask_start(asker, &many[i], "key", i);
    engine_pair_run(&pair);
    /* The card of the owner never hears of the batch that it sends first. */
    fake_fabric_add_rule(
        pair.fabric, &(struct fake_rule){.fault = FAKE_LOSE_ACK, .provider = owner->provider, .kinds = FAKE_MESSAGE});
    for (unsigned i = 0; i < MANY; i++)
        engine_side_send(owner, "key", i, engine_bytes(8, i));
    engine_pair_run(&pair);
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "the path has broken");
    tl_conn_close(owner->conn, &reason);
    for (unsigned i = 0; i < 12; i++) {
        fake_clock_advance(options.engine.peer_timeout_ns / 4);
        engine_pair_run(&pair);
    }
    unsigned received_count = 0;
    for (unsigned i = 0; i < MANY; i++) {
        ck_assert(!many[i].is_open);
        received_count += many[i].result.code == TL_OK;
        engine_ask_fini(&many[i]);
    }
    ck_assert_uint_ge(received_count, 8);
    ck_assert_uint_eq(engine_side_values(owner), MANY); /* all of them wait for their asker */
    ck_assert_uint_le(received_count * options.engine.slot_count, most);
    ck_assert_uint_ge(most, 2 * 64 * options.engine.slot_count);
    engine_pair_close(&pair);
}
END_TEST

/* For example, a file has changed. */
static enum tl_status cannot_be_read(void *context, const void *data, uint64_t len_bytes, struct tl_error *ret_error)
{
    (void)context;
    (void)data;
    (void)len_bytes;
    return tl_error_set(ret_error, TL_DATA_LOSS, "it has changed");
}

/* A value that was offered and cannot be sent was not received. */
START_TEST(what_cannot_be_sent_is_offered_again)
{
    open_pair();
    struct tl_tensor *tensor = engine_pool_bytes(owner, 100, 1);
    tl_tensor_set_guard(tensor, cannot_be_read, NULL);
    engine_side_send(owner, "key", 1, tensor);
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_DATA_LOSS);
    ck_assert_int_eq(owner->last_end, TL_SERVE_CANCELLED);
    ck_assert(engine_side_has(owner, "key", 1));
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* A file is cut right after the check of its last bytes. */
struct cut_file {
    struct tl_tensor *tensor;
    bool is_cut;
};

static enum tl_status check_cut_file(void *context, const void *data, uint64_t len_bytes, struct tl_error *ret_error)
{
    struct cut_file *file = context;
    if (file->is_cut) return tl_error_set(ret_error, TL_DATA_LOSS, "it was cut");
    uint8_t *first = tl_tensor_data(file->tensor);
    uint64_t size_bytes = tl_tensor_size_bytes(file->tensor);
    if ((const uint8_t *)data + len_bytes == first + size_bytes) {
        file->is_cut = true;
        memset(first, 0, size_bytes);
    }
    return TL_OK;
}

/* Zeros in place of the file's bytes were written to the peer, which learns that they are invalid; the same with a
 * checksum of zeros. */
START_TEST(file_cut_while_it_is_read_is_no_success)
{
    static const uint64_t sizes[] = {1, 100, 70000};
    static struct cut_file file;
    bool is_bounced = (_i & 1) != 0;
    options.engine.is_bounce_forced = is_bounced;
    options.engine.piece_bytes = 16384;
    open_pair();
    for (unsigned i = 0; i < TL_ARRAY_COUNT(sizes); i++) {
        file = (struct cut_file){.tensor = engine_pool_bytes(owner, sizes[i], 1)};
        tl_tensor_set_guard(file.tensor, check_cut_file, &file);
        engine_side_publish(owner, "key", 1, file.tensor);
        ask = (struct engine_ask){.wants_checksum = (_i & 2) != 0};
        engine_ask_start(asker, &ask, "key", 0);
        engine_pair_run(&pair);
        ck_assert(file.is_cut);
        ck_assert_uint_eq(ask.done_count, 1);
        ck_assert_int_eq(ask.result.code, TL_DATA_LOSS);
        ck_assert_str_eq(ask.result.message, "it was cut");
        engine_ask_fini(&ask);
    }
    ck_assert(tl_conn_is_up(asker->conn));
    engine_pair_close(&pair);
}
END_TEST

/* A card that does not return what was posted is given up by its provider, which is polled for that. */
START_TEST(a_closing_connection_keeps_its_reactor_awake)
{
    struct tl_error reason;
    open_pair();
    struct tl_timers *timers = tl_reactor_timers(asker->reactor);
    ck_assert_int_eq(tl_timers_next_due_ns(timers), TL_TIME_NEVER);
    tl_error_set(&reason, TL_CANCELLED, "enough");
    tl_conn_close(asker->conn, &reason);
    ck_assert_int_le(tl_timers_next_due_ns(timers), tl_clock_deadline_ns(TL_NS_PER_SEC));
    engine_pair_run(&pair);
    ck_assert_int_eq(tl_timers_next_due_ns(timers), TL_TIME_NEVER);
    engine_pair_close(&pair);
}
END_TEST

/* The device goes away; another connection cannot be made, and the error says so. */
START_TEST(device_gone)
{
    struct tl_conn *conn = NULL;
    open_pair();
    start_many();
    for (int i = 0; i < _i; i++)
        (void)engine_side_round(&pair.sides[i % 2]);
    fake_provider_remove(pair.left->provider);
    engine_pair_run(&pair);
    ck_assert_uint_eq(pair.left->closed_count, 1);
    ck_assert_int_eq(pair.left->reason.code, TL_UNAVAILABLE);
    ck_assert_int_ne(tl_conn_create(pair.left->engine, NULL, &pair.right->self, 1, true, NULL, NULL, &conn, NULL),
                     TL_OK);
    for (unsigned i = 0; i < 8; i++) {
        fake_clock_advance(options.engine.peer_timeout_ns / 4);
        engine_pair_run(&pair);
    }
    ck_assert_uint_eq(pair.left->open_ask_count + pair.right->open_ask_count, 0);
    for (unsigned i = 0; i < 2 * COUNT; i++)
        engine_ask_fini(&asks[i % 2][i / 2]);
    engine_pair_close(&pair);
}
END_TEST

/* --------------------------------------------------------------------------------------------- peer time-out -- */

/* The process is stopped: its card answers, the process does not. It is given up in little more than the limit,
 * wherever in the check interval it was last heard. */
START_TEST(peer_is_silent)
{
    open_pair();
    engine_side_send(owner, "before", 1, engine_pool_bytes(owner, 100, 1));
    engine_ask_start(asker, &ask, "before", 1);
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_OK);
    engine_ask_fini(&ask);
    const int64_t step_ns = options.engine.peer_timeout_ns / 100;
    fake_clock_advance(_i * step_ns);
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    owner->is_silent = true;
    int64_t waited_ns = 0;
    while (ask.is_open && waited_ns < 3 * options.engine.peer_timeout_ns) {
        fake_clock_advance(step_ns);
        waited_ns += step_ns;
        engine_pair_run(&pair);
    }
    ck_assert_int_ge(waited_ns, options.engine.peer_timeout_ns);
    ck_assert_int_le(waited_ns, options.engine.peer_timeout_ns / 16 * 17 + 2 * step_ns);
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(asker->reason.message, "silent"));
    ck_assert_ptr_nonnull(strstr(asker->reason.message, owner->self.name));
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* The owner also finds out that the asker is gone. */
START_TEST(asker_is_silent)
{
    open_pair();
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    asker->is_silent = true;
    for (unsigned i = 0; i < 8; i++) {
        fake_clock_advance(options.engine.peer_timeout_ns / 4);
        engine_pair_run(&pair);
    }
    ck_assert_uint_eq(owner->closed_count, 1);
    ck_assert_int_eq(owner->last_end, TL_SERVE_BROKEN);
    asker->is_silent = false;
    engine_pair_run(&pair);
    fake_clock_advance(2 * options.engine.peer_timeout_ns);
    engine_pair_run(&pair);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* A slow value does not end the connection, because pings are answered. */
START_TEST(pings_keep_it)
{
    open_pair();
    engine_ask_start(asker, &ask, "key", 1);
    for (unsigned i = 0; i < 200; i++) {
        engine_pair_run(&pair);
        fake_clock_advance(options.engine.peer_timeout_ns / 4);
    }
    ck_assert_uint_eq(asker->closed_count + owner->closed_count, 0);
    ck_assert_uint_gt(engine_side_stats(asker).credits_sent, 20);
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, 100, 1));
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_OK);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(idle_connections_say_nothing)
{
    open_pair();
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, 100, 1));
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    engine_ask_fini(&ask);
    fake_clock_advance(options.engine.peer_timeout_ns);
    engine_pair_run(&pair);
    uint64_t sent = engine_side_stats(asker).messages_sent + engine_side_stats(owner).messages_sent;
    for (unsigned i = 0; i < 100; i++) {
        fake_clock_advance(60 * TL_NS_PER_SEC);
        engine_pair_run(&pair);
    }
    ck_assert_uint_eq(engine_side_stats(asker).messages_sent + engine_side_stats(owner).messages_sent, sent);
    ck_assert(tl_conn_is_up(asker->conn));
    /* A request after the pause does not count towards the peer time-out. */
    engine_ask_start(asker, &ask, "key", 2);
    engine_pair_run(&pair);
    fake_clock_advance(options.engine.peer_timeout_ns / 2);
    engine_pair_run(&pair);
    ck_assert(ask.is_open);
    engine_ask_cancel(&ask);
    engine_pair_run(&pair);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* ---------------------------------------------------------------------------------------------------- draining -- */

START_TEST(drained_when_idle)
{
    for (unsigned sides = 1; sides < 4; sides++) {
        open_pair();
        for (unsigned s = 0; s < 2; s++) {
            if ((sides & 1u << s) != 0) tl_conn_drain(pair.sides[s].conn);
        }
        engine_pair_run(&pair);
        for (unsigned s = 0; s < 2; s++) {
            ck_assert_uint_eq(pair.sides[s].closed_count, 1);
            ck_assert_int_eq(pair.sides[s].reason.code, TL_OK);
            ck_assert_uint_eq(engine_side_stats(&pair.sides[s]).connections_broken, 0);
        }
        engine_pair_close(&pair);
    }
}
END_TEST

START_TEST(drained_when_the_last_one_is_done)
{
    struct engine_ask late = {.is_open = false};
    struct engine_ask foreign = {.is_open = false};
    open_pair();
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    tl_conn_drain(asker->conn);
    tl_conn_drain(asker->conn);
    engine_ask_start(asker, &late, "key", 2);
    engine_ask_start(owner, &foreign, "key", 3);
    engine_side_send(asker, "key", 3, engine_pool_bytes(asker, 100, 3));
    engine_pair_run(&pair);
    ck_assert_uint_eq(asker->closed_count, 0);
    ck_assert_int_eq(late.result.code, TL_UNAVAILABLE);
    ck_assert_int_eq(foreign.result.code, TL_UNAVAILABLE);
    ck_assert(!late.fetch.is_final && !foreign.fetch.is_final);
    ck_assert_uint_eq(engine_side_values(asker), 1);
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, 100, 1));
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.result.code, TL_OK);
    ck_assert_uint_eq(asker->closed_count + owner->closed_count, 2);
    ck_assert_int_eq(asker->reason.code, TL_OK);
    ck_assert_int_eq(owner->reason.code, TL_OK);
    engine_ask_fini(&ask);
    engine_ask_fini(&late);
    engine_ask_fini(&foreign);
    engine_pair_close(&pair);
}
END_TEST

/* Requests that were on the way when the other side said goodbye can be asked again. */
START_TEST(asked_while_the_peer_says_goodbye)
{
    for (unsigned rounds = 0; rounds < 8; rounds++) {
        open_pair();
        tl_conn_drain(owner->conn);
        for (unsigned i = 0; i < rounds; i++)
            (void)engine_side_round(i % 2 == 0 ? owner : asker);
        if (asker->conn != NULL) engine_ask_start(asker, &ask, "key", 1);
        engine_pair_run(&pair);
        if (ask.done_count > 0) {
            ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
            ck_assert(!ask.fetch.is_final);
            engine_ask_fini(&ask);
        }
        ck_assert_uint_eq(asker->closed_count + owner->closed_count, 2);
        engine_pair_close(&pair);
    }
}
END_TEST

/* A fetch gets an answer at every moment of the end. */
START_TEST(asked_while_it_closes)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "not wanted any more");
    for (unsigned rounds = 0; rounds < 8; rounds++) {
        open_pair();
        tl_conn_close(asker->conn, &reason);
        for (unsigned i = 0; i < rounds; i++)
            (void)engine_side_round(asker);
        if (asker->conn != NULL) engine_ask_start(asker, &ask, "key", 1);
        if (asker->conn != NULL && rounds % 2 == 1) engine_ask_cancel(&ask);
        engine_pair_run(&pair);
        ck_assert_uint_eq(asker->closed_count, 1);
        ck_assert_uint_eq(asker->open_ask_count, 0);
        if (ask.done_count > 0) engine_ask_fini(&ask);
        engine_pair_close(&pair);
    }
}
END_TEST

/* Of the many that are open some end in each round, at either side, and others have their turn. */
START_TEST(ends_in_rounds)
{
    static struct engine_ask many[CROWD];
    struct tl_error reason;
    char key[16];
    tl_error_set(&reason, TL_UNAVAILABLE, "not wanted any more");
    options.engine.request_count = CROWD;
    open_pair();
    for (unsigned i = 0; i < CROWD; i++) {
        many[i] = (struct engine_ask){.is_open = false};
        snprintf(key, sizeof(key), "key%u", i);
        engine_ask_start(asker, &many[i], key, 1);
    }
    engine_pair_run(&pair);
    ck_assert_uint_eq(owner->open_serve_count, CROWD);
    tl_conn_close(asker->conn, &reason);
    tl_conn_close(owner->conn, &reason);
    while (asker->closed_count == 0 || owner->closed_count == 0) {
        unsigned asks_before = asker->open_ask_count, serves_before = owner->open_serve_count;
        (void)engine_side_round(asker);
        (void)engine_side_round(owner);
        ck_assert_uint_le(asks_before - asker->open_ask_count, TL_QUOTA);
        ck_assert_uint_le(serves_before - owner->open_serve_count, TL_QUOTA);
    }
    for (unsigned i = 0; i < CROWD; i++) {
        ck_assert_int_eq(many[i].result.code, TL_UNAVAILABLE);
        engine_ask_fini(&many[i]);
    }
    ck_assert_uint_le(tl_quota_most(&asker->provider->quota), TL_QUOTA);
    ck_assert_uint_le(tl_quota_most(&owner->provider->quota), TL_QUOTA);
    engine_pair_close(&pair);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_break");
    TCase *tcase = tcase_create("engine_break");
    tcase_set_timeout(tcase, 100);
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_loop_test(tcase, every_operation, 0, FAULT_COUNT);
    tcase_add_test(tcase, closed_at_every_round);
    tcase_add_test(tcase, source_learns_how_each_serve_ended);
    tcase_add_test(tcase, unconfirmed_answers_are_bounded);
    tcase_add_test(tcase, what_cannot_be_sent_is_offered_again);
    tcase_add_loop_test(tcase, file_cut_while_it_is_read_is_no_success, 0, 4);
    tcase_add_test(tcase, a_closing_connection_keeps_its_reactor_awake);
    tcase_add_loop_test(tcase, device_gone, 0, 12);
    tcase_add_loop_test(tcase, peer_is_silent, 0, 30);
    tcase_add_test(tcase, asker_is_silent);
    tcase_add_test(tcase, pings_keep_it);
    tcase_add_test(tcase, idle_connections_say_nothing);
    tcase_add_test(tcase, drained_when_idle);
    tcase_add_test(tcase, drained_when_the_last_one_is_done);
    tcase_add_test(tcase, asked_while_the_peer_says_goodbye);
    tcase_add_test(tcase, asked_while_it_closes);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("ends_in_rounds"); /* tests/defects runs it alone */
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, ends_in_rounds);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
