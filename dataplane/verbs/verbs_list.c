// SPDX-License-Identifier: Apache-2.0
/*
 * The candidates of this machine: every device, every port, every valid entry of its GID table.
 *
 * Each device is opened and queried, and each candidate is judged. What it lacks is its reason; those that lack nothing
 * are put into an order. The worker's address decides first, then the order of the option devices, then RoCE v2 before
 * v1, then IPv4 before IPv6 before link-local addresses, then the place in the table.
 *
 * A device that cannot be opened or queried is a candidate with a reason, not an error. When there is no device, the
 * error says what is missing: the card, the module, or the device nodes.
 */
#include "dataplane/verbs/verbs_internal.h"

#include <dirent.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"

#define MAX_CANDIDATES 65536

/* The values that decide the order, the most important first; smaller is better. Those that cannot be used are ordered,
 * too: the one that the settings mean comes first, because its reason is the one to repair. */
struct rank {
    bool is_usable;
    /* Usable: address, place in the option devices, RoCE version, kind of address, place in the list.
     * Not usable: excluded by an option, address, usable but for the GID, place in the option devices, place in the
     * list. */
    unsigned keys[5];
};

struct listing {
    const struct tl_verbs_options *options;
    struct verbs_filter filter;
    uint8_t address[16];
    char interface[IF_NAMESIZE]; /* the interface that has the address; empty: none of this machine has it */
    struct tl_verbs_candidate *candidates;
    struct rank *ranks;
    size_t count, capacity;
};

/* One port while it is queried. */
struct port_view {
    struct ibv_context *context;
    struct ibv_device_attr device;
    struct ibv_port_attr port;
    uint32_t number;
};

static bool listing_grow(struct listing *listing)
{
    if (listing->count < listing->capacity) return true;
    size_t capacity = listing->capacity == 0 ? 64 : listing->capacity * 2;
    if (capacity > MAX_CANDIDATES) return false;
    void *candidates = realloc(listing->candidates, capacity * sizeof(*listing->candidates));
    if (candidates != NULL) listing->candidates = candidates;
    void *ranks = realloc(listing->ranks, capacity * sizeof(*listing->ranks));
    if (ranks != NULL) listing->ranks = ranks;
    if (candidates == NULL || ranks == NULL) return false;
    listing->capacity = capacity;
    return true;
}

/* Adds a candidate that cannot be used. Returns NULL when there is no memory, or there are too many. */
static struct tl_verbs_candidate *listing_add(struct listing *listing, struct ibv_device *device)
{
    if (!listing_grow(listing)) return NULL;
    struct tl_verbs_candidate *candidate = &listing->candidates[listing->count];
    *candidate = (struct tl_verbs_candidate){.order = -1, .gid_index = -1, .numa_node = -1};
    listing->ranks[listing->count] = (struct rank){.keys = {[1] = 1, [4] = (unsigned)listing->count}};
    snprintf(candidate->device, sizeof(candidate->device), "%s", ibv_get_device_name(device));
    listing->count++;
    return candidate;
}

/* --------------------------------------------------------------------------------------- what a device is like -- */

static int read_numa_node(struct ibv_device *device)
{
    char path[IBV_SYSFS_PATH_MAX + 32];
    int node = -1;
    snprintf(path, sizeof(path), "%s/device/numa_node", device->ibdev_path);
    FILE *file = fopen(path, "re");
    if (file == NULL) return -1;
    if (fscanf(file, "%d", &node) != 1) node = -1;
    fclose(file);
    return node;
}

/* Returns true when the interface belongs to the same card. So an IPoIB address leads to its InfiniBand port. */
static bool has_interface(const struct ibv_device *device, const char *interface)
{
    char path[IBV_SYSFS_PATH_MAX + IF_NAMESIZE + 32];
    snprintf(path, sizeof(path), "%s/device/net/%s", device->ibdev_path, interface);
    return *interface != '\0' && access(path, F_OK) == 0;
}

