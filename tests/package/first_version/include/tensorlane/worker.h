// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORLANE_WORKER_H
#define TENSORLANE_WORKER_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <tensorlane/status.h>
#include <tensorlane/tensor.h>
#ifdef __cplusplus
extern "C" {
#endif
#define TL_MAX_KEY_BYTES 512
#define TL_TIMEOUT_DEFAULT INT64_C(-1)
#define TL_TIMEOUT_NONE INT64_MAX
struct tl_worker;
enum tl_progress {
    TL_PROGRESS_THREAD = 0,
    TL_PROGRESS_CALLER = 1,
};
struct tl_worker_options {
    size_t size_bytes;
    const char *config_path;
    const char *config_json;
    const char *job;
    uint32_t task;
    bool is_client;
    enum tl_progress progress;
};
TL_API enum tl_status tl_worker_open(const struct tl_worker_options *options, struct tl_worker **ret_worker,
                                     struct tl_error *ret_error) TL_MUST_USE;
TL_API void tl_worker_close(struct tl_worker *worker, int64_t timeout_ns);
TL_API const char *tl_worker_name(const struct tl_worker *worker);
TL_API uint64_t tl_worker_incarnation(const struct tl_worker *worker);
TL_API uint16_t tl_worker_port(const struct tl_worker *worker);
TL_API enum tl_status tl_worker_progress(struct tl_worker *worker, int64_t timeout_ns) TL_MUST_USE;
typedef uint64_t tl_peer_id;
enum tl_peer_state {
    TL_PEER_IDLE = 0,
    TL_PEER_CONNECTING = 1,
    TL_PEER_UP = 2,
    TL_PEER_DOWN = 3,
};
struct tl_peer_info {
    size_t size_bytes;
    tl_peer_id id;
    char name[320];
    char address[320];
    enum tl_peer_state state;
    uint64_t incarnation;
    uint64_t restart_count;
    char transport[16];
    struct tl_error reason;
};
TL_API enum tl_status tl_worker_find_peer(struct tl_worker *worker, const char *name, tl_peer_id *ret_peer,
                                          struct tl_error *ret_error) TL_MUST_USE;
TL_API size_t tl_worker_peers(struct tl_worker *worker, tl_peer_id *ret_peers, size_t capacity);
TL_API enum tl_status tl_worker_peer_info(struct tl_worker *worker, tl_peer_id peer, struct tl_peer_info *ret_info,
                                          struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_worker_wait_for_peers(struct tl_worker *worker, const tl_peer_id *peers, size_t count,
                                               size_t min_count, int64_t timeout_ns,
                                               struct tl_error *ret_error) TL_MUST_USE;
struct tl_cq;
typedef uint64_t tl_op_id;
enum tl_op_kind { TL_OP_SEND = 1, TL_OP_RECV = 2 };
enum tl_path {
    TL_PATH_NONE = 0,
    TL_PATH_SELF = 1,
    TL_PATH_GRPC = 2,
    TL_PATH_SERIALIZED = 3,
    TL_PATH_ZERO_COPY = 4,
    TL_PATH_BOUNCE = 5,
    TL_PATH_MAPPED = 6,
};
TL_API const char *tl_path_name(enum tl_path path);
struct tl_completion {
    size_t size_bytes;
    tl_op_id op;
    enum tl_op_kind kind;
    void *user_data;
    struct tl_error status;
    struct tl_tensor *tensor;
    uint64_t step;
    enum tl_path path;
    const char *path_reason;
    uint64_t bytes;
    int64_t duration_ns;
    bool is_verified;
    uint64_t reserved[8];
};
TL_API enum tl_status tl_cq_create(struct tl_cq **ret_cq, struct tl_error *ret_error) TL_MUST_USE;
TL_API void tl_cq_destroy(struct tl_cq *cq);
TL_API int tl_cq_fd(const struct tl_cq *cq);
TL_API size_t tl_cq_poll(struct tl_cq *cq, struct tl_completion *ret_completions, size_t capacity);
TL_API size_t tl_cq_wait(struct tl_cq *cq, struct tl_completion *ret_completions, size_t capacity, int64_t timeout_ns);
struct tl_recv_options {
    size_t size_bytes;
    struct tl_tensor *destination;
    bool wants_checksum;
    bool may_map;
};
TL_API enum tl_status tl_send(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                              int64_t timeout_ns, struct tl_cq *cq, void *user_data, tl_op_id *ret_op,
                              struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_recv(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                              const struct tl_recv_options *options, int64_t timeout_ns, struct tl_cq *cq,
                              void *user_data, tl_op_id *ret_op, struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_send_wait(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                                   int64_t timeout_ns, struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_recv_wait(struct tl_worker *worker, tl_peer_id peer, const char *key, uint64_t step,
                                   const struct tl_recv_options *options, int64_t timeout_ns,
                                   struct tl_completion *ret_completion, struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_cancel(struct tl_worker *worker, tl_op_id op) TL_MUST_USE;
TL_API enum tl_status tl_publish(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor,
                                 struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_withdraw(struct tl_worker *worker, const char *key, struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_worker_abort_step(struct tl_worker *worker, uint64_t step, enum tl_status status,
                                           const char *message, struct tl_error *ret_error) TL_MUST_USE;
TL_API enum tl_status tl_worker_end_step(struct tl_worker *worker, uint64_t step, uint64_t *ret_dropped_count,
                                         struct tl_error *ret_error) TL_MUST_USE;
struct tl_worker_stats {
    size_t size_bytes;
    uint64_t tensors_sent;
    uint64_t tensors_received;
    uint64_t bytes_sent;
    uint64_t bytes_received;
    uint64_t bytes_copied_send;
    uint64_t frames_sent;
    uint64_t frames_received;
    uint64_t requests_retried;
    uint64_t tensors_dropped;
    uint64_t waiting_receivers;
    uint64_t held_tensors;
    uint64_t held_bytes;
    uint64_t published_tensors;
    uint64_t published_bytes;
    uint64_t open_operations;
    uint64_t protocol_errors;
};
TL_API enum tl_status tl_worker_stats(struct tl_worker *worker, struct tl_worker_stats *ret_stats,
                                      struct tl_error *ret_error) TL_MUST_USE;
#ifdef __cplusplus
}
#endif
#endif
