// SPDX-License-Identifier: Apache-2.0
/*
 * A peer that breaks the protocol: whatever it sends, in whatever state a request is, that request or the connection
 * ends with a status, the process goes on, and all memory comes back.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "dataplane/engine/response_internal.h"
#include "fakes/engine_pair.h"
#include "fakes/fake_clock.h"
#include "fakes/raw_peer.h"
#include "fakes/run_suite.h"

#define SIZE_BYTES 3000

static struct engine_pair pair;
static struct engine_pair_options options;
static struct raw_peer raw;
static struct engine_ask ask;
static const struct tl_message *request; /* The latest request of the engine. */

static void setup(void)
{
    engine_pair_defaults(&options);
    options.is_right_raw = true;
}

static void open_raw(void)
{
    engine_pair_init(&pair, &options);
    raw_peer_open(&raw, &pair);
    raw_peer_shake_hands(&raw);
    ask = (struct engine_ask){.is_open = false};
}

static void close_raw(void)
{
    raw_peer_close(&raw);
    engine_pair_close(&pair);
}

static void send_type(enum tl_message_type type, uint32_t handle)
{
    struct tl_message message = raw_peer_message(type, handle);
    raw_peer_send(&raw, &message);
}

static struct tl_message with_meta_data(enum tl_message_type type, uint64_t size_bytes)
{
    struct tl_message message = raw_peer_message(type, request->handle);
    message.has_meta_data = true;
    message.meta_data =
        (struct tl_meta_data){.dtype = TL_U8, .shape = {.rank = 1, .dims = {size_bytes}}, .size_bytes = size_bytes};
    return message;
}

static void update(uint64_t size_bytes)
{
    struct tl_message message = with_meta_data(TL_MESSAGE_META_DATA_UPDATE, size_bytes);
    raw_peer_send(&raw, &message);
}

static void write_piece(uint64_t offset_bytes, uint64_t len_bytes, uint32_t flags)
{
    raw_peer_write(&raw, &request->destination, offset_bytes, len_bytes, request->handle | flags);
}

struct word {
    enum tl_message_type type;
    uint64_t size_bytes; /* The size in its meta-data; UINT64_MAX: no meta-data. */
    uint64_t write_bytes;
    uint32_t flags;
};

static void say(const struct word *word);

/* ----------------------------------------------------------------------------------------- states of a request -- */

/* The state of our request when the peer sends something. */
enum stage {
    STAGE_NONE,         /* There is no request. */
    STAGE_ASKED,        /* It has no destination. */
    STAGE_RENEWING,     /* Its memory is being registered. */
    STAGE_RE_ASKED,     /* It has a destination. */
    STAGE_HALF,         /* Half of it has come. */
    STAGE_ACKNOWLEDGED, /* All of it has come, and a DONE must follow. */
    STAGE_CANCELLING,   /* It has a destination. */
    STAGE_CANCELLING_UNPLACED,
    STAGE_MAY_MAP, /* It has no destination, because it may be mapped. */
    STAGE_CANCELLING_MAY_MAP,
    STAGE_READING, /* It has no destination, because it reads, and the peer has shown nothing. */
    STAGE_SOURCE,  /* Its reads are under way. */
    STAGES,
};

static void start(const char *key)
{
    engine_ask_start(pair.left, &ask, key, 1);
    raw_peer_run(&raw);
    request = raw_peer_heard(&raw, TL_MESSAGE_REQUEST);
    ck_assert_ptr_nonnull(request);
}

/* Runs the engine's rounds without waiting for its registration thread. */
static void run_without_closures(void)
{
    for (unsigned i = 0; i < 20; i++) {
        (void)engine_side_round(pair.left);
        (void)engine_side_round(pair.right);
    }
}

static void renew(void)
{
    static struct tl_message merged;
    update(SIZE_BYTES);
    raw_peer_run(&raw);
    const struct tl_message *again = raw_peer_heard(&raw, TL_MESSAGE_RE_REQUEST);
    ck_assert_ptr_nonnull(again);
    merged = *again;
    request = &merged;
}

