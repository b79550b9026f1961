// SPDX-License-Identifier: Apache-2.0
/*
 * The kernel has a folder for each device, within that of the bridge above it:
 *
 *     /sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0
 *                  host bridge, its port,    the device
 *
 * So what two devices have in common is what their paths begin with.
 */
#include "server/pci_place.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *tl_pci_distance_name(enum tl_pci_distance distance)
{
    static const char *const names[] = {
        [TL_PCI_UNKNOWN] = "unknown",     [TL_PCI_SWITCH] = "switch", [TL_PCI_HOST_BRIDGE] = "host bridge",
        [TL_PCI_NUMA_NODE] = "NUMA node", [TL_PCI_ACROSS] = "across",
    };
    return names[distance];
}

/* Finds the folder of a device below sys/devices; writes what follows that. False: it is none of PCI. */
static bool find_folder(const char *sys, const char *link, char ret_folder[PATH_MAX])
{
    char path[PATH_MAX], root[PATH_MAX];
    snprintf(path, sizeof(path), "%s/devices", sys);
    if (!realpath(path, root)) return false;
    snprintf(path, sizeof(path), "%s/%s", sys, link);
    if (!realpath(path, ret_folder)) return false;
    size_t len = strlen(root);
    if (strncmp(ret_folder, root, len) != 0) return false;
    memmove(ret_folder, ret_folder + len, strlen(ret_folder + len) + 1);
    return strstr(ret_folder, "/pci") != NULL;
}

static int read_numa_node(const char *sys, const char *folder)
{
    char path[PATH_MAX + 64];
    int node = -1;
    snprintf(path, sizeof(path), "%s/devices%s/numa_node", sys, folder);
    FILE *file = fopen(path, "re");
    if (!file) return -1;
    if (fscanf(file, "%d", &node) != 1) node = -1;
    fclose(file);
    return node;
}

static bool find_address(const char *sys, const char *address, char ret_folder[PATH_MAX])
{
    char link[128];
    if (address[0] == '\0') return false;
    snprintf(link, sizeof(link), "bus/pci/devices/%s", address);
    return find_folder(sys, link, ret_folder);
}

int tl_pci_numa_node(const char *sys, const char *address)
{
    char folder[PATH_MAX];
    return find_address(sys, address, folder) ? read_numa_node(sys, folder) : -1;
}

/* Looks at the folders that both paths begin with: whether a host bridge is among them, and a bridge below one. */
static void find_common(const char *a, const char *b, bool *ret_host_bridge, bool *ret_bridge)
{
    *ret_host_bridge = *ret_bridge = false;
    while (*a == '/' && *b == '/') {
        size_t len = strcspn(a + 1, "/");
        if (strcspn(b + 1, "/") != len || memcmp(a, b, len + 1) != 0) return;
        if (*ret_host_bridge) {
            *ret_bridge = true;
        } else {
            *ret_host_bridge = strncmp(a, "/pci", 4) == 0;
        }
        a += len + 1;
        b += len + 1;
    }
}

enum tl_pci_distance tl_pci_distance_to_card(const char *sys, const char *address, const char *card)
{
    char ours[PATH_MAX], theirs[PATH_MAX], link[128];
    bool has_host_bridge, has_bridge;
    snprintf(link, sizeof(link), "class/infiniband/%s/device", card);
    if (!find_address(sys, address, ours) || !find_folder(sys, link, theirs)) return TL_PCI_UNKNOWN;
    find_common(ours, theirs, &has_host_bridge, &has_bridge);
    if (has_bridge) return TL_PCI_SWITCH;
    if (has_host_bridge) return TL_PCI_HOST_BRIDGE;
    int our_node = read_numa_node(sys, ours), their_node = read_numa_node(sys, theirs);
    if (our_node < 0 || their_node < 0) return TL_PCI_UNKNOWN;
    return our_node == their_node ? TL_PCI_NUMA_NODE : TL_PCI_ACROSS;
}
