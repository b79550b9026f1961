// SPDX-License-Identifier: Apache-2.0
/*
 * tl_bench pull PORT thread|caller PROTOCOL [NAMES]: receives from the worker at the port as its standard input says.
 * PORT may be a whole address. PROTOCOL may end with /bounce, which is the setting verbs.bounce.
 *
 * Prints "ready tensorlane VERSION". Then every line of input is a command,
 *
 *     MODE BYTES COUNT
 *
 * that is answered with one line of numbers: the seconds that it took, the tensors that were received, the messages
 * between the workers, and how often the bytes of these tensors were copied.
 *
 * pull        COUNT published tensors of BYTES, one after the other, into one destination: memory of this program
 * library     the same into memory that the library chooses each time
 * one_shot    as pull with tensors that were sent
 * path        COUNT tensors of BYTES, or the first of NAMES, again and again until one has not come over gRPC
 * burst       COUNT times 1,000 small published tensors, all asked for at once; the next 1,000 when all are there
 * many        the same with one call for 1,000
 * window      the same number of tensors, 1,000 of them outstanding all the time
 * send_burst  burst with tensors that were sent
 * model       COUNT times all tensors that the file NAMES lists, one key per line: the first time into new memory,
 *             then into the same; BYTES is what they must have together
 * new_model   the same after a model, into tensors that are created anew
 * into_model  the same as a new_model or a model before, with one call for all
 * copy_model  copies that model with memcpy into tensors that are created anew: what new memory takes by itself
 *
 * thread and caller say which thread moves the data: one of the library, or the one that waits. What was received last
 * is compared with what was sent, outside of the time.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/bench/bench.h"

#define COMPLETION_COUNT 256
#define FREEING_US (50 * 1000) /* memory of tensors is given back in the background */
#define PATH_SEC 5.0           /* a data connection takes far less */
#define KEY_BYTES (TL_MAX_KEY_BYTES + 1)

/* One tensor out of many that are asked for at once. */
struct place {
    char key[KEY_BYTES];
    struct tl_tensor *tensor; /* NULL: none yet */
    struct tl_tensor *former; /* what the tensor was before the model was renewed; NULL: none */
};

struct places {
    struct place *items;
    size_t count;
    /* Of receive_together: allocated once, as by a program that receives again and again. */
    struct tl_recv_item *asked;
    struct tl_completion *completions;
};

struct client {
    struct tl_worker *worker;
    struct tl_cq *cq;
    tl_peer_id peer;
    const char *series; /* "thread" or "caller" */
    struct tl_tensor *destinations[BENCH_COUNT(bench_sizes)];
    uint64_t next_steps[BENCH_COUNT(bench_sizes)]; /* for the one-shot series */
    struct tl_tensor *received;                    /* by library: the last one */
    enum tl_path last_path;                        /* how the latest tensor that was received alone came */
    uint64_t received_count;
    uint64_t received_bytes;
    uint64_t written_bytes; /* the received bytes, once for each time that they were written on their way */
    struct places small;
    struct places model;
};

typedef void (*mode_function)(struct client *client, uint64_t size_bytes, uint64_t count);

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static size_t size_index(uint64_t size_bytes)
{
    for (size_t i = 0; i < BENCH_COUNT(bench_sizes); i++)
        if (bench_sizes[i] == size_bytes) return i;
    bench_die("command", "no tensor has so many bytes");
}

/* ----------------------------------------------------------------------------------------------- one at a time -- */

/* How often the bytes of a tensor are written on this path by what moves them, the processor or a card. */
static uint64_t write_count(enum tl_path path)
{
    switch (path) {
    case TL_PATH_NONE:
    case TL_PATH_SELF:
    case TL_PATH_MAPPED:
        return 0;
    case TL_PATH_BOUNCE:
        return 2;
    default:
        return 1;
    }
}

static void count_received(struct client *client, const struct tl_completion *completion)
{
    client->received_count++;
    client->received_bytes += completion->bytes;
    client->written_bytes += completion->bytes * write_count(completion->path);
}

