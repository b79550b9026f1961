// SPDX-License-Identifier: Apache-2.0
/*
 * The local provider between processes: peers that are killed in the middle of something, restart, are somebody else,
 * or pass what they should not; and what is left behind.
 */
#include <fcntl.h>
#include <grp.h>
#include <linux/memfd.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dataplane/local_internal.h"
#include "dataplane/pages.h"
#include "fakes/forker.h"
#include "fakes/local_sides.h"
#include "fakes/run_suite.h"
#include "fakes/temp_folder.h"

#define LARGE_BYTES (64 * MIB)
#define NOBODY 65534

static struct tl_introduction theirs;
static int fd;

/* ------------------------------------------------------------------------------------------------- the other side --
 */

/* Connects b of the child to the parent. False: the parent has gone. */
static bool child_connects(int fd_, const struct tl_local_options *options)
{
    struct tl_introduction parents;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* again, for one that has become somebody else */
    a = (struct side){.name = "a"};
    side_open(&b, "child", options);
    side_create(&b, 16, 16, TL_KEYS_REGION);
    send_introduction(fd_, &b);
    if (!receive_introduction(fd_, &parents)) return false;
    side_connect(&b, &parents);
    return true;
}

/* Exposes memory, tells of it, and answers until the end. */
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

/* Writes to the memory that it is told of, again and again, from memory of its own. */
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
        if (b.drained || b.pair->ops->room(b.pair) < 2) continue;
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

