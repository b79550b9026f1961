// SPDX-License-Identifier: Apache-2.0
/*
 * parameter_server: training with a parameter server, gradients and step numbers.
 *
 *   cc parameter_server.c $(pkg-config --cflags --libs tensorlane) -lm -o parameter_server
 *   ./parameter_server                        one parameter server and three workers, as processes on this machine
 *   ./parameter_server CONFIG JOB TASK        one task of the cluster that CONFIG describes: JOB is ps or worker
 *
 * For the second form, write a cluster.json with one task of the job "ps" and any number of the job "worker", and start
 * each task on its machine, in any order:
 *
 *   {"cluster": {"ps": ["a.example:4000"], "worker": ["b.example:4000", "c.example:4000"]}}
 *
 * What is trained is small, so that the traffic is what one sees: every worker has a shard of a least-squares problem,
 * and gradient descent finds the weights that made the data. One step, n:
 *
 *      ps                                              every worker i
 *      publishes "weights", version n  ------------->  receives "weights" of step n or later
 *                                                      computes the gradient over its shard
 *      receives "gradients/i", step n  <-------------  sends "gradients/i", step n
 *      applies the mean, ends the step
 *      publishes version n + 1         ------------->  ends the step; ...
 *
 * Weights are published, because many readers always want the newest ones. Gradients are sent, because one reader reads
 * each of them once. No other synchronisation is needed: a task that is early waits inside its receive.
 *
 * When something goes wrong:
 * - A worker that cannot compute a step says so with tl_worker_abort_step; the parameter server's receive ends with
 *   that status at once, and the step goes on without it. Here task 1 does so in step 7.
 * - A straggler: the receive of its gradient ends at the deadline, and the step goes on without it. When the straggler
 *   comes to receive weights it gets the newest version, whichever step that is of, and ends its old step: its late
 *   gradient is dropped.
 * - A worker that crashed is a straggler in every step until it is started again, and then joins at the newest version.
 * - The parameter server says that training is over by aborting the step that will never be.
 *
 * Exits with 0 when the weights are those that made the data.
 */
#include <arpa/inet.h>
#include <inttypes.h>
#include <math.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tensorlane/tensorlane.h>

#define SECOND INT64_C(1000000000)
#define START_TIMEOUT (60 * SECOND) /* How long the tasks may take to start. */
#define STEP_TIMEOUT (10 * SECOND)  /* After this time a gradient counts as missing. */

#define FEATURES 8
#define ROWS 64 /* How many rows the shard of a worker has. */
#define RATE 1.5
#define STEPS UINT64_C(100)
#define REPORT_STEP (STEPS + 1) /* At the end, the workers send their losses under this step. */

#define FAILING_TASK 1
#define FAILING_STEP 7

#define DEMO_WORKERS 3
#define MAX_WORKERS 256

/* Goes on when a call succeeded, otherwise prints the error and ends the process. */
static void must(enum tl_status status, const struct tl_error *error, const char *what)
{
    if (status == TL_OK) return;
    fprintf(stderr, "parameter_server: %s: %s: %s\n", what, tl_status_name(status), error->message);
    exit(EXIT_FAILURE);
}

static void give_up(const char *why)
{
    fprintf(stderr, "parameter_server: %s\n", why);
    exit(EXIT_FAILURE);
}

/* ----------------------------------------------------------------------------------------------- what to learn -- */

/* Rows of features, and the values that the weights should give for them. */
struct shard {
    double x[ROWS][FEATURES];
    double y[ROWS];
};

static double true_weight(int i)
{
    return (i % 2 == 0 ? 0.5 : -0.5) * (i + 1);
}

/* Returns the next of a sequence of random numbers between -1 and 1. */
static double next_random(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (double)(*state >> 11) / (double)(UINT64_C(1) << 52) - 1;
}

static void make_shard(uint32_t task, struct shard *ret_shard)
{
    uint64_t state = task + 1;
    for (int row = 0; row < ROWS; row++) {
        ret_shard->y[row] = 0;
        for (int i = 0; i < FEATURES; i++) {
            ret_shard->x[row][i] = next_random(&state);
            ret_shard->y[row] += true_weight(i) * ret_shard->x[row][i];
        }
    }
}

