// SPDX-License-Identifier: Apache-2.0
/*
 * Which device, port and GID is chosen, and the message when none suffices, over tables of made-up devices: this
 * program defines the calls of rdma-core that ask for them.
 */
#include <check.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "dataplane/verbs/verbs_internal.h"
#include "fakes/run_suite.h"

/* --------------------------------------------------------------------------------------------- made-up devices -- */

#define MAX_DEVICES 4
#define MAX_GIDS 16
#define MAX_QUEUE_DEPTH 100

struct made_gid {
    const char *device;
    uint32_t port;
    const char *address;
    enum ibv_gid_type type;
};

/* The GIDs are in the order of their devices and ports; the index of each counts from its port's first. */
static const struct made_gid *table;
static size_t table_len;
static const char *down; /* The ports of this device are down. */
static const char *also_down;
static uint16_t key_count; /* The length of the table of partition keys of each port. */
static uint8_t mute_port;  /* This port of each device does not answer; 0: all do. */
static int table_error;    /* 0: the GIDs can be read. */
static struct ibv_device devices[MAX_DEVICES];
static struct ibv_device *device_list[MAX_DEVICES + 1];
static struct ibv_context contexts[MAX_DEVICES];
static int device_count;

static void make(const struct made_gid *gids, size_t count)
{
    table = gids;
    table_len = count;
    device_count = 0;
    for (size_t i = 0; i < count; i++) {
        if (device_count > 0 && strcmp(devices[device_count - 1].name, gids[i].device) == 0) continue;
        ck_assert_int_lt(device_count, MAX_DEVICES);
        struct ibv_device *device = &devices[device_count];
        *device = (struct ibv_device){.node_type = IBV_NODE_CA, .transport_type = IBV_TRANSPORT_IB};
        strcpy(device->name, gids[i].device);
        contexts[device_count] = (struct ibv_context){.device = device};
        device_list[device_count++] = device;
    }
    device_list[device_count] = NULL;
}

struct ibv_device **ibv_get_device_list(int *ret_count)
{
    *ret_count = device_count;
    return device_list;
}

void ibv_free_device_list(struct ibv_device **list)
{
    ck_assert_ptr_eq(list, device_list);
}

const char *ibv_get_device_name(struct ibv_device *device)
{
    return device->name;
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    return &contexts[device - devices];
}

int ibv_close_device(struct ibv_context *context)
{
    (void)context;
    return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *ret_attributes)
{
    *ret_attributes =
        (struct ibv_device_attr){.device_cap_flags = IBV_DEVICE_MEM_WINDOW_TYPE_2B, .max_qp_wr = MAX_QUEUE_DEPTH};
    for (size_t i = 0; i < table_len; i++) {
        if (strcmp(table[i].device, context->device->name) != 0) continue;
        if (table[i].port > ret_attributes->phys_port_cnt) ret_attributes->phys_port_cnt = (uint8_t)table[i].port;
    }
    return 0;
}

/* The function that the header's inline form calls for a context without extensions. */
#undef ibv_query_port
int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *ret_attributes)
{
    struct ibv_port_attr *attributes = (void *)ret_attributes;
    bool is_down = (down != NULL && strcmp(down, context->device->name) == 0) ||
                   (also_down != NULL && strcmp(also_down, context->device->name) == 0);
    if (port == mute_port) return EIO;
    attributes->pkey_tbl_len = key_count;
    attributes->state = is_down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
    attributes->max_mtu = IBV_MTU_4096;
    attributes->active_mtu = IBV_MTU_4096;
    attributes->gid_tbl_len = (int)table_len;
    attributes->link_layer = IBV_LINK_LAYER_ETHERNET;
    return 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t capacity,
                             uint32_t flags, size_t entry_size)
{
    ssize_t count = 0;
    uint32_t index = 0, port = 0;
    ck_assert_uint_eq(entry_size, sizeof(*entries));
    (void)flags;
    ck_assert_uint_gt(capacity, 0); /* The kernel refuses to read none. */
    if (table_error != 0) return -table_error;
    for (size_t i = 0; i < table_len; i++) {
        if (strcmp(table[i].device, context->device->name) != 0) continue;
        ck_assert_uint_lt((size_t)count, capacity);
        index = table[i].port == port ? index + 1 : 0;
        port = table[i].port;
        struct ibv_gid_entry *entry = &entries[count++];
        *entry = (struct ibv_gid_entry){.gid_index = index, .port_num = port, .gid_type = table[i].type};
        ck_assert(verbs_address_to_gid(table[i].address, entry->gid.raw));
    }
    return count;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *ret_entry,
                      uint32_t flags, size_t entry_size)
{
    struct ibv_gid_entry entries[MAX_GIDS];
    ssize_t count = _ibv_query_gid_table(context, entries, MAX_GIDS, flags, entry_size);
    for (ssize_t i = 0; i < count; i++) {
        if (entries[i].port_num != port || entries[i].gid_index != index) continue;
        *ret_entry = entries[i];
        return 0;
    }
    return ENODATA;
}

