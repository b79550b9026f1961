// SPDX-License-Identifier: Apache-2.0
/* What `tensorlane doctor` says of names, interfaces, sockets and routes that a test makes up. */
#include "server/cli/doctor_net.h"

#include <arpa/inet.h>
#include <check.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "fakes/doctor_report.h"
#include "fakes/run_suite.h"
#include "server/cli/local_process.h"

static struct tl_ip ips[4];

/* A name with these addresses, ended by NULL. */
static struct tl_doctor_name make_name(enum tl_doctor_name_use use, const char *const *addresses)
{
    size_t count = 0;
    for (; addresses[count]; count++)
        ck_assert(tl_ip_parse(addresses[count], &ips[count]));
    return (struct tl_doctor_name){.host = "gpu-0", .ips = ips, .ip_count = count, .use = use, .port = 4000};
}

#define ADDRESSES(...) ((const char *const[]){__VA_ARGS__, NULL})

/* ------------------------------------------------------------------------------------------------------- names -- */

START_TEST(sound_names)
{
    struct tl_doctor_name name = make_name(TL_DOCTOR_NAME_SHARED, ADDRESSES("10.0.0.7", "fd00::7"));
    tl_doctor_check_name(&report, &roots, &name);
    check_last(TL_DOCTOR_OK, "host gpu-0", "10.0.0.7 (IPv4), fd00::7 (IPv6)", "", "");
    ck_assert_ptr_null(strstr(report.lines[0].value, "hosts"));
    make_file("etc/hosts", "127.0.0.1 localhost\n10.0.0.7 other # gpu-0\n10.0.0.8 gpu-0\n10.0.0.7\tgpu GPU-0\n");
    tl_doctor_check_name(&report, &roots, &name);
    check_last(TL_DOCTOR_OK, "host gpu-0", "10.0.0.7 (IPv4), fd00::7 (IPv6) (line 4 of /etc/hosts)", "", "");
    name = make_name(TL_DOCTOR_NAME_WITHIN, ADDRESSES("127.0.1.1"));
    tl_doctor_check_name(&report, &roots, &name);
    check_last(TL_DOCTOR_OK, "host gpu-0", "127.0.1.1 (IPv4)", "", "");
    name = make_name(TL_DOCTOR_NAME_SHARED, ADDRESSES("127.0.1.1", "10.0.0.7"));
    tl_doctor_check_name(&report, &roots, &name);
    check_last(TL_DOCTOR_OK, "host gpu-0", "127.0.1.1 (IPv4), 10.0.0.7 (IPv4)", "", "");
}
END_TEST

START_TEST(name_of_loopback)
{
    struct tl_doctor_name name = make_name(TL_DOCTOR_NAME_SHARED, ADDRESSES("127.0.1.1"));
    make_file("etc/hosts", "127.0.0.1 localhost\n127.0.1.1 gpu-0\n");
    tl_doctor_check_name(&report, &roots, &name);
    check_last(TL_DOCTOR_FAULT, "host gpu-0", "127.0.1.1 (IPv4) (line 2 of /etc/hosts)",
               "gpu-0 resolves to 127.0.1.1 here (line 2 of /etc/hosts), which other machines cannot reach",
               "correct /etc/hosts or DNS, or set \"listen\" to \"0.0.0.0:4000\"");
    name.has_listen = true;
    tl_doctor_check_name(&report, &roots, &name);
    check_last(TL_DOCTOR_NOTE, "host gpu-0", "127.0.1.1", "which other machines cannot reach", "correct /etc/hosts");
    name = make_name(TL_DOCTOR_NAME_SHARED, ADDRESSES("::1"));
    tl_doctor_check_name(&report, &roots, &name);
    check_last(TL_DOCTOR_FAULT, "host gpu-0", "::1 (IPv6)", "gpu-0 resolves to ::1 here,", "correct /etc/hosts");
    name.host = "::1";
    tl_doctor_check_name(&report, &roots, &name);
    check_last(TL_DOCTOR_NOTE, "host ::1", "::1 (IPv6)", "::1 means this machine on every machine", "in cluster.json");
    name.host = "localhost";
    tl_doctor_check_name(&report, &roots, &name);
    check_last(TL_DOCTOR_NOTE, "host localhost", "::1 (IPv6)", "only where its port is forwarded", "in cluster.json");
    name = make_name(TL_DOCTOR_NAME_OWN, ADDRESSES("127.0.1.1"));
    tl_doctor_check_name(&report, &roots, &name);
    check_last(TL_DOCTOR_NOTE, "own name gpu-0", "127.0.1.1", "a worker with this name in its address listens there",
               "let it resolve to the machine's address");
}
END_TEST

