// SPDX-License-Identifier: Apache-2.0
/* Whether the settings of a worker want the local transport. */
#ifndef SERVER_TRANSPORTS_LOCAL_SETTINGS_H
#define SERVER_TRANSPORTS_LOCAL_SETTINGS_H

#include "config/config.h"

/* Why these settings want no data plane within the host; NULL if they do. The text is static. */
const char *tl_local_settings_refusal(const struct tl_settings *settings);

#endif
