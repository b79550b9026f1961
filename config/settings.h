// SPDX-License-Identifier: Apache-2.0
/*
 * The settings of a task. Each is a field here and a row of config/settings_table.c, in the same order.
 */
#ifndef CONFIG_SETTINGS_H
#define CONFIG_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/tensor.h>

#include "base/action.h"

/* The protocols, each with its word in the configuration. The enum, what the configuration and --protocol accept, and
 * the help of pull are made from this list. config/schema.json, which a test compares with it, documents and other
 * tests repeat the words. */
/* clang-format off */
#define TL_PROTOCOLS(entry) \
    entry(TL_PROTOCOL_AUTO, "auto") \
    entry(TL_PROTOCOL_GRPC, "grpc") \
    entry(TL_PROTOCOL_GRPC_LOCAL, "grpc+local") \
    entry(TL_PROTOCOL_GRPC_VERBS, "grpc+verbs") \
    entry(TL_PROTOCOL_GRPC_GDR, "grpc+gdr")
/* clang-format on */

#define TL_PROTOCOL_VALUE(value, word) value,
enum tl_protocol { TL_PROTOCOLS(TL_PROTOCOL_VALUE) };
#undef TL_PROTOCOL_VALUE

enum tl_rdma_policy { TL_RDMA_PREFER = 0, TL_RDMA_REQUIRE = 1, TL_RDMA_OFF = 2 };
enum tl_connect_policy { TL_CONNECT_LAZY = 0, TL_CONNECT_EAGER = 1 };
enum tl_verbs_keys { TL_VERBS_KEYS_WINDOW = 0, TL_VERBS_KEYS_REGION = 1 };

enum tl_tls_version { TL_TLS_1_2 = 0x0303, TL_TLS_1_3 = 0x0304 }; /* as they are on the wire */
enum tl_encrypt { TL_ENCRYPT_PREFER = 0, TL_ENCRYPT_REQUIRE = 1 };

enum tl_process_vm { TL_PROCESS_VM_AUTO = 0, TL_PROCESS_VM_OFF = 1 };
enum tl_local_map { TL_LOCAL_MAP_FILES = 0, TL_LOCAL_MAP_OFF = 1 };

/* A number that follows from the machine: "auto". */
#define TL_SETTING_AUTO UINT64_MAX

/* In "peers.addresses". */
#define TL_MAX_PEER_NETWORKS 256

/* In "security.allow": rules, and roles of one rule. */
#define TL_MAX_ALLOW_RULES 64
#define TL_MAX_ALLOW_ROLES 256

/* What a task has that does not set "verbs": {"pool"} and "limits": {"connections"}. */
#define TL_DEFAULT_POOL_BYTES (UINT64_C(64) << 20)
#define TL_DEFAULT_CONNECTIONS 16384

/* How the data plane within a host works: "local". */
struct tl_local_settings {
    const char *socket_folder; /* {"socket_folder": "/run/tensorlane"}: where the socket is a file; NULL: it is none */
    uint64_t pool_bytes;       /* {"pool": "4MiB"}: memory that a peer writes to is taken in pieces of this */
    uint64_t max_pool_bytes;   /* {"max_pool": "auto"}: all of a peer; TL_SETTING_AUTO: half of the machine's memory */
    uint64_t slot_count;       /* {"slots": 128}: posts of messages, and writes, under way from one peer */
    int64_t spin_ns;           /* {"spin": "50us"}: polling without result before sleeping */
    int64_t peer_timeout_ns; /* {"peer_timeout": "3s"}: a peer that says nothing for so long while it should is dead */
    enum tl_process_vm process_vm; /* {"process_vm": "auto"}: whether a peer's memory may be read */
    enum tl_local_map map;         /* {"map": "files"}: which published tensors peers may map instead of copying them */
};