/* Returns the loss, the mean of half the squared errors, and fills its gradient. */
static double compute(const struct shard *shard, const double *weights, double *ret_gradient)
{
    double loss = 0;
    memset(ret_gradient, 0, FEATURES * sizeof(*ret_gradient));
    for (int row = 0; row < ROWS; row++) {
        double error = -shard->y[row];
        for (int i = 0; i < FEATURES; i++)
            error += weights[i] * shard->x[row][i];
        for (int i = 0; i < FEATURES; i++)
            ret_gradient[i] += error * shard->x[row][i] / ROWS;
        loss += error * error / (2 * ROWS);
    }
    return loss;
}

/* Makes a float64 vector. The library owns its memory; the holder of a reference gives it back with tl_tensor_put. */
static struct tl_tensor *create_vector(uint64_t size)
{
    struct tl_tensor *tensor;
    struct tl_error error;
    must(tl_tensor_create(TL_F64, 1, &size, &tensor, &error), &error, "create a tensor");
    return tensor;
}

/* -------------------------------------------------------------------------------------------- parameter server -- */

/* A worker, as the parameter server sees it. */
struct source {
    tl_peer_id peer;
    char name[320];             /* the task's name, for example "/job:worker/task:1" */
    const char *task;           /* the number in that name, for example "1" */
    struct tl_tensor *gradient; /* Every gradient of this worker is received into this tensor. */
};

/* Finds the tasks of the job "worker" among the peers; returns how many there are. */
static size_t find_workers(struct tl_worker *self, struct source *ret_sources)
{
    tl_peer_id peers[MAX_WORKERS + 1];
    size_t peer_count = tl_worker_peers(self, peers, MAX_WORKERS + 1);
    size_t count = 0;
    if (peer_count > MAX_WORKERS + 1) give_up("the cluster has too many tasks for this example");
    for (size_t i = 0; i < peer_count; i++) {
        struct tl_peer_info info = {.size_bytes = sizeof(info)};
        struct tl_error error;
        must(tl_worker_peer_info(self, peers[i], &info, &error), &error, "look at a peer");
        if (strncmp(info.name, "/job:worker/", strlen("/job:worker/")) != 0) continue;
        struct source *source = &ret_sources[count++];
        source->peer = peers[i];
        memcpy(source->name, info.name, sizeof(source->name));
        source->task = strrchr(source->name, ':') + 1;
        source->gradient = create_vector(FEATURES);
    }
    if (count == 0) give_up("the cluster has no job \"worker\"");
    return count;
}

static void wait_for_workers(struct tl_worker *self, const struct source *sources, size_t count)
{
    tl_peer_id peers[MAX_WORKERS + 1];
    struct tl_error error;
    for (size_t i = 0; i < count; i++)
        peers[i] = sources[i].peer;
    must(tl_worker_wait_for_peers(self, peers, count, 0, START_TIMEOUT, &error), &error, "wait for the workers");
}

/* Publishes the weights as this version. What is published must not change any more, so that every version is a tensor
 * of its own; the library frees it when it was replaced and the last transfer of it is over. */
static void publish_weights(struct tl_worker *self, const char *key, uint64_t version, const double *weights)
{
    struct tl_tensor *tensor = create_vector(FEATURES);
    struct tl_error error;
    memcpy(tl_tensor_data(tensor), weights, FEATURES * sizeof(*weights));
    must(tl_publish(self, key, version, tensor, &error), &error, "publish the weights");
    tl_tensor_put(tensor);
}

/* Asks every worker for its gradient of the step, all at once. */
static void ask_for_gradients(struct tl_worker *self, struct tl_cq *cq, struct source *sources, size_t count,
                              uint64_t step)
{
    for (size_t i = 0; i < count; i++) {
        const struct tl_recv_options options = {
            .size_bytes = sizeof(options), .destination = sources[i].gradient, .wants_checksum = true};
        char key[64];
        struct tl_error error;
        snprintf(key, sizeof(key), "gradients/%s", sources[i].task);
        must(tl_recv(self, sources[i].peer, key, step, &options, STEP_TIMEOUT, cq, &sources[i], NULL, &error), &error,
             "ask for a gradient");
    }
}

