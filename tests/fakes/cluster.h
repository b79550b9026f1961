// SPDX-License-Identifier: Apache-2.0
/*
 * A cluster of workers in the test's own process, for programs that include check.h first.
 *
 * cluster_init writes the configuration, with ports that are free; cluster_open opens one task after the other, in any
 * order; cluster_close closes one, which can be opened again at the same address; cluster_close_all ends the test. The
 * tasks are /job:node/task:0 and so on.
 */
#ifndef FAKES_CLUSTER_H
#define FAKES_CLUSTER_H

#include <stdbool.h>

#include <tensorlane/tensorlane.h>

#define CLUSTER_MAX 8

#define CLUSTER_SECOND INT64_C(1000000000)
/* The time for what must come: a test waits that long only when something is broken. */
#define CLUSTER_LONG (100 * CLUSTER_SECOND)

struct cluster {
    unsigned size;
    unsigned ports[CLUSTER_MAX];          /* The ports that peers dial. */
    int reservations[CLUSTER_MAX];        /* Sockets that keep the ports from other processes; -1: closed. */
    const char *protocol;                 /* The protocol of tasks whose settings name none; "grpc" by default. */
    const char *settings;                 /* Members of the top level of the JSON: "\"a\": 1, \"b\": 2"; may be NULL. */
    char task_settings[CLUSTER_MAX][160]; /* The same for each task. */
    enum tl_progress progress;
    struct tl_worker *workers[CLUSTER_MAX]; /* NULL: not open. */
};

/* Returns a free port of 127.0.0.1 outside of the range from which connections take theirs. */
unsigned cluster_free_port(void);

void cluster_init(struct cluster *cluster, unsigned size, const char *settings);
/* Puts a task behind a proxy, which this function starts. */
struct proxy;
void cluster_use_proxy(struct cluster *cluster, unsigned task, struct proxy *proxy);
/* Writes the configuration; ret_json has CLUSTER_JSON_BYTES. */
#define CLUSTER_JSON_BYTES 8192
void cluster_write_json(const struct cluster *cluster, char *ret_json);
struct tl_worker *cluster_open(struct cluster *cluster, unsigned task);
void cluster_open_all(struct cluster *cluster);
/* Opens a worker that is no member; the caller closes it. */
struct tl_worker *cluster_open_client(const struct cluster *cluster);
void cluster_close(struct cluster *cluster, unsigned task);
void cluster_close_all(struct cluster *cluster);
const char *cluster_task_name(unsigned task); /* The result lies in a static buffer: one thread alone may call it. */

/* Returns how `worker` sees the peer `to`. */
tl_peer_id cluster_peer(struct tl_worker *worker, unsigned to);
struct tl_peer_info cluster_peer_info(struct tl_worker *worker, unsigned to);
struct tl_worker_stats cluster_stats(struct tl_worker *worker);

/* Makes a TL_U8 tensor with a pattern that depends on the seed, or checks that a tensor has this pattern. */
struct tl_tensor *cluster_tensor(uint64_t size_bytes, unsigned seed);
bool cluster_tensor_is(const struct tl_tensor *tensor, uint64_t size_bytes, unsigned seed);
/* Makes the same around memory of the caller; `released` grows by one when that memory is given back. */
struct tl_tensor *cluster_wrap(void *data, uint64_t size_bytes, unsigned *released);

/* These send, receive and publish; all of them must succeed. */
void cluster_send(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor, struct tl_cq *cq);
tl_op_id cluster_recv(struct tl_worker *worker, unsigned from, const char *key, uint64_t step, struct tl_cq *cq);
struct tl_tensor *cluster_recv_wait(struct tl_worker *worker, unsigned from, const char *key, uint64_t step);
void cluster_publish(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor);

struct tl_cq *cluster_cq(void);
/* Returns the next completion, which must come. This function and the next one run on the test's own thread. */
struct tl_completion cluster_next(struct tl_cq *cq);
/* Waits for the next completion, whose status must be this. Puts its tensor. */
struct tl_completion cluster_expect(struct tl_cq *cq, enum tl_status status);
/* Returns whether the queue is empty now. */
bool cluster_is_quiet(struct tl_cq *cq);

/* Waits until the condition, which may have side effects, is true; fails the test when it does not become true. */
#define CLUSTER_UNTIL(condition)                                                                                       \
    do {                                                                                                               \
        int64_t until_ns_ = cluster_now_ns() + CLUSTER_LONG;                                                           \
        while (!(condition)) {                                                                                         \
            ck_assert_msg(cluster_now_ns() < until_ns_, "never became true: %s", #condition);                          \
            cluster_pause();                                                                                           \
        }                                                                                                              \
    } while (0)

int64_t cluster_now_ns(void);
void cluster_pause(void); /* Sleeps for a millisecond. */

#endif
