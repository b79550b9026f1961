// SPDX-License-Identifier: Apache-2.0
/* Values that travel inside of DONE: of every kind, to every destination, and what a peer can do wrong with them. */
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
#include "tensor/tensor.h"

#include <xxhash.h>

enum { COUNT = 30, SMALL_BYTES = 500, UNWRITTEN = 99 };

static struct raw_peer raw;

static void setup(void)
{
    engine_pair_defaults(&options);
    options.engine.inline_bytes = TL_INLINE_BYTES;
}

static void fetch(uint64_t step)
{
    engine_ask_start(asker, &ask, "key", step);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
}

static void expect(uint64_t size_bytes, uint64_t seed, enum tl_path path)
{
    ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
    ck_assert(engine_is_bytes(ask.fetch.destination, size_bytes, seed));
    ck_assert_msg(ask.fetch.path == path, "%s", tl_path_name(ask.fetch.path));
    engine_ask_fini(&ask);
}

static uint64_t writes_of_owner(void)
{
    return engine_side_stats(owner).writes_posted;
}

/* --------------------------------------------------------------------------------------------------------- kinds -- */

/* Up to the bound no place is sent and nothing is written, whether the key was seen before or not. */
START_TEST(sizes)
{
    static const uint64_t sizes[] = {1, SMALL_BYTES, TL_INLINE_LIBRARY_BYTES - 1, TL_INLINE_LIBRARY_BYTES};
    open_pair();
    for (uint64_t step = 0; step < 4; step++) {
        uint64_t size_bytes = sizes[step], writes = writes_of_owner();
        uint64_t asked = engine_side_stats(asker).messages_sent, bounced = engine_side_stats(asker).bytes_bounced;
        engine_side_send(owner, "key", step, engine_bytes(size_bytes, step));
        fetch(step);
        ck_assert_ptr_null(tl_asked_keys_expected(&asker->conn->requests.keys, 0, "key"));
        expect(size_bytes, step, TL_PATH_INLINE);
        ck_assert_uint_eq(writes_of_owner(), writes);
        ck_assert_uint_eq(engine_side_stats(asker).messages_sent, asked + 1);
        ck_assert_uint_eq(engine_side_stats(asker).bytes_bounced, bounced);
    }
    ck_assert_uint_eq(engine_side_values(owner), 0);
    uint64_t writes = writes_of_owner();
    engine_side_send(owner, "key", 9, engine_pool_bytes(owner, TL_INLINE_LIBRARY_BYTES + 1, 9));
    fetch(9);
    expect(TL_INLINE_LIBRARY_BYTES + 1, 9, TL_PATH_ZERO_COPY);
    ck_assert_uint_eq(writes_of_owner(), writes + 1);
    engine_pair_close(&pair);
}
END_TEST

/* Into memory of users larger values come inline, too. */
START_TEST(sizes_for_memory_of_users)
{
    static const uint64_t sizes[] = {TL_INLINE_LIBRARY_BYTES + 1, TL_INLINE_BYTES, TL_INLINE_BYTES + 1};
    open_pair();
    for (uint64_t step = 0; step < 3; step++) {
        uint64_t writes = writes_of_owner();
        bool is_inline = sizes[step] <= TL_INLINE_BYTES;
        engine_side_send(owner, "key", step, engine_pool_bytes(owner, sizes[step], step));
        ask.destination = engine_pool_bytes(asker, sizes[step], UNWRITTEN);
        fetch(step);
        expect(sizes[step], step, is_inline ? TL_PATH_INLINE : TL_PATH_ZERO_COPY);
        ck_assert_uint_eq(writes_of_owner(), writes + !is_inline);
    }
    engine_pair_close(&pair);
}
END_TEST

