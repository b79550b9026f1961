// SPDX-License-Identifier: Apache-2.0
/* Numeric addresses of the Internet Protocol, without ports, and networks of them. An IPv4 address and the IPv6 address
 * that it is mapped to are the same; the zone of a link-local address is not looked at. */
#ifndef BASE_IP_H
#define BASE_IP_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

struct tl_ip {
    uint8_t bytes[16]; /* IPv6; an IPv4 address as ::ffff:a.b.c.d */
};

/* All addresses that begin with the same bits as ip. */
struct tl_ip_network {
    struct tl_ip ip;
    unsigned bits; /* 0 to 128; 10.0.0.0/8 has 96 + 8 */
};

/* "10.0.0.7", "fd00::7", "fe80::1%eth0". False: not such an address. */
bool tl_ip_parse(const char *text, struct tl_ip *ret_ip);
/* Holds every address as text, with NUL. */
#define TL_IP_TEXT_BYTES 46
/* Returns the buffer. */
char *tl_ip_format(const struct tl_ip *ip, char ret_text[TL_IP_TEXT_BYTES]);
/* False: an address of another family. */
bool tl_ip_of_sockaddr(const struct sockaddr *address, struct tl_ip *ret_ip);
/* Writes the address with the port, as AF_INET or AF_INET6, and returns its size. */
socklen_t tl_ip_to_sockaddr(const struct tl_ip *ip, uint16_t port, struct sockaddr_storage *ret_address);
/* "IPv4" or "IPv6". Never freed. */
const char *tl_ip_family(const struct tl_ip *ip);
/* "10.1.0.0/16", "fd00::/8", or one address. False: neither. */
bool tl_ip_network_parse(const char *text, struct tl_ip_network *ret_network);

bool tl_ip_is_equal(const struct tl_ip *a, const struct tl_ip *b);
bool tl_ip_network_has(const struct tl_ip_network *network, const struct tl_ip *ip);
bool tl_ip_is_v4(const struct tl_ip *ip);
/* Whether it is one of loopback: 127.0.0.0/8 or ::1. */
bool tl_ip_is_loopback(const struct tl_ip *ip);
/* Whether it is an IPv6 address that means something only together with an interface: fe80::/10. */
bool tl_ip_is_link_local(const struct tl_ip *ip);
/* Whether it is an address of this machine, in this network namespace: of an interface, or of loopback. When the
 * interfaces cannot be listed, only loopback is. */
bool tl_ip_is_here(const struct tl_ip *ip);

#endif
