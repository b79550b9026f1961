// SPDX-License-Identifier: Apache-2.0
/*
 * What `tensorlane doctor` finds on a machine that has nothing to do with its network: limits, modules, pages, NUMA
 * nodes, and what the kernel allows. All of it can be read without a privilege.
 */
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <tensorlane/version.h>

#include "base/check.h"
#include "base/text.h"
#include "control/client.h"
#include "server/cli/doctor.h"

/* A worker's descriptors for files, libraries and its loop, and for one peer: two links, a data connection. */
#define OTHER_DESCRIPTORS 64
#define PEER_DESCRIPTORS 16
#define NVIDIA_NETWORKING "0x15b3"

/* ------------------------------------------------------------------------------------------------------- files -- */

/* False: the path is too long. */
static bool make_path(char ret_path[1024], const char *root, const char *format, va_list arguments)
{
    int root_len = snprintf(ret_path, 1024, "%s/", root);
    if (root_len < 0 || root_len >= 1024) return false;
    size_t left = 1024 - (size_t)root_len;
    int len = vsnprintf(ret_path + root_len, left, format, arguments);
    return len >= 0 && (size_t)len < left;
}

bool tl_doctor_read_line(char *ret_line, size_t capacity, const char *root, const char *format, ...)
{
    char path[1024];
    va_list arguments;
    va_start(arguments, format);
    bool is_path = make_path(path, root, format, arguments);
    va_end(arguments);
    FILE *file = is_path ? fopen(path, "re") : NULL;
    if (!file) return false;
    bool is_read = fgets(ret_line, (int)capacity, file) != NULL;
    fclose(file);
    if (is_read) ret_line[strcspn(ret_line, "\n")] = '\0';
    return is_read;
}

bool tl_doctor_has_path(const char *root, const char *format, ...)
{
    char path[1024];
    va_list arguments;
    va_start(arguments, format);
    bool is_path = make_path(path, root, format, arguments);
    va_end(arguments);
    return is_path && access(path, F_OK) == 0;
}

/* Whether the folder root/path has an entry. */
static bool has_entry(const char *root, const char *name)
{
    char path[1024];
    bool has_any = false;
    snprintf(path, sizeof(path), "%s/%s", root, name);
    DIR *folder = opendir(path);
    if (!folder) return false;
    for (struct dirent *entry; !has_any && (entry = readdir(folder)) != NULL;)
        has_any = entry->d_name[0] != '.';
    closedir(folder);
    return has_any;
}

/* ---------------------------------------------------------------------------------------------------- versions -- */

void tl_doctor_check_versions(struct tl_doctor_report *report, const struct tl_doctor_roots *roots)
{
    char release[128];
    tl_doctor_add(report, TL_DOCTOR_OK, "tensorlane", "%s, protocol %" PRIu32, tl_version(),
                  tl_client_protocol_version());
    if (tl_doctor_read_line(release, sizeof(release), roots->proc, "sys/kernel/osrelease")) {
        tl_doctor_add(report, TL_DOCTOR_OK, "kernel", "%s", release);
    } else {
        tl_doctor_add(report, TL_DOCTOR_UNKNOWN, "kernel", "-");
        tl_doctor_explain(report, "%s/sys/kernel/osrelease cannot be read; mount /proc", roots->proc);
    }
}

/* ------------------------------------------------------------------------------------------------------ limits -- */

void tl_doctor_check_memlock(struct tl_doctor_report *report, const struct tl_doctor_needs *needs, uint64_t limit_bytes,
                             const struct tl_error *lock_error)
{
    char limit[32];
    bool is_low = lock_error->code != TL_OK;
    enum tl_doctor_verdict bad = needs->is_rdma_required ? TL_DOCTOR_FAULT : TL_DOCTOR_NOTE;
    if (needs->is_rdma_refused) is_low = false;
    snprintf(limit, sizeof(limit), "unlimited");
    if (limit_bytes != UINT64_MAX) tl_text_format_size(limit_bytes, limit, sizeof(limit));
    tl_doctor_add(report, is_low ? bad : TL_DOCTOR_OK, "locked memory", "%s", limit);
    if (is_low) tl_doctor_explain(report, "%s", lock_error->message);
}

