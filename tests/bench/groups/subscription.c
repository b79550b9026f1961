// SPDX-License-Identifier: Apache-2.0
/*
 * Both halves of tl_groups with the set "subscription": values of 8 and 4,096 bytes, received one at a time ("single")
 * or by a subscription ("many").
 *
 * A subscribed value is measured from the call that publishes it until its completion is read, with one clock, whose
 * time the value begins with. The owner publishes the next version when its receiver has fetched a token, which is sent
 * and not counted in the time. The owner is driven by its caller, which waits for tokens to be fetched.
 */
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/bench/groups/groups.h"

#define LOOK_NS INT64_C(50000000) /* how often the owner looks whether its standard input has ended */
#define BUFFER_COUNT 2            /* one value comes while the one before is kept */

static const uint64_t sizes[] = {8, 4096};

static void make_key(const char *what, uint64_t size_bytes, char ret_key[GROUPS_KEY_BYTES])
{
    snprintf(ret_key, GROUPS_KEY_BYTES, "subscription/%s/%" PRIu64, what, size_bytes);
}

static void check_after_time(const struct tl_tensor *tensor, uint64_t seed, const char *key)
{
    struct tl_tensor *expected = groups_create_tensor(TL_U8, 1, tl_tensor_dims(tensor), seed);
    const char *data = tl_tensor_data(tensor), *wanted = tl_tensor_data(expected);
    if (memcmp(data + sizeof(double), wanted + sizeof(double), tl_tensor_size_bytes(tensor) - sizeof(double)) != 0)
        groups_die(key, "the bytes that were received are not those of the sender");
    tl_tensor_put(expected);
}

/* --------------------------------------------------------------------------------------------------------- owner -- */

struct series {
    uint64_t size_bytes;
    struct groups_item token; /* user_data is the series */
    char token_key[GROUPS_KEY_BYTES];
    char key[GROUPS_KEY_BYTES];
};

static void publish_next(struct tl_worker *worker, struct series *series)
{
    struct tl_error error;
    struct tl_tensor *tensor = groups_create_tensor(TL_U8, 1, &series->size_bytes, series->token.step);
    double now = groups_now();
    memcpy(tl_tensor_data(tensor), &now, sizeof(now));
    groups_check(tl_publish(worker, series->key, series->token.step, tensor, &error), series->key, &error);
    tl_tensor_put(tensor);
}

static void start_series(struct tl_worker *worker, struct tl_cq *cq, struct series *series, uint64_t size_bytes)
{
    char key[GROUPS_KEY_BYTES];
    struct tl_error error;
    const uint64_t token_bytes = 1;
    struct tl_tensor *tensor = groups_create_tensor(TL_U8, 1, &size_bytes, 0);
    make_key("received", size_bytes, key);
    groups_check(tl_publish(worker, key, 0, tensor, &error), key, &error);
    tl_tensor_put(tensor);
    series->size_bytes = size_bytes;
    make_key("subscribed", size_bytes, series->key);
    make_key("token", size_bytes, series->token_key);
    series->token = (struct groups_item){series->token_key, GROUPS_FIRST_STEP,
                                         groups_create_tensor(TL_U8, 1, &token_bytes, 0), series};
    groups_send(worker, GROUPS_SINGLE, &series->token, 1, cq, NULL);
}

static void serve_tokens(struct tl_worker *worker, struct tl_cq *cq)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    struct tl_completion completion;
    while (poll(&input, 1, 0) == 0) {
        if (tl_cq_wait(cq, &completion, 1, LOOK_NS) == 0) continue;
        struct series *series = completion.user_data;
        groups_check(completion.status.code, series->token_key, &completion.status);
        publish_next(worker, series);
        series->token.step++;
        groups_send(worker, GROUPS_SINGLE, &series->token, 1, cq, NULL);
    }
}

int subscription_serve(const char *config)
{
    struct tl_worker *worker;
    struct tl_cq *cq;
    struct tl_error error;
    struct series series[GROUPS_COUNT(sizes)];
    const struct tl_worker_options options = {
        .size_bytes = sizeof(options), .config_path = config, .job = "ps", .progress = TL_PROGRESS_CALLER};
    groups_check(tl_worker_open(&options, &worker, &error), "open", &error);
    groups_check(tl_cq_create(&cq, &error), "create a completion queue", &error);
    for (size_t i = 0; i < GROUPS_COUNT(sizes); i++)
        start_series(worker, cq, &series[i], sizes[i]);
    printf("ready %d\n", (int)getpid());
    fflush(stdout);
    serve_tokens(worker, cq);
    tl_worker_close(worker, 0);
    tl_cq_destroy(cq);
    for (size_t i = 0; i < GROUPS_COUNT(sizes); i++)
        tl_tensor_put(series[i].token.tensor);
    return EXIT_SUCCESS;
}

/* ------------------------------------------------------------------------------------------------------ receiver -- */

struct client {
    struct tl_worker *worker;
    struct tl_cq *cq;
    struct tl_cq *token_cq;
    tl_peer_id owner;
    uint64_t next_steps[GROUPS_COUNT(sizes)];
};

/* The tensor is the caller's. */
static struct tl_tensor *receive(struct client *client, const char *key, uint64_t step, struct tl_tensor *destination,
                                 struct groups_taken *taken)
{
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination};
    struct tl_completion completion;
    struct tl_error error;
    groups_check(
        tl_recv_wait(client->worker, client->owner, key, step, &options, TL_TIMEOUT_DEFAULT, &completion, &error), key,
        &error);
    taken->grpc_count += completion.path == TL_PATH_GRPC;
    return completion.tensor;
}

