// SPDX-License-Identifier: Apache-2.0
/* The peer that makes calls of other processes wait: its memory, its connection, and the sockets that it leaves. */
#include "fakes/waiting_peer.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/memfd.h>
#include <linux/userfaultfd.h>
#include <netinet/in.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/check.h"
#include "fakes/forker.h"
#include "fakes/slow_file.h"

#define SLOTS 16
#define NOBODY 65534
/* How often a socket is passed: more often than an accept socket or a control socket holds. */
#define TIMES 80

_Static_assert(WAITING_PEER_BYTE == SLOW_FILE_BYTE && WAITING_PEER_BYTES <= SLOW_FILE_BYTES, "alike");
_Static_assert(sizeof(WAITING_PEER_WAITS) == sizeof(SLOW_FILE_WAITS), "alike");

static int parent_fd;
static struct slow_file file = {.fd = -1};
static int faults = -1;
static uint8_t *memory;

/* The connection to the process under test. */
static struct local_caller control_socket = {
    .accept_socket = -1, .in = -1, .peers_end = -1, .out = -1, .wake_in = -1, .wake_out = -1};
static struct local_ring ring, theirs;
static const uint64_t proof = 42;

static void say(const char *word)
{
    (void)send(parent_fd, word, strlen(word) + 1, MSG_NOSIGNAL);
}

/* ------------------------------------------------------------------------------------------------- what it has -- */

static const char *have_faults(void)
{
    struct uffdio_api api = {.api = UFFD_API};
    faults = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (faults < 0 || ioctl(faults, UFFDIO_API, &api) != 0) return "userfaultfd is not allowed";
    memory = mmap(NULL, WAITING_PEER_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TL_CHECK(memory != MAP_FAILED);
    struct uffdio_register all = {.range = {.start = (uintptr_t)memory, .len = WAITING_PEER_BYTES},
                                  .mode = UFFDIO_REGISTER_MODE_MISSING};
    return ioctl(faults, UFFDIO_REGISTER, &all) == 0 ? NULL : "userfaultfd knows no missing pages";
}

static const char *have_file(void)
{
    const char *lacking = slow_file_begin(&file, parent_fd);
    if (lacking != NULL) return lacking;
    (void)prctl(PR_SET_DUMPABLE, 1); /* after unshare, other processes may still read our memory */
    memory = mmap(NULL, WAITING_PEER_BYTES, PROT_READ, MAP_SHARED, file.fd, 0);
    TL_CHECK(memory != MAP_FAILED);
    return NULL;
}

static void have_page(void)
{
    memory = mmap(NULL, WAITING_PEER_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TL_CHECK(memory != MAP_FAILED);
    memset(memory, WAITING_PEER_BYTE, WAITING_PEER_BYTES);
}

static void let_go(void)
{
    static _Alignas(WAITING_PEER_BYTES) uint8_t page[WAITING_PEER_BYTES];
    if (file.fd >= 0) slow_file_let_go(&file);
    if (faults < 0) return;
    memset(page, WAITING_PEER_BYTE, sizeof(page));
    struct uffdio_copy copy = {.dst = (uintptr_t)memory, .src = (uintptr_t)page, .len = sizeof(page)};
    TL_CHECK(ioctl(faults, UFFDIO_COPY, &copy) == 0);
}

/* ----------------------------------------------------------------------------------------------------- calling -- */

/* Opens a new control socket, and takes the accept socket that was passed. */
static void begin_line(const struct local_address *to, int accept_socket)
{
    caller_close(&control_socket);
    caller_open(&control_socket, to);
    close(control_socket.accept_socket);
    control_socket.accept_socket = accept_socket;
}

static struct local_hello hello_to(const struct local_address *to)
{
    struct local_hello hello = caller_hello(to, SLOTS);
    hello.proof_address = (uintptr_t)&proof;
    hello.proof = proof;
    return hello;
}

static void post(const struct local_slot *what)
{
    struct local_slot *slot = local_ring_slot(&theirs, theirs.next);
    slot->kind = what->kind;
    slot->flags = what->flags;
    slot->immediate = what->immediate;
    slot->message_bytes = what->message_bytes;
    slot->len_bytes = what->len_bytes;
    slot->source = what->source;
    slot->offset_bytes = what->offset_bytes;
    slot->exposure = what->exposure;
    slot->generation = what->generation;
    atomic_store_explicit(&slot->sequence, ++theirs.next, memory_order_release);
}

static void post_message(void)
{
    post(&(struct local_slot){.kind = LOCAL_SLOT_MESSAGE, .message_bytes = 1});
}

static void *map_ring(int fd, uint32_t slot_count)
{
    void *address = mmap(NULL, local_ring_bytes(slot_count), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    TL_CHECK(address != MAP_FAILED);
    close(fd);
    return address;
}

static void call(const struct local_address *to)
{
    struct local_hello hello = hello_to(to);
    uint64_t len_bytes = local_ring_bytes(SLOTS);
    int fd = memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    TL_CHECK(fd >= 0 && ftruncate(fd, (off_t)len_bytes) == 0);
    TL_CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    local_ring_unmap(&ring);
    local_ring_place(&ring, map_ring(dup(fd), SLOTS), SLOTS);
    caller_call(&control_socket, to, &hello, fd);
    close(fd);
    local_ring_unmap(&theirs);
    fd = caller_take(&control_socket, &hello);
    local_ring_place(&theirs, map_ring(fd, hello.slot_count), hello.slot_count);
    post_message();
}

static void post_read(const struct local_descriptor *place)
{
    post(&(struct local_slot){.kind = LOCAL_SLOT_READ,
                              .flags = file.fd >= 0 ? LOCAL_FLAG_IMMEDIATE | LOCAL_FLAG_MAY_WAIT : LOCAL_FLAG_IMMEDIATE,
                              .immediate = 7,
                              .len_bytes = WAITING_PEER_BYTES,
                              .source = (uintptr_t)memory,
                              .exposure = place->number,
                              .generation = place->generation});
}

/* --------------------------------------------------------------------------------------------------- lingering -- */

/* Makes a socket that is slow to close, because its reader has not taken what was sent. The reader's end stays open
 * here. */
static int make_lingering(int listening, const struct sockaddr_in *address)
{
    static const char bytes[4096];
    static const int small = 4096;
    static const struct linger lingers = {.l_onoff = 1, .l_linger = SLOW_FILE_SECONDS};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    TL_CHECK(fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof(small)) == 0);
    TL_CHECK(connect(fd, (const struct sockaddr *)address, sizeof(*address)) == 0);
    TL_CHECK(accept4(listening, NULL, NULL, SOCK_CLOEXEC) >= 0);
    struct pollfd space = {.fd = fd, .events = POLLOUT};
    while (poll(&space, 1, 2) > 0)
        (void)send(fd, bytes, sizeof(bytes), MSG_DONTWAIT | MSG_NOSIGNAL);
    TL_CHECK(setsockopt(fd, SOL_SOCKET, SO_LINGER, &lingers, sizeof(lingers)) == 0);
    return fd;
}

static const char *listen_for_lingering(int *ret_listening, struct sockaddr_in *ret_address)
{
    static const int small = 4096;
    *ret_address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t address_bytes = sizeof(*ret_address);
    *ret_listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*ret_listening < 0 || bind(*ret_listening, (const struct sockaddr *)ret_address, address_bytes) != 0 ||
        setsockopt(*ret_listening, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small)) != 0 ||
        listen(*ret_listening, 16) != 0 ||
        getsockname(*ret_listening, (struct sockaddr *)ret_address, &address_bytes) != 0)
        return "no TCP over the loopback interface";
    return NULL;
}