/* The tensor is the caller's. */
static struct tl_tensor *receive(struct client *client, const char *key, uint64_t step, struct tl_tensor *destination)
{
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination};
    struct tl_completion completion;
    struct tl_error error;
    bench_check(
        tl_recv_wait(client->worker, client->peer, key, step, &options, TL_TIMEOUT_DEFAULT, &completion, &error), key,
        &error);
    count_received(client, &completion);
    client->last_path = completion.path;
    return completion.tensor;
}

static void run_pull(struct client *client, uint64_t size_bytes, uint64_t count)
{
    char key[64];
    struct tl_tensor *destination = client->destinations[size_index(size_bytes)];
    snprintf(key, sizeof(key), "tensor/%" PRIu64, size_bytes);
    for (uint64_t i = 0; i < count; i++)
        tl_tensor_put(receive(client, key, 0, destination));
}

static void run_library(struct client *client, uint64_t size_bytes, uint64_t count)
{
    char key[64];
    snprintf(key, sizeof(key), "tensor/%" PRIu64, size_bytes);
    for (uint64_t i = 0; i < count; i++) {
        tl_tensor_put(client->received);
        client->received = receive(client, key, 0, NULL);
    }
}

static void run_one_shot(struct client *client, uint64_t size_bytes, uint64_t count)
{
    char key[64];
    size_t index = size_index(size_bytes);
    snprintf(key, sizeof(key), "one-shot/%s/%" PRIu64, client->series, size_bytes);
    for (uint64_t i = 0; i < count; i++)
        tl_tensor_put(receive(client, key, client->next_steps[index]++, client->destinations[index]));
}

/* COUNT receives at a time, until one has not come over gRPC. */
static void run_path(struct client *client, uint64_t size_bytes, uint64_t count)
{
    char key[KEY_BYTES];
    double start = now();
    snprintf(key, sizeof(key), "tensor/%" PRIu64, size_bytes);
    if (client->model.count > 0) memcpy(key, client->model.items[0].key, sizeof(key));
    do {
        for (uint64_t i = 0; i < count; i++)
            tl_tensor_put(receive(client, key, 0, NULL));
    } while (client->last_path == TL_PATH_GRPC && now() - start < PATH_SEC);
    if (client->last_path == TL_PATH_GRPC) bench_die("path", "all tensors came over gRPC");
}

/* ------------------------------------------------------------------------------------------------ many at once -- */

static void request(struct client *client, struct place *place, const char *key, uint64_t step)
{
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = place->tensor};
    struct tl_error error;
    tl_op_id op;
    bench_check(
        tl_recv(client->worker, client->peer, key, step, &options, TL_TIMEOUT_DEFAULT, client->cq, place, &op, &error),
        key, &error);
}

/* Waits for some; returns how many, and where they belong. */
static size_t take_some(struct client *client, struct place **ret_places)
{
    struct tl_completion completions[COMPLETION_COUNT];
    size_t count = tl_cq_wait(client->cq, completions, COMPLETION_COUNT, TL_TIMEOUT_NONE);
    for (size_t i = 0; i < count; i++) {
        struct place *place = completions[i].user_data;
        bench_check(completions[i].status.code, place->key, &completions[i].status);
        count_received(client, &completions[i]);
        tl_tensor_put(place->tensor);
        place->tensor = completions[i].tensor;
        ret_places[i] = place;
    }
    return count;
}

static void take_all(struct client *client, size_t count)
{
    struct place *done[COMPLETION_COUNT];
    while (count > 0)
        count -= take_some(client, done);
}

static void run_burst(struct client *client, uint64_t size_bytes, uint64_t count)
{
    (void)size_bytes;
    for (uint64_t i = 0; i < count; i++) {
        for (size_t j = 0; j < client->small.count; j++)
            request(client, &client->small.items[j], client->small.items[j].key, 0);
        take_all(client, client->small.count);
    }
}

