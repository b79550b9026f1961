// SPDX-License-Identifier: Apache-2.0
/*
 * A link with everything behind it: the real control plane on a stream that is driven by hand (fake_stream.h), with a
 * table of a few tensors as the source and a few fetches of its own.
 *
 * Input: one byte of options, then commands of one byte and what they need: frames as they come from the wire or nearly
 * right ones (link_frames.h), fetches, cancels, answers to requests that wait, the end of the link in all its ways, a
 * new link. After each command the state of the link must add up, and every frame that it sends must be right: the
 * pieces in order, of the right bytes, no more of them begun than options.inflight_bytes allow. At the end, when the
 * peer has taken all there is, nothing may be left to say; when the stream has broken, every fetch has ended once,
 * every serve was closed once, and no reference to a tensor is left.
 */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include <tensorlane/tensor.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "control/control.h"
#include "control/link_serves.h"
#include "control/packed.h"
#include "fuzz/fake_stream.h"
#include "fuzz/fixed_random.h"
#include "fuzz/link_frames.h"

#define CHUNK_BYTES 1024
#define INFLIGHT_BYTES 2048
#define MAX_SERVED 32
#define MAX_FETCHES 8
#define MAX_PLACED_BYTES 65536
#define OFFERS 5 /* The first keys of link_frames_keys; the next one is refused, the others wait. */
#define REPORTED 3
#define MAX_PATHS 64

/* A request of the peer that the source knows. */
struct served {
    struct tl_serve *serve; /* NULL: free. */
    bool is_answered;
    size_t offer; /* For OFFERS: a status. */
    bool is_begun;
    uint64_t next_bytes; /* The offset of the next piece. */
    bool wants_checksum;
};

enum asked_state {
    ASKED_FREE,
    ASKED_RUNNING, /* It is on the link. */
    ASKED_BROKEN,  /* It waits for the next link. */
};

struct asked {
    struct tl_fetch fetch;
    enum asked_state state;
};

static struct tl_loop *loop;
static struct tl_control *control;
static struct tl_wire_arena arena; /* Holds the frames that were sent. */
static struct tl_offer offers[OFFERS];

/* The state of one input. */
static struct served served[MAX_SERVED];
static struct asked asked[MAX_FETCHES];
static struct tl_link *link; /* NULL: none, or its opener has not sent the handshake. */
static uint64_t last_number;
static size_t framed_count;  /* Acknowledgements that links were given from outside, and fetches that could add one. */
static unsigned given_count; /* The frames on this stream. */
static bool has_half_closed;
static bool is_chaining; /* A fetch that has ended starts the next one at once. */

static void start_fetch(uint8_t byte);

/* ------------------------------------------------------------------------------------------------------ source -- */

static void reply(struct served *entry, size_t offer, const struct tl_error *status)
{
    entry->is_answered = true;
    entry->offer = status->code == TL_OK ? offer : OFFERS;
    if (status->code == TL_OK) tl_tensor_get(offers[offer].tensor);
    entry->serve->ops->reply(entry->serve, status, status->code == TL_OK ? &offers[offer] : NULL);
}

static void on_request(void *context, struct tl_serve *serve)
{
    (void)context;
    TL_CHECK(serve->key[0] != '\0' && serve->id.number != 0 && serve->id.incarnation != 0);
    struct tl_error status = {.code = TL_OK};
    serve->source_state = NULL;
    struct served *entry = NULL;
    for (size_t i = 0; i < MAX_SERVED && entry == NULL; i++) {
        if (served[i].serve == NULL) entry = &served[i];
    }
    if (entry == NULL) {
        tl_error_set(&status, TL_RESOURCE_EXHAUSTED, "too many requests wait");
        serve->ops->reply(serve, &status, NULL);
        return;
    }
    *entry = (struct served){.serve = serve};
    serve->source_state = entry;
    for (size_t key = 0; key <= OFFERS; key++) {
        if (strcmp(serve->key, link_frames_keys[key]) != 0) continue;
        if (key == OFFERS) tl_error_set(&status, TL_ABORTED, "refused");
        reply(entry, key, &status);
        return;
    }
}

