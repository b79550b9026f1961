// SPDX-License-Identifier: Apache-2.0
/*
 * The local provider between processes: peers that are killed, restart, belong to another user, or pass what they
 * should not; and what they leave behind.
 */
#include <fcntl.h>
#include <grp.h>
#include <linux/memfd.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dataplane/local/local_internal.h"
#include "dataplane/memory/pages.h"
#include "fakes/forker.h"
#include "fakes/local_caller.h"
#include "fakes/local_sides.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"

#define LARGE_BYTES (64 * MIB)
#define NOBODY 65534

static struct tl_pair_address theirs;
static int fd;

/* ---------------------------------------------------------------------------------------------- the other side -- */

/* Connects b in the child to the parent. Returns false when the parent has gone. */
static bool child_connects(int fd_, const struct tl_local_options *options)
{
    struct tl_pair_address parents;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* set again, because a change of the user clears it */
    a = (struct side){.name = "a"};
    side_open(&b, "child", options);
    side_create(&b, 16, 16, TL_KEYS_REGION);
    send_address(fd_, &b);
    if (!receive_address(fd_, &parents)) return false;
    side_connect(&b, &parents);
    return true;
}

/* Exposes memory, sends its descriptor, and answers messages until the end. */
static int child_that_receives(int fd_)
{
    struct tl_exposure exposure = {0};
    if (!child_connects(fd_, NULL)) return 1;
    struct tl_region *region = side_map(&b, LARGE_BYTES);
    side_expose(&b, region, region->address, LARGE_BYTES, &exposure);
    side_message(&b, &exposure.descriptor, sizeof(exposure.descriptor), NULL);
    b.answers = true;
    while (!b.drained)
        side_poll(&b);
    region_drop(region);
    side_close(&b);
    return 0;
}

/* Receives a descriptor, and writes from its own memory to the exposed memory until the end. */
static int child_that_sends(int fd_)
{
    struct tl_exposure exposure = {0};
    uint8_t *source = malloc(LARGE_BYTES);
    if (!child_connects(fd_, NULL)) return 1;
    memset(source, 7, LARGE_BYTES);
    while (b.last_len == 0 && !b.drained)
        side_poll(&b);
    memcpy(&exposure.descriptor, b.last, sizeof(exposure.descriptor));
    while (!b.drained) {
        side_poll(&b);
        if (b.drained || b.pair->ops->space(b.pair) < 2) continue;
        side_write(&b, source, LARGE_BYTES, &exposure, 0, true, 1, NULL);
    }
    side_close(&b);
    return 0;
}

static int child_that_waits(int fd_)
{
    if (!child_connects(fd_, NULL)) return 1;
    b.answers = true;
    while (!b.drained)
        side_poll(&b);
    side_close(&b);
    return 0;
}

/* Creates a in this process, and starts a child to connect it to. The word is sent to the child first; NULL: none. */
static pid_t start_with(int (*child)(int fd_), const char *word)
{
    side_create(&a, 16, 16, TL_KEYS_REGION);
    pid_t pid = forker_start(child, &fd);
    if (word != NULL) ck_assert(forker_pass(fd, word, strlen(word) + 1, -1));
    ck_assert(receive_address(fd, &theirs));
    send_address(fd, &a);
    return pid;
}

static pid_t start(int (*child)(int fd_))
{
    return start_with(child, NULL);
}

static void setup(void)
{
    forker_open();
    b = (struct side){.name = "b"};
    side_open(&a, "a", NULL);
    side_poll(&a);
}

static void teardown(void)
{
    side_close(&a);
    forker_close();
}

