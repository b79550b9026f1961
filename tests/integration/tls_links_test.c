// SPDX-License-Identifier: Apache-2.0
/*
 * Three workers with certificates, and what becomes of their links and data connections when one certificate is revoked
 * or expires, and when one of them replays what it has not learnt over its own link: all other links stay.
 */
#include <check.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "base/log.h"
#include "dataplane/engine/conn_internal.h"
#include "fakes/certificates.h"
#include "fakes/cluster.h"
#include "fakes/local_caller.h"
#include "fakes/log_capture.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"
#include "server/worker_internal.h"

#define BYTES 100000

static struct cluster cluster;
static struct authority authority;
static struct tl_error error;

/* In the place of the C library's, for OpenSSL, too: certificates end without waiting for it. */
static atomic_long passed_s;

__attribute__((visibility("default"))) time_t time(time_t *ret_now)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    now.tv_sec += atomic_load(&passed_s);
    if (ret_now != NULL) *ret_now = now.tv_sec;
    return now.tv_sec;
}

/* Issues the certificate of a task, which ends after so many seconds (0: in an hour). Returns its serial number. */
static long issue(unsigned task, long end_s)
{
    char uri[80], certificate[16], key[16];
    snprintf(uri, sizeof(uri), "URI:spiffe://test/job/node/task/%u", task);
    snprintf(certificate, sizeof(certificate), "node-%u.pem", task);
    snprintf(key, sizeof(key), "node-%u.key", task);
    return authority_issue(&authority, &(struct certificate_kind){.names = uri, .end_s = end_s}, temp_path(certificate),
                           temp_path(key));
}

static void setup(void)
{
    static char settings[1024];
    temp_folder_make();
    authority_init(&authority, "test authority", temp_path("ca.pem"));
    authority_revoke(&authority, NULL, 0, temp_path("ca.crl"));
    snprintf(settings, sizeof(settings),
             "\"security\": {\"tls\": {\"ca\": \"%s/ca.pem\", \"crl\": \"%s/ca.crl\","
             " \"certificate\": \"%s/{name}.pem\", \"key\": \"%s/{name}.key\"}}",
             temp_folder, temp_folder, temp_folder, temp_folder);
    cluster_init(&cluster, 3, settings);
    cluster.protocol = "grpc+local";
    tl_log_configure(TL_LOG_INFO, TL_LOG_KEY_VALUE);
    log_capture_begin();
    for (unsigned task = 0; task < 3; task++)
        issue(task, 0);
}

static void teardown(void)
{
    cluster_close_all(&cluster);
    authority_fini(&authority);
    temp_folder_remove();
}

static void publish(unsigned task)
{
    struct tl_tensor *tensor = cluster_tensor(BYTES, task);
    cluster_publish(cluster.workers[task], "key", 1, tensor);
    tl_tensor_put(tensor);
}

static void open_all(void)
{
    cluster_open_all(&cluster);
    for (unsigned task = 0; task < 3; task++)
        publish(task);
}

/* Receives the value of the owner, and returns the status; *ret_path tells how the value has come. */
static enum tl_status receive(unsigned task, unsigned owner, int64_t timeout_ns, enum tl_path *ret_path)
{
    struct tl_completion completion;
    enum tl_status status = tl_recv_wait(cluster.workers[task], cluster_peer(cluster.workers[task], owner), "key", 1,
                                         NULL, timeout_ns, &completion, &error);
    if (status == TL_OK) {
        ck_assert(cluster_tensor_is(completion.tensor, BYTES, owner));
        *ret_path = completion.path;
    }
    tl_tensor_put(completion.tensor);
    return status;
}

/* Whether the value comes over a data connection. */
static bool comes_locally(unsigned task, unsigned owner)
{
    enum tl_path path;
    ck_assert_msg(receive(task, owner, CLUSTER_LONG, &path) == TL_OK, "%s", error.message);
    return path != TL_PATH_GRPC;
}

static void connect_all(void)
{
    for (unsigned task = 0; task < 3; task++)
        for (unsigned owner = 0; owner < 3; owner++)
            if (task != owner) CLUSTER_UNTIL(comes_locally(task, owner));
}

static bool is_up(unsigned task, unsigned peer)
{
    return cluster_peer_info(cluster.workers[task], peer).state == TL_PEER_UP;
}

static unsigned lost_count(unsigned peer)
{
    char text[80];
    snprintf(text, sizeof(text), "msg=\"peer lost\" peer=%s ", cluster_task_name(peer));
    return log_capture_count(text);
}