/* How the RDMA data plane works: "verbs". */
struct tl_verbs_settings {
    const char *devices;     /* {"devices": "mlx5_0:1,^mlx5_1"}: which may be used; NULL: any */
    uint64_t port;           /* {"port": 1}: of the device; TL_SETTING_AUTO: any */
    uint64_t gid_index;      /* {"gid_index": 3}: place in the port's table; TL_SETTING_AUTO: by the task's address */
    uint64_t mtu_bytes;      /* {"mtu": 4096}: of a packet at most; TL_SETTING_AUTO: what the port does */
    uint64_t service_level;  /* {"service_level": 0} */
    uint64_t traffic_class;  /* {"traffic_class": 0} */
    uint64_t timeout;        /* {"timeout": 14}: 4.096 us * 2^timeout until a packet is sent again; 0: for ever */
    uint64_t retry_count;    /* {"retry_count": 6} */
    uint64_t queue_depth;    /* {"queue_depth": 1024}: operations that may be posted to one peer at a time */
    uint64_t pkey_index;     /* {"pkey_index": 0}: place in the port's table of partition keys */
    enum tl_verbs_keys keys; /* {"keys": "window"}: how narrow the memory is that a peer can write to */
    uint64_t pool_bytes;     /* {"pool": "64MiB"}: registered memory is taken in pieces of this */
    uint64_t max_pool_bytes; /* {"max_pool": "auto"}: all pieces; TL_SETTING_AUTO: half of the machine's memory */
    uint64_t cached_bytes;   /* {"cached": "auto"}: users' memory that is registered; TL_SETTING_AUTO: the same */
    uint64_t register_bytes; /* {"register": "256KiB"}: users' memory of so much is registered, smaller is copied */
    uint64_t piece_bytes;    /* {"piece": "auto"}: of one write at most; TL_SETTING_AUTO: what the device does */
    int64_t spin_ns;         /* {"spin": "50us"}: polling without result before sleeping */
    uint64_t slot_count;     /* {"slots": 64}: posts of messages, and writes, under way from one peer */
    int64_t
        peer_timeout_ns;   /* {"peer_timeout": "800ms"}: a peer that says nothing for so long while it should is dead */
    bool is_bounce_forced; /* {"bounce": false}: everything is copied through the pool, for measurements */
};

/* How tensors on GPUs travel: "gpu". */
struct tl_gpu_settings {
    bool is_proxy_forced; /* {"proxy": false}: only the worker itself accesses its GPUs, through pinned memory */
};

/* Callers that a rule of "security.allow" is about. */
enum tl_role_kind {
    TL_ROLE_ANY,          /* "any" */
    TL_ROLE_MEMBER,       /* "member": every task */
    TL_ROLE_JOB,          /* "job:ps" */
    TL_ROLE_TASK,         /* "task:ps:0" */
    TL_ROLE_TRUST_DOMAIN, /* "trust-domain:other.org": its certificates, which are then accepted */
    TL_ROLE_CLIENT,       /* "spiffe://example.org/client/ann", "ann.example.org": a certificate that is no task's; and
                             "spiffe://other.org/job/ps/task/0": that of a task of another trust domain */
};

struct tl_role {
    enum tl_role_kind kind;
    const char *word; /* as it is in the configuration */
    const char
        *name;     /* what a caller's name is compared with: "/job:ps/task:" is the start of it, "/job:ps/task:0" and
                      a client's name the whole, "spiffe://other.org/" the start; without meaning for any and member */
    uint32_t node; /* place of the word in the document, while that is open */
};

/* One rule: these callers may do this. */
struct tl_allow_rule {
    const struct tl_role *roles; /* [role_count] */
    size_t role_count;
    unsigned actions; /* 1U << enum tl_action */
};

/* Who may connect to a task, and do what: "security". The files are all NULL, or NULL but for crl. Relative ones start
 * at the folder of the configuration; "{name}" in them was replaced by JOB-INDEX of the task ("ps-0"), or by "client".
 */
