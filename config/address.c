// SPDX-License-Identifier: Apache-2.0
/*
 * Addresses: "host:port" and "[v6]:port".
 *
 * Happy path: the text is cut at its last colon, the port and then the host are checked; nothing is resolved.
 * Failure modes: everything that could not be dialled or bound is refused here, with the spelling that works, because
 * the resolver would report it later and in other words, or take it for something else (127.1 for 127.0.0.1).
 */
#include "config/address.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "config/config.h"
#include "config/quote.h"

#define MAX_HOST_BYTES 255
#define MAX_LABEL_BYTES 63
#define MAX_ZONE_BYTES 15

#define DIGITS "0123456789"
#define LETTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

/* An address cut into its parts. */
struct parts {
    char host[MAX_HOST_BYTES + 1]; /* without brackets */
    bool is_v6;
    uint16_t port;
};

static bool parse_port(const char *text, uint16_t *ret_port)
{
    size_t length = strlen(text);
    if (length == 0 || length > 5 || strspn(text, DIGITS) != length) return false;
    if (text[0] == '0' && length > 1) return false;
    unsigned port = 0;
    for (size_t i = 0; i < length; i++) {
        port = port * 10 + (unsigned)(text[i] - '0');
    }
    if (port > UINT16_MAX) return false;
    *ret_port = (uint16_t)port;
    return true;
}

/* Closures, digits, '-' and '_' in labels of at most 63, with dots between them. */
static bool is_host_name(const char *host)
{
    const char *label = host;
    do {
        size_t length = strspn(label, LETTERS DIGITS "-_");
        if (length == 0 || length > MAX_LABEL_BYTES || label[0] == '-') return false;
        label += length;
        if (*label == '\0') return true;
        if (*label != '.') return false;
        label++;
    } while (*label != '\0');
    return true; /* a name with a dot at the end is absolute */
}

static bool is_v4(const char *host)
{
    struct in_addr binary;
    return inet_pton(AF_INET, host, &binary) == 1;
}

/* An IPv6 address, with a zone ("%eth0") or without. */
static bool is_v6(const char *host)
{
    char plain[INET6_ADDRSTRLEN];
    size_t length = strcspn(host, "%");
    if (length >= sizeof(plain)) return false;
    memcpy(plain, host, length);
    plain[length] = '\0';
    struct in6_addr binary;
    if (inet_pton(AF_INET6, plain, &binary) != 1) return false;
    if (host[length] == '\0') return true;
    const char *zone = host + length + 1;
    size_t zone_length = strspn(zone, LETTERS DIGITS "-_.~");
    return zone_length > 0 && zone_length <= MAX_ZONE_BYTES && zone[zone_length] == '\0';
}

static enum tl_status fail(struct tl_error *ret_error, const char *address, const char *problem)
{
    char quoted[TL_QUOTE_BYTES];
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "address %s %s", tl_quote(address, quoted), problem);
}

static enum tl_status check_host(const char *address, const struct parts *parts, struct tl_error *ret_error)
{
    if (parts->is_v6) {
        if (is_v6(parts->host)) return TL_OK;
        return fail(ret_error, address, "has no IPv6 address in its brackets; write [::1]:4000");
    }
    if (strspn(parts->host, DIGITS ".") == strlen(parts->host)) {
        if (is_v4(parts->host)) return TL_OK;
        return fail(ret_error, address, "has a host that is no IPv4 address; write four numbers of 0 to 255");
    }
    if (is_host_name(parts->host)) return TL_OK;
    return fail(ret_error, address,
                "has a host that is no name; use letters, digits, '-', '_' and '.', and no scheme or path");
}

static enum tl_status split(const char *address, struct parts *ret_parts, struct tl_error *ret_error)
{
    bool is_bracketed = address[0] == '[';
    const char *host = is_bracketed ? address + 1 : address;
    size_t host_bytes = strcspn(host, is_bracketed ? "]" : ":");
    const char *rest = host + host_bytes;
    if (is_bracketed) {
        if (*rest != ']') return fail(ret_error, address, "has no closing bracket; write [::1]:4000");
        rest++;
    } else if (strchr(rest, '/')) {
        return fail(ret_error, address, "has a scheme or a path; write host:port");
    } else if (*rest == ':' && strchr(rest + 1, ':')) {
        return fail(ret_error, address, "has several colons; write an IPv6 address in brackets, [::1]:4000");
    }
    if (host_bytes == 0) return fail(ret_error, address, "has no host; write host:port");
    if (host_bytes > MAX_HOST_BYTES) return fail(ret_error, address, "has a host of more than 255 bytes");
    if (*rest != ':') return fail(ret_error, address, "has no port; write host:port");
    struct parts parts = {.is_v6 = is_bracketed};
    memcpy(parts.host, host, host_bytes);
    if (!parse_port(rest + 1, &parts.port)) {
        return fail(ret_error, address, "has a port that is no number up to 65535");
    }
    enum tl_status status = check_host(address, &parts, ret_error);
    if (status == TL_OK) *ret_parts = parts;
    return status;
}

