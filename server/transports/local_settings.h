// SPDX-License-Identifier: Apache-2.0
/* What the settings of a worker mean for the local provider. */
#ifndef SERVER_TRANSPORTS_LOCAL_SETTINGS_H
#define SERVER_TRANSPORTS_LOCAL_SETTINGS_H

#include <tensorlane/status.h>

#include "config/config.h"
#include "dataplane/local/local.h"

/* Why these settings want no data plane within the host; NULL: they do. */
const char *tl_local_settings_refusal(const struct tl_settings *settings);

/* Fills the options, which point into the settings and to ret_users. Names of users are looked up. Errors:
 * TL_INVALID_ARGUMENT: this machine has no such user. Blocks: the look-up. */
enum tl_status tl_local_settings_read(const struct tl_settings *settings, uid_t ret_users[TL_LOCAL_MAX_USERS],
                                      struct tl_local_options *ret_options, struct tl_error *ret_error) TL_MUST_USE;

#endif