static void find_interface(const uint8_t address[16], char ret_interface[IF_NAMESIZE])
{
    struct ifaddrs *all;
    *ret_interface = '\0';
    if (getifaddrs(&all) != 0) return;
    for (const struct ifaddrs *each = all; each != NULL; each = each->ifa_next) {
        uint8_t gid[16] = {[10] = 0xff, [11] = 0xff};
        if (each->ifa_addr == NULL) continue;
        if (each->ifa_addr->sa_family == AF_INET) {
            memcpy(gid + 12, &((const struct sockaddr_in *)(const void *)each->ifa_addr)->sin_addr, 4);
        } else if (each->ifa_addr->sa_family == AF_INET6) {
            memcpy(gid, &((const struct sockaddr_in6 *)(const void *)each->ifa_addr)->sin6_addr, 16);
        } else {
            continue;
        }
        if (memcmp(gid, address, sizeof(gid)) != 0) continue;
        snprintf(ret_interface, IF_NAMESIZE, "%s", each->ifa_name);
        break;
    }
    freeifaddrs(all);
}

static uint32_t port_speed_mbps(const struct ibv_port_attr *port)
{
    /* By bit of active_speed, one lane: SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR */
    static const uint32_t lane_mbps[] = {2500, 5000, 10000, 10000, 14063, 25781, 50000, 100000};
    static const uint32_t lanes[] = {1, 4, 8, 12, 2}; /* by bit of active_width */
    if (port->active_speed == 0 || port->active_width == 0) return 0;
    unsigned speed = (unsigned)__builtin_ctz(port->active_speed), width = (unsigned)__builtin_ctz(port->active_width);
    if (speed >= TL_ARRAY_COUNT(lane_mbps) || width >= TL_ARRAY_COUNT(lanes)) return 0;
    return lane_mbps[speed] * lanes[width];
}

static const char *gid_type_name(uint32_t type)
{
    return type == IBV_GID_TYPE_ROCE_V2 ? "RoCE v2" : type == IBV_GID_TYPE_ROCE_V1 ? "RoCE v1" : "InfiniBand";
}

static const char *port_state_name(enum ibv_port_state state)
{
    switch (state) {
    case IBV_PORT_DOWN:
        return "down";
    case IBV_PORT_INIT:
        return "waits for the subnet manager";
    case IBV_PORT_ARMED:
        return "armed";
    case IBV_PORT_ACTIVE:
        return "active";
    default:
        return "unknown";
    }
}