struct tl_security_settings {
    const char *ca;                    /* "tls": {"ca": "certs/ca.pem"}; NULL: no TLS */
    const char *certificate;           /* {"certificate": "certs/{name}.pem"} */
    const char *key;                   /* {"key": "certs/{name}.key"} */
    const char *crl;                   /* {"crl": "certs/crl.pem"}; NULL: nothing is revoked */
    enum tl_tls_version min_version;   /* {"min_version": "1.3"} */
    enum tl_encrypt encrypt;           /* "encrypt": "require": no tensor leaves the host as plain text */
    const struct tl_allow_rule *allow; /* "allow": [{"who": ["member"], "what": ["read"]}], [allow_count] */
    size_t allow_count;
    const char *foreign_names; /* trust domains and URIs that "allow" names: "other.org spiffe://third.org/client/ann";
                                  "": none */
};

/* The settings of one task, every value effective. Sizes in bytes, durations in nanoseconds. */
struct tl_settings {
    enum tl_protocol protocol;      /* "protocol": a word of TL_PROTOCOLS */
    enum tl_rdma_policy rdma;       /* "rdma": "prefer", "require", "off"; without meaning for "grpc" */
    enum tl_connect_policy connect; /* "connect": "lazy" or "eager" */
    bool checksum;                  /* "checksum": verify every tensor that is received */
    const char *listen;             /* "listen": host:port to bind, NULL: the task's own address */
    const char *const *publish; /* "publish": files, [publish_count], relative ones as seen from the file's folder */
    size_t publish_count;
    struct tl_device device; /* "device": "gpu:0": where published files and pushed tensors are kept */

    const char *peer_networks; /* "peers": {"addresses": ["10.0.0.7", "10.1.0.0/16"]}: where members may connect from
                                  besides the addresses of their entries: "10.0.0.7,10.1.0.0/16"; "any"; NULL: none */

    uint64_t chunk_bytes;       /* "limits": {"chunk": "2MiB"}: largest piece of a tensor in one message */
    uint64_t inflight_bytes;    /* {"inflight": "64MiB"}: bytes of tensors being sent to one peer at a time */
    uint64_t held_bytes;        /* {"held": "16GiB"}: bytes of tensors sent and not yet received, and pushed */
    uint64_t waiting_receivers; /* {"waiting": 65536}: receivers that may wait at one worker */
    uint64_t connections;       /* {"connections": 16384}: calls that may be open at one worker */

    int64_t connect_timeout_ns;     /* "timeouts": {"connect": "10s"}: for one attempt to reach a peer */
    int64_t request_timeout_ns;     /* {"request": "60s"}: deadline of an operation that names none */
    int64_t keepalive_ns;           /* {"keepalive": "10s"}: quiet time after which a connection is probed */
    int64_t keepalive_timeout_ns;   /* {"keepalive_answer": "5s"}: and the time it then has to answer */
    int64_t reservation_timeout_ns; /* {"reservation": "30s"}: how long a value waits for a receiver that broke off */
    int64_t stalled_timeout_ns;     /* {"stalled": "60s"}: for a peer to take something of what it asked for */
    int64_t drain_timeout_ns;       /* {"drain": "10s"}: for running transfers when the worker stops */

    struct tl_local_settings local; /* "local" */
    struct tl_verbs_settings verbs; /* "verbs" */
    struct tl_gpu_settings gpu;     /* "gpu" */

    struct tl_security_settings security; /* "security" */

    int log_level;  /* "log": {"level": "info"}; enum tl_log_level */
    int log_format; /* {"format": "key-value" or "json"}; enum tl_log_format */
};

/* Returns why "protocol" excludes the transport that this protocol adds to gRPC; NULL: it does not. Never freed. */
const char *tl_settings_protocol_refusal(const struct tl_settings *settings, enum tl_protocol protocol);

/* The words of the configuration for these values. Never freed. */
const char *tl_settings_protocol_name(enum tl_protocol protocol);
const char *tl_settings_rdma_name(enum tl_rdma_policy rdma);

#endif
