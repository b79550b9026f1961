// SPDX-License-Identifier: Apache-2.0
/* What the settings mean for the data plane: which card, how much memory, which limits. */
#include <stdlib.h>

#include "base/arith.h"
#include "base/clock.h"
#include "server/transports/transport.h"
#include "server/transports/transport_choice.h"
#include "server/transports/verbs_settings.h"

#define MAX_CACHED_COUNT 4096
/* Open requests to one peer, and from it. */
#define REQUEST_COUNT 1024
/* Keys whose meta-data is remembered, per peer. */
#define CACHE_COUNT 4096
#define CANCEL_NS (1 * TL_NS_PER_SEC)
/* A data connection that takes longer is not worth waiting for. */
#define MAX_CONNECT_NS (3 * TL_NS_PER_SEC)

static uint64_t or_auto(uint64_t value, uint64_t automatic)
{
    return value != TL_SETTING_AUTO ? value : automatic;
}

/* A ping waits behind the writes that are posted already, and completed writes are signs of life: a piece must take
 * less than `silence` on a slow network. Larger ones are no faster. */
#define AUTOMATIC_PIECE_BYTES (1024 * 1024)

static void read_verbs(const struct tl_settings *settings, struct tl_transport_options *ret_options)
{
    const struct tl_verbs_settings *verbs = &settings->verbs;
    int64_t connect_ns = settings->connect_timeout_ns;
    if (connect_ns > MAX_CONNECT_NS) connect_ns = MAX_CONNECT_NS;
    *ret_options = (struct tl_transport_options){
        .memory = {.pool_bytes = verbs->pool_bytes,
                   .max_pool_bytes = or_auto(verbs->max_pool_bytes, tl_verbs_settings_half_of_memory()),
                   .max_cached_bytes = or_auto(verbs->cached_bytes, tl_verbs_settings_half_of_memory()),
                   .max_cached_count = MAX_CACHED_COUNT},
        .reactor = {.spin_ns = verbs->spin_ns},
        .engine = {.keys = verbs->keys == TL_VERBS_KEYS_REGION ? TL_KEYS_REGION : TL_KEYS_WINDOW,
                   /* More than the queue holds would be refused. */
                   .slot_count = (uint32_t)tl_min_u64(verbs->slot_count, verbs->queue_depth),
                   .work_count = (uint32_t)verbs->queue_depth,
                   .request_count = REQUEST_COUNT,
                   .cache_count = CACHE_COUNT,
                   .piece_bytes = or_auto(verbs->piece_bytes, AUTOMATIC_PIECE_BYTES),
                   .register_bytes = verbs->register_bytes,
                   /* Under keys of regions: what the peer can write to. */
                   .peer_memory = {.pool_bytes = verbs->pool_bytes,
                                   .max_pool_bytes =
                                       or_auto(verbs->max_pool_bytes, tl_verbs_settings_half_of_memory())},
                   .is_bounce_forced = verbs->is_bounce_forced,
                   .peer_timeout_ns = verbs->peer_timeout_ns,
                   .connect_ns = connect_ns,
                   .cancel_ns = CANCEL_NS,
                   .parked_ns = settings->stalled_timeout_ns,
                   .reroute_ns = settings->rdma == TL_RDMA_REQUIRE ? 0 : TL_TRANSPORT_REROUTE_NS},
        .attempt_ns = connect_ns,
    };
}

/* ------------------------------------------------------------------------------------------------------- verbs -- */

static enum tl_status list_verbs(void *context, const struct tl_settings *settings, const char *address,
                                 struct tl_verbs_candidate **ret_candidates, size_t *ret_count,
                                 struct tl_error *ret_error)
{
    (void)context;
    char host[TL_VERBS_HOST_BYTES];
    struct tl_verbs_options options;
    struct tl_verbs_candidate *candidates;
    size_t count;
    /* Looking a name up may take long: only where there is any card. */
    enum tl_status status = tl_verbs_settings_read(settings, NULL, host, &options, ret_error);
    if (status == TL_OK) status = tl_verbs_list(&options, &candidates, &count, ret_error);
    if (status != TL_OK) return status;
    free(candidates);
    status = tl_verbs_settings_read(settings, address, host, &options, ret_error);
    if (status == TL_OK) status = tl_verbs_list(&options, &candidates, &count, ret_error);
    if (status != TL_OK) return status;
    size_t usable_count = tl_transport_count_usable(candidates, count);
    if (usable_count == 0) {
        status = tl_verbs_explain(&options, candidates, count, ret_error);
        free(candidates);
        return status;
    }
    *ret_candidates = candidates;
    *ret_count = usable_count;
    return TL_OK;
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

const struct tl_transport_source tl_transport_verbs = {
    .name = "verbs", .refusal = tl_verbs_settings_refusal, .read = read_verbs, .list = list_verbs, .open = open_verbs};