void tl_doctor_check_nofile(struct tl_doctor_report *report, const struct tl_doctor_needs *needs, uint64_t limit)
{
    const uint64_t needed = OTHER_DESCRIPTORS + PEER_DESCRIPTORS * (uint64_t)needs->peer_count;
    const uint64_t wanted = needs->connections + OTHER_DESCRIPTORS;
    enum tl_doctor_verdict verdict = limit < needed ? TL_DOCTOR_FAULT : limit < wanted ? TL_DOCTOR_NOTE : TL_DOCTOR_OK;
    if (limit == UINT64_MAX) {
        tl_doctor_add(report, verdict, "open files", "unlimited");
    } else {
        tl_doctor_add(report, verdict, "open files", "%" PRIu64, limit);
    }
    if (verdict == TL_DOCTOR_FAULT) {
        tl_doctor_explain(report,
                          "a worker with %zu peers needs some %" PRIu64
                          " descriptors; raise the hard limit: ulimit -Hn "
                          "in the shell, LimitNOFILE= in the systemd unit, --ulimit nofile= for the container",
                          needs->peer_count, needed);
    } else if (verdict == TL_DOCTOR_NOTE) {
        tl_doctor_explain(report,
                          "limits.connections allows %" PRIu64 " connections, for which a worker needs %" PRIu64
                          " descriptors; raise the hard limit (ulimit -Hn, LimitNOFILE=) or lower limits.connections",
                          needs->connections, wanted);
    }
}

/* ----------------------------------------------------------------------------------------------------- modules -- */

static void list_modules(const struct tl_doctor_roots *roots, char *ret_list, size_t capacity)
{
    static const char *const names[] = {"ib_core", "ib_uverbs", "mlx5_ib",  "mlx4_ib", "bnxt_re",       "irdma",
                                        "qedr",    "efa",       "rdma_rxe", "siw",     "nvidia_peermem"};
    ret_list[0] = '\0';
    for (size_t i = 0; i < TL_ARRAY_COUNT(names); i++)
        if (tl_doctor_has_path(roots->sys, "module/%s", names[i])) tl_doctor_append(ret_list, capacity, names[i]);
}

/* Writes the place of the first network card of NVIDIA (Mellanox) that the kernel knows as no RDMA device. False: there
 * is none. */
static bool find_unknown_card(const struct tl_doctor_roots *roots, char ret_place[64])
{
    char path[1024], text[64];
    bool is_found = false;
    snprintf(path, sizeof(path), "%s/bus/pci/devices", roots->sys);
    DIR *folder = opendir(path);
    if (!folder) return false;
    for (struct dirent *entry; !is_found && (entry = readdir(folder)) != NULL;) {
        const char *name = entry->d_name;
        if (name[0] == '.') continue;
        is_found = tl_doctor_read_line(text, sizeof(text), path, "%s/vendor", name) &&
                   strcmp(text, NVIDIA_NETWORKING) == 0 &&
                   tl_doctor_read_line(text, sizeof(text), path, "%s/class", name) && strncmp(text, "0x02", 4) == 0 &&
                   !tl_doctor_has_path(path, "%s/infiniband", name);
        if (is_found) snprintf(ret_place, 64, "%.63s", name);
    }
    closedir(folder);
    return is_found;
}

void tl_doctor_check_modules(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                             const struct tl_doctor_needs *needs)
{
    char list[256], place[64];
    enum tl_doctor_verdict bad = needs->is_rdma_required ? TL_DOCTOR_FAULT : TL_DOCTOR_NOTE;
    const char *what = "RDMA modules";
    list_modules(roots, list, sizeof(list));
    const char *value = list[0] != '\0' ? list : "none";
    if (find_unknown_card(roots, place)) {
        tl_doctor_add(report, bad, what, "%s", value);
        tl_doctor_explain(report,
                          "the card at %s is no RDMA device for the kernel; load its driver: modprobe mlx5_ib (mlx4_ib "
                          "for ConnectX-3)",
                          place);
    } else if (!has_entry(roots->sys, "class/infiniband")) {
        tl_doctor_add(report, needs->is_rdma_required ? TL_DOCTOR_FAULT : TL_DOCTOR_OK, what, "%s; no RDMA device",
                      value);
        if (needs->is_rdma_required) {
            tl_doctor_explain(report, "rdma is \"require\" and the kernel knows no RDMA device; load the driver of the "
                                      "card, or set rdma to \"prefer\"");
        }
    } else if (!tl_doctor_has_path(roots->sys, "class/infiniband_verbs")) {
        tl_doctor_add(report, bad, what, "%s", value);
        tl_doctor_explain(report, "programs cannot reach the RDMA devices of the kernel; load it: modprobe ib_uverbs");
    } else {
        tl_doctor_add(report, TL_DOCTOR_OK, what, "%s", value);
    }
}

