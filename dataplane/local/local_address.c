// SPDX-License-Identifier: Apache-2.0
/* The address of a queue pair as it travels over the control plane. */
#include <string.h>

#include "base/error.h"
#include "dataplane/local/local_internal.h"

/* The layout, with sizes in bytes: version (4), host id, token, length of the name (1), name. */
#define VERSION 2 /* in version 1 the name was that of a listening socket */
#define FIXED_BYTES (4 + TL_HOST_ID_BYTES + LOCAL_TOKEN_BYTES + 1)

void local_address_write(const struct local_address *pair_address, struct tl_pair_address *ret_bytes)
{
    _Static_assert(FIXED_BYTES + sizeof(pair_address->name) <= TL_PAIR_ADDRESS_MAX_BYTES, "fits");
    uint8_t *place = ret_bytes->bytes;
    *place++ = VERSION;
    memcpy(place, "LCL", 3);
    place += 3;
    memcpy(place, pair_address->host_id, TL_HOST_ID_BYTES);
    place += TL_HOST_ID_BYTES;
    memcpy(place, pair_address->token, LOCAL_TOKEN_BYTES);
    place += LOCAL_TOKEN_BYTES;
    *place++ = (uint8_t)pair_address->name_bytes;
    memcpy(place, pair_address->name, pair_address->name_bytes);
    ret_bytes->len_bytes = FIXED_BYTES + pair_address->name_bytes;
}

bool local_address_read(const struct tl_pair_address *bytes, struct local_address *ret_address)
{
    const uint8_t *place = bytes->bytes;
    struct local_address pair_address = {.name_bytes = 0};
    if (bytes->len_bytes <= FIXED_BYTES || bytes->len_bytes > TL_PAIR_ADDRESS_MAX_BYTES) return false;
    if (*place++ != VERSION || memcmp(place, "LCL", 3) != 0) return false;
    place += 3;
    memcpy(pair_address.host_id, place, TL_HOST_ID_BYTES);
    place += TL_HOST_ID_BYTES;
    memcpy(pair_address.token, place, LOCAL_TOKEN_BYTES);
    place += LOCAL_TOKEN_BYTES;
    pair_address.name_bytes = *place++;
    if (pair_address.name_bytes > sizeof(pair_address.name)) return false;
    if (pair_address.name_bytes != bytes->len_bytes - FIXED_BYTES) return false;
    memcpy(pair_address.name, place, pair_address.name_bytes);
    *ret_address = pair_address;
    return true;
}

enum tl_status local_address_check(const struct tl_provider *base, const struct tl_pair_address *bytes,
                                   struct tl_error *ret_error)
{
    const struct local_provider *provider = TL_CONTAINER_OF(base, const struct local_provider, base);
    struct local_address theirs;
    if (!local_address_read(bytes, &theirs)) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "%s: not a pair address", base->name);
    }
    if (memcmp(provider->host_id, theirs.host_id, TL_HOST_ID_BYTES) != 0) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION, "%s: the peer is on another host", base->name);
    }
    return TL_OK;
}
