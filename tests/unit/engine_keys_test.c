// SPDX-License-Identifier: Apache-2.0
/* Keys that have numbers on a connection: what a REQUEST carries of them, how long it is, and what a peer can do wrong
 * with numbers. */
#include <check.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "dataplane/engine/request_internal.h"
#include "fakes/engine_case.h"
#include "fakes/raw_peer.h"
#include "fakes/run_suite.h"

enum { SMALL_BYTES = 100, LARGE_BYTES = 5000, KEYS = 4 };

static struct raw_peer raw;

static void setup(void)
{
    engine_pair_defaults(&options);
    options.engine.inline_bytes = TL_INLINE_BYTES;
}

static void fetch(const char *key, uint64_t step, uint64_t size_bytes, uint64_t seed)
{
    engine_ask_start(asker, &ask, key, step);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert(engine_is_bytes(ask.fetch.destination, size_bytes, seed));
    engine_ask_fini(&ask);
}

static void send_and_fetch(const char *key, uint64_t step, uint64_t size_bytes)
{
    engine_side_send(owner, key, step, engine_bytes(size_bytes, step));
    fetch(key, step, size_bytes, step);
}

static void expect_no_errors(void)
{
    ck_assert_uint_eq(engine_side_stats(asker).protocol_errors + engine_side_stats(owner).protocol_errors, 0);
}

/* ---------------------------------------------------------------------------------------------- both directions -- */

/* Many keys in turn, of sizes that change, with fewer numbers than keys: each value is the one that was asked for. */
START_TEST(more_keys_than_numbers)
{
    options.engine.key_count = KEYS;
    open_pair();
    for (uint64_t step = 1; step < 200; step++) {
        char key[16];
        snprintf(key, sizeof(key), "key%u", (unsigned)(step * step % 11));
        send_and_fetch(key, step, step % 3 == 0 ? SMALL_BYTES : step % 7 == 0 ? LARGE_BYTES + step : LARGE_BYTES);
    }
    ck_assert_uint_eq(asker->conn->requests.keys.count, KEYS);
    expect_no_errors();
    engine_pair_close(&pair);
}
END_TEST

/* The numbers end with their connection: the next one begins with texts. */
START_TEST(reconnected)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "the test closes it");
    open_pair();
    for (uint64_t round = 0; round < 3; round++) {
        for (uint64_t i = 1; i < 5; i++)
            send_and_fetch(i % 2 == 0 ? "even" : "odd", 10 * round + i, LARGE_BYTES);
        ck_assert_uint_eq(asker->conn->requests.keys.count, 2);
        tl_conn_close(asker->conn, &reason);
        tl_conn_close(owner->conn, &reason);
        engine_pair_run(&pair);
        ck_assert(asker->conn == NULL && owner->conn == NULL);
        engine_pair_connect(&pair);
        engine_pair_run(&pair);
    }
    expect_no_errors();
    engine_pair_close(&pair);
}
END_TEST

/* A known version is written without a DONE, whatever the difference to the version before. */
START_TEST(versions)
{
    static const uint64_t versions[] = {1, 2, 1000, UINT64_MAX, 7, UINT64_C(1) << 63};
    open_pair();
    for (unsigned i = 0; i < sizeof(versions) / sizeof(versions[0]); i++) {
        engine_side_publish(owner, "key", versions[i], engine_bytes(LARGE_BYTES, i));
        fetch("key", 0, LARGE_BYTES, i);
        uint64_t messages = engine_side_stats(owner).messages_sent;
        fetch("key", 0, LARGE_BYTES, i);
        ck_assert_uint_eq(engine_side_stats(owner).messages_sent, messages);
    }
    expect_no_errors();
    engine_pair_close(&pair);
}
END_TEST

/* A client gets fewer numbers than a task. */
START_TEST(clients)
{
    options.engine.key_count = TL_MAX_KEYS;
    open_pair();
    ck_assert_uint_eq(asker->conn->requests.keys.limit, TL_MAX_KEYS);
    ck_assert_uint_eq(owner->conn->responses.keys.limit, TL_MAX_KEYS);
    owner->conn->peer.name[0] = '\0';
    ck_assert_uint_eq(conn_key_limit(owner->conn), 4096);
    engine_pair_close(&pair);
}
END_TEST

/* ------------------------------------------------------------------------------------------------- the raw peer -- */

static void open_raw(void)
{
    options.is_right_raw = true;
    raw_peer_key_count = KEYS;
    engine_pair_init(&pair, &options);
    raw_peer_open(&raw, &pair);
    raw_peer_shake_hands(&raw);
    ask = (struct engine_ask){.is_open = false};
}

static void close_raw(void)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "the test is over");
    raw_peer_close(&raw);
    if (pair.left->conn != NULL) tl_conn_close(pair.left->conn, &reason);
    engine_pair_run(&pair);
    engine_pair_close(&pair);
}

