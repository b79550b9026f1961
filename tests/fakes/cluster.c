// SPDX-License-Identifier: Apache-2.0
/* Clusters in one process. A set-up that fails aborts the test. */
#include "fakes/cluster.h"

#include <arpa/inet.h>
#include <check.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "fakes/pattern.h"
#include "fakes/proxy.h"

/* The range lies below the ports that the kernel gives to connections. */
#define FIRST_PORT 12000
#define PORT_COUNT 20000

static void must(enum tl_status status, const struct tl_error *error)
{
    if (status != TL_OK) fprintf(stderr, "%s: %s\n", tl_status_name(status), error->message);
    TL_CHECK(status == TL_OK);
}

/* -------------------------------------------------------------------------------------------------------- time -- */

int64_t cluster_now_ns(void)
{
    return tl_clock_now_ns();
}

void cluster_pause(void)
{
    usleep(1000);
}

/* ---------------------------------------------------------------------------------------------------- lifetime -- */

/* Returns a socket that is bound to the port, or -1. Until it is closed, other tests find the port in use. A worker can
 * listen there all the same: both sockets allow the reuse of addresses, and this one does not listen. */
static int reserve(unsigned port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    address.sin_port = htons((uint16_t)port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    TL_CHECK(fd >= 0);
    const int on = 1;
    if (bind(fd, (struct sockaddr *)&address, sizeof(address)) != 0 ||
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static unsigned reserve_any(int *ret_fd)
{
    static unsigned next; /* Ports are taken in order, so that none comes twice; each process starts elsewhere. */
    if (next == 0) next = (unsigned)(tl_random_u64() % PORT_COUNT);
    for (;;) {
        unsigned port = FIRST_PORT + next++ % PORT_COUNT;
        *ret_fd = reserve(port);
        if (*ret_fd >= 0) return port;
    }
}

unsigned cluster_free_port(void)
{
    int fd;
    unsigned port = reserve_any(&fd);
    close(fd);
    return port;
}

void cluster_init(struct cluster *cluster, unsigned size, const char *settings)
{
    TL_CHECK(size <= CLUSTER_MAX);
    tl_log_configure(TL_LOG_ERROR, TL_LOG_KEY_VALUE);
    *cluster = (struct cluster){.size = size, .protocol = "grpc", .settings = settings};
    for (unsigned i = 0; i < size; i++)
        cluster->ports[i] = reserve_any(&cluster->reservations[i]);
}

void cluster_use_proxy(struct cluster *cluster, unsigned task, struct proxy *proxy)
{
    unsigned listen = cluster->ports[task];
    proxy_start(proxy, listen);
    cluster->ports[task] = proxy->port;
    snprintf(cluster->task_settings[task], sizeof(cluster->task_settings[0]), "\"listen\": \"127.0.0.1:%u\"", listen);
}

void cluster_write_json(const struct cluster *cluster, char *ret_json)
{
    FILE *out = fmemopen(ret_json, CLUSTER_JSON_BYTES, "w");
    fprintf(out, "{\"cluster\": {\"node\": [");
    for (unsigned i = 0; i < cluster->size; i++)
        fprintf(out, "%s\"127.0.0.1:%u\"", i > 0 ? ", " : "", cluster->ports[i]);
    bool has_protocol = cluster->settings != NULL && strstr(cluster->settings, "\"protocol\"") != NULL;
    fprintf(out, "]}");
    if (!has_protocol) fprintf(out, ", \"protocol\": \"%s\"", cluster->protocol);
    fprintf(out, "%s%s", cluster->settings != NULL ? ", " : "", cluster->settings != NULL ? cluster->settings : "");
    fprintf(out, ", \"jobs\": {\"node\": {\"tasks\": {");
    for (unsigned i = 0; i < cluster->size; i++)
        fprintf(out, "%s\"%u\": {%s}", i > 0 ? ", " : "", i, cluster->task_settings[i]);
    fprintf(out, "}}}}");
    TL_CHECK(fclose(out) == 0);
}

struct tl_worker *cluster_open(struct cluster *cluster, unsigned task)
{
    char json[CLUSTER_JSON_BYTES];
    cluster_write_json(cluster, json);
    const struct tl_worker_options options = {
        .size_bytes = sizeof(options), .config_json = json, .job = "node", .task = task, .progress = cluster->progress};
    struct tl_error error;
    TL_CHECK(cluster->workers[task] == NULL);
    must(tl_worker_open(&options, &cluster->workers[task], &error), &error);
    return cluster->workers[task];
}

void cluster_open_all(struct cluster *cluster)
{
    for (unsigned i = 0; i < cluster->size; i++)
        cluster_open(cluster, i);
}

struct tl_worker *cluster_open_client(const struct cluster *cluster)
{
    char json[CLUSTER_JSON_BYTES];
    cluster_write_json(cluster, json);
    const struct tl_worker_options options = {
        .size_bytes = sizeof(options), .config_json = json, .is_client = true, .progress = cluster->progress};
    struct tl_worker *worker;
    struct tl_error error;
    must(tl_worker_open(&options, &worker, &error), &error);
    return worker;
}

void cluster_close(struct cluster *cluster, unsigned task)
{
    tl_worker_close(cluster->workers[task], TL_TIMEOUT_DEFAULT);
    cluster->workers[task] = NULL;
}

void cluster_close_all(struct cluster *cluster)
{
    for (unsigned i = 0; i < cluster->size; i++) {
        cluster_close(cluster, i);
        if (cluster->reservations[i] >= 0) close(cluster->reservations[i]);
        cluster->reservations[i] = -1;
    }
}

const char *cluster_task_name(unsigned task)
{
    static char names[CLUSTER_MAX][32];
    snprintf(names[task], sizeof(names[0]), "/job:node/task:%u", task);
    return names[task];
}

/* ----------------------------------------------------------------------------------------------------- queries -- */

tl_peer_id cluster_peer(struct tl_worker *worker, unsigned to)
{
    char name[32];
    snprintf(name, sizeof(name), "/job:node/task:%u", to);
    tl_peer_id peer;
    struct tl_error error;
    must(tl_worker_find_peer(worker, name, &peer, &error), &error);
    return peer;
}

struct tl_peer_info cluster_peer_info(struct tl_worker *worker, unsigned to)
{
    struct tl_peer_info info = {.size_bytes = sizeof(info)};
    struct tl_error error;
    must(tl_worker_peer_info(worker, cluster_peer(worker, to), &info, &error), &error);
    return info;
}

struct tl_worker_stats cluster_stats(struct tl_worker *worker)
{
    struct tl_worker_stats stats = {.size_bytes = sizeof(stats)};
    struct tl_error error;
    must(tl_worker_stats(worker, &stats, &error), &error);
    return stats;
}

/* ----------------------------------------------------------------------------------------------------- tensors -- */

struct tl_tensor *cluster_tensor(uint64_t size_bytes, unsigned seed)
{
    struct tl_tensor *tensor;
    struct tl_error error;
    must(tl_tensor_create(TL_U8, 1, &size_bytes, &tensor, &error), &error);
    pattern_fill(tl_tensor_data(tensor), size_bytes, seed);
    return tensor;
}

bool cluster_tensor_is(const struct tl_tensor *tensor, uint64_t size_bytes, unsigned seed)
{
    if (tensor == NULL || tl_tensor_dtype(tensor) != TL_U8 || tl_tensor_rank(tensor) != 1) return false;
    if (tl_tensor_size_bytes(tensor) != size_bytes || tl_tensor_dims(tensor)[0] != size_bytes) return false;
    return pattern_is(tl_tensor_data(tensor), size_bytes, seed);
}

static void count_release(void *data, void *context)
{
    (void)data;
    __atomic_fetch_add((unsigned *)context, 1, __ATOMIC_ACQ_REL);
}

struct tl_tensor *cluster_wrap(void *data, uint64_t size_bytes, unsigned *released)
{
    const struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                        .dtype = TL_U8,
                                        .rank = 1,
                                        .dims = &size_bytes,
                                        .data = data,
                                        .capacity_bytes = size_bytes,
                                        .release = count_release,
                                        .release_context = released};
    struct tl_tensor *tensor;
    struct tl_error error;
    must(tl_tensor_wrap(&view, &tensor, &error), &error);
    return tensor;
}

/* -------------------------------------------------------------------------------------------------- operations -- */

void cluster_send(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor, struct tl_cq *cq)
{
    struct tl_error error;
    must(tl_send(worker, key, step, tensor, CLUSTER_LONG, cq, NULL, NULL, &error), &error);
}

tl_op_id cluster_recv(struct tl_worker *worker, unsigned from, const char *key, uint64_t step, struct tl_cq *cq)
{
    tl_op_id op;
    struct tl_error error;
    must(tl_recv(worker, cluster_peer(worker, from), key, step, NULL, CLUSTER_LONG, cq, NULL, &op, &error), &error);
    return op;
}

struct tl_tensor *cluster_recv_wait(struct tl_worker *worker, unsigned from, const char *key, uint64_t step)
{
    struct tl_completion completion;
    struct tl_error error;
    must(tl_recv_wait(worker, cluster_peer(worker, from), key, step, NULL, CLUSTER_LONG, &completion, &error), &error);
    return completion.tensor;
}

void cluster_publish(struct tl_worker *worker, const char *key, uint64_t step, struct tl_tensor *tensor)
{
    struct tl_error error;
    must(tl_publish(worker, key, step, tensor, &error), &error);
}

struct tl_cq *cluster_cq(void)
{
    struct tl_cq *cq;
    struct tl_error error;
    must(tl_cq_create(&cq, &error), &error);
    return cq;
}

struct tl_completion cluster_next(struct tl_cq *cq)
{
    struct tl_completion completion;
    ck_assert_uint_eq(tl_cq_wait(cq, &completion, 1, CLUSTER_LONG), 1);
    return completion;
}

struct tl_completion cluster_expect(struct tl_cq *cq, enum tl_status status)
{
    struct tl_completion completion = cluster_next(cq);
    ck_assert_msg(completion.status.code == status, "a completion with %s instead of %s: %s",
                  tl_status_name(completion.status.code), tl_status_name(status), completion.status.message);
    ck_assert((completion.tensor != NULL) == (status == TL_OK && completion.kind == TL_OP_RECV));
    tl_tensor_put(completion.tensor);
    completion.tensor = NULL;
    return completion;
}

bool cluster_is_quiet(struct tl_cq *cq)
{
    struct tl_completion completion;
    return tl_cq_poll(cq, &completion, 1) == 0;
}