static void on_closed(void *context, struct tl_serve *serve, enum tl_serve_end end)
{
    (void)context;
    struct served *entry = serve->source_state;
    if (entry == NULL) return;
    TL_CHECK(entry->serve == serve);
    TL_CHECK(entry->is_answered || end != TL_SERVE_RECEIVED);
    entry->serve = NULL;
}

static void on_received(void *context, const struct tl_request_id *id)
{
    (void)context;
    TL_CHECK(id->incarnation != 0);
}

/* Answers the first request that waits. */
static void answer_one(uint8_t byte)
{
    for (size_t i = 0; i < MAX_SERVED; i++) {
        if (served[i].serve == NULL || served[i].is_answered) continue;
        struct tl_error status = {.code = TL_OK};
        if ((byte & 0x80) != 0) tl_error_set(&status, TL_UNAVAILABLE, "ask again");
        served[i].serve->is_final = (byte & 0x40) != 0;
        reply(&served[i], byte % OFFERS, &status);
        return;
    }
}

/* ----------------------------------------------------------------------------------------------------- fetches -- */

static enum tl_status on_place(struct tl_fetch *fetch, const struct tl_meta_data *meta_data,
                               struct tl_tensor **ret_destination, struct tl_error *ret_error)
{
    TL_CHECK(fetch->destination == NULL);
    if (meta_data->size_bytes > MAX_PLACED_BYTES) {
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "%s is too large", fetch->key);
    }
    return tl_tensor_create_for(meta_data, ret_destination, ret_error);
}

static void on_done(struct tl_fetch *fetch, const struct tl_error *result)
{
    struct asked *entry = TL_CONTAINER_OF(fetch, struct asked, fetch);
    TL_CHECK(entry->state == ASKED_RUNNING && fetch->transport_state == NULL);
    if (result->code == TL_OK) {
        TL_CHECK(tl_fetch_is_complete(fetch) && fetch->publication != 0);
        TL_CHECK(fetch->is_verified == fetch->wants_checksum);
    } else {
        TL_CHECK(result->message[0] != '\0');
    }
    if (result->code == TL_UNAVAILABLE && !fetch->is_final) {
        entry->state = ASKED_BROKEN;
        return;
    }
    tl_fetch_fini(fetch);
    entry->state = ASKED_FREE;
    if (is_chaining) start_fetch((uint8_t)last_number);
}

static const struct tl_fetch_ops fetch_ops = {.place = on_place, .done = on_done};

static void start_fetch(uint8_t byte)
{
    if (link == NULL || !tl_link_is_up(link)) return;
    for (size_t i = 0; i < MAX_FETCHES; i++) {
        if (asked[i].state != ASKED_FREE) continue;
        struct tl_fetch *fetch = &asked[i].fetch;
        tl_fetch_init(fetch, &fetch_ops);
        fetch->number = ++last_number;
        fetch->key = link_frames_keys[byte % LINK_FRAMES_MAX_KEYS];
        fetch->wants_checksum = (byte & 0x10) != 0;
        asked[i].state = ASKED_RUNNING;
        framed_count++;
        tl_link_fetch(link, fetch);
        return;
    }
}

static void cancel_fetch(struct asked *entry)
{
    if (entry->state == ASKED_FREE) return;
    if (entry->state == ASKED_RUNNING && !tl_link_cancel(link, &entry->fetch))
        abort(); /* no destination is on a device */
    tl_fetch_fini(&entry->fetch);
    entry->state = ASKED_FREE;
}

/* Asks again for what a broken link has left, as a worker does. */
static void restart_fetches(void)
{
    for (size_t i = 0; i < MAX_FETCHES; i++) {
        if (asked[i].state != ASKED_BROKEN || link == NULL || !tl_link_is_up(link)) continue;
        asked[i].state = ASKED_RUNNING;
        framed_count++;
        tl_link_fetch(link, &asked[i].fetch);
    }
}

/* ---------------------------------------------------------------------------------------------- frames we send -- */

static struct served *find_served(uint64_t number)
{
    for (size_t i = 0; i < MAX_SERVED; i++) {
        if (served[i].serve != NULL && served[i].serve->id.number == number) return &served[i];
    }
    return NULL;
}

static uint64_t size_of(const struct served *entry)
{
    return tl_tensor_size_bytes(offers[entry->offer].tensor);
}

