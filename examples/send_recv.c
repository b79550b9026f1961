// SPDX-License-Identifier: Apache-2.0
/*
 * send_recv: the smallest useful program. Two workers, a published tensor, sent tensors, an error.
 *
 *   cc send_recv.c $(pkg-config --cflags --libs tensorlane) -o send_recv && ./send_recv
 *
 * Both workers live in this one process, so that there is nothing to set up; they talk to each other over the transport
 * that "auto" chooses, as two processes of one host would. In a real program each process opens one worker, and the
 * cluster is described in a file that all of them read:
 *
 *   struct tl_worker_options options = {.size_bytes = sizeof(options), .config_path = "cluster.json", .job = "worker",
 *                                       .task = 1};
 *
 * Every call returns a status. On failure it fills a struct tl_error with the same code and one sentence that says
 * what is wrong and what to do; this program prints it and exits with 1. It exits with 0 when all that it received is
 * what was sent.
 */
#include <arpa/inet.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <tensorlane/tensorlane.h>

#define SECOND INT64_C(1000000000)
#define MILLISECOND INT64_C(1000000)

#define ROWS 3
#define COLUMNS 4

/* Goes on when a call succeeded, otherwise prints the error and ends the program. */
static void must(enum tl_status status, const struct tl_error *error, const char *what)
{
    if (status == TL_OK) return;
    fprintf(stderr, "send_recv: %s: %s: %s\n", what, tl_status_name(status), error->message);
    exit(EXIT_FAILURE);
}

static void expect(int is_true, const char *what)
{
    if (is_true) return;
    fprintf(stderr, "send_recv: not so: %s\n", what);
    exit(EXIT_FAILURE);
}

/* --------------------------------------------------------------------------------------------------- a cluster -- */

/* Opens a socket on a free port; returns it and the port. */
static int take_port(unsigned *ret_port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof(address);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof(address)) != 0 ||
        getsockname(fd, (struct sockaddr *)&address, &length) != 0) {
        perror("send_recv: no free port");
        exit(EXIT_FAILURE);
    }
    *ret_port = ntohs(address.sin_port);
    return fd;
}

/* Describes a cluster of two tasks on this machine: /job:worker/task:0 and /job:worker/task:1. A program usually has
 * this text in a file, cluster.json; only "cluster" is needed, everything else has a default. */
static void write_config(char *ret_json, size_t capacity)
{
    unsigned ports[2];
    int fds[2] = {take_port(&ports[0]), take_port(&ports[1])};
    close(fds[0]);
    close(fds[1]);
    snprintf(ret_json, capacity,
             "{\"cluster\": {\"worker\": [\"127.0.0.1:%u\", \"127.0.0.1:%u\"]}, \"log\": {\"level\": \"warn\"}}",
             ports[0], ports[1]);
}

/* Opens one task of the cluster. From here on it listens, and a thread of the library serves its peers. */
static struct tl_worker *open_worker(const char *json, uint32_t task)
{
    const struct tl_worker_options options = {
        .size_bytes = sizeof(options), .config_json = json, .job = "worker", .task = task};
    struct tl_worker *worker;
    struct tl_error error;
    must(tl_worker_open(&options, &worker, &error), &error, "open a worker");
    printf("opened %s on port %u\n", tl_worker_name(worker), tl_worker_port(worker));
    return worker;
}

/* ----------------------------------------------------------------------------------------------------- tensors -- */

/* Creates a 3 x 4 matrix of float32 whose elements are first, first + 1, ... The library owns the memory; the caller
 * has one reference, which it gives back with tl_tensor_put. */
static struct tl_tensor *create_matrix(float first)
{
    const uint64_t dims[] = {ROWS, COLUMNS};
    struct tl_tensor *tensor;
    struct tl_error error;
    must(tl_tensor_create(TL_F32, 2, dims, &tensor, &error), &error, "create a tensor");
    float *elements = tl_tensor_data(tensor);
    for (int i = 0; i < ROWS * COLUMNS; i++)
        elements[i] = first + (float)i;
    return tensor;
}

/* Checks that a tensor is what create_matrix(first) creates: type, shape and every element. */
static void expect_matrix(const struct tl_tensor *tensor, float first)
{
    expect(tl_tensor_dtype(tensor) == TL_F32, "the type is float32");
    expect(tl_tensor_rank(tensor) == 2, "there are two dimensions");
    expect(tl_tensor_dims(tensor)[0] == ROWS && tl_tensor_dims(tensor)[1] == COLUMNS, "the shape is 3 x 4");
    const float *elements = tl_tensor_data(tensor);
    for (int i = 0; i < ROWS * COLUMNS; i++)
        expect(elements[i] == first + (float)i, "the elements are those that were sent");
}

static void print_received(const char *what, const struct tl_completion *got)
{
    printf("%s: %" PRIu64 " bytes of %s, step %" PRIu64 ", over %s, in %" PRId64 " us\n", what, got->bytes,
           tl_dtype_name(tl_tensor_dtype(got->tensor)), got->step, tl_path_name(got->path), got->duration_ns / 1000);
}

/* ----------------------------------------------------------------------------------------------------- lessons -- */

