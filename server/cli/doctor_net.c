// SPDX-License-Identifier: Apache-2.0
/*
 * What `tensorlane doctor` finds in the network of a machine: interfaces, what names resolve to, which sockets a worker
 * really bound, and how the packets to a host leave.
 *
 * The addresses come from the caller, so that names that mislead can be tried without a name service. Nothing is sent.
 */
#include <ifaddrs.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/check.h"
#include "base/ip.h"
#include "server/cli/doctor.h"
#include "server/cli/doctor_net.h"
#include "server/cli/local_process.h"
#include "server/cli/socket_table.h"

/* --------------------------------------------------------------------------------------------------- addresses -- */

/* Writes "10.0.0.7 (IPv4), fd00::7 (IPv6)". */
static void list_ips(const struct tl_ip *ips, size_t count, char *ret_list, size_t capacity)
{
    char ip_text[TL_IP_TEXT_BYTES], text[64];
    ret_list[0] = '\0';
    for (size_t i = 0; i < count; i++) {
        snprintf(text, sizeof(text), "%s (%s)", tl_ip_format(&ips[i], ip_text), tl_ip_family(&ips[i]));
        tl_doctor_append(ret_list, capacity, text);
    }
}

static bool are_all_loopback(const struct tl_ip *ips, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!tl_ip_is_loopback(&ips[i])) return false;
    return count > 0;
}

/* Whether the name says itself that it is loopback, as for a port that is forwarded. */
static bool is_written_loopback(const char *host)
{
    struct tl_ip ip;
    return strcasecmp(host, "localhost") == 0 || (tl_ip_parse(host, &ip) && tl_ip_is_loopback(&ip));
}

/* ------------------------------------------------------------------------------------------------------- names -- */

/* Whether a line of /etc/hosts gives the name one of the addresses. */
static bool gives_name(char *line, const struct tl_doctor_name *name)
{
    char *rest = NULL;
    struct tl_ip ip;
    bool is_address_ours = false;
    line[strcspn(line, "#\n")] = '\0';
    const char *address = strtok_r(line, " \t", &rest);
    if (!address || !tl_ip_parse(address, &ip)) return false;
    for (size_t i = 0; i < name->ip_count; i++)
        is_address_ours = is_address_ours || tl_ip_is_equal(&ip, &name->ips[i]);
    for (const char *word; is_address_ours && (word = strtok_r(NULL, " \t", &rest)) != NULL;)
        if (strcasecmp(word, name->host) == 0) return true;
    return false;
}

/* Returns the line of /etc/hosts that the addresses come from; 0: they come from elsewhere. */
static unsigned find_hosts_line(const struct tl_doctor_roots *roots, const struct tl_doctor_name *name)
{
    char path[1024], line[1024];
    unsigned found = 0;
    snprintf(path, sizeof(path), "%s/hosts", roots->etc);
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    for (unsigned number = 1; found == 0 && fgets(line, sizeof(line), file) != NULL; number++)
        if (gives_name(line, name)) found = number;
    fclose(file);
    return found;
}

static void explain_loopback(struct tl_doctor_report *report, const struct tl_doctor_name *name, const char *source)
{
    char ip_text[TL_IP_TEXT_BYTES];
    const char *ip = tl_ip_format(&name->ips[0], ip_text);
    if (name->use == TL_DOCTOR_NAME_OWN) {
        tl_doctor_explain(report,
                          "the own name of this machine, %s, resolves to %s here%s, which other machines cannot reach, "
                          "and a worker with this name in its address listens there only; let it resolve to the "
                          "machine's address, or give workers addresses or other names in cluster.json",
                          name->host, ip, source);
    } else if (is_written_loopback(name->host)) {
        tl_doctor_explain(report,
                          "%s means this machine on every machine, so that others reach the task only where its port "
                          "is forwarded; give it an address or a name of this machine in cluster.json",
                          name->host);
    } else {
        tl_doctor_explain(report,
                          "%s resolves to %s here%s, which other machines cannot reach; correct /etc/hosts or DNS, or "
                          "set \"listen\" to \"0.0.0.0:%u\"",
                          name->host, ip, source, name->port);
    }
}

