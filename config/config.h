// SPDX-License-Identifier: Apache-2.0
/*
 * The cluster's configuration: one JSON file, or TF_CONFIG, becomes one plain struct.
 *
 * A setting is looked up in this order, later ones win: default, the environment (tl_config_apply_environment), top
 * level of the file, the job's entry under "jobs", the task's entry under "jobs"/JOB/"tasks". Everything is checked
 * when the file is read; an error names file, line, column, JSON path, what is wrong, and the nearest valid name where
 * a name is wrong. docs/config.md is the manual, config/schema.json the same for machines.
 */
#ifndef CONFIG_CONFIG_H
#define CONFIG_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

enum tl_protocol { TL_PROTOCOL_AUTO = 0, TL_PROTOCOL_GRPC = 1, TL_PROTOCOL_GRPC_VERBS = 2, TL_PROTOCOL_GRPC_LOCAL = 3 };
enum tl_rdma_policy { TL_RDMA_PREFER = 0, TL_RDMA_REQUIRE = 1, TL_RDMA_OFF = 2 };
enum tl_connect_policy { TL_CONNECT_LAZY = 0, TL_CONNECT_EAGER = 1 };
enum tl_verbs_keys { TL_VERBS_KEYS_WINDOW = 0, TL_VERBS_KEYS_REGION = 1 };

enum tl_process_vm { TL_PROCESS_VM_AUTO = 0, TL_PROCESS_VM_OFF = 1 };
enum tl_local_map { TL_LOCAL_MAP_FILES = 0, TL_LOCAL_MAP_OFF = 1 };

/* A number that follows from the machine: "auto". */
#define TL_SETTING_AUTO UINT64_MAX

/* In "peers.addresses". */
#define TL_MAX_PEER_NETWORKS 256

/* How the data plane within a host works: "local". */
struct tl_local_settings {
    const char *socket_folder; /* {"socket_folder": "/run/tensorlane"}: where the socket is a file; NULL: it is none */
    uint64_t pool_bytes;       /* {"pool": "4MiB"}: memory that a peer writes to is taken in pieces of this */
    uint64_t max_pool_bytes;   /* {"max_pool": "auto"}: all of a peer; TL_SETTING_AUTO: half of the machine's memory */
    uint64_t slot_count;       /* {"slots": 256}: messages under way from one peer */
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
    uint64_t slot_count;     /* {"slots": 256}: messages under way from one peer */
    int64_t
        peer_timeout_ns;   /* {"peer_timeout": "800ms"}: a peer that says nothing for so long while it should is dead */
    bool is_bounce_forced; /* {"bounce": false}: everything is copied through the pool, for measurements */
};

/* The settings of one task, every value effective. Sizes in bytes, durations in nanoseconds. */
struct tl_settings {
    enum tl_protocol protocol;      /* "protocol": "auto", "grpc", "grpc+local" or "grpc+verbs" */
    enum tl_rdma_policy rdma;       /* "rdma": "prefer", "require", "off"; without meaning for "grpc" */
    enum tl_connect_policy connect; /* "connect": "lazy" or "eager" */
    bool checksum;                  /* "checksum": verify every tensor that is received */
    const char *listen;             /* "listen": host:port to bind, NULL: the task's own address */
    const char *const *publish; /* "publish": files, [publish_count], relative ones as seen from the file's folder */
    size_t publish_count;

    const char *peer_networks; /* "peers": {"addresses": ["10.0.0.7", "10.1.0.0/16"]}: where members may connect from
                                  besides the addresses of their entries: "10.0.0.7,10.1.0.0/16"; "any"; NULL: none */

    uint64_t chunk_bytes;       /* "limits": {"chunk": "1MiB"}: largest piece of a tensor in one message */
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

    int log_level;  /* "log": {"level": "info"}; enum tl_log_level */
    int log_format; /* {"format": "key-value" or "json"}; enum tl_log_format */
};

struct tl_config_task {
    const char *job;
    uint32_t index;
    const char *name;    /* "/job:ps/task:0" */
    const char *address; /* what peers dial: "host:port", "[v6]:port"; NULL: it cannot be dialled (an evaluator) */
    struct tl_settings settings;
};

/* A whole cluster. */
struct tl_config {
    const char *source;           /* file name or "TF_CONFIG", for messages */
    struct tl_config_task *tasks; /* [task_count], sorted by job name, then index */
    size_t task_count;
    const struct tl_config_task *self;  /* TF_CONFIG's own task; an evaluator need not be among tasks. NULL otherwise */
    struct tl_settings client_settings; /* for a process that is no task: those of the top level */
    struct tl_error client_error;       /* code TL_OK, or how these contradict each other, though no task's do */
    void *memory;                       /* private */
};

/* Reads a file ("-": standard input). Errors: TL_NOT_FOUND, TL_PERMISSION_DENIED: the file. TL_INVALID_ARGUMENT: its
 * contents, "FILE:LINE:COLUMN: PATH: what is wrong; remedy". TL_UNIMPLEMENTED: a protocol or another setting that
 * this version does not build, with the list of what it does. TL_RESOURCE_EXHAUSTED: no memory. Ownership: *ret_config
 * until tl_config_destroy. */
