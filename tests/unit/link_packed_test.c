// SPDX-License-Identifier: Apache-2.0
/*
 * Packed requests and chunks on links. The links are on streams that are driven by hand (fuzz/fake_stream.h): two links
 * of one control are each other's peer, or the test is the peer and says what it wants.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "control/link_internal.h"
#include "control/packed.h"
#include "fakes/run_suite.h"
#include "fuzz/fake_stream.h"

#define SELF "/job:node/task:0"
#define EXCHANGE "/tensorlane.v1.Transfer/Exchange"
#define OPENED 0 /* The slots of the streams. */
#define ACCEPTED 1
#define VALUE_BYTES 100
#define MAX_FETCHES 4096
#define MAX_SERVES 4096
#define PART "tensorlane.part/" /* The beginning of the keys whose answers use up the quota. */
#define MANY 1100               /* More than two rounds end. */

typedef Tensorlane__V1__Frame Frame;

static struct tl_loop *loop;
static struct tl_control *control;
static struct tl_link *links[FAKE_STREAMS]; /* By slot; NULL: closed. */
static struct tl_error error;
static struct tl_error end_reason;
static struct tl_tensor *value;
static struct tl_tensor *large_value;       /* Of keys with "large"; NULL: none. */
static uint8_t priority;                    /* Of fetches that are started. */
static struct tl_serve *serves[MAX_SERVES]; /* In the order of the requests, also when they are over. */
static char keys[MAX_SERVES][16];           /* The first bytes of the keys that came. */
static char prefetched[MAX_SERVES][16];     /* Those of the keys that were prefetched, where they shall come. */
static size_t prefetched_count;
static size_t serve_count, closed_count;
static bool is_waiting; /* Requests get no answer. */
static struct tl_fetch fetches[MAX_FETCHES];
static char names[MAX_FETCHES][32];
static size_t done_count, broken_count;
static grpc_byte_buffer *carried[FAKE_STREAMS]; /* A copy of the message in flight. */
static size_t slice_counts[FAKE_STREAMS];       /* Of the latest frame that was sent. */
static Frame *sent[FAKE_STREAMS];               /* The latest frame that was sent, without its data. */

/* -------------------------------------------------------------------------------------------------- the worker -- */

static void on_prefetch(void *context, const struct tl_key_text *texts, size_t count)
{
    (void)context;
    ck_assert_uint_le(serve_count + count, MAX_SERVES);
    for (size_t i = 0; i < count; i++)
        snprintf(prefetched[serve_count + i], sizeof(prefetched[0]), "%.*s", (int)texts[i].text_bytes, texts[i].text);
    prefetched_count += count;
}

static void on_request(void *context, struct tl_serve *serve)
{
    (void)context;
    const struct tl_error ok = {.code = TL_OK};
    ck_assert_uint_lt(serve_count, MAX_SERVES);
    snprintf(keys[serve_count], sizeof(keys[0]), "%s", serve->key);
    if (prefetched[serve_count][0] != '\0') ck_assert_str_eq(prefetched[serve_count], keys[serve_count]);
    serves[serve_count++] = serve;
    if (strncmp(serve->key, PART, sizeof(PART) - 1) == 0) { /* the source copies much */
        struct tl_quota *quota = tl_loop_quota(loop);
        tl_quota_use(quota, tl_quota_left(quota));
    }
    bool is_large = large_value != NULL && strncmp(serve->key, "large", 5) == 0;
    const struct tl_offer offer = {
        .tensor = tl_tensor_get(is_large ? large_value : value), .publication = 7, .step = 3};
    if (is_waiting) {
        tl_tensor_put(offer.tensor);
    } else {
        serve->ops->reply(serve, &ok, &offer);
    }
}

static void on_closed(void *context, struct tl_serve *serve, enum tl_serve_end end)
{
    (void)context;
    (void)serve;
    (void)end;
    closed_count++;
}

static void on_received(void *context, const struct tl_request_id *id)
{
    (void)context;
    (void)id;
}

static void on_link_closed(struct tl_link *link, const struct tl_error *reason)
{
    end_reason = *reason;
    for (unsigned slot = 0; slot < FAKE_STREAMS; slot++)
        if (links[slot] == link) links[slot] = NULL;
}

static const struct tl_link_events link_events = {.closed = on_link_closed};

static void on_link_up(void *context, struct tl_link *link)
{
    (void)context;
    for (unsigned slot = 0; slot < FAKE_STREAMS; slot++) {
        if (links[slot] != NULL || !fake_stream_is_open(slot) || fake_stream_is_client(slot)) continue;
        links[slot] = link;
        break;
    }
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
    if (result->code == TL_OK) {
        ck_assert_mem_eq(tl_tensor_data(fetch->destination), tl_tensor_data(value), VALUE_BYTES);
        ck_assert_uint_eq(fetch->publication, 7);
        ck_assert_uint_eq(fetch->offer_step, 3);
        done_count++;
    } else {
        broken_count++;
    }
    tl_fetch_fini(fetch);
}

static const struct tl_fetch_ops fetch_ops = {.place = on_place, .done = on_done};
static const struct tl_control_handlers handlers = {
    .source = {.request = on_request, .prefetch = on_prefetch, .closed = on_closed, .received = on_received},
    .link_up = on_link_up,
};

/* ---------------------------------------------------------------------------------------------------- carrying -- */

