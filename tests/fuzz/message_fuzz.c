// SPDX-License-Identifier: Apache-2.0
/*
 * The reader of control messages of the data plane. Input: a batch of messages, as a peer could put it into a slot.
 *
 * What the reader lets through keeps the promises of its header, and says the same after it was written again; a status
 * code that is none is the only thing that changes on the way.
 */
#include <stdint.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "base/text.h"
#include "dataplane/engine/message.h"

static struct tl_message first;
static struct tl_message second;

static void expect_promises(const struct tl_message *message)
{
    TL_CHECK(strcmp(tl_message_name(message->type), "?") != 0);
    TL_CHECK(message->destination.len_bytes <= TL_DESCRIPTOR_MAX_BYTES);
    bool has_text = message->key_form == TL_KEY_TEXT || message->key_form == TL_KEY_NEW;
    if (message->type == TL_MESSAGE_REQUEST) TL_CHECK(has_text == (message->key != NULL));
    if (message->type == TL_MESSAGE_REQUEST && has_text) {
        size_t key_bytes = strlen(message->key);
        TL_CHECK(key_bytes >= 1 && key_bytes <= TL_MESSAGE_KEY_BYTES && tl_text_is_utf8(message->key, key_bytes));
    }
    if (message->type == TL_MESSAGE_ERROR_STATUS) {
        size_t text_bytes = strlen(message->text);
        TL_CHECK(text_bytes < TL_ERROR_MESSAGE_BYTES && tl_text_is_utf8(message->text, text_bytes));
        TL_CHECK(message->code >= TL_CANCELLED && message->code <= TL_UNAUTHENTICATED);
    }
    if (message->has_meta_data) TL_CHECK(tl_meta_data_validate(&message->meta_data, NULL) == TL_OK);
}

static void expect_same_text(const char *a, const char *b)
{
    TL_CHECK((a == NULL) == (b == NULL));
    if (a != NULL) TL_CHECK(strcmp(a, b) == 0);
}

static void expect_same(const struct tl_message *a, const struct tl_message *b)
{
    TL_CHECK(a->type == b->type && a->handle == b->handle);
    TL_CHECK(a->has_meta_data == b->has_meta_data && a->has_checksum == b->has_checksum);
    TL_CHECK(a->is_final == b->is_final && a->is_ping == b->is_ping && a->is_published == b->is_published);
    TL_CHECK(a->may_map == b->may_map && a->offset == b->offset && a->is_copying == b->is_copying);
    TL_CHECK(a->is_reading == b->is_reading && a->is_on_device == b->is_on_device);
    TL_CHECK(a->is_inline == b->is_inline && a->is_remote == b->is_remote && a->is_fixed == b->is_fixed);
    if (a->is_inline) TL_CHECK(memcmp(a->data, b->data, (size_t)a->meta_data.size_bytes) == 0);
    if (a->type == TL_MESSAGE_HELLO) { /* Other types do not set them. */
        TL_CHECK(a->version == b->version && a->incarnation == b->incarnation);
        TL_CHECK(a->token == b->token && a->challenge == b->challenge);
    }
    TL_CHECK(a->number == b->number && a->step == b->step && a->subscription == b->subscription);
    TL_CHECK(a->expected_step == b->expected_step && a->checksum == b->checksum && a->code == b->code);
    TL_CHECK(tl_meta_data_is_equal(&a->meta_data, &b->meta_data));
    TL_CHECK(a->destination.len_bytes == b->destination.len_bytes);
    TL_CHECK(memcmp(a->destination.bytes, b->destination.bytes, a->destination.len_bytes) == 0);
    TL_CHECK(a->key_form == b->key_form && a->key_number == b->key_number && a->priority == b->priority);
    expect_same_text(a->key, b->key);
    expect_same_text(a->text, b->text);
}

static bool is_message(const uint8_t *data, uint32_t len_bytes)
{
    struct tl_error error = {.code = TL_OK};
    uint8_t buffer[TL_SLOT_BYTES];
    if (tl_message_decode(data, len_bytes, &first, &error) != TL_OK) {
        TL_CHECK(error.code != TL_OK && error.message[0] != '\0');
        TL_CHECK(tl_text_is_utf8(error.message, strlen(error.message)));
        return false;
    }
    expect_promises(&first);
    TL_CHECK(tl_message_most_bytes(&first) >= len_bytes);
    TL_CHECK(tl_message_encode(&first, buffer) == len_bytes);
    if (first.type != TL_MESSAGE_ERROR_STATUS) TL_CHECK(memcmp(buffer, data, len_bytes) == 0);
    TL_CHECK(tl_message_decode(buffer, len_bytes, &second, &error) == TL_OK);
    expect_same(&first, &second);
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len_bytes)
{
    struct tl_error error = {.code = TL_OK};
    struct tl_batch batch;
    const uint8_t *bytes;
    uint32_t message_bytes, count_bytes = TL_BATCH_HEAD_BYTES;
    if (len_bytes > TL_SLOT_BYTES) return 0;
    if (tl_batch_decode_head(data, (uint32_t)len_bytes, &batch, &error) != TL_OK) {
        TL_CHECK(len_bytes <= TL_BATCH_HEAD_BYTES && error.message[0] != '\0');
        return 0;
    }
    while (tl_batch_next(&batch, &bytes, &message_bytes)) {
        TL_CHECK(bytes == data + count_bytes && message_bytes > 0);
        count_bytes += message_bytes;
        TL_CHECK(count_bytes <= len_bytes);
        if (!is_message(bytes, message_bytes)) return 0;
    }
    TL_CHECK(count_bytes == len_bytes);
    return 0;
}
