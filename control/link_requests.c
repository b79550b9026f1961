// SPDX-License-Identifier: Apache-2.0
/*
 * The requests of a link, out and in, in either form, and the keys that have numbers on it.
 *
 * Happy path: both Hellos say that their senders read packed records, and how many keys they keep; requests then travel
 * packed. A key's text travels once, and gets the next number of the link at both ends; from then on the number
 * travels. When all numbers are used, further keys travel as text each time. A peer that does not read packed records
 * gets the messages of protobuf, and may send these in any case. Failure modes: a record that is none, a number that
 * was not sent, or a text that is no key ends the link.
 *
 * What a peer can make us keep is bounded. A task of the cluster has one link, for TL_MAX_KEY_NUMBERS keys. All other
 * callers, which may be many, count as clients whatever they call themselves. Together they have the numbers of two
 * such links; a client that comes when these are used up gets none.
 */
#include <string.h>

#include "base/error.h"
#include "base/text.h"
#include "control/link_frame.h"
#include "tensor/part.h"

/* Keys that are kept for one client. */
#define CLIENT_KEYS (TL_MAX_KEY_NUMBERS / 2)
/* So many requests of a frame are read before they are started. */
#define READ_REQUESTS 32

/* -------------------------------------------------------------------------------------------------------- keys -- */

struct tl_shares *tl_link_create_key_shares(void)
{
    return tl_shares_create("keys of clients", 2 * TL_MAX_KEY_NUMBERS);
}

void link_keys_offer(struct tl_link *link)
{
    struct tl_kept_keys *keys = &link->keys.kept;
    if (link->is_ours || link->keys.is_of_task) {
        keys->limit = TL_MAX_KEY_NUMBERS;
    } else if (tl_shares_take(link->control->client_keys, &link->peer.client, CLIENT_KEYS, &link->keys.share, NULL) ==
               TL_OK) {
        keys->limit = CLIENT_KEYS;
    }
}

void link_keys_agree(struct tl_link *link, const Tensorlane__V1__Hello *hello)
{
    link->is_packed = hello->reads_packed != 0;
    if (link->is_packed) tl_key_numbers_init(&link->keys.sent, hello->kept_keys);
}

void link_keys_fini(struct tl_link *link)
{
    if (link->keys.share != NULL) tl_shares_give(link->keys.share, CLIENT_KEYS);
    tl_key_numbers_fini(&link->keys.sent);
    tl_kept_keys_fini(&link->keys.kept);
}

/* --------------------------------------------------------------------------------------------------------- out -- */

static void fill_request(const struct link_fetch *entry, Tensorlane__V1__Request *ret_request)
{
    const struct tl_fetch *fetch = entry->fetch;
    tensorlane__v1__request__init(ret_request);
    ret_request->number = entry->number;
    ret_request->key = (char *)fetch->key;
    ret_request->step = fetch->step;
    ret_request->subscription = tl_fetch_subscription(fetch);
    ret_request->wants_checksum = fetch->wants_checksum;
    ret_request->priority = fetch->priority;
    if (fetch->received_bytes > 0) {
        ret_request->publication = fetch->publication;
        ret_request->resume_offset = fetch->received_bytes;
    }
}

static void pack_request(struct tl_link *link, struct tl_packer *packer, const struct link_fetch *entry)
{
    Tensorlane__V1__Request request;
    struct tl_packed_key key = {.text = NULL};
    fill_request(entry, &request);
    size_t key_bytes = strlen(request.key);
    enum tl_key_status status = tl_key_numbers_get(&link->keys.sent, request.key, key_bytes, &key.number);
    if (status != TL_KEY_WAS_SENT) {
        key = (struct tl_packed_key){.text = request.key, .text_bytes = key_bytes, .is_kept = status == TL_KEY_IS_NEW};
    }
    tl_pack_request(packer, &request, &key);
}

void link_requests_add(struct tl_link *link, struct tl_frame_builder *builder)
{
    /* An answer will show that the peer has handled this frame, and with it these. */
    uint64_t framed_before = link->confirmed_count + link->framed_count + builder->frame.n_received;
    while (!tl_list_is_empty(&link->to_request) && builder->request_count < LINK_FRAME_REQUESTS &&
           builder->head_bytes < LINK_FRAME_HEAD_BYTES) {
        struct link_fetch *entry =
            TL_CONTAINER_OF(tl_list_pop_front(&link->to_request), struct link_fetch, request_link);
        tl_list_push_back(&link->asked, &entry->request_link);
        entry->is_asked = true;
        entry->framed_before = framed_before;
        entry->fetch->is_unsettled = false; /* it has its end here, or the link breaks */
        size_t packed_before = builder->packed_requests.used;
        if (link->is_packed) {
            pack_request(link, &builder->packed_requests, entry);
            builder->head_bytes += builder->packed_requests.used - packed_before;
        } else {
            fill_request(entry, &builder->requests[builder->request_count]);
            builder->head_bytes += strlen(entry->fetch->key) + 64;
        }
        builder->request_count++;
    }
    if (!link->is_packed) builder->frame.n_requests = builder->request_count;
}

/* ---------------------------------------------------------------------------------------------------------- in -- */