/* All places with one call. */
static void receive_together(struct client *client, struct places *places)
{
    if (!places->asked) places->asked = calloc(places->count, sizeof(*places->asked));
    if (!places->completions) places->completions = calloc(places->count, sizeof(*places->completions));
    struct tl_recv_item *items = places->asked;
    struct tl_completion *completions = places->completions;
    if (!items || !completions) bench_die("many", "no memory");
    for (size_t i = 0; i < places->count; i++)
        items[i] = (struct tl_recv_item){.key = places->items[i].key, .destination = places->items[i].tensor};
    const struct tl_recv_many_options options = {.size_bytes = sizeof(options), .item_bytes = sizeof(items[0])};
    struct tl_error error;
    bench_check(tl_recv_many_wait(client->worker, client->peer, items, places->count, &options, TL_TIMEOUT_DEFAULT,
                                  completions, &error),
                "many", &error);
    for (size_t i = 0; i < places->count; i++) {
        count_received(client, &completions[i]);
        tl_tensor_put(completions[i].tensor);
    }
}

static void run_many(struct client *client, uint64_t size_bytes, uint64_t count)
{
    (void)size_bytes;
    for (uint64_t i = 0; i < count; i++)
        receive_together(client, &client->small);
}

static void run_window(struct client *client, uint64_t size_bytes, uint64_t count)
{
    struct place *done[COMPLETION_COUNT];
    uint64_t total = count * client->small.count, started = client->small.count, finished = 0;
    (void)size_bytes;
    for (size_t j = 0; j < client->small.count; j++)
        request(client, &client->small.items[j], client->small.items[j].key, 0);
    while (finished < total) {
        size_t done_count = take_some(client, done);
        finished += done_count;
        for (size_t j = 0; j < done_count && started < total; j++, started++)
            request(client, done[j], done[j]->key, 0);
    }
}

static void run_send_burst(struct client *client, uint64_t size_bytes, uint64_t count)
{
    char key[64];
    size_t index = size_index(size_bytes);
    snprintf(key, sizeof(key), "one-shot/%s/%" PRIu64, client->series, size_bytes);
    for (uint64_t i = 0; i < count; i++) {
        for (size_t j = 0; j < client->small.count; j++)
            request(client, &client->small.items[j], key, client->next_steps[index]++);
        take_all(client, client->small.count);
    }
}

static void run_model(struct client *client, uint64_t size_bytes, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        uint64_t received_bytes = 0;
        for (size_t j = 0; j < client->model.count; j++)
            request(client, &client->model.items[j], client->model.items[j].key, 0);
        take_all(client, client->model.count);
        for (size_t j = 0; j < client->model.count; j++)
            received_bytes += tl_tensor_size_bytes(client->model.items[j].tensor);
        if (received_bytes != size_bytes) bench_die("model", "its tensors have a different number of bytes");
    }
}

/* Creates tensors of the same shape; outside of the time. */
static void renew_model(struct client *client)
{
    struct tl_error error;
    for (size_t j = 0; j < client->model.count; j++) {
        struct place *place = &client->model.items[j];
        struct tl_tensor *former = place->tensor;
        if (!former) bench_die("model", "it was not received before");
        bench_check(tl_tensor_create(tl_tensor_dtype(former), tl_tensor_rank(former), tl_tensor_dims(former),
                                     &place->tensor, &error),
                    "create a tensor", &error);
        place->former = former;
    }
}

static void drop_former_model(struct client *client)
{
    for (size_t j = 0; j < client->model.count; j++) {
        tl_tensor_put(client->model.items[j].former);
        client->model.items[j].former = NULL;
    }
    usleep(FREEING_US);
}

static void run_copy_model(struct client *client, uint64_t size_bytes, uint64_t count)
{
    (void)size_bytes;
    (void)count;
    for (size_t j = 0; j < client->model.count; j++) {
        const struct place *place = &client->model.items[j];
        memcpy(tl_tensor_data(place->tensor), tl_tensor_data(place->former), tl_tensor_size_bytes(place->tensor));
    }
}