static void reach(enum stage stage)
{
    ask.is_unregistered = stage == STAGE_RENEWING;
    ask.may_map = stage == STAGE_MAY_MAP || stage == STAGE_CANCELLING_MAY_MAP;
    if (stage >= STAGE_READING) pair.left->engine->options.is_reading = true;
    if (stage != STAGE_NONE) start("key");
    switch (stage) {
    case STAGE_RENEWING:
        /* Leaves the closure of the registration thread undelivered. */
        update(1 << 20);
        (void)engine_side_round(pair.right);
        for (unsigned i = 0; i < 4 && ask.place_count == 0; i++)
            (void)engine_side_round(pair.left);
        ck_assert_uint_eq(ask.place_count, 1);
        break;
    case STAGE_RE_ASKED:
    case STAGE_HALF:
    case STAGE_ACKNOWLEDGED:
    case STAGE_CANCELLING:
        renew();
        break;
    default:
        break;
    }
    if (stage == STAGE_SOURCE) {
        const struct fake_rule slow = {.fault = FAKE_DROP, .kinds = FAKE_READ, .times = FAKE_ALWAYS};
        fake_fabric_add_rule(pair.fabric, &slow);
        say(&(struct word){.type = TL_MESSAGE_SOURCE, .size_bytes = SIZE_BYTES});
    }
    if (stage == STAGE_HALF) write_piece(0, SIZE_BYTES / 2, 0);
    if (stage == STAGE_ACKNOWLEDGED) write_piece(0, SIZE_BYTES, TL_IMMEDIATE_DONE_FOLLOWS);
    if (stage == STAGE_CANCELLING || stage == STAGE_CANCELLING_UNPLACED || stage == STAGE_CANCELLING_MAY_MAP)
        engine_ask_cancel(&ask);
    if (stage != STAGE_RENEWING) raw_peer_run(&raw);
    ck_assert_uint_eq(ask.done_count, 0);
}

/* ------------------------------------------------------------------------------- every message, in every state -- */

static const struct word words[] = {
    {TL_MESSAGE_HELLO, UINT64_MAX, 0, 0},
    {TL_MESSAGE_PROBED, UINT64_MAX, 0, 0},
    {TL_MESSAGE_REQUEST, UINT64_MAX, 0, 0},
    {TL_MESSAGE_META_DATA_UPDATE, UINT64_MAX, 0, 0},
    {TL_MESSAGE_META_DATA_UPDATE, 0, 0, 0},
    {TL_MESSAGE_META_DATA_UPDATE, 10, 0, 0},
    {TL_MESSAGE_META_DATA_UPDATE, SIZE_BYTES / 2, 0, 0},
    {TL_MESSAGE_META_DATA_UPDATE, SIZE_BYTES, 0, 0},
    {TL_MESSAGE_META_DATA_UPDATE, INT64_MAX, 0, 0},
    {TL_MESSAGE_RE_REQUEST, UINT64_MAX, 0, 0},
    {TL_MESSAGE_COPIED, UINT64_MAX, 0, 0},
    {TL_MESSAGE_DONE, UINT64_MAX, 0, 0},
    {TL_MESSAGE_DONE, 0, 0, 0},
    {TL_MESSAGE_DONE, SIZE_BYTES, 0, 0},
    {TL_MESSAGE_ERROR_STATUS, UINT64_MAX, 0, 0},
    {TL_MESSAGE_CANCEL, UINT64_MAX, 0, 0},
    {TL_MESSAGE_CANCELLED, UINT64_MAX, 0, 0},
    {TL_MESSAGE_CREDIT, UINT64_MAX, 0, 0},
    {TL_MESSAGE_GOODBYE, UINT64_MAX, 0, 0},
    {TL_MESSAGE_MAPPED, UINT64_MAX, 0, 0},
    {TL_MESSAGE_MAPPED, 0, 0, 0},
    {TL_MESSAGE_MAPPED, SIZE_BYTES, 0, 0},
    {TL_MESSAGE_MAPPED, INT64_MAX, 0, 0}, /* It lies beyond the end of the file. */
    {TL_MESSAGE_SOURCE, UINT64_MAX, 0, 0},
    {TL_MESSAGE_SOURCE, 0, 0, 0},
    {TL_MESSAGE_SOURCE, SIZE_BYTES, 0, 0},
    {TL_MESSAGE_SOURCE, INT64_MAX, 0, 0}, /* There is no memory for it. */
    {(enum tl_message_type)0, 0, 0, 0},   /* An immediate without bytes. */
    {(enum tl_message_type)0, 0, 0, TL_IMMEDIATE_DONE_FOLLOWS},
    {(enum tl_message_type)0, 0, 10, 0},
    {(enum tl_message_type)0, 0, 10, TL_IMMEDIATE_DONE_FOLLOWS | TL_IMMEDIATE_SENDER_COPYING},
    {(enum tl_message_type)0, 0, SIZE_BYTES / 2, 0},
    {(enum tl_message_type)0, 0, SIZE_BYTES, 0},
    {(enum tl_message_type)0, 0, SIZE_BYTES, TL_IMMEDIATE_DONE_FOLLOWS},
};
#define WORD_COUNT ((int)(sizeof(words) / sizeof(words[0])))