/* A large value was there before, so that the request says where to write: the place is not used. */
START_TEST(small_after_large)
{
    open_pair();
    for (uint64_t step = 1; step < 6; step++) {
        bool is_large = step % 2 == 1;
        uint64_t size_bytes = is_large ? 5000 : SMALL_BYTES;
        engine_side_send(owner, "key", step, engine_pool_bytes(owner, size_bytes, step));
        fetch(step);
        expect(size_bytes, step, is_large ? TL_PATH_ZERO_COPY : TL_PATH_INLINE);
    }
    ck_assert_uint_eq(asker->conn->posts.windows_used, 0);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(checksums_and_published_steps)
{
    open_pair();
    for (uint64_t version = 1; version < 4; version++) {
        engine_side_publish(owner, "key", version, engine_bytes(SMALL_BYTES, version));
        ask.wants_checksum = version % 2 == 1;
        engine_ask_start(asker, &ask, "key", 0);
        engine_pair_run(&pair);
        ck_assert_uint_eq(ask.fetch.offer_step, version);
        ck_assert_int_eq(ask.fetch.is_verified, version % 2 == 1);
        expect(SMALL_BYTES, version, TL_PATH_INLINE);
    }
    engine_pair_close(&pair);
}
END_TEST

START_TEST(file_backed)
{
    open_pair();
    engine_side_publish(owner, "key", 1, engine_file_bytes(SMALL_BYTES, 1));
    ask.may_map = true;
    fetch(0);
    expect(SMALL_BYTES, 1, TL_PATH_INLINE);
    engine_pair_close(&pair);
}
END_TEST

/* The bytes of a file are copied, and checked before and after that: what is sent is what was checked. A file that
 * changes is an answer like another one. */
static unsigned checks_left;

static enum tl_status check_file(void *context, const void *data, uint64_t len_bytes, struct tl_error *ret_error)
{
    ck_assert(data == context && len_bytes == SMALL_BYTES);
    if (checks_left-- > 0) return TL_OK;
    return tl_error_set(ret_error, TL_DATA_LOSS, "the file has changed");
}

START_TEST(file_that_changes)
{
    open_pair();
    for (unsigned checks = 0; checks < 2; checks++) {
        struct tl_tensor *tensor = engine_bytes(SMALL_BYTES, 1);
        tl_tensor_set_guard(tensor, check_file, tl_tensor_data(tensor));
        engine_side_publish(owner, "key", 1, tensor);
        checks_left = checks;
        fetch(0);
        ck_assert_int_eq(ask.result.code, TL_DATA_LOSS);
        ck_assert(strstr(ask.result.message, "the file has changed") != NULL);
        ck_assert_ptr_null(ask.fetch.destination);
        engine_ask_fini(&ask);
    }
    ck_assert(tl_conn_is_up(asker->conn));
    engine_side_publish(owner, "key", 2, engine_bytes(SMALL_BYTES, 2));
    fetch(0);
    expect(SMALL_BYTES, 2, TL_PATH_INLINE);
    engine_pair_close(&pair);
}
END_TEST

/* Strings are bytes with lengths in front; their path says so. */
START_TEST(strings)
{
    const struct tl_string words[2] = {{"hello", 5}, {"", 0}};
    const uint64_t count = 2;
    open_pair();
    for (uint64_t step = 1; step < 4; step++) {
        struct tl_tensor *tensor;
        struct tl_string word;
        uint64_t writes = writes_of_owner();
        ck_assert_int_eq(tl_tensor_create_strings(1, &count, words, &tensor, NULL), TL_OK);
        engine_side_send(owner, "key", step, tensor);
        ask.wants_checksum = step == 2;
        fetch(step);
        ck_assert_msg(ask.result.code == TL_OK, "%s", ask.result.message);
        ck_assert_int_eq(ask.fetch.path, TL_PATH_SERIALIZED);
        ck_assert_int_eq(tl_tensor_string(ask.fetch.destination, 0, &word, NULL), TL_OK);
        ck_assert(word.len_bytes == 5 && memcmp(word.data, "hello", 5) == 0);
        ck_assert_uint_eq(writes_of_owner(), writes);
        engine_ask_fini(&ask);
    }
    engine_pair_close(&pair);
}
END_TEST

/* The owner keeps a published value: its receiver has an error, and the connection carries on. */
START_TEST(no_memory_for_a_published_value)
{
    open_pair();
    engine_side_publish(owner, "key", 1, engine_bytes(SMALL_BYTES, 1));
    ask.is_without_memory = true;
    fetch(1);
    ck_assert_int_eq(ask.result.code, TL_RESOURCE_EXHAUSTED);
    engine_ask_fini(&ask);
    fetch(1);
    expect(SMALL_BYTES, 1, TL_PATH_INLINE);
    engine_pair_close(&pair);
}
END_TEST

/* Asks for a sent value of this size, for which there is no memory. */
static void receive_without_memory(uint64_t size_bytes)
{
    open_pair();
    engine_side_send(owner, "key", 1, engine_bytes(size_bytes, 1));
    ask.is_without_memory = true;
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    ck_assert(ask.is_open);
    ck_assert_uint_eq(engine_side_values(owner), 0);
}

static void pass_time(unsigned parts)
{
    for (unsigned i = 0; i < parts; i++) {
        fake_clock_advance(options.engine.peer_timeout_ns / 16 + 1);
        engine_pair_run(&pair);
    }
}

/* A sent value that has come is nowhere else. It stays in its slot until there is memory, and no slot is given back
 * before, however much is asked meanwhile. 0: inline. 1: without bytes. */
START_TEST(sent_value_waits_for_memory)
{
    static struct engine_ask others[COUNT];
    uint64_t size_bytes = _i == 0 ? SMALL_BYTES : 0;
    receive_without_memory(size_bytes);
    uint32_t reported = asker->conn->credits.own_slots_reported;
    for (unsigned i = 0; i < COUNT; i++) {
        others[i] = (struct engine_ask){.is_open = false};
        engine_side_send(owner, "other", i, engine_bytes(SMALL_BYTES, i));
        engine_ask_start(asker, &others[i], "other", i);
        engine_side_send(asker, "back", i, engine_bytes(SMALL_BYTES, i));
    }
    pass_time(4);
    ck_assert(ask.is_open && others[0].is_open);
    ck_assert_uint_eq(asker->conn->credits.own_slots_reported, reported);
    ask.is_without_memory = false;
    pass_time(1);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert(engine_is_bytes(others[i].fetch.destination, SMALL_BYTES, i));
        engine_ask_fini(&others[i]);
    }
    ck_assert_uint_eq(asker->conn->requests.unplaced_count, 0);
    ck_assert_uint_gt(asker->conn->credits.own_slots_reported, reported);
    expect(size_bytes, 1, _i == 0 ? TL_PATH_INLINE : TL_PATH_NONE);
    engine_pair_close(&pair);
}
END_TEST

