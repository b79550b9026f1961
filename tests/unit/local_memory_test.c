// SPDX-License-Identifier: Apache-2.0
/* Memory of devices that two queue pairs of the local provider show to each other: what is found, and until when. */
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>

#include "dataplane/local/local_internal.h"
#include "fakes/device_case.h"
#include "fakes/local_sides.h"
#include "fakes/run_suite.h"

/* The bytes of a page of devices. */
#define PAGE (2 * MIB)

static struct tl_error error;
static struct tl_descriptor name;
static struct tl_peer_memory memory;
static unsigned fd_count;
static uint64_t gone[4 * LOCAL_MEMORIES];
static unsigned gone_count;

static void on_memory_gone(void *owner, uint64_t number)
{
    (void)owner;
    gone[gone_count++] = number;
}

static void setup(void)
{
    setup_cuda();
    sides_set_up(NULL);
    local_pair_of(b.pair)->events.memory_gone = on_memory_gone;
    fd_count = count_descriptors();
    gone_count = 0;
}

/* No descriptor stays, and no memory. */
static void teardown(void)
{
    sides_tear_down();
    PUMP_UNTIL(count_descriptors() < fd_count);
    teardown_cuda();
}

struct exporting {
    struct tl_device_export base;
    sem_t done;
    int file;
};

static void exported(struct tl_device_export *base, int file, const struct tl_error *status)
{
    struct exporting *exporting = TL_CONTAINER_OF(base, struct exporting, base);
    ck_assert_msg(status->code == TL_OK, "%s", status->message);
    exporting->file = file;
    sem_post(&exporting->done);
}

static int export(const struct tl_tensor *tensor)
{
    struct exporting exporting = {.base = {.memory = tl_tensor_device_memory(tensor), .done = exported}};
    sem_init(&exporting.done, 0, 0);
    tl_device_export_start(&exporting.base);
    sem_wait(&exporting.done);
    return exporting.file;
}

static enum tl_status show(const struct tl_tensor *tensor, int file, uint64_t offset_bytes)
{
    return a.pair->ops->show_memory(a.pair, tl_tensor_device_memory(tensor), file, offset_bytes, &name, &error);
}

/* Shows a tensor that the peer does not have yet, and sends a message, before which the peer has it. */
static void show_and_send(const struct tl_tensor *tensor)
{
    int file = export(tensor);
    unsigned before = b.messages;
    ck_assert_msg(show(tensor, file, 0) == TL_OK, "%s", error.message);
    close(file);
    side_message(&a, "", 0, NULL);
    PUMP_UNTIL(b.messages > before);
}

static enum tl_status find(uint64_t len_bytes, int *ret_file)
{
    return b.pair->ops->find_memory(b.pair, &name, len_bytes, &memory, ret_file, &error);
}

/* The descriptor is passed once; the peer finds the allocation, and has a descriptor of its own. */
START_TEST(shown_once)
{
    int file = -1;
    struct tl_tensor *tensor = bytes_on(gpu0, PAGE);
    ck_assert_int_eq(show(tensor, -1, 0), TL_NOT_FOUND);
    show_and_send(tensor);
    ck_assert_int_eq(show(tensor, -1, 100), TL_OK);
    ck_assert_int_eq(find(PAGE - 100, &file), TL_OK);
    ck_assert_uint_eq(memory.number, 1);
    ck_assert_uint_eq(memory.len_bytes, PAGE);
    ck_assert_uint_eq(memory.offset_bytes, 100);
    ck_assert_int_eq(close(file), 0);
    ck_assert_int_eq(find(1, NULL), TL_OK);
    tl_tensor_put(tensor);
    PUMP_UNTIL(gone_count == 1);
}
END_TEST

START_TEST(beyond_its_end)
{
    struct tl_tensor *tensor = bytes_on(gpu0, PAGE);
    show_and_send(tensor);
    ck_assert_int_eq(show(tensor, -1, _i == 0 ? 1 : PAGE + 1), TL_OK);
    ck_assert_int_eq(find(_i == 0 ? PAGE : 0, NULL), TL_INVALID_ARGUMENT);
    name.len_bytes--;
    ck_assert_int_eq(find(0, NULL), TL_INVALID_ARGUMENT);
    tl_tensor_put(tensor);
}
END_TEST