static void say(const struct word *word)
{
    static const struct tl_message nothing;
    if (request == NULL) request = &nothing;
    if (word->type == 0) {
        write_piece(0, word->write_bytes, word->flags);
        return;
    }
    struct tl_message message = raw_peer_message(word->type, request->handle);
    if (word->size_bytes != UINT64_MAX) message = with_meta_data(word->type, word->size_bytes);
    message.number = 1;
    message.destination = raw.exposure.descriptor; /* A source behind it is not for reading. */
    if (word->type == TL_MESSAGE_SOURCE && raw.has_source) message.destination = raw.source.descriptor;
    if (word->type == TL_MESSAGE_MAPPED) message.destination = raw_peer_file(&raw, SIZE_BYTES);
    message.code = TL_ABORTED;
    message.text = "because";
    raw_peer_send(&raw, &message);
}

/* Two messages after each other: the second one meets the state that the first one leaves. */
START_TEST(every_word_in_every_state)
{
    for (int stage = 0; stage < STAGES; stage++) {
        for (int second = 0; second < WORD_COUNT; second++) {
            open_raw();
            request = NULL;
            reach((enum stage)stage);
            say(&words[_i]);
            if (stage == STAGE_RENEWING) run_without_closures();
            say(&words[second]);
            if (stage == STAGE_RENEWING) run_without_closures();
            raw_peer_run(&raw);
            /* Does the rest of the request: a message that the engine has accepted must not have left it half done. */
            fake_clock_advance(2 * options.engine.cancel_ns);
            raw_peer_run(&raw);
            fake_clock_advance(2 * options.engine.peer_timeout_ns);
            raw_peer_run(&raw);
            if (stage != STAGE_NONE) {
                struct tl_error reason;
                tl_error_set(&reason, TL_UNAVAILABLE, "over");
                if (pair.left->conn != NULL) tl_conn_close(pair.left->conn, &reason);
                raw_peer_run(&raw);
                ck_assert_uint_eq(ask.done_count, 1);
                engine_ask_fini(&ask);
            }
            close_raw();
        }
    }
}
END_TEST

/* It answers pings and returns no slots, so that CANCEL is never sent: the request ends all the same. */
START_TEST(slots_are_not_returned)
{
    static struct engine_ask asks[RAW_PEER_REQUESTS];
    options.engine.slot_count = options.engine.request_count = RAW_PEER_REQUESTS;
    open_raw();
    uint32_t consumed = raw.consumed;
    for (unsigned i = 0; i < RAW_PEER_REQUESTS; i++) {
        engine_ask_start(pair.left, &asks[i], "key", i);
        raw_peer_run(&raw); /* so that each REQUEST takes a slot, until there is none */
    }
    engine_ask_cancel(&asks[0]);
    for (unsigned i = 0; i < 8 && pair.left->closed_count == 0; i++) {
        fake_clock_advance(options.engine.peer_timeout_ns / 4);
        raw.consumed = consumed;
        send_type(TL_MESSAGE_CREDIT, 0);
        raw_peer_run(&raw);
    }
    ck_assert_uint_eq(pair.left->closed_count, 1);
    ck_assert_ptr_nonnull(strstr(pair.left->reason.message, "the cancel of key"));
    ck_assert_int_eq(asks[0].result.code, TL_CANCELLED);
    for (unsigned i = 0; i < RAW_PEER_REQUESTS; i++)
        engine_ask_fini(&asks[i]);
    close_raw();
}
END_TEST

/* -------------------------------------------------------------------------------------------------- wrong DONEs -- */

static void expect_reason(const char *reason)
{
    raw_peer_run(&raw);
    ck_assert_uint_eq(pair.left->closed_count, 1);
    ck_assert_ptr_nonnull(strstr(pair.left->reason.message, reason));
    ck_assert_uint_eq(ask.done_count, 1);
    engine_ask_fini(&ask);
    close_raw();
}

START_TEST(wrong_done)
{
    static const struct {
        enum stage stage;
        uint64_t size_bytes; /* As in struct word. */
        bool has_all_bytes;
        const char *reason;
    } cases[] = {
        {STAGE_HALF, UINT64_MAX, false, "DONE for key before all of its bytes"},
        {STAGE_RE_ASKED, UINT64_MAX, true, "DONE for key that its bytes did not announce"},
        {STAGE_ASKED, SIZE_BYTES, false, "DONE for key with the meta-data of a value that has bytes"},
        {STAGE_HALF, 0, false, "DONE for key without bytes after some of its bytes"},
    };
    open_raw();
    reach(cases[_i].stage);
    if (cases[_i].has_all_bytes) write_piece(0, SIZE_BYTES, 0);
    say(&(struct word){.type = TL_MESSAGE_DONE, .size_bytes = cases[_i].size_bytes});
    expect_reason(cases[_i].reason);
}
END_TEST