/* Takes the gradients in the order in which they come, and adds them up; returns how many there are. Each receive
 * completes exactly once, at its deadline at the latest, so that the loop ends. */
static size_t add_gradients(struct tl_cq *cq, size_t asked_count, uint64_t step, double *ret_sum)
{
    size_t got_count = 0;
    memset(ret_sum, 0, FEATURES * sizeof(*ret_sum));
    for (size_t i = 0; i < asked_count; i++) {
        struct tl_completion done;
        if (tl_cq_wait(cq, &done, 1, TL_TIMEOUT_NONE) != 1) give_up("no completion");
        const struct source *source = done.user_data;
        if (done.status.code != TL_OK) {
            printf("ps: step %" PRIu64 " goes on without %s: %s: %s\n", step, source->name,
                   tl_status_name(done.status.code), done.status.message);
            continue;
        }
        /* The library has checked that the tensor has the type and the shape of our destination. */
        const double *gradient = tl_tensor_data(done.tensor);
        for (int j = 0; j < FEATURES; j++)
            ret_sum[j] += gradient[j];
        tl_tensor_put(done.tensor);
        got_count++;
    }
    return got_count;
}

static void train(struct tl_worker *self, struct source *sources, size_t count, double *weights)
{
    struct tl_cq *cq;
    struct tl_error error;
    must(tl_cq_create(&cq, &error), &error, "create a completion queue");
    for (uint64_t step = 0; step < STEPS; step++) {
        double sum[FEATURES];
        publish_weights(self, "weights", step, weights);
        ask_for_gradients(self, cq, sources, count, step);
        size_t got_count = add_gradients(cq, count, step, sum);
        if (got_count == 0) give_up("no worker has sent a gradient");
        for (int i = 0; i < FEATURES; i++)
            weights[i] -= RATE * sum[i] / (double)got_count;
        /* Everything that is still held or waited for under this step on this worker ends here. */
        must(tl_worker_end_step(self, step, NULL, &error), &error, "end the step");
    }
    tl_cq_destroy(cq);
}

/* Hands the result to the workers, and waits for the loss that each finds with it: when the losses have come, the
 * workers need nothing more from this process. */
static void finish(struct tl_worker *self, const struct source *sources, size_t count, const double *weights)
{
    struct tl_error error;
    publish_weights(self, "weights/final", STEPS, weights);
    must(tl_worker_abort_step(self, STEPS, TL_OUT_OF_RANGE, "training is over", &error), &error, "end the training");
    for (size_t i = 0; i < count; i++) {
        char key[64];
        struct tl_completion got;
        snprintf(key, sizeof(key), "loss/%s", sources[i].task);
        must(tl_recv_wait(self, sources[i].peer, key, REPORT_STEP, NULL, START_TIMEOUT, &got, &error), &error,
             "receive a loss");
        if (tl_tensor_dtype(got.tensor) != TL_F64 || tl_tensor_element_count(got.tensor) != 1) {
            give_up("the loss is no number");
        }
        printf("ps: %s has a loss of %.2g\n", sources[i].name, *(const double *)tl_tensor_data(got.tensor));
        tl_tensor_put(got.tensor);
    }
}

static void run_parameter_server(struct tl_worker *self)
{
    static struct source sources[MAX_WORKERS + 1];
    double weights[FEATURES] = {0};
    size_t count = find_workers(self, sources);
    wait_for_workers(self, sources, count);
    printf("ps: %zu workers are up\n", count);
    train(self, sources, count, weights);
    finish(self, sources, count, weights);
    for (size_t i = 0; i < count; i++)
        tl_tensor_put(sources[i].gradient);
    for (int i = 0; i < FEATURES; i++) {
        printf("ps: weight %d: %+.9f, should be %+.1f\n", i, weights[i], true_weight(i));
        if (!(fabs(weights[i] - true_weight(i)) < 1e-6)) give_up("the weights are not those that made the data");
    }
}

/* ------------------------------------------------------------------------------------------------------ worker -- */

