// SPDX-License-Identifier: Apache-2.0
/*
 * tl_bench serve PROTOCOL: the parameter server of the benchmarks.
 *
 * Publishes one tensor of each size and the small ones, offers one-shot tensors ahead of their receivers, prints
 * "ready PORT", and offers the next step of a series whenever one was received. Ends with its standard input.
 */
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/bench/bench.h"

/* So many steps are offered ahead: as many as one client asks for at once, and a few when they are large. */
#define SMALL_AHEAD_COUNT BENCH_OUTSTANDING_COUNT
#define LARGE_AHEAD_COUNT 4
#define COMPLETION_COUNT 64

/* Steps of one size for one client. */
struct series {
    char key[64];
    struct tl_tensor *tensor;
    uint64_t next_step;
};

struct server {
    struct tl_worker *worker;
    struct tl_cq *cq;
    struct series series[BENCH_COUNT(bench_series) * BENCH_COUNT(bench_sizes)];
};

static void publish(struct server *server, const char *key, struct tl_tensor *tensor)
{
    struct tl_error error;
    bench_check(tl_publish(server->worker, key, 0, tensor, &error), "publish", &error);
}

static void offer(struct server *server, struct series *series)
{
    struct tl_error error;
    tl_op_id op;
    bench_check(tl_send(server->worker, series->key, series->next_step++, series->tensor, TL_TIMEOUT_NONE, server->cq,
                        series, &op, &error),
                "send", &error);
}

static void start_series(struct server *server, struct series *series, const char *name, struct tl_tensor *tensor)
{
    uint64_t size_bytes = tl_tensor_size_bytes(tensor);
    int ahead_count = size_bytes <= BENCH_SMALL_BYTES ? SMALL_AHEAD_COUNT : LARGE_AHEAD_COUNT;
    snprintf(series->key, sizeof(series->key), "one-shot/%s/%" PRIu64, name, size_bytes);
    series->tensor = tensor;
    for (int i = 0; i < ahead_count; i++)
        offer(server, series);
}

static void start(struct server *server)
{
    char key[64];
    for (size_t i = 0; i < BENCH_COUNT(bench_sizes); i++) {
        struct tl_tensor *tensor = bench_create_tensor(bench_sizes[i]);
        snprintf(key, sizeof(key), "tensor/%" PRIu64, bench_sizes[i]);
        publish(server, key, tensor);
        for (size_t j = 0; j < BENCH_COUNT(bench_series); j++)
            start_series(server, &server->series[i * BENCH_COUNT(bench_series) + j], bench_series[j],
                         tl_tensor_get(tensor));
        tl_tensor_put(tensor);
    }
    for (int i = 0; i < BENCH_OUTSTANDING_COUNT; i++) {
        struct tl_tensor *tensor = bench_create_tensor(BENCH_SMALL_BYTES);
        snprintf(key, sizeof(key), "small/%d", i);
        publish(server, key, tensor);
        tl_tensor_put(tensor);
    }
}

static void offer_again(struct server *server)
{
    struct tl_completion completions[COMPLETION_COUNT];
    size_t count;
    while ((count = tl_cq_poll(server->cq, completions, COMPLETION_COUNT)) > 0)
        for (size_t i = 0; i < count; i++) {
            bench_check(completions[i].status.code, "a send", &completions[i].status);
            offer(server, completions[i].user_data);
        }
}

static void run(struct server *server)
{
    struct pollfd polled[] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = tl_cq_fd(server->cq), .events = POLLIN}};
    for (;;) {
        poll(polled, BENCH_COUNT(polled), -1);
        if (polled[0].revents) return;
        if (polled[1].revents) offer_again(server);
    }
}

int bench_serve(const char *protocol, const char *host)
{
    char config[2048];
    snprintf(config, sizeof(config),
             "{\"cluster\": {\"ps\": [\"%s:1\"]}, \"protocol\": \"%s\", \"listen\": \"%s:0\","
             " \"log\": {\"level\": \"warn\"}%s}",
             host, protocol, host, bench_security());
    struct server server = {0};
    struct tl_error error;
    const struct tl_worker_options options = {.size_bytes = sizeof(options), .config_json = config, .job = "ps"};
    bench_check(tl_worker_open(&options, &server.worker, &error), "open", &error);
    bench_check(tl_cq_create(&server.cq, &error), "create a completion queue", &error);
    start(&server);
    printf("ready %u\n", tl_worker_port(server.worker));
    fflush(stdout);
    run(&server);
    tl_worker_close(server.worker, 0);
    tl_cq_destroy(server.cq);
    for (size_t i = 0; i < BENCH_COUNT(server.series); i++)
        tl_tensor_put(server.series[i].tensor);
    return EXIT_SUCCESS;
}