/* Task 2 has lost its links, and gets no other ones for this reason; the others keep theirs. */
static void assert_shut_out(const char *reason)
{
    enum tl_path path;
    for (unsigned task = 0; task < 2; task++)
        CLUSTER_UNTIL(!is_up(task, 2));
    ck_assert_int_ne(receive(2, 0, CLUSTER_SECOND, &path), TL_OK);
    ck_assert_int_ne(receive(1, 2, CLUSTER_SECOND, &path), TL_OK);
    CLUSTER_UNTIL(strstr(cluster_peer_info(cluster.workers[2], 0).reason.message, reason) != NULL);
    ck_assert(comes_locally(0, 1) && comes_locally(1, 0));
    ck_assert(is_up(0, 1) && is_up(1, 0));
    ck_assert_uint_eq(lost_count(2), 2);
    ck_assert_uint_eq(lost_count(0) + lost_count(1), 2); /* those two are task 2's */
}

/* Task 2 gets its links again with a new certificate, without a restart. */
static void assert_let_in(void)
{
    issue(2, 0);
    connect_all();
    for (unsigned task = 0; task < 3; task++)
        ck_assert_uint_eq(cluster_peer_info(cluster.workers[task], (task + 1) % 3).restart_count, 0);
}

START_TEST(revoked_while_its_links_run)
{
    long serial = issue(2, 0);
    open_all();
    connect_all();
    authority_revoke(&authority, &serial, 1, temp_path("ca.crl"));
    assert_shut_out("our certificate is revoked");
    assert_let_in();
}
END_TEST

START_TEST(expires_while_its_links_run)
{
    enum { LIFE_S = 1000 };
    issue(2, LIFE_S);
    open_all();
    connect_all();
    ck_assert(is_up(0, 2) && is_up(1, 2));
    atomic_store(&passed_s, LIFE_S + 1);
    assert_shut_out("our certificate has expired");
    assert_let_in();
}
END_TEST