/* ------------------------------------------------------------------------------------------------------- tests -- */

#define V1 IBV_GID_TYPE_ROCE_V1
#define V2 IBV_GID_TYPE_ROCE_V2

/* The GIDs of mlx5: every address of the interface, each first as v1. */
static const struct made_gid one_port[] = {
    {"mlx5_0", 1, "fe80::1", V1},  {"mlx5_0", 1, "fe80::1", V2},  {"mlx5_0", 1, "fd00::1", V1},
    {"mlx5_0", 1, "fd00::1", V2},  {"mlx5_0", 1, "10.0.0.1", V1}, {"mlx5_0", 1, "10.0.0.1", V2},
    {"mlx5_0", 1, "fd00::99", V1}, {"mlx5_0", 1, "fd00::99", V2},
};

/* The same address is at two cards, and as v1 only at the first one. */
static const struct made_gid two_cards[] = {
    {"mlx5_0", 1, "fd00::1", V1}, {"mlx5_0", 2, "10.0.0.2", V2}, {"mlx5_1", 1, "10.0.0.3", V2},
    {"mlx5_1", 1, "fd00::1", V2}, {"mlx5_1", 2, "fd00::2", V2},
};

struct expected {
    const char *address; /* The address of the worker; NULL: any. */
    const char *devices;
    const struct made_gid *gids;
    size_t gid_count;
    struct {
        const char *device;
        uint32_t port;
        int gid_index;
    } order[10]; /* The usable candidates in order. */
};

#define ONE one_port, TL_ARRAY_COUNT(one_port)
#define TWO two_cards, TL_ARRAY_COUNT(two_cards)

static const struct expected expected[] = {
    {"10.0.0.1", NULL, ONE, {{"mlx5_0", 1, 5}, {"mlx5_0", 1, 4}}},
    {"fd00::1", NULL, ONE, {{"mlx5_0", 1, 3}, {"mlx5_0", 1, 2}}},
    {"fd00:0:0::99", NULL, ONE, {{"mlx5_0", 1, 7}, {"mlx5_0", 1, 6}}},
    {"fe80::1", NULL, ONE, {{"mlx5_0", 1, 1}, {"mlx5_0", 1, 0}}},
    {"::ffff:10.0.0.1", NULL, ONE, {{"mlx5_0", 1, 5}, {"mlx5_0", 1, 4}}},
    {"fd00::2", NULL, ONE, {{NULL, 0, 0}}},
    /* When any address will do, v2 comes before v1; then IPv4, IPv6, link-local. */
    {NULL,
     NULL,
     ONE,
     {{"mlx5_0", 1, 5},
      {"mlx5_0", 1, 3},
      {"mlx5_0", 1, 7},
      {"mlx5_0", 1, 1},
      {"mlx5_0", 1, 4},
      {"mlx5_0", 1, 2},
      {"mlx5_0", 1, 6},
      {"mlx5_0", 1, 0}}},
    {"fd00::1", NULL, TWO, {{"mlx5_1", 1, 1}, {"mlx5_0", 1, 0}}},
    {"fd00::2", NULL, TWO, {{"mlx5_1", 2, 0}}},
    /* The address decides before the order of the devices, and that before v2. */
    {"fd00::1",
     "mlx5_0,mlx5_1",
     TWO,
     {{"mlx5_0", 1, 0}, {"mlx5_1", 1, 1}, {"mlx5_0", 2, 0}, {"mlx5_1", 1, 0}, {"mlx5_1", 2, 0}}},
    {"192.0.2.1", "mlx5_1:2,mlx5_0:2", TWO, {{"mlx5_1", 2, 0}, {"mlx5_0", 2, 0}}},
};