static int wait_for(pid_t pid)
{
    int status = forker_wait(pid);
    close(fd);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void wait_for_end_of(pid_t pid)
{
    ck_assert_int_eq(kill(pid, SIGKILL), 0);
    int64_t begun_ns = tl_clock_now_ns();
    PUMP_UNTIL(a.drained);
    ck_assert_int_lt(tl_clock_now_ns() - begun_ns, 20 * TL_NS_PER_SEC);
    (void)wait_for(pid);
    ck_assert_int_eq(a.reason.code, TL_UNAVAILABLE);
    a.pair->ops->destroy(a.pair);
    a.pair = NULL;
}

/* ----------------------------------------------------------------------------------------------------- killing -- */

START_TEST(a_child_answers)
{
    pid_t pid = start(child_that_waits);
    side_connect(&a, &theirs);
    for (unsigned i = 1; i <= 100; i++) {
        side_message(&a, &i, sizeof(i), NULL);
        PUMP_UNTIL(a.messages == i);
        ck_assert_mem_eq(a.last, &i, sizeof(i));
    }
    side_end(&a);
    ck_assert_int_eq(wait_for(pid), 0);
}
END_TEST

/* The peer is killed while we write into its memory. */
START_TEST(a_reader_is_killed)
{
    static uint8_t source[LARGE_BYTES];
    unsigned descriptors = count_descriptors(), mappings = count_mappings();
    for (unsigned i = 0; i < 6; i++) {
        struct tl_exposure exposure = {0};
        struct job jobs[8];
        pid_t pid = start(child_that_receives);
        side_connect(&a, &theirs);
        PUMP_UNTIL(a.messages == 1);
        memcpy(&exposure.descriptor, a.last, sizeof(exposure.descriptor));
        unsigned posted = 0;
        for (; posted < 8 && a.pair->ops->space(a.pair) > 0; posted++) {
            jobs[posted] = new_job();
            side_write(&a, source, i < 3 ? LARGE_BYTES : 3 * MIB, &exposure, 0, true, posted, &jobs[posted]);
        }
        if (i > 3) PUMP_UNTIL(jobs[0].done > 0);
        wait_for_end_of(pid);
        for (unsigned j = 0; j < posted; j++)
            ck_assert_uint_eq(jobs[j].done, 1);
    }
    PUMP_UNTIL(count_descriptors() == descriptors);
    PUMP_UNTIL(count_mappings() == mappings);
}
END_TEST

/* The writer is killed while it writes, or while we read its memory: bytes without an immediate do not count. */
START_TEST(a_writer_is_killed)
{
    unsigned descriptors = count_descriptors(), mappings = count_mappings();
    for (unsigned i = 0; i < 8; i++) {
        struct tl_exposure exposure = {0};
        struct tl_region *region = side_map(&a, LARGE_BYTES);
        uint8_t *users = malloc(LARGE_BYTES);
        pid_t pid = start(child_that_sends);
        side_connect(&a, &theirs);
        side_message(&a, "", 0, NULL); /* the pair is connected when this message has left */
        PUMP_UNTIL(a.pair->ops->space(a.pair) == 16);
        bool is_users = i % 2 == 1 && a.pair->outside_refusal == NULL;
        side_expose(&a, is_users ? NULL : region, is_users ? users : region->address, LARGE_BYTES, &exposure);
        a.watched = (uint8_t *)(is_users ? (void *)users : region->address) + LARGE_BYTES - 1;
        side_message(&a, &exposure.descriptor, sizeof(exposure.descriptor), NULL);
        if (i % 4 >= 2) {
            PUMP_UNTIL(a.immediates > 0);
            ck_assert_uint_eq(a.watched_value, 7);
        } else {
            for (unsigned j = 0; j < 20; j++)
                side_poll(&a);
        }
        wait_for_end_of(pid);
        region_drop(region);
        free(users);
    }
    side_poll(&a);
    PUMP_UNTIL(count_descriptors() == descriptors);
    PUMP_UNTIL(count_mappings() == mappings);
}
END_TEST

/* A child of the peer holds the peer's socket too, as if it had inherited it: the end of the peer is noticed all the
 * same. The child is forked before there are threads, and then gets the socket. */
static int child_that_forks(int fd_)
{
    int fds[2], socket_;
    char byte = 0;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0) return 1;
    pid_t heir = fork();
    if (heir == 0) {
        (void)forker_take(fds[0], &byte, sizeof(byte), &socket_);
        sleep(60);
        _exit(0);
    }
    if (!child_connects(fd_, NULL)) return 1;
    side_message(&b, "x", 1, NULL);
    while (b.pair->ops->space(b.pair) < 16)
        side_poll(&b);
    if (!forker_pass(fds[1], &byte, sizeof(byte), local_pair_of(b.pair)->sockets.out)) return 1;
    b.messages = 0;
    while (b.messages == 0)
        side_poll(&b);
    side_message(&b, &heir, sizeof(heir), NULL);
    while (true)
        pause();
}

