// SPDX-License-Identifier: Apache-2.0
/*
 * Two engines in random order: operations of both workers, deliveries, faults and the clock, from a seed.
 *
 * In every run, every fetch is done once and every serve closed once (engine_pair.h); a one-shot value is received at
 * most once, and is lost only with an error for the sender or receiver; nothing is written into memory that was given
 * back; nothing is sent without a credit; and at the end all memory, pins, windows and slots are back. Without faults
 * everything that was asked for arrives.
 *
 * A seed that fails is printed. ENGINE_EXPLORER_SEED=N runs that one alone, ENGINE_EXPLORER_SEEDS=N as many.
 */
#include <check.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/error.h"
#include "dataplane/engine/conn_internal.h"
#include "fakes/engine_pair.h"
#include "fakes/fake_clock.h"
#include "fakes/run_suite.h"

#define SEEDS 4000
#define STEPS 250
#define MAX_ASKS 96
#define MAX_VALUES (128 + MAX_ASKS) /* Those at the end are for subscriptions that wait. */
#define KEYS 5
#define STREAM (KEYS + 1) /* The key whose values go to subscriptions: sent ones of any size, step after step. */
#define CANARY 0x5a

struct value {
    unsigned side; /* The side of its owner. */
    unsigned key;
    uint64_t step;
    uint64_t size_bytes; /* 0: dead. */
    uint64_t seed;
    bool is_sent;
    unsigned asked_count;
    unsigned ok_count;
    unsigned error_count; /* Counts definite errors. */
};

struct asked {
    struct engine_ask ask;
    struct value *value; /* NULL: a fetch of the published key, or of a subscription. */
    bool is_of_stream;
    bool is_started;
    bool is_cancelled;
    struct tl_tensor *canary; /* The destination of a finished fetch, which we overwrite. */
};

static struct engine_pair pair;
static struct engine_pair_options options;
static struct asked asks[MAX_ASKS];
static struct value values[MAX_VALUES];
static unsigned ask_count;
static unsigned value_count;
static bool has_faults;
static unsigned stream_error_count; /* Counts definite errors of fetches of STREAM, */
static unsigned stream_loss_count;  /* and its values that were neither received nor are there. */
static unsigned
    stream_ok_counts[2]; /* Counts values of STREAM that were received in all seeds: small and large ones. */
static uint64_t random_state;