/* Receives weights of this version or a newer one. Returns false when training is over. */
static bool receive_weights(struct tl_worker *self, tl_peer_id ps, const char *key, uint64_t version,
                            double *ret_weights, uint64_t *ret_version)
{
    struct tl_completion got;
    struct tl_error error;
    enum tl_status status = tl_recv_wait(self, ps, key, version, NULL, START_TIMEOUT, &got, &error);
    if (status == TL_OUT_OF_RANGE) return false;
    must(status, &error, "receive the weights");
    if (tl_tensor_dtype(got.tensor) != TL_F64 || tl_tensor_element_count(got.tensor) != FEATURES) {
        give_up("the weights have another shape than here; do all tasks run the same program?");
    }
    memcpy(ret_weights, tl_tensor_data(got.tensor), FEATURES * sizeof(*ret_weights));
    *ret_version = got.step;
    tl_tensor_put(got.tensor);
    return true;
}

/* Offers the gradient of a step. The call does not wait: the completion comes on the queue when the parameter server
 * has the gradient, and until then the tensor must not be written. */
static void send_gradient(struct tl_worker *self, uint32_t task, uint64_t step, const struct shard *shard,
                          const double *weights, struct tl_cq *cq)
{
    struct tl_tensor *gradient = create_vector(FEATURES);
    char key[64];
    struct tl_error error;
    compute(shard, weights, tl_tensor_data(gradient));
    snprintf(key, sizeof(key), "gradients/%" PRIu32, task);
    must(tl_send(self, key, step, gradient, TL_TIMEOUT_NONE, cq, NULL, NULL, &error), &error, "send a gradient");
    tl_tensor_put(gradient);
}

/* Announces that there will be no gradient of this step, and why: every receive of it gets this status. */
static void abort_step(struct tl_worker *self, uint32_t task, uint64_t step)
{
    struct tl_error error;
    char message[128];
    snprintf(message, sizeof(message), "worker %" PRIu32 " could not read its data", task);
    must(tl_worker_abort_step(self, step, TL_ABORTED, message, &error), &error, "abort a step");
}

/* Ends a step here, after the parameter server has gone on. If it went on without us, our gradient was dropped. */
static void end_step(struct tl_worker *self, uint32_t task, uint64_t step, bool was_sent, struct tl_cq *cq)
{
    struct tl_completion sent;
    struct tl_error error;
    must(tl_worker_end_step(self, step, NULL, &error), &error, "end the step");
    if (!was_sent) return;
    if (tl_cq_wait(cq, &sent, 1, TL_TIMEOUT_NONE) != 1) give_up("no completion");
    if (sent.status.code != TL_OK) {
        printf("worker %" PRIu32 ": the gradient of step %" PRIu64 " came too late: %s\n", task, step,
               sent.status.message);
    }
}

static void send_loss(struct tl_worker *self, uint32_t task, double loss)
{
    struct tl_tensor *tensor = create_vector(1);
    char key[64];
    struct tl_error error;
    *(double *)tl_tensor_data(tensor) = loss;
    snprintf(key, sizeof(key), "loss/%" PRIu32, task);
    must(tl_send_wait(self, key, REPORT_STEP, tensor, START_TIMEOUT, &error), &error, "send the loss");
    tl_tensor_put(tensor);
}

static void run_worker(struct tl_worker *self, uint32_t task)
{
    struct shard shard;
    double weights[FEATURES];
    double gradient[FEATURES];
    uint64_t step;
    tl_peer_id ps;
    struct tl_cq *cq;
    struct tl_error error;
    make_shard(task, &shard);
    must(tl_worker_find_peer(self, "/job:ps/task:0", &ps, &error), &error, "find the parameter server");
    must(tl_cq_create(&cq, &error), &error, "create a completion queue");

    bool goes_on = receive_weights(self, ps, "weights", 0, weights, &step);
    while (goes_on) {
        uint64_t finished = step;
        bool can_compute = task != FAILING_TASK || step != FAILING_STEP;
        if (can_compute) {
            send_gradient(self, task, step, &shard, weights, cq);
        } else {
            abort_step(self, task, step);
        }
        goes_on = receive_weights(self, ps, "weights", step + 1, weights, &step);
        end_step(self, task, finished, can_compute, cq);
    }

    if (!receive_weights(self, ps, "weights/final", 0, weights, &step)) give_up("there is no result");
    double loss = compute(&shard, weights, gradient);
    send_loss(self, task, loss);
    tl_cq_destroy(cq);
    if (!(loss < 1e-9)) give_up("the loss has not become small");
}

