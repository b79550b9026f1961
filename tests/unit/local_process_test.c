// SPDX-License-Identifier: Apache-2.0
/* The process behind a listening socket: this one, one that is stopped, one of many descriptors, none. */
#include <arpa/inet.h>
#include <check.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fakes/run_suite.h"
#include "server/cli/local_process.h"

static char address[64];
static struct tl_local_process process;

/* Listens at a free port; `address` becomes what a caller dials. */
static int listen_at(const char *host, const char *dialled)
{
    struct sockaddr_in bound = {.sin_family = AF_INET};
    socklen_t len = sizeof(bound);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(inet_pton(AF_INET, host, &bound.sin_addr), 1);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&bound, sizeof(bound)), 0);
    ck_assert_int_eq(listen(fd, 1), 0);
    ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&bound, &len), 0);
    snprintf(address, sizeof(address), "%s:%u", dialled, ntohs(bound.sin_port));
    return fd;
}

START_TEST(this_process)
{
    static const char *const hosts[][2] = {
        {"127.0.0.1", "127.0.0.1"}, {"0.0.0.0", "127.0.0.1"}, {"127.0.0.1", "localhost"}};
    for (size_t i = 0; i < 3; i++) {
        int fd = listen_at(hosts[i][0], hosts[i][1]);
        prctl(PR_SET_NAME, i == 1 ? "tensorlane" : "a (strange) one");
        ck_assert(tl_local_process_listening(address, &process));
        ck_assert_int_eq(process.pid, getpid());
        ck_assert_uint_eq(process.user, getuid());
        ck_assert_str_eq(process.name, i == 1 ? "tensorlane" : "a (strange) one");
        ck_assert_int_eq(process.is_worker, i == 1);
        ck_assert_int_ne(process.state, 'T');
        ck_assert_uint_gt(process.descriptors, 3);
        close(fd);
    }
}
END_TEST

START_TEST(nothing_listens)
{
    int fd = listen_at("127.0.0.1", "127.0.0.2");
    ck_assert(!tl_local_process_listening(address, &process)); /* The port is that of another address. */
    snprintf(address, sizeof(address), "nowhere");
    ck_assert(!tl_local_process_listening(address, &process));
    close(fd);
}
END_TEST

START_TEST(descriptors)
{
    struct rlimit limit = {.rlim_cur = 64, .rlim_max = 64};
    int fd = listen_at("127.0.0.1", "127.0.0.1");
    ck_assert(tl_local_process_listening(address, &process));
    uint64_t before = process.descriptors;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
    int others[10];
    for (size_t i = 0; i < 10; i++)
        others[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
    ck_assert(tl_local_process_listening(address, &process));
    ck_assert_uint_eq(process.descriptors, before + 10);
    ck_assert_uint_eq(process.descriptor_limit, 64);
    for (size_t i = 0; i < 10; i++)
        close(others[i]);
    close(fd);
}
END_TEST

START_TEST(stopped_process)
{
    int fd = listen_at("127.0.0.1", "127.0.0.1"), status;
    pid_t child = fork();
    if (child == 0) {
        pause();
        _exit(0);
    }
    close(fd); /* Only the child has it now. */
    ck_assert(tl_local_process_listening(address, &process));
    ck_assert_int_eq(process.pid, child);
    ck_assert_int_eq(kill(child, SIGSTOP), 0);
    ck_assert_int_eq(waitpid(child, &status, WUNTRACED), child);
    ck_assert(tl_local_process_listening(address, &process));
    ck_assert_int_eq(process.state, 'T');
    ck_assert_int_eq(kill(child, SIGKILL), 0);
    ck_assert_int_eq(waitpid(child, &status, 0), child);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("local_process");
    TCase *tcase = tcase_create("local_process");
    tcase_add_test(tcase, this_process);
    tcase_add_test(tcase, nothing_listens);
    tcase_add_test(tcase, descriptors);
    tcase_add_test(tcase, stopped_process);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
