// SPDX-License-Identifier: Apache-2.0
#include "config/settings_table.h"

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * 1024)
#define GIB (MIB * 1024)
#define TIB (GIB * 1024)
#define US UINT64_C(1000)
#define MS ((uint64_t)TL_NS_PER_MS)
#define SEC ((uint64_t)TL_NS_PER_SEC)
#define HOUR (3600 * SEC)

/* One message of a stream: large enough that the cost per message vanishes, small enough that the messages of several
 * tensors alternate. */
#define DEFAULT_CHUNK_BYTES (2 * MIB)

/* clang-format off */
#define CHOICE_OF(value, word) {word, value, NULL},
const struct tl_choice tl_protocol_choices[] = {
    TL_PROTOCOLS(CHOICE_OF)
    {"grpc+mpi", -1, "the mpi transport"},
    {NULL, 0, NULL},
};
/* clang-format on */

static const struct tl_choice rdma_choices[] = {
    {"prefer", TL_RDMA_PREFER, NULL},
    {"require", TL_RDMA_REQUIRE, NULL},
    {"off", TL_RDMA_OFF, NULL},
    {NULL, 0, NULL},
};

static const struct tl_choice connect_choices[] = {
    {"lazy", TL_CONNECT_LAZY, NULL},
    {"eager", TL_CONNECT_EAGER, NULL},
    {NULL, 0, NULL},
};

static const struct tl_choice keys_choices[] = {
    {"window", TL_VERBS_KEYS_WINDOW, NULL},
    {"region", TL_VERBS_KEYS_REGION, NULL},
    {NULL, 0, NULL},
};

static const struct tl_choice process_vm_choices[] = {
    {"auto", TL_PROCESS_VM_AUTO, NULL},
    {"off", TL_PROCESS_VM_OFF, NULL},
    {NULL, 0, NULL},
};

static const struct tl_choice map_choices[] = {
    {"files", TL_LOCAL_MAP_FILES, NULL},
    {"off", TL_LOCAL_MAP_OFF, NULL},
    {NULL, 0, NULL},
};

static const struct tl_choice tls_version_choices[] = {
    {"1.2", TL_TLS_1_2, NULL},
    {"1.3", TL_TLS_1_3, NULL},
    {NULL, 0, NULL},
};

static const struct tl_choice encrypt_choices[] = {
    {"prefer", TL_ENCRYPT_PREFER, NULL},
    {"require", TL_ENCRYPT_REQUIRE, NULL},
    {NULL, 0, NULL},
};

static const struct tl_choice log_level_choices[] = {
    {"error", TL_LOG_ERROR, NULL},
    {"warn", TL_LOG_WARN, NULL},
    {"info", TL_LOG_INFO, NULL},
    {"debug", TL_LOG_DEBUG, NULL},
    {NULL, 0, NULL},
};

static const struct tl_choice log_format_choices[] = {
    {"key-value", TL_LOG_KEY_VALUE, NULL},
    {"json", TL_LOG_JSON, NULL},
    {NULL, 0, NULL},
};

#define TOP(name_) .name = (name_), .path = (name_)
#define IN(group_, name_) .group = group_, .name = name_, .path = group_ "." name_
#define WITHIN(group_, subgroup_, name_)                                                                               \
    .group = group_, .subgroup = subgroup_, .name = name_, .path = group_ "." subgroup_ "." name_
#define AT(member) .offset = offsetof(struct tl_settings, member)
#define CHOICE(list, first) .kind = TL_SETTING_CHOICE, .choices = (list), .default_value = (uint64_t)(first)
#define NUMBER(kind_, min_, max_, default_) .kind = (kind_), .min = (min_), .max = (max_), .default_value = (default_)
#define SIZE(min, max, first) NUMBER(TL_SETTING_SIZE, min, max, first)
#define COUNT(min, max, first) NUMBER(TL_SETTING_COUNT, min, max, first)
#define DURATION(min, max, first) NUMBER(TL_SETTING_DURATION, min, max, first)
#define AUTO_SIZE(min, max) NUMBER(TL_SETTING_SIZE, min, max, TL_SETTING_AUTO), .has_auto = true
#define AUTO_COUNT(min, max) NUMBER(TL_SETTING_COUNT, min, max, TL_SETTING_AUTO), .has_auto = true

