// SPDX-License-Identifier: Apache-2.0
/*
 * What `tensorlane doctor` finds about RDMA cards, from the candidates that `tensorlane devices` lists and from what
 * the kernel tells of their ports: each port once, then what a task would take.
 *
 * A card that is not needed is no fault: what is wrong with it is a note, unless a task requires one and would take
 * this one, or finds none.
 */
#include "server/cli/doctor_rdma.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "server/cli/proc_line.h"
#include "server/cli/remedy.h"

#define MAX_PKEYS 128

static bool is_same_port(const struct tl_verbs_candidate *a, const struct tl_verbs_candidate *b)
{
    return strcmp(a->device, b->device) == 0 && a->port == b->port;
}

/* The verdict on something that is wrong with a port. */
static enum tl_doctor_verdict bad_of(const struct tl_doctor_needs *needs, const struct tl_devices_report *devices,
                                     const struct tl_verbs_candidate *port)
{
    const struct tl_verbs_candidate *chosen = tl_devices_chosen(devices);
    bool is_needed = needs->is_rdma_required && (!chosen || is_same_port(chosen, port));
    return is_needed ? TL_DOCTOR_FAULT : TL_DOCTOR_NOTE;
}

/* ------------------------------------------------------------------------------------------------------- ports -- */

static bool is_repeated(const struct tl_devices_report *devices, size_t place)
{
    for (size_t i = 0; i < place; i++)
        if (is_same_port(&devices->candidates[i], &devices->candidates[place])) return true;
    return false;
}

/* Lists the GIDs of the port: "3: 10.0.0.1 RoCE v2 eth0". */
static void list_gids(const struct tl_devices_report *devices, const struct tl_verbs_candidate *port, char *ret_list,
                      size_t capacity)
{
    char text[256];
    ret_list[0] = '\0';
    for (size_t i = 0; i < devices->count; i++) {
        const struct tl_verbs_candidate *each = &devices->candidates[i];
        if (!is_same_port(each, port) || each->gid_index < 0) continue;
        snprintf(text, sizeof(text), "%d: %s %s %s", each->gid_index, each->gid, each->gid_type, each->interface);
        tl_doctor_append(ret_list, capacity, text);
    }
}

static void check_state(struct tl_doctor_report *report, const struct tl_doctor_needs *needs,
                        const struct tl_devices_report *devices, const struct tl_verbs_candidate *port)
{
    char what[96];
    snprintf(what, sizeof(what), "port %s:%" PRIu32, port->device, port->port);
    bool is_active = strcmp(port->state, "active") == 0;
    tl_doctor_add(report, is_active ? TL_DOCTOR_OK : bad_of(needs, devices, port), what, "%s, %s, %g Gbit/s",
                  port->state, port->link_layer, (double)port->speed_mbps / 1000);
    if (!is_active) {
        tl_doctor_explain(report,
                          "the port is %s; look at the cable, the switch, the subnet manager (InfiniBand) and "
                          "\"ip link\"",
                          port->state);
    }
}

static void check_gids(struct tl_doctor_report *report, const struct tl_doctor_needs *needs,
                       const struct tl_devices_report *devices, const struct tl_verbs_candidate *port)
{
    char what[96], list[480];
    snprintf(what, sizeof(what), "GIDs of %s:%" PRIu32, port->device, port->port);
    list_gids(devices, port, list, sizeof(list));
    bool has_any = list[0] != '\0';
    tl_doctor_add(report, has_any ? TL_DOCTOR_OK : bad_of(needs, devices, port), what, "%s", has_any ? list : "none");
    if (!has_any) tl_doctor_explain(report, "the port has no GID, because its interface has no address; give it one");
}

static void check_mtu(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                      const struct tl_verbs_candidate *port)
{
    char what[96], mtu[16] = "unknown";
    snprintf(what, sizeof(what), "MTU of %s:%" PRIu32, port->device, port->port);
    if (port->interface[0] != '\0')
        (void)tl_doctor_read_line(mtu, sizeof(mtu), roots->sys, "class/net/%s/mtu", port->interface);
    bool is_small = port->mtu_bytes < port->max_mtu_bytes && strcmp(port->link_layer, "Ethernet") == 0;
    tl_doctor_add(report, is_small ? TL_DOCTOR_NOTE : TL_DOCTOR_OK, what, "%" PRIu32 " of %" PRIu32 "; %s has %s",
                  port->mtu_bytes, port->max_mtu_bytes, port->interface[0] != '\0' ? port->interface : "no interface",
                  mtu);
    if (!is_small) return;
    tl_doctor_explain(report,
                      "packets carry %" PRIu32 " bytes, and could %" PRIu32
                      ", because the MTU of the interface is small; set it to %" PRIu32
                      " or more on all machines and switches: ip link set %s mtu %" PRIu32,
                      port->mtu_bytes, port->max_mtu_bytes, port->max_mtu_bytes + 104,
                      port->interface[0] != '\0' ? port->interface : "IF", port->max_mtu_bytes + 104);
}