START_TEST(a_peer_that_has_forked_is_killed)
{
    pid_t heir;
    pid_t pid = start(child_that_forks);
    side_connect(&a, &theirs);
    PUMP_UNTIL(a.messages == 1);
    side_message(&a, "x", 1, NULL);
    PUMP_UNTIL(a.messages == 2);
    memcpy(&heir, a.last, sizeof(heir));
    wait_for_end_of(pid);
    (void)kill(heir, SIGKILL);
}
END_TEST

START_TEST(a_peer_restarts)
{
    for (unsigned i = 0; i < 10; i++) {
        pid_t pid = start(child_that_waits);
        side_connect(&a, &theirs);
        side_message(&a, "hello", 5, NULL);
        PUMP_UNTIL(a.messages == 1);
        if (i % 2 == 0) {
            wait_for_end_of(pid);
        } else {
            side_end(&a);
            ck_assert_int_eq(wait_for(pid), 0);
        }
    }
}
END_TEST

START_TEST(no_worker_at_the_socket)
{
    struct tl_error error;
    pid_t pid = start(child_that_waits);
    ck_assert_int_eq(kill(pid, SIGKILL), 0);
    (void)wait_for(pid);
    ck_assert_int_eq(a.pair->ops->connect(a.pair, &theirs, &error), TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(error.message, "no worker answers"));
    a.pair->ops->destroy(a.pair);
    a.pair = NULL;
}
END_TEST

/* --------------------------------------------------------------------------------------------------- addresses -- */

static enum tl_status connect_with(const struct local_address *pair_address, struct tl_error *ret_error)
{
    struct tl_pair_address bytes;
    local_address_write(pair_address, &bytes);
    return a.pair->ops->connect(a.pair, &bytes, ret_error);
}

START_TEST(addresses_that_do_not_fit)
{
    struct local_address pair_address;
    struct tl_pair_address own;
    struct tl_error error;
    side_create(&a, 16, 16, TL_KEYS_REGION);
    side_get_address(&a, &own);
    ck_assert_int_eq(a.pair->ops->connect(a.pair, &own, &error), TL_INVALID_ARGUMENT);
    own.len_bytes--;
    ck_assert_int_eq(a.pair->ops->connect(a.pair, &own, &error), TL_INVALID_ARGUMENT);
    own.len_bytes++;
    ck_assert(local_address_read(&own, &pair_address));
    pair_address.token[0] ^= 1;
    pair_address.host_id[5] ^= 1;
    ck_assert_int_eq(connect_with(&pair_address, &error), TL_FAILED_PRECONDITION);
    ck_assert_ptr_nonnull(strstr(error.message, "another host"));
    pair_address.host_id[5] ^= 1;
    pair_address.name[pair_address.name_bytes - 1] ^= 1;
    ck_assert_int_eq(connect_with(&pair_address, &error), TL_UNAVAILABLE);
    /* The name is that of a socket which no worker has made. */
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "\0somebody"};
    int other = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(other, (const struct sockaddr *)&address, offsetof(struct sockaddr_un, sun_path) + 9), 0);
    memcpy(pair_address.name, address.sun_path, 9);
    pair_address.name_bytes = 9;
    ck_assert_int_eq(connect_with(&pair_address, &error), TL_UNAVAILABLE);
    ck_assert_int_lt(recv(other, &pair_address, 1, MSG_DONTWAIT), 0);
    close(other);
    a.pair->ops->destroy(a.pair);
    a.pair = NULL;
}
END_TEST

/* ------------------------------------------------------------------------------------------------- credentials -- */

static int child_of_another_user(int fd_)
{
    if (setgroups(0, NULL) != 0 || setresgid(NOBODY, NOBODY, NOBODY) != 0 || setresuid(NOBODY, NOBODY, NOBODY) != 0)
        return 77;
    if (!child_connects(fd_, NULL)) return 1;
    b.answers = true;
    while (!b.drained)
        side_poll(&b);
    return 0;
}

START_TEST(another_user)
{
    if (geteuid() != 0) return; /* Only root can start a process of another user. */
    side_close(&a);
    side_open(&a, "a", NULL);
    pid_t pid = start(child_of_another_user);
    side_connect(&a, &theirs);
    PUMP_UNTIL(a.drained);
    ck_assert_int_eq(a.reason.code, TL_PERMISSION_DENIED);
    ck_assert_ptr_nonnull(strstr(a.reason.message, "user 65534 and this worker to user 0"));
    side_end(&a);
    (void)kill(pid, SIGKILL);
    (void)wait_for(pid);
}
END_TEST

