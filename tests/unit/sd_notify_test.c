// SPDX-License-Identifier: Apache-2.0
/* Tests of the notification protocol, against a socket of our own. */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "fakes/run_suite.h"
#include "server/cli/sd_notify.h"

static struct tl_error error;

/* A socket with an abstract name, which is in the environment. */
static int open_manager(void)
{
    char name[64];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    snprintf(name, sizeof(name), "@tensorlane-test-%d", (int)getpid());
    memcpy(address.sun_path + 1, name + 1, strlen(name) - 1);
    socklen_t len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(name));
    ck_assert_int_eq(bind(fd, (const struct sockaddr *)(const void *)&address, len), 0);
    setenv("NOTIFY_SOCKET", name, 1);
    return fd;
}

/* Sends datagrams until the kernel queues no more; returns how many. */
static int fill(int manager)
{
    struct sockaddr_un address;
    socklen_t len = sizeof(address);
    int count = 0;
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    ck_assert_int_eq(getsockname(manager, (struct sockaddr *)(void *)&address, &len), 0);
    while (sendto(fd, "full", 4, 0, (const struct sockaddr *)(const void *)&address, len) == 4)
        count++;
    ck_assert_int_eq(errno, EAGAIN);
    close(fd);
    return count;
}

static void *read_until_ready(void *context)
{
    char text[64];
    int *fd = context;
    for (;;) {
        ssize_t len = recv(*fd, text, sizeof(text) - 1, 0);
        if (len < 0) return NULL;
        text[len] = '\0';
        if (strcmp(text, "READY=1") == 0) return context;
    }
}

START_TEST(no_service_manager_is_fine)
{
    unsetenv("NOTIFY_SOCKET");
    ck_assert(!tl_sd_is_notified());
    ck_assert_int_eq(tl_sd_notify("READY=1", &error), TL_OK);
    setenv("NOTIFY_SOCKET", "", 1);
    ck_assert(!tl_sd_is_notified());
    ck_assert_int_eq(tl_sd_notify("READY=1", &error), TL_OK);
}
END_TEST

START_TEST(tells)
{
    char text[64] = "";
    int manager = open_manager();
    ck_assert(tl_sd_is_notified());
    ck_assert_int_eq(tl_sd_notify("READY=1\nSTATUS=well", &error), TL_OK);
    ck_assert_int_eq(recv(manager, text, sizeof(text) - 1, MSG_DONTWAIT), 19);
    ck_assert_str_eq(text, "READY=1\nSTATUS=well");
    close(manager);
}
END_TEST

START_TEST(waits_for_a_busy_manager)
{
    pthread_t thread;
    void *result = NULL;
    int manager = open_manager();
    ck_assert_int_gt(fill(manager), 0);
    ck_assert_int_eq(pthread_create(&thread, NULL, read_until_ready, &manager), 0);
    ck_assert_int_eq(tl_sd_notify("READY=1", &error), TL_OK);
    ck_assert_int_eq(pthread_join(thread, &result), 0);
    ck_assert_ptr_eq(result, &manager);
    close(manager);
}
END_TEST

START_TEST(gives_up_on_a_manager_that_does_not_read)
{
    int manager = open_manager();
    fill(manager);
    ck_assert_int_ne(tl_sd_notify("READY=1", &error), TL_OK);
    ck_assert_ptr_nonnull(strstr(error.message, "cannot send to NOTIFY_SOCKET=@tensorlane-test-"));
    close(manager);
}
END_TEST

START_TEST(refuses_a_name_that_is_none)
{
    char long_name[256];
    memset(long_name, 'a', sizeof(long_name));
    long_name[0] = '@';
    long_name[sizeof(long_name) - 1] = '\0';
    const char *const names[] = {"relative", "/", "@", long_name};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        setenv("NOTIFY_SOCKET", names[i], 1);
        ck_assert_int_eq(tl_sd_notify("READY=1", &error), TL_INVALID_ARGUMENT);
        ck_assert_ptr_nonnull(strstr(error.message, names[i]));
    }
}
END_TEST

START_TEST(a_manager_that_has_gone_is_an_error)
{
    close(open_manager());
    ck_assert_int_ne(tl_sd_notify("READY=1", &error), TL_OK);
    ck_assert_ptr_nonnull(strstr(error.message, "cannot send"));
}
END_TEST

START_TEST(reads_the_watchdog)
{
    char pid[32];
    unsetenv("WATCHDOG_USEC");
    unsetenv("WATCHDOG_PID");
    ck_assert_int_eq(tl_sd_watchdog_ns(), 0);
    setenv("WATCHDOG_USEC", "1500000", 1);
    ck_assert_int_eq(tl_sd_watchdog_ns(), 1500000000);
    snprintf(pid, sizeof(pid), "%d", (int)getpid());
    setenv("WATCHDOG_PID", pid, 1);
    ck_assert_int_eq(tl_sd_watchdog_ns(), 1500000000);
    setenv("WATCHDOG_PID", "1", 1);
    ck_assert_int_eq(tl_sd_watchdog_ns(), 0);
    unsetenv("WATCHDOG_PID");
    const char *const bad[] = {"", "-1", "1x", "99999999999999999999", "9223372036854775807"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        setenv("WATCHDOG_USEC", bad[i], 1);
        ck_assert_int_eq(tl_sd_watchdog_ns(), 0);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("sd_notify");
    TCase *tcase = tcase_create("sd_notify");
    tcase_set_timeout(tcase, 60);
    tcase_add_test(tcase, no_service_manager_is_fine);
    tcase_add_test(tcase, tells);
    tcase_add_test(tcase, waits_for_a_busy_manager);
    tcase_add_test(tcase, gives_up_on_a_manager_that_does_not_read);
    tcase_add_test(tcase, refuses_a_name_that_is_none);
    tcase_add_test(tcase, a_manager_that_has_gone_is_an_error);
    tcase_add_test(tcase, reads_the_watchdog);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
