// SPDX-License-Identifier: Apache-2.0
/*
 * The bytes that the verbs provider sends: addresses over the control plane, descriptors inside control
 * messages. Little-endian, of fixed length.
 *
 *   address   "TLV" and the version, 1 byte each; link layer, GID type, MTU, keys, initiator depth, responder
 *                  depth, time-out, retry count, 1 byte each; LID, 2; number, 4; PSN, 4; GID, 16; the device's name
 *                  and port, 32, the rest zeros
 *   descriptor     address, 8; rkey, 4; length, 8
 *
 * Everything that a peer sends is checked before it reaches the card.
 */
#include "dataplane/verbs/verbs_internal.h"

#include <endian.h>
#include <string.h>

#include "base/error.h"

#define ADDRESS_BYTES (38 + VERBS_ADDRESS_NAME_BYTES)
#define MAX_24_BITS UINT32_C(0xffffff)

static uint8_t *put(uint8_t *at, const void *bytes, size_t len)
{
    memcpy(at, bytes, len);
    return at + len;
}

static const uint8_t *take(const uint8_t *at, void *ret_bytes, size_t len)
{
    memcpy(ret_bytes, at, len);
    return at + len;
}

void verbs_address_write(const struct verbs_address *pair_address, struct tl_pair_address *ret_bytes)
{
    const uint8_t head[] = {'T',
                            'L',
                            'V',
                            VERBS_ADDRESS_VERSION,
                            pair_address->link_layer,
                            pair_address->gid_type,
                            pair_address->mtu,
                            pair_address->keys,
                            pair_address->initiator_depth,
                            pair_address->responder_depth,
                            pair_address->timeout,
                            pair_address->retry_count};
    uint16_t lid = htole16(pair_address->lid);
    uint32_t number = htole32(pair_address->number), psn = htole32(pair_address->psn);
    *ret_bytes = (struct tl_pair_address){.len_bytes = ADDRESS_BYTES};
    uint8_t *at = put(ret_bytes->bytes, head, sizeof(head));
    at = put(at, &lid, sizeof(lid));
    at = put(at, &number, sizeof(number));
    at = put(at, &psn, sizeof(psn));
    at = put(at, pair_address->gid, sizeof(pair_address->gid));
    put(at, pair_address->device, sizeof(pair_address->device));
}

static bool is_zero(const uint8_t gid[16])
{
    static const uint8_t zero[16];
    return memcmp(gid, zero, sizeof(zero)) == 0;
}

/* Returns true for printable text that ends within its capacity: it is put into messages. */
static bool is_name(const char *name, size_t capacity)
{
    size_t len = strnlen(name, capacity);
    for (size_t i = 0; i < len; i++)
        if (name[i] <= ' ' || name[i] > '~') return false;
    return len > 0 && len < capacity;
}

/* Returns what is wrong with the values; NULL when nothing is. */
static const char *find_fault(const struct verbs_address *theirs)
{
    bool is_ethernet = theirs->link_layer == IBV_LINK_LAYER_ETHERNET;
    if (!is_ethernet && theirs->link_layer != IBV_LINK_LAYER_INFINIBAND) return "link layer";
    if (theirs->gid_type > IBV_GID_TYPE_ROCE_V2 || is_ethernet == (theirs->gid_type == IBV_GID_TYPE_IB)) {
        return "GID type";
    }
    if (theirs->mtu < IBV_MTU_256 || theirs->mtu > IBV_MTU_4096) return "MTU";
    if (theirs->keys > TL_KEYS_REGION) return "keys";
    if (theirs->timeout > 31) return "time-out";
    if (theirs->retry_count > 7) return "retry count";
    /* 0 and 1 are management queue pairs. */
    if (theirs->number < 2 || theirs->number > MAX_24_BITS) return "queue pair number";
    if (theirs->psn > MAX_24_BITS) return "packet sequence number";
    if (!is_name(theirs->device, sizeof(theirs->device))) return "device name";
    if (is_ethernet ? is_zero(theirs->gid) : theirs->lid == 0 && is_zero(theirs->gid)) return "address";
    return NULL;
}

enum tl_status verbs_address_read(const struct tl_pair_address *bytes, struct verbs_address *ret_pair_address,
                                  struct tl_error *ret_error)
{
    struct verbs_address theirs = {0};
    uint16_t lid;
    uint32_t number, psn;
    if (bytes->len_bytes < 4 || bytes->len_bytes > sizeof(bytes->bytes) || memcmp(bytes->bytes, "TLV", 3) != 0) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the pair address of the peer is not one of verbs");
    }
    if (bytes->bytes[3] != VERBS_ADDRESS_VERSION) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "the pair address of the peer has version %u, ours is %u: run the same release on both",
                            bytes->bytes[3], VERBS_ADDRESS_VERSION);
    }
    if (bytes->len_bytes != ADDRESS_BYTES) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the pair address of the peer has %u bytes instead of %u",
                            bytes->len_bytes, ADDRESS_BYTES);
    }
    const uint8_t *at = bytes->bytes + 4;
    theirs.link_layer = *at++;
    theirs.gid_type = *at++;
    theirs.mtu = *at++;
    theirs.keys = *at++;
    theirs.initiator_depth = *at++;
    theirs.responder_depth = *at++;
    theirs.timeout = *at++;
    theirs.retry_count = *at++;
    at = take(at, &lid, sizeof(lid));
    at = take(at, &number, sizeof(number));
    at = take(at, &psn, sizeof(psn));
    at = take(at, theirs.gid, sizeof(theirs.gid));
    take(at, theirs.device, sizeof(theirs.device));
    theirs.lid = le16toh(lid);
    theirs.number = le32toh(number);
    theirs.psn = le32toh(psn);
    const char *fault = find_fault(&theirs);
    if (fault != NULL) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "the pair address of the peer has an impossible %s", fault);
    }
    *ret_pair_address = theirs;
    return TL_OK;
}