/* clang-format off */
const struct tl_setting tl_settings_table[] = {
    {TOP("protocol"), AT(protocol), CHOICE(tl_protocol_choices, TL_PROTOCOL_AUTO)},
    {TOP("rdma"), AT(rdma), CHOICE(rdma_choices, TL_RDMA_PREFER)},
    {TOP("connect"), AT(connect), CHOICE(connect_choices, TL_CONNECT_LAZY)},
    {TOP("checksum"), AT(checksum), .kind = TL_SETTING_BOOL},
    {TOP("listen"), AT(listen), .kind = TL_SETTING_ADDRESS},
    {TOP("publish"), AT(publish), .kind = TL_SETTING_FILES},
    {TOP("device"), AT(device), .kind = TL_SETTING_TENSOR_DEVICE},
    {IN("peers", "addresses"), AT(peer_networks), .kind = TL_SETTING_NETWORKS},
    {IN("limits", "chunk"), AT(chunk_bytes), SIZE(4 * KIB, 16 * MIB, DEFAULT_CHUNK_BYTES)},
    {IN("limits", "inflight"), AT(inflight_bytes), SIZE(4 * KIB, 1 * TIB, 64 * MIB)},
    {IN("limits", "held"), AT(held_bytes), SIZE(4 * KIB, 1024 * TIB, 16 * GIB)},
    {IN("limits", "waiting"), AT(waiting_receivers), COUNT(1, 16777216, 65536)},
    {IN("limits", "connections"), AT(connections), COUNT(1, 1048576, TL_DEFAULT_CONNECTIONS)},
    {IN("timeouts", "connect"), AT(connect_timeout_ns), DURATION(1 * MS, 24 * HOUR, 10 * SEC)},
    {IN("timeouts", "request"), AT(request_timeout_ns), DURATION(1 * MS, 168 * HOUR, 60 * SEC)},
    {IN("timeouts", "keepalive"), AT(keepalive_ns), DURATION(100 * MS, 24 * HOUR, 10 * SEC)},
    {IN("timeouts", "keepalive_answer"), AT(keepalive_timeout_ns), DURATION(100 * MS, 24 * HOUR, 5 * SEC)},
    {IN("timeouts", "reservation"), AT(reservation_timeout_ns), DURATION(1 * MS, 24 * HOUR, 30 * SEC)},
    {IN("timeouts", "stalled"), AT(stalled_timeout_ns), DURATION(1 * MS, 24 * HOUR, 60 * SEC)},
    {IN("timeouts", "drain"), AT(drain_timeout_ns), DURATION(0, 24 * HOUR, 10 * SEC)},
    {IN("local", "socket_folder"), AT(local.socket_folder), .kind = TL_SETTING_FOLDER},
    {IN("local", "pool"), AT(local.pool_bytes), SIZE(1 * MIB, 1 * TIB, 4 * MIB)},
    {IN("local", "max_pool"), AT(local.max_pool_bytes), AUTO_SIZE(1 * MIB, 1024 * TIB)},
    {IN("local", "slots"), AT(local.slot_count), COUNT(16, 4096, 128)},
    {IN("local", "spin"), AT(local.spin_ns), DURATION(0, 1 * SEC, 50 * US)},
    {IN("local", "peer_timeout"), AT(local.peer_timeout_ns), DURATION(50 * MS, 1 * HOUR, 3 * SEC)},
    {IN("local", "process_vm"), AT(local.process_vm), CHOICE(process_vm_choices, TL_PROCESS_VM_AUTO)},
    {IN("local", "map"), AT(local.map), CHOICE(map_choices, TL_LOCAL_MAP_FILES)},
    {IN("verbs", "devices"), AT(verbs.devices), .kind = TL_SETTING_DEVICES},
    {IN("verbs", "port"), AT(verbs.port), AUTO_COUNT(1, 255)},
    {IN("verbs", "gid_index"), AT(verbs.gid_index), AUTO_COUNT(0, 255)},
    {IN("verbs", "mtu"), AT(verbs.mtu_bytes), AUTO_COUNT(256, 4096), .is_power_of_two = true},
    {IN("verbs", "service_level"), AT(verbs.service_level), COUNT(0, 7, 0)},
    {IN("verbs", "traffic_class"), AT(verbs.traffic_class), COUNT(0, 255, 0)},
    {IN("verbs", "timeout"), AT(verbs.timeout), COUNT(0, 31, 14)},
    {IN("verbs", "retry_count"), AT(verbs.retry_count), COUNT(0, 7, 6)},
    {IN("verbs", "queue_depth"), AT(verbs.queue_depth), COUNT(16, 65536, 1024)},
    {IN("verbs", "pkey_index"), AT(verbs.pkey_index), COUNT(0, 65535, 0)},
    {IN("verbs", "keys"), AT(verbs.keys), CHOICE(keys_choices, TL_VERBS_KEYS_WINDOW)},
    {IN("verbs", "pool"), AT(verbs.pool_bytes), SIZE(1 * MIB, 1 * TIB, TL_DEFAULT_POOL_BYTES)},
    {IN("verbs", "max_pool"), AT(verbs.max_pool_bytes), AUTO_SIZE(1 * MIB, 1024 * TIB)},
    {IN("verbs", "cached"), AT(verbs.cached_bytes), AUTO_SIZE(0, 1024 * TIB)},
    {IN("verbs", "register"), AT(verbs.register_bytes), SIZE(0, 1 * TIB, 256 * KIB)},
    {IN("verbs", "piece"), AT(verbs.piece_bytes), AUTO_SIZE(4 * KIB, 2 * GIB)},
    {IN("verbs", "spin"), AT(verbs.spin_ns), DURATION(0, 1 * SEC, 50 * US)},
    {IN("verbs", "slots"), AT(verbs.slot_count), COUNT(16, 4096, 64)},
    {IN("verbs", "peer_timeout"), AT(verbs.peer_timeout_ns), DURATION(50 * MS, 1 * HOUR, 800 * MS)},
    {IN("verbs", "bounce"), AT(verbs.is_bounce_forced), .kind = TL_SETTING_BOOL},
    {IN("gpu", "proxy"), AT(gpu.is_proxy_forced), .kind = TL_SETTING_BOOL},
    {WITHIN("security", "tls", "ca"), AT(security.ca), .kind = TL_SETTING_FILE},
    {WITHIN("security", "tls", "certificate"), AT(security.certificate), .kind = TL_SETTING_FILE},
    {WITHIN("security", "tls", "key"), AT(security.key), .kind = TL_SETTING_FILE},
    {WITHIN("security", "tls", "crl"), AT(security.crl), .kind = TL_SETTING_FILE},
    {WITHIN("security", "tls", "min_version"), AT(security.min_version), CHOICE(tls_version_choices, TL_TLS_1_3)},
    {IN("security", "encrypt"), AT(security.encrypt), CHOICE(encrypt_choices, TL_ENCRYPT_PREFER)},
    {IN("security", "allow"), AT(security.allow), .kind = TL_SETTING_ALLOW},
    {IN("log", "level"), AT(log_level), CHOICE(log_level_choices, TL_LOG_INFO)},
    {IN("log", "format"), AT(log_format), CHOICE(log_format_choices, TL_LOG_KEY_VALUE)},
};
/* clang-format on */
const size_t tl_settings_count = TL_ARRAY_COUNT(tl_settings_table);

size_t tl_settings_find(size_t offset)
{
    size_t i = 0;
    while (tl_settings_table[i].offset != offset) {
        i++;
        TL_CHECK(i < tl_settings_count);
    }
    return i;
}
