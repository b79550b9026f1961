// SPDX-License-Identifier: Apache-2.0
/* Unix sockets: names, the filter, packets with descriptors, and files that dead processes have left. */
#include <stdio.h>
#include <check.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "base/unix_socket.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"

static int make_socket(const struct tl_unix_address *address)
{
    static const int yes = 1;
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &yes, sizeof(yes)), 0);
    ck_assert(tl_unix_socket_bind(fd, address));
    return fd;
}

static bool is_open(int fd)
{
    return fcntl(fd, F_GETFD) >= 0;
}

START_TEST(names)
{
    struct tl_unix_address first, second, again;
    char folder[150];
    tl_unix_address_choose(&first, "test-");
    tl_unix_address_choose(&second, "test-");
    ck_assert_mem_eq(first.address.sun_path, "\0test-", 6);
    ck_assert_uint_eq(first.len_bytes, second.len_bytes);
    ck_assert_mem_ne(&first, &second, sizeof(first));
    tl_unix_address_set(&again, first.address.sun_path, first.len_bytes - offsetof(struct sockaddr_un, sun_path));
    ck_assert_mem_eq(&again, &first, sizeof(first));
    ck_assert(tl_unix_address_in_folder(&first, "/folder", "name"));
    ck_assert_str_eq(first.address.sun_path, "/folder/name");
    ck_assert_uint_eq(first.len_bytes, offsetof(struct sockaddr_un, sun_path) + sizeof("/folder/name"));
    memset(folder, 'x', sizeof(folder));
    for (size_t len = 90; len < 120; len++) {
        folder[len] = '\0';
        ck_assert_int_eq(tl_unix_address_in_folder(&first, folder, "12345"), len + 6 < sizeof(first.address.sun_path));
        folder[len] = 'x';
    }
}
END_TEST

/* A packet without the bytes is dropped wherever it differs, also one that is too short for them. */
START_TEST(filtered)
{
    static const uint8_t bytes[] = {1, 2, 3, 4, 5, 6, 7, 200};
    struct tl_unix_address address;
    uint8_t packet[4 + sizeof(bytes)] = {0}, received[64];
    size_t len_bytes;
    struct ucred sender;
    tl_unix_address_choose(&address, "test-");
    int to = make_socket(&address), from = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    ck_assert(tl_unix_socket_filter(to, 4, bytes, sizeof(bytes)));
    memcpy(packet + 4, bytes, sizeof(bytes));
    for (size_t i = 0; i < sizeof(bytes); i++) {
        packet[4 + i] ^= 1;
        ck_assert(tl_unix_socket_send(from, &address, packet, sizeof(packet), NULL, 0));
        packet[4 + i] ^= 1;
        ck_assert(tl_unix_socket_send(from, &address, packet, 4 + i, NULL, 0));
    }
    ck_assert_int_eq(tl_unix_socket_peek(to, received, sizeof(received), &len_bytes, &sender), TL_UNIX_NOTHING);
    ck_assert(tl_unix_socket_send(from, &address, packet, sizeof(packet), NULL, 0));
    for (unsigned i = 0; i < 2; i++) { /* peeking leaves the packet */
        ck_assert_int_eq(tl_unix_socket_peek(to, received, sizeof(received), &len_bytes, &sender), TL_UNIX_PACKET);
        ck_assert_uint_eq(len_bytes, sizeof(packet));
        ck_assert_int_eq(sender.pid, getpid());
        ck_assert_uint_eq(sender.uid, geteuid());
    }
    ck_assert_int_eq(tl_unix_socket_peek(to, received, 5, &len_bytes, &sender), TL_UNIX_WRONG);
    close(to);
    ck_assert(!tl_unix_socket_send(from, &address, packet, sizeof(packet), NULL, 0));
    close(from);
}
END_TEST

