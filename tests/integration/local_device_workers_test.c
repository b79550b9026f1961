// SPDX-License-Identifier: Apache-2.0
/*
 * Workers in two processes of this host that exchange tensors on devices (gpu-ipc), and what is left when one of them
 * is killed while a tensor travels.
 */
#include <check.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fakes/cluster.h"
#include "fakes/device_case.h"
#include "fakes/run_suite.h"
#include "tensor/device.h"

#define LARGE_BYTES (UINT64_C(2) << 20)
#define SMALL_BYTES 100000

static struct cluster cluster;
static struct tl_cq *cq;
static pid_t child;
static int channel; /* to the other process */

static void wait_for_word(int fd)
{
    char word;
    (void)!read(fd, &word, 1);
}

/* ------------------------------------------------------------------------------------------------- the children -- */

static void publish(struct tl_worker *worker, const char *key, uint64_t step, uint64_t size_bytes, unsigned seed)
{
    struct tl_tensor *tensor = bytes_on(gpu0, size_bytes);
    fill(tensor, seed);
    cluster_publish(worker, key, step, tensor);
    tl_tensor_put(tensor); /* the table has it now */
}

/* Publishes tensors, and others in their place when it is told to. */
static void own(int fd)
{
    struct tl_worker *worker = cluster_open(&cluster, 1);
    publish(worker, "large", 1, LARGE_BYTES, 1);
    publish(worker, "small", 1, SMALL_BYTES, 2);
    (void)!write(fd, "r", 1);
    wait_for_word(fd);
    publish(worker, "large", 2, LARGE_BYTES, 3);
    wait_for_word(fd);
}

/* Receives a tensor, of which the copy never ends. */
static void receive_held(int fd)
{
    struct tl_worker *worker = cluster_open(&cluster, 1);
    struct tl_tensor *destination = bytes_on(gpu0, LARGE_BYTES);
    tl_tensor_set_stream(destination, TL_STREAM_NONE);
    cuda->hold(NULL, true);
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination};
    struct tl_cq *own_cq = cluster_cq();
    tl_op_id op;
    ck_assert_int_eq(
        tl_recv(worker, cluster_peer(worker, 0), "key", 0, &options, CLUSTER_LONG, own_cq, NULL, &op, NULL), TL_OK);
    (void)!write(fd, "r", 1);
    wait_for_word(fd);
}

/* Opens worker 0 here, and worker 1 in a child. */
static void open_with(void (*run)(int fd))
{
    int ends[2];
    cluster_init(&cluster, 2, "\"timeouts\": {\"reservation\": \"100ms\"}");
    cluster.protocol = "auto";
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    child = fork();
    setup_cuda();
    if (child == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(ends[0]);
        run(ends[1]);
        _exit(0);
    }
    close(ends[1]);
    channel = ends[0];
    cluster_open(&cluster, 0);
    cq = cluster_cq();
}

static void kill_child(void)
{
    int status;
    ck_assert_int_eq(kill(child, SIGKILL), 0);
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    child = 0;
}

static void setup_owner(void)
{
    open_with(own);
    wait_for_word(channel);
}

static void setup_receiver(void)
{
    open_with(receive_held);
}

static void teardown(void)
{
    cuda->hold(NULL, false);
    if (child != 0) kill_child();
    cluster_close_all(&cluster);
    tl_cq_destroy(cq);
    close(channel);
    teardown_cuda();
}

/* ----------------------------------------------------------------------------------------------------- receives -- */

static struct fake_cuda_counts counts(void)
{
    struct fake_cuda_counts counts;
    cuda->get_counts(&counts);
    return counts;
}

static tl_op_id receive(const char *key, uint64_t step)
{
    tl_op_id op;
    struct tl_error error;
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .device = gpu0};
    tl_peer_id peer = cluster_peer(cluster.workers[0], 1);
    enum tl_status status = tl_recv(cluster.workers[0], peer, key, step, &options, CLUSTER_LONG, cq, NULL, &op, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return op;
}