START_TEST(unknown_name)
{
    struct tl_doctor_name name = {.host = "gpu-0", .failure = "no such host; check it", .use = TL_DOCTOR_NAME_WITHIN};
    tl_doctor_check_name(&report, &roots, &name);
    check_last(TL_DOCTOR_FAULT, "host gpu-0", "-", "no such host", "check it");
    name.use = TL_DOCTOR_NAME_OWN;
    tl_doctor_check_name(&report, &roots, &name);
    check_last(TL_DOCTOR_NOTE, "own name gpu-0", "-", "no such host", "check it");
}
END_TEST

/* -------------------------------------------------------------------------------------------------- interfaces -- */

START_TEST(interfaces)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6};
    struct sockaddr packet = {.sa_family = AF_UNIX};
    ck_assert_int_eq(inet_pton(AF_INET, "10.0.0.7", &v4.sin_addr), 1);
    ck_assert_int_eq(inet_pton(AF_INET6, "fd00::7", &v6.sin6_addr), 1);
    struct ifaddrs list[] = {
        {.ifa_name = "eth0", .ifa_addr = &packet},
        {.ifa_name = "tun0"},
        {.ifa_name = "eth0", .ifa_addr = (struct sockaddr *)&v4},
        {.ifa_name = "eth0", .ifa_addr = (struct sockaddr *)&v6},
    };
    for (size_t i = 0; i + 1 < TL_ARRAY_COUNT(list); i++)
        list[i].ifa_next = &list[i + 1];
    tl_doctor_check_interfaces(&report, &roots, list);
    check_last(TL_DOCTOR_OK, "interface eth0", "10.0.0.7, fd00::7; MTU unknown, unknown", "", "");
    ck_assert_uint_eq(report.count, 1);
    make_file("sys/class/net/eth0/mtu", "9000\n");
    make_file("sys/class/net/eth0/operstate", "up\n");
    tl_doctor_check_interfaces(&report, &roots, list);
    check_last(TL_DOCTOR_OK, "interface eth0", "10.0.0.7, fd00::7; MTU 9000, up", "", "");
    make_file("sys/class/net/eth0/operstate", "down\n");
    tl_doctor_check_interfaces(&report, &roots, list);
    check_last(TL_DOCTOR_OK, "interface eth0", "MTU 9000, down", "", "");
    make_file("sys/class/net/eth0/device/vendor", "0x15b3\n");
    tl_doctor_check_interfaces(&report, &roots, list);
    check_last(TL_DOCTOR_NOTE, "interface eth0", "MTU 9000, down", "no link", "ip link set eth0 up");
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- sockets -- */

/* Lines of /proc/net/tcp and tcp6: port 4000 is 0FA0. */
#define TITLE "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
#define REST " 00000000:00000000 00:00000000 00000000  1000        0 5031459 1 0000000000000000 100 0 0 10 0\n"
#define V6_ZEROS "00000000000000000000000000000000"

static struct tl_local_process process;

static void check_socket_of(struct tl_doctor_name *name)
{
    const struct tl_doctor_socket socket = {
        .task = "/job:ps/task:0", .name = name, .port = 4000, .process = &process, .start = "tensorlane serve"};
    tl_doctor_check_socket(&report, &roots, &socket);
}

/* A checked fixture: a worker that runs. */
static void make_process(void)
{
    process = (struct tl_local_process){.pid = 7, .name = "tensorlane", .state = 'S', .descriptors = 40};
    make_roots();
}

START_TEST(no_socket)
{
    struct tl_doctor_name name = make_name(TL_DOCTOR_NAME_SHARED, ADDRESSES("10.0.0.7"));
    check_socket_of(&name);
    check_last(TL_DOCTOR_UNKNOWN, "socket of /job:ps/task:0", "-", "cannot be read", "mount /proc");
    make_file("proc/net/tcp",
              TITLE "   0: 0100007F:0FA1 00000000:0000 0A" REST "   1: 0700000A:0FA0 0100007F:1000 01" REST);
    check_socket_of(&name);
    check_last(TL_DOCTOR_NOTE, "socket of /job:ps/task:0", "nothing listens at port 4000", "does not run",
               "start it: tensorlane serve");
}
END_TEST

