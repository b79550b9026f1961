// SPDX-License-Identifier: Apache-2.0
/*
 * Calls to any worker, or any gRPC server, for tools: who are you, how are you, what do you publish.
 *
 * Each function is one call with one deadline and blocks until its end; it runs a loop of its own, so any thread may
 * call it, also several at a time.
 */
#ifndef CONTROL_CLIENT_H
#define CONTROL_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tensor/transfer.h"

/* What a worker says of itself. Strings are never NULL after a successful call; code that fills one may leave them
 * NULL. */
struct tl_transport_state {
    char *name;
    bool is_available;
    char *reason;
};

struct tl_peer_description {
    char *name;
    char *state; /* "idle", "connecting", "up", "down" */
    char *transport;
    char *reason;
    uint64_t incarnation;
    uint64_t latency_ns;       /* there and back; 0: not measured */
    uint64_t bytes_per_second; /* 0: not measured */
    uint32_t mtu_bytes;        /* largest packet of its data connection; 0: none, or not known */
    char *address;             /* "host:port" where the worker looks for it; "": none */
    char *host_name;           /* these two are what the latest Hello of the peer said; "" and 0: unknown */
    uint64_t process_id;
};

/* A setting in force. */
struct tl_setting_text {
    char *path; /* "verbs.mtu" */
    char *value;
};

/* What is wrong with a worker, as far as it knows. */
struct tl_trouble {
    char *what; /* "descriptors", "pool", "file", "path" or "device" */
    char *reason;
    char *remedy;
    bool breaks_transfers; /* transfers fail because of it */
};

/* A GPU that the worker's process has opened; texts that are not known are "". */
struct tl_gpu_description {
    char *name;        /* "gpu:0" */
    char *model;       /* "NVIDIA H100 80GB HBM3" */
    char *pci_address; /* "0000:3b:00.0" */
    bool is_lost;
    bool is_kept_on; /* the worker keeps published files and what is pushed to it there */
    char *card;      /* the worker's RDMA card; "": none */
    char *distance;  /* from the card, as tl_pci_distance_name names it */
    char *path;      /* how its tensors travel to other hosts: "gpu-direct", "gpu-proxy" or "grpc"; "": not tried yet */
    char *reason;    /* why */
    bool is_slower;  /* the card was to access the GPU, and cannot */
};

/* What a data plane works with; texts that are not known are "", numbers 0. */
struct tl_data_plane_description {
    char *memlock; /* what is wrong with the limit of locked memory; "": nothing */
    char *device;  /* "": there is none, and why is the transport's reason */
    uint32_t port;
    uint32_t gid_index;
    char *gid;
    char *gid_type;
    char *interface;
    char *port_state;
    char *link_layer;
    uint32_t mtu_bytes;
    char *keys;        /* "window", "region" */
    char *reason;      /* why this device, port and GID */
    char *passed_over; /* those that came before it and have failed, each with its reason; "": none */
    char *not_tried;   /* those that come after it; "": none */
};

struct tl_counter {
    char *name;
    uint64_t value;
};

struct tl_description {
    char *job; /* "" for a client */
    uint32_t task;
    uint64_t incarnation;
    char *software_version;
    uint32_t protocol_version;
    bool is_serving;
    uint64_t uptime_ns;
    struct tl_transport_state *transports; /* [transport_count] */
    size_t transport_count;
    struct tl_peer_description *peers; /* [peer_count] */
    size_t peer_count;
    struct tl_counter *counters; /* [counter_count] */
    size_t counter_count;
    struct tl_data_plane_description *data_plane; /* NULL: the worker wants none, or does not say */
    uint64_t cluster_digest;                      /* equal for the same tasks with the same addresses; 0: unknown */
    struct tl_setting_text *settings;             /* [setting_count] */
    size_t setting_count;
    char **listens; /* [listen_count]: the sockets that are bound, "10.0.0.7:4000" */
    size_t listen_count;
    char *host_name;
    uint64_t process_id;
    int64_t unix_ns;             /* its clock; 0: unknown */
    struct tl_trouble *troubles; /* [trouble_count] */
    size_t trouble_count;
    struct tl_gpu_description *gpus; /* [gpu_count] */
    size_t gpu_count;
    char *reason; /* why it is not serving; "": it is, or does not say */
    char *remedy;
};