/* The value has come, and has its completion. */
START_TEST(status_after_done)
{
    open_raw();
    reach(STAGE_ASKED);
    uint64_t late_answers = engine_side_stats(pair.left).late_answers;
    say(&(struct word){.type = TL_MESSAGE_DONE, .size_bytes = 0});
    send_type(TL_MESSAGE_ERROR_STATUS, request->handle);
    raw_peer_run(&raw);
    ck_assert_uint_eq(engine_side_stats(pair.left).late_answers, late_answers + 1);
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_int_eq(ask.result.code, TL_OK);
    ck_assert_uint_eq(pair.left->closed_count, 0);
    engine_ask_fini(&ask);
    close_raw();
}
END_TEST

/* ------------------------------------------------------------------------------------------------ what it asks -- */

static void expect_protocol_error(void)
{
    raw_peer_run(&raw);
    ck_assert_uint_eq(pair.left->closed_count, 1);
    ck_assert_int_eq(pair.left->reason.code, TL_UNAVAILABLE);
    ck_assert_uint_eq(engine_side_stats(pair.left).protocol_errors, 1);
    ck_assert_uint_eq(pair.left->open_serve_count, 0);
    close_raw();
}

static struct tl_message ask_for(uint32_t handle)
{
    struct tl_message message = raw_peer_message(TL_MESSAGE_REQUEST, handle);
    message.number = 1;
    message.step = 1;
    return message;
}

START_TEST(request_with_an_open_handle)
{
    open_raw();
    struct tl_message message = ask_for(5);
    raw_peer_send(&raw, &message);
    raw_peer_run(&raw);
    ck_assert_uint_eq(pair.left->open_serve_count, 1);
    message.number = 2;
    raw_peer_send(&raw, &message);
    expect_protocol_error();
}
END_TEST

START_TEST(request_with_an_impossible_handle)
{
    const uint32_t handles[] = {TL_MAX_REQUESTS, TL_IMMEDIATE_DONE_FOLLOWS | 5, TL_IMMEDIATE_SENDER_COPYING | 5,
                                UINT32_MAX};
    open_raw();
    struct tl_message message = ask_for(handles[_i]);
    raw_peer_send(&raw, &message);
    expect_protocol_error();
}
END_TEST

START_TEST(request_without_a_number)
{
    open_raw();
    struct tl_message message = ask_for(5);
    message.number = 0;
    raw_peer_send(&raw, &message);
    expect_protocol_error();
}
END_TEST

/* There are more than could ever be open, so the memory is bounded. */
START_TEST(too_many_requests)
{
    options.engine.request_count = 4;
    options.engine.slot_count = 16;
    open_raw();
    unsigned sent = 0;
    while (pair.left->closed_count == 0 && sent < 1000) {
        struct tl_message message = ask_for(++sent);
        message.number = sent;
        raw_peer_send(&raw, &message);
        raw_peer_run(&raw);
    }
    ck_assert_uint_eq(sent, 2 * 4 + 16 + 1);
    expect_protocol_error();
}
END_TEST

/* Returns how many responses are in the longest list of the table. */
static unsigned longest_list(const struct conn_responses *responses)
{
    unsigned longest = 0;
    for (uint32_t i = 0; i < responses->place_count; i++) {
        unsigned count = 0;
        for (const struct response *response = responses->by_handle[i]; response != NULL; response = response->next)
            count++;
        if (count > longest) longest = count;
    }
    return longest;
}

/* Whichever handles a peer chooses, the owner finds each of them at once. */
START_TEST(handles_with_equal_bits)
{
    enum { COUNT = 2000 };
    options.engine.request_count = COUNT;
    open_raw();
    for (unsigned i = 0; i < COUNT; i++) {
        struct tl_message message = ask_for(tl_handle(i % 250 << 12, i / 250));
        message.number = 1 + i;
        raw_peer_send(&raw, &message);
        if (i % 10 == 9) raw_peer_run(&raw);
    }
    const struct conn_responses *responses = &pair.left->conn->responses;
    ck_assert_uint_eq(responses->count, COUNT);
    ck_assert_uint_le(longest_list(responses), 20); /* 7 or 8, as a rule */
    close_raw();
}
END_TEST

