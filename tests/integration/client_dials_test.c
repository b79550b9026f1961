// SPDX-License-Identifier: Apache-2.0
/* Threads wait for a lock while gRPC dials, between its connect and its look at errno: it must see that the connection
 * is under way, whatever its locks do. */
#include <check.h>
#include <errno.h>
#include <grpc/support/sync.h>
#include <grpc/support/time.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "control/client.h"
#include "control/responses.h"
#include "fakes/fake_worker.h"
#include "fakes/run_suite.h"

static gpr_mu mutex;
static gpr_cv called;
static unsigned under_way_count;
/* Atomic because ThreadSanitizer does not see gRPC's locks. */
static atomic_uint waiting_count;
static atomic_bool is_called;

static void *wait_for_call(void *argument)
{
    (void)argument;
    gpr_mu_lock(&mutex);
    atomic_fetch_add(&waiting_count, 1);
    while (!atomic_load(&is_called))
        (void)gpr_cv_wait(&called, &mutex, gpr_inf_future(GPR_CLOCK_MONOTONIC));
    gpr_mu_unlock(&mutex);
    return NULL;
}

/* Two threads wait for a call, and then, because the calling thread has the lock, for the lock. It is the calling
 * thread that puts them into the queue of that lock. */
static void make_threads_wait_for_a_lock(void)
{
    pthread_t threads[2];
    gpr_mu_init(&mutex);
    gpr_cv_init(&called);
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, wait_for_call, NULL), 0);
    gpr_mu_lock(&mutex);
    while (atomic_load(&waiting_count) < 2) {
        gpr_mu_unlock(&mutex);
        (void)sched_yield();
        gpr_mu_lock(&mutex);
    }
    atomic_store(&is_called, true);
    gpr_cv_broadcast(&called);
    gpr_mu_unlock(&mutex);
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
    gpr_cv_destroy(&called);
    gpr_mu_destroy(&mutex);
}

/* Takes the place of the system's in the whole process. The client looks itself first whether something listens; the
 * second connection is gRPC's. */
__attribute__((visibility("default"))) int connect(int fd, const struct sockaddr *address, socklen_t size)
{
    int result = (int)syscall(SYS_connect, fd, address, size);
    if (result >= 0 || errno != EINPROGRESS) return result;
    if (++under_way_count == 2) make_threads_wait_for_a_lock();
    return result;
}

START_TEST(locks_are_waited_for)
{
    static struct fake_worker worker;
    struct tl_error error;
    enum tl_call_stage stage;
    struct tl_description description;
    fake_worker_init(&worker);
    fake_worker_start(&worker);
    struct tl_call_options options = {
        .address = worker.address, .connect_timeout_ns = 20 * TL_NS_PER_SEC, .rpc_timeout_ns = 20 * TL_NS_PER_SEC};
    enum tl_status status = tl_client_identify(&options, &description, &stage, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    ck_assert_uint_eq(under_way_count, 2);
    tl_description_fini(&description);
    fake_worker_stop(&worker, 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("client_dials");
    TCase *tcase = tcase_create("locks_are_waited_for");
    tcase_add_test(tcase, locks_are_waited_for);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