static void check_windows(struct tl_doctor_report *report, const struct tl_doctor_needs *needs,
                          const struct tl_devices_report *devices, const struct tl_verbs_candidate *port)
{
    char what[96];
    bool wants_windows = !devices->task || devices->task->settings.verbs.keys == TL_VERBS_KEYS_WINDOW;
    snprintf(what, sizeof(what), "memory windows of %s", port->device);
    bool is_bad = wants_windows && !port->has_windows;
    tl_doctor_add(report, is_bad ? bad_of(needs, devices, port) : TL_DOCTOR_OK, what, "%s",
                  port->has_windows ? "type 2" : "none");
    if (!is_bad) return;
    tl_doctor_explain(report, "the card has no memory windows of type 2, without which a peer could write to more than "
                              "it was asked for; where all peers are trusted, set verbs.keys to \"region\"");
}

/* ---------------------------------------------------------------------------------------------- partition keys -- */

/* Reads the table: "0: 0xffff, 3: 0x8001", without the entries that are empty. Returns how many entries there are. */
static unsigned list_pkeys(const struct tl_doctor_roots *roots, const struct tl_verbs_candidate *port, char *ret_list,
                           size_t capacity)
{
    char key[16], text[32];
    unsigned count = 0;
    ret_list[0] = '\0';
    for (; count < MAX_PKEYS; count++) {
        if (!tl_doctor_read_line(key, sizeof(key), roots->sys, "class/infiniband/%s/ports/%" PRIu32 "/pkeys/%u",
                                 port->device, port->port, count))
            break;
        if (strtoul(key, NULL, 16) == 0) continue;
        snprintf(text, sizeof(text), "%u: %s", count, key);
        tl_doctor_append(ret_list, capacity, text);
    }
    return count;
}

static void check_pkeys(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                        const struct tl_doctor_needs *needs, const struct tl_devices_report *devices,
                        const struct tl_verbs_candidate *port)
{
    char what[96], list[400], key[16];
    uint64_t place = devices->task ? devices->task->settings.verbs.pkey_index : 0;
    snprintf(what, sizeof(what), "partition keys of %s:%" PRIu32, port->device, port->port);
    unsigned count = list_pkeys(roots, port, list, sizeof(list));
    if (count == 0) {
        tl_doctor_add(report, TL_DOCTOR_UNKNOWN, what, "-");
        tl_doctor_explain(report, "the kernel shows no table of this port; look at it with: ibv_devinfo -v -d %s",
                          port->device);
        return;
    }
    if (!tl_doctor_read_line(key, sizeof(key), roots->sys, "class/infiniband/%s/ports/%" PRIu32 "/pkeys/%" PRIu64,
                             port->device, port->port, place))
        key[0] = '\0';
    unsigned long value = strtoul(key, NULL, 16);
    bool is_limited = value != 0 && (value & 0x8000) == 0;
    tl_doctor_add(report,
                  value == 0   ? bad_of(needs, devices, port)
                  : is_limited ? TL_DOCTOR_NOTE
                               : TL_DOCTOR_OK,
                  what, "%s", list);
    if (key[0] == '\0') {
        tl_doctor_explain(report,
                          "verbs.pkey_index is %" PRIu64
                          ", and the table of the port has %u entries; set it to an entry "
                          "of the table that all workers have",
                          place, count);
    } else if (value == 0) {
        tl_doctor_explain(report,
                          "verbs.pkey_index is %" PRIu64
                          ", and this entry of the table is empty; set it to one that is "
                          "not, or let the subnet manager add this port to the partition",
                          place);
    } else if (is_limited) {
        tl_doctor_explain(report,
                          "the port is a limited member of partition %s, and two limited members do not reach each "
                          "other; let the subnet manager make it a full member",
                          key);
    }
}

/* -------------------------------------------------------------------------------------------------------- NUMA -- */

/* Whether two lists of processors, "0-3,8", have one in common. */
static bool do_overlap(const char *a, const char *b)
{
    while (*a != '\0') {
        char *end;
        unsigned long first = strtoul(a, &end, 10), last = first;
        if (end == a) return false;
        if (*end == '-') last = strtoul(end + 1, &end, 10);
        for (const char *other = b; *other != '\0';) {
            char *other_end;
            unsigned long other_first = strtoul(other, &other_end, 10), other_last = other_first;
            if (other_end == other) break;
            if (*other_end == '-') other_last = strtoul(other_end + 1, &other_end, 10);
            if (first <= other_last && other_first <= last) return true;
            other = *other_end == ',' ? other_end + 1 : other_end;
        }
        a = *end == ',' ? end + 1 : end;
    }
    return false;
}

