// SPDX-License-Identifier: Apache-2.0
/* The settings of a worker as options of the verbs provider. */
#ifndef SERVER_TRANSPORTS_VERBS_SETTINGS_H
#define SERVER_TRANSPORTS_VERBS_SETTINGS_H

#include <tensorlane/status.h>

#include "config/config.h"
#include "dataplane/verbs/verbs.h"

/* A buffer of this size holds every numeric address with its zone. */
#define TL_VERBS_HOST_BYTES 256

/* Fills the options from the settings, and from the worker's own address ("host:port"; NULL: it has none), which the
 * card, its port and its GID follow from. A name is resolved; of several addresses the first counts that is not a
 * loopback one. The options point into the settings and to ret_host.
 * Errors: TL_INVALID_ARGUMENT: not an address. TL_UNAVAILABLE: the name cannot be resolved. Blocks: resolves. */
enum tl_status tl_verbs_settings_read(const struct tl_settings *settings, const char *address,
                                      char ret_host[TL_VERBS_HOST_BYTES], struct tl_verbs_options *ret_options,
                                      struct tl_error *ret_error) TL_MUST_USE;

/* Returns why these settings want no transport over RDMA cards; NULL: they want it. */
const char *tl_verbs_settings_refusal(const struct tl_settings *settings);

#endif