static uint64_t below(uint64_t limit)
{
    random_state += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t mixed = random_state;
    mixed = (mixed ^ (mixed >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ (mixed >> 27)) * UINT64_C(0x94d049bb133111eb);
    mixed ^= mixed >> 31;
    return mixed % limit;
}

static bool one_in(uint64_t count)
{
    return below(count) == 0;
}

static uint64_t pick(const uint64_t *numbers, size_t count)
{
    return numbers[below(count)];
}
#define PICK(...) pick((const uint64_t[]){__VA_ARGS__}, sizeof((const uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t))

/* ----------------------------------------------------------------------------------------------------- options -- */

static void choose_options(void)
{
    engine_pair_defaults(&options);
    options.fabric.seed = below(UINT32_MAX) + 1;
    options.fabric.is_flushed_first = one_in(2);
    options.fabric.poll_batch = (unsigned)PICK(1, 3, 16, 64);
    options.provider.max_write_bytes = PICK(700, 5000, 1 << 20);
    options.engine.keys = one_in(4) ? TL_KEYS_REGION : TL_KEYS_WINDOW;
    options.engine.slot_count = (uint32_t)PICK(16, 16, 17, 64);
    options.engine.work_count = (uint32_t)PICK(16, 16, 20, 64);
    options.engine.request_count = (uint32_t)PICK(1, 3, 16, 64);
    options.engine.key_count = (uint32_t)PICK(0, 2, 64);
    options.engine.piece_bytes = PICK(0, 100, 900);
    options.engine.inline_bytes = (uint32_t)PICK(0, 1000, TL_INLINE_BYTES);
    options.engine.register_bytes = PICK(1, 2000, 1 << 20);
    options.engine.is_bounce_forced = one_in(8);
    options.engine.copy_bytes = PICK(0, 0, 100, 3000);
    options.engine.is_mapping_allowed = !one_in(4);
    options.engine.is_reading = one_in(2);
    options.provider.has_no_reads = one_in(8);
    options.provider.read_depth = (uint32_t)PICK(1, 4, 40);
    has_faults = one_in(2);
    if (has_faults && one_in(4)) options.memory.pool_bytes = options.memory.max_pool_bytes = 64 * 1024;
}

static void choose_faults(void)
{
    static const enum fake_fault faults[] = {
        FAKE_DROP,  FAKE_DELAY,        FAKE_LOSE_ACK,   FAKE_LATE,           FAKE_RNR,
        FAKE_BREAK, FAKE_POST_FAILURE, FAKE_CQ_OVERRUN, FAKE_REGION_FAILURE, FAKE_EXPOSE_FAILURE};
    fake_fabric_set_chance(pair.fabric, FAKE_DELAY, one_in(2) ? 100000 : 0);
    /* A tensor that is not mapped is copied, so the transfer needs no mapping. */
    fake_fabric_set_chance(pair.fabric, FAKE_SHARE_FAILURE, one_in(4) ? 300000 : 0);
    fake_fabric_set_chance(pair.fabric, FAKE_MAP_FAILURE, one_in(2) ? 500000 : 0);
    for (unsigned i = 0; has_faults && i < TL_ARRAY_COUNT(faults); i++) {
        if (one_in(3)) fake_fabric_set_chance(pair.fabric, faults[i], (unsigned)PICK(300, 3000, 20000));
    }
}

static void clear_faults(void)
{
    for (enum fake_fault fault = 0; fault < FAKE_FAULT_COUNT; fault++)
        fake_fabric_set_chance(pair.fabric, fault, 0);
}

/* ------------------------------------------------------------------------------------------------------ values -- */

static const char *key_name(unsigned key)
{
    static const char *const names[] = {"a", "b", "c", "d", "e", "published", "stream"};
    return names[key];
}

static struct tl_tensor *make_tensor(struct engine_side *side, uint64_t size_bytes, uint64_t seed)
{
    struct tl_tensor *tensor = NULL;
    if (size_bytes == 0) {
        TL_CHECK(tl_tensor_create_dead(&tensor, NULL) == TL_OK);
        return tensor;
    }
    return one_in(3) ? engine_bytes(size_bytes, seed) : engine_pool_bytes(side, size_bytes, seed);
}

static struct value *add_value(unsigned side, unsigned key)
{
    TL_CHECK(value_count < MAX_VALUES);
    struct value *value = &values[value_count++];
    *value = (struct value){.side = side, .key = key, .step = value_count, .seed = value_count};
    value->size_bytes = one_in(6) ? 0 : 1 + key * 700 + (one_in(4) ? below(3000) : 0);
    if (key == STREAM && one_in(2)) value->size_bytes = 1 + below(10);
    return value;
}

static struct value *new_value(void)
{
    if (value_count == MAX_VALUES - MAX_ASKS) return NULL;
    return add_value((unsigned)below(2), one_in(4) ? STREAM : (unsigned)below(KEYS));
}

static void send_value(struct value *value)
{
    struct engine_side *side = &pair.sides[value->side];
    value->is_sent = true;
    engine_side_send(side, key_name(value->key), value->step, make_tensor(side, value->size_bytes, value->seed));
}

/* Half of them are large enough to be mapped. */
static uint64_t published_bytes(uint64_t version)
{
    return (version % 2 == 0 ? 5000 : 900) + version % 3;
}

static void publish_on(struct engine_side *side, uint64_t version)
{
    uint64_t size_bytes = published_bytes(version);
    struct tl_tensor *tensor =
        one_in(2) ? engine_file_bytes(size_bytes, version) : make_tensor(side, size_bytes, version);
    engine_side_publish(side, "published", version, tensor);
}

static void publish(void)
{
    struct engine_side *side = &pair.sides[below(2)];
    publish_on(side, below(1000));
}

/* -------------------------------------------------------------------------------------------------------- asks -- */

/* The holder of the tensor may write it now, and no other side does. */
static void guard(struct asked *asked)
{
    struct tl_tensor *destination = asked->ask.fetch.destination;
    if (destination == NULL || tl_tensor_size_bytes(destination) == 0) return;
    if (!tl_tensor_is_writable(destination)) return; /* It is mapped. */
    memset(tl_tensor_data(destination), CANARY, tl_tensor_size_bytes(destination));
    asked->canary = tl_tensor_get(destination);
}

static void check_canary(struct asked *asked)
{
    if (asked->canary == NULL) return;
    const uint8_t *data = tl_tensor_data(asked->canary);
    for (uint64_t i = 0; i < tl_tensor_size_bytes(asked->canary); i++)
        TL_CHECK(data[i] == CANARY);
    tl_tensor_put(asked->canary);
    asked->canary = NULL;
}

static bool is_definite(enum tl_status code)
{
    return code != TL_OK && code != TL_UNAVAILABLE && code != TL_CANCELLED;
}

static void check_result(struct asked *asked)
{
    const struct tl_error *result = &asked->ask.result;
    struct value *value = asked->value;
    TL_CHECK(asked->is_cancelled || result->code != TL_CANCELLED);
    bool has_waited = asked->is_cancelled && result->code == TL_RESOURCE_EXHAUSTED; /* It has waited for a handle. */
    TL_CHECK(has_faults || has_waited || result->code == TL_OK || result->code == TL_CANCELLED ||
             result->code == TL_UNAVAILABLE);
    if (asked->is_of_stream) {
        if (is_definite(result->code) && !has_waited) stream_error_count++;
        if (result->code != TL_OK) return;
        uint64_t step = asked->ask.fetch.offer_step;
        TL_CHECK(step >= 1 && step >= asked->ask.fetch.step && step <= value_count);
        value = &values[step - 1];
        TL_CHECK(value->key == STREAM && asked->ask.side == &pair.sides[1 - value->side]);
        stream_ok_counts[value->size_bytes > 10]++;
    }
    if (value == NULL) {
        uint64_t version = asked->ask.fetch.offer_step;
        if (result->code == TL_OK)
            TL_CHECK(engine_is_bytes(asked->ask.fetch.destination, published_bytes(version), version));
        return;
    }
    if (is_definite(result->code) && !has_waited) value->error_count++;
    if (result->code != TL_OK) return;
    TL_CHECK(++value->ok_count == 1 && value->is_sent);
    TL_CHECK(asked->ask.fetch.offer_step == value->step);
    TL_CHECK(tl_tensor_is_dead(asked->ask.fetch.destination) == (value->size_bytes == 0));
    if (value->size_bytes > 0) TL_CHECK(engine_is_bytes(asked->ask.fetch.destination, value->size_bytes, value->seed));
}

/* Looks at what is done; asks again after UNAVAILABLE, as a worker does. */
static void collect(struct asked *asked)
{
    if (!asked->is_started || asked->ask.is_open) return;
    bool may_retry = asked->ask.result.code == TL_UNAVAILABLE && !asked->is_cancelled;
    struct engine_side *side = asked->ask.side;
    if (may_retry && side->conn != NULL && tl_conn_is_up(side->conn) && one_in(2)) {
        engine_ask_start(side, &asked->ask, NULL, 0);
        return;
    }
    if (may_retry && !one_in(20)) return;
    check_result(asked);
    check_canary(asked);
    guard(asked);
    asked->is_started = false;
    engine_ask_fini(&asked->ask);
}

static void start_ask(void)
{
    for (unsigned i = 0; i < ask_count; i++)
        collect(&asks[i]);
    struct value *value = value_count > 0 && !one_in(5) ? &values[below(value_count)] : NULL;
    struct engine_side *side = &pair.sides[value != NULL ? 1 - value->side : below(2)];
    bool is_of_stream = value != NULL && value->key == STREAM;
    uint64_t from_step = is_of_stream ? below(value->step + 1) : 0;
    if (is_of_stream) value = NULL;
    if (side->conn == NULL || !tl_conn_is_up(side->conn)) return;
    if (value != NULL && value->asked_count > 0) return;
    if (ask_count == MAX_ASKS) return;
    struct asked *asked = &asks[ask_count++];
    *asked = (struct asked){.value = value, .is_of_stream = is_of_stream, .is_started = true};
    asked->ask.is_unregistered = one_in(3);
    asked->ask.wants_checksum = one_in(4);
    asked->ask.may_map = one_in(2);
    if (value != NULL && value->size_bytes > 0 && one_in(4))
        asked->ask.destination = engine_bytes(value->size_bytes, 0);
    if (value == NULL && one_in(3)) asked->ask.subscription = below(2) + 1;
    if (is_of_stream) asked->ask.subscription = 3;
    if (value != NULL) value->asked_count++;
    engine_ask_start(side, &asked->ask,
                     key_name(value != NULL  ? value->key
                              : is_of_stream ? STREAM
                                             : KEYS),
                     value != NULL ? value->step : from_step);
}

static void cancel_ask(void)
{
    if (ask_count == 0) return;
    struct asked *asked = &asks[below(ask_count)];
    if (!asked->is_started || !asked->ask.is_open) return;
    asked->is_cancelled = true;
    engine_ask_cancel(&asked->ask);
}

/* ------------------------------------------------------------------------------------------------------- steps -- */

static void round_of(struct engine_side *side)
{
    if (side->conn != NULL && side->conn->ending.held_count > 0 && one_in(2)) engine_side_settle(side);
    (void)engine_side_round(side);
}

static void close_conn(void)
{
    struct engine_side *side = &pair.sides[below(2)];
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "the test closes it");
    if (side->conn == NULL) return;
    if (one_in(2)) {
        tl_conn_drain(side->conn);
    } else {
        tl_conn_close(side->conn, &reason);
    }
}

