// SPDX-License-Identifier: Apache-2.0
/* The bytes with which the queue pairs of two local providers are introduced, over the control plane. */
#include <string.h>

#include "base/error.h"
#include "dataplane/local_internal.h"

/* version 4, host id, token, length of the name 1, name */
#define VERSION 2 /* 1: the name was that of a socket that listened */
#define FIXED_BYTES (4 + TL_HOST_ID_BYTES + LOCAL_TOKEN_BYTES + 1)

void local_introduction_write(const struct local_introduction *introduction, struct tl_introduction *ret_bytes)
{
    _Static_assert(FIXED_BYTES + sizeof(introduction->name) <= TL_INTRODUCTION_MAX_BYTES, "fits");
    uint8_t *place = ret_bytes->bytes;
    *place++ = VERSION;
    memcpy(place, "LCL", 3);
    place += 3;
    memcpy(place, introduction->host_id, TL_HOST_ID_BYTES);
    place += TL_HOST_ID_BYTES;
    memcpy(place, introduction->token, LOCAL_TOKEN_BYTES);
    place += LOCAL_TOKEN_BYTES;
    *place++ = (uint8_t)introduction->name_bytes;
    memcpy(place, introduction->name, introduction->name_bytes);
    ret_bytes->len_bytes = FIXED_BYTES + introduction->name_bytes;
}

bool local_introduction_read(const struct tl_introduction *bytes, struct local_introduction *ret_introduction)
{
    const uint8_t *place = bytes->bytes;
    struct local_introduction introduction = {.name_bytes = 0};
    if (bytes->len_bytes <= FIXED_BYTES || bytes->len_bytes > TL_INTRODUCTION_MAX_BYTES) return false;
    if (*place++ != VERSION || memcmp(place, "LCL", 3) != 0) return false;
    place += 3;
    memcpy(introduction.host_id, place, TL_HOST_ID_BYTES);
    place += TL_HOST_ID_BYTES;
    memcpy(introduction.token, place, LOCAL_TOKEN_BYTES);
    place += LOCAL_TOKEN_BYTES;
    introduction.name_bytes = *place++;
    if (introduction.name_bytes > sizeof(introduction.name)) return false;
    if (introduction.name_bytes != bytes->len_bytes - FIXED_BYTES) return false;
    memcpy(introduction.name, place, introduction.name_bytes);
    *ret_introduction = introduction;
    return true;
}

enum tl_status local_introduction_check(const struct tl_provider *base, const struct tl_introduction *bytes,
                                        struct tl_error *ret_error)
{
    const struct local_provider *provider = TL_CONTAINER_OF(base, const struct local_provider, base);
    struct local_introduction theirs;
    if (!local_introduction_read(bytes, &theirs)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: not an introduction", base->name);
    }
    if (memcmp(provider->host_id, theirs.host_id, TL_HOST_ID_BYTES) != 0) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "%s: the peer is on another host", base->name);
    }
    return TL_OK;
}
