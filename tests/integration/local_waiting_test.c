// SPDX-License-Identifier: Apache-2.0
/*
 * The local provider and a peer that makes calls of the kernel wait: it can delay its own requests only. A worker has
 * two queue pairs: one with a bystander, b, and one with the peer, a process that speaks the protocol by hand. While
 * that peer makes a call wait (memory whose pages do not come, sockets that linger), messages go to and fro between a
 * and b.
 *
 * The tests do not depend on speed. Each call of the provider must return within LIMIT_NS; a call that waits for the
 * peer would take until the peer's process ends, SLOW_FILE_SECONDS after its start.
 */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dataplane/local/local_internal.h"
#include "fakes/forker.h"
#include "fakes/local_sides.h"
#include "fakes/run_suite.h"
#include "fakes/slow_file.h"
#include "fakes/temp_folder.h"
#include "fakes/waiting_peer.h"

#define LIMIT_NS (20 * TL_NS_PER_SEC)
#define ROUNDS 200
#define GUARD 0xa5
#define USERS_BYTES (4 * WAITING_PEER_BYTES)

_Static_assert(LIMIT_NS < SLOW_FILE_SECONDS * TL_NS_PER_SEC, "a call that waits can be distinguished from a slow one");

static struct side victim; /* the other pair of a's provider */
static struct {
    pid_t pid;
    int fd;
    unsigned waits; /* how many calls wait for the peer, as it has reported */
    bool has_answered;
    char answer[200];
} peer;

