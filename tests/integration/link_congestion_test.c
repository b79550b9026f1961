// SPDX-License-Identifier: Apache-2.0
/*
 * Counts what waits on a link whose other side does not read. The links are on streams that are driven by hand
 * (fuzz/fake_stream.h), which hold no byte that the other side has not taken.
 *
 * A link that we have opened and one that was accepted, of the same control, are each other's peer. Each asks the other
 * for more tensors than a worker lets wait; the frames are carried over in the order that is worst for one side.
 */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "control/link_internal.h"
#include "fakes/fake_clock.h"
#include "fakes/run_suite.h"
#include "fuzz/fake_stream.h"

#define SELF "/job:node/task:0"
#define OPENED 0 /* The slots of the streams. */
#define ACCEPTED 1
#define ASKED 70000
/* The limits of control/link_unsent.c and control/link_frame.h: what may wait on all accepted links, what may wait on
 * one before it is no longer read, and what one more frame may add. */
#define MAX_UNSENT_OF_ALL 21845
#define FREE_UNSENT 32 /* Each link has this in addition to its share. */
#define MAX_UNSENT (16384 + FREE_UNSENT)
#define MAX_REQUESTS 512
#define CHUNK_BYTES 4096
#define STALLED_NS (60 * TL_NS_PER_SEC)
#define INFLIGHT_BYTES 65536
#define REFERENCED_BYTES_OF_ALL (16 * INFLIGHT_BYTES) /* what the answers of all links refer to */
#define LARGE_BYTES 20000
#define SMALL_BYTES 1000

static struct tl_loop *loop;
static struct tl_control *control;
static struct tl_link *links[2]; /* By slot; NULL: closed. */
static struct tl_tensor *offered;
static struct tl_error error;
static struct tl_fetch *fetches; /* The array has 2 * ASKED elements. */
static size_t done_count[2];
static size_t serve_count;
static size_t closed_count;
static uint64_t received_number;   /* The request of an earlier connection that was acknowledged last. */
static struct tl_error end_reason; /* Why the latest link was closed. */
static size_t max_unsent[2];
static enum tl_status expected_code; /* The status of fetches. */
static struct tl_error refusal;      /* Sent instead of the offered tensor; TL_OK: none. */
static grpc_byte_buffer *carried[2]; /* A copy of the message in flight. */
static size_t sent_count[2];
static size_t again_count;          /* requests for a value that the link had let go */
static struct tl_tensor **versions; /* [version_count]: one was published for each request; NULL: all get `offered` */
static size_t version_count;
static uint64_t version_bytes; /* the size of each version that is published from now on */
static bool uses_up_quota;     /* each request that asks again does so */

/* -------------------------------------------------------------------------------------------------- the worker -- */

static struct tl_tensor *make_tensor(uint64_t size_bytes)
{
    struct tl_tensor *tensor;
    ck_assert(tl_tensor_create(TL_U8, 1, &size_bytes, &tensor, &error) == TL_OK);
    memset(tl_tensor_data(tensor), 1, size_bytes);
    return tensor;
}

static void on_request(void *context, struct tl_serve *serve)
{
    (void)context;
    const struct tl_error ok = {.code = TL_OK};
    if (serve->source_state == &again_count) {
        again_count++;
        closed_count--;
        if (uses_up_quota) tl_quota_use(tl_loop_quota(loop), tl_quota_left(tl_loop_quota(loop)));
    } else {
        serve_count++;
    }
    serve->source_state = &again_count;
    if (refusal.code != TL_OK) {
        serve->ops->reply(serve, &refusal, NULL);
        return;
    }
    if (versions != NULL) versions[version_count++] = make_tensor(version_bytes);
    struct tl_tensor *tensor = versions != NULL ? versions[version_count - 1] : offered;
    const struct tl_offer offer = {.tensor = tl_tensor_get(tensor), .publication = 1 + version_count};
    serve->ops->reply(serve, &ok, &offer);
}

static void on_closed(void *context, struct tl_serve *serve, enum tl_serve_end end)
{
    (void)context;
    (void)serve;
    (void)end;
    closed_count++;
}

static void on_link_closed(struct tl_link *link, const struct tl_error *reason)
{
    end_reason = *reason;
    links[link == links[OPENED] ? OPENED : ACCEPTED] = NULL;
}

static const struct tl_link_events link_events = {.closed = on_link_closed};

static void on_link_up(void *context, struct tl_link *link)
{
    (void)context;
    links[ACCEPTED] = link;
    tl_link_set_events(link, &link_events, NULL);
}

static enum tl_status on_place(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                               struct tl_tensor **ret_destination, struct tl_error *ret_error)
{
    (void)fetch;
    return tl_tensor_create_for(meta_data, ret_destination, ret_error);
}

static void on_done(struct tl_fetch *fetch, const struct tl_error *result)
{
    ck_assert_msg(result->code == expected_code, "%s", result->message);
    done_count[fetch < fetches + ASKED ? OPENED : ACCEPTED]++;
    tl_fetch_fini(fetch);
}

static const struct tl_fetch_ops fetch_ops = {.place = on_place, .done = on_done};
static void on_received(void *context, const struct tl_request_id *id)
{
    (void)context;
    received_number = id->number;
}

static const struct tl_control_handlers handlers = {
    .source = {.request = on_request, .closed = on_closed, .received = on_received},
    .link_up = on_link_up,
};

/* ---------------------------------------------------------------------------------------------------- carrying -- */

static void on_send(unsigned slot, grpc_byte_buffer *message)
{
    ck_assert_ptr_null(carried[slot]);
    carried[slot] = grpc_byte_buffer_copy(message);
    sent_count[slot]++;
}

static void run_loop(void)
{
    while (tl_loop_run_once(loop, 0))
        continue;
    for (unsigned slot = 0; slot < 2; slot++) {
        if (links[slot] != NULL && links[slot]->answers.unsent_count > max_unsent[slot]) {
            max_unsent[slot] = links[slot]->answers.unsent_count;
        }
    }
}