#define LAP_BYTES 16384

/* Asks for 100,000 bytes, to be written into a place of LAP_BYTES round and round. */
static void ask_for_laps(void)
{
    engine_side_send(pair.left, "key", 1, engine_bytes(100000, 1));
    struct tl_message message = ask_for(5);
    message.destination = raw.exposure.descriptor;
    message.is_copying = true;
    message.lap_bytes = LAP_BYTES;
    message.has_meta_data = true;
    message.meta_data =
        (struct tl_meta_data){.dtype = TL_U8, .shape = {.rank = 1, .dims = {100000}}, .size_bytes = 100000};
    raw_peer_send(&raw, &message);
    raw_peer_run(&raw);
}

/* It writes no more than one lap ahead of what the peer has copied on. */
START_TEST(copied_what_was_not_written)
{
    open_raw();
    uint64_t sent_bytes = engine_side_stats(pair.left).bytes_sent;
    ask_for_laps();
    ck_assert_uint_eq(engine_side_stats(pair.left).bytes_sent - sent_bytes, LAP_BYTES);
    for (unsigned i = 0; i < TL_LAP_PARTS; i++)
        send_type(TL_MESSAGE_COPIED, 5);
    raw_peer_run(&raw);
    ck_assert_uint_eq(engine_side_stats(pair.left).bytes_sent - sent_bytes, 2 * LAP_BYTES);
    for (unsigned i = 0; i < TL_LAP_PARTS; i++)
        send_type(TL_MESSAGE_COPIED, 5);
    send_type(TL_MESSAGE_COPIED, 5);
    expect_protocol_error();
}
END_TEST

/* That may have crossed the last message about its request. */
START_TEST(copied_of_nothing)
{
    open_raw();
    send_type(TL_MESSAGE_COPIED, 5);
    raw_peer_run(&raw);
    ck_assert(tl_conn_is_up(pair.left->conn));
    close_raw();
}
END_TEST

START_TEST(re_request_of_nothing)
{
    open_raw();
    struct tl_message message = raw_peer_message(TL_MESSAGE_RE_REQUEST, 5);
    message.destination = raw.exposure.descriptor;
    raw_peer_send(&raw, &message);
    expect_protocol_error();
}
END_TEST

START_TEST(re_request_that_was_not_asked_for)
{
    open_raw();
    struct tl_message message = ask_for(5);
    raw_peer_send(&raw, &message);
    message = raw_peer_message(TL_MESSAGE_RE_REQUEST, 5);
    message.destination = raw.exposure.descriptor;
    raw_peer_send(&raw, &message);
    expect_protocol_error();
}
END_TEST

/* The value is offered again; a message that crosses the renewed offer is no fault. */
START_TEST(peer_that_never_says_where_a_value_goes)
{
    options.engine.parked_ns = options.engine.peer_timeout_ns / 2;
    open_raw();
    engine_side_send(pair.left, "key", 1, engine_pool_bytes(pair.left, 100, 1));
    struct tl_message message = ask_for(5);
    raw_peer_send(&raw, &message);
    raw_peer_run(&raw);
    ck_assert_ptr_nonnull(raw_peer_heard(&raw, TL_MESSAGE_META_DATA_UPDATE));
    ck_assert_uint_eq(pair.left->open_serve_count, 1);
    fake_clock_advance(options.engine.parked_ns);
    raw_peer_run(&raw);
    const struct tl_message *status = raw_peer_heard(&raw, TL_MESSAGE_ERROR_STATUS);
    ck_assert_ptr_nonnull(status);
    ck_assert_uint_eq(status->handle, 5);
    ck_assert_int_eq(status->code, TL_UNAVAILABLE);
    ck_assert(!status->is_final);
    ck_assert_uint_eq(pair.left->open_serve_count, 0);
    ck_assert_int_eq(pair.left->last_end, TL_SERVE_CANCELLED);
    ck_assert(engine_side_has(pair.left, "key", 1));
    message = raw_peer_message(TL_MESSAGE_RE_REQUEST, 5);
    message.destination = raw.exposure.descriptor;
    raw_peer_send(&raw, &message);
    raw_peer_run(&raw);
    ck_assert_ptr_nonnull(pair.left->conn);
    ck_assert(tl_conn_is_up(pair.left->conn));
    /* It happens once. */
    raw_peer_send(&raw, &message);
    expect_protocol_error();
}
END_TEST

