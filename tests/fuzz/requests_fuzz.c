// SPDX-License-Identifier: Apache-2.0
/*
 * Every message that another process can send to this one: the requests of all services, the frames of a link, and the
 * answers that servers give to tools, through the same readers that the program uses.
 *
 * Input: one byte that says which reader, one that says where the message is cut into two slices, then the message.
 */
#include <grpc/byte_buffer.h>
#include <grpc/slice.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/text.h"
#include "control/reflection.h"
#include "control/requests.h"
#include "control/responses.h"

#define ARENA_BYTES (1024 * 1024)

/* A reader accepts only what its header promises. */
static void expect_text(const char *text, size_t max_bytes)
{
    TL_CHECK(text != NULL && strlen(text) <= max_bytes && tl_text_is_utf8(text, strlen(text)));
}

static void expect_meta_data(const struct tl_meta_data *meta_data)
{
    uint64_t size_bytes;
    TL_CHECK(meta_data->shape.rank <= TL_MAX_RANK);
    if (meta_data->is_dead || meta_data->dtype == TL_STRING) return;
    TL_CHECK(tl_shape_size_bytes(meta_data->dtype, &meta_data->shape, &size_bytes, NULL) == TL_OK);
    TL_CHECK(size_bytes == meta_data->size_bytes);
}

/* The error of the latest reader. */
static struct tl_error error;

/* Returns whether the reader has succeeded; otherwise it must have given a reason, in a text that may be sent on. */
static bool is_ok(enum tl_status status)
{
    if (status == TL_OK) return true;
    TL_CHECK(error.code == status && error.message[0] != '\0');
    TL_CHECK(tl_text_is_utf8(error.message, strlen(error.message)));
    return false;
}

/* Reads the data to its end, and uses every byte, so that the sanitizers see each. */
static void drain(struct tl_wire_data *data)
{
    static volatile unsigned sum;
    while (data->left_bytes > 0) {
        const void *run;
        size_t count = tl_wire_data_next(data, 7, &run);
        TL_CHECK(count > 0 && count <= 7);
        for (size_t i = 0; i < count; i++)
            sum = sum + ((const unsigned char *)run)[i];
    }
    tl_wire_data_fini(data);
}

static void read_receive(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    struct tl_receive_request request;
    if (!is_ok(tl_receive_request_read(message, arena, &request, &error))) return;
    expect_text(request.key, TL_MAX_KEY_BYTES);
    TL_CHECK(request.key[0] != '\0');
}

static void read_publish(grpc_byte_buffer *message, struct tl_wire_arena *arena, bool is_first)
{
    struct tl_publish_request request;
    if (!is_ok(tl_publish_request_read(message, arena, is_first, &request, &error))) return;
    TL_CHECK((request.key != NULL) == is_first);
    if (is_first) {
        expect_text(request.key, TL_MAX_KEY_BYTES);
        expect_meta_data(&request.meta_data);
    }
    tl_annotations_put(request.annotations);
    drain(&request.data);
}

static void read_publish_first(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    read_publish(message, arena, true);
}

static void read_publish_rest(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    read_publish(message, arena, false);
}

static void read_withdraw(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    const char *pattern;
    if (is_ok(tl_withdraw_request_read(message, arena, &pattern, &error))) expect_text(pattern, TL_MAX_PATTERN_BYTES);
}

static void read_list(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    const char *pattern;
    if (is_ok(tl_list_request_read(message, arena, &pattern, &error))) expect_text(pattern, TL_MAX_PATTERN_BYTES);
}

static void read_identify(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    (void)is_ok(tl_identify_request_read(message, arena, &error));
}

static void read_health(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    const char *service;
    if (is_ok(tl_health_request_read(message, arena, &service, &error))) expect_text(service, TL_MAX_SYMBOL_BYTES);
}

static void read_reflection(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    grpc_byte_buffer *answer;
    if (!is_ok(tl_reflection_answer(message, arena, &answer, &error))) return;
    TL_CHECK(grpc_byte_buffer_length(answer) > 0);
    grpc_byte_buffer_destroy(answer);
}