enum tl_status tl_config_read(const char *path, struct tl_config **ret_config, struct tl_error *ret_error) TL_MUST_USE;

/* The same from text; `source` stands for the file name in messages, `folder` (NULL: the current one) is where relative
 * paths start. */
enum tl_status tl_config_parse(const char *text, size_t len_bytes, const char *source, const char *folder,
                               struct tl_config **ret_config, struct tl_error *ret_error) TL_MUST_USE;

/* The environment variable TF_CONFIG; NULL when it is not set, or empty. */
const char *tl_config_tf_text(void);

/* From the text of TF_CONFIG, as TensorFlow reads it: unknown extra keys are ignored, "task" becomes self, an
 * "evaluator" need not be in the cluster. */
enum tl_status tl_config_parse_tf(const char *text, size_t len_bytes, struct tl_config **ret_config,
                                  struct tl_error *ret_error) TL_MUST_USE;

/* TF_CONFIG text rewritten as our JSON, indented. Ownership: free(*ret_json). */
enum tl_status tl_config_tf_to_json(const char *text, size_t len_bytes, char **ret_json,
                                    struct tl_error *ret_error) TL_MUST_USE;

void tl_config_destroy(struct tl_config *config); /* NULL is accepted */

/* More errors than these are not collected. */
#define TL_CONFIG_MAX_ERRORS 100

struct tl_config_error {
    size_t offset; /* where in the text the place is that the message names, in bytes */
    struct tl_error error;
};

/* The errors of one configuration, in the order of the text. */
struct tl_config_errors {
    struct tl_config_error items[TL_CONFIG_MAX_ERRORS];
    size_t count;
    bool is_full; /* the configuration may have more errors than the array holds */
};

/* Reads a file as tl_config_read does, but reads on behind an error, so that all errors are found at once. What only
 * follows from another error is not reported. The error of a file that cannot be read, or whose text is not JSON, is in
 * *ret_error alone, and errors->count is 0; otherwise *ret_error is the first of *ret_errors. */
enum tl_status tl_config_read_all_errors(const char *path, struct tl_config **ret_config,
                                         struct tl_config_errors *ret_errors, struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_config_parse_all_errors(const char *text, size_t len_bytes, const char *source, const char *folder,
                                          struct tl_config **ret_config, struct tl_config_errors *ret_errors,
                                          struct tl_error *ret_error) TL_MUST_USE;

/* The variables of a process. */
struct tl_config_environment {
    const char *const *variables;                     /* "NAME=VALUE", ended by NULL, as environ is */
    void (*warn)(void *context, const char *message); /* NULL: warnings are dropped */
    void *context;
};

/* Gives settings that the configuration leaves at their defaults the values of TensorFlow's variables RDMA_*, in both
 * the documented and the implemented spelling; docs/config.md has the table. An empty variable counts as none. Warns of
 * every RDMA_* that is none of them, with the nearest. Nothing has changed after an error.
 * Errors: TL_INVALID_ARGUMENT: a value out of range, or two spellings that contradict each other; the message names the
 * variable. TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_config_apply_environment(struct tl_config *config, const struct tl_config_environment *environment,
                                           struct tl_error *ret_error) TL_MUST_USE;

/* The task with this job and index, or this name ("/job:ps/task:0" or "ps:0"). Errors: TL_NOT_FOUND: naming the
 * nearest. */
enum tl_status tl_config_find_task(const struct tl_config *config, const char *job, uint32_t index,
                                   const struct tl_config_task **ret_task, struct tl_error *ret_error) TL_MUST_USE;
enum tl_status tl_config_find_name(const struct tl_config *config, const char *name,
                                   const struct tl_config_task **ret_task, struct tl_error *ret_error) TL_MUST_USE;

/* One effective value and where it came from, as `tensorlane config show` prints it. */
struct tl_config_value {
    const char *path;   /* "limits.chunk" */
    const char *value;  /* as JSON: "\"1MiB\"", "65536", "true", "[...]" */
    const char *origin; /* "default", "environment (RDMA_TIMEOUT)", or "FILE:LINE (jobs.ps.limits.chunk)" */
};

/* How many there are. */
#define TL_CONFIG_VALUE_COUNT 49

/* All values of a task of this configuration, or of its self, or (NULL) of a process that is no task, in the order of
 * struct tl_settings; returns how many there are and fills up to capacity. The strings live as long as the
 * configuration. */
size_t tl_config_values(const struct tl_config *config, const struct tl_config_task *task,
                        struct tl_config_value *ret_values, size_t capacity);

/* Splits "host:port" or "[v6]:port". host_capacity of 256 suffices for every valid one. Errors: TL_INVALID_ARGUMENT: no
 * host, no port, port not in 0..65535 (0 only for listening), a v6 address without brackets, host longer than 255. */
enum tl_status tl_address_split(const char *address, char *ret_host, size_t host_capacity, uint16_t *ret_port,
                                struct tl_error *ret_error) TL_MUST_USE;

#endif