static void on_send(unsigned slot, grpc_byte_buffer *message)
{
    ck_assert_ptr_null(carried[slot]);
    carried[slot] = grpc_byte_buffer_copy(message);
    slice_counts[slot] = message->data.raw.slice_buffer.count;
    grpc_byte_buffer_reader reader;
    ck_assert(grpc_byte_buffer_reader_init(&reader, message));
    grpc_slice all = grpc_byte_buffer_reader_readall(&reader);
    if (sent[slot] != NULL) tensorlane__v1__frame__free_unpacked(sent[slot], NULL);
    sent[slot] = tensorlane__v1__frame__unpack(NULL, GRPC_SLICE_LENGTH(all), GRPC_SLICE_START_PTR(all));
    ck_assert_ptr_nonnull(sent[slot]);
    grpc_slice_unref(all);
    grpc_byte_buffer_reader_destroy(&reader);
}

static void run_loop(void)
{
    while (tl_loop_run_once(loop, 0))
        continue;
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

static void carry_all(void)
{
    while (carry(OPENED) || carry(ACCEPTED))
        continue;
}

/* Takes what the worker has sent, as a peer that is the test. */
static void take(unsigned slot)
{
    grpc_byte_buffer_destroy(carried[slot]);
    carried[slot] = NULL;
    ck_assert(fake_stream_take(slot));
    run_loop();
}

static void say(unsigned slot, Frame *frame)
{
    grpc_byte_buffer *message = tl_wire_write(&frame->base);
    ck_assert(fake_stream_give(slot, message));
    run_loop();
}

static void setup(void)
{
    const struct tl_control_options options = {
        .self = {.source = TL_IDENTITY_CLAIMED, .name = SELF, .incarnation = 42},
        .chunk_bytes = 4096,
        .inflight_bytes = 1 << 20,
        .max_calls = FAKE_STREAMS,
        .max_unsent = 65536,
        .connect_timeout_ns = 3600 * TL_NS_PER_SEC,
        .request_timeout_ns = 3600 * TL_NS_PER_SEC,
        .stalled_timeout_ns = 3600 * TL_NS_PER_SEC,
        .handlers = &handlers,
    };
    const uint64_t dims[] = {VALUE_BYTES};
    uint16_t port;
    tl_log_configure(TL_LOG_ERROR, TL_LOG_KEY_VALUE);
    fake_stream_on_send = on_send;
    ck_assert(tl_tensor_create(TL_U8, 1, dims, &value, &error) == TL_OK);
    for (unsigned i = 0; i < VALUE_BYTES; i++)
        ((unsigned char *)tl_tensor_data(value))[i] = (unsigned char)(i * 7);
    ck_assert(tl_loop_create(&loop, &error) == TL_OK);
    ck_assert(tl_control_create(loop, &options, &control, &error) == TL_OK);
    ck_assert(tl_control_start(control, "127.0.0.1:0", &port, &error) == TL_OK);
}

static void break_all(void)
{
    const struct tl_error gone = {.code = TL_UNAVAILABLE, .message = "gone"};
    for (unsigned slot = 0; slot < FAKE_STREAMS; slot++) {
        (void)fake_stream_break(slot, &gone);
        grpc_byte_buffer_destroy(carried[slot]);
        carried[slot] = NULL;
    }
    run_loop();
}

static void teardown(void)
{
    break_all();
    for (unsigned slot = 0; slot < FAKE_STREAMS; slot++)
        if (sent[slot] != NULL) tensorlane__v1__frame__free_unpacked(sent[slot], NULL);
    ck_assert_uint_eq(closed_count, serve_count);
    ck_assert_uint_eq(tl_shares_used(control->client_keys), 0);
    ck_assert(!tl_tensor_is_shared(value));
    tl_tensor_put(value);
    tl_tensor_put(large_value);
    tl_control_destroy(control);
    tl_loop_destroy(loop);
}

static void connect_with(bool is_one_way)
{
    const struct tl_link_address address = {.address = "127.0.0.1:1", .expected_name = SELF, .is_one_way = is_one_way};
    ck_assert(tl_link_open(control, &address, NULL, 0, &link_events, NULL, &links[OPENED], &error) == TL_OK);
    ck_assert_int_eq(fake_stream_accept(fake_stream_method(EXCHANGE)), ACCEPTED);
    carry_all();
    ck_assert(links[ACCEPTED] != NULL && tl_link_is_up(links[OPENED]) && tl_link_is_up(links[ACCEPTED]));
}

static void connect_to_itself(void)
{
    connect_with(false);
}

/* The test is a client that opens a link in the next slot; the worker's answer is in sent[slot]. */
static unsigned connect_as(const char *name, bool reads_packed, uint32_t kept_keys)
{
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    Tensorlane__V1__Hello hello = TENSORLANE__V1__HELLO__INIT;
    hello.protocol_version = 1;
    hello.name = (char *)name;
    hello.incarnation = 77;
    hello.reads_packed = reads_packed;
    hello.kept_keys = kept_keys;
    frame.hello = &hello;
    int slot = fake_stream_accept(fake_stream_method(EXCHANGE));
    ck_assert_int_ge(slot, 0);
    say((unsigned)slot, &frame);
    ck_assert_ptr_nonnull(sent[slot]->hello);
    take((unsigned)slot);
    return (unsigned)slot;
}

static unsigned connect_client(bool reads_packed, uint32_t kept_keys)
{
    return connect_as("", reads_packed, kept_keys);
}

/* Fetches with numbers from 1 + first on, of keys that begin with 0; the request of each key is its number. */
static void ask(unsigned slot, size_t first, size_t count, size_t key_count)
{
    for (size_t i = first; i < first + count; i++) {
        tl_fetch_init(&fetches[i], &fetch_ops);
        snprintf(names[i], sizeof(names[i]), "key/%05zu", i % key_count);
        fetches[i].number = 1 + i;
        fetches[i].key = names[i];
        fetches[i].priority = priority;
        tl_link_fetch(links[slot], &fetches[i]);
    }
    run_loop();
}

/* What a frame's packed requests say. */
struct seen {
    size_t count;
    size_t text_count;
    size_t kept_count;
    uint32_t last_number;
};

static struct seen look_at(const Frame *frame)
{
    struct seen seen = {.count = 0};
    struct tl_unpacker unpacker = {.at = frame->packed_requests.data,
                                   .end = frame->packed_requests.data + frame->packed_requests.len};
    while (!tl_unpacker_is_at_end(&unpacker)) {
        Tensorlane__V1__Request request;
        struct tl_packed_key key;
        ck_assert(tl_unpack_request(&unpacker, &request, &key, &error) == TL_OK);
        seen.count++;
        seen.text_count += key.text != NULL;
        seen.kept_count += key.is_kept;
        seen.last_number = key.number;
    }
    return seen;
}

/* -------------------------------------------------------------------------------------------------- both packed -- */

START_TEST(text_of_a_key_travels_once)
{
    connect_to_itself();
    ask(OPENED, 0, 200, 100);
    struct seen seen = look_at(sent[OPENED]);
    ck_assert_uint_eq(sent[OPENED]->n_requests, 0);
    ck_assert_uint_eq(seen.count, 200);
    ck_assert_uint_eq(seen.text_count, 100);
    ck_assert_uint_eq(seen.kept_count, 100);
    carry(OPENED);
    ck_assert_uint_eq(sent[ACCEPTED]->n_chunks, 0);
    ck_assert_uint_gt(sent[ACCEPTED]->packed_chunks.len, 0);
    carry_all();
    ask(OPENED, 200, 100, 100);
    seen = look_at(sent[OPENED]);
    ck_assert_uint_eq(seen.count, 100);
    ck_assert_uint_eq(seen.text_count, 0);
    ck_assert_uint_le(sent[OPENED]->packed_requests.len, 16 * 100);
    carry_all();
    ck_assert_uint_eq(done_count, 300);
    for (size_t i = 0; i < 300; i++)
        ck_assert_str_eq(keys[i], names[i]);
}
END_TEST

/* All keys of a frame are prefetched before they are asked for, whether they travel as text or as numbers. */
START_TEST(keys_of_a_frame_are_prefetched)
{
    connect_to_itself();
    ask(OPENED, 0, 100, 50);
    carry_all();
    ck_assert_uint_eq(prefetched_count, 100);
    ask(OPENED, 100, 1, 50);
    carry_all();
    ck_assert_uint_eq(done_count, 101);
    ck_assert_uint_eq(prefetched_count, 100); /* one alone need not */
}
END_TEST

/* While many small answers wait that leave soon, nothing more is read, so that they leave while they are in the caches;
 * all come in the end. */
START_TEST(small_answers_leave_before_more_is_read)
{
    connect_to_itself();
    unsigned frame_count = 0;
    ask(OPENED, 0, 4000, 50);
    while (carry(OPENED))
        frame_count++;
    ck_assert(!fake_stream_is_reading(ACCEPTED));
    ck_assert_uint_ge(serve_count, 1024);
    ck_assert_uint_lt(serve_count, 1024 + 2 * TL_QUOTA);
    ck_assert_uint_eq(serve_count, frame_count * TL_QUOTA);
    carry_all();
    ck_assert_uint_eq(done_count, 4000);
}
END_TEST

/* The side that has opened the link reads at all times: if neither did, both would wait for each other. */
START_TEST(small_answers_do_not_hold_up_the_opening_side)
{
    connect_to_itself();
    ask(ACCEPTED, 0, 4000, 50);
    while (carry(ACCEPTED))
        continue;
    ck_assert(fake_stream_is_reading(OPENED));
    ck_assert_uint_eq(serve_count, 4000);
    carry_all();
    ck_assert_uint_eq(done_count, 4000);
}
END_TEST

START_TEST(both_sides_number_keys_of_their_own)
{
    connect_to_itself();
    ask(OPENED, 0, 3, 100);
    carry_all();
    ask(ACCEPTED, 50, 2, 100);
    struct seen seen = look_at(sent[ACCEPTED]);
    ck_assert_uint_eq(seen.text_count, 2);
    carry_all();
    ask(ACCEPTED, 151, 1, 100);
    seen = look_at(sent[ACCEPTED]);
    ck_assert_uint_eq(seen.text_count, 0);
    ck_assert_uint_eq(seen.last_number, 1);
    carry_all();
    ck_assert_uint_eq(done_count, 6);
}
END_TEST

START_TEST(one_way_link_carries_requests_of_one_side)
{
    connect_with(true);
    ck_assert(tl_link_peer(links[ACCEPTED])->is_one_way);
    ask(OPENED, 0, 3, 100);
    carry_all();
    ck_assert_uint_eq(done_count, 3);
    ask(ACCEPTED, 50, 1, 100);
    carry_all();
    (void)fake_stream_break(OPENED, &(struct tl_error){.code = TL_CANCELLED});
    run_loop();
    ck_assert_ptr_null(links[OPENED]);
    ck_assert_int_eq(end_reason.code, TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(end_reason.message, "requests to it alone"));
    ck_assert_uint_eq(serve_count, 3);
}
END_TEST

START_TEST(more_keys_than_are_kept_travel_as_text)
{
    unsigned slot = connect_client(true, 2);
    ask(slot, 0, 5, 5);
    struct seen seen = look_at(sent[slot]);
    ck_assert_uint_eq(seen.text_count, 5);
    ck_assert_uint_eq(seen.kept_count, 2);
    take(slot);
    ask(slot, 5, 5, 5);
    seen = look_at(sent[slot]);
    ck_assert_uint_eq(seen.count, 5);
    ck_assert_uint_eq(seen.text_count, 3);
    ck_assert_uint_eq(seen.kept_count, 0);
}
END_TEST

START_TEST(peer_that_keeps_no_keys_gets_texts)
{
    unsigned slot = connect_client(true, 0);
    ask(slot, 0, 2, 1);
    struct seen seen = look_at(sent[slot]);
    ck_assert_uint_eq(seen.text_count, 2);
    ck_assert_uint_eq(seen.kept_count, 0);
}
END_TEST

/* The numbers belong to the link: the next one begins anew, on both sides, and what was open is asked again. */
START_TEST(numbers_end_with_the_link)
{
    is_waiting = true;
    connect_to_itself();
    ask(OPENED, 0, 3, 3);
    carry_all();
    ask(OPENED, 3, 3, 3);
    ck_assert_uint_eq(look_at(sent[OPENED]).text_count, 0);
    carry_all();
    break_all();
    ck_assert_uint_eq(broken_count, 6);
    is_waiting = false;
    connect_to_itself();
    ask(OPENED, 0, 6, 3);
    ck_assert_uint_eq(look_at(sent[OPENED]).text_count, 3);
    carry_all();
    ck_assert_uint_eq(done_count, 6);
    ck_assert_str_eq(keys[11], names[5]);
}
END_TEST

/* The head of the frame and the values, which were copied one behind the other. */
START_TEST(small_values_share_a_slice)
{
    connect_to_itself();
    ask(OPENED, 0, 40, 40);
    carry(OPENED);
    ck_assert_uint_eq(sent[ACCEPTED]->data.len, 40 * VALUE_BYTES);
    ck_assert_uint_eq(slice_counts[ACCEPTED], 2);
    ck_assert_uint_eq(control->stats.bytes_copied_send, 40 * VALUE_BYTES);
    carry_all();
    ck_assert_uint_eq(done_count, 40);
}
END_TEST

/* Packs `count` requests, each with a text, which is to be kept or not. */
static size_t pack_kept(unsigned char *bytes, size_t count, bool is_kept)
{
    struct tl_packer packer = {.bytes = bytes};
    for (size_t i = 0; i < count; i++) {
        Tensorlane__V1__Request request = TENSORLANE__V1__REQUEST__INIT;
        const struct tl_packed_key key = {.text = "k", .text_bytes = 1, .is_kept = is_kept};
        request.number = serve_count + 1 + i;
        tl_pack_request(&packer, &request, &key);
    }
    return packer.used;
}

static unsigned char many[65536];

/* ------------------------------------------------------------------------------------------- order and fairness -- */

/* The numbers of the requests that a frame answers, in their order. */
static size_t numbers_in(const Frame *frame, uint64_t *ret_numbers, size_t capacity)
{
    struct tl_unpacker unpacker = {.at = frame->packed_chunks.data,
                                   .end = frame->packed_chunks.data + frame->packed_chunks.len};
    size_t count = 0;
    while (!tl_unpacker_is_at_end(&unpacker)) {
        struct tl_unpacked_chunk chunk;
        ck_assert(tl_unpack_chunk(&unpacker, &chunk, &error) == TL_OK);
        ck_assert_uint_lt(count, capacity);
        ret_numbers[count++] = chunk.chunk.number;
    }
    return count;
}

START_TEST(greater_priority_is_sent_first)
{
    static const uint8_t priorities[] = {0, 3, 1, 3, 2};
    static const uint64_t expected[] = {2, 4, 5, 3, 1};
    const struct tl_error ok = {.code = TL_OK};
    uint64_t numbers[5];
    is_waiting = true;
    connect_to_itself();
    for (size_t i = 0; i < 5; i++) {
        priority = priorities[i];
        ask(OPENED, i, 1, 5);
        carry_all();
    }
    for (size_t i = 0; i < 5; i++) {
        const struct tl_offer offer = {.tensor = tl_tensor_get(value), .publication = 7, .step = 3};
        serves[i]->ops->reply(serves[i], &ok, &offer);
    }
    run_loop();
    ck_assert_uint_eq(numbers_in(sent[ACCEPTED], numbers, 5), 5);
    ck_assert_mem_eq(numbers, expected, sizeof(numbers));
    carry_all();
    ck_assert_uint_eq(done_count, 5);
}
END_TEST

START_TEST(priority_travels_in_both_forms)
{
    unsigned slot = connect_client(false, 0);
    priority = 2;
    ask(slot, 0, 1, 1);
    ck_assert_uint_eq(sent[slot]->requests[0]->priority, 2);
    slot = connect_client(true, 0);
    ask(slot, 1, 1, 1);
    Tensorlane__V1__Request request;
    struct tl_packed_key key;
    struct tl_unpacker unpacker = {.at = sent[slot]->packed_requests.data,
                                   .end = sent[slot]->packed_requests.data + sent[slot]->packed_requests.len};
    ck_assert(tl_unpack_request(&unpacker, &request, &key, &error) == TL_OK);
    ck_assert_uint_eq(request.priority, 2);
}
END_TEST

static void make_large(uint64_t size_bytes)
{
    ck_assert(tl_tensor_create(TL_U8, 1, &size_bytes, &large_value, &error) == TL_OK);
    memset(tl_tensor_data(large_value), 1, size_bytes);
}

/* The client asks for `count` times "large", and then for "k" with a priority; numbers begin with `first`. */
static void ask_for_large(unsigned slot, uint64_t first, size_t count, bool with_small)
{
    unsigned char bytes[1024];
    struct tl_packer packer = {.bytes = bytes};
    for (size_t i = 0; i < count + with_small; i++) {
        Tensorlane__V1__Request request = TENSORLANE__V1__REQUEST__INIT;
        const struct tl_packed_key key = {.text = i < count ? "large" : "k", .text_bytes = i < count ? 5 : 1};
        request.number = first + i;
        request.priority = i < count ? 0 : 1;
        tl_pack_request(&packer, &request, &key);
    }
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    frame.packed_requests = (ProtobufCBinaryData){packer.used, bytes};
    say(slot, &frame);
}

/* What has been begun with a lesser priority holds up nothing, even if it uses up limits.inflight. */
START_TEST(greater_priority_overtakes_what_was_begun)
{
    uint64_t numbers[8];
    make_large(4 << 20);
    unsigned slot = connect_client(true, 0);
    ask_for_large(slot, 1, 1, false);
    take(slot);
    ask_for_large(slot, 2, 0, true);
    take(slot);
    ck_assert_uint_ge(numbers_in(sent[slot], numbers, 8), 1);
    ck_assert_uint_eq(numbers[0], 2);
}
END_TEST

/* A frame has one piece of limits.chunk, or pieces of several tensors up to 2 MiB. */
START_TEST(frame_of_several_tensors_is_bounded)
{
    control->options.chunk_bytes = 16 << 20;
    control->options.inflight_bytes = 64 << 20;
    make_large(1536 << 10);
    unsigned slot = connect_client(true, 0);
    ask_for_large(slot, 1, 4, false);
    unsigned frames = 0;
    for (size_t left = 4 * (1536 << 10); left > 0; frames++) {
        ck_assert_uint_le(sent[slot]->data.len, 2 << 20);
        left -= sent[slot]->data.len;
        take(slot);
    }
    ck_assert_uint_eq(frames, 3);
}
END_TEST

/* After 512 requests of a frame another link has its turn, and then this one goes on; in both forms. */
START_TEST(other_links_come_between)
{
    is_waiting = true;
    unsigned slot = connect_client(true, 0);
    unsigned other = connect_client(true, 0);
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    Tensorlane__V1__Request requests[700];
    Tensorlane__V1__Request *pointers[700];
    for (size_t i = 0; i < 700; i++) {
        tensorlane__v1__request__init(&requests[i]);
        requests[i].number = 10000 + i;
        requests[i].key = "plain";
        pointers[i] = &requests[i];
    }
    frame.requests = pointers;
    frame.n_requests = _i == 0 ? 0 : 700;
    frame.packed_requests = (ProtobufCBinaryData){pack_kept(many, _i == 0 ? 1024 : 324, _i == 0), many};
    ck_assert(fake_stream_give(slot, tl_wire_write(&frame.base)));
    ck_assert_uint_eq(serve_count, 512);
    ck_assert(!fake_stream_is_reading(slot));
    uint64_t received = control->stats.frames_received;
    Frame small = TENSORLANE__V1__FRAME__INIT;
    small.packed_requests = (ProtobufCBinaryData){4, (uint8_t *)"\x01\x02\x01o"};
    ck_assert(fake_stream_give(other, tl_wire_write(&small.base)));
    ck_assert_uint_eq(serve_count, 513);
    ck_assert_str_eq(keys[512], "o");
    run_loop();
    ck_assert_uint_eq(serve_count, 1025);
    ck_assert_uint_eq(control->stats.frames_received, received + 2);
    ck_assert(fake_stream_is_reading(slot));
    ck_assert_uint_eq(links[slot]->keys.kept.count, _i == 0 ? 1024 : 0);
}
END_TEST

#define BETWEEN 10 /* Each request of so many is for a part, as is the last one. */

/* The requests of a frame, in either form, with keys that are kept or not. */
static void give_requests_of_parts(unsigned slot, size_t count, bool is_packed, bool is_kept)
{
    static Tensorlane__V1__Request requests[LINK_MAX_REQUESTS];
    static Tensorlane__V1__Request *pointers[LINK_MAX_REQUESTS];
    struct tl_packer packer = {.bytes = many};
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    for (size_t i = 0; i < count; i++) {
        const char *text = (i + 1) % BETWEEN == 0 ? PART "r0+1,2+1/k" : "k";
        const struct tl_packed_key key = {.text = text, .text_bytes = strlen(text), .is_kept = is_kept};
        tensorlane__v1__request__init(&requests[i]);
        requests[i].number = 1 + i;
        requests[i].key = (char *)text;
        pointers[i] = &requests[i];
        if (is_packed) tl_pack_request(&packer, &requests[i], &key);
    }
    frame.requests = pointers;
    frame.n_requests = is_packed ? 0 : count;
    frame.packed_requests = (ProtobufCBinaryData){packer.used, many};
    ck_assert(fake_stream_give(slot, tl_wire_write(&frame.base)));
}

/* A request whose answer uses up what is left of the quota is the last one before another link has its turn: in
 * messages, packed, and with keys that are kept. */
START_TEST(copies_use_up_the_quota)
{
    const size_t count = 10 * BETWEEN;
    is_waiting = true;
    unsigned slot = connect_client(true, 0);
    unsigned other = connect_client(true, 0);
    Frame small = TENSORLANE__V1__FRAME__INIT;
    small.packed_requests = (ProtobufCBinaryData){4, (uint8_t *)"\x01\x02\x01o"};
    give_requests_of_parts(slot, count, _i > 0, _i > 1);
    ck_assert_uint_eq(serve_count, BETWEEN);
    ck_assert(fake_stream_give(other, tl_wire_write(&small.base)));
    for (size_t rounds = 2; rounds <= 10; rounds++) {
        (void)tl_loop_run_closures(loop);
        ck_assert_uint_eq(serve_count, rounds * BETWEEN + 1);
    }
    ck_assert(fake_stream_is_reading(slot));
    ck_assert_uint_eq(links[slot]->keys.kept.count, _i > 1 ? count : 0);
    ck_assert_uint_le(tl_quota_most(tl_loop_quota(loop)), TL_QUOTA);
}
END_TEST

/* Of the many that are open on a link some end in each round, at either side: _i. */
START_TEST(link_ends_in_rounds)
{
    const struct tl_error gone = {.code = TL_UNAVAILABLE, .message = "gone"};
    is_waiting = true;
    connect_to_itself();
    ask(OPENED, 0, MANY, MANY);
    carry_all();
    ck_assert_uint_eq(serve_count, MANY);
    unsigned slot = _i == 0 ? OPENED : ACCEPTED;
    const size_t *count = _i == 0 ? &broken_count : &closed_count;
    ck_assert(fake_stream_break(slot, &gone));
    const size_t ended[] = {512, 1024, MANY};
    for (size_t i = 0; i < TL_ARRAY_COUNT(ended); i++) {
        ck_assert_uint_eq(*count, ended[i]);
        ck_assert_int_eq(links[slot] == NULL, ended[i] == MANY);
        if (ended[i] == MANY) break;
        const struct tl_error reason = {.code = TL_UNAVAILABLE, .message = "closed"};
        tl_link_close(links[slot], &reason); /* does nothing any more */
        (void)tl_loop_run_closures(loop);
    }
    ck_assert_uint_le(tl_quota_most(tl_loop_quota(loop)), TL_QUOTA);
}
END_TEST

START_TEST(link_may_end_amid_a_frame)
{
    is_waiting = true;
    unsigned slot = connect_client(true, 0);
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    frame.packed_requests = (ProtobufCBinaryData){pack_kept(many, 1024, false), many};
    ck_assert(fake_stream_give(slot, tl_wire_write(&frame.base)));
    const struct tl_error reason = {.code = TL_UNAVAILABLE, .message = "closed"};
    tl_link_close(links[slot], &reason);
    if (_i == 0) (void)fake_stream_break(slot, &reason);
    run_loop();
    ck_assert_uint_eq(serve_count, 512);
    if (_i == 1) ck_assert(fake_stream_is_reading(slot));
}
END_TEST

/* ------------------------------------------------------------------------------------------ peers of older kinds -- */

START_TEST(peer_that_reads_no_packed_records_gets_messages)
{
    unsigned slot = connect_client(false, 1000);
    ck_assert(sent[slot]->hello->reads_packed);
    ask(slot, 0, 2, 2);
    ck_assert_uint_eq(sent[slot]->packed_requests.len, 0);
    ck_assert_uint_eq(sent[slot]->n_requests, 2);
    ck_assert_str_eq(sent[slot]->requests[1]->key, "key/00001");
    take(slot);
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    Tensorlane__V1__Request request = TENSORLANE__V1__REQUEST__INIT;
    Tensorlane__V1__Request *pointers[] = {&request};
    request.number = 5;
    request.key = "k";
    frame.requests = pointers;
    frame.n_requests = 1;
    say(slot, &frame);
    ck_assert_uint_eq(sent[slot]->packed_chunks.len, 0);
    ck_assert_uint_eq(sent[slot]->n_chunks, 1);
    ck_assert_uint_eq(sent[slot]->chunks[0]->number, 5);
}
END_TEST

START_TEST(messages_are_understood_from_every_peer)
{
    unsigned slot = connect_client(true, 1000);
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    Tensorlane__V1__Request request = TENSORLANE__V1__REQUEST__INIT;
    Tensorlane__V1__Request *pointers[] = {&request};
    request.number = 5;
    request.key = "k";
    frame.requests = pointers;
    frame.n_requests = 1;
    say(slot, &frame);
    ck_assert_str_eq(keys[0], "k");
    ck_assert_uint_gt(sent[slot]->packed_chunks.len, 0);
    take(slot);
    ask(slot, 0, 1, 1);
    take(slot);
    Frame answer = TENSORLANE__V1__FRAME__INIT;
    Tensorlane__V1__Chunk chunk = TENSORLANE__V1__CHUNK__INIT;
    Tensorlane__V1__Chunk *chunks[] = {&chunk};
    Tensorlane__V1__MetaData meta_data = TENSORLANE__V1__META_DATA__INIT;
    uint64_t dims[] = {VALUE_BYTES};
    meta_data.dtype = TENSORLANE__V1__DTYPE__U8;
    meta_data.dims = dims;
    meta_data.n_dims = 1;
    meta_data.size_bytes = chunk.len_bytes = VALUE_BYTES;
    chunk.number = 1;
    chunk.meta_data = &meta_data;
    chunk.publication = 7;
    chunk.step = 3;
    answer.chunks = chunks;
    answer.n_chunks = 1;
    answer.data = (ProtobufCBinaryData){VALUE_BYTES, tl_tensor_data(value)};
    say(slot, &answer);
    ck_assert_uint_eq(done_count, 1);
}
END_TEST

/* ------------------------------------------------------------------------------------------------- hostile peers -- */

static void say_requests(unsigned slot, const void *bytes, size_t len_bytes)
{
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    frame.packed_requests = (ProtobufCBinaryData){len_bytes, (uint8_t *)bytes};
    say(slot, &frame);
}

static void expect_protocol_error(unsigned slot, const char *part)
{
    ck_assert_uint_eq(control->stats.protocol_errors, 1);
    control->stats.protocol_errors = 0;
    (void)fake_stream_take(slot);
    (void)fake_stream_end(slot);
    (void)fake_stream_break(slot, &(struct tl_error){.code = TL_UNAVAILABLE, .message = "gone"});
    grpc_byte_buffer_destroy(carried[slot]);
    carried[slot] = NULL;
    run_loop();
    ck_assert_ptr_null(links[slot]);
    ck_assert_int_eq(end_reason.code, TL_INVALID_ARGUMENT);
    ck_assert_msg(strstr(end_reason.message, part) != NULL, "%s", end_reason.message);
}

static const struct {
    const char *bytes;
    size_t len_bytes;
    const char *reason;
} hostile_requests[] = {
    {"\x00\x02\x00", 3, "the key number 0 was not sent"},
    {"\x03\x02\x01k\x00\x02\x02", 7, "the key number 1 was not sent"},
    {"\x01\x02\x01k\x00\x02\x00", 7, "the key number 0 was not sent"}, /* it was not to be kept */
    {"\x00\x02\xfe\xff\xff\xff\x1f", 7, "the key number 4294967295 was not sent"},
    {"\x01\x02\x00", 3, "a key of 0 bytes"},
    {"\x01\x02\x01\xff", 4, "a key of 1 bytes"},
    {"\x01\x02\x02k\x00", 5, "a key of 2 bytes"},
    {"\x01\x00\x01k", 4, "request number 0"},
    {"\x01\x02\x01k\x01\x00\x01k", 8, "request number 1 is 0 or already in use"},
    {"\x80", 1, "no such records"},
};

START_TEST(request_that_cannot_be_ends_the_link)
{
    unsigned slot = connect_client(true, 0);
    say_requests(slot, hostile_requests[_i].bytes, hostile_requests[_i].len_bytes);
    expect_protocol_error(slot, hostile_requests[_i].reason);
}
END_TEST

START_TEST(key_that_is_too_long_ends_the_link)
{
    unsigned char bytes[600] = {1, 2, 0x81, 4};
    unsigned slot = connect_client(true, 0);
    memset(bytes + 4, 'k', 513);
    say_requests(slot, bytes, 4 + 513);
    expect_protocol_error(slot, "a key of 513 bytes");
}
END_TEST

/* The answers are taken, so that only the number of keys ends the link. */
START_TEST(more_keys_than_were_offered_end_the_link)
{
    unsigned slot = connect_client(true, 0);
    uint32_t offered = links[slot]->keys.kept.limit;
    links[slot]->keys.kept.limit = 100;
    ck_assert_uint_eq(offered, sent[slot]->hello == NULL ? 0 : sent[slot]->hello->kept_keys);
    say_requests(slot, many, pack_kept(many, 100, true));
    ck_assert_uint_eq(control->stats.protocol_errors, 0);
    take(slot);
    say_requests(slot, many, pack_kept(many, 1, true));
    expect_protocol_error(slot, "more than 100 keys");
}
END_TEST

START_TEST(too_many_requests_in_a_frame_end_the_link)
{
    is_waiting = true;
    unsigned slot = connect_client(true, 0);
    say_requests(slot, many, pack_kept(many, 1024, false));
    ck_assert_uint_eq(serve_count, 1024);
    ck_assert_uint_eq(control->stats.protocol_errors, 0);
    say_requests(slot, many, pack_kept(many, 1025, false));
    expect_protocol_error(slot, "1025 requests in a frame");
}
END_TEST

static void say_chunks(unsigned slot, const void *bytes, size_t len_bytes, size_t data_bytes)
{
    Frame frame = TENSORLANE__V1__FRAME__INIT;
    frame.packed_chunks = (ProtobufCBinaryData){len_bytes, (uint8_t *)bytes};
    frame.data = (ProtobufCBinaryData){data_bytes, tl_tensor_data(value)};
    say(slot, &frame);
}

START_TEST(chunks_that_do_not_add_up_end_the_link)
{
    unsigned slot = connect_client(true, 0);
    say_chunks(slot, "\x00\x02\x09", 3, 8);
    expect_protocol_error(slot, "a chunk of 9 bytes in a frame that has 8 left");
    slot = connect_client(true, 0);
    say_chunks(slot, "\x00\x02\x07", 3, 8);
    expect_protocol_error(slot, "1 bytes that belong to no chunk");
    slot = connect_client(true, 0);
    say_chunks(slot, "\x00\x02\x04\x00", 4, 4);
    expect_protocol_error(slot, "no such records");
}
END_TEST

START_TEST(chunks_of_unknown_requests_are_skipped)
{
    unsigned slot = connect_client(true, 0);
    say_chunks(slot, "\x00\x02\x08\x00\x02\x08", 6, 16);
    ck_assert_uint_eq(control->stats.late_chunks, 2);
    ck_assert(fake_stream_is_reading(slot));
}
END_TEST

/* One that cannot be costs the request, as in the other form. */
START_TEST(meta_data_that_cannot_be_ends_one_request)
{
    unsigned slot = connect_client(true, 0);
    ask(slot, 0, 2, 2);
    take(slot);
    say_chunks(slot, "\x02\x02\x08\x0e\x06\x02\x01\x09\x08", 9, 8); /* 9 bytes are announced as 8 */
    ck_assert_uint_eq(broken_count, 1);
    ck_assert_ptr_nonnull(links[slot]);
    ck_assert_uint_eq(sent[slot]->n_cancels, 1);
}
END_TEST

/* Many clients share what is kept for clients, also where they call themselves what no task is called; each gets its
 * numbers back when its link ends. */
START_TEST(clients_share_the_numbers)
{
    uint64_t offered = 0;
    bool was_refused = false;
    for (unsigned i = 0; i < FAKE_STREAMS; i++) {
        unsigned slot = connect_as(i % 2 == 0 ? "" : "/job:unknown/task:0", true, 0);
        uint32_t limit = links[slot]->keys.kept.limit;
        ck_assert_uint_eq(sent[slot]->hello->kept_keys, limit);
        if (i == 0) ck_assert_uint_gt(limit, 1000);
        was_refused |= limit == 0;
        offered += limit;
    }
    ck_assert(was_refused);
    ck_assert_uint_le(offered, 2 * TL_MAX_KEY_NUMBERS);
    break_all();
    unsigned slot = connect_client(true, 0);
    ck_assert_uint_gt(sent[slot]->hello->kept_keys, 1000);
}
END_TEST

/* A case of its own for each test, so that tests/defects can run it alone. */
static void add(Suite *suite, const char *name, const TTest *test, int count)
{
    TCase *tcase = tcase_create(name);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_loop_test(tcase, test, 0, count);
    suite_add_tcase(suite, tcase);
}

int main(void)
{
    Suite *suite = suite_create("link_packed");
    add(suite, "text_of_a_key_travels_once", text_of_a_key_travels_once, 1);
    add(suite, "keys_of_a_frame_are_prefetched", keys_of_a_frame_are_prefetched, 1);
    add(suite, "small_answers_leave_before_more_is_read", small_answers_leave_before_more_is_read, 1);
    add(suite, "small_answers_do_not_hold_up_the_opening_side", small_answers_do_not_hold_up_the_opening_side, 1);
    add(suite, "both_sides_number_keys_of_their_own", both_sides_number_keys_of_their_own, 1);
    add(suite, "one_way_link_carries_requests_of_one_side", one_way_link_carries_requests_of_one_side, 1);
    add(suite, "more_keys_than_are_kept_travel_as_text", more_keys_than_are_kept_travel_as_text, 1);
    add(suite, "peer_that_keeps_no_keys_gets_texts", peer_that_keeps_no_keys_gets_texts, 1);
    add(suite, "numbers_end_with_the_link", numbers_end_with_the_link, 1);
    add(suite, "small_values_share_a_slice", small_values_share_a_slice, 1);
    add(suite, "greater_priority_is_sent_first", greater_priority_is_sent_first, 1);
    add(suite, "priority_travels_in_both_forms", priority_travels_in_both_forms, 1);
    add(suite, "greater_priority_overtakes", greater_priority_overtakes_what_was_begun, 1);
    add(suite, "frame_of_several_tensors_is_bounded", frame_of_several_tensors_is_bounded, 1);
    add(suite, "other_links_come_between", other_links_come_between, 2);
    add(suite, "copies_use_up_the_quota", copies_use_up_the_quota, 3);
    add(suite, "link_ends_in_rounds", link_ends_in_rounds, 2);
    add(suite, "link_may_end_amid_a_frame", link_may_end_amid_a_frame, 2);
    add(suite, "peer_that_reads_no_packed_records", peer_that_reads_no_packed_records_gets_messages, 1);
    add(suite, "messages_are_understood_from_every_peer", messages_are_understood_from_every_peer, 1);
    add(suite, "request_that_cannot_be", request_that_cannot_be_ends_the_link, TL_ARRAY_COUNT(hostile_requests));
    add(suite, "key_that_is_too_long", key_that_is_too_long_ends_the_link, 1);
    add(suite, "more_keys_than_were_offered", more_keys_than_were_offered_end_the_link, 1);
    add(suite, "too_many_requests_in_a_frame", too_many_requests_in_a_frame_end_the_link, 1);
    add(suite, "chunks_that_do_not_add_up", chunks_that_do_not_add_up_end_the_link, 1);
    add(suite, "chunks_of_unknown_requests", chunks_of_unknown_requests_are_skipped, 1);
    add(suite, "meta_data_that_cannot_be", meta_data_that_cannot_be_ends_one_request, 1);
    add(suite, "clients_share_the_numbers", clients_share_the_numbers, 1);
    return run_suite(suite);
}