static void read_frame(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    ProtobufCMessage *base;
    struct tl_wire_data data;
    struct tl_meta_data meta_data;
    if (!is_ok(tl_wire_read(&tensorlane__v1__frame__descriptor, message, arena, &base, &data, &error))) return;
    const Tensorlane__V1__Frame *frame = (const Tensorlane__V1__Frame *)base;
    for (size_t i = 0; i < frame->n_requests; i++) {
        if (!is_ok(tl_wire_text(frame->requests[i]->key, 1, TL_MAX_KEY_BYTES, "key", &error))) continue;
        expect_text(frame->requests[i]->key, TL_MAX_KEY_BYTES);
    }
    for (size_t i = 0; i < frame->n_chunks; i++) {
        if (!is_ok(tl_wire_to_meta_data(frame->chunks[i]->meta_data, &meta_data, &error))) continue;
        expect_meta_data(&meta_data);
    }
    drain(&data);
}

static void read_health_response(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    int health;
    (void)is_ok(tl_health_response_read(message, arena, &health, &error));
}

static void read_withdraw_response(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    uint64_t count;
    (void)is_ok(tl_withdraw_response_read(message, arena, &count, &error));
}

static void read_publish_response(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    struct tl_publish_response response;
    (void)is_ok(tl_publish_response_read(message, arena, &response, &error));
}

static void read_identify_response(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    struct tl_description description;
    if (!is_ok(tl_identify_response_read(message, arena, &description, &error))) return;
    expect_text(description.job, 4096);
    for (size_t i = 0; i < description.peer_count; i++)
        expect_text(description.peers[i].reason, 4096);
    tl_description_fini(&description);
}

static void read_list_response(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    struct tl_listing_builder builder = {0};
    struct tl_listing listing;
    (void)is_ok(tl_list_response_read(message, arena, &builder, &error));
    tl_listing_builder_finish(&builder, &listing);
    for (size_t i = 0; i < listing.count; i++) {
        expect_text(listing.items[i].key, TL_MAX_KEY_BYTES);
        expect_meta_data(&listing.items[i].meta_data);
        TL_CHECK(i == 0 || strcmp(listing.items[i - 1].key, listing.items[i].key) <= 0);
    }
    tl_listing_fini(&listing);
}

static void read_probe(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    (void)is_ok(tl_probe_request_read(message, arena, &error));
}

static void read_echo(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    struct tl_echo_request request;
    if (!is_ok(tl_echo_request_read(message, arena, &request, &error))) return;
    TL_CHECK(request.answer_bytes <= TL_MAX_ECHO_BYTES && request.data.left_bytes <= TL_MAX_ECHO_BYTES);
    drain(&request.data);
}

static void read_probe_response(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    struct tl_probe_results results;
    if (!is_ok(tl_probe_response_read(message, arena, &results, &error))) return;
    for (size_t i = 0; i < results.count; i++) {
        expect_text(results.items[i].name, TL_MAX_NAME_BYTES - 1);
        expect_text(results.items[i].reason, TL_ERROR_MESSAGE_BYTES - 1);
    }
    free(results.items);
}

static void read_echo_response(grpc_byte_buffer *message, struct tl_wire_arena *arena)
{
    struct tl_echo_response response;
    if (is_ok(tl_echo_response_read(message, arena, &response, &error)))
        expect_text(response.name, TL_MAX_NAME_BYTES - 1);
}

static void (*const readers[])(grpc_byte_buffer *message, struct tl_wire_arena *arena) = {
    read_receive,
    read_publish_first,
    read_publish_rest,
    read_withdraw,
    read_list,
    read_identify,
    read_health,
    read_reflection,
    read_frame,
    read_health_response,
    read_withdraw_response,
    read_publish_response,
    read_identify_response,
    read_list_response,
    read_probe,
    read_echo,
    read_probe_response,
    read_echo_response,
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len_bytes)
{
    static struct tl_wire_arena arena;
    if (arena.memory == NULL) TL_CHECK(tl_wire_arena_init(&arena, ARENA_BYTES, NULL) == TL_OK);
    if (len_bytes < 2) return 0;
    size_t message_bytes = len_bytes - 2;
    size_t cut = data[1] * message_bytes / 255;
    grpc_slice slices[2] = {grpc_slice_from_copied_buffer((const char *)data + 2, cut),
                            grpc_slice_from_copied_buffer((const char *)data + 2 + cut, message_bytes - cut)};
    grpc_byte_buffer *message = grpc_raw_byte_buffer_create(slices, 2);
    error = (struct tl_error){.code = TL_OK};
    readers[data[0] % TL_ARRAY_COUNT(readers)](message, &arena);
    grpc_byte_buffer_destroy(message);
    grpc_slice_unref(slices[0]);
    grpc_slice_unref(slices[1]);
    return 0;
}