void tl_doctor_check_name(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                          const struct tl_doctor_name *name)
{
    char what[96], list[400], source[64] = "";
    snprintf(what, sizeof(what), "%s %.80s", name->use == TL_DOCTOR_NAME_OWN ? "own name" : "host", name->host);
    if (name->failure) {
        bool is_fault = name->use != TL_DOCTOR_NAME_OWN;
        tl_doctor_add(report, is_fault ? TL_DOCTOR_FAULT : TL_DOCTOR_NOTE, what, "-");
        tl_doctor_explain(report, "%s", name->failure);
        return;
    }
    unsigned line = find_hosts_line(roots, name);
    if (line > 0) snprintf(source, sizeof(source), " (line %u of /etc/hosts)", line);
    list_ips(name->ips, name->ip_count, list, sizeof(list));
    bool misleads = name->use != TL_DOCTOR_NAME_WITHIN && are_all_loopback(name->ips, name->ip_count);
    /* A worker that listens elsewhere is reached; peers use their own name service. */
    bool is_fault = name->use == TL_DOCTOR_NAME_SHARED && !name->has_listen && !is_written_loopback(name->host);
    tl_doctor_add(report,
                  !misleads  ? TL_DOCTOR_OK
                  : is_fault ? TL_DOCTOR_FAULT
                             : TL_DOCTOR_NOTE,
                  what, "%s%s", list, source);
    if (misleads) explain_loopback(report, name, source);
}

/* -------------------------------------------------------------------------------------------------- interfaces -- */

/* Lists the addresses of one interface. */
static void list_addresses(const struct ifaddrs *interfaces, const char *interface, char *ret_list, size_t capacity)
{
    struct tl_ip ip;
    char ip_text[TL_IP_TEXT_BYTES];
    ret_list[0] = '\0';
    for (const struct ifaddrs *each = interfaces; each; each = each->ifa_next)
        if (strcmp(each->ifa_name, interface) == 0 && each->ifa_addr && tl_ip_of_sockaddr(each->ifa_addr, &ip))
            tl_doctor_append(ret_list, capacity, tl_ip_format(&ip, ip_text));
}

/* Whether an entry before this one has the same interface. */
static bool is_repeated(const struct ifaddrs *interfaces, const struct ifaddrs *entry)
{
    for (const struct ifaddrs *each = interfaces; each != entry; each = each->ifa_next)
        if (strcmp(each->ifa_name, entry->ifa_name) == 0) return true;
    return false;
}

void tl_doctor_check_interfaces(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                                const struct ifaddrs *interfaces)
{
    char what[96], list[300], mtu[16], state[32];
    for (const struct ifaddrs *each = interfaces; each; each = each->ifa_next) {
        if (is_repeated(interfaces, each)) continue;
        list_addresses(interfaces, each->ifa_name, list, sizeof(list));
        if (list[0] == '\0') continue;
        if (!tl_doctor_read_line(mtu, sizeof(mtu), roots->sys, "class/net/%s/mtu", each->ifa_name))
            snprintf(mtu, sizeof(mtu), "unknown");
        if (!tl_doctor_read_line(state, sizeof(state), roots->sys, "class/net/%s/operstate", each->ifa_name))
            snprintf(state, sizeof(state), "unknown");
        /* A bridge without ports is down, too, and nothing is wrong with it. */
        bool is_down = (strcmp(state, "down") == 0 || strcmp(state, "lowerlayerdown") == 0) &&
                       tl_doctor_has_path(roots->sys, "class/net/%s/device", each->ifa_name);
        snprintf(what, sizeof(what), "interface %s", each->ifa_name);
        tl_doctor_add(report, is_down ? TL_DOCTOR_NOTE : TL_DOCTOR_OK, what, "%s; MTU %s, %s", list, mtu, state);
        if (is_down) {
            tl_doctor_explain(report,
                              "%s has an address and no link; look at the cable and the switch, then: ip link "
                              "set %s up",
                              each->ifa_name, each->ifa_name);
        }
    }
}