START_TEST(sound_sockets)
{
    struct tl_doctor_name name = make_name(TL_DOCTOR_NAME_SHARED, ADDRESSES("10.0.0.7"));
    make_file("proc/net/tcp", TITLE "   0: 0700000A:0FA0 00000000:0000 0A" REST);
    check_socket_of(&name);
    check_last(TL_DOCTOR_OK, "socket of /job:ps/task:0", "port 4000 of 10.0.0.7 (IPv4), process 7 (tensorlane)", "",
               "");
    make_file("proc/net/tcp", TITLE "   0: 00000000:0FA0 00000000:0000 0A" REST);
    check_socket_of(&name);
    check_last(TL_DOCTOR_OK, "socket of /job:ps/task:0", "port 4000 of 0.0.0.0 (IPv4)", "", "");
    make_file("proc/net/tcp", TITLE);
    make_file("proc/net/tcp6", TITLE "   0: " V6_ZEROS ":0FA0 " V6_ZEROS ":0000 0A" REST);
    check_socket_of(&name);
    check_last(TL_DOCTOR_OK, "socket of /job:ps/task:0", "port 4000 of :: (IPv6)", "", "");
    make_file("proc/net/tcp6", TITLE);
    name = make_name(TL_DOCTOR_NAME_WITHIN, ADDRESSES("127.0.0.1"));
    make_file("proc/net/tcp", TITLE "   0: 0100007F:0FA0 00000000:0000 0A" REST);
    check_socket_of(&name);
    check_last(TL_DOCTOR_OK, "socket of /job:ps/task:0", "port 4000 of 127.0.0.1 (IPv4), process 7", "", "");
}
END_TEST

START_TEST(loopback_socket)
{
    struct tl_doctor_name name = make_name(TL_DOCTOR_NAME_SHARED, ADDRESSES("127.0.1.1"));
    make_file("proc/net/tcp", TITLE "   0: 0101007F:0FA0 00000000:0000 0A" REST);
    check_socket_of(&name);
    check_last(TL_DOCTOR_FAULT, "socket of /job:ps/task:0", "port 4000 of 127.0.1.1 (IPv4)", "on loopback only",
               "set \"listen\" to \"0.0.0.0:4000\"");
    name.host = "localhost"; /* a port that is forwarded */
    check_socket_of(&name);
    check_last(TL_DOCTOR_NOTE, "socket of /job:ps/task:0", "port 4000 of 127.0.1.1", "on loopback only", "listen");
}
END_TEST

/* Debian's name of the own machine, while the worker listens where "listen" says. */
START_TEST(listens_beside_its_name)
{
    struct tl_doctor_name name = make_name(TL_DOCTOR_NAME_SHARED, ADDRESSES("127.0.1.1"));
    make_file("proc/net/tcp", TITLE "   0: 0700000A:0FA0 00000000:0000 0A" REST);
    check_socket_of(&name);
    check_last(TL_DOCTOR_FAULT, "socket of /job:ps/task:0", "port 4000 of 10.0.0.7", "where nothing listens", "listen");
    name.has_listen = true;
    check_socket_of(&name);
    check_last(TL_DOCTOR_NOTE, "socket of /job:ps/task:0", "port 4000 of 10.0.0.7", "where nothing listens", "listen");
    name.use = TL_DOCTOR_NAME_WITHIN;
    check_socket_of(&name);
    check_last(TL_DOCTOR_FAULT, "socket of /job:ps/task:0", "port 4000 of 10.0.0.7", "where nothing listens", "listen");
}
END_TEST

START_TEST(other_family)
{
    struct tl_doctor_name name = make_name(TL_DOCTOR_NAME_SHARED, ADDRESSES("fd00::7"));
    make_file("proc/net/tcp", TITLE "   0: 00000000:0FA0 00000000:0000 0A" REST);
    check_socket_of(&name);
    check_last(TL_DOCTOR_FAULT, "socket of /job:ps/task:0", "port 4000 of 0.0.0.0 (IPv4)",
               "gpu-0 resolves to fd00::7 (IPv6) here, where nothing listens at port 4000",
               "set \"listen\" to \"[::]:4000\"");
    name = make_name(TL_DOCTOR_NAME_SHARED, ADDRESSES("10.0.0.7", "fd00::7"));
    check_socket_of(&name);
    check_last(TL_DOCTOR_NOTE, "socket of /job:ps/task:0", "0.0.0.0", "fd00::7 (IPv6)", "[::]:4000");
    make_file("proc/net/tcp6", TITLE "   0: 000000FD000000000000000007000000:0FA0 " V6_ZEROS ":0000 0A" REST);
    check_socket_of(&name);
    check_last(TL_DOCTOR_OK, "socket of /job:ps/task:0", "port 4000 of 0.0.0.0 (IPv4), fd00::7 (IPv6)", "", "");
}
END_TEST