static void expect_bytes(struct served *entry, uint64_t count, struct tl_wire_data *data)
{
    const unsigned char *expected = tl_tensor_data(offers[entry->offer].tensor);
    while (count > 0) {
        const void *run;
        size_t got = tl_wire_data_next(data, count, &run);
        TL_CHECK(memcmp(run, expected + entry->next_bytes, got) == 0);
        entry->next_bytes += got;
        count -= got;
    }
}

static void expect_chunk(const Tensorlane__V1__Chunk *chunk, struct tl_wire_data *data)
{
    struct served *entry = find_served(chunk->number);
    TL_CHECK(entry != NULL && entry->is_answered && entry->offer < OFFERS);
    const struct tl_offer *offer = &offers[entry->offer];
    TL_CHECK((chunk->meta_data != NULL) == !entry->is_begun);
    if (!entry->is_begun) {
        struct tl_meta_data meta_data;
        TL_CHECK(tl_wire_to_meta_data(chunk->meta_data, &meta_data, NULL) == TL_OK);
        TL_CHECK(tl_meta_data_is_equal(&meta_data, tl_tensor_meta_data(offer->tensor)));
        TL_CHECK(chunk->publication == offer->publication && (chunk->is_one_shot != 0) == offer->is_one_shot);
        TL_CHECK(chunk->offset <= meta_data.size_bytes); /* Where the peer wants it resumed, or 0. */
        entry->next_bytes = chunk->offset;
        entry->is_begun = true;
    }
    TL_CHECK(chunk->offset == entry->next_bytes && chunk->len_bytes <= data->left_bytes);
    expect_bytes(entry, chunk->len_bytes, data);
    if (chunk->has_checksum) {
        TL_CHECK(entry->next_bytes == size_of(entry));
        TL_CHECK(chunk->checksum == XXH3_64bits(tl_tensor_data(offer->tensor), size_of(entry)));
    }
}

/* Checks the bytes that are begun and not sent: they exceed the limit of each priority only if they are one tensor's.
 */
static void expect_inflight_bound(void)
{
    uint64_t bytes = 0;
    unsigned count = 0;
    for (size_t i = 0; i < MAX_SERVED; i++) {
        if (served[i].serve == NULL || !served[i].is_begun || served[i].next_bytes == size_of(&served[i])) continue;
        bytes += size_of(&served[i]) - served[i].next_bytes;
        count++;
    }
    TL_CHECK(bytes <= LINK_PRIORITIES * INFLIGHT_BYTES || count <= LINK_PRIORITIES);
}

static void expect_request(uint64_t number)
{
    bool is_known = false;
    for (size_t i = 0; i < MAX_FETCHES; i++)
        is_known |= asked[i].state == ASKED_RUNNING && asked[i].fetch.number == number;
    TL_CHECK(is_known);
}

/* Only a peer that reads them gets packed records, and no number of a key that it does not keep. */
static void expect_packed(const Tensorlane__V1__Frame *frame, struct tl_wire_data *data)
{
    struct tl_unpacker requests = tl_unpacker_begin(&frame->packed_requests);
    struct tl_unpacker chunks = tl_unpacker_begin(&frame->packed_chunks);
    TL_CHECK(link->is_packed ? frame->n_requests + frame->n_chunks == 0
                             : frame->packed_requests.len + frame->packed_chunks.len == 0);
    while (!tl_unpacker_is_at_end(&requests)) {
        Tensorlane__V1__Request request;
        struct tl_packed_key key;
        TL_CHECK(tl_unpack_request(&requests, &request, &key, NULL) == TL_OK);
        TL_CHECK(key.text != NULL || key.number < link->keys.sent.limit);
        expect_request(request.number);
    }
    while (!tl_unpacker_is_at_end(&chunks)) {
        struct tl_unpacked_chunk chunk;
        TL_CHECK(tl_unpack_chunk(&chunks, &chunk, NULL) == TL_OK);
        expect_chunk(&chunk.chunk, data);
    }
}

