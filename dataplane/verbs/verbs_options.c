// SPDX-License-Identifier: Apache-2.0
/*
 * Options of the verbs provider: their ranges, the list of devices, and the address as a GID.
 *
 * The list is parsed once into entries, which are then resolved against the devices of this machine. A text that is not
 * such a list, or a value out of its range, is an error that begins with the option's name; nothing is corrected
 * silently.
 */
#include "dataplane/verbs/verbs_internal.h"

#include <arpa/inet.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

#define MIN_QUEUE_DEPTH 16
#define MAX_QUEUE_DEPTH 65536

void tl_verbs_options_init(struct tl_verbs_options *ret_options)
{
    *ret_options = (struct tl_verbs_options){
        .gid_index = -1,
        .timeout = TL_VERBS_DEFAULT_TIMEOUT,
        .retry_count = TL_VERBS_DEFAULT_RETRY_COUNT,
        .queue_depth = TL_VERBS_DEFAULT_QUEUE_DEPTH,
        .keys = TL_KEYS_WINDOW,
    };
}

static enum tl_status check_range(const char *name, int64_t value, int64_t min, int64_t max, struct tl_error *ret_error)
{
    if (value >= min && value <= max) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: %" PRId64 " is not in %" PRId64 "..%" PRId64, name, value,
                        min, max);
}

static enum tl_status check_numbers(const struct tl_verbs_options *options, struct tl_error *ret_error)
{
    const struct {
        const char *name;
        int64_t value, min, max;
    } ranges[] = {
        {"port", options->port, 0, 255},
        {"gid_index", options->gid_index, -1, VERBS_MAX_GID_INDEX},
        {"service_level", options->service_level, 0, 7},
        {"traffic_class", options->traffic_class, 0, 255},
        {"timeout", options->timeout, 0, 31},
        {"retry_count", options->retry_count, 0, 7},
        {"pkey_index", options->pkey_index, 0, UINT16_MAX},
        {"queue_depth", options->queue_depth, MIN_QUEUE_DEPTH, MAX_QUEUE_DEPTH},
        {"keys", options->keys, TL_KEYS_WINDOW, TL_KEYS_REGION},
    };
    for (size_t i = 0; i < TL_ARRAY_COUNT(ranges); i++) {
        enum tl_status status = check_range(ranges[i].name, ranges[i].value, ranges[i].min, ranges[i].max, ret_error);
        if (status != TL_OK) return status;
    }
    uint32_t mtu = options->mtu_bytes;
    if (mtu != 0 && (mtu < 256 || mtu > 4096 || (mtu & (mtu - 1)) != 0)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "mtu: %u is not 256, 512, 1024, 2048 or 4096 bytes", mtu);
    }
    return TL_OK;
}

enum tl_status tl_verbs_options_check(const struct tl_verbs_options *options, struct tl_error *ret_error)
{
    struct verbs_filter filter;
    uint8_t gid[16];
    enum tl_status status = check_numbers(options, ret_error);
    if (status != TL_OK) return status;
    if (options->address != NULL && !verbs_address_to_gid(options->address, gid)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "address: \"%s\" is not a numeric IPv4 or IPv6 address",
                            options->address);
    }
    return verbs_filter_parse(options->devices, &filter, ret_error);
}

/* The prefix of IPv6 addresses that stand for IPv4 addresses. */
static const uint8_t mapped_prefix[12] = {[10] = 0xff, [11] = 0xff};

bool verbs_gid_is_v4(const uint8_t gid[16])
{
    return memcmp(gid, mapped_prefix, sizeof(mapped_prefix)) == 0;
}

void verbs_gid_to_text(const uint8_t gid[16], char *ret_text, size_t capacity)
{
    bool is_v4 = verbs_gid_is_v4(gid);
    *ret_text = '\0';
    inet_ntop(is_v4 ? AF_INET : AF_INET6, is_v4 ? gid + sizeof(mapped_prefix) : gid, ret_text, (socklen_t)capacity);
}