/* Carries the message in flight over, if the other side reads. */
static bool carry(unsigned from)
{
    if (carried[from] == NULL || !fake_stream_is_reading(1 - from)) return false;
    grpc_byte_buffer *message = carried[from];
    carried[from] = NULL;
    ck_assert(fake_stream_give(1 - from, message));
    ck_assert(fake_stream_take(from));
    run_loop();
    return true;
}

/* Takes the message in flight instead of the other side. */
static grpc_byte_buffer *take(unsigned from)
{
    grpc_byte_buffer *message = carried[from];
    carried[from] = NULL;
    ck_assert(fake_stream_take(from));
    run_loop();
    return message;
}

static void setup(void)
{
    const struct tl_control_options options = {
        .self = {.source = TL_IDENTITY_CLAIMED, .name = SELF, .incarnation = 42},
        .chunk_bytes = CHUNK_BYTES,
        .inflight_bytes = INFLIGHT_BYTES,
        .max_calls = FAKE_STREAMS,
        .max_unsent = MAX_UNSENT_OF_ALL,
        .connect_timeout_ns = 3600 * TL_NS_PER_SEC,
        .request_timeout_ns = 3600 * TL_NS_PER_SEC,
        .stalled_timeout_ns = STALLED_NS,
        .handlers = &handlers,
    };
    uint16_t port;
    tl_log_configure(TL_LOG_ERROR, TL_LOG_KEY_VALUE);
    memset(done_count, 0, sizeof(done_count));
    memset(max_unsent, 0, sizeof(max_unsent));
    memset(sent_count, 0, sizeof(sent_count));
    serve_count = again_count = closed_count = version_count = 0;
    version_bytes = LARGE_BYTES;
    uses_up_quota = false;
    expected_code = TL_OK;
    refusal.code = TL_OK;
    fake_stream_on_send = on_send;
    ck_assert(tl_loop_create(&loop, &error) == TL_OK);
    ck_assert(tl_control_create(loop, &options, &control, &error) == TL_OK);
    ck_assert(tl_control_start(control, "127.0.0.1:0", &port, &error) == TL_OK);
}

static void teardown(void)
{
    const struct tl_error gone = {.code = TL_UNAVAILABLE, .message = "gone"};
    for (unsigned slot = 0; slot < 2; slot++) {
        (void)fake_stream_break(slot, &gone);
        grpc_byte_buffer_destroy(carried[slot]);
        carried[slot] = NULL;
    }
    run_loop();
    ck_assert_uint_eq(closed_count, serve_count);
    ck_assert(!tl_tensor_is_shared(offered));
    tl_tensor_put(offered);
    tl_control_destroy(control);
    tl_loop_destroy(loop);
    free(fetches);
    fetches = NULL;
}

static void connect_to_itself(void)
{
    ck_assert(tl_link_open(control, &(const struct tl_link_address){.address = "127.0.0.1:1", .expected_name = SELF},
                           NULL, 0, &link_events, NULL, &links[OPENED], &error) == TL_OK);
    ck_assert_int_eq(fake_stream_accept(fake_stream_method("/tensorlane.v1.Transfer/Exchange")), ACCEPTED);
    while (carry(OPENED) || carry(ACCEPTED))
        continue;
    ck_assert(links[ACCEPTED] != NULL && tl_link_is_up(links[OPENED]) && tl_link_is_up(links[ACCEPTED]));
}

/* ------------------------------------------------------------------------------------- both ask, neither reads -- */

static void start_fetches(unsigned slot, size_t first, size_t count)
{
    if (fetches == NULL) fetches = calloc(2 * ASKED, sizeof(*fetches));
    ck_assert_ptr_nonnull(fetches);
    for (size_t i = first; i < first + count; i++) {
        struct tl_fetch *fetch = &fetches[slot * ASKED + i];
        tl_fetch_init(fetch, &fetch_ops);
        fetch->number = 1 + i;
        fetch->key = "k";
        tl_link_fetch(links[slot], fetch);
    }
}

static void ask(unsigned slot, size_t first, size_t count)
{
    start_fetches(slot, first, count);
    run_loop();
}

static void ask_for_much(void)
{
    start_fetches(OPENED, 0, ASKED);
    ask(ACCEPTED, 0, ASKED);
}

/* Whichever side is favoured, both get all that they have asked for, and the accepting side never lets more wait than
 * its bound: the other requests stay at their origin. The opening side holds what the other has asked for, no more. */
static void expect_both_served(unsigned favoured)
{
    while (carry(favoured) || carry(1 - favoured))
        continue;
    ck_assert_uint_eq(done_count[OPENED], ASKED);
    ck_assert_uint_eq(done_count[ACCEPTED], ASKED);
    ck_assert_uint_eq(closed_count, 2 * ASKED);
    for (unsigned slot = 0; slot < 2; slot++) {
        ck_assert(tl_link_is_idle(links[slot]) && links[slot]->answers.unsent_count == 0 &&
                  links[slot]->answers.active_bytes[0] == 0);
        ck_assert(fake_stream_is_reading(slot) && !fake_stream_is_sending(slot));
    }
    ck_assert_uint_lt(max_unsent[ACCEPTED], MAX_UNSENT + MAX_REQUESTS);
    ck_assert_uint_le(max_unsent[OPENED], ASKED);
}

START_TEST(two_links_that_ask_much_of_each_other_go_on)
{
    offered = make_tensor(SMALL_BYTES);
    connect_to_itself();
    ask_for_much();
    expect_both_served((unsigned)_i);
}
END_TEST

