// SPDX-License-Identifier: Apache-2.0
/*
 * The verbs provider: RDMA cards through rdma-core, behind the table of dataplane/provider.h.
 *
 * A candidate is one device, port and entry of the port's GID table. tl_verbs_list says of every candidate of this
 * machine whether it can be used, in which order, and why not. tl_verbs_open opens the n-th of those that can be used.
 * When the probe of a candidate (dataplane/probe.h) fails, the worker opens the next one.
 *
 * A fault of a card or a peer never ends the process: it breaks queue pairs, with a reason in plain words. A card that
 * fails as a whole breaks all of its queue pairs; the provider then refuses new ones until it is closed, with the
 * worker.
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
/* How many slots the queue pair of one peer has, so that it locks less than 1 MiB. */
#define TL_VERBS_DEFAULT_SLOTS 64

/* The options of the provider. Text is borrowed during the call. */
struct tl_verbs_options {
    /* The devices and ports, as "mlx5_0:1,^mlx5_1": names with an optional port. '^' excludes what it names; when there
     * are names without it, only those are used. A name that is not a device's own stands for all that begin with it;
     * "=name" never does. NULL or empty: all. */
    const char *devices;
    int port;      /* 1..255; 0: any */
    int gid_index; /* 0..255, entry of the port's table; -1: the one that is the address */
    /* The worker's address, numeric: "10.0.0.1", "fd00::1", "fe80::1%eth0". The device, the port and the GID follow
     * from it: with neither devices nor gid_index a GID must equal it, otherwise those that equal it come first. NULL:
     * none. */
    const char *address;
    uint32_t mtu_bytes; /* 256, 512, 1024, 2048, 4096: at most so much in a packet; 0: what the port allows */
    int service_level;  /* 0..7 */
    int traffic_class;  /* 0..255 */
    int timeout;        /* 0..31: 4.096 us * 2^timeout until a packet is sent again; 0: for ever */
    int retry_count;    /* 0..7 times. 7 is without end on some devices; then our deadlines end the wait */
    int pkey_index; /* 0..65535, entry of the port's table of partition keys (the number NCCL and TensorFlow take) */
    uint32_t queue_depth;     /* 16..65536: the greatest work_count and slot_count of one queue pair */
    uint64_t max_write_bytes; /* the most that one write carries; 0: what the device allows */
    uint64_t pool_bytes;      /* registered memory that the user takes at once; it counts as locked memory only */
    enum tl_keys keys;        /* TL_KEYS_REGION: peers may write regions by their own key; windows still work */
};

/* Sets the defaults: any device, GID by address, the port's MTU, keys by window. */
void tl_verbs_options_init(struct tl_verbs_options *ret_options);

/* Errors: TL_INVALID_ARGUMENT: a value out of its range, or text that is not a list or an address; the message begins
 * with the member's name. Thread: any. */
enum tl_status tl_verbs_options_check(const struct tl_verbs_options *options, struct tl_error *ret_error) TL_MUST_USE;

/* How the error of tl_verbs_list begins on a machine without any card. */
#define TL_VERBS_NO_CARD "no RDMA device: the kernel knows none"
/* How the reason of a candidate begins whose port is not active. */
#define TL_VERBS_PORT_IS "the port is "
/* How the reason of a candidate begins whose port lacks the entry that pkey_index names. */
#define TL_VERBS_NO_PKEY "verbs.pkey_index"

struct tl_verbs_candidate {
    int order;        /* 0: chosen; 1, 2, ..: tried in this order if a probe fails; -1: cannot be used */
    char reason[256]; /* why it is chosen, or why it cannot be used */
    char device[64];
    uint32_t port;       /* 0: the device cannot be queried, and the members that follow are empty */
    int gid_index;       /* -1: the port has no GID */
    char gid[64];        /* an IPv4 address if it is a mapped one, otherwise an IPv6 address */
    char gid_type[16];   /* "RoCE v2", "RoCE v1", "InfiniBand" */
    char interface[16];  /* network interface of the GID; empty: none */
    char state[32];      /* "active", "down", .. */
    char link_layer[16]; /* "Ethernet", "InfiniBand" */
    uint32_t mtu_bytes;  /* the port's MTU now */
    uint32_t max_mtu_bytes;
    uint32_t speed_mbps; /* megabits per second of all lanes; 0: unknown */
    int numa_node;       /* -1: none or unknown */
    bool has_windows;    /* type 2 memory windows: TL_KEYS_WINDOW works */
};

/* Lists all candidates: first those that can be used, in their order. Ownership: the caller frees the list with free().
 * Errors: those of tl_verbs_options_check; TL_NOT_FOUND: no device, with what is missing (card, modules, device nodes).
 * Thread: any. Blocks: opens every device. */
enum tl_status tl_verbs_list(const struct tl_verbs_options *options, struct tl_verbs_candidate **ret_candidates,
                             size_t *ret_count, struct tl_error *ret_error) TL_MUST_USE;

/* Returns the state of a port now: "down", "waits for the subnet manager", "armed" or "active"; "" when it is not
 * known. Static. Thread: any. Blocks: reads a file of the kernel. */
const char *tl_verbs_port_state(const char *device, uint32_t port);

/* Says why none of the candidates can be used. Always returns TL_NOT_FOUND. Thread: any. */
enum tl_status tl_verbs_explain(const struct tl_verbs_options *options, const struct tl_verbs_candidate *candidates,
                                size_t count, struct tl_error *ret_error);

/* Opens the candidate whose order is `order`. ret_provider's reason says why this one. Errors: those of tl_verbs_list;
 * TL_NOT_FOUND: fewer candidates can be used, with the reasons; TL_RESOURCE_EXHAUSTED: the limit of locked memory, with
 * the remedy, or the card has no more; TL_INVALID_ARGUMENT: queue_depth is more than the card's; TL_UNAVAILABLE: the
 * device does not work. Thread: any. Blocks: opens every device. */
enum tl_status tl_verbs_open(const struct tl_verbs_options *options, unsigned order, struct tl_provider **ret_provider,
                             struct tl_error *ret_error) TL_MUST_USE;

/* Checks whether the memory that these options need, for one peer and the pool, can be locked under the process's
 * limit, as far as that is known beforehand. Errors: TL_RESOURCE_EXHAUSTED: it cannot be, with the remedy. Thread: any.
 */
enum tl_status tl_verbs_check_memlock(const struct tl_verbs_options *options, struct tl_error *ret_error) TL_MUST_USE;

#endif