static void on_send(unsigned slot, grpc_byte_buffer *message)
{
    ProtobufCMessage *base;
    struct tl_wire_data data;
    TL_CHECK(slot == 0);
    TL_CHECK(tl_wire_read(&tensorlane__v1__frame__descriptor, message, &arena, &base, &data, NULL) == TL_OK);
    const Tensorlane__V1__Frame *frame = (const Tensorlane__V1__Frame *)base;
    TL_CHECK(data.left_bytes <= CHUNK_BYTES);
    for (size_t i = 0; i < frame->n_requests; i++)
        expect_request(frame->requests[i]->number);
    for (size_t i = 0; i < frame->n_failures; i++) {
        struct served *entry = find_served(frame->failures[i]->number);
        TL_CHECK(entry == NULL || entry->is_answered);
        TL_CHECK(frame->failures[i]->status != NULL && frame->failures[i]->status->code != 0);
    }
    for (size_t i = 0; i < frame->n_chunks; i++)
        expect_chunk(frame->chunks[i], &data);
    if (link != NULL && frame->hello == NULL) expect_packed(frame, &data);
    TL_CHECK(data.left_bytes == 0);
    tl_wire_data_fini(&data);
    expect_inflight_bound();
}

/* ------------------------------------------------------------------------------------------------------- links -- */

static void on_link_closed(struct tl_link *closing, const struct tl_error *reason)
{
    TL_CHECK(closing == link && (reason->code == TL_OK || reason->message[0] != '\0'));
    for (size_t i = 0; i < MAX_FETCHES; i++)
        TL_CHECK(asked[i].state != ASKED_RUNNING);
    const uint64_t *numbers;
    TL_CHECK(tl_link_unconfirmed(link, &numbers) <= framed_count);
    link = NULL;
}

static void on_up(struct tl_link *up)
{
    TL_CHECK(tl_link_is_up(up) && tl_link_peer(up)->incarnation != 0);
}

/* Answers an offer, as a data plane would; answers nothing else. */
static void on_connection_message(struct tl_link *from, const struct tl_connection_message *message)
{
    TL_CHECK(from == link && message->transport[0] != '\0');
    TL_CHECK(tl_text_is_utf8(message->transport, strlen(message->transport)));
    TL_CHECK(tl_text_is_utf8(message->reason, strlen(message->reason)));
    TL_CHECK(message->len_bytes <= sizeof(message->bytes));
    if (message->kind != TL_CONNECTION_MESSAGE_OFFER) return;
    struct tl_connection_message answer = *message;
    answer.kind = message->attempt % 2 == 0 ? TL_CONNECTION_MESSAGE_ANSWER : TL_CONNECTION_MESSAGE_REFUSAL;
    tl_link_send_connection_message(from, &answer);
}

static const struct tl_link_events link_events = {
    .up = on_up, .closed = on_link_closed, .connection_message = on_connection_message};

static void on_link_up(void *context, struct tl_link *up)
{
    (void)context;
    TL_CHECK(link == NULL);
    link = up;
    tl_link_set_events(link, &link_events, NULL);
}

static void open_link(bool is_ours)
{
    static const uint64_t again[REPORTED] = {1000, 1001, 1002};
    if (link != NULL || fake_stream_is_open(0)) return; /* a link that had many requests ends in several rounds */
    given_count = 0;
    has_half_closed = false;
    if (!is_ours) {
        TL_CHECK(fake_stream_accept(fake_stream_method("/tensorlane.v1.Transfer/Exchange")) == 0);
        return;
    }
    framed_count += REPORTED;
    TL_CHECK(tl_link_open(control,
                          &(const struct tl_link_address){.address = "127.0.0.1:1", .expected_name = LINK_FRAMES_PEER},
                          again, REPORTED, &link_events, NULL, &link, NULL) == TL_OK);
}

static unsigned list_length(const struct tl_list *list)
{
    unsigned length = 0;
    TL_LIST_FOREACH(list, place)
    {
        length++;
    }
    return length;
}

static unsigned queue_length(const struct link_queue *queue)
{
    unsigned length = 0;
    for (unsigned i = 0; i < LINK_PRIORITIES; i++)
        length += list_length(&queue->lists[i]);
    return length;
}

