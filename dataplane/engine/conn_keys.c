// SPDX-License-Identifier: Apache-2.0
/*
 * The numbers of keys on one connection, and the short form of REQUEST.
 *
 * Happy path: the first REQUEST for a key carries its text and the number that the asker gives it; later ones carry the
 * number, and say with one bit that the meta-data is as before. Numbers and steps are differences to those of the
 * REQUEST before, and the expected step to that of the number's latest REQUEST. Each direction has its own table, which
 * ends with the connection.
 *
 * Failure modes: a number that was not given, or is beyond those that were offered, breaks the protocol. An asker
 * without memory, or without a free number, sends texts.
 */
#include <inttypes.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "dataplane/engine/conn_internal.h"

/* How many keys of a client are kept, of which there may be many. */
#define CLIENT_KEYS 4096
/* So many requests of a slot are looked at before they are handled. */
#define PREFETCHED_KEYS 64

static const struct tl_error out_of_memory = {.code = TL_RESOURCE_EXHAUSTED, .message = "no memory for a key"};

uint32_t conn_key_limit(const struct tl_conn *conn)
{
    uint32_t key_count = conn->engine->options.key_count;
    bool is_task = conn->peer.name[0] != '\0' && !conn->peer.is_foreign;
    return is_task ? key_count : (uint32_t)tl_min_u64(key_count, CLIENT_KEYS);
}

void conn_keys_agree(struct tl_conn *conn, uint32_t key_count)
{
    conn->requests.keys.limit = (uint32_t)tl_min_u64(key_count, conn->engine->options.key_count);
    conn->responses.keys.limit = conn_key_limit(conn);
}

/* --------------------------------------------------------------------------------------------------------- out -- */

void conn_shorten_request(struct tl_conn *conn, uint32_t key_number, struct tl_message *message)
{
    struct conn_latest *latest = &conn->requests.latest;
    uint64_t base;
    message->key_number = key_number;
    message->key_form = tl_asked_keys_tell(&conn->requests.keys, message, &base);
    if (message->key_form == TL_KEY_AS_BEFORE) message->has_meta_data = false;
    const struct conn_latest now = {.number = message->number, .step = message->step};
    message->number = tl_difference(now.number, latest->number);
    message->step = tl_difference(now.step, latest->step);
    message->expected_step = tl_difference(message->expected_step, base);
    *latest = now;
}

/* ---------------------------------------------------------------------------------------------------------- in -- */

/* Finds the key of a REQUEST, which may be new. Returns NULL when the connection is closed. */
static struct tl_kept_key *find_key(struct tl_conn *conn, const struct tl_message *message)
{
    struct tl_numbered_keys *keys = &conn->responses.keys;
    uint32_t number = message->key_number;
    if (message->key_form == TL_KEY_NEW && number < keys->limit) {
        struct tl_kept_key *key = tl_numbered_keys_give(keys, number, message->key);
        if (key != NULL) key->expected_step = message->step;
        if (key == NULL) tl_conn_close(conn, &out_of_memory);
        return key;
    }
    struct tl_kept_key *key = message->key_form != TL_KEY_NEW ? tl_numbered_keys_find(keys, number) : NULL;
    bool is_known = key != NULL && (message->key_form == TL_KEY_KNOWN || key->expected != NULL);
    if (is_known) return key;
    conn_protocol_error(conn, "a REQUEST for the key with number %" PRIu32 ", %s", number,
                        key != NULL                       ? "with the meta-data of earlier ones, which had none"
                        : message->key_form == TL_KEY_NEW ? "which is beyond those that were offered"
                                                          : "which was not given to a key");
    return NULL;
}

/* Reads what the messages of a batch say of their keys; returns of how many. Texts in the table are being prefetched.
 */
static size_t peek_keys(const struct tl_conn *conn, struct tl_batch batch, struct tl_message_key *ret_keys)
{
    const struct tl_numbered_keys *table = &conn->responses.keys;
    const uint8_t *bytes;
    uint32_t len_bytes;
    size_t count = 0;
    while (count < PREFETCHED_KEYS && tl_batch_next(&batch, &bytes, &len_bytes)) {
        struct tl_message_key *key = &ret_keys[count];
        if (!tl_message_peek_key(bytes, len_bytes, key)) continue;
        if (key->text == NULL) {
            const struct tl_kept_key *kept = tl_numbered_keys_find(table, key->number);
            if (kept == NULL) continue;
            __builtin_prefetch(kept->text->text);
            key->text = kept->text->text;
        }
        count++;
    }
    return count;
}

void conn_prefetch_requests(struct tl_conn *conn, const struct tl_batch *batch)
{
    const struct tl_engine *engine = conn->engine;
    struct tl_message_key peeked[PREFETCHED_KEYS];
    struct tl_key_text keys[PREFETCHED_KEYS];
    if (engine->source.ops->prefetch == NULL) return;
    size_t count = peek_keys(conn, *batch, peeked);
    if (count < 2) return;
    for (size_t i = 0; i < count; i++) {
        size_t text_bytes = peeked[i].text_bytes > 0 ? peeked[i].text_bytes : strlen(peeked[i].text);
        keys[i] = (struct tl_key_text){.text = peeked[i].text, .text_bytes = text_bytes};
    }
    engine->source.ops->prefetch(engine->source.context, keys, count);
}

bool conn_complete_request(struct tl_conn *conn, struct tl_message *message, struct tl_kept_key **ret_kept)
{
    struct conn_latest *latest = &conn->responses.latest;
    message->number = latest->number = tl_from_difference(message->number, latest->number);
    message->step = latest->step = tl_from_difference(message->step, latest->step);
    *ret_kept = NULL;
    if (message->key_form == TL_KEY_TEXT) {
        message->expected_step = tl_from_difference(message->expected_step, message->step);
        return true;
    }
    struct tl_kept_key *key = find_key(conn, message);
    if (key == NULL) return false;
    *ret_kept = key;
    message->expected_step = key->expected_step = tl_from_difference(message->expected_step, key->expected_step);
    if (message->key_form == TL_KEY_AS_BEFORE) {
        message->has_meta_data = true;
    } else if (message->has_meta_data && !tl_kept_key_expect(key, &message->meta_data)) {
        tl_conn_close(conn, &out_of_memory);
        return false;
    }
    return true;
}