/* A CANCEL that cannot be sent meanwhile is not timed as if the peer were silent. */
START_TEST(cancel_behind_our_own_full_pool)
{
    static struct engine_ask other;
    open_pair();
    engine_ask_start(asker, &other, "never", 1);
    engine_pair_run(&pair);
    ask.is_without_memory = true;
    engine_side_send(owner, "key", 1, engine_bytes(SMALL_BYTES, 1));
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    ck_assert_uint_eq(asker->conn->requests.unplaced_count, 1);
    engine_ask_cancel(&other);
    pass_time(40); /* two time-outs and a half */
    ck_assert_int_eq(asker->conn->state, CONN_UP);
    ck_assert(ask.is_open && other.is_open);
    ask.is_without_memory = false;
    pass_time(2);
    ck_assert_int_eq(other.result.code, TL_CANCELLED);
    engine_ask_fini(&other);
    expect(SMALL_BYTES, 1, TL_PATH_INLINE);
    engine_pair_close(&pair);
}
END_TEST

/* Asks the other way round, for a value that is written; its answer gives the slot of the request back. */
static void ask_back(void)
{
    struct engine_ask back = {.is_open = false};
    engine_ask_start(owner, &back, "back", 1);
    engine_pair_run(&pair);
    ck_assert_uint_eq(back.done_count, 1);
    ck_assert_int_eq(back.result.code, TL_OK);
    engine_ask_fini(&back);
}

/* Writes have told the peer of slots that were free before the value came. What a ping says of them meanwhile is not
 * less. */
