// SPDX-License-Identifier: Apache-2.0
/*
 * The address and the descriptors of a peer, before any card sees them: an address that is accepted is one that we
 * would write, and so is a descriptor.
 */
#include <stdint.h>
#include <string.h>

#include "base/check.h"
#include "dataplane/verbs/verbs_internal.h"

static void try_address(const uint8_t *data, size_t len_bytes)
{
    struct tl_pair_address bytes = {.len_bytes = (uint32_t)len_bytes};
    memcpy(bytes.bytes, data, len_bytes);
    struct verbs_address theirs;
    struct tl_error error;
    if (verbs_address_read(&bytes, &theirs, &error) != TL_OK) {
        TL_CHECK(error.message[0] != '\0');
        return;
    }
    struct tl_pair_address again;
    verbs_address_write(&theirs, &again);
    TL_CHECK(again.len_bytes == bytes.len_bytes && memcmp(again.bytes, bytes.bytes, again.len_bytes) == 0);
    TL_CHECK(verbs_address_match(&theirs, &theirs, &error) == TL_OK);
}

static void try_descriptor(const uint8_t *data, size_t len_bytes)
{
    struct tl_descriptor descriptor = {.len_bytes = (uint8_t)len_bytes};
    memcpy(descriptor.bytes, data, len_bytes);
    uint64_t address, space;
    uint32_t key;
    if (!verbs_descriptor_read(&descriptor, &address, &key, &space)) return;
    struct tl_descriptor again;
    verbs_descriptor_write(address, key, space, &again);
    TL_CHECK(again.len_bytes == descriptor.len_bytes && memcmp(again.bytes, descriptor.bytes, again.len_bytes) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len_bytes)
{
    if (len_bytes <= TL_PAIR_ADDRESS_MAX_BYTES) try_address(data, len_bytes);
    if (len_bytes <= TL_DESCRIPTOR_MAX_BYTES) try_descriptor(data, len_bytes);
    return 0;
}