static void expect(unsigned seed)
{
    struct tl_completion completion = cluster_next(cq);
    ck_assert_msg(completion.status.code == TL_OK, "%s", completion.status.message);
    ck_assert_msg(completion.path == TL_PATH_GPU_IPC, "%s: %s", tl_path_name(completion.path), completion.path_reason);
    ck_assert(is_filled(completion.tensor, seed));
    tl_tensor_put(completion.tensor);
}

/* One copy here; the same memory is imported once. */
START_TEST(from_another_process)
{
    ck_assert_int_eq(tl_device_open(gpu0, NULL), TL_OK);
    for (unsigned i = 1; i <= 3; i++) {
        receive("large", 0);
        expect(1);
        receive("small", 0);
        expect(2);
        ck_assert_uint_eq(counts().copies, 2 * i);
    }
    ck_assert_uint_eq(counts().imports, 2);
    (void)!write(channel, "n", 1);
    receive("large", 2);
    expect(3);
    CLUSTER_UNTIL(counts().mappings == 2); /* the owner has freed the first one */
}
END_TEST

/* Its memory stays until the copy is over. */
START_TEST(the_owner_is_killed)
{
    struct tl_tensor *destination = bytes_on(gpu0, LARGE_BYTES);
    tl_tensor_set_stream(destination, TL_STREAM_NONE);
    const struct tl_recv_options options = {.size_bytes = sizeof(options), .destination = destination};
    tl_op_id op;
    tl_peer_id peer = cluster_peer(cluster.workers[0], 1);
    cuda->hold(NULL, true);
    ck_assert_int_eq(tl_recv(cluster.workers[0], peer, "large", 0, &options, CLUSTER_LONG, cq, NULL, &op, NULL), TL_OK);
    CLUSTER_UNTIL(counts().imports == 1 && counts().reservations == 2); /* that of the destination, and the import */
    for (unsigned i = 0; i < 50; i++)
        cluster_pause();
    kill_child();
    for (unsigned i = 0; i < 50; i++)
        cluster_pause();
    ck_assert(cluster_is_quiet(cq));
    cuda->hold(NULL, false);
    CLUSTER_UNTIL(counts().reservations == 1);
    ck_assert_int_eq(tl_cancel(cluster.workers[0], op), TL_OK);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_int_ne(completion.status.code, TL_OK);
    tl_tensor_put(completion.tensor);
    tl_tensor_put(destination);
}
END_TEST

/* What it was shown is there for others. */
START_TEST(the_receiver_is_killed)
{
    struct tl_tensor *tensor = bytes_on(gpu0, LARGE_BYTES);
    fill(tensor, 4);
    tl_tensor_set_stream(tensor, TL_STREAM_NONE);
    cluster_send(cluster.workers[0], "key", 0, tensor, cq);
    tl_tensor_put(tensor);
    wait_for_word(channel);
    for (unsigned i = 0; i < 200; i++) /* the copy has begun, most likely */
        cluster_pause();
    kill_child();
    tensor = cluster_recv_wait(cluster.workers[0], 0, "key", 0);
    ck_assert(is_filled(tensor, 4));
    tl_tensor_put(tensor);
    struct tl_completion completion = cluster_next(cq);
    ck_assert_int_eq(completion.status.code, TL_OK);
    tl_tensor_put(completion.tensor);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("local_device_workers");
    TCase *tcase = tcase_create("owner");
    tcase_set_timeout(tcase, 120);
    tcase_add_checked_fixture(tcase, setup_owner, teardown);
    tcase_add_test(tcase, from_another_process);
    tcase_add_test(tcase, the_owner_is_killed);
    suite_add_tcase(suite, tcase);
    TCase *receiver = tcase_create("receiver");
    tcase_set_timeout(receiver, 120);
    tcase_add_checked_fixture(receiver, setup_receiver, teardown);
    tcase_add_test(receiver, the_receiver_is_killed);
    suite_add_tcase(suite, receiver);
    return run_suite(suite);
}