/* A published tensor stays until it is replaced or withdrawn, and any number of receivers get it. Its step is its
 * version; a receiver asks for "at least" a version. */
static void publish_and_receive(struct tl_worker *here, struct tl_worker *there, tl_peer_id peer)
{
    struct tl_error error;
    struct tl_tensor *weights = create_matrix(1);
    must(tl_publish(here, "weights", 3, weights, &error), &error, "publish");
    /* The worker has a reference of its own now. From here on the tensor must not change: to change what is published,
     * publish another one under the same key. */
    tl_tensor_put(weights);

    for (int i = 0; i < 2; i++) {
        struct tl_completion got;
        must(tl_recv_wait(there, peer, "weights", 1, NULL, 10 * SECOND, &got, &error), &error,
             "receive what is published");
        print_received("published", &got);
        expect(got.step == 3, "the version is the published one");
        expect_matrix(got.tensor, 1);
        tl_tensor_put(got.tensor); /* The caller owns what a receive returns. */
    }
    must(tl_withdraw(here, "weights", &error), &error, "withdraw");
}

/* A sent tensor goes to exactly one receiver, which asks for the same key and step. Here the sender comes first: the
 * tensor waits for its receiver. The send is asynchronous: the call returns at once, and one completion follows on the
 * queue when the receiver has acknowledged the whole tensor. */
static void send_first(struct tl_worker *here, struct tl_worker *there, tl_peer_id peer, struct tl_cq *cq)
{
    struct tl_error error;
    struct tl_tensor *batch = create_matrix(100);
    must(tl_send(here, "batch", 7, batch, 10 * SECOND, cq, NULL, NULL, &error), &error, "send");
    tl_tensor_put(batch);

    struct tl_completion got;
    must(tl_recv_wait(there, peer, "batch", 7, NULL, 10 * SECOND, &got, &error), &error, "receive what is sent");
    print_received("sent first", &got);
    expect_matrix(got.tensor, 100);
    tl_tensor_put(got.tensor);

    struct tl_completion sent;
    expect(tl_cq_wait(cq, &sent, 1, 10 * SECOND) == 1, "the send completes");
    must(sent.status.code, &sent.status, "completion of the send");
    expect(sent.kind == TL_OP_SEND, "the completion is that of the send");
}

/* Here the receiver comes first and waits for its sender. It brings the tensor to receive into, and asks for a checksum
 * over all bytes. user_data comes back in the completion: with many operations on one queue it identifies the
 * operation. */
static void receive_first(struct tl_worker *here, struct tl_worker *there, tl_peer_id peer, struct tl_cq *cq)
{
    struct tl_error error;
    struct tl_tensor *destination = create_matrix(0);
    const struct tl_recv_options options = {
        .size_bytes = sizeof(options), .destination = destination, .wants_checksum = true};
    int tag = 0;
    must(tl_recv(there, peer, "batch", 8, &options, 10 * SECOND, cq, &tag, NULL, &error), &error, "receive");

    struct tl_tensor *batch = create_matrix(200);
    must(tl_send_wait(here, "batch", 8, batch, 10 * SECOND, &error), &error, "send and wait");
    tl_tensor_put(batch);

    struct tl_completion got;
    expect(tl_cq_wait(cq, &got, 1, 10 * SECOND) == 1, "the receive completes");
    must(got.status.code, &got.status, "completion of the receive");
    print_received("received first", &got);
    expect(got.user_data == &tag, "the user data came back");
    expect(got.tensor == destination, "the tensor is the one we brought");
    expect(got.is_verified, "the checksum fits");
    expect_matrix(got.tensor, 200);
    tl_tensor_put(got.tensor);
    tl_tensor_put(destination);
}

/* Every operation has a deadline. A tensor that is not sent in time ends the receive with an error that says what it
 * waited for. */
static void wait_in_vain(struct tl_worker *there, tl_peer_id peer)
{
    struct tl_error error;
    struct tl_completion got;
    enum tl_status status = tl_recv_wait(there, peer, "nobody/sends/this", 9, NULL, 20 * MILLISECOND, &got, &error);
    expect(status == TL_DEADLINE_EXCEEDED, "the deadline ends the wait");
    printf("not sent: %s: %s\n", tl_status_name(status), error.message);
}

int main(void)
{
    char json[256];
    write_config(json, sizeof(json));
    struct tl_worker *here = open_worker(json, 0);
    struct tl_worker *there = open_worker(json, 1);

    /* Receives name the peer that they receive from; sends do not name a receiver. */
    tl_peer_id peer;
    struct tl_cq *cq;
    struct tl_error error;
    must(tl_worker_find_peer(there, "/job:worker/task:0", &peer, &error), &error, "find the peer");
    must(tl_cq_create(&cq, &error), &error, "create a completion queue");

    publish_and_receive(here, there, peer);
    send_first(here, there, peer, cq);
    receive_first(here, there, peer, cq);
    wait_in_vain(there, peer);

    /* Closing completes what is still open; queues go after the workers that complete on them. */
    tl_worker_close(there, TL_TIMEOUT_DEFAULT);
    tl_worker_close(here, TL_TIMEOUT_DEFAULT);
    tl_cq_destroy(cq);
    printf("all well\n");
    return EXIT_SUCCESS;
}
