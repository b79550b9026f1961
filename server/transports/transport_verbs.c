// SPDX-License-Identifier: Apache-2.0
/* The transport over RDMA cards: what the settings mean for it, which cards it may open, and what is known of them. */
#include "server/transports/transport_verbs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/clock.h"
#include "base/error.h"
#include "server/transports/transport.h"
#include "server/transports/verbs_settings.h"

#define MAX_CACHED_COUNT 4096
#define CANCEL_NS (1 * TL_NS_PER_SEC)
/* After this time it is better to use the link than to wait for a data connection. */
#define MAX_CONNECT_NS (3 * TL_NS_PER_SEC)

static uint64_t or_auto(uint64_t value, uint64_t automatic)
{
    return value != TL_SETTING_AUTO ? value : automatic;
}

/* A ping waits behind the writes that are posted already, and completed writes are signs of life: on a slow network a
 * piece must take less time than peer_timeout. Larger pieces are no faster. */
#define AUTOMATIC_PIECE_BYTES (1024 * 1024)

/* What a peer that writes nothing may cost in pinned memory, besides its slots. */
#define FIRST_PEER_BYTES (1024 * 1024)
/* Larger values are written, also into memory of users, without a copy. Three of these share a slot. */
#define INLINE_BYTES 2560

static void read_verbs(const struct tl_settings *settings, struct tl_transport_options *ret_options)
{
    const struct tl_verbs_settings *verbs = &settings->verbs;
    int64_t connect_ns = settings->connect_timeout_ns;
    if (connect_ns > MAX_CONNECT_NS) connect_ns = MAX_CONNECT_NS;
    *ret_options = (struct tl_transport_options){
        .memory = {.pool_bytes = verbs->pool_bytes,
                   .max_pool_bytes = or_auto(verbs->max_pool_bytes, tl_transport_half_of_memory()),
                   .max_cached_bytes = or_auto(verbs->cached_bytes, tl_transport_half_of_memory()),
                   .max_cached_count = MAX_CACHED_COUNT},
        .reactor = {.spin_ns = verbs->spin_ns},
        .engine = {.keys = verbs->keys == TL_VERBS_KEYS_REGION ? TL_KEYS_REGION : TL_KEYS_WINDOW,
                   /* The card would refuse more than the queue holds. */
                   .slot_count = (uint32_t)tl_min_u64(verbs->slot_count, verbs->queue_depth),
                   .inline_bytes = INLINE_BYTES,
                   .work_count = (uint32_t)verbs->queue_depth,
                   .request_count = tl_transport_request_count(settings),
                   .key_count = TL_MAX_KEYS,
                   .piece_bytes = or_auto(verbs->piece_bytes, AUTOMATIC_PIECE_BYTES),
                   .register_bytes = verbs->register_bytes,
                   /* With keys of regions this is the memory that the peer can write to. It begins small, because
                    * many peers may have nothing to write. */
                   .peer_memory = {.pool_bytes = verbs->pool_bytes,
                                   .first_pool_bytes = FIRST_PEER_BYTES,
                                   .max_pool_bytes = or_auto(verbs->max_pool_bytes, tl_transport_half_of_memory())},
                   .is_bounce_forced = verbs->is_bounce_forced,
                   .is_gpu_proxy_forced = settings->gpu.is_proxy_forced,
                   .is_reading = settings->protocol == TL_PROTOCOL_GRPC_GDR,
                   .peer_timeout_ns = verbs->peer_timeout_ns,
                   .connect_ns = connect_ns,
                   .cancel_ns = CANCEL_NS,
                   .parked_ns = settings->stalled_timeout_ns},
        .attempt_ns = connect_ns + TL_TRANSPORT_REASON_NS,
    };
}

/* -------------------------------------------------------------------------------------------------- candidates -- */

size_t tl_transport_count_usable(const struct tl_verbs_candidate *candidates, size_t count)
{
    size_t usable_count = 0;
    while (usable_count < count && candidates[usable_count].order >= 0)
        usable_count++;
    return usable_count;
}

/* Returns `count` cards as candidates, each with a copy of its card as detail, in one block that the caller frees.
 * NULL: there is no memory. */
static struct tl_transport_candidate *wrap(const struct tl_verbs_candidate *cards, size_t count)
{
    struct tl_transport_candidate *items = calloc(count, sizeof(*items) + sizeof(*cards));
    if (items == NULL) return NULL;
    struct tl_verbs_candidate *details = (struct tl_verbs_candidate *)(void *)(items + count);
    for (size_t i = 0; i < count; i++) {
        details[i] = cards[i];
        items[i].detail = &details[i];
        snprintf(items[i].device, sizeof(items[i].device), "%s:%u", cards[i].device, cards[i].port);
        snprintf(items[i].name, sizeof(items[i].name), "%s GID %d %s", items[i].device, cards[i].gid_index,
                 cards[i].gid);
    }
    return items;
}