/* Asks, looks at the REQUEST, and answers with a status. Returns how long the REQUEST is without its descriptor. */
static uint32_t request_bytes(const char *key, uint64_t step, enum tl_key_form form, uint32_t key_number)
{
    engine_ask_start(pair.left, &ask, key, step);
    raw_peer_run(&raw);
    const struct tl_message *request = raw_peer_heard(&raw, TL_MESSAGE_REQUEST);
    ck_assert_int_eq(request->key_form, form);
    ck_assert_uint_eq(request->key_number, key_number);
    if (form == TL_KEY_NEW || form == TL_KEY_TEXT) ck_assert_str_eq(request->key, key);
    ck_assert_uint_eq(request->step, step);
    struct tl_message status = raw_peer_message(TL_MESSAGE_ERROR_STATUS, request->handle);
    status.code = TL_ABORTED;
    status.is_final = true;
    raw_peer_send(&raw, &status);
    raw_peer_run(&raw);
    ck_assert_int_eq(ask.result.code, TL_ABORTED);
    engine_ask_fini(&ask);
    return raw.heard_bytes;
}

/* In the steady state a REQUEST has at most 16 bytes, with the meta-data of the caller's destination as well. */
START_TEST(short_requests)
{
    char key[300];
    memset(key, 'k', sizeof(key));
    key[sizeof(key) - 1] = '\0';
    open_raw();
    for (uint64_t step = 1000000; step < 1000004; step++) {
        bool is_first = step == 1000000;
        ask.destination = _i == 1 ? engine_bytes(LARGE_BYTES, 1) : NULL;
        uint32_t len_bytes = request_bytes(key, step,
                                           is_first  ? TL_KEY_NEW
                                           : _i == 1 ? TL_KEY_AS_BEFORE
                                                     : TL_KEY_KNOWN,
                                           0);
        ck_assert_msg(is_first ? len_bytes > sizeof(key) : len_bytes <= 16, "%u bytes", len_bytes);
    }
    close_raw();
}
END_TEST

/* Keys beyond the numbers that the peer offers travel as text. */
START_TEST(keys_without_numbers)
{
    open_raw();
    for (unsigned round = 0; round < 2; round++) {
        for (unsigned i = 0; i < KEYS + 2; i++) {
            bool has_number = i < KEYS;
            const char key[] = {(char)('a' + i), '\0'};
            (void)request_bytes(key, 1,
                                !has_number  ? TL_KEY_TEXT
                                : round == 0 ? TL_KEY_NEW
                                             : TL_KEY_KNOWN,
                                has_number ? i : 0);
        }
    }
    close_raw();
}
END_TEST

static void ask_raw(uint64_t number, enum tl_key_form form, uint32_t key_number, bool has_meta_data)
{
    struct tl_message request = raw_peer_message(TL_MESSAGE_REQUEST, (uint32_t)number);
    request.number = number;
    request.step = 1;
    request.key_form = form;
    request.key_number = key_number;
    request.has_meta_data = has_meta_data;
    request.meta_data =
        (struct tl_meta_data){.dtype = TL_U8, .shape = {.rank = 1, .dims = {LARGE_BYTES}}, .size_bytes = LARGE_BYTES};
    raw_peer_send(&raw, &request);
    raw_peer_run(&raw);
}

/* 0: right. 1: a number that was not given. 2: one that was not given, below one that was. 3: beyond the numbers that
 * were offered. 4: the meta-data of earlier requests, of which none had any. */
START_TEST(unknown_numbers)
{
    options.engine.key_count = 100;
    open_raw();
    ask_raw(1, TL_KEY_NEW, 70, _i != 4);
    ask_raw(2, TL_KEY_KNOWN, 70, false);
    ck_assert_uint_eq(pair.left->open_serve_count, 2);
    if (_i == 0) {
        ask_raw(3, TL_KEY_AS_BEFORE, 70, false);
        ask_raw(4, TL_KEY_NEW, 70, false);
        ask_raw(5, TL_KEY_NEW, 99, false);
        ask_raw(6, TL_KEY_TEXT, 0, false);
        ck_assert_uint_eq(pair.left->open_serve_count, 6);
    }
    if (_i == 1) ask_raw(3, TL_KEY_KNOWN, 71, false);
    if (_i == 2) ask_raw(3, TL_KEY_KNOWN, 0, false);
    if (_i == 3) ask_raw(3, TL_KEY_NEW, 100, false);
    if (_i == 4) ask_raw(3, TL_KEY_AS_BEFORE, 70, false);
    ck_assert_uint_eq(engine_side_stats(pair.left).protocol_errors, _i == 0 ? 0 : 1);
    ck_assert_uint_eq(pair.left->closed_count, _i == 0 ? 0 : 1);
    close_raw();
}
END_TEST

static TCase *add_case(Suite *suite, const char *name)
{
    TCase *tcase = tcase_create(name);
    tcase_add_checked_fixture(tcase, setup, NULL);
    suite_add_tcase(suite, tcase);
    return tcase;
}

int main(void)
{
    Suite *suite = suite_create("engine_keys");
    tcase_add_test(add_case(suite, "reconnected"), reconnected);
    tcase_add_loop_test(add_case(suite, "unknown"), unknown_numbers, 0, 5);
    TCase *tcase = add_case(suite, "engine_keys");
    tcase_add_test(tcase, more_keys_than_numbers);
    tcase_add_test(tcase, versions);
    tcase_add_test(tcase, clients);
    tcase_add_loop_test(tcase, short_requests, 0, 2);
    tcase_add_test(tcase, keys_without_numbers);
    return run_suite(suite);
}