START_TEST(processes)
{
    struct tl_doctor_name name = make_name(TL_DOCTOR_NAME_SHARED, ADDRESSES("10.0.0.7"));
    make_file("proc/net/tcp", TITLE "   0: 0700000A:0FA0 00000000:0000 0A" REST);
    process.state = 'T';
    check_socket_of(&name);
    check_last(TL_DOCTOR_FAULT, "socket of /job:ps/task:0", "process 7 (tensorlane)",
               "process 7 (tensorlane) at gpu-0 is stopped", "kill -CONT 7");
    process.state = 'S';
    process.descriptor_limit = 42;
    check_socket_of(&name);
    check_last(TL_DOCTOR_FAULT, "socket of /job:ps/task:0", "process 7", "has 40 of 42 descriptors open", "prlimit");
    process.descriptor_limit = 43;
    check_socket_of(&name);
    check_last(TL_DOCTOR_OK, "socket of /job:ps/task:0", "process 7", "", "");
    process = (struct tl_local_process){.user = 1000, .state = 'T'};
    check_socket_of(&name);
    check_last(TL_DOCTOR_UNKNOWN, "socket of /job:ps/task:0", "a process of user 1000", "may not see which process",
               "as that user or as root");
}
END_TEST

/* ------------------------------------------------------------------------------------------------------ routes -- */

START_TEST(routes)
{
    struct tl_doctor_route route = {.host = "gpu-1", .interface = "eth0", .interface_mtu = 9000, .path_mtu = 9000};
    ck_assert(tl_ip_parse("10.0.0.8", &route.to));
    ck_assert(tl_ip_parse("10.0.0.7", &route.from));
    tl_doctor_check_route(&report, &route);
    check_last(TL_DOCTOR_OK, "route to gpu-1", "10.0.0.8 from 10.0.0.7 (eth0), MTU 9000", "", "");
    route.path_mtu = 1400;
    tl_doctor_check_route(&report, &route);
    check_last(TL_DOCTOR_NOTE, "route to gpu-1", "MTU 1400", "carries packets of 1400 bytes, eth0 would send 9000",
               "or set that of eth0 to 1400");
    route.failure = "Network is unreachable";
    tl_doctor_check_route(&report, &route);
    check_last(TL_DOCTOR_FAULT, "route to gpu-1", "10.0.0.8", "no way to 10.0.0.8 (IPv4): Network is unreachable",
               "ip route get 10.0.0.8");
    route.has_other = true;
    tl_doctor_check_route(&report, &route);
    check_last(TL_DOCTOR_NOTE, "route to gpu-1", "10.0.0.8", "Network is unreachable", "ip route get");
}
END_TEST

/* The kernel knows the way to loopback on every machine. */
START_TEST(route_of_loopback)
{
    struct tl_doctor_route route;
    struct tl_ip loopback;
    ck_assert(tl_ip_parse("127.0.0.1", &loopback));
    tl_doctor_find_route("localhost", &loopback, &route);
    ck_assert_ptr_null(route.failure);
    ck_assert(tl_ip_is_equal(&route.from, &loopback));
    ck_assert_str_eq(route.interface, "lo");
    /* An address of loopback leaves by another interface, of which it says nothing. */
    ck_assert_uint_eq(route.interface_mtu, 0);
    ck_assert_uint_gt(route.path_mtu, 0);
}
END_TEST

START_TEST(interfaces_that_send)
{
    ck_assert(tl_doctor_sends_itself(IFF_UP | IFF_BROADCAST));               /* Ethernet */
    ck_assert(tl_doctor_sends_itself(IFF_UP | IFF_NOARP | IFF_POINTOPOINT)); /* WireGuard, tun */
    ck_assert(!tl_doctor_sends_itself(IFF_UP | IFF_LOOPBACK));               /* lo */
    ck_assert(!tl_doctor_sends_itself(IFF_UP | IFF_NOARP | IFF_BROADCAST));  /* dummy */
    ck_assert(!tl_doctor_sends_itself(IFF_UP | IFF_NOARP | IFF_MASTER));     /* VRF */
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("doctor_net");
    TCase *net = tcase_create("net");
    tcase_add_checked_fixture(net, make_process, remove_roots);
    tcase_add_test(net, sound_names);
    tcase_add_test(net, name_of_loopback);
    tcase_add_test(net, unknown_name);
    tcase_add_test(net, interfaces);
    tcase_add_test(net, no_socket);
    tcase_add_test(net, sound_sockets);
    tcase_add_test(net, loopback_socket);
    tcase_add_test(net, listens_beside_its_name);
    tcase_add_test(net, other_family);
    tcase_add_test(net, processes);
    tcase_add_test(net, routes);
    tcase_add_test(net, route_of_loopback);
    tcase_add_test(net, interfaces_that_send);
    suite_add_tcase(suite, net);
    return run_suite(suite);
}