/* a of this process, and a child to connect it to, which is told a word first; NULL: none. */
static pid_t start_with(int (*child)(int fd_), const char *word)
{
    side_create(&a, 16, 16, TL_KEYS_REGION);
    pid_t pid = forker_start(child, &fd);
    if (word != NULL) ck_assert(forker_pass(fd, word, strlen(word) + 1, -1));
    ck_assert(receive_introduction(fd, &theirs));
    send_introduction(fd, &a);
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

/* ------------------------------------------------------------------------------------------------------- killing -- */

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

/* The reader is killed while we write into its memory. */
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
        for (; posted < 8 && a.pair->ops->room(a.pair) > 0; posted++) {
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

/* The writer is killed while it writes, or while we read its memory: what had not been told of does not count. */
START_TEST(a_writer_is_killed)
{
    unsigned descriptors = count_descriptors(), mappings = count_mappings();
    for (unsigned i = 0; i < 8; i++) {
        struct tl_exposure exposure = {0};
        struct tl_region *region = side_map(&a, LARGE_BYTES);
        uint8_t *users = malloc(LARGE_BYTES);
        pid_t pid = start(child_that_sends);
        side_connect(&a, &theirs);
        side_message(&a, "", 0, NULL); /* until this has left, nothing is known of the peer */
        PUMP_UNTIL(a.pair->ops->room(a.pair) == 16);
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

/* A child of the peer has its socket as well, as one that inherits it would: the peer's end is noticed all the same. It
 * is forked before there are threads, and is passed the socket. */
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
    while (b.pair->ops->room(b.pair) < 16)
        side_poll(&b);
    if (!forker_pass(fds[1], &byte, sizeof(byte), local_pair_of(b.pair)->socket)) return 1;
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

START_TEST(nobody_is_there)
{
    struct tl_error error;
    pid_t pid = start(child_that_waits);
    ck_assert_int_eq(kill(pid, SIGKILL), 0);
    (void)wait_for(pid);
    a.is_connected = a.pair->ops->connect(a.pair, &theirs, &error) == TL_OK;
    if (a.is_connected) return; /* it is he who dials */
    ck_assert_int_eq(error.code, TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(error.message, "nobody answers"));
    a.pair->ops->destroy(a.pair);
    a.pair = NULL;
}
END_TEST

/* -------------------------------------------------------------------------------------------------- introductions --
 */

static enum tl_status connect_with(const struct local_introduction *introduction, struct tl_error *ret_error)
{
    struct tl_introduction bytes;
    local_introduction_write(introduction, &bytes);
    return a.pair->ops->connect(a.pair, &bytes, ret_error);
}

START_TEST(introductions_that_do_not_fit)
{
    struct local_introduction introduction;
    struct tl_introduction own;
    struct tl_error error;
    side_create(&a, 16, 16, TL_KEYS_REGION);
    side_introduce(&a, &own);
    ck_assert_int_eq(a.pair->ops->connect(a.pair, &own, &error), TL_INVALID_ARGUMENT);
    own.len_bytes--;
    ck_assert_int_eq(a.pair->ops->connect(a.pair, &own, &error), TL_INVALID_ARGUMENT);
    own.len_bytes++;
    ck_assert(local_introduction_read(&own, &introduction));
    introduction.token[0] ^= 1;
    introduction.host_id[5] ^= 1;
    ck_assert_int_eq(connect_with(&introduction, &error), TL_FAILED_PRECONDITION);
    ck_assert_ptr_nonnull(strstr(error.message, "another host"));
    introduction.host_id[5] ^= 1;
    memset(introduction.token, 0xff, sizeof(introduction.token)); /* we dial */
    introduction.name[introduction.name_bytes - 1] ^= 1;
    ck_assert_int_eq(connect_with(&introduction, &error), TL_UNAVAILABLE);
    a.pair->ops->destroy(a.pair);
    a.pair = NULL;
}
END_TEST

/* --------------------------------------------------------------------------------------------------- credentials -- */

static int child_of_another_user(int fd_)
{
    if (setgroups(0, NULL) != 0 || setresgid(NOBODY, NOBODY, NOBODY) != 0 || setresuid(NOBODY, NOBODY, NOBODY) != 0)
        return 77;
    if (!child_connects(fd_, &(struct tl_local_options){.is_any_user_allowed = true})) return 1;
    b.answers = true;
    while (!b.drained)
        side_poll(&b);
    return 0;
}

/* In a container with users of its own, as the one that the kernel takes for all who are unknown there. */
static int child_in_a_container(int fd_)
{
    static const char map[] = "65534 12345 1";
    int map_fd = -1;
    if (setgroups(0, NULL) == 0 && setresuid(12345, 12345, 12345) == 0 && unshare(CLONE_NEWUSER) == 0 &&
        prctl(PR_SET_DUMPABLE, 1) == 0)
        map_fd = open("/proc/self/uid_map", O_WRONLY | O_CLOEXEC);
    /* Where that is forbidden it is somebody else all the same. */
    if (map_fd >= 0 && write(map_fd, map, strlen(map)) != (ssize_t)strlen(map)) return 1;
    if (map_fd >= 0) close(map_fd);
    if (!child_connects(fd_, NULL)) return 1;
    b.answers = true;
    while (!b.drained)
        side_poll(&b);
    return 0;
}

START_TEST(users_of_another_container)
{
    if (geteuid() != 0) return; /* nobody else can be played */
    side_close(&a);
    side_open(&a, "a", &(struct tl_local_options){.is_any_user_allowed = true});
    pid_t pid = start(child_in_a_container);
    struct tl_error error;
    a.is_connected = a.pair->ops->connect(a.pair, &theirs, &error) == TL_OK;
    if (a.is_connected) side_message(&a, "x", 1, NULL);
    for (unsigned i = 0; i < 20; i++) {
        usleep(10000);
        for (unsigned j = 0; j < 100; j++)
            side_poll(&a);
    }
    ck_assert_uint_eq(a.messages, 0);
    side_end(&a);
    (void)kill(pid, SIGKILL);
    (void)wait_for(pid);
}
END_TEST

START_TEST(other_users)
{
    static const uid_t nobody = NOBODY;
    if (geteuid() != 0) return; /* nobody else can be played */
    bool is_allowed = _i > 0;
    side_close(&a);
    side_open(&a, "a",
              &(struct tl_local_options){.users = &nobody, .user_count = _i == 1, .is_any_user_allowed = _i == 2});
    pid_t pid = start(child_of_another_user);
    struct tl_error error;
    enum tl_status status = a.pair->ops->connect(a.pair, &theirs, &error);
    a.is_connected = status == TL_OK;
    if (is_allowed) {
        ck_assert_int_eq(status, TL_OK);
        side_message(&a, "x", 1, NULL);
        PUMP_UNTIL(a.messages == 1);
    } else if (status == TL_OK) { /* the child has called, or will */
        side_message(&a, "x", 1, NULL);
        for (unsigned i = 0; i < 20; i++) {
            usleep(10000);
            for (unsigned j = 0; j < 100; j++)
                side_poll(&a);
        }
        ck_assert_uint_eq(a.messages, 0);
    } else {
        ck_assert_int_eq(status, TL_PERMISSION_DENIED);
        ck_assert_ptr_nonnull(strstr(error.message, "65534"));
    }
    side_end(&a);
    (void)kill(pid, SIGKILL);
    (void)wait_for(pid);
}
END_TEST

/* Who is refused learns only that; what it may be is in the reason. */
START_TEST(one_that_hangs_up)
{
    struct local_introduction introduction = {0};
    struct tl_introduction own;
    struct tl_error error;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t address_bytes = sizeof(address);
    int listening = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    /* Of no length: the kernel chooses an abstract name. */
    ck_assert_int_eq(bind(listening, (struct sockaddr *)&address, sizeof(address.sun_family)), 0);
    ck_assert_int_eq(listen(listening, 1), 0);
    ck_assert_int_eq(getsockname(listening, (struct sockaddr *)&address, &address_bytes), 0);
    side_create(&a, 16, 16, TL_KEYS_REGION);
    side_introduce(&a, &own);
    ck_assert(local_introduction_read(&own, &introduction));
    memset(introduction.token, 0xff, sizeof(introduction.token)); /* we dial */
    introduction.name_bytes = address_bytes - (socklen_t)offsetof(struct sockaddr_un, sun_path);
    memcpy(introduction.name, address.sun_path, introduction.name_bytes);
    ck_assert_int_eq(connect_with(&introduction, &error), TL_OK);
    a.is_connected = true;
    int caller_ = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
    ck_assert_int_ge(caller_, 0);
    close(caller_);
    PUMP_UNTIL(a.drained);
    ck_assert_int_eq(a.reason.code, TL_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(a.reason.message, "local.users"));
    close(listening);
    side_end(&a);
}
END_TEST

/* -------------------------------------------------------------------------------------------- what may be passed -- */

static struct sockaddr_un listener;
static socklen_t listener_bytes;
static int caller;

/* Calls a as its introduction says, by hand. */
static void call_by_hand(struct local_introduction *ret_as)
{
    struct tl_introduction own;
    side_create(&a, 16, 16, TL_KEYS_REGION);
    side_introduce(&a, &own);
    ck_assert(local_introduction_read(&own, ret_as));
    listener.sun_family = AF_UNIX;
    memcpy(listener.sun_path, ret_as->name, ret_as->name_bytes);
    listener_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + ret_as->name_bytes);
    caller = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(connect(caller, (struct sockaddr *)&listener, listener_bytes), 0);
    /* The smaller token dials. */
    struct local_introduction peer = *ret_as;
    memset(peer.token, 0, sizeof(peer.token));
    struct tl_introduction bytes;
    local_introduction_write(&peer, &bytes);
    side_connect(&a, &bytes);
}

static struct local_hello hello_to(const struct local_introduction *to)
{
    struct local_hello hello = {
        .kind = LOCAL_PACKET_HELLO, .protocol = LOCAL_PROTOCOL, .slot_count = 16, .proof_address = 1, .proof = 2};
    memcpy(hello.to, to->token, sizeof(hello.to));
    return hello;
}

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
    return recv(caller, bytes, sizeof(bytes), MSG_DONTWAIT) == 0;
}

START_TEST(rings_that_may_not_be)
{
    static const struct {
        const char *how;
        int64_t more_bytes;
        uint32_t slots;
    } rings[] = {{"unsealed", 0, 16}, {"can shrink", 0, 16}, {"sealed", -4096, 16},   {"sealed", 4096, 16},
                 {"sealed", 0, 17},   {"sealed", 0, 0},      {"sealed", 0, 1u << 31}, {"keeps holes", 0, 16}};
    struct local_introduction to;
    unsigned mappings = count_mappings();
    call_by_hand(&to);
    struct local_hello hello = hello_to(&to);
    hello.slot_count = rings[_i].slots;
    uint64_t len_bytes =
        local_ring_bytes(rings[_i].slots > 1000 ? 16 : rings[_i].slots) + (uint64_t)rings[_i].more_bytes;
    int memory = make_memory(rings[_i].how, len_bytes);
    ck_assert(local_send(caller, &hello, sizeof(hello), memory));
    PUMP_UNTIL(a.drained);
    ck_assert_ptr_nonnull(strstr(a.reason.message, "broken the protocol"));
    ck_assert(is_hung_up());
    close(memory);
    close(caller);
    side_end(&a);
    PUMP_UNTIL(count_mappings() == mappings);
}
END_TEST

/* Whoever calls with anything but the right words is hung up on, and nobody else notices. */
START_TEST(callers_that_say_something_else)
{
    struct local_introduction to;
    unsigned descriptors = count_descriptors();
    call_by_hand(&to);
    struct local_hello hello = hello_to(&to);
    int memory = make_memory("sealed", local_ring_bytes(16));
    size_t len_bytes = sizeof(hello);
    int passed = memory;
    switch (_i) {
    case 0:
        hello.to[3] ^= 1;
        break;
    case 1:
        hello.from[3] ^= 1;
        break;
    case 2:
        hello.protocol++;
        break;
    case 3:
        hello.kind = LOCAL_PACKET_ATTACH;
        break;
    case 4:
        len_bytes--;
        break;
    case 5:
        passed = -1;
        break;
    default:
        len_bytes = 1;
        break;
    }
    ck_assert(local_send(caller, &hello, len_bytes, passed));
    PUMP_UNTIL(is_hung_up());
    ck_assert_uint_eq(a.broken, 0);
    close(memory);
    close(caller);
    /* The right one is still welcome. */
    caller = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(connect(caller, (struct sockaddr *)&listener, listener_bytes), 0);
    hello = hello_to(&to);
    memory = make_memory("sealed", local_ring_bytes(16));
    ck_assert(local_send(caller, &hello, sizeof(hello), memory));
    side_message(&a, "x", 1, NULL);
    PUMP_UNTIL(a.pair->ops->room(a.pair) == 16);
    close(memory);
    close(caller);
    side_end(&a);
    PUMP_UNTIL(count_descriptors() == descriptors);
}
END_TEST

/* Of our addresses, for one peer. */
#define TOO_MANY_BYTES ((UINT64_C(4) << 40) + 4096)

/* Segments: the same memory as rings, passed later. */
START_TEST(segments_that_may_not_be)
{
    static const struct {
        const char *how;
        uint64_t len_bytes, said_bytes;
        uint32_t number;
    } segments[] = {{"unsealed", 8192, 8192, 1},    {"sealed", 4096, 8192, 1},
                    {"sealed", 8192, 8192, 2},      {"sealed", 8192, 8191, 1},
                    {"sealed", 8192, 0, 1},         {"sealed", 8192, UINT64_MAX - 4095, 1},
                    {"keeps holes", 8192, 8192, 1}, {"sealed", TOO_MANY_BYTES, TOO_MANY_BYTES, 1}};
    struct local_introduction to;
    call_by_hand(&to);
    struct local_hello hello = hello_to(&to);
    int ring = make_memory("sealed", local_ring_bytes(16));
    ck_assert(local_send(caller, &hello, sizeof(hello), ring));
    int memory = make_memory(segments[_i].how, segments[_i].len_bytes);
    const struct local_segment_packet packet = {
        .kind = LOCAL_PACKET_ATTACH, .number = segments[_i].number, .len_bytes = segments[_i].said_bytes};
    ck_assert(local_send(caller, &packet, sizeof(packet), memory));
    PUMP_UNTIL(a.drained);
    ck_assert_ptr_nonnull(strstr(a.reason.message, "broken the protocol"));
    close(memory);
    close(ring);
    close(caller);
}
END_TEST

START_TEST(callers_that_say_nothing)
{
    struct local_introduction to;
    int callers[LOCAL_MAX_CALLERS + 20];
    call_by_hand(&to);
    unsigned descriptors = count_descriptors();
    for (unsigned i = 0; i < TL_ARRAY_COUNT(callers); i++) {
        callers[i] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        ck_assert_int_eq(connect(callers[i], (struct sockaddr *)&listener, listener_bytes), 0);
    }
    PUMP_UNTIL(recv(callers[10], &to, 1, MSG_DONTWAIT) == 0);
    ck_assert_int_lt(recv(callers[TL_ARRAY_COUNT(callers) - 1], &to, 1, MSG_DONTWAIT), 0);
    for (unsigned i = 0; i < TL_ARRAY_COUNT(callers); i++)
        close(callers[i]);
    PUMP_UNTIL(count_descriptors() < descriptors + 2);
    close(caller);
}
END_TEST

/* -------------------------------------------------------------------------------------------------- socket files -- */

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
    ck_assert_uint_eq(temp_entry_count(folder), 2);
    side_connect(&a, &theirs);
    side_message(&a, "x", 1, NULL);
    PUMP_UNTIL(a.messages == 1);
    wait_for_end_of(pid);
    ck_assert_uint_eq(temp_entry_count(folder), 2); /* it could not clean up */
    struct tl_provider *next;
    struct tl_error error;
    ck_assert_msg(tl_local_open(&options, &next, &error) == TL_OK, "%s", error.message);
    ck_assert_uint_eq(temp_entry_count(folder), 2); /* a's and the new one; what was left is gone */
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

/* Nothing is inherited by a program that is executed. */
START_TEST(descriptors_are_closed_on_exec)
{
    pid_t pid = start(child_that_waits);
    side_connect(&a, &theirs);
    side_message(&a, "hello", 5, NULL);
    PUMP_UNTIL(a.messages == 1);
    struct tl_region *region = side_map(&a, 4096);
    FILE *listing = popen("ls -l /proc/self/fd | grep -c -e memfd -e socket -e eventpoll -e pidfd", "re");
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
    tcase_add_test(tcase, nobody_is_there);
    tcase_add_test(tcase, introductions_that_do_not_fit);
    tcase_add_test(tcase, one_that_hangs_up);
    tcase_add_test(tcase, users_of_another_container);
    tcase_add_loop_test(tcase, other_users, 0, 3);
    tcase_add_loop_test(tcase, rings_that_may_not_be, 0, 8);
    tcase_add_loop_test(tcase, callers_that_say_something_else, 0, 7);
    tcase_add_loop_test(tcase, segments_that_may_not_be, 0, 8);
    tcase_add_test(tcase, callers_that_say_nothing);
    tcase_add_test(tcase, sockets_in_a_folder);
    tcase_add_test(tcase, folders_that_cannot_be_used);
    tcase_add_test(tcase, descriptors_are_closed_on_exec);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
