// SPDX-License-Identifier: Apache-2.0
#include "base/ip.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

#define V4_PREFIX_BITS 96
#define ALL_BITS 128

static const uint8_t v4_prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

static struct tl_ip from_v4(struct in_addr v4)
{
    struct tl_ip ip;
    memcpy(ip.bytes, v4_prefix, sizeof(v4_prefix));
    memcpy(ip.bytes + sizeof(v4_prefix), &v4, sizeof(v4));
    return ip;
}

bool tl_ip_is_v4(const struct tl_ip *ip)
{
    return memcmp(ip->bytes, v4_prefix, sizeof(v4_prefix)) == 0;
}

bool tl_ip_parse(const char *text, struct tl_ip *ret_ip)
{
    char plain[INET6_ADDRSTRLEN];
    struct in_addr v4;
    struct in6_addr v6;
    size_t len = strcspn(text, "%");
    if (len >= sizeof(plain)) return false;
    memcpy(plain, text, len);
    plain[len] = '\0';
    if (text[len] == '\0' && inet_pton(AF_INET, plain, &v4) == 1) {
        *ret_ip = from_v4(v4);
        return true;
    }
    if (inet_pton(AF_INET6, plain, &v6) != 1) return false;
    memcpy(ret_ip->bytes, &v6, sizeof(v6));
    return true;
}

char *tl_ip_format(const struct tl_ip *ip, char ret_text[TL_IP_TEXT_BYTES])
{
    _Static_assert(TL_IP_TEXT_BYTES == INET6_ADDRSTRLEN, "every address fits");
    bool is_four = tl_ip_is_v4(ip);
    (void)inet_ntop(is_four ? AF_INET : AF_INET6, is_four ? ip->bytes + sizeof(v4_prefix) : ip->bytes, ret_text,
                    TL_IP_TEXT_BYTES);
    return ret_text;
}

bool tl_ip_of_sockaddr(const struct sockaddr *address, struct tl_ip *ret_ip)
{
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    if (address->sa_family == AF_INET) {
        memcpy(&v4, address, sizeof(v4));
        *ret_ip = from_v4(v4.sin_addr);
    } else if (address->sa_family == AF_INET6) {
        memcpy(&v6, address, sizeof(v6));
        memcpy(ret_ip->bytes, &v6.sin6_addr, sizeof(ret_ip->bytes));
    } else {
        return false;
    }
    return true;
}

socklen_t tl_ip_to_sockaddr(const struct tl_ip *ip, uint16_t port, struct sockaddr_storage *ret_address)
{
    *ret_address = (struct sockaddr_storage){.ss_family = AF_UNSPEC};
    if (tl_ip_is_v4(ip)) {
        struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(port)};
        memcpy(&v4.sin_addr, ip->bytes + sizeof(v4_prefix), sizeof(v4.sin_addr));
        memcpy(ret_address, &v4, sizeof(v4));
        return sizeof(v4);
    }
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    memcpy(&v6.sin6_addr, ip->bytes, sizeof(v6.sin6_addr));
    memcpy(ret_address, &v6, sizeof(v6));
    return sizeof(v6);
}

const char *tl_ip_family(const struct tl_ip *ip)
{
    return tl_ip_is_v4(ip) ? "IPv4" : "IPv6";
}

bool tl_ip_network_parse(const char *text, struct tl_ip_network *ret_network)
{
    char address[INET6_ADDRSTRLEN];
    struct tl_ip_network network = {.bits = ALL_BITS};
    size_t len = strcspn(text, "/");
    if (len >= sizeof(address) || memchr(text, '%', len) != NULL) return false;
    memcpy(address, text, len);
    address[len] = '\0';
    if (!tl_ip_parse(address, &network.ip)) return false;
    if (text[len] == '/') {
        const char *digits = text + len + 1;
        size_t count = strspn(digits, "0123456789");
        if (count == 0 || count > 3 || digits[count] != '\0') return false;
        network.bits = (unsigned)strtoul(digits, NULL, 10) + (strchr(address, ':') == NULL ? V4_PREFIX_BITS : 0);
        if (network.bits > ALL_BITS) return false;
    }
    *ret_network = network;
    return true;
}

bool tl_ip_is_equal(const struct tl_ip *a, const struct tl_ip *b)
{
    return memcmp(a->bytes, b->bytes, sizeof(a->bytes)) == 0;
}

bool tl_ip_network_has(const struct tl_ip_network *network, const struct tl_ip *ip)
{
    unsigned whole = network->bits / 8, rest = network->bits % 8;
    if (memcmp(network->ip.bytes, ip->bytes, whole) != 0) return false;
    return rest == 0 || (network->ip.bytes[whole] ^ ip->bytes[whole]) >> (8 - rest) == 0;
}

bool tl_ip_is_loopback(const struct tl_ip *ip)
{
    return tl_ip_is_v4(ip) ? ip->bytes[12] == 127 : memcmp(ip->bytes, &in6addr_loopback, sizeof(ip->bytes)) == 0;
}

bool tl_ip_is_link_local(const struct tl_ip *ip)
{
    return ip->bytes[0] == 0xfe && (ip->bytes[1] & 0xc0) == 0x80;
}

bool tl_ip_is_here(const struct tl_ip *ip)
{
    struct ifaddrs *interfaces;
    if (tl_ip_is_loopback(ip)) return true;
    if (getifaddrs(&interfaces) != 0) return false;
    bool is_found = false;
    for (const struct ifaddrs *each = interfaces; each != NULL && !is_found; each = each->ifa_next) {
        struct tl_ip own;
        is_found = each->ifa_addr != NULL && tl_ip_of_sockaddr(each->ifa_addr, &own) && tl_ip_is_equal(&own, ip);
    }
    freeifaddrs(interfaces);
    return is_found;
}