START_TEST(slots_before_a_value_that_waits)
{
    static struct engine_ask waiting[TL_SLOT_MESSAGES * COUNT];
    unsigned count = 0;
    open_pair();
    engine_side_publish(asker, "back", 1, engine_pool_bytes(asker, 8192, 1));
    ask.is_without_memory = true;
    engine_ask_start(asker, &ask, "key", 1);
    for (unsigned i = 0; i < COUNT; i++)
        ask_back();
    const struct conn_credits *credits = &asker->conn->credits;
    ck_assert_uint_lt(credits->own_slots_reported, owner->conn->credits.peer_slots_returned);
    engine_side_send(owner, "key", 1, engine_bytes(SMALL_BYTES, 1));
    engine_pair_run(&pair);
    ck_assert_uint_eq(asker->conn->requests.unplaced_count, 1);
    for (; credits_left(&owner->conn->credits) > 2; count++) { /* the owner uses all slots that it knows to be free */
        ck_assert_uint_lt(count, TL_ARRAY_COUNT(waiting));
        engine_ask_start(owner, &waiting[count], "none", 1);
        engine_pair_run(&pair);
    }
    pass_time(8); /* pings and their answers */
    ck_assert_uint_eq(engine_side_stats(owner).protocol_errors, 0);
    ck_assert_uint_eq(owner->closed_count, 0);
    ask.is_without_memory = false;
    pass_time(1);
    expect(SMALL_BYTES, 1, TL_PATH_INLINE);
    for (unsigned i = 0; i < count; i++)
        engine_ask_cancel(&waiting[i]);
    engine_pair_run(&pair);
    for (unsigned i = 0; i < count; i++)
        engine_ask_fini(&waiting[i]);
    engine_pair_close(&pair);
}
END_TEST

/* Neither a cancel nor the end of the connection loses the value; only both together do: the program has no use for
 * it. */
START_TEST(sent_value_waits_for_memory_beyond)
{
    bool is_cancelled = (_i & 1) != 0, is_broken = (_i & 2) != 0;
    receive_without_memory(SMALL_BYTES);
    if (is_cancelled) engine_ask_cancel(&ask);
    if (is_broken) {
        struct tl_error reason;
        tl_error_set(&reason, TL_UNAVAILABLE, "the test breaks it");
        tl_conn_close(asker->conn, &reason);
    }
    engine_pair_run(&pair);
    ck_assert_int_eq(ask.is_open, _i != 3);
    ask.is_without_memory = false;
    if (_i == 3) {
        ck_assert_int_eq(ask.result.code, TL_CANCELLED);
        engine_ask_fini(&ask);
    } else {
        pass_time(8);
        expect(SMALL_BYTES, 1, TL_PATH_INLINE);
    }
    engine_pair_close(&pair);
}
END_TEST

/* A sent value of a subscription has a later step than was asked for. */
START_TEST(step_of_a_subscription)
{
    open_pair();
    ask.subscription = 7;
    engine_side_send(owner, "key", 3, engine_bytes(SMALL_BYTES, 3));
    fetch(1);
    ck_assert_uint_eq(ask.fetch.offer_step, 3);
    expect(SMALL_BYTES, 3, TL_PATH_INLINE);
    engine_pair_close(&pair);
}
END_TEST

static struct engine_ask subscribed[2];

/* The second value is here, and the first is not: all that the subscription knows is which was asked first. */
static void overtaken(struct engine_ask *second)
{
    const struct tl_fetch *first = &subscribed[0].fetch;
    ck_assert(subscribed[0].is_open);
    ck_assert(tl_fetch_was_asked_before(first, &second->fetch));
    ck_assert(!tl_fetch_was_asked_before(&second->fetch, first));
}

/* A value of a subscription that travels inside of DONE overtakes one that was given before it and is written. */
START_TEST(order_of_a_subscription)
{
    open_pair();
    for (size_t i = 0; i < 2; i++) {
        subscribed[i] = (struct engine_ask){.subscription = 7, .on_done = i == 1 ? overtaken : NULL};
        engine_ask_start(asker, &subscribed[i], "key", 1);
    }
    engine_pair_run(&pair);
    engine_side_send(owner, "key", 1, engine_pool_bytes(owner, 2 * TL_INLINE_BYTES, 1));
    engine_side_send(owner, "key", 2, engine_bytes(SMALL_BYTES, 2));
    engine_pair_run(&pair);
    for (size_t i = 0; i < 2; i++) {
        ck_assert_int_eq(subscribed[i].result.code, TL_OK);
        ck_assert_uint_eq(subscribed[i].fetch.offer_step, i + 1);
        engine_ask_fini(&subscribed[i]);
    }
    engine_pair_close(&pair);
}
END_TEST