/* Reads the processors on which this process may run. */
static bool read_allowed(const struct tl_doctor_roots *roots, char *ret_list, size_t capacity)
{
    char path[1024];
    snprintf(path, sizeof(path), "%s/self/status", roots->proc);
    return tl_proc_find_line(path, "Cpus_allowed_list:", ret_list, capacity);
}

static void check_node(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                       const struct tl_verbs_candidate *port)
{
    char what[96], node_list[256], allowed[256] = "";
    snprintf(what, sizeof(what), "NUMA node of %s", port->device);
    if (port->numa_node < 0) {
        tl_doctor_add(report, TL_DOCTOR_OK, what, "none");
        return;
    }
    bool is_known = tl_doctor_read_line(node_list, sizeof(node_list), roots->sys, "devices/system/node/node%d/cpulist",
                                        port->numa_node) &&
                    read_allowed(roots, allowed, sizeof(allowed));
    bool is_far = is_known && !do_overlap(node_list, allowed);
    tl_doctor_add(report, is_far ? TL_DOCTOR_NOTE : TL_DOCTOR_OK, what, "%d", port->numa_node);
    if (!is_far) return;
    tl_doctor_explain(report,
                      "the card is at node %d with processors %s, this process may run on %s only, so that every byte "
                      "crosses the machine; start the worker there: numactl --cpunodebind=%d --membind=%d",
                      port->numa_node, node_list, allowed, port->numa_node, port->numa_node);
}

/* --------------------------------------------------------------------------------------------------------- all -- */

/* Whether RoCE packets reach another machine needs both sides. */
static void note_roce(struct tl_doctor_report *report, const struct tl_devices_report *devices)
{
    bool has_roce = false;
    for (size_t i = 0; i < devices->count; i++)
        has_roce = has_roce || strcmp(devices->candidates[i].link_layer, "Ethernet") == 0;
    if (!has_roce) return;
    tl_doctor_add(report, TL_DOCTOR_UNKNOWN, "UDP port 4791", "not tried");
    tl_doctor_explain(report, "whether RoCE packets pass between two machines cannot be tried from one of them; "
                              "tensorlane health asks the workers, which write to each other");
}

void tl_doctor_check_ports(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                           const struct tl_doctor_needs *needs, const struct tl_devices_report *devices)
{
    for (size_t i = 0; i < devices->count; i++) {
        const struct tl_verbs_candidate *port = &devices->candidates[i];
        if (is_repeated(devices, i)) continue;
        if (port->port == 0) {
            char what[96];
            const char *remedy;
            snprintf(what, sizeof(what), "device %s", port->device);
            tl_doctor_add(report, bad_of(needs, devices, port), what, "-");
            (void)tl_remedy_split(port->reason, &remedy);
            tl_doctor_explain(report, "%s%s", port->reason,
                              remedy[0] != '\0' ? "" : "; see the messages of the kernel: dmesg");
            continue;
        }
        check_state(report, needs, devices, port);
        check_gids(report, needs, devices, port);
        check_mtu(report, roots, port);
        check_pkeys(report, roots, needs, devices, port);
        check_windows(report, needs, devices, port);
        check_node(report, roots, port);
    }
    note_roce(report, devices);
}

void tl_doctor_check_choice(struct tl_doctor_report *report, const struct tl_doctor_needs *needs,
                            const struct tl_devices_report *devices)
{
    char what[96];
    const struct tl_verbs_candidate *chosen = tl_devices_chosen(devices);
    enum tl_doctor_verdict bad = needs->is_rdma_required ? TL_DOCTOR_FAULT : TL_DOCTOR_NOTE;
    if (devices->refusal || devices->lock_error.code != TL_OK || devices->list_error.code == TL_NOT_FOUND) return;
    snprintf(what, sizeof(what), "card for %.80s", devices->task ? devices->task->name : "a task");
    if (devices->list_error.code != TL_OK) {
        tl_doctor_add(report, bad, what, "-");
        tl_doctor_explain(report, "%s", devices->list_error.message);
    } else if (chosen) {
        tl_doctor_add(report, TL_DOCTOR_OK, what, "%s port %" PRIu32 " with GID %d%s", chosen->device, chosen->port,
                      chosen->gid_index, devices->is_verified ? "; a write through it was verified" : "");
    } else if (devices->count > 0) {
        tl_doctor_add(report, bad, what, "none");
        tl_doctor_explain(report, "%s port %" PRIu32 ": %s; tensorlane devices lists all with their reasons",
                          devices->candidates[0].device, devices->candidates[0].port, devices->candidates[0].reason);
    }
}