static void receive_values(struct client *client, size_t index, uint64_t count, struct groups_taken *taken)
{
    char key[GROUPS_KEY_BYTES];
    struct tl_tensor *destination = groups_create_tensor(TL_U8, 1, &sizes[index], 1);
    make_key("received", sizes[index], key);
    double start = groups_now();
    for (uint64_t i = 0; i < count; i++)
        tl_tensor_put(receive(client, key, 0, destination, taken));
    taken->seconds = groups_now() - start;
    groups_check_contents(destination, 0, key);
    tl_tensor_put(destination);
}

#ifdef TL_HAS_SUBSCRIPTIONS
static tl_op_id subscribe(struct client *client, const char *key, uint64_t step, struct tl_tensor **buffers)
{
    const struct tl_subscribe_options options = {
        .size_bytes = sizeof(options), .from_step = step, .destinations = buffers, .count = BUFFER_COUNT};
    struct tl_error error;
    tl_op_id op;
    groups_check(tl_subscribe(client->worker, client->owner, key, &options, client->cq, NULL, &op, &error), key,
                 &error);
    return op;
}

/* Not by tl_recv_wait: a few such calls make callers run the worker's loop in place of its thread, which programs that
 * only read a queue do not. */
static void fetch_token(struct client *client, const char *key, uint64_t step)
{
    const struct groups_item token = {.key = key, .step = step};
    struct tl_completion completion;
    groups_receive(client->worker, client->owner, GROUPS_SINGLE, &token, 1, client->token_cq, NULL);
    tl_cq_wait(client->token_cq, &completion, 1, TL_TIMEOUT_NONE);
    groups_check(completion.status.code, key, &completion.status);
    tl_tensor_put(completion.tensor);
}

static struct tl_tensor *take_value(struct client *client, const char *key, uint64_t step, struct groups_taken *taken)
{
    struct tl_completion completion;
    double published;
    tl_cq_wait(client->cq, &completion, 1, TL_TIMEOUT_NONE);
    double now = groups_now();
    groups_check(completion.status.code, key, &completion.status);
    if (completion.step != step) groups_die(key, "a value came that was not expected");
    memcpy(&published, tl_tensor_data(completion.tensor), sizeof(published));
    taken->seconds += now - published;
    taken->grpc_count += completion.path == TL_PATH_GRPC;
    return completion.tensor;
}

static void receive_subscribed(struct client *client, size_t index, uint64_t count, struct groups_taken *taken)
{
    char key[GROUPS_KEY_BYTES], token_key[GROUPS_KEY_BYTES];
    struct tl_tensor *buffers[BUFFER_COUNT], *last = NULL;
    make_key("subscribed", sizes[index], key);
    make_key("token", sizes[index], token_key);
    for (size_t i = 0; i < BUFFER_COUNT; i++)
        buffers[i] = groups_create_tensor(TL_U8, 1, &sizes[index], 0);
    tl_op_id op = subscribe(client, key, client->next_steps[index], buffers);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t step = client->next_steps[index]++;
        fetch_token(client, token_key, step);
        tl_tensor_put(last);
        last = take_value(client, key, step, taken);
    }
    check_after_time(last, client->next_steps[index] - 1, key);
    tl_tensor_put(last);
    struct tl_completion end;
    if (tl_cancel(client->worker, op) != TL_OK) groups_die(key, "the subscription has ended");
    tl_cq_wait(client->cq, &end, 1, TL_TIMEOUT_NONE);
    for (size_t i = 0; i < BUFFER_COUNT; i++)
        tl_tensor_put(buffers[i]);
}
#else
static void receive_subscribed(struct client *client, size_t index, uint64_t count, struct groups_taken *taken)
{
    (void)client, (void)index, (void)count, (void)taken;
    (void)check_after_time;
    groups_die("subscribe", "this library has no subscriptions");
}
#endif

static void run_commands(struct client *client, enum groups_how how, int owner_pid)
{
    uint64_t size_bytes, count;
    while (scanf("%" SCNu64 " %*s %*s %" SCNu64, &size_bytes, &count) == 2) {
        size_t index = 0;
        while (index < GROUPS_COUNT(sizes) && sizes[index] != size_bytes)
            index++;
        if (index == GROUPS_COUNT(sizes)) groups_die("command", "no value has so many bytes");
        struct groups_taken taken = {.tensor_count = count};
        uint64_t messages = groups_message_count(client->worker);
        double cpu_seconds = groups_cpu_seconds(owner_pid);
        (how == GROUPS_MANY ? receive_subscribed : receive_values)(client, index, count, &taken);
        taken.cpu_seconds = groups_cpu_seconds(owner_pid) - cpu_seconds;
        taken.message_count = groups_message_count(client->worker) - messages;
        groups_print(&taken);
    }
}

int subscription_pull(const char *config, enum groups_how how, enum tl_progress progress, int owner_pid)
{
    struct client client = {.next_steps = {GROUPS_FIRST_STEP, GROUPS_FIRST_STEP}};
    struct tl_error error;
    const struct tl_worker_options options = {
        .size_bytes = sizeof(options), .config_path = config, .is_client = true, .progress = progress};
    groups_check(tl_worker_open(&options, &client.worker, &error), "open", &error);
    groups_check(tl_cq_create(&client.cq, &error), "create a completion queue", &error);
    groups_check(tl_cq_create(&client.token_cq, &error), "create a completion queue", &error);
    groups_check(tl_worker_find_peer(client.worker, "/job:ps/task:0", &client.owner, &error), "find the owner", &error);
    printf("ready tensorlane %s\n", tl_version());
    fflush(stdout);
    run_commands(&client, how, owner_pid);
    tl_worker_close(client.worker, 0);
    tl_cq_destroy(client.cq);
    tl_cq_destroy(client.token_cq);
    return EXIT_SUCCESS;
}