static void run_into_model(struct client *client, uint64_t size_bytes, uint64_t count)
{
    (void)size_bytes;
    for (uint64_t i = 0; i < count; i++)
        receive_together(client, &client->model);
}

static void run_new_model(struct client *client, uint64_t size_bytes, uint64_t count)
{
    run_model(client, size_bytes, count);
}

/* ------------------------------------------------------------------------------------------------------- setup -- */

static void open_client(struct client *client, const char *port, enum tl_progress progress, const char *protocol)
{
    char config[2048];
    struct tl_error error;
    int len = (int)strcspn(protocol, "/");
    snprintf(config, sizeof(config),
             "{\"cluster\": {\"ps\": [\"%s%s\"]}, \"protocol\": \"%.*s\", \"log\": {\"level\": \"warn\"}%s%s}",
             strchr(port, ':') ? "" : "127.0.0.1:", port, len, protocol,
             strcmp(protocol + len, "/bounce") == 0 ? ", \"verbs\": {\"bounce\": true}" : "", bench_security());
    const struct tl_worker_options options = {
        .size_bytes = sizeof(options), .config_json = config, .is_client = true, .progress = progress};
    bench_check(tl_worker_open(&options, &client->worker, &error), "open", &error);
    bench_check(tl_cq_create(&client->cq, &error), "create a completion queue", &error);
    bench_check(tl_worker_find_peer(client->worker, "/job:ps/task:0", &client->peer, &error), "find the peer", &error);
    client->series = bench_series[progress == TL_PROGRESS_CALLER];
}

static struct place *add_place(struct places *places)
{
    struct place *items = realloc(places->items, (places->count + 1) * sizeof(*items));
    if (!items) bench_die("setup", "no memory");
    places->items = items;
    items[places->count] = (struct place){.tensor = NULL};
    return &items[places->count++];
}

static void read_names(struct places *model, const char *path)
{
    char line[KEY_BYTES + 1];
    FILE *file = fopen(path, "r");
    if (!file) bench_die(path, "cannot be read");
    while (fgets(line, sizeof(line), file)) {
        struct place *place = add_place(model);
        line[strcspn(line, "\n")] = '\0';
        memcpy(place->key, line, sizeof(place->key));
    }
    fclose(file);
}

static void release_memory(void *data, void *context)
{
    (void)context;
    free(data);
}

/* Memory of this program, not of the library, where malloc places it; it was touched already and does not have the
 * contents yet. */
static struct tl_tensor *create_destination(uint64_t size_bytes)
{
    struct tl_tensor *tensor;
    struct tl_error error;
    void *data = malloc(size_bytes);
    if (!data) bench_die("setup", "no memory");
    memset(data, 0xa5, size_bytes);
    const struct tl_tensor_view view = {.size_bytes = sizeof(view),
                                        .dtype = TL_U8,
                                        .rank = 1,
                                        .dims = &size_bytes,
                                        .data = data,
                                        .capacity_bytes = size_bytes,
                                        .release = release_memory};
    bench_check(tl_tensor_wrap(&view, &tensor, &error), "wrap memory", &error);
    return tensor;
}

static void create_destinations(struct client *client)
{
    for (size_t i = 0; i < BENCH_COUNT(bench_sizes); i++)
        client->destinations[i] = create_destination(bench_sizes[i]);
    for (int i = 0; i < BENCH_OUTSTANDING_COUNT; i++) {
        struct place *place = add_place(&client->small);
        snprintf(place->key, sizeof(place->key), "small/%d", i);
        place->tensor = create_destination(BENCH_SMALL_BYTES);
    }
}

/* ---------------------------------------------------------------------------------------------------- commands -- */

