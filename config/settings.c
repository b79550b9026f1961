// SPDX-License-Identifier: Apache-2.0
#include "config/settings.h"

#define REFUSAL_OF(value, word) [value] = "the protocol is " word,
#define NAME_OF(value, word) word,
const char *tl_settings_protocol_refusal(const struct tl_settings *settings, enum tl_protocol protocol)
{
    static const char *const refusals[] = {TL_PROTOCOLS(REFUSAL_OF)};
    bool is_wanted = settings->protocol == TL_PROTOCOL_AUTO || settings->protocol == protocol;
    return is_wanted ? NULL : refusals[settings->protocol];
}

const char *tl_settings_protocol_name(enum tl_protocol protocol)
{
    static const char *const names[] = {TL_PROTOCOLS(NAME_OF)};
    return names[protocol];
}

const char *tl_settings_rdma_name(enum tl_rdma_policy rdma)
{
    static const char *const names[] = {"prefer", "require", "off"};
    return names[rdma];
}