/* ------------------------------------------------------------------------------------------------ memory, NUMA -- */

void tl_doctor_check_huge_pages(struct tl_doctor_report *report, const struct tl_doctor_roots *roots)
{
    char reserved[32] = "0", unused[32] = "0", transparent[64];
    const char *folder = "kernel/mm/hugepages/hugepages-2048kB";
    (void)tl_doctor_read_line(reserved, sizeof(reserved), roots->sys, "%s/nr_hugepages", folder);
    (void)tl_doctor_read_line(unused, sizeof(unused), roots->sys, "%s/free_hugepages", folder);
    if (!tl_doctor_read_line(transparent, sizeof(transparent), roots->sys, "kernel/mm/transparent_hugepage/enabled"))
        snprintf(transparent, sizeof(transparent), "not built into the kernel");
    bool has_any =
        strtoull(unused, NULL, 10) > 0 || strstr(transparent, "[always]") || strstr(transparent, "[madvise]");
    tl_doctor_add(report, has_any ? TL_DOCTOR_OK : TL_DOCTOR_NOTE, "huge pages",
                  "reserved: %s, free: %s, transparent: %s", reserved, unused, transparent);
    if (has_any) return;
    tl_doctor_explain(report, "pools of memory get small pages, so that registering and copying take longer; reserve "
                              "some (sysctl vm.nr_hugepages=512), or write madvise to "
                              "/sys/kernel/mm/transparent_hugepage/enabled");
}

void tl_doctor_check_numa(struct tl_doctor_report *report, const struct tl_doctor_roots *roots)
{
    char nodes[64], distances[128];
    if (!tl_doctor_read_line(nodes, sizeof(nodes), roots->sys, "devices/system/node/online")) {
        tl_doctor_add(report, TL_DOCTOR_OK, "NUMA nodes", "the kernel does not tell of any");
    } else if (tl_doctor_read_line(distances, sizeof(distances), roots->sys, "devices/system/node/node0/distance")) {
        tl_doctor_add(report, TL_DOCTOR_OK, "NUMA nodes", "%s; distances from node 0: %s", nodes, distances);
    } else {
        tl_doctor_add(report, TL_DOCTOR_OK, "NUMA nodes", "%s", nodes);
    }
}

/* -------------------------------------------------------------------------------------------------- permissions -- */

void tl_doctor_check_tracing(struct tl_doctor_report *report, const struct tl_doctor_roots *roots)
{
    char scope[16];
    if (!tl_doctor_read_line(scope, sizeof(scope), roots->proc, "sys/kernel/yama/ptrace_scope")) {
        tl_doctor_add(report, TL_DOCTOR_OK, "reading of other processes", "not restricted by ptrace_scope");
        return;
    }
    bool is_forbidden = strtol(scope, NULL, 10) >= 2;
    tl_doctor_add(report, is_forbidden ? TL_DOCTOR_NOTE : TL_DOCTOR_OK, "reading of other processes",
                  "ptrace_scope is %s", scope);
    if (!is_forbidden) return;
    tl_doctor_explain(report, "workers of this machine may not read each other's memory, so that tensors are copied "
                              "twice between them; sysctl kernel.yama.ptrace_scope=1 allows it");
}

void tl_doctor_check_kernel_log(struct tl_doctor_report *report, const struct tl_doctor_roots *roots, bool is_root)
{
    char restriction[16] = "0";
    (void)tl_doctor_read_line(restriction, sizeof(restriction), roots->proc, "sys/kernel/dmesg_restrict");
    if (!is_root && strcmp(restriction, "0") != 0) {
        tl_doctor_add(report, TL_DOCTOR_UNKNOWN, "kernel log", "not readable");
        tl_doctor_explain(report, "errors of cards are in the kernel log, which needs root here; as root: dmesg | "
                                  "grep -iE 'mlx|rxe|infiniband|link is'");
    } else {
        tl_doctor_add(report, TL_DOCTOR_OK, "kernel log", "readable with dmesg");
    }
}
