// SPDX-License-Identifier: Apache-2.0
/* What `tensorlane doctor` finds in the network: names, interfaces, sockets, routes. */
#ifndef SERVER_CLI_DOCTOR_NET_H
#define SERVER_CLI_DOCTOR_NET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/ip.h"
#include "server/cli/doctor.h"

struct ifaddrs;
struct tl_local_process;

/* Who uses a name. */
enum tl_doctor_name_use {
    TL_DOCTOR_NAME_OWN,    /* it is this machine's name, and no task's */
    TL_DOCTOR_NAME_WITHIN, /* tasks of this machine alone */
    TL_DOCTOR_NAME_SHARED, /* tasks of several machines */
};

/* The host of a task, and what it resolves to here. */
struct tl_doctor_name {
    const char *host;        /* a name or an address */
    const struct tl_ip *ips; /* [ip_count] */
    size_t ip_count;
    const char *failure; /* why it cannot be resolved; NULL: it can */
    enum tl_doctor_name_use use;
    bool has_listen; /* its tasks are told elsewhere where to listen */
    unsigned port;   /* where its first task listens */
};

/* What the name resolves to, from where, and whether that misleads. */
void tl_doctor_check_name(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                          const struct tl_doctor_name *name);

/* The interfaces that have addresses, with their MTU and state. */
void tl_doctor_check_interfaces(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                                const struct ifaddrs *interfaces);

/* Where a task of this machine should listen. */
struct tl_doctor_socket {
    const char *task;
    const struct tl_doctor_name *name;      /* where peers dial it */
    unsigned port;                          /* at which it listens */
    const struct tl_local_process *process; /* the one that listens; NULL: none was found */
    const char *start;                      /* the command that starts it */
};

/* Which sockets the worker of a task really bound, and whether they take what its name resolves to. */
void tl_doctor_check_socket(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                            const struct tl_doctor_socket *socket);

/* How packets to a host leave this machine. */
struct tl_doctor_route {
    const char *host;
    struct tl_ip to;
    const char *failure; /* why there is no route; NULL: there is one */
    bool has_other;      /* another address of the host can be reached */
    struct tl_ip from;
    char interface[16];     /* that has this address */
    unsigned interface_mtu; /* 0: not known, or another one sends */
    unsigned path_mtu;      /* what the kernel knows of the way; 0: nothing */
};

/* Whether packets from an address of an interface with these flags (IFF_) leave by this interface. Packets from
 * addresses of loopback, dummy and VRF interfaces leave by others, so that the MTU of these is not that of the first
 * hop. Tunnels send themselves, and most are point-to-point links. */
bool tl_doctor_sends_itself(unsigned interface_flags);

/* Finds the route as the kernel would choose it. Nothing is sent. */
void tl_doctor_find_route(const char *host, const struct tl_ip *to, struct tl_doctor_route *ret_route);

void tl_doctor_check_route(struct tl_doctor_report *report, const struct tl_doctor_route *route);

#endif
