// SPDX-License-Identifier: Apache-2.0
/*
 * The verbs provider: RDMA cards through rdma-core, behind the table of dataplane/provider.h.
 *
 * A candidate is one device, port and entry of the port's GID table. tl_verbs_list tells of every one that this machine
 * has whether it can be used and in which order, and why not; tl_verbs_open opens the n-th of those that can. Who
 * probes a candidate (dataplane/probe.h) and sees no write arrive opens the next.
 *
 * Nothing that a card or a peer does ends the process: it breaks queue pairs, with a reason in plain words. A card that
 * fails as a whole breaks all of them; the provider then refuses new ones until it is closed, with the worker.
 */
#ifndef DATAPLANE_VERBS_VERBS_H
#define DATAPLANE_VERBS_VERBS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

#include "dataplane/provider.h"

#define TL_VERBS_DEFAULT_TIMEOUT 14
#define TL_VERBS_DEFAULT_RETRY_COUNT 6
#define TL_VERBS_DEFAULT_QUEUE_DEPTH 1024

/* What may be chosen. Text is borrowed during the call. */
struct tl_verbs_options {
    /* Which devices and ports, as "mlx5_0:1,^mlx5_1": names with an optional port; '^' takes out what it names; when
     * there are names without it, only those remain. A name that is no device's own stands for all that begin with it,
     * "=name" never does. NULL or empty: all. */
    const char *devices;
    int port;      /* 1..255; 0: any */
    int gid_index; /* 0..255, entry of the port's table; -1: the one that is the address */
    /* Of the worker, numeric: "10.0.0.1", "fd00::1", "fe80::1%eth0". The device, the port and the GID follow from it:
     * with neither devices nor gid_index a GID must equal it, otherwise those that do come first. NULL: none. */
    const char *address;
    uint32_t mtu_bytes; /* 256, 512, 1024, 2048, 4096: at most this much in a packet; 0: what the port does */
    int service_level;  /* 0..7 */
    int traffic_class;  /* 0..255 */
    int timeout;        /* 0..31: 4.096 us * 2^timeout until a packet is sent again; 0: for ever */
    int retry_count;    /* 0..7 times. 7 is for ever on some devices: deadlines of ours decide, not the card's */
    int pkey_index; /* 0..65535, entry of the port's table of partition keys (the number NCCL and TensorFlow take) */
    uint32_t queue_depth;     /* 16..65536: the greatest work_count and slot_count of one queue pair */
    uint64_t max_write_bytes; /* of one write; 0: what the device does */
    enum tl_keys keys;        /* TL_KEYS_REGION: peers may write regions by their own key; windows work all the same */
};

/* All defaults: any device, GID by address, the port's MTU, keys by window. */
void tl_verbs_options_init(struct tl_verbs_options *ret_options);

/* Errors: TL_INVALID_ARGUMENT: a value out of its range, a list or an address that is none; the message begins with the
 * member's name. Thread: any. */
enum tl_status tl_verbs_options_check(const struct tl_verbs_options *options, struct tl_error *ret_error) TL_MUST_USE;

struct tl_verbs_candidate {
    int order;        /* 0: chosen; 1, 2, ..: in its place, if a probe fails; -1: cannot be used */
    char reason[256]; /* why it is chosen, or cannot be used */
    char device[64];
    uint32_t port;       /* 0: the device cannot be asked, what follows is empty */
    int gid_index;       /* -1: the port has no GID */
    char gid[64];        /* an IPv4 address when it is a mapped one, otherwise as IPv6 */
    char gid_type[16];   /* "RoCE v2", "RoCE v1", "InfiniBand" */
    char interface[16];  /* network interface of the GID; empty: none */
    char state[32];      /* "active", "down", .. */
    char link_layer[16]; /* "Ethernet", "InfiniBand" */
    uint32_t mtu_bytes;  /* of the port now */
    uint32_t max_mtu_bytes;
    uint32_t speed_mbps; /* megabits per second of all lanes; 0: unknown */
    int numa_node;       /* -1: none or unknown */
    bool has_windows;    /* type 2 memory windows: TL_KEYS_WINDOW works */
};

/* Every candidate, those that can be used first and in their order. Ownership: freed by the caller with free().
 * Errors: as tl_verbs_options_check; TL_NOT_FOUND: no device, and what is missing (no card, modules, device nodes).
 * Thread: any. Blocks: opens every device. */
enum tl_status tl_verbs_list(const struct tl_verbs_options *options, struct tl_verbs_candidate **ret_candidates,
                             size_t *ret_count, struct tl_error *ret_error) TL_MUST_USE;

/* Returns the state of a port now: "down", "waits for the subnet manager", "armed" or "active"; "" when it is not
 * known. Static. Thread: any. Blocks: reads a file of the kernel. */
const char *tl_verbs_port_state(const char *device, uint32_t port);

/* Why none of the candidates can be used: always TL_NOT_FOUND. Thread: any. */
enum tl_status tl_verbs_explain(const struct tl_verbs_options *options, const struct tl_verbs_candidate *candidates,
                                size_t count, struct tl_error *ret_error);

/* Opens the candidate whose order is `order`. ret_provider's reason tells why it.
 * Errors: as tl_verbs_list; TL_NOT_FOUND: so many cannot be used, and why; TL_RESOURCE_EXHAUSTED: the
 * limit of locked memory, with its remedy, or the card has no more; TL_INVALID_ARGUMENT: queue_depth is more than the
 * card's; TL_UNAVAILABLE: the device does not work. Thread: any. Blocks: opens every device. */
enum tl_status tl_verbs_open(const struct tl_verbs_options *options, unsigned order, struct tl_provider **ret_provider,
                             struct tl_error *ret_error) TL_MUST_USE;

/* Whether len_bytes can be locked under the process's limit, as far as can be told beforehand.
 * Errors: TL_RESOURCE_EXHAUSTED: no, with the remedy. Thread: any. */
enum tl_status tl_verbs_check_memlock(uint64_t len_bytes, struct tl_error *ret_error) TL_MUST_USE;

#endif
