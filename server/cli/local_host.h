// SPDX-License-Identifier: Apache-2.0
/* Which hosts are this machine. */
#ifndef SERVER_CLI_LOCAL_HOST_H
#define SERVER_CLI_LOCAL_HOST_H

#include <stdbool.h>

struct tl_local_hosts;

/* Looks at the machine's addresses. NULL: they cannot be read. */
struct tl_local_hosts *tl_local_hosts_create(void);
void tl_local_hosts_destroy(struct tl_local_hosts *hosts); /* NULL is accepted */

/* True when the host (a name or an address) is this machine: one of its addresses is one of ours, or a loopback
 * address. *ret_reason is why it could not be found out, NULL otherwise. Blocks: for the name resolution, once for each
 * host. */
bool tl_local_hosts_has(struct tl_local_hosts *hosts, const char *host, const char **ret_reason);

/* Whether it is the name that this machine has itself, which a name service need not know. */
bool tl_local_host_is_own_name(const char *host);

#endif
