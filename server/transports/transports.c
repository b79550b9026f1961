// SPDX-License-Identifier: Apache-2.0
#include "server/transports/transports.h"

#include <stdio.h>
#include <string.h>

#include "base/arith.h"
#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "server/worker_internal.h"

#define ADDRESS(source) &source,
const struct tl_transport_source *const tl_transports_all[TL_MAX_TRANSPORTS] = {TL_TRANSPORTS(ADDRESS)};

void tl_transports_join(const struct tl_worker *worker, const char *const *reasons, size_t count, char *ret_text,
                        size_t capacity)
{
    size_t wanted_count = 0, used = 0;
    for (size_t i = 0; i < worker->data_plane.transport_count; i++)
        wanted_count += worker->data_plane.transports[i].is_wanted;
    ret_text[0] = '\0';
    for (size_t i = 0; i < count && used < capacity; i++) {
        const struct tl_transport_slot *slot = &worker->data_plane.transports[i];
        /* A transport that the settings exclude is not mentioned, unless they exclude all. */
        if (reasons[i][0] == '\0' || (!slot->is_wanted && (wanted_count > 0 || i > 0))) continue;
        size_t name_len = strlen(slot->source->name);
        /* Messages of a provider begin with its name. */
        bool has_name = strncmp(reasons[i], slot->source->name, name_len) == 0 && reasons[i][name_len] == ':';
        bool must_name = wanted_count > 1 && !has_name;
        int len = snprintf(ret_text + used, capacity - used, "%s%s%s%.480s", used > 0 ? "; " : "",
                           must_name ? slot->source->name : "", must_name ? ": " : "", reasons[i]);
        used += (size_t)len;
    }
}

void tl_transports_require(const struct tl_worker *worker, enum tl_status code, const char *where, const char *reasons,
                           struct tl_error *ret_error)
{
    char names[128] = "";
    for (size_t i = 0; i < worker->data_plane.transport_count; i++) {
        const struct tl_transport_slot *slot = &worker->data_plane.transports[i];
        size_t len = strlen(names);
        if (slot->is_wanted)
            snprintf(names + len, sizeof(names) - len, "%s%s", len > 0 ? " or " : "", slot->source->name);
    }
    tl_error_set(ret_error, code,
                 "rdma is \"require\", but no tensor can travel %s over %s: %.600s; repair that, or set rdma to "
                 "\"prefer\", which allows gRPC",
                 where, names, reasons);
}

/* ----------------------------------------------------------------------------------------------------- opening -- */

static enum tl_status open_slot(struct tl_worker *worker, struct tl_transport_slot *slot, bool has_thread)
{
    const struct tl_transport_source *source = slot->source;
    enum tl_status status = TL_OK;
    /* The host id is read even when the transport is not wanted, so that a peer of this host that offers it gets the
     * reason. */
    if (source->find_host != NULL) status = source->find_host(source->context, worker->self.host, &slot->error);
    if (!slot->is_wanted) return TL_OK;
    if (status == TL_OK) status = tl_transport_create(worker, source, has_thread, &slot->transport, &slot->error);
    if (status != TL_OK) {
        slot->reason = slot->error.message;
        return status;
    }
    worker->executor.is_only = false;
    return TL_OK;
}

/* Logs that a transport is missing. A machine without a card is worth a warning only if the configuration asks for one;
 * a transport within the host is always worth one. */
static void log_lack(const struct tl_worker *worker, const struct tl_transport_slot *slot)
{
    bool is_of_host = slot->source->find_host != NULL;
    bool is_changed = worker->settings.protocol != TL_PROTOCOL_AUTO || slot->error.code != TL_NOT_FOUND || is_of_host;
    TL_LOG(is_changed ? TL_LOG_WARN : TL_LOG_DEBUG, "no data plane, tensors travel another way",
           TL_STR("worker", worker->self.name), TL_STR("transport", slot->source->name),
           TL_STR("reason", slot->error.message));
}

static enum tl_status refuse_without(const struct tl_worker *worker, struct tl_error *ret_error)
{
    const char *reasons[TL_MAX_TRANSPORTS];
    char text[TL_ERROR_MESSAGE_BYTES];
    enum tl_status code = TL_UNAVAILABLE;
    for (size_t i = 0; i < worker->data_plane.transport_count; i++) {
        const struct tl_transport_slot *slot = &worker->data_plane.transports[i];
        reasons[i] = slot->reason;
        if (slot->is_wanted) code = slot->error.code;
    }
    tl_transports_join(worker, reasons, worker->data_plane.transport_count, text, sizeof(text));
    tl_transports_require(worker, code, "from here", text, ret_error);
    return code;
}

