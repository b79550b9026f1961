// SPDX-License-Identifier: Apache-2.0
/* The local transport: what the settings mean for it, how its provider is opened, and what it works with. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/host_id.h"
#include "dataplane/local/local.h"
#include "server/transports/local_settings.h"
#include "server/transports/transport.h"
#include "server/worker_internal.h"

/* How many operations may be posted to one peer at a time. */
#define WORK_COUNT 256
/* The most bytes of one write: a cancel may have to wait for one write. It is so large that the provider copies it past
 * the caches. */
#define PIECE_BYTES (8 * 1024 * 1024)
/* Smaller tensors in memory of users are copied through the pool, because waking a helper thread that reads them takes
 * longer. */
#define REGISTER_BYTES (128 * 1024)
#define MAX_CACHED_COUNT 4096
#define CANCEL_NS (1 * TL_NS_PER_SEC)
/* A data connection that takes longer is not worth waiting for. When dozens of workers on few cores connect to each
 * other, each connection takes seconds; to give one up too early makes the others take longer. */
#define MAX_CONNECT_NS (10 * TL_NS_PER_SEC)

_Static_assert(TL_HOST_BYTES == TL_HOST_ID_BYTES, "a pair address names the host by its id");

static void read_local(const struct tl_settings *settings, struct tl_transport_options *ret_options)
{
    const struct tl_local_settings *local = &settings->local;
    int64_t connect_ns = settings->connect_timeout_ns;
    if (connect_ns > MAX_CONNECT_NS) connect_ns = MAX_CONNECT_NS;
    uint64_t max_pool_bytes = local->max_pool_bytes;
    if (max_pool_bytes == TL_SETTING_AUTO) {
        max_pool_bytes = tl_max_u64(tl_transport_half_of_memory(), local->pool_bytes);
    }
    /* Registering memory costs nothing here, because no page is pinned. */
    const struct tl_memory_options memory = {.pool_bytes = local->pool_bytes,
                                             .max_pool_bytes = max_pool_bytes,
                                             .max_cached_bytes = INT64_MAX,
                                             .max_cached_count = MAX_CACHED_COUNT};
    *ret_options = (struct tl_transport_options){
        .memory = memory,
        .reactor = {.spin_ns = local->spin_ns},
        .engine = {.keys = TL_KEYS_REGION,
                   .is_gpu_proxy_forced = settings->gpu.is_proxy_forced,
                   .slot_count = (uint32_t)local->slot_count,
                   .inline_bytes = TL_INLINE_BYTES,
                   .work_count = WORK_COUNT,
                   .request_count = tl_transport_request_count(settings),
                   .key_count = TL_MAX_KEYS,
                   .piece_bytes = PIECE_BYTES,
                   .register_bytes = REGISTER_BYTES,
                   .copy_bytes = TL_LOCAL_COPY_BYTES,
                   .peer_memory = memory,
                   .is_mapping_allowed = local->map == TL_LOCAL_MAP_FILES,
                   .peer_timeout_ns = local->peer_timeout_ns,
                   .connect_ns = connect_ns,
                   .cancel_ns = CANCEL_NS,
                   .parked_ns = settings->stalled_timeout_ns},
        .attempt_ns = connect_ns + TL_TRANSPORT_REASON_NS,
    };
}

static enum tl_status find_host(void *context, uint8_t ret_host[TL_HOST_BYTES], struct tl_error *ret_error)
{
    (void)context;
    return tl_host_id_get(ret_host, ret_error);
}

/* Lists the only candidate, about which nothing is known before it is opened. */
static enum tl_status list_local(void *context, const struct tl_settings *settings, const char *address,
                                 struct tl_transport_candidate **ret_candidates, size_t *ret_count,
                                 struct tl_error *ret_error)
{
    (void)context;
    (void)settings;
    (void)address;
    struct tl_transport_candidate *candidate = calloc(1, sizeof(*candidate));
    if (candidate == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the data plane");
    *ret_candidates = candidate;
    *ret_count = 1;
    return TL_OK;
}

static enum tl_status open_local(void *context, const struct tl_settings *settings, const char *address, unsigned order,
                                 struct tl_provider **ret_provider, struct tl_error *ret_error)
{
    (void)context;
    (void)address;
    (void)order;
    const struct tl_local_options options = {.socket_folder = settings->local.socket_folder,
                                             .is_reading_forbidden = settings->local.process_vm == TL_PROCESS_VM_OFF};
    return tl_local_open(&options, ret_provider, ret_error);
}

/* Containers that share the folder of the sockets may have networks of their own. */
static const char *address_remedy(const struct tl_settings *settings)
{
    if (settings->local.socket_folder != NULL) return NULL;
    return "set local.socket_folder where containers of one host have networks of their own";
}

/* -------------------------------------------------------------------------------------------------- description -- */

/* Reads the word in brackets in a file of the kernel; "": there is none. */
static void read_choice(const char *path, char *ret_word, size_t capacity)
{
    char line[128] = "";
    ret_word[0] = '\0';
    FILE *file = fopen(path, "re");
    if (file == NULL) return;
    if (fgets(line, sizeof(line), file) == NULL) line[0] = '\0';
    fclose(file);
    const char *begin = strchr(line, '[');
    size_t len = begin != NULL ? strcspn(begin + 1, "]") : 0;
    if (begin != NULL) snprintf(ret_word, capacity, "%.*s", (int)len, begin + 1);
}

static unsigned read_number(const char *path)
{
    unsigned number = 0;
    FILE *file = fopen(path, "re");
    if (file == NULL) return 0;
    if (fscanf(file, "%u", &number) != 1) number = 0;
    fclose(file);
    return number;
}

/* Describes the socket, how memory of users is copied, and which huge pages there are. */
static void describe_local(const struct tl_transport *transport, char *ret_text, size_t capacity)
{
    const struct tl_worker *worker = transport->worker;
    const struct tl_local_settings *local = &worker->settings.local;
    char transparent[32];
    const char *refusal = tl_peers_outside_refusal(worker, transport->source);
    bool is_off = local->process_vm == TL_PROCESS_VM_OFF;
    read_choice("/sys/kernel/mm/transparent_hugepage/shmem_enabled", transparent, sizeof(transparent));
    snprintf(ret_text, capacity,
             "shared memory with workers of this host; socket: %.256s; memory of users: %s%.256s; huge "
             "pages: %u reserved, transparent ones %s",
             local->socket_folder != NULL ? local->socket_folder : "no file",
             is_off            ? "copied twice, local.process_vm is off"
             : refusal != NULL ? "copied twice with some: "
                               : "read with process_vm_readv",
             !is_off && refusal != NULL ? refusal : "",
             read_number("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"),
             transparent[0] != '\0' ? transparent : "unknown");
}

const struct tl_transport_source tl_transport_local = {.name = "local",
                                                       .refusal = tl_local_settings_refusal,
                                                       .read = read_local,
                                                       .find_host = find_host,
                                                       .address_remedy = address_remedy,
                                                       .list = list_local,
                                                       .open = open_local,
                                                       .describe_state = describe_local};