#define IN_TIME(statement)                                                                                             \
    do {                                                                                                               \
        int64_t begun_ns_ = tl_clock_now_ns();                                                                         \
        statement;                                                                                                     \
        ck_assert_msg(tl_clock_now_ns() - begun_ns_ < LIMIT_NS, "the peer has made us wait in: %s", #statement);       \
    } while (0)

static void hear_peer(void)
{
    char word[sizeof(peer.answer)];
    ssize_t len_bytes;
    while ((len_bytes = recv(peer.fd, word, sizeof(word), MSG_DONTWAIT)) > 0) {
        word[len_bytes - 1] = '\0';
        if (strcmp(word, WAITING_PEER_WAITS) == 0) {
            peer.waits++;
        } else {
            memcpy(peer.answer, word, sizeof(word));
            peer.has_answered = true;
        }
    }
}

static void poll_all(void)
{
    IN_TIME(side_poll(&a));
    side_poll(&b);
    hear_peer();
}

#define AWAIT(condition)                                                                                               \
    do {                                                                                                               \
        int64_t end_ns_ = tl_clock_now_ns() + LIMIT_NS;                                                                \
        while (!(condition)) {                                                                                         \
            poll_all();                                                                                                \
            ck_assert_msg(tl_clock_now_ns() < end_ns_, "never: %s (a: %s, victim: %s, peer: %s)", #condition,          \
                          a.reason.message, victim.reason.message, peer.answer);                                       \
        }                                                                                                              \
    } while (0)

/* Sends messages to and fro between a and b, and checks that neither is broken. */
static void bystander_goes_on(void)
{
    for (unsigned i = 0; i < ROUNDS; i++) {
        unsigned messages = a.messages;
        AWAIT(a.pair->ops->space(a.pair) > 0);
        side_message(&a, &i, sizeof(i), NULL);
        AWAIT(a.messages == messages + 1);
        ck_assert_mem_eq(a.last, &i, sizeof(i));
    }
    ck_assert_uint_eq(a.broken + b.broken, 0);
}

/* ---------------------------------------------------------------------------------------------------- the peer -- */

static void send_order(const struct waiting_peer_order *order, int accept_socket)
{
    peer.has_answered = false;
    ck_assert(forker_pass(peer.fd, order, sizeof(*order), accept_socket));
}

/* Returns false when the system lacks something for the order; prints what that is. */
static bool is_done(void)
{
    bool is_lacking = strcmp(peer.answer, WAITING_PEER_DONE) != 0;
    if (is_lacking) printf("skipped: %s\n", peer.answer);
    return !is_lacking;
}

static bool peer_does_this(const struct waiting_peer_order *order)
{
    send_order(order, -1);
    AWAIT(peer.has_answered);
    return is_done();
}

static bool peer_does(enum waiting_peer_do what)
{
    return peer_does_this(&(struct waiting_peer_order){.what = what});
}

static void read_address(const struct side *side, struct local_address *ret_pair_address)
{
    struct tl_pair_address bytes;
    side_get_address(side, &bytes);
    ck_assert(local_address_read(&bytes, ret_pair_address));
}

static enum tl_status create_victim(struct tl_error *ret_error)
{
    const struct tl_queue_pair_options options = {.slot_count = 16, .work_count = 16, .keys = TL_KEYS_REGION};
    victim = (struct side){.name = "victim", .provider = a.provider};
    return tl_queue_pair_create(a.provider, &options, &side_events, &victim, &victim.pair, ret_error);
}

/* Connects the victim to the peer, and has the peer send its HELLO to the victim. */
static void peer_calls(void)
{
    struct waiting_peer_order order = {.what = WAITING_PEER_CALL};
    struct local_caller caller;
    struct tl_pair_address bytes;
    read_address(&victim, &order.to);
    caller_open(&caller, &order.to);
    local_address_write(&caller.self, &bytes);
    side_connect(&victim, &bytes);
    send_order(&order, caller.accept_socket);
    caller_close(&caller);
    AWAIT(peer.has_answered);
    ck_assert(is_done());
}

static void create_and_call(void)
{
    struct tl_error error = {0};
    ck_assert_msg(create_victim(&error) == TL_OK, "%s", error.message);
    peer_calls();
    AWAIT(victim.messages == 1);
}

static void end_victim(void)
{
    if (!victim.drained) IN_TIME(side_disconnect(&victim));
    AWAIT(victim.drained);
    IN_TIME(victim.pair->ops->destroy(victim.pair));
    victim.pair = NULL;
}

/* ----------------------------------------------------------------------------------------------------- fixture -- */

static void setup(void)
{
    forker_open();
    victim = (struct side){.name = "victim"};
    memset(&peer, 0, sizeof(peer));
    peer.pid = forker_start(waiting_peer_run, &peer.fd);
}

static void set_up_sides(const struct tl_local_options *options)
{
    sides_set_up(options);
    b.answers = true;
    bystander_goes_on();
}

static void teardown(void)
{
    forker_close(); /* the peer ends, so that no call waits for it any more */
    if (victim.pair != NULL) end_victim();
    sides_tear_down();
    close(peer.fd);
}

/* ------------------------------------------------------------------------------------------------------ memory -- */

static uint8_t *users;
static struct tl_exposure exposure;

/* Returns whether the bytes are unchanged. The sanitizer is off because a thread may write them meanwhile, which is
 * what the tests look for. */
__attribute__((no_sanitize("thread"))) static bool is_guarded(uint64_t first, uint64_t end)
{
    bool is_guard = true;
    for (uint64_t i = first; i < end; i++)
        is_guard &= users[i] == GUARD;
    return is_guard;
}

/* Has the peer post a slot that asks us to read its memory. Returns false when the system lacks something for that. */
static bool begin_to_read(enum waiting_peer_do memory)
{
    set_up_sides(NULL);
    if (!peer_does(memory)) return false;
    create_and_call();
    if (victim.pair->outside_refusal != NULL) {
        printf("skipped: %s\n", victim.pair->outside_refusal);
        return false;
    }
    users = malloc(USERS_BYTES);
    ck_assert_ptr_nonnull(users);
    memset(users, GUARD, USERS_BYTES);
    side_expose(&victim, NULL, users + WAITING_PEER_BYTES, WAITING_PEER_BYTES, &exposure);
    struct waiting_peer_order order = {.what = WAITING_PEER_POST_READ};
    memcpy(&order.place, exposure.descriptor.bytes, sizeof(order.place));
    ck_assert(peer_does_this(&order));
    return true;
}

static void peer_has_been_read(void)
{
    AWAIT(victim.immediates == 1);
    ck_assert_uint_eq(victim.last_immediate, 7);
    ck_assert_uint_eq(victim.last_immediate_len, WAITING_PEER_BYTES);
    bool is_right = true;
    for (uint64_t i = 0; i < WAITING_PEER_BYTES; i++)
        is_right &= users[WAITING_PEER_BYTES + i] == WAITING_PEER_BYTE;
    ck_assert(is_right);
    ck_assert(is_guarded(0, WAITING_PEER_BYTES) && is_guarded(2 * WAITING_PEER_BYTES, USERS_BYTES));
    victim.pair->ops->revoke(victim.pair, &exposure, NULL);
    end_victim();
    free(users);
}

/* Without waiting, the peer's read completes as any other: the peer keeps to the protocol. */
START_TEST(memory_that_is_there)
{
    if (!begin_to_read(WAITING_PEER_HAS_PAGE)) return;
    peer_has_been_read();
    ck_assert_uint_eq(peer.waits, 0);
}
END_TEST

static const enum waiting_peer_do memories[] = {WAITING_PEER_HAS_FAULTS, WAITING_PEER_HAS_FILE};

START_TEST(memory_that_comes_late)
{
    if (!begin_to_read(memories[_i])) return;
    AWAIT(peer.waits > 0);
    bystander_goes_on();
    ck_assert_uint_eq(victim.immediates, 0);
    ck_assert(is_guarded(0, USERS_BYTES));
    ck_assert(peer_does(WAITING_PEER_LET_GO));
    peer_has_been_read();
    bystander_goes_on();
}
END_TEST

/* The connection ends before any byte was read. Memory of a file is read through a buffer, so that the destination is
 * given back at once. Other memory is read straight into the destination, which is given back when the call returns. */
START_TEST(memory_that_comes_too_late)
{
    bool is_file = memories[_i] == WAITING_PEER_HAS_FILE;
    if (!begin_to_read(memories[_i])) return;
    AWAIT(peer.waits > 0);
    bystander_goes_on();
    IN_TIME(side_disconnect(&victim));
    if (is_file) AWAIT(victim.drained);
    bystander_goes_on();
    ck_assert_uint_eq(victim.drained, is_file);
    ck_assert(is_guarded(0, USERS_BYTES));
    ck_assert(peer_does(WAITING_PEER_LET_GO));
    AWAIT(victim.drained);
    for (unsigned i = 0; i < 50; i++) { /* gives a call that has waited time to go on */
        usleep(10000);
        poll_all();
    }
    ck_assert(is_guarded(0, is_file ? USERS_BYTES : WAITING_PEER_BYTES));
    ck_assert(is_guarded(2 * WAITING_PEER_BYTES, USERS_BYTES));
    ck_assert_uint_eq(victim.immediates, 0);
    end_victim();
    bystander_goes_on();
    free(users);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- sockets -- */

static const enum waiting_peer_do unknown_callers[] = {WAITING_PEER_SAY_TOKEN, WAITING_PEER_SAY_NOTHING};

/* Has the peer leave its sockets before any provider is polled. Returns false when the system lacks something for
 * that. */
static bool peer_leaves(enum waiting_peer_do how, const struct side *side)
{
    struct waiting_peer_order order = {.what = how};
    read_address(side, &order.to);
    send_order(&order, -1);
    while (!peer.has_answered) {
        struct pollfd fd = {.fd = peer.fd, .events = POLLIN};
        ck_assert_int_eq(poll(&fd, 1, (int)(LIMIT_NS / TL_NS_PER_MS)), 1);
        hear_peer();
    }
    return is_done();
}

/* A process that does not know the token leaves nothing in the accept socket, so that the peer's HELLO finds space
 * there. */
START_TEST(unknown_callers_at_the_accept_socket)
{
    struct tl_error error = {0};
    union local_packet packet;
    struct ucred credentials;
    set_up_sides(NULL);
    ck_assert_msg(create_victim(&error) == TL_OK, "%s", error.message);
    if (!peer_leaves(unknown_callers[_i], &victim)) return;
    ck_assert_int_eq(local_peek_packet(local_pair_of(victim.pair)->sockets.accept, &packet, &credentials),
                     TL_UNIX_NOTHING);
    bystander_goes_on();
    peer_calls();
    AWAIT(victim.messages == 1);
    end_victim();
}
END_TEST

static void nothing_lingers_any_more(unsigned descriptors)
{
    ck_assert_int_eq(kill(peer.pid, SIGKILL), 0);
    (void)forker_wait(peer.pid);
    AWAIT(count_descriptors() == descriptors);
    bystander_goes_on();
}

/* A process of another user, which knows the token, leaves sockets that linger: it is refused, and a thread closes
 * them. */
START_TEST(sockets_that_linger)
{
    struct tl_error error = {0};
    struct tl_pair_address bytes;
    struct local_address to;
    struct local_caller caller;
    set_up_sides(NULL);
    unsigned descriptors = count_descriptors();
    ck_assert_msg(create_victim(&error) == TL_OK, "%s", error.message);
    if (!peer_leaves(WAITING_PEER_LEAVE_AS_USER, &victim)) return;
    read_address(&victim, &to);
    caller_open(&caller, &to);
    local_address_write(&caller.self, &bytes);
    side_connect(&victim, &bytes);
    bystander_goes_on();
    AWAIT(victim.drained);
    ck_assert_int_eq(victim.reason.code, TL_PERMISSION_DENIED);
    end_victim();
    bystander_goes_on();
    caller_close(&caller);
    nothing_lingers_any_more(descriptors);
}
END_TEST

/* Sockets that linger lie in the accept socket of a queue pair that ends before it is connected, together with its
 * provider. */
START_TEST(sockets_that_were_not_looked_at)
{
    struct side other;
    set_up_sides(NULL);
    unsigned descriptors = count_descriptors();
    side_open(&other, "other", NULL);
    side_create(&other, 16, 16, TL_KEYS_REGION);
    bool have_left = peer_leaves(WAITING_PEER_LEAVE_AS_USER, &other);
    IN_TIME(other.pair->ops->destroy(other.pair));
    IN_TIME(other.provider->ops->close(other.provider));
    if (!have_left) return;
    bystander_goes_on();
    nothing_lingers_any_more(descriptors);
}
END_TEST

/* ------------------------------------------------------------------------------------------------------- names -- */

#define SOCKET_NAME "tensorlane-0123456789abcdef.sock"

/* The peer's address names an accept socket outside of the folder: nothing is sent to that socket. */
START_TEST(a_name_that_leads_elsewhere)
{
    char own_folder[sizeof(temp_folder) + 8], byte;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct local_address named_elsewhere;
    struct tl_pair_address bytes;
    struct tl_error error = {0};
    temp_folder_make();
    snprintf(own_folder, sizeof(own_folder), "%s/own", temp_folder);
    ck_assert_int_eq(mkdir(own_folder, 0700), 0);
    set_up_sides(&(struct tl_local_options){.socket_folder = own_folder});
    snprintf(address.sun_path, sizeof(address.sun_path), "%.70s/" SOCKET_NAME, temp_folder);
    int accept_socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    ck_assert_int_eq(bind(accept_socket, (const struct sockaddr *)&address, sizeof(address)), 0);
    ck_assert_msg(create_victim(&error) == TL_OK, "%s", error.message);
    read_address(&victim, &named_elsewhere);
    named_elsewhere.token[0] ^= 1;
    named_elsewhere.name_bytes = (uint8_t)(strlen(address.sun_path) + 1);
    memcpy(named_elsewhere.name, address.sun_path, named_elsewhere.name_bytes);
    local_address_write(&named_elsewhere, &bytes);
    ck_assert_int_eq(victim.pair->ops->connect(victim.pair, &bytes, &error), TL_UNAVAILABLE);
    ck_assert_int_lt(recv(accept_socket, &byte, sizeof(byte), 0), 0);
    victim.pair->ops->destroy(victim.pair);
    victim.pair = NULL;
    close(accept_socket);
    temp_folder_remove();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("local_waiting");
    TCase *tcase = tcase_create("local_waiting");
    tcase_set_timeout(tcase, 100);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, memory_that_is_there);
    tcase_add_loop_test(tcase, memory_that_comes_late, 0, 2);
    tcase_add_loop_test(tcase, memory_that_comes_too_late, 0, 2);
    tcase_add_loop_test(tcase, unknown_callers_at_the_accept_socket, 0, 2);
    tcase_add_test(tcase, sockets_that_linger);
    tcase_add_test(tcase, sockets_that_were_not_looked_at);
    tcase_add_test(tcase, a_name_that_leads_elsewhere);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
