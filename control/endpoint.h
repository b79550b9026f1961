// SPDX-License-Identifier: Apache-2.0
/* Addresses of the form "host:port": taken apart, resolved, and dialled to see who is there. */
#ifndef CONTROL_ENDPOINT_H
#define CONTROL_ENDPOINT_H

#include <netdb.h>
#include <stdbool.h>
#include <stdint.h>

#include <tensorlane/status.h>

#include "base/ip.h"

struct tl_endpoint {
    char host[256]; /* a name or an address, without brackets */
    char port[6];
};

/* Takes "host:port" apart; an IPv6 address stands in brackets.
 * Errors: TL_INVALID_ARGUMENT: there is no port or it is not in 0..65535, or the host is empty, too long, or has a
 * colon. */
enum tl_status tl_endpoint_parse(const char *address, struct tl_endpoint *ret_endpoint,
                                 struct tl_error *ret_error) TL_MUST_USE;

/* Resolves the host. Ownership: freeaddrinfo.
 * Errors: TL_UNAVAILABLE: there is no such name, or no answer until deadline_ns. TL_RESOURCE_EXHAUSTED: no memory or
 * thread for the look-up.
 * Blocks: until deadline_ns; the look-up itself cannot be stopped, runs in a thread of its own and may go on behind it.
 * TL_TIME_NEVER: in the caller's thread, for as long as the name service takes. */
enum tl_status tl_endpoint_resolve(const struct tl_endpoint *endpoint, int64_t deadline_ns, struct addrinfo **ret_found,
                                   struct tl_error *ret_error) TL_MUST_USE;

/* Bytes of a numeric address as a target of gRPC's: "ipv4:127.0.0.1:4000". */
#define TL_ENDPOINT_TARGET_BYTES 128

/* Writes the target of a host that is a numeric address already. False when it is a name. */
bool tl_endpoint_target(const struct tl_endpoint *endpoint, char ret_target[TL_ENDPOINT_TARGET_BYTES]);

/* Writes where the connection comes from as such a target. False when the descriptor is no connection. */
bool tl_endpoint_peer(int fd, char ret_target[TL_ENDPOINT_TARGET_BYTES]);

/* Whether no packet to such a target leaves this machine by an interface of its own. */
bool tl_endpoint_is_loopback(const char *target);

/* The address in such a target. False: there is none, as in that of a Unix socket. */
bool tl_endpoint_ip(const char *target, struct tl_ip *ret_ip);

/* Whether such a target is on this machine, in this network namespace. */
bool tl_endpoint_is_here(const char *target);

/* Bytes of an address with its family: "IPv4 127.0.0.1". */
#define TL_ENDPOINT_WHERE_BYTES (TL_IP_TEXT_BYTES + 8)

/* Writes the address with its family; "" for another family than these two. */
void tl_endpoint_where(const struct sockaddr *address, char ret_where[TL_ENDPOINT_WHERE_BYTES]);

/* Opens a TCP connection to the first of the addresses that takes one, closes it, and returns which one that was.
 * Errors: TL_UNAVAILABLE: none of them does until deadline_ns; the message names all addresses of a host that is a
 * name, and says what tells the most. TL_RESOURCE_EXHAUSTED: this process lacks descriptors or memory to dial them.
 * Blocks: until deadline_ns. */
enum tl_status tl_endpoint_dial(const struct tl_endpoint *endpoint, const struct addrinfo *found, int64_t deadline_ns,
                                char ret_target[TL_ENDPOINT_TARGET_BYTES], struct tl_error *ret_error) TL_MUST_USE;

#endif