static void describe_port(const struct port_view *view, struct tl_verbs_candidate *candidate)
{
    candidate->port = view->number;
    candidate->mtu_bytes = verbs_mtu_to_bytes(view->port.active_mtu);
    candidate->max_mtu_bytes = verbs_mtu_to_bytes(view->port.max_mtu);
    candidate->speed_mbps = port_speed_mbps(&view->port);
    candidate->numa_node = read_numa_node(view->context->device);
    candidate->has_windows = (view->device.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) != 0;
    snprintf(candidate->state, sizeof(candidate->state), "%s", port_state_name(view->port.state));
    snprintf(candidate->link_layer, sizeof(candidate->link_layer), "%s",
             view->port.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand");
}

/* --------------------------------------------------------------------------------------------------- judgement -- */

/* Writes what is wrong with the port into candidate->reason. Returns true when nothing is. */
static bool judge_port(const struct listing *listing, const struct port_view *view,
                       struct tl_verbs_candidate *candidate, struct rank *rank)
{
    const struct tl_verbs_options *options = listing->options;
    bool is_allowed;
    const struct verbs_filter_entry *entry =
        verbs_filter_find(&listing->filter, candidate->device, view->number, &is_allowed);
    unsigned place = entry != NULL ? (unsigned)(entry - listing->filter.entries) : 0;
    rank->keys[3] = place;
    char *reason = candidate->reason;
    size_t capacity = sizeof(candidate->reason);
    if (!is_allowed) {
        snprintf(reason, capacity, entry != NULL ? "excluded by devices \"%s\"" : "not among devices \"%s\"",
                 options->devices);
    } else if (options->port != 0 && (uint32_t)options->port != view->number) {
        snprintf(reason, capacity, "port %d is asked for", options->port);
    } else if (view->context->device->transport_type != IBV_TRANSPORT_IB) {
        snprintf(reason, capacity, "it has no write with immediate: neither InfiniBand nor RoCE");
    } else if (view->port.state != IBV_PORT_ACTIVE) {
        snprintf(reason, capacity, TL_VERBS_PORT_IS "%s: look at the cable, the switch and \"ip link\"",
                 candidate->state);
        return false;
    } else if (view->port.pkey_tbl_len > 0 && options->pkey_index >= view->port.pkey_tbl_len) {
        snprintf(reason, capacity,
                 TL_VERBS_NO_PKEY " %d is beyond the table of partition keys of this port: give one of 0 to %d",
                 options->pkey_index, view->port.pkey_tbl_len - 1);
        return false;
    } else {
        return true;
    }
    rank->keys[0] = 1;
    return false;
}

static unsigned kind_of_address(const struct ibv_gid_entry *entry)
{
    if (verbs_gid_is_v4(entry->gid.raw)) return 0;
    return entry->gid.raw[0] == 0xfe && (entry->gid.raw[1] & 0xc0) == 0x80 ? 2 : 1;
}

/* Judges a GID of a port that can be used. */
static void judge_gid(const struct listing *listing, const struct port_view *view, const struct ibv_gid_entry *entry,
                      struct tl_verbs_candidate *candidate, struct rank *rank)
{
    const struct tl_verbs_options *options = listing->options;
    bool is_infiniband = entry->gid_type == IBV_GID_TYPE_IB;
    bool is_address = options->address != NULL && memcmp(entry->gid.raw, listing->address, 16) == 0;
    bool leads_there = is_infiniband && has_interface(view->context->device, listing->interface);
    bool is_free = options->address == NULL || (options->devices != NULL && *options->devices != '\0');
    char *reason = candidate->reason;
    size_t capacity = sizeof(candidate->reason);
    if (options->gid_index >= 0 && (uint32_t)options->gid_index != entry->gid_index) {
        snprintf(reason, capacity, "GID index %d is asked for", options->gid_index);
        return;
    }
    if (is_infiniband && options->gid_index < 0 && entry->gid_index != 0) {
        snprintf(reason, capacity, "InfiniBand uses the first GID of a port");
        return;
    }
    if (options->gid_index >= 0) {
        snprintf(reason, capacity, "GID index %d as configured", options->gid_index);
    } else if (is_address) {
        snprintf(reason, capacity, "its GID is the worker's address, %s", gid_type_name(entry->gid_type));
    } else if (leads_there) {
        snprintf(reason, capacity, "the worker's address belongs to its interface %s", listing->interface);
    } else if (is_free) {
        snprintf(reason, capacity, options->address != NULL ? "%s of a device in devices" : "%s, any address will do",
                 gid_type_name(entry->gid_type));
    } else {
        snprintf(reason, capacity, "its GID is not the worker's address %s", options->address);
        return;
    }
    rank->is_usable = true;
    rank->keys[0] = is_address || leads_there ? 0 : 1;
    rank->keys[1] = rank->keys[3];
    rank->keys[2] = entry->gid_type == IBV_GID_TYPE_ROCE_V1 ? 1 : 0;
    rank->keys[3] = kind_of_address(entry);
}

/* Returns whether the worker's address belongs to this entry, or to the interface of this card. gid NULL: the port has
 * none. */
static bool is_meant(const struct listing *listing, const struct port_view *view, const uint8_t *gid)
{
    if (listing->options->address == NULL) return false;
    if (gid != NULL && memcmp(gid, listing->address, 16) == 0) return true;
    return has_interface(view->context->device, listing->interface);
}

static bool add_gid(struct listing *listing, const struct port_view *view, const struct ibv_gid_entry *entry)
{
    struct tl_verbs_candidate *candidate = listing_add(listing, view->context->device);
    if (candidate == NULL) return false;
    struct rank *rank = &listing->ranks[listing->count - 1];
    rank->keys[1] = is_meant(listing, view, entry->gid.raw) ? 0 : 1;
    describe_port(view, candidate);
    candidate->gid_index = (int)entry->gid_index;
    verbs_gid_to_text(entry->gid.raw, candidate->gid, sizeof(candidate->gid));
    snprintf(candidate->gid_type, sizeof(candidate->gid_type), "%s", gid_type_name(entry->gid_type));
    if (entry->ndev_ifindex == 0 || if_indextoname(entry->ndev_ifindex, candidate->interface) == NULL) {
        candidate->interface[0] = '\0';
    }
    if (!judge_port(listing, view, candidate, rank)) return true;
    rank->keys[2] = 1;
    judge_gid(listing, view, entry, candidate, rank);
    return true;
}

/* Adds a port that has no GID. */
static bool add_bare_port(struct listing *listing, const struct port_view *view)
{
    struct tl_verbs_candidate *candidate = listing_add(listing, view->context->device);
    if (candidate == NULL) return false;
    struct rank *rank = &listing->ranks[listing->count - 1];
    rank->keys[1] = is_meant(listing, view, NULL) ? 0 : 1;
    describe_port(view, candidate);
    if (judge_port(listing, view, candidate, rank)) {
        snprintf(candidate->reason, sizeof(candidate->reason), "the port has no GID: its interface has no address");
    }
    return true;
}

/* ------------------------------------------------------------------------------------------------------ asking -- */

static bool add_port(struct listing *listing, const struct port_view *view, const struct ibv_gid_entry *entries,
                     size_t count)
{
    bool has_any = false;
    for (size_t i = 0; i < count; i++) {
        if (entries[i].port_num != view->number || entries[i].gid_index > VERBS_MAX_GID_INDEX) continue;
        has_any = true;
        if (!add_gid(listing, view, &entries[i])) return false;
    }
    return has_any || add_bare_port(listing, view);
}

static bool add_unusable(struct listing *listing, struct ibv_device *device, const char *what, int error_number)
{
    struct tl_verbs_candidate *candidate = listing_add(listing, device);
    if (candidate == NULL) return false;
    char path[IBV_SYSFS_NAME_MAX + 32];
    snprintf(path, sizeof(path), "/dev/infiniband/%s", device->dev_name);
    /* When a node cannot be opened, rdma-core looks elsewhere and loses the reason. */
    if (access(path, R_OK | W_OK) != 0) error_number = errno;
    snprintf(candidate->reason, sizeof(candidate->reason), "cannot %s %s: %s%s", what, path, strerror(error_number),
             error_number == ENOENT ? "; a container needs --device=/dev/infiniband"
             : error_number == EACCES || error_number == EPERM
                 ? "; the user needs read and write access to the nodes in /dev/infiniband"
                 : "");
    return true;
}

/* Adds a port that does not answer. */
static bool add_mute_port(struct listing *listing, struct ibv_device *device, uint32_t number, int error_number)
{
    char what[32];
    snprintf(what, sizeof(what), "ask port %u of", number);
    return add_unusable(listing, device, what, error_number);
}

/* Returns false when there is no memory. */
static bool add_ports(struct listing *listing, struct ibv_context *context)
{
    struct port_view view = {.context = context};
    size_t table_len = 0;
    if (ibv_query_device(context, &view.device) != 0) return add_unusable(listing, context->device, "ask", errno);
    for (view.number = 1; view.number <= view.device.phys_port_cnt; view.number++) {
        if (ibv_query_port(context, (uint8_t)view.number, &view.port) == 0) {
            table_len += view.port.gid_tbl_len > 0 ? (size_t)view.port.gid_tbl_len : 0;
        }
    }
    struct ibv_gid_entry *entries = calloc(table_len + 1, sizeof(*entries));
    if (entries == NULL) return false;
    ssize_t count = table_len > 0 ? ibv_query_gid_table(context, entries, table_len, 0) : 0;
    bool is_ok = count >= 0 || add_unusable(listing, context->device, "read the GIDs of", (int)-count);
    for (view.number = 1; is_ok && count >= 0 && view.number <= view.device.phys_port_cnt; view.number++) {
        int error = ibv_query_port(context, (uint8_t)view.number, &view.port);
        is_ok = error != 0 ? add_mute_port(listing, context->device, view.number, error < 0 ? errno : error)
                           : add_port(listing, &view, entries, (size_t)count);
    }
    free(entries);
    return is_ok;
}

static bool add_device(struct listing *listing, struct ibv_device *device)
{
    struct ibv_context *context = ibv_open_device(device);
    if (context == NULL) return add_unusable(listing, device, "open", errno);
    bool is_ok = add_ports(listing, context);
    ibv_close_device(context);
    return is_ok;
}

/* Returns true when the folder has an entry whose name begins with the prefix. */
static bool folder_has(const char *path, const char *prefix)
{
    bool has_any = false;
    DIR *folder = opendir(path);
    if (folder == NULL) return false;
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;)
        has_any |= entry->d_name[0] != '.' && strncmp(entry->d_name, prefix, strlen(prefix)) == 0;
    closedir(folder);
    return has_any;
}