static void reconnect(void)
{
    fake_fabric_set_chance(pair.fabric, FAKE_REGION_FAILURE, 0);
    engine_pair_connect(&pair);
}

static void take_step(void)
{
    uint64_t choice = below(100);
    struct value *value;
    if (choice < 65) {
        round_of(&pair.sides[choice % 2]);
    } else if (choice < 73) {
        if ((value = new_value()) != NULL && one_in(2)) send_value(value);
    } else if (choice < 77) {
        value = value_count > 0 ? &values[below(value_count)] : NULL;
        if (value != NULL && !value->is_sent) send_value(value);
    } else if (choice < 90) {
        start_ask();
    } else if (choice < 94) {
        cancel_ask();
    } else if (choice < 96) {
        publish();
    } else if (choice < 98) {
        /* Without faults no side is so late that the other one gives it up. */
        if (!has_faults) engine_pair_run(&pair);
        fake_clock_advance((int64_t)below(300) * TL_NS_PER_MS);
    } else if (has_faults && one_in(4)) {
        close_conn();
    }
    if (pair.left->conn == NULL && pair.right->conn == NULL && one_in(10)) reconnect();
}

/* Without faults nothing blocks anything: all values are there, so everything that is asked for comes. */
static void expect_progress(void)
{
    for (unsigned i = 0; i < value_count; i++) {
        if (!values[i].is_sent) send_value(&values[i]);
    }
    for (unsigned i = 0; i < 2; i++)
        publish_on(&pair.sides[i], below(1000));
    engine_pair_run(&pair);
    for (unsigned i = 0; i < ask_count; i++) {
        struct asked *asked = &asks[i];
        if (asked->is_of_stream && asked->ask.is_open) send_value(add_value(asked->ask.side == pair.left, STREAM));
    }
    engine_pair_run(&pair);
    TL_CHECK(pair.left->closed_count == 0 && pair.right->closed_count == 0);
    TL_CHECK(pair.left->open_ask_count == 0 && pair.right->open_ask_count == 0);
    const char *why = "";
    if (!fake_fabric_is_quiet(pair.fabric, &why)) fprintf(stderr, "under way: %s\n", why);
    TL_CHECK(fake_fabric_is_quiet(pair.fabric, NULL));
    for (unsigned i = 0; i < 2; i++) {
        struct fake_counters counters;
        const struct tl_conn *conn = pair.sides[i].conn;
        const struct tl_conn *peer = pair.sides[1 - i].conn;
        fake_provider_get_counters(pair.sides[i].provider, &counters);
        TL_CHECK(counters.rnr_tries == 0);
        TL_CHECK(conn->credits.peer_slots_used == peer->credits.own_slots_returned);
        TL_CHECK(conn->credits.peer_slots_used - conn->credits.peer_slots_returned < conn->credits.peer_slot_count);
        TL_CHECK(engine_side_stats(&pair.sides[i]).protocol_errors == 0);
    }
}

