// SPDX-License-Identifier: Apache-2.0
/*
 * Turns the settings "verbs" into options of the verbs provider.
 *
 * Every user of the provider takes its options from here, so that `tensorlane devices` shows the card that a worker
 * takes. Failure modes: a name that cannot be resolved is an error, since the choice of a card would then be a guess.
 */
#include "server/transports/verbs_settings.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>

#include "base/error.h"

const char *tl_verbs_settings_refusal(const struct tl_settings *settings)
{
    bool is_reading = settings->protocol == TL_PROTOCOL_GRPC_GDR; /* over the same cards */
    const char *refusal = is_reading ? NULL : tl_settings_protocol_refusal(settings, TL_PROTOCOL_GRPC_VERBS);
    if (refusal == NULL && settings->rdma == TL_RDMA_OFF) refusal = "rdma is off";
    if (refusal == NULL && settings->security.encrypt == TL_ENCRYPT_REQUIRE)
        refusal = "security.encrypt is \"require\", and nothing encrypts what RDMA carries";
    return refusal;
}

static bool is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)(const void *)address;
        return ntohl(v4->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    }
    return address->sa_family == AF_INET6 &&
           IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
}

/* Replaces a name by an address. */
static enum tl_status resolve(const char *name, char ret_host[TL_VERBS_HOST_BYTES], struct tl_error *ret_error)
{
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    int code = getaddrinfo(name, NULL, &hints, &found);
    if (code != 0) {
        return tl_error_set(
            ret_error, TL_UNAVAILABLE,
            "the worker's own name %s cannot be resolved (%s), so that no card can be chosen by its address; add it "
            "to DNS or /etc/hosts, or name the card in verbs.devices",
            name, gai_strerror(code));
    }
    const struct addrinfo *best = found;
    while (best->ai_next && is_loopback(best->ai_addr))
        best = best->ai_next;
    if (is_loopback(best->ai_addr)) best = found;
    code = getnameinfo(best->ai_addr, best->ai_addrlen, ret_host, TL_VERBS_HOST_BYTES, NULL, 0, NI_NUMERICHOST);
    freeaddrinfo(found);
    if (code == 0) return TL_OK;
    return tl_error_set(ret_error, TL_UNAVAILABLE, "the address of %s cannot be read: %s", name, gai_strerror(code));
}

static uint64_t or_default(uint64_t value, uint64_t when_auto)
{
    return value == TL_SETTING_AUTO ? when_auto : value;
}

enum tl_status tl_verbs_settings_read(const struct tl_settings *settings, const char *address,
                                      char ret_host[TL_VERBS_HOST_BYTES], struct tl_verbs_options *ret_options,
                                      struct tl_error *ret_error)
{
    const struct tl_verbs_settings *verbs = &settings->verbs;
    char name[256];
    uint16_t port;
    if (address) {
        enum tl_status status = tl_address_split(address, name, sizeof(name), &port, ret_error);
        if (status == TL_OK) status = resolve(name, ret_host, ret_error);
        if (status != TL_OK) return status;
    }
    *ret_options = (struct tl_verbs_options){
        .devices = verbs->devices,
        .port = (int)or_default(verbs->port, 0),
        .gid_index = verbs->gid_index == TL_SETTING_AUTO ? -1 : (int)verbs->gid_index,
        .address = address ? ret_host : NULL,
        .mtu_bytes = (uint32_t)or_default(verbs->mtu_bytes, 0),
        .service_level = (int)verbs->service_level,
        .traffic_class = (int)verbs->traffic_class,
        .timeout = (int)verbs->timeout,
        .retry_count = (int)verbs->retry_count,
        .pkey_index = (int)verbs->pkey_index,
        .queue_depth = (uint32_t)verbs->queue_depth,
        .max_write_bytes = or_default(verbs->piece_bytes, 0),
        .pool_bytes = verbs->pool_bytes,
        .keys = verbs->keys == TL_VERBS_KEYS_REGION ? TL_KEYS_REGION : TL_KEYS_WINDOW,
    };
    return TL_OK;
}
