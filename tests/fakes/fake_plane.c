// SPDX-License-Identifier: Apache-2.0
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fakes/fake_plane.h"

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "server/local_settings.h"
#include "server/worker_internal.h"

#define PATIENCE_NS (60 * TL_NS_PER_SEC)

static enum tl_status list_cards(void *context, const struct tl_settings *settings, const char *address,
                                 struct tl_verbs_candidate **ret_candidates, size_t *ret_count,
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
             card - (is_local ? card->plane->locals : card->plane->cards), spare);
    const struct fake_provider_options options = {
        .needs_no_regions = is_local, .has_no_mapping = !is_local, .has_no_windows = card->has_no_windows};
    card->provider = fake_provider_open(card->plane->fabric, name, &options);
    struct fake_rule fault = card->faults[order];
    fault.provider = card->provider;
    if (fault.kinds != 0) fake_fabric_add_rule(card->plane->fabric, &fault);
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

static void adjust(void *context, struct tl_plane_options *options)
{
    const struct fake_plane *plane = ((struct fake_card *)context)->plane;
    options->engine.is_mapping_allowed = true;
    options->memory.pool_bytes = 4 << 20;
    options->memory.max_pool_bytes = plane->pool_bytes > 0 ? plane->pool_bytes : 64 << 20;
    options->engine.peer_memory.max_pool_bytes = options->memory.max_pool_bytes;
    options->engine.register_bytes = 64 << 10;
    options->engine.silence_ns = plane->silence_ns > 0 ? plane->silence_ns : PATIENCE_NS;
    options->engine.parked_ns = PATIENCE_NS;
    options->engine.cancel_ns = plane->cancel_ns > 0 ? plane->cancel_ns : PATIENCE_NS;
    options->engine.connect_ns = plane->attempt_ns > 0 ? plane->attempt_ns : PATIENCE_NS;
    options->attempt_ns = options->engine.connect_ns;
}

static void init_card(struct fake_plane *plane, struct fake_card *card)
{
    card->plane = plane;
    card->source = tl_plane_verbs;
    card->source.list = list_cards;
    card->source.open = open_card;
    card->source.adjust = adjust;
    card->source.context = card;
}

void fake_plane_init(struct fake_plane *plane, struct cluster *cluster)
{
    cluster->protocol = "auto";
    *plane = (struct fake_plane){.fabric = fake_fabric_create(NULL), .cluster = cluster};
    for (unsigned i = 0; i <= CLUSTER_MAX; i++) {
        init_card(plane, &plane->cards[i]);
        init_card(plane, &plane->locals[i]);
        plane->locals[i].host = 1;
        plane->locals[i].source.name = "local";
        plane->locals[i].source.refusal = tl_local_settings_refusal;
        plane->locals[i].source.find_host = find_host;
    }
}

void fake_plane_fini(struct fake_plane *plane)
{
    const char *why = NULL;
    ck_assert_msg(fake_fabric_is_clean(plane->fabric, &why), "%s", why);
    fake_fabric_destroy(plane->fabric);
}

static enum tl_status open_worker(struct fake_plane *plane, const struct tl_worker_options *options, unsigned place,
                                  struct tl_worker **ret_worker, struct tl_error *ret_error)
{
    char json[CLUSTER_JSON_BYTES];
    struct tl_worker_options with_json = *options;
    cluster_write_json(plane->cluster, json);
    with_json.size_bytes = sizeof(with_json);
    with_json.config_json = json;
    const struct tl_plane_source *const planes[] = {&plane->locals[place].source, &plane->cards[place].source};
    unsigned first = plane->has_local ? 0 : 1;
    return tl_worker_open_with(&with_json, planes + first, 2 - first, ret_worker, ret_error);
}

enum tl_status fake_plane_try(struct fake_plane *plane, unsigned task, enum tl_progress progress,
                              struct tl_error *ret_error)
{
    const struct tl_worker_options options = {.job = "node", .task = task, .progress = progress};
    TL_CHECK(plane->cluster->workers[task] == NULL);
    return open_worker(plane, &options, task, &plane->cluster->workers[task], ret_error);
}

struct tl_worker *fake_plane_open(struct fake_plane *plane, unsigned task, enum tl_progress progress)
{
    struct tl_error error;
    enum tl_status status = fake_plane_try(plane, task, progress, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return plane->cluster->workers[task];
}

struct tl_worker *fake_plane_open_client(struct fake_plane *plane)
{
    const struct tl_worker_options options = {.is_client = true};
    struct tl_worker *worker = NULL;
    struct tl_error error;
    enum tl_status status = open_worker(plane, &options, CLUSTER_MAX, &worker, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return worker;
}
