// SPDX-License-Identifier: Apache-2.0
/* Files that two queue pairs of the local provider pass to each other: which are mapped, which are not, and which
 * stay. */
#include <check.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "dataplane/local/local_internal.h"
#include "fakes/descriptors.h"
#include "fakes/run_suite.h"
#include "tensor/mapped_file.h"
#include "tests/fakes/temp_folder.h"

#define PATIENCE_NS (30 * TL_NS_PER_SEC)

struct side {
    struct tl_provider *provider;
    struct tl_queue_pair *pair;
    unsigned message_count;
    bool is_broken;
    bool is_drained;
    struct tl_error reason;
};

static struct side sides[2];
static struct side *const owner = &sides[0];
static struct side *const reader = &sides[1];
static struct tl_mapped_file *file;
static struct tl_descriptor name;
static struct tl_error error;
static unsigned fd_count;

static void on_message(void *context, const void *data, uint32_t len_bytes)
{
    (void)data;
    (void)len_bytes;
    ((struct side *)context)->message_count++;
}

static void on_immediate(void *context, uint32_t immediate, uint64_t len_bytes)
{
    (void)context;
    (void)immediate;
    (void)len_bytes;
}

static void on_broken(void *context, const struct tl_error *reason)
{
    struct side *side = context;
    side->is_broken = true;
    side->reason = *reason;
}

static void on_drained(void *context)
{
    ((struct side *)context)->is_drained = true;
}

static const struct tl_queue_pair_events events = {
    .message = on_message, .immediate = on_immediate, .broken = on_broken, .drained = on_drained};

static void poll_both(void)
{
    for (unsigned i = 0; i < 2; i++)
        if (sides[i].provider != NULL) (void)sides[i].provider->ops->poll(sides[i].provider);
}