START_TEST(accepted_link_is_not_read_while_too_much_waits)
{
    offered = make_tensor(SMALL_BYTES);
    connect_to_itself();
    ask_for_much();
    /* The opening side sends all it has, and takes nothing. */
    while (carry(OPENED))
        continue;
    ck_assert(fake_stream_is_sending(OPENED) && !fake_stream_is_reading(ACCEPTED));
    ck_assert_uint_ge(links[ACCEPTED]->answers.unsent_count, MAX_UNSENT);
    ck_assert_uint_lt(links[ACCEPTED]->answers.unsent_count, MAX_UNSENT + MAX_REQUESTS);
    ck_assert_uint_lt(serve_count, MAX_UNSENT + 2 * MAX_REQUESTS);
    /* It reads at all times, even now. */
    ck_assert(fake_stream_is_reading(OPENED));
    expect_both_served(OPENED);
}
END_TEST

/* --------------------------------------------------------------------------------------------- limits.inflight -- */

#define LARGE_COUNT 64

static grpc_byte_buffer *pack_frame(Tensorlane__V1__Frame *frame)
{
    grpc_byte_buffer *message = tl_wire_write(&frame->base);
    ck_assert_ptr_nonnull(message);
    return message;
}

static void shake_hands(uint64_t window_bytes)
{
    Tensorlane__V1__Frame frame = TENSORLANE__V1__FRAME__INIT;
    Tensorlane__V1__Hello hello = TENSORLANE__V1__HELLO__INIT;
    hello.protocol_version = 1;
    hello.name = "/job:node/task:1";
    hello.incarnation = 77;
    hello.window_bytes = window_bytes;
    frame.hello = &hello;
    (void)fake_stream_accept(fake_stream_method("/tensorlane.v1.Transfer/Exchange"));
    ck_assert(fake_stream_give(0, pack_frame(&frame)));
    run_loop();
    grpc_byte_buffer_destroy(take(0));
}

static void request_large(unsigned first)
{
    Tensorlane__V1__Frame frame = TENSORLANE__V1__FRAME__INIT;
    Tensorlane__V1__Request requests[LARGE_COUNT];
    Tensorlane__V1__Request *pointers[LARGE_COUNT];
    for (unsigned i = 0; i < LARGE_COUNT; i++) {
        tensorlane__v1__request__init(&requests[i]);
        requests[i].number = first + i;
        requests[i].key = "k";
        pointers[i] = &requests[i];
    }
    frame.requests = pointers;
    frame.n_requests = LARGE_COUNT;
    ck_assert(fake_stream_give(0, pack_frame(&frame)));
    run_loop();
}

/* Returns the bytes of tensors of which a part has come, but not all. */
struct begun {
    uint64_t received[2 * LARGE_COUNT + 1]; /* By number. */
    uint64_t complete;
};

static void note_frame(struct begun *begun, grpc_byte_buffer *message)
{
    struct tl_wire_arena arena;
    ProtobufCMessage *base;
    struct tl_wire_data data;
    ck_assert(tl_wire_arena_init(&arena, 1 << 20, &error) == TL_OK);
    ck_assert(tl_wire_read(&tensorlane__v1__frame__descriptor, message, &arena, &base, &data, &error) == TL_OK);
    const Tensorlane__V1__Frame *frame = (const Tensorlane__V1__Frame *)base;
    ck_assert_uint_le(data.left_bytes, CHUNK_BYTES);
    for (size_t i = 0; i < frame->n_chunks; i++) {
        const Tensorlane__V1__Chunk *chunk = frame->chunks[i];
        ck_assert_uint_eq(chunk->offset, begun->received[chunk->number]);
        begun->received[chunk->number] += chunk->len_bytes;
        if (begun->received[chunk->number] == LARGE_BYTES) begun->complete++;
    }
    tl_wire_data_fini(&data);
    tl_wire_arena_fini(&arena);
    grpc_byte_buffer_destroy(message);
}

static uint64_t begun_bytes(const struct begun *begun)
{
    uint64_t bytes = 0;
    for (unsigned i = 1; i <= 2 * LARGE_COUNT; i++) {
        if (begun->received[i] > 0 && begun->received[i] < LARGE_BYTES) bytes += LARGE_BYTES - begun->received[i];
    }
    return bytes;
}

START_TEST(peer_that_does_not_read_has_one_frame_outstanding)
{
    offered = make_tensor(LARGE_BYTES);
    shake_hands(0);
    request_large(1);
    ck_assert_uint_eq(serve_count, LARGE_COUNT);
    ck_assert_uint_eq(sent_count[0], 2); /* The handshake, and one message that is not taken. */
    uint64_t sent_bytes = control->stats.bytes_sent;
    ck_assert_uint_gt(sent_bytes, 0);
    ck_assert_uint_le(sent_bytes, CHUNK_BYTES);
    /* More requests and more time change nothing. */
    request_large(LARGE_COUNT + 1);
    ck_assert_uint_eq(serve_count, 2 * LARGE_COUNT);
    ck_assert_uint_eq(sent_count[0], 2);
    ck_assert_uint_eq(control->stats.bytes_sent, sent_bytes);
    ck_assert_uint_le(links[ACCEPTED]->answers.active_bytes[0], INFLIGHT_BYTES);
}
END_TEST

START_TEST(no_more_is_begun_than_may_be_in_flight)
{
    struct begun begun = {.complete = 0};
    uint64_t max_bytes = 0;
    offered = make_tensor(LARGE_BYTES);
    shake_hands(0);
    request_large(1);
    request_large(LARGE_COUNT + 1);
    while (carried[0] != NULL) {
        uint64_t sent_before = control->stats.bytes_sent;
        note_frame(&begun, take(0));
        ck_assert_uint_le(control->stats.bytes_sent - sent_before, CHUNK_BYTES);
        ck_assert_uint_le(links[ACCEPTED]->answers.active_bytes[0], INFLIGHT_BYTES);
        ck_assert_uint_le(begun_bytes(&begun), INFLIGHT_BYTES);
        if (begun_bytes(&begun) > max_bytes) max_bytes = begun_bytes(&begun);
    }
    /* Both sides use what may be in flight. */
    ck_assert_uint_gt(max_bytes, LARGE_BYTES);
    ck_assert_uint_eq(begun.complete, 2 * LARGE_COUNT);
    ck_assert_uint_eq(control->stats.bytes_sent, 2 * LARGE_COUNT * LARGE_BYTES);
    ck_assert_uint_eq(closed_count, 2 * LARGE_COUNT);
}
END_TEST

