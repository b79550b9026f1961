// SPDX-License-Identifier: Apache-2.0
/* Which hosts are this machine: a name is resolved and its addresses are compared with those of the interfaces. A name
 * that cannot be resolved is ours when it is the machine's own. */
#include "server/cli/local_host.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What the name service has said of a host, so that it is asked once. */
struct answer {
    struct answer *next;
    bool is_local;
    const char *reason; /* static; NULL: it was found out */
    char host[];
};

struct tl_local_hosts {
    struct ifaddrs *interfaces;
    struct answer *answers;
};

struct tl_local_hosts *tl_local_hosts_create(void)
{
    struct tl_local_hosts *hosts = calloc(1, sizeof(*hosts));
    if (!hosts) return NULL;
    if (getifaddrs(&hosts->interfaces) != 0) {
        free(hosts);
        return NULL;
    }
    return hosts;
}

void tl_local_hosts_destroy(struct tl_local_hosts *hosts)
{
    if (!hosts) return;
    for (struct answer *answer = hosts->answers, *next; answer; answer = next) {
        next = answer->next;
        free(answer);
    }
    freeifaddrs(hosts->interfaces);
    free(hosts);
}

static const struct in_addr *v4_of(const struct sockaddr *address)
{
    return &((const struct sockaddr_in *)(const void *)address)->sin_addr;
}

static const struct in6_addr *v6_of(const struct sockaddr *address)
{
    return &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr;
}

/* Loopback addresses, and the one that means all addresses. */
static bool is_always_local(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET) {
        in_addr_t v4 = ntohl(v4_of(address)->s_addr);
        return v4 >> 24 == 127 || v4 == INADDR_ANY;
    }
    return address->sa_family == AF_INET6 &&
           (IN6_IS_ADDR_LOOPBACK(v6_of(address)) || IN6_IS_ADDR_UNSPECIFIED(v6_of(address)));
}

static bool is_same(const struct sockaddr *a, const struct sockaddr *b)
{
    if (!b || a->sa_family != b->sa_family) return false;
    if (a->sa_family == AF_INET) return v4_of(a)->s_addr == v4_of(b)->s_addr;
    return a->sa_family == AF_INET6 && IN6_ARE_ADDR_EQUAL(v6_of(a), v6_of(b));
}

static bool is_ours(const struct tl_local_hosts *hosts, const struct sockaddr *address)
{
    if (is_always_local(address)) return true;
    for (const struct ifaddrs *interface = hosts->interfaces; interface; interface = interface->ifa_next)
        if (is_same(address, interface->ifa_addr)) return true;
    return false;
}

bool tl_local_host_is_own_name(const char *host)
{
    char own[256];
    if (gethostname(own, sizeof(own)) != 0) return false;
    own[sizeof(own) - 1] = '\0';
    return strcasecmp(own, host) == 0;
}

static bool look_up(const struct tl_local_hosts *hosts, const char *host, const char **ret_reason)
{
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    bool is_local = false;
    *ret_reason = NULL;
    int code = getaddrinfo(host, NULL, &hints, &found);
    if (code != 0) {
        if (tl_local_host_is_own_name(host)) return true;
        *ret_reason = gai_strerror(code);
        return false;
    }
    for (const struct addrinfo *entry = found; entry && !is_local; entry = entry->ai_next)
        is_local = is_ours(hosts, entry->ai_addr);
    freeaddrinfo(found);
    return is_local;
}

bool tl_local_hosts_has(struct tl_local_hosts *hosts, const char *host, const char **ret_reason)
{
    for (const struct answer *answer = hosts->answers; answer; answer = answer->next) {
        if (strcmp(answer->host, host) != 0) continue;
        *ret_reason = answer->reason;
        return answer->is_local;
    }
    bool is_local = look_up(hosts, host, ret_reason);
    size_t size = strlen(host) + 1;
    struct answer *answer = malloc(sizeof(*answer) + size);
    if (!answer) return is_local;
    *answer = (struct answer){.next = hosts->answers, .is_local = is_local, .reason = *ret_reason};
    memcpy(answer->host, host, size);
    hosts->answers = answer;
    return is_local;
}