enum tl_status tl_transports_create(struct tl_worker *worker, const struct tl_transport_source *const *sources,
                                    size_t count, bool has_thread, struct tl_error *ret_error)
{
    TL_CHECK(count <= TL_MAX_TRANSPORTS);
    worker->data_plane.transport_count = count;
    worker->executor.is_only = true;
    bool is_any_wanted = false;
    for (size_t i = 0; i < count; i++) {
        struct tl_transport_slot *slot = &worker->data_plane.transports[i];
        slot->source = sources[i];
        slot->reason = sources[i]->refusal(&worker->settings);
        slot->is_wanted = slot->reason == NULL;
        is_any_wanted |= slot->is_wanted;
    }
    worker->data_plane.is_transport_required = is_any_wanted && worker->settings.rdma == TL_RDMA_REQUIRE;
    for (size_t i = 0; i < count; i++) {
        struct tl_transport_slot *slot = &worker->data_plane.transports[i];
        if (open_slot(worker, slot, has_thread) == TL_OK) continue;
        if (!worker->data_plane.is_transport_required) log_lack(worker, slot);
    }
    if (worker->data_plane.is_transport_required && tl_transports_count(worker) == 0)
        return refuse_without(worker, ret_error);
    return TL_OK;
}

void tl_transports_destroy(struct tl_worker *worker)
{
    for (size_t i = 0; i < worker->data_plane.transport_count; i++)
        tl_transport_destroy(worker->data_plane.transports[i].transport);
}

/* ------------------------------------------------------------------------------------------------------ asking -- */

size_t tl_transports_count(const struct tl_worker *worker)
{
    size_t count = 0;
    for (size_t i = 0; i < worker->data_plane.transport_count; i++)
        count += worker->data_plane.transports[i].transport != NULL;
    return count;
}

struct tl_transport *tl_transport_needing_regions(const struct tl_worker *worker)
{
    for (size_t i = 0; i < worker->data_plane.transport_count; i++) {
        struct tl_transport *transport = worker->data_plane.transports[i].transport;
        if (transport != NULL && transport->provider->limits.needs_regions) return transport;
    }
    return NULL;
}

/* Peers ping four times during the peer time-out; the reactor is driven twice as often. */
#define BEATS_PER_PEER_TIMEOUT 8

size_t tl_transports_polled(const struct tl_worker *worker, struct tl_polled_reactor *ret_reactors)
{
    size_t count = 0;
    for (size_t i = 0; i < worker->data_plane.transport_count; i++) {
        struct tl_transport *transport = worker->data_plane.transports[i].transport;
        if (transport == NULL) continue;
        ret_reactors[count++] =
            (struct tl_polled_reactor){.reactor = transport->reactor,
                                       .executor = &transport->executor,
                                       .thread = transport->has_thread ? &transport->thread : NULL,
                                       .spin_ns = transport->options.reactor.spin_ns,
                                       .beat_ns = transport->options.engine.peer_timeout_ns / BEATS_PER_PEER_TIMEOUT};
    }
    return count;
}

/* Adds one struct of counters to another. */
static void add_counters(void *to, const void *from, size_t size_bytes)
{
    uint64_t *sums = to;
    const uint64_t *values = from;
    for (size_t i = 0; i < size_bytes / sizeof(*sums); i++)
        sums[i] += values[i];
}

void tl_transports_get_stats(struct tl_worker *worker, struct tl_engine_stats *ret_engine,
                             struct tl_memory_stats *ret_memory, struct tl_reactor_stats *ret_reactor)
{
    *ret_engine = (struct tl_engine_stats){0};
    *ret_memory = (struct tl_memory_stats){0};
    *ret_reactor = (struct tl_reactor_stats){0};
    for (size_t i = 0; i < worker->data_plane.transport_count; i++) {
        struct tl_transport *transport = worker->data_plane.transports[i].transport;
        if (transport == NULL) continue;
        struct tl_engine_stats engine;
        struct tl_memory_stats memory;
        struct tl_reactor_stats reactor;
        tl_transport_get_stats(transport, &engine, &memory);
        tl_reactor_get_stats(transport->reactor, &reactor);
        add_counters(ret_engine, &engine, sizeof(engine));
        add_counters(ret_memory, &memory, sizeof(memory));
        uint64_t most_members = tl_max_u64(ret_reactor->most_members, reactor.most_members);
        add_counters(ret_reactor, &reactor, sizeof(reactor));
        ret_reactor->most_members = most_members;
    }
}

/* ----------------------------------------------------------------------------------------------------- closing -- */

static void one_drained(void *context)
{
    struct tl_worker *worker = context;
    if (--worker->closing.draining_transports == 0)
        worker->closing.transports_drained(worker->closing.transports_drained_context);
}

void tl_transports_drain(struct tl_worker *worker, int64_t deadline_ns, void (*drained)(void *context), void *context)
{
    worker->closing.draining_transports = tl_transports_count(worker);
    worker->closing.transports_drained = drained;
    worker->closing.transports_drained_context = context;
    if (worker->closing.draining_transports == 0) drained(context);
    for (size_t i = 0; i < worker->data_plane.transport_count; i++) {
        if (worker->data_plane.transports[i].transport != NULL)
            tl_transport_drain(worker->data_plane.transports[i].transport, deadline_ns, one_drained, worker);
    }
}