static mode_function find_mode(const char *name)
{
    static const struct {
        const char *name;
        mode_function run;
    } modes[] = {{"pull", run_pull},           {"library", run_library},       {"one_shot", run_one_shot},
                 {"path", run_path},           {"burst", run_burst},           {"many", run_many},
                 {"window", run_window},       {"model", run_model},           {"into_model", run_into_model},
                 {"new_model", run_new_model}, {"copy_model", run_copy_model}, {"send_burst", run_send_burst}};
    for (size_t i = 0; i < BENCH_COUNT(modes); i++)
        if (strcmp(modes[i].name, name) == 0) return modes[i].run;
    bench_die(name, "no such mode");
}

/* What the mode has received, and what the next one is to overwrite. */
static void check_contents(struct client *client, mode_function mode, uint64_t size_bytes)
{
    if (mode == run_model || mode == run_new_model || mode == run_into_model || mode == run_copy_model ||
        mode == run_path)
        return;
    if (mode == run_library) {
        bench_check_contents(client->received);
        tl_tensor_put(client->received);
        client->received = NULL;
        return;
    }
    if (mode == run_pull || mode == run_one_shot) {
        struct tl_tensor *destination = client->destinations[size_index(size_bytes)];
        bench_check_contents(destination);
        memset(tl_tensor_data(destination), 0xa5, size_bytes);
        return;
    }
    for (size_t i = 0; i < client->small.count; i++) {
        bench_check_contents(client->small.items[i].tensor);
        memset(tl_tensor_data(client->small.items[i].tensor), 0xa5, BENCH_SMALL_BYTES);
    }
}

static struct tl_worker_stats get_counters(struct client *client)
{
    struct tl_worker_stats stats = {.size_bytes = sizeof(stats)};
    struct tl_error error;
    bench_check(tl_worker_stats(client->worker, &stats, &error), "counters", &error);
    return stats;
}

static void run_command(struct client *client, mode_function mode, uint64_t size_bytes, uint64_t count)
{
    struct tl_worker_stats before = get_counters(client);
    client->received_count = client->received_bytes = client->written_bytes = 0;
    bool is_renewed = mode == run_new_model || mode == run_copy_model;
    if (is_renewed) renew_model(client);
    double start = now();
    mode(client, size_bytes, count);
    double passed = now() - start;
    if (is_renewed) drop_former_model(client);
    struct tl_worker_stats after = get_counters(client);
    uint64_t messages = after.frames_sent + after.frames_received - before.frames_sent - before.frames_received;
    check_contents(client, mode, size_bytes);
    printf("%.9f %" PRIu64 " %" PRIu64 " %.3f\n", passed, client->received_count, messages,
           client->received_bytes > 0 ? (double)client->written_bytes / (double)client->received_bytes : 0.0);
    fflush(stdout);
}

static void run_commands(struct client *client)
{
    char name[32];
    uint64_t size_bytes, count;
    while (scanf("%31s %" SCNu64 " %" SCNu64, name, &size_bytes, &count) == 3)
        run_command(client, find_mode(name), size_bytes, count);
}

int bench_pull(const char *port, enum tl_progress progress, const char *protocol, const char *names_path)
{
    struct client client = {0};
    open_client(&client, port, progress, protocol);
    if (names_path)
        read_names(&client.model, names_path);
    else
        create_destinations(&client);
    printf("ready tensorlane %s\n", tl_version());
    fflush(stdout);
    run_commands(&client);
    tl_worker_close(client.worker, 0);
    tl_cq_destroy(client.cq);
    for (size_t i = 0; i < BENCH_COUNT(bench_sizes); i++)
        tl_tensor_put(client.destinations[i]);
    struct places *groups[] = {&client.small, &client.model};
    for (size_t i = 0; i < BENCH_COUNT(groups); i++) {
        for (size_t j = 0; j < groups[i]->count; j++)
            tl_tensor_put(groups[i]->items[j].tensor);
        free(groups[i]->items);
        free(groups[i]->asked);
        free(groups[i]->completions);
    }
    return EXIT_SUCCESS;
}
