// SPDX-License-Identifier: Apache-2.0
/* What the settings mean for the data plane: which card, how much memory, which limits. */
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "dataplane/verbs.h"
#include "server/plane.h"

#define MAX_HOST_BYTES 256
#define MAX_CACHED_COUNT 4096
/* Open requests to one peer, and from it. */
#define REQUEST_COUNT 1024
/* Keys whose meta-data is remembered, per peer. */
#define CACHE_COUNT 4096
#define CANCEL_NS (1 * TL_NS_PER_SEC)
/* A data path that takes longer is not worth waiting for. */
#define MAX_CONNECT_NS (3 * TL_NS_PER_SEC)

static uint64_t half_of_memory(void)
{
    long pages = sysconf(_SC_PHYS_PAGES);
    long page_bytes = sysconf(_SC_PAGESIZE);
    if (pages <= 0 || page_bytes <= 0) return UINT64_C(1) << 30;
    return (uint64_t)pages / 2 * (uint64_t)page_bytes;
}

static uint64_t or_auto(uint64_t value, uint64_t automatic)
{
    return value != TL_SETTING_AUTO ? value : automatic;
}

void tl_plane_options_of(const struct tl_settings *settings, struct tl_plane_options *ret_options)
{
    const struct tl_verbs_settings *verbs = &settings->verbs;
    int64_t connect_ns = settings->connect_timeout_ns;
    if (connect_ns > MAX_CONNECT_NS) connect_ns = MAX_CONNECT_NS;
    *ret_options = (struct tl_plane_options){
        .memory = {.pool_bytes = verbs->pool_bytes,
                   .max_pool_bytes = or_auto(verbs->max_pool_bytes, half_of_memory()),
                   .max_cached_bytes = or_auto(verbs->cached_bytes, half_of_memory()),
                   .max_cached_count = MAX_CACHED_COUNT},
        .reactor = {.spin_ns = verbs->spin_ns},
        .engine = {.keys = verbs->keys == TL_VERBS_KEYS_REGION ? TL_KEYS_REGION : TL_KEYS_WINDOW,
                   .slot_count = (uint32_t)verbs->slot_count,
                   .work_count = (uint32_t)verbs->queue_depth,
                   .request_count = REQUEST_COUNT,
                   .cache_count = CACHE_COUNT,
                   .piece_bytes = or_auto(verbs->piece_bytes, 0),
                   .register_bytes = verbs->register_bytes,
                   .is_bounce_forced = verbs->is_bounce_forced,
                   .silence_ns = verbs->silence_ns,
                   .connect_ns = connect_ns,
                   .cancel_ns = CANCEL_NS},
        .attempt_ns = connect_ns,
    };
}

/* --------------------------------------------------------------------------------------------------------- verbs -- */

/* The address behind a host, numeric; the first that the system knows. Errors: TL_NOT_FOUND: it knows none. */
static enum tl_status find_host(const char *address, char ret_host[MAX_HOST_BYTES], struct tl_error *ret_error)
{
    char host[MAX_HOST_BYTES];
    uint16_t port;
    enum tl_status status = tl_address_split(address, host, sizeof(host), &port, ret_error);
    if (status != TL_OK) return status;
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    struct addrinfo *found;
    int problem = getaddrinfo(host, NULL, &hints, &found);
    if (problem == 0) {
        problem = getnameinfo(found->ai_addr, found->ai_addrlen, ret_host, MAX_HOST_BYTES, NULL, 0, NI_NUMERICHOST);
        freeaddrinfo(found);
    }
    if (problem == 0) return TL_OK;
    return tl_error_set(ret_error, TL_NOT_FOUND, "the card follows from the worker's address, but %s: %s", host,
                        gai_strerror(problem));
}

/* The one place where settings become options of the verbs provider. host: the worker's own, numeric; NULL: none. */
static void verbs_options_of(const struct tl_verbs_settings *verbs, const char *host,
                             struct tl_verbs_options *ret_options)
{
    tl_verbs_options_init(ret_options);
    ret_options->address = host;
    ret_options->devices = verbs->devices;
    ret_options->port = (int)or_auto(verbs->port, 0);
    ret_options->gid_index = verbs->gid_index != TL_SETTING_AUTO ? (int)verbs->gid_index : -1;
    ret_options->mtu_bytes = (uint32_t)or_auto(verbs->mtu_bytes, 0);
    ret_options->service_level = (int)verbs->service_level;
    ret_options->traffic_class = (int)verbs->traffic_class;
    ret_options->timeout = (int)verbs->timeout;
    ret_options->retry_count = (int)verbs->retry_count;
    ret_options->pkey_index = (int)verbs->pkey_index;
    ret_options->queue_depth = (uint32_t)verbs->queue_depth;
    ret_options->max_write_bytes = or_auto(verbs->piece_bytes, 0);
    ret_options->keys = verbs->keys == TL_VERBS_KEYS_REGION ? TL_KEYS_REGION : TL_KEYS_WINDOW;
}

static enum tl_status open_verbs(void *context, const struct tl_settings *settings, const char *address,
                                 struct tl_provider **ret_provider, struct tl_error *ret_error)
{
    (void)context;
    char host[MAX_HOST_BYTES];
    struct tl_verbs_options options;
    struct tl_verbs_candidate *candidates;
    size_t count;
    verbs_options_of(&settings->verbs, NULL, &options);
    /* Looking a name up may take long: only where there is any card. */
    enum tl_status status = tl_verbs_list(&options, &candidates, &count, ret_error);
    if (status != TL_OK) return status;
    free(candidates);
    if (address != NULL) status = find_host(address, host, ret_error);
    if (status != TL_OK) return status;
    verbs_options_of(&settings->verbs, address != NULL ? host : NULL, &options);
    return tl_verbs_open(&options, 0, ret_provider, ret_error);
}

const struct tl_plane_source tl_plane_verbs = {.open = open_verbs};
