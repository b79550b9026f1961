// SPDX-License-Identifier: Apache-2.0
#include "server/transports/local_settings.h"

const char *tl_local_settings_refusal(const struct tl_settings *settings)
{
    return tl_settings_protocol_refusal(settings, TL_PROTOCOL_GRPC_LOCAL);
}