static enum tl_status no_card(struct tl_error *ret_error)
{
    return tl_error_set(ret_error, TL_NOT_FOUND,
                        TL_VERBS_NO_CARD "; load the driver of the card, or make a soft-RoCE device with \"rdma link "
                                         "add rxe0 type rxe netdev eth0\"");
}

/* Loads libibverbs. When it is missing, a card that is missing too is the better reason. */
static enum tl_status need_library(struct tl_error *ret_error)
{
    struct tl_error problem;
    enum tl_status status = verbs_library_load(&problem);
    if (status == TL_OK) return TL_OK;
    if (!folder_has("/sys/class/infiniband", "")) return no_card(ret_error);
    return tl_error_set(ret_error, status, "no RDMA device: the kernel has some, but %s", problem.message);
}

static enum tl_status no_device(int error_number, struct tl_error *ret_error)
{
    if (!folder_has("/sys/class/infiniband", "")) return no_card(ret_error);
    if (!folder_has("/dev/infiniband", "uverbs")) {
        return tl_error_set(ret_error, TL_NOT_FOUND,
                            "no RDMA device: the nodes in /dev/infiniband are missing; load the module ib_uverbs, in a "
                            "container pass --device=/dev/infiniband");
    }
    return tl_error_set(ret_error, TL_NOT_FOUND,
                        "no RDMA device: the kernel has some, but rdma-core finds none (%s); load the module ib_uverbs "
                        "and install the card's provider (package ibverbs-providers)",
                        error_number != 0 ? strerror(error_number) : "no provider fits");
}