/* In a container with users of its own the kernel shows every user that is unknown there as one number. A worker that
 * runs under that number accepts none of them. */
START_TEST(an_unknown_user_of_a_container)
{
    const struct local_provider provider = {.own_uid = NOBODY, .unknown_uid = NOBODY};
    struct tl_error error;
    ck_assert_int_eq(local_check_user(&provider, NOBODY, &error), TL_PERMISSION_DENIED);
    ck_assert_ptr_nonnull(strstr(error.message, "no number in this container"));
}
END_TEST

static struct local_caller caller;
static struct local_address to;

/* Creates a, and a peer that the test plays by hand. Each gets the other one's address, and a has sent its HELLO. */
static void set_up_caller(void)
{
    struct tl_pair_address bytes;
    side_create(&a, 16, 16, TL_KEYS_REGION);
    side_get_address(&a, &bytes);
    ck_assert(local_address_read(&bytes, &to));
    caller_open(&caller, &to);
    local_address_write(&caller.self, &bytes);
    side_connect(&a, &bytes);
}

/* A side that is refused only sees that the peer hangs up; the reason names the likely cause. */
START_TEST(one_that_hangs_up)
{
    struct local_hello hello;
    set_up_caller();
    close(caller_take(&caller, &hello));
    caller_close(&caller);
    PUMP_UNTIL(a.drained);
    ck_assert_int_eq(a.reason.code, TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(a.reason.message, "another user"));
    side_end(&a);
}
END_TEST

/* Sends a HELLO to a and ends, so that another process could get its process id. */
static int child_that_calls(int fd_)
{
    struct tl_pair_address bytes;
    if (!receive_address(fd_, &bytes) || !local_address_read(&bytes, &to)) return 1;
    struct local_hello hello = caller_hello(&to, 16);
    int memory = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memory < 0 || ftruncate(memory, (off_t)local_ring_bytes(16)) != 0) return 1;
    if (fcntl(memory, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK) != 0) return 1;
    caller_open(&caller, &to);
    const int fds[] = {caller.peers_end, memory, caller.wake_in};
    return caller_say(&to, &hello, sizeof(hello), fds, LOCAL_HELLO_DESCRIPTORS) ? 0 : 1;
}

START_TEST(one_that_calls_and_dies)
{
    set_up_caller();
    pid_t pid = forker_start(child_that_calls, &fd);
    send_address(fd, &a);
    ck_assert_int_eq(wait_for(pid), 0);
    PUMP_UNTIL(a.drained);
    ck_assert_int_eq(a.reason.code, TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(a.reason.message, "process has ended"));
    caller_close(&caller);
    side_end(&a);
}
END_TEST

/* ------------------------------------------------------------------------------------------ what may be passed -- */

static int make_memory(const char *how, uint64_t len_bytes)
{
    int memory = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    ck_assert_int_ge(memory, 0);
    ck_assert_int_eq(ftruncate(memory, (off_t)len_bytes), 0);
    int seals = strcmp(how, "unsealed") == 0      ? 0
                : strcmp(how, "can shrink") == 0  ? F_SEAL_GROW
                : strcmp(how, "keeps holes") == 0 ? F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL
                                                  : F_SEAL_GROW | F_SEAL_SHRINK;
    ck_assert_int_eq(fcntl(memory, F_ADD_SEALS, seals), 0);
    return memory;
}

static bool is_hung_up(void)
{
    uint8_t bytes[256];
    return recv(caller.in, bytes, sizeof(bytes), MSG_DONTWAIT) == 0;
}

