// SPDX-License-Identifier: Apache-2.0
#include "server/transports/local_settings.h"

#include <stddef.h>

const char *tl_local_settings_refusal(const struct tl_settings *settings)
{
    switch (settings->protocol) {
    case TL_PROTOCOL_GRPC:
        return "the protocol is grpc";
    case TL_PROTOCOL_GRPC_VERBS:
        return "the protocol is grpc+verbs";
    case TL_PROTOCOL_AUTO:
    case TL_PROTOCOL_GRPC_LOCAL:
        break;
    }
    return NULL;
}