static bool has_value(const struct value *value)
{
    return engine_side_has(&pair.sides[value->side], key_name(value->key), value->step);
}

static void explore(uint64_t seed)
{
    random_state = seed * UINT64_C(0x2545f4914f6cdd1d);
    ask_count = value_count = stream_error_count = stream_loss_count = 0;
    choose_options();
    engine_pair_init(&pair, &options);
    engine_pair_connect(&pair);
    choose_faults();
    for (unsigned i = 0; i < STEPS; i++)
        take_step();
    clear_faults();
    if (!has_faults) expect_progress();
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "the seed is over");
    for (unsigned i = 0; i < 2; i++) {
        if (pair.sides[i].conn != NULL) tl_conn_close(pair.sides[i].conn, &reason);
    }
    engine_pair_run(&pair);
    TL_CHECK(pair.left->conn == NULL && pair.right->conn == NULL);
    for (unsigned i = 0; i < ask_count; i++) {
        asks[i].is_cancelled |= asks[i].is_started && asks[i].ask.result.code == TL_UNAVAILABLE;
        collect(&asks[i]);
    }
    while (fake_fabric_land_late(pair.fabric)) {
    }
    for (unsigned i = 0; i < ask_count; i++)
        check_canary(&asks[i]);
    for (unsigned i = 0; i < value_count; i++) {
        const struct value *value = &values[i];
        if (!value->is_sent || value->ok_count == 1 || has_value(value)) continue;
        TL_CHECK(value->error_count > 0 || value->key == STREAM);
        stream_loss_count += value->key == STREAM;
    }
    TL_CHECK(stream_loss_count <= stream_error_count);
    engine_pair_close(&pair);
}