START_TEST(rings_that_may_not_be)
{
    static const struct {
        const char *how;
        int64_t more_bytes;
        uint32_t slots;
    } rings[] = {{"unsealed", 0, 16}, {"can shrink", 0, 16}, {"sealed", -4096, 16},   {"sealed", 4096, 16},
                 {"sealed", 0, 17},   {"sealed", 0, 0},      {"sealed", 0, 1u << 31}, {"keeps holes", 0, 16}};
    unsigned mappings = count_mappings();
    set_up_caller();
    const struct local_hello hello = caller_hello(&to, rings[_i].slots);
    uint64_t len_bytes =
        local_ring_bytes(rings[_i].slots > 1000 ? 16 : rings[_i].slots) + (uint64_t)rings[_i].more_bytes;
    int memory = make_memory(rings[_i].how, len_bytes);
    caller_call(&caller, &to, &hello, memory);
    PUMP_UNTIL(a.drained);
    ck_assert_ptr_nonnull(strstr(a.reason.message, "broken the protocol"));
    PUMP_UNTIL(is_hung_up());
    close(memory);
    caller_close(&caller);
    side_end(&a);
    PUMP_UNTIL(count_mappings() == mappings);
}
END_TEST

/* The kernel drops a HELLO without the right token, and the pair does not notice it: the right peer can still
 * connect. */
START_TEST(strangers_who_call)
{
    unsigned descriptors = count_descriptors();
    set_up_caller();
    struct local_hello hello = caller_hello(&to, 16);
    hello.to[_i] ^= 1;
    int memory = make_memory("sealed", local_ring_bytes(16));
    const int fds[] = {caller.peers_end, memory, caller.wake_in};
    for (unsigned i = 0; i < 1000; i++) /* more than the socket could hold */
        ck_assert(caller_say(&to, &hello, i % 2 == 0 ? sizeof(hello) : 30, fds, LOCAL_HELLO_DESCRIPTORS));
    hello = caller_hello(&to, 16);
    caller_call(&caller, &to, &hello, memory);
    side_message(&a, "x", 1, NULL);
    PUMP_UNTIL(a.pair->ops->space(a.pair) == 16);
    close(memory);
    caller_close(&caller);
    side_end(&a);
    PUMP_UNTIL(count_descriptors() == descriptors);
}
END_TEST

