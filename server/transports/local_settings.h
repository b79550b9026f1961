// SPDX-License-Identifier: Apache-2.0
/* The settings of a worker decide whether it has the local transport. */
#ifndef SERVER_TRANSPORTS_LOCAL_SETTINGS_H
#define SERVER_TRANSPORTS_LOCAL_SETTINGS_H

#include "config/config.h"

/* Returns why these settings want no local transport; NULL: they want it. The text is static. */
const char *tl_local_settings_refusal(const struct tl_settings *settings);

#endif