bool verbs_address_to_gid(const char *address, uint8_t ret_gid[16])
{
    struct in_addr v4;
    struct in6_addr v6;
    if (inet_pton(AF_INET, address, &v4) == 1) {
        memcpy(ret_gid, mapped_prefix, sizeof(mapped_prefix));
        memcpy(ret_gid + sizeof(mapped_prefix), &v4, sizeof(v4));
        return true;
    }
    char without_zone[INET6_ADDRSTRLEN];
    size_t len = strcspn(address, "%");
    if (len >= sizeof(without_zone)) return false;
    memcpy(without_zone, address, len);
    without_zone[len] = '\0';
    if (inet_pton(AF_INET6, without_zone, &v6) != 1) return false;
    memcpy(ret_gid, &v6, sizeof(v6));
    return true;
}

/* ------------------------------------------------------------------------------------------------------ filter -- */

static bool parse_port(const char *text, size_t len, unsigned *ret_port)
{
    unsigned port = 0;
    if (len == 0 || len > 3) return false;
    for (size_t i = 0; i < len; i++) {
        if (text[i] < '0' || text[i] > '9') return false;
        port = port * 10 + (unsigned)(text[i] - '0');
    }
    if (port < 1 || port > 255) return false;
    *ret_port = port;
    return true;
}

static enum tl_status parse_entry(const char *text, size_t len, struct verbs_filter_entry *ret_entry,
                                  struct tl_error *ret_error)
{
    struct verbs_filter_entry entry = {0};
    const char *name = text, *end = text + len;
    if (name < end && *name == '^') {
        entry.is_excluded = true;
        name++;
    }
    if (name < end && *name == '=') {
        entry.is_exact = true;
        name++;
    }
    const char *colon = memchr(name, ':', (size_t)(end - name));
    size_t name_len = (size_t)((colon != NULL ? colon : end) - name);
    if (name_len == 0 || name_len >= sizeof(entry.name) || memchr(name, '/', name_len) != NULL) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "devices: \"%.*s\" does not name a device; entries are like mlx5_0, mlx5_0:1 or ^mlx5_1",
                            (int)len, text);
    }
    memcpy(entry.name, name, name_len);
    if (colon != NULL && !parse_port(colon + 1, (size_t)(end - colon - 1), &entry.port)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "devices: \"%.*s\": a port is a number in 1..255", (int)len,
                            text);
    }
    *ret_entry = entry;
    return TL_OK;
}

enum tl_status verbs_filter_parse(const char *text, struct verbs_filter *ret_filter, struct tl_error *ret_error)
{
    struct verbs_filter filter = {.count = 0};
    bool is_more = text != NULL && *text != '\0';
    while (is_more) {
        size_t len = strcspn(text, ",");
        if (filter.count == VERBS_FILTER_ENTRIES) {
            return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "devices: more than %u entries", VERBS_FILTER_ENTRIES);
        }
        enum tl_status status = parse_entry(text, len, &filter.entries[filter.count], ret_error);
        if (status != TL_OK) return status;
        filter.count++;
        is_more = text[len] == ',';
        text += len + 1;
    }
    *ret_filter = filter;
    return TL_OK;
}

void verbs_filter_resolve(struct verbs_filter *filter, const char *const *devices, size_t count)
{
    for (unsigned i = 0; i < filter->count; i++) {
        for (size_t device = 0; device < count; device++) {
            if (strcmp(filter->entries[i].name, devices[device]) == 0) filter->entries[i].is_exact = true;
        }
    }
}

static bool entry_names(const struct verbs_filter_entry *entry, const char *device, unsigned port)
{
    if (entry->port != 0 && port != 0 && entry->port != port) return false;
    return entry->is_exact ? strcmp(entry->name, device) == 0 : strncmp(entry->name, device, strlen(entry->name)) == 0;
}

const struct verbs_filter_entry *verbs_filter_find(const struct verbs_filter *filter, const char *device, unsigned port,
                                                   bool *ret_is_allowed)
{
    const struct verbs_filter_entry *included = NULL;
    bool has_inclusions = false;
    for (unsigned i = 0; i < filter->count; i++) {
        const struct verbs_filter_entry *entry = &filter->entries[i];
        bool is_named = entry_names(entry, device, port);
        if (entry->is_excluded && is_named) {
            *ret_is_allowed = false;
            return entry;
        }
        has_inclusions |= !entry->is_excluded;
        if (!entry->is_excluded && is_named && included == NULL) included = entry;
    }
    *ret_is_allowed = !has_inclusions || included != NULL;
    return included;
}