#define UNTIL(condition)                                                                                               \
    do {                                                                                                               \
        int64_t until_ns_ = tl_clock_now_ns() + PATIENCE_NS;                                                           \
        while (!(condition)) {                                                                                         \
            poll_both();                                                                                               \
            ck_assert_msg(tl_clock_now_ns() < until_ns_, "never became true: %s", #condition);                         \
        }                                                                                                              \
    } while (0)

static void open_side(struct side *side)
{
    const struct tl_queue_pair_options options = {.slot_count = 16, .work_count = 16, .keys = TL_KEYS_REGION};
    *side = (struct side){.provider = NULL};
    ck_assert_int_eq(tl_local_open(&(struct tl_local_options){0}, &side->provider, &error), TL_OK);
    ck_assert_int_eq(tl_queue_pair_create(side->provider, &options, &events, side, &side->pair, &error), TL_OK);
}

static void send_to(const struct side *side, struct side *peer)
{
    unsigned count = peer->message_count;
    side->pair->ops->message(side->pair, "m", 1, NULL);
    tl_queue_pair_doorbell(side->pair);
    UNTIL(peer->message_count > count);
}

static void setup(void)
{
    struct tl_pair_address addresses[2];
    temp_folder_make();
    temp_write(temp_path("f"), "hello", 5);
    fd_count = count_descriptors();
    ck_assert_int_eq(tl_mapped_file_open(temp_path("f"), &file, &error), TL_OK);
    for (unsigned i = 0; i < 2; i++) {
        open_side(&sides[i]);
        sides[i].pair->ops->get_address(sides[i].pair, &addresses[i]);
    }
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(sides[i].pair->ops->connect(sides[i].pair, &addresses[1 - i], &error), TL_OK);
    UNTIL(owner->pair->ops->space(owner->pair) > 0 && reader->pair->ops->space(reader->pair) > 0);
    send_to(owner, reader);
    send_to(reader, owner);
}

static void close_side(struct side *side)
{
    if (side->provider == NULL) return;
    struct tl_error reason = {.code = TL_CANCELLED, .message = "over"};
    side->pair->ops->disconnect(side->pair, &reason);
    UNTIL(side->is_drained);
    side->pair->ops->destroy(side->pair);
    side->provider->ops->close(side->provider);
    side->provider = NULL;
}

/* Closes both sides and checks that no descriptor stays open. */
static void teardown(void)
{
    close_side(owner);
    close_side(reader);
    tl_mapped_file_put(file);
    /* A reader that is still taking a packet closes its descriptor afterwards. */
    UNTIL(count_descriptors() == fd_count);
    temp_folder_remove();
}

/* Passes the file and sends a message, before which the reader takes the file. */
static void share(void)
{
    ck_assert_msg(tl_queue_pair_share(owner->pair, file, &name, &error) == TL_OK, "%s", error.message);
    send_to(owner, reader);
}

static struct tl_mapped_file *map(void)
{
    struct tl_mapped_file *mapped = NULL;
    enum tl_status status = tl_queue_pair_map(reader->pair, &name, &mapped, &error);
    ck_assert_msg(status == TL_OK, "%s", error.message);
    return mapped;
}

static void expect_not_mapped(enum tl_status expected)
{
    struct tl_mapped_file *mapped = NULL;
    ck_assert_int_eq(tl_queue_pair_map(reader->pair, &name, &mapped, &error), expected);
    ck_assert_int_eq(error.code, expected);
    ck_assert_ptr_null(mapped);
    ck_assert(!reader->is_broken);
}

START_TEST(passed_once_and_mapped_once)
{
    struct tl_descriptor first;
    share();
    first = name;
    struct tl_mapped_file *mapped = map();
    ck_assert_mem_eq(tl_mapped_file_data(mapped), "hello", 5);
    ck_assert_ptr_ne(tl_mapped_file_data(mapped), tl_mapped_file_data(file));
    ck_assert_str_eq(tl_mapped_file_path(mapped), temp_path("f"));
    unsigned count = count_descriptors();
    share();
    ck_assert_mem_eq(name.bytes, first.bytes, first.len_bytes);
    struct tl_mapped_file *again = map();
    ck_assert_ptr_eq(again, mapped);
    ck_assert_uint_eq(count_descriptors(), count);
    tl_mapped_file_put(again);
    tl_mapped_file_put(mapped);
}
END_TEST

/* Memory is passed each time that it is shared, so that a reader does not keep memory that it does not use. */
START_TEST(memory)
{
    tl_mapped_file_put(file);
    ck_assert_int_eq(tl_mapped_file_make(5, &file, &error), TL_OK);
    memcpy((void *)tl_mapped_file_data(file), "hello", 5);
    unsigned count = count_descriptors();
    for (unsigned i = 0; i < 3; i++) {
        struct tl_descriptor before = name;
        share();
        ck_assert_mem_ne(name.bytes, before.bytes, sizeof(uint64_t));
        struct tl_mapped_file *mapped = map();
        ck_assert_ptr_ne(tl_mapped_file_data(mapped), tl_mapped_file_data(file));
        ck_assert_mem_eq(tl_mapped_file_data(mapped), "hello", 5);
        ck_assert_int_eq(tl_mapped_file_check(mapped, NULL, 0, &error), TL_OK);
        tl_mapped_file_put(mapped);
        ck_assert_uint_eq(count_descriptors(), count);
        expect_not_mapped(TL_NOT_FOUND); /* the memory with this number was mapped once, and is forgotten */
    }
}
END_TEST

START_TEST(outlives_the_owner)
{
    share();
    struct tl_mapped_file *mapped = map();
    ck_assert_int_eq(unlink(temp_path("f")), 0);
    close_side(owner);
    UNTIL(reader->is_drained);
    close_side(reader);
    ck_assert_mem_eq(tl_mapped_file_data(mapped), "hello", 5);
    ck_assert_int_eq(tl_mapped_file_check(mapped, NULL, 0, &error), TL_OK);
    tl_mapped_file_put(mapped);
}
END_TEST

/* The file was passed, but the descriptor that the reader gets is empty. */
START_TEST(never_named)
{
    share();
    name.len_bytes = 0;
    expect_not_mapped(TL_NOT_FOUND);
}
END_TEST

START_TEST(changed_meanwhile)
{
    const struct timespec times[2] = {{.tv_sec = 7}, {.tv_sec = 7}};
    ck_assert_int_eq(tl_queue_pair_share(owner->pair, file, &name, &error), TL_OK);
    if (_i == 3) ck_assert_int_eq(truncate(temp_path("f"), 4), 0);
    send_to(owner, reader);
    if (_i == 0) ck_assert_int_eq(truncate(temp_path("f"), 4), 0);
    if (_i == 1) ck_assert_int_eq(utimensat(AT_FDCWD, temp_path("f"), times, 0), 0);
    if (_i == 2) {
        tl_mapped_file_put(map());
        ck_assert_int_eq(truncate(temp_path("f"), 4), 0);
    }
    expect_not_mapped(TL_DATA_LOSS);
    ck_assert_ptr_nonnull(strstr(error.message, temp_path("f")));
    expect_not_mapped(TL_DATA_LOSS);
}
END_TEST

START_TEST(more_files_than_are_kept)
{
    static struct tl_mapped_file *files[LOCAL_FILES + 1];
    struct tl_descriptor first;
    share();
    first = name;
    struct tl_mapped_file *mapped = map();
    for (unsigned i = 0; i < LOCAL_FILES; i++) {
        ck_assert_int_eq(tl_mapped_file_open(temp_path("f"), &files[i], &error), TL_OK);
        ck_assert_int_eq(tl_queue_pair_share(owner->pair, files[i], &name, &error), TL_OK);
        send_to(owner, reader);
        tl_mapped_file_put(map());
    }
    name = first;
    expect_not_mapped(TL_NOT_FOUND);
    share(); /* the file is passed once more */
    ck_assert_mem_ne(name.bytes, first.bytes, first.len_bytes);
    struct tl_mapped_file *again = map();
    ck_assert_ptr_ne(again, mapped);
    tl_mapped_file_put(again);
    tl_mapped_file_put(mapped);
    for (unsigned i = 0; i < LOCAL_FILES; i++)
        tl_mapped_file_put(files[i]);
}
END_TEST

/* The packet with the file waits behind packets that the reader has not read. */
START_TEST(behind_other_packets)
{
    static struct tl_mapped_file *files[60];
    for (unsigned i = 0; i < TL_ARRAY_COUNT(files); i++) {
        ck_assert_int_eq(tl_mapped_file_open(temp_path("f"), &files[i], &error), TL_OK);
        ck_assert_int_eq(tl_queue_pair_share(owner->pair, files[i], &name, &error), TL_OK);
    }
    share();
    tl_mapped_file_put(map());
    for (unsigned i = 0; i < TL_ARRAY_COUNT(files); i++)
        tl_mapped_file_put(files[i]);
}
END_TEST

/* The reader reads nothing. A file whose packet does not fit into its socket is not passed, so that the tensor is
 * copied. */
START_TEST(socket_is_full)
{
    const struct local_segment_packet packet = {.kind = LOCAL_PACKET_DETACH};
    while (local_send(local_pair_of(owner->pair)->sockets.out, &packet, sizeof(packet), -1)) {
    }
    ck_assert_int_eq(tl_queue_pair_share(owner->pair, file, &name, &error), TL_UNAVAILABLE);
}
END_TEST

START_TEST(not_connected)
{
    close_side(reader);
    UNTIL(owner->is_broken);
    ck_assert_int_eq(tl_queue_pair_share(owner->pair, file, &name, &error), TL_UNAVAILABLE);
}
END_TEST

/* The slot says whether pages of the memory to read may have to come from a file first: then the reader reads it
 * through a buffer. The page of a hole that was never read is not in memory. */
START_TEST(memory_to_read_that_lies_in_a_file)
{
    uint8_t target[5] = {0}, heap[5] = "other";
    struct tl_exposure exposure = {0};
    struct tl_mapped_file *hole = NULL;
    if (reader->pair->outside_refusal != NULL) {
        printf("skipped: %s\n", reader->pair->outside_refusal);
        return;
    }
    temp_write(temp_path("hole"), "", 0);
    ck_assert_int_eq(truncate(temp_path("hole"), 4096), 0);
    ck_assert_int_eq(tl_mapped_file_open(temp_path("hole"), &hole, &error), TL_OK);
    const void *const sources[] = {tl_mapped_file_data(hole), tl_mapped_file_data(file), heap};
    const void *source = sources[_i];
    const struct local_ring *ring = &local_pair_of(owner->pair)->rings.out;
    uint32_t number = ring->next;
    ck_assert_int_eq(tl_queue_pair_expose(reader->pair, NULL, target, sizeof(target), &exposure, &error), TL_OK);
    owner->pair->ops->write(owner->pair, NULL, source, sizeof(target), &exposure.descriptor, 0, false, 0, NULL);
    tl_queue_pair_doorbell(owner->pair);
    ck_assert_int_eq((local_ring_slot(ring, number)->flags & LOCAL_FLAG_MAY_WAIT) != 0, _i == 0);
    send_to(owner, reader);
    ck_assert_mem_eq(target, source, sizeof(target));
    reader->pair->ops->revoke(reader->pair, &exposure, NULL);
    tl_mapped_file_put(hole);
}
END_TEST

/* --------------------------------------------------------------------------------------------- a hostile owner -- */

static bool pass(uint64_t number, int fd, uint64_t size_bytes)
{
    struct stat info;
    ck_assert_int_eq(fstat(fd, &info), 0);
    const struct local_file_packet packet = {.kind = LOCAL_PACKET_FILE,
                                             .number = number,
                                             .size_bytes = size_bytes != 0 ? size_bytes : (uint64_t)info.st_size,
                                             .modified_seconds = info.st_mtim.tv_sec,
                                             .modified_ns = (uint32_t)info.st_mtim.tv_nsec};
    name = (struct tl_descriptor){.len_bytes = sizeof(number)};
    memcpy(name.bytes, &number, sizeof(number));
    return local_send_counted(local_pair_of(owner->pair), &packet, sizeof(packet), fd);
}

static bool pass_and_tell(uint64_t number, int fd, uint64_t size_bytes)
{
    if (!pass(number, fd, size_bytes)) return false;
    send_to(owner, reader);
    return true;
}

START_TEST(no_file)
{
    int fds[2];
    ck_assert_int_eq(pipe2(fds, O_CLOEXEC), 0);
    int folder = open("/", O_RDONLY | O_CLOEXEC);
    int written = open(temp_path("f"), O_WRONLY | O_CLOEXEC);
    ck_assert(pass_and_tell(1, fds[0], 0));
    expect_not_mapped(TL_INVALID_ARGUMENT);
    ck_assert(pass_and_tell(2, folder, 0));
    expect_not_mapped(TL_INVALID_ARGUMENT);
    ck_assert(pass_and_tell(3, written, 0));
    expect_not_mapped(TL_PERMISSION_DENIED);
    close(fds[0]);
    close(fds[1]);
    close(folder);
    close(written);
}
END_TEST

START_TEST(sizes_that_are_not_so)
{
    ck_assert(pass_and_tell(1, tl_mapped_file_fd(file), 6));
    expect_not_mapped(TL_DATA_LOSS);
    ck_assert(pass_and_tell(2, tl_mapped_file_fd(file), UINT64_MAX));
    expect_not_mapped(TL_DATA_LOSS);
}
END_TEST

START_TEST(names_that_are_none)
{
    share();
    name.bytes[0] ^= 1;
    expect_not_mapped(TL_NOT_FOUND);
    memset(name.bytes, 0, sizeof(name.bytes));
    expect_not_mapped(TL_NOT_FOUND);
    memset(name.bytes, 0xff, sizeof(name.bytes));
    expect_not_mapped(TL_NOT_FOUND);
    name.len_bytes = TL_DESCRIPTOR_MAX_BYTES;
    expect_not_mapped(TL_NOT_FOUND);
}
END_TEST

/* Numbers that do not increase and a packet without a descriptor break the protocol. */
START_TEST(wrong_packets)
{
    ck_assert(pass(_i == 0 ? 5 : 1, tl_mapped_file_fd(file), 0));
    if (_i == 0) ck_assert(pass(5, tl_mapped_file_fd(file), 0));
    if (_i == 1) ck_assert(pass(0, tl_mapped_file_fd(file), 0));
    if (_i == 2) {
        const struct local_file_packet packet = {.kind = LOCAL_PACKET_FILE, .number = 2};
        ck_assert(local_send(local_pair_of(owner->pair)->sockets.out, &packet, sizeof(packet), -1));
    }
    UNTIL(reader->is_broken);
    ck_assert_ptr_nonnull(strstr(reader->reason.message, "broken the protocol"));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("local_files");
    TCase *tcase = tcase_create("local_files");
    tcase_set_timeout(tcase, 60);
    tcase_add_checked_fixture(tcase, setup, teardown);
    tcase_add_test(tcase, passed_once_and_mapped_once);
    tcase_add_test(tcase, memory);
    tcase_add_test(tcase, outlives_the_owner);
    tcase_add_test(tcase, never_named);
    tcase_add_loop_test(tcase, changed_meanwhile, 0, 4);
    tcase_add_test(tcase, more_files_than_are_kept);
    tcase_add_test(tcase, behind_other_packets);
    tcase_add_test(tcase, socket_is_full);
    tcase_add_test(tcase, not_connected);
    tcase_add_loop_test(tcase, memory_to_read_that_lies_in_a_file, 0, 3);
    tcase_add_test(tcase, no_file);
    tcase_add_test(tcase, sizes_that_are_not_so);
    tcase_add_test(tcase, names_that_are_none);
    tcase_add_loop_test(tcase, wrong_packets, 0, 3);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
