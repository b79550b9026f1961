// SPDX-License-Identifier: Apache-2.0
#include "server/transports/transport_choice.h"

#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "dataplane/probe.h"

/* A message and a write take microseconds; a card that gets no answer needs half a second to say so. */
#define PROBE_NS TL_NS_PER_SEC
/* After this no other candidate is tried: whoever has started the worker waits, and its signals too. */
#define PATIENCE_NS (3 * TL_NS_PER_SEC)

bool tl_transport_is_about_memlock(const char *reason)
{
    return strstr(reason, "locked memory") != NULL;
}

size_t tl_transport_count_usable(const struct tl_verbs_candidate *candidates, size_t count)
{
    size_t usable_count = 0;
    while (usable_count < count && candidates[usable_count].order >= 0)
        usable_count++;
    return usable_count;
}

/* The only one needs no name where it has none. */
static void name_candidate(const struct tl_verbs_candidate *candidate, unsigned order, size_t count, char *ret_name,
                           size_t capacity)
{
    if (candidate->device[0] == '\0') {
        ret_name[0] = '\0';
        if (count > 1) snprintf(ret_name, capacity, "candidate %u", order + 1);
    } else {
        snprintf(ret_name, capacity, "%s:%u GID %d %s", candidate->device, candidate->port, candidate->gid_index,
                 candidate->gid);
    }
}

/* As many of those from the order on as have room. */
static void name_rest(const struct tl_transport_candidates *candidates, unsigned order, char *ret_names,
                      size_t capacity)
{
    size_t used = 0;
    ret_names[0] = '\0';
    for (; order < candidates->count && used < capacity; order++) {
        char name[192];
        name_candidate(&candidates->items[order], order, candidates->count, name, sizeof(name));
        used += (size_t)snprintf(ret_names + used, capacity - used, "%s%s", used > 0 ? "; " : "", name);
    }
}

/* The message without the device and port that it begins with: the name has them. */
static const char *without_device(const struct tl_verbs_candidate *candidate, const char *message)
{
    char device[96];
    int len = snprintf(device, sizeof(device), "%s:%u: ", candidate->device, candidate->port);
    return strncmp(message, device, (size_t)len) == 0 ? message + len : message;
}

/* Opens and probes one. */
static enum tl_status try_candidate(const struct tl_transport_candidates *candidates, unsigned order,
                                    struct tl_provider **ret_provider, struct tl_error *ret_error)
{
    struct tl_provider *provider;
    enum tl_status status = candidates->open(candidates->context, order, &provider, ret_error);
    if (status != TL_OK) return status;
    status = tl_provider_probe(provider, candidates->keys, PROBE_NS, ret_error);
    if (status != TL_OK) {
        provider->ops->close(provider);
        return status;
    }
    *ret_provider = provider;
    return TL_OK;
}

enum tl_status tl_transport_choose(const struct tl_transport_candidates *candidates,
                                   struct tl_transport_choice *ret_choice, struct tl_error *ret_error)
{
    struct tl_transport_choice choice = {.provider = NULL};
    struct tl_error error;
    size_t used = 0;
    int64_t deadline_ns = tl_clock_deadline_ns(PATIENCE_NS);
    for (unsigned order = 0; order < candidates->count; order++) {
        char name[192];
        const struct tl_verbs_candidate *candidate = &candidates->items[order];
        if (order > 0 && tl_clock_now_ns() >= deadline_ns) {
            snprintf(choice.passed_over + used, sizeof(choice.passed_over) - used, "; %zu more were not tried in time",
                     candidates->count - order);
            break;
        }
        choice.order = order;
        if (try_candidate(candidates, order, &choice.provider, &error) == TL_OK) {
            name_rest(candidates, order + 1, choice.not_tried, sizeof(choice.not_tried));
            *ret_choice = choice;
            return TL_OK;
        }
        if (tl_transport_is_about_memlock(error.message)) return tl_error_copy(ret_error, &error);
        name_candidate(candidate, order, candidates->count, name, sizeof(name));
        const char *why = without_device(candidate, error.message);
        if (candidates->failed != NULL) candidates->failed(candidates->context, order, name, why);
        int len = snprintf(choice.passed_over + used, sizeof(choice.passed_over) - used, "%s%s%s%s",
                           order > 0 ? "; " : "", name, name[0] != '\0' ? ": " : "", why);
        used = used + (size_t)len < sizeof(choice.passed_over) ? used + (size_t)len : sizeof(choice.passed_over) - 1;
    }
    if (candidates->count == 1) return tl_error_set(ret_error, error.code, "%s", choice.passed_over);
    return tl_error_set(ret_error, TL_UNAVAILABLE, TL_NO_PORT "; %.900s", choice.passed_over);
}

/* ------------------------------------------------------------------------------------------------------- verbs -- */

struct verbs_source {
    const struct tl_verbs_options *options;
    tl_transport_failed_fn *failed;
    void *context;
};

static enum tl_status open_verbs(void *context, unsigned order, struct tl_provider **ret_provider,
                                 struct tl_error *ret_error)
{
    const struct verbs_source *source = context;
    return tl_verbs_open(source->options, order, ret_provider, ret_error);
}

static void tell_failed(void *context, unsigned order, const char *name, const char *why)
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
    const struct tl_transport_candidates usable = {.items = candidates,
                                                   .count = tl_transport_count_usable(candidates, count),
                                                   .keys = options->keys,
                                                   .open = open_verbs,
                                                   .failed = tell_failed,
                                                   .context = &source};
    struct tl_transport_choice choice;
    enum tl_status status = tl_transport_choose(&usable, &choice, ret_error);
    if (status != TL_OK) return status;
    choice.provider->ops->close(choice.provider);
    *ret_order = choice.order;
    return TL_OK;
}