/* ------------------------------------------------------------------------------------------------------- order -- */

static int compare_ranks(const void *a, const void *b)
{
    const struct rank *first = a, *second = b;
    if (first->is_usable != second->is_usable) return first->is_usable ? -1 : 1;
    for (size_t i = 0; i < TL_ARRAY_COUNT(first->keys); i++) {
        if (first->keys[i] != second->keys[i]) return first->keys[i] < second->keys[i] ? -1 : 1;
    }
    return 0;
}

/* Returns the candidates in their order; NULL when there is no memory. */
static struct tl_verbs_candidate *listing_sort(const struct listing *listing)
{
    struct tl_verbs_candidate *sorted = calloc(listing->count + 1, sizeof(*sorted));
    if (sorted == NULL) return NULL;
    if (listing->count > 0) qsort(listing->ranks, listing->count, sizeof(*listing->ranks), compare_ranks);
    for (size_t i = 0; i < listing->count; i++) {
        sorted[i] = listing->candidates[listing->ranks[i].keys[4]];
        sorted[i].order = listing->ranks[i].is_usable ? (int)i : -1;
    }
    return sorted;
}

static void resolve_filter(struct listing *listing, struct ibv_device **devices, size_t count)
{
    const char **names = calloc(count, sizeof(*names));
    for (size_t i = 0; names != NULL && i < count; i++)
        names[i] = ibv_get_device_name(devices[i]);
    if (names != NULL) verbs_filter_resolve(&listing->filter, names, count);
    free(names);
}

