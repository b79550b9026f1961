// SPDX-License-Identifier: Apache-2.0
/* The log of the links that this side ends because of their peer. A peer may open a link again at once, as often as it
 * likes, so that each kind of reason is logged at most once a minute for each address. */
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "control/link_internal.h"

void link_log_end(struct tl_link *link, const char *kind, const struct tl_error *reason)
{
    struct tl_link_log *log = &link->control->link_log;
    const char *address = link->peer.address;
    const char *port = link->is_ours ? NULL : strrchr(address, ':'); /* another one for each link of the peer's */
    int address_len = (int)(port != NULL ? (size_t)(port - address) : strlen(address));
    char cause[TL_ERROR_MESSAGE_BYTES];
    snprintf(cause, sizeof(cause), "%.*s %s", address_len, address, kind);
    if (!tl_log_limit_passes(&log->limit, cause)) {
        log->unlogged_count++;
        return;
    }
    TL_LOG_AT_WARN("link ended", TL_STR("peer", link->peer.name), TL_STR("address", address),
                   TL_STR("reason", reason->message), TL_U64("others", log->unlogged_count));
    log->unlogged_count = 0;
}
