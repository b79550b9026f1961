// SPDX-License-Identifier: Apache-2.0
/* What a task's settings say of TLS, for the control plane. */
#ifndef SERVER_TLS_OPTIONS_H
#define SERVER_TLS_OPTIONS_H

#include <stdbool.h>

#include "config/settings.h"
#include "control/tls.h"

/* False: the settings want no TLS. The strings are those of the settings. */
bool tl_tls_options_of(const struct tl_settings *settings, struct tl_tls_options *ret_options);

#endif