/* Gives the key as the serve needs it: kept by the link, or a text that the serve copies. False: the link ends. */
static bool find_key(struct tl_link *link, const struct tl_packed_key *key, struct link_key *ret_key)
{
    struct tl_kept_keys *kept = &link->keys.kept;
    *ret_key = (struct link_key){.text = key->text, .text_bytes = key->text_bytes};
    if (key->text == NULL) {
        ret_key->text = tl_kept_keys_get(kept, key->number);
        ret_key->is_kept = true;
        if (ret_key->text == NULL) link_protocol_error(link, "the key number %u was not sent", key->number);
        if (ret_key->text != NULL) ret_key->text_bytes = strlen(ret_key->text);
    } else if (key->text_bytes == 0 || key->text_bytes > TL_MAX_KEY_BYTES ||
               !tl_text_is_utf8(key->text, key->text_bytes)) {
        link_protocol_error(link, "a key of %zu bytes that is missing, too long or not UTF-8", key->text_bytes);
        ret_key->text = NULL;
    } else if (key->is_kept && kept->count >= kept->limit) {
        link_protocol_error(link, "more than %u keys with numbers", kept->limit);
        ret_key->text = NULL;
    } else if (key->is_kept) {
        ret_key->text = tl_kept_keys_add(kept, key->text, key->text_bytes);
        ret_key->is_kept = true;
        struct tl_error error;
        tl_error_set(&error, TL_UNAVAILABLE, "%s: no memory for a key", link->control->options.self.name);
        if (ret_key->text == NULL) tl_link_close(link, &error);
    }
    return ret_key->text != NULL;
}

static bool has_too_many(struct tl_link *link, size_t count)
{
    if (count <= LINK_MAX_REQUESTS) return false;
    link_protocol_error(link, "%zu requests in a frame; at most %d are possible", count, LINK_MAX_REQUESTS);
    return true;
}

/* Starts requests from link->held.handled_requests on while the quota lasts, which the source may use up as well. */
static void handle_plain(struct tl_link *link, const Tensorlane__V1__Frame *frame)
{
    struct tl_quota *quota = tl_loop_quota(link->control->loop);
    size_t *i = &link->held.handled_requests;
    while (*i < frame->n_requests && tl_quota_left(quota) > 0 && link->state != LINK_CLOSING) {
        const Tensorlane__V1__Request *request = frame->requests[(*i)++];
        struct tl_error error;
        tl_quota_use(quota, 1);
        if (tl_wire_text(request->key, 1, TL_MAX_KEY_BYTES, "key", &error) != TL_OK) {
            link_protocol_error(link, "%s", error.message);
            return;
        }
        const struct link_key key = {.text = request->key, .text_bytes = strlen(request->key)};
        link_serve_start(link, request, &key);
    }
}

/* Requests that were read and not started yet. */
struct read_requests {
    Tensorlane__V1__Request requests[READ_REQUESTS];
    struct link_key keys[READ_REQUESTS];
    size_t count;
};

/* Starts what was read, with one look ahead at all of its keys. */
static void start_read(struct tl_link *link, struct read_requests *read)
{
    const struct tl_source_ops *source = &link->control->options.handlers->source;
    struct tl_key_text keys[READ_REQUESTS];
    for (size_t i = 0; i < read->count; i++)
        keys[i] = (struct tl_key_text){.text = read->keys[i].text, .text_bytes = read->keys[i].text_bytes};
    if (read->count > 1 && source->prefetch != NULL) source->prefetch(link->control->options.worker, keys, read->count);
    for (size_t i = 0; i < read->count && link->state != LINK_CLOSING; i++)
        link_serve_start(link, &read->requests[i], &read->keys[i]);
    read->count = 0;
}

/* Reads the next request. Returns false when the link ends. */
static bool read_request(struct tl_link *link, struct tl_unpacker *unpacker, Tensorlane__V1__Request *ret_request,
                         struct tl_packed_key *ret_key)
{
    struct tl_error error;
    if (tl_unpack_request(unpacker, ret_request, ret_key, &error) == TL_OK) return true;
    link_protocol_error(link, "%s", error.message);
    return false;
}

/* Whether the key names a part. The owner may copy it as soon as the request is started, and no look ahead finds it. */
static bool is_of_part(const struct link_key *key)
{
    const size_t prefix_bytes = sizeof(TL_PART_PREFIX) - 1;
    return key->text_bytes >= prefix_bytes && memcmp(key->text, TL_PART_PREFIX, prefix_bytes) == 0;
}

/* Records that were handled are read again for the differences of those behind them. A key cannot be read twice, so
 * every record that is read is started. A part is the last one of its batch, because its copy may use up the quota.
 * Returns whether all were handled. */
static bool handle_packed(struct tl_link *link, const Tensorlane__V1__Frame *frame)
{
    struct tl_quota *quota = tl_loop_quota(link->control->loop);
    struct tl_unpacker unpacker = tl_unpacker_begin(&frame->packed_requests);
    struct read_requests read;
    size_t begin = link->held.handled_requests;
    size_t i = frame->n_requests;
    read.count = 0;
    for (; !tl_unpacker_is_at_end(&unpacker) && (i < begin || tl_quota_left(quota) > 0) && link->state != LINK_CLOSING;
         i++) {
        struct tl_packed_key key;
        if (has_too_many(link, i + 1) || !read_request(link, &unpacker, &read.requests[read.count], &key)) return false;
        if (i < begin) continue;
        tl_quota_use(quota, 1);
        if (!find_key(link, &key, &read.keys[read.count])) return false;
        read.count++;
        if (read.count == READ_REQUESTS || is_of_part(&read.keys[read.count - 1])) start_read(link, &read);
    }
    start_read(link, &read);
    link->held.handled_requests = i;
    return tl_unpacker_is_at_end(&unpacker) && link->state != LINK_CLOSING;
}

bool link_requests_handle(struct tl_link *link, const Tensorlane__V1__Frame *frame)
{
    if (has_too_many(link, frame->n_requests)) return false;
    handle_plain(link, frame);
    if (link->state == LINK_CLOSING || link->held.handled_requests < frame->n_requests) return false;
    return handle_packed(link, frame);
}
