// SPDX-License-Identifier: Apache-2.0
/* From which addresses, besides their own, the members of the cluster may connect: "any", or a list of addresses and
 * networks. */
#ifndef CONFIG_NETWORK_LIST_H
#define CONFIG_NETWORK_LIST_H

#include "config/arena.h"
#include "config/json_doc.h"

/* Reads the value of "peers.addresses". *ret_networks as in struct tl_settings. Errors: TL_INVALID_ARGUMENT: neither
 * "any" nor a list, an entry that is no address or network, more than TL_MAX_PEER_NETWORKS. TL_RESOURCE_EXHAUSTED: no
 * memory. */
enum tl_status tl_network_list_read(const struct tl_json_value *value, struct tl_arena *arena,
                                    const char **ret_networks, struct tl_error *ret_error) TL_MUST_USE;

/* The same as JSON. NULL: no memory. */
const char *tl_network_list_format(const char *networks, struct tl_arena *arena);

#endif
