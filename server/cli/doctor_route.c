// SPDX-License-Identifier: Apache-2.0
/* Asks the kernel how packets to an address leave this machine: a UDP socket is connected, which sends nothing. */
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/cli/doctor_net.h"

/* Any port will do. */
#define PORT 9

bool tl_doctor_sends_itself(unsigned interface_flags)
{
    return (interface_flags & IFF_LOOPBACK) == 0 && (interface_flags & (IFF_NOARP | IFF_POINTOPOINT)) != IFF_NOARP;
}

/* Finds the interface that has the address from which packets leave. */
static void find_interface(int fd, struct tl_doctor_route *route)
{
    struct ifaddrs *interfaces;
    struct ifreq request = {.ifr_mtu = 0};
    if (getifaddrs(&interfaces) != 0) return;
    for (const struct ifaddrs *each = interfaces; each; each = each->ifa_next) {
        struct tl_ip own;
        if (!each->ifa_addr || !tl_ip_of_sockaddr(each->ifa_addr, &own) || !tl_ip_is_equal(&own, &route->from))
            continue;
        snprintf(route->interface, sizeof(route->interface), "%s", each->ifa_name);
        snprintf(request.ifr_name, sizeof(request.ifr_name), "%s", each->ifa_name);
        if (tl_doctor_sends_itself(each->ifa_flags) && ioctl(fd, SIOCGIFMTU, &request) == 0 && request.ifr_mtu > 0)
            route->interface_mtu = (unsigned)request.ifr_mtu;
        break;
    }
    freeifaddrs(interfaces);
}

static void describe_connected(int fd, struct tl_doctor_route *route)
{
    struct sockaddr_storage own = {0};
    socklen_t len_bytes = sizeof(own);
    int mtu = 0;
    socklen_t mtu_bytes = sizeof(mtu);
    bool is_v4 = tl_ip_is_v4(&route->to);
    if (getsockname(fd, (struct sockaddr *)&own, &len_bytes) == 0)
        (void)tl_ip_of_sockaddr((const struct sockaddr *)&own, &route->from);
    if (getsockopt(fd, is_v4 ? IPPROTO_IP : IPPROTO_IPV6, is_v4 ? IP_MTU : IPV6_MTU, &mtu, &mtu_bytes) == 0 && mtu > 0)
        route->path_mtu = (unsigned)mtu;
    find_interface(fd, route);
}

void tl_doctor_find_route(const char *host, const struct tl_ip *to, struct tl_doctor_route *ret_route)
{
    struct sockaddr_storage address;
    socklen_t len_bytes = tl_ip_to_sockaddr(to, PORT, &address);
    *ret_route = (struct tl_doctor_route){.host = host, .to = *to, .interface = "?"};
    int fd = socket(address.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)&address, len_bytes) != 0) {
        ret_route->failure = strerror(errno);
    } else {
        describe_connected(fd, ret_route);
    }
    if (fd >= 0) close(fd);
}