enum tl_status tl_address_split(const char *address, char *ret_host, size_t host_capacity, uint16_t *ret_port,
                                struct tl_error *ret_error)
{
    struct parts parts;
    enum tl_status status = split(address, &parts, ret_error);
    if (status != TL_OK) return status;
    size_t length = strlen(parts.host);
    if (length >= host_capacity) return fail(ret_error, address, "has a host that is longer than the caller expects");
    memcpy(ret_host, parts.host, length + 1);
    *ret_port = parts.port;
    return TL_OK;
}

/* Brings the host into its one spelling; returns true when it stands for every address of the machine. */
static bool canonicalize(struct parts *parts)
{
    struct in_addr v4;
    struct in6_addr v6;
    if (!parts->is_v6) {
        if (inet_pton(AF_INET, parts->host, &v4) == 1) return v4.s_addr == INADDR_ANY;
        for (char *c = parts->host; *c; c++) {
            if (*c >= 'A' && *c <= 'Z') *c = (char)(*c - 'A' + 'a');
        }
        size_t length = strlen(parts->host);
        if (parts->host[length - 1] == '.') parts->host[length - 1] = '\0';
        return false;
    }
    char *zone = strchr(parts->host, '%');
    char zone_text[MAX_ZONE_BYTES + 2] = "";
    if (zone) {
        strcpy(zone_text, zone);
        *zone = '\0';
    }
    if (inet_pton(AF_INET6, parts->host, &v6) != 1) return false;
    inet_ntop(AF_INET6, &v6, parts->host, sizeof(parts->host));
    strcat(parts->host, zone_text);
    return IN6_IS_ADDR_UNSPECIFIED(&v6);
}

static enum tl_status fail_wildcard(struct tl_error *ret_error, const char *address)
{
    return fail(ret_error, address,
                "cannot be dialled by other machines; name the machine here and bind to all addresses with "
                "\"listen\"");
}

enum tl_status tl_address_check(const char *address, enum tl_address_use use, char ret_canonical[TL_ADDRESS_BYTES],
                                struct tl_error *ret_error)
{
    struct parts parts;
    enum tl_status status = split(address, &parts, ret_error);
    if (status != TL_OK) return status;
    bool is_wildcard = canonicalize(&parts);
    if (use == TL_ADDRESS_DIAL && parts.port == 0) {
        return fail(ret_error, address, "has port 0, which cannot be dialled; use a port of 1 to 65535");
    }
    if (use == TL_ADDRESS_DIAL && is_wildcard) return fail_wildcard(ret_error, address);
    snprintf(ret_canonical, TL_ADDRESS_BYTES, parts.is_v6 ? "[%s]:%u" : "%s:%u", parts.host, (unsigned)parts.port);
    return TL_OK;
}

enum tl_status tl_address_check_host(const char *host, char ret_canonical[TL_ADDRESS_BYTES], struct tl_error *ret_error)
{
    struct parts parts = {.is_v6 = strchr(host, ':') != NULL};
    if (strlen(host) > MAX_HOST_BYTES) return fail(ret_error, host, "has more than 255 bytes");
    strcpy(parts.host, host);
    if (parts.is_v6 && !is_v6(host)) return fail(ret_error, host, "is no IPv6 address; a host has no port");
    enum tl_status status = check_host(host, &parts, ret_error);
    if (status != TL_OK) return status;
    if (canonicalize(&parts)) return fail_wildcard(ret_error, host);
    strcpy(ret_canonical, parts.host);
    return TL_OK;
}

bool tl_address_is_loopback(const char *address)
{
    static const char *const prefixes[] = {"127.", "[::1]:", "localhost:"};
    for (size_t i = 0; i < TL_ARRAY_COUNT(prefixes); i++)
        if (strncmp(address, prefixes[i], strlen(prefixes[i])) == 0) return true;
    return false;
}

bool tl_address_is_same_host(const char *a, const char *b)
{
    struct parts parts_a, parts_b;
    return split(a, &parts_a, NULL) == TL_OK && split(b, &parts_b, NULL) == TL_OK &&
           strcmp(parts_a.host, parts_b.host) == 0;
}