/* ------------------------------------------------------------------------------------------------------- tasks -- */

/* Runs one task of the cluster, from opening it to closing it. */
static void run_task(const struct tl_worker_options *options)
{
    struct tl_worker *self;
    struct tl_error error;
    must(tl_worker_open(options, &self, &error), &error, "open the worker");
    if (strcmp(options->job, "ps") == 0) {
        run_parameter_server(self);
    } else {
        run_worker(self, options->task);
    }
    tl_worker_close(self, TL_TIMEOUT_DEFAULT);
}

/* Opens a socket on a free port; returns it and the port. */
static int take_port(unsigned *ret_port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof(address);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof(address)) != 0 ||
        getsockname(fd, (struct sockaddr *)&address, &length) != 0) {
        perror("parameter_server: no free port");
        exit(EXIT_FAILURE);
    }
    *ret_port = ntohs(address.sin_port);
    return fd;
}

/* Describes one parameter server and DEMO_WORKERS workers on this machine, as a cluster.json would. */
static void write_config(char *ret_json, size_t capacity)
{
    unsigned ports[1 + DEMO_WORKERS];
    int fds[1 + DEMO_WORKERS];
    for (int i = 0; i < 1 + DEMO_WORKERS; i++)
        fds[i] = take_port(&ports[i]);
    size_t used =
        (size_t)snprintf(ret_json, capacity, "{\"cluster\": {\"ps\": [\"127.0.0.1:%u\"], \"worker\": [", ports[0]);
    for (int i = 1; i < 1 + DEMO_WORKERS; i++)
        used += (size_t)snprintf(ret_json + used, capacity - used, "%s\"127.0.0.1:%u\"", i > 1 ? ", " : "", ports[i]);
    snprintf(ret_json + used, capacity - used, "]}, \"log\": {\"level\": \"error\"}}");
    for (int i = 0; i < 1 + DEMO_WORKERS; i++)
        close(fds[i]);
}

static pid_t start_task(const char *json, const char *job, uint32_t task)
{
    const struct tl_worker_options options = {
        .size_bytes = sizeof(options), .config_json = json, .job = job, .task = task};
    pid_t child = fork();
    if (child < 0) {
        perror("parameter_server: fork");
        exit(EXIT_FAILURE);
    }
    if (child == 0) {
        run_task(&options);
        exit(EXIT_SUCCESS);
    }
    return child;
}

/* Starts every task as a process of its own, and waits for them; when one fails, ends the others. Processes are forked
 * before any call of the library: only the process that opened a worker may use it. */
static int run_demo(void)
{
    char json[1024];
    pid_t children[1 + DEMO_WORKERS];
    int result = EXIT_SUCCESS;
    write_config(json, sizeof(json));
    for (int i = 0; i < 1 + DEMO_WORKERS; i++)
        children[i] = i == 0 ? start_task(json, "ps", 0) : start_task(json, "worker", (uint32_t)i - 1);
    for (int left = 1 + DEMO_WORKERS; left > 0; left--) {
        int status;
        pid_t ended = wait(&status);
        for (int i = 0; i < 1 + DEMO_WORKERS; i++)
            if (children[i] == ended) children[i] = 0;
        if (WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS) continue;
        result = EXIT_FAILURE;
        for (int i = 0; i < 1 + DEMO_WORKERS; i++)
            if (children[i] != 0) kill(children[i], SIGTERM);
    }
    return result;
}

static int usage(void)
{
    fprintf(stderr, "usage: parameter_server [CONFIG JOB TASK], JOB is ps or worker, TASK a number\n");
    return 2;
}

int main(int argc, char **argv)
{
    if (argc == 1) return run_demo();
    if (argc != 4 || (strcmp(argv[2], "ps") != 0 && strcmp(argv[2], "worker") != 0)) return usage();
    char *end;
    unsigned long task = strtoul(argv[3], &end, 10);
    if (argv[3][0] < '0' || argv[3][0] > '9' || *end != '\0' || task > UINT32_MAX) return usage();
    const struct tl_worker_options options = {
        .size_bytes = sizeof(options), .config_path = argv[1], .job = argv[2], .task = (uint32_t)task};
    run_task(&options);
    return EXIT_SUCCESS;
}