/* Compares the counters of the link with its content. */
static void expect_consistent(void)
{
    if (link == NULL) return;
    unsigned counts[SERVE_FAILED + 1] = {0};
    uint64_t active_bytes[LINK_PRIORITIES] = {0}, ready_bytes = 0;
    unsigned active_counts[LINK_PRIORITIES] = {0};
    for (const struct tl_hash_link *at = tl_hash_table_first(&link->answers.serves); at != NULL;
         at = tl_hash_table_after(&link->answers.serves, at)) {
        const struct link_serve *entry = TL_CONTAINER_OF(at, const struct link_serve, hash);
        counts[entry->state]++;
        if (entry->state == SERVE_ACTIVE) {
            active_bytes[entry->priority] +=
                tl_tensor_size_bytes(entry->sending->offer.tensor) - entry->sending->sent_bytes;
            active_counts[entry->priority]++;
        }
        TL_CHECK(entry->state != SERVE_ACTIVE || entry->sending->offer.tensor != NULL);
        if (entry->state == SERVE_READY && entry->sending->offer.tensor != NULL)
            ready_bytes += entry->sending->ready_bytes;
    }
    TL_CHECK(link->answers.unsent_count ==
             counts[SERVE_READY] + counts[SERVE_ACTIVE] + counts[SERVE_LEAVING] + counts[SERVE_FAILED]);
    for (unsigned i = 0; i < LINK_PRIORITIES; i++) {
        TL_CHECK(link->answers.active_bytes[i] == active_bytes[i]);
        TL_CHECK(active_bytes[i] <= INFLIGHT_BYTES || active_counts[i] == 1);
    }
    TL_CHECK(link->answers.ready_bytes == ready_bytes);
    TL_CHECK(queue_length(&link->answers.ready) == counts[SERVE_READY] &&
             queue_length(&link->answers.active) == counts[SERVE_ACTIVE]);
    TL_CHECK(list_length(&link->answers.failures) == counts[SERVE_FAILED]);
    TL_CHECK(list_length(&link->connection_messages) == link->connection_message_count &&
             link->connection_message_count <= MAX_PATHS);
    TL_CHECK(link->framed_count <= link->received.count && link->received.count <= framed_count);
    TL_CHECK(link->cancels.count <= framed_count);
}

/* ---------------------------------------------------------------------------------------------------- commands -- */

static void give(grpc_byte_buffer *message)
{
    given_count++;
    (void)fake_stream_give(0, message);
}

static void run_command(struct fuzz_input *input)
{
    uint8_t command = fuzz_take_u8(input);
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "the connection broke");
    switch (command & 15) {
    case 0:
        give(fuzz_take_message(input));
        break;
    case 1:
    case 2:
        give(link_frames_compose(input, given_count == 0));
        break;
    case 3:
    case 4:
        (void)fake_stream_take(0);
        break;
    case 5:
        start_fetch(fuzz_take_u8(input));
        break;
    case 6:
        cancel_fetch(&asked[fuzz_take_u8(input) % MAX_FETCHES]);
        break;
    case 7:
        answer_one(fuzz_take_u8(input));
        break;
    case 8:
        if (link != NULL) tl_link_drain(link);
        break;
    case 9:
        if (link != NULL) tl_link_close(link, &reason);
        break;
    case 10:
        has_half_closed |= fake_stream_half_close(0);
        break;
    case 11:
        if ((fuzz_take_u8(input) & 1) != 0) reason.code = TL_OK;
        (void)fake_stream_break(0, &reason);
        break;
    case 12:
        (void)tl_timers_fire_due(tl_loop_timers(loop), INT64_MAX - 1, &(struct tl_quota){0});
        break;
    case 13:
        (void)fake_stream_end(0);
        break;
    case 14:
        open_link((fuzz_take_u8(input) & 1) != 0);
        break;
    default:
        framed_count += REPORTED;
        if (link != NULL && !tl_link_is_ours(link)) {
            TL_CHECK(tl_link_acknowledge(link, (const uint64_t[REPORTED]){2000, 2001, 2002}, REPORTED));
        }
        break;
    }
    restart_fetches();
    if ((command & 0x80) == 0) (void)tl_loop_run_once(loop, 0);
    expect_consistent();
}

/* --------------------------------------------------------------------------------------------------------- end -- */

/* The peer takes all there is: then nothing is left to send, and the peer is read. Tensors wait only for a window that
 * the peer has but does not report as taken. */