/* Whether the accept socket of this side has got something. */
static bool has_packet(const struct side *side)
{
    char byte;
    return recv(local_pair_of(side->pair)->sockets.accept, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0;
}

/* A peer presents the token that its own connection was given where another peer is expected. All abstract names are
 * in /proc/net/unix, so that it knows that one's accept socket. */
START_TEST(token_of_another_pair)
{
    struct side other = {.name = "other", .provider = a.provider};
    struct tl_pair_address from_other, from_b;
    struct local_address others, expected;
    set_up_caller();
    side_open(&b, "b", NULL);
    side_create(&b, 16, 16, TL_KEYS_REGION);
    side_create(&other, 16, 16, TL_KEYS_REGION);
    side_get_address(&b, &from_b);
    side_get_address(&other, &from_other);
    side_connect(&other, &from_b);
    ck_assert(local_address_read(&from_other, &others) && local_address_read(&from_b, &expected));
    int memory = make_memory("sealed", local_ring_bytes(16));
    const int fds[] = {caller.peers_end, memory, caller.wake_in};
    struct local_hello hello = caller_hello(&to, 16);
    ck_assert(caller_say(&others, &hello, sizeof(hello), fds, LOCAL_HELLO_DESCRIPTORS));
    memcpy(hello.from, expected.token, sizeof(hello.from)); /* not even if it knew that one */
    ck_assert(caller_say(&others, &hello, sizeof(hello), fds, LOCAL_HELLO_DESCRIPTORS));
    ck_assert(!has_packet(&other));
    side_connect(&b, &from_other);
    side_message(&b, "x", 1, NULL);
    side_message(&other, "x", 1, NULL);
    PUMP_UNTIL(b.messages == 1 && other.messages == 1);
    ck_assert(!a.drained);
    /* Where the token belongs, another one's name does not help either. */
    ck_assert(caller_say(&to, &hello, sizeof(hello), fds, LOCAL_HELLO_DESCRIPTORS));
    PUMP_UNTIL(a.drained || local_pair_of(a.pair)->state == LOCAL_CONNECTED);
    ck_assert_msg(a.drained, "it is connected");
    ck_assert_ptr_nonnull(strstr(a.reason.message, "another process"));
    ck_assert(!b.drained && !other.drained);
    close(memory);
    caller_close(&caller);
    side_end(&a);
    side_end(&other);
    side_close(&b);
}
END_TEST

/* The first process that presents a token has the connection; the second one has nothing, whether it comes before that
 * was noticed or later. */
START_TEST(token_that_is_used_twice)
{
    unsigned descriptors = count_descriptors();
    struct local_caller second;
    set_up_caller();
    caller_open(&second, &to);
    struct local_hello hello = caller_hello(&to, 16);
    int memory = make_memory("sealed", local_ring_bytes(16));
    const int fds[] = {second.peers_end, memory, second.wake_in};
    caller_call(&caller, &to, &hello, memory);
    ck_assert(caller_say(&to, &hello, sizeof(hello), fds, LOCAL_HELLO_DESCRIPTORS));
    close(second.peers_end);
    second.peers_end = -1;
    side_message(&a, "x", 1, NULL);
    PUMP_UNTIL(a.pair->ops->space(a.pair) == 16);
    char byte;
    ck_assert_int_eq(recv(second.in, &byte, 1, MSG_DONTWAIT), 0); /* what it has passed is closed */
    ck_assert(!is_hung_up());
    ck_assert(!caller_say(&to, &hello, sizeof(hello), NULL, 0));
    close(memory);
    caller_close(&second);
    caller_close(&caller);
    side_end(&a);
    PUMP_UNTIL(count_descriptors() == descriptors);
}
END_TEST

/* The next connection with the same peer has a token and an accept socket of its own. */
START_TEST(token_of_an_ended_pair)
{
    struct local_hello hello;
    set_up_caller();
    const struct local_address ended = to;
    close(caller_take(&caller, &hello));
    caller_close(&caller);
    PUMP_UNTIL(a.drained);
    side_end(&a);
    a = (struct side){.name = "a", .provider = a.provider};
    set_up_caller();
    ck_assert(memcmp(to.token, ended.token, sizeof(to.token)) != 0);
    int memory = make_memory("sealed", local_ring_bytes(16));
    const int fds[] = {caller.peers_end, memory, caller.wake_in};
    hello = caller_hello(&ended, 16);
    ck_assert(!caller_say(&ended, &hello, sizeof(hello), fds, LOCAL_HELLO_DESCRIPTORS));
    ck_assert(caller_say(&to, &hello, sizeof(hello), fds, LOCAL_HELLO_DESCRIPTORS));
    ck_assert(!has_packet(&a));
    hello = caller_hello(&to, 16);
    caller_call(&caller, &to, &hello, memory);
    side_message(&a, "x", 1, NULL);
    PUMP_UNTIL(a.pair->ops->space(a.pair) == 16);
    close(memory);
    caller_close(&caller);
    side_end(&a);
}
END_TEST

/* A process that knows the token sends an invalid HELLO. */
START_TEST(calls_that_may_not_be)
{
    unsigned descriptors = count_descriptors();
    set_up_caller();
    struct local_hello hello = caller_hello(&to, 16);
    int memory = make_memory("sealed", local_ring_bytes(16));
    int fds[] = {caller.peers_end, memory, caller.wake_in, memory};
    size_t len_bytes = sizeof(hello), fd_count = LOCAL_HELLO_DESCRIPTORS;
    switch (_i) {
    case 0:
        hello.from[3] ^= 1;
        break;
    case 1:
        hello.protocol++;
        break;
    case 2:
        hello.kind = LOCAL_PACKET_ATTACH;
        break;
    case 3:
        len_bytes--;
        break;
    case 4:
        fd_count = 0;
        break;
    case 5:
        fd_count = 1;
        break;
    case 6: /* there is no eventfd, as in an earlier release */
        fd_count = 2;
        break;
    default:
        fd_count = 4;
        break;
    }
    ck_assert(caller_say(&to, &hello, len_bytes, fds, fd_count));
    PUMP_UNTIL(a.drained);
    ck_assert_ptr_nonnull(strstr(a.reason.message, "broken the protocol"));
    close(memory);
    caller_close(&caller);
    side_end(&a);
    PUMP_UNTIL(count_descriptors() == descriptors);
}
END_TEST

/* Instead of its eventfd a peer passes what a write could wait for, or what raises a signal when it is written. */
static int make_wrong_eventfd(int how)
{
    int ends[2];
    if (how == 0) return make_memory("sealed", 4096);
    if (how == 1) return eventfd(0, EFD_CLOEXEC); /* a write waits while the count is at its maximum */
    if (how == 2) return epoll_create1(EPOLL_CLOEXEC);
    if (how == 3)
        ck_assert_int_eq(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
    else
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    close(ends[0]);
    return ends[1];
}

/* Only that connection ends: another one of the same provider goes on. */
START_TEST(eventfds_that_may_not_be)
{
    unsigned descriptors = count_descriptors();
    struct side other = {.name = "other", .provider = a.provider};
    struct tl_pair_address from_other, from_b;
    side_open(&b, "b", NULL);
    side_create(&b, 16, 16, TL_KEYS_REGION);
    side_create(&other, 16, 16, TL_KEYS_REGION);
    side_get_address(&b, &from_b);
    side_get_address(&other, &from_other);
    side_connect(&b, &from_other);
    side_connect(&other, &from_b);
    set_up_caller();
    const struct local_hello hello = caller_hello(&to, 16);
    int memory = make_memory("sealed", local_ring_bytes(16)), wrong = make_wrong_eventfd(_i);
    const int fds[] = {caller.peers_end, memory, wrong};
    ck_assert(caller_say(&to, &hello, sizeof(hello), fds, LOCAL_HELLO_DESCRIPTORS));
    PUMP_UNTIL(a.drained);
    ck_assert_ptr_nonnull(strstr(a.reason.message, "without an eventfd"));
    side_message(&b, "x", 1, NULL);
    side_message(&other, "x", 1, NULL);
    PUMP_UNTIL(b.messages == 1 && other.messages == 1);
    close(memory);
    close(wrong);
    caller_close(&caller);
    side_end(&a);
    side_end(&other);
    side_close(&b);
    PUMP_UNTIL(count_descriptors() == descriptors);
}
END_TEST

/* Invalid segments are passed after the connection was made. */
START_TEST(segments_that_may_not_be)
{
    static const struct {
        const char *how;
        uint64_t len_bytes, said_bytes;
        uint32_t number;
    } segments[] = {{"unsealed", 8192, 8192, 1},   {"sealed", 4096, 8192, 1}, {"sealed", 8192, 8192, 2},
                    {"sealed", 8192, 8191, 1},     {"sealed", 8192, 0, 1},    {"sealed", 8192, UINT64_MAX - 4095, 1},
                    {"keeps holes", 8192, 8192, 1}};
    set_up_caller();
    struct local_hello hello = caller_hello(&to, 16);
    int ring = make_memory("sealed", local_ring_bytes(16));
    caller_call(&caller, &to, &hello, ring);
    close(caller_take(&caller, &hello));
    int memory = make_memory(segments[_i].how, segments[_i].len_bytes);
    const struct local_segment_packet packet = {
        .kind = LOCAL_PACKET_ATTACH, .number = segments[_i].number, .len_bytes = segments[_i].said_bytes};
    ck_assert(local_send(caller.out, &packet, sizeof(packet), memory));
    PUMP_UNTIL(a.drained);
    ck_assert_ptr_nonnull(strstr(a.reason.message, "broken the protocol"));
    close(memory);
    close(ring);
    caller_close(&caller);
}
END_TEST

/* ------------------------------------------------------------------------------------------------ socket files -- */

static int child_in_folder(int fd_)
{
    char folder[200];
    int no_fd;
    if (forker_take(fd_, folder, sizeof(folder), &no_fd) == 0) return 1;
    if (!child_connects(fd_, &(struct tl_local_options){.socket_folder = folder})) return 1;
    b.answers = true;
    while (!b.drained)
        side_poll(&b);
    side_close(&b);
    return 0;
}

START_TEST(sockets_in_a_folder)
{
    temp_folder_make();
    const char *folder = temp_folder;
    const struct tl_local_options options = {.socket_folder = folder};
    side_close(&a);
    side_open(&a, "a", &options);
    pid_t pid = start_with(child_in_folder, folder);
    ck_assert_uint_eq(temp_entry_count(folder), 2); /* the accept sockets of both sides */
    struct stat info;
    ck_assert_int_eq(stat((const char *)local_pair_of(a.pair)->self.name, &info), 0);
    ck_assert_uint_eq(info.st_mode & 0777, 0600); /* other users cannot send to it */
    side_connect(&a, &theirs);
    side_message(&a, "x", 1, NULL);
    PUMP_UNTIL(a.messages == 1);
    ck_assert_uint_eq(temp_entry_count(folder), 0); /* the pairs are connected, so that their sockets are removed */
    wait_for_end_of(pid);
    pid = start_with(child_in_folder, folder);
    ck_assert_int_eq(kill(pid, SIGKILL), 0);
    (void)wait_for(pid);
    ck_assert_uint_eq(temp_entry_count(folder), 2); /* the killed process could not remove its file */
    struct tl_provider *next;
    struct tl_error error;
    ck_assert_msg(tl_local_open(&options, &next, &error) == TL_OK, "%s", error.message);
    ck_assert_uint_eq(temp_entry_count(folder), 1); /* the file of a's own socket stays */
    next->ops->close(next);
    side_close(&a);
    ck_assert_uint_eq(temp_entry_count(folder), 0);
    temp_folder_remove();
}
END_TEST

START_TEST(folders_that_cannot_be_used)
{
    temp_folder_make();
    const char *folder = temp_folder;
    char path[400];
    struct tl_error error;
    struct tl_provider *provider;
    unsigned descriptors = count_descriptors();
    snprintf(path, sizeof(path), "%s/none", folder);
    ck_assert_int_eq(tl_local_open(&(struct tl_local_options){.socket_folder = path}, &provider, &error), TL_NOT_FOUND);
    memset(path, 'x', 200);
    path[0] = '/';
    path[200] = '\0';
    ck_assert_int_eq(tl_local_open(&(struct tl_local_options){.socket_folder = path}, &provider, &error),
                     TL_INVALID_ARGUMENT);
    ck_assert_ptr_nonnull(strstr(error.message, "local.socket_folder"));
    PUMP_UNTIL(count_descriptors() == descriptors);
    temp_folder_remove();
}
END_TEST

/* A program that is executed inherits no descriptor. */
START_TEST(descriptors_are_closed_on_exec)
{
    pid_t pid = start(child_that_waits);
    side_connect(&a, &theirs);
    side_message(&a, "hello", 5, NULL);
    PUMP_UNTIL(a.messages == 1);
    struct tl_region *region = side_map(&a, 4096);
    FILE *listing = popen("ls -l /proc/self/fd | grep -c -e memfd -e socket -e eventpoll -e eventfd -e pidfd", "re");
    unsigned count = 99;
    ck_assert_int_eq(fscanf(listing, "%u", &count), 1);
    pclose(listing);
    ck_assert_uint_eq(count, 0);
    region_drop(region);
    side_end(&a);
    ck_assert_int_eq(wait_for(pid), 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("local_processes");
    TCase *tcase = tcase_create("local_processes");
    tcase_set_timeout(tcase, 100);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, a_child_answers);
    tcase_add_test(tcase, a_reader_is_killed);
    tcase_add_test(tcase, a_writer_is_killed);
    tcase_add_test(tcase, a_peer_that_has_forked_is_killed);
    tcase_add_test(tcase, a_peer_restarts);
    tcase_add_test(tcase, no_worker_at_the_socket);
    tcase_add_test(tcase, addresses_that_do_not_fit);
    tcase_add_test(tcase, one_that_hangs_up);
    tcase_add_test(tcase, one_that_calls_and_dies);
    tcase_add_test(tcase, another_user);
    tcase_add_test(tcase, an_unknown_user_of_a_container);
    tcase_add_loop_test(tcase, rings_that_may_not_be, 0, 8);
    tcase_add_loop_test(tcase, strangers_who_call, 0, LOCAL_TOKEN_BYTES);
    tcase_add_loop_test(tcase, calls_that_may_not_be, 0, 8);
    tcase_add_loop_test(tcase, eventfds_that_may_not_be, 0, 5);
    tcase_add_loop_test(tcase, segments_that_may_not_be, 0, 7);
    tcase_add_test(tcase, sockets_in_a_folder);
    tcase_add_test(tcase, folders_that_cannot_be_used);
    tcase_add_test(tcase, descriptors_are_closed_on_exec);
    suite_add_tcase(suite, tcase);
    TCase *tokens = tcase_create("tokens");
    tcase_add_checked_fixture(tokens, setup, teardown);
    tcase_add_test(tokens, token_of_another_pair);
    tcase_add_test(tokens, token_that_is_used_twice);
    tcase_add_test(tokens, token_of_an_ended_pair);
    suite_add_tcase(suite, tokens);
    return run_suite(suite);
}
