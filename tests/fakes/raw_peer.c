// SPDX-License-Identifier: Apache-2.0
/* A peer of an engine that is driven by hand, message by message. */
#include "fakes/raw_peer.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "tensor/mapped_tensor.h"

#define SLOT_COUNT 64

uint32_t raw_peer_slot_bytes = TL_SLOT_BYTES;
uint32_t raw_peer_key_count = 0;

/* ------------------------------------------------------------------------------------------------------ events -- */

static void on_message(void *owner, const void *data, uint32_t len_bytes)
{
    struct raw_peer *raw = owner;
    raw->consumed++;
    TL_CHECK(len_bytes <= raw_peer_slot_bytes);
    struct tl_batch batch;
    const uint8_t *bytes;
    TL_CHECK(tl_batch_decode_head(data, len_bytes, &batch, NULL) == TL_OK);
    while (tl_batch_next(&batch, &bytes, &len_bytes)) {
        struct tl_message *place = &raw->heard[raw->heard_count++ % RAW_PEER_HEARD];
        TL_CHECK(tl_message_decode(bytes, len_bytes, place, NULL) == TL_OK);
        if (place->type != TL_MESSAGE_REQUEST) continue;
        raw->heard_bytes = len_bytes - place->destination.len_bytes;
        raw->heard_number = place->number = tl_from_difference(place->number, raw->heard_number);
        raw->heard_step = place->step = tl_from_difference(place->step, raw->heard_step);
    }
}

static void on_immediate(void *owner, uint32_t immediate, uint64_t len_bytes)
{
    struct raw_peer *raw = owner;
    raw->consumed++;
    if (immediate == TL_IMMEDIATE_PROBE) {
        raw->probe_count++;
        return;
    }
    raw->immediate_count++;
    raw->last_immediate = immediate;
    raw->written_bytes += len_bytes;
}

static void on_broken(void *owner, const struct tl_error *reason)
{
    struct raw_peer *raw = owner;
    (void)reason;
    raw->is_broken = true;
}

static void on_drained(void *owner)
{
    struct raw_peer *raw = owner;
    raw->is_drained = true;
}

static const struct tl_queue_pair_events events = {
    .message = on_message, .immediate = on_immediate, .broken = on_broken, .drained = on_drained};

/* -------------------------------------------------------------------------------------------------------- life -- */

static void put_number(uint8_t *place, uint64_t value, unsigned len_bytes)
{
    for (unsigned i = 0; i < len_bytes; i++)
        place[i] = (uint8_t)(value >> (8 * i));
}

static void get_address(struct raw_peer *raw)
{
    struct tl_conn *conn = raw->engines->left->conn;
    uint8_t theirs[TL_CONN_ADDRESS_BYTES];
    uint8_t ours[TL_CONN_ADDRESS_BYTES];
    struct tl_pair_address pair;
    uint32_t their_bytes = tl_conn_get_address(conn, theirs);
    TL_CHECK(their_bytes > 44);
    memcpy(&raw->token, theirs + 12, sizeof(raw->token));
    pair.len_bytes = their_bytes - 44;
    memcpy(pair.bytes, theirs + 44, pair.len_bytes);
    TL_CHECK(raw->pair->ops->connect(raw->pair, &pair, NULL) == TL_OK);
    raw->pair->ops->get_address(raw->pair, &pair);
    put_number(ours, TL_DATAPLANE_VERSION, 4);
    put_number(ours + 4, raw->engines->right->self.incarnation, 8);
    put_number(ours + 12, 4242, 8);
    put_number(ours + 20, SLOT_COUNT, 4);
    put_number(ours + 24, raw_peer_slot_bytes, 4);
    put_number(ours + 28, raw->engines->options.engine.inline_bytes, 4);
    put_number(ours + 32, RAW_PEER_REQUESTS, 4);
    put_number(ours + 36, raw_peer_key_count, 4);
    put_number(ours + 40, pair.len_bytes, 4);
    memcpy(ours + 44, pair.bytes, pair.len_bytes);
    TL_CHECK(tl_conn_connect(conn, ours, 44 + pair.len_bytes, NULL) == TL_OK);
}

void raw_peer_open(struct raw_peer *raw, struct engine_pair *engines)
{
    struct tl_provider *provider = engines->right->provider;
    *raw = (struct raw_peer){.engines = engines};
    raw->memory = calloc(1, RAW_PEER_BYTES);
    TL_CHECK(raw->memory != NULL);
    TL_CHECK(tl_region_create(provider, raw->memory, RAW_PEER_BYTES, TL_REGION_WRITE, &raw->region, NULL) == TL_OK);
    const struct tl_queue_pair_options options = {
        .slot_count = SLOT_COUNT, .work_count = 256, .keys = engines->options.engine.keys};
    TL_CHECK(tl_queue_pair_create(provider, &options, &events, raw, &raw->pair, NULL) == TL_OK);
    engine_side_create_conn(engines->left);
    get_address(raw);
    bool may_show = options.keys == TL_KEYS_WINDOW && raw->pair->ops->expose_source != NULL;
    enum tl_status status =
        may_show ? tl_queue_pair_expose_source(raw->pair, raw->region, raw->memory, RAW_PEER_BYTES, true,
                                               &raw->exposure, NULL)
                 : tl_queue_pair_expose(raw->pair, raw->region, raw->memory, RAW_PEER_BYTES, &raw->exposure, NULL);
    TL_CHECK(status == TL_OK);
    raw->has_source = options.keys == TL_KEYS_WINDOW &&
                      tl_queue_pair_expose_source(raw->pair, raw->region, raw->memory, RAW_PEER_BYTES, false,
                                                  &raw->source, NULL) == TL_OK;
    tl_queue_pair_doorbell(raw->pair);
}