static void expect_order(const struct expected *each)
{
    struct tl_verbs_options options;
    struct tl_verbs_candidate *candidates = NULL;
    struct tl_error error = {0};
    size_t count = 0, usable = 0;
    make(each->gids, each->gid_count);
    tl_verbs_options_init(&options);
    options.address = each->address;
    options.devices = each->devices;
    ck_assert_msg(tl_verbs_list(&options, &candidates, &count, &error) == TL_OK, "%s", error.message);
    ck_assert_uint_eq(count, each->gid_count);
    for (; each->order[usable].device != NULL; usable++) {
        const struct tl_verbs_candidate *found = &candidates[usable];
        ck_assert_int_eq(found->order, (int)usable);
        ck_assert_str_eq(found->device, each->order[usable].device);
        ck_assert_uint_eq(found->port, each->order[usable].port);
        ck_assert_int_eq(found->gid_index, each->order[usable].gid_index);
    }
    for (; usable < count; usable++) {
        ck_assert_int_eq(candidates[usable].order, -1);
        ck_assert_str_ne(candidates[usable].reason, "");
    }
    free(candidates);
}

START_TEST(the_order)
{
    expect_order(&expected[_i]);
}
END_TEST

START_TEST(the_reason_names_the_kind)
{
    struct tl_verbs_options options;
    struct tl_verbs_candidate *candidates = NULL;
    size_t count = 0;
    make(one_port, TL_ARRAY_COUNT(one_port));
    tl_verbs_options_init(&options);
    options.address = "fd00::1";
    ck_assert_int_eq(tl_verbs_list(&options, &candidates, &count, NULL), TL_OK);
    ck_assert_str_eq(candidates[0].reason, "its GID is the worker's address, RoCE v2");
    ck_assert_str_eq(candidates[0].gid, "fd00::1");
    ck_assert_str_eq(candidates[1].reason, "its GID is the worker's address, RoCE v1");
    ck_assert_str_eq(candidates[2].reason, "its GID is not the worker's address fd00::1");
    free(candidates);
}
END_TEST

/* The settings want more operations than the card can have at a time; the message names the setting. */
START_TEST(a_queue_that_is_too_deep)
{
    struct tl_verbs_options options;
    struct tl_provider *provider = NULL;
    struct tl_error error = {0};
    make(one_port, TL_ARRAY_COUNT(one_port));
    tl_verbs_options_init(&options);
    options.queue_depth = MAX_QUEUE_DEPTH + 1;
    ck_assert_int_eq(tl_verbs_open(&options, 0, &provider, &error), TL_INVALID_ARGUMENT);
    ck_assert_str_eq(error.message, "verbs.queue_depth: 101 is more than the 100 that mlx5_0:1 does");
}
END_TEST

/* A port without a cable is not chosen for its v2. */
START_TEST(a_port_that_is_down)
{
    struct tl_verbs_options options;
    struct tl_verbs_candidate *candidates = NULL;
    size_t count = 0;
    make(two_cards, TL_ARRAY_COUNT(two_cards));
    down = "mlx5_1";
    tl_verbs_options_init(&options);
    options.address = "fd00::1";
    ck_assert_int_eq(tl_verbs_list(&options, &candidates, &count, NULL), TL_OK);
    ck_assert_str_eq(candidates[0].device, "mlx5_0");
    ck_assert_str_eq(candidates[0].gid_type, "RoCE v1");
    ck_assert_int_eq(candidates[1].order, -1);
    free(candidates);
}
END_TEST

