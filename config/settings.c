// SPDX-License-Identifier: Apache-2.0
#include "config/settings.h"

#define REFUSAL_OF(value, word) [value] = "the protocol is " word,
const char *tl_settings_protocol_refusal(const struct tl_settings *settings, enum tl_protocol protocol)
{
    static const char *const refusals[] = {TL_PROTOCOLS(REFUSAL_OF)};
    bool is_wanted = settings->protocol == TL_PROTOCOL_AUTO || settings->protocol == protocol;
    return is_wanted ? NULL : refusals[settings->protocol];
}