static uint64_t number_of(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text != NULL ? strtoull(text, NULL, 10) : otherwise;
}

#define PARTS 8

static uint64_t current_seed;

/* A failed check aborts: the process prints its seed as its last words. */
static void on_abort(int signal_number)
{
    char text[96];
    int len = snprintf(text, sizeof(text), "ENGINE_EXPLORER_SEED=%llu failed\n", (unsigned long long)current_seed);
    if (write(STDERR_FILENO, text, (size_t)len) < 0) _exit(1);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

START_TEST(seeds)
{
    uint64_t count = number_of("ENGINE_EXPLORER_SEEDS", SEEDS);
    uint64_t only = number_of("ENGINE_EXPLORER_SEED", 0);
    signal(SIGABRT, on_abort);
    for (uint64_t seed = 1 + (uint64_t)_i; seed <= count; seed += PARTS) {
        if (only != 0 && _i > 0) return;
        current_seed = only != 0 ? only : seed;
        explore(current_seed);
        if (only != 0) return;
    }
    ck_assert_uint_gt(stream_ok_counts[0], 0);
    ck_assert_uint_gt(stream_ok_counts[1], 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_explorer");
    TCase *tcase = tcase_create("engine_explorer");
    tcase_set_timeout(tcase, 100);
    tcase_add_loop_test(tcase, seeds, 0, PARTS);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