/* ----------------------------------------------------------------------------------------------------- sockets -- */

/* Returns how many of the name's addresses no socket takes, and the first of them. */
static size_t count_missed(const struct tl_ip *bound, size_t bound_count, const struct tl_doctor_name *name,
                           const struct tl_ip **ret_first)
{
    size_t missed_count = 0;
    for (size_t i = 0; i < name->ip_count; i++) {
        bool is_taken = false;
        for (size_t j = 0; j < bound_count; j++)
            is_taken = is_taken || tl_socket_table_takes(&bound[j], &name->ips[i]);
        if (is_taken) continue;
        if (missed_count++ == 0) *ret_first = &name->ips[i];
    }
    return missed_count;
}

static void describe_process(const struct tl_local_process *process, char *ret_text, size_t capacity)
{
    ret_text[0] = '\0';
    if (process && process->pid == 0) snprintf(ret_text, capacity, ", a process of user %" PRIu32, process->user);
    if (process && process->pid != 0)
        snprintf(ret_text, capacity, ", process %d (%s)", (int)process->pid, process->name);
}

/* What is wrong with the sockets of a task. */
struct sockets_finding {
    bool is_in_trouble;         /* the process cannot answer: reason and remedy say why */
    bool is_hidden;             /* other machines dial it, and it listens on loopback only */
    bool is_unseen;             /* this user may not look into the process */
    const struct tl_ip *missed; /* the first address of the name that no socket takes; NULL: they take all */
    enum tl_doctor_verdict verdict;
    char reason[TL_ERROR_MESSAGE_BYTES], remedy[TL_ERROR_MESSAGE_BYTES];
};

static void look_at_sockets(const struct tl_doctor_socket *socket, const struct tl_ip *bound, size_t count,
                            struct sockets_finding *ret_finding)
{
    const struct tl_doctor_name *name = socket->name;
    struct sockets_finding *finding = ret_finding;
    *finding = (struct sockets_finding){.missed = NULL};
    finding->is_in_trouble = socket->process && socket->process->pid != 0 &&
                             tl_local_process_trouble(socket->process, name->host, finding->reason, finding->remedy);
    finding->is_unseen = socket->process && socket->process->pid == 0;
    finding->is_hidden = name->use == TL_DOCTOR_NAME_SHARED && are_all_loopback(bound, count);
    size_t missed_count = count_missed(bound, count, name, &finding->missed);
    bool are_all_missed = name->ip_count > 0 && missed_count == name->ip_count;
    /* Only tasks of this machine dial such an address; the others ask their own name service. */
    bool is_dialled_here_only =
        name->use == TL_DOCTOR_NAME_SHARED && name->has_listen && are_all_loopback(name->ips, name->ip_count);
    bool hides_unasked = finding->is_hidden && !is_written_loopback(name->host);
    bool is_fault = finding->is_in_trouble || hides_unasked || (are_all_missed && !is_dialled_here_only);
    finding->verdict = is_fault                                ? TL_DOCTOR_FAULT
                       : finding->is_hidden || finding->missed ? TL_DOCTOR_NOTE
                       : finding->is_unseen                    ? TL_DOCTOR_UNKNOWN
                                                               : TL_DOCTOR_OK;
}