/* When several ports are down, the one that has the worker's address is the one to repair. */
START_TEST(the_port_to_repair_comes_first)
{
    static const struct made_gid gids[] = {
        {"mlx5_0", 1, "10.0.0.1", V2}, {"mlx5_1", 1, "10.0.0.2", V2}, {"mlx5_2", 1, "10.0.0.3", V2}};
    struct tl_verbs_options options;
    struct tl_verbs_candidate *candidates = NULL;
    struct tl_error error = {0};
    size_t count = 0;
    make(gids, TL_ARRAY_COUNT(gids));
    down = "mlx5_1";
    also_down = "mlx5_2";
    tl_verbs_options_init(&options);
    options.address = "10.0.0.3";
    ck_assert_int_eq(tl_verbs_list(&options, &candidates, &count, NULL), TL_OK);
    ck_assert_str_eq(candidates[0].device, "mlx5_2");
    ck_assert_str_eq(candidates[0].state, "down");
    (void)tl_verbs_explain(&options, candidates, count, &error);
    ck_assert_msg(strstr(error.message, "no RDMA port can be used; mlx5_2:1 10.0.0.3: the port is down: look at the "
                                        "cable, the switch and \"ip link\"; ") == error.message,
                  "%s", error.message);
    free(candidates);
    /* A port that an option excludes is not the one to repair, whatever its address. */
    options.devices = "mlx5_1,mlx5_0:2";
    ck_assert_int_eq(tl_verbs_list(&options, &candidates, &count, NULL), TL_OK);
    ck_assert_str_eq(candidates[0].device, "mlx5_1");
    free(candidates);
}
END_TEST

/* A port is not left out, nor said to have no address, when the device does not answer. */
START_TEST(a_device_that_does_not_answer)
{
    struct tl_verbs_options options;
    struct tl_verbs_candidate *candidates = NULL;
    size_t count = 0;
    make(one_port, TL_ARRAY_COUNT(one_port));
    tl_verbs_options_init(&options);
    table_error = EIO;
    ck_assert_int_eq(tl_verbs_list(&options, &candidates, &count, NULL), TL_OK);
    ck_assert_uint_eq(count, 1);
    ck_assert_int_eq(candidates[0].order, -1);
    ck_assert_ptr_eq(strstr(candidates[0].reason, "cannot read the GIDs of /dev/infiniband/"), candidates[0].reason);
    free(candidates);
    mute_port = 1;
    ck_assert_int_eq(tl_verbs_list(&options, &candidates, &count, NULL), TL_OK);
    ck_assert_uint_eq(count, 1);
    ck_assert_int_eq(candidates[0].order, -1);
    ck_assert_ptr_eq(strstr(candidates[0].reason, "cannot ask port 1 of /dev/infiniband/"), candidates[0].reason);
    free(candidates);
}
END_TEST

/* A card refuses a queue pair whose partition key is beyond its table, long after the start. */
START_TEST(a_partition_key_beyond_the_table)
{
    struct tl_verbs_options options;
    struct tl_verbs_candidate *candidates = NULL;
    size_t count = 0;
    make(one_port, TL_ARRAY_COUNT(one_port));
    tl_verbs_options_init(&options);
    options.pkey_index = 2;
    for (key_count = 0; key_count <= 3; key_count++) {
        ck_assert_int_eq(tl_verbs_list(&options, &candidates, &count, NULL), TL_OK);
        bool is_refused = key_count == 1 || key_count == 2; /* 0: the card does not tell. */
        ck_assert_int_eq(candidates[0].order, is_refused ? -1 : 0);
        if (key_count == 2) {
            ck_assert_str_eq(candidates[0].reason, "verbs.pkey_index 2 is beyond the table of partition keys of this "
                                                   "port: give one of 0 to 1");
        }
        free(candidates);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("verbs_list");
    TCase *tcase = tcase_create("verbs_list");
    tcase_add_loop_test(tcase, the_order, 0, TL_ARRAY_COUNT(expected));
    tcase_add_test(tcase, the_reason_names_the_kind);
    tcase_add_test(tcase, a_queue_that_is_too_deep);
    tcase_add_test(tcase, a_port_that_is_down);
    tcase_add_test(tcase, the_port_to_repair_comes_first);
    tcase_add_test(tcase, a_device_that_does_not_answer);
    tcase_add_test(tcase, a_partition_key_beyond_the_table);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
