// SPDX-License-Identifier: Apache-2.0
#include "server/transports/transport_choice.h"

#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/reason.h"
#include "dataplane/probe.h"

/* A message and a write take microseconds; a card that gets no answer needs half a second to report that. */
#define PROBE_NS TL_NS_PER_SEC
/* After this time no other candidate is tried, because the call that opens the worker waits. */
#define PATIENCE_NS (3 * TL_NS_PER_SEC)

bool tl_transport_is_about_memlock(const char *reason)
{
    return strstr(reason, "locked memory") != NULL;
}

/* A candidate without a name gets a number, unless it is the only one. */
static void name_candidate(const struct tl_transport_candidate *candidate, unsigned order, size_t count, char *ret_name,
                           size_t capacity)
{
    if (candidate->name[0] != '\0') {
        snprintf(ret_name, capacity, "%s", candidate->name);
    } else {
        ret_name[0] = '\0';
        if (count > 1) snprintf(ret_name, capacity, "candidate %u", order + 1);
    }
}

/* Writes the names of the candidates from this one on, as many as fit. */
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

/* Returns the message without the device that it begins with, which is part of the candidate's name. */
static const char *without_device(const struct tl_transport_candidate *candidate, const char *message)
{
    size_t len = strlen(candidate->device);
    bool has_device = len > 0 && strncmp(message, candidate->device, len) == 0;
    return has_device && strncmp(message + len, ": ", 2) == 0 ? message + len + 2 : message;
}

/* Tries whether the provider reads. One that does not is used all the same, for writes. */
static void probe_reads(struct tl_provider *provider)
{
    struct tl_error error;
    if (provider->ops->read == NULL || tl_provider_probe_reads(provider, PROBE_NS, &error) == TL_OK) return;
    provider->read_failure = tl_reason(error.message);
}

/* Opens a candidate and probes it. Returns a provider that works. */
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
    if (candidates->is_reading && candidates->keys == TL_KEYS_WINDOW) probe_reads(provider);
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
        const struct tl_transport_candidate *candidate = &candidates->items[order];
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