/* Frees everything in it and zeroes it. A zeroed one is accepted. */
void tl_description_fini(struct tl_description *description);

/* Frees everything in it and zeroes it. A zeroed one is accepted. */
void tl_listing_fini(struct tl_listing *listing);

/* The stage of a probe that found no fault but in the data path: tensors do not travel over it. */
#define TL_PROBE_STAGE_PATH "path"

/* What a worker found when it tried one of its peers, over gRPC and over the data path. */
struct tl_peer_probe {
    char name[TL_MAX_NAME_BYTES];
    char address[TL_MAX_ADDRESS_BYTES]; /* "host:port" where it looks for the peer */
    bool is_ok;                         /* true also when the peer could not be judged; `reason` says why then */
    char stage[16]; /* the stage that failed: "resolve", "tcp", "grpc", "identity", "small", "large", "path"; "": none.
                       "path" with is_ok: tensors may travel over gRPC instead */
    char direction[8]; /* in which bytes do not arrive: "to" the peer, "from" it, "both" */
    char reason[TL_ERROR_MESSAGE_BYTES];
    char remedy[TL_ERROR_MESSAGE_BYTES];
    uint64_t incarnation;    /* the worker that answered; 0: none did */
    int64_t ended_ns;        /* by the clock of the worker that probes; not sent */
    uint64_t age_ns;         /* how long before the answer the probe ended; set by tl_client_probe */
    int64_t clock_offset_ns; /* the peer's clock minus the worker's; 0: unknown */
};

struct tl_probe_results {
    struct tl_peer_probe *items; /* [count]; freed with free */
    size_t count;
};

/* How far a call came, for messages that help. */
enum tl_call_stage {
    TL_CALL_OPTIONS = 0, /* the headers or what belongs to TLS cannot be used */
    TL_CALL_RESOLVE = 1, /* the name could not be resolved */
    TL_CALL_CONNECT = 2, /* TCP: refused, unreachable, timed out */
    TL_CALL_SILENT = 3,  /* connected, but nothing answers */
    TL_CALL_HTTP2 = 4,   /* connected, but what answers does not speak HTTP/2, or the TLS handshake failed */
    TL_CALL_RPC = 5,     /* the call was made; its status is the result */
};

/* Metadata of a call. */
struct tl_call_header {
    const char *name; /* lower case */
    const char *value;
};

struct tl_tls;

/* How a call is protected; texts are PEM. */
struct tl_call_tls {
    const char *root_certs;  /* authorities to trust; NULL: those of the system */
    const char *cert_chain;  /* certificate of this process; NULL: none */
    const char *private_key; /* NULL exactly when cert_chain is */
    const char *server_name; /* name that the certificate must have; NULL: the address's host */
    bool is_unverified;      /* any certificate is accepted */
};

/* Bytes of an address with its family. */
#define TL_CALL_WHERE_BYTES 64

struct tl_call_options {
    const char *address;                  /* "host:port" */
    int64_t connect_timeout_ns;           /* for name, TCP and HTTP/2 together */
    int64_t http2_timeout_ns;             /* for HTTP/2 alone, once TCP is connected; 0: what is left of the other */
    int64_t rpc_timeout_ns;               /* for the call, once connected */
    const char *user_agent;               /* NULL: the library's */
    const struct tl_call_header *headers; /* [header_count] */
    size_t header_count;
    const struct tl_call_tls *tls; /* NULL: no TLS by gRPC */
    struct tl_tls *secure;         /* TLS as the workers of a cluster use it (control/tls.h); NULL: none */
    const char *expected_name;     /* with it: the name that the server's certificate must be for; NULL: any member */
    /* What the host of the address resolved to: "IPv4 10.0.0.7"; "" when it is numeric already, or was not reached.
     * [TL_CALL_WHERE_BYTES]; NULL: not wanted. */
    char *ret_where;
    bool is_gzip; /* says that the request is compressed, compresses it where that makes it smaller, takes compressed
                   * answers of at most 64 KiB */
};