/* What its owner gives back is not kept by the peer, though nothing else is sent. */
START_TEST(given_back)
{
    struct tl_tensor *first = bytes_on(gpu0, PAGE), *second = bytes_on(gpu0, PAGE);
    show_and_send(first);
    show_and_send(second);
    tl_tensor_put(first);
    PUMP_UNTIL(gone_count == 1);
    ck_assert_uint_eq(gone[0], 1);
    ck_assert_int_eq(find(1, NULL), TL_OK);
    tl_tensor_put(second);
    PUMP_UNTIL(gone_count == 2);
    ck_assert_int_eq(find(1, NULL), TL_NOT_FOUND);
    await_unmaps();
}
END_TEST

#define GIVEN 16

static void *give_back(void *tensors)
{
    for (unsigned i = 0; i < GIVEN; i++) {
        tl_tensor_put(((struct tl_tensor **)tensors)[i]);
        usleep(200); /* The reactor polls meanwhile, so that ThreadSanitizer compares both threads. */
    }
    return NULL;
}

/* Another thread gives memory back while the owner's reactor tells the peer. */
START_TEST(given_back_by_another_thread)
{
    struct tl_tensor *tensors[GIVEN];
    pthread_t thread;
    for (unsigned i = 0; i < GIVEN; i++) {
        tensors[i] = bytes_on(i % 2 ? gpu1 : gpu0, PAGE);
        show_and_send(tensors[i]);
    }
    ck_assert_int_eq(pthread_create(&thread, NULL, give_back, tensors), 0);
    PUMP_UNTIL(gone_count == GIVEN);
    pthread_join(thread, NULL);
    await_unmaps();
}
END_TEST

/* Both sides forget the oldest; what was forgotten is passed again. */
START_TEST(more_than_are_known)
{
    struct tl_tensor *tensors[LOCAL_MEMORIES + 1];
    for (unsigned i = 0; i <= LOCAL_MEMORIES; i++) {
        tensors[i] = bytes_on(gpu0, PAGE);
        show_and_send(tensors[i]);
        ck_assert_int_eq(find(1, NULL), TL_OK);
    }
    ck_assert_uint_eq(gone_count, 1);
    ck_assert_uint_eq(gone[0], 1);
    ck_assert_int_eq(show(tensors[1], -1, 0), TL_OK);
    ck_assert_int_eq(show(tensors[0], -1, 0), TL_NOT_FOUND);
    tl_tensor_put(tensors[0]); /* which no peer knows any more */
    for (unsigned i = 1; i <= LOCAL_MEMORIES; i++)
        tl_tensor_put(tensors[i]);
    PUMP_UNTIL(gone_count == LOCAL_MEMORIES + 1);
}
END_TEST

/* A peer that does not read is passed only so many, and hears of those that are given back later. */
START_TEST(a_peer_that_has_stopped)
{
    struct tl_tensor *tensor = bytes_on(gpu0, PAGE);
    int file = export(tensor);
    struct local_pair *pair = local_pair_of(a.pair);
    ck_assert_int_eq(show(tensor, file, 0), TL_OK);
    close(file);
    struct local_memory_packet packet = {.kind = LOCAL_PACKET_FORGET, .number = 1};
    unsigned sent = 0;
    while (local_send_counted(pair, &packet, sizeof(packet), -1)) /* which the peer does not know any more */
        sent++;
    tl_tensor_put(tensor);
    await_frees(0);
    side_poll(&a);
    ck_assert(!tl_list_is_empty(&pair->memories.untold));
    PUMP_UNTIL(tl_list_is_empty(&pair->memories.untold) && gone_count == 1);
    ck_assert_uint_gt(sent, 1);
}
END_TEST

/* A pair that ends leaves nothing behind, whatever is given back afterwards. */
START_TEST(the_connection_ends)
{
    struct tl_tensor *tensor = bytes_on(gpu0, PAGE);
    show_and_send(tensor);
    if (_i == 1) tl_tensor_put(tensor); /* the reactor has not heard of it */
    side_end(&a);
    PUMP_UNTIL(b.broken > 0 && b.drained > 0);
    if (_i == 0) tl_tensor_put(tensor);
}
END_TEST