/* Task 2 has the certificate of task 1: it gets no link, neither when it dials nor when it is dialled. */
START_TEST(certificate_of_another)
{
    const struct certificate_kind kind = {.names = "URI:spiffe://test/job/node/task/1"};
    enum tl_path path;
    authority_issue(&authority, &kind, temp_path("node-2.pem"), temp_path("node-2.key"));
    open_all();
    ck_assert_int_ne(receive(2, 0, CLUSTER_SECOND, &path), TL_OK);
    ck_assert_int_ne(receive(1, 2, CLUSTER_SECOND, &path), TL_OK);
    CLUSTER_UNTIL(strstr(cluster_peer_info(cluster.workers[2], 0).reason.message,
                         "says that it is /job:node/task:2, and its certificate is for /job:node/task:1") != NULL);
    CLUSTER_UNTIL(strstr(cluster_peer_info(cluster.workers[1], 2).reason.message,
                         "for /job:node/task:1, and not for /job:node/task:2") != NULL);
    ck_assert(comes_locally(0, 1) || is_up(0, 1));
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ replay -- */

static struct tl_conn *find_conn(unsigned task, unsigned peer)
{
    const struct tl_transport *transport = cluster.workers[task]->data_plane.transports[0].transport;
    TL_LIST_FOREACH(&transport->engine->conns, place)
    {
        struct tl_conn *conn = TL_CONTAINER_OF(place, struct tl_conn, engine_link);
        if (strcmp(conn->peer.name, cluster_task_name(peer)) == 0) return conn;
    }
    return NULL;
}

/* Lets all workers look once for work; returns true. */
static bool driven(void)
{
    for (unsigned task = 0; task < 3; task++)
        (void)!tl_worker_progress(cluster.workers[task], CLUSTER_SECOND / 1000);
    return true;
}

/* Waits for the next value; whether it has come over a data connection. */
static bool has_come_locally(struct tl_cq *cq)
{
    struct tl_completion completion;
    CLUSTER_UNTIL(driven() && tl_cq_poll(cq, &completion, 1) == 1);
    ck_assert_int_eq(completion.status.code, TL_OK);
    tl_tensor_put(completion.tensor);
    return completion.path != TL_PATH_GRPC;
}

static bool comes_locally_to_0(unsigned owner, struct tl_cq *cq)
{
    cluster_recv(cluster.workers[0], owner, "key", 1, cq);
    return has_come_locally(cq);
}

/* Task 2 answers over its own link, and presents the token that task 0 has given to task 1. */
START_TEST(token_of_another_link)
{
    cluster.progress = TL_PROGRESS_CALLER;
    open_all();
    struct tl_cq *cq = cluster_cq();
    CLUSTER_UNTIL(comes_locally_to_0(1, cq));
    const struct tl_conn *robbed = find_conn(0, 1);
    uint64_t stolen = robbed->handshake.keys.own_token;
    ck_assert_uint_eq(stolen, find_conn(1, 0)->handshake.keys.peer_token);
    cluster_recv(cluster.workers[0], 2, "key", 1, cq);
    /* Task 2 says HELLO when it has heard that of task 0, which runs only in driven. */
    CLUSTER_UNTIL(find_conn(2, 0) != NULL || !driven() || find_conn(2, 0) != NULL);
    struct tl_conn *thief = find_conn(2, 0);
    ck_assert(!thief->handshake.hello.is_sent);
    ck_assert_uint_ne(thief->handshake.keys.peer_token, stolen);
    thief->handshake.keys.peer_token = stolen;
    CLUSTER_UNTIL(driven() && log_capture_count("does not have the token of the pair address") > 0);
    /* What task 0 asks of task 2 comes over their link from now on; it makes no other attempt. */
    ck_assert(!has_come_locally(cq));
    ck_assert(!comes_locally_to_0(2, cq));
    ck_assert(find_conn(0, 1) == robbed && tl_conn_is_up(robbed) && comes_locally_to_0(1, cq));
    ck_assert_uint_eq(lost_count(1), 0);
    tl_cq_destroy(cq);
}
END_TEST

/* Lets the workers look for work one after the other until task 0 expects task 1 at an accept socket: what task 1 says
 * there is seen when task 0 looks again. */
static struct local_pair *await_accept_socket(void)
{
    for (unsigned round = 0; find_conn(0, 1) == NULL; round++)
        (void)!tl_worker_progress(cluster.workers[round % 3], CLUSTER_SECOND / 1000);
    return local_pair_of(find_conn(0, 1)->pair);
}

static bool say_hello(const struct local_address *place, const uint8_t *token, const uint8_t *from)
{
    struct local_caller caller;
    caller_open(&caller, place);
    struct local_hello hello = caller_hello(place, 16);
    memcpy(hello.to, token, sizeof(hello.to));
    memcpy(hello.from, from, sizeof(hello.from));
    const int fds[] = {caller.peers_end, caller.wake_in, caller.wake_in};
    bool is_said = caller_say(place, &hello, sizeof(hello), fds, LOCAL_HELLO_DESCRIPTORS);
    caller_close(&caller);
    return is_said;
}

/* Task 2 presents the token of its own shared memory with task 0 where task 0 expects task 1, and may even say what
 * task 1 would say of itself. It can see the name of that accept socket, as every process of the host can. */
START_TEST(token_of_shared_memory_with_another)
{
    cluster.progress = TL_PROGRESS_CALLER;
    open_all();
    struct tl_cq *cq = cluster_cq();
    CLUSTER_UNTIL(comes_locally_to_0(2, cq));
    const struct local_pair *thief = local_pair_of(find_conn(2, 0)->pair);
    cluster_recv(cluster.workers[0], 1, "key", 1, cq);
    const struct local_pair *robbed = await_accept_socket();
    const struct local_address place = robbed->self;
    char byte;
    ck_assert(memcmp(place.token, thief->peer.token, sizeof(place.token)) != 0);
    ck_assert(say_hello(&place, thief->peer.token, thief->self.token));
    ck_assert(say_hello(&place, thief->peer.token, robbed->peer.token));
    ck_assert_int_lt(recv(robbed->sockets.accept, &byte, 1, MSG_PEEK | MSG_DONTWAIT), 0);
    CLUSTER_UNTIL(has_come_locally(cq) || comes_locally_to_0(1, cq));
    ck_assert(local_pair_of(find_conn(0, 1)->pair) == robbed && tl_conn_is_up(find_conn(0, 1)));
    /* Its own token, a second time; and that of the connection that is up now. */
    ck_assert(!say_hello(&thief->peer, thief->peer.token, thief->self.token));
    ck_assert(!say_hello(&place, place.token, robbed->peer.token));
    ck_assert(comes_locally_to_0(1, cq) && comes_locally_to_0(2, cq));
    ck_assert_uint_eq(lost_count(1) + lost_count(2), 0);
    tl_cq_destroy(cq);
}
END_TEST

/* Each is a case of its own, so that it can be run alone. */
#define ADD(test)                                                                                                      \
    do {                                                                                                               \
        TCase *tcase = tcase_create(#test);                                                                            \
        tcase_add_checked_fixture(tcase, setup, teardown);                                                             \
        tcase_add_test(tcase, test);                                                                                   \
        suite_add_tcase(suite, tcase);                                                                                 \
    } while (0)

int main(void)
{
    Suite *suite = suite_create("tls_links");
    ADD(revoked_while_its_links_run);
    ADD(expires_while_its_links_run);
    ADD(certificate_of_another);
    ADD(token_of_another_link);
    ADD(token_of_shared_memory_with_another);
    return run_suite(suite);
}