START_TEST(re_request_to_nowhere)
{
    open_raw();
    engine_side_send(pair.left, "key", 1, engine_pool_bytes(pair.left, 100, 1));
    struct tl_message message = ask_for(5);
    raw_peer_send(&raw, &message);
    raw_peer_run(&raw);
    ck_assert_ptr_nonnull(raw_peer_heard(&raw, TL_MESSAGE_META_DATA_UPDATE));
    send_type(TL_MESSAGE_RE_REQUEST, 5);
    raw_peer_run(&raw);
    ck_assert_uint_eq(engine_side_values(pair.left), 1); /* It is kept for the asker. */
    expect_protocol_error();
}
END_TEST

/* A destination that is too small, or belongs to another request, breaks the connection and nothing else. */
START_TEST(destination_that_cannot_be_written)
{
    open_raw();
    engine_side_send(pair.left, "key", 1, engine_pool_bytes(pair.left, 5000, 1));
    struct tl_message message = ask_for(5);
    message.has_meta_data = true;
    message.meta_data = (struct tl_meta_data){.dtype = TL_U8, .shape = {.rank = 1, .dims = {5000}}, .size_bytes = 5000};
    message.expected_step = 1;
    message.destination = raw.exposure.descriptor;
    if (_i == 0) message.destination.bytes[8] ^= 0xff;
    if (_i == 1) message.destination.len_bytes = 1;
    if (_i == 2) memset(message.destination.bytes, 0xff, sizeof(message.destination.bytes));
    raw_peer_send(&raw, &message);
    raw_peer_run(&raw);
    ck_assert_uint_eq(pair.left->closed_count, 1);
    ck_assert_int_eq(pair.left->reason.code, TL_UNAVAILABLE);
    ck_assert_int_eq(pair.left->last_end, TL_SERVE_BROKEN);
    ck_assert_uint_eq(engine_side_values(pair.left), 1);
    close_raw();
}
END_TEST

START_TEST(cancel_of_nothing_is_answered)
{
    open_raw();
    send_type(TL_MESSAGE_CANCEL, 77);
    raw_peer_run(&raw);
    const struct tl_message *answer = raw_peer_heard(&raw, TL_MESSAGE_CANCELLED);
    ck_assert_ptr_nonnull(answer);
    ck_assert_uint_eq(answer->handle, 77);
    ck_assert_uint_eq(pair.left->closed_count, 0);
    close_raw();
}
END_TEST

/* -------------------------------------------------------------------------------------------- credits and data -- */

START_TEST(more_consumed_than_was_sent)
{
    open_raw();
    struct tl_message message = raw_peer_message(TL_MESSAGE_CREDIT, 0);
    raw.consumed += 1000;
    raw_peer_send(&raw, &message);
    expect_protocol_error();
}
END_TEST

/* As many messages in a slot as there may be, and one more. */
START_TEST(more_messages_than_a_slot_may_have)
{
    struct tl_message messages[TL_SLOT_MESSAGES + 1];
    open_raw();
    for (unsigned i = 0; i < TL_ARRAY_COUNT(messages); i++)
        messages[i] = raw_peer_message(TL_MESSAGE_CREDIT, 0);
    raw_peer_send_batch(&raw, messages, TL_SLOT_MESSAGES);
    raw_peer_run(&raw);
    ck_assert_uint_eq(pair.left->closed_count, 0);
    uint64_t before = engine_side_stats(pair.left).messages_received;
    raw_peer_send_batch(&raw, messages, TL_SLOT_MESSAGES + 1);
    raw_peer_run(&raw);
    ck_assert_uint_eq(engine_side_stats(pair.left).messages_received - before, TL_SLOT_MESSAGES);
    ck_assert_ptr_nonnull(strstr(pair.left->reason.message, "more than 64 messages in one slot"));
    expect_protocol_error();
}
END_TEST

/* A count that goes back is old, not wrong. */
START_TEST(consumed_goes_back)
{
    open_raw();
    struct tl_message message = raw_peer_message(TL_MESSAGE_CREDIT, 0);
    raw_peer_send(&raw, &message);
    raw.consumed--;
    raw_peer_send(&raw, &message);
    raw_peer_run(&raw);
    ck_assert_uint_eq(pair.left->closed_count, 0);
    close_raw();
}
END_TEST

/* The peer never reports that it has taken an answer, so our answers wait for slots. */
START_TEST(cancels_without_end)
{
    open_raw();
    uint32_t consumed = raw.consumed;
    for (unsigned i = 0; i < 100000 && !raw.is_broken; i++) {
        struct tl_message message = raw_peer_message(TL_MESSAGE_CANCEL, 5);
        raw.consumed = consumed;
        raw_peer_send(&raw, &message);
        raw_peer_run(&raw);
    }
    ck_assert(raw.is_broken);
    close_raw();
}
END_TEST

