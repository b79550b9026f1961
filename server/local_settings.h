// SPDX-License-Identifier: Apache-2.0
/* What the settings of a worker mean for the local provider. */
#ifndef SERVER_LOCAL_SETTINGS_H
#define SERVER_LOCAL_SETTINGS_H

#include "config/config.h"

/* Why these settings want no data plane within the host; NULL: they do. */
const char *tl_local_settings_refusal(const struct tl_settings *settings);

#endif
