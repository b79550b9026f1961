// SPDX-License-Identifier: Apache-2.0
/*
 * Where devices are on the PCI bus, as the kernel shows it below /sys: how far a GPU is from an RDMA card, which is
 * what `nvidia-smi topo -m` tells.
 */
#ifndef SERVER_PCI_PLACE_H
#define SERVER_PCI_PLACE_H

/* From near to far. */
enum tl_pci_distance {
    TL_PCI_UNKNOWN,     /* one of them is no PCI device, or the kernel does not say where it is */
    TL_PCI_SWITCH,      /* they have a PCI switch or a port of the host bridge in common (PIX, PXB) */
    TL_PCI_HOST_BRIDGE, /* they have a host bridge in common (PHB) */
    TL_PCI_NUMA_NODE,   /* they have a NUMA node in common (NODE) */
    TL_PCI_ACROSS,      /* what they exchange crosses from one NUMA node to another (SYS) */
};

/* Returns "unknown", "switch", "host bridge", "NUMA node" or "across": static. */
const char *tl_pci_distance_name(enum tl_pci_distance distance);

/* Returns the NUMA node of the PCI device "0000:3b:00.0"; -1: none or unknown. sys: "/sys". */
int tl_pci_numa_node(const char *sys, const char *address);

/* Returns how far the PCI device is from an RDMA card, "mlx5_0". */
enum tl_pci_distance tl_pci_distance_to_card(const char *sys, const char *address, const char *card);

#endif