static void judge_sockets(struct tl_doctor_report *report, const char *what, const struct tl_doctor_socket *socket,
                          const struct tl_ip *bound, size_t count)
{
    struct sockets_finding finding;
    char list[400], process[80], ip_text[TL_IP_TEXT_BYTES];
    list_ips(bound, count, list, sizeof(list));
    describe_process(socket->process, process, sizeof(process));
    look_at_sockets(socket, bound, count, &finding);
    tl_doctor_add(report, finding.verdict, what, "port %u of %s%s", socket->port, list, process);
    if (finding.is_in_trouble) {
        tl_doctor_explain_both(report, finding.reason, finding.remedy);
    } else if (finding.is_hidden) {
        tl_doctor_explain(report,
                          "it listens on loopback only, where other machines cannot reach it; correct /etc/hosts or "
                          "DNS, or set \"listen\" to \"0.0.0.0:%u\", and start the worker anew",
                          socket->port);
    } else if (finding.missed) {
        tl_doctor_explain(report,
                          "%s resolves to %s (%s) here, where nothing listens at port %u; correct /etc/hosts or DNS, "
                          "or set \"listen\" to \"[::]:%u\", which takes IPv4 and IPv6, and start the worker anew",
                          socket->name->host, tl_ip_format(finding.missed, ip_text), tl_ip_family(finding.missed),
                          socket->port, socket->port);
    } else if (finding.is_unseen) {
        tl_doctor_explain(report,
                          "this user may not see which process of user %" PRIu32 " it is, and whether it is stopped or "
                          "out of descriptors; run doctor as that user or as root",
                          socket->process->user);
    }
}

void tl_doctor_check_socket(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                            const struct tl_doctor_socket *socket)
{
    struct tl_bound_socket sockets[TL_MAX_BOUND_SOCKETS];
    struct tl_ip bound[TL_MAX_BOUND_SOCKETS];
    size_t count = 0;
    char what[96];
    snprintf(what, sizeof(what), "socket of %.80s", socket->task);
    bool is_read = tl_socket_table_find(roots->proc, (uint16_t)socket->port, sockets, &count);
    for (size_t i = 0; i < count; i++)
        bound[i] = sockets[i].ip;
    if (!is_read) {
        tl_doctor_add(report, TL_DOCTOR_UNKNOWN, what, "-");
        tl_doctor_explain(report, "%s/net/tcp cannot be read; mount /proc", roots->proc);
    } else if (count == 0) {
        tl_doctor_add(report, TL_DOCTOR_NOTE, what, "nothing listens at port %u", socket->port);
        tl_doctor_explain(report, "the worker does not run in this network namespace; start it: %s", socket->start);
    } else {
        judge_sockets(report, what, socket, bound, count);
    }
}

/* ------------------------------------------------------------------------------------------------------ routes -- */

void tl_doctor_check_route(struct tl_doctor_report *report, const struct tl_doctor_route *route)
{
    char what[96], to[TL_IP_TEXT_BYTES], from[TL_IP_TEXT_BYTES];
    snprintf(what, sizeof(what), "route to %.80s", route->host);
    tl_ip_format(&route->to, to);
    if (route->failure) {
        tl_doctor_add(report, route->has_other ? TL_DOCTOR_NOTE : TL_DOCTOR_FAULT, what, "%s", to);
        tl_doctor_explain(
            report,
            "this machine has no way to %s (%s): %s; look at \"ip route get %s\", and at the addresses of "
            "this machine",
            to, tl_ip_family(&route->to), route->failure, to);
        return;
    }
    bool is_narrow = route->path_mtu > 0 && route->path_mtu < route->interface_mtu;
    tl_doctor_add(report, is_narrow ? TL_DOCTOR_NOTE : TL_DOCTOR_OK, what, "%s from %s (%s), MTU %u", to,
                  tl_ip_format(&route->from, from), route->interface, route->path_mtu);
    if (!is_narrow) return;
    tl_doctor_explain(report,
                      "the way to %s carries packets of %u bytes, %s would send %u; that slows transfers and breaks "
                      "RDMA with larger packets: raise the MTU of the hop, or set that of %s to %u",
                      to, route->path_mtu, route->interface, route->interface_mtu, route->interface, route->path_mtu);
}