enum tl_status tl_verbs_list(const struct tl_verbs_options *options, struct tl_verbs_candidate **ret_candidates,
                             size_t *ret_count, struct tl_error *ret_error)
{
    struct listing listing = {.options = options};
    struct tl_verbs_candidate *sorted = NULL;
    int device_count = 0;
    bool is_ok = true;
    enum tl_status status = tl_verbs_options_check(options, ret_error);
    if (status == TL_OK) status = verbs_filter_parse(options->devices, &listing.filter, ret_error);
    if (status == TL_OK) status = need_library(ret_error);
    if (status != TL_OK) return status;
    if (options->address != NULL && verbs_address_to_gid(options->address, listing.address)) {
        find_interface(listing.address, listing.interface);
    }
    errno = 0;
    struct ibv_device **devices = ibv_get_device_list(&device_count);
    if (devices == NULL || device_count == 0) {
        status = no_device(devices == NULL ? errno : 0, ret_error);
        if (devices != NULL) ibv_free_device_list(devices);
        return status;
    }
    resolve_filter(&listing, devices, (size_t)device_count);
    for (int i = 0; is_ok && i < device_count; i++)
        is_ok = add_device(&listing, devices[i]);
    ibv_free_device_list(devices);
    if (is_ok) sorted = listing_sort(&listing);
    free(listing.candidates);
    free(listing.ranks);
    if (sorted == NULL) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for the list of RDMA devices");
    *ret_candidates = sorted;
    *ret_count = listing.count;
    return TL_OK;
}

const char *tl_verbs_port_state(const char *device, uint32_t port)
{
    /* As the kernel numbers them in sysfs. */
    static const char *const states[] = {"", "down", "waits for the subnet manager", "armed", "active"};
    char path[256];
    unsigned state = 0;
    snprintf(path, sizeof(path), "/sys/class/infiniband/%s/ports/%u/state", device, port);
    FILE *file = fopen(path, "re");
    if (file == NULL) return "";
    if (fscanf(file, "%u", &state) != 1) state = 0;
    fclose(file);
    return state < TL_ARRAY_COUNT(states) ? states[state] : "";
}

enum tl_status tl_verbs_explain(const struct tl_verbs_options *options, const struct tl_verbs_candidate *candidates,
                                size_t count, struct tl_error *ret_error)
{
    char text[TL_ERROR_MESSAGE_BYTES], remedy[128] = "";
    size_t used = 0;
    for (size_t i = 0; i < count && used < sizeof(text) - 1; i++) {
        const struct tl_verbs_candidate *each = &candidates[i];
        char port[16] = "";
        if (each->port != 0) snprintf(port, sizeof(port), ":%u", each->port);
        int len = snprintf(text + used, sizeof(text) - used, "; %s%s%s%s: %s", each->device, port,
                           each->gid[0] != '\0' ? " " : "", each->gid, each->reason);
        used += len > 0 ? (size_t)len : 0;
    }
    text[used < sizeof(text) ? used : sizeof(text) - 1] = '\0';
    if (options->gid_index >= 0) {
        snprintf(remedy, sizeof(remedy),
                 " with verbs.gid_index %d: give one that \"tensorlane devices\" lists, or leave it out",
                 options->gid_index);
    }
    return tl_error_set(ret_error, TL_NOT_FOUND, "no RDMA port can be used%s%s", remedy, text);
}
