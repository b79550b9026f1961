// SPDX-License-Identifier: Apache-2.0
/*
 * TLS for the calls that a command makes to workers of the cluster, one for the process.
 *
 * Happy path: a command that has read its configuration opens it; calls are made with tl_cluster_tls; main ends it.
 * Thread: calls from any thread, between open and end.
 */
#ifndef SERVER_CLI_CLUSTER_TLS_H
#define SERVER_CLI_CLUSTER_TLS_H

#include "config/settings.h"
#include "control/tls.h"

/* Opens it as the settings say, unless they want none, or it is open. Errors: as tl_tls_create. */
enum tl_status tl_cluster_tls_open(const struct tl_settings *settings, struct tl_error *ret_error) TL_MUST_USE;

/* NULL: none. */
struct tl_tls *tl_cluster_tls(void);

void tl_cluster_tls_end(void);

#endif