/* Sends a packet as a peer that lies would. file: -1: none. */
static void send_packet(uint32_t kind, uint64_t number, size_t len_bytes, int file)
{
    const struct local_memory_packet packet = {.kind = kind, .number = number, .len_bytes = PAGE};
    /* The socket may be full until the other side has read. */
    PUMP_UNTIL(local_send_counted(local_pair_of(a.pair), &packet, len_bytes, file));
}

static int open_null(void)
{
    int file = open("/dev/null", O_RDONLY | O_CLOEXEC);
    ck_assert_int_ge(file, 0);
    return file;
}

/* After memory number 1 has come. The connection ends, and says why. */
START_TEST(wrong_packets)
{
    static const struct {
        uint32_t kind;
        uint64_t number;
        size_t missing_bytes;
        bool has_file;
        const char *reason;
    } cases[] = {
        {LOCAL_PACKET_MEMORY, 0, 0, true, "memory whose number does not follow the one before"},
        {LOCAL_PACKET_MEMORY, 1, 0, true, "memory whose number does not follow the one before"},
        {LOCAL_PACKET_MEMORY, 2, 0, false, "a packet of an unknown kind or of the wrong size"},
        {LOCAL_PACKET_MEMORY, 2, 1, true, "a packet of an unknown kind or of the wrong size"},
        {LOCAL_PACKET_FORGET, 2, 0, false, "FORGET of unknown memory"},
        {LOCAL_PACKET_FORGET, 1, 0, true, "a packet of an unknown kind or of the wrong size"},
        {LOCAL_PACKET_FORGET, 1, 1, false, "a packet of an unknown kind or of the wrong size"},
    };
    int file = open_null();
    send_packet(LOCAL_PACKET_MEMORY, 1, sizeof(struct local_memory_packet), file);
    send_packet(cases[_i].kind, cases[_i].number, sizeof(struct local_memory_packet) - cases[_i].missing_bytes,
                cases[_i].has_file ? file : -1);
    close(file);
    PUMP_UNTIL(b.broken > 0);
    ck_assert_msg(strstr(b.reason.message, cases[_i].reason) != NULL, "%s", b.reason.message);
}
END_TEST

/* However many a peer shows, of whatever numbers, no more descriptors are kept; what is forgotten twice is no fault. */
START_TEST(more_packets_than_are_kept)
{
    int file = open_null();
    unsigned sent = 3 * LOCAL_MEMORIES, before = count_descriptors();
    for (unsigned i = 1; i <= sent; i++) {
        send_packet(LOCAL_PACKET_MEMORY, i, sizeof(struct local_memory_packet), file);
        side_poll(&b);
    }
    PUMP_UNTIL(gone_count == sent - LOCAL_MEMORIES);
    PUMP_UNTIL(count_descriptors() == before + LOCAL_MEMORIES);
    for (unsigned i = 1; i <= sent; i++) {
        send_packet(LOCAL_PACKET_FORGET, i, sizeof(struct local_memory_packet), -1);
        side_poll(&b);
    }
    PUMP_UNTIL(gone_count == sent && count_descriptors() == before);
    send_packet(LOCAL_PACKET_MEMORY, UINT64_MAX, sizeof(struct local_memory_packet), file);
    close(file);
    side_message(&a, "", 0, NULL);
    PUMP_UNTIL(b.messages > 0);
    ck_assert_uint_eq(a.broken + b.broken, 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("local_memory");
    TCase *tcase = tcase_create("local_memory");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, shown_once);
    tcase_add_loop_test(tcase, beyond_its_end, 0, 2);
    tcase_add_test(tcase, given_back);
    tcase_add_test(tcase, given_back_by_another_thread);
    tcase_add_test(tcase, more_than_are_known);
    tcase_add_test(tcase, a_peer_that_has_stopped);
    tcase_add_loop_test(tcase, the_connection_ends, 0, 2);
    tcase_add_loop_test(tcase, wrong_packets, 0, 7);
    tcase_add_test(tcase, more_packets_than_are_kept);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
