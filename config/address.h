// SPDX-License-Identifier: Apache-2.0
/* Addresses as the configuration needs them: checked, and in one spelling so that two of them can be compared.
 * tl_address_split is in config/config.h. */
#ifndef CONFIG_ADDRESS_H
#define CONFIG_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>

#include <tensorlane/status.h>

/* Holds every canonical address: host, brackets, colon, port, NUL. */
#define TL_ADDRESS_BYTES 272

enum tl_address_use {
    TL_ADDRESS_DIAL,   /* peers dial it: port 1..65535, not 0.0.0.0 nor [::] */
    TL_ADDRESS_LISTEN, /* to bind: port 0 lets the kernel choose */
};

/* Checks an address and writes its one spelling: names in lower case without the last dot, IPv4 and IPv6 as inet_ntop
 * writes them. Errors: TL_INVALID_ARGUMENT: not an address, or not for this use. */
enum tl_status tl_address_check(const char *address, enum tl_address_use use, char ret_canonical[TL_ADDRESS_BYTES],
                                struct tl_error *ret_error) TL_MUST_USE;

/* The same for a host alone, to dial; an IPv6 address has no brackets. */
enum tl_status tl_address_check_host(const char *host, char ret_canonical[TL_ADDRESS_BYTES],
                                     struct tl_error *ret_error) TL_MUST_USE;

/* Whether only this machine can reach the address "host:port": "127.0.0.1:4000", "[::1]:4000", "localhost:4000". */
bool tl_address_is_loopback(const char *address);

/* Whether two addresses in their one spelling have the same host. Nothing is resolved. */
bool tl_address_is_same_host(const char *a, const char *b);

#endif