/* The version of tensorlane's protocol that these calls speak; a worker of another one says so when it is asked who it
 * is. */
uint32_t tl_client_protocol_version(void);

/* Errors, for all of them: TL_UNAVAILABLE with *ret_stage below TL_CALL_RPC: not reached; the message says which
 * address, what happened and what to check. TL_INVALID_ARGUMENT with TL_CALL_RESOLVE: the address is no "host:port";
 * with TL_CALL_OPTIONS: a header that gRPC does not take, or certificates or a key that TLS rejects.
 * TL_DEADLINE_EXCEEDED: within rpc_timeout_ns. TL_INTERNAL: the answer is none that such a server gives.
 * TL_RESOURCE_EXHAUSTED: no memory or descriptors. Else the status of the call. ret_stage may be NULL and is set on
 * success too. */
enum tl_status tl_client_identify(const struct tl_call_options *options, struct tl_description *ret_description,
                                  enum tl_call_stage *ret_stage, struct tl_error *ret_error) TL_MUST_USE;

/* Asks a worker to try its peers. Ownership: free(ret_results->items). Errors: TL_UNIMPLEMENTED: its release cannot. */
enum tl_status tl_client_probe(const struct tl_call_options *options, struct tl_probe_results *ret_results,
                               enum tl_call_stage *ret_stage, struct tl_error *ret_error) TL_MUST_USE;

/* Tries a peer: dials it, checks that it is result->name, and sends small and large messages both ways, each with a
 * deadline of its own, all until deadline_ns. secure: TLS, as in tl_call_options. result->name and address are set; the
 * rest is filled. Blocks. */
void tl_client_probe_peer(struct tl_peer_probe *result, struct tl_tls *secure, int64_t deadline_ns);

/* grpc.health.v1.Health/Check; *ret_health is the number that was answered (enum tl_health). */
enum tl_status tl_client_check_health(const struct tl_call_options *options, const char *service, int *ret_health,
                                      enum tl_call_stage *ret_stage, struct tl_error *ret_error) TL_MUST_USE;

/* Ownership of *ret_listing: tl_listing_fini. Errors: TL_RESOURCE_EXHAUSTED: more than 1,000,000 tensors or 256 MiB. */
enum tl_status tl_client_list(const struct tl_call_options *options, const char *pattern,
                              struct tl_listing *ret_listing, enum tl_call_stage *ret_stage,
                              struct tl_error *ret_error) TL_MUST_USE;

enum tl_status tl_client_withdraw(const struct tl_call_options *options, const char *pattern, uint64_t *ret_count,
                                  enum tl_call_stage *ret_stage, struct tl_error *ret_error) TL_MUST_USE;

/* Publishes a tensor on the worker, which refuses to replace one of a later step unless may_go_back. The bytes are sent
 * from the tensor's memory in pieces of chunk_bytes (not 0), with a checksum. progress (may be NULL) is called on this
 * thread with the bytes sent since the last call. rpc_timeout_ns counts from the last progress. Errors: those
 * with which the worker refuses the push, and that of the tensor when its bytes cannot be read any more. */
enum tl_status tl_client_publish(const struct tl_call_options *options, const char *key, uint64_t step,
                                 bool may_go_back, struct tl_tensor *tensor, uint64_t chunk_bytes,
                                 void (*progress)(void *context, uint64_t bytes), void *progress_context,
                                 enum tl_call_stage *ret_stage, struct tl_error *ret_error) TL_MUST_USE;

#endif
