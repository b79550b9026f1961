// SPDX-License-Identifier: Apache-2.0
/* Checks the list of networks when the configuration is read; the entries are joined by commas, which none of them has.
 */
#include "config/network_list.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/ip.h"
#include "config/config.h"
#include "config/quote.h"

/* "ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255/128" */
#define MAX_ENTRY_BYTES 50

static enum tl_status read_entry(const struct tl_json_value *entry, const char **ret_text, struct tl_error *ret_error)
{
    char quoted[TL_QUOTE_BYTES];
    struct tl_ip_network network;
    enum tl_status status = tl_json_expect(entry, JSON_STRING, "an address or a network", ret_error);
    if (status != TL_OK) return status;
    const char *text = json_string_value(entry->json);
    if (strlen(text) >= MAX_ENTRY_BYTES || !tl_ip_network_parse(text, &network)) {
        return tl_json_fail(entry, TL_INVALID_ARGUMENT, ret_error,
                            "%s is neither a numeric address nor a network; write \"10.0.0.7\", \"10.1.0.0/16\" or "
                            "\"fd00::/8\", or \"any\" instead of the list",
                            tl_quote(text, quoted));
    }
    *ret_text = text;
    return TL_OK;
}

static enum tl_status read_list(const struct tl_json_value *value, struct tl_arena *arena, const char **ret_networks,
                                struct tl_error *ret_error)
{
    char list[TL_MAX_PEER_NETWORKS * MAX_ENTRY_BYTES + 1] = "";
    struct tl_json_value entry;
    size_t count = json_array_size(value->json), used = 0;
    if (count > TL_MAX_PEER_NETWORKS) {
        return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error,
                            "%zu entries are too many; there may be %d: join addresses to networks", count,
                            TL_MAX_PEER_NETWORKS);
    }
    TL_JSON_FOREACH(value, entry)
    {
        const char *text = "";
        enum tl_status status = tl_json_collect(value->doc, read_entry(&entry, &text, ret_error), ret_error);
        if (status != TL_OK) return status;
        used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", used > 0 ? "," : "", text);
    }
    const char *networks = count > 0 ? tl_arena_format(arena, "%s", list) : NULL;
    if (count > 0 && !networks) return tl_json_no_memory(value->doc->source, ret_error);
    *ret_networks = networks;
    return TL_OK;
}

enum tl_status tl_network_list_read(const struct tl_json_value *value, struct tl_arena *arena,
                                    const char **ret_networks, struct tl_error *ret_error)
{
    char quoted[TL_QUOTE_BYTES];
    if (json_is_array(value->json)) return read_list(value, arena, ret_networks, ret_error);
    enum tl_status status = tl_json_expect(value, JSON_STRING, "\"any\" or a list of addresses", ret_error);
    if (status != TL_OK) return status;
    const char *word = json_string_value(value->json);
    if (strcmp(word, "any") != 0) {
        return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error,
                            "%s is not \"any\"; write that, or a list of addresses and networks",
                            tl_quote(word, quoted));
    }
    *ret_networks = "any";
    return TL_OK;
}

const char *tl_network_list_format(const char *networks, struct tl_arena *arena)
{
    char list[TL_MAX_PEER_NETWORKS * (MAX_ENTRY_BYTES + 4) + 3] = "[";
    size_t used = 1;
    if (!networks) return "[]";
    if (strcmp(networks, "any") == 0) return "\"any\"";
    for (const char *entry = networks; *entry != '\0';) {
        size_t len = strcspn(entry, ",");
        used += (size_t)snprintf(list + used, sizeof(list) - used, "%s\"%.*s\"", used > 1 ? ", " : "", (int)len, entry);
        entry += len + (entry[len] == ',');
    }
    return tl_arena_format(arena, "%s]", list);
}
