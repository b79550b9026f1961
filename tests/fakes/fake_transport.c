// SPDX-License-Identifier: Apache-2.0
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/fake_transport.h"

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "server/transports/local_settings.h"
#include "server/worker_internal.h"

#define PATIENCE_NS (60 * TL_NS_PER_SEC)

static enum tl_status list_cards(void *context, const struct tl_settings *settings, const char *address,
                                 struct tl_transport_candidate **ret_candidates, size_t *ret_count,
                                 struct tl_error *ret_error)
{
    const struct fake_card *card = context;
    (void)settings;
    (void)address;
    if (card->is_missing) return tl_error_set(ret_error, TL_NOT_FOUND, "no RDMA device: the slot is empty");
    *ret_count = 1 + card->spare_count;
    *ret_candidates = calloc(*ret_count, sizeof(**ret_candidates));
    TL_CHECK(*ret_candidates != NULL);
    return TL_OK;
}

static enum tl_status open_card(void *context, const struct tl_settings *settings, const char *address, unsigned order,
                                struct tl_provider **ret_provider, struct tl_error *ret_error)
{
    struct fake_card *card = context;
    (void)settings;
    (void)address;
    (void)ret_error;
    char name[64], spare[16] = "";
    if (order > 0) snprintf(spare, sizeof(spare), "-%u", order);
    bool is_local = card->source.find_host != NULL;
    snprintf(name, sizeof(name), "%s%td%s", is_local ? "local" : "card",
             card - (is_local ? card->transport->locals : card->transport->cards), spare);
    const struct fake_provider_options options = {
        .needs_no_regions = is_local, .has_no_mapping = !is_local, .has_no_windows = card->has_no_windows};
    card->provider = fake_provider_open(card->transport->fabric, name, &options);
    struct fake_rule fault = card->faults[order];
    fault.provider = card->provider;
    if (fault.kinds != 0) fake_fabric_add_rule(card->transport->fabric, &fault);
    *ret_provider = card->provider;
    return TL_OK;
}

static enum tl_status find_host(void *context, uint8_t ret_host[TL_HOST_BYTES], struct tl_error *ret_error)
{
    const struct fake_card *card = context;
    (void)ret_error;
    memset(ret_host, card->host, TL_HOST_BYTES);
    return TL_OK;
}

static void adjust(void *context, struct tl_transport_options *options)
{
    const struct fake_transport *transport = ((struct fake_card *)context)->transport;
    options->engine.is_mapping_allowed = true;
    options->memory.pool_bytes = 4 << 20;
    options->memory.max_pool_bytes = transport->pool_bytes > 0 ? transport->pool_bytes : 64 << 20;
    options->engine.peer_memory.max_pool_bytes = options->memory.max_pool_bytes;
    options->engine.register_bytes = 64 << 10;
    options->engine.peer_timeout_ns = transport->peer_timeout_ns > 0 ? transport->peer_timeout_ns : PATIENCE_NS;
    options->engine.parked_ns = PATIENCE_NS;
    options->engine.cancel_ns = transport->cancel_ns > 0 ? transport->cancel_ns : PATIENCE_NS;
    options->engine.connect_ns = transport->attempt_ns > 0 ? transport->attempt_ns : PATIENCE_NS;
    /* The handshake, which knows why it failed, ends first. */
    options->attempt_ns = options->engine.connect_ns + options->engine.connect_ns / 2;
}

static void init_card(struct fake_transport *transport, struct fake_card *card)
{
    card->transport = transport;
    card->source = tl_transport_verbs;
    card->source.list = list_cards;
    card->source.open = open_card;
    card->source.adjust = adjust;
    card->source.context = card;
}

void fake_transport_init(struct fake_transport *transport, struct cluster *cluster)
{
    cluster->protocol = "auto";
    *transport = (struct fake_transport){.fabric = fake_fabric_create(NULL), .cluster = cluster};
    for (unsigned i = 0; i <= CLUSTER_MAX; i++) {
        init_card(transport, &transport->cards[i]);
        init_card(transport, &transport->locals[i]);
        transport->locals[i].host = 1;
        transport->locals[i].source.name = "local";
        transport->locals[i].source.refusal = tl_local_settings_refusal;
        transport->locals[i].source.find_host = find_host;
        transport->locals[i].source.address_remedy = tl_transport_local.address_remedy;
        transport->locals[i].source.describe_state = tl_transport_local.describe_state;
        transport->locals[i].source.describe_card = NULL;
    }
}

void fake_transport_fini(struct fake_transport *transport)
{
    const char *why = NULL;
    ck_assert_msg(fake_fabric_is_clean(transport->fabric, &why), "%s", why);
    fake_fabric_destroy(transport->fabric);
}

static enum tl_status open_worker(struct fake_transport *transport, const struct tl_worker_options *options,
                                  unsigned place, struct tl_worker **ret_worker, struct tl_error *ret_error)
{
    char json[CLUSTER_JSON_BYTES];
    struct tl_worker_options with_json = *options;
    cluster_write_json(transport->cluster, json);
    with_json.size_bytes = sizeof(with_json);
    with_json.config_json = json;
    const struct tl_transport_source *const transports[] = {&transport->locals[place].source,
                                                            &transport->cards[place].source};
    unsigned first = transport->has_local ? 0 : 1;
    return tl_worker_open_with(&with_json, transports + first, 2 - first, ret_worker, ret_error);
}

enum tl_status fake_transport_try(struct fake_transport *transport, unsigned task, enum tl_progress progress,
                                  struct tl_error *ret_error)
{
    const struct tl_worker_options options = {.job = "node", .task = task, .progress = progress};
    TL_CHECK(transport->cluster->workers[task] == NULL);
    return open_worker(transport, &options, task, &transport->cluster->workers[task], ret_error);
}

struct tl_worker *fake_transport_open(struct fake_transport *transport, unsigned task, enum tl_progress progress)
{
    struct tl_error error;
    enum tl_status status = fake_transport_try(transport, task, progress, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return transport->cluster->workers[task];
}

struct tl_worker *fake_transport_open_client(struct fake_transport *transport)
{
    const struct tl_worker_options options = {.is_client = true};
    struct tl_worker *worker = NULL;
    struct tl_error error;
    enum tl_status status = open_worker(transport, &options, CLUSTER_MAX, &worker, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return worker;
}