static const char *drop_privileges(void)
{
    if (geteuid() != 0 || setgroups(0, NULL) != 0 || setresgid(NOBODY, NOBODY, NOBODY) != 0 ||
        setresuid(NOBODY, NOBODY, NOBODY) != 0)
        return "the process cannot become another user";
    return NULL;
}

/* Sends a HELLO with the lingering socket. Returns false when the accept socket takes no more. */
static bool leave(enum waiting_peer_do what, const struct local_address *to, int lingering)
{
    struct local_hello hello = hello_to(to);
    const int fds[] = {lingering, lingering, lingering};
    if (what == WAITING_PEER_SAY_TOKEN) hello.to[3] ^= 1;
    if (what == WAITING_PEER_SAY_NOTHING) memset(&hello, 0xff, sizeof(hello));
    return caller_say(to, &hello, sizeof(hello), fds, LOCAL_HELLO_DESCRIPTORS);
}

static const char *leave_lingering(enum waiting_peer_do what, const struct local_address *to)
{
    struct sockaddr_in address;
    int listening;
    bool is_space = true;
    const char *lacking = listen_for_lingering(&listening, &address);
    if (lacking == NULL && what == WAITING_PEER_LEAVE_AS_USER) lacking = drop_privileges();
    if (lacking != NULL) return lacking;
    bool is_kept = what == WAITING_PEER_SAY_TOKEN || what == WAITING_PEER_SAY_NOTHING;
    for (unsigned i = 0; i < TIMES && is_space; i++) {
        int fd = make_lingering(listening, &address);
        is_space = leave(what, to, fd);
        if (is_space && !is_kept) close(fd); /* while the descriptor is under way, this close does not linger */
    }
    return NULL;
}
/* ------------------------------------------------------------------------------------------------------ orders -- */

/* Carries out an order. Returns NULL, or what the system lacks for it. */
static const char *carry_out(const struct waiting_peer_order *order)
{
    switch (order->what) {
    case WAITING_PEER_HAS_PAGE:
        have_page();
        return NULL;
    case WAITING_PEER_HAS_FAULTS:
        return have_faults();
    case WAITING_PEER_HAS_FILE:
        return have_file();
    case WAITING_PEER_CALL:
        call(&order->to);
        return NULL;
    case WAITING_PEER_POST_READ:
        post_read(&order->place);
        return NULL;
    case WAITING_PEER_LET_GO:
        let_go();
        return NULL;
    default:
        return leave_lingering(order->what, &order->to);
    }
}

int waiting_peer_run(int fd)
{
    parent_fd = fd;
    alarm(SLOW_FILE_SECONDS);
    for (;;) {
        struct waiting_peer_order order;
        struct uffd_msg fault;
        struct pollfd fds[] = {{.fd = fd, .events = POLLIN}, {.fd = faults, .events = POLLIN}};
        int accept_socket;
        if (poll(fds, 2, -1) < 0) return 1;
        if (fds[1].revents != 0 && read(faults, &fault, sizeof(fault)) == sizeof(fault)) say(WAITING_PEER_WAITS);
        if (fds[0].revents == 0) continue;
        if (forker_take(fd, &order, sizeof(order), &accept_socket) != sizeof(order)) return 0;
        if (accept_socket >= 0) begin_line(&order.to, accept_socket);
        const char *lacking = carry_out(&order);
        say(lacking != NULL ? lacking : WAITING_PEER_DONE);
    }
}