/* Each count of descriptors arrives; with more there is no packet, and none of them stays open. */
START_TEST(descriptors)
{
    int ends[2], sent[TL_UNIX_MAX_DESCRIPTORS], fds[TL_UNIX_MAX_DESCRIPTORS];
    char byte = 0, word[4];
    size_t len_bytes, fd_count;
    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    for (size_t i = 0; i < TL_UNIX_MAX_DESCRIPTORS; i++)
        sent[i] = ends[i % 2];
    ck_assert_int_eq(tl_unix_socket_receive(ends[0], word, 4, &len_bytes, fds, &fd_count), TL_UNIX_NOTHING);
    for (size_t i = 0; i <= TL_UNIX_MAX_DESCRIPTORS; i++) {
        ck_assert(tl_unix_socket_send(ends[1], NULL, "abc", 3, sent, i));
        ck_assert_int_eq(tl_unix_socket_receive(ends[0], word, 4, &len_bytes, fds, &fd_count), TL_UNIX_PACKET);
        ck_assert_uint_eq(len_bytes, 3);
        ck_assert_uint_eq(fd_count, i);
        for (size_t j = 0; j < i; j++) {
            ck_assert(is_open(fds[j]));
            close(fds[j]);
        }
    }
    int next = dup(ends[0]);
    close(next);
    ck_assert(tl_unix_socket_send(ends[1], NULL, "abc", 3, sent, 1));
    ck_assert_int_eq(tl_unix_socket_receive(ends[0], word, 2, &len_bytes, fds, &fd_count), TL_UNIX_WRONG);
    ck_assert(!is_open(next));
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(12 * sizeof(int))];
    } control = {.header = {.cmsg_len = CMSG_LEN(12 * sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    for (size_t i = 0; i < 12; i++)
        memcpy(CMSG_DATA(&control.header) + i * sizeof(int), &ends[0], sizeof(int));
    struct iovec part = {.iov_base = &byte, .iov_len = 1};
    const struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    ck_assert_int_eq(sendmsg(ends[1], &message, 0), 1);
    ck_assert_int_eq(tl_unix_socket_receive(ends[0], word, 4, &len_bytes, fds, &fd_count), TL_UNIX_WRONG);
    ck_assert_uint_eq(fd_count, 0);
    ck_assert(!is_open(next));
    /* An empty packet is an end; what it has is closed. */
    part.iov_len = 0;
    ck_assert_int_eq(sendmsg(ends[1], &message, 0), 0);
    ck_assert_int_eq(tl_unix_socket_receive(ends[0], word, 4, &len_bytes, fds, &fd_count), TL_UNIX_END);
    ck_assert(!is_open(next));
    close(ends[1]);
    ck_assert_int_eq(tl_unix_socket_receive(ends[0], word, 4, &len_bytes, fds, &fd_count), TL_UNIX_END);
    close(ends[0]);
}
END_TEST

START_TEST(files_of_the_dead)
{
    struct tl_unix_address lives, dead, other, other_suffix, other_kind;
    temp_folder_make();
    ck_assert(tl_unix_address_in_folder(&lives, temp_folder, "test-1.sock"));
    ck_assert(tl_unix_address_in_folder(&dead, temp_folder, "test-2.sock"));
    ck_assert(tl_unix_address_in_folder(&other, temp_folder, "other.sock"));
    ck_assert(tl_unix_address_in_folder(&other_suffix, temp_folder, "test-3.other"));
    ck_assert(tl_unix_address_in_folder(&other_kind, temp_folder, "test-4.sock"));
    int fd = make_socket(&lives), kind_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert(tl_unix_socket_bind(kind_fd, &other_kind) && listen(kind_fd, 1) == 0);
    char file[256], link[256];
    snprintf(file, sizeof(file), "%s/test-5.sock", temp_folder);
    snprintf(link, sizeof(link), "%s/test-6.sock", temp_folder);
    close(open(file, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    ck_assert_int_eq(symlink(file, link), 0);
    close(make_socket(&other_suffix));
    close(make_socket(&dead));
    close(make_socket(&other));
    tl_unix_socket_clean_folder(temp_folder, "test-", ".sock");
    ck_assert_int_eq(access(lives.address.sun_path, F_OK), 0);
    ck_assert_int_ne(access(dead.address.sun_path, F_OK), 0);
    ck_assert_int_eq(access(other.address.sun_path, F_OK), 0);
    ck_assert_int_eq(access(other_suffix.address.sun_path, F_OK), 0);
    ck_assert_int_eq(access(other_kind.address.sun_path, F_OK), 0);
    ck_assert_int_eq(access(link, F_OK), 0); /* the link and the file */
    close(fd);
    close(kind_fd);
    temp_folder_remove();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("unix_socket");
    TCase *tcase = tcase_create("unix_socket");
    tcase_add_test(tcase, names);
    tcase_add_test(tcase, filtered);
    tcase_add_test(tcase, descriptors);
    tcase_add_test(tcase, files_of_the_dead);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