static void quiesce(void)
{
    while (tl_loop_run_once(loop, 0) || fake_stream_take(0))
        expect_consistent();
    if (link == NULL || !tl_link_is_up(link)) return;
    TL_CHECK(tl_list_is_empty(&link->to_request) && tl_list_is_empty(&link->answers.failures));
    TL_CHECK((link_queue_is_empty(&link->answers.ready) && link_queue_is_empty(&link->answers.active)) ||
             link_window_is_full(link));
    TL_CHECK(!link_window_must_report(link));
    TL_CHECK(tl_list_is_empty(&link->connection_messages));
    TL_CHECK(link->cancels.count == 0 && link->received.count == link->framed_count);
    TL_CHECK(fake_stream_is_reading(0) || has_half_closed);
}

static void expect_nothing_left(void)
{
    while (tl_loop_run_once(loop, 0))
        continue;
    TL_CHECK(link == NULL && tl_list_is_empty(&control->links) && !fake_stream_is_open(0));
    for (size_t i = 0; i < MAX_FETCHES; i++)
        TL_CHECK(asked[i].state != ASKED_RUNNING);
    for (size_t i = 0; i < MAX_SERVED; i++)
        TL_CHECK(served[i].serve == NULL);
    for (size_t i = 0; i < OFFERS; i++)
        TL_CHECK(!tl_tensor_is_shared(offers[i].tensor));
    TL_CHECK(tl_timers_next_due_ns(tl_loop_timers(loop)) == TL_TIME_NEVER);
}

static void end_input(void)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_UNAVAILABLE, "the connection broke");
    quiesce();
    (void)fake_stream_break(0, &reason);
    is_chaining = false;
    for (size_t i = 0; i < MAX_FETCHES; i++)
        cancel_fetch(&asked[i]);
    expect_nothing_left();
}

/* ------------------------------------------------------------------------------------------------------- start -- */

static const struct tl_control_handlers handlers = {
    .source = {.request = on_request, .closed = on_closed, .received = on_received, .given_up = on_received},
    .link_up = on_link_up,
};

static struct tl_tensor *make_tensor(uint64_t size_bytes)
{
    struct tl_tensor *tensor;
    TL_CHECK(tl_tensor_create(TL_U8, 1, &size_bytes, &tensor, NULL) == TL_OK);
    unsigned char *data = tl_tensor_data(tensor);
    for (uint64_t i = 0; i < size_bytes; i++)
        data[i] = link_frames_byte(i);
    return tensor;
}

static void start(void)
{
    static const uint64_t sizes[OFFERS] = {0, 200, 5000, 300, 2500};
    const struct tl_control_options options = {
        .self = {.source = TL_IDENTITY_CLAIMED, .name = LINK_FRAMES_SELF, .incarnation = 42},
        .chunk_bytes = CHUNK_BYTES,
        .inflight_bytes = INFLIGHT_BYTES,
        .max_calls = FAKE_STREAMS,
        .connect_timeout_ns = 3600 * TL_NS_PER_SEC,
        .request_timeout_ns = 3600 * TL_NS_PER_SEC,
        .max_unsent = 65536,
        .stalled_timeout_ns = TL_TIME_NEVER,
        .keepalive_ns = 10 * TL_NS_PER_SEC,
        .keepalive_timeout_ns = 10 * TL_NS_PER_SEC,
        .handlers = &handlers,
    };
    uint16_t port;
    tl_log_configure(TL_LOG_ERROR, TL_LOG_KEY_VALUE);
    TL_CHECK(tl_wire_arena_init(&arena, 4 << 20, NULL) == TL_OK);
    TL_CHECK(tl_loop_create(&loop, NULL) == TL_OK);
    TL_CHECK(tl_control_create(loop, &options, &control, NULL) == TL_OK);
    TL_CHECK(tl_control_start(control, "127.0.0.1:0", &port, NULL) == TL_OK);
    for (size_t i = 0; i < OFFERS; i++) {
        offers[i] = (struct tl_offer){
            .tensor = make_tensor(sizes[i]), .step = 9, .publication = i + 1, .is_one_shot = i >= OFFERS - 2};
    }
    fake_stream_on_send = on_send;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len_bytes)
{
    fixed_random_begin();
    if (loop == NULL) start();
    struct fuzz_input input = {.data = data, .left = len_bytes};
    uint8_t options = fuzz_take_u8(&input);
    is_chaining = (options & 2) != 0;
    last_number = 0;
    framed_count = 0;
    open_link((options & 1) != 0);
    while (input.left > 0)
        run_command(&input);
    end_input();
    return 0;
}