/* The answers of a link hold tensors of which INFLIGHT_BYTES are left to send: some of them have been sent in part. One
 * more is asked for again, and one ends with the frame in flight. */
#define MAX_PINNED (2 * (INFLIGHT_BYTES / LARGE_BYTES) + 2)

static size_t count_pinned(void)
{
    size_t count = 0;
    for (size_t i = 0; i < version_count; i++)
        count += tl_tensor_is_shared(versions[i]);
    return count;
}

/* Nothing holds them any more. */
static void forget_versions(void)
{
    ck_assert_uint_eq(count_pinned(), 0);
    while (version_count > 0)
        tl_tensor_put(versions[--version_count]);
    free(versions);
    versions = NULL;
}

/* A peer asks for each version that is published and takes none. */
START_TEST(answers_that_wait_do_not_pin_versions_that_were_replaced)
{
    struct begun begun = {.complete = 0};
    offered = make_tensor(SMALL_BYTES);
    versions = calloc(8 * LARGE_COUNT, sizeof(struct tl_tensor *));
    ck_assert_ptr_nonnull(versions);
    shake_hands(0);
    request_large(1);
    request_large(LARGE_COUNT + 1);
    ck_assert_uint_eq(version_count, 2 * LARGE_COUNT);
    ck_assert_uint_le(count_pinned(), MAX_PINNED);
    ck_assert_uint_eq(links[ACCEPTED]->answers.unsent_count, 2 * LARGE_COUNT);
    /* Once the peer takes them, all are answered, in the order in which they were asked. */
    while (carried[0] != NULL) {
        note_frame(&begun, take(0));
        ck_assert_uint_le(count_pinned(), MAX_PINNED);
    }
    ck_assert_uint_eq(begun.complete, 2 * LARGE_COUNT);
    ck_assert_uint_gt(again_count, LARGE_COUNT);
    ck_assert_uint_eq(closed_count, 2 * LARGE_COUNT);
    forget_versions();
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ window -- */

static void tell_taken(uint64_t taken_bytes)
{
    Tensorlane__V1__Frame frame = TENSORLANE__V1__FRAME__INIT;
    frame.taken_bytes = taken_bytes;
    ck_assert(fake_stream_give(0, pack_frame(&frame)));
    run_loop();
}

static void take_all(struct begun *begun)
{
    while (carried[0] != NULL)
        note_frame(begun, take(0));
}

START_TEST(no_more_is_sent_than_the_peer_takes)
{
    struct begun begun = {.complete = 0};
    const uint64_t window_bytes = 3 * CHUNK_BYTES;
    offered = make_tensor(LARGE_BYTES);
    shake_hands(window_bytes);
    request_large(1);
    take_all(&begun);
    ck_assert_uint_eq(control->stats.bytes_sent, window_bytes);
    /* Other messages make no difference. */
    request_large(LARGE_COUNT + 1);
    take_all(&begun);
    ck_assert_uint_eq(control->stats.bytes_sent, window_bytes);
    /* The bytes that it has taken may be sent again, once. */
    for (unsigned i = 0; i < 2; i++) {
        tell_taken(CHUNK_BYTES);
        take_all(&begun);
        ck_assert_uint_eq(control->stats.bytes_sent, window_bytes + CHUNK_BYTES);
    }
    while (closed_count < serve_count) {
        tell_taken(control->stats.bytes_sent);
        take_all(&begun);
    }
    ck_assert_uint_eq(begun.complete, 2 * LARGE_COUNT);
}
END_TEST

/* A tensor of many windows arrives, so that each side reports what it takes. The sender is at most one window and one
 * frame ahead of what was reported. */
START_TEST(taken_bytes_are_reported)
{
    uint64_t max_ahead_bytes = 0;
    offered = make_tensor(8 * 1024 * 1024);
    connect_to_itself();
    struct link_window *window = &links[ACCEPTED]->window;
    ck_assert_uint_gt(window->peers_bytes, CHUNK_BYTES);
    ask(OPENED, 0, 1);
    /* The receiver's reports are delivered as late as possible. */
    while (carry(ACCEPTED) || carry(OPENED)) {
        uint64_t ahead_bytes = window->sent_bytes - window->confirmed_bytes;
        if (ahead_bytes > max_ahead_bytes) max_ahead_bytes = ahead_bytes;
    }
    ck_assert_uint_eq(done_count[OPENED], 1);
    ck_assert_uint_ge(max_ahead_bytes, window->peers_bytes / 2);
    ck_assert_uint_lt(max_ahead_bytes, window->peers_bytes + CHUNK_BYTES);
}
END_TEST

/* The opening side takes what it is given, but the other does not read its messages. The frame that makes too much wait
 * brings so many requests that a window full of answers is not enough to read again. */
START_TEST(full_window_does_not_stop_a_side_that_does_not_read)
{
    const size_t asked = MAX_UNSENT + 2 * MAX_REQUESTS;
    const size_t first = MAX_REQUESTS - 1;
    offered = make_tensor(LARGE_BYTES);
    connect_to_itself();
    ask(OPENED, 0, first);
    ask(OPENED, first, asked - first);
    while (carry(OPENED))
        continue;
    ck_assert(!fake_stream_is_reading(ACCEPTED));
    const struct link_window *window = &links[ACCEPTED]->window;
    while (!fake_stream_is_reading(ACCEPTED))
        ck_assert(carry(ACCEPTED));
    ck_assert_uint_gt(window->sent_bytes, window->confirmed_bytes + window->peers_bytes);
    while (carry(OPENED) || carry(ACCEPTED))
        continue;
    ck_assert_uint_eq(done_count[OPENED], asked);
}
END_TEST

START_TEST(only_a_link_over_loopback_has_a_window)
{
    static const struct {
        const char *address;
        bool has_window;
    } cases[] = {
        {"127.0.0.1:1", true}, {"127.9.9.9:1", true}, {"[::1]:1", true}, {"192.0.2.1:1", false}, {"[::2]:1", false}};
    offered = make_tensor(LARGE_BYTES);
    for (unsigned i = 0; i < TL_ARRAY_COUNT(cases); i++) {
        struct tl_link *link;
        ck_assert(tl_link_open(control,
                               &(const struct tl_link_address){.address = cases[i].address, .expected_name = SELF},
                               NULL, 0, NULL, NULL, &link, &error) == TL_OK);
        ck_assert_msg((link->window.ours_bytes > 0) == cases[i].has_window, "%s", cases[i].address);
        const struct tl_error gone = {.code = TL_UNAVAILABLE, .message = "gone"};
        run_loop();
        (void)fake_stream_break(0, &gone);
        grpc_byte_buffer_destroy(carried[0]);
        carried[0] = NULL;
        run_loop();
    }
}
END_TEST

/* ----------------------------------------------------------------------------------------- turns of other links -- */

/* The message in flight leaves, or else the loop has a round: the link composes at most one frame. */
static void step(void)
{
    if (carried[0] != NULL) {
        grpc_byte_buffer_destroy(carried[0]);
        carried[0] = NULL;
        ck_assert(fake_stream_take(0));
    } else {
        (void)tl_loop_run_closures(loop);
    }
}

/* -------------------------------------------------------------------------------- many links that take nothing -- */

static grpc_byte_buffer *frame_of_requests(uint64_t first_number, size_t count)
{
    static Tensorlane__V1__Request requests[2 * LINK_MAX_REQUESTS];
    static Tensorlane__V1__Request *pointers[2 * LINK_MAX_REQUESTS];
    Tensorlane__V1__Frame frame = TENSORLANE__V1__FRAME__INIT;
    for (size_t i = 0; i < count; i++) {
        tensorlane__v1__request__init(&requests[i]);
        requests[i].number = first_number + i;
        requests[i].key = "k";
        pointers[i] = &requests[i];
    }
    frame.requests = pointers;
    frame.n_requests = count;
    return pack_frame(&frame);
}

/* Returns the slot of a client's link, whose first frame is in flight. */
static unsigned accept_client(uint64_t incarnation)
{
    Tensorlane__V1__Frame frame = TENSORLANE__V1__FRAME__INIT;
    Tensorlane__V1__Hello hello = TENSORLANE__V1__HELLO__INIT;
    hello.protocol_version = 1;
    hello.name = "";
    hello.incarnation = incarnation;
    frame.hello = &hello;
    int slot = fake_stream_accept(fake_stream_method("/tensorlane.v1.Transfer/Exchange"));
    ck_assert_int_ge(slot, 0);
    ck_assert(fake_stream_give((unsigned)slot, pack_frame(&frame)));
    run_loop();
    return (unsigned)slot;
}

/* A peer asks until it is no longer read, and takes nothing. Returns how many answers wait for it. */
static size_t ask_until_not_read(uint64_t incarnation)
{
    unsigned slot = accept_client(incarnation);
    uint64_t number = 1;
    size_t before = serve_count;
    while (fake_stream_is_reading(slot)) {
        ck_assert(fake_stream_give(slot, frame_of_requests(number, MAX_REQUESTS)));
        run_loop();
        number += MAX_REQUESTS;
        ck_assert_uint_lt(number, 100000);
    }
    return serve_count - before;
}

START_TEST(links_share_what_may_wait)
{
    const size_t count = FAKE_STREAMS;
    size_t total = 0, least = SIZE_MAX;
    fake_stream_on_send = NULL; /* Nothing is carried. */
    offered = make_tensor(SMALL_BYTES);
    for (size_t i = 0; i < count; i++) {
        size_t waiting = ask_until_not_read(100 + i);
        total += waiting;
        if (waiting < least) least = waiting;
    }
    /* 3/4 + 1/2 + ... + 1/8 of what may wait, and a frame for each; the last link still gets a share. */
    ck_assert_uint_lt(total, MAX_UNSENT_OF_ALL * 5 / 2 + count * MAX_REQUESTS);
    ck_assert_uint_ge(least, MAX_UNSENT_OF_ALL / count - MAX_REQUESTS);
    ck_assert_uint_le(tl_shares_used(control->unsent), total);
    const struct tl_error gone = {.code = TL_UNAVAILABLE, .message = "gone"};
    for (unsigned slot = 0; slot < count; slot++)
        ck_assert(fake_stream_break(slot, &gone));
    run_loop();
    ck_assert_uint_eq(tl_shares_used(control->unsent), 0);
}
END_TEST

static void ask_as_client(unsigned slot, size_t count)
{
    ck_assert(fake_stream_take(slot)); /* the worker's first frame */
    run_loop();
    ck_assert(fake_stream_give(slot, frame_of_requests(1, count)));
    run_loop();
}

/* One link holds as much as all links may. The others ask for each version that is published, and each holds only the
 * one that it has begun. */
START_TEST(links_share_what_they_may_pin)
{
    const size_t count = FAKE_STREAMS;
    fake_stream_on_send = NULL; /* Nothing is carried. */
    offered = make_tensor(SMALL_BYTES);
    versions = calloc(4 * count * LARGE_COUNT, sizeof(struct tl_tensor *));
    ck_assert_ptr_nonnull(versions);
    version_bytes = REFERENCED_BYTES_OF_ALL + 2 * CHUNK_BYTES;
    ask_as_client(accept_client(100), 1);
    version_bytes = LARGE_BYTES;
    for (size_t i = 1; i < count; i++)
        ask_as_client(accept_client(100 + i), LARGE_COUNT);
    ck_assert_uint_eq(version_count, 1 + (count - 1) * LARGE_COUNT + again_count);
    ck_assert_uint_eq(count_pinned(), count);
    /* All are answered nevertheless, while the first link takes nothing. One more ends with the frame in flight. */
    for (unsigned slot = 1; slot < count; slot++) {
        while (fake_stream_take(slot)) {
            run_loop();
            ck_assert_uint_le(count_pinned(), count + 1);
        }
    }
    ck_assert_uint_eq(closed_count, (count - 1) * LARGE_COUNT);
    ck_assert_uint_eq(again_count, (count - 1) * LARGE_COUNT);
    ck_assert_uint_eq(count_pinned(), 1);
    while (fake_stream_take(0))
        run_loop();
    ck_assert_uint_eq(control->referenced_bytes, 0);
    const struct tl_error gone = {.code = TL_UNAVAILABLE, .message = "gone"};
    for (unsigned slot = 0; slot < count; slot++)
        ck_assert(fake_stream_break(slot, &gone));
    run_loop();
    forget_versions();
}
END_TEST

/* The end of a large value makes room for many small ones, whose sources copy so much that each of them leaves the next
 * one to a round of its own. */
START_TEST(values_that_were_let_go_come_back_in_rounds)
{
    const size_t count = 33;
    offered = make_tensor(SMALL_BYTES);
    versions = calloc(2 * count, sizeof(struct tl_tensor *));
    ck_assert_ptr_nonnull(versions);
    shake_hands(0);
    version_bytes = INFLIGHT_BYTES;
    ck_assert(fake_stream_give(0, frame_of_requests(1, 1)));
    run_loop();
    version_bytes = SMALL_BYTES;
    ck_assert(fake_stream_give(0, frame_of_requests(2, count - 1)));
    run_loop();
    uses_up_quota = true;
    for (unsigned round = 0; closed_count < count; round++) {
        ck_assert_uint_lt(round, 1000);
        size_t again_before = again_count;
        step();
        ck_assert_uint_le(again_count - again_before, 1);
    }
    ck_assert_uint_gt(again_count, count / 2);
    forget_versions();
}
END_TEST

START_TEST(frame_with_too_many_requests_ends_the_link)
{
    offered = make_tensor(SMALL_BYTES);
    shake_hands(0);
    ck_assert(fake_stream_give(0, frame_of_requests(1, LINK_MAX_REQUESTS)));
    run_loop();
    ck_assert_uint_eq(serve_count, LINK_MAX_REQUESTS);
    ck_assert_uint_eq(control->stats.protocol_errors, 0);
    ck_assert(fake_stream_give(0, frame_of_requests(5000, LINK_MAX_REQUESTS + 1)));
    run_loop();
    ck_assert_uint_eq(serve_count, LINK_MAX_REQUESTS);
    ck_assert_uint_eq(control->stats.protocol_errors, 1);
}
END_TEST

START_TEST(equal_failures_are_kept_once)
{
    tl_error_set(&refusal, TL_ABORTED, "step 7 was aborted");
    offered = make_tensor(SMALL_BYTES);
    shake_hands(0);
    /* The first frame with failures is not taken. */
    ck_assert(fake_stream_give(0, frame_of_requests(1, 100)));
    run_loop();
    size_t waiting = links[ACCEPTED]->answers.unsent_count;
    ck_assert_uint_gt(waiting, 1);
    ck_assert_ptr_nonnull(links[ACCEPTED]->answers.last_status);
    ck_assert_uint_eq(links[ACCEPTED]->answers.last_status->reference_count, waiting);
    tl_error_set(&refusal, TL_ABORTED, "step 8 was aborted");
    ck_assert(fake_stream_give(0, frame_of_requests(101, 1)));
    run_loop();
    ck_assert_uint_eq(links[ACCEPTED]->answers.last_status->reference_count, 1);
    while (carried[0] != NULL)
        grpc_byte_buffer_destroy(take(0));
    ck_assert_uint_eq(closed_count, 101);
    ck_assert_ptr_null(links[ACCEPTED]->answers.last_status);
}
END_TEST

/* -------------------------------------------------------------------------------------------- links that stall -- */

static void pass_seconds(unsigned seconds)
{
    for (unsigned i = 0; i < seconds; i++) {
        fake_clock_advance(TL_NS_PER_SEC);
        run_loop();
    }
}

START_TEST(link_that_takes_nothing_ends)
{
    offered = make_tensor(LARGE_BYTES);
    shake_hands(0);
    request_large(1);
    pass_seconds(58);
    ck_assert_ptr_nonnull(links[ACCEPTED]);
    ck_assert(tl_tensor_is_shared(offered));
    pass_seconds(3);
    /* The answers end although the connection still lasts: they are pinned no longer than that. */
    (void)fake_stream_end(0);
    run_loop();
    ck_assert_ptr_null(links[ACCEPTED]);
    ck_assert_uint_eq(closed_count, LARGE_COUNT);
    ck_assert_int_eq(end_reason.code, TL_UNAVAILABLE);
    ck_assert_msg(strstr(end_reason.message, "has taken nothing for 60") != NULL, "%s", end_reason.message);
    ck_assert_msg(strstr(end_reason.message, "timeouts.stalled") != NULL, "%s", end_reason.message);
}
END_TEST

/* It half-closes besides, which lets a call end in order once all has been taken. */
START_TEST(link_that_takes_nothing_and_half_closes_ends)
{
    offered = make_tensor(LARGE_BYTES);
    shake_hands(0);
    request_large(1);
    ck_assert(fake_stream_half_close(0));
    pass_seconds(58);
    ck_assert(!fake_stream_end(0));
    pass_seconds(3);
    ck_assert(fake_stream_end(0));
    run_loop();
    ck_assert_ptr_null(links[ACCEPTED]);
    ck_assert_uint_eq(closed_count, LARGE_COUNT);
}
END_TEST

/* The peer of a link of ours that has half-closed does not end it. */
START_TEST(half_closed_link_that_is_left_open_ends)
{
    offered = make_tensor(SMALL_BYTES);
    connect_to_itself();
    tl_link_drain(links[OPENED]);
    run_loop();
    pass_seconds(58);
    ck_assert(links[OPENED] != NULL && !fake_stream_is_cancelled(OPENED));
    pass_seconds(3);
    ck_assert(fake_stream_is_cancelled(OPENED) && fake_stream_end(OPENED));
    run_loop();
    ck_assert_ptr_null(links[OPENED]);
}
END_TEST

/* An acknowledgement of a request of an earlier connection crosses the half-close of its owner. Its sender takes it for
 * told. */
START_TEST(acknowledgement_that_crosses_the_end)
{
    const uint64_t number = 4711;
    offered = make_tensor(SMALL_BYTES);
    connect_to_itself();
    ck_assert(tl_link_acknowledge(links[ACCEPTED], &number, 1));
    run_loop();
    ck_assert_ptr_nonnull(carried[ACCEPTED]);
    tl_link_drain(links[OPENED]);
    run_loop();
    ck_assert(carry(ACCEPTED));
    ck_assert(fake_stream_half_close(ACCEPTED));
    run_loop();
    ck_assert(fake_stream_end(ACCEPTED));
    run_loop();
    ck_assert_ptr_null(links[ACCEPTED]);
    ck_assert_uint_eq(received_number, number);
}
END_TEST

/* The peer never opens its window of one byte again. It takes all other messages. */
START_TEST(link_whose_window_stays_shut_ends)
{
    struct begun begun = {.complete = 0};
    offered = make_tensor(LARGE_BYTES);
    shake_hands(1);
    request_large(1);
    take_all(&begun);
    for (unsigned i = 0; i < 61 && links[ACCEPTED] != NULL; i++) {
        const struct tl_connection_message message = {.transport = "verbs", .kind = TL_CONNECTION_MESSAGE_REFUSAL};
        tl_link_send_connection_message(links[ACCEPTED], &message);
        pass_seconds(1);
        take_all(&begun);
        (void)fake_stream_end(0);
        run_loop();
    }
    ck_assert_ptr_null(links[ACCEPTED]);
    ck_assert_uint_eq(closed_count, LARGE_COUNT);
}
END_TEST

START_TEST(link_that_takes_a_frame_now_and_then_stays)
{
    struct begun begun = {.complete = 0};
    offered = make_tensor(LARGE_BYTES);
    shake_hands(0);
    request_large(1);
    for (unsigned i = 0; i < 10; i++) {
        pass_seconds(59);
        note_frame(&begun, take(0));
    }
    take_all(&begun);
    ck_assert_uint_eq(begun.complete, LARGE_COUNT);
    /* Nothing is unsent: the peer may be quiet for any time. */
    pass_seconds(1000);
    ck_assert_ptr_nonnull(links[ACCEPTED]);
}
END_TEST

/* --------------------------------------------------------------------------------------------- files cut short -- */

/* The offered tensor lies in a file. */
static struct {
    uint64_t cut_at_bytes; /* The file is cut right after a check of bytes up to here; 0: never. */
    bool is_cut;
    uint64_t checked_bytes; /* The bytes of all checks. */
} file;

static void cut(void)
{
    file.is_cut = true;
    memset(tl_tensor_data(offered), 0, tl_tensor_size_bytes(offered));
}

static enum tl_status check_file(void *context, const void *data, uint64_t len_bytes, struct tl_error *ret_error)
{
    (void)context;
    file.checked_bytes += len_bytes;
    if (file.is_cut) return tl_error_set(ret_error, TL_DATA_LOSS, "the file was cut");
    const unsigned char *first = tl_tensor_data(offered);
    if ((uint64_t)((const unsigned char *)data - first) + len_bytes == file.cut_at_bytes) cut();
    return TL_OK;
}

static void offer_file(uint64_t size_bytes, uint64_t cut_at_bytes)
{
    offered = make_tensor(size_bytes);
    tl_tensor_set_guard(offered, check_file, NULL);
    file.cut_at_bytes = cut_at_bytes;
    file.is_cut = false;
    file.checked_bytes = 0;
}

static const uint64_t file_sizes[] = {1, SMALL_BYTES, LARGE_BYTES, 65536, 65537, 200001};

START_TEST(file_arrives)
{
    uint64_t size_bytes = file_sizes[_i];
    offer_file(size_bytes, 0);
    connect_to_itself();
    ask(OPENED, 0, 3);
    while (carry(OPENED) || carry(ACCEPTED))
        continue;
    ck_assert_uint_eq(done_count[OPENED], 3);
    ck_assert_uint_eq(control->stats.bytes_received, 3 * size_bytes);
    /* Only the end of a large tensor was copied. */
    uint64_t copied_bytes = size_bytes > 65536 ? 4096 : size_bytes;
    ck_assert_uint_eq(control->stats.bytes_copied_send, 3 * copied_bytes);
}
END_TEST

/* The cut is between the last check of the bytes and their reading. */
START_TEST(file_cut_after_its_last_check_is_no_success)
{
    uint64_t size_bytes = file_sizes[_i];
    offer_file(size_bytes, size_bytes);
    connect_to_itself();
    expected_code = TL_DATA_LOSS;
    ask(OPENED, 0, 1);
    while (carry(OPENED) || carry(ACCEPTED))
        continue;
    ck_assert(file.is_cut);
    ck_assert_uint_eq(done_count[OPENED], 1);
}
END_TEST

/* The cut is between the check of bytes before the last ones, and the kernel's reading of them. */
START_TEST(file_cut_before_its_bytes_left_is_no_success)
{
    const uint64_t size_bytes = 200000;
    offer_file(size_bytes, 0);
    connect_to_itself();
    expected_code = TL_DATA_LOSS;
    ask(OPENED, 0, 1);
    while (control->stats.bytes_sent < size_bytes - 4096)
        ck_assert(carry(OPENED) || carry(ACCEPTED));
    ck_assert(fake_stream_is_through(ACCEPTED));
    /* Nothing more is sent before the kernel has what was sent. */
    run_loop();
    ck_assert_uint_eq(control->stats.bytes_sent, size_bytes - 4096);
    cut();
    while (carry(OPENED) || carry(ACCEPTED))
        continue;
    ck_assert_uint_eq(done_count[OPENED], 1);
}
END_TEST

/* ------------------------------------------------------------------------------------------- resumed transfers -- */

#define RESUMED 8
#define CATCH_UP_BYTES (4 * 1024 * 1024) /* The limit of control/link_chunks.c. */
#define RESUMED_BYTES (2 * CATCH_UP_BYTES + LARGE_BYTES)

static void request_the_last_bytes(void)
{
    Tensorlane__V1__Frame frame = TENSORLANE__V1__FRAME__INIT;
    Tensorlane__V1__Request requests[RESUMED];
    Tensorlane__V1__Request *pointers[RESUMED];
    for (unsigned i = 0; i < RESUMED; i++) {
        tensorlane__v1__request__init(&requests[i]);
        requests[i].number = 1 + i;
        requests[i].key = "k";
        requests[i].wants_checksum = 1;
        requests[i].publication = 1;
        requests[i].resume_offset = RESUMED_BYTES - SMALL_BYTES;
        pointers[i] = &requests[i];
    }
    frame.requests = pointers;
    frame.n_requests = RESUMED;
    ck_assert(fake_stream_give(0, pack_frame(&frame)));
}

/* The checks of the file show what is hashed. However many transfers hash again what the peer has, little is hashed
 * before others have their turn; and all transfers are completed. */
START_TEST(resumed_transfers_share_what_is_hashed_for_a_frame)
{
    offer_file(RESUMED_BYTES, 0);
    shake_hands(0);
    request_the_last_bytes();
    for (unsigned round = 0; control->stats.bytes_sent < RESUMED * SMALL_BYTES; round++) {
        ck_assert_uint_lt(round, 100);
        uint64_t checked_before = file.checked_bytes;
        step();
        /* The bytes of a frame are checked before they are hashed, and after. */
        ck_assert_uint_le(file.checked_bytes - checked_before, CATCH_UP_BYTES + 2 * CHUNK_BYTES);
    }
    ck_assert_uint_gt(file.checked_bytes, RESUMED * (RESUMED_BYTES - SMALL_BYTES));
    while (carried[0] != NULL)
        grpc_byte_buffer_destroy(take(0));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("link_congestion");
    TCase *both = tcase_create("both");
    tcase_set_timeout(both, 100);
    tcase_add_checked_fixture(both, setup, teardown);
    tcase_add_loop_test(both, two_links_that_ask_much_of_each_other_go_on, 0, 2);
    tcase_add_test(both, accepted_link_is_not_read_while_too_much_waits);
    suite_add_tcase(suite, both);
    TCase *inflight = tcase_create("inflight");
    tcase_set_timeout(inflight, 100);
    tcase_add_checked_fixture(inflight, setup, teardown);
    tcase_add_test(inflight, peer_that_does_not_read_has_one_frame_outstanding);
    tcase_add_test(inflight, no_more_is_begun_than_may_be_in_flight);
    tcase_add_test(inflight, answers_that_wait_do_not_pin_versions_that_were_replaced);
    suite_add_tcase(suite, inflight);
    TCase *window = tcase_create("window");
    tcase_set_timeout(window, 100);
    tcase_add_checked_fixture(window, setup, teardown);
    tcase_add_test(window, no_more_is_sent_than_the_peer_takes);
    tcase_add_test(window, taken_bytes_are_reported);
    tcase_add_test(window, full_window_does_not_stop_a_side_that_does_not_read);
    tcase_add_test(window, only_a_link_over_loopback_has_a_window);
    suite_add_tcase(suite, window);
    TCase *many = tcase_create("many");
    tcase_set_timeout(many, 100);
    tcase_add_checked_fixture(many, setup, teardown);
    tcase_add_test(many, links_share_what_may_wait);
    tcase_add_test(many, links_share_what_they_may_pin);
    tcase_add_test(many, values_that_were_let_go_come_back_in_rounds);
    tcase_add_test(many, frame_with_too_many_requests_ends_the_link);
    tcase_add_test(many, equal_failures_are_kept_once);
    suite_add_tcase(suite, many);
    TCase *files = tcase_create("files");
    tcase_set_timeout(files, 100);
    tcase_add_checked_fixture(files, setup, teardown);
    tcase_add_loop_test(files, file_arrives, 0, TL_ARRAY_COUNT(file_sizes));
    tcase_add_loop_test(files, file_cut_after_its_last_check_is_no_success, 0, TL_ARRAY_COUNT(file_sizes));
    tcase_add_test(files, file_cut_before_its_bytes_left_is_no_success);
    suite_add_tcase(suite, files);
    add_own_case(suite, "resumed_transfers_share_what_is_hashed", setup, teardown,
                 resumed_transfers_share_what_is_hashed_for_a_frame);
    TCase *stalled = tcase_create("stalled");
    tcase_set_timeout(stalled, 100);
    tcase_add_checked_fixture(stalled, setup, teardown);
    tcase_add_test(stalled, link_that_takes_nothing_ends);
    tcase_add_test(stalled, link_that_takes_nothing_and_half_closes_ends);
    tcase_add_test(stalled, half_closed_link_that_is_left_open_ends);
    tcase_add_test(stalled, link_whose_window_stays_shut_ends);
    tcase_add_test(stalled, link_that_takes_a_frame_now_and_then_stays);
    suite_add_tcase(suite, stalled);
    add_own_case(suite, "acknowledgement_that_crosses_the_end", setup, teardown, acknowledgement_that_crosses_the_end);
    return run_suite(suite);
}