START_TEST(more_bytes_than_announced)
{
    open_raw();
    start("key");
    renew();
    write_piece(0, SIZE_BYTES - 1, 0);
    write_piece(0, 2, 0);
    raw_peer_run(&raw);
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    engine_ask_fini(&ask);
    expect_protocol_error();
}
END_TEST

/* Under windows the card itself refuses a write outside. */
START_TEST(write_beyond_the_destination)
{
    open_raw();
    start("key");
    renew();
    write_piece(1, SIZE_BYTES, 0);
    raw_peer_run(&raw);
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    ck_assert_uint_eq(pair.left->closed_count, 1);
    engine_ask_fini(&ask);
    close_raw();
}
END_TEST

/* Answers to a handle whose generation is over are counted and dropped. */
START_TEST(stale_handles)
{
    open_raw();
    uint32_t first_handle = 0;
    for (unsigned i = 0; i <= 2 * RAW_PEER_REQUESTS; i++) { /* Indexes are used again in turn. */
        start("key");
        if (i == 0) first_handle = request->handle;
        ck_assert_uint_eq(tl_handle_index(request->handle), i % RAW_PEER_REQUESTS);
        if (i > 0) ck_assert_uint_ne(request->handle, first_handle);
        struct tl_message empty = with_meta_data(TL_MESSAGE_DONE, 0);
        raw_peer_send(&raw, &empty);
        raw_peer_run(&raw);
        ck_assert_int_eq(ask.result.code, TL_OK);
        engine_ask_fini(&ask);
    }
    start("key");
    uint64_t late = engine_side_stats(pair.left).late_answers;
    send_type(TL_MESSAGE_DONE, first_handle);
    send_type(TL_MESSAGE_CANCELLED, first_handle);
    send_type(TL_MESSAGE_ERROR_STATUS, first_handle);
    send_type(TL_MESSAGE_META_DATA_UPDATE, TL_MAX_REQUESTS - 1); /* An index that was never used. */
    raw_peer_run(&raw);
    ck_assert_uint_eq(engine_side_stats(pair.left).late_answers, late + 4);
    ck_assert_uint_eq(pair.left->closed_count, 0);
    ck_assert_uint_eq(ask.done_count, 0);
    struct tl_message empty = with_meta_data(TL_MESSAGE_DONE, 0);
    raw_peer_send(&raw, &empty);
    raw_peer_run(&raw);
    engine_ask_fini(&ask);
    close_raw();
}
END_TEST

/* The generation wraps; the handle that is open then still works. */
START_TEST(generations_wrap)
{
    open_raw();
    for (unsigned i = 0; i < RAW_PEER_REQUESTS * ((1u << TL_HANDLE_GENERATION_BITS) + 1); i++) {
        start("key");
        ck_assert_uint_eq(request->handle & ~TL_HANDLE_MASK, 0);
        struct tl_message empty = with_meta_data(TL_MESSAGE_DONE, 0);
        raw_peer_send(&raw, &empty);
        for (unsigned round = 0; ask.done_count == 0 && round < 100; round++)
            raw_peer_run(&raw);
        ck_assert_int_eq(ask.result.code, TL_OK);
        engine_ask_fini(&ask);
    }
    close_raw();
}
END_TEST

/* A tensor that cannot be mapped is asked for again, to be copied; the peer may answer that as badly. */
START_TEST(mapped_lies)
{
    open_raw();
    ask.may_map = true;
    start("key");
    ck_assert(request->may_map && request->destination.len_bytes == 0);
    struct tl_message message = with_meta_data(TL_MESSAGE_MAPPED, SIZE_BYTES);
    message.destination = raw_peer_file(&raw, SIZE_BYTES);
    switch (_i) {
    case 0: /* The file is another one than any that was shared. */
        message.destination.bytes[8] ^= 0x40;
        break;
    case 1: /* It has no name at all. */
        message.destination.len_bytes = 0;
        break;
    case 2: /* It lies beyond the end of the file. */
        message.offset = SIZE_BYTES;
        break;
    case 3:
        message.offset = UINT64_MAX - 10;
        break;
    default: /* Nothing here lies in files. */
        message.meta_data.dtype = TL_STRING;
        message.meta_data.shape.dims[0] = 2;
        break;
    }
    unsigned heard_count = raw.heard_count;
    raw_peer_send(&raw, &message);
    raw_peer_run(&raw);
    ck_assert_uint_eq(ask.done_count, 0);
    ck_assert_uint_gt(raw.heard_count, heard_count);
    request = raw_peer_heard(&raw, TL_MESSAGE_REQUEST);
    ck_assert(!request->may_map);
    ck_assert_uint_ne(request->handle, message.handle);
    ck_assert_uint_eq(request->number, ask.fetch.number);
    renew();
    write_piece(0, SIZE_BYTES, 0);
    raw_peer_run(&raw);
    ck_assert_int_eq(ask.result.code, TL_OK);
    ck_assert_uint_eq(engine_side_stats(pair.left).protocol_errors, 0);
    engine_ask_fini(&ask);
    close_raw();
}
END_TEST