static enum tl_status list_verbs(void *context, const struct tl_settings *settings, const char *address,
                                 struct tl_transport_candidate **ret_candidates, size_t *ret_count,
                                 struct tl_error *ret_error)
{
    (void)context;
    char host[TL_VERBS_HOST_BYTES];
    struct tl_verbs_options options;
    struct tl_verbs_candidate *cards;
    size_t count;
    /* Resolving a name may take long, so that it is done only where there is a card. */
    enum tl_status status = tl_verbs_settings_read(settings, NULL, host, &options, ret_error);
    if (status == TL_OK) status = tl_verbs_list(&options, &cards, &count, ret_error);
    if (status != TL_OK) return status;
    free(cards);
    status = tl_verbs_settings_read(settings, address, host, &options, ret_error);
    if (status == TL_OK) status = tl_verbs_list(&options, &cards, &count, ret_error);
    if (status != TL_OK) return status;
    size_t usable_count = tl_transport_count_usable(cards, count);
    struct tl_transport_candidate *candidates = usable_count > 0 ? wrap(cards, usable_count) : NULL;
    if (candidates != NULL) {
        *ret_candidates = candidates;
        *ret_count = usable_count;
    } else if (usable_count > 0) {
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the list of cards");
    } else {
        status = tl_verbs_explain(&options, cards, count, ret_error);
    }
    free(cards);
    return status;
}

static enum tl_status open_verbs(void *context, const struct tl_settings *settings, const char *address, unsigned order,
                                 struct tl_provider **ret_provider, struct tl_error *ret_error)
{
    (void)context;
    char host[TL_VERBS_HOST_BYTES];
    struct tl_verbs_options options;
    enum tl_status status = tl_verbs_settings_read(settings, address, host, &options, ret_error);
    if (status != TL_OK) return status;
    return tl_verbs_open(&options, order, ret_provider, ret_error);
}

/* Describes the card as it was when it was opened, with the present state of its port, since cables are pulled. */
static void describe_verbs(const void *detail, const struct tl_settings *settings,
                           struct tl_data_plane_description *ret_description)
{
    static const struct tl_verbs_candidate no_card;
    const struct tl_verbs_candidate *card = detail != NULL ? detail : &no_card;
    ret_description->device = strdup(card->device);
    ret_description->port = card->port;
    ret_description->gid_index = card->gid_index > 0 ? (uint32_t)card->gid_index : 0;
    ret_description->gid = strdup(card->gid);
    ret_description->gid_type = strdup(card->gid_type);
    ret_description->interface = strdup(card->interface);
    ret_description->port_state = strdup(detail != NULL ? tl_verbs_port_state(card->device, card->port) : "");
    ret_description->link_layer = strdup(card->link_layer);
    ret_description->mtu_bytes = (uint32_t)tl_min_u64(card->mtu_bytes, settings->verbs.mtu_bytes);
}

/* Names the card, and says so where this worker reads what it receives. */
static void describe_reading(const struct tl_transport *transport, char *ret_text, size_t capacity)
{
    static const char written[] = "owners write what it receives, in spite of grpc+gdr";
    const char *device = transport->describes_device;
    const char *failure = transport->provider->read_failure;
    if (!transport->options.engine.is_reading) {
        snprintf(ret_text, capacity, "%s", device);
    } else if (transport->options.engine.keys != TL_KEYS_WINDOW) {
        snprintf(ret_text, capacity, "%s; its verbs.keys is region: %s", device, written);
    } else if (failure != NULL) {
        snprintf(ret_text, capacity, "%s; %s: %s", device, failure, written);
    } else {
        snprintf(ret_text, capacity, "%s; what it receives is read from its owner (grpc+gdr)", device);
    }
}

const struct tl_transport_source tl_transport_verbs = {.name = "verbs",
                                                       .refusal = tl_verbs_settings_refusal,
                                                       .read = read_verbs,
                                                       .list = list_verbs,
                                                       .open = open_verbs,
                                                       .describe_state = describe_reading,
                                                       .describe_card = describe_verbs};

/* ------------------------------------------------------------------------------------------------------- tools -- */

struct verbs_source {
    const struct tl_verbs_options *options;
    tl_transport_failed_fn *failed;
    void *context;
};

static enum tl_status open_listed(void *context, unsigned order, struct tl_provider **ret_provider,
                                  struct tl_error *ret_error)
{
    const struct verbs_source *source = context;
    return tl_verbs_open(source->options, order, ret_provider, ret_error);
}

static void report_failed(void *context, unsigned order, const char *name, const char *why)
{
    const struct verbs_source *source = context;
    if (source->failed != NULL) source->failed(source->context, order, name, why);
}

enum tl_status tl_transport_choose_verbs(const struct tl_verbs_options *options,
                                         const struct tl_verbs_candidate *candidates, size_t count,
                                         tl_transport_failed_fn *failed, void *context, unsigned *ret_order,
                                         struct tl_error *ret_error)
{
    struct verbs_source source = {options, failed, context};
    size_t usable_count = tl_transport_count_usable(candidates, count);
    struct tl_transport_candidate *items = wrap(candidates, usable_count);
    if (items == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the list of cards");
    const struct tl_transport_candidates usable = {.items = items,
                                                   .count = usable_count,
                                                   .keys = options->keys,
                                                   .open = open_listed,
                                                   .failed = report_failed,
                                                   .context = &source};
    struct tl_transport_choice choice;
    enum tl_status status = tl_transport_choose(&usable, &choice, ret_error);
    free(items);
    if (status != TL_OK) return status;
    choice.provider->ops->close(choice.provider);
    *ret_order = choice.order;
    return TL_OK;
}