enum tl_status verbs_address_check(const struct tl_provider *provider, const struct tl_pair_address *bytes,
                                   struct tl_error *ret_error)
{
    struct verbs_address theirs;
    (void)provider;
    return verbs_address_read(bytes, &theirs, ret_error);
}

static const char *link_layer_name(uint8_t link_layer)
{
    return link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand";
}

static const char *roce_name(uint8_t gid_type)
{
    return gid_type == IBV_GID_TYPE_ROCE_V2 ? "RoCE v2" : "RoCE v1";
}

enum tl_status verbs_address_match(const struct verbs_address *ours, const struct verbs_address *theirs,
                                   struct tl_error *ret_error)
{
    if (ours->link_layer != theirs->link_layer) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "our port is %s, the peer's is %s: choose ports of one network with verbs.devices",
                            link_layer_name(ours->link_layer), link_layer_name(theirs->link_layer));
    }
    if (ours->link_layer != IBV_LINK_LAYER_ETHERNET) return TL_OK;
    if (ours->gid_type != theirs->gid_type) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "our GID is of %s, the peer's of %s: choose GIDs of the same kind with verbs.gid_index",
                            roce_name(ours->gid_type), roce_name(theirs->gid_type));
    }
    bool is_v4 = verbs_gid_is_v4(ours->gid), peer_is_v4 = verbs_gid_is_v4(theirs->gid);
    if (is_v4 != peer_is_v4 && ours->gid_type == IBV_GID_TYPE_ROCE_V2) {
        return tl_error_set(ret_error, TL_FAILED_PRECONDITION,
                            "our GID is an %s address, the peer's an %s one: choose GIDs of the same family with "
                            "verbs.gid_index",
                            is_v4 ? "IPv4" : "IPv6", peer_is_v4 ? "IPv4" : "IPv6");
    }
    return TL_OK;
}

static uint8_t min_u8(uint8_t a, uint8_t b)
{
    return a < b ? a : b;
}

/* 0 means without end. */
static uint8_t shorter_timeout(uint8_t a, uint8_t b)
{
    return a == 0 ? b : b == 0 ? a : min_u8(a, b);
}

struct verbs_terms verbs_address_agree(const struct verbs_address *ours, const struct verbs_address *theirs)
{
    return (struct verbs_terms){
        .mtu = min_u8(ours->mtu, theirs->mtu),
        .initiator_depth = min_u8(ours->initiator_depth, theirs->responder_depth),
        .responder_depth = min_u8(ours->responder_depth, theirs->initiator_depth),
        .timeout = shorter_timeout(ours->timeout, theirs->timeout),
        .retry_count = min_u8(ours->retry_count, theirs->retry_count),
    };
}

void verbs_descriptor_write(uint64_t address, uint32_t rkey, uint64_t len_bytes, struct tl_descriptor *ret_descriptor)
{
    uint64_t le_address = htole64(address), le_len = htole64(len_bytes);
    uint32_t le_rkey = htole32(rkey);
    *ret_descriptor = (struct tl_descriptor){.len_bytes = VERBS_DESCRIPTOR_BYTES};
    uint8_t *at = put(ret_descriptor->bytes, &le_address, sizeof(le_address));
    at = put(at, &le_rkey, sizeof(le_rkey));
    put(at, &le_len, sizeof(le_len));
}

bool verbs_descriptor_read(const struct tl_descriptor *descriptor, uint64_t *ret_address, uint32_t *ret_rkey,
                           uint64_t *ret_len_bytes)
{
    uint64_t address, len;
    uint32_t rkey;
    if (descriptor->len_bytes != VERBS_DESCRIPTOR_BYTES) return false;
    const uint8_t *at = take(descriptor->bytes, &address, sizeof(address));
    at = take(at, &rkey, sizeof(rkey));
    take(at, &len, sizeof(len));
    *ret_address = le64toh(address);
    *ret_rkey = le32toh(rkey);
    *ret_len_bytes = le64toh(len);
    return true;
}

uint32_t verbs_mtu_to_bytes(enum ibv_mtu mtu)
{
    return UINT32_C(128) << mtu;
}

enum ibv_mtu verbs_mtu_from_bytes(uint32_t bytes)
{
    enum ibv_mtu mtu = IBV_MTU_4096;
    while (mtu > IBV_MTU_256 && verbs_mtu_to_bytes(mtu) > bytes)
        mtu--;
    return mtu;
}