/* A request that may not be mapped gets no mapping. */
START_TEST(mapped_without_permission)
{
    open_raw();
    ask.may_map = _i > 0;
    ask.wants_checksum = _i == 1;
    start("key");
    struct tl_message message = with_meta_data(TL_MESSAGE_MAPPED, SIZE_BYTES);
    message.destination = raw_peer_file(&raw, SIZE_BYTES);
    if (_i == 2) message.has_meta_data = false;
    if (_i == 3) message = with_meta_data(TL_MESSAGE_MAPPED, 0);
    raw_peer_send(&raw, &message);
    raw_peer_run(&raw);
    ck_assert_uint_eq(ask.done_count, 1);
    ck_assert_int_eq(ask.result.code, TL_UNAVAILABLE);
    engine_ask_fini(&ask);
    expect_protocol_error();
}
END_TEST

/* Random bytes in every slot. */
START_TEST(noise)
{
    uint64_t random = (uint64_t)_i + 1;
    open_raw();
    for (unsigned i = 0; i < 20 && pair.left->closed_count == 0; i++) {
        uint8_t bytes[TL_SLOT_BYTES];
        for (unsigned k = 0; k < sizeof(bytes); k++) {
            random = random * UINT64_C(6364136223846793005) + 1442695040888963407;
            bytes[k] = (uint8_t)(random >> 56);
        }
        uint32_t len_bytes = 8 + bytes[100];
        memcpy(bytes, &raw.consumed, 4);
        bytes[4] = (uint8_t)(bytes[4] % (TL_MESSAGE_SOURCE + 1));
        bytes[5] &= 3;
        bytes[6] = (uint8_t)len_bytes;
        bytes[7] = (uint8_t)(len_bytes >> 8);
        raw_peer_send_bytes(&raw, bytes, 4 + len_bytes);
        raw_peer_run(&raw);
    }
    close_raw();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("engine_hostile");
    TCase *tcase = tcase_create("engine_hostile");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_loop_test(tcase, every_word_in_every_state, 0, WORD_COUNT);
    tcase_add_test(tcase, slots_are_not_returned);
    tcase_add_loop_test(tcase, wrong_done, 0, 4);
    tcase_add_test(tcase, status_after_done);
    tcase_add_test(tcase, request_with_an_open_handle);
    tcase_add_loop_test(tcase, request_with_an_impossible_handle, 0, 4);
    tcase_add_test(tcase, request_without_a_number);
    tcase_add_test(tcase, too_many_requests);
    tcase_add_test(tcase, copied_what_was_not_written);
    tcase_add_test(tcase, copied_of_nothing);
    tcase_add_test(tcase, re_request_of_nothing);
    tcase_add_test(tcase, re_request_that_was_not_asked_for);
    tcase_add_test(tcase, peer_that_never_says_where_a_value_goes);
    tcase_add_test(tcase, re_request_to_nowhere);
    tcase_add_loop_test(tcase, destination_that_cannot_be_written, 0, 3);
    tcase_add_test(tcase, cancel_of_nothing_is_answered);
    tcase_add_test(tcase, cancels_without_end);
    tcase_add_test(tcase, more_consumed_than_was_sent);
    tcase_add_test(tcase, consumed_goes_back);
    tcase_add_test(tcase, more_bytes_than_announced);
    tcase_add_test(tcase, write_beyond_the_destination);
    tcase_add_test(tcase, stale_handles);
    tcase_add_test(tcase, generations_wrap);
    tcase_add_loop_test(tcase, mapped_lies, 0, 5);
    tcase_add_loop_test(tcase, mapped_without_permission, 0, 4);
    tcase_add_loop_test(tcase, noise, 0, 50);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("more_messages_than_a_slot_may_have"); /* tests/defects runs it alone */
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, more_messages_than_a_slot_may_have);
    suite_add_tcase(suite, tcase);
    tcase = tcase_create("handles_with_equal_bits");
    tcase_add_checked_fixture(tcase, setup, NULL);
    tcase_add_test(tcase, handles_with_equal_bits);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