/* A destination of the caller takes a value that fits. The owner keeps any other value, and says what it is. */
START_TEST(destination_of_the_caller)
{
    open_pair();
    engine_side_send(owner, "key", 1, engine_bytes(SMALL_BYTES, 1));
    ask.destination = engine_bytes(SMALL_BYTES + 1, 0);
    fetch(1);
    ck_assert_int_eq(ask.result.code, TL_INVALID_ARGUMENT);
    ck_assert(engine_side_has(owner, "key", 1));
    engine_ask_fini(&ask);
    ask.destination = engine_bytes(SMALL_BYTES, 0);
    fetch(1);
    ck_assert_ptr_eq(ask.fetch.destination, ask.destination);
    expect(SMALL_BYTES, 1, TL_PATH_INLINE);
    ck_assert_uint_eq(engine_side_values(owner), 0);
    engine_pair_close(&pair);
}
END_TEST

START_TEST(many_share_slots)
{
    struct engine_ask asks[COUNT] = {{.is_open = false}};
    open_pair();
    for (unsigned i = 0; i < COUNT; i++) {
        engine_side_send(owner, "key", i, engine_bytes(100, i));
        engine_ask_start(asker, &asks[i], "key", i);
    }
    uint64_t slots = engine_side_stats(asker).slots_sent + engine_side_stats(owner).slots_sent;
    engine_pair_run(&pair);
    slots = engine_side_stats(asker).slots_sent + engine_side_stats(owner).slots_sent - slots;
    ck_assert_uint_eq(slots, 2);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert(engine_is_bytes(asks[i].fetch.destination, 100, i));
        engine_ask_fini(&asks[i]);
    }
    engine_pair_close(&pair);
}
END_TEST