void raw_peer_shake_hands(struct raw_peer *raw)
{
    raw_peer_run(raw);
    const struct tl_message *theirs = raw_peer_heard(raw, TL_MESSAGE_HELLO);
    TL_CHECK(theirs != NULL);
    struct tl_message hello = raw_peer_hello(raw);
    raw_peer_send(raw, &hello);
    memcpy(raw->memory, &theirs->challenge, sizeof(theirs->challenge));
    raw_peer_write(raw, &theirs->destination, 0, sizeof(theirs->challenge), TL_IMMEDIATE_PROBE);
    raw_peer_run(raw);
    TL_CHECK(raw->probe_count == 1 && raw_peer_heard(raw, TL_MESSAGE_PROBED) != NULL);
    struct tl_message probed = raw_peer_message(TL_MESSAGE_PROBED, 0);
    raw_peer_send(raw, &probed);
    raw_peer_run(raw);
    TL_CHECK(raw->engines->left->up_count == 1);
}

void raw_peer_run(struct raw_peer *raw)
{
    engine_pair_run(raw->engines);
}

void raw_peer_close(struct raw_peer *raw)
{
    struct tl_error reason;
    tl_error_set(&reason, TL_CANCELLED, "the test is over");
    raw->pair->ops->disconnect(raw->pair, &reason);
    raw_peer_run(raw);
    TL_CHECK(raw->is_broken && raw->is_drained);
    raw->pair->ops->destroy(raw->pair);
    tl_region_destroy(raw->region);
    free(raw->memory);
}

/* ----------------------------------------------------------------------------------------------------- talking -- */

struct tl_message raw_peer_message(enum tl_message_type type, uint32_t handle)
{
    struct tl_message message = {.type = type, .handle = handle, .key = "key", .text = ""};
    return message;
}

struct tl_message raw_peer_hello(struct raw_peer *raw)
{
    struct tl_message hello = raw_peer_message(TL_MESSAGE_HELLO, 0);
    hello.version = TL_DATAPLANE_VERSION;
    hello.incarnation = raw->engines->right->self.incarnation;
    hello.token = raw->token;
    hello.challenge = 777;
    hello.destination = raw->exposure.descriptor;
    return hello;
}

/* Numbers travel as differences to those of the REQUEST before. Nothing is expected of a key's latest REQUEST. */
static void shorten(struct raw_peer *raw, struct tl_message *message)
{
    uint64_t number = message->number, step = message->step;
    if (message->key_form == TL_KEY_TEXT || message->key_form == TL_KEY_NEW)
        message->expected_step = tl_difference(message->expected_step, step);
    message->number = tl_difference(number, raw->sent_number);
    message->step = tl_difference(step, raw->sent_step);
    raw->sent_number = number;
    raw->sent_step = step;
}

void raw_peer_send(struct raw_peer *raw, const struct tl_message *message)
{
    raw_peer_send_batch(raw, message, 1);
}

void raw_peer_send_batch(struct raw_peer *raw, const struct tl_message *messages, unsigned count)
{
    uint8_t buffer[TL_SLOT_BYTES];
    uint32_t len_bytes = TL_BATCH_HEAD_BYTES;
    tl_batch_encode_head(buffer, raw->consumed);
    for (unsigned i = 0; i < count; i++) {
        struct tl_message message = messages[i];
        if (message.type == TL_MESSAGE_REQUEST) shorten(raw, &message);
        TL_CHECK(tl_message_most_bytes(&message) <= sizeof(buffer) - len_bytes);
        len_bytes += tl_message_encode(&message, buffer + len_bytes);
    }
    raw_peer_send_bytes(raw, buffer, len_bytes);
}

void raw_peer_send_bytes(struct raw_peer *raw, const void *bytes, uint32_t len_bytes)
{
    if (raw->pair->ops->space(raw->pair) == 0) return; /* The queue pair is broken. */
    raw->pair->ops->message(raw->pair, bytes, len_bytes, NULL);
    tl_queue_pair_doorbell(raw->pair);
}

void raw_peer_write(struct raw_peer *raw, const struct tl_descriptor *destination, uint64_t offset_bytes,
                    uint64_t len_bytes, uint32_t immediate)
{
    if (raw->pair->ops->space(raw->pair) == 0) return;
    raw->pair->ops->write(raw->pair, raw->region, raw->memory, len_bytes, destination, offset_bytes, true, immediate,
                          NULL);
    tl_queue_pair_doorbell(raw->pair);
}

struct tl_descriptor raw_peer_file(struct raw_peer *raw, uint64_t size_bytes)
{
    uint64_t offset;
    struct tl_descriptor name = {.len_bytes = 0};
    if (raw->is_broken) return name;
    struct tl_tensor *tensor = engine_file_bytes(size_bytes, 1);
    TL_CHECK(tl_queue_pair_share(raw->pair, tl_mapped_tensor_file(tensor, &offset), &name, NULL) == TL_OK);
    tl_tensor_put(tensor);
    return name;
}

const struct tl_message *raw_peer_heard(const struct raw_peer *raw, enum tl_message_type type)
{
    unsigned oldest = raw->heard_count > RAW_PEER_HEARD ? raw->heard_count - RAW_PEER_HEARD : 0;
    for (unsigned i = raw->heard_count; i > oldest; i--) {
        const struct tl_message *message = &raw->heard[(i - 1) % RAW_PEER_HEARD];
        if (message->type == type) return message;
    }
    return NULL;
}