START_TEST(cancelled_meanwhile)
{
    open_pair();
    engine_ask_start(asker, &ask, "key", 1);
    engine_pair_run(&pair);
    engine_side_send(owner, "key", 1, engine_bytes(SMALL_BYTES, 1));
    (void)engine_side_round(owner);
    engine_ask_cancel(&ask);
    engine_pair_run(&pair);
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_uint_eq(engine_side_values(owner), ask.result.code == TL_OK ? 0 : 1);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- hostile -- */

static struct tl_message inline_done(uint32_t handle, uint64_t size_bytes)
{
    static uint8_t bytes[TL_SLOT_BYTES];
    struct tl_message done = raw_peer_message(TL_MESSAGE_DONE, handle);
    done.has_meta_data = done.is_inline = true;
    done.meta_data =
        (struct tl_meta_data){.dtype = TL_U8, .shape = {.rank = 1, .dims = {size_bytes}}, .size_bytes = size_bytes};
    done.data = bytes;
    return done;
}

/* A wrong checksum, or none where one is wanted, is a loss like that of bytes that were written. */
START_TEST(peer_that_falsifies_checksums)
{
    options.is_right_raw = true;
    engine_pair_init(&pair, &options);
    raw_peer_open(&raw, &pair);
    raw_peer_shake_hands(&raw);
    for (unsigned i = 0; i < 3; i++) {
        ask = (struct engine_ask){.wants_checksum = true};
        engine_ask_start(pair.left, &ask, "key", i);
        raw_peer_run(&raw);
        struct tl_message done = inline_done(raw_peer_heard(&raw, TL_MESSAGE_REQUEST)->handle, SMALL_BYTES);
        done.has_checksum = i != 2;
        done.checksum = XXH3_64bits(done.data, SMALL_BYTES) + (i == 1);
        raw_peer_send(&raw, &done);
        raw_peer_run(&raw);
        ck_assert_uint_eq(ask.done_count, 1);
        ck_assert_int_eq(ask.result.code, i == 0 ? TL_OK : TL_DATA_LOSS);
        ck_assert_int_eq(ask.fetch.is_verified, i == 0);
        engine_ask_fini(&ask);
    }
    ck_assert_uint_eq(engine_side_stats(pair.left).protocol_errors, 0);
    raw_peer_close(&raw);
    engine_pair_close(&pair);
}
END_TEST

/* 0: right. 1: more than we take. 2: twice. 3: after META_DATA_UPDATE. 4: without bytes. 5: for a
 * destination on a device. */
START_TEST(peer_that_answers_inline)
{
    options.is_right_raw = true;
    engine_pair_init(&pair, &options);
    raw_peer_open(&raw, &pair);
    raw_peer_shake_hands(&raw);
    ask = (struct engine_ask){.device = {.kind = _i == 5 ? TL_DEVICE_CUDA : TL_DEVICE_HOST}};
    engine_ask_start(pair.left, &ask, "key", 1);
    raw_peer_run(&raw);
    ck_assert_int_eq(raw_peer_heard(&raw, TL_MESSAGE_REQUEST)->is_remote, _i == 5);
    uint32_t handle = raw_peer_heard(&raw, TL_MESSAGE_REQUEST)->handle;
    struct tl_message done = inline_done(handle, _i == 1 ? TL_INLINE_BYTES + 1 : SMALL_BYTES);
    if (_i == 3) {
        struct tl_message update = done;
        update.type = TL_MESSAGE_META_DATA_UPDATE;
        raw_peer_send(&raw, &update);
        raw_peer_run(&raw);
    }
    if (_i == 4) {
        done.meta_data.shape.dims[0] = done.meta_data.size_bytes = 0;
    }
    raw_peer_send(&raw, &done);
    raw_peer_run(&raw);
    if (_i == 2) {
        raw_peer_send(&raw, &done); /* The handle is over: it is dropped. */
        raw_peer_run(&raw);
        ck_assert_uint_eq(engine_side_stats(pair.left).late_answers, 1);
    }
    bool is_right = _i == 0 || _i == 2 || _i == 3;
    ck_assert_uint_eq(engine_side_stats(pair.left).protocol_errors, is_right ? 0 : 1);
    raw_peer_close(&raw);
    if (ask.is_open) {
        struct tl_error reason;
        tl_error_set(&reason, TL_UNAVAILABLE, "the test is over");
        tl_conn_close(pair.left->conn, &reason);
        engine_pair_run(&pair);
    }
    ck_assert_uint_eq(ask.done_count, 1);
    if (is_right) ck_assert_int_eq(ask.result.code, TL_OK);
    engine_ask_fini(&ask);
    engine_pair_close(&pair);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_inline");
    TCase *sizes_case = tcase_create("sizes"), *tcase = tcase_create("engine_inline");
    tcase_add_checked_fixture(sizes_case, setup, NULL);
    tcase_add_test(sizes_case, sizes); /* a case of its own, which tests/defects selects */
    tcase_add_test(sizes_case, sizes_for_memory_of_users);
    suite_add_tcase(suite, sizes_case);
    TCase *order_case = tcase_create("order_of_a_subscription"); /* the same */
    tcase_add_checked_fixture(order_case, setup, NULL);
    tcase_add_test(order_case, order_of_a_subscription);
    suite_add_tcase(suite, order_case);
    TCase *memory_case = tcase_create("sent_value_waits_for_memory"); /* the same */
    tcase_add_checked_fixture(memory_case, setup, NULL);
    tcase_add_loop_test(memory_case, sent_value_waits_for_memory, 0, 2);
    suite_add_tcase(suite, memory_case);
    TCase *cancel_case = tcase_create("cancel_behind_our_own_full_pool"); /* the same */
    tcase_add_checked_fixture(cancel_case, setup, NULL);
    tcase_add_test(cancel_case, cancel_behind_our_own_full_pool);
    suite_add_tcase(suite, cancel_case);
    add_own_case(suite, "slots_before_a_value_that_waits", setup, NULL, slots_before_a_value_that_waits);
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, small_after_large);
    tcase_add_test(tcase, checksums_and_published_steps);
    tcase_add_test(tcase, file_backed);
    tcase_add_test(tcase, file_that_changes);
    tcase_add_test(tcase, strings);
    tcase_add_test(tcase, no_memory_for_a_published_value);
    tcase_add_loop_test(tcase, sent_value_waits_for_memory_beyond, 0, 4);
    tcase_add_test(tcase, step_of_a_subscription);
    tcase_add_test(tcase, destination_of_the_caller);
    tcase_add_test(tcase, many_share_slots);
    tcase_add_test(tcase, cancelled_meanwhile);
    tcase_add_test(tcase, peer_that_falsifies_checksums);
    tcase_add_loop_test(tcase, peer_that_answers_inline, 0, 6);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
